"""The exporter's rules, on small cells."""

import json

import pytest

import export
from imports import check_imports
from merge import Kernel, Module, Origin
from project import HERE, BookError, Project


def module(*cells: str, chapters: str = "", replaces: str = "") -> Module:
    """Merge cells; `chapters` and `replaces` give a letter for each cell."""
    built = Module()
    for index, cell in enumerate(cells):
        chapter = (chapters or "abcdefgh")[index]
        origin = Origin(f'chapter {chapter}, "T"', chapter in replaces)
        text = cell if index else f'"""Doc."""\n{cell}'
        built.add(text, origin)
    return built


def build(*cells: str, chapters: str = "", replaces: str = "") -> str:
    """Return the merged module below its docstring."""
    text = module(*cells, chapters=chapters, replaces=replaces).render()
    text = export.ruff("minivllm/x.py", text)
    return text.split('.\n"""\n\n', 1)[1].lstrip("\n")


def test_a_redefinition_replaces_in_place():
    text = build(
        "def f():\n    return 1\n\n\ndef g():\n    return f()",
        "def f():\n    return 2",
        replaces="b",
    )
    assert text == "def f():\n    return 2\n\n\ndef g():\n    return f()\n"


def test_a_redefinition_without_the_tag_is_refused():
    with pytest.raises(BookError, match='f was exported by chapter a, "T": tag'):
        build("def f():\n    return 1", "def f():\n    return 2")


def test_the_same_name_twice_in_one_chapter_is_refused():
    with pytest.raises(BookError, match="f is exported twice in one chapter"):
        build("def f(): ...", "def f(): ...", chapters="aa")
    with pytest.raises(BookError, match="f is exported twice in one chapter"):
        build("x = 1", "def f(): ...\ndef f(): ...", replaces="b")
    with pytest.raises(BookError, match="ONE is exported twice"):
        build("ONE = 1\nONE: int = 2")


def test_the_tag_replaces_must_replace_something():
    with pytest.raises(BookError, match="replaces nothing"):
        build("def f(): ...", "def g(): ...", replaces="b")


def test_imports_gather_and_useless_ones_go():
    text = build(
        "import os\n\n\ndef f():\n    return os.sep",
        "import math\nfrom __future__ import annotations\n\n\n"
        "def f():\n    return math.pi",
        replaces="b",
    )
    assert text == (
        "from __future__ import annotations\n\nimport math\n\n\n"
        "def f():\n    return math.pi\n"
    )


def test_an_init_file_keeps_its_imports():
    built = module("from math import pi\nfrom minivllm.x import y")
    text = export.ruff("minivllm/__init__.py", built.render())
    assert "from math import pi\n\nfrom minivllm.x import y" in text


def test_type_checking_blocks_are_joined():
    block = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    {}\n\n\n"
    text = build(
        block.format("from numpy import ndarray") + 'def f(x: "ndarray"): ...',
        block.format("from pathlib import Path") + 'def g(x: "Path"): ...',
    )
    assert text.count("if TYPE_CHECKING:") == 1
    assert "    from pathlib import Path\n\n    from numpy import ndarray\n" in text


def test_a_reopened_dataclass_gets_its_fields_before_its_methods():
    text = build(
        "from dataclasses import dataclass\n\n\n"
        "@dataclass\nclass A:\n    x: int\n\n    def f(self):\n        return self.x",
        "@dataclass\nclass A(A):\n    y: int = 0  # new\n\n"
        "    @property\n    def g(self):\n        return self.y",
    )
    assert "    x: int\n    y: int = 0  # new\n\n    def f(self):" in text
    assert text.endswith("    @property\n    def g(self):\n        return self.y\n")
    assert text.count("class A") == 1


def test_what_a_replaced_statement_needs_goes_before_it():
    text = build(
        "def f():\n    return 1\n\n\nclass A:\n    x: int\n\n\nB = A()",
        "def mark(cls):\n    return use(cls)\n\n\n"
        "Kind = int\n\n\ndef use(cls):\n    return cls\n\n\n"
        "@mark\nclass A:\n    x: Kind = 3",
        replaces="b",
    )
    exec(compile(text, "built", "exec"), names := {})
    assert names["A"].x == 3 and isinstance(names["B"], names["A"])
    order = [text.index(name) for name in ("def f", "class A", "B = A")]
    assert order == sorted(order), "all else stays where it was"


