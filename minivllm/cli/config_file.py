"""Options from a file: `--config FILE`, for every subcommand.

    # chat.toml
    model = "Qwen/Qwen3-0.6B"
    temperature = 0.6
    stop = ["User:", "Bot:"]
    chat-template-kwargs = { enable_thinking = false }

Invariant: a file says nothing that the command line could not. Its entries become
options that are parsed and refused as if they had been typed, and what was typed wins.
Called by the parser of the command line.

In vLLM: vllm/utils/argparse_utils.py (FlexibleArgumentParser.load_config_file), whose
files are YAML.
Source: appendix A34, "A chat in the terminal".
"""

import argparse
import difflib
import itertools
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "--config"


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a file with further options."""
    parser.add_argument(
        CONFIG,
        metavar="FILE",
        help="a TOML file with further options, by their long names: top-p = 0.9; what "
        "is given here on the command line wins",
    )


def read_options(path: str, known: Mapping[str, argparse.Action]) -> dict[str, Any]:
    """Read a file and return a value for each option that it names.

    Args:
        path: A TOML file.
        known: The options that there are, with their dashes.

    Raises:
        argparse.ArgumentTypeError: The file cannot be read, or an entry is no option.
    """
    try:
        entries = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot read {path} ({error.strerror})"
        ) from None
    except ValueError as error:  # also of a text that is no UTF-8
        raise argparse.ArgumentTypeError(f"{path} is no TOML ({error})") from None
    names = [name for name in known if name.startswith("--")]
    names = [name for name in names if name not in (CONFIG, "--help", "--version")]
    options: dict[str, Any] = {}
    for key, value in entries.items():
        option = "--" + key.replace("_", "-")
        if option not in names:
            nearest = difflib.get_close_matches(option, names, n=1)
            hint = f": did you mean {nearest[0][2:]}?" if nearest else ""
            raise argparse.ArgumentTypeError(f"{path} has unknown option {key}{hint}")
        if option in options:
            raise argparse.ArgumentTypeError(
                f"{path} has {option[2:]} twice, once with _: leave one of the two out"
            )
        options[option] = value
    return options


def as_arguments(option: str, action: argparse.Action, value: Any) -> list[str]:
    """Return what one would type for an entry of a file.

    Raises:
        argparse.ArgumentTypeError: A value for a switch, or a list for one value.
    """
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise argparse.ArgumentTypeError(
                f"{option[2:]} is {value!r} in the file, but must be true or false"
            )
        opposite = option.replace("--", "--no-", 1)
        if value:
            return [option]
        return [opposite] if opposite in action.option_strings else []
    takes_many = isinstance(action, argparse._AppendAction) or action.nargs in (
        "*",
        "+",
    )
    if isinstance(value, list) and not takes_many:
        raise argparse.ArgumentTypeError(
            f"{option[2:]} is a list in the file, but takes one value"
        )
    values = value if isinstance(value, list) else [value]
    texts = [
        json.dumps(one, default=str)
        if isinstance(one, bool | list | dict)
        else str(one)
        for one in values
    ]
    if action.nargs is None:
        return [f"{option}={text}" for text in texts]
    return [option, *texts]


def options_in(arguments: Sequence[str]) -> list[str]:
    """Return the names of the options among arguments, those behind -- left out."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    names = (re.match(r"--?[A-Za-z][\w-]*(?==|$)", text) for text in arguments[:end])
    return [name[0] for name in names if name]


@dataclass(frozen=True, slots=True)
class FileOptions:
    """What a file adds to a command line.

    Attributes:
        path: The file.
        names: The options that it gives, less those that were typed.
        arguments: The same, as one would type them.
    """

    path: str
    names: list[str]
    arguments: list[str]

    def add_to(self, argv: Sequence[str]) -> list[str]:
        """Return a command line with them; what stands behind `--` stays there."""
        end = argv.index("--") if "--" in argv else len(argv)
        return [*argv[:end], *self.arguments, *argv[end:]]


def find_file_options(
    argv: Sequence[str], known: Mapping[str, argparse.Action]
) -> FileOptions | None:
    """Read the file that a command line names; the last one if there are several.

    Args:
        argv: The command line.
        known: The options, with their dashes; what may be typed without a name, such
            as the model to serve, is there as if it were an option. The file changes
            its default.

    Raises:
        argparse.ArgumentTypeError: The file is impossible.
    """
    argv = argv[: argv.index("--")] if "--" in argv else argv
    path = None
    for text, following in itertools.zip_longest(argv, argv[1:]):
        option, is_joined, value = text.partition("=")
        if option == CONFIG:
            path = value if is_joined else following
    if path is None:
        return None
    typed = {known[name] for name in options_in(argv) if name in known}
    names, arguments = [], []
    for option, value in read_options(path, known).items():
        action = known[option]
        if not action.option_strings:
            [_, action.default] = as_arguments(option, action, value)
        elif action not in typed:
            names.append(option)
            arguments += as_arguments(option, action, value)
    return FileOptions(path, names, arguments)
