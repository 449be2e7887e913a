"""Answers in OpenAI's shapes, whole and in chunks, of a model that has a script."""

import json
import math
import threading
import time

import openai.types
import openai.types.chat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import RequestError
from minivllm.llm import LLM
from minivllm.outputs import Logprob
from minivllm.sampling.params import SamplingParams
from minivllm.server import responses
from minivllm.server.chat import ChatJob, join_deltas
from minivllm.server.completions import CompletionJob
from minivllm.server.errors import ApiError
from minivllm.server.local import LocalHandlers
from minivllm.server.logprobs import chat_entry
from minivllm.server.tool_choice import ToolOptions
from minivllm.server.tools import ListedCalls, NamedCall, TaggedCalls
from tests.engine_tools import assert_all_free
from tests.server_tools import (
    CLOCK,
    EOS,
    USER,
    WEATHER,
    answer_of,
    output_of,
    qwen_tokenizer,
    say,
    scripted,
)
from tests.tiny_folder import write_parrot

FLAME = "Hot 🔥 é!"
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "clock"}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return qwen_tokenizer(tmp_path_factory.mktemp("qwen"))


def chat(**fields):
    return {"model": "m", "messages": [USER], **fields}


def check_chat(answer):
    """Check an answer against our record and OpenAI's."""
    responses.ChatCompletionResponse.model_validate(answer)
    theirs = openai.types.chat.ChatCompletion.model_validate(answer, strict=True)
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    return theirs


def check_chunks(chunks, ours=responses.ChatCompletionChunk):
    for chunk in chunks:
        ours.model_validate(chunk)
        if ours is responses.ChatCompletionChunk:
            theirs = openai.types.chat.ChatCompletionChunk
            theirs.model_validate(chunk, strict=True)
        json.dumps(chunk, allow_nan=False)
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1


def check_completion(answer):
    responses.CompletionResponse.model_validate(answer)
    copied = json.loads(json.dumps(answer, allow_nan=False))
    for choice in copied["choices"]:
        logprobs = choice["logprobs"] or {}
        if None in logprobs.get("token_logprobs", ()):
            # OpenAI's server says null for the first token of an echo; its client's
            # types forget that, and the client does not check them.
            for values in logprobs.values():
                del values[0]
    return openai.types.Completion.model_validate(copied)


def join_chat(chunks):
    """Return the choices that chunks of a chat make, as a client would."""
    choices = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            kept = choices.setdefault(choice["index"], {"deltas": [], "logprobs": None})
            assert "finish_reason" not in kept, "a chunk behind the last"
            kept["deltas"].append(choice["delta"])
            if choice["logprobs"]:
                kept["logprobs"] = kept["logprobs"] or {"content": [], "refusal": None}
                kept["logprobs"]["content"] += choice["logprobs"]["content"]
            if choice["finish_reason"]:
                assert choice["delta"] == {}
                kept["finish_reason"] = choice["finish_reason"]
                kept["stop_reason"] = choice["stop_reason"]
    for index, kept in choices.items():
        first, *rest = kept.pop("deltas")
        assert first == {"role": "assistant", "content": "", "refusal": None}
        kept |= {"index": index, "message": join_deltas(rest)}
    return [choices[index] for index in sorted(choices)]


def join_completion(chunks):
    choices = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] not in choices:
                choices[choice["index"]] = dict(choice)
                continue
            kept = choices[choice["index"]]
            assert kept["finish_reason"] is None, "a chunk behind the last"
            kept["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                kept["logprobs"][name] = kept["logprobs"][name] + values
            kept |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
    return [choices[index] for index in sorted(choices)]


def without_ids(choices):
    """Leave out the ids of calls, which are drawn."""
    copied = json.loads(json.dumps(choices))
    for choice in copied:
        for call in choice["message"].get("tool_calls", ()):
            assert call.pop("id").startswith("call_")
    return copied


def both(handlers, body):
    """Return the whole answer, after comparing it with its stream."""
    number = handlers.llm._num_requests
    script = handlers.llm.engine.runner.script
    for request_id in [name for name in script if name.split("#")[0] == str(number)]:
        _, *more = request_id.partition("#")
        script["".join([str(number + 1), *more])] = script[request_id]
    answer = handlers.handle_chat(body)
    check_chat(answer)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(handlers.stream_chat({**body, **stream}))
    check_chunks(chunks)
    assert without_ids(join_chat(chunks)) == without_ids(answer["choices"])
    *others, last = chunks
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in others)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == answer["usage"][name]
    assert_all_free(handlers.llm.engine)
    return answer


