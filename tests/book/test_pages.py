"""Holds the pages that are not chapters against the code and the chapters."""

import ast
import dataclasses
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from minivllm.cli.main import main
from minivllm.loading.loader import load_spec
from minivllm.models.spec import ModelSpec

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "book"
PACKAGE = ROOT / "minivllm"
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
LISTED = [chapter["file"] for part in TOC["parts"] for chapter in part["chapters"]]
PAGES = sorted(path.stem for path in BOOK.glob("*.md"))


def page(name: str) -> str:
    return (BOOK / f"{name}.md").read_text()


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of every row of the tables in a text."""
    for line in text.splitlines():
        if line.startswith("|") and not set(line) <= set("|-: "):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def section(text: str, heading: str) -> str:
    """Return what stands below a heading of the second level."""
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = {Path(name).name for name in LISTED if name.startswith("book/")}
    assert {*listed, Path(TOC["root"]).name} == set(PAGES)


def test_every_notebook_is_in_the_table_of_contents_and_has_its_source() -> None:
    listed = {Path(name).name for name in LISTED if name.startswith("chapters/")}
    assert {path.stem for path in (ROOT / "chapters").glob("*.ipynb")} == listed
    assert {path.stem for path in (BOOK / "src").glob("*.md")} == listed


def test_the_introduction_lists_the_chapters_that_exist_and_no_others() -> None:
    needs = section(page("intro"), "What you need")
    links = re.findall(r"\.\./(chapters/\w+)\.ipynb", needs)
    expected = [name for name in LISTED if name.startswith("chapters/")]
    assert links == expected, "the table in book/intro.md lists every notebook"


def test_no_page_is_about_the_making_of_the_project() -> None:
    for name in PAGES:
        assert not re.search(r"/(?:work|tmp)/|\bissue \d|TODO|FIXME", page(name)), name


def test_the_address_of_the_repository_stands_in_no_page() -> None:
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    for name in PAGES:
        assert config["repository"]["url"] not in page(name), name


# Notation


@pytest.fixture
def spec(smollm2_dir: Path) -> ModelSpec:
    """The default model with a head of its own, so that it has every weight."""
    return dataclasses.replace(load_spec(smollm2_dir), tie_word_embeddings=False)


def sizes_of(spec: ModelSpec) -> dict[str, int]:
    values = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    return {name: value for name, value in values.items() if type(value) is int}


def test_the_notation_has_every_size_of_the_default_model(spec: ModelSpec) -> None:
    table = rows(section(page("notation"), "Sizes"))
    written = {name.strip("`"): value.replace(",", "") for name, _, value in table}
    sizes = sizes_of(spec)
    assert len(sizes) > 6
    for name, value in sizes.items():
        assert written[name] == str(value), name


def test_the_notation_has_every_weight_with_its_shape(spec: ModelSpec) -> None:
    shapes = spec.weight_shapes()
    named = set()
    _, *table = rows(section(page("notation"), "Weights"))
    for names, shape, _ in table:
        first, *others = re.findall(r"`([\w.]+)`", names)
        stem = first.rsplit(".", 2)[0]
        for name in (first, *(complete(other, stem, shapes) for other in others)):
            written = re.search(r"`\[(.*?)\]`", shape)[1]
            assert shapes[name] == eval(f"({written},)", {}, sizes_of(spec)), name
            named.add(name)
    of_one_layer = {name for name in shapes if not re.search(r"layers\.[1-9]", name)}
    assert named == of_one_layer


@pytest.mark.parametrize(
    ("name", "count"),
    [("01_naive_generation", 3), ("02_kv_cache", 2), ("03_paging", 1)],
)
def test_the_notation_has_the_letters_of_the_chapters(name: str, count: int) -> None:
    chapter = (BOOK / "src" / f"{name}.md").read_text()
    table = section(page("notation"), "Letters")
    known = set(re.findall(r"\$(\\?\w+)\$", table))
    formulas = re.findall(r"\$\$(.+?)\$\$", chapter, re.S)
    assert len(formulas) >= count
    for formula in formulas:
        greek = re.findall(r"\\(?:theta|varepsilon)\b", formula)
        latin = re.sub(r"\\(?:operatorname|tag|text)\{.+?\}|\\[a-z]+", " ", formula)
        letters = greek + re.findall(r"[a-zA-Z]", latin)
        assert set(letters) <= known, formula


def complete(name: str, stem: str, shapes: dict[str, tuple[int, ...]]) -> str:
    """Return the whole name of a weight that the page shortens."""
    candidates = (f"{stem}.{name}.weight", f"{name}.weight")
    return next(candidate for candidate in candidates if candidate in shapes)


# Glossary


def glossary() -> dict[str, str]:
    body = page("glossary").split("```{glossary}\n")[1].split("\n```")[0]
    entries = [entry.split("\n  ", 1) for entry in body.split("\n\n")]
    return {term: " ".join(text.split()) for term, text in entries}


def test_the_glossary_is_in_order() -> None:
    terms = [term.lower() for term in glossary()]
    assert terms == sorted(terms)


WANTED = """
arithmetic intensity · atomic write · attention · bandwidth · batch · bfloat16 ·
bias · block · block table · causal mask · chat template · context · decode ·
decoder · dense context · embedding · eviction · external fragmentation · float32 ·
FLOP/s · GGUF · greedy · grouped-query attention · head · hidden state · induction
head · internal fragmentation · key · KV cache · layer · logits · memory-bound · MLP
· NaN · online softmax · oracle · padding · paging · parameter · pass · perplexity ·
prefill · prefix · prefix caching · projection · prompt · quantised · query ·
reference count · residual stream · RMSNorm · roofline · RoPE · safetensors · salt ·
score · slot · slot mapping · softmax · special token · static batching · SwiGLU ·
system prompt · temperature · tensor · throughput · token · token id · tokenizer ·
value · vocabulary · weight · wheel
"""


def test_the_glossary_explains_the_words_of_the_chapters() -> None:
    assert {" ".join(term.split()) for term in WANTED.split("·")} <= set(glossary())


@pytest.mark.parametrize(("term", "text"), glossary().items())
def test_a_definition_is_one_to_three_plain_sentences(term: str, text: str) -> None:
    sentences = re.findall(r"[^.]*\.(?:\s|$)", text)
    assert 1 <= len(sentences) <= 3, sentences
    assert text.endswith(".") and len(text.split()) <= 60


def test_a_definition_refers_to_terms_that_are_defined() -> None:
    for term, text in glossary().items():
        for label in re.findall(r"\{term\}`([^`]+)`", text):
            target = re.sub(r".*<(.*)>", r"\1", label)
            assert target in glossary(), f"{term} refers to {target}"


# Map to vLLM


@cache
def names_in(path: Path) -> set[str]:
    """Return what a module, or the modules of a folder, define or assign."""
    names = set()
    files = path.rglob("*.py") if path.is_dir() else [path]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = (
                    node.targets if isinstance(node, ast.Assign) else [node.target]
                )
                names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return names


IS_PATH = re.compile(r"(?:[\w.]+/)*\w+\.py|(?:\w+/)+")


def entries() -> Iterator[tuple[str, str]]:
    """Yield ours and vLLM's side of every entry of the map."""
    yield from re.findall(r"^(.+)\n: (.+)", page("map_to_vllm"), re.M)


