import io
import json

import pytest
import sentencepiece
import tokenizers

from minivllm.errors import ConfigError, CorruptFile
from minivllm.loading.gguf_tokenizer import tokenizer_files
from minivllm.loading.gguf_vocabulary import TokenType, merges_from_scores
from minivllm.loading.pre_tokenizers import PRE_TOKENIZERS
from tests import tiny_tokenizers
from tests.corpus import MARKUP, SENTENCES, hard_texts
from tests.tiny_tokenizers import byte_level

# What each rule makes of one text, by hand. "Ġ" is a space, "Ċ" a line break.
WORDS = {
    "I'LL pay  12345\n\nok": {
        "gpt-2": "I ' LL Ġpay Ġ Ġ12345 Ċ Ċ ok",
        "smollm": "I ' LL Ġpay ĠĠ 1 2 3 4 5 Ċ Ċ ok",
        "llama-bpe": "I 'LL Ġpay Ġ Ġ 123 45 ĊĊ ok",
        "qwen2": "I 'LL Ġpay Ġ Ġ 1 2 3 4 5 ĊĊ ok",
        "qwen35": "I 'LL Ġpay Ġ Ġ 1 2 3 4 5 ĊĊ ok",
        "tekken": "I 'LL Ġpay Ġ Ġ 1 2 3 4 5 ĊĊ ok",
        "default": "I ' LL Ġpay Ġ Ġ 123 45 Ċ Ċ ok",
    },
    "a//b, camelCase?\nx": {
        "gpt-2": "a // b , ĠcamelCase ? Ċ x",
        "smollm": "a // b , ĠcamelCase ? Ċ x",
        "llama-bpe": "a // b , ĠcamelCase ?Ċ x",
        "qwen2": "a // b , ĠcamelCase ?Ċ x",
        "qwen35": "a // b , ĠcamelCase ?Ċ x",
        "tekken": "a // b , Ġcamel Case ?Ċ x",
        "default": "a // b , ĠcamelCase ? Ċ x",
    },
}


def backend(metadata):
    return tokenizers.Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"])


def config(metadata):
    return json.loads(tokenizer_files(metadata)["tokenizer_config.json"])


@pytest.mark.parametrize(
    ("text", "pre", "words"),
    [
        (text, pre, words)
        for text, rules in WORDS.items()
        for pre, words in rules.items()
    ],
)
def test_each_rule_cuts_text_into_its_own_words(text, pre, words):
    cut = backend(
        byte_level(pre=pre, add_bos_token=False)
    ).pre_tokenizer.pre_tokenize_str(text)
    assert [word for word, _ in cut] == words.split(" ")


def test_names_of_one_rule_cut_alike():
    aliases = {
        "gpt-2": ("phi-2",),
        "smollm": ("starcoder", "refact", "codeshell"),
        "llama-bpe": ("llama3", "llama-v3"),
        "qwen2": ("deepseek-r1-qwen",),
    }
    for name, others in aliases.items():
        for other in others:
            assert PRE_TOKENIZERS[name].splits == PRE_TOKENIZERS[other].splits


def test_merges_stay_inside_a_word():
    """1 and 2 merge under GPT-2's rule, never where digits are cut apart."""
    assert backend(byte_level("1 2", pre="gpt-2")).encode("12").ids == [256]
    assert backend(byte_level("1 2", pre="smollm")).encode("12").ids == [49, 50]


def test_only_the_rules_that_compose_compose():
    decomposed = "e\u0301"
    composed = list("é".encode())
    assert backend(byte_level(pre="qwen2")).encode(decomposed).ids == composed
    plain = backend(byte_level(pre="deepseek-r1-qwen"))
    assert plain.encode(decomposed).ids == list(decomposed.encode())


def test_llama3_takes_a_word_whole_even_without_merges():
    added = {"hello": TokenType.NORMAL}
    llama3 = backend(byte_level(pre="llama-bpe", added=added, add_bos_token=False))
    assert llama3.encode("hello").ids == [256]
    gpt2 = backend(byte_level(pre="gpt-2", added=added))
    assert gpt2.encode("hello").ids == list(b"hello")


def test_an_unknown_rule_is_refused_with_the_list_of_the_known():
    with pytest.raises(ConfigError, match=r"known rules .*smollm.*qwen2"):
        tokenizer_files(byte_level(pre="no-such-rule"))


def test_an_unknown_kind_of_tokenizer_is_refused():
    with pytest.raises(ConfigError, match=r"'t5'.*'gpt2'.*'llama'"):
        tokenizer_files({"tokenizer.ggml.model": "t5"})


