"""However a text is computed, it is the same text: on tiny models and on SmolLM2.

The oracle is the naive loop over the NumPy decoder, which keeps nothing between two
tokens. Every test compares all tokens with its own, in float32.
"""

from functools import cache

import numpy as np
import pytest
import torch

from minivllm.engine.engine import LLMEngine
from minivllm.engine.scheduler import POLICIES
from minivllm.generation import generate_naive
from minivllm.loading.loader import load_model
from minivllm.runners.numpy_runner import NumpyRunner
from minivllm.runners.torch_runner import TorchRunner
from minivllm.sampling.params import SamplingParams
from minivllm.text.tokenizer import Tokenizer
from tests.engine_tools import run_all
from tests.parity.tiny import (
    make_llama,
    numpy_decoder,
    spec_of,
    torch_decoder,
    weights_of,
)

NUM_NEW = 24
DECISIVE_GAP = 1e-3  # of two best logits; nearer ones may change places by rounding
LONG = [7, 31, 64, 2, 90, 11, 5, 5, 43, 77, 18, 29, 60]
PROMPTS = {
    "a": LONG,
    "b": [71],
    "c": LONG[:8],
    "d": [*LONG[:6], 36, 66, 92, 63],
    "e": [50, 51, 52, 53, 54],
    "f": [*LONG[:12], 1, 2, 3, 4],
}


@cache
def model(**overrides):
    return make_llama(**overrides)


@cache
def expected():
    """Return the oracle's answers, and the smallest gap between two best logits."""
    decoder = numpy_decoder(spec_of(model()), weights_of(model()))
    answers = {k: generate_naive(decoder, p, NUM_NEW) for k, p in PROMPTS.items()}
    gaps = []
    for name, prompt in PROMPTS.items():
        for length in range(NUM_NEW):
            logits = decoder.next_token_logits([*prompt, *answers[name][:length]])
            second, first = np.partition(logits, -2)[-2:]
            gaps.append(first - second)
    return answers, min(gaps)


def make_runner(
    backend, num_blocks=40, block_size=4, vocab_size=None, weights=None, spec=None
):
    weights = weights or weights_of(model())
    spec = spec or spec_of(model())
    make, runner = {
        "numpy": (numpy_decoder, NumpyRunner),
        "torch": (torch_decoder, TorchRunner),
    }[backend]
    return runner(
        make(spec, weights),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=64,
        vocab_size=vocab_size,
    )


@pytest.fixture(scope="module", params=["numpy", "torch"])
def backend(request):
    return request.param


def greedy(max_tokens=NUM_NEW, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def run(engine, prompts=PROMPTS, params=None):
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, (params or {}).get(name, greedy()))
    return run_all(engine)


def tokens_of(outputs):
    return {
        name: output.outputs[0].token_ids for name, output in sorted(outputs.items())
    }


def record_logits(runner):
    """Return a list that grows by the logits of each step, as NumPy arrays."""
    recorded = []
    compute = runner.decoder.compute_logits

    def compute_and_record(hidden_states):
        logits = compute(hidden_states)
        recorded.append(as_array(logits))
        return logits

    runner.decoder.compute_logits = compute_and_record
    return recorded


def as_array(logits):
    """Copy logits of either kind."""
    if isinstance(logits, torch.Tensor):
        logits = logits.float().numpy()
    return np.array(logits)


def assert_near(logits, reference):
    np.testing.assert_allclose(logits, reference, atol=1e-4 * np.abs(reference).max())


# --- The matrix ---


def test_the_answers_are_worth_comparing():
    answers, smallest_gap = expected()
    for tokens in answers.values():
        assert len(set(tokens)) >= 10
    assert smallest_gap > DECISIVE_GAP, f"smallest top-2 gap: {smallest_gap}"


def test_alone(backend):
    for name, prompt in PROMPTS.items():
        outputs = run(LLMEngine(make_runner(backend)), {name: prompt})
        assert tokens_of(outputs) == {name: expected()[0][name]}


@pytest.mark.parametrize("block_size", [1, 2, 4, 5, 16, 64])
def test_batched(backend, block_size):
    runner = make_runner(backend, 320 // block_size, block_size)
    assert tokens_of(run(LLMEngine(runner))) == expected()[0]


@pytest.mark.parametrize("chunk", range(1, 18))
def test_in_chunks_of_every_size(backend, chunk):
    engine = LLMEngine(make_runner(backend), max_num_batched_tokens=chunk)
    assert tokens_of(run(engine)) == expected()[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [40, 12])
def test_under_every_policy_with_and_without_room(backend, policy, num_blocks):
    engine = LLMEngine(
        make_runner(backend, num_blocks), policy=policy, max_num_batched_tokens=9
    )
    assert tokens_of(run(engine)) == expected()[0]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [3, 100])
def test_preempted_and_undisturbed(backend, caching, chunk):
    engine = LLMEngine(
        make_runner(backend, num_blocks=11),
        enable_prefix_caching=caching,
        max_num_batched_tokens=chunk,
    )
    outputs = run(engine)
    assert sum(output.metrics.num_preemptions for output in outputs.values()) >= 3
    assert tokens_of(outputs) == expected()[0]
    for output in outputs.values():
        assert output.outputs[0].finish_reason == "length"
        assert output.metrics.num_output_tokens == NUM_NEW


