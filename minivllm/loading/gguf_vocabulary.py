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


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def need(
    metadata: dict[str, Any],
    key: str,
    kind: type,
    default: Any = None,
    *,
    of: type = object,
) -> Any:
    """Return a value after a look at its type, and at the entries' if it is a list.

    Raises:
        CorruptFile: It is of another type, or there is neither value nor default.
    """
    value = metadata.get(key, default)
    if value is None:
        raise CorruptFile(
            f"the GGUF file has no {key}, so its tokenizer cannot be "
            "rebuilt: convert the model again with a current llama.cpp, or load its "
            "Hugging Face folder"
        )
    if not _is(value, kind):
        raise _wrong(key, value, kind)
    if kind is list:
        for entry in value:
            if not _is(entry, of):
                raise _wrong(f"an entry of {key}", entry, of)
    return value


def _wrong(what: str, value: Any, kind: type) -> CorruptFile:
    return CorruptFile(
        f"{what} is {value!r:.80}, but must be of type {kind.__name__}: "
        "get the GGUF file again"
    )


def one_per_token(
    metadata: dict[str, Any], key: str, of: type, count: int, default: Any = None
) -> list[Any]:
    """Return a list that must have an entry for each of `count` tokens."""
    entries = need(metadata, key, list, default, of=of)
    if len(entries) != count:
        raise CorruptFile(
            f"{key} has {len(entries):,} entries for {count:,} tokens: "
            "get the GGUF file again"
        )
    return entries


def read_tokens(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Return the tokens and their types, both by token id."""
    tokens = need(metadata, "tokenizer.ggml.tokens", list, of=str)
    normal = [TokenType.NORMAL] * len(tokens)
    key = "tokenizer.ggml.token_type"
    return tokens, one_per_token(metadata, key, int, len(tokens), normal)


def token_of(metadata: dict[str, Any], key: str, tokens: list[str]) -> str | None:
    """Return the token whose id `tokenizer.ggml.<key>` gives; None without the key."""
    if f"tokenizer.ggml.{key}" not in metadata:
        return None
    token_id = need(metadata, f"tokenizer.ggml.{key}", int)
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


def listed_merges(
    metadata: dict[str, Any], vocabulary: dict[str, int]
) -> list[list[str]]:
    """Return the pairs of tokens that merge, the first one first."""
    listed = need(metadata, "tokenizer.ggml.merges", list, of=str)
    merges = [merge.split(" ") for merge in listed]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise CorruptFile(
                f"tokenizer.ggml.merges has the entry {' '.join(merge)!r:.80}, which "
                "is not two tokens that make a third, with a space between them: get "
                "the GGUF file again"
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
