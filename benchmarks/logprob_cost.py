"""What log-probabilities cost a step of eight requests, asked for and not.

python benchmarks/logprob_cost.py [--users 8] [--tokens 48] [--rounds 3] [--cases off "top 5"]

The same seeded workload runs over and over on one engine and one kernel thread. Every step is taken
in two ways: as it is, and with the functions that score replaced by ones that do nothing, which is
a build that never computes them. The two ways alternate from step to step and change places from
run to run, so that each meets every step; of a step the least time of each way counts, on the
thread's own clock, and the sums over all steps of decoding are compared. The planner begins every
run anew, for what it remembers would make the runs differ.

`cost` is that comparison, which other programs on the machine disturb by some percent. `inside` is
the share of the scored steps that was spent in the functions themselves: little disturbs it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.progress import track
from rich.table import Table

from emberline.config import EngineConfig
from emberline.engine import outcome, plain_step
from emberline.engine.plan import ScheduledRequest
from emberline.llm import LLM
from emberline.types import Request, SamplingParams

import prompts as prompt_sets
import record

SCORING = ((outcome, "score_emitted"), (outcome, "annotate"), (plain_step, "score_prompts"))
LIMITS = {"off": 0.01, "top 5": 0.05}


def no_records(plan: Sequence[ScheduledRequest], *_: object) -> list[None]:
    """Stands in for what scores: nobody gets a record."""
    return [None] * len(plan)


class Switch:
    """Puts the scoring functions in their place, or what does nothing."""

    def __init__(self) -> None:
        self.spent = 0.0  # seconds inside them
        self._real = [(owner, name, getattr(owner, name)) for owner, name in SCORING]

    def turn(self, *, on: bool) -> None:
        """Whether the next step scores."""
        for owner, name, real in self._real:
            setattr(owner, name, self._timed(real) if on else no_records)

    def _timed(self, scores: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object) -> object:
            began = time.thread_time()
            result = scores(*args)
            self.spent += time.thread_time() - began
            return result

        return timed

    def restore(self) -> None:
        """Leave the functions as they were."""
        for owner, name, real in self._real:
            setattr(owner, name, real)


def run(
    llm: LLM, prompts: Sequence[tuple[int, ...]], params: SamplingParams, switch: Switch, odd: bool
) -> tuple[list[float], int]:
    """Seconds of every decoding step; those of one parity are scored. And the tokens emitted."""
    llm.engine.clear_prefix_cache()
    for number, ids in enumerate(prompts):
        llm.engine.add(Request(f"{number}", ids, replace(params, seed=number)))
    seconds: list[float] = []
    begun: set[str] = set()
    tokens = 0
    while llm.engine.has_work:
        decodes = len(begun) == len(prompts)
        switch.turn(on=len(seconds) % 2 == odd)
        began = time.thread_time()
        outputs = llm.engine.step()
        if decodes:
            seconds.append(time.thread_time() - began)
            tokens += sum(len(output.token_ids) for output in outputs)
        else:
            switch.spent = 0.0
        begun |= {output.request_id for output in outputs}
    switch.restore()
    return seconds, tokens


def measure(
    llm: LLM, prompts: Sequence[tuple[int, ...]], params: SamplingParams, rounds: int
) -> dict[str, float]:
    """Seconds of the workload both ways, and what scoring adds."""
    switch, planner = Switch(), llm.engine.parts.planner
    name = str(llm.engine.info["planner"])
    least: dict[tuple[int, bool], float] = {}  # by step, and whether it was scored
    inside = 0.0  # share of the scored steps' time that went by in what scores
    for odd in itertools.islice(itertools.cycle((False, True)), 2 * rounds):
        llm.engine.use_planner(copy.deepcopy(planner), name)
        seconds, tokens = run(llm, prompts, params, switch, odd)
        inside += switch.spent / sum(seconds[int(odd) :: 2]) / (2 * rounds)
        for step, spent in enumerate(seconds):
            key = step, step % 2 == odd
            least[key] = min(spent, least.get(key, spent))
    llm.engine.use_planner(planner, name)
    never, scored = (
        sum(spent for (_, scores), spent in least.items() if scores is way) for way in (False, True)
    )
    assert len(least) == 2 * len(seconds), "the workload changed from run to run"
    return {
        "never": never,
        "scored": scored,
        "cost": scored / never - 1,
        "inside": inside,
        "steps": len(seconds),
        "tokens": tokens,
    }


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=8, help="requests at the same time")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="times that a step is met each way")
    parser.add_argument("--cases", nargs="+", help="of those in the table; default: all")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--out", default="logprob-cost", help="name of the results file")
    args = parser.parse_args()
    llm = LLM(config=EngineConfig(dtype=args.dtype, threads=1))
    texts = [text for row in zip(*prompt_sets.OWN.values(), strict=False) for text in row]
    conversations = [[{"role": "user", "content": text}] for text in texts[: args.users]]
    prompts = [llm.chat_ids(conversation) for conversation in conversations]
    plain = SamplingParams(max_tokens=args.tokens, ignore_eos=True, accept="rejection")
    asked = {
        "off": plain,
        "logprobs 0": replace(plain, logprobs=0),
        "top 5": replace(plain, logprobs=5),
        "top 5, annotated": replace(plain, logprobs=5, annotations=True),
        "top 5 of both": replace(plain, logprobs=5, logprobs_mode="both"),
    }
    cases = [(mode, name) for mode in ("greedy", "sampled") for name in args.cases or asked]
    rows: dict[str, dict[str, dict[str, float]]] = {"greedy": {}, "sampled": {}}
    table = Table(
        "", "asked for", "never, s", "scored, s", "cost", "inside", "limit", "steps", "tokens"
    )
    measure(llm, prompts, replace(plain, max_tokens=8), 1)  # warm-up
    for mode, name in track(cases, "cases"):
        params = replace(asked[name], temperature=float(mode == "sampled"))
        rows[mode][name] = row = measure(llm, prompts, params, args.rounds)
        limit = f"{LIMITS[name]:.0%}" if name in LIMITS else ""
        table.add_row(
            mode,
            name,
            *(f"{row[way]:.3f}" for way in ("never", "scored")),
            f"{row['cost']:+.2%}",
            f"{row['inside']:.2%}",
            limit,
            *(f"{row[count]:.0f}" for count in ("steps", "tokens")),
        )
    Console(width=110).print(table)
    figures: dict[str, object] = {
        "unit": "seconds of processor time, one thread",
        "info": llm.engine.info,
        "users": len(prompts),
        "answer_tokens": args.tokens,
        "rounds": args.rounds,
        "limits": LIMITS,
        "cases": rows,
    }
    print("written:", record.write(args.out, figures))


if __name__ == "__main__":
    main()
