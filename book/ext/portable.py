"""Sphinx extension: plain Markdown that reads well in Colab becomes rich in the book.

What a chapter writes                          What the book shows
-------------------------------------------    ---------------------------------------
``> [!TIP]`` quotes (alerts)                   admonitions; bold first words: the title
``<details>`` and ``<summary>``                folds with Markdown and code inside
``**Figure 1.2.** A caption``                  a caption and the target ``#figure-1-2``
``$$ ... \\tag{1.3} $$``                        an equation, target ``#equation-1-3``
``[decoder.py](../minivllm/decoder.py)``       a link to the file in the repository
``{{ repository }}`` in a page                 the repository's address

It also marks what the style sheet lays out in a way of its own: printed text in
columns, which wrapping would spoil, and the table of what a chapter exports.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

LOGGER = logging.getLogger(__name__)

ALERT = re.compile(r"\[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]\s*")
ADDITION = re.compile(r"( \([^()]*\))\.\s?")
FOLD_OPENS = re.compile(
    r"\s*<details(?P<open>\s+open)?>\s*<summary>(?P<summary>.*?)</summary>(?P<rest>.*)",
    re.DOTALL,
)
FOLD_CLOSES = re.compile(r"\s*</details>")
CAPTION = re.compile(r"(Figure|Table) (A?\d+\.\d+)\.")
# Text after a gap, as in a table that was printed with spaces.
COLUMN = re.compile(r"\S {2,}\S")
PAGE_COLUMNS = 88  # what fits the page at 1280 pixels
TAG = re.compile(r"\\tag\{(A?\d+\.\d+)\}")


class Alerts(SphinxTransform):
    """Replace block quotes that start with an alert mark by admonitions."""

    default_priority = 400

    def apply(self) -> None:
        """Transform every alert of the document."""
        for quote in list(self.document.findall(nodes.block_quote)):
            paragraph = quote[0] if len(quote) else None
            if not isinstance(paragraph, nodes.paragraph) or not len(paragraph):
                continue
            mark = ALERT.match(paragraph[0].astext())
            if mark is None or not isinstance(paragraph[0], nodes.Text):
                continue
            paragraph[0] = nodes.Text(paragraph[0][mark.end() :])
            strip_start(paragraph)
            kind = mark[1].lower()
            title = take_title(paragraph) or [nodes.Text(kind.capitalize())]
            body = quote.children if len(paragraph) else quote.children[1:]
            heading = nodes.title("", "", *title)
            quote.replace_self(
                nodes.admonition("", heading, *body, classes=[kind, "mv-alert"])
            )


def strip_start(paragraph: nodes.paragraph) -> None:
    """Remove the white space a paragraph starts with."""
    while len(paragraph) and isinstance(paragraph[0], nodes.Text):
        text = paragraph.pop(0).astext().lstrip()
        if text:
            paragraph.insert(0, nodes.Text(text))
            return


def take_title(paragraph: nodes.paragraph) -> list[nodes.Node]:
    """Cut a bold first sentence off a paragraph."""
    if not len(paragraph) or not isinstance(paragraph[0], nodes.strong):
        return []
    strong = paragraph[0]
    rest = "".join(node.astext() for node in paragraph[1:])
    if addition := ADDITION.match(rest):  # "**A title** (0.32.0)." belongs together
        strong += nodes.Text(f"{addition[1]}.")
        paragraph[1] = nodes.Text(paragraph[1][addition.end() :])
        rest = rest[addition.end() :]
    alone = not rest or rest.startswith("\n")
    if not alone and not strong.astext().endswith((".", "?", "!", ":")):
        return []  # a bold word at the start of a sentence
    paragraph.pop(0)
    strip_start(paragraph)
    last = strong[-1]
    if isinstance(last, nodes.Text):
        strong[-1] = nodes.Text(last.rstrip(".:"))
    return list(strong.children)


class fold(nodes.General, nodes.Element):
    """A part that is shown when its summary is clicked."""


class Folds(SphinxTransform):
    """Pair the raw ``<details>`` and ``</details>`` around Markdown into folds."""

    default_priority = 401

    def apply(self) -> None:
        """Transform the whole document."""
        self.pair(self.document)

    def pair(self, parent: nodes.Element) -> None:
        """Fold the children of one node, and theirs."""
        result = nodes.Element()
        open_folds: list[fold] = []
        for child in list(parent.children):
            html = raw_html(child)
            opens = FOLD_OPENS.match(html)
            closes = FOLD_CLOSES.findall(html)
            current = open_folds[-1] if open_folds else result
            if opens:
                node = fold(summary=opens["summary"].strip(), open=bool(opens["open"]))
                node.source, node.line = child.source, child.line
                current.append(node)
                rest = opens["rest"].strip()
                inner = rest.removesuffix("</details>").strip()
                if inner:
                    node += nodes.raw("", inner, format="html")
                if not rest.endswith("</details>"):
                    open_folds.append(node)
            elif closes and not FOLD_CLOSES.sub("", html).strip():
                if len(closes) > len(open_folds):
                    self.warn("</details> without its <details>", child)
                del open_folds[max(0, len(open_folds) - len(closes)) :]
            else:
                if isinstance(child, nodes.Element):
                    if open_folds and "cell" in child.get("classes", []):
                        self.warn("<details> must close in its own cell", child)
                    self.pair(child)
                current.append(child)
        for node in open_folds:
            self.warn("<details> does not close before the next heading", node)
        parent.children = []
        parent.extend(result.children)

    def warn(self, message: str, node: nodes.Node) -> None:
        """Report what would tear the page apart."""
        LOGGER.warning(message, location=node, type="portable", subtype="fold")


def raw_html(node: nodes.Node) -> str:
    """Return the text of a raw HTML node, and nothing for others."""
    is_raw = isinstance(node, nodes.raw) and node.get("format") == "html"
    return node.astext() if is_raw else ""


def visit_fold(self: HTML5Translator, node: fold) -> None:
    """Open the fold; its summary may hold HTML, as the author wrote it."""
    mark = " open" if node["open"] else ""
    self.body.append(
        f'<details class="mv-fold"{mark}><summary>{node["summary"]}</summary>\n'
        '<div class="mv-fold-body">\n'
    )


def depart_fold(self: HTML5Translator, node: fold) -> None:
    """Close the fold."""
    self.body.append("</div></details>\n")


class Captions(SphinxTransform):
    """Turn caption paragraphs into captions, and give them and equations a target."""

    default_priority = 402  # before MyST resolves links, at 879

    def apply(self) -> None:
        """Transform the whole document."""
        for paragraph in list(self.document.findall(nodes.paragraph)):
            first = next((n for n in paragraph if n.astext()), None)
            match = isinstance(first, nodes.strong) and CAPTION.match(first.astext())
            if match:
                self.add_target(paragraph, match[1], match[2])
                self.attach(paragraph)
        for equation in self.document.findall(nodes.math_block):
            tag = TAG.search(equation.astext())
            if tag:
                self.add_target(equation, "equation", tag[1])
                # Sphinx would put it in an environment that allows no \\tag.
                equation["nowrap"] = True
                formula = f"\\[{equation.astext()}\\]"
                equation.children = [nodes.Text(formula)]
        for term in self.document.findall(nodes.term):
            for name in term["ids"]:
                self.slugs()[name.lower()] = (term.line, name, term.astext())

    def slugs(self) -> dict[str, tuple[int, str, str]]:
        """Return the targets of this document, where MyST looks links up."""
        metadata = self.env.metadata[self.env.docname]
        return metadata.setdefault("myst_slugs", self.document.myst_slugs)

    def add_target(self, node: nodes.Element, kind: str, number: str) -> None:
        """Let ``#figure-1-2`` lead to the node, also from other documents."""
        name = f"{kind}-{number}".lower().replace(".", "-")
        if name in self.slugs():
            LOGGER.warning(
                f"{kind} {number} stands here twice",
                location=node,
                type="portable",
                subtype="caption",
            )
        node["ids"].append(name)
        self.slugs()[name] = (node.line, name, f"{kind} {number}")

    def attach(self, caption: nodes.paragraph) -> None:
        """Join a caption with what stands before it."""
        caption["classes"].append("mv-caption")
        siblings = caption.parent.children
        position = siblings.index(caption)
        before = siblings[position - 1] if position else None
        if not isinstance(before, nodes.Element):
            return
        before["classes"].append("mv-captioned")
        for image in before.findall(nodes.image):
            if not image.get("alt"):
                image["alt"] = caption.astext().replace("\n", " ")


