"""Log-probabilities and ranks, of answers and of prompts."""

import math

import numpy as np
import pytest
import torch

from minivllm.engine.engine import LLMEngine
from minivllm.models.decoder import Decoder
from minivllm.reference import logprobs as reference
from minivllm.reference.attention import DenseContext
from minivllm.reference.decoder import NumpyDecoder
from minivllm.runners.fake_runner import FakeRunner
from minivllm.runners.numpy_runner import NumpyRunner
from minivllm.runners.torch_runner import TorchRunner
from minivllm.sampling import logprobs as ours
from minivllm.sampling.params import SamplingParams
from tests.engine_tools import run_all
from tests.tiny_decoders import SPEC, numpy_decoder, torch_decoder

# Probabilities .1, .4, .2, .3: exact powers and sums would hide a wrong logarithm.
ROW = np.log(np.array([0.1, 0.4, 0.2, 0.3], dtype=np.float32))


def both(logits, token_ids, num_best):
    """Ask NumPy and torch, which must agree; return ids, logprobs, ranks as lists."""
    logits = np.asarray(logits, dtype=np.float32)
    found = reference.logprobs_of(logits, np.asarray(token_ids), num_best)
    theirs = ours.logprobs_of(
        torch.from_numpy(logits), torch.tensor(token_ids), num_best
    )
    ids, logprobs, ranks = found
    assert theirs[0].tolist() == ids.tolist() and theirs[2].tolist() == ranks.tolist()
    np.testing.assert_allclose(theirs[1], logprobs, atol=1e-6)
    return ids.tolist(), logprobs, ranks.tolist()


def test_the_token_comes_first_and_then_the_best():
    ids, logprobs, ranks = both([ROW], [2], 2)
    assert ids == [[2, 1, 3]] and ranks == [[3, 1, 2]]
    np.testing.assert_allclose(np.exp(logprobs), [[0.2, 0.4, 0.3]], rtol=1e-6)


def test_logits_need_not_add_up():
    np.testing.assert_allclose(
        both([ROW + 50], [0], 0)[1], [[math.log(0.1)]], rtol=1e-5
    )


@pytest.mark.parametrize("num_best", [4, 9])
def test_all_tokens_can_be_asked_for(num_best):
    ids, logprobs, ranks = both([ROW], [1], num_best)
    assert ids == [[1, 1, 3, 2, 0]] and ranks == [[1, 1, 2, 3, 4]]
    assert np.exp(logprobs[0, 1:]).sum() == pytest.approx(1, abs=1e-6)


def test_of_equal_scores_the_lower_id_is_the_better():
    logits = [[1.0, 5.0, 5.0, 2.0, 5.0, -0.0, 0.0]]
    ids, _, ranks = both(logits, [4], 3)
    assert ids == [[4, 1, 2, 4]] and ranks == [[3, 1, 2, 3]]
    ids, _, ranks = both(logits, [6], 7)
    assert ids[0][1:] == [1, 2, 4, 3, 0, 5, 6] and ranks[0][0] == 7


def test_negative_scores_and_impossible_tokens_are_in_order():
    ids, logprobs, ranks = both([[-3.0, -1.0, -np.inf, -2.0]], [2], 4)
    assert ids == [[2, 1, 3, 0, 2]] and ranks[0][0] == 4
    assert logprobs[0, 0] == -np.inf


def test_huge_scores_do_not_overflow():
    logprobs = both([[3e38, -3e38, 0]], [0], 1)[1]
    np.testing.assert_array_equal(logprobs, [[0, 0]])


def test_both_agree_on_many_rows_with_ties():
    random = np.random.default_rng(0)
    logits = np.round(random.normal(size=(50, 300)) * 4) / 4
    ids, _, ranks = both(logits, random.integers(300, size=50), 20)
    for row in range(50):
        order = np.argsort(-logits[row], kind="stable")
        assert ids[row][1:] == order[:20].tolist()
        assert ranks[row][0] == 1 + order.tolist().index(ids[row][0])


# --- Through the engine ---

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1], [8])


def numpy_engine(**options):
    runner = NumpyRunner(numpy_decoder(), num_blocks=32, block_size=4, max_model_len=64)
    return LLMEngine(runner, **options)


