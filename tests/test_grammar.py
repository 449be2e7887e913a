import gc
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from minivllm.errors import BackendUnavailable, RequestError
from minivllm.loading.gguf_vocabulary import TokenType
from minivllm.sampling import grammar
from minivllm.sampling.grammar import make_grammar
from minivllm.sampling.params import SamplingParams
from minivllm.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import byte_level, load, sentencepiece

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

PERSON = {
    "type": "object",
    "properties": {
        "a": {"enum": ["hi", "ah", 12, None]},
        "b": {"type": "string", "maxLength": 5},
        "c": {
            "type": "array",
            "items": {"type": "integer", "minimum": -12, "maximum": 1212},
            "maxItems": 3,
        },
    },
    "required": ["a", "c"],
    "additionalProperties": False,
}
# Tokens that cross every border in JSON, and several spellings of the same text.
MERGES = ["h i", ": Ġ", '" :', '" ,', '{ "', '" }', "1 2", ", Ġ", "Ġ h", "] }"]
PIECES = [
    "▁",
    "h",
    "hi",
    "▁hi",
    "▁a",
    "a",
    "▁{",
    '{"',
    '":',
    ",",
    ",▁",
    '"}',
    "12",
    "▁▁",
]
CONTROL = TokenType.CONTROL


def make_tokenizer(kind, folder, end_ids=None):
    """Return a tokenizer with the markup <s>, <|end|> and <|stop|>."""
    if kind == "byte-level":
        added = {"<s>": CONTROL, "<|end|>": CONTROL, "<|stop|>": CONTROL}
        first = 256 + len(MERGES)
        metadata = byte_level(
            *MERGES, added=added, bos_token_id=first, eos_token_id=first + 1
        )
    else:
        pieces = dict.fromkeys(PIECES, -9.0)
        metadata = sentencepiece(pieces, added={"<|stop|>": CONTROL})
    tokenizer = load(metadata, folder)
    if end_ids is None:  # two of them: that of the tokenizer and the last token
        end_ids = sorted({*tokenizer.eos_token_ids, tokenizer.vocab_size - 1})
    config = folder / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": end_ids}), encoding="utf-8")
    return Tokenizer.from_dir(folder)


@pytest.fixture(params=["byte-level", "SentencePiece"])
def tokenizer(request, tmp_path):
    return make_tokenizer(request.param, tmp_path)


def processor_of(tokenizer, **guide):
    return make_grammar(SamplingParams(**guide), tokenizer)


def allowed_by(processor, output, num_rows):
    logits = np.zeros(num_rows, dtype=np.float32)
    processor(output, logits)
    assert set(np.unique(logits)) <= {0.0, -np.inf}
    return {int(token_id) for token_id in np.flatnonzero(logits == 0)}


def random_answer(processor, tokenizer, rng, limit=120):
    """Draw among the allowed tokens, all alike; return the text if it ends, or None."""
    output = []
    while len(output) < limit:
        allowed = allowed_by(processor, output, tokenizer.vocab_size)
        token_id = int(rng.choice(sorted(allowed)))
        if token_id in tokenizer.eos_token_ids:
            return b"".join(map(tokenizer.token_bytes, output)).decode()
        output.append(token_id)
    return None


def random_answers(tokenizer, count=60, **guide):
    processor, rng = processor_of(tokenizer, **guide), np.random.default_rng(0)
    answers = [random_answer(processor, tokenizer, rng) for _ in range(count)]
    ended = [answer for answer in answers if answer is not None]
    assert len(ended) >= count / 2
    return ended


def encode_bytes(tokenizer, text):
    """Return one token for each byte: the spelling that no tokenizer would choose."""
    first = tokenizer.vocab_size
    ids = {tokenizer.token_bytes(n): n for n in reversed(range(first))}
    return [ids[bytes([byte])] for byte in text.encode()]


CHOICES = [" hi", "hi", "hi there 12", "é😀\n", '12"},\\/$', "<|end|>", "\0"]


