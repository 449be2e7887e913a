"""The pictures of what a kernel's threads did say what the trace says."""

import re

import numpy as np
import pytest

from bookkit import draw
from minivllm.ops.kernel_trace import ACCESS, Memory, Trace, Turn

READ, WRITE = 0, 1
X, OUT, SHARED = 0, 1, -1  # arguments first; -1 is the first shared variable


def trace_of(
    rows: list[tuple[int, int, int, int, int, int, int]], turns: list[Turn] = ()
) -> Trace:
    """Make a trace of (block, thread, code, kind, memory, offset, bytes)."""
    accesses = np.zeros(len(rows), ACCESS)
    names = ("block", "thread", "code", "kind", "memory", "offset", "bytes")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        accesses[name] = column
    memories = [Memory("x", False), Memory("out", False), Memory("sums", True)]
    places = {code: f"a.cu:{code}" for code in {row[2] for row in rows}}
    return Trace(accesses, places, memories, 2, list(turns))


def loads(stride: int, num: int = 32, memory: int = X, bytes_: int = 4) -> Trace:
    """Let lane i of a warp load number i * stride."""
    return trace_of(
        [(0, i, 1, READ, memory, 4 * i * stride, bytes_) for i in range(num)]
    )


def cells(html: str) -> list[str]:
    """Return what stands in the places of a picture."""
    return re.findall(r"<i[^>]*>([^<]*)</i>", html)


def test_each_place_shows_the_thread_that_touched_it():
    rows = [(1, i % 2, 1, WRITE, OUT, 4 * i, 4) for i in range(4)]
    figure = draw.touched(trace_of(rows), "out", (2, 4), "write")
    assert cells(figure.body) == ["0", "1", "0", "1", ""]
    assert "row 1: 4 by none" in str(figure)
    assert "block" not in figure.body  # there is one
    rows.append((0, 0, 1, WRITE, OUT, 16, 4))
    figure = draw.touched(trace_of(rows), "out", (2, 4), "write")
    assert "row 0, block 1" in figure.body and "row 1, block 0" in figure.body


def test_neighbours_of_one_thread_are_one_piece():
    trace = trace_of([(0, 0, 1, READ, X, 0, 16), (0, 1, 1, READ, X, 16, 16)])
    figure = draw.touched(trace, "x", (1, 8))
    assert cells(figure.body) == ["0", "1"]
    assert figure.body.count("grid-column:span 4") == 2


@pytest.mark.parametrize(("num", "label"), [(2, "0,1"), (5, "0–4")])  # noqa: RUF001
def test_a_place_that_several_threads_read_names_them(num, label):
    trace = trace_of([(0, i, 1, READ, X, 0, 4) for i in range(num)])
    assert cells(draw.touched(trace, "x", (1, 1)).body) == [label]


def test_small_numbers_have_a_size_of_their_own():
    trace = trace_of([(0, 3, 1, READ, X, 2, 2)])
    assert cells(draw.touched(trace, "x", (1, 2), itemsize=2).body) == ["", "3"]


def test_a_shape_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="at number 1, but a shape of"):
        draw.touched(loads(1, num=4), "x", (1, 1))


def test_an_unknown_memory_or_kind_is_refused():
    with pytest.raises(ValueError, match="choose from x, out, sums"):
        draw.touched(loads(1), "y", (1, 32))
    with pytest.raises(ValueError, match="choose from read, write"):
        draw.touched(loads(1), "x", (1, 32), "look")


@pytest.mark.parametrize(("stride", "num_sectors"), [(1, 4), (2, 8), (3, 12), (8, 32)])
def test_the_sectors_of_a_load_are_those_of_the_trace(stride, num_sectors):
    trace = loads(stride)
    figure = draw.sectors({"v1": trace}, "x")
    assert trace.sectors("x") == num_sectors
    assert figure.body.count('class="mv-sector"') == num_sectors
    assert f"{num_sectors} sectors move: {32 * num_sectors:,} bytes" in str(figure)
    assert sorted(filter(None, cells(figure.body)), key=int) == [*map(str, range(32))]


def test_the_nth_load_of_each_lane_is_drawn():
    first = [(0, i, 1, READ, X, 4 * i, 4) for i in range(32)]
    second = [(0, i, 2, READ, X, 4096 + 4 * i, 4) for i in range(32)]
    trace = trace_of([x for pair in zip(first, second, strict=True) for x in pair])
    assert "byte 4,096" in draw.sectors({"": trace}, "x", nth=1).body
    with pytest.raises(ValueError, match="reads x 3 times"):
        draw.sectors({"": trace}, "x", nth=2)


@pytest.mark.parametrize("stride", [1, 2, 4, 32, 33])
def test_the_passes_of_shared_memory_are_those_of_the_trace(stride):
    trace = loads(stride, memory=SHARED)
    figure = draw.banks({"v": trace}, "sums")
    passes = 1 + trace.bank_conflicts("sums")
    assert f"{passes} passes for 1 reads" in str(figure)
    assert ("mv-again" in figure.body) == (passes > 1)


def test_lanes_that_sit_out_do_not_shift_the_others():
    rows = [(0, i, 1, READ, SHARED, 4 * i, 4) for i in range(32)]
    rows += [(0, i, 1, READ, SHARED, 4 * i, 4) for i in range(16)]
    assert "0: 32 lanes" in draw.banks({"": trace_of(rows)}, "sums").body
    assert "1: 16 lanes" in draw.banks({"": trace_of(rows)}, "sums").body


def test_barriers_are_where_all_threads_have_arrived():
    turns = [
        Turn(0, thread, "__syncthreads", f"a.cu:{line}", 0)
        for line in (5, 9)
        for thread in range(4)
    ]
    turns += [Turn(0, thread, "", "", 0) for thread in range(4)]
    figure = draw.turns(trace_of([(0, 0, 1, READ, X, 0, 4)], turns), num_threads=4)
    assert figure.body.count("mv-barrier") == 2
    assert "barrier 0: a.cu:5\n  barrier 1: a.cu:9" in str(figure)
    assert figure.body.count("<rect") == 12


def test_a_block_without_threads_is_refused():
    with pytest.raises(ValueError, match="block 3 has no such threads"):
        draw.turns(loads(1), block=3)


def test_the_same_trace_gives_the_same_bytes():
    traces = {"a": loads(1), "b": loads(8)}
    first, second = (draw.sectors(traces, "x")._repr_html_() for _ in range(2))
    assert first == second
