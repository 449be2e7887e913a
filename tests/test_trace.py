"""The trace of an engine: the file, and the page that shows it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.cli.main import main
from minivllm.engine.engine import LLMEngine
from minivllm.engine.trace import TraceWriter, describe_engine, read_trace
from minivllm.errors import ConfigError, CorruptFile, RequestError
from minivllm.llm import LLM
from minivllm.runners.fake_runner import FakeRunner
from minivllm.sampling.params import SamplingParams
from minivllm.viewer.frames import after, num_blocks_of, viewer_data
from minivllm.viewer.page import page, summary
from tests.engine_tools import LedgerRunner

SYSTEM = list(range(9))  # two full blocks of 4


def make_engine(runner: FakeRunner | None = None, **options: Any) -> LLMEngine:
    runner = runner or FakeRunner(num_blocks=12, block_size=4, max_model_len=64)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 12}
    return LLMEngine(runner, **(limits | options))


def run_a_busy_day(engine: LLMEngine) -> None:
    """Prefix hits, chunks, preemptions, aborts, and a name that is used twice."""
    requests = {
        "A": ([*SYSTEM, 40, 41], 14),
        "B": ([*SYSTEM, 42], 12),
        "C": ([7, 8, 9], 20),
        "D": ([*range(20, 40)], 6),
    }
    for name, (prompt, max_tokens) in requests.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens))
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    engine.add_request("A", [*SYSTEM, 1, 2], SamplingParams(max_tokens=9))
    engine.step()
    engine.step()
    engine.abort_request("A")
    engine.add_request("A", SYSTEM, SamplingParams(max_tokens=2))
    engine.add_request("E", [3], SamplingParams(max_tokens=2))
    engine.abort_request("E")
    while engine.has_unfinished_requests():
        engine.step()


def record_of(engine: LLMEngine) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    engine.listeners.append(records.append)
    run_a_busy_day(engine)
    return records


def write_busy_day(path: Path) -> Path:
    engine = make_engine()
    engine.listeners.append(TraceWriter(path, describe_engine(engine, "a <b> model")))
    run_a_busy_day(engine)
    return path


def test_a_trace_has_a_header_and_every_record(tmp_path):
    engine = make_engine()
    writer = TraceWriter(tmp_path / "t.jsonl", describe_engine(engine, "some model"))
    engine.listeners.append(writer)
    records = record_of(engine)
    header, read = read_trace(tmp_path / "t.jsonl")
    assert header == {
        "minivllm_trace": 2,
        "model": "some model",
        "backend": "fake",
        "dtype": None,
        "vocab_size": 1000,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 12,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
        "policy": "mixed",
        "enable_prefix_caching": True,
    }
    assert read == records
    assert [record["step"] for record in read] == list(range(engine.num_steps))
    assert sum(len(record["preempted"]) for record in read) == 2
    assert sum(map(sum, (r["num_prefix_hits"].values() for r in read))) > 8


def test_a_line_is_in_the_file_as_soon_as_its_step_is_over(tmp_path):
    engine = make_engine()
    engine.listeners.append(TraceWriter(tmp_path / "t.jsonl", describe_engine(engine)))
    assert read_trace(tmp_path / "t.jsonl")[1] == []
    engine.add_request("A", [1, 2], SamplingParams(max_tokens=3))
    for number in range(1, 4):
        engine.step()
        assert len(read_trace(tmp_path / "t.jsonl")[1]) == number


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path):
    path = write_busy_day(tmp_path / "t.jsonl")
    content = path.read_bytes()
    whole = read_trace(path)[1]
    for missing in (1, 2, 100):
        path.write_bytes(content[:-missing])
        assert read_trace(path)[1] == whole[:-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line[:-5] + b"\n", "it is no JSON"),
        (lambda line: b"\xff\n", "it is no JSON"),
        (lambda line: b"[1]\n", "it holds no JSON object"),
        (lambda line: line.replace(b'"end_s"', b'"END"'), "its 'end_s' is missing"),
        (
            lambda line: re.sub(rb'"running":\[[^]]*\]', b'"running":7', line),
            "its 'running' is 7",
        ),
    ],
)
def test_a_damaged_line_is_named(
    tmp_path, change: Callable[[bytes], bytes], message: str
):
    path = write_busy_day(tmp_path / "t.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = change(lines[4])
    path.write_bytes(b"".join(lines))
    with pytest.raises(CorruptFile, match=f"line 5 of .*t.jsonl is damaged: {message}"):
        read_trace(path)


@pytest.mark.parametrize("content", [b"", b"\n", b'{"a": 1}\n', b"\x00\xff"])
def test_another_file_is_no_trace(tmp_path, content: bytes):
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(CorruptFile, match="is no trace"):
        read_trace(tmp_path / "t.jsonl")


def test_a_trace_of_another_version_is_refused(tmp_path):
    path = write_busy_day(tmp_path / "t.jsonl")
    path.write_bytes(path.read_bytes().replace(b'trace":2', b'trace":3', 1))
    with pytest.raises(ConfigError, match=r"has version 3 .* reads version 2"):
        read_trace(path)


def test_an_llm_records_its_steps(tmp_path):
    path = tmp_path / "t.jsonl"
    with LLM(backend="fake", trace=path, block_size=8) as llm:
        outputs = llm.generate([[1, 2], [3]], SamplingParams(max_tokens=3))
    header, records = read_trace(path)
    assert (header["backend"], header["block_size"]) == ("fake", 8)
    answers: dict[str, list[int]] = {}
    for record in records:
        for name, token_ids in record["sampled_token_ids"].items():
            answers.setdefault(name, []).extend(token_ids)
    assert [answers[o.request_id] for o in outputs] == [
        output.outputs[0].token_ids for output in outputs
    ]


def test_a_place_where_no_file_can_be_is_refused_before_the_model_is_loaded(tmp_path):
    for place, what in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "t", "not exist"),
    ):
        with pytest.raises(ConfigError, match=f"trace is .*{what}"):
            LLM("no such model", backend="numpy", trace=place)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_ends_the_trace_and_not_the_engine(caplog):
    engine = make_engine()
    engine.listeners.append(TraceWriter("/dev/full", describe_engine(engine)))
    run_a_busy_day(engine)
    assert engine.num_steps > 20
    messages = [record.message for record in caplog.records]
    assert [m for m in messages if m.startswith("the trace /dev/full ends here")]
    assert len(messages) == 1  # said once


def run_all_of(engine: LLMEngine, name: str) -> None:
    engine.add_request(name, [1, 2], SamplingParams(max_tokens=3))
    while engine.has_unfinished_requests():
        engine.step()


class Fold:
    """What the script of the page does with the changes, in Python."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.steps = iter(data["steps"])
        self.before: dict[str, Any] = {}
        self.queues: dict[str, list[int]] = {"w": [], "r": []}
        self.num_tokens = [n or 0 for n in data["prompts"]]
        self.num_computed = [0] * len(data["names"])
        self.tables: dict[int, list[int]] = {}
        self.cached: set[int] = set()

    def advance(self) -> dict[str, Any]:
        for number, count in self.before.get("s", ()):
            self.num_computed[number] += count
        for number, _ in self.before.get("o", ()):
            self.num_tokens[number] += 1
        now = self.before = next(self.steps)
        self.queues |= {key: now[key] for key in "wr" if key in now}
        self.num_tokens = self._corrected(self.num_tokens, now.get("n", ()))
        self.num_computed = self._corrected(self.num_computed, now.get("k", ()))
        for number, kept, *ids in now.get("b", ()):
            self.tables[number] = [*self.tables.get(number, [])[:kept], *ids]
        self.cached |= set(now.get("c", ()))
        self.cached -= set(now.get("u", ()))
        return now

    @staticmethod
    def _corrected(values: list[int], changes: list[list[int]]) -> list[int]:
        corrections = dict(changes)
        return [corrections.get(i, value) for i, value in enumerate(values)]

    def names(self, numbers: list[int]) -> list[str]:
        return [self.data["names"][number] for number in numbers]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_changes_fold_up_to_what_the_engine_had(enable_prefix_caching):
    runner = LedgerRunner(num_blocks=12, block_size=4, max_model_len=64)
    engine = make_engine(runner, enable_prefix_caching=enable_prefix_caching)
    known = []  # what the prefix cache knew when each step was planned
    schedule = engine.scheduler.schedule

    def watched(now: float) -> Any:
        plan = schedule(now)
        known.append(set(engine.scheduler.block_manager.key_of))
        return plan

    engine.scheduler.schedule = watched
    records = record_of(engine)
    assert [r for r in records if r["preempted"]]
    # A step fails that was to fill two blocks: the cache must not know them.
    engine.add_request("Y", range(30, 40), SamplingParams(max_tokens=3))
    runner.error = RuntimeError("out of memory")
    engine.step()
    assert records[-1]["finished"] == {"Y": "error"}
    run_all_of(engine, "Z")
    assert engine.scheduler.block_manager.reset_prefix_cache()
    run_all_of(engine, "W")

    fold = Fold(viewer_data({"block_size": 4}, records))
    assert fold.data["numBlocks"] == 12
    for record, cached in zip(records, known, strict=True):
        step = fold.advance()
        assert fold.names(fold.queues["w"]) == record["waiting"]
        assert fold.names(fold.queues["r"]) == record["running"]
        running = fold.queues["r"]
        for name, values in (
            ("num_tokens", fold.num_tokens),
            ("num_computed_tokens", fold.num_computed),
        ):
            assert [values[n] for n in running] == list(record[name].values())
        tables = {n: ids for n, ids in fold.tables.items() if ids}
        assert dict(zip(fold.names(list(tables)), tables.values(), strict=True)) == {
            name: ids for name, ids in record["block_ids"].items() if ids
        }
        assert fold.cached == cached
        assert len(fold.cached) == record["num_cached_blocks"]
        numbers = [number for number, _ in step.get("s", ())]
        assert fold.names(numbers) == list(record["num_scheduled_tokens"])
        counts = [count for _, count in step.get("s", ())]
        assert counts == list(record["num_scheduled_tokens"].values())
    fold.advance()  # the moment after the last step
    assert not any(fold.tables.values()) and not fold.queues["r"]


