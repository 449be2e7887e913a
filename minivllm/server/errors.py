"""What is said instead of an answer: OpenAI's error object, and a status.

Invariant: every exception has one. Where the request is not to blame, it tells
nothing of the machine beside what our own errors say. Called by the handlers, and by
whoever speaks HTTP.

In vLLM: vllm/entrypoints/serve/exception_handling/error_response.py
(create_error_response).
Source: appendix A30, "Speaking OpenAI"; chapter 9, "Serving".
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from minivllm.errors import (
    BackendUnavailable,
    EngineClosing,
    EngineDead,
    EngineOverloaded,
    MinivllmError,
    RequestError,
    RequestTimeout,
)
from minivllm.sampling.params import SamplingParams


class ApiError(MinivllmError):
    """A refusal, or a failure, in OpenAI's terms.

    Attributes:
        status: Of HTTP: 4xx if the request is wrong, 5xx if the server is.
        type: "invalid_request_error", "rate_limit_error" or "server_error".
        param: The field of the body that is wrong, such as "messages[0].content".
        code: A name for programs, such as "model_not_found", or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.type = status, type
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON that the caller gets."""
        names = ("type", "param", "code")
        error = {"message": str(self), **{n: getattr(self, n) for n in names}}
        return {"error": error}


# What an error means for the caller: the status, and the type. The nearest base counts.
KINDS: dict[type[Exception], tuple[int, str]] = {
    RequestError: (400, "invalid_request_error"),
    BackendUnavailable: (400, "invalid_request_error"),  # of a grammar
    MinivllmError: (500, "server_error"),
    EngineOverloaded: (429, "rate_limit_error"),
    EngineClosing: (503, "server_error"),
    EngineDead: (503, "server_error"),
    RequestTimeout: (504, "server_error"),
}
PARAMS = {
    *(field.name for field in fields(SamplingParams)),
    *("priority", "cache_salt", "prompt", "chat_template_kwargs"),
}
# "prompt 1: top_k is ...", "the prompt has ..."
_SUBJECT = re.compile(r"(?:prompt \d+: )?(the )?(\w+)")


def error_of(
    exception: Exception,
    names: Mapping[str, str] | None = None,
    param: str | None = None,
) -> ApiError:
    """Return what to answer because of an exception.

    Args:
        exception: Of any class.
        names: For words of the engine, the fields of the body: a chat's "prompt" came
            from "messages".
        param: The field to blame, if the message does not begin with one.
    """
    if isinstance(exception, ApiError):
        return exception
    kind = next((KINDS[c] for c in type(exception).__mro__ if c in KINDS), None)
    if kind is None:
        message = "the server failed, and the request is not to blame: see its log"
        return ApiError(message, status=500, type="server_error")
    message = str(exception)
    status, type_ = kind
    if status >= 500:
        return ApiError(message, status=status, type=type_)
    subject = _SUBJECT.match(message)
    word = subject[2] if subject else ""
    if word in PARAMS:
        param = (names or {}).get(word, word)
        if not subject[1]:
            message = message[: subject.start(2)] + param + message[subject.end(2) :]
    code = "context_length_exceeded" if "max_model_len is" in message else None
    return ApiError(message, status=status, type=type_, param=param, code=code)
