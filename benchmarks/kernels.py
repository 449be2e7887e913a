"""Time every kernel on a GPU, beside torch and a copy of memory.

python -m benchmarks.kernels                 # some minutes
python -m benchmarks.kernels --ops rms_norm  # a part of it, to look at

Prints a table, and writes it to benchmarks/results/gpu-<device>.json if it is complete.

What the kernels do is limited by memory. So each job counts the bytes that have to be
moved at least, each input read once and each output written once, and a rung is told
by the GB/s that it would move if it moved no more. The ceiling is what a plain copy
reaches. (That of arithmetic is measured, too, to show how far away it is: far, but for
the attention of prompts.) Inputs and outputs are cold: a job has several copies of
them, more than the cache of the GPU holds, and takes them in turn. Calls are recorded
in a CUDA graph and replayed, so that the time in which Python starts kernels is not
measured.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import minivllm
from minivllm.ops import (
    cuda_delta_net,
    cuda_layers,
    cuda_moe,
    cuda_prefill,
    cuda_sampling,
    delta_net,
    moe,
    reference,
    rungs,
)
from minivllm.ops.draw import draw as draw_in_torch
from minivllm.ops.launch import KernelFile, why_no_launch
from minivllm.ops.paged_attention import PaddedAttention

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EPS = 1e-5
NUM_COUNTED = 5
REPLAYS_S = 0.02  # of each counted measurement
SLOW_S = 1.0  # of all counted ones: the naive rungs get fewer
MAX_COPIES = 256
COPY_BYTES = 2**30
MATMUL_SIZE = 8192

Record = dict[str, Any]
Call = Callable[[], Tensor]
TimeCalls = Callable[[Sequence[Call]], float]  # -> seconds of one of the calls


@dataclass(frozen=True, slots=True)
class Job:
    """One op on inputs of one size, to be done by each rung and by torch.

    Attributes:
        op: Its name.
        dtype: Of the elements.
        sizes: For the report.
        num_bytes: To be moved at least.
        make: Makes inputs, and returns what does the job on them: version -> call.
    """

    op: str
    dtype: torch.dtype
    sizes: dict[str, int]
    num_bytes: int
    make: Callable[[], dict[str, Call]]


def norm_job(
    dtype: torch.dtype, num_rows: int, hidden: int, device: str, is_fused: bool
) -> Job:
    """Return the normalisation of some rows, with or without the addition."""
    kernels = KernelFile("rms_norm.cu")

    def make() -> dict[str, Call]:
        x, residual = torch.randn(2, num_rows, hidden, device=device).to(dtype)
        weight = torch.ones(hidden, dtype=dtype, device=device)
        out = torch.empty_like(x)

        def run(version: str) -> Tensor:
            rungs.rms_norm(kernels, version, out, x, weight, EPS)
            return out

        def add_and_run(version: str) -> Tensor:
            if version == "v5":
                arguments = (kernels, version, out, residual, x, weight, EPS)
                rungs.fused_add_rms_norm(*arguments)
            else:  # what the fusion replaces
                residual.add_(x)
                rungs.rms_norm(kernels, version, out, residual, weight, EPS)
            return out

        def run_torch() -> Tensor:
            rows = residual.add_(x) if is_fused else x
            return F.rms_norm(rows, (hidden,), weight, EPS)

        versions = ["v4", "v5"] if is_fused else ["v1", "v2", "v3", "v4"]
        do = add_and_run if is_fused else run
        calls: dict[str, Call] = {v: lambda v=v: do(v) for v in versions}
        return calls | {"torch": run_torch}

    num_arrays = 4 if is_fused else 2  # read and written
    return Job(
        op="fused_add_rms_norm" if is_fused else "rms_norm",
        dtype=dtype,
        sizes={"num_rows": num_rows, "hidden": hidden},
        num_bytes=dtype.itemsize * (num_arrays * num_rows * hidden + hidden),
        make=make,
    )


def softmax_job(dtype: torch.dtype, num_rows: int, size: int, device: str) -> Job:
    """Return the softmax of some rows."""
    kernels = KernelFile("softmax.cu")

    def make() -> dict[str, Call]:
        x = torch.randn(num_rows, size, device=device).to(dtype)
        out = torch.empty_like(x)

        def run(version: str) -> Tensor:
            rungs.softmax(kernels, version, out, x)
            return out

        versions = ["v1", "v2", "v3", "v4"]
        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in versions}
        return calls | {"torch": lambda: torch.softmax(x, -1, out=out)}

    return Job(
        op="softmax",
        dtype=dtype,
        sizes={"num_rows": num_rows, "size": size},
        num_bytes=dtype.itemsize * 2 * num_rows * size,
        make=make,
    )


def attention_job(
    dtype: torch.dtype,
    num_reqs: int,
    num_keys: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: str,
    block_size: int = 16,
) -> Job:
    """Return the attention of one query per request to keys in scattered blocks."""
    kernels = KernelFile("paged_attention.cu")
    width = -(-num_keys // block_size)
    num_blocks = num_reqs * width

    def make() -> dict[str, Call]:
        shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
        kv_cache = torch.randn(shape, device=device, dtype=dtype)
        q = torch.randn(num_reqs, num_heads, head_dim, device=device, dtype=dtype)
        out = torch.empty_like(q)
        rows = torch.arange(num_reqs, device=device)
        block_table = torch.randperm(num_blocks, device=device).view(num_reqs, width)
        seq_lens = torch.full((num_reqs,), num_keys, device=device)
        tables = [x.int() for x in (rows, block_table, seq_lens)]
        scale = head_dim**-0.5
        last = (seq_lens - 1).unsqueeze(-1)
        group = num_heads // num_kv_heads
        padded = PaddedAttention(rows.unsqueeze(-1), last, block_table, kv_cache, group)

        def run(version: str) -> Tensor:
            rungs.paged_attention(kernels, version, out, q, kv_cache, *tables, scale)
            return out

        versions = ["v1", "v2", "v3", "v4"]
        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in versions}
        return calls | {"torch": lambda: padded.attend(q, kv_cache, scale)}

    keys_and_values = 2 * num_reqs * num_keys * num_kv_heads * head_dim
    queries_and_out = 2 * num_reqs * num_heads * head_dim
    return Job(
        op="paged_attention",
        dtype=dtype,
        sizes={
            "num_reqs": num_reqs,
            "num_keys": num_keys,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        },
        num_bytes=dtype.itemsize * (keys_and_values + queries_and_out),
        make=make,
    )


def rotary_job(
    dtype: torch.dtype, num_tokens: int, num_heads: int, head_dim: int, device: str
) -> Job:
    """Return the rotation of all heads of some tokens."""
    kernels = KernelFile("rotary.cu")

    def make() -> dict[str, Call]:
        heads = torch.randn(num_tokens, num_heads, head_dim, device=device).to(dtype)
        angles = torch.rand(num_tokens, 1, head_dim // 2, device=device) * 100
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        arguments = (heads, num_heads, cos, sin)

        def run() -> Tensor:
            cuda_layers.launch_rotary_embedding(kernels, *arguments)
            return heads

        def run_torch() -> Tensor:
            return reference.rotary_embedding(*arguments)

        return {"rotary_embedding": run, "torch": run_torch}

    numbers = 2 * num_tokens * num_heads * head_dim * dtype.itemsize
    return Job(
        op="rotary_embedding",
        dtype=dtype,
        sizes={"num_tokens": num_tokens, "num_heads": num_heads, "head_dim": head_dim},
        num_bytes=numbers + num_tokens * head_dim * 4,  # half of both tables of angles
        make=make,
    )


def argmax_job(num_rows: int, vocab_size: int, device: str) -> Job:
    """Return the best tokens of some rows of scores."""
    kernels = KernelFile("argmax.cu")

    def make() -> dict[str, Call]:
        logits = torch.randn(num_rows, vocab_size, device=device)
        largest = logits.new_empty(num_rows)
        ids = logits.new_empty(num_rows, dtype=torch.int64)

        def run(version: str) -> Tensor:
            cuda_sampling.argmax(kernels, version, largest, ids, logits)
            return ids

        versions = ["v1", "v2", "v3"]
        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in versions}
        return calls | {"torch": lambda: logits.max(dim=-1).indices}

    return Job(
        op="argmax",
        dtype=torch.float32,
        sizes={"num_rows": num_rows, "vocab_size": vocab_size},
        num_bytes=num_rows * (4 * vocab_size + 12),
        make=make,
    )


def draw_job(
    num_rows: int, vocab_size: int, top_k: int, top_p: float, device: str
) -> Job:
    """Return a token for each of some rows.

    With cuts, each rung is one of the cuts, followed by the best rung of the draw.
    """
    cut_kernels, kernels = KernelFile("cut.cu"), KernelFile("draw.cu")
    has_cuts = top_k < vocab_size or top_p < 1
    num_cut = num_rows if has_cuts else 0

    def make() -> dict[str, Call]:
        logits = torch.randn(num_rows, vocab_size, device=device) * 4
        rows = torch.arange(num_rows, device=device)
        numbers = {"dtype": torch.float64, "device": device}
        temperatures = torch.ones(num_rows, **numbers)
        uniforms = torch.rand(num_rows, **numbers)
        requests = (logits, logits.amax(dim=-1), rows, temperatures)
        limits = (
            torch.zeros(num_cut, **numbers),
            torch.full((num_cut,), top_k, device=device),
            torch.full((num_cut,), top_p, **numbers),
        )
        last_ids, drawn = torch.empty_like(limits[1]), torch.empty_like(rows)

        def run(version: str) -> Tensor:
            of_draw = "v3" if has_cuts else version
            cuda_sampling.cut(cut_kernels, version, last_ids, *requests, *limits)
            cuda_sampling.draw(kernels, of_draw, drawn, *requests, uniforms, last_ids)
            return drawn

        versions = ["v1", "v2", "v3"]
        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in versions}
        return calls | {"torch": lambda: draw_in_torch(*requests, uniforms, *limits)}

    return Job(
        op="cut_and_draw" if has_cuts else "draw",
        dtype=torch.float32,
        sizes={"num_rows": num_rows, "vocab_size": vocab_size, "top_k": top_k},
        num_bytes=4 * num_rows * vocab_size,
        make=make,
    )


def activation_job(dtype: torch.dtype, num_rows: int, size: int, device: str) -> Job:
    """Return act(gate) * up of some rows; all activations move the same bytes."""
    kernels = KernelFile("activations.cu")

    def make() -> dict[str, Call]:
        gate_up = torch.randn(num_rows, 2 * size, device=device).to(dtype)
        out = torch.empty(num_rows, size, dtype=dtype, device=device)

        def run(activation: str) -> Tensor:
            cuda_layers.launch_act_and_mul(kernels, out, gate_up, activation)
            return out

        names = list(cuda_layers.KINDS)
        calls: dict[str, Call] = {n: lambda n=n: run(n) for n in names}
        return calls | {"torch": lambda: reference.silu_and_mul(gate_up)}

    return Job(
        op="act_and_mul",
        dtype=dtype,
        sizes={"num_rows": num_rows, "size": size},
        num_bytes=dtype.itemsize * 3 * num_rows * size,
        make=make,
    )


def mlp_job(
    dtype: torch.dtype, num_rows: int, hidden: int, size: int, device: str
) -> Job:
    """Return the first half of a gated MLP."""
    kernels = KernelFile("gated_mlp.cu")

    def make() -> dict[str, Call]:
        x = torch.randn(num_rows, hidden, device=device).to(dtype)
        weight = torch.randn(2 * size, hidden, device=device) / hidden**0.5
        weight = weight.to(dtype)
        out = torch.empty(num_rows, size, dtype=dtype, device=device)

        def run() -> Tensor:
            cuda_layers.launch_gated_mlp(kernels, out, x, weight, "silu")
            return out

        def run_torch() -> Tensor:
            return reference.silu_and_mul(F.linear(x, weight))

        return {"gated_mlp": run, "torch": run_torch}

    weights, rows = 2 * size * hidden, num_rows * (hidden + size)
    return Job(
        op="gated_mlp",
        dtype=dtype,
        sizes={"num_rows": num_rows, "hidden": hidden, "size": size},
        num_bytes=dtype.itemsize * (weights + rows),
        make=make,
    )


def embedding_job(dtype: torch.dtype, num_tokens: int, size: int, device: str) -> Job:
    """Return rows of a table, each another one."""
    kernels = KernelFile("embedding.cu")

    def make() -> dict[str, Call]:
        table = torch.randn(4 * num_tokens, size, device=device).to(dtype)
        token_ids = torch.randperm(len(table), device=device)[:num_tokens]
        out = torch.empty(num_tokens, size, dtype=dtype, device=device)

        def run() -> Tensor:
            cuda_layers.launch_embedding(kernels, out, token_ids, table)
            return out

        return {"embedding": run, "torch": lambda: F.embedding(token_ids, table)}

    return Job(
        op="embedding",
        dtype=dtype,
        sizes={"num_tokens": num_tokens, "size": size},
        num_bytes=num_tokens * (dtype.itemsize * 2 * size + 8),
        make=make,
    )


def cache_job(
    dtype: torch.dtype, num_tokens: int, num_kv_heads: int, head_dim: int, device: str
) -> Job:
    """Return keys and values that go to slots anywhere."""
    kernels = KernelFile("reshape_and_cache.cu")

    def make() -> dict[str, Call]:
        k, v = torch.randn(2, num_tokens, num_kv_heads, head_dim, device=device)
        k, v = k.to(dtype), v.to(dtype)
        shape = (2, num_tokens, 4, num_kv_heads, head_dim)
        kv_cache = torch.zeros(shape, dtype=dtype, device=device)
        slots = torch.randperm(4 * num_tokens, device=device)[:num_tokens]

        def run() -> Tensor:
            cuda_layers.launch_reshape_and_cache(kernels, k, v, kv_cache, slots)
            return kv_cache

        def run_torch() -> Tensor:
            reference.reshape_and_cache(k, v, kv_cache, slots)
            return kv_cache

        return {"reshape_and_cache": run, "torch": run_torch}

    numbers = 2 * num_tokens * num_kv_heads * head_dim
    return Job(
        op="reshape_and_cache",
        dtype=dtype,
        sizes={
            "num_tokens": num_tokens,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        },
        num_bytes=2 * numbers * dtype.itemsize + 8 * num_tokens,
        make=make,
    )


def prefill_job(
    dtype: torch.dtype,
    num_reqs: int,
    num_queries: int,
    num_keys: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: str,
    block_size: int = 16,
) -> Job:
    """Return the attention of a chunk of some prompts, the last queries of each."""
    kernels = KernelFile("prefill_attention.cu")
    width = -(-num_keys // block_size)
    num_blocks = num_reqs * width

    def make() -> dict[str, Call]:
        shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
        kv_cache = torch.randn(shape, device=device, dtype=dtype)
        shape = (num_reqs * num_queries, num_heads, head_dim)
        q = torch.randn(shape, device=device, dtype=dtype)
        out = torch.empty_like(q)
        block_table = torch.randperm(num_blocks, device=device).view(num_reqs, width)
        rows = torch.arange(len(q), device=device).view(num_reqs, num_queries)
        last_keys = torch.arange(num_keys - num_queries, num_keys, device=device)
        positions = last_keys.repeat(num_reqs, 1)
        seq_lens = torch.full((num_reqs,), num_keys, device=device)
        tables = [rows[:, 0], rows[:, -1] + 1, block_table, seq_lens]
        tables = [x.int() for x in tables]
        scale = head_dim**-0.5
        group = num_heads // num_kv_heads
        padded = PaddedAttention(rows, positions, block_table, kv_cache, group)

        def run(version: str) -> Tensor:
            arguments = (kernels, version, out, q, kv_cache, *tables)
            cuda_prefill.prefill_attention(*arguments, num_queries, scale)
            return out

        best = cuda_prefill.best_version(head_dim, dtype, q.device)
        versions = [v for v in ("v1", "v2", "v3", "v4") if v <= best]
        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in versions}
        return calls | {"torch": lambda: padded.attend(q, kv_cache, scale)}

    keys_and_values = 2 * num_reqs * num_keys * num_kv_heads * head_dim
    queries_and_out = 2 * num_reqs * num_queries * num_heads * head_dim
    return Job(
        op="prefill_attention",
        dtype=dtype,
        sizes={
            "num_reqs": num_reqs,
            "num_queries": num_queries,
            "num_keys": num_keys,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        },
        num_bytes=dtype.itemsize * (keys_and_values + queries_and_out),
        make=make,
    )


def choose_experts(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    """Return different experts for each token, the same at every call, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    return scores.topk(top_k).indices


