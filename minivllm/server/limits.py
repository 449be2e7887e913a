"""What is checked before a request is read: its size, and its key.

Invariant: whoever is refused costs no more memory than the limit, and learns nothing
about keys from how long it takes. Called by the application, around all routes.

In vLLM: vllm/entrypoints/serve/middleware/authenticate.py
(AuthenticationMiddleware).
Source: appendix A32, "A server that stays up".
"""

import secrets
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

from minivllm.server.errors import ApiError

OPEN_PATHS = ("/health", "/version")  # for whoever watches the server


class BodyLimit:
    """Refuse bodies that are too large, whatever their header says."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Count the bytes of a request while it is read."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"")
        if told.isdigit() and int(told) > self.max_bytes:
            await refuse(scope, receive, send, self._error())
            return
        num_bytes = 0

        async def counted() -> Any:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise self._error()
            return message

        await self.app(scope, counted, send)

    def _error(self) -> ApiError:
        return ApiError(
            f"the body has more than {self.max_bytes:,} bytes, which is the limit: "
            "send less, or raise max_body_bytes",
            status=413,
            code="request_too_large",
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
