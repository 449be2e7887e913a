"""A next-token distribution behind the sliders of a request.

The same arithmetic stands here twice: in Python for the first picture and for live
sliders, in JavaScript for a page without a kernel. A test compares the two.
"""

import itertools
import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bookkit.figures.base import Figure, escape
from bookkit.figures.tokens import labels

MAX_BARS = 40
MAX_TEMPERATURE = 2.0
# Scores are recorded as distances from the best one ("drops"), in these units.
UNIT = 1e-5
# Tokens without a bar are recorded in groups: so far apart may their scores be ...
GROUP_WIDTH = round(0.015 / UNIT)
# ... and beyond this drop all are one group: even at temperature 2, a token there has
# less than 2e-11 times the probability of the best.
DEEPEST = round(50 / UNIT)
# The places of the slider, from strict to loose, before "off".
TOP_KS = (
    *range(1, 11),
    *(12, 15, 20, 30, 40, 50, 70, 100, 200, 500),
    *(1000, 2000, 5000, 10_000, 20_000),
)
SCALES = (
    0.1,
    0.2,
    0.3,
    0.4,
    0.6,
    0.8,
    1.0,
)  # what the full width of a bar may stand for
LETTER = 0.022  # of the line from 0 to 1: the width of a letter on a phone

_CSS = """
.mv-figure .mv-s-knobs{display:grid;gap:2px 28px;margin:0 0 8px;
 grid-template-columns:repeat(auto-fit,minmax(min(100%,290px),1fr))}
.mv-figure .mv-s-knob{display:grid;grid-template-columns:6.2em minmax(0,1fr) 4.2em;
 gap:8px;align-items:center;margin:0}
.mv-figure .mv-s-knob input{width:100%;height:28px;margin:0;
 accent-color:var(--mv-measured)}
.mv-figure .mv-s-knob output{text-align:right;font-variant-numeric:tabular-nums}
.mv-figure .mv-s-said{margin:0 0 8px;min-height:2.9em}
.mv-figure .mv-s-row{display:grid;align-items:center;gap:8px;height:19px;
 grid-template-columns:7.4em minmax(0,1fr) 3.4em 3.6em;
 font-size:13px;font-variant-numeric:tabular-nums}
.mv-figure .mv-s-row>:nth-child(n+3){text-align:right}
.mv-figure .mv-s-head{color:var(--mv-dim);font-size:12px}
.mv-figure .mv-s-head>:first-child{text-align:right;padding-right:3px}
.mv-figure .mv-s-name{text-align:right;white-space:pre;overflow:hidden;
 font:12.5px/17px ui-monospace,"SF Mono",Menlo,Consolas,monospace}
.mv-figure .mv-s-name span{padding:0 3px;border-radius:4px}
.mv-figure .mv-s-others{margin-top:5px}
.mv-figure .mv-s-others .mv-s-name{font:inherit}
.mv-figure .mv-s-row>:nth-child(3){color:var(--mv-dim)}
.mv-figure .mv-s-track{position:relative;height:15px;
 border-left:1.5px solid var(--mv-dim)}
.mv-figure .mv-s-track i{position:absolute;left:0;border-radius:0 3px 3px 0}
.mv-figure .mv-s-before{top:0;bottom:0;border:1.5px solid var(--mv-dim);border-left:0;
 min-width:1.5px}
.mv-figure .mv-s-after{top:4px;bottom:4px;background:var(--mv-measured)}
.mv-figure .mv-s-cut{color:var(--mv-dim)}
.mv-figure .mv-s-cut .mv-s-name{text-decoration:line-through}
.mv-figure .mv-s-cut>:last-child{font-style:italic}
.mv-figure .mv-s-cut .mv-s-before{border-style:dashed;opacity:.7}
.mv-figure .mv-s-line{position:relative;display:flex;height:26px;margin:4px 0 0;
 border:1px solid var(--mv-dim);border-radius:4px;overflow:hidden}
.mv-figure .mv-s-piece{flex:none;overflow:hidden;white-space:pre;text-align:center;
 font:12px/24px ui-monospace,"SF Mono",Menlo,Consolas,monospace;
 background:color-mix(in srgb,var(--mv-measured) 26%,var(--mv-paper));
 box-shadow:inset -1px 0 var(--mv-paper)}
.mv-figure .mv-s-picked{background:var(--mv-lit);color:var(--mv-lit-ink)}
.mv-figure .mv-s-mark{position:absolute;top:0;bottom:0;width:3px;margin-left:-1.5px;
 background:var(--mv-wrong)}
.mv-figure .mv-s-off{opacity:.35}
.mv-figure .mv-s-drawn{margin:12px 0 0}
.mv-figure .mv-s-fell{margin:4px 0 0;min-height:1.45em}
@media (max-width:480px){
 .mv-figure .mv-s-row{gap:6px;grid-template-columns:7.2em minmax(0,1fr) 3.2em 3.4em}
 .mv-figure .mv-s-said{min-height:4.4em}
 .mv-figure .mv-s-fell{min-height:2.9em}
}
"""

