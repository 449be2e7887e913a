"""What the tests of the server share: a model that says what it is told to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from minivllm.llm import LLM
from minivllm.loading.gguf_vocabulary import TokenType
from minivllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from minivllm.server.local import LocalHandlers
from minivllm.text.tokenizer import Tokenizer
from tests.qwen3_template import QWEN3
from tests.tiny_tokenizers import byte_level, load

EOS = 257  # <|im_end|>
USER = {"role": "user", "content": "Hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def qwen_tokenizer(
    folder: Path,
    *,
    template: str | None = QWEN3,
    call_kind: TokenType = TokenType.USER_DEFINED,
) -> Tokenizer:
    """Return a tokenizer with a token for each byte and for each tag of Qwen3."""
    added = dict.fromkeys(("<|im_start|>", "<|im_end|>"), TokenType.CONTROL)
    added |= dict.fromkeys(("<think>", "</think>"), TokenType.USER_DEFINED)
    added |= dict.fromkeys(("<tool_call>", "</tool_call>"), call_kind)
    metadata = byte_level(added=added, eos_token_id=EOS)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return load(metadata, folder)


def scripted(
    tokenizer: Tokenizer | None, *answers: str | Sequence[int], **options: Any
) -> LocalHandlers:
    """Return handlers whose model gives these answers, one request after the other.

    A text is ended by the end token. Answers of one prompt with n > 1 follow each other
    in the script of its request: give them as `say(handlers, ...)`.
    """
    llm = LLM(backend="fake", num_blocks=64)
    llm.engine.tokenizer = llm.tokenizer = tokenizer
    if tokenizer is not None:
        llm.engine.runner.vocab_size = tokenizer.vocab_size
    handlers = LocalHandlers(llm, model="m", **options)
    llm.engine.runner.script = {}
    for number, answer in enumerate(answers):
        say(handlers, str(number), answer)
    return handlers


def say(handlers: LocalHandlers, request_id: str, answer: str | Sequence[int]) -> None:
    """Let the model give an answer to a request."""
    if isinstance(answer, str):
        encode = handlers.llm.tokenizer.encode
        answer = [*encode(answer, add_special_tokens=False), EOS]
    handlers.llm.engine.runner.script[request_id] = list(answer)


def answer_of(
    text: str,
    *,
    index: int = 0,
    reason: str | None = None,
    thoughts: str | None = None,
    token_ids: Iterable[int] = (),
    logprobs: list[dict[int, Logprob]] | None = None,
) -> CompletionOutput:
    """Return an answer as it is at some moment."""
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=list(token_ids),
        finish_reason=reason,
        reasoning_content=thoughts,
        logprobs=logprobs,
    )


def output_of(*answers: CompletionOutput, **values: Any) -> RequestOutput:
    """Return the output of a request with some answers."""
    values = {"prompt_token_ids": [1, 2], "num_cached_tokens": 0, **values}
    return RequestOutput(
        request_id="0",
        prompt=None,
        outputs=list(answers),
        finished=all(answer.finish_reason for answer in answers),
        metrics=RequestMetrics(arrival_time=0.0),
        **values,
    )
