"""Load: when requests are sent, what is noted, and how it is summed up."""

import asyncio
import json
import random
import socket
from dataclasses import replace

import pytest

from minivllm.benchmarks.distribution import Distribution, percentile
from minivllm.benchmarks.laboratory import LaboratorySender, run_in_virtual_time
from minivllm.benchmarks.load import (
    LoadRequest,
    Piece,
    RequestFailed,
    RequestResult,
    Usage,
    poisson_arrivals,
    run_load,
)
from minivllm.benchmarks.load_report import (
    load_record,
    load_table,
    save_load_figure,
    summarise_load,
)
from minivllm.benchmarks.load_requests import (
    WORDS,
    PromptMaker,
    random_requests,
    recorded_requests,
)
from minivllm.engine.engine import LLMEngine
from minivllm.engine.metrics import EngineMetrics
from minivllm.errors import ConfigError, RequestError
from minivllm.runners.fake_runner import FakeRunner, StepCost
from tests.engine_tools import assert_all_free


class ScriptedSender:
    """Answers after the times that a request's prompt names, in virtual time."""

    def __init__(self) -> None:
        self.num_running = self.most_running = 0

    async def send(self, request: LoadRequest):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            for step in request.prompt:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.num_running -= 1


SHOWN = Piece(True)


def script(*steps, arrival_s: float = 0.0) -> LoadRequest:
    return LoadRequest(prompt=list(steps), max_tokens=1, arrival_s=arrival_s)


def play(*requests: LoadRequest, **options) -> list[RequestResult]:
    return run_in_virtual_time(run_load(ScriptedSender(), requests, **options))


def test_each_latency_is_what_its_name_says():
    usage = Usage(7, 5)
    [result] = play(
        script(0.5, SHOWN, 1.0, SHOWN, 0.25, Piece(False), 0.25, Piece(False, usage))
    )
    assert (result.sent_s, result.end_s) == (0.0, 2.0)
    assert result.ttft_s == 0.5
    assert result.itl_s == [1.0]
    assert result.e2el_s == 2.0
    # Five tokens came in two pieces and without a trace: 4 after the first, in 1.5 s.
    assert result.tpot_s == 1.5 / 4
    assert (result.usage, result.error_kind) == (usage, None)


def test_without_counts_each_piece_is_a_token():
    [result] = play(script(0.5, SHOWN, 1.0, SHOWN, 1.0, SHOWN))
    assert (result.tpot_s, result.usage) == (1.0, None)


def test_of_two_tokens_one_is_the_other():
    [counted] = play(script(0.5, SHOWN, 1.0, Piece(True, Usage(3, 2))))
    [uncounted] = play(script(0.5, SHOWN, 1.0, SHOWN))
    assert (counted.tpot_s, uncounted.tpot_s) == (1.0, 1.0)


def test_the_last_count_is_kept():
    [result] = play(script(Piece(True, Usage(3, 1)), Piece(True, Usage(3, 2)), SHOWN))
    assert result.usage == Usage(3, 2)


def test_one_token_has_no_time_per_other_token():
    [result] = play(script(0.5, SHOWN, Piece(False, Usage(3, 1))))
    assert (result.ttft_s, result.tpot_s, result.itl_s) == (0.5, None, [])


def test_an_answer_that_shows_nothing_takes_until_its_end():
    for num_tokens in (1, 5):
        [result] = play(script(0.5, Piece(False, Usage(3, num_tokens))))
        assert (result.ttft_s, result.tpot_s, result.e2el_s) == (0.5, None, 0.5)


def test_times_count_from_the_start_and_not_from_that_of_the_clock():
    async def main() -> list[RequestResult]:
        await asyncio.sleep(64.0)
        request = script(0.5, SHOWN, 0.25, arrival_s=2.0)
        return await run_load(ScriptedSender(), [request])

    [result] = run_in_virtual_time(main())
    assert (result.arrival_s, result.sent_s) == (2.0, 2.0)
    assert (result.shown_s, result.end_s) == ([2.5], 2.75)


