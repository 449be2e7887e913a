"""Answer a client, and notice when it goes away.

Invariant: when the client is gone, what was computed for it is cancelled. Called by the
routes of the server.

In vLLM: vllm/entrypoints/serve/utils/api_utils.py (with_cancellation,
listen_for_disconnect). The format is server-sent events, in the HTML Living Standard.
Source: chapter 9, "Serving".
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event: a line of JSON, and an empty line behind it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


async def gone(receive: Receive) -> None:
    """Wait until the client hangs up; its request has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(
    work: Coroutine[Any, Any, Result], receive: Receive
) -> Result | None:
    """Do some work, and cancel it if the client hangs up first.

    Returns:
        What the work returns; None if the client is gone.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return worker.result() if worker.done() else None
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


class EventStream(Response):
    """A response that is sent piece by piece while it comes into being."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], on_end: Callable[[], None]
    ) -> None:
        """Take the events, ready to be sent.

        Args:
            events: They are closed when the client goes.
            on_end: Called at the end, even if no event was ever asked for: a generator
                that has not begun runs no `finally`.
        """
        # Proxies would collect the pieces otherwise.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(status_code=200, headers=headers)
        del self.headers["content-length"]  # nobody knows it yet
        self.events = events
        self.on_end = on_end

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send all events; Starlette calls this."""
        try:
            await unless_gone(self._send_all(send), receive)
        finally:
            self.on_end()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send(start | {"headers": self.raw_headers})
        try:
            async for data in self.events:
                # Waits while the client is slow to read.
                await send(
                    {"type": "http.response.body", "body": data, "more_body": True}
                )
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.events.aclose()
