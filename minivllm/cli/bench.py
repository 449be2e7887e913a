"""The subcommand `bench`: how fast the engine is here, and how fast it could be.

The tables go to standard output, progress to standard error.

In vLLM: vllm/entrypoints/cli/benchmark/throughput.py (BenchmarkThroughputSubcommand).
Source: appendix A9, "Measuring"; appendix A12, "A sampler for a whole batch"; appendix
    A21, "CUDA graphs"; appendix A22, "Profiling"; appendix A25, "Experts in the
    engine".
"""

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import __version__
from minivllm.benchmarks.workloads import (
    LADDER_BATCH,
    MAX_NUM_SEQS,
    WORKLOADS,
    ladder_jobs,
)
from minivllm.cli.options import add_model_options, apply_model_options, integer

if TYPE_CHECKING:
    from minivllm.benchmarks.profile import StepProfile
    from minivllm.benchmarks.report import Bar
    from minivllm.engine.engine import LLMEngine

LADDER = "ladder"
FIGURE_TYPES = (".svg", ".png", ".pdf")

SAMPLER = "sampler"

PROFILE = "profile"

MOE = "moe"

DESCRIPTIONS = {
    **{name: workload.description for name, workload in WORKLOADS.items()},
    LADDER: "8 small requests, from naive generation to the engine",
    SAMPLER: "64 rows of scores, sampled with many sets of parameters",
    PROFILE: "steps of 1 and 16 requests and a prompt, part by part",
    MOE: "a layer of experts, next to a dense one as wide as those read",
}
EXAMPLES = f"""\
workloads (greedy, end tokens ignored, token ids in and out, all submitted at once):
{chr(10).join(f"  {name:8}{text}" for name, text in DESCRIPTIONS.items())}

examples:
  minivllm bench
  minivllm bench ladder --threads 2 --figure ladder.svg
  minivllm bench W1 W2 --backend torch --dtype float32 --json results.jsonl
"""


def workload(text: str) -> str:
    """Parse the name of a workload, for argparse."""
    if text not in DESCRIPTIONS:
        nearest = difflib.get_close_matches(text, DESCRIPTIONS, n=1, cutoff=0.5)
        hint = f": did you mean {nearest[0]}?" if nearest else ""
        raise argparse.ArgumentTypeError(f"{text!r} is no workload{hint}")
    return text


def output_file(text: str) -> Path:
    """Parse the path of a file that will be written, for argparse."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in an existing folder")
    return path


def figure_file(text: str) -> Path:
    """Parse the path of a figure, for argparse."""
    path = output_file(text)
    if path.suffix not in FIGURE_TYPES:
        raise argparse.ArgumentTypeError(
            f"{text!r} must end in {', '.join(FIGURE_TYPES)}"
        )
    return path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add = parser.add_argument
    add(
        "workloads",
        metavar="WORKLOAD",
        nargs="*",
        type=workload,
        default=list(WORKLOADS),
        help=f"{', '.join(DESCRIPTIONS)} (default: {' '.join(WORKLOADS)})",
    )
    add(
        "--reps",
        type=integer(1),
        default=3,
        metavar="N",
        help="repetitions that count, after one warm-up (default: 3)",
    )
    add(
        "--json",
        type=output_file,
        metavar="FILE",
        help="append the results, one JSON object a line",
    )
    add(
        "--figure",
        type=figure_file,
        metavar="FILE",
        help="draw the bars into an .svg, .png or .pdf file (needs matplotlib)",
    )
    add(
        "--max-num-seqs",
        type=integer(1),
        default=MAX_NUM_SEQS,
        metavar="N",
        help="requests that run at the same time, at most (default: %(default)s)",
    )
    add(
        "--max-num-batched-tokens",
        type=integer(1),
        default=2048,
        metavar="N",
        help="tokens in a step, at most (default: %(default)s)",
    )
    add(
        "--block-size",
        type=integer(1),
        default=16,
        metavar="N",
        help="tokens in a block of the KV cache (default: %(default)s)",
    )
    add(
        "--no-prefix-caching",
        action="store_true",
        help="compute equal beginnings of prompts again",
    )
    add_model_options(parser, "fake")


PROFILE_TOKENS = 128  # a prompt of so many has to fit into a step


def make_engine(
    arguments: argparse.Namespace, max_num_seqs: int, with_text: bool = False
) -> "LLMEngine":
    """Load the model and put an engine around it, which handles text if it has to."""
    from minivllm.engine.engine import LLMEngine
    from minivllm.runners.build import CacheConfig, build_runner

    limit = arguments.max_num_batched_tokens
    runner, tokenizer = build_runner(
        arguments.model,
        backend=arguments.backend,
        dtype=arguments.dtype,
        device=arguments.device,
        cache=CacheConfig(
            block_size=arguments.block_size,
            max_num_batched_tokens=limit,
            max_num_seqs=max_num_seqs,
            # A graph is one operation: it would hide what a profile takes apart.
            enforce_eager=arguments.enforce_eager or with_text,
        ),
    )
    return LLMEngine(
        runner,
        tokenizer=tokenizer if with_text else None,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=limit,
        enable_prefix_caching=not arguments.no_prefix_caching,
    )


def describe_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what is true of all results: engine, model and settings."""
    from minivllm.benchmarks.machine import num_threads

    return {
        "engine": "minivllm",
        "version": __version__,
        "model": Path(arguments.model).name,
        "backend": arguments.backend,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "threads": num_threads(arguments.backend),
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "block_size": arguments.block_size,
        "enforce_eager": arguments.enforce_eager,
        "prefix_caching": not arguments.no_prefix_caching,
    }


