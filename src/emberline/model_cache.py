"""Folders that are built once and are then whole or absent.

A folder is built beside its place, gets its manifest last and is then renamed. Only one process
builds a folder at a time; the others wait and find it there. Owns the manifest, the lock and the
progress line. It must not know what is in a folder or where it came from.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from emberline.models.weights import ModelError, read_json

__all__ = ["Build", "Report", "Source", "cached"]

MANIFEST = "emberline.json"
FORMAT_VERSION = 1  # raise it when a conversion changes: older folders are then rebuilt

Source = dict[str, str | int]
Report = Callable[[str, int, int], None]  # what is going on, steps done, steps in all (0: unknown)
Build = Callable[[Path, Report, Path], None]  # the folder to fill, progress, a scratch folder


def cached(home: Path, name: str, source: Source, build: Build, progress: bool) -> Path:
    """The folder ``home / name``, built first unless it is there, whole and from ``source``.

    A whole folder costs a few calls of stat: its files are not read.

    Args:
        home: where the folders are; created if need be.
        name: of the folder.
        source: what identifies the input; a folder made from another one is replaced.
        build: fills the folder it is given, which is empty; its scratch folder is deleted after.
        progress: show what goes on, on standard error.

    Raises:
        ModelError: ``build`` raised it, or the cache cannot be written.
    """
    folder = home / name
    if _is_whole(folder, source):
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _reporting(progress) as report, _lock(home / f".{name}.lock", report):
            if not _is_whole(folder, source):
                _rebuild(folder, source, build, report)
    except OSError as error:
        raise ModelError(
            f"{home}: cannot be written ({error.strerror or error}); "
            f"set EMBERLINE_HOME to a folder with room for the model"
        ) from error
    return folder


def _rebuild(folder: Path, source: Source, build: Build, report: Report) -> None:
    prefix = f".{folder.name}.work-"
    for stale in folder.parent.glob(f"{prefix}*"):  # of a process that died: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch:
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        build(fresh, report, Path(scratch))
        report("Saving", 0, 0)
        _write_manifest(fresh, source)
        if folder.exists():
            folder.rename(Path(scratch) / "replaced")
        fresh.rename(folder)


def _write_manifest(folder: Path, source: Source) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    for file_name in files:  # on disk before the manifest vouches for them
        with (folder / file_name).open("rb") as file:
            os.fsync(file.fileno())
    manifest = {"format": FORMAT_VERSION, "source": source, "files": files}
    text = json.dumps(manifest, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _is_whole(folder: Path, source: Source) -> bool:
    """Whether every file of the manifest is there with its size, made by this version."""
    try:
        manifest = read_json(folder / MANIFEST)
        files = manifest.get("files")
        return (
            manifest.get("format") == FORMAT_VERSION
            and manifest.get("source") == source
            and isinstance(files, dict)
            and bool(files)
            and all((folder / name).stat().st_size == size for name, size in files.items())
        )
    except (ModelError, OSError):  # no manifest, or a file of it is absent
        return False


@contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Waiting for another process that prepares this model", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back


@contextmanager
def _reporting(show: bool) -> Iterator[Report]:
    """A function that draws a progress bar on a terminal, one line a stage into a log."""
    console = Console(stderr=True, quiet=not show, highlight=False)
    if not console.is_terminal:
        yield _line_a_stage(console)
        return
    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not show) as bar:
        task = bar.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield report


def _line_a_stage(console: Console) -> Report:
    last = ""

    def report(what: str, _done: int, _total: int) -> None:
        nonlocal last
        if what != last:
            console.print(what, markup=False, soft_wrap=True)
        last = what

    return report
