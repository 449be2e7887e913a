"""Bodies of OpenAI's interface: what is read, what is refused, and in which words."""

import importlib
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import BackendUnavailable, ConfigError, RequestError
from minivllm.sampling.params import UNSET
from minivllm.server.errors import ApiError, error_of
from minivllm.server.handlers import EngineView, Handlers
from minivllm.server.protocol import ChatCompletionRequest, CompletionRequest
from minivllm.server.reading import read
from minivllm.server.responses import ErrorResponse
from tests.server_tools import CLOCK, EOS, USER, WEATHER, qwen_tokenizer, scripted
from tests.tiny_tokenizers import CHATML, byte_level, load, sentencepiece

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return qwen_tokenizer(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def handlers(tokenizer):
    engine = EngineView(tokenizer=tokenizer, max_model_len=4096)
    return Handlers(engine, model="m", served_names=["m", "other"])


def chat(**fields):
    return {"messages": [USER], **fields}


def refusal(parse, body):
    with pytest.raises(ApiError) as caught:
        parse(body)
    ErrorResponse.model_validate(caught.value.body())
    return caught.value


# --- Bytes ---


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff{}",
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\x80"}',  # half a character, in bytes
        rb'{"model": "\ud800"}',  # and in JSON
        rb'{"metadata": {"a": "\udfff"}}',
        b'{"temperature": NaN}',
        b'{"chat_template_kwargs": {"a": [-Infinity]}}',
        b'{"seed": 1' + b"0" * 5000 + b"}",
        b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b"[" * 100_000,
        b"{} {}",
        "{}".encode("utf-16"),
        {"model": "\ud800"},
        {"metadata": {"\udfff": "a"}},
        {"temperature": float("nan")},
        {"chat_template_kwargs": {"a": [float("-inf")]}},
        {"seed": 10**5000},
        {"model": object()},
        {"model": b"bytes"},
        {("a", "b"): 1},
        "\ud800",
        5,
        None,
    ],
)
def test_what_is_no_json_is_refused_and_nothing_else_is_raised(handlers, body):
    error = refusal(handlers.parse_chat, body)
    assert (error.status, error.param) == (400, None)
    assert str(error).startswith("the body is no JSON (")


@pytest.mark.parametrize("field", ["chat_template_kwargs", "guided_json"])
def test_a_number_that_becomes_infinite_is_refused_however_deep_it_is(handlers, field):
    body = json.dumps(chat(**{field: {"enable_thinking": [5]}}))
    error = refusal(handlers.parse_chat, body.replace("5", "1e999"))
    assert error.param == field
    assert "too large for a float" in str(error)


@pytest.mark.parametrize("body", [b"[]", b"null", b"5", b'"{}"', "[1]"])
def test_json_that_is_no_object_is_refused(handlers, body):
    assert "must be an object" in str(refusal(handlers.parse_chat, body))


