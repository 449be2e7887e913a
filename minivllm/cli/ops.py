"""The subcommand `ops`: which backend runs each op here, and why the others do not.

In vLLM: there is no such command; its log names the attention backend.
Source: appendix A16, "Launching kernels".
"""

import argparse
import os

from minivllm.cli.main import FAILED
from minivllm.cli.options import integer
from minivllm.errors import BackendUnavailable, MinivllmError

EXAMPLES = """\
examples:
  minivllm ops
  minivllm ops --device cuda --dtype float16
  MINIVLLM_OP_RMS_NORM=emulated minivllm ops

MINIVLLM_OP_<NAME> forces a backend, here and wherever the engine runs.
"""

# As the engine asks: some ops with the size of a head, some in the type of scores.
WITH_SIZES = ("reshape_and_cache", "paged_attention", "prefill_attention")
ON_SCORES = ("argmax", "draw")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add = parser.add_argument
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where a model would run (default: on the GPU if torch sees one)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="bfloat16",
        help="number type of its weights (default: %(default)s)",
    )
    add(
        "--head-dim",
        type=integer(1),
        default=64,
        metavar="N",
        help="numbers of one of its attention heads (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what runs each op, and return the exit code."""
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailable(
            f"ops belong to the torch backend, which needs PyTorch ({error}): install "
            "torch"
        ) from error
    from minivllm.ops.registry import explain, known_ops

    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{device}, {arguments.dtype}, heads of {arguments.head_dim} numbers")
    exit_code = 0
    for op in known_ops():
        dtype = "float32" if op in ON_SCORES else arguments.dtype
        sizes = {"head_dim": arguments.head_dim} if op in WITH_SIZES else {}
        print(f"\n{op}")
        try:
            verdicts = explain(op, device, dtype, **sizes)
        except MinivllmError as error:  # forced, but impossible; the others still count
            print(f"  {error}")
            exit_code = FAILED
            continue
        variable = f"MINIVLLM_OP_{op.upper()}"
        for backend, verdict in verdicts.items():
            if verdict == "chosen" and os.environ.get(variable):
                verdict = f"chosen, because {variable} says so"
            print(f"  {backend:10}{verdict}")
    return exit_code
