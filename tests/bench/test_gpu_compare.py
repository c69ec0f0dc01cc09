"""Engines side by side: children that print cells, and the pairs they make."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

import record
from gpu import compare
from gpu.compare import OURS, Place, medians, order, pairs, table


def command(*lines: object, code: int = 0, then: str = "") -> str:
    """A child that prints these lines."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    source = f"import sys, time\nfor t in {texts!r}: print(t, flush=True)\n{then}\nsys.exit({code})"
    return shlex.join([sys.executable, "-c", source])


def cell(concurrency: int, draft: str, rate: float, logprobs: int = 0) -> dict[str, object]:
    return {"concurrency": concurrency, "draft": draft, "logprobs": logprobs, "tok_s": rate}


def test_a_child_is_read_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = command("loading", {"kind": "startup"}, cell(1, "none", 10.0), "{no json", "[1]")
    ran = compare.run("peer", text, 60)
    assert ran.problem is None
    assert list(ran.cells()) == [(Place(1, 0, "none"), 10.0)]
    assert ran.first_line_seconds is not None
    assert "peer: 1 cells" in capsys.readouterr().out


def test_what_a_failed_child_printed_counts(capsys: pytest.CaptureFixture[str]) -> None:
    ran = compare.run("peer", command(cell(1, "none", 10.0), "out of memory", code=3), 60)
    assert ran.problem == "ended with 3"
    assert list(ran.cells()) == [(Place(1, 0, "none"), 10.0)]
    assert "out of memory" in capsys.readouterr().out


def test_a_child_that_hangs_is_ended() -> None:
    ran = compare.run("peer", command(cell(1, "none", 10.0), then="time.sleep(60)"), 1)
    assert ran.problem == "took longer than 1 s"
    assert len(ran.lines) == 1


def test_ours_stands_between_the_others() -> None:
    names = [name for name, _ in order([("a", ""), ("b", ""), ("c", "")], "", 2)]
    assert names == [OURS, "a", "b", OURS, "c", OURS]


def test_pairs_are_with_the_best_peer() -> None:
    engines = {
        OURS: {Place(1, 0, "none"): 30.0, Place(1, 0, "scheduled"): 90.0, Place(8, 5, "none"): 5.0},
        "a": {Place(1, 0, "none"): 10.0, Place(1, 0, "dspark"): 15.0},
        "b": {Place(1, 0, "none"): 20.0, Place(1, 5, "none"): 1.0},
    }
    plain, drafted, alone = pairs(engines)
    assert plain["alike"] == {"engine": "b", "mode": "plain", "tok_s": 20.0}
    assert plain["over_alike"] == 1.5
    assert plain["over_any"] == 1.5
    assert drafted["alike"] == {"engine": "a", "mode": "draft", "tok_s": 15.0}
    assert drafted["over_alike"] == 6.0
    assert drafted["over_plain"] == drafted["over_any"] == 4.5
    assert "over_any" not in alone
    assert len(table([plain, drafted, alone]).splitlines()) == 4


def test_a_whole_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    ours = command(cell(1, "none", 30.0))
    peer = command(cell(1, "none", 10.0))
    compare.main(["--ours", ours, "--peer", f"x={peer}", "--peer", f"y={command(code=1)}"])
    found = json.loads((tmp_path / "gpu-compare.json").read_text())
    assert [one["engine"] for one in found["runs"]] == [OURS, "x", "y", OURS]
    assert found["pairs"][0]["over_alike"] == 3.0
    assert found["runs"][2]["problem"] == "ended with 1"
    assert "x plain 10" in capsys.readouterr().out


def test_a_later_call_goes_on_with_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for name, rate in (("x", 10.0), ("y", 20.0)):
        ours, peer = command(cell(1, "none", 30.0)), command(cell(1, "none", rate))
        runs = str(tmp_path / "runs.jsonl")
        compare.main(["--ours", ours, "--peer", f"{name}={peer}", "--runs", runs])
    found = json.loads((tmp_path / "gpu-compare.json").read_text())
    assert [one["engine"] for one in found["runs"]] == [OURS, "x", OURS, OURS, "y", OURS]
    assert found["pairs"][0]["alike"]["engine"] == "y"


@pytest.mark.parametrize("peer", ["nothing", "=cmd", "name=", f"{OURS}=cmd"])
def test_a_peer_needs_a_name_and_a_command(peer: str) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--ours", "true", "--peer", peer])


def test_medians_over_runs() -> None:
    runs = [compare.Run(OURS, "", lines=[cell(1, "none", rate)]) for rate in (1.0, 9.0, 4.0)]
    assert medians(runs) == {OURS: {Place(1, 0, "none"): 4.0}}
