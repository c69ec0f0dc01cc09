"""Cost tables of other engines: SGLang's two and TensorRT-LLM's two.

Owns their fields and what is lost between them and `StepCosts`. Must not know files.

All four hold the time of a whole step in which every request drafts a whole block. So a table that
is read has no draft costs, and one that is written has those of a whole block in every value.
What their lookups do between and past the points is theirs: here lines connect the points and go on
past the last one. Fields that are policy or provenance, not cost, are not read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from emberline.verify.cost_profile import CostProfile
from emberline.verify.step_cost import Floats, StepCosts

ForeignFormat = Literal["sglang", "sglang-additive", "tensorrt-llm", "tensorrt-llm-v2"]
Table = Mapping[str, Any]

MILLI = 1e-3
MINIMUM_PREDICTED_GAIN = 0.04
"""What TensorRT-LLM wants of a trimmed step over a whole one by default; its v2 needs a value."""
MOST_COMPACT_CELLS = 32
MOST_COMPACT_CELLS_A_BATCH = 4
"""What TensorRT-LLM's v2 accepts of trimmed steps in all, and for one number of requests."""


def format_of(data: Table) -> ForeignFormat | None:
    """Which of the schemas this is, by the field that only it has."""
    signs: dict[str, ForeignFormat] = {
        "bias_seconds": "sglang-additive",
        "sample_batch_tokens": "sglang",
        "cost_tables": "tensorrt-llm-v2",
        "token_counts": "tensorrt-llm",
    }
    return next((name for sign, name in signs.items() if sign in data), None)


def read(kind: ForeignFormat, data: Table) -> StepCosts:
    """The costs in a table, all of them in the target's part.

    Raises:
        ValueError: a field is absent or has no meaning; the message names it.
    """
    readers: dict[ForeignFormat, Callable[[Table], StepCosts]] = {
        "sglang": _read_diagonal,
        "sglang-additive": _read_sglang_additive,
        "tensorrt-llm": _read_tensorrt_llm,
        "tensorrt-llm-v2": _read_tensorrt_llm_v2,
    }
    return readers[kind](data)


def write(kind: ForeignFormat, profile: CostProfile) -> dict[str, Any]:
    """A profile as another engine's table.

    What is lost: how a whole step divides into drafting and the rest, always. SGLang's diagonal
    keeps whole blocks of each number of requests only, no trimmed step. The additive tables
    (SGLang's second, TensorRT-LLM's first) keep the sum of a term in requests and one in tokens
    that comes closest. TensorRT-LLM's second keeps a few trimmed steps for each number of
    requests, as many as it accepts; it also accepts tables of its own engine only, and the
    fingerprint here says truly that Emberline was measured.
    """
    writers: dict[ForeignFormat, Callable[[CostProfile], dict[str, Any]]] = {
        "sglang": _write_diagonal,
        "sglang-additive": _write_sglang_additive,
        "tensorrt-llm": _write_tensorrt_llm,
        "tensorrt-llm-v2": _write_tensorrt_llm_v2,
    }
    return writers[kind](profile)


# SGLang, tokens only


def _read_diagonal(data: Table) -> StepCosts:
    tokens = _rising(data, "sample_batch_tokens")
    rates = _numbers(data, "sample_steps_per_sec", len(tokens), positive=True)
    most = data.get("max_batch_tokens")
    if type(most) is not int or most < tokens[-1]:
        raise ValueError(f"max_batch_tokens must be an integer from {tokens[-1]}, got {most!r}")
    return _by_tokens(tokens, [1 / rate for rate in rates])


def _write_diagonal(profile: CostProfile) -> dict[str, Any]:
    rows = _rows(profile.costs)
    if len(rows) == 1:  # requests make no difference: the table is the diagonal
        ((num_reqs, tokens),) = rows.items()
        cells = [(num_reqs, count) for count in tokens]
    else:
        cells = [(reqs, reqs * (1 + profile.measured_on.max_draft_tokens)) for reqs in rows]
    seconds = [_whole(profile, reqs, tokens) for reqs, tokens in cells]
    return {
        "sample_batch_tokens": [tokens for _, tokens in cells],
        "sample_steps_per_sec": [1 / value for value in seconds],
        "max_batch_tokens": cells[-1][1],
    }


# Additive tables: bias + alpha(requests) + theta(tokens)