def test_a_dictionary_with_itself_in_it_is_refused(handlers):
    body = chat()
    body["metadata"] = body
    assert "no JSON" in str(refusal(handlers.parse_chat, body))
    deep = {}
    for _ in range(100_000):
        deep = {"a": deep}
    assert "no JSON" in str(refusal(handlers.parse_chat, chat(metadata=deep)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
NAMES = [*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields]
VALUES = st.sampled_from(
    [
        USER,
        [USER],
        [],
        [[]],
        "a",
        ["a"],
        [1],
        [[1]],
        WEATHER,
        [WEATHER],
        2**63,
        -1,
        1e999,
    ]
)


@given(st.dictionaries(st.sampled_from([*NAMES, "audio", "x"]), JSON | VALUES))
def test_whatever_the_fields_hold_there_is_a_job_or_a_refusal(handlers, body):
    for parse, usual in (
        (handlers.parse_chat, {"messages": [USER]}),
        (handlers.parse_completion, {"prompt": "a"}),
        (handlers.tokenize, {"prompt": "a"}),
    ):
        for value in (body, usual | body, json.dumps(usual | body)):
            try:
                parse(value)
            except ApiError as error:
                assert error.status in (400, 404)
                json.dumps(error.body(), allow_nan=False).encode()


@given(st.binary() | st.text())
def test_whatever_the_bytes_are_there_is_a_refusal(handlers, body):
    refusal(handlers.parse_chat, body)


def test_bytes_and_a_dictionary_are_read_alike(handlers):
    body = chat(logit_bias={"5": 1.5}, seed=3, stop="x")
    jobs = [
        handlers.parse_chat(form)
        for form in (body, json.dumps(body), json.dumps(body).encode())
    ]
    assert jobs[0].prompts == jobs[1].prompts == jobs[2].prompts
    assert len({repr(job.sampling_params) for job in jobs}) == 1


# --- Fields ---


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"zzz": 1}, "zzz", "the unknown field zzz: leave it out"),
        (
            {"stream": True, "stream_options": {"usage": 1}},
            "stream_options.usage",
            "takes include_usage",
        ),
        ({"temperature": "hot"}, "temperature", '"hot", but must be a number'),
        ({"temperature": True}, "temperature", "true, but must be a number"),
        ({"temperature": -1}, "temperature", "from 0 (greedy)"),
        ({"top_k": 1.5}, "top_k", "1.5, but must be an integer"),
        ({"n": True}, "n", "true, but must be an integer"),
        ({"n": 0}, "n", "from 1 to 1,024"),
        ({"stream": "yes"}, "stream", "must be true or false"),
        ({"stop": 5}, "stop", "must be a text or a list"),
        ({"stop": ["a", 1]}, "stop[1]", "must be a text"),
        ({"stop": list("abcde")}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "none of them empty"),
        ({"seed": 2**63}, "seed", "must be below"),
        ({"seed": -(2**63) - 1}, "seed", "must be at least"),
        ({"priority": 2**63}, "priority", "must be below"),
        ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "the key 'x', but keys are token ids"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "keys are token ids"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "two biases for token 5"),
        ({"z" * 1000: 1}, "z" * 40, "unknown field"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object"),
        ({"metadata": {"a": 1}}, "metadata.a", "must be a text"),
        ({"response_format": {"type": "x"}}, "response_format.type", "'json_object'"),
        ({"response_format": {}}, "response_format.type", "is missing"),
        ({"guided_json": "{"}, "guided_json", "a JSON schema"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most max_tokens"),
        ({"model": "gpt-5"}, "model", "this server has 'm', 'other'"),
    ],
)
@pytest.mark.parametrize("prompt", [{"messages": [USER]}, {"prompt": "a"}])
def test_a_wrong_field_is_named_with_its_value_and_what_it_must_be(
    handlers, prompt, fields, param, words
):
    parse = handlers.parse_completion if "prompt" in prompt else handlers.parse_chat
    error = refusal(parse, {**prompt, **fields})
    assert error.param == param
    assert words in str(error)
    assert error.status == (404 if param == "model" else 400)
    assert error.code == ("model_not_found" if param == "model" else None)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "Hi"}, "messages", "must be a list"),
        ({"messages": [5]}, "messages[0]", "must be an object"),
        ({"messages": [{**USER, "nam": "x"}]}, "messages[0].nam", "mean name?"),
        ({"messages": [{"role": "x"}]}, "messages[0].role", "'system', 'developer'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content",
            "a list",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "a part of type 'image_url' at 0, but this server reads text only",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages", "has no content"),
        (
            {"messages": [{"role": "tool", "content": "5"}]},
            "messages[0].tool_call_id",
            "",
        ),
        ({"messages": [{"role": "function", "content": "5"}]}, "messages[0].role", ""),
        ({"max_tokens": 0}, "max_tokens", "above 0"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "above 0"),
        (
            {"max_tokens": 4, "max_completion_tokens": 5},
            "max_completion_tokens",
            "is 4",
        ),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs is not true"),
        ({"logprobs": 3}, "logprobs", "true or false"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "at least 0"),
        ({"stream_options": {}}, "stream_options", "stream is not true"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "no place"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "must be a text that matches",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "all"}, "tool_choice", "'none', 'auto' or 'required'"),
        (
            {
                "tools": [WEATHER, CLOCK],
                "tool_choice": {"type": "function", "function": {"name": "x"}},
            },
            "tool_choice",
            "the tools are weather, clock",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "a", "parameters": {"type": "string"}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
            "arguments are an object",
        ),
        (
            {"tools": [CLOCK], "tool_choice": "required", "guided_regex": "a"},
            "tool_choice",
            "guided_regex and tool_choice are given",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_choice": ["a"]},
            "response_format",
            "choose one",
        ),
        (
            {"structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs.regex",
            "structured_outputs.json and structured_outputs.regex are given",
        ),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "response_format",
            "response_format ends the answer",
        ),
        (
            {"chat_template_kwargs": {"enable_thinkin": 1}},
            "chat_template_kwargs",
            "did you mean enable_thinking?",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "beside"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "leave one out",
        ),
    ],
)
def test_a_chat_that_cannot_be_answered_is_refused_by_field(
    handlers, fields, param, words
):
    error = refusal(handlers.parse_chat, chat(**fields))
    assert (error.status, error.param) == (400, param)
    assert words in str(error)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "prompt", "is missing"),
        ({"prompt": None}, "prompt", "must be a text"),
        ({"prompt": []}, "prompt", "must have an entry"),
        ({"prompt": [1, "a"]}, "prompt", "a list of texts, a list of token ids"),
        ({"prompt": ["a", [1]]}, "prompt", "choose one of these"),
        ({"prompt": [1, True]}, "prompt", "choose one of these"),
        ({"prompt": [1.0]}, "prompt", "choose one of these"),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]", "must be an integer"),
        ({"prompt": "a", "best_of": 3}, "best_of", "tells all 1 answers"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "this server does not do that"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "an integer"),
        ({"prompt": "a", "split_reasoning": True}, "split_reasoning", "ask for a chat"),
        ({"prompt": [2**63], "echo": True}, "prompt", "out of range"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "above 0"),
    ],
)
def test_a_completion_that_cannot_be_made_is_refused_by_field(
    handlers, fields, param, words
):
    error = refusal(handlers.parse_completion, fields)
    assert (error.status, error.param) == (400, param)
    assert words in str(error)


