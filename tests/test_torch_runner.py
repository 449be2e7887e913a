"""The torch runner under the real scheduler: the tokens of naive generation."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.scheduler import Scheduler
from minivllm.generation import generate_naive
from minivllm.models.decoder import Decoder
from minivllm.ops.paged_attention import PaddedAttention
from minivllm.request import Request, SchedulerOutput
from minivllm.runners import attention_groups
from minivllm.runners.torch_runner import RunnerOps, TorchRunner
from minivllm.sampling.params import SamplingParams
from tests.parity.tiny import make_llama, spec_of, torch_decoder, weights_of

BLOCK_SIZE = 4
MODEL = make_llama()
SPEC, WEIGHTS = spec_of(MODEL), weights_of(MODEL)
ORACLE = torch_decoder(SPEC, WEIGHTS)


def prompt(length, seed=0):
    return random.Random(seed).choices(range(SPEC.vocab_size), k=length)


PROMPTS = [prompt(3, 1), prompt(9, 2), prompt(21, 3)]
NUM_NEW = 12
EXPECTED = [generate_naive(ORACLE, tokens, NUM_NEW) for tokens in PROMPTS]


def make_runner(num_blocks=64, weights=WEIGHTS, **options):
    return TorchRunner(
        torch_decoder(SPEC, weights),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=256,
        **options,
    )


def make_request(request_id, token_ids, max_tokens=NUM_NEW, temperature=0.0, seed=0):
    return Request(
        request_id=str(request_id),
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(temperature=temperature).filled({}),
        max_tokens=max_tokens,
        seed=seed,
        arrival=int(request_id),
    )


def make_scheduler(runner, budget=2048):
    blocks = BlockManager(runner.num_blocks, BLOCK_SIZE)
    return Scheduler(blocks, max_num_seqs=16, max_num_batched_tokens=budget)


def run(runner, requests, scheduler=None):
    """Finish all requests; return the steps."""
    scheduler = scheduler or make_scheduler(runner)
    steps = []
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        steps.append(scheduler.schedule())
        scheduler.update(steps[-1], runner.execute(steps[-1]))
    return steps


def answers(requests):
    return [request.output_token_ids for request in requests]


def test_the_expected_answers_are_a_fair_test():
    assert len({token for answer in EXPECTED for token in answer}) >= 10
    gaps = []
    for tokens, answer in zip(PROMPTS, EXPECTED, strict=True):
        for i in range(NUM_NEW):
            logits = ORACLE.next_token_logits(tokens + answer[:i])
            second, first = sorted(logits.tolist())[-2:]
            gaps.append(first - second)
    assert min(gaps) > 1e-3


def test_one_request_gets_the_tokens_of_naive_generation():
    requests = [make_request(0, PROMPTS[2])]
    run(make_runner(), requests)
    assert answers(requests) == [EXPECTED[2]]


@pytest.mark.parametrize("budget", [*range(1, 9), 24, 2048])
def test_a_batch_in_chunks_of_any_size_gets_the_same_tokens(budget):
    runner = make_runner()
    requests = [make_request(i, tokens) for i, tokens in enumerate(PROMPTS)]
    run(runner, requests, make_scheduler(runner, budget))
    assert answers(requests) == EXPECTED


def test_pieces_of_queries_and_many_groups_change_nothing(monkeypatch):
    monkeypatch.setattr(attention_groups, "MAX_QUERIES", 3)
    monkeypatch.setattr(attention_groups, "MAX_PADDED_KEYS", 0)
    runner = make_runner()
    requests = [make_request(i, tokens) for i, tokens in enumerate(PROMPTS)]
    run(runner, requests, make_scheduler(runner, 11))
    assert answers(requests) == EXPECTED


def test_a_prefix_that_the_same_step_fills_is_shared():
    prefix = prompt(17, 4)
    prompts = [prefix + prompt(n, 5 + n) for n in (1, 6, 3)]
    requests = [make_request(i, tokens) for i, tokens in enumerate(prompts)]
    steps = run(make_runner(), requests)
    assert steps[0].num_prefix_hits == {"0": 0, "1": 16, "2": 16}
    assert answers(requests) == [generate_naive(ORACLE, p, NUM_NEW) for p in prompts]


def test_a_preempted_request_gets_the_same_tokens():
    requests = [make_request(i, tokens) for i, tokens in enumerate(PROMPTS)]
    run(make_runner(num_blocks=11), requests)
    assert sum(request.num_preemptions for request in requests) > 0
    assert answers(requests) == EXPECTED


def test_the_score_of_a_token_is_reported():
    runner, request = make_runner(), make_request(0, PROMPTS[0])
    scheduler = make_scheduler(runner)
    scheduler.add_request(request)
    output = runner.execute(scheduler.schedule())
    logits = ORACLE.next_token_logits(PROMPTS[0])
    assert output.sampled_token_ids == {"0": [int(logits.argmax())]}
    assert output.token_logits["0"] == pytest.approx([logits.max()], rel=1e-4)
    assert output.errors == {}


def test_a_request_that_is_still_catching_up_gets_no_token():
    runner, request = make_runner(), make_request(0, PROMPTS[2])
    scheduler = make_scheduler(runner, budget=7)
    scheduler.add_request(request)
    output = runner.execute(scheduler.schedule())
    assert (output.sampled_token_ids, output.token_logits) == ({}, {})


def test_tokens_that_the_tokenizer_does_not_know_are_never_sampled():
    first = EXPECTED[2][0]
    assert first > 0
    for temperature in (0.0, 50.0):
        requests = [make_request(0, PROMPTS[2], temperature=temperature)]
        run(make_runner(vocab_size=first), requests)
        assert max(requests[0].output_token_ids) < first


def test_random_choices_do_not_depend_on_the_batch():
    def draw(seeds, budget):
        runner = make_runner(num_blocks=14)
        requests = [
            make_request(i, PROMPTS[i], temperature=1.5, seed=seed)
            for i, seed in enumerate(seeds)
        ]
        run(runner, requests, make_scheduler(runner, budget))
        return answers(requests)

    together = draw([5, 6, 7], 2048)
    assert together[0] == draw([5], 2048)[0]
    assert together == draw([5, 6, 7], 4)
    assert together[0] != draw([8], 2048)[0]


POISON = next(
    token_id
    for token_id in range(3, SPEC.vocab_size)
    if not any(token_id in text for text in PROMPTS + EXPECTED)
)


@pytest.fixture
def poisoned():
    """A runner with a token that makes every score of its reader NaN."""
    weights = {name: weight.clone() for name, weight in WEIGHTS.items()}
    weights["embed_tokens.weight"][POISON] = math.nan
    weights["lm_head.weight"] = WEIGHTS["lm_head.weight"]
    return make_runner(num_blocks=16, weights=weights)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_scores_end_one_request_only(poisoned, temperature):
    bad = make_request(1, [1, POISON, 2], temperature=temperature)
    requests = [make_request(0, PROMPTS[0]), bad]
    requests.append(make_request(2, PROMPTS[2]))
    run(poisoned, requests)
    assert answers(requests) == [EXPECTED[0], [], EXPECTED[2]]
    assert requests[1].error.startswith("the largest logit is nan, but must be finite")


def test_blocks_of_a_request_with_unusable_scores_can_be_used_again(poisoned):
    scheduler = make_scheduler(poisoned)
    for i in range(5):  # every block of the pool
        run(poisoned, [make_request(i, [i, *[POISON] * 50])], scheduler)
    assert poisoned.kv_cache.isnan().any(dim=-1).sum() > 500
    requests = [make_request(5 + i, tokens) for i, tokens in enumerate(PROMPTS[:2])]
    run(poisoned, requests, scheduler)
    assert answers(requests) == EXPECTED[:2]


def test_a_plain_and_a_merged_decoder_may_be_given():
    from minivllm.models.merged import MergedDecoder

    merged = MergedDecoder(torch_decoder(SPEC, WEIGHTS))
    runner = TorchRunner(merged, num_blocks=16, block_size=BLOCK_SIZE, max_model_len=64)
    assert runner.decoder is merged


def test_bfloat16_scores_are_near_those_of_float32():
    weights = {name: weight.bfloat16() for name, weight in WEIGHTS.items()}
    runner, scores = make_runner(weights=weights), []
    requests = [make_request(i, tokens, 1) for i, tokens in enumerate(PROMPTS)]
    scheduler = make_scheduler(runner, budget=14)
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        output = runner.execute(step)
        scores += [(k, v[0]) for k, v in output.token_logits.items()]
        scheduler.update(step, output)
    exact = torch_decoder(SPEC, {k: v.float() for k, v in weights.items()})
    assert len(scores) == 3
    for request_id, score in scores:
        request = requests[int(request_id)]
        logits = exact.next_token_logits(request.prompt_token_ids)
        expected = logits[request.output_token_ids[0]]
        assert abs(score - expected) < 0.05 * abs(logits).max()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_one_step_on_cuda_mixes_no_devices(temperature):
    # Fake tensors have a device but no numbers: this runs without a GPU.
    decode, chunk, fresh = (
        make_request(i, prompt(n), temperature=temperature)
        for i, n in enumerate((9, 30, 5))
    )
    decode.num_computed_tokens, chunk.num_computed_tokens = 8, 10
    decode.sampling_params = SamplingParams(
        temperature=temperature, top_k=5, top_p=0.9, min_p=0.01, logprobs=3,
        frequency_penalty=0.5, logit_bias={3: 1.0}, allowed_token_ids=range(9),
    ).filled({})  # fmt: skip
    chunk.prompt_logprobs = [None] * 30
    chunk.sampling_params = replace(chunk.sampling_params, prompt_logprobs=1)
    follower = replace(fresh, request_id="2#1", index=1, leader=fresh)
    follower.sampling_params = replace(decode.sampling_params, logprobs=0)
    step = SchedulerOutput(
        requests=[decode, chunk, fresh],
        num_scheduled_tokens={"0": 1, "1": 20, "2": 5},
        block_ids={"0": [0, 1, 2], "1": list(range(3, 11)), "2": [11, 12]},
        followers={"2": [follower]},
        block_copies=[(13, 2)],
    )
    with FakeTensorMode():
        decoder = Decoder(SPEC)
        shapes = SPEC.weight_shapes()
        options = {"device": "cuda", "dtype": torch.bfloat16}
        decoder.load_weights({n: torch.empty(s, **options) for n, s in shapes.items()})
        runner = TorchRunner(
            decoder, num_blocks=16, block_size=BLOCK_SIZE, max_model_len=64
        )
        assert {c.backend.name for c in runner.choices.values()} == {"torch"}
        launched = runner.launch(step)
    assert launched.requests == [decode, chunk, fresh, follower]
    results = [launched.results, *launched.answer_logprobs, *launched.prompts[0][1]]
    assert {result.device.type for result in results} == {"cuda"}
    assert [tuple(result.shape) for result in results[:2]] == [(4, 4), (2, 4)]
    assert tuple(launched.prompts[0][1][0].shape) == (19, 2)


@pytest.mark.parametrize(
    ("one", "many", "expected"),
    [("torch", "torch", 0), ("other", "torch", 1), ("torch", "other", 8)],
)
def test_a_prompt_takes_what_was_chosen_for_prompts(one, many, expected, monkeypatch):
    """Fresh ones, too: only torch's attention hands them to another function."""
    ops = object.__new__(RunnerOps)
    kinds = {"torch": PaddedAttention, "other": object}
    ops.attention_of_one, ops.attention_of_many = kinds[one], kinds[many]
    assert min(ops.max_ragged, 8) == expected
