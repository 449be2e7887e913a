"""What the threads of an emulated kernel did: pictures of a recorded launch.

A trace is that of `minivllm.ops.kernel_trace`: every load and store of every thread.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bookkit.figures import svg
from bookkit.figures.base import Figure, escape

WARP = 32
SECTOR_BYTES = 32
BANKS = 32
KINDS = ("read", "write", "atomic")

# Shades of one hue tell numbers apart where a number stands in the cell as well.
_CSS = """
.mv-figure .mv-shade{background:color-mix(in srgb,var(--mv-heat) var(--mv-share),
 var(--mv-paper))}
.mv-figure .mv-panel{margin:0 0 10px}
.mv-figure .mv-panel:last-of-type{margin-bottom:0}
.mv-figure .mv-panel-title{font-weight:600;font-size:13px;margin:0 0 5px}
.mv-figure .mv-panel-title small{font-weight:400;color:var(--mv-dim);font-size:12.5px}
"""

_CELLS_CSS = """
.mv-figure .mv-map{display:grid;grid-template-columns:auto minmax(0,1fr);gap:3px 8px;
 align-items:center;font-size:11.5px;font-variant-numeric:tabular-nums}
.mv-figure .mv-map-name{color:var(--mv-dim);white-space:nowrap;text-align:right}
.mv-figure .mv-map-row{display:grid;gap:1px;
 grid-template-columns:repeat(var(--mv-columns),minmax(0,1fr))}
.mv-figure .mv-map-row i{font-style:normal;text-align:center;height:20px;
 line-height:20px;border-radius:3px;overflow:hidden;min-width:0}
.mv-figure .mv-map-row .mv-blank{border:1px dashed var(--mv-line)}
@media (max-width:480px){.mv-figure .mv-map{font-size:9.5px;gap:3px 5px}}
"""

_SECTORS_CSS = """
.mv-figure .mv-sectors{display:grid;gap:5px 8px;
 grid-template-columns:repeat(auto-fill,minmax(118px,1fr))}
.mv-figure .mv-sector small{display:block;color:var(--mv-dim);font-size:11px;
 line-height:1.3;font-variant-numeric:tabular-nums}
.mv-figure .mv-sector div{display:grid;
 grid-template-columns:repeat(var(--mv-words),1fr);
 border:1.5px solid var(--mv-ink);border-radius:4px;overflow:hidden;font-size:10.5px}
.mv-figure .mv-sector i{font-style:normal;text-align:center;height:18px;
 line-height:18px;font-variant-numeric:tabular-nums}
@media (max-width:480px){.mv-figure .mv-sectors{gap:4px 6px;
 grid-template-columns:repeat(3,minmax(0,1fr))}
 .mv-figure .mv-sector div{font-size:9px}}
"""

_BANKS_CSS = """
.mv-figure .mv-banks{display:grid;gap:1px;align-items:center;font-size:10.5px;
 grid-template-columns:minmax(52px,auto) repeat(32,minmax(0,1fr));
 font-variant-numeric:tabular-nums}
.mv-figure .mv-banks i{font-style:normal;text-align:center;height:17px;line-height:17px;
 border-radius:2px;min-width:0;overflow:hidden}
.mv-figure .mv-banks .mv-idle{background:var(--mv-grey)}
.mv-figure .mv-banks .mv-once{background:var(--mv-measured)}
.mv-figure .mv-banks .mv-again{background:var(--mv-wrong);color:var(--mv-paper);
 font-weight:600}
.mv-figure .mv-banks small{color:var(--mv-dim);font-size:11px;white-space:nowrap;
 padding-right:6px;text-align:right}
@media (max-width:480px){.mv-figure .mv-banks{font-size:8.5px}}
"""

_TURNS_CSS = (
    svg.CSS
    + """
