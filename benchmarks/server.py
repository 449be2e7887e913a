"""What serving costs: requests over HTTP and without, one that comes late, idle guests.

python -m benchmarks.server --out benchmarks/results/server.json

Three questions, asked in turns for each event loop (`STACKS`):

- throughput: the same streams over HTTP, and offline in an `LLMEngine`. What is lost?
- late: a short request arrives while all streams run. Is its first token there as soon
  as it can be: the rest of a step, and one with its prompt inside?
- idle: guests hold a connection open and ask nothing. What do they take from others?
  And, asked first and once, how much memory (`memory`)?

The server is `minivllm serve` in a process of its own. The offline engine is in another
one, and this process, with one thread, is the client. No process is bound to a core.
"""

import argparse
import asyncio
import datetime
import importlib.metadata
import importlib.util
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import minivllm
from benchmarks.peers.common import set_threads
from minivllm.benchmarks.load import LoadRequest, RequestResult, run_load
from minivllm.benchmarks.load_client import (
    OpenAISender,
    open_session,
    wait_until_ready,
)
from minivllm.benchmarks.load_report import summarise_load
from minivllm.benchmarks.machine import describe_machine, machine_line
from minivllm.benchmarks.measure import QUIET_CORES, Bystanders
from minivllm.benchmarks.report import three_digits
from minivllm.benchmarks.workloads import Job, random_ids
from minivllm.config import DEFAULT_MODEL
from minivllm.errors import BackendUnavailable, MinivllmError

if TYPE_CHECKING:
    import aiohttp

FAST_PACKAGES = ("uvloop",)
STACKS = {"plain": "asyncio", "fast": "uvloop"}

NUM_PROMPT, NUM_NEW = 64, 64  # tokens of a stream
LATE_STREAM = (64, 128)
IDLE_STREAM = (64, 24)
SHORT = (32, 1)
NUM_LATE, FIRST_LATE_S, LATE_EVERY_S = 12, 1.0, 0.37
NUM_ALONE = 5
VOCAB_SIZE = 1000  # a part that every model has
READY_S = 120.0


# The two sides.


def server_command(stack: str, port: int, arguments: argparse.Namespace) -> list[str]:
    """Return the command that serves; uvicorn takes the faster packages if it can."""
    hidden = () if stack == "fast" else FAST_PACKAGES
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden})); "
        "from minivllm.cli.main import main; raise SystemExit(main())"
    )
    options = {
        **{"--model": arguments.model, "--backend": arguments.backend},
        **{"--threads": 1, "--port": port, "--log-level": "warning"},
        **{"--served-model-name": "model", "--keep-alive-timeout": 600},
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "-c", program, "serve", *words]


class Served(NamedTuple):
    """A server that runs."""

    sender: OpenAISender
    url: str
    pid: int

    async def send(self, requests: Sequence[LoadRequest]) -> list[RequestResult]:
        """Send requests; return their results.

        Raises:
            MinivllmError: One of them failed.
        """
        results = await run_load(self.sender, requests)
        for result in results:
            if result.error_kind is not None:
                raise MinivllmError(f"a request failed: {result.error}")
        return results


