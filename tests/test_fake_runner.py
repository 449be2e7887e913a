"""The runner without a model: its clock by hand, its tokens repeatable."""

import pytest

from minivllm.engine.engine import LLMEngine
from minivllm.request import SchedulerOutput
from minivllm.runners.fake_runner import FakeRunner, StepCost, step_size
from minivllm.sampling.params import SamplingParams
from tests.engine_tools import make_request, run_all


def make_step(**num_new):
    """Plan a step of requests; the values are (computed, new)."""
    requests = []
    for name, (computed, new) in num_new.items():
        request = make_request(name, range(computed + new))
        request.num_computed_tokens = computed
        requests.append(request)
    return SchedulerOutput(
        requests=requests,
        num_scheduled_tokens={name: new for name, (_, new) in num_new.items()},
        block_ids={},
    )


def test_a_step_is_as_large_as_its_tokens_and_what_they_attend_to():
    # a's tokens see 1, 2 and 3 tokens; b's only one sees 6.
    assert step_size(make_step(a=(0, 3), b=(5, 1))) == (4, 1 + 2 + 3 + 6)


def test_the_clock_follows_the_formula():
    cost = StepCost(per_step_s=1.0, per_token_s=0.1, per_context_s=0.01)
    runner = FakeRunner(cost=cost)
    assert runner.now() == 0
    runner.execute(make_step(a=(0, 3), b=(5, 1)))
    assert runner.now() == pytest.approx(1.0 + 0.4 + 0.12)


def test_the_clock_can_wait_and_never_goes_back():
    runner = FakeRunner()
    runner.advance_to(5.0)
    runner.advance_to(3.0)
    assert runner.now() == 5.0


def test_only_requests_that_have_caught_up_get_a_token():
    step = make_step(a=(0, 3), b=(5, 1))
    step.requests[0].token_ids.append(9)  # three of a's four tokens are computed
    output = FakeRunner().execute(step)
    assert list(output.sampled_token_ids) == ["b"]
    assert list(output.token_logits) == ["b"]


def test_scripted_answers_are_given_and_then_random_ones():
    runner = FakeRunner(script={"a": [7, 8]}, vocab_size=10)
    engine = LLMEngine(runner)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=4))
    token_ids = run_all(engine)["a"].outputs[0].token_ids
    assert token_ids[:2] == [7, 8] and len(token_ids) == 4
    assert all(0 <= token_id < 10 for token_id in token_ids)


def test_random_answers_depend_on_the_seed_and_on_nothing_else():
    def answer(names, **options):
        engine = LLMEngine(FakeRunner(), **options)
        for name in names:
            params = SamplingParams(max_tokens=6, seed=ord(name))
            engine.add_request(name, [1, 2, 3], params)
        return {k: o.outputs[0].token_ids for k, o in run_all(engine).items()}

    alone = answer("a") | answer("b") | answer("c")
    assert answer("abc") == answer("cba") == alone
    assert answer("abc", max_num_batched_tokens=2) == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 3


def test_an_hour_of_traffic_passes_at_once():
    engine = LLMEngine(FakeRunner(cost=lambda step: 60.0))
    engine.add_request("a", [1], SamplingParams(max_tokens=60))
    output = run_all(engine)["a"]
    assert output.metrics.end_to_end_s == 3600
    assert output.metrics.time_per_output_token_s == 60.0
