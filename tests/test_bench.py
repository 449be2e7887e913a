"""Workloads, their measurement, the ladder and the reports, with numbers by hand."""

import importlib.util
import sys
import time

import pytest

from benchmarks import table as table_script
from benchmarks.peers.compare_tokens import num_equal
from benchmarks.peers.run_llamacpp import count_equal
from benchmarks.peers.run_side_by_side import JOBS
from minivllm.benchmarks import machine, measure, report, sampler
from minivllm.benchmarks.ladder import cached, climb, time_rung
from minivllm.benchmarks.machine import Limits, measure_limits, weight_bytes
from minivllm.benchmarks.measure import (
    Bystanders,
    Repetition,
    Result,
    Spread,
    Timing,
    metrics_of,
    summarise,
)
from minivllm.benchmarks.offline import run_jobs
from minivllm.benchmarks.workloads import WORKLOADS, Job, ladder_jobs
from minivllm.engine.engine import LLMEngine
from minivllm.errors import BackendUnavailable, MinivllmError
from minivllm.loading.loader import load_model, load_spec
from minivllm.runners.build import build_runner
from minivllm.runners.fake_runner import FakeRunner, StepCost
from tests.tiny_folder import CONFIG, make_tensors, write_byte_tokenizer
from tests.tiny_folder import write_checkpoint as write

# Workloads.

# The last ids of the last prompt of repetition 1.
EXPECTED_IDS = {
    "W1": [37839, 8117, 30290],
    "W2": [34409, 22082, 9629],
    "W3": [4164, 24522, 3337],
}


@pytest.mark.parametrize(
    ("name", "num_jobs", "num_in", "num_out"),
    [("W1", 1, 128, 128), ("W2", 32, 5022, 2211), ("W3", 16, 8448, 512)],
)
def test_a_workload_has_the_promised_size(name, num_jobs, num_in, num_out):
    jobs = WORKLOADS[name].make_jobs(0, 49_152)
    assert len(jobs) == num_jobs
    assert sum(len(job.prompt_token_ids) for job in jobs) == num_in
    assert sum(job.num_output_tokens for job in jobs) == num_out


def test_the_token_ids_never_change():
    firsts = {
        name: workload.make_jobs(1, 49_152)[-1].prompt_token_ids[-3:]
        for name, workload in WORKLOADS.items()
    }
    assert firsts == EXPECTED_IDS


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_repetition_has_ids_of_its_own_and_the_same_lengths(name):
    one, other = (
        WORKLOADS[name].make_jobs(repetition, 49_152) for repetition in (1, 2)
    )
    assert [len(job[0]) for job in one] == [len(job[0]) for job in other]
    assert [job[1] for job in one] == [job[1] for job in other]
    # No block of 16 tokens is the same, so a prefix cache finds nothing.
    assert not {tuple(job[0][:16]) for job in one} & {tuple(j[0][:16]) for j in other}


def test_the_prompts_of_w3_share_512_tokens_and_no_more():
    jobs = WORKLOADS["W3"].make_jobs(0, 49_152)
    assert len({tuple(job.prompt_token_ids[:512]) for job in jobs}) == 1
    assert len({job.prompt_token_ids[512] for job in jobs}) > 1


@pytest.mark.parametrize("vocab_size", [2, 20, 257, 1000])
def test_a_small_vocabulary_gets_ids_that_it_has(vocab_size):
    for workload in WORKLOADS.values():
        ids = {token for job in workload.make_jobs(0, vocab_size) for token in job[0]}
        assert 0 <= min(ids) and max(ids) < vocab_size
        assert max(ids) >= vocab_size // 2


# Measuring.


def test_rates_are_those_of_the_definition():
    jobs = [Job([1] * 10, 3), Job([1] * 20, 5)]
    timing = Timing(first_s=[1, 3], last_s=[2, 4], wall_s=4, token_ids=[[], []])
    assert metrics_of(jobs, timing) == {
        "wall_s": 4,
        "output_tok_s": 2,
        "total_tok_s": 9.5,
        "mean_ttft_s": 2,
    }


