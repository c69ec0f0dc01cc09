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
class LlamaFields(PretrainedConfig):  # type: ignore[misc]
    """Of `LlamaConfig`."""

    model_type = "llama"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what follows from other fields."""
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """The library calls it."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads "
                f"({self.num_attention_heads})"
            )


@strict
class MistralFields(PretrainedConfig):  # type: ignore[misc]
    """Of `MistralConfig`."""

    model_type = "mistral"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | None = 4096

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what follows from other fields."""
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


@strict
class Qwen2Fields(PretrainedConfig):  # type: ignore[misc]
    """Of `Qwen2Config`."""

    model_type = "qwen2"

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what follows from other fields."""
        _fill_windows(self)
        super().__post_init__(**kwargs)


@strict
class Qwen3Fields(PretrainedConfig):  # type: ignore[misc]
    """Of `Qwen3Config`."""

    model_type = "qwen3"

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what follows from other fields."""
        _fill_windows(self)
        super().__post_init__(**kwargs)


def _fill_windows(fields: Any) -> None:
    """Of which layers have one."""
    if not fields.use_sliding_window:
        fields.sliding_window = None
    if fields.num_key_value_heads is None:
        fields.num_key_value_heads = fields.num_attention_heads
    if fields.layer_types is None:
        first = fields.max_window_layers if fields.sliding_window is not None else None
        fields.layer_types = [
            "full_attention" if first is None or layer < first else "sliding_attention"
            for layer in range(fields.num_hidden_layers)
        ]
