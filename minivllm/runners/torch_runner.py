"""The fast runner: torch, on the CPU or a GPU.

A step is planned with NumPy, sent to the device in one transfer, computed without
waiting for it, and its tokens are fetched in one transfer.

Invariant: in a block in use, slots that no token has been written to hold zeros. They
are gathered with the others and masked, and a masked NaN, left behind by an earlier
owner, would still be a NaN (0 * NaN).

Called by the engine.

In vLLM: vllm/v1/worker/gpu_model_runner.py (GPUModelRunner).
Source: appendix A6, "The torch runner"; appendix A14, "One prompt, many answers";
    appendix A21, "CUDA graphs"; appendix A24, "Windows"; appendix A25, "Experts in the
    engine"; appendix A28, "Delta nets in torch".
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.errors import ConfigError
from minivllm.models.context import first_key_of
from minivllm.models.decoder import Decoder
from minivllm.models.expert_counts import ExpertCounts
from minivllm.models.gated_delta_net import (
    DeltaOps,
    RecurrentPass,
    RecurrentStates,
    TextRows,
    choose_delta_ops,
)
from minivllm.models.layers import causal_mask
from minivllm.models.merged import MergedDecoder
from minivllm.models.spec import ModelSpec
from minivllm.ops.paged_attention import PaddedAttention
from minivllm.ops.registry import Choice, choose, choose_for
from minivllm.request import ModelOutput, Request, SchedulerOutput
from minivllm.runners.attention_groups import (
    MAX_QUERIES,
    AttentionGroup,
    group_queries,
)
from minivllm.runners.attention_metadata import AttentionMetadata, make_batch
from minivllm.runners.base import CacheLayout
from minivllm.runners.cuda_graphs import (
    MAX_GRAPH_LEN,
    DecodeContext,
    DecodeGraphs,
    DecodeInputs,
    DecodePages,
    Function,
    GraphRecorder,
)
from minivllm.runners.kv_cache import cache_places, plain_layout
from minivllm.runners.logprob_rows import (
    MAX_ROWS,
    LogprobRows,
    add_answer_logprobs,
    add_prompt_logprobs,
    answer_rows,
    entries_of,
    prompt_rows,
)
from minivllm.runners.sampling_inputs import (
    SamplingState,
    apply_logits_processors,
    to_model_output,
)
from minivllm.sampling.inputs import SamplingInputs
from minivllm.sampling.logprobs import logprobs_of
from minivllm.sampling.params import SamplingParams
from minivllm.sampling.sampler import edited, sample

MAX_SAMPLED = 256  # rows of scores that the memory of a GPU is reckoned for


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays of int64 and float64 to a device, all in one transfer."""
    flat = np.concatenate([array.ravel().view(np.int64) for array in arrays])
    tensor = torch.from_numpy(flat)
    if device.type == "cuda":
        if torch.cuda.is_available():
            tensor = tensor.pin_memory()  # from other memory, the copy would wait
        tensor = tensor.to(device, non_blocking=True)
    tensors = []
    parts = tensor.split([array.size for array in arrays])
    for part, array in zip(parts, arrays, strict=True):
        if array.dtype == np.float64:
            part = part.view(torch.float64)
        tensors.append(part.view(array.shape))
    return tensors


def begun_blocks(metadata: AttentionMetadata) -> np.ndarray:
    """Return the blocks that get their first tokens in this step, but not all."""
    blocks, offsets = np.divmod(metadata.slot_mapping, metadata.block_size)
    is_first, is_last = offsets == 0, offsets == metadata.block_size - 1
    return np.setdiff1d(blocks[is_first], blocks[is_last])