def test_a_single_request_decodes_after_its_first_token():
    timing = Timing(first_s=[1.0], last_s=[3.0], wall_s=3.5, token_ids=[[]])
    assert metrics_of([Job([1] * 10, 5)], timing)["decode_tok_s"] == 2.0


def test_an_unseen_first_token_leaves_its_metric_out():
    timing = Timing(first_s=[1.0, None], last_s=[2, 2], wall_s=2, token_ids=[[], []])
    assert "mean_ttft_s" not in metrics_of([Job([1], 1)] * 2, timing)


def repetitions(*pairs: tuple[float, float | None]) -> list[Repetition]:
    return [Repetition({"wall_s": wall_s}, cores) for wall_s, cores in pairs]


def test_quiet_repetitions_count_before_earlier_disturbed_ones():
    tries = repetitions((9, 1.0), (1, 0.0), (8, 0.5), (2, 0.1), (3, 0.05), (4, 0.0))
    result = summarise("W1", tries, 3)
    assert result.metrics == {"wall_s": Spread(2, 1, 3)}
    assert (result.num_quiet, result.num_tries) == (3, 6)


def test_the_least_disturbed_count_when_too_few_were_quiet():
    result = summarise("W1", repetitions((9, 1.0), (1, 0.0), (8, 0.5), (7, 0.9)), 3)
    assert result.metrics == {"wall_s": Spread(7, 1, 8)}
    assert (result.num_quiet, result.other_cores) == (1, 0.5)


def test_what_is_unknown_is_not_called_quiet():
    result = summarise("W1", repetitions((1, None), (3, None), (2, None)), 3)
    assert (result.num_quiet, result.other_cores) == (None, None)
    assert result.as_json()["wall_s"] == [2, 1, 3]


def measured(monkeypatch, other_cores: list[float], **options) -> tuple[list, Result]:
    """Measure W1 with an engine that needs a second more each time."""
    asked = []

    class Scripted(Bystanders):
        def __exit__(self, *_):
            self.other_cores = other_cores[len(asked) - 1]

    def run(jobs):
        asked.append(jobs)
        size = float(len(asked))
        return Timing([size], [2 * size], 2 * size, [[0] * 128])

    monkeypatch.setattr(measure, "Bystanders", Scripted)
    return asked, measure.measure("W1", run, **options)


def test_the_warm_up_does_not_count(monkeypatch):
    asked, result = measured(monkeypatch, [0] * 4)
    assert len(asked) == 4
    assert result.metrics["wall_s"] == Spread(6, 4, 8)
    assert len({tuple(jobs[0].prompt_token_ids) for jobs in asked}) == 4


def test_disturbed_repetitions_are_repeated_up_to_a_limit(monkeypatch):
    asked, result = measured(monkeypatch, [0, 1, 0, 1, 0, 0], max_tries=9)
    assert (len(asked), result.num_quiet, result.num_tries) == (6, 3, 5)
    asked, result = measured(monkeypatch, [1] * 9, max_tries=5)
    assert (len(asked), result.num_quiet, result.num_tries) == (6, 0, 5)


def test_an_answer_of_another_length_is_no_measurement():
    timing = Timing([0.0], [1.0], 1.0, [[0] * 127])
    with pytest.raises(AssertionError, match="127"):
        measure.measure("W1", lambda jobs: timing)


def test_idle_and_stolen_time_is_no_work():
    assert measure.busy_ticks("cpu  1 2 4 8 16 32 64 128 0 0") == 1 + 2 + 4 + 32 + 64


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_our_own_work_is_not_that_of_others():
    before = measure._own_ticks()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert measure._own_ticks() - before >= 10  # of 1/100 s


def test_without_proc_nothing_is_known(monkeypatch):
    monkeypatch.setattr(measure, "_busy_seconds", lambda: None)
    with Bystanders() as bystanders:
        pass
    assert bystanders.other_cores is None


