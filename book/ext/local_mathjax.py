"""Sphinx extension: formulas are drawn by a local copy of MathJax.

Sphinx loads MathJax from another host by default, and the book loads nothing from
another host. The one file that is needed comes with sphinx-mathjax-offline, whose own
extension would copy all 24 MB of MathJax into the book.
"""

from importlib.util import find_spec
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ExtensionError

PACKAGE = "sphinx-mathjax-offline"
# All of TeX and its fonts in one file, so that nothing is loaded later.
SCRIPT = "tex-svg-full.js"


def use_local_copy(app: Sphinx, config: Config) -> None:
    """Put the script among the static files and point Sphinx to it."""
    spec = find_spec(PACKAGE)
    if spec is None:
        raise ExtensionError(
            f"{PACKAGE} is not installed, and the book's formulas are drawn with it: "
            "run pip install -r requirements.txt"
        )
    folder = Path(spec.submodule_search_locations[0])
    config.html_static_path.append(str(folder / "static" / "mathjax" / SCRIPT))
    config.mathjax_path = SCRIPT
    # The menu would load its accessibility tools, which are not in the one file.
    config.mathjax3_config = {"options": {"enableMenu": False}}


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("config-inited", use_local_copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