FOREIGN_NEUTRAL = {
    "modalities": ["text"],
    "functions": [],
    "function_call": "none",
    "verbosity": "medium",
    "echo": False,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "add_special_tokens": False,
    "documents": [],
    "logits_processors": [],
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "prompt_cache_retention": "in_memory",
}
FOREIGN_GIVEN = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "web_search_options": {},
    "functions": [CLOCK],
    "reasoning_effort": "low",
    "echo": True,
    "chat_template": "{{ messages }}",
    "use_beam_search": True,
    "length_penalty": True,  # which is 1, too
    "add_special_tokens": True,
    "return_token_ids": 0,
}


def test_fields_that_we_lack_are_taken_only_if_they_ask_for_nothing(handlers):
    plain = handlers.parse_chat(chat())
    nulls = dict.fromkeys([*FOREIGN_NEUTRAL, *FOREIGN_GIVEN])
    for fields in (FOREIGN_NEUTRAL, nulls, {"length_penalty": 1}):
        assert handlers.parse_chat(chat(**fields)).prompts == plain.prompts
    for fields in ({"split_reasoning": False}, {"suffix": ""}, {"best_of": 1}):
        handlers.parse_completion({"prompt": "a", **fields})
    handlers.tokenize({"prompt": "a", "documents": []})
    for name, value in FOREIGN_GIVEN.items():
        error = refusal(handlers.parse_chat, chat(**{name: value}))
        assert error.param == name
        assert "but this server does not do that: " in str(error)


def test_null_stands_for_the_default_everywhere(handlers):
    names = {*ChatCompletionRequest.model_fields} - {"messages"}
    nulls = handlers.parse_chat(chat(**dict.fromkeys(names)))
    plain = handlers.parse_chat(chat())
    assert nulls.sampling_params == plain.sampling_params
    assert nulls.sampling_params[0].max_tokens is UNSET
    assert (nulls.default_max_tokens, nulls.stream, nulls.priority) == (None, False, 0)
    names = {*CompletionRequest.model_fields} - {"prompt"}
    nulls = handlers.parse_completion({"prompt": "a", **dict.fromkeys(names)})
    assert (
        nulls.sampling_params
        == handlers.parse_completion({"prompt": "a"}).sampling_params
    )
    assert nulls.default_max_tokens == 16


def test_fields_that_change_nothing_change_nothing(handlers):
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    job = handlers.parse_chat(chat(**fields))
    assert job.prompts == handlers.parse_chat(chat()).prompts
    assert not job.sampling_params[0].given().keys() - {"split_reasoning"}


