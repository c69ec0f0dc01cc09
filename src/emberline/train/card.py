"""A draft's model card, from the files of its run: nothing in it is typed by hand but the notes.

Reads `run.toml`, `metrics.jsonl`, the sampler's log, an evaluation (`emberline eval --json`) and
the draft's calibration; what is missing is left out. Knows no tensors and no engine.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberline.train.dataset import ROUNDS_LOG, read_rounds
from emberline.train.run_log import METRICS, read_lines

Table = Mapping[str, Any]
CALIBRATION = "calibration.json"


@dataclass(frozen=True, slots=True)
class Card:
    """What a card is made of."""

    title: str
    recipe: Table  # run.toml
    metrics: Sequence[Table]  # metrics.jsonl
    rounds: Sequence[Table] = ()  # the sampler's log
    evaluation: Table | None = None
    calibration: Table | None = None
    notes: str = ""

    def markdown(self) -> str:
        """The card."""
        parts = [
            f"# {self.title}",
            _shape(self.recipe["draft"]),
            "## How it was made",
            _made(self.recipe, self.metrics, self.rounds),
            *(_sampled(self.recipe["data"]) if self.rounds else ()),
            *_held_out(self.metrics),
            *(_measured(self.evaluation) if self.evaluation else ()),
            *(_calibrated(self.calibration) if self.calibration else ()),
            *([self.notes.strip()] if self.notes.strip() else ()),
        ]
        return "\n\n".join(parts) + "\n"


def read_card(
    run: Path, title: str, data: Path | None, evaluation: Path | None, draft: Path, notes: str = ""
) -> Card:
    """Collect a run's files.

    Args:
        run: the run's folder.
        title: the card's first line.
        data: token rows it was trained on; None: those in the run.
        evaluation: `emberline eval --json`, if there is one.
        draft: folder of the draft, for its calibration.
        notes: Markdown for the end.

    Raises:
        FileNotFoundError: the folder is no run.
        ValueError: the evaluation is another kind of file.
    """
    recipe, metrics = run / "run.toml", read_lines(run / METRICS)
    if not recipe.is_file() or not metrics:
        raise FileNotFoundError(f"{run}: not a run: it needs run.toml and {METRICS}")
    calibration = draft / CALIBRATION
    return Card(
        title,
        tomllib.loads(recipe.read_text(encoding="utf-8")),
        metrics,
        read_rounds((data or run / "data") / ROUNDS_LOG),
        _read_evaluation(evaluation) if evaluation else None,
        json.loads(calibration.read_text(encoding="utf-8")) if calibration.is_file() else None,
        notes,
    )


def _read_evaluation(path: Path) -> Table:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        whole = all(
            "macro" in figures and "sets" in figures
            for draft in found["drafts"].values()
            for name, figures in draft.items()
            if name.startswith("T=")
        )
        if whole and found["drafts"] and found["settings"]:
            return dict(found)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"{path}: not what `emberline eval --json` writes: give that file to --eval")


def _shape(draft: Table) -> str:
    taps = ", ".join(map(str, draft["target_layer_ids"]))
    heads = draft.get("markov_rank") or draft.get("enable_confidence_head")
    name = "EAGLE-3" if draft["algorithm"] == "eagle3" else "DSpark" if heads else "DFlash"
    parts = [
        f"{name} draft: {draft['num_hidden_layers']} layers",
        f"{draft['block_size']} drafts a block",
        f"reads the target after layers {taps}",
    ]
    if draft.get("markov_rank"):
        kind = draft.get("markov_head_type", "vanilla")
        parts.append(f"{kind} Markov head of rank {draft['markov_rank']}")
    parts.append("confidence head" if draft.get("enable_confidence_head") else "no confidence head")
    return "; ".join(parts) + ". Embedding and output head are the target's."


def _made(recipe: Table, metrics: Sequence[Table], rounds: Sequence[Table]) -> str:
    rows = []
    if rounds:
        num_rows = sum(line["rows"] for line in rounds if line["split"] == "train")
        seconds = sum(line["seconds"] for line in rounds)
        tokens = num_rows * recipe["data"]["seq_len"]
        what = f"{num_rows:,} rows of {recipe['data']['seq_len']} tokens = {tokens / 1e6:.1f} M"
        rows.append(("data", f"{what}, sampled from the target", f"{seconds:,.0f}"))
    train, loss, optim = recipe["train"], recipe["loss"], recipe["optim"]
    last = [line for line in metrics if line["split"] == "train"][-1]
    slots = train["seqs_per_step"] * train["anchors"] * recipe["draft"]["block_size"]
    terms = [
        f"{_weight(loss[key])} {name}"
        for key, name in TERMS.items()
        if key in loss and loss[key] != 0
    ]
    what = (
        f"{last['step']:,} steps of {train['seqs_per_step']} rows x {train['anchors']} blocks = "
        f"{slots:,} slots; {last['epoch']:.2f} epochs; Muon {optim['muon_lr']:g} on the matrices, "
        f"AdamW {optim['adam_lr']:g} on the rest, cosine; {' + '.join(terms)}"
    )
    rows.append(("training", what, f"{last['seconds']:,.0f}"))
    return _table(("stage", "what", "seconds of one device"), rows)


TERMS = {
    "ce": "CE",
    "l1": "L1",
    "soft_ce": "CE against the target",
    "l1_sharp": "sharpened L1",
    "confidence": "confidence BCE",
}


def _weight(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else f"{value} x"


def _sampled(data: Table) -> list[str]:
    shares = zip(data["temperatures"], data["temperature_weights"], strict=True)
    mix = ", ".join(f"{temperature:g} ({share:.0%})" for temperature, share in shares)
    return [
        f"Answer temperatures in the data, by row: {mix}. {data['question_fraction']:.0%} of the "
        "chats start from a question made of hand-written templates, the others from its first "
        "words or from nothing. No outside text and no benchmark prompt was used."
    ]


def _held_out(metrics: Sequence[Table]) -> list[str]:
    found = {line["split"]: line for line in metrics}  # the last of each
    if "held_out" not in found:
        return []
    names = {"train": "training rows", "held_out": "held-out rows"}
    width = len(found["train"]["acceptance"])
    rows = [
        (name, *_shares(found[split]["acceptance"]), f"{found[split]['ece']:.3f}")
        for split, name in names.items()
    ]
    header = ("chance of acceptance", *map(str, range(1, width + 1)), "ECE of the raw confidence")
    return [
        "## On rows like the training rows",
        "Teacher-forced, T = 1, by position: 1 - L1 / 2.",
        _table(header, rows),
    ]


def _measured(evaluation: Table) -> list[str]:
    settings = evaluation["settings"]
    lengths, rates, calibration = [], [], []
    sets: list[str] = []
    for name, draft in evaluation["drafts"].items():
        for key, found in draft.items():
            if not key.startswith("T="):
                continue
            at = key.replace("=", " = ")
            if len(evaluation["drafts"]) > 1:
                at = f"{name}, {at}"
            sets = list(found["sets"])
            mean = f"{found['macro']:.2f} ± {found['macro_standard_error']:.2f}"
            cells = (f"{one['acceptance_length']:.2f}" for one in found["sets"].values())
            lengths.append((at, *cells, mean))
            rates.append((at, *_shares(found["all"]["conditional_acceptance"])))
            if "auc" in found["all"]:
                calibration.append((f"{at}, ECE", *_shares(found["all"]["ece"])))
                calibration.append((f"{at}, AUC", *_shares(found["all"]["auc"])))
    positions = tuple(map(str, range(1, len(rates[0]))))
    asked = ", ".join(f"{count} of {name}" for name, count in settings["prompts"].items())
    parts = [
        "## Measured",
        "Acceptance length = emitted tokens / verify steps, the verifier's own token included: "
        f"prompts {asked}, at most {settings['max_tokens']} new tokens, default system prompt, "
        f"planner {settings['planner']}. ± is the standard error by prompt.",
        _table(("temperature", *sets, "mean"), lengths),
        "Conditional acceptance by position:",
        _table(("temperature", *positions), rates),
    ]
    if calibration:
        known = all(draft["info"].get("calibrated") for draft in evaluation["drafts"].values())
        which = "calibrated" if known else "raw"
        parts.append(f"How true survival was by position, {which} confidences:")
        parts.append(_table(("", *positions), calibration))
    return parts


def _shares(values: Sequence[float | None]) -> list[str]:
    return ["" if value is None else f"{abs(value):.3f}" for value in values]


def _calibrated(calibration: Table) -> list[str]:
    temperatures = ", ".join(f"{value:g}" for value in calibration["temperatures"])
    return [
        f"`{CALIBRATION}`: temperatures {temperatures}, fitted to {calibration['num_samples']:,} "
        f"blocks ({calibration['dataset']})."
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
