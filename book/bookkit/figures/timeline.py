"""Requests over time: who waits, who computes a prompt, who writes an answer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure as MplFigure
from matplotlib.patches import Patch

from bookkit import palette
from bookkit.figures.base import Figure
from bookkit.figures.plot import figure, style

Segment = tuple[str, float, float]  # what it is, start and end in seconds


def timeline(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str, names: Sequence[str]
) -> Figure:
    """See `bookkit.draw.timeline`."""
    segments = {
        name: [(request, _segments(records, request)) for request in names]
        for name, records in runs.items()
    }
    if not any(rows for run in segments.values() for _, rows in run):
        raise ValueError("no record names any of the requests: give their ids")
    with style():
        num_rows = len(names) * len(runs)
        fig = MplFigure(figsize=(5.0, 1.0 + 0.36 * num_rows + 0.5 * (len(runs) - 1)))
        axes = fig.subplots(len(runs), sharex=True, squeeze=False)[:, 0]
        for ax, (name, rows) in zip(axes, segments.items(), strict=True):
            for row, (request, parts) in enumerate(rows):
                for kind, start, end in parts:
                    _draw(ax, row, request, kind, start, end)
            ax.set_yticks(range(len(rows)), [request for request, _ in rows])
            ax.set_ylim(len(rows) - 0.4, -0.6)
            ax.grid(axis="y", visible=False)
            if len(runs) > 1 or name:
                ax.set_title(name)
        axes[-1].set_xlabel("seconds")
        if title:
            fig.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        ink = palette.THEME["ink"][0]
        grey = palette.THEME["grey"][0]
        handles = [
            Patch(facecolor=ink, edgecolor=ink, label="prompt"),
            Patch(facecolor="none", edgecolor=ink, label="answer"),
            Patch(facecolor=grey, edgecolor=grey, label="waiting"),
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=3)
    lines = [
        f"{name or 'run'}, {request}: " + _describe(parts)
        for name, rows in segments.items()
        for request, parts in rows
    ]
    return figure(fig, alt=". ".join(lines) + ".", text="\n".join(lines))


def _draw(ax: Any, row: int, request: str, kind: str, start: float, end: float) -> None:
    look = palette.request(request)
    if kind == "waiting":
        color = palette.THEME["grey"][0]
        ax.barh(row, end - start, left=start, height=0.22, color=color)
        return
    ax.barh(
        row,
        end - start,
        left=start,
        height=0.62,
        facecolor=look.color if kind == "prompt" else "none",
        edgecolor=look.color,
        linewidth=1.4,
    )


def _segments(records: Sequence[Mapping[str, Any]], request: str) -> list[Segment]:
    """Cut the life of a request into stretches of one kind."""
    parts: list[Segment] = []
    for kind, start, end in _states(records, request):
        if parts and parts[-1][0] == kind and abs(parts[-1][2] - start) < 1e-9:
            parts[-1] = (kind, parts[-1][1], end)
        elif end > start:
            parts.append((kind, start, end))
    return parts


def _states(records: Sequence[Mapping[str, Any]], request: str) -> Iterator[Segment]:
    arrived = None  # the end of what has been told of it, None while it is not there
    for record in records:
        for added in record["added"]:
            if added["request_id"] == request:
                arrived = added["arrival_time"]
        if arrived is None:
            continue
        start, end = record["start_s"], record["end_s"]
        if request in record["num_scheduled_tokens"]:
            yield "waiting", arrived, start
            num_computed = record["num_computed_tokens"][request]
            is_prompt = record["num_tokens"][request] - num_computed > 1
            yield ("prompt" if is_prompt else "answer"), start, end
        else:
            yield "waiting", arrived, end
        arrived = end
        if request in record["finished"]:
            return


def _describe(parts: Sequence[Segment]) -> str:
    return ", ".join(f"{kind} {start:.2f} to {end:.2f} s" for kind, start, end in parts)
