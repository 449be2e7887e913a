"""Decode steps that are recorded and replayed, without a GPU.

Two stand-ins for a graph: a direct call of the very function that is recorded, with any
backend of the ops; and a tape, which repeats torch's operations on the same memory, as
a graph repeats launches. Both have to give the tokens of the eager path.
"""

import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivllm.cli.main import main
from minivllm.engine.engine import LLMEngine
from minivllm.errors import ConfigError
from minivllm.llm import LLM
from minivllm.models.decoder import Decoder
from minivllm.models.merged import MergedDecoder
from minivllm.ops import cuda
from minivllm.ops.registry import known_ops
from minivllm.runners import build, cuda_graphs, torch_runner
from minivllm.runners.attention_metadata import make_batch
from minivllm.runners.base import CacheLayout
from minivllm.runners.build import CacheConfig
from minivllm.runners.build import torch_runner as torch_runner_of
from minivllm.runners.cuda_graphs import DecodeGraphs, GraphRecorder, bucket_sizes
from minivllm.runners.kv_cache import kv_bytes_per_token
from minivllm.runners.torch_runner import TorchRunner
from minivllm.sampling.params import SamplingParams
from tests.engine_tools import assert_queues_are_right, run_all
from tests.fake_cuda import IndexWithoutCuda
from tests.parity.tiny import torch_decoder
from tests.tape import DirectRecorder, Tape, TapeRecorder
from tests.test_torch_runner import (
    BLOCK_SIZE,
    EXPECTED,
    PROMPTS,
    SPEC,
    WEIGHTS,
    answers,
    make_request,
    make_runner,
    make_scheduler,
    prompt,
    run,
)
from tests.tiny_decoders import GEMMA, HYBRID
from tests.tiny_folder import write_parrot

MAX_ROWS = 11  # sizes 1, 2, 4, 8, 11


@pytest.fixture
def only_torch(monkeypatch):
    """Let torch do everything: what C++ does, a tape does not see."""
    for op in known_ops():
        monkeypatch.setenv(f"MINIVLLM_OP_{op.upper()}", "torch")


@pytest.fixture(params=["direct", "direct torch", "tape"])
def recorder(request, monkeypatch):
    if request.param != "direct":
        request.getfixturevalue("only_torch")
    return TapeRecorder() if request.param == "tape" else DirectRecorder()


def with_graphs(recorder, num_blocks=64, max_rows=MAX_ROWS, **options):
    """Return a runner with as many blocks for requests as `make_runner` gives."""
    runner = make_runner(num_blocks=num_blocks + 1, **options)
    runner.capture_graphs(max_rows, recorder)
    return runner


# Sizes and layout.


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])],
)
def test_sizes_are_powers_of_two_and_the_largest(max_rows, expected):
    assert bucket_sizes(max_rows) == expected


def test_every_batch_has_a_size_less_than_twice_its_own():
    for max_rows in range(1, 200):
        sizes = bucket_sizes(max_rows)
        assert sizes == sorted(set(sizes)) and sizes[-1] == max_rows
        for num_rows in range(1, max_rows + 1):
            assert min(s for s in sizes if s >= num_rows) < 2 * num_rows


def decode_step(lengths, block_ids):
    """Return a step in which requests of so many tokens get their next one."""
    requests = [make_request(i, prompt(n, seed=i)) for i, n in enumerate(lengths)]
    for request in requests:
        request.num_computed_tokens = request.num_tokens - 1
    names = [request.request_id for request in requests]
    return SimpleNamespace(
        requests=requests,
        num_scheduled_tokens=dict.fromkeys(names, 1),
        block_ids=dict(zip(names, block_ids, strict=True)),
        block_copies=[],
        window_block_ids={},
        window_block_copies=[],
        state_slots={name: slot for slot, name in enumerate(names)},
        state_loads=[],
        state_saves=[],
        sampled=lambda: list(enumerate(requests)),
    )


