"""Windows, in every context and by every implementation of attention."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.scheduler import Scheduler
from minivllm.generation import generate_naive, generate_static_batch
from minivllm.models.context import first_key_of
from minivllm.models.decoder import Decoder
from minivllm.models.spec import RopeSpec
from minivllm.ops import cuda
from minivllm.ops.cpu import (
    CompiledAttention,
    CompiledPrefill,
    why_no_tiles,
    why_not_compiled,
)
from minivllm.ops.cuda import KernelAttention, why_not_emulated
from minivllm.ops.cuda_prefill import KernelPrefill
from minivllm.ops.paged_attention import PaddedAttention
from minivllm.ops.registry import OPS, known_ops
from minivllm.reference.attention import attention_weights, causal_attention
from minivllm.request import Request, SchedulerOutput
from minivllm.runners import attention_groups, torch_runner
from minivllm.runners.numpy_runner import NumpyRunner
from minivllm.runners.torch_runner import TorchRunner
from minivllm.sampling.params import SamplingParams
from tests.tape import DirectRecorder, TapeRecorder
from tests.tiny_decoders import GEMMA, SPEC, numpy_decoder, torch_decoder

BLOCK_SIZE = 4
WINDOWS = [1, 2, BLOCK_SIZE, 5, 8, 1000]
TEXT = np.random.default_rng(1).integers(SPEC.vocab_size, size=40).tolist()
PROMPTS = [TEXT[:3], TEXT[5:14], TEXT[11:36]]
NUM_NEW = 14


def spec_of(window):
    """Layers of all kinds: a window, none, one that is larger by one."""
    return replace(
        SPEC,
        hidden_size=32,
        intermediate_size=64,
        head_dim=16,
        windows=(window, None, window + 1),
        local_rope=RopeSpec(theta=100.0),
    )


def close(got, expected):
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.fixture(params=["numpy", "torch"])
def make_decoder(request):
    return {"numpy": numpy_decoder, "torch": torch_decoder}[request.param]


def logits_in_pieces(decoder, pieces):
    """Score what follows each piece of the text, with a cache."""
    context, start, scores = decoder.cached_context(len(TEXT)), 0, []
    for size in pieces:
        scores.append(decoder.extend(TEXT[start : start + size], context))
        start += size
    return np.stack(scores)


def test_by_hand_query_6_sees_keys_3_to_6():
    q = k = np.zeros((10, 1, 2), dtype=np.float32)
    shares = attention_weights(q, k, 1.0, window=4)[0]
    assert np.flatnonzero(shares[6]).tolist() == [3, 4, 5, 6]
    assert np.flatnonzero(shares[2]).tolist() == [0, 1, 2]
    assert [first_key_of(position, 4) for position in (0, 3, 4, 6)] == [0, 0, 1, 3]
    assert first_key_of(1000, None) == 0


@pytest.mark.parametrize("window", WINDOWS)
def test_a_text_in_chunks_of_any_size_scores_like_the_whole(window, make_decoder):
    oracle, decoder = numpy_decoder(spec_of(window)), make_decoder(spec_of(window))
    ends = range(1, len(TEXT) + 1)
    expected = np.stack([oracle.next_token_logits(TEXT[:end]) for end in ends])
    for size in (1, 2, 3, 5, 8, 13, len(TEXT)):
        rest = len(TEXT) % size
        pieces = [size] * (len(TEXT) // size) + [rest] * (rest > 0)
        close(logits_in_pieces(decoder, pieces), expected[np.cumsum(pieces) - 1])


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_one_wider_gives_other_scores(window, make_decoder):
    scores = [
        make_decoder(replace(spec_of(8), windows=(w,) * 3)).next_token_logits(TEXT)
        for w in (window, window + 1)
    ]
    assert np.abs(scores[0] - scores[1]).max() > 1e-3 * np.abs(scores[0]).max()


def answers_of(spec):
    """Return the oracle's greedy answers, and check that they are no close call."""
    oracle, answers = numpy_decoder(spec), []
    for prompt in PROMPTS:
        answers.append(generate_naive(oracle, prompt, NUM_NEW))
        for i in range(NUM_NEW):
            logits = oracle.next_token_logits(prompt + answers[-1][:i])
            second, first = np.sort(logits)[-2:]
            assert first - second > 1e-3
    assert len({token for answer in answers for token in answer}) >= 10
    return answers


ANSWERS = {window: answers_of(spec_of(window)) for window in WINDOWS}


