"""A real process: its options, its log, its signals, and its death."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server_process import (
    PLANTED,
    WAIT_S,
    ServerProcess,
    serve_parrot,
)
from tests.tiny_folder import write_parrot

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it has no SIGTERM")

FOR_EVER = {"model": "parrot", "prompt": "xyz", "temperature": 0, "max_tokens": 3000}
SECRET = "words-that-nobody-may-read"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_parrot(tmp_path_factory.mktemp("parrot")))


def command(folder: str, *arguments: str) -> ServerProcess:
    """Start the real command."""
    names = ("--served-model-name", "parrot", "--port", "0", "--backend", "numpy")
    return ServerProcess("minivllm", "serve", folder, *names, *arguments)


class Stream:
    """An answer that comes, and what came of it so far."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.text, self.reason, self.error = "", None, None
        self.is_done = False

    async def begin(self) -> None:
        """Read until there is some text."""
        while not self.text:
            self._take(await anext(self._lines))

    async def finish(self) -> None:
        async for line in self._lines:
            self._take(line)

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_done = True
        elif line:
            data = json.loads(line.removeprefix("data: "))
            self.error = data.get("error", self.error)
            for choice in data.get("choices", ()):
                self.text += choice["text"]
                self.reason = choice["finish_reason"]


@asynccontextmanager
async def streams(
    http: httpx.AsyncClient, count: int, **wishes: Any
) -> AsyncIterator[list[Stream]]:
    """Begin some answers, and wait until all of them write."""
    body = FOR_EVER | {"stream": True} | wishes
    requests = [
        http.build_request("POST", "/v1/completions", json=body) for _ in range(count)
    ]
    responses = await asyncio.gather(*(http.send(r, stream=True) for r in requests))
    begun = [Stream(response) for response in responses]
    await asyncio.gather(*(stream.begin() for stream in begun))
    yield begun
    for response in responses:
        await response.aclose()


def client_of(server: ServerProcess) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, limits=limits)


def run(use: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WAIT_S):
            await use

    asyncio.run(limited())


def test_who_is_inside_finishes_and_who_comes_later_is_sent_away(folder):
    async def use(server: ServerProcess) -> None:
        async with client_of(server) as http, streams(http, 8, max_tokens=300) as all_:
            server.tell(signal.SIGTERM)
            await asyncio.to_thread(server.until, "told to end")
            for body in (FOR_EVER, FOR_EVER | {"stream": True}):
                refused = await http.post("/v1/completions", json=body)
                assert refused.status_code == 503
                assert int(refused.headers["Retry-After"]) >= 1
                assert refused.headers["Connection"] == "close"
                assert "closing" in refused.json()["error"]["message"]
            await asyncio.gather(*(stream.finish() for stream in all_))
            for stream in all_:
                assert stream.text == "xyz" * 100 and stream.is_done
                assert stream.reason == "length" and not stream.error

    with serve_parrot(folder, "--pause", "0.005") as server:
        run(use(server))
        assert server.wait() == 0
        assert "Traceback" not in server.log


def test_what_takes_too_long_is_ended_properly(folder):
    async def use(server: ServerProcess) -> None:
        async with client_of(server) as http, streams(http, 4) as all_:
            whole = asyncio.create_task(http.post("/v1/completions", json=FOR_EVER))
            await asyncio.to_thread(server.tell)
            await asyncio.gather(*(stream.finish() for stream in all_))
            for stream in all_:
                assert stream.is_done
                assert stream.reason == "abort" or stream.error
            # It may have come too late, but even so it is answered.
            assert (await whole).status_code in (200, 503)

    with serve_parrot(folder, "--pause", "0.01", "--drain", "0.2") as server:
        run(use(server))
        assert server.wait() == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(folder, second):
    async def use(server: ServerProcess) -> None:
        async with client_of(server) as http, streams(http, 2) as all_:
            server.tell(signal.SIGTERM)
            await asyncio.to_thread(server.until, "told to end")
            server.tell(second)
            for stream in all_:
                await stream.finish()
                assert stream.is_done and stream.reason == "abort"

    # Each of its two answers takes a minute, and may take an hour.
    with serve_parrot(folder, "--pause", "0.02", "--drain", "3600") as server:
        run(use(server))
        assert server.wait() == 0


