"""The picture of a next-token distribution, in numbers, words and a real browser."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "book"))

from figure_pages import check_card

from bookkit import draw
from bookkit.figures import sampling as figure_of
from bookkit.figures.sampling import Knobs, record, sampling_state
from minivllm.reference.sampler import token_probabilities

BOOK = Path(__file__).parents[2] / "book"
VOCAB_SIZE = 49_152
HOSTILE = ["</script>", "<b>x</b>", '" onload="x', "$1", "${x}", "&lt;"]


class Words:
    """A tokenizer with hostile pieces, and one that is long in UTF-16."""

    def token_bytes(self, token_id: int) -> bytes:
        return [*HOSTILE, "🦙🦙🦙", " a"][token_id % 8].encode()


def model_row(seed: int = 0) -> np.ndarray:
    """Scores spread like those of a small model: a bulk and a few far above it."""
    random = np.random.default_rng(seed)
    scores = random.normal(-6.0, 2.4, VOCAB_SIZE)
    best = random.choice(VOCAB_SIZE, 60, replace=False)
    scores[best] = 12.0 - 1.6 * np.log(np.arange(1, 61) * random.uniform(1, 1.5, 60))
    return scores.astype(np.float32)


def exact(logits: np.ndarray, knobs: Knobs) -> dict[int, float]:
    """Kept token ids and their probabilities, the way the definition is written."""
    order = np.argsort(-logits, kind="stable")
    shares = token_probabilities(logits, knobs.temperature)[order]
    kept = shares >= knobs.min_p * shares[0]
    if knobs.top_k:
        kept[knobs.top_k :] = False
    if knobs.top_p < 1:
        left = np.where(kept, shares, 0)
        before = np.concatenate([[0.0], np.cumsum(left)[:-1]])
        kept &= before < knobs.top_p * left.sum()
    whole = shares[kept].sum()
    return dict(zip(order[kept].tolist(), shares[kept] / whole, strict=True))


SETTINGS = [
    Knobs(),
    Knobs(temperature=0.1),
    Knobs(temperature=0.7, top_p=0.9),
    Knobs(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02, number=0.999),
    Knobs(temperature=1.0, top_k=1),
    Knobs(temperature=1.0, top_k=17, top_p=0.6, number=0.25),
    Knobs(temperature=1.0, min_p=1.0),
    Knobs(temperature=1.5, top_k=200, number=0.0),
    Knobs(temperature=2.0, top_p=0.95),
    Knobs(temperature=2.0, min_p=0.05, number=0.25),
    Knobs(temperature=0.0, top_p=0.5, number=0.9),
    Knobs(temperature=0.01, top_p=0.01),
]
WARM = [knobs for knobs in SETTINGS if knobs.temperature >= 0.1]


def test_probabilities_of_a_row_by_hand():
    # .4 .3 .2 .1, as the tokens 3, 2, 1, 0 in the order of their ids.
    logits = np.log([0.1, 0.2, 0.3, 0.4])
    scores = record(Words(), logits, 3)
    assert scores.counts == [1, 1, 1, 1]
    assert scores.order == [2, 1, 0, 3]  # the bars of the tokens 1, 2, 3; the others

    def shares(**changes: float) -> list[float]:
        return [round(s, 4) for s in sampling_state(scores, Knobs(**changes)).shares]

    assert shares() == [0.4, 0.3, 0.2, 0.1]
    assert shares(top_p=0.6) == [0.5714, 0.4286, 0, 0]
    assert shares(top_k=3) == [0.4444, 0.3333, 0.2222, 0]
    assert shares(min_p=0.4) == [0.4444, 0.3333, 0.2222, 0]
    assert shares(min_p=0.9) == [1, 0, 0, 0]
    assert shares(top_p=0.01) == [1, 0, 0, 0]
    # top_p is a part of what the others left: .4 / .7 = .571 and .7 / .9 = .778.
    assert shares(top_k=2, top_p=0.58) == [0.5714, 0.4286, 0, 0]
    assert shares(top_k=2, top_p=0.57) == [1, 0, 0, 0]
    assert shares(min_p=0.4, top_p=0.77) == [0.5714, 0.4286, 0, 0]
    # Temperature before min_p: at 0.5 the shares are as .16 .09 .04 .01.
    assert shares(temperature=0.5, min_p=0.4) == [0.64, 0.36, 0, 0]
    assert shares(temperature=0, top_k=3) == [1, 0, 0, 0]


@pytest.mark.parametrize("knobs", WARM, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_groups_stand_for_all_tokens(seed, knobs):
    logits = model_row(seed)
    scores = record(Words(), logits, 24)
    assert sum(scores.counts) == VOCAB_SIZE
    state, wanted = sampling_state(scores, knobs), exact(logits, knobs)
    # Half the width of a group from its mean at most, and the same for the sum.
    error = math.cosh(figure_of.GROUP_WIDTH * figure_of.UNIT / 2 / knobs.temperature)
    error = error - 1 + 2 * figure_of.UNIT / knobs.temperature
    assert error < 0.005
    best = np.argsort(-logits, kind="stable")[:24]
    for token, share in zip(best, state.shares, strict=False):
        assert share == pytest.approx(wanted.get(int(token), 0), rel=error)
    others = sum(share for token, share in wanted.items() if token not in best)
    assert sum(state.shares[24:]) == pytest.approx(others, rel=error, abs=1e-12)
    # The edge of min_p or top_p may lie inside a group.
    assert sum(state.stages[2]) == pytest.approx(len(wanted), rel=0.01)
    assert len(wanted) > 24 or sum(state.stages[2]) == len(wanted)


def test_tokens_far_below_the_best_are_one_group():
    logits = np.concatenate([[0.0, -1.0], np.linspace(-60, -1e6, 1000)])
    scores = record(Words(), logits, 1)
    assert scores.counts == [1, 1, 1000]
    flat = record(Words(), np.zeros(1000), 1)
    assert flat.counts == [1, 999]
    assert sampling_state(flat, Knobs(top_p=0.5)).stages[2] == [1, 499]


def test_of_equal_tokens_the_first_ids_are_the_best():
    mixed = record(Words(), np.tile([0.0, 1.0, 2.0], 40), 30)
    assert mixed.order == list(range(31))
    scores = record(Words(), np.zeros(100), 30)
    assert scores.order == list(range(31))
    assert sampling_state(scores, Knobs(top_k=25)).stages[1] == [1] * 25 + [0] * 6
    # A number at the end of a stretch falls on the next one.
    for number, picked in ((0.0, 0), (0.2499, 0), (0.25, 1), (0.75, 3), (0.999, 3)):
        knobs = Knobs(top_k=4, number=number)
        assert figure_of.View(scores, knobs).picked == picked


def test_the_words_say_what_the_knobs_do():
    logits = np.log([0.1, 0.2, 0.3, 0.4])
    text = repr(draw.sampling(Words(), logits, num_tokens=3, top_k=3, top_p=0.7))
    lines = text.splitlines()
    assert lines[1] == (
        "temperature 1.00, min_p off, top_k 3, top_p 0.70: 2 of 4 tokens stay; the "
        "best, $1, has 57.1% (before: 40.0%). Cut: 1 by top_k, 1 by top_p."
    )
    ends = [line.split()[-2:] for line in lines[3:7]]
    assert ends == [
        ["40.0%", "57.1%"],
        ["30.0%", "42.9%"],
        ["20.0%", "top_p"],
        ["10.0%", "top_k"],
    ]
    # The ids ascend on the line: token 2 takes .43 of it, then comes token 3.
    assert lines[7] == "The number 0.500 falls on $1."
    greedy = repr(draw.sampling(Words(), logits, num_tokens=3, temperature=0))
    assert "the best of 4 tokens, $1, is taken" in greedy
    assert greedy.endswith("No number is drawn.")


def test_a_number_falls_on_the_token_that_the_sampler_takes():
    logits = model_row()
    scores = record(Words(), logits, 24)
    best = np.argsort(-logits, kind="stable")[:24]
    picked = set()
    for number in np.linspace(0, 0.999, 50):
        knobs = Knobs(top_k=20, number=float(number))
        kept = exact(logits, knobs)
        ids = sorted(kept)
        ends = np.cumsum([kept[token] for token in ids])
        token = ids[int(np.searchsorted(ends, number, side="right"))]
        assert best[figure_of.View(scores, knobs).picked] == token
        picked.add(token)
    assert len(picked) > 10


def test_the_figure_is_small_and_the_same_every_time():
    pages = [draw.sampling(Words(), model_row())._repr_html_() for _ in range(2)]
    assert pages[0] == pages[1]
    widest = np.linspace(0, -1000, VOCAB_SIZE)
    for logits in (model_row(), widest):
        page = draw.sampling(Words(), logits, num_tokens=40)._repr_html_()
        assert len(page.encode()) < 60_000


def test_the_figure_stays_in_its_card():
    for figure in (
        draw.sampling(Words(), model_row(), num_tokens=8),
        draw.sampling_widget(Words(), model_row(), num_tokens=8).still(),
    ):
        page = figure._repr_html_()
        check_card(page)
        assert re.search('aria-label="[^"]{10,}"', page)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 2.5}, "temperature is 2.5: .* to 2"),
        ({"top_k": -2}, "top_k is -2: .* or 0 or -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0}, "top_p is 0: .* from 0.01 to 1"),
        ({"min_p": 1.1}, "min_p is 1.1: .* to 1"),
        ({"num_tokens": 41}, "num_tokens is 41, .* from 1 to 40 bars"),
        ({"logits": np.zeros((2, 3))}, r"shape \[2, 3\].* one row"),
        ({"logits": np.array([1, np.nan])}, "finite: False"),
    ],
)
def test_wrong_arguments_are_told_the_way_out(changes, said):
    arguments = {"logits": np.arange(100.0)} | changes
    with pytest.raises(ValueError, match=said):
        draw.sampling(Words(), **arguments)


def test_javascript_computes_what_python_computes(browser):
    logits = model_row()
    scores = record(Words(), logits, 24)
    data = draw.sampling(Words(), logits).data
    for knobs in SETTINGS:
        where = [knobs.temperature, knobs.min_p, knobs.top_k, knobs.top_p]
        code = f"{figure_of.STATE_JS}; return samplingState(data, ...where);"
        theirs = browser.run(
            f"((data, where) => {{ {code} }})({json.dumps(data)}, {where})"
        )
        ours = sampling_state(scores, knobs)
        assert theirs["stages"] == ours.stages, knobs
        np.testing.assert_allclose(theirs["shares"], ours.shares, rtol=1e-11)


# What a reader sees and hears, without the style sheet and the script.
LOOK = """
[...document.querySelectorAll(".mv-figure > :not(style, script)")].map(part => {
  part.querySelectorAll("[class='']").forEach(tag => tag.removeAttribute("class"));
  part.querySelectorAll("[style]").forEach(tag => {
    tag.setAttribute("style", tag.style.cssText);
  });
  return part.outerHTML.replaceAll(/ value="[^"]*"/g, "");
}).join("")
"""


@pytest.mark.parametrize(
    ("logits", "num_tokens"), [(model_row(), 24), (np.zeros(8), 7)]
)
def test_the_sliders_lead_to_the_picture_that_python_draws(
    browser, tmp_path, logits, num_tokens
):
    page = tmp_path / "figure.html"

    def open_figure(figure: draw.Figure, *, script: bool) -> None:
        text = figure._repr_html_()
        if not script:
            text = re.sub("<script>.*</script>", "", text, flags=re.DOTALL)
        page.write_text(f'<meta charset="utf-8"><body>{text}</body>')
        browser.open(page.as_uri(), width=760)

    wanted = []
    for knobs in SETTINGS:
        figure = figure_of.sampling(Words(), logits, num_tokens, knobs, "")
        open_figure(figure, script=False)
        wanted.append(browser.run(LOOK))
        open_figure(figure, script=True)
        assert browser.run(LOOK) == wanted[-1], "the script changes the first picture"
    assert len(set(wanted)) == len(wanted)
    figure = draw.sampling(Words(), logits, num_tokens=num_tokens)
    open_figure(figure, script=True)
    for knobs, look in zip(SETTINGS, wanted, strict=True):
        if knobs.top_k not in figure.data["topKs"]:
            continue
        place = figure.data["topKs"].index(knobs.top_k)
        values = [knobs.temperature, knobs.min_p, place, knobs.top_p, knobs.number]
        browser.run(f"""
            document.querySelectorAll("input").forEach((slider, i) => {{
              slider.value = {values}[i];
              slider.dispatchEvent(new Event("input"));
            }})
        """)
        assert browser.run(LOOK) == look, knobs
    assert not browser.errors and not browser.requests[1:]


@pytest.mark.parametrize("width", [390, 600, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_the_figure_fits_the_window(browser, tmp_path, width, dark):
    page = tmp_path / "figure.html"
    text = draw.sampling(Words(), model_row(), num_tokens=40)._repr_html_()
    page.write_text(f'<meta charset="utf-8"><body>{text}</body>')
    browser.open(page.as_uri(), width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    heights = browser.run(
        "[...document.querySelectorAll('input')].map(slider => slider.clientHeight)"
    )
    assert len(heights) == 5 and min(heights) >= 24
    # The card keeps its height, so that the page below does not jump.
    height = "document.querySelector('.mv-figure').clientHeight"
    sizes = set()
    for values in ((1, 0, 99, 1, 0), (0, 0, 99, 1, 0), (1, 0.01, 4, 0.6, 0.999)):
        browser.run(f"""
            document.querySelectorAll("input").forEach((slider, i) => {{
              slider.value = {list(values)}[i];
              slider.oninput();
            }})
        """)
        sizes.add(browser.run(height))
    assert len(sizes) == 1


LIVE = """
import sys
sys.path.insert(0, {book!r})
from bookkit import draw
class Words:
    def token_bytes(self, token_id):
        return b" a"