def test_every_plain_parameter_reaches_the_engine(handlers):
    values = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "bad_words": ["x"],
        "allowed_token_ids": [1, 2],
        "seed": 5,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["s"],
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logit_bias": {"5": 1.0},
    }
    expected = values | {
        "bad_words": ("x",),
        "allowed_token_ids": (1, 2),
        "stop": ("s",),
        "stop_token_ids": (7,),
        "logit_bias": {5: 1.0},
    }
    for job in (
        handlers.parse_chat(chat(**values, split_reasoning=False)),
        handlers.parse_completion({"prompt": "a", **values}),
    ):
        assert job.sampling_params[0].given() == expected
    for name, value in (
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("guided_choice", ("a", "b")),
        ("guided_grammar", 'start: "a"'),
    ):
        body = {"prompt": "a", name: list(value) if name[7:] == "choice" else value}
        for fields in (
            body,
            {"prompt": "a", "structured_outputs": {name[7:]: body[name]}},
        ):
            [params] = handlers.parse_completion(fields).sampling_params
            assert params.given() == {name: value}


def test_options_of_the_job_are_handed_on(handlers):
    job = handlers.parse_chat(
        chat(
            model="other",
            priority=-3,
            cache_salt="s",
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert (job.model, job.priority, job.cache_salt) == ("other", -3, "s")
    assert job.stream and job.include_usage
    assert handlers.parse_chat(chat()).model == "m"


@pytest.mark.parametrize(
    ("seed", "taken"), [(-1, 2**64 - 1), (-(2**63), 2**63), (0, 0), (7, 7)]
)
def test_a_negative_seed_is_taken_as_unsigned(handlers, seed, taken):
    assert handlers.parse_chat(chat(seed=seed)).sampling_params[0].seed == taken


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": ADD}},
            ADD,
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "strict": True}},
            {"type": "object"},
        ),
    ],
)
def test_a_response_format_becomes_a_schema(handlers, form, schema):
    [params] = handlers.parse_chat(chat(response_format=form)).sampling_params
    assert params.guided_json == schema
    # What follows a grammar from the first token on has no room for thoughts.
    assert params.split_reasoning == (schema is None)
    body = chat(response_format=form, split_reasoning=True)
    assert handlers.parse_chat(body).sampling_params == [params]


def test_thoughts_are_split_where_the_model_knows_them(handlers, tmp_path):
    assert handlers.parse_chat(chat()).sampling_params[0].split_reasoning
    [params] = handlers.parse_chat(chat(split_reasoning=False)).sampling_params
    assert not params.split_reasoning
    metadata = byte_level(**{"tokenizer.chat_template": CHATML}, eos_token_id=1)
    metadata["tokenizer.chat_template"] = CHATML
    plain = load(metadata, tmp_path)
    engine = EngineView(tokenizer=plain, max_model_len=100)
    [params] = Handlers(engine, model="m").parse_chat(chat()).sampling_params
    assert not params.split_reasoning
    body = chat(split_reasoning=True)
    [params] = Handlers(engine, model="m").parse_chat(body).sampling_params
    assert params.split_reasoning
    # The template alone knows them, or the vocabulary alone.
    metadata["tokenizer.chat_template"] = f"{CHATML}<think>"
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for knowing in (
        load(metadata, tmp_path / "a"),
        qwen_tokenizer(tmp_path / "b", template=CHATML),
    ):
        engine = EngineView(tokenizer=knowing, max_model_len=100)
        [params] = Handlers(engine, model="m").parse_chat(chat()).sampling_params
        assert params.split_reasoning


# --- Messages ---


def prompt_of(handlers, tokenizer, **fields):
    [token_ids] = handlers.parse_chat(fields).prompts
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def test_a_developer_speaks_as_the_system(handlers, tokenizer):
    texts = [
        prompt_of(
            handlers, tokenizer, messages=[{"role": role, "content": "Be brief."}, USER]
        )
        for role in ("developer", "system")
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_text_parts_are_joined_where_the_template_takes_texts(handlers, tokenizer):
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    messages = [{"role": "user", "content": parts}]
    assert "user\na\nb<|im_end|>" in prompt_of(handlers, tokenizer, messages=messages)


def test_calls_go_back_to_the_template_as_objects(handlers, tokenizer):
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Ål","n":[1]}'},
    }
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    text = prompt_of(handlers, tokenizer, messages=messages, tools=[WEATHER])
    assert (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ål", "n": [1]}}\n'
        "</tool_call>" in text
    )
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert json.dumps(WEATHER) in text
    for arguments in ("{", "[1]", "5", "NaN", "[" * 100_000):
        call["function"]["arguments"] = arguments
        error = refusal(handlers.parse_chat, {"messages": messages})
        assert error.param == "messages[1].tool_calls[0].function.arguments"