.mv-figure .mv-turn{fill:var(--mv-measured)}
.mv-figure .mv-turn-next{fill:var(--mv-predicted)}
.mv-figure .mv-lane{stroke:var(--mv-line);stroke-width:1}
.mv-figure .mv-barrier{stroke:var(--mv-ink);stroke-width:1.6;stroke-dasharray:4 3}
"""
)


def _number_of(trace: Any, memory: str) -> int:
    """Return which memory of a trace has a name."""
    for number, known in enumerate(trace.memories):
        if memory in known.name.split("/"):
            return number
    names = ", ".join(known.name for known in trace.memories)
    raise ValueError(f"the launch has no memory {memory!r}: choose from {names}")


def _select(trace: Any, memory: str, kind: str) -> Any:
    """Return the accesses of one kind to one memory, in order."""
    if kind not in KINDS:
        raise ValueError(f"there is no kind {kind!r}: choose from {', '.join(KINDS)}")
    rows = trace.accesses
    is_wanted = rows.memory == _number_of(trace, memory)
    return rows[is_wanted & (rows.kind == KINDS.index(kind))]


def _shade(number: int, count: int) -> str:
    """Return class and style of a cell with one of `count` numbers."""
    share = 14 + 34 * number / max(1, count - 1)  # never too dark to read on
    return f'class="mv-shade" style="--mv-share:{share:.0f}%'


def touched(
    trace: Any,
    memory: str,
    shape: tuple[int, int],
    kind: str,
    row_name: str,
    itemsize: int,
) -> Figure:
    """See `bookkit.draw.touched`."""
    accesses = _select(trace, memory, kind)
    num_rows, num_columns = shape
    blocks: list[set[int]] = [set() for _ in range(num_rows)]
    threads: list[list[set[int]]] = [
        [set() for _ in range(num_columns)] for _ in range(num_rows)
    ]
    for access in accesses:
        first = access.offset // itemsize
        for place in range(first, first + access.bytes // itemsize):
            row, column = divmod(int(place), num_columns)
            if row >= num_rows:
                raise ValueError(
                    f"{memory} is touched at number {place}, but a shape of {shape} "
                    f"has {num_rows * num_columns}: pass that of the whole array"
                )
            blocks[row].add(int(access.block))
            threads[row][column].add(int(access.thread))
    count = 1 + max((max(who) for row in threads for who in row if who), default=0)
    lines, html = [], []
    has_many_blocks = len(set().union(*blocks)) > 1
    for row in range(num_rows):
        name = f"{row_name} {row}"
        if blocks[row] and has_many_blocks:
            name += ", block " + ", ".join(map(str, sorted(blocks[row])))
        cells, runs = [], _runs(threads[row])
        for who, length in runs:
            span = f";grid-column:span {length}" if length > 1 else ""
            if not who:
                style = f' style="grid-column:span {length}"' if length > 1 else ""
                cells.append(f'<i class="mv-blank"{style}></i>')
                continue
            label = _names(who)
            cells.append(f'<i {_shade(min(who), count)}{span}">{label}</i>')
        html.append(
            f'<span class="mv-map-name">{escape(name)}</span>'
            f'<div class="mv-map-row">{"".join(cells)}</div>'
        )
        told = ", ".join(
            f"{length} by thread {_names(who)}" if who else f"{length} by none"
            for who, length in runs[:6]
        )
        more = f", and so on, {len(runs)} pieces" if len(runs) > 6 else ""
        lines.append(f"{name}: {told}{more}")
    body = (
        f'<div class="mv-map" style="--mv-columns:{num_columns}">{"".join(html)}</div>'
        f'<p class="mv-note">In each place: the thread that {_verb(kind)} it.</p>'
    )
    text = "\n".join([f"who {_verb(kind)} {memory}:", *(f"  {x}" for x in lines)])
    alt = f"Which thread {_verb(kind)} each number of {memory}. " + ". ".join(lines)
    return Figure(body, text=text, alt=alt + ".", css=_CSS + _CELLS_CSS, width=760)


def _verb(kind: str) -> str:
    return {"read": "reads", "write": "writes", "atomic": "changes"}[kind]


def _names(who: set[int]) -> str:
    """Name threads: a few by number, many by the first and the last."""
    names = sorted(who)
    if len(names) <= 2:
        return ",".join(map(str, names))
    return f"{names[0]}–{names[-1]}"  # noqa: RUF001


def _runs(row: Sequence[set[int]]) -> list[tuple[set[int], int]]:
    """Join neighbours that the same threads have touched."""
    runs: list[tuple[set[int], int]] = []
    for who in row:
        if runs and runs[-1][0] == who:
            runs[-1] = (who, runs[-1][1] + 1)
        else:
            runs.append((who, 1))
    return runs


def sectors(
    traces: Mapping[str, Any], memory: str, kind: str, nth: int, itemsize: int
) -> Figure:
    """See `bookkit.draw.sectors`."""
    panels, lines = [], []
    for name, trace in traces.items():
        lanes = _nth_of_warp(trace, memory, kind, nth)
        pieces: dict[int, dict[int, int]] = {}  # sector -> word in it -> lane
        num_bytes = 0
        for lane, offset, size in lanes:
            num_bytes += size
            for byte in range(offset, offset + size, itemsize):
                sector, rest = divmod(byte, SECTOR_BYTES)
                pieces.setdefault(sector, {})[rest // itemsize] = lane
        words = SECTOR_BYTES // itemsize
        boxes = []
        for sector in sorted(pieces):
            cells = "".join(
                f'<i {_shade(pieces[sector][word], WARP)}">{pieces[sector][word]}</i>'
                if word in pieces[sector]
                else "<i></i>"
                for word in range(words)
            )
            boxes.append(
                f'<div class="mv-sector" style="--mv-words:{words}">'
                f"<small>byte {sector * SECTOR_BYTES:,}</small><div>{cells}</div></div>"
            )
        told = (
            f"{len(lanes)} lanes ask for {num_bytes} bytes, and {len(pieces)} sectors "
            f"move: {len(pieces) * SECTOR_BYTES:,} bytes"
        )
        panels.append(
            f'<div class="mv-panel"><div class="mv-panel-title">{escape(name)} '
            f'<small>{told}</small></div><div class="mv-sectors">{"".join(boxes)}'
            "</div></div>"
        )
        lines.append(f"{name}: {told}")
    note = (
        '<p class="mv-note">A frame is a sector, 32 bytes that memory moves together. '
        "In it: the lane that asks for the number; what is empty moves for nothing.</p>"
    )
    return Figure(
        "".join(panels) + note,
        text="\n".join(lines),
        alt=". ".join(lines) + ".",
        css=_CSS + _SECTORS_CSS,
        width=760,
    )


def _nth_of_warp(
    trace: Any, memory: str, kind: str, nth: int
) -> list[tuple[int, int, int]]:
    """Return (lane, offset, bytes) of what the first warp's lanes do the n-th time."""
    rows = _select(trace, memory, kind)
    rows = rows[(rows.block == 0) & (rows.thread < WARP)]
    found, seen = [], dict.fromkeys(range(WARP), 0)
    for row in rows:
        lane = int(row.thread)
        if seen[lane] == nth:
            found.append((lane, int(row.offset), int(row.bytes)))
        seen[lane] += 1
    if not found:
        raise ValueError(
            f"no lane of the first warp {_verb(kind)} {memory} {nth + 1} times: ask "
            "for an earlier time"
        )
    return sorted(found)


