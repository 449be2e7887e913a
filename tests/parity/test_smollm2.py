"""Both decoders against `transformers` on the real SmolLM2-135M-Instruct."""

import numpy as np
import pytest
import torch

from minivllm.generation import generate_naive
from minivllm.loading.loader import load_model
from minivllm.text.tokenizer import Tokenizer
from tests.parity.tiny import relative_error

TOLERANCE = 1e-4  # of the largest logit, float32; seen here: below 2e-5
PROMPTS = [
    "Why is the sky blue?",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three primary colours.",
    "Explain what a prime number is.",
    "Write a Python function that adds two numbers.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Tell me a short story about a dog.",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    return Tokenizer.from_dir(smollm2_dir)


@pytest.fixture(scope="module")
def reference(smollm2_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)


@pytest.fixture(scope="module", params=["numpy", "torch"])
def decoder(request, smollm2_dir):
    return load_model(smollm2_dir, backend=request.param, dtype="float32", device="cpu")


def all_logits(decoder, token_ids):
    positions = np.arange(len(token_ids))
    ids = np.asarray(token_ids)
    if isinstance(decoder, torch.nn.Module):
        ids, positions = torch.from_numpy(ids), torch.from_numpy(positions)
    with torch.inference_mode():
        hidden_states = decoder.forward(ids, positions, decoder.dense_context())
        return np.asarray(decoder.compute_logits(hidden_states))


@pytest.fixture(scope="module")
def continuations(reference, tokenizer):
    """64 greedy tokens of `transformers` for each prompt, the end mark ignored."""
    texts = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        out = reference.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
            max_new_tokens=64,
            min_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )
        texts.append((prompt_ids, out[0, len(prompt_ids) :].tolist()))
    return texts


def test_logits_over_200_tokens_equal_those_of_transformers(
    decoder, reference, tokenizer
):
    text = " ".join(PROMPTS) + " def f(x):\n    return [x ** 2 for _ in range(10)]\n"
    token_ids = tokenizer.encode(text * 3)[:200]
    assert len(token_ids) == 200
    with torch.inference_mode():
        theirs = reference(torch.tensor([token_ids])).logits[0].numpy()
    assert relative_error(all_logits(decoder, token_ids), theirs) < TOLERANCE


def test_64_greedy_tokens_equal_those_of_transformers(decoder, continuations):
    # If the best token after every prefix of a text is the text's next token, then
    # greedy generation writes this text: one pass instead of 64.
    gaps = []
    for prompt_ids, expected in continuations:
        logits = all_logits(decoder, prompt_ids + expected)[len(prompt_ids) - 1 : -1]
        assert logits.argmax(axis=-1).tolist() == expected
        two_best = np.partition(logits, -2, axis=-1)[:, -2:]
        gaps.append((two_best[:, 1] - two_best[:, 0]).min())
        assert len(set(expected)) >= 10
    assert min(gaps) > 1e-4, f"too close to call: {min(gaps)}"


def test_the_naive_loop_writes_that_text(decoder, continuations):
    prompt_ids, expected = continuations[1]
    assert generate_naive(decoder, prompt_ids, 12) == expected[:12]


@pytest.mark.slow
def test_the_naive_loop_writes_all_ten_texts_to_their_end(decoder, continuations):
    for prompt_ids, expected in continuations:
        assert generate_naive(decoder, prompt_ids, 64) == expected


def test_bfloat16_stays_near_float32(smollm2_dir, tokenizer):
    token_ids = tokenizer.encode(" ".join(PROMPTS))
    exact = all_logits(
        load_model(smollm2_dir, backend="torch", dtype="float32", device="cpu"),
        token_ids,
    )
    rounded = all_logits(
        load_model(smollm2_dir, backend="torch", dtype="bfloat16", device="cpu"),
        token_ids,
    )
    # bfloat16 keeps 8 bits, and 30 layers add up their errors; seen here: 0.03.
    assert 1e-4 < relative_error(rounded, exact) < 0.06