def test_a_slow_server_does_not_slow_the_arrivals():
    requests = [script(60.0, SHOWN, arrival_s=0.25 * index) for index in range(8)]
    results = play(*requests)
    assert [result.sent_s for result in results] == [0.25 * i for i in range(8)]
    assert {result.late_s for result in results} == {0.0}
    assert summarise_load(results).max_concurrency == 8


def test_requests_may_stand_in_any_order():
    results = play(script(SHOWN, arrival_s=2.0), script(SHOWN, arrival_s=1.0))
    assert [result.sent_s for result in results] == [1.0, 2.0]


def test_a_limit_keeps_requests_back_and_says_how_long():
    sender = ScriptedSender()
    requests = [script(1.0, SHOWN) for _ in range(5)]
    results = run_in_virtual_time(run_load(sender, requests, max_concurrency=2))
    assert sender.most_running == 2
    assert [result.late_s for result in results] == [0.0, 0.0, 1.0, 1.0, 2.0]
    assert {result.ttft_s for result in results} == {1.0}
    assert {result.e2el_s for result in results} == {1.0}


def test_a_failure_ends_its_own_request_only():
    failed = RequestFailed("HTTP 429", "too many")
    wrong = RequestError("impossible")
    first, second, third = play(
        script(1.0, SHOWN, failed), script(2.0, wrong), script(3.0, SHOWN)
    )
    assert (first.error_kind, first.error) == ("HTTP 429", "HTTP 429: too many")
    assert (first.shown_s, first.end_s) == ([1.0], 1.0)
    assert (second.error_kind, second.error) == ("RequestError", "impossible")
    assert third.error_kind is None


