"""What sampling needs of the requests, and what the engine needs of the samples.

Shared by the runners that compute; they differ only in whose arrays they use.

Source: appendix A5, "Records".
"""

import math
from collections.abc import Sequence

import numpy as np

from minivllm.request import ModelOutput, Request
from minivllm.sampling.uniform import uniform


def sampling_inputs(requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray]:
    """Return the temperature and the random number of each request.

    A request's random number depends on its seed and on how many tokens it has, and on
    nothing else: neither on its neighbours nor on how often it was preempted.

    Returns:
        Temperatures, float64 [num_reqs]; numbers from [0, 1), float64 [num_reqs].
    """
    temperatures = np.array([r.sampling_params.temperature for r in requests], float)
    uniforms = np.array([uniform(r.seed, r.num_output_tokens) for r in requests])
    return temperatures, uniforms


def to_model_output(
    requests: Sequence[Request],
    token_ids: Sequence[int],
    token_logits: Sequence[float],
    largest_logits: Sequence[float],
) -> ModelOutput:
    """Sort one token per request into a `ModelOutput`, unusable scores into its errors.

    Args:
        requests: Those that were sampled.
        token_ids: The token of each.
        token_logits: The score of that token.
        largest_logits: The largest score of its row; NaN if any is.
    """
    output = ModelOutput(sampled_token_ids={}, token_logits={}, errors={})
    rows = zip(requests, token_ids, token_logits, largest_logits, strict=True)
    for request, token_id, logit, largest in rows:
        if not math.isfinite(largest):
            output.errors[request.request_id] = (
                f"the largest logit is {largest}, but must be finite: compute in "
                "float32 or bfloat16, or fetch the weights again if they are damaged"
            )
            continue
        output.sampled_token_ids[request.request_id] = [token_id]
        output.token_logits[request.request_id] = [logit]
    return output
