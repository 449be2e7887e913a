import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

pytest.importorskip("myst_nb", reason="the book's packages are not installed")

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

ROOT = Path(__file__).parents[2]
ADDRESS = "https://github.com/someone/engine"
SETTINGS = {
    "extensions": ["myst_nb", "portable"],
    "html_theme": "basic",
    "html_theme_options": {"repository_url": ADDRESS, "repository_branch": "main"},
    "myst_enable_extensions": ["dollarmath"],
    "myst_heading_anchors": 4,
    "smartquotes": False,
}

Build = Callable[..., tuple[BeautifulSoup, str]]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Return a function that renders a page: its article and what was warned about."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "book" / "ext"), *sys.path])

    def run(text: str, **others: str) -> tuple[BeautifulSoup, str]:
        source = tmp_path / "source"
        source.mkdir()
        pages = {"index": f"# Title\n\n{text}\n", **others}
        for name, page in pages.items():
            (source / f"{name}.md").write_text(page)
        (source / "engine.py").write_text("")
        hidden = "\n".join(others)
        if others:
            with (source / "index.md").open("a") as file:
                file.write(f"\n```{{toctree}}\n:hidden:\n{hidden}\n```\n")
        warnings = io.StringIO()
        with docutils_namespace():
            Sphinx(
                source,
                confdir=None,
                outdir=tmp_path / "html",
                doctreedir=tmp_path / "trees",
                buildername="html",
                confoverrides=SETTINGS,
                status=None,
                warning=warnings,
            ).build()
        html = (tmp_path / "html" / "index.html").read_text()
        article = BeautifulSoup(html, "html.parser").select_one("div.body")
        lines = warnings.getvalue().splitlines()
        # The small theme knows no repository; the extension reads it all the same.
        kept = [line for line in lines if "unsupported theme option" not in line]
        return article, "\n".join(kept)

    return run


def test_an_alert_becomes_an_admonition_of_its_kind(build: Build) -> None:
    article, warnings = build("> [!WARNING]\n> Mind the *gap*.\n>\n> - and this\n")
    box = article.select_one("div.admonition.warning")
    assert box.select_one(".admonition-title").text == "Warning"
    assert box.em.text == "gap" and box.li.text == "and this"
    assert "[!" not in article.text and not warnings


@pytest.mark.parametrize(
    ("first_line", "title", "rest"),
    [
        (
            "**Predict before you run.** How many?",
            "Predict before you run",
            "How many?",
        ),
        ("**Why not 7?** Think.", "Why not 7?", "Think."),
        ("**What vLLM does**\n> It waits.", "What vLLM does", "It waits."),
        (
            "**What vLLM does** (0.32.0). It waits.",
            "What vLLM does (0.32.0)",
            "It waits.",
        ),
        ("**vLLM** (0.32.0) waits.", "Tip", "vLLM (0.32.0) waits."),
        ("**vLLM** waits.", "Tip", "vLLM waits."),
    ],
)
def test_bold_first_words_of_an_alert_are_its_title_if_they_are_a_sentence(
    build: Build, first_line: str, title: str, rest: str
) -> None:
    article, _ = build(f"> [!TIP]\n> {first_line}\n")
    heading, body = article.select("div.admonition.tip > p")
    assert (heading.text, body.text.strip()) == (title, rest)


def test_an_alert_whose_kind_and_title_share_a_line(build: Build) -> None:
    article, _ = build("> [!NOTE] **One line**\n> Text.\n")
    heading, body = article.select("div.admonition.note > p")
    assert (heading.text, body.text) == ("One line", "Text.")


def test_an_ordinary_quote_stays_a_quote(build: Build) -> None:
    article, _ = build("> It is *so*. [!TIP] in the middle means nothing.\n")
    assert article.blockquote and not article.select(".admonition")


FOLD = """
<details>
<summary>Solution of <b>1.2</b></summary>

Text with `code`:

```python
x = 1
```

<details><summary>Deeper</summary>

- a list

</details>

</details>

After.
"""


