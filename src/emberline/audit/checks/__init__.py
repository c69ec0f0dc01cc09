"""The checks, in the order in which they run, and what each proves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from emberline.audit.checks import (
    agreement,
    alternatives,
    counts,
    distribution,
    options,
    rescoring,
    shapes,
    temperatures,
)
from emberline.audit.outcome import Outcome
from emberline.audit.session import Session


@dataclass(frozen=True, slots=True)
class Check:
    """A named check."""

    name: str
    proves: str
    run: Callable[[Session], Awaitable[Outcome]]


CHECKS = (
    Check("shapes", "answers have the typed shape, finite values, at most 0", shapes.answers),
    Check("chat_shapes", "the same for chat, alternatives in order", shapes.chat),
    Check("counts", "one record a token, wherever an answer ends", counts.counts),
    Check(
        "top_entry", "greedy: the token is the first alternative, the same float", alternatives.top
    ),
    Check("rescoring", "a token's value is the server's own prefill's", rescoring.alone),
    Check("rescoring_concurrent", "the same beside other requests", rescoring.concurrent),
    Check("reference", "and that of plain transformers", rescoring.reference),
    Check("streaming", "a stream, joined, is the whole answer", agreement.streaming),
    Check("batch", "other requests change nothing", agreement.batch),
    Check("seeds", "a seed decides the draws, wherever they are made", agreement.seeds),
    Check("cached_prefix", "a cached prompt gives the same records", agreement.cached_prefix),
    Check("token_ids", "values of chosen ids, ragged, side by side", alternatives.token_ids),
    Check("temperature", "each request's own temperature, or none", temperatures.plain),
    Check("processed", "processed values are those of the options", temperatures.processed),
    Check("raw_invariance", "sampling options leave raw values alone", options.raw_invariance),
    Check("logit_bias", "biased tokens are forced and banned", options.logit_bias),
    Check("penalties", "penalties count inside a block", options.penalties),
    Check("speculation_off", "greedy tokens are those without drafts", agreement.speculation_off),
    Check("compare", "greedy tokens are those of the other server", agreement.compare_servers),
    Check("distribution", "what is drawn follows the model's law", distribution.distribution),
)
