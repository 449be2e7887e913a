import pytest
from hypothesis import given, settings
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


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_the_joined_stream_is_the_decoded_whole(tokenizer, data, skip):
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    # Bytes of long characters, so that broken and whole ones are common.
    some_byte = st.sampled_from([tokenizer.encode(c)[-1] for c in "\x00aé🔥\u0800"])
    ids = data.draw(st.lists(any_id | some_byte, max_size=30))
    chunks = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(chunks) == tokenizer.decode(ids, skip_special_tokens=skip)


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


def test_each_token_is_read_once(byte_tokenizer):
    class Counting:
        special_token_ids = frozenset()
        spelling = byte_tokenizer.spelling
        reads = 0

        def token_bytes(self, token_id):
            self.reads += 1
            return byte_tokenizer.token_bytes(token_id)

    counting = Counting()
    stream(counting, [0xF0] * 50 + [97] * 50)
    assert counting.reads == 100


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decoding_equals_that_of_the_tokenizers_library(byte_tokenizer, data, skip):
    ids = data.draw(st.lists(st.integers(0, byte_tokenizer.vocab_size - 1)))
    theirs = byte_tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert byte_tokenizer.decode(ids, skip_special_tokens=skip) == theirs
