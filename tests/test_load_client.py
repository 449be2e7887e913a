"""The client of the load test, against a server whose every byte is scripted."""

import asyncio
import json
import sys
import time
from types import SimpleNamespace

import pytest

from minivllm.benchmarks import load_client
from minivllm.benchmarks.load import LoadRequest, Piece, RequestFailed, Usage
from minivllm.benchmarks.load_client import (
    EventLines,
    OpenAISender,
    first_model,
    open_session,
    piece_of_event,
    wait_until_ready,
)
from minivllm.errors import BackendUnavailable, MinivllmError
from tests.scripted_server import (
    DONE,
    HANG_UP,
    HEAD,
    MODELS,
    Script,
    delta_event,
    error,
    event,
    for_completions,
    respond,
    scripted_server,
    text_event,
    usage_event,
)

pytest.importorskip("aiohttp")
REQUEST = LoadRequest(prompt=[5, 6], max_tokens=3)


def ask(
    script: Script, request: LoadRequest = REQUEST, timeout_s: float = 30.0, **options
) -> tuple[list[tuple[Piece, float]], dict]:
    """Return the pieces of an answer, when they came, and the body that was sent."""

    async def main(url: str) -> list[tuple[Piece, float]]:
        async with open_session("sesame", timeout_s) as session:
            sender = OpenAISender(session, url, "parrot", **options)
            start = time.perf_counter()
            return [
                (piece, time.perf_counter() - start)
                async for piece in sender.send(request)
            ]

    with scripted_server(for_completions(script)) as (url, seen):
        pieces = asyncio.run(main(url))
    assert seen[0].headers["authorization"] == "bearer sesame"
    return pieces, seen[0]


def failure(script: Script, **options) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        ask(script, **options)
    return caught.value


def test_a_completion_is_asked_for_as_a_stream_with_counts():
    script = [HEAD, text_event("a"), text_event(""), usage_event(2, 3), DONE]
    pieces, seen = ask(script, extra_body={"ignore_eos": True, "temperature": 0.5})
    assert [piece for piece, _ in pieces] == [
        Piece(True),
        Piece(False),  # half a character: nothing to see yet
        Piece(False, Usage(2, 3)),
    ]
    assert (seen.method, seen.path) == ("POST", "/v1/completions")
    assert seen.body == {
        "model": "parrot",
        "prompt": [5, 6],
        "max_tokens": 3,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_in_a_chat_the_role_is_not_the_first_token():
    script = [
        *(HEAD, delta_event(role="assistant", content="")),
        *(delta_event(reasoning_content="Hm."), delta_event(content="Yes")),
        *(delta_event(reasoning="Hm."), delta_event(tool_calls=[{"index": 0}])),
        *(delta_event(), DONE),
    ]
    request = LoadRequest(prompt="Why?", max_tokens=3)
    pieces, seen = ask(script, request, endpoint="chat")
    is_shown = [piece.is_shown for piece, _ in pieces]
    assert is_shown == [False, True, True, True, True, False]
    assert seen.path == "/v1/chat/completions"
    assert seen.body["messages"] == [{"role": "user", "content": "Why?"}]
    assert seen.body["temperature"] == 0
    messages = [{"role": "system", "content": "Be brief."}]
    seen = ask(script, LoadRequest(prompt=messages, max_tokens=3), endpoint="chat")[1]
    assert seen.body["messages"] == messages


def test_what_a_request_says_itself_goes_before_the_further_fields():
    own = {"max_tokens": 99, "prompt": "other", "messages": []}
    seen = ask([HEAD, DONE], extra_body=own)[1]
    assert (seen.body["max_tokens"], seen.body["prompt"]) == (3, [5, 6])
    request = LoadRequest(prompt="Why?", max_tokens=3)
    seen = ask([HEAD, DONE], request, endpoint="chat", extra_body=own)[1]
    assert seen.body["messages"] == [{"role": "user", "content": "Why?"}]


def test_pieces_come_when_they_were_sent():
    script = [HEAD, 0.15, text_event("a"), 0.25, text_event("b"), DONE]
    (_, first_s), (_, second_s) = ask(script)[0]
    # A busy machine is late, but never early.
    assert 0.14 <= first_s < 5
    assert 0.24 <= second_s - first_s < 5


def test_events_may_be_cut_anywhere():
    text = b": hello\r\n\r\nevent: x\ndata: {a}\n\ndata:{b}\r\n\r\ndata: \xc3\xa9\n"
    for size in range(1, len(text)):
        lines = EventLines()
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        found = [data for chunk in chunks for data in lines.add(chunk)]
        assert found == [b"{a}", b"{b}", "é".encode()]


def test_what_comes_behind_done_is_not_waited_for():
    start = time.perf_counter()
    pieces, _ = ask([HEAD, text_event("a"), DONE, 20.0])
    assert len(pieces) == 1 and time.perf_counter() - start < 10


@pytest.mark.parametrize("status", ["429 Too Many Requests", "500 Oops", "401 No"])
def test_a_status_is_a_kind_of_failure(status):
    failed = failure([error(status, "not now")])
    number = status.split()[0]
    assert (failed.kind, str(failed)) == (f"HTTP {number}", f"HTTP {number}: not now")


@pytest.mark.parametrize(
    "body", [b"plain text", b"[]", b"{}", b'{"error": 3}', b"[" * 10**5]
)
def test_an_error_in_another_form_is_shown_as_it_is(body):
    failed = failure([respond("502 Bad Gateway", body)])
    assert str(failed) == f"HTTP 502: {body[:200].decode()}"
    assert str(failure([respond("502 No", b"\xff!")])) == "HTTP 502: \ufffd!"


def test_a_server_that_hangs_up_has_failed():
    chunked = HEAD.replace(b"Connection: close", b"Transfer-Encoding: chunked")
    half = [chunked, b"40\r\n" + text_event("a")]
    assert failure([*half, HANG_UP]).kind.startswith("Client")
    assert failure([*half]).kind.startswith("Client")
    assert failure([HANG_UP]).kind.startswith(("Client", "Server"))


def test_a_stream_without_its_end_has_failed():
    failed = failure([HEAD, text_event("a")])
    assert str(failed) == "broken stream: it ended without data: [DONE]"
    whole = respond("200 OK", b'{"choices": [{"text": "not streamed"}]}')
    assert failure([whole]).kind == "broken stream"


def test_an_error_in_the_middle_of_a_stream_has_its_message():
    script = [HEAD, text_event("a"), event(error={"message": "it broke"}), DONE]
    assert str(failure(script)) == "error in the stream: it broke"


def test_a_server_that_takes_too_long_has_failed():
    assert failure([HEAD, text_event("a"), 20.0], timeout_s=0.2).kind == "time-out"


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"3",
        b"null",
        b'"text"',
        b"{}",
        b'{"choices": 3}',
        b'{"choices": [3]}',
        b'{"choices": [{}]}',
        b'{"choices": [{"delta": null}]}',
        b'{"choices": [], "usage": {}}',
        b'{"choices": [], "usage": [1, 2]}',
        b'{"choices": [], "usage": {"prompt_tokens": "1", "completion_tokens": 2}}',
        b"\xff",
        b"[" * 10**5,
    ],
)
def test_an_event_that_is_none_has_failed(data):
    with pytest.raises(RequestFailed) as caught:
        piece_of_event(data)
    assert caught.value.kind == "no event of OpenAI's"
    assert str(caught.value).endswith(f": {data[:80]!r}")


