"""Looks at the built book: its files, and its pages in a real browser.

BOOK_HTML names a folder of built pages; without it the book is built first.
"""

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

pytest.importorskip("jupyter_book", reason="the book's packages are not installed")

import yaml
from bs4 import BeautifulSoup, Tag

from browser import Browser

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
DOCUMENTS = [
    TOC["root"],
    *(chapter["file"] for part in TOC["parts"] for chapter in part["chapters"]),
]
CHAPTERS = [name for name in DOCUMENTS if name.startswith("chapters/")]
EXPORTING = [
    name
    for name in CHAPTERS
    if "{{exports}}" in (ROOT / "book" / "src" / f"{Path(name).name}.md").read_text()
]
REPOSITORY = CONFIG["repository"]["url"]
WINDOWS = [(1280, False), (1280, True), (390, False), (390, True)]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built pages; a warning of the build is a failure."""
    if folder := os.environ.get("BOOK_HTML"):
        return Path(folder).resolve()
    out = tmp_path_factory.mktemp("book")
    command = "build . -W --keep-going -q --all --path-output".split()
    program = Path(sys.executable).with_name("jupyter-book")
    run = subprocess.run(
        [program, *command, out], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return out / "_build" / "html"


@pytest.fixture(scope="module")
def pages(html: Path) -> dict[str, BeautifulSoup]:
    """Every built page, by its path below the folder."""
    return {
        path.relative_to(html).as_posix(): BeautifulSoup(
            path.read_text(), "html.parser"
        )
        for path in sorted(html.rglob("*.html"))
        if "_static" not in path.parts
    }


@pytest.fixture(scope="module")
def articles(pages: dict[str, BeautifulSoup]) -> dict[str, Tag]:
    """What the authors wrote: the pages of the table of contents without the frame."""
    return {name: pages[f"{name}.html"].select_one(".bd-article") for name in DOCUMENTS}


def test_every_document_of_the_table_of_contents_is_a_page(
    pages: dict[str, BeautifulSoup],
) -> None:
    assert {f"{name}.html" for name in DOCUMENTS} <= set(pages)
    assert {"index.html", "search.html", "genindex.html"} <= set(pages)


def test_local_links_lead_to_files_and_places_that_exist(
    html: Path, pages: dict[str, BeautifulSoup]
) -> None:
    places = {
        name: {tag["id"] for tag in page.select("[id]")}
        | {tag["name"] for tag in page.select("a[name]")}
        for name, page in pages.items()
    }
    broken, checked = [], 0
    for name, page in pages.items():
        for tag, attribute in references(page):
            link = tag[attribute]
            if urlsplit(link).scheme or link.startswith("//") or link in ("", "#"):
                continue
            path, place = urldefrag(link)
            path = unquote(urlsplit(path).path)
            target = (html / name).parent / path if path else html / name
            target = Path(os.path.normpath(target))
            checked += 1
            if not target.is_file():
                broken.append(f"{name}: {link}")
            elif place and target.suffix == ".html":
                if unquote(place) not in places[target.relative_to(html).as_posix()]:
                    broken.append(f"{name}: {link}")
    assert not broken
    assert checked > 20 * len(DOCUMENTS)  # each page links to all the others


def references(page: BeautifulSoup) -> Iterator[tuple[Tag, str]]:
    """Yield what a page links to or loads, as a tag and its attribute."""
    for attribute in ("href", "src", "data", "poster"):
        for tag in page.select(f"[{attribute}]"):
            yield tag, attribute


HOST = r"""(?:https?:)?//(?!www\.w3\.org/)[\w.-]+\.[a-z]{2,}"""
LOADED_BY_CSS = re.compile(rf"""(?:url\(\s*|@import\s+)["']?({HOST}[^"')]*)""", re.I)
LOADED_BY_SCRIPT = re.compile(
    rf"""(?:\bimport\s*\(?|\bfrom|importScripts\(|fetch\(|\bsrc\s*[=:]|"""
    rf"""\.href\s*=|_URL\s*=)\s*["'`]({HOST}[^"'`]*)""",
    re.I,
)


