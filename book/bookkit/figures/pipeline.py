"""The "you are here" strip: the way of a request through the engine."""

import difflib
from collections.abc import Iterable

from bookkit.figures import svg
from bookkit.figures.base import Figure

# stage -> (what it hands on, x, y, width, height); two rows, the second runs back, so
# that the loop "once per token" is the closed path between them.
_W, _GAP, _H = 84, 12, 50
_COLUMN = [4 + i * (_W + _GAP) for i in range(4)]
_TOP, _BOTTOM = 48, 132
_STAGES: dict[str, tuple[str, float, float, float, float]] = {
    "tokenizer": ("token ids", _COLUMN[0], _TOP, _W, _H),
    "scheduler": ("who runs", _COLUMN[1], _TOP, _W, _H),
    "block manager": ("which slots", _COLUMN[2], _TOP, _W, _H),
    "runner": ("one batch", _COLUMN[3], _TOP, _W, _H),
    "decoder": ("a score for every token", _COLUMN[2], _BOTTOM, 2 * _W + _GAP, _H),
    "sampler": ("next token", _COLUMN[1], _BOTTOM, _W, _H),
    "detokenizer": ("text", _COLUMN[0], _BOTTOM, _W, _H),
    "kernels": ("", _COLUMN[2], _BOTTOM + _H + 5, 2 * _W + _GAP, 24),
    "server": ("", _COLUMN[2], 5, 2 * _W + _GAP, 24),
}
STAGES = tuple(_STAGES)

_CSS = (
    svg.CSS
    + """
.mv-figure .mv-stage{fill:var(--mv-paper);stroke:var(--mv-dim);stroke-width:1.2;
 stroke-dasharray:4 3}
.mv-figure .mv-stage-built{fill:var(--mv-built);stroke-dasharray:none}
.mv-figure .mv-stage-here{fill:var(--mv-lit);stroke:var(--mv-ink);stroke-width:2;
 stroke-dasharray:none}
.mv-figure svg .mv-on-lit{fill:var(--mv-lit-ink)}
.mv-figure .mv-key{display:inline-block;width:20px;height:12px;border-radius:3px;
 vertical-align:-1px;margin:0 5px 0 0;border:1px dashed var(--mv-dim)}
.mv-figure .mv-key-built{background:var(--mv-built);border-style:solid}
.mv-figure .mv-key-here{background:var(--mv-lit);border:2px solid var(--mv-ink)}
.mv-figure .mv-keys span{white-space:nowrap;margin-right:12px}
"""
)


def pipeline(here: str | Iterable[str] | None, built: Iterable[str]) -> Figure:
    """See `bookkit.draw.pipeline`."""
    lit = {here} if isinstance(here, str) else set(here or ())
    shaded = set(built)
    for name in sorted(lit | shaded):
        _check(name)
    picture = svg.Svg(380)
    mid_top, mid_bottom = _TOP + _H / 2, _BOTTOM + _H / 2
    first = _COLUMN[0] + _W / 2
    picture.text(first, 21, "your text", size=12.5)
    picture.arrow((_COLUMN[2], 17), (first + 36, 17))
    picture.arrow((first, 27), (first, _TOP))
    for column in _COLUMN[:3]:
        picture.arrow((column + _W, mid_top), (column + _W + _GAP, mid_top))
    down = _COLUMN[3] + _W / 2
    picture.arrow((down, _TOP + _H), (down, _BOTTOM))
    for column in (_COLUMN[2], _COLUMN[1]):
        picture.arrow((column, mid_bottom), (column - _GAP, mid_bottom))
    up = _COLUMN[1] + _W / 2
    picture.arrow((up, _BOTTOM), (up, _TOP + _H))
    picture.text(
        up + 8,
        (_TOP + _H + _BOTTOM) / 2 + 4,
        "once per token",
        size=11.5,
        anchor="start",
        cls="mv-dim",
    )
    picture.arrow((first, _BOTTOM + _H), (first, _BOTTOM + _H + 20))
    picture.text(first, _BOTTOM + _H + 33, "its answer", size=12.5)
    for name, (gives, x, y, width, height) in _STAGES.items():
        _stage(picture, name, gives, x, y, width, height, lit, shaded)
    order = ["text", *STAGES[:7], "text"]
    marks = {
        n: f"[{n}]" if n in lit else n if n in shaded else f"({n})" for n in STAGES
    }
    text = " -> ".join(marks.get(name, name) for name in order)
    extra = [marks[n] for n in ("kernels", "server") if n in lit | shaded]
    if extra:
        text += "   with " + ", ".join(extra)
    text += "\n[this chapter]  built  (to come)"
    keys = (
        '<p class="mv-note mv-keys">'
        '<span><i class="mv-key mv-key-here"></i>this chapter</span>'
        '<span><i class="mv-key mv-key-built"></i>already built</span>'
        '<span><i class="mv-key"></i>to come</span></p>'
    )
    alt = "The engine's pipeline: text, " + ", ".join(STAGES[:7]) + ", text; the steps "
    alt += "from scheduler to sampler repeat once per token. "
    alt += f"This chapter: {_names(lit)}. Already built: {_names(shaded - lit)}."
    return Figure(
        picture.render(_BOTTOM + _H + 37) + keys,
        text=text,
        alt=alt,
        css=_CSS,
        width=480,
    )


def _names(names: set[str]) -> str:
    return ", ".join(name for name in STAGES if name in names) or "none"


def _check(name: str) -> None:
    if name not in _STAGES:
        near = difflib.get_close_matches(name, STAGES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {list(STAGES)}"
        raise ValueError(f"the pipeline has no stage {name!r}: {hint}")


def _stage(
    picture: svg.Svg,
    name: str,
    gives: str,
    x: float,
    y: float,
    width: float,
    height: float,
    lit: set[str],
    shaded: set[str],
) -> None:
    state = "here" if name in lit else "built" if name in shaded else "later"
    picture.rect(x, y, width, height, cls=f"mv-stage mv-stage-{state}", radius=7)
    ink = {"here": "mv-on-lit", "built": "", "later": "mv-dim"}[state]
    center = x + width / 2
    words = name.split() if len(name) > 12 else [name]
    size = 12 if len(name) > 10 else 13
    lines = [(word, size, f"{ink} mv-bold") for word in words]
    if gives:
        lines.append((gives, 11.5, ink or "mv-dim"))
    leading = 14 if len(lines) > 2 else 16
    first = y + height / 2 - leading * (len(lines) - 1) / 2 + 4
    for i, (line, size, cls) in enumerate(lines):
        picture.text(center, first + i * leading, line, size=size, cls=cls.strip())
