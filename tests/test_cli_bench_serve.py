"""The subcommand `bench serve`: its table, its files, and its ways to go wrong."""

import json
import signal
import subprocess
import sys
import time

import pytest

from minivllm.cli.bench_serve import promise, server_url
from minivllm.cli.main import main
from tests.scripted_server import (
    DONE,
    HEAD,
    delta_event,
    error,
    for_completions,
    scripted_server,
    text_event,
    usage_event,
)

pytest.importorskip("aiohttp")
ANSWER = [HEAD, text_event("a"), text_event("b"), usage_event(128, 32), DONE]


def bench(capsys, *arguments: str) -> tuple[int, str, str]:
    """Run the command line here; return exit code, standard output and error."""
    try:
        code = main(["bench", "serve", *arguments])
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def serve(script):
    return scripted_server(for_completions(script))


def test_all_requests_are_sent_and_summed_up(capsys):
    with serve(ANSWER) as (url, seen):
        code, out, err = bench(capsys, "--url", url, "--num-prompts", "5")
    assert (code, err) == (0, "")
    assert out.startswith("5 requests in ") and ": 5 completed, 0 failed\n" in out
    assert "came all at once" in out
    assert "tokens: 640 in, 160 out" in out
    assert all(f"\n{name}, " in out for name in ("TTFT", "TPOT", "ITL", "E2EL"))
    assert {request.path for request in seen} == {"/v1/completions"}
    bodies = [request.body for request in seen]
    assert {body["model"] for body in bodies} == {"parrot"}
    assert [len(body["prompt"]) for body in bodies] == [128] * 5
    assert len({tuple(body["prompt"]) for body in bodies}) == 5
    assert not any("ignore_eos" in body for body in bodies)


def test_the_options_reach_the_requests(capsys):
    options = (
        *("--num-prompts", "2", "--rate", "1000", "--model", "other", "--api-key", "k"),
        *("--input-len", "9", "--prefix-len", "3", "--output-len", "7", "--ignore-eos"),
        *("--vocab-size", "50", "--extra-body", '{"top_k": 4}', "--seed", "3"),
    )
    with serve(ANSWER) as (url, seen):
        code, out, _ = bench(capsys, "--url", f"{url}/v1/", *options)
    assert code == 0 and "came 1000.00 per second" in out
    first, second = (request.body for request in seen)
    assert (first["model"], first["max_tokens"], first["top_k"]) == ("other", 7, 4)
    assert first["ignore_eos"] is True
    assert len(first["prompt"]) == 12 and max(first["prompt"]) < 50
    assert first["prompt"][:3] == second["prompt"][:3]
    assert seen[0].headers["authorization"] == "bearer k"


def test_a_chat_is_asked_in_words(capsys):
    script = [HEAD, delta_event(content="a"), usage_event(9, 1), DONE]
    options = ("--endpoint", "chat", "--num-prompts", "1", "--input-len", "6")
    with serve(script) as (url, seen):
        code, out, _ = bench(capsys, "--url", url, *options)
    assert code == 0 and "tokens: 9 in, 1 out" in out and "TPOT" not in out
    [message] = seen[0].body["messages"]
    assert len(message["content"].split()) == 6


def test_a_recording_says_when_and_what(capsys, tmp_path):
    path = tmp_path / "arrivals.jsonl"
    lines = [{"arrival_s": 0.1 * i, "prompt": f"text {i}"} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, lines)))
    with serve(ANSWER) as (url, seen):
        options = ("--dataset", str(path), "--num-prompts", "3")
        code, out, _ = bench(capsys, "--url", url, *options)
        assert code == 0 and "came 15.00 per second" in out
        assert [r.body["prompt"] for r in seen] == ["text 0", "text 1", "text 2"]
        out = bench(capsys, "--url", url, *options, "--rate", "30")[1]
        assert "came 30.00 per second" in out


def test_failures_are_counted_and_named(capsys):
    scripts = iter([ANSWER, [error("429 Full", "come back later")], ANSWER[:2]])

    def answer(request):
        return next(scripts) if request.method == "POST" else None

    with scripted_server(answer) as (url, _):
        code, out, _ = bench(capsys, "--url", url, "--num-prompts", "3")
    assert code == 0
    assert ": 1 completed, 2 failed\n" in out
    assert "  1 failed: HTTP 429: come back later\n" in out
    assert "  1 failed: broken stream: it ended without data: [DONE]\n" in out


def test_if_nothing_succeeds_the_exit_code_says_so(capsys):
    with serve([error("500 Oops", "it broke")]) as (url, _):
        code, out, _ = bench(capsys, "--url", url, "--num-prompts", "3")
    assert code == 1
    assert "3 requests in " in out and "  3 failed: HTTP 500: it broke\n" in out
    assert "TTFT" not in out


