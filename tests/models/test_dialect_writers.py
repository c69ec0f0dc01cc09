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
        write_gguf(path, checkpoint, {})
        return path
    if form == "zlab":
        return folder_of(path, *flat.write_zlab(checkpoint))
    if form == "speculators":
        verifier = {"name_or_path": "target", "architectures": ["Qwen3ForCausalLM"]}
        return folder_of(path, *speculators.write(checkpoint, tables, verifier))
    return folder_of(path, *flat.write(checkpoint, tables))


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
CANNOT = {
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