def test_inputs_are_laid_out_as_by_hand():
    graphs = DecodeGraphs(
        lambda inputs: inputs.input_ids,
        lambda function: function,
        max_rows=4,
        max_num_blocks=3,
        pad_block=9,
        block_size=4,
        device=torch.device("cpu"),
    )
    step = decode_step([6, 1, 9], [[5, 2], [0], [7, 3, 1]])
    inputs = graphs.inputs(make_batch(step, 4))
    last = [request.token_ids[-1] for request in step.requests]
    rows = [[*last, 0], [5, 0, 8, 0], [2 * 4 + 1, 0, 1 * 4, 9 * 4]]
    table = [[5, 2, 5], [0, 0, 0], [7, 3, 1], [9, 9, 9]]
    assert inputs.tolist() == [*chain(*rows), *chain(*table)]
    assert graphs.replay(torch.from_numpy(inputs), 3).tolist() == last
    views = graphs.views(4)
    assert views.block_table.tolist() == table
    assert [view.tolist() for view in views[:3]] == rows
    assert all(view.is_contiguous() for view in views[:4])
    assert views[4:] == (None, None, None)


def test_windows_apart_and_states_have_their_own_numbers():
    graphs = DecodeGraphs(
        lambda inputs: inputs.input_ids,
        lambda function: function,
        max_rows=4,
        max_num_blocks=3,
        pad_block=9,
        block_size=4,
        device=torch.device("cpu"),
        pad_window_block=6,
        pad_state=12,
    )
    step = decode_step([6, 1, 9], [[5, 2], [0], [7, 3, 1]])
    names = [request.request_id for request in step.requests]
    step.window_block_ids = dict(zip(names, [[1, 2], [3], [-1, 5, 4]], strict=True))
    inputs = graphs.inputs(make_batch(step, 4), np.array([8, 0, 3]))
    last = [request.token_ids[-1] for request in step.requests]
    rows = [[*last, 0], [5, 0, 8, 0], [2 * 4 + 1, 0, 1 * 4, 9 * 4]]
    window_rows = [2 * 4 + 1, 3 * 4, 4 * 4, 6 * 4]
    states = [8, 0, 3, 12]
    table = [[5, 2, 5], [0, 0, 0], [7, 3, 1], [9, 9, 9]]
    # The block that was given back: another one of the request, to be masked.
    window_table = [[1, 2, 1], [3, 3, 3], [5, 5, 4], [6, 6, 6]]
    numbers = [*rows, window_rows, states, *table, *window_table]
    assert inputs.tolist() == list(chain(*numbers))
    assert graphs.replay(torch.from_numpy(inputs), 3).tolist() == last
    views = graphs.views(4)
    assert views.block_table.tolist() == table
    assert views.window_block_table.tolist() == window_table
    assert views.window_slot_mapping.tolist() == window_rows
    assert views.state_slots.tolist() == states
    assert all(view.is_contiguous() for view in views)


def test_the_largest_size_is_recorded_first():
    sizes = []
    graphs = DecodeGraphs(
        lambda inputs: sizes.append(inputs.block_table.shape) or inputs.input_ids,
        lambda function: function() is None or function,
        max_rows=6,
        max_num_blocks=2,
        pad_block=0,
        block_size=4,
        device=torch.device("cpu"),
    )
    assert sizes == [(6, 2), (4, 2), (2, 2), (1, 2)]
    assert list(graphs.replays) == [6, 4, 2, 1]


# Padded and unpadded steps give the same tokens.


def note_sizes(runner):
    """Return counters of the batches that are replayed, and of those that are not."""
    replayed, eager = Counter(), Counter()
    replay, forward = runner.graphs.replay, runner.decoder.forward

    def note_replay(inputs, num_rows):
        replayed[num_rows] += 1
        return replay(inputs, num_rows)

    def note_forward(input_ids, positions, context):
        if type(context).__name__ == "PagedContext":
            eager[len(input_ids)] += 1
        return forward(input_ids, positions, context)

    runner.graphs.replay, runner.decoder.forward = note_replay, note_forward
    return replayed, eager


def every_batch_size():
    """Return requests that start together and end one step after another."""
    lengths = range(2, 2 + MAX_ROWS)
    return [make_request(n, prompt(9, seed=20 + n), max_tokens=n) for n in lengths]


def test_every_batch_from_one_to_the_largest(recorder):
    ours, theirs = every_batch_size(), every_batch_size()
    runner = with_graphs(recorder, num_blocks=120)
    replayed, eager = note_sizes(runner)
    run(runner, ours, make_scheduler(runner))
    run(make_runner(num_blocks=120), theirs)
    assert answers(ours) == answers(theirs)
    assert len({token for answer in answers(ours) for token in answer}) > 10
    assert replayed == dict.fromkeys(range(1, MAX_ROWS + 1), 1)
    assert recorder.num_replays == MAX_ROWS
    assert eager == {9 * MAX_ROWS: 1}, "only the step of the prompts is not replayed"


