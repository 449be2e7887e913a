"""Sum up the results of a load test: percentiles, rates, goodput; a table, a figure.

Invariant: failures are counted and named. Latencies are those of the requests that
succeeded, and rates count what succeeded, over the whole time.
Called by `minivllm bench serve`.

In vLLM: vllm/benchmarks/serve.py (BenchmarkMetrics, calculate_metrics).
Source: appendix A31, "Load".
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minivllm.benchmarks.distribution import Distribution
from minivllm.benchmarks.load import RequestResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a load test showed.

    Attributes:
        num_requests: That were due.
        num_completed: Of these.
        errors: How many failed, by kind; the most frequent first.
        examples: For each kind, the first message.
        duration_s: From the start to the end of the last request.
        last_arrival_s: When the last request was due.
        num_prompt_tokens: Of the completed ones.
        num_output_tokens: The same, of answers.
        are_counted: Whether the server said how many tokens; else pieces count as such.
        mean_concurrency: Requests on the way, on average.
        max_concurrency: At most.
        spreads_ms: For "ttft", "tpot", "itl", "e2el", and "late" for how long requests
            were kept back. What no request has is missing.
        slo_ms: The promises, such as {"ttft": 200.0}.
        num_good: Requests that kept them all.
    """

    num_requests: int
    num_completed: int
    errors: dict[str, int]
    examples: dict[str, str]
    duration_s: float
    last_arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    are_counted: bool
    mean_concurrency: float
    max_concurrency: int
    spreads_ms: dict[str, Distribution]
    slo_ms: dict[str, float]
    num_good: int

    def rate(self, count: float) -> float:
        """Return how many per second that is."""
        return count / self.duration_s if self.duration_s else 0.0


def keeps(result: RequestResult, slo_ms: Mapping[str, float]) -> bool:
    """Whether a request succeeded and kept all promises; one it cannot break counts."""
    if result.error_kind is not None:
        return False
    values = {name: getattr(result, f"{name}_s") for name in slo_ms}
    return all((values[name] or 0.0) * 1e3 <= limit for name, limit in slo_ms.items())


def summarise_load(
    results: Sequence[RequestResult], slo_ms: Mapping[str, float] | None = None
) -> Summary:
    """Sum up results.

    Args:
        results: One for each request that was due.
        slo_ms: Upper limits of "ttft", "tpot" and "e2el", in milliseconds.
    """
    slo_ms = dict(slo_ms or {})
    done = [result for result in results if result.error_kind is None]
    failed = [result for result in results if result.error_kind is not None]
    values = {
        "ttft": [result.ttft_s for result in done],
        "tpot": [result.tpot_s for result in done if result.tpot_s is not None],
        "itl": [gap for result in done for gap in result.itl_s],
        "e2el": [result.e2el_s for result in done],
        "late": [result.late_s for result in results if result.sent_s is not None],
    }
    spreads = {
        name: Distribution.of(1e3 * value for value in some)
        for name, some in values.items()
    }
    duration_s = max((result.end_s for result in results), default=0.0)
    mean, most = concurrency(results, duration_s)
    examples = {result.error_kind: result.error for result in reversed(failed)}
    counts = [result.usage or (0, len(result.shown_s)) for result in done]
    return Summary(
        num_requests=len(results),
        num_completed=len(done),
        errors=dict(Counter(result.error_kind for result in failed).most_common()),
        examples=examples,
        duration_s=duration_s,
        last_arrival_s=max((result.arrival_s for result in results), default=0.0),
        num_prompt_tokens=sum(num_prompt for num_prompt, _ in counts),
        num_output_tokens=sum(num_output for _, num_output in counts),
        are_counted=all(result.usage for result in done),
        mean_concurrency=mean,
        max_concurrency=most,
        spreads_ms={name: spread for name, spread in spreads.items() if spread},
        slo_ms=slo_ms,
        num_good=sum(keeps(result, slo_ms) for result in results),
    )


def concurrency(
    results: Sequence[RequestResult], duration_s: float
) -> tuple[float, int]:
    """Return how many requests were on the way, on average and at most."""
    sent = [result for result in results if result.sent_s is not None]
    total_s = sum(result.e2el_s for result in sent)
    # At the same moment, ends come first.
    changes = sorted(
        [(result.sent_s, 1) for result in sent]
        + [(result.end_s, -1) for result in sent]
    )
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return total_s / duration_s if duration_s else 0.0, most


LATE_MS = 5.0  # a client that is later than that has measured itself

ROWS = {
    "ttft": "TTFT, to the first token",
    "tpot": "TPOT, per other token",
    "itl": "ITL, between pieces",
    "e2el": "E2EL, to the end",
    "late": "kept back by the client",
}


