"""One decoder block, drawn from a ModelSpec."""

from math import prod
from typing import Any

from bookkit.figures import svg
from bookkit.figures.base import Figure

_WIDTH, _RAIL, _LEFT, _RIGHT = 380, 16, 40, 376
_MIDDLE = (_LEFT + _RIGHT) / 2

_CSS = (
    svg.CSS
    + """
.mv-figure .mv-weights{fill:var(--mv-built);stroke:var(--mv-dim);stroke-width:1.2}
.mv-figure .mv-compute{fill:var(--mv-paper);stroke:var(--mv-dim);stroke-width:1.2}
.mv-figure .mv-residual{fill:none;stroke:var(--mv-predicted);stroke-width:2}
.mv-figure .mv-plus{fill:var(--mv-paper);stroke:var(--mv-predicted);stroke-width:2}
.mv-figure .mv-head-q{fill:var(--mv-heat)}
.mv-figure .mv-head-kv{fill:var(--mv-predicted)}
"""
)


class _Drawing:
    """Stacks boxes downwards and remembers where the line stands."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.shapes = spec.weight_shapes()
        self.svg = svg.Svg(_WIDTH)
        self.y = 0.0
        self.lines: list[str] = []

    def count(self, name: str) -> int:
        """Return how many parameters of block 0 belong to a part (weight and bias)."""
        prefix = f"layers.0.{name}."
        return sum(prod(s) for n, s in self.shapes.items() if n.startswith(prefix))

    def arrow(self, *columns: float, length: float = 16) -> None:
        for x in columns or (_MIDDLE,):
            self.svg.arrow((x, self.y), (x, self.y + length))
        self.y += length

    def shape(self, text: str) -> None:
        """Write the shape of what flows, beside the line."""
        self.svg.text(
            _MIDDLE + 8, self.y - 6, text, size=11.5, anchor="start", cls="mv-dim"
        )

    def row(
        self, *boxes: tuple[str, list[str], bool], height: float = 40, room: float = 0
    ) -> list[float]:
        """Draw boxes side by side: (name, more lines, has weights). Return centres.

        `room` is left empty at the bottom of the boxes.
        """
        gap = 8
        width = (_RIGHT - _LEFT - gap * (len(boxes) - 1)) / len(boxes)
        centers = []
        for i, (name, lines, has_weights) in enumerate(boxes):
            x = _LEFT + i * (width + gap)
            cls = "mv-weights" if has_weights else "mv-compute"
            self.svg.rect(x, self.y, width, height, cls=cls, radius=6)
            center = x + width / 2
            first = self.y + (height - room) / 2 + 4.5 - 7.5 * len(lines)
            self.svg.text(center, first, name, size=13, cls="mv-bold")
            for j, line in enumerate(lines):
                self.svg.text(center, first + 15 * (j + 1), line, size=11.5)
            self.lines.append("  " + "  ".join([name, *lines]))
            centers.append(center)
        self.y += height
        return centers

    def split(self, columns: list[float]) -> None:
        """Lead the middle line to several columns."""
        self.svg.path(f"M{_MIDDLE:g} {self.y:g}V{self.y + 8:g}")
        self.y += 8
        for x in columns:
            corner = [] if x == _MIDDLE else [(_MIDDLE, self.y)]
            self.svg.arrow(*corner, (x, self.y), (x, self.y + 12))
        self.y += 12

    def add_residual(self, top: float) -> None:
        """Draw the way around a sublayer, from `top` to a plus here."""
        center = self.y + 11
        self.svg.path(
            f"M{_MIDDLE:g} {top:g}H{_RAIL + 8:g}"
            f"Q{_RAIL:g} {top:g} {_RAIL:g} {top + 8:g}"
            f"V{center - 8:g}Q{_RAIL:g} {center:g} {_RAIL + 8:g} {center:g}"
            f"H{_MIDDLE - 11:g}",
            cls="mv-residual",
        )
        self.svg.parts.append(
            f'<circle cx="{_MIDDLE:g}" cy="{center:g}" r="11" class="mv-plus"/>'
        )
        self.svg.text(_MIDDLE, center + 5, "+", size=16, cls="mv-bold")
        self.lines.append("  + (what came in is added back)")
        self.y += 22


def block(spec: Any) -> Figure:
    """See `bookkit.draw.block`."""
    draw = _Drawing(spec)
    hidden = spec.hidden_size
    flow = f"[n, {hidden:,}]"
    draw.y = 14
    draw.svg.text(_MIDDLE, 11, f"hidden_states {flow}", size=12.5)
    _attention_part(draw, flow)
    _mlp_part(draw, flow)
    draw.arrow(length=20)
    total = sum(prod(s) for n, s in draw.shapes.items() if n.startswith("layers.0."))
    draw.svg.text(
        _MIDDLE, draw.y + 13, f"hidden_states {flow}, to the next layer", size=12.5
    )
    summary = f"{total:,} parameters in a layer, {spec.num_layers} layers"
    note = (
        f'<p class="mv-note"><b>{summary}.</b> n is the number of tokens. '
        "Shaded boxes hold weights, the others only compute.</p>"
    )
    head = f"one layer of {spec.architecture}: {summary}"
    text = "\n".join([head, f"  hidden_states {flow}", *draw.lines])
    alt = (
        head + ". From top to bottom: " + "; ".join(s.strip() for s in draw.lines) + "."
    )
    return Figure(
        draw.svg.render(draw.y + 18) + note, text=text, alt=alt, css=_CSS, width=470
    )


def _attention_part(draw: _Drawing, flow: str) -> None:
    spec = draw.spec
    draw.arrow(length=18)
    top = draw.y - 12
    draw.row(("RMSNorm", [amount(draw.count("input_layernorm"))], True))
    shapes = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
    boxes = [
        (
            f"{part}_proj",
            [
                f"[n, {num_heads}, {spec.head_dim}]",
                amount(draw.count(f"self_attn.{part}_proj")),
            ],
            True,
        )
        for part, num_heads in shapes.items()
    ]
    width = (_RIGHT - _LEFT - 16) / 3
    columns = [_LEFT + width / 2 + i * (width + 8) for i in range(3)]
    draw.split(columns)
    draw.row(*boxes, height=56)
    # RoPE turns q and k; v passes by.
    start = draw.y
    draw.arrow(*columns[:2], length=14)
    draw.svg.rect(_LEFT, draw.y, 2 * width + 8, 26, cls="mv-compute", radius=6)
    draw.svg.text(_LEFT + width + 4, draw.y + 17, "RoPE", size=13, cls="mv-bold")
    draw.lines.append(f"  RoPE on q and k  theta {spec.rope.theta:,.0f}")
    draw.y += 26
    draw.svg.arrow((columns[2], start), (columns[2], draw.y + 14))
    draw.arrow(*columns[:2], length=14)
    group = spec.num_heads // spec.num_kv_heads
    share = "one each" if group == 1 else f"{group} query heads share one"
    kv = f"{spec.num_kv_heads} key/value head{'s' * (spec.num_kv_heads > 1)}"
    pictured = spec.num_heads <= 32
    y = draw.y
    draw.row(
        ("attention", [f"{spec.num_heads} query heads, {kv}: {share}"], False),
        height=70 if pictured else 40,
        room=30 if pictured else 0,
    )
    if pictured:
        _draw_heads(draw, y, spec.num_heads, spec.num_kv_heads)
    draw.arrow(length=20)
    draw.shape(f"[n, {spec.num_heads * spec.head_dim:,}]")
    draw.row(("o_proj", [amount(draw.count("self_attn.o_proj"))], True))
    draw.arrow(length=20)
    draw.shape(flow)
    draw.add_residual(top)


def _draw_heads(draw: _Drawing, y: float, num_heads: int, num_kv_heads: int) -> None:
    """Draw one square per query head over the key/value head that its group reads."""
    group = num_heads // num_kv_heads
    gap = 6.0
    side = min(14.0, (_RIGHT - _LEFT - 24 - gap * num_kv_heads) / num_heads)
    total = num_heads * side + gap * (num_kv_heads - 1)
    x = _MIDDLE - total / 2
    for _ in range(num_kv_heads):
        for i in range(group):
            draw.svg.rect(
                x + i * side + 1, y + 41, side - 2, 9, cls="mv-head-q", radius=2
            )
        draw.svg.rect(x + 1, y + 54, group * side - 2, 9, cls="mv-head-kv", radius=2)
        x += group * side + gap


def _mlp_part(draw: _Drawing, flow: str) -> None:
    spec = draw.spec
    draw.arrow(length=30)
    draw.svg.text(
        _MIDDLE + 8, draw.y - 17, flow, size=11.5, anchor="start", cls="mv-dim"
    )
    top = draw.y - 12
    draw.row(
        ("RMSNorm", [amount(draw.count("post_attention_layernorm"))], True), height=40
    )
    half = (_RIGHT - _LEFT - 8) / 2
    columns = [_LEFT + half / 2, _RIGHT - half / 2]
    draw.split(columns)
    wide = f"[n, {spec.intermediate_size:,}]"
    draw.row(
        *(
            (f"{part}_proj", [wide, amount(draw.count(f"mlp.{part}_proj"))], True)
            for part in ("gate", "up")
        ),
        height=56,
    )
    draw.arrow(*columns, length=14)
    name = "SwiGLU" if spec.hidden_act == "silu" else "gated unit"
    formula = f"{spec.hidden_act}(gate) × up"  # noqa: RUF001
    draw.row((name, [formula], False))
    draw.arrow(length=20)
    draw.shape(wide)
    draw.row(("down_proj", [amount(draw.count("mlp.down_proj"))], True))
    draw.arrow(length=20)
    draw.shape(flow)
    draw.add_residual(top)


def amount(count: int) -> str:
    """Write a number of parameters: exact below ten million, then in millions."""
    return (
        f"{count:,} weights" if count < 10_000_000 else f"{count / 1e6:,.1f} M weights"
    )
