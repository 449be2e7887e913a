"""The official client, in both its ways, in every mode: streams and whole answers."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from minivllm.engine.config import EngineConfig
from minivllm.engine.engine import LLMEngine
from minivllm.request import Request
from minivllm.runners.fake_runner import FakeRunner
from tests.served import WAIT_S, Served
from tests.server_tools import CLOCK, EOS, WEATHER, qwen_tokenizer
from tests.tiny_folder import EOS as PARROT_EOS
from tests.tiny_folder import write_parrot

# Two servers. The parrot computes, with scores and grammars: after ":" it says
# " blué!", "x", "y" and "z" follow each other, and a bracket is closed if it may be.
SENTENCES = (
    [*": blué!".encode(), PARROT_EOS],
    [*b"xyzx"],
    [*b"{}]", PARROT_EOS],
    [*b"}", PARROT_EOS],
)
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }},{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


class Repeater(FakeRunner):
    """The other one says what the last user has said, so it can call functions."""

    def _next_token(self, request: Request) -> int:
        prompt = request.token_ids[: request.num_prompt_tokens]
        text = bytes(min(token_id, 255) for token_id in prompt)
        start = text.rindex(b"\xffuser\n") + len(b"\xffuser\n")
        end = start + prompt[start:].index(EOS)
        return [*prompt[start:end], EOS][request.num_output_tokens]


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_parrot(tmp_path_factory.mktemp("parrot"), TEMPLATE, SENTENCES)
    served = Served(EngineConfig(model=str(folder), num_blocks=600, backend="numpy"))
    yield served
    served.until_idle()
    served.close()


@pytest.fixture(scope="module")
def repeater(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tokenizer = qwen_tokenizer(tmp_path_factory.mktemp("repeater"))
    engine = LLMEngine(Repeater(vocab_size=tokenizer.vocab_size))
    engine.tokenizer = tokenizer
    served = Served(engine, model="repeater")
    yield served
    served.until_idle()
    served.close()


Ask = Callable[..., Any]


def ask_synchronously(served: Served, path: str, **body: Any) -> Any:
    """Return an answer, or the chunks of a stream."""
    with synchronous(served) as client:
        found = resource(client, path).create(**body)
        return list(found) if body.get("stream") else found


def ask_asynchronously(served: Served, path: str, **body: Any) -> Any:
    """Do the same with the other client."""

    async def use() -> Any:
        async with asynchronous(served) as client:
            found = await resource(client, path).create(**body)
            return [chunk async for chunk in found] if body.get("stream") else found

    return asyncio.run(use())


# To read the certificates of the world takes longer than a test.
def synchronous(served: Served) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(http_client=http, **options_of(served))


def asynchronous(served: Served) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(http_client=http, **options_of(served))


def options_of(served: Served) -> dict[str, Any]:
    url = f"{served.url}/v1"
    return {"base_url": url, "api_key": "-", "max_retries": 0, "timeout": WAIT_S}


def resource(client: Any, path: str) -> Any:
    return client.chat.completions if path == "chat" else client.completions


@pytest.fixture(params=[ask_synchronously, ask_asynchronously])
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


CHAT = {"model": "parrot", "messages": user("sky"), "temperature": 0}
TEXT = {"model": "parrot", "prompt": "x", "temperature": 0, "max_tokens": 8}
DICE = {"temperature": 5.0, "seed": 17, "max_tokens": 20}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    CLOCK,
]
NAMED = {"type": "function", "function": {"name": "weather"}}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut off": {"max_completion_tokens": 5},
    "cut off, by the old name": {"max_tokens": 5},
    "several": {"n": 3, **DICE},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "logprobs without others": {"logprobs": True},
    "logprobs of several": {"n": 2, "logprobs": True, "top_logprobs": 2, **DICE},
    "stop": {"stop": ["xx", "u"]},
    "stop that is kept": {
        "stop": "ué",
        "extra_body": {"include_stop_str_in_output": True},
    },
    "stop at a token": {"extra_body": {"stop_token_ids": [ord("l")]}},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, **DICE},
    "bias": {"logit_bias": {str(ord("z")): 100}, "max_tokens": 4},
    "nucleus": {"top_p": 0.5, **DICE},
    "our own fields": {
        "extra_body": {
            "top_k": 9,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 3,
            "priority": 4,
            "cache_salt": "s",
        },
        **DICE,
    },
    "parts": {"messages": user([{"type": "text", "text": t} for t in ("s", "ky")])},
    "a developer": {
        "messages": [{"role": "developer", "content": "Be brief."}, *user("sky")]
    },
    "any JSON": {"response_format": {"type": "json_object"}},
    "JSON by a schema": {"response_format": FORM},
    "text": {"response_format": {"type": "text"}},
    "a choice": {"extra_body": {"guided_choice": ["red", "green"]}},
    "a named call": {"tools": TOOLS, "tool_choice": NAMED},
    "some call": {"tools": TOOLS, "tool_choice": "required"},
    "one call": {
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "calls with logprobs": {"tools": TOOLS, "tool_choice": NAMED, "logprobs": True},
    "several calls": {"tools": TOOLS, "tool_choice": "required", "n": 2, "seed": 3},
    "no call": {"tools": TOOLS, "tool_choice": "none"},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokens": {"prompt": [120, 121]},
    "texts": {"prompt": ["x", "sky:", "blué"]},
    "lists of tokens": {"prompt": [[120], [121, 122]]},
    "several of several": {"prompt": ["x", "y"], "n": 2, **DICE},
    "echo": {"echo": True},
    "echo of tokens": {"prompt": list("blué:".encode()), "echo": True},
    "logprobs": {"prompt": "sky:", "logprobs": 3},
    "logprobs of the token": {"logprobs": 0},
    "logprobs of the echo": {"prompt": "blué:", "echo": True, "logprobs": 2},
    "logprobs of several": {"prompt": ["x", "y"], "n": 2, "logprobs": 1, **DICE},
    "stop": {"stop": ["zx"]},
    "stop within a letter": {"prompt": ":", "stop": "é!"},
    "penalties": {"presence_penalty": 2.0, "frequency_penalty": -1.0, **DICE},
    "bias": {"logit_bias": {str(ord("z")): 100}},
    "best of one": {"best_of": 1},
    "our own fields": {"extra_body": {"ignore_eos": True, "bad_words": ["z"]}},
    "by a pattern": {"extra_body": {"guided_regex": "[xyz]{3}"}},
}


def plain(value: Any) -> Any:
    """Return what a record of the client holds, without what is null."""
    return None if value is None else value.model_dump(exclude_none=True)


def told(choice: Any, message: Any) -> dict[str, Any]:
    """Return what a choice says; calls get other names each time."""
    calls = [plain(call.function) for call in message.tool_calls or []]
    logprobs = plain(choice.logprobs) or {"content": []}
    return {
        "content": message.content or "",
        "calls": calls,
        "logprobs": logprobs["content"],
        "reason": choice.finish_reason,
        "stop": getattr(choice, "stop_reason", None),
    }


def joined_chat(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Put the chunks of a chat together, choice by choice."""
    whole: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            new = told(choice, choice.delta)
            first = choice.index not in whole
            assert (choice.delta.role == "assistant") == first
            known = whole.setdefault(choice.index, {**new, "calls": []})
            assert known["reason"] is None or first, "something behind the end"
            if not first:
                known["content"] += new["content"]
                known["logprobs"] += new["logprobs"]
                known |= {name: new[name] for name in ("reason", "stop")}
            for piece in choice.delta.tool_calls or []:
                if piece.id:
                    assert piece.index == len(known["calls"])
                    known["calls"].append(plain(piece.function))
                else:
                    call = known["calls"][piece.index]
                    call["arguments"] += piece.function.arguments
    return whole


