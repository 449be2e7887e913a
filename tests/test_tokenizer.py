import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tokenizers
import torch

from minivllm.errors import ConfigError, CorruptFile, ModelNotFound, RequestError
from minivllm.loading.gguf_vocabulary import TokenType
from minivllm.text.detokenizer import IncrementalDetokenizer
from minivllm.text.spelling import byte_alphabet
from minivllm.text.tokenizer import Tokenizer
from tests.corpus import hard_texts
from tests.tiny_tokenizers import CHATML, byte_level, load, sentencepiece

BOS, END, TOOL = 257, 258, 259
ADDED = {
    "<s>": TokenType.CONTROL,
    "<|end|>": TokenType.CONTROL,
    "<tool>": TokenType.USER_DEFINED,
}
PIECES = {"▁": -9.0, "a": -9.0, "b": -9.0, "▁a": -1.0}
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def folder(tmp_path):
    """A byte-level tokenizer that knows <s> but does not put it anywhere."""
    load(
        byte_level("h i", added=ADDED, bos_token_id=BOS, eos_token_id=END)
        | {"tokenizer.chat_template": CHATML},
        tmp_path,
    )
    return tmp_path


def change(folder, name="tokenizer_config.json", **values):
    path = folder / name
    old = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(old | values), encoding="utf-8")
    return Tokenizer.from_dir(folder)


def templated(folder, template):
    return change(folder, chat_template=template)


def test_the_alphabet_gives_every_byte_one_visible_character():
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["A"] == 65
    assert alphabet["Ġ"] == ord(" ")
    assert alphabet["Ċ"] == ord("\n")
    assert not any(character.isspace() for character in alphabet)


def test_text_becomes_ids_and_bytes_and_text_again(folder):
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.encode("hi é") == [256, 32, 0xC3, 0xA9]
    assert tokenizer.token_bytes(256) == b"hi"
    assert tokenizer.token_bytes(0xC3) == b"\xc3"
    assert tokenizer.token_bytes(TOOL) == b"<tool>"
    assert tokenizer.decode([256, 32, 0xC3, 0xA9]) == "hi é"


def test_every_hard_text_survives_the_round_trip(folder):
    tokenizer = Tokenizer.from_dir(folder)
    for text in hard_texts():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_read_in_text_and_left_out_on_decoding(folder):
    tokenizer = Tokenizer.from_dir(folder)
    ids = tokenizer.encode("a<|end|><tool>b")
    assert ids == [97, END, TOOL, 98]
    assert tokenizer.special_token_ids == {BOS, END}
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|><tool>b"


def test_bytes_that_are_no_character_become_the_replacement_character(folder):
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.decode([97, 0xF0, 0x9F, 98]) == "a\ufffdb"


def test_vocab_size_is_the_largest_id_plus_one(tmp_path):
    rows = {"[PAD256]": TokenType.UNUSED, "<|end|>": TokenType.CONTROL}
    tokenizer = load(byte_level(added=rows), tmp_path)
    assert tokenizer.vocab_size == 258  # 257 tokens: id 256 is a hole
    assert tokenizer.missing_token_ids == [256]
    assert tokenizer.token_bytes(256) == b""


@pytest.mark.parametrize("token_id", [-1, 260, 2**63])
def test_an_id_outside_the_vocabulary_is_refused_with_value_and_limit(folder, token_id):
    tokenizer = Tokenizer.from_dir(folder)
    with pytest.raises(RequestError, match=rf"token id {token_id} .* 0 to 259"):
        tokenizer.decode([97, token_id])


def test_rows_beyond_the_tokens_are_padding_but_missing_rows_are_an_error(folder):
    tokenizer = Tokenizer.from_dir(folder)
    tokenizer.check_embedding_rows(260)
    tokenizer.check_embedding_rows(320)
    tokenizer.check_embedding_rows(259)  # an added token that the model never saw
    message = r"largest token id for text is 258, .* only 258 rows"
    with pytest.raises(ConfigError, match=message):
        tokenizer.check_embedding_rows(258)  # no row for the end
    message = r"largest token id for text is 256, .* only 256 rows"
    with pytest.raises(ConfigError, match=message):
        change(folder, bos_token=None, eos_token=None).check_embedding_rows(256)