def test_with_a_cold_and_with_a_warm_prefix_cache(backend):
    engine = LLMEngine(make_runner(backend))
    cold, warm = run(engine), run(engine)
    assert tokens_of(cold) == tokens_of(warm) == expected()[0]
    cached = {name: output.num_cached_tokens for name, output in warm.items()}
    assert cached == {"a": 12, "b": 0, "c": 4, "d": 8, "e": 4, "f": 12}


def test_streamed(backend):
    engine = LLMEngine(make_runner(backend))
    said = {name: [] for name in PROMPTS}
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, greedy())
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = output.outputs[0].token_ids
            said[output.request_id].append(tokens[len(said[output.request_id]) :])
    assert {name: [t for (t,) in pieces] for name, pieces in said.items()} == (
        expected()[0]
    )


def test_arriving_one_by_one_in_any_order(backend):
    for names in ("abcdef", "fedcba", "cfadbe"):
        engine = LLMEngine(make_runner(backend), max_num_seqs=3)
        outputs = {}
        for name in names:
            engine.add_request(name, PROMPTS[name], greedy())
            for output in engine.step() + engine.step():
                if output.finished:
                    outputs[output.request_id] = output
        outputs |= run_all(engine)
        assert tokens_of(outputs) == expected()[0]


def test_numpy_and_torch_draw_the_same_tokens():
    params = {
        name: SamplingParams(temperature=t, max_tokens=NUM_NEW, seed=n)
        for n, (name, t) in enumerate(
            zip(PROMPTS, [0.3, 0.8, 1.0, 1.5, 3.0, 0.0], strict=True)
        )
    }
    drawn = [
        tokens_of(run(LLMEngine(make_runner(backend)), params=params))
        for backend in ("numpy", "torch")
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0]["f"] == expected()[0]["f"]
    assert len(set(drawn[0]["e"])) >= 10


def test_greedy_and_sampled_rows_do_not_touch_each_other(backend):
    params = {
        name: SamplingParams(temperature=1.0, max_tokens=NUM_NEW, seed=7)
        for name in "ace"
    }
    alone = {}
    for name, prompt in PROMPTS.items():
        one = run(LLMEngine(make_runner(backend)), {name: prompt}, params)
        alone |= tokens_of(one)
    for names in ("abcdef", "fcbead"):
        prompts = {name: PROMPTS[name] for name in names}
        # So few blocks that requests are preempted, and change rows.
        engine = LLMEngine(make_runner(backend, num_blocks=11))
        assert tokens_of(run(engine, prompts, params)) == alone
    assert alone["b"] == expected()[0]["b"] and alone["a"] != expected()[0]["a"]


# --- What engines of this kind get wrong ---


@pytest.mark.parametrize("chunk", range(1, 11))
def test_a_prompt_of_10_in_chunks_has_the_same_logits(backend, chunk):
    prompt = {"a": LONG[:10]}
    whole, chunked = [], []
    for limit, target in ((10, whole), (chunk, chunked)):
        runner = make_runner(backend)
        recorded = record_logits(runner)
        engine = LLMEngine(runner, max_num_batched_tokens=limit)
        run(engine, prompt, {"a": greedy(3)})
        target += [logits for logits in recorded if len(logits)]
    assert len(whole) == len(chunked) == 3
    for ours, reference in zip(chunked, whole, strict=True):
        assert_near(ours, reference)


def test_a_prompt_of_one_block_sent_twice_has_the_same_logits(backend):
    runner = make_runner(backend)
    recorded = record_logits(runner)
    engine = LLMEngine(runner)
    for name in "ab":
        outputs = run(engine, {name: LONG[:4]}, {name: greedy(1)})
    assert outputs["b"].num_cached_tokens == 0
    assert_near(recorded[1], recorded[0])


def test_a_common_beginning_of_one_and_a_half_blocks_shares_one(backend):
    engine = LLMEngine(make_runner(backend))
    first = {"a": [*LONG[:6], 1, 2, 3]}
    second = {"b": [*LONG[:6], 9, 8, 7]}
    run(engine, first)
    warm = run(engine, second)
    assert warm["b"].num_cached_tokens == 4
    cold = run(LLMEngine(make_runner(backend)), second)
    assert tokens_of(warm) == tokens_of(cold)


def test_requests_of_one_step_share_what_it_computes(backend):
    engine = LLMEngine(make_runner(backend))
    prompts = {"a": LONG, "b": [*LONG[:9], 1], "c": LONG}
    outputs = run(engine, prompts)
    cached = [output.num_cached_tokens for output in outputs.values()]
    assert sorted(cached) == [0, 8, 12]
    for name, prompt in prompts.items():
        cold = run(LLMEngine(make_runner(backend)), {name: prompt})
        assert tokens_of(cold) == {name: tokens_of(outputs)[name]}


