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
    """Return the global names that a cell looks up, also inside its functions."""
    return set(_reads(symtable.symtable(plain(source), "cell", "exec")))


def _reads(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        is_global = table.get_type() == "module" or symbol.is_global()
        if is_global and symbol.is_referenced():
            yield symbol.get_name()
    for child in table.get_children():
        yield from _reads(child)


def binds(source: str) -> set[str]:
    """Return the global names that a cell gives a value."""
    table = symtable.symtable(plain(source), "cell", "exec")
    return {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
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
