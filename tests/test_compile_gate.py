"""Every rung of every ladder compiles for the GPUs we promise, without one at hand.

A template that compiles for one type and size may fail for another. A few instances of
each rung are compiled always, and all that its cases start with `make test-kernels`;
with the options of the launcher, for it is the launcher's compiler.
"""

import re
from typing import Any

import pytest

from minivllm.ops.nvrtc import compile_cubin, why_no_mma, why_not_compiled_for
from tests.kernels.cases import AttentionCase, instances, source_of
from tests.kernels.kinds import RUNGS, factors_of, make
from tests.kernels.pairwise import all_combinations, pairwise

ARCHITECTURES = ["sm_75", "sm_80", "sm_90"]  # T4, A100, H100
SPILLS = r"(\d+) bytes spill stores, (\d+) bytes spill loads"


@pytest.fixture(autouse=True)
def needs_nvrtc():
    """Skip, with the reason, where NVRTC is not installed."""
    if reason := why_not_compiled_for("sm_80"):
        pytest.skip(reason)


def names_of(
    kind: Any, version: str, is_full: bool, arch: str = ARCHITECTURES[-1]
) -> list[str]:
    """Return the instances that a rung's cases start: all, or a few."""
    factors = {name: values[:1] for name, values in factors_of(kind, version).items()}
    few = {"dtype": kind.dtypes} | kind.compiled_for
    if is_full:
        few = {name: factors_of(kind, version)[name] for name in few}
    factors |= few
    few = kind.compiled_for
    if is_full:
        few = {name: factors_of(kind, version)[name] for name in few}
    factors |= few | {"dtype": kind.dtypes_on(arch)}
    cases = [make(kind, version, values)[0] for values in all_combinations(factors)]
    return instances(cases)


def assert_compiles(kind: Any, version: str, arch: str, is_full: bool) -> None:
    """Compile a rung without a warning, and with all its numbers in registers."""
    names = names_of(kind, version, is_full)
    assert len(names) >= len(kind.dtypes), "there is an instance for each type"
    if kind.uses_tensor_cores and (reason := why_no_mma()):
        pytest.skip(reason)
    names = names_of(kind, version, is_full, arch)
    assert len(names) >= len(kind.dtypes_on(arch)), "there is an instance for each type"
    cubin = compile_cubin(source_of(kind.file), names, arch)
    assert cubin.names.keys() == set(names)
    assert "warning" not in cubin.log
    spills = re.findall(SPILLS, cubin.log)
    assert len(spills) >= len(names)
    assert set(spills) == {("0", "0")}, "a kernel keeps numbers in slow memory"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("kind", "version"), RUNGS)
def test_a_rung_compiles(kind, version, arch):
    assert_compiles(kind, version, arch, is_full=False)


@pytest.mark.kernels
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("kind", "version"), RUNGS)
def test_every_instance_of_a_rung_compiles(kind, version, arch):
    assert_compiles(kind, version, arch, is_full=True)


def test_a_full_gate_has_every_type_size_and_block():
    assert len(names_of(AttentionCase, "v3", is_full=True)) == 3 * 4 * 3
    assert len(names_of(AttentionCase, "v3", is_full=False)) == 3 * 2


@pytest.mark.parametrize(("kind", "version"), RUNGS)
def test_a_full_gate_has_what_the_cases_start(kind, version):
    sample = pairwise(factors_of(kind, version))
    cases = [make(kind, version, values)[0] for values in sample]
    assert set(instances(cases)) <= set(names_of(kind, version, is_full=True))
