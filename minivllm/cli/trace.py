"""The subcommand `trace`: turn a trace into a page with a time slider.

The page is one file and needs no network, so it can be sent to somebody.

In vLLM: there is no such command.
Source: appendix A8, "Traces".
"""

import argparse
import webbrowser
from pathlib import Path

from minivllm.engine.trace import read_trace
from minivllm.errors import ConfigError
from minivllm.loading.atomic import atomic_file
from minivllm.viewer.frames import viewer_data
from minivllm.viewer.page import page, summary

EXAMPLES = """\
examples:
  minivllm trace trace.jsonl --open
  minivllm trace trace.jsonl --out report.html

record a trace in Python with LLM(trace="trace.jsonl")
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="a trace, such as trace.jsonl")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write the page (default: beside the trace, with .html)",
    )
    add("--open", action="store_true", help="show the page in the web browser")


def run(arguments: argparse.Namespace) -> int:
    """Write the page, say where, and return the exit code."""
    header, records = read_trace(arguments.file)
    out = arguments.out or arguments.file.with_suffix(".html")
    if out.exists() and out.samefile(arguments.file):
        raise ConfigError(
            f"--out is {out}, the trace itself, which the page would replace: name "
            "another file"
        )
    data = viewer_data(header, records)
    text = page(header, data, title=f"Trace {arguments.file.name}")
    with atomic_file(out) as file:
        file.write(text.encode())
    print(summary(header, data))
    print(f"the page is in {out}")
    if arguments.open:
        webbrowser.open(out.resolve().as_uri())
    return 0
