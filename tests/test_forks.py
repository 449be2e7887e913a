"""Several answers to one prompt: shared blocks, and copies where somebody writes."""

import pytest

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.engine import LLMEngine
from minivllm.errors import RequestError
from minivllm.request import RequestStatus
from minivllm.runners.fake_runner import FakeRunner
from minivllm.sampling.params import SamplingParams
from minivllm.sampling.uniform import seed_of, uniform
from tests.engine_tools import (
    LedgerRunner,
    assert_all_free,
    assert_books_balance,
    assert_queues_are_right,
    continuation,
    run_all,
)


def forked(num_tokens, *names, num_blocks=12, block_size=4):
    """Return a manager in which "a" has computed tokens and others share them."""
    manager = BlockManager(num_blocks, block_size)
    assert manager.allocate_slots("a", num_tokens)
    manager.cache_full_blocks("a", list(range(num_tokens)), num_tokens)
    manager.commit()
    for name in names:
        manager.fork("a", name, num_tokens)
    assert_books_balance(manager)
    return manager


# --- The books ---


def test_a_fork_takes_no_block():
    manager = forked(6, "b", "c")
    assert manager.block_ids == {"a": [0, 1], "b": [0, 1], "c": [0, 1]}
    assert manager.ref_cnt[:3] == [3, 3, 0] and manager.num_free_blocks == 10
    assert manager.copies == {}


def test_whoever_writes_first_gets_a_copy_and_the_last_one_writes_in_place():
    manager = forked(6, "b", "c")
    for name in "abc":
        assert manager.allocate_slots(name, 7)
        assert_books_balance(manager)
    assert manager.block_ids == {"a": [0, 2], "b": [0, 3], "c": [0, 1]}
    assert manager.copies == {"a": (1, 2), "b": (1, 3)}
    assert manager.half_full == set()


def test_a_copy_is_made_once():
    manager = forked(6, "b")
    manager.allocate_slots("a", 7)
    manager.commit()
    assert manager.copies == {}
    manager.allocate_slots("a", 8)
    assert manager.copies == {} and manager.block_ids["a"] == [0, 2]


def test_full_blocks_are_never_copied():
    manager = forked(8, "b")
    for name in "ab":
        assert manager.allocate_slots(name, 9)
    assert manager.copies == {}
    assert manager.block_ids == {"a": [0, 1, 2], "b": [0, 1, 3]}


def test_a_copy_and_new_blocks_are_taken_together_or_not_at_all():
    manager = forked(6, "b", num_blocks=3)
    assert not manager.allocate_slots("a", 9)  # a copy and one more, but one is free
    assert_books_balance(manager)
    assert manager.block_ids["a"] == [0, 1] and manager.copies == {}
    assert manager.allocate_slots("a", 7)
    assert not manager.allocate_slots("c", 1)


def test_a_copy_of_a_request_that_leaves_is_not_made():
    manager = forked(6, "b", "c")
    manager.allocate_slots("a", 7)
    manager.free("a")
    assert manager.copies == {}
    assert_books_balance(manager)


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_shared_block_is_free_when_its_last_reader_goes(first):
    manager = forked(6, "b")
    manager.free(first)
    assert_books_balance(manager)
    other = "b" if first == "a" else "a"
    assert manager.allocate_slots(other, 7)
    assert manager.copies == {}, "nobody else reads it any more"
    manager.free(other)
    assert manager.num_free_blocks == 12 and not manager.half_full


def test_a_fork_is_found_by_later_requests_under_its_own_text():
    manager = forked(6, "b")
    for name, last in (("a", 77), ("b", 88)):
        text = [0, 1, 2, 3, 4, 5, last, last, 99]
        manager.allocate_slots(name, 8)
        manager.cache_full_blocks(name, text, 8)
    manager.commit()
    assert_books_balance(manager)
    prefixes = [
        manager.find_cached_prefix([0, 1, 2, 3, 4, 5, last, last, 99])
        for last in (77, 88, 66)
    ]
    assert [len(prefix) for prefix in prefixes] == [2, 2, 1]
    assert manager.cached_blocks[prefixes[0][1]] == manager.block_ids["a"][1]
    assert manager.cached_blocks[prefixes[1][1]] == manager.block_ids["b"][1]


# --- The engine, with a runner that checks every slot ---


def make_engine(num_blocks=40, block_size=4, **options):
    runner = LedgerRunner(
        num_blocks=num_blocks, block_size=block_size, max_model_len=64
    )
    return LLMEngine(runner, **options)


def answers(n, **options):
    return SamplingParams(n=n, **{"max_tokens": 5} | options)


def token_ids(output):
    return [answer.token_ids for answer in output.outputs]


def expected(prompt, n, max_tokens=5):
    return [continuation(prompt, max_tokens, index=index) for index in range(n)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 10])