class FreshPieces:
    """Pieces that begin their text: every key they see is in this step."""

    def __init__(self, group: AttentionGroup, rows: Tensor) -> None:
        self.rows = rows
        self.first_row = int(group.rows[0, 0])

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Attend causally within each piece, [num_queries, num_heads, head_dim]."""
        num_pieces, length = self.rows.shape
        if num_pieces == 1:  # its rows are neighbours: nothing to gather
            q, k, v = (x.narrow(0, self.first_row, length) for x in (q, k, v))
        else:
            rows = self.rows.flatten()
            q, k, v = (x.index_select(0, rows) for x in (q, k, v))
        q, k, v = (x.unflatten(0, (num_pieces, length)) for x in (q, k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        options = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        # Padding is at the end, where no real query looks.
        if window is None or window >= length:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
            return mixed.transpose(1, 2).flatten(0, 1)
        # A part of the queries at a time, with those keys that one of them sees.
        parts, sight = [], (window, q.device)
        for start in range(0, length, MAX_QUERIES):
            num, first = min(MAX_QUERIES, length - start), first_key_of(start, window)
            num_keys = start + num - first
            seen = (x.narrow(2, first, num_keys) for x in (k, v))
            part, mask = q.narrow(2, start, num), causal_mask(num, num_keys, *sight)
            parts.append(
                F.scaled_dot_product_attention(part, *seen, attn_mask=mask, **options)
            )
        return torch.cat(parts, dim=2).transpose(1, 2).flatten(0, 1)


class RunnerOps:
    """The ops around the decoder: those of the cache, and the choice of a token.

    Attributes:
        choices: For each op, which backend runs, and why not another.
    """

    def __init__(self, spec: ModelSpec, kv_cache: Tensor) -> None:
        self.group_size = spec.num_heads // spec.num_kv_heads
        sizes = {"head_dim": spec.head_dim, "group_size": self.group_size}
        self.choices: dict[str, Choice] = {
            op: choose_for(op, kv_cache, **sizes)
            for op in ("reshape_and_cache", "paged_attention", "prefill_attention")
        }
        for op in ("argmax", "draw"):
            self.choices[op] = choose(op, kv_cache.device.type, "float32")
        chosen = [choice.backend.implementation for choice in self.choices.values()]
        self.reshape_and_cache, self.attention_of_one, *chosen = chosen
        self.attention_of_many, self.argmax, self.draw = chosen
        if spec.delta_net is not None:
            choices = choose_delta_ops(spec.delta_net, kv_cache)
            self.choices |= choices
            for op, choice in choices.items():
                setattr(self, op, choice.backend.implementation)

    @property
    def max_ragged(self) -> int:
        """How many queries a piece may have whose keys need no padding."""
        if self.attention_of_many is not PaddedAttention:
            return MAX_QUERIES
        return 0 if self.attention_of_one is PaddedAttention else 1

    def attention(
        self, rows: Tensor, positions: Tensor, block_table: Tensor, kv_cache: Tensor
    ) -> Any:
        """Make what attends for a group of pieces; as for `PaddedAttention`."""
        is_one = positions.shape[1] == 1
        make = self.attention_of_one if is_one else self.attention_of_many
        return make(rows, positions, block_table, kv_cache, self.group_size)

    @property
    def delta_ops(self) -> DeltaOps:
        """The ops of delta nets, in a model that has some."""
        return DeltaOps(*(getattr(self, op) for op in DeltaOps._fields))


class PagedContext:
    """Attention over a flat batch with keys and values in blocks; states in slots."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: RunnerOps,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        groups: Sequence[AttentionGroup],
        grouping: Sequence[Tensor],
        window: tuple[Tensor, Tensor] | None = None,
        recurrent: RecurrentPass | None = None,
    ) -> None:
        """Prepare what all layers share.

        Args:
            spec: The model.
            ops: What reads and writes the cache.
            kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim].
            slot_mapping: [num_tokens].
            groups: From `group_queries`.
            grouping: On the device: the places from `group_queries`, then rows,
                positions and all block tables of each group.
            window: kv_cache and slot_mapping of the layers with a window, if apart.
            recurrent: What keeps the states.
        """
        self.spec = spec
        self.reshape_and_cache = ops.reshape_and_cache
        self.recurrent = recurrent
        self.pages = [Pages(kv_cache.unbind(), slot_mapping)]
        if window is not None:
            self.pages.append(Pages(window[0].unbind(), window[1]))
        self.homes = cache_places(spec, window is not None)
        self.places, *tensors = grouping
        self.fresh: list[FreshPieces] = []
        num = 2 + len(self.pages)
        for i, group in enumerate(groups):
            rows, positions, *tables = tensors[num * i : num * i + num]
            if group.is_fresh:
                self.fresh.append(FreshPieces(group, rows))
                continue
            for pages, table in zip(self.pages, tables, strict=True):
                if pages.layers:
                    attention = ops.attention(rows, positions, table, pages.layers[0])
                    pages.cached.append(attention)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Put the new keys and values into their slots, then let all queries look.

        In this order: a request may share blocks that another fills in this step.
        """
        is_apart, index = self.homes[layer]
        pages = self.pages[is_apart]
        kv_cache = pages.layers[index]
        self.reshape_and_cache(k, v, kv_cache, pages.slot_mapping)
        sight = self.spec.attention_scale, self.spec.window_of(layer)
        mixed = [pieces.attend(q, k, v, *sight) for pieces in self.fresh]
        mixed += [pieces.attend(q, kv_cache, *sight) for pieces in pages.cached]
        if not self.places.numel():
            return mixed[0]
        whole = torch.cat(mixed) if len(mixed) > 1 else mixed[0]
        return whole.index_select(0, self.places)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve the new tokens of each request, behind those in its slot."""
        assert self.recurrent is not None
        return self.recurrent.convolve(layer, x, weight)

    def mix(self, layer: int, *rows: Tensor) -> Tensor:
        """Run the delta rule over the new tokens of each request."""
        assert self.recurrent is not None
        return self.recurrent.mix(layer, *rows)


