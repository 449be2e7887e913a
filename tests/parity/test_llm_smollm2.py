"""`LLM` on the real model: the same greedy tokens in every way, on NumPy and torch."""

import pytest

from minivllm import LLM, SamplingParams
from tests.engine_tools import assert_all_free

pytestmark = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a king who",
    "def fibonacci(n):\n",
    "The capital of France is a city in which the river",
]
NUM_NEW = 24
# No room for all prompts and answers at the same time.
WAYS = {
    "batched": {},
    "one at a time": {"max_num_seqs": 1},
    "chunked": {"max_num_batched_tokens": 17},
    "preempted": {"num_blocks": 18, "block_size": 4, "enable_prefix_caching": False},
    "preempted, with the prefix cache": {"num_blocks": 18, "block_size": 4},
    "no prefix cache": {"enable_prefix_caching": False},
    **{
        policy: {"policy": policy, "max_num_batched_tokens": 24}
        for policy in ("prefill_first", "decode_first", "priority", "shortest")
    },
}


@pytest.fixture(scope="module")
def expected(smollm2_dir) -> list[list[int]]:
    from minivllm import Tokenizer, generate_naive, load_model

    tokenizer = Tokenizer.from_dir(smollm2_dir)
    model = load_model(smollm2_dir, backend="torch", dtype="float32")
    return [
        generate_naive(model, tokenizer.encode(prompt), NUM_NEW) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("backend", ["torch", "numpy"])
@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_are_the_same(backend, way, smollm2_dir, expected):
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    options = {"num_blocks": 64, "max_model_len": 512, **WAYS[way]}
    with LLM(smollm2_dir, backend=backend, dtype="float32", **options) as llm:
        for _ in ("cold", "warm"):
            outputs = llm.generate(PROMPTS, params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        if way.startswith("preempted"):
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
        if way == "batched":
            pieces = list(llm.stream(PROMPTS[1], params))
            assert [t for piece in pieces for t in piece.token_ids] == expected[1]
            text = "".join(piece.text for piece in pieces)
            assert text == outputs[1].outputs[0].text
        assert_all_free(llm.engine)
    assert len({token for answer in expected for token in answer}) > 20