def resolve_types(arguments: argparse.Namespace, engine: "LLMEngine") -> None:
    """Replace "auto" by the number type and the device that the model has."""
    if arguments.backend == "torch":
        weight = engine.runner.decoder.norm.weight
        arguments.dtype = str(weight.dtype).removeprefix("torch.")
        arguments.device = str(weight.device)
    elif arguments.backend == "numpy":
        arguments.dtype, arguments.device = "float32", "cpu"


def show_progress(text: str) -> None:
    """Say on standard error how far it has come."""
    print(f"minivllm: {text}", file=sys.stderr, flush=True)


def run_workloads(
    arguments: argparse.Namespace, names: Sequence[str]
) -> tuple[list[dict[str, Any]], list["Bar"]]:
    """Measure workloads, print their table, and return records and bars."""
    from minivllm.benchmarks.machine import measure_limits
    from minivllm.benchmarks.measure import measure
    from minivllm.benchmarks.offline import run_jobs
    from minivllm.benchmarks.report import (
        bars_of,
        disturbances,
        limits_line,
        shares_of_limits,
        table,
    )

    engine = make_engine(arguments, arguments.max_num_seqs)
    resolve_types(arguments, engine)
    records, shares = [], {}
    results = [
        measure(
            name,
            lambda jobs: run_jobs(engine, jobs),
            num_counted=arguments.reps,
            vocab_size=engine.runner.vocab_size,
            note=show_progress,
        )
        for name in names
    ]
    if arguments.backend == "fake":
        print("limits: none, the clock of the fake backend only pretends")
    else:
        spec = engine.runner.decoder.spec
        limits = measure_limits(arguments.backend, arguments.dtype, arguments.device)
        print(limits_line(limits, spec, arguments.dtype))
        shares = shares_of_limits(results, limits, spec, arguments.dtype)
        records.append({"workload": "limits"} | limits.as_json())
    engine.runner.close()
    print(f"\n{table(results, shares)}\n")
    if arguments.backend != "fake":  # nobody can disturb a clock that pretends
        print("".join(f"{line}\n" for line in disturbances(results)), end="")
    return records + [result.as_json() for result in results], bars_of(results)


def run_ladder(
    arguments: argparse.Namespace,
) -> tuple[list[dict[str, Any]], list["Bar"]]:
    """Climb the ladder, and return records and bars."""
    from minivllm.benchmarks.ladder import climb
    from minivllm.benchmarks.measure import QUIET_CORES
    from minivllm.benchmarks.report import Bar
    from minivllm.loading.hub import resolve_model
    from minivllm.loading.loader import load_model, load_spec

    folder = resolve_model(arguments.model, progress=True)
    jobs = ladder_jobs(load_spec(folder).vocab_size)
    rungs = []
    for rung in climb(
        lambda: load_model(
            folder,
            backend=arguments.backend,
            dtype=arguments.dtype,
            device=arguments.device,
        ),
        lambda: make_engine(arguments, LADDER_BATCH),
        jobs,
        arguments.reps,
    ):
        show_progress(f"{rung.name}: {rung.rate.median:.1f} tokens/s")
        rungs.append(rung)
    print(
        f"ladder: {len(jobs)} requests, {sum(len(job[0]) for job in jobs)} tokens in "
        f"and {sum(job[1] for job in jobs)} out, {LADDER_BATCH} at the same time"
    )
    for rung in rungs:
        print(
            f"  {rung.name}: {rung.rate.median / rungs[0].rate.median:.1f} times naive "
            f"generation, {rung.num_same} of {rung.num_jobs} answers the same"
        )
        if rung.other_cores is not None and rung.other_cores >= QUIET_CORES:
            print(f"    disturbed: other processes used {rung.other_cores:.2f} cores")
    bars = [Bar(rung.name, rung.rate) for rung in rungs]
    settings = {"max_num_seqs": LADDER_BATCH}
    return [rung.as_json() | settings for rung in rungs], bars


