"""Decode steps as CUDA graphs: recorded once for each size of batch, then replayed.

To start a kernel takes a CPU longer than a small kernel takes a GPU, and a decode step
starts hundreds. A graph is a list of such starts, handed over in one call, with all
arguments fixed: numbers and addresses. So what is recorded has one shape, reads its
inputs from memory that stays where it is, and never asks for a value.

    rows         A   B   C   ·      three requests in a graph for four
    input_ids    a   b   c   0      padding computes token 0 at position 0 ...
    slots        17  4   52  last   ... and writes it into the last block

Invariant: the last block of the cache is no request's. Padding reads and writes there
and nowhere else, so no row of a request depends on it.

Called by the torch runner.

In vLLM: vllm/compilation/cuda_graph.py (CUDAGraphWrapper),
vllm/v1/worker/gpu_model_runner.py (capture_model).
Source: appendix A21, "CUDA graphs"; appendix A24, "Windows".
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.models.spec import ModelSpec
from minivllm.ops.paged_attention import PaddedAttention
from minivllm.ops.registry import choose_for
from minivllm.runners.attention_metadata import Batch

# Tokens of the longest text that graphs are for. Each launch of attention is recorded
# with enough thread blocks for it, however short the texts of a step are.
MAX_GRAPH_LEN = 8192

Function = Callable[[], Tensor]


class DecodeInputs(NamedTuple):
    """One new token of each request, on the device; all int64.

    Attributes:
        input_ids: [num_rows].
        positions: [num_rows].
        slot_mapping: [num_rows].
        block_table: [num_rows, max_num_blocks].
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor


class DecodeContext:
    """Attention of one query for each request: a `PagedContext` without groups."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[Tensor],
        slot_mapping: Tensor,
        reshape_and_cache: Callable[..., None],
        attention: Any,
    ) -> None:
        """Prepare what all layers share.

        Args:
            spec: The model.
            layers: The cache of each.
            slot_mapping: [num_rows].
            reshape_and_cache: The op.
            attention: A `PaddedAttention`, or one like it.
        """
        self.spec = spec
        self.layers = layers
        self.slot_mapping = slot_mapping
        self.reshape_and_cache = reshape_and_cache
        self.attention = attention

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Put the new keys and values into their slots, then let all queries look."""
        kv_cache = self.layers[layer]
        self.reshape_and_cache(k, v, kv_cache, self.slot_mapping)
        sight = self.spec.attention_scale, self.spec.window_of(layer)
        return self.attention.attend(q, kv_cache, *sight)


