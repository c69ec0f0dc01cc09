"""Which drafts stand, and the token after them. The one file where p and q are compared.

Owns the accept rules and their numerics. Must not know how logits were processed, how drafts were
made, or what a request is.

p is the target's distribution after every sampling option, q what the draft was really drawn from.

    greedy     accept while the draft is p's most likely token; then emit that token
    coupled    draw the target's own token at each position with the position's noise; accept while
               the draft equals it. Every emitted token is the target's own draw.
    rejection  accept draft x with probability min(1, p(x) / q(x)); at the first rejection draw from
               max(p - q, 0), normalised; if all stand, draw one more from p. Leviathan, Kalman and
               Matias 2023, theorem in appendix A.1; Chen et al. 2023, theorem 1.

Nothing here depends on the batch: every quantity of a row is computed from that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.batch import DrawKeys, Draws, Purpose, Verdict
from emberline.layout import Scored, TokenLayout, Tokens, start_loc
from emberline.sampling.keys import first_argmax


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of a step, padded to a rectangle of W columns. Entry W - 1 has no draft after."""

    lens: Tensor  # [B] int64
    rows: Tensor  # [B, W] int64, scored space; padding repeats a valid row
    valid: Tensor  # [B, W] bool
    positions: Tensor  # [B, W] int64, sequence position of the token drawn at this entry
    draft_ids: Tensor  # [B, W] int64, the draft judged at this entry
    has_draft: Tensor  # [B, W] bool


def accept(
    layout: TokenLayout,
    token_ids: Tokens,
    processed: Scored,
    draft_logits: Tensor | None,
    *,
    greedy: Tensor,
    coupled: Tensor,
    seeds: Tensor,
    first_positions: Tensor,
    draws: Draws,
) -> Verdict:
    """Judge the drafts of every request and draw the token after the accepted ones.

    A request with a window of 0 emits nothing; with a window of 1 (plain decode, a prompt's last
    chunk) one token drawn from p, or the argmax.

    Args:
        layout: the step's map; entry i of a window is the distribution of the token after it.
        token_ids: [T] int64; a window is an anchor and its drafts.
        processed: [Q, V] logits of p.
        draft_logits: [B, K, V] logits of q, entry k of draft k; None: each draft is a point mass.
            Not read for greedy and coupled requests.
        greedy: [B] bool.
        coupled: [B] bool; ignored where greedy.
        seeds: [B] int64.
        first_positions: [B] int64, sequence position of the token drawn at entry 0.
        draws: the source of randomness; not asked when every request is greedy.
    """
    width = int(layout.window_lens.max()) if layout.num_reqs else 0
    if width == 0:
        nothing = torch.zeros_like(layout.window_lens)
        return Verdict(nothing, nothing[:0], nothing[:0], start_loc(nothing))
    windows = _windows(layout, token_ids, first_positions, width)
    by_choice = greedy | coupled
    stands = torch.zeros_like(windows.valid)
    final = torch.zeros_like(windows.lens)
    choices = None
    if bool(by_choice.any()):
        choices = _target_choices(windows, processed, greedy, coupled, seeds, draws)
        stands = windows.has_draft & by_choice[:, None] & (choices == windows.draft_ids)
    by_coin = ~by_choice & (windows.lens > 0)
    drafted = windows.has_draft & by_coin[:, None]
    if bool(drafted.any()):
        stands |= _coins(windows, drafted, processed, draft_logits, seeds, draws)
    num_accepted = stands.long().cumprod(-1).sum(-1)
    if choices is not None:
        final = choices.gather(-1, num_accepted[:, None]).squeeze(-1)
    if bool(by_coin.any()):
        reqs = by_coin.nonzero().squeeze(-1)
        final[reqs] = _recovered_or_bonus(
            windows, reqs, num_accepted[reqs], processed, draft_logits, seeds, draws
        )
    return _verdict(windows, num_accepted, final)


def _windows(
    layout: TokenLayout, token_ids: Tokens, first_positions: Tensor, width: int
) -> _Windows:
    entry = torch.arange(width, device=layout.window_lens.device)
    lens = layout.window_lens[:, None]
    last_row = layout.num_scored - 1
    rows = (layout.window_start[:, None] + torch.minimum(entry, (lens - 1).clamp_min(0))).clamp(
        max=last_row
    )
    has_draft = entry + 1 < lens
    ids = layout.score(token_ids)
    return _Windows(
        lens=layout.window_lens,
        rows=rows,
        valid=entry < lens,
        positions=first_positions[:, None] + entry,
        draft_ids=ids[torch.where(has_draft, rows + 1, rows)],
        has_draft=has_draft,
    )


def _target_choices(
    windows: _Windows,
    processed: Scored,
    greedy: Tensor,
    coupled: Tensor,
    seeds: Tensor,
    draws: Draws,
) -> Tensor:
    """[B, W] the target's own token at the entries of greedy and coupled requests, else 0.

    A coupled request is drawn for up to the first draft that misses; entries after it hold 0, and
    no length reads them: the run of standing drafts has ended before.
    """
    choices = torch.zeros_like(windows.rows)
    best = windows.valid & greedy[:, None]
    if bool(best.any()):
        choices[best] = first_argmax(_take(processed, windows.rows[best]))
    # Entry by entry: noise over the vocabulary is the dear part, and nobody asks for the target's
    # draw after the first draft that missed it.
    alive = coupled & ~greedy
    for entry in range(windows.rows.shape[1]):
        req = (alive & windows.valid[:, entry]).nonzero().squeeze(-1)
        if not len(req):
            break
        keys = _keys(windows, seeds, req, torch.full_like(req, entry), Purpose.TARGET)
        choices[req, entry] = draws.categorical(processed[windows.rows[req, entry]], keys)
        alive = alive & (choices[:, entry] == windows.draft_ids[:, entry])
    return choices


