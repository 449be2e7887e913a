"""Merges export cells into the files of the package, one file at a time.

A file grows statement by statement. Each statement has a key, the name it defines. One
whose key is there already takes the place of the old one; only a later chapter may do
that, from a cell tagged `replaces`. So nothing is ever defined twice, and no definition
is lost without a word in its source.
"""

import ast
import re
import textwrap
import tokenize
from contextlib import suppress
from dataclasses import dataclass, field
from io import StringIO

from project import BookError
from statements import (
    DOCSTRING,
    IMPORTS,
    Unit,
    bound_names,
    is_docstring,
    is_type_checking,
    lazy_names,
    members,
    needed_names,
    split,
    type_imports,
)

LITERALS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
CLOSED_BASES = {
    "Enum",
    "IntEnum",
    "StrEnum",
    "Flag",
    "IntFlag",
    "NamedTuple",
    "Protocol",
}


@dataclass(frozen=True)
class Origin:
    """Where a cell stands: its chapter, and whether it is tagged `replaces`."""

    chapter: str
    replaces: bool = False


@dataclass
class Module:
    """A Python file of the package while it grows."""

    docstring: Unit | None = None
    imports: dict[str, None] = field(default_factory=dict)  # an ordered set
    type_imports: dict[str, None] = field(default_factory=dict)
    imported: dict[str, tuple[str | None, str]] = field(default_factory=dict)
    units: list[Unit] = field(default_factory=list)
    chapters: dict[str, None] = field(default_factory=dict)

    def add(self, source: str, origin: Origin) -> None:
        """Merge one export cell, given without the comment that names the file."""
        lines = source.rstrip().split("\n")
        units = split(lines, ast.parse(source).body, 0, origin.chapter)
        if not units:
            raise BookError("the cell exports nothing")
        self.chapters[origin.chapter] = None
        num_replaced = 0
        if is_docstring(units[0].node):
            units[0].key = "the docstring"
            docs = [self.docstring] if self.docstring else []
            num_replaced += merge(docs, [units[0]], origin)
            self.docstring = units.pop(0)
        fresh = []
        for unit in units:
            if isinstance(unit.node, IMPORTS):
                self._add_import(unit)
            elif is_type_checking(unit.node):
                self.type_imports |= dict.fromkeys(type_imports(unit))
            elif isinstance(unit.node, ast.AugAssign):
                extend(self._known(ast.unparse(unit.node.target)), unit)
            elif isinstance(unit.node, ast.ClassDef) and reopens(unit.node):
                num_replaced += reopen(self._known(unit.key), unit, origin)
            else:
                fresh.append(unit)
        num_replaced += merge(self.units, fresh, origin)
        if origin.replaces and not num_replaced:
            raise BookError("the cell is tagged `replaces`, but replaces nothing")

    def _add_import(self, unit: Unit) -> None:
        """Gather an import; one name cannot stand for two things in one file."""
        for alias in unit.node.names:
            name = alias.asname or alias.name
            source = (getattr(unit.node, "module", None), alias.name)
            if self.imported.setdefault(name, source) != source:
                raise BookError(
                    f"{name} is imported from two places in one file: rename one"
                )
        self.imports[unit.text] = None

    def _known(self, key: str) -> Unit:
        for unit in self.units:
            if unit.key == key:
                return unit
        raise BookError(f"{key} is extended, but not defined in this file before")

    def names(self) -> set[str]:
        """Return the names that can be imported from the file as it is now."""
        names = {name for unit in self.units for name in bound_names(unit.node)}
        for text in self.imports:
            names |= set(bound_names(ast.parse(text).body[0]))
        if "__getattr__" in names:  # names that the file loads when they are asked for
            names |= {name for unit in self.units for name in lazy_names(unit.node)}
        return names

    def render(self) -> str:
        """Return the text of the file, not yet formatted."""
        if self.docstring is None:
            raise BookError("the first cell of a module starts with its docstring")
        parts = [signed(self.docstring.text, self.chapters), "\n".join(self.imports)]
        if self.type_imports:
            block = textwrap.indent("\n".join(self.type_imports), "    ")
            parts.append(f"if TYPE_CHECKING:\n{block}")
        units = settled(self.units)
        parts.append("".join(unit.gap + unit.text for unit in units).strip("\n"))
        return "\n\n".join(part for part in parts if part) + "\n"


@dataclass
class Kernel:
    """A C++ or CUDA file while it grows: its cells, one after the other."""

    parts: list[str] = field(default_factory=list)
    chapters: dict[str, None] = field(default_factory=dict)

    def add(self, source: str, origin: Origin) -> None:
        """Append the text that the cell binds to a name; `replaces` starts anew."""
        body = ast.parse(source).body
        value = (
            body[0].value
            if len(body) == 1 and isinstance(body[0], ast.Assign)
            else None
        )
        if not (isinstance(value, ast.Constant) and isinstance(value.value, str)):
            raise BookError('a kernel cell is one assignment: NAME = r"""..."""')
        if origin.replaces:
            self.parts, self.chapters = [], {}
        self.parts.append(value.value.strip("\n"))
        self.chapters[origin.chapter] = None

    def names(self) -> set[str]:
        """Return nothing: a kernel is not imported."""
        return set()

    def render(self) -> str:
        """Return the text of the file, its chapters below the comment at its top."""
        lines = "\n\n".join(self.parts).split("\n")
        end = next(
            i for i, line in enumerate([*lines, ""]) if not line.startswith("//")
        )
        return "\n".join(
            [*lines[:end], f"// {sources(self.chapters)}", *lines[end:], ""]
        )


