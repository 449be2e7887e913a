"""What a code cell reads, binds and changes, found without running it."""

import ast
import symtable
from collections.abc import Iterator

from IPython.core.inputtransformer2 import TransformerManager


def plain(source: str) -> str:
    """Return a cell as plain Python: magics become calls, the rest stays."""
    try:
        ast.parse(source)
    except SyntaxError:
        return TransformerManager().transform_cell(source)
    return source


def reads(source: str) -> set[str]:
    """Return the global names that a cell looks up, now or in its functions later."""
    table = symtable.symtable(plain(source), "cell", "exec")
    now = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    return now | reads_later(source)


def reads_later(source: str) -> set[str]:
    """Return the global names that the functions and classes of a cell look up."""
    return set(_globals(symtable.symtable(plain(source), "cell", "exec")))


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    for child in table.get_children():
        yield from (s.get_name() for s in child.get_symbols() if s.is_global())
        yield from _globals(child)


def binds(source: str) -> set[str]:
    """Return the global names that a cell gives a value."""
    table = symtable.symtable(plain(source), "cell", "exec")
    return {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }


def changes(source: str) -> set[str]:
    """Return the names whose objects a cell's statements may change in place.

    That is `x` in `x[0] = 1`, `x.a = 1` and in a bare call `x.append(1)`.
    """
    found = set()
    for node in ast.walk(ast.parse(plain(source))):
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            if isinstance(node.ctx, ast.Load):
                continue
            target = node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            target = node.value.func
        else:
            continue
        is_part = isinstance(target, (ast.Subscript, ast.Attribute))
        while isinstance(target, (ast.Subscript, ast.Attribute)):
            target = target.value
        if is_part and isinstance(target, ast.Name):
            found.add(target.id)
    return found
