"""`POST /tokenize` and `/detokenize`, in the dialects of vLLM and llama.cpp."""

from __future__ import annotations

from fastapi import Request as HttpRequest
from fastapi import Response

from emberline.server.records import Json
from emberline.server.service import Service
from emberline.server.stream import Answer
from emberline.server.tokens_body import DetokenizeBody, TokenizeBody
from emberline.server.turns import off_loop
from emberline.types import InvalidRequest


async def tokenize(service: Service, http: HttpRequest) -> Response:
    """Token ids of a text or a conversation."""
    body = await service.read(TokenizeBody, http)
    given = [body.prompt, body.messages, body.content]
    if sum(value is not None for value in given) != 1:
        raise InvalidRequest("give one of prompt, messages and content", "prompt")
    encoder, text = service.encoder, service.engine.token_text
    if body.messages is not None:
        prompt = await encoder.chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            template_kwargs=body.chat_template_kwargs,
        )
        token_ids = list(prompt.token_ids)
    else:
        source = body.prompt if body.prompt is not None else body.content or ""
        # vLLM adds special tokens to a prompt unless told not to; llama.cpp to no content.
        adds = body.add_special if body.prompt is None else body.add_special_tokens is not False
        token_ids = await off_loop(len(source), lambda: encoder.encode(source, adds))
    if body.with_pieces:
        return Answer({"tokens": [{"id": i, "piece": text.token_str(i)} for i in token_ids]})
    answer: Json = {
        "count": len(token_ids),
        "max_model_len": encoder.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [text.token_str(i) for i in token_ids]
    return Answer(answer)


async def detokenize(service: Service, http: HttpRequest) -> Response:
    """The text of token ids, special tokens included."""
    body = await service.read(DetokenizeBody, http)
    service.encoder.check_ids(body.tokens, "tokens")
    text = service.engine.token_text.text_of(body.tokens)
    return Answer({"prompt": text, "content": text})


def tokenizer_info(service: Service) -> Json:
    """What a remote client needs to know of the tokenizer."""
    tokenizer = service.encoder.tokenizer
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "chat_template": tokenizer.chat_template,
        "model_max_length": service.encoder.max_model_len,
    }
