"""Log-probabilities of a step, for the requests that asked: emitted tokens and prompt tokens.

Both go through `sampling.logprobs`, the only log-softmax. Entry i of a request's emitted run is
scored by entry i of its window; a prompt token by the entry of the token before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, repeat

import torch
from torch import Tensor

from emberline.batch import TokenScores
from emberline.engine.logprob_run import Records, make_records
from emberline.engine.plan import ScheduledRequest
from emberline.engine.step import StepResult
from emberline.layout import Scored
from emberline.sampling.logprobs import chosen_logprobs, score_tokens
from emberline.types import ALL_LOGPROBS, Origin, TokenAnnotation, TokenLogprobs

MODES = ("raw", "processed", "both")
_NARROW = 32
"""Alternatives up to which rows are searched together."""

SCORED_ON_CPU = 128
SCORED_BYTES = 2**30


def most_scored(vocab_size: int, device: torch.device) -> int:
    """Most prompt tokens scored in one step, of all requests: bounds the [tokens, V] logits.

    On a CPU a token takes as long however many there are. On a GPU a step does: as many as
    `SCORED_BYTES` hold in float32.
    """
    if device.type == "cpu":
        return SCORED_ON_CPU
    return max(SCORED_ON_CPU, SCORED_BYTES // (4 * vocab_size))


def score_emitted(plan: Sequence[ScheduledRequest], result: StepResult) -> Records:
    """One record an emitted token for each request that wants them, else None."""
    if all(entry.state.params.logprobs is None for entry in plan):
        return [None] * len(plan)
    # Where no option changed anything the two are one tensor, and so are their records.
    same = result.processed_logits is result.raw_logits
    raw = _score(plan, result, result.raw_logits, MODES if same else ("raw", "both"))
    processed = raw
    if not same:
        processed = _score(plan, result, result.processed_logits, ("processed", "both"))
    records: Records = []
    for entry, one, other in zip(plan, raw, processed, strict=True):
        if one is not None and other is not None and entry.state.params.logprobs_mode == "both":
            one = tuple(r._replace(processed=p) for r, p in zip(one, other, strict=True))
        records.append(one if one is not None else other)
    return records


def annotate(plan: Sequence[ScheduledRequest], result: StepResult, records: Records) -> Records:
    """The records, with how each token came about for the requests that want to know."""
    if not any(entry.state.params.annotations for entry in plan):
        return records
    columns = zip(
        plan,
        records,
        result.num_admitted.tolist(),
        result.verdict.num_accepted.tolist(),
        [[]] * len(plan) if result.draft_ids is None else result.draft_ids.tolist(),
        [[]] * len(plan) if result.confidence is None else result.confidence.tolist(),
        strict=True,
    )
    return [
        run and _annotated(run, entry.state.num_emitting_steps, *blocks)
        if entry.state.params.annotations
        else run
        for entry, run, *blocks in columns
    ]


def _annotated(
    run: tuple[TokenLogprobs, ...],
    step: int,
    num_admitted: int,
    num_accepted: int,
    drafts: Sequence[int],
    confidence: Sequence[float],
) -> tuple[TokenLogprobs, ...]:
    """The records of one request's run, annotated."""
    annotated = []
    for i, record in enumerate(run):
        judged = i < num_admitted
        if i < num_accepted:
            origin = Origin.ACCEPTED
        elif judged:
            origin = Origin.RECOVERED
        else:
            origin = Origin.BONUS if num_admitted else Origin.DECODED
        note = TokenAnnotation(
            step,
            origin,
            drafts[i] if judged else None,
            confidence[i] if judged and confidence else None,
        )
        annotated.append(record._replace(annotation=note))
    return tuple(annotated)


def _score(
    plan: Sequence[ScheduledRequest], result: StepResult, logits: Scored, modes: tuple[str, ...]
) -> Records:
    """Records of the requests that want one of these modes."""
    bounds = result.verdict.emitted_start_loc.tolist()
    records: Records = [None] * len(plan)
    wanting = [
        i
        for i, entry in enumerate(plan)
        if entry.state.params.logprobs is not None
        and entry.state.params.logprobs_mode in modes
        and bounds[i + 1] > bounds[i]
    ]
    if not wanting:
        return records
    rows = torch.tensor([row for i in wanting for row in range(bounds[i], bounds[i + 1])])
    owners = [plan[i].state.params for i in wanting for _ in range(bounds[i], bounds[i + 1])]
    scored = _records(
        logits,
        result.verdict.scored_index[rows],
        result.verdict.token_ids[rows],
        [_width(params.logprobs, logits) for params in owners],
        [params.logprob_token_ids for params in owners],
    )
    start = 0
    for i in wanting:
        count = bounds[i + 1] - bounds[i]
        records[i] = scored[start : start + count]
        start += count
    return records


