"""A server in a thread of the test, whose engine can be looked at and slowed down."""

import threading
import time
from collections.abc import Callable

import uvicorn

from minivllm.engine.async_engine import AsyncLLM
from minivllm.engine.config import EngineConfig
from minivllm.engine.engine import LLMEngine
from minivllm.request import ModelOutput, SchedulerOutput
from minivllm.server.app import create_app
from minivllm.server.handlers import EngineView, Handlers
from minivllm.server.options import ServerOptions
from tests.engine_tools import assert_all_free

WAIT_S = 30.0


class Served:
    """A server at a port of its own, until it is closed."""

    def __init__(
        self,
        engine: LLMEngine | EngineConfig,
        options: ServerOptions | None = None,
        model: str = "parrot",
    ) -> None:
        self.llm = AsyncLLM(engine)
        self.pause_s = 0.0
        execute = self.llm.engine.runner.execute

        def slowly(step: SchedulerOutput) -> ModelOutput:
            time.sleep(self.pause_s)
            return execute(step)

        self.llm.engine.runner.execute = slowly
        view = EngineView.of(self.llm.engine)
        self.app = create_app(self.llm, Handlers(view, model=model), options)
        settings = uvicorn.Config(self.app, port=0, http="h11", log_level="error")
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.until(lambda: self.server.started or not self.thread.is_alive())
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.address = ("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(WAIT_S)
        self.llm.close()

    def until_idle(self) -> None:
        """Wait until nothing runs, and check that nothing is held."""
        engine = self.llm.engine
        self.until(
            lambda: not self.llm.num_open and not engine.has_unfinished_requests()
        )
        assert_all_free(engine)

    def until_running(self, count: int) -> None:
        self.until(lambda: len(self.llm.engine.scheduler.running) >= count)

    def until(self, is_true: Callable[[], bool]) -> None:
        """Wait for something that another thread does."""
        end = time.monotonic() + WAIT_S
        while not is_true():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.005)
