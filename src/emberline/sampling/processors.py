"""Every sampling option, once, for every phase: from the target's logits to those of p.

Owns the meaning and the order of the options. Must not know about drafts being accepted, about the
layout's rows, or what the logits came from.

A window's entry i is processed as if the drafts 1 .. i before it had been emitted one by one: they
count for penalties and for `min_tokens`. Each row is computed from its own logits and its own
history, so it is bit for bit the same in any batch and with any number of drafts after it.

Order: what may come at all (grammar, `allowed_token_ids`, `bad_words`, the `min_tokens` mask),
`logit_bias`, penalties (repetition, over prompt and output; frequency and presence, over the
output), temperature, `min_p`, `top_k`, `top_p`. The last three look at what the ones before them
left. For greedy requests the last four do not matter and are not applied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.layout import Scored, TokenLayout, Tokens
from emberline.sampling.truncation import keep_min_p_, keep_top_
from emberline.types import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """One request's options and the history they look at."""

    params: SamplingParams
    num_output_tokens: int  # emitted before this step
    barred_ids: Tensor | None  # [E] int64, ids that may not come before `min_tokens`
    allowed_ids: Tensor | None  # [any] int64, ids that may come; None = all
    recent_ids: tuple[int, ...]  # as many of the last tokens as the longest bad word looks back
    bias_ids: Tensor | None  # [G] int64
    biases: Tensor | None  # [G] float64
    prompt_ids: Tensor | None  # [any] int64; None without a repetition penalty
    output_ids: Tensor | None  # [num_output_tokens] int64; None without any penalty


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The options of a step's requests. None: the target's logits are p's already."""

    requests: tuple[RequestSampling | None, ...]  # B

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        prompt_ids: Sequence[Sequence[int]],
        output_ids: Sequence[Sequence[int]],
        eos_ids: Sequence[Collection[int]],
        device: str = "cpu",
    ) -> SamplingBatch:
        """Gather what a step needs, on the host. All sequences have one entry a request.

        Args:
            params: the options. Ids in them must be within the vocabulary.
            prompt_ids: the prompts.
            output_ids: what has been emitted so far, the anchor included.
            eos_ids: the ids that end each request besides its `stop_token_ids`.
            device: where the step runs.
        """
        return cls(
            tuple(
                _request_sampling(*entry, device)
                for entry in zip(params, prompt_ids, output_ids, eos_ids, strict=True)
            )
        )


def changes_logits(params: SamplingParams) -> bool:
    """Whether an option other than the temperature may change a logit in some step."""
    return bool(
        params.min_tokens
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.logit_bias
        or _penalises(params)
        or (not params.greedy and _truncates(params))
    )


def process(
    logits: Scored,
    layout: TokenLayout,
    token_ids: Tokens,
    sampling: SamplingBatch,
    masks: Sequence[Tensor | None] | None = None,
) -> Scored:
    """Logits of p for every window entry; p is their softmax. [Q, V] -> [Q, V].

    `logits` is never written to: it is returned as it is when no window needs an option, and
    copied otherwise. Scored rows before a window (prompt log-probabilities) stay as they are.
    A greedy request's logits are not divided by a temperature; its token is their argmax.

    Args:
        logits: the target's, float32 or float64.
        layout: the step's map.
        token_ids: [T] int64; the trailing ones of a window are its drafts.
        sampling: the options of the step's B requests.
        masks: for each request, what a grammar lets each entry of its window be ([W, V] bool), or
            None; None: no grammar binds any.
    """
    masks = masks or [None] * layout.num_reqs
    if not any(sampling.requests) and all(mask is None for mask in masks):
        return logits
    starts, lens = layout.window_start.tolist(), layout.window_lens.tolist()
    todo = [
        (request, mask, start, num)
        for request, mask, start, num in zip(sampling.requests, masks, starts, lens, strict=True)
        if (request is not None or mask is not None) and num
    ]
    if not todo:
        return logits
    processed = logits.clone()
    scored_ids = layout.score(token_ids)
    for request, mask, start, num in todo:
        window = processed[start : start + num]
        if mask is not None:
            window.masked_fill_(~mask, -torch.inf)
        if request is not None:
            _shape_(window, request, scored_ids[start + 1 : start + num])
            if not request.params.greedy:
                _temper_(window, request.params)
    return Scored(processed)


