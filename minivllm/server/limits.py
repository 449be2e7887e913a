"""What is checked before a request is read: its size, its pace, and its key.

Invariant: whoever is refused costs no more memory and no more time than the limits,
and learns nothing about keys from how long it takes. Called by the application, around
all routes.

In vLLM: vllm/entrypoints/serve/middleware/authenticate.py
(AuthenticationMiddleware).
Source: appendix A32, "A server that stays up"; appendix A33, "A page to look inside".
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

from minivllm.server.errors import ApiError

# For whoever watches the server.
OPEN_PATHS = (
    "/health",
    "/version",
    "/",
)


class BodyLimit:
    """Refuse bodies that are too large, whatever their header says, or too slow."""

    def __init__(self, app: Any, max_bytes: int, timeout_s: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Count the bytes of a request, and its seconds, while it is read."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"")
        if told.isdigit() and int(told) > self.max_bytes:
            await refuse(scope, receive, send, self._too_large())
            return
        num_bytes, is_whole = 0, False
        end = asyncio.get_running_loop().time() + self.timeout_s

        async def counted() -> Any:
            nonlocal num_bytes, is_whole
            if is_whole:  # whoever asks now waits for the client to hang up
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise self._too_large()
            is_whole = not message.get("more_body", False)
            return message

        await self.app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            f"the body has more than {self.max_bytes:,} bytes, which is the limit: "
            "send less, or raise max_body_bytes",
            status=413,
            code="request_too_large",
        )

    def _too_slow(self) -> ApiError:
        return ApiError(
            f"the body was not there after {self.timeout_s:g} s, which is the limit: "
            "send it faster, or raise body_timeout_s",
            status=408,
            code="request_too_slow",
        )


class ApiKeys:
    """Let in only who has a key."""

    def __init__(self, app: Any, keys: Sequence[str]) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Look for a key in the header `Authorization`."""
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        # A browser asks what it may send before it sends a key.
        if is_open or scope["method"] == "OPTIONS" or self._has_key(scope["headers"]):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            "the header Authorization has no valid key: send Bearer and a key",
            status=401,
            code="invalid_api_key",
        )
        await refuse(scope, receive, send, error, {"WWW-Authenticate": "Bearer"})

    def _has_key(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        kind, _, given = dict(headers).get(b"authorization", b"").partition(b" ")
        # All keys are compared, in a time that does not depend on where they differ.
        found = [secrets.compare_digest(given.strip(), key) for key in self.keys]
        return kind.lower() == b"bearer" and any(found)


async def refuse(
    scope: Any,
    receive: Any,
    send: Any,
    error: ApiError,
    headers: dict[str, str] | None = None,
) -> None:
    """Answer with an error, and leave the body unread."""
    headers = {"Connection": "close", **(headers or {})}
    response = JSONResponse(error.body(), status_code=error.status, headers=headers)
    await response(scope, receive, send)