@pytest.mark.parametrize("choices", [CHOICES, ["hi there, hi"]])
def test_exactly_the_tokens_are_allowed_that_some_choice_goes_on_with(
    tokenizer, choices
):
    processor = processor_of(tokenizer, guided_choice=choices)
    texts = [choice.encode() for choice in choices]
    ordinary = {
        token_id: tokenizer.token_bytes(token_id)
        for token_id in range(tokenizer.vocab_size)
        if token_id not in tokenizer.special_token_ids
    }
    to_do, seen = [[]], set()
    while to_do:
        output = to_do.pop()
        begun = b"".join(map(tokenizer.token_bytes, output))
        if begun in seen:  # the same text in other tokens
            continue
        seen.add(begun)
        expected = {
            token_id
            for token_id, data in ordinary.items()
            if any(text.startswith(begun + data) for text in texts)
        }
        to_do += [[*output, token_id] for token_id in expected]
        if begun in texts:
            expected |= tokenizer.eos_token_ids
        assert allowed_by(processor, output, tokenizer.vocab_size) == expected
    assert seen > set(texts)


def test_json_that_ends_satisfies_its_schema(tokenizer):
    for answer in random_answers(tokenizer, guided_json=PERSON):
        jsonschema.validate(json.loads(answer), PERSON)
        assert not re.search(r"\s\s|\n|^\s|\s$", re.sub(r'"[^"]*"', '""', answer))


@pytest.mark.parametrize("schema", [True, {}, "true", '{"type": "object"}'])
def test_any_json_may_be_asked_for(tokenizer, schema):
    processor = processor_of(tokenizer, guided_json=schema)
    output = []
    for token_id in encode_bytes(tokenizer, '{"a": [1, {"é": null}]}'):
        allowed = allowed_by(processor, output, tokenizer.vocab_size)
        assert token_id in allowed and not allowed & tokenizer.eos_token_ids
        output.append(token_id)
    allowed = allowed_by(processor, output, tokenizer.vocab_size)
    assert allowed == tokenizer.eos_token_ids


def accepts(tokenizer, text, **guide):
    """Whether a grammar allows all bytes of a text, one by one, and then an end."""
    processor, output = processor_of(tokenizer, **guide), []
    for token_id in encode_bytes(tokenizer, text):
        if token_id not in allowed_by(processor, output, tokenizer.vocab_size):
            return False
        output.append(token_id)
    allowed = allowed_by(processor, output, tokenizer.vocab_size)
    return tokenizer.eos_token_ids <= allowed


def test_json_has_one_space_at_most_unless_the_schema_says_otherwise(tokenizer):
    schema = {"const": {"a": [1, 2]}}
    flexible = schema | {"x-guidance": {"whitespace_flexible": True}}
    for text, is_strict in {
        '{"a":[1,2]}': True,
        '{"a": [1, 2]}': True,
        '{"a": [1,2]}': True,
        '{"a":  [1, 2]}': False,
        '{ "a": [1, 2]}': False,
        '{"a": [1,\n2]}': False,
    }.items():
        assert accepts(tokenizer, text, guided_json=schema) == is_strict, text
        assert accepts(tokenizer, text, guided_json=flexible), text


@pytest.mark.parametrize(
    "pattern", [r" ?hi( 12| a|,)*é?", r"(?i)ah{1,3}|\d{2}/\d", r"[^\x00-\x7f]{2}\n?"]
)
def test_text_that_ends_matches_its_regular_expression_fully(tokenizer, pattern):
    answers = random_answers(tokenizer, guided_regex=pattern)
    assert all(re.fullmatch(pattern, answer) for answer in answers)
    assert len(set(answers)) >= 10


def test_a_grammar_in_the_notation_of_lark_is_followed(tokenizer):
    lark = 'start: "(" start ")" | WORD\nWORD: /[a-c]+/'
    for answer in random_answers(tokenizer, guided_grammar=lark):
        depth = answer.count("(")
        assert re.fullmatch(rf"\({{{depth}}}[a-c]+\){{{depth}}}", answer)


