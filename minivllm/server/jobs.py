"""What a body asks of the engine, and how its outputs become an answer.

A `Job` is made by the handlers. Whoever runs it gives the engine its prompts, and the
outputs back to the job: at the end, for one whole answer, or as they come, for a
stream of chunks. An output holds all of the answer so far, so that a slow reader may
leave some out.

Invariant: the joined chunks are the whole answer, whatever was left out. Both are plain
dictionaries: to check a record for each token would cost more than the token's share
of a step. Called by the local handlers, and by whoever speaks HTTP.

In vLLM: vllm/entrypoints/openai/chat_completion/serving.py (OpenAIServingChat),
vllm/entrypoints/openai/completion/serving.py (OpenAIServingCompletion).
Source: appendix A30, "Speaking OpenAI".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.sampling.params import SamplingParams
from minivllm.server.errors import ApiError
from minivllm.text.tokenizer import Tokenizer


class ChoiceReader:
    """Tells what is new in one choice of an answer.

    Attributes:
        is_finished: Whether the finish reason was told.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_finished = False

    def start(self) -> list[dict[str, Any]]:
        """Return the choices of the chunks before any token."""
        return []

    def add(
        self, output: RequestOutput, whole: CompletionOutput
    ) -> list[dict[str, Any]]:
        """Return the choices of the chunks that an output brings."""
        raise NotImplementedError

    def choice(self, output: RequestOutput, whole: CompletionOutput) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        raise NotImplementedError


def check_output(whole: CompletionOutput) -> None:
    """Raise ApiError if an answer has failed on the way."""
    if whole.finish_reason == "error":
        raise ApiError(
            whole.error or "the request failed: try again",
            status=500,
            type="server_error",
        )


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Count the tokens of an answer; a prompt with several answers counts once."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_answer = sum(len(a.token_ids) for output in outputs for a in output.outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a body asks of the engine.

    Attributes:
        id: The name of the answer.
        created: When the body was read, in seconds since 1970.
        model: The name that the client calls it.
        system_fingerprint: Tells answers of one server's settings from others'.
        prompts: Token ids, for each prompt.
        sampling_params: One for each prompt.
        default_max_tokens: If the parameters do not say; None for as many as fit.
        priority: For the policy of that name.
        cache_salt: Only requests with the same salt share what the cache knows.
        stream: Whether chunks are wanted.
        include_usage: Whether a stream ends with a chunk of counts.
        names: For words of the engine's errors, the fields of the body.
        tokenizer: None if the engine has none.
        on_end: Told the last output for each prompt, when all have ended.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str
    prompts: list[list[int]]
    sampling_params: list[SamplingParams]
    default_max_tokens: int | None
    priority: int = 0
    cache_salt: str | None = None
    stream: bool = False
    include_usage: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    on_end: Callable[[Sequence[RequestOutput]], None] | None = None

    kind: ClassVar[str]  # of the whole answer
    chunk_kind: ClassVar[str]

    def reader(self, prompt_index: int, index: int) -> ChoiceReader:
        """Return a reader for a continuation of a prompt."""
        raise NotImplementedError

    def head(self, kind: str) -> dict[str, Any]:
        """Return what every part of an answer begins with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }

    def response(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer.

        Args:
            outputs: The last output for each prompt.

        Raises:
            ApiError: The engine has given a request up.
        """
        choices = []
        for prompt_index, output in enumerate(outputs):
            for whole in output.outputs:
                check_output(whole)
                reader = self.reader(prompt_index, whole.index)
                choices.append(reader.choice(output, whole))
        if self.on_end:
            self.on_end(outputs)
        head = self.head(self.kind)
        return {**head, "choices": choices, "usage": usage_of(outputs)}

    def writer(self) -> "Writer":
        """Return what makes the chunks of a stream; it keeps what was shown."""
        return Writer(self)


class Writer:
    """Makes the chunks of one stream."""

    def __init__(self, job: Job) -> None:
        self._readers = {
            (prompt_index, index): job.reader(prompt_index, index)
            for prompt_index, params in enumerate(job.sampling_params)
            for index in range(params.n)
        }
        self._head = job.head(job.chunk_kind)
        self._include_usage = job.include_usage
        self._on_end = job.on_end
        if job.include_usage:
            self._head["usage"] = None

    def start(self) -> list[dict[str, Any]]:
        """Return the chunks before any token."""
        starts = (reader.start() for reader in self._readers.values())
        return [self._chunk([choice]) for choices in starts for choice in choices]

    def add(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the chunks that an output brings; none, if nothing became certain.

        Raises:
            ApiError: The engine has given the request up.
        """
        chunks = []
        for whole in output.outputs:
            reader = self._readers[prompt_index, whole.index]
            if not reader.is_finished:
                check_output(whole)
                choices = reader.add(output, whole)
                chunks += [self._chunk([choice]) for choice in choices]
        return chunks

    def finish(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Return the chunks behind the last token.

        Args:
            outputs: The last output for each prompt.
        """
        if self._on_end:
            self._on_end(outputs)
        if not self._include_usage:
            return []
        return [{**self._chunk([]), "usage": usage_of(outputs)}]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "choices": choices}
