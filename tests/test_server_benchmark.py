"""The benchmark of the server: its numbers by hand, and a whole run without a model."""

import argparse
import json

import pytest

from benchmarks import server as script
from benchmarks.server import (
    Row,
    check_packages,
    late_numbers,
    late_requests,
    main,
    requests_of,
    server_command,
    table,
    tokens_per_second,
)
from minivllm.benchmarks.load import RequestResult, Usage
from minivllm.errors import BackendUnavailable, MinivllmError

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")


def result(sent: float, shown: list[float], num_tokens: int) -> RequestResult:
    return RequestResult(
        arrival_s=sent,
        sent_s=sent,
        shown_s=shown,
        end_s=shown[-1],
        usage=Usage(64, num_tokens),
    )


# Two streams: a step takes 0.5 s. Both write from 1.0 to 3.0.
STREAMS = [
    result(0.0, [0.5, 1.0, 1.5, 2.0, 2.5, 3.0], 6),
    result(0.0, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], 6),
]
ALONE = [result(9.0, [9.2], 1), result(8.0, [8.3], 1), result(7.0, [7.1], 1)]


def test_a_late_request_is_compared_with_the_soonest_possible():
    late = [
        result(0.9, [1.5], 1),  # the second stream had not begun
        result(1.1, [2.0], 1),
        result(1.7, [2.5], 1),
        result(2.9, [3.1], 1),  # the first stream had ended
    ]
    assert late_numbers(ALONE, [*STREAMS, *late]) == pytest.approx(
        {
            "alone_ms": 200.0,
            "step_ms": 500.0,
            "allowed_ms": 1200.0,
            "ttft_ms": 850.0,
            "worst_ttft_ms": 900.0,
            "num_late": 2,
        }
    )


def test_late_requests_that_all_came_at_the_wrong_time_are_no_result():
    with pytest.raises(MinivllmError, match=r"from second 1\.0 to 3\.0"):
        late_numbers(ALONE, [*STREAMS, result(0.9, [1.5], 1)])


def test_tokens_are_counted_from_the_first_sending_to_the_last_end():
    assert tokens_per_second(STREAMS) == 12 / 3.5


def test_no_request_begins_like_another_one():
    requests = [*requests_of(3, (64, 5)), *late_requests()]
    assert len({tuple(request.prompt[:16]) for request in requests}) == len(requests)
    assert [len(r.prompt) for r in requests[:4]] == [64, 64, 64, 32]
    assert requests[0].max_tokens == 5 and requests[-1].max_tokens == 1
    times = [request.arrival_s for request in requests]
    assert times[:3] == [0.0] * 3 and 0.0 < times[3] < times[4] < times[-1]


def test_a_row_has_medians_and_ranges():
    tries = [{"loss": 0.25, "rss": None}, {"loss": 0.5, "rss": 1.0}]
    row = Row("idle", "plain", [*tries, {"loss": -0.5, "rss": 2.0}], [0.0, 0.5, 0.1])
    assert row.as_json() == {
        **{"question": "idle", "stack": "plain", "reps": 3, "quiet": 2},
        **{"loss": [0.25, -0.5, 0.5], "rss": None},
    }
    row.other_cores[0] = None
    assert row.num_quiet() is None


def test_a_stack_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    check_packages(["plain"])
    with pytest.raises(BackendUnavailable, match="pip install uvloop, or"):
        check_packages(["plain", "fast"])


def test_the_plain_stack_hides_what_the_fast_one_takes():
    arguments = argparse.Namespace(model="m", backend="fake")
    plain, fast = (server_command(s, 8000, arguments) for s in ("plain", "fast"))
    assert "fromkeys(('uvloop',))" in plain[2] and "fromkeys(())" in fast[2]
    assert plain[3:] == fast[3:]
    assert plain[plain.index("--threads") + 1] == "1"


def test_a_whole_run_writes_its_numbers_and_their_table(tmp_path, monkeypatch, capsys):
    for library in ("OMP", "OPENBLAS", "MKL"):
        monkeypatch.setenv(f"{library}_NUM_THREADS", "1")  # so that it is undone
    path = tmp_path / "server.json"
    options = "--backend fake --stacks plain --reps 2 --streams 3 --idle 4"
    options += " --only memory throughput idle"
    assert main([*options.split(), "--out", str(path)]) == 0
    record = json.loads(path.read_text())
    rows = {row["question"]: row for row in record["rows"]}
    assert [row["reps"] for row in rows.values()] == [1, 2, 2]
    assert rows["idle"]["num_open"] == [4.0, 4.0, 4.0]
    assert rows["memory"]["rss_mib"] is None or rows["memory"]["rss_mib"][0] > 10
    median, least, greatest = rows["throughput"]["http_tok_s"]
    assert 0 < least <= median <= greatest
    page = path.with_suffix(".md").read_text()
    assert page == table(record) + "\n" == capsys.readouterr().out
    assert "3 streams, 4 guests" in page and "| asyncio | " in page
    assert "late" not in rows and "worst_ttft_ms" not in page


def test_a_server_that_does_not_start_is_told(tmp_path, monkeypatch, capsys):
    for library in ("OMP", "OPENBLAS", "MKL"):
        monkeypatch.setenv(f"{library}_NUM_THREADS", "1")
    options = ["--model", str(tmp_path / "nothing"), "--stacks", "plain", "--reps", "1"]
    assert main(options) == 1
    assert "the server has ended with exit code 1" in capsys.readouterr().err
