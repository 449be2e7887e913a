"""The engine with the kernels of a GPU, emulated: the tokens of torch."""

import pytest

from minivllm.ops.cuda import KernelAttention, KernelRMSNorm, why_not_emulated
from tests.test_torch_runner import (
    EXPECTED,
    PROMPTS,
    answers,
    make_request,
    make_runner,
    make_scheduler,
    run,
)

pytestmark = pytest.mark.skipif(
    why_not_emulated("cpu", "float32") is not None,
    reason=str(why_not_emulated("cpu", "float32")),
)


@pytest.fixture
def calls(monkeypatch):
    """Force both ops, and count how often each kernel does something."""
    counts = {"norm": 0, "attention": 0}
    real_norm, real_attend = KernelRMSNorm.__call__, KernelAttention.attend

    def norm(self, *arguments):
        counts["norm"] += 1
        return real_norm(self, *arguments)

    def attend(self, *arguments):
        counts["attention"] += 1
        return real_attend(self, *arguments)

    monkeypatch.setattr(KernelRMSNorm, "__call__", norm)
    monkeypatch.setattr(KernelAttention, "attend", attend)
    for op in ("RMS_NORM", "PAGED_ATTENTION"):
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


def test_chunks_and_answers_in_one_step_get_them_too(calls):
    runner = make_runner()
    requests = [make_request(index, tokens) for index, tokens in enumerate(PROMPTS)]
    run(runner, requests, make_scheduler(runner, budget=7))
    assert answers(requests) == EXPECTED
    assert calls["attention"]
