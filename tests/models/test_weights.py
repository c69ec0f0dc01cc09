"""Safetensors folders: what is there is read, what is not is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from emberline.models.weights import ModelError, Weights, holds_weights, load_folder

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.arange(4, dtype=torch.bfloat16),
    "c.weight": torch.ones(5),
}


def write_shards(folder: Path) -> dict[str, str]:
    files = {"one.safetensors": ["a.weight"], "two.safetensors": ["b.weight", "c.weight"]}
    for file_name, names in files.items():
        save_file({name: TENSORS[name] for name in names}, folder / file_name)
    weight_map = {name: file_name for file_name, names in files.items() for name in names}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def error_of(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_folder(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def assert_same(weights: Weights) -> None:
    assert weights.names() == tuple(TENSORS)
    for name, tensor in TENSORS.items():
        taken = weights.take(name, tensor.shape)
        assert taken.dtype == tensor.dtype
        assert torch.equal(taken, tensor)
    weights.finish()


def test_single_file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert holds_weights(tmp_path)
    assert_same(load_folder(tmp_path))


def test_sharded(tmp_path):
    write_shards(tmp_path)
    assert holds_weights(tmp_path)
    assert_same(load_folder(tmp_path))


def test_missing_shard(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    assert not holds_weights(tmp_path)
    assert "1 of 2 shards" in error_of(tmp_path)
    assert "two.safetensors" in error_of(tmp_path)


def test_index_promises_a_tensor_the_shard_lacks(tmp_path):
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, {**weight_map, "d.weight": "one.safetensors"})
    assert "'d.weight'" in error_of(tmp_path)


def test_tensor_outside_the_index_is_kept_for_finish_to_refuse(tmp_path):
    weight_map = write_shards(tmp_path)
    del weight_map["c.weight"]
    write_index(tmp_path, weight_map)
    assert load_folder(tmp_path).has("c.weight")


def test_tensor_in_two_shards(tmp_path):
    write_shards(tmp_path)
    save_file(
        {"a.weight": torch.zeros(2, 3), "b.weight": torch.ones(4)}, tmp_path / "two.safetensors"
    )
    assert "two shards" in error_of(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, {"a.weight": "../one.safetensors"}])
def test_bad_index(tmp_path, weight_map):
    write_shards(tmp_path)
    write_index(tmp_path, weight_map)
    assert "index.json" in error_of(tmp_path)


def test_index_that_is_not_json(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("<html>")
    assert "expected JSON" in error_of(tmp_path)


@pytest.mark.parametrize("keep", [4, 60, -4])
def test_truncated_file(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    assert "not a whole safetensors file" in error_of(tmp_path)


def test_foreign_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "not a whole safetensors file" in error_of(tmp_path)


def test_folder_without_weights(tmp_path):
    assert "no weight files" in error_of(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "found pytorch_model.bin" in error_of(tmp_path)
    assert "no such folder" in error_of(tmp_path / "absent")


def test_take_names_what_is_missing():
    weights = Weights(TENSORS, source="here")
    assert weights.has("a.weight")
    assert not weights.has("z.weight")
    with pytest.raises(ModelError, match=r"^here: tensor 'z.weight' is missing$"):
        weights.take("z.weight")


def test_take_refuses_a_wrong_shape():
    weights = Weights(TENSORS, source="here")
    with pytest.raises(ModelError, match=r"'a.weight' has shape \[2, 3\].*\[3, 2\]"):
        weights.take("a.weight", (3, 2))
    with pytest.raises(ModelError, match=r"3 tensor"):  # a refused take does not count
        weights.finish()


def test_finish_refuses_what_nobody_took():
    weights = Weights(TENSORS, source="here")
    weights.take("a.weight")
    weights.take("a.weight")
    with pytest.raises(ModelError, match=r"here: 2 tensor.*b\.weight, c\.weight$"):
        weights.finish()
    with pytest.raises(ModelError, match=r"here: 1 tensor.*c\.weight$"):
        weights.finish(allow=["b.*"])
    weights.finish(allow=["b.*", "*.weight"])
