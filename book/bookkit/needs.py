"""Lets a notebook run on where something is missing that some of its cells need.

Such cells begin with a mark, a comment:

    # runs kernels

Where they cannot run, they say why in a line, and the cells after them go on.
"""

from collections.abc import Callable, Sequence
from typing import Any

Lines = list[str]


class _Skip:
    """A transformer of IPython's input: it exchanges the cells that begin so."""

    def __init__(self, mark: str, reason: str) -> None:
        self.mark = mark
        self.reason = reason

    def __call__(self, lines: Lines) -> Lines:
        if lines and lines[0].strip() == self.mark:
            return [f"print({f'not run: {self.reason}'!r})\n"]
        return lines


def skip_cells(mark: str, reason: str | None) -> None:
    """Skip the cells that begin with a mark, if there is a reason to.

    Args:
        mark: The first line of these cells, such as "# runs kernels".
        reason: Why they cannot run here, or None if they can.
    """
    shell = _shell()
    if shell is None:
        return  # a program that runs cells one by one: it shall see errors
    transformers: list[Callable[[Lines], Sequence[str]]]
    transformers = shell.input_transformers_cleanup
    # In place, and once, however often the cell with this call is run.
    transformers[:] = [
        old for old in transformers if not (isinstance(old, _Skip) and old.mark == mark)
    ]
    if reason is not None:
        transformers.append(_Skip(mark, reason))


def _shell() -> Any:
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return None
    return get_ipython()