@pytest.mark.parametrize("budget", [3, 7, 24, 2048])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_with_chunks_and_preemptions_between(budget, num_blocks, recorder):
    requests = [make_request(i, tokens) for i, tokens in enumerate(PROMPTS)]
    runner = with_graphs(recorder, num_blocks=num_blocks)
    run(runner, requests, make_scheduler(runner, budget))
    assert answers(requests) == EXPECTED
    is_tight = num_blocks == 12 and budget > 3  # else they hardly overlap
    assert (sum(r.num_preemptions for r in requests) > 0) == is_tight
    assert recorder.num_replays > 0


def params_of(generator):
    """Invent what a request wants; half of them are greedy."""
    wishes = [{}, {}, {}, {"temperature": 0.8}, {"temperature": 1.3, "top_p": 0.8}]
    wishes += [{"temperature": 1.0, "top_k": 5, "min_p": 0.02}, {"logprobs": 3}]
    wishes += [{"frequency_penalty": 0.7}, {"logit_bias": {3: 2.0, 9: -1.0}}]
    wishes += [{"allowed_token_ids": list(range(40)), "logprobs": 1}, {"n": 3}]
    wishes += [{"prompt_logprobs": 2}, {"bad_words": []}]
    wish = {"temperature": 0.0} | generator.choice(wishes)
    return SamplingParams(max_tokens=generator.randint(1, 12), seed=7, **wish)


def tell_story(runner, seed):
    """Let requests come and go on an engine; return all that it said of each."""
    generator = random.Random(seed)
    engine = LLMEngine(runner, max_num_seqs=MAX_ROWS, max_num_batched_tokens=40)
    shared = prompt(13, seed=99)
    said = {}
    for number in range(120):
        if number < 60 and generator.random() < 0.6:
            tokens = shared[: generator.choice([0, 4, 13])]
            tokens = tokens + prompt(
                generator.randint(1, 20), seed=1000 * seed + number
            )
            engine.add_request(str(number), tokens, params_of(generator))
        if generator.random() < 0.05:
            names = sorted(engine._states)
            if names:
                name = generator.choice(names)
                output = engine.abort_request(name)
                said[name] = output and [o.token_ids for o in output.outputs]
        for output in engine.step():
            said[output.request_id] = [
                (o.token_ids, o.finish_reason, [list(e) for e in o.logprobs or ()])
                for o in output.outputs
            ]
        assert_queues_are_right(engine.scheduler)
    run_all(engine)
    return said, engine


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_blocks", [24, 200])
def test_a_story_with_arrivals_aborts_shared_prefixes_and_all_wishes(
    seed, num_blocks, recorder
):
    runner = with_graphs(recorder, num_blocks=num_blocks)
    replayed, eager = note_sizes(runner)
    ours, _ = tell_story(runner, seed)
    theirs, _ = tell_story(make_runner(num_blocks=num_blocks), seed)
    assert ours == theirs
    assert len(ours) > 20
    assert sum(replayed.values()) > 5 and sum(eager.values()) > 5


def test_a_batch_beyond_the_largest_size_is_not_replayed(recorder):
    requests = [make_request(i, tokens) for i, tokens in enumerate(PROMPTS)]
    runner = with_graphs(recorder, max_rows=2)
    replayed, eager = note_sizes(runner)
    run(runner, requests, make_scheduler(runner))
    assert answers(requests) == EXPECTED
    assert set(replayed) <= {1, 2} and eager[3] > 0


def test_a_text_beyond_the_table_is_not_replayed(recorder, monkeypatch):
    monkeypatch.setattr(torch_runner, "MAX_GRAPH_LEN", 6 * BLOCK_SIZE)
    request = make_request(0, PROMPTS[2])  # from 21 tokens to 33
    runner = with_graphs(recorder)
    replayed, eager = note_sizes(runner)
    run(runner, [request], make_scheduler(runner))
    assert answers([request]) == EXPECTED[2:]
    assert replayed == {1: 3}, "22, 23 and 24 tokens are 6 blocks of 4"
    assert eager == {21: 1, 1: 8}


