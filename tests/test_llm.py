"""`LLM`: any prompts in, answers in their order, from any thread."""

import gc
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from minivllm.errors import ConfigError, MinivllmError, RequestError
from minivllm.llm import LLM
from minivllm.sampling.params import SamplingParams
from tests.engine_tools import LedgerRunner, assert_all_free, continuation
from tests.tiny_folder import CHAT_TEMPLATE, EOS, write_parrot

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that answers " blué!" after ":", and "xyzxyz..." after "x"."""
    return write_parrot(tmp_path_factory.mktemp("parrot"))


@pytest.fixture(scope="module", params=["numpy", "torch"])
def llm(request, folder):
    with LLM(
        folder, backend=request.param, dtype="float32", device="cpu", num_blocks=64
    ) as llm:
        yield llm
        assert_all_free(llm.engine)


@pytest.fixture
def fake():
    """An LLM whose answers depend on the whole prompt, and are checked on the way."""
    llm = LLM("any", backend="fake", num_blocks=64, block_size=4)
    llm.engine.runner = LedgerRunner(num_blocks=64, block_size=4, max_model_len=256)
    return llm


def texts_of(outputs):
    return [output.outputs[0].text for output in outputs]


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def up_to(max_tokens, **options):
    return SamplingParams(max_tokens=max_tokens, **options)


# --- generate ---


def test_a_prompt_is_a_text_or_token_ids_and_many_may_be_mixed(llm):
    prompts = ["sky:", list(b"sky:"), "x", np.array([*b"x"])]
    outputs = llm.generate(prompts, GREEDY)
    assert texts_of(outputs) == [" blué!"] * 2 + ["yzxyzxyzxyzx"] * 2
    assert [output.prompt for output in outputs] == ["sky:", None, "x", None]
    assert outputs[1].prompt_token_ids == list(b"sky:")
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop"] * 2 + [
        "length"
    ] * 2


@pytest.mark.parametrize("prompt", ["sky:", list(b"sky:"), np.array([*b"sky:"])])
def test_one_prompt_gives_one_output(llm, prompt):
    assert texts_of(llm.generate(prompt, GREEDY)) == [" blué!"]


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []


def test_max_tokens_is_16_by_default(llm):
    assert len(tokens_of(llm.generate("x"))[0]) == 16


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 2, 3)]
    assert texts_of(llm.generate(["x", "y", "z"], params)) == ["y", "zx", "xyz"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_another_number_of_parameters_than_prompts_is_refused(llm, count):
    message = f"sampling_params has {count} entries for 3 prompts"
    with pytest.raises(RequestError, match=message):
        llm.generate(["a", "b", "c"], [GREEDY] * count)
    with pytest.raises(RequestError, match=f"priority has {count} entries for 3"):
        llm.generate(["a", "b", "c"], GREEDY, priority=[0] * count)


def test_outputs_come_in_the_order_of_the_prompts_over_two_calls(fake):
    for shift in (0, 100):
        prompts = [[1, 2, (n + shift) % 50] for n in range(12)]
        params = [up_to(1 + n % 5) for n in range(12)]
        outputs = fake.generate(prompts, params)
        assert [output.prompt_token_ids for output in outputs] == prompts
        expected = [
            continuation(prompt, p.max_tokens)
            for prompt, p in zip(prompts, params, strict=True)
        ]
        assert tokens_of(outputs) == expected
    assert_all_free(fake.engine)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["x", ""], "prompt 1: the prompt has 0 tokens"),
        ("", "^the prompt has 0 tokens"),
        (["x", [256, 257]], "prompt 1: .* token id 257, but the model knows 0 to 256"),
        ([[-1]], "^the prompt holds token id -1"),
        ([[2**63]], "token id 9223372036854775808"),
        (["x", [1.5]], "holds 1.5"),
        (["x", 5], "prompt 1 is 5, but must be a text or a list of token ids"),
        ([1, "x"], "prompt 0 is 1"),
        ([None], "prompt 0 is None"),
        (5, "prompts is 5"),
        (None, "prompts is None"),
        ({"prompt": "x"}, "prompts is {'prompt': 'x'}, but must be a text, a list"),
        ([{"prompt": "x"}], "the prompt is {'prompt': 'x'}"),
        (b"x", "prompts is b'x'"),
        (["x", b"x"], "prompt 1: the prompt is b'x'"),
        (["x", "y" * 5000], "prompt 1: the prompt has 5,000 tokens"),
    ],
)
def test_an_impossible_prompt_is_refused_and_nothing_was_started(llm, prompts, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_unfinished_requests() and not llm._mailboxes


def test_a_table_of_token_ids_is_a_batch(llm):
    table = np.array([[*b"ax"], [*b"ay"]])
    assert texts_of(llm.generate(table, up_to(2, temperature=0))) == ["yz", "zx"]
    column = np.array([[ord("x")], [ord("y")]])
    assert texts_of(llm.generate(column, up_to(2, temperature=0))) == ["yz", "zx"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling_params": {"temperature": 0}}, "is a dict, but must be a Sampl"),
        ({"priority": 0.5}, "priority is 0.5"),
        (
            {"sampling_params": up_to(1, stop_token_ids=[257])},
            "stop_token_ids holds 25",
        ),
    ],
)
def test_an_impossible_parameter_is_refused_and_nothing_was_started(
    llm, options, message
):
    with pytest.raises(RequestError, match=message):
        llm.generate(["x", "y"], **options)
    assert not llm.engine.has_unfinished_requests()


def test_a_request_that_fails_on_the_way_has_a_message_and_the_others_an_answer(fake):
    fake.engine.runner.num_blocks = 64
    outputs = fake.generate([[1], [2], [3]], [up_to(5), up_to(5), up_to(5)])
    assert tokens_of(outputs) == [continuation([n], 5) for n in (1, 2, 3)]
    fake.engine.runner.error = RuntimeError("no luck")
    outputs = fake.generate([[1], [2]], up_to(5))
    assert [o.outputs[0].finish_reason for o in outputs] == ["error"] * 2
    assert "no luck" in outputs[0].outputs[0].error
    assert tokens_of(fake.generate([[1]], up_to(5))) == [continuation([1], 5)]


def test_priority_decides_who_comes_first_under_that_policy():
    with LLM("any", backend="fake", policy="priority", max_num_seqs=1) as llm:
        outputs = llm.generate([[1], [2], [3]], up_to(2), priority=[5, 0, -1])
    starts = [output.metrics.first_scheduled_time for output in outputs]
    assert starts[2] < starts[1] < starts[0]


def test_the_second_prompt_finds_the_first_ones_blocks(llm):
    prompt = "a long beginning of more than one block, " * 2
    llm.generate(prompt + "x", GREEDY)
    (output,) = llm.generate(prompt + "y", GREEDY)
    assert output.num_cached_tokens == len(prompt) // 16 * 16
    assert texts_of([output]) == ["zxyzxyzxyzxy"]


def test_metrics_are_measured(llm):
    (output,) = llm.generate("x", GREEDY)
    metrics = output.metrics
    assert 0 < metrics.time_to_first_token_s < metrics.end_to_end_s < 60
    assert metrics.time_per_output_token_s > 0
    assert metrics.num_output_tokens == 12


def test_a_progress_bar_is_shown_on_request_only(llm, capfd):
    llm.generate(["x", "y"], GREEDY)
    assert "requests" not in capfd.readouterr().err
    llm.generate(["x", "y"], GREEDY, use_tqdm=True)
    assert "2/2" in capfd.readouterr().err


# --- Seeds ---


def sample(llm, prompts, params):
    return tokens_of(llm.generate(prompts, params))


def test_a_seeded_request_answers_the_same_alone_with_neighbours_in_any_order(llm):
    seeded = [SamplingParams(temperature=9.0, max_tokens=8, seed=s) for s in (1, 2, 3)]
    free = SamplingParams(temperature=9.0, max_tokens=9)
    alone = [sample(llm, "x", params)[0] for params in seeded]
    assert len({tuple(tokens) for tokens in alone}) == 3
    assert sample(llm, ["x"] * 3, seeded) == alone
    assert sample(llm, ["x"] * 3, seeded[::-1]) == alone[::-1]
    mixed = sample(llm, ["y", "x", "x", "x", "z"], [free, *seeded, GREEDY])
    assert mixed[1:4] == alone
    assert sample(llm, "x", seeded[0])[0] == alone[0]


def test_equal_requests_without_a_seed_differ(llm):
    outputs = sample(llm, ["x"] * 4, SamplingParams(temperature=1e6, max_tokens=6))
    assert len({tuple(tokens) for tokens in outputs}) == 4


def test_the_seed_of_the_engine_repeats_a_whole_run(folder):
    def run(seed):
        with LLM(folder, backend="numpy", num_blocks=64, seed=seed) as llm:
            return sample(llm, ["x", "y"], SamplingParams(temperature=5.0))

    assert run(0) == run(0) != run(1)


# --- chat ---


def test_a_chat_is_answered_through_the_template(llm):
    chat = [{"role": "user", "content": "Why?"}]
    (output,) = llm.chat(chat, SamplingParams(temperature=0))
    assert bytes(output.prompt_token_ids) == b"u=Why?;:"
    assert output.outputs[0].text == " blué!"
    outputs = llm.chat([chat, chat], SamplingParams(temperature=0))
    assert texts_of(outputs) == [" blué!"] * 2


def test_a_text_starts_with_exactly_one_bos_whoever_writes_it(tmp_path):
    folder = write_parrot(tmp_path, "{{ bos_token }}" + CHAT_TEMPLATE)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(
        json.dumps(settings | {"bos_token": "<eos>", "add_bos_token": True})
    )
    chat = [{"role": "user", "content": "Why?"}]
    with LLM(folder, backend="numpy", num_blocks=8) as llm:
        (chatted,) = llm.chat(chat, up_to(1))
        (continued,) = llm.generate("x", up_to(1))
    assert chatted.prompt_token_ids == [EOS, *b"u=Why?;:"]
    assert continued.prompt_token_ids == [EOS, *b"x"]


def test_an_answer_in_a_chat_may_be_as_long_as_fits(folder):
    chat = [{"role": "user", "content": "x"}]
    params = SamplingParams(temperature=1e6, ignore_eos=True, seed=0)
    with LLM(folder, backend="numpy", max_model_len=48, num_blocks=8) as llm:
        (output,) = llm.chat(chat, params)
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 48
        short = SamplingParams(max_tokens=3, ignore_eos=True)
        assert len(tokens_of(llm.chat(chat, short))[0]) == 3


def test_a_model_without_a_template_refuses_to_chat(tmp_path):
    with LLM(write_parrot(tmp_path, None), backend="numpy", num_blocks=8) as llm:
        with pytest.raises(RequestError, match="no chat template"):
            llm.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "messages",
    [
        *("hello", ["hello"], [["hello"]], [5], [None], 5, None, [[]]),
        {"role": "user", "content": "x"},
        [[{"role": "user", "content": "x"}], 5],
    ],
    ids=repr,
)
def test_a_chat_that_is_no_list_of_messages_is_refused(llm, messages):
    with pytest.raises(RequestError):
        llm.chat(messages)
    assert not llm.engine.has_unfinished_requests()


# --- stream ---


def test_the_pieces_of_a_stream_join_to_the_whole(llm):
    for prompt in ("sky:", "x"):
        (whole,) = llm.generate(prompt, GREEDY)
        pieces = list(llm.stream(prompt, GREEDY))
        assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
        token_ids = [token for piece in pieces for token in piece.token_ids]
        assert token_ids == whole.outputs[0].token_ids
        reasons = [piece.finish_reason for piece in pieces]
        assert reasons[-1] == whole.outputs[0].finish_reason
        assert set(reasons[:-1]) == {None}
        assert not any("\ufffd" in piece.text for piece in pieces)


def test_an_impossible_stream_is_refused_at_the_call(llm):
    with pytest.raises(RequestError, match="0 tokens"):
        llm.stream("")
    with pytest.raises(RequestError, match="the prompt is 5"):
        llm.stream(5)


@pytest.mark.parametrize("how", ["close", "delete", "error"])
def test_a_stream_that_is_dropped_frees_its_blocks(fake, how):
    stream = fake.stream([1, 2, 3, 4, 5], up_to(50))
    next(stream)
    assert fake.engine.scheduler.block_manager.num_free_blocks < 64
    if how == "close":
        stream.close()
    elif how == "error":
        with pytest.raises(ZeroDivisionError):
            for _ in stream:
                _ = 1 / 0
    del stream
    gc.collect()
    assert_all_free(fake.engine)
    assert not fake._mailboxes
    assert tokens_of(fake.generate([[1, 2, 3]], up_to(3))) == [
        continuation([1, 2, 3], 3)
    ]


def test_a_stream_that_nobody_starts_costs_nothing(fake):
    stream = fake.stream([1, 2, 3], up_to(50))
    assert not fake.engine.has_unfinished_requests()
    del stream
    assert_all_free(fake.engine)


def test_streams_and_calls_take_turns(fake):
    streams = [fake.stream([1, 2, n], up_to(6)) for n in range(3)]
    said = [next(stream).token_ids for stream in streams]
    assert tokens_of(fake.generate([[7]], up_to(3))) == [continuation([7], 3)]
    for n, stream in enumerate(streams):
        said[n] += [token for piece in stream for token in piece.token_ids]
        assert said[n] == continuation([1, 2, n], 6)
    assert_all_free(fake.engine)


def test_an_aborted_stream_ends_with_that_reason(fake):
    stream = fake.stream([1, 2, 3], up_to(50))
    next(stream)
    (request_id,) = fake._mailboxes
    fake.abort(request_id)
    (last,) = stream
    assert last.finish_reason == "abort" and last.token_ids == []
    fake.abort(request_id)
    fake.abort("nobody")
    assert_all_free(fake.engine)


# --- Threads ---


def run_threads(*functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_eight_threads_get_the_same_answers_as_one_alone(fake):
    answers = {}

    def ask(thread):
        def run():
            for n in range(20):
                prompt = [1, 2, 3, 4, thread, n]
                if n % 4 == 2:  # dropped after its first token
                    tokens = next(fake.stream(prompt, up_to(20))).token_ids
                elif n % 4 == 3:
                    pieces = fake.stream(prompt, up_to(1 + n % 7))
                    tokens = [token for piece in pieces for token in piece.token_ids]
                else:
                    (tokens,) = tokens_of(fake.generate([prompt], up_to(1 + n % 7)))
                answers[thread, n] = tokens

        return run

    run_threads(*(ask(thread) for thread in range(8)))
    assert len(answers) == 160
    for (thread, n), tokens in answers.items():
        expected = continuation([1, 2, 3, 4, thread, n], 1 + n % 7)
        assert tokens == (expected[:1] if n % 4 == 2 else expected)
    assert_all_free(fake.engine)
    assert not fake._mailboxes and not fake._to_do


def pause_step(llm, number, condition):
    """Let a step wait for another thread; return what each step computed."""
    execute = llm.engine.runner.execute
    steps = []

    def wait_and_execute(step):
        steps.append(len(step.requests))
        deadline = time.monotonic() + 30
        while len(steps) == number and not condition():
            assert time.monotonic() < deadline, "the other thread never came"
            time.sleep(0.001)
        return execute(step)

    llm.engine.runner.execute = wait_and_execute
    return steps


def test_requests_of_several_threads_share_the_steps(fake):
    steps = pause_step(fake, 1, lambda: len(fake._to_do) == 3)
    run_threads(*(lambda n=n: fake.generate([[n]], up_to(30)) for n in range(4)))
    assert steps == [1] + [4] * 29 + [3]


def test_whoever_has_an_answer_need_not_wait_for_the_next_step(fake):
    has_returned = threading.Event()
    answers = {}
    steps = pause_step(fake, 1, lambda: fake._to_do)

    def ask_much():
        answers["long"] = tokens_of(fake.generate([[1]], up_to(5)))

    def ask_little():
        while not steps:  # the long one runs, and waits for this one
            time.sleep(0.001)
        pause_step(fake, 2, has_returned.is_set)  # steps 2, 3 of all: 1, 2 of its own
        answers["short"] = tokens_of(fake.generate([[2]], up_to(1)))
        has_returned.set()

    run_threads(ask_much, ask_little)
    assert answers["long"] == [continuation([1], 5)]
    assert answers["short"] == [continuation([2], 1)]


def test_threads_on_a_real_model(llm):
    texts = {}

    def ask(name):
        return lambda: texts.update({name: texts_of(llm.generate([name] * 3, GREEDY))})

    run_threads(*(ask(name) for name in ("x", "ay", "bz", "sky:")))
    assert texts == {
        "x": ["yzxyzxyzxyzx"] * 3,
        "ay": ["zxyzxyzxyzxy"] * 3,
        "bz": ["xyzxyzxyzxyz"] * 3,
        "sky:": [" blué!"] * 3,
    }


def test_an_abort_from_another_thread_ends_a_running_request(fake):
    is_running = threading.Event()
    steps = pause_step(fake, 3, lambda: is_running.set() or fake._to_do)
    outputs = []

    def stop():
        is_running.wait(30)
        fake.abort(next(iter(fake._mailboxes)))

    run_threads(lambda: outputs.extend(fake.generate([[1, 2, 3]], up_to(250))), stop)
    assert outputs[0].outputs[0].finish_reason == "abort"
    assert tokens_of(outputs) == [continuation([1, 2, 3], 3)]
    assert len(steps) == 3
    assert_all_free(fake.engine)


# --- Ctrl-C, closing ---


def test_ctrl_c_in_generate_frees_everything(fake):
    execute = fake.engine.runner.execute
    calls = []

    def interrupted(step):
        calls.append(step)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return execute(step)

    fake.engine.runner.execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        fake.generate([[1, 2, 3], [4, 5]], up_to(20))
    assert_all_free(fake.engine)
    assert not fake._mailboxes
    assert tokens_of(fake.generate([[1, 2, 3]], up_to(3))) == [
        continuation([1, 2, 3], 3)
    ]


def test_ctrl_c_in_one_thread_does_not_reach_the_others(fake):
    fake.engine.runner.error = KeyboardInterrupt()  # for whoever makes the next step
    caught, answers = [], []

    def ask(n):
        def run():
            try:
                answers.append((n, tokens_of(fake.generate([[n]], up_to(20)))[0]))
            except KeyboardInterrupt:
                caught.append(n)

        return run

    run_threads(*(ask(n) for n in range(4)))
    assert len(caught) == 1 and len(answers) == 3
    for n, tokens in answers:
        assert tokens == continuation([n], 20)
    assert_all_free(fake.engine)


def test_a_bug_in_a_step_reaches_its_caller_and_leaves_the_door_open(fake):
    schedule = fake.engine.scheduler.schedule
    fake.engine.scheduler.schedule = lambda now: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fake.generate([[1]], up_to(2))
    fake.engine.scheduler.schedule = schedule
    assert tokens_of(fake.generate([[1]], up_to(2))) == [continuation([1], 2)]
    assert_all_free(fake.engine)


def test_an_error_of_a_request_reaches_its_caller_and_not_who_makes_the_step(fake):
    fake.engine.add_request("1", [5], up_to(30))  # a name that the LLM will want
    steps = pause_step(fake, 1, lambda: fake._to_do)
    answers, errors = [], []

    def ask():
        answers.append(tokens_of(fake.generate([[7, 8]], up_to(5))))

    def ask_in_vain():
        while not steps:  # the step of the other one runs, and waits for this one
            time.sleep(0.001)
        with pytest.raises(RequestError) as caught:
            fake.generate([[1], [2]], up_to(5))
        errors.append(str(caught.value))

    run_threads(ask, ask_in_vain)
    assert answers == [[continuation([7, 8], 5)]]
    assert errors[0].startswith("request_id is '1', but an unfinished request has that")
    assert not fake._mailboxes
    fake.abort("1")
    assert_all_free(fake.engine)


@pytest.mark.parametrize("call", ["generate", "stream", "close"])
def test_a_call_from_inside_a_step_is_refused_and_waits_for_nobody(llm, call):
    waiting = llm.stream("x", GREEDY)
    if call == "stream":
        next(waiting)
    calls = {
        "generate": lambda: llm.generate("x", GREEDY),
        "stream": lambda: next(waiting),
        "close": llm.close,
    }

    def processor(output_token_ids, logits):
        calls[call]()

    params = SamplingParams(max_tokens=2, logits_processors=[processor])
    asked, answered = llm.generate(["x", "y"], [params, GREEDY])
    assert "called from inside its own step" in asked.outputs[0].error
    assert answered.outputs[0].text == "zxyzxyzxyzxy"
    assert texts_of(llm.generate("x", GREEDY)) == ["yzxyzxyzxyzx"]


def test_an_abort_from_inside_a_step_is_done_at_its_end(llm):
    def processor(output_token_ids, logits):
        llm.abort(next(iter(llm._mailboxes)))

    params = SamplingParams(max_tokens=9, logits_processors=[processor])
    [output] = llm.generate("x", params)
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 1


def test_requests_given_to_the_engine_directly_disturb_nobody(fake):
    fake.engine.add_request("mine", [1, 2], up_to(3))
    assert tokens_of(fake.generate([[7, 8]], up_to(5))) == [continuation([7, 8], 5)]


def test_a_closed_llm_refuses_and_a_second_close_is_harmless(folder):
    with LLM(folder, backend="numpy", num_blocks=8) as llm:
        stream = llm.stream("x", GREEDY)
        next(stream)
    assert llm.engine.runner.kv_cache is None
    with pytest.raises(MinivllmError, match="this LLM is closed"):
        next(stream)
    for call in (llm.generate, llm.stream):
        with pytest.raises(MinivllmError, match="this LLM is closed: make a new one"):
            call("x")
    with pytest.raises(MinivllmError, match="this LLM is closed"):
        llm.chat([{"role": "user", "content": "x"}])
    llm.close()
    llm.abort("0")


def test_closing_ends_the_calls_of_other_threads(fake):
    is_running = threading.Event()
    steps = pause_step(fake, 3, lambda: is_running.set() or fake._is_closed)
    caught = []

    def ask():
        with pytest.raises(MinivllmError, match="this LLM is closed"):
            fake.generate([[1, 2, 3]], up_to(250))
        caught.append(True)

    def close():
        is_running.wait(30)
        fake.close()

    run_threads(ask, ask, ask, close)
    assert len(caught) == 3
    assert len(steps) == 3, "the running step is the last one"


# --- Options ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 3}, "no option max_num_seq: did you mean max_num_seqs?"),
        ({"modell": "x"}, "no option modell: did you mean model?"),
        ({"zzz": 3}, "no option zzz: see help"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"policy": "fifo"}, "policy is 'fifo'"),
        ({"policy": "prefillfirst"}, "did you mean 'prefill_first'"),
        ({"backend": "jax"}, "backend is 'jax'"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": None}, "seed is None"),
        ({"max_logprobs": -2}, "max_logprobs is -2, but must be an integer of at"),
        ({"max_logprobs": 2.5}, "max_logprobs is 2.5"),
        ({"max_logprob": 5}, "did you mean max_logprobs?"),
        ({"num_blocks": 4, "kv_cache_memory_bytes": 1}, "each say how large"),
    ],
)
def test_an_impossible_option_is_refused_before_a_model_is_loaded(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM("/no/such/folder", **options)


def test_it_shows_its_sizes(folder):
    with LLM(folder, backend="numpy", num_blocks=100, max_model_len=64) as llm:
        assert "NumpyRunner, KV cache for 1,600 tokens (100 blocks of 16)" in repr(llm)


# --- A small machine ---


@pytest.mark.slow
def test_smollm2_answers_five_at_once_in_one_gibibyte_without_torch(smollm2_dir):
    script = f"""
