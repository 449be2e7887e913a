"""Options from a file: what they become, and how they are refused."""

import argparse
from pathlib import Path

import pytest

from minivllm.cli import generate
from minivllm.cli.config_file import add_config_option, as_arguments
from minivllm.cli.main import COMMANDS, Parser, main


def parsed(monkeypatch, tmp_path: Path, text: str, *arguments: str):
    """Run `generate` up to where the work would begin; return what it was given."""
    seen = []
    monkeypatch.setattr(generate, "run", lambda given: seen.append(given) or 0)
    file = tmp_path / "chat.toml"
    file.write_text(text, encoding="utf-8")
    assert main(["generate", "--config", str(file), *arguments]) == 0
    return seen[0]


def refused(capsys, *arguments: str) -> str:
    """Return the one line that a wrong command line gets."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.startswith("minivllm: error: ") and err.count("\n") == 1
    return err


ALL_KINDS = """
model = "somewhere"
max_tokens = 7          # with _ as in Python
top-p = 0.5             # with - as on the command line
raw = true
split-reasoning = false
stop = ["a b", "-c"]
seed = 18446744073709551615
chat-template-kwargs = { enable_thinking = false, n = [1, 2.5, "é"], day = 1979-05-27 }
"""


def test_an_entry_is_what_one_would_have_typed(monkeypatch, tmp_path):
    given = parsed(monkeypatch, tmp_path, ALL_KINDS, "Why?")
    assert (given.model, given.max_tokens, given.top_p) == ("somewhere", 7, 0.5)
    assert (given.raw, given.split_reasoning) == (True, False)
    assert given.stop == ["a b", "-c"]
    assert given.seed == 2**64 - 1
    variables = {"enable_thinking": False, "n": [1, 2.5, "é"], "day": "1979-05-27"}
    assert given.chat_template_kwargs == variables
    assert given.prompt == "Why?"


def test_what_is_typed_wins(monkeypatch, tmp_path):
    typed = ("--top-p=0.9", "--stop", "c", "--max-tokens", "3")
    for arguments in ((*typed, "Why?"), ("Why?", *typed), (*typed, "--", "Why?")):
        given = parsed(monkeypatch, tmp_path, ALL_KINDS, *arguments)
        assert (given.top_p, given.stop, given.max_tokens) == (0.9, ["c"], 3)
        assert (given.seed, given.prompt) == (2**64 - 1, "Why?")


def test_what_stands_behind_two_dashes_is_no_option(monkeypatch, tmp_path):
    given = parsed(monkeypatch, tmp_path, "top_p = 0.5", "--", "--top-p=0.9")
    assert (given.top_p, given.prompt) == (0.5, "--top-p=0.9")
    seen = []
    monkeypatch.setattr(generate, "run", lambda given: seen.append(given) or 0)
    assert main(["generate", "--", "--config=nowhere.toml"]) == 0
    assert (seen[0].config, seen[0].prompt) == (None, "--config=nowhere.toml")


def test_an_empty_list_is_no_entry_at_all(monkeypatch, tmp_path):
    assert parsed(monkeypatch, tmp_path, "stop = []", "Why?").stop == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_takes_a_file(capsys, name):
    arguments = (*name.split(), "--config", "nowhere.toml")
    assert "cannot read nowhere.toml (No such file" in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("top_pp = 1", "FILE has unknown option top_pp: did you mean top-p?"),
        ("[serve]\nport = 1", "FILE has unknown option serve"),
        ("config = 'x'", "FILE has unknown option config"),
        ("help = true", "FILE has unknown option help"),
        ("prompt = 'x'", "FILE has unknown option prompt"),
        ("top-p = 1.0\ntop_p = 0.5", "FILE has top-p twice, once with _"),
        ("top-p 1", "FILE is no TOML (Expected '='"),
        ("raw = 1", "raw is 1 in the file, but must be true or false"),
        ("raw = 'true'", "raw is 'true' in the file, but must be true or false"),
        ("seed = [1]", "seed is a list in the file, but takes one value"),
        ("seed = -1", "in FILE: argument --seed: '-1' is no integer of at least 0"),
        ("seed = true", "in FILE: argument --seed: 'true' is no integer"),
        ("seed = 1.0", "in FILE: argument --seed: '1.0' is no integer"),
        ("backend = 'jax'", "in FILE: argument --backend: invalid choice: 'jax'"),
        (
            "max-tokens = 1979-05-27",
            "argument --max-tokens: '1979-05-27' is no integer",
        ),
        (
            "dtype = 'bfloat16'\nbackend = 'numpy'",
            "in FILE: argument --dtype: the numpy",
        ),
    ],
)
def test_a_wrong_entry_is_one_line_that_names_the_file(capsys, tmp_path, text, message):
    file = tmp_path / "chat.toml"
    file.write_text(text)
    err = refused(capsys, "generate", "--config", str(file), "Why?")
    assert message.replace("FILE", str(file)) in err


def test_a_mistake_on_the_command_line_does_not_blame_the_file(capsys, tmp_path):
    file = tmp_path / "chat.toml"
    file.write_text("seed = 1")
    err = refused(capsys, "generate", f"--config={file}", "--seed", "x", "Why?")
    assert err.startswith("minivllm: error: argument --seed: 'x' is no integer")


def test_a_file_that_is_no_text_is_refused(capsys, tmp_path):
    file = tmp_path / "chat.toml"
    file.write_bytes(b"\xff\xfe")
    assert "is no TOML" in refused(capsys, "generate", f"--config={file}", "Why?")
    assert "cannot read" in refused(capsys, "generate", f"--config={tmp_path}", "Why?")
    assert "expected one argument" in refused(capsys, "generate", "--config")


def test_an_option_with_an_opposite_can_be_switched_off():
    parser = argparse.ArgumentParser()
    action = parser.add_argument("--trace", action=argparse.BooleanOptionalAction)
    assert as_arguments("--trace", action, True) == ["--trace"]
    assert as_arguments("--trace", action, False) == ["--no-trace"]
    flag = parser.add_argument("--raw", action="store_true")
    assert as_arguments("--raw", flag, False) == []


def test_an_option_with_many_values_is_typed_once():
    parser = argparse.ArgumentParser()
    action = parser.add_argument("--goodput", nargs="+")
    many = as_arguments("--goodput", action, ["ttft:200", "tpot:50"])
    assert many == ["--goodput", "ttft:200", "tpot:50"]
    assert as_arguments("--goodput", action, "ttft:200") == ["--goodput", "ttft:200"]


def test_what_may_be_left_out_may_stand_in_the_file(tmp_path, capsys):
    def model(text: str, *arguments: str) -> str:
        file = tmp_path / "serve.toml"
        file.write_text(text)
        parser = Parser("minivllm serve", "", "")
        parser.add_argument(
            "model", nargs="?", default="small", choices=("small", "a", "b")
        )
        parser.add_argument("--port", type=int)
        add_config_option(parser)
        return parser.parse([*arguments, "--config", str(file), "--port", "1"]).model

    assert model("model = 'a'") == "a"
    assert model("model = 'a'", "b") == "b"
    assert model("") == "small"
    with pytest.raises(SystemExit):
        model("model = ['a', 'b']")
    assert "model is a list in the file" in capsys.readouterr().err


def test_a_parser_without_the_option_reads_no_file():
    parser = Parser("minivllm", "", "")
    parser.add_argument("text")
    assert parser.parse(["--", "--config"]).text == "--config"