def topk_job(
    dtype: torch.dtype, num_tokens: int, num_experts: int, top_k: int, device: str
) -> Job:
    """Return the choice of experts."""
    kernels = KernelFile("topk_softmax.cu")

    def make() -> dict[str, Call]:
        logits = torch.randn(num_tokens, num_experts, device=device).to(dtype)
        weights = torch.empty(num_tokens, top_k, device=device)
        experts = torch.empty_like(weights, dtype=torch.int64)

        def run(version: str) -> Tensor:
            given = (kernels, version, weights, experts, logits)
            cuda_moe.topk_softmax(*given, renormalize=True)
            return weights

        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in ("v1", "v2")}
        return calls | {"torch": lambda: moe.topk_softmax(logits, top_k, True)[0]}

    return Job(
        op="topk_softmax",
        dtype=dtype,
        sizes={"num_tokens": num_tokens, "num_experts": num_experts, "top_k": top_k},
        num_bytes=num_tokens * (dtype.itemsize * num_experts + 12 * top_k),
        make=make,
    )


def permute_job(num_tokens: int, num_experts: int, top_k: int, device: str) -> Job:
    """Return the order of some choices."""
    kernels = KernelFile("moe_permute.cu")

    def make() -> dict[str, Call]:
        experts = choose_experts(num_tokens, num_experts, top_k).to(device)
        order = torch.empty_like(experts.flatten())
        offsets = order.new_empty(num_experts + 1, dtype=torch.int32)

        def run(version: str) -> Tensor:
            cuda_moe.moe_permute(kernels, version, order, offsets, experts)
            return order

        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in ("v1", "v2", "v3")}
        return calls | {"torch": lambda: moe.moe_permute(experts, num_experts)[0]}

    return Job(
        op="moe_permute",
        dtype=torch.int64,
        sizes={"num_tokens": num_tokens, "num_experts": num_experts, "top_k": top_k},
        num_bytes=16 * num_tokens * top_k + 4 * (num_experts + 1),
        make=make,
    )