@dataclass(frozen=True, slots=True)
class _Additive:
    """Seconds = bias + alpha(requests) + theta(tokens), each term linear between its points."""

    bias: float
    reqs: Sequence[int]
    alpha: Sequence[float]
    tokens: Sequence[int]
    theta: Sequence[float]

    def costs(self) -> StepCosts:
        """All combinations: between them interpolation by both counts is the same sum."""
        return StepCosts(
            tuple(
                (num_reqs, num_tokens, self.bias + alpha + theta)
                for num_reqs, alpha in zip(self.reqs, self.alpha, strict=True)
                for num_tokens, theta in zip(self.tokens, self.theta, strict=True)
            ),
            (),
        )

    @classmethod
    def fit(cls, profile: CostProfile) -> _Additive:
        """The closest sum, by least squares, with terms that start at 0."""
        rows = _rows(profile.costs)
        reqs, tokens = list(rows), sorted({count for row in rows.values() for count in row})
        # Every row is read at the tokens of all rows within its own span: what ties the rows
        # together are the counts that several of them have.
        cells = [
            (reqs.index(num_reqs), index, _whole(profile, num_reqs, count))
            for num_reqs, row in rows.items()
            for index, count in enumerate(tokens)
            if row[0] <= count <= row[-1]
        ]
        design = np.zeros((len(cells), len(reqs) + len(tokens)))
        for cell, (row, column, _) in enumerate(cells):
            design[cell, row] = design[cell, len(reqs) + column] = 1.0
        terms = np.linalg.lstsq(design, np.array([value for *_, value in cells]), rcond=None)[0]
        alpha = terms[: len(reqs)]
        theta = np.maximum.accumulate(terms[len(reqs) :])
        least = min(value for *_, value in cells)
        bias = max(float(alpha.min() + theta[0]), 0.01 * least)  # a bias of 0 is not allowed
        return cls(bias, reqs, (alpha - alpha.min()).tolist(), tokens, (theta - theta[0]).tolist())


def _read_sglang_additive(data: Table) -> StepCosts:
    bias = _number(data.get("bias_seconds"), "bias_seconds", positive=True)
    reqs, tokens = _rising(data, "bs_probes", least=1), _rising(data, "m_probes")
    alpha = _numbers(data, "alpha_seconds", len(reqs))
    theta = _numbers(data, "theta_seconds", len(tokens))
    return _Additive(bias, reqs, alpha, tokens, theta).costs()


def _write_sglang_additive(profile: CostProfile) -> dict[str, Any]:
    fit = _Additive.fit(profile)
    return {
        "bias_seconds": fit.bias,
        "bs_probes": list(fit.reqs),
        "alpha_seconds": list(fit.alpha),
        "m_probes": list(fit.tokens),
        "theta_seconds": list(fit.theta),
    }


def _read_tensorrt_llm(data: Table) -> StepCosts:
    tokens = _rising(data, "token_counts")
    theta = _numbers(data, "step_time_ms", len(tokens), positive=True)
    bias = _number(data.get("fixed_overhead_ms", 0.0), "fixed_overhead_ms")
    reqs, alpha = [1], [0.0]
    if data.get("batch_sizes"):
        reqs = _rising(data, "batch_sizes", least=1)
        alpha = _numbers(data, "batch_overhead_ms", len(reqs))
    return _scaled(_Additive(bias, reqs, alpha, tokens, theta), MILLI).costs()


def _write_tensorrt_llm(profile: CostProfile) -> dict[str, Any]:
    fit = _scaled(_Additive.fit(profile), 1 / MILLI)
    return {
        "token_counts": list(fit.tokens),
        # The bias goes in here: this term alone must be positive.
        "step_time_ms": [fit.bias + theta for theta in fit.theta],
        "fixed_overhead_ms": 0.0,
        "batch_sizes": list(fit.reqs),
        "batch_overhead_ms": list(fit.alpha),
    }


def _scaled(sum_: _Additive, by: float) -> _Additive:
    alpha, theta = [by * value for value in sum_.alpha], [by * value for value in sum_.theta]
    return _Additive(by * sum_.bias, sum_.reqs, alpha, sum_.tokens, theta)


# TensorRT-LLM, a table for each number of requests


def _read_tensorrt_llm_v2(data: Table) -> StepCosts:
    version, tables = data.get("schema_version"), data.get("cost_tables")
    if version != 2:
        raise ValueError(f"schema_version must be 2, got {version!r}")
    if not isinstance(tables, dict) or not tables:
        raise ValueError("cost_tables must be an object with a table for each batch size")
    fingerprint = data.get("engine_fingerprint")
    most = fingerprint.get("max_draft_len") if isinstance(fingerprint, dict) else None
    if type(most) is not int or most < 1:
        raise ValueError(f"engine_fingerprint.max_draft_len must be at least 1, got {most!r}")
    if data.get("engine_fingerprint_sha256") != _digest(fingerprint):
        raise ValueError("engine_fingerprint_sha256 is not that of engine_fingerprint")
    points = []
    for key, table in tables.items():
        name = f"cost_tables[{key!r}]"
        if not key.isdecimal() or key.startswith("0") or not isinstance(table, dict):
            raise ValueError(f"{name} must be a table under a number of requests")
        try:
            tokens = _rising(table, "token_counts")
            times = _numbers(table, "step_time_ms", len(tokens), positive=True)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        cells = {count: MILLI * ms for count, ms in zip(tokens, times, strict=True)}
        # 0 tokens stands for the untrimmed step, which has every token of every block.
        whole = cells.pop(0, None)
        if whole is not None:
            cells.setdefault(int(key) * (1 + most), whole)
        points += [(int(key), count, value) for count, value in cells.items()]
    return StepCosts(tuple(points), ())