def check_names(text: str, package: Path) -> Iterator[str]:
    """Yield the paths and names in a text that a package does not have."""
    module = None
    for word in re.findall(r"`([^`]+)`", text):
        if IS_PATH.fullmatch(word):
            nested = module / word if module and module.is_dir() else package / word
            path = nested if nested.exists() else package / word
            if not path.exists():
                yield word
            elif module is None or not module.is_dir() or path.is_dir():
                module = path
            elif path.parent != module:
                module = path
        elif module:
            yield from (
                part for part in word.split(".") if part not in names_in(module)
            )


def test_the_map_names_what_the_package_has() -> None:
    built = section(page("map_to_vllm"), "Built so far")
    missing, found = [], 0
    for ours, _ in re.findall(r"^(.+)\n: (.+)", built, re.M):
        found += 1
        missing += check_names(ours, PACKAGE)
    assert found > 15
    assert not missing


def test_the_map_has_every_counterpart_that_a_module_names() -> None:
    built = section(page("map_to_vllm"), "Built so far")
    known = {
        word.strip("/")
        for _, theirs, *_ in re.findall(r"^(.+)\n: (.+)(\n: .+)?", built, re.M)
        for word in re.findall(r"`([^`]+)`", theirs)
    }
    for path in PACKAGE.rglob("*.py"):
        note = (ast.get_docstring(ast.parse(path.read_text())) or "").split("In vLLM:")
        for named in re.findall(r"\bvllm/([\w/.]*\w)", note[1] if note[1:] else ""):
            assert named in known or any(word.startswith(named) for word in known), (
                f"{path.relative_to(ROOT)} names vllm/{named}"
            )


