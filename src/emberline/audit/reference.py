"""Scores by plain transformers in float32, teacher-forced. Loaded only when an audit asks for it.

Shares nothing with the engine: not its modelling code, not its log-softmax. That is the point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberline.audit.records import Alternative, TokenRecord
from emberline.audit.settings import AuditError


@dataclass(frozen=True, slots=True)
class Reference:
    """A model of transformers, and what to call it."""

    name: str
    model: Any

    @classmethod
    def load(cls, name: str, folder: str | Path | None = None) -> Reference:
        """Load a model from a folder or by its Hugging Face id.

        Raises:
            AuditError: there is no such model.
        """
        import torch
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(folder or name, dtype=torch.float32)
        except (OSError, ValueError) as problem:
            first = str(problem).strip().split("\n")[0]
            raise AuditError(f"--reference {name}: {first}") from None
        return cls(name, model.eval())

    def rows(self, ids: Sequence[int], first: int, num_top: int) -> tuple[TokenRecord, ...]:
        """Records of `ids[first:]`, each under the row of the token before it; `first` >= 1."""
        import torch

        with torch.inference_mode():
            tokens = torch.tensor([list(ids)])
            logits = self.model(tokens).logits[0, first - 1 : len(ids) - 1].double()
            logprobs = logits - logits.logsumexp(-1, keepdim=True)
            values, top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
            chosen = logprobs.gather(-1, tokens[0, first:, None]).squeeze(-1)
        return tuple(
            TokenRecord(token, value, tuple(map(Alternative, row_ids, row_values)))
            for token, value, row_ids, row_values in zip(
                ids[first:], chosen.tolist(), top.tolist(), values.tolist(), strict=True
            )
        )
