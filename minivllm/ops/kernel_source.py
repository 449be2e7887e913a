"""Read CUDA sources, and bring a launch into the form that their kernels expect.

A source is one text, with all it includes from `kernels/`: NVRTC then needs no include
path, and a change in a header changes the key of a cache. What a kernel expects is
read from its declaration, since a compiled kernel does not tell.

Invariant: the emulator and the GPU refuse the same launches with the same words.

Called by `minivllm.ops.emulate` and `minivllm.ops.launch`.

In vLLM: vllm/_custom_ops.py; torch checks the arguments against a schema there.
Source: appendix A15, "A GPU in one header".
"""

import ctypes
import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from operator import gt
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.errors import KernelError

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")


def read_source(path: Path) -> str:
    """Return a CUDA source in which quoted includes are replaced by their files.

    Lines keep their file and number (`#line`), so that messages name the place where
    something is written. Each file comes once, as with `#pragma once`.

    Raises:
        KernelError: A file is not there.
    """
    return "\n".join(_inlined(path, path.parent, set())) + "\n"


def _inlined(path: Path, root: Path, seen: set[Path]) -> Iterator[str]:
    seen.add(path.resolve())
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise KernelError(f"cannot read {str(path)!r}: {error.strerror}") from error
    name = path.relative_to(root).as_posix()
    yield f'#line 1 "{name}"'
    for number, line in enumerate(lines, start=1):
        include = _INCLUDE.match(line)
        if include:
            child = path.parent / include[1]
            if child.resolve() not in seen:
                yield from _inlined(child, root, seen)
            yield f'#line {number + 1} "{name}"'
        else:
            yield "" if _PRAGMA_ONCE.match(line) else line