@asynccontextmanager
async def serving(stack: str, arguments: argparse.Namespace) -> AsyncIterator[Served]:
    """Start a server, wait until it is ready, and end it."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]  # free now, and hardly taken a moment later
    process = subprocess.Popen(server_command(stack, port, arguments))
    try:
        async with open_session(timeout_s=600.0) as session:
            url = f"http://127.0.0.1:{port}"
            await wait_for(process, session, url)
            sender = OpenAISender(
                session, url, "model", extra_body={"ignore_eos": True}
            )
            yield Served(sender, url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def wait_for(
    process: subprocess.Popen, session: "aiohttp.ClientSession", url: str
) -> None:
    """Wait until a server is ready.

    Raises:
        MinivllmError: It has ended, or it takes too long.
    """
    end_s = time.monotonic() + READY_S
    while True:
        try:
            return await wait_until_ready(session, url, limit_s=1.0)
        except MinivllmError as error:
            if process.poll() is not None:
                raise MinivllmError(
                    f"the server has ended with exit code {process.returncode}: see "
                    "above what it said"
                ) from error
            if time.monotonic() > end_s:
                raise


_engines: list[Any] = []  # of the worker


def load_engine(model: str, backend: str) -> None:
    """Load the offline engine, in the worker."""
    from minivllm.engine.config import EngineConfig
    from minivllm.engine.engine import LLMEngine

    if backend != "fake":
        import torch

        torch.set_num_threads(1)
    _engines.append(LLMEngine(EngineConfig(model=model, backend=backend)))


def run_offline(jobs: list[Job]) -> float:
    """Do all jobs at once, in the worker; return new tokens per second."""
    from minivllm.benchmarks.offline import run_jobs

    timing = run_jobs(_engines[0], jobs)
    return sum(len(ids) for ids in timing.token_ids) / max(timing.wall_s, 1e-9)


@contextmanager
def offline_engine(arguments: argparse.Namespace) -> Iterator[ProcessPoolExecutor]:
    """Start the worker."""
    context = get_context("spawn")
    inputs = (arguments.model, arguments.backend)
    with ProcessPoolExecutor(1, context, load_engine, inputs) as worker:
        yield worker


# What is sent.

_numbers = random.Random(0)


def requests_of(count: int, shape: tuple[int, int]) -> list[LoadRequest]:
    """Return requests with token ids that none had before, all due at once."""
    num_prompt, num_new = shape
    return [
        LoadRequest(
            prompt=random_ids(_numbers, num_prompt, VOCAB_SIZE), max_tokens=num_new
        )
        for _ in range(count)
    ]


def late_requests() -> list[LoadRequest]:
    """Return short requests that come one by one."""
    return [
        LoadRequest(
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            arrival_s=FIRST_LATE_S + LATE_EVERY_S * index,
        )
        for index, request in enumerate(requests_of(NUM_LATE, SHORT))
    ]


def tokens_per_second(results: Sequence[RequestResult]) -> float:
    """Return the rate of new tokens, from the first sending to the last end."""
    summary = summarise_load(results)
    return summary.rate(summary.num_output_tokens)


# The questions. Each returns the numbers of one repetition, for every stack.

Numbers = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Laboratory:
    """Whom to ask, and how much.

    Attributes:
        served: For each stack, its server.
        worker: Has the offline engine.
        num_streams: That run at the same time.
        num_idle: Guests who ask nothing.
        num_new: Tokens of an answer, where throughput is asked for.
    """

    served: dict[str, Served]
    worker: ProcessPoolExecutor
    num_streams: int
    num_idle: int
    num_new: int = NUM_NEW

    def streams(self, shape: tuple[int, int]) -> list[LoadRequest]:
        """Return the requests of all streams."""
        return requests_of(self.num_streams, shape)


async def ask_throughput(laboratory: Laboratory) -> dict[str, Numbers]:
    """Run the streams offline, then over HTTP."""
    shape = (NUM_PROMPT, laboratory.num_new)
    jobs = [Job(r.prompt, r.max_tokens) for r in laboratory.streams(shape)]
    loop = asyncio.get_running_loop()
    offline = await loop.run_in_executor(laboratory.worker, run_offline, jobs)
    found: dict[str, Numbers] = {}
    for stack, server in laboratory.served.items():
        http = tokens_per_second(await server.send(laboratory.streams(shape)))
        found[stack] = {
            "offline_tok_s": offline,
            "http_tok_s": http,
            "loss": 1 - http / offline,
        }
    return found


async def ask_late(laboratory: Laboratory) -> dict[str, Numbers]:
    """Send short requests to an idle server, then to one that is busy."""
    found: dict[str, Numbers] = {}
    for stack, server in laboratory.served.items():
        alone = []
        for _ in range(NUM_ALONE):
            alone += await server.send(requests_of(1, SHORT))
        crowd = [*laboratory.streams(LATE_STREAM), *late_requests()]
        together = await server.send(crowd)
        try:
            found[stack] = late_numbers(alone, together)
        except MinivllmError as error:  # one round less, and the others count
            print(f"left out: {error}", file=sys.stderr)
    return found


def late_numbers(
    alone: Sequence[RequestResult], together: Sequence[RequestResult]
) -> dict[str, float]:
    """Compare the first tokens of late requests with the soonest possible.

    Only those count that came when all streams were writing, and had their token before
    the first stream ended.

    Returns:
        In milliseconds, medians: "alone_ms", the first token on an idle server;
        "step_ms", between two pieces of a stream; "allowed_ms", the first and twice the
        second; "ttft_ms" and "worst_ttft_ms" of the late ones; and "num_late".

    Raises:
        MinivllmError: None counts.
    """
    streams = [r for r in together if r.usage.num_output_tokens > SHORT[1]]
    begin_s = max(stream.shown_s[0] for stream in streams)
    end_s = min(stream.end_s for stream in streams)
    late = [
        result
        for result in together
        if result.usage.num_output_tokens == SHORT[1]
        and begin_s < result.sent_s
        and result.end_s < end_s
    ]
    if not late:
        raise MinivllmError(
            f"no short request came while all streams wrote, from second {begin_s:.1f} "
            f"to {end_s:.1f}; the first was sent in second {FIRST_LATE_S:g}: change "
            "FIRST_LATE_S or LATE_STREAM"
        )
    alone_s = median(result.ttft_s for result in alone)
    step_s = median(gap for stream in streams for gap in stream.itl_s)
    waits_s = [result.ttft_s for result in late]
    return {
        "alone_ms": alone_s * 1e3,
        "step_ms": step_s * 1e3,
        "allowed_ms": (alone_s + 2 * step_s) * 1e3,
        "ttft_ms": median(waits_s) * 1e3,
        "worst_ttft_ms": max(waits_s) * 1e3,
        "num_late": len(late),
    }


class Guest(NamedTuple):
    """A connection that has asked once, and now is silent."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def come(url: str) -> Guest:
    """Open a connection, ask for /health, and leave it open."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise MinivllmError(f"/health answers {head[:40]!r}: is the server well?")
    return Guest(reader, writer)


async def ask_idle(laboratory: Laboratory) -> dict[str, Numbers]:
    """Run streams without guests, then with them."""
    found: dict[str, Numbers] = {}
    for stack, server in laboratory.served.items():
        streams, more = (laboratory.streams(IDLE_STREAM) for _ in range(2))
        without = tokens_per_second(await server.send(streams))
        guests = [await come(server.url) for _ in range(laboratory.num_idle)]
        among = tokens_per_second(await server.send(more))
        num_open = sum(not guest.reader.at_eof() for guest in guests)
        for guest in guests:
            guest.writer.close()
        found[stack] = {
            "without_tok_s": without,
            "with_tok_s": among,
            "loss": 1 - among / without,
            "num_open": num_open,
        }
    return found


async def ask_memory(laboratory: Laboratory) -> dict[str, Numbers]:
    """Let guests come to a new server, which has no memory left of earlier ones."""
    found: dict[str, Numbers] = {}
    for stack, server in laboratory.served.items():
        guests = [await come(server.url)]  # what the first one alone costs is code
        before_mib = resident_mib(server.pid)
        guests += [await come(server.url) for _ in range(laboratory.num_idle)]
        after_mib = resident_mib(server.pid)
        for guest in guests:
            guest.writer.close()
        found[stack] = {
            "rss_mib": before_mib,
            "more_rss_mib": None if before_mib is None else after_mib - before_mib,
        }
    return found


def resident_mib(pid: int) -> float | None:
    """Return the memory of a process, in MiB; None where there is no /proc."""
    path = Path(f"/proc/{pid}/statm")
    if not path.exists():
        return None
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


# Repetitions, and what is told of them.

ASK = {
    "memory": ask_memory,
    "throughput": ask_throughput,
    "late": ask_late,
    "idle": ask_idle,
}


@dataclass(slots=True)
class Row:
    """The repetitions of one question to one stack.

    Attributes:
        question: Its name.
        stack: The name of the stack.
        tries: The numbers of each repetition.
        other_cores: Cores that other processes used meanwhile; None if unknown.
    """

    question: str
    stack: str
    tries: list[Numbers]
    other_cores: list[float | None]

    def spread(self, name: str) -> list[float] | None:
        """Return median, least and greatest of a number; None if it is unknown."""
        values = [numbers[name] for numbers in self.tries]
        if None in values:
            return None
        return [float(f"{of(values):.4g}") for of in (median, min, max)]

    def num_quiet(self) -> int | None:
        """Return how many repetitions no other process disturbed; None if unknown."""
        if None in self.other_cores:
            return None
        return sum(cores < QUIET_CORES for cores in self.other_cores)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "question": self.question,
            "stack": self.stack,
            **{name: self.spread(name) for name in self.tries[0]},
            "reps": len(self.tries),
            "quiet": self.num_quiet(),
        }


async def repeat(
    laboratory: Laboratory, questions: Sequence[str], num_reps: int
) -> list[dict[str, Any]]:
    """Ask for memory first and once; then all else in turns, after a warm-up."""
    rows: dict[tuple[str, str], Row] = {}

    async def ask(question: str, is_counted: bool) -> None:
        with Bystanders() as bystanders:
            found = await ASK[question](laboratory)
        if not is_counted:
            return
        for stack, numbers in found.items():
            row = rows.setdefault((question, stack), Row(question, stack, [], []))
            row.tries.append(numbers)
            row.other_cores.append(bystanders.other_cores)

    if "memory" in questions:
        await ask("memory", is_counted=True)
    for repetition in range(1 + num_reps):
        for question in questions:
            if question != "memory":
                await ask(question, is_counted=repetition > 0)
        print(f"round {repetition} of {num_reps}", file=sys.stderr)
    return [row.as_json() for row in rows.values()]


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start everything, ask, and end it again."""
    async with AsyncExitStack() as stack:
        served = {
            name: await stack.enter_async_context(serving(name, arguments))
            for name in arguments.stacks
        }
        worker = stack.enter_context(offline_engine(arguments))
        laboratory = Laboratory(
            served, worker, arguments.streams, arguments.idle, arguments.new_tokens
        )
        return await repeat(laboratory, arguments.only, arguments.reps)