class TorchRunner:
    """Computes steps in the dtype and on the device of a decoder."""

    graphs: DecodeGraphs | None = None
    expert_counts: ExpertCounts | None = None

    def __init__(
        self,
        decoder: Decoder | MergedDecoder,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        vocab_size: int | None = None,
        layout: CacheLayout | None = None,
    ) -> None:
        """Take over a model and reserve the cache.

        Args:
            decoder: The model with its weights. A `Decoder` gives them up to a
                `MergedDecoder`, and is empty then.
            num_blocks: Blocks of the KV cache.
            block_size: Token slots in a block.
            max_model_len: Tokens that a request may have.
            vocab_size: Token ids that the tokenizer knows, if fewer than the model
                scores; the others are never sampled.
            layout: What there is beside these blocks; by default the plainest that the
                model can do with.
        """
        spec = decoder.spec
        device = decoder.embed_tokens.weight.device
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"the model is on {device.type!r}, but the torch runner computes on "
                "'cpu' or 'cuda': load it there"
            )
        if isinstance(decoder, Decoder):
            decoder = MergedDecoder(decoder)
        self.decoder = decoder
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size or spec.vocab_size
        self.layout = layout = layout or plain_layout(spec)
        weight = decoder.embed_tokens.weight
        self.device = weight.device
        memory = {"dtype": weight.dtype, "device": weight.device}
        block = (block_size, spec.num_kv_heads, spec.head_dim)
        places = cache_places(spec, layout.num_window_blocks > 0).values()
        num_apart = sum(is_apart for is_apart, _ in places)
        # Not filled: on the CPU, memory is taken as blocks are first written.
        shape = (len(places) - num_apart, 2, num_blocks, *block)
        self.kv_cache = torch.empty(shape, **memory)
        self.window_cache: Tensor | None = None
        if layout.num_window_blocks:
            shape = (num_apart, 2, layout.num_window_blocks, *block)
            self.window_cache = torch.empty(shape, **memory)
        self.states: RecurrentStates | None = None
        if spec.delta_net is not None:
            num_slots = layout.num_states + layout.num_kept_states
            self.states = RecurrentStates(spec.delta_net, num_slots, **memory)
        self.ops = RunnerOps(spec, self.kv_cache)
        self.sampling = SamplingState(self.vocab_size)

    @property
    def choices(self) -> dict[str, Choice]:
        """For each op, which backend runs, and why not another."""
        return self.decoder.choices | self.ops.choices

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Compute the tokens of a step, and sample where a request has caught up."""
        launched = self.launch(step)
        # The first of these waits for the device; the others only if asked for.
        token_ids, *logits = launched.results.tolist()
        token_ids = [int(token_id) for token_id in token_ids]
        output = to_model_output(launched.requests, token_ids, *logits, launched.errors)
        if launched.answers.rows:
            entries = entries_of(launched.answers, *to_lists(launched.answer_logprobs))
            add_answer_logprobs(output, launched.answers, entries)
        for part, numbers in launched.prompts:
            add_prompt_logprobs(output, part, entries_of(part, *to_lists(numbers)))
        return output

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> "Launched":
        """Hand all work of a step to the device."""
        batch = make_batch(step, self.block_size)
        metadata = batch.attention
        requests = [request for _, request in step.sampled()]
        sampling = self.sampling.inputs(requests)
        answers = answer_rows(requests, self.vocab_size)
        prompts = prompt_rows(step, metadata.query_start_loc, self.vocab_size)
        graphs = self.graphs if self.graphs and self.graphs.can_replay(batch) else None
        slots = [step.state_slots[r.request_id] for r in step.requests if self.states]
        parcels: dict[str, list[np.ndarray]] = {
            "batch": [batch.input_ids, batch.positions, batch.logits_indices],
            "pages": self._pages(metadata, step.block_copies),
            "answers": [np.array(answers.rows, dtype=np.int64)],
            "prompts": [
                np.array(x, np.int64) for x in (prompts.rows, prompts.token_ids)
            ],
            "sampling": sampling.arrays(),
        }
        if metadata.window is not None:
            parcels["window"] = self._pages(metadata.window, step.window_block_copies)
        texts = TextRows(slots, np.diff(metadata.query_start_loc)) if slots else None
        if texts is not None:
            is_new = [request.num_computed_tokens == 0 for request in step.requests]
            parcels["loads"] = columns_of(step.state_loads)
            parcels["new"] = [texts.slots[np.array(is_new)]]
            parcels["saves"] = columns_of(step.state_saves)
        groups: list[AttentionGroup] = []
        if graphs is not None:
            parcels["graph"] = [graphs.inputs(batch, texts.slots if texts else None)]
        else:
            places = np.empty(0, dtype=np.int64)
            if self.window_cache is not None or len(self.kv_cache):
                groups, places = group_queries(metadata, self.ops.max_ragged)
            parcels["grouping"] = [places]
            for group in groups:
                tables = [group.block_table, group.window_block_table]
                parcels["grouping"] += [group.rows, group.positions]
                parcels["grouping"] += [table for table in tables if table is not None]
            parcels["texts"] = texts.arrays() if texts else []
        sent = send(parcels, self.device)

        self._prepare_blocks(self.kv_cache, *sent["pages"][1:])
        if self.window_cache is not None:
            self._prepare_blocks(self.window_cache, *sent["window"][1:])
        if self.states is not None:
            self.states.copy(*sent["loads"])
            self.states.clear(*sent["new"])
        launched = Launched(requests, answers)
        input_ids, positions, logits_indices = sent["batch"]
        if graphs is not None:
            logits = graphs.replay(sent["graph"][0], len(requests))
        else:
            window = recurrent = None
            if self.window_cache is not None:
                window = self.window_cache, sent["window"][0]
            if self.states is not None and texts is not None:
                ops = self.ops.delta_ops
                recurrent = RecurrentPass(self.states, texts, sent["texts"], ops)
            context = PagedContext(
                self.decoder.spec,
                self.ops,
                self.kv_cache,
                sent["pages"][0],
                groups,
                sent["grouping"],
                window,
                recurrent,
            )
            hidden_states = self.decoder.forward(input_ids, positions, context)
            launched.prompts = self._prompt_logprobs(
                hidden_states, prompts, *sent["prompts"]
            )
        if self.states is not None:
            self.states.copy(*sent["saves"])
        if requests:
            if graphs is None:
                logits = self._logits(hidden_states.index_select(0, logits_indices))
            sampling = sampling.on(sent["sampling"])
            launched.results, launched.errors = self._sample(logits, requests, sampling)
            if answers.rows:
                (rows,) = sent["answers"]
                launched.answer_logprobs = logprobs_of(
                    logits.index_select(0, rows),
                    launched.results.select(0, 0).index_select(0, rows).long(),
                    answers.max_best,
                )
        return launched

    def now(self) -> float:
        """Seconds on the machine's clock."""
        return time.perf_counter()

    def _pages(
        self, metadata: AttentionMetadata, copies: Sequence[tuple[int, int]]
    ) -> list[np.ndarray]:
        """Return the slots of new tokens, the blocks they begin, and what is copied."""
        return [metadata.slot_mapping, begun_blocks(metadata), *columns_of(copies)]

    def _prepare_blocks(
        self, kv_cache: Tensor, begun: Tensor, sources: Tensor, copies: Tensor
    ) -> None:
        """Copy blocks, before anything is written, and fill others with zeros."""
        if copies.numel():
            kv_cache.index_copy_(2, copies, kv_cache.index_select(2, sources))
        if begun.numel():
            kv_cache.index_fill_(2, begun, 0)

    def close(self) -> None:
        """Give back the memory of model, caches and graphs."""
        self.decoder = self.kv_cache = self.graphs = None
        self.window_cache = self.states = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _logits(self, hidden_states: Tensor) -> Tensor:
        """Return the scores of all tokens that may be chosen."""
        logits = self.decoder.compute_logits(hidden_states)
        return logits.narrow(1, 0, self.vocab_size)

    def _sample(
        self, logits: Tensor, requests: Sequence[Request], inputs: SamplingInputs
    ) -> tuple[Tensor, dict[int, str]]:
        """Choose a token for each request.

        Returns:
            The tokens, their scores, the largest score of each row and the largest of
            the edited row, float64, [4, num_sampled]; by row, what went wrong.
        """
        argmax, draw = self.ops.argmax, self.ops.draw
        processed, errors = apply_logits_processors(logits, requests)
        is_edited = processed is not logits or inputs.has_edits
        largest = argmax(logits)[0] if is_edited else None
        with edited(processed, inputs) as scores:
            largest_edited, token_ids = sample(scores, inputs, argmax, draw)
        largest = largest_edited if largest is None else largest
        token_logits = logits.gather(1, token_ids.unsqueeze(-1)).squeeze(-1)
        results = (token_ids, token_logits, largest, largest_edited)
        return torch.stack([result.double() for result in results]), errors

    def _prompt_logprobs(
        self, hidden_states: Tensor, found: LogprobRows, rows: Tensor, token_ids: Tensor
    ) -> list[tuple[LogprobRows, tuple[Tensor, ...]]]:
        """Compute what is asked of prompts, a part of the rows at a time."""
        results = []
        parts = (rows.split(MAX_ROWS), token_ids.split(MAX_ROWS))
        for part, part_rows, part_ids in zip(found.slices(), *parts, strict=False):
            logits = self._logits(hidden_states.index_select(0, part_rows))
            results.append((part, logprobs_of(logits, part_ids, part.max_best)))
        return results

    @torch.inference_mode()
    def capture_graphs(
        self, max_rows: int, record: Callable[[Function], Function] | None = None
    ) -> None:
        """Record decode steps; to be called once, before the first step.

        The last block of each pool and the last slot of the states are kept for
        padding: the engine has one fewer.

        Args:
            max_rows: Requests of the largest step to record.
            record: See `DecodeGraphs`; by default, CUDA graphs are made.

        Raises:
            ConfigError: Memory runs out, or the device refuses.
        """
        self.num_blocks -= 1
        self.kv_cache.select(2, self.num_blocks).zero_()
        padding: dict[str, int] = {}
        layout = self.layout
        if self.window_cache is not None:
            last = padding["pad_window_block"] = layout.num_window_blocks - 1
            self.window_cache.select(2, last).zero_()
            layout = replace(layout, num_window_blocks=last)
        if self.states is not None:
            padding["pad_state"] = self.states.conv.shape[1] - 1
            kind = "num_kept_states" if layout.num_kept_states else "num_states"
            layout = replace(layout, **{kind: getattr(layout, kind) - 1})
        self.layout = layout
        longest = min(self.max_model_len, MAX_GRAPH_LEN)
        try:
            self.graphs = DecodeGraphs(
                self._decode,
                record or GraphRecorder(self.device),
                max_rows=max_rows,
                max_num_blocks=-(-longest // self.block_size),
                pad_block=self.num_blocks,
                block_size=self.block_size,
                device=self.device,
                **padding,
            )
        except RuntimeError as error:
            raise ConfigError(
                f"CUDA graphs cannot be recorded ({error}): lower max_num_seqs or the "
                "size of the KV cache, or set enforce_eager"
            ) from error

    def _decode(self, inputs: DecodeInputs) -> Tensor:
        """Score the next token of each request: what is recorded."""
        num_rows = len(inputs.input_ids)
        rows = torch.arange(num_rows, device=self.device).unsqueeze(1)
        positions = inputs.positions.unsqueeze(1)

        def pages(kv_cache: Tensor, slots: Tensor, table: Tensor) -> DecodePages:
            layers, attention = kv_cache.unbind(), None
            if layers:
                attention = self.ops.attention(rows, positions, table, layers[0])
            return DecodePages(layers, slots, attention)

        window = recurrent = None
        if self.window_cache is not None:
            numbers = inputs.window_slot_mapping, inputs.window_block_table
            window = pages(self.window_cache, *numbers)
        if self.states is not None:
            recurrent = self._decode_states(inputs.state_slots)
        layers, slots, attention = pages(
            self.kv_cache, inputs.slot_mapping, inputs.block_table
        )
        context = DecodeContext(
            self.decoder.spec,
            layers,
            slots,
            self.ops.reshape_and_cache,
            attention,
            window,
            recurrent,
        )
        hidden_states = self.decoder.forward(
            inputs.input_ids, inputs.positions, context
        )
        return self._logits(hidden_states)

    def count_experts(self) -> None:
        """Count from now on how many tokens each expert gets, without CUDA graphs.

        Raises:
            ConfigError: The model has no experts.
        """
        self.expert_counts = self.decoder.count_experts()
        self.graphs = None  # they would not count, and padding would be counted

    def _decode_states(self, slots: Tensor) -> RecurrentPass:
        """Return the states for a token of each text, in slots that change."""
        texts = TextRows(range(len(slots)), [1] * len(slots))
        starts = torch.arange(len(slots) + 1, device=self.device)
        nothing = starts.narrow(0, 0, 0)
        tensors = [slots, starts, slots, nothing, nothing, nothing]
        return RecurrentPass(self.states, texts, tensors, self.ops.delta_ops)


@torch.inference_mode()
def free_cuda_bytes(decoder: Decoder, share: float, max_num_tokens: int) -> int:
    """Return how much memory of a GPU is left for the cache.

    Args:
        decoder: On the GPU.
        share: Of all memory of the GPU that may be used, by others and by us.
        max_num_tokens: Tokens in a step; one is run to see what it needs.
    """
    device = decoder.embed_tokens.weight.device
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    num_tokens = min(max_num_tokens, decoder.spec.max_position_embeddings)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device)
    hidden_states = decoder(token_ids, positions, decoder.dense_context())
    logits = decoder.compute_logits(hidden_states[:MAX_SAMPLED])
    # With top_p, all scores are sorted: nothing takes more memory.
    params = SamplingParams(top_p=0.5).filled({})
    requests = [Request("", [0], 1, params, 1) for _ in range(len(logits))]
    inputs = SamplingState(logits.shape[1]).inputs(requests)
    sample(logits, inputs.on(to_device(inputs.arrays(), device)))
    needed = torch.cuda.max_memory_allocated(device) - held
    return int(share * total) - (total - free) - needed


