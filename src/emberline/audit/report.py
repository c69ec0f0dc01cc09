"""An audit as a table and as JSON. Knows no check and no server."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from emberline.audit.outcome import Finding, Outcome, Verdict
from emberline.audit.run import Audit, Result

_STYLES = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.SKIPPED: "dim",
    Verdict.NOT_SUPPORTED: "yellow",
}
_SHOWN = 3  # findings of a check that the table shows
_KEPT = 20  # and that JSON keeps


def table(audit: Audit) -> Group:
    """Every check with its verdict, then what was found."""
    rows = Table("check", "verdict", "what was seen", "s")
    for result in audit.results:
        outcome = result.outcome
        note = outcome.note or (outcome.findings[0].message if outcome.findings else "")
        if outcome.faults:
            note = f"probable cause: {', '.join(outcome.faults)}"
        rows.add_row(
            result.check.name,
            Text(outcome.verdict, style=_STYLES[outcome.verdict]),
            Text(note),
            f"{result.seconds:.1f}",
        )
    parts: list[Table | Text] = [rows]
    for result in audit.results:
        parts += [Text(line) for line in finding_lines(result)]
    return Group(*parts, Text(summary(audit)))


def finding_lines(result: Result) -> list[str]:
    """The first findings of a check, in words."""
    findings = result.outcome.findings
    if not findings:
        return []
    lines = [f"\n{result.check.name} should show that {result.check.proves}:"]
    lines += [f"  {_words(finding)}" for finding in findings[:_SHOWN]]
    if len(findings) > _SHOWN:
        lines.append(f"  and {len(findings) - _SHOWN} more (--json keeps {_KEPT})")
    return lines


def _words(finding: Finding) -> str:
    return finding.message + (f" -> {finding.fault}" if finding.fault else "")


def summary(audit: Audit) -> str:
    """The last line."""
    verdicts = [result.outcome.verdict for result in audit.results]
    counts = [f"{verdicts.count(v)} {v}" for v in Verdict if v in verdicts]
    forgiven = f"{audit.noise.most:g} ({audit.noise.why})"
    return f"\n{audit.url}, {audit.features.api}: {', '.join(counts)}; forgiven: {forgiven}"


def as_json(audit: Audit) -> dict[str, Any]:
    """Everything, each number finite."""
    features = audit.features
    return {
        "url": audit.url,
        "passed": audit.passed,
        "api": features.api,
        "model": features.model,
        "tolerance": {"max": audit.noise.most, "mean": audit.noise.mean, "why": audit.noise.why},
        "checks": {result.check.name: outcome_json(result) for result in audit.results},
    }


def outcome_json(result: Result) -> dict[str, Any]:
    """One check."""
    outcome: Outcome = result.outcome
    row: dict[str, Any] = finite(
        {
            "verdict": outcome.verdict,
            "proves": result.check.proves,
            "note": outcome.note,
            "faults": list(outcome.faults),
            "num_findings": len(outcome.findings),
            "findings": [
                {
                    "message": finding.message,
                    "fault": finding.fault,
                    "reproduce": dict(finding.reproduce),
                }
                for finding in outcome.findings[:_KEPT]
            ],
            "figures": dict(outcome.figures),
            "seconds": round(result.seconds, 2),
        }
    )
    return row


def finite(value: Any) -> Any:
    """A value as JSON carries it: what is not finite becomes null."""
    if isinstance(value, dict):
        return {str(name): finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
