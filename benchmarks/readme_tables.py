"""Fill the pages' tables from `results/*.json`, or with --check fail if one is stale."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def source(figures: dict[str, Any]) -> str:
    """One line that says where a table comes from."""
    return (
        f"`{figures['command']}`, {figures['when']}, commit {figures['commit']}, "
        f"{figures['cpu']}, {figures['threads']} thread(s), torch {figures['torch']}."
    )


def acceptance(figures: dict[str, Any]) -> str:
    """Acceptance length by set and temperature."""
    temperatures = [key for key in figures if key.startswith("T=")]
    sets = list(figures[temperatures[0]]["sets"])
    rows = [f"| temperature | {' | '.join(sets)} | mean |", "| --- |" + " ---: |" * (len(sets) + 1)]
    for key in temperatures:
        lengths = [f"{row['acceptance_length']:.2f}" for row in figures[key]["sets"].values()]
        rows.append(f"| {key[2:]} | {' | '.join(lengths)} | **{figures[key]['macro']:.2f}** |")
    return "\n".join(rows)


def decode(figures: dict[str, Any]) -> str:
    """Tokens per second of each arm and the two ratios."""
    arms = list(figures["macro"])
    rows = [
        f"| tokens per second | {' | '.join(figures['sets'])} | mean |",
        "| --- |" + " ---: |" * (len(figures["sets"]) + 1),
    ]
    for arm in arms:
        speeds = [f"{row[arm]:.1f}" for row in figures["sets"].values()]
        rows.append(f"| {arm} | {' | '.join(speeds)} | {figures['macro'][arm]:.1f} |")
    ratios = (
        f"Draft over none: **{figures['draft_over_none']:.2f}**. "
        f"Logprobs 5 over off: **{figures['logprobs_over_off']:.3f}**."
    )
    return "\n".join(rows) + "\n\n" + ratios


def footprint(figures: dict[str, Any]) -> str:
    """Start-up and memory of the server."""
    start, peak = figures["start_to_first_answer_seconds"], figures["peak_mib_under_load"] / 1024
    return (
        f"Server: {start:.1f} s from start to the first answered request on a warm cache, "
        f"{peak:.2f} GiB at most with {figures['concurrency']} requests of 1,000 tokens at once."
    )


def serving(figures: dict[str, Any]) -> str:
    """Output tokens per second by policy and concurrency, and the scheduled one's ratios."""
    levels = figures["levels"]
    policies = list(next(iter(levels.values())))
    rows = [
        f"| in flight | {' | '.join(policies)} | scheduled over the best other | over verify_all |",
        "| ---: |" + " ---: |" * (len(policies) + 2),
    ]
    for level, row in levels.items():
        speeds = [f"{row[name]['output_tokens_per_second']:.1f}" for name in policies]
        compared = figures["scheduled"][level]
        rows.append(
            f"| {level} | {' | '.join(speeds)} | **{compared['over_best']:.3f}** | "
            f"{compared['over_verify_all']:.3f} |"
        )
    return "\n".join(rows)


def prefix_cache(figures: dict[str, Any]) -> str:
    """A long prompt asked again."""
    rows = figures["conversations"]
    same = all(row["same_tokens"] and row["same_logprobs"] for row in rows)
    return (
        f"A prompt of {rows[0]['prompt_tokens']:,} tokens asked again: first token after "
        f"**{figures['ttft_cached_over_cold']:.3f}** of the first time (median of {len(rows)}), "
        f"tokens and logprobs {'the same bit for bit' if same else 'NOT the same'}."
    )


def audit_matrix(figures: dict[str, Any]) -> str:
    """Verdicts of every combination, and the largest differences."""
    heads = ["draft", "layout", "planner", "dtype", "raw", "processed", "prefill", "transformers"]
    rows = [f"| {' | '.join(heads)} |", "| --- |" + " --- |" * 5 + " ---: |" * 2]
    for row in figures["combinations"]:
        modes = row["modes"]
        checks = [
            f"{mode['checks'].get('pass', 0)} pass"
            + "".join(f", **{name} fails**" for name in mode["failed"])
            for mode in modes.values()
        ]
        gaps = [
            max(m[name]["max"] for m in modes.values() for name in names if name in m)
            for names in (("rescoring", "rescoring_concurrent"), ("reference",))
        ]
        words = [row[name] for name in ("draft", "layout", "planner", "dtype")]
        shown = ["0" if gap == 0 else f"{gap:.1e}" for gap in gaps]
        rows.append(f"| {' | '.join([*words, *checks, *shown])} |")
    return "\n".join(rows)


def soak(figures: dict[str, Any]) -> str:
    """Many clients, most of them rude."""
    before, after = figures["resident_mib_after_warm_up"], figures["resident_mib_at_the_end"]
    return (
        f"{figures['clients']} clients for {figures['seconds']:.0f} s, leaving, not reading, "
        f"asking for nonsense: {figures['calls']:,} calls, no 500 and none that hung, `/health` "
        f"within {figures['health_max_ms']:.0f} ms, memory {after / before - 1:+.1%}, every page "
        "given back, exit code 0."
    )


def structured(figures: dict[str, Any]) -> str:
    """Validity under a grammar, and what masking the drafts brings."""
    rows = [
        "| temperature | drafts | ended | valid of those | tokens a step |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    ratios = []
    for key in (key for key in figures if key.startswith("T=")):
        ratios.append(f"**{figures[key]['masked_over_free']:.2f}** at temperature {key[2:]}")
        for name in ("masked drafts", "free drafts"):
            row = figures[key][name]
            rows.append(
                f"| {key[2:]} | {name} | {row['finished']} of {row['answers']} | {row['valid']} | "
                f"{row['acceptance_length']:.2f} |"
            )
    return "\n".join(rows) + f"\n\nMasked over free: {', '.join(ratios)}."


def predicted_output(figures: dict[str, Any]) -> str:
    """Tokens a step with most of the answer predicted."""
    rows = figures["prompts"]
    without = sum(row["tokens_per_step_without"] for row in rows) / len(rows)
    return (
        f"Predicted output: {len(rows)} greedy answers with every twentieth word changed, given as "
        f"the prediction: **{figures['tokens_per_step']:.2f}** tokens a step instead of "
        f"{without:.2f}, every answer the same."
    )


README_TABLES = {
    "acceptance-given": acceptance,
    "decode-cpu": decode,
    "server-footprint": footprint,
    "prefix-cache": prefix_cache,
    "predicted-output": predicted_output,
    "soak": soak,
}
TABLES = {
    "README.md": README_TABLES,
    "docs/planning.md": {"policies": serving, "serving": serving},
    "docs/structured.md": {"structured": structured},
    "docs/audit.md": {"audit-matrix": audit_matrix, "audit-matrix-bfloat16": audit_matrix},
}


def filled(page: str, text: str) -> str:
    """A page with every marked table made anew."""
    for name, render in TABLES[page].items():
        figures = json.loads((HERE / "results" / f"{name}.json").read_text())
        body = f"<!-- {name} -->\n\n{render(figures)}\n\n{source(figures)}\n\n<!-- end -->"
        pattern = rf"<!-- {name} -->.*?<!-- end -->"
        text, count = re.subn(pattern, lambda _, body=body: body, text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{page} needs exactly one block marked {name}, found {count}")
    return text


def main() -> None:
    """Rewrite or check."""
    for page in TABLES:
        path = HERE.parent / page
        now = path.read_text()
        new = filled(page, now)
        if "--check" in sys.argv and now != new:
            raise SystemExit(f"{page} is stale: run benchmarks/readme_tables.py")
        path.write_text(new)


if __name__ == "__main__":
    main()