def test_what_is_cut_short_is_told_all_the_same():
    noted = []

    async def main() -> None:
        requests = [
            *(script(1.0, SHOWN), script(1.0, SHOWN, 9.0), script(1.0, SHOWN)),
            script(1.0, SHOWN, arrival_s=50.0),
        ]
        load = run_load(
            ScriptedSender(), requests, max_concurrency=2, note=noted.append
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(load, 1.5)

    run_in_virtual_time(main())
    assert noted[0].error_kind is None  # the other two in any order
    assert {r.error_kind for r in noted[1:]} == {"interrupted"}
    assert {r.sent_s for r in noted[1:]} == {0.0, 1.0} and len(noted) == 3


def test_who_was_never_sent_is_interrupted_too():
    noted = []

    async def main() -> None:
        load = run_load(
            ScriptedSender(),
            [script(9.0), script(9.0)],
            max_concurrency=1,
            note=noted.append,
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(load, 1.0)

    run_in_virtual_time(main())
    assert {(r.sent_s, r.end_s) for r in noted} == {(0.0, 1.0), (None, 1.0)}
    summary = summarise_load(noted)
    assert (summary.num_completed, summary.errors) == (0, {"interrupted": 2})
    assert "2 failed: interrupted" in load_table(summary)


def test_a_mistake_of_ours_is_not_counted_but_raised():
    with pytest.raises(ExceptionGroup) as caught:
        play(script(1.0, ZeroDivisionError()), script(2.0, SHOWN))
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)


# Arrivals.


def test_arrivals_have_the_rate_that_was_asked_for():
    times = poisson_arrivals(4.0, 1000, seed=1)
    assert times == sorted(times) and len(times) == 1000
    assert times[-1] == pytest.approx(250.0)
    gaps = [later - sooner for sooner, later in zip([0.0, *times], times, strict=False)]
    # Of exponential gaps, as many as e^-1 are longer than their mean, and the standard
    # deviation is the mean. Seed 1 and others give it within 5 %.
    assert sum(gap > 0.25 for gap in gaps) / 1000 == pytest.approx(0.368, rel=0.1)
    variance = sum((gap - 0.25) ** 2 for gap in gaps) / 1000
    assert variance**0.5 == pytest.approx(0.25, rel=0.1)


def test_arrivals_by_hand():
    draw = random.Random(7)
    first, second, third = (draw.expovariate(1.0) for _ in range(3))
    total = first + second + third
    # Three at 2 per second: the last one is due at 1.5.
    expected = [1.5 * first / total, 1.5 * (first + second) / total, 1.5]
    assert poisson_arrivals(2.0, 3, seed=7) == pytest.approx(expected, rel=1e-12)
    assert poisson_arrivals(2.0, 1, seed=7) == pytest.approx([0.5])


def test_a_seed_gives_one_pattern_at_every_rate():
    slow, fast = (poisson_arrivals(rate, 20, seed=3) for rate in (1.0, 4.0))
    assert [when / 4 for when in slow] == pytest.approx(fast)
    assert poisson_arrivals(1.0, 20, seed=4) != slow
    assert poisson_arrivals(float("inf"), 3, seed=3) == [0.0, 0.0, 0.0]


# Sums.


def test_percentiles_by_hand():
    values = [40.0, 10.0, 30.0, 20.0]  # in order at 0, 1/3, 2/3, 1
    assert percentile(values, 0.0) == 10.0
    assert percentile(values, 0.5) == 25.0
    assert percentile(values, 0.9) == pytest.approx(37.0)  # 2.7 gaps of 3
    assert percentile(values, 1.0) == 40.0
    assert percentile([7.0], 0.99) == 7.0
    assert Distribution.of(values).mean == 25.0
    assert Distribution.of([]) is None


def result(
    sent: float, first: float, end: float, num_tokens: int = 11, **more
) -> RequestResult:
    return RequestResult(
        arrival_s=sent,
        sent_s=sent,
        shown_s=[first],
        end_s=end,
        usage=Usage(100, num_tokens),
        **more,
    )


FOUR = [
    result(0.0, 0.2, 1.2),  # TTFT 200 ms, TPOT 100 ms, E2EL 1,200 ms
    result(1.0, 3.0, 4.0),  # 2,000, 100, 3,000: late
    result(2.0, 2.1, 5.0),  # 100, 290, 3,000: slow
    result(3.0, 3.1, 3.5, error_kind="HTTP 500", error="HTTP 500: it broke"),
]


def test_a_summary_by_hand():
    summary = summarise_load(FOUR, {"ttft": 200.0, "tpot": 100.0})
    assert (summary.num_requests, summary.num_completed) == (4, 3)
    assert summary.errors == {"HTTP 500": 1}
    assert (summary.duration_s, summary.last_arrival_s) == (5.0, 3.0)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (300, 33)
    assert summary.spreads_ms["ttft"].median == pytest.approx(200.0)
    assert summary.spreads_ms["tpot"].max == pytest.approx(290.0)
    assert summary.spreads_ms["e2el"].mean == pytest.approx(2400.0)
    assert "itl" not in summary.spreads_ms
    # On the way: 1.2 + 3 + 3 + 0.5 seconds of 5; from 3.0 to 3.5 three of them.
    assert summary.mean_concurrency == pytest.approx(7.7 / 5)
    assert summary.max_concurrency == 3
    assert summary.num_good == 1  # at its limits to the millisecond
    assert summary.rate(summary.num_good) == 0.2


@pytest.mark.parametrize(
    ("slo_ms", "num_good"),
    [
        ({}, 3),
        ({"ttft": 199.0}, 1),
        ({"ttft": 2000.1}, 3),
        ({"tpot": 100.1}, 2),
        ({"e2el": 1200.0}, 1),
        ({"ttft": 100.1, "tpot": 100.1}, 0),
    ],
)
def test_goodput_counts_who_kept_all_promises(slo_ms, num_good):
    assert summarise_load(FOUR, slo_ms).num_good == num_good


def test_one_token_cannot_break_the_promise_of_others():
    assert summarise_load([result(0.0, 0.1, 0.1, 1)], {"tpot": 1.0}).num_good == 1


def test_the_table_hides_no_failure():
    table = load_table(summarise_load(FOUR, {"ttft": 200.0}))
    assert table.startswith("4 requests in 5.00 s: 3 completed, 1 failed\n")
    assert "  1 failed: HTTP 500: it broke" in table
    assert "came 1.33 per second, completed 0.60 per second" in table
    assert "1.5 on average, 3 at most" in table
    assert "goodput: 0.40 per second, 2 requests with ttft 200 ms at most" in table
    assert "300 in, 33 out; 6.6 new ones per second, 66.6 with prompts" in table
    [row] = [line.split() for line in table.splitlines() if line.startswith("TTFT")]
    assert row[-5:] == ["766.7", "200.0", "1,640.0", "1,964.0", "2,000.0"]
    assert "kept back" not in table and "count tokens" not in table


def test_requests_without_counts_count_their_pieces():
    uncounted = replace(FOUR[0], shown_s=[0.2, 0.4], usage=None)
    summary = summarise_load([uncounted, FOUR[1]])
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (100, 13)
    assert not summary.are_counted and summarise_load(FOUR).are_counted


def test_a_request_that_failed_has_a_kind_and_no_latencies():
    failed = replace(FOUR[3], shown_s=[3.1, 3.2, 3.3], usage=None)
    summary = summarise_load([*FOUR[:3], failed])
    assert summary.examples == {"HTTP 500": "HTTP 500: it broke"}
    assert "itl" not in summary.spreads_ms and summary.are_counted
    assert summary.spreads_ms["ttft"].max == pytest.approx(2000.0)


def test_a_request_is_on_the_way_from_its_sending_on():
    kept_back = replace(result(1.0, 1.5, 2.0), arrival_s=0.0)
    never_sent = replace(FOUR[3], sent_s=None, shown_s=[], end_s=2.5)
    summary = summarise_load(
        [result(0.0, 0.5, 1.0), kept_back, never_sent, result(2.0, 3.0, 4.0)]
    )
    assert (summary.mean_concurrency, summary.max_concurrency) == (1.0, 1)
    summary = summarise_load([result(0.0, 1.0, 4.0), never_sent, result(3.0, 3.5, 4.0)])
    assert summary.max_concurrency == 2


def test_a_table_by_hand():
    often, once = "HTTP 429", "time-out"
    results = [
        RequestResult(
            arrival_s=0.0,
            sent_s=0.0,
            shown_s=[0.1, 0.2, 0.4],
            end_s=0.4,
            usage=Usage(1000, 3),
        ),
        result(0.5, 0.7, 1.0, 2),
        result(0.5, 0.6, 0.6, error_kind=once, error="time-out: too long"),
        result(0.5, 0.6, 2.0, error_kind=often, error="HTTP 429: first"),
        result(0.8, 0.9, 0.9, error_kind=often, error="HTTP 429: second"),
    ]
    summary = summarise_load(results, {"ttft": 150.0, "e2el": 1000.0})
    # Inside: 0.4 + 0.5 + 0.1 + 1.5 + 0.1 seconds of 2.
    *lines, header, ttft, tpot, itl, e2el = load_table(summary).splitlines()
    assert lines == [
        "5 requests in 2.00 s: 2 completed, 3 failed",
        "  2 failed: HTTP 429: first",
        "  1 failed: time-out: too long",
        "requests: came 6.25 per second, completed 1.00 per second; on the way at the "
        "same time: 1.3 on average, 3 at most",
        "goodput: 0.50 per second, 1 requests with ttft 150 ms, e2el 1000 ms at most",
        "tokens: 1,100 in, 5 out; 2.5 new ones per second, 552.5 with prompts",
        "",
    ]
    columns = "       mean     median        P90        P99        max"
    assert header == f"{'milliseconds':26}{columns}"
    values = "      150.0      150.0      190.0      199.0      200.0"
    assert ttft == f"{'TTFT, to the first token':26}{values}"
    assert itl == f"{'ITL, between pieces':26}{values}"
    values = "      225.0      225.0      285.0      298.5      300.0"
    assert tpot == f"{'TPOT, per other token':26}{values}"
    values = "      450.0      450.0      490.0      499.0      500.0"
    assert e2el == f"{'E2EL, to the end':26}{values}"


@pytest.mark.parametrize(("late_s", "is_told"), [(0.005, False), (0.006, True)])
def test_a_client_that_is_late_has_measured_itself(late_s, is_told):
    table = load_table(summarise_load([replace(FOUR[0], arrival_s=-late_s)]))
    assert ("\nkept back by the client  " in table) == is_told


def test_one_late_request_of_twenty_is_told():
    late = replace(FOUR[0], arrival_s=-1.0)
    assert "kept back" in load_table(summarise_load([late, *[FOUR[0]] * 19]))


def test_the_table_shows_what_is_quick():
    quick = result(0.0, 0.001, 0.012)
    rows = load_table(summarise_load([quick])).splitlines()[-3:]
    assert [row.split()[-1] for row in rows] == ["1.0", "1.1", "12.0"]


def test_the_table_shows_a_late_client_if_nothing_else():
    late = replace(FOUR[3], arrival_s=-1.0)
    row = load_table(summarise_load([late])).splitlines()[-1]
    assert row.split()[-1] == "4,000.0"


def test_the_table_says_when_the_client_was_late_or_counted_itself():
    late = replace(FOUR[0], arrival_s=-0.5, usage=None)
    table = load_table(summarise_load([late]))
    [row] = [line.split() for line in table.splitlines() if line.startswith("kept")]
    assert row[-1] == "500.0"
    assert "each piece of an answer counts as one" in table


def test_nothing_at_all_can_be_summed_up():
    summary = summarise_load([])
    assert (summary.num_requests, summary.num_completed, summary.num_good) == (0, 0, 0)
    assert (summary.duration_s, summary.last_arrival_s) == (0.0, 0.0)
    assert (summary.mean_concurrency, summary.max_concurrency) == (0.0, 0)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (0, 0)
    assert (summary.errors, summary.spreads_ms, summary.rate(5)) == ({}, {}, 0.0)
    assert load_table(summary).splitlines() == [
        "0 requests in 0.00 s: 0 completed, 0 failed",
        "requests: came all at once, completed 0.00 per second; on the way at the same "
        "time: 0.0 on average, 0 at most",
        "tokens: 0 in, 0 out; 0.0 new ones per second, 0.0 with prompts",
    ]


def test_a_record_is_json_and_has_the_names_of_vllm():
    record = load_record(summarise_load(FOUR), FOUR)
    record = json.loads(json.dumps(record, allow_nan=False))
    requests = record.pop("requests")
    latencies = {name: record.pop(name) for name in list(record) if "_ms" in name}
    assert record == {
        **{"duration": 5.0, "completed": 3, "failed": 1, "errors": {"HTTP 500": 1}},
        **{"total_input_tokens": 300, "total_output_tokens": 33},
        **{"request_throughput": 0.6, "request_goodput": None},
        **{"output_throughput": 6.6, "total_token_throughput": 66.6},
        "mean_concurrent_requests": pytest.approx(1.54),
        "max_concurrent_requests": 3,
    }
    assert len(latencies) == 4 * 5  # no request has an ITL
    assert latencies["p99_ttft_ms"] == pytest.approx(1964.0)
    assert latencies["mean_e2el_ms"] == pytest.approx(2400.0)
    assert latencies["median_tpot_ms"] == pytest.approx(100.0)
    assert latencies["max_late_ms"] == 0.0
    assert requests[3] == {
        **{"arrival_s": 3.0, "sent_s": 3.0, "shown_s": [3.1], "end_s": 3.5},
        "usage": {"num_prompt_tokens": 100, "num_output_tokens": 11},
        **{"error_kind": "HTTP 500", "error": "HTTP 500: it broke"},
    }
    kept = load_record(summarise_load(FOUR, {"ttft": 200.0}), FOUR)
    assert kept["request_goodput"] == 0.4
    uncounted = replace(FOUR[0], usage=None)
    assert (
        load_record(summarise_load(FOUR), [uncounted])["requests"][0]["usage"] is None
    )


@pytest.fixture
def drawn(monkeypatch):
    """Return a function that draws, and returns the axes instead of a file."""
    Figure = pytest.importorskip("matplotlib.figure").Figure
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: figures.append(self))

    def draw(results, slo_ms=None):
        save_load_figure("nowhere.svg", results, "A title", slo_ms)
        return figures.pop().axes

    return draw


