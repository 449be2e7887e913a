"""What the log says of requests: a name and a line for each, and our mistakes.

Invariant: nothing that users write gets into the log, unless `log_prompts` asks for it.
Called by the application, around all routes.

In vLLM: vllm/entrypoints/serve/middleware/x_request_id.py (XRequestIdMiddleware),
vllm/entrypoints/serve/utils/request_logger.py (RequestLogger).
Source: appendix A32, "A server that stays up".
"""

import logging
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from minivllm.outputs import RequestOutput
from minivllm.server.errors import error_of
from minivllm.server.jobs import Job

logger = logging.getLogger(__name__)

MAX_ID_LENGTH = 128


def request_id_of(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the name that the client gives to its request, or make one."""
    given = dict(headers).get(b"x-request-id", b"")
    is_sane = 0 < len(given) <= MAX_ID_LENGTH and all(32 <= c < 127 for c in given)
    return given.decode() if is_sane else uuid.uuid4().hex


class RequestIds:
    """Name each request, and write a line about it when its response begins."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Put the name into `request.state`, the response's headers and the log."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
                host = (scope.get("client") or ["-"])[0]
                # Without the query; and what is quoted breaks no line.
                path, status = quote(scope["path"]), message["status"]
                line = "%s %s %s %d, request %s"
                logger.info(line, host, scope["method"], path, status, request_id)
            await send(message)

        await self.app(scope, receive, named)


def traceback_of(error: BaseException) -> str:
    """Return where an error came from and its class, without any message.

    A message quotes what it is about: a key that is missing, a text that is no number.
    """
    cause = error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    before = f"{traceback_of(cause)}\nand then\n" if cause is not None else ""
    places = "".join(traceback.format_tb(error.__traceback__))
    return f"{before}{places}{type(error).__module__}.{type(error).__qualname__}"


class Failures:
    """Turn mistakes of ours into a response and a traceback in the log."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Let nothing out but answers."""
        has_begun = False

        async def watched(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            try:
                await send(message)
            except OSError as error:  # so a server says that the client is gone
                raise ClientDisconnect from error

        try:
            await self.app(scope, receive, watched)
        except ClientDisconnect:  # nobody waits
            return
        except Exception as error:
            if scope["type"] != "http":
                raise
            logger.error(
                "a mistake of ours at %s %s, request %s (messages are left out, they "
                "may quote users):\n%s",
                scope["method"],
                quote(scope["path"]),
                scope["state"]["request_id"],
                traceback_of(error),
            )
            if has_begun:  # the connection breaks off, and so the client knows
                return
            failure = error_of(error)
            response = JSONResponse(failure.body(), status_code=failure.status)
            await response(scope, receive, send)


def logged(job: Job, request_id: str) -> Job:
    """Log what a job asks; return a job that logs its answers, too."""
    for prompt in job.prompts:
        text = job.tokenizer.decode(prompt) if job.tokenizer else prompt
        logger.info("request %s asks %r", request_id, text)
    return replace(job, on_end=partial(log_answers, request_id))


def log_answers(request_id: str, outputs: Sequence[RequestOutput]) -> None:
    """Log the answers of a request; one that breaks off is not there."""
    for output in outputs:
        for whole in output.outputs:
            logger.info("request %s is answered %r", request_id, whole.text)