# --- Chats ---


def test_an_answer_has_the_shape_of_openais(tokenizer):
    handlers = scripted(tokenizer, FLAME)
    before = int(time.time())
    answer = both(handlers, chat())
    assert answer.pop("id").startswith("chatcmpl-")
    assert before <= answer.pop("created") <= time.time()
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": FLAME, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 21,
            "completion_tokens": 13,
            "total_tokens": 34,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_what_the_cache_knew_is_counted(tokenizer):
    handlers = scripted(tokenizer, "a", "a", "a")
    handlers.handle_chat(chat())
    usage = handlers.handle_chat(chat())["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    usage = handlers.handle_chat(chat(cache_salt="mine"))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_stream_says_who_speaks_then_what_then_why_it_ended(tokenizer):
    chunks = list(scripted(tokenizer, "a🔥").stream_chat(chat()))
    check_chunks(chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "a"},
        {"content": "🔥"},  # and no half of it before
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)


def test_counts_come_last_and_only_if_asked_for(tokenizer):
    handlers = scripted(tokenizer, "a", "a")
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    *others, last = handlers.stream_chat(chat(**stream))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert [chunk["usage"] for chunk in others] == [None] * len(others)
    stream["stream_options"] = {}
    assert all("usage" not in c for c in handlers.stream_chat(chat(**stream)))


@pytest.mark.parametrize(
    ("fields", "text", "reason", "stop_reason"),
    [
        ({"max_tokens": 3}, "Hot", "length", None),
        ({"max_completion_tokens": 5}, "Hot �", "length", None),
        ({"stop": "t 🔥"}, "Ho", "stop", "t 🔥"),
        ({"stop": ["xyz", "!"]}, "Hot 🔥 é", "stop", "!"),
        ({"stop": "!", "include_stop_str_in_output": True}, FLAME, "stop", "!"),
        ({"stop_token_ids": [116]}, "Ho", "stop", 116),
        ({"ignore_eos": True, "max_tokens": 13}, FLAME, "length", None),
    ],
)
def test_why_an_answer_ended_is_told(tokenizer, fields, text, reason, stop_reason):
    [choice] = both(scripted(tokenizer, FLAME), chat(**fields))["choices"]
    assert choice["message"]["content"] == text
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop_reason)