def test_a_figure_shows_when_each_request_waited_wrote_and_failed(drawn):
    from matplotlib.colors import to_hex

    unsent = replace(FOUR[3], sent_s=None)
    kept_back = replace(FOUR[3], arrival_s=0.5)  # until 3.0
    lines, _ = drawn([FOUR[2], unsent, kept_back, FOUR[0], FOUR[1]])
    waits, writes = lines.collections
    spans = {
        part.get_label(): [
            (float(start[0]), float(stop[0]), int(stop[1]))
            for start, stop in part.get_segments()
        ]
        for part in (waits, writes)
    }
    assert spans == {  # from, to, row: in the order of their arrivals
        "waits": [(0.0, 0.2, 0), (3.0, 3.1, 1), (1.0, 3.0, 2), (2.0, 2.1, 3)],
        "writes": [(0.2, 1.2, 0), (3.1, 3.5, 1), (3.0, 4.0, 2), (2.1, 5.0, 3)],
    }
    [cross] = lines.lines
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([3.5], [1])
    colors = [to_hex(c) for c in (waits.get_color()[0], writes.get_color()[0])]
    assert len({*colors, to_hex(cross.get_color())}) == 3
    texts = [text.get_text() for text in lines.get_legend().get_texts()]
    assert texts == ["waits", "writes", "fails"]
    assert lines.yaxis_inverted() and lines.get_title() == "A title"
    assert (lines.get_xlabel(), lines.get_ylabel()) == ("seconds", "request")
    assert not drawn(FOUR[:3])[0].lines  # nobody failed


