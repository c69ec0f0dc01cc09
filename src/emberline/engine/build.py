"""From files and settings to a running engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from emberline.cache.page_pool import PagePool
from emberline.config import (
    DtypeName,
    EngineConfig,
    PlannerName,
    SpeculationConfig,
    usable_cores,
)
from emberline.drafters.base import Drafter, KeepsKV
from emberline.drafters.checkpoint import load_drafter, read_draft_config
from emberline.drafters.dspark import DSparkDrafter
from emberline.drafters.ngram import NGramDrafter
from emberline.engine.engine import Engine
from emberline.engine.step import StepParts
from emberline.models.load import load_target, resolve_backend
from emberline.models.self_check import COMPARED, ENDS, check_row_invariance
from emberline.models.target import Target
from emberline.models.weights import ModelError, read_json
from emberline.sampling.keys import KeyedDraws
from emberline.verify.calibration import Calibration, draft_calibration
from emberline.verify.cost_files import load_costs
from emberline.verify.planner import CausalGreedy, LaggedTopK, Planner, Threshold, VerifyAll
from emberline.verify.step_cost import StepCosts


def build_engine(
    model: Path,
    draft: Path | None,
    config: EngineConfig,
    *,
    eos_ids: frozenset[int],
    name: str = "",
    find_costs: Callable[[Engine], StepCosts] | None = None,
) -> Engine:
    """Load a target, its drafter and the caches.

    Args:
        model: folder of the target.
        draft: folder of the draft checkpoint; None for the n-gram drafter or none at all.
        config: the engine's settings.
        eos_ids: tokens that end an answer.
        name: what the model is called in the engine's info.
        find_costs: measures the finished engine's steps, or remembers them; asked only where a
            planner needs costs and the settings name no file of them.

    Raises:
        ModelError: files do not fit each other or the settings.
    """
    dtype = resolve_dtype(config.dtype, config.device)
    torch.set_num_threads(config.threads or default_threads())
    page_size = config.cache.page_size
    num_pages = 1 + -(-config.cache.num_tokens // page_size)
    draft = draft if config.speculation.drafter == "auto" else None
    calibration = None
    if draft is not None:
        calibration = find_calibration(draft, config.speculation.calibration)
    temperatures = calibration.temperatures if calibration else None
    try:
        target, drafter = load_models(model, draft, config, dtype, num_pages, temperatures)
    except (MemoryError, torch.OutOfMemoryError) as problem:
        raise ModelError(
            f"there is not enough memory for the model and a KV cache of "
            f"{config.cache.num_tokens} tokens: lower --kv-tokens (CacheConfig.num_tokens)"
        ) from problem
    parts = StepParts(
        target=target,
        drafter=drafter,
        planner=VerifyAll(),
        draws=KeyedDraws(),
        history=torch.zeros(
            config.scheduler.max_num_reqs,
            target.max_model_len,
            dtype=torch.int64,
            device=config.device,
        ),
        page_size=page_size,
        layout=config.speculation.layout,
        # A tokenizer may know ids that the model does not have: nobody can draw them.
        eos_ids=frozenset(i for i in eos_ids if 0 <= i < target.vocab_size),
        kv_pools=(
            *target.kv_pools,
            *(drafter.kv_pools if isinstance(drafter, KeepsKV) else ()),
        ),
    )
    pool = PagePool(num_pages, page_size)
    facts = info(parts, pool, config, dtype, name, draft) | exactness(target, pool)
    facts["target_backend"] = resolve_backend(model, config.target_backend)
    facts["calibrated"] = calibration is not None
    engine = Engine(parts, pool, config, facts)
    planner = resolve_planner(config, drafter)
    engine.use_planner(make_planner(planner, config.speculation, engine, find_costs), planner)
    engine.info |= planning(planner, config.speculation)
    return engine


def load_models(
    model: Path,
    draft: Path | None,
    config: EngineConfig,
    dtype: torch.dtype,
    num_pages: int,
    temperatures: tuple[float, ...] | None,
) -> tuple[Target, Drafter | None]:
    """The target and its drafter, each with KV of `num_pages` pages.

    Raises:
        ModelError: files do not fit each other or the settings, or the KV cache the machine.
        MemoryError, torch.OutOfMemoryError: there is not enough memory for them.
    """
    page_size, drafts = config.cache.page_size, config.speculation.num_draft_tokens
    rule = config.speculation.draft_slot_rule
    taps: tuple[int, ...] = ()
    if draft is not None:
        taps = read_draft_config(draft, rule, model_depth(model)).taps
    target = load_target(
        model,
        config.target_backend,
        dtype=dtype,
        device=config.device,
        num_pages=num_pages,
        page_size=page_size,
        taps=taps,
        max_model_len=config.scheduler.max_model_len,
        poison_padding=config.poison_padding,
    )
    if draft is None:
        by_text = config.speculation.drafter == "ngram"
        return target, NGramDrafter(drafts or 8) if by_text else None
    drafter = load_drafter(
        draft,
        target,
        dtype=dtype,
        device=config.device,
        num_pages=num_pages,
        page_size=page_size,
        num_draft_tokens=drafts,
        confidence_temperatures=temperatures,
        slot_rule=rule,
    )
    return target, drafter


def model_depth(model: Path) -> int | None:
    """Layers of the model in that folder, as its config says; None if it does not."""
    raw = read_json(model / "config.json")
    nested = raw.get("text_config")
    depth = (nested if isinstance(nested, dict) else raw).get("num_hidden_layers")
    return depth if isinstance(depth, int) else None


def default_threads() -> int:
    """All cores but one: the event loop, or anybody else, needs the last.

    The count is the process's, not the engine's: a second engine sets it for both.

    The kernels' threads wait for each other at the end of every operation. One of them losing its
    core for a moment makes all wait: on two cores a busy neighbour costs a factor of ten.
    """
    return max(1, usable_cores() - 1)


def resolve_dtype(name: DtypeName, device: str) -> torch.dtype:
    """The dtype of weights, KV and computation: bfloat16 where the hardware multiplies in it."""
    if name == "float32":
        return torch.float32
    if name == "bfloat16":
        return torch.bfloat16
    fast = device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def exactness(target: Target, pool: PagePool) -> dict[str, object]:
    """What the start-up self-check found: logits equal bit for bit, or how far apart.

    None: there is too little room in the pages or the context for the check.
    """
    wanted = 1 + pool.pages_for(max(ENDS))
    if min(pool.capacity, target.max_model_len) < COMPARED + pool.page_size:
        return {"bitwise": None, "max_logit_diff": None}
    pages = pool.allocate(min(wanted, pool.num_free))
    check = check_row_invariance(target, pages)
    pool.release(pages)
    if not math.isfinite(check.max_logit_diff):
        raise ModelError("the model's logits are not finite: its weights are damaged, or overflow")
    return {"bitwise": check.bitwise, "max_logit_diff": check.max_logit_diff}


def find_calibration(draft: Path, wanted: str | None) -> Calibration | None:
    """The draft's calibration: a file, "none" for none, or what lies in the draft's folder."""
    if wanted == "none":
        return None
    return draft_calibration(draft, None if wanted is None else Path(wanted))


def resolve_planner(config: EngineConfig, drafter: Drafter | None) -> PlannerName:
    """The planner's name.

    "auto" schedules by cost where there are confidences to go by and requests to share a step. One
    alone has its few drafts verified nearly for free: not worth measuring a machine for.
    """
    if config.speculation.planner != "auto":
        return config.speculation.planner
    has_confidence = isinstance(drafter, DSparkDrafter) and drafter.has_confidence
    shared = config.scheduler.max_num_reqs > 1
    return "causal_greedy" if has_confidence and shared else "verify_all"


def make_planner(
    name: PlannerName,
    settings: SpeculationConfig,
    engine: Engine,
    find_costs: Callable[[Engine], StepCosts] | None,
) -> Planner:
    """The planner of that name.

    Raises:
        ModelError: it needs step costs and there are none.
    """
    if settings.step_costs is not None and name in ("threshold", "verify_all"):
        raise ModelError(
            f"step_costs is given, but the planner is {name}, which reads none: leave it out, or "
            "name the planner"
        )
    if name == "threshold":
        return Threshold(settings.threshold)
    if name == "verify_all":
        return VerifyAll()
    if settings.step_costs is not None:
        costs = load_costs(Path(settings.step_costs))
    elif find_costs is not None:
        try:
            costs = find_costs(engine)
        except ValueError as problem:
            raise ModelError(str(problem)) from problem
    else:
        raise ModelError(f"planner {name} needs step costs: give step_costs, a file of them")
    return CausalGreedy(costs) if name == "causal_greedy" else LaggedTopK(costs)


def planning(name: PlannerName, settings: SpeculationConfig) -> dict[str, object]:
    """What a planner goes by, JSON-able; a file of costs is named without its folder."""
    costs: str | None = None
    if name in ("causal_greedy", "lagged_top_k"):
        costs = Path(settings.step_costs).name if settings.step_costs else "measured here"
    return {
        "step_costs": costs,
        "threshold": settings.threshold if name == "threshold" else None,
    }


def info(
    parts: StepParts,
    pool: PagePool,
    config: EngineConfig,
    dtype: torch.dtype,
    name: str,
    draft: Path | None,
) -> dict[str, object]:
    """What a client may want to know of a running engine, JSON-able."""
    drafter = parts.drafter
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "device": config.device,
        "threads": torch.get_num_threads(),
        "max_model_len": parts.target.max_model_len,
        "vocab_size": parts.target.vocab_size,
        "drafter": type(drafter).__name__ if drafter else None,
        "draft": draft.name if draft else None,
        "max_draft_tokens": drafter.max_draft_tokens if drafter else 0,
        "layout": config.speculation.layout,
        "page_size": pool.page_size,
        "kv_capacity_tokens": pool.capacity,
        "prefix_cache": config.cache.prefix_cache,
        "max_num_reqs": config.scheduler.max_num_reqs,
        "max_num_tokens": config.scheduler.max_num_tokens,
        "prefill_chunk": config.scheduler.prefill_chunk,
        "max_queue": config.scheduler.max_queue,
    }
