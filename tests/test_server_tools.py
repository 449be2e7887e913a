"""Calls of functions told from text, however the text is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.server.tools import (
    Arguments,
    CallStart,
    ListedCalls,
    NamedCall,
    TaggedCalls,
)

OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
CALLED = ("weather", '{"city": "Oslo"}')


def read(reader, pieces):
    """Return the text and the calls that a reader finds, joined."""
    events = [event for piece in pieces for event in reader.add(piece)]
    events += reader.finish()
    found = []
    for event in events:
        if isinstance(event, CallStart):
            found.append((event.name, ""))
        elif isinstance(event, Arguments):
            name, arguments = found[-1]
            found[-1] = (name, arguments + event.piece)
        elif found and isinstance(found[-1], str):
            found[-1] += event
        else:
            found.append(event)
    return found


def cut(draw, text):
    """Cut a text into pieces."""
    places = draw(st.lists(st.integers(0, len(text)), max_size=8))
    ends = sorted({0, *places, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Hello", ["Hello"]),
        ("", []),
        (" \n", [" \n"]),
        (f"<tool_call>\n{OSLO}\n</tool_call>", [CALLED]),
        (f"<tool_call>{OSLO}</tool_call>", [CALLED]),
        (f"I look.\n<tool_call>{OSLO}</tool_call>\n", ["I look.", CALLED]),
        (
            f"a\n<tool_call>{OSLO}</tool_call>\n\n<tool_call>{OSLO}</tool_call> \n b",
            ["a", CALLED, CALLED, "b"],
        ),
        # A model that stops before the end tag has called, too.
        (f"<tool_call>\n{OSLO}\n", [CALLED]),
        (f"<tool_call>\n{OSLO}\n</tool_c", [CALLED]),
        ('<tool_call>{"name": "clock"}</tool_call>', [("clock", "{}")]),
        ('<tool_call>{"arguments": {}, "name": "a"}</tool_call>', [("a", "{}")]),
        # An argument may hold the tags.
        (
            '<tool_call>{"name": "a", "arguments": {"s": "\\"</tool_call>"}}'
            "</tool_call>b",
            [("a", '{"s": "\\"</tool_call>"}'), "b"],
        ),
        (
            '<tool_call>{"name": "a", "arguments": {"s": "<tool_call>"}}</tool_call>',
            [("a", '{"s": "<tool_call>"}')],
        ),
        # Whatever is no call is left as it is.
        ("a <tool_call>", ["a <tool_call>"]),
        ("a <tool_call> \n", ["a <tool_call> \n"]),
        ("Write <tool_call> and JSON.", ["Write <tool_call> and JSON."]),
        ("<tool_call>{}</tool_call>", ["<tool_call>{}</tool_call>"]),
        ("<tool_call>\n{}\n</tool_call>", ["<tool_call>\n{}\n</tool_call>"]),
        ("<tool_call>\nno", ["<tool_call>\nno"]),
        ("<tool_call>[]</tool_call>", ["<tool_call>[]</tool_call>"]),
        ("<tool_call>{bad}</tool_call> a", ["<tool_call>{bad}</tool_call> a"]),
        (f"<tool_call>{OSLO},</tool_call>", [f"<tool_call>{OSLO},</tool_call>"]),
        (f"<tool_call>{OSLO[:-3]}", [f"<tool_call>{OSLO[:-3]}"]),
        (
            f'<tool_call>{{"name": "f}}</tool_call>\n<tool_call>{OSLO}</tool_call>',
            ['<tool_call>{"name": "f}</tool_call>', CALLED],
        ),
        (
            f"<tool_call>no <tool_call>{OSLO}</tool_call>",
            ["<tool_call>no", CALLED],
        ),
        (f"<tool_call>{{\n <tool_call>{OSLO}", ["<tool_call>{", CALLED]),
        *(
            (f"<tool_call>{call}</tool_call>", [f"<tool_call>{call}</tool_call>"])
            for call in (
                '{"name": 5, "arguments": {}}',
                '{"name": "", "arguments": {}}',
                '{"name": "a", "arguments": "{}"}',
                '{"name": "a", "arguments": [1]}',
                '{"name": "a", "arguments": null}',
                '{"name": "a", "arguments": {"x": NaN}}',
                '{"name": "a", "arguments": {"x": 1e999}}',
                '{"name": "a", "arguments": {"x": "\\ud800"}}',
                '{"name": "\\ud800", "arguments": {}}',
                '{"name": "a", "arguments": {"x": 1' + "0" * 5000 + "}}",
                '{"name": "a", "arguments": {"x": "line\nbreak"}}',
            )
        ),
        ("<tool_call" * 3, ["<tool_call" * 3]),
    ],
)
def test_calls_are_found_and_the_rest_is_text(text, found):
    assert read(TaggedCalls(), [text]) == found
    assert read(TaggedCalls(), list(text)) == found
    assert read(TaggedCalls(), [text[:7], text[7:]]) == found


PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "_call>", OSLO, OSLO[:30], OSLO[30:]),
        *('"', "\\", "{", "}", " ", "\n", "a", "é", '{"name": "a"}'),
    ]
)


@given(st.data(), st.lists(PARTS, max_size=12).map("".join))
def test_however_a_text_is_cut_the_same_is_found(data, text):
    whole = read(TaggedCalls(), [text])
    assert read(TaggedCalls(), cut(data.draw, text)) == whole
    assert read(TaggedCalls(), list(text)) == whole
    # Nothing is lost but tags and blanks: the calls and the text are in the order.
    rest = text
    for part in whole:
        for word in [part] if isinstance(part, str) else [part[0]]:
            assert word in rest
            rest = rest[rest.index(word) + len(word) :]


def test_text_is_told_as_soon_as_it_cannot_be_a_tag():
    reader = TaggedCalls()
    told = ["".join(reader.add(piece)) for piece in ("a ", "b", "<t", "d>", "\n<tool_")]
    assert told == ["a", " b", "", "<td>", ""]
    assert reader.add("call>") == []
    assert reader.add(" so") == ["\n<tool_call>", " so"]  # not the beginning of JSON


def test_blanks_are_told_with_what_follows_them():
    reader = TaggedCalls()
    assert [reader.add(piece) for piece in ("a", " ", "\n", "b ")] == [
        *(["a"], [], [], [" \nb"])
    ]
    assert reader.finish() == [" "]


def test_a_call_is_told_when_it_is_complete():
    reader = TaggedCalls()
    text = f"<tool_call>{OSLO}</tool_call>"
    assert not [event for piece in text[:-1] for event in reader.add(piece)]
    assert reader.add(text[-1]) == [CallStart("weather"), Arguments(CALLED[1])]
    assert reader.finish() == []


def test_a_long_call_costs_no_more_for_each_piece_than_a_short_one():
    text = '<tool_call>{"name": "a", "arguments": {"s": "' + "</tool_cal" * 20_000
    reader = TaggedCalls()
    for start in range(0, len(text), 8):
        reader.add(text[start : start + 8])
    assert reader.finish() == [text[:11], text[11:]]


# --- Forced calls ---


def test_a_named_call_streams_its_arguments():
    reader = NamedCall("weather")
    events = [*reader.add('{"ci'), *reader.add('ty": 1}'), *reader.finish()]
    assert events == [CallStart("weather"), Arguments('{"ci'), Arguments('ty": 1}')]
    assert read(NamedCall("weather"), []) == [("weather", "")]


ARGUMENTS = st.dictionaries(
    st.text(max_size=3) | st.sampled_from(['"', "\\", "}]", "{["]),
    st.recursive(
        st.integers() | st.sampled_from(['"}', "\\", "é", "a"]),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        ),
        max_leaves=3,
    ),
    max_size=3,
)


@given(st.data(), st.lists(ARGUMENTS, min_size=1, max_size=3))
def test_a_list_of_calls_streams_its_arguments_however_it_is_cut(data, arguments):
    calls = [
        {"name": f"f{number}", "parameters": values}
        for number, values in enumerate(arguments)
    ]
    text = json.dumps(calls, ensure_ascii=data.draw(st.booleans()))
    found = read(ListedCalls(), cut(data.draw, text))
    assert [name for name, _ in found] == [call["name"] for call in calls]
    assert [json.loads(written) for _, written in found] == arguments
    assert read(ListedCalls(), list(text)) == found == read(ListedCalls(), [text])


def test_arguments_of_a_list_are_told_as_they_come():
    reader = ListedCalls()
    assert reader.add('[{"name": "a", "para') == []
    assert reader.add('meters": {"x": [') == [CallStart("a"), Arguments('{"x": [')]
    assert reader.add("1") == [Arguments("1")]
    assert reader.add("]}}, {") == [Arguments("]}")]
    assert reader.add('"name":"b","parameters":{}}]') == [
        *(CallStart("b"), Arguments("{}"))
    ]
    assert reader.finish() == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"name": "a", "par', ['[{"name": "a", "par']),
        ('[{"name": "a", "parameters": {"x": ', [("a", '{"x": ')]),
        ('[{"name": "a", "parameters": {}}, {"na', [("a", "{}")]),
        ("no list", ["no list"]),
        ('[{"name": "a", "parameters": {}', [("a", "{}")]),
        ("", []),
    ],
)
def test_a_list_that_is_cut_off_keeps_its_calls(text, found):
    assert read(ListedCalls(), [text]) == found == read(ListedCalls(), list(text))