@pytest.mark.parametrize("half", ["\ud83d", "ok \udc80"])
def test_half_a_character_is_no_text(folder, half):
    tokenizer = Tokenizer.from_dir(folder)
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode(half)
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": half}])


def test_only_strings_are_encoded(folder):
    with pytest.raises(RequestError, match="is a list, but must be a str"):
        Tokenizer.from_dir(folder).encode(["hi"])


class TestStart:
    def test_no_bos_where_the_tokenizer_wants_none(self, folder):
        tokenizer = Tokenizer.from_dir(folder)
        assert tokenizer.bos_token_id == BOS
        assert tokenizer.encode("a") == [97]
        assert tokenizer.encode("<s><s>a") == [BOS, BOS, 97]  # it is only text there

    def test_one_bos_where_the_tokenizer_wants_one(self, folder):
        tokenizer = change(folder, add_bos_token=True)
        assert tokenizer.encode("a") == [BOS, 97]
        assert tokenizer.encode("") == [BOS]
        assert tokenizer.encode("a", add_special_tokens=False) == [97]
        assert tokenizer.encode("<s>a") == [BOS, 97]
        assert tokenizer.encode("<s><s>a") == [BOS, 97]
        assert tokenizer.encode("<s>a<s>") == [BOS, 97, BOS]

    @pytest.mark.parametrize("adds_bos", [True, False])
    @pytest.mark.parametrize("writes_bos", [True, False])
    def test_a_chat_never_has_two(self, folder, adds_bos, writes_bos):
        template = "{{ bos_token }}x" if writes_bos else "x"
        tokenizer = change(folder, add_bos_token=adds_bos, chat_template=template)
        expected = [BOS, 120] if adds_bos or writes_bos else [120]
        assert tokenizer.encode_chat(HELLO) == expected

    def test_the_post_processor_of_the_file_counts_where_no_flag_is_set(self, folder):
        document = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        backend = tokenizers.Tokenizer.from_str(json.dumps(document))
        backend.post_processor = tokenizers.processors.Sequence(
            [
                tokenizers.processors.ByteLevel(),
                tokenizers.processors.TemplateProcessing(
                    single="<s> $A <|end|>",
                    special_tokens=[("<s>", BOS), ("<|end|>", END)],
                ),
            ]
        )
        backend.save(str(folder / "tokenizer.json"))
        unset = change(folder, add_bos_token=None, add_eos_token=None)
        assert unset.encode("a") == [BOS, 97, END]
        assert unset.encode_chat(HELLO)[0] == BOS
        assert unset.encode_chat(HELLO)[-1] != END
        assert change(folder, add_bos_token=False).encode("a") == [97, END]
        assert change(folder, add_eos_token=False).encode("a") == [97]

    def test_a_start_of_several_tokens_is_kept_whole(self, folder):
        path = str(folder / "tokenizer.json")
        backend = tokenizers.Tokenizer.from_file(path)
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<tool> <s> $A", special_tokens=[("<tool>", TOOL), ("<s>", BOS)]
        )
        backend.save(path)
        tokenizer = change(folder, add_bos_token=True)
        assert tokenizer.encode("a") == [TOOL, BOS, 97]
        assert tokenizer.encode("<tool><s>a") == [TOOL, BOS, 97]

    def test_eos_is_appended_once_where_the_flag_says_so(self, folder):
        assert change(folder, add_eos_token=True).encode("a") == [97, END]