def grouped_job(
    dtype: torch.dtype,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    in_size: int,
    out_size: int,
    device: str,
) -> Job:
    """Return the products of all experts; torch is told how many rows each has."""
    kernels = KernelFile("grouped_linear.cu")
    experts = choose_experts(num_tokens, num_experts, top_k)
    _, offsets_on_cpu = moe.moe_permute(experts, num_experts)
    num_rows, bounds = experts.numel(), offsets_on_cpu.tolist()

    def make() -> dict[str, Call]:
        offsets = offsets_on_cpu.to(device)
        x = torch.randn(num_rows, in_size, device=device).to(dtype)
        weight = torch.empty(
            num_experts, out_size, in_size, dtype=dtype, device=device
        ).normal_(std=in_size**-0.5)
        out = x.new_empty(num_rows, out_size)

        def run(version: str) -> Tensor:
            cuda_moe.grouped_linear(kernels, version, out, x, weight, offsets)
            return out

        def run_torch() -> Tensor:
            for expert, (begin, end) in enumerate(pairwise(bounds)):
                if begin < end:
                    torch.mm(x[begin:end], weight[expert].T, out=out[begin:end])
            return out

        best = cuda_moe.best_grouped_version(dtype, x.device)
        versions = [v for v in ("v1", "v2", "v3", "v4") if v <= best]
        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in versions}
        return calls | {"torch": run_torch}

    num_touched = int(offsets_on_cpu.diff().count_nonzero())
    weights, rows = num_touched * out_size * in_size, num_rows * (in_size + out_size)
    return Job(
        op="grouped_linear",
        dtype=dtype,
        sizes={
            "num_tokens": num_tokens,
            "num_experts": num_experts,
            "top_k": top_k,
            "in_size": in_size,
            "out_size": out_size,
        },
        num_bytes=dtype.itemsize * (weights + rows) + 4 * (num_experts + 1),
        make=make,
    )


