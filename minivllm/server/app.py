"""The web application: OpenAI's interface to one engine.

Invariant: every error is an error object in OpenAI's form, with the right status, as
long as the response has not begun. Called by `minivllm serve`, or by any ASGI server.

In vLLM: vllm/entrypoints/launchers/app.py (build_app).
Source: chapter 9, "Serving"; appendix A32, "A server that stays up"; appendix A33, "A
    page to look inside".
"""

import asyncio
from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response

from minivllm import __version__
from minivllm.engine.async_engine import AsyncLLM
from minivllm.errors import EngineClosing, EngineOverloaded, MinivllmError
from minivllm.server.answers import (
    answer_events,
    close_all,
    submit,
    whole_answer,
)
from minivllm.server.description import add_records
from minivllm.server.errors import ApiError, error_of
from minivllm.server.handlers import Handlers
from minivllm.server.jobs import Job
from minivllm.server.limits import ApiKeys, BodyLimit
from minivllm.server.live import LiveView
from minivllm.server.logs import Failures, RequestIds, logged
from minivllm.server.metrics import exposition
from minivllm.server.options import ServerOptions
from minivllm.server.page import HEADERS, page
from minivllm.server.stream import EventStream, unless_gone

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    return await answer(request, request.app.state.handlers.parse_chat)


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue one or several texts."""
    return await answer(request, request.app.state.handlers.parse_completion)


RETRY_AFTER_S = 5  # by then, whoever watches the server has noticed


async def answer(request: Request, parse: Callable[[bytes], Job]) -> Response:
    """Read a request, run what it asks for, and answer in one piece or in many."""
    llm, options = request.app.state.llm, request.app.state.options
    body = await request.body()
    job = await asyncio.to_thread(parse, body)  # tokenises, which may take long
    if options.log_prompts:
        job = logged(job, request.state.request_id)
    if job.stream:
        # Whatever can be refused is refused now, before the status is sent.
        streams = await submit(llm, job)
        events = answer_events(job, streams)
        return EventStream(events, partial(close_all, llm, streams))
    content = await unless_gone(whole_answer(llm, job), request.receive)
    return JSONResponse(content)  # to nobody, if the client is gone


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the names that the model answers to."""
    return JSONResponse(request.app.state.handlers.list_models())


@router.get("/health")
async def health(request: Request) -> Response:
    """Say whether the engine works: 200, or 503."""
    request.app.state.llm.check_health()
    return Response()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Show the counters of the engine, in the format of Prometheus."""
    state = request.app.state
    content, content_type = exposition(state.llm, state.handlers.model)
    return Response(content, media_type=content_type)


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Turn a text or a chat into tokens."""
    handlers = request.app.state.handlers
    body = await request.body()
    return JSONResponse(await asyncio.to_thread(handlers.tokenize, body))


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Turn tokens into text."""
    handlers = request.app.state.handlers
    body = await request.body()
    return JSONResponse(await asyncio.to_thread(handlers.detokenize, body))


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> Response:
    """Describe the model, by one of its names."""
    return JSONResponse(request.app.state.handlers.show_model(name))


@router.get("/version")
async def version() -> Response:
    """Tell which minivllm answers."""
    return JSONResponse({"version": __version__})


async def report_error(request: Request, error: Exception) -> Response:
    """Turn an error into a response in OpenAI's form."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):  # of the framework: no such path or method
        path = request.url.path
        message = f"{request.method} {path} is not here (status {error.status_code})"
        api_error = ApiError(f"{message}: see /openapi.json", status=error.status_code)
        headers |= error.headers or {}
    else:
        api_error = error_of(error)
        if isinstance(error, EngineOverloaded):
            headers["Retry-After"] = str(error.retry_after_s)
        if api_error.status == 503:
            headers["Retry-After"] = str(RETRY_AFTER_S)
        if api_error.status in (408, 413) or isinstance(error, EngineClosing):
            headers["Connection"] = "close"  # what is left of the body stays unread
    return JSONResponse(api_error.body(), status_code=api_error.status, headers=headers)


def create_app(
    llm: AsyncLLM, handlers: Handlers, options: ServerOptions | None = None
) -> FastAPI:
    """Make the application.

    Args:
        llm: The engine; whoever made it closes it.
        handlers: They know the model's name and its tokenizer.
        options: Limits and keys; by default no keys.
    """
    options = options or ServerOptions()
    # The pages /docs and /redoc would fetch scripts from elsewhere.
    app = FastAPI(title="minivllm", version=__version__, docs_url=None, redoc_url=None)
    app.state.llm = llm
    app.state.handlers = handlers
    app.state.options = options
    for kind in (MinivllmError, HTTPException):
        app.add_exception_handler(kind, report_error)
    app.include_router(router)
    # The last one added is the first to see a request.
    app.add_middleware(
        BodyLimit, max_bytes=options.max_body_bytes, timeout_s=options.body_timeout_s
    )
    if options.api_keys:
        app.add_middleware(ApiKeys, keys=options.api_keys)
    app.add_middleware(Failures)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestIds)
    describe = app.openapi
    app.openapi = lambda: app.openapi_schema or add_records(describe())
    return app


@router.get("/", include_in_schema=False)
async def show_page(request: Request) -> Response:
    """Show the page to look inside."""
    check_has_page(request.app)
    return HTMLResponse(page(), headers=HEADERS)


@router.get(
    "/trace",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def show_steps(request: Request) -> Response:
    """Tell what the engine does, step by step, until the client goes."""
    check_has_page(request.app)
    live = live_view(request.app)
    watcher = live.watch()
    return EventStream(live.events(watcher), partial(live.leave, watcher))


def check_has_page(app: FastAPI) -> None:
    """Refuse to show anything where the page is switched off."""
    if not app.state.options.page:
        raise ApiError(
            "the page and its live view are switched off: start the server with --page",
            status=404,
        )


def live_view(app: FastAPI) -> LiveView:
    """Return the one live view of an application; made when it is first asked for."""
    if not hasattr(app.state, "live_view"):
        app.state.live_view = LiveView(app.state.llm, app.state.handlers.model)
    return app.state.live_view