def test_mixed_steps_run_eagerly_and_the_engine_has_one_block_fewer(recorder):
    runner = with_graphs(recorder, num_blocks=63)
    assert (runner.num_blocks, runner.kv_cache.shape[2]) == (63, 64)
    replayed, eager = note_sizes(runner)
    scheduler = make_scheduler(runner, budget=8)
    requests = [make_request(i, tokens) for i, tokens in enumerate(PROMPTS)]
    steps = run(runner, requests, scheduler)
    for step in steps:
        all_decode = len(step.sampled()) == len(step.requests) == step.num_tokens
        replayed[len(step.requests)] -= all_decode
        eager[step.num_tokens] -= not all_decode
    assert not any((replayed | eager).values())


def test_followers_and_unfinished_prompts_are_not_mistaken_for_decodes(recorder):
    """As many sampled requests as rows, but not one for each row."""
    runner = with_graphs(recorder)
    step = decode_step([5, 6], [[0, 1], [2, 3]])
    first, second = step.requests
    first.num_computed_tokens = 2  # one token of a chunk: no scores
    follower = replace(second, request_id="1#1", index=1, leader=second)
    step.sampled = lambda: [(1, second), (1, follower)]
    assert not runner.graphs.can_replay(make_batch(step, BLOCK_SIZE))
    step.sampled = lambda: [(0, first), (1, second)]
    assert runner.graphs.can_replay(make_batch(step, BLOCK_SIZE))


# Padding disturbs nobody.


