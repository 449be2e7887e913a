"""The subcommand `chat`: what it keeps, what it shows, and how it is stopped."""

import contextlib
import io
import os
import re
import select
import subprocess
import sys
import time

import pytest

from minivllm.cli.answerers import AnswerPiece, ServerAnswerer, piece_in
from minivllm.cli.chat import Chat, Reader, Screen, take, talk
from minivllm.cli.conversation import Conversation, TooLong, Turn
from minivllm.cli.main import main
from minivllm.errors import MinivllmError, RequestError
from tests.scripted_server import (
    DONE,
    HANG_UP,
    HEAD,
    delta_event,
    error,
    event,
    respond,
    scripted_server,
)
from tests.tiny_folder import CHAT_TEMPLATE, write_parrot

ANSWER = " blué!"  # what the parrot says to everything


@pytest.fixture(scope="module")
def parrot(tmp_path_factory) -> str:
    return str(write_parrot(tmp_path_factory.mktemp("parrot")))


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> str:
    """A parrot that never stops: xyzxyzxyz and so on."""
    folder = tmp_path_factory.mktemp("endless")
    return str(write_parrot(folder, sentences=([*b":xyzx"],)))


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Keep the real cache out of it, and the threads and colours as they were."""
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    for variable in ("OMP", "OPENBLAS", "MKL"):
        monkeypatch.setenv(f"{variable}_NUM_THREADS", "1")
    monkeypatch.setenv("VECLIB_MAXIMUM_THREADS", "1")


class ScriptedAnswerer:
    """Says what it was given; an exception is raised where it stands."""

    def __init__(self, *answers, max_messages: int = 99) -> None:
        self.answers = list(answers)
        self.max_messages = max_messages
        self.asked: list[list[str]] = []
        self.was_closed = False

    def start(self, messages):
        if len(messages) > self.max_messages:
            raise TooLong("too many messages")
        self.asked.append([f"{m['role'][0]}:{m['content']}" for m in messages])
        return self.pieces(self.answers.pop(0))

    def pieces(self, answer):
        self.was_closed = False
        try:
            for part in [answer] if isinstance(answer, str) else answer:
                if isinstance(part, BaseException):
                    raise part
                yield part if isinstance(part, AnswerPiece) else AnswerPiece(part)
        finally:
            self.was_closed = True


def make_chat(*answers, system: str | None = None, **options) -> Chat:
    answerer = ScriptedAnswerer(*answers, **options)
    return Chat(answerer, Conversation(system), Screen(False))


def asked(chat: Chat) -> list[list[str]]:
    return chat._answerer.asked


# The conversation.


def test_each_question_is_asked_with_all_that_was_said():
    chat = make_chat("one", "two", system="Be brief.")
    chat.answer("first?")
    chat.answer("second?")
    assert asked(chat) == [
        ["s:Be brief.", "u:first?"],
        ["s:Be brief.", "u:first?", "a:one", "u:second?"],
    ]
    assert chat.conversation.turns == [Turn("first?", "one"), Turn("second?", "two")]


def test_thoughts_are_shown_and_not_sent_back(capsys):
    chat = make_chat([AnswerPiece(thoughts="Hm."), AnswerPiece("Yes.")], "No.")
    chat.answer("first?")
    chat.answer("second?")
    assert asked(chat)[1] == ["u:first?", "a:Yes.", "u:second?"]
    assert capsys.readouterr() == ("Yes.\nNo.\n", "Hm.\n")


def test_a_stopped_answer_counts_as_the_answer(capsys):
    chat = make_chat(["par", "tial", KeyboardInterrupt()], "two")
    with pytest.raises(KeyboardInterrupt):
        chat.answer("first?")
    assert chat._answerer.was_closed
    chat.answer("second?")
    assert asked(chat)[1] == ["u:first?", "a:partial", "u:second?"]
    assert capsys.readouterr().out == "partial\ntwo\n"


def test_a_question_without_any_answer_is_forgotten(capsys):
    chat = make_chat([KeyboardInterrupt()], "", "three")
    with pytest.raises(KeyboardInterrupt):
        chat.answer("first?")
    chat.answer("second?")
    assert "the answer is empty" in capsys.readouterr().err
    chat.answer("third?")
    assert asked(chat)[2] == ["u:third?"]


def test_a_failure_leaves_the_conversation_as_it_was():
    chat = make_chat("one", ["half", MinivllmError("broken")], "two", max_messages=3)
    chat.answer("first?")
    with pytest.raises(MinivllmError, match="broken"):
        chat.answer("second?")
    assert chat.conversation.turns == [Turn("first?", "one")]
    assert len(chat.conversation.messages()) == 2


def test_the_oldest_turns_are_forgotten_when_there_is_no_room(capsys):
    chat = make_chat("one", "two", "three", "four", system="S", max_messages=4)
    for question in ("first?", "second?", "third?"):
        chat.answer(question)
    assert asked(chat)[2] == ["s:S", "u:second?", "a:two", "u:third?"]
    err = capsys.readouterr().err
    assert err == "minivllm: no room for all: the oldest 1 turns are forgotten\n"
    assert [turn.answer for turn in chat.conversation.turns] == ["two", "three"]


def test_a_question_too_long_by_itself_costs_no_turn():
    chat = make_chat("one", max_messages=1)
    chat.answer("first?")
    chat._answerer.max_messages = 0
    with pytest.raises(TooLong):
        chat.answer("second?")
    assert chat.conversation.turns == [Turn("first?", "one")]


def test_an_answer_that_is_cut_off_says_so(capsys):
    chat = make_chat([AnswerPiece("one", finish_reason="length")])
    chat.answer("first?")
    assert "its length is limited" in capsys.readouterr().err


# Commands.


def test_commands_change_the_conversation(capsys):
    chat = make_chat("one", "two", "three", "four", "five", system="S")
    texts = ["a", "b", "/undo", "/retry", "/system T  t", "c", "/reset", "/system", "d"]
    for text in texts:
        take(chat, text)
    assert asked(chat) == [
        ["s:S", "u:a"],
        ["s:S", "u:a", "a:one", "u:b"],
        ["s:S", "u:a"],
        ["s:T  t", "u:a", "a:three", "u:c"],
        ["u:d"],
    ]
    out, err = capsys.readouterr()
    assert out == "one\ntwo\nthree\nfour\nfive\n"
    assert err.splitlines() == [
        "minivllm: taken back: b",
        "minivllm: system message replaced",
        "minivllm: forgotten",
        "minivllm: no system message any more",
    ]


def test_help_lists_every_command(capsys):
    take(make_chat(), "/help")
    err = capsys.readouterr().err
    for name in ("/help", "/reset", "/system [TEXT]", "/undo", "/retry", "/quit"):
        assert f"minivllm: {name} " in err
    assert "Ctrl-C" in err and '"""' in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/undo", "nothing was answered yet"),
        ("/retry", "nothing was answered yet"),
        ("/rest", "unknown command /rest: did you mean /reset?"),
        ("/usr/bin is what?", "unknown command /usr/bin: see /help (a message that"),
    ],
)
def test_a_command_that_cannot_be_done_is_refused(text, message):
    chat = make_chat()
    with pytest.raises(RequestError, match=re.escape(message)):
        take(chat, text)
    assert asked(chat) == []