def joined_completion(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Put the chunks of a completion together, choice by choice."""
    whole: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            new = choice.model_dump()
            known = whole.setdefault(choice.index, {**new, "text": "", "logprobs": {}})
            known["text"] += new["text"]
            known |= {name: new[name] for name in ("finish_reason", "stop_reason")}
            for name, values in (new["logprobs"] or {}).items():
                known["logprobs"].setdefault(name, []).extend(values)
    return whole


def check_heads(whole: Any, chunks: list[Any]) -> None:
    """Check what all chunks of a stream have in common, and its last one."""
    kinds = {"chat.completion": "chat.completion.chunk"}
    assert {chunk.object for chunk in chunks} == {kinds.get(whole.object, whole.object)}
    assert len({(c.id, c.created, c.model, c.system_fingerprint) for c in chunks}) == 1
    assert chunks[0].id != whole.id and chunks[0].model == whole.model
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    assert not chunks[-1].choices
    usages = [plain(x.usage) for x in (chunks[-1], whole)]
    for usage in usages:
        usage.pop("prompt_tokens_details")  # the second time more is cached
    assert usages[0] == usages[1] and usages[0]["completion_tokens"] > 0


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_in_pieces_is_the_whole_chat(parrot, ask, name):
    body = CHAT | {"max_tokens": 60} | CHATS[name]
    if "max_completion_tokens" in body:
        del body["max_tokens"]
    whole = ask(parrot, "chat", **body)
    chunks = ask(parrot, "chat", **body, **STREAM)
    assert isinstance(whole, ChatCompletion)
    check_heads(whole, chunks)
    expected = {c.index: told(c, c.message) for c in whole.choices}
    assert joined_chat(chunks) == expected
    assert sorted(expected) == [*range(body.get("n", 1))]


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_in_pieces_is_the_whole_completion(parrot, ask, name):
    body = TEXT | COMPLETIONS[name]
    whole = ask(parrot, "completions", **body)
    chunks = ask(parrot, "completions", **body, **STREAM)
    assert isinstance(whole, Completion)
    check_heads(whole, chunks)
    expected = {c.index: c.model_dump() for c in whole.choices}
    for choice in expected.values():
        choice["logprobs"] = choice["logprobs"] or {}
    assert joined_completion(chunks) == expected


# What is in them


def chat(parrot: Served, name: str) -> Any:
    """Return the only choice of a chat above."""
    [choice] = ask_synchronously(parrot, "chat", **CHAT | CHATS[name]).choices
    return choice


@pytest.mark.parametrize(
    "name, content, reason, stop",
    [
        ("plain", " blué!", "stop", None),
        ("cut off", " blu", "length", None),  # five bytes, half of the é
        ("cut off, by the old name", " blu", "length", None),
        ("stop", " bl", "stop", "u"),
        ("stop that is kept", " blué", "stop", "ué"),
        ("stop at a token", " b", "stop", ord("l")),
        ("bias", "zzzz", "length", None),
        ("parts", " blué!", "stop", None),
        ("a developer", " blué!", "stop", None),
        ("any JSON", "{}", "stop", None),
        ("text", " blué!", "stop", None),
        ("a choice", "green", "stop", None),
        ("no call", " blué!", "stop", None),
    ],
)
def test_a_wish_is_a_command(parrot, name, content, reason, stop):
    choice = chat(parrot, name)
    assert choice.message.content.rstrip("\ufffd") == content
    assert (choice.finish_reason, choice.stop_reason) == (reason, stop)
    assert not choice.message.tool_calls


def test_an_answer_follows_its_schema(parrot):
    content = chat(parrot, "JSON by a schema").message.content
    jsonschema.validate(json.loads(content), CITY)


@pytest.mark.parametrize(
    "name, reason",
    [("a named call", "stop"), ("some call", "tool_calls"), ("one call", "tool_calls")],
)
def test_a_forced_call_has_its_arguments(parrot, name, reason):
    choice = chat(parrot, name)
    assert choice.finish_reason == reason and not choice.message.content
    for call in choice.message.tool_calls:
        assert call.id.startswith("call_") and call.type == "function"
        schema = CITY if call.function.name == "weather" else {"maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)
    if name != "some call":
        assert len(choice.message.tool_calls) == 1


def test_logprobs_tell_every_token_of_an_answer(parrot):
    choice = chat(parrot, "logprobs")
    places = choice.logprobs.content
    data = b"".join(bytes(place.bytes) for place in places[:-1])
    assert data.decode() == choice.message.content and len(places) == 8
    for place in places:
        best = place.top_logprobs
        assert len(best) == 3 and best[0].logprob == place.logprob  # it is greedy
        assert place.logprob <= 0 and best == sorted(best, key=lambda b: -b.logprob)


def test_answers_of_one_seed_are_the_same_and_of_several_places_are_not(parrot):
    first, again = (
        ask_synchronously(parrot, "chat", **CHAT | CHATS["several"]) for _ in range(2)
    )
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 3
    other = ask_synchronously(parrot, "chat", **CHAT | CHATS["several"] | {"seed": 18})
    assert other.choices[0].message.content not in texts


def test_an_echo_with_logprobs_tells_of_the_prompt_too(parrot):
    [choice] = ask_synchronously(
        parrot, "completions", **TEXT | COMPLETIONS["logprobs of the echo"]
    ).choices
    assert choice.text == "blué: blué!"
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert None not in logprobs.token_logprobs[1:]
    offsets = [choice.text.encode()[:i].decode(errors="ignore") for i in range(13)]
    assert logprobs.text_offset == [*map(len, offsets), 11]
    assert len(logprobs.tokens) == 14  # of the prompt 6, of the answer 7, and the end


# Calls that a model makes by itself

OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
CALLS = {
    "one": f"<tool_call>\n{OSLO}\n</tool_call>",
    "text, then two": f"I look.\n<tool_call>\n{OSLO}\n</tool_call>\n"
    '<tool_call>\n{"name": "clock"}\n</tool_call>',
    "none": "It is <b>sunny</b>.",
    "no JSON": "<tool_call>so</tool_call>",
    "thoughts, then one": f"<think>\nOslo?\n</think>\n\n<tool_call>{OSLO}</tool_call>",
}


@pytest.mark.parametrize("choice", ["auto", None, "none"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_pieces_is_the_whole_call(repeater, ask, name, choice):
    body = {"model": "repeater", "messages": user(CALLS[name])}
    body |= {"tools": [WEATHER, CLOCK]}
    if choice is not None:
        body |= {"tool_choice": choice}
    whole = ask(repeater, "chat", **body)
    chunks = ask(repeater, "chat", **body, **STREAM)
    check_heads(whole, chunks)
    [found] = whole.choices
    assert joined_chat(chunks) == {0: told(found, found.message)}
    thoughts = [
        getattr(choice.delta, "reasoning_content", None) or ""
        for chunk in chunks
        for choice in chunk.choices
    ]
    hidden = getattr(found.message, "reasoning_content", None)
    assert "".join(thoughts) == (hidden or "")
    calls = [call.function.name for call in found.message.tool_calls or []]
    if choice == "none":
        assert not calls and found.finish_reason == "stop"
    else:
        expected = {"one": ["weather"], "text, then two": ["weather", "clock"]}
        expected["thoughts, then one"] = ["weather"]
        assert calls == expected.get(name, [])
        assert found.finish_reason == ("tool_calls" if calls else "stop")
        if calls:
            arguments = found.message.tool_calls[0].function.arguments
            assert json.loads(arguments) == {"city": "Oslo"}
        if name == "text, then two":
            assert found.message.content == "I look."


def test_a_whole_talk_with_a_function(repeater, ask):
    body: dict[str, Any] = {"model": "repeater", "tools": [WEATHER]}
    messages: list[Any] = user(CALLS["one"])
    message = ask(repeater, "chat", messages=messages, **body).choices[0].message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages += [message.model_dump(exclude_none=True), result, *user("So?")]
    answer = ask(repeater, "chat", messages=messages, **body).choices[0].message
    assert answer.content == "So?" and not answer.tool_calls


# The client's own ways to put streams together, and its other calls


@pytest.mark.parametrize("name", ["plain", "logprobs", "a choice", "any JSON"])
def test_the_clients_own_accumulator_agrees(parrot, name):
    body = CHAT | CHATS[name]
    whole = ask_synchronously(parrot, "chat", **body)
    with (
        synchronous(parrot) as client,
        client.chat.completions.stream(**body) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    found, expected = (
        {choice.index: told(choice, choice.message) for choice in answer.choices}
        for answer in (final, whole)
    )
    assert found == expected


def test_a_record_can_be_asked_for_and_comes_back_as_one(parrot):
    from pydantic import BaseModel

    class Empty(BaseModel):
        """An object without fields."""

    with synchronous(parrot) as client:
        answer = client.chat.completions.parse(**CHAT, response_format=Empty)
    assert answer.choices[0].message.parsed == Empty()


def test_models_tokens_and_the_version(parrot, repeater):
    async def use() -> None:
        async with asynchronous(parrot) as client:
            assert [model.id async for model in client.models.list()] == ["parrot"]
            model = await client.models.retrieve("parrot")
            assert model.id == "parrot" and model.max_model_len == 4096
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("gpt")

            # They are not OpenAI's, and not below /v1.
            async def post(path: str, body: dict[str, Any]) -> Any:
                return await client.post(
                    f"{parrot.url}/{path}", body=body, cast_to=object
                )

            tokens = await post(
                "tokenize", {"prompt": "blué", "return_token_strs": True}
            )
            assert tokens["tokens"] == list("blué".encode()) and tokens["count"] == 5
            assert tokens["token_strs"] == ["b", "l", "u", "\ufffd", "\ufffd"]
            text = await post("detokenize", {"tokens": tokens["tokens"]})
            assert text == {"prompt": "blué"}
            chat = {"messages": user("sky"), "tools": [CLOCK]}
            tokens = await post("tokenize", chat)
            assert bytes(tokens["tokens"]) == b"clock,u=sky;:"
            version = await client.get(f"{parrot.url}/version", cast_to=object)
            assert version["version"]

    asyncio.run(use())


@pytest.mark.parametrize(
    "path, wrong, param",
    [
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        (
            "chat",
            {"tools": TOOLS, "tool_choice": {**NAMED, "type": "no"}},
            "tool_choice",
        ),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (
            "chat",
            {"max_tokens": 3, "max_completion_tokens": 4},
            "max_completion_tokens",
        ),
        ("chat", {"response_format": {"type": "xml"}}, "response_format"),
        ("chat", {"tools": TOOLS, "n": 0}, "n"),
        (
            "chat",
            {"messages": user([{"type": "image_url", "image_url": {"url": "x"}}])},
            "messages",
        ),
        ("completions", {"best_of": 3}, "best_of"),
        ("completions", {"suffix": "z"}, "suffix"),
        ("completions", {"prompt": [120, 300]}, "prompt"),
        ("completions", {"prompt": [[120], []]}, "prompt"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"seed": 2**64}, "seed"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias"),
    ],
)
def test_what_is_refused_is_named_before_a_stream_begins(
    parrot, ask, path, wrong, param
):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            body = (CHAT if path == "chat" else TEXT) | wrong
            ask(parrot, path, **body, stream=stream)
        assert error.value.param.startswith(param)
        assert error.value.type == "invalid_request_error"
        assert error.value.request_id  # the header, for whoever reports it