def test_a_figure_shows_how_latencies_are_spread(drawn):
    from matplotlib.colors import to_hex

    one_token = result(4.0, 4.4, 4.4, 1)  # it has no TPOT
    lines, shares = drawn([*FOUR, one_token], {"tpot": 150.0, "ttft": 250.0})
    ttft, first_limit, tpot, limit = shares.lines
    thirds = [1 / 3, 2 / 3, 1.0]
    assert (ttft.get_label(), tpot.get_label()) == ("TTFT", "TPOT")
    assert list(ttft.get_xdata()) == pytest.approx([100.0, 200.0, 400.0, 2000.0])
    assert list(ttft.get_ydata()) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert list(tpot.get_xdata()) == pytest.approx([100.0, 100.0, 290.0])
    assert list(tpot.get_ydata()) == pytest.approx(thirds)
    assert {ttft.get_drawstyle(), tpot.get_drawstyle()} == {"steps-post"}
    assert (list(limit.get_xdata()), limit.get_linestyle()) == ([150.0, 150.0], ":")
    assert to_hex(limit.get_color()) == to_hex(tpot.get_color())
    assert to_hex(first_limit.get_color()) == to_hex(ttft.get_color())
    assert list(first_limit.get_xdata()) == [250.0, 250.0]
    # What waits above is TTFT below, and what writes is TPOT.
    waits, writes = (to_hex(part.get_color()[0]) for part in lines.collections)
    assert waits != writes
    assert (waits, writes) == (to_hex(ttft.get_color()), to_hex(tpot.get_color()))
    texts = [text.get_text() for text in shares.get_legend().get_texts()]
    assert texts == ["TTFT", "TPOT"] and shares.get_xscale() == "log"
    assert shares.get_xlabel().startswith("milliseconds")
    assert shares.get_ylabel() == "share of requests below"


