"""Ask any server that speaks OpenAI's interface, and note each piece of its answer.

Invariant: whatever a server does, a request ends: with its `[DONE]`, or with a
`RequestFailed` that says how. Called by `minivllm bench serve`.

In vLLM: vllm/benchmarks/lib/endpoint_request_func.py (async_request_openai_completions,
async_request_openai_chat_completions), vllm/benchmarks/lib/ready_checker.py.
Source: appendix A31, "Load".
"""

import asyncio
import json
import operator
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from minivllm.benchmarks.load import LoadRequest, Piece, RequestFailed, Usage
from minivllm.errors import BackendUnavailable, MinivllmError

if TYPE_CHECKING:
    import aiohttp

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
DONE = b"[DONE]"


class EventLines:
    """Cuts a stream of bytes into server-sent events, wherever its chunks end."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events whose line has become complete."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [
            line.removeprefix(b"data:").strip()
            for line in lines
            if line.startswith(b"data:")  # else a comment, another field, or nothing
        ]


def piece_of_event(data: bytes) -> Piece:
    """Read one event.

    Raises:
        RequestFailed: It is an error, or nothing that we know.
    """
    try:
        body = json.loads(data)
        if error := body.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise RequestFailed("error in the stream", str(message))
        is_shown = any(shows(choice) for choice in body["choices"])
        if (usage := body.get("usage")) is None:
            return Piece(is_shown)
        names = ("prompt_tokens", "completion_tokens")
        return Piece(is_shown, Usage(*(operator.index(usage[name]) for name in names)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RequestFailed("no event of OpenAI's", repr(data[:80])) from None


def shows(choice: Mapping[str, Any]) -> bool:
    """Whether a choice of a chunk has something to see.

    The first chunk of a chat has a role and no text; it comes before any token.
    """
    if "text" in choice:
        return bool(choice["text"])
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return any(choice["delta"].get(name) for name in names)


class OpenAISender:
    """Sends requests to a server, over as many connections as there are requests."""

    def __init__(
        self,
        session: "aiohttp.ClientSession",
        url: str,
        model: str,
        endpoint: str = "completions",
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        """Remember where requests go.

        Args:
            session: As `open_session` makes it.
            url: Of the server, such as "http://127.0.0.1:8000".
            model: What it calls the model.
            endpoint: "completions" or "chat".
            extra_body: More fields of each request.
        """
        self._session = session
        self._url = url + ENDPOINTS[endpoint]
        self._endpoint = endpoint
        self._fields = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            **(extra_body or {}),
        }

    async def send(self, request: LoadRequest) -> AsyncIterator[Piece]:
        """Send a request; yield a piece for each event of the answer."""
        import aiohttp

        lines = EventLines()
        try:
            async with self._session.post(
                self._url, json=self._body(request)
            ) as answer:
                if answer.status != 200:
                    message = message_in(await answer.read())
                    raise RequestFailed(f"HTTP {answer.status}", message)
                async for chunk in answer.content.iter_any():
                    for data in lines.add(chunk):
                        if data == DONE:
                            return
                        yield piece_of_event(data)
        except TimeoutError:
            raise RequestFailed("time-out", "the server took too long") from None
        except aiohttp.ClientError as error:
            raise RequestFailed(type(error).__name__, str(error)) from None
        raise RequestFailed("broken stream", "it ended without data: [DONE]")

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        prompt = request.prompt
        fields = self._fields | {"max_tokens": request.max_tokens}
        if self._endpoint == "completions":
            return fields | {"prompt": prompt}
        is_text = isinstance(prompt, str)
        messages = [{"role": "user", "content": prompt}] if is_text else prompt
        return fields | {"messages": messages}


def message_in(body: bytes) -> str:
    """Return the message of an error in OpenAI's form, or the beginning of a body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:200].decode(errors="replace").strip()


def open_session(
    api_key: str | None = None, timeout_s: float | None = None
) -> "aiohttp.ClientSession":
    """Return a session with any number of connections; close it after use.

    Args:
        api_key: For the header Authorization.
        timeout_s: What a whole request may take.

    Raises:
        BackendUnavailable: aiohttp is not installed.
    """
    try:
        # With 16 streams it takes 30 µs of a core per piece, httpx 70 (one machine,
        # their current versions): a client that needs the cores of the server measures
        # itself. vLLM uses it as well.
        import aiohttp
    except ImportError as error:
        raise BackendUnavailable(
            f"requests are sent with aiohttp ({error}): pip install aiohttp, or "
            'pip install "minivllm[server]"'
        ) from error
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )


POLL_S = 0.5


async def wait_until_ready(
    session: "aiohttp.ClientSession", url: str, limit_s: float
) -> None:
    """Wait until a server answers at /health, with whatever but an error of its own.

    Raises:
        MinivllmError: It does not, for so many seconds.
    """
    import aiohttp

    end_s = time.monotonic() + limit_s
    timeout = aiohttp.ClientTimeout(total=max(limit_s, POLL_S))
    while True:
        try:
            async with session.get(f"{url}/health", timeout=timeout) as answer:
                if answer.status < 500:
                    return
                reason = f"HTTP {answer.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
        if time.monotonic() + POLL_S > end_s:
            raise MinivllmError(
                f"no server is ready at {url} ({reason}), waited {limit_s:g} s: start "
                "one with minivllm serve, or say where it is with --url"
            )
        await asyncio.sleep(POLL_S)


async def first_model(session: "aiohttp.ClientSession", url: str) -> str:
    """Ask a server for the name of its first model.

    Raises:
        MinivllmError: It does not tell.
    """
    import aiohttp

    try:
        async with session.get(f"{url}/v1/models") as answer:
            body = await answer.read()
            if answer.status != 200:
                reason = f"HTTP {answer.status}: {message_in(body)}"
            else:
                return str(json.loads(body)["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        reason = f"it answered {body[:80]!r}"
    raise MinivllmError(
        f"{url}/v1/models names no model ({reason}): give its name with --model, and a "
        "key with --api-key if the server wants one"
    )
