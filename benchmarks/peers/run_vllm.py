"""Run the workloads on vLLM's CPU build: python -m benchmarks.peers.run_vllm MODEL.

The engine's own step loop shows when each first token comes. Run it with LD_PRELOAD as
the README says: vLLM wants Intel's OpenMP and tcmalloc.
"""

import itertools
import os
import time

from benchmarks.peers.common import make_parser, run_all, set_threads
from minivllm.benchmarks.measure import Timing
from minivllm.benchmarks.workloads import MAX_NUM_SEQS, Job


def main() -> None:
    """Measure vLLM in this process."""
    parser = make_parser("Run the workloads on vLLM.")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    cores = "0" if arguments.threads == 1 else f"0-{arguments.threads - 1}"
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    llm = vllm.LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=1024,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=2048,
        enforce_eager=arguments.eager,
        enable_prefix_caching=not arguments.no_prefix_caching,
        disable_log_stats=True,
    )
    engine = llm.llm_engine
    numbers = itertools.count()

    def run(jobs: list[Job]) -> Timing:
        start = time.perf_counter()
        index_of = {}
        for index, job in enumerate(jobs):
            request_id = f"r{next(numbers)}"
            index_of[request_id] = index
            engine.add_request(
                request_id,
                {"prompt_token_ids": job.prompt_token_ids},
                vllm.SamplingParams(
                    temperature=0.0,
                    max_tokens=job.num_output_tokens,
                    ignore_eos=True,
                    detokenize=False,
                ),
            )
        first_s: list[float | None] = [None] * len(jobs)
        last_s = [0.0] * len(jobs)
        answers: list[list[int]] = [[]] * len(jobs)
        while engine.has_unfinished_requests():
            for output in engine.step():
                now_s = time.perf_counter() - start
                # vLLM may add a suffix to the name of a request.
                index = index_of[output.request_id.split("-")[0]]
                token_ids = output.outputs[0].token_ids
                if first_s[index] is None and token_ids:
                    first_s[index] = now_s
                if output.finished:
                    last_s[index], answers[index] = now_s, list(token_ids)
        return Timing(first_s, last_s, time.perf_counter() - start, answers)

    name = "vLLM" + " eager" * arguments.eager
    run_all(arguments, name, vllm.__version__, run)


if __name__ == "__main__":
    main()
