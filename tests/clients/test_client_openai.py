"""The official `openai` client: every answer has its typed shape, streamed and not.

The client builds its objects without checking them, so each is validated here again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from support.documented import blocks
from support.program import Program

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
Shape = TypeVar("Shape", bound=BaseModel)


class City(BaseModel):
    """What structured answers are parsed into."""

    name: str = Field(max_length=30)
    continent: Literal["Europe", "Asia", "Africa"]
    capital: bool


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=30)
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture
def client(drafted: Program) -> Iterator[openai.OpenAI]:
    with connect(drafted) as made:
        yield made


def connect(server: Program) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def valid(answer: Shape) -> Shape:
    """The same answer, every field of it checked against the client's own type."""
    type(answer).model_validate(answer.to_dict())  # type: ignore[attr-defined]
    return answer


def all_valid(events: Iterable[Shape]) -> list[Shape]:
    return [valid(event) for event in events]


def test_the_documented_example(drafted: Program, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks(PAGE, "python")
    example = example.replace("http://127.0.0.1:8000", drafted.url)
    exec(compile(example, "docs/clients.md", "exec"), {})
    said = capsys.readouterr().out.split()
    assert "Paris" in " ".join(said)
    assert float(said[-1]) <= 0


def test_models(client: openai.OpenAI, drafted: Program) -> None:
    (model,) = all_valid(client.models.list())
    assert model.id == drafted.name
    assert valid(client.models.retrieve(drafted.name)) == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"


def test_completions(client: openai.OpenAI, drafted: Program) -> None:
    options: dict[str, Any] = {
        "model": drafted.name,
        "prompt": ["The capital of France is", "One, two, three,"],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 3,
        "n": 2,
        "seed": 1,
    }
    whole = valid(client.completions.create(**options))
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert "Paris" in whole.choices[0].text
    for choice in whole.choices:
        records = choice.logprobs
        assert "".join(records.tokens) == choice.text
        for name, value, top in zip(
            records.tokens, records.token_logprobs, records.top_logprobs, strict=True
        ):
            assert top[name] == value
    chunks = list(client.completions.create(**options, stream=True))
    for chunk in chunks:
        data = chunk.to_dict()
        for choice in data["choices"]:  # null until the end, which the type does not foresee
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(data)
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [x for p in parts if p.logprobs for x in p.logprobs.token_logprobs] == (
            choice.logprobs.token_logprobs
        )
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]


def test_an_echoed_prompt(client: openai.OpenAI, drafted: Program) -> None:
    """Its first token has no value, which the client's type does not foresee."""
    prompt = "The capital of France is"
    answer = client.completions.create(
        model=drafted.name, prompt=prompt, max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    records = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(prompt)
    assert (records.token_logprobs[0], records.top_logprobs[0]) == (None, None)
    assert all(value <= 0 for value in records.token_logprobs[1:])


def test_chat(client: openai.OpenAI, drafted: Program) -> None:
    options: dict[str, Any] = {
        "model": drafted.name,
        "messages": QUESTION,
        "temperature": 0,
        "max_completion_tokens": 40,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = valid(client.chat.completions.create(**options))
    (choice,) = whole.choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    said = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert said.decode() == choice.message.content
    for entry in choice.logprobs.content:
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy: the same float

    usage = {"include_usage": True}
    chunks = all_valid(client.chat.completions.create(**options, stream=True, stream_options=usage))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(part.delta.content or "" for part in deltas) == choice.message.content
    records = [entry for part in deltas if part.logprobs for entry in part.logprobs.content]
    assert records == choice.logprobs.content


def test_the_clients_own_stream_reader(client: openai.OpenAI, drafted: Program) -> None:
    """Its accumulator ends with what the answer that is not streamed says."""
    options: dict[str, Any] = {
        "model": drafted.name,
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 30,
        "logprobs": True,
        "top_logprobs": 1,
    }
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content


def test_many_calls_at_once_are_answered_as_one_by_one(drafted: Program) -> None:
    def body(index: int) -> dict[str, Any]:
        asked = [{"role": "user", "content": f"Count from {index} on."}]
        return {"model": drafted.name, "messages": asked, "seed": index, "max_tokens": 12}

    async def together() -> list[ChatCompletion]:
        url = f"{drafted.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as many:
            calls = (many.chat.completions.create(**body(index)) for index in range(8))
            return list(await asyncio.gather(*calls))

    with connect(drafted) as one:
        alone = [one.chat.completions.create(**body(index)) for index in range(8)]
    for answer, expected in zip(asyncio.run(together()), alone, strict=True):
        assert valid(answer).choices[0].message == expected.choices[0].message


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_outputs(client: openai.OpenAI, drafted: Program, temperature: float) -> None:
    options: dict[str, Any] = {
        "model": drafted.name,
        "messages": [{"role": "user", "content": "Describe Paris as JSON."}],
        "temperature": temperature,
        "seed": 5,
        "max_tokens": 200,
        "response_format": City,
    }
    parsed = client.chat.completions.parse(**options)
    assert isinstance(parsed.choices[0].message.parsed, City)
    assert parsed.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed


def test_json_objects(client: openai.OpenAI, drafted: Program) -> None:
    answer = client.chat.completions.create(
        model=drafted.name,
        messages=[{"role": "user", "content": "Give me a JSON object with one short key."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=300,
    )
    (choice,) = valid(answer).choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.lstrip().startswith("{")


def tools_options(server: Program, **more: Any) -> dict[str, Any]:
    return {
        "model": server.name,
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "tools": [openai.pydantic_function_tool(GetWeather)],
        "temperature": 0,
        "max_tokens": 200,
        **more,
    }


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "GetWeather"}}]
)
def test_tool_calls(with_tools: Program, choice: Any) -> None:
    options = tools_options(with_tools, tool_choice=choice)
    with connect(with_tools) as client:
        parsed = client.chat.completions.parse(**options)
        with client.chat.completions.stream(**options) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
    call = parsed.choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, GetWeather)
    # A named function is a plain stop for OpenAI's service, a required one a call.
    assert parsed.choices[0].finish_reason in ("tool_calls", "stop")
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == len(
        parsed.choices[0].message.tool_calls
    )
    streamed = final.choices[0].message.tool_calls[0]
    assert (streamed.function, streamed.type) == (call.function, "function")
    assert call.id


