"""Step costs of steps that run behind the host. Times themselves are a device's business."""

from __future__ import annotations

import pytest
from test_device_runner import compare, requests

from emberline.engine import device_profile
from emberline.engine.device_profile import profile_device_steps
from emberline.engine.engine import Engine

from support.engines import run
from support.on_device import golden_engine, golden_runner


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(device_profile, "REPLAYS", 1)
    monkeypatch.setattr(device_profile, "TURNS", 1)
    return golden_engine("vanilla", on_device=True, max_num_reqs=2)


def test_every_size_is_measured_and_nothing_is_left_behind(engine: Engine) -> None:
    shares: list[float] = []
    runner = golden_runner(engine)
    costs = profile_device_steps(runner, engine.pool, engine.parts.kv_pools, report=shares.append)
    most = engine.max_draft_tokens
    assert {(reqs, tokens) for reqs, tokens, _ in costs.target} >= {
        (1, 1),
        (1, 1 + most),
        (2, 2),
        (2, 2 + 2 * most),
    }
    assert {(reqs, drafts) for reqs, drafts, _ in costs.draft} >= {(1, 1), (1, most), (2, most)}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert engine.pool.num_free == engine.pool.num_pages
    some = requests(5)[:1]
    compare(run(engine, some), run(golden_engine("vanilla", on_device=False), some))


def test_no_room_is_said() -> None:
    engine = golden_engine("vanilla", on_device=True, num_pages=2)
    with pytest.raises(ValueError, match="--kv-tokens"):
        profile_device_steps(golden_runner(engine), engine.pool, engine.parts.kv_pools)
