"""Who is asked: counts of experts in the engine, in the trace and in a profile."""

import json

import pytest
import torch

from minivllm.benchmarks import experts as bench
from minivllm.benchmarks.machine import Limits
from minivllm.benchmarks.profile import (
    TimerCost,
    Work,
    backend_of,
    decoding,
    floors_of,
    profile_steps,
)
from minivllm.engine.engine import LLMEngine
from minivllm.engine.trace import expert_loads, read_trace
from minivllm.errors import ConfigError
from minivllm.llm import LLM
from minivllm.loading.loader import load_model
from minivllm.models.expert_counts import ExpertCounts
from minivllm.models.moe import upcycle
from minivllm.runners.build import CacheConfig, build_runner
from minivllm.sampling.params import SamplingParams
from tests.tiny_folder import CONFIG, make_tensors, write_byte_tokenizer
from tests.tiny_folder import write_checkpoint as write

PROMPTS = ["abc", "the cat sat on", "z"]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "dense"
    config = CONFIG | {
        "vocab_size": 257,
        "hidden_size": 32,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    tensors = {
        name: tensor if tensor.ndim == 1 else tensor / tensor.shape[1] ** 0.5
        for name, tensor in make_tensors(config).items()
    }
    write(folder, tensors, config)
    write_byte_tokenizer(folder, None)
    return folder


@pytest.fixture(scope="module")
def experts(dense):
    return upcycle(dense, 4, 2, dense.parent / "experts")


def traced(folder, backend="torch", count=True, **options):
    """Return the records of a few requests."""
    records = []
    device = {"device": "cpu"} if backend == "torch" else {}
    with LLM(folder, backend=backend, **device, **options) as llm:
        llm.engine.listeners.append(records.append)
        if count:
            llm.count_experts()
        llm.generate(PROMPTS, PARAMS)
    return records


@pytest.mark.parametrize("backend", ["torch", "numpy"])
@pytest.mark.parametrize("chunk", [5, 2048])
def test_every_token_of_a_step_goes_to_two_experts(experts, backend, chunk):
    records = traced(experts, backend, max_num_batched_tokens=chunk)
    assert len(records) >= 4
    for record in records:
        rows = 2 * sum(record["num_scheduled_tokens"].values())
        counts = record["tokens_per_expert"]
        assert list(counts) == ["0", "1"]
        assert [sum(layer) for layer in counts.values()] == [rows, rows]
        assert all(len(layer) == 4 for layer in counts.values())


def test_both_runners_count_the_same(experts):
    ours, theirs = traced(experts), traced(experts, "numpy")
    assert [r["tokens_per_expert"] for r in ours] == [
        r["tokens_per_expert"] for r in theirs
    ]
    loads = expert_loads(ours)
    assert loads == expert_loads(theirs)
    # All prompt tokens, and all new ones but the last, which nobody continues.
    num_tokens = sum(map(len, PROMPTS)) + 3 * len(PROMPTS)
    assert {layer: sum(counts) for layer, counts in loads.items()} == {
        0: 2 * num_tokens,
        1: 2 * num_tokens,
    }
    assert len(set(loads[0])) > 1  # a router that everybody likes equally is suspicious


def test_nothing_is_counted_unless_somebody_asks(experts):
    records = traced(experts, count=False)
    assert not any("tokens_per_expert" in record for record in records)
    assert expert_loads(records) == {}
    runner, _ = build_runner(experts, device="cpu", cache=CacheConfig(num_blocks=9))
    assert runner.expert_counts is None
    assert all(layer.mlp.num_rows is None for layer in runner.decoder.layers)


def test_answers_are_the_same_with_counts(experts):
    plain, counted = traced(experts, count=False), traced(experts)
    assert [r["sampled_token_ids"] for r in plain] == [
        r["sampled_token_ids"] for r in counted
    ]


def test_counts_go_through_a_file(experts, tmp_path):
    path = tmp_path / "trace.jsonl"
    records = traced(experts, trace=path)
    assert expert_loads(read_trace(path)[1]) == expert_loads(records)


def test_counters_begin_anew_when_taken():
    counts = ExpertCounts((0, 3), torch.tensor([[1, 2], [3, 4]]))
    assert counts.take() == {0: [1, 2], 3: [3, 4]}
    assert counts.take() == {0: [0, 0], 3: [0, 0]}


def test_graphs_would_count_padding_and_are_given_up(experts):
    runner, _ = build_runner(experts, device="cpu", cache=CacheConfig(num_blocks=9))
    runner.graphs = object()
    runner.count_experts()
    assert runner.graphs is None


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_a_model_without_experts_is_refused(dense, backend):
    device = {"device": "cpu"} if backend == "torch" else {}
    with LLM(dense, backend=backend, **device) as llm:
        with pytest.raises(ConfigError, match="no experts to count"):
            llm.count_experts()
        with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
            llm.engine.runner.count_experts()
    with LLM(backend="fake") as llm, pytest.raises(ConfigError, match="fake"):
        llm.count_experts()


def make_engine(folder, backend) -> LLMEngine:
    device = {"device": "cpu"} if backend == "torch" else {}
    cache = CacheConfig(num_blocks=400, block_size=16)
    runner, tokenizer = build_runner(folder, backend=backend, cache=cache, **device)
    return LLMEngine(runner, tokenizer=tokenizer, max_num_seqs=16)


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_a_profile_sees_the_parts_of_experts(experts, backend):
    engine = make_engine(experts, backend)
    steps = decoding(engine, 3, 2)
    found = profile_steps(engine, "decode", steps, 1, None, TimerCost())
    calls = {part.name: part.num_calls for part in found.parts}
    assert calls["router"] == 2  # layers
    if backend == "numpy":
        assert calls["down"] == calls["activation"] == 2 * 3 * 2  # tokens and experts
        return
    ops = ("topk_softmax", "moe_permute", "moe_combine")
    assert [calls[name] for name in ("gate_up", "down", "activation", *ops)] == [2] * 6
    choices = engine.runner.choices
    grouped = choices["grouped_linear"].backend.name
    assert backend_of(engine.runner, "gate_up") == grouped
    assert backend_of(engine.runner, "router") == choices["linear"].backend.name
    for op in ops:
        assert backend_of(engine.runner, op) == choices[op].backend.name


def test_a_floor_counts_the_experts_of_one_token(dense, experts):
    limits = Limits(read_bytes_per_s=1.0, flops_per_s=1e9)
    work = Work(1, 1, 1, 1)
    floors = [
        floors_of(make_engine(folder, "torch").runner, work, limits)
        for folder in (dense, experts)
    ]
    for part in ("gate_up", "down"):
        assert floors[1][part] == 2 * floors[0][part]
    assert floors[1]["router"] == 2 * 4 * 32 * 4  # layers, experts, columns, bytes


@pytest.fixture
def two_layers(monkeypatch):
    """Let a dense model give two layers of experts to the benchmark."""
    monkeypatch.setattr(bench, "CYCLE_BYTES", 2 * 3 * 4 * 12 * 32 * 4 + 1)


def test_a_dense_model_is_up_cycled_for_the_benchmark(dense, two_layers):
    decoder = load_model(dense, device="cpu")
    spec, layers = bench.experts_layers(decoder, bench.CYCLE_BYTES)
    assert len(layers) == 2 and len(bench.experts_layers(decoder, 1)[1]) == 1
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = decoder.layers[0].mlp(x)
        assert all(torch.allclose(layer(x), expected, atol=1e-5) for layer in layers)
    assert spec.moe.num_experts == bench.NUM_EXPERTS
    times = bench.measure_experts(decoder, 1, batch_sizes=(1, 64))
    assert [row.num_touched for row in times] == [2, 4]
    assert all(min(r.grouped_s, r.dense_s, r.loop_s) > 0 for r in times)
    assert times[0].ratio == times[0].grouped_s / times[0].dense_s
    table = bench.experts_table(decoder.spec, times).splitlines()
    assert (
        table[0] == "experts: one layer of 4, each 12 numbers wide; a token goes to 2"
    )
    assert [line.split()[:2] for line in table[2:]] == [["1", "2"], ["64", "4"]]


def test_the_dense_layer_has_the_weights_of_the_experts_touched(experts, two_layers):
    decoder = load_model(experts, device="cpu")
    spec, (layer, other) = bench.experts_layers(decoder, 2**20)
    assert (layer, other) == tuple(of.mlp for of in decoder.layers)
    ops = bench.gather_ops(bench.choose_ops(spec, layer.gate.weight))
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        dense = bench.dense_layer(spec, layer, [0, 2, 3], ops)
        expected = sum(layer.experts[index](x) for index in (0, 2, 3))
        assert torch.allclose(dense(x), expected, atol=1e-5)


def test_the_command_prints_a_table_and_writes_records(
    dense, tmp_path, capsys, two_layers
):
    from minivllm.cli.main import main

    file = tmp_path / "results.jsonl"
    arguments = ["--model", str(dense), "--backend", "torch", "--device", "cpu"]
    assert main(["bench", "moe", *arguments, "--reps", "1", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "experts: one layer of 4" in out and "times the dense layer" in err
    machine, *records = map(json.loads, file.read_text().splitlines())
    assert machine["workload"] == "machine"
    assert [record["tokens"] for record in records] == list(bench.BATCH_SIZES)
    assert records[0]["workload"] == "moe" and records[0]["experts_touched"] == 2
    assert records[0]["grouped_ms"] > 0 and records[0]["dtype"] == "float32"


def test_the_command_needs_torch(capsys):
    from minivllm.cli.main import main

    with pytest.raises(SystemExit):
        main(["bench", "moe", "--backend", "numpy"])
    assert "moe needs --backend torch" in capsys.readouterr().err