def test_several_answers_have_their_numbers(tokenizer):
    handlers = scripted(tokenizer, "a")
    say(handlers, "0#1", "second")
    say(handlers, "0#2", "c")
    answer = both(handlers, chat(n=3))
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["a", "second", "c"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 21  # once
    assert answer["usage"]["completion_tokens"] == 2 + 7 + 2


def test_thoughts_stand_beside_the_answer(tokenizer):
    text = "<think>\nSo.\n</think>\n\nYes."
    [choice] = both(scripted(tokenizer, text), chat())["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("So.", "Yes.")
    [choice] = both(scripted(tokenizer, text), chat(include_reasoning=False))["choices"]
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"] == "Yes."
    [choice] = both(scripted(tokenizer, text), chat(split_reasoning=False))["choices"]
    assert choice["message"]["content"] == text
    [choice] = both(scripted(tokenizer, "<think></think>"), chat())["choices"]
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}


def test_hidden_thoughts_are_not_told_by_their_logprobs_either(tokenizer):
    text = "<think>So.</think>Yes."
    fields = {"logprobs": True, "include_reasoning": False}
    [choice] = both(scripted(tokenizer, text), chat(**fields))["choices"]
    assert choice["logprobs"] is None
    [choice] = both(scripted(tokenizer, "Yes."), chat(**fields))["choices"]
    assert len(choice["logprobs"]["content"]) == 5


# --- Tools ---


def test_calls_are_told_in_their_own_field(tokenizer):
    handlers = scripted(tokenizer, f"<think>\nHm\n</think>\n\nI look.\n{OSLO}\n{TIME}")
    [choice] = both(handlers, chat(tools=[WEATHER, CLOCK]))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm")
    calls = message["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "weather", "arguments": '{"city": "Oslo"}'},
        {"name": "clock", "arguments": "{}"},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert {call["type"] for call in calls} == {"function"}


def test_a_message_that_is_only_a_call_has_no_content(tokenizer):
    [choice] = both(scripted(tokenizer, OSLO), chat(tools=[WEATHER]))["choices"]
    assert choice["message"]["content"] is None


def test_a_call_in_a_stream_begins_with_its_name(tokenizer):
    handlers = scripted(tokenizer, f"a\n{OSLO}\n{TIME}")
    chunks = list(handlers.stream_chat(chat(tools=[WEATHER])))
    check_chunks(chunks)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    pieces = [piece for d in deltas for piece in d.get("tool_calls", ())]
    ids = [piece.pop("id") for piece in pieces if "id" in piece]
    assert len(set(ids)) == 2
    assert pieces == [
        {
            "index": 0,
            "type": "function",
            "function": {"name": "weather", "arguments": ""},
        },
        {"index": 0, "function": {"arguments": '{"city": "Oslo"}'}},
        {
            "index": 1,
            "type": "function",
            "function": {"name": "clock", "arguments": ""},
        },
        {"index": 1, "function": {"arguments": "{}"}},
    ]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("<tool_call>{bad}</tool_call>", {"tools": [WEATHER]}),
        (OSLO, {"tools": [WEATHER], "tool_choice": "none"}),
        (OSLO, {}),
        ("plain", {"tools": [WEATHER]}),
    ],
)
def test_what_is_no_call_is_text(tokenizer, text, fields):
    [choice] = both(scripted(tokenizer, text), chat(**fields))["choices"]
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


def test_one_call_at_most_where_several_are_unwanted(tokenizer):
    handlers = scripted(tokenizer, f"{OSLO}\n{TIME} ok")
    body = chat(tools=[WEATHER, CLOCK], parallel_tool_calls=False)
    [choice] = both(handlers, body)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert choice["message"]["content"] == "ok"


def test_an_answer_that_was_cut_off_says_so_even_behind_a_call(tokenizer):
    handlers = scripted(tokenizer, f"{OSLO} and more")
    fields = {"tools": [WEATHER], "max_tokens": len(OSLO) - 20}
    [choice] = both(handlers, chat(**fields))["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1


def test_a_forced_call_is_told_as_a_call(tokenizer):
    pytest.importorskip("llguidance")
    named = {"type": "function", "function": {"name": "weather"}}
    text = '{"city": "Oslo"}'
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": named}
    [choice] = both(scripted(tokenizer, text), chat(**fields))["choices"]
    assert choice["finish_reason"] == "stop"  # as OpenAI does
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": text}
    assert choice["message"]["content"] is None
    listed = '[{"name": "weather", "parameters": {"city": "Oslo"}}, '
    listed += '{"name": "clock", "parameters": {}}]'
    fields["tool_choice"] = "required"
    [choice] = both(scripted(tokenizer, listed), chat(**fields))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": text},
        {"name": "clock", "arguments": "{}"},
    ]


# --- Logprobs ---


