"""Take pictures of a rendered page: wide and narrow, light and dark.

Usage: ``python book/tools/look.py PAGE.html ... [--out FOLDER] [--open-folds]``

Build the book first (``jupyter-book build .``); its pages lie in ``_build/html``.
"""

import argparse
import sys
from pathlib import Path

from browser import Browser, BrowserError

WIDTHS = (1280, 390)  # a laptop and a phone, in pixels
STOP_MOTION = """
document.head.insertAdjacentHTML(
  "beforeend", "<style>* { animation: none !important; transition: none !important }")
"""
OPEN_FOLDS = "document.querySelectorAll('details').forEach(fold => fold.open = true)"
# Chromium's largest texture is 16,384 pixels high.
MAX_HEIGHT = 16_000


def look(browser: Browser, page: Path, out: Path, *, open_folds: bool) -> list[Path]:
    """Take the four pictures of one page and return their files."""
    files = []
    for width in WIDTHS:
        for dark in (False, True):
            browser.open(page.resolve().as_uri(), width=width, dark=dark)
            browser.run(STOP_MOTION)
            if open_folds:
                browser.run(OPEN_FOLDS)
            height = browser.run("document.documentElement.scrollHeight")
            parts = range(0, height, MAX_HEIGHT)
            for part, top in enumerate(parts):
                number = f"-{part + 1}" if len(parts) > 1 else ""
                mode = "dark" if dark else "light"
                file = out / f"{page.stem}-{width}-{mode}{number}.png"
                browser.screenshot(
                    file, clip=(0, top, width, min(MAX_HEIGHT, height - top))
                )
                files.append(file)
    return files


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path, help="built HTML files")
    parser.add_argument("--out", type=Path, default=Path("_build/look"))
    parser.add_argument("--open-folds", action="store_true", help="open every fold")
    args = parser.parse_args()
    missing = [str(page) for page in args.pages if not page.is_file()]
    if missing:
        print("not built:", *missing, file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with Browser() as browser:
            for page in args.pages:
                files = look(browser, page, args.out, open_folds=args.open_folds)
                print(*files, sep="\n")
    except BrowserError as error:
        print(f"look: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