def test_old_thoughts_go_back_to_the_template(handlers, tokenizer):
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "So"}
    text = prompt_of(handlers, tokenizer, messages=[USER, answer])
    assert "<think>\nSo\n</think>\n\nYes." in text


def test_an_answer_of_ours_can_be_sent_back_as_it_is(handlers):
    for message in (
        {"role": "assistant", "content": "a", "refusal": None},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": [
                {
                    "id": "c",
                    "index": 0,
                    "type": "function",
                    "function": {"name": "clock", "arguments": ""},
                }
            ],
        },
    ):
        handlers.parse_chat({"messages": [USER, message, USER]})


def test_tools_are_not_shown_if_none_is_to_be_called(handlers, tokenizer):
    body = chat(tools=[WEATHER], tool_choice="none")
    assert handlers.parse_chat(body).prompts == handlers.parse_chat(chat()).prompts
    assert handlers.parse_chat(chat(tools=[])).prompts == [
        *handlers.parse_chat(chat()).prompts
    ]
    shown = handlers.parse_chat(chat(tools=[WEATHER], tool_choice="auto")).prompts
    assert shown == handlers.parse_chat(chat(tools=[WEATHER])).prompts
    assert "<tools>" in tokenizer.decode(shown[0])


def test_tools_are_refused_where_the_template_has_no_place_for_them(tmp_path):
    plain = qwen_tokenizer(tmp_path, template=CHATML)
    engine = EngineView(tokenizer=plain, max_model_len=100)
    error = refusal(Handlers(engine, model="m").parse_chat, chat(tools=[CLOCK]))
    assert error.param == "tools"
    assert "has no place for them" in str(error)


SCHEMA_OF_BOTH = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"enum": ["weather"]},
                    "parameters": WEATHER["function"]["parameters"],
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {
                    "name": {"enum": ["clock"]},
                    "parameters": {
                        "type": "object",
                        "properties": {},
                        "additionalProperties": False,
                    },
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            },
        ]
    },
}


def test_a_forced_call_is_a_grammar(handlers):
    tools = [WEATHER, CLOCK]
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, more, schema in (
        ("required", {}, SCHEMA_OF_BOTH),
        ("required", {"parallel_tool_calls": False}, {**SCHEMA_OF_BOTH, "maxItems": 1}),
        (named, {}, WEATHER["function"]["parameters"]),
        ("auto", {}, None),
    ):
        job = handlers.parse_chat(chat(tools=tools, tool_choice=choice, **more))
        assert job.sampling_params[0].guided_json == schema
        assert job.prompts == handlers.parse_chat(chat(tools=tools)).prompts


def with_definition(name, definition):
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "$defs": {"A": definition},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_definitions_stand_where_references_find_them(handlers):
    tools = [with_definition(name, {"type": "string"}) for name in ("f", "g")]
    job = handlers.parse_chat(chat(tools=tools, tool_choice="required"))
    schema = job.sampling_params[0].guided_json
    assert schema["$defs"] == {"A": {"type": "string"}}
    assert "$defs" not in json.dumps(schema["items"]["anyOf"]).replace("#/$defs/A", "")
    tools[1] = with_definition("g", {"type": "integer"})
    error = refusal(handlers.parse_chat, chat(tools=tools, tool_choice="required"))
    assert "two different $defs of the name 'A'" in str(error)


def test_markup_is_kept_where_the_tag_of_a_call_is_markup(tmp_path, tokenizer):
    from minivllm.loading.gguf_vocabulary import TokenType

    control = qwen_tokenizer(tmp_path, call_kind=TokenType.CONTROL)
    for known, keeps in ((control, True), (tokenizer, False)):
        engine = EngineView(tokenizer=known, max_model_len=4096)
        handlers = Handlers(engine, model="m")
        for tools, kept in (([CLOCK], keeps), ([], False)):
            [params] = handlers.parse_chat(chat(tools=tools)).sampling_params
            assert params.skip_special_tokens is not kept
    handlers = Handlers(EngineView(tokenizer=control, max_model_len=99), model="m")
    body = chat(tools=[CLOCK], skip_special_tokens=True)
    assert handlers.parse_chat(body).sampling_params[0].skip_special_tokens


