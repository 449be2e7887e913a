"""NVRTC: what it compiles, what it says, and where it is looked for."""

import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from minivllm.errors import BackendUnavailable, KernelError
from minivllm.ops import nvrtc
from minivllm.ops.kernel_source import read_source
from minivllm.ops.nvrtc import (
    Nvrtc,
    compile_cubin,
    find_headers,
    find_libraries,
    find_mma,
    find_nvrtc,
    include_options,
    why_no_mma,
    why_not_compiled_for,
)

needs_nvrtc = pytest.mark.skipif(
    why_not_compiled_for("sm_80") is not None, reason=str(why_not_compiled_for("sm_80"))
)
needs_c_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="there is no C compiler for a stand-in of NVRTC"
)
SOURCE = """
template <typename T>
__global__ void scale(T* out, const T* x, float factor, int num) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < num) out[i] = T(factor * float(x[i]));
}
"""
HALVES = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n" + SOURCE


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and nothing that was found before."""
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compiled"


# What it compiles.


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_a_cubin_is_machine_code_of_one_architecture(arch):
    cubin = compile_cubin(HALVES, ["scale<float>", "scale<__half>"], arch)
    assert cubin.code.startswith(b"\x7fELF")
    assert int.from_bytes(cubin.code[18:20], "little") == 190  # EM_CUDA, in elf.h
    assert cubin.names.keys() == {"scale<float>", "scale<__half>"}
    for name in cubin.names.values():
        assert name.encode() in cubin.code
        assert f"'{name}' for '{arch}'" in cubin.log


@needs_nvrtc
def test_all_types_of_the_engine_compile():
    types = ["float", "__half", "__nv_bfloat16"]
    compile_cubin(HALVES, [f"scale<{name}>" for name in types], "sm_75")


@needs_nvrtc
def test_what_was_compiled_is_read_from_the_cache(cache, monkeypatch):
    first = compile_cubin(SOURCE, ["scale<float>"], "sm_80")
    (file,) = cache.iterdir()
    assert file.suffix == ".cubin"
    monkeypatch.setattr(Nvrtc, "compile", None)  # an error if it is called
    assert compile_cubin(SOURCE, ["scale<float>"], "sm_80") == first


@needs_nvrtc
@pytest.mark.parametrize("length", [0, 20, 200, -100])
def test_what_is_damaged_in_the_cache_is_compiled_again(length, cache):
    first = compile_cubin(SOURCE, ["scale<float>"], "sm_80")
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:length])
    again = compile_cubin(SOURCE, ["scale<float>"], "sm_80")
    assert (again.code, again.names) == (first.code, first.names)
    assert compile_cubin(SOURCE, ["scale<float>"], "sm_80") == again  # mended


@needs_nvrtc
@pytest.mark.parametrize(
    "changed", ["source", "instances", "arch", "options", "version"]
)
def test_whatever_goes_into_a_cubin_is_in_its_name(changed, cache, monkeypatch):
    source, instances, arch = SOURCE, ["scale<float>"], "sm_80"
    compile_cubin(source, instances, arch)
    if changed == "source":
        source += "\n// new"
    elif changed == "instances":
        instances = ["scale<double>"]
    elif changed == "arch":
        arch = "sm_90"
    elif changed == "options":
        monkeypatch.setattr(nvrtc, "OPTIONS", ["--std=c++17"])
    else:
        monkeypatch.setattr(find_nvrtc(None), "version", (99, 0))
    compile_cubin(source, instances, arch)
    assert len(list(cache.glob("*.cubin"))) == 2


@needs_nvrtc
def test_a_mistake_is_told_with_its_file_and_line(tmp_path):
    (tmp_path / "helper.cuh").write_text(
        "\n\n__device__ int bad() { return nothing; }\n"
    )
    (tmp_path / "main.cu").write_text('#include "helper.cuh"\n' + SOURCE)
    source = read_source(tmp_path / "main.cu")
    message = r'cannot compile scale<float>:\nhelper\.cuh\(3\): error: .*"nothing"'
    with pytest.raises(KernelError, match=message):
        compile_cubin(source, ["scale<float>"], "sm_80")


@needs_nvrtc
def test_a_mistake_leaves_nothing_in_the_cache(cache):
    with pytest.raises(KernelError):
        compile_cubin("__global__ void f() { x; }", ["f"], "sm_80")
    assert not list(cache.iterdir())


@needs_nvrtc
@pytest.mark.parametrize("source", [SOURCE, SOURCE.replace("num)", "nmu)")])
def test_what_nvrtc_has_made_is_given_back(source, monkeypatch):
    calls, real = [], Nvrtc.call

    def call(self, name, *arguments):
        calls.append(name)
        return real(self, name, *arguments)

    monkeypatch.setattr(Nvrtc, "call", call)
    try:
        compile_cubin(source, ["scale<float>"], "sm_80")
    except KernelError:
        assert source != SOURCE
    assert calls.count("CreateProgram") == calls.count("DestroyProgram") == 1


@needs_nvrtc
def test_an_instance_that_does_not_exist_is_told():
    with pytest.raises(KernelError, match=r'scale<flot>:\n.*"flot" is undefined'):
        compile_cubin(SOURCE, ["scale<flot>"], "sm_80")


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("90", "'90' is no architecture of a GPU: write it as 'sm_80'"),
        ("sm_90a", "'sm_90a' is no architecture"),
        ("sm_61", "need a GPU of sm_70 or newer, and this is sm_61"),
        ("sm_999", r"NVRTC \d+\.\d+ compiles for sm_\d+ to sm_\d+, but not for sm_999"),
    ],
)
def test_an_architecture_out_of_reach_is_told(arch, message):
    with pytest.raises(BackendUnavailable, match=message):
        compile_cubin(SOURCE, ["scale<float>"], arch)


# Where it is looked for.


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Return a function that puts files below folders of wheels and of a toolkit."""
    find_nvrtc.cache_clear()
    monkeypatch.setattr(nvrtc.sys, "path", [str(tmp_path / "site")])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    real = nvrtc.installed

    def only_ours(pattern):
        return [path for path in real(pattern) if tmp_path in path.parents]

    monkeypatch.setattr(nvrtc, "installed", only_ours)

    def put(path: str, text: str = ""):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def put_headers(folder: str, version: int):
        put(f"{folder}/include/cuda_fp16.h")
        text = f"/* */\n#define CUDA_VERSION {version}\n"
        return put(f"{folder}/include/cuda.h", text).parent

    put.headers = put_headers
    yield put
    find_nvrtc.cache_clear()


