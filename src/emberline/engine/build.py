"""From files and settings to a running engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from emberline.cache.page_pool import PagePool
from emberline.config import EngineConfig, PlannerName, SpeculationConfig, usable_cores
from emberline.drafters.base import Capturable, Drafter, KeepsKV
from emberline.drafters.checkpoint import load_drafter, read_draft_config
from emberline.drafters.dspark import DSparkDrafter
from emberline.drafters.ngram import NGramDrafter
from emberline.engine.engine import Engine
from emberline.engine.resolve import resolve_config, size_cache
from emberline.engine.step import StepParts
from emberline.models.decoder import Decoder
from emberline.models.device import device_name, resolve_dtype
from emberline.models.load import load_target, resolve_backend
from emberline.models.self_check import COMPARED, ENDS, check_row_invariance
from emberline.models.target import Target
from emberline.models.weights import ModelError, read_json
from emberline.ops.kernels import kernels_for
from emberline.sampling.keys import KeyedDraws
from emberline.verify.calibration import Calibration, draft_calibration
from emberline.verify.cost_files import load_costs
from emberline.verify.planner import (
    CausalGreedy,
    DevicePlanner,
    LaggedTopK,
    Planner,
    Threshold,
    VerifyAll,
)
from emberline.verify.prices import Padding, in_granules_of
from emberline.verify.step_cost import StepCosts

CAPTURE_SECONDS = 2.5
"""For which a start goes on capturing steps; the others follow while nothing runs."""
PLAN_EVERY = 16
"""Steps for which a plan is kept where steps run behind the host."""
LEAST_GAIN = 0.03
"""Of tokens a second, for which a plan verifies some drafts: costs are as good as that."""


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
    config = resolve_config(config)
    dtype = resolve_dtype(config.dtype, config.device)
    torch.set_num_threads(config.threads or default_threads())
    if config.device != "cpu":
        torch.cuda.set_device(config.device)
    draft = draft if config.speculation.drafter == "auto" else None
    config = size_cache(config, model, draft)
    page_size = config.cache.page_size
    num_pages = 1 + -(-config.cache.num_tokens // page_size)
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
    runs_ahead = fits_device_step(target, drafter, config)
    if runs_ahead:  # before its costs are measured: they are those of its steps
        from emberline.engine.device_runner import make_runner  # Triton comes with it

        runner = make_runner(
            target, drafter, VerifyAll(), config, device=config.device, capture=True
        )
        engine.use_runner(runner, overlap=config.overlap)
    began = time.monotonic()
    costs = planner_costs(planner, config.speculation, engine, find_costs)
    ahead: DevicePlanner | None = None
    if runs_ahead:
        of_sizes = make_planner(planner, config.speculation, costs, runner.padding, PLAN_EVERY)
        assert isinstance(of_sizes, DevicePlanner)
        ahead = of_sizes
    by_rows = in_granules_of(target.row_granule)
    plain = make_planner(planner, config.speculation, costs, by_rows)
    engine.use_planner(plain, planner, ahead)
    engine.info |= planning(planner, config.speculation)
    if runs_ahead:
        # What was measured has been captured for that.
        runner.capture_ahead(CAPTURE_SECONDS - (time.monotonic() - began))
    return engine


def fits_device_step(target: Target, drafter: Drafter | None, config: EngineConfig) -> bool:
    """Whether steps run on the device, captured; else one op after another, as on a CPU.

    A draft that draws on the host and a model in transformers' own code need the host within a
    step. `causal_greedy` does too: it decides by the confidences of the step that it plans.

    Raises:
        ModelError: that planner is to run a step ahead.
    """
    capturable = isinstance(drafter, Capturable) or drafter is None
    if config.device == "cpu" or not isinstance(target, Decoder) or not capturable:
        return False
    if config.speculation.planner != "causal_greedy":
        return True
    if config.overlap:
        raise ModelError(
            "planner causal_greedy reads the confidences of the step that it plans, so its steps "
            "cannot overlap: say lagged_top_k, or --no-overlap (EngineConfig.overlap)"
        )
    return False


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
    kernels = kernels_for(config.device, batch_invariant=config.batch_invariant)
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
        kernels=kernels,
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
        kernels=kernels,
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

    Raises:
        ModelError: the one that is named goes by confidences, and the drafter has none.
    """
    has_confidence = isinstance(drafter, DSparkDrafter) and drafter.has_confidence
    named = config.speculation.planner
    if named != "auto":
        if named != "verify_all" and drafter is not None and not has_confidence:
            raise ModelError(
                f"planner {named} goes by confidences, and this draft has none: every draft would "
                "be verified; say verify_all"
            )
        return named
    shared = config.scheduler.max_num_reqs > 1
    if not (has_confidence and shared):
        return "verify_all"
    return "lagged_top_k"


def planner_costs(
    name: PlannerName,
    settings: SpeculationConfig,
    engine: Engine,
    find_costs: Callable[[Engine], StepCosts] | None,
) -> StepCosts | None:
    """What the steps of the engine cost, for the planner of that name; None: it needs to know none.

    Raises:
        ModelError: it needs step costs and there are none, or none and there are.
    """
    if name in ("threshold", "verify_all"):
        if settings.step_costs is not None:
            raise ModelError(
                f"step_costs is given, but the planner is {name}, which reads none: leave it out, "
                "or name the planner"
            )
        return None
    if settings.step_costs is not None:
        return load_costs(Path(settings.step_costs))
    if find_costs is None:
        raise ModelError(f"planner {name} needs step costs: give step_costs, a file of them")
    try:
        return find_costs(engine)
    except ValueError as problem:
        raise ModelError(str(problem)) from problem


def make_planner(
    name: PlannerName,
    settings: SpeculationConfig,
    costs: StepCosts | None,
    padding: Padding | None = None,
    every: int = 1,
) -> Planner:
    """A planner of that name.

    Args:
        name: not "auto".
        settings: what else it goes by.
        costs: `planner_costs` of it.
        padding: sizes that steps run at.
        every: steps for which a plan is kept, where they are too short for a look at each.
    """
    if name == "threshold":
        return Threshold(settings.threshold)
    if costs is None:
        return VerifyAll()
    if name == "causal_greedy":
        return CausalGreedy(costs)
    return LaggedTopK(costs, padding, every, LEAST_GAIN)


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
        "device_name": device_name(config.device),
        "batch_invariant": config.batch_invariant or config.device == "cpu",
        "overlap": config.overlap,
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
        "max_verify_tokens": config.scheduler.max_verify_tokens,
        "prefill_chunk": config.scheduler.prefill_chunk,
        "max_queue": config.scheduler.max_queue,
    }
