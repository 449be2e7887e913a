"""Read the tokens and merges of a GGUF file, checked.

Invariant: a token has one id, and every merge is of two tokens. Called by
`minivllm.loading.gguf_tokenizer`.

Source: appendix A2, "Text".
"""

from enum import IntEnum
from typing import Any

from minivllm.errors import CorruptFile


class TokenType(IntEnum):
    """What `tokenizer.ggml.token_type` says about a token (ggml's numbers)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def need(metadata: dict[str, Any], key: str) -> Any:
    """Return the value of `tokenizer.ggml.<key>`, or raise CorruptFile."""
    try:
        return metadata[f"tokenizer.ggml.{key}"]
    except KeyError:
        raise CorruptFile(
            f"the GGUF file has no tokenizer.ggml.{key}, so its tokenizer cannot be "
            "rebuilt: convert the model again with a current llama.cpp, or load its "
            "Hugging Face folder"
        ) from None


def read_tokens(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Return the tokens and their types, both by token id."""
    tokens = list(need(metadata, "tokens"))
    types = list(
        metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    )
    if len(types) != len(tokens):
        raise CorruptFile(
            f"tokenizer.ggml.token_type has {len(types):,} entries for "
            f"{len(tokens):,} tokens: get the GGUF file again"
        )
    return tokens, types


def token_of(metadata: dict[str, Any], key: str, tokens: list[str]) -> str | None:
    """Return the token whose id `tokenizer.ggml.<key>` gives; None without the key."""
    token_id = metadata.get(f"tokenizer.ggml.{key}")
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise CorruptFile(
            f"tokenizer.ggml.{key} is {token_id:,}, but the file has only "
            f"{len(tokens):,} tokens: get the GGUF file again"
        )
    return tokens[token_id]


def ids_by_token(tokens: list[str], types: list[int]) -> dict[str, int]:
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


def listed_merges(metadata: dict[str, Any]) -> list[list[str]]:
    """Return the pairs of tokens that merge, the first one first."""
    merges = [merge.split(" ") for merge in need(metadata, "merges")]
    for merge in merges:
        if len(merge) != 2:
            raise CorruptFile(
                f"tokenizer.ggml.merges has the entry {' '.join(merge)!r}, which is "
                "not two tokens and a space between them: get the GGUF file again"
            )
    return merges


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