def test_windows_decide_what_is_said():
    assert len({str(answers) for answers in ANSWERS.values()}) > 3


@pytest.mark.parametrize("window", WINDOWS)
def test_texts_of_unequal_length_in_a_static_batch(window, make_decoder):
    decoder = make_decoder(spec_of(window))
    assert generate_static_batch(decoder, PROMPTS, NUM_NEW) == ANSWERS[window]


def make_runner(kind, spec):
    make = {"numpy": NumpyRunner, "torch": TorchRunner}[kind]
    decoder = {"numpy": numpy_decoder, "torch": torch_decoder}[kind](spec)
    return make(decoder, num_blocks=65, block_size=BLOCK_SIZE, max_model_len=64)


def make_request(index, token_ids):
    return Request(
        request_id=str(index),
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(temperature=0).filled({}),
        max_tokens=NUM_NEW,
        arrival=index,
    )


def run(runner, budget):
    """Answer all prompts, at most `budget` tokens a step."""
    scheduler = Scheduler(
        BlockManager(64, BLOCK_SIZE), max_num_seqs=8, max_num_batched_tokens=budget
    )
    requests = [make_request(index, prompt) for index, prompt in enumerate(PROMPTS)]
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        scheduler.update(step, runner.execute(step))
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_numpy_runner(window, budget):
    runner = make_runner("numpy", spec_of(window))
    assert run(runner, budget) == ANSWERS[window]


@pytest.fixture(params=["torch", "compiled", "emulated"])
def backend(request, monkeypatch):
    """Force an implementation of attention, where it can run."""
    conditions = {"compiled": why_not_compiled, "emulated": why_not_emulated}
    condition = conditions.get(request.param, lambda device, dtype: None)
    if reason := condition("cpu", "float32"):
        pytest.skip(reason)
    monkeypatch.setenv("MINIVLLM_OP_PAGED_ATTENTION", request.param)
    if request.param == "emulated":
        monkeypatch.setenv("MINIVLLM_OP_PREFILL_ATTENTION", "emulated")
    return request.param


@pytest.mark.parametrize("budget", [1, 3, 8, 100])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_torch_runner(window, budget, backend):
    if backend == "emulated" and (budget not in (8, 100) or window not in (1, 5, 8)):
        pytest.skip("emulated kernels are slow: some of the cases")
    runner = make_runner("torch", spec_of(window))
    assert run(runner, budget) == ANSWERS[window]


@pytest.mark.parametrize("window", WINDOWS)
def test_pieces_of_few_queries_change_nothing(window, monkeypatch):
    for module in (attention_groups, torch_runner):
        monkeypatch.setattr(module, "MAX_QUERIES", 3)
    monkeypatch.setattr(attention_groups, "MAX_PADDED_KEYS", 0)
    runner = make_runner("torch", spec_of(window))
    assert run(runner, 11) == ANSWERS[window]
    assert run(runner, 100) == ANSWERS[window]


@pytest.mark.parametrize("kind", ["direct", "tape"])
@pytest.mark.parametrize("window", WINDOWS)
def test_recorded_decode_steps(window, kind, monkeypatch):
    if kind == "tape":  # what C++ does, a tape does not see
        for op in known_ops():
            monkeypatch.setenv(f"MINIVLLM_OP_{op.upper()}", "torch")
    recorder = {"direct": DirectRecorder, "tape": TapeRecorder}[kind]()
    runner = make_runner("torch", spec_of(window))
    runner.capture_graphs(3, recorder)
    assert run(runner, 8) == ANSWERS[window]
    assert recorder.num_replays >= NUM_NEW - 1


# A model with windows and everything else that Gemma has.


@pytest.mark.parametrize("backend", ["numpy", "torch", "", "emulated"])
def test_all_ops_of_gemma(backend, monkeypatch):
    if backend == "emulated" and (reason := why_not_emulated("cpu", "float32")):
        pytest.skip(reason)
    forced = {"": [], "numpy": []}.get(backend, known_ops())
    for op in forced:
        if any(found.name == backend for found in OPS[op]):
            monkeypatch.setenv(f"MINIVLLM_OP_{op.upper()}", backend)
    runner = make_runner("numpy" if backend == "numpy" else "torch", GEMMA)
    if forced:
        chosen = {op: choice.backend.name for op, choice in runner.choices.items()}
        assert chosen.pop("linear") == "torch" or backend == "emulated"
        assert set(chosen.values()) == {backend}
        assert "gelu_tanh_and_mul" in chosen
    assert run(runner, 8) == answers_of(GEMMA)


