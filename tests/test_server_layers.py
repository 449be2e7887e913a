"""The layers around the routes, one by one: limits, keys, logs, streams, answers.

Each is an ASGI application around another one; here that one is a few lines long.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from minivllm.errors import EngineClosing, RequestError
from minivllm.server.answers import answer_events, check_size, merged, submit
from minivllm.server.errors import ApiError
from minivllm.server.limits import ApiKeys, BodyLimit
from minivllm.server.logs import Failures, RequestIds, traceback_of
from minivllm.server.stream import DONE, EventStream, event, unless_gone

WAIT_S = 20.0
SECRET = "words-of-somebody"
Message = dict[str, Any]
App = Callable[[Any, Any, Any], Awaitable[None]]


def run(work: Any) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(WAIT_S):
            return await work

    return asyncio.run(limited())


def scope_of(path: str = "/v1/x", method: str = "POST", **headers: str) -> Message:
    """Return a request; names of headers are written with _ for -."""
    pairs = [
        (name.replace("_", "-").encode(), value.encode())
        for name, value in headers.items()
    ]
    return {"type": "http", "method": method, "path": path, "headers": pairs}


def body(data: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


async def call(app: App, scope: Message, *messages: Message) -> list[Message]:
    """Send a request, and then nothing more; return what comes back."""
    left, sent = list(messages), []

    async def receive() -> Message:
        return left.pop(0) if left else await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def drink(scope: Message, receive: Any, send: Any) -> None:
    """Read a body to its end and tell how long it was."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % size})


def error_of(sent: list[Message]) -> tuple[int, str, dict[bytes, bytes]]:
    start, answer = sent
    code = json.loads(answer["body"])["error"]["code"]
    return start["status"], code, dict(start["headers"])


# Limits


@pytest.mark.parametrize(
    ("told", "sizes", "is_taken"),
    [
        (None, [10], True),
        (None, [4, 6], True),
        (None, [4, 6, 0], True),
        (None, [11], False),
        (None, [4, 7], False),
        (None, [6, 0, 4, 1], False),
        ("10", [10], True),
        ("1", [11], False),
        ("ten", [10], True),
    ],
)
def test_a_body_may_be_as_large_as_the_limit_and_not_a_byte_larger(
    told, sizes, is_taken
):
    scope = scope_of(**({} if told is None else {"content_length": told}))
    pieces = [body(b"x" * size, more=True) for size in sizes]
    pieces[-1]["more_body"] = False
    reading = call(BodyLimit(drink, 10, WAIT_S), scope, *pieces)
    if is_taken:
        assert run(reading)[1]["body"] == b"%d" % sum(sizes)
    else:
        with pytest.raises(ApiError, match="more than 10 bytes") as refusal:
            run(reading)
        assert refusal.value.status == 413
        assert refusal.value.code == "request_too_large"


def test_a_body_that_says_to_be_too_large_is_refused_unread():
    scope = scope_of(content_length="11")
    status, code, headers = error_of(run(call(BodyLimit(None, 10, WAIT_S), scope)))
    assert (status, code) == (413, "request_too_large")
    assert headers[b"connection"] == b"close"  # its rest may still be on the way


def test_all_pieces_of_a_body_share_one_time():
    async def drip(scope: Message, receive: Any, send: Any) -> None:
        """Let each piece come in less than the limit, and all of them in more."""

        async def slowly() -> Message:
            await asyncio.sleep(0.1)
            return body(b"x", more=True)

        await BodyLimit(drink, 10**6, 0.3)(scope, slowly, send)

    with pytest.raises(ApiError, match=r"after 0\.3 s") as refusal:
        run(call(drip, scope_of()))
    assert (refusal.value.status, refusal.value.code) == (408, "request_too_slow")


def test_the_time_of_a_body_is_no_time_for_the_answer():
    async def wait(scope: Message, receive: Any, send: Any) -> None:
        """Read all, and wait until the client hangs up, as routes do."""
        await receive()
        message = await receive()
        await send(message)

    async def use() -> list[Message]:
        sent: list[Message] = []
        messages = [body(b"x")]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.sleep(0.2)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await BodyLimit(wait, 10, 0.05)(scope_of(), receive, send)
        return sent

    assert run(use()) == [{"type": "http.disconnect"}]