def test_a_blank_makes_a_message_of_a_command():
    chat = make_chat("one")
    take(chat, " /reset")
    assert asked(chat) == [["u: /reset"]]


# Reading.


def read_all(monkeypatch, data: bytes) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    reader, texts = Reader(False), []
    with contextlib.suppress(EOFError):
        while True:
            texts.append(reader.read())
    return texts


def test_from_a_pipe_each_line_is_a_message(monkeypatch):
    assert read_all(monkeypatch, "a\n\n  \n b é\r\nc".encode()) == ["a", " b é", "c"]


def test_a_block_is_one_message(monkeypatch):
    data = b'"""a\n\n b\nc"""\nd\n"""\ne\n"""\n"""f"""\n""""""\n'
    assert read_all(monkeypatch, data) == ["a\n\n b\nc", "d", "e", "f"]
    assert read_all(monkeypatch, b'a\n"""b\nc') == ["a"]  # it never ended


def test_a_message_that_is_no_utf8_is_refused(monkeypatch):
    with pytest.raises(RequestError, match="character 1 of the message is no UTF-8"):
        read_all(monkeypatch, b"a\xff\n")


def test_someone_at_the_keyboard_may_go_on_after_an_error(capsys):
    class Script:
        def __init__(self, *steps):
            self.steps = list(steps)

        def read(self):
            step = self.steps.pop(0)
            if isinstance(step, BaseException):
                raise step
            return step

    steps = ("/rest", KeyboardInterrupt(), "a", "b", "c", "/quit", "never")
    answers = ([MinivllmError("broken")], ["half", KeyboardInterrupt()], "three")
    chat = make_chat(*answers)
    talk(chat, Script(*steps), is_interactive=True)
    assert asked(chat)[-1] == ["u:b", "a:half", "u:c"]
    err = capsys.readouterr().err
    assert "error: unknown command /rest" in err and "error: broken" in err
    for step in ("/rest", KeyboardInterrupt()):
        with pytest.raises((RequestError, KeyboardInterrupt)):
            talk(make_chat(), Script(step), is_interactive=False)