# What CUDA calls a type, and how NumPy and torch call it.
DTYPES = {
    "bool": "bool",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "unsigned short": "uint16",
    "int": "int32",
    "unsigned": "uint32",
    "long long": "int64",
    "unsigned long long": "uint64",
    "__half": "float16",
    "__nv_bfloat16": "bfloat16",
    "float": "float32",
    "double": "float64",
}
CUDA_TYPES = {dtype: name for name, dtype in DTYPES.items()}
# Other spellings.
SAME_TYPES = {
    "char": "signed char",
    "unsigned int": "unsigned",
    "half": "__half",
    "nv_bfloat16": "__nv_bfloat16",
    "size_t": "unsigned long long",
    **{f"{dtype}_t": name for dtype, name in CUDA_TYPES.items() if "int" in dtype},
}
# Numbers that are passed by value, and the types of C that carry them.
SCALARS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}
# The types of Python for the same: bool, int, float.
PLAIN_TYPES = {dtype: type(carrier().value) for dtype, carrier in SCALARS.items()}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel.

    In `rms_norm_v1<float>`, `const T* x` is Parameter("x", "float32", True, True).

    Attributes:
        name: As in the source.
        dtype: What it is, or points to, in NumPy's words.
        is_pointer: Whether it is the address of an array.
        is_const: Whether the kernel promises not to write there.
    """

    name: str
    dtype: str
    is_pointer: bool = False
    is_const: bool = False

    def __str__(self) -> str:
        const = "const " if self.is_const else ""
        return f"{const}{CUDA_TYPES[self.dtype]}{'*' * self.is_pointer} {self.name}"


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BOUNDS = r"(?:__launch_bounds__\s*\([^()]*\)\s*)?"
_KERNEL = re.compile(
    r"(?:template\s*<(?P<template>[^<>]*)>\s*)?"
    r'(?:extern\s*"C"\s*)?__global__\s+'
    rf"{_BOUNDS}void\s+{_BOUNDS}(?P<name>\w+)\s*\((?P<parameters>[^()]*)\)"
)


def kernel_parameters(source: str, instance: str) -> list[Parameter]:
    """Return the parameters of a kernel, as its source declares them.

    Args:
        source: CUDA C++.
        instance: A kernel with its template arguments, "rms_norm_v1<float>".

    Raises:
        KernelError: There is no such kernel, its template takes other arguments, or a
            parameter is nothing that can be passed from here.
    """
    found = re.fullmatch(r"\s*(\w+)\s*(?:<(.*)>)?\s*", instance)
    if not found:
        raise KernelError(
            f"{instance!r} is no kernel: write its name, and template arguments if it "
            "has any, such as 'scale<float>'"
        )
    name, arguments = found[1], _split(found[2] or "")
    kernels = {
        found["name"]: found for found in _KERNEL.finditer(_COMMENT.sub(" ", source))
    }
    if name not in kernels:
        nearest = difflib.get_close_matches(name, kernels, n=1) or sorted(kernels)
        hint = f": did you mean {', '.join(nearest)}?" if nearest else ""
        raise KernelError(f"{instance}: the source has no kernel {name!r}{hint}")
    declared = _split(kernels[name]["template"] or "")
    names, defaults = [], []  # of "typename T" and "int BLOCK_SIZE = 16"
    for parameter in declared:
        left, _, default = parameter.partition("=")
        names.append(left.split()[-1])
        defaults.append(default.strip())
    arguments += defaults[len(arguments) :]
    if len(arguments) != len(names) or not all(arguments):
        raise KernelError(
            f"{instance}: the template takes {len(names)} arguments "
            f"({', '.join(declared)})"
        )
    known: dict[str, str] = {}
    for template_name, argument in zip(names, arguments, strict=True):
        known[template_name] = known.get(argument, argument)  # "typename U = T"
    texts = _split(kernels[name]["parameters"])
    return [_parameter(instance, text, known) for text in texts]


def _split(text: str) -> list[str]:
    """Return the parts between commas; none of an empty text."""
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _parameter(instance: str, text: str, known: dict[str, str]) -> Parameter:
    """Read "const T* __restrict__ x", where T is known."""
    words = re.sub(r"\b(const|volatile|__restrict__)\b", " ", text)
    found = re.fullmatch(r"\s*([\w\s]+?)\s*(\*?)\s*(\w+)\s*", words)
    if found:
        written, star, name = found.groups()
        written = " ".join(known.get(written, written).split())
        dtype = DTYPES.get(SAME_TYPES.get(written, written))
        if dtype and (star or dtype in SCALARS):
            is_const = bool(star) and "const" in text.partition("*")[0].split()
            return Parameter(name, dtype, bool(star), is_const)
    raise KernelError(
        f"{instance}: the parameter {text!r} cannot be passed from here: use numbers "
        f"of 32 or 64 bits, bool, and pointers to {', '.join(DTYPES)}"
    )


def is_array(value: Any) -> bool:
    """Tell whether a value is an array of NumPy or a tensor of torch."""
    return isinstance(value, np.ndarray) or hasattr(value, "data_ptr")


def pack_arguments(
    instance: str, parameters: Sequence[Parameter], arguments: Sequence[Any]
) -> list[Any]:
    """Return the arguments as ctypes objects, in the types that the kernel expects.

    Args:
        instance: The kernel, for messages.
        parameters: From `kernel_parameters`.
        arguments: Arrays and tensors, of which only the address is passed, numbers,
            and None for a null pointer. An array for `__nv_bfloat16*` may be of
            uint16, since NumPy has no bfloat16.

    Raises:
        KernelError: There are too many or too few, or one is of another type, does not
            fit, or may not be written.
    """
    if len(arguments) != len(parameters):
        expected = ", ".join(str(parameter) for parameter in parameters)
        raise KernelError(
            f"{instance} takes {len(parameters)} arguments ({expected}), "
            f"not {len(arguments)}"
        )
    packed: list[Any] = []
    for parameter, argument in zip(parameters, arguments, strict=True):
        try:
            pack = _pack_pointer if parameter.is_pointer else _pack_number
            packed.append(pack(parameter, argument))
        except TypeError as error:
            raise KernelError(
                f"{instance}: argument {len(packed)} is {parameter}, but {error} was "
                "passed"
            ) from None
    return packed


def _pack_pointer(parameter: Parameter, array: Any) -> ctypes.c_void_p:
    if array is None:
        return ctypes.c_void_p()
    if not is_array(array):
        raise TypeError(_with_article(array))
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype != parameter.dtype and (parameter.dtype, dtype) != ("bfloat16", "uint16"):
        raise TypeError(f"an array of {dtype}")
    if isinstance(array, np.ndarray):
        if not parameter.is_const and not array.flags.writeable:
            raise TypeError("an array that may only be read")
        return ctypes.c_void_p(array.ctypes.data)
    return ctypes.c_void_p(array.data_ptr())


def _pack_number(parameter: Parameter, number: Any) -> Any:
    plain_type = PLAIN_TYPES[parameter.dtype]
    if type(number) is not plain_type:  # seldom, and slower to decide
        number = _to_plain(number, plain_type)
    packed = SCALARS[parameter.dtype](number)
    if plain_type is int and packed.value != number:
        raise TypeError(f"{number}, which does not fit,")
    return packed


def _to_plain(number: Any, plain_type: type) -> Any:
    """Return a number of NumPy or ctypes as one of Python, if it is of that kind."""
    if isinstance(number, ctypes._SimpleCData):
        number = number.value
    if plain_type is bool:
        is_right = isinstance(number, bool | np.bool_)
    elif plain_type is float:
        is_right = isinstance(number, Real) and not isinstance(number, Integral)
    else:
        is_right = isinstance(number, Integral)
    if not is_right:
        raise TypeError(_with_article(number))
    return plain_type(number)


def _with_article(value: Any) -> str:
    """Return "an int", "a float"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"  # but "a uint8"


# The limits of every GPU since 2014 (CUDA C++ Programming Guide, compute capabilities).
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024  # of a block, in all

Sides = tuple[int, int, int]


def check_launch(
    instance: str, grid: int | Sequence[int], block: int | Sequence[int]
) -> tuple[Sides, Sides]:
    """Return grid and block with three sides each.

    Raises:
        KernelError: No GPU takes a launch of that size.
    """
    sizes = []
    for kind, given, limit in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
        sides = tuple(given) if isinstance(given, Sequence) else (given,)
        if (
            not 1 <= len(sides) <= 3
            or not all(
                type(side) is int or isinstance(side, Integral) for side in sides
            )
            or min(sides) < 1
            or any(map(gt, sides, limit))
        ):
            raise KernelError(
                f"{instance}: the {kind} is {given!r}, but its one to three sides must "
                f"be whole numbers from 1 to {', '.join(map(str, limit))}: launch "
                "nothing if there is nothing to do, and let a thread do more if there "
                "is too much"
            )
        sizes.append((*map(int, sides), *(1,) * (3 - len(sides))))
    if math.prod(sizes[1]) > MAX_THREADS:
        raise KernelError(
            f"{instance}: the block of {block} has {math.prod(sizes[1])} threads, but "
            f"at most {MAX_THREADS} fit: use a smaller one"
        )
    return sizes[0], sizes[1]
