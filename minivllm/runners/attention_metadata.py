"""Turn a step's plan into the flat arrays that a decoder and its context need.

All tokens of all requests of a step lie in one row, request after request, without
padding. Made once per step with NumPy, for every runner.

    request            A           B     C
    input_ids          a5 a6 a7    b9    c0 c1 c2 c3
    positions           5  6  7     9     0  1  2  3
    query_start_loc     0           3     4            8
    seq_lens                8          10          4
    logits_indices      2           3     7

In vLLM: vllm/v1/worker/gpu_model_runner.py (_prepare_inputs),
vllm/v1/attention/backend.py (CommonAttentionMetadata).
Source: chapter 3, "Paging"; appendix A5, "Records"; chapter 8, "Hybrid attention".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm.request import SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where the tokens of a step belong in the cache.

    Attributes:
        query_start_loc: First row of each request, and the number of rows,
            [num_reqs + 1] int32.
        seq_lens: Tokens that each request has in the cache after this step,
            [num_reqs] int32.
        block_table: Blocks of each request in token order, -1 where it has no more,
            [num_reqs, max_num_blocks] int32.
        slot_mapping: Where the keys and values of each token go,
            block_id * block_size + position % block_size, [num_tokens] int64.
        block_size: Slots in a block.
        window: The same for the layers with a window, if their blocks are apart; -1 is
            also in the place of blocks that were given back.
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    block_size: int

    window: "AttentionMetadata | None" = None


def pad_block_ids(block_ids: Sequence[Sequence[int]]) -> np.ndarray:
    """Write block ids as the rows of a table, [num_reqs, max_num_blocks] int32."""
    lengths = np.array([len(ids) for ids in block_ids])
    table = np.full((len(block_ids), lengths.max()), -1, dtype=np.int32)
    table[np.arange(lengths.max()) < lengths[:, None]] = np.concatenate(block_ids)
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The input of a decoder for one step.

    Attributes:
        input_ids: [num_tokens] int64.
        positions: Place of each token in its own text, [num_tokens] int64.
        attention: Where the tokens belong in the cache.
        logits_indices: Last row of each request that has caught up with its tokens,
            and so gets a new one, [num_sampled] int64.
        sampled: Index of these requests in the step, [num_sampled] int64.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    attention: AttentionMetadata
    logits_indices: np.ndarray
    sampled: np.ndarray


def make_batch(step: SchedulerOutput, block_size: int) -> Batch:
    """Lay out the tokens of a step in one row.

    Args:
        step: The plan, with at least one request.
        block_size: Slots in a block of the cache.
    """
    requests = step.requests
    num_new = np.array([step.num_scheduled_tokens[r.request_id] for r in requests])
    num_computed = np.array([r.num_computed_tokens for r in requests])
    seq_lens = num_computed + num_new
    query_start_loc = np.concatenate([[0], np.cumsum(num_new)])

    request_index = np.repeat(np.arange(len(requests)), num_new)
    offsets = num_computed - query_start_loc[:-1]
    positions = np.arange(query_start_loc[-1]) + offsets[request_index]
    token_ids: list[int] = []
    for request, start, end in zip(
        requests, num_computed.tolist(), seq_lens.tolist(), strict=True
    ):
        token_ids += request.token_ids[start:end]
    sampled = np.array([index for index, _ in step.sampled()], dtype=np.int64)

    def metadata(block_ids: dict[str, list[int]], **more: Any) -> AttentionMetadata:
        block_table = pad_block_ids([block_ids[r.request_id] for r in requests])
        blocks = block_table[request_index, positions // block_size].astype(np.int64)
        return AttentionMetadata(
            query_start_loc=query_start_loc.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_table=block_table,
            slot_mapping=blocks * block_size + positions % block_size,
            block_size=block_size,
            **more,
        )

    window = metadata(step.window_block_ids) if step.window_block_ids else None
    return Batch(
        input_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        attention=metadata(step.block_ids, window=window),
        logits_indices=query_start_loc[1:][sampled] - 1,
        sampled=sampled,
    )
