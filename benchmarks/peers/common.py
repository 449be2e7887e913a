"""What all runners share: options, threads, and the lines they print.

Needs the standard library only, as do the modules of minivllm that it uses.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm.benchmarks.machine import num_cores
from minivllm.benchmarks.measure import Timing, measure
from minivllm.benchmarks.workloads import WORKLOADS, Job


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every runner has."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("model", help="a folder in the Hugging Face layout; for llama.cpp, a GGUF file")
    add("--dtype", default="bfloat16", help="of the weights (default: %(default)s)")
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    add("--reps", type=int, default=3, help="repetitions that count (default: 3)")
    add("--threads", type=int, default=num_cores(), help="default: all cores")
    add("--wait", type=float, default=60.0, help="seconds to wait for a quiet machine")
    add("--no-prefix-caching", action="store_true")
    add("--dump", type=Path, help="write the token ids of the first repetition here")
    return parser


def set_threads(count: int) -> None:
    """Tell the libraries that are loaded later how many threads to use."""
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ[f"{library}_NUM_THREADS"] = str(count)


def run_all(
    arguments: argparse.Namespace,
    engine: str,
    version: str,
    run: Callable[[list[Job]], Timing],
    **more: Any,
) -> None:
    """Measure the workloads and print a JSON object for each.

    A repetition that other processes disturbed is repeated, up to three times as many
    as count in all.

    Args:
        arguments: Of `make_parser`.
        engine: Its name.
        version: Its version.
        run: Does all jobs, at most 16 at the same time.
        **more: What else the line is to say.
    """
    answers: dict[str, Any] = {}
    for workload in arguments.workloads:
        timings: list[Timing] = []

        def run_and_keep(jobs: list[Job], kept: list[Timing] = timings) -> Timing:
            timing = run(jobs)
            kept.append(timing)
            return timing

        result = measure(
            workload,
            run_and_keep,
            num_counted=arguments.reps,
            max_tries=3 * arguments.reps,
            wait_s=arguments.wait,
        )
        answers[workload] = [list(token_ids) for token_ids in timings[1].token_ids]
        record = {
            "engine": engine,
            "version": version,
            "dtype": arguments.dtype,
            "threads": arguments.threads,
            "prefix_caching": not arguments.no_prefix_caching,
        }
        print(json.dumps(record | more | result.as_json()), flush=True)
    if arguments.dump:
        arguments.dump.write_text(json.dumps(answers))
