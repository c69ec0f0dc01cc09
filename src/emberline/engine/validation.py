"""What can never run is refused before it is queued, with the field and the remedy.

Owns the checks that need the model's vocabulary, its context and the cache; `types` owns those that
need nothing. Must not know the scheduler.
"""

from __future__ import annotations

from collections.abc import Collection

from emberline.types import InvalidRequest, Request


def check_ids(request: Request, vocab_size: int) -> None:
    """Raise `InvalidRequest` unless there is a prompt and every id is one of the model's."""
    params = request.params
    if not request.prompt_token_ids:
        raise InvalidRequest("the prompt is empty: give at least one token", "prompt")
    given: tuple[tuple[str, Collection[int]], ...] = (
        ("prompt", request.prompt_token_ids),
        ("prediction", request.prediction),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words", [token_id for word in params.bad_words for token_id in word]),
    )
    for name, ids in given:
        fits = not ids or (set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) < vocab_size)
        if fits:
            continue  # the usual case, in a tenth of the time
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int):
                raise InvalidRequest(f"{name} holds {i!r}, which is no token id", name)
            if not 0 <= i < vocab_size:
                raise InvalidRequest(f"{name} holds token id {i}, outside [0, {vocab_size})", name)
    for name, width in (
        ("logprobs", params.logprobs),
        ("prompt_logprobs", params.prompt_logprobs),
    ):
        if width is not None and width > vocab_size:
            raise InvalidRequest(f"{name} exceeds the vocabulary of {vocab_size}", name)


def check_options(request: Request, *, has_text: bool) -> None:
    """Raise `InvalidRequest` for options that this request cannot have."""
    params, num_prompt = request.params, len(request.prompt_token_ids)
    if params.stop and not has_text:
        raise InvalidRequest("stop strings need a tokenizer; use stop_token_ids", "stop")
    if params.prompt_logprobs is not None and params.prompt_logprobs_start >= num_prompt:
        raise InvalidRequest(
            f"prompt_logprobs_start {params.prompt_logprobs_start} is past the prompt's "
            f"{num_prompt} tokens",
            "prompt_logprobs_start",
        )


def check_length(request: Request, max_model_len: int, cache_len: int) -> None:
    """Raise `InvalidRequest` unless prompt and answer fit the context and the KV cache."""
    num_prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
    limit = min(max_model_len, cache_len)
    what = "context length" if limit == max_model_len else "KV cache"
    wanted = 1 if max_tokens is None else max_tokens
    if num_prompt + min(wanted, 1) > limit:
        why = f"of {limit} leaves no room for an answer" if wanted else f"is {limit}"
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens; the {what} {why}: shorten it", "prompt"
        )
    if num_prompt + wanted > limit:
        raise InvalidRequest(
            f"prompt of {num_prompt} and max_tokens {wanted} exceed the {what} of {limit}: "
            f"use max_tokens of at most {limit - num_prompt}",
            "max_tokens",
        )