def test_every_request_ends_once_in_the_changes():
    data = viewer_data({"block_size": 4}, record_of(make_engine()))
    assert data["names"] == ["A", "B", "C", "D", "A", "A", "E"]
    finished = [pair for step in data["steps"] for pair in step.get("f", ())]
    assert sorted(finished) == [[n, "length"] for n in (0, 1, 2, 3, 5)]
    assert sorted(n for step in data["steps"] for n in step.get("x", ())) == [4, 6]
    assert [n for step in data["steps"] for n in step.get("a", ())] == list(range(7))


def test_a_trace_that_begins_in_the_middle_can_be_shown():
    records = record_of(make_engine())[5:]
    data = viewer_data({"block_size": 4}, records)
    assert data["prompts"][0] is None
    fold = Fold(data)
    for record in records:
        fold.advance()
        running = fold.queues["r"]
        assert [fold.num_tokens[n] for n in running] == list(
            record["num_tokens"].values()
        )


def test_the_page_holds_little_more_than_the_changes():
    engine = make_engine(FakeRunner(num_blocks=600), max_num_batched_tokens=256)
    records: list[dict[str, Any]] = []
    engine.listeners.append(records.append)
    for number in range(30):
        engine.add_request(
            str(number), range(number, 300 + number), SamplingParams(max_tokens=60)
        )
    while engine.has_unfinished_requests():
        engine.step()
    data = viewer_data({"block_size": 16}, records)
    num_compact, num_full = (len(json.dumps(x)) for x in (data["steps"], records))
    assert len(records) > 400 and num_compact < num_full / 6