def test_a_fold_holds_markdown_and_highlighted_code(build: Build) -> None:
    article, warnings = build(FOLD)
    fold = article.select_one("details.mv-fold")
    assert fold.summary.text == "Solution of 1.2" and fold.summary.b
    assert fold.select_one("div.highlight-python span.mi").text == "1"
    inner = fold.select_one("details.mv-fold")
    assert inner.li.text == "a list"
    assert "After." in article.text and "After." not in fold.text
    assert len(article.find_all("details")) == 2 and not warnings


def test_a_fold_within_a_list_or_on_one_line(build: Build) -> None:
    article, warnings = build(
        "1. Item\n\n   <details><summary>Hint</summary>\n\n   **Bold.**\n\n"
        "   </details>\n\n<details><summary>Short</summary>plain</details>\n\nAfter.\n"
    )
    in_list, short = article.select("details.mv-fold")
    assert in_list.find_parent("li") and in_list.strong.text == "Bold."
    assert short.select_one(".mv-fold-body").text.strip() == "plain"
    assert not warnings


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<details>\n<summary>Open</summary>\n\nText.\n", "does not close"),
        ("Text.\n\n</details>\n", "without its <details>"),
        (
            "<details>\n<summary>Open</summary>\n\n## Heading\n\n</details>\n",
            "does not close before the next heading",
        ),
    ],
)
def test_a_torn_fold_fails_the_build(build: Build, text: str, complaint: str) -> None:
    _, warnings = build(text)
    assert complaint in warnings


def test_captions_give_targets_and_alternative_texts(build: Build) -> None:
    article, warnings = build(
        "See [figure 1.2](#figure-1-2) and [there](other.md#table-a1-1).\n\n"
        "![](picture.svg)\n\n**Figure 1.2.** It *grows*.\nSlowly.\n",
        other="# Other\n\n| a |\n|---|\n| 1 |\n\n**Table A1.1.** One number.\n",
    )
    caption = article.select_one("p.mv-caption")
    assert caption["id"] == "figure-1-2"
    assert article.img["alt"] == "Figure 1.2. It grows. Slowly."
    here, there = article.select("p a.reference")
    assert (here["href"], there["href"]) == ("#figure-1-2", "other.html#table-a1-1")
    missing_picture = "image file not readable"
    assert warnings.count("WARNING") == 1 and missing_picture in warnings


def test_an_authors_alternative_text_is_kept(build: Build) -> None:
    article, _ = build("![A curve.](picture.svg)\n\n**Figure 1.1.** It grows.\n")
    assert article.img["alt"] == "A curve."


def test_a_reference_without_its_figure_and_a_number_used_twice_fail(
    build: Build,
) -> None:
    _, warnings = build(
        "[There](#figure-9-9).\n\n**Figure 1.1.** One.\n\n**Figure 1.1.** Two.\n"
    )
    assert "figure-9-9" in warnings and "Figure 1.1 stands here twice" in warnings


def test_a_tagged_equation_is_a_target_and_may_have_several_lines(
    build: Build,
) -> None:
    article, warnings = build(
        "By [(1.3)](#equation-1-3).\n\n"
        "$$\n\\begin{aligned} a &= b \\\\ &= c \\end{aligned} \\tag{1.3}\n$$\n"
    )
    equation = article.select_one("div.math")
    assert equation["id"] == "equation-1-3"
    assert equation.text.strip().startswith("\\[") and "split" not in equation.text
    assert article.select_one("p a")["href"] == "#equation-1-3" and not warnings


def test_links_to_files_lead_into_the_repository(build: Build) -> None:
    article, warnings = build("The [engine](engine.py).\n")
    link = article.select_one("p a")
    assert (link["href"], link.text) == (f"{ADDRESS}/blob/main/engine.py", "engine")
    assert not warnings


def test_the_repositorys_address_is_filled_in_also_in_code(build: Build) -> None:
    article, _ = build("```bash\ngit clone {{ repository }}\n```\n")
    assert f"git clone {ADDRESS}" in article.text


def test_a_glossary_term_can_be_linked_like_a_heading(build: Build) -> None:
    article, warnings = build(
        "[norm](words.md#term-rmsnorm)\n",
        words="# Words\n\n```{glossary}\nRMSNorm\n  A norm.\n```\n",
    )
    assert article.select_one("p a")["href"] == "words.html#term-RMSNorm"
    assert not warnings