def test_an_idle_server_ends_by_control_c_without_a_word_too_many(folder):
    with command(folder) as server:
        assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 200
        server.tell(signal.SIGINT)
        assert server.wait() == 0
        assert "Traceback" not in server.log and "KeyboardInterrupt" not in server.log


def test_an_engine_that_dies_tells_everybody_and_takes_the_process_along(folder):
    async def use(server: ServerProcess) -> None:
        async with client_of(server) as http, streams(http, 6) as all_:
            wholes = [
                asyncio.create_task(http.post("/v1/completions", json=body))
                for body in (FOR_EVER, FOR_EVER, FOR_EVER | {"prompt": "~"})
            ]
            await asyncio.gather(*(stream.finish() for stream in all_))
            for stream in all_:
                assert stream.is_done and stream.error["type"] == "server_error"
                assert "Fault" in stream.error["message"]
                assert PLANTED not in stream.error["message"]
            for answer in await asyncio.gather(*wholes):
                assert answer.status_code == 503
                assert "died" in answer.json()["error"]["message"]
                assert PLANTED not in answer.text

    with serve_parrot(folder, "--pause", "0.01") as server:
        run(use(server))
        assert server.wait() == 1
        assert "the engine died" in server.log and PLANTED in server.log


def test_a_step_that_fails_takes_its_requests_along_and_nobody_else(folder):
    with serve_parrot(folder) as server:
        body = FOR_EVER | {"max_tokens": 6}
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
            failed = http.post("/v1/completions", json=body | {"prompt": "!"})
            assert failed.status_code == 500
            assert failed.json()["error"]["type"] == "server_error"
            stream = body | {"prompt": "!", "stream": True}
            text = http.post("/v1/completions", json=stream).text
            assert '"server_error"' in text and text.endswith("data: [DONE]\n\n")
            answer = http.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["text"] == "xyzxyz"
        server.tell()
        assert server.wait() == 0


def ask(server: ServerProcess) -> None:
    """Send a secret, in every way."""
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
        for stream in (False, True):
            body = {"prompt": SECRET + ":", "temperature": 0, "stream": stream}
            found = http.post(f"/v1/completions?key={SECRET}", json=body)
            assert found.status_code == 200
        assert http.post("/v1/completions", json={SECRET: SECRET}).status_code == 400
        assert http.post("/v1/completions", content=SECRET).status_code == 400
        assert http.post("/tokenize", json={"prompt": SECRET}).status_code == 200
        named = http.get("/v1/models", headers={"X-Request-Id": "mine 7"})
        assert named.headers["X-Request-Id"] == "mine 7"


def test_the_log_has_a_line_for_each_request_and_nothing_of_their_words(folder):
    with command(folder, "--log-level", "debug") as server:
        ask(server)
        server.tell()
        assert server.wait() == 0
        assert "GET /v1/models 200, request mine 7" in server.log
        assert server.log.count("POST /v1/completions 400") == 2
        assert SECRET not in server.log and "blué" not in server.log


def test_the_log_shows_prompts_and_answers_if_it_is_told_to(folder):
    with command(folder, "--log-prompts") as server:
        ask(server)
        server.tell()
        assert server.wait() == 0
        assert server.log.count(f"asks {SECRET + ':'!r}") == 2
        assert server.log.count("is answered ' blué!'") == 2
        assert f"key={SECRET}" not in server.log


def test_options_of_chats_and_connections_reach_the_server(folder, tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}?:")
    options = ("--chat-template", str(template), "--no-reasoning")
    options += ("--body-timeout", "0.3", "--keep-alive-timeout", "0.3")

    async def use(server: ServerProcess) -> None:
        async with client_of(server) as http:
            messages = [{"role": "user", "content": "sky"}]
            found = await http.post("/tokenize", json={"messages": messages})
            assert found.json()["tokens"] == list(b"sky?:")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.read()  # until it is closed
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        )
        answer = await reader.read()
        assert b" 408 " in answer and b"request_too_slow" in answer
        writer.close()

    with command(folder, *options) as server:
        run(use(server))
        server.tell()
        assert server.wait() == 0


@pytest.mark.parametrize(
    "content, words", [(None, "cannot be read"), (b"{% for", "Jinja"), (b"\xff", "UTF")]
)
def test_a_wrong_chat_template_is_told_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture, content, words
):
    from minivllm.cli.main import main

    path = tmp_path / "t.jinja"
    if content is not None:
        path.write_bytes(content)
    assert main(["serve", "no/such/model", "--chat-template", str(path)]) == 1
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1
