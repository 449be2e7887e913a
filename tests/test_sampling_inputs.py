"""What the samplers get from the requests, and the engine from the samples."""

import dataclasses
import gc
import math
import threading

import numpy as np
import pytest
import torch

from minivllm.request import Request
from minivllm.runners import sampling_inputs
from minivllm.runners.sampling_inputs import (
    SamplingState,
    apply_logits_processors,
    to_model_output,
)
from minivllm.runners.torch_runner import to_device
from minivllm.sampling.token_counts import TokenCounts
from minivllm.sampling.uniform import uniform
from tests.sampling_tools import edit_both, make_request, tensor_inputs

VOCAB_SIZE = 10


def inputs_of(*requests, state=None):
    return (state or SamplingState(VOCAB_SIZE)).inputs(requests)


def pairs(places, vocab_size=VOCAB_SIZE):
    """Return places as pairs of a row and a token."""
    return [divmod(place, vocab_size) for place in places.tolist()]


# --- which rows do what ---


def test_a_greedy_batch_without_edits_has_nothing_to_do():
    inputs = inputs_of(*[make_request([1], temperature=0.0, top_p=0.5)] * 3)
    assert (inputs.num_sampled, inputs.num_cut, inputs.has_edits) == (0, 0, False)
    per_row = {"repetition", "frequency", "presence"}
    for field in dataclasses.fields(inputs):
        assert len(getattr(inputs, field.name)) == (3 if field.name in per_row else 0)


def test_rows_with_cuts_come_first_among_those_that_draw():
    requests = [
        make_request(seed=1),
        make_request(temperature=0.0),
        make_request(seed=2, temperature=0.5, top_k=3),
        make_request(seed=3, top_k=11),
        make_request([1, 1], seed=4, min_p=0.25),
        make_request(seed=5, top_p=0.5, top_k=-1),
    ]
    inputs = inputs_of(*requests)
    rows = inputs.sampled_rows.tolist()
    assert inputs.num_cut == 3
    assert (set(rows[:3]), set(rows[3:])) == ({2, 4, 5}, {0, 3})
    temperatures = {0: 1, 2: 0.5, 3: 1, 4: 1, 5: 1}
    assert inputs.temperatures.tolist() == [temperatures[row] for row in rows]
    seeds = {0: (1, 0), 2: (2, 0), 3: (3, 0), 4: (4, 2), 5: (5, 0)}
    assert inputs.uniforms.tolist() == [uniform(*seeds[row]) for row in rows]
    cuts = {2: (0, 3, 1), 4: (0.25, 10, 1), 5: (0, 10, 0.5)}
    columns = (inputs.min_p, inputs.top_k, inputs.top_p)
    for row, *cut in zip(rows[:3], *columns, strict=True):
        assert tuple(cut) == cuts[row]


def test_edits_of_all_rows_lie_end_to_end():
    inputs = inputs_of(
        make_request(allowed_token_ids=[4, 2], logit_bias={3: 0.5}),
        make_request(),
        make_request([5, 6, 5], prompt=[6, 7], presence_penalty=0.5, bad_words=[[1]]),
        make_request([5], prompt=[8], repetition_penalty=2.0, logit_bias={1: -1}),
    )
    assert inputs.has_edits
    assert inputs.choosy_rows.tolist() == [0]
    assert pairs(inputs.allowed) == [(0, 2), (0, 4)]
    assert pairs(inputs.banned) == [(2, 1)]
    assert pairs(inputs.biased) == [(0, 3), (3, 1)]
    assert inputs.biases.tolist() == [0.5, -1]
    # Only the repetition penalty asks for the prompt.
    assert pairs(inputs.seen) == [(2, 5), (2, 6), (3, 8), (3, 5)]
    assert inputs.seen_rows.tolist() == [2, 2, 3, 3]
    assert inputs.seen_counts.tolist() == [2, 1, 0, 1]
    assert inputs.repetition.tolist() == [1, 1, 1, 2]
    assert inputs.presence.tolist() == [0, 0, 0.5, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [1]},
        {"bad_words": [[1]]},
        {"logit_bias": {1: 1.0}},
        {"frequency_penalty": 1.0, "output": [1]},
        {"repetition_penalty": 1.5},
        {"min_tokens": 1, "stop_token_ids": [1]},
        # All allowed tokens are unknown: no place is edited, and yet the row is.
        {"allowed_token_ids": [VOCAB_SIZE]},
    ],
)
def test_each_parameter_counts_as_an_edit(options):
    assert inputs_of(make_request(**options)).has_edits


