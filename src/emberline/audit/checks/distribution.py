"""Losslessness: what is drawn at temperature 1 follows the model's law, token after token.

The law comes from prefill: the alternatives after the prompt, and after the prompt with each likely
first token. A draft decides how fast the tokens come and must not decide which.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from emberline.audit.outcome import Finding, Outcome, judged
from emberline.audit.records import Key
from emberline.audit.session import Prompt, Session

LEAST_P = 1e-4
"""A right server fails once in ten thousand audits, and with fixed seeds always or never."""
_LENGTH = 3  # tokens drawn: the first comes from the prefill, the others from a verify step
_LEAST_EXPECTED = 5.0
_NUM_TOP = 20
_CHOICES = 8  # a call

Tokens = tuple[Key, ...]


async def distribution(session: Session) -> Outcome:
    """Chi-square of many short continuations of one prompt, rare ones pooled."""
    prompt = (await session.known_prompts())[1]
    rules: list[tuple[str, Mapping[str, Any]]] = [("seeded", {})]
    rejecting = await session.rejecting()
    if rejecting:
        rules.append(("accept rejection", rejecting))
    findings, figures = [], {}
    law = await _law(session, prompt, session.settings.num_samples)
    for name, options in rules:
        drawn = await _draw(session, prompt, options)
        statistic, freedom, p = chi_square(drawn, law)
        figures[name] = {"chi_square": statistic, "freedom": freedom, "p": p}
        if p <= LEAST_P:
            worst = max(law, key=lambda cell: abs(_count(drawn, cell, law) - law[cell]))
            message = (
                f"prompt {prompt}, temperature 1, {name}, seeds from {session.settings.seed}: "
                f"chi-square {statistic:.1f} of {freedom} degrees, p = {p:.2g}; "
                f"{worst or 'the rest'} came {_count(drawn, worst, law)} times, "
                f"{law[worst]:.1f} expected"
            )
            findings.append(Finding(message, None, {"prompt": list(prompt.ids), **options}))
    shown = ", ".join(f"{name} p = {row['p']:.3g}" for name, row in figures.items())
    note = f"{session.settings.num_samples} continuations, {len(law)} cells, {shown}"
    return judged(findings, note, rules=figures, samples=session.settings.num_samples)


async def _law(session: Session, prompt: Prompt, samples: int) -> dict[Tokens, float]:
    """Expected counts of continuations by their longest cell; () is what begins otherwise.

    Cells are as long as their expected counts allow: a token too rare to be looked behind is a cell
    of its own, and what is rarer still belongs to the cell of the tokens before it.
    """
    cells: dict[Tokens, float] = {}
    open_cells: list[tuple[Tokens, float]] = [((), float(samples))]
    while open_cells:
        prefix, expected = open_cells.pop()
        follow = await _next(session, prompt.ids + tuple(int(key) for key in prefix))
        rest = expected
        for key, probability in follow.items():
            part = expected * probability
            if part < _LEAST_EXPECTED:
                continue
            rest -= part
            cell = (*prefix, key)
            if len(cell) < _LENGTH and part >= 8 * _LEAST_EXPECTED:
                open_cells.append((cell, part))
            else:
                cells[cell] = part
        cells[prefix] = max(rest, 0.0)  # what follows it otherwise
    return cells


async def _next(session: Session, ids: tuple[int, ...]) -> dict[Key, float]:
    """Probabilities of the likeliest next tokens, from a prefill."""
    answer = await session.server.ask(session.ask(ids, max_tokens=1, num_top=_NUM_TOP))
    return {one.key: math.exp(one.logprob) for one in answer.records[0].top}


async def _draw(session: Session, prompt: Prompt, options: Mapping[str, Any]) -> Counter[Tokens]:
    """Continuations by how often they came, of calls with seeds of their own."""

    async def call(number: int, choices: int) -> list[Tokens]:
        ask = session.ask(
            prompt,
            max_tokens=_LENGTH,
            temperature=1.0,
            num_top=1,
            seed=session.settings.seed + 1000 + number,
            n=choices,
            options=options,
        )
        return [answer.keys for answer in await session.server.choices(ask)]

    total = session.settings.num_samples
    sizes = [min(_CHOICES, total - start) for start in range(0, total, _CHOICES)]
    calls = [partial(call, number, size) for number, size in enumerate(sizes)]
    return Counter(keys for some in await session.gathered(calls) for keys in some)


def cell_of(keys: Tokens, law: Mapping[Tokens, float]) -> Tokens:
    """The longest cell that a continuation begins with."""
    return next(keys[:n] for n in range(len(keys), -1, -1) if keys[:n] in law or n == 0)


def _count(drawn: Mapping[Tokens, int], cell: Tokens, law: Mapping[Tokens, float]) -> int:
    return sum(count for keys, count in drawn.items() if cell_of(keys, law) == cell)


def chi_square(
    drawn: Mapping[Tokens, int], law: Mapping[Tokens, float]
) -> tuple[float, int, float]:
    """The statistic, its degrees of freedom, and the probability of a fit at least this bad."""
    counts: Counter[Tokens] = Counter()
    for keys, count in drawn.items():
        counts[cell_of(keys, law)] += count
    pooled = _pooled(law)
    statistic = 0.0
    for cells, expected in pooled:
        observed = sum(counts[cell] for cell in cells)
        statistic += (observed - expected) ** 2 / expected
    freedom = len(pooled) - 1
    return statistic, freedom, tail(statistic, freedom)


def _pooled(law: Mapping[Tokens, float]) -> list[tuple[Sequence[Tokens], float]]:
    """Cells with an expected count of at least five; the others together, with the smallest."""
    small = [cell for cell, expected in law.items() if expected < _LEAST_EXPECTED]
    large = [([cell], expected) for cell, expected in law.items() if cell not in small]
    rest = sum(law[cell] for cell in small)
    if not small:
        return list(large)
    if rest >= _LEAST_EXPECTED or not large:
        return [*large, (small, max(rest, 1e-9))]
    cells, expected = min(large, key=lambda one: one[1])
    large.remove((cells, expected))
    return [*large, ([*cells, *small], expected + rest)]


def tail(statistic: float, freedom: int) -> float:
    """Chance of a chi-square of `freedom` degrees at least as large; its closed form."""
    if freedom < 1 or statistic <= 0:
        return 1.0
    half = statistic / 2
    odd = freedom % 2
    total = math.erfc(math.sqrt(half)) if odd else 0.0
    for k in range(freedom // 2):
        power = k + 0.5 if odd else float(k)
        total += math.exp(power * math.log(half) - half - math.lgamma(power + 1))
    return min(1.0, total)
