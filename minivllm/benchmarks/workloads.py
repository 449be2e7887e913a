"""Fixed work for every engine: which prompts, and how many tokens to generate.

Invariant: a workload and the number of a repetition always give the same jobs. The
token ids are random, so no repetition finds anything of an earlier one in a prefix
cache; the lengths are the same in all of them.

Called by the command line and by the scripts in benchmarks/.

In vLLM: vllm/benchmarks/datasets/datasets.py (RandomDataset).
Source: appendix A9, "Measuring".
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

MAX_NUM_SEQS = 16  # requests that run at the same time, at most, in every workload
LOWEST_ID, HIGHEST_ID = 100, 40_000  # of the token ids; the first ones are special


class Job(NamedTuple):
    """A request for exactly so many tokens: greedy, and end tokens end nothing."""

    prompt_token_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A list of jobs, all submitted at once."""

    description: str
    make_jobs: Callable[[int, int], list[Job]]  # (repetition, vocab_size)


def random_ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    """Draw token ids that a model with so many of them knows."""
    low, high = min(LOWEST_ID, vocab_size // 2), min(HIGHEST_ID, vocab_size)
    return [rng.randrange(low, high) for _ in range(count)]


def one_request(repetition: int, vocab_size: int) -> list[Job]:
    """Return one job: 128 tokens in, 128 out."""
    rng = random.Random(1000 + repetition)
    return [Job(random_ids(rng, 128, vocab_size), 128)]


def many_requests(repetition: int, vocab_size: int) -> list[Job]:
    """Return 32 jobs of different lengths: 16 to 256 tokens in, 16 to 128 out."""
    lengths = random.Random(0)
    sizes = [(lengths.randint(16, 256), lengths.randint(16, 128)) for _ in range(32)]
    rng = random.Random(2000 + repetition)
    return [Job(random_ids(rng, size, vocab_size), out) for size, out in sizes]


def shared_prefix(repetition: int, vocab_size: int) -> list[Job]:
    """Return 16 jobs: the same 512 tokens and 16 of their own in, 32 out."""
    rng = random.Random(3000 + repetition)
    prefix = random_ids(rng, 512, vocab_size)
    return [Job(prefix + random_ids(rng, 16, vocab_size), 32) for _ in range(16)]


WORKLOADS = {
    "W1": Workload("1 request: 128 tokens in, 128 out", one_request),
    "W2": Workload("32 requests: 5,022 tokens in, 2,211 out", many_requests),
    "W3": Workload("16 requests: the same 512 tokens + 16 in, 32 out", shared_prefix),
}

LADDER_BATCH = 4
LADDER_SIZES = (  # (tokens in, tokens out): a batch of unequal requests, twice
    *((64, 8), (16, 64), (32, 16), (48, 32)),
    *((24, 56), (56, 8), (40, 24), (16, 48)),
)


def ladder_jobs(vocab_size: int) -> list[Job]:
    """Return the jobs of the ladder, small enough for the slowest way to do them."""
    rng = random.Random(4000)
    return [Job(random_ids(rng, size, vocab_size), out) for size, out in LADDER_SIZES]