draw.sampling_widget(Words(), list(range(50)), num_tokens=5)
"""
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize("someone", [True, False])
def test_live_sliders_show_only_where_someone_can_move_them(someone):
    manager = pytest.importorskip("jupyter_client.manager")
    shown: list[dict[str, Any]] = []

    def note(message: dict[str, Any]) -> None:
        assert message["msg_type"] != "error", message["content"]["evalue"]
        if message["msg_type"] == "display_data":
            shown.append(message["content"]["data"])

    with manager.run_kernel() as client:
        # nbclient, which runs the book, allows no input either.
        client.execute_interactive(
            LIVE.format(book=str(BOOK)),
            allow_stdin=someone,
            output_hook=note,
            timeout=60,
        )
    (data,) = shown
    assert (WIDGET in data) == someone
    if not someone:
        assert "Live sliders: run this cell" in data["text/html"]
        assert "mv-s-row" not in data["text/html"]
        assert "<input" not in data["text/html"] and "<script" not in data["text/html"]


def test_a_live_slider_redraws_the_picture():
    pytest.importorskip("ipywidgets")
    live = draw.sampling_widget(Words(), np.log([0.1, 0.2, 0.3, 0.4]), num_tokens=3)
    *sliders, shown = live.widget().children
    by_name = {slider.description: slider for slider in sliders}
    assert list(by_name) == ["temperature", "min_p", "top_k", "top_p", "number"]
    by_name["top_k"].value = 2
    assert "2 of 4 tokens stay" in shown.value
    by_name["top_p"].value = 0.3
    assert "1 of 4 tokens stays" in shown.value
    by_name["temperature"].value = 0
    assert "Temperature 0 is greedy" in shown.value
    assert "<script" not in shown.value and "<input" not in shown.value


def test_the_figures_of_other_cells_load_no_widgets():
    code = (
        "import sys, numpy; from bookkit import draw; "
        "sys.exit(bool({'ipywidgets', 'torch', 'matplotlib'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=BOOK, check=True)