# The screen.


def test_thoughts_are_dimmed_on_a_terminal(capsys, monkeypatch):
    def shown() -> str:
        screen = Screen(True)
        for text, thoughts in (("", "Hm"), ("", "."), ("Yes", ""), (".", "")):
            screen.write(text, thoughts)
        screen.end()
        screen.write("", "cut")
        screen.end()
        return capsys.readouterr().out

    assert shown() == "\x1b[2mHm.\x1b[0m\n\nYes.\n\x1b[2mcut\x1b[0m\n\n\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown() == "Hm.\n\nYes.\ncut\n\n\n"


def test_a_model_cannot_command_the_terminal(capsys):
    screen = Screen(True)
    screen.write("a\x1b[2J\tb\n\x07\x9b\x7f")
    screen.end()
    replacement = "\N{REPLACEMENT CHARACTER}"
    assert capsys.readouterr().out == f"a␛[2J\tb\n␇{replacement * 2}\n"


# With a model, from a pipe.


def pipe(capsys, monkeypatch, text: str, *arguments: str) -> tuple[int, str, str]:
    """Run the command line here; return exit code, standard output and error."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    try:
        code = main(["chat", *arguments])
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def ask(capsys, monkeypatch, model: str, text: str, *arguments: str):
    options = ("--model", model, "--backend", "numpy", *arguments)
    return pipe(capsys, monkeypatch, text, *options)


def test_answers_go_to_stdout_and_nothing_else(capsys, monkeypatch, parrot):
    code, out, err = ask(capsys, monkeypatch, parrot, "Why?\nHow?\n")
    assert (code, out, err) == (0, f"{ANSWER}\n{ANSWER}\n", "")


def test_the_next_turn_finds_the_last_one_in_the_cache(capsys, monkeypatch, parrot):
    code, _, err = ask(capsys, monkeypatch, parrot, "Why so?\nHow?\n", "--verbose")
    assert code == 0
    first, second = err.splitlines()
    assert first.startswith(
        "minivllm: 11 prompt tokens (0 cached), 8 new tokens, first"
    )
    # "u=Why so?;" is 10 bytes, "a= blué!;" 10, "u=How?;:" 8. Before the answer the two
    # prompts part; but a whole block before that was computed for the first.
    assert second.startswith("minivllm: 28 prompt tokens (0 cached), 8 new tokens")
    long = "a question that fills a block or two"
    _, _, err = ask(capsys, monkeypatch, parrot, f"{long}\nHow?\n", "--verbose")
    assert "(32 cached)" in err.splitlines()[1]
    assert re.search(r"first after \d+\.\d\d s, then .* tokens/s, finish", err)


def test_the_options_reach_the_model(capsys, monkeypatch, parrot):
    options = ("--max-tokens", "4", "--system", "S" * 20, "--verbose")
    code, out, err = ask(capsys, monkeypatch, parrot, "Why?\n", *options)
    assert (code, out) == (0, " blu\n")
    assert "31 prompt tokens" in err and "its length is limited" in err
    out = ask(capsys, monkeypatch, parrot, "Why?\n", "--stop", "u")[1]
    assert out == " bl\n"


def test_a_seed_repeats_a_chat_and_gives_every_answer_its_own(
    capsys, monkeypatch, parrot
):
    options = ("--temperature", "50", "--max-tokens", "12", "--seed")
    text = "Why?\n/retry\n"
    first = ask(capsys, monkeypatch, parrot, text, *options, "1")[1]
    assert first == ask(capsys, monkeypatch, parrot, text, *options, "1")[1]
    assert first != ask(capsys, monkeypatch, parrot, text, *options, "2")[1]
    half = len(first) // 2
    assert first[:half] != first[half:]
    last = str(2**64 - 1)  # and the next one is 0
    assert ask(capsys, monkeypatch, parrot, text, *options, last)[0] == 0


def test_a_long_chat_forgets_its_beginning(capsys, monkeypatch, parrot):
    options = ("--max-model-len", "64", "--max-tokens", "8")
    lines = "".join(f"question {i}\n" for i in range(5))
    code, out, err = ask(capsys, monkeypatch, parrot, lines, *options)
    assert (code, out) == (0, f"{ANSWER}\n" * 5)
    assert err.count("the oldest 1 turns are forgotten") == 3
    code, out, err = ask(capsys, monkeypatch, parrot, "x" * 60 + "\n", *options)
    assert (code, out) == (1, "")
    assert (
        "has 64 tokens and an answer needs room for 8, but max_model_len is 64" in err
    )


def test_what_cannot_chat_is_refused_before_weights_are_read(
    capsys, monkeypatch, tmp_path
):
    folder = write_parrot(tmp_path / "plain", chat_template=None)
    (folder / "model.safetensors").write_bytes(b"?")  # reading it would fail
    code, out, err = ask(capsys, monkeypatch, str(folder), "Why?\n")
    assert (code, out) == (1, "") and "has no chat template" in err
    folder = write_parrot(tmp_path / "other", chat_template=CHAT_TEMPLATE)
    options = ("--chat-template-kwargs", '{"enable_thinkin": false}')
    code, _, err = ask(capsys, monkeypatch, str(folder), "Why?\n", *options)
    assert code == 1 and "enable_thinkin" in err


def test_a_failure_in_a_pipe_ends_it(capsys, monkeypatch, parrot):
    code, out, err = ask(capsys, monkeypatch, parrot, "Why?\n/rest\nHow?\n")
    assert (code, out) == (1, f"{ANSWER}\n")
    assert err.startswith("minivllm: error: unknown command /rest")


def test_a_closed_stdin_is_one_message(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat"]) == 1
    assert "standard input, which is closed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Why?"], "'Why?' is one argument too many"),
        (["--url", "x"], "'x' is no address such as"),
        (["--url", "http://x", "--backend", "numpy"], "the server decides that"),
        (
            ["--url", "http://x", "--max-model-len", "9"],
            "argument --max-model-len: with",
        ),
        (["--max-model-len", "0"], "'0' is no integer of at least 1"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    capsys, monkeypatch, arguments, message
):
    code, out, err = pipe(capsys, monkeypatch, "", *arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


# With a model, at a terminal.


class Terminal:
    """A chat with somebody at the keyboard."""

    def __init__(self, model: str, *arguments: str) -> None:
        import fcntl
        import pty
        import termios

        self.screen = b""
        self.end, tty = pty.openpty()
        # A shell's background job ignores SIGINT, and its children inherit that.
        reset = (
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        )
        run = "from minivllm.cli.main import main; raise SystemExit(main())"
        options = ("--model", model, "--backend", "numpy", *arguments)
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{reset}; {run}", "chat", *options],
            stdin=tty,
            stdout=tty,
            stderr=tty,
            env=os.environ | {"TERM": "dumb"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(tty)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)

    def wait_for(self, text: str) -> None:
        """Read until the screen shows a text that was not waited for before."""
        while text.encode() not in self.screen:
            is_ready, _, _ = select.select([self.end], [], [], 30.0)
            assert is_ready, f"{text!r} is not on the screen: {self.screen!r}"
            self.screen += os.read(self.end, 65536)
        self.screen = self.screen.partition(text.encode())[2]

    def type(self, text: str) -> None:
        """Press keys, not as quickly as a machine could.

        Python looks for a Ctrl-C that came just after the prompt at the next key only.
        """
        time.sleep(0.2)
        os.write(self.end, text.encode())


at_terminals = pytest.mark.skipif(os.name != "posix", reason="needs a pty")


@at_terminals
def test_ctrl_c_stops_the_answer_and_not_the_program(endless):
    with Terminal(endless, "--verbose") as terminal:
        terminal.wait_for("/help lists the commands")
        terminal.wait_for("> ")
        terminal.type("Why?\n")
        terminal.wait_for("xyzxyz")
        terminal.type("\x03")
        terminal.wait_for("finish reason: abort")
        terminal.wait_for("> ")
        terminal.type("an unfinished line\x03")  # dropped
        terminal.wait_for("> ")
        terminal.type("/undo\n")
        terminal.wait_for("taken back: Why?")  # the partial answer had been kept
        terminal.wait_for("> ")
        terminal.type("How?\n")
        terminal.wait_for("xyzxyz")
        terminal.type("\x03")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0
    assert b"Traceback" not in terminal.screen


@at_terminals
def test_a_terminal_reads_blocks_and_quits(parrot):
    with Terminal(parrot) as terminal:
        terminal.wait_for("> ")
        terminal.type('"""Why\n')
        terminal.wait_for("... ")
        terminal.type('is it?"""\n')
        terminal.wait_for(ANSWER)
        terminal.wait_for("> ")
        terminal.type("/quit\n")
        assert terminal.process.wait(timeout=60) == 0


