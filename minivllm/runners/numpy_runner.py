"""The runner in NumPy: slow, readable, and the oracle for the fast one.

Every array of a step can be printed: `runner.batch` is the last one's input and
`runner.logits` its scores.

Called by the engine. Never imports torch.

Source: chapter 3, "Paging"; chapter 4, "Continuous batching"; appendix A14, "One
    prompt, many answers"; appendix A24, "Windows"; appendix A25, "Experts in the
    engine"; chapter 8, "Hybrid attention".
"""

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from minivllm.models.expert_counts import ExpertCounts
from minivllm.models.spec import ModelSpec
from minivllm.reference.decoder import NumpyDecoder
from minivllm.reference.gated_delta_net import RecurrentStates
from minivllm.reference.logprobs import logprobs_of
from minivllm.reference.paged_attention import paged_attention, reshape_and_cache
from minivllm.reference.sampler import edit, sample
from minivllm.request import ModelOutput, Request, SchedulerOutput
from minivllm.runners.attention_metadata import AttentionMetadata, Batch, make_batch
from minivllm.runners.base import CacheLayout
from minivllm.runners.kv_cache import cache_places, plain_layout
from minivllm.runners.logprob_rows import (
    LogprobRows,
    add_answer_logprobs,
    add_prompt_logprobs,
    answer_rows,
    entries_of,
    prompt_rows,
)
from minivllm.runners.sampling_inputs import apply_logits_processors, to_model_output


