"""Cuts cells and classes into statements, the units that the exporter merges."""

import ast
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO

from project import BookError

DOCSTRING = '"""'  # the key of a docstring among the members of a class
IMPORTS = (ast.Import, ast.ImportFrom)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Unit:
    """One statement with the comments above it.

    `header` and `members` are filled when the unit is a class that was reopened.
    """

    key: str
    text: str
    node: ast.stmt
    chapter: str
    gap: str  # what stands between it and the statement before
    header: str = ""
    members: list["Unit"] = field(default_factory=list)


def split(
    lines: list[str], body: list[ast.stmt], start: int, chapter: str
) -> list[Unit]:
    """Cut `lines[start:]` into statements; comments go with what follows."""
    units = []
    for node in body:
        end = len(lines) if node is body[-1] else node.end_lineno
        cut = "\n".join(lines[start:end])
        text = cut.strip("\n")
        gap = "\n\n" if start == 0 or cut.startswith("\n") else "\n"
        units.append(Unit(key_of(node, text), text, node, chapter, gap))
        start = end
    return units


def key_of(node: ast.stmt, text: str) -> str:
    """Return the name under which a later statement replaces this one."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        # A property's getter and setter share a name, and so do overloads.
        marks = [ast.unparse(mark) for mark in node.decorator_list]
        key = node.name
        key += "".join(f"@{m}" for m in marks if m.endswith((".setter", ".deleter")))
        if any(mark.endswith("overload") for mark in marks):
            key += f"@overload({ast.unparse(node.args)})"
        return key
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return ast.unparse(node.targets[0])
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target)
    return text.strip()


def members(unit: Unit) -> tuple[str, list[Unit]]:
    """Cut a class into its header and its members (`pass` and `...` are none)."""
    lines = unit.text.split("\n")
    node = ast.parse(unit.text).body[0]
    assert isinstance(node, ast.ClassDef)
    head = header_end(unit.text, node)
    units = split(lines, node.body, head, unit.chapter)
    if is_docstring(units[0].node):
        units[0].key = DOCSTRING
    units = [u for u in units if u.text.strip() not in ("pass", "...")]
    return "\n".join(lines[:head]), units


def header_end(source: str, node: ast.ClassDef | ast.FunctionDef) -> int:
    """Return the line on which the header of a class or function ends."""
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.NEWLINE and token.start[0] >= node.lineno:
            if token.start[0] >= node.body[0].lineno:
                raise BookError(f"{node.name}: write its body on lines of their own")
            return token.start[0]
    raise AssertionError(f"{node.name} has no body")


def is_docstring(node: ast.stmt) -> bool:
    """Tell whether a statement is a string that stands alone."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def is_type_checking(node: ast.stmt) -> bool:
    """Tell whether a statement is an `if TYPE_CHECKING:` block."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def type_imports(unit: Unit) -> list[str]:
    """Return the imports of an `if TYPE_CHECKING:` block."""
    assert isinstance(unit.node, ast.If)
    if unit.node.orelse or not all(isinstance(n, IMPORTS) for n in unit.node.body):
        raise BookError("`if TYPE_CHECKING:` holds imports and nothing else")
    return [ast.unparse(node) for node in unit.node.body]


def needed_names(node: ast.stmt) -> set[str]:
    """Return the names that must be there when a statement is executed.

    Of a function, these are its decorators, defaults and annotations; what is in its
    body is looked up when it is called.
    """
    parts: list[ast.AST] = [node]
    if isinstance(node, FUNCTIONS):
        parts = [*node.decorator_list, node.args]
        parts += [node.returns] if node.returns else []
    elif isinstance(node, ast.ClassDef):
        parts = [*node.decorator_list, *node.bases, *node.keywords]
    found = [n for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)]
    names = {name.id for name in found if isinstance(name.ctx, ast.Load)}
    names -= {name.id for name in found if isinstance(name.ctx, ast.Store)}
    if isinstance(node, ast.ClassDef):
        own = {name for member in node.body for name in bound_names(member)}
        names |= set().union(*map(needed_names, node.body)) - own
    return names


def bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a top-level statement, or a part of it, defines."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        yield node.name
    elif isinstance(node, IMPORTS):
        yield from ((a.asname or a.name).split(".")[0] for a in node.names)
    elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
        for child in ast.iter_child_nodes(node):
            yield from bound_names(child)
    elif isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store):
            yield node.id
    elif not isinstance(node, COMPREHENSIONS):  # their variables are their own
        for child in ast.iter_child_nodes(node):
            yield from bound_names(child)


def lazy_names(node: ast.stmt) -> Iterator[str]:
    """Yield the text keys of a dict literal at the top level of a module."""
    value = getattr(node, "value", None)
    for key in value.keys if isinstance(value, ast.Dict) else []:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value
