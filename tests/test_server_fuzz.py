"""What nobody would write: bodies drawn from our own description, and worse ones."""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from minivllm.engine.async_engine import AsyncLLM
from minivllm.engine.engine import LLMEngine
from minivllm.runners.fake_runner import FakeRunner
from minivllm.server.app import create_app
from minivllm.server.description import PLAIN, RECORDS
from minivllm.server.handlers import EngineView, Handlers
from minivllm.text.tokenizer import Tokenizer
from tests.engine_tools import assert_all_free
from tests.server_process import WAIT_S, ServerProcess, serve_parrot
from tests.tiny_folder import BYTE_VOCAB_SIZE, write_parrot

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """An application whose model only pretends, so a thousand answers are quick."""
    runner = FakeRunner(vocab_size=BYTE_VOCAB_SIZE, max_model_len=64)
    engine = LLMEngine(runner)
    engine.tokenizer = Tokenizer.from_dir(write_parrot(tmp_path_factory.mktemp("m")))
    llm = AsyncLLM(engine)
    yield create_app(llm, Handlers(EngineView.of(engine), model="parrot"))
    assert llm.num_open == 0 and llm.error is None
    llm.close()
    assert_all_free(engine)


def check_operation(
    app: FastAPI, path: str, mode: GenerationMode, **wishes: Any
) -> None:
    """Draw requests for a path, right ones or wrong ones, and check each."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    [operation] = schema[path].values()
    strategy = operation.as_strategy(generation_mode=mode)

    def known(case: schemathesis.Case) -> schemathesis.Case:
        """Let a right request get further than to the model's name."""
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body["model"] = "parrot"
        return case

    @given(case=strategy.map(known))
    @settings(
        deadline=None, database=None, suppress_health_check=[*HealthCheck], **wishes
    )
    def each(case: schemathesis.Case) -> None:
        check(case, app)

    each()


BODIES = [path for path, (taken, _) in RECORDS.items() if taken]
OPERATIONS = [(path, GenerationMode.POSITIVE) for path in (*RECORDS, *PLAIN)]
OPERATIONS += [(path, GenerationMode.NEGATIVE) for path in BODIES]