def banks(
    traces: Mapping[str, Any], memory: str, kind: str, max_rows: int, bank_bytes: int
) -> Figure:
    """See `bookkit.draw.banks`."""
    panels, lines = [], []
    for name, trace in traces.items():
        rows = _select(trace, memory, kind)
        rows = rows[(rows.block == 0) & (rows.thread < WARP)]
        steps = _instructions(rows)[:max_rows]
        cells, most = [], []
        for number, offsets in enumerate(steps):
            words: dict[int, set[int]] = {}
            for offset in offsets:
                word = offset // bank_bytes
                words.setdefault(word % BANKS, set()).add(word)
            most.append(max(len(asked) for asked in words.values()))
            cells.append(f"<small>{number}: {len(offsets)} lanes</small>")
            for bank in range(BANKS):
                asked = len(words.get(bank, ()))
                state = "mv-again" if asked > 1 else "mv-once" if asked else "mv-idle"
                cells.append(f'<i class="{state}">{asked if asked > 1 else ""}</i>')
        told = f"{sum(most)} passes for {len(steps)} {kind}s"
        panels.append(
            f'<div class="mv-panel"><div class="mv-panel-title">{escape(name)} '
            f'<small>{told}</small></div><div class="mv-banks">{"".join(cells)}'
            "</div></div>"
        )
        lines.append(f"{name}: {told}, each {most}")
    note = (
        f'<p class="mv-note">One row for each {kind} of the first warp, one column '
        "for each of the 32 banks. Blue: asked for one word. Red: asked for so many "
        "different words, one after the other.</p>"
    )
    return Figure(
        "".join(panels) + note,
        text="\n".join(lines),
        alt=". ".join(lines) + ".",
        css=_CSS + _BANKS_CSS,
        width=760,
    )


