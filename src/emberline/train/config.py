"""Settings of a draft and of its training. Frozen, each validating itself; knows no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from emberline.train.schedule import Schedule, least, most, read_schedule

Algorithm = Literal["dspark", "eagle3"]
ARCHITECTURES: dict[Algorithm, str] = {
    "dspark": "Qwen3DSparkModel",
    "eagle3": "Qwen3Eagle3Model",
}
Precision = Literal["auto", "float32", "bfloat16"]
MarkovHead = Literal["vanilla", "gated", "rnn"]
MARKOV_HEADS = ("vanilla", "gated", "rnn")
DEFAULT_THETA = 10_000.0
MOST_SEED = 2**32 - 1
COPIED_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "final_logit_softcapping",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Shape of a draft.

    DFlash is DSpark with `markov_rank` 0 and no confidence head. An EAGLE-3 draft has one layer,
    neither head and no mask token; `block_size` is the number of steps that it is unrolled over.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # 0-based; the tap is that layer's output
    mask_token_id: int | None  # None: slots are given the tokens before them (EAGLE-3)
    algorithm: Algorithm = "dspark"
    num_hidden_layers: int = 3
    block_size: int = 7
    markov_rank: int = 64
    markov_head_type: MarkovHead = "vanilla"
    enable_confidence_head: bool = True
    step_loss_decay: float = 0.8  # EAGLE-3: step k weighs this to the power of k
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    rope_theta: float = DEFAULT_THETA
    final_logit_softcapping: float | None = None  # of the target's head, which the draft shares
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        _check_finite(self)
        _check_least(self, 1, "block_size", "num_hidden_layers", "intermediate_size")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < -1:
            raise ValueError(
                f"target_layer_ids (--taps) must rise strictly from -1 on, got {list(ids)}"
            )
        if ids[-1] >= self.num_target_layers:
            raise ValueError(
                f"target_layer_ids (--taps): layer {ids[-1]} is not one of "
                f"{self.num_target_layers}: they are 0 to {self.num_target_layers - 1}, and -1 "
                "is the embedding"
            )
        _check_least(self, 0, "markov_rank")
        if self.markov_head_type not in MARKOV_HEADS:
            raise ValueError(f"markov_head_type must be one of {MARKOV_HEADS}")
        if self.algorithm not in ARCHITECTURES:
            raise ValueError(
                f"algorithm must be one of {', '.join(ARCHITECTURES)}, got {self.algorithm!r}"
            )
        if self.mask_token_id is not None:
            _check_least(self, 0, "mask_token_id")
        if self.algorithm == "eagle3":
            self._check_eagle3()
        elif self.mask_token_id is None or self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary: the model's ids "
                f"are 0 to {self.vocab_size - 1}"
            )

    def _check_eagle3(self) -> None:
        if self.num_hidden_layers != 1:
            raise ValueError(
                f"num_hidden_layers must be 1 for EAGLE-3, got {self.num_hidden_layers}"
            )
        if self.markov_rank or self.enable_confidence_head:
            raise ValueError("markov_rank: EAGLE-3 has no Markov head and no confidence head")
        if self.final_logit_softcapping is not None:
            raise ValueError(
                "algorithm: EAGLE-3 drafts of a target with final_logit_softcapping do not exist"
            )
        if self.mask_token_id is not None:
            raise ValueError("mask_token_id must be left out: EAGLE-3 has no open slots")
        if not 0 < self.step_loss_decay <= 1:
            raise ValueError(f"step_loss_decay must be in (0, 1], got {self.step_loss_decay}")

    def position_factors(self, decay: float) -> tuple[float, ...]:
        """What each position of a block weighs in the losses; `decay` is that of blocks."""
        if self.algorithm == "eagle3":
            return tuple(self.step_loss_decay**step for step in range(self.block_size))
        return tuple(math.exp(-slot / decay) for slot in range(self.block_size))

    @property
    def tap_width(self) -> int:
        """A, width of the concatenated taps."""
        return len(self.target_layer_ids) * self.hidden_size

    @classmethod
    def for_target(cls, target: Mapping[str, Any], **changes: Any) -> DraftConfig:
        """A draft of the target's own width. `target` is its raw config.json.

        Five taps spread over the depth are the default; `changes` overrides any field.
        """
        layers = int(target["num_hidden_layers"])
        rope = target.get("rope_parameters") or {}
        rope = rope.get("full_attention", rope)  # some families have one for each kind of layer
        values: dict[str, Any] = {
            name: target[name] for name in COPIED_FIELDS if target.get(name) is not None
        }
        if isinstance(values.get("eos_token_id"), list):
            values["eos_token_id"] = values["eos_token_id"][0]
        values["head_dim"] = target.get("head_dim") or (
            values["hidden_size"] // values["num_attention_heads"]
        )
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
        values["rope_theta"] = float(
            rope.get("rope_theta") or target.get("rope_theta") or DEFAULT_THETA
        )
        values["num_target_layers"] = layers
        values["target_layer_ids"] = default_taps(layers)
        values["mask_token_id"] = None
        values.update({name: value for name, value in changes.items() if value is not None})
        return cls(**values)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> DraftConfig:
        """Read the draft's own config.json (DeepSpec field names)."""
        fixed: dict[str, Any] = {"target_layer_ids": tuple(raw["target_layer_ids"])}
        fixed["num_target_layers"] = raw["num_target_layers"]
        if ARCHITECTURES["eagle3"] in raw.get("architectures", ()):
            fixed |= {name: raw[name] for name in ("num_hidden_layers", "step_loss_decay")}
            fixed |= {"algorithm": "eagle3", "block_size": raw["ttt_length"]}
            return cls.for_target(raw, **fixed, markov_rank=0, enable_confidence_head=False)
        names = ("mask_token_id", "num_hidden_layers", "block_size", "markov_rank")
        extra = {name: raw[name] for name in names}
        extra["markov_head_type"] = raw.get("markov_head_type") or "vanilla"
        extra["enable_confidence_head"] = bool(raw.get("enable_confidence_head"))
        return cls.for_target(raw, **fixed, **extra)

    def to_json(self) -> dict[str, Any]:
        """The config.json of an exported draft, readable by every engine of this dialect."""
        values = asdict(self)
        theta = values["rope_theta"]
        taps = list(self.target_layer_ids)
        values |= {
            "architectures": [ARCHITECTURES[self.algorithm]],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "target_layer_ids": taps,
            "dtype": "bfloat16",
        }
        del values["algorithm"]
        if self.final_logit_softcapping is None:
            del values["final_logit_softcapping"]
        if self.algorithm == "eagle3":
            return _eagle3_json(values)
        del values["step_loss_decay"]
        values["num_anchors"] = 64
        values["dflash_config"] = {
            "target_layer_ids": taps,
            "mask_token_id": self.mask_token_id,
        }
        if self.enable_confidence_head:
            values["confidence_head_with_markov"] = self.markov_rank > 0
        if not self.markov_rank:
            del values["markov_head_type"]
        return values


