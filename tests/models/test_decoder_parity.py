"""Our forward against plain transformers: every family and variant, however a sequence is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 256,
    "factor": 4.0,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-nine-heads": (
        "llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "llama-theta": ("llama", {"rope_theta": 500.0}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "llama-longrope": ("llama", {"rope_scaling": LONGROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-bias": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}
TAPS = (2, -1, 0)
LENGTHS = (150, 21, 40)
# Chunks of every kind share steps: prefill, single tokens, verify-like blocks, 128 crossed.
STEPS = [
    (100, 1, 0),
    (1, 8, 3),
    (26, 1, 20),
    (1, 1, 1),
    (8, 8, 1),
    (0, 2, 15),
    (14, 0, 0),
]


def _tokens(lengths: tuple[int, ...], vocab: int = 97) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", ["compact", "static"])
def test_parity_in_mixed_steps(name, kind, reference, driver) -> None:
    model_type, changes = VARIANTS[name]
    ref = reference(model_type, **changes)
    sequences = _tokens(LENGTHS)
    run = driver(ref.decoder(torch.float32, TAPS), sequences, 16, kind=kind)
    logits, taps = run.run(STEPS)
    for tokens, got, tapped in zip(sequences, logits, taps, strict=True):
        want, want_taps = ref.logits_and_taps(tokens, TAPS)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        torch.testing.assert_close(tapped, want_taps, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-window", "qwen3-window"])
def test_parity_in_float64(name, reference, driver) -> None:
    model_type, changes = VARIANTS[name]
    ref = reference(model_type, dtype=torch.float64, **changes)
    sequences = _tokens(LENGTHS)
    logits, _ = driver(ref.decoder(torch.float64), sequences, 16).run(STEPS)
    for tokens, got in zip(sequences, logits, strict=True):
        want, _ = ref.logits_and_taps(tokens, (0,))
        assert got.dtype == torch.float64
        # transformers takes norms, softmax and angles through float32 even here.
        torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
