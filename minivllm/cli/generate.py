"""The subcommand `generate`: stream the model's answer to one prompt.

The text goes to standard output as it becomes certain; one line of numbers follows
on standard error, so that a pipe gets the text alone.

In vLLM: vllm/entrypoints/cli/openai.py (CompleteCommand), a client of its server.
Source: appendix A4, "The command line"; appendix A9, "Measuring"; appendix A14, "One
    prompt, many answers"; appendix A21, "CUDA graphs"; appendix A27, "Thinking";
    appendix A34, "A chat in the terminal".
"""

import argparse
import json
import math
import os
import secrets
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.cli.main import INTERRUPTED
from minivllm.cli.options import add_model_options, apply_model_options, integer
from minivllm.errors import MinivllmError, RequestError

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.sampling.params import SamplingParams
    from minivllm.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 256

EXAMPLES = """\
examples:
  minivllm generate "Why is the sky blue?"
  minivllm generate --raw --max-tokens 40 "Once upon a time"
  minivllm generate --temperature 0.8 --seed 7 "Write a haiku."
  minivllm generate --model ./my-model --backend numpy - < question.txt
"""


def temperature(text: str) -> float | None:
    """Parse a temperature, for argparse; None is the one that the makers recommend."""
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of at least 0, and not auto"
        )
    return value


# Name of a parameter -> its type, and what it does.
SAMPLING_OPTIONS: dict[str, tuple[type, str]] = {
    "top_p": (float, "draw among the best tokens whose probabilities add up to this"),
    "top_k": (int, "draw among so many of the best tokens"),
    "min_p": (float, "draw among tokens at least so probable, next to the best"),
    "repetition_penalty": (float, "above 1, tokens of prompt and answer are rarer"),
    "presence_penalty": (float, "subtracted from the scores of tokens of the answer"),
    "frequency_penalty": (float, "the same, as often as the answer has the token"),
}


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, for argparse."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'{text!r} is no JSON object such as {{"enable_thinking": false}}'
        )
    return value


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add = parser.add_argument
    add("prompt", metavar="PROMPT", help="what to ask; - reads it from standard input")
    add_sampling_options(parser, f"{DEFAULT_MAX_TOKENS}, or as many as fit")
    add(
        "--split-reasoning",
        action="store_true",
        help="write what the model thinks to standard error, apart from the answer",
    )
    add(
        "--raw",
        action="store_true",
        help="continue the prompt as plain text: no chat template",
    )
    add_model_options(parser)


def read_prompt(arguments: argparse.Namespace) -> str:
    """Return the prompt, from standard input if it is a dash.

    Raises:
        RequestError: It is empty, no UTF-8, or standard input is closed.
    """
    prompt = arguments.prompt
    source = "prompt"
    raw = os.fsencode(prompt) if os.name == "posix" else prompt.encode()
    if prompt == "-":
        if sys.stdin is None:
            raise RequestError(
                "the prompt - is read from standard input, which is closed: leave it "
                "open, or give the prompt itself"
            )
        source = "prompt on standard input"
        raw = sys.stdin.buffer.read().removesuffix(b"\n")
    try:
        prompt = raw.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"byte {error.start} of the {source} is no UTF-8: convert it, for example "
            "with iconv"
        ) from None
    if not prompt and not arguments.raw:
        raise RequestError("the prompt is empty: ask something")
    return prompt


