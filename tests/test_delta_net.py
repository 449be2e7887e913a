"""The ops of a delta net against NumPy in float64, and what keeps its states."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.errors import ShapeError
from minivllm.generation import generate_cached, generate_naive, generate_static_batch
from minivllm.models.decoder import Decoder
from minivllm.models.gated_delta_net import RecurrentPass, RecurrentStates, TextRows
from minivllm.models.merged import MergedDecoder
from minivllm.ops import delta_net
from minivllm.ops.delta_net import (
    causal_conv1d,
    chunked_delta_rule,
    prepare,
    recurrent_delta_rule,
    run_chunks,
)
from minivllm.reference import gated_delta_net as reference
from tests.fake_cuda import IndexWithoutCuda
from tests.tiny_decoders import HYBRID, numpy_decoder, torch_decoder

NUM_KEY_HEADS, NUM_VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 10
NUM_SLOTS = 9
RAGGED = [1, 2, 63, 64, 65, 5, 130, 1]
SLOTS = [8, 0, 5, 2, 7, 1, 3, 6]  # nobody has 4
TOLERANCE = 1e-5  # of the largest number, float32
HALF_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def near(got, expected, tolerance=TOLERANCE):
    got, expected = (np.asarray(x, dtype=np.float64) for x in (got, expected))
    assert got.shape == expected.shape
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


def random_rows(num_tokens, seed=0, dtype=torch.float32):
    """q, k, v, log_decay, beta of a flat batch, of many sizes."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(num_tokens, *shape, generator=random)

    q, k = (draw(NUM_KEY_HEADS, KEY_DIM) * draw(1, 1).exp() for _ in range(2))
    v = draw(NUM_VALUE_HEADS, VALUE_DIM)
    log_decay, beta = -draw(NUM_VALUE_HEADS).exp(), draw(NUM_VALUE_HEADS).sigmoid()
    return [x.to(dtype) for x in (q, k, v)] + [log_decay, beta]


def random_states(seed=1):
    shape = (NUM_SLOTS, NUM_VALUE_HEADS, KEY_DIM, VALUE_DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def starts_of(lengths):
    return torch.tensor([0, *np.cumsum(lengths)])


def by_numpy(rows, states, slots, lengths):
    """What is read, and all states after it, in float64 and token by token."""
    q, k, v, log_decay, beta = (x.double().numpy() for x in rows)
    q, k = reference.prepare(q, k, v.shape[1])
    states, read = states.double().numpy().copy(), np.empty_like(v)
    for slot, (start, end) in zip(slots, pairwise(starts_of(lengths)), strict=True):
        own = (x[start:end] for x in (q, k, v, log_decay, beta))
        read[start:end], states[slot] = reference.recurrent_delta_rule(
            *own, states[slot]
        )
    return read, states


def chunked(rows, states, slots, lengths):
    texts = (torch.tensor(slots), starts_of(lengths), lengths)
    return chunked_delta_rule(*rows, states, *texts)


def token_by_token(rows, states, slots, lengths):
    """The same with the recurrent rule: a token of each text that has one left."""
    read, starts = torch.empty_like(rows[2]), starts_of(lengths)[:-1]
    for step in range(max(lengths)):
        left = torch.tensor([step < length for length in lengths])
        at = starts[left] + step
        own, of = (x[at] for x in rows), torch.tensor(slots)[left]
        read[at] = recurrent_delta_rule(*own, states, of)
    return read


def test_by_hand_a_key_that_is_written_twice_gives_the_last_value():
    # Of length 5, so the direction is (0.6, 0.8). The second value replaces the first.
    k = torch.tensor([[[3.0, 4.0]]])
    states, slots = torch.zeros(1, 1, 2, 1), torch.tensor([0])
    nothing, all_of_it = torch.zeros(1, 1), torch.ones(1, 1)
    for value in (10.0, -2.0):
        v = torch.full((1, 1, 1), value)
        read = recurrent_delta_rule(k, k, v, nothing, all_of_it, states, slots)
        torch.testing.assert_close(read, v / 2**0.5)  # queries are 1 / sqrt(2) long
    torch.testing.assert_close(states.flatten(), torch.tensor([-1.2, -1.6]))


@pytest.mark.parametrize("rule", [chunked, token_by_token])
def test_both_rules_agree_with_numpy_on_ragged_texts(rule):
    rows, states = random_rows(sum(RAGGED)), random_states()
    read, after = by_numpy(rows, states, SLOTS, RAGGED)
    before = [x.clone() for x in (*rows, states)]
    near(rule(rows, states, SLOTS, RAGGED), read)
    near(states, after)
    for x, was in zip(rows, before, strict=False):
        assert torch.equal(x, was), "an input is changed"
    assert torch.equal(states[4], before[-1][4]), "nobody's slot is changed"


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 16, 64, 100, 1000])
def test_any_size_of_a_chunk_gives_the_same(chunk_size):
    rows, states = random_rows(130), random_states()
    read, after = by_numpy(rows, states, [3], [130])
    q, k = prepare(rows[0], rows[1], NUM_VALUE_HEADS)
    heads_first = (x.transpose(0, 1) for x in (q, k, *rows[2:]))
    got, state = run_chunks(*heads_first, states[3], chunk_size)
    near(got.transpose(0, 1), read)
    near(state, after[3])


