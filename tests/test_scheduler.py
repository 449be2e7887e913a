"""The scheduler's steps by hand: who computes how many tokens, and in which blocks."""

import pytest

from minivllm.engine.scheduler import POLICIES, Policy, Scheduler, find_policy
from minivllm.errors import ConfigError
from minivllm.request import ModelOutput, RequestStatus
from tests.engine_tools import (
    assert_books_balance,
    assert_queues_are_right,
    make_request,
    make_scheduler,
    take_step,
)


def add(scheduler, request_id, num_tokens, max_tokens=100, *, first=None, **options):
    """Queue a request whose tokens no other has, unless `first` says so."""
    first = 1000 * ord(request_id[0]) if first is None else first
    token_ids = range(first, first + num_tokens)
    request = make_request(request_id, token_ids, max_tokens, **options)
    scheduler.add_request(request)
    return request


def steps(scheduler, count):
    """Take steps; return what each computed."""
    return [take_step(scheduler).num_scheduled_tokens for _ in range(count)]


# --- Chunks, budget, batch ---


def test_a_prompt_is_computed_once_and_then_one_token_per_step():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 5, max_tokens=3)
    assert steps(scheduler, 3) == [{"a": 5}, {"a": 1}, {"a": 1}]
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert request.output_token_ids == [5, 6, 7]
    assert request.num_computed_tokens == 7, "the last token needs no key and value"
    assert not scheduler.has_unfinished_requests()


@pytest.mark.parametrize(
    ("budget", "chunks"),
    [(3, [3, 3, 3, 1, 1]), (9, [9, 1, 1, 1, 1]), (10, [10, 1, 1, 1, 1])],
)
def test_a_long_prompt_is_cut_into_chunks_of_the_budget(budget, chunks):
    scheduler = make_scheduler(max_num_batched_tokens=budget)
    request = add(scheduler, "a", 10)
    assert [step["a"] for step in steps(scheduler, 5)] == chunks
    assert request.num_output_tokens == sum(
        computed >= 10 for computed in (sum(chunks[: n + 1]) for n in range(5))
    )


def test_blocks_are_taken_for_the_chunk_and_not_for_the_whole_prompt():
    scheduler = make_scheduler(10, 4, max_num_batched_tokens=5)
    add(scheduler, "a", 12)
    held = []
    for _ in range(4):
        take_step(scheduler)
        held.append(len(scheduler.block_manager.block_ids["a"]))
    assert held == [2, 3, 3, 4]


def test_answers_go_first_and_prompts_share_what_is_left_of_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    add(scheduler, "a", 2)
    add(scheduler, "b", 3)
    add(scheduler, "c", 9)
    assert steps(scheduler, 4) == [
        {"a": 2, "b": 3, "c": 1},
        {"a": 1, "b": 1, "c": 4},
        {"a": 1, "b": 1, "c": 4},
        {"a": 1, "b": 1, "c": 1},
    ]


def test_the_budget_is_never_exceeded_and_never_left_unused():
    scheduler = make_scheduler(max_num_batched_tokens=7)
    for name in "abcde":
        add(scheduler, name, 10)
    for _ in range(7):
        assert sum(take_step(scheduler).num_scheduled_tokens.values()) == 7


def test_no_more_requests_run_than_the_batch_may_hold():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 2, max_tokens=2)
    assert steps(scheduler, 4) == [
        {"a": 2, "b": 2},
        {"a": 1, "b": 1},
        {"c": 2},
        {"c": 1},
    ]


def test_a_batch_larger_than_the_budget_leaves_nobody_without_a_token():
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=2)
    for name in "abcd":
        add(scheduler, name, 1, max_tokens=3)
    assert scheduler.max_num_seqs == 2
    assert steps(scheduler, 6) == [{"a": 1, "b": 1}] * 3 + [{"c": 1, "d": 1}] * 3


def test_a_request_that_ends_makes_room_for_the_next_step():
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    add(scheduler, "a", 8, max_tokens=1)
    add(scheduler, "b", 8, max_tokens=1)
    assert steps(scheduler, 2) == [{"a": 8}, {"b": 8}]
    assert scheduler.block_manager.num_free_blocks == 2


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2.5, None, True])
def test_limits_that_let_nothing_run_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}, but must be"):
        make_scheduler(**{name: value})


# --- Order ---


def test_requests_start_in_the_order_of_their_arrival():
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "bca":  # the order of the queue is not that of arrival
        add(scheduler, name, 2, max_tokens=1)
    assert [list(step) for step in steps(scheduler, 3)] == [["a"], ["b"], ["c"]]