# --- How a prompt ends ---


def test_the_last_message_can_be_gone_on_with(handlers, tokenizer):
    for content in ("im", "assistant", "end ", "<|im_end|>", "Well,\n\n"):
        messages = [USER, {"role": "assistant", "content": content}]
        text = prompt_of(
            handlers, tokenizer, messages=messages, continue_final_message=True
        )
        # A last answer has its thoughts, in Qwen3's format.
        assert text.endswith(f"assistant\n<think>\n\n</think>\n\n{content}")
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    text = prompt_of(
        handlers,
        tokenizer,
        messages=[{"role": "user", "content": parts}],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert text.endswith("<|im_start|>user\na\nb")


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": ""},
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [{"type": "text", "text": ""}],
        },
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c", "function": {"name": "clock", "arguments": "{}"}}
            ],
        },
    ],
)
def test_a_message_without_text_cannot_be_gone_on_with(handlers, last):
    body = {"messages": [USER, last], "continue_final_message": True}
    assert "no text to go on with" in str(refusal(handlers.parse_chat, body))


def test_a_template_that_leaves_the_last_message_out_is_told(tmp_path):
    deaf = qwen_tokenizer(tmp_path, template="{{ messages[0].role }}")
    with pytest.raises(RequestError, match="leaves the last message out"):
        deaf.encode_chat([USER], continue_final_message=True)
    with pytest.raises(RequestError, match="no text to go on with"):
        deaf.encode_chat([], continue_final_message=True)


def test_the_prompt_may_end_with_the_last_message(handlers, tokenizer):
    text = prompt_of(handlers, tokenizer, messages=[USER], add_generation_prompt=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"


# --- Prompts of completions ---


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ("<|im_end|>", [[EOS]]),
        ([[]], [[]]),  # for the engine to refuse
    ],
)
def test_a_prompt_is_text_or_tokens_one_or_many(handlers, prompt, token_ids):
    job = handlers.parse_completion({"prompt": prompt})
    assert job.prompts == token_ids
    assert len(job.sampling_params) == len(token_ids)


def test_special_tokens_are_put_in_front_unless_told_not_to(tmp_path):
    spm = load(sentencepiece({"▁": -1.0, "a": -2.0}), tmp_path)
    handlers = Handlers(EngineView(tokenizer=spm, max_model_len=99), model="m")
    [with_bos] = handlers.parse_completion({"prompt": "a"}).prompts
    [without] = handlers.parse_completion(
        {"prompt": "a", "add_special_tokens": False}
    ).prompts
    assert with_bos == [spm.bos_token_id, *without]
    for special, token_ids in ((None, with_bos), (True, with_bos), (False, without)):
        body = {"prompt": "a", "add_special_tokens": special}
        assert handlers.tokenize(body)["tokens"] == token_ids
    empty = handlers.parse_completion({"prompt": ""}).prompts
    assert empty == [[spm.bos_token_id]]


def test_a_model_without_a_tokenizer_continues_tokens_only():
    handlers = Handlers(EngineView(tokenizer=None, max_model_len=99), model="m")
    assert handlers.parse_completion({"prompt": [1]}).prompts == [[1]]
    for parse, body, param in (
        (handlers.parse_completion, {"prompt": "a"}, "prompt"),
        (handlers.parse_completion, {"prompt": [1], "echo": True}, "echo"),
        (handlers.parse_chat, chat(), "messages"),
        (handlers.tokenize, {"prompt": "a"}, "prompt"),
        (handlers.detokenize, {"tokens": [1]}, "tokens"),
    ):
        error = refusal(parse, body)
        assert error.param == param
        assert "no tokenizer" in str(error)