# What `sampling_state` below does, line by line.
STATE_JS = """
const samplingState = ({drops, counts, unit}, temperature, minP, topK, topP) => {
  if (!temperature) [temperature, minP, topK, topP] = [1, 0, 1, 1];
  const weights =
    drops.map(drop => Math.exp(-Math.min(drop * unit / temperature, 700)));
  const stages = [counts.map((count, i) => weights[i] >= minP ? count : 0)];
  let room = topK || Infinity;
  stages.push(stages[0].map(count => {
    const taken = Math.min(count, room);
    room -= taken;
    return taken;
  }));
  const sum = counts => counts.reduce((sum, count, i) => sum + count * weights[i], 0);
  const enough = topP < 1 ? topP * sum(stages[1]) : Infinity;
  let before = 0;
  stages.push(stages[1].map((count, i) => {
    const needed = Math.max(0, Math.ceil((enough - before) / weights[i]));
    before += count * weights[i];
    return Math.min(count, needed);
  }));
  const total = sum(stages[2]);
  return {stages, shares: stages[2].map((count, i) => count * weights[i] / total)};
};
"""

_JS = (
    STATE_JS
    + """
const {labels, order, counts, topKs, scales, letter} = data, shown = labels.length;
const find = selector => [...root.querySelectorAll(selector)];
const sliders = find("input"), outputs = find("output");
const rows = find("[role=listitem]"), pieces = find(".mv-s-piece");
const say = (selector, text) => { root.querySelector(selector).textContent = text; };
const add = list => list.reduce((sum, one) => sum + one, 0);
// One number for each bar: the tokens without a bar are added up.
const bars = list => [...list.slice(0, shown), add(list.slice(shown))];
const comma = number => number.toLocaleString("en-US");
const percent = share => share < 0.0005 ? "<0.1%" : `${(100 * share).toFixed(1)}%`;
const length = share => `${(100 * share).toFixed(2)}%`;
const original = bars(samplingState(data, 1, 0, 0, 1).shares);

const show = () => {
  const [temperature, minP, place, topP, number] = sliders.map(s => Number(s.value));
  const topK = topKs[place];
  const {stages, shares} = samplingState(data, temperature, minP, topK, topP);
  const [afterMinP, afterTopK, kept] = stages.map(bars), now = bars(shares);
  let end = 0;
  const picked = order.find(i => number < (end += now[i]));

  [
    temperature ? temperature.toFixed(2) : "greedy",
    minP ? minP.toFixed(2) : "off",
    topK ? comma(topK) : "off",
    topP < 1 ? topP.toFixed(2) : "off",
    number.toFixed(3),
  ].forEach((text, i) => {
    outputs[i].textContent = text;
    sliders[i].setAttribute("aria-valuetext", text);
  });
  const full = scales.find(scale => scale >= Math.max(...original, ...now)) ?? 1;
  say(".mv-s-full", `full width: ${Math.round(100 * full)}%`);
  rows.forEach((row, i) => {
    const [name, track, , after] = row.children;
    const cut = !temperature ? "greedy"
      : !afterMinP[i] ? "min_p" : !afterTopK[i] ? "top_k" : "top_p";
    row.classList.toggle("mv-s-cut", !kept[i]);
    name.firstChild.classList.toggle("mv-s-picked", i === picked);
    track.firstChild.style.width = length(original[i] / full);
    track.lastChild.style.width = length(now[i] / full);
    after.textContent = kept[i] ? percent(now[i]) : cut;
  });
  order.forEach((i, place) => {
    const label = labels[i] ?? "others";
    pieces[place].style.width = length(now[i]);
    pieces[place].textContent = letter * [...label].length < now[i] ? label : "";
    pieces[place].classList.toggle("mv-s-picked", i === picked);
  });
  root.querySelector(".mv-s-mark").style.left = length(number);
  root.querySelector(".mv-s-drawn").classList.toggle("mv-s-off", !temperature);
  const left = [counts, ...stages].map(add);
  if (temperature) {
    const cuts = ["min_p", "top_k", "top_p"]
      .map((name, i) => [left[i] - left[i + 1], name]).filter(([cut]) => cut)
      .map(([cut, name]) => `${comma(cut)} by ${name}`).join(", ");
    say(".mv-s-said", `${comma(left[3])} of ${comma(left[0])} tokens ` +
      `${left[3] === 1 ? "stays" : "stay"}; the best, ${labels[0]}, has ` +
      `${percent(now[0])} (before: ${percent(original[0])}).` +
      (cuts ? ` Cut: ${cuts}.` : ""));
    say(".mv-s-fell", `The number ${number.toFixed(3)} falls on ` +
      `${labels[picked] ?? `one of the ${comma(kept[picked])} others`}.`);
  } else {
    say(".mv-s-said", "Temperature 0 is greedy: the best of " +
      `${comma(left[0])} tokens, ${labels[0]}, is taken.`);
    say(".mv-s-fell", "No number is drawn.");
  }
};
sliders.forEach(slider => { slider.oninput = show; });
show();
"""
)


