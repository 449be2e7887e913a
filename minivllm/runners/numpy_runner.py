"""The runner in NumPy: slow, readable, and the oracle for the fast one.

Every array of a step can be printed: `runner.batch` is the last one's input and
`runner.logits` its scores.

Called by the engine. Never imports torch.

Source: chapter 3, "Paging"; chapter 4, "Continuous batching".
"""

import time

import numpy as np

from minivllm.models.spec import ModelSpec
from minivllm.reference.decoder import NumpyDecoder
from minivllm.reference.paged_attention import paged_attention, reshape_and_cache
from minivllm.reference.sampler import sample
from minivllm.request import ModelOutput, SchedulerOutput
from minivllm.runners.attention_metadata import AttentionMetadata, Batch, make_batch
from minivllm.runners.sampling_inputs import sampling_inputs, to_model_output


class PagedContext:
    """Attention over a flat batch, with the keys and values in blocks."""

    def __init__(
        self, spec: ModelSpec, kv_cache: np.ndarray, metadata: AttentionMetadata
    ) -> None:
        """Describe one step.

        Args:
            spec: Whose heads attend.
            kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim];
                the step writes into it.
            metadata: Where its tokens belong.
        """
        self.scale = spec.attention_scale
        self.kv_cache = kv_cache
        self.metadata = metadata

    def attend(
        self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> np.ndarray:
        """Put the new keys and values into their slots, then read all of them."""
        reshape_and_cache(k, v, self.kv_cache[layer], self.metadata.slot_mapping)
        return paged_attention(
            q,
            self.kv_cache[layer],
            self.metadata.query_start_loc,
            self.metadata.seq_lens,
            self.metadata.block_table,
            self.scale,
        )


class NumpyRunner:
    """Computes steps in float32 on the CPU."""

    def __init__(
        self,
        decoder: NumpyDecoder,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        vocab_size: int | None = None,
    ) -> None:
        """Reserve the cache; its memory is taken as blocks are first written.

        Args:
            decoder: The model with its weights.
            num_blocks: Blocks of the KV cache.
            block_size: Token slots in a block.
            max_model_len: Tokens that a request may have.
            vocab_size: Token ids that the tokenizer knows, if fewer than the model
                scores; the others are never sampled.
        """
        spec = decoder.spec
        self.decoder = decoder
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size or spec.vocab_size
        block = (2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.kv_cache = np.zeros((spec.num_layers, *block), dtype=np.float32)
        self.batch: Batch | None = None
        self.logits: np.ndarray | None = None  # [num_sampled, vocab_size]

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Compute the tokens of a step, and sample where a request has caught up."""
        self.batch = batch = make_batch(step, self.block_size)
        context = PagedContext(self.decoder.spec, self.kv_cache, batch.attention)
        hidden_states = self.decoder.forward(batch.input_ids, batch.positions, context)
        requests = [step.requests[index] for index in batch.sampled]
        if not requests:
            return ModelOutput(sampled_token_ids={})
        logits = self.decoder.compute_logits(hidden_states[batch.logits_indices])
        self.logits = logits = logits[:, : self.vocab_size]
        token_ids = sample(logits, *sampling_inputs(requests))
        token_logits = logits[np.arange(len(requests)), token_ids]
        results = (token_ids, token_logits, logits.max(axis=-1))
        return to_model_output(requests, *(array.tolist() for array in results))

    def now(self) -> float:
        """Seconds on the machine's clock."""
        return time.perf_counter()

    def close(self) -> None:
        """Give back the memory of model and cache."""
        self.decoder = self.kv_cache = self.batch = self.logits = None