# --- What the engine refuses ---


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "0 tokens"),
        ({"prompt": [[5], []]}, "prompt", "prompt 1: the prompt has 0 tokens"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [1000]}, "prompt", "the model knows 0 to 261"),
        ({"prompt": [2**63]}, "prompt", "token id 9223372036854775808"),
        ({"prompt": "a", "logit_bias": {"1000": 1}}, "logit_bias", "1000"),
        ({"prompt": "a", "stop_token_ids": [1000]}, "stop_token_ids", "1000"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "max_logprobs is 20"),
        (
            {"messages": [USER], "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "",
        ),
        (
            {"messages": [USER], "response_format": {"type": "json_object"}},
            "response_format",
            "response_format needs the package llguidance",
        ),
        (
            {"messages": [USER], "tools": [CLOCK], "tool_choice": "required"},
            "tool_choice",
            "tool_choice needs the package llguidance",
        ),
    ],
)
def test_the_engines_refusal_names_the_field_of_the_body(
    tokenizer, monkeypatch, fields, param, words
):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    handlers = scripted(tokenizer)
    handle = (
        handlers.handle_chat if "messages" in fields else handlers.handle_completion
    )
    error = refusal(handle, fields)
    assert (error.status, error.param) == (400, param)
    assert words in str(error)
    assert not handlers.llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a" * 5000}, "prompt"),
        ({"prompt": "a", "max_tokens": 5000}, "prompt"),
        ({"messages": [USER], "max_completion_tokens": 5000}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
    ],
)
def test_too_long_is_told_in_numbers_and_by_a_code(tokenizer, fields, param):
    handlers = scripted(tokenizer)
    handle = (
        handlers.handle_chat if "messages" in fields else handlers.handle_completion
    )
    error = refusal(handle, fields)
    assert (error.param, error.code) == (param, "context_length_exceeded")
    assert "5,0" in str(error) and "max_model_len is 4,096" in str(error)


# --- Errors ---


def test_what_is_no_fault_of_the_request_tells_nothing_of_the_machine():
    error = error_of(OSError("/home/somebody/secret"))
    assert (error.status, error.type, error.param) == (500, "server_error", None)
    assert "secret" not in str(error)
    error = error_of(
        ConfigError("the chat template is no valid Jinja"), param="messages"
    )
    assert (error.status, error.param) == (500, None)
    assert str(error) == "the chat template is no valid Jinja"


def test_an_error_is_an_error_object():
    error = ApiError("no", status=404, param="model", code="model_not_found")
    assert error.body() == {
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    assert error_of(error) is error
    assert error_of(BackendUnavailable("top_k needs x")).status == 400


def test_words_that_are_no_field_are_left_alone():
    error = error_of(RequestError("something is wrong"), param="messages")
    assert (str(error), error.param) == ("something is wrong", "messages")
    error = error_of(RequestError("top_k and top_p"), {"top_k": "k"})
    assert (str(error), error.param) == ("k and top_p", "k")


# --- The small endpoints ---


def test_text_and_chats_become_tokens_and_tokens_text(handlers, tokenizer):
    answer = handlers.tokenize({"prompt": "é", "return_token_strs": True})
    assert answer == {
        "count": 2,
        "max_model_len": 4096,
        "tokens": [0xC3, 0xA9],
        "token_strs": ["�", "�"],
    }
    answer = handlers.tokenize(chat(tools=[CLOCK], chat_template_kwargs={}))
    assert answer["tokens"] == handlers.parse_chat(chat(tools=[CLOCK])).prompts[0]
    assert answer["token_strs"] is None
    text = handlers.detokenize({"tokens": answer["tokens"]})["prompt"]
    assert text == tokenizer.decode(answer["tokens"], skip_special_tokens=False)
    assert refusal(handlers.detokenize, {"tokens": [10**6]}).param == "tokens"
    assert refusal(handlers.tokenize, {}).param == "prompt"
    assert refusal(handlers.tokenize, chat(prompt="a")).param == "prompt"
    assert refusal(handlers.tokenize, {"prompt": "a", "model": "x"}).status == 404


def test_a_model_is_listed_under_all_its_names(handlers):
    listed = handlers.list_models()
    assert [model["id"] for model in listed["data"]] == ["m", "other"]
    assert handlers.show_model("other") in listed["data"]
    assert refusal(handlers.show_model, "gpt").code == "model_not_found"


def test_without_pydantic_the_way_to_get_it_is_told(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("minivllm.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(BackendUnavailable, match=r'pip install "minivllm\[server\]"'):
        importlib.import_module("minivllm.server.handlers")


def test_a_record_is_read_for_any_class():
    assert read(CompletionRequest, b'{"prompt": "a"}').prompt == "a"
