"""Log-probabilities of a step, for the requests that asked: emitted tokens and prompt tokens.

Both go through `sampling.logprobs`, the only log-softmax. Entry i of a request's emitted run is
scored by entry i of its window; a prompt token by the entry of the token before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emberline.engine.scheduler import ScheduledRequest
from emberline.engine.step import StepResult
from emberline.layout import Scored
from emberline.sampling.logprobs import chosen_logprobs, score_tokens
from emberline.types import TokenLogprobs


def score_emitted(
    plan: Sequence[ScheduledRequest], result: StepResult
) -> list[tuple[TokenLogprobs, ...] | None]:
    """One record an emitted token for each request that wants them, else None."""
    bounds = result.verdict.emitted_start_loc.tolist()
    records: list[tuple[TokenLogprobs, ...] | None] = [None] * len(plan)
    for mode, logits in (("raw", result.raw_logits), ("processed", result.processed_logits)):
        wanting = [
            i
            for i, entry in enumerate(plan)
            if entry.state.params.logprobs is not None
            and entry.state.params.logprobs_mode == mode
            and bounds[i + 1] > bounds[i]
        ]
        if not wanting:
            continue
        rows = torch.tensor([row for i in wanting for row in range(bounds[i], bounds[i + 1])])
        index = result.verdict.scored_index[rows]
        widths = [plan[i].state.params.logprobs or 0 for i in wanting]
        scored = _records(
            logits,
            index,
            result.verdict.token_ids[rows],
            [w for i, w in zip(wanting, widths, strict=True) for _ in range(*bounds[i : i + 2])],
            [
                plan[i].state.params.logprob_token_ids
                for i in wanting
                for _ in range(*bounds[i : i + 2])
            ],
        )
        start = 0
        for i in wanting:
            count = bounds[i + 1] - bounds[i]
            records[i] = tuple(scored[start : start + count])
            start += count
    return records


def score_prompts(plan: Sequence[ScheduledRequest], result: StepResult) -> None:
    """Append this step's prompt log-probabilities to the requests that collect them.

    Always raw: no sampling option ever applied to a prompt.
    """
    layout = result.layout
    scored_end = layout.scored_start_loc[1:].tolist()
    for i, entry in enumerate(plan):
        state = entry.state
        if not state.scores_prompt or state.prompt_scores is None:
            continue
        # `num_computed` still is the position of the chunk's first token.
        end = state.num_computed + entry.num_known
        first = max(state.params.prompt_logprobs_start, 1)
        while len(state.prompt_scores) < min(first, end + 1, state.num_prompt):
            state.prompt_scores.append(None)
        positions = range(len(state.prompt_scores), min(end + 1, state.num_prompt))
        if not positions:
            continue
        index = torch.tensor([scored_end[i] - (end - (p - 1)) for p in positions])
        ids = [state.token_ids[p] for p in positions]
        width = state.params.prompt_logprobs or 0
        chosen = [state.params.logprob_token_ids] * len(ids)
        state.prompt_scores += _records(
            result.raw_logits, index, torch.tensor(ids), [width] * len(ids), chosen
        )


def _records(
    logits: Scored,
    index: Tensor,
    token_ids: Tensor,
    widths: Sequence[int],
    chosen_ids: Sequence[Sequence[int]],
) -> list[TokenLogprobs]:
    """Host records of N tokens. `index` [N] rows of `logits`, `widths` their top-k, on the host."""
    num_top = min(max(widths), logits.shape[-1])
    scores = score_tokens(logits, index, token_ids, num_top)
    chosen = chosen_logprobs(logits, index, chosen_ids) if any(chosen_ids) else None
    top_ids, top_logprobs = scores.top_ids.tolist(), scores.top_logprobs.tolist()
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            top_ids=tuple(top_ids[row][: widths[row]]),
            top_logprobs=tuple(top_logprobs[row][: widths[row]]),
            chosen_logprobs=() if chosen is None else chosen[row],
        )
        for row, (token_id, logprob, rank) in enumerate(
            zip(
                scores.token_ids.tolist(),
                scores.logprobs.tolist(),
                scores.ranks.tolist(),
                strict=True,
            )
        )
    ]
