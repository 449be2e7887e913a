"""The answers of completions, whole and in chunks.

Invariant: the joined texts and lists of the chunks are those of the whole answer.
Called by the handlers.

In vLLM: vllm/entrypoints/openai/completion/serving.py (OpenAIServingCompletion).
Source: appendix A30, "Speaking OpenAI".
"""

from dataclasses import dataclass
from typing import Any

from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.server.jobs import ChoiceReader, Job
from minivllm.server.logprobs import CompletionLogprobs, plain_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob(Job):
    """One text to continue, or several.

    Attributes:
        echoes: The texts of the prompts, to be told before the answers; None for none.
        has_logprobs: Whether logprobs are told.
        has_prompt_logprobs: Whether those of the prompt are, in a field of their own.
    """

    echoes: list[str] | None = None
    has_logprobs: bool = False
    has_prompt_logprobs: bool = False

    kind = "text_completion"
    chunk_kind = "text_completion"

    def reader(self, prompt_index: int, index: int) -> ChoiceReader:
        """Return a reader for a continuation."""
        return CompletionReader(self, prompt_index, index)


class CompletionReader(ChoiceReader):
    """Tells what is new in one continuation."""

    def __init__(self, job: CompletionJob, prompt_index: int, index: int) -> None:
        params = job.sampling_params[prompt_index]
        ChoiceReader.__init__(self, prompt_index * params.n + index)
        self._job = job
        self._prompt_index = prompt_index
        self._echo = job.echoes[prompt_index] if job.echoes else ""  # not told yet
        self._num_characters = self._num_tokens = 0  # told so far
        self._logprobs = CompletionLogprobs(
            job.tokenizer,
            params.skip_special_tokens,
            job.prompts[prompt_index],
            start=len(self._echo),
        )

    def add(
        self, output: RequestOutput, whole: CompletionOutput
    ) -> list[dict[str, Any]]:
        """Return a choice, if there is anything new."""
        text = self._echo + whole.text[self._num_characters :]
        if not text and whole.finish_reason is None:
            return []
        self.is_finished = whole.finish_reason is not None
        logprobs = self._new_logprobs(output, whole) if self._job.has_logprobs else None
        self._echo = ""
        self._num_characters = len(whole.text)
        return [
            {
                "index": self.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": whole.finish_reason,
                "stop_reason": whole.stop_reason,
            }
        ]

    def choice(self, output: RequestOutput, whole: CompletionOutput) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        [choice] = self.add(output, whole)
        if self._job.has_prompt_logprobs:
            entries = output.prompt_logprobs or ()
            choice["prompt_logprobs"] = list(map(plain_entry, entries))
        return choice

    def _new_logprobs(
        self, output: RequestOutput, whole: CompletionOutput
    ) -> dict[str, list[Any]]:
        """Return the logprobs of the tokens since the last time, the echo's first."""
        entries = (whole.logprobs or [])[self._num_tokens :]
        new = self._logprobs.add(whole.token_ids[self._num_tokens :], entries)
        self._num_tokens += len(entries)
        if not self._echo:
            return new
        echoed = self._echoed_logprobs(output)
        return {name: echoed[name] + values for name, values in new.items()}

    def _echoed_logprobs(self, output: RequestOutput) -> dict[str, list[Any]]:
        """Return the logprobs of the prompt; nothing predicts its first token."""
        tokenizer, token_ids = self._job.tokenizer, output.prompt_token_ids
        entries = output.prompt_logprobs or [None] * len(token_ids)
        # Markup that the client has written is part of the text, our own is not.
        skips = tokenizer is None or tokenizer.decode(token_ids) == self._echo
        echoed = CompletionLogprobs(tokenizer, skips).add(token_ids, entries)
        end = len(self._echo)
        offsets = [min(offset, end) for offset in echoed["text_offset"]]
        return {**echoed, "text_offset": offsets}