def test_all_answers_are_as_if_alone(length, caching):
    engine = make_engine(enable_prefix_caching=caching)
    prompt = list(range(length))
    engine.add_request("a", prompt, answers(4))
    output = run_all(engine)["a"]
    assert token_ids(output) == expected(prompt, 4)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert engine.runner.num_copies == (3 if length % 4 else 0)


@pytest.mark.parametrize("caching", [True, False])
def test_the_prompt_is_computed_once_and_stored_once(caching):
    engine = make_engine(enable_prefix_caching=caching)
    engine.add_request("a", list(range(10)), answers(4))
    records = []
    engine.listeners.append(records.append)
    engine.step()
    assert engine.scheduler.block_manager.num_free_blocks == 40 - 3
    run_all(engine)
    num_tokens = [sum(record["num_scheduled_tokens"].values()) for record in records]
    assert num_tokens == [10, 4, 4, 4, 4]
    assert [len(record["added"]) for record in records] == [4, 0, 0, 0, 0]
    assert list(records[0]["sampled_token_ids"]) == ["a", "a#1", "a#2", "a#3"]


def test_a_long_prompt_in_chunks_lets_its_followers_wait():
    engine = make_engine(max_num_batched_tokens=4)
    engine.add_request("a", list(range(10)), answers(3))
    engine.add_request("b", [40, 41], answers(1))
    first = engine.step()
    assert first == [] and len(engine.scheduler.running) == 1
    outputs = run_all(engine)
    assert token_ids(outputs["a"]) == expected(list(range(10)), 3)
    assert token_ids(outputs["b"]) == expected([40, 41], 1)


@pytest.mark.parametrize("caching", [True, False])
def test_more_answers_than_may_run_at_once_all_come(caching):
    engine = make_engine(max_num_seqs=3, enable_prefix_caching=caching)
    prompt = list(range(9))
    engine.add_request("a", prompt, answers(8))
    output = run_all(engine)["a"]
    assert token_ids(output) == expected(prompt, 8)


def test_followers_do_not_take_the_places_of_requests_before_them():
    engine = make_engine(max_num_seqs=3)
    engine.add_request("a", [1, 2], answers(2))
    engine.add_request("b", [3, 4], answers(1))
    engine.step()
    assert [r.request_id for r in engine.scheduler.running] == ["a", "b", "a#1"]
    run_all(engine)


def test_preempted_answers_go_on_as_if_nothing_had_been():
    engine = make_engine(num_blocks=7, enable_prefix_caching=False)
    prompt = list(range(6))
    engine.add_request("a", prompt, answers(4, max_tokens=8))
    output = run_all(engine)["a"]
    assert output.metrics.num_preemptions > 0
    assert token_ids(output) == expected(prompt, 4, max_tokens=8)


def test_answers_end_one_by_one():
    engine = make_engine()
    prompt = [1, 2, 4]
    stop = continuation(prompt, 2, index=1)[1]
    engine.add_request("a", prompt, answers(3, stop_token_ids=[stop]))
    reasons, lengths = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            reasons.append([answer.finish_reason for answer in output.outputs])
            lengths.append([len(answer.token_ids) for answer in output.outputs])
            assert output.finished == (None not in reasons[-1])
        assert_queues_are_right(engine.scheduler)
    assert reasons[0] == [None] * 3
    assert reasons[1] == [None, "stop", None]
    assert reasons[-1] == ["length", "stop", "length"]
    assert lengths[-1] == [5, 2, 5]


def test_one_token_each_is_enough():
    engine = make_engine(enable_prefix_caching=False)
    engine.add_request("a", [1, 2, 3], answers(3, max_tokens=1))
    (output,) = engine.step()
    assert output.finished and token_ids(output) == expected([1, 2, 3], 3, 1)
    assert_all_free(engine)


def test_an_abort_ends_all_answers():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], answers(3))
    engine.add_request("b", [7], answers(1))
    engine.step()
    output = engine.abort_request("a")
    assert [answer.finish_reason for answer in output.outputs] == ["abort"] * 3
    assert output.finished
    assert list(run_all(engine)) == ["b"]


def test_an_abort_before_the_first_step_ends_all_answers():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], answers(3))
    assert engine.abort_request("a").finished
    assert engine.step() == []
    assert_all_free(engine)


def test_followers_go_on_when_the_step_of_their_leader_fails(caplog):
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], answers(3))
    engine.runner.error = RuntimeError("out of luck")
    output = run_all(engine)["a"]
    first, *others = output.outputs
    assert first.finish_reason == "error" and "out of luck" in first.error
    assert [answer.token_ids for answer in others] == expected([1, 2, 3], 3)[1:]


