"""A server whose every byte a test decides: plain sockets, in a thread of its own."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
)
HANG_UP = None  # instead of bytes or seconds: break the connection off

# What to do with a request: send bytes, wait seconds, hang up.
Script = Iterable[bytes | float | None]


class Seen(NamedTuple):
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


def respond(status: str, body: bytes, headers: str = "") -> bytes:
    """Return a whole response."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def error(status: str, message: str) -> bytes:
    """Return an error in OpenAI's form."""
    return respond(status, json.dumps({"error": {"message": message}}).encode())


def event(**body: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text_event(text: str) -> bytes:
    return event(choices=[{"index": 0, "text": text}])


def delta_event(**delta: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": delta}])


def usage_event(num_prompt: int, num_output: int) -> bytes:
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    return event(choices=[], usage=usage)


DONE = b"data: [DONE]\n\n"
MODELS = respond("200 OK", b'{"data": [{"id": "parrot"}]}')


@contextmanager
def scripted_server(
    answer: Callable[[Seen], Script],
) -> Iterator[tuple[str, list[Seen]]]:
    """Serve, with /health and /v1/models as they should be unless scripted.

    Yields:
        The address, and the list of the requests for something else.
    """
    seen: list[Seen] = []

    async def handle(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            request = await read_request(reader)
            script = answer(request)
            if script is None:
                is_health = request.path == "/health"
                script = [respond("200 OK", b"") if is_health else MODELS]
            else:
                seen.append(request)
            for step in script:
                if step is HANG_UP:
                    writer.transport.abort()
                    return
                if isinstance(step, bytes):
                    writer.write(step)
                    await writer.drain()
                else:
                    await asyncio.sleep(step)
            writer.close()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(handle, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", seen
    finally:
        asyncio.run_coroutine_threadsafe(end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def end(server: asyncio.Server) -> None:
    """Stop, and let nothing be left over."""
    server.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> Seen:
    """Read one request with its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split()
    headers = dict(line.lower().split(": ", 1) for line in lines)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(method, path, headers, json.loads(body) if body else None)


def for_completions(script: Script) -> Callable[[Seen], Script | None]:
    """Return an answer that plays a script for each POST, and else is as it should."""
    return lambda request: script if request.method == "POST" else None
