"""The figures of the book, drawn from live objects.

Make one the last expression of a cell. Each shows HTML that follows the light and the
dark page, needs no network and no kernel, and prints as text where no HTML is shown.
The same data gives the same bytes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from bookkit.figures import attention as _attention
from bookkit.figures import block as _block
from bookkit.figures import block_tables as _block_tables
from bookkit.figures import kernels as _kernels
from bookkit.figures import ladder as _ladder
from bookkit.figures import pipeline as _pipeline
from bookkit.figures import player as _player
from bookkit.figures import sampling as _sampling
from bookkit.figures import table as _table
from bookkit.figures import tokens as _tokens
from bookkit.figures.base import Figure
from bookkit.figures.ladder import Rung

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure

    from bookkit.figures.sampling import LiveSampling
    from minivllm.models.spec import ModelSpec

__all__ = [
    "Figure",
    "Rung",
    "attention",
    "attention_heads",
    "banks",
    "block",
    "block_tables",
    "curve",
    "figure",
    "labels",
    "ladder",
    "pipeline",
    "player",
    "sampling",
    "sampling_widget",
    "sectors",
    "slots",
    "table",
    "timeline",
    "tokens",
    "top_tokens",
    "touched",
    "trace",
    "turns",
]


class HasTokenBytes(Protocol):
    """What the figures need of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the raw bytes of one token."""


def pipeline(
    here: str | Iterable[str] | None = None, built: Iterable[str] = ()
) -> Figure:
    """Draw the engine's pipeline with this chapter's stages lit.

    Args:
        here: The stage or stages of this chapter.
        built: Those that earlier chapters built.
    """
    return _pipeline.pipeline(here, built)


def ladder(
    rungs: Sequence[Rung | tuple[int | str, str, float | None]],
    here: int | str | None = None,
    unit: str = "tokens/s",
) -> Figure:
    """Draw the speed ladder: one bar per chapter on a log scale.

    Args:
        rungs: (chapter, name, speed); None as speed means "to come".
        here: The chapter whose rung is lit.
        unit: Unit of the speeds.
    """
    return _ladder.ladder(rungs, here, unit)


def tokens(
    tokenizer: HasTokenBytes,
    token_ids: Sequence[int],
    num_prompt_tokens: int | None = None,
    request: str = "A",
) -> Figure:
    """Draw a text as the pieces a model sees, each with its id.

    Args:
        tokenizer: Where the bytes of a token come from.
        token_ids: The tokens.
        num_prompt_tokens: If given, so many pieces are filled (the prompt) and the
            others outlined (generated), in the hue of `request`.
        request: The letter of the request.
    """
    return _tokens.tokens(tokenizer, token_ids, num_prompt_tokens, request)


def labels(tokenizer: HasTokenBytes, token_ids: Sequence[int]) -> list[str]:
    """Return the visible text of each token, short enough for a figure."""
    return _tokens.labels(tokenizer, token_ids)


def top_tokens(tokenizer: HasTokenBytes, logits: Any, k: int = 5) -> Figure:
    """Draw the k likeliest next tokens with their probabilities.

    Args:
        tokenizer: Where the bytes of a token come from.
        logits: [vocab_size], NumPy or torch; the softmax is taken here.
        k: How many rows.
    """
    return _table.top_tokens(tokenizer, logits, k)


def sampling(
    tokenizer: HasTokenBytes,
    logits: Any,
    *,
    num_tokens: int = 24,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    label: str = "",
) -> Figure:
    """Draw a next-token distribution behind the knobs of sampling, as sliders.

    Bars show each token's probability as the model gives it and as it is drawn with;
    a last slider is the random number, which picks a token.

    The tokens with a bar are recorded to 0.00001 of a score; the others in groups no
    wider than w = 0.015, as so many tokens of the mean score. At temperature T this
    changes a probability by at most about w² / 8T² of it: 0.3 % at 0.1, 0.003 % at 1.
    Where min_p or top_p cuts among the others, the cut is off by a group at most.

    The random number picks the token that the engine's sampler picks, unless some of
    the others stay: they lie last here, and among all the ids there.

    Args:
        tokenizer: Where the bytes of a token come from.
        logits: [vocab_size], finite, NumPy or torch.
        num_tokens: The best tokens, one bar each; the others share one.
        temperature: Where the sliders start; from 0 (greedy) to 2.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off. These three and the temperature are rounded to hundredths.
        label: What the figure is called.
    """
    knobs = _sampling.checked(temperature, top_k, top_p, min_p)
    return _sampling.sampling(tokenizer, logits, num_tokens, knobs, label)


def sampling_widget(
    tokenizer: HasTokenBytes, logits: Any, *, num_tokens: int = 24
) -> "LiveSampling":
    """Show `sampling` behind sliders of ipywidgets, each move of which calls Python.

    In a notebook that a program has run, and so in the book, a line stands there that
    says so.
    """
    return _sampling.LiveSampling(tokenizer, logits, num_tokens)


def table(
    rows: Sequence[Sequence[Any]],
    header: Sequence[str],
    caption: str = "",
    align: str | None = None,
) -> Figure:
    """Draw a table.

    Args:
        rows: The cells; numbers are written with thousands separators.
        header: One name per column.
        caption: Stands above the table.
        align: One of "l", "r" or "c" (code, left) per column; by default numbers go
            right.
    """
    return _table.table(rows, header, caption, align)


def block(spec: "ModelSpec") -> Figure:
    """Draw one decoder block with the shapes and parameter counts of `spec`."""
    return _block.block(spec)


def attention(weights: Any, labels: Sequence[str], title: str = "") -> Figure:
    """Draw the attention weights of one head; what looks ahead is red.

    Args:
        weights: [queries, keys], NumPy or torch, each row a probability distribution.
        labels: The text of each token.
        title: Which layer and head.
    """
    return _attention.attention(weights, labels, title)


def attention_heads(
    weights: Any,
    labels: Sequence[str],
    layers: Sequence[int | str] | None = None,
    start: tuple[int, int] = (0, 0),
) -> Figure:
    """Draw the attention of many heads behind two sliders.

    Args:
        weights: [layers, heads, queries, keys], NumPy or torch. Recorded in 62 shades.
        labels: The text of each token.
        layers: What to call the layers, if they are not 0, 1, 2, ...
        start: (layer, head) shown first, as indices into `weights`.
    """
    return _attention.attention_heads(weights, labels, layers, start)


def curve(
    x: Sequence[float],
    y: Sequence[Any] | Mapping[str, Sequence[Any]],
    predicted: (
        Callable[[float], float]
        | tuple[Sequence[float], Sequence[float]]
        | Sequence[float]
        | None
    ) = None,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    alt: str = "",
    logx: bool = False,
    logy: bool = False,
) -> Figure:
    """Plot measurements, and dashed the curve that an estimate predicts.

    Args:
        x: Places on the x axis.
        y: A number or a `bench.Measurement` for each (its minimum and maximum become
            whiskers), or several such lists by name.
        predicted: A function of x, a pair (x, y), or one value for each x.
        xlabel: With its unit.
        ylabel: With its unit. Measurements are in seconds.
        title: What the plot answers.
        alt: What a screen reader says; by default the plotted values.
        logx: Logarithmic x axis.
        logy: Logarithmic y axis.
    """
    # Imported here: matplotlib takes half a second, and most cells need none of it.
    from bookkit.figures import plot

    return plot.curve(x, y, predicted, xlabel, ylabel, title, alt, logx, logy)


def figure(fig: "MplFigure", alt: str) -> Figure:
    """Show any matplotlib figure as SVG that follows the light and the dark page.

    Args:
        fig: Made in `with bookkit.style():`, whose colours are exchanged.
        alt: What the plot shows, in a sentence.
    """
    from bookkit.figures import plot

    return plot.figure(fig, alt)


def slots(
    block_ids: Mapping[str, Sequence[int]],
    num_tokens: Mapping[str, int],
    num_prompt_tokens: Mapping[str, int] | None = None,
    *,
    num_blocks: int,
    block_size: int,
    cached_blocks: Collection[int] = (),
) -> Figure:
    """Draw the block tables and the slots they point to.

    Args:
        block_ids: Request to its blocks, in token order.
        num_tokens: Request to the tokens whose keys and values are in the cache.
        num_prompt_tokens: Request to how many of them are its prompt; default all.
        num_blocks: Blocks in the cache.
        block_size: Slots in a block.
        cached_blocks: Blocks whose content is known; those that are free are striped.
    """
    return _block_tables.slots(
        block_ids, num_tokens, num_prompt_tokens, num_blocks, block_size, cached_blocks
    )


def block_tables(
    frames: Sequence[Mapping[str, Any]], *, num_blocks: int, block_size: int
) -> Figure:
    """Draw the block tables over time, with a slider.

    Args:
        frames: One mapping per step with `event` (a sentence), the first three
            arguments of `slots` and, where there are any, `cached_blocks`.
        num_blocks: Blocks in the cache.
        block_size: Slots in a block.
    """
    return _block_tables.block_tables(frames, num_blocks, block_size)


def player(
    figures: Sequence[Figure], captions: Sequence[str], label: str = "Steps"
) -> Figure:
    """Put figures behind a slider, one caption each."""
    return _player.player(figures, captions, label)


def timeline(
    runs: Mapping[str, Sequence[Mapping[str, Any]]] | Sequence[Mapping[str, Any]],
    requests: Sequence[str],
    title: str = "",
) -> Figure:
    """Draw the life of requests over time: waiting, prompt, answer.

    Args:
        runs: The step records of an engine (`engine.listeners`), or several lists of
            them by name, drawn above one another on one time axis.
        requests: The ids of the requests, one row each.
        title: What the figure answers.
    """
    # Imported here: matplotlib takes half a second.
    from bookkit.figures import timeline as _timeline

    named = runs if isinstance(runs, Mapping) else {"": runs}
    return _timeline.timeline(named, title, list(requests))


def trace(
    records: Sequence[Mapping[str, Any]],
    *,
    block_size: int,
    tokenizer: HasTokenBytes | None = None,
    label: str = "The engine at work",
) -> Figure:
    """Draw what an engine did, with a slider: queues, batch, block tables, pool.

    Args:
        records: From `engine.listeners.append(records.append)`, or a trace file.
        block_size: Slots in a block.
        tokenizer: Shows new tokens as text instead of ids.
        label: What the figure is called.
    """
    # Imported here: only the chapters that draw a trace need the package's viewer.
    from bookkit.figures import trace as _trace

    return _trace.trace(records, block_size, tokenizer, label)


def touched(
    trace: Any,
    memory: str,
    shape: tuple[int, int],
    kind: str = "read",
    *,
    row_name: str = "row",
    itemsize: int = 4,
) -> Figure:
    """Draw an array with the threads of a kernel that read or write it.

    Args:
        trace: From an emulated kernel's `trace`.
        memory: An argument or a shared variable.
        shape: Rows and columns to draw it in.
        kind: "read" or "write".
        row_name: What to call a row.
        itemsize: Bytes of a number.
    """
    return _kernels.touched(trace, memory, shape, kind, row_name, itemsize)


def sectors(
    traces: Mapping[str, Any],
    memory: str,
    kind: str = "read",
    *,
    nth: int = 0,
    itemsize: int = 4,
) -> Figure:
    """Draw the sectors that memory moves for one instruction of the first warp.

    Args:
        traces: Name to the trace of a launch.
        memory: An argument of the kernels.
        kind: "read" or "write".
        nth: Each lane's n-th such access, from 0.
        itemsize: Bytes of a number.
    """
    return _kernels.sectors(traces, memory, kind, nth, itemsize)


def banks(
    traces: Mapping[str, Any],
    memory: str,
    kind: str = "read",
    *,
    max_rows: int = 8,
    bank_bytes: int = 4,
) -> Figure:
    """Draw how the first warp asks the banks of shared memory.

    Args:
        traces: Name to the trace of a launch.
        memory: A shared variable of the kernels.
        kind: "read" or "write".
        max_rows: Instructions that are drawn.
        bank_bytes: Bytes of a word.
    """
    return _kernels.banks(traces, memory, kind, max_rows, bank_bytes)


def turns(trace: Any, num_threads: int = 8, block: int = 0) -> Figure:
    """Draw when the threads of a block ran, and where they waited for each other.

    Args:
        trace: From an emulated kernel's `trace`.
        num_threads: Threads of the block.
        block: Its number.
    """
    return _kernels.turns(trace, num_threads, block)
