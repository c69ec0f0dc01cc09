"""The engine's settings: frozen, composed, each validating itself. Knows no tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

DtypeName = Literal["auto", "float32", "bfloat16"]
LayoutKind = Literal["static", "compact"]
DrafterName = Literal["auto", "ngram", "none"]
PlannerName = Literal["auto", "verify_all", "threshold", "causal_greedy", "lagged_top_k"]
GrammarBackend = Literal["llguidance", "xgrammar"]
TargetBackend = Literal["auto", "fused", "stock"]
SlotRule = Literal["anchor", "shifted"]
"""anchor: slot k predicts token anchor + k + 1. shifted: slot j > 0 predicts anchor + j."""
PLANNERS: tuple[PlannerName, ...] = get_args(PlannerName)
BY_DEVICE: Any = None
"""A default that the device decides: `EngineConfig.on` puts a number in its place."""


def usable_cores() -> int:
    """Cores that this process may use: a container may have fewer than the machine."""
    limited = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if limited else os.cpu_count() or 1


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not BY_DEVICE and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Paged KV. One page id names `page_size` tokens in every layer of target and draft."""

    page_size: int = 16
    num_tokens: int = BY_DEVICE  # capacity of the pool; on a GPU what its memory has room for
    gpu_memory: float = 0.85  # share of a GPU's free memory for weights, KV and work together
    prefix_cache: bool = True  # keep pages of computed prefixes for requests that share them

    def __post_init__(self) -> None:
        _positive(self, "page_size", "num_tokens")
        if 128 % self.page_size:
            raise ValueError(f"page_size must divide 128, got {self.page_size}")
        if not 0.0 < self.gpu_memory <= 1.0:
            raise ValueError(f"gpu_memory must be over 0 and at most 1, got {self.gpu_memory}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets of one step and limits of the queue."""

    max_num_reqs: int = BY_DEVICE
    max_num_tokens: int = BY_DEVICE  # known tokens (prompts, anchors) a step; drafts come on top
    max_verify_tokens: int = BY_DEVICE  # drafts a step, of all requests, at most
    prefill_chunk: int = BY_DEVICE
    max_queue: int = 256
    max_model_len: int | None = None  # None = the model's own context length

    def __post_init__(self) -> None:
        _positive(self, "max_num_reqs", "max_num_tokens", "max_verify_tokens")
        _positive(self, "prefill_chunk", "max_queue")
        both = self.max_num_tokens is not BY_DEVICE and self.max_num_reqs is not BY_DEVICE
        if both and self.max_num_tokens < self.max_num_reqs:
            raise ValueError("max_num_tokens must be at least max_num_reqs: one token a request")

    def on(self, device: str) -> SchedulerConfig:
        """The same with a number in the place of every default.

        Raises:
            ValueError: more requests than the device's steps have tokens.
        """
        numbers = dict(_CPU_LIMITS if device == "cpu" else _GPU_LIMITS)
        given = {name: getattr(self, name) for name in numbers}
        numbers |= {name: value for name, value in given.items() if value is not BY_DEVICE}
        most = numbers["max_num_tokens"]
        if self.max_num_reqs is BY_DEVICE:
            numbers["max_num_reqs"] = min(numbers["max_num_reqs"], most)
        elif self.max_num_reqs > most:
            raise ValueError(f"max_num_reqs must be at most {most}, got {self.max_num_reqs}")
        return replace(self, **numbers)


_CPU_LIMITS = {
    "max_num_reqs": 16,
    "max_num_tokens": 1_024,
    "max_verify_tokens": 1_024,
    "prefill_chunk": 512,
}
_GPU_LIMITS = {
    "max_num_reqs": 256,
    "max_num_tokens": 8_192,
    "max_verify_tokens": 2_048,
    "prefill_chunk": 2_048,
}
CPU_KV_TOKENS = 32_768
"""Of the KV cache on a CPU: memory is touched only as it fills."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Which drafter, how many drafts, and how much of a block is verified."""

    drafter: DrafterName = "auto"  # auto: what the draft checkpoint is, if there is one
    num_draft_tokens: int | None = None  # None = the drafter's block
    draft_slot_rule: SlotRule | None = None  # of a block draft; None = what its files say
    planner: PlannerName = "auto"  # auto: scheduled by cost where the draft has confidences
    threshold: float = 0.3  # planner "threshold": least survival worth verifying
    calibration: str | None = None  # file of confidence temperatures; None = the draft's own
    step_costs: str | None = None  # file of step costs; None = this machine's, measured once
    layout: LayoutKind = "compact"

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None:
            _positive(self, "num_draft_tokens")
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")
        if self.drafter not in ("auto", "ngram", "none"):
            raise ValueError(f"drafter must be auto, ngram or none, got {self.drafter!r}")
        if self.planner not in PLANNERS:
            raise ValueError(f"planner must be one of {', '.join(PLANNERS)}, got {self.planner!r}")
        if self.draft_slot_rule not in (None, *get_args(SlotRule)):
            raise ValueError(
                f"draft_slot_rule must be anchor or shifted, got {self.draft_slot_rule!r}"
            )
        if self.layout not in ("static", "compact"):
            raise ValueError(f"layout must be static or compact, got {self.layout!r}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine needs besides the model's files."""

    dtype: DtypeName = "auto"
    device: str = "auto"  # auto: a GPU if there is one; cpu, cuda, cuda:N
    batch_invariant: bool = False  # kernels of fixed order on a GPU; a CPU has no others
    overlap: bool = True  # on a GPU a step is read while the next one runs
    threads: int | None = None  # of the CPU's kernels; None = all cores but one
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    grammar_backend: GrammarBackend = "llguidance"
    target_backend: TargetBackend = "auto"  # auto: fused for its families, stock for all others
    poison_padding: bool = False  # tests: padding rows are NaN, never a plausible number

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        if self.grammar_backend not in get_args(GrammarBackend):
            raise ValueError(
                f"grammar_backend must be llguidance or xgrammar, got {self.grammar_backend!r}"
            )
        if self.target_backend not in get_args(TargetBackend):
            raise ValueError(
                f"target_backend must be auto, fused or stock, got {self.target_backend!r}"
            )
        if self.threads is not None:
            _positive(self, "threads")
            cores = usable_cores()
            if self.threads > cores:
                raise ValueError(
                    f"threads must be at most {cores}, the cores that this process may use, got "
                    f"{self.threads}"
                )

    def on(self, device: str) -> EngineConfig:
        """The same on a device, "cpu" or "cuda:N", with a number for every default but one.

        How many KV tokens a GPU has room for is not known before its models are.

        Raises:
            ValueError: a setting is out of range there.
        """
        cache = self.cache
        if device == "cpu" and cache.num_tokens is BY_DEVICE:
            cache = replace(cache, num_tokens=CPU_KV_TOKENS)
        return replace(
            self,
            device=device,
            overlap=self.overlap and device != "cpu",
            cache=cache,
            scheduler=self.scheduler.on(device),
        )
