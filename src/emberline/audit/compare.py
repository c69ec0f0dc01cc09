"""Two answers to one request, entry by entry: where they part, and whether noise explains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from emberline.audit.outcome import Finding
from emberline.audit.records import Answer, Ask, difference, margin
from emberline.audit.settings import Noise


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of comparing two answers."""

    num_compared: int
    largest: float  # difference of any value, alternatives included, up to where they part
    near_tie: bool  # they part where the two tokens are as likely, but for noise
    findings: tuple[Finding, ...]


def compare(
    what: str,
    ask: Ask,
    one: Answer,
    two: Answer,
    noise: Noise,
    names: tuple[str, str] = ("first", "second"),
) -> Comparison:
    """Compare two answers to `ask`. `what` is how a message names the request."""
    largest, count = 0.0, 0
    for index, (a, b) in enumerate(zip(one.records, two.records, strict=False)):
        where = f"{what}, output token {index}"
        if a.key != b.key:
            lead = margin(a, b.key)
            if ask.temperature == 0 and lead is not None and abs(lead) <= 2 * noise.most:
                return Comparison(count, largest, True, ())
            led = "not among the alternatives" if lead is None else f"{lead:.6g} behind"
            message = (
                f"{where}: token {a.key!r} ({names[0]}) and {b.key!r} ({names[1]}), which is {led}"
            )
            return Comparison(
                count, largest, False, (Finding(message, None, reproduce(ask, one, index)),)
            )
        gap = difference(a, b)
        largest, count = max(largest, gap), count + 1
        if gap > noise.most:
            message = (
                f"{where} ({a.key!r}): {names[0]} {shown(a)}, {names[1]} {shown(b)}: "
                f"{gap:.6g} apart"
            )
            return Comparison(
                count, largest, False, (Finding(message, None, reproduce(ask, one, index)),)
            )
    if len(one.records) != len(two.records):
        message = (
            f"{what}: {len(one.records)} records ({names[0]}) and {len(two.records)} ({names[1]})"
        )
        return Comparison(
            count, largest, False, (Finding(message, None, reproduce(ask, one, count)),)
        )
    return Comparison(count, largest, False, ())


def shown(record: Any) -> str:
    """A record in a message: its value and its first alternatives."""
    top = ", ".join(f"{one.key!r} {one.logprob:.6g}" for one in record.top[:3])
    value = "null" if record.logprob is None else f"{record.logprob:.6g}"
    return f"{value} [{top}]" if top else value


def reproduce(ask: Ask, answer: Answer, index: int) -> dict[str, Any]:
    """What is needed to see it again: the prompt, the tokens up to it, the options."""
    prompt = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
    return {
        "prompt": prompt,
        "output": list(answer.keys[: index + 1]),
        "position": index,
        **ask.shown(),
    }
