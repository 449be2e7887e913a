"""Plots in the house style, as SVG that follows the light and the dark page."""

import hashlib
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from bookkit import palette
from bookkit.figures.base import Figure
from bookkit.figures.ladder import short

_LIGHT = {name: pair[0] for name, pair in palette.THEME.items()}
_RC = {
    # 5 inches are 360 points, about the width of a phone: a text of 11 stays legible.
    "figure.figsize": (5.0, 3.1),
    "figure.dpi": 120,
    "figure.facecolor": _LIGHT["paper"],
    "figure.constrained_layout.use": True,
    "axes.facecolor": _LIGHT["paper"],
    "axes.edgecolor": _LIGHT["dim"],
    "axes.labelcolor": _LIGHT["ink"],
    "axes.titlecolor": _LIGHT["ink"],
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(
        color=[palette.MEASURED, *(style.color for style in palette.REQUESTS[1:])]
    )
    + cycler(marker=["o", "s", "^", "D", "v", "P"]),
    "grid.color": _LIGHT["line"],
    "grid.linewidth": 0.7,
    "text.color": _LIGHT["ink"],
    "xtick.color": _LIGHT["dim"],
    "ytick.color": _LIGHT["dim"],
    "xtick.labelcolor": _LIGHT["ink"],
    "ytick.labelcolor": _LIGHT["ink"],
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "font.size": 11,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same layout everywhere
    "svg.fonttype": "none",
    "svg.hashsalt": "bookkit",
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in the house style inside this context."""
    with mpl.rc_context(_RC):
        yield


def figure(fig: MplFigure, alt: str, text: str | None = None) -> Figure:
    """See `bookkit.draw.figure`."""
    if not alt.strip():
        raise ValueError("alt is empty: say in a sentence what the plot shows")
    buffer = io.StringIO()
    with style():
        fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(fig)  # else a notebook shows it once more, as it is
    return Figure(_follow_page(buffer.getvalue()), text=text or alt, alt=alt, width=540)


def _follow_page(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # Names such as "axes_1" are in every plot of a page, and nothing refers to them.
    svg = re.sub(r'<g id="[a-zA-Z.]+_?\d*(_\d+)?">', "<g>", svg)
    # Clip paths and markers are referred to: keep them apart from other figures'.
    name = "mv-" + hashlib.sha1(svg.encode()).hexdigest()[:8]
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", svg)
    svg = re.sub(r"'?DejaVu Sans'?(, [^;\"]*)?", "inherit", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", '<svg aria-hidden="true"', 1)
    # One pass for all, as two names may share a colour.
    names = {color: name for name, color in reversed(_LIGHT.items())}
    pattern = "|".join(re.escape(color) for color in names)
    return re.sub(pattern, lambda m: f"var(--mv-{names[m[0]]})", svg).strip()


def curve(
    x: Sequence[float],
    y: Sequence[Any] | Mapping[str, Sequence[Any]],
    predicted: Any,
    xlabel: str,
    ylabel: str,
    title: str,
    alt: str,
    logx: bool,
    logy: bool,
) -> Figure:
    """See `bookkit.draw.curve`."""
    xs = np.asarray(x, dtype=float)
    series = y if isinstance(y, Mapping) else {"measured": y}
    with style():
        fig = MplFigure()
        ax = fig.add_subplot()
        for name, values in series.items():
            _draw_series(ax, xs, values, name)
        if predicted is not None:
            line = _predicted(xs, predicted)
            ax.plot(*line, "--", color=palette.PREDICTED, marker="", label="predicted")
        ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
        if logx:
            ax.set_xscale("log")
            _plain_ticks(ax.xaxis, xs)
        if logy:
            ax.set_yscale("log")
            _plain_ticks(ax.yaxis)
        if not logy:
            ax.set_ylim(bottom=0)
        if predicted is not None or len(series) > 1:
            handles, names = ax.get_legend_handles_labels()
            order = sorted(range(len(names)), key=lambda i: names[i] == "predicted")
            ax.legend([handles[i] for i in order], [names[i] for i in order])
        text = _describe(xs, series, predicted, xlabel, ylabel, title)
        return figure(fig, alt or text.replace("\n", " "), text)


def _plain_ticks(axis: Any, places: Sequence[float] = ()) -> None:
    """Label a logarithmic axis with plain numbers: "200", not a power of ten."""
    if 0 < len(places) <= 8:
        axis.set_major_locator(FixedLocator(places))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def _draw_series(ax: Any, xs: np.ndarray, values: Sequence[Any], name: str) -> None:
    if len(values) != len(xs):
        raise ValueError(
            f"{name!r} has {len(values)} values for {len(xs)} places on the x axis: "
            "pass one each"
        )
    middle = np.array([_middle(value) for value in values])
    # A plain number has no range.
    low = np.array([float(getattr(value, "min", value)) for value in values])
    high = np.array([float(getattr(value, "max", value)) for value in values])
    whiskers = [middle - low, high - middle]
    ax.errorbar(xs, middle, yerr=whiskers, capsize=3, elinewidth=1.2, label=name)


def _middle(value: Any) -> float:
    """Return the number to draw: that of a Measurement is its median."""
    return float(getattr(value, "median", value))


def _predicted(xs: np.ndarray, predicted: Any) -> tuple[np.ndarray, np.ndarray]:
    if callable(predicted):
        function: Callable[[float], float] = predicted
        fine = np.linspace(xs.min(), xs.max(), 100)
        return fine, np.array([function(value) for value in fine])
    if isinstance(predicted, tuple) and len(predicted) == 2:
        return np.asarray(predicted[0], float), np.asarray(predicted[1], float)
    return xs, np.asarray(predicted, float)


def _describe(
    xs: np.ndarray,
    series: Mapping[str, Sequence[Any]],
    predicted: Any,
    xlabel: str,
    ylabel: str,
    title: str,
) -> str:
    lines = [f"{title or 'plot'}: {ylabel or 'y'} against {xlabel or 'x'}"]
    rows = {name: [_middle(value) for value in ys] for name, ys in series.items()}
    if predicted is not None:
        px, py = _predicted(xs, predicted)
        rows["predicted"] = list(np.interp(xs, px, py))
    for name, ys in rows.items():
        points = ", ".join(
            f"{short(a)}: {short(b)}" if a > 0 < b else f"{a:g}: {b:g}"
            for a, b in zip(xs, ys, strict=True)
        )
        lines.append(f"  {name}  {points}")
    return "\n".join(lines)
