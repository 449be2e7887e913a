"""The command line: what it writes where, and every way to go wrong."""

import importlib
import io
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import minivllm
from minivllm.cli import generate
from minivllm.cli.main import COMMANDS, main
from tests.tiny_folder import (
    CONFIG,
    make_tensors,
    write_byte_tokenizer,
    write_checkpoint,
    write_parrot,
)

ANSWER = " blué!"  # what the parrot says to everything


@pytest.fixture(scope="module")
def parrot(tmp_path_factory) -> str:
    return str(write_parrot(tmp_path_factory.mktemp("parrot")))


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Keep the real cache out of it, the threads as they were, and output buffered."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    for variable in ("OMP", "OPENBLAS", "MKL"):
        monkeypatch.setenv(f"{variable}_NUM_THREADS", "1")
    monkeypatch.setenv("VECLIB_MAXIMUM_THREADS", "1")


def in_process(capsys, *arguments: str) -> tuple[int, str, str]:
    """Run the command line here; return exit code, standard output and error."""
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def ask(capsys, model: str, *arguments: str) -> tuple[int, str, str]:
    return in_process(
        capsys, "generate", "--model", model, "--backend", "numpy", *arguments
    )


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "minivllm", *arguments]


def start_endless_answer(parrot: str) -> subprocess.Popen:
    """Start a process that writes yzxyzxyzx and so on."""
    # A shell's background job ignores SIGINT, and its children inherit that.
    reset = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = "from minivllm.cli.main import main; raise SystemExit(main())"
    arguments = ("--model", parrot, "--backend", "numpy", "--max-tokens", "4000")
    return subprocess.Popen(
        [sys.executable, "-c", f"{reset}; {run}", "generate", *arguments, "--raw", "x"],
        bufsize=0,  # else read() keeps bytes that communicate() does not see
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# What it writes.


def test_the_rate_leaves_out_the_wait_for_the_first_token():
    line = generate.summary(9, [0.5, 0.6, 0.7], "stop")
    assert line == (
        "minivllm: 9 prompt tokens, 3 new tokens, first after 0.50 s, "
        "then 10.0 tokens/s, finish reason: stop"
    )


def test_the_answer_goes_to_stdout_and_the_numbers_to_stderr(capsys, parrot):
    code, out, err = ask(capsys, parrot, "Why?")
    assert (code, out) == (0, ANSWER + "\n")
    # "u=Why?;:" is 8 bytes, " blué!" 7 and the end 1.
    assert re.fullmatch(
        r"minivllm: 8 prompt tokens, 8 new tokens, first after \d+\.\d\d s, "
        r"then \d+\.\d tokens/s, finish reason: stop\n",
        err,
    )


def test_both_backends_give_the_same_text(capsys, parrot):
    for backend in ("numpy", "torch", "auto"):
        code, out, _ = ask(capsys, parrot, "--backend", backend, "Why?")
        assert (code, out) == (0, ANSWER + "\n")


def test_a_system_message_comes_before_the_prompt(capsys, parrot, monkeypatch):
    seen = []
    monkeypatch.setattr(generate, "stream", lambda *given: seen.append(given[1]) or 0)
    ask(capsys, parrot, "--system", "Be brief.", "Why?")
    ask(capsys, parrot, "Why?")
    ask(capsys, parrot, "--raw", "Why?")
    assert [bytes(ids) for ids in seen] == [
        b"s=Be brief.;u=Why?;:",
        b"u=Why?;:",
        b"Why?",
    ]


def test_raw_text_is_continued_without_a_template(capsys, parrot):
    code, out, err = ask(capsys, parrot, "--raw", "a b")
    assert (code, out) == (0, "lué!\n")
    assert "3 prompt tokens" in err


def test_max_tokens_ends_inside_a_character_without_an_error(capsys, parrot):
    code, out, err = ask(capsys, parrot, "--max-tokens", "5", "Why?")  # half of é
    assert (code, out) == (0, " blu\N{REPLACEMENT CHARACTER}\n")
    assert "5 new tokens" in err and "finish reason: length" in err


def test_one_token_has_no_rate(capsys, parrot):
    _, out, err = ask(capsys, parrot, "--max-tokens", "1", "Why?")
    assert out == " \n"
    assert "1 new tokens, first after" in err and "tokens/s" not in err


def test_the_default_length_is_what_fits(capsys, tmp_path):
    config = CONFIG | {"vocab_size": 257, "max_position_embeddings": 10}
    write_checkpoint(tmp_path, make_tensors(config), config)
    write_byte_tokenizer(tmp_path, None)
    code, _, err = ask(capsys, str(tmp_path), "--raw", "abcd")
    assert code == 0 and "4 prompt tokens, 6 new tokens" in err


def test_a_prompt_that_fills_the_context_leaves_no_room(capsys, tmp_path):
    config = CONFIG | {"vocab_size": 257, "max_position_embeddings": 10}
    write_checkpoint(tmp_path, make_tensors(config), config)
    write_byte_tokenizer(tmp_path, None)
    code, out, err = ask(capsys, str(tmp_path), "--raw", "abcdefghij")
    assert (code, out) == (1, "") and "10" in err


def test_a_seed_repeats_a_random_answer(capsys, parrot):
    def sample(seed: str) -> str:
        options = ("--temperature", "50", "--seed", seed, "--max-tokens", "12")
        return ask(capsys, parrot, *options, "Why?")[1]

    assert sample("1") == sample("1") != sample("2")


def test_sampling_parameters_can_be_given(capsys, parrot):
    def sample(*options: str) -> str:
        options = ("--temperature", "50", "--seed", "1", "--max-tokens", "12", *options)
        return ask(capsys, parrot, *options, "Why?")[1]

    free = sample()
    for option in ("--top-k", "1"), ("--min-p", "1"), ("--top-p", "1e-9"):
        assert sample(*option) == ask(capsys, parrot, "--max-tokens", "12", "Why?")[1]
    assert sample("--frequency-penalty", "2", "--top-p", "0.9") != free


def test_a_stop_text_ends_the_answer(capsys, parrot):
    whole = ask(capsys, parrot, "--raw", "ab")[1]
    assert len(whole) > 3
    code, out, err = ask(
        capsys, parrot, "--stop", "@", "--stop", whole[2], "--raw", "ab"
    )
    assert (code, out) == (0, whole[:2] + "\n") and "finish reason: stop" in err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--top-p", "0", "top_p is 0.0, but must be a number above 0, up to 1 (off)"),
        ("--top-k", "-2", "top_k is -2, but must be an integer of at least 1"),
        ("--stop", "", "stop is ('',), but must be a text or a list of texts"),
    ],
)
def test_a_parameter_out_of_range_is_refused(capsys, parrot, option, value, message):
    code, out, err = ask(capsys, parrot, f"{option}={value}", "Why?")
    assert (code, out) == (1, "") and message in err