@pytest.mark.parametrize("log_decay", [0.0, -60.0, -1e4, None])
@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("rule", [chunked, token_by_token])
def test_extreme_gates_stay_finite_and_right(rule, log_decay, beta):
    rows, states = random_rows(70), random_states()
    rows[4] = torch.full_like(rows[4], beta)
    if log_decay is None:  # from none to all, from token to token
        rows[3] = rows[3] * torch.tensor([0.0, 60.0, 1.0, 0.0, 1e-3])[:, None].repeat(
            14, 1
        )
    else:
        rows[3] = torch.full_like(rows[3], log_decay)
    read, after = by_numpy(rows, states, [2], [70])
    near(rule(rows, states, [2], [70]), read)
    near(states, after)


def test_without_decay_and_writing_the_state_is_only_read():
    rows, states = random_rows(70), random_states()
    rows[3], rows[4] = torch.zeros_like(rows[3]), torch.zeros_like(rows[4])
    before = states.clone()
    chunked(rows, states, [0], [70])
    assert torch.equal(states, before)


@pytest.mark.parametrize("rule", [chunked, token_by_token])
@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
def test_half_types_are_computed_in_float32(rule, dtype):
    rows, states = random_rows(70, dtype=dtype), random_states()
    read, after = by_numpy(rows, states, [1, 0], [20, 50])
    got = rule(rows, states, [1, 0], [20, 50])
    assert got.dtype == dtype
    near(got.float(), read, HALF_TOLERANCE[dtype])
    near(states, after)  # the states are as exact as ever


@pytest.mark.parametrize("kernel_size", [2, 3, 4, 5])
def test_the_convolution_agrees_with_numpy_on_ragged_texts(kernel_size):
    random = torch.Generator().manual_seed(0)
    lengths = [1, 2, 3, 4, 9, 1]
    slots = [5, 0, 3, 6, 2, 1]
    x = torch.randn(sum(lengths), 12, generator=random)
    weight = torch.randn(12, kernel_size, generator=random)
    states = torch.randn(7, 12, kernel_size - 1, generator=random)
    before, given = states.clone(), x.clone()
    y = causal_conv1d(x, weight, states, torch.tensor(slots), starts_of(lengths))
    for slot, (start, end) in zip(slots, pairwise(starts_of(lengths)), strict=True):
        own, state = x[start:end].numpy(), before[slot].numpy()
        expected, after = reference.causal_conv1d(own, weight.numpy(), state)
        near(y[start:end], expected)
        np.testing.assert_array_equal(states[slot], after)
    assert torch.equal(states[4], before[4]) and torch.equal(x, given)


@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
def test_the_convolution_of_half_types_keeps_its_inputs_as_they_are(dtype):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(20, 12, generator=random).to(dtype)
    weight = torch.randn(12, 4, generator=random).to(dtype)
    states = torch.zeros(1, 12, 3, dtype=dtype)
    y = causal_conv1d(x, weight, states, torch.tensor([0]), torch.tensor([0, 20]))
    assert y.dtype == dtype
    expected, _ = reference.causal_conv1d(
        x.double().numpy(), weight.double().numpy(), np.zeros((12, 3))
    )
    near(y.float(), expected, HALF_TOLERANCE[dtype])
    assert torch.equal(states[0], x[-3:].T)


def test_a_text_may_be_split_anywhere():
    length = 70
    rows, states = random_rows(length), random_states()
    read, after = by_numpy(rows, states, [4], [length])
    for split in range(1, length):
        part, own = states.clone(), [x.split([split, length - split]) for x in rows]
        first, second = (
            chunked([x[i] for x in own], part, [4], [len(own[0][i])]) for i in (0, 1)
        )
        near(torch.cat([first, second]), read)
        near(part, after)


# --- Whose rows are whose ---


