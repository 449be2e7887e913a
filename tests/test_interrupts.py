"""Ctrl-C: at a clean place, never lost, and never in the way of what hangs."""

import random
import signal
import sys
import threading
from pathlib import Path

import pytest

import minivllm
from minivllm.interrupts import HeldInterrupts
from minivllm.llm import LLM
from minivllm.sampling.params import SamplingParams
from tests.engine_tools import assert_all_free, assert_queues_are_right
from tests.tiny_folder import write_parrot

PACKAGE = str(Path(minivllm.__file__).parent)


def press(times=1):
    """Press Ctrl-C."""
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def python_s_own_handler():
    """Begin with the handler of a program, and demand it back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


# --- A block ---


def test_the_first_is_raised_at_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with HeldInterrupts():
            press()
            done.append("all of it")
    assert done == ["all of it"]


def test_the_second_is_raised_at_once_and_so_is_the_third():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with HeldInterrupts():
            try:
                press(2)
            finally:
                done.append("after the second")
                press()
                done.append("after the third")
    assert done == ["after the second"]


def test_one_that_foreign_code_has_swallowed_is_raised_at_the_end():
    with pytest.raises(KeyboardInterrupt):
        with HeldInterrupts():
            try:
                press(2)
            except KeyboardInterrupt:
                pass


def test_an_error_does_not_hide_it_and_is_not_hidden():
    with pytest.raises(KeyboardInterrupt) as caught:
        with HeldInterrupts():
            press()
            raise ValueError("of the block")
    assert str(caught.value.__context__) == "of the block"
    with pytest.raises(ValueError, match="of the block"):
        with HeldInterrupts():
            raise ValueError("of the block")


def test_in_a_block_inside_a_block_the_outer_one_holds():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with HeldInterrupts():
            with HeldInterrupts():
                press()
            done.append("between the ends")
    assert done == ["between the ends"]


def test_a_handler_of_the_users_decides_alone():
    pressed = []

    def handler(*_):
        pressed.append(True)

    signal.signal(signal.SIGINT, handler)
    with HeldInterrupts():
        press()
        assert pressed == [True]
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handler


def test_a_handler_that_is_set_inside_stays():
    with HeldInterrupts():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_hold_nothing():
    handlers = []

    def look():
        with HeldInterrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


# --- LLM ---


class PressAt:
    """Press Ctrl-C when so many lines of the package have run."""

    def __init__(self, number):
        self.number = number
        self.count = 0

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.number:
                press()
        return self

    def __enter__(self):
        sys.settrace(self)

    def __exit__(self, *_):
        sys.settrace(None)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_parrot(tmp_path_factory.mktemp("parrot"))
    with LLM(folder, backend="numpy", num_blocks=12, block_size=4) as llm:
        yield llm


def params(max_tokens, **options):
    return SamplingParams(
        n=2, max_tokens=max_tokens, temperature=0.5, seed=0, logprobs=2, **options
    )


def generate(llm):
    llm.generate(["x", "sky:", "xyzxyz"], params(5, stop="zx"))


def stream(llm):
    for _ in llm.stream("xyzxy", params(6, stop="zx")):
        pass


@pytest.mark.parametrize("call", [generate, stream])
def test_at_any_line_of_a_call_it_costs_this_call_alone(llm, call):
    def run(number):
        neighbour = llm.stream("xyz", params(9, stop="\n"))
        pieces = [next(neighbour)]
        place = PressAt(number)
        try:
            with place:
                call(llm)
            was_raised = False
        except KeyboardInterrupt:
            was_raised = True
        assert llm._stepper is None and not llm._to_do
        assert len(llm._mailboxes) == 1, "somebody gets mail who has left"
        assert_queues_are_right(llm.engine.scheduler)
        pieces += neighbour
        assert_all_free(llm.engine)
        answer = {
            index: [
                "".join(p.text for p in pieces if p.index == index),
                [t for p in pieces if p.index == index for t in p.token_ids],
                [e for p in pieces if p.index == index for e in p.logprobs],
            ]
            for index in (0, 1)
        }
        return was_raised, place.count, answer

    _, num_lines, undisturbed = run(0)
    assert num_lines > 1000
    for number in random.Random(0).sample(range(1, num_lines), 60):
        was_raised, _, answer = run(number)
        assert was_raised, f"line {number}: lost"
        for index in (0, 1):
            text, token_ids, logprobs = answer[index]
            assert [text, token_ids] == undisturbed[index][:2], f"line {number}"
            assert [next(iter(entry)) for entry in logprobs] == token_ids


def test_a_step_ends_before_it_is_raised(llm):
    executed = []

    def processor(output_token_ids, logits):
        press()
        executed.append(len(output_token_ids))

    llm.engine.listeners.append(lambda record: executed.append("end"))
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate("x", SamplingParams(logits_processors=[processor]))
    finally:
        llm.engine.listeners.clear()
    assert executed == [0, "end"]
    assert_all_free(llm.engine)


def test_the_second_stops_a_processor_that_hangs(llm):
    def processor(output_token_ids, logits):
        press(2)
        raise AssertionError("it went on")

    with pytest.raises(KeyboardInterrupt):
        llm.generate("x", SamplingParams(logits_processors=[processor]))
    assert_all_free(llm.engine)
    assert llm.generate("x", params(2))[0].finished


def test_whoever_waits_for_the_step_of_another_thread_need_not_wait(llm):
    is_in_step, may_go_on = threading.Event(), threading.Event()

    def slow(output_token_ids, logits):
        is_in_step.set()
        assert may_go_on.wait(30)

    answers = []
    slowly = SamplingParams(max_tokens=1, logits_processors=[slow])
    thread = threading.Thread(target=lambda: answers.extend(llm.generate("x", slowly)))
    thread.start()
    assert is_in_step.wait(30)
    timer = threading.Timer(0.2, press_from_outside)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate("y", params(3))
        assert not may_go_on.is_set()
    finally:
        may_go_on.set()
        thread.join()
    assert len(answers[0].outputs[0].token_ids) == 1
    assert_all_free(llm.engine)


def press_from_outside():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
