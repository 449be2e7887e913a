"""The `minivllm` command: find the subcommand, run it, turn errors into exit codes.

Invariant: whatever a user can do wrong ends in a message without a traceback and in
one of the exit codes below; a traceback is a bug of ours. Only the module of the
named subcommand is imported, so `--help` loads no array library.

In vLLM: vllm/entrypoints/cli/main.py.
Source: appendix A4, "The command line"; appendix A8, "Traces"; appendix A9,
    "Measuring"; appendix A16, "Launching kernels"; appendix A23, "Reading families";
    appendix A31, "Load"; appendix A32, "A server that stays up"; appendix A34, "A chat
    in the terminal".
"""

import argparse
import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Collection, Sequence
from typing import NoReturn

from minivllm import __version__
from minivllm.cli.config_file import (
    CONFIG,
    FileOptions,
    add_config_option,
    find_file_options,
    options_in,
)
from minivllm.errors import MinivllmError

# Exit codes, beside 0 for done.
FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

# Subcommand: its module, and one line for --help.
COMMANDS = {
    "generate": ("minivllm.cli.generate", "answer a prompt, or continue a text"),
    "trace": ("minivllm.cli.trace", "show what the engine did, step by step"),
    "bench": ("minivllm.cli.bench", "measure how fast the engine is on this machine"),
    "ops": ("minivllm.cli.ops", "say what runs each operation, and why"),
    "check": (
        "minivllm.cli.check",
        "say what a checkpoint is, and whether it is computed as it should be",
    ),
    "bench serve": ("minivllm.cli.bench_serve", "send many requests to a server"),
    "serve": ("minivllm.cli.serve", "answer over HTTP, to any client of OpenAI's"),
    "chat": ("minivllm.cli.chat", "talk with a model, or with a server"),
}

EXIT_CODES = """\
exit codes:
  0    done
  1    failed: a model is missing, a file is damaged, a request is impossible
  2    wrong usage: an unknown option, an impossible value
  130  interrupted by Ctrl-C; what was written so far stays
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors our way and completes no option."""

    _file: FileOptions | None = None

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"{epilog}\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Report wrong usage in one line and exit."""
        named = re.match(r"argument (--[\w-]+)", message)
        if self._file and named and named[1] in self._file.names:
            message = f"in {self._file.path}: {message}"
        self.exit(WRONG_USAGE, f"minivllm: error: {message}; see {self.prog} --help\n")

    def refuse(self, kind: str, name: str, known: Collection[str]) -> NoReturn:
        """Report an unknown name, with the nearest known one, and exit."""
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean {nearest[0]}?" if nearest else ""
        self.error(f"unknown {kind} {name}{hint}")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments, every one of them, or exit."""
        known = self._option_string_actions
        for option in options_in(argv):
            # argparse would complain of something else first, or take an option
            # with a space in its value for text.
            if option not in known:
                self.refuse("option", option, known)
        if CONFIG in known:
            unnamed = [a for a in self._actions if not a.option_strings]
            optional = {f"--{a.dest}": a for a in unnamed if a.nargs == "?"}
            try:
                self._file = find_file_options(argv, optional | known)
            except argparse.ArgumentTypeError as error:
                self.error(f"argument {CONFIG}: {error}")
            argv = self._file.add_to(argv) if self._file else argv
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(f"{unknown[0]!r} is one argument too many: put a text in quotes")
        return arguments


def top_level_parser() -> Parser:
    """Return the parser for a command line that begins with no subcommand."""
    commands = "".join(f"  {name:12}{text}\n" for name, (_, text) in COMMANDS.items())
    parser = Parser(
        prog="minivllm",
        description="A small LLM inference engine, built by the chapters of a book.",
        epilog=f"commands (each has its own --help):\n{commands}\n"
        'example:\n  minivllm generate "Why is the sky blue?"\n',
    )
    version = f"minivllm {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("command", metavar="COMMAND", help="what to do, see below")
    return parser


def find_command(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the subcommand that the arguments begin with, and its own arguments.

    Its name may have two words, such as `bench serve`; then these are preferred.
    """
    for num_words in (2, 1):
        name = " ".join(argv[:num_words])
        if name in COMMANDS:
            return name, argv[num_words:]
    parser = top_level_parser()
    parser.refuse("command", parser.parse(argv[:1]).command, COMMANDS)


def dispatch(argv: Sequence[str]) -> int:
    """Run the subcommand that the arguments name and return its exit code."""
    name, rest = find_command(argv)
    module_name, description = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = Parser(f"minivllm {name}", description, module.EXAMPLES)
    module.configure(parser)
    add_config_option(parser)
    return module.run(parser.parse(rest))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; `sys.argv` by default.

    Returns:
        The exit code. Wrong usage, `--help` and `--version` raise SystemExit.
    """
    if sys.stderr is None:  # closed: print would take standard output instead
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        print(
            "minivllm: error: standard output is closed, so there is no place for the "
            "answer: leave it open, or send it to a file with > FILE",
            file=sys.stderr,
        )
        return FAILED
    for stream in (sys.stdout, sys.stderr):
        # Models write any character, whatever the locale can spell.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        try:
            return dispatch(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("minivllm: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()  # the reader has all it wanted, as in `minivllm ... | head`
        return 0
    except MinivllmError as error:
        print(f"minivllm: error: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        discard_output()
        print(f"minivllm: error: cannot read or write ({error})", file=sys.stderr)
        return FAILED


def discard_output() -> None:
    """Give up a standard output that cannot be written; Python would retry at exit."""
    if sys.stdout is sys.__stdout__:
        sys.stdout = open(os.devnull, "w")