@dataclass(frozen=True, slots=True)
class Scores:
    """A row of logits as the figure records it, best token first.

    Attributes:
        drops: Of each group, its mean score below the best one, in units of `UNIT`.
        counts: How many tokens each group has: 1 for those with a bar.
        labels: The texts of the tokens with a bar.
        order: The bars by ascending token id; last, the bar of all other tokens.
    """

    drops: list[int]
    counts: list[int]
    labels: list[str]
    order: list[int]

    @property
    def num_others(self) -> int:
        """How many tokens have no bar of their own."""
        return sum(self.counts[len(self.labels) :])

    def bars(self, values: list[Any]) -> list[Any]:
        """Return one number for each bar: those of the other tokens are added up."""
        num_bars = len(self.labels)
        return [*values[:num_bars], sum(values[num_bars:])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Where the sliders stand."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    number: float = 0.5  # the one that picks a token


@dataclass(frozen=True, slots=True)
class State:
    """What the knobs do to the groups of a row.

    Attributes:
        stages: How many tokens of each group are left after min_p, top_k, top_p.
        shares: The probability of each group at the end.
    """

    stages: list[list[int]]
    shares: list[float]


def record(tokenizer: Any, logits: Any, num_tokens: int) -> Scores:
    """Record a row of logits, [vocab_size], NumPy or torch."""
    if hasattr(logits, "detach"):  # a torch tensor, of any dtype and device
        logits = logits.detach().float().cpu().numpy()
    scores = np.asarray(logits, dtype=np.float64)
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise ValueError(
            f"logits have shape {list(scores.shape)}, finite: "
            f"{bool(np.isfinite(scores).all())}: pass one row of scores as the model "
            "gives them, one finite number per token of the vocabulary"
        )
    if not 1 <= num_tokens <= min(MAX_BARS, scores.size - 1):
        raise ValueError(
            f"num_tokens is {num_tokens}, but a row of {scores.size:,} scores can have "
            f"from 1 to {min(MAX_BARS, scores.size - 1)} bars"
        )
    ranked = np.argsort(-scores, kind="stable")
    drops = (scores[ranked[0]] - scores[ranked]) / UNIT
    best, rest = ranked[:num_tokens], drops[num_tokens:]
    groups = np.minimum(rest, DEEPEST).astype(np.int64) // GROUP_WIDTH
    sizes, sums = np.bincount(groups), np.bincount(groups, weights=rest)
    sizes, sums = sizes[sizes > 0], sums[sizes > 0]
    return Scores(
        drops=[round(drop) for drop in (*drops[:num_tokens], *(sums / sizes))],
        counts=[1] * num_tokens + sizes.tolist(),
        labels=labels(tokenizer, best.tolist()),
        order=[*np.argsort(best).tolist(), num_tokens],
    )


def sampling_state(scores: Scores, knobs: Knobs) -> State:
    """Apply temperature, min_p, top_k and top_p, in this order."""
    temperature, min_p, top_k, top_p = (
        (knobs.temperature, knobs.min_p, knobs.top_k, knobs.top_p)
        if knobs.temperature
        else (1.0, 0.0, 1, 1.0)  # greedy: the best token, whatever the others say
    )
    # No weight is rounded to 0: below, what is needed is divided by it.
    weights = [math.exp(-min(drop * UNIT / temperature, 700)) for drop in scores.drops]

    def total(counts: list[int]) -> float:
        return sum(n * weight for n, weight in zip(counts, weights, strict=True))

    # min_p is a fraction of the best weight, which is 1.
    after_min_p = [
        n if weight >= min_p else 0
        for n, weight in zip(scores.counts, weights, strict=True)
    ]
    after_top_k, room = [], top_k or math.inf
    for n in after_min_p:
        after_top_k.append(min(n, room))
        room -= after_top_k[-1]
    # A token stays while the ones before it have less than top_p.
    kept, before = [], 0.0
    enough = top_p * total(after_top_k) if top_p < 1 else math.inf
    for n, weight in zip(after_top_k, weights, strict=True):
        needed = (enough - before) / weight
        kept.append(n if needed >= n else max(0, math.ceil(needed)))
        before += n * weight
    whole = total(kept)
    shares = [n * weight / whole for n, weight in zip(kept, weights, strict=True)]
    return State([after_min_p, after_top_k, kept], shares)


class View:
    """What the picture shows and says at one setting of the knobs."""

    def __init__(self, scores: Scores, knobs: Knobs) -> None:
        state = sampling_state(scores, knobs)
        after_min_p, after_top_k, self.kept = map(scores.bars, state.stages)
        self.original = scores.bars(sampling_state(scores, Knobs()).shares)
        self.now = scores.bars(state.shares)
        self.names = [*scores.labels, f"{scores.num_others:,} others"]
        self.afters = []  # the last column: a probability, or the knob that cut
        for i, share in enumerate(self.now):
            if self.kept[i]:
                self.afters.append(percent(share))
            elif not knobs.temperature:
                self.afters.append("greedy")
            elif not after_min_p[i]:
                self.afters.append("min_p")
            else:
                self.afters.append("top_p" if after_top_k[i] else "top_k")
        largest = max(*self.original, *self.now)
        self.full = next((scale for scale in SCALES if scale >= largest), 1.0)

        # The stretches lie end to end; the slider's last place is well before 1.
        ends = itertools.accumulate(self.now[i] for i in scores.order)
        self.picked = next(
            i for i, end in zip(scores.order, ends, strict=True) if knobs.number < end
        )

        left = [sum(scores.counts), *map(sum, state.stages)]
        self.said, self.fell = self._sentences(scores, knobs, left)

    def _sentences(
        self, scores: Scores, knobs: Knobs, left: list[int]
    ) -> tuple[str, str]:
        """Say what happened; `left` are the tokens before and after each knob."""
        best = scores.labels[0]
        if not knobs.temperature:
            return (
                f"Temperature 0 is greedy: the best of {left[0]:,} tokens, {best}, is "
                "taken.",
                "No number is drawn.",
            )
        cuts = ", ".join(
            f"{before - after:,} by {name}"
            for name, (before, after) in zip(
                ("min_p", "top_k", "top_p"), itertools.pairwise(left), strict=True
            )
            if before > after
        )
        picked = [*scores.labels, f"one of the {self.kept[-1]:,} others"][self.picked]
        return (
            f"{left[3]:,} of {left[0]:,} tokens {'stays' if left[3] == 1 else 'stay'}; "
            f"the best, {best}, has {percent(self.now[0])} (before: "
            f"{percent(self.original[0])})." + (f" Cut: {cuts}." if cuts else ""),
            f"The number {knobs.number:.3f} falls on {picked}.",
        )


def percent(share: float) -> str:
    """Return a probability as it stands in a column."""
    return "<0.1%" if share < 0.0005 else f"{100 * share:.1f}%"


def knob_texts(knobs: Knobs) -> dict[str, str]:
    """Return the values of the knobs as they stand beside the sliders."""
    return {
        "temperature": f"{knobs.temperature:.2f}" if knobs.temperature else "greedy",
        "min_p": f"{knobs.min_p:.2f}" if knobs.min_p else "off",
        "top_k": f"{knobs.top_k:,}" if knobs.top_k else "off",
        "top_p": f"{knobs.top_p:.2f}" if knobs.top_p < 1 else "off",
        "number": f"{knobs.number:.3f}",
    }


def in_words(scores: Scores, knobs: Knobs) -> str:
    """Return the picture as text."""
    view, values = View(scores, knobs), knob_texts(knobs)
    width = max(map(len, view.names))
    rows = [
        f"  {name.ljust(width)}  {percent(before):>6}  {after:>6}"
        for name, before, after in zip(
            view.names, view.original, view.afters, strict=True
        )
    ]
    settings = ", ".join(f"{name} {values[name]}" for name in list(values)[:4])
    head = f"  {'':{width}}  before   after"
    return "\n".join([f"{settings}: {view.said}", head, *rows, view.fell])


def picture(scores: Scores, knobs: Knobs, slider: str = "") -> str:
    """Return the bars and the line from 0 to 1, with the slider of the number."""
    view = View(scores, knobs)
    rows, pieces = [], []
    for i, name in enumerate(view.names):
        kind = "" if i < len(scores.labels) else " mv-s-others"
        kind += "" if view.kept[i] else " mv-s-cut"
        picked = ' class="mv-s-picked"' if i == view.picked else ""
        rows.append(
            f'<div class="mv-s-row{kind}" role="listitem"><span class="mv-s-name">'
            f'<span{picked}>{escape(name)}</span></span><span class="mv-s-track">'
            f'<i class="mv-s-before" style="width:{view.original[i] / view.full:.2%}">'
            '</i><i class="mv-s-after" '
            f'style="width:{view.now[i] / view.full:.2%}"></i></span>'
            f"<span>{escape(percent(view.original[i]))}</span>"
            f"<span>{escape(view.afters[i])}</span></div>"
        )
    for i in scores.order:
        name = [*scores.labels, "others"][i]
        shown = name if LETTER * len(name) < view.now[i] else ""
        picked = " mv-s-picked" if i == view.picked else ""
        pieces.append(
            f'<span class="mv-s-piece{picked}" style="width:{view.now[i]:.2%}">'
            f"{escape(shown)}</span>"
        )
    off = "" if knobs.temperature else " mv-s-off"
    return (
        f'<p class="mv-s-said" aria-live="polite">{escape(view.said)}</p>'
        '<div class="mv-s-row mv-s-head"><span>token</span>'
        f'<span class="mv-s-full">full width: {view.full:.0%}</span>'
        "<span>before</span><span>after</span></div>"
        f'<div role="list" aria-label="tokens">{"".join(rows)}</div>'
        f'<div class="mv-s-drawn{off}">{slider}'
        f'<div class="mv-s-line" aria-hidden="true">{"".join(pieces)}'
        f'<i class="mv-s-mark" style="left:{knobs.number:.2%}"></i></div>'
        f'<p class="mv-s-fell" aria-live="polite">{escape(view.fell)}</p></div>'
        '<p class="mv-note">Outlined: the chances as the model gives them, at '
        "temperature 1. Filled: those a token is drawn with. Crossed out: cut, and by "
        "which knob. On the line, the tokens that stay lie end to end by their ids, "
        "all others last.</p>"
    )


def _slider(
    name: str, knobs: Knobs, value: float, step: float, low: float, high: float
) -> str:
    text = knob_texts(knobs)[name]
    return (
        f'<label class="mv-s-knob"><span>{name}</span><input type="range" '
        f'min="{low:g}" max="{high:g}" step="{step:g}" value="{value:g}" '
        f'aria-label="{name}" aria-valuetext="{text}"><output>{text}</output></label>'
    )


def checked(
    temperature: float, top_k: int, top_p: float, min_p: float, number: float = 0.5
) -> Knobs:
    """Return the knobs in the steps of the sliders, or say what is wrong."""
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"temperature is {temperature}: the slider goes from 0 (greedy) to "
            f"{MAX_TEMPERATURE:g}"
        )
    if not (isinstance(top_k, int) and top_k >= -1):
        raise ValueError(
            f"top_k is {top_k}: pass an integer of at least 1, or 0 or -1 (off)"
        )
    if not 0.01 <= top_p <= 1:
        raise ValueError(f"top_p is {top_p}: the slider goes from 0.01 to 1 (off)")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p is {min_p}: the slider goes from 0 (off) to 1")
    return Knobs(
        temperature=round(temperature, 2),
        top_k=max(top_k, 0),
        top_p=round(top_p, 2),
        min_p=round(min_p, 2),
        number=number,
    )


