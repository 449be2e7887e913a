"""The page at `/` and the live view: what is told, to whom, and at what cost."""

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from minivllm.cli.main import main
from minivllm.cli.serve import is_local
from minivllm.engine.async_engine import AsyncLLM
from minivllm.engine.config import EngineConfig
from minivllm.engine.engine import LLMEngine
from minivllm.errors import EngineClosing, EngineDead, EngineOverloaded
from minivllm.runners.base import CacheLayout
from minivllm.runners.fake_runner import FakeRunner
from minivllm.sampling.params import SamplingParams
from minivllm.server import live as live_module
from minivllm.server.live import (
    MAX_REQUESTS,
    MAX_WAITING,
    NUM_PLACES,
    LiveView,
    Watcher,
    live_event,
)
from minivllm.server.options import ServerOptions
from minivllm.server.page import HEADERS, page
from tests.scripted_server import (
    DONE,
    HANG_UP,
    Seen,
    delta_event,
    error,
    event,
    respond,
    scripted_server,
)
from tests.served import WAIT_S, Served
from tests.tiny_folder import write_parrot

sys.path.insert(0, str(Path(__file__).parents[1] / "book" / "tools"))

from browser import Browser, find_chromium

# "sky" is answered with " blué!", all else with xyz for ever.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }};{% endfor %}"
    "{{ ':' if 'sky' in messages[-1].content else 'x' }}"
)
ALLOWED = {
    *("step", "start_s", "duration_s", "num_prefill_tokens", "num_decode_tokens"),
    *("num_preempted", "num_running", "num_waiting", "running", "waiting"),
    *("num_used", "num_free", "num_kept", "other_pools"),
}
ALLOWED_OF_REQUEST = {
    *("request_id", "phase", "num_prompt_tokens", "num_tokens", "num_computed_tokens"),
    *("num_scheduled_tokens", "num_blocks", "num_own_blocks", "finish_reason"),
}


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), num_blocks=600, dtype="float32")


def until(is_true: Callable[[], Any], what: str) -> Any:
    """Wait until something is true."""
    end = time.monotonic() + WAIT_S
    while not (value := is_true()):
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)
    return value


def decoded(data: bytes) -> list[dict[str, Any]]:
    """Return the events in some bytes."""
    lines = data.decode().split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def watched_engine(**options: Any) -> tuple[LLMEngine, Watcher, LiveView]:
    """Return an engine that is watched, in this thread."""
    engine = LLMEngine(FakeRunner(num_blocks=32, block_size=4), **options)
    live = LiveView(None)
    watcher = Watcher()
    live.watchers = (watcher,)
    live._attach(engine)
    return engine, watcher, live


def add(engine: LLMEngine, name: str, prompt: list[int], max_tokens: int = 4) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(name, prompt, params)


# What is told


def test_an_event_has_the_named_fields_and_nothing_of_what_was_said():
    engine, watcher, _ = watched_engine()
    engine.runner.script = {"A": [911, 912, 913, 914]}
    add(engine, "A", [901, 902, 903, 904, 905])
    while engine.has_unfinished_requests():
        engine.step()
    steps = decoded(watcher.take())
    assert len(steps) == 4
    numbers = {int(number) for number in re.findall(r"\d+", json.dumps(steps))}
    assert not numbers & {*range(901, 906), *range(911, 915)}
    for step in steps:
        assert step.keys() == ALLOWED
        for request in step["running"]:
            assert request.keys() == ALLOWED_OF_REQUEST


