"""Both decoders against `transformers` on tiny random Llama models."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from minivllm.generation import generate_naive
from minivllm.models.layers import TorchDenseContext
from minivllm.models.rotary import inverse_frequencies
from minivllm.models.spec import Llama3Scaling, RopeFactors, RopeSpec
from minivllm.reference.attention import DenseContext
from tests.parity.tiny import (
    LLAMA3_ROPE,
    make_llama,
    numpy_decoder,
    relative_error,
    spec_of,
    torch_decoder,
    weights_of,
)

TOLERANCE = 1e-5  # of the largest logit, float32; seen here: below 2e-6
VARIANTS = {
    "untied, grouped 3:1": {},
    "tied": {"tie_word_embeddings": True},
    "one key head per query head": {"num_key_value_heads": 6},
    "grouped 8:1": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 6,
    },
    "attention biases": {"attention_bias": True},
    "mlp biases": {"mlp_bias": True},
    "head_dim is not hidden / heads": {"head_dim": 32},
    "another rope base": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}
    },
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "large epsilon": {"rms_norm_eps": 0.005},
}
TOKEN_IDS = np.random.default_rng(1).integers(0, 97, 40)


def logits_numpy(spec, weights, token_ids=TOKEN_IDS):
    decoder = numpy_decoder(spec, weights)
    positions = np.arange(len(token_ids))
    return decoder.compute_logits(
        decoder.forward(token_ids, positions, DenseContext(spec))
    )


@torch.inference_mode()
def logits_torch(spec, weights, token_ids=TOKEN_IDS):
    decoder = torch_decoder(spec, weights)
    positions = torch.arange(len(token_ids))
    hidden_states = decoder(torch.tensor(token_ids), positions, TorchDenseContext(spec))
    return decoder.compute_logits(hidden_states).numpy()


@pytest.fixture(params=VARIANTS, scope="module")
def llama(request):
    return make_llama(**VARIANTS[request.param])


@pytest.mark.parametrize("logits_of", [logits_numpy, logits_torch])
def test_logits_equal_those_of_transformers(llama, logits_of):
    with torch.inference_mode():
        reference = llama(torch.tensor(TOKEN_IDS)[None]).logits[0].numpy()
    ours = logits_of(spec_of(llama), weights_of(llama))
    assert ours.dtype == np.float32
    assert relative_error(ours, reference) < TOLERANCE


def test_greedy_continuations_equal_those_of_transformers(llama):
    prompt = TOKEN_IDS[:7].tolist()
    text = torch.tensor([prompt])
    gaps = []
    with torch.inference_mode():
        for _ in range(64):
            logits = llama(text).logits[0, -1]
            best = logits.topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            text = torch.cat([text, best.indices[None, :1]], dim=1)
    expected = text[0, len(prompt) :].tolist()
    assert len(set(expected)) >= 10, "a text that repeats itself proves little"
    assert min(gaps) > 1e-4, f"too close to call: {min(gaps)}"
    spec, weights = spec_of(llama), weights_of(llama)
    assert generate_naive(numpy_decoder(spec, weights), prompt, 64) == expected
    assert generate_naive(torch_decoder(spec, weights), prompt, 64) == expected


def flipped(spec, weights):
    """Yield a name and what the decoder would compute with one knob turned."""
    yield "rope base", replace(spec, rope=RopeSpec(theta=9_000.0)), weights
    factors = RopeFactors(factors=(1.0, 1.0, 1.5) + (1.0,) * (spec.head_dim // 2 - 3))
    yield (
        "one rope factor",
        replace(spec, rope=RopeSpec(theta=10_000.0, scaling=factors)),
        weights,
    )
    scaling = Llama3Scaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    yield (
        "llama3 scaling",
        replace(spec, rope=RopeSpec(theta=10_000.0, scaling=scaling)),
        weights,
    )
    yield "norm epsilon", replace(spec, rms_norm_eps=0.001), weights
    yield (
        "another grouping of the same sizes",
        replace(spec, num_heads=3, num_kv_heads=1, head_dim=32),
        weights,
    )
    for flag, fields in {
        "qkv_bias": ("q_proj", "k_proj", "v_proj"),
        "o_bias": ("o_proj",),
        "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
    }.items():
        kept = {
            name: weight
            for name, weight in weights.items()
            if not (name.endswith(".bias") and name.split(".")[-2] in fields)
        }
        yield flag, replace(spec, **{flag: False}), kept
    tied = {k: v for k, v in weights.items() if k != "lm_head.weight"}
    yield "tied embeddings", replace(spec, tie_word_embeddings=True), tied
    for name in weights:
        if name.startswith("layers.1.") or "norm" in name:
            yield name, spec, weights | {name: torch.ones_like(weights[name])}


@pytest.mark.parametrize("logits_of", [logits_numpy, logits_torch])
def test_every_knob_and_every_weight_moves_the_logits(logits_of):
    llama = make_llama(attention_bias=True, mlp_bias=True)
    spec, weights = spec_of(llama), weights_of(llama)
    straight = logits_of(spec, weights)
    effects = {
        name: relative_error(logits_of(*changed), straight)
        for name, *changed in flipped(spec, weights)
    }
    # A bias of the keys adds the same to every score of a query, and rope makes it
    # depend on the position again: it must be seen like all others.
    blind = {name: e for name, e in effects.items() if e < 100 * TOLERANCE}
    assert not blind


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("theta", [10_000.0, 100_000.0, 500_000.0])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_rope_angles_equal_those_of_transformers(head_dim, theta, is_scaled):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default"}
    if is_scaled:
        rope = LLAMA3_ROPE | {"original_max_position_embeddings": 8192}
    llama = make_llama(
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters=rope | {"rope_theta": theta},
    )
    positions = torch.tensor([0, 1, 1000, 8192, 100_000])
    x = torch.zeros(1)
    reference = LlamaRotaryEmbedding(llama.config)
    cos, sin = (table[0] for table in reference(x, positions[None]))

    ours = inverse_frequencies(head_dim, spec_of(llama).rope)
    # The last bit of a frequency may differ; at position p that is p ulps of an angle.
    ulps = np.abs(ours.view(np.int32) - reference.inv_freq.numpy().view(np.int32))
    assert ulps.max() <= 1
    angles = positions.numpy().astype(np.float32)[:, None] * ours
    half = head_dim // 2
    is_equal = ulps == 0
    assert is_equal.mean() > 0.95
    for table, function in ((cos, np.cos), (sin, np.sin)):
        difference = np.abs(function(angles) - table[:, :half].numpy())
        assert difference[:, is_equal].max() < 1e-6
