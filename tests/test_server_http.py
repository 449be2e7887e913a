"""The server over HTTP: limits, keys, errors, cancellation, and its end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from minivllm.engine.config import EngineConfig
from minivllm.errors import ConfigError
from minivllm.server.app import create_app
from minivllm.server.handlers import EngineView, Handlers
from minivllm.server.options import ServerOptions
from minivllm.server.serve import open_port
from tests.served import WAIT_S, Served
from tests.tiny_folder import write_parrot

CHAT = {"model": "parrot", "messages": [{"role": "user", "content": "sky"}]}
FOR_EVER = {"model": "parrot", "prompt": "xyz", "temperature": 0, "max_tokens": 3000}


def config_of(folder: str) -> EngineConfig:
    return EngineConfig(model=folder, num_blocks=600, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_parrot(tmp_path_factory.mktemp("parrot")))


@pytest.fixture(scope="module")
def served(folder: str) -> Iterator[Served]:
    served = Served(config_of(folder))
    yield served
    served.close()


@pytest.fixture
def web(served: Served) -> Iterator[httpx.Client]:
    served.pause_s = 0.0
    with httpx.Client(base_url=served.url, timeout=WAIT_S) as client:
        yield client
    served.pause_s = 0.0
    served.until_idle()


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0)


def events(text: str) -> list[Any]:
    """Return what a stream says, and check its form."""
    assert text.endswith("data: [DONE]\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def raw(content: bytes) -> bytes:
    """Return a request as it goes over the wire."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content


# The official client


def test_a_chat_whole_and_streamed_is_the_same(served, client):
    whole = client.chat.completions.create(**CHAT, temperature=0)
    assert whole.choices[0].message.content == " blué!"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    pieces = list(client.chat.completions.create(**CHAT, temperature=0, stream=True))
    texts = [p.choices[0].delta.content or "" for p in pieces]
    assert "".join(texts) == " blué!"
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert all(piece.usage is None for piece in pieces)
    assert not any("\ufffd" in text for text in texts)


def test_usage_comes_in_one_last_chunk_if_asked_for(client):
    options = {"include_usage": True}
    stream = client.chat.completions.create(**CHAT, stream=True, stream_options=options)
    *pieces, last = list(stream)
    assert last.choices == [] and last.usage.completion_tokens > 0
    assert all(piece.choices and piece.usage is None for piece in pieces)
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.chat.completions.create(**CHAT, stream_options=options)


def test_completions_of_texts_ids_and_lists_of_both(client):
    create = client.completions.create
    request = {"model": "parrot", "temperature": 0, "max_tokens": 4}
    assert create(prompt="x", **request).choices[0].text == "yzxy"
    assert create(prompt=[120], **request).choices[0].text == "yzxy"
    found = create(prompt=["x", "sky:"], n=2, **request).choices
    assert [c.index for c in found] == [0, 1, 2, 3]
    assert [c.text for c in found] == ["yzxy", "yzxy", " blu", " blu"]
    pieces = list(create(prompt=["x", "sky:"], stream=True, **request))
    texts = ["", ""]
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == ["yzxy", " blu"]
    echoed = create(prompt="x", echo=True, logprobs=1, **request).choices[0]
    assert echoed.text == "xyzxy" and len(echoed.logprobs.tokens) == 5


def test_models(served, client):
    assert [model.id for model in client.models.list()] == ["parrot"]
    assert client.models.retrieve("parrot").id == "parrot"
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.models.retrieve("gpt")


def test_errors_have_the_classes_of_the_client(client):
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as error:
        create(model="gpt", messages=CHAT["messages"])
    assert error.value.code == "model_not_found"
    for wrong in (
        {"temperature": -1},
        {"max_tokens": 0},
        {"max_tokens": 10**6},
        {"logit_bias": {"999": 1}},
        {"stop": [""]},
        {"extra_body": {"temprature": 1}},
        {"messages": []},
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError):
                create(**{**CHAT, "stream": stream} | wrong)


def test_the_asynchronous_client(served):
    async def use() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-")
        async with client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    **CHAT, stream=True, temperature=0
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*(one() for _ in range(8)))

    assert asyncio.run(use()) == [" blué!"] * 8