class SourceLinks(SphinxTransform):
    """Lead links to files of the project into its repository."""

    default_priority = 403

    def apply(self) -> None:
        """Replace what would become copies for download."""
        theme = self.config.html_theme_options
        address = f"{theme['repository_url']}/blob/{theme['repository_branch']}"
        for link in list(self.document.findall(addnodes.download_reference)):
            file, _ = self.env.relfn2path(link["reftarget"], link["refdoc"])
            reference = nodes.reference(refuri=f"{address}/{Path(file).as_posix()}")
            for text in link.children:  # without the mark of a download
                reference.extend(text.children)
            link.replace_self(reference)


class Layouts(SphinxTransform):
    """Mark printed columns and tables of exports for the style sheet."""

    default_priority = 404

    def apply(self) -> None:
        """Transform the whole document."""
        for block in self.document.findall(nodes.literal_block):
            if "output" in block["classes"] and is_in_columns(block.astext()):
                block["classes"].append("mv-columns")
        for table in self.document.findall(nodes.table):
            heads = [entry.astext() for entry in next(table.findall(nodes.row))]
            if heads == ["file", "names", "what it does"]:
                table["classes"].append("mv-exports")
                for link in table.findall(nodes.reference):
                    for path in link.findall(nodes.literal):
                        allow_breaks(path)


def allow_breaks(path: nodes.literal) -> None:
    """Let the browser break a path behind its slashes."""
    folders, file = path.astext().rpartition("/")[::2]
    path.children = []
    for folder in folders.split("/"):
        path += [nodes.Text(f"{folder}/"), nodes.raw("", "<wbr>", format="html")]
    path += nodes.Text(file)


def is_in_columns(text: str) -> bool:
    """Tell whether lines that fit the page stand below one another in columns."""
    lines = text.splitlines()
    fits = all(len(line) <= PAGE_COLUMNS for line in lines)
    return fits and sum(bool(COLUMN.search(line)) for line in lines) >= 2


def insert_repository(app: Sphinx, docname: str, source: list[str]) -> None:
    """Fill the repository's address in where a page asks for it."""
    address = app.config.html_theme_options["repository_url"]
    source[0] = source[0].replace("{{ repository }}", address)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the transforms."""
    app.add_node(fold, html=(visit_fold, depart_fold))
    for transform in (Alerts, Folds, Captions, SourceLinks, Layouts):
        app.add_transform(transform)
    app.connect("source-read", insert_repository)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
