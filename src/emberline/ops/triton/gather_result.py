"""What a step has found, written side by side on a GPU by one kernel that starts early.

Must not know what reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from emberline.batch import Verdict
from emberline.ops.triton.gpu import await_inputs, early_start

LANES = 256  # numbers of each part that a program copies
_POINTERS = ("starts", "accepted", "drafted", "admitted", "ids", "floats", "to", "floats_to")


@triton.jit(
    do_not_specialize=("num_reqs", "num_ids", "num_floats"),
    do_not_specialize_on_alignment=_POINTERS,  # parts begin anywhere: one layout for all
)
def _gather(
    starts, accepted, drafted, admitted, ids, floats, to, floats_to,
    num_reqs, num_ids, num_floats,
    LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program i copies part i of everything: all is asked for before anything is written."""
    await_inputs(EARLY)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = lane < num_reqs
    start = tl.load(starts + lane, mask=lane <= num_reqs)
    stood = tl.load(accepted + lane, mask=live)
    drawn = tl.load(drafted + lane, mask=live)
    verified = tl.load(admitted + lane, mask=live)
    token_id = tl.load(ids + lane, mask=lane < num_ids)
    if floats is not None:
        tl.store(
            floats_to + lane, tl.load(floats + lane, mask=lane < num_floats), lane < num_floats
        )
    tl.store(to + lane, start, mask=lane <= num_reqs)
    to += 1 + lane
    tl.store(to + num_reqs, stood, mask=live)
    tl.store(to + 2 * num_reqs, drawn, mask=live)
    tl.store(to + 3 * num_reqs, verified, mask=live)
    tl.store(to + 4 * num_reqs, token_id, mask=lane < num_ids)


def gather_result(
    verdict: Verdict,
    num_drafted: Tensor,
    num_admitted: Tensor,
    confidence: Tensor | None,
    to: Tensor,
    confidence_to: Tensor | None,
) -> None:
    """Write the parts of a step's result, of B requests and N tokens, but for its scores.

    Args:
        verdict: of the step.
        num_drafted: [B] int64.
        num_admitted: [B] int64.
        confidence: [B, K] float32, or None.
        to: [>= 1 + 4 * B + N] int64, contiguous: where the emitted runs' starts, accepted, drafted
            and admitted counts, and ids go, one behind the other.
        confidence_to: [B, K] float32, contiguous, with `confidence`.
    """
    num_reqs, num_ids = len(num_drafted), len(verdict.token_ids)
    confidence = None if confidence is None else confidence.contiguous()
    num_floats = 0 if confidence is None else confidence.numel()
    _gather[(triton.cdiv(max(num_reqs + 1, num_ids, num_floats), LANES),)](
        verdict.emitted_start_loc, verdict.num_accepted, num_drafted, num_admitted,
        verdict.token_ids, confidence, to, confidence_to, num_reqs, num_ids, num_floats,
        LANES=LANES, **early_start(to.device),
    )  # fmt: skip