def combine_job(
    dtype: torch.dtype, num_tokens: int, top_k: int, size: int, device: str
) -> Job:
    """Return the sums of what experts say."""
    kernels = KernelFile("moe_combine.cu")
    num_rows = num_tokens * top_k

    def make() -> dict[str, Call]:
        y = torch.randn(num_rows, size, device=device).to(dtype)
        order = torch.randperm(num_rows, device=device)
        weights = torch.rand(num_tokens, top_k, device=device)
        out = y.new_empty(num_tokens, size)

        def run(version: str) -> Tensor:
            cuda_moe.moe_combine(kernels, version, out, y, order, weights)
            return out

        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in ("v1", "v2")}
        return calls | {"torch": lambda: moe.moe_combine(y, order, weights)}

    return Job(
        op="moe_combine",
        dtype=dtype,
        sizes={"num_tokens": num_tokens, "top_k": top_k, "size": size},
        num_bytes=dtype.itemsize * (num_rows + num_tokens) * size + 12 * num_rows,
        make=make,
    )


def texts_of(num_texts: int, num_tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Return a slot for each of some texts, in no order, and their first rows."""
    slots = torch.randperm(num_texts, device=device)
    starts = torch.arange(num_texts + 1, device=device, dtype=torch.int32)
    return slots, starts * num_tokens


def conv_job(
    dtype: torch.dtype,
    num_texts: int,
    num_tokens: int,
    conv_size: int,
    kernel_size: int,
    device: str,
) -> Job:
    """Return the convolution of so many new tokens of each text."""
    kernels = KernelFile("causal_conv1d.cu")
    num_rows, num_kept = num_texts * num_tokens, kernel_size - 1

    def make() -> dict[str, Call]:
        x = torch.randn(num_rows, conv_size, device=device).to(dtype)
        weight = torch.randn(conv_size, kernel_size, device=device).to(dtype)
        states = torch.randn(num_texts, conv_size, num_kept, device=device).to(dtype)
        tables = texts_of(num_texts, num_tokens, device)
        y = torch.empty_like(x)

        def run(version: str) -> Tensor:
            given = (kernels, version, y, states, x, weight, *tables)
            cuda_delta_net.causal_conv1d(*given)
            return y

        def run_torch() -> Tensor:
            return delta_net.causal_conv1d(x, weight, states, *tables)

        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in ("v1", "v2", "v3")}
        return calls | {"torch": run_torch}

    # States are read and written, as are rows.
    numbers = (2 * num_rows + 2 * num_texts * num_kept + kernel_size) * conv_size
    return Job(
        op="causal_conv1d",
        dtype=dtype,
        sizes={
            "num_texts": num_texts,
            "num_tokens": num_tokens,
            "conv_size": conv_size,
            "kernel_size": kernel_size,
        },
        num_bytes=dtype.itemsize * numbers + 12 * num_texts + 4,
        make=make,
    )


def rule_job(
    dtype: torch.dtype,
    num_texts: int,
    num_tokens: int,
    num_key_heads: int,
    num_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    device: str,
) -> Job:
    """Return the delta rule for so many new tokens of each text; one is a decode step.

    The states change from call to call. They stay bounded: what is written replaces a
    part of what is there.
    """
    is_decode = num_tokens == 1
    op = "recurrent_delta_rule" if is_decode else "chunked_delta_rule"
    kernels, num_rows = KernelFile(f"{op}.cu"), num_texts * num_tokens

    def make() -> dict[str, Call]:
        shape = (num_rows, num_key_heads, key_head_dim)
        q, k = torch.randn(2, *shape, device=device).to(dtype)
        v = torch.randn(num_rows, num_heads, value_head_dim, device=device).to(dtype)
        log_decay = -torch.rand(num_rows, num_heads, device=device)
        beta = torch.rand(num_rows, num_heads, device=device)
        shape = (num_texts, num_heads, key_head_dim, value_head_dim)
        states = torch.randn(shape, device=device)
        slots, starts = texts_of(num_texts, num_tokens, device)
        out, rows = torch.empty_like(v), (q, k, v, log_decay, beta)

        def run(version: str) -> Tensor:
            given = (kernels, version, out, states, *rows, slots)
            if is_decode:
                cuda_delta_net.recurrent_delta_rule(*given)
            else:
                cuda_delta_net.chunked_delta_rule(*given, starts)
            return out

        def run_torch() -> Tensor:
            if is_decode:
                return delta_net.recurrent_delta_rule(*rows, states, slots)
            lengths = [num_tokens] * num_texts
            return delta_net.chunked_delta_rule(*rows, states, slots, starts, lengths)

        versions = ("v1", "v2", "v3") if is_decode else ("v1", "v2")
        calls: dict[str, Call] = {v: lambda v=v: run(v) for v in versions}
        return calls | {"torch": run_torch}

    of_keys, of_values = num_key_heads * key_head_dim, num_heads * value_head_dim
    rows_bytes = num_rows * (dtype.itemsize * 2 * (of_keys + of_values) + 8 * num_heads)
    states_bytes = 2 * 4 * num_texts * key_head_dim * of_values  # read and written
    tables_bytes = 8 * num_texts + (0 if is_decode else 4 * (num_texts + 1))
    return Job(
        op=op,
        dtype=dtype,
        sizes={
            "num_texts": num_texts,
            "num_tokens": num_tokens,
            "num_key_heads": num_key_heads,
            "num_heads": num_heads,
            "key_head_dim": key_head_dim,
            "value_head_dim": value_head_dim,
        },
        num_bytes=rows_bytes + states_bytes + tables_bytes,
        make=make,
    )


def delta_net_jobs(device: str, dtype: torch.dtype) -> Iterator[Job]:
    """Yield the ops on states of a delta net, at sizes of Qwen3.5-9B."""
    for num_texts, num_tokens in ((1, 1), (16, 1), (64, 1), (1, 4096), (8, 512)):
        yield conv_job(dtype, num_texts, num_tokens, 8192, 4, device)
        yield rule_job(dtype, num_texts, num_tokens, 16, 32, 128, 128, device)


def expert_jobs(device: str, dtype: torch.dtype) -> Iterator[Job]:
    """Yield the steps of a layer of experts, at sizes of Qwen3-30B-A3B."""
    num_experts, top_k, hidden, size = 128, 8, 2048, 768
    for num_tokens in (1, 16, 4096):
        chosen = (num_tokens, num_experts, top_k)
        yield topk_job(dtype, *chosen, device)
        yield permute_job(*chosen, device)
        yield grouped_job(dtype, *chosen, hidden, 2 * size, device)
        yield grouped_job(dtype, *chosen, size, hidden, device)
        yield combine_job(dtype, num_tokens, top_k, hidden, device)


def layer_jobs(device: str, dtype: torch.dtype) -> Iterator[Job]:
    """Yield the small kernels of a layer, at sizes of the same two models."""
    models = (
        {"heads": (12, 64), "hidden": 576, "size": 1536, "kv": (3, 64)},
        {"heads": (40, 128), "hidden": 4096, "size": 14_336, "kv": (8, 128)},
    )
    for model in models:
        hidden, size = model["hidden"], model["size"]
        for num_tokens in (1, 16, 4096):
            yield rotary_job(dtype, num_tokens, *model["heads"], device)
            yield activation_job(dtype, num_tokens, size, device)
            yield embedding_job(dtype, num_tokens, hidden, device)
            yield cache_job(dtype, num_tokens, *model["kv"], device)
        for num_rows in (1, 2, 4, 8, 16, 32):
            yield mlp_job(dtype, num_rows, hidden, size, device)


def all_jobs(device: str, dtype: torch.dtype) -> Iterator[Job]:
    """Yield what is measured: sizes of SmolLM2-135M, and of a model of 8 billion."""
    for kind in (dtype, torch.float32):
        for num_rows, hidden in ((1, 576), (4096, 576), (1, 4096), (4096, 4096)):
            for is_fused in (False, True):
                yield norm_job(kind, num_rows, hidden, device, is_fused)
        for num_rows, size in ((8192, 64), (4096, 1024), (16, 49_152), (64, 128_256)):
            yield softmax_job(kind, num_rows, size, device)
    for heads in ((9, 3, 64), (32, 8, 128)):
        for num_reqs, num_keys in ((1, 512), (1, 8192), (16, 512), (64, 2048)):
            yield attention_job(dtype, num_reqs, num_keys, *heads, device)
        for num_reqs, num_queries, num_keys in ((1, 2048, 2048), (8, 256, 2048)):
            chunk = (num_reqs, num_queries, num_keys)
            yield prefill_job(dtype, *chunk, *heads, device)
    yield from layer_jobs(device, dtype)
    yield from expert_jobs(device, dtype)
    yield from delta_net_jobs(device, dtype)
    for num_rows, size in ((1, 49_152), (64, 49_152), (16, 128_256)):
        yield argmax_job(num_rows, size, device)
        yield draw_job(num_rows, size, size, 1.0, device)
        yield draw_job(num_rows, size, 50, 0.9, device)


def time_calls(calls: Sequence[Call]) -> float:
    """Return the seconds that one of some calls takes on the GPU: a median.

    They are recorded in a graph; their kernels have to be loaded.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]  # kept, so that none reuses another's
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(num: int) -> float:
        start.record()
        for _ in range(num):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / num / len(calls)

    replay(1)
    replay_s = replay(1) * len(calls)
    num = max(1, int(REPLAYS_S / replay_s))
    num_counted = min(NUM_COUNTED, max(1, int(SLOW_S / (num * replay_s))))
    seconds = statistics.median(replay(num) for _ in range(num_counted))
    del results
    return seconds


