"""How exact a GPU's answers are: in float32 against the CPU, in bfloat16 against float32.

    PYTHONPATH=benchmarks python -m gpu.exactness --model FOLDER --draft FOLDER

1. float32: greedy answers of the GPU's engine and of the CPU's, token for token, drafted and
   scheduled as each does by default; and how far the log-probabilities of the same tokens, the
   alternatives included, are apart.
2. bfloat16: log-probabilities that came with greedy answers, against the float32 engine's for the
   same texts, teacher-forced in one pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from emberline.hub import load_tokenizer, resolve_model
from emberline.llm import LLM, Completion
from emberline.types import SamplingParams

import record
from gpu.workload import machine, read_prompts, settings

TOP = 5


@dataclass(frozen=True, slots=True)
class Sameness:
    """Two engines' answers to the same prompts."""

    prompts: int
    same: int  # answers with the same tokens
    tokens: int  # compared: those before an answer's first difference
    max_diff: float  # of log-probabilities, nats, the emitted tokens'
    max_top_diff: float  # of the alternatives that both list
    first_differences: tuple[str, ...]  # where tokens part, for people

    @classmethod
    def of(cls, ours: Sequence[Completion], theirs: Sequence[Completion]) -> Sameness:
        """Compare answer by answer."""
        same, tokens, worst, worst_top, notes = 0, 0, 0.0, 0.0, []
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            length = _agreement(one.token_ids, other.token_ids)
            same += one.token_ids == other.token_ids
            tokens += length
            assert one.logprobs is not None
            assert other.logprobs is not None
            for a, b in zip(one.logprobs[:length], other.logprobs[:length], strict=True):
                worst = max(worst, abs(a.logprob - b.logprob))
                there = dict(zip(b.top_ids, b.top_logprobs, strict=True))
                for token, value in zip(a.top_ids, a.top_logprobs, strict=True):
                    worst_top = max(worst_top, abs(value - there.get(token, value)))
            if one.token_ids != other.token_ids:
                notes.append(_note(number, length, one, other))
        return cls(len(ours), same, tokens, worst, worst_top, tuple(notes))


def _agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def _note(number: int, length: int, one: Completion, other: Completion) -> str:
    """Where two answers part, and how near the two tokens were to each other."""
    assert one.logprobs is not None
    if length >= min(len(one.token_ids), len(other.token_ids)):
        return f"prompt {number}: one answer is {length} tokens long and the other goes on"
    top = one.logprobs[length].top_logprobs
    gap = f"{top[0] - top[1]:.6f}" if len(top) > 1 else "?"
    return (
        f"prompt {number} at token {length}: {one.token_ids[length]}, not "
        f"{other.token_ids[length]}; the best two are {gap} apart"
    )


@dataclass(frozen=True, slots=True)
class Noise:
    """Log-probabilities of tokens in one dtype against another."""

    tokens: int
    mean: float  # of the absolute differences, nats
    median: float
    max: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Noise:
        """Summarise."""
        return cls(
            len(differences),
            statistics.fmean(differences),
            statistics.median(differences),
            max(differences),
        )


def answer(llm: LLM, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[Completion]:
    """Greedy answers with their log-probabilities, all prompts at once."""
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=TOP)
    return [choices[0] for choices in llm.generate(prompts, params)]


def rescored(
    judge: LLM, prompts: Sequence[tuple[int, ...]], answers: Sequence[Completion]
) -> list[float]:
    """How far each token's log-probability is from another engine's, absolutely."""
    differences: list[float] = []
    for prompt, one in zip(prompts, answers, strict=True):
        assert one.logprobs is not None
        [scores] = judge.score([prompt + one.token_ids], start=len(prompt))
        if scores.error is not None:
            raise RuntimeError(scores.error)
        theirs = scores.logprobs[len(prompt) :].tolist()
        differences += [abs(a.logprob - b) for a, b in zip(one.logprobs, theirs, strict=True)]
    return differences


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write `results/<name>.json`."""
    args = _arguments(argv)
    folder = resolve_model(args.model)
    prompts = read_prompts(args.prompts, load_tokenizer(folder.path))[: args.count]
    longest = max(len(ids) for ids in prompts) + args.tokens

    def load(device: str, dtype: str) -> LLM:
        return LLM(args.model, args.draft, settings(device, dtype, len(prompts), longest))

    wide = load(args.device, "float32")
    figures: dict[str, object] = {**machine(args.device), "prompts": len(prompts)}
    ours = answer(wide, prompts, args.tokens)
    try:
        began = time.perf_counter()
        theirs = answer(load("cpu", "float32"), prompts, args.tokens)
        found = Sameness.of(ours, theirs)
        seconds = round(time.perf_counter() - began, 1)
        figures["float32_vs_cpu"] = {**asdict(found), "cpu_seconds": seconds}
        print(
            f"float32: {found.same} of {found.prompts} answers are the CPU's, {found.tokens} tokens"
        )
        print(f"    log-probabilities within {found.max_diff:.2e}, top {found.max_top_diff:.2e}")
        print(*(f"    {note}" for note in found.first_differences), sep="\n")
    except Exception as problem:  # the other half may run: there is no second look
        print(json.dumps({"part": "float32", "error": repr(problem)[:300]}))
    try:
        narrow = load(args.device, "bfloat16")
        noise = Noise.of(rescored(wide, prompts, answer(narrow, prompts, args.tokens)))
        own = Noise.of(rescored(wide, prompts, ours))
        for name, one in (("bfloat16_vs_float32", noise), ("float32_vs_rescored", own)):
            figures[name] = asdict(one)
            print(f"{name}: {one.tokens} tokens, mean {one.mean:.2e}, max {one.max:.2e}")
    except Exception as problem:
        print(json.dumps({"part": "bfloat16", "error": repr(problem)[:300]}))
    print("written:", record.write(args.name, figures))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="folder of the target; default: the embedded model")
    parser.add_argument("--draft", help="folder of the draft; default: the shipped one")
    parser.add_argument("--prompts", type=Path, help="a JSON list of token ids a line")
    parser.add_argument("--count", type=int, default=20, help="prompts")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--device", default="cuda", help="beside the CPU")
    parser.add_argument("--name", default="gpu-exactness", help="of the file of results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
