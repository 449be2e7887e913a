"""Repeat a workload until enough repetitions were undisturbed, and sum them up.

Invariant: every repetition has token ids of its own, the first is a warm-up that does
not count, and a result says how many of the counted ones were quiet. An engine on all
cores loses far more than its share as soon as another process takes one of them.

Called by the command line and by the scripts in benchmarks/.

Source: appendix A9, "Measuring".
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from minivllm.benchmarks.workloads import HIGHEST_ID, WORKLOADS, Job

QUIET_CORES = 0.12  # what other processes may use while a repetition still counts
SAMPLE_S = 0.5  # how long to look whether the machine is quiet


class Timing(NamedTuple):
    """When the tokens of each job came, in seconds since all were submitted.

    The first token's time is None where an engine does not tell.
    """

    first_s: Sequence[float | None]
    last_s: Sequence[float]
    wall_s: float
    token_ids: Sequence[Sequence[int]]


def metrics_of(jobs: Sequence[Job], timing: Timing) -> dict[str, float]:
    """Turn the times of one repetition into rates.

    Returns:
        "wall_s" until all was done, "output_tok_s" of new tokens, "total_tok_s" of new
        and prompt tokens, "mean_ttft_s" until a request's first token, and for a
        single request "decode_tok_s", the rate after its first token.
    """
    num_out = sum(job.num_output_tokens for job in jobs)
    num_in = sum(len(job.prompt_token_ids) for job in jobs)
    metrics = {
        "wall_s": timing.wall_s,
        "output_tok_s": num_out / timing.wall_s,
        "total_tok_s": (num_in + num_out) / timing.wall_s,
    }
    first_s = [seconds for seconds in timing.first_s if seconds is not None]
    if len(first_s) == len(jobs):
        metrics["mean_ttft_s"] = statistics.mean(first_s)
        if len(jobs) == 1:
            decode_s = timing.last_s[0] - first_s[0]
            metrics["decode_tok_s"] = (num_out - 1) / decode_s
    return metrics


@dataclass(frozen=True, slots=True)
class Repetition:
    """What one repetition measured.

    Attributes:
        metrics: For a name such as "decode_tok_s", the value.
        other_cores: Cores that other processes used meanwhile; None if unknown.
    """

    metrics: dict[str, float]
    other_cores: float | None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is known to have disturbed it."""
        return (self.other_cores or 0) < QUIET_CORES


class Bystanders:
    """Measures how many cores other processes use while a block runs (Linux only).

    `other_cores` is what all cores did, less this process and its descendants; None
    where there is no /proc/stat.
    """

    other_cores: float | None = None

    def __enter__(self) -> "Bystanders":
        self._start = time.perf_counter(), _busy_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        start_s, busy = self._start
        now_busy = _busy_seconds()
        if busy is not None and now_busy is not None:
            seconds = max(time.perf_counter() - start_s, 1e-9)
            self.other_cores = max(0.0, now_busy - busy) / seconds


def _busy_seconds() -> float | None:
    """Return the seconds that all cores have worked, less our own part."""
    try:
        all_cores = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    return (busy_ticks(all_cores) - _own_ticks()) / os.sysconf("SC_CLK_TCK")


def busy_ticks(line: str) -> int:
    """Add up the ticks of a line of /proc/stat in which a core worked."""
    ticks = [int(field) for field in line.split()[1:]]
    # user, nice, system; then idle and waiting for a disk; then interrupts.
    return sum(ticks[:3]) + sum(ticks[5:7])