def fake_engine(max_num_seqs: int = 16, **options) -> LLMEngine:
    cost = StepCost(per_step_s=1.0, per_token_s=0.0)
    return LLMEngine(FakeRunner(cost=cost, **options), max_num_seqs=max_num_seqs)


def test_the_engine_is_timed_on_its_own_clock():
    timing = run_jobs(fake_engine(), [Job([1, 2, 3], 4), Job([4], 2)])
    assert timing.first_s == [1.0, 1.0]
    assert timing.last_s == [4.0, 2.0]
    assert timing.wall_s == 4.0
    assert [len(token_ids) for token_ids in timing.token_ids] == [4, 2]


def test_every_repetition_finds_an_empty_prefix_cache():
    cost = StepCost(per_step_s=0.0, per_token_s=1.0)
    engine = LLMEngine(FakeRunner(cost=cost))
    jobs = [Job(list(range(40)), 1)]
    assert run_jobs(engine, jobs).wall_s == run_jobs(engine, jobs).wall_s == 40.0


def test_a_request_that_fails_is_no_measurement():
    engine = fake_engine(num_blocks=1, block_size=4)
    with pytest.raises(MinivllmError, match="whole KV cache has 4 slots"):
        run_jobs(engine, [Job([1, 2], 8)])


# The machine.


def test_limits_come_from_the_weights(tmp_path):
    # Tied: the matrix is read once. Not tied: of the embedding, a few rows.
    sizes = {"vocab_size": 20, "hidden_size": 8}
    limits = Limits(read_bytes_per_s=1000.0, flops_per_s=1e9)
    for is_tied in (True, False):
        config = CONFIG | sizes | {"tie_word_embeddings": is_tied}
        spec = load_spec(write(tmp_path / str(is_tied), make_tensors(config), config))
        # Two layers: q and o 8 x 8, k and v 4 x 8, the MLP 3 x 8 x 12, two norms.
        layers = 2 * (2 * 64 + 2 * 32 + 3 * 96 + 2 * 8)
        assert weight_bytes(spec, 2) == 2 * (layers + 8 + 160)
        assert limits.decode_s(spec, 2) == weight_bytes(spec, 2) / 1000
        products = Limits(read_bytes_per_s=1e15, flops_per_s=100.0)
        assert products.prefill_s(spec, 2, 3) == 2 * (3 * layers + 160) / 100
        assert limits.prefill_s(spec, 2, 3) == limits.decode_s(spec, 2)


def test_limits_are_measured(monkeypatch):
    monkeypatch.setattr(machine, "BUDGET_S", 0.0)
    monkeypatch.setattr(machine, "READ_BYTES", 2**22)
    monkeypatch.setattr(machine, "MATRIX_SIZE", 256)
    limits = measure_limits("numpy", "float32")
    assert 1e7 < limits.read_bytes_per_s < 1e14
    assert 1e7 < limits.flops_per_s < 1e16


def test_the_line_of_the_machine_has_processor_and_versions():
    about = machine.describe_machine()
    line = machine.machine_line(about)
    assert line.startswith(f"{about['cpu']}, {about['cores']} cores")
    assert f"Python {sys.version.split()[0]}" in line and "NumPy" in line


# Reports.


def result_of(workload: str, num_quiet: int | None = 3, **metrics: Spread) -> Result:
    return Result(workload, metrics, 3, num_quiet, 3, 0.5)


W1 = result_of(
    "W1",
    mean_ttft_s=Spread(0.0871, 0.08, 0.09),
    decode_tok_s=Spread(62.44, 60, 63.06),
    output_tok_s=Spread(50, 40, 60),
)
W3 = result_of("W3", 1, wall_s=Spread(1234.4, 1, 2), output_tok_s=Spread(100, 90, 110))