def test_the_map_names_what_vllm_has() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed; the map is checked where it is")
    source = Path(spec.submodule_search_locations[0])
    pinned = re.search(r"\*\*vLLM ([\d.]+)\*\*", page("map_to_vllm"))[1]
    version = re.search(r"__version__.*'([\d.]+)", (source / "_version.py").read_text())
    if version[1] != pinned:
        pytest.skip(f"the map is about vLLM {pinned}, and {version[1]} is installed")
    missing = [
        word
        for _, theirs in entries()
        if "plugin" not in theirs
        for word in check_names(theirs.replace("the same file", LLAMA), source)
    ]
    assert not missing


LLAMA = "`model_executor/models/llama.py`"

# Troubleshooting

FOREIGN = {  # messages of other projects
    "A module that was compiled using NumPy 1.x cannot be run in NumPy 2",
    "module 'numpy' has no attribute 'float'",
}


VALUE = re.compile(r"\.\.\.|'[^']*'|\S+==\S+|\b\d+\b|sphinx-mathjax-offline")


@cache
def messages() -> list[str]:
    """Return every text in the package and the tools, with ... for values."""
    texts = []
    for folder in (PACKAGE, BOOK / "ext", BOOK / "tools"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(piece(value) for value in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return texts


def piece(value: ast.expr) -> str:
    return value.value if isinstance(value, ast.Constant) else "..."


def quoted() -> list[str]:
    headings = re.findall(r"^### (.*)$", page("troubleshooting"), re.M)
    return [text for heading in headings for text in re.findall(r'"([^"]+)"', heading)]


@pytest.mark.parametrize("message", sorted(set(quoted()) - FOREIGN))
def test_a_message_in_troubleshooting_is_one_that_we_print(message: str) -> None:
    parts = [part for part in VALUE.split(message) if part.strip()]
    assert max(len(part.split()) for part in parts) >= 2
    assert any(all(part in text for part in parts) for text in messages())


def test_each_entry_of_troubleshooting_has_a_fix() -> None:
    _, *found = page("troubleshooting").split("\n### ")
    assert len(found) > 12
    for entry in found:
        assert "- **Fix.**" in entry, entry.splitlines()[0]
        assert "- **Cause.**" in entry or "- **Check.**" in entry or len(entry) < 400


# Commands and code


def test_the_commands_in_the_pages_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    helped = capsys.readouterr().out + "--version"
    makefile = (ROOT / "Makefile").read_text()
    for name in PAGES:
        for target in re.findall(r"(?m)(?:^\s*|`)make ([a-z-]+)", page(name)):
            assert re.search(rf"^{target}:", makefile, re.M), f"{name}: make {target}"
        ours = re.sub(r"`[^`]*\b(pip|jupyter-book)\b[^`]*`", "", page(name))
        for flag in re.findall(r"`(--[a-z-]+)", ours):
            assert flag in helped, f"{name}: {flag}"


def test_the_program_in_how_to_read_answers(
    smollm2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, _ = re.findall(r"```python\n(.*?)```", page("how_to_read"), re.S)
    shorter = program.replace(" 32,", " 3,")
    assert shorter != program
    before = set(sys.modules)
    exec(compile(shorter, "how_to_read.md", "exec"), {})
    assert capsys.readouterr().out.strip()
    assert "torch" not in set(sys.modules) - before
