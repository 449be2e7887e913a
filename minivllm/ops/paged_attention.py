"""The ops `paged_attention` and `prefill_attention`: queries look at keys in blocks.

An implementation is made once per step for pieces of a batch, and called in each layer:
one for pieces of a single query, and one for those of several. The reference of both
pads the keys of its pieces, other backends do not.

In vLLM: vllm/v1/attention/backends/cpu_attn.py (CPUAttentionBackendImpl).
Source: appendix A6, "The torch runner".
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
        self.num_pieces, self.num_queries = positions.shape
        num_blocks, block_size = kv_cache.shape[1:3]
        # Rows of [2 * num_blocks, ...]: the keys of all blocks, then their values.
        keys_of = block_table.flatten()
        self.blocks = torch.cat([keys_of, keys_of + num_blocks])
        keys = torch.arange(block_table.shape[1] * block_size, device=rows.device)
        is_hidden = keys > positions.unsqueeze(-1)  # [pieces, queries, keys]
        mask = torch.zeros(is_hidden.shape, dtype=kv_cache.dtype, device=rows.device)
        mask.masked_fill_(is_hidden, -torch.inf)
        if self.num_queries > 1:  # a single row serves all heads as it is
            mask = mask.repeat_interleave(group_size, dim=1)
        self.mask = mask.unsqueeze(1)

    def attend(self, q: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        """Attend to keys in the cache of a layer.

        The query heads that share a key head are given as further queries of that one
        head, so that its keys need not be repeated.

        Args:
            q: All queries of the batch, [num_tokens, num_heads, head_dim].
            kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim].
            scale: Of the scores.

        Returns:
            The queries of the pieces in their order, like q.
        """
        _, num_heads, head_dim = q.shape
        num_kv_heads = kv_cache.shape[-2]
        by_group = (self.num_pieces, self.num_queries, num_kv_heads, -1, head_dim)
        q = q.index_select(0, self.rows).view(by_group).transpose(1, 2).flatten(2, 3)
        # One row per block: a plain copy of rows is several times faster than a
        # selection along an inner axis.
        kv = kv_cache.flatten(0, 1).flatten(1).index_select(0, self.blocks)
        kv = kv.view(2, self.num_pieces, -1, num_kv_heads, head_dim).transpose(2, 3)
        k, v = kv.unbind()
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, scale=scale
        )
        by_query = (self.num_pieces, num_kv_heads, self.num_queries, -1, head_dim)
        mixed = mixed.view(by_query).transpose(1, 2)
        return mixed.reshape(-1, num_heads, head_dim)


# One query a piece, and many.
define_op("paged_attention", [Backend("torch", PaddedAttention)])
define_op("prefill_attention", [Backend("torch", PaddedAttention)])
