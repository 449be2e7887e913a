"""What the tests on a GPU share. Without one, each is skipped and says why."""

import pytest

from minivllm.ops.launch import why_no_launch


@pytest.fixture(autouse=True)
def gpu() -> str:
    """Return the name of the device that kernels run on."""
    if reason := why_no_launch():
        pytest.skip(reason)
    return "cuda"
