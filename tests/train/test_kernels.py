"""The Triton kernels against their plain forms: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from emberline.train.objectives import Mix, loss_and_gradient
from emberline.train.target import lockstep_attention

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)


@pytest.mark.parametrize("vocab", [30, 5000, 8192])
@pytest.mark.parametrize(
    "mix", [Mix(0.1, 0.9), Mix(1.0, 0.0), Mix(0.1, 0.5, 0.4, 0.3), Mix(0.0, 0.0, soft_ce=1.0)]
)
def test_loss_rows_is_the_plain_rule(vocab: int, mix: Mix):
    from emberline.train.kernels import loss_rows

    torch.manual_seed(0)
    draft, target = 4 * torch.randn(2, 6, vocab, device=DEVICE)
    labels, weights = torch.randint(vocab, (6,), device=DEVICE), torch.rand(6, device=DEVICE)
    ours = loss_rows(draft, target, labels, weights, mix, torch.float32)
    plain = loss_and_gradient(draft, target, labels, weights, mix, torch.float32)
    for name, found, wanted in zip(plain._fields, ours, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("count", [1, 64, 65, 199])
def test_lockstep_attention_is_the_plain_one(count: int):
    from emberline.train import kernels

    torch.manual_seed(0)
    query = torch.randn(3, 9, 64, device=DEVICE)
    keys, values = torch.randn(2, 3, 3, 200, 64, device=DEVICE)
    ours = kernels.lockstep_attention(query, keys, values, count)
    plain = lockstep_attention(query, keys, values, count)
    # Tensor cores take float32 in 10 bits.
    torch.testing.assert_close(ours, plain, rtol=5e-3, atol=5e-3)