def test_one_transfer_brings_all_arrays_to_the_device():
    requests = [make_request([1], top_p=0.5, presence_penalty=1.0), make_request()]
    inputs = inputs_of(*requests)
    arrays = inputs.arrays()
    assert {array.dtype for array in arrays} == {np.dtype("i8"), np.dtype("f8")}
    on_device = inputs.on(to_device(arrays, torch.device("cpu")))
    for field in dataclasses.fields(inputs):
        before, after = (getattr(i, field.name) for i in (inputs, on_device))
        assert after.numpy().dtype == before.dtype
        assert after.tolist() == before.tolist()
    assert on_device.num_cut == 1 and on_device.has_edits


# --- what is kept from step to step ---


def test_counts_hold_each_token_once_in_the_order_of_the_text():
    counts = TokenCounts(0, num_prompt_tokens=3)
    counts.extend([7, 5, 7, 5, 2])
    assert counts.ids.tolist() == [7, 5, 2]
    assert counts.output_counts.tolist() == [0, 1, 1]
    counts.extend([7, 5, 7, 5, 2, 2, 7, 9])
    assert counts.ids.tolist() == [7, 5, 2, 9]
    assert counts.output_counts.tolist() == [1, 1, 2, 1]


def test_counting_step_by_step_is_counting_at_once():
    chance = np.random.default_rng(0)
    text = chance.integers(300, size=1000).tolist()
    for first in (0, 400):
        steps = TokenCounts(first, 400)
        length = 400
        while length < 1000:
            length = min(1000, length + int(chance.integers(0, 30)))
            steps.extend(text[:length])
            at_once = TokenCounts(first, 400)
            at_once.extend(text[:length])
            assert steps.ids.tolist() == at_once.ids.tolist()
            assert steps.output_counts.tolist() == at_once.output_counts.tolist()
        expected = np.bincount(text[400:], minlength=300)
        assert steps.output_counts.tolist() == expected[steps.ids].tolist()
        assert set(steps.ids.tolist()) == set(text[first:])


def test_a_token_is_looked_at_once():
    class Text(list):
        looks = 0

        def __getitem__(self, place):
            assert isinstance(place, int), "a copy of the text costs its length"
            Text.looks += 1
            return super().__getitem__(place)

    text = Text([1, 2, 3, 1] * 100)
    counts = TokenCounts(0, 4)
    counts.extend(text)
    first = Text.looks
    for token_id in (4, 1):
        text.append(token_id)
        counts.extend(text)
    assert Text.looks - first <= 4


@pytest.mark.parametrize("num_new", [1, 2, 5])
def test_a_state_that_has_seen_the_steps_gives_what_a_new_one_does(num_new):
    state = SamplingState(VOCAB_SIZE)
    requests = [
        make_request(
            prompt=[1, 2],
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            min_tokens=4,
            stop_token_ids=[9],
            bad_words=[[3, 4], [5]],
            logit_bias={1: 1.0},
        ),
        make_request(prompt=[1, 2], presence_penalty=1.0),
        make_request(prompt=[1, 2]),
    ]
    chance = np.random.default_rng(num_new)
    for step in range(12):
        batch = [requests[i] for i in chance.permutation(3)[: 1 + step % 3]]
        kept = inputs_of(*batch, state=state)
        new = inputs_of(*batch)
        for ours, fresh in zip(kept.arrays(), new.arrays(), strict=True):
            assert ours.tolist() == fresh.tolist()
        for request in batch:
            request.token_ids += chance.integers(VOCAB_SIZE, size=num_new).tolist()
        if step == 6:  # preempted: the tokens stay, their keys and values go
            requests[0].num_computed_tokens = 0


