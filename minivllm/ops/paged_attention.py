"""The ops `paged_attention` and `prefill_attention`: queries look at keys in blocks.

An implementation is made once per step for pieces of a batch, and called in each layer:
one for pieces of a single query, and one for those of several. The reference of both
pads the keys of its pieces, other backends do not.

In vLLM: vllm/v1/attention/backends/cpu_attn.py (CPUAttentionBackendImpl).
Source: appendix A6, "The torch runner"; appendix A24, "Windows".
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.registry import Backend, define_op


class PaddedAttention:
    """The reference: blocks are gathered, and what a query must not see is masked."""

    def __init__(
        self,
        rows: Tensor,
        positions: Tensor,
        block_table: Tensor,
        kv_cache: Tensor,
        group_size: int,
    ) -> None:
        """Prepare what all layers share.

        Args:
            rows: Row of each query in the batch, [num_pieces, num_queries] int64.
            positions: Last key that each query sees, like rows.
            block_table: [num_pieces, num_blocks] int64.
            kv_cache: Of any layer, [2, num_blocks, block_size, num_kv_heads, head_dim].
            group_size: Query heads that share a key head.
        """
        self.rows = rows.flatten()
        self.positions = positions
        self.num_pieces, self.num_queries = positions.shape
        self.block_table = block_table
        self.num_blocks, self.block_size = kv_cache.shape[1:3]
        self.dtype = kv_cache.dtype
        self.group_size = group_size
        # By window: which blocks are gathered, and what of them is masked.
        self.views: dict[int | None, tuple[Tensor, Tensor]] = {}

    def view(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return what a window shows, made when a layer first asks for it.

        Returns:
            Blocks of the keys of all pieces, then of their values, [2 * num_pieces *
            num_seen]; zeros and -inf to add to the scores, [num_pieces, 1,
            num_queries, or as many times group_size, num_seen * block_size].
        """
        if window not in self.views:
            self.views[window] = self.make_view(window)
        return self.views[window]

    def make_view(self, window: int | None) -> tuple[Tensor, Tensor]:
        """As `view`."""
        device, width = self.positions.device, self.block_table.shape[1]
        first_block = torch.zeros(self.num_pieces, 1, dtype=torch.int64, device=device)
        num_seen = width
        if window is not None:
            first_keys = self.positions.narrow(1, 0, 1) - (window - 1)
            first_block = first_keys.clamp(min=0) // self.block_size
            # From any place in a block on, so many keys lie in so many blocks at most.
            num_keys = window + self.num_queries - 1
            num_seen = min(
                width, (num_keys + self.block_size - 2) // self.block_size + 1
            )
        columns = first_block + torch.arange(num_seen, device=device)
        # Behind the last column there is nothing that a query sees: any block will do.
        blocks = self.block_table.gather(1, columns.clamp(max=width - 1)).flatten()
        keys = columns.unsqueeze(-1) * self.block_size
        keys = (keys + torch.arange(self.block_size, device=device)).flatten(1)
        # [pieces, queries, keys]
        distances = self.positions.unsqueeze(-1) - keys.unsqueeze(1)
        is_hidden = distances < 0
        if window is not None:
            is_hidden |= distances >= window
        mask = torch.zeros(is_hidden.shape, dtype=self.dtype, device=device)
        mask.masked_fill_(is_hidden, -torch.inf)
        if self.num_queries > 1:  # a single row serves all heads as it is
            mask = mask.repeat_interleave(self.group_size, dim=1)
        # Rows of [2 * num_blocks, ...]: the keys of all blocks, then their values.
        return torch.cat([blocks, blocks + self.num_blocks]), mask.unsqueeze(1)

    def attend(
        self, q: Tensor, kv_cache: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Attend to keys in the cache of a layer.

        The query heads that share a key head are given as further queries of that one
        head, so that its keys need not be repeated.

        Args:
            q: All queries of the batch, [num_tokens, num_heads, head_dim].
            kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim].
            scale: Of the scores.
            window: How many keys a query sees, its own the last; None for all.

        Returns:
            The queries of the pieces in their order, like q.
        """
        _, num_heads, head_dim = q.shape
        num_kv_heads = kv_cache.shape[-2]
        blocks, mask = self.view(window)
        by_group = (self.num_pieces, self.num_queries, num_kv_heads, -1, head_dim)
        q = q.index_select(0, self.rows).view(by_group).transpose(1, 2).flatten(2, 3)
        # One row per block: a plain copy of rows is several times faster than a
        # selection along an inner axis.
        kv = kv_cache.flatten(0, 1).flatten(1).index_select(0, blocks)
        kv = kv.view(2, self.num_pieces, -1, num_kv_heads, head_dim).transpose(2, 3)
        k, v = kv.unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        by_query = (self.num_pieces, num_kv_heads, self.num_queries, -1, head_dim)
        mixed = mixed.view(by_query).transpose(1, 2)
        return mixed.reshape(-1, num_heads, head_dim)


# One query a piece, and many.
define_op("paged_attention", [Backend("torch", PaddedAttention)])
define_op("prefill_attention", [Backend("torch", PaddedAttention)])