# Who leaves


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_takes_its_request_along(served, web, stream):
    served.pause_s = 0.005
    before = served.llm.metrics.finished["abort"]

    async def use() -> None:
        reader, writer = await asyncio.open_connection(*served.address)
        content = json.dumps(FOR_EVER | {"stream": stream}).encode()
        writer.write(raw(content))
        if stream:
            await reader.readuntil(b"data:")
        await asyncio.to_thread(served.until_running, 1)
        writer.close()

    asyncio.run(use())
    served.until_idle()
    assert served.llm.metrics.finished["abort"] == before + 1


@pytest.mark.parametrize("fails_at", ["http.response.start", "http.response.body"])
def test_a_stream_that_cannot_even_begin_leaves_nothing(served, web, fails_at):
    served.pause_s = 0.005
    before = served.llm.metrics.finished["abort"]
    content = json.dumps(FOR_EVER | {"stream": True}).encode()
    scope = {
        **{"type": "http", "method": "POST", "path": "/v1/completions", "headers": []},
        **{"query_string": b"", "http_version": "1.1", "scheme": "http"},
        **{"server": ("x", 80), "client": ("y", 1), "root_path": "", "raw_path": b""},
    }

    async def use() -> None:
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            return await asyncio.Future()  # the client stays

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == fails_at:
                raise OSError("the socket is gone")

        await served.app(scope, receive, send)
        served.until_idle()

    asyncio.run(use())
    assert served.llm.metrics.finished["abort"] == before + 1


def test_a_reader_that_does_not_read_stalls_nobody(served, web):
    async def use() -> str:
        _, writer = await asyncio.open_connection(*served.address, limit=1024)
        content = json.dumps(FOR_EVER | {"stream": True, "logprobs": 5}).encode()
        writer.write(raw(content))
        await asyncio.to_thread(served.until_running, 1)
        answer = await asyncio.to_thread(
            web.post, "/v1/chat/completions", json=CHAT | {"temperature": 0}
        )
        writer.close()
        return answer.json()["choices"][0]["message"]["content"]

    assert asyncio.run(use()) == " blué!"


def test_clients_that_come_and_go_get_their_own_text_and_leave_nothing(served, web):
    import random

    choices = random.Random(7)
    served.pause_s = 0.001

    async def one(number: int, http: httpx.AsyncClient) -> None:
        for _ in range(4):
            letter = choices.choice("xyz")
            length = choices.randrange(1, 60)
            body = FOR_EVER | {"prompt": letter, "max_tokens": length, "stream": True}
            leaves_after = choices.randrange(1, 2 * length)
            expected, text = letter, ""
            following = {"x": "y", "y": "z", "z": "x"}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    piece = json.loads(line[6:])
                    text += piece["choices"][0]["text"]
                    if len(text) >= leaves_after:
                        break
            for _ in text:
                expected += following[expected[-1]]
            assert text == expected[1:]

    async def use() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=served.url, timeout=WAIT_S, limits=limits
        ) as http:
            await asyncio.gather(*(one(number, http) for number in range(24)))

    asyncio.run(use())
    served.until_idle()


# Bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"model":"parrot","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"parrot","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b'{"model":"parrot","messages":[],"temperature":NaN}',
        b'{"model":"parrot","messages":[],"seed":' + b"9" * 5000 + b"}",
        b'{"model":"parrot","messages":[{"role":"user","content":17}]}',
        b'{"model":"parrot","messages":{"role":"user"}}',
        b'{"model":7,"messages":[{"role":"user","content":"a"}]}',
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize"]
)
def test_a_malformed_body_is_refused_with_a_reason(web, path, body):
    response = web.post(path, content=body)
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    assert web.get("/health").status_code == 200


def test_what_is_not_there_is_told_in_the_same_form(web):
    for method, path, status in (
        ("GET", "/v2", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
    ):
        response = web.request(method, path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]
        assert ("Allow" in response.headers) == (status == 405)


def test_tokenize_and_back(web):
    found = web.post("/tokenize", json={"model": "parrot", "prompt": "blué"}).json()
    assert found["tokens"] == list("blué".encode()) and found["count"] == 5
    body = {"model": "parrot", "tokens": found["tokens"]}
    assert web.post("/detokenize", json=body).json() == {"prompt": "blué"}


def test_metrics_have_the_names_of_vllm(web):
    web.post("/v1/chat/completions", json=CHAT)
    text = web.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        'vllm:request_success_total{engine="0",finished_reason="stop"',
    ):
        assert name in text