def test_ctrl_c_in_a_pipe_ends_the_program(endless):
    reset = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = "from minivllm.cli.main import main; raise SystemExit(main())"
    options = ("--model", endless, "--backend", "numpy")
    process = subprocess.Popen(
        [sys.executable, "-c", f"{reset}; {run}", "chat", *options],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdin.write(b"Why?\nHow?\n")
    start = process.stdout.read(3)
    process.send_signal(2)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"minivllm: interrupted\n")
    text = start + out
    assert text.endswith(b"\n") and (b"xyz" * 2000).startswith(text[:-1])


# With a server.

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}
STREAM = [
    *(HEAD, delta_event(role="assistant", content="")),
    *(delta_event(reasoning_content="Hm."), delta_event(content="Yes")),
    event(choices=[{"delta": {}, "finish_reason": "stop"}]),
    *(event(choices=[], usage=USAGE), DONE),
]


def test_a_server_can_be_asked_instead(capsys, monkeypatch):
    answers = iter([STREAM, STREAM])

    def answer(request):
        return next(answers) if request.method == "POST" else None

    options = ("--temperature", "auto", "--top-k", "5", "--seed", "3", "--verbose")
    with scripted_server(answer) as (url, seen):
        code, out, err = pipe(
            *(capsys, monkeypatch, "Why?\nHow?\n", "--url", f"{url}/v1", *options),
            *("--api-key", "k", "--chat-template-kwargs", '{"enable_thinking": true}'),
        )
    assert (code, out) == (0, "Yes\nYes\n")
    assert err.startswith("Hm.\nminivllm: 9 prompt tokens (4 cached), 3 new tokens, ")
    assert seen[0].headers["authorization"] == "bearer k"
    assert seen[1].body == {
        "model": "parrot",
        "messages": [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "Yes"},
            {"role": "user", "content": "How?"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 5,
        "seed": 3,
        "chat_template_kwargs": {"enable_thinking": True},
    }


def test_a_named_model_is_asked_for(capsys, monkeypatch):
    with scripted_server(lambda r: STREAM if r.method == "POST" else None) as (
        url,
        seen,
    ):
        options = ("--url", url, "--model", "other", "--temperature", "0.5")
        assert pipe(capsys, monkeypatch, "Why?\n", *options)[0] == 0
    assert (seen[0].body["model"], seen[0].body["temperature"]) == ("other", 0.5)
    assert "seed" not in seen[0].body and "max_tokens" not in seen[0].body


def test_a_server_without_room_makes_the_chat_shorter(capsys, monkeypatch):
    body = b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'
    full = [respond("400 Bad Request", body)]
    answers = iter([STREAM, full, STREAM, full])

    def answer(request):
        return next(answers) if request.method == "POST" else None

    with scripted_server(answer) as (url, seen):
        text = "Why?\nHow?\n"
        code, out, err = pipe(capsys, monkeypatch, text, "--url", url)
        assert (code, out) == (0, "Yes\nYes\n")
        assert "the oldest 1 turns are forgotten" in err
        code, out, err = pipe(capsys, monkeypatch, text, "--url", url)
    assert (code, out) == (1, "") and err == "minivllm: error: too long\n"
    counts = [len(request.body["messages"]) for request in seen]
    assert counts == [1, 3, 1, 1]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([error("500 Oops", "it broke")], "(HTTP 500): it broke"),
        ([respond("404 No", b"<html>")], "(HTTP 404): <html>"),
        ([HEAD, delta_event(content="a"), HANG_UP], "lost the server at http"),
        ([HEAD, delta_event(content="a")], "the answer breaks off"),
        ([HEAD, event(error={"message": "dead"})], "the server says: dead"),
        ([HEAD, b"data: {}\n\n"], "sent b'{}', which is no part of an answer"),
        ([HANG_UP], "lost the server at http"),
        ([b"nonsense\r\n\r\n"], "lost the server at http"),
    ],
)
def test_a_server_that_fails_is_a_message(capsys, monkeypatch, script, message):
    with scripted_server(lambda r: script if r.method == "POST" else None) as (url, _):
        code, _, err = pipe(capsys, monkeypatch, "Why?\n", "--url", url)
    assert code == 1 and message in err and "Traceback" not in err


