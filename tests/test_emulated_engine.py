"""The engine with the kernels of a GPU, emulated: the tokens of torch."""

import pytest
import torch

from minivllm.ops import cuda_layers
from minivllm.ops.cuda import KernelAttention, KernelRMSNorm
from minivllm.ops.cuda_prefill import KernelPrefill
from minivllm.ops.launch import KernelFile
from minivllm.runners.torch_runner import TorchRunner
from minivllm.sampling.params import SamplingParams
from tests.op_tools import needs_compiler
from tests.test_torch_runner import (
    EXPECTED,
    PROMPTS,
    WEIGHTS,
    answers,
    make_request,
    make_runner,
    make_scheduler,
    run,
)

pytestmark = needs_compiler


@pytest.fixture
def calls(monkeypatch):
    """Force the ops, and count how often each kernel does something."""
    counts = {"norm": 0, "attention": 0, "prefill": 0}
    real_norm, real_attend = KernelRMSNorm.__call__, KernelAttention.attend
    real_prefill = KernelPrefill.attend

    def norm(self, *arguments):
        counts["norm"] += 1
        return real_norm(self, *arguments)

    def attend(self, *arguments):
        counts["attention"] += 1
        return real_attend(self, *arguments)

    def prefill(self, *arguments):
        counts["prefill"] += 1
        return real_prefill(self, *arguments)

    monkeypatch.setattr(KernelRMSNorm, "__call__", norm)
    monkeypatch.setattr(KernelAttention, "attend", attend)
    monkeypatch.setattr(KernelPrefill, "attend", prefill)
    for op in ("RMS_NORM", "PAGED_ATTENTION", "PREFILL_ATTENTION"):
        monkeypatch.setenv(f"MINIVLLM_OP_{op}", "emulated")
    return counts


def test_a_batch_gets_the_tokens_of_torch(calls):
    runner = make_runner()
    requests = [make_request(index, tokens) for index, tokens in enumerate(PROMPTS)]
    steps = run(runner, requests)
    assert answers(requests) == EXPECTED
    num_layers = runner.decoder.spec.num_layers
    assert calls["norm"] == (2 * num_layers + 1) * len(steps)
    assert calls["attention"] >= num_layers * (len(steps) - 1)
    assert calls["prefill"] >= num_layers, "prompts are read from the cache, too"


def test_chunks_and_answers_in_one_step_get_them_too(calls):
    runner = make_runner()
    requests = [make_request(index, tokens) for index, tokens in enumerate(PROMPTS)]
    run(runner, requests, make_scheduler(runner, budget=7))
    assert answers(requests) == EXPECTED
    assert calls["attention"] and calls["prefill"]


@pytest.fixture
def started(monkeypatch):
    """Force the small ops of a layer, and count the launches of each file."""
    counts = dict.fromkeys(
        ["rotary", "activations", "embedding", "reshape_and_cache"], 0
    )
    real_run = KernelFile.run

    def run_and_count(self, *arguments, **options):
        counts[self.name.removesuffix(".cu")] += 1
        return real_run(self, *arguments, **options)

    monkeypatch.setattr(KernelFile, "run", run_and_count)
    for op in cuda_layers.KERNELS:
        monkeypatch.setenv(f"MINIVLLM_OP_{op.upper()}", "emulated")
    return counts


def test_the_small_kernels_give_them_too(started):
    runner = make_runner()
    requests = [make_request(index, tokens) for index, tokens in enumerate(PROMPTS)]
    steps = run(runner, requests, make_scheduler(runner, budget=7))
    assert answers(requests) == EXPECTED
    num_layers = runner.decoder.spec.num_layers
    assert started.pop("embedding") == len(steps)
    assert set(started.values()) == {num_layers * len(steps)}


def test_a_batch_that_draws_gets_the_tokens_of_torch(monkeypatch):
    """Greedy, drawn, and drawn after cuts, in one batch."""
    found = []
    for backend in ("torch", "emulated"):
        for op in ("ARGMAX", "DRAW"):
            monkeypatch.setenv(f"MINIVLLM_OP_{op}", backend)
        requests = [
            make_request(index, tokens, seed=index)
            for index, tokens in enumerate(PROMPTS)
        ]
        drawn, cut = {"temperature": 1.5}, {"top_k": 20, "top_p": 0.95, "min_p": 0.01}
        for request, params in zip(requests[1:], (drawn, drawn | cut), strict=True):
            request.sampling_params = SamplingParams(**params).filled({})
        runner = make_runner()
        assert runner.choices["draw"].backend.name == backend
        run(runner, requests)
        found.append(answers(requests))
    assert found[0] == found[1]
    assert found[0][0] == EXPECTED[0] and found[0][1] != EXPECTED[1]


def scores_of_prompts(weights, monkeypatch):
    """Return the scores with which each prompt's first token is chosen."""
    found, compute = [], TorchRunner._logits

    def logits(self, hidden_states):
        found.append(compute(self, hidden_states))
        return found[-1]

    runner = make_runner(weights=weights)
    with monkeypatch.context() as patch:
        patch.setattr(TorchRunner, "_logits", logits)
        run(runner, [make_request(i, tokens, 1) for i, tokens in enumerate(PROMPTS)])
    return torch.cat(found).float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_with_tensor_cores_the_scores_are_those_of_torch(dtype, calls, monkeypatch):
    """Not the tokens: in 16 bits, another order of sums may choose another one."""
    weights = {name: tensor.to(dtype) for name, tensor in WEIGHTS.items()}
    ours = scores_of_prompts(weights, monkeypatch)
    assert calls["prefill"]
    monkeypatch.setenv("MINIVLLM_OP_PREFILL_ATTENTION", "torch")
    theirs = scores_of_prompts(weights, monkeypatch)
    assert not ours.equal(theirs), "two ways to compute the same"
    allowed = 8 * torch.finfo(dtype).eps * theirs.abs().max()
    assert (ours - theirs).abs().max() <= allowed