def test_no_page_loads_anything_from_another_host(
    pages: dict[str, BeautifulSoup],
) -> None:
    found = []
    for name, page in pages.items():
        for tag, attribute in references(page):
            leads_there_when_clicked = tag.name == "a"
            names_a_relation = tag.name == "link" and tag["rel"] == ["canonical"]
            link = tag[attribute]
            if leads_there_when_clicked or names_a_relation:
                continue
            if link.startswith("//") or urlsplit(link).scheme in ("http", "https"):
                found.append(f"{name}: {link}")
        for tag in page.select("[srcset]"):
            found += re.findall(HOST, tag["srcset"])
        for tag in page.select("[style]"):
            found += LOADED_BY_CSS.findall(tag["style"])
        for tag in page.select("style"):
            found += LOADED_BY_CSS.findall(tag.get_text())
        for tag in page.select("script:not([src])"):
            found += LOADED_BY_SCRIPT.findall(tag.get_text())
    assert not found


def test_no_style_sheet_or_script_loads_anything_from_another_host(
    html: Path,
) -> None:
    styles, scripts = sorted(html.rglob("*.css")), sorted(html.rglob("*.js"))
    assert styles and scripts
    found = [
        f"{path.name}: {link}"
        for paths, loaded in ((styles, LOADED_BY_CSS), (scripts, LOADED_BY_SCRIPT))
        for path in paths
        for link in loaded.findall(path.read_text(errors="replace"))
    ]
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        '@import "https://fonts.example.com/a.css";',
        "a { background: url(//cdn.example.com/x.png) }",
    ],
)
def test_the_search_for_hosts_in_styles_finds_them(text: str) -> None:
    assert LOADED_BY_CSS.search(text)


@pytest.mark.parametrize(
    "text",
    [
        'import {a} from "https://cdn.example.com/a.js"',
        'const THEBE_JS_URL = "https://unpkg.com/thebe"',
        's.src="https://cdn.example.com/a.js"',
        "fetch('//api.example.com/x')",
    ],
)
def test_the_search_for_hosts_in_scripts_finds_them(text: str) -> None:
    assert LOADED_BY_SCRIPT.search(text)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_each_chapter_opens_itself_in_colab(
    pages: dict[str, BeautifulSoup], chapter: str
) -> None:
    links = {
        tag["href"]
        for tag in pages[f"{chapter}.html"].select("a[href]")
        if "colab" in tag["href"]
    }
    repository = urlsplit(REPOSITORY).path.strip("/")
    branch = CONFIG["repository"]["branch"]
    colab = CONFIG["launch_buttons"]["colab_url"]
    assert links == {f"{colab}/github/{repository}/blob/{branch}/{chapter}.ipynb"}


def test_links_to_the_repository_use_its_one_address(
    pages: dict[str, BeautifulSoup],
) -> None:
    name = REPOSITORY.rsplit("/", 1)[1]
    for page in pages.values():
        for tag in page.select("a[href]"):
            address = tag["href"].split("?")[0]
            if f"/{name}" in address and "colab" not in address:
                is_local = not urlsplit(address).scheme
                assert is_local or address.startswith(REPOSITORY)


def test_the_search_index_knows_every_page(html: Path) -> None:
    text = (html / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip(";)\n"))
    assert set(DOCUMENTS) <= set(index["docnames"])
    assert "logit" in index["terms"]


def test_every_picture_says_what_it_shows(articles: dict[str, Tag]) -> None:
    silent = []
    for name, article in articles.items():
        for image in article.select("img"):
            if not image.get("alt", "").strip():
                silent.append(f"{name}: {image.get('src', '')[:80]}")
        for svg in article.select("svg"):
            around = [svg, *svg.parents]
            labels = ("aria-label", "aria-labelledby", "aria-hidden")
            if not any(tag.get(label) for tag in around for label in labels):
                silent.append(f"{name}: {str(svg)[:80]}")
    assert not silent


