"""Plant bugs in the kernels, mechanically: each line is broken in every way we know.

A mutant is a source with one small change: a barrier deleted, `<` made `<=`, a
condition dropped, a loop begun a step later, a sum begun at one. Its name is the
function and the changed line, so that a change elsewhere does not rename it.
"""

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from minivllm.errors import KernelError
from minivllm.ops import rungs
from tests.kernels.cases import (
    HEADERS,
    Case,
    VarianceCase,
    emulated,
    instances,
    path_of,
    source_of,
)
from tests.kernels.kinds import FILES, KINDS

TIMEOUT_S = 2.0  # of computing; a case takes some milliseconds

# A number on its own; not an alignment, which no compiler takes one larger or smaller.
NUMBER = r"(?<![\w.])(?<!alignas\()%s(?![\w.])"
# A pattern in a statement, and what may stand there instead.
REPLACEMENTS = [
    # Another bound, another direction.
    (" < ", " <= "),
    (" <= ", " < "),
    (" > ", " >= "),
    (" >= ", " > "),
    (r"\bmin\(", "max("),
    (r"\bmax\(", "min("),
    (r"\bfmaxf\(", "fminf("),
    # A condition dropped, or never true.
    (r"if \((?!true).*?\)(?= \w)", "if (true)"),
    (r"if \((?!true).*?\)(?= \w)", "if (false)"),
    (r"(?<== )[^=?]+ \? (.+) : (.+)(?=;)", r"\1"),
    (r"(?<== )[^=?]+ \? (.+) : (.+)(?=;)", r"\2"),
    # Other arithmetic.
    (r" \+ ", " - "),
    (" - ", " + "),
    (r" \* ", " / "),
    (" / ", " * "),
    (" / ", " % "),
    (" % ", " / "),
    (r" \+= ", " -= "),
    (r" \+= ", " = "),
    (" << ", " >> "),
    # Other numbers: a step more or less, another first value.
    (NUMBER % r"\d+", lambda found: str(int(found[0]) + 1)),
    (NUMBER % r"[1-9]\d*", lambda found: str(int(found[0]) - 1)),
    (NUMBER % r"0\.0f", "1.0f"),
    (NUMBER % r"1\.0f", "0.0f"),
    (NUMBER % r"\d\.\d*[1-9]\d*f", lambda found: f"{2 * float(found[0][:-1])}f"),
    (r"0xf", "0x7"),
    (r"-3\.4\S+(?=;)|(?<== )LOWEST", "0.0f"),
    (r"= \{\}", "= {1.0f}"),
    # Other threads, other memory, another operation.
    (r"\b(threadIdx|blockIdx)\.[xyz]\b", "0"),
    (r"\bblockIdx\.x\b", "blockIdx.y"),
    (r"\bk_cache\b", "v_cache"),
    (r"\bv_cache\b", "k_cache"),
    ("<Sum>", "<Max>"),
    ("<Max>", "<Sum>"),
    (r"head / \(num_heads / num_kv_heads\)", "head % num_kv_heads"),
    (r"head / \(num_heads / num_kv_heads\)", "head"),
    (r"\bto_float\(from_float<T>\((\w+)\)\)", r"\1"),
    # A step left out.
    (r"^__sync\w+\(.*\);$", ""),
    (r"^[\w.<>\[\]]+( [-+*/]?= |\().*;$", ""),
    (r"^(return|break);$", ""),
]
# The first line of a function or a struct, and the name of either.
DEFINITION = re.compile(
    r"^(?:.*__global__ void|.*__device__.*?|struct(?: alignas\(.*?\))?|constexpr.*?) "
    r"(\w+)(?:<.*>)?(?:\(| \{| =)"
)


@dataclass(frozen=True)
class Mutant:
    """A file of ours with one change."""

    file: str
    function: str
    change: str
    text: str

    @property
    def name(self) -> str:
        """What it is called in the table of equivalents."""
        return f"{self.file} {self.function}: {self.change}"


