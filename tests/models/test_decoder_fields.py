"""The fields of a config are those of transformers' own classes, which are long to import."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.activations import ACT2FN

from emberline.models import decoder_fields
from emberline.models.activation import _USUAL, activation
from emberline.models.decoder_config import _HARMLESS, _NEUTRAL
from emberline.models.weights import ModelError

PAIRS = [
    (decoder_fields.LlamaFields, LlamaConfig),
    (decoder_fields.MistralFields, MistralConfig),
    (decoder_fields.Qwen2Fields, Qwen2Config),
    (decoder_fields.Qwen3Fields, Qwen3Config),
]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
VALUES: dict[str, list[Any]] = {
    "vocab_size": [31, 0, "many"],
    "hidden_size": [64, 96, 100, True, 64.0],
    "intermediate_size": [24, None],
    "num_hidden_layers": [5, 1, "2"],
    "num_attention_heads": [4, 2, 3],
    "num_key_value_heads": [2, 1, None],
    "head_dim": [16, None, 0],
    "hidden_act": ["silu", "gelu", 3],
    "max_position_embeddings": [64, 2048],
    "rms_norm_eps": [1e-5, 1, "small"],
    "tie_word_embeddings": [True, False, 1],
    "rope_theta": [5e5, 10000],
    "rope_scaling": [LLAMA3, {"type": "linear", "factor": 2.0}, None, "linear"],
    "rope_parameters": [{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, None],
    "attention_bias": [True, False, "no"],
    "mlp_bias": [True, False],
    "use_sliding_window": [True, False, None],
    "sliding_window": [7, None, "wide"],
    "max_window_layers": [3, 0],
    "layer_types": [None, ["full_attention"] * 5, ["odd"], "full_attention"],
}


def made(kind: type[PretrainedConfig], raw: dict[str, Any]) -> PretrainedConfig | None:
    """None: it refuses."""
    try:
        return kind(**raw)
    except Exception:  # which kind of error is the library's
        return None


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_every_field_is_read_as_transformers_reads_it(
    ours: type[PretrainedConfig], theirs: type[PretrainedConfig]
) -> None:
    names = [field.name for field in fields(ours)]
    chance, num_refused = random.Random(theirs.model_type), 0
    for turn in range(400):
        # Most values by themselves, for what is refused tells nothing of the others.
        count = chance.choice([0, 1, 1, 2, 4])
        raw = {name: chance.choice(VALUES[name]) for name in chance.sample(list(VALUES), count)}
        one, other = made(ours, dict(raw)), made(theirs, dict(raw))
        assert (one is None) == (other is None), f"{turn}: {raw}"
        if one is None:
            num_refused += 1
            continue
        values = [[getattr(config, name) for name in names] for config in (one, other)]
        assert values[0] == values[1], f"{turn}: {raw}"
    assert 40 < num_refused < 300


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_field_that_is_left_out_changes_no_result(
    ours: type[PretrainedConfig], theirs: type[PretrainedConfig]
) -> None:
    left_out = {field.name for field in fields(theirs)} - {field.name for field in fields(ours)}
    assert left_out <= _HARMLESS | _NEUTRAL.keys()


@pytest.mark.parametrize("name", sorted(_USUAL))
def test_usual_activations_are_those_of_transformers(name: str) -> None:
    rows = torch.randn(64, generator=torch.Generator().manual_seed(3)) * 4
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(activation(name)(rows.to(dtype)), ACT2FN[name](rows.to(dtype)))


def test_others_are_found_and_unknown_ones_refused() -> None:
    assert activation("relu2")(torch.tensor([-1.0, 3.0])).tolist() == [0.0, 9.0]
    with pytest.raises(ModelError, match="unheard_of"):
        activation("unheard_of")


def test_a_start_brings_nothing_that_takes_long_to_import() -> None:
    """They are a second or more each, and come with transformers' classes of configs."""
    program = """
import sys
import emberline.cli, emberline.llm, emberline.server.app
from emberline.models.decoder_config import DecoderConfig
DecoderConfig.from_hf({"model_type": "llama", "num_hidden_layers": 1})
long = "sympy", "torch.distributed.tensor", "transformers.activations", "transformers.video_utils"
print([name for name in (*long, "transformers.modeling_utils") if name in sys.modules])
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
