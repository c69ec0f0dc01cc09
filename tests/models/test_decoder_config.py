"""A config is read whole or refused by the name of what is not understood."""

from __future__ import annotations

import pytest
import torch

from emberline.models.decoder import Decoder
from emberline.models.decoder_config import DecoderConfig
from emberline.models.weights import ModelError, Weights

BASE = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"hidden_act": "unheard_of"}, "unheard_of"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "key-value"),
        ({"model_type": "qwen2", "use_mrope": True}, "use_mrope"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias"),
    ],
)
def test_refused_by_name(change, named) -> None:
    with pytest.raises(ModelError, match=named):
        DecoderConfig.from_hf({**BASE, **change})


def test_kv_spec_and_windows() -> None:
    qwen = {
        **BASE,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    }
    config = DecoderConfig.from_hf(qwen)
    assert config.sliding_windows == (None, 5)
    assert (config.kv_spec.num_layers, config.kv_spec.num_kv_heads) == (2, 1)
    assert DecoderConfig.from_hf({**qwen, "use_sliding_window": False}).sliding_windows == (
        None,
        None,
    )


def test_a_length_that_would_change_the_frequencies_is_refused(reference) -> None:
    ref = reference("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert ref.decoder(torch.float32).max_model_len == 512
    with pytest.raises(ModelError, match="frequencies"):
        ref.decoder(torch.float32, max_model_len=513)


def test_weights_that_do_not_fit(reference) -> None:
    ref = reference("llama")
    weights = ref.weights()
    state = {name: weights.take(name) for name in weights.names()}

    def load(tensors, **options) -> Decoder:
        return Decoder.load(
            DecoderConfig.from_hf(ref.raw_config),
            Weights(tensors, "tiny"),
            dtype=torch.float32,
            device="cpu",
            **{"taps": (), "num_pages": 4, "page_size": 16, **options},
        )

    with pytest.raises(ModelError, match="extra"):
        load({**state, "model.layers.0.extra": torch.zeros(1)})
    with pytest.raises(ModelError, match="missing"):
        load({k: v for k, v in state.items() if "layers.1.mlp.up" not in k})
    with pytest.raises(ModelError, match="tap 3"):
        load(state, taps=(3,))


def test_a_tied_head_that_differs_is_refused(reference) -> None:
    ref = reference("llama", tie_word_embeddings=True)
    weights = ref.weights()
    state = {name: weights.take(name) for name in weights.names()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1
    with pytest.raises(ModelError, match="ties"):
        Decoder.load(
            DecoderConfig.from_hf(ref.raw_config),
            Weights(state, "tiny"),
            dtype=torch.float32,
            device="cpu",
            taps=(),
            num_pages=4,
            page_size=16,
        )