def encode_prompt(
    tokenizer: "Tokenizer", prompt: str, arguments: argparse.Namespace
) -> list[int]:
    """Return the token ids of the prompt, as a chat unless it is to be raw."""
    if arguments.raw:
        if arguments.chat_template_kwargs:
            raise RequestError(
                "--chat-template-kwargs are for a chat template, but --raw takes none: "
                "leave one of the two out"
            )
        return tokenizer.encode(prompt)
    if tokenizer.chat_template is None:
        raise RequestError(
            "this model has no chat template, so it cannot be asked: use --raw to let "
            "it continue the prompt as plain text"
        )
    messages = [{"role": "user", "content": prompt}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    variables = tokenizer.check_template_kwargs(arguments.chat_template_kwargs)
    return tokenizer.encode_chat(messages, **variables)


def summary(num_prompt_tokens: int, seconds: list[float], finish_reason: str) -> str:
    """Say what was generated, and how fast.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        seconds: When each new token came, counted from the start.
        finish_reason: "stop", "length" or "abort".
    """
    parts = [f"{num_prompt_tokens} prompt tokens", f"{len(seconds)} new tokens"]
    if seconds:
        parts.append(f"first after {seconds[0]:.2f} s")
    if len(seconds) > 1:
        rate = (len(seconds) - 1) / (seconds[-1] - seconds[0])
        parts.append(f"then {rate:.1f} tokens/s")
    parts.append(f"finish reason: {finish_reason}")
    return "minivllm: " + ", ".join(parts)


def stream(
    llm: "LLM",
    prompt_token_ids: list[int],
    sampling_params: "SamplingParams",
) -> int:
    """Write the answer piece by piece, then the line of numbers."""
    finish_reason = error = None
    is_thinking = False  # in a line of standard error
    seconds = []  # when each token came
    start = time.perf_counter()
    try:
        for piece in llm.stream(prompt_token_ids, sampling_params):
            seconds += [time.perf_counter() - start] * len(piece.token_ids)
            finish_reason, error = piece.finish_reason, piece.error
            if piece.reasoning_content:
                print(piece.reasoning_content, end="", file=sys.stderr, flush=True)
                is_thinking = True
            if is_thinking and piece.text:
                print(file=sys.stderr, flush=True)
                is_thinking = False
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        finish_reason = "abort"
    if is_thinking:
        print(file=sys.stderr, flush=True)
    print(flush=True)
    if error:
        raise MinivllmError(error)
    print(summary(len(prompt_token_ids), seconds, finish_reason), file=sys.stderr)
    return INTERRUPTED if finish_reason == "abort" else 0


def run(arguments: argparse.Namespace) -> int:
    """Load the model, stream its answer and return the exit code."""
    prompt = read_prompt(arguments)
    apply_model_options(arguments)
    # Imported only now: NumPy and torch read the number of threads when they load.
    from minivllm.generation import check_request
    from minivllm.llm import LLM
    from minivllm.loading.hub import resolve_model
    from minivllm.loading.loader import load_spec
    from minivllm.sampling.params import SamplingParams
    from minivllm.text.tokenizer import Tokenizer

    # Whatever can be refused is refused before the weights are read.
    seed = secrets.randbits(64) if arguments.seed is None else arguments.seed
    params = SamplingParams(
        seed=seed,
        split_reasoning=arguments.split_reasoning,
        **sampling_wishes(arguments),
    )
    folder = resolve_model(arguments.model, progress=True)
    prompt_token_ids = encode_prompt(Tokenizer.from_dir(folder), prompt, arguments)
    spec = load_spec(folder)
    context = spec.max_position_embeddings
    room = context - len(prompt_token_ids)
    max_tokens = arguments.max_tokens or max(1, min(DEFAULT_MAX_TOKENS, room))
    check_request(spec, prompt_token_ids, max_tokens, arguments.temperature or 0.0)
    block_size = math.gcd(context, 16)  # the last block ends with the context
    with LLM(
        folder,
        backend=arguments.backend,
        dtype=arguments.dtype,
        device=arguments.device,
        block_size=block_size,
        num_blocks=-(-(len(prompt_token_ids) + max_tokens) // block_size),
        max_num_seqs=1,
        enforce_eager=arguments.enforce_eager,
        max_model_len=context,
    ) as llm:
        return stream(llm, prompt_token_ids, replace(params, max_tokens=max_tokens))


def add_sampling_options(parser: argparse.ArgumentParser, default_length: str) -> None:
    """Add the options that say how an answer is drawn, and what stands before it.

    Args:
        parser: Of the subcommand.
        default_length: How long an answer may be if --max-tokens does not say.
    """
    add = parser.add_argument
    add(
        "--max-tokens",
        type=integer(1),
        metavar="N",
        help=f"stop after N tokens (default: {default_length})",
    )
    add(
        "--temperature",
        type=temperature,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token, higher is more random, auto is what the "
        "model's makers recommend (default: 0)",
    )
    for name, (kind, text) in SAMPLING_OPTIONS.items():
        metavar = "K" if kind is int else "P"
        add(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    add(
        "--seed",
        type=integer(0, 2**64 - 1),
        metavar="N",
        help="make random choices repeatable",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )
    add("--system", metavar="TEXT", help="a system message to put before the prompt")
    add(
        "--chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="variables of the chat template, such as '{\"enable_thinking\": false}'",
    )


def sampling_wishes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked for, by the names of `SamplingParams`; no unset ones."""
    given = {
        name: getattr(arguments, name)
        for name in ("temperature", "stop", *SAMPLING_OPTIONS)
    }
    return {name: value for name, value in given.items() if value is not None}
