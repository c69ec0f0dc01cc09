"""The response object round its items: what was asked, and how it ended.

Owns its fields, which are all there whatever was asked. Must not know items, events or HTTP.
"""

from __future__ import annotations

from emberline.server.records import Json
from emberline.server.responses_body import FunctionTool, NamedTool, ResponsesBody
from emberline.types import FinishReason, RequestOutput


def response_head(body: ResponsesBody, response_id: str, created: int, model: str) -> Json:
    """What is known of a response when it begins; what is not known yet is null."""
    choice = body.tool_choice
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": dict(body.metadata),
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": _text_format(body), "verbosity": "medium"},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice,
        "tools": [_tool(tool) for tool in body.tools],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": body.truncation,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "usage": None,
        "user": body.user,
    }


def _text_format(body: ResponsesBody) -> Json:
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


def _tool(tool: FunctionTool) -> Json:
    return tool.model_dump()


def ending(output: RequestOutput, now: int) -> tuple[str, Json]:
    """The status that a response ends with, and the fields that say more.

    Args:
        output: the last of its request.
        now: Unix seconds.
    """
    if output.finish_reason is FinishReason.STOP:
        return "completed", {"completed_at": now}
    # The API has no word for a request whose time is over; `emberline.stop_reason` says it.
    limited = output.finish_reason is FinishReason.LENGTH
    return "incomplete", {
        "incomplete_details": {"reason": "max_output_tokens" if limited else None}
    }


def usage_json(usage: Json, num_reasoning: int) -> Json:
    """Token counts under the names of this API.

    Args:
        usage: those of chat.
        num_reasoning: output tokens that are no part of what is said.
    """
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage["total_tokens"],
    }


def failure(message: str) -> Json:
    """The fields of a response that failed after it had begun."""
    return {"error": {"code": "server_error", "message": message}}
