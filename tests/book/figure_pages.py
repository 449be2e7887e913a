"""What every figure of the book must keep to, read from its HTML."""

import re
from html.parser import HTMLParser


class Tags(HTMLParser):
    """Collects the tags and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def check_card(page: str) -> Tags:
    """Check that a figure changes nothing around it, and loads nothing.

    The data of the figure must have tried to add a `<b>` and an `onload`.
    """
    tags = Tags(page)
    assert tags.tags.count("script") <= 1 and "b" not in tags.tags
    assert "onload" not in dict(tags.attributes)
    classes = {c for k, v in tags.attributes if k == "class" for c in v.split()}
    assert classes and all(c.startswith("mv-") for c in classes)
    assert all(v.startswith("--mv-") for v in re.findall(r"--[a-z][a-z-]*", page))
    css = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    for selector in re.findall(r"(?:^|[{}])([^{}@]+)\{", css):
        assert ".mv-figure" in selector, selector
    assert not re.search(r"https?:|//\w+\.|@import|src=|url\(", page)
    return tags
