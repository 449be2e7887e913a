"""How much memory keys and values take.

In vLLM: vllm/v1/kv_cache_interface.py (AttentionSpec).
Source: chapter 2, "The KV cache".
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