def sampling(
    tokenizer: Any, logits: Any, num_tokens: int, knobs: Knobs, label: str
) -> Figure:
    """See `bookkit.draw.sampling`."""
    scores = record(tokenizer, logits, num_tokens)
    top_ks = _top_ks(scores, knobs)
    data = asdict(scores) | {
        "unit": UNIT,
        "topKs": top_ks,
        "scales": SCALES,
        "letter": LETTER,
    }
    place = top_ks.index(knobs.top_k)
    body = (
        '<div class="mv-s-knobs">'
        + _slider("temperature", knobs, knobs.temperature, 0.01, 0, MAX_TEMPERATURE)
        + _slider("min_p", knobs, knobs.min_p, 0.01, 0, 1)
        + _slider("top_k", knobs, place, 1, 0, len(top_ks) - 1)
        + _slider("top_p", knobs, knobs.top_p, 0.01, 0.01, 1)
        + "</div>"
        + picture(
            scores, knobs, _slider("number", knobs, knobs.number, 0.001, 0, 0.999)
        )
    )
    name = label or "Chances of the next token, behind the knobs of sampling"
    text = f"{name}\n{in_words(scores, knobs)}"
    return Figure(body, text=text, label=name, css=_CSS, js=_JS, data=data)


def _top_ks(scores: Scores, knobs: Knobs) -> list[int]:
    """Return the places of the slider of top_k; the last one is off."""
    vocab_size = sum(scores.counts)
    ks = {k for k in TOP_KS if k < vocab_size} | {knobs.top_k} - {0}
    return [*sorted(ks), 0]


