"""The fields of a Llama-shaped config.json that count, with the types and defaults of transformers.

Its own classes for these architectures say the same, but to import one brings half the library: a
second or more of every start. What reads and checks a config is the library's all the same, and a
test holds these fields against its classes. Must not know what a field means.
"""

# No `annotations` from the future: the library checks values by types, not by their names.

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig


@strict
class _Fields(PretrainedConfig):  # type: ignore[misc]
    """What all of them have."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what follows from other fields."""
        _fill_heads(self)
        super().__post_init__(**kwargs)


def _fill_heads(fields: Any) -> None:
    if getattr(fields, "head_dim", 0) is None:  # not all of them have one
        fields.head_dim = fields.hidden_size // fields.num_attention_heads
    if fields.num_key_value_heads is None:
        fields.num_key_value_heads = fields.num_attention_heads


@strict
class LlamaFields(_Fields):
    """Of `LlamaConfig`."""

    model_type = "llama"

    head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def validate_architecture(self) -> None:
        """The library calls it."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads "
                f"({self.num_attention_heads})"
            )


@strict
class MistralFields(_Fields):
    """Of `MistralConfig`."""

    model_type = "mistral"

    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    head_dim: int | None = None
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


@strict
class _QwenFields(_Fields):
    """What both Qwens have besides."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Say which layers have a window."""
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            first = self.max_window_layers if self.sliding_window is not None else None
            self.layer_types = [
                "full_attention" if first is None or layer < first else "sliding_attention"
                for layer in range(self.num_hidden_layers)
            ]
        super().__post_init__(**kwargs)


@strict
class Qwen2Fields(_QwenFields):
    """Of `Qwen2Config`."""

    model_type = "qwen2"


@strict
class Qwen3Fields(_QwenFields):
    """Of `Qwen3Config`."""

    model_type = "qwen3"

    head_dim: int = 128
    attention_bias: bool = False
