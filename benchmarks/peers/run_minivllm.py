"""Run the workloads on minivllm: python -m benchmarks.peers.run_minivllm MODEL."""

from benchmarks.peers.common import make_parser, run_all, set_threads
from minivllm import __version__
from minivllm.benchmarks.workloads import MAX_NUM_SEQS


def main() -> None:
    """Measure the engine itself, without text."""
    parser = make_parser("Run the workloads on minivllm.")
    parser.add_argument("--backend", default="torch", choices=("torch", "numpy"))
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    # NumPy and torch read the number of threads when they load.
    from minivllm.benchmarks.offline import run_jobs
    from minivllm.engine.engine import LLMEngine
    from minivllm.runners.build import build_runner

    runner, _ = build_runner(
        arguments.model,
        backend=arguments.backend,
        dtype=arguments.dtype,
        device="cpu",
    )
    engine = LLMEngine(
        runner,
        max_num_seqs=MAX_NUM_SEQS,
        enable_prefix_caching=not arguments.no_prefix_caching,
    )
    run_all(
        arguments,
        "minivllm" if arguments.backend == "torch" else "minivllm numpy",
        __version__,
        lambda jobs: run_jobs(engine, jobs),
    )


if __name__ == "__main__":
    main()