def lines_of(file: str) -> Iterator[tuple[int, str, str]]:
    """Yield the lines of code: number, function that they belong to, code."""
    function = ""
    for number, line in enumerate(path_of(file).read_text().splitlines()):
        code = line.partition("//")[0].rstrip()
        if not code or code.startswith("#"):
            continue
        found = DEFINITION.match(code)
        if found and not code.startswith("   "):  # a member may be indented by two
            function = found[1]
        yield number, function, code


def statements(file: str) -> Iterator[tuple[int, str, str]]:
    """Yield what is not declared but done."""
    is_signature = False
    for number, function, code in lines_of(file):
        if code.startswith(("template", "using")):
            continue
        if DEFINITION.match(code) and not code.startswith("   "):
            is_signature = "=" not in code.partition("(")[0]
        if is_signature:
            is_signature = "{" not in code
            code = code.partition("{")[2].removesuffix("}")
        if code.strip(" {};"):
            yield number, function, code.strip()


@cache
def mutants_of(file: str) -> list[Mutant]:
    """Return every mutant of a file."""
    lines = path_of(file).read_text().splitlines(keepends=True)
    mutants: dict[str, Mutant] = {}
    for number, function, code in statements(file):
        for pattern, replacement in REPLACEMENTS:
            for found in re.finditer(pattern, code):
                new = replacement(found) if callable(replacement) else replacement
                new = found.expand(new)
                changed = code[: found.start()] + new + code[found.end() :]
                line = lines[number].replace(code, changed or ";", 1)
                text = "".join([*lines[:number], line, *lines[number + 1 :]])
                change = changed or f"without {code}"
                mutant = Mutant(file, function, change, text)
                count = 1
                while mutants.setdefault(mutant.name, mutant).text != text:
                    count += 1  # the same change in an equal line
                    mutant = Mutant(file, function, f"{change} ({count})", text)
    return list(mutants.values())


def kernels_of(file: str) -> list[str]:
    """Return the kernels of a file."""
    return [name for _, name, code in lines_of(file) if "__global__" in code]


@cache
def kernels_using(function: str, user: str) -> list[str]:
    """Return the kernels of a file that use a function, themselves or through others.

    Args:
        function: Of the file or of a header.
        user: The file.
    """
    words: dict[str, set[str]] = {}
    for file in (*HEADERS, user):
        for _, name, code in lines_of(file):
            words.setdefault(name, set()).update(re.findall(r"\w+", code))

    def used_by(name: str) -> set[str]:
        """Return all that a function names, and what these name."""
        found, waiting = {name}, [name]
        while waiting:
            new = words[waiting.pop()] & words.keys() - found
            found |= new
            waiting += new
        return found

    return [kernel for kernel in kernels_of(user) if function in used_by(kernel)]


@cache
def killers() -> dict[str, list[Case]]:
    """Return, for each kernel, the cases that have to notice whatever is wrong."""
    found: dict[str, list[Case]] = {}
    for kind in (VarianceCase, *KINDS):
        for case in kind.killers():
            for instance in instances([case]):
                found.setdefault(instance.partition("<")[0], []).append(case)
    return found


def noticed(mutant: Mutant) -> str | None:
    """Return what notices a mutant: the first complaint, or None if there is none."""
    users = ["twice.cu", *FILES] if mutant.file in HEADERS else [mutant.file]
    for file in users:
        source = source_of(file, {mutant.file: mutant.text})
        for kernel in kernels_using(mutant.function, file):
            for case in killers()[kernel]:
                try:
                    module = emulated([case], source)  # most need no second one
                except KernelError as error:
                    # Of a compiler that takes nothing, a mutant would be no better.
                    if not any(name in str(error) for name in (*HEADERS, file)):
                        raise
                    return f"does not compile: {error}"
                if complaint := complaint_of(case, module):
                    return complaint
    return None


def complaint_of(case: Case, module: rungs.Kernels) -> str | None:
    """Run a case in a process of its own, which a mutant may crash."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            case.run(module, timeout_s=TIMEOUT_S)
        except (AssertionError, KernelError) as error:
            os.write(writer, (str(error) or "wrong").encode()[:4000])
        except BaseException as error:
            os.write(writer, repr(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8", errors="replace") as pipe:
        complaint = pipe.read()
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return complaint or None