@pytest.mark.parametrize("key", ["model", "pre", "tokens", "merges"])
def test_a_missing_key_is_named(key):
    metadata = byte_level("a b")
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(CorruptFile, match=rf"no tokenizer\.ggml\.{key}"):
        tokenizer_files(metadata)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("token_type", [1, 1], "2 entries for 257 tokens"),
        ("merges", ["a b c"], "'a b c', which is not two tokens"),
        ("merges", ["zz yy"], "'zz yy', which is not two tokens"),
        ("merges", ["a z"], "'a z', which is not two tokens that make a third"),
        ("bos_token_id", 257, r"is 257, but the file has only 257"),
        ("eos_token_id", -1, "is -1"),
        ("add_bos_token", True, "no tokenizer.ggml.bos_token_id"),
    ],
)
def test_contradicting_keys_are_refused(key, value, words):
    with pytest.raises(CorruptFile, match=words):
        tokenizer_files(byte_level("a b") | {f"tokenizer.ggml.{key}": value})


WRONG_VALUES = {
    "tokens": (5, [1], [None]),
    "token_type": (5, ["x"], [1.5]),
    "merges": (5, [1], "a b"),
    "pre": ([1], 5),
    "model": (5, ["gpt2"]),
    "bos_token_id": ("x", 1.5, [1], True),
    "add_bos_token": ("false", 1),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, v) for key, values in WRONG_VALUES.items() for v in values]
)
def test_a_value_of_the_wrong_type_is_named(key, value):
    with pytest.raises(CorruptFile, match=rf"tokenizer\.ggml\.{key} is .* of type"):
        tokenizer_files(byte_level("a b") | {f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("scores", 5, "scores is 5, but must be of type list"),
        ("scores", ["x"], "an entry of tokenizer.ggml.scores is 'x'"),
        ("scores", [1.0], "scores has 1 entries for 260 tokens"),
        ("unknown_token_id", "x", "unknown_token_id is 'x'"),
        ("unknown_token_id", 1.5, "unknown_token_id is 1.5"),
        ("unknown_token_id", [1], r"unknown_token_id is \[1\]"),
        ("add_space_prefix", 1, "add_space_prefix is 1, but must be of type bool"),
    ],
)
def test_a_wrong_value_of_a_sentencepiece_file_is_named(key, value, words):
    metadata = tiny_tokenizers.sentencepiece({"▁": -1.0})
    with pytest.raises(CorruptFile, match=words):
        tokenizer_files(metadata | {f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize("key", ["chat_template", "chat_template.tool_use"])
def test_a_chat_template_is_text(key):
    with pytest.raises(CorruptFile, match=rf"tokenizer\.{key} is 5, but must be"):
        tokenizer_files(byte_level("a b") | {f"tokenizer.{key}": 5})


def test_a_token_that_stands_twice_is_refused():
    with pytest.raises(CorruptFile, match=r"'ab' stands twice.* 256 and 257"):
        tokenizer_files(byte_level("a b", added={"ab": TokenType.NORMAL}))


def test_token_types_become_special_plain_or_unreachable_tokens():
    kinds = {
        "<|end|>": TokenType.CONTROL,
        "<think>": TokenType.USER_DEFINED,
        "[PAD258]": TokenType.UNUSED,
    }
    rebuilt = backend(byte_level(added=kinds))
    assert rebuilt.encode("a<|end|><think>").ids == [97, 256, 257]
    assert rebuilt.decode([256, 257], skip_special_tokens=True) == "<think>"
    assert rebuilt.token_to_id("[PAD258]") is None
    assert rebuilt.encode("[PAD258]").ids == list(b"[PAD258]")


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        ({}, [97]),
        ({"add_bos_token": True}, [256, 97]),
        ({"add_bos_token": True, "add_eos_token": True}, [256, 97, 257]),
        ({"pre": "llama-bpe"}, [256, 97]),  # this rule comes with BOS
        ({"pre": "llama-bpe", "add_bos_token": False}, [97]),
    ],
)
def test_bos_and_eos_follow_the_flags(keys, ids):
    added = {"<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    metadata = byte_level(added=added, bos_token_id=256, eos_token_id=257, **keys)
    assert backend(metadata).encode("a").ids == ids
    flags = config(metadata)
    assert flags["add_bos_token"] == (256 in ids)
    assert flags["add_eos_token"] == (257 in ids)
    assert (flags["bos_token"], flags["eos_token"]) == ("<s>", "</s>")


def test_one_chat_template_is_a_string_and_several_are_a_list():
    key = "tokenizer.chat_template"
    assert "chat_template" not in config(byte_level())
    assert config(byte_level() | {key: "A"})["chat_template"] == "A"
    assert config(byte_level() | {key: "A", f"{key}.tool_use": "B"})[
        "chat_template"
    ] == [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]


def test_the_best_score_merges_first():
    pieces = {"▁": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -1.0, "bc": -2.0}
    ab_first = backend(tiny_tokenizers.sentencepiece(pieces))
    assert ab_first.encode("abc").tokens == ["<s>", "▁", "ab", "c"]
    bc_first = backend(tiny_tokenizers.sentencepiece(pieces | {"ab": -3.0}))
    assert bc_first.encode("abc").tokens == ["<s>", "▁", "a", "bc"]


def test_merges_are_ordered_by_score_then_longer_halves():
    tokens = ["a", "b", "ab", "aba", "ba", "a<0x00>"]
    types = [TokenType.NORMAL] * 5 + [TokenType.CONTROL]
    merges = merges_from_scores(
        {token: n for n, token in enumerate(tokens)}, types, [0, 0, -2, -1, -3, 0]
    )
    assert merges == [["ab", "a"], ["a", "ba"], ["a", "b"], ["b", "a"]]


def test_a_user_defined_run_of_spaces_is_merged_before_anything_else():
    """The converter stores it as plain spaces; text reaches it by merges."""
    pieces = {"▁": -9.0, "a": -9.0, "▁a": -1.0}
    metadata = tiny_tokenizers.sentencepiece(
        pieces, {"  ": TokenType.USER_DEFINED}, add_space_prefix=False
    )
    assert backend(metadata).encode("  a a").tokens == ["<s>", "▁▁", "a", "▁a"]


def test_what_no_piece_covers_becomes_bytes():
    metadata = tiny_tokenizers.sentencepiece({"▁": 0.0, "a": 0.0})
    assert backend(metadata).encode("aé").ids[1:] == [259, 260, 3 + 0xC3, 3 + 0xA9]


def test_without_byte_tokens_an_unknown_run_is_one_unknown_token():
    metadata = tiny_tokenizers.sentencepiece({"▁": 0.0, "a": 0.0})
    types = metadata["tokenizer.ggml.token_type"]
    unused = [TokenType.UNUSED if kind == TokenType.BYTE else kind for kind in types]
    rebuilt = backend(metadata | {"tokenizer.ggml.token_type": unused})
    assert rebuilt.encode("aéøa").ids == [1, 259, 260, 0, 260]


def test_the_unknown_token_can_be_written_in_a_text():
    metadata = tiny_tokenizers.sentencepiece({"▁": 0.0, "a": 0.0})
    assert backend(metadata).encode("<unk>a").ids == [1, 0, 259, 260]


def test_only_user_defined_spaces_are_respelled():
    pieces = {"▁": -9.0, "▁▁": -1.0, "  ": -1.0}
    metadata = tiny_tokenizers.sentencepiece(pieces, add_space_prefix=False)
    assert backend(metadata).encode("  ").tokens == ["<s>", "▁▁"]


def test_the_space_prefix_is_the_default_and_can_be_off():
    pieces = {"▁": -9.0, "a": -9.0, "▁a": -1.0}
    on = backend(tiny_tokenizers.sentencepiece(pieces))
    off = backend(tiny_tokenizers.sentencepiece(pieces, add_space_prefix=False))
    assert on.encode("a").tokens == ["<s>", "▁a"]
    assert off.encode("a").tokens == ["<s>", "a"]
    assert on.decode(on.encode(" a a").ids) == " a a"
    assert off.decode(off.encode(" a a").ids) == " a a"


def test_old_files_that_name_no_special_ids_get_those_of_sentencepiece():
    metadata = tiny_tokenizers.sentencepiece({"▁": 0.0, "a": 0.0})
    for key in ("bos_token_id", "eos_token_id", "unknown_token_id"):
        del metadata[f"tokenizer.ggml.{key}"]
    assert backend(metadata).encode("a").ids == [1, 259, 260]


@pytest.fixture(scope="module")
def trained():
    """A real SentencePiece model, trained on the sentences of the corpus."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def metadata_of(model):
    kinds = {
        TokenType.UNKNOWN: model.IsUnknown,
        TokenType.CONTROL: model.IsControl,
        TokenType.BYTE: model.IsByte,
    }
    rows = range(model.GetPieceSize())
    types = [
        next((kind for kind, holds in kinds.items() if holds(n)), TokenType.NORMAL)
        for n in rows
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.IdToPiece(n) for n in rows],
        "tokenizer.ggml.scores": [model.GetScore(n) for n in rows],
        "tokenizer.ggml.token_type": types,
    }


def test_ids_equal_sentencepiece_itself(trained):
    rebuilt = backend(metadata_of(trained))
    # SentencePiece reads "<s>" in a text as three characters, engines as a token.
    texts = [
        t for t in hard_texts() if not any(m in t for m in ("<s>", "</s>", "<unk>"))
    ]
    assert len(texts) > 400
    merged = 0
    for text in texts:
        expected = trained.EncodeAsIds(text)
        assert rebuilt.encode(text).ids == [1, *expected], text
        merged += any(len(trained.IdToPiece(n)) in (2, 3, 4) for n in expected)
    assert merged > 200


def test_special_tokens_inside_a_text_are_found(trained):
    rebuilt = backend(metadata_of(trained))
    for text in MARKUP:
        ids = rebuilt.encode(text, add_special_tokens=False).ids
        assert ids.count(1) == text.count("<s>")
        assert ids.count(2) == text.count("</s>")
