"""Notebooks are made from their sources, the same ones every time."""

import ast

import nbformat
import pytest
from nbformat import NotebookNode

import run
import tidy
from build import build
from export import TARGET
from project import HERE, BookError, Project

EXPORTED = """\
| file | names | what it does |
|---|---|---|
| [`minivllm/pairs.py`]({0}/pairs.py) | `add` | Adds two numbers. |"""


def read(project: Project, stem: str = "01_pairs") -> NotebookNode:
    return nbformat.read(project.chapters / f"{stem}.ipynb", as_version=4)


def texts(notebook: NotebookNode) -> str:
    return "\n".join(cell.source for cell in notebook.cells)


def edit(project: Project, old: str, new: str, stem: str = "01_pairs") -> None:
    """Change the source of a chapter."""
    source = project.sources / f"{stem}.md"
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new))


def test_a_run_makes_notebooks_and_package_and_a_second_run_the_same(
    project: Project, capsys: pytest.CaptureFixture[str]
):
    assert run.main(["--no-run"], project) == 0
    assert "wrote minivllm/pairs.py" in capsys.readouterr().out
    edit(project, "print(add(1, 2))", "import os\n\nprint(add(1, 2), os.getcwd())")
    assert run.main(["--twice", "01"], project) == 0
    first = read(project)
    assert run.main(["01"], project) == 0
    second = read(project)
    outputs = [cell.get("outputs") for cell in first.cells]
    assert ["3.0 chapters\n"] == [
        out.text for cell in outputs if cell for out in cell if "3.0" in str(out)
    ]
    moved = [a for a, b in zip(first.cells, second.cells, strict=True) if a != b]
    assert [cell.metadata.tags for cell in moved] == [["measured"]]
    assert "language_info" not in second.metadata
    assert run.main(["--check"], project) == 0


def test_outputs_that_differ_must_be_tagged(
    project: Project, capsys: pytest.CaptureFixture[str]
):
    edit(project, ":tags: [measured]", ":tags: [nbval-ignore-output]")
    assert run.main(["--twice", "01"], project) == 1
    assert "time.perf_counter()" in capsys.readouterr().err


def test_a_cell_that_fails_is_shown(
    project: Project, capsys: pytest.CaptureFixture[str]
):
    edit(project, "print(add(1, 2))", "add(1, None)")
    assert run.main(["01"], project) == 1
    message = capsys.readouterr().err
    assert "01_pairs" in message and "TypeError: must be real number" in message
    assert "add(1, None)" in message


def test_a_cell_that_needs_a_gpu_keeps_its_recorded_output(project: Project):
    edit(project, ":tags: [nbval-check-output]", ":tags: [gpu]")
    run.main(["--no-run"], project)
    notebook = read(project)
    (cell,) = (c for c in notebook.cells if run.has_tag(c, "gpu"))
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="H200")]
    run.save(notebook, project.chapters / "01_pairs.ipynb", project)
    run.sync(project.sources / "01_pairs.md", project)  # another cell may have changed
    path = project.chapters / "01_pairs.ipynb"
    for has_gpu, shown in ((False, "H200"), (True, "3.0\n")):
        executed = run.execute(path, project, has_gpu=has_gpu)
        (cell,) = (c for c in executed.cells if run.has_tag(c, "gpu"))
        assert cell.outputs[0].text == shown


def test_the_check_finds_what_was_not_made_from_a_source(
    project: Project, capsys: pytest.CaptureFixture[str]
):
    run.main(["--no-run"], project)
    (project.chapters / "09_stray.ipynb").write_text("{}")
    notebook = read(project)
    notebook.cells[3].source += " Edited."
    run.save(notebook, project.chapters / "01_pairs.ipynb", project)
    capsys.readouterr()
    assert run.main(["--check"], project) == 1
    assert capsys.readouterr().out == (
        "chapters/01_pairs.ipynb is not what its source says\n"
        "chapters/09_stray.ipynb is not what its source says\n"
        "book/tools/run.py makes them; one without a source must go\n"
    )


def test_an_edited_source_keeps_the_outputs_of_the_other_cells(project: Project):
    run.main(["--no-run"], project)
    notebook = read(project)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [nbformat.v4.new_output("stream", text="kept")]
    run.save(notebook, project.chapters / "01_pairs.ipynb", project)
    edit(project, "print(add(1, 2))", "print(add(1, 3))")
    run.main(["--no-run"], project)
    empty = [c.source for c in read(project).cells if c.get("outputs") == []]
    assert empty == ["print(add(1, 3))"]


