"""The colours of the whole book, and what they mean.

A request keeps its letter, hue and hatch in every figure, so no figure depends on
colour alone. The hues stay apart for readers with each common kind of colour
blindness and against both the light and the dark page; a test simulates and checks it.
"""

from dataclasses import dataclass

# Light page, dark page. Matplotlib draws with the first; figures.plot then swaps them
# for CSS variables of the same name, so a plot follows the page too.
THEME: dict[str, tuple[str, str]] = {
    "ink": ("#1f2430", "#e8eaf0"),
    "dim": ("#59616f", "#a9b1c0"),
    "line": ("#c6ccd7", "#475063"),
    "paper": ("#ffffff", "#1b1e26"),
    "grey": ("#d9dde5", "#3a4150"),  # padding
    "built": ("#e1e8f3", "#2d3a52"),
    "heat": ("#1660f0", "#7fb0ff"),
    "wrong": ("#c62840", "#ff7b8b"),
    "right": ("#127a4d", "#5fd29c"),
    "measured": ("#2b4a9b", "#9db8ff"),
    "predicted": ("#a35a00", "#ffbe5c"),
}
LIT = "#ffd166"  # "you are here", on both pages
LIT_INK = "#1f2430"

MEASURED = THEME["measured"][0]
PREDICTED = THEME["predicted"][0]
ACCENT = LIT


@dataclass(frozen=True, slots=True)
class RequestStyle:
    """How one request looks in every figure."""

    letter: str
    color: str
    ink: str  # readable on `color`
    hatch: str  # as matplotlib writes it
    pattern: str  # the same hatch as a CSS background-image


def _stripes(angle: int) -> str:
    return (
        f"repeating-linear-gradient({angle}deg,transparent 0 4px,"
        "rgba(255,255,255,.38) 4px 6px)"
    )


_DOTS = "radial-gradient(rgba(255,255,255,.5) 1.2px,transparent 1.6px) 0 0/6px 6px"
REQUESTS: tuple[RequestStyle, ...] = (
    RequestStyle("A", "#1660f0", "#ffffff", "", "none"),
    RequestStyle("B", "#e86f0a", "#14161c", "//", _stripes(135)),
    RequestStyle("C", "#0da76f", "#14161c", "..", _DOTS),
    RequestStyle("D", "#c2709d", "#14161c", "\\\\", _stripes(45)),
    RequestStyle("E", "#7e6c30", "#ffffff", "--", _stripes(0)),
    RequestStyle("F", "#7960c4", "#ffffff", "||", _stripes(90)),
)


def request(name: str | int) -> RequestStyle:
    """Return the style of a request: its letter ("A"), its number (0) or its id.

    The seventh request looks like the first again; figures print its name as well.
    """
    if isinstance(name, int):
        return REQUESTS[name % len(REQUESTS)]
    for style in REQUESTS:
        if style.letter == name:
            return style
    # An id such as "request-3" follows its number, any other one its own text.
    digits = name[len(name.rstrip("0123456789")) :]
    return request(int(digits) if digits else sum(name.encode()))
