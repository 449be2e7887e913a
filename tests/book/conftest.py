"""Lets the tests import the tools, and makes them a project of their own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "book" / "tools"))

from browser import Browser, find_chromium  # noqa: E402
from project import Project  # noqa: E402

APPENDIX = """\
---
minivllm:
  follows: 1
---

# A1. More pairs: an appendix

```{code-cell} ipython3
:tags: [setup, hide-cell]

# {{setup}}
from minivllm.pairs import add
```

```{code-cell} ipython3
:tags: [export]

# minivllm/pairs.py
def double(value: float) -> float:
    \"\"\"Return twice the value.\"\"\"
    return add(value, value)
```
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A book of one chapter and one appendix, not built yet."""
    (tmp_path / "book" / "src").mkdir(parents=True)
    (tmp_path / "book" / "bookkit").symlink_to(ROOT / "book" / "bookkit")
    (tmp_path / "_config.yml").write_text(
        "repository: {url: https://example.org/book, branch: main}\n"
    )
    (tmp_path / "_toc.yml").write_text(
        "root: book/intro\nparts:\n- chapters:\n"
        "  - file: chapters/a1_more\n  - file: chapters/01_pairs\n"
    )
    sources = tmp_path / "book" / "src"
    sample = Path(__file__).with_name("sample.md").read_text()
    (sources / "01_pairs.md").write_text(sample)
    (sources / "a1_more.md").write_text(APPENDIX)
    return Project(tmp_path)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser that reaches nothing but this machine."""
    if find_chromium() is None:
        pytest.skip("Chromium is not installed (on Debian: apt-get install chromium)")
    with Browser() as chromium:
        yield chromium
