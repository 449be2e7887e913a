"""The speed ladder: the same small job, done in every way that the book builds.

    naive generation         every token recomputes the whole text
    KV cache                 one request after the other, nothing computed twice
    static batch             batches as they come, each until its longest answer ends
    continuous batching      the engine: a request that ends makes room for the next

Called by the command line.

Source: appendix A9, "Measuring".
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.benchmarks.measure import Bystanders, Spread
from minivllm.benchmarks.offline import run_jobs
from minivllm.benchmarks.workloads import LADDER_BATCH, Job
from minivllm.engine.engine import LLMEngine
from minivllm.generation import (
    CachingModel,
    generate_cached,
    generate_naive,
    generate_static_batch,
)

TIME_LIMIT_S = 10.0  # no further repetition of a rung that has taken as long

Answers = list[list[int]]


@dataclass(frozen=True, slots=True)
class Rung:
    """A way to do the job, and how it went.

    Attributes:
        name: The way.
        rate: New tokens per second.
        num_counted: Repetitions.
        num_same: Answers that are those of the first rung, token for token.
        num_jobs: Answers in all.
        other_cores: The most that other processes used; None if unknown.
    """

    name: str
    rate: Spread
    num_counted: int
    num_same: int
    num_jobs: int
    other_cores: float | None

    def as_json(self) -> dict[str, Any]:
        """Return plain values, rounded to what was measured."""
        return {
            "workload": "ladder",
            "rung": self.name,
            "output_tok_s": [float(f"{value:.4g}") for value in self.rate],
            "reps": self.num_counted,
            "same_answers": self.num_same,
            "other_cores": self.other_cores and round(self.other_cores, 2),
        }


def naive(model: CachingModel, jobs: Sequence[Job]) -> Answers:
    """Do job after job, and recompute the whole text for every token."""
    return [generate_naive(model, *job) for job in jobs]


def cached(model: CachingModel, jobs: Sequence[Job]) -> Answers:
    """Do job after job, and keep keys and values."""
    return [generate_cached(model, *job) for job in jobs]


def static_batch(model: CachingModel, jobs: Sequence[Job]) -> Answers:
    """Do batches of jobs in the order they came, each to the end of its last one."""
    answers: Answers = []
    for start in range(0, len(jobs), LADDER_BATCH):
        prompts, num_tokens = zip(*jobs[start : start + LADDER_BATCH], strict=True)
        answers += generate_static_batch(model, list(prompts), list(num_tokens))
    return answers


def engine_answers(engine: LLMEngine, jobs: Sequence[Job]) -> Answers:
    """Give all jobs to the engine at once."""
    return [list(token_ids) for token_ids in run_jobs(engine, jobs).token_ids]


def time_rung(
    name: str,
    way: Callable[[Sequence[Job]], Answers],
    jobs: Sequence[Job],
    num_counted: int,
    expected: Answers | None,
) -> tuple[Rung, Answers]:
    """Do the jobs in one way, after a warm-up with the shortest of them."""
    way([min(jobs, key=lambda job: job.num_output_tokens)])
    rates: list[float] = []
    total_s = 0.0
    with Bystanders() as bystanders:
        while len(rates) < num_counted and total_s < TIME_LIMIT_S:
            start = time.perf_counter()
            answers = way(jobs)
            seconds = time.perf_counter() - start
            rates.append(sum(map(len, answers)) / seconds)
            total_s += seconds
    same = [
        ours == theirs
        for ours, theirs in zip(answers, expected or answers, strict=True)
    ]
    rung = Rung(
        name=name,
        rate=Spread(statistics.median(rates), min(rates), max(rates)),
        num_counted=len(rates),
        num_same=sum(same),
        num_jobs=len(jobs),
        other_cores=bystanders.other_cores,
    )
    return rung, answers


def climb(
    make_model: Callable[[], CachingModel],
    make_engine: Callable[[], LLMEngine],
    jobs: Sequence[Job],
    num_counted: int = 3,
) -> Iterator[Rung]:
    """Do the jobs in every way, and yield the rungs as they are measured.

    Args:
        make_model: Loads the decoder.
        make_engine: Loads it again, with a cache; the first one is gone by then.
        jobs: What to generate.
        num_counted: Repetitions of a rung, fewer if it is slow.
    """
    model = make_model()
    ways = {
        "naive generation": functools.partial(naive, model),
        "KV cache": functools.partial(cached, model),
        "static batch": functools.partial(static_batch, model),
    }
    expected: Answers | None = None
    for name in list(ways):
        rung, answers = time_rung(name, ways.pop(name), jobs, num_counted, expected)
        expected = expected or answers
        yield rung
    del model
    way = functools.partial(engine_answers, make_engine())
    yield time_rung("continuous batching", way, jobs, num_counted, expected)[0]