def test_nobody_overtakes_a_request_that_waits_for_blocks():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    add(scheduler, "a", 9, max_tokens=3)
    add(scheduler, "b", 8, max_tokens=1)  # needs two blocks, and one is left
    add(scheduler, "c", 1, max_tokens=1)  # would fit
    assert steps(scheduler, 4) == [{"a": 9}, {"a": 1}, {"a": 1}, {"b": 8, "c": 1}]


def test_a_short_request_does_not_starve_behind_a_stream_of_others():
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    short = add(scheduler, "a", 1, max_tokens=4)
    for number in range(20):
        add(scheduler, f"b{number}", 8, max_tokens=2, arrival=1000 + number)
        take_step(scheduler)
        if short.status.is_finished:
            break
    assert number == 3, "a token at every step"


def test_running_requests_get_a_token_at_every_step_while_long_prompts_arrive():
    scheduler = make_scheduler(1000, 4, max_num_batched_tokens=8, max_num_seqs=4)
    first = add(scheduler, "a", 3, max_tokens=50)
    started = []
    for number in range(40):
        add(scheduler, f"p{number}", 30, max_tokens=1, arrival=1000 + number)
        plan = take_step(scheduler)
        assert plan.num_scheduled_tokens["a"] >= 1
        started += [name for name in plan.num_prefix_hits if name != "a"]
    assert first.num_output_tokens == 40
    assert started == [f"p{n}" for n in range(len(started))], "in order of arrival"
    assert len(started) >= 8


# --- Preemption ---


def test_the_request_that_arrived_last_is_preempted_first():
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    requests = [add(scheduler, name, 4, max_tokens=6) for name in "abc"]
    take_step(scheduler)
    plan = take_step(scheduler)  # each would need a second block
    assert [r.request_id for r in plan.preempted] == ["c", "b"]
    assert plan.num_scheduled_tokens == {"a": 1}
    assert [r.num_preemptions for r in requests] == [0, 1, 1]
    assert [r.request_id for r in plan.requests] == ["a"]


def test_no_block_boundary_no_preemption():
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    for name in "abc":
        add(scheduler, name, 2, max_tokens=3)  # never more than four slots each
    while scheduler.has_unfinished_requests():
        assert take_step(scheduler).preempted == []


def test_a_preempted_request_computes_all_its_tokens_again():
    scheduler = make_scheduler(num_blocks=3, block_size=4, enable_prefix_caching=False)
    add(scheduler, "a", 4, max_tokens=5)
    second = add(scheduler, "b", 4, max_tokens=5)
    take_step(scheduler)
    take_step(scheduler)  # a takes the third block, b is preempted
    assert second.status is RequestStatus.PREEMPTED
    assert second.num_computed_tokens == 0 and second.num_tokens == 5
    steps(scheduler, 3)
    assert steps(scheduler, 1) == [{"b": 5}], "its prompt and the token that it had"
    assert second.output_token_ids == [4, 5]


def test_a_preempted_request_finds_its_own_blocks_if_nobody_took_them():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    add(scheduler, "a", 8, max_tokens=2)
    second = add(scheduler, "b", 8, max_tokens=2)
    take_step(scheduler)
    assert take_step(scheduler).preempted == [second]  # a took one block of b's two
    plan = take_step(scheduler)
    assert plan.num_prefix_hits == {"b": 4}
    assert plan.num_scheduled_tokens == {"b": 5}
    assert second.num_cached_tokens == 0, "that count is about its prompt's start"


def test_nobody_is_admitted_in_a_step_that_preempts():
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    add(scheduler, "a", 4)
    add(scheduler, "b", 8)
    take_step(scheduler)
    add(scheduler, "c", 1)
    plan = take_step(scheduler)
    assert [r.request_id for r in plan.preempted] == ["b"]
    assert list(plan.num_scheduled_tokens) == ["a"]
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"]
    plan = take_step(scheduler)
    assert "c" not in plan.num_scheduled_tokens, "b came first"


def test_a_request_that_cannot_grow_steps_back_for_earlier_ones():
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    add(scheduler, "a", 5)
    last = add(scheduler, "b", 4)
    take_step(scheduler)
    plan = take_step(scheduler)
    assert plan.preempted == [last]
    assert plan.num_scheduled_tokens == {"a": 1}


