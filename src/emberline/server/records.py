"""The JSON shapes of answers: log-probability records, usage, how a request was speculated.

Owns the shapes of OpenAI's two endpoints and the extensions. Every number is finite. Must not know
the engine, tokenising or streaming.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from emberline.engine.detokenizer import TokenText
from emberline.engine.logprob_run import LogprobRun
from emberline.types import (
    LOGPROB_FLOOR,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
    TokenAnnotation,
    TokenLogprobs,
)

Json = dict[str, Any]


def finite(logprob: float) -> float:
    """The value as JSON carries it: minus infinity becomes the documented floor.

    Raises:
        ValueError: it is NaN or infinite: no number may stand for what the target did not say.
    """
    if LOGPROB_FLOOR <= logprob < math.inf:
        return logprob
    if logprob < LOGPROB_FLOOR:
        return LOGPROB_FLOOR
    raise ValueError(f"a log-probability is {logprob}")


class TextOffsets:
    """Where each token's text begins, in characters; a part of a character points at it."""

    def __init__(self, start: int = 0) -> None:
        self._length = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, piece: bytes) -> int:
        """The offset of the next token, which adds `piece`."""
        unfinished = self._decoder.getstate()[0]
        offset = self._length
        if unfinished and piece and not _goes_on(unfinished + piece[:1]):
            offset += 1  # what was unfinished becomes U+FFFD, and this token begins behind it
        self._length += len(self._decoder.decode(piece))
        return offset


