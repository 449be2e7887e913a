"""The subcommand `chat`: a conversation in the terminal.

Ctrl-C stops an answer and not the program; what was written of it stays in the
conversation. From a pipe, each line is a message, and the answers alone go to
standard output.

In vLLM: vllm/entrypoints/cli/openai.py (ChatCommand).
Source: appendix A34, "A chat in the terminal".
"""

import argparse
import contextlib
import difflib
import io
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.cli.bench_serve import server_url
from minivllm.cli.conversation import Conversation, TooLong
from minivllm.cli.generate import add_sampling_options, sampling_wishes
from minivllm.cli.options import add_model_options, apply_model_options, integer
from minivllm.config import DEFAULT_MODEL
from minivllm.errors import MinivllmError, RequestError
from minivllm.interrupts import HeldInterrupts

if TYPE_CHECKING:
    from minivllm.cli.answerers import Answerer, AnswerPiece

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# A model may write what a terminal takes for commands; from U+2400 are their pictures.
VISIBLE = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    **dict.fromkeys([0x7F, *range(0x80, 0xA0)], "\N{REPLACEMENT CHARACTER}"),
}


class Screen:
    """Writes answers: on a terminal with dimmed thoughts, else the text alone."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._has_colors = is_terminal and not os.environ.get("NO_COLOR")
        self._is_thinking = False

    def write(self, text: str, thoughts: str = "") -> None:
        """Write new text; thoughts come first."""
        if thoughts:
            if not self._is_thinking and self._has_colors:
                print(DIM, end="")
            self._is_thinking = True
            self._print(thoughts, sys.stdout if self._is_terminal else sys.stderr)
        if text:
            self._stop_thinking()
            self._print(text, sys.stdout)

    def end(self) -> None:
        """End the answer."""
        self._stop_thinking()
        print(flush=True)

    def _print(self, text: str, stream: Any) -> None:
        if self._is_terminal:
            text = text.translate(VISIBLE)
        print(text, end="", file=stream, flush=True)

    def _stop_thinking(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            end = f"{PLAIN}\n\n" if self._has_colors else "\n\n"
            print(end if self._is_terminal else "", end="", flush=True)
            if not self._is_terminal:
                print(file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Tell the user something that is no answer."""
    print(f"minivllm: {text}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Tally:
    """An answer while it comes: its text, and what is known of it."""

    start_s: float = field(default_factory=time.perf_counter)
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "abort"
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    def add(self, piece: "AnswerPiece") -> None:
        """Take the next piece; counts may come late, but do not shrink."""
        if piece.text or piece.thoughts:
            self.times_s.append(time.perf_counter() - self.start_s)
        self.text += piece.text
        self.finish_reason = piece.finish_reason or self.finish_reason
        for name in ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens"):
            setattr(self, name, max(getattr(self, name), getattr(piece, name)))

    def line(self) -> str:
        """Say what was computed, and how fast."""
        parts = [
            f"{self.num_prompt_tokens} prompt tokens ({self.num_cached_tokens} cached)",
            f"{self.num_output_tokens} new tokens",
        ]
        if self.times_s:
            first_s, last_s = self.times_s[0], self.times_s[-1]
            parts.append(f"first after {first_s:.2f} s")
            if last_s > first_s and self.num_output_tokens > 1:
                rate = (self.num_output_tokens - 1) / (last_s - first_s)
                parts.append(f"then {rate:.1f} tokens/s")
        return ", ".join([*parts, f"finish reason: {self.finish_reason}"])


class Chat:
    """Takes messages and commands, and shows the answers."""

    def __init__(
        self,
        answerer: "Answerer",
        conversation: Conversation,
        screen: Screen,
        is_verbose: bool = False,
    ) -> None:
        self._answerer = answerer
        self._screen = screen
        self._is_verbose = is_verbose
        self.conversation = conversation

    def answer(self, question: str) -> None:
        """Answer a question; what is stopped half-way counts as the answer.

        Raises:
            KeyboardInterrupt: It was stopped.
            MinivllmError: It failed; then the conversation is as it was.
        """
        tally = Tally()
        turns = list(self.conversation.turns)
        self.conversation.question = question
        try:
            with contextlib.closing(self._start()) as pieces:
                try:
                    for piece in pieces:
                        tally.add(piece)
                        self._screen.write(piece.text, piece.thoughts)
                finally:
                    self._screen.end()
                    if self._is_verbose:
                        say(tally.line())
        except MinivllmError:
            self.conversation.turns[:] = turns
            tally.text = ""
            raise
        finally:
            with HeldInterrupts():
                self.conversation.close(tally.text)
        if not tally.text:
            say("the answer is empty, so the question is forgotten")
        elif tally.finish_reason == "length":
            say("the answer ends here because its length is limited")

    def _start(self) -> "Iterator[AnswerPiece]":
        """Begin the answer, without the oldest turns if they leave no room for it."""
        num_forgotten = 0
        while True:
            try:
                pieces = self._answerer.start(self.conversation.messages())
            except TooLong:
                if not self.conversation.forget_oldest():
                    raise
                num_forgotten += 1
                continue
            if num_forgotten:
                say(f"no room for all: the oldest {num_forgotten} turns are forgotten")
            return pieces


BLOCK = '"""'  # begins and ends a message of several lines


class Reader:
    """Reads messages from a terminal, with a prompt and a history, or from a pipe."""

    def __init__(self, is_interactive: bool) -> None:
        self._is_interactive = is_interactive
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        if is_interactive:
            with contextlib.suppress(ImportError):  # Windows has none
                import readline  # noqa: F401  # input() uses it

    def read(self) -> str:
        """Return the next message that is not empty.

        Raises:
            EOFError: There is none.
            RequestError: It is no UTF-8.
        """
        while not (text := self._message()).strip():
            pass
        check_text(text)
        return text

    def _message(self) -> str:
        """Read a line, or a block of lines."""
        text = self._line("> ")
        if not text.startswith(BLOCK):
            return text
        text = text.removeprefix(BLOCK)
        while not text.endswith(BLOCK):
            text += "\n" + self._line("... ")
        return text.removesuffix(BLOCK).strip("\n")

    def _line(self, prompt: str) -> str:
        if self._is_interactive:
            try:
                return input(prompt)
            except EOFError:
                print(flush=True)  # behind the prompt
                raise
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


def check_text(text: str) -> None:
    """Refuse what is no UTF-8; such bytes were read as lone surrogates.

    Raises:
        RequestError: It is none.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"character {error.start} of the message is no UTF-8: convert it, for "
            "example with iconv"
        ) from None


def take(chat: Chat, text: str) -> None:
    """Do what a command says, or answer a message.

    Raises:
        EOFError: It was the command to end.
        RequestError: There is no such command.
    """
    if not text.startswith("/"):
        chat.answer(text)
        return
    name, _, rest = text.partition(" ")
    if name not in CHAT_COMMANDS:
        nearest = difflib.get_close_matches(name, CHAT_COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "see /help"
        raise RequestError(
            f"unknown command {name}: {hint} (a message that begins with / needs a "
            "blank before it)"
        )
    CHAT_COMMANDS[name][0](chat, rest.strip())


def talk(chat: Chat, reader: Reader, is_interactive: bool) -> None:
    """Take messages until there are no more.

    Raises:
        KeyboardInterrupt: Ctrl-C, and nobody is there to go on.
        MinivllmError: Something failed, and nobody is there to see it.
    """
    while True:
        try:
            take(chat, reader.read())
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            print(flush=True)  # the line that was being typed is dropped
        except MinivllmError as error:
            if not is_interactive:
                raise
            say(f"error: {error}")


def show_help(chat: Chat, text: str) -> None:
    """Show this list."""
    for name, (act, argument) in CHAT_COMMANDS.items():
        say(f"{name + ' ' + argument:16}{act.__doc__.lower().rstrip('.')}")
    say(f"a message of several lines begins and ends with {BLOCK}")
    say("Ctrl-C stops an answer, Ctrl-D ends the chat")


def reset(chat: Chat, text: str) -> None:
    """Forget the conversation, but not the system message."""
    chat.conversation.turns.clear()
    say("forgotten")


def set_system(chat: Chat, text: str) -> None:
    """Replace the system message; without a text, take it away."""
    chat.conversation.system = text or None
    say("system message replaced" if text else "no system message any more")


def undo(chat: Chat, text: str) -> None:
    """Take back the last question and its answer."""
    question = chat.conversation.undo()
    if question is None:
        raise RequestError("nothing was answered yet, so there is nothing to take back")
    say(f"taken back: {question:.60}")


def retry(chat: Chat, text: str) -> None:
    """Answer the last question again."""
    question = chat.conversation.undo()
    if question is None:
        raise RequestError("nothing was answered yet, so there is nothing to retry")
    chat.answer(question)


def leave(chat: Chat, text: str) -> None:
    """End the chat."""
    raise EOFError


# Name: what it does, and what may stand behind it.
CHAT_COMMANDS = {
    "/help": (show_help, ""),
    "/reset": (reset, ""),
    "/system": (set_system, "[TEXT]"),
    "/undo": (undo, ""),
    "/retry": (retry, ""),
    "/quit": (leave, ""),
}

EXAMPLES = """\
examples:
  minivllm chat
  minivllm chat --system "Answer in one sentence." --temperature 0.7
  minivllm chat --model Qwen/Qwen3-0.6B --temperature auto --verbose
  minivllm chat --url http://127.0.0.1:8000
  minivllm chat --max-tokens 100 < questions.txt

commands: /help /reset /system [TEXT] /undo /retry /quit; Ctrl-C stops an answer, and
Ctrl-D ends the chat. From a pipe, each line is a message.
"""

RESERVE = 256  # tokens that an answer should have room for
MAX_MODEL_LEN = 4096


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add = parser.add_argument
    add_sampling_options(parser, "as many as fit")
    add(
        "--max-model-len",
        type=integer(1),
        metavar="N",
        help="tokens of the conversation at most; beyond, its oldest turns are "
        f"forgotten (default: {MAX_MODEL_LEN}, or what the model was trained for)",
    )
    add(
        "--url",
        type=server_url,
        help="ask a server that speaks OpenAI's interface, and load no model",
    )
    add(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("OPENAI_API_KEY"),
        help="for servers that want one (default: the variable OPENAI_API_KEY)",
    )
    add(
        "--verbose",
        action="store_true",
        help="say after each answer how many tokens there were, and how fast",
    )
    add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk, and return the exit code."""
    if sys.stdin is None:
        raise RequestError(
            "messages are read from standard input, which is closed: leave it open"
        )
    if arguments.system is not None:
        check_text(arguments.system)
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with contextlib.ExitStack() as stack:
        if arguments.url:
            answerer, name = ask_server(arguments), arguments.url
        else:
            answerer, name = load(arguments, stack), arguments.model
        chat = Chat(
            answerer,
            Conversation(arguments.system),
            Screen(is_interactive),
            arguments.verbose,
        )
        if is_interactive:
            say(f"chatting with {name}; /help lists the commands")
        talk(chat, Reader(is_interactive), is_interactive)
    return 0


def load(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> "Answerer":
    """Load a model, with a cache for one conversation."""
    apply_model_options(arguments)
    # Imported only now: NumPy and torch read the number of threads when they load.
    from minivllm.cli.answerers import LocalAnswerer
    from minivllm.llm import LLM
    from minivllm.loading.hub import resolve_model
    from minivllm.loading.loader import load_spec
    from minivllm.sampling.params import SamplingParams
    from minivllm.text.tokenizer import Tokenizer

    # Whatever can be refused is refused before the weights are read.
    seed = secrets.randbits(64) if arguments.seed is None else arguments.seed
    params = SamplingParams(
        seed=seed,
        max_tokens=arguments.max_tokens,
        split_reasoning=True,
        **sampling_wishes(arguments),
    )
    folder = resolve_model(arguments.model, progress=True)
    tokenizer = Tokenizer.from_dir(folder)
    if tokenizer.chat_template is None:
        raise RequestError(
            "this model has no chat template, so it cannot chat: use minivllm generate "
            "--raw to let it continue a text"
        )
    variables = tokenizer.check_template_kwargs(arguments.chat_template_kwargs)
    trained = load_spec(folder).max_position_embeddings
    context = arguments.max_model_len or min(MAX_MODEL_LEN, trained)
    block_size = math.gcd(context, 16)  # the last block ends with the context
    llm = stack.enter_context(
        LLM(
            folder,
            backend=arguments.backend,
            dtype=arguments.dtype,
            device=arguments.device,
            block_size=block_size,
            num_blocks=context // block_size,
            max_num_seqs=1,
            enforce_eager=arguments.enforce_eager,
            max_model_len=context,
        )
    )
    reserve = min(arguments.max_tokens or RESERVE, max(1, context // 4))
    return LocalAnswerer(llm, params, variables, reserve)


def ask_server(arguments: argparse.Namespace) -> "Answerer":
    """Return what asks a server, for the model that is named or its first one."""
    from minivllm.cli.answerers import ServerAnswerer

    defaults = {"backend": "auto", "dtype": "auto", "device": "auto", "threads": None}
    for name, default in (defaults | {"max_model_len": None}).items():
        if getattr(arguments, name) != default:
            arguments.refuse(
                f"argument --{name.replace('_', '-')}: with --url, the server decides "
                "that: leave it out"
            )
    fields = {
        "max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
        "chat_template_kwargs": arguments.chat_template_kwargs or None,
        **sampling_wishes(arguments),
    }
    answerer = ServerAnswerer(arguments.url, arguments.api_key)
    names = answerer.models()
    is_named = arguments.model in names or arguments.model != DEFAULT_MODEL
    fields["model"] = arguments.model if is_named else names[0]
    answerer.fields = {k: v for k, v in fields.items() if v not in (None, [])}
    return answerer