def merge(old: list[Unit], new: list[Unit], origin: Origin) -> int:
    """Merge units into `old`, in place; return how many were replaced.

    A unit that is new goes before the unit it precedes in its cell, or last.
    """
    num_replaced, anchor = 0, None
    for unit in reversed(new):
        keys = [known.key for known in old]
        if unit.key in keys:
            index = keys.index(unit.key)
            if old[index].chapter == unit.chapter:
                raise BookError(f"{unit.key} is exported twice in one chapter")
            if not origin.replaces:
                raise BookError(
                    f"{unit.key} was exported by {old[index].chapter}: tag the cell "
                    "`replaces` if that is meant"
                )
            old[index] = unit
            num_replaced += 1
        else:
            old.insert(keys.index(anchor) if anchor else len(old), unit)
        anchor = unit.key
    return num_replaced


def settled(units: list[Unit]) -> list[Unit]:
    """Return units in an order in which the file can be imported.

    A statement that was replaced may need a name that came with it: a base, a
    decorator, a type. What defines that name goes before it; all else stays.
    """
    order: list[Unit] = []
    waiting = list(units)
    while waiting:
        needed = needed_names(ast.parse(waiting[0].text).body[0])
        later = [
            unit for unit in waiting[1:] if needed.intersection(bound_names(unit.node))
        ]
        if later:  # first what it needs, in turn with what that needs
            waiting.remove(later[0])
            waiting.insert(0, later[0])
        else:
            order.append(waiting.pop(0))
    return order


def reopens(node: ast.ClassDef) -> bool:
    """Tell whether a class statement is of the form `class Name(Name):`."""
    bases = [ast.unparse(base) for base in node.bases]
    if node.name in bases and len(bases) > 1:
        raise BookError(f"class {node.name}({node.name}) takes no second base")
    return node.name in bases


def reopen(old: Unit, new: Unit, origin: Origin) -> int:
    """Merge the members of `class Name(Name):` into the class it extends."""
    assert isinstance(old.node, ast.ClassDef) and isinstance(new.node, ast.ClassDef)
    bases = {ast.unparse(base).split(".")[-1] for base in old.node.bases}
    if bases & CLOSED_BASES:
        raise BookError(
            f"{old.key} cannot be reopened: {', '.join(bases & CLOSED_BASES)}"
        )
    for node in ast.walk(new.node):
        if isinstance(node, ast.Name) and node.id == "super":
            raise BookError(f"{new.key}: super() means another class once it is merged")
    marks = [[ast.unparse(d) for d in c.decorator_list] for c in (old.node, new.node)]
    if marks[0] != marks[1]:
        raise BookError(f"{new.key} is reopened with other decorators than it has")
    if not old.members:
        old.header, old.members = members(old)
    num_replaced = merge(old.members, members(new)[1], origin)
    is_field = lambda unit: isinstance(unit.node, ast.AnnAssign)  # noqa: E731
    old.members.sort(
        key=lambda unit: 0 if unit.key == DOCSTRING else 2 - is_field(unit)
    )
    old.text = old.header + "".join(unit.gap + unit.text for unit in old.members)
    return num_replaced


def extend(old: Unit, new: Unit) -> None:
    """Fold `NAME += [...]` or `NAME |= {...}` into the list or dict it extends."""
    assert isinstance(new.node, ast.AugAssign)
    value, added = getattr(old.node, "value", None), new.node.value
    if type(value) is not type(added) or not isinstance(value, LITERALS):
        raise BookError(
            f"{old.key}: only a literal list, tuple, set or dict is extended"
        )
    text = old.text.rstrip()
    start, closer = text[:-1].rstrip(), text[-1]
    opener = {"]": "[", ")": "(", "}": "{"}[closer]
    items = new.text[new.text.index(opener) + 1 : new.text.rindex(closer)].strip("\n")
    comma = "" if last_token(start) in (",", opener) else ","
    old.text = f"{start}{comma}\n{items}\n{closer}"
    size = num_items(old.node) + num_items(new.node)
    old.node = ast.parse(old.text).body[0]
    if num_items(old.node) != size:
        raise BookError(
            f"{old.key}: end the last item before the new ones with a comma"
        )


def last_token(text: str) -> str:
    """Return the last token of unfinished code that is neither comment nor space."""
    found = ""
    with suppress(tokenize.TokenError):  # the end is missing, and is not asked for
        for token in tokenize.generate_tokens(StringIO(text).readline):
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE):
                found = token.string
    return found


def num_items(node: ast.stmt) -> int:
    """Count the items of the literal that a statement assigns."""
    value = node.value
    return len(value.keys if isinstance(value, ast.Dict) else value.elts)


def signed(docstring: str, chapters: dict[str, None]) -> str:
    """Add the line that names the chapters a module comes from."""
    text = docstring.strip()
    body = text.removesuffix('"""').rstrip()
    if body == text.rstrip() or not re.match(r'r?"""', text):
        raise BookError('a module docstring is written in """triple double quotes"""')
    last_block = body.split("\n\n")[-1]
    gap = "\n" if re.search(r"^(In vLLM|Paper):", last_block, re.MULTILINE) else "\n\n"
    line = textwrap.fill(sources(chapters), 88, subsequent_indent="    ")
    return f'{body}{gap}{line}\n"""'


def sources(chapters: dict[str, None]) -> str:
    """Return the sentence that names the chapters of a file."""
    return f"Source: {'; '.join(chapters)}."
