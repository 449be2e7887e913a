"""The tables at the top of the ladders say what the emulator counts."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from minivllm.ops import rungs
from minivllm.ops.kernel_trace import Trace
from tests.kernels.cases import KERNELS, Case, NormCase, SoftmaxCase, emulated
from tests.kernels.kinds import FILES, all_examples
from tests.kernels.prefill_cases import PrefillCase
from tests.kernels.tools import needs_compiler

EXAMPLES = all_examples()
NORMS, SOFTMAXES = NormCase.examples(), SoftmaxCase.examples()
TILES = PrefillCase.examples()[1:]
# A version, words, and four numbers.
ROW = re.compile(r"^//   (\w+) .*?((?: +[\d,]+){4})$", re.MULTILINE)


class Traced(Mapping):
    """Runs kernels and keeps what they did."""

    def __init__(self, kernels: rungs.Kernels) -> None:
        self.kernels = kernels
        self.traces: list[Trace] = []

    def __getitem__(self, name: str) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            self.traces.append(self.kernels[name].trace(*arguments, **options))

        return run

    def __iter__(self) -> Any:
        return iter(self.kernels)

    def __len__(self) -> int:
        return len(self.kernels)


def traced(case: Case) -> list[Trace]:
    """Run a case, and return what each of its kernels did."""
    kernels = Traced(emulated([case]))
    case.run(kernels)
    return kernels.traces


def global_instructions(trace: Trace) -> int:
    """Count the loads and stores of warps, without those of shared memory."""
    return int((trace.instructions.sectors > 0).sum())


def rows_of(file: str) -> dict[str, str]:
    """Return the table at the top of a file: version, and its numbers."""
    return dict(ROW.findall((KERNELS / file).read_text()))


@needs_compiler
@pytest.mark.parametrize("case", EXAMPLES, ids=lambda c: f"{c.file}-{c.version}")
def test_a_row_of_the_table_is_what_the_emulator_counts(case):
    traces = traced(case)
    counted = [
        sum(trace.bytes_read() for trace in traces),
        sum(trace.bytes_written() for trace in traces),
        sum(trace.sectors() for trace in traces),
        sum(map(global_instructions, traces)),
    ]
    written = rows_of(case.file)[case.version].replace(",", "").split()
    assert [int(number) for number in written] == counted


@pytest.mark.parametrize("file", FILES)
def test_every_row_of_a_table_is_counted(file):
    counted = [case.version for case in EXAMPLES if case.file == file]
    assert list(rows_of(file)) == counted


@needs_compiler
def test_the_fused_rung_touches_each_number_once():
    """The bytes that `benchmarks.kernels` reckons a perfect kernel would move."""
    case = NORMS[4]
    (trace,) = traced(case)
    row = case.num_rows * case.hidden * 4
    assert trace.bytes_read("residual") == trace.bytes_read("x") == row
    assert trace.bytes_written("residual") == trace.bytes_written("out") == row


@needs_compiler
def test_packs_of_a_warp_move_no_byte_too_many():
    for case in (NORMS[3], NORMS[4]):
        (trace,) = traced(case)
        assert trace.sectors() * 32 == trace.bytes_read() + trace.bytes_written()


@needs_compiler
@pytest.mark.parametrize("case", [*NORMS[2:], *SOFTMAXES[1:], *TILES], ids=str)
def test_shared_memory_is_never_asked_twice(case):
    (trace,) = traced(case)
    assert trace.bank_conflicts() == 0