def load_table(summary: Summary) -> str:
    """Write a summary for people."""
    done, wanted = summary.num_completed, summary.num_requests
    lines = [
        f"{wanted} requests in {summary.duration_s:.2f} s: {done} completed, "
        f"{wanted - done} failed"
    ]
    for kind, count in summary.errors.items():
        lines.append(f"  {count} failed: {summary.examples[kind]}")
    offered = wanted / summary.last_arrival_s if summary.last_arrival_s else None
    came = f"{offered:.2f} per second" if offered else "all at once"
    lines.append(
        f"requests: came {came}, completed {summary.rate(done):.2f} per second; on the "
        f"way at the same time: {summary.mean_concurrency:.1f} on average, "
        f"{summary.max_concurrency} at most"
    )
    if summary.slo_ms:
        promise = ", ".join(f"{name} {ms:g} ms" for name, ms in summary.slo_ms.items())
        lines.append(
            f"goodput: {summary.rate(summary.num_good):.2f} per second, "
            f"{summary.num_good} requests with {promise} at most"
        )
    num_in, num_out = summary.num_prompt_tokens, summary.num_output_tokens
    lines.append(
        f"tokens: {num_in:,} in, {num_out:,} out; {summary.rate(num_out):.1f} new ones "
        f"per second, {summary.rate(num_in + num_out):.1f} with prompts"
    )
    if done and not summary.are_counted:
        lines.append(
            "  the server does not count tokens for all requests; there, each piece of "
            "an answer counts as one"
        )
    header = ("milliseconds", "mean", "median", "P90", "P99", "max")
    rows = [header]
    for name, text in ROWS.items():
        spread = summary.spreads_ms.get(name)
        if spread and (name != "late" or spread.p99 > LATE_MS):
            rows.append((text, *(f"{value:,.1f}" for value in asdict(spread).values())))
    if len(rows) > 1:
        lines.append("")
        for first, *numbers in rows:
            lines.append(f"{first:26}" + "".join(f"{text:>11}" for text in numbers))
    return "\n".join(lines)


def load_record(summary: Summary, results: Sequence[RequestResult]) -> dict[str, Any]:
    """Return a summary and all results as plain values, under vLLM's names."""
    num_in, num_out = summary.num_prompt_tokens, summary.num_output_tokens
    latencies = {
        f"{kind}_{name}_ms": value
        for name, spread in summary.spreads_ms.items()
        for kind, value in asdict(spread).items()
    }
    return {
        "duration": summary.duration_s,
        "completed": summary.num_completed,
        "failed": summary.num_requests - summary.num_completed,
        "errors": summary.errors,
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": summary.rate(summary.num_completed),
        "request_goodput": summary.rate(summary.num_good) if summary.slo_ms else None,
        "output_throughput": summary.rate(num_out),
        "total_token_throughput": summary.rate(num_in + num_out),
        "mean_concurrent_requests": summary.mean_concurrency,
        "max_concurrent_requests": summary.max_concurrency,
        **latencies,
        "requests": [
            asdict(result) | {"usage": result.usage and result.usage._asdict()}
            for result in results
        ],
    }


WAITS, WRITES, FAILS = "C1", "C0", "C3"  # colours


def save_load_figure(
    path: Path,
    results: Sequence[RequestResult],
    title: str,
    slo_ms: Mapping[str, float] | None = None,
) -> None:
    """Draw a line for each request over time, and how latencies are spread.

    Args:
        path: An .svg, .png or .pdf file.
        results: Those that were never sent are left out.
        title: Stands above it.
        slo_ms: Limits to mark.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    sent = [result for result in results if result.sent_s is not None]
    sent.sort(key=lambda result: result.arrival_s)
    done = [result for result in sent if result.error_kind is None]
    figure = Figure(figsize=(8, 7), layout="constrained")
    lines, shares = figure.subplots(2, height_ratios=(3, 2))
    draw_lines(lines, sent)
    lines.set_title(title, fontsize="medium")
    lines.yaxis.set_major_locator(MaxNLocator(integer=True))
    for name, color in (("ttft", WAITS), ("tpot", WRITES)):
        found = [getattr(result, f"{name}_s") for result in done]
        values = sorted(value * 1e3 for value in found if value is not None)
        places = [(place + 1) / len(values) for place in range(len(values))]
        shares.step(values, places, color, where="post", label=name.upper())
        if name in (slo_ms or {}):
            shares.axvline(slo_ms[name], linestyle=":", color=color)
    shares.set_xscale("log")
    shares.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    shares.xaxis.set_major_formatter("{x:g}")
    shares.xaxis.set_minor_formatter(NullFormatter())
    shares.set_xlabel("milliseconds (dotted: what was promised)")
    shares.set_ylabel("share of requests below")
    shares.legend(frameon=False)
    for axes in (lines, shares):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw_lines(axes: Any, results: Sequence[RequestResult]) -> None:
    """Draw when each request waited for its first token, wrote, or failed."""
    places = range(len(results))
    sent = [result.sent_s for result in results]
    first = [result.sent_s + result.ttft_s for result in results]
    end = [result.end_s for result in results]
    axes.hlines(places, sent, first, color=WAITS, label="waits")
    axes.hlines(places, first, end, color=WRITES, label="writes")
    failed = [place for place in places if results[place].error_kind]
    if failed:
        ends = [end[place] for place in failed]
        axes.plot(ends, failed, "x", color=FAILS, label="fails")
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_ylabel("request")
    axes.legend(frameon=False, ncols=3)