def _own_ticks() -> int:
    """Return the ticks that this process and its descendants have worked."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text()
        except OSError:  # it has ended since
            continue
        fields = text[text.rindex(")") + 2 :].split()
        parents[int(folder.name)] = int(fields[1])
        # In user and system mode; the same of children that have ended.
        ticks[int(folder.name)] = sum(int(field) for field in fields[11:15])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks.get(pid, 0) for pid in ours)


def wait_until_quiet(limit_s: float) -> None:
    """Wait until other processes leave the cores alone; give up after a while."""
    end = time.perf_counter() + limit_s
    while time.perf_counter() < end:
        with Bystanders() as bystanders:
            time.sleep(SAMPLE_S)
        if (bystanders.other_cores or 0) < QUIET_CORES:
            return


class Spread(NamedTuple):
    """The median of some repetitions, and their range."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Result:
    """A workload's counted repetitions.

    Attributes:
        workload: Its name.
        metrics: For a name such as "decode_tok_s", the spread.
        num_counted: Repetitions that count.
        num_quiet: How many of them nobody disturbed; None if unknown.
        num_tries: Repetitions in all, without the warm-up.
        other_cores: The median of what other processes used; None if unknown.
    """

    workload: str
    metrics: dict[str, Spread]
    num_counted: int
    num_quiet: int | None
    num_tries: int
    other_cores: float | None

    def as_json(self) -> dict[str, Any]:
        """Return plain values, rounded to what was measured."""
        return {
            "workload": self.workload,
            **{
                name: [float(f"{value:.4g}") for value in spread]
                for name, spread in self.metrics.items()
            },
            "reps": self.num_counted,
            "quiet": self.num_quiet,
            "tries": self.num_tries,
            "other_cores": self.other_cores and round(self.other_cores, 2),
        }


def summarise(workload: str, tries: Sequence[Repetition], num_counted: int) -> Result:
    """Count the first quiet repetitions; if they are too few, the least disturbed."""
    quiet_first = sorted(
        tries, key=lambda t: 0.0 if t.is_quiet else (t.other_cores or 0.0)
    )
    counted = quiet_first[:num_counted]
    others = [t.other_cores for t in counted if t.other_cores is not None]
    metrics = {}
    for name in counted[0].metrics:
        values = [t.metrics[name] for t in counted]
        metrics[name] = Spread(statistics.median(values), min(values), max(values))
    return Result(
        workload=workload,
        metrics=metrics,
        num_counted=len(counted),
        num_quiet=sum(t.is_quiet for t in counted) if others else None,
        num_tries=len(tries),
        other_cores=statistics.median(others) if others else None,
    )


def measure(
    workload: str,
    run: Callable[[list[Job]], Timing],
    *,
    num_counted: int = 3,
    max_tries: int | None = None,
    wait_s: float = 0.0,
    vocab_size: int = HIGHEST_ID,
    note: Callable[[str], None] = lambda text: None,
) -> Result:
    """Run a workload: one warm-up, then repetitions.

    Args:
        workload: "W1", "W2" or "W3".
        run: Does all jobs at once, at most 16 of them at the same time.
        num_counted: Repetitions that count.
        max_tries: Repetitions at most, to replace disturbed ones; by default no more
            than count.
        wait_s: How long to wait for a quiet machine before each repetition.
        vocab_size: Token ids are drawn below this one.
        note: Is told how far it has come.
    """
    tries: list[Repetition] = []
    num_quiet = 0
    repetition = 0
    while num_quiet < num_counted and len(tries) < (max_tries or num_counted):
        jobs = WORKLOADS[workload].make_jobs(repetition, vocab_size)
        if repetition:
            wait_until_quiet(wait_s)
        with Bystanders() as bystanders:
            timing = run(jobs)
        wanted = [job.num_output_tokens for job in jobs]
        given = [len(token_ids) for token_ids in timing.token_ids]
        assert given == wanted, f"{workload}: {given} tokens generated, not {wanted}"
        name = f"repetition {repetition}" if repetition else "warm-up"
        note(f"{workload} {name}: {timing.wall_s:.2f} s")
        if repetition:
            metrics = metrics_of(jobs, timing)
            tries.append(Repetition(metrics, bystanders.other_cores))
            num_quiet += tries[-1].is_quiet
        repetition += 1
    return summarise(workload, tries, num_counted)