_RUN_ME = "Live sliders: run this cell in a notebook to move them."


class LiveSampling:
    """The picture behind sliders that call Python, where someone can move them.

    A notebook that a program runs keeps a line that says so.
    """

    def __init__(self, tokenizer: Any, logits: Any, num_tokens: int) -> None:
        self.scores = record(tokenizer, logits, num_tokens)

    def __repr__(self) -> str:
        return _RUN_ME

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget() if has_reader() else self.notice())

    def notice(self) -> Figure:
        """Return what stands where nobody can move a slider."""
        return Figure(f"<div>{escape(_RUN_ME)}</div>", text=_RUN_ME, full=False)

    def still(self, knobs: Knobs = Knobs()) -> Figure:
        """Return the picture at one setting of the knobs."""
        words = in_words(self.scores, knobs)
        return Figure(
            picture(self.scores, knobs),
            text=words,
            alt=f"Bars, one per token, at {words}",
            css=_CSS,
        )

    def widget(self) -> Any:
        """Return an ipywidgets box of sliders above the picture."""
        # Imported here: the pictures of a page need no widgets.
        from ipywidgets import HTML, FloatSlider, SelectionSlider, VBox

        top_ks = [
            (knob_texts(Knobs(top_k=k))["top_k"], k)
            for k in _top_ks(self.scores, Knobs())
        ]
        sliders = {
            "temperature": FloatSlider(value=1, min=0, max=MAX_TEMPERATURE, step=0.05),
            "min_p": FloatSlider(value=0, min=0, max=1, step=0.01),
            "top_k": SelectionSlider(options=top_ks, value=0),
            "top_p": FloatSlider(value=1, min=0.01, max=1, step=0.01),
            "number": FloatSlider(value=0.5, min=0, max=0.999, step=0.001),
        }
        shown = HTML()

        def draw(change: Any = None) -> None:
            values = {name: slider.value for name, slider in sliders.items()}
            shown.value = self.still(checked(**values))._repr_html_()

        for name, slider in sliders.items():
            slider.description = name
            slider.observe(draw, "value")
        draw()
        return VBox([*sliders.values(), shown])


def has_reader() -> bool:
    """Tell whether someone sits at the notebook, and not a program that runs it."""
    if "google.colab" in sys.modules:
        return True
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return False
    # What runs notebooks for nobody (nbclient, and what builds on it) tells the kernel
    # that there is nobody to ask for input.
    return kernel.get_parent().get("content", {}).get("allow_stdin", False)
