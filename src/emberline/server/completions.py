"""`POST /v1/completions`: prompts continued, echoed, scored. Owns the shape of its choices."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request as HttpRequest
from fastapi import Response

from emberline.server.call import AnswerFacts, Call, ChoiceFormat, Frame
from emberline.server.prompts import EncodedPrompt
from emberline.server.protocol import DEFAULT_COMPLETION_TOKENS, CompletionBody
from emberline.server.records import Json, RecordFormat, TextOffsets
from emberline.server.service import Service, new_id
from emberline.server.structured import asked_grammar
from emberline.types import Request, RequestOutput, SamplingParams


async def create_completion(service: Service, http: HttpRequest) -> Response:
    """Answer one call, at once or as a stream."""
    body = await service.read(CompletionBody, http)
    params = await _with_grammar(service, body, await service.params(body))
    timeout = service.timeout(body.timeout)
    service.check_num_choices(len(body.prompts), params.n)
    metrics = service.wants_metrics(body.per_request_metrics, len(body.prompts) * params.n)
    prompts = await service.encoder.prompts(
        body.prompts,
        add_special_tokens=body.add_special_tokens,
        echo=body.echo,
        skip_special_tokens=body.skip_special_tokens,
    )
    own_id = new_id("cmpl")  # two calls may want one id: their requests have their own
    answer_id = new_id("cmpl", body.request_id) if body.request_id else own_id
    frame = Frame(answer_id, "text_completion", "text_completion", params.n)
    requests: list[Request] = []
    formats: list[ChoiceFormat] = []
    for prompt in prompts:
        own = _with_limit(params, service.engine.max_request_tokens - len(prompt.token_ids))
        form = RecordFormat(
            service.engine.token_text,
            own,
            as_ids=body.return_tokens_as_token_ids,
            with_ids=body.return_token_ids,
        )
        for choice in range(params.n):
            index = len(requests)
            request_id = f"{own_id}-{index}"
            requests.append(
                Request(
                    request_id,
                    prompt.token_ids,
                    own,
                    choice=choice,
                    priority=body.priority,
                    timeout=timeout,
                )
            )
            formats.append(_CompletionFormat(index, prompt, body, form))
    call = Call(service, frame, requests, formats, body.stream_options, metrics=metrics)
    return call.stream() if body.stream else await call.answer(http)


async def _with_grammar(
    service: Service, body: CompletionBody, params: SamplingParams
) -> SamplingParams:
    """The options with what the answer must match, if the body says it."""
    tokens = service.encoder.named_tokens
    grammar = await service.grammar(asked_grammar(body, tokens))
    return params if grammar is None else replace(params, grammar=grammar)


def _with_limit(params: SamplingParams, room: int) -> SamplingParams:
    """OpenAI's default of 16 tokens, or what the context has left."""
    if params.max_tokens is not None:
        return params
    return replace(
        params, max_tokens=max(1, params.min_tokens, min(DEFAULT_COMPLETION_TOKENS, room))
    )


class _CompletionFormat:
    """A choice: text, four arrays, and the echoed prompt before its first text."""

    def __init__(
        self, index: int, prompt: EncodedPrompt, body: CompletionBody, form: RecordFormat
    ) -> None:
        self._index, self._prompt, self._body, self._form = index, prompt, body, form
        self._offsets = TextOffsets(len(prompt.text))
        self._first = True

    @property
    def facts(self) -> AnswerFacts:
        """See `ChoiceFormat`: a completion is text and nothing else."""
        return AnswerFacts()

    def whole(self, output: RequestOutput) -> Json:
        """The choice of an answer that is not streamed."""
        return self._choice(output)

    def deltas(self, output: RequestOutput) -> list[Json]:
        """At most one choice."""
        first, choice = self._first, self._choice(output)
        logprobs = choice["logprobs"]
        says = choice["text"] or (logprobs and logprobs["tokens"]) or choice.get("token_ids")
        return [choice] if says or (first and len(choice) > 3) else []

    def end(self) -> Json:
        """The choice of the last chunk."""
        return {"index": self._index, "text": "", "logprobs": None}

    def root(self, output: RequestOutput) -> Json:  # noqa: ARG002
        """Nothing: prompts differ from choice to choice."""
        return {}

    def _choice(self, output: RequestOutput) -> Json:
        echo = self._first and self._body.echo
        choice: Json = {
            "index": self._index,
            "text": self._prompt.text + output.text if echo else output.text,
            "logprobs": self._arrays(output, echo=echo),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        if self._first and self._body.return_token_ids:
            choice["prompt_token_ids"] = list(self._prompt.token_ids)
        if self._first and self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._form.prompt_entries(output.prompt_logprobs)
        self._first = False
        return choice

    def _arrays(self, output: RequestOutput, *, echo: bool) -> Json | None:
        """The four arrays, the prompt's entries before the first token's when it is echoed."""
        if self._body.num_logprobs is None:
            return None
        form, ids = self._form, list(output.token_ids)
        offsets = [self._offsets.next(form.text.visible_bytes(i, form.params)) for i in ids]
        if not echo:
            return form.completion_arrays(ids, output.logprobs or (), offsets)
        start = TextOffsets()
        # Without values where the time was over before the prompt had been scored.
        scored = output.prompt_logprobs or (None,) * len(self._prompt.token_ids)
        return form.completion_arrays(
            [*self._prompt.token_ids, *ids],
            [*scored, *(output.logprobs or ())],
            [*map(start.next, self._prompt.pieces), *offsets],
        )
