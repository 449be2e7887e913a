"""Sampling parameters: legal from the moment they exist."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest

from minivllm.errors import ConfigError, RequestError
from minivllm.sampling.defaults import read_sampling_defaults
from minivllm.sampling.params import DEFAULTS, UNSET, SamplingParams


def test_unset_parameters_are_those_that_a_model_may_recommend():
    params = SamplingParams()
    unset = {f.name for f in fields(params) if getattr(params, f.name) is UNSET}
    assert unset == {*DEFAULTS, "max_tokens"}


def test_the_defaults_are_those_of_vllm():
    params = SamplingParams().filled({})
    assert (params.n, params.temperature, params.top_p, params.top_k) == (
        1,
        1.0,
        1.0,
        0,
    )
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert params.max_tokens is UNSET and params.min_tokens == 0
    assert params.stop == () and params.stop_token_ids == ()
    assert params.ignore_eos is False and params.include_stop_str_in_output is False
    assert params.skip_special_tokens is params.spaces_between_special_tokens is True
    assert params.seed is params.logprobs is params.prompt_logprobs is None
    assert params.logit_bias == {} and params.bad_words == ()
    assert params.allowed_token_ids is None and params.logits_processors == ()


def test_unset_is_filled_from_the_model_and_then_from_the_defaults():
    params = SamplingParams(temperature=0.5).filled({"temperature": 0.1, "top_p": 0.9})
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 0)
    assert params.filled({"top_p": 0.2}) == params, "what is set is set"


def test_max_tokens_is_filled_from_the_model_only():
    assert SamplingParams().filled({"max_tokens": 7}).max_tokens == 7
    assert SamplingParams(max_tokens=None).filled({"max_tokens": 7}).max_tokens is None
    assert SamplingParams().filled({}).max_tokens is UNSET


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 1_000_000},
        {"temperature": np.float64(0.5)},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 10**9},
        {"min_p": 0},
        {"min_p": 1.0},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2},
        {"frequency_penalty": 2.0},
        {"n": 1024},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"max_tokens": UNSET},
        {"min_tokens": 3, "max_tokens": 3},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"logprobs": -1},
        {"logprobs": 0},
        {"prompt_logprobs": 5},
        {"ignore_eos": True},
        {"guided_json": True},
        {"guided_json": '{"type": "object"}'},
        {"guided_regex": "a+"},
    ],
)
def test_legal_values_are_kept(values):
    params = SamplingParams(**values)
    for name, value in values.items():
        assert getattr(params, name) == value


def test_one_stop_text_is_one_stop_and_duplicates_are_harmless():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "a", "b"]).stop == ("a", "a", "b")
    assert SamplingParams(stop=[str(i) for i in range(9)]).stop[8] == "8"


def test_none_is_no_list():
    names = ("stop", "stop_token_ids", "bad_words", "logits_processors")
    params = SamplingParams(**dict.fromkeys(names), logit_bias=None)
    assert [getattr(params, name) for name in names] == [()] * 4
    assert params.logit_bias == {}


def test_biases_may_have_the_text_keys_of_json():
    params = SamplingParams(logit_bias=json.loads('{"7": -100, "12": 0.5}'))
    assert params.logit_bias == {7: -100, 12: 0.5}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temperature": np.float32(0.5)}, 0.5),
        ({"top_p": np.float16(1)}, 1.0),
        ({"top_k": np.int64(3)}, 3),
        ({"n": np.uint8(2)}, 2),
        ({"seed": np.uint64(2**64 - 1)}, 2**64 - 1),
        ({"max_tokens": np.int32(7)}, 7),
        ({"logprobs": np.int64(-1)}, -1),
        ({"stop_token_ids": np.array([1, 2])}, (1, 2)),
        ({"allowed_token_ids": [np.int64(4)]}, (4,)),
        ({"logit_bias": {np.int64(5): np.float32(0.5)}}, {5: 0.5}),
    ],
)
def test_numbers_of_numpy_become_those_of_python(values, expected):
    (name,) = values
    value = getattr(SamplingParams(**values), name)
    assert value == expected
    assert json.dumps(value), "JSON knows Python's numbers only"
    plain = [value, expected] if np.isscalar(value) else [*value, *expected]
    assert {type(number) for number in plain} <= {int, float}


def test_later_changes_of_the_callers_lists_change_nothing():
    stop, ids, bias, schema = ["a"], [1], {2: 1.0}, {"enum": ["x"]}
    params = SamplingParams(
        stop=stop, stop_token_ids=ids, logit_bias=bias, guided_json=schema
    )
    stop.append("b")
    ids.append(-1)
    bias[-5] = "heavy"
    schema["enum"].append("y")
    assert params.stop == ("a",) and params.stop_token_ids == (1,)
    assert params.logit_bias == {2: 1.0} and params.guided_json == {"enum": ["x"]}


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, but must be a number from 0"),
        ({"temperature": 1e7}, "temperature is 10000000.0"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": 0}, r"top_p is 0, but must be a number above 0, up to 1 \(off\)"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"top_k": -2}, "top_k is -2, but must be an integer of at least 1, or 0 or"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"min_p": -0.1}, r"min_p is -0.1, but must be a number from 0 \(off\) to 1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, but must be a number fr"),
        ({"repetition_penalty": 101}, "repetition_penalty is 101"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1, but must be a number fr"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3"),
        ({"n": 0}, "n is 0, but must be an integer from 1 to 1,024"),
        ({"n": 1025}, "n is 1025"),
        ({"n": 2.0}, "n is 2.0"),
        ({"max_tokens": 0}, "max_tokens is 0, but must be an integer above 0, or None"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        (
            {"min_tokens": 5, "max_tokens": 4},
            "min_tokens is 5, but must be at most max",
        ),
        ({"seed": -1}, "seed is -1, but must be an integer from 0 to 2"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"seed": False}, "seed is False"),
        (
            {"stop": ""},
            r"stop is \(''\,\), but must be a text or a list of texts, none",
        ),
        ({"stop": ["a", ""]}, "none of them empty"),
        ({"stop": [1]}, r"stop is \(1,\)"),
        ({"stop": 5}, "stop is 5"),
        ({"stop": b"x"}, "stop is b'x'"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids is \(-1,\)"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids is \('a',\)"),
        ({"stop_token_ids": "ab"}, "stop_token_ids is 'ab'"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, but must be a list"),
        ({"stop_token_ids": [True]}, r"stop_token_ids is \(True,\)"),
        ({"ignore_eos": 1}, "ignore_eos is 1, but must be True or False"),
        ({"skip_special_tokens": None}, "skip_special_tokens is None"),
        ({"logprobs": -2}, "logprobs is -2, but must be an integer of at least 0, -1"),
        ({"logprobs": True}, "logprobs is True"),
        ({"prompt_logprobs": 0.5}, "prompt_logprobs is 0.5"),
        ({"logit_bias": {1: 101}}, "logit_bias is {1: 101}, but must be a dictionary"),
        ({"logit_bias": {1: NAN}}, "logit_bias is {1: nan}"),
        ({"logit_bias": {-1: 1}}, "logit_bias is {-1: 1}"),
        ({"logit_bias": {"a": 1}}, "logit_bias is {'a': 1}"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias is {'999"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]"),
        (
            {"logit_bias": {"5": 1, 5: 2}},
            "two biases for token 5, under '5' and 5: leave one of them out",
        ),
        ({"logit_bias": {"5": 1, "05": 1}}, "under '5' and '05'"),
        ({"logit_bias": {np.True_: 1}}, "but must be a dictionary"),
        ({"temperature": np.float32("nan")}, "temperature is nan"),
        ({"n": np.float64(2)}, "n is 2.0, but must be an integer"),
        ({"ignore_eos": np.int64(1)}, "but must be True or False"),
        ({"stop": "a\ud83d"}, "or with half a character"),
        ({"bad_words": ["a", "\udc00"]}, "or with half a character"),
        ({"bad_words": "x"}, "bad_words is 'x', but must be a list of texts"),
        ({"bad_words": [""]}, r"bad_words is \(''\,\)"),
        (
            {"allowed_token_ids": []},
            r"allowed_token_ids is \(\), but must be a list of",
        ),
        ({"allowed_token_ids": [-1]}, r"allowed_token_ids is \(-1,\)"),
        (
            {"logits_processors": [1]},
            r"logits_processors is \(1,\), but must be a list",
        ),
        ({"logits_processors": len}, "logits_processors is <built-in function len>"),
        ({"guided_json": "{"}, "guided_json is '{', but must be a JSON schema"),
        ({"guided_json": {"a": {1, 2}}}, "but must be a JSON schema"),
        ({"guided_json": 3}, "guided_json is 3"),
        ({"guided_regex": ""}, "guided_regex is ''"),
        ({"guided_choice": []}, r"guided_choice is \(\)"),
        ({"guided_choice": ["a", ""]}, "none of them empty"),
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_regex and guided_choice",
        ),
        ({"guided_json": {}, "ignore_eos": True}, "but ignore_eos is True: leave one"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_limit(values, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize("name", ["stop_token_ids", "stop", "bad_words"])
def test_an_iterator_is_refused_since_it_is_empty_after_one_look(name):
    with pytest.raises(RequestError, match=f"{name} is <list_iterator"):
        SamplingParams(**{name: iter(["a"])})


def test_a_huge_value_is_not_repeated_in_full():
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop_token_ids=[-1] * 100_000)
    assert len(str(caught.value)) < 400


def test_parameters_cannot_be_changed_and_a_changed_copy_is_checked_again():
    params = SamplingParams()
    with pytest.raises(FrozenInstanceError):
        params.temperature = -1
    assert replace(params, temperature=0).temperature == 0
    assert replace(params, temperature=0).top_p is UNSET
    with pytest.raises(RequestError, match="temperature is -1"):
        replace(params, temperature=-1)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("temprature", "temperature"),
        ("topp", "top_p"),
        ("max_new_tokens", "max_tokens"),
    ],
)
def test_unknown_parameters_are_refused_with_the_nearest_name(name, nearest):
    with pytest.raises(
        RequestError, match=f"no parameter {name}: did you mean {nearest}"
    ):
        SamplingParams(**{name: 1})


def test_a_name_that_is_like_no_other_brings_the_list():
    with pytest.raises(RequestError, match="no parameter xyz, but n, temperature"):
        SamplingParams(xyz=1)


def test_values_without_names_are_refused():
    with pytest.raises(RequestError, match=r"got 0\.5 without a name"):
        SamplingParams(0.5)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_a_copy_still_knows_what_was_not_given(copied):
    assert copied(SamplingParams(stop="x")) == SamplingParams(stop="x")
    assert copied(SamplingParams()).max_tokens is UNSET
    assert repr(UNSET) == "UNSET"


def test_the_text_form_shows_what_was_given_and_can_be_evaluated():
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={3: -1.5})
    text = "SamplingParams(temperature=0.5, logit_bias={3: -1.5}, stop=('a',))"
    assert repr(params) == text
    assert eval(text) == params


# --- What the makers of a model recommend ---


def write_config(folder, **values):
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_recommended_values_are_read_by_our_names(tmp_path):
    write_config(
        tmp_path, temperature=0.6, top_k=20, max_new_tokens=99, do_sample=False,
        eos_token_id=[1, 2], min_p=None,
    )  # fmt: skip
    assert read_sampling_defaults(tmp_path) == {
        "temperature": 0.6, "top_k": 20, "max_tokens": 99,
    }  # fmt: skip


def test_a_model_without_recommendations_has_none(tmp_path):
    assert read_sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize("values", [{"top_p": 0}, {"temperature": "hot"}])
def test_an_impossible_recommendation_is_refused_with_the_file(values, tmp_path):
    name, value = next(iter(values.items()))
    with pytest.raises(ConfigError, match=f"config.json: {name} is {value!r}, but"):
        read_sampling_defaults(write_config(tmp_path, **values))


def test_an_impossible_recommendation_is_refused_under_its_own_name(tmp_path):
    write_config(tmp_path, max_new_tokens=0)
    with pytest.raises(ConfigError, match="json: max_new_tokens is 0, but must be an"):
        read_sampling_defaults(tmp_path)