def _shape_(window: Tensor, request: RequestSampling, drafts: Tensor) -> None:
    """In place: what changes which id is best. [W, V], drafts [W - 1]."""
    if request.allowed_ids is not None:
        barred = torch.ones(window.shape[-1], dtype=torch.bool, device=window.device)
        window.masked_fill_(barred.index_fill_(0, request.allowed_ids, False), -torch.inf)
    if request.params.bad_words:
        _bar_words_(window, request, drafts)
    num_barred = request.params.min_tokens - request.num_output_tokens
    if request.barred_ids is not None and num_barred > 0:
        window[:num_barred].index_fill_(-1, request.barred_ids, -torch.inf)
    if request.bias_ids is not None and request.biases is not None:
        window[:, request.bias_ids] += request.biases.to(window.dtype)
    if request.output_ids is not None:
        _penalise_(window, request, request.output_ids, drafts)


def _bar_words_(window: Tensor, request: RequestSampling, drafts: Tensor) -> None:
    """In place: no entry may complete a bad word that the tokens before it have begun."""
    before = [*request.recent_ids, *drafts.tolist()]
    first = len(request.recent_ids)  # tokens before entry 0
    for entry, row in enumerate(window):
        said = before[: first + entry]
        for *start, last in request.params.bad_words:
            if said[len(said) - len(start) :] == start and len(said) >= len(start):
                row[last] = -torch.inf


def _temper_(window: Tensor, params: SamplingParams) -> None:
    """In place: what changes how sharp the choice is. [W, V]."""
    if params.temperature != 1.0:
        window.div_(params.temperature)
    if params.min_p > 0.0:
        keep_min_p_(window, params.min_p)
    keep_top_(window, params.top_k, params.top_p)


def _penalise_(
    window: Tensor, request: RequestSampling, output_ids: Tensor, drafts: Tensor
) -> None:
    """In place, penalties with the counts of each entry. Only ids that occurred are touched."""
    params, num_output = request.params, len(output_ids)
    seen = (
        [output_ids, drafts]
        if request.prompt_ids is None
        else [output_ids, drafts, request.prompt_ids]
    )
    ids, place = torch.unique(torch.cat(seen), return_inverse=True)
    counts = torch.zeros(len(window), len(ids), dtype=window.dtype, device=window.device)
    counts += place[:num_output].bincount(minlength=len(ids))
    # Draft j (0-based) has been emitted for the entries after it: rows j + 1 and on.
    if len(drafts):
        draft_place = place[num_output : num_output + len(drafts)]
        counts[1:] += torch.nn.functional.one_hot(draft_place, len(ids)).cumsum(0)
    emitted = counts > 0
    x = window[:, ids]
    if request.prompt_ids is not None:
        known = emitted.clone()
        known[:, place[num_output + len(drafts) :]] = True  # the prompt's
        factor = params.repetition_penalty
        x = torch.where(known, torch.where(x > 0, x / factor, x * factor), x)
    x = x - params.frequency_penalty * counts - params.presence_penalty * emitted.to(x.dtype)
    window[:, ids] = x


def _penalises(params: SamplingParams) -> bool:
    additive = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    return additive or params.repetition_penalty != 1.0


def _truncates(params: SamplingParams) -> bool:
    return params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0


def _request_sampling(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_ids: Collection[int],
    device: str,
) -> RequestSampling | None:
    def ints(values: Collection[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    barred = sorted({*eos_ids, *params.stop_token_ids})
    bars = bool(barred) and len(output_ids) < params.min_tokens
    repetition, penalises = params.repetition_penalty != 1.0, _penalises(params)
    tempers = not params.greedy and (params.temperature != 1.0 or _truncates(params))
    limits = params.allowed_token_ids is not None or bool(params.bad_words)
    if not (bars or limits or params.logit_bias or penalises or tempers):
        return None
    look_back = max((len(word) for word in params.bad_words), default=1) - 1
    return RequestSampling(
        params=params,
        num_output_tokens=len(output_ids),
        barred_ids=ints(barred) if bars else None,
        allowed_ids=None if params.allowed_token_ids is None else ints(params.allowed_token_ids),
        recent_ids=tuple(output_ids[max(0, len(output_ids) - look_back) :]),
        bias_ids=ints(params.logit_bias.keys()) if params.logit_bias else None,
        biases=torch.tensor(list(params.logit_bias.values()), dtype=torch.float64, device=device)
        if params.logit_bias
        else None,
        prompt_ids=ints(prompt_ids) if repetition else None,
        output_ids=ints(output_ids) if penalises else None,
    )
