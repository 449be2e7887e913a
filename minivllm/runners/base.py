"""The one seam between bookkeeping and arithmetic.

In vLLM: vllm/v1/worker/worker_base.py (WorkerBase.execute_model).
Source: appendix A5, "Records".
"""

from typing import Protocol

from minivllm.request import ModelOutput, SchedulerOutput


class Runner(Protocol):
    """What the engine needs from whoever computes.

    Attributes:
        vocab_size: Token ids from 0 up to this one, exclusive, may be given.
        max_model_len: Tokens that a request may have, prompt and answer together.
        num_blocks: Blocks of the KV cache.
        block_size: Token slots in a block.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int

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