def test_the_steps_of_a_request_by_hand():
    engine, watcher, live = watched_engine(max_num_batched_tokens=4)
    add(engine, "A", [1, 2, 3, 4, 5, 6], max_tokens=2)
    add(engine, "B", [9], max_tokens=1)
    while engine.has_unfinished_requests():
        engine.step()
    first, second, third = decoded(watcher.take())
    (a,) = first["running"]
    assert (a["phase"], a["num_scheduled_tokens"], a["num_blocks"]) == ("prefill", 4, 1)
    assert first["waiting"] == ["B"] and first["num_waiting"] == 1
    assert (first["num_prefill_tokens"], first["num_decode_tokens"]) == (4, 0)
    a, b = second["running"]
    assert (a["phase"], a["num_scheduled_tokens"], a["num_tokens"]) == ("prefill", 2, 6)
    assert (b["phase"], b["finish_reason"]) == ("prefill", "length")
    assert (second["num_prefill_tokens"], second["num_decode_tokens"]) == (3, 0)
    assert (second["num_used"], second["num_free"]) == (3, 29)
    (a,) = third["running"]
    assert (a["phase"], a["finish_reason"]) == ("decode", "length")
    assert (third["num_prefill_tokens"], third["num_decode_tokens"]) == (0, 1)
    assert live._num_prompt_tokens == {}
    live._tell_state(engine)
    (idle,) = decoded(watcher.take())
    assert idle["step"] is None and idle["running"] == []
    assert (idle["num_used"], idle["num_free"], idle["num_kept"]) == (0, 32, 1)


def test_shared_blocks_are_nobodys_own():
    engine, watcher, _ = watched_engine()
    add(engine, "A", [*range(8), 50])
    engine.step()
    add(engine, "B", [*range(8), 60])
    engine.step()
    *_, last = decoded(watcher.take())
    assert [(r["num_blocks"], r["num_own_blocks"]) for r in last["running"]] == [
        (3, 1),
        (3, 1),
    ]
    assert last["num_used"] == 4


def test_a_hybrid_model_has_other_pools_too():
    runner = FakeRunner(num_blocks=16, block_size=4)
    runner.layout = CacheLayout(
        window=4, num_window_blocks=12, num_states=3, num_kept_states=2
    )
    engine = LLMEngine(runner)
    live, watcher = LiveView(None), Watcher()
    live.watchers = (watcher,)
    live._attach(engine)
    add(engine, "A", [1] * 6)
    engine.step()  # four tokens: a state is kept at the edge of the block
    (told,) = decoded(watcher.take())
    windows, states, kept = told["other_pools"]
    assert windows == {"name": "blocks of windows", "num_used": 1, "num_total": 12}
    assert states == {"name": "states", "num_used": 1, "num_total": 3}
    assert (kept["name"], kept["num_total"]) == ("kept states", 2)
    engine.abort_request("A")
    live._tell_state(engine)
    (told,) = decoded(watcher.take())
    assert [pool["num_used"] for pool in told["other_pools"]][:2] == [0, 0]


def test_an_event_is_short_however_many_requests_there_are():
    engine = LLMEngine(FakeRunner(num_blocks=1000), max_num_seqs=MAX_REQUESTS + 20)
    records: list[dict[str, Any]] = []
    engine.listeners.append(records.append)
    for number in range(MAX_REQUESTS + 20 + MAX_WAITING + 5):
        add(engine, f"request-{number}", [number])
    engine.step()
    told = live_event(records[0], {})
    assert (told["num_running"], len(told["running"])) == (MAX_REQUESTS + 20, 64)
    assert (told["num_waiting"], len(told["waiting"])) == (MAX_WAITING + 5, 32)


def test_who_begins_to_watch_later_knows_the_prompts_of_those_who_run():
    engine, watcher, live = watched_engine(max_num_batched_tokens=4)
    engine.listeners.clear()
    engine.add_request("A", [1] * 6, SamplingParams(n=2, max_tokens=3, ignore_eos=True))
    engine.step()
    live._attach(engine)
    engine.step()
    engine.step()
    prefill, decode = decoded(watcher.take())
    assert (prefill["num_prefill_tokens"], prefill["num_decode_tokens"]) == (2, 0)
    assert (decode["num_prefill_tokens"], decode["num_decode_tokens"]) == (0, 2)
    assert {r["num_prompt_tokens"] for r in decode["running"]} == {6}
    engine.abort_request("A")
    add(engine, "B", [1])
    while engine.has_unfinished_requests():
        engine.step()
    assert live._num_prompt_tokens == {}


