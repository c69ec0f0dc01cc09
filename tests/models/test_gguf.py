"""GGUF files: the converted folder computes what the original model computes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from emberline.hub import generation_stop_ids, load_tokenizer
from emberline.models import gguf_convert
from emberline.models.gguf_convert import convert_gguf
from emberline.models.gguf_file import read_gguf
from emberline.models.gguf_rope import _llama3_factors
from emberline.models.gguf_tokenizer import save_tokenizer
from emberline.models.weights import ModelError, load_folder

from support.tiny_gguf import (
    TOKENS,
    finish,
    tiny_model,
    write_gguf,
)

KINDS = gguf.GGMLQuantizationType
PROMPT = torch.arange(3, 40)[None]


def logits_of(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(PROMPT).logits


def convert(source: Path, folder: Path) -> torch.nn.Module:
    folder.mkdir()
    convert_gguf(source, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def error_of(source: Path, tmp_path: Path) -> str:
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    with pytest.raises(ModelError) as caught:
        convert_gguf(source, out)
    message = str(caught.value)
    assert message.startswith(str(source))
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_logits_equal_the_original(tmp_path, architecture, changes):
    model = tiny_model(architecture, **changes)
    converted = convert(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    assert type(converted) is type(model)
    torch.testing.assert_close(logits_of(converted), logits_of(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (KINDS.F16, torch.float16),
        (KINDS.BF16, torch.bfloat16),
        (KINDS.Q8_0, torch.float32),
        (KINDS.Q4_1, torch.float32),
    ],
)
def test_stored_values_are_exactly_those_of_the_file(tmp_path, kind, dtype):
    model = tiny_model()
    source = write_gguf(tmp_path / "m.gguf", model, kind=kind)
    convert(source, tmp_path / "out")
    weights = load_folder(tmp_path / "out")
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    for ours, theirs in (("mlp.up_proj", "ffn_up"), ("self_attn.v_proj", "attn_v")):
        tensor = raw[f"blk.1.{theirs}.weight"]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got = weights.take(f"model.layers.1.{ours}.weight")
        assert got.dtype == dtype
        assert np.array_equal(got.float().numpy(), expected)
    assert weights.take("model.norm.weight").dtype == torch.float32
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")


def test_tied_embedding_is_stored_once(tmp_path):
    convert(write_gguf(tmp_path / "m.gguf", tiny_model()), tmp_path / "out")
    assert not load_folder(tmp_path / "out").has("lm_head.weight")


def test_large_models_are_sharded(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_convert, "SHARD_BYTES", 20_000)
    model = tiny_model()
    converted = convert(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    torch.testing.assert_close(logits_of(converted), logits_of(model), rtol=0, atol=1e-6)


def test_progress_counts_every_tensor(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", tiny_model())
    calls: list[tuple[int, int]] = []
    (tmp_path / "out").mkdir()
    convert_gguf(source, tmp_path / "out", lambda done, total: calls.append((done, total)))
    total = len(read_gguf(source).tensors)
    assert calls == [(i + 1, total) for i in range(total)]


def test_llama3_position_scaling_is_recovered(tmp_path):
    factors = _llama3_factors(500_000.0, 8, 8.0).numpy()
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model(rope_parameters=scaled, max_position_embeddings=65_536)
    inverse = 500_000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(
        model.model.rotary_emb.inv_freq, inverse / torch.from_numpy(factors).float()
    )
    source = write_gguf(tmp_path / "m.gguf", model, extra_tensors={"rope_freqs.weight": factors})
    converted = convert(source, tmp_path / "out")
    assert converted.config.rope_parameters == scaled
    torch.testing.assert_close(logits_of(converted), logits_of(model), rtol=0, atol=1e-6)


def test_yarn_position_scaling(tmp_path):
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = tiny_model(rope_parameters=yarn)
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    converted = convert(write_gguf(tmp_path / "m.gguf", model, extra=keys), tmp_path / "out")
    torch.testing.assert_close(logits_of(converted), logits_of(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' cannot be converted"),
        ({"pre": "unheard-of"}, "pre-tokenizer 'unheard-of'"),
        ({"extra": {"llama.expert_count": 8}}, "expert_count"),
        ({"extra": {"llama.rope.scaling.type": "longrope"}}, "longrope"),
        ({"extra": {"llama.rope.dimension_count": 4}}, "rotary of size 4"),
        ({"extra": {"split.count": 2}}, "merge the parts"),
        ({"extra_tensors": {"blk.0.ffn_sub_norm.weight": np.ones(64)}}, "has no place"),
        ({"extra_tensors": {"rope_freqs.weight": np.full(4, 3.0)}}, "Llama 3 rule"),
        ({"skip": ("blk.1.attn_k.weight",)}, "1 tensors are missing"),
    ],
)
def test_refusals_say_why(tmp_path, changes, message):
    source = write_gguf(tmp_path / "m.gguf", tiny_model(), **changes)
    assert message in error_of(source, tmp_path)


def test_shape_that_the_metadata_contradict(tmp_path):
    model = tiny_model()
    model.config.intermediate_size = 96
    assert "ask for" in error_of(write_gguf(tmp_path / "m.gguf", model), tmp_path)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip", b"GGUF", b"GGUF\x03\0\0\0"])
def test_foreign_file(tmp_path, content):
    source = tmp_path / "m.gguf"
    source.write_bytes(content)
    error_of(source, tmp_path)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.99])
def test_truncated_file(tmp_path, fraction):
    source = write_gguf(tmp_path / "m.gguf", tiny_model())
    whole = source.read_bytes()
    source.write_bytes(whole[: int(len(whole) * fraction)])
    assert "truncated or damaged" in error_of(source, tmp_path)


def test_other_versions(tmp_path):
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(64))
    assert "GGUF version 1" in error_of(source, tmp_path)


# Tokenizers


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("gguf")
    convert(write_gguf(base / "m.gguf", tiny_model()), base / "out")
    return base / "out"


def test_ids_are_those_of_the_file(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens(list(range(len(TOKENS)))) == TOKENS
    assert tokenizer.all_special_tokens == ["<|im_start|>", "<|im_end|>"]
    assert generation_stop_ids(folder) == {0, 2}


def test_no_bos_and_the_template(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hehe"}], return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<|im_start|>", "u", "s", "e", "r", "\u0120", "he", "he", "<|im_end|>",
    ]  # fmt: skip
    assert tokenizer("the").input_ids == tokenizer("the", add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("smollm", ["1", "2", "3"]),
        ("gpt-2", ["12", "3"]),
        ("qwen2", ["1", "2", "3"]),
        ("llama-bpe", ["12", "3"]),
        ("tekken", ["1", "2", "3"]),
    ],
)
def test_digits_by_pre_tokenizer(tmp_path, pre, digits):
    convert(write_gguf(tmp_path / "m.gguf", tiny_model(), pre=pre), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.tokenize("a 123 the") == ["a", "\u0120", *digits, "\u0120the"]
    assert tokenizer.decode(tokenizer("a 123 the").input_ids) == "a 123 the"


def test_bos_when_the_file_asks_for_it(tmp_path):
    metadata = read_gguf(write_gguf(tmp_path / "m.gguf", tiny_model())).metadata
    metadata |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    save_tokenizer(metadata, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer("the").input_ids[0] == 1
    assert tokenizer("the").input_ids[-1] == 2
    assert 1 not in tokenizer("the", add_special_tokens=False).input_ids
    assert tokenizer("a", "b").input_ids.count(1) == 2


SPM_PIECES = {"he": -1.0, "\u2581t": -2.0, "ll": -2.5, "\u2581the": -3.0, "hell": -3.5, "lo": -4.0}
SPM_CHARS = "\u2581abehlot"


def spm_metadata() -> dict:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(SPM_PIECES) + len(SPM_CHARS))
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *SPM_PIECES, *SPM_CHARS],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259
        + list(SPM_PIECES.values())
        + [-100.0 - i for i in range(len(SPM_CHARS))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def spm_reference(text: str) -> list[str]:
    """Merge the neighbours whose union scores best, leftmost first, until none is a piece."""
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        unions = [(SPM_PIECES.get(a + b), -i) for i, (a, b) in enumerate(pairwise(parts))]
        known = [(score, i) for score, i in unions if score is not None]
        if not known:
            return parts
        at = -max(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_sentencepiece_vocabulary(tmp_path):
    save_tokenizer(spm_metadata(), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in ("the hello", "hell to the hotel", "  to  the", "a", "lolll"):
        assert tokenizer.tokenize(text) == spm_reference(text)
        ids = tokenizer(text).input_ids
        assert ids[0] == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    emoji = tokenizer.tokenize("a\N{GRINNING FACE}")
    assert emoji == ["\u2581", "a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert tokenizer.decode(tokenizer("a\N{GRINNING FACE}").input_ids[1:]) == "a\N{GRINNING FACE}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.scores": None}, "no scores"),
        ({"tokenizer.ggml.tokens": None}, "no vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, "token types"),
    ],
)
def test_vocabularies_that_are_refused(tmp_path, change, message):
    with pytest.raises(ModelError, match=message):
        save_tokenizer(spm_metadata() | change, tmp_path)


def test_file_without_a_vocabulary(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    source = finish(writer, tmp_path / "m.gguf")
    error_of(source, tmp_path)
