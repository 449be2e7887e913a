"""What compute-sanitizer watches: all kernels as they are, or one with a mistake.

python -m tests.gpu.sanitized           # a few cases of each kernel
python -m tests.gpu.sanitized memcheck  # what this tool has to complain about
"""

import sys

import torch

from minivllm.ops import rungs
from minivllm.ops.launch import CudaModule
from tests.kernels.cases import instances, path_of, source_of
from tests.kernels.kinds import FILES
from tests.kernels.mutants import kernels_of, killers

KERNELS = [kernel for file in FILES for kernel in kernels_of(file)]
LAST_LOOP = "i < hidden; i += blockDim.x)\n    to[i]"
BARRIER = "__syncthreads();  // the next round"
# What rms_norm_v2 has, and what it gets instead. For initcheck, which looks for memory
# that nobody has written, an input that nobody has written is enough.
MISTAKES = {
    "memcheck": (LAST_LOOP, LAST_LOOP.replace("<", "<=")),
    "racecheck": (BARRIER, BARRIER.replace("__syncthreads();", "")),
    "initcheck": ("", ""),
}


def source_with_mistake(tool: str) -> str:
    """Return the norms, with the mistake that a tool has to notice."""
    right, wrong = MISTAKES[tool]
    text = path_of("rms_norm.cu").read_text()
    assert right in text, f"{right!r} is not there"
    return source_of("rms_norm.cu", {"rms_norm.cu": text.replace(right, wrong)})


def run_all() -> None:
    """Run the cases that the planted bugs are looked for with.

    Not the extreme ones, whose last digits are another matter on a GPU.
    """
    for kernel in KERNELS:
        cases = [case for case in killers()[kernel] if not case.is_extreme]
        module = CudaModule(source_of(cases[0].file), instances(cases))
        for case in cases:
            case.run(module, device="cuda")
    print(f"{len(KERNELS)} kernels ran")


def run_mistake(tool: str) -> None:
    """Run the norm with a mistake."""
    module = CudaModule(source_with_mistake(tool), ["rms_norm_v2<float>"])
    x, out = (torch.empty(3, 575, device="cuda") for _ in range(2))
    if tool != "initcheck":
        x.fill_(1)
    weight = torch.ones(575).to("cuda")
    rungs.rms_norm(module, "v2", out, x, weight, 1e-5)
    torch.cuda.synchronize()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_mistake(sys.argv[1])
    else:
        run_all()
