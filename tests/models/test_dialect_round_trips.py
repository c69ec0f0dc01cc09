"""A tiny checkpoint in every dialect drafts exactly as the original."""

from __future__ import annotations

import json
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
    as_speculators,
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


def eagle3_layers(
    folder: Path, depth: int | None = None, target_depth: int | None = None, **changes: object
) -> tuple[list[int], bool]:
    """Layers of an EAGLE-3 file for a target of `depth` layers, and whether they are a guess."""
    raw = eagle3_config(
        architectures=["LlamaForCausalLMEagle3"],
        target_layer_ids=None,
        num_target_layers=depth,
        **changes,
    )
    found = read_checkpoint(folder_of(folder, raw, LLAMA), target_depth=target_depth)
    return list(found.config["target_layer_ids"]), found.layers_guessed


def test_nested_eagle3_layers_are_outputs(tmp_path: Path) -> None:
    def named(*layers: int) -> dict[str, list[int]]:
        return {"eagle_aux_hidden_state_layer_ids": list(layers)}

    nested = named(1, 46, 90)
    assert eagle3_layers(tmp_path / "nested", 94, eagle_config=nested) == ([1, 46, 90], False)
    top = eagle3_layers(tmp_path / "top", 94, **named(2, 47, 91))
    assert top == ([1, 46, 90], False)
    # The default of files that name none counts inputs: a copy of it may mean either.
    copied = named(2, 47, 91)
    assert eagle3_layers(tmp_path / "copied", 94, eagle_config=copied) == ([2, 47, 91], True)
    assert eagle3_layers(tmp_path / "deep", None, 94, eagle_config=copied) == ([2, 47, 91], True)
    assert eagle3_layers(tmp_path / "lone", eagle_config=copied) == ([2, 47, 91], True)
    assert eagle3_layers(tmp_path / "other", 96, eagle_config=copied) == ([2, 47, 91], False)


PROMISES = {
    "markov": ({"markov_rank": 8}, "markov_w1.weight' is missing"),
    "markov of its class": ({}, "markov_w1.weight' is missing"),
    "confidence": ({"enable_confidence_head": True}, "confidence_head.proj.weight' is missing"),
    "confidence of its class": ({}, "confidence_head.proj.weight' is missing"),
    "causal": ({"causal": True}, "causal block"),
    "logit scale": ({"logit_scale": 0.5}, "logit_scale 0.5"),
}


@pytest.mark.parametrize("case", PROMISES)
def test_what_a_speculators_config_promises_is_missed(tmp_path: Path, case: str) -> None:
    changes, reason = PROMISES[case]
    lost = "markov_head" if case.startswith("markov") else "confidence"
    if case in ("causal", "logit scale"):
        lost = "nothing"
    tensors = {n: t for n, t in draft_tensors().items() if not n.startswith(lost)}
    folder = as_speculators(tmp_path / "draft", dict(PLAIN), tensors)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"speculators_model_type": "dspark", **changes}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=reason):
        drafter_of(folder)


def test_eagle3_layers_follow_from_the_depth_where_none_are_named(tmp_path: Path) -> None:
    raw = eagle3_config(
        architectures=["LlamaForCausalLMEagle3"], target_layer_ids=None, num_target_layers=None
    )
    folder = folder_of(tmp_path / "eagle3", raw, LLAMA)
    assert read_draft_config(folder, target_depth=36).taps == (1, 17, 32)
    with pytest.raises(ModelError, match="name the target"):
        read_draft_config(folder)