@pytest.mark.parametrize(
    ("new", "needed"),
    [
        ("C = 1", "class A(A):\n    y: int = C"),
        ("class C: ...", "class A(A):\n    def f(self, x: C) -> None: ..."),
        ("C = 1", "class A(A):\n    def f(self, x=C): ..."),
    ],
)
def test_what_a_reopened_class_needs_goes_before_it(new, needed):
    exec(compile(build("class A:\n    x = 1", f"{needed}\n\n\n{new}"), "b", "exec"), {})


def test_names_that_are_looked_up_later_move_nothing():
    text = build(
        "def f():\n    return g()",
        "def g():\n    return f()",
        "x = [name for name in 'ab']\n\n\ndef name(): ...",
    )
    places = [text.index(part) for part in ("def f", "def g", "x = ", "def name")]
    assert places == sorted(places)


def test_a_reopened_class_keeps_its_docstring_first():
    text = build(
        'class A:\n    """Doc of A."""',
        "class A(A):\n    def f(self):\n        return 1",
        "class A(A):\n    x: int = 1",
        chapters="aab",
    )
    assert text == (
        'class A:\n    """Doc of A."""\n\n    x: int = 1\n\n'
        "    def f(self):\n        return 1\n"
    )


def test_a_member_is_replaced_only_by_a_later_chapter_with_the_tag():
    one, two = ("class A:\n    def f(self): ...", "class A(A):\n    def f(self): ...")
    with pytest.raises(BookError, match="twice in one chapter"):
        build(one, two, chapters="aa")
    with pytest.raises(BookError, match="tag the cell"):
        build(one, two)
    assert build(one, two, replaces="b").count("def f") == 1


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("class A: ...", "@final\nclass A(A):\n    x = 1", "other decorators"),
        ("@dataclass\nclass A: ...", "class A(A):\n    x: int", "other decorators"),
        ("class A(Enum):\n    X = 1", "class A(A):\n    Y = 2", "Enum"),
        ("class A(typing.NamedTuple):\n    x: int", "class A(A):\n    y: int", "Named"),
        (
            "class A:\n    x = 1",
            "class A(A):\n    def f(self):\n        return super().f()",
            "super",
        ),
        ("x = 1", "class A(A):\n    x = 1", "not defined in this file"),
        ("class A:\n    x = 1", "class A(A, B):\n    y = 1", "no second base"),
        ("class A: x = 1", "class A(A):\n    y = 1", "lines of their own"),
    ],
)
def test_a_class_that_cannot_be_reopened_is_refused(first, second, message):
    with pytest.raises(BookError, match=message):
        build(first, second)


def test_comments_stay_with_what_they_explain():
    text = build(
        "# Why one.\nONE = 1",
        "# Why two.\nTWO = 2\n\n# Why not one.\nONE = 1.5\n# Said last.",
        replaces="b",
    )
    assert text == "# Why two.\nTWO = 2\n\n# Why not one.\nONE = 1.5\n# Said last.\n"


def test_property_setters_are_kept_apart():
    text = build(
        "class A:\n    @property\n    def x(self):\n        return 1\n\n"
        "    @x.setter\n    def x(self, v):\n        pass",
        "class A(A):\n    @property\n    def x(self):\n        return 2",
        replaces="b",
    )
    assert "return 2" in text and "@x.setter" in text and "return 1" not in text


def test_overloads_are_kept_apart():
    text = build(
        "from typing import overload\n\n\n"
        "@overload\ndef f(x: int) -> int: ...\n@overload\ndef f(x: str) -> str: ...\n"
        "def f(x):\n    return x"
    )
    assert text.count("@overload") == 2 and text.count("def f") == 3


def test_multiline_headers_and_strings_survive():
    text = build(
        'class A(  # a colon: here\n    dict[str, int],\n):\n    """Doc."""\n\n'
        '    s = """\n  odd\n"""',
        "class A(A):\n    def f(self):\n        return 1",
    )
    assert "# a colon: here\n    dict[str, int],\n):" in text
    assert '    s = """\n  odd\n"""\n' in text and "def f" in text


