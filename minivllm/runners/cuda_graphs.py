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
Source: appendix A21, "CUDA graphs"; appendix A24, "Windows"; appendix A28, "Delta nets
    in torch".
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.models.gated_delta_net import RecurrentPass
from minivllm.models.spec import ModelSpec
from minivllm.ops.paged_attention import PaddedAttention
from minivllm.ops.registry import choose_for
from minivllm.runners.attention_groups import filled
from minivllm.runners.attention_metadata import Batch
from minivllm.runners.kv_cache import cache_places

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
        window_slot_mapping: Of the layers with a window, if their blocks are apart.
        window_block_table: The same.
        state_slots: [num_rows], if a layer keeps states.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    window_slot_mapping: Tensor | None = None
    window_block_table: Tensor | None = None
    state_slots: Tensor | None = None


class DecodePages(NamedTuple):
    """A pool of blocks, as a decode step sees it."""

    layers: Sequence[Tensor]
    slot_mapping: Tensor
    attention: Any  # a `PaddedAttention`, or one like it


class DecodeContext:
    """One query for each request: a `PagedContext` without groups."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[Tensor],
        slot_mapping: Tensor,
        reshape_and_cache: Callable[..., None],
        attention: Any,
        window: DecodePages | None = None,
        recurrent: RecurrentPass | None = None,
    ) -> None:
        """Prepare what all layers share.

        Args:
            spec: The model.
            layers: The cache of each.
            slot_mapping: [num_rows].
            reshape_and_cache: The op.
            attention: A `PaddedAttention`, or one like it.
            window: Of the layers with a window, if their blocks are apart.
            recurrent: What keeps the states.
        """
        self.spec = spec
        self.pages = [DecodePages(layers, slot_mapping, attention)]
        if window is not None:
            self.pages.append(window)
        self.homes = cache_places(spec, window is not None)
        self.reshape_and_cache = reshape_and_cache
        self.recurrent = recurrent

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Put the new keys and values into their slots, then let all queries look."""
        is_apart, index = self.homes[layer]
        layers, slot_mapping, attention = self.pages[is_apart]
        self.reshape_and_cache(k, v, layers[index], slot_mapping)
        sight = self.spec.attention_scale, self.spec.window_of(layer)
        return attention.attend(q, layers[index], *sight)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve the new token of each request, behind those in its slot."""
        assert self.recurrent is not None
        return self.recurrent.convolve(layer, x, weight)

    def mix(self, layer: int, *rows: Tensor) -> Tensor:
        """Run the delta rule over the new token of each request."""
        assert self.recurrent is not None
        return self.recurrent.mix(layer, *rows)


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
        pad_window_block: int | None = None,
        pad_state: int | None = None,
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
            pad_window_block: As pad_block, if blocks of windows are apart.
            pad_state: The slot for the states of padding, if a layer keeps states.
        """
        self.sizes = bucket_sizes(max_rows)
        self.max_num_blocks = max_num_blocks
        self.pad_block, self.pad_slot = pad_block, pad_block * block_size
        self.pad_window_block, self.pad_window_slot = pad_window_block, 0
        if pad_window_block is not None:
            self.pad_window_slot = pad_window_block * block_size
        self.pad_state = pad_state
        # What recordings read: always this memory, with the numbers of each step.
        self.memory = torch.zeros(
            max_rows * self.width, dtype=torch.int64, device=device
        )
        no_numbers = np.empty((len(self.pad_numbers), 0), np.int64)
        no_tables = [np.empty((0, 1), np.int64) for _ in self.pad_blocks]
        self.replays: dict[int, Function] = {}
        for size in reversed(self.sizes):
            padding = torch.from_numpy(self.padded(size, no_numbers, no_tables))
            padding = padding.to(device)
            self.memory.narrow(0, 0, len(padding)).copy_(padding)
            self.replays[size] = record(partial(decode, self.views(size)))

    @property
    def pad_blocks(self) -> list[int]:
        """What padding has in its tables: of all tokens, and of windows if apart."""
        blocks = (self.pad_block, self.pad_window_block)
        return [block for block in blocks if block is not None]

    @property
    def pad_numbers(self) -> list[int]:
        """What else padding has, in the order of `padded`."""
        numbers = [0, 0, self.pad_slot]
        if self.pad_window_block is not None:
            numbers.append(self.pad_window_slot)
        return numbers if self.pad_state is None else [*numbers, self.pad_state]

    @property
    def width(self) -> int:
        """How many numbers belong to a row."""
        return len(self.pad_numbers) + len(self.pad_blocks) * self.max_num_blocks

    def views(self, size: int) -> DecodeInputs:
        """Return the inputs of a size: one behind another in the memory."""
        num_tables = len(self.pad_blocks)
        lengths = [size] * len(self.pad_numbers)
        lengths += [size * self.max_num_blocks] * num_tables
        used = self.memory.narrow(0, 0, sum(lengths)).split(lengths)
        tables = [x.view(size, -1) for x in used[-num_tables:]]
        numbers = list(used[:-num_tables])
        state_slots = None if self.pad_state is None else numbers.pop()
        window_slots = [*numbers, None][3]
        return DecodeInputs(
            *numbers[:3], tables[0], window_slots, [*tables, None][1], state_slots
        )

    def padded(
        self, size: int, numbers: np.ndarray, block_tables: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Lay out the inputs of a size, with padding behind the rows of requests.

        Args:
            size: In rows.
            numbers: One line each of input_ids, positions, slot_mapping, and where
                there are some, window_slot_mapping and state_slots, [..., num_rows].
            block_tables: -1 where a request has no block, [num_rows, num_blocks];
                of all tokens, and of windows if they are apart.

        Returns:
            The numbers of `views(size)`, one behind another, int64.
        """
        num_rows = numbers.shape[1]
        rows = np.repeat(np.array(self.pad_numbers)[:, np.newaxis], size, axis=1)
        rows[:, :num_rows] = numbers
        tables = []
        for pad_block, block_table in zip(self.pad_blocks, block_tables, strict=True):
            table = np.full((size, self.max_num_blocks), pad_block, dtype=np.int64)
            if num_rows:
                # What may be gathered and masked is a request's own (0 * NaN would be
                # NaN).
                own = filled(block_table)
                table[:num_rows] = own[:, :1]
                table[:num_rows, : own.shape[1]] = own
            tables.append(table)
        return np.concatenate([rows.ravel(), *(table.ravel() for table in tables)])

    def can_replay(self, batch: Batch) -> bool:
        """Whether each row is the last token of a request, and all of them fit."""
        num_rows = len(batch.input_ids)
        return (
            num_rows <= self.sizes[-1]
            and batch.attention.block_table.shape[1] <= self.max_num_blocks
            and np.array_equal(batch.logits_indices, np.arange(num_rows))
        )

    def inputs(self, batch: Batch, state_slots: np.ndarray | None = None) -> np.ndarray:
        """Return what `replay` needs on the device: see `padded`."""
        num_rows = len(batch.input_ids)
        size = next(size for size in self.sizes if size >= num_rows)
        metadata = batch.attention
        numbers = [batch.input_ids, batch.positions, metadata.slot_mapping]
        tables = [metadata.block_table]
        if metadata.window is not None:
            numbers.append(metadata.window.slot_mapping)
            tables.append(metadata.window.block_table)
        if state_slots is not None:
            numbers.append(state_slots)
        return self.padded(size, np.stack(numbers), tables)

    def replay(self, inputs: Tensor, num_rows: int) -> Tensor:
        """Return the scores of the next tokens, until the next call overwrites them.

        Args:
            inputs: From `inputs`, on the device.
            num_rows: Without padding.

        Returns:
            [num_rows, vocab_size].
        """
        self.memory.narrow(0, 0, len(inputs)).copy_(inputs)
        size = len(inputs) // self.width
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
