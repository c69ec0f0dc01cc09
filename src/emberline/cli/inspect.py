"""`emberline inspect`: what a draft is, how its files are read, and whether that is right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberline.cli.settings import fail, one_line_errors
from emberline.config import DtypeName, SlotRule, TargetBackend

if TYPE_CHECKING:
    from emberline.drafters.block_config import DraftConfig
    from emberline.drafters.dialects import DraftCheckpoint
    from emberline.drafters.eagle3_backbone import Eagle3Config
    from emberline.engine.probe import Probed
    from emberline.hub import ModelFolder

PROBE_TOKENS = 64  # of each text that the target writes
PROBE_PROMPTS = 3
PROBE_PAGES, PAGE_SIZE = 65, 16


def inspect(
    draft: Annotated[
        str | None,
        typer.Argument(help="Draft checkpoint: folder, .gguf file or id; the shipped if absent."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The target: folder, .gguf file or id; the embedded model if absent."),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Draft ten blocks under each reading of the files."),
    ] = False,
    draft_slot_rule: Annotated[
        SlotRule | None,
        typer.Option(help="What a block draft's slots predict; what its files say if absent."),
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Of the probe's computation.")] = "auto",
    target_backend: Annotated[
        TargetBackend, typer.Option(help="Our fused decoder, or any model as transformers has it.")
    ] = "auto",
) -> None:
    """Show what a draft is: dialect, geometry, layers, slot rule; --probe measures readings."""
    with one_line_errors():
        from emberline.drafters.dialects import read_checkpoint
        from emberline.drafters.geometry import read_geometry
        from emberline.engine.build import model_depth
        from emberline.hub import ModelFolder, resolve_draft, resolve_model

        target = resolve_model(model) if model is not None or probe or draft is None else None
        folder = resolve_draft(draft, target or ModelFolder(Path(), "", "folder"))
        if folder is None:
            fail("no draft to look at: give one")
        depth = None if target is None else model_depth(target.path)
        checkpoint = read_checkpoint(folder, draft_slot_rule, depth)
        config = read_geometry(checkpoint)
        _show(checkpoint, config, folder)
        if probe and target is not None:
            found = _probed(checkpoint, target, dtype, target_backend)
            _show_probe(found)
    if checkpoint.ambiguous and not probe:
        typer.echo("The slot rule is a guess: --probe with --model measures both.")
    if checkpoint.layers_guessed and not probe:
        typer.echo("The layer ids are a guess: --probe with --model measures those one lower.")


def _show(checkpoint: DraftCheckpoint, config: DraftConfig | Eagle3Config, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _facts(checkpoint, config, folder):
        table.add_row(name, value)
    Console().print(table)


def _facts(
    checkpoint: DraftCheckpoint, config: DraftConfig | Eagle3Config, folder: Path
) -> list[tuple[str, str]]:
    from emberline.drafters.block_config import DraftConfig

    block = config if isinstance(config, DraftConfig) else None
    made_for = f", of {config.num_target_layers}" if config.num_target_layers else ""
    unsure = " (a guess: or one less each)" if checkpoint.layers_guessed else ""
    width, head = config.hidden_size, config.head_dim
    facts = [
        ("draft", checkpoint.source),
        ("dialect", checkpoint.dialect),
        ("algorithm", block.algorithm if block else "eagle3"),
        (
            "geometry",
            f"{config.num_layers} layers of {width}, {config.num_heads} heads "
            f"({config.num_kv_heads} of keys) of {head}, MLP {config.intermediate_size}",
        ),
        ("target layers", f"{_layers(config.taps)}{made_for} (0-based, their outputs){unsure}"),
        ("drafts a block", str(config.max_draft_tokens)),
    ]
    if block is not None:
        rule = f"{checkpoint.slot_rule}: {checkpoint.slot_reason}"
        facts.append(("slot rule", rule + (" (a guess)" if checkpoint.ambiguous else "")))
        facts.append(("mask token", str(block.mask_token_id)))
        facts.append(("heads", _heads(checkpoint, block)))
    facts.append(("vocabulary", _vocabulary(checkpoint, config.vocab_size)))
    facts.append(("calibration", _calibration(folder)))
    if checkpoint.ignored:
        facts.append(("not read", ", ".join(checkpoint.ignored)))
    return facts


def _layers(taps: tuple[int, ...]) -> str:
    return ", ".join("embeddings" if tap == -1 else str(tap) for tap in taps)


def _heads(checkpoint: DraftCheckpoint, config: DraftConfig) -> str:
    if not config.markov_rank:
        return "none: every slot is drawn on its own"
    kind = checkpoint.config.get("markov_head_type") or "vanilla"
    sure = "with" if config.has_confidence else "without"
    return f"{kind} Markov of rank {config.markov_rank}, {sure} confidence"


def _vocabulary(checkpoint: DraftCheckpoint, size: int | None) -> str:
    whole = "the target's" if size is None else str(size)
    if "d2t" in checkpoint.shapes:
        return f"{checkpoint.shapes['d2t'][0]} of {whole} (d2t)"
    return whole


def _calibration(folder: Path) -> str:
    from emberline.verify.calibration import draft_calibration

    found = draft_calibration(folder)
    if found is None:
        return "none"
    return f"temperatures {' '.join(f'{t:.2f}' for t in found.temperatures)}"


def _probed(
    checkpoint: DraftCheckpoint, model: ModelFolder, dtype: DtypeName, backend: TargetBackend
) -> tuple[Probed, ...]:
    """Every reading's accept lengths on text that the target writes."""
    import torch

    from emberline.bench.own_prompts import PROMPTS
    from emberline.engine.build import model_depth
    from emberline.engine.probe import Pages, probe, readings, tapped, write_text
    from emberline.hub import generation_stop_ids, load_tokenizer
    from emberline.models.device import resolve_dtype
    from emberline.models.load import load_target
    from emberline.prompts import Conversation, conversation_ids

    device = "cpu"  # a check of a few blocks
    wide = resolve_dtype(dtype, device)
    candidates = readings(checkpoint, model_depth(model.path))
    target = load_target(
        model.path,
        backend,
        dtype=wide,
        device=device,
        num_pages=PROBE_PAGES,
        page_size=PAGE_SIZE,
        taps=tapped(candidates),
    )
    pages = Pages(PROBE_PAGES, PAGE_SIZE, device)
    tokenizer, stops = load_tokenizer(model.path), generation_stop_ids(model.path)
    prompts = [conversation_ids(tokenizer, Conversation.of(p)) for p in PROMPTS[:PROBE_PROMPTS]]
    room = min(pages.capacity, target.max_model_len)
    with torch.inference_mode():
        texts = [
            write_text(target, ids, min(PROBE_TOKENS, room - len(ids)), stops, pages)
            for ids in prompts
        ]
        try:
            return probe(checkpoint, candidates, target, texts, pages, wide)
        except ValueError as problem:
            fail(str(problem))