def _eagle3_json(values: dict[str, Any]) -> dict[str, Any]:
    """The same config.json under the names of an EAGLE-3 draft, without what it does not have."""
    absent = ("mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
    kept = {name: value for name, value in values.items() if name not in absent}
    kept["ttt_length"] = kept.pop("block_size")
    kept["draft_num_hidden_layers"] = kept["num_hidden_layers"]
    return kept


def default_taps(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Layers 1 .. n - 3, evenly spaced: early syntax to late prediction."""
    last = max(num_layers - 3, 0)
    first = min(1, last)
    return tuple(sorted({first + round(i * (last - first) / (count - 1)) for i in range(count)}))


@dataclass(frozen=True, slots=True)
class SynthesisConfig:
    """What to sample from the target. Tokens made = rounds x batch_size x seq_len."""

    rounds: int = 8
    batch_size: int = 4096
    seq_len: int = 512
    seed: int = 0
    plain_fraction: float = 0.06  # rows that continue plain text instead of chatting
    question_fraction: float = 0.6  # chats whose first user turn is a given question
    opening_fraction: float = 0.85  # of the other chats: the first user turn starts as given
    system_fraction: float = 0.10  # chats with another system prompt than the template's
    user_limit: int = 160  # tokens after which a user turn is closed
    user_temperature: float = 0.8
    temperatures: tuple[float, ...] = (1.0, 0.7, 0.01)  # of the answers, one drawn for each row
    temperature_weights: tuple[float, ...] = (0.40, 0.25, 0.35)

    def __post_init__(self) -> None:
        _check_finite(self)
        _check_least(self, 1, "rounds", "batch_size", "seq_len", "user_limit")
        _check_seed(self.seed)
        for name in ("plain_fraction", "question_fraction", "opening_fraction", "system_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        weights, count = self.temperature_weights, len(self.temperatures)
        if len(weights) != count:
            raise ValueError(
                f"temperature_weights must be one for each of the {count} temperatures, "
                f"got {len(weights)}"
            )
        if not weights or min(weights) < 0 or not sum(weights):
            raise ValueError(
                "temperature_weights must not be negative, and one must be above 0, "
                f"got {list(weights)}"
            )
        for name, value in (
            ("temperatures", min(self.temperatures)),
            ("user_temperature", self.user_temperature),
        ):
            if value <= 0:
                raise ValueError(
                    f"{name} must be positive (0.01 is as good as greedy), got {value}"
                )


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Weights of the terms, each a number or a `Schedule`, and the decay over a block."""

    ce: Schedule = 0.1  # cross-entropy of the text's own token
    l1: Schedule = 0.9  # L1 distance of both distributions
    confidence: Schedule = 1.0  # cross-entropy of the confidence; read where there is that head
    decay: float = 4.0  # position k weighs exp(-k / decay); EAGLE-3: the draft's step_loss_decay
    chunk_rows: int = 4096  # rows whose [rows, V] tensors exist at once
    soft_ce: Schedule = 0.0  # cross-entropy against the target's distribution
    l1_sharp: Schedule = 0.0  # L1 distance of both distributions at `sharp_temperature`
    sharp_temperature: float = 0.5

    def __post_init__(self) -> None:
        for name in SCHEDULED:
            schedule = read_schedule(name, getattr(self, name))
            if least(schedule) < 0:
                raise ValueError(f"{name} must not be negative, got {least(schedule)}")
            object.__setattr__(self, name, schedule)
        _check_finite(self)
        for name in ("decay", "sharp_temperature"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        _check_least(self, 1, "chunk_rows")
        if not any(most(getattr(self, name)) for name in TOKEN_TERMS):
            raise ValueError(
                f"{TOKEN_TERMS[0]}: {', '.join(TOKEN_TERMS)} are all 0 throughout, so that no "
                "token would be learnt: give one a weight"
            )


TOKEN_TERMS = ("ce", "l1", "soft_ce", "l1_sharp")
SCHEDULED = (*TOKEN_TERMS, "confidence")


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """Muon on the matrices, AdamW on heads, norms and embeddings of the Markov head."""

    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    adam_lr: float = 2.5e-3
    warmup: int = 100
    clip: float = 1.0
    ema: float = 0.0  # above 0: the exported weights are a moving average that keeps this much

    def __post_init__(self) -> None:
        _check_finite(self)
        for name in ("ema", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        _check_least(self, 0, "muon_lr", "adam_lr", "warmup")
        if self.clip <= 0:
            raise ValueError(f"clip must be positive, got {self.clip}")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One run. Slots of a step = seqs_per_step x anchors x block_size, over all processes."""

    steps: int = 4000
    seqs_per_step: int = 32
    anchors: int = 128
    seed: int = 0
    answer_weight: float = 1.0  # chance that an anchor is in an answer, relative to the others
    plain_weight: float = 0.7
    user_weight: float = 0.2
    log_every: int = 50
    eval_every: int = 500
    save_every: int = 500
    accumulate: int = 1  # parts that a process does its rows of a step in, one after another
    precision: Precision = "auto"  # of the activations; auto: bfloat16 on CUDA, else float32
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        _check_finite(self)
        counts = ("steps", "seqs_per_step", "anchors", "log_every", "eval_every", "save_every")
        _check_least(self, 1, *counts, "accumulate")
        _check_seed(self.seed)
        roles = ("answer_weight", "plain_weight", "user_weight")
        _check_least(self, 0, *roles)
        if not any(getattr(self, name) for name in roles):
            raise ValueError(
                f"{roles[0]}: {', '.join(roles)} are all 0, so that no block would be drawn: give "
                "one a weight"
            )
        if self.precision not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"precision must be auto, float32 or bfloat16, got {self.precision!r}")


def _check_finite(settings: Any) -> None:
    """Raises ValueError for a field that holds a number which is none, or is infinite."""

    def whole(value: Any) -> bool:
        if isinstance(value, tuple):
            return all(map(whole, value))
        return not isinstance(value, float) or math.isfinite(value)

    for part in fields(settings):
        value = getattr(settings, part.name)
        if not whole(value):
            raise ValueError(f"{part.name} must be finite, got {value}")


def _check_least(settings: Any, least: int, *names: str) -> None:
    """Raises ValueError for one of these fields that is under `least` (0 or 1)."""
    bound = "must not be negative" if least == 0 else f"must be at least {least}"
    for name in names:
        if getattr(settings, name) < least:
            raise ValueError(f"{name} {bound}, got {getattr(settings, name)}")


def _check_seed(seed: int) -> None:
    if not 0 <= seed <= MOST_SEED:
        raise ValueError(f"seed must be in 0 .. {MOST_SEED}, got {seed}")
