"""What an export writes is read back, and drafts exactly as its source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emberline.drafters.dialects import (
    DraftCheckpoint,
    flat,
    read_checkpoint,
    speculators,
)
from emberline.drafters.dialects.canonical import SHARED
from emberline.drafters.dialects.gguf_write import write_gguf

from support.drafter_world import (
    HIDDEN,
    VOCAB,
    TinyTarget,
)
from support.tiny_dialects import (
    LLAMA,
    PLAIN,
    REDUCED_EAGLE3,
    Config,
    Tensors,
    drafter_of,
    folder_of,
    reduced_tensors,
)
from support.tiny_draft import (
    DFLASH,
    ZLAB,
    draft_config,
    draft_tensors,
    gemma4_config,
    gemma4_tensors,
    same_drafts,
)
from support.tiny_eagle3 import eagle3_config, eagle3_tensors


def written(path: Path, checkpoint: DraftCheckpoint, form: str) -> Path:
    target = TinyTarget()
    tables = dict(zip(SHARED, (target.embedding, target.matrix), strict=True))
    if form == "gguf":
        path = path.with_suffix(".gguf")
        own = [name for name in SHARED if name in checkpoint.shapes]
        write_gguf(path, checkpoint, {}, own)
        return path
    if form == "zlab":
        return folder_of(path, *flat.write_zlab(checkpoint))
    if form == "speculators":
        verifier = {"name_or_path": "target", "architectures": ["Qwen3ForCausalLM"]}
        return folder_of(path, *speculators.write(checkpoint, tables, verifier))
    return folder_of(path, *flat.write(checkpoint, tables))


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
OWN_HEAD = draft_tensors() | {
    "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))
}
SOURCES: dict[str, tuple[Config, Tensors]] = {
    "dspark": (PLAIN, draft_tensors()),
    "rnn": (PLAIN, draft_tensors("rnn")),
    "dflash": (draft_config(**DFLASH), draft_tensors(None)),
    "shifted": (draft_config(**ZLAB), draft_tensors(None)),
    "reduced": (PLAIN, reduced_tensors()),
    "narrow confidence": (
        draft_config(confidence_head_with_markov=False),
        draft_tensors() | {"confidence_head.proj.weight": torch.randn(1, HIDDEN)},
    ),
    "gemma4": (gemma4_config(keys_are_values=True), gemma4_tensors(keys_are_values=True)),
    "eagle3": (eagle3_config(ttt_length=7), eagle3_tensors()),
    "eagle3 llama": (eagle3_config(ttt_length=7, norm_before_residual=True), LLAMA),
    "eagle3 reduced": (eagle3_config(ttt_length=7, draft_vocab_size=8), REDUCED_EAGLE3),
}
SOURCES |= {
    "gelu": (draft_config(hidden_act="gelu_pytorch_tanh"), draft_tensors()),
    "yarn": (draft_config(rope_parameters=YARN), draft_tensors()),
    "yarn betas": (
        draft_config(rope_parameters=YARN | {"beta_fast": 8.0, "beta_slow": 2.0}),
        draft_tensors(),
    ),
    "yarn factor": (
        draft_config(rope_parameters=YARN | {"attention_factor": 1.5}),
        draft_tensors(),
    ),
    "capped": (draft_config(final_logit_softcapping=3.0), OWN_HEAD),
    "eagle3 residual": (eagle3_config(norm_before_residual=True), eagle3_tensors()),
}
CANNOT = {
    ("gelu", "gguf"): "no hidden_act 'gelu_pytorch_tanh'",
    ("yarn factor", "gguf"): r"attention_factor 1\.5",
    ("capped", "speculators"): "no final_logit_softcapping",
    ("eagle3 llama", "deepspec"): "has norms of queries and keys",
    ("eagle3 residual", "deepspec"): "no norm_before_residual",
    ("eagle3 residual", "speculators"): "no norms of queries and keys",
    ("eagle3 residual", "gguf"): "no place for layers.0.self_attn.",
    ("shifted", "deepspec"): "cannot say",
    ("reduced", "deepspec"): "no reduced vocabulary",
    ("eagle3 reduced", "deepspec"): "no reduced vocabulary",
    ("gemma4", "speculators"): "no Gemma 4 backbone",
    ("gemma4", "gguf"): "no Gemma 4 draft",
    ("eagle3", "speculators"): "no norms of queries and keys",
    ("eagle3", "gguf"): "no place for layers.0.self_attn.",
    ("rnn", "gguf"): "this draft's is rnn",
    **{(name, "zlab"): "this draft is not" for name in SOURCES if name != "shifted"},
}


@pytest.mark.parametrize("form", ["deepspec", "zlab", "speculators", "gguf"])
@pytest.mark.parametrize("name", SOURCES)
def test_what_is_written_drafts_the_same(tmp_path: Path, name: str, form: str) -> None:
    config, tensors = SOURCES[name]
    source = folder_of(tmp_path / "source", config, tensors)
    checkpoint = read_checkpoint(source)
    if (name, form) in CANNOT:
        with pytest.raises(ValueError, match=CANNOT[name, form]):
            written(tmp_path / "out", checkpoint, form)
        return
    path = written(tmp_path / "out", checkpoint, form)
    assert same_drafts(drafter_of(path), drafter_of(source))


def test_no_class_is_given_a_draft_that_it_would_read_otherwise(tmp_path: Path) -> None:
    """z-lab's class, by which this engine's own form tells a silent anchor too."""
    gemma = folder_of(
        tmp_path / "gemma",
        gemma4_config(keys_are_values=True) | {**DFLASH},
        {n: t for n, t in gemma4_tensors(keys_are_values=True).items() if "_head." not in n},
    )
    markov = folder_of(tmp_path / "markov", PLAIN, draft_tensors())
    for source, reason in ((gemma, "Gemma 4 backbone"), (markov, "Markov head")):
        with pytest.raises(ValueError, match=reason):
            flat.write_own(read_checkpoint(source, "shifted"))
    reduced = folder_of(tmp_path / "reduced", draft_config(**DFLASH), reduced_tensors(None))
    checkpoint = read_checkpoint(reduced, "shifted")
    with pytest.raises(ValueError, match="no reduced vocabulary"):
        flat.write_zlab(checkpoint)
    own = folder_of(tmp_path / "own", *flat.write_own(checkpoint))
    assert same_drafts(drafter_of(own), drafter_of(reduced, slot_rule="shifted"))