def test_wheels_of_both_versions_and_toolkits_are_found(places):
    old = places("site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    new = places("site/nvidia/cu13/lib/libnvrtc.so.13")
    places("site/nvidia/cu13/lib/libnvrtc-builtins.so.13.1")
    places("site/nvidia/cu13/lib/libnvrtc.so.13.alt")
    later = places("toolkit/lib64/libnvrtc.so.14")
    places("toolkit/lib64/libnvrtc.so.13")  # the wheel's comes first
    assert find_libraries() == {12: old, 13: new, 14: later}


def test_headers_of_the_nearest_version_are_taken(places):
    places.headers("site/nvidia/old", 12020)
    near = places.headers("site/nvidia/cuda_runtime", 12090)
    places.headers("site/nvidia/cu13", 13000)
    assert find_headers((12, 8)) == near
    exact = places.headers("toolkit", 12080)
    assert find_headers((12, 8)) == exact


def test_headers_without_a_version_are_not_taken(places):
    places("toolkit/include/cuda_fp16.h")
    with pytest.raises(BackendUnavailable, match="no headers"):
        find_headers((13, 0))
    places("toolkit/include/cuda.h", "#define CUDA_VERSION unknown")
    with pytest.raises(BackendUnavailable, match="no headers"):
        find_headers((13, 0))


@pytest.mark.parametrize(
    ("version", "package"),
    [((12, 8), "nvidia-cuda-runtime-cu12,"), ((13, 0), "nvidia-cuda-runtime,")],
)
def test_missing_headers_are_told_with_their_package(version, package, places):
    places.headers("toolkit", 11080)
    number = rf"NVRTC {version[0]}\.{version[1]}"
    with pytest.raises(BackendUnavailable, match=f"{number}: pip install {package}"):
        find_headers(version)


@pytest.mark.parametrize(
    "folder",
    [
        "site/nvidia/cu13/include",
        "site/nvidia/cuda_nvcc/include",
        "toolkit/include",
        "site/triton/backends/nvidia/include",
    ],
)
def test_what_mma_h_includes_is_found_wherever_it_is(folder, places):
    assert find_mma() is None
    path = places(f"{folder}/crt/mma.h")
    assert find_mma() == path.parents[1]
    assert why_no_mma() is None
    found = SimpleNamespace(include=places.headers("other", 13000))
    assert include_options(found) == [f"-I{found.include}", f"-I{path.parents[1]}"]


def test_a_wheel_of_cuda_comes_before_the_copy_in_triton(places):
    places("site/triton/backends/nvidia/include/crt/mma.h")
    path = places("site/nvidia/cu13/include/crt/mma.h")
    assert find_mma() == path.parents[1]


def test_without_it_the_reason_names_the_package(places):
    found = SimpleNamespace(include=places.headers("other", 13000))
    assert include_options(found) == [f"-I{found.include}"]
    assert "pip install nvidia-cuda-crt," in why_no_mma(13)
    assert "pip install nvidia-cuda-nvcc-cu12," in why_no_mma(12)


@pytest.mark.parametrize(
    ("major", "message"),
    [
        (None, r"CUDA 13 is not installed: pip install nvidia-cuda-nvrtc, or set"),
        (12, r"CUDA 12 is not installed: pip install nvidia-cuda-nvrtc-cu12,"),
    ],
)
def test_without_nvrtc_the_reason_says_how_to_get_it(major, message, places):
    with pytest.raises(BackendUnavailable, match=message):
        find_nvrtc(major)
    assert re.search(message, why_not_compiled_for("sm_80", major))


def test_nvrtc_of_another_version_than_torchs_is_not_taken(places):
    places("site/nvidia/cu13/lib/libnvrtc.so.13")
    message = r"CUDA 12 is not installed, only that of 13: pip install .*-cu12"
    with pytest.raises(BackendUnavailable, match=message):
        find_nvrtc(12)


def test_a_library_that_cannot_be_loaded_is_told(places):
    places("toolkit/lib64/libnvrtc.so.13", "no library")
    with pytest.raises(BackendUnavailable, match=r"NVRTC cannot be loaded: .*libnvrtc"):
        find_nvrtc()


@needs_c_compiler
def test_both_halves_of_the_library_are_loaded(places):
    """Some wheels do not say where the second one is, and NVRTC asks for its name."""
    folder = places.headers("toolkit", 13000).parent / "lib64"
    halves = {
        "libnvrtc-builtins.so.13.0": "int builtins;",
        "libnvrtc.so.13": """
            #include <dlfcn.h>
            const char* nvrtcGetErrorString(int code) { return "half is missing"; }
            int nvrtcVersion(int* major, int* minor) {
              *major = 13;
              *minor = 0;
              return dlopen("libnvrtc-builtins.so.13.0", RTLD_LAZY) ? 0 : 7;
            }
        """,
    }
    for name, text in halves.items():
        source = places(f"{name}.c", text)
        folder.mkdir(exist_ok=True)
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(source)]
        subprocess.run([*command, "-o", str(folder / name)], check=True)
    assert find_nvrtc().version == (13, 0)


@pytest.fixture
def real_toolkit():
    """The library and the headers of this machine."""
    return max(find_libraries().items())[1], find_nvrtc().include


@needs_nvrtc
def test_a_toolkit_named_by_the_environment_serves(real_toolkit, places, tmp_path):
    library, headers = real_toolkit
    toolkit = tmp_path / "toolkit"
    toolkit.mkdir()
    (toolkit / "lib64").symlink_to(library.parent)
    (toolkit / "include").symlink_to(headers)
    assert find_nvrtc().include == toolkit / "include"
    compile_cubin(HALVES, ["scale<__half>"], "sm_80")
