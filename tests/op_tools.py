"""What tests of ops share: types, how close, and whether kernels can be emulated."""

import pytest
import torch

from minivllm.ops.cuda import why_not_emulated

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

needs_compiler = pytest.mark.skipif(
    why_not_emulated("cpu", "float32") is not None,
    reason=str(why_not_emulated("cpu", "float32")),
)


def assert_close(ours, theirs, units=4):
    """Demand equality up to a few units in the last place of the largest value.

    Both sides round, and sum in their own order: 4 units. Torch's attention in bfloat16
    also rounds its scores and shares: 8 where it is the reference.
    """
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    if theirs.numel():
        allowed = units * torch.finfo(theirs.dtype).eps * theirs.abs().max()
        assert (ours.float() - theirs.float()).abs().max() <= allowed