def one_decode_step(runner, num_rows):
    """Return the inputs of a step of requests whose blocks lie all over the cache."""
    lengths = [1 + 3 * i % 17 for i in range(num_rows)]
    free = random.Random(num_rows).sample(range(runner.num_blocks), runner.num_blocks)
    blocks = [[free.pop() for _ in range(-(-n // BLOCK_SIZE))] for n in lengths]
    return runner.graphs.inputs(make_batch(decode_step(lengths, blocks), BLOCK_SIZE))


@pytest.mark.parametrize("num_rows", range(1, MAX_ROWS + 1))
def test_padding_writes_nowhere_but_into_the_last_block(num_rows, recorder):
    runner = with_graphs(recorder, num_blocks=63)
    numbers = torch.Generator().manual_seed(0)
    runner.kv_cache.normal_(generator=numbers)
    before = runner.kv_cache.clone()
    with torch.inference_mode():
        inputs = torch.from_numpy(one_decode_step(runner, num_rows))
        runner.graphs.replay(inputs, num_rows)
    is_changed = (runner.kv_cache != before).flatten(4).any(-1)  # [layers, 2, ...]
    assert is_changed.all(0).equal(is_changed.any(0)), (
        "each layer writes the same slots"
    )
    changed = is_changed.any(0).any(0).flatten().nonzero().flatten().tolist()
    size = len(inputs) // (3 + runner.graphs.max_num_blocks)
    slots = inputs[2 * size :][:num_rows].tolist()
    padding = [63 * BLOCK_SIZE] if size > num_rows else []
    assert changed == sorted(slots) + padding


def test_recording_writes_nowhere_but_into_the_last_block(recorder):
    runner = make_runner(num_blocks=9)
    runner.kv_cache.fill_(1)
    runner.capture_graphs(MAX_ROWS, recorder)
    assert (runner.kv_cache[:, :, :-1] == 1).all()
    assert not (runner.kv_cache[:, :, -1] == 1).any()


def test_padding_with_nan_disturbs_nobody(recorder):
    """Token 0, which padding computes, makes NaN of everything; so does its block."""
    weights = {name: weight.clone() for name, weight in WEIGHTS.items()}
    weights["embed_tokens.weight"][0] = torch.nan
    weights["lm_head.weight"] = WEIGHTS["lm_head.weight"]
    assert not any(0 in text for text in PROMPTS + EXPECTED)
    requests = [make_request(i, tokens) for i, tokens in enumerate(PROMPTS)]
    runner = with_graphs(recorder, num_blocks=20, weights=weights)
    run(runner, requests, make_scheduler(runner))
    assert answers(requests) == EXPECTED
    assert recorder.num_replays > 0
    assert runner.kv_cache[:, :, -1].isnan().any()


def test_a_request_with_nan_disturbs_nobody(recorder):
    poison = next(
        i for i in range(3, 97) if not any(i in t for t in PROMPTS + EXPECTED)
    )
    weights = {name: weight.clone() for name, weight in WEIGHTS.items()}
    weights["embed_tokens.weight"][poison] = torch.nan
    weights["lm_head.weight"] = WEIGHTS["lm_head.weight"]
    runner = with_graphs(recorder, num_blocks=16, weights=weights)
    scheduler = make_scheduler(runner)
    for i in range(5):  # every block of the pool
        run(runner, [make_request(i, [i, *[poison] * 50])], scheduler)
    requests = [make_request(5 + i, tokens) for i, tokens in enumerate(PROMPTS[:2])]
    run(runner, requests, scheduler)
    assert answers(requests) == EXPECTED[:2]


class PadsInto(DecodeGraphs):
    """The bug: padding writes into a block that is somebody's."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options | {"pad_block": 0})


def test_padding_in_a_block_of_a_request_would_be_noticed(recorder, monkeypatch):
    monkeypatch.setattr(torch_runner, "DecodeGraphs", PadsInto)
    requests = [make_request(i, tokens) for i, tokens in enumerate(PROMPTS)]
    runner = with_graphs(recorder)
    run(runner, requests, make_scheduler(runner))
    assert answers(requests) != EXPECTED


# A tape repeats what it has seen, and so would a graph.


def test_a_tape_does_not_run_python_again(only_torch):
    recorder = TapeRecorder()
    runner = with_graphs(recorder)
    runner.kv_cache.zero_()  # the step reads tokens that nobody has computed
    runner._decode = runner.decoder.forward = None  # nobody calls these again
    runner.ops.reshape_and_cache = None
    step = decode_step([5, 6, 3], [[0, 1], [2, 3], [4]])
    with torch.inference_mode():
        inputs = torch.from_numpy(runner.graphs.inputs(make_batch(step, BLOCK_SIZE)))
        logits = runner.graphs.replay(inputs, 3)
    assert logits.shape == (3, SPEC.vocab_size) and logits.isfinite().all()


def test_weights_that_change_in_place_count(only_torch):
    recorder = TapeRecorder()
    runner = with_graphs(recorder)
    step = decode_step([5], [[0, 1]])
    with torch.inference_mode():
        inputs = torch.from_numpy(runner.graphs.inputs(make_batch(step, BLOCK_SIZE)))
        before = runner.graphs.replay(inputs, 1).clone()
        runner.decoder.lm_head.weight.mul_(2)
        after = runner.graphs.replay(inputs, 1)
    torch.testing.assert_close(after, 2 * before)


# Nothing in a recorded step asks for a value: without a GPU, but as if on one.


def fake_decoder(spec=SPEC):
    """Return a decoder on a GPU that is not there; to be called in FakeTensorMode."""
    decoder = Decoder(spec)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    shapes = spec.weight_shapes().items()
    decoder.load_weights({n: torch.empty(s, **options) for n, s in shapes})
    return decoder


@pytest.fixture
def fake_gpu(monkeypatch):
    """Pretend that there is a GPU; `Tensor.copy_` would go and look for it."""

    def copy_(tensor, *arguments):
        return torch.ops.aten.copy_.default(tensor, *arguments)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    with FakeTensorMode(), IndexWithoutCuda(), torch.inference_mode():
        yield torch.device("cuda", 0)


@pytest.fixture
def kernels(monkeypatch):
    """Let the registry believe that there is a GPU for the kernels."""
    monkeypatch.setattr(cuda, "why_no_launch", lambda: None)


SPECS = {
    "llama": (SPEC, None),
    "gemma": (GEMMA, None),
    "windows apart": (GEMMA, CacheLayout(window=6, num_window_blocks=17)),
    "states": (HYBRID, CacheLayout(num_states=MAX_ROWS, num_kept_states=1)),
}


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("torch", "llama"),
        ("torch", "gemma"),
        *(("cuda", name) for name in SPECS),
    ],
)
def test_on_a_gpu_a_recorded_step_asks_for_no_value(backend, name, request):
    spec, layout = SPECS[name]
    if backend == "cuda":
        request.getfixturevalue("kernels")
    request.getfixturevalue("fake_gpu")
    recorder, outside = TapeRecorder(), Tape()
    runner = TorchRunner(
        fake_decoder(spec),
        num_blocks=17,
        block_size=BLOCK_SIZE,
        max_model_len=64,
        layout=layout,
    )
    assert runner.choices["paged_attention"].backend.name == backend
    runner.capture_graphs(MAX_ROWS, recorder)
    sizes = bucket_sizes(MAX_ROWS)[::-1]
    for tape, size in zip(recorder.tapes, sizes, strict=True):
        assert tape.calls[-1][-1].shape == (size, spec.vocab_size)
        assert tape.names == recorder.tapes[0].names, "another size, another step"
        assert tape.devices() == {"cuda"}
    attention = {"cuda": "minivllm.paged_attention", "torch": "scaled_dot_product"}
    found = [name for name in recorder.tapes[0].names if attention[backend] in name]
    assert len(found) == len(spec.full_layers) + len(spec.window_layers)
    for num_rows in range(1, MAX_ROWS + 1):
        step = decode_step([6] * num_rows, [[0, 1]] * num_rows)  # begins no block
        if layout and layout.num_window_blocks:
            step.window_block_ids = step.block_ids
        with outside:
            launched = runner.launch(step)
        assert launched.results.shape == (4, num_rows)
        assert launched.results.device.type == "cuda"
    assert recorder.num_replays == MAX_ROWS


def test_a_step_that_asked_for_a_value_would_be_found(fake_gpu):
    def asks(inputs):
        return inputs.input_ids.narrow(0, 0, int(inputs.positions.max()))

    def selects(inputs):
        return inputs.input_ids.masked_select(inputs.positions > 0)

    options = {"max_num_blocks": 2, "pad_block": 0, "block_size": 4, "device": fake_gpu}
    DecodeGraphs(lambda inputs: inputs[0] + 1, TapeRecorder(), max_rows=2, **options)
    for decode in (asks, selects):
        with pytest.raises(RuntimeError):
            DecodeGraphs(decode, TapeRecorder(), max_rows=2, **options)


# The recorder, on a torch.cuda that only takes notes.


def test_the_recorder_runs_first_and_records_then_into_one_pool(monkeypatch):
    notes = []

    class Graph:
        def replay(self):
            notes.append("replay")

    class Stream:
        device = torch.device("cuda", 1)

        def __init__(self, device):
            assert device == self.device

        def wait_stream(self, other):
            notes.append(f"wait for {other}")

    @contextmanager
    def on(stream):
        notes.append("on the stream")
        yield
        notes.append("off")

    @contextmanager
    def graph(graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local" and isinstance(stream, Stream)
        notes.append(f"record into {pool}")
        yield
        notes.append("recorded")

    pools = iter(["pool 1", "pool 2"])
    stand_ins = {
        "graph_pool_handle": lambda: next(pools),
        "Stream": Stream,
        "stream": on,
        "graph": graph,
        "CUDAGraph": Graph,
        "current_stream": lambda device: f"{device}'s own",
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    recorder = GraphRecorder(torch.device("cuda", 1))
    results = iter(["warm-up", "recorded result"])
    replay = recorder(lambda: notes.append("compute") or next(results))
    assert notes == [
        "wait for cuda:1's own", "on the stream", "compute", "off",
        "record into pool 1", "compute", "recorded",
    ]  # fmt: skip
    assert [replay(), replay()] == ["recorded result"] * 2
    assert notes[-2:] == ["replay", "replay"]
    notes.clear()
    recorder(lambda: notes.append("compute"))
    assert "record into pool 1" in notes


# Who gets graphs.


def test_graphs_are_for_gpus_and_attention_that_does_not_pad(kernels):
    weight = torch.empty(1)
    assert cuda_graphs.why_no_graphs(SPEC, weight) == "they are for a GPU, not for cpu"
    with FakeTensorMode():
        on_gpu = torch.empty(1, device="cuda")
        assert cuda_graphs.why_no_graphs(SPEC, on_gpu) is None


def test_without_kernels_there_are_no_graphs():
    with FakeTensorMode():
        reason = cuda_graphs.why_no_graphs(SPEC, torch.empty(1, device="cuda"))
    assert reason.startswith("attention (torch) pads keys")


@pytest.fixture
def captured(monkeypatch):
    """Note what is to be captured."""
    sizes = []

    def capture_graphs(runner, max_rows, record=None):
        runner.num_blocks -= 1
        sizes.append(max_rows)

    monkeypatch.setattr(TorchRunner, "capture_graphs", capture_graphs)
    return sizes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [64]),
        ({"max_num_seqs": 9}, [9]),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 5}, [5]),
        ({"enforce_eager": True}, []),
    ],
)
def test_the_largest_batch_is_the_largest_size(options, expected, kernels, captured):
    cache = CacheConfig(num_blocks=6, block_size=4, **options)
    with FakeTensorMode():
        runner = torch_runner_of(fake_decoder(), cache, 97)
    assert captured == expected
    assert runner.num_blocks == 6
    assert runner.kv_cache.shape[2] == 6 + len(expected)


def test_without_kernels_a_gpu_gets_no_graphs(captured):
    with FakeTensorMode():
        torch_runner_of(fake_decoder(), CacheConfig(num_blocks=6), 97)
    assert captured == []


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_memory_of_graphs_is_not_the_caches(
    enforce_eager, kernels, captured, monkeypatch
):
    block_bytes = 4 * kv_bytes_per_token(SPEC, 2)
    asked = []

    def graph_cuda_bytes(decoder, max_rows, block_size, max_model_len):
        asked.append((type(decoder), max_rows, block_size, max_model_len))
        return 3 * block_bytes

    monkeypatch.setattr(torch_runner, "free_cuda_bytes", lambda *_: 10 * block_bytes)
    monkeypatch.setattr(torch_runner, "graph_cuda_bytes", graph_cuda_bytes)
    cache = CacheConfig(block_size=4, max_model_len=64, enforce_eager=enforce_eager)
    with FakeTensorMode():
        runner = torch_runner_of(fake_decoder(), cache, 97)
    assert asked == ([] if enforce_eager else [(MergedDecoder, 64, 4, 64)])
    assert runner.num_blocks == (10 if enforce_eager else 7)


def test_the_memory_of_graphs_is_measured_and_given_back(monkeypatch):
    free, recorder = iter([10_000, 4_000]), DirectRecorder()
    monkeypatch.setattr(torch_runner, "GraphRecorder", lambda device: recorder)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 0))
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    decoder = MergedDecoder(torch_decoder(SPEC, WEIGHTS))
    assert torch_runner.graph_cuda_bytes(decoder, 5, 4, 64) == 6_000
    assert next(free, None) is None
    runner = TorchRunner(decoder, num_blocks=64, block_size=4, max_model_len=64)
    requests = [make_request(i, tokens) for i, tokens in enumerate(PROMPTS)]
    run(runner, requests)  # the decoder is as it was
    assert answers(requests) == EXPECTED


def test_the_option_reaches_the_runner(tmp_path, monkeypatch, capsys):
    folder, seen = write_parrot(tmp_path), []

    def note(decoder, cache, vocab_size):
        seen.append((cache.enforce_eager, cache.max_num_seqs))
        return torch_runner_of(decoder, cache, vocab_size)

    monkeypatch.setattr(build, "torch_runner", note)
    options = {"device": "cpu", "num_blocks": 8, "max_model_len": 64}
    LLM(folder, enforce_eager=True, max_num_seqs=3, **options).close()
    LLM(folder, **options).close()
    assert seen == [(True, 3), (False, 64)]
    seen.clear()
    command = ["--model", str(folder), "--device", "cpu"]
    for option in ([], ["--enforce-eager"]):
        assert main(["generate", *command, *option, "Why?"]) == 0
    assert seen == [(False, 1), (True, 1)]
    capsys.readouterr()


def test_a_strange_option_is_refused():
    with pytest.raises(ConfigError, match="enforce_eager is 'no', but must be True or"):
        LLM(backend="fake", enforce_eager="no")
    with pytest.raises(ConfigError, match="did you mean enforce_eager"):
        LLM(backend="fake", enforce_eagre=True)


def test_on_a_cpu_nothing_is_recorded_and_no_block_is_kept():
    runner = make_runner(num_blocks=20)
    assert runner.graphs is None
    assert runner.kv_cache.shape[2] == runner.num_blocks == 20


def test_too_little_memory_for_graphs_is_an_error_of_ours():
    def record(function):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    message = r"cannot be recorded \(CUDA out of memory\): lower max_num_seqs"
    with pytest.raises(ConfigError, match=message):
        make_runner().capture_graphs(4, record)


def test_close_lets_go_of_the_graphs(recorder):
    runner = with_graphs(recorder)
    runner.close()
    assert runner.graphs is None and runner.kv_cache is None