def _coins(
    windows: _Windows,
    drafted: Tensor,
    processed: Scored,
    draft_logits: Tensor | None,
    seeds: Tensor,
    draws: Draws,
) -> Tensor:
    """[B, W] bool: whether the coins of the drafts in `drafted` [B, W] say accept.

    A request's coins are tossed up to the first that says no: whatever the later ones were, no
    length reads them, and two distributions over the vocabulary are dear.
    """
    stands = torch.zeros_like(drafted)
    alive = drafted.any(-1)
    for entry in range(drafted.shape[1]):
        req = (alive & drafted[:, entry]).nonzero().squeeze(-1)
        if not len(req):
            break
        ids = windows.draft_ids[req, entry]
        ratio = p_x = _probs_of(processed, windows.rows[req, entry], ids)
        if draft_logits is not None:
            q_x = _probs_of(draft_logits[:, entry], req, ids).to(p_x.dtype)
            # q(x) is 0 only if it underflowed: x was drawn, so p(x) >= q(x) unless p(x) did too.
            ratio = torch.where(q_x > 0, p_x / q_x, (p_x > 0).to(p_x.dtype))
        keys = _keys(windows, seeds, req, torch.full_like(req, entry), Purpose.ACCEPT)
        stands[req, entry] = draws.coin(ratio.clamp_max(1), keys)
        alive = alive & stands[:, entry]
    return stands


def _probs_of(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """Probability of one id a row under softmax(logits[rows]). [Q, V], [N], [N] -> [N]."""
    if logits.device.type != "cpu":
        return _probs(logits[rows]).gather(-1, ids[:, None]).squeeze(-1)
    # One row at a time stays in the core's cache, and copies none: half the time.
    pairs = zip(rows.tolist(), ids.tolist(), strict=True)
    return torch.stack([_probs(logits[row])[token_id] for row, token_id in pairs])


def _recovered_or_bonus(
    windows: _Windows,
    reqs: Tensor,
    num_accepted: Tensor,
    processed: Scored,
    draft_logits: Tensor | None,
    seeds: Tensor,
    draws: Draws,
) -> Tensor:
    """[M] the last token of requests `reqs` [M]: recovered after a rejection, else the bonus."""
    rows = windows.rows[reqs, num_accepted]
    rejected = windows.has_draft[reqs, num_accepted]
    positions = windows.positions[reqs, num_accepted]
    final = torch.empty_like(reqs)
    if bool(rejected.any()):
        at, entry = reqs[rejected], num_accepted[rejected]
        p = _probs(processed[rows[rejected]])
        if draft_logits is None:
            residual = p.scatter(-1, windows.draft_ids[at, entry, None], 0.0)
        else:
            residual = (p - _probs(draft_logits[at, entry]).to(p.dtype)).clamp_min_(0)
        # Where p and q agree to the last bit a rejection is a rounding accident: p is the answer.
        gone = residual.amax(-1) <= 0
        if bool(gone.any()):
            residual[gone] = p[gone]
        purpose = torch.full_like(at, int(Purpose.RECOVER))
        keys = DrawKeys(seeds[at], positions[rejected], purpose)
        final[rejected] = draws.proportional(residual, keys)
    stood = ~rejected
    if bool(stood.any()):
        purpose = torch.full_like(reqs[stood], int(Purpose.BONUS))
        keys = DrawKeys(seeds[reqs[stood]], positions[stood], purpose)
        final[stood] = draws.categorical(_take(processed, rows[stood]), keys)
    return final


def _verdict(windows: _Windows, num_accepted: Tensor, final: Tensor) -> Verdict:
    entry = torch.arange(windows.rows.shape[1], device=final.device)
    count = num_accepted + (windows.lens > 0)
    ids = torch.where(entry < num_accepted[:, None], windows.draft_ids, final[:, None])
    emitted = entry < count[:, None]
    return Verdict(
        num_accepted=num_accepted,
        token_ids=ids[emitted],
        scored_index=windows.rows[emitted],
        emitted_start_loc=start_loc(count),
    )


def _keys(
    windows: _Windows, seeds: Tensor, req: Tensor, entry: Tensor, purpose: Purpose
) -> DrawKeys:
    return DrawKeys(seeds[req], windows.positions[req, entry], torch.full_like(req, int(purpose)))


def _probs(logits: Tensor) -> Tensor:
    """Softmax in float32, or in float64 if the logits are. Row by row: torch never splits a row."""
    return logits.softmax(-1, dtype=None if logits.dtype == torch.float64 else torch.float32)


def _take(logits: Scored, rows: Tensor) -> Tensor:
    """logits[rows], without a copy where `rows` is every row in order (a step without padding)."""
    if len(rows) == len(logits):
        return logits  # windows never overlap and never reorder: as many rows means the same rows
    return logits[rows]
