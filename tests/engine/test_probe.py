"""The probe finds how a draft's files are to be read: trained drafts, told wrongly on purpose."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from emberline.cli import inspect, make_app
from emberline.drafters.dialects import read_checkpoint
from emberline.drafters.geometry import read_geometry
from emberline.engine import probe as probe_module
from emberline.engine.probe import (
    BLOCKS,
    Pages,
    Probed,
    leaders,
    probe,
    readings,
    tapped,
    write_text,
)
from emberline.models.load import load_target
from emberline.train.config import DraftConfig
from emberline.train.convert import convert
from emberline.train.export import checkpoint_tensors, write_full
from emberline.train.model import build_model

from support.tiny_dialects import LLAMA, folder_of
from support.tiny_eagle3 import eagle3_config
from support.tiny_gguf import TOKENS, tiny_model, write_gguf

GOLDEN = Path(__file__).parents[1] / "golden"
PAGE_SIZE, NUM_PAGES, LENGTH, DEPTH = 16, 17, 60, 6
CONFIG = read_geometry(read_checkpoint(GOLDEN / "vanilla"))


def probed(draft: Path, **changes: Any) -> tuple[Probed, ...]:
    """All readings of a golden draft, of its checkpoint with `changes`."""
    checkpoint = read_checkpoint(draft)
    config = {**checkpoint.config, **changes.pop("config", {})}
    checkpoint = replace(checkpoint, config=config, **changes)
    candidates = readings(checkpoint, DEPTH)
    target = load_target(
        GOLDEN / "target",
        dtype=torch.float32,
        device="cpu",
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        taps=tapped(candidates),
    )
    pages = Pages(NUM_PAGES, PAGE_SIZE, "cpu")
    traces = json.loads((GOLDEN / "vanilla" / "trace.json").read_text())["traces"]
    with torch.inference_mode():
        texts = [
            write_text(target, trace["prompt_ids"], LENGTH, frozenset(), pages)
            for trace in (traces[2], traces[0])
        ]
        assert texts[0].tokens.tolist()[-LENGTH:] == traces[2]["output_ids"][:LENGTH]
        return probe(checkpoint, candidates, target, texts, pages, torch.float32)


def best(found: tuple[Probed, ...]) -> tuple[str | None, int]:
    one = max(found, key=lambda each: each.accept_length)
    return one.reading.slot_rule, one.reading.shift


def test_what_is_right_is_found_right() -> None:
    found = probed(GOLDEN / "vanilla")
    assert len(found[0].accepted) == BLOCKS
    assert {(one.reading.slot_rule, one.reading.shift) for one in found} >= {
        ("anchor", 0),
        ("shifted", 0),
    }
    assert (found[0].reading.slot_rule, found[0].reading.shift) == ("anchor", 0)
    assert best(found) == ("anchor", 0)
    assert found[0].accept_length > 1.3


def test_a_wrong_slot_rule_is_found_out() -> None:
    assert best(probed(GOLDEN / "vanilla", slot_rule="shifted")) == ("anchor", 0)


def test_a_shift_reads_the_layers_that_the_files_should_name() -> None:
    """Bit for bit: the shifted reading of wrong ids is the plain reading of the right ones."""
    layers = read_checkpoint(GOLDEN / "vanilla").config["target_layer_ids"]
    wrong = [layer + 1 for layer in layers]
    plain = probed(GOLDEN / "vanilla")
    right = {one.reading.slot_rule: one.accepted for one in plain if one.reading.shift == 0}
    found = probed(GOLDEN / "vanilla", config={"target_layer_ids": wrong})
    shifted = {one.reading.slot_rule: one.accepted for one in found if one.reading.shift == -1}
    assert shifted == right


def test_eagle3_has_layers_alone_to_try() -> None:
    found = probed(GOLDEN / "eagle3")
    assert {one.reading.slot_rule for one in found} == {None}


# What may be concluded

READINGS = [
    probe_module.Reading(rule, shift, CONFIG)  # type: ignore[arg-type]
    for rule in ("anchor", "shifted")
    for shift in (0, 1)
]


def verdict(*accepted: list[int]) -> tuple[str, int]:
    """What is said of readings with these drafts by block, and how many lead."""
    found = tuple(Probed(r, tuple(a)) for r, a in zip(READINGS, accepted, strict=False))
    ahead = leaders(found)
    return inspect._verdict(found[0], ahead, len(found)), len(ahead)


NOTHING, SOME, MANY = [0] * 10, [0, 1] * 5, [3, 4] * 5


def test_a_tie_is_called_a_tie() -> None:
    for equal in (NOTHING, SOME):
        said, ahead = verdict(equal, equal, equal)
        assert ahead == 3
        assert said == (
            "These blocks cannot tell apart: anchor as in the files; anchor +1; shifted as in the "
            "files."
        )
    said, ahead = verdict(MANY, [*MANY[:9], 3], NOTHING)  # a draft in ten blocks
    assert ahead == 2
    assert "rightly" not in said
    # A mean that is far ahead, by one block alone.
    assert verdict([7, *NOTHING[1:]], NOTHING)[1] == 2
    said, ahead = verdict(NOTHING, MANY, MANY)
    assert "The files' own reading is worse than these." in said


def test_a_clear_lead_is_concluded_from() -> None:
    assert verdict(MANY, SOME, NOTHING) == ("The files are read rightly.", 1)
    assert verdict(SOME, NOTHING, MANY)[0] == (
        "The other slot rule fits better: --draft-slot-rule shifted"
    )
    said, _ = verdict(SOME, NOTHING, NOTHING, MANY)
    assert "--draft-slot-rule shifted" in said
    assert "Layer ids +1 fit better" in said
    assert verdict(MANY)[0] == "There is no other reading to compare the files with."


def test_no_more_blocks_are_drafted_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = []
    context = probe_module._context

    def counted(*arguments: Any) -> Any:
        drafted.append(1)
        return context(*arguments)

    monkeypatch.setattr(probe_module, "_context", counted)
    found = probed(GOLDEN / "vanilla")
    assert len(drafted) == BLOCKS * len(found)


# The command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny = tiny_model("llama", tie_word_embeddings=False)
    return write_gguf(folder / "tiny.gguf", tiny)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A random draft for that model, with embedding and head of its own."""
    target = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(TOKENS),
        "rms_norm_eps": 1e-5,
    }
    shape = DraftConfig.for_target(
        target, mask_token_id=3, block_size=4, num_hidden_layers=1, markov_rank=4,
        target_layer_ids=(0, 1),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(len(TOKENS), 32, generator=generator)
    trained = build_model(shape)
    trained.initialise(embedding, seed=0)
    tensors = checkpoint_tensors(trained.state_dict())
    write_full(tmp_path / "draft", shape, tensors, embedding, embedding)
    return tmp_path / "draft"


def inspected(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(make_app("inspect"), ["inspect", *map(str, words)])
    return result.exit_code, " ".join(result.output.split())


def test_the_command_says_what_a_draft_is(draft: Path) -> None:
    code, said = inspected(draft)
    assert code == 0
    for fact in (
        "dialect DeepSpec (Qwen3DSparkModel)",
        "algorithm dspark",
        "1 layers of 32, 4 heads (2 of keys) of 8, MLP 64",
        "target layers 0, 1, of 2 (0-based, their outputs)",
        "slot rule anchor: Qwen3DSparkModel predicts from the anchor on",
        "vanilla Markov of rank 4, with confidence",
        f"vocabulary {len(TOKENS)}",
        "calibration none",
    ):
        assert fact in said


def test_the_command_says_what_is_a_guess(draft: Path, tmp_path: Path) -> None:
    raw = json.loads((draft / "config.json").read_text())
    raw["architectures"] = ["DFlashDraftModel"]
    (draft / "config.json").write_text(json.dumps(raw))
    code, said = inspected(draft)
    assert code == 0
    assert "(a guess)" in said
    assert "--probe with --model measures both" in said
    code, said = inspected(draft, "--draft-slot-rule", "shifted")
    assert "slot rule shifted: as given" in said
    assert "drafts a block 3" in said


def test_the_command_says_which_layers_are_a_guess(tmp_path: Path) -> None:
    layers = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    raw = eagle3_config(
        architectures=["LlamaForCausalLMEagle3"],
        target_layer_ids=None,
        num_target_layers=8,
        eagle_config=layers,
    )
    code, said = inspected(folder_of(tmp_path / "copied", raw, LLAMA))
    assert code == 0
    assert (
        "target layers 2, 4, 5, of 8 (0-based, their outputs) (a guess: or one less each)" in said
    )
    assert "The layer ids are a guess: --probe" in said
    layers["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    assert "a guess" not in inspected(folder_of(tmp_path / "own", raw, LLAMA))[1]


def test_the_command_probes(
    draft: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERLINE_HOME", str(tmp_path / "home"))
    file = tmp_path / "draft.gguf"
    convert(file, read_checkpoint(draft), "gguf", "float32", None)
    for source in (draft, file):
        code, said = inspected(source, "--model", model, "--probe", "--dtype", "float32")
        assert code == 0, said
        assert "10 teacher-forced blocks" in said
        assert "cannot tell apart" in said  # a random draft: nothing of it is ever right
        assert "<- best" not in said
        assert "anchor as in the files" in said
        assert "shifted as in the files" in said


BAD = {
    "absent": (("nowhere",), "no such file or folder"),
    "domino": (("domino",), "DominoDraftModel: not supported is Domino"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_looked_at_is_one_line(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(draft, tmp_path / "domino")
    raw = json.loads((draft / "config.json").read_text())
    raw["architectures"] = ["DominoDraftModel"]
    (tmp_path / "domino" / "config.json").write_text(json.dumps(raw))
    words, reason = BAD[case]
    code, said = inspected(*words)
    assert code == 2
    assert reason in said