def test_logprobs_of_a_chat_tell_texts_and_bytes(tokenizer):
    handlers = scripted(tokenizer, "é!")
    [choice] = both(handlers, chat(logprobs=True, top_logprobs=2))["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [
        *([0xC3], [0xA9], [33]),
        list(b"<|im_end|>"),
    ]
    assert [entry["token"] for entry in content] == ["�", "�", "!", "<|im_end|>"]
    for entry in content:
        assert [best["token"] for best in entry["top_logprobs"]] == ["\0", "\1"]
        assert entry["logprob"] == pytest.approx(-math.log(262))
    [choice] = both(scripted(tokenizer, "a"), chat(logprobs=True))["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [
        [],
        [],
    ]


def test_logprobs_of_a_held_back_text_are_not_lost(tokenizer):
    fields = {"logprobs": True, "tools": [WEATHER], "stop": "xyz"}
    [choice] = both(scripted(tokenizer, f"xy \n{OSLO}\nxy"), chat(**fields))["choices"]
    assert (
        "".join(
            bytes(entry["bytes"]).decode() for entry in choice["logprobs"]["content"]
        )
        == f"xy \n{OSLO}\nxy<|im_end|>"
    )


def test_what_json_cannot_say_is_a_very_small_number(tokenizer):
    entry = {97: Logprob(float("-inf"), 9, "a"), 98: Logprob(-0.5, 1, "b")}
    output = output_of(
        answer_of("a", reason="stop", token_ids=[97], logprobs=[entry]),
        prompt_logprobs=[None, entry],
    )
    job = make_chat_job(tokenizer, num_best=1, prompt_logprobs=1)
    answer = job.response([output])
    check_chat(answer)
    [place] = answer["choices"][0]["logprobs"]["content"]
    assert place["logprob"] == -9999.0
    assert place["top_logprobs"] == [{"token": "b", "logprob": -0.5, "bytes": [98]}]
    second = {97: Logprob(-1.0, 2, "a"), 98: Logprob(-0.5, 1, "b")}
    described = chat_entry(second, 2, tokenizer)
    assert [best["token"] for best in described["top_logprobs"]] == ["b", "a"]
    assert described == chat_entry(second, -1, tokenizer)
    assert answer["prompt_logprobs"] == [
        None,
        {
            "97": {"logprob": -9999.0, "rank": 9, "decoded_token": "a"},
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        },
    ]


def test_logprobs_of_the_prompt_are_told_beside_a_chat(tokenizer):
    answer = scripted(tokenizer, "a").handle_chat(chat(prompt_logprobs=0))
    check_chat(answer)
    first, *rest = answer["prompt_logprobs"]
    assert first is None and len(rest) == 20 and all(map(len, rest))


# --- Completions ---


def test_a_completion_has_the_shape_of_openais(tokenizer):
    handlers = scripted(tokenizer, "b c")
    answer = handlers.handle_completion({"prompt": "a"})
    check_completion(answer)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "b c",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


def compare_completion(handlers, body):
    """Return the whole answer, after comparing it with its stream."""
    answer = handlers.handle_completion(body)
    check_completion(answer)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(handlers.stream_completion({**body, **stream}))
    check_chunks(chunks, responses.CompletionResponse)
    assert join_completion(chunks) == answer["choices"]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert_all_free(handlers.llm.engine)
    return answer


