"""The mistakes that compute-sanitizer has to notice on a GPU are mistakes."""

import pytest
import torch

from minivllm.errors import KernelError
from minivllm.ops import rungs
from minivllm.ops.emulate import EmulatedModule
from tests.gpu.sanitized import KERNELS, source_with_mistake
from tests.kernels.cases import KERNELS as FOLDER
from tests.kernels.tools import needs_compiler


def run_norm(source: str) -> None:
    module = EmulatedModule(source, ["rms_norm_v2<float>"], check=True)
    x, weight = torch.ones(3, 575), torch.ones(575)
    rungs.rms_norm(module, "v2", torch.zeros_like(x), x, weight, 1e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("tool", "report"), [("memcheck", "illegal"), ("racecheck", "race")]
)
def test_the_emulator_reports_them(tool, report):
    with pytest.raises(KernelError, match=report):
        run_norm(source_with_mistake(tool))
    run_norm(source_with_mistake("initcheck"))  # there the input is the mistake


def test_every_kernel_is_watched():
    sources = [path.read_text() for path in FOLDER.glob("*.cu")]
    num_kernels = sum(source.count("__global__ void ") for source in sources)
    assert len(KERNELS) == len(set(KERNELS)) == num_kernels >= 14
