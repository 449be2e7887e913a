"""What a layer of experts costs, next to a dense layer that reads the same weights.

A few layers are run one after the other, as in a model: together they are too large for
a cache, so weights come from memory.

Called by the command line.

In vLLM: benchmarks/kernels/benchmark_moe.py of its repository.
Source: appendix A25, "Experts in the engine".
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from minivllm.models.decoder import Decoder
from minivllm.models.layers import MLP, MoE
from minivllm.models.merged import (
    DecoderOps,
    MergedMLP,
    MergedMoE,
    choose_ops,
    gather_ops,
)
from minivllm.models.spec import ModelSpec, MoeSpec

NUM_EXPERTS, TOP_K = 4, 2  # of a dense model that is up-cycled
BATCH_SIZES = (1, 4, 16, 64, 256)
CYCLE_BYTES = 2**27  # of weights, of each form: three times that fits into no cache


@dataclass(frozen=True, slots=True)
class ExpertTime:
    """How long a layer takes for a batch, in seconds.

    Attributes:
        num_tokens: In the batch.
        num_touched: Experts that they go to, the mean of the layers.
        grouped_s: The grouped form, that of the engine.
        dense_s: A dense MLP as wide as these experts together.
        loop_s: The loop over experts that chapter 7 begins with.
    """

    num_tokens: int
    num_touched: float
    grouped_s: float
    dense_s: float
    loop_s: float

    @property
    def ratio(self) -> float:
        """Time of the grouped form in times of the dense layer."""
        return self.grouped_s / self.dense_s

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "workload": "moe",
            "tokens": self.num_tokens,
            "experts_touched": round(self.num_touched, 2),
            "grouped_ms": round(self.grouped_s * 1e3, 4),
            "dense_ms": round(self.dense_s * 1e3, 4),
            "loop_ms": round(self.loop_s * 1e3, 4),
        }


def moe_of(spec: ModelSpec) -> MoeSpec:
    """Return the experts of a model; of a dense one, those that it is up-cycled to."""
    return spec.moe or MoeSpec(
        layers=(0,),
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        intermediate_size=spec.intermediate_size,
        norm_topk_prob=True,
    )


def experts_layers(decoder: Decoder, num_bytes: int) -> tuple[ModelSpec, list[MoE]]:
    """Return layers of experts; of a dense model, some that are up-cycled.

    Args:
        decoder: Has the weights.
        num_bytes: How large they are to be together, if there are so many; one at
            least.

    Returns:
        The spec, with experts, and the layers. What is made shares no memory with the
        decoder.
    """
    moe = moe_of(decoder.spec)
    spec = replace(decoder.spec, moe=moe)
    weight = decoder.norm.weight
    size = 3 * moe.num_experts * moe.intermediate_size * spec.hidden_size
    num_layers = max(1, num_bytes // (size * weight.itemsize))
    if decoder.spec.moe is not None:
        chosen = moe.layers[:num_layers]
        return spec, [cast(MoE, decoder.layers[layer].mlp) for layer in chosen]
    mlp = cast(MLP, decoder.layers[0].mlp)
    layers = []
    for number in range(num_layers):
        generator = torch.Generator().manual_seed(number)
        router = torch.randn(moe.num_experts, spec.hidden_size, generator=generator)
        tensors = {"gate.weight": router.to(weight.device, weight.dtype)}
        for expert in range(moe.num_experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                copy = getattr(mlp, name).weight.clone()
                tensors[f"experts.{expert}.{name}.weight"] = copy
        layers.append(make(lambda: MoE(spec, moe), tensors))
    return spec, layers


def make(module: Callable[[], Any], tensors: dict[str, Tensor]) -> Any:
    """Make a module around tensors, without memory of its own."""
    with torch.device("meta"):
        made = module()
    made.load_state_dict(tensors, assign=True)
    return made.requires_grad_(False)


def dense_layer(
    spec: ModelSpec, layer: MoE, touched: Sequence[int], ops: DecoderOps
) -> MergedMLP:
    """Return a dense MLP with the weights of some experts, side by side."""
    experts = [layer.experts[index] for index in touched]
    tensors = {}
    for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        parts = [getattr(expert, name).weight for expert in experts]
        tensors[f"{name}.weight"] = torch.cat(parts, dim=dim)
    size = tensors["gate_proj.weight"].shape[0]
    mlp = make(lambda: MLP(spec, size, has_bias=False), tensors)
    return MergedMLP(mlp, ops)


@torch.inference_mode()
def measure_experts(
    decoder: Decoder,
    num_counted: int,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    note: Callable[[str], None] = lambda text: None,
) -> list[ExpertTime]:
    """Measure a layer of experts with batches of random rows.

    Args:
        decoder: A model with experts, or a dense one, whose first MLP is copied.
        num_counted: Runs of each that count; they take turns.
        batch_sizes: Tokens in a batch.
        note: Is told how far it has come.
    """
    spec, layers = experts_layers(decoder, CYCLE_BYTES)
    weight = layers[0].gate.weight
    ops = gather_ops(choose_ops(spec, weight))
    grouped = [MergedMoE(layer, ops) for layer in layers]
    generator = torch.Generator().manual_seed(1)
    times = []
    for num_tokens in batch_sizes:
        x = torch.randn(num_tokens, spec.hidden_size, generator=generator)
        x = x.to(weight.device, weight.dtype)
        touched = [experts_of(layer, x) for layer in grouped]
        dense = [
            dense_layer(spec, layer, experts, ops)
            for layer, experts in zip(layers, touched, strict=True)
        ]
        medians = take_turns((grouped, dense, layers), x, num_counted)
        num_touched = statistics.fmean(map(len, touched))
        times.append(ExpertTime(num_tokens, num_touched, *medians))
        note(f"{num_tokens} tokens: {times[-1].ratio:.2f} times the dense layer")
    return times


def experts_of(layer: MergedMoE, x: Tensor) -> list[int]:
    """Return the experts that rows go to."""
    _, experts = layer.topk_softmax(layer.gate(x), layer.top_k, layer.norm_topk_prob)
    return experts.unique().tolist()


def take_turns(
    forms: Sequence[Sequence[Callable[[Tensor], Tensor]]], x: Tensor, num_counted: int
) -> list[float]:
    """Return the median seconds of a layer, for each form that layers have."""

    def seconds_of(layers: Sequence[Callable[[Tensor], Tensor]]) -> float:
        synchronize(x.device)
        start = time.perf_counter()
        for layer in layers:
            layer(x)
        synchronize(x.device)
        return (time.perf_counter() - start) / len(layers)

    for layers in forms:
        seconds_of(layers)  # does not count
    turns = [[seconds_of(layers) for layers in forms] for _ in range(num_counted)]
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def experts_table(spec: ModelSpec, times: Sequence[ExpertTime]) -> str:
    """Write the times for people."""
    moe = moe_of(spec)
    lines = [
        f"experts: one layer of {moe.num_experts}, each {moe.intermediate_size:,} "
        f"numbers wide; a token goes to {moe.top_k}",
        "tokens  experts read  grouped, ms  dense, as wide, ms  ratio  loop, ms",
    ]
    for row in times:
        grouped, dense, loop = (
            f"{seconds * 1e3:.3f}"
            for seconds in (row.grouped_s, row.dense_s, row.loop_s)
        )
        lines.append(
            f"{row.num_tokens:6}  {row.num_touched:12.3g}  {grouped:>11}  {dense:>18}  "
            f"{row.ratio:5.2f}  {loop:>8}"
        )
    return "\n".join(lines)
