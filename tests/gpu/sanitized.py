"""Run a few cases of each kernel on the GPU: what compute-sanitizer watches."""

from minivllm.ops.launch import CudaModule
from tests.kernels.cases import instances, source_of
from tests.kernels.mutants import LADDERS, kernels_of, killers

if __name__ == "__main__":
    kernels = [kernel for ladder in LADDERS for kernel in kernels_of(ladder)]
    for kernel in kernels:
        cases = killers(kernel)
        module = CudaModule(source_of(cases[0].file), instances(cases))
        for case in cases:
            case.run(module, device="cuda")
    print(f"{len(kernels)} kernels ran")