def test_the_table_has_medians_ranges_and_shares():
    shares = {("W1", "decode_tok_s"): 0.4712}
    assert report.table([W1, W3], shares).splitlines() == [
        "                         median                   range  of limit",
        "W1  time to first token    87.1  ms        80.0 to 90.0",
        "W1  then                   62.4  tokens/s  60.0 to 63.1      0.47",
        "W3  until all are done    1,234  s         1.00 to 2.00",
    ]


def test_shares_are_shortest_over_measured_times(tmp_path):
    spec = load_spec(write(tmp_path, make_tensors()))
    limits = Limits(read_bytes_per_s=weight_bytes(spec, 4) * 100, flops_per_s=1e30)
    shares = report.shares_of_limits([W1, W3], limits, spec, "float32")
    assert shares == {
        ("W1", "mean_ttft_s"): pytest.approx(0.01 / 0.0871),
        ("W1", "decode_tok_s"): pytest.approx(0.6244),
    }


def test_disturbed_and_unknown_results_are_named():
    unknown = result_of("W2", None)
    lines = report.disturbances([W1, unknown, W3])
    assert len(lines) == 2
    assert lines[0].startswith("W2: whether") and "unknown" in lines[0]
    assert "W3: other processes disturbed 2 of 3 repetitions" in lines[1]


def test_bars_are_as_long_as_their_rates():
    lines = report.text_chart(report.bars_of([W1, W3])).splitlines()
    assert [line.count("█") for line in lines] == [20, 40]
    assert lines[0].startswith("W1      50.0 tokens/s  █")


def test_a_figure_has_the_labels(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "bars.svg"
    report.save_figure(path, report.bars_of([W1, W3]), "a title")
    text = path.read_text()
    assert all(f"<!-- {label} -->" in text for label in ("W1", "W3", "a title"))


def test_a_figure_without_matplotlib_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendUnavailable, match="pip install matplotlib"):
        report.check_matplotlib()


# The ladder.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of random weights that says many different things."""
    folder = tmp_path_factory.mktemp("tiny")
    config = CONFIG | {"vocab_size": 257, "max_position_embeddings": 128}
    write(folder, make_tensors(config), config)
    write_byte_tokenizer(folder, None)
    return folder


def test_every_rung_of_the_ladder_gives_the_same_answers(tiny):
    def make_engine() -> LLMEngine:
        runner, _ = build_runner(tiny, backend="numpy")
        return LLMEngine(runner, max_num_seqs=4)

    jobs = ladder_jobs(257)
    rungs = list(climb(lambda: load_model(tiny, backend="numpy"), make_engine, jobs, 1))
    assert [rung.name for rung in rungs] == [
        "naive generation",
        "KV cache",
        "static batch",
        "continuous batching",
    ]
    assert [rung.num_same for rung in rungs] == [8] * 4
    answers = cached(load_model(tiny, backend="numpy"), jobs)
    assert len({token for answer in answers for token in answer}) >= 10
    assert all(rung.rate.median > 0 and rung.num_jobs == 8 for rung in rungs)


def test_a_rung_with_other_answers_is_found_out():
    jobs = [Job([1], 2), Job([2], 1)]
    expected = [[5, 6], [7]]
    rung, answers = time_rung("x", lambda _: [[5, 0], [7]], jobs, 2, expected)
    assert (rung.num_same, rung.num_counted, answers) == (1, 2, [[5, 0], [7]])


def test_the_warm_up_of_a_rung_is_the_shortest_job():
    asked = []
    jobs = [Job([1], 2), Job([2], 1)]
    time_rung(
        "x", lambda j: asked.append(list(j)) or [[0] * n for _, n in j], jobs, 3, None
    )
    assert asked == [[jobs[1]], jobs, jobs, jobs]


# The comparison with other engines.


def test_equal_beginnings_are_counted():
    assert num_equal([1, 2, 3], [1, 2, 4]) == 2
    assert num_equal([1, 2], [1, 2]) == 2
    # The last prompt token is always computed.
    assert count_equal(Job([1, 2, 3, 4], 1), Job([1, 2, 3, 4], 1)) == 3
    assert count_equal(Job([1, 2, 3, 4], 1), Job([1, 9, 3, 4], 1)) == 1


