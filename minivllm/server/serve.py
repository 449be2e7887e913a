"""The process of a server: from its port to its end.

Invariant: after the first signal no request is taken, and every one that was ends with
an answer or an error before the process does. Called by the command line.

In vLLM: vllm/entrypoints/launchers/launcher.py (serve_http).
Source: appendix A32, "A server that stays up".
"""

import copy
import logging
import socket
import threading
from types import FrameType
from typing import Any

import uvicorn

from minivllm.engine.async_engine import AsyncLLM
from minivllm.errors import ConfigError, EngineDead
from minivllm.server.app import create_app
from minivllm.server.handlers import Handlers
from minivllm.server.options import ServerOptions

logger = logging.getLogger(__name__)

GRACE_S = 5  # for the last bytes of aborted answers


def open_port(host: str, port: int) -> socket.socket:
    """Reserve an address, before a model is loaded.

    Raises:
        ConfigError: Another program has it, or it is not ours to take.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port} ({error}): choose another --port, "
            "or stop the program that has it"
        ) from error


def log_config(level: str) -> dict[str, Any]:
    """Return how to log: our lines go where the web server's go, to stderr."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    ours = {"handlers": ["default"], "level": level.upper(), "propagate": False}
    config["loggers"]["minivllm"] = ours
    return config


class Server(uvicorn.Server):
    """A web server that lets its engine finish."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, drain_s: float) -> None:
        super().__init__(config)
        self.llm = llm
        self.drain_s = drain_s
        self._is_ending = False
        llm.death_listeners.append(self._leave)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end at the first signal; end at the second."""
        if self._is_ending:
            self.force_exit = self.should_exit = True
            threading.Thread(target=self.llm.close, daemon=True).start()
            return
        self._is_ending = True
        logger.warning("told to end: running requests have %g s", self.drain_s)
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        self.llm.close(self.drain_s)
        self.should_exit = True

    def _leave(self, error: EngineDead) -> None:
        """End the process: without an engine it is of no use."""
        self.should_exit = True


def serve(
    llm: AsyncLLM,
    handlers: Handlers,
    options: ServerOptions,
    port: socket.socket,
    log_level: str = "info",
) -> int:
    """Serve until a signal comes or the engine dies.

    Returns:
        The exit code: 0, or 1 if the engine died.
    """
    config = uvicorn.Config(
        create_app(llm, handlers, options),
        access_log=False,  # we write it ourselves
        http="h11",  # it limits the head of a request; httptools would not
        log_config=log_config(log_level),
        log_level=log_level,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=options.keep_alive_timeout_s,
        server_header=False,
    )
    Server(config, llm, options.shutdown_timeout_s).run(sockets=[port])
    llm.close()
    return 1 if llm.error is not None else 0