def to_lists(numbers: Sequence[Tensor]) -> list[Any]:
    """Fetch tensors from the device, as lists."""
    return [tensor.tolist() for tensor in numbers]


@dataclass(slots=True)
class Launched:
    """What a step will bring; the numbers are still on the device.

    Attributes:
        requests: Those that get a token.
        answers: Of these, which are asked for log-probabilities.
        results: See `TorchRunner._sample`; [4, num_sampled] float64.
        errors: By row, what went wrong in a logits processor.
        answer_logprobs: See `logprobs_of`.
        prompts: Rows of prompts, and the same of them.
    """

    requests: list[Request]
    answers: LogprobRows
    results: Tensor = field(default_factory=lambda: torch.empty(4, 0))
    errors: dict[int, str] = field(default_factory=dict)
    answer_logprobs: tuple[Tensor, ...] = ()
    prompts: list[tuple[LogprobRows, tuple[Tensor, ...]]] = field(default_factory=list)


@torch.inference_mode()
def graph_cuda_bytes(
    decoder: MergedDecoder, max_rows: int, block_size: int, max_model_len: int
) -> int:
    """Return how much memory of a GPU the graphs take, with what is for padding.

    A part of it is the driver's, so nobody can tell beforehand: they are recorded for
    caches of one block and one state, and given back.
    """
    device = decoder.embed_tokens.weight.device
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    window = decoder.spec.max_window
    runner = TorchRunner(
        decoder,
        num_blocks=1,
        block_size=block_size,
        max_model_len=max_model_len,
        layout=CacheLayout(
            window=window,
            num_window_blocks=int(window is not None),
            num_kept_states=int(decoder.spec.delta_net is not None),
        ),
    )
    runner.capture_graphs(max_rows)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what only the first run has needed
    needed = free - torch.cuda.mem_get_info(device)[0]
    runner.close()
    return needed


@dataclass(slots=True)
class Pages:
    """A pool of blocks, as a step sees it.

    Attributes:
        layers: The cache of each of its layers.
        slot_mapping: [num_tokens].
        cached: What attends, for each group that reads from the pool.
    """

    layers: Sequence[Tensor]
    slot_mapping: Tensor
    cached: list[Any] = field(default_factory=list)


def send(
    parcels: Mapping[str, Sequence[np.ndarray]], device: torch.device
) -> dict[str, list[Tensor]]:
    """Copy lists of arrays to a device, all in one transfer."""
    arrays = [array for parcel in parcels.values() for array in parcel]
    tensors = iter(to_device(arrays, device))
    return {name: list(islice(tensors, len(parcels[name]))) for name in parcels}


def columns_of(pairs: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Return what is copied, and where to, int64."""
    return list(np.array(pairs, dtype=np.int64).reshape(-1, 2).T)