def _show_probe(found: tuple[Probed, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    from emberline.engine.probe import leaders

    table = Table("slot rule", "layer ids", "tokens a step", box=None, header_style="bold")
    ahead = leaders(found)
    mark = "  <- best" if len(ahead) == 1 else "  <- tied"
    for one in found:
        length = f"{one.accept_length:.2f}{mark if one in ahead else ''}"
        table.add_row(one.reading.slot_rule or "-", _ids(one), length)
    console = Console()
    console.print(f"\n{len(found[0].accepted)} teacher-forced blocks, greedy:")
    console.print(table)
    console.print(_verdict(found[0], ahead, len(found)))


def _ids(one: Probed) -> str:
    return f"{one.reading.shift:+d}" if one.reading.shift else "as in the files"


def _verdict(said: Probed, ahead: tuple[Probed, ...], tried: int) -> str:
    """What to do. Ten blocks tell a wrong reading from a right one, not two good drafts apart."""
    if tried == 1:
        return "There is no other reading to compare the files with."
    if len(ahead) > 1:
        names = "; ".join(f"{one.reading.slot_rule or 'layer ids'} {_ids(one)}" for one in ahead)
        wrong = "" if said in ahead else " The files' own reading is worse than these."
        return f"These blocks cannot tell apart: {names}.{wrong}"
    (best,) = ahead
    if best is said:
        return "The files are read rightly."
    advice = []
    if best.reading.slot_rule != said.reading.slot_rule:
        advice.append(
            f"The other slot rule fits better: --draft-slot-rule {best.reading.slot_rule}"
        )
    if best.reading.shift:
        layers = list(best.reading.config.taps)
        advice.append(
            f"Layer ids {best.reading.shift:+d} fit better: correct target_layer_ids to {layers}"
        )
    return "\n".join(advice)
