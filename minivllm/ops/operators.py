"""Make a function that starts kernels an operator of torch.

Torch then knows what it reads, changes and returns without running it: `torch.compile`
keeps it as one step of its graph, and a model can be tried on a device that is not
there (`FakeTensorMode`).

Called by `minivllm.ops.cuda`.

In vLLM: vllm/utils/torch_utils.py (direct_register_custom_op).
Source: appendix A16, "Launching kernels".
"""

from collections.abc import Callable
from typing import Any

import torch

# Qualified name -> what holds the definition: without it, torch forgets the operator.
LIBRARIES: dict[str, torch.library.Library] = {}


def refuse(context: Any, *gradients: Any) -> None:
    """Say that there is no derivative, where torch would go on with none."""
    raise NotImplementedError(
        "this operator of minivllm has no derivative: call it in torch.inference_mode()"
    )


def operator(
    schema: str, fake: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function an operator, on the CPU and on CUDA.

    Args:
        schema: Name and types, in torch's words: "scale(Tensor x) -> Tensor". What is
            changed in place is marked: "add(Tensor(a!) x, Tensor y) -> ()".
        fake: Returns what the function would, of the right shape and type, without
            looking at a number.
    """

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        namespace = function.__module__.partition(".")[0]  # a notebook's is __main__
        name = schema.partition("(")[0]
        qualified_name = f"{namespace}::{name}"
        LIBRARIES.pop(qualified_name, None)  # a cell may be run twice
        library = torch.library.Library(namespace, "FRAGMENT")
        # A kernel takes memory as it lies, so torch.compile must not rearrange it.
        library.define(schema, tags=[torch.Tag.needs_fixed_stride_order])
        for device in ("CPU", "CUDA"):
            library.impl(name, function, device)
        torch.library.register_fake(qualified_name, fake, lib=library)
        if "!" not in schema:  # torch knows no derivatives of what works in place
            torch.library.register_autograd(qualified_name, refuse, lib=library)
        LIBRARIES[qualified_name] = library
        return getattr(getattr(torch.ops, namespace), name).default

    return define
