"""What every figure shares: one HTML card, one style sheet, one text fallback."""

import hashlib
import html
import json
from collections.abc import Iterable
from typing import Any

from bookkit import palette

escape = html.escape


def _theme_css() -> str:
    light = ";".join(f"--mv-{name}:{pair[0]}" for name, pair in palette.THEME.items())
    dark = ";".join(f"--mv-{name}:{pair[1]}" for name, pair in palette.THEME.items())
    # The system's wish counts only where the page does not state its own theme: the
    # book sets data-theme, Colab theme, JupyterLab and VS Code mark the body.
    follows_system = (
        "html:not([data-theme=light]):not([theme=light]) "
        "body:not([data-jp-theme-light=true]):not(.vscode-light) .mv-figure"
    )
    is_dark = (
        "html[data-theme=dark] .mv-figure,html[theme=dark] .mv-figure,"
        "body[data-jp-theme-light=false] .mv-figure,.vscode-dark .mv-figure"
    )
    return (
        f".mv-figure{{{light};--mv-lit:{palette.LIT};--mv-lit-ink:{palette.LIT_INK}}}\n"
        f"@media (prefers-color-scheme:dark){{{follows_system}{{{dark}}}}}\n"
        f"{is_dark}{{{dark}}}"
    )


_CARD_CSS = """
.mv-figure{font:14px/1.45 -apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans",
 "Liberation Sans",Arial,sans-serif;
 color:var(--mv-ink);background:var(--mv-paper);border:1px solid var(--mv-line);
 border-radius:8px;padding:12px 14px;margin:6px 0;box-sizing:border-box;
 max-width:100%;width:fit-content;overflow-wrap:break-word}
.mv-figure *{box-sizing:border-box}
.mv-figure svg{display:block;width:100%;height:auto;overflow:visible}
.mv-figure svg text{fill:var(--mv-ink);font-family:inherit}
.mv-figure .mv-title{font-weight:600;margin:0 0 8px}
.mv-figure .mv-note{color:var(--mv-dim);font-size:12.5px;margin:8px 0 0}
@media (max-width:480px){.mv-figure{padding:9px 8px}}
"""


def request_css(names: Iterable[str]) -> str:
    """Return the rules that give each named request its hue and hatch."""
    rules = []
    for style in dict.fromkeys(palette.request(name) for name in names):
        rules.append(
            f".mv-figure .mv-req-{style.letter}{{--mv-hue:{style.color};"
            f"--mv-hue-ink:{style.ink};--mv-hatch:{style.pattern}}}"
        )
    return "\n".join(rules) + STATE_CSS


# Under a letter or a text the hatch would hurt reading: there it is a strip below.
# Prompt token filled, generated outlined, free white, shared double border, padding
# grey: the same in every figure.
STATE_CSS = """
.mv-figure .mv-prompt{background:var(--mv-hatch),var(--mv-hue);color:var(--mv-hue-ink);
 border:2px solid var(--mv-hue)}
.mv-figure .mv-lettered{padding-bottom:7px}
.mv-figure .mv-lettered:not(.mv-generated){background:
 linear-gradient(var(--mv-hue),var(--mv-hue)) 0 0/100% calc(100% - 7px) no-repeat,
 var(--mv-hatch),var(--mv-hue)}
.mv-figure .mv-generated{background:transparent;color:var(--mv-ink);
 border:2px solid var(--mv-hue)}
.mv-figure .mv-free{background:transparent;border:1px solid var(--mv-line)}
.mv-figure .mv-padding{background:var(--mv-grey);border:1px solid var(--mv-grey)}
.mv-figure .mv-shared{border:4px double var(--mv-ink)}
"""


class Figure:
    """One picture: HTML where HTML is shown, text elsewhere.

    The same data always gives the same bytes, so a notebook that is run again does not
    change.

    Args:
        body: The HTML inside the card.
        text: What `print(figure)` shows.
        alt: What a screen reader says. The card is then one picture to it; None leaves
            the body readable piece by piece (tables, sliders).
        label: Names the card where it is not one picture.
        css: Rules of this kind of figure.
        js: Code that brings the card to life; it sees the card as `root`.
        data: What `js` sees as `data`.
        width: Widest useful width in CSS pixels.
        full: Take that width even if the content needs less.
    """

    def __init__(
        self,
        body: str,
        *,
        text: str,
        alt: str | None = None,
        label: str = "",
        css: str = "",
        js: str = "",
        data: Any = None,
        width: int = 720,
        full: bool = True,
    ) -> None:
        self.body = body
        self.text = text
        self.alt = alt
        self.label = label
        self.css = css
        self.js = js
        self.data = data
        self.width = width
        self.full = full

    def _repr_html_(self) -> str:
        payload = json.dumps(self.data, separators=(",", ":"))
        content = self.body + self.js + payload
        name = "mv-" + hashlib.sha1(content.encode()).hexdigest()[:8]
        return (
            f'<div class="mv-figure" data-mv="{name}" {self._attributes()}>\n'
            f"<style>\n{_theme_css()}{_CARD_CSS}{self.css.strip()}\n</style>\n"
            f"{self.body}\n{self._script(name, payload)}</div>"
        )

    def __repr__(self) -> str:
        return self.text

    def _attributes(self) -> str:
        if self.full:
            size = f"width:100%;max-width:{self.width}px"
        else:
            size = f"max-width:min(100%,{self.width}px)"
        if self.alt is not None:
            return f'style="{size}" role="img" aria-label="{escape(self.alt)}"'
        if self.label:
            return f'style="{size}" role="group" aria-label="{escape(self.label)}"'
        return f'style="{size}"'

    def _script(self, name: str, payload: str) -> str:
        if not self.js:
            return ""
        # A page may show the same figure twice, so every copy not yet set up is found.
        # A "<" in the data could end the script element early.
        safe = payload.replace("<", "\\u003c")
        return (
            f"<script>\n(() => {{\nconst data = {safe};\n"
            f"const copies = '[data-mv=\"{name}\"]:not([data-ready])';\n"
            "for (const root of document.querySelectorAll(copies)) {\n"
            f'root.dataset.ready = "1";\n{self.js.strip()}\n}}\n}})();\n</script>\n'
        )