@pytest.mark.parametrize("layer", ["limit", "keys", "ids", "failures"])
def test_other_protocols_pass(layer):
    async def app(scope: Message, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.complete"})

    layers = {
        "limit": BodyLimit(app, 10, 1.0),
        "keys": ApiKeys(app, ["k"]),
        "ids": RequestIds(app),
        "failures": Failures(app),
    }
    sent = run(call(layers[layer], {"type": "lifespan"}))
    assert sent == [{"type": "lifespan.startup.complete"}]


# Keys


@pytest.mark.parametrize(
    ("path", "header", "is_in"),
    [
        *((path, None, True) for path in ("/health", "/version", "/")),
        *((path, None, False) for path in ("/trace", "/metrics", "/v1/models", "")),
        *((path, None, False) for path in ("/health/", "/healthy", "//", "/version/x")),
        ("/v1/models", "Bearer one", True),
        ("/v1/models", "BEARER  two ", True),
        ("/v1/models", "Bearer onetwo", False),
        ("/v1/models", "Bearer o", False),
        ("/v1/models", "Bearer", False),
        ("/v1/models", "one", False),
        ("/v1/models", "Basic one", False),
    ],
)
def test_who_has_no_key_gets_no_further(path, header, is_in):
    reached = []

    async def app(scope: Message, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    headers = {} if header is None else {"authorization": header}
    sent = run(call(ApiKeys(app, ["one", "two"]), scope_of(path, "GET", **headers)))
    assert reached == ([path] if is_in else [])
    if not is_in:
        status, code, told = error_of(sent)
        assert (status, code) == (401, "invalid_api_key")
        assert (
            told[b"www-authenticate"] == b"Bearer" and told[b"connection"] == b"close"
        )


# Logs


async def hello(scope: Message, receive: Any, send: Any) -> None:
    headers = [(b"a", b"b")]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        *(("x" * n, n in (1, 128)) for n in (0, 1, 128, 129)),
        *((f"a{chr(c)}b", 32 <= c < 127) for c in (10, 31, 32, 126, 127)),
    ],
)
def test_a_request_has_its_name_everywhere(caplog, given, is_taken):
    scope = scope_of("/a b\n", "GET", x_request_id=given)
    with caplog.at_level("INFO"):
        start, answer = run(call(RequestIds(hello), scope))
    name = dict(start["headers"])[b"x-request-id"].decode()
    assert (name == given) == is_taken
    assert scope["state"]["request_id"] == name
    assert (b"a", b"b") in start["headers"] and answer["body"] == b"hello"
    [line] = caplog.messages
    assert line == f"- GET /a%20b%0A 201, request {name}"


def test_the_log_says_who_asked(caplog):
    with caplog.at_level("INFO"):
        run(call(RequestIds(hello), scope_of() | {"client": ("10.0.0.7", 1)}))
    assert caplog.messages[0].startswith("10.0.0.7 POST /v1/x 201")


def failing(error: Exception, has_begun: bool) -> App:
    async def app(scope: Message, receive: Any, send: Any) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    return RequestIds(Failures(app))


def test_a_mistake_of_ours_is_500_and_a_traceback_without_words(caplog):
    scope = scope_of("/a\nb", x_request_id="seven")
    start, answer = run(call(failing(KeyError(SECRET), has_begun=False), scope))
    assert start["status"] == 500
    error = json.loads(answer["body"])["error"]
    assert error["type"] == "server_error"
    assert SECRET not in caplog.text + answer["body"].decode()
    [line] = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "at POST /a%0Ab, request seven" in line
    assert line.endswith("builtins.KeyError") and "in app" in line


def test_a_mistake_within_an_answer_breaks_it_off(caplog):
    sent = run(call(failing(KeyError(SECRET), has_begun=True), scope_of()))
    assert [message["type"] for message in sent] == ["http.response.start"]
    assert "builtins.KeyError" in caplog.text


@pytest.mark.parametrize("error", [ClientDisconnect(), OSError("the socket is gone")])
def test_a_client_that_is_gone_is_no_mistake(caplog, error):
    async def use() -> None:
        async def send(message: Message) -> None:
            raise error

        await Failures(hello)(scope_of(), None, send)

    run(use())
    assert not caplog.records


def test_a_full_disk_is_no_client_that_is_gone(caplog):
    start, _ = run(call(failing(OSError("disk"), has_begun=False), scope_of()))
    assert start["status"] == 500 and "builtins.OSError" in caplog.text


def test_a_mistake_in_another_protocol_is_not_ours_to_tell():
    with pytest.raises(KeyError):
        run(call(failing(KeyError("x"), has_begun=False), {"type": "lifespan"}))


