"""What a run is made from, as one TOML file with sections draft, data, loss, optim and train.

Owns the names and kinds of its keys, and that an unknown one is refused. Later layers win: the
defaults, what the algorithm implies, the file, single changes.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from emberline.train.config import (
    SCHEDULED,
    DraftConfig,
    LossConfig,
    OptimConfig,
    SynthesisConfig,
    TrainConfig,
)
from emberline.train.schedule import MOST, read_schedule

FeatureSource = Literal["fresh", "cached"]
Layers = dict[str, dict[str, Any]]

ALGORITHMS: dict[str, Layers] = {
    "dspark": {"draft": {"algorithm": "dspark"}},
    "dflash": {
        "draft": {"algorithm": "dspark", "markov_rank": 0, "enable_confidence_head": False},
        "loss": {"ce": 1.0, "l1": 0.0},
    },
    "eagle3": {
        "draft": {
            "algorithm": "eagle3",
            "num_hidden_layers": 1,
            "markov_rank": 0,
            "enable_confidence_head": False,
        },
        "loss": {"ce": 0.0, "l1": 0.0, "soft_ce": 1.0},
    },
}
"""What the name of an algorithm implies; the losses are those of the papers."""

ABSENT: dict[str, dict[str, tuple[str, ...]]] = {
    "dspark": {"draft": ("step_loss_decay",)},
    "dflash": {"draft": ("markov_head_type", "step_loss_decay"), "loss": ("confidence",)},
    "eagle3": {"draft": ("markov_head_type", "mask_token_id"), "loss": ("confidence", "decay")},
}
"""Keys that an algorithm has no use for: they are refused, not ignored."""

DRAFT_KEYS = (
    "algorithm",
    "num_hidden_layers",
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "intermediate_size",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "step_loss_decay",
)
"""What a recipe may say of a draft; everything else follows from the target."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make of a target. `draft` overrides fields of `DraftConfig.for_target`."""

    draft: dict[str, Any] = field(default_factory=dict)
    synthesis: SynthesisConfig = field(default_factory=SynthesisConfig)
    training: TrainConfig = field(default_factory=TrainConfig)
    held_out_rows: int = 1024
    features: FeatureSource = "fresh"  # cached: the target runs once, its states are kept on disk

    def __post_init__(self) -> None:
        if self.held_out_rows < 0:
            raise ValueError(f"held_out_rows must not be negative, got {self.held_out_rows}")
        if self.features not in get_args(FeatureSource):
            raise ValueError(f"features must be fresh or cached, got {self.features!r}")

    def sections(self) -> Layers:
        """The recipe as the tables of its file; what is None is left out."""
        training = dataclasses.asdict(self.training)
        loss, optim = training.pop("loss"), training.pop("optim")
        data = dataclasses.asdict(self.synthesis)
        data |= {"held_out_rows": self.held_out_rows, "features": self.features}
        draft = dict(self.draft)
        algorithm = draft["algorithm"] = self.algorithm
        if not draft.get("enable_confidence_head", True):
            del loss["confidence"]
        if draft.get("markov_rank") == 0:
            draft.pop("markov_head_type", None)
        tables = {"draft": draft, "data": data, "loss": loss, "optim": optim, "train": training}
        for section, names in ABSENT[algorithm].items():
            for name in names:
                tables[section].pop(name, None)
        if algorithm != "dspark":  # its name says that it has none
            for name in ("markov_rank", "enable_confidence_head"):
                draft.pop(name, None)
        return {
            name: {key: value for key, value in table.items() if value is not None}
            for name, table in tables.items()
        }

    @property
    def algorithm(self) -> str:
        """Its name among `ALGORITHMS`: a DSpark draft without both heads is DFlash."""
        own = self.draft
        heads = own.get("markov_rank") != 0 or own.get("enable_confidence_head", True)
        name: str = own.get("algorithm", "dspark")
        return name if heads or name != "dspark" else "dflash"


def read_recipe(path: Path | None, changes: Layers) -> Recipe:
    """A recipe from a file and changes to it.

    Args:
        path: a TOML file; None: the defaults.
        changes: sections of keys that win over the file.

    Raises:
        ValueError: a key is unknown or its value cannot be; the message names it.
        FileNotFoundError: there is no such file.
    """
    given = _read_file(path) if path is not None else {}
    if given and changes:
        _resolve(given)  # what a change replaces has to be right all the same
    for name, table in changes.items():
        given[name] = {**given.get(name, {}), **table}
    return _resolve(given)


def _resolve(given: Layers) -> Recipe:
    """The recipe of what was given, with what the algorithm implies."""
    for name, table in given.items():
        _check_keys(name, table)
    draft = given.get("draft", {})
    algorithm = draft.get("algorithm", "dspark")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ValueError(
            f"draft.algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}"
        )
    implied = ALGORITHMS[algorithm]
    for key, value in implied["draft"].items():
        if key != "algorithm" and draft.get(key, value) != value:
            raise ValueError(f"draft.{key} is {value!r} with {algorithm}, got {draft[key]!r}")
    own = {**draft, **implied["draft"]}
    has_confidence = own.get("enable_confidence_head", own.get("markov_rank") != 0)
    if "confidence" in given.get("loss", {}) and not has_confidence:
        raise ValueError("loss.confidence: this draft has no confidence head; leave it out")
    for section, names in ABSENT[algorithm].items():
        for key in names:
            if key in given.get(section, {}):
                raise ValueError(f"{section}.{key}: {algorithm} has no use for it; leave it out")
    if "markov_head_type" in draft and own.get("markov_rank") == 0:
        raise ValueError("draft.markov_head_type: markov_rank 0 is no Markov head; leave it out")
    own["enable_confidence_head"] = has_confidence
    loss = {**implied.get("loss", {}), **given.get("loss", {})}
    return _build({**given, "draft": own, "loss": loss})


