"""Settings on a machine: which device, and how much of its memory the cache gets."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from emberline.config import CacheConfig, EngineConfig, SchedulerConfig
from emberline.drafters.checkpoint import read_draft_config
from emberline.engine import resolve
from emberline.engine.resolve import num_weights, resolve_config, size_cache
from emberline.models.decoder_config import DecoderConfig
from emberline.models.device import resolve_device, resolve_dtype
from emberline.models.weights import ModelError, load_folder, read_json

GOLDEN = Path(__file__).parents[1] / "golden"
TARGET, DRAFT = GOLDEN / "target", GOLDEN / "vanilla"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, as far as PyTorch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (num_bytes, 2 * num_bytes))


@pytest.mark.usefixtures("gpus")
def test_a_gpu_is_taken_where_there_is_one() -> None:
    assert resolve_device("auto") == "cuda:0"
    assert resolve_device("cuda") == "cuda:0"
    assert resolve_device("cuda:1") == "cuda:1"
    assert resolve_device("cpu") == "cpu"
    assert resolve_dtype("auto", "cuda:1") is torch.bfloat16
    with pytest.raises(ValueError, match="device cuda:2: PyTorch finds 2 GPUs here"):
        resolve_device("cuda:2")


def test_without_a_gpu_there_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ModelError, match="device cuda: PyTorch finds no GPU here: give cpu"):
        resolve_config(EngineConfig(device="cuda"))


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "cpu:0", ""])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="device must be auto, cpu or cuda"):
        resolve_config(EngineConfig(device=name))


def bytes_a_token(with_draft: bool) -> int:
    spec = DecoderConfig.from_hf(read_json(TARGET / "config.json")).kv_spec
    numbers = spec.numbers_per_token
    if with_draft:
        drawn = read_draft_config(DRAFT, None, spec.num_layers)
        numbers += drawn.kv_spec.numbers_per_token  # type: ignore[union-attr]
    return 2 * numbers


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("draft", [None, DRAFT])
def test_the_cache_gets_what_is_left(monkeypatch: pytest.MonkeyPatch, draft: Path | None) -> None:
    monkeypatch.setattr(resolve, "WORK_BYTES", 0)
    cache = CacheConfig(gpu_memory=0.5)
    config = resolve_config(EngineConfig(cache=cache, scheduler=SchedulerConfig(max_num_reqs=256)))
    a_token, memory = bytes_a_token(draft is not None), 2**28
    free(monkeypatch, memory)
    sized = size_cache(config, TARGET, draft).cache.num_tokens
    assert sized % 16 == 0
    assert 0.3 * memory < sized * a_token <= 0.5 * memory
    # A page more of memory is a page more of KV, as long as requests could fill it.
    free(monkeypatch, memory + 2 * 16 * a_token)
    assert size_cache(config, TARGET, draft).cache.num_tokens == sized + 16
    free(monkeypatch, 1000 * memory)
    few = replace(config, scheduler=replace(config.scheduler, max_num_reqs=2, max_model_len=160))
    assert size_cache(few, TARGET, draft).cache.num_tokens == 2 * 160


@pytest.mark.usefixtures("gpus")
def test_a_cache_for_which_there_is_no_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2**30)
    with pytest.raises(ModelError, match=r"gpu_memory 0\.85 of 1\.1 GB free leaves no room"):
        size_cache(resolve_config(EngineConfig()), TARGET, None)


@pytest.mark.usefixtures("gpus")
def test_given_tokens_and_unknown_models_are_not_sized(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 0)
    given = resolve_config(EngineConfig(cache=CacheConfig(num_tokens=640)))
    assert size_cache(given, TARGET, DRAFT) is given
    stock = resolve_config(EngineConfig(target_backend="stock"))
    assert size_cache(stock, TARGET, None).cache.num_tokens == 32_768


def test_weights_are_counted_in_numbers(tmp_path: Path) -> None:
    weights = load_folder(TARGET)
    assert num_weights(TARGET) == sum(weights.take(n).numel() for n in weights.names())
    (tmp_path / "draft.gguf").write_bytes(b"x" * 10)
    assert num_weights(tmp_path / "draft.gguf") == 20