@pytest.mark.parametrize(
    "lengths", [[1], [7], [1, 1, 1], [3, 1, 1], [1, 5, 1, 2], [1, 1, 4], [2, 3, 70]]
)
def test_texts_in_one_pass_are_as_if_alone(lengths):
    net = HYBRID.delta_net
    random = torch.Generator().manual_seed(3)
    together = RecurrentStates(net, 6, device=torch.device("cpu"), dtype=torch.float32)
    for x in (together.conv, together.recurrent):
        x.normal_(generator=random)
    alone = RecurrentStates(net, 6, device=torch.device("cpu"), dtype=torch.float32)
    alone.conv.copy_(together.conv)
    alone.recurrent.copy_(together.recurrent)
    num_tokens, slots = sum(lengths), [4, 1, 5, 0][: len(lengths)]
    rows = random_rows(num_tokens)
    x = torch.randn(num_tokens, net.conv_size, generator=random)
    weight = torch.randn(net.conv_size, 4, generator=random)
    whole = RecurrentPass(together, TextRows(slots, lengths))
    y, read = whole.convolve(3, x, weight), whole.mix(3, *rows)
    for slot, (start, end) in zip(slots, pairwise(starts_of(lengths)), strict=True):
        one = RecurrentPass(alone, TextRows([slot], [int(end - start)]))
        near(y[start:end], one.convolve(3, x[start:end], weight))
        near(read[start:end], one.mix(3, *(x[start:end] for x in rows)))
    near(together.conv, alone.conv)
    near(together.recurrent, alone.recurrent)
    untouched = [slot for slot in range(6) if slot not in slots]
    for mine, theirs in ((together.conv, alone.conv),):
        assert torch.equal(mine[:2], theirs[:2]), "another layer's"
        assert torch.equal(mine[:, untouched], theirs[:, untouched])


# --- Decoders ---

TEXT = np.random.default_rng(1).integers(HYBRID.vocab_size, size=40).tolist()
PROMPTS = [TEXT[:3], TEXT[5:14], TEXT[11:36]]


def gates_of(spec=HYBRID):
    """Specs with one knob of a hybrid less."""
    yield "as it is", spec
    yield "no gate", replace(spec, attention_gate=False)
    yield "whole heads rotated", replace(spec, rotary_dim=None)
    yield "no norms of q and k", replace(spec, qk_norm=False)
    yield "biases", replace(spec, qkv_bias=True)
    yield "biases, no gate", replace(spec, qkv_bias=True, attention_gate=False)
    net = replace(spec.delta_net, layers=(0, 1, 2, 3), num_key_heads=4)
    yield "nothing else", replace(spec, delta_net=net)


@pytest.mark.parametrize(("name", "spec"), list(gates_of()))
def test_both_decoders_and_the_merged_one_agree(name, spec):
    expected = numpy_decoder(spec).next_token_logits(TEXT)
    decoder = torch_decoder(spec)
    near(decoder.next_token_logits(TEXT), expected, 1e-4)
    context = decoder.dense_context()
    merged = MergedDecoder(decoder)
    token_ids = torch.tensor(TEXT)
    with torch.inference_mode():
        hidden_states = merged.forward(token_ids, torch.arange(len(TEXT)), context)
        near(merged.compute_logits(hidden_states)[-1], expected, 1e-4)


@pytest.mark.parametrize("make", [numpy_decoder, torch_decoder])
def test_every_knob_of_the_hybrid_is_seen(make):
    straight = make(HYBRID).next_token_logits(TEXT)
    for change in ({"rotary_dim": 6}, {"rotary_dim": 2}):
        other = make(replace(HYBRID, **change)).next_token_logits(TEXT)
        assert np.abs(other - straight).max() > 1e-3 * np.abs(straight).max()


@pytest.mark.parametrize("make", [numpy_decoder, torch_decoder])
def test_a_text_in_pieces_scores_like_the_whole(make):
    oracle, decoder = numpy_decoder(HYBRID), make(HYBRID)
    ends = range(1, len(TEXT) + 1)
    expected = np.stack([oracle.next_token_logits(TEXT[:end]) for end in ends])
    for size in (1, 2, 3, 5, 13, len(TEXT)):
        context = decoder.cached_context(len(TEXT))
        for start in range(0, len(TEXT), size):
            piece = TEXT[start : start + size]
            logits = decoder.extend(piece, context)
            near(logits, expected[start + len(piece) - 1], 1e-4)


