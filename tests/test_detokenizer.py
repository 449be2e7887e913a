import codecs
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minivllm.errors import RequestError
from minivllm.loading.gguf_vocabulary import TokenType
from minivllm.text.detokenizer import IncrementalDetokenizer
from tests.corpus import hard_texts
from tests.tiny_tokenizers import byte_level, load, sentencepiece

ADDED = {
    "<|end|>": TokenType.CONTROL,
    "<tool é>": TokenType.USER_DEFINED,
    "[PAD]": TokenType.UNUSED,
    "🔥": TokenType.USER_DEFINED,
}
METADATA = {
    # Merges across the bytes of 🔥 (F0 9F 94 A5) and é (C3 A9), as trained ones do.
    "byte_level": byte_level("Ġ ð", "Ł Ķ", "Ã ©", "h i", added=ADDED),
    "sentencepiece": sentencepiece(
        {"▁": -9.0, "a": -9.0, "▁a": -1.0, "é": -2.0, "▁▁": -3.0}, ADDED
    ),
    "sentencepiece_bare": sentencepiece(
        {"▁": -9.0, "a": -9.0, "▁a": -1.0, "é": -2.0}, ADDED, add_space_prefix=False
    ),
}


@pytest.fixture(scope="module", params=METADATA)
def tokenizer(request, tmp_path_factory):
    return load(METADATA[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    return load(METADATA["byte_level"], tmp_path_factory.mktemp("bytes"))


# Bytes of long characters, so that broken and whole ones are common.
def long_character_bytes(tokenizer):
    return [tokenizer.encode(c)[-1] for c in "\x00aé🔥\u0800"]


def sequences_of(tokenizer):
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    return st.lists(
        any_id | st.sampled_from(long_character_bytes(tokenizer)), max_size=30
    )


def open_bytes(data):
    """Return the bytes of an incomplete character at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def bytes_of(tokenizer, token_ids, skip=True):
    skipped = tokenizer.special_token_ids if skip else ()
    return b"".join(tokenizer.token_bytes(i) for i in token_ids if i not in skipped)


def stream(tokenizer, token_ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*map(detokenizer.add, token_ids), detokenizer.finish()]


def test_one_character_over_four_tokens_comes_out_once_and_whole(byte_tokenizer):
    chunks = stream(byte_tokenizer, [97, 0xF0, 0x9F, 0x94, 0xA5, 98])
    assert chunks == ["a", "", "", "", "🔥", "b", ""]


def test_a_text_that_ends_inside_a_character_ends_in_one_replacement(byte_tokenizer):
    assert stream(byte_tokenizer, [97, 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]
    assert byte_tokenizer.decode([97, 0xF0, 0x9F]) == "a\ufffd"


def test_a_character_that_can_no_longer_complete_is_given_up_at_once(byte_tokenizer):
    assert stream(byte_tokenizer, [0xF0, 0x9F, 97]) == ["", "", "\ufffda", ""]


def test_skipped_tokens_neither_show_nor_disturb(byte_tokenizer):
    end = byte_tokenizer.encode("<|end|>")[0]
    ids = [0xC3, end, 0xA9]
    assert stream(byte_tokenizer, ids) == ["", "", "é", ""]
    shown = stream(byte_tokenizer, ids, skip_special_tokens=False)
    assert shown == ["", "\ufffd<|end|>", "\ufffd", ""]


def test_the_space_in_front_is_dropped_once_even_after_special_tokens(tmp_path):
    tokenizer = load(METADATA["sentencepiece"], tmp_path)
    mark, a, space_a = 259, 260, 261
    assert stream(tokenizer, [1, space_a, space_a]) == ["", "a", " a", ""]
    assert stream(tokenizer, [mark, mark, a]) == ["", " ", "a", ""]
    shown = stream(tokenizer, [1, space_a], skip_special_tokens=False)
    assert shown == ["<s>", " a", ""]


def test_a_token_without_bytes_does_not_count_as_the_front(tmp_path):
    tokenizer = load(METADATA["sentencepiece"], tmp_path)
    hole = tokenizer.encode("<tool é>")[-1] + 1  # the unused [PAD]
    assert tokenizer.token_bytes(hole) == b""
    assert stream(tokenizer, [hole, 261]) == ["", "a", ""]


def test_an_id_outside_the_vocabulary_is_refused(byte_tokenizer):
    with pytest.raises(RequestError, match="out of range"):
        IncrementalDetokenizer(byte_tokenizer).add(byte_tokenizer.vocab_size)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_the_joined_stream_is_the_decoded_whole(tokenizer, data, skip):
    ids = data.draw(sequences_of(tokenizer))
    chunks = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(chunks) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_four_thousand_random_sequences_stream_to_their_decoded_text(tokenizer):
    # For each of the three tokenizers: twelve thousand in all.
    random_numbers = random.Random(5)
    frequent = long_character_bytes(tokenizer)
    num_broken = 0
    for skip in (True, False):
        for _ in range(2000):
            ids = random_numbers.choices(range(tokenizer.vocab_size), k=12)
            ids += random_numbers.choices(frequent, k=12)
            random_numbers.shuffle(ids)
            text = tokenizer.decode(ids, skip_special_tokens=skip)
            assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == text
            num_broken += "\ufffd" in text
    assert num_broken > 1000


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_no_chunk_of_a_proper_text_shows_a_broken_character(tokenizer, text):
    if "\ufffd" in text:
        return
    ids = tokenizer.encode(text)
    assert "\ufffd" not in "".join(stream(tokenizer, ids))


def test_at_most_three_bytes_are_held_back(tokenizer):
    for text in hard_texts():
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        owed = 0
        for token_id in tokenizer.encode(text):
            owed += len(tokenizer.token_bytes(token_id))
            owed -= len(detokenizer.add(token_id).encode())
            # The dropped space in front is one more.
            assert owed <= 3 + tokenizer.spelling.strips_leading_space


class Counting:
    """A tokenizer that counts how many tokens are looked up."""

    special_token_ids = frozenset()

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.spelling = tokenizer.spelling
        self.reads = 0

    def token_bytes(self, token_id):
        self.reads += 1
        return self.tokenizer.token_bytes(token_id)


def test_each_token_is_read_once(byte_tokenizer):
    counting = Counting(byte_tokenizer)
    stream(counting, [0xF0] * 50 + [97] * 50)
    assert counting.reads == 100


@pytest.mark.parametrize(
    ("answer", "chunks"),
    [
        ([0x94, 0xA5, 97], ["", "🔥", "a", ""]),  # completes it
        ([97], ["a", ""]),  # is something else
        ([0x94, 97], ["", "\ufffda", ""]),  # has a broken byte of its own
        ([0x94], ["", "\ufffd"]),
        ([0xF0, 0x9F, 0x94, 0xA5], ["", "", "", "🔥", ""]),  # begins a new one
        ([], [""]),
    ],
)
def test_a_character_that_the_prompt_began_belongs_to_the_answer_if_it_completes_it(
    byte_tokenizer, answer, chunks
):
    prompt = [97, 0xF0, 0x9F]
    assert stream(byte_tokenizer, answer, prompt_token_ids=prompt) == chunks


def test_a_replacement_mark_that_prompt_and_answer_spell_is_a_character(
    byte_tokenizer,
):
    marks = stream(byte_tokenizer, [0xBF, 0xBD, 97], prompt_token_ids=[0xEF])
    assert marks == ["", "\ufffd", "a", ""]
    broken = stream(byte_tokenizer, [0xBF, 97], prompt_token_ids=[0xEF])
    assert broken == ["", "\ufffda", ""]


def test_behind_a_prompt_the_space_stays(tmp_path):
    tokenizer = load(METADATA["sentencepiece"], tmp_path)
    a, space_a = 260, 261
    assert stream(tokenizer, [space_a], prompt_token_ids=[1, a]) == [" a", ""]
    # A BOS that is skipped is no text, so the answer is the front; one shown is text.
    assert stream(tokenizer, [space_a], prompt_token_ids=[1]) == ["a", ""]
    shown = stream(
        tokenizer, [space_a], prompt_token_ids=[1], skip_special_tokens=False
    )
    assert shown == [" a", ""]
    # The prompt's own space is the one that is dropped.
    assert stream(tokenizer, [space_a], prompt_token_ids=[1, 259]) == [" a", ""]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_the_prompts_text_and_the_answers_are_the_text_of_both(tokenizer, data, skip):
    ids = data.draw(sequences_of(tokenizer))
    num_prompt_tokens = data.draw(st.integers(0, len(ids)))
    prompt, answer = ids[:num_prompt_tokens], ids[num_prompt_tokens:]
    assume(not open_bytes(bytes_of(tokenizer, prompt, skip)))
    chunks = stream(
        tokenizer, answer, prompt_token_ids=prompt, skip_special_tokens=skip
    )
    text = tokenizer.decode(prompt, skip_special_tokens=skip) + "".join(chunks)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.binary(max_size=3),
    answer=st.binary(max_size=5),
    character=st.sampled_from("é\u0800\ufffd🔥").map(str.encode),
    num_borrowed=st.integers(1, 3),
    completes=st.booleans(),
)
def test_a_prompt_that_ends_inside_a_character_adds_a_whole_one_or_nothing(
    byte_tokenizer, prompt, answer, character, num_borrowed, completes
):
    prompt += character[:num_borrowed]
    if completes:
        answer = character[num_borrowed:] + answer
    borrowed = open_bytes(prompt)
    expected = answer.decode(errors="replace")
    for end in range(1, 4):
        try:
            first = (borrowed + answer[:end]).decode()
        except UnicodeDecodeError:
            continue
        if borrowed and answer:
            expected = first + answer[end:].decode(errors="replace")
        break
    chunks = stream(byte_tokenizer, list(answer), prompt_token_ids=list(prompt))
    assert "".join(chunks) == expected


def test_of_a_long_prompt_only_the_end_is_read(byte_tokenizer):
    counting = Counting(byte_tokenizer)
    IncrementalDetokenizer(counting, prompt_token_ids=[97] * 100_000)
    assert counting.reads == 3


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decoding_equals_that_of_the_tokenizers_library(byte_tokenizer, data, skip):
    ids = data.draw(st.lists(st.integers(0, byte_tokenizer.vocab_size - 1)))
    theirs = byte_tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert byte_tokenizer.decode(ids, skip_special_tokens=skip) == theirs
