"""Write results for people: a table, bars of text, a figure.

Called by the command line.

Source: appendix A9, "Measuring"; appendix A22, "Profiling"; appendix A31, "Load".
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.benchmarks.machine import Limits, weight_bytes
from minivllm.benchmarks.measure import Result, Spread
from minivllm.benchmarks.workloads import WORKLOADS
from minivllm.errors import BackendUnavailable
from minivllm.models.spec import ModelSpec

if TYPE_CHECKING:
    from minivllm.benchmarks.profile import StepProfile

BAR_WIDTH = 40  # characters of the longest bar


class Row(NamedTuple):
    """What a table and the comparison show of a workload's metrics."""

    workload: str
    metric: str
    text: str
    scale: float
    unit: str


ROWS = (
    Row("W1", "mean_ttft_s", "time to first token", 1e3, "ms"),
    Row("W1", "decode_tok_s", "then", 1, "tokens/s"),
    Row("W2", "output_tok_s", "new tokens", 1, "tokens/s"),
    Row("W2", "total_tok_s", "all tokens", 1, "tokens/s"),
    Row("W2", "mean_ttft_s", "mean time to first token", 1, "s"),
    Row("W3", "wall_s", "until all are done", 1, "s"),
)


class Bar(NamedTuple):
    """One bar of a chart, in tokens per second."""

    label: str
    rate: Spread


def three_digits(value: float) -> str:
    """Write a number with three digits, and never with an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def bytes_of(dtype: str) -> int:
    """Return the size of a number."""
    return 4 if dtype == "float32" else 2


def limits_line(limits: Limits, spec: ModelSpec, dtype: str) -> str:
    """Say what the machine allows, in a line."""
    num_bytes = bytes_of(dtype)
    return (
        f"limits: reads {limits.read_bytes_per_s / 1e9:.1f} GB/s, multiplies "
        f"{limits.flops_per_s / 1e9:,.0f} GFLOP/s in {dtype}; reading "
        f"{weight_bytes(spec, num_bytes) / 1e6:,.1f} MB of weights per token allows "
        f"{1 / limits.decode_s(spec, num_bytes):,.1f} tokens/s to a single request"
    )


def shares_of_limits(
    results: Sequence[Result], limits: Limits, spec: ModelSpec, dtype: str
) -> dict[tuple[str, str], float]:
    """Return how much of what the machine allows a single request gets.

    Returns:
        For a workload and a metric, the shortest possible time over the measured one.
    """
    shares = {}
    num_bytes = bytes_of(dtype)
    for result in results:
        if "decode_tok_s" not in result.metrics:
            continue
        job = WORKLOADS[result.workload].make_jobs(0, spec.vocab_size)[0]
        prefill_s = limits.prefill_s(spec, num_bytes, len(job.prompt_token_ids))
        ttft_s = result.metrics["mean_ttft_s"].median
        shares[result.workload, "mean_ttft_s"] = prefill_s / ttft_s
        decode_s = 1 / result.metrics["decode_tok_s"].median
        shares[result.workload, "decode_tok_s"] = (
            limits.decode_s(spec, num_bytes) / decode_s
        )
    return shares


def table(results: Sequence[Result], of_limit: dict[tuple[str, str], float]) -> str:
    """Write medians and ranges, one metric a line.

    Args:
        results: Of W1, W2, W3, or some of them.
        of_limit: For a workload and a metric, the share of what the machine allows.
    """
    rows = [("", "", "median", "", "range", "of limit" if of_limit else "")]
    for row in ROWS:
        for result in results:
            if result.workload != row.workload or row.metric not in result.metrics:
                continue
            median, low, high = (
                three_digits(value * row.scale) for value in result.metrics[row.metric]
            )
            share = of_limit.get((row.workload, row.metric))
            rows.append(
                (
                    row.workload,
                    row.text,
                    median,
                    row.unit,
                    f"{low} to {high}",
                    "" if share is None else f"{share:.2f}",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    to_the_right = (False, False, True, False, True, True)
    lines = []
    for row in rows:
        cells = zip(row, widths, to_the_right, strict=True)
        line = "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in cells
        )
        lines.append(line.rstrip())
    return "\n".join(lines)


def disturbances(results: Sequence[Result]) -> list[str]:
    """Say which results other processes disturbed, in a line each."""
    lines = []
    for result in results:
        if result.num_quiet is None:
            lines.append(
                f"{result.workload}: whether other processes disturbed it is unknown "
                "on this system"
            )
        elif result.num_quiet < result.num_counted:
            lines.append(
                f"{result.workload}: other processes disturbed "
                f"{result.num_counted - result.num_quiet} of {result.num_counted} "
                f"repetitions (they used {result.other_cores:.2f} cores): run it again "
                "on a quiet machine"
            )
    return lines


def bars_of(results: Sequence[Result]) -> list[Bar]:
    """Return the bars of workloads: new tokens per second."""
    return [
        Bar(result.workload, result.metrics["output_tok_s"])
        for result in results
        if "output_tok_s" in result.metrics
    ]


def text_chart(bars: Sequence[Bar]) -> str:
    """Draw bars with characters."""
    label_width = max(len(bar.label) for bar in bars)
    longest = max(bar.rate.median for bar in bars)
    lines = []
    for bar in bars:
        length = max(1, round(BAR_WIDTH * bar.rate.median / longest))
        rate = f"{three_digits(bar.rate.median):>8} tokens/s"
        lines.append(f"{bar.label:{label_width}}  {rate}  {'█' * length}")
    return "\n".join(lines)


def check_matplotlib(option: str = "--figure") -> None:
    """Refuse to draw before anything is measured, if that cannot work.

    Args:
        option: Which asks for a figure.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable(
            f"a figure needs matplotlib ({error}): pip install matplotlib, or leave "
            f"{option} out and read the text"
        ) from error


def save_figure(
    path: Path,
    bars: Sequence[Bar],
    title: str,
    profiles: "Sequence[StepProfile]" = (),
) -> None:
    """Draw bars with their ranges, and profiles, into a file of the named format."""
    from matplotlib.figure import Figure

    from minivllm.benchmarks.profile import draw_profiles

    heights = [1.2 + 0.5 * len(bars)] if bars or not profiles else []
    heights += [2.2 + 0.6 * len(profiles)] if profiles else []
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    every = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    if bars or not profiles:
        draw_bars(every[0], bars)
    if profiles:
        draw_profiles(every[-1], profiles)
    every[0].set_title(title, fontsize="medium")
    figure.savefig(path)


def draw_bars(axes: Any, bars: Sequence[Bar]) -> None:
    """Draw the rates of workloads, with their ranges."""
    medians = [bar.rate.median for bar in bars]
    ranges = [
        [bar.rate.median - bar.rate.min for bar in bars],
        [bar.rate.max - bar.rate.median for bar in bars],
    ]
    axes.barh([bar.label for bar in bars], medians, xerr=ranges, capsize=3)
    for index, bar in enumerate(bars):
        text = f"  {three_digits(bar.rate.median)}"
        axes.text(bar.rate.max, index, text, va="center")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("new tokens per second (median and range)")
    axes.spines[["top", "right"]].set_visible(False)
