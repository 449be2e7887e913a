"""A few lines that write SVG whose colours come from the page."""

from bookkit.figures.base import escape


class Svg:
    """Collects shapes; `render` returns the element.

    Coordinates are CSS pixels of a drawing `width` wide. The drawing scales with the
    card, so a text of 12 here is about 11 px on a phone if `width` is 380.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        cls: str = "",
        radius: float = 0,
        extra: str = "",
    ) -> None:
        """Add a rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
            + (f' rx="{radius:g}"' if radius else "")
            + (f' class="{cls}"' if cls else "")
            + (f" {extra}" if extra else "")
            + "/>"
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: str = "middle",
        cls: str = "",
        rotate: float = 0,
    ) -> None:
        """Add one line of text; `y` is its baseline."""
        turn = f' transform="rotate({rotate:g} {x:g} {y:g})"' if rotate else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
            + (f' class="{cls}"' if cls else "")
            + f' xml:space="preserve"{turn}>{escape(text)}</text>'
        )

    def path(self, d: str, *, cls: str = "mv-wire") -> None:
        """Add a line or an outline."""
        self.parts.append(f'<path d="{d}" class="{cls}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Add a polyline that ends in an arrow head."""
        d = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self.path(d)
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        left = (x1 - 6 * ux - 3.5 * uy, y1 - 6 * uy + 3.5 * ux)
        right = (x1 - 6 * ux + 3.5 * uy, y1 - 6 * uy - 3.5 * ux)
        head = "L".join(f"{x:g} {y:g}" for x, y in (left, (x1, y1), right))
        self.path(f"M{head}Z", cls="mv-head")

    def render(self, height: float) -> str:
        """Return the SVG element. The card around it carries the alt text."""
        return (
            f'<svg viewBox="0 0 {self.width} {height:g}" aria-hidden="true">'
            + "".join(self.parts)
            + "</svg>"
        )


CSS = """
.mv-figure .mv-wire{fill:none;stroke:var(--mv-dim);stroke-width:1.4}
.mv-figure .mv-head{fill:var(--mv-dim)}
.mv-figure svg .mv-dim{fill:var(--mv-dim)}
.mv-figure svg .mv-bold{font-weight:600}
"""