def test_the_comparison_is_a_row_for_each_engine():
    about = {"version": "1", "dtype": "float32", "prefix_caching": True, "command": "c"}
    machine_record = {
        **{"engine": "machine", "workload": "limits", "threads": 2, "date": "today"},
        **{"read_gb_s": 35.6, "gemm_bfloat16_gflop_s": 431, "memory_gib": 16.0},
        **{"gemm_float32_gflop_s": 202, "cpu": "C", "cores": 2, "system": "Linux"},
        **{"python": "3.11", "torch": "2", "command": "m"},
    }
    records = [machine_record]
    for engine in ("a", "b"):
        records += [about | {"engine": engine} | W1.as_json()]
        records += [about | {"engine": engine} | W3.as_json()]
    text = table_script.table(records)
    rows = [line for line in text.splitlines() if line.startswith(("| a", "| b"))]
    assert len(rows) == 2
    assert "| 62.4<br>60.0 to 63.1 | - |" in rows[0] and "| 4 of 6 |" in rows[0]
    assert "reads 35.6 GB/s" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_every_job_of_the_comparison_has_its_runner():
    for _, command in JOBS.values():
        name = f"benchmarks.peers.{command.split()[0]}"
        assert importlib.util.find_spec(name)


# What sampling costs.


@pytest.fixture(scope="module")
def sampler_times(tmp_path_factory):
    config = CONFIG | {"vocab_size": 257, "max_position_embeddings": 256}
    folder = write(tmp_path_factory.mktemp("m"), make_tensors(config), config)
    write_byte_tokenizer(folder, None)
    runner, _ = build_runner(folder, backend="torch", device="cpu")
    engine = LLMEngine(runner, max_num_seqs=sampler.NUM_ROWS)
    return engine, *sampler.measure_sampler(engine, 1)


def test_every_set_of_parameters_is_measured_and_those_of_transformers(sampler_times):
    _, step_s, times = sampler_times
    assert step_s > 0 and all(row.median_s > 0 for row in times)
    assert [row.name for row in times] == [sampler.MIXED, *sampler.SAME_FOR_ALL]
    assert times[0].other_s is None, "it has one set of parameters for a batch"
    assert all(row.other_s > 0 for row in times[1:])
    assert times[1].as_json()["params"] == "greedy"


def test_the_table_shows_shares_of_a_step():
    rows = [
        sampler.SamplerTime("greedy", 0.002, 0.004),
        sampler.SamplerTime("mixed", 0.01),
    ]
    lines = sampler.sampler_table(0.1, rows).splitlines()
    assert "64 rows; a decode step at temperature 0 takes 100.0 ms" in lines[0]
    assert lines[2].split() == ["greedy", "2.0", "2.0%", "4.0"]
    assert lines[3].split() == ["mixed", "10.0", "10.0%", "-"]


def test_what_is_measured_is_what_the_engine_does(sampler_times):
    engine, _, _ = sampler_times
    step = sampler.DecodeStep(LLMEngine(engine.runner, max_num_seqs=3), num_rows=3)
    logits = step.logits()
    assert logits.shape == (3, 257)
    params = [sampler.mixed_params(number) for number in range(3)]
    requests = step.asking(params)
    assert [r.num_output_tokens for r in requests] == [100] * 3
    calls = []
    original = engine.runner._sample
    engine.runner._sample = lambda *args: calls.append(args) or original(*args)
    try:
        sampler.time_ours(engine.runner, logits, requests, 2)
    finally:
        del engine.runner._sample
    assert len(calls) == 3, "one that does not count, and two"
    assert calls[0][0] is logits and calls[0][1] is requests


def test_a_mixed_batch_has_all_kinds_of_parameters():
    kinds = {
        name for number in range(8) for name in sampler.mixed_params(number).given()
    }
    assert kinds >= {
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "logit_bias"),
        *("repetition_penalty", "presence_penalty", "min_tokens"),
    }
