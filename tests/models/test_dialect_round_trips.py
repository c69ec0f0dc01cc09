"""A tiny checkpoint in every dialect drafts exactly as the original."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emberline.drafters.checkpoint import read_draft_config
from emberline.drafters.dialects import (
    read_checkpoint,
)
from emberline.models.weights import ModelError

from support.drafter_world import (
    BLOCK,
    HIDDEN,
    TAPS,
    load,
)
from support.tiny_dialects import (
    EAGLE3,
    EXAMPLES,
    LLAMA,
    PLAIN,
    drafter_of,
    folder_of,
)
from support.tiny_draft import (
    DFLASH,
    ZLAB,
    draft_config,
    draft_tensors,
    proposals,
    same_drafts,
)
from support.tiny_eagle3 import eagle3_config


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_dialect_drafts_as_the_original(tmp_path: Path, name: str) -> None:
    example = EXAMPLES[name]
    original = load(tmp_path / "original", example.original or example.config, example.tensors)
    path = example.write(tmp_path / "dialect", dict(example.config), dict(example.tensors))
    assert same_drafts(drafter_of(path), original)
    found = read_checkpoint(path)
    assert found.dialect.startswith(example.dialect)
    assert found.slot_rule == example.slot_rule
    assert read_draft_config(path).taps == TAPS
    assert list(found.config["target_layer_ids"]) == list(TAPS)


def test_the_tests_original_tells_one_draft_from_another(tmp_path: Path) -> None:
    """The comparison above can fail: a tap, a slot or a row off by one is seen."""
    original = load(tmp_path / "original", PLAIN, draft_tensors())
    moved = draft_tensors()
    moved["fc.weight"] = moved["fc.weight"].roll(HIDDEN, 1)
    assert not same_drafts(load(tmp_path / "taps", PLAIN, moved), original)
    dflash = load(tmp_path / "anchor", draft_config(**DFLASH), draft_tensors(None))
    shifted = load(tmp_path / "shifted", draft_config(**ZLAB), draft_tensors(None))
    assert not torch.equal(proposals(dflash)[0][:, :-1], proposals(shifted)[0])


def test_a_given_slot_rule_beats_the_files(tmp_path: Path) -> None:
    anchor = load(tmp_path / "anchor", draft_config(**DFLASH), draft_tensors(None))
    load(tmp_path / "shifted", draft_config(**ZLAB), draft_tensors(None))
    assert same_drafts(drafter_of(tmp_path / "shifted", slot_rule="anchor"), anchor)
    assert read_draft_config(tmp_path / "anchor", "shifted").max_draft_tokens == BLOCK - 1
    eagle3 = folder_of(tmp_path / "eagle3", EAGLE3, LLAMA)
    with pytest.raises(ModelError, match="a slot rule is of block drafts"):
        read_checkpoint(eagle3, "anchor")


def test_guesses_are_marked(tmp_path: Path) -> None:
    def ambiguous(name: str) -> bool:
        example = EXAMPLES[name]
        path = example.write(tmp_path / name, dict(example.config), dict(example.tensors))
        return read_checkpoint(path).ambiguous

    guessed = {name for name in EXAMPLES if ambiguous(name)}
    assert guessed == {"speculators-old", "gguf-dflash"}
    both = folder_of(tmp_path / "both", draft_config(**ZLAB), draft_tensors())
    found = read_checkpoint(both)
    assert found.ambiguous
    assert found.slot_rule == "anchor"


def test_eagle3_layers_follow_from_the_depth_where_none_are_named(tmp_path: Path) -> None:
    raw = eagle3_config(
        architectures=["LlamaForCausalLMEagle3"], target_layer_ids=None, num_target_layers=None
    )
    folder = folder_of(tmp_path / "eagle3", raw, LLAMA)
    assert read_draft_config(folder, target_depth=36).taps == (1, 17, 32)
    with pytest.raises(ModelError, match="name the target"):
        read_draft_config(folder)
