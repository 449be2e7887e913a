"""Who answers in a chat: a model in this process, or a server.

Invariant: what can be refused is refused by `start`, before a piece of an answer; and
whoever drops the pieces half-way stops the work. Called by `minivllm chat`.

In vLLM: vllm/entrypoints/cli/openai.py (ChatCommand), always with a server.
Source: appendix A34, "A chat in the terminal".
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from minivllm.cli.conversation import TooLong
from minivllm.errors import MinivllmError
from minivllm.llm import LLM, Message, piece_of
from minivllm.outputs import CompletionOutput
from minivllm.sampling.params import SamplingParams


class AnswerPiece(NamedTuple):
    """A part of an answer, and what is known by then of the whole."""

    text: str = ""
    thoughts: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


class Answerer(Protocol):
    """Answers conversations."""

    def start(self, messages: Sequence[Message]) -> Iterator[AnswerPiece]:
        """Begin an answer.

        Raises:
            TooLong: It does not fit.
            MinivllmError: It cannot be answered.
        """
        ...


class LocalAnswerer:
    """Answers with a model in this process."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        variables: Mapping[str, Any],
        reserve: int,
    ) -> None:
        """Remember how to answer.

        Args:
            llm: The model; whoever made it closes it.
            params: Of all answers; each gets a seed of its own, counted up.
            variables: Of the chat template.
            reserve: Tokens that an answer must have room for.
        """
        self._llm = llm
        self._params = params
        self._variables = variables
        self._reserve = reserve

    def start(self, messages: Sequence[Message]) -> Iterator[AnswerPiece]:
        """Begin an answer: as long as fits, unless the parameters say less."""
        token_ids = self._llm.tokenizer.encode_chat(messages, **self._variables)
        limit = self._llm.engine.runner.max_model_len
        if len(token_ids) + self._reserve > limit:
            raise TooLong(
                f"the conversation has {len(token_ids):,} tokens and an answer needs "
                f"room for {self._reserve:,}, but max_model_len is {limit:,}: say it "
                "in fewer words, or raise --max-model-len"
            )
        outputs = self._llm.outputs(token_ids, self._params, default_max_tokens=None)
        self._params = replace(self._params, seed=(self._params.seed + 1) % 2**64)
        return self._pieces(outputs)

    def _pieces(self, outputs: Iterator[Any]) -> Iterator[AnswerPiece]:
        before: CompletionOutput | None = None
        with closing(outputs):  # aborts a request that has not ended
            for _, output in outputs:
                [whole] = output.outputs
                if whole.error:
                    raise MinivllmError(whole.error)
                new, before = piece_of(whole, before), whole
                yield AnswerPiece(
                    text=new.text,
                    thoughts=new.reasoning_content or "",
                    finish_reason=new.finish_reason,
                    num_prompt_tokens=len(output.prompt_token_ids),
                    num_cached_tokens=output.num_cached_tokens,
                    num_output_tokens=len(whole.token_ids),
                )


TIMEOUT_S = 600.0  # a server may be silent as long


class ServerAnswerer:
    """Asks a server that speaks OpenAI's interface.

    Attributes:
        fields: Of every request, such as the model and the temperature.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Remember where to ask.

        Args:
            url: Such as "http://127.0.0.1:8000".
            api_key: If it wants one.
        """
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.fields: dict[str, Any] = {}

    def models(self) -> list[str]:
        """Return the names of its models.

        Raises:
            MinivllmError: It does not tell.
        """
        with self._open("/v1/models") as response:
            body = response.read()
        try:
            if names := [str(model["id"]) for model in json.loads(body)["data"]]:
                return names
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # it is no list of models: the same as none
        raise MinivllmError(
            f"{self._url}/v1/models names no models: is it a server that speaks "
            "OpenAI's interface?"
        )

    def start(self, messages: Sequence[Message]) -> Iterator[AnswerPiece]:
        """Begin an answer."""
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        body = self.fields | fields | {"messages": list(messages)}
        return self._pieces(self._open("/v1/chat/completions", body))

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise refusal(error.code, error.read(), path) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> MinivllmError:
        reason = getattr(error, "reason", None) or error
        return MinivllmError(
            f"lost the server at {self._url} ({reason}): is it running? --url says "
            "where it is"
        )

    def _pieces(self, response: Any) -> Iterator[AnswerPiece]:
        with response:
            try:
                for line in response:
                    if not line.startswith(b"data:"):
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    yield piece_in(data)
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error) from None
        raise self._lost(EOFError("the answer breaks off"))


def piece_in(data: bytes) -> AnswerPiece:
    """Read an event of a stream.

    Raises:
        MinivllmError: It is an error, or no event of OpenAI's.
    """
    try:
        event = json.loads(data)
        if event.get("error"):
            raise MinivllmError(f"the server says: {event['error']['message']}")
        usage = event.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        [choice] = event["choices"] or [{"delta": {}}]
        delta = choice["delta"]
        return AnswerPiece(
            text=delta.get("content") or "",
            thoughts=delta.get("reasoning_content") or delta.get("reasoning") or "",
            finish_reason=choice.get("finish_reason"),
            num_prompt_tokens=usage.get("prompt_tokens", 0),
            num_cached_tokens=details.get("cached_tokens") or 0,
            num_output_tokens=usage.get("completion_tokens", 0),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise MinivllmError(
            f"the server sent {data[:80]!r}, which is no part of an answer"
        ) from None


def refusal(status: int, body: bytes, path: str) -> MinivllmError:
    """Return the error for a response that is none of an answer."""
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message, code = body[:200].decode(errors="replace").strip(), None
    if code == "context_length_exceeded":
        return TooLong(message)
    return MinivllmError(f"the server refuses {path} (HTTP {status}): {message}")
