"""What the tests of sampling share: requests, and both samplers side by side."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from minivllm.ops.draw import draw as draw_in_torch
from minivllm.ops.registry import choose
from minivllm.reference import sampler as reference
from minivllm.request import Request
from minivllm.runners.sampling_inputs import SamplingState
from minivllm.sampling import sampler
from minivllm.sampling.inputs import SamplingInputs
from minivllm.sampling.params import SamplingParams


def make_request(
    output: Sequence[int] = (),
    *,
    prompt: Sequence[int] = (0,),
    seed: int = 0,
    request_id: str = "r",
    bad_words: Sequence[Sequence[int]] = (),
    processors: Sequence = (),
    **params,
) -> Request:
    """Make a request that has generated some tokens."""
    filled = SamplingParams(**params).filled({})
    return Request(
        request_id=request_id,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        sampling_params=filled,
        max_tokens=100,
        seed=seed,
        stop_token_ids=frozenset(filled.stop_token_ids),
        bad_words=tuple(map(tuple, bad_words)),
        logits_processors=tuple(processors),
    )


def tensor_inputs(
    requests: Sequence[Request], vocab_size: int, state: SamplingState | None = None
) -> SamplingInputs:
    """Return the inputs of the torch sampler."""
    inputs = (state or SamplingState(vocab_size)).inputs(requests)
    return inputs.on([torch.from_numpy(array) for array in inputs.arrays()])


def edit_both(logits: np.ndarray, requests: Sequence[Request]) -> np.ndarray:
    """Edit with both samplers, which must agree to the last bit."""
    logits = np.asarray(logits, dtype=np.float32)
    before = logits.copy()
    expected = reference.edit(logits, requests)
    inputs = tensor_inputs(requests, logits.shape[1])
    with sampler.edited(torch.from_numpy(logits), inputs) as edited:
        np.testing.assert_array_equal(edited.numpy(), expected)
        assert edited.numpy().dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(logits, before)
    return expected


def sample_torch(
    logits: np.ndarray,
    requests: Sequence[Request],
    numbers: Sequence[float] | None = None,
    draw: Callable[..., torch.Tensor] = draw_in_torch,
) -> list[int]:
    """Sample with torch, with the requests' own random numbers or with given ones."""
    inputs = tensor_inputs(requests, logits.shape[1])
    if numbers is not None:
        uniforms = torch.tensor(numbers, dtype=torch.float64)[inputs.sampled_rows]
        inputs = dataclasses.replace(inputs, uniforms=uniforms)
    wanted = {"rtol": 0, "atol": 0, "equal_nan": True}
    with sampler.edited(torch.from_numpy(logits), inputs) as edited:
        before = edited.clone()
        largest, token_ids = sampler.sample(edited, inputs, draw=draw)
        torch.testing.assert_close(edited, before, **wanted)
    torch.testing.assert_close(largest, before.amax(-1), **wanted)
    return token_ids.tolist()


def sample_compiled(
    logits: np.ndarray,
    requests: Sequence[Request],
    numbers: Sequence[float] | None = None,
) -> list[int]:
    """Sample with the compiled op `draw`; with torch's where there is no compiler."""
    choice = choose("draw", "cpu", "float32")
    return sample_torch(logits, requests, numbers, choice.backend.implementation)


def sample_numpy(
    logits: np.ndarray,
    requests: Sequence[Request],
    numbers: Sequence[float] | None = None,
) -> list[int]:
    """Sample with NumPy, with the requests' own random numbers or with given ones."""
    if numbers is None:
        return reference.sample(reference.edit(logits, requests), requests).tolist()
    rows = zip(logits, requests, numbers, strict=True)
    return [reference.sample_row(*row) for row in rows]


def sample_both(
    logits: np.ndarray,
    requests: Sequence[Request],
    numbers: Sequence[float] | None = None,
) -> list[int]:
    """Sample with both, which must agree."""
    logits = np.asarray(logits, dtype=np.float32)
    token_ids = sample_numpy(logits, requests, numbers)
    assert sample_torch(logits, requests, numbers) == token_ids
    assert sample_compiled(logits, requests, numbers) == token_ids
    return token_ids


def choices(
    logits: Sequence[float], request: Request, numbers: Sequence[float]
) -> list[int]:
    """Return what one request chooses at each random number, as rows of a batch."""
    rows = np.tile(np.asarray(logits, dtype=np.float32), (len(numbers), 1))
    return sample_both(rows, [request] * len(numbers), numbers)
