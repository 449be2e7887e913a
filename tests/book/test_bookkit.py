import functools
import html
import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from minivllm.models.spec import ModelSpec, RopeSpec

BOOK = Path(__file__).parents[2] / "book"
sys.path.insert(0, str(BOOK))

import bookkit  # noqa: E402
from bookkit import bench, draw, palette, predict  # noqa: E402

HOSTILE = [b"</script>", b"<b>", b"<!--", b'" onload="x', b"$ID", b"${x}", b"&lt;"]


class Pieces:
    """A tokenizer whose token i is the i-th piece."""

    special_token_ids = frozenset({0})

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def small_spec(**changes: object) -> ModelSpec:
    knobs = dict(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=48,
        intermediate_size=80,
        num_layers=5,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=10_000.0),
    )
    return ModelSpec(**(knobs | changes))


def causal(size: int, *lead: int) -> np.ndarray:
    weights = np.tril(np.random.default_rng(0).random((*lead, size, size)) + 0.01)
    return weights / weights.sum(-1, keepdims=True)


def measured() -> list[bench.Measurement]:
    return [bench.Measurement(n / 100, n / 110, n / 90, 5) for n in (1, 2, 4)]


FRAMES = [
    {"event": "A arrives", "block_ids": {"A": [0]}, "num_tokens": {"A": 3}},
    {
        "event": "B shares </script> its start",
        "block_ids": {"A": [0, 2], "B": [0, 1]},
        "num_tokens": {"A": 5, "B": 6},
        "num_prompt_tokens": {"A": 3, "B": 6},
    },
]


@functools.cache
def every_figure() -> dict[str, draw.Figure]:
    words = Pieces(b"The", b" sky", b" is", b"\n", *HOSTILE)
    ids = list(range(4 + len(HOSTILE)))
    names = draw.labels(words, ids)
    size = len(ids)
    hostile = [piece.decode() for piece in HOSTILE]
    return {
        "pipeline": draw.pipeline(here="decoder", built=["tokenizer"]),
        "ladder": draw.ladder([(1, hostile[0], 3.1), (2, hostile[1], None)], here=1),
        "tokens": draw.tokens(words, ids),
        "tokens of a request": draw.tokens(words, ids, num_prompt_tokens=2),
        "top tokens": draw.top_tokens(words, np.arange(float(size)), k=size),
        "sampling": draw.sampling(words, np.arange(float(size)), num_tokens=size - 1),
        "table": draw.table([[text, 1] for text in hostile], [hostile[0], "n"], "<b>"),
        "block": draw.block(small_spec()),
        "attention": draw.attention(causal(size), names, title="<b>layer</b>"),
        "heads": draw.attention_heads(causal(size, 2, 3), names, layers=["<b>", "x"]),
        "curve": draw.curve(
            [1, 2, 4], measured(), lambda n: n / 100, "tokens", "s", "<b>$1"
        ),
        "slots": draw.slots({"A": [0]}, {"A": 3}, num_blocks=2, block_size=4),
        "block tables": draw.block_tables(FRAMES, num_blocks=4, block_size=4),
        "reveal": predict.number(hostile[0], guess=2).reveal(3, traps={2: "<b>"}),
        "question": predict.choice(hostile[0], hostile),
    }


NAMES = list(every_figure())


