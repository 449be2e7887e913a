"""The merged decoder computes what the plain one does."""

from dataclasses import replace

import pytest
import torch

from minivllm.models.layers import RMSNorm, TorchDenseContext, apply_rotary_emb
from minivllm.models.merged import MergedDecoder
from minivllm.ops.linear import PackedLinear, TorchLinear, why_not_packed
from minivllm.ops.reference import TorchRMSNorm, rotary_embedding
from tests.parity.tiny import make_llama, spec_of, torch_decoder, weights_of
from tests.tiny_decoders import GEMMA
from tests.tiny_decoders import torch_decoder as tiny_torch_decoder

KNOBS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one query head per key head": {"num_key_value_heads": 6},
}
# Relative, of the logits: float32 rounds at 6e-8, bfloat16 at 4e-3, in every layer.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def decoders(dtype, **knobs):
    model = make_llama(**knobs)
    spec = spec_of(model)
    weights = {name: w.to(dtype) for name, w in weights_of(model).items()}
    return torch_decoder(spec, weights), MergedDecoder(torch_decoder(spec, weights))


def logits_of(decoder, token_ids):
    context = TorchDenseContext(decoder.spec)
    with torch.inference_mode():
        positions = torch.arange(len(token_ids))
        hidden_states = decoder.forward(torch.tensor(token_ids), positions, context)
        return decoder.compute_logits(hidden_states)


@pytest.mark.parametrize("backend", ["packed", "torch"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("knobs", KNOBS)
def test_merged_and_plain_logits_are_equal(knobs, dtype, backend, monkeypatch):
    if backend == "packed" and why_not_packed("cpu", str(dtype).removeprefix("torch.")):
        pytest.skip("this torch cannot pack weights")
    monkeypatch.setenv("MINIVLLM_OP_LINEAR", backend)
    for op in ("rms_norm", "rotary_embedding", "silu_and_mul", "embedding"):
        monkeypatch.setenv(f"MINIVLLM_OP_{op.upper()}", "torch")
    plain, merged = decoders(dtype, **KNOBS[knobs])
    expected_class = {"packed": PackedLinear, "torch": TorchLinear}[backend]
    assert type(merged.lm_head) is expected_class
    token_ids = list(range(5, 25))
    reference, ours = logits_of(plain, token_ids), logits_of(merged, token_ids)
    assert ours.dtype == torch.float32
    error = (ours - reference).abs().max() / reference.abs().max()
    assert error < TOLERANCE[dtype]


def test_a_decoder_that_gave_up_its_weights_cannot_run():
    plain, _ = decoders(torch.float32)
    MergedDecoder(plain)
    with pytest.raises(AttributeError, match="layers"):
        plain.next_token_logits([1])


def test_rotation_is_that_of_the_plain_decoder():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 8, generator=generator)
    angles = torch.randn(3, 1, 4, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    both = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    exact = apply_rotary_emb(x[:, :4], cos, sin)
    assert torch.allclose(rotary_embedding(x, 4, *both), exact, atol=1e-6)
    half = x.bfloat16()
    exact = apply_rotary_emb(half[:, :4], cos, sin)
    assert rotary_embedding(half, 4, *both).equal(exact)


def test_norms_compute_in_float32_and_leave_their_input_alone():
    norm = TorchRMSNorm(torch.ones(2).half(), 1e-5)
    x = torch.tensor([[6e4, 6e4]], dtype=torch.float16)
    assert norm(x).tolist() == [[1, 1]]
    assert x.tolist() == [[6e4, 6e4]]


def test_a_norm_adds_first_and_keeps_the_sum():
    plain = RMSNorm(3, 1e-5)
    torch.nn.init.uniform_(plain.weight)  # unset until weights are loaded
    norm = TorchRMSNorm(plain.weight, 1e-5)
    x, added = torch.tensor([[1.0, 2, 3]]), torch.tensor([[4.0, 0, -1]])
    expected = plain(x + added)
    assert torch.allclose(norm(x, added), expected)
    assert x.tolist() == [[5, 2, 2]]


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_heads_are_normalised_however_few_there_are(num_kv_heads):
    """With the ops that this machine has: compiled ones want rows side by side."""
    spec = replace(GEMMA, num_kv_heads=num_kv_heads)
    plain, merged = tiny_torch_decoder(spec), MergedDecoder(tiny_torch_decoder(spec))
    token_ids = list(range(5, 25))
    reference, ours = logits_of(plain, token_ids), logits_of(merged, token_ids)
    error = (ours - reference).abs().max() / reference.abs().max()
    assert error < TOLERANCE[torch.float32]