def test_unusable_scores_of_the_prompt_end_all_answers():
    class Broken(LedgerRunner):
        def execute(self, step):
            output = super().execute(step)
            for _, request in step.sampled():
                del output.sampled_token_ids[request.request_id]
                output.errors[request.request_id] = "no numbers"
            return output

    engine = LLMEngine(Broken(num_blocks=9, block_size=4))
    engine.add_request("a", [1, 2, 3], answers(3))
    output = run_all(engine)["a"]
    assert [answer.error for answer in output.outputs] == ["no numbers"] * 3


def test_metrics_are_those_of_all_answers():
    engine = make_engine()
    stop = continuation([1, 2, 4], 1, index=1)[0]
    engine.add_request("a", [1, 2, 4], answers(3, stop_token_ids=[stop]))
    output = run_all(engine)["a"]
    metrics, lengths = output.metrics, list(map(len, token_ids(output)))
    assert lengths[1] == 1 < lengths[0] and metrics.num_output_tokens == sum(lengths)
    assert metrics.arrival_time == 0 < metrics.first_token_time
    assert metrics.finished_time == engine.runner.now()


def test_the_priority_of_a_request_is_that_of_its_answers():
    engine = make_engine(policy="priority", max_num_seqs=2)
    engine.add_request("slow", [1, 2], answers(2), priority=5)
    engine.add_request("quick", [3, 4], answers(2), priority=1)
    engine.step()
    assert {r.request_id for r in engine.scheduler.running} == {"quick", "quick#1"}
    run_all(engine)


def test_a_prompt_that_fits_alone_but_not_its_answers_still_ends():
    engine = make_engine(num_blocks=3, enable_prefix_caching=False)
    prompt = list(range(6))
    engine.add_request("a", prompt, answers(3, max_tokens=4))
    assert token_ids(run_all(engine)["a"]) == expected(prompt, 3, max_tokens=4)


# --- Seeds ---


def test_each_answer_has_a_seed_of_its_own_and_the_first_that_of_the_request():
    seeds = [seed_of(7, index) for index in range(1000)]
    assert seeds[0] == 7 and len(set(seeds)) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seed_of(8, 1) not in seeds
    assert seed_of(7, 1) == 2202426289022195651, "the same on every machine"


def test_numbers_of_different_answers_have_nothing_in_common():
    numbers = {
        uniform(seed_of(3, i), position) for i in range(50) for position in range(50)
    }
    assert len(numbers) == 2500


def test_answers_are_distinct_and_reproducible_alone_and_in_any_company():
    def run(*names):
        engine = LLMEngine(FakeRunner(), seed=len(names))
        for name in names:
            seed = 5 if name == "a" else None
            engine.add_request(name, [1, 2, 3], answers(4, seed=seed, max_tokens=8))
        return token_ids(run_all(engine)["a"])

    alone = run("a")
    assert len({tuple(answer) for answer in alone}) == 4
    assert run("b", "a") == run("a", "c", "d") == alone


def test_a_name_like_that_of_an_answer_is_no_clash():
    engine = LLMEngine(FakeRunner())
    engine.add_request("a", [1], answers(2))
    with pytest.raises(RequestError, match="'a#1', but"):
        engine.add_request("a#1", [1], answers(1))
    assert run_all(engine).keys() == {"a"}


def test_statuses_of_followers_are_those_of_requests():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], answers(2))
    leader, follower = engine.scheduler.waiting
    assert follower.leader is leader and leader.followers == [follower]
    engine.step()
    assert follower.status is RequestStatus.RUNNING
    assert follower.num_computed_tokens == 3 and follower.num_tokens == 4
    run_all(engine)


# --- Functions of the user's ---


class Clumsy:
    """A logits processor whose second fresh copy fails."""

    num_copies = 0

    def fresh(self):
        self.num_copies += 1
        if self.num_copies == 2:
            raise OSError("no more copies")
        return self

    def __call__(self, output_token_ids, logits):
        pass


def test_a_processor_that_cannot_be_copied_is_refused_before_anything_starts():
    engine = LLMEngine(FakeRunner())
    params = answers(2, logits_processors=[Clumsy()])
    with pytest.raises(RequestError, match=r"no fresh copy \(OSError: no more"):
        engine.add_request("a", [1], params)
    assert not engine.has_unfinished_requests()
    params.logits_processors[0].fresh = lambda: None
    with pytest.raises(RequestError, match="returned None, but must return a function"):
        engine.add_request("a", [1], params)


def test_a_follower_that_was_interrupted_goes_on_with_its_second_token():
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], answers(3))
    original = engine.scheduler._take_tokens

    def interrupted(request, model_output):
        original(request, model_output)
        raise KeyboardInterrupt  # after one follower, before its leader

    engine.scheduler._take_tokens = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.scheduler._take_tokens = original
    assert token_ids(run_all(engine)["a"]) == expected([1, 2, 3], 3)
