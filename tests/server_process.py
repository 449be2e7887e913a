"""A server in a process of its own, and a script that starts one with planted faults.

`python -m tests.server_process FOLDER` serves a model folder like `minivllm serve`, but
each step takes `--pause` seconds more. A prompt that begins with "!" lets a step fail,
one that begins with "~" kills the engine. And at /left it tells what it holds.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from minivllm.engine.async_engine import AsyncLLM
from minivllm.engine.config import EngineConfig
from minivllm.request import ModelOutput, SchedulerOutput

WAIT_S = 60.0
PLANTED = "a planted fault"


class Fault(BaseException):
    """Nothing that a runner should raise, so the engine does not survive it."""


class ServerProcess:
    """Starts a command, reads what it says, and ends it at the latest with itself."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"MINIVLLM_API_KEY": ""} | environment,
        )
        self._said: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        # Its port listens already, so whoever connects now is served.
        self.url = self.until(" at http://").split(" at ")[1].split("/v1")[0]
        self.port = int(self.url.rpartition(":")[2])

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self._said.append(line)
                self._changed.notify_all()
        with self._changed:
            self._said.append("")  # the end
            self._changed.notify_all()

    def until(self, part: str) -> str:
        """Wait for a line with these words, and return it."""

        def found() -> str | None:
            lines = [line for line in self._said if part in line]
            assert lines or "" not in self._said, f"no {part!r} in {self.log}"
            return lines[0] if lines else None

        with self._changed:
            line = self._changed.wait_for(found, WAIT_S)
        assert line, f"no {part!r} yet in {self.log}"
        return line

    @property
    def log(self) -> str:
        """What it has said so far."""
        return "".join(self._said)

    def tell(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Return its exit code, when all it said is read."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()


def serve_parrot(folder: str, *arguments: str) -> ServerProcess:
    """Start the script below."""
    return ServerProcess("tests.server_process", folder, *arguments)


def tell_what_is_left(llm: AsyncLLM) -> None:
    """Add a route that only the tests need."""
    from starlette.responses import JSONResponse

    from minivllm.server.app import router

    manager = llm.engine.scheduler.block_manager

    @router.get("/left")
    async def left() -> JSONResponse:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        counts = {
            "open requests": llm.num_open,
            "held blocks": manager.num_blocks - manager.num_free_blocks,
            "tasks": len(asyncio.all_tasks()),
            "files": len(os.listdir("/proc/self/fd")),
            "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        }
        return JSONResponse(counts)


def main() -> int:
    """Serve with planted faults."""
    from minivllm.server.handlers import EngineView, Handlers
    from minivllm.server.options import ServerOptions
    from minivllm.server.serve import open_port, serve

    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--drain", type=float, default=WAIT_S)
    parser.add_argument("--num-blocks", type=int, default=600)
    arguments = parser.parse_args()
    config = EngineConfig(
        model=arguments.folder,
        backend="numpy",
        num_blocks=arguments.num_blocks,
        max_num_seqs=16,
    )
    llm = AsyncLLM(config)
    execute = llm.engine.runner.execute

    def planted(step: SchedulerOutput) -> ModelOutput:
        time.sleep(arguments.pause)
        beginnings = {chr(request.token_ids[0]) for request in step.requests}
        if "~" in beginnings:
            raise Fault(PLANTED)
        if "!" in beginnings:
            raise RuntimeError(PLANTED)
        return execute(step)

    runner: Any = llm.engine.runner
    runner.execute = planted
    tell_what_is_left(llm)
    handlers = Handlers(EngineView.of(llm.engine), model="parrot")
    options = ServerOptions(shutdown_timeout_s=arguments.drain)
    with open_port("127.0.0.1", 0) as port:
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
        print(f"parrot at {url}/v1", file=sys.stderr, flush=True)
        return serve(llm, handlers, options, port)


if __name__ == "__main__":
    sys.exit(main())
