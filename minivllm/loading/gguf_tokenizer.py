"""Rebuild a tokenizer from the metadata of a GGUF file.

A GGUF file holds the vocabulary, the merges or scores, and the name of a cutting
rule. Both kinds that Llama-type models use are rebuilt: `gpt2` (byte-level BPE) and
`llama` (SentencePiece BPE with scores).

Invariant: the ids are those of the tokenizer that the model was trained with. Called
by `minivllm.loading.gguf`.

In vLLM: not in vLLM itself; transformers does it (integrations/gguf).
Source: appendix A2, "Text".
"""

import json
from typing import Any

from minivllm.errors import ConfigError, CorruptFile
from minivllm.loading.gguf_vocabulary import (
    TokenType,
    ids_by_token,
    listed_merges,
    merges_from_scores,
    need,
    one_per_token,
    read_tokens,
    token_of,
)
from minivllm.loading.pre_tokenizers import PreTokenizer, pre_tokenizer

SPACE = "▁"  # U+2581, SentencePiece's visible space


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


def _byte_level(
    metadata: dict[str, Any], rule: PreTokenizer, tokens: list[str], types: list[int]
) -> dict[str, Any]:
    """Bytes -> printable characters, cut into words, merged inside each word."""
    vocabulary = ids_by_token(tokens, types)
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
            vocabulary,
            listed_merges(metadata, vocabulary),
            ignore_merges=rule.whole_words,
        ),
    }


def _with_visible_spaces(tokens: list[str], types: list[int]) -> list[str]:
    """Undo llama.cpp's converter, which writes user-defined runs of spaces plainly."""
    return [
        SPACE * len(token)
        if kind == TokenType.USER_DEFINED and token and not token.strip(" ")
        else token
        for token, kind in zip(tokens, types, strict=True)
    ]


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
    vocabulary = ids_by_token(tokens, types)
    to_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [to_mark]
    decoders = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if need(metadata, "tokenizer.ggml.add_space_prefix", bool, True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if "tokenizer.ggml.merges" in metadata:
        merges = listed_merges(metadata, vocabulary)
    else:
        key = "tokenizer.ggml.scores"
        scores = one_per_token(metadata, key, float, len(tokens))
        merges = merges_from_scores(vocabulary, types, scores)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            merges,
            unk_token=token_of(metadata, "unknown_token_id", tokens),
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
        "add_bos_token": need(metadata, "tokenizer.ggml.add_bos_token", bool, adds_bos),
        "add_eos_token": need(metadata, "tokenizer.ggml.add_eos_token", bool, False),
    }
    for name, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        config[name] = token_of(metadata, key, tokens)
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
    templates = {
        name.removeprefix(f"{key}.") if name != key else "default": need(
            metadata, name, str
        )
        for name in sorted(metadata)
        if name == key or name.startswith(f"{key}.")
    }
    if set(templates) <= {"default"}:
        return templates.get("default")
    return [{"name": n, "template": text} for n, text in templates.items()]


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
        CorruptFile: A key is missing or of a wrong type, or keys contradict each other.
    """
    kind = need(metadata, "tokenizer.ggml.model", str)
    if kind == "gpt2":
        rule = pre_tokenizer(need(metadata, "tokenizer.ggml.pre", str))
        tokens, types = read_tokens(metadata)
        parts = _byte_level(metadata, rule, tokens, types)
        adds_bos = rule.add_bos
    elif kind == "llama":
        metadata = _SENTENCEPIECE_IDS | metadata
        tokens, types = read_tokens(metadata)
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
