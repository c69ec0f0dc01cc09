"""Drafts in the forms of other engines: from a run, from each other, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from emberline.cli import make_app
from emberline.config import CacheConfig, EngineConfig, SlotRule, SpeculationConfig
from emberline.drafters.dialects.canonical import SHARED
from emberline.engine.build import build_engine
from emberline.train.config import DraftConfig
from emberline.train.convert import FORMS, Form, convert, open_draft
from emberline.train.model import build_model
from emberline.train.target import FrozenTarget
from emberline.types import Request, SamplingParams

from support.drafter_world import HIDDEN, TinyTarget, load
from support.tiny_dialects import EXAMPLES, drafter_of
from support.tiny_draft import gemma4_config, gemma4_tensors, proposals, same_drafts

PROMPT = (5, 9, 33, 2, 7)


@pytest.fixture
def run(draft: DraftConfig, target: FrozenTarget, tmp_path: Path) -> Path:
    """A training checkpoint of a random draft with opinions."""
    return write_run(tmp_path / "run", draft, target)


def write_run(folder: Path, draft: DraftConfig, target: FrozenTarget) -> Path:
    model = build_model(draft)
    model.initialise(target.embedding, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            drawn = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data.copy_(drawn.to(torch.bfloat16))
    folder.mkdir()
    torch.save({"draft": draft.to_json(), "model": model.state_dict()}, folder / "checkpoint.pt")
    return folder


def drafted(target: Path, draft: Path, slot_rule: SlotRule | None = None) -> list[int]:
    """Drafted and accepted counts and the tokens of an answer: they tell drafts apart."""
    config = EngineConfig(
        dtype="float32",
        cache=CacheConfig(num_tokens=512),
        speculation=SpeculationConfig(planner="verify_all", draft_slot_rule=slot_rule),
    )
    engine = build_engine(target, draft, config, eos_ids=frozenset())
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=3, accept="rejection")
    engine.add(Request("one", PROMPT, sampling))
    tokens: list[int] = []
    stats = None
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
            stats = output.stats
    assert stats is not None
    return [stats.num_drafted, stats.num_accepted, *tokens]


def converted(run: Path, out: Path, form: Form, target: Path) -> Path:
    out = out.with_suffix(".gguf") if form == "gguf" else out
    convert(out, open_draft(run / "checkpoint.pt"), form, "float32", target)
    return out


EXACT: tuple[Form, ...] = ("deepspec", "speculators", "gguf")


@pytest.mark.parametrize("form", EXACT)
def test_every_form_of_a_run_drafts_the_same(
    run: Path, target_folder: Path, tmp_path: Path, form: Form
) -> None:
    expected = drafted(target_folder, converted(run, tmp_path / "first", "deepspec", target_folder))
    assert expected[0] > expected[1]
    assert (
        drafted(target_folder, converted(run, tmp_path / "other", form, target_folder)) == expected
    )


def test_forms_convert_into_each_other(run: Path, target_folder: Path, tmp_path: Path) -> None:
    source = converted(run, tmp_path / "first", "deepspec", target_folder)
    expected = drafted(target_folder, source)
    for form in ("speculators", "gguf", "deepspec"):
        out = tmp_path / f"{form}{'.gguf' if form == 'gguf' else ''}"
        convert(out, open_draft(source), form, "float32", target_folder)  # type: ignore[arg-type]
        source = out
    assert drafted(target_folder, source) == expected


def test_a_dflash_without_markov_head_keeps_its_anchor(
    draft: DraftConfig, target: FrozenTarget, target_folder: Path, tmp_path: Path
) -> None:
    """GGUF tells the slot rule by the Markov head: the file gets one that adds nothing."""
    flash = dataclasses.replace(draft, markov_rank=0, enable_confidence_head=False)
    run = write_run(tmp_path / "run", flash, target)
    expected = drafted(
        target_folder, converted(run, tmp_path / "deepspec", "deepspec", target_folder)
    )
    for form in ("gguf", "speculators"):
        out = converted(run, tmp_path / form, form, target_folder)  # type: ignore[arg-type]
        assert drafted(target_folder, out) == expected


def test_the_engine_takes_a_slot_rule(
    draft: DraftConfig, target: FrozenTarget, target_folder: Path, tmp_path: Path
) -> None:
    """The same tensors under z-lab's class: read as it says, or as they were trained."""
    flash = dataclasses.replace(draft, markov_rank=0, enable_confidence_head=False)
    run = write_run(tmp_path / "run", flash, target)
    trained = converted(run, tmp_path / "deepspec", "deepspec", target_folder)
    other = dataclasses.replace(open_draft(trained), slot_rule="shifted")
    convert(tmp_path / "zlab", other, "zlab", "float32", target_folder)
    expected = drafted(target_folder, trained)
    assert drafted(target_folder, tmp_path / "zlab", "anchor") == expected
    assert drafted(target_folder, tmp_path / "zlab") != expected
    with pytest.raises(ValueError, match="draft_slot_rule must be anchor or shifted, got 'odd'"):
        SpeculationConfig(draft_slot_rule="odd")  # type: ignore[arg-type]


def test_eagle3_of_a_run(
    draft: DraftConfig, target: FrozenTarget, target_folder: Path, tmp_path: Path
) -> None:
    eagle = dataclasses.replace(
        draft,
        algorithm="eagle3",
        markov_rank=0,
        enable_confidence_head=False,
        mask_token_id=None,
        num_hidden_layers=1,
    )
    run = write_run(tmp_path / "run", eagle, target)
    out = converted(run, tmp_path / "deepspec", "deepspec", target_folder)
    assert drafted(target_folder, out)[0] > 0
    with pytest.raises(ValueError, match="no norms of queries and keys"):
        converted(run, tmp_path / "speculators", "speculators", target_folder)


