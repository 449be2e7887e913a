"""Operators and engine on the device: what the CPU and the NumPy twin compute."""

import sysconfig
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from minivllm.generation import generate_naive
from minivllm.ops import cuda_layers
from minivllm.ops.cuda import fused_add_rms_norm, paged_attention, rms_norm, softmax
from minivllm.request import ModelOutput, SchedulerOutput
from minivllm.runners.torch_runner import TorchRunner
from tests import test_cuda_layers
from tests.op_tools import assert_close
from tests.parity.tiny import numpy_decoder, torch_decoder
from tests.test_cuda_ops import norms_and_shares, operators
from tests.test_torch_runner import (
    BLOCK_SIZE,
    NUM_NEW,
    PROMPTS,
    SPEC,
    WEIGHTS,
    answers,
    make_request,
    make_scheduler,
    run,
)

Weights = dict[str, torch.Tensor]
OPERATORS = [rms_norm, fused_add_rms_norm, softmax, paged_attention]
OPERATORS += [cuda_layers.rotary_embedding, cuda_layers.silu_and_mul]
OPERATORS += [cuda_layers.gelu_and_mul, cuda_layers.gelu_tanh_and_mul]
OPERATORS += [cuda_layers.gated_mlp, cuda_layers.embedding]
OPERATORS += [cuda_layers.reshape_and_cache]


def on(device: str, arguments: tuple) -> tuple:
    """Return arguments with their tensors on a device."""
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments)


def arguments_of(operator: object) -> tuple:
    """Return arguments for an operator, on the CPU."""
    numbers = torch.Generator().manual_seed(0)
    return (operators(numbers) | test_cuda_layers.operators(numbers))[operator]


@pytest.mark.parametrize("operator", OPERATORS)
def test_torchs_own_checks_pass(operator, gpu):
    verdicts = torch.library.opcheck(operator, on(gpu, arguments_of(operator)))
    assert set(verdicts.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_model_compiles_into_one_graph(backend, gpu):
    header = Path(sysconfig.get_path("include"), "Python.h")
    if backend == "inductor" and not (find_spec("triton") and header.exists()):
        pytest.skip("inductor needs Triton and the headers of Python (python3-dev)")
    x, added = torch.randn(2, 3, 32, device=gpu)
    weight = torch.randn(32, device=gpu)
    compiled = torch.compile(norms_and_shares, fullgraph=True, backend=backend)
    results = compiled(x, added, weight), norms_and_shares(x, added, weight)
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, units=16)  # Triton's sine is not torch's


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_are_captured_into_a_graph(operator, gpu):
    arguments = on(gpu, arguments_of(operator))
    fresh = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    expected = [operator(*fresh), *fresh]  # loads, too
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = operator(*arguments)
    graph.replay()
    for ours, theirs in zip([out, *arguments], expected, strict=True):
        if isinstance(ours, torch.Tensor):
            assert ours.equal(theirs)


def make_runner(
    gpu: str, weights: Weights = WEIGHTS, num_blocks: int = 64
) -> TorchRunner:
    """Return a runner on the device, with our kernels."""
    runner = TorchRunner(
        torch_decoder(SPEC, weights).to(gpu),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=256,
    )
    for op in ("rms_norm", "paged_attention", *cuda_layers.KERNELS):
        assert runner.choices[op].backend.name == "cuda", runner.choices[op].passed_over
    return runner


@pytest.mark.parametrize("budget", [2048, 7])
def test_the_engine_gives_the_tokens_of_the_numpy_twin(budget, gpu):
    twin = numpy_decoder(SPEC, WEIGHTS)
    expected = [generate_naive(twin, tokens, NUM_NEW) for tokens in PROMPTS]
    runner = make_runner(gpu)
    requests = [make_request(index, tokens) for index, tokens in enumerate(PROMPTS)]
    run(runner, requests, make_scheduler(runner, budget))
    assert answers(requests) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_in_16_bits_are_those_of_the_numpy_twin(dtype, gpu):
    """The tokens need not be, where two are close: the twin scores the engine's own."""
    if dtype is torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU does not multiply in bfloat16")
    weights = {name: weight.to(dtype) for name, weight in WEIGHTS.items()}
    runner, twin = make_runner(gpu, weights), numpy_decoder(SPEC, weights)
    requests = [make_request(index, tokens) for index, tokens in enumerate(PROMPTS)]
    found, execute = defaultdict(list), runner.execute

    def execute_and_note(step: SchedulerOutput) -> ModelOutput:
        output = execute(step)
        for request_id, scores in output.token_logits.items():
            found[request_id] += scores
        return output

    runner.execute = execute_and_note
    run(runner, requests)
    for request in requests:
        ours = found[request.request_id]
        assert len(ours) == NUM_NEW
        for i, token_id in enumerate(request.output_token_ids):
            tokens = request.token_ids[: request.num_prompt_tokens + i]
            logits = twin.next_token_logits(tokens)
            allowed = 8 * torch.finfo(dtype).eps * abs(logits).max()
            assert abs(ours[i] - logits[token_id]) <= allowed


@pytest.mark.slow
def test_a_long_run_stays_right(gpu):
    runner = make_runner(gpu)
    first = None
    for _ in range(200):
        requests = [make_request(i, tokens) for i, tokens in enumerate(PROMPTS)]
        run(runner, requests)
        first = first or answers(requests)
        assert answers(requests) == first
