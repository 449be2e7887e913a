"""Options that several subcommands share: which model runs, and on what.

Called by the subcommands. Imports no array library, since NumPy and torch read the
number of threads when they load.

Source: appendix A4, "The command line"; appendix A21, "CUDA graphs".
"""

import argparse
import importlib.util
import os
import re
from collections.abc import Callable, Sequence

from minivllm.config import DEFAULT_MODEL


def integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return a parser of integers within limits, for argparse."""
    limits = f"at least {minimum}" + (f" and at most {maximum}" if maximum else "")

    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if value < minimum or (maximum and value > maximum):
            raise argparse.ArgumentTypeError(f"{text!r} is no integer of {limits}")
        return value

    return parse


def device(text: str) -> str:
    """Parse the name of a device, for argparse; whether it is there shows later."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no device: it must be auto, cpu, cuda, cuda:N or mps"
        )
    return text


def add_model_options(parser: argparse.ArgumentParser, *more_backends: str) -> None:
    """Add the options that say which model runs, and on what.

    Args:
        parser: Of the subcommand.
        more_backends: Beside auto, numpy and torch.
    """
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        help="a short name, a folder, a .gguf file or a hub id such as "
        "Qwen/Qwen3-0.6B (default: %(default)s, fetched at first use)",
    )
    add(
        "--backend",
        choices=("auto", "numpy", "torch", *more_backends),
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
        type=device,
        default="auto",
        help="cpu, cuda, cuda:N or mps (default: the GPU if torch sees one)",
    )
    add(
        "--threads",
        type=integer(1, os.cpu_count()),
        metavar="N",
        help="CPU threads to compute with (default: the library's choice)",
    )
    add(
        "--enforce-eager",
        action="store_true",
        help="use no CUDA graphs: start every kernel anew",
    )
    parser.set_defaults(refuse=parser.error)  # for what only shows with all options


def apply_model_options(arguments: argparse.Namespace) -> None:
    """Choose the backend, refuse what it cannot do, and set the number of threads."""
    if arguments.backend == "auto":
        has_torch = importlib.util.find_spec("torch") is not None
        arguments.backend = "torch" if has_torch else "numpy"
    limits: dict[str, Sequence[str]] = {
        "dtype": ("auto", "float32"),
        "device": ("auto", "cpu"),
    }
    for name, possible in limits.items():
        value = getattr(arguments, name)
        if arguments.backend == "numpy" and value not in possible:
            arguments.refuse(
                f"argument --{name}: the numpy backend has {possible[1]} only, not "
                f"{value}: leave it out, or use --backend torch"
            )
    if arguments.threads:
        limit_threads(arguments.threads)


def limit_threads(count: int) -> None:
    """Tell the libraries that are loaded later how many CPU threads to use."""
    for library in ("OMP", "OPENBLAS", "MKL", "VECLIB"):
        suffix = "MAXIMUM_THREADS" if library == "VECLIB" else "NUM_THREADS"
        os.environ[f"{library}_{suffix}"] = str(count)
