"""An engine's HTTP server, put together: application, metrics, connections, end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import uvicorn

from emberline.engine.async_engine import AsyncEngine
from emberline.server.app import create_app
from emberline.server.metrics import ServerMetrics
from emberline.server.shutdown import SLOW_READER_SECONDS, GracefulServer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GRACE_SECONDS = 30.0


def make_server(
    engine: AsyncEngine,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    *,
    request_timeout: float | None = None,
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
        grace_seconds: how long requests may go on after a first signal.
        slow_reader_timeout: seconds after which a connection that takes no byte is cut.
        log_level: uvicorn's.
    """
    metrics = ServerMetrics(engine.snapshot, name)
    app = create_app(engine, tokenizer, name, metrics=metrics, request_timeout=request_timeout)
    return GracefulServer(
        uvicorn.Config(app, log_level=log_level, ws="none"),
        engine,
        grace_seconds=grace_seconds,
        slow_reader_timeout=slow_reader_timeout,
        on_slow_reader=metrics.slow_reader_cut,
    )
