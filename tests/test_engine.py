"""The engine's life of a request, with a runner that checks every slot it reads."""

import json
import logging

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from minivllm.engine import engine as engine_module
from minivllm.engine.engine import LOW_STEPS, LLMEngine
from minivllm.engine.scheduler import POLICIES
from minivllm.errors import ConfigError, RequestError
from minivllm.request import ModelOutput
from minivllm.runners.fake_runner import FakeRunner
from minivllm.sampling.params import SamplingParams
from minivllm.text.tokenizer import Tokenizer
from tests.engine_tools import (
    LedgerRunner,
    assert_all_free,
    assert_queues_are_right,
    continuation,
    run_all,
)
from tests.tiny_folder import EOS, write_parrot


def make_engine(num_blocks=20, block_size=4, max_model_len=64, **options):
    runner = LedgerRunner(
        num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len
    )
    return LLMEngine(runner, **options)


def up_to(max_tokens, **options):
    return SamplingParams(max_tokens=max_tokens, **options)


def ids_of(output):
    """Return the names that the continuations of a request have in the scheduler."""
    name = output.request_id
    return [f"{name}#{a.index}" if a.index else name for a in output.outputs]


def tokens_of(output):
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Token ids are bytes; 256 ends the text."""
    return Tokenizer.from_dir(write_parrot(tmp_path_factory.mktemp("parrot")))


def say(tokenizer, *texts, **options):
    """Make an engine whose requests "0", "1", ... answer with given bytes."""
    script = {str(index): list(text) for index, text in enumerate(texts)}
    runner = FakeRunner(vocab_size=257, script=script)
    return LLMEngine(runner, tokenizer=tokenizer, **options)


# --- The life of a request ---


def test_a_request_is_answered_token_by_token_and_ends_once():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], up_to(3))
    assert engine.has_unfinished_requests()
    outputs = [engine.step() for _ in range(3)]
    answer = continuation([1, 2, 3], 3)
    assert [tokens_of(output) for (output,) in outputs] == [
        answer[:1],
        answer[:2],
        answer,
    ]
    assert [output.finished for (output,) in outputs] == [False, False, True]
    last = outputs[-1][0]
    assert last.outputs[0].finish_reason == "length"
    assert last.request_id == "a" and last.prompt_token_ids == [1, 2, 3]
    assert last.prompt is None and last.outputs[0].text == ""
    assert last.outputs[0].index == 0 and last.outputs[0].error is None
    assert_all_free(engine)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_is_exact(max_tokens):
    engine = make_engine()
    engine.add_request("a", [1], up_to(max_tokens))
    assert len(tokens_of(run_all(engine)["a"])) == max_tokens


def test_max_tokens_is_16_unless_given_and_none_means_as_many_as_fit():
    engine = make_engine()
    engine.add_request("a", [1])
    engine.add_request("b", [1, 2], up_to(None))
    engine.add_request("c", [1, 2, 3], default_max_tokens=None)
    engine.add_request("d", [1, 2, 3], up_to(4), default_max_tokens=None)
    lengths = {k: len(tokens_of(output)) for k, output in run_all(engine).items()}
    assert lengths == {"a": 16, "b": 62, "c": 61, "d": 4}


def test_prompt_and_answer_never_exceed_max_model_len():
    engine = make_engine(max_model_len=12)
    engine.add_request("a", range(11), up_to(None))
    engine.add_request("b", range(8), up_to(4))
    outputs = run_all(engine)
    assert len(tokens_of(outputs["a"])) == 1 and len(tokens_of(outputs["b"])) == 4


def test_a_stop_token_ends_the_answer_and_is_its_last_token():
    answer = continuation([1, 2], 10)
    assert answer[2] not in answer[:2]
    engine = make_engine()
    engine.add_request("a", [1, 2], up_to(10, stop_token_ids=[answer[2]]))
    output = run_all(engine)["a"].outputs[0]
    assert output.token_ids == answer[:3]
    assert (output.finish_reason, output.stop_reason) == ("stop", answer[2])


def test_requests_that_run_together_answer_as_if_alone():
    engine = make_engine()
    prompts = {"a": [1, 2, 3], "b": [1, 2, 3, 4, 5, 6], "c": [1, 2, 3, 4, 5, 7]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, up_to(9))
    outputs = run_all(engine)
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == continuation(prompt, 9)


def test_a_request_may_come_at_any_time():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], up_to(6))
    engine.step()
    engine.step()
    engine.add_request("b", [1, 2], up_to(2))
    assert [output.request_id for output in engine.step()] == ["a", "b"]
    assert tokens_of(run_all(engine)["a"]) == continuation([1, 2, 3], 6)


def test_the_prompt_may_be_reused_by_the_caller():
    engine = make_engine()
    prompt = [1, 2, 3]
    engine.add_request("a", prompt, up_to(2))
    prompt.append(4)
    assert tokens_of(run_all(engine)["a"]) == continuation([1, 2, 3], 2)


def test_an_output_does_not_change_after_it_was_given():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], up_to(3))
    (first,) = engine.step()
    run_all(engine)
    assert len(tokens_of(first)) == 1 and first.prompt_token_ids == [1, 2, 3]


def test_a_name_may_be_used_again_when_its_request_has_ended():
    engine = make_engine()
    engine.add_request("a", [1], up_to(2))
    with pytest.raises(RequestError, match="request_id is 'a', but an unfinished"):
        engine.add_request("a", [2], up_to(2))
    run_all(engine)
    engine.add_request("a", [2], up_to(2))
    assert tokens_of(run_all(engine)["a"]) == continuation([2], 2)


def test_an_idle_engine_has_nothing_to_say():
    engine = make_engine()
    assert engine.step() == [] and not engine.has_unfinished_requests()


def test_metrics_follow_the_clock_of_the_runner():
    engine = LLMEngine(FakeRunner(cost=lambda step: 1.0), max_num_seqs=1)
    engine.add_request("a", [1], up_to(2))
    engine.add_request("b", [1], up_to(3))
    outputs = run_all(engine)
    metrics = outputs["b"].metrics
    assert metrics.arrival_time == 0 and metrics.first_scheduled_time == 2.0
    assert metrics.first_token_time == 3.0 and metrics.finished_time == 5.0
    assert metrics.num_output_tokens == 3
    assert metrics.time_to_first_token_s == 3.0
    assert metrics.time_per_output_token_s == 1.0


def test_cached_tokens_are_counted():
    engine = make_engine()
    engine.add_request("a", range(10), up_to(1))
    run_all(engine)
    engine.add_request("b", range(10), up_to(1))
    engine.add_request("c", [*range(6), 9, 9], up_to(1))
    outputs = run_all(engine)
    assert outputs["b"].num_cached_tokens == 8
    assert outputs["c"].num_cached_tokens == 4


def test_seeds_of_requests_without_one_differ_and_follow_the_engine_seed():
    def seeds(seed):
        engine = make_engine(seed=seed)
        for name in "abc":
            engine.add_request(name, [1], up_to(1))
        return [request.seed for request in engine.scheduler.waiting]

    assert len(set(seeds(0))) == 3
    assert seeds(0) == seeds(0) != seeds(1)


def test_a_seed_of_zero_is_a_seed():
    engine = make_engine()
    engine.add_request("a", [1], up_to(1, seed=0))
    assert engine.scheduler.waiting[0].seed == 0


# --- Refused at the door ---


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt has 0 tokens"),
        ([-1], {}, "token id -1"),
        ([50], {}, "token id 50, but the model knows 0 to 49"),
        ([2**63], {}, "token id 9223372036854775808"),
        (5, {}, "the prompt is 5"),
        ("text", {}, "this engine has no tokenizer: give token ids"),
        (
            [1] * 60,
            {"sampling_params": up_to(5)},
            "has 60 tokens and 5 more are asked for, but max_model_len is 64: "
            "shorten the prompt to 59 tokens, ask for at most 4, or raise",
        ),
        ([1] * 64, {"sampling_params": up_to(None)}, "64 tokens .* max_model_len is 6"),
        ([1], {"sampling_params": up_to(64)}, "ask for at most 63"),
        ([1] * 2000, {}, "has 2,000 tokens and 16 more"),
        ([1], {"sampling_params": up_to(1, stop_token_ids=[50])}, "stop_token_ids hol"),
        ([1], {"sampling_params": {"max_tokens": 1}}, "is a dict, but must be a Samp"),
        ([1], {"priority": 1.5}, "priority is 1.5, but must be an integer"),
        ([1], {"priority": True}, "priority is True"),
        ([1], {"cache_salt": ["x"]}, r"cache_salt is \['x'\], but must be text"),
    ],
)
def test_what_can_never_be_served_is_refused_and_nothing_changes(
    prompt, options, message
):
    engine = make_engine(num_blocks=16)
    engine.add_request("a", [1, 2, 3], up_to(3))
    with pytest.raises(RequestError, match=message):
        engine.add_request("b", prompt, **options)
    assert list(run_all(engine)) == ["a"]


def test_a_prompt_that_the_pool_cannot_hold_is_refused_and_the_next_one_served():
    engine = make_engine(num_blocks=4, block_size=4)
    with pytest.raises(
        RequestError,
        match=r"has 20 tokens, but the whole KV cache has 16 slots .4 blocks of 4.",
    ):
        engine.add_request("a", range(20), up_to(1))
    engine.add_request("b", [1, 2, 3], up_to(2))
    assert tokens_of(run_all(engine)["b"]) == continuation([1, 2, 3], 2)


def test_a_prompt_as_large_as_the_pool_gets_the_one_token_that_fits():
    engine = make_engine(num_blocks=4, block_size=4)
    engine.add_request("a", range(16), up_to(1))
    engine.add_request("b", range(16), up_to(2))
    outputs = run_all(engine)
    assert outputs["a"].outputs[0].finish_reason == "length"
    assert outputs["b"].outputs[0].finish_reason == "error"
    assert tokens_of(outputs["b"]) == continuation(range(16), 1)


def test_an_unknown_option_of_a_request_is_refused():
    with pytest.raises(TypeError, match="prioritty"):
        make_engine().add_request("a", [1], prioritty=3)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_limits_that_let_nothing_run_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        make_engine(**{name: 0})


# --- Aborts ---


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_aborted_request_leaves_at_once_with_what_it_had(num_steps):
    engine = make_engine()
    engine.add_request("a", [1, 2, 3, 4, 5], up_to(9))
    for _ in range(num_steps):
        engine.step()
    output = engine.abort_request("a")
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert tokens_of(output) == continuation([1, 2, 3, 4, 5], 9)[:num_steps]
    assert_all_free(engine)
    assert engine.step() == []


def test_aborting_an_unknown_or_finished_request_is_harmless():
    engine = make_engine()
    assert engine.abort_request("nobody") is None
    engine.add_request("a", [1], up_to(1))
    run_all(engine)
    assert engine.abort_request("a") is None
    engine.add_request("b", [1], up_to(1))
    engine.abort_request("b")
    assert engine.abort_request("b") is None


def test_an_abort_lets_the_neighbours_go_on():
    engine = make_engine(num_blocks=4)
    for name in "abc":
        engine.add_request(name, [1, 2, 3, 4, 5], up_to(6))
    engine.step()
    engine.abort_request("b")
    outputs = run_all(engine)
    assert list(outputs) == ["a", "c"]
    for output in outputs.values():
        assert tokens_of(output) == continuation([1, 2, 3, 4, 5], 6)


# --- Out of space, out of luck ---


def test_preempted_requests_answer_as_if_undisturbed_and_nothing_is_said_twice():
    engine = make_engine(num_blocks=5, block_size=2)
    prompts = {"a": [1, 2, 3], "b": [4, 5], "c": [6, 7, 8, 9]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, up_to(6))
    said = {name: [] for name in prompts}
    num_preemptions = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            name, tokens = output.request_id, tokens_of(output)
            assert tokens[:-1] == said[name], "one new token at a time"
            said[name] = tokens
            num_preemptions[name] = output.metrics.num_preemptions
    assert sum(num_preemptions.values()) > 0
    for name, prompt in prompts.items():
        assert said[name] == continuation(prompt, 6)
    assert_all_free(engine)


def test_a_preempted_request_goes_before_those_that_came_after_it():
    engine = make_engine(num_blocks=3, block_size=4)
    engine.add_request("a", [1, 2, 3, 4], up_to(6))
    engine.add_request("b", range(10, 18), up_to(2))
    engine.step()
    engine.add_request("c", [5], up_to(2))
    ends = []
    while engine.has_unfinished_requests():
        ends += [output.request_id for output in engine.step() if output.finished]
    assert ends == ["a", "b", "c"]


def test_the_only_request_that_cannot_grow_ends_with_an_error_and_the_engine_lives():
    engine = make_engine(num_blocks=2, block_size=4)
    engine.add_request("a", [1, 2, 3], up_to(20))
    output = run_all(engine)["a"].outputs[0]
    assert output.finish_reason == "error"
    assert "has 9 tokens, but the whole KV cache has 8 slots" in output.error
    assert output.token_ids == continuation([1, 2, 3], 6)
    engine.add_request("b", [1, 2, 3], up_to(2))
    assert tokens_of(run_all(engine)["b"]) == continuation([1, 2, 3], 2)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_step_that_fails_ends_its_requests_and_no_others(share, caplog):
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add_request(name, [1, 2, 3, 4, 5], up_to(4))
    engine.step()
    engine.runner.error = RuntimeError("out of memory")
    engine.runner.error_after = share
    outputs = engine.step()
    assert {output.request_id for output in outputs} == {"a", "b"}
    for output in outputs:
        assert output.outputs[0].finish_reason == "error"
        assert "RuntimeError: out of memory" in output.outputs[0].error
        assert tokens_of(output) == continuation([1, 2, 3, 4, 5], 1)
    assert "a step failed" in caplog.text
    assert tokens_of(run_all(engine)["c"]) == continuation([1, 2, 3, 4, 5], 4)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_steps", [0, 1])
def test_ctrl_c_in_a_step_is_passed_on_and_the_requests_start_over(share, num_steps):
    engine = make_engine()
    for name in "ab":
        engine.add_request(name, [1, 2, 3, 4, 5], up_to(4))
    for _ in range(num_steps):
        engine.step()
    engine.runner.error = KeyboardInterrupt()
    engine.runner.error_after = share
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert_queues_are_right(engine.scheduler)
    assert engine.scheduler.block_manager.num_free_blocks == 20
    for output in run_all(engine).values():
        assert tokens_of(output) == continuation([1, 2, 3, 4, 5], 4)


def test_a_request_that_failed_in_an_interrupted_step_is_told_with_the_next_one():
    engine = make_engine(num_blocks=2, block_size=4, max_num_seqs=1)
    engine.add_request("a", range(7), up_to(20))
    engine.add_request("b", [1], up_to(2))
    engine.step()
    engine.step()
    engine.runner.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()  # a cannot grow, and b takes its place
    outputs = run_all(engine)
    assert outputs["a"].outputs[0].finish_reason == "error"
    assert tokens_of(outputs["b"]) == continuation([1], 2)


def test_scores_that_are_no_numbers_end_one_request_with_a_message():
    class Broken(LedgerRunner):
        def execute(self, step):
            output = super().execute(step)
            if "b" in output.sampled_token_ids:
                del output.sampled_token_ids["b"]
                output.errors["b"] = "the largest logit is nan"
            return output

    engine = LLMEngine(Broken(num_blocks=20, block_size=4))
    for name in "abc":
        engine.add_request(name, [1, 2, 3], up_to(3))
    outputs = run_all(engine)
    assert outputs["b"].outputs[0].finish_reason == "error"
    assert outputs["b"].outputs[0].error == "the largest logit is nan"
    for name in "ac":
        assert tokens_of(outputs[name]) == continuation([1, 2, 3], 3)


@pytest.mark.parametrize(("num_low_steps", "num_warnings"), [(49, 0), (50, 1), (98, 1)])
def test_free_blocks_that_stay_scarce_are_reported_once(
    caplog, num_low_steps, num_warnings
):
    assert LOW_STEPS == 50
    engine = LLMEngine(FakeRunner(num_blocks=1000, block_size=1))
    # Scarce is less than 100; after step n the request holds 889 + n blocks.
    engine.add_request("a", [1] * 890, up_to(12 + num_low_steps))
    while engine.has_unfinished_requests():
        engine.step()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == num_warnings
    if messages:
        assert (
            messages[0].startswith("50 of 1000 blocks")
            and "max_num_seqs" in messages[0]
        )


# --- Text ---


def test_text_comes_with_the_tokens_and_a_stop_token_is_no_text(tokenizer):
    engine = say(tokenizer, [*b"blue", EOS, *b"never"])
    engine.add_request("0", "sky?", up_to(20))
    texts = []
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        texts.append(output.outputs[0].text)
    assert texts == ["b", "bl", "blu", "blue", "blue"]
    assert output.prompt == "sky?" and output.prompt_token_ids == list(b"sky?")
    assert output.outputs[0].token_ids == [*b"blue", EOS]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None, "it is the model's own"


def test_a_stop_token_of_the_request_is_no_text_either_and_is_named(tokenizer):
    engine = say(tokenizer, b"blue")
    engine.add_request("0", "sky?", up_to(20, stop_token_ids=[ord("u")]))
    output = run_all(engine)["0"].outputs[0]
    assert (output.text, output.token_ids) == ("bl", [*b"blu"])
    assert (output.finish_reason, output.stop_reason) == ("stop", ord("u"))


def test_ignore_eos_goes_on_after_the_models_own_end(tokenizer):
    engine = say(tokenizer, [*b"a", EOS, *b"bc"])
    engine.add_request("0", "x", up_to(4, ignore_eos=True))
    output = run_all(engine)["0"].outputs[0]
    assert output.token_ids == [*b"a", EOS, *b"bc"]
    assert (output.text, output.finish_reason) == ("abc", "length")


def test_a_character_of_four_tokens_is_shown_when_it_is_whole(tokenizer):
    fire = "\U0001f525".encode()
    engine = say(tokenizer, [*b"a", *fire, *b"b"])
    engine.add_request("0", "x", up_to(6))
    texts = []
    while engine.has_unfinished_requests():
        texts += [output.outputs[0].text for output in engine.step()]
    assert texts == ["a", "a", "a", "a", "a\U0001f525", "a\U0001f525b"]


def test_an_answer_that_ends_inside_a_character_is_no_error(tokenizer):
    engine = say(tokenizer, b"a\xf0\x9f")
    engine.add_request("0", "x", up_to(3))
    output = run_all(engine)["0"].outputs[0]
    assert output.text == "a\ufffd" and output.finish_reason == "length"


def test_an_aborted_answer_keeps_its_text(tokenizer):
    engine = say(tokenizer, b"abcdef")
    engine.add_request("0", "x", up_to(6))
    engine.step()
    engine.step()
    assert engine.abort_request("0").outputs[0].text == "ab"


def test_texts_of_neighbours_are_not_mixed(tokenizer):
    fire = "\U0001f525".encode()
    engine = say(tokenizer, fire, b"1234", "éé".encode())
    for name in "012":
        engine.add_request(name, "x", up_to(4))
    texts = [output.outputs[0].text for output in run_all(engine).values()]
    assert texts == ["\U0001f525", "1234", "éé"]


# --- The trace ---


def test_a_listener_is_told_every_step_as_plain_values():
    engine = make_engine(num_blocks=3, block_size=4)
    records = []
    engine.listeners.append(records.append)
    engine.add_request("a", [1, 2, 3, 4], up_to(3))
    engine.add_request("b", [5, 6, 7], up_to(3))
    run_all(engine)
    assert json.loads(json.dumps(records)) == records
    first, second, *_ = records
    assert first["step"] == 0 and second["step"] == 1
    assert [request["request_id"] for request in first["added"]] == ["a", "b"]
    assert first["added"][0]["prompt_token_ids"] == [1, 2, 3, 4]
    assert second["added"] == []
    assert first["num_scheduled_tokens"] == {"a": 4, "b": 3}
    assert first["block_ids"] == {"a": [0], "b": [1]}
    assert first["num_free_blocks"] == 1 and second["num_free_blocks"] == 0
    assert first["end_s"] > first["start_s"]
    assert first["sampled_token_ids"] == {
        "a": continuation([1, 2, 3, 4], 1),
        "b": continuation([5, 6, 7], 1),
    }
    finished = [name for record in records for name in record["finished"]]
    assert sorted(finished) == ["a", "b"]


def test_an_abort_is_in_the_next_record():
    engine = make_engine()
    records = []
    engine.listeners.append(records.append)
    for name in "ab":
        engine.add_request(name, [1, 2], up_to(3))
    engine.step()
    engine.abort_request("a")
    engine.step()
    engine.step()
    assert [record["aborted"] for record in records] == [[], ["a"], []]


def test_preemptions_and_prefix_hits_are_in_the_record():
    engine = make_engine(num_blocks=3, block_size=4)
    records = []
    engine.listeners.append(records.append)
    engine.add_request("a", [1, 2, 3, 4], up_to(6))
    engine.add_request("b", [1, 2, 3, 4, 5], up_to(6))
    run_all(engine)
    assert records[0]["num_prefix_hits"] == {"a": 0, "b": 4}
    assert any(record["preempted"] == ["b"] for record in records)


# --- Everything at random ---


class EngineMachine(RuleBasedStateMachine):
    """Random requests, aborts and failures, with the books checked after every step."""

    num_steps = 0
    num_preemptions = 0
    num_cached = 0
    num_copies = 0
    reasons: dict[str, int] = {}  # noqa: RUF012

    @initialize(
        num_blocks=st.integers(2, 9),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        policy=st.sampled_from(sorted(POLICIES)),
        caching=st.sampled_from([True, True, False]),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, policy, caching):
        self.capacity = num_blocks * block_size
        self.engine = LLMEngine(
            LedgerRunner(
                num_blocks=num_blocks, block_size=block_size, max_model_len=40
            ),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            policy=policy,
            enable_prefix_caching=caching,
        )
        self.requests = {}  # name: (prompt, max_tokens, stop ids, n)
        self.said = {}  # name: tokens so far of each continuation
        self.ended = {}  # name: finish reasons
        self.may_fail = set()  # request ids of continuations

    @rule(
        beginning=st.integers(0, 8),
        family=st.integers(0, 1),
        tail=st.lists(st.integers(0, 2), max_size=4),
        max_tokens=st.integers(1, 8),
        salt=st.sampled_from([None, None, "x"]),
        stop=st.sets(st.integers(0, 49), max_size=6),
        priority=st.integers(0, 2),
        count=st.integers(1, 3),
        n=st.sampled_from([1, 1, 2, 3]),
    )
    def add(self, beginning, family, tail, max_tokens, salt, stop, priority, count, n):
        prompt = [family, *range(10, 10 + beginning), *tail]
        params = SamplingParams(n=n, max_tokens=max_tokens, stop_token_ids=sorted(stop))
        for _ in range(count):
            name = str(len(self.requests))
            try:
                self.engine.add_request(
                    name, prompt, params, priority=priority, cache_salt=salt
                )
            except RequestError:
                assert len(prompt) > self.capacity
                return
            self.requests[name] = (prompt, max_tokens, stop, n)
            self.said[name] = [[]] * n

    @rule(choice=st.integers(0, 999))
    def abort(self, choice):
        name = str(choice % (len(self.requests) + 1))
        output = self.engine.abort_request(name)
        is_unfinished = name in self.requests and name not in self.ended
        assert (output is not None) == is_unfinished
        if output is not None:
            said = [answer.token_ids for answer in output.outputs]
            assert said == self.said[name], "an abort says nothing new"
            self.check_end(output)
        self.check_engine()

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.take_outputs(self.engine.step())
            self.check_engine()

    @rule(
        share=st.sampled_from([0.0, 0.5, 1.0]),
        kind=st.sampled_from([RuntimeError, KeyboardInterrupt, None, None, None]),
    )
    def step_that_breaks_off(self, share, kind):
        runner = self.engine.runner
        runner.plan = None
        runner.error = kind and kind("planned")
        runner.error_after = share
        try:
            outputs = self.engine.step()
        except KeyboardInterrupt:
            assert kind is KeyboardInterrupt
            outputs = []
        if runner.plan is not None and kind is RuntimeError:
            broken = {request.request_id for request in runner.plan.requests}
            failed = {
                request_id
                for output in outputs
                for request_id, answer in zip(
                    ids_of(output), output.outputs, strict=True
                )
                if answer.finish_reason == "error"
            }
            assert broken <= failed
            self.may_fail |= broken
        runner.error = None
        self.take_outputs(outputs)
        self.check_engine()

    @rule()
    def reset_prefix_cache(self):
        is_idle = not self.engine.scheduler.running
        assert self.engine.scheduler.block_manager.reset_prefix_cache() == is_idle

    def take_outputs(self, outputs):
        names = [output.request_id for output in outputs]
        assert len(names) == len(set(names)), "two outputs of one request in a step"
        for output in outputs:
            name = output.request_id
            said = [answer.token_ids for answer in output.outputs]
            pairs = list(zip(said, self.said[name], strict=True))
            assert all(new[: len(old)] == old for new, old in pairs)
            assert {len(new) - len(old) for new, old in pairs} <= {0, 1}
            has_ended = any(answer.finish_reason for answer in output.outputs)
            assert has_ended or said != self.said[name]
            self.said[name] = said
            if output.finished:
                self.check_end(output)

    def check_end(self, output):
        name = output.request_id
        assert name not in self.ended, "a request ended twice"
        self.ended[name] = [answer.finish_reason for answer in output.outputs]
        n = self.requests[name][3]
        assert [answer.index for answer in output.outputs] == list(range(n))
        for request_id, answer in zip(ids_of(output), output.outputs, strict=True):
            self.check_answer(name, request_id, answer)
        EngineMachine.num_preemptions += output.metrics.num_preemptions
        EngineMachine.num_cached += output.num_cached_tokens

    def check_answer(self, name, request_id, answer):
        prompt, max_tokens, stop, _ = self.requests[name]
        whole = continuation(prompt, max_tokens, stop, index=answer.index)
        assert answer.token_ids == whole[: len(answer.token_ids)]
        num_tokens = len(prompt) + len(answer.token_ids)
        if answer.finish_reason in ("stop", "length"):
            assert answer.token_ids == whole
            assert (answer.finish_reason == "stop") == (whole[-1] in stop)
        elif answer.finish_reason == "error":
            assert request_id in self.may_fail or num_tokens > self.capacity
        else:
            assert answer.finish_reason == "abort"
        reasons = EngineMachine.reasons
        reasons[answer.finish_reason] = reasons.get(answer.finish_reason, 0) + 1

    def check_engine(self):
        EngineMachine.num_steps += 1
        scheduler = self.engine.scheduler
        assert_queues_are_right(scheduler)
        queued = {
            (r.leader or r).request_id for r in (*scheduler.waiting, *scheduler.running)
        }
        unfinished = self.requests.keys() - self.ended.keys()
        untold = {
            (request.leader or request).request_id
            for request in self.engine._untold
            if request.status.is_finished
        }
        assert queued <= unfinished
        assert unfinished <= queued | untold
        assert self.engine.has_unfinished_requests() == bool(unfinished)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_unfinished_requests():
                break
            self.take_outputs(self.engine.step())
            self.check_engine()
        EngineMachine.num_copies += self.engine.runner.num_copies
        assert self.ended.keys() == self.requests.keys()
        assert_all_free(self.engine)


MACHINE_SETTINGS = settings(
    derandomize=True,
    max_examples=90,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_every_request_ends_once_and_as_if_alone_whatever_happens(caplog):
    caplog.set_level(logging.CRITICAL)
    run_state_machine_as_test(
        EngineMachine,
        settings=MACHINE_SETTINGS,
    )
    # The run has met what it is for.
    assert EngineMachine.num_steps > 1000
    assert EngineMachine.num_preemptions > 50
    assert EngineMachine.num_cached > 500
    assert EngineMachine.num_copies > 50
    assert EngineMachine.reasons.keys() == {"stop", "length", "abort", "error"}
    assert EngineMachine.reasons["abort"] > 20


def test_a_numpy_prompt_is_taken():
    engine = make_engine()
    engine.add_request("a", np.array([1, 2, 3]), up_to(2))
    assert tokens_of(run_all(engine)["a"]) == continuation([1, 2, 3], 2)


def test_the_ledger_notices_a_block_that_was_overwritten():
    # The tests above rest on this runner, so it must be able to fail.
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], up_to(5))
    engine.step()
    slot = engine.scheduler.block_manager.block_ids["a"][0] * 4
    engine.runner.slots[slot] = (None, (9,))
    request = engine.scheduler.running[0]
    with pytest.raises(AssertionError, match="a reads at 0 what belongs to"):
        engine.runner.execute(engine.scheduler.schedule())
    assert request.num_output_tokens == 1


def test_a_runner_answers_only_what_was_asked(caplog):
    class Silent(LedgerRunner):
        def execute(self, step):
            super().execute(step)
            return ModelOutput(sampled_token_ids={})

    engine = LLMEngine(Silent(num_blocks=4, block_size=4))
    engine.add_request("a", [1], up_to(1))
    assert engine.step() == []


def test_outputs_survive_a_listener_that_fails():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], up_to(1))

    def fail(record):
        engine.listeners.clear()
        raise KeyboardInterrupt

    engine.listeners.append(fail)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_unfinished_requests()
    (output,) = engine.step()
    assert output.finished and output.request_id == "a"
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("place", ["schedule", "record", "execute", "update", "emit"])
def test_an_interrupt_anywhere_in_a_step_loses_nothing(place, monkeypatch):
    engine = LLMEngine(LedgerRunner(num_blocks=16, block_size=4, max_model_len=64))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for name in "ab":  # b shares the blocks that a fills in the same step
        engine.add_request(name, prompt, up_to(3))
    owner, method = {
        "schedule": (engine.scheduler, "_admit_waiting"),
        "record": (engine_module, "begin_record"),
        "execute": (engine.runner, "execute"),
        "update": (engine.scheduler, "update"),
        "emit": (engine, "_emit"),
    }[place]
    original = getattr(owner, method)

    def interrupted(*arguments):
        original(*arguments)
        raise KeyboardInterrupt

    engine.listeners.append(lambda record: None)
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    ended = {"a": engine.abort_request("a")}
    for _ in range(20):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output
    assert ended["a"].outputs[0].finish_reason == "abort"
    assert ended["b"].outputs[0].token_ids == continuation(prompt, 3)
    assert_all_free(engine)