def torch_engine(**options):
    runner = TorchRunner(torch_decoder(), num_blocks=32, block_size=4, max_model_len=64)
    return LLMEngine(runner, **options)


engines = pytest.mark.parametrize("make_engine", [numpy_engine, torch_engine])


def all_logprobs(token_ids):
    """Return the logprobs that follow each token, from one dense pass."""
    decoder = numpy_decoder()
    context = DenseContext(decoder.spec)
    hidden = decoder.forward(np.array(token_ids), np.arange(len(token_ids)), context)
    logits = decoder.compute_logits(hidden).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@engines
@pytest.mark.parametrize("budget", [2, 5, 100])
def test_sums_agree_with_a_full_forward_pass(make_engine, budget):
    engine = make_engine(max_num_batched_tokens=budget)
    params = SamplingParams(
        max_tokens=6, seed=3, temperature=1.5, logprobs=2, prompt_logprobs=3
    )
    for name, prompt in enumerate(PROMPTS):
        engine.add_request(str(name), prompt, params)
    outputs = run_all(engine)
    for name, prompt in enumerate(PROMPTS):
        output = outputs[str(name)]
        answer = output.outputs[0]
        expected = all_logprobs([*prompt, *answer.token_ids])
        entries = [*output.prompt_logprobs[1:], *answer.logprobs]
        text = [*prompt, *answer.token_ids]
        assert output.prompt_logprobs[0] is None
        assert len(entries) == len(text) - 1
        for place, entry in enumerate(entries, 1):
            row, token_id = expected[place - 1], text[place]
            assert entry[token_id].logprob == pytest.approx(row[token_id], abs=1e-4)
            assert entry[token_id].rank == 1 + (row > row[token_id]).sum()
            num_best = 3 if place < len(prompt) else 2
            best = np.argsort(-row)[:num_best].tolist()
            assert set(entry) == {token_id, *best} and next(iter(entry)) == token_id
            assert [entry[i].rank for i in best] == list(range(1, 1 + num_best))
        total = sum(
            e[i].logprob for e, i in zip(answer.logprobs, answer.token_ids, strict=True)
        )
        assert answer.cumulative_logprob == pytest.approx(total)


@engines
def test_logprobs_are_those_of_the_model_before_any_parameter(make_engine):
    engine = make_engine(max_logprobs=-1)
    plain = SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
    bent = SamplingParams(
        max_tokens=1, temperature=0.1, seed=1, top_k=2, repetition_penalty=2.0,
        logit_bias={0: 50}, logprobs=-1,
    )  # fmt: skip
    engine.add_request("plain", PROMPTS[0], plain)
    engine.add_request("bent", PROMPTS[0], bent)
    outputs = run_all(engine)
    first, second = (outputs[name].outputs[0].logprobs[0] for name in ("plain", "bent"))
    assert len(first) == len(second) == SPEC.vocab_size
    assert outputs["bent"].outputs[0].token_ids == [0]
    for token_id, entry in first.items():
        assert second[token_id].logprob == pytest.approx(entry.logprob, abs=1e-5)


@engines
def test_only_those_who_ask_get_logprobs_each_as_many_as_asked(make_engine):
    engine = make_engine()
    for wanted in (None, 0, 3, 1):
        params = SamplingParams(max_tokens=2, temperature=0, logprobs=wanted)
        engine.add_request(str(wanted), PROMPTS[1], params)
    outputs = run_all(engine)
    assert outputs["None"].outputs[0].logprobs is None
    assert outputs["None"].outputs[0].cumulative_logprob is None
    assert outputs["None"].prompt_logprobs is None
    for wanted in (0, 3, 1):
        entries = outputs[str(wanted)].outputs[0].logprobs
        assert [len(entry) for entry in entries] == [max(1, wanted)] * 2


