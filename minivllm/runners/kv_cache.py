"""How much memory keys, values and states take, and how a budget is shared out.

In vLLM: vllm/v1/kv_cache_interface.py (AttentionSpec, MambaSpec).
Source: chapter 2, "The KV cache"; chapter 3, "Paging"; chapter 8, "Hybrid attention".
"""

from dataclasses import dataclass

from minivllm.models.spec import ModelSpec
from minivllm.runners.base import CacheLayout

DEFAULT_NUM_STATES = 64
KEPT_SHARE = 0.125  # of the budget, at most, for states at the edges of blocks
STATES_SHARE = 0.5  # at most, for those of running requests


def cache_places(spec: ModelSpec, is_apart: bool) -> dict[int, tuple[bool, int]]:
    """Tell where the keys and values of each layer are.

    Args:
        spec: The model.
        is_apart: Whether layers with a window have a cache of their own.

    Returns:
        For each layer that attends, whether it is in that cache, and its index there.
    """
    windows = spec.window_layers if is_apart else ()
    apart = {layer: (True, i) for i, layer in enumerate(windows)}
    others = [x for x in (*spec.full_layers, *spec.window_layers) if x not in apart]
    return apart | {layer: (False, i) for i, layer in enumerate(sorted(others))}


def plain_layout(spec: ModelSpec) -> CacheLayout:
    """Return what a model cannot do without beside blocks: states, if it has any."""
    return CacheLayout(num_states=DEFAULT_NUM_STATES if spec.delta_net else 0)


def state_bytes(spec: ModelSpec, bytes_per_element: int) -> int:
    """Return the bytes of a request's states in all layers, whatever its length.

    Args:
        spec: Whose delta nets count.
        bytes_per_element: Of what the convolution keeps; the matrices are float32.
    """
    net = spec.delta_net
    if net is None:
        return 0
    conv, kept = net.conv_state_shape
    heads, rows, columns = net.state_shape
    per_layer = conv * kept * bytes_per_element + heads * rows * columns * 4
    return len(net.layers) * per_layer


def kv_bytes_per_token(spec: ModelSpec, bytes_per_element: int) -> int:
    """Return the bytes that one token occupies in the caches of all layers.

    Args:
        spec: Whose layers that attend, key heads and head size count.
        bytes_per_element: 4 for float32, 2 for bfloat16.
    """
    num_layers = len(spec.full_layers) + len(spec.window_layers)
    return 2 * num_layers * spec.num_kv_heads * spec.head_dim * bytes_per_element


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """What decides how much of the caches can be in use at once.

    Attributes:
        block_size: Token slots in a block.
        max_num_seqs: Requests in a step at most.
        max_num_batched_tokens: Tokens in a step at most.
        max_model_len: Tokens of a request at most.
    """

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def max_window_blocks(self, window: int) -> int:
        """Return how many blocks windows of that size need, whatever happens."""
        # Of each request the window, which may begin and end within a block; and in
        # one step all tokens of the step.
        of_a_window = -(-window // self.block_size) + 1
        of_a_step = -(-self.max_num_batched_tokens // self.block_size)
        return self.max_num_seqs * (of_a_window + 1) + of_a_step

    @property
    def blocks_of_text(self) -> int:
        """How many blocks a request needs that is as long as can be."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_full_blocks(self) -> int:
        """How many blocks all requests need if each is as long as can be."""
        return self.max_num_seqs * self.blocks_of_text


def share_out(
    spec: ModelSpec, memory_bytes: int, bytes_per_element: int, limits: CacheLimits
) -> tuple[int, CacheLayout]:
    """Share out a budget among blocks of all tokens, blocks of windows, and states.

    Args:
        spec: The model.
        memory_bytes: The budget.
        bytes_per_element: Of keys and values.
        limits: Of the engine.

    Returns:
        Blocks of all tokens, possibly none, and what there is beside them.
    """
    num_states = num_kept = 0
    if state := state_bytes(spec, bytes_per_element):
        num_states = int(memory_bytes * STATES_SHARE) // state
        num_states = max(1, min(limits.max_num_seqs, num_states))
        num_kept = min(4 * num_states, int(memory_bytes * KEPT_SHARE) // state)
        memory_bytes -= (num_states + num_kept) * state
        if memory_bytes < 0:  # not even one
            return 0, CacheLayout(num_states=1)
    states = {"num_states": num_states, "num_kept_states": num_kept}
    kv_size = 2 * spec.num_kv_heads * spec.head_dim * bytes_per_element
    kv_size *= limits.block_size
    full, apart = (
        len(layers) * kv_size for layers in (spec.full_layers, spec.window_layers)
    )
    window = spec.max_window
    if window is None:
        # Without a layer that attends, a block is a number only, and takes nothing.
        num_texts = num_states + num_kept
        num_blocks = memory_bytes // full if full else num_texts * limits.blocks_of_text
        return max(0, num_blocks), CacheLayout(**states)
    num_windows = limits.max_window_blocks(window)
    num_blocks = memory_bytes // (full + apart)
    if num_blocks >= num_windows:  # the rest of the memory is for the other layers
        num_blocks = limits.max_full_blocks
        if full:
            num_blocks = (memory_bytes - num_windows * apart) // full
    num_windows = min(num_windows, num_blocks)
    if num_windows < 1:
        return 0, CacheLayout(**states)
    return num_blocks, CacheLayout(
        window=window, num_window_blocks=num_windows, **states
    )


def layout_for(spec: ModelSpec, num_blocks: int, limits: CacheLimits) -> CacheLayout:
    """Return what belongs to a number of blocks that somebody has chosen."""
    states = {}
    if spec.delta_net is not None:
        num_states = limits.max_num_seqs
        states = {"num_states": num_states, "num_kept_states": num_states}
    window = spec.max_window
    if window is None:
        return CacheLayout(**states)
    num_windows = min(num_blocks, limits.max_window_blocks(window))
    return CacheLayout(window=window, num_window_blocks=num_windows, **states)


def num_blocks_for(
    memory_bytes: int, spec: ModelSpec, block_size: int, bytes_per_element: int
) -> int:
    """Return how many whole blocks of all layers fit into so much memory.

    A model without a layer that attends keeps nothing in a block: one byte is counted.
    """
    block_bytes = block_size * kv_bytes_per_token(spec, bytes_per_element)
    return memory_bytes // max(1, block_bytes)
