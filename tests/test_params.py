"""Sampling parameters: legal from the moment they exist."""

import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from minivllm.errors import RequestError
from minivllm.sampling.params import UNSET, SamplingParams


def test_the_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert params.temperature == 1.0
    assert params.max_tokens is UNSET
    assert params.stop_token_ids == ()
    assert params.ignore_eos is False
    assert params.seed is None


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 1_000_000},
        {"temperature": np.float64(0.5)},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"max_tokens": UNSET},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"stop_token_ids": [0, 5]},
        {"stop_token_ids": {7}},
        {"stop_token_ids": frozenset()},
        {"ignore_eos": True},
    ],
)
def test_legal_values_are_kept(values):
    params = SamplingParams(**values)
    for name, value in values.items():
        assert getattr(params, name) is value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, but must be a number from 0"),
        ({"temperature": 1e7}, "temperature is 10000000.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": True}, "temperature is True"),
        ({"max_tokens": 0}, "max_tokens is 0, but must be an integer above 0, or None"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"seed": -1}, "seed is -1, but must be an integer from 0 to 2"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"seed": False}, "seed is False"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids is \[-1\]"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids is \['a'\]"),
        ({"stop_token_ids": "ab"}, "stop_token_ids is 'ab'"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, but must be a list"),
        ({"stop_token_ids": None}, "stop_token_ids is None"),
        ({"stop_token_ids": [True]}, r"stop_token_ids is \[True\]"),
        ({"ignore_eos": 1}, "ignore_eos is 1, but must be True or False"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_limit(values, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


def test_stop_tokens_from_an_iterator_are_refused_since_it_is_empty_after_one_look():
    with pytest.raises(RequestError, match="must be a list of token ids"):
        SamplingParams(stop_token_ids=iter([1, 2]))


def test_parameters_cannot_be_changed_and_a_changed_copy_is_checked_again():
    params = SamplingParams()
    with pytest.raises(FrozenInstanceError):
        params.temperature = -1
    assert replace(params, temperature=0).temperature == 0
    with pytest.raises(RequestError, match="temperature is -1"):
        replace(params, temperature=-1)


def test_unknown_parameters_are_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_a_copy_still_knows_that_max_tokens_was_not_given(copied):
    assert copied(SamplingParams()).max_tokens is UNSET
    assert repr(UNSET) == "UNSET"