def test_all_end_tokens_are_allowed_where_the_text_may_end_and_nowhere_else(tokenizer):
    processor = processor_of(tokenizer, guided_regex="a{2,3}")
    end, (a, *_) = tokenizer.eos_token_ids, encode_bytes(tokenizer, "a")
    assert len(end) == 2
    sets = [allowed_by(processor, [a] * n, tokenizer.vocab_size) for n in (0, 1, 2, 3)]
    assert [allowed & end for allowed in sets] == [set(), set(), end, end]
    assert a in sets[2] and sets[3] == end


def test_markup_is_never_text_even_where_any_text_may_stand(tokenizer):
    processor = processor_of(tokenizer, guided_regex=r"(?s:.)+")
    allowed = allowed_by(processor, [], tokenizer.vocab_size)
    assert not allowed & tokenizer.special_token_ids
    assert {*encode_bytes(tokenizer, "<")} <= allowed


def test_numpy_and_torch_rows_change_alike_and_keep_what_is_allowed(tokenizer):
    processor = processor_of(tokenizer, guided_json=PERSON)
    num_rows = tokenizer.vocab_size + 45  # a model may have more rows
    before = np.random.default_rng(1).normal(size=num_rows).astype(np.float32)
    forbidden = sorted(
        {*range(num_rows)} - allowed_by(processor, [], tokenizer.vocab_size)
    )
    before[forbidden[0]] = np.nan
    batch = torch.zeros(3, num_rows)
    batch[1] = torch.from_numpy(before)
    row = before.copy()
    assert processor([], row) is None
    assert processor([], batch[1]) is None
    expected = before.copy()
    expected[forbidden] = -np.inf
    assert 1 <= np.isfinite(expected).sum() < 10
    np.testing.assert_array_equal(row, expected)
    np.testing.assert_array_equal(batch[1].numpy(), expected)
    assert not batch[[0, 2]].any()


def test_a_row_in_half_precision_is_edited_too(tokenizer):
    processor = processor_of(tokenizer, guided_choice=["a"])
    row = torch.ones(tokenizer.vocab_size, dtype=torch.bfloat16)
    processor([], row)
    expected = allowed_by(processor, [], tokenizer.vocab_size)
    assert {*row.isfinite().nonzero().flatten().tolist()} == expected


def test_only_new_tokens_are_read_and_a_repeated_call_changes_nothing(tokenizer):
    processor = processor_of(tokenizer, guided_choice=["hi there"])
    output, read = encode_bytes(tokenizer, "hi there"), []

    class Recorder:
        def __init__(self, matcher):
            self.matcher = matcher

        def __getattr__(self, name):
            return getattr(self.matcher, name)

        def consume_tokens(self, token_ids):
            read.append(list(token_ids))
            return self.matcher.consume_tokens(token_ids)

    processor._matcher = Recorder(processor._matcher)
    sets = [
        allowed_by(processor, output[:n], tokenizer.vocab_size) for n in (2, 2, 5, 5)
    ]
    assert read == [output[:2], [], output[2:5], []]
    assert processor.num_consumed == 5
    assert (
        sets[0]
        == sets[1]
        == {*encode_bytes(tokenizer, " ")}
        | {
            n
            for n in range(tokenizer.vocab_size)
            if tokenizer.token_bytes(n) in (b" ", b" t")
        }
    )
    assert sets[2] == sets[3] != sets[0]


def test_an_answer_that_does_not_continue_the_last_one_starts_over(tokenizer):
    processor = processor_of(tokenizer, guided_choice=["hi a", "hb"])
    h, i, space, a, b = encode_bytes(tokenizer, "hi ab")
    outputs = [[h, i], [h], [], [h, b], [h, i, space], [h, i, space, a], [h, b]]
    for output in outputs:
        expected = allowed_by(processor.fresh(), output, tokenizer.vocab_size)
        assert allowed_by(processor, output, tokenizer.vocab_size) == expected
        assert processor.num_consumed == len(output)