# Who touches the engine


@pytest.fixture
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(LLMEngine(FakeRunner(num_blocks=64)))
    yield llm
    llm.close()


def listeners(llm: AsyncLLM) -> list[Any]:
    return llm.call_in_engine(lambda engine: list(engine.listeners)).result(WAIT_S)


async def generate(llm: AsyncLLM, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    async for _ in llm.generate([1, 2, 3], params):
        pass


def test_a_call_runs_in_the_engines_thread_and_its_error_comes_back(llm):
    name = llm.call_in_engine(lambda engine: threading.current_thread().name)
    assert name.result(WAIT_S) == "minivllm-engine"
    with pytest.raises(ZeroDivisionError):
        llm.call_in_engine(lambda engine: 1 / 0).result(WAIT_S)
    llm.check_health()
    asyncio.run(generate(llm, 3))


def test_calls_that_an_engine_does_not_come_to_are_refused():
    llm = AsyncLLM(LLMEngine(FakeRunner()))
    holds, goes_on = threading.Event(), threading.Event()

    def hold(engine: LLMEngine) -> None:
        holds.set()
        goes_on.wait(WAIT_S)

    llm.call_in_engine(hold)
    assert holds.wait(WAIT_S)
    llm._inbox.put(None)  # what `close` puts there
    late = llm.call_in_engine(lambda engine: 1)
    goes_on.set()
    with pytest.raises(EngineClosing):
        late.result(WAIT_S)
    llm.close()
    with pytest.raises(EngineClosing, match="closed"):
        llm.call_in_engine(lambda engine: 1)


def test_calls_to_a_dead_engine_are_refused(llm):
    llm.call_in_engine(lambda engine: engine.listeners.append(lambda r: r["no such"]))
    with pytest.raises(EngineDead):
        asyncio.run(generate(llm, 2))
    until(lambda: llm.has_stopped, "the thread ends")
    with pytest.raises(EngineDead):
        llm.call_in_engine(lambda engine: 1)
    with pytest.raises(EngineDead):
        LiveView(llm).watch()


def test_many_watchers_are_one_listener_and_none_is_none(llm):
    live = LiveView(llm)
    assert listeners(llm) == []
    watchers = [live.watch() for _ in range(5)]
    assert listeners(llm) == [live._listen]
    for watcher in watchers:
        live.leave(watcher)
        live.leave(watcher)
    assert listeners(llm) == []
    live.leave(live.watch())
    assert listeners(llm) == []


def test_a_slow_watcher_loses_the_oldest_steps_and_no_more(llm):
    live = LiveView(llm)
    slow = live.watch()
    asyncio.run(generate(llm, 200))
    assert len(slow.box) == NUM_PLACES
    steps = [event["step"] for event in decoded(slow.take())]
    assert steps == list(range(200 - NUM_PLACES, 200))
    live.leave(slow)


def test_too_many_watchers_are_told_to_come_again(llm, monkeypatch):
    monkeypatch.setattr(live_module, "MAX_WATCHERS", 1)
    live = LiveView(llm)
    first = live.watch()
    with pytest.raises(EngineOverloaded, match="at most 1 may"):
        live.watch()
    live.leave(first)
    live.leave(live.watch())


def test_a_view_says_that_the_engine_is_idle_after_an_abort(llm, monkeypatch):
    monkeypatch.setattr(live_module, "QUIET_S", 0.0)

    async def use() -> list[dict[str, Any]]:
        live = LiveView(llm)
        watcher = live.watch()
        stream = await llm.add_request([1], SamplingParams(max_tokens=4000))
        told = []
        async for data in live.events(watcher):
            told += decoded(data)
            last = told[-1]
            if last.get("num_running") and stream.is_open:
                llm.close_stream(stream)
            if len(told) > 2 and last["step"] is None and not last["num_used"]:
                break
        live.leave(watcher)
        return told

    told = asyncio.run(asyncio.wait_for(use(), WAIT_S))
    assert told[0].keys() == {"engine"}
    assert told[-1]["num_running"] == 0


def test_the_stream_ends_with_the_engine(monkeypatch):
    monkeypatch.setattr(live_module, "STILL_HERE_S", 0.0)

    async def use() -> bytes:
        llm = AsyncLLM(LLMEngine(FakeRunner()))
        live = LiveView(llm)
        watcher = live.watch()
        seen = b""
        async for data in live.events(watcher):
            seen += data
            if data.startswith(b":"):
                llm.close()
        live.leave(watcher)  # harmless, though there is no engine
        return seen

    seen = asyncio.run(asyncio.wait_for(use(), WAIT_S))
    assert b"\n\n: still here\n\n" in seen and b'"error"' not in seen


def test_a_death_is_told(llm):
    async def use() -> list[dict[str, Any]]:
        live = LiveView(llm)
        watcher = live.watch()
        llm.call_in_engine(lambda engine: engine.listeners.append(lambda r: r["x"]))
        with pytest.raises(EngineDead):
            await generate(llm, 2)
        return [e async for data in live.events(watcher) for e in decoded(data)]

    assert "died" in asyncio.run(use())[-1]["error"]["message"]


# Over HTTP


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_parrot(tmp_path_factory.mktemp("parrot"), TEMPLATE)
    served = Served(config_of(folder), ServerOptions(page=True))
    served.pause_s = 0.02
    yield served
    served.close()


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_parrot(tmp_path_factory.mktemp("locked"), TEMPLATE)
    served = Served(config_of(folder), ServerOptions(page=True, api_keys=("s3cret",)))
    yield served
    served.close()


def test_the_page_allows_its_own_script_and_nothing_else(served):
    response = httpx.get(f"{served.url}/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http" not in policy and "connect-src 'self'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert "set-cookie" not in response.headers
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacent", "document.write"):
        assert forbidden not in page()
    assert "http://" not in page() and "https://" not in page()
    assert "access-control-allow-origin" not in response.headers


def test_without_the_option_there_is_no_page_and_says_so(tmp_path):
    served = Served(config_of(write_parrot(tmp_path)))
    try:
        for path in ("/", "/trace"):
            response = httpx.get(served.url + path)
            assert response.status_code == 404
            assert "--page" in response.json()["error"]["message"]
    finally:
        served.close()


def test_the_page_needs_no_key_and_the_live_view_does(locked):
    assert httpx.get(f"{locked.url}/").status_code == 200
    assert "s3cret" not in httpx.get(f"{locked.url}/").text
    assert httpx.get(f"{locked.url}/trace").status_code == 401
    key = {"Authorization": "Bearer s3cret"}
    with httpx.stream("GET", f"{locked.url}/trace", headers=key) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert next(response.iter_lines()).startswith('data: {"engine":')


def test_a_watcher_who_hangs_up_is_gone(served):
    with httpx.stream("GET", f"{served.url}/trace") as response:
        lines = response.iter_lines()
        next(lines)
        assert len(listeners(served.llm)) == 1
    until(lambda: not listeners(served.llm), "the listener leaves")
    assert served.app.state.live_view.watchers == ()


def test_the_description_has_the_trace_and_not_the_page(served):
    paths = httpx.get(f"{served.url}/openapi.json").json()["paths"]
    assert "/trace" in paths and "/" not in paths
    content = paths["/trace"]["get"]["responses"]["200"]["content"]
    assert list(content) == ["text/event-stream"]


# On the command line


@pytest.mark.parametrize(
    ("arguments", "has_page"),
    [
        ([], True),
        (["--no-page"], False),
        (["--host", "localhost"], True),
        (["--host", "0.0.0.0"], False),
        (["--host", "0.0.0.0", "--page"], True),
    ],
)
def test_the_page_is_on_where_only_this_machine_can_ask(
    monkeypatch, arguments, has_page
):
    seen: list[ServerOptions] = []

    def serve(llm: AsyncLLM, handlers: Any, options: ServerOptions, *_: Any) -> int:
        seen.append(options)
        llm.close()
        return 0

    monkeypatch.setattr("minivllm.server.serve.serve", serve)
    assert main(["serve", "--backend", "fake", "--port", "0", *arguments]) == 0
    assert [options.page for options in seen] == [has_page]


def test_only_loopback_addresses_are_local():
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert is_local(host)
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org", ""):
        assert not is_local(host)


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip("Chromium is not installed (on Debian: apt-get install chromium)")
    with Browser() as chromium:
        yield chromium


class Page:
    """A page in the browser, as somebody uses it."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.browser = browser
        browser.open(f"{url}/", **({"width": 1280} | options))

    def text(self, selector: str) -> str:
        """Return the texts of all parts that match, one behind the other."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.browser.run(f"{found}.map((part) => part.innerText).join('|')")

    def until(self, script: str) -> Any:
        return until(lambda: self.browser.run(script), script)

    def until_text(self, selector: str, text: str) -> None:
        until(lambda: text in self.text(selector), f"{text!r} in {selector}")

    def press(self, name: str, modifiers: int = 0) -> None:
        code = {"Enter": 13, "Escape": 27}[name]
        text = {"Enter": "\r"}.get(name, "")
        for kind in ("keyDown", "keyUp"):
            self.browser.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=code,
                modifiers=modifiers,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def type(self, text: str, into: str = "question") -> None:
        self.browser.run(f"get({into!r}).focus()")
        self.browser.send("Input.insertText", text=text)

    def set(self, name: str, value: float) -> None:
        """Move a slider."""
        self.browser.run(
            f"(() => {{ const input = get({name!r}); input.value = {value}; "
            "input.dispatchEvent(new Event('input')); })()"
        )

    def click(self, name: str) -> None:
        self.browser.run(f"get({name!r}).click()")


def test_a_message_is_answered_and_counted(served, browser):
    shown = Page(browser, served.url)
    shown.until_text("#line", "live")
    assert shown.text("#model") == "parrot, up to 4,096 tokens for each request"
    shown.type("the sky")
    shown.press("Enter", modifiers=8)  # Shift
    assert browser.run("box.value") == "the sky\n"
    shown.press("Enter")
    shown.until_text(".note", "8 written")
    assert shown.text(".answer").strip() == "blué!"
    assert shown.text(".asked").strip() == "the sky"
    assert "tokens/s" in shown.text(".note")
    assert browser.run("said.map((m) => m.role).join()") == "user,assistant"
    assert browser.run("box.value") == ""
    shown.click("reset")
    assert browser.run("said.length + list.childElementCount") == 0
    assert browser.errors == []
    assert all(url.startswith(served.url) for url in browser.requests)


def test_an_answer_streams_is_seen_in_the_engine_and_can_be_stopped(served, browser):
    shown = Page(browser, served.url)
    shown.until_text("#line", "live")
    shown.type("go on")
    shown.press("Enter")
    shown.until("document.querySelector('.answer')?.textContent.length > 20")
    shown.until("document.querySelectorAll('#running li').length === 1")
    shown.until("document.querySelectorAll('#pool .used').length > 0")
    shown.until_text("#running", "decode")
    shown.until("get('decode-bars').getAttribute('d').length > 100")
    assert browser.run("get('send').disabled") and served.llm.num_open == 1
    shown.press("Escape")
    until(lambda: served.llm.num_open == 0, "the request leaves the engine")
    served.until_idle()
    shown.until_text(".note", "stopped")
    shown.until("document.querySelectorAll('#running li').length === 0")
    shown.until("document.querySelectorAll('#pool .used').length === 0")
    shown.until_text("#pool-text", "0 of 600 blocks in use")
    assert browser.run("said.length") == 2  # what was written is kept
    assert not browser.run("get('send').disabled")
    shown.type("go on")
    shown.click("send")
    shown.until("document.querySelectorAll('.answer')[1]?.textContent.length > 5")
    shown.click("stop")
    served.until_idle()


def test_who_hides_the_page_watches_no_more(served, browser):
    shown = Page(browser, served.url)
    shown.until_text("#line", "live")
    assert len(listeners(served.llm)) == 1
    browser.run(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    until(lambda: not listeners(served.llm), "the listener leaves")
    assert shown.text("#line") == "paused"
    browser.run(
        "delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))"
    )
    shown.until_text("#line", "live")


def test_a_key_is_asked_for_and_sent(locked, browser):
    shown = Page(browser, locked.url)
    shown.until("!get('key-form').hidden")
    shown.until_text("#line", "key")
    shown.type("wrong", into="key")
    shown.press("Enter")
    shown.until("key === 'wrong' && !get('key-form').hidden")
    browser.run("get('key').value = ''")
    shown.type("s3cret", into="key")
    shown.press("Enter")
    shown.until_text("#line", "live")
    shown.type("the sky")
    shown.press("Enter")
    shown.until_text(".note", "8 written")
    assert browser.run("JSON.stringify([localStorage, sessionStorage])") == "[{},{}]"
    assert browser.run("document.cookie") == ""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_on_any_screen(served, browser, width, dark):
    shown = Page(browser, served.url, width=width, dark=dark)
    shown.until_text("#line", "live")
    browser.run("get('settings').open = true")
    shown.type("go on " + "x" * 300)
    shown.press("Enter")
    shown.until("document.querySelectorAll('#running li').length === 1")
    for part in ("document.documentElement", "list"):
        assert browser.run(f"{part}.scrollWidth - {part}.clientWidth") == 0
    assert browser.run("document.documentElement.scrollWidth") == width
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(27, 30, 38)" if dark else "rgb(255, 255, 255)")
    shown.press("Escape")
    served.until_idle()


def test_every_control_has_a_name(served, browser):
    Page(browser, served.url)
    nameless = browser.run(
        "[...document.querySelectorAll('input, textarea, button')].filter((part) =>"
        "!part.labels?.length && !part.textContent.trim()).map((part) => part.id)"
        ".join()"
    )
    assert nameless == ""


# With a server whose every byte is decided here


def page_and(answer: Callable[[Seen], Any]) -> Callable[[Seen], Any]:
    """Serve the page with its headers, and else what a test says."""
    headers = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    headers += "Content-Type: text/html; charset=utf-8\r\n"
    html = respond("200 OK", page().encode(), headers)
    return lambda seen: [html] if seen.path == "/" else answer(seen)


def answers(*script: Any) -> Callable[[Seen], Any]:
    def answer(seen: Seen) -> Any:
        if seen.path == "/trace":
            return [error("404 Not Found", "the live view is off")]
        return script if seen.method == "POST" else None

    return page_and(answer)


HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
)


def test_settings_arrive_and_only_those_that_were_moved(browser):
    script = (HEAD, delta_event(content="ok"), DONE)
    with scripted_server(answers(*script)) as (url, seen):
        shown = Page(browser, url)
        shown.until_text("#line", "the live view is off")
        browser.run("get('settings').open = true")
        assert shown.text("#temperature-value") == "default"
        shown.set("temperature", 0.7)
        shown.set("top_k", 20)
        shown.set("max_tokens", 33)
        assert shown.text("#temperature-value") == "0.7"
        shown.type("Be brief.", into="system")
        shown.type("Hi")
        shown.press("Enter")
        shown.until_text(".note", "complete")
        shown.click("defaults")
        shown.type("And?")
        shown.press("Enter")
        shown.until("said.length === 4")
    first, second = [request.body for request in seen if request.method == "POST"]
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Hi"}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    moved = {"temperature": 0.7, "top_k": 20, "max_tokens": 33}
    assert first == {"messages": [system, user], **options, **moved}
    history = [system, user, {"role": "assistant", "content": "ok"}]
    history.append({"role": "user", "content": "And?"})
    assert second == {"messages": history, **options}


def test_what_a_model_writes_is_text_and_thoughts_are_folded(browser):
    evil = "<img src=x onerror=\"document.title='owned'\"><script>1</script>"
    script = (
        HEAD,
        delta_event(reasoning_content="<b>hm</b>"),
        delta_event(content=evil),
        DONE,
    )
    with scripted_server(answers(*script)) as (url, _):
        shown = Page(browser, url)
        shown.type(evil)
        shown.press("Enter")
        shown.until_text(".note", "complete")
        assert shown.text(".answer") == shown.text(".asked") == evil
        made = (
            "document.querySelectorAll('#messages img, #messages script, #messages b')"
        )
        assert browser.run(f"{made}.length") == 0
        assert browser.run("document.title") == "minivllm"
        assert not browser.run("document.querySelector('.thoughts').open")
        assert browser.run("document.querySelector('.thoughts p').textContent") == (
            "<b>hm</b>"
        )
        # And if a tag came into the page after all, the policy would stop it.
        browser.run(
            "document.body.insertAdjacentHTML('beforeend', "
            "'<img src=x onerror=\"document.title=1\">')"
        )
        shown.until("document.querySelector('body > img').complete")
        assert browser.run("document.title") == "minivllm"


def test_letters_that_are_cut_in_two_are_put_together(browser):
    data = delta_event(content="é").replace(b"\\u00e9", "é".encode())
    cut = data.index("é".encode()) + 1
    script = (HEAD, data[:cut], 0.2, data[cut:-1], 0.2, data[-1:], DONE)
    with scripted_server(answers(*script)) as (url, _):
        shown = Page(browser, url)
        shown.type("Hi")
        shown.press("Enter")
        shown.until_text(".note", "complete")
        assert shown.text(".answer") == "é"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ((error("429 Too Many Requests", "come again"),), "come again"),
        ((respond("502 Bad Gateway", b"<html>"),), "status 502"),
        (
            (HEAD, delta_event(content="a"), event(error={"message": "it died"}), DONE),
            "it died",
        ),
        ((HEAD, delta_event(content="a")), "broke off"),
        ((HEAD, delta_event(content="a"), 0.2, HANG_UP), "broke off"),
        ((HANG_UP,), "not reachable"),
    ],
)
def test_errors_are_told_in_words(browser, script, words):
    with scripted_server(answers(*script)) as (url, _):
        shown = Page(browser, url)
        shown.type("Hi")
        shown.press("Enter")
        shown.until_text(".failed .note", words)
        assert not browser.run("get('send').disabled")
        kept = "a" if script[0] is HEAD else ""
        assert shown.text(".answer") == kept
        # A question without an answer comes back, to be sent again.
        assert browser.run("box.value") == ("" if kept else "Hi")


