"""What every benchmark writes: its figures with commit, machine, versions and command."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def provenance() -> dict[str, object]:
    """Where and with what a figure was measured."""
    # Folders by their name only: where they lie on this machine says nothing to others.
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": _commit(),
        "command": " ".join(["python", _program(), *words]),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def _commit() -> str:
    """The commit that the code is of; empty where there is no repository, or no git."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
            check=False,
        ).stdout.strip()
    except OSError:
        return ""


def _program() -> str:
    """The running benchmark's file, from the repository on."""
    path, home = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parent
    return f"benchmarks/{path.relative_to(home) if path.is_relative_to(home) else path.name}"


def write(name: str, figures: dict[str, object]) -> Path:
    """Write `results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**provenance(), **figures}, indent=1) + "\n")
    return path