def test_a_tools_answer_goes_on_with_the_conversation(with_tools: Program) -> None:
    with connect(with_tools) as client:
        options = tools_options(with_tools, tool_choice="required")
        first = valid(client.chat.completions.create(**options)).choices[0].message
        call = first.tool_calls[0]
        said = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}
        conversation = [*options["messages"], first.to_dict(), said]
        options |= {"messages": conversation, "tool_choice": "none", "max_tokens": 20}
        answer = valid(client.chat.completions.create(**options)).choices[0].message
    assert answer.content
    assert not answer.tool_calls


def test_predicted_outputs(client: openai.OpenAI, drafted: Program) -> None:
    options: dict[str, Any] = {
        "model": drafted.name,
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 40,
    }
    plain = client.chat.completions.create(**options)
    text = plain.choices[0].message.content
    predicted = client.chat.completions.create(
        **options, prediction={"type": "content", "content": text}
    )
    assert valid(predicted).choices[0].message.content == text
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > 0


def responses_options(server: Program, **more: Any) -> dict[str, Any]:
    return {
        "model": server.name,
        "input": "What is the capital of France?",
        "temperature": 0,
        "max_output_tokens": 40,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        **more,
    }


def test_responses(client: openai.OpenAI, drafted: Program) -> None:
    whole = valid(client.responses.create(**responses_options(drafted)))
    assert "Paris" in whole.output_text
    assert whole.status == "completed"
    (part,) = whole.output[-1].content
    assert len(part.logprobs) == whole.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)

    events = all_valid(client.responses.create(**responses_options(drafted), stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    streamed = [entry.logprob for event in deltas for entry in event.logprobs]
    assert streamed == [entry.logprob for entry in part.logprobs]


def test_responses_are_kept_and_followed(client: openai.OpenAI, drafted: Program) -> None:
    first = client.responses.create(**responses_options(drafted, store=True))
    assert client.responses.retrieve(first.id).output_text == first.output_text
    more = responses_options(drafted, input="And of Italy?", previous_response_id=first.id)
    second = valid(client.responses.create(**more))
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_parse_and_stream_with_the_clients_reader(
    client: openai.OpenAI, drafted: Program
) -> None:
    options = {
        "model": drafted.name,
        "input": "Describe Paris as JSON.",
        "temperature": 0,
        "max_output_tokens": 200,
        "text_format": City,
    }
    parsed = client.responses.parse(**options)
    assert isinstance(parsed.output_parsed, City)
    with client.responses.stream(**options) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_responses_call_functions(with_tools: Program) -> None:
    tool = {
        "type": "function",
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {**GetWeather.model_json_schema(), "additionalProperties": False},
        "strict": True,
    }
    options = {
        "model": with_tools.name,
        "input": "How is the weather in Rome?",
        "tools": [tool],
        "tool_choice": "required",
        "temperature": 0,
        "max_output_tokens": 200,
    }
    with connect(with_tools) as client:
        whole = valid(client.responses.create(**options))
        call = next(item for item in whole.output if item.type == "function_call")
        assert call.name == "get_weather"
        GetWeather.model_validate_json(call.arguments)
        events = all_valid(client.responses.create(**options, stream=True))
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert done[0].arguments == call.arguments


def test_refusals_name_the_field(client: openai.OpenAI, drafted: Program) -> None:
    def refused(**options: Any) -> openai.BadRequestError:
        asked = {"model": drafted.name, "messages": QUESTION, **options}
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**asked)
        return caught.value

    assert refused(temperature=-1).param == "temperature"
    assert refused(top_logprobs=3).param == "top_logprobs"
    assert refused(extra_body={"unheard_of": 1}).param == "unheard_of"
    schema = {"name": "x", "schema": {"type": "no such type"}, "strict": True}
    problem = refused(response_format={"type": "json_schema", "json_schema": schema})
    assert (problem.param or "").startswith("response_format")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=QUESTION)