def test_the_only_running_request_that_cannot_grow_fails_and_the_others_go_on():
    scheduler = make_scheduler(num_blocks=2, block_size=4, max_num_seqs=1)
    first = add(scheduler, "a", 7)
    add(scheduler, "b", 3, max_tokens=2)
    assert steps(scheduler, 2) == [{"a": 7}, {"a": 1}]
    plan = take_step(scheduler)
    assert plan.failed == [first]
    assert plan.num_scheduled_tokens == {"b": 3}
    assert first.status is RequestStatus.FINISHED_ERROR
    assert "runs alone and has 9 tokens, but the whole KV cache has 8" in first.error
    assert steps(scheduler, 1) == [{"b": 1}]
    assert not scheduler.has_unfinished_requests()


def test_others_are_preempted_before_a_request_fails():
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    first = add(scheduler, "a", 8)
    second = add(scheduler, "b", 2, max_tokens=3)
    failed = []
    while scheduler.has_unfinished_requests():
        failed += take_step(scheduler).failed
    assert failed == [first]
    assert first.num_output_tokens == 5, "12 slots, and one token that needs none"
    assert second.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert second.num_output_tokens == 3


def test_a_preempted_request_that_only_fitted_by_sharing_fails_instead_of_waiting():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    add(scheduler, "a", 8, max_tokens=3, first=0)
    second = add(scheduler, "b", 16, max_tokens=3, first=0)
    assert steps(scheduler, 1) == [{"a": 8, "b": 8}]  # b shares two blocks of a
    assert second.num_tokens == 17  # more than the pool has slots
    assert take_step(scheduler).preempted == [second]
    steps(scheduler, 1)  # a ends
    plan = take_step(scheduler)
    assert plan.failed == [second]
    assert not scheduler.has_unfinished_requests()
    assert scheduler.block_manager.num_free_blocks == 4


def test_the_same_request_in_chunks_fails_too():
    scheduler = make_scheduler(num_blocks=2, block_size=4, max_num_batched_tokens=3)
    request = add(scheduler, "a", 8, max_tokens=3)
    for _ in range(10):
        if request.status.is_finished:
            break
        take_step(scheduler)
    assert request.status is RequestStatus.FINISHED_ERROR
    assert request.num_output_tokens == 1


# --- Policies ---


def run_to_the_end(scheduler, requests, max_steps=500):
    for _ in range(max_steps):
        if not scheduler.has_unfinished_requests():
            return
        take_step(scheduler)
    raise AssertionError([r.status for r in requests])


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_brings_every_request_to_the_same_end(policy):
    scheduler = make_scheduler(
        num_blocks=6, block_size=4, max_num_batched_tokens=5, policy=policy
    )
    requests = [
        add(scheduler, name, 2 + 3 * n, max_tokens=1 + n, priority=-n)
        for n, name in enumerate("abcdef")
    ]
    run_to_the_end(scheduler, requests)
    for n, request in enumerate(requests):
        length = 2 + 3 * n
        assert request.output_token_ids == list(range(length, length + 1 + n))
        assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert scheduler.block_manager.num_free_blocks == 6


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_ends_even_if_requests_crowd_each_other_out(policy):
    scheduler = make_scheduler(
        num_blocks=4,
        block_size=2,
        max_num_batched_tokens=3,
        policy=policy,
        enable_prefix_caching=False,
    )
    requests = [
        add(scheduler, name, 1 + n % 4, max_tokens=4, priority=n % 3)
        for n, name in enumerate("abcdefgh")
    ]
    run_to_the_end(scheduler, requests)
    assert all(r.num_output_tokens == 4 for r in requests)
    assert sum(r.num_preemptions for r in requests) > 0


def test_prefill_first_computes_prompts_and_answers_in_steps_of_their_own():
    scheduler = make_scheduler(max_num_batched_tokens=6, policy="prefill_first")
    add(scheduler, "a", 3)
    assert steps(scheduler, 2) == [{"a": 3}, {"a": 1}]
    add(scheduler, "b", 8)
    both = {"a": 1, "b": 1}
    assert steps(scheduler, 4) == [{"b": 6}, {"b": 2}, both, both]


def test_decode_first_lets_answers_finish_before_the_next_prompt():
    scheduler = make_scheduler(max_num_batched_tokens=6, policy="decode_first")
    add(scheduler, "a", 3, max_tokens=3)
    take_step(scheduler)
    add(scheduler, "b", 8, max_tokens=2)
    assert steps(scheduler, 5) == [{"a": 1}, {"a": 1}, {"b": 6}, {"b": 2}, {"b": 1}]


