"""Tokenizers small enough to check by hand, as the metadata of a GGUF file.

Both read every text: the byte-level one has a token for each byte, the SentencePiece
one falls back to bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minivllm.loading.gguf_tokenizer import tokenizer_files
from minivllm.loading.gguf_vocabulary import TokenType
from minivllm.text.spelling import byte_alphabet
from minivllm.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_level(
    *merges: str,
    pre: str | None = "gpt-2",
    added: dict[str, TokenType] | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Return 0..255 = the bytes, then the results of the merges, then `added`."""
    letter_of = {byte: letter for letter, byte in byte_alphabet().items()}
    tokens = [letter_of[byte] for byte in range(256)]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [TokenType.NORMAL] * len(tokens)
    for token, kind in (added or {}).items():
        tokens.append(token)
        types.append(kind)
    metadata = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "merges": list(merges),
        **({} if pre is None else {"pre": pre}),
        **keys,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def sentencepiece(
    pieces: dict[str, float],
    added: dict[str, TokenType] | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Return 0 = <unk>, 1 = <s>, 2 = </s>, 3..258 = bytes, then pieces, `added`."""
    rows = [("<unk>", 0.0, TokenType.UNKNOWN)]
    rows += [(token, 0.0, TokenType.CONTROL) for token in ("<s>", "</s>")]
    rows += [(f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)]
    rows += [(piece, score, TokenType.NORMAL) for piece, score in pieces.items()]
    rows += [(token, -1000.0, kind) for token, kind in (added or {}).items()]
    metadata = {
        "model": "llama",
        "tokens": [token for token, _, _ in rows],
        "scores": [score for _, score, _ in rows],
        "token_type": [int(kind) for _, _, kind in rows],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **keys,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def load(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    """Rebuild the tokenizer of `metadata` in `folder` and read it from there."""
    for name, text in tokenizer_files(metadata).items():
        (folder / name).write_text(text, encoding="utf-8")
    return Tokenizer.from_dir(folder)