def measure(job: Job, cache_bytes: int, time_calls: TimeCalls) -> list[Record]:
    """Time each rung, and torch, on a job.

    Args:
        job: What to do.
        cache_bytes: Of the GPU; the inputs are to be colder than that.
        time_calls: The clock.

    Returns:
        For each rung its time, the GB/s that it would move if it moved no more than it
        has to, and its speed as a multiple of torch's.
    """
    num_copies = min(MAX_COPIES, -(-2 * cache_bytes // job.num_bytes)) + 1
    copies = [job.make() for _ in range(num_copies)]
    seconds = {}
    for rung in copies[0]:
        calls = [copy[rung] for copy in copies]
        calls[0]()  # compiles and loads it
        seconds[rung] = time_calls(calls)
    return [
        {
            "op": job.op,
            "rung": rung,
            "dtype": name_of(job.dtype),
            "shape": job.sizes,
            "median_us": seconds[rung] * 1e6,
            "bytes": job.num_bytes,
            "gb_per_s": job.num_bytes / seconds[rung] / 1e9,
            "of_torch": seconds["torch"] / seconds[rung],
        }
        for rung in copies[0]
    ]


def name_of(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def copy_gb_s(device: str, time_calls: TimeCalls, num_bytes: int = COPY_BYTES) -> float:
    """Return how fast a plain copy reads and writes memory."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * num_bytes / time_calls([lambda: target.copy_(source)]) / 1e9


def matmul_tflop_s(
    device: str, dtype: torch.dtype, time_calls: TimeCalls, size: int = MATMUL_SIZE
) -> float:
    """Return how fast torch multiplies two square matrices."""
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    left @ right  # loads what it needs
    return 2 * size**3 / time_calls([lambda: left @ right]) / 1e12


def run(
    jobs: Sequence[Job],
    device: str,
    cache_bytes: int,
    time_calls: TimeCalls,
    note: Callable[[str], None] = print,
) -> Record:
    """Measure the ceilings, then all jobs, each rung as a share of what a copy moves.

    A job that the memory of the GPU is too small for is left out, and named.
    """
    copy = copy_gb_s(device, time_calls)
    note(f"a copy moves {copy:.0f} GB/s")
    matmuls = {}
    for dtype in dict.fromkeys(job.dtype for job in jobs):
        matmuls[name_of(dtype)] = matmul_tflop_s(device, dtype, time_calls)
        note(f"a product makes {matmuls[name_of(dtype)]:.0f} TFLOP/s in {dtype}")
    rows: list[Record] = []
    left_out: list[Record] = []
    for job in jobs:
        try:
            measured = measure(job, cache_bytes, time_calls)
        except torch.OutOfMemoryError:
            left_out.append({"op": job.op, "shape": job.sizes})
            note(f"too large for this GPU: {left_out[-1]}")
            continue
        for row in measured:
            row["of_ceiling"] = row["gb_per_s"] / copy
            rows.append(row)
            note(line_of(row))
    ceilings = {"copy_gb_per_s": copy, "matmul_tflop_per_s": rounded(matmuls)}
    return {
        "ceilings": rounded(ceilings),
        "rows": [rounded(row) for row in rows],
        "left_out": left_out,
    }


def rounded(record: Record) -> Record:
    """Keep as many digits as were measured."""
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in record.items()
    }


def line_of(row: Record) -> str:
    """Write a result in one line."""
    shape = " x ".join(map(str, row["shape"].values()))
    return (
        f"{row['op']:18} {row['rung']:17} {row['dtype']:8} {shape:26}"
        f"{row['median_us']:10.1f} us {row['gb_per_s']:7.0f} GB/s "
        f"{row['of_ceiling']:6.1%} of a copy's, {row['of_torch']:.2f} x torch"
    )


def output_of(*command: str) -> str | None:
    """Return the first line that a command prints, or None if there is none."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return next(iter(done.stdout.splitlines()), None)


def describe_gpu() -> Record:
    """Return what the numbers belong to."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cache_mib": properties.L2_cache_size / 2**20,
        "driver": output_of(*query),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "minivllm": minivllm.__version__,
        "commit": output_of("git", "describe", "--always", "--dirty"),
        "date": date.today().isoformat(),
        "command": " ".join(["python -m benchmarks.kernels", *sys.argv[1:]]),
    }


def result_path(device: str) -> Path:
    """Return where the numbers of a device are kept."""
    return RESULTS / f"gpu-{'-'.join(re.findall(r'[a-z0-9]+', device.lower()))}.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure everything on the current GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ops = list(dict.fromkeys(job.op for job in all_jobs("cuda", torch.float16)))
    parser.add_argument("--ops", nargs="+", choices=ops, default=ops)
    options = parser.parse_args(arguments)
    if reason := why_no_launch():
        sys.exit(f"the kernels are timed on a GPU, and none can be used: {reason}")
    gpu = describe_gpu()
    # Before sm_80 no GPU multiplies in bfloat16.
    has_bfloat16 = torch.cuda.get_device_capability() >= (8, 0)
    dtype = torch.bfloat16 if has_bfloat16 else torch.float16
    jobs = [job for job in all_jobs("cuda", dtype) if job.op in options.ops]
    measured = run(jobs, "cuda", int(gpu["cache_mib"] * 2**20), time_calls)
    if options.ops == ops:
        path = result_path(gpu["device"])
        path.write_text(json.dumps(gpu | measured, indent=1) + "\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
