"""What a sequence of `POST /generate` has come to, and the JSON that says it.

Owns the answer's shape. Every answer and every event of a stream says everything so far, so that
entries are turned into JSON once and kept. Must not know the engine, tokenising or connections.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from emberline.engine.detokenizer import TokenText
from emberline.server.native_body import Asked
from emberline.server.records import Json, annotation_json, finite, stats_json
from emberline.server.stream import dump_json
from emberline.types import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)

WEIGHT_VERSION = "default"

Entry = list[object]  # log-probability or null, token id, text or null


class JsonArray:
    """A JSON array that only grows."""

    def __init__(self) -> None:
        self._items = bytearray()

    def add(self, items: Iterable[object]) -> None:
        """Append items, each encoded by itself: the encoder lets no other thread run meanwhile."""
        for item in items:
            if self._items:
                self._items += b","
            self._items += dump_json(item)

    @property
    def num_bytes(self) -> int:
        """Its length so far."""
        return len(self._items)

    def json(self) -> bytes:
        """The array."""
        return b"[%b]" % bytes(self._items)


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """One sequence of a call: what was asked, and what it is called."""

    rid: str
    index: int | None  # its place in the call; None: the call has no other
    prompt: tuple[int, ...]
    asked: Asked
    params: SamplingParams
    with_text: bool  # tokens' texts beside their ids


class NativeAnswer:
    """The answer of one sequence.

    Args:
        sequence: what is answered.
        text: of the model's tokens.
    """

    def __init__(self, sequence: NativeRequest, text: TokenText) -> None:
        self._of, self._tokens = sequence, text
        self._began = time.monotonic()
        self._text = ""
        self._latest = RequestOutput("")
        self._ids = JsonArray()
        self._last_id: int | None = None
        self._arrays = {name: JsonArray() for name in self._array_names()}
        self._prompt_said = False

    @property
    def num_bytes(self) -> int:
        """About the length of what `json` writes."""
        return len(self._text) + sum(array.num_bytes for array in self._arrays.values())

    def add(self, output: RequestOutput) -> None:
        """Take in what an output adds."""
        self._latest = output
        self._text += output.text
        self._ids.add(output.token_ids)
        self._last_id = output.token_ids[-1] if output.token_ids else self._last_id
        if self._of.asked.logprobs:
            if not self._prompt_said:
                self._add_prompt(output)
            records = tuple(output.logprobs or ())
            self._add("output", records)
            if self._of.params.logprobs_mode == "both":
                twins = [r.processed for r in records if r.processed is not None]
                self._add("processed_output", twins)
            if self._of.params.annotations:
                notes = [r.annotation for r in records if r.annotation is not None]
                self._arrays["output_annotations"].add(
                    annotation_json(self._name, note) for note in notes
                )
        if output.finished:
            self._trim(output)

    def json(self) -> bytes:
        """Everything so far, as one object."""
        meta = {name: dump_json(value) for name, value in self._meta().items()}
        meta |= {name: array.json() for name, array in self._arrays.items()}
        fields = {"text": dump_json(self._text), "output_ids": self._ids.json()}
        if self._of.index is not None:
            fields["index"] = dump_json(self._of.index)
        return _object(fields | {"meta_info": _object(meta)})

    def _array_names(self) -> list[str]:
        asked, params = self._of.asked, self._of.params
        if not asked.logprobs:
            return []
        sides = ["input", "output"]
        sides += ["processed_output"] if params.logprobs_mode == "both" else []
        kinds = ["token"]
        kinds += ["top"] if asked.num_top else []
        kinds += ["token_ids"] if asked.chosen is not None else []
        names = [f"{side}_{kind}_logprobs" for side in sides for kind in kinds]
        return names + (["output_annotations"] if params.annotations else [])

    def _add_prompt(self, output: RequestOutput) -> None:
        """The prompt's entries, from the first reported position on."""
        self._prompt_said = True
        start = self._of.asked.start
        if start < 0:
            return
        # Without values where the time was over before the prompt had been scored.
        records = output.prompt_logprobs or (None,) * len(self._of.prompt)
        self._add("input", records[start:], self._of.prompt[start:])

    def _add(
        self, side: str, records: Sequence[TokenLogprobs | None], ids: Sequence[int] = ()
    ) -> None:
        """Append records to a side's arrays; `ids` are the tokens', where some have no record."""
        asked, arrays = self._of.asked, self._arrays
        names = ids or [record.token_id for record in records if record is not None]
        arrays[f"{side}_token_logprobs"].add(
            self._entry(None if r is None else r.logprob, token_id)
            for r, token_id in zip(records, names, strict=True)
        )
        if asked.num_top:
            arrays[f"{side}_top_logprobs"].add(
                None if r is None else self._entries(r.top_logprobs, r.top_ids) for r in records
            )
        if asked.chosen is not None:
            arrays[f"{side}_token_ids_logprobs"].add(
                None if r is None else self._entries(r.chosen_logprobs, asked.chosen)
                for r in records
            )

    def _entry(self, logprob: float | None, token_id: int) -> Entry:
        value = None if logprob is None else finite(logprob)
        return [value, token_id, self._name(token_id)]

    def _entries(self, logprobs: Sequence[float], ids: Sequence[int]) -> list[Entry]:
        return [self._entry(*pair) for pair in zip(logprobs, ids, strict=True)]

    def _name(self, token_id: int) -> str | None:
        return self._tokens.token_str(token_id) if self._of.with_text else None

    def _trim(self, output: RequestOutput) -> None:
        """Cut off the text of the EOS that ended the answer, unless it is wanted."""
        params = self._of.params
        if output.finish_reason is not FinishReason.STOP or output.stop_reason is not None:
            return
        if self._last_id is None or params.include_stop_str_in_output:
            return
        shown = self._tokens.visible_bytes(self._last_id, params)
        self._text = self._text.removesuffix(shown.decode("utf-8", "replace"))

    def _meta(self) -> Json:
        latest = self._latest
        meta: Json = {
            "id": self._of.rid,
            "finish_reason": self._finish_reason(),
            "prompt_tokens": latest.num_prompt_tokens or len(self._of.prompt),
            "completion_tokens": latest.num_output_tokens,
            "cached_tokens": latest.num_cached_tokens,
            "reasoning_tokens": 0,
            "weight_version": WEIGHT_VERSION,
            "num_retractions": 0,
        }
        if latest.stats.num_steps:
            meta |= spec_fields(latest.stats, latest.num_output_tokens)
        if latest.finished:
            meta["e2e_latency"] = time.monotonic() - self._began
            meta["emberline"] = {"speculation": stats_json(latest.stats)}
        return meta

    def _finish_reason(self) -> Json | None:
        latest = self._latest
        match latest.finish_reason:
            case None:
                return None
            case FinishReason.STOP:
                # The engine names no id where it was EOS.
                known = latest.stop_reason is not None
                return {"type": "stop", "matched": latest.stop_reason if known else self._last_id}
            case FinishReason.LENGTH:
                return {"type": "length", "length": latest.num_output_tokens}
            case _:
                return {"type": "abort", "message": str(latest.stop_reason or "aborted")}


def spec_fields(stats: SpeculationStats, num_output: int) -> Json:
    """How a request was speculated, as that API names and defines it; with the older names.

    The acceptance length counts the prompt's own first token.
    """
    rate = stats.num_accepted / stats.num_drafted if stats.num_drafted else 0.0
    histogram = list(stats.accepted_histogram)
    return {
        "spec_verify_ct": stats.num_steps,
        "spec_accept_length": num_output / stats.num_steps,
        "spec_accept_rate": rate,
        "spec_num_correct_drafts": stats.num_accepted,
        "spec_num_proposed_drafts": stats.num_drafted,
        "spec_correct_drafts_histogram": histogram,
        "spec_cap_length": (stats.num_verified + stats.num_steps) / stats.num_steps,
        "spec_accepted_drafts": stats.num_accepted,
        "spec_proposed_drafts": stats.num_drafted,
        "spec_accept_histogram": histogram,
    }


def _object(fields: Mapping[str, bytes]) -> bytes:
    """A JSON object of values that are JSON already."""
    return b"{%b}" % b",".join(dump_json(name) + b":" + value for name, value in fields.items())
