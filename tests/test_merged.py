"""The merged decoder computes what the plain one does."""

import pytest
import torch

from minivllm.models.layers import RMSNorm, TorchDenseContext, apply_rotary_emb
from minivllm.models.merged import MergedDecoder, Norm, rotate
from minivllm.ops.linear import PackedLinear, TorchLinear, why_not_packed
from tests.parity.tiny import make_llama, spec_of, torch_decoder, weights_of

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
    assert torch.allclose(rotate(x, *both), apply_rotary_emb(x, cos, sin), atol=1e-6)
    half = x.bfloat16()
    assert rotate(half, *both).equal(apply_rotary_emb(half, cos, sin))


def test_norms_compute_in_float32_and_leave_their_input_alone():
    norm = RMSNorm(2, 1e-5).to(torch.float16)
    norm.weight = torch.nn.Parameter(torch.ones(2).half(), requires_grad=False)
    x = torch.tensor([[6e4, 6e4]], dtype=torch.float16)
    assert Norm(norm)(x).tolist() == [[1, 1]]
    assert x.tolist() == [[6e4, 6e4]]
