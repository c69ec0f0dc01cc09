"""`POST /v1/chat/completions`: conversations answered."""

from __future__ import annotations

from fastapi import Request as HttpRequest
from fastapi import Response

from emberline.server.call import Call, Frame
from emberline.server.chat_body import ChatBody
from emberline.server.chat_format import ChatFormat, PartsFormat
from emberline.server.conversation import Conversation, Plan, plan
from emberline.server.reasoning import Thinking
from emberline.server.records import RecordFormat
from emberline.server.service import Service, new_id
from emberline.server.structured import asked_grammar
from emberline.types import Request


async def create_chat_completion(service: Service, http: HttpRequest) -> Response:
    """Answer one call, at once or as a stream."""
    body = await service.read(ChatBody, http)
    params = await service.params(body, width="top_logprobs")
    timeout = service.timeout(body.timeout)
    service.check_num_choices(1, params.n)
    metrics = service.wants_metrics(body.per_request_metrics, params.n)
    planned = await plan(service, _conversation(service, body), params)
    prediction: tuple[int, ...] = ()
    if body.prediction is not None:
        prediction = await service.encoder.prediction(body.prediction.text)
    own_id = new_id("chatcmpl")  # two calls may want one id: their requests have their own
    answer_id = new_id("chatcmpl", body.request_id) if body.request_id else own_id
    frame = Frame(answer_id, "chat.completion", "chat.completion.chunk", params.n)
    requests = [
        Request(
            request_id=f"{own_id}-{index}",
            prompt_token_ids=planned.prompt.token_ids,
            params=planned.params,
            prediction=prediction,
            choice=index,
            priority=body.priority,
            timeout=timeout,
        )
        for index in range(params.n)
    ]
    formats = [_format(service, body, planned, index) for index in range(params.n)]
    call = Call(
        service,
        frame,
        requests,
        formats,
        body.stream_options,
        metrics=metrics,
        in_words=body.in_its_words,
    )
    return call.stream() if body.stream else await call.answer(http)


def _conversation(service: Service, body: ChatBody) -> Conversation:
    return Conversation(
        messages=body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        grammar=asked_grammar(body, service.encoder.named_tokens),
        reasoning_effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
    )


def _format(service: Service, body: ChatBody, planned: Plan, index: int) -> ChatFormat:
    text = service.engine.token_text
    form = RecordFormat(
        text,
        planned.params,
        as_ids=body.return_tokens_as_token_ids,
        with_ids=body.return_token_ids,
    )
    reader = planned.reader(text)
    if reader is None:
        return ChatFormat(index, planned.prompt, body, form)
    thinks = planned.thinking is not Thinking.NONE
    return PartsFormat(index, planned.prompt, body, form, reader, thinks=thinks)
