"""The answers of chats, whole and in chunks.

Invariant: a message is what its deltas make, joined: it is made of them. Called by the
handlers.

In vLLM: vllm/entrypoints/openai/chat_completion/serving.py (OpenAIServingChat).
Source: appendix A30, "Speaking OpenAI".
"""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.server.jobs import ChoiceReader, Job
from minivllm.server.logprobs import chat_entry, plain_entry
from minivllm.server.tool_choice import ToolOptions
from minivllm.server.tools import CallStart, Event

TEXTS = ("reasoning_content", "content")


def join_deltas(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that some deltas make."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in TEXTS:
            if name in delta:
                message[name] = (message.get(name) or "") + delta[name]
        for piece in delta.get("tool_calls", ()):
            function = piece["function"]
            if "id" in piece:
                call = {name: piece[name] for name in ("id", "type")}
                calls.append({**call, "function": dict(function)})
            else:
                calls[piece["index"]]["function"]["arguments"] += function["arguments"]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob(Job):
    """A chat.

    Attributes:
        num_best: Of each place, how many of the best tokens to tell; None for no
            logprobs.
        include_reasoning: Whether thoughts are told.
        tools: How calls are found and told.
    """

    num_best: int | None = None
    include_reasoning: bool = True
    tools: ToolOptions = field(default_factory=ToolOptions)

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def reader(self, prompt_index: int, index: int) -> ChoiceReader:
        """Return a reader for an answer."""
        return ChatReader(self, index)

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer, with the logprobs of the prompt if asked for."""
        response = Job.response(self, outputs)
        if self.sampling_params[0].prompt_logprobs is not None:
            entries = outputs[0].prompt_logprobs or ()
            response["prompt_logprobs"] = list(map(plain_entry, entries))
        return response


class ChatReader(ChoiceReader):
    """Tells what is new in one answer of a chat."""

    def __init__(self, job: ChatJob, index: int) -> None:
        ChoiceReader.__init__(self, index)
        self._job = job
        self._calls = job.tools.call_reader and job.tools.call_reader()
        self._num_calls = 0
        self._num_characters = self._num_thoughts = 0  # told so far, of both texts
        self._num_tokens = 0  # whose logprobs were told

    def start(self) -> list[dict[str, Any]]:
        """Return the choice that says who speaks."""
        return [self._choice({"role": "assistant", "content": "", "refusal": None})]

    def add(
        self, output: RequestOutput, whole: CompletionOutput
    ) -> list[dict[str, Any]]:
        """Return a choice for each thing that is new, and one for the end."""
        choices = [self._choice(delta) for delta in self._deltas(whole)]
        if whole.finish_reason is not None:
            self.is_finished = True
            choices.append({**self._choice({}), **self._end(whole)})
        if choices and self._job.num_best is not None:
            choices[0]["logprobs"] = self._logprobs(whole)
        return choices

    def choice(self, output: RequestOutput, whole: CompletionOutput) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        message = join_deltas(self._deltas(whole))
        choice = {"index": self.index, "message": message, "logprobs": None}
        if self._job.num_best is not None:
            choice["logprobs"] = self._logprobs(whole)
        return {**choice, **self._end(whole)}

    def _choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": self.index, "delta": delta}
        return {**choice, "logprobs": None, "finish_reason": None}

    def _deltas(self, whole: CompletionOutput) -> list[dict[str, Any]]:
        """Return what is new: thoughts, text and calls."""
        deltas: list[dict[str, Any]] = []
        thoughts = whole.reasoning_content or ""
        if len(thoughts) > self._num_thoughts and self._job.include_reasoning:
            deltas.append({"reasoning_content": thoughts[self._num_thoughts :]})
        self._num_thoughts = len(thoughts)
        piece = whole.text[self._num_characters :]
        self._num_characters = len(whole.text)
        if self._calls is None:
            return [*deltas, {"content": piece}] if piece else deltas
        events = self._calls.add(piece) if piece else []
        if whole.finish_reason is not None:
            events += self._calls.finish()
        deltas += map(self._delta_of, events)
        return [delta for delta in deltas if delta]

    def _delta_of(self, event: Event) -> dict[str, Any]:
        if isinstance(event, str):
            return {"content": event}
        if is_start := isinstance(event, CallStart):
            self._num_calls += 1
        max_calls = self._job.tools.max_calls
        if max_calls is not None and self._num_calls > max_calls:
            return {}
        call: dict[str, Any] = {"index": self._num_calls - 1}
        if is_start:
            call |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            call["function"] = {"name": event.name, "arguments": ""}
        else:
            call["function"] = {"arguments": event.piece}
        return {"tool_calls": [call]}

    def _end(self, whole: CompletionOutput) -> dict[str, Any]:
        reason = whole.finish_reason
        if reason == "stop" and self._num_calls and not self._job.tools.is_named:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": whole.stop_reason}

    def _logprobs(self, whole: CompletionOutput) -> dict[str, Any] | None:
        """Return the logprobs of the tokens since the last time."""
        if whole.reasoning_content is not None and not self._job.include_reasoning:
            return None  # they would tell the thoughts
        entries = (whole.logprobs or [])[self._num_tokens :]
        self._num_tokens += len(entries)
        best, tokenizer = self._job.num_best, self._job.tokenizer
        content = [chat_entry(entry, best, tokenizer) for entry in entries]
        return {"content": content, "refusal": None}