class TestEndOfText:
    def test_the_ids_of_all_files_are_united(self, folder):
        assert Tokenizer.from_dir(folder).eos_token_ids == {END}
        change(folder, "config.json", eos_token_id=7)
        assert Tokenizer.from_dir(folder).eos_token_ids == {7, END}
        change(folder, "generation_config.json", eos_token_id=[1, 106])
        assert Tokenizer.from_dir(folder).eos_token_ids == {1, 7, 106, END}

    def test_the_text_part_of_a_multimodal_config_counts(self, folder):
        tokenizer = change(folder, "config.json", text_config={"eos_token_id": [5]})
        assert tokenizer.eos_token_ids == {5, END}

    def test_a_tokenizer_without_eos_has_an_empty_set(self, folder):
        tokenizer = change(folder, eos_token=None)
        assert tokenizer.eos_token_ids == frozenset()

    @pytest.mark.parametrize("value", ["2", [1, "2"], True, -1, 1.5])
    def test_what_is_no_id_is_refused(self, folder, value):
        with pytest.raises(ConfigError, match=r"eos_token_id in config\.json"):
            change(folder, "config.json", eos_token_id=value)


class TestSpecialTokens:
    def test_a_token_may_be_given_as_a_dict(self, folder):
        tokenizer = change(folder, eos_token={"content": "<s>", "lstrip": False})
        assert tokenizer.eos_token_ids == {BOS}

    def test_special_tokens_map_fills_what_the_config_lacks(self, folder):
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({"chat_template": "x"}), encoding="utf-8")
        tokenizer = change(folder, "special_tokens_map.json", bos_token="<s>")
        assert tokenizer.bos_token_id == BOS

    @pytest.mark.parametrize("key", ["additional_special_tokens", "pad_token"])
    def test_settings_make_tokens_special(self, folder, key):
        value = "<tool>" if key == "pad_token" else ["<tool>"]
        tokenizer = change(folder, **{key: value})
        assert tokenizer.special_token_ids == {BOS, END, TOOL}
        assert tokenizer.decode([97, TOOL]) == "a"

    def test_a_special_token_that_is_an_ordinary_piece_is_found_whole(self, folder):
        document = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        document["model"]["merges"] = []  # so that no merge can make "hi"
        (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
        assert Tokenizer.from_dir(folder).encode("hi") == [104, 105]
        assert change(folder, pad_token="hi").encode("hi") == [256]

    def test_a_special_token_without_an_id_gets_none(self, folder):
        tokenizer = change(folder, pad_token="<pad>")
        assert tokenizer.vocab_size == 260
        assert tokenizer.encode("<pad>") == list(b"<pad>")

    def test_settings_of_training_do_not_cut_or_pad(self, folder):
        path = str(folder / "tokenizer.json")
        backend = tokenizers.Tokenizer.from_file(path)
        backend.enable_truncation(2)
        backend.enable_padding(length=8)
        backend.save(path)
        assert Tokenizer.from_dir(folder).encode("abcde") == list(b"abcde")


class TestChatTemplate:
    def test_a_chat_is_rendered_and_encoded(self, folder):
        tokenizer = Tokenizer.from_dir(folder)
        text = tokenizer.apply_chat_template(HELLO)
        assert text == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
        assert tokenizer.encode_chat(HELLO) == tokenizer.encode(text)
        closed = tokenizer.apply_chat_template(HELLO, add_generation_prompt=False)
        assert closed == "<|start|>user\nHi<|end|>\n"

    @pytest.mark.parametrize(
        ("template", "expected"),
        [
            ("{% if true %}\n  a\n{% endif %}\nb", "  a\nb"),  # trim_blocks
            ("x\n   {% if true %}a{% endif %}", "x\na"),  # lstrip_blocks
            ("{{ {'k': 'é<'} | tojson }}", '{"k": "é<"}'),
            ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
            ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
            (
                "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}"
                "{{ i }}{% endfor %}",
                "01",
            ),
            ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
            ("{{ bos_token }}|{{ eos_token }}|{{ sep_token }}", "<s>|<|end|>|"),
            ("{{ tools is none }}", "True"),
            ("{{ documents is none }}", "True"),
            ("{{ strftime_now('%Y') | length }}", "4"),
            ("{{ colour }}", "red"),
            ("{{ image_token }}", "<img>"),
        ],
    )
    def test_the_environment_is_that_of_transformers(self, folder, template, expected):
        tokenizer = change(
            folder,
            chat_template=template,
            extra_special_tokens={"image_token": "<img>"},
        )
        assert tokenizer.apply_chat_template(HELLO, colour="red") == expected

    @pytest.mark.parametrize(
        ("template", "words"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ nothing.here }}", "'nothing' is undefined"),
            ("{{ messages[0].content + 1 }}", "can only concatenate str"),
            ("{{ 1 // 0 }}", "by zero"),
            ("{{ ''.__class__.__mro__ }}", "is unsafe"),
            ("{{ messages.append(1) }}", "is unsafe"),
        ],
    )
    def test_its_refusals_are_passed_on_in_its_own_words(self, folder, template, words):
        with pytest.raises(RequestError, match=words):
            templated(folder, template).apply_chat_template(HELLO)

    def test_a_template_that_is_no_jinja_is_the_models_fault(self, folder):
        tokenizer = templated(folder, "line one\n{% if %}")
        assert tokenizer.encode("hi") == [256]  # raw text still works
        with pytest.raises(ConfigError, match=r"line 2 .*Expected an expression"):
            tokenizer.apply_chat_template(HELLO)

    def test_without_a_template_the_way_out_is_raw_text(self, folder):
        with pytest.raises(RequestError, match=r"no chat template.*raw text"):
            change(folder, chat_template=None).apply_chat_template(HELLO)

    def test_named_templates_are_chosen_as_transformers_does(self, folder):
        named = {"default": "plain", "tool_use": "tools: {{ tools[0].name }}"}
        listed = [{"name": name, "template": text} for name, text in named.items()]
        tokenizer = templated(folder, listed)
        assert tokenizer.chat_template == "plain"
        assert tokenizer.apply_chat_template(HELLO) == "plain"
        tools = [{"name": "f"}]
        assert tokenizer.apply_chat_template(HELLO, tools=tools) == "tools: f"
        only_tools = templated(folder, [listed[1]])
        with pytest.raises(RequestError, match=r"its chat templates: \['tool_use'\]"):
            only_tools.apply_chat_template(HELLO)

    def test_a_template_file_wins_over_the_config(self, folder):
        (folder / "chat_template.jinja").write_text("from a file", encoding="utf-8")
        assert Tokenizer.from_dir(folder).apply_chat_template(HELLO) == "from a file"

    def test_named_templates_may_be_files_of_their_own(self, folder):
        more = folder / "additional_chat_templates"
        more.mkdir()
        (more / "tool_use.jinja").write_text("for tools", encoding="utf-8")
        tokenizer = templated(folder, "plain")
        assert tokenizer.apply_chat_template(HELLO) == "plain"
        tools = [{"name": "f"}]
        assert tokenizer.apply_chat_template(HELLO, tools=tools) == "for tools"

    @pytest.mark.parametrize(
        ("messages", "words"),
        [
            ([], r"messages is \[\]"),
            ("Hi", "messages is 'Hi'"),
            (None, "messages is None"),
            (["Hi"], "message 0 is a str"),
            ([{"content": "Hi"}], "message 0 has the role None"),
            ([{"role": 1, "content": "Hi"}], "message 0 has the role 1"),
            ([*HELLO, {"role": "user"}], "message 1 has no content"),
            ([{"role": "user", "content": 7}], "content of message 0 is a int"),
        ],
    )
    def test_malformed_messages_are_refused_by_number(self, folder, messages, words):
        with pytest.raises(RequestError, match=words):
            Tokenizer.from_dir(folder).apply_chat_template(messages)

    def test_empty_fields_are_left_out_and_the_callers_messages_untouched(self, folder):
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}
        tokenizer = templated(folder, "{{ 'content' in messages[0] }}")
        assert tokenizer.apply_chat_template([message]) == "False"
        assert message["content"] is None


