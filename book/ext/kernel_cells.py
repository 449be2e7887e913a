"""Sphinx extension: CUDA code in a cell's raw string is coloured as CUDA code.

A chapter writes a kernel as a raw string. To Python that is one string of one colour;
here its inside goes to the lexer for CUDA, and the rest to that for Python.
"""

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from pygments.lexer import Lexer
from pygments.lexers import CudaLexer, PythonLexer
from pygments.token import String
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

NAME = "python-with-cuda"
RAW_STRING = re.compile(r'(r""")(.*?)(""")', re.DOTALL)
# What CUDA code has and other raw strings do not.
IS_CUDA = re.compile(r"__(global|device|shared)__|#pragma once|#include \"|template <")


class PythonWithCuda(Lexer):
    """Python whose raw strings are CUDA C++."""

    name = "Python with CUDA"
    aliases = (NAME,)

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, Any, str]]:
        """Yield (position, type, piece), as lexers do."""
        at = 0
        for found in RAW_STRING.finditer(text):
            if not IS_CUDA.search(found[2]):
                continue
            yield from moved(PythonLexer(), text[at : found.start()], at)
            yield found.start(1), String, found[1]
            yield from moved(CudaLexer(), found[2], found.start(2))
            yield found.start(3), String, found[3]
            at = found.end()
        yield from moved(PythonLexer(), text[at:], at)


def moved(lexer: Lexer, text: str, start: int) -> Iterator[tuple[int, Any, str]]:
    """Yield the tokens of a piece of a text that begins at a position."""
    for position, kind, piece in lexer.get_tokens_unprocessed(text):
        yield start + position, kind, piece


class KernelCells(SphinxTransform):
    """Choose the lexer for the cells that hold CUDA code."""

    default_priority = 900

    def apply(self) -> None:
        """Mark every such block of the document."""
        for block in self.document.findall(nodes.literal_block):
            strings = RAW_STRING.findall(block.astext())
            if any(IS_CUDA.search(inside) for _, inside, _ in strings):
                block["language"] = NAME


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the lexer and the transform."""
    app.add_lexer(NAME, PythonWithCuda)
    app.add_transform(KernelCells)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