def test_no_box_says_its_title_twice(articles: dict[str, Tag]) -> None:
    for name, article in articles.items():
        for box in article.select(".mv-alert"):
            title, text = (part.get_text(" ", strip=True) for part in box("p")[:2])
            assert title.split(" (")[0] not in text[: len(title) + 9], name
            above = box.find_previous_sibling()
            if above is not None and above.name in ("h2", "h3"):
                assert title != above.get_text().rstrip("#"), f"{name}: {title}"


def test_no_raw_markup_is_left(articles: dict[str, Tag]) -> None:
    marks = re.compile(
        r"\[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]|\{\{|</?details|</?summary"
        r"|^```|:::|\{(term|ref|numref|eq|doc)\}|\[[^\]]+\]\([\w./#-]+\)",
        re.M,
    )
    for name, article in articles.items():
        words = BeautifulSoup(str(article), "html.parser")
        for code in words.select("pre, code, script, style, .math"):
            code.decompose()
        assert not marks.search(words.get_text()), name


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_each_fold_of_a_chapter_is_a_fold_in_the_book(
    articles: dict[str, Tag], chapter: str
) -> None:
    notebook = json.loads((ROOT / f"{chapter}.ipynb").read_text())
    written = "".join(
        "".join(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "markdown"
    )
    folds = articles[chapter].select("details.mv-fold")
    assert len(folds) == written.count("<details>")
    for fold in folds:
        assert fold.summary.get_text(strip=True)
        assert fold.select_one(".mv-fold-body").get_text(strip=True)
        for code in fold.select("pre"):
            assert code.find_parent(class_="highlight")


@pytest.mark.parametrize(("width", "dark"), WINDOWS)
@pytest.mark.parametrize("name", [*DOCUMENTS, "search", "genindex"])
def test_a_page_works_offline_and_fits_the_window(
    browser: Browser, html: Path, name: str, width: int, dark: bool
) -> None:
    browser.open((html / f"{name}.html").as_uri(), width=width, dark=dark)
    assert browser.run("document.documentElement.dataset.theme") == (
        "dark" if dark else "light"
    )
    outside = [url for url in browser.requests if urlsplit(url).scheme != "file"]
    assert [url for url in outside if not url.startswith(("data:", "blob:"))] == []
    assert browser.errors == []
    page_width = browser.run("document.documentElement.scrollWidth")
    assert page_width <= width, browser.run(WIDEST)
    assert browser.run(MATH_ERRORS) == []
    formulas = browser.run("document.querySelectorAll('.bd-article .math').length")
    drawn = browser.run("document.querySelectorAll('mjx-container').length")
    assert drawn >= formulas
    if dark:
        assert browser.run(GLARING) == []


WIDEST = """
[...document.querySelectorAll("main *")]
  .filter(tag => tag.getBoundingClientRect().right > innerWidth)
  .map(tag => tag.outerHTML.slice(0, 120)).slice(0, 5)
"""
# MathJax draws what it does not understand, and commands it does not know in red.
MATH_ERRORS = """
[...document.querySelectorAll("[data-mml-node=merror], mjx-container [fill=red]")]
  .map(tag => tag.getAttribute("data-mjx-error") ?? tag.outerHTML.slice(0, 120))
"""
# Boxes that are bright on the dark page. Pictures are meant to be.
GLARING = """
[...document.querySelectorAll(".cell_output .text_html, .cell_output pre, .admonition")]
  .filter(tag => {
    const [r, g, b, alpha] = getComputedStyle(tag).backgroundColor.match(/[\\d.]+/g);
    return (alpha ?? 1) > 0.5 && Math.max(r, g, b) > 160;
  })
  .map(tag => tag.outerHTML.slice(0, 120))
"""


# A piece of text output that a reader must scroll to see, though it could be wrapped.
CUT_OFF = """
[...document.querySelectorAll(".cell_output :not(.mv-columns) > .highlight > pre")]
  .filter(tag => tag.scrollWidth > tag.clientWidth)
  .map(tag => tag.textContent.slice(0, 120))
"""
COLUMNS = """
[...document.querySelectorAll(".cell_output .mv-columns pre")].map(tag => {
  const range = document.createRange();
  range.selectNodeContents(tag);
  const line = parseFloat(getComputedStyle(tag).lineHeight);
  const lines = tag.textContent.trimEnd().split("\\n").length;
  return [Math.round(range.getBoundingClientRect().height / line), lines];
})
"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_printed_text_is_wrapped_and_printed_columns_are_not(
    browser: Browser, html: Path, chapter: str, width: int
) -> None:
    browser.open((html / f"{chapter}.html").as_uri(), width=width)
    assert browser.run(CUT_OFF) == []
    assert all(shown <= lines for shown, lines in browser.run(COLUMNS))


def test_some_printed_columns_are_recognised(articles: dict[str, Tag]) -> None:
    assert articles["chapters/01_naive_generation"].select(".mv-columns")


# Formulas that a scrolled box cannot bring into view: cut off on either side.
UNREACHABLE = """
[...document.querySelectorAll(".bd-article div.math")].filter(box => {
  const { overflowX } = getComputedStyle(box);
  box.scrollLeft = 0;
  const formula = box.querySelector("mjx-container svg").getBoundingClientRect();
  const frame = box.getBoundingClientRect();
  box.scrollLeft = 1e6;
  const scrolled = box.querySelector("mjx-container svg").getBoundingClientRect();
  return formula.left < frame.left - 1 || scrolled.right > frame.right + 1
    || (box.scrollLeft > 0 && overflowX !== "auto");
}).map(box => box.textContent.slice(0, 80))
"""
# MathJax gives a formula with a number the width that it needs at least.
WIDEN = """
document.querySelectorAll(".bd-article div.math mjx-container")
  .forEach(formula => formula.style.minWidth = "900px")
"""


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_formula_fits_a_phone_or_scrolls_in_its_own_box(
    browser: Browser, html: Path, chapter: str
) -> None:
    browser.open((html / f"{chapter}.html").as_uri(), width=390)
    assert browser.run(UNREACHABLE) == []
    browser.run(WIDEN)
    assert browser.run(UNREACHABLE) == []
    assert browser.run("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("chapter", EXPORTING)
def test_the_table_of_exports_leaves_room_for_what_a_file_does(
    browser: Browser, html: Path, chapter: str
) -> None:
    browser.open((html / f"{chapter}.html").as_uri(), width=1280)
    widths = browser.run("""
        [...document.querySelectorAll("table.mv-exports thead th")]
          .map(head => head.getBoundingClientRect().width)
    """)
    file, _, purpose = widths
    assert file < 220 < 240 < purpose
    browser.open((html / f"{chapter}.html").as_uri(), width=390)
    table, frame = browser.run("""
        ["table.mv-exports", ".bd-article"]
          .map(selector => document.querySelector(selector).scrollWidth)
    """)
    assert table <= frame


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_fold_opens_when_its_summary_is_clicked(
    browser: Browser, html: Path, chapter: str
) -> None:
    browser.open((html / f"{chapter}.html").as_uri(), width=390)
    heights = browser.run("""
        [...document.querySelectorAll(".bd-article > section details.mv-fold")]
          .filter(fold => !fold.parentElement.closest("details"))
          .map(fold => {
            const before = fold.clientHeight;
            fold.querySelector("summary").click();
            return [before, fold.clientHeight];
          })
    """)
    assert all(closed < opened for closed, opened in heights)


def test_the_search_finds_a_word_in_the_glossary(browser: Browser, html: Path) -> None:
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(html)
    )
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        browser.open(f"{address}/search.html?q=logits", width=1280)
        links = browser.run("""
            new Promise(done => {
              const look = () => {
                const links = document.querySelectorAll("#search-results ul a");
                const finished = document.querySelector("#search-results p");
                if (links.length && finished) done([...links].map(a => a.href));
                else setTimeout(look, 50);
              };
              look();
            })
        """)
        server.shutdown()
    assert f"{address}/book/glossary.html" in {urldefrag(link)[0] for link in links}
    assert all(link.startswith(address) for link in browser.requests)