def test_a_dash_reads_the_prompt_from_stdin(capsys, parrot, monkeypatch):
    def given(data: bytes) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return ask(capsys, parrot, "--raw", "-")

    # One line end is the shell's, not the prompt's.
    assert given("é b\n".encode())[1:2] == ("lué!\n",)
    code, out, err = given(b"ab\xff")
    assert (code, out) == (1, "") and "byte 2 of the prompt" in err


@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        (b"  a\n  b \n\n", "  a\n  b \n"),
        (b"a", "a"),
        (b"a\r\n", "a\r"),
    ],
)
def test_only_one_line_end_of_stdin_is_dropped(monkeypatch, data, prompt):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert generate.read_prompt(Namespace(prompt="-", raw=False)) == prompt


# Usage: exit code 2 and one line.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND; see minivllm --help"),
        (["genrate"], "unknown command genrate: did you mean generate?"),
        (["--vresion"], "unknown option --vresion: did you mean --version?"),
        (["generate"], "the following arguments are required: PROMPT"),
        (["generate", "--temp", "1", "x"], "unknown option --temp"),
        (["generate", "--max-token=3", "x"], "did you mean --max-tokens?"),
        (["generate", "--se", "3", "x"], "unknown option --se"),
        (["generate", "--modle=a b", "x"], "unknown option --modle: did you mean"),
        (["generate", "why", "not"], "'not' is one argument too many"),
        (["generate", "--temperature", "-1", "x"], "'-1' is no number of at least 0"),
        (["generate", "--temperature", "nan", "x"], "'nan' is no number"),
        (["generate", "--max-tokens", "0", "x"], "'0' is no integer of at least 1"),
        (["generate", "--threads", "0", "x"], "'0' is no integer of at least 1"),
        (["generate", "--threads", "99999", "x"], "and at most"),
        (["generate", "--seed", "-1", "x"], "'-1' is no integer of at least 0"),
        (["generate", "--dtype", "fp8", "x"], "choose from"),
        (["generate", "--backend", "jax", "x"], "choose from"),
        (["generate", "--device", "warp", "x"], "'warp' is no device"),
        (["generate", "--device", "cuda:", "x"], "it must be auto, cpu, cuda, cuda:N"),
        (
            ["generate", "--backend", "numpy", "--dtype", "bfloat16", "x"],
            "argument --dtype: the numpy backend has float32 only, not bfloat16",
        ),
        (
            ["generate", "--backend", "numpy", "--device", "cuda", "x"],
            "argument --device: the numpy backend has cpu only, not cuda",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = in_process(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("minivllm: error: ") and message in err
    assert err.count("\n") == 1 and err.rstrip().endswith("--help")


def test_what_follows_two_dashes_is_the_prompt(capsys, parrot):
    code, out, _ = ask(capsys, parrot, "--raw", "--", "--b")
    assert (code, out) == (0, "lué!\n")


# What goes wrong later: exit code 1, one message, no traceback.


def failing(tmp_path: Path, kind: str) -> list[str]:
    """Prepare a failure and return the arguments that lead to it."""
    folder = tmp_path / "model"
    if kind == "not a model":
        folder.mkdir()
    elif kind == "unknown name":
        return ["--model", "smollm3-135m", "x"]
    elif kind == "damaged gguf":
        version, tensors, settings = b"\3\0\0\0", bytes(8), b"\1" + bytes(7)
        header = b"GGUF" + version + tensors + settings
        (tmp_path / "model.gguf").write_bytes(header)  # and no setting follows
        return ["--model", str(tmp_path / "model.gguf"), "x"]
    elif kind == "missing file":
        return ["--model", str(tmp_path / "nowhere.gguf"), "x"]
    else:
        write_parrot(folder, None if kind == "no template" else "{{ 1 }}")
    if kind == "damaged weights":
        with open(folder / "model.safetensors", "ab") as file:
            file.write(b"?")
    if kind == "tokenizer of another model":
        config = CONFIG | {"vocab_size": 100}
        write_checkpoint(folder, make_tensors(config), config)
    too_much = ["--max-tokens", "4096"] if kind == "too long" else []
    prompt = "" if kind == "empty prompt" else "x"
    return ["--model", str(folder), *too_much, prompt]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("not a model", "config.json"),
        ("unknown name", "smollm2-135m-instruct"),
        ("missing file", "nowhere.gguf"),
        ("damaged gguf", "model.gguf"),
        ("damaged weights", "model.safetensors"),
        ("tokenizer of another model", "100"),
        ("no template", "use --raw"),
        ("too long", "4096"),
        ("empty prompt", "the prompt is empty"),
    ],
)
def test_a_failure_is_a_message_and_exit_code_1(capsys, tmp_path, kind, message):
    arguments = ["generate", "--backend", "torch", *failing(tmp_path, kind)]
    code, out, err = in_process(capsys, *arguments)
    assert (code, out) == (1, "")
    *progress, last = err.splitlines()
    assert last.startswith("minivllm: error: ") and message in last
    assert len(progress) == (kind == "damaged gguf") and "Traceback" not in err


