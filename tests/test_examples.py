"""Every example runs, with a tiny model, and shows what it promises."""

import asyncio
import runpy
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from minivllm.engine.async_engine import AsyncLLM
from minivllm.engine.config import EngineConfig
from minivllm.server.app import create_app
from minivllm.server.handlers import EngineView, Handlers
from tests.qwen3_template import QWEN3
from tests.tiny_folder import write_parrot

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_parrot(tmp_path_factory.mktemp("parrot")))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example as a program; return what it prints."""

    def run(name: str, *arguments: str) -> str:
        path = EXAMPLES / name
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_all_examples_are_listed_and_tried():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    readme = (EXAMPLES / "README.md").read_text()
    here = Path(__file__).read_text()
    for name in names:
        assert f"[{name}]({name})" in readme
        assert f'"{name}"' in here


def test_offline(run, parrot):
    printed = run("offline.py", "--model", parrot)
    assert printed.count("->") == 5 and "blué!" in printed


def test_streaming(run, parrot):
    printed = run("streaming.py", "--model", parrot, "--max-tokens", "8", "sky:")
    assert printed.startswith("sky: blué!\n")
    assert [line[:2] for line in printed.splitlines()[-3:]] == ["0:", "1:", "2:"]


def test_structured_output(run, parrot):
    first, second = run("structured_output.py", "--model", parrot).splitlines()
    assert first == second and "inhabitants" in first


def test_tool_call(run, tmp_path):
    folder = write_parrot(tmp_path, chat_template=QWEN3)
    printed = run("tool_call.py", "--model", str(folder))
    assert printed.startswith("temperature_in({'city': ") and "21}" in printed


def test_fastapi_app(parrot):
    module = runpy.run_path(str(EXAMPLES / "fastapi_app.py"))
    app: FastAPI = module["make_app"](parrot)

    async def use() -> None:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://test"
            ) as client:
                answer = await client.get("/title", params={"about": "the sky"})
                assert answer.json() == {"title": "blué!"}
                answer = await client.get("/title", params={"about": "x" * 9000})
                assert answer.status_code == 400

    asyncio.run(use())


def test_openai_client(run, parrot):
    llm = AsyncLLM(EngineConfig(model=parrot, num_blocks=64))
    app = create_app(llm, Handlers(EngineView.of(llm.engine), model="parrot"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        url = f"http://127.0.0.1:{port}/v1"
        whole, count, streamed = run("openai_client.py", "--base-url", url).splitlines()
    finally:
        server.should_exit = True
        thread.join()
        llm.close()
    assert whole == streamed == " blué!"
    assert count == "(8 tokens by parrot)"