def test_a_chapter_that_has_no_notebook_yet_gets_one_for_the_export(project: Project):
    assert run.main(["--no-run", "a1"], project) == 0
    assert (project.root / "minivllm" / "pairs.py").exists()
    edit(project, "A pair adds up.", "It adds up.")
    assert run.main(["--no-run", "a1"], project) == 0
    assert "A pair adds up." in texts(read(project)), "only the chapters asked for"


def test_an_unknown_chapter_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str]
):
    assert run.main(["77"], project) == 1
    assert "no source starts with 77" in capsys.readouterr().err


def test_the_same_source_gives_the_same_notebook(project: Project):
    edit(project, "## Summary", "```{code-cell}\nprint(add(1, 2))\n```\n\n## Summary")
    source = project.sources / "01_pairs.md"
    one, two = (build(source, project) for _ in range(2))
    assert nbformat.writes(one) == nbformat.writes(two)
    nbformat.validate(one)
    ids = [cell.id for cell in one.cells]
    assert len(set(ids)) == len(ids)
    edit(project, "A pair adds up.", "A pair adds up to one number.")
    changed = build(source, project)
    assert sum(a.id != b.id for a, b in zip(one.cells, changed.cells, strict=True)) == 1


def test_the_table_of_exports_links_to_the_files(project: Project):
    text = texts(build(project.sources / "01_pairs.md", project))
    assert EXPORTED.format("https://example.org/book/blob/main/minivllm") in text


def test_the_setup_cell_names_the_configured_address(project: Project):
    notebook = build(project.sources / "01_pairs.md", project)
    setup = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert (
        '"https://example.org/book"' in setup.source and "--branch=main" in setup.source
    )
    assert setup.source.endswith("\n\nfrom bookkit import check")
    edit(project, "# {{setup}}\n", "")
    with pytest.raises(BookError, match="the first code cell starts with"):
        build(project.sources / "01_pairs.md", project)


def test_metadata_that_the_tools_need_is_kept_and_no_more(project: Project):
    notebook = build(project.sources / "a1_more.md", project)
    assert notebook.metadata == {"minivllm": {"follows": 1}}
    notebook = build(project.sources / "01_pairs.md", project)
    assert list(notebook.metadata) == ["kernelspec"]


@pytest.mark.parametrize(
    "source", sorted(HERE.sources.glob("*.md")), ids=lambda path: path.stem
)
def test_a_notebook_is_what_its_source_says(source):
    assert run.is_current(source, HERE), f"run: python book/tools/run.py {source.stem}"


def shown_only_if_last(cell: str) -> list[str]:
    """Return the calls of a cell whose figure nobody sees, since others follow."""
    lost = []
    for statement in ast.parse(cell).body[:-1]:
        if not isinstance(statement, ast.Expr):
            continue
        call = statement.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner, name = ast.unparse(call.func.value), call.func.attr
            if name == "reveal" or owner in ("draw", "predict"):
                lost.append(f"{owner}.{name}")
    return lost


def test_a_figure_that_nobody_sees_is_noticed():
    assert shown_only_if_last("guess.reveal(1)\ndraw.table([])") == ["guess.reveal"]
    assert shown_only_if_last("x = draw.table([])\nguess.reveal(1)") == []


@pytest.mark.parametrize(
    "path", sorted(HERE.chapters.glob("*.ipynb")), ids=lambda path: path.stem
)
def test_every_figure_and_every_guess_is_shown(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code" and "%%" not in cell.source:
            assert shown_only_if_last(cell.source) == [], cell.source


def test_no_notebook_is_without_source():
    assert run.check(HERE, []) == []


def test_every_chapter_that_exports_shows_its_table():
    for source in HERE.sources.glob("*.md"):
        text = source.read_text()
        if TARGET.search(text):
            assert "\n{{exports}}\n" in text, source.name


@pytest.mark.parametrize(
    "source", sorted(HERE.sources.glob("*.md")), ids=lambda path: path.stem
)
def test_the_code_of_a_source_is_formatted(source):
    assert not tidy.untidy(source), f"run: python book/tools/tidy.py {source.stem}"


def test_tidy_formats_code_and_leaves_the_text_alone():
    text = (
        "# 1.  Title\n\n```{code-cell}\n:tags: [wrong]\nx = {'a':1 }\n```\n\n* text\n"
    )
    tidied = (
        '# 1.  Title\n\n```{code-cell}\n:tags: [wrong]\n\nx = {"a": 1}\n```\n\n* text\n'
    )
    assert tidy.tidy(text) == tidied
    assert tidy.tidy(tidied) == tidied
