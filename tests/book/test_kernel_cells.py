"""The colours of CUDA code in cells."""

import sys
from pathlib import Path

from pygments.token import Keyword, String

sys.path.insert(0, str(Path(__file__).parents[2] / "book" / "ext"))
from kernel_cells import IS_CUDA, RAW_STRING, PythonWithCuda

CELL = '''X = r"""
__global__ void f(float* x) { x[0] = 1.0f; }
"""
Y = r"""only a text"""
def g(): return X
'''


def test_cuda_inside_a_raw_string_is_code_and_other_strings_stay():
    tokens = list(PythonWithCuda().get_tokens(CELL))
    assert "".join(piece for _, piece in tokens) == CELL
    kinds = {piece: kind for kind, piece in tokens}
    assert kinds["__global__"] in Keyword
    assert kinds["def"] in Keyword
    assert any(kind in String and "only a text" in piece for kind, piece in tokens)
    places = [at for at, _, _ in PythonWithCuda().get_tokens_unprocessed(CELL)]
    assert places == sorted(places)


def test_every_kernel_of_the_chapter_is_taken_for_cuda():
    source = Path(__file__).parents[2] / "book" / "src" / "06_cuda_kernels.md"
    strings = [inside for _, inside, _ in RAW_STRING.findall(source.read_text())]
    kernels = [inside for inside in strings if "__global__" in inside]
    assert len(kernels) > 13
    assert all(IS_CUDA.search(inside) for inside in kernels)
