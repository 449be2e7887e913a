"""Teaching helpers of the book: figures, guesses, measurements and checks.

Chapters write `from bookkit import bench, check, draw, predict`. The package
`minivllm` never imports this one, so that the engine stays free of teaching code.
"""

from contextlib import AbstractContextManager


def style() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws in the book's house style."""
    # Imported late: most chapters draw no curve and need no matplotlib.
    from bookkit.figures.plot import style

    return style()