@pytest.mark.parametrize("make", [numpy_decoder, torch_decoder])
def test_a_rectangle_of_texts_says_what_each_says_alone(make):
    oracle, decoder = numpy_decoder(HYBRID), make(HYBRID)
    answers = [generate_naive(oracle, prompt, 14) for prompt in PROMPTS]
    assert len({token for answer in answers for token in answer}) >= 10
    assert generate_static_batch(decoder, PROMPTS, 14) == answers
    assert [generate_cached(decoder, p, 14) for p in PROMPTS] == answers


@pytest.mark.parametrize("make", [numpy_decoder, torch_decoder])
def test_a_full_cache_changes_no_state(make):
    decoder = make(HYBRID)
    contexts = [decoder.cached_context(5), decoder.static_batch_context([3, 5], 5)]
    fitting, too_long = [TEXT[:3], [TEXT[:3]] * 2], [TEXT[:3], [TEXT[:3]] * 2]
    for context, now, then in zip(contexts, fitting, too_long, strict=True):
        decoder.extend(now, context)
        states = context.states.conv, context.states.recurrent
        kept = [np.array(x.tolist()) for x in states]
        with pytest.raises(ShapeError):
            decoder.extend(then, context)
        for x, before in zip(states, kept, strict=True):
            np.testing.assert_array_equal(np.asarray(x), before)


def test_bfloat16_has_matrices_in_float32():
    decoder = torch_decoder(HYBRID).to(torch.bfloat16)
    context = decoder.cached_context(40)
    assert context.states.conv.dtype == torch.bfloat16
    assert context.states.recurrent.dtype == torch.float32
    logits = decoder.extend(TEXT, context)
    near(logits, numpy_decoder(HYBRID).next_token_logits(TEXT), 0.1)


def test_one_pass_on_cuda_mixes_no_devices():
    with FakeTensorMode(), IndexWithoutCuda():
        decoder = Decoder(HYBRID)
        shapes = HYBRID.weight_shapes()
        decoder.load_weights(
            {name: torch.empty(shape, device="cuda") for name, shape in shapes.items()}
        )
        for context in (decoder.dense_context(), decoder.cached_context(40)):
            token_ids = torch.zeros(40, dtype=torch.int64, device="cuda")
            positions = torch.arange(40, device="cuda")
            assert decoder(token_ids, positions, context).device.type == "cuda"
        context = decoder.static_batch_context([3, 5], 8)
        token_ids = torch.zeros(10, dtype=torch.int64, device="cuda")
        hidden_states = decoder(token_ids, context.positions(5), context)
        assert hidden_states.device.type == "cuda"


# --- Far from the beginning ---

FAR = 4096


def test_over_4096_tokens_the_rules_drift_apart_by_rounding_only():
    rows, states = random_rows(FAR, seed=5), random_states()
    rows[3] = rows[3] * 1e-3  # so that a token is remembered for thousands
    read, after = by_numpy(rows, states, [1], [FAR])
    for rule in (chunked, token_by_token):
        own = states.clone()
        near(rule(rows, own, [1], [FAR]), read, 1e-5)
        near(own, after, 1e-5)


def test_over_4096_tokens_a_model_says_the_same_by_both_rules(monkeypatch):
    net = replace(HYBRID.delta_net, layers=(0,))
    decoder = torch_decoder(replace(HYBRID, num_layers=2, delta_net=net))
    text = np.random.default_rng(2).integers(HYBRID.vocab_size, size=FAR)
    token_ids, positions = torch.from_numpy(text), torch.arange(FAR)

    def logits():
        with torch.inference_mode():
            hidden_states = decoder(token_ids, positions, decoder.dense_context())
            return decoder.compute_logits(hidden_states)

    def by_tokens(q, k, v, log_decay, beta, state):
        reads = []
        decay, beta = log_decay.exp()[..., None, None], beta[..., None, None]
        q, k, v = (x[..., None, :] for x in (q, k, v))
        rows = zip(*(x.unbind(1) for x in (q, k, v, decay, beta)), strict=True)
        for q, k, v, decay, beta in rows:
            state = state * decay
            state = state + k.mT * (beta * (v - k @ state))
            reads.append(q @ state)
        return torch.cat(reads, dim=1), state

    by_chunks = logits()
    monkeypatch.setattr(delta_net, "run_chunks", by_tokens)
    errors = (logits() - by_chunks).abs().amax(dim=1) / by_chunks.abs().max()
    # Few rows have large errors: what a delta net reads is normalised, however little
    # it is. What would show a drift is the middle row, along the text.
    assert errors.quantile(0.99) < 1e-4
    middle = errors.view(8, -1).median(dim=1).values
    assert middle.max() < 2 * middle[0] < 2e-6
