"""What a CUDA graph does, on any device: operations, kept with the memory they use."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Keeps the operations that torch is asked for, with the tensors they are given.

    Replayed, each gets the same tensors again, and puts its result where it was: no
    line of Python between them runs. What C++ does without asking torch is not kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape):
            assert tag not in func.tags, f"{func} depends on a value"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @property
    def names(self) -> list[str]:
        """The operations that compute something, in their order."""
        return [str(func) for func, *_ in self.calls if not func.is_view]

    def devices(self) -> set[str]:
        """Where the tensors are that it reads and writes."""
        tensors = tree_leaves([(args, result) for _, args, _, result in self.calls])
        return {x.device.type for x in tensors if isinstance(x, Tensor)}

    def replay(self) -> None:
        """Do it all again."""
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                # Some operations return a view or a copy, as they need.
                if isinstance(old, Tensor) and not torch._C._is_alias_of(old, new):
                    old.copy_(new)


class TapeRecorder:
    """Stands in for `GraphRecorder`, where there is no GPU."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.num_replays = 0

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record a function, and return what replays it."""
        function()
        with Tape() as tape:
            result = function()
        self.tapes.append(tape)

        def replay() -> Tensor:
            self.num_replays += 1
            tape.replay()
            return result

        return replay


class DirectRecorder:
    """Records nothing: what is replayed is called."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return the function, counted."""
        function()

        def replay() -> Tensor:
            self.num_replays += 1
            return function()

        return replay
