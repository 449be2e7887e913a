"""What ends an answer and what its text is, through the whole engine and `LLM`."""

import json
import re
from itertools import chain, pairwise

import numpy as np
import pytest

from minivllm.engine.engine import LLMEngine
from minivllm.errors import RequestError
from minivllm.llm import LLM
from minivllm.runners.fake_runner import FakeRunner
from minivllm.sampling.params import SamplingParams
from minivllm.text.tokenizer import Tokenizer
from tests.engine_tools import assert_all_free, run_all
from tests.tiny_folder import EOS, write_parrot
from tests.tiny_tokenizers import byte_level, load, sentencepiece


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Token ids are bytes; 256 ends the text."""
    return Tokenizer.from_dir(write_parrot(tmp_path_factory.mktemp("parrot")))


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    """Bytes, and the tokens "DEF", "HI", "gamma delta", " Alice"."""
    merges = ["D E", "DE F", "H I"]
    for text in ("gamma", "Alice"):
        for n in range(1, len(text)):
            merges.append(f"{text[:n]} {text[n]}")
    merges += ["Ġ Alice"]
    return load(byte_level(*merges), tmp_path_factory.mktemp("merging"))


def engine_that_says(tokenizer, *answers, **options):
    """Make an engine whose requests "0", "1", ... get the given tokens."""
    script = {str(index): list(answer) for index, answer in enumerate(answers)}
    runner = FakeRunner(vocab_size=tokenizer.vocab_size, script=script)
    return LLMEngine(runner, tokenizer=tokenizer, **options)


def ask(engine, name="0", prompt=(1,), **params):
    """Run one request; return the texts on the way and the last output."""
    params = SamplingParams(**{"max_tokens": 40} | params)
    engine.add_request(name, list(prompt), params)
    texts = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts.append(output.outputs[0].text)
    assert_all_free(engine)
    for before, after in pairwise(texts):
        assert after.startswith(before), "a text that was shown was taken back"
    return texts, output.outputs[0]


def ids_of(tokenizer, *pieces):
    return [
        token_id
        for piece in pieces
        for token_id in tokenizer.encode(piece, add_special_tokens=False)
    ]


# --- Stop texts ---


def test_a_stop_text_over_several_tokens_is_cut_off_and_never_shown(merging):
    answer = ids_of(merging, "abc", "DEF", "G", "HI", "J", "tail")
    texts, last = ask(engine_that_says(merging, answer), stop="DEFGHIJ")
    assert last.text == "abc" and last.finish_reason == "stop"
    assert last.stop_reason == "DEFGHIJ"
    assert not any("D" in text for text in texts)
    assert last.token_ids == ids_of(merging, "abc", "DEF", "G", "HI", "J")


def test_a_stop_text_inside_a_token_cuts_the_token(merging):
    answer = ids_of(merging, "say ", "gamma", " delta")
    _, last = ask(engine_that_says(merging, answer), stop="mm")
    assert last.text == "say ga" and last.stop_reason == "mm"


def test_what_was_held_back_comes_once_when_it_was_no_stop(merging):
    answer = ids_of(merging, " Alice", "!")
    texts, last = ask(
        engine_that_says(merging, answer), stop=["\n", "Alice:"], max_tokens=2
    )
    assert texts == [" ", " Alice!"] and last.finish_reason == "length"


def test_the_beginning_of_a_stop_text_at_the_end_is_text(tokenizer):
    _, last = ask(engine_that_says(tokenizer, b"hello EN"), stop="END", max_tokens=8)
    assert last.text == "hello EN" and last.finish_reason == "length"
    _, last = ask(engine_that_says(tokenizer, [*b"hello EN", EOS]), stop="END")
    assert last.text == "hello EN" and last.stop_reason is None


def test_the_first_stop_text_to_be_complete_wins(tokenizer):
    for stop in (["world", "lo"], ["lo", "world"]):
        _, last = ask(engine_that_says(tokenizer, b"hello world"), stop=stop)
        assert (last.text, last.stop_reason) == ("hel", "lo")


def test_the_stop_text_is_kept_if_asked(tokenizer):
    _, last = ask(
        engine_that_says(tokenizer, b"hello END more"),
        stop="END",
        include_stop_str_in_output=True,
    )
    assert last.text == "hello END" and last.stop_reason == "END"


def test_the_text_of_a_stop_token_is_kept_if_asked(tokenizer):
    for include, text in ((False, "hi"), (True, "hi!")):
        _, last = ask(
            engine_that_says(tokenizer, b"hi! there"),
            stop_token_ids=[ord("!")],
            include_stop_str_in_output=include,
        )
        assert last.text == text and last.stop_reason == ord("!")
        assert last.token_ids == [*b"hi!"]


def test_a_stop_text_that_the_last_token_completes_is_a_stop(tokenizer):
    _, last = ask(engine_that_says(tokenizer, b"abEND"), stop="END", max_tokens=5)
    assert (last.text, last.finish_reason) == ("ab", "stop")


def test_a_stop_text_does_not_count_before_min_tokens(tokenizer):
    _, last = ask(
        engine_that_says(tokenizer, b"a.b.c.d"), stop=".", min_tokens=4, max_tokens=9
    )
    assert last.text == "a.b.c" and last.stop_reason == "."


def test_a_stop_text_frees_the_blocks_at_once(tokenizer):
    engine = engine_that_says(tokenizer, b"xENDyyyy", b"z" * 20)
    for name in "01":
        engine.add_request(name, [1], SamplingParams(max_tokens=20, stop="END"))
    for _ in range(4):
        outputs = engine.step()
    assert outputs[0].finished and outputs[0].outputs[0].text == "x"
    assert [r.request_id for r in engine.scheduler.running] == ["1"]
    assert run_all(engine)["1"].outputs[0].text == "z" * 20


def test_stop_texts_of_several_answers_are_found_one_by_one(tokenizer):
    class Numbered(FakeRunner):
        def _next_token(self, request):
            script = [b"aaSTOP", b"bSTOP", b"ccccSTOP"][request.index]
            return script[request.num_output_tokens]

    engine = LLMEngine(Numbered(vocab_size=257), tokenizer=tokenizer)
    engine.add_request("a", [1], SamplingParams(n=3, max_tokens=30, stop="STOP"))
    output = run_all(engine)["a"]
    assert [answer.text for answer in output.outputs] == ["aa", "b", "cccc"]
    assert {answer.stop_reason for answer in output.outputs} == {"STOP"}


# --- Bytes and special tokens ---


def test_no_broken_character_is_shown_while_it_may_be_completed(tokenizer):
    texts, _ = ask(engine_that_says(tokenizer, "a🔥é".encode()), max_tokens=7)
    assert texts == ["a", "a", "a", "a", "a🔥", "a🔥", "a🔥é"]


def test_a_prompt_that_ends_inside_a_character_is_completed(tokenizer):
    fire = "🔥".encode()
    _, last = ask(
        engine_that_says(tokenizer, fire[2:] + b"!"), prompt=[*b"x", *fire[:2]],
        max_tokens=3,
    )  # fmt: skip
    assert last.text == "🔥!"


def test_special_tokens_are_shown_only_if_asked(tokenizer):
    for skip, text in ((True, "ab"), (False, "a<eos>b")):
        _, last = ask(
            engine_that_says(tokenizer, [ord("a"), EOS, ord("b")]),
            skip_special_tokens=skip, ignore_eos=True, max_tokens=3,
        )  # fmt: skip
        assert last.text == text


def test_tokens_that_the_tokenizer_does_not_know_have_no_text(tokenizer):
    strange = tokenizer.vocab_size + 7
    runner = FakeRunner(
        vocab_size=strange + 1, script={"0": [*b"xy", strange, *b"z", strange]}
    )
    engine = LLMEngine(runner, tokenizer=tokenizer)
    _, answer = ask(engine, max_tokens=5, logprobs=1)
    assert answer.text == "xyz" and answer.finish_reason == "length"
    assert answer.token_ids == [*b"xy", strange, *b"z", strange]
    assert answer.logprobs[2][strange].decoded_token == ""


# --- What this engine or model cannot do ---


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": "x"}, r"stop is \('x',\), but this engine has no tokenizer"),
        ({"bad_words": ["x"]}, "bad_words is .* but this engine has no tokenizer"),
        ({"guided_regex": "x"}, "guided_regex is 'x', but this engine has no token"),
        ({"logit_bias": {1000: 1}}, "logit_bias holds 1000, but the model knows 0 to"),
        ({"allowed_token_ids": [2, 5000]}, "allowed_token_ids holds 5000"),
        ({"stop_token_ids": [1000]}, "stop_token_ids holds 1000"),
        ({"min_tokens": 17}, "min_tokens is 17, but must be at most max_tokens, .* 16"),
        ({"logprobs": 21}, "logprobs is 21, which is 21 tokens .* max_logprobs is 20:"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1, which is 1,000 tokens"),
    ],
)
def test_the_impossible_is_refused_and_the_neighbour_untouched(params, message):
    engine = LLMEngine(FakeRunner(script={"b": [5] * 16}))
    engine.add_request("b", [1])
    with pytest.raises(RequestError, match=message):
        engine.add_request("a", [1], SamplingParams(**params))
    assert run_all(engine)["b"].outputs[0].token_ids == [5] * 16


@pytest.mark.parametrize(
    ("max_logprobs", "legal", "illegal"), [(20, 20, 21), (0, 0, 1), (30, 30, -1)]
)
def test_the_engine_limits_how_many_logprobs_there_are(max_logprobs, legal, illegal):
    engine = LLMEngine(FakeRunner(vocab_size=40), max_logprobs=max_logprobs)
    engine.add_request("a", [1], SamplingParams(logprobs=legal, prompt_logprobs=legal))
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=f"^{name} is {illegal}, "):
            engine.add_request("b", [1], SamplingParams(**{name: illegal}))
    assert run_all(engine).keys() == {"a"}


def test_without_a_limit_all_tokens_have_logprobs():
    with LLM(backend="fake", max_logprobs=-1) as llm:
        [output] = llm.generate([1, 2], SamplingParams(max_tokens=1, logprobs=-1))
    assert len(output.outputs[0].logprobs[0]) == llm.engine.runner.vocab_size


# --- LLM ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_parrot(tmp_path_factory.mktemp("model"))


def with_config(tmp_path, **values):
    folder = write_parrot(tmp_path)
    path = folder / "generation_config.json"
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | values))
    return folder


backends = pytest.mark.parametrize("backend", ["numpy", "torch"])


def seen_params(llm, params):
    """Return the parameters that a request gets, and how long it may be."""
    request = llm.engine.make_request("x", [1, 2, 3], params)
    return request.sampling_params, request.max_tokens


def test_unset_parameters_come_from_the_model(tmp_path):
    folder = with_config(
        tmp_path, temperature=0.25, top_k=7, repetition_penalty=1.5, max_new_tokens=9
    )
    with LLM(folder, backend="numpy") as llm:
        params, max_tokens = seen_params(llm, None)
        assert (params.temperature, params.top_k, max_tokens) == (0.25, 7, 9)
        params, max_tokens = seen_params(llm, SamplingParams(temperature=0.9))
        assert (params.temperature, params.top_k, params.top_p) == (0.9, 7, 1.0)
        params, max_tokens = seen_params(llm, SamplingParams(top_k=0, max_tokens=4))
        assert (params.temperature, params.top_k, max_tokens) == (0.25, 0, 4)


def test_a_recommended_length_is_shortened_to_what_fits(tmp_path):
    folder = with_config(tmp_path, max_new_tokens=10**6)
    with LLM(folder, backend="numpy", max_model_len=64) as llm:
        assert seen_params(llm, None)[1] == 61
        llm.generate([[1] * 63])


def test_the_models_ends_are_a_union(tmp_path):
    folder = with_config(tmp_path, eos_token_id=[ord("!"), EOS])
    with LLM(folder, backend="numpy") as llm:
        request = llm.engine.make_request("x", [1])
        assert request.stop_token_ids == {ord("!"), EOS}


@backends
def test_a_seeded_request_is_unmoved_by_its_neighbours(folder, backend):
    ours = SamplingParams(
        seed=11, temperature=30.0, top_k=200, top_p=0.99, min_p=1e-6, max_tokens=12,
        frequency_penalty=0.5, repetition_penalty=1.1, n=2,
    )  # fmt: skip
    others = [
        SamplingParams(temperature=40.0, max_tokens=9),
        SamplingParams(temperature=0, max_tokens=15, logprobs=3),
        SamplingParams(seed=3, temperature=20.0, max_tokens=7, top_k=3, n=3),
        SamplingParams(temperature=9.0, logit_bias={5: 3.0}, bad_words=["x"]),
    ]
    prompt, neighbours = [*b"hello"], [[*b"abc"], [*b"hello"], [7], [*b"hello you"]]

    def answers(*places, **options):
        """Run our request among others, at a place of the list."""
        prompts, params = list(neighbours), list(others)
        for place in places:
            prompts.insert(place, prompt)
            params.insert(place, ours)
        with LLM(folder, backend=backend, dtype="float32", **options) as llm:
            outputs = llm.generate(prompts, params)
        return [[a.token_ids for a in outputs[place].outputs] for place in places]

    with LLM(folder, backend=backend, dtype="float32") as llm:
        [output] = llm.generate([prompt], ours)
    alone = [answer.token_ids for answer in output.outputs]
    assert alone[0] != alone[1]
    assert answers(0) == answers(2) == answers(4) == [alone]
    assert answers(1, max_num_seqs=2) == [alone]
    assert answers(3, num_blocks=8, block_size=4, max_model_len=32) == [alone]
    assert answers(1, 3) == [alone, alone]


def test_both_runners_draw_the_same_tokens(folder):
    params = [
        SamplingParams(seed=seed, temperature=25.0, max_tokens=20, top_p=0.97, n=2)
        for seed in range(6)
    ]
    texts = []
    for backend in ("numpy", "torch"):
        with LLM(folder, backend=backend, dtype="float32") as llm:
            outputs = llm.generate([[*b"hello"]] * 6, params)
            texts.append([a.token_ids for o in outputs for a in o.outputs])
    assert texts[0] == texts[1] and len(set(map(tuple, texts[0]))) > 6


def test_pieces_of_several_answers_come_with_their_index(folder):
    params = SamplingParams(n=3, seed=1, temperature=30.0, max_tokens=6, logprobs=0)
    with LLM(folder, backend="numpy") as llm:
        pieces = list(llm.stream([*b"hello"], params))
        [output] = llm.generate([[*b"hello"]], params)
    for answer in output.outputs:
        mine = [piece for piece in pieces if piece.index == answer.index]
        assert "".join(piece.text for piece in mine) == answer.text
        assert [*chain(*(piece.token_ids for piece in mine))] == answer.token_ids
        assert [*chain(*(piece.logprobs for piece in mine))] == answer.logprobs
        assert [piece.finish_reason for piece in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == answer.finish_reason


# --- Logits processors ---


def boost(token_id, amount):
    def process(output_token_ids, logits):
        logits[token_id] += amount

    return process


@backends
def test_a_processor_edits_the_row_in_place_or_returns_another(folder, backend):
    def replaced(output_token_ids, logits):
        return logits * 0 if backend == "numpy" else logits.zero_()

    params = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=0, max_tokens=3, logits_processors=[boost(65, 1e6)]),
        SamplingParams(temperature=0, max_tokens=3, logits_processors=[replaced]),
    ]
    with LLM(folder, backend=backend) as llm:
        [alone] = llm.generate([[*b"x"]], params[0])
        plain, boosted, zeros = llm.generate([[*b"x"]] * 3, params)
    assert plain.outputs[0].token_ids == alone.outputs[0].token_ids
    assert boosted.outputs[0].token_ids == [65] * 3
    assert zeros.outputs[0].token_ids == [0] * 3


@backends
def test_a_processor_sees_the_answer_so_far(folder, backend):
    seen = []

    def watch(output_token_ids, logits):
        seen.append(list(output_token_ids))
        output_token_ids.append(99)  # its own copy

    with LLM(folder, backend=backend) as llm:
        [output] = llm.generate(
            [[*b"hello"]],
            SamplingParams(
                temperature=0, max_tokens=4, ignore_eos=True, logits_processors=[watch]
            ),
        )
    answer = output.outputs[0].token_ids
    assert seen == [answer[:n] for n in range(4)]


def broken(output_token_ids, logits):
    raise KeyError("no such word")


def misshapen(output_token_ids, logits):
    return logits[:3]


def forbids_all(output_token_ids, logits):
    logits[:] = -np.inf


@backends
@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (broken, "the logits processor broken failed: KeyError: 'no such word'"),
        (misshapen, r"returned shape \(3,\), but must return None or"),
        (forbids_all, "leave no token to choose: let logits_processors leave at"),
    ],
)
def test_a_processor_that_fails_ends_its_own_request_only(
    folder, backend, processor, message
):
    good = SamplingParams(temperature=0, max_tokens=4)
    bad = SamplingParams(temperature=0, max_tokens=4, logits_processors=[processor])
    with LLM(folder, backend=backend) as llm:
        [alone] = llm.generate([[*b"hi"]], good)
        outputs = llm.generate([[*b"hi"]] * 3, [good, bad, good])
    assert outputs[1].outputs[0].finish_reason == "error"
    assert re.search(message, outputs[1].outputs[0].error)
    for output in (outputs[0], outputs[2]):
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


@backends
def test_a_processor_with_a_state_gets_a_fresh_one_for_each_answer(folder, backend):
    class Counting:
        """Choose token 65, 66, 67, ... in turn."""

        def __init__(self):
            self.num_calls = 0

        def fresh(self):
            return Counting()

        def __call__(self, output_token_ids, logits):
            logits[65 + self.num_calls] += 1e6
            self.num_calls += 1

    params = SamplingParams(
        n=3, temperature=1.0, max_tokens=3, logits_processors=[Counting()]
    )
    with LLM(folder, backend=backend) as llm:
        for _ in range(2):
            [output] = llm.generate([[*b"hi"]], params)
            assert [answer.text for answer in output.outputs] == ["ABC"] * 3


def test_bad_words_are_banned_in_every_spelling_and_nothing_else(
    tokenizer, tmp_path_factory
):
    engine = engine_that_says(tokenizer, b"")
    request = engine.make_request("x", [1], SamplingParams(bad_words=["\n", "ab"]))
    assert request.bad_words == ((10,), (97, 98), (32, 97, 98))
    pieces = load(
        sentencepiece({"▁": -1.0, "!": -2.0, "▁!": -3.0}),
        tmp_path_factory.mktemp("pieces"),
    )
    engine = engine_that_says(pieces, [])
    request = engine.make_request("x", [1], SamplingParams(bad_words=["!"]))
    texts = {pieces.decode([5, *ids]) for ids in request.bad_words}
    assert {text.lstrip("\x02") for text in texts} >= {"!", " !"}