def test_the_description_names_every_route_and_its_records(web):
    schema = web.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        operation = schema["paths"][path]["post"]
        place = operation["requestBody"]["content"]["application/json"]["schema"]
        assert place["$ref"].rsplit("/", 1)[1] in schema["components"]["schemas"]
        assert "422" not in operation["responses"] and "400" in operation["responses"]


def test_logs_say_nothing_of_what_users_write(served, web, caplog, capfd):
    secret = "a-secret-that-nobody-may-read"
    messages = [{"role": "user", "content": secret}]
    with caplog.at_level("DEBUG"):
        web.post("/v1/chat/completions", json=CHAT | {"messages": messages})
        web.post("/v1/chat/completions", json={"model": "parrot", secret: 1})
    out, err = capfd.readouterr()
    assert secret not in caplog.text + out + err


# Limits and keys


@asynccontextmanager
async def behind(served: Served, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Ask an application with other options, around the same engine."""
    handlers = Handlers(EngineView.of(served.llm.engine), model="parrot")
    app = create_app(served.llm, handlers, ServerOptions(**options))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        yield client


def test_a_key_opens_and_nothing_else_does(served):
    async def use() -> None:
        async with behind(served, api_keys=("one", "two")) as client:
            for header, status in (
                (None, 401),
                ("Bearer ", 401),
                ("Bearer on", 401),
                ("Bearer onee", 401),
                ("Basic one", 401),
                ("Bearer one", 200),
                ("bearer two", 200),
            ):
                headers = {} if header is None else {"Authorization": header}
                answer = await client.get("/v1/models", headers=headers)
                assert answer.status_code == status, header
                if status == 401:
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/metrics")).status_code == 401
            assert (await client.get("/nowhere")).status_code == 401

    asyncio.run(use())


def test_a_large_body_is_refused_whatever_it_says_of_its_size(served):
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async def use() -> None:
        async with behind(served, max_body_bytes=1000) as client:
            for content in (b" " * 1001, pieces()):
                answer = await client.post("/v1/completions", content=content)
                assert answer.status_code == 413
                assert "1,000 bytes" in answer.json()["error"]["message"]
            body = {"model": "parrot", "prompt": "x", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).is_success

    asyncio.run(use())


def test_pages_of_other_origins_ask_only_if_they_may(served):
    async def use(**options: Any) -> str | None:
        headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
        async with behind(served, **options) as client:
            answer = await client.options("/v1/chat/completions", headers=headers)
        return answer.headers.get("access-control-allow-origin")

    assert asyncio.run(use()) is None
    assert asyncio.run(use(cors_origins=("http://page",))) == "http://page"
    assert asyncio.run(use(cors_origins=("http://other",))) is None
    assert (
        asyncio.run(use(cors_origins=("http://page",), api_keys=("k",)))
        == "http://page"
    )


def test_pages_of_other_origins_see_the_headers_that_they_need(served):
    async def use() -> httpx.Response:
        async with behind(served, cors_origins=("http://page",)) as client:
            return await client.get("/nowhere", headers={"Origin": "http://page"})

    exposed = asyncio.run(use()).headers["access-control-expose-headers"]
    assert {"x-request-id", "retry-after"} <= set(exposed.lower().split(", "))


@pytest.mark.parametrize(
    "options",
    [
        {"max_body_bytes": 0},
        {"max_body_bytes": True},
        {"body_timeout_s": -1},
        {"keep_alive_timeout_s": float("inf")},
        {"shutdown_timeout_s": -1},
        {"shutdown_timeout_s": float("nan")},
        {"api_keys": ("",)},
        {"api_keys": ("a b",)},
        {"api_keys": ("good", "b\u00e4d")},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        ServerOptions(**options)


def test_a_full_server_says_when_to_come_again(served, web):
    served.pause_s = 0.05
    limit, served.llm.max_num_waiting = served.llm.max_num_waiting, -63  # room for one
    try:
        with web.stream(
            "POST", "/v1/completions", json=FOR_EVER | {"stream": True}
        ) as s:
            assert s.status_code == 200
            answer = httpx.post(f"{served.url}/v1/completions", json=FOR_EVER)
            assert answer.status_code == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
    finally:
        served.llm.max_num_waiting = limit


def test_when_the_engine_dies_everybody_is_told(folder):
    served = Served(config_of(folder))
    served.pause_s = 0.01
    try:
        url = f"{served.url}/v1/completions"
        body = FOR_EVER | {"stream": True}
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as response:
            lines = response.iter_lines()
            next(lines)
            served.llm.engine.listeners.append(lambda record: 1 / 0)
            text = "\n".join(lines)
        assert '"error"' in text and "[DONE]" in text
        assert httpx.get(f"{served.url}/health").status_code == 503
        answer = httpx.post(url, json=FOR_EVER)
        assert answer.status_code == 503 and int(answer.headers["Retry-After"]) >= 1
    finally:
        served.close()


# The process


def start(*arguments: str) -> tuple[subprocess.Popen, str]:
    """Start the command; return it and the address that it tells."""
    process = subprocess.Popen(
        [sys.executable, "-m", "minivllm", "serve", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"MINIVLLM_API_KEY": ""},
    )
    line = process.stderr.readline()
    assert " at http://" in line, line + process.stderr.read()
    url = line.split(" at ")[1].split("/v1")[0]
    end = time.monotonic() + WAIT_S
    while True:
        try:
            httpx.get(f"{url}/health")
            return process, url
        except httpx.TransportError:
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)


def test_a_signal_lets_running_answers_end(folder):
    names = ("--served-model-name", "parrot")
    process, url = start(folder, "--port", "0", "--backend", "numpy", *names)
    body = FOR_EVER | {"stream": True, "max_tokens": 400}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        text = "\n".join(lines)
    assert '"finish_reason":"length"' in text and "[DONE]" in text
    assert process.wait(WAIT_S) == 0


def test_a_signal_aborts_what_takes_too_long(folder):
    arguments = ("--port", "0", "--backend", "numpy", "--shutdown-timeout", "0.1")
    arguments += ("--served-model-name", "parrot")
    process, url = start(folder, *arguments)
    body = FOR_EVER | {"stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        text = "\n".join(lines)
    assert '"text":"' in text and '"finish_reason":"length"' not in text
    assert process.wait(WAIT_S) == 0


def test_a_port_in_use_is_told_before_a_model_is_loaded(tmp_path):
    with open_port("127.0.0.1", 0) as port:
        number = str(port.getsockname()[1])
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "minivllm.server",
                "no/such/model",
                "--port",
                number,
            ],
            capture_output=True,
            text=True,
        )
    assert result.returncode == 1 and number in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_server_needs_no_torch(folder):
    script = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
import httpx, asyncio
from minivllm.engine.async_engine import AsyncLLM
from minivllm.engine.config import EngineConfig
from minivllm.server.app import create_app
from minivllm.server.handlers import EngineView, Handlers

llm = AsyncLLM(EngineConfig(model={folder!r}, backend="numpy", num_blocks=64))
app = create_app(llm, Handlers(EngineView.of(llm.engine), model="parrot"))

async def use():
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.post("/v1/chat/completions", json={CHAT!r})
        print(answer.json()["choices"][0]["message"]["content"])

asyncio.run(use())
llm.close()
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert result.stdout == " blué!\n", result.stderr


def test_help_names_every_option_of_the_engine():
    result = subprocess.run(
        [sys.executable, "-m", "minivllm", "serve", "--help"],
        capture_output=True,
        text=True,
    )
    for name in EngineConfig.__dataclass_fields__:
        option = name.replace("enable_prefix_caching", "no_prefix_caching")
        assert f"--{option.replace('_', '-')}" in result.stdout, name


def test_paths_of_models_are_not_told(folder):
    assert Path(folder).is_absolute()
    process, url = start(folder, "--port", "0", "--backend", "numpy")
    try:
        [model] = httpx.get(f"{url}/v1/models").json()["data"]
        assert model["id"] == Path(folder).name
    finally:
        process.terminate()
        assert process.wait(WAIT_S) == 0
