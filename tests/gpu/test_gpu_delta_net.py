"""Gated delta nets on the device: contracts, graphs, and the results of the CPU."""

import pytest
import torch

from minivllm.ops import delta_net
from minivllm.ops.cuda_delta_net import (
    kernel_causal_conv1d,
    kernel_chunked_delta_rule,
    kernel_recurrent_delta_rule,
)
from tests.op_tools import assert_close
from tests.test_cuda_delta_net import conv_inputs, rule_inputs, starts_of, with_copy

LENGTHS = (300, 1, 77)
SIZES = (4, 8, 128, 128)
CONV, ONE, MANY = "convolution", "one token", "many tokens"
STATES = {CONV: 2, ONE: 5, MANY: 5}  # which argument they are


def inputs_of(op: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return arguments of an op, on the CPU."""
    if op == CONV:
        return list(conv_inputs(LENGTHS, dtype))
    if op == ONE:
        return rule_inputs(5, 5, dtype, SIZES)
    return [*rule_inputs(sum(LENGTHS), 3, dtype, SIZES), starts_of(*LENGTHS)]


def run(op: str, given: list[torch.Tensor]) -> torch.Tensor:
    """Run the kernel of an op, or on the CPU its reference."""
    if given[0].is_cuda:
        kernels = {CONV: kernel_causal_conv1d, ONE: kernel_recurrent_delta_rule}
        return kernels.get(op, kernel_chunked_delta_rule)(*given)
    references = {CONV: delta_net.causal_conv1d, ONE: delta_net.recurrent_delta_rule}
    if op in references:
        return references[op](*given)
    return delta_net.chunked_delta_rule(*given, list(LENGTHS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("op", STATES)
def test_an_op_is_that_of_the_cpu(op, dtype, gpu):
    given = inputs_of(op, dtype)
    ours = [x.to(gpu) for x in given]
    y, expected = run(op, ours), run(op, given)
    assert_close(y.cpu(), expected, units=64)
    index = STATES[op]
    assert_close(ours[index].cpu(), given[index], units=256)


@pytest.mark.parametrize("op", STATES)
def test_a_captured_step_goes_on_from_where_the_states_are(op, gpu):
    given = [x.to(gpu) for x in inputs_of(op, torch.float16)]
    index = STATES[op]
    run(op, with_copy(given, index))  # loads what cannot be loaded during a capture
    captured, eager = with_copy(given, index), with_copy(given, index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(op, captured)
    for _ in range(3):
        graph.replay()
        assert y.equal(run(op, eager))
        assert captured[index].equal(eager[index])


def test_a_text_gets_the_same_bits_alone(gpu):
    given = [x.to(gpu) for x in inputs_of(MANY, torch.float16)]
    *rows, states, slots, starts = given
    whole = run(MANY, with_copy(given, 5))
    part = slice(int(starts[2]), int(starts[3]))
    alone = [*(x[part] for x in rows), states, slots[2:], starts_of(77).to(gpu)]
    assert run(MANY, alone).equal(whole[part])


@pytest.mark.parametrize("op", STATES)
def test_torchs_own_checks_pass(op, gpu):
    given = [x.to(gpu) for x in inputs_of(op, torch.float32)]
    kernels = {CONV: kernel_causal_conv1d, ONE: kernel_recurrent_delta_rule}
    operator = kernels.get(op, kernel_chunked_delta_rule)
    verdicts = torch.library.opcheck(operator, given)
    assert set(verdicts.values()) == {"SUCCESS"}
