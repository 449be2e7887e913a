import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.loading.gguf_vocabulary import TokenType
from minivllm.text.detokenizer import IncrementalDetokenizer, StopStrings
from tests.tiny_tokenizers import byte_level, load, sentencepiece

WORDS = ("DEF", "HI", "gamma delta", " Alice", "ab", "aab", "é🔥")
ADDED = {
    **dict.fromkeys(WORDS, TokenType.USER_DEFINED),
    "<|end|>": TokenType.CONTROL,
}
METADATA = {
    "byte_level": byte_level("Ã ©", added=ADDED),
    "sentencepiece": sentencepiece({"▁": -9.0, "a": -9.0, "▁a": -1.0}, ADDED),
}


@pytest.fixture(scope="module", params=METADATA)
def tokenizer(request, tmp_path_factory):
    return load(METADATA[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    return load(METADATA["byte_level"], tmp_path_factory.mktemp("bytes"))


def token_ids_of(tokenizer, *words):
    return [tokenizer._backend.token_to_id(word) for word in words]


def stream(tokenizer, token_ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    chunks = [*map(detokenizer.add, token_ids), detokenizer.finish()]
    return chunks, detokenizer.stop_reason


def naive_cut(pieces, stops, *, keep=False, min_tokens=0):
    """Return text and stop reason by a look at every beginning of the whole text."""
    text = "".join(pieces)
    token_of = [n for n, piece in enumerate(pieces, 1) for _ in piece]
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and token_of[end - 1] > min_tokens:
            stop = max(found, key=len)
            return text[: end if keep else end - len(stop)], stop
    return text, None


def read_all(stops, text):
    """Return where each stop text ended, and what the text's end had begun."""
    reader = StopStrings(stops)
    ends = [(end, reader.read(c)) for end, c in enumerate(text, 1)]
    return [(end, stop) for end, stop in ends if stop], reader.begun()


# One stop text, by hand


def test_a_mismatch_falls_back_to_the_longest_beginning_that_still_fits():
    assert read_all(["ababac"], "ababa") == ([], ("ababac", 5))
    assert read_all(["ababac"], "ababab") == ([], ("ababac", 4))
    assert read_all(["ababac"], "abababac") == ([(8, "ababac")], ("ababac", 0))


def test_what_overlaps_a_complete_one_is_found_too():
    assert read_all(["aba"], "ababa") == ([(3, "aba"), (5, "aba")], ("aba", 1))


def test_of_several_that_end_at_one_character_the_longest_is_found():
    for stops in (["c", "bc", "abc"], ["abc", "bc", "c"]):
        assert read_all(stops, "abc")[0] == [(3, "abc")]


def test_an_empty_stop_text_and_one_that_is_no_list_are_refused():
    for stops in ("END", [""], ["a", ""]):
        with pytest.raises(AssertionError):
            StopStrings(stops)


# What the reader of a stream sees


def test_no_part_of_a_stop_text_over_four_tokens_is_shown(byte_tokenizer):
    ids = token_ids_of(byte_tokenizer, "!", "DEF", "G", "HI", "J", "!")
    chunks, reason = stream(byte_tokenizer, ids, stop=["DEFGHIJ"])
    assert chunks == ["!", "", "", "", "", "", ""]
    assert reason == "DEFGHIJ"


def test_the_cut_is_before_the_stop_text_and_the_rest_of_the_token_is_lost(
    byte_tokenizer,
):
    ids = token_ids_of(byte_tokenizer, "!", "gamma delta", "!")
    assert stream(byte_tokenizer, ids, stop=["gamma"]) == (["!", "", "", ""], "gamma")
    assert stream(byte_tokenizer, ids, stop=["ma d"])[0] == ["!", "gam", "", ""]


def test_text_that_only_looked_like_a_stop_comes_out_once(byte_tokenizer):
    ids = token_ids_of(byte_tokenizer, " Alice", "!")
    chunks, reason = stream(byte_tokenizer, ids, stop=["\n", "Alice:"])
    assert chunks == [" ", "Alice!", ""]
    assert reason is None


def test_what_is_held_back_at_the_end_comes_out_at_the_end(byte_tokenizer):
    ids = [*token_ids_of(byte_tokenizer, "DEF", "G"), 0xF0, 0x9F]
    chunks, reason = stream(byte_tokenizer, ids, stop=["DEFGH"])
    assert chunks == ["", "", "", "", "DEFG\ufffd"]
    assert reason is None


def test_finishing_twice_gives_nothing_twice(byte_tokenizer):
    detokenizer = IncrementalDetokenizer(byte_tokenizer, stop=["ab"])
    assert (detokenizer.add(97), detokenizer.finish()) == ("", "a")
    assert detokenizer.finish() == ""


def test_duplicates_of_a_stop_text_change_nothing(byte_tokenizer):
    ids = list(b"xaab")
    assert stream(byte_tokenizer, ids, stop=["ab", "ab"]) == stream(
        byte_tokenizer, ids, stop=["ab"]
    )


def test_the_stop_that_is_complete_first_wins_even_if_another_began_earlier(
    byte_tokenizer,
):
    chunks, reason = stream(byte_tokenizer, list(b"xabcd"), stop=["abcd", "c"])
    assert ("".join(chunks), reason) == ("xab", "c")


def test_a_stop_text_is_included_if_asked_for_but_not_what_follows_it(byte_tokenizer):
    ids = token_ids_of(byte_tokenizer, "!", "gamma delta", "!")
    options = {"stop": ["!gamma"], "include_stop_str_in_output": True}
    # Nothing needs to be held back: all up to the cut is text.
    assert stream(byte_tokenizer, ids, **options) == (["!", "gamma", "", ""], "!gamma")


def test_a_stop_tokens_text_is_shown_only_with_special_tokens(byte_tokenizer):
    ids = [97, *token_ids_of(byte_tokenizer, "<|end|>")]
    kept = {"include_stop_str_in_output": True}
    assert stream(byte_tokenizer, ids, **kept)[0] == ["a", "", ""]
    shown, _ = stream(byte_tokenizer, ids, skip_special_tokens=False, **kept)
    assert shown == ["a", "<|end|>", ""]


def test_a_special_token_that_is_shown_can_be_a_stop_text(byte_tokenizer):
    ids = [97, *token_ids_of(byte_tokenizer, "<|end|>")]
    assert stream(byte_tokenizer, ids, stop=["|end|"])[1] is None
    shown = stream(byte_tokenizer, ids, stop=["|end|"], skip_special_tokens=False)
    assert shown == (["a", "<", ""], "|end|")


def test_no_stop_text_counts_within_the_first_tokens(byte_tokenizer):
    ids = list(b"abcabcabc")
    for min_tokens, text in [
        (0, ""),
        (2, ""),
        (3, "abc"),
        (6, "abcabc"),
        (9, "abc" * 3),
    ]:
        chunks, reason = stream(
            byte_tokenizer, ids, stop=["abc"], min_tokens=min_tokens
        )
        assert "".join(chunks) == text
        assert reason == ("abc" if min_tokens < 9 else None)


def test_a_stop_text_that_began_within_the_first_tokens_counts_when_it_ends_later(
    byte_tokenizer,
):
    chunks, reason = stream(byte_tokenizer, list(b"xabc"), stop=["abc"], min_tokens=3)
    assert ("".join(chunks), reason) == ("x", "abc")
    # Also one that overlaps a complete one which did not count.
    chunks, reason = stream(byte_tokenizer, list(b"ababa"), stop=["aba"], min_tokens=3)
    assert ("".join(chunks), reason) == ("ab", "aba")


def test_skipped_tokens_count_as_tokens(byte_tokenizer):
    (end,) = token_ids_of(byte_tokenizer, "<|end|>")
    options = {"stop": ["a"], "min_tokens": 2}
    assert stream(byte_tokenizer, [end, end, 97], **options)[1] == "a"
    assert stream(byte_tokenizer, [end, 97, 97], **options) == (["", "a", "", ""], "a")


def test_a_stop_text_of_long_characters_is_found_across_their_bytes(byte_tokenizer):
    ids = list("x🔥é".encode())
    chunks, reason = stream(byte_tokenizer, ids, stop=["🔥é"])
    assert ("".join(chunks), reason) == ("x", "🔥é")


def test_a_character_that_the_prompt_began_can_be_part_of_a_stop_text(byte_tokenizer):
    options = {"stop": ["🔥"], "prompt_token_ids": [0xF0, 0x9F]}
    assert stream(byte_tokenizer, [0x94, 0xA5, 97], **options)[1] == "🔥"
    # The rest of the prompt cannot.
    options = {"stop": ["ab"], "prompt_token_ids": [97]}
    assert stream(byte_tokenizer, [98], **options) == (["b", ""], None)


def test_the_mark_for_bytes_that_wait_in_vain_is_no_stop_text(byte_tokenizer):
    options = {"stop": ["\ufffd"]}
    assert stream(byte_tokenizer, [97, 0xF0], **options) == (["a", "", "\ufffd"], None)
    assert stream(byte_tokenizer, [0xF0, 97], **options) == (["", "", ""], "\ufffd")


# Against the naive way


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
)
def test_matches_and_beginnings_are_those_of_a_look_at_the_whole_text(text, stops):
    found, (stop, length) = read_all(stops, text)
    expected = [
        (end, max(fit, key=len))
        for end in range(1, len(text) + 1)
        if (fit := [s for s in stops if text[:end].endswith(s)])
    ]
    assert found == expected
    begun = [s[:n] for s in stops for n in range(len(s)) if text.endswith(s[:n])]
    assert stop[:length] == max(begun, key=len, default="")


def check_against_naive(tokenizer, ids, stops, *, keep, min_tokens, skip):
    chunks, _ = stream(tokenizer, ids, skip_special_tokens=skip)
    *pieces, rest = chunks
    expected, stop = naive_cut(pieces, stops, keep=keep, min_tokens=min_tokens)
    detokenizer = IncrementalDetokenizer(
        tokenizer,
        skip_special_tokens=skip,
        stop=stops,
        include_stop_str_in_output=keep,
        min_tokens=min_tokens,
    )
    text = ""
    for token_id in ids:
        text += detokenizer.add(token_id)
        assert expected.startswith(text)  # nothing is shown that the cut takes away
    text += detokenizer.finish()
    assert text == (expected if stop else expected + rest)
    assert detokenizer.stop_reason == stop
    return stop


@settings(max_examples=200, deadline=None)
@given(data=st.data(), keep=st.booleans(), skip=st.booleans())
def test_the_stream_is_the_whole_text_cut_at_the_first_complete_stop(
    tokenizer, data, keep, skip
):
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    frequent = st.sampled_from(tokenizer.encode("aabéab🔥", add_special_tokens=False))
    ids = data.draw(st.lists(any_id | frequent, max_size=20))
    text = tokenizer.decode(ids, skip_special_tokens=skip) or "a"
    # Parts of the text itself, so that most are found, and others.
    part = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 5)).map(
        lambda where: text[where[0] : where[0] + where[1]]
    )
    stops = data.draw(
        st.lists(part | st.text("abé🔥\ufffd", min_size=1, max_size=4), max_size=4)
    )
    min_tokens = data.draw(st.integers(0, 6))
    check_against_naive(
        tokenizer, ids, stops, keep=keep, min_tokens=min_tokens, skip=skip
    )


