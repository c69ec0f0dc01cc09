"""Drives a target over random pages, one step at a time, the way an engine does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from emberline.batch import ForwardBatch
from emberline.layout import TokenLayout, Tokens
from emberline.models.decoder import Decoder
from emberline.models.decoder_config import DecoderConfig
from emberline.models.target import Target
from emberline.models.weights import Weights

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


@dataclass
class Driver:
    """Sequences that move through a target's pages."""

    decoder: Target
    sequences: list[Tensor]  # token ids, int64
    page_size: int
    kind: str = "compact"
    width: int = 8
    done: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_pages = self.decoder.kv_pools[0].keys.shape[1] // self.page_size
        pages = (torch.randperm(num_pages - 1) + 1).tolist()
        for tokens in self.sequences:
            need = -(-len(tokens) // self.page_size)
            self.tables.append([pages.pop() for _ in range(need)])
        self.done = [0] * len(self.sequences)

    def batch(self, counts: Sequence[int], windows: Sequence[int] | None = None) -> ForwardBatch:
        """A step that forwards `counts[i]` tokens of sequence i (0 leaves it out)."""
        live = [i for i, n in enumerate(counts) if n]
        windows = counts if windows is None else windows
        lens = torch.tensor([counts[i] for i in live])
        spans = [range(self.done[i], self.done[i] + counts[i]) for i in live]
        slots = [
            self.tables[i][p // self.page_size] * self.page_size + p % self.page_size
            for i, span in zip(live, spans, strict=True)
            for p in span
        ]
        used = [-(-span.stop // self.page_size) for span in spans]
        table = torch.zeros(len(live), max(used), dtype=torch.int64)
        for row, (i, n) in enumerate(zip(live, used, strict=True)):
            table[row, :n] = torch.tensor(self.tables[i][:n])
        layout = TokenLayout.build(
            lens,
            torch.tensor([windows[i] for i in live]),
            num_tokens=int(lens.sum()),
            num_scored=sum(windows[i] for i in live),
            kind=self.kind,  # type: ignore[arg-type]
            width=self.width,
            row_granule=self.decoder.row_granule,
        ).check()
        tokens = [
            self.sequences[i][span.start : span.stop] for i, span in zip(live, spans, strict=True)
        ]
        return ForwardBatch(
            layout=layout,
            token_ids=Tokens(torch.cat(tokens)),
            positions=Tokens(torch.tensor([p for span in spans for p in span])),
            slot_mapping=Tokens(torch.tensor(slots)),
            page_table=table,
            seq_lens=torch.tensor([span.stop for span in spans]),
        )

    def step(
        self, counts: Sequence[int], windows: Sequence[int] | None = None, commit: bool = True
    ) -> dict[int, tuple[Tensor, Tensor | None]]:
        """Run one step: logits of the window and taps of every token, by sequence."""
        batch = self.batch(counts, windows)
        out = self.decoder.forward(batch)
        result: dict[int, tuple[Tensor, Tensor | None]] = {}
        row = 0
        for i, n in enumerate(counts):
            if not n:
                continue
            s0, s1 = batch.layout.scored_start_loc[row : row + 2].tolist()
            t0, t1 = batch.layout.query_start_loc[row : row + 2].tolist()
            result[i] = (out.logits[s0:s1], None if out.taps is None else out.taps[t0:t1])
            if commit:
                self.done[i] += n
            row += 1
        return result

    def run(self, steps: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[Tensor]]:
        """Run steps that score everything: logits [n, V] and taps [n, A] of each sequence."""
        logits: list[list[Tensor]] = [[] for _ in self.sequences]
        taps: list[list[Tensor]] = [[] for _ in self.sequences]
        for counts in steps:
            for i, (scored, tapped) in self.step(counts).items():
                logits[i].append(scored)
                if tapped is not None:
                    taps[i].append(tapped)
        return (
            [torch.cat(x) for x in logits],
            [torch.cat(x) if x else torch.empty(0) for x in taps],
        )


@dataclass(frozen=True)
class Reference:
    """The same model in plain transformers, eager attention."""

    model: Any
    raw_config: dict[str, Any]

    def weights(self) -> Weights:
        state = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        if self.model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        return Weights(state, "tiny")

    @torch.no_grad()
    def logits_and_taps(self, tokens: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[n, V] logits and [n, A] raw layer outputs, by hooks."""
        caught: dict[int, Tensor] = {}
        hooks = [
            self.model.model.embed_tokens.register_forward_hook(
                lambda _m, _i, out: caught.__setitem__(-1, out[0])
            )
        ]
        for index, layer in enumerate(self.model.model.layers):

            def keep(_m: Any, _i: Any, out: Any, index: int = index) -> None:
                caught[index] = (out if torch.is_tensor(out) else out[0])[0]

            hooks.append(layer.register_forward_hook(keep))
        logits = self.model(tokens[None], use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        return logits, torch.cat([caught[tap] for tap in taps], dim=-1)

    def decoder(self, dtype: torch.dtype, taps: tuple[int, ...] = (), **options: Any) -> Decoder:
        """Our decoder of the same weights."""
        options = {"num_pages": 129, "page_size": 16, "poison_padding": True, **options}
        return Decoder.load(
            DecoderConfig.from_hf(self.raw_config),
            self.weights(),
            dtype=dtype,
            device="cpu",
            taps=taps,
            **options,
        )


def make_reference(
    model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Reference:
    """A tiny random model of a family; norms and biases are random too, so that they matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**TINY, **changes}
    config = AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
            else:
                parameter.normal_(std=0.08)
    raw = {"model_type": model_type, **fields}
    return Reference(model.to(dtype), raw)


@pytest.fixture
def reference() -> Callable[..., Reference]:
    return make_reference


@pytest.fixture
def driver() -> Callable[..., Driver]:
    return Driver
