"""The torch decoder: what parity in float32 on the CPU does not show."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.errors import ConfigError, WeightMismatch
from minivllm.models.decoder import Decoder
from minivllm.models.layers import RMSNorm, TorchDenseContext, apply_rotary_emb
from tests.test_generation import SPEC


def weights_in(dtype):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in SPEC.weight_shapes().items()
    }


def test_a_new_decoder_holds_no_memory():
    assert {p.device.type for p in Decoder(SPEC).parameters()} == {"meta"}


def test_load_weights_takes_the_tensors_themselves():
    weights = weights_in(torch.float32)
    decoder = Decoder(SPEC)
    decoder.load_weights(weights)
    for name, parameter in decoder.named_parameters():
        assert parameter.data_ptr() == weights[name].data_ptr()
        assert not parameter.requires_grad


def test_the_parameters_are_those_of_the_spec():
    names = {name: tuple(p.shape) for name, p in Decoder(SPEC).named_parameters()}
    assert names == SPEC.weight_shapes()


def test_missing_weights_are_named():
    weights = weights_in(torch.float32)
    del weights["norm.weight"]
    with pytest.raises(WeightMismatch, match=r"missing: norm\.weight"):
        Decoder(SPEC).load_weights(weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms_do_not_write_into_their_input(dtype):
    norm = RMSNorm(4, 1e-5)
    torch.nn.init.ones_(norm.weight)
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0]], dtype=dtype)
    normed = norm.to(dtype)(x)
    assert normed.dtype == dtype
    assert x.tolist() == [[3, 4, 0, 0]]
    assert abs(normed.float().square().mean() - 1) < 0.01


def test_norms_of_large_half_precision_numbers_do_not_overflow():
    norm = RMSNorm(2, 1e-5).to(torch.float16)
    torch.nn.init.ones_(norm.weight)
    normed = norm(torch.tensor([[6e4, 6e4]], dtype=torch.float16))
    assert normed.tolist() == [[1, 1]]


def test_positions_are_rotated_in_float32_whatever_the_dtype():
    decoder = Decoder(SPEC)
    decoder.load_weights(weights_in(torch.bfloat16))
    assert decoder.to(torch.bfloat16).frequencies.dtype == torch.float32
    angles = torch.tensor([8191.0]).view(1, 1, 1) * decoder.frequencies
    x = torch.ones(1, 1, 4, dtype=torch.bfloat16)
    rotated = apply_rotary_emb(x, angles.cos(), angles.sin())
    exact = apply_rotary_emb(x.float(), angles.cos(), angles.sin())
    assert rotated.dtype == torch.bfloat16
    assert rotated.equal(exact.to(torch.bfloat16))  # rounded once, at the end


class Recording(TorchDenseContext):
    """Keeps the queries it is given."""

    def attend(self, layer, q, k, v):
        self.q = q
        return super().attend(layer, q, k, v)


def test_a_bfloat16_decoder_rotates_by_exact_angles():
    # bfloat16 has no number 8191: a position in it would be 8192.
    decoder = Decoder(SPEC)
    decoder.load_weights(weights_in(torch.bfloat16))
    context, position = Recording(SPEC), torch.tensor([8191])
    decoder(torch.tensor([1]), position, context)
    attention = decoder.layers[0].self_attn
    x = decoder.layers[0].input_layernorm(decoder.embed_tokens(torch.tensor([1])))
    q = attention.q_proj(x).view(1, -1, SPEC.head_dim)
    angles = position.view(1, 1, 1) * decoder.frequencies
    assert context.q.equal(apply_rotary_emb(q, angles.cos(), angles.sin()))


def test_norms_round_where_transformers_rounds():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = RMSNorm(64, 1e-5), LlamaRMSNorm(64, 1e-5)
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(2, 64, generator=generator).to(torch.bfloat16)
    for norm in (ours, theirs):
        norm.weight.data = weight
    assert ours(x).equal(theirs(x))


def test_logits_are_computed_in_the_dtype_of_the_weights():
    decoder = Decoder(SPEC)
    decoder.load_weights(weights_in(torch.bfloat16))
    logits = decoder.compute_logits(torch.full((1, 4), 1 / 3, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    assert logits.equal(logits.to(torch.bfloat16).float())


@pytest.mark.parametrize("mixed", [torch.float16, torch.int8])
def test_weights_of_mixed_or_integer_types_are_refused(mixed):
    weights = weights_in(torch.float32)
    weights["norm.weight"] = weights["norm.weight"].to(mixed)
    with pytest.raises(ConfigError, match="one floating-point type"):
        Decoder(SPEC).load_weights(weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_float32_and_near(dtype):
    exact, rounded = Decoder(SPEC), Decoder(SPEC)
    exact.load_weights({k: v.float() for k, v in weights_in(dtype).items()})
    rounded.load_weights(weights_in(dtype))
    logits = rounded.next_token_logits([1, 2, 3])
    assert logits.dtype == np.float32
    reference = exact.next_token_logits([1, 2, 3])
    assert np.abs(logits - reference).max() < 0.05 * np.abs(reference).max()


def test_one_step_on_cuda_mixes_no_devices():
    # Fake tensors have a device but no numbers: this runs without a GPU.
    with FakeTensorMode():
        decoder = Decoder(SPEC)
        decoder.load_weights(
            {
                name: torch.empty(shape, device="cuda", dtype=torch.bfloat16)
                for name, shape in SPEC.weight_shapes().items()
            }
        )
        check_step_on_cuda(decoder)


def test_the_frequencies_follow_the_weights_to_a_device(monkeypatch):
    def move(module, fn, recurse=True):  # what .to("cuda") does, with fake tensors
        weight = torch.empty(SPEC.vocab_size, SPEC.hidden_size, device="cuda")
        module.embed_tokens.weight = torch.nn.Parameter(weight)

    with FakeTensorMode():
        decoder = Decoder(SPEC)
        decoder.frequencies = torch.empty(2)
        monkeypatch.setattr(torch.nn.Module, "_apply", move)
        assert decoder.frequencies.device.type == "cpu"
        assert decoder.to("cuda") is decoder
        assert decoder.frequencies.device.type == "cuda"


def check_step_on_cuda(decoder):
    ids = torch.zeros(3, dtype=torch.int64, device="cuda")
    positions = torch.arange(3, device="cuda")
    hidden_states = decoder(ids, positions, decoder.dense_context())
    logits = decoder.compute_logits(hidden_states)
    assert (logits.device.type, logits.dtype) == ("cuda", torch.float32)
    assert logits.shape == (3, SPEC.vocab_size)
