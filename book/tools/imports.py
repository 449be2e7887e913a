"""Checks that no cell imports a name of the package before a chapter has built it."""

import ast
from collections.abc import Iterator, Mapping, Set

from names import plain
from project import BookError

PACKAGE = "minivllm"


def check_imports(
    source: str, built: Mapping[str, Set[str]], own_path: str | None = None
) -> None:
    """Refuse a cell that imports what is not there yet.

    Args:
        source: the cell; imports inside functions and `if` blocks count too.
        built: path of a package file -> the names it offers so far.
        own_path: the file that the cell is exported to, which it must not import.
    """
    for module, name in imported(source):
        path = path_of(module, built)
        if own_path is not None and path == own_path:
            raise BookError(f"{own_path} imports itself")
        is_module = name is not None and path_of(f"{module}.{name}", built) is not None
        if is_module:
            continue
        if path is None:
            raise BookError(f"{module} is imported before it is built")
        if name is not None and name not in built[path]:
            raise BookError(f"{module}.{name} is imported before it is built")


def imported(source: str) -> Iterator[tuple[str, str | None]]:
    """Yield (module, name) for every import from the package; name may be None."""
    for node in ast.walk(ast.parse(plain(source))):
        if isinstance(node, ast.Import):
            modules = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise BookError("a notebook has no relative imports: write minivllm.x")
            modules = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in modules:
            if module.split(".")[0] != PACKAGE:
                continue
            if name == "*":
                raise BookError(f"from {module} import *: name what you import")
            yield module, name


def path_of(module: str, built: Mapping[str, Set[str]]) -> str | None:
    """Return the file of a module or package, None if no cell has built it."""
    stem = module.replace(".", "/")
    for path in (f"{stem}.py", f"{stem}/__init__.py"):
        if path in built:
            return path
    return None
