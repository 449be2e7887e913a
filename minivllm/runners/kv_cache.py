"""How much memory keys and values take.

In vLLM: vllm/v1/kv_cache_interface.py (AttentionSpec).
Source: chapter 2, "The KV cache"; chapter 3, "Paging".
"""

from minivllm.models.spec import ModelSpec


def kv_bytes_per_token(spec: ModelSpec, bytes_per_element: int) -> int:
    """Return the bytes that one token occupies in the caches of all layers.

    Args:
        spec: Whose layers, key heads and head size count.
        bytes_per_element: 4 for float32, 2 for bfloat16.
    """
    kv_size = spec.num_kv_heads * spec.head_dim
    return 2 * spec.num_layers * kv_size * bytes_per_element


def num_blocks_for(
    memory_bytes: int, spec: ModelSpec, block_size: int, bytes_per_element: int
) -> int:
    """Return how many whole blocks fit into so much memory, possibly none."""
    return memory_bytes // (block_size * kv_bytes_per_token(spec, bytes_per_element))
