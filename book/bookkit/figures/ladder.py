"""The speed ladder: tokens per second after each chapter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bookkit.figures.base import Figure, escape


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder; None as speed means that it is still to come."""

    chapter: int | str
    name: str
    tokens_per_second: float | None = None


_CSS = """
.mv-figure .mv-ladder{display:grid;grid-template-columns:auto minmax(0,1fr) auto;
 gap:0 10px;align-items:center}
.mv-figure .mv-rung-name{white-space:nowrap}
.mv-figure .mv-rung-name b{display:inline-block;min-width:1.5em;color:var(--mv-dim);
 font-weight:600}
.mv-figure .mv-track{height:26px;position:relative;
 border-left:1.5px solid var(--mv-dim);
 background-image:linear-gradient(90deg,transparent calc(100% - 1px),var(--mv-line) 0);
 background-size:var(--mv-decade) 100%}
.mv-figure .mv-bar{position:absolute;inset:5px auto 5px 0;border-radius:0 4px 4px 0;
 background:var(--mv-measured)}
.mv-figure .mv-rung-here .mv-bar{background:var(--mv-lit);
 border:2px solid var(--mv-ink);border-left:0;inset:3px auto 3px 0}
.mv-figure .mv-rung-here{font-weight:600}
.mv-figure .mv-rung{display:contents}
.mv-figure .mv-later{color:var(--mv-dim)}
.mv-figure .mv-later .mv-track{border-left-style:dashed}
.mv-figure .mv-speed{text-align:right;font-variant-numeric:tabular-nums;
 white-space:nowrap}
.mv-figure .mv-axis{display:flex;justify-content:space-between;font-size:12px;
 color:var(--mv-dim);font-variant-numeric:tabular-nums}
@media (max-width:480px){.mv-figure .mv-ladder{gap:1px 8px;
 grid-template-columns:minmax(0,1fr) auto}
 .mv-figure .mv-rung-name{grid-column:1/-1;margin-top:3px}
 .mv-figure .mv-later .mv-rung-name{grid-column:auto}
 .mv-figure .mv-later .mv-track,.mv-figure .mv-axis-gap{display:none}}
"""


def ladder(
    rungs: Sequence[Rung | tuple[int | str, str, float | None]],
    here: int | str | None,
    unit: str,
) -> Figure:
    """See `bookkit.draw.ladder`."""
    steps = [rung if isinstance(rung, Rung) else Rung(*rung) for rung in rungs]
    if here is not None and here not in [rung.chapter for rung in steps]:
        chapters = [rung.chapter for rung in steps]
        raise ValueError(f"no rung is chapter {here!r}: choose from {chapters}")
    known = [rung.tokens_per_second for rung in steps if rung.tokens_per_second]
    low = math.floor(math.log10(min(known))) if known else 0
    high = max(low + 1, math.ceil(math.log10(max(known)))) if known else 1
    first = known[0] if known else 0.0
    rows, lines = [], []
    for rung in steps:
        speed = rung.tokens_per_second
        state = " mv-rung-here" if rung.chapter == here else ""
        if speed:
            share = (math.log10(speed) - low) / (high - low)
            bar = f'<div class="mv-bar" style="width:{max(share, 0.01):.1%}"></div>'
            value = short(speed)
            amount = f"{value} {unit}"
            if speed != first:
                ratio = short(speed / first)
                value += f" (×{ratio})"  # noqa: RUF001
                amount += f", {ratio} times the first"
        else:
            bar, state = "", state + " mv-later"
            value = amount = "to come"
        rows.append(
            f'<div class="mv-rung{state}"><div class="mv-rung-name">'
            f"<b>{escape(str(rung.chapter))}</b>{escape(rung.name)}</div>"
            f'<div class="mv-track">{bar}</div>'
            f'<div class="mv-speed">{value}</div></div>'
        )
        mark = "  <- here" if rung.chapter == here else ""
        lines.append(f"{rung.chapter!s:>3}  {rung.name}: {amount}{mark}")
    ticks = "".join(f"<span>{10.0**power:g}</span>" for power in range(low, high + 1))
    body = (
        f'<div class="mv-title">Speed ladder ({escape(unit)}, log scale)</div>'
        f'<div class="mv-ladder" style="--mv-decade:{1 / (high - low):.4%}">'
        + "".join(rows)
        + f'<span class="mv-axis-gap"></span><div class="mv-axis">{ticks}</div></div>'
    )
    text = "\n".join([f"speed ladder ({unit})", *lines])
    alt = "The speed ladder. " + ". ".join(line.strip() for line in lines) + "."
    return Figure(body, text=text, alt=alt, css=_CSS, width=620)


def short(value: float) -> str:
    """Write a positive number with about three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.1e}"
