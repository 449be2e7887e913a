"""Put an engine inside a web application of your own.

Needs a web framework and a server: pip install "minivllm[server]".

Run it with `python examples/fastapi_app.py`, then
`curl "http://127.0.0.1:8001/title?about=a+dog+that+sings"`.
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI, HTTPException, Request

from minivllm import DEFAULT_MODEL, SamplingParams
from minivllm.engine.async_engine import AsyncLLM
from minivllm.engine.config import EngineConfig
from minivllm.errors import EngineOverloaded, RequestError


@asynccontextmanager
async def engine_of(app: FastAPI, model: str) -> AsyncIterator[None]:
    """Load the model when the application starts, and close it when it ends."""
    app.state.llm = AsyncLLM(EngineConfig(model=model, max_num_seqs=8))
    yield
    await app.state.llm.shutdown(drain_s=5)


async def title(request: Request, about: str) -> dict[str, str]:
    """Find a title; if the client hangs up, the task is cancelled and so the work."""
    llm = request.app.state.llm
    messages = [{"role": "user", "content": f"Give me one title for: {about}"}]
    prompt = llm.engine.tokenizer.encode_chat(messages)
    params = SamplingParams(temperature=0.7, max_tokens=16, stop="\n")
    text = ""
    try:
        async for output in llm.generate(prompt, params):
            text = output.outputs[0].text
    except RequestError as error:
        raise HTTPException(400, str(error)) from error
    except EngineOverloaded as error:
        raise HTTPException(503, str(error)) from error
    return {"title": text.strip()}


def make_app(model: str) -> FastAPI:
    """Make the application."""
    app = FastAPI(lifespan=partial(engine_of, model=model))
    app.get("/title")(title)
    return app


def main() -> None:
    """Serve it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--port", type=int, default=8001)
    arguments = parser.parse_args()
    uvicorn.run(make_app(arguments.model), port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
