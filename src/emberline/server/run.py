"""An engine's HTTP server, put together: application, metrics, connections, end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvicorn

from emberline.engine.running_engine import RunningEngine
from emberline.server.app import create_app
from emberline.server.audit_metrics import AuditMetrics
from emberline.server.dialect import ReasoningParser, ToolParser, dialect_of
from emberline.server.live_audit import LiveAudit, default_tolerance
from emberline.server.metrics import ServerMetrics
from emberline.server.protocol import MetricsLevel
from emberline.server.shutdown import SLOW_READER_SECONDS, GracefulServer
from emberline.types import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GRACE_SECONDS = 30.0


def make_server(
    engine: RunningEngine,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    *,
    request_timeout: float | None = None,
    verify_logprobs: float = 0.0,
    verify_tolerance: float | None = None,
    max_logprobs: int = MAX_TOP_LOGPROBS,
    per_request_metrics: MetricsLevel = "none",
    api_keys: Sequence[str] = (),
    tool_parser: ToolParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
    grace_seconds: float = GRACE_SECONDS,
    slow_reader_timeout: float = SLOW_READER_SECONDS,
    log_level: str = "info",
) -> GracefulServer:
    """A server to `run(sockets=[listener])`.

    Args:
        engine: what is served; it ends with the server.
        tokenizer: the model's.
        name: what the model is called here.
        request_timeout: seconds that a request may take; None = no limit.
        verify_logprobs: share of the requests whose log-probabilities are audited; 0 = none.
        verify_tolerance: largest difference in nats that passes; None = the dtype's.
        max_logprobs: most values a token that a request may ask for; -1 = no limit.
        per_request_metrics: whether answers say how their request fared, unless asked.
        api_keys: what calls must show one of; none = no keys are needed.
        tool_parser: how the model writes tool calls; auto = as its template shows.
        reasoning_parser: whether <think> begins reasoning; auto = if the template knows it.
        grace_seconds: how long requests may go on after a first signal.
        slow_reader_timeout: seconds after which a connection that takes no byte is cut.
        log_level: uvicorn's.
    """
    metrics = ServerMetrics(engine.snapshot, name)
    audit = None
    if verify_logprobs:
        tolerance = default_tolerance(engine.info) if verify_tolerance is None else verify_tolerance
        shown = AuditMetrics(metrics.registry, metrics.labels)
        audit = LiveAudit(engine, verify_logprobs, tolerance, shown)
    app = create_app(
        engine,
        tokenizer,
        name,
        metrics=metrics,
        audit=audit,
        request_timeout=request_timeout,
        max_logprobs=max_logprobs,
        per_request_metrics=per_request_metrics,
        api_keys=api_keys,
        dialect=dialect_of(tokenizer, tool_parser, reasoning_parser),
        info={"grace_seconds": grace_seconds, "slow_reader_timeout": slow_reader_timeout},
    )
    return GracefulServer(
        uvicorn.Config(app, log_level=log_level, ws="none"),
        engine,
        grace_seconds=grace_seconds,
        slow_reader_timeout=slow_reader_timeout,
        on_slow_reader=metrics.slow_reader_cut,
    )