class Reader(HTMLParser):
    """Collects tags and attributes, and fails on a tag that is never closed."""

    VOID = frozenset({"input", "br", "meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def test_the_same_data_gives_the_same_bytes():
    again = every_figure.__wrapped__()
    for name, figure in every_figure().items():
        assert figure._repr_html_() == again[name]._repr_html_(), name
        assert repr(figure) == repr(again[name]), name


def test_other_data_gives_another_id():
    one = draw.block_tables(FRAMES, num_blocks=4, block_size=4)._repr_html_()
    other = draw.block_tables(FRAMES[:1], num_blocks=4, block_size=4)._repr_html_()
    pattern = 'data-mv="(mv-[0-9a-f]{8})"'
    assert re.search(pattern, one)[1] != re.search(pattern, other)[1]


@pytest.mark.parametrize("name", NAMES)
def test_hostile_text_stays_text(name):
    reader = Reader(every_figure()[name]._repr_html_())
    assert "onload" not in dict(reader.attributes)
    assert reader.tags.count("script") <= 1
    bold = reader.tags.count("b")
    calm = {"block": 1, "ladder": 2, "block tables": 8, "slots": 2}
    assert bold == calm.get(name, 0)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_loaded_from_another_host(name):
    page = every_figure()[name]._repr_html_()
    page = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    page = page.replace('xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    assert not re.search(r"https?:|//\w+\.|@import|src=", page)


@pytest.mark.parametrize("name", NAMES)
def test_every_class_and_variable_has_the_books_prefix(name):
    page = every_figure()[name]._repr_html_()
    reader = Reader(page)
    classes = {c for k, v in reader.attributes if k == "class" for c in v.split()}
    assert classes and all(c.startswith("mv-") for c in classes)
    assert all(v.startswith("--mv-") for v in re.findall(r"--[a-z][a-z-]*", page))
    # A rule that does not start at the figure would change the page around it.
    css = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    for selector in re.findall(r"(?:^|[{}/])([^{}/@]+)\{", css):
        assert ".mv-figure" in selector, selector


@pytest.mark.parametrize("name", NAMES)
def test_a_screen_reader_and_a_terminal_get_words(name):
    figure = every_figure()[name]
    assert len(repr(figure)) > 10 and "<div" not in repr(figure)
    reader = Reader(figure._repr_html_())
    outer = re.match("<div [^>]*>", figure._repr_html_())[0]
    tables_and_words = {"top tokens", "table", "reveal", "question"}
    assert name in tables_and_words or re.search('aria-label="[^"]{10,}"', outer)
    # A picture hides its parts, so no control may stand inside one.
    assert not ('role="img"' in outer and "input" in reader.tags)


def test_every_request_is_told_apart_by_every_eye():
    # Machado, Oliveira and Fernandes 2009, severity 1.
    kinds = {
        "normal": np.eye(3),
        "protan": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992],
                   [-0.0039, -0.0481, 1.0520]],
        "deutan": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474],
                   [-0.0118, 0.0429, 0.9689]],
        "tritan": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476],
                   [0.0047, 0.6914, 0.3039]],
    }  # fmt: skip
    colors = [linear(style.color) for style in palette.REQUESTS]
    for kind, matrix in kinds.items():
        seen = [lab(np.array(matrix) @ color) for color in colors]
        for (i, one), (j, other) in itertools.combinations(enumerate(seen), 2):
            distance = np.linalg.norm(one - other)
            # The first three meet in nearly every figure.
            assert distance > (25 if j < 3 else 18), (kind, i, j, distance)
    assert len({style.hatch for style in palette.REQUESTS}) == len(palette.REQUESTS)


def test_colours_stand_out_from_both_pages():
    light, dark = palette.THEME["paper"]
    for style in palette.REQUESTS:
        assert contrast(style.color, light) >= 3 and contrast(style.color, dark) >= 3
        assert contrast(style.color, style.ink) >= 4.5
    assert contrast(palette.LIT, palette.LIT_INK) >= 4.5
    for name in ("ink", "dim", "wrong", "right", "measured", "predicted"):
        on_light, on_dark = palette.THEME[name]
        assert contrast(on_light, light) >= 4.5 and contrast(on_dark, dark) >= 4.5


def linear(color: str) -> np.ndarray:
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92,
                    ((channels + 0.055) / 1.055) ** 2.4)  # fmt: skip