def test_the_pool_is_as_large_as_its_blocks():
    for record in record_of(make_engine()):
        assert num_blocks_of(record) == 12
    assert after(record)["block_ids"] == {}


def test_a_summary_counts_what_happened():
    records = record_of(make_engine())
    data = viewer_data({"block_size": 4}, records)
    lines = summary({"model": "tiny"}, data).splitlines()
    assert re.fullmatch(r"tiny, \d+ steps in \d\.\d{3} s, 12 blocks of 4", lines[0])
    sampled = sum(len(record["sampled_token_ids"]) for record in records)
    assert lines[1].startswith(f"7 requests, {sampled} new tokens, 2 preemptions, ")
    assert "  B: 10 prompt tokens, 12 new, length" in lines
    assert "  E: 1 prompt tokens, 0 new, abort" in lines
    assert any(line.endswith("preempted 1x") for line in lines)


def test_nothing_to_show_is_said():
    with pytest.raises(RequestError, match="the trace has 0 steps"):
        viewer_data({"block_size": 4}, [])


def test_the_page_is_whole_and_hostile_names_stay_text():
    engine = make_engine()
    records: list[dict[str, Any]] = []
    engine.listeners.append(records.append)
    engine.add_request('</script><b>"', [1], SamplingParams(max_tokens=2))
    engine.step()
    data = viewer_data({"block_size": 4}, records)
    text = page(describe_engine(engine, "<b>"), data, title="<b>")
    assert "<b>" not in text.replace("<b>${block}</b>", "").replace("<b>${escape", "")
    assert text.count("</script>") == 1
    assert not re.search(r"https?:|//\w+\.|@import|src=|url\(", text)


def in_process(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_the_command_writes_a_page_beside_the_trace(tmp_path, capsys, monkeypatch):
    path = write_busy_day(tmp_path / "t.jsonl")
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    code, out, _ = in_process(capsys, "trace", str(path), "--open")
    assert code == 0 and f"the page is in {tmp_path / 't.html'}" in out
    assert "7 requests" in out
    assert opened == [(tmp_path / "t.html").as_uri()]
    html = (tmp_path / "t.html").read_text()
    assert html.startswith("<!doctype html>") and "a &lt;b&gt; model" in html
    other = str(tmp_path / "other.html")
    assert in_process(capsys, "trace", str(path), "--out", other)[0] == 0
    assert len(opened) == 1 and Path(other).read_text() == html


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    path = write_busy_day(tmp_path / "t.html")
    before = path.read_bytes()
    for arguments, message in (
        ((str(path),), "which the page would replace"),
        ((str(tmp_path / "none"),), "cannot read or write"),
        ((__file__,), "is no trace"),
        ((str(path), "--out", str(tmp_path / "no" / "x")), "cannot read or write"),
    ):
        code, _, error = in_process(capsys, "trace", *arguments)
        assert code == 1 and message in error and "Traceback" not in error
    assert path.read_bytes() == before
    assert in_process(capsys, "trace")[0] == 2


def test_neither_the_trace_nor_its_page_needs_an_array_library():
    code = "import minivllm.cli.trace, sys; print({'numpy', 'torch'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stderr
