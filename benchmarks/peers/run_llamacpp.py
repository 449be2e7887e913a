"""Run the workloads on llama.cpp: python -m benchmarks.peers.run_llamacpp MODEL.gguf.

llama-cpp-python has no continuous batching of its own, so this is a small loop over its
low-level calls, as llama-server has one: each `llama_decode` takes one token of every
sequence that decodes, and prompt tokens up to the batch size. Greedy, by the largest
logit. Its cache is one buffer for all sequences, float16, so that a prefix can be
copied from a running sequence to a new one.

The file says the number type; --dtype is only what the line calls it.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.common import make_parser, run_all, set_threads
from minivllm.benchmarks.measure import Timing
from minivllm.benchmarks.workloads import MAX_NUM_SEQS, Job

CONTEXT_TOKENS = MAX_NUM_SEQS * 640  # more than the longest request of any workload
BATCH_TOKENS = 512
SHORTEST_PREFIX = 32  # tokens that are worth copying


@dataclass(slots=True)
class Sequence:
    """A job that runs, in one of llama.cpp's sequences."""

    index: int
    job: Job
    sequence_id: int
    num_computed: int = 0  # of the prompt
    answer: list[int] = field(default_factory=list)


class LlamaCpp:
    """Runs jobs on a model of llama.cpp."""

    def __init__(self, path: str, num_threads: int, prefix_caching: bool) -> None:
        import llama_cpp

        self.lib = llama_cpp
        # Kept: llama.cpp calls it as long as it runs.
        self.be_silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.be_silent, None)
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}: is it a GGUF file?")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.num_threads = num_threads
        self.prefix_caching = prefix_caching
        self.contexts: dict[int, Any] = {}
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def context(self, num_sequences: int) -> Any:
        """Return an empty context for so many sequences."""
        if num_sequences not in self.contexts:
            parameters = self.lib.llama_context_default_params()
            parameters.n_ctx = CONTEXT_TOKENS
            parameters.n_batch = parameters.n_ubatch = BATCH_TOKENS
            parameters.n_seq_max, parameters.kv_unified = num_sequences, True
            parameters.n_threads = parameters.n_threads_batch = self.num_threads
            context = self.lib.llama_init_from_model(self.model, parameters)
            self.contexts[num_sequences] = context
        context = self.contexts[num_sequences]
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context), True)
        return context

    def __call__(self, jobs: list[Job]) -> Timing:
        """Do all jobs, at most 16 at the same time."""
        num_sequences = min(len(jobs), MAX_NUM_SEQS)
        context = self.context(num_sequences)
        memory = self.lib.llama_get_memory(context)
        first_s: list[float | None] = [None] * len(jobs)
        last_s = [0.0] * len(jobs)
        answers: list[list[int]] = [[]] * len(jobs)
        waiting = list(enumerate(jobs))
        running: list[Sequence] = []
        free_ids = list(range(num_sequences))
        start = time.perf_counter()
        while waiting or running:
            while waiting and free_ids:
                sequence = self.admit(*waiting[0], free_ids[0], running, memory)
                if sequence is None:
                    break
                waiting.pop(0)
                free_ids.pop(0)
                running.append(sequence)
            picked = self.fill(running)
            if self.lib.llama_decode(context, self.batch):
                raise SystemExit("llama.cpp has no room for a batch in its cache")
            for row, sequence in picked:
                sequence.answer.append(self.best_token(context, row))
            now_s = time.perf_counter() - start
            for sequence in list(running):
                index, answer = sequence.index, sequence.answer
                if answer and first_s[index] is None:
                    first_s[index] = now_s
                if len(answer) == sequence.job.num_output_tokens:
                    last_s[index], answers[index] = now_s, answer
                    running.remove(sequence)
                    free_ids.append(sequence.sequence_id)
                    self.lib.llama_memory_seq_rm(memory, sequence.sequence_id, -1, -1)
        return Timing(first_s, last_s, time.perf_counter() - start, answers)

    def admit(
        self,
        index: int,
        job: Job,
        sequence_id: int,
        running: list[Sequence],
        memory: Any,
    ) -> Sequence | None:
        """Start a job; None if it had better wait for a prefix that is computed now."""
        sequence = Sequence(index, job, sequence_id)
        source = None
        for other in running if self.prefix_caching else ():
            num_equal = count_equal(other.job, job)
            num_ready = min(num_equal, other.num_computed)
            if num_ready < num_equal and num_equal >= SHORTEST_PREFIX:
                return None
            if num_ready >= max(SHORTEST_PREFIX, sequence.num_computed + 1):
                sequence.num_computed, source = num_ready, other.sequence_id
        if source is not None:
            self.lib.llama_memory_seq_cp(
                memory, source, sequence_id, 0, sequence.num_computed
            )
        return sequence

    def fill(self, running: list[Sequence]) -> list[tuple[int, Sequence]]:
        """Lay out the next batch.

        Returns:
            The rows that a token is picked from, and whose it is.
        """
        rows: list[tuple[int, int, int, bool]] = []  # token, position, sequence, picked
        picked: list[tuple[int, Sequence]] = []
        for sequence in running:
            if sequence.answer:
                position = len(sequence.job.prompt_token_ids) + len(sequence.answer) - 1
                picked.append((len(rows), sequence))
                rows.append((sequence.answer[-1], position, sequence.sequence_id, True))
        for sequence in running:
            prompt = sequence.job.prompt_token_ids
            start = sequence.num_computed
            end = min(len(prompt), start + BATCH_TOKENS - len(rows))
            if start == end:
                continue
            sequence.num_computed = end
            for position in range(start, end):
                is_last = position == len(prompt) - 1
                if is_last:
                    picked.append((len(rows), sequence))
                rows.append((prompt[position], position, sequence.sequence_id, is_last))
        batch = self.batch
        for row, (token_id, position, sequence_id, is_picked) in enumerate(rows):
            batch.token[row], batch.pos[row] = token_id, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence_id
            batch.logits[row] = is_picked
        batch.n_tokens = len(rows)
        return picked

    def best_token(self, context: Any, row: int) -> int:
        """Return the token with the largest logit of a row of the last batch."""
        import numpy as np

        logits = self.lib.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


def count_equal(one: Job, other: Job) -> int:
    """Return how many tokens two prompts share, the last of the second not counted."""
    pairs = zip(one.prompt_token_ids, other.prompt_token_ids[:-1], strict=False)
    for index, (ours, theirs) in enumerate(pairs):
        if ours != theirs:
            return index
    return min(len(one.prompt_token_ids), len(other.prompt_token_ids) - 1)


def main() -> None:
    """Measure llama.cpp."""
    arguments = make_parser("Run the workloads on llama.cpp.").parse_args()
    set_threads(arguments.threads)
    import llama_cpp

    run = LlamaCpp(arguments.model, arguments.threads, not arguments.no_prefix_caching)
    run_all(arguments, "llama.cpp", f"python {llama_cpp.__version__}", run)


if __name__ == "__main__":
    main()