def _width(wanted: int | None, logits: Scored) -> int:
    """Alternatives to report, `ALL_LOGPROBS` being the whole vocabulary."""
    return logits.shape[-1] if wanted == ALL_LOGPROBS else wanted or 0


def score_prompts(plan: Sequence[ScheduledRequest], result: StepResult) -> None:
    """Append this step's prompt log-probabilities to the requests that collect them.

    Always raw: no sampling option ever applied to a prompt.
    """
    logits, scored_end = result.raw_logits, result.layout.scored_start_loc[1:].tolist()
    rows: list[int] = []
    ids: list[int] = []
    widths: list[int] = []
    chosen_ids: list[Sequence[int]] = []
    runs: list[tuple[list[TokenLogprobs | None], int]] = []  # whose scores, and how many
    for i, entry in enumerate(plan):
        state = entry.state
        if not state.scores_prompt or state.prompt_scores is None:
            continue
        # `num_computed` still is the position of the chunk's first token.
        end = state.num_computed + entry.num_known
        first = max(state.params.prompt_logprobs_start, 1)
        while len(state.prompt_scores) < min(first, end + 1, state.num_prompt):
            state.prompt_scores.append(None)
        begin, stop = len(state.prompt_scores), min(end + 1, state.num_prompt)
        count = max(0, stop - begin)
        rows += range(scored_end[i] - end + begin - 1, scored_end[i] - end + begin - 1 + count)
        ids += state.token_ids[begin:stop]
        widths += [_width(state.params.prompt_logprobs, logits)] * count
        chosen_ids += [state.params.logprob_token_ids] * count
        runs.append((state.prompt_scores, count))
    if not ids:
        return
    index, token_ids = torch.tensor([rows, ids], device=logits.device)
    records = iter(_records(logits, index, token_ids, widths, chosen_ids))
    for scores, count in runs:
        scores += islice(records, count)


def _records(
    logits: Scored,
    index: Tensor,
    token_ids: Tensor,
    widths: Sequence[int],
    chosen_ids: Sequence[Sequence[int]],
) -> tuple[TokenLogprobs, ...]:
    """Host records of N tokens. `index` [N] rows of `logits`, `widths` their top-k, on the host.

    Rows that want many alternatives are scored apart: nobody else is searched that deep.
    """
    groups: dict[int, list[int]] = {}
    for place, width in enumerate(widths):
        groups.setdefault(width if width > _NARROW else 0, []).append(place)
    if len(groups) == 1:
        return _records_of_like(logits, index, token_ids, widths, chosen_ids)
    records: dict[int, TokenLogprobs] = {}
    for places in groups.values():
        some = torch.tensor(places, device=index.device)
        own_widths, own_chosen = [widths[p] for p in places], [chosen_ids[p] for p in places]
        scored = _records_of_like(logits, index[some], token_ids[some], own_widths, own_chosen)
        records |= dict(zip(places, scored, strict=True))
    return tuple(records[place] for place in range(len(widths)))


def _records_of_like(
    logits: Scored,
    index: Tensor,
    token_ids: Tensor,
    widths: Sequence[int],
    chosen_ids: Sequence[Sequence[int]],
) -> tuple[TokenLogprobs, ...]:
    """The same, all searched as deep as the widest."""
    num_top = min(max(widths), logits.shape[-1])
    scores = _score_tokens(logits, index, token_ids, num_top)
    return make_records(
        scores.token_ids.tolist(),
        scores.logprobs.tolist(),
        scores.ranks.tolist(),
        (tuple(row[:width]) for row, width in zip(scores.top_ids.tolist(), widths, strict=True)),
        (tuple(row[:n]) for row, n in zip(scores.top_logprobs.tolist(), widths, strict=True)),
        chosen_logprobs(logits, index, chosen_ids) if any(chosen_ids) else repeat(()),
    )


def _score_tokens(logits: Scored, index: Tensor, token_ids: Tensor, num_top: int) -> TokenScores:
    """By the kernels that a GPU's own steps are scored by, where they take it."""
    if logits.is_cuda:
        from emberline.ops.triton import scores

        if scores.takes(logits, num_top):
            asks = torch.ones_like(index, dtype=torch.bool)
            return scores.score_tokens(logits, index, token_ids, asks, num_top)
    return score_tokens(logits, index, token_ids, num_top)