def _instructions(rows: Any) -> list[list[int]]:
    """Return the offsets of each instruction of a warp, in order.

    Lanes of a warp do the same, so each lane's n-th access at a place is one of the
    n-th instruction there; a lane that sits out is not in it.
    """
    seen: dict[tuple[int, int], int] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        who = (int(row.place), int(row.thread))
        nth = seen[who] = seen.get(who, -1) + 1
        groups.setdefault((int(row.place), nth), []).append(int(row.offset))
    return list(groups.values())


def turns(trace: Any, num_threads: int, block: int) -> Figure:
    """See `bookkit.draw.turns`."""
    ran = [t for t in trace.turns if t.block == block and t.thread < num_threads]
    if not ran:
        raise ValueError(f"block {block} has no such threads: choose another one")
    left, top, height, width = 62, 8, 19, 560
    step = (width - left - 6) / len(ran)
    picture = svg.Svg(width)
    for thread in range(num_threads):
        y = top + thread * height + height / 2
        picture.path(f"M{left} {y:g}H{width - 4}", cls="mv-lane")
        picture.text(left - 8, y + 4, f"thread {thread}", size=11.5, anchor="end")
    phase, arrived, bars = 0, 0, []
    places: list[str] = []
    for number, turn in enumerate(ran):
        x = left + number * step
        y = top + turn.thread * height + 3
        cls = "mv-turn" if phase % 2 == 0 else "mv-turn-next"
        picture.rect(x + 0.5, y, max(1.0, step - 1), height - 6, cls=cls, radius=2)
        arrived += 1
        if arrived == num_threads:
            arrived, phase = 0, phase + 1
            if number + 1 < len(ran):
                bars.append(x + step)
                places.append(turn.place)
    bottom = top + num_threads * height
    for x in bars:
        picture.path(f"M{x:g} {top - 4}V{bottom + 4}", cls="mv-barrier")
    picture.text(left, bottom + 20, "time", size=11.5, anchor="start", cls="mv-dim")
    told = (
        f"{num_threads} threads, {len(bars)} barriers: at each, all threads arrive "
        "before the first goes on"
    )
    note = (
        '<p class="mv-note">A bar is a thread at work, a dashed line a barrier. The '
        "emulator lets one thread run at a time; on a GPU the lanes of a warp mostly "
        "run together.</p>"
    )
    text = "\n".join([told, *(f"  barrier {i}: {p}" for i, p in enumerate(places))])
    return Figure(
        picture.render(bottom + 26) + note,
        text=text,
        alt=told + ".",
        css=_TURNS_CSS,
        width=620,
    )
