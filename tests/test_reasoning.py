"""Thoughts told from answers, and the variables of chat templates."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.cli.main import main
from minivllm.engine.engine import LLMEngine
from minivllm.errors import RequestError
from minivllm.llm import LLM
from minivllm.loading.gguf_vocabulary import TokenType
from minivllm.runners.fake_runner import FakeRunner
from minivllm.sampling.params import SamplingParams
from minivllm.text.chat_template import variables_of
from minivllm.text.reasoning import ReasoningSplitter, prompt_end_of
from tests.engine_tools import assert_all_free
from tests.qwen3_template import QWEN3
from tests.tiny_folder import CONFIG, EOS, make_tensors, write_checkpoint, write_parrot
from tests.tiny_tokenizers import byte_level, load, sentencepiece

HELLO = [{"role": "user", "content": "Hi"}]


# --- The splitter ---


def split(pieces, prompt_end=""):
    splitter = ReasoningSplitter(prompt_end)
    parts = [*map(splitter.add, pieces), splitter.finish()]
    thoughts, answers = ("".join(part) for part in zip(*parts, strict=True))
    return (thoughts if splitter.has_thoughts else None), answers


@pytest.mark.parametrize(
    ("prompt_end", "text", "thoughts", "answer"),
    [
        ("", "<think>\nyes\n</think>\n\nNo.", "yes", "No."),
        ("", " \n<think>yes</think>No.", "yes", "No."),
        ("", "<think>\n\n</think>\n\nNo.", "", "No."),
        ("", "<think>a\n\nb\n\n</think>c\n\nd\n", "a\n\nb", "c\n\nd\n"),
        ("", "<think>a</think>b</think>c<think>d", "a", "b</think>c<think>d"),
        ("", "<think>a<think>b</think>c", "a<think>b", "c"),
        ("", "No.\n", None, "No.\n"),
        ("", "\n No <think>a</think>", None, "\n No <think>a</think>"),
        ("", "</think>No.", None, "</think>No."),
        ("", "", None, ""),
        ("", "\n ", None, "\n "),
        ("", "<think", None, "<think"),
        ("", "<think>", "", ""),
        ("", "<think>\nyes\n</thin", "yes\n</thin", ""),
        ("", "<think>\nyes\n", "yes\n", ""),
        ("", "<think>a</table></think>b", "a</table>", "b"),
        ("", "<think>a<</think>b", "a<", "b"),
        ("", "<THINK>a</THINK>", None, "<THINK>a</THINK>"),
        ("assistant\n<think>\n", "\nyes\n</think>\n\nNo.", "yes", "No."),
        ("assistant\n<think>\n", "yes", "yes", ""),
        ("assistant\n<think>\n", "", "", ""),
        ("assistant\n<think>\nyes,\n", "and no\n</think>\nNo.", "and no", "No."),
        ("assistant\n<think>\nyes\n", "</think>No.", "", "No."),
        ("assistant\n<think>\nyes\n</th", "ink>No.", "", "No."),
        ("assistant\n<think>\nyes\n</th", "istle", "istle", ""),
        ("assistant\n<think>\nyes\n</th", "", "", ""),
        ("assistant\n<th", "ink>yes</think>No.", "yes", "No."),
        ("assistant\n<th", "e>", None, "e>"),
        ("assistant\n<think>\n\n</think>\n\n", "\nNo.", None, "No."),
        ("assistant\n<think>\n\n</think>\n\nNo", "\n<think>", None, "\n<think>"),
        ("What does <think> do?\n", "It opens.", None, "It opens."),
        ("[/INST] <think>", "yes</think>No.", "yes", "No."),
        ("[/INST] <think> \n", "yes</think>No.", "yes", "No."),
        ("assistant\n  <think>\nSo,", " yes</think>No.", " yes", "No."),
        ("<think>yes</think>No.\n<think>", "a</think>b", "a", "b"),
    ],
)
def test_thoughts_are_what_stands_between_the_tags_at_the_beginning(
    prompt_end, text, thoughts, answer
):
    assert split([text], prompt_end) == (thoughts, answer)
    assert split(list(text), prompt_end) == (thoughts, answer)


def parts_of(text):
    """Split a whole text in one go: what the splitter has to agree with."""
    if not (begun := re.match(r"\s*<think>\n*", text)):
        return None, text
    thoughts, tag, answer = text[begun.end() :].partition("</think>")
    return (thoughts.rstrip("\n"), answer.lstrip("\n")) if tag else (thoughts, "")


fragments = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</th", "ink>", "\n", " ", "a", "é"]),
    max_size=8,
)


@given(fragments)
def test_a_text_in_pieces_has_the_parts_of_the_whole(pieces):
    assert split(pieces) == parts_of("".join(pieces))


@given(fragments, fragments)
def test_what_the_prompt_has_begun_goes_on_and_is_not_repeated(prompt, pieces):
    prompt = "\n<think>" + "".join(prompt).replace("<think>", "")
    begun_thoughts, begun_answer = parts_of(prompt)
    thoughts, answer = parts_of(prompt + "".join(pieces))
    is_open = "</think>" not in prompt
    expected = (
        (thoughts[len(begun_thoughts) :] if is_open else None),
        (answer[len(begun_answer) :]),
    )
    assert split(pieces, prompt) == expected


@pytest.mark.parametrize("kind", ["none", TokenType.USER_DEFINED, TokenType.CONTROL])
def test_only_what_stands_behind_the_last_markup_token_is_the_prompts_end(
    kind, tmp_path
):
    tokenizer = thinker(tmp_path, kind)
    for text, end in {
        "<|im|>user <think><|im|>assistant\n": "assistant\n",
        "<|im|>user\n<|im|>assistant\n<think>\n": "assistant\n<think>\n",
        "é<think>": "é<think>",
        "<|im|>": "",
    }.items():
        token_ids = tokenizer.encode(text)
        assert prompt_end_of(tokenizer, token_ids) == end
    assert prompt_end_of(tokenizer, [*"é".encode()][1:]) == "\ufffd"


# --- Through the engine ---


def thinker(folder, kind):
    """Return a tokenizer of bytes that has a token for each tag, or has none."""
    added = {"<|im|>": TokenType.CONTROL, "<|end|>": TokenType.CONTROL}
    if kind != "none":
        added |= {"<think>": kind, "</think>": kind}
    return load(byte_level(added=added, eos_token_id=257), folder)


@pytest.fixture(
    scope="module", params=["none", TokenType.USER_DEFINED, TokenType.CONTROL]
)
def tokenizer(request, tmp_path_factory):
    """Tags as bytes, as tokens of text (as Qwen3 has them), or as markup."""
    return thinker(tmp_path_factory.mktemp("thinker"), request.param)


def say(tokenizer, text, prompt="<|im|>assistant\n", splits=True, **params):
    """Let a model say a text; return the outputs on the way, and the last one."""
    answers = [text] if isinstance(text, str) else text
    names = ["0", *(f"0#{n}" for n in range(1, len(answers)))]
    scripts = [tokenizer.encode(text) for text in answers]
    script = dict(zip(names, scripts, strict=True))
    runner = FakeRunner(vocab_size=tokenizer.vocab_size, script=script)
    engine = LLMEngine(runner, tokenizer=tokenizer)
    params = {"max_tokens": len(scripts[0]), "n": len(answers)} | params
    engine.add_request("0", prompt, SamplingParams(split_reasoning=splits, **params))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert_all_free(engine)
    for before, after in pairwise(outputs):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.text.startswith(old.text)
            assert (new.reasoning_content or "").startswith(old.reasoning_content or "")
    return outputs, outputs[-1].outputs


def test_thoughts_and_answer_come_apart_and_the_tokens_are_the_same(tokenizer):
    text = "<think>\n2 < 3 é\n</think>\n\nYes é.<|end|>"
    _, [whole] = say(tokenizer, text, splits=False, skip_special_tokens=False)
    outputs, [parts] = say(tokenizer, text)
    assert (parts.reasoning_content, parts.text) == ("2 < 3 é", "Yes é.")
    assert whole.text == text.removesuffix("<|end|>")
    assert whole.reasoning_content is None
    assert parts.token_ids == whole.token_ids
    assert parts.finish_reason == whole.finish_reason == "stop"
    for output in outputs[:-1]:
        on_the_way = output.outputs[0]
        assert not on_the_way.text or on_the_way.reasoning_content == "2 < 3 é"
    assert outputs[0].outputs[0].text == "", "a tag was shown"


def test_without_thoughts_the_text_is_all(tokenizer):
    _, [output] = say(tokenizer, "Yes, <think> is a tag.")
    assert (output.reasoning_content, output.text) == (None, "Yes, <think> is a tag.")


@pytest.mark.parametrize(
    ("prompt", "thoughts", "answer"),
    [
        ("<|im|>assistant\n<think>\n", "So", "Yes."),
        ("<|im|>assistant\n<think>\n\n</think>\n\n", None, "So\n</think>\n\nYes."),
        ("<|im|>assistant\n", None, "So\n</think>\n\nYes."),
        ("<|im|>user\n<think><|im|>assistant\n", None, "So\n</think>\n\nYes."),
    ],
)
def test_the_prompt_may_have_opened_or_closed_the_thoughts(
    tokenizer, prompt, thoughts, answer
):
    _, [output] = say(tokenizer, "So\n</think>\n\nYes.", prompt)
    assert (output.reasoning_content, output.text) == (thoughts, answer)


def test_thoughts_that_never_end_are_all_there_is(tokenizer):
    text = "<think>\nOn and on\n"
    _, [output] = say(tokenizer, text)
    assert (output.reasoning_content, output.text) == ("On and on\n", "")
    assert output.finish_reason == "length"


def test_a_text_cut_off_inside_a_tag_keeps_what_there_is_of_it(tmp_path):
    tokenizer = thinker(tmp_path, "none")
    num_tokens = len("<think>So\n</t")
    _, [output] = say(tokenizer, "<think>So\n</think>", max_tokens=num_tokens)
    assert (output.reasoning_content, output.text) == ("So\n</t", "")
    _, [output] = say(tokenizer, "<think>", max_tokens=4)
    assert (output.reasoning_content, output.text) == (None, "<thi")


@pytest.mark.parametrize(
    ("stop", "kept", "thoughts", "answer"),
    [
        ("or", False, "Red ", ""),  # in the thoughts
        ("or", True, "Red or", ""),
        ("lue", False, "Red or blue"[:8], ""),
        ("e.", False, "Red or blue?", "Blu"),  # in the answer
        ("\n</think>\n\n", False, "Red or blue?", ""),  # the tag itself
        ("\n</think>\n\n", True, "Red or blue?", ""),
        ("?\n</think>\n\nB", False, "Red or blue", ""),  # over the tag
        ("ink>\n\nBlu", False, "Red or blue?\n</th", ""),  # what is left is text
        ("no such", False, "Red or blue?", "Blue."),
    ],
)
def test_stop_texts_count_everywhere_and_stop_at_the_same_token(
    tokenizer, stop, kept, thoughts, answer
):
    text = "<think>\nRed or blue?\n</think>\n\nBlue."
    options = {"stop": stop, "include_stop_str_in_output": kept}
    shown = {"skip_special_tokens": False}
    _, [whole] = say(tokenizer, text, splits=False, **options, **shown)
    _, [output] = say(tokenizer, text, **options)
    assert (output.reasoning_content, output.text) == (thoughts, answer)
    assert output.token_ids == whole.token_ids
    assert output.stop_reason == whole.stop_reason


def test_each_of_several_answers_is_split_by_itself(tokenizer):
    texts = ["<think>a</think>b", "c", "<think>d"]
    _, outputs = say(tokenizer, texts, ignore_eos=True, max_tokens=17, seed=0)
    first, second, third = outputs
    assert first.reasoning_content == "a" and first.text.startswith("b")
    assert second.reasoning_content is None and second.text.startswith("c")
    assert third.reasoning_content.startswith("d") and third.text == ""


def test_an_aborted_request_keeps_what_it_has_thought(tokenizer):
    script = {"0": tokenizer.encode("<think>So\n\n\n\n\n\n\n\n\n")}
    runner = FakeRunner(vocab_size=tokenizer.vocab_size, script=script)
    engine = LLMEngine(runner, tokenizer=tokenizer)
    engine.add_request("0", [1], SamplingParams(split_reasoning=True, max_tokens=99))
    for _ in range(len(script["0"]) - 4):
        engine.step()
    [output] = engine.abort_request("0").outputs
    assert (output.reasoning_content, output.text) == ("So\n\n\n\n\n", "")


def test_a_tokenizer_with_a_space_in_front_is_split_too(tmp_path):
    tokenizer = load(sentencepiece({"▁": -1.0, "a": -2.0}), tmp_path)
    _, [output] = say(tokenizer, "<think>a</think> a", prompt=[1])
    assert (output.reasoning_content, output.text) == ("a", " a")


def test_an_engine_without_a_tokenizer_has_nothing_to_split():
    engine = LLMEngine(FakeRunner())
    with pytest.raises(RequestError, match="split_reasoning is True, but this engine"):
        engine.add_request("0", [1], SamplingParams(split_reasoning=True))
    with pytest.raises(RequestError, match="split_reasoning is 1, but must be True or"):
        SamplingParams(split_reasoning=1)


# --- Templates ---


def test_the_variables_of_a_template_are_what_it_reads_and_does_not_set():
    # A name that is set in a branch could come from the caller in the other.
    taken = {"tools", "add_generation_prompt", "enable_thinking", "thoughts"}
    assert variables_of(QWEN3) == taken
    assert variables_of("{{ messages }}{{ raise_exception('x') }}") == set()
    text = "{% set a = 1 %}{% for b in c %}{{ a }}{{ b }}{{ d if d is defined }}"
    assert variables_of(text + "{% endfor %}{{ strftime_now('%Y') }}") == {"c", "d"}


def qwen3_tokenizer(folder):
    added = dict.fromkeys(("<|im_start|>", "<|im_end|>"), TokenType.CONTROL)
    added |= dict.fromkeys(("<think>", "</think>"), TokenType.USER_DEFINED)
    metadata = byte_level(added=added, eos_token_id=257)
    return load(metadata | {"tokenizer.chat_template": QWEN3}, folder)


def test_the_switch_of_qwen3_closes_the_thoughts_in_the_prompt(tmp_path):
    tokenizer = qwen3_tokenizer(tmp_path)
    open_text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(HELLO) == open_text
    for is_on, more in ((True, ""), (False, "<think>\n\n</think>\n\n")):
        text = tokenizer.apply_chat_template(HELLO, enable_thinking=is_on)
        assert text == open_text + more


THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "So"}
INLINE = {"role": "assistant", "content": "<think>\nSo\n</think>\n\nYes."}
TOOL = {"role": "tool", "content": "5"}
CALL = {
    **THOUGHT,
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": [2, "é"]}}}],
}
CHATS = {
    "one question": HELLO,
    "with a system message": [{"role": "system", "content": "Be brief."}, *HELLO],
    "old thoughts": [*HELLO, THOUGHT, *HELLO],
    "old thoughts in the text": [*HELLO, INLINE, *HELLO],
    "the last answer": [*HELLO, THOUGHT],
    "the last answer, thoughts in the text": [*HELLO, INLINE],
    "a tool was called": [*HELLO, CALL, TOOL],
    "two tools were called": [*HELLO, THOUGHT, *HELLO, CALL, TOOL, TOOL],
}


@pytest.mark.parametrize("message", [THOUGHT, INLINE])
def test_old_thoughts_are_left_out_of_the_prompt_and_new_ones_are_not(
    tmp_path, message
):
    tokenizer = qwen3_tokenizer(tmp_path)
    old = tokenizer.apply_chat_template([*HELLO, message, *HELLO])
    assert "So" not in old and "assistant\nYes.<|im_end|>" in old
    new = tokenizer.apply_chat_template([*HELLO, message, TOOL])
    assert "assistant\n<think>\nSo\n</think>\n\nYes.<|im_end|>" in new
    assert "user\n<tool_response>\n5\n</tool_response><|im_end|>" in new


@pytest.mark.parametrize("chat", CHATS)
def test_the_template_says_the_same_as_in_transformers(tmp_path, chat):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tokenizer = qwen3_tokenizer(tmp_path)
    tools = [{"type": "function", "function": {"name": "add", "n": "é<"}}]
    for options in ({}, {"enable_thinking": False}, {"tools": tools}):
        tools_given = options.get("tools")
        (expected,), _ = utils.render_jinja_template(
            [CHATS[chat]],
            tools=tools_given,
            chat_template=QWEN3,
            add_generation_prompt=True,
            **{k: v for k, v in options.items() if k != "tools"},
        )
        assert tokenizer.apply_chat_template(CHATS[chat], **options) == expected


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"enable_thinkin": False}, "'enable_thinkin', .* did you mean enable_think"),
        ({"budget": 3}, "'budget', .* it takes add_generation_prompt, enable_thinking"),
        ({"messages": []}, "'messages', which this model's chat template does not"),
        ({3: 4}, "has 3, which"),
        ([("enable_thinking", False)], "but must be a dictionary such as"),
        ("enable_thinking", "chat_template_kwargs is 'enable_thinking', but must"),
        ({"tools": 5}, "tools in chat_template_kwargs is 5, but must be a list"),
        ({"tools": "get_time"}, "is 'get_time', but must be a list of dictionaries"),
        ({"tools": ["get_time"]}, "but must be a list of dictionaries"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(
    tmp_path, kwargs, message
):
    with pytest.raises(RequestError, match=message):
        qwen3_tokenizer(tmp_path).check_template_kwargs(kwargs)


def test_variables_may_be_none_at_all(tmp_path):
    tokenizer = qwen3_tokenizer(tmp_path)
    assert tokenizer.check_template_kwargs(None) == {}
    assert tokenizer.check_template_kwargs({}) == {}
    given = {"enable_thinking": False, "tools": [{"name": "f"}]}
    assert tokenizer.check_template_kwargs(given) == given


# --- Through LLM and the command line ---

# The prompt opens the thoughts, and the parrot says what follows its last byte.
THINKING_PARROT = (
    "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}"
    "<think>{% if enable_thinking is false %}</think>{% endif %}{{ '\\n' }}{% endif %}"
)
SENTENCE = ([*b"\nw</think>o!", EOS],)


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinking_parrot")
    return write_parrot(folder, THINKING_PARROT, SENTENCE)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_chat_thinks_or_not_and_streams_the_same(parrot, backend):
    params = SamplingParams(temperature=0, split_reasoning=True, n=2)
    silent = {"enable_thinking": False}
    with LLM(
        parrot, backend=backend, dtype="float32", device="cpu", num_blocks=64
    ) as llm:
        outputs = llm.chat([HELLO, HELLO], params)
        for output in outputs:
            for answer in output.outputs:
                assert (answer.reasoning_content, answer.text) == ("w", "o!")
        [output] = llm.chat(HELLO, params, chat_template_kwargs=silent)
        assert bytes(output.prompt_token_ids) == b"Hi;<think></think>\n"
        [answer, _] = output.outputs
        assert (answer.reasoning_content, answer.text) == (None, "w</think>o!")

        pieces = list(llm.stream(outputs[0].prompt_token_ids, params))
        for index in range(2):
            mine = [piece for piece in pieces if piece.index == index]
            assert "".join(piece.reasoning_content for piece in mine) == "w"
            assert "".join(piece.text for piece in mine) == "o!"
            assert [i for piece in mine for i in piece.token_ids] == [
                *b"w</think>o!",
                EOS,
            ]
        [output] = llm.chat(HELLO, SamplingParams(temperature=0))
        assert output.outputs[0].text == "w</think>o!"
        with pytest.raises(RequestError, match="did you mean enable_thinking"):
            llm.chat(HELLO, chat_template_kwargs={"enable_thoughts": False})


def run_command(capsys, *arguments):
    try:
        code = main(["generate", "--backend", "numpy", *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_the_command_line_writes_thoughts_to_standard_error(capsys, parrot):
    code, out, err = run_command(capsys, "--model", parrot, "Why?")
    assert (code, out) == (0, "w</think>o!\n") and err.startswith("minivllm: ")
    code, out, err = run_command(capsys, "--model", parrot, "--split-reasoning", "Why?")
    assert (code, out) == (0, "o!\n")
    assert re.match(r"w\nminivllm: 13 prompt tokens, 12 new tokens", err)
    options = ("--model", parrot, "--split-reasoning", "--max-tokens", "4")
    code, out, err = run_command(capsys, *options, "Why?")
    assert (code, out) == (0, "\n") and err.startswith("w</t\nminivllm: ")


def test_the_command_line_hands_variables_to_the_template(capsys, parrot):
    silent = ("--chat-template-kwargs", '{"enable_thinking": false}')
    options = ("--model", parrot, "--split-reasoning", *silent)
    code, out, err = run_command(capsys, *options, "Why?")
    assert (code, out) == (0, "w</think>o!\n")
    assert err.startswith("minivllm: 21 prompt tokens")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (['{"enable_thinkin": 0}'], 1, "does not take: did you mean enable_thinking?"),
        (["enable_thinking=false"], 2, "is no JSON object such as"),
        (["[1]"], 2, "'[1]' is no JSON object"),
        (['{"enable_thinking": false}', "--raw"], 1, "leave one of the two out"),
    ],
)
def test_variables_that_are_none_are_refused(capsys, parrot, options, code, message):
    given = ("--model", parrot, "--chat-template-kwargs", *options, "Why?")
    got, out, err = run_command(capsys, *given)
    assert (got, out) == (code, "")
    assert message in err


def test_the_recommended_temperature_is_taken_if_asked(capsys, tmp_path):
    folder = write_parrot(tmp_path, THINKING_PARROT, SENTENCE)
    options = ("--model", folder, "--seed", "1", "--max-tokens", "12", "Why?")
    _, greedy, _ = run_command(capsys, *options)
    recommended = {"temperature": 1e6, "top_k": 2, "eos_token_id": [0, 256]}
    path = folder / "generation_config.json"
    path.write_text(json.dumps(recommended))
    assert run_command(capsys, *options)[1] == greedy, "nobody asked"
    _, drawn, _ = run_command(capsys, "--temperature", "auto", *options)
    assert drawn != greedy
    path.write_text(json.dumps(recommended | {"top_k": 1}))
    assert run_command(capsys, "--temperature", "auto", *options)[1] == greedy


# --- Rows without a token, tokens without a row ---


def write_holes(folder, num_rows):
    """Write a model that wants to say nothing but 256 and 258, which are no tokens."""
    unused = {"[PAD256]": TokenType.UNUSED}
    load(byte_level(added={**unused, "<|end|>": TokenType.CONTROL}), folder)
    config = CONFIG | {"vocab_size": num_rows}
    tensors = make_tensors(config)
    size = config["hidden_size"]
    head = np.zeros((num_rows, size), dtype=np.float32)
    tensors["model.norm.weight"] = np.ones(size, dtype=np.float32)
    head[97] = head[98] = 1.0  # a and b, or whatever if the state is negative
    for token_id in (256, 258):
        if token_id < num_rows:
            head[token_id] = 50.0
    tensors["lm_head.weight"] = head
    tensors["model.embed_tokens.weight"] = np.ones((num_rows, size), dtype=np.float32)
    for name in tensors:
        if "proj" in name:
            tensors[name] = np.zeros_like(tensors[name])
    return write_checkpoint(folder, tensors, config)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_rows_without_a_token_are_never_sampled(tmp_path, backend):
    folder = write_holes(tmp_path, 260)
    with LLM(
        folder, backend=backend, dtype="float32", device="cpu", num_blocks=64
    ) as llm:
        assert llm.tokenizer.missing_token_ids == [256]
        assert llm.engine.runner.vocab_size == 258
        for params in (
            SamplingParams(temperature=0, max_tokens=4),
            SamplingParams(temperature=1, max_tokens=4, n=3, seed=0),
            SamplingParams(temperature=1, max_tokens=4, bad_words=["q"], seed=0),
        ):
            [output] = llm.generate("x", params)
            for answer in output.outputs:
                assert not {256, 258, 259} & {*answer.token_ids}
        [output] = llm.generate("x", SamplingParams(temperature=0, max_tokens=2))
        assert output.outputs[0].text == "aa"


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_an_added_token_without_a_row_is_refused_in_a_prompt_and_harmless_elsewhere(
    tmp_path, backend
):
    folder = write_holes(tmp_path, 257)
    added = {f"[PAD{n}]": TokenType.UNUSED for n in (256,)}
    added |= {"<image>": TokenType.CONTROL}
    load(byte_level(added=added), folder)
    with LLM(
        folder, backend=backend, dtype="float32", device="cpu", num_blocks=64
    ) as llm:
        assert llm.tokenizer.vocab_size == 258
        assert llm.engine.runner.vocab_size == 257
        [output] = llm.generate("x", SamplingParams(temperature=0, max_tokens=2))
        assert output.outputs[0].text == "aa"
        with pytest.raises(RequestError, match="token id 257, but the model knows"):
            llm.generate("<image>")
