"""Every bug that we plant is found, or changes nothing and is explained."""

import re
import zlib

import pytest

from tests.kernels.cases import HEADERS, ORDERS, emulated, includes_of, path_of
from tests.kernels.equivalents import EQUIVALENT
from tests.kernels.kinds import FILES, KINDS
from tests.kernels.mutants import (
    Mutant,
    complaint_of,
    kernels_of,
    killers,
    mutants_of,
    noticed,
    statements,
)
from tests.kernels.tools import needs_compiler

# A mutant runs in a fork, which does nothing but compute and end.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

SOURCES = [*HEADERS, *FILES]
MUTANTS = [mutant for file in SOURCES for mutant in mutants_of(file)]
REASONS = {name: why for why, names in EQUIVALENT.items() for name in names}
# Of the files of each module of cases; a second each.
NUM_SAMPLED = {"tests.kernels.cases": 32, "tests.kernels.delta_net_cases": 12}
NUM_SAMPLED_ELSEWHERE = 16


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Keep what is compiled here out of the user's cache: nobody needs it again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIVLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def is_certain(mutant: Mutant) -> bool:
    """Tell whether a mutant is in every sample: those that chapter 6 speaks of."""
    is_barrier = mutant.change.startswith("without __sync")
    return is_barrier or "kv_head = head %" in mutant.change


def sample(mutants: list[Mutant], num: int) -> list[Mutant]:
    """Return the mutants that CI tries, spread over all functions."""
    by_chance = sorted(mutants, key=lambda mutant: zlib.crc32(mutant.name.encode()))
    certain = [mutant for mutant in mutants if is_certain(mutant)]
    firsts = {mutant.function: mutant for mutant in reversed(by_chance)}
    return list(dict.fromkeys([*certain, *firsts.values(), *by_chance]))[:num]


def samples() -> list[Mutant]:
    """Return a sample for each module of cases, with the headers that come with it."""
    modules: dict[str, str] = {}  # of each source, the first that needs it
    for kind in KINDS:
        for file in (*includes_of(kind.file), kind.file):
            modules.setdefault(file, kind.__module__)
    chosen = []
    for module in dict.fromkeys(modules.values()):
        mutants = [mutant for mutant in MUTANTS if modules[mutant.file] == module]
        num = NUM_SAMPLED.get(module, NUM_SAMPLED_ELSEWHERE)
        chosen += sample(mutants, num)
    return chosen


def check(mutant: Mutant) -> str | None:
    """Return what is wrong about a mutant or its entry in the table, if anything."""
    complaint = noticed(mutant)
    if complaint is None and mutant.name not in REASONS:
        return f"nothing notices: {mutant.name}"
    if complaint is not None and mutant.name in REASONS:
        return f"no equivalent, for {complaint!r}: {mutant.name}"
    return None


@needs_compiler
@pytest.mark.parametrize("mutant", samples(), ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found_or_explained(mutant):
    assert check(mutant) is None


@pytest.mark.kernels
@needs_compiler
@pytest.mark.parametrize(
    ("file", "function"), dict.fromkeys((m.file, m.function) for m in MUTANTS)
)
def test_every_planted_bug_is_found_or_explained(file, function):
    mutants = [m for m in mutants_of(file) if m.function == function]
    assert not [problem for m in mutants if (problem := check(m))]


@needs_compiler
@pytest.mark.parametrize("file", ["twice.cu", *FILES])
def test_nothing_is_found_where_nothing_was_planted(file):
    cases = [case for kernel in kernels_of(file) for case in killers()[kernel]]
    module = emulated(cases)
    for case in cases:
        assert complaint_of(case, module) is None
        for order, seed in ORDERS:
            case.run(module, order=order, seed=seed)


def test_the_table_of_equivalents_names_mutants_that_there_are():
    names = {mutant.name for mutant in MUTANTS}
    assert REASONS.keys() <= names
    assert sum(map(len, EQUIVALENT.values())) == len(REASONS), (
        "an entry has two reasons"
    )
    assert len(names) == len(MUTANTS), "two mutants have the same name"


@pytest.mark.parametrize("file", SOURCES)
def test_every_barrier_and_every_bound_is_broken(file):
    text = path_of(file).read_text()
    changes = [mutant.change for mutant in mutants_of(file)]
    dropped = [change for change in changes if "without __sync" in change]
    assert len(dropped) == len(re.findall(r"__sync(?:threads|warp)\(\);", text))
    loops = [code for _, _, code in statements(file) if re.match(r"for .* < ", code)]
    for code in loops:
        assert code.replace(" < ", " <= ", 1) in changes