@pytest.mark.parametrize(
    ("how", "is_told"), [("from", True), ("during", True), ("from None", False)]
)
def test_a_traceback_tells_what_came_before(how, is_told):
    try:
        try:
            {}[SECRET]
        except KeyError as error:
            if how == "from":
                raise RuntimeError(SECRET) from error
            if how == "during":
                raise RuntimeError(SECRET)  # noqa: B904
            raise RuntimeError(SECRET) from None
    except RuntimeError as error:
        text = traceback_of(error)
    assert ("builtins.KeyError\nand then\n" in text) == is_told
    assert text.endswith("builtins.RuntimeError") and SECRET + "'" not in text


# Streams


def test_an_event_is_one_short_line_in_utf8():
    data = event({"a": "é\n", "b": [1, 2]})
    assert data == 'data: {"a":"é\\n","b":[1,2]}\n\n'.encode()


async def pieces(*data: bytes, closed: list[str]) -> AsyncIterator[bytes]:
    try:
        for piece in data:
            yield piece
    finally:
        closed.append("events")


def test_a_stream_comes_as_it_is_made_and_nobody_keeps_it():
    ended: list[str] = []
    events = pieces(b"1", b"2", closed=ended)
    response = EventStream(events, lambda: ended.append("end"))
    start, *rest = run(call(response, scope_of()))
    headers = dict(start["headers"])
    assert start["status"] == 200
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert b"content-length" not in headers
    assert [(m["body"], m["more_body"]) for m in rest] == [
        *((b"1", True), (b"2", True), (b"", False)),
    ]
    assert ended == ["events", "end"]


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_stream_whose_client_is_gone_is_closed_before_it_ends(fails_at):
    ended: list[str] = []
    num_sent = 0

    async def send(message: Message) -> None:
        nonlocal num_sent
        if num_sent == fails_at:
            raise OSError("gone")
        num_sent += 1

    async def use() -> None:
        events = pieces(b"1", b"2", closed=ended)
        response = EventStream(events, lambda: ended.append("end"))
        with pytest.raises(OSError, match="gone"):
            await response(scope_of(), asyncio.Future, send)

    run(use())
    # A generator that has not begun has nothing to close.
    assert ended == (["events", "end"] if fails_at else ["end"])


def test_work_is_cancelled_and_awaited_when_the_client_hangs_up():
    said: list[str] = []

    async def use() -> Any:
        begun = asyncio.Event()

        async def work() -> None:
            begun.set()
            try:
                await asyncio.Future()
            finally:
                await asyncio.sleep(0)
                said.append("cleaned up")

        async def receive() -> Message:
            await begun.wait()
            said.append("asked")
            is_first = said == ["asked"]
            return {"type": "http.request" if is_first else "http.disconnect"}

        return await unless_gone(work(), receive)

    assert run(use()) is None
    assert said == ["asked", "asked", "cleaned up"]


def test_work_that_is_done_leaves_nobody_who_listens():
    async def use() -> None:
        async def work() -> int:
            return 7

        async def fail() -> int:
            raise KeyError("x")

        assert await unless_gone(work(), asyncio.Future) == 7
        with pytest.raises(KeyError):
            await unless_gone(fail(), asyncio.Future)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(use())


# Answers


class Answer:
    """The outputs of one request, made by hand."""

    def __init__(self, *outputs: Any, turns: int = 1) -> None:
        self.outputs = list(outputs)
        self.num_cancelled = 0
        self.turns = turns  # of the event loop, until an output is there

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> Any:
        if not self.outputs:
            raise StopAsyncIteration
        output = self.outputs.pop(0)
        if output is None:  # nothing comes
            try:
                await asyncio.Future()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        for _ in range(self.turns):
            await asyncio.sleep(0)
        if isinstance(output, Exception):
            raise output
        return output


def out(name: str, finished: bool = False) -> Any:
    return SimpleNamespace(name=name, finished=finished)


class Engine:
    """Takes requests until it refuses one."""

    num_places = 4

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.requests: list[tuple[Any, Any, Message]] = []
        self.closed: list[Any] = []

    async def add_request(self, prompt: Any, params: Any, **options: Any) -> str:
        if prompt == "last" and self.error is not None:
            raise self.error
        self.requests.append((prompt, params, options))
        return f"stream of {prompt}"

    def close_stream(self, stream: Any) -> None:
        self.closed.append(stream)


def job_of(*prompts: str, n: int = 1, **fields: Any) -> Any:
    return SimpleNamespace(
        prompts=prompts,
        sampling_params=[SimpleNamespace(n=n)] * len(prompts),
        names={"max_tokens": "max_completion_tokens"},
        **{"stream": True, "default_max_tokens": 16, "priority": 3, "cache_salt": "s"},
        **fields,
    )