class TestFiles:
    def test_a_folder_without_a_tokenizer_is_not_found(self, tmp_path):
        with pytest.raises(ModelNotFound, match=r"has no tokenizer\.json"):
            Tokenizer.from_dir(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", '{"version": "1.0"}', "[]"])
    def test_a_broken_tokenizer_is_named(self, folder, text):
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        with pytest.raises(CorruptFile, match=r"tokenizer\.json is no valid tokenizer"):
            Tokenizer.from_dir(folder)

    @pytest.mark.parametrize("data", [b"{", b"[]", b"\xff\xfe"])
    @pytest.mark.parametrize(
        "name",
        [
            "tokenizer_config.json",
            "special_tokens_map.json",
            "config.json",
            "generation_config.json",
        ],
    )
    def test_a_broken_json_file_is_named(self, folder, name, data):
        (folder / name).write_bytes(data)
        with pytest.raises(CorruptFile, match=name):
            Tokenizer.from_dir(folder)

    def test_a_template_file_that_is_no_text_is_refused(self, folder):
        (folder / "chat_template.jinja").write_bytes(b"ab\xff")
        with pytest.raises(CorruptFile, match=r"jinja is no UTF-8 .* at byte 2"):
            Tokenizer.from_dir(folder)

    def test_a_decoder_of_another_family_is_refused(self, folder):
        document = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        document["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
        (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
        with pytest.raises(ConfigError, match=r"decodes with \['WordPiece'\]"):
            Tokenizer.from_dir(folder)


class TestSentencePiece:
    def test_the_space_that_encoding_puts_in_front_is_dropped(self, tmp_path):
        tokenizer = load(sentencepiece(PIECES), tmp_path)
        assert tokenizer.spelling.strips_leading_space
        assert tokenizer.encode("a b") == [1, 262, 259, 261]
        assert tokenizer.decode([1, 262, 259, 261]) == "a b"
        assert tokenizer.decode(tokenizer.encode(" a")) == " a"
        assert tokenizer.decode([262, 262]) == "a a"

    def test_nothing_is_dropped_where_encoding_puts_nothing(self, tmp_path):
        metadata = sentencepiece(PIECES, add_space_prefix=False)
        tokenizer = load(metadata, tmp_path)
        assert tokenizer.decode([262]) == " a"
        assert tokenizer.decode(tokenizer.encode(" a")) == " a"

    def test_byte_tokens_are_bytes(self, tmp_path):
        tokenizer = load(sentencepiece(PIECES), tmp_path)
        fire = [3 + byte for byte in "🔥".encode()]
        assert tokenizer.encode("🔥") == [1, 259, *fire]
        assert tokenizer.decode(fire) == "🔥"
        assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"

    def test_byte_tokens_are_text_where_the_file_does_not_fall_back(self, tmp_path):
        load(sentencepiece(PIECES), tmp_path)
        path = str(tmp_path / "tokenizer.json")
        backend = tokenizers.Tokenizer.from_file(path)
        backend.decoder = tokenizers.decoders.Metaspace()
        backend.save(path)
        tokenizer = Tokenizer.from_dir(tmp_path)
        assert tokenizer.decode([262, 3]) == "a<0x00>"
        assert tokenizer.spelling.strips_leading_space
        backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
        backend.save(path)
        assert Tokenizer.from_dir(tmp_path).decode([262]) == " a"

    def test_hard_texts_survive_the_round_trip(self, tmp_path):
        tokenizer = load(sentencepiece(PIECES), tmp_path)
        # This family cannot tell its own "▁" from a space, nor "<0x0A>" from a byte,
        # and puts a space after each special token inside a text.
        tricky = ("▁", "<0x", "<s>", "</s>", "<unk>")
        texts = [t for t in hard_texts() if not any(mark in t for mark in tricky)]
        assert len(texts) > 400
        for text in texts:
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_threads_share_one_tokenizer(folder):
    tokenizer = Tokenizer.from_dir(folder)
    texts = hard_texts(480)
    alone = [(tokenizer.encode(text), tokenizer.encode_chat(HELLO)) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        together = list(
            pool.map(
                lambda text: (tokenizer.encode(text), tokenizer.encode_chat(HELLO)),
                texts,
            )
        )
    assert together == alone


# What a settings file may hold


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *(("config.json", "text_config", value) for value in ("s", [1], 5)),
        *(
            ("tokenizer_config.json", key, value)
            for key, values in {
                "bos_token": (5, True, ["a"], {"content": None}, "\ud800"),
                "extra_special_tokens": ([5], [None], {"a": 5}, "a"),
                "additional_special_tokens": ([5], 5),
                "add_bos_token": ("false", 0),
                "chat_template": (
                    5,
                    {"default": 5},
                    [5],
                    [{"name": "default", "template": 5}],
                    [{"template": "x"}],
                    [{"name": "default"}],
                ),
            }.items()
            for value in values
        ),
        ("special_tokens_map.json", "eos_token", 5),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named(folder, name, key, value):
    with pytest.raises(CorruptFile, match=rf"{name} is damaged: its {key} is .* must"):
        change(folder, name, **{key: value})


def test_the_tokenizers_own_settings_win_over_the_map_of_special_tokens(folder):
    tokenizer = change(folder, "special_tokens_map.json", bos_token="<|end|>")
    assert tokenizer.bos_token_id == BOS


def test_variables_of_the_caller_win_over_tokens_but_not_over_the_chat(folder):
    """As in transformers; what the caller passes by name stays as it is."""
    template = "{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}"
    tokenizer = templated(folder, template)
    text = tokenizer.apply_chat_template(HELLO, bos_token="B", add_generation_prompt=0)
    assert text == "BHi0"


# Token ids that are no plain int


def test_integers_of_other_libraries_are_token_ids(folder):
    tokenizer = Tokenizer.from_dir(folder)
    ids = [97, END, 98]
    for others in (np.array(ids), torch.tensor(ids)):
        assert tokenizer.decode(others) == "ab"
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert [detokenizer.add(token_id) for token_id in others] == ["a", "", "b"]


@pytest.mark.parametrize("token_id", [1.0, None, "a", torch.tensor(1.0)])
def test_what_is_no_integer_is_no_token_id(folder, token_id):
    tokenizer = Tokenizer.from_dir(folder)
    add = IncrementalDetokenizer(tokenizer).add
    for use in (tokenizer.token_bytes, add, lambda i: tokenizer.decode([i])):
        with pytest.raises(RequestError, match="must be an integer"):
            use(token_id)


# Templates that go wrong, and contents in parts


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "(" * 400 + "1" + ")" * 400 + " }}",
        "{% if 1 %}" * 120 + "{% endif %}" * 120,
        "{% set x = " + "-" * 20_000 + "1 %}",
        "{{ " + "9" * 5000 + " }}",
    ],
)
def test_a_template_that_python_cannot_compile_is_the_models_fault(folder, template):
    with pytest.raises(ConfigError, match=r"the chat template .*correct chat_template"):
        templated(folder, template).apply_chat_template(HELLO)


def test_a_template_without_enough_memory_refuses_the_messages(folder):
    template = "{{ messages[0].content * 10**17 }}"
    with pytest.raises(RequestError, match="refused these messages"):
        templated(folder, template).apply_chat_template(HELLO)


PARTS = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content }}", "Hi\nyou"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "Hi\nyou"),
        ("{% for x in messages[0].content.split() %}{{ x }};{% endfor %}", "Hi;you;"),
        ("{%- for p in messages[0]['content'] -%}{{ p.text }};{% endfor %}", "Hi;you;"),
        ("{% for p in messages[0].content | list %}{{ p.text }}{% endfor %}", "Hiyou"),
        (
            "{% set content = messages[0].content %}"
            "{% for p in content if p.text %}{{ p.text }}{% endfor %}",
            "Hiyou",
        ),
    ],
)
def test_text_parts_are_joined_for_a_template_without_a_loop(folder, template, text):
    message = {"role": "user", "content": PARTS}
    assert templated(folder, template).apply_chat_template([message]) == text


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {}}, "'image_url'"),
        ("Hi", "'str'"),
        ({}, "None"),
    ],
)
def test_a_part_that_is_no_text_is_named(folder, part, kind):
    message = {"role": "user", "content": [*PARTS, part]}
    with pytest.raises(RequestError, match=f"message 0 has a part of type {kind}"):
        Tokenizer.from_dir(folder).apply_chat_template([message])