def test_requests_with_one_tokenizer_do_not_disturb_each_other(tokenizer):
    first = processor_of(tokenizer, guided_choice=["ab"])
    second, other = first.fresh(), processor_of(tokenizer, guided_choice=["ha"])
    a, b, h = encode_bytes(tokenizer, "abh")
    rows = tokenizer.vocab_size
    assert b in allowed_by(first, [a], rows)
    assert a in allowed_by(second, [], rows)
    assert (first.num_consumed, second.num_consumed) == (1, 0)
    assert h in allowed_by(other, [], rows)
    assert a in allowed_by(other, [h], rows)
    assert b in allowed_by(second, [a], rows)
    assert allowed_by(first, [a, b], rows) == tokenizer.eos_token_ids


def test_the_caller_may_change_the_list_that_was_read(tokenizer):
    processor = processor_of(tokenizer, guided_choice=["ab", "hb"])
    a, h = encode_bytes(tokenizer, "ah")
    output = [a]
    before = allowed_by(processor, output, tokenizer.vocab_size)
    output[0] = h
    assert allowed_by(processor, output, tokenizer.vocab_size) == before
    assert processor._consumed == [h]


def test_an_answer_that_has_left_its_grammar_is_refused_and_never_ends(tokenizer):
    processor = processor_of(tokenizer, guided_regex="[0-9]{3}")
    one, a = encode_bytes(tokenizer, "1a")
    for _ in range(2):
        row = np.zeros(tokenizer.vocab_size, dtype=np.float32)
        with pytest.raises(RequestError, match="after 2 tokens") as caught:
            processor([one, a], row)
        assert str(caught.value).endswith("byte 'a' fails parse")
        assert not row.any()
    assert one in allowed_by(processor, [one], tokenizer.vocab_size)


def test_the_tree_of_tokens_is_built_once_and_goes_with_its_tokenizer(
    tmp_path, monkeypatch
):
    tokenizer = make_tokenizer("byte-level", tmp_path)
    built = []

    def build(vocabulary, **options):
        built.append(vocabulary)
        time.sleep(0.05)  # all threads are here before the first is done
        return original(vocabulary, **options)

    original = llguidance.LLTokenizer
    monkeypatch.setattr(llguidance, "LLTokenizer", build)
    gc.collect()
    num_before = len(grammar._ll_tokenizers)
    with ThreadPoolExecutor(8) as pool:
        params = [SamplingParams(guided_choice=[f"{n}"]) for n in range(8)]
        assert all(pool.map(make_grammar, params, [tokenizer] * 8))
    assert len(built) == 1
    assert len(grammar._ll_tokenizers) == num_before + 1
    del tokenizer
    gc.collect()
    assert len(grammar._ll_tokenizers) == num_before


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        ({"guided_json": {"type": "strin"}}, "Invalid type: strin"),
        ({"guided_json": False}, "Unsatisfiable schema"),
        ({"guided_json": {"type": "null", "enum": [3]}}, "Unsatisfiable schema"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"guided_json": {"x-guidance": 3}}, "invalid type: integer"),
        ({"guided_json": {"x-guidance": {"indent": 3}}}, "unknown field `indent`"),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_regex": "a(?=b)"}, "look-ahead"),
        ({"guided_regex": "\ud800"}, "whole characters"),
        ({"guided_grammar": "word: /a/"}, "no start rule"),
        ({"guided_grammar": "start: word"}, "unknown name"),
        ({"guided_choice": ["a", "\ud800"]}, "hex escape"),
        ({"guided_regex": r"[^\s\S]"}, "no token of this model may come next"),
        ({"guided_regex": r"a[^\s\S]"}, "no token of this model may come next"),
        ({"guided_grammar": 'start: start "a"'}, "no token of this model may come"),
    ],
)
def test_a_guide_that_cannot_be_followed_is_refused_with_the_reason(
    tokenizer, guide, reason
):
    (name,) = guide
    with pytest.raises(RequestError, match=rf"{name} is (.|\n)*{reason}"):
        processor_of(tokenizer, **guide)