def test_what_a_body_asks_for_reaches_the_engine():
    engine, job = Engine(), job_of("a", "b")
    assert run(submit(engine, job)) == ["stream of a", "stream of b"]
    options = {"priority": 3, "cache_salt": "s", "default_max_tokens": 16}
    for prompt, request in zip("ab", engine.requests, strict=True):
        params = job.sampling_params[0]
        assert request == (prompt, params, options | {"only_final": False})
    assert engine.closed == []
    job.stream = False
    run(submit(engine, job))
    assert engine.requests[-1][2]["only_final"]


def test_more_than_fit_are_refused_and_as_many_are_not():
    check_size(Engine(), job_of("a", "b", n=2))
    for job in (job_of("a", n=5), job_of(*"abcde"), job_of("a", "b", "c", n=2)):
        with pytest.raises(RequestError, match="no more than 4 requests"):
            run(submit(Engine(), job))


@pytest.mark.parametrize(
    "error", [EngineClosing("closing"), asyncio.CancelledError(), KeyError("x")]
)
def test_all_requests_of_a_job_or_none(error):
    engine = Engine(error)
    with pytest.raises(type(error)):
        run(submit(engine, job_of("a", "b", "last")))
    assert engine.closed == ["stream of a", "stream of b"]


def test_a_refusal_is_in_the_words_of_the_body():
    engine = Engine(RequestError("max_tokens is 9, but must be less"))
    with pytest.raises(ApiError, match="max_completion_tokens is 9") as refusal:
        run(submit(engine, job_of("a", "last")))
    assert refusal.value.param == "max_completion_tokens"
    assert engine.closed == ["stream of a"]


def test_answers_come_with_their_numbers_and_who_leaves_leaves_nobody_behind():
    async def use() -> None:
        for count in (1, 2, 3):
            answers = [Answer(out(f"{i}a"), out(f"{i}b", True)) for i in range(count)]
            found = [(i, o.name) async for i, o in merged(answers)]
            assert sorted(found) == [(i, f"{i}{c}") for i in range(count) for c in "ab"]
        waits = Answer(None)
        coming = merged([Answer(out("a", True)), waits])
        assert (await anext(coming))[0] == 0
        await coming.aclose()
        await asyncio.sleep(0)
        assert waits.num_cancelled == 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(use())


class Writer:
    """Writes what it is told."""

    def start(self) -> list[Message]:
        return [{"start": 1}]

    def add(self, index: int, output: Any) -> list[Message]:
        return [{"add": [index, output.name]}] if output.name else []

    def finish(self, outputs: list[Any]) -> list[Message]:
        return [{"finish": [output.name for output in outputs]}]


def events_of(*answers: Answer) -> list[bytes]:
    async def use() -> list[bytes]:
        job = SimpleNamespace(writer=Writer)
        return [data async for data in answer_events(job, list(answers))]

    return run(use())


def test_events_are_a_start_pieces_and_an_end_in_the_order_of_the_prompts():
    slow = Answer(out("0a"), out(""), out(""), out("0b", True))
    got = events_of(slow, Answer(out("1", True)))
    assert got[0] == event({"start": 1})
    assert sorted(got[1:-1]) == [
        event({"add": [0, "0a"]}),
        event({"add": [0, "0b"]}),
        event({"add": [1, "1"]}),
    ]
    assert got[-1] == event({"finish": ["0b", "1"]}) + DONE


def test_the_end_is_in_the_order_of_the_prompts_whoever_comes_first():
    late = Answer(out("0", True), turns=20)
    got = events_of(late, Answer(out("1", True)))
    assert got[1:-1] == [event({"add": [1, "1"]}), event({"add": [0, "0"]})]
    assert got[-1] == event({"finish": ["0", "1"]}) + DONE


def test_an_error_in_a_stream_is_its_last_event():
    *_, end = events_of(Answer(out("a"), EngineClosing("it closes")))
    error, done, rest = end.split(b"\n\n")
    assert "it closes" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
    assert done + b"\n\n" == DONE and rest == b""


def test_a_mistake_of_ours_in_a_stream_is_told_and_goes_to_the_log():
    async def use() -> list[bytes]:
        got: list[bytes] = []
        job = SimpleNamespace(writer=Writer)
        with pytest.raises(KeyError):
            async for data in answer_events(job, [Answer(KeyError(SECRET))]):
                got.append(data)
        return got

    _, end = run(use())
    assert b"server_error" in end and end.endswith(DONE)
    assert SECRET.encode() not in end
