"""A slider over recorded frames: time in a page that has no kernel."""

from collections.abc import Sequence

from bookkit.figures.base import Figure, escape

_CSS = """
.mv-figure .mv-player-bar{display:flex;gap:10px;align-items:center}
.mv-figure .mv-player-bar button{font:inherit;width:40px;height:36px;border-radius:6px;
 cursor:pointer;border:1px solid var(--mv-line);background:var(--mv-grey);
 color:var(--mv-ink);padding:0;flex:none}
.mv-figure .mv-player-bar input{flex:1;min-width:0;accent-color:var(--mv-measured)}
.mv-figure .mv-player-bar output{min-width:4em;text-align:right;
 font-variant-numeric:tabular-nums}
.mv-figure .mv-event{min-height:1.5em;margin:6px 0 8px;color:var(--mv-dim)}
/* All frames lie on one another, so that the page does not jump from step to step. */
.mv-figure .mv-frames{display:grid}
.mv-figure .mv-frame{grid-area:1/1;min-width:0}
.mv-figure .mv-off{visibility:hidden}
@media (max-width:480px){.mv-figure .mv-event{min-height:3em}}
"""

_JS = """
const frames = root.querySelectorAll(".mv-frame");
const slider = root.querySelector("input"), button = root.querySelector("button");
const last = frames.length - 1;
let timer = null;
const show = (step) => {
  slider.value = step;
  frames.forEach((frame, i) => frame.classList.toggle("mv-off", i !== step));
  root.querySelector("output").textContent = `${step} of ${last}`;
  root.querySelector(".mv-event").textContent = data[step];
};
const stop = () => {
  clearInterval(timer);
  timer = null;
  button.textContent = "\\u25B6\\uFE0E";
  button.ariaLabel = "Play";
};
button.onclick = () => {
  if (timer) return stop();
  show(Number(slider.value) === last ? 0 : Number(slider.value));
  button.textContent = "\\u275A\\u275A";
  button.ariaLabel = "Pause";
  timer = setInterval(() => {
    show(Number(slider.value) + 1);
    if (Number(slider.value) === last) stop();
  }, 900);
};
slider.oninput = () => { stop(); show(Number(slider.value)); };
show(Number(slider.value));
"""


def player(figures: Sequence[Figure], captions: Sequence[str], label: str) -> Figure:
    """See `bookkit.draw.player`."""
    if not figures or len(figures) != len(captions):
        raise ValueError(
            f"there are {len(figures)} figures and {len(captions)} captions: "
            "pass one caption for each figure, and at least one figure"
        )
    last = len(figures) - 1
    # The frames are made here and the script only swaps them: without scripts the
    # first one still shows.
    frames = "".join(
        f'<div class="mv-frame{" mv-off" if i else ""}" role="img" '
        f'aria-label="{escape(figure.alt or figure.text)}">'
        f"{figure.body}</div>"
        for i, figure in enumerate(figures)
    )
    body = (
        '<div class="mv-player-bar"><button type="button" aria-label="Play">'
        f'&#9654;&#65038;</button><input type="range" min="0" max="{last}" value="0" '
        f'step="1" aria-label="{escape(label)}: step">'
        f"<output>0 of {last}</output></div>"
        f'<div class="mv-event" aria-live="polite">{escape(captions[0])}</div>'
        f'<div class="mv-frames">{frames}</div>'
    )
    css = "\n".join(dict.fromkeys([_CSS, *(figure.css for figure in figures)]))
    text = "\n".join(
        [f"{label}, {last + 1} steps; the last one: {captions[-1]}", figures[-1].text]
    )
    width = max(figure.width for figure in figures)
    return Figure(
        body,
        text=text,
        label=label,
        css=css,
        js=_JS,
        data=list(captions),
        width=width,
    )
