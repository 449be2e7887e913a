"""Named operations with several implementations, and the choice between them.

An op has a reference in plain torch and any number of faster backends, each with a
condition. The first backend that can run is chosen, once per model; why others were
passed over is kept, so that nobody has to guess what runs.

    linear   packed   on the CPU, if this build of torch has it
             torch    always (the reference)

A module that has more backends calls `add_backend` and is listed in `MODULES`.

Invariant: the reference comes last and can always run. `MINIVLLM_OP_LINEAR=packed`
forces a backend: if it cannot run, that is an error, never another backend in silence.

In vLLM: vllm/ir/op.py (IrOp, IrOpImpl).
Source: appendix A6, "The torch runner"; appendix A10, "Compiled operations"; appendix
    A16, "Launching kernels"; chapter 6, "CUDA kernels"; appendix A18, "Small kernels";
    appendix A19, "Sampling kernels"; appendix A20, "Prefill attention"; appendix A26,
    "Kernels for experts"; appendix A28, "Delta nets in torch"; appendix A29, "Kernels
    for delta nets".
"""

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from minivllm.errors import BackendUnavailable, ConfigError


def always(device: str, dtype: str, **sizes: int) -> None:
    """Run anywhere: the condition of a reference."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of an op.

    Attributes:
        name: What the user calls it.
        implementation: Whatever the op's module says its callers get.
        why_not: (device, dtype, and sizes by name if the op has any) -> why it cannot
            run there, or None if it can.
    """

    name: str
    implementation: Any
    why_not: Callable[..., str | None] = always


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that runs an op, and why the ones before it do not."""

    op: str
    backend: Backend
    passed_over: dict[str, str]


OPS: dict[str, list[Backend]] = {}
# Modules with more backends, loaded at the first choice.
MODULES: list[str] = [
    "minivllm.ops.cpu",
    "minivllm.ops.cuda",
    "minivllm.ops.cuda_layers",
    "minivllm.ops.cuda_sampling",
    "minivllm.ops.cuda_prefill",
    "minivllm.ops.cuda_moe",
    "minivllm.ops.delta_net",
    "minivllm.ops.cuda_delta_net",
]


def define_op(op: str, backends: Iterable[Backend]) -> None:
    """Make an op known; its backends best first, the reference last."""
    OPS[op] = list(backends)
    assert OPS[op][-1].why_not is always, f"the last backend of {op} must always run"


def add_backend(op: str, backend: Backend, behind: str | None = None) -> None:
    """Give an op a backend: better than all, or than those behind a named one."""
    names = [None, *(known.name for known in OPS[op])]
    OPS[op].insert(names.index(behind), backend)


def load_backends() -> None:
    """Load all backends, and refuse a variable that forces one of no op.

    Raises:
        ConfigError: Such a variable is set, probably misspelled.
    """
    for module in MODULES:
        import_module(module)
    known = {f"MINIVLLM_OP_{op.upper()}": op for op in OPS}
    for variable in os.environ:
        if variable.startswith("MINIVLLM_OP_"):
            _find(variable, known, "variable")


def choose(op: str, device: str, dtype: str, **sizes: int) -> Choice:
    """Return the first backend of an op that can run, or the one that is forced.

    Args:
        op: A name that `define_op` has made known.
        device: "cpu" or "cuda".
        dtype: Of the activations: "float32", "bfloat16", "float16".
        sizes: What else the conditions of this op ask for.

    Raises:
        BackendUnavailable: The forced backend cannot run.
        ConfigError: There is no op or no backend of that name.
    """
    load_backends()
    backends = {backend.name: backend for backend in _find(op, OPS, "op")}
    variable = f"MINIVLLM_OP_{op.upper()}"
    if forced := os.environ.get(variable):
        backend = _find(forced, backends, f"{variable}: backend")
        if reason := backend.why_not(device, dtype, **sizes):
            raise BackendUnavailable(
                f"{variable} is {forced!r}, but that backend cannot run {op} in "
                f"{dtype} on {device}: {reason}; unset it, or use one of "
                f"{', '.join(backends)}"
            )
        return Choice(op, backend, {})
    passed_over: dict[str, str] = {}
    for name, backend in backends.items():
        reason = backend.why_not(device, dtype, **sizes)
        if reason is None:
            return Choice(op, backend, passed_over)
        passed_over[name] = reason
    raise AssertionError(f"the reference of {op} refused to run: {passed_over}")


def choose_for(op: str, weight: Any, **sizes: int) -> Choice:
    """Return what runs an op on the device and in the dtype of a tensor."""
    dtype = str(weight.dtype).removeprefix("torch.")
    return choose(op, weight.device.type, dtype, **sizes)


def explain(op: str, device: str, dtype: str, **sizes: int) -> dict[str, str]:
    """Tell for each backend of an op whether it runs: "chosen", or why it does not."""
    choice = choose(op, device, dtype, **sizes)
    verdicts = {}
    for backend in OPS[op]:
        reason = backend.why_not(device, dtype, **sizes)
        if backend is choice.backend:
            reason = "chosen"
        verdicts[backend.name] = reason or f"can run, but {choice.backend.name} does"
    return verdicts


def _find(name: str, known: dict[str, Any], kind: str) -> Any:
    if name in known:
        return known[name]
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise ConfigError(
        f"{kind} {name!r} is unknown{hint}: use one of {', '.join(known)}"
    )


def only_if_forced(op: str, why_not: Callable[..., str | None]) -> Callable[..., Any]:
    """Return a condition for a backend that nobody should get without asking for it."""

    def condition(device: str, dtype: str, **sizes: int) -> str | None:
        reason = why_not(device, dtype, **sizes)
        if reason is None and not os.environ.get(f"MINIVLLM_OP_{op.upper()}"):
            return "runs only if it is forced"
        return reason

    return condition


def known_ops() -> list[str]:
    """Return the names of all ops, after loading all of their backends."""
    load_backends()
    return sorted(OPS)
