"""Rebuild a tokenizer from the metadata of a GGUF file.

A GGUF file holds the vocabulary, the merges or scores, and a *name* for the rule
that cuts text into words; the rule itself lives in the programs that read the
file. Both kinds that Llama-type models use are rebuilt: `gpt2` (byte-level BPE)
and `llama` (SentencePiece BPE with scores).

Invariant: the ids are those of the tokenizer that the model was trained with. A
file that names a rule we do not know is refused, never read with another rule.
Called by `minivllm.loading.gguf`.

In vLLM: transformers' integrations/gguf does this; the rules of the table
`PRE_TOKENIZERS` are those of llama.cpp, src/llama-vocab.cpp.
Source: appendix A2, "Text".
"""

import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from minivllm.errors import ConfigError, CorruptFile

SPACE = "▁"  # U+2581, SentencePiece's visible space


class TokenType(IntEnum):
    """What `tokenizer.ggml.token_type` says about a token (ggml's numbers)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """The rule that cuts text into words before byte-level BPE merges inside them."""

    splits: tuple[str, ...]  # each cuts the pieces that the one before it left
    compose: bool = False  # Unicode NFC first
    whole_words: bool = False  # a word that is a token stays whole, merges or not
    add_bos: bool = False  # when the file does not say


_GPT2_WORDS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_WORDS = (
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _PUNCTUATION_AND_SPACE
)
_LLAMA3_WORDS = (
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _PUNCTUATION_AND_SPACE
)
_QWEN35_WORDS = (
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = PreTokenizer(splits=(_GPT2_WORDS,))
_DIGITS = PreTokenizer(splits=(r"\p{N}", _GPT2_WORDS))
_LLAMA3 = PreTokenizer(splits=(_LLAMA3_WORDS,), whole_words=True, add_bos=True)

# tokenizer.ggml.pre -> rule
PRE_TOKENIZERS = {
    "default": PreTokenizer(
        splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
    ),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": PreTokenizer(splits=(_QWEN2_WORDS,), compose=True),
    "deepseek-r1-qwen": PreTokenizer(splits=(_QWEN2_WORDS,)),
    "qwen35": PreTokenizer(splits=(_QWEN35_WORDS,), compose=True),
    "tekken": PreTokenizer(splits=(_TEKKEN_WORDS,), whole_words=True, add_bos=True),
}


def _need(metadata: dict[str, Any], key: str) -> Any:
    try:
        return metadata[f"tokenizer.ggml.{key}"]
    except KeyError:
        raise CorruptFile(
            f"the GGUF file has no tokenizer.ggml.{key}, so its tokenizer cannot be "
            "rebuilt: convert the model again with a current llama.cpp, or load its "
            "Hugging Face folder"
        ) from None


def _pre_tokenizer(metadata: dict[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"tokenizer.ggml.pre is {name!r}, but the known rules for cutting text "
            f"into words are {', '.join(PRE_TOKENIZERS)}: load this model from its "
            "Hugging Face folder, since another rule would give other token ids"
        )
    return PRE_TOKENIZERS[name]


def _read_tokens(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    tokens = list(_need(metadata, "tokens"))
    types = list(
        metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    )
    if len(types) != len(tokens):
        raise CorruptFile(
            f"tokenizer.ggml.token_type has {len(types):,} entries for "
            f"{len(tokens):,} tokens: get the GGUF file again"
        )
    return tokens, types


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Return token -> id without the unused rows, which no text may become."""
    vocabulary: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == TokenType.UNUSED:
            continue
        if token in vocabulary:
            raise CorruptFile(
                f"token {token!r} stands twice in tokenizer.ggml.tokens, as "
                f"{vocabulary[token]} and {token_id}: get the GGUF file again"
            )
        vocabulary[token] = token_id
    return vocabulary


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """List the tokens that are found in the raw text, before anything is cut."""
    whole = {TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED}
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != TokenType.USER_DEFINED,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in whole
    ]


def _bpe(vocabulary: dict[str, int], merges: list[list[str]], **options: Any) -> dict:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary,
        "merges": merges,
    }


def _listed_merges(metadata: dict[str, Any]) -> list[list[str]]:
    merges = [merge.split(" ") for merge in _need(metadata, "merges")]
    for merge in merges:
        if len(merge) != 2:
            raise CorruptFile(
                f"tokenizer.ggml.merges has the entry {' '.join(merge)!r}, which is "
                "not two tokens and a space between them: get the GGUF file again"
            )
    return merges