def test_mixed_computes_prompts_and_answers_in_the_same_step():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    add(scheduler, "a", 3)
    take_step(scheduler)
    add(scheduler, "b", 8)
    assert steps(scheduler, 2) == [{"a": 1, "b": 5}, {"a": 1, "b": 3}]


def test_priority_goes_by_number_and_then_by_arrival():
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    for name, priority in {"a": 1, "b": 0, "c": 0, "d": -5}.items():
        add(scheduler, name, 2, max_tokens=1, priority=priority)
    assert [name for step in steps(scheduler, 4) for name in step] == [
        "d",
        "b",
        "c",
        "a",
    ]


def test_priority_preempts_the_least_important_request():
    scheduler = make_scheduler(num_blocks=2, block_size=4, policy="priority")
    first = add(scheduler, "a", 4, priority=1)
    add(scheduler, "b", 4, priority=0)
    take_step(scheduler)
    plan = take_step(scheduler)
    assert plan.preempted == [first]
    assert plan.num_scheduled_tokens == {"b": 1}


def test_priority_preempts_a_less_important_request_that_runs_already():
    scheduler = make_scheduler(num_blocks=3, block_size=4, policy="priority")
    first = add(scheduler, "a", 6, priority=1)
    take_step(scheduler)
    add(scheduler, "b", 4, priority=0)
    take_step(scheduler)
    plan = take_step(scheduler)  # a holds two blocks, b needs its second one
    assert plan.preempted == [first]
    assert plan.num_scheduled_tokens == {"b": 1}


def test_an_important_prompt_may_take_the_whole_budget_of_a_step():
    scheduler = make_scheduler(max_num_batched_tokens=4, policy="priority")
    add(scheduler, "a", 2, priority=1)
    take_step(scheduler)
    add(scheduler, "b", 9, priority=0)
    assert steps(scheduler, 3) == [{"a": 1, "b": 3}, {"b": 4}, {"b": 2, "a": 1}]


def test_without_that_policy_priority_changes_nothing():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "a", 2, max_tokens=1, priority=1)
    add(scheduler, "b", 2, max_tokens=1, priority=0)
    assert [list(step) for step in steps(scheduler, 2)] == [["a"], ["b"]]


def test_shortest_goes_by_what_is_left_to_compute():
    scheduler = make_scheduler(max_num_seqs=1, policy="shortest")
    for name, length in {"a": 9, "d": 2, "c": 5, "b": 2}.items():
        add(scheduler, name, length, max_tokens=1)
    assert [name for step in steps(scheduler, 4) for name in step] == [
        "b",
        "d",
        "c",
        "a",
    ]


@pytest.mark.parametrize("policy", ["prefill_first", "decode_first"])
def test_a_preempted_request_is_not_mistaken_for_an_answer(policy):
    scheduler = make_scheduler(
        num_blocks=3, block_size=4, policy=policy, enable_prefix_caching=False
    )
    add(scheduler, "a", 4, max_tokens=6)
    second = add(scheduler, "b", 4, max_tokens=6)
    while not second.num_preemptions:
        take_step(scheduler)
    assert second.num_output_tokens > 0 and second.num_computed_tokens == 0
    while second.status is RequestStatus.PREEMPTED:
        plan = take_step(scheduler)
    # It catches up with all of its tokens in a step without answers.
    assert plan.num_scheduled_tokens == {"b": second.num_tokens - 1}


def test_a_preempted_request_catches_up_in_chunks_as_a_prompt_does():
    scheduler = make_scheduler(max_num_batched_tokens=4, policy="prefill_first")
    add(scheduler, "a", 4)
    take_step(scheduler)
    second = add(scheduler, "b", 9)
    second.num_prompt_tokens = 3  # six tokens of its answer were there before
    second.status = RequestStatus.PREEMPTED
    assert steps(scheduler, 3) == [{"b": 4}, {"b": 4}, {"a": 1, "b": 1}]


def test_an_own_policy_decides_with_the_request_and_the_time():
    seen = []

    def latest_first(request, now):
        seen.append(now)
        return -request.arrival

    scheduler = make_scheduler(max_num_seqs=1, policy=Policy("lifo", latest_first))
    for name in "abc":
        add(scheduler, name, 2, max_tokens=1)
    assert [list(take_step(scheduler, now=n).num_scheduled_tokens) for n in (1, 2)] == [
        ["c"],
        ["b"],
    ]
    assert set(seen) == {1, 2}


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"'prefil_first' .did you mean 'prefill_fi"):
        find_policy("prefil_first")
    with pytest.raises(ConfigError, match="must be one of mixed, prefill_first"):
        find_policy("?")
    with pytest.raises(ConfigError, match="policy is None"):
        find_policy(None)


