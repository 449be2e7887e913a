"""The subcommand `generate`: stream the model's answer to one prompt.

The text goes to standard output as it becomes certain; one line of numbers follows
on standard error, so that a pipe gets the text alone.

In vLLM: vllm/entrypoints/cli/openai.py (CompleteCommand), a client of its server.
Source: appendix A4, "The command line".
"""

import argparse
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from minivllm.cli.main import INTERRUPTED
from minivllm.config import DEFAULT_MODEL
from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.generation import NextTokenModel
    from minivllm.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 256

EXAMPLES = """\
examples:
  minivllm generate "Why is the sky blue?"
  minivllm generate --raw --max-tokens 40 "Once upon a time"
  minivllm generate --temperature 0.8 --seed 7 "Write a haiku."
  minivllm generate --model ./my-model --backend numpy - < question.txt
"""


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return a parser of integers within limits, for argparse."""
    limits = f"at least {minimum}" + (f" and at most {maximum}" if maximum else "")

    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if value < minimum or (maximum and value > maximum):
            raise argparse.ArgumentTypeError(f"{text!r} is no integer of {limits}")
        return value

    return parse


def temperature(text: str) -> float:
    """Parse a temperature, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return value


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model runs, and on what."""
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        help="a short name, a folder, a .gguf file or a hub id such as "
        "Qwen/Qwen3-0.6B (default: %(default)s, fetched at first use)",
    )
    add(
        "--backend",
        choices=("auto", "numpy", "torch"),
        default="auto",
        help="what computes (default: torch where it is installed, else numpy)",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="number type of the weights (default: as stored; numpy has float32 only)",
    )
    add(
        "--device",
        default="auto",
        help="cpu, cuda, cuda:N or mps (default: the GPU if torch sees one)",
    )
    add(
        "--threads",
        type=integer(1, os.cpu_count()),
        metavar="N",
        help="CPU threads to compute with (default: the library's choice)",
    )


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add = parser.add_argument
    add("prompt", metavar="PROMPT", help="what to ask; - reads it from standard input")
    add(
        "--max-tokens",
        type=integer(1),
        metavar="N",
        help=f"stop after N tokens (default: {DEFAULT_MAX_TOKENS}, or as many as fit)",
    )
    add(
        "--temperature",
        type=temperature,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token, higher is more random (default: 0)",
    )
    add("--seed", type=integer(0), metavar="N", help="make random choices repeatable")
    add("--system", metavar="TEXT", help="a system message to put before the prompt")
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


def limit_threads(count: int) -> None:
    """Tell the libraries that are loaded later how many CPU threads to use."""
    for library in ("OMP", "OPENBLAS", "MKL", "VECLIB"):
        suffix = "MAXIMUM_THREADS" if library == "VECLIB" else "NUM_THREADS"
        os.environ[f"{library}_{suffix}"] = str(count)


def choose_backend(backend: str) -> str:
    """Turn "auto" into "torch" where it is installed, else into "numpy"."""
    if backend != "auto":
        return backend
    return "torch" if importlib.util.find_spec("torch") else "numpy"


def encode_prompt(
    tokenizer: "Tokenizer", prompt: str, arguments: argparse.Namespace
) -> list[int]:
    """Return the token ids of the prompt, as a chat unless it is to be raw."""
    if arguments.raw:
        return tokenizer.encode(prompt)
    if tokenizer.chat_template is None:
        raise RequestError(
            "this model has no chat template, so it cannot be asked: use --raw to let "
            "it continue the prompt as plain text"
        )
    messages = [{"role": "user", "content": prompt}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return tokenizer.encode_chat(messages)


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
    model: "NextTokenModel",
    tokenizer: "Tokenizer",
    prompt_token_ids: list[int],
    arguments: argparse.Namespace,
) -> int:
    """Write the answer piece by piece, then the line of numbers."""
    from minivllm.generation import stream_naive
    from minivllm.text.detokenizer import IncrementalDetokenizer

    room = model.spec.max_position_embeddings - len(prompt_token_ids)
    detokenizer = IncrementalDetokenizer(tokenizer)
    finish_reason = "length"
    seconds = []  # when each token came
    start = time.perf_counter()
    token_ids = stream_naive(
        model,
        prompt_token_ids,
        arguments.max_tokens or max(1, min(DEFAULT_MAX_TOKENS, room)),
        stop_token_ids=tokenizer.eos_token_ids,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    try:
        for token_id in token_ids:
            seconds.append(time.perf_counter() - start)
            if token_id in tokenizer.eos_token_ids:
                finish_reason = "stop"
            else:
                print(detokenizer.add(token_id), end="", flush=True)
    except KeyboardInterrupt:
        finish_reason = "abort"
    print(detokenizer.finish(), flush=True)
    print(summary(len(prompt_token_ids), seconds, finish_reason), file=sys.stderr)
    return INTERRUPTED if finish_reason == "abort" else 0


def run(arguments: argparse.Namespace) -> int:
    """Load the model, stream its answer and return the exit code."""
    prompt = read_prompt(arguments)
    if arguments.threads:
        limit_threads(arguments.threads)
    # Imported only now: NumPy and torch read the number of threads when they load.
    from minivllm.loading.hub import resolve_model
    from minivllm.loading.loader import load_model
    from minivllm.text.tokenizer import Tokenizer

    folder = resolve_model(arguments.model, progress=True)
    tokenizer = Tokenizer.from_dir(folder)
    prompt_token_ids = encode_prompt(tokenizer, prompt, arguments)
    model = load_model(
        folder,
        backend=choose_backend(arguments.backend),
        dtype=arguments.dtype,
        device=arguments.device,
    )
    tokenizer.check_embedding_rows(model.spec.vocab_size)
    return stream(model, tokenizer, prompt_token_ids, arguments)