def test_followers_of_one_prompt_are_counted_apart():
    state = SamplingState(VOCAB_SIZE)
    first = make_request(prompt=[1, 2], repetition_penalty=2.0, frequency_penalty=1.0)
    second = dataclasses.replace(first, token_ids=[1, 2], leader=first, index=1)
    inputs_of(first, second, state=state)
    first.token_ids.append(3)
    second.token_ids.append(1)
    inputs = inputs_of(first, second, state=state)
    assert pairs(inputs.seen) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert inputs.seen_counts.tolist() == [0, 0, 1, 1, 0]


def test_two_requests_with_one_id_are_not_mixed_up():
    state = SamplingState(VOCAB_SIZE)
    old = make_request([1, 1], request_id="a", frequency_penalty=1.0)
    inputs_of(old, state=state)
    new = make_request([2], request_id="a", frequency_penalty=1.0)
    assert pairs(inputs_of(new, state=state).seen) == [(0, 2)]


def test_what_is_fixed_is_prepared_once(monkeypatch):
    made = []
    prepare = sampling_inputs.RequestRow
    monkeypatch.setattr(
        sampling_inputs, "RequestRow", lambda *a: made.append(a) or prepare(*a)
    )
    state = SamplingState(VOCAB_SIZE)
    requests = [make_request(), make_request()]
    for _ in range(3):
        inputs_of(*requests, state=state)
    assert len(made) == 2


def test_a_finished_request_is_forgotten():
    state = SamplingState(VOCAB_SIZE)
    request = make_request([1], frequency_penalty=1.0)
    inputs_of(request, state=state)
    assert len(state.rows) == 1
    del request
    gc.collect()
    assert len(state.rows) == 0


# --- logits processors ---

LIBRARIES = [np.array, torch.tensor]
ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]


@pytest.mark.parametrize("make", LIBRARIES)
def test_without_processors_the_logits_are_not_copied(make):
    logits = make(ROWS)
    edited, errors = apply_logits_processors(logits, [make_request()] * 3)
    assert edited is logits and errors == {}


@pytest.mark.parametrize("make", LIBRARIES)
def test_a_processor_may_edit_in_place_or_return_other_logits(make):
    def in_place(output, row):
        row[0] = 10 * len(output)

    def returned(output, row):
        return row + output[-1]

    logits = make(ROWS)
    requests = [
        make_request([5, 6], processors=[in_place]),
        make_request(),
        make_request([5], processors=[returned, in_place, returned]),
    ]
    edited, errors = apply_logits_processors(logits, requests)
    assert edited.tolist() == [[20, 2, 3], [4, 5, 6], [15, 18, 19]]
    assert errors == {}
    assert logits.tolist() == ROWS
    assert edited.dtype == logits.dtype


def raises(output, row):
    row[:] = 0
    raise ValueError("no such word")


@pytest.mark.parametrize("make", LIBRARIES)
@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (raises, "ValueError: no such word"),
        (lambda output, row: row[:2], "shape (2,), but must return None or"),
        (lambda output, row: row.tolist(), "TypeError: it returned list, but must"),
        (lambda output, row: output[99], "IndexError"),
        (lambda output, row: 0.0, "it returned float"),
        (lambda output, row: row[None], "(1, 3)"),
    ],
)
def test_a_failing_processor_fails_its_own_request(make, processor, words):
    def shift(output, row):
        return row + 1

    requests = [
        make_request(processors=[shift]),
        make_request(processors=[shift, processor, shift]),
        make_request(),
    ]
    edited, errors = apply_logits_processors(make(ROWS), requests)
    assert edited.tolist() == [[2, 3, 4], *ROWS[1:]]
    assert list(errors) == [1]
    assert words in errors[1]


def shrinks(output, row):
    if isinstance(row, torch.Tensor):
        row.resize_(1)  # one score could be spread over the whole row
    else:
        row.resize(1, refcheck=False)


def grows(output, row):
    if isinstance(row, torch.Tensor):
        row.resize_(4)
    else:
        row.resize(4, refcheck=False)


class Halves:
    def __call__(self, output, row):
        if isinstance(row, torch.Tensor):
            row.data = row.data.half()
        else:
            row.dtype = np.int64


