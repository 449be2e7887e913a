"""Sort the queries of a step into a few groups that torch can attend in one call each.

A step mixes answers (one query each), fresh prompts and later chunks of prompts, all
of different lengths. One call per request would spend its time on starting calls, and
one call for all would compute mostly padding. So the queries are cut into *pieces* of
neighbouring tokens, and pieces of similar size share a call:

    fresh    pieces that begin their text: their keys are all in this step
    cached   pieces with older keys, read from the cache through the block table

A kernel that needs no padding takes all pieces of similar length at once, and the
beginnings of texts from the cache, too (`max_ragged`).

Numbers only, made once per step with NumPy and shared by all layers.

In vLLM: vllm/v1/attention/backends/utils.py (split_decodes_and_prefills); its kernels
take ragged batches and need no groups.
Source: appendix A6, "The torch runner"; appendix A28, "Delta nets in torch".
"""

from dataclasses import dataclass

import numpy as np

from minivllm.runners.attention_metadata import AttentionMetadata

# Queries of a piece that reads from the cache: bounds the mask to pieces * this * keys.
MAX_QUERIES = 256
# Keys that a group may be padded by, where a call more costs as much.
MAX_PADDED_KEYS = 2048
# Keys that a group gathers in all, unless a single piece needs more.
MAX_KEYS = 65_536
# Queries of a fresh piece that share a call; more are worth a call of their own.
MAX_SHARED_QUERIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Pieces that attend in one call, padded to the longest.

    Attributes:
        rows: Row of each query in the flat batch; a shorter piece repeats its last
            one, [num_pieces, num_queries] int64.
        positions: Last key that each query sees, like rows.
        block_table: Blocks of the pieces, padded with their own first one,
            [num_pieces, num_blocks] int64; no columns for fresh pieces.
        window_block_table: The same for the layers with a window, if their blocks are
            apart; a block of the piece is also in the place of those given back.
    """

    rows: np.ndarray
    positions: np.ndarray
    block_table: np.ndarray

    window_block_table: np.ndarray | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the pieces begin their text."""
        return self.block_table.shape[1] == 0


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of neighbouring queries; arrays of the same length, int64.

    Attributes:
        request: Index in the step.
        start: Row of the first query in the flat batch.
        length: Queries.
        num_keys: Keys that the last query sees.
        is_fresh: Whether the first query sees only itself, and the request goes on
            in no other piece.
    """

    request: np.ndarray
    start: np.ndarray
    length: np.ndarray
    num_keys: np.ndarray
    is_fresh: np.ndarray


def cut_queries(metadata: AttentionMetadata, max_ragged: int) -> Pieces:
    """Cut every request with older keys into pieces of at most MAX_QUERIES.

    If these need no padding, the beginnings of texts are read from the cache, too.
    """
    start = metadata.query_start_loc[:-1].astype(np.int64)
    length = np.diff(metadata.query_start_loc).astype(np.int64)
    num_keys = metadata.seq_lens.astype(np.int64)
    is_fresh = (length == num_keys) & (max_ragged < MAX_QUERIES)
    num_pieces = np.where(is_fresh, 1, -(-length // MAX_QUERIES))
    request = np.repeat(np.arange(len(length)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    offset = (np.arange(len(request)) - first_piece[request]) * MAX_QUERIES
    left = length[request] - offset
    piece = np.where(is_fresh[request], left, np.minimum(left, MAX_QUERIES))
    return Pieces(
        request=request,
        start=start[request] + offset,
        length=piece,
        num_keys=num_keys[request] - left + piece,
        is_fresh=is_fresh[request],
    )


def similar_pieces(pieces: Pieces, max_ragged: int) -> list[np.ndarray]:
    """Divide the pieces, by index, into groups that waste little on padding."""
    # Lengths 1, 2 to 4, 5 to 16, 17 to 64, ...; fresh and cached ones apart.
    kinds = 2 * np.ceil(np.log2(pieces.length) / 2).astype(np.int64) + pieces.is_fresh
    is_free = ~pieces.is_fresh & (pieces.length <= max_ragged)  # no padding to bound
    is_alone = pieces.is_fresh & (pieces.length > MAX_SHARED_QUERIES)
    order = np.lexsort((-pieces.num_keys, kinds))  # most keys first
    groups: list[list[int]] = []
    group: list[int] = []
    kind, most_keys, padding = -1, 0, 0
    for index in order.tolist():
        num_keys = int(pieces.num_keys[index])
        padding += most_keys - num_keys
        is_too_much = (
            padding > MAX_PADDED_KEYS or most_keys * (len(group) + 1) > MAX_KEYS
        )
        is_bounded = not (pieces.is_fresh[index] or is_free[index])
        if kinds[index] != kind or is_alone[index] or (is_bounded and is_too_much):
            group = []
            groups.append(group)
            kind, most_keys, padding = kinds[index], num_keys, 0
        group.append(index)
    # In the order of the batch, which a step of answers only then has already.
    return [np.sort(group) for group in groups]


def filled(block_table: np.ndarray) -> np.ndarray:
    """Return a table with a block of the same row in the place of each -1."""
    first = block_table[:, :1]
    own = np.where(first < 0, block_table.max(axis=1, keepdims=True), first)
    return np.where(block_table < 0, own, block_table).astype(np.int64)


def group_queries(
    metadata: AttentionMetadata, max_ragged: int = 0
) -> tuple[list[AttentionGroup], np.ndarray]:
    """Sort the queries of a step into groups.

    Args:
        metadata: The flat batch.
        max_ragged: Pieces of up to so many queries are attended without padding, so
            that they share a group whatever their numbers of keys: 0 for none, 1, or
            MAX_QUERIES.

    Returns:
        The groups, and for each row of the flat batch its place among the queries of
        all groups laid end to end, fresh groups first, [num_tokens] int64; empty if
        that is the order of the batch and there is one group.
    """
    pieces = cut_queries(metadata, max_ragged)
    table = filled(metadata.block_table)
    window_table = metadata.window and filled(metadata.window.block_table)
    groups = []
    for members in similar_pieces(pieces, max_ragged):
        length = pieces.length[members, np.newaxis]
        steps = np.minimum(np.arange(length.max()), length - 1)
        num_keys = pieces.num_keys[members, np.newaxis]
        num_blocks = -(-num_keys // metadata.block_size)
        width = 0 if pieces.is_fresh[members[0]] else num_blocks.max()
        requests, is_read = pieces.request[members], np.arange(width) < num_blocks
        tables = {"block_table": table}
        if window_table is not None:
            tables["window_block_table"] = window_table
        blocks = {name: rows[requests] for name, rows in tables.items()}
        groups.append(
            AttentionGroup(
                rows=pieces.start[members, np.newaxis] + steps,
                positions=num_keys - length + steps,
                **{
                    name: np.where(is_read, rows[:, :width], rows[:, :1])
                    for name, rows in blocks.items()
                },
            )
        )
    groups.sort(key=lambda group: not group.is_fresh)
    rows = np.concatenate([group.rows.ravel() for group in groups])
    num_tokens = int(metadata.query_start_loc[-1])
    if len(groups) == 1 and len(rows) == num_tokens:
        return groups, np.empty(0, dtype=np.int64)
    # The first of equal rows is the query itself; the others pad its piece.
    return groups, np.unique(rows, return_index=True)[1]