def test_several_prompts_with_several_answers_are_numbered_through(tokenizer):
    handlers = scripted(tokenizer)
    for first in (0, 2):
        for prompt, texts in enumerate((("a", "bb"), ("c", "d"))):
            say(handlers, f"{first + prompt}", texts[0])
            say(handlers, f"{first + prompt}#1", texts[1])
    answer = compare_completion(handlers, {"prompt": ["x", "yz"], "n": 2})
    assert [c["text"] for c in answer["choices"]] == ["a", "bb", "c", "d"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 2 + 3 + 2 + 2


@pytest.mark.parametrize(
    ("prompt", "echo"),
    [
        ("a é", "a é"),
        ([97, 32, 0xC3, 0xA9], "a é"),
        ("<|im_end|>\n", "<|im_end|>\n"),
        ([EOS, 10], "\n"),  # markup is left out, as in answers
    ],
)
def test_an_echo_comes_first_with_its_logprobs(tokenizer, prompt, echo):
    handlers = scripted(tokenizer, "🔥b", "🔥b")
    body = {"prompt": prompt, "echo": True, "logprobs": 1}
    [choice] = compare_completion(handlers, body)["choices"]
    assert choice["text"] == echo + "🔥b"
    logprobs = choice["logprobs"]
    assert len({len(values) for values in logprobs.values()}) == 1
    assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
    assert None not in logprobs["token_logprobs"][1:]
    spelled = {"a", "b", " ", "\n"}
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert offset <= len(choice["text"])
        if token in spelled:
            assert choice["text"][offset] == token
    assert logprobs["text_offset"][-6:] == [len(echo)] * 4 + [
        *(len(echo) + 1, len(echo) + 2)
    ]
    assert logprobs["tokens"][-6] == r"bytes:\xf0"


def test_an_echo_without_logprobs(tokenizer):
    handlers = scripted(tokenizer, "b", "b")
    [choice] = compare_completion(handlers, {"prompt": "a", "echo": True})["choices"]
    assert (choice["text"], choice["logprobs"]) == ("ab", None)
    assert "prompt_logprobs" not in choice


def test_an_echo_of_tokens_keeps_markup_if_asked(tokenizer):
    handlers = scripted(tokenizer, "b")
    body = {"prompt": [EOS, 10], "echo": True, "skip_special_tokens": False}
    [choice] = handlers.handle_completion(body)["choices"]
    assert choice["text"].startswith("<|im_end|>\nb")


def test_the_token_itself_is_among_the_logprobs(tokenizer):
    handlers = scripted(tokenizer, "b", "b")
    [choice] = compare_completion(handlers, {"prompt": "a", "logprobs": 0})["choices"]
    assert choice["logprobs"]["tokens"] == ["b", "<|im_end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 1]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [
        *(["b"], ["<|im_end|>"])
    ]


def test_logprobs_of_the_prompt_are_told_beside_a_completion(tokenizer):
    answer = scripted(tokenizer, "b").handle_completion(
        {"prompt": "ac", "prompt_logprobs": 1}
    )
    check_completion(answer)
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["99"]["decoded_token"] == "c" and len(second) == 2


def test_tokens_alone_are_continued_without_a_tokenizer():
    handlers = scripted(None, [5, 6, 7])
    answer = handlers.handle_completion({"prompt": [1], "max_tokens": 3, "logprobs": 1})
    [choice] = answer["choices"]
    check_completion(answer)
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:7"]


# --- A slow reader ---


def make_chat_job(tokenizer, *, n=1, num_best=None, reader=None, **params):
    return ChatJob(
        id="chatcmpl-1",
        created=1,
        model="m",
        system_fingerprint="fp_1",
        prompts=[[1, 2]],
        sampling_params=[SamplingParams(n=n, **params)],
        default_max_tokens=None,
        tokenizer=tokenizer,
        num_best=num_best,
        tools=ToolOptions(call_reader=reader, max_calls=None),
    )


PARTS = st.sampled_from(
    ["<tool_call>", OSLO, "</tool_call>", "<tool_", "a", " ", "\n", "é", '{"name":']
)
FORCED = '[{"name": "f", "parameters": {"a": "}"}}, {"name": "g", "parameters": {}}]'


def shown_parts(draw, texts):
    """Return a story of outputs: each text grows, and the last output has them all."""
    places = [sorted(draw(st.lists(st.integers(0, len(t)), max_size=6))) for t in texts]
    num_outputs = max(map(len, places)) + 1
    for number in range(num_outputs):
        is_last = number == num_outputs - 1
        ends = [
            len(text) if is_last or number >= len(ends) else ends[number]
            for text, ends in zip(texts, places, strict=True)
        ]
        # One that has all its text may have ended before the others.
        yield [
            (
                text[:end],
                "stop" if end == len(text) and number >= len(places[i]) else None,
            )
            for i, (text, end) in enumerate(zip(texts, ends, strict=True))
        ]


@given(
    data=st.data(),
    reader=st.sampled_from([None, TaggedCalls, lambda: NamedCall("f"), ListedCalls]),
    texts=st.lists(
        st.lists(PARTS, max_size=6).map("".join) | st.just(FORCED),
        min_size=1,
        max_size=2,
    ),
    thoughts=st.none() | st.text("ab", max_size=3),
)
def test_whatever_a_slow_reader_leaves_out_the_chunks_are_the_whole(
    data, reader, texts, thoughts
):
    job = make_chat_job(None, n=len(texts), num_best=1, reader=reader)

    def outputs(story):
        return output_of(
            *(
                answer_of(
                    text,
                    index=index,
                    reason=reason,
                    thoughts=thoughts and thoughts[: len(text)]
                    if not reason
                    else thoughts,
                    token_ids=range(len(text)),
                    logprobs=[{i: Logprob(-1.0, 1, "x")} for i in range(len(text))],
                )
                for index, (text, reason) in enumerate(story)
            )
        )

    stories = list(shown_parts(data.draw, texts))
    writer = job.writer()
    chunks = writer.start()
    for story in stories:
        chunks += writer.add(0, outputs(story))
    chunks += writer.finish([outputs(stories[-1])])
    whole = job.response([outputs(stories[-1])])
    check_chunks(chunks)
    streamed = join_chat(chunks)
    for choice in streamed + whole["choices"]:
        if choice["logprobs"] and not choice["logprobs"]["content"]:
            choice["logprobs"] = None
    assert without_ids(streamed) == without_ids(whole["choices"])


@given(data=st.data(), texts=st.lists(st.text("aé🔥"), min_size=2, max_size=2))
def test_whatever_is_left_out_of_completions_the_chunks_are_the_whole(
    tokenizer, data, texts
):
    job = CompletionJob(
        id="cmpl-1",
        created=1,
        model="m",
        system_fingerprint="fp_1",
        prompts=[[97], [0xC3, 0xA9]],
        sampling_params=[SamplingParams(logprobs=1)] * 2,
        default_max_tokens=16,
        tokenizer=tokenizer,
        echoes=["a", "é"],
        has_logprobs=True,
    )

    def output(number, text, reason):
        token_ids = list(text.encode())
        return output_of(
            answer_of(
                text,
                reason=reason,
                token_ids=token_ids,
                logprobs=[{i: Logprob(-1.0, 1, "x")} for i in token_ids],
            ),
            prompt_token_ids=job.prompts[number],
        )

    stories = list(shown_parts(data.draw, texts))
    writer = job.writer()
    chunks = writer.start()
    for story in stories:
        for number in data.draw(st.permutations([0, 1])):
            chunks += writer.add(number, output(number, *story[number]))
    whole = job.response([output(n, *stories[-1][n]) for n in (0, 1)])
    check_chunks(chunks, responses.CompletionResponse)
    assert join_completion(chunks) == whole["choices"]


# --- Failures ---


def test_a_failed_request_is_an_error_whole_and_streamed(tokenizer):
    handlers = scripted(tokenizer, "abc", "abc", "abc")
    runner = handlers.llm.engine.runner
    execute = runner.execute

    def fail(step):
        if step.requests[0].num_output_tokens == 2:
            raise RuntimeError("no memory left")
        return execute(step)

    runner.execute = fail
    with pytest.raises(ApiError, match="no memory left") as caught:
        handlers.handle_chat(chat())
    assert (caught.value.status, caught.value.type) == (500, "server_error")
    chunks = []
    with pytest.raises(ApiError, match="no memory left"):
        chunks.extend(handlers.stream_chat(chat()))
    runner.execute = execute
    assert handlers.handle_chat(chat())["choices"]
    assert_all_free(handlers.llm.engine)


def test_an_aborted_answer_keeps_what_it_has(tokenizer):
    job = make_chat_job(tokenizer)
    answer = job.response([output_of(answer_of("ab", reason="abort"))])
    [choice] = answer["choices"]
    assert choice["message"]["content"] == "ab"
    assert choice["finish_reason"] == "abort"  # vLLM's word
    responses.ChatCompletionResponse.model_validate(answer)


def test_a_dropped_stream_gives_its_blocks_back(tokenizer):
    handlers = scripted(tokenizer, "a" * 100)
    stream = handlers.stream_chat(chat())
    for _ in range(3):
        next(stream)
    assert handlers.llm.engine.has_unfinished_requests()
    stream.close()
    assert_all_free(handlers.llm.engine)


def test_a_wrong_body_is_refused_at_the_call_and_not_at_the_first_chunk(tokenizer):
    handlers = scripted(tokenizer)
    for stream, body in (
        (handlers.stream_chat, chat(temperature="hot")),
        (handlers.stream_completion, {"prompt": [5000]}),
    ):
        with pytest.raises(ApiError):
            stream(body)


# --- LLM ---


def test_many_threads_get_their_own_answers(tokenizer):
    handlers = scripted(tokenizer)
    answers = {}

    def ask(number):
        # Greedy or not, the fake model's tokens depend on the seed alone.
        body = {"prompt": [number], "seed": number, "logprobs": 0, "max_tokens": 20}
        answer = handlers.handle_completion(body)
        answers[number] = answer["choices"][0]["logprobs"]["tokens"]

    handlers.llm.engine.tokenizer = handlers.llm.tokenizer = None
    handlers = LocalHandlers(handlers.llm, model="m")
    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(answers)
    for number in range(8):
        ask(number)
    assert answers == together
    assert len({tuple(tokens) for tokens in together.values()}) == 8


def test_outputs_of_many_prompts_come_with_their_numbers():
    with LLM(backend="fake", num_blocks=64) as llm:
        params = SamplingParams(seed=1, max_tokens=4)
        story = list(llm.outputs([[1], [2, 3]], params))
        assert {number for number, _ in story} == {0, 1}
        for number, prompt in enumerate(([1], [2, 3])):
            lengths = [
                len(output.outputs[0].token_ids)
                for other, output in story
                if other == number
            ]
            assert lengths == sorted(lengths) and lengths[-1] == 4
            [last] = [o for other, o in story if other == number and o.finished]
            assert last.prompt_token_ids == prompt
        finals = list(llm.outputs([[1], [2, 3]], params, only_final=True))
        assert sorted(number for number, _ in finals) == [0, 1]
        [(_, output)] = llm.outputs([1], default_max_tokens=3, only_final=True)
        assert len(output.outputs[0].token_ids) == 3
        with pytest.raises(RequestError, match="holds token id -1"):
            llm.outputs([-1])
        assert_all_free(llm.engine)


def test_a_real_model_answers_a_body_on_numpy(tmp_path):
    folder = write_parrot(tmp_path / "parrot")
    with LLM(folder, backend="numpy", num_blocks=8) as llm:
        handlers = LocalHandlers(llm)
        assert handlers.list_models()["data"][0]["id"] == "parrot"
        body = {"messages": [USER], "temperature": 0}
        answer = handlers.handle_chat(body)
        check_chat(answer)
        # The template ends with ":", and the parrot says what follows it.
        assert answer["choices"][0]["message"]["content"] == " blué!"
        chunks = list(handlers.stream_chat({**body, "stream": True}))
        assert join_chat(chunks)[0]["message"]["content"] == " blué!"
        text = handlers.handle_completion({"prompt": "sky:", "temperature": 0})
        assert text["choices"][0]["text"] == " blué!"


def test_a_chunk_costs_a_few_microseconds(tokenizer):
    job = make_chat_job(tokenizer)
    writer = job.writer()
    outputs = [output_of(answer_of("word " * n)) for n in range(1000)]
    start = time.perf_counter()
    for output in outputs:
        writer.add(0, output)
    assert (time.perf_counter() - start) / len(outputs) < 100e-6
