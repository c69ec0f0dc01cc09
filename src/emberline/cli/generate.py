"""`emberline generate`: one answer in the terminal, with its figures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emberline.cli.settings import DrafterName, engine_config, one_line_errors
from emberline.config import DtypeName, LayoutKind, PlannerName, SlotRule, TargetBackend
from emberline.types import RequestOutput, SamplingParams, SpeculationStats, TokenLogprobs

if TYPE_CHECKING:
    from emberline.engine.detokenizer import TokenText
    from emberline.llm import LLM


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer.")],
    model: Annotated[
        str | None,
        typer.Option(help="Folder, .gguf file or Hugging Face id; the embedded model if absent."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Draft or small model: folder, .gguf file or id; or 'none'.")
    ] = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="No speculation.")] = False,
    drafter: Annotated[
        DrafterName, typer.Option(help="auto: the draft checkpoint; ngram: from the text itself.")
    ] = "auto",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is: no chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="Show each token's logprob and N alternatives.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus to sample from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Most likely tokens to sample from; 0 is all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer.")] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Weights, KV and computation.")] = "auto",
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N; auto: a GPU if there is one.")
    ] = "auto",
    gpu_memory: Annotated[
        float | None,
        typer.Option(help="Share of a GPU's free memory to use where --kv-tokens is absent."),
    ] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="On a GPU: results that no batch changes, slower."),
    ] = False,
    overlap: Annotated[
        bool, typer.Option(help="On a GPU: read a step while the next one runs.")
    ] = True,
    target_backend: Annotated[
        TargetBackend, typer.Option(help="Our fused decoder, or any model as transformers has it.")
    ] = "auto",
    layout: Annotated[LayoutKind, typer.Option(help="How rows of a step are laid.")] = "compact",
    planner: Annotated[PlannerName, typer.Option(help="How much of a block is verified.")] = "auto",
    threshold: Annotated[
        float | None, typer.Option(help="Least survival worth verifying (planner threshold).")
    ] = None,
    draft_slot_rule: Annotated[
        SlotRule | None,
        typer.Option(help="What a block draft's slots predict; what its files say if absent."),
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Drafts a block; the drafter's own if absent.")
    ] = None,
) -> None:
    """Answer one prompt in the terminal."""
    with one_line_errors():
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop or [],
            max_tokens=max_tokens,
            logprobs=logprobs,
        )
        config = engine_config(
            draft=draft,
            dtype=dtype,
            device=device,
            gpu_memory=gpu_memory,
            batch_invariant=batch_invariant,
            overlap=overlap,
            target_backend=target_backend,
            max_model_len=None,
            kv_tokens=None,
            max_num_reqs=1,
            layout=layout,
            planner=planner,
            threshold=threshold,
            num_draft_tokens=num_draft_tokens,
            draft_slot_rule=draft_slot_rule,
            drafter=drafter,
            no_draft=no_draft,
        )
        from emberline.llm import LLM

        llm = LLM(model, draft, config, progress=not as_json)
        plain = raw or not llm.tokenizer.chat_template
        ids = llm.encode(prompt) if plain else llm.chat_ids([{"role": "user", "content": prompt}])
        began = time.monotonic()
        outputs = list(_shown(llm.stream(ids, params), silent=as_json))
    seconds = time.monotonic() - began
    if as_json:
        typer.echo(json.dumps(_as_json(llm, outputs, seconds), ensure_ascii=False, allow_nan=False))
    else:
        _print_figures(llm.token_text, outputs, seconds)


def _shown(outputs: Iterator[RequestOutput], *, silent: bool) -> Iterator[RequestOutput]:
    """Passes outputs on, writing their text as it comes."""
    for output in outputs:
        if not silent:
            sys.stdout.write(output.text)
            sys.stdout.flush()
        yield output
    if not silent:
        sys.stdout.write("\n")


def _records(outputs: Sequence[RequestOutput]) -> list[TokenLogprobs]:
    return [record for output in outputs for record in output.logprobs or ()]


def _as_json(llm: LLM, outputs: Sequence[RequestOutput], seconds: float) -> dict[str, Any]:
    from emberline.server.records import finite, stats_json

    last, text = outputs[-1], llm.token_text
    answer: dict[str, Any] = {
        "model": llm.name,
        "text": "".join(output.text for output in outputs),
        "token_ids": [token_id for output in outputs for token_id in output.token_ids],
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "prompt_tokens": last.num_prompt_tokens,
        "completion_tokens": last.num_output_tokens,
        "seconds": round(seconds, 4),
        "speculation": stats_json(last.stats),
    }
    if last.logprobs is not None:
        answer["logprobs"] = [
            {
                "token": text.token_str(record.token_id),
                "token_id": record.token_id,
                "logprob": finite(record.logprob),
                "rank": record.rank,
                "top": [
                    {"token": text.token_str(i), "token_id": i, "logprob": finite(logprob)}
                    for i, logprob in zip(record.top_ids, record.top_logprobs, strict=True)
                ],
            }
            for record in _records(outputs)
        ]
    return answer


def _print_figures(text: TokenText, outputs: Sequence[RequestOutput], seconds: float) -> None:
    from rich.console import Console

    console, last = Console(), outputs[-1]
    if last.logprobs is not None:
        console.print(_logprob_table(text, _records(outputs)))
    rate = last.num_output_tokens / seconds if seconds else 0.0
    console.print(_figures_table(last, rate))


def _logprob_table(text: TokenText, records: Sequence[TokenLogprobs]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("token", "logprob", "rank", "alternatives", box=None, header_style="bold")
    for record in records:
        others = "  ".join(
            f"{text.token_str(i)!r} {logprob:.3f}"
            for i, logprob in zip(record.top_ids, record.top_logprobs, strict=True)
        )
        name = repr(text.token_str(record.token_id))
        table.add_row(Text(name), f"{record.logprob:.4f}", str(record.rank), Text(others))
    return table


def _figures_table(last: RequestOutput, rate: float) -> Any:
    from rich.table import Table

    stats: SpeculationStats = last.stats
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_row("finished", str(last.finish_reason))
    table.add_row("tokens", f"{last.num_output_tokens} after a prompt of {last.num_prompt_tokens}")
    table.add_row("speed", f"{rate:.1f} tokens/s, prompt included")
    table.add_row("verify steps", f"{stats.num_steps}, {stats.acceptance_length:.2f} tokens each")
    if stats.num_drafted:
        table.add_row(
            "drafts",
            f"{stats.num_drafted} proposed, {stats.num_verified} verified, "
            f"{stats.num_accepted} accepted ({stats.acceptance_rate:.0%})",
        )
        shares = zip(stats.accepted_per_pos, stats.verified_per_pos, strict=False)
        table.add_row("by position", " ".join(f"{a / v:.0%}" if v else "-" for a, v in shares))
    return table
