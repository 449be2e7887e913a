"""Several engines behind one address: what can be tested without Ray."""

import asyncio
import importlib.util
import json
import math
import os
import signal
from itertools import product
from typing import Any

import pytest

from minivllm.cli.main import main
from minivllm.cli.serve import fetched
from minivllm.engine.async_engine import AsyncLLM
from minivllm.engine.config import EngineConfig
from minivllm.errors import ConfigError
from minivllm.server.metrics import EngineCollector
from minivllm.server.replicas import (
    PROXY_HOOK,
    Ending,
    ProxyErrors,
    ReplicaOptions,
    joined_exposition,
    proxy_middlewares,
    shared_cpus,
    shared_gpus,
)
from tests.tiny_folder import write_parrot

JSON = [(b"content-type", b"application/json")]
PLAIN = [(b"content-type", b"text/plain; charset=utf-8")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
Messages = list[dict[str, Any]]


def start(status: int, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def through(messages: Messages, kind: str = "http") -> Messages:
    """Return what comes out of the proxy if these messages come in."""
    got: Messages = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["headers"].append((b"x-request-id", b"some-name"))  # as Ray's proxy does
        for message in messages:
            await send(message)

    async def send(message: dict[str, Any]) -> None:
        got.append(message)

    scope = {"type": kind, "headers": []}
    asyncio.run(ProxyErrors(app)(scope, None, send))
    return got


@pytest.mark.parametrize(
    "messages",
    [
        [start(200, JSON), body(b"{}")],
        [start(400, JSON), body(b'{"error": {}}')],
        [start(500, JSON), body(b'{"error": {}}')],
        [start(200, PLAIN), body(b"metrics")],
        [start(200, EVENTS), body(b"data: 1\n\n", True), body(b"", False)],
        [start(200, EVENTS), body(b"data: 1\n\n", True), body(b"data: [DONE]\n\n")],
    ],
)
def test_what_replicas_say_passes_unchanged(messages):
    assert through(messages) == messages


def test_other_protocols_pass_unchanged():
    messages = [start(500, PLAIN), body(b"no")]
    assert through(messages, "websocket") == messages


@pytest.mark.parametrize(
    ("status", "ours", "words"),
    [
        (500, 503, "has stopped"),
        (404, 503, "no replica serves this yet"),
        (503, 429, "no replica is free"),
        (408, 503, "has stopped"),
    ],
)
def test_what_the_proxy_says_itself_is_an_error_object(status, ours, words):
    got = through([start(status, PLAIN), body(b"Internal ", True), body(b"Error")])
    assert got[0]["status"] == ours
    headers = dict(got[0]["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert (b"retry-after" in headers) == (ours == 429)
    data = b"".join(message["body"] for message in got[1:])
    assert int(headers[b"content-length"]) == len(data)
    assert words in json.loads(data)["error"]["message"]


def test_silence_is_an_error_object():
    start, *rest = through([])
    assert start["status"] == 503
    error = json.loads(b"".join(message["body"] for message in rest))["error"]
    assert "has stopped" in error["message"] and error["type"] == "server_error"


def test_a_request_has_one_name():
    names = [(b"x-request-id", b"of the replica"), (b"X-Request-ID", b"of the proxy")]
    got = through([start(200, JSON + names), body(b"{}")])
    assert got[0]["headers"] == [*JSON, names[0]]
    (first, *_) = through([])
    assert dict(first["headers"])[b"x-request-id"] == b"some-name"


def test_a_stream_that_breaks_off_says_so():
    messages = [start(200, EVENTS), body(b"data: 1\n\n", True)]
    got = through(messages)
    assert got[:2] == messages
    (end,) = got[2:]
    error, done, rest = end["body"].split(b"\n\n")
    assert (
        "has stopped" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
    )
    assert (done, rest) == (b"data: [DONE]", b"")
    assert not end.get("more_body")


def test_the_name_that_ray_calls_is_right():
    (path,) = PROXY_HOOK.values()
    module, name = path.split(":")
    assert getattr(importlib.import_module(module), name) is proxy_middlewares
    assert [found.cls for found in proxy_middlewares()] == [ProxyErrors]


def test_metrics_of_all_are_one_text():
    found = []
    for name in ("a", "b"):
        llm = AsyncLLM(EngineConfig(backend="fake", num_blocks=8))
        try:
            collector = EngineCollector(llm, "model")
            collector.labels["replica"] = name
            found.append(list(collector.collect()))
        finally:
            llm.close()
    text = joined_exposition(found).decode()
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    lines = [line for line in text.splitlines() if line[:1] != "#"]
    assert len(lines) == len(set(lines)) > 0
    for name in ("a", "b"):
        label = f'{{engine="0",model_name="model",replica="{name}"}}'
        assert f"vllm:num_requests_running{label} 0.0" in lines
        assert f"vllm:prompt_tokens_total{label} 0.0" in lines
    assert sum('replica="a"' in line for line in lines) * 2 == len(lines)


@pytest.mark.parametrize(
    "options",
    [
        {"num_replicas": 0},
        {"num_replicas": True},
        {"num_replicas": 4, "max_replicas": 3},
        {"max_replicas": 2.5},
        {"routing": "prefix"},
        {"target_ongoing_requests": 0},
        {"target_ongoing_requests": math.nan},
        {"num_cpus": -1},
        {"num_gpus": math.inf},
    ],
)
def test_impossible_options_are_refused(options):
    name = list(options)[-1]
    with pytest.raises(ConfigError, match=f"{name} is .*, but must be"):
        ReplicaOptions(**options)


@pytest.mark.parametrize(
    ("options", "num_cores", "share"),
    [
        ({"num_replicas": 2}, 8, 4),
        ({"num_replicas": 3}, 8, 2),  # whole cores
        ({"num_replicas": 4}, 2, 0.5),
        ({"num_replicas": 2, "max_replicas": 4}, 8, 2),
        ({"num_replicas": 2, "num_cpus": 1}, 8, 1),
        ({"num_replicas": 2, "num_cpus": 0}, 0, 0),
    ],
)
def test_cores_are_shared_out(options, num_cores, share):
    assert shared_cpus(ReplicaOptions(**options), num_cores) == share


@pytest.mark.parametrize(
    ("options", "config", "num_gpus", "share"),
    [
        ({}, {"backend": "torch"}, 2, 1),
        ({}, {"backend": "torch"}, 0, 0),
        ({}, {"backend": "torch", "device": "cpu"}, 2, 0),
        ({}, {"backend": "numpy"}, 2, 0),
        ({"num_gpus": 0.5}, {"backend": "torch"}, 2, 0.5),
        ({"num_gpus": 0}, {"backend": "torch"}, 2, 0),
    ],
)
def test_each_replica_has_a_gpu_if_there_are_any(options, config, num_gpus, share):
    replicas, config = ReplicaOptions(**options), EngineConfig(**config)
    assert shared_gpus(replicas, config, num_gpus) == share


def test_too_few_cores_are_refused():
    replicas = ReplicaOptions(num_replicas=3, num_cpus=2)
    with pytest.raises(ConfigError, match="3 replicas with 2 cores each need 6, but"):
        shared_cpus(replicas, 4)


def test_the_first_signal_is_told_and_the_second_ends_at_once(monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        for first, second in product(before, before):
            ending = Ending()
            assert not ending.wait(0)
            signal.raise_signal(first)
            assert ending.wait(0) and codes == []
            signal.raise_signal(second)
            assert codes.pop() == 128 + second
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_folder_is_found_from_everywhere(tmp_path, monkeypatch):
    folder = write_parrot(tmp_path / "parrot")
    monkeypatch.chdir(tmp_path)
    config = fetched(EngineConfig(model="parrot"))
    assert config.model == folder
    fake = EngineConfig(backend="fake")
    assert fetched(fake) is fake


def test_the_command_line_says_what_is_missing(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "ray" else found(name, *rest),
    )
    assert main(["serve", "--backend", "fake", "--replicas", "2"]) != 0
    assert 'pip install "minivllm[ray]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replicas", "0"], "--replicas"),
        (["--replicas", "2", "--routing", "prefix"], "--routing"),
        (["--max-replicas", "3"], "--replicas"),
        (["--replicas", "2", "--trace", "trace.jsonl"], "--trace"),
    ],
)
def test_impossible_arguments_are_refused(monkeypatch, capsys, arguments, words):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: found("json" if name == "ray" else name, *rest),
    )
    with pytest.raises(SystemExit) as error:
        main(["serve", "--backend", "fake", *arguments])
    assert error.value.code == 2
    assert words in capsys.readouterr().err