def test_no_server_is_a_message(capsys, monkeypatch):
    code, out, err = pipe(capsys, monkeypatch, "Why?\n", "--url", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert "lost the server at http://127.0.0.1:9 (" in err and err.count("\n") == 1


@pytest.mark.parametrize("body", [b"{}", b"<html>", b'{"data": [3]}', b'{"data": []}'])
def test_a_server_without_models_is_refused(body):
    with scripted_server(lambda request: [respond("200 OK", body)]) as (url, _):
        answerer = ServerAnswerer(url)
        with pytest.raises(MinivllmError, match="names no models"):
            answerer.models()


def test_dropping_an_answer_hangs_up():
    gone = []

    def answer(request):
        yield HEAD
        for _ in range(500):
            yield delta_event(content="a" * 1000)
            yield 0.01
        gone.append("no")

    with scripted_server(lambda r: answer(r) if r.method == "POST" else None) as (
        url,
        _,
    ):
        pieces = ServerAnswerer(url).start([{"role": "user", "content": "x"}])
        assert next(pieces).text
        start = time.perf_counter()
        pieces.close()
        assert time.perf_counter() - start < 2
    assert not gone


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b"3", b'{"choices": [{}]}', b'{"choices": [1, 2]}', b"\xff"]
)
def test_an_event_that_is_none_is_refused(data):
    with pytest.raises(MinivllmError, match="which is no part of an answer"):
        piece_in(data)