def test_ten_thousand_choices_are_not_too_many(tokenizer):
    choices = [f"{n:05d}" for n in range(10_000)]
    processor = processor_of(tokenizer, guided_choice=choices)
    output = encode_bytes(tokenizer, "09999")
    digits = {*encode_bytes(tokenizer, "0123456789")}
    for place in range(1, 5):
        allowed = allowed_by(processor, output[:place], tokenizer.vocab_size)
        assert digits <= allowed
        assert b"".join(map(tokenizer.token_bytes, allowed)).isdigit()
    allowed = allowed_by(processor, output, tokenizer.vocab_size)
    assert allowed == tokenizer.eos_token_ids


def test_without_a_guide_there_is_nothing_to_do():
    assert make_grammar(SamplingParams(), None) is None


def test_a_guide_needs_a_tokenizer_with_an_end_token(tmp_path):
    params = SamplingParams(guided_choice=["a"])
    with pytest.raises(RequestError, match=r"guided_choice .* no tokenizer"):
        make_grammar(params, None)
    endless = load(byte_level("h i"), tmp_path)
    assert not endless.eos_token_ids
    with pytest.raises(RequestError, match="no end token"):
        make_grammar(params, endless)


def test_end_tokens_that_the_tokenizer_lacks_do_not_count(tmp_path):
    tokenizer = make_tokenizer("byte-level", tmp_path, end_ids=[5000])
    assert len(tokenizer.eos_token_ids) == 2
    processor = processor_of(tokenizer, guided_regex="a?")
    allowed = allowed_by(processor, [], tokenizer.vocab_size)
    assert allowed == {*encode_bytes(tokenizer, "a")} | tokenizer.eos_token_ids - {5000}


def test_an_end_token_that_is_no_markup_still_only_ends(tmp_path):
    line_break, a = 10, 97
    tokenizer = make_tokenizer("byte-level", tmp_path, end_ids=[line_break])
    processor = processor_of(tokenizer, guided_regex=r"a\n?|\nb")
    end = tokenizer.eos_token_ids
    assert line_break in end
    assert allowed_by(processor, [], tokenizer.vocab_size) == {a}
    assert allowed_by(processor, [a], tokenizer.vocab_size) == end


def test_without_the_package_the_error_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert make_grammar(SamplingParams(), tokenizer) is None
    with pytest.raises(BackendUnavailable, match=r"guided_regex .*minivllm\[grammar\]"):
        processor_of(tokenizer, guided_regex="a")


def test_rows_in_numpy_need_no_torch(tmp_path):
    make_tokenizer("byte-level", tmp_path)
    script = f"""
import sys
import numpy as np
from minivllm.sampling.grammar import make_grammar
from minivllm.sampling.params import SamplingParams
from minivllm.text.tokenizer import Tokenizer

tokenizer = Tokenizer.from_dir({str(tmp_path)!r})
logits = np.zeros(tokenizer.vocab_size, dtype=np.float32)
make_grammar(SamplingParams(guided_choice=["a"]), tokenizer)([], logits)
print(np.flatnonzero(logits == 0), "torch" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[97] False\n"


def test_fifty_of_fifty_answers_of_smollm2_are_json_that_satisfies_the_schema(
    smollm2_dir,
):
    from minivllm import LLM

    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "mood": {"enum": ["happy", "sad", "calm"]},
            "pets": {
                "type": "array",
                "items": {"enum": ["cat", "dog", "bird"]},
                "maxItems": 3,
            },
        },
        "required": ["name", "age", "mood", "pets"],
        "additionalProperties": False,
    }
    with LLM(smollm2_dir) as llm:
        prompt = llm.tokenizer.encode_chat(
            [{"role": "user", "content": "Invent a person, as JSON."}]
        )
        outputs = llm.generate(
            [prompt] * 50,
            [
                SamplingParams(
                    guided_json=schema, temperature=1.0, seed=seed, max_tokens=80
                )
                for seed in range(50)
            ],
        )
    answers = [output.outputs[0] for output in outputs]
    ended = [answer.text for answer in answers if answer.finish_reason == "stop"]
    assert len(ended) >= 45
    for text in ended:
        jsonschema.validate(json.loads(text), schema)
    assert len({json.loads(text)["name"] for text in ended}) >= 10
