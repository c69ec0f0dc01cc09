"""How an answer was speculated, as servers tell it: in the answer, or in their /metrics.

Acceptance length is tokens a verify step, the target's own token included. Each source counts in
its own way; the source is kept beside the counts, and docs/bench.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from emberline.bench.events import Json, count_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Counts of verify steps. None: the source does not say."""

    source: str
    steps: int | None = None
    emitted: int | None = None  # tokens that these steps emitted
    verified: int | None = None  # drafts that the target verified
    accepted: int | None = None  # drafts that were accepted

    @property
    def length(self) -> float | None:
        """Tokens a step."""
        return _ratio(self.emitted, self.steps)

    @property
    def rate(self) -> float | None:
        """Accepted drafts over verified ones."""
        return _ratio(self.accepted, self.verified)


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def total(parts: Iterable[Acceptance]) -> Acceptance | None:
    """The sum over answers; None if there are none. Steps weigh alike, whosever they are."""
    parts = list(parts)
    if not parts:
        return None

    def sum_of(name: str) -> int | None:
        values = [getattr(part, name) for part in parts]
        return None if None in values else sum(values)

    return Acceptance(
        source=" + ".join(sorted({part.source for part in parts})),
        steps=sum_of("steps"),
        emitted=sum_of("emitted"),
        verified=sum_of("verified"),
        accepted=sum_of("accepted"),
    )


def from_answer(said: Json) -> Acceptance | None:
    """From the root fields of an answer (events.WHOLE); None if it tells nothing."""
    for form in (_emberline, _vllm, _sglang, _llama_cpp, _usage):
        found = form(said)
        if found is not None:
            return found
    return None


def _object(parent: object, *names: str) -> Json:
    """The object down the path `names`, or an empty one."""
    for name in names:
        parent = parent.get(name) if isinstance(parent, Mapping) else None
    return parent if isinstance(parent, Mapping) else {}


def _emberline(said: Json) -> Acceptance | None:
    counts = _object(said, "emberline", "speculation")
    if count_of(counts, "steps") is None:
        return None
    return Acceptance(
        source="emberline.speculation",
        steps=count_of(counts, "steps"),
        emitted=count_of(counts, "emitted"),
        verified=count_of(counts, "verified"),
        accepted=count_of(counts, "accepted"),
    )


def _vllm(said: Json) -> Acceptance | None:
    counts = _object(said, "metrics", "speculative_decoding")
    steps, accepted = (
        count_of(counts, "num_spec_steps"),
        count_of(counts, "num_accepted_draft_tokens"),
    )
    if steps is None or accepted is None:
        return None
    return Acceptance(
        source="metrics.speculative_decoding",
        steps=steps,
        emitted=steps + accepted,
        verified=count_of(counts, "num_draft_tokens"),
        accepted=accepted,
    )


def _sglang(said: Json) -> Acceptance | None:
    meta = _object(said, "meta_info")
    steps = count_of(meta, "spec_verify_ct")
    if not steps:
        return None
    accepted = count_of(
        meta, "spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"
    )
    # Without a count of drafts SGLang's own definition: completion tokens a verify call, to which
    # the prompt's first token belongs.
    emitted = count_of(meta, "completion_tokens") or count_of(
        _object(said, "usage"), "completion_tokens"
    )
    return Acceptance(
        source="meta_info",
        steps=steps,
        emitted=emitted if accepted is None else steps + accepted,
        verified=count_of(
            meta, "spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"
        ),
        accepted=accepted,
    )


def _llama_cpp(said: Json) -> Acceptance | None:
    timings = _object(said, "timings")
    verified, accepted = count_of(timings, "draft_n"), count_of(timings, "draft_n_accepted")
    if not verified or accepted is None:
        return None
    return _from_tokens("timings", count_of(timings, "predicted_n"), verified, accepted)


def _usage(said: Json) -> Acceptance | None:
    usage = _object(said, "usage")
    details = _object(usage, "completion_tokens_details")
    accepted = count_of(details, "accepted_prediction_tokens")
    rejected = count_of(details, "rejected_prediction_tokens")
    if accepted is None or rejected is None or accepted + rejected == 0:
        return None  # zeros are what servers send that do not fill these fields
    emitted = count_of(usage, "completion_tokens")
    source = "usage.completion_tokens_details"
    return _from_tokens(source, emitted, accepted + rejected, accepted)


def _from_tokens(source: str, emitted: int | None, verified: int, accepted: int) -> Acceptance:
    """Steps from tokens: every pass of the target, the prompt's too, emits one token of its own."""
    steps = emitted - accepted if emitted is not None and emitted >= accepted else None
    return Acceptance(
        source=source,
        steps=steps,
        emitted=emitted if steps is not None else None,
        verified=verified,
        accepted=accepted,
    )


COUNTERS = (
    "emberline:verify_emitted_tokens",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_emitted_tokens",
    "sglang:spec_verify_calls",
    "sglang:generation_tokens",
)


def read_counters(exposition: str) -> dict[str, float]:
    """The counters that tell of speculation, by name without `_total`, summed over their labels.

    Raises:
        ValueError: the text is no Prometheus exposition.
    """
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            if name in COUNTERS:
                values[name] = values.get(name, 0.0) + sample.value
    return values


def between(before: Mapping[str, float], after: Mapping[str, float]) -> Acceptance | None:
    """What the counters say of the time between two readings; None if they say nothing.

    They count everything that the server did, other clients' requests too.
    """
    grown = {name: int(after[name] - before.get(name, 0.0)) for name in COUNTERS if name in after}
    if any(value < 0 for value in grown.values()):
        return None  # the server was started again in between
    accepted = grown.get("vllm:spec_decode_num_accepted_tokens")
    steps = grown.get("vllm:spec_decode_num_drafts")
    emitted = grown.get(
        "emberline:verify_emitted_tokens", grown.get("vllm:spec_decode_num_emitted_tokens")
    )
    if accepted is not None:
        if steps is None and emitted is not None:
            steps = emitted - accepted
        if emitted is None and steps is not None:
            emitted = steps + accepted
    elif "sglang:spec_verify_calls" in grown:
        steps = grown["sglang:spec_verify_calls"]
        emitted = grown.get("sglang:generation_tokens")
    found = Acceptance(
        source="/metrics",
        steps=steps,
        emitted=emitted,
        verified=grown.get("vllm:spec_decode_num_draft_tokens"),
        accepted=accepted,
    )
    return None if found.length is None and found.rate is None else found
