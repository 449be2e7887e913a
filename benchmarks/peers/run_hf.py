"""Run the workloads on transformers: python -m benchmarks.peers.run_hf MODEL.

Static batches (`generate`): 16 requests at a time in the order they came, padded on the
left, each batch until its longest answer ends; only the tokens asked for count. The
keys of a shared prefix are not reused. When a first token comes is seen for a single
request only, since a streamer is refused for more.

Continuous batching: transformers' own manager, which shares blocks of equal prefixes.
"""

import os
import time
from typing import Any

from benchmarks.peers.common import make_parser, run_all, set_threads
from minivllm.benchmarks.measure import Timing
from minivllm.benchmarks.workloads import MAX_NUM_SEQS, Job

PAD = 2
PAGE_SIZE = 32
CACHE_TOKENS = MAX_NUM_SEQS * 640  # more than the longest request of any workload


class Clock:
    """A streamer: `generate` calls it once with the prompt, then once per token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Note when a token came."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


class StaticBatches:
    """Runs jobs with `generate`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, jobs: list[Job]) -> Timing:
        """Do batch after batch."""
        start = time.perf_counter()
        first_s: list[float | None] = []
        last_s: list[float] = []
        answers: list[list[int]] = []
        for begin in range(0, len(jobs), MAX_NUM_SEQS):
            batch = jobs[begin : begin + MAX_NUM_SEQS]
            clock = Clock()
            answers += self.generate(batch, clock)
            seen = clock.times[1] - start if clock.times else None
            first_s += [seen] * len(batch)
            last_s += [time.perf_counter() - start] * len(batch)
        return Timing(first_s, last_s, time.perf_counter() - start, answers)

    def generate(self, batch: list[Job], clock: Clock) -> list[list[int]]:
        """Return the answers of one batch."""
        import torch
        from transformers import GenerationConfig

        width = max(len(job.prompt_token_ids) for job in batch)
        longest = max(job.num_output_tokens for job in batch)
        input_ids = torch.full((len(batch), width), PAD)
        mask = torch.zeros_like(input_ids)
        for row, job in enumerate(batch):
            padding = width - len(job.prompt_token_ids)
            input_ids[row, padding:] = torch.tensor(job.prompt_token_ids)
            mask[row, padding:] = 1
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=longest,
            min_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        streamer = {"streamer": clock} if len(batch) == 1 else {}
        with torch.inference_mode():
            token_ids = self.model.generate(
                input_ids, attention_mask=mask, generation_config=config, **streamer
            )
        return [
            token_ids[row, width : width + job.num_output_tokens].tolist()
            for row, job in enumerate(batch)
        ]


class ContinuousBatching:
    """Runs jobs with transformers' continuous batching manager."""

    def __init__(self, model: Any, prefix_caching: bool) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=128, eos_token_id=-1, pad_token_id=PAD
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE,
                num_blocks=CACHE_TOKENS // PAGE_SIZE,
                max_batch_tokens=1024,
                max_requests_per_batch=MAX_NUM_SEQS,
                use_cuda_graph=False,
                allow_block_sharing=prefix_caching,
            ),
        )
        self.manager.start()

    def __call__(self, jobs: list[Job]) -> Timing:
        """Submit all jobs and collect what comes."""
        start = time.perf_counter()
        first_s: list[float | None] = [None] * len(jobs)
        last_s = [0.0] * len(jobs)
        answers: list[list[int]] = [[]] * len(jobs)
        index_of = {
            self.manager.add_request(
                list(job.prompt_token_ids),
                max_new_tokens=job.num_output_tokens,
                eos_token_id=-1,
                streaming=True,
            ): index
            for index, job in enumerate(jobs)
        }
        num_left = len(jobs)
        while num_left:
            result = self.manager.get_result(timeout=5)
            if result is None:
                if not self.manager.is_running():
                    raise RuntimeError("the manager's thread has ended")
                continue
            if result.error:
                raise RuntimeError(str(result.error))
            index, now_s = index_of[result.request_id], time.perf_counter() - start
            if first_s[index] is None and result.generated_tokens:
                first_s[index] = now_s
            if result.is_finished():
                last_s[index], answers[index] = now_s, list(result.generated_tokens)
                num_left -= 1
        return Timing(first_s, last_s, time.perf_counter() - start, answers)

    def close(self) -> None:
        """End the manager's thread."""
        self.manager.stop(block=True, timeout=5)


def main() -> None:
    """Measure transformers."""
    parser = make_parser("Run the workloads on transformers.")
    parser.add_argument("--continuous", action="store_true", help="continuous batching")
    parser.add_argument("--attention", default="sdpa", help="default: %(default)s")
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model,
        dtype=getattr(torch, arguments.dtype),
        attn_implementation=arguments.attention,
    ).eval()
    version = transformers.__version__
    torch_version = {"torch": torch.__version__}
    if not arguments.continuous:
        arguments.no_prefix_caching = True
        run = StaticBatches(model)
        run_all(arguments, "transformers generate", version, run, **torch_version)
        return
    run = ContinuousBatching(model, not arguments.no_prefix_caching)
    name = "transformers continuous batching"
    run_all(arguments, name, version, run, **torch_version)
    run.close()


if __name__ == "__main__":
    main()