def contrast(one: str, other: str) -> float:
    low, high = sorted(linear(c) @ [0.2126, 0.7152, 0.0722] for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722],
              [0.0193, 0.1192, 0.9505]]  # fmt: skip
    x, y, z = np.cbrt(to_xyz @ np.clip(rgb, 1e-3, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_a_request_keeps_its_look():
    assert palette.request("B") is palette.request(1) is palette.request("request-1")
    assert palette.request(7) is palette.request("B")
    assert palette.request("some id") is palette.request("some id")


def test_the_pipeline_lights_this_chapter_and_shades_what_is_built():
    figure = draw.pipeline(here="decoder", built=["tokenizer", "sampler"])
    page = figure.body
    assert page.count("mv-stage-here") == 1 and page.count("mv-stage-built") == 2
    assert "tokenizer -> (scheduler)" in repr(figure)
    assert "[decoder] -> sampler -> (detokenizer) -> text" in repr(figure)
    with pytest.raises(ValueError, match="did you mean 'block manager'"):
        draw.pipeline(here="block_manager")


def test_the_ladder_is_logarithmic_and_says_what_is_to_come():
    figure = draw.ladder(
        [(1, "naive", 10.0), (2, "cache", 1000.0), (3, "paging", None)]
    )
    assert re.findall(r"width:([\d.]+)%", figure.body) == ["1.0", "100.0"]
    assert repr(figure).splitlines()[1:] == [
        "  1  naive: 10 tokens/s",
        "  2  cache: 1,000 tokens/s, 100 times the first",
        "  3  paging: to come",
    ]
    with pytest.raises(ValueError, match="no rung is chapter 7"):
        draw.ladder([(1, "naive", None)], here=7)
    assert "to come" in repr(draw.ladder([(1, "naive", None)], here=1))


def test_tokens_show_white_space_and_bytes():
    words = Pieces(b"<s>", b" sky", b"\n\t", b" \xf0\x9f", b"\x99\x82", b"\x00", b"")
    assert draw.labels(words, range(7)) == [
        "<s>", "·sky", "↵⇥", "20 F0 9F", "99 82", "[U+0000]", "∅"
    ]  # fmt: skip
    figure = draw.tokens(words, list(range(7)), num_prompt_tokens=2, request="C")
    assert figure.body.count("mv-prompt") == 2
    assert figure.body.count("mv-generated") == 5
    assert figure.body.count("mv-bytes") == 2
    assert figure.body.count("mv-special") == 1
    assert "       3  20 F0 9F  generated" in repr(figure)
    with pytest.raises(ValueError, match="num_prompt_tokens is 8"):
        draw.tokens(words, list(range(7)), num_prompt_tokens=8)


def test_top_tokens_are_a_softmax():
    torch = pytest.importorskip("torch")
    words = Pieces(b"a", b"b", b"c")
    logits = np.log([0.2, 0.7, 0.1])
    text = repr(draw.top_tokens(words, logits + 1000, k=2))
    assert re.findall(r"(\w) +\d +([\d.]+)%", text) == [("b", "70.0"), ("a", "20.0")]
    as_torch = torch.tensor(logits + 1000, dtype=torch.float64, requires_grad=True)
    assert repr(draw.top_tokens(words, as_torch, k=2)) == text
    with pytest.raises(ValueError, match=r"shape \[1, 3\]"):
        draw.top_tokens(words, logits[None], k=2)


def test_a_table_puts_numbers_right():
    figure = draw.table([["a", 1000, 0.5], ["bb", 20, 0.25]], ["x", "n", "share"])
    assert repr(figure).splitlines() == [
        "x       n  share",
        "a   1,000    0.5",
        "bb     20   0.25",
    ]
    with pytest.raises(ValueError, match="a row has 2 cells, the header 1"):
        draw.table([[1, 2]], ["x"])
    with pytest.raises(ValueError, match="align is 'lx'"):
        draw.table([[1, 2]], ["x", "y"], align="lx")


def test_a_table_sets_code_as_code():
    figure = draw.table([["<a>", 1]], ["x", "n"], align="cr")
    assert repr(figure).splitlines() == ["x    n", "<a>  1"]
    assert ">&lt;a&gt;</code></td>" in figure._repr_html_().replace("<code", ">")


def test_a_block_shows_the_shapes_and_counts_of_the_spec():
    spec = small_spec(qkv_bias=True)
    figure = draw.block(spec)
    text = repr(figure)
    for line in (
        "q_proj  [n, 6, 16]  4,704 weights",  # 48 * 96 + 96
        "k_proj  [n, 2, 16]  1,568 weights",  # 48 * 32 + 32
        "o_proj  4,608 weights",  # 96 * 48
        "gate_proj  [n, 80]  3,840 weights",
        "6 query heads, 2 key/value heads: 3 query heads share one",
    ):
        assert line in text and all(
            html.escape(part) in figure.body for part in line.split("  ")
        )
    shapes = spec.weight_shapes()
    of_block = sum(np.prod(s) for n, s in shapes.items() if n.startswith("layers.4."))
    assert f"{of_block:,} parameters in a layer, 5 layers" in text
    assert figure.body.count("mv-head-q") == 6 and figure.body.count("mv-head-kv") == 2


def test_a_block_of_a_large_model_still_fits():
    spec = small_spec(hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128)
    figure = draw.block(spec)
    assert "67.1 M weights" in repr(figure)
    assert "mv-head-q" not in figure.body  # 64 squares would be dust


def test_attention_draws_the_past_and_marks_the_future():
    names = ["a", "b", "c"]
    figure = draw.attention(causal(3), names)
    assert figure.body.count('class="mv-cell"') == 6
    assert "mv-future" not in figure.body
    leaky = np.full((3, 3), 1 / 3)
    assert draw.attention(leaky, names).body.count('class="mv-future"') == 3
    assert "c looks most at a (0.50)" in repr(
        draw.attention([[1, 0, 0], [1, 0, 0], [0.5, 0.3, 0.2]], names)
    )
    for weights, labels, message in (
        (causal(3), ["a"], r"shape \[3, 3\], but 1 labels"),
        (causal(3)[0], names, r"need \[3, 3\]"),
        (causal(40), ["x"] * 40, "40 tokens do not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            draw.attention(weights, labels)


def test_the_recorded_heads_are_those_given():
    weights = causal(5, 2, 3)
    figure = draw.attention_heads(weights, list("abcde"), start=(1, 2))
    levels = [
        [[figure.data["levels"].index(c) / 61 for c in head] for head in layer]
        for layer in figure.data["heads"]
    ]
    rows, columns = np.array(figure.data["cells"]).T
    recorded = np.array(levels) ** 2
    # Half a shade of 61 on the square root is at most 1/61 of the weight.
    assert np.abs(recorded - weights[:, :, rows, columns]).max() < 1 / 61
    assert len(rows) == figure.body.count('class="mv-cell"') == 15
    with pytest.raises(ValueError, match="pass fewer layers"):
        draw.attention_heads(causal(32, 40, 32), ["x"] * 32)
    with pytest.raises(ValueError, match=r"start is \(2, 0\)"):
        draw.attention_heads(weights, list("abcde"), start=(2, 0))


def test_a_curve_shows_medians_ranges_and_the_prediction():
    figure = draw.curve(
        [1, 2, 4], measured(), [0.02, 0.03, 0.05], "tokens", "seconds", "growth"
    )
    assert repr(figure).splitlines() == [
        "growth: seconds against tokens",
        "  measured  1: 0.01, 2: 0.02, 4: 0.04",
        "  predicted  1: 0.02, 2: 0.03, 4: 0.05",
    ]
    for color in (palette.MEASURED, palette.THEME["ink"][0], "#ffffff", "DejaVu"):
        assert color not in figure.body  # all follow the page
    assert "var(--mv-measured)" in figure.body and "growth" in figure.body
    ids = re.findall(r'id="([^"]*)"', figure.body)
    uses = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', figure.body)
    assert uses and {a or b for a, b in uses} <= set(ids)
    with pytest.raises(ValueError, match="'y' has 2 values for 3 places"):
        draw.curve([1, 2, 4], {"y": [1, 2]})


def test_whiskers_reach_from_the_fastest_to_the_slowest(monkeypatch):
    from matplotlib.axes import Axes

    seen = []
    original = Axes.errorbar

    def errorbar(self, x, y, yerr, **options):
        seen.append((y, yerr))
        return original(self, x, y, yerr=yerr, **options)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    draw.curve([1, 2], [bench.Measurement(5.0, 4.0, 7.0, 3), 2])
    (middle, (down, up)), *_ = seen
    assert middle.tolist() == [5, 2]
    assert down.tolist() == [1, 0] and up.tolist() == [2, 0]


def test_two_curves_on_one_page_share_no_id():
    one, other = (draw.curve([1, 2], [n, 2]) for n in (1, 3))
    ids = [set(re.findall(r'id="([^"]*)"', curve.body)) for curve in (one, other)]
    assert ids[0] and not ids[0] & ids[1]


def test_any_matplotlib_figure_becomes_a_figure_of_the_book():
    from matplotlib.figure import Figure

    with bookkit.style():
        fig = Figure()
        fig.add_subplot().plot([1, 2])
    page = draw.figure(fig, alt="a rising line")._repr_html_()
    assert 'aria-label="a rising line"' in page and "var(--mv-dim)" in page
    with pytest.raises(ValueError, match="alt is empty"):
        draw.figure(fig, alt=" ")


def test_a_figure_of_pyplot_is_shown_once():
    from matplotlib import pyplot

    fig, _ = pyplot.subplots()
    assert pyplot.fignum_exists(fig.number)
    draw.figure(fig, alt="an empty plot")
    assert not pyplot.fignum_exists(fig.number)


def test_slots_show_prompt_generated_free_and_shared():
    figure = draw.slots(
        {"A": [0, 2], "B": [0, 1]},
        {"A": 6, "B": 7},
        {"A": 5, "B": 7},
        num_blocks=4,
        block_size=4,
    )
    slots = re.findall(r'mv-slot mv-(\w+)(?: mv-req-(\w))?"', figure.body)
    assert slots == [
        *[("prompt", "A")] * 4,  # block 0, shared
        *[("prompt", "B")] * 3, ("free", ""),
        ("prompt", "A"), ("generated", "A"), *[("free", "")] * 2,
        *[("free", "")] * 4,
    ]  # fmt: skip
    assert figure.body.count("mv-block mv-shared") == 1
    assert "4 blocks of 4 slots, 1 free" in repr(figure)
    assert "shared blocks: [0]" in repr(figure)
    with pytest.raises(ValueError, match="its 1 blocks hold 4"):
        draw.slots({"A": [0]}, {"A": 5}, num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match="holds block 4"):
        draw.slots({"A": [4]}, {"A": 1}, num_blocks=4, block_size=4)


def test_free_blocks_whose_content_is_known_are_striped():
    figure = draw.slots(
        {"A": [1]}, {"A": 1}, num_blocks=3, block_size=2, cached_blocks=[2, 1]
    )
    slots = re.findall(r"mv-slot mv-(\w+)", figure.body)
    assert slots == ["free", "free", "prompt", "free", "kept", "kept"]
    assert "free blocks whose content is known: [2]" in repr(figure)
    assert "Striped" in figure.body
    frame = {**FRAMES[0], "cached_blocks": [3]}
    player = draw.block_tables([frame], num_blocks=4, block_size=4)
    assert "content is known: [3]" in repr(player)


def test_a_player_holds_every_frame_and_starts_with_the_first():
    figure = draw.block_tables(FRAMES, num_blocks=4, block_size=4)
    page = figure._repr_html_()
    hidden = re.findall(r'class="mv-frame( mv-off)?"', page)
    assert hidden == ["", " mv-off"]
    recorded = re.search(r"const data = (.*);\n", page)[1]
    assert json.loads(recorded) == [frame["event"] for frame in FRAMES]
    assert "A: 5 tokens in blocks [0, 2]" in repr(figure)
    with pytest.raises(ValueError, match="1 figures and 0 captions"):
        draw.player([figure], [])


def test_a_guess_near_a_trap_is_told_why():
    guess = predict.number("Requests that fit", guess=17, unit="requests")
    shown = guess.reveal(95, explain="Blocks.", traps={2: "two.", 16: "long strips."})
    assert repr(shown).splitlines() == [
        "Requests that fit: 95 requests.",
        "You said 17 requests: 5.6 times too low.",
        "Blocks.",
        "Many answer 16 requests: long strips.",
    ]


def test_without_a_guess_the_first_trap_is_named():
    shown = predict.number("Rate").reveal(0.0123, traps={0: "none.", 1: "one."})
    assert repr(shown) == "Rate: 0.0123.\nA common answer is 0: none."


@pytest.mark.parametrize(
    ("guess", "actual", "said"),
    [
        (95, 95, "exactly right"),
        (100, 95, "within 5 %"),
        (130, 100, "30% too high"),
        (1000, 10, "100 times too high"),
        (-3, 4, "off by 7"),
        (0, 4, "off by 4"),
        (2, bench.Measurement(8.0, 7.0, 9.0, 5), "4.0 times too low"),
    ],
)
def test_a_guess_is_measured(guess, actual, said):
    assert f": {said}." in repr(predict.number("n", guess=guess).reveal(actual))


def test_a_right_guess_beats_a_trap_near_it():
    shown = predict.number("n", guess=10).reveal(10.5, traps={10: "trap."})
    assert "within 5 %" in repr(shown) and "Many answer" not in repr(shown)


def test_a_choice_is_judged():
    options = ["q_proj", "down_proj", "embed_tokens"]
    traps = {"q_proj": "famous, but small."}
    wrong = predict.choice("Largest?", options, guess="q_proj")
    assert repr(wrong.reveal("embed_tokens", traps=traps)).splitlines() == [
        "Largest? embed_tokens.",
        "You said q_proj: not this one.",
        "Many answer q_proj: famous, but small.",
    ]
    right = predict.choice("Largest?", options, guess="embed_tokens")
    assert "You said embed_tokens: right." in repr(right.reveal("embed_tokens"))
    assert "none yet" in repr(predict.choice("Largest?", options))
    with pytest.raises(ValueError, match="did you mean 'q_proj'"):
        predict.choice("Largest?", options, guess="qproj")
    with pytest.raises(ValueError, match="not one of the options"):
        right.reveal("lm_head")
    with pytest.raises(ValueError, match="write a number"):
        predict.number("How many?", guess="30")


def test_the_median_is_that_of_the_calls_after_the_warm_up(monkeypatch):
    clock = iter([0, 5, 10, 11, 20, 23])  # three calls of 5, 1 and 3 seconds
    calls = []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    found = bench.median(lambda: calls.append(1), repeat=3, warmup=2)
    assert found == bench.Measurement(3, 1, 5, 3) and len(calls) == 5
    assert str(found) == "3 s (1 to 5 s, median of 3)"
    with pytest.raises(ValueError, match="repeat is 0"):
        bench.median(lambda: None, repeat=0)


def test_rates_come_from_the_work_and_the_shortest_time(monkeypatch):
    monkeypatch.setattr(bench, "_best_of_budget", lambda fn: fn() is None or 0.5)
    assert bench.matmul_rate(size=8) == 2 * 8**3 / 0.5
    # Whole rows of 4096 numbers: 3 of them in 50,000 bytes.
    assert bench.read_bandwidth(num_bytes=50_000) == 3 * 4096 * 4 / 0.5
    assert bench.read_bandwidth("float64", num_bytes=70_000) == 2 * 4096 * 8 / 0.5


def test_a_limit_is_the_best_of_three_runs_or_more(monkeypatch):
    times = iter([0.4, 0.2, 0.3, 0.1])
    monkeypatch.setattr(bench, "_time_once", lambda fn: next(times))
    assert bench._best_of_budget(lambda: None) == 0.2  # 0.9 s are over the budget


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_measured_limits_are_positive(library):
    pytest.importorskip(library)
    assert bench.matmul_rate(size=32, library=library) > 0
    assert bench.read_bandwidth(num_bytes=2**20, library=library) > 0


def test_limits_refuse_what_would_not_measure_them():
    with pytest.raises(ValueError, match="without BLAS"):
        bench.matmul_rate("float16")
    with pytest.raises(ValueError, match="library is 'jax'"):
        bench.matmul_rate(library="jax")
    with pytest.raises(ValueError, match="16,384 or more"):
        bench.read_bandwidth(num_bytes=100)


def test_the_machine_is_one_line(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    line = bench.machine()
    assert "\n" not in line and f"NumPy {np.__version__}" in line
    assert "NumPy on 1 thread ·" in line


def test_units_fit_the_number():
    assert bench.duration(0.0123) == "12.3 ms"
    assert bench.duration(2.5e-7) == "250 ns"
    assert bench.si(3.2e10, "FLOP/s") == "32 GFLOP/s"
    assert bench.si(12, "B/s") == "12 B/s"


def test_bookkit_loads_neither_torch_nor_matplotlib():
    code = (
        "import sys; from bookkit import bench, draw, predict; bench.machine(); "
        "sys.exit(bool({'torch', 'matplotlib', 'minivllm'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=BOOK, check=True)


def test_the_package_does_not_know_the_teaching_helpers():
    package = BOOK.parent / "minivllm"
    users = [p for p in package.rglob("*.py") if "bookkit" in p.read_text()]
    assert not users