@engines
def test_a_cached_prompt_still_gets_its_logprobs(make_engine):
    engine = make_engine()
    engine.add_request("first", PROMPTS[0], SamplingParams(max_tokens=1))
    run_all(engine)
    for name, wanted in (("asks", 1), ("does not", None)):
        params = SamplingParams(max_tokens=1, prompt_logprobs=wanted)
        engine.add_request(name, PROMPTS[0], params)
    outputs = run_all(engine)
    assert outputs["asks"].num_cached_tokens == 0
    assert outputs["does not"].num_cached_tokens == 8
    assert None not in outputs["asks"].prompt_logprobs[1:]


@engines
def test_several_answers_share_the_logprobs_of_the_prompt(make_engine):
    engine = make_engine()
    params = SamplingParams(
        n=3, seed=1, max_tokens=3, temperature=2.0, logprobs=1, prompt_logprobs=1
    )
    engine.add_request("a", PROMPTS[0], params)
    output = run_all(engine)["a"]
    assert len(output.prompt_logprobs) == len(PROMPTS[0])
    for answer in output.outputs:
        assert len(answer.logprobs) == 3
        expected = all_logprobs([*PROMPTS[0], *answer.token_ids])
        for place, entry in enumerate(answer.logprobs):
            row = expected[len(PROMPTS[0]) - 1 + place]
            token_id = answer.token_ids[place]
            assert entry[token_id].logprob == pytest.approx(row[token_id], abs=1e-4)


@engines
def test_a_preempted_request_has_each_entry_once(make_engine):
    engine = make_engine()
    engine.scheduler.block_manager.__init__(6, 4)
    params = SamplingParams(max_tokens=9, temperature=0, logprobs=0, prompt_logprobs=0)
    for name in "ab":
        engine.add_request(name, PROMPTS[0], params)
    outputs = run_all(engine)
    assert outputs["b"].metrics.num_preemptions > 0
    first, second = (outputs[name] for name in "ab")
    assert len(second.outputs[0].logprobs) == 9
    for one, two in zip(
        [*first.prompt_logprobs[1:], *first.outputs[0].logprobs],
        [*second.prompt_logprobs[1:], *second.outputs[0].logprobs],
        strict=True,
    ):
        assert one.keys() == two.keys()
        for token_id in one:
            assert one[token_id].logprob == pytest.approx(
                two[token_id].logprob, abs=1e-4
            )


@engines
def test_a_long_prompt_is_cut_into_slices_of_rows(make_engine, monkeypatch):
    from minivllm.runners import logprob_rows, torch_runner

    params = SamplingParams(max_tokens=1, prompt_logprobs=1)

    def entries():
        engine = make_engine()
        for name, prompt in enumerate(PROMPTS):
            engine.add_request(str(name), prompt, params)
        outputs = run_all(engine)
        return [outputs[str(name)].prompt_logprobs for name in range(len(PROMPTS))]

    whole = entries()
    sizes = []
    compute = {numpy_engine: NumpyDecoder, torch_engine: Decoder}[make_engine]
    from minivllm.models.merged import MergedDecoder

    owner = NumpyDecoder if compute is NumpyDecoder else MergedDecoder
    original = owner.compute_logits

    def counted(self, hidden_states):
        sizes.append(len(hidden_states))
        return original(self, hidden_states)

    monkeypatch.setattr(owner, "compute_logits", counted)
    monkeypatch.setattr(logprob_rows, "MAX_ROWS", 3)
    monkeypatch.setattr(torch_runner, "MAX_ROWS", 3)
    sliced = entries()
    assert max(sizes) <= 3 and sum(sizes) == 8 + 2 + 3
    for one, two in zip(whole, sliced, strict=True):
        for a, b in zip(one[1:], two[1:], strict=True):
            assert a.keys() == b.keys()


def test_a_fake_runner_holds_all_tokens_for_equally_probable():
    engine = LLMEngine(FakeRunner(vocab_size=10, script={"a": [7, 2]}))
    params = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=0)
    engine.add_request("a", [5, 6], params)
    output = run_all(engine)["a"]
    entries = output.outputs[0].logprobs
    assert [list(entry) for entry in entries] == [[7, 0, 1], [2, 0, 1]]
    assert {e.logprob for entry in entries for e in entry.values()} == {-math.log(10)}
    assert [entry.rank for entry in entries[0].values()] == [8, 1, 2]
    assert output.prompt_logprobs[1].keys() == {6}