def test_a_figure_is_drawn_of_anything(tmp_path):
    pytest.importorskip("matplotlib")
    unsent = replace(FOUR[3], sent_s=None)
    for name, results in {"all": [*FOUR, unsent], "none": []}.items():
        path = tmp_path / f"{name}.svg"
        save_load_figure(path, results, "A title", {"ttft": 200.0})
        assert "<svg" in path.read_text()


# What is sent.


def test_made_up_prompts_have_their_lengths_and_share_their_prefix():
    maker = PromptMaker(prefix_len=16, vocab_size=300, seed=5)
    first, second = random_requests(maker, 2, input_len=32, output_len=9)
    assert len(first.prompt) == len(second.prompt) == 48
    assert first.prompt[:16] == second.prompt[:16]
    assert first.prompt[16:] != second.prompt[16:]
    assert all(100 <= token_id < 300 for token_id in first.prompt)
    assert (first.max_tokens, first.arrival_s) == (9, 0.0)
    again = random_requests(maker, 1, input_len=32, output_len=9)
    assert again == [first]
    other = PromptMaker(prefix_len=16, vocab_size=300, seed=6)
    assert random_requests(other, 1, 32, 9)[0].prompt[:16] != first.prompt[:16]


def test_made_up_text_has_as_many_words():
    maker = PromptMaker(as_text=True, prefix_len=3)
    first, second = random_requests(maker, 2, input_len=4, output_len=9)
    assert len(first.prompt.split()) == 7
    assert first.prompt.split()[:3] == second.prompt.split()[:3]
    assert set(first.prompt.split(" ")) <= set(WORDS)


