"""Messages between two processes: whole, in order, and nobody waits for who does not read."""

from __future__ import annotations

import socket
import threading
import time

from emberline.engine import messages
from emberline.engine.channel import Channel
from emberline.engine.messages import DeltaReader, DeltaWriter, merge_deltas
from emberline.engine.output_stream import merge_outputs
from emberline.types import (
    EngineSnapshot,
    FinishReason,
    RequestOutput,
    SpeculationStats,
    StepCounts,
    TokenLogprobs,
)

SNAPSHOT = EngineSnapshot(num_running=2, kv_usage=0.5, accepted_per_pos=(3, 1))


def pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)


def test_messages_come_whole_and_in_order_to_who_reads_late() -> None:
    sender, reader = pair()
    sizes = [0, 1, 3, 4, 5, 2**18, 2**18 - 4, 17, 3 * 2**20, 1, 0]
    sent = [bytes([i]) * size for i, size in enumerate(sizes)]
    began = time.monotonic()
    for message in sent:
        sender.post(message)  # more than a socket holds
    assert time.monotonic() - began < 1
    closing = threading.Thread(target=sender.close)
    closing.start()
    got = [message for batch in reader.batches() for message in batch]
    closing.join()
    assert got == sent
    sender.release()
    reader.release()


def test_those_that_have_come_together_are_handed_out_together() -> None:
    sender, reader = pair()
    for i in range(50):
        sender.post(bytes([i]))
    assert next(reader.batches()) == [bytes([i]) for i in range(50)]
    sender.release()
    reader.release()


def test_the_end_of_the_other_side_is_the_end() -> None:
    sender, reader = pair()
    sender.post(b"last")
    sender.release()
    assert list(reader.batches()) == [[b"last"]]
    for _ in range(3):
        reader.post(b"x" * 2**20)  # nobody is there: neither an error nor a wait
    reader.release()


def test_what_nobody_takes_is_given_up_at_the_end() -> None:
    sender, reader = pair()
    sender.post(b"x" * 2**23)
    began = time.monotonic()
    sender.close(0.1)
    assert time.monotonic() - began < 2
    sender.release()
    reader.release()


def outputs() -> list[RequestOutput]:
    """Of one request, step by step, with every field in use."""
    steps: dict[StepCounts, int] = {}
    made = []
    for step, kind in enumerate(
        [None, (7, 2, 2, 3, False), (7, 2, 2, 3, False), (7, 1, 0, 1, True)]
    ):
        if kind is not None:
            steps[kind] = steps.get(kind, 0) + 1
        twin = TokenLogprobs(step, float("-inf"), 2)
        record = TokenLogprobs(step, -0.1 * step, 1, (1, 2), (-0.1, -3.0), (-7.0,), twin)
        made.append(
            RequestOutput(
                "r",
                (step, 49151),
                (record, record),
                f"né {step}",
                (None, record) if step == 0 else None,
                num_prompt_tokens=70_000,
                num_cached_tokens=64,
                num_output_tokens=2 * step + 2,
                queue_seconds=0.25,
                stats=SpeculationStats(dict(steps)),
            )
        )
    made.append(
        RequestOutput(
            "r", (), (), "", None, FinishReason.STOP, "né", "why",
            stats=SpeculationStats(dict(steps)),
        )
    )  # fmt: skip
    return made


def test_outputs_are_the_same_on_the_other_side() -> None:
    writer, reader = DeltaWriter(3), DeltaReader("r")
    for output in outputs():
        told = messages.from_engine.decode(
            messages.encode(messages.Step([writer.write(output)], SNAPSHOT))
        )
        assert isinstance(told, messages.Step)
        [delta] = told.deltas
        assert delta.number == 3
        read = reader.read(delta)
        assert read == output
        assert (read.queue_seconds, read.stats.num_steps) == (
            output.queue_seconds,
            output.stats.num_steps,
        )


def test_merged_on_the_way_or_afterwards_is_the_same() -> None:
    writer = DeltaWriter(3)
    deltas = [writer.write(output) for output in outputs()]
    for cut in range(1, len(deltas)):
        reader = DeltaReader("r")
        first, second = merge_deltas(deltas[:cut]), merge_deltas(deltas[cut:])
        assert reader.read(first) == merge_outputs(outputs()[:cut])
        assert reader.read(second) == merge_outputs(outputs()[cut:])


def test_an_early_output_keeps_its_own_counts() -> None:
    """What it was made from goes on growing."""
    writer, reader = DeltaWriter(3), DeltaReader("r")
    read = [reader.read(writer.write(output)) for output in outputs()]
    assert [one.stats.num_steps for one in read] == [0, 1, 2, 3, 3]
    assert [dict(one.stats.steps) for one in read] == [dict(o.stats.steps) for o in outputs()]
