"""From a plan to tensors: everything the host knows before a step runs. Runs no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.batch import StepShape
from emberline.engine.grammar import StepGrammar
from emberline.engine.plan import ScheduledRequest
from emberline.sampling.processors import SamplingBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as the host sees it. B requests; their drafts are not known yet."""

    shape: StepShape
    num_scored_known: int  # sum of scored_lens
    max_known_len: int  # the largest of known_lens
    known_ids: Tensor  # [shape.num_known] int64, request-major
    known_lens: Tensor  # [B] int64, tokens forwarded before any draft
    start_positions: Tensor  # [B] int64, position of the first of them
    scored_lens: Tensor  # [B] int64, trailing known tokens that get logits
    samples: Tensor  # [B] bool, whether a token is emitted after the last of them
    next_known: Tensor  # [B] int64, the token after the known ones where the prompt goes on, else 0
    page_table: Tensor  # [B, M] int64, padded with page 0
    req_index: Tensor  # [B] int64
    seeds: Tensor  # [B] int64
    temperatures: Tensor  # [B] float32
    greedy: Tensor  # [B] bool
    coupled: Tensor  # [B] bool
    need_draft_logits: bool  # whether rejection sampling will read q
    sampling: SamplingBatch
    predicted: tuple[tuple[int, ...], ...]  # [B] drafts of predicted outputs; () = the drafter's
    grammar: StepGrammar | None  # None: no grammar binds any request


def build_inputs(
    plan: Sequence[ScheduledRequest], eos_ids: frozenset[int], device: torch.device
) -> StepInputs:
    """Tensors of one step. `plan` is not empty."""

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    states = [entry.state for entry in plan]
    params = [state.params for state in states]
    known: list[int] = []
    next_known: list[int] = []
    for entry in plan:
        end = entry.state.num_computed + entry.num_known
        known += entry.state.token_ids[entry.state.num_computed : end]
        goes_on = end < len(entry.state.token_ids)
        next_known.append(entry.state.token_ids[end] if goes_on else 0)
    width = max(len(state.pages) for state in states)
    limits = [entry.draft_limit for entry in plan]
    predicted = tuple(
        state.prediction.ahead(limit) if state.prediction is not None else ()
        for state, limit in zip(states, limits, strict=True)
    )
    chances = tuple(
        state.prediction.confidence if state.prediction is not None and ids else 0.0
        for state, ids in zip(states, predicted, strict=True)
    )
    matchers = [entry.state.matcher if entry.samples else None for entry in plan]
    return StepInputs(
        shape=StepShape(
            num_known=len(known),
            num_emitting=sum(entry.samples for entry in plan),
            serials=tuple(state.serial for state in states),
            draft_limits=tuple(limits),
            predicted=chances if any(chances) else (),
        ),
        num_scored_known=sum(entry.num_scored for entry in plan),
        max_known_len=max(entry.num_known for entry in plan),
        known_ids=ints(known),
        known_lens=ints([entry.num_known for entry in plan]),
        start_positions=ints([state.num_computed for state in states]),
        scored_lens=ints([entry.num_scored for entry in plan]),
        samples=torch.tensor([entry.samples for entry in plan], device=device),
        next_known=ints(next_known),
        page_table=torch.tensor(
            [state.pages + [0] * (width - len(state.pages)) for state in states],
            dtype=torch.int64,
            device=device,
        ),
        req_index=ints([state.slot for state in states]),
        seeds=ints([state.seed for state in states]),
        temperatures=torch.tensor([p.temperature for p in params], device=device),
        greedy=torch.tensor([p.greedy for p in params], device=device),
        coupled=torch.tensor([p.coupled for p in params], device=device),
        need_draft_logits=any(
            limit and not p.greedy and not p.coupled
            for limit, p in zip(limits, params, strict=True)
        ),
        sampling=SamplingBatch.build(
            params=params,
            prompt_ids=[state.request.prompt_token_ids for state in states],
            output_ids=[state.token_ids[state.num_prompt :] for state in states],
            eos_ids=[eos_ids if not p.ignore_eos else frozenset() for p in params],
            device=str(device),
        ),
        predicted=predicted,
        grammar=StepGrammar(matchers, eos_ids, device) if any(matchers) else None,
    )
