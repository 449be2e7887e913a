"""Small tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bookkit.figures.base import Figure, escape
from bookkit.figures.tokens import visible

_CSS = """
.mv-figure .mv-scroll{overflow-x:auto}
.mv-figure .mv-table{border-collapse:collapse;margin:0;font:inherit;color:inherit;
 width:100%;border:0;display:table}
.mv-figure .mv-table caption{caption-side:top;text-align:left;font-weight:600;
 color:inherit;padding:0 0 6px;font-size:14px}
.mv-figure .mv-table tr{background:transparent;border:0}
.mv-figure .mv-th,.mv-figure .mv-td{padding:4px 9px;border:0;
 border-bottom:1px solid var(--mv-line);text-align:left;background:transparent;
 color:inherit;font-size:14px;vertical-align:baseline}
.mv-figure .mv-th{font-weight:600;color:var(--mv-dim);font-size:12.5px;
 vertical-align:bottom}
.mv-figure .mv-r{text-align:right;font-variant-numeric:tabular-nums}
.mv-figure .mv-table tr:last-child .mv-td{border-bottom:0}
.mv-figure .mv-td code{font:14px/1.4 ui-monospace,"SF Mono",Menlo,Consolas,monospace;
 background:transparent;border:0;padding:0;color:inherit;white-space:pre-wrap}
.mv-figure .mv-meter{display:block;height:12px;width:clamp(70px,30vw,220px);
 border-left:1.5px solid var(--mv-dim)}
.mv-figure .mv-meter i{display:block;height:100%;background:var(--mv-measured);
 border-radius:0 3px 3px 0}
"""


def table(
    rows: Sequence[Sequence[Any]],
    header: Sequence[str],
    caption: str,
    align: str | None,
) -> Figure:
    """See `bookkit.draw.table`."""
    for row in rows:
        if len(row) != len(header):
            raise ValueError(
                f"a row has {len(row)} cells, the header {len(header)}: {list(row)}"
            )
    sides = align or "".join(
        "r" if rows and all(_is_number(row[i]) for row in rows) else "l"
        for i in range(len(header))
    )
    if len(sides) != len(header) or set(sides) - set("lrc"):
        raise ValueError(
            f"align is {align!r}, but it needs one of 'l', 'r', 'c' for each of the "
            f"{len(header)} columns"
        )
    cells = [[_cell_text(cell) for cell in row] for row in rows]
    markup = [
        [
            f"<code>{escape(cell)}</code>" if side == "c" else escape(cell)
            for cell, side in zip(row, sides, strict=True)
        ]
        for row in cells
    ]
    return _build(markup, cells, header, sides, caption)


def top_tokens(tokenizer: Any, logits: Any, k: int) -> Figure:
    """See `bookkit.draw.top_tokens`."""
    if hasattr(logits, "detach"):  # a torch tensor, of any dtype and device
        logits = logits.detach().float().cpu().numpy()
    scores = np.asarray(logits, dtype=np.float64)
    if scores.ndim != 1 or not 1 <= k <= scores.size:
        raise ValueError(
            f"logits have shape {list(scores.shape)} and k is {k}: pass one row of "
            "scores, one per token of the vocabulary, and a k that fits"
        )
    weights = np.exp(scores - scores.max())
    probabilities = weights / weights.sum()
    best = np.argsort(-scores, kind="stable")[:k]
    header = ("token", "id", "probability", "")
    markup, cells = [], []
    for token in best:
        share = probabilities[token]
        shown, _ = visible(tokenizer.token_bytes(int(token)))
        percent = f"{share:.1%}"
        width = f"{share / probabilities[best[0]]:.0%}"
        bar = f'<span class="mv-meter"><i style="width:{width}"></i></span>'
        markup.append([f"<code>{escape(shown)}</code>", str(token), percent, bar])
        cells.append([shown, str(token), percent, "█" * round(20 * float(share))])
    return _build(markup, cells, header, "lrrl", f"The {k} likeliest next tokens")


def _build(
    markup: list[list[str]],
    cells: list[list[str]],
    header: Sequence[str],
    sides: str,
    caption: str,
) -> Figure:
    def row(tag: str, values: Sequence[str]) -> str:
        return (
            "<tr>"
            + "".join(
                f'<{tag} class="mv-{tag}{" mv-r" if side == "r" else ""}"'
                + (' scope="col"' if tag == "th" else "")
                + f">{value}</{tag}>"
                for value, side in zip(values, sides, strict=True)
            )
            + "</tr>"
        )

    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = (
        f'<div class="mv-scroll"><table class="mv-table">{title}'
        f"<thead>{row('th', [escape(name) for name in header])}</thead><tbody>"
        + "".join(row("td", values) for values in markup)
        + "</tbody></table></div>"
    )
    lines = [list(header), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = "\n".join(
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(line, widths, sides, strict=True)
        ).rstrip()
        for line in lines
    )
    if caption:
        text = f"{caption}\n{text}"
    return Figure(body, text=text, css=_CSS, width=720, full=False)


def _is_number(cell: Any) -> bool:
    return isinstance(cell, int | float | np.number) and not isinstance(cell, bool)


def _cell_text(cell: Any) -> str:
    if isinstance(cell, bool) or not _is_number(cell):
        return str(cell)
    if isinstance(cell, int | np.integer):
        return f"{cell:,}"
    return f"{cell:.4g}"
