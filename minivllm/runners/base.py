"""The one seam between bookkeeping and arithmetic.

In vLLM: vllm/v1/worker/worker_base.py (WorkerBase.execute_model).
Source: appendix A5, "Records"; chapter 8, "Hybrid attention".
"""

from dataclasses import dataclass
from typing import Protocol

from minivllm.request import ModelOutput, SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """What a runner keeps of texts, beside the blocks of all tokens.

    Attributes:
        window: How many tokens the layers see whose blocks are apart; the largest, if
            they differ.
        num_window_blocks: Blocks of these layers; 0 if all layers share the blocks of
            all tokens.
        num_states: Slots for the states of running requests; 0 if no layer has any.
        num_kept_states: Slots for states at the edges of blocks.
    """

    window: int | None = None
    num_window_blocks: int = 0
    num_states: int = 0
    num_kept_states: int = 0


class Runner(Protocol):
    """What the engine needs from whoever computes.

    Attributes:
        vocab_size: Token ids from 0 up to this one, exclusive, may be given.
        max_model_len: Tokens that a request may have, prompt and answer together.
        num_blocks: Blocks of the KV cache.
        block_size: Token slots in a block.
        layout: What there is beside them.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    layout: CacheLayout

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Compute the tokens of a step, and sample where a request has caught up.

        The runner reads the requests and changes none of them.

        Args:
            step: The plan, with at least one request.
        """
        ...

    def now(self) -> float:
        """Seconds on the clock that the engine goes by."""
        ...

    def close(self) -> None:
        """Give back the memory of model and cache."""
        ...