def test_lists_and_dicts_are_extended_in_place():
    text = build(
        '__all__ = ["a"]\nHOME = {\n    "a": "x",  # first\n}\nLAST = 1',
        '__all__ += ["b"]',
        'HOME |= {\n    "c": "y",  # second\n}',
    )
    assert text == (
        '__all__ = ["a", "b"]\nHOME = {\n    "a": "x",  # first\n'
        '    "c": "y",  # second\n}\nLAST = 1\n'
    )


@pytest.mark.parametrize("first", ["X = f()", "X = [1]", "X = 1"])
def test_only_a_literal_of_the_same_kind_is_extended(first):
    with pytest.raises(BookError, match="only a literal"):
        build(first, 'X |= {"a": 1}')


def test_the_docstring_names_its_chapters():
    text = module("x = 1", "y = 2", "z = 3", chapters="aab").render()
    doc = '"""Doc.\n\nSource: chapter a, "T"; chapter b, "T".\n"""\n'
    assert text.startswith(doc)


def test_the_chapters_join_the_block_that_names_vllm():
    built = Module()
    built.add('"""Doc.\n\nIn vLLM: vllm/x.py.\n"""', Origin("chapter 1"))
    assert "In vLLM: vllm/x.py.\nSource: chapter 1.\n" in built.render()


def test_a_module_without_docstring_is_refused():
    built = Module()
    built.add("x = 1", Origin("chapter 1"))
    with pytest.raises(BookError, match="docstring"):
        built.render()


def test_a_kernel_is_the_text_of_its_cells_in_order():
    kernel = Kernel()
    kernel.add('V1 = r"""\n// Adds.\n\nint a = \'\\n\';\n"""', Origin("chapter 6"))
    kernel.add('V2 = r"""\nint b;\n"""', Origin("appendix A9"))
    assert kernel.render() == (
        "// Adds.\n// Source: chapter 6; appendix A9.\n\nint a = '\\n';\n\nint b;\n"
    )
    kernel.add('V3 = r"""\nint c;\n"""', Origin("chapter 7", replaces=True))
    assert kernel.render() == "// Source: chapter 7.\nint c;\n"
    with pytest.raises(BookError, match="one assignment"):
        kernel.add("V4 = 1\nV5 = 2", Origin("chapter 7"))


BUILT = {
    "minivllm/__init__.py": {"LLM"},
    "minivllm/errors.py": {"ConfigError"},
    "minivllm/loading/__init__.py": set(),
    "minivllm/loading/hub.py": {"resolve_model"},
}


@pytest.mark.parametrize(
    "source",
    [
        "import minivllm",
        "import minivllm.errors as e, os",
        "from minivllm import LLM, errors, loading",
        "from minivllm.errors import ConfigError",
        "from minivllm.loading import hub",
        "%matplotlib inline\nfrom minivllm.loading.hub import resolve_model",
        "from minivllm_extras import anything",
    ],
)
def test_what_is_built_can_be_imported(source):
    check_imports(source, BUILT)


@pytest.mark.parametrize(
    "source",
    [
        "import minivllm.engine",
        "from minivllm import SamplingParams",
        "from minivllm.errors import ConfigError, ShapeError",
        "from minivllm.loading import loader",
        "def f():\n    from minivllm.loading import loader",
        "if TYPE_CHECKING:\n    import minivllm.engine",
        "from minivllm.loading.hub import (\n    resolve_model,\n    search,\n)",
    ],
)
def test_what_is_not_built_cannot_be_imported(source):
    with pytest.raises(BookError, match="before it is built"):
        check_imports(source, BUILT)


def test_careless_imports_are_refused():
    with pytest.raises(BookError, match="name what"):
        check_imports("from minivllm.errors import *", BUILT)
    with pytest.raises(BookError, match="relative"):
        check_imports("from .errors import ConfigError", BUILT)
    with pytest.raises(BookError, match="imports itself"):
        check_imports("import minivllm.errors", BUILT, own_path="minivllm/errors.py")


def test_lazy_names_count_as_built():
    cell = '_HOME = {"LLM": "minivllm.llm"}'
    assert "LLM" not in module(cell).names()
    assert "LLM" in module(cell, "def __getattr__(name): ...").names()


def cell(source: str, *tags: str) -> dict:
    return {"cell_type": "code", "metadata": {"tags": tags}, "source": source}


