"""The rules that cut text into words, by the names that GGUF files call them.

Merges stay inside a word, so the rule decides which tokens a text can become. A
GGUF file only names its rule; the rule itself lives in the programs that read it.

Invariant: a rule that we do not know is refused, never replaced by another. Called by
`minivllm.loading.gguf_tokenizer`.

The table follows llama.cpp, src/llama-vocab.cpp.

Source: appendix A2, "Text".
"""

from dataclasses import dataclass

from minivllm.errors import ConfigError


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


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the rule that `tokenizer.ggml.pre` names, or raise ConfigError."""
    if name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"tokenizer.ggml.pre is {name!r}, but the known rules for cutting text "
            f"into words are {', '.join(PRE_TOKENIZERS)}: load this model from its "
            "Hugging Face folder, since another rule would give other token ids"
        )
    return PRE_TOKENIZERS[name]