def check_workloads(arguments: argparse.Namespace) -> None:
    """Refuse what a workload cannot do, before anything is loaded."""
    needs = {LADDER: ("torch", "numpy"), SAMPLER: ("torch",), MOE: ("torch",)}
    needs[PROFILE] = ("torch", "numpy")
    for name, backends in needs.items():
        if name in arguments.workloads and arguments.backend not in backends:
            arguments.refuse(
                f"argument WORKLOAD: {name} needs --backend {' or '.join(backends)}, "
                f"not {arguments.backend}"
            )
    limit = arguments.max_num_batched_tokens
    if PROFILE in arguments.workloads and limit < PROFILE_TOKENS:
        arguments.refuse(
            f"argument --max-num-batched-tokens: {PROFILE} computes {PROFILE_TOKENS} "
            f"tokens in one step, not {limit}"
        )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write the files that were asked for, return the exit code."""
    apply_model_options(arguments)
    check_workloads(arguments)
    # Imported only now: NumPy and torch read the number of threads when they load.
    from minivllm.benchmarks.machine import describe_machine, machine_line
    from minivllm.benchmarks.report import check_matplotlib, save_figure, text_chart

    if arguments.figure:
        check_matplotlib()
    records, bars, profiles = [], [], []
    names = [name for name in WORKLOADS if name in arguments.workloads]
    if names:
        records, bars = run_workloads(arguments, names)
    if LADDER in arguments.workloads:
        rungs, rung_bars = run_ladder(arguments)
        records, bars = records + rungs, bars + rung_bars
    if SAMPLER in arguments.workloads:
        records += run_sampler(arguments)
    if MOE in arguments.workloads:
        records += run_experts(arguments)
    if PROFILE in arguments.workloads:
        found, profiles = run_profile(arguments)
        records += found
    about, machine = describe_run(arguments), describe_machine()
    title = ", ".join(str(about[key]) for key in ("model", "backend", "dtype"))
    if bars:
        print(text_chart(bars))
    print(f"minivllm {__version__}, {title}, {about['threads']} threads")
    print(f"machine: {machine_line(machine)}")
    if arguments.json:
        with open(arguments.json, "a", encoding="utf-8") as file:
            for record in [{"workload": "machine"} | machine, *records]:
                file.write(json.dumps(about | record) + "\n")
    if arguments.figure:
        title = f"{title} on {machine['cpu']}"
        save_figure(arguments.figure, bars, title, profiles)
    return 0


def run_sampler(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure what sampling costs, print it, and return records."""
    from minivllm.benchmarks.sampler import NUM_ROWS, measure_sampler, sampler_table

    engine = make_engine(arguments, NUM_ROWS)
    resolve_types(arguments, engine)
    # A median of few is easily disturbed, and a repetition takes milliseconds.
    step_s, times = measure_sampler(engine, 5 * arguments.reps)
    engine.runner.close()
    print(f"{sampler_table(step_s, times)}\n")
    step = {"workload": SAMPLER, "params": "decode step", "ms": step_s * 1e3}
    records = [step, *(row.as_json() for row in times)]
    return [record | {"max_num_seqs": NUM_ROWS} for record in records]


def run_profile(
    arguments: argparse.Namespace,
) -> tuple[list[dict[str, Any]], list["StepProfile"]]:
    """Measure where the time of a step goes, print it, return records and profiles."""
    from minivllm.benchmarks.machine import measure_limits
    from minivllm.benchmarks.measure import QUIET_CORES, Bystanders
    from minivllm.benchmarks.profile import profile_engine, profile_table
    from minivllm.benchmarks.report import limits_line

    engine = make_engine(arguments, MAX_NUM_SEQS, with_text=True)
    resolve_types(arguments, engine)
    limits = measure_limits(arguments.backend, arguments.dtype, arguments.device)
    with Bystanders() as bystanders:
        profiles = profile_engine(
            engine, limits, 8 * arguments.reps, arguments.device, show_progress
        )
    print(limits_line(limits, engine.runner.decoder.spec, arguments.dtype))
    engine.runner.close()
    for profile in profiles:
        print(f"\n{profile_table(profile)}")
    if (bystanders.other_cores or 0) >= QUIET_CORES:
        print(
            f"\nother processes used {bystanders.other_cores:.2f} cores meanwhile: "
            "run it again on a quiet machine"
        )
    print()
    settings = {"max_num_seqs": MAX_NUM_SEQS, "enforce_eager": True}
    return [profile.as_json() | settings for profile in profiles], profiles


def run_experts(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a layer of experts, print its table, and return records."""
    from minivllm.benchmarks.experts import experts_table, measure_experts
    from minivllm.benchmarks.measure import QUIET_CORES, Bystanders
    from minivllm.loading.hub import resolve_model
    from minivllm.loading.loader import load_model

    folder = resolve_model(arguments.model, progress=True)
    options = {"dtype": arguments.dtype, "device": arguments.device}
    decoder = load_model(folder, backend="torch", **options)
    weight = decoder.norm.weight
    arguments.dtype = str(weight.dtype).removeprefix("torch.")
    arguments.device = str(weight.device)
    with Bystanders() as bystanders:
        # A median of few is easily disturbed, and a repetition takes milliseconds.
        times = measure_experts(decoder, 5 * arguments.reps, note=show_progress)
    print(experts_table(decoder.spec, times))
    if (bystanders.other_cores or 0) >= QUIET_CORES:
        print(
            f"other processes used {bystanders.other_cores:.2f} cores meanwhile: "
            "run it again on a quiet machine"
        )
    print()
    return [row.as_json() for row in times]
