"""Cells that need something are skipped with a word, and only these."""

import pytest
from IPython.testing.globalipapp import start_ipython

from bookkit import needs

MARK = "# runs kernels"


@pytest.fixture
def shell():
    """A shell of IPython, as a notebook has one."""
    shell = start_ipython() or get_ipython()  # noqa: F821, of the shell
    before = list(shell.input_transformers_cleanup)
    yield shell
    shell.input_transformers_cleanup[:] = before


def run(shell, code: str, capsys) -> str:
    """Run a cell and return what it prints."""
    result = shell.run_cell(code)
    assert result.success
    return capsys.readouterr().out


def test_a_marked_cell_says_why_it_does_not_run(shell, capsys):
    needs.skip_cells(MARK, "there is no compiler: 'g++' is not found")
    printed = run(shell, f"{MARK}\nraise AssertionError", capsys)
    assert printed == "not run: there is no compiler: 'g++' is not found\n"


def test_other_cells_run(shell, capsys):
    needs.skip_cells(MARK, "no")
    assert run(shell, f"print(1)\n{MARK}\nprint(2)", capsys) == "1\n2\n"


def test_nothing_is_skipped_without_a_reason(shell, capsys):
    needs.skip_cells(MARK, "no")
    needs.skip_cells(MARK, None)
    assert run(shell, f"{MARK}\nprint(3)", capsys) == "3\n"


def test_the_last_reason_counts_and_other_marks_stay(shell, capsys):
    needs.skip_cells("# needs a GPU", "no GPU")
    for reason in ("first", "second"):
        needs.skip_cells(MARK, reason)
    assert run(shell, f"{MARK}\n1 / 0", capsys) == "not run: second\n"
    assert run(shell, "# needs a GPU\n1 / 0", capsys) == "not run: no GPU\n"


def test_a_program_without_a_shell_is_left_alone(monkeypatch):
    monkeypatch.setattr(needs, "_shell", lambda: None)
    needs.skip_cells(MARK, "no")
