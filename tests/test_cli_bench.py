"""The subcommand `bench`: its tables, its files, and its ways to go wrong."""

import json
import sys

import pytest

from minivllm.benchmarks import machine as machine_module
from minivllm.cli.main import main
from tests.tiny_folder import CONFIG, make_tensors, write_checkpoint, write_parrot


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Keep the real cache out of it, and the threads as they were."""
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    for variable in ("OMP", "OPENBLAS", "MKL"):
        monkeypatch.setenv(f"{variable}_NUM_THREADS", "1")
    monkeypatch.setenv("VECLIB_MAXIMUM_THREADS", "1")


@pytest.fixture(scope="module")
def parrot(tmp_path_factory) -> str:
    return str(write_parrot(tmp_path_factory.mktemp("parrot")))


def bench(capsys, *arguments: str) -> tuple[int, str, str]:
    """Run the command line here; return exit code, standard output and error."""
    try:
        code = main(["bench", *arguments])
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_the_pretended_clock_gives_numbers_that_can_be_computed(capsys):
    code, out, err = bench(capsys, "W1", "--backend", "fake", "--reps", "2")
    assert code == 0
    # 10 ms a step and 0.5 ms a token: the prompt 74 ms, each other token 10.5 ms.
    rows = [line.split() for line in out.splitlines()]
    first = ["W1", *"time to first token 74.0 ms 74.0 to 74.0".split()]
    assert first in rows
    assert ["W1", *"then 95.2 tokens/s 95.2 to 95.2".split()] in rows
    assert "limits: none" in out and "disturbed" not in out
    assert err.splitlines() == [
        "minivllm: W1 warm-up: 1.41 s",
        "minivllm: W1 repetition 1: 1.41 s",
        "minivllm: W1 repetition 2: 1.41 s",
    ]


def test_all_three_workloads_run_by_default(capsys):
    code, out, _ = bench(capsys, "--backend", "fake", "--reps", "1")
    assert code == 0
    bars = [line.split()[0] for line in out.splitlines() if "█" in line]
    assert bars == ["W1", "W2", "W3"]


def test_the_options_reach_the_engine(capsys):
    def seconds(*options: str) -> float:
        arguments = ("W3", "--backend", "fake", "--reps", "1", *options)
        out = bench(capsys, *arguments)[1]
        line = next(line for line in out.splitlines() if line.startswith("W3  until"))
        return float(line.split()[5])

    plain = seconds()
    assert seconds("--no-prefix-caching") > 2 * plain
    assert seconds("--max-num-seqs", "1") > 2 * plain
    assert seconds("--max-num-batched-tokens", "64") > plain
    assert seconds("--block-size", "1024") > 2 * plain  # no full block to share


def test_a_model_is_measured_against_the_limits_of_the_machine(
    capsys, parrot, tmp_path, monkeypatch
):
    monkeypatch.setattr(machine_module, "BUDGET_S", 0.0)
    monkeypatch.setattr(machine_module, "READ_BYTES", 2**24)
    file = tmp_path / "results.jsonl"
    arguments = ["W1", "--model", parrot, "--backend", "numpy", "--reps", "1"]
    code, out, _ = bench(capsys, *arguments, "--json", str(file), "--threads", "1")
    assert code == 0
    assert "limits: reads " in out and "machine: " in out
    first = next(line for line in out.splitlines() if line.startswith("W1  time"))
    assert 0 <= float(first.split()[-1]) < 1  # 0.00 where others use the machine
    machine, limits, result = map(json.loads, file.read_text().splitlines())
    assert [r["workload"] for r in (machine, limits, result)] == [
        "machine",
        "limits",
        "W1",
    ]
    assert machine["cpu"] and machine["numpy"] and limits["read_gb_s"] > 0
    assert (result["dtype"], result["device"], result["threads"]) == (
        "float32",
        "cpu",
        1,
    )
    median, low, high = result["decode_tok_s"]
    assert 0 < low == median == high and result["reps"] == 1


def test_results_are_appended(capsys, tmp_path):
    file = tmp_path / "results.jsonl"
    for _ in range(2):
        bench(capsys, "W1", "--backend", "fake", "--reps", "1", "--json", str(file))
    assert len(file.read_text().splitlines()) == 4


def test_the_ladder_shows_every_rung(capsys, parrot, tmp_path):
    file = tmp_path / "results.jsonl"
    options = ("--model", parrot, "--backend", "numpy", "--reps", "1")
    code, out, _ = bench(capsys, "ladder", *options, "--json", str(file))
    assert code == 0
    assert "8 requests, 296 tokens in and 256 out, 4 at the same time" in out
    assert out.count("8 of 8 answers the same") == 4
    assert sum("█" in line for line in out.splitlines()) == 4
    rungs = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert [rung["rung"] for rung in rungs] == [
        "naive generation",
        "KV cache",
        "static batch",
        "continuous batching",
    ]
    assert "  naive generation: 1.0 times naive generation" in out


def test_a_profile_has_a_table_a_record_and_bars(capsys, parrot, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(machine_module, "BUDGET_S", 0.0)
    monkeypatch.setattr(machine_module, "READ_BYTES", 2**24)
    file, figure = tmp_path / "results.jsonl", tmp_path / "bars.svg"
    options = ("--model", parrot, "--backend", "numpy", "--reps", "1")
    files = ("--json", str(file), "--figure", str(figure))
    code, out, err = bench(capsys, "profile", *options, *files)
    assert code == 0
    assert "limits: reads " in out and "machine: " in out
    names = ["decode, 1 request", "decode, 16 requests", "a prompt of 128 tokens"]
    lines = out.splitlines()
    for name in names:
        assert any(line.startswith(f"{name}: ") for line in lines)
        assert f"minivllm: {name}: " in err
        assert name in figure.read_text()
    assert sum(line.split()[:2] == ["detokenizer", "16"] for line in lines) == 1
    machine, *profiles = map(json.loads, file.read_text().splitlines())
    assert machine["workload"] == "machine"
    assert [p["step"] for p in profiles] == names
    for found in profiles:
        total = sum(part["ms"] for part in found["parts"].values())
        assert found["ms"] == pytest.approx(total, abs=0.01)
        assert found["parts"]["head"]["floor_ms"] > 0
        assert (found["workload"], found["steps"]) == ("profile", 8)


def test_a_figure_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "bars.svg"
    arguments = ("--backend", "fake", "--reps", "1", "--figure", str(path))
    assert bench(capsys, *arguments)[0] == 0
    assert "<svg" in path.read_text()


def test_without_matplotlib_nothing_is_measured_in_vain(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = str(tmp_path / "bars.svg")
    code, out, err = bench(capsys, "--backend", "fake", "--figure", path)
    assert (code, out) == (1, "")
    assert err.startswith("minivllm: error: a figure needs matplotlib")


def test_a_model_with_a_short_context_is_refused_with_its_numbers(capsys, tmp_path):
    folder = tmp_path / "short"
    write_parrot(folder)
    config = CONFIG | {"vocab_size": 257, "max_position_embeddings": 64}
    write_checkpoint(folder, make_tensors(config), config)
    code, _, err = bench(capsys, "W1", "--model", str(folder), "--backend", "numpy")
    assert code == 1
    assert "128 tokens" in err and "max_model_len is 64" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["W4"], "'W4' is no workload: did you mean W"),
        (["lader"], "'lader' is no workload: did you mean ladder?"),
        (["--reps", "0"], "'0' is no integer of at least 1"),
        (["--rep", "1"], "unknown option --rep: did you mean --reps?"),
        (["--figure", "x.gif"], "'x.gif' must end in .svg, .png, .pdf"),
        (["--json", "nowhere/x.jsonl"], "is no file in an existing folder"),
        (["--json", "."], "is no file in an existing folder"),
        (["sampler", "--backend", "numpy"], "sampler needs --backend torch, not numpy"),
        (
            ["profile", "--backend", "fake"],
            "profile needs --backend torch or numpy, not fake",
        ),
        (
            ["profile", "--max-num-batched-tokens", "127"],
            "profile computes 128 tokens in one step, not 127",
        ),
        (
            ["ladder", "--backend", "fake"],
            "ladder needs --backend torch or numpy, not fake",
        ),
        (["--backend", "numpy", "--dtype", "float16"], "float32 only, not float16"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = bench(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("minivllm: error: ") and message in err
    assert err.count("\n") == 1
