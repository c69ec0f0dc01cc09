"""What speculation did, block by block: for calibration and for replaying policies.

Owns the records and their file. Must not know engines, nor what is made of the records.

A trace file is JSON lines. The first says how it was recorded: `format`, `num_draft_tokens`, and
whatever else the recorder states. Each other line is one finished request, its blocks in order:

    {"prompt": "...", "temperature": 0.0,
     "confidence": [[0.91, 0.83], ...], "num_verified": [2, ...], "num_accepted": [1, ...]}

`prompt` is a name: requests that share it share the prompt. Confidences are uncalibrated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emberline.models.weights import ModelError
from emberline.verify.calibration import Samples

FORMAT = "emberline-traces-1"
DIGITS = 8  # more than a float32 has
LEAST = 1e-7  # a float32 confidence of exactly 0 or 1 has no logit


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """One request's block of one step."""

    request_id: str
    confidence: tuple[float, ...]  # of every draft drawn, given those before it; () = says none
    num_verified: int
    num_accepted: int  # of those, before the run is cut at a stop


Observer = Callable[[Sequence[BlockTrace]], None]


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """All blocks of one finished request, in order."""

    prompt: str  # its name
    temperature: float
    blocks: tuple[BlockTrace, ...]


def samples(traces: Iterable[RequestTrace], num_draft_tokens: int) -> Samples:
    """All blocks as what a calibration is fitted to.

    A draft that was not verified counts as unknown: had it been, it might have stood.
    """
    blocks = [block for trace in traces for block in trace.blocks]
    confidence = np.full((len(blocks), num_draft_tokens), np.nan)
    for row, block in zip(confidence, blocks, strict=True):
        row[: block.num_verified] = block.confidence[: block.num_verified]
    accepted = np.array([block.num_accepted for block in blocks], dtype=np.int64)
    clipped = np.clip(confidence, LEAST, 1 - LEAST)
    logits = np.log(clipped) - np.log1p(-clipped)
    return Samples(logits, np.arange(num_draft_tokens) < accepted[:, None])


def write_traces(
    path: Path, header: Mapping[str, object], traces: Iterable[RequestTrace] = ()
) -> None:
    """Write a trace file. `header` states `num_draft_tokens` and how it was recorded."""
    lines = [json.dumps({"format": FORMAT, **header}), *map(_line, traces)]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def append_trace(path: Path, trace: RequestTrace) -> None:
    """Add one request to a trace file, at once: an interrupted run keeps what it had."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(trace) + "\n")


def read_traces(path: Path) -> tuple[Mapping[str, Any], list[RequestTrace]]:
    """The header of a trace file and its requests. A last line that was cut short is left out.

    Raises:
        ModelError: the file is no trace file; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ModelError(f"{path}: cannot be read as a trace file ({problem})") from problem
    first, *rest = text[: text.rfind("\n") + 1].splitlines() or [""]
    traces = []
    for number, line in enumerate([first, *rest], start=1):
        try:
            raw = json.loads(line)
            if number == 1:
                header = _header(raw)
            else:
                traces.append(_request(raw, header["num_draft_tokens"]))
        except (KeyError, TypeError, ValueError) as problem:
            what = f"a header of format {FORMAT}" if number == 1 else "a request's trace"
            raise ModelError(f"{path}: line {number}: expected {what} ({problem!r})") from problem
    return header, traces


def _line(trace: RequestTrace) -> str:
    return json.dumps(
        {
            "prompt": trace.prompt,
            "temperature": trace.temperature,
            "confidence": [
                [float(f"{value:.{DIGITS}g}") for value in block.confidence]
                for block in trace.blocks
            ],
            "num_verified": [block.num_verified for block in trace.blocks],
            "num_accepted": [block.num_accepted for block in trace.blocks],
        },
        separators=(",", ":"),
    )


def _header(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    if raw["format"] != FORMAT:
        raise ValueError(f"format {raw['format']!r}")
    if not (isinstance(raw["num_draft_tokens"], int) and raw["num_draft_tokens"] > 0):
        raise ValueError(f"num_draft_tokens {raw['num_draft_tokens']!r}")
    return raw


def _request(raw: Mapping[str, Any], num_draft_tokens: int) -> RequestTrace:
    columns = zip(raw["confidence"], raw["num_verified"], raw["num_accepted"], strict=True)
    blocks = []
    for confidence, verified, accepted in columns:
        if not 0 <= accepted <= verified <= len(confidence) <= num_draft_tokens:
            raise ValueError(f"{accepted} accepted of {verified} of {len(confidence)} drafts")
        chances = tuple(map(float, confidence))
        if not all(0.0 <= chance <= 1.0 for chance in chances):
            raise ValueError("a confidence outside [0, 1]")
        blocks.append(BlockTrace(str(raw["prompt"]), chances, int(verified), int(accepted)))
    return RequestTrace(str(raw["prompt"]), float(raw["temperature"]), tuple(blocks))
