"""The subcommand `bench serve`: send many requests to a server, say how they fared.

The table goes to standard output, progress to standard error.

In vLLM: vllm/entrypoints/cli/benchmark/serve.py (BenchmarkServingSubcommand).
Source: appendix A31, "Load".
"""

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from minivllm.benchmarks.workloads import HIGHEST_ID
from minivllm.cli.bench import figure_file, output_file
from minivllm.cli.generate import json_object
from minivllm.cli.main import FAILED, INTERRUPTED
from minivllm.cli.options import integer

if TYPE_CHECKING:
    from minivllm.benchmarks.load import LoadRequest, RequestResult

EXAMPLES = """\
examples:
  minivllm bench serve
  minivllm bench serve --rate 4 --num-prompts 200 --goodput ttft:200 tpot:50
  minivllm bench serve --endpoint chat --input-len 300 --max-concurrency 8
  minivllm bench serve --dataset arrivals.jsonl --out results.json --plot load.svg

a line of a dataset:
  {"arrival_s": 0.25, "num_prompt_tokens": 374, "max_tokens": 44}
instead of num_prompt_tokens also prompt, messages or prompt_token_ids
"""

PROMISES = ("ttft", "tpot", "e2el")


def rate(text: str) -> float:
    """Parse requests per second, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0, and not inf")
    return value


def seconds(text: str) -> float:
    """Parse seconds, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0")
    return value


def promise(text: str) -> tuple[str, float]:
    """Parse a promise such as ttft:200, for argparse."""
    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if name not in PROMISES or not 0 < limit < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no promise such as ttft:200: name one of "
            f"{', '.join(PROMISES)}, and milliseconds above 0"
        )
    return name, limit


