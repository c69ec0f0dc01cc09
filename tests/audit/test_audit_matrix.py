"""The matrix covers every combination, and its table says what the figures say."""

from __future__ import annotations

import argparse
import asyncio

import audit_matrix
import readme_tables
from emberline.audit.checks import CHECKS
from emberline.audit.run import audit, chosen
from emberline.audit.settings import AuditSettings

import record
from support.scripted_lm import ScriptedLM, scripted_server


def test_every_combination_once():
    names = [one.name for one in audit_matrix.combinations()]
    assert len(set(names)) == len(names) == 2 * 3 * 2 + 2 * 2
    plain = [one for one in audit_matrix.combinations() if one.draft == "off"]
    assert all("--draft" in one.options and "--planner" not in one.options for one in plain)
    assert set(audit_matrix.RAW_ONLY) < {check.name for check in CHECKS}


def test_figures_become_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    modes = {}
    for mode, faults in (("raw", set()), ("processed", {"no bias"})):
        with scripted_server(ScriptedLM(faults=faults)) as server:
            settings = AuditSettings(url=server.url, num_tokens=8, num_prompts=2)
            checks = chosen(["rescoring", "logit_bias"], [])
            told = type("Quiet", (), {"begins": lambda *_: None, "ends": lambda *_: None})()
            result = asyncio.run(audit(settings, told, checks=checks))
            modes[mode] = audit_matrix.figures_of(result)
    assert modes["raw"]["passed"]
    assert not modes["processed"]["passed"]
    modes["raw"]["reference"] = {"tokens": 8, "max": 2.5e-6, "mean": 1e-6}
    parts = dict(zip(audit_matrix.PARTS, audit_matrix.ORDER[0], strict=True))
    rows = [{**parts, "bitwise": True, "modes": modes}]
    table = readme_tables.audit_matrix({"combinations": rows})
    checks = "2 pass | 1 pass, **logit_bias fails**"
    expected = f"| on | static | verify_all | float32 | {checks} | 0 | 2.5e-06 |"
    assert table.splitlines()[-1] == expected
    record.write("some", {"size": audit_matrix.QUICK, "combinations": rows})
    args = argparse.Namespace(out="some", quick=True)
    assert audit_matrix.kept_rows(args) == rows
    assert audit_matrix.kept_rows(argparse.Namespace(out="some", quick=False)) == []