def _goes_on(part: bytes) -> bool:
    """Whether bytes are a character or the beginning of one."""
    try:
        part.decode("utf-8")
    except UnicodeDecodeError as problem:
        return problem.start == 0 and problem.reason == "unexpected end of data"
    return True


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """How the records of one request are written."""

    text: TokenText
    params: SamplingParams
    as_ids: bool = False  # "token_id:N" instead of text
    with_ids: bool = False  # an extra key `token_id`

    def name(self, token_id: int) -> str:
        """The token's string."""
        return f"token_id:{token_id}" if self.as_ids else self.text.token_str(token_id)

    def chat_entries(self, records: Iterable[TokenLogprobs]) -> list[Json]:
        """`logprobs.content` of chat: one entry a record, each alternative its own token."""
        if isinstance(records, LogprobRun):
            return self._entries_of_tables(records)
        records = list(records)
        ids = [record.token_id for record in records]
        entries = self._chat_tokens(ids, [record.logprob for record in records])
        for entry, record in zip(entries, records, strict=True):
            entry |= self._alternatives(record)
            if record.processed is not None:
                logprob = {"logprob": finite(record.processed.logprob)}
                entry["processed"] = logprob | self._alternatives(record.processed)
            if record.annotation is not None:
                entry["annotation"] = annotation_json(self.name, record.annotation)
        return entries

    def _entries_of_tables(self, run: LogprobRun) -> list[Json]:
        """The same without a record in between: all alternatives at once."""
        ids, tops, width = run.ints[:, 0], run.ints[:, 2:].ravel(), run.width
        entries = self._chat_tokens(ids.tolist(), run.floats[:, 0].tolist())
        others = self._chat_tokens(tops.tolist(), run.floats[:, 1:].ravel().tolist())
        for i, entry in enumerate(entries):
            entry["top_logprobs"] = others[i * width : (i + 1) * width]
        return entries

    def completion_arrays(
        self,
        token_ids: Sequence[int],
        records: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
    ) -> Json:
        """The four parallel arrays of completions; a None record has no value (first token)."""
        records = tuple(records)
        arrays: Json = {
            "tokens": self._names(token_ids),
            "token_logprobs": [None if r is None else finite(r.logprob) for r in records],
            "top_logprobs": [None if r is None else self._top_dict(r) for r in records],
            "text_offset": list(offsets),
        }
        if self.with_ids:
            arrays["token_ids"] = list(token_ids)
        if self.params.logprob_token_ids:
            arrays["token_id_logprobs"] = self._chosen_array(records)
        if self.params.logprobs_mode == "both":
            twins = [None if r is None else r.processed for r in records]
            arrays["processed_token_logprobs"] = [t and finite(t.logprob) for t in twins]
            arrays["processed_top_logprobs"] = [t and self._top_dict(t) for t in twins]
            if self.params.logprob_token_ids:
                arrays["processed_token_id_logprobs"] = self._chosen_array(twins)
        if self.params.annotations:
            notes = [None if r is None else r.annotation for r in records]
            arrays["annotations"] = [note and annotation_json(self.name, note) for note in notes]
        return arrays

    def prompt_entries(
        self, records: Sequence[TokenLogprobs | None] | None
    ) -> list[Json | None] | None:
        """vLLM's `prompt_logprobs`: per position null or id -> {logprob, rank, decoded_token}.

        None where the request ended before its prompt had been scored.
        """
        if records is None:
            return None
        return [None if record is None else self._ranked(record) for record in records]

    def _ranked(self, record: TokenLogprobs) -> Json:
        ranked = {
            token_id: (rank, logprob)
            for rank, (token_id, logprob) in enumerate(
                zip(record.top_ids, record.top_logprobs, strict=True), 1
            )
        }
        ranked[record.token_id] = (record.rank, record.logprob)
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": self.text.token_str(token_id),
            }
            for token_id, (rank, logprob) in ranked.items()
        }

    def _chat_tokens(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[Json]:
        """An entry a token. Six a token of an answer are common: all at once, without calls."""
        written = self.text.written(skip_special=self.params.skip_special_tokens)
        entries: list[Json] = [
            {
                "token": (found := written[token_id])[0],
                "logprob": logprob if LOGPROB_FLOOR <= logprob <= 0.0 else finite(logprob),
                "bytes": found[1],
            }
            for token_id, logprob in zip(ids, logprobs, strict=True)
        ]
        hidden = () if self.params.include_stop_str_in_output else self.params.stop_token_ids
        if hidden or self.as_ids or self.with_ids:
            for entry, token_id in zip(entries, ids, strict=True):
                if token_id in hidden:
                    entry["bytes"] = []
                if self.as_ids:
                    entry["token"] = self.name(token_id)
                if self.with_ids:
                    entry["token_id"] = token_id
        return entries

    def _top_dict(self, record: TokenLogprobs) -> dict[str, float]:
        """By name, the token's own among them. Of tokens that share one, the likeliest counts."""
        names = self._names([*record.top_ids, record.token_id])
        top: dict[str, float] = {}
        for name, logprob in zip(names, (*record.top_logprobs, record.logprob), strict=True):
            value = logprob if LOGPROB_FLOOR <= logprob <= 0.0 else finite(logprob)
            if value > top.get(name, -math.inf):
                top[name] = value
        return top

    def _names(self, ids: Sequence[int]) -> list[str]:
        """Strings of several tokens."""
        if self.as_ids:
            return [self.name(token_id) for token_id in ids]
        written = self.text.written(skip_special=self.params.skip_special_tokens)
        return [written[token_id][0] for token_id in ids]

    def _alternatives(self, record: TokenLogprobs) -> Json:
        """What chat says of a distribution besides the token's own value."""
        said: Json = {"top_logprobs": self._chat_tokens(record.top_ids, record.top_logprobs)}
        if record.chosen_logprobs:
            said["token_id_logprobs"] = self._chosen(record)
        return said

    def _chosen_array(
        self, records: Sequence[TokenLogprobs | None]
    ) -> list[dict[str, float] | None]:
        return [self._chosen(r) if r is not None and r.chosen_logprobs else None for r in records]

    def _chosen(self, record: TokenLogprobs) -> dict[str, float]:
        ids = self.params.logprob_token_ids
        return {
            str(token_id): finite(logprob)
            for token_id, logprob in zip(ids, record.chosen_logprobs, strict=True)
        }


def annotation_json(name: Callable[[int], str | None], note: TokenAnnotation) -> Json:
    """How a token came about; `name` says what a draft is called."""
    draft = note.draft_id
    return {
        "step": note.step,
        "origin": note.origin,
        "draft_token_id": draft,
        "draft_token": None if draft is None else name(draft),
        "confidence": note.confidence,
    }


class Ledger:
    """The latest output of every choice of a call: what usage and statistics are made of."""

    def __init__(self, num_choices: int, per_prompt: int) -> None:
        self._latest = [RequestOutput("")] * num_choices
        self._num_reasoning = [0] * num_choices
        self._per_prompt = per_prompt

    def note(self, index: int, output: RequestOutput, num_reasoning: int = 0) -> None:
        """Remember what choice `index` has come to, and how many of its tokens are reasoning."""
        self._latest[index] = output
        self._num_reasoning[index] = num_reasoning

    def latest(self, index: int) -> RequestOutput:
        """The latest output of choice `index`."""
        return self._latest[index]

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(output.finished for output in self._latest)

    def usage(self) -> Json:
        """Token counts; a prompt counts once however many choices continue it.

        Of a prompt that is counted once, cached is what no choice had to compute: later choices
        find what the first of them computed, which was computed all the same.
        """
        num_output = sum(output.num_output_tokens for output in self._latest)
        num_prompt, num_cached = 0, 0
        for start in range(0, len(self._latest), self._per_prompt):
            choices = self._latest[start : start + self._per_prompt]
            begun = [output for output in choices if output.num_prompt_tokens]
            num_prompt += max((output.num_prompt_tokens for output in begun), default=0)
            num_cached += min((output.num_cached_tokens for output in begun), default=0)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": self._output_details(),
        }

    def _output_details(self) -> dict[str, int]:
        stats = [output.stats for output in self._latest]
        verified = sum(one.num_predicted for one in stats)
        accepted = sum(one.num_predicted_accepted for one in stats)
        return {
            "reasoning_tokens": sum(self._num_reasoning),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": verified - accepted,
        }

    def extension(self) -> Json:
        """The `emberline` object: how the call was speculated, and each choice if several."""
        return speculation([output.stats for output in self._latest])


def speculation(stats: Sequence[SpeculationStats]) -> Json:
    """Counts of all choices together, and of each if there are several."""
    total: Json = {"speculation": stats_json(sum(stats, SpeculationStats()))}
    if len(stats) > 1:
        total["choices"] = [
            {"index": i, "speculation": stats_json(one)} for i, one in enumerate(stats)
        ]
    return total


def stats_json(stats: SpeculationStats) -> Json:
    """The counts of one request or of several together."""
    return {
        "steps": stats.num_steps,
        "drafted": stats.num_drafted,
        "verified": stats.num_verified,
        "accepted": stats.num_accepted,
        "emitted": stats.num_emitted,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "verified_per_position": list(stats.verified_per_pos),
        "accepted_per_position": list(stats.accepted_per_pos),
        "accepted_histogram": list(stats.accepted_histogram),
    }