def read_change(text: str) -> Layers:
    """`SECTION.KEY=VALUE`, the value as in TOML (text needs no quotes).

    Raises:
        ValueError: it is not of that form.
    """
    name, equals, raw = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or not key:
        raise ValueError(f"expected SECTION.KEY=VALUE, as in optim.ema=0.999, got {text!r}")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    return {section: {key: value}}


def merge(parts: Iterable[Layers]) -> Layers:
    """Sections of keys in one.

    Raises:
        ValueError: a key is given twice.
    """
    merged: Layers = {}
    for part in parts:
        for name, table in part.items():
            for key in table.keys() & merged.get(name, {}).keys():
                raise ValueError(
                    f"{name}.{key} is given twice, by --set or by an option of its own: give it "
                    "once"
                )
            merged.setdefault(name, {}).update(table)
    return merged


def to_toml(recipe: Recipe) -> str:
    """The recipe as a file that `read_recipe` reads back."""
    tables = recipe.sections()
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_literal(table[key])}\n" for key in table)
        for name, table in tables.items()
    )


def _read_file(path: Path) -> Layers:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such recipe") from None
    except OSError as problem:
        raise ValueError(
            f"--config {path}: cannot be read ({problem.strerror}): give a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"{path}: {problem}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name} stands outside of a section: {_known_sections()}")
    return tables


def _build(tables: Layers) -> Recipe:
    data = dict(tables.get("data", {}))
    own: dict[str, Any] = {}
    for key in ("held_out_rows", "features"):
        if key in data:
            own[key] = data.pop(key)
    training = _values("train", tables.get("train", {}), TrainConfig)
    parts = {"loss": LossConfig, "optim": OptimConfig}
    for name, kind in parts.items():
        training[name] = _make(name, kind, tables.get(name, {}))
    values = {
        "draft": _values("draft", tables["draft"], DraftConfig),
        "synthesis": _make("data", SynthesisConfig, data),
        "training": _in("train", TrainConfig, training),
        **_values("data", own, Recipe),
    }
    _check_draft(values["draft"])
    recipe: Recipe = _in("data", Recipe, values)
    return recipe


def _check_draft(draft: Mapping[str, Any]) -> None:
    """Raises ValueError for a value that fits no target: it is tried on one that fits it."""
    taps = draft.get("target_layer_ids") or (0,)
    mask = None if draft["algorithm"] == "eagle3" else draft.get("mask_token_id", 0)
    target = {
        "hidden_size": 1,
        "intermediate_size": 1,
        "num_attention_heads": 1,
        "num_hidden_layers": max(0, *taps) + 1,
        "vocab_size": 1 + (mask or 0),
    }
    values = {**draft, "mask_token_id": mask}
    _in("draft", lambda **own: DraftConfig.for_target(target, **own), values)


def _make(section: str, kind: Any, table: Mapping[str, Any]) -> Any:
    return _in(section, kind, _values(section, table, kind))


def _in(section: str, make: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Make settings; their own checks begin with a field, which gets its section."""
    try:
        return make(**values)
    except ValueError as problem:
        raise ValueError(f"{section}.{problem}") from None


def _values(section: str, table: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """The table's values as the fields of `kind` want them."""
    hints = get_type_hints(kind)
    return {key: _value(f"{section}.{key}", value, hints[key]) for key, value in table.items()}


def _value(name: str, value: Any, hint: Any) -> Any:
    if name.startswith("loss.") and name.removeprefix("loss.") in SCHEDULED:
        return read_schedule(name, value)
    accepted = get_args(hint) or (hint,)
    if isinstance(value, list):
        inner = next((part for part in accepted if part in (int, float)), None)
        if inner is None or Ellipsis not in accepted:
            raise ValueError(f"{name} takes one value, got {value!r}")
        return tuple(_value(name, entry, inner) for entry in value)
    if float in accepted and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > MOST:
            raise ValueError(f"{name} must be at most {MOST:g}")
        return float(value)
    kinds = tuple(part if isinstance(part, type) else type(part) for part in accepted)
    if type(value) not in kinds or Ellipsis in accepted:
        wanted = " or ".join(sorted({kind.__name__ for kind in kinds} - {"NoneType", "ellipsis"}))
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return value


def _check_keys(section: str, table: Mapping[str, Any]) -> None:
    known = _keys().get(section)
    if known is None:
        raise ValueError(f"unknown section {section}: {_known_sections()}")
    for key in table:
        if key not in known:
            raise ValueError(f"unknown key {section}.{key}: it is one of {', '.join(known)}")


def _keys() -> dict[str, list[str]]:
    def names(kind: Any) -> list[str]:
        return [part.name for part in dataclasses.fields(kind)]

    training = [name for name in names(TrainConfig) if name not in ("loss", "optim")]
    return {
        "draft": list(DRAFT_KEYS),
        "data": [*names(SynthesisConfig), "held_out_rows", "features"],
        "loss": names(LossConfig),
        "optim": names(OptimConfig),
        "train": training,
    }


def _known_sections() -> str:
    return f"there are {', '.join(_keys())}"


def _literal(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value)  # a TOML value in the same form: numbers, strings, true and false