import resource, sys, threading
from pathlib import Path
from minivllm.llm import LLM
from minivllm.sampling.params import SamplingParams

llm = LLM(
    {str(smollm2_dir)!r}, backend="numpy", block_size=16, max_num_seqs=32,
    max_model_len=2048, kv_cache_memory_bytes=100 * 2**20,
)
answers = {{}}
def ask(n):
    chat = [{{"role": "user", "content": f"What is {{n}} plus one?"}}]
    (output,) = llm.chat(chat, SamplingParams(temperature=0, max_tokens=12))
    answers[n] = output.outputs[0]
threads = [threading.Thread(target=ask, args=(n,)) for n in range(5)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(answers) == 5, answers
assert all(a.finish_reason in ("stop", "length") and a.text for a in answers.values())
assert "torch" not in sys.modules
# On Linux, ru_maxrss begins with what the parent held; VmHWM is of this program alone.
status = Path("/proc/self/status")
lines = status.read_text().splitlines() if status.exists() else []
peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
peak = peaks[0] if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak // 1024)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 1024, "peak memory in MiB; the weights are 513"


def test_only_requests_with_the_same_salt_share_blocks():
    with LLM(backend="fake", num_blocks=64, block_size=4, max_model_len=64) as llm:
        prompt = list(range(1, 14))
        params = SamplingParams(max_tokens=1)
        llm.generate(prompt, params, cache_salt="mine")
        outputs = llm.generate([prompt] * 3, params, cache_salt=["mine", "yours", None])
        assert [output.num_cached_tokens for output in outputs] == [12, 0, 0]
        assert next(llm.stream(prompt, params, cache_salt="yours")) is not None
        with pytest.raises(RequestError, match="cache_salt has 2 entries for 1"):
            llm.generate(prompt, params, cache_salt=["a", "b"])