def test_goodput_is_counted(capsys):
    with serve([HEAD, 0.2, *ANSWER[1:]]) as (url, _):
        options = ("--url", url, "--num-prompts", "2", "--goodput", "e2el:100000")
        out = bench(capsys, *options, "ttft:150")[1]
        assert ", 0 requests with e2el 100000 ms, ttft 150 ms at most" in out
        out = bench(capsys, *options)[1]
    assert ", 2 requests with e2el 100000 ms at most" in out


def test_results_and_figure_are_written_without_the_key(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    results, figure = tmp_path / "results.json", tmp_path / "load.svg"
    files = ("--out", str(results), "--plot", str(figure))
    with serve(ANSWER) as (url, _):
        options = ("--rate", "inf", "--api-key", "secret", "--num-prompts", "2")
        assert bench(capsys, "--url", url, *options, *files)[0] == 0
    assert "secret" not in results.read_text()
    record = json.loads(results.read_text())
    assert (record["url"], record["model"], record["rate"]) == (url, "parrot", "inf")
    assert (record["completed"], len(record["requests"])) == (2, 2)
    assert record["p99_e2el_ms"] > 0
    assert "<svg" in figure.read_text()


def test_without_matplotlib_nothing_is_sent_in_vain(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with serve(ANSWER) as (url, seen):
        code, _, err = bench(capsys, "--url", url, "--plot", str(tmp_path / "x.svg"))
    assert (code, seen) == (1, [])
    assert "leave --plot out" in err


def test_no_server_is_a_message_and_exit_code_1(capsys):
    options = ("--url", "http://127.0.0.1:9", "--ready-timeout", "0")
    code, out, err = bench(capsys, *options)
    assert (code, out) == (1, "")
    assert err.startswith("minivllm: error: no server is ready at http://127.0.0.1:9 (")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "'0' is no number above 0, and not inf"),
        (["--rate", "nan"], "'nan' is no number above 0"),
        (["--goodput", "ttft"], "'ttft' is no promise such as ttft:200"),
        (["--goodput", "itl:3"], "name one of ttft, tpot, e2el"),
        (["--goodput", "ttft:1", "ttft:2"], "one of its names is given twice"),
        (["--url", "localhost:8000"], "'localhost:8000' is no address such as"),
        (["--request-timeout", "-1"], "'-1' is no number of seconds from 0"),
        (["--num-prompt", "3"], "unknown option --num-prompt: did you mean"),
        (["--extra-body", "3"], "'3' is no JSON object"),
        (["fast"], "'fast' is one argument too many"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = bench(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("minivllm: error: ") and message in err
    assert err.rstrip().endswith("see minivllm bench serve --help")


def test_a_wrong_recording_is_refused_before_anything_is_sent(capsys, tmp_path):
    path = tmp_path / "arrivals.jsonl"
    path.write_text("{}")
    with serve(ANSWER) as (url, seen):
        code, _, err = bench(capsys, "--url", url, "--dataset", str(path))
        assert (code, seen) == (1, []) and "line 1: " in err
        code, _, err = bench(capsys, "--url", url, "--dataset", str(tmp_path / "no"))
        assert code == 1 and "cannot read" in err


@pytest.mark.parametrize(
    "text",
    [
        *("http://", "ftp://x", "http://x:y", "http://x:0", "http://x?a=1"),
        *("", "http://[x", "http://x#a"),
    ],
)
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(Exception, match="is no address such as"):
        server_url(text)


def test_an_address_may_end_as_clients_want_it():
    for text in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"):
        assert server_url(text) == "http://a:1"
    assert server_url("https://a/proxy") == "https://a/proxy"
    assert promise("tpot:50") == ("tpot", 50.0)


def test_ctrl_c_prints_what_there_is():
    def answer(request):
        if request.method != "POST":
            return None
        is_first = len(seen) == 0
        return ANSWER if is_first else [HEAD, text_event("a"), 60.0]

    # A shell's background job ignores SIGINT, and its children inherit that.
    reset = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = "from minivllm.cli.main import main; raise SystemExit(main())"
    with scripted_server(answer) as (url, seen):
        options = ("--url", url, "--num-prompts", "9", "--rate", "5")
        process = subprocess.Popen(
            [sys.executable, "-c", f"{reset}; {run}", "bench", "serve", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while len(seen) < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err and "requests were not due yet" in err
    assert ": 1 completed, " in out and " failed: interrupted\n" in out