def test_tokens_that_the_tokenizer_does_not_know_are_never_sampled(backend):
    # The padding rows of the model score highest.
    weights = {name: tensor.clone() for name, tensor in weights_of(model()).items()}
    weights["lm_head.weight"][90:] *= 50
    params = {
        "a": greedy(),
        "b": SamplingParams(temperature=2.0, max_tokens=NUM_NEW, seed=0),
    }
    prompts = {name: [3, 14, 15] for name in "ab"}
    known = run(
        LLMEngine(make_runner(backend, vocab_size=90, weights=weights)), prompts, params
    )
    assert max(max(tokens) for tokens in tokens_of(known).values()) < 90
    full = run(LLMEngine(make_runner(backend, weights=weights)), prompts, params)
    assert max(max(tokens) for tokens in tokens_of(full).values()) >= 90


def test_a_request_with_broken_numbers_ends_and_its_blocks_harm_nobody(backend):
    weights = {name: tensor.clone() for name, tensor in weights_of(model()).items()}
    weights["embed_tokens.weight"][5] = float("nan")
    prompts = {"x": [1, 2, 5, 3, 4, 6], "e": PROMPTS["e"], "y": [5], "b": PROMPTS["b"]}
    engine = LLMEngine(make_runner(backend, num_blocks=16, weights=weights))
    for _ in range(4):  # their blocks come back to other requests
        outputs = run(engine, prompts, {name: greedy(8) for name in prompts})
        for name in "xy":
            assert outputs[name].outputs[0].finish_reason == "error"
            assert "the largest logit is nan" in outputs[name].outputs[0].error
            assert outputs[name].outputs[0].token_ids == []
        for name in "eb":
            assert tokens_of(outputs)[name] == expected()[0][name][:8]


@pytest.mark.parametrize("tie", [True, False])
def test_the_head_may_be_tied(tie):
    tied = make_llama(tie_word_embeddings=tie)
    answers = []
    for backend in ("numpy", "torch"):
        runner = make_runner(backend, weights=weights_of(tied), spec=spec_of(tied))
        answers.append(tokens_of(run(LLMEngine(runner))))
    decoder = numpy_decoder(spec_of(tied), weights_of(tied))
    assert answers[0] == answers[1]
    assert answers[0]["a"] == generate_naive(decoder, LONG, NUM_NEW)


def test_bfloat16_computes_nearly_the_same_logits():
    prompt = {"a": LONG}
    weights = {name: w.bfloat16() for name, w in weights_of(model()).items()}
    logits = []
    for runner in (make_runner("torch"), make_runner("torch", weights=weights)):
        recorded = record_logits(runner)
        run(LLMEngine(runner), prompt, {"a": greedy(1)})
        logits.append(recorded[0])
    error = np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max()
    assert 1e-4 < error < 0.06  # bfloat16 keeps 8 bits


# --- SmolLM2 ---

QUESTIONS = [
    "Why is the sky blue?",
    "What is the capital of France?",
    "Write one sentence about the sea.",
]


@pytest.fixture(scope="module")
def smollm2_prompts(smollm2_dir):
    tokenizer = Tokenizer.from_dir(smollm2_dir)
    return {
        str(n): tokenizer.encode_chat([{"role": "user", "content": question}])
        for n, question in enumerate(QUESTIONS)
    }


@pytest.fixture(scope="module")
def smollm2_runner(smollm2_dir, backend):
    decoder = load_model(smollm2_dir, backend=backend, dtype="float32", device="cpu")
    runner = {"numpy": NumpyRunner, "torch": TorchRunner}[backend]
    return runner(decoder, num_blocks=40, block_size=16, max_model_len=256)


@pytest.fixture(scope="module")
def smollm2_answers(smollm2_dir, smollm2_prompts):
    decoder = load_model(smollm2_dir, backend="torch", dtype="float32", device="cpu")
    return {
        name: generate_naive(decoder, prompt, 16)
        for name, prompt in smollm2_prompts.items()
    }


# Each is 45 tokens or so: the last one has room for one text and a half.
WAYS = {
    "batched": ({}, 40),
    "alone": ({"max_num_seqs": 1}, 40),
    "in chunks of 17": ({"max_num_batched_tokens": 17}, 40),
    "prompts first": ({"policy": "prefill_first"}, 40),
    "preempted": ({}, 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_smollm2_writes_the_same_in_every_way(
    way, smollm2_runner, smollm2_prompts, smollm2_answers
):
    options, smollm2_runner.num_blocks = WAYS[way]
    engine = LLMEngine(smollm2_runner, **options)
    params = {name: greedy(16) for name in smollm2_prompts}
    for _ in range(2):  # the second time with a warm prefix cache
        outputs = run(engine, smollm2_prompts, params)
        assert tokens_of(outputs) == smollm2_answers
        if way == "preempted":
            assert any(o.metrics.num_preemptions for o in outputs.values())
    assert any(output.num_cached_tokens for output in outputs.values())
    for tokens in smollm2_answers.values():
        assert len(set(tokens)) >= 10