# --- Sharing ---


def test_a_cached_beginning_is_not_computed_again():
    scheduler = make_scheduler()
    add(scheduler, "a", 10, max_tokens=1, first=0)
    second = add(scheduler, "b", 12, max_tokens=1, first=0, arrival=200)
    assert steps(scheduler, 1) == [{"a": 10, "b": 4}]
    assert second.num_cached_tokens == 8
    third = add(scheduler, "c", 10, max_tokens=1, first=0, arrival=300)
    plan = take_step(scheduler)
    assert plan.num_prefix_hits == {"c": 8}
    assert plan.num_scheduled_tokens == {"c": 2}
    assert third.num_cached_tokens == 8


def test_requests_of_one_step_share_what_it_is_about_to_compute():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    for name in "abc":
        add(scheduler, name, 5, max_tokens=2, first=0)
    plan = take_step(scheduler)
    assert plan.num_scheduled_tokens == {"a": 5, "b": 1, "c": 1}
    first_blocks = {ids[0] for ids in plan.block_ids.values()}
    assert len(first_blocks) == 1
    assert scheduler.block_manager.num_free_blocks == 0


def test_only_requests_with_the_same_salt_share():
    scheduler = make_scheduler()
    for name, salt in {"a": "red", "b": "blue", "c": "red", "d": None}.items():
        add(scheduler, name, 5, first=0, cache_salt=salt)
    plan = take_step(scheduler)
    assert plan.num_prefix_hits == {"a": 0, "b": 0, "c": 4, "d": 0}


def test_a_chunk_shares_only_what_it_fills():
    scheduler = make_scheduler(max_num_batched_tokens=7, max_num_seqs=2)
    add(scheduler, "a", 12, first=0)
    take_step(scheduler)  # 7 of 12 tokens: one full block
    second = add(scheduler, "b", 12, first=0)
    take_step(scheduler)  # 5 of a, which fill its other blocks, and 2 of b
    assert second.num_cached_tokens == 8


def test_a_prompt_of_one_block_sent_twice_computes_at_least_its_last_token():
    scheduler = make_scheduler()
    add(scheduler, "a", 4, max_tokens=1, first=0)
    take_step(scheduler)
    add(scheduler, "b", 4, max_tokens=1, first=0)
    plan = take_step(scheduler)
    assert plan.num_scheduled_tokens["b"] >= 1


# --- The end of a request, and of a step ---


def test_a_stop_token_ends_a_request_and_stays_in_it():
    scheduler = make_scheduler(num_blocks=4)
    request = add(scheduler, "a", 3, stop_token_ids=frozenset({5}))
    steps(scheduler, 3)
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.output_token_ids == [3, 4, 5]
    assert scheduler.block_manager.num_free_blocks == 4


def test_a_stop_token_at_the_limit_counts_as_a_stop():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3, max_tokens=1, stop_token_ids=frozenset({3}))
    take_step(scheduler)
    assert request.status is RequestStatus.FINISHED_STOPPED


def test_a_stop_token_in_the_prompt_stops_nothing():
    scheduler = make_scheduler()
    request = add(
        scheduler, "a", 3, max_tokens=2, first=0, stop_token_ids=frozenset({1})
    )
    steps(scheduler, 2)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED


def test_tokens_after_the_end_are_dropped():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3, max_tokens=2)
    plan = scheduler.schedule()
    scheduler.update(plan, ModelOutput(sampled_token_ids={"a": [7, 8, 9]}))
    assert request.output_token_ids == [7, 8]
    assert_queues_are_right(scheduler)


def test_unusable_scores_end_only_their_own_request():
    scheduler = make_scheduler(num_blocks=8)
    first, second = add(scheduler, "a", 3), add(scheduler, "b", 3)
    plan = scheduler.schedule()
    output = ModelOutput(sampled_token_ids={"b": [9]}, errors={"a": "NaN everywhere"})
    scheduler.update(plan, output)
    assert first.status is RequestStatus.FINISHED_ERROR
    assert first.error == "NaN everywhere"
    assert second.output_token_ids == [9] and second.error is None
    assert list(scheduler.block_manager.block_ids) == ["b"]
    assert_queues_are_right(scheduler)