@pytest.mark.parametrize("make", LIBRARIES)
@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (shrinks, "processor shrinks failed: ValueError: it made of its row shape (1,"),
        (grows, "processor grows failed: ValueError: it made of its row shape (4,)"),
        (Halves(), "processor Halves failed: TypeError: it made of its row one of"),
    ],
)
def test_a_row_that_is_another_array_afterwards_is_noticed(make, processor, words):
    requests = [make_request(), make_request(processors=[processor]), make_request()]
    edited, errors = apply_logits_processors(make(ROWS), requests)
    assert edited.tolist() == ROWS
    assert list(errors) == [1] and words in errors[1]


class Odd(BaseException):
    pass


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Odd])
def test_whatever_a_processor_raises_in_a_thread_is_its_own_failure(kind):
    def processor(output, row):
        raise kind

    found = []
    requests = [make_request(), make_request(processors=[processor])]
    thread = threading.Thread(
        target=lambda: found.extend(apply_logits_processors(np.ones((2, 3)), requests))
    )
    thread.start()
    thread.join()
    assert kind.__name__ in found[1][1]


def test_ctrl_c_in_the_main_thread_is_passed_on():
    def processor(output, row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        request = make_request(processors=[processor])
        apply_logits_processors(np.ones((1, 3)), [request])


def test_arrays_of_the_other_library_are_refused():
    request = make_request(processors=[lambda output, row: np.zeros(3)])
    _, errors = apply_logits_processors(torch.zeros(1, 3), [request])
    assert "ndarray" in errors[0] and "Tensor" in errors[0]


def test_a_processor_cannot_change_the_output():
    def clear(output, row):
        output.clear()

    request = make_request([1, 2], processors=[clear])
    apply_logits_processors(np.zeros((1, 3)), [request])
    assert request.output_token_ids == [1, 2]


def test_processors_come_before_the_other_edits():
    def forbid(output, row):
        row[1] = -math.inf

    request = make_request(processors=[forbid], logit_bias={1: 100, 2: 1})
    edited, _ = apply_logits_processors(np.zeros((1, 3), np.float32), [request])
    assert edit_both(edited, [request]).tolist() == [[0, -math.inf, 1]]


# --- what the engine gets ---


def named(*names: str) -> list[Request]:
    return [make_request(request_id=name) for name in names]


def test_tokens_and_scores_are_sorted_by_request():
    output = to_model_output(named("a", "b"), [5, 6], [0.5, 0.25], [1.0, 2.0])
    assert output.sampled_token_ids == {"a": [5], "b": [6]}
    assert output.token_logits == {"a": [0.5], "b": [0.25]}
    assert output.errors == {}


def test_unusable_rows_become_errors_of_their_requests():
    largest = [math.nan, math.inf, 1.0, 1.0, 1.0, 1.0, math.nan]
    edited = [math.nan, math.inf, -math.inf, math.nan, 1.0, 1.0, 1.0]
    output = to_model_output(
        named(*"abcdefg"), [0] * 7, [0.0] * 7, largest, edited, {4: "x", 6: "y"}
    )
    assert output.sampled_token_ids == {"f": [0]}
    assert output.token_logits == {"f": [0.0]}
    assert list(output.errors) == ["a", "b", "c", "d", "e", "g"]
    assert "the largest logit is nan, but must be finite" in output.errors["a"]
    assert "the largest logit is inf" in output.errors["b"]
    assert "the parameters leave no token to choose" in output.errors["c"]
    assert "nan after the request's own edits" in output.errors["d"]
    assert output.errors["e"] == "x"
    # What a processor makes of scores that are no numbers is not its fault.
    assert "the largest logit is nan" in output.errors["g"]


def test_the_parameters_that_leave_no_token_are_named():
    request = make_request(allowed_token_ids=[1], guided_regex="a", top_k=3)
    output = to_model_output([request], [0], [0.0], [1.0], [-math.inf])
    (error,) = output.errors.values()
    assert error.endswith(": let allowed_token_ids and guided_regex leave at least one")


def test_parameters_that_leave_no_token_leave_minus_infinity():
    request = make_request(allowed_token_ids=[1], bad_words=[[1]])
    assert edit_both([[0, 0, 0]], [request]).max() == -math.inf


def test_inputs_of_no_requests_are_empty():
    inputs = tensor_inputs([], VOCAB_SIZE)
    assert (inputs.num_sampled, inputs.num_cut, inputs.has_edits) == (0, 0, False)