def recording(tmp_path, *lines: str):
    path = tmp_path / "arrivals.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_recording_is_read(tmp_path):
    path = recording(
        tmp_path,
        '{"arrival_s": 0.25, "num_prompt_tokens": 3, "max_tokens": 44}',
        "",
        '{"prompt": "Why?"}',
        '{"prompt_token_ids": [5, 6]}',
    )
    made, text, ids = recorded_requests(path, PromptMaker(), 7, "completions")
    assert (len(made.prompt), made.max_tokens, made.arrival_s) == (3, 44, 0.25)
    assert text == LoadRequest(prompt="Why?", max_tokens=7)
    assert ids == LoadRequest(prompt=[5, 6], max_tokens=7)
    least = '{"num_prompt_tokens": 1, "max_tokens": 1, "arrival_s": 0}'
    [small] = recorded_requests(
        recording(tmp_path, least), PromptMaker(), 7, "completions"
    )
    assert (len(small.prompt), small.max_tokens, small.arrival_s) == (1, 1, 0)
    messages = '{"messages": [{"role": "user", "content": "Why?"}]}'
    path = recording(tmp_path, messages)
    [chat] = recorded_requests(path, PromptMaker(), 7, "chat")
    assert chat.prompt == [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is no JSON"),
        ("3", "3 is no object"),
        ("{}", "it has none of prompt, messages, prompt_token_ids, num_prompt_tokens"),
        (
            '{"prompt": "x", "num_prompt_tokens": 3}',
            "it has ['prompt', 'num_prompt_tokens'] of prompt, messages, ",
        ),
        ('{"promt": "x"}', "unknown field 'promt'"),
        ('{"prompt": 3}', "prompt is 3"),
        ('{"num_prompt_tokens": 0}', "num_prompt_tokens is 0, but must be an integer"),
        ('{"num_prompt_tokens": true}', "num_prompt_tokens is True"),
        ('{"prompt": "x", "max_tokens": 1.5}', "max_tokens is 1.5"),
        ('{"prompt": "x", "arrival_s": -1}', "arrival_s is -1, but must be seconds"),
        ('{"prompt": "x", "arrival_s": NaN}', "arrival_s is nan"),
        ('{"prompt": "x", "arrival_s": Infinity}', "arrival_s is inf"),
        ('{"prompt": "x", "arrival_s": "1"}', "arrival_s is '1'"),
        ('{"prompt": "x", "arrival_s": true}', "arrival_s is True"),
        ("[" * 10**5, "is no JSON"),
        ('{"messages": []}', "messages cannot be sent to completions: use --endpoint"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path, line, message):
    path = recording(tmp_path, '{"prompt": "x"}', line)
    with pytest.raises(ConfigError, match="line 2") as caught:
        recorded_requests(path, PromptMaker(), 7, "completions")
    assert message in str(caught.value)


def test_token_ids_are_no_chat(tmp_path):
    path = recording(tmp_path, '{"prompt_token_ids": [5]}')
    with pytest.raises(
        ConfigError, match="cannot be sent to chat: use --endpoint comp"
    ):
        recorded_requests(path, PromptMaker(), 7, "chat")


def test_prompts_are_made_up_with_seed_0_and_without_a_prefix():
    assert PromptMaker() == PromptMaker(as_text=False, prefix_len=0, seed=0)


def test_a_recording_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no requests"):
        recorded_requests(recording(tmp_path, ""), PromptMaker(), 7, "chat")


# The laboratory.


def test_an_hour_passes_in_no_time():
    async def main() -> float:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == pytest.approx(3600.0)


def test_tasks_that_wait_for_nothing_are_told():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="none would wake"):
        run_in_virtual_time(main())