def _byte_level(
    metadata: dict[str, Any], rule: PreTokenizer, tokens: list[str], types: list[int]
) -> dict[str, Any]:
    """Bytes -> printable characters, cut into words, merged inside each word."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    splits = [
        {
            "type": "Split",
            "pattern": {"Regex": regex},
            "behavior": "Isolated",
            "invert": False,
        }
        for regex in rule.splits
    ]
    return {
        "normalizer": {"type": "NFC"} if rule.compose else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": _bpe(
            _vocabulary(tokens, types),
            _listed_merges(metadata),
            ignore_merges=rule.whole_words,
        ),
    }


def merges_from_scores(
    vocabulary: dict[str, int], types: list[int], scores: list[float]
) -> list[list[str]]:
    """Recover the list of BPE merges that SentencePiece expresses as scores.

    SentencePiece merges the two neighbours whose union has the best score. So every
    way to cut a token into two tokens is a merge, and the score of the whole is its
    rank. Ties are broken as `transformers` does, which made the `tokenizer.json` of
    the models on the Hub: longer halves first, then vocabulary order.
    """
    parts = {
        token: token_id
        for token, token_id in vocabulary.items()
        if types[token_id] in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    ranked = []
    for token, token_id in parts.items():
        # A user-defined token is never left in pieces, whatever its score says.
        user_defined = types[token_id] == TokenType.USER_DEFINED
        score = float("inf") if user_defined else scores[token_id]
        cuts = [(token[:n], token[n:]) for n in range(1, len(token))]
        ranked += [
            (score, len(left), len(right), left, right)
            for left, right in cuts
            if left in parts and right in parts
        ]
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in ranked]


def _with_visible_spaces(tokens: list[str], types: list[int]) -> list[str]:
    """Undo llama.cpp's converter, which writes user-defined runs of spaces plainly."""
    return [
        SPACE * len(token)
        if kind == TokenType.USER_DEFINED and token and not token.strip(" ")
        else token
        for token, kind in zip(tokens, types, strict=True)
    ]


def _token_of(metadata: dict[str, Any], key: str, tokens: list[str]) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{key}")
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise CorruptFile(
            f"tokenizer.ggml.{key} is {token_id:,}, but the file has only "
            f"{len(tokens):,} tokens: get the GGUF file again"
        )
    return tokens[token_id]


# The ids that SentencePiece gives by itself, for files that do not name them.
_SENTENCEPIECE_IDS = {
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def _sentencepiece(
    metadata: dict[str, Any], tokens: list[str], types: list[int]
) -> dict[str, Any]:
    """Spaces made visible, merges over the whole text, bytes for what is left."""
    vocabulary = _vocabulary(tokens, types)
    to_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [to_mark]
    decoders = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if "tokenizer.ggml.merges" in metadata:
        merges = _listed_merges(metadata)
    else:
        merges = merges_from_scores(vocabulary, types, _need(metadata, "scores"))
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            merges,
            unk_token=_token_of(metadata, "unknown_token_id", tokens),
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        ),
    }


def _tokenizer_config(
    metadata: dict[str, Any], tokens: list[str], adds_bos: bool
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for name, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        config[name] = _token_of(metadata, key, tokens)
    for name in ("bos", "eos"):
        if config[f"add_{name}_token"] and config[f"{name}_token"] is None:
            raise CorruptFile(
                f"every text should get a {name.upper()} token, but the file has no "
                f"tokenizer.ggml.{name}_token_id: get the GGUF file again"
            )
    template = _chat_template(metadata)
    if template is not None:
        config["chat_template"] = template
    return config


def _chat_template(metadata: dict[str, Any]) -> str | list[dict[str, str]] | None:
    """Return one template, or the list of named ones where the file has several."""
    key = "tokenizer.chat_template"
    default = metadata.get(key)
    names = [name for name in metadata if name.startswith(f"{key}.")]
    if not names:
        return default
    named = [
        {"name": n.removeprefix(f"{key}."), "template": metadata[n]} for n in names
    ]
    if default is not None:
        named.insert(0, {"name": "default", "template": default})
    return named


def _post_processor(config: dict[str, Any], tokens: list[str]) -> dict | None:
    """Put BOS before and EOS behind a text, where the flags say so."""
    before = [config["bos_token"]] if config["add_bos_token"] else []
    after = [config["eos_token"]] if config["add_eos_token"] else []
    if not before and not after:
        return None

    def pieces(sequence: str, type_id: int) -> list[dict[str, Any]]:
        def special(token: str) -> dict[str, Any]:
            return {"SpecialToken": {"id": token, "type_id": type_id}}

        text = {"Sequence": {"id": sequence, "type_id": type_id}}
        return [*map(special, before), text, *map(special, after)]

    return {
        "type": "TemplateProcessing",
        "single": pieces("A", 0),
        "pair": pieces("A", 0) + pieces("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
            for token in before + after
        },
    }


def tokenizer_files(metadata: dict[str, Any]) -> dict[str, str]:
    """Return the texts of `tokenizer.json` and `tokenizer_config.json`.

    Args:
        metadata: The keys and values of a GGUF file, as plain Python values.

    Returns:
        File name -> contents.

    Raises:
        ConfigError: The file's kind of tokenizer or cutting rule is not known.
        CorruptFile: A key is missing, or keys contradict each other.
    """
    kind = _need(metadata, "model")
    if kind == "gpt2":
        rule = _pre_tokenizer(metadata)
        tokens, types = _read_tokens(metadata)
        parts = _byte_level(metadata, rule, tokens, types)
        adds_bos = rule.add_bos
    elif kind == "llama":
        metadata = _SENTENCEPIECE_IDS | metadata
        tokens, types = _read_tokens(metadata)
        tokens = _with_visible_spaces(tokens, types)
        parts = _sentencepiece(metadata, tokens, types)
        adds_bos = True
    else:
        raise ConfigError(
            f"tokenizer.ggml.model is {kind!r}, but only 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece BPE) can be rebuilt from a GGUF file: "
            "load this model from its Hugging Face folder instead"
        )
    config = _tokenizer_config(metadata, tokens, adds_bos)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        **parts,
        "post_processor": _post_processor(config, tokens),
    }
    return {
        "tokenizer.json": json.dumps(document, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2),
    }
