"""The viewer of a trace as a figure of the book, in words and in a real browser."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "book"))

from figure_pages import check_card

from bookkit import draw, palette
from browser import Browser
from minivllm.engine.engine import LLMEngine
from minivllm.engine.trace import describe_engine
from minivllm.runners.fake_runner import FakeRunner
from minivllm.sampling.params import SamplingParams
from minivllm.viewer import style
from minivllm.viewer.frames import viewer_data
from minivllm.viewer.page import page

HOSTILE = '</script><b onload="x">'
SYSTEM = list(range(9))


class Words:
    """A tokenizer with hostile pieces."""

    special_token_ids = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return f"<{token_id}>".encode()


def run_engine(num_blocks: int, num_requests: int, name: str = "") -> LLMEngine:
    """Run requests that share a beginning and preempt each other; keep the records."""
    runner = FakeRunner(num_blocks=num_blocks, block_size=4, max_model_len=64)
    engine = LLMEngine(runner, max_num_seqs=8, max_num_batched_tokens=24)
    engine.records = []
    engine.listeners.append(engine.records.append)
    for number in range(num_requests):
        prompt = [*SYSTEM, 50 + number]
        engine.add_request(
            f"{name}{number}", prompt, SamplingParams(max_tokens=12 + number % 7)
        )
        engine.step()
    engine.abort_request(f"{name}{num_requests - 1}")
    while engine.has_unfinished_requests():
        engine.step()
    return engine


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    records = run_engine(12, 5).records
    assert any(record["preempted"] for record in records)
    assert any(any(record["num_prefix_hits"].values()) for record in records)
    return records


def test_the_colours_are_those_of_the_book():
    ours = {name: palette.THEME[name] for name in style.THEME}
    assert style.THEME == ours
    assert style.REQUESTS == tuple(
        (look.letter, look.color, look.ink, look.pattern) for look in palette.REQUESTS
    )
    for name in ("A", "F", "0", "7", "request-13", "some id", "", "AB", "chat-é"):
        assert style.letter(name) == palette.request(name).letter


def test_the_figure_says_the_same_in_words(records):
    figure = draw.trace(records, block_size=4, label="Five requests")
    lines = repr(figure).splitlines()
    assert lines[0] == "Five requests"
    assert lines[2].startswith("5 requests, ")
    assert any(line.startswith("  4: 10 prompt tokens, ") for line in lines)
    text = figure._repr_html_()
    assert 'role="group" aria-label="Five requests, step by step"' in text
    assert "5 requests, " in re.search(r"<pre.*?</pre>", text, re.DOTALL)[0]
    assert (
        draw.trace(records, block_size=4, label="Five requests")._repr_html_() == text
    )
    with pytest.raises(ValueError, match="0 records"):
        draw.trace([], block_size=4)


def test_the_figure_stays_in_its_card():
    records = run_engine(12, 2, HOSTILE).records
    text = draw.trace(records, block_size=4, tokenizer=Words())._repr_html_()
    assert check_card(text).tags.count("script") == 1
    assert all(c.startswith("mv-") for c in re.findall(r'class="([^"$ ]+)', text))


def move_to(browser: Browser, step: int) -> None:
    """Move the slider, and wait for the frame in which the step is drawn."""
    browser.run(
        f"(() => {{ const slider = document.querySelector('input');"
        f"slider.value = {step}; slider.oninput(); }})()"
    )
    wait_for_a_frame(browser)


def wait_for_a_frame(browser: Browser) -> None:
    frame = "requestAnimationFrame(() => requestAnimationFrame(resolve))"
    browser.run(f"new Promise(resolve => {frame})")


def read(browser: Browser, code: str) -> Any:
    return json.loads(browser.run(f"JSON.stringify({code})"))


TEXTS = "[...document.querySelectorAll('{}')].map(part => part.textContent)"


def test_every_step_is_drawn_as_it_was(browser, records, tmp_path):
    figure = draw.trace(records, block_size=4, tokenizer=Words())
    (tmp_path / "figure.html").write_text(f"<body>{figure._repr_html_()}</body>")
    browser.open((tmp_path / "figure.html").as_uri(), width=760)
    assert read(browser, TEXTS.format("pre")) == []
    # Forth, and back again: the fold starts anew.
    for step in [*range(len(records)), 7, 3, 0]:
        record = records[step]
        move_to(browser, step)
        batch, tables = read(
            browser,
            "[...document.querySelectorAll('ul.mv-t-rows')].map(list => "
            "[...list.querySelectorAll('li')].map(row => row.textContent))",
        )
        assert len(batch) == len(record["num_scheduled_tokens"])
        for row, name in zip(batch, record["num_scheduled_tokens"], strict=True):
            said = row.removeprefix(name)
            last = record["num_computed_tokens"][name]
            last += record["num_scheduled_tokens"][name]
            assert re.search(rf"tokens? (\d+ to )?{last}\b", said), row
            for token in record["sampled_token_ids"].get(name, ()):
                assert said.endswith(f"→ <{token}>")
        assert tables == [
            name + "".join(map(str, ids)) for name, ids in record["block_ids"].items()
        ]
        owners = [block for ids in record["block_ids"].values() for block in ids]
        used = len(set(owners))
        shared = len({block for block in owners if owners.count(block) > 1})
        known = record["num_cached_blocks"]
        kept = known - len(set(owners) - set(record["uncached_block_ids"]))
        label = read(
            browser, "document.querySelector('[role=img]').getAttribute('aria-label')"
        )
        assert label == (
            f"12 blocks of 4: {used} in use, {shared} of them shared; "
            f"{12 - used} free, {kept} of them cached"
        )
        waiting, preempted, running, _ = read(
            browser,
            "[...document.querySelectorAll('.mv-t-queue')].map(queue => "
            "[...queue.querySelectorAll('button')].map(chip => chip.textContent))",
        )
        assert sorted([*waiting, *preempted]) == sorted(record["waiting"])
        assert running == record["running"]
    assert not browser.errors and not browser.requests[1:]


def test_keys_and_buttons_move_through_the_steps(browser, tmp_path):
    engine = run_engine(12, 5)
    data = viewer_data({"block_size": 4}, engine.records)
    (tmp_path / "page.html").write_text(page(describe_engine(engine), data))
    browser.open((tmp_path / "page.html").as_uri(), width=760)
    last = len(engine.records)

    def press(key: str) -> str:
        browser.run(
            "document.body.dispatchEvent(new KeyboardEvent('keydown', "
            f"{{key: '{key}', bubbles: true}}))"
        )
        return browser.run("document.querySelector('output').textContent")

    assert press("ArrowLeft") == f"0 of {last}"
    assert press("ArrowRight") == f"1 of {last}"
    assert press("PageDown") == f"11 of {last}"
    assert press("End") == press("ArrowRight") == f"{last} of {last}"
    wait_for_a_frame(browser)
    event = "document.querySelector('.mv-t-event').textContent"
    assert browser.run(event) == "After the last step."
    assert press("Home") == f"0 of {last}"
    browser.run("document.querySelector('.mv-t-on').click()")
    wait_for_a_frame(browser)
    assert browser.run(event).startswith(
        "Request 1 arrives. Request 1 is admitted. Request 1 finds 8 tokens"
    )
    press(" ")
    play = "document.querySelector('.mv-t-play').ariaLabel"
    assert browser.run(play) == "Pause"
    press(" ")
    assert browser.run(play) == "Play"
    pressed = "document.querySelectorAll('[aria-pressed=true]').length"
    browser.run("document.querySelector('button.mv-t-name').click()")
    assert browser.run(pressed) == 1
    browser.run("document.querySelector('button.mv-t-name').click()")
    assert browser.run(pressed) == 0
    assert not browser.errors


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_a_large_pool_is_shown_in_windows(browser, tmp_path, width, dark):
    engine = run_engine(1200, 40)
    data = viewer_data({"block_size": 4}, engine.records)
    (tmp_path / "page.html").write_text(page(describe_engine(engine), data))
    browser.open((tmp_path / "page.html").as_uri(), width=width, dark=dark)
    move_to(browser, 30)
    cells = "document.querySelectorAll('.mv-t-pool .mv-t-cell').length"
    assert browser.run(cells) == 512
    for shown, num_cells in (("512 to 1,023", 512), ("1,024 to 1,199", 176)):
        browser.run("document.querySelector('[data-move=\"1\"]').click()")
        span = "document.querySelector('.mv-t-pages span').textContent"
        assert browser.run(span) == f"blocks {shown}"
        assert browser.run(cells) == num_cells
    assert browser.run("document.querySelector('[data-move=\"1\"]').disabled")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert not browser.errors