def test_what_is_ready_is_not_waited_for():
    async def main() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(b"x")
            came = asyncio.Event()
            asyncio.get_running_loop().add_reader(ours, came.set)
            await came.wait()  # no task waits for a time, but this one has news
            asyncio.get_running_loop().remove_reader(ours)
            return ours.recv(1)

    assert run_in_virtual_time(main()) == b"x"


def laboratory(**options) -> LLMEngine:
    cost = StepCost(per_step_s=1.0, per_token_s=0.01)
    return LLMEngine(FakeRunner(cost=cost, num_blocks=64), **options)


def test_load_on_an_engine_has_the_times_that_the_engine_has_itself():
    engine = laboratory(max_num_seqs=2)
    records = []
    engine.listeners.append(records.append)
    requests = [
        LoadRequest(prompt=[1] * 20, max_tokens=3, arrival_s=0.0),
        LoadRequest(prompt=[2] * 20, max_tokens=3, arrival_s=0.0),
        LoadRequest(prompt=[3] * 20, max_tokens=2, arrival_s=0.5),
    ]
    results = run_in_virtual_time(run_load(LaboratorySender(engine), requests))
    # The first two share a step with 40 tokens, then two steps with 2 tokens each. The
    # third waits for one of them to end.
    third = 1.4 + 1.02 + 1.02 + 1.2 + 1.01
    ends = [result.end_s for result in results]
    assert ends == pytest.approx([3.44, 3.44, third], abs=1e-4)
    assert results[0].ttft_s == pytest.approx(1.4, abs=1e-4)
    assert results[2].ttft_s == pytest.approx(3.44 + 1.2 - 0.5, abs=1e-4)
    assert results[2].usage == Usage(20, 2)
    assert len(records) == 5
    assert_all_free(engine)


def test_the_engine_and_its_clients_have_the_same_clock():
    engine = laboratory()
    engine.metrics = EngineMetrics()
    records = []
    engine.listeners.append(records.append)
    requests = [
        LoadRequest(prompt=[i] * 20, max_tokens=2, arrival_s=when)
        for i, when in enumerate((10.0, 30.0, 30.5))  # idle before, and in between
    ]
    sender = LaboratorySender(engine)
    results = run_in_virtual_time(run_load(sender, requests))
    # 1.2 for 20 tokens; the third one comes in the middle of the step of the second.
    assert [r.ttft_s for r in results] == pytest.approx([1.2, 1.2, 1.91], abs=1e-4)
    meters = engine.metrics.time_to_first_token, engine.metrics.e2e_latency
    assert meters[0].sum == pytest.approx(sum(r.ttft_s for r in results), abs=1e-4)
    assert meters[1].sum == pytest.approx(sum(r.e2el_s for r in results), abs=1e-4)
    added = [request for record in records for request in record["added"]]
    assert [request["arrival_time"] for request in added] == [10.0, 30.0, 30.5]
    for request in added:
        given = request["sampling_params"]
        assert (given["temperature"], given["ignore_eos"]) == (0.0, True)
    assert not sender._mail  # nothing is kept of those who have gone


def test_a_request_that_the_engine_refuses_has_failed():
    sender = LaboratorySender(laboratory())
    requests = [LoadRequest(prompt=[1] * 9999, max_tokens=3)]
    [result] = run_in_virtual_time(run_load(sender, requests))
    assert result.error_kind == "RequestError" and "9,999" in result.error


def test_a_request_that_is_dropped_leaves_the_engine():
    engine = laboratory()

    async def main() -> None:
        requests = [LoadRequest(prompt=[1] * 20, max_tokens=50)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run_load(LaboratorySender(engine), requests), 5.0)

    run_in_virtual_time(main())
    assert_all_free(engine)
