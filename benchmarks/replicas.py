"""What replicas buy on one machine: one engine, one behind Ray, and two behind Ray.

python -m benchmarks.replicas --out benchmarks/results/replicas.json

The same requests go to three servers, one after another, in several rounds. All of them
have the same cores: what is measured is what Ray's proxy costs, and what a batch loses
when it is cut in two. On machines of its own each replica would have cores of its own.
"""

import argparse
import asyncio
import datetime
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import ray

import minivllm
from benchmarks.server import requests_of, tell, wait_for
from minivllm.benchmarks.load import RequestResult, run_load
from minivllm.benchmarks.load_client import OpenAISender, open_session
from minivllm.benchmarks.load_report import summarise_load
from minivllm.benchmarks.machine import describe_machine, machine_line
from minivllm.benchmarks.measure import QUIET_CORES, Bystanders
from minivllm.config import DEFAULT_MODEL
from minivllm.errors import MinivllmError

NUM_CORES = os.cpu_count() or 1
SERVERS = {
    "one engine": ["--threads", str(NUM_CORES)],
    "one replica": ["--threads", str(NUM_CORES), "--replicas", "1"],
    "two replicas": ["--threads", str(max(1, NUM_CORES // 2)), "--replicas", "2"],
}
SHAPE = (64, 64)  # tokens of a prompt, and of its answer


@asynccontextmanager
async def serving(options: Sequence[str], model: str) -> AsyncIterator[OpenAISender]:
    """Start a server, wait until it is ready, and end it."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]  # free now, and hardly taken a moment later
    command = [sys.executable, "-m", "minivllm", "serve", "--model", model, *options]
    command += ["--port", str(port), "--served-model-name", "model"]
    process = subprocess.Popen([*command, "--log-level", "warning"])
    try:
        async with open_session(timeout_s=600.0) as session:
            url = f"http://127.0.0.1:{port}"
            await wait_for(process, session, url)
            yield OpenAISender(session, url, "model", extra_body={"ignore_eos": True})
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def load(
    sender: OpenAISender, num_requests: int, num_streams: int
) -> list[RequestResult]:
    """Send requests, so many at the same time.

    Raises:
        MinivllmError: One of them failed.
    """
    requests = requests_of(num_requests, SHAPE)
    results = await run_load(sender, requests, max_concurrency=num_streams)
    for result in results:
        if result.error_kind is not None:
            raise MinivllmError(f"a request failed: {result.error}")
    return results


def numbers_of(
    results: Sequence[RequestResult], other_cores: float | None
) -> dict[str, float | None]:
    """Return what is told of one try."""
    summary = summarise_load(results)
    return {
        "tok_s": summary.rate(summary.num_output_tokens),
        "ttft_ms": 1e3 * median(result.ttft_s for result in results),
        "tpot_ms": 1e3 * median(result.tpot_s for result in results),
        "other_cores": other_cores,
    }


async def measure(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the numbers of every try, for each server."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SERVERS}
    for _ in range(arguments.rounds):
        for name, options in SERVERS.items():
            async with serving(options, arguments.model) as sender:
                await load(sender, arguments.streams, arguments.streams)  # a warm-up
                for _ in range(arguments.reps):
                    with Bystanders() as bystanders:
                        results = await load(
                            sender, arguments.requests, arguments.streams
                        )
                    found[name].append(numbers_of(results, bystanders.other_cores))
            print(f"{name}: {found[name][-1]}", file=sys.stderr)
    return found


def row_of(name: str, tries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return median, least and greatest of each number."""
    row: dict[str, Any] = {"server": name, "reps": len(tries)}
    for key in ("tok_s", "ttft_ms", "tpot_ms"):
        values = [numbers[key] for numbers in tries]
        row[key] = [float(f"{of(values):.4g}") for of in (median, min, max)]
    others = [numbers["other_cores"] for numbers in tries]
    known = None not in others
    # Ray's own processes count as others: they belong to the cost.
    row["quiet"] = sum(c < QUIET_CORES for c in others) if known else None
    return row


def table(record: dict[str, Any]) -> str:
    """Write a record as Markdown."""
    about = f"{record['requests']} requests, {record['streams']} at the same time"
    lines = [f"{machine_line(record['machine'])}; {about}; {record['date']}.", ""]
    lines.append("| server | tokens/s | TTFT, ms | TPOT, ms |")
    lines.append("| --- | --- | --- | --- |")
    for row in record["rows"]:
        cells = [
            f"{row[key][0]:.4g}<br>{row[key][1]:.4g} to {row[key][2]:.4g}"
            for key in ("tok_s", "ttft_ms", "tpot_ms")
        ]
        lines.append(f"| {row['server']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"`{record['command']}`"])


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the files."""
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(description="Measure what replicas buy.")
    add = parser.add_argument
    add("--out", type=Path, help="a .json file to write; its table goes beside it")
    add("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    add("--rounds", type=int, default=2, help="starts of each server (default: 2)")
    add("--reps", type=int, default=3, help="repetitions of a round (default: 3)")
    add("--requests", type=int, default=64, help="(default: 64)")
    add("--streams", type=int, default=16, help="at the same time (default: 16)")
    arguments = parser.parse_args(words)
    try:
        found = asyncio.run(measure(arguments))
    except MinivllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    record = {
        "machine": describe_machine(),
        "minivllm": minivllm.__version__,
        "ray": ray.__version__,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.replicas", *words]),
        "model": arguments.model,
        "requests": arguments.requests,
        "streams": arguments.streams,
        "shape": SHAPE,
        "rows": [row_of(name, tries) for name, tries in found.items()],
    }
    tell(record, table(record), arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