def server_url(text: str) -> str:
    """Parse the address of a server, for argparse."""
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_valid = is_valid and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:  # the port is no number
        is_valid = False
    if not is_valid:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address such as http://127.0.0.1:8000"
        )
    return text.rstrip("/").removesuffix("/v1")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add = parser.add_argument
    add(
        "--url",
        type=server_url,
        default="http://127.0.0.1:8000",
        help="where the server is (default: %(default)s)",
    )
    add("--model", metavar="NAME", help="(default: the first that the server names)")
    add(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("OPENAI_API_KEY"),
        help="for servers that want one (default: the variable OPENAI_API_KEY)",
    )
    add(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="what to ask for (default: %(default)s)",
    )
    add_workload_options(parser)
    add(
        "--max-concurrency",
        type=integer(1),
        metavar="N",
        help="send no more while N requests are on the way; then the table says how "
        "long the others were kept back (default: no limit)",
    )
    add(
        "--goodput",
        type=promise,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count the requests that keep these: ttft, tpot, e2el, in milliseconds",
    )
    add(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="more fields of each request, such as '{\"top_k\": 20}'",
    )
    add(
        "--request-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="a request that takes longer has failed; 0 for no limit (default: 600)",
    )
    add(
        "--ready-timeout",
        type=seconds,
        default=30.0,
        metavar="S",
        help="how long to wait for a server that is not ready yet (default: 30)",
    )
    add("--out", type=output_file, metavar="FILE", help="write all results as JSON")
    add(
        "--plot",
        type=figure_file,
        metavar="FILE",
        help="draw them into an .svg, .png or .pdf file (needs matplotlib)",
    )
    parser.set_defaults(refuse=parser.error)


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is sent, and when."""
    add = parser.add_argument
    add(
        "--rate",
        type=rate,
        metavar="R",
        help="requests per second, at random times (default: inf, all at once, or as "
        "the dataset says)",
    )
    add(
        "--num-prompts",
        type=integer(1),
        metavar="N",
        help="requests (default: 64, or the whole dataset)",
    )
    add(
        "--input-len",
        type=integer(1),
        default=128,
        metavar="N",
        help="tokens of a made-up prompt (default: %(default)s)",
    )
    add(
        "--output-len",
        type=integer(1),
        default=32,
        metavar="N",
        help="tokens of an answer, at most (default: %(default)s)",
    )
    add(
        "--prefix-len",
        type=integer(0),
        default=0,
        metavar="N",
        help="tokens before those, the same for all made-up prompts (default: 0)",
    )
    add(
        "--text",
        action="store_true",
        help="make prompts of words, about as many as tokens are asked for; a chat "
        "always has them, other prompts are token ids",
    )
    add(
        "--vocab-size",
        type=integer(2),
        default=HIGHEST_ID,
        metavar="N",
        help="draw token ids below N (default: %(default)s)",
    )
    add(
        "--dataset",
        metavar="FILE",
        help="send what this file says, a JSON object in each line",
    )
    add("--ignore-eos", action="store_true", help="let no answer end before its length")
    add(
        "--seed",
        type=integer(0),
        default=0,
        metavar="N",
        help="of prompts and times (default: 0)",
    )


def make_requests(arguments: argparse.Namespace) -> list["LoadRequest"]:
    """Return what will be sent, and when."""
    from pathlib import Path

    from minivllm.benchmarks.load import poisson_arrivals
    from minivllm.benchmarks.load_requests import (
        PromptMaker,
        random_requests,
        recorded_requests,
    )

    maker = PromptMaker(
        as_text=arguments.text or arguments.endpoint == "chat",
        vocab_size=arguments.vocab_size,
        prefix_len=arguments.prefix_len,
        seed=arguments.seed,
    )
    if arguments.dataset:
        requests = recorded_requests(
            Path(arguments.dataset), maker, arguments.output_len, arguments.endpoint
        )[: arguments.num_prompts]
    else:
        requests = random_requests(
            maker,
            arguments.num_prompts or 64,
            arguments.input_len,
            arguments.output_len,
        )
    if arguments.rate is None:
        return requests
    times = poisson_arrivals(arguments.rate, len(requests), arguments.seed)
    return [
        replace(request, arrival_s=when)
        for request, when in zip(requests, times, strict=True)
    ]


async def send_all(
    arguments: argparse.Namespace,
    requests: Sequence["LoadRequest"],
    results: list["RequestResult"],
) -> None:
    """Wait for the server, send everything, and fill the list of results."""
    from tqdm import tqdm

    from minivllm.benchmarks.load import run_load
    from minivllm.benchmarks.load_client import (
        OpenAISender,
        first_model,
        open_session,
        wait_until_ready,
    )

    timeout_s = arguments.request_timeout or None
    async with open_session(arguments.api_key, timeout_s) as session:
        url = arguments.url
        await wait_until_ready(session, url, arguments.ready_timeout)
        if arguments.model is None:
            arguments.model = await first_model(session, url)
        more = {"ignore_eos": True} if arguments.ignore_eos else {}
        sender = OpenAISender(
            session,
            url,
            arguments.model,
            arguments.endpoint,
            more | arguments.extra_body,
        )
        # None: a bar only if standard error is a terminal.
        with tqdm(total=len(requests), unit="request", disable=None) as bar:

            def note(result: "RequestResult") -> None:
                results.append(result)
                bar.update()

            await run_load(
                sender,
                requests,
                max_concurrency=arguments.max_concurrency,
                note=note,
            )


def run(arguments: argparse.Namespace) -> int:
    """Send the load, print and write what came of it, and return the exit code."""
    from minivllm.benchmarks.load_report import (
        load_record,
        load_table,
        save_load_figure,
        summarise_load,
    )
    from minivllm.benchmarks.report import check_matplotlib

    slo_ms = dict(arguments.goodput)
    if len(slo_ms) < len(arguments.goodput):
        arguments.refuse("argument --goodput: one of its names is given twice")
    if arguments.plot:
        check_matplotlib("--plot")
    requests = make_requests(arguments)
    results: list[RequestResult] = []
    is_interrupted = False
    try:
        asyncio.run(send_all(arguments, requests, results))
    except KeyboardInterrupt:
        if not results:
            raise
        is_interrupted = True
        num_missing = len(requests) - len(results)
        print(
            f"minivllm: interrupted; {num_missing} of {len(requests)} requests were "
            "not due yet",
            file=sys.stderr,
        )
    summary = summarise_load(results, slo_ms)
    print(load_table(summary))
    if arguments.out:
        about = describe_load(arguments)
        text = json.dumps(about | load_record(summary, results), allow_nan=False)
        arguments.out.write_text(text + "\n", encoding="utf-8")
    if arguments.plot:
        title = f"{arguments.model} at {arguments.url}"
        save_load_figure(arguments.plot, results, title, slo_ms)
    if is_interrupted:
        return INTERRUPTED
    return 0 if summary.num_completed else FAILED


def describe_load(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that a file of results begins with; the key stays out."""
    names = (
        *("url", "model", "endpoint", "rate", "input_len", "output_len", "prefix_len"),
        *("text", "dataset", "ignore_eos", "seed", "max_concurrency", "extra_body"),
    )
    settings = {name: getattr(arguments, name) for name in names}
    if settings["rate"] == math.inf:
        settings["rate"] = "inf"
    return settings
