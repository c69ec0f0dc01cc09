"""`emberline serve`: an engine behind HTTP."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from emberline.cli.settings import DrafterName, engine_config, fail, one_line_errors
from emberline.config import (
    DtypeName,
    GrammarBackend,
    LayoutKind,
    PlannerName,
    SlotRule,
    TargetBackend,
)
from emberline.server.dialect import ReasoningParser, ToolParser
from emberline.types import MAX_TIMEOUT, MAX_TOP_LOGPROBS


def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder, .gguf file or Hugging Face id; the embedded model if absent."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Draft or small model: folder, .gguf file or id; or 'none'.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name to serve the model under.")] = None,
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
    engine_process: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(help="Whether the engine has a process of its own; auto: on a GPU."),
    ] = "auto",
    target_backend: Annotated[
        TargetBackend, typer.Option(help="Our fused decoder, or any model as transformers has it.")
    ] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Context length; the model's own if absent.")
    ] = None,
    kv_tokens: Annotated[int | None, typer.Option(help="Tokens that the KV cache holds.")] = None,
    max_num_reqs: Annotated[
        int | None, typer.Option(help="Requests that run at the same time.")
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Requests that may wait; more are refused with 429.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the CPU's kernels; all cores but one if absent.")
    ] = None,
    layout: Annotated[LayoutKind, typer.Option(help="How rows of a step are laid.")] = "compact",
    planner: Annotated[PlannerName, typer.Option(help="How much of a block is verified.")] = "auto",
    threshold: Annotated[
        float | None, typer.Option(help="Least survival worth verifying (planner threshold).")
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(help="Confidence temperatures (JSON); the draft's own if absent.")
    ] = None,
    step_costs: Annotated[
        str | None,
        typer.Option(help="Step costs (JSON); if absent measured once on this machine and kept."),
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option(help="Keep the KV of computed prefixes for requests that share them.")
    ] = True,
    verify_logprobs: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the requests that are rescored in idle time."),
    ] = 0.0,
    verify_tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Nats that pass there: 1e-4, in bfloat16 0.25, if absent."),
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(min=0.001, max=MAX_TIMEOUT, help="Most seconds a request may take."),
    ] = None,
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="How long requests may go on after SIGTERM.")
    ] = 30.0,
    slow_reader_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which a client that reads nothing is cut.")
    ] = 60.0,
    draft_slot_rule: Annotated[
        SlotRule | None,
        typer.Option(help="What a block draft's slots predict; what its files say if absent."),
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Drafts a block; the drafter's own if absent.")
    ] = None,
    drafter: Annotated[
        DrafterName, typer.Option(help="auto: the draft checkpoint; ngram: from the text itself.")
    ] = "auto",
    max_logprobs: Annotated[
        int, typer.Option(min=-1, help="Most values a token that may be asked for; -1: no limit.")
    ] = MAX_TOP_LOGPROBS,
    per_request_metrics: Annotated[
        Literal["none", "summary"],
        typer.Option(help="Whether answers say how their request fared, unless they are asked."),
    ] = "none",
    grammar_backend: Annotated[
        GrammarBackend, typer.Option(help="Compiler of structured output; xgrammar is an extra.")
    ] = "llguidance",
    tool_parser: Annotated[
        ToolParser, typer.Option(help="How the model writes tool calls; auto: by its template.")
    ] = "auto",
    reasoning_parser: Annotated[
        ReasoningParser,
        typer.Option(help="Whether <think> begins reasoning; auto: if the template knows it."),
    ] = "auto",
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that calls must show; repeatable. Others on this machine see it."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of such keys, one a line.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Of the server's log.")
    ] = "info",
) -> None:
    """Serve a model over an OpenAI-compatible API."""
    if verify_tolerance is not None and not verify_logprobs:
        fail("--verify-tolerance needs --verify-logprobs")
    keys = read_keys(api_key or [], api_key_file)
    config = engine_config(
        draft=draft,
        dtype=dtype,
        device=device,
        gpu_memory=gpu_memory,
        batch_invariant=batch_invariant,
        overlap=overlap,
        target_backend=target_backend,
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        max_num_reqs=max_num_reqs,
        max_queue=max_queue,
        threads=threads,
        layout=layout,
        planner=planner,
        threshold=threshold,
        calibration=calibration,
        step_costs=step_costs,
        prefix_cache=prefix_cache,
        num_draft_tokens=num_draft_tokens,
        draft_slot_rule=draft_slot_rule,
        drafter=drafter,
        grammar_backend=grammar_backend,
    )
    listener = _listen(host, port)  # before the model is loaded: a taken port fails at once

    from emberline.cli.serving_engine import start_engine

    with one_line_errors():
        served = start_engine(model, draft, config, process=engine_process, log_level=log_level)
    from emberline.server.run import make_server

    engine, name = served.engine, name or served.name
    server = make_server(
        engine,
        served.tokenizer,
        name,
        request_timeout=request_timeout,
        verify_logprobs=verify_logprobs,
        verify_tolerance=verify_tolerance,
        max_logprobs=max_logprobs,
        per_request_metrics=per_request_metrics,
        api_keys=keys,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        grace_seconds=grace_seconds,
        slow_reader_timeout=slow_reader_timeout,
        log_level=log_level,
    )
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    typer.echo(banner(name, engine.info, f"http://{shown}:{port}"), err=True)
    server.run(sockets=[listener])


def read_keys(given: Sequence[str], file: Path | None) -> list[str]:
    """The API keys of both options. Ends the program for what is no key; shows none."""
    keys = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else "is no text"
            fail(f"--api-key-file {file}: {reason}")
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            fail(f"--api-key-file {file}: holds no key: give one a line")
        keys += found
    if keys:
        from emberline.server.api_keys import check_key

        try:
            return [check_key(key) for key in keys]
        except ValueError as problem:
            fail(f"--api-key: {problem}")
    return keys


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as problem:
        fail(f"cannot listen on {host} port {port}: {problem.strerror or problem}")
    return listener


def banner(name: str, info: Mapping[str, object], url: str) -> str:
    """What is served, how exactly, and where."""
    drafter = info.get("drafter")
    draft = "none: one token a step"
    if drafter:
        draft = (
            f"{info.get('draft') or drafter}, {info.get('max_draft_tokens')} drafts a block, "
            f"{info.get('planner')}, {info.get('layout')}"
        )
    lines = {
        "model": f"{name}, {info.get('dtype')}, context {info.get('max_model_len')}",
        "draft": draft,
        "KV": f"{info.get('kv_capacity_tokens')} tokens, {info.get('max_num_reqs')} requests",
        "exact": _exactness(info),
        "API": f"{url}/v1  (docs: {url}/docs)",
    }
    return "\n".join(f"  {key:<6} {value}" for key, value in lines.items())


def _exactness(info: Mapping[str, object]) -> str:
    bitwise = info.get("bitwise")
    if bitwise is None:
        return "exactness not checked: the KV cache is too small for the start-up check"
    if bitwise:
        return "tokens and logprobs are bitwise those of plain decoding"
    return (
        "logprobs agree with plain decoding within kernel noise "
        f"(largest logit difference at the check: {info['max_logit_diff']:.2g})"
    )