@pytest.mark.parametrize("when", ["waiting", "running", "preempted"])
def test_a_request_can_be_ended_wherever_it_is(when):
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    add(scheduler, "a", 4)
    second = add(scheduler, "b", 8)
    for _ in range(["waiting", "running", "preempted"].index(when)):
        take_step(scheduler)
    assert second.status.value == when
    scheduler.finish(second, RequestStatus.FINISHED_ABORTED)
    assert second not in scheduler.waiting and second not in scheduler.running
    assert "b" not in scheduler.block_manager.block_ids
    assert_queues_are_right(scheduler)
    assert steps(scheduler, 1)[0].keys() == {"a"}


def test_a_cancelled_step_leaves_no_trace_in_cache_or_tokens():
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    first = add(scheduler, "a", 8, max_tokens=3, first=0)
    take_step(scheduler)
    add(scheduler, "b", 9, max_tokens=3, first=0)  # shares with a
    plan = scheduler.schedule()
    assert scheduler.block_manager.promised or len(plan.requests) == 2
    scheduler.cancel(plan)
    assert_queues_are_right(scheduler)
    assert scheduler.block_manager.num_free_blocks == 8
    assert first.output_token_ids == [8] and first.num_computed_tokens == 0
    run_to_the_end(scheduler, [first])
    assert first.output_token_ids == [8, 9, 10]


def test_what_a_cancelled_step_promised_is_not_found_later():
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    add(scheduler, "a", 9, first=0)
    scheduler.cancel(scheduler.schedule())
    plan = scheduler.schedule()
    assert plan.num_prefix_hits == {"a": 0}
    assert plan.num_scheduled_tokens == {"a": 9}


def test_a_cancelled_step_keeps_what_earlier_steps_computed():
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    add(scheduler, "a", 9, first=0)
    take_step(scheduler)
    scheduler.cancel(scheduler.schedule())
    assert scheduler.schedule().num_prefix_hits == {"a": 8}


def test_requests_outside_a_cancelled_step_keep_their_blocks():
    scheduler = make_scheduler(max_num_batched_tokens=4, policy="prefill_first")
    add(scheduler, "a", 4)
    take_step(scheduler)
    add(scheduler, "b", 8)
    plan = scheduler.schedule()
    assert list(plan.num_scheduled_tokens) == ["b"]
    scheduler.cancel(plan)
    assert list(scheduler.block_manager.block_ids) == ["a"]
    assert_queues_are_right(scheduler)


def test_an_idle_scheduler_plans_nothing():
    scheduler = make_scheduler()
    plan = scheduler.schedule()
    assert plan.requests == [] and plan.num_tokens == 0
    assert not scheduler.has_unfinished_requests()


def test_the_plan_shows_the_blocks_in_token_order_and_they_do_not_change_later():
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    add(scheduler, "a", 3)
    add(scheduler, "b", 2)
    plan = take_step(scheduler)
    assert plan.block_ids == {"a": [0, 1], "b": [2]}
    steps(scheduler, 1)
    assert plan.block_ids == {"a": [0, 1], "b": [2]}


def test_times_of_the_first_step_are_kept():
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    add(scheduler, "a", 4)
    second = add(scheduler, "b", 8)
    take_step(scheduler, now=5.0)
    assert take_step(scheduler, now=6.0).preempted == [second]
    assert second.first_scheduled_time == 5.0


def test_planning_alone_holds_the_books_in_order():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    for name in "abcdef":
        add(scheduler, name, 3)
    assert isinstance(scheduler, Scheduler)
    scheduler.schedule()
    assert_books_balance(scheduler.block_manager)


def test_another_policy_sorts_those_who_wait():
    scheduler = make_scheduler(max_num_seqs=1, policy="shortest")
    lengths = {"a": 9, "b": 3, "c": 7, "d": 2, "e": 5}
    requests = {name: add(scheduler, name, n) for name, n in lengths.items()}
    scheduler.policy = POLICIES["mixed"]
    assert [r.request_id for r in scheduler.waiting] == ["a", "b", "c", "d", "e"]
    for name in "bdace":
        scheduler.finish(requests[name], RequestStatus.FINISHED_ABORTED)
    assert not scheduler.waiting


def test_a_policy_of_ones_own_begins_with_something_that_there_is():
    with pytest.raises(ConfigError, match="first is 'decod' in the policy 'mine'"):
        find_policy(Policy("mine", first="decod"))
