"""What a kernel expects is read from its source, and a launch is held against it."""

import ctypes

import numpy as np
import pytest

from minivllm.errors import KernelError
from minivllm.ops.kernel_source import (
    DTYPES,
    SCALARS,
    Parameter,
    check_launch,
    kernel_parameters,
    pack_arguments,
)

SOURCE = r"""
// __global__ void commented(int x) {}
/* __global__ void commented_too(int x) {} */
template <typename T, int BLOCK_SIZE = 16, typename Index = int>
__global__ void __launch_bounds__(128) gather(T* out, const T* __restrict__ x,
                                              const Index* rows, float eps, bool flag) {
}
extern "C" __global__ void plain(unsigned int n, const long long* at, half* to) {}
__global__ __launch_bounds__(64, 2) void bounded(size_t size, double* sums) {}
__global__ void nothing() {}
__global__ void by_value(float4 x) {}
__global__ void far(float** x) {}
template <typename T, typename U = T> __global__ void same(T* x, U* y) {}
"""


def declared(instance: str) -> list[str]:
    return [str(parameter) for parameter in kernel_parameters(SOURCE, instance)]


def test_template_arguments_are_put_in():
    assert declared("gather<__half, 8, long long>") == [
        "__half* out",
        "const __half* x",
        "const long long* rows",
        "float eps",
        "bool flag",
    ]
    assert kernel_parameters(SOURCE, "gather<float>")[1:3] == [
        Parameter("x", "float32", is_pointer=True, is_const=True),
        Parameter("rows", "int32", is_pointer=True, is_const=True),
    ]
    assert declared("gather< float , 8 >") == declared("gather<float>")


def test_other_ways_to_declare_a_kernel_are_read():
    assert declared("plain") == ["unsigned n", "const long long* at", "__half* to"]
    assert declared("bounded") == ["unsigned long long size", "double* sums"]
    assert declared("nothing") == []
    assert declared("same<int>") == ["int* x", "int* y"]
    assert declared("same<int, float>") == ["int* x", "float* y"]


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        ("gather", r"takes 3 arguments \(typename T, int BLOCK_SIZE = 16,"),
        ("gather<float, 8, int, 1>", "takes 3 arguments"),
        ("plain<float>", "takes 0 arguments"),
        ("gathers<float>", r"no kernel 'gathers': did you mean gather\?"),
        ("commented", "no kernel 'commented'"),
        ("commented_too", "no kernel"),
        ("by_value", "'float4 x' cannot be passed"),
        ("gather<float", r"'gather<float' is no kernel: write its name"),
        ("same<int>; x", "is no kernel"),
        ("", "'' is no kernel"),
        ("far", r"'float\*\* x' cannot be passed"),
        ("gather<Custom>", r"'T\* out' cannot be passed"),
    ],
)
def test_what_cannot_be_read_or_passed_is_refused(instance, message):
    with pytest.raises(KernelError, match=message):
        kernel_parameters(SOURCE, instance)


@pytest.mark.parametrize(("kind", "dtype"), DTYPES.items())
def test_every_type_has_a_dtype(kind, dtype):
    (pointer,) = kernel_parameters(f"__global__ void k(const {kind}* x) {{}}", "k")
    assert (pointer.dtype, str(pointer)) == (dtype, f"const {kind}* x")
    array = np.zeros(2, "uint16" if dtype == "bfloat16" else dtype)
    (address,) = pack_arguments("k", [pointer], [array])
    assert address.value == array.ctypes.data


@pytest.mark.parametrize(("dtype", "carrier"), SCALARS.items())
def test_numbers_arrive_whole_or_not_at_all(dtype, carrier):
    parameter = Parameter("x", dtype)
    if dtype == "bool":
        good, bad = [True, False], [1, 0.0, "no"]
    elif dtype.startswith("float"):
        good, bad = [0.5, np.float32(2.5), ctypes.c_double(1.5)], [1, True, None]
    else:
        bits = 8 * ctypes.sizeof(carrier)
        signed = dtype.startswith("int")
        least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        least, most = (least, most) if signed else (0, 2**bits - 1)
        good, bad = [least, most, np.int8(7)], [least - 1, most + 1, 1.0, [1]]
    for number in good:
        (packed,) = pack_arguments("k", [parameter], [number])
        assert type(packed) is carrier
        assert packed.value == getattr(number, "value", number)
    for number in bad:
        with pytest.raises(KernelError, match="argument 0 is"):
            pack_arguments("k", [parameter], [number])


def test_no_array_is_a_null_pointer():
    (address,) = pack_arguments("k", [Parameter("x", "float32", True)], [None])
    assert address.value is None


@pytest.mark.parametrize(
    ("grid", "block", "sides"),
    [
        (7, 32, ((7, 1, 1), (32, 1, 1))),
        ((2, 3), (4, 5, 6), ((2, 3, 1), (4, 5, 6))),
        (np.int64(2**31 - 1), [1024], ((2**31 - 1, 1, 1), (1024, 1, 1))),
        ((1, 65535, 65535), (1, 1, 64), ((1, 65535, 65535), (1, 1, 64))),
    ],
)
def test_sides_are_filled_up(grid, block, sides):
    assert check_launch("k", grid, block) == sides


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        (0, 32),
        (-1, 32),
        (2**31, 32),
        ((1, 65536), 32),
        ((1, 1, 65536), 32),
        ((1, 1, 1, 1), 32),
        ((), 0),
        ((), 1),
        (1.5, 32),
        (1, (2.5, 1)),
        (1, "4"),
        (1, None),
        (1, 1025),
        (1, (32, 33)),
        (1, (1, 1, 65)),
    ],
)
def test_a_launch_beyond_the_limits_is_refused(grid, block):
    with pytest.raises(KernelError, match=r"^k: the (grid|block)"):
        check_launch("k", grid, block)
