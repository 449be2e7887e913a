"""The record of a request, and what may be a prompt."""

import numpy as np
import pytest
import torch

from minivllm.errors import RequestError
from minivllm.outputs import RequestMetrics
from minivllm.request import RequestStatus, SchedulerOutput, check_token_ids
from tests.engine_tools import make_request


def test_prompt_and_answer_are_one_list_cut_in_two():
    request = make_request("a", [1, 2, 3])
    assert (request.num_tokens, request.num_output_tokens) == (3, 0)
    request.token_ids += [7, 8]
    assert request.prompt_token_ids == [1, 2, 3]
    assert request.output_token_ids == [7, 8]
    assert (request.num_tokens, request.num_output_tokens) == (5, 2)


def test_two_requests_are_the_same_only_if_they_are_one():
    assert make_request("a", [1]) != make_request("a", [1])


@pytest.mark.parametrize("status", RequestStatus)
def test_a_final_state_is_called_finished_and_its_value_is_the_reason(status):
    reasons = {"stop", "length", "abort", "error"}
    assert status.is_finished == (status.value in reasons)
    assert status.is_finished == status.name.startswith("FINISHED_")


@pytest.mark.parametrize(
    "kind",
    [list, tuple, iter, np.array, lambda p: map(np.uint8, p), torch.tensor],
)
def test_any_sequence_of_integers_is_a_prompt(kind):
    checked = check_token_ids(kind([0, 3, 7]), 8)
    assert checked == [0, 3, 7]
    assert all(type(token_id) is int for token_id in checked)


def test_the_prompt_is_copied():
    prompt = [1, 2]
    assert check_token_ids(prompt, 8) is not prompt


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt has 0 tokens"),
        ([0, 8], "token id 8, but the model knows 0 to 7"),
        ([-1], "token id -1"),
        ([2**63], "token id 9223372036854775808"),
        ([1.0], "holds 1.0, but token ids are integers"),
        ([True], "holds True"),
        ([np.bool_(True)], "holds np.True_"),
        (["sky"], "holds 'sky'"),
        ([None], "holds None"),
        ([[0, 1]], r"holds \[0, 1\]"),
        (np.zeros((2, 2), dtype=int), "holds array"),
        (5, "the prompt is 5, but must be a text or a list of token ids"),
        (None, "the prompt is None"),
        (b"\x01\x02", r"the prompt is b'\\x01\\x02'"),
        ({1: 2}, "the prompt is {1: 2}"),
    ],
)
def test_what_is_no_prompt_is_refused_with_the_value(prompt, message):
    with pytest.raises(RequestError, match=message):
        check_token_ids(prompt, 8)


def test_a_plan_counts_its_tokens():
    plan = SchedulerOutput(
        requests=[], num_scheduled_tokens={"a": 3, "b": 1}, block_ids={}
    )
    assert plan.num_tokens == 4


def test_the_metrics_of_a_request_by_hand():
    metrics = RequestMetrics(
        arrival_time=1.0,
        first_scheduled_time=1.5,
        first_token_time=3.0,
        finished_time=9.0,
        num_output_tokens=4,
    )
    assert metrics.time_to_first_token_s == 2.0
    assert metrics.time_per_output_token_s == 2.0  # three gaps in six seconds
    assert metrics.end_to_end_s == 8.0


def test_metrics_that_are_not_known_yet_are_none():
    metrics = RequestMetrics(arrival_time=1.0)
    assert metrics.time_to_first_token_s is None
    assert metrics.time_per_output_token_s is None
    assert metrics.end_to_end_s is None
    one = RequestMetrics(
        arrival_time=1.0, first_token_time=2.0, finished_time=2.0, num_output_tokens=1
    )
    assert one.time_per_output_token_s is None