def bucket_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows that are recorded: 1, 2, 4, 8, ... and the largest."""
    return [2**i for i in range((max_rows - 1).bit_length())] + [max_rows]


class DecodeGraphs:
    """A recording of a decode step for each size of batch."""

    def __init__(
        self,
        decode: Callable[[DecodeInputs], Tensor],
        record: Callable[[Function], Function],
        *,
        max_rows: int,
        max_num_blocks: int,
        pad_block: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Record all sizes, the largest first: its memory is enough for the others.

        Args:
            decode: Returns the scores of the next tokens, [num_rows, vocab_size].
            record: Runs a function, and returns what does the same once more.
            max_rows: Rows of the largest size.
            max_num_blocks: Blocks of the longest text.
            pad_block: The block that padding uses.
            block_size: Token slots in a block.
            device: Where decode computes.
        """
        self.sizes = bucket_sizes(max_rows)
        self.max_num_blocks = max_num_blocks
        self.pad_block = pad_block
        self.pad_slot = pad_block * block_size
        # What recordings read: always this memory, with the numbers of each step.
        self.memory = torch.zeros(
            max_rows * (3 + max_num_blocks), dtype=torch.int64, device=device
        )
        no_rows = np.empty((3, 0), np.int64), np.empty((0, 1), np.int64)
        self.replays: dict[int, Function] = {}
        for size in reversed(self.sizes):
            padding = torch.from_numpy(self.padded(size, *no_rows)).to(device)
            self.memory.narrow(0, 0, len(padding)).copy_(padding)
            self.replays[size] = record(partial(decode, self.views(size)))

    def views(self, size: int) -> DecodeInputs:
        """Return the inputs of a size: one behind another in the memory."""
        lengths = [size, size, size, size * self.max_num_blocks]
        used = self.memory.narrow(0, 0, sum(lengths))
        *rows, block_table = used.split(lengths)
        return DecodeInputs(*rows, block_table.view(size, -1))

    def padded(
        self, size: int, numbers: np.ndarray, block_table: np.ndarray
    ) -> np.ndarray:
        """Lay out the inputs of a size, with padding behind the rows of requests.

        Args:
            size: In rows.
            numbers: input_ids, positions and slot_mapping, [3, num_rows].
            block_table: -1 where a request has no more, [num_rows, num_blocks].

        Returns:
            The numbers of `views(size)`, one behind another, int64.
        """
        num_rows, num_blocks = block_table.shape
        rows = np.zeros((3, size), dtype=np.int64)
        rows[2] = self.pad_slot
        rows[:, :num_rows] = numbers
        table = np.full((size, self.max_num_blocks), self.pad_block, dtype=np.int64)
        # What may be gathered and masked is a request's own (0 * NaN would be NaN).
        first = block_table[:, :1]
        table[:num_rows] = first
        table[:num_rows, :num_blocks] = np.where(block_table < 0, first, block_table)
        return np.concatenate([rows.ravel(), table.ravel()])

    def can_replay(self, batch: Batch) -> bool:
        """Whether each row is the last token of a request, and all of them fit."""
        num_rows = len(batch.input_ids)
        return (
            num_rows <= self.sizes[-1]
            and batch.attention.block_table.shape[1] <= self.max_num_blocks
            and np.array_equal(batch.logits_indices, np.arange(num_rows))
        )

    def inputs(self, batch: Batch) -> np.ndarray:
        """Return what `replay` needs on the device: see `padded`."""
        num_rows = len(batch.input_ids)
        size = next(size for size in self.sizes if size >= num_rows)
        metadata = batch.attention
        numbers = np.stack([batch.input_ids, batch.positions, metadata.slot_mapping])
        return self.padded(size, numbers, metadata.block_table)

    def replay(self, inputs: Tensor, num_rows: int) -> Tensor:
        """Return the scores of the next tokens, until the next call overwrites them.

        Args:
            inputs: From `inputs`, on the device.
            num_rows: Without padding.

        Returns:
            [num_rows, vocab_size].
        """
        self.memory.narrow(0, 0, len(inputs)).copy_(inputs)
        size = len(inputs) // (3 + self.max_num_blocks)
        return self.replays[size]().narrow(0, 0, num_rows)


class GraphRecorder:
    """Records on a GPU. All recordings share one pool of memory.

    They may, because they are replayed one after the other, and what is in the pool
    lasts from one replay to the next at most.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def __call__(self, function: Function) -> Function:
        """Run a function once, record it, and return what replays it.

        The first run compiles and loads kernels, and lets torch's libraries reserve
        what they work in: nothing of that is possible during the recording, in which
        nothing is computed.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            function()
        graph = torch.cuda.CUDAGraph()
        # Otherwise what other threads do on the GPU meanwhile might be an error.
        with torch.cuda.graph(
            graph,
            pool=self.pool,
            stream=self.stream,
            capture_error_mode="thread_local",
        ):
            result = function()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def why_no_graphs(spec: ModelSpec, weight: Tensor) -> str | None:
    """Return why decode steps are not worth recording, or None if they are.

    Args:
        spec: The model.
        weight: Any of it, as it will compute.
    """
    if weight.device.type != "cuda":
        return f"they are for a GPU, not for {weight.device.type}"
    group_size = spec.num_heads // spec.num_kv_heads
    sizes = {"head_dim": spec.head_dim, "group_size": group_size}
    choice = choose_for("paged_attention", weight, **sizes)
    if choice.backend.implementation is PaddedAttention:
        return (
            f"attention ({choice.backend.name}) pads keys: in a graph, those of each "
            "request to the longest text that there may be"
        )
    return None