def put(project: Project, stem: str, *cells: dict, **metadata: object) -> None:
    """Write a notebook into the project."""
    heading = {"cell_type": "markdown", "metadata": {}, "source": "# 1. One: first"}
    project.chapters.mkdir(exist_ok=True)
    book = {"cells": [heading, *cells], "metadata": {"minivllm": metadata}}
    (project.chapters / f"{stem}.ipynb").write_text(json.dumps(book))


@pytest.fixture
def small(project: Project) -> Project:
    """Three notebooks: an appendix before all chapters, a chapter, one after it."""
    files = ["a2_last", "02_two", "01_one", "a1_first", "a3_later", "10_ten"]
    toc = "".join(f"- file: chapters/{name}\n" for name in files)
    (project.root / "_toc.yml").write_text(f"root: intro\nchapters:\n{toc}")
    init = cell('# minivllm/__init__.py\n"""P."""', "export")
    put(project, "a1_first", init, follows=0)
    put(project, "01_one", cell('# minivllm/a.py\n"""A."""\n\nx = 1', "export"))
    put(project, "a2_last", cell("from minivllm.a import x"), follows=1)
    return project


def test_appendices_come_after_the_chapter_they_follow(small: Project):
    put(small, "02_two")
    put(small, "10_ten")
    put(small, "a3_later", follows=1)
    order = [path.stem for path in small.build_order()]
    assert order == ["a1_first", "01_one", "a2_last", "a3_later", "02_two", "10_ten"]


def test_until_stops_after_a_notebook(small: Project):
    assert list(export.export(small, until="a1")) == ["minivllm/__init__.py"]
    assert len(export.export(small)) == 2
    put(
        small,
        "a2_last",
        cell('# minivllm/b.py\n"""B."""\n\ny = 1', "export"),
        follows=1,
    )
    put(small, "02_two", cell('# minivllm/c.py\n"""C."""\n\nz = 1', "export"))
    as_of_1 = ["minivllm/__init__.py", "minivllm/a.py", "minivllm/b.py"]
    assert list(export.export(small, until="01")) == as_of_1  # with its appendix
    with pytest.raises(BookError, match="no chapter starts with 07"):
        export.export(small, until="07")


def test_a_name_cannot_be_imported_from_two_places():
    module = Module()
    module.add("import os\n\nA = os.sep", Origin("chapter 1", False))
    with pytest.raises(BookError, match="os is imported from two places"):
        module.add("from a import os\n\nB = os", Origin("chapter 1", False))


def test_a_notebook_out_of_order_cannot_be_merged(small: Project):
    put(small, "a3_later")
    with pytest.raises(BookError, match="follows: 1"):
        export.export(small)
    put(small, "a4_unlisted", follows=1)
    with pytest.raises(BookError, match=r"a4_unlisted: not listed in _toc\.yml"):
        export.export(small)


def test_an_error_names_notebook_and_cell(small: Project):
    put(small, "02_two", cell("from minivllm.b import late"))
    with pytest.raises(
        BookError, match=r"02_two, cell\nfrom minivllm\.b import late\n"
    ):
        export.export(small)


@pytest.mark.parametrize("tags", [(), ("export",)])
def test_tag_and_path_go_together(small: Project, tags):
    source = "x = 1" if tags else "# minivllm/a.py\ny = 1"
    put(small, "02_two", cell(source, *tags))
    with pytest.raises(BookError, match="go together"):
        export.export(small)


def test_the_check_finds_edits_strays_and_missing_inits(small: Project):
    put(small, "02_two", cell('# minivllm/sub/b.py\n"""B."""', "export"))
    files = export.export(small)
    export.write(files, small.root)
    found = "".join(export.differences(files, small.root))
    assert found == (
        "minivllm/sub/__init__.py: no chapter builds it, and its folder is no package\n"
    )
    (small.root / "minivllm" / "a.py").write_text("x = 2\n")
    (small.root / "minivllm" / "stray.txt").touch()
    (small.root / "kernels").mkdir()
    (small.root / "kernels" / "stray.cu").touch()
    found = "".join(export.differences(files, small.root))
    assert "-x = 2\n" in found and "+x = 1\n" in found
    assert "minivllm/stray.txt: no chapter builds it" in found
    assert "kernels/stray.cu: no chapter builds it" in found


def test_the_package_is_what_the_chapters_build():
    found = "".join(export.differences(export.export(HERE), HERE.root))
    assert not found, found
