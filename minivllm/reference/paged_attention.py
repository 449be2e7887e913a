"""Paged attention in NumPy: keys and values are read through a block table.

Twice: as a kernel would, one block after the other with an online softmax, and as the
NumPy engine does, gathering a request's blocks first. Both are `causal_attention` over
the same keys in another place.

The algorithm is PagedAttention (Kwon et al. 2023) with the online softmax of Milakov
and Gimelshein (2018), which FlashAttention (Dao et al. 2022) made famous.

In vLLM: vllm/_custom_ops.py (reshape_and_cache),
vllm/v1/attention/ops/triton_unified_attention.py (unified_attention).
Source: chapter 3, "Paging"; appendix A24, "Windows".
"""

from itertools import pairwise

import numpy as np

from minivllm.models.context import first_key_of
from minivllm.reference.attention import causal_attention


def reshape_and_cache(
    k: np.ndarray, v: np.ndarray, kv_cache: np.ndarray, slot_mapping: np.ndarray
) -> None:
    """Write keys and values of a flat batch into their slots.

    Args:
        k: [num_tokens, num_kv_heads, head_dim].
        v: Like k.
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim]; changed in place.
        slot_mapping: Slot of each token, -1 to skip it, [num_tokens] integers.
    """
    keys, values = kv_cache.reshape(2, -1, *kv_cache.shape[-2:])  # slots in a row
    assert np.shares_memory(keys, kv_cache), "the cache is no contiguous array"
    is_kept = slot_mapping >= 0
    keys[slot_mapping[is_kept]] = k[is_kept]
    values[slot_mapping[is_kept]] = v[is_kept]


def online_attention(
    q: np.ndarray,
    kv_cache: np.ndarray,
    block_ids: np.ndarray,
    num_tokens: int,
    scale: float,
) -> np.ndarray:
    """Attend with one query, one block at a time, keeping three running numbers.

    After any number of blocks, `mixed / total` is the attention over the keys seen so
    far; `top` is the largest score, so that no exponential overflows.

    Args:
        q: The query of the last token, [num_heads, head_dim].
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim].
        block_ids: The request's blocks in token order.
        num_tokens: Tokens in the cache.
        scale: Factor on the products.

    Returns:
        [num_heads, head_dim].
    """
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    group = len(q) // num_kv_heads
    top = np.full((len(q), 1), -np.inf, dtype=np.float32)
    total = np.zeros((len(q), 1), dtype=np.float32)
    mixed = np.zeros((len(q), head_dim), dtype=np.float32)
    for index, start in enumerate(range(0, num_tokens, block_size)):
        num_here = min(block_size, num_tokens - start)
        keys, values = kv_cache[:, block_ids[index], :num_here]
        keys, values = (x.repeat(group, axis=1) for x in (keys, values))
        scores = np.einsum("hd,thd->ht", q * np.float32(scale), keys)
        new_top = np.maximum(top, scores.max(axis=1, keepdims=True))
        shares = np.exp(scores - new_top)
        shrink = np.exp(top - new_top)  # earlier shares were relative to the old top
        total = total * shrink + shares.sum(axis=1, keepdims=True)
        mixed = mixed * shrink + np.einsum("ht,thd->hd", shares, values)
        top = new_top
    return mixed / total


def gather_blocks(
    kv_cache: np.ndarray, block_ids: np.ndarray, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Copy a request's keys and values out of its blocks, in token order.

    Args:
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim].
        block_ids: The request's blocks in token order; more may follow.
        num_tokens: Tokens in the cache.

    Returns:
        Keys and values, each [num_tokens, num_kv_heads, head_dim].
    """
    block_size = kv_cache.shape[2]
    used = block_ids[: -(-num_tokens // block_size)]
    keys, values = kv_cache[:, used].reshape(2, -1, *kv_cache.shape[-2:])
    return keys[:num_tokens], values[:num_tokens]


def paged_attention(
    q: np.ndarray,
    kv_cache: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_table: np.ndarray,
    scale: float,
    window: int | None = None,
) -> np.ndarray:
    """Attend for a flat batch, request by request.

    Args:
        q: [num_tokens, num_heads, head_dim]; a request's queries are its last tokens.
        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim].
        query_start_loc: First row of each request, then num_tokens, [num_reqs + 1].
        seq_lens: Tokens in the cache of each request, [num_reqs].
        block_table: [num_reqs, max_num_blocks].
        scale: Factor on the products.
        window: How many keys a query sees, its own the last; None for all.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    mixed = np.empty_like(q)
    block_size = kv_cache.shape[2]
    for index, (start, end) in enumerate(pairwise(query_start_loc)):
        first_key = first_key_of(seq_lens[index] - (end - start), window)
        first_block = first_key // block_size
        num_keys = seq_lens[index] - first_block * block_size
        block_ids = block_table[index, first_block:]
        keys, values = gather_blocks(kv_cache, block_ids, num_keys)
        mixed[start:end] = causal_attention(q[start:end], keys, values, scale, window)
    return mixed
