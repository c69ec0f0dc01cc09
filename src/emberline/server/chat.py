"""`POST /v1/chat/completions`: conversations answered. Owns the shape of its choices."""

from __future__ import annotations

from fastapi import Request as HttpRequest
from fastapi import Response

from emberline.server.call import Call, Frame
from emberline.server.chat_body import ChatBody
from emberline.server.prompts import EncodedPrompt
from emberline.server.records import Json, RecordFormat
from emberline.server.service import Service, new_id
from emberline.types import Request, RequestOutput


async def create_chat_completion(service: Service, http: HttpRequest) -> Response:
    """Answer one call, at once or as a stream."""
    body = await service.read(ChatBody, http)
    params = await service.params(body, width="top_logprobs")
    timeout = service.timeout(body.timeout)
    service.check_num_choices(1, params.n)
    metrics = service.wants_metrics(body.per_request_metrics, params.n)
    prompt = await service.encoder.chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        template_kwargs=body.chat_template_kwargs,
    )
    own_id = new_id("chatcmpl")  # two calls may want one id: their requests have their own
    answer_id = new_id("chatcmpl", body.request_id) if body.request_id else own_id
    frame = Frame(answer_id, "chat.completion", "chat.completion.chunk", params.n)
    form = RecordFormat(
        service.engine.token_text,
        params,
        as_ids=body.return_tokens_as_token_ids,
        with_ids=body.return_token_ids,
    )
    requests = [
        Request(
            f"{own_id}-{index}",
            prompt.token_ids,
            params,
            choice=index,
            priority=body.priority,
            timeout=timeout,
        )
        for index in range(params.n)
    ]
    formats = [_ChatFormat(index, prompt, body, form) for index in range(params.n)]
    call = Call(service, frame, requests, formats, body.stream_options, metrics=metrics)
    return call.stream() if body.stream else await call.answer(http)


class _ChatFormat:
    """A choice: a message or its deltas, with one record a token."""

    def __init__(
        self, index: int, prompt: EncodedPrompt, body: ChatBody, form: RecordFormat
    ) -> None:
        self._index, self._prompt, self._body, self._form = index, prompt, body, form
        self._first = True

    def whole(self, output: RequestOutput) -> Json:
        """The choice of an answer that is not streamed."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return self._choice({"message": message}, output)

    def deltas(self, output: RequestOutput) -> list[Json]:
        """The role before anything else, then what there is of text and records."""
        choices = []
        if self._first:
            self._first = False
            opening = {"role": "assistant", "content": ""}
            choices.append({"index": self._index, "delta": opening, "logprobs": None})
        choice = self._choice({"delta": {"content": output.text}}, output)
        records = choice["logprobs"] and choice["logprobs"]["content"]
        if output.text or records or choice.get("token_ids"):
            choices.append(choice)
        return choices

    def end(self) -> Json:
        """The choice of the last chunk."""
        return {"index": self._index, "delta": {}, "logprobs": None}

    def root(self, output: RequestOutput) -> Json:
        """What is asked about the prompt, which all choices share."""
        root: Json = {}
        if self._body.return_token_ids:
            root["prompt_token_ids"] = list(self._prompt.token_ids)
        if self._body.prompt_logprobs is not None:
            root["prompt_logprobs"] = self._form.prompt_entries(output.prompt_logprobs)
        return root

    def _choice(self, said: Json, output: RequestOutput) -> Json:
        logprobs = None
        if self._body.logprobs:
            logprobs = {"content": self._form.chat_entries(output.logprobs or ()), "refusal": None}
        choice = {"index": self._index, **said, "logprobs": logprobs}
        if self._body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        return choice
