"""Contexts that keep keys and values, in NumPy and in torch, on tiny random models."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.errors import ShapeError
from minivllm.models.decoder import Decoder
from minivllm.models.layers import TorchCachedContext, TorchStaticBatchContext
from minivllm.reference.attention import CachedContext, StaticBatchContext
from minivllm.runners.kv_cache import kv_bytes_per_token
from tests.fake_cuda import IndexWithoutCuda
from tests.tiny_decoders import SPEC, numpy_decoder, torch_decoder

TEXT = [3, 1, 4, 15, 9, 26, 5, 35, 8, 11]
SHORT = [7, 2, 6]


@pytest.fixture(params=[numpy_decoder, torch_decoder], ids=["numpy", "torch"])
def decoder(request):
    return request.param()


def close(got, expected):
    return np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("cut", range(1, len(TEXT)))
def test_a_text_in_two_pieces_scores_like_the_whole(decoder, cut):
    context = decoder.cached_context(len(TEXT))
    first = decoder.extend(TEXT[:cut], context)
    second = decoder.extend(TEXT[cut:], context)
    assert close(first, decoder.next_token_logits(TEXT[:cut]))
    assert close(second, decoder.next_token_logits(TEXT))


def test_a_text_token_by_token_scores_like_the_whole(decoder):
    context = decoder.cached_context(len(TEXT))
    for i, token_id in enumerate(TEXT, start=1):
        logits = decoder.extend([token_id], context)
        assert context.num_tokens == i
        assert close(logits, decoder.next_token_logits(TEXT[:i]))


def test_both_decoders_keep_the_same_keys_and_values():
    contexts = []
    for decoder in (numpy_decoder(), torch_decoder()):
        context = decoder.cached_context(len(TEXT) + 2)
        for piece in (TEXT[:4], TEXT[4:5], TEXT[5:]):
            decoder.extend(piece, context)
        contexts.append(context)
    for name in ("k_cache", "v_cache"):
        ours, theirs = (np.asarray(getattr(context, name)) for context in contexts)
        assert np.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        assert ours[:, : len(TEXT)].any(axis=(2, 3)).all()
        assert not ours[:, len(TEXT) :].any(), "nothing is written behind the text"


def test_a_text_cut_short_continues_from_there(decoder):
    context = decoder.cached_context(len(TEXT))
    decoder.extend(TEXT, context)
    context.num_tokens = 4
    logits = decoder.extend(SHORT, context)
    assert close(logits, decoder.next_token_logits(TEXT[:4] + SHORT))


def test_a_full_cache_refuses_and_stays_as_it_is(decoder):
    context = decoder.cached_context(5)
    decoder.extend(TEXT[:4], context)
    kept = np.asarray(context.k_cache).copy()
    with pytest.raises(ShapeError, match=r"holds 4 tokens and 2 more would make 6.* 5"):
        decoder.extend(TEXT[4:6], context)
    assert context.num_tokens == 4
    assert np.array_equal(kept, context.k_cache)
    assert close(
        decoder.extend(TEXT[4:5], context), decoder.next_token_logits(TEXT[:5])
    )
    with pytest.raises(ShapeError):
        decoder.extend(TEXT[5:6], context)


def test_a_pass_that_fails_can_be_repeated():
    decoder = numpy_decoder()
    context = decoder.cached_context(len(TEXT))
    decoder.extend(TEXT[:4], context)
    mlp = decoder.mlp

    def failing(layer, x):
        if layer == 1:
            raise MemoryError
        return mlp(layer, x)

    decoder.mlp = failing
    with pytest.raises(MemoryError):
        decoder.extend([49, 48, 47], context)
    decoder.mlp = mlp
    logits = decoder.extend(TEXT[4:], context)
    assert close(logits, decoder.next_token_logits(TEXT))


TEXTS = [TEXT, SHORT, TEXT[2:8], [40]]


def padded(texts):
    width = max(map(len, texts))
    return np.array([[0] * (width - len(text)) + text for text in texts])


@pytest.mark.parametrize("widths", [[10], [3, 7], [1] * 10, [9, 1]])
def test_texts_in_a_static_batch_score_as_alone(decoder, widths):
    context = decoder.static_batch_context([len(text) for text in TEXTS], 12)
    columns, start = padded(TEXTS), 0
    for num_new in widths:
        logits = decoder.extend(columns[:, start : start + num_new], context)
        start += num_new
    for row, text in zip(logits, TEXTS, strict=True):
        assert close(row, decoder.next_token_logits(text))
    logits = decoder.extend([[13], [14], [15], [16]], context)
    for i, (row, text) in enumerate(zip(logits, TEXTS, strict=True)):
        assert close(row, decoder.next_token_logits([*text, 13 + i]))


def test_what_stands_in_the_padding_does_not_matter(decoder):
    results = []
    for padding in (0, 33):
        columns = padded(TEXTS)
        for line, text in zip(columns, TEXTS, strict=True):
            line[: 10 - len(text)] = padding
        context = decoder.static_batch_context([len(text) for text in TEXTS], 11)
        decoder.extend(columns, context)
        results.append(decoder.extend([[5]] * 4, context))
    assert np.array_equal(*results)


def test_positions_of_a_static_batch_start_behind_the_padding(decoder):
    context = decoder.static_batch_context([3, 1], 5)
    assert context.positions(3).tolist() == [0, 1, 2, 0, 0, 0]
    context.advance(3)
    assert context.positions(2).tolist() == [3, 4, 1, 2]


def test_every_row_of_a_torch_batch_sees_something():
    # A softmax over nothing is NaN in some attention kernels.
    context = torch_decoder().static_batch_context([3, 1], 5)
    context.advance(1)
    for window in (None, 3, 1000):
        assert context.mask(0, 3, window).int().tolist() == [
            [[1, 1, 0], [1, 1, 1]],
            [[0, 1, 0], [0, 0, 1]],
        ]
    assert context.mask(0, 3, 2).int().tolist()[0] == [[1, 1, 0], [0, 1, 1]]
    assert context.mask(1, 3, 1).int().tolist() == [[[1, 0], [0, 1]]] * 2


def test_a_full_static_batch_refuses(decoder):
    context = decoder.static_batch_context([2, 1], 2)
    decoder.extend([[1, 2], [0, 3]], context)
    with pytest.raises(ShapeError, match="made for 2"):
        decoder.extend([[1], [2]], context)
    assert context.num_tokens == 2


def test_the_bytes_per_token_are_those_of_the_arrays(decoder):
    context = decoder.cached_context(7)
    num_bytes = context.k_cache.nbytes + context.v_cache.nbytes
    assert num_bytes == 7 * kv_bytes_per_token(SPEC, bytes_per_element=4)
    assert kv_bytes_per_token(SPEC, bytes_per_element=2) == 2 * 3 * 2 * 8 * 2


def test_the_numpy_caches_are_float32():
    for context in (CachedContext(SPEC, 2), StaticBatchContext(SPEC, [1, 2], 3)):
        assert context.k_cache.dtype == context.v_cache.dtype == np.float32


def test_a_bfloat16_decoder_caches_in_bfloat16():
    decoder = torch_decoder().to(torch.bfloat16)
    exact = torch_decoder().next_token_logits(TEXT)
    context = decoder.cached_context(len(TEXT))
    assert context.k_cache.dtype == context.v_cache.dtype == torch.bfloat16
    for piece in (TEXT[:6], TEXT[6:]):
        logits = decoder.extend(piece, context)
    assert logits.dtype == np.float32
    assert np.abs(logits - exact).max() < 0.05 * np.abs(exact).max()


def test_one_step_on_cuda_mixes_no_devices():
    # Fake tensors have a device but no numbers: this runs without a GPU.
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    with FakeTensorMode(), IndexWithoutCuda():
        decoder = Decoder(SPEC)
        decoder.load_weights(
            {
                name: torch.empty(shape, **place)
                for name, shape in SPEC.weight_shapes().items()
            }
        )
        cached = decoder.cached_context(8)
        batch = decoder.static_batch_context([3, 1], 8)
        assert isinstance(cached, TorchCachedContext)
        assert isinstance(batch, TorchStaticBatchContext)
        for context, num_texts in ((cached, 1), (batch, 2)):
            for num_new in (3, 2, 1):
                ids = torch.zeros(num_texts * num_new, dtype=torch.int64, device="cuda")
                hidden_states = decoder(ids, context.positions(num_new), context)
                context.advance(num_new)
                assert hidden_states.device.type == context.k_cache.device.type
                assert hidden_states.dtype == context.k_cache.dtype == torch.bfloat16
                assert hidden_states.device.type == "cuda"
