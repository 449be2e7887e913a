"""Who looks at whom: the attention weights of one head, or of all of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bookkit.figures import svg
from bookkit.figures.base import Figure, escape

MAX_TOKENS = 32
_LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_MAX_DATA = 400_000  # characters of recorded weights in one notebook output

_CSS = (
    svg.CSS
    + """
.mv-figure .mv-cell{fill:var(--mv-heat)}
.mv-figure .mv-future{fill:var(--mv-wrong)}
.mv-figure .mv-back{fill:none;stroke:var(--mv-line);stroke-width:.7}
.mv-figure .mv-scale{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:center}
.mv-figure .mv-scale i{display:inline-block;width:14px;height:14px;border-radius:3px;
 margin-right:4px;vertical-align:-2px;border:1px solid var(--mv-line)}
.mv-figure .mv-controls{display:grid;grid-template-columns:auto minmax(0,1fr) auto;
 gap:4px 10px;align-items:center;margin:0 0 8px}
.mv-figure .mv-controls input{width:100%;margin:6px 0;accent-color:var(--mv-measured);
 min-height:24px}
.mv-figure .mv-controls output{font-variant-numeric:tabular-nums;min-width:3.5em;
 text-align:right}
.mv-figure .mv-readout{min-height:1.5em;margin:4px 0 0;color:var(--mv-dim)}
"""
)


def attention(weights: Any, labels: Sequence[str], title: str) -> Figure:
    """See `bookkit.draw.attention`."""
    grid = _array(weights, 2, labels)
    future = bool(np.triu(grid, 1).any())
    picture = _grid(grid, labels, future)
    strongest = [
        f"{labels[row]} looks most at {labels[int(grid[row].argmax())]} "
        f"({grid[row].max():.2f})"
        for row in range(len(grid))
    ]
    heading = f'<div class="mv-title">{escape(title)}</div>' if title else ""
    name = title or "attention weights"
    text = "\n".join([name, *(f"  {line}" for line in strongest)])
    alt = f"Heat map, {name}: " + "; ".join(strongest) + "."
    return Figure(
        heading + picture + _scale(future), text=text, alt=alt, css=_CSS, width=460
    )


def attention_heads(
    weights: Any,
    labels: Sequence[str],
    layers: Sequence[int | str] | None,
    start: tuple[int, int],
) -> Figure:
    """See `bookkit.draw.attention_heads`."""
    every = _array(weights, 4, labels)
    num_layers, num_heads = every.shape[:2]
    names = [str(name) for name in (range(num_layers) if layers is None else layers)]
    if len(names) != num_layers:
        raise ValueError(
            f"there are {num_layers} layers of weights but {len(names)} layer names"
        )
    if not (0 <= start[0] < num_layers and 0 <= start[1] < num_heads):
        raise ValueError(
            f"start is {start}, but there are {num_layers} layers and {num_heads} heads"
        )
    future = bool(np.triu(every, 1).any())
    rows, columns = _cells(len(labels), future)
    picked = every[:, :, rows, columns]
    if picked.size > _MAX_DATA:
        raise ValueError(
            f"{picked.size:,} weights would make the notebook heavy (limit "
            f"{_MAX_DATA:,}): pass fewer layers or fewer tokens"
        )
    # The square root makes small weights visible, and 62 shades are more than eyes see.
    levels = np.rint(np.sqrt(picked.clip(0, 1)) * (len(_LEVELS) - 1)).astype(int)
    data = {
        "levels": _LEVELS,
        "names": names,
        "heads": [
            ["".join(_LEVELS[i] for i in head) for head in layer] for layer in levels
        ],
        "labels": list(labels),
        "cells": [[int(r), int(c)] for r, c in zip(rows, columns, strict=True)],
    }
    layer, head = start
    controls = (
        '<div class="mv-controls">'
        '<span>layer</span><input type="range" min="0" step="1" '
        f'max="{num_layers - 1}" value="{layer}" aria-label="layer">'
        f"<output>{escape(names[layer])}</output>"
        '<span>head</span><input type="range" min="0" step="1" '
        f'max="{num_heads - 1}" value="{head}" aria-label="head">'
        f"<output>{head}</output></div>"
    )
    body = (
        controls
        + _grid(every[layer, head], labels, future, all_cells=True)
        + '<div class="mv-readout" aria-live="polite">Point at a square to read it.'
        "</div>" + _scale(future)
    )
    text = (
        f"attention weights of {num_layers} layers x {num_heads} heads over "
        f"{len(labels)} tokens; shown: layer {names[layer]}, head {head}\n"
        + attention(every[layer, head], labels, "").text.split("\n", 1)[1]
    )
    label = f"Attention weights; choose among {num_layers} layers, {num_heads} heads"
    return Figure(
        body, text=text, label=label, css=_CSS, js=_HEADS_JS, data=data, width=460
    )


_HEADS_JS = """
const [layer, head] = root.querySelectorAll("input");
const [layerName, headName] = root.querySelectorAll("output");
const cells = root.querySelectorAll(".mv-cell, .mv-future");
const readout = root.querySelector(".mv-readout");
const level = (i) => data.levels.indexOf(data.heads[layer.value][head.value][i]) / 61;
const show = () => {
  layerName.textContent = data.names[layer.value];
  headName.textContent = head.value;
  cells.forEach((cell, i) => cell.setAttribute("fill-opacity", level(i).toFixed(2)));
};
layer.oninput = head.oninput = show;
cells.forEach((cell, i) => {
  cell.onpointerenter = cell.onclick = () => {
    const [query, key] = data.cells[i], weight = level(i) ** 2;
    readout.textContent =
      `${data.labels[query]} looks at ${data.labels[key]}: about ${weight.toFixed(2)}`;
  };
});
show();
"""


def _array(weights: Any, ndim: int, labels: Sequence[str]) -> np.ndarray:
    if hasattr(weights, "detach"):  # a torch tensor, of any dtype and device
        weights = weights.detach().float().cpu().numpy()
    array = np.asarray(weights, dtype=np.float64)
    size = len(labels)
    if array.ndim != ndim or array.shape[-2:] != (size, size):
        lead = "" if ndim == 2 else "layers, heads, "
        raise ValueError(
            f"weights have shape {list(array.shape)}, but {size} labels need "
            f"[{lead}{size}, {size}]"
        )
    if not 1 <= size <= MAX_TOKENS:
        raise ValueError(
            f"{size} tokens do not fit into a readable map (limit {MAX_TOKENS}): "
            "pass a shorter text"
        )
    return array


def _cells(size: int, future: bool) -> tuple[np.ndarray, np.ndarray]:
    if future:
        rows, columns = np.indices((size, size)).reshape(2, -1)
        return rows, columns
    return np.tril_indices(size)


def _grid(
    grid: np.ndarray, labels: Sequence[str], future: bool, *, all_cells: bool = False
) -> str:
    """Draw the squares: a row is a token that looks, a column what it looks at."""
    size, width = len(grid), 380
    shown = [label if len(label) <= 9 else label[:8] + "…" for label in labels]
    font = 12 if size <= 16 else 10.5
    left = 16 + max(len(label) for label in shown) * font * 0.62
    top = 22 + max(len(label) for label in shown) * font * 0.45
    tilt = 0.45 * top  # the last column label leans out to the right
    side = round(min(30.0, (width - left - tilt) / size), 1)
    picture = svg.Svg(width)
    picture.text(left, 11, "looks at →", size=11, anchor="start", cls="mv-dim")
    picture.text(left - 8, top - 6, "token ↓", size=11, anchor="end", cls="mv-dim")
    for i, label in enumerate(shown):
        picture.text(
            left - 6,
            top + (i + 0.5) * side + font * 0.35,
            label,
            size=font,
            anchor="end",
        )
        picture.text(
            left + (i + 0.5) * side + 3,
            top - 5,
            label,
            size=font,
            anchor="start",
            rotate=-50,
        )
    frames: list[str] = []
    for row, column in zip(*_cells(size, future), strict=True):
        weight = float(grid[row, column])
        x, y = round(left + column * side, 1), round(top + row * side, 1)
        frames.append(f"M{x:.4g} {y:.4g}h{side:.4g}v{side:.4g}h-{side:.4g}z")
        if not all_cells and weight < 0.0005:
            continue
        cls = "mv-future" if column > row else "mv-cell"
        opacity = np.sqrt(min(max(weight, 0.0), 1.0))
        picture.rect(
            x + 0.6,
            y + 0.6,
            side - 1.2,
            side - 1.2,
            cls=cls,
            radius=2,
            extra=f'fill-opacity="{opacity:.2f}"',
        )
    picture.path("".join(frames), cls="mv-back")
    return picture.render(round(top + size * side + 4, 1))


def _scale(future: bool) -> str:
    color = "color-mix(in srgb,var(--mv-heat) {:.0f}%,var(--mv-paper))"
    keys = "".join(
        f'<span><i style="background:{color.format(100 * weight**0.5)}"></i>'
        f"{weight:g}</span>"
        for weight in (0.01, 0.1, 0.3, 1)
    )
    if future:
        keys += '<span><i style="background:var(--mv-wrong)"></i>looks ahead</span>'
    return f'<p class="mv-note mv-scale"><span>weight</span>{keys}</p>'