@pytest.mark.parametrize("backend", ["torch", "cuda"])
def test_one_step_on_cuda_mixes_no_devices(backend, monkeypatch):
    # Fake tensors have a device but no numbers: this runs without a GPU.
    if backend == "cuda":
        monkeypatch.setattr(cuda, "why_no_launch", lambda: None)
    lengths = {"0": (8, 1), "1": (10, 20), "2": (0, 5), "3": (0, 30)}
    requests = [make_request(i, TEXT[: sum(n)]) for i, n in enumerate(lengths.values())]
    for request, (num_computed, _) in zip(requests, lengths.values(), strict=True):
        request.num_computed_tokens = num_computed
    step = SchedulerOutput(
        requests=requests,
        num_scheduled_tokens={i: num_new for i, (_, num_new) in lengths.items()},
        block_ids={"0": [0, 1, 2], "1": list(range(3, 11)), "2": [11, 12],
                   "3": list(range(13, 21))},
        followers={},
        block_copies=[],
    )  # fmt: skip
    with FakeTensorMode():
        decoder, options = Decoder(GEMMA), {"device": "cuda", "dtype": torch.bfloat16}
        shapes = GEMMA.weight_shapes().items()
        decoder.load_weights({name: torch.empty(s, **options) for name, s in shapes})
        runner = TorchRunner(
            decoder, num_blocks=32, block_size=BLOCK_SIZE, max_model_len=64
        )
        assert runner.choices["paged_attention"].backend.name == backend
        assert runner.choices["gelu_tanh_and_mul"].backend.name == backend
        launched = runner.launch(step)
    assert launched.results.device.type == "cuda"
    assert launched.results.shape == (4, 4)


# Of three pieces: queries, and keys up to that of the last one.
PIECES = {"one": [(1, 9), (1, 1), (1, 23)], "many": [(5, 9), (3, 3), (50, 70)]}
IMPLEMENTATIONS = [
    (PaddedAttention, "one", None),
    (PaddedAttention, "many", None),
    (CompiledAttention, "one", why_not_compiled),
    (CompiledPrefill, "many", why_no_tiles),
    (KernelAttention, "one", why_not_emulated),
    (KernelPrefill, "many", why_not_emulated),
]
HEAD_DIM, GROUP, KV_HEADS = 32, 3, 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("make", "kind", "why_not"), IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, *WINDOWS, 25])
def test_attention_sees_its_window_and_reads_nothing_before(
    window, make, kind, why_not, dtype
):
    if why_not and (reason := why_not("cpu", dtype, head_dim=HEAD_DIM)):
        pytest.skip(reason)
    random = np.random.default_rng(2)
    dtype, pieces = getattr(torch, dtype), PIECES[kind]
    num_blocks = 60
    shape = (2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    kv_cache = torch.from_numpy(random.standard_normal(shape)).to(dtype)
    width = -(-max(keys for _, keys in pieces) // BLOCK_SIZE)
    table = torch.from_numpy(random.permutation(num_blocks)[: 3 * width].reshape(3, -1))
    lengths = torch.tensor([length for length, _ in pieces])
    num_keys = torch.tensor([keys for _, keys in pieces])
    steps = torch.minimum(torch.arange(lengths.max()), lengths[:, None] - 1)
    rows = lengths.cumsum(0)[:, None] - lengths[:, None] + steps
    positions = (num_keys - lengths)[:, None] + steps
    q = torch.from_numpy(
        random.standard_normal((int(lengths.sum()), KV_HEADS * GROUP, HEAD_DIM))
    ).to(dtype)
    expected = []
    for piece, (length, keys) in enumerate(pieces):
        k, v = kv_cache[:, table[piece]].flatten(1, 2)[:, :keys].float().numpy()
        of_piece = q[rows[piece, :length]].float().numpy()
        expected.append(causal_attention(of_piece, k, v, HEAD_DIM**-0.5, window))
        # Whole blocks before the first window are not the request's any more.
        first = first_key_of(keys - length, window)
        kv_cache[:, table[piece, : first // BLOCK_SIZE]] = torch.nan
    attention = make(rows, positions, table, kv_cache, GROUP)
    got = attention.attend(q, kv_cache, HEAD_DIM**-0.5, window).float()
    got = got.unflatten(0, rows.shape)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for piece, (length, _) in enumerate(pieces):
        difference = np.abs(got[piece, :length].numpy() - expected[piece]).max()
        assert difference <= tolerance * np.abs(expected[piece]).max()
