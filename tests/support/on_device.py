"""Engines whose steps run on the device: a GPU, else Triton's interpreter kernel by kernel."""

from __future__ import annotations

from pathlib import Path

import torch

from emberline.cache.page_pool import PagePool
from emberline.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.drafters.base import Drafter, KeepsKV
from emberline.drafters.checkpoint import load_drafter, read_draft_config
from emberline.engine.device_runner import DeviceRunner, make_runner
from emberline.engine.engine import Engine
from emberline.engine.step import StepParts
from emberline.models.load import load_target
from emberline.ops.kernels import Kernels, plain_kernels, triton_kernels
from emberline.sampling.keys import KeyedDraws
from emberline.verify.planner import DevicePlanner, VerifyAll

from support.triton_kernels import DEVICE

GOLDEN = Path(__file__).parent.parent / "golden"
PAGE = 16


def golden_engine(
    draft: str | None,
    *,
    on_device: bool,
    planner: DevicePlanner | None = None,
    overlap: bool = True,
    num_pages: int = 256,
    layout: str = "compact",
    **scheduler: int,
) -> Engine:
    """The golden target with one of its drafts, in float32."""
    config = EngineConfig(
        device=DEVICE if on_device else "cpu",
        cache=CacheConfig(page_size=PAGE, num_tokens=num_pages * PAGE),
        scheduler=SchedulerConfig(**{"max_num_reqs": 4, "max_model_len": 256, **scheduler}),
        speculation=SpeculationConfig(layout=layout),  # type: ignore[arg-type]
    )
    config = config.on(config.device)
    # The interpreter takes seconds for a model's step; how those kernels compute is tested apart.
    kernels = (plain_kernels() if DEVICE == "cpu" else triton_kernels()) if on_device else None
    target, drafter = golden_models(draft, config, kernels, num_pages + 1)
    pools = drafter.kv_pools if isinstance(drafter, KeepsKV) else ()
    parts = StepParts(
        target=target,
        drafter=drafter,
        planner=planner or VerifyAll(),
        draws=KeyedDraws(),
        history=torch.zeros(
            config.scheduler.max_num_reqs, 256, dtype=torch.int64, device=config.device
        ),
        page_size=PAGE,
        layout=config.speculation.layout,
        eos_ids=frozenset([258]),
        kv_pools=(*target.kv_pools, *pools),
    )
    engine = Engine(parts, PagePool(num_pages + 1, PAGE), config)
    if on_device:
        runner = make_runner(
            target,
            drafter,
            planner or VerifyAll(),
            config,
            device=DEVICE,
            capture=DEVICE == "cuda",
        )
        engine.use_runner(runner, overlap=overlap)
    return engine


def golden_models(
    draft: str | None, config: EngineConfig, kernels: Kernels | None, num_pages: int
) -> tuple[object, Drafter | None]:
    taps = read_draft_config(GOLDEN / draft).taps if draft else ()
    target = load_target(
        GOLDEN / "target",
        dtype=torch.float32,
        device=config.device,
        num_pages=num_pages,
        page_size=PAGE,
        taps=taps,
        max_model_len=256,
        kernels=kernels,
    )
    if draft is None:
        return target, None
    drafter = load_drafter(
        GOLDEN / draft,
        target,
        dtype=torch.float32,
        device=config.device,
        num_pages=num_pages,
        page_size=PAGE,
        kernels=kernels,
    )
    return target, drafter


def golden_runner(engine: Engine) -> DeviceRunner:
    """What runs the steps of an engine on the device."""
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    return runner