def test_two_thousand_random_streams_are_cut_like_the_whole_text(tokenizer):
    random_numbers = random.Random(7)
    letters = tokenizer.encode("aabéab🔥", add_special_tokens=False)
    letters += token_ids_of(tokenizer, "ab", "aab", "é🔥")
    reasons = set()
    for n in range(2000):
        ids = random_numbers.choices(letters, k=16)
        ids.insert(n % 16, random_numbers.randrange(tokenizer.vocab_size))
        alphabet = "aab é🔥\ufffd"
        stops = [
            "".join(random_numbers.choices(alphabet, k=random_numbers.randint(2, 7)))
            for _ in range(3)
        ]
        text = tokenizer.decode(ids)
        begin = random_numbers.randrange(len(text))
        stops.append(text[begin : begin + 7])
        reasons.add(
            check_against_naive(
                tokenizer,
                ids,
                stops,
                keep=n % 2 == 1,
                min_tokens=n % 5,
                skip=n % 3 == 0,
            )
        )
    assert None in reasons
    assert len(reasons) > 200


# Work, counted in characters of stop texts that are looked at


class Counted(str):
    """A text that counts how many of its characters are looked at."""

    looks = 0

    def __getitem__(self, key):
        result = super().__getitem__(key)
        Counted.looks += len(result)
        return result


@pytest.fixture(autouse=True)
def start_counting():
    Counted.looks = 0


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab", max_size=200), stop=st.text("ab", min_size=1, max_size=40))
def test_a_character_costs_four_looks_on_average_at_most(text, stop):
    Counted.looks = 0
    read_all([Counted(stop)], text)
    assert Counted.looks <= 4 * (len(stop) + len(text))


def test_a_long_stop_that_almost_fits_costs_no_more_than_the_text_is_long(
    byte_tokenizer,
):
    num_tokens, stop = 100_000, Counted("a" * 30_000 + "b")
    chunks, reason = stream(byte_tokenizer, [97] * num_tokens, stop=[stop])
    assert "".join(chunks) == "a" * num_tokens
    assert reason is None
    assert Counted.looks <= 5 * (num_tokens + len(stop))
    chunks, reason = stream(byte_tokenizer, [97] * 40_000 + [98], stop=[stop])
    assert "".join(chunks) == "a" * 10_000
    assert reason == stop