def test_tables_of_its_own_are_not_left_behind(
    run: Path, target_folder: Path, tmp_path: Path
) -> None:
    source = converted(run, tmp_path / "source", "deepspec", target_folder)
    tensors = load_file(source / "model.safetensors")
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].roll(1, 0).contiguous()
    save_file(tensors, source / "model.safetensors")
    expected = drafted(target_folder, source)
    for form in ("gguf", "speculators"):
        out = tmp_path / f"own{'.gguf' if form == 'gguf' else ''}"
        convert(out, open_draft(source), form, "float32", target_folder)  # type: ignore[arg-type]
        assert drafted(target_folder, out) == expected
    with pytest.raises(
        ValueError, match=r"embed_tokens\.weight of this draft are not its target's"
    ):
        convert(tmp_path / "int8", open_draft(source), "int8", "bfloat16", target_folder)


def test_a_reduced_draft_takes_the_heads_rows_along(
    run: Path, target_folder: Path, tmp_path: Path
) -> None:
    source = converted(run, tmp_path / "source", "deepspec", target_folder)
    tensors = load_file(source / "model.safetensors")
    known = torch.arange(0, 64, 3)
    tensors["d2t"] = known - torch.arange(len(known))
    w2 = "markov_head.markov_w2.weight"
    tensors[w2] = tensors[w2][known].contiguous()
    del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors")
    out = tmp_path / "out"
    convert(out, open_draft(source), "speculators", "float32", target_folder)
    assert load_file(out / "model.safetensors")["lm_head.weight"].shape == (len(known), 32)
    assert drafted(target_folder, out) == drafted(target_folder, source)


def test_a_file_that_leaves_the_vocabulary_to_its_target(tmp_path: Path) -> None:
    example = EXAMPLES["gguf-dflash"]
    file = example.write(tmp_path / "draft", dict(example.config), dict(example.tensors))
    checkpoint = open_draft(file)
    assert checkpoint.config["vocab_size"] is None
    with pytest.raises(ValueError, match="name its --model"):
        convert(tmp_path / "out", checkpoint, "zlab", "float32", None)
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text('{"vocab_size": 40}')
    convert(tmp_path / "out", checkpoint, "zlab", "float32", target)
    assert same_drafts(drafter_of(tmp_path / "out"), drafter_of(file))


def test_a_targets_scaled_embedding_is_written_without_its_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads a Gemma 4 draft scales its embedding: a target's table has that inside."""
    scale = HIDDEN**0.5

    class ScaledTarget(TinyTarget):
        def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
            return self.embedding[token_ids] * scale

    target = ScaledTarget()
    tensors = gemma4_tensors(keys_are_values=True)
    bare = {name: tensor for name, tensor in tensors.items() if name not in SHARED}
    config = gemma4_config(keys_are_values=True, final_logit_softcapping=None)
    shared = load(tmp_path / "bare", config, bare, target)
    tables = (target.embedding * scale, target.matrix)
    monkeypatch.setattr("emberline.train.convert.target_tables", lambda *_: tables)
    convert(tmp_path / "out", open_draft(tmp_path / "bare"), "deepspec", "float32", tmp_path)
    written = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(written["embed_tokens.weight"], target.embedding)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    own = load(tmp_path / "out", raw, written, target)
    torch.testing.assert_close(proposals(own)[1], proposals(shared)[1], atol=1e-3, rtol=1e-3)


def test_another_target_is_refused_with_both_shapes(
    run: Path, target_folder: Path, tmp_path: Path
) -> None:
    checkpoint = open_draft(run / "checkpoint.pt")
    other = dataclasses.replace(checkpoint, config={**checkpoint.config, "vocab_size": 65})
    with pytest.raises(ValueError, match=r"\[64, 32\], the draft needs \[65, 32\]"):
        convert(tmp_path / "out", other, "deepspec", "float32", target_folder)


def command(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(make_app("export"), ["export", *map(str, words)])
    return result.exit_code, result.output


def test_the_command_writes_each_form(run: Path, target_folder: Path, tmp_path: Path) -> None:
    for form in FORMS:
        out = tmp_path / f"{form}{'.gguf' if form == 'gguf' else ''}"
        common = (out, "--source", run, "--model", target_folder, "--format", form)
        code, said = command(*common)
        if form == "zlab":
            assert (code, "this draft is not" in said) == (2, True)
        else:
            assert code == 0, said
            assert drafted(target_folder, out)[0] > 0


BAD_COMMANDS = {
    "suffix": (("out", "--format", "gguf"), "--format gguf writes a .gguf file, not out"),
    "folder": (("out.gguf",), "--format deepspec writes a folder, not out.gguf"),
    "dtype": (("out", "--format", "int8", "--dtype", "float32"), "leave --dtype out"),
    "absent": (("out", "--source", "absent"), "absent: expected a checkpoint file"),
}


@pytest.mark.parametrize("case", BAD_COMMANDS)
def test_what_cannot_be_exported_is_one_line(case: str, target_folder: Path) -> None:
    words, reason = BAD_COMMANDS[case]
    code, said = command(*words, "--model", target_folder)
    assert code == 2
    assert reason in said
    assert len(said.strip().splitlines()) == 1