def test_an_error_that_is_null_is_none():
    body = {"error": None, "usage": None, "choices": [{"text": "a"}]}
    assert piece_of_event(json.dumps(body).encode()) == Piece(True)


def test_without_aiohttp_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(BackendUnavailable, match="pip install aiohttp"):
        open_session()


def test_no_request_waits_for_a_connection():
    async def main() -> int:
        async with open_session() as session:
            return session.connector.limit

    assert asyncio.run(main()) == 0  # no limit


# Before the load.


def with_session(answer, use, timeout_s: float | None = None):
    """Run a coroutine function with a session and the address of a server."""

    async def main(url: str):
        async with open_session(timeout_s=timeout_s) as session:
            return await use(session, url)

    with scripted_server(answer) as (url, _):
        return asyncio.run(main(url))


def test_a_server_is_waited_for():
    # aiohttp asks again at once when somebody has hung up, but only once.
    answers = iter(
        [error("500 Oops", "loading"), HANG_UP, HANG_UP, respond("499 No", b"")]
    )

    def answer(request):
        assert request.path == "/health"
        return [next(answers)]

    with_session(answer, lambda session, url: wait_until_ready(session, url, 30.0))
    assert list(answers) == []


def test_a_server_is_asked_every_half_second_until_the_limit(monkeypatch):
    slept = []
    sleep = asyncio.sleep

    async def sleep_in_no_time(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    clock = SimpleNamespace(monotonic=lambda: 100.0 + sum(slept))
    monkeypatch.setattr(load_client, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", sleep_in_no_time)
    asked = []

    def answer(request):
        asked.append(request.path)
        return [error("503 Busy", "loading")]

    with pytest.raises(MinivllmError, match="waited 2 s"):
        with_session(answer, lambda session, url: wait_until_ready(session, url, 2.0))
    assert slept == [0.5] * 4 and asked == ["/health"] * 5


def test_a_server_that_is_never_ready_is_given_up():
    def wait(session, url):
        return wait_until_ready(session, url, 0.0)

    with pytest.raises(MinivllmError, match=r"\(HTTP 503\), waited 0 s: start one"):
        with_session(lambda request: [error("503 Busy", "loading")], wait)
    with pytest.raises(MinivllmError, match=r"no server is ready at .* \(TimeoutErr"):
        with_session(lambda request: [20.0], wait)  # it takes the call and is silent
    with pytest.raises(MinivllmError, match=r"\(Cannot connect to host"):
        with_session(None, lambda session, url: wait(session, "http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (error("401 No", "give a key"), r"\(HTTP 401: give a key\): .* --api-key"),
        (respond("200 OK", b'{"data": []}'), "it answered b'{\"data\": \\[\\]}'"),
        (respond("200 OK", b"<html>"), "it answered b'<html>'"),
        (respond("200 OK", b"{}"), "it answered b'{}'"),
        (respond("200 OK", b"[]"), r"it answered b'\[\]'"),
        (respond("200 OK", b"[" * 10**5), r"it answered b'\[{80}'\)"),
        (HANG_UP, r"names no model \(.*(disconnected|reset)"),
        (20.0, r"names no model \(TimeoutError\)"),
    ],
)
def test_a_server_that_names_no_model_is_refused(response, message):
    with pytest.raises(MinivllmError, match=message):
        with_session(lambda request: [response], first_model, timeout_s=2.0)


def test_the_first_model_is_taken():
    two = respond("200 OK", b'{"data": [{"id": "parrot"}, {"id": "crow"}]}')
    assert with_session(lambda request: [two], first_model) == "parrot"
    assert with_session(lambda request: [MODELS], first_model) == "parrot"
