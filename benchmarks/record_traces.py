"""A draft's block at every token of an answer: what any policy of verification would have met.

python benchmarks/record_traces.py FILE [--tokens 40] [--temperatures 0 1]

`emberline calibrate --traces` records blocks where steps with every draft verified begin, about one
token in three. A policy that verifies less begins steps elsewhere. Here every step drafts a whole
block and verifies none of it, so that a block begins at each token; what would have been accepted
is how far it agrees with the text that follows. That is exact under the greedy rule, and under
`coupled` at any temperature: there the text does not depend on what is verified, and a draft is
accepted when it is the text's own token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import torch
from rich.progress import Progress

from emberline.batch import Admission, CommittedTokens, DraftContext, DraftProposal, StepShape
from emberline.config import EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.drafters.base import Drafter
from emberline.engine.engine import Engine
from emberline.engine.trace import BlockTrace, RequestTrace, write_traces
from emberline.llm import LLM
from emberline.types import Request, SamplingParams
from replay import EVERY_TOKEN

import prompts as prompt_sets
import record

DIGITS = 3  # of a confidence: a file that ships is small


class VerifyNothing:
    """Draws whole blocks and verifies none of them."""

    def depths(self, shape: StepShape) -> tuple[int, ...]:
        """As deep as allowed."""
        return shape.draft_limits

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:  # noqa: ARG002
        """No draft."""
        return Admission(torch.zeros_like(proposal.num_drafted), 0)

    def abandon(self) -> None:
        """Nothing is awaited."""


class Overheard:
    """A drafter that keeps the drafts it drew last."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.max_draft_tokens = drafter.max_draft_tokens
        self.taps = drafter.taps
        self.kv_spec = drafter.kv_spec
        self.last = torch.empty(0, 0, dtype=torch.int64)  # [B, K]

    def propose(self, context: DraftContext) -> DraftProposal:
        """What the drafter proposes."""
        proposal = self._drafter.propose(context)
        self.last = proposal.token_ids
        return proposal

    def observe(self, committed: CommittedTokens) -> None:
        """Hand over what was committed."""
        self._drafter.observe(committed)


def blocks_at_every_token(engine: Engine, requests: Sequence[Request]) -> list[RequestTrace]:
    """Run all requests together, each to its end. The temperature is theirs, the name their id's.

    The last K tokens of an answer begin no block here: what follows them is not known far enough.
    """
    assert engine.parts.drafter is not None
    drafter = Overheard(engine.parts.drafter)
    engine.parts = replace(engine.parts, drafter=drafter)
    engine.use_planner(VerifyNothing(), "nothing")
    drafted: dict[str, list[tuple[BlockTrace, list[int]]]] = {r.request_id: [] for r in requests}
    texts: dict[str, list[int]] = {r.request_id: [] for r in requests}

    def note(blocks: Sequence[BlockTrace]) -> None:
        # The rows of a proposal and the blocks of a step are both those that draft, in order.
        rows = drafter.last.tolist() if blocks else []
        for block, ids in zip(blocks, rows, strict=True):
            drafted[block.request_id].append((block, ids))

    engine.observer = note
    for request in requests:
        engine.add(request)
    with Progress() as progress:
        total = sum(request.params.max_tokens or 0 for request in requests)
        task = progress.add_task("recording", total=total)
        while engine.has_work:
            for output in engine.step():
                texts[output.request_id] += output.token_ids
                progress.advance(task, len(output.token_ids))
        progress.update(task, completed=total)  # some answers end before their limit
    engine.observer = None
    if engine.snapshot().num_preemptions:
        raise SystemExit("the KV cache is too small for all requests at once: fewer, or shorter")
    width = drafter.max_draft_tokens
    return [
        RequestTrace(
            request.request_id.rsplit(" at ", 1)[0],
            request.params.temperature,
            tuple(
                replace(block, num_verified=width, num_accepted=agreement(ids, text[start + 1 :]))
                for start, (block, ids) in enumerate(drafted[request.request_id])
                if start + width < len(text) and len(block.confidence) == width
            ),
        )
        for request, text in ((request, texts[request.request_id]) for request in requests)
    ]


def agreement(drafts: Sequence[int], text: Sequence[int]) -> int:
    """Leading drafts that are the text's tokens."""
    same = (draft == token for draft, token in zip(drafts, text, strict=False))
    return sum(takewhile(bool, same))


def rounded(trace: RequestTrace) -> RequestTrace:
    """The same with confidences of few digits."""
    return replace(
        trace,
        blocks=tuple(
            replace(block, confidence=tuple(float(f"{c:.{DIGITS}g}") for c in block.confidence))
            for block in trace.blocks
        ),
    )


def main() -> None:
    """Record and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=Path, help="folder of prompt sets; default: own prompts")
    parser.add_argument("--limit", type=int, default=20, help="prompts a set")
    parser.add_argument("--tokens", type=int, default=40, help="blocks an answer")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--draft", help="default: the shipped draft")
    parser.add_argument("--threads", type=int, help="default: all cores but one")
    args = parser.parse_args()
    sets = prompt_sets.load(args.prompts, args.limit)
    texts = {f"{name}/{i}": text for name, rows in sets.items() for i, text in enumerate(rows)}
    count = len(texts) * len(args.temperatures)
    config = EngineConfig(
        threads=args.threads,
        scheduler=SchedulerConfig(max_num_reqs=count, max_queue=count),
        speculation=SpeculationConfig(planner="verify_all", calibration="none"),
    )
    llm = LLM(args.model, args.draft, config)
    requests = [
        Request(
            f"{name} at {temperature:g}",
            llm.chat_ids([{"role": "user", "content": text}]),
            SamplingParams(
                temperature=temperature,
                max_tokens=args.tokens + llm.engine.max_draft_tokens + 1,
                seed=seed,
                accept="coupled",
            ),
        )
        for temperature in args.temperatures
        for seed, (name, text) in enumerate(texts.items())
    ]
    traces = [rounded(trace) for trace in blocks_at_every_token(llm.engine, requests)]
    header = {
        "num_draft_tokens": llm.engine.max_draft_tokens,
        "starts": EVERY_TOKEN,
        "accept": "coupled",
        "model": llm.engine.info["model"],
        "draft": llm.engine.info["draft"],
        "prompts": "own" if args.prompts is None else args.prompts.name,
        **record.provenance(),
    }
    write_traces(args.file, header, traces)
    print(f"written: {args.file}, {sum(len(trace.blocks) for trace in traces)} blocks")


if __name__ == "__main__":
    main()