COLUMNS = {
    "throughput": ("offline_tok_s", "http_tok_s", "loss"),
    "late": ("alone_ms", "step_ms", "allowed_ms", "ttft_ms", "worst_ttft_ms"),
    "idle": ("without_tok_s", "with_tok_s", "loss", "num_open"),
    "memory": ("rss_mib", "more_rss_mib"),
}


def cell(name: str, spread: Sequence[float] | None) -> str:
    """Write a median, and the range below it."""
    if spread is None:
        return "unknown"
    texts = [f"{v:.1%}" if name == "loss" else three_digits(v) for v in spread]
    return f"{texts[0]}<br>{texts[1]} to {texts[2]}"


def table(record: dict[str, Any]) -> str:
    """Write a record as Markdown."""
    about = f"{record['streams']} streams, {record['idle']} guests; {record['date']}"
    lines = [f"{machine_line(record['machine'])}; {about}."]
    for question, columns in COLUMNS.items():
        rows = [row for row in record["rows"] if row["question"] == question]
        if not rows:
            continue
        header = (question, *columns, "quiet")
        lines += ["", f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
        for row in rows:
            cells = [cell(name, row[name]) for name in columns]
            quiet = "unknown" if row["quiet"] is None else row["quiet"]
            words = (STACKS[row["stack"]], *cells, f"{quiet} of {row['reps']}")
            lines.append(f"| {' | '.join(words)} |")
    return "\n".join([*lines, "", f"`{record['command']}`"])


def tell(record: dict[str, Any], page: str, out: Path | None) -> None:
    """Print a table; write it and its record into two files, if there is a path."""
    print(page)
    if out:
        out.write_text(f"{json.dumps(record, indent=1)}\n", encoding="utf-8")
        out.with_suffix(".md").write_text(f"{page}\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Return the versions of what HTTP passes through."""
    found = {}
    for name in ("uvicorn", "h11", *FAST_PACKAGES, "fastapi", "aiohttp"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this script."""
    parser = argparse.ArgumentParser(description="Measure what serving costs.")
    add = parser.add_argument
    add("--out", type=Path, help="a .json file to write; its table goes beside it")
    add("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    add("--backend", default="auto", help="(default: %(default)s)")
    add("--stacks", nargs="+", choices=STACKS, default=list(STACKS), metavar="NAME")
    add("--only", nargs="+", choices=ASK, default=list(ASK), metavar="QUESTION")
    add("--reps", type=int, default=7, help="repetitions that count (default: 7)")
    add("--streams", type=int, default=16, help="(default: 16)")
    add("--new-tokens", type=int, default=NUM_NEW, help="of a stream (default: 64)")
    add("--idle", type=int, default=200, help="silent connections (default: 200)")
    return parser


def check_packages(stacks: Sequence[str]) -> None:
    """Refuse a stack that is not installed.

    Raises:
        BackendUnavailable: It is not.
    """
    missing = [n for n in FAST_PACKAGES if importlib.util.find_spec(n) is None]
    if "fast" in stacks and missing:
        raise BackendUnavailable(
            f"the stack fast needs {', '.join(missing)}: pip install "
            f"{' '.join(missing)}, or measure --stacks plain"
        )


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the files."""
    words = sys.argv[1:] if words is None else words
    arguments = make_parser().parse_args(words)
    set_threads(1)  # of all processes that are started here
    try:
        check_packages(arguments.stacks)
        rows = asyncio.run(measure(arguments))
    except MinivllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    record = {
        "machine": describe_machine(),
        "minivllm": minivllm.__version__,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.server", *words]),
        "model": arguments.model,
        "threads": 1,
        "streams": arguments.streams,
        "idle": arguments.idle,
        "new_tokens": arguments.new_tokens,
        "versions": versions(),
        "rows": rows,
    }
    tell(record, table(record), arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