class PagedContext:
    """Attention over a flat batch, with the keys and values in blocks."""

    def __init__(
        self,
        spec: ModelSpec,
        kv_cache: np.ndarray,
        metadata: AttentionMetadata,
        window_cache: np.ndarray | None = None,
        states: RecurrentStates | None = None,
        slots: Sequence[int] = (),
    ) -> None:
        """Describe one step.

        Args:
            spec: Whose heads attend.
            kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim],
                of the layers that attend; the step writes into it.
            metadata: Where its tokens belong.
            window_cache: The same for the layers with a window, if they are apart.
            states: Of the layers that do not attend.
            slots: The slot of each request there.
        """
        self.spec = spec
        self.caches = [kv_cache, window_cache]
        self.metadata = metadata
        self.places = cache_places(spec, window_cache is not None)
        self.states = states
        self.slots = slots

    def attend(
        self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> np.ndarray:
        """Put the new keys and values into their slots, then read those in sight."""
        is_apart, index = self.places[layer]
        cache = self.caches[is_apart][index]
        metadata = self.metadata.window if is_apart else self.metadata
        reshape_and_cache(k, v, cache, metadata.slot_mapping)
        return paged_attention(
            q,
            cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            self.spec.attention_scale,
            self.spec.window_of(layer),
        )

    def convolve(self, layer: int, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Convolve the new tokens of each request, behind those in its slot."""
        y = np.empty_like(x)
        for slot, rows in self._requests():
            y[rows] = self.states.convolve(layer, slot, x[rows], weight)
        return y

    def mix(self, layer: int, *rows: np.ndarray) -> np.ndarray:
        """Run the delta rule over the new tokens of each request."""
        read = np.empty_like(rows[2])
        for slot, own in self._requests():
            read[own] = self.states.mix(layer, slot, *(x[own] for x in rows))
        return read

    def _requests(self) -> list[tuple[int, slice]]:
        """Return the slot and the rows of each request."""
        rows = pairwise(self.metadata.query_start_loc.tolist())
        return [(s, slice(*ends)) for s, ends in zip(self.slots, rows, strict=True)]


class NumpyRunner:
    """Computes steps in float32 on the CPU."""

    expert_counts: ExpertCounts | None = None

    def __init__(
        self,
        decoder: NumpyDecoder,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        vocab_size: int | None = None,
        layout: CacheLayout | None = None,
    ) -> None:
        """Reserve the cache; its memory is taken as blocks are first written.

        Args:
            decoder: The model with its weights.
            num_blocks: Blocks of the KV cache.
            block_size: Token slots in a block.
            max_model_len: Tokens that a request may have.
            vocab_size: Token ids that the tokenizer knows, if fewer than the model
                scores; the others are never sampled.
            layout: What there is beside these blocks; by default the plainest that the
                model can do with.
        """
        spec = decoder.spec
        self.decoder = decoder
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size or spec.vocab_size
        self.layout = layout = layout or plain_layout(spec)
        block = (block_size, spec.num_kv_heads, spec.head_dim)
        places = cache_places(spec, layout.num_window_blocks > 0).values()
        num_apart = sum(is_apart for is_apart, _ in places)
        shape = (len(places) - num_apart, 2, num_blocks, *block)
        self.kv_cache = np.zeros(shape, dtype=np.float32)
        self.window_cache: np.ndarray | None = None
        if layout.num_window_blocks:
            shape = (num_apart, 2, layout.num_window_blocks, *block)
            self.window_cache = np.zeros(shape, dtype=np.float32)
        self.states: RecurrentStates | None = None
        if spec.delta_net:
            num_slots = layout.num_states + layout.num_kept_states
            self.states = RecurrentStates(spec.delta_net, num_slots)
        self.batch: Batch | None = None
        self.logits: np.ndarray | None = None  # [num_sampled, vocab_size]

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Compute the tokens of a step, and sample where a request has caught up."""
        self.batch = batch = make_batch(step, self.block_size)
        for block_id, copy in step.block_copies:
            self.kv_cache[:, :, copy] = self.kv_cache[:, :, block_id]
        for block_id, copy in step.window_block_copies:
            self.window_cache[:, :, copy] = self.window_cache[:, :, block_id]
        slots = []
        if self.states is not None:
            slots = [step.state_slots[r.request_id] for r in step.requests]
            for source, target in step.state_loads:
                self.states.copy(source, target)
            self.states.clear(
                [
                    slot
                    for slot, request in zip(slots, step.requests, strict=True)
                    if request.num_computed_tokens == 0
                ]
            )
        context = PagedContext(
            self.decoder.spec,
            self.kv_cache,
            batch.attention,
            self.window_cache,
            self.states,
            slots,
        )
        hidden_states = self.decoder.forward(batch.input_ids, batch.positions, context)
        for source, target in step.state_saves:
            self.states.copy(source, target)
        output = self._sample(
            self.decoder.compute_logits(hidden_states[batch.logits_indices]),
            [request for _, request in step.sampled()],
        )
        found = prompt_rows(step, batch.attention.query_start_loc, self.vocab_size)
        for part in found.slices():
            logits = self.decoder.compute_logits(hidden_states[part.rows])
            numbers = self._logprobs(logits, np.array(part.token_ids), part)
            add_prompt_logprobs(output, part, entries_of(part, *numbers))
        return output

    def now(self) -> float:
        """Seconds on the machine's clock."""
        return time.perf_counter()

    def close(self) -> None:
        """Give back the memory of model and cache."""
        self.decoder = self.kv_cache = self.batch = self.logits = None
        self.window_cache = self.states = None

    def _sample(self, logits: np.ndarray, requests: Sequence[Request]) -> ModelOutput:
        """Choose a token for each request from its scores, [num_sampled, ...]."""
        self.logits = logits = logits[:, : self.vocab_size]
        if not requests:
            return ModelOutput(sampled_token_ids={})
        edited, errors = apply_logits_processors(logits, requests)
        edited = edit(edited, requests)
        token_ids = sample(edited, requests)
        token_logits = logits[np.arange(len(requests)), token_ids]
        results = (token_ids, token_logits, logits.max(axis=-1), edited.max(axis=-1))
        output = to_model_output(requests, *(r.tolist() for r in results), errors)
        found = answer_rows(requests, self.vocab_size)
        if found.rows:
            numbers = self._logprobs(logits[found.rows], token_ids[found.rows], found)
            add_answer_logprobs(output, found, entries_of(found, *numbers))
        return output

    def _logprobs(
        self, logits: np.ndarray, token_ids: np.ndarray, found: LogprobRows
    ) -> list[list[list[float]]]:
        logits = logits[:, : self.vocab_size]
        numbers = logprobs_of(logits, token_ids, found.max_best)
        return [array.tolist() for array in numbers]

    def count_experts(self) -> None:
        """Count from now on how many tokens each expert gets.

        Raises:
            ConfigError: The model has no experts.
        """
        self.expert_counts = self.decoder.count_experts()