@pytest.mark.parametrize("path, mode", OPERATIONS)
def test_the_server_does_what_its_description_says(app, path, mode):
    check_operation(app, path, mode, max_examples=25, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("path, mode", OPERATIONS)
def test_the_server_does_what_its_description_says_many_times(app, path, mode):
    check_operation(app, path, mode, max_examples=2000)


def is_right(case: schemathesis.Case, app: FastAPI) -> bool:
    """Tell whether a body that should be wrong is right after all.

    Where one of several kinds of messages is spoilt, it may have become another kind.
    """
    taken, _ = RECORDS.get(case.path, (None, None))
    if taken is None or isinstance(case.body, bytes):
        return False
    schemas = app.openapi()["components"]
    place = f"#/components/schemas/{taken.__name__}"
    schema = {"$ref": place, "components": schemas}
    return jsonschema.Draft202012Validator(schema).is_valid(case.body)


def check(case: schemathesis.Case, app: FastAPI) -> None:
    """Send a request, and compare what comes back with the description."""
    checks = [
        check
        for check in CHECKS
        if check is not negative_data_rejection or not is_right(case, app)
    ]
    response = case.call_and_validate(checks=checks)
    if response.status_code >= 400:
        error = json.loads(response.content)["error"]
        assert error["message"] and error["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]


# Bytes over real sockets


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_parrot(tmp_path_factory.mktemp("parrot"))
    with serve_parrot(str(folder)) as server:
        yield server
        server.tell()
        assert server.wait() == 0
        assert "Traceback" not in server.log, server.log


def talk(server: ServerProcess, *pieces: bytes, ends: bool = False) -> bytes:
    """Send bytes as they are; return all that comes back until it is closed."""
    data = b""
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as connection:
        with suppress(OSError):  # it may hang up before it has read all
            for piece in pieces:
                connection.sendall(piece)
            if ends:
                connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while new := connection.recv(65536):
                data += new
    assert httpx.get(f"{server.url}/health", timeout=WAIT_S).status_code == 200
    return data


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", *lines, "\r\n"]
    ).encode()


def error_of(data: bytes, *statuses: int) -> dict[str, Any]:
    """Check that a response is an error in OpenAI's form, and return it."""
    start, _, content = data.partition(b"\r\n\r\n")
    status = int(start.split()[1])
    assert status in statuses, data
    error = json.loads(content)["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    return error


OPENING = b'{"model":"parrot","prompt":"x","messages":[{"role":"user","content":"x"}],'
WORSE = {
    "empty": b"",
    "blank": b" \n\t",
    "infinite": OPENING + b'"temperature":Infinity}',
    "too large for a float": OPENING + b'"temperature":1e999}',
    "an integer too large for a float": OPENING
    + b'"temperature":1'
    + b"0" * 400
    + b"}",
    "an integer too large for 64 bits": OPENING + b'"seed":1' + b"0" * 400 + b"}",
    "a token too large for 64 bits": OPENING + b'"prompt":[1' + b"0" * 400 + b"]}",
    "a name twice": OPENING + b'"n":1,"n":1}',
    "a name twice, further in": OPENING + b'"metadata":{"a":"1","a":"2"}}',
    "half of a character": OPENING + b'"user":"\xc3"}',
    "an overlong character": OPENING + b'"user":"\xc0\x80"}',
    "a lone surrogate": OPENING + b'"user":"\\udfff"}',
    "a zero byte": OPENING + b'"user":"\0"}',
    "UTF-16": (OPENING + b'"n":1}').decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + OPENING + b'"n":1}',
    "something behind it": OPENING + b'"n":1}{}',
    "many brackets": OPENING + b'"metadata":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "many braces in a schema": OPENING
    + b'"guided_json":'
    + b'{"a":' * 20_000
    + b"1"
    + b"}" * 20_001,
    "a wrong type in every field": b'{"model":[],"prompt":{},"messages":1,"n":"1"}',
}


@pytest.mark.parametrize("name", WORSE)
def test_a_body_that_nobody_should_send_is_refused(server, name):
    body = WORSE[name]
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        data = talk(server, head(path, f"Content-Length: {len(body)}"), body)
        error_of(data, 400)


@pytest.mark.parametrize("size", [4 * 2**20 + 1, 10**18])
def test_a_body_that_says_to_be_too_large_is_not_waited_for(server, size):
    data = talk(server, head("/v1/completions", f"Content-Length: {size}"))
    assert error_of(data, 413)["code"] == "request_too_large"
    assert b"connection: close" in data.lower()


def test_a_body_in_chunks_is_not_read_beyond_the_limit(server):
    chunk = b"%x\r\n" % 2**16 + b" " * 2**16 + b"\r\n"
    start = head("/v1/completions", "Transfer-Encoding: chunked")
    start = start.replace(b"Connection: close\r\n", b"")
    # Its end never comes.
    data = talk(server, start, *[chunk] * 65)
    assert error_of(data, 413)["code"] == "request_too_large"
    assert b"connection: close" in data.lower()


@pytest.mark.parametrize(
    "request_bytes",
    [
        head("/v1/completions", "Content-Length: 100") + b'{"prompt"',
        head("/v1/completions", "Transfer-Encoding: chunked") + b"5\r\n{",
        head("/v1/completions", "Transfer-Encoding: chunked"),
    ],
)
def test_who_hangs_up_within_a_body_leaves_no_trace(server, request_bytes):
    assert talk(server, request_bytes, ends=True) == b""


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\nwhat?\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        head("/v1/completions", "Content-Length: -5") + b"{}",
        head("/v1/completions", "Content-Length: two") + b"{}",
        head("/v1/completions", "Content-Length: 2", "Content-Length: 3") + b"{}",
        head("/v1/completions", "Transfer-Encoding: chunked") + b"zz\r\n{}",
        head("/v1/completions", "X: " + "x" * 200_000),
        b"GET /%ff%00%0a HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_too(server, request_bytes):
    data = talk(server, request_bytes, ends=True)
    assert data.startswith(b"HTTP/1.1 400 ")


def test_a_body_longer_than_it_says_is_cut_where_it_says(server):
    body = b'{"model":"parrot","prompt":"x","max_tokens":3}'
    data = talk(
        server, head("/v1/completions", f"Content-Length: {len(body)}"), body * 2
    )
    assert data.startswith(b"HTTP/1.1 200 ") and data.count(b"HTTP/1.1") == 1
    data = talk(server, head("/v1/completions", "Content-Length: 20"), body)
    error_of(data, 400)


def test_a_name_of_a_request_is_taken_only_if_it_is_harmless(server):
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
        for name, is_taken in {
            "abc-123": True,
            "it may have blanks": True,
            "x" * 128: True,
            "x" * 129: False,
            "": False,
            "é": False,
            "a\tb": False,
        }.items():
            for path in ("/health", "/nowhere"):
                headers = {"X-Request-Id": name.encode()}
                told = http.get(path, headers=headers).headers["X-Request-Id"]
                assert (told == name) == is_taken
                assert 0 < len(told) <= 128 and told.isascii()
        names = {http.get("/health").headers["X-Request-Id"] for _ in range(5)}
        assert len(names) == 5