def _write_tensorrt_llm_v2(profile: CostProfile) -> dict[str, Any]:
    rows, facts = _rows(profile.costs), profile.measured_on
    most = max(facts.max_draft_tokens, 1)
    source = _digest([profile.costs.target, profile.costs.draft])
    fingerprint = {
        "global_graph_batch_sizes": list(rows),
        "gpu": facts.processor,
        "gpu_count": 1,
        "gpu_snapshot_sha256": _digest([facts.processor, facts.num_cores, facts.threads]),
        "max_draft_len": most,
        "rank_local_graph_batch_sizes": list(rows),
        "runtime_snapshot": f"emberline {facts.emberline}, torch {facts.torch}",
        "source_diff_sha256": _digest(asdict(facts)),
        "source_head": f"emberline-{facts.emberline}",
        "topology": "TP1",
    }
    each = min(MOST_COMPACT_CELLS_A_BATCH, MOST_COMPACT_CELLS // len(rows))
    tables, measurements = {}, []
    for num_reqs, tokens in rows.items():
        whole = num_reqs * (1 + most)
        trimmed = _spread([count for count in tokens if num_reqs <= count < whole], each)
        cells = {0: _whole(profile, num_reqs, whole) / MILLI}
        cells |= {count: _whole(profile, num_reqs, count) / MILLI for count in trimmed}
        tables[str(num_reqs)] = {
            "token_counts": list(cells),
            "step_time_ms": list(cells.values()),
        }
        measurements += [
            {
                "rank_local_graph_batch_size": num_reqs,
                "rank_local_verifier_budget": count,
                "step_time_ms": value,
                "source_result_sha256": source,
            }
            for count, value in cells.items()
        ]
    return {
        "schema_version": 2,
        "minimum_predicted_gain": MINIMUM_PREDICTED_GAIN,
        "cost_tables": tables,
        "engine_fingerprint": fingerprint,
        "engine_fingerprint_sha256": _digest(fingerprint),
        "measurements": measurements,
    }


def _spread(values: list[int], count: int) -> list[int]:
    """At most `count` of the values, ends first, evenly."""
    if len(values) <= count:
        return values
    return [values[round(at)] for at in np.linspace(0, len(values) - 1, count)]


# What they share


def _by_tokens(tokens: Sequence[int], seconds: Sequence[float]) -> StepCosts:
    """Costs that do not depend on the number of requests."""
    return _Additive(0.0, [1], [0.0], tokens, seconds).costs()


def _rows(costs: StepCosts) -> dict[int, list[int]]:
    """Token counts that were measured, by number of requests, both rising."""
    rows: dict[int, list[int]] = {}
    for num_reqs, num_tokens, _ in sorted(costs.target):
        rows.setdefault(num_reqs, []).append(num_tokens)
    return rows


def _whole(profile: CostProfile, num_reqs: int, num_tokens: int) -> float:
    """Seconds of a step in which every request drafts a whole block."""
    target: Floats = profile.costs.target_seconds(num_reqs, np.array([num_tokens]))
    drafting = profile.costs.draft_seconds(num_reqs, profile.measured_on.max_draft_tokens)
    return float(target[0]) + drafting


def _rising(data: Table, name: str, least: int = 0) -> list[int]:
    values = data.get(name)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name} must be a list with at least one integer")
    for before, value in zip([least - 1, *values], values, strict=False):
        if type(value) is not int or value <= before:
            raise ValueError(f"{name} must hold rising integers from {least}, got {value!r}")
    return values


def _numbers(data: Table, name: str, count: int, *, positive: bool = False) -> list[float]:
    values = data.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{name} must be a list of {count} numbers")
    return [_number(value, name, positive=positive) for value in values]


def _number(value: Any, name: str, *, positive: bool = False) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf or (positive and not value):
        rule = "positive" if positive else "not negative"
        raise ValueError(f"{name} must be finite and {rule}, got {value!r}")
    return float(value)


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