def test_a_line_that_breaks_is_tried_again_less_and_less_often(browser):
    times: list[float] = []
    live = event(
        engine={
            "policy": "mixed",
            "block_size": 16,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
        }
    )

    def answer(seen: Seen) -> Any:
        if seen.path != "/trace":
            return None
        times.append(time.monotonic())
        # No broken connection: Chromium would try that again by itself.
        away = error("503 Service Unavailable", "it is away.")
        return [away] if len(times) < 3 else [HEAD, live, 3600.0]

    with scripted_server(page_and(answer)) as (url, _):
        shown = Page(browser, url)
        shown.until_text("#line", "it is away. Next try in 1 s")
        shown.until_text("#line", "it is away. Next try in 2 s")
        shown.until_text("#line", "live")
        assert times[1] - times[0] > 0.9 and times[2] - times[1] > 1.9
        assert not browser.run("get('live').classList.contains('stale')")


@pytest.mark.parametrize(
    ("counts", "num_cells"),
    [([1, 0, 99_999], 256), ([1] * 60 + [12_500] * 8, 256), ([7, 7, 7], 10)],
)
def test_every_kind_of_block_has_a_square(served, browser, counts, num_cells):
    Page(browser, served.url)
    cells = json.loads(
        browser.run(f"JSON.stringify(allot({json.dumps(counts)}, {num_cells}))")
    )
    assert sum(cells) == num_cells
    assert [cell > 0 for cell in cells] == [count > 0 for count in counts]