def test_ctrl_c_before_the_first_token_is_exit_code_130(capsys, parrot, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "stream", interrupted)
    assert ask(capsys, parrot, "x") == (130, "", "minivllm: interrupted\n")


FULL = "[Errno 28] No space left on device"


@pytest.mark.skipif(os.name != "posix", reason="arguments are bytes on POSIX only")
def test_an_argument_that_is_no_utf8_is_refused_by_its_byte(capsys, parrot):
    code, _, err = ask(capsys, parrot, os.fsdecode(b"a\xffb"))
    assert code == 1
    assert "byte 1 of the prompt is no UTF-8" in err


def test_an_error_of_the_system_is_a_message_too(capsys, parrot, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generate, "stream", full)
    code, _, err = ask(capsys, parrot, "x")
    assert code == 1
    assert err == f"minivllm: error: cannot read or write ({FULL})\n"


def test_an_error_of_ours_is_never_hidden(capsys, parrot, monkeypatch):
    monkeypatch.setattr(generate, "stream", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ask(capsys, parrot, "x")


# Help.


def test_the_version_is_that_of_the_package(capsys):
    code, out, _ = in_process(capsys, "--version")
    assert (code, out) == (0, f"minivllm {minivllm.__version__}\n")


def test_help_names_every_command_and_exit_code(capsys):
    code, out, _ = in_process(capsys, "--help")
    assert code == 0
    assert all(re.search(rf"^  {name} ", out, re.M) for name in COMMANDS)
    assert all(re.search(rf"^  {code} ", out, re.M) for code in (0, 1, 2, 130))


@pytest.mark.parametrize("name", COMMANDS)
def test_each_example_of_a_commands_help_is_valid(capsys, name, monkeypatch):
    _, out, _ = in_process(capsys, *name.split(), "--help")
    examples = re.findall(rf"^  minivllm {name}(?: (.*))?$", out, re.M)
    assert examples
    module = importlib.import_module(COMMANDS[name][0])
    monkeypatch.setattr(module, "run", lambda arguments: 0)
    for example in examples:
        arguments = [a.strip('"') for a in re.findall(r'"[^"]*"|[^ ]+', example)]
        if "<" in arguments:
            arguments = arguments[: arguments.index("<")]
        assert main([*name.split(), *arguments]) == 0


# In a process of its own.


def test_ctrl_c_keeps_the_text_so_far_and_says_how_far_it_came(parrot):
    process = start_endless_answer(parrot)
    start = process.stdout.read(3)  # it streams: this comes long before the end
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    text = start + rest
    assert text.endswith(b"\n") and text[:-1] == (b"yzx" * 2000)[: len(text) - 1]
    assert b"finish reason: abort" in err and b"Traceback" not in err
    assert f"{len(text) - 1} new tokens".encode() in err


def test_a_reader_that_goes_away_ends_it_quietly(parrot):
    process = start_endless_answer(parrot)
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_message(parrot):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command("generate", "--model", parrot, "--backend", "numpy", "x"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert result.returncode == 1
    assert result.stderr == f"minivllm: error: cannot read or write ({FULL})\n"


@pytest.mark.skipif(sys.platform == "win32", reason="closed by a POSIX shell")
@pytest.mark.parametrize("closed", ["stdout", "stdin", "stderr"])
def test_a_closed_stream_is_one_message(parrot, closed):
    close = {"stdout": ">&-", "stdin": "<&-", "stderr": "2>&-"}[closed]
    arguments = command("generate", "--model", parrot, "--backend", "numpy", "-")
    result = subprocess.run(
        ["sh", "-c", f'exec "$@" {close}', "sh", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (1, "")
    if closed == "stderr":
        assert result.stderr == ""
    else:
        name = {"stdout": "standard output", "stdin": "standard input"}[closed]
        assert result.stderr.startswith("minivllm: error: ")
        assert name in result.stderr and "closed" in result.stderr
        assert result.stderr.count("\n") == 1


def test_any_character_is_written_whatever_the_locale(parrot):
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    result = subprocess.run(
        command("generate", "--model", parrot, "--backend", "numpy", "x"),
        env=environment,
        capture_output=True,
    )
    assert (result.returncode, result.stdout) == (0, f"{ANSWER}\n".encode())


@pytest.mark.skipif(sys.platform == "win32", reason="arguments are bytes elsewhere")
def test_a_name_that_is_no_text_is_shown_escaped():
    result = subprocess.run([*command(), b"\xff"], capture_output=True)
    assert result.returncode == 2 and b"Traceback" not in result.stderr
    assert rb"unknown command \udcff" in result.stderr


def test_threads_are_set_before_numpy_and_torch_load(parrot):
    script = (
        "import sys; from minivllm.cli.main import main\n"
        f"main(['generate', '--model', {parrot!r}, '--threads', '1', 'x'])\n"
        "import torch; print(torch.get_num_threads(), file=sys.stderr)"
    )
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert result.stderr.endswith("stop\n1\n")
