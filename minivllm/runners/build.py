"""Put a runner together: load a model, size its cache, reserve it.

Called by `LLM` and the command line.

In vLLM: vllm/v1/core/kv_cache_utils.py (get_kv_cache_configs),
vllm/v1/worker/gpu_worker.py (determine_available_memory).
Source: appendix A7, "LLM"; appendix A21, "CUDA graphs"; appendix A28, "Delta nets in
    torch".
"""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError
from minivllm.loading.hub import resolve_model
from minivllm.loading.loader import load_model
from minivllm.models.spec import ModelSpec
from minivllm.runners.base import CacheLayout, Runner
from minivllm.runners.fake_runner import FakeRunner
from minivllm.runners.kv_cache import (
    CacheLimits,
    kv_bytes_per_token,
    layout_for,
    share_out,
    state_bytes,
)
from minivllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minivllm.models.decoder import Decoder
    from minivllm.reference.decoder import NumpyDecoder

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "numpy", "fake")
DEFAULT_CPU_BYTES = 2**30
DEFAULT_GPU_SHARE = 0.9
DEFAULT_MAX_MODEL_LEN = 4096
MAX_INTEGER = 2**31 - 1  # block tables and the places of requests are int32


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How large the KV cache is to be; the options of `LLM` with the same names."""

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_num_seqs: int = 64
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_batched_tokens"):
            check_integer(name, getattr(self, name))
        for name in ("num_blocks", "max_model_len"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))
        if self.kv_cache_memory_bytes is not None:
            check_integer(
                "kv_cache_memory_bytes", self.kv_cache_memory_bytes, limit=None
            )
        share = self.gpu_memory_utilization
        if share is not None and not (
            isinstance(share, int | float) and 0 < share <= 1
        ):
            raise ConfigError(
                f"gpu_memory_utilization is {share!r}, but must be a share of the "
                "memory, above 0 and at most 1"
            )
        sizes = {
            "num_blocks": self.num_blocks,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
            "gpu_memory_utilization": share,
        }
        given = [name for name, value in sizes.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} each say how large the KV cache is: give one"
            )

    def model_len(self, spec: ModelSpec) -> int:
        """Return how many tokens a request may have, a multiple of the block size.

        Raises:
            ConfigError: More than the model was trained for, or less than a block.
        """
        trained = spec.max_position_embeddings
        if self.max_model_len is not None and self.max_model_len > trained:
            raise ConfigError(
                f"max_model_len is {self.max_model_len:,}, but the model was trained "
                f"for {trained:,} tokens: ask for at most that many"
            )
        return self.rounded_len(
            self.max_model_len or min(DEFAULT_MAX_MODEL_LEN, trained)
        )

    def rounded_len(self, wanted: int) -> int:
        """Round a number of tokens down to full blocks, at least one."""
        rounded = wanted - wanted % self.block_size
        if not rounded:
            raise ConfigError(
                f"max_model_len is {wanted}, less than one block of {self.block_size} "
                "tokens: raise it, or lower block_size"
            )
        return rounded


def check_integer(name: str, value: Any, limit: int | None = MAX_INTEGER) -> None:
    """Refuse an option that is no integer of at least 1, or one above a limit."""
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} is {value!r}, but must be an integer of at least 1")
    if limit is not None and value > limit:
        raise ConfigError(f"{name} is {value:,}, but {limit:,} is the limit: lower it")


def choose_backend(backend: str) -> str:
    """Turn "auto" into "torch" where it is installed, else into "numpy"."""
    if backend not in BACKENDS:
        raise ConfigError(
            f"backend is {backend!r}, but must be one of {', '.join(BACKENDS)}"
        )
    if backend != "auto":
        return backend
    return "torch" if importlib.util.find_spec("torch") else "numpy"


def describe_layout(runner: Runner) -> str:
    """Say what a runner has beside the blocks of all tokens, "" if there is nothing."""
    layout, parts = runner.layout, []
    if layout.num_window_blocks:
        blocks = f"{layout.num_window_blocks:,} blocks for windows of {layout.window:,}"
        parts.append(f"{blocks} tokens")
    if layout.num_states:
        states = f"{layout.num_states:,} states for requests"
        states += f" and {layout.num_kept_states:,} for prefixes"
        held = getattr(runner, "states", None)
        if held is not None:
            num_bytes = (held.conv.nbytes + held.recurrent.nbytes) // held.conv.shape[1]
            states += f", {num_bytes:,} bytes each"
        parts.append(states)
    return "; ".join(parts)


def build_runner(
    model: str | Path,
    *,
    backend: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    cache: CacheConfig | None = None,
) -> tuple[Runner, Tokenizer | None]:
    """Load a model and reserve its KV cache.

    Args:
        model: A short name, a folder, a .gguf file or a hub id.
        backend: "torch", "numpy", "fake" (no model at all), or "auto".
        dtype: As for `load_model`.
        device: As for `load_model`.
        cache: How large the cache is to be.

    Returns:
        The runner, and the tokenizer of the model; a fake model has none.

    Raises:
        ConfigError: An option is impossible, or the cache would have no block.
        MinivllmError: What `resolve_model`, `load_model` and `Tokenizer` raise.
    """
    cache = cache or CacheConfig()
    backend = choose_backend(backend)
    if backend == "fake":
        return fake_runner(cache), None
    folder = resolve_model(model, progress=True)
    tokenizer = Tokenizer.from_dir(folder)
    decoder = load_model(folder, backend=backend, dtype=dtype, device=device)
    tokenizer.check_embedding_rows(decoder.spec.vocab_size)
    # An added token may lack a row, and a row a token: neither can be chosen.
    vocab_size = min(tokenizer.vocab_size, decoder.spec.vocab_size)
    build: dict[str, Callable[..., Runner]] = {
        "numpy": numpy_runner,
        "torch": torch_runner,
    }
    try:
        runner = build[backend](decoder, cache, vocab_size)
    except (MemoryError, RuntimeError) as error:
        states = ", or max_num_seqs" if decoder.spec.delta_net else ""
        raise ConfigError(
            f"the KV cache cannot be reserved ({error}): lower num_blocks, "
            f"kv_cache_memory_bytes or gpu_memory_utilization{states}"
        ) from error
    logger.info(
        "KV cache: %d blocks of %d tokens, max_model_len %d",
        runner.num_blocks,
        runner.block_size,
        runner.max_model_len,
    )
    if text := describe_layout(runner):
        logger.info("beside them: %s", text)
    return runner, tokenizer


def fake_runner(cache: CacheConfig) -> FakeRunner:
    """Return a runner without a model.

    Raises:
        ConfigError: The cache is given in bytes, but a model that is not there has
            none.
    """
    for name in ("kv_cache_memory_bytes", "gpu_memory_utilization"):
        if getattr(cache, name) is not None:
            raise ConfigError(
                f"{name} is {getattr(cache, name)}, but the fake backend has no model "
                "whose cache takes bytes: give num_blocks"
            )
    return FakeRunner(
        num_blocks=cache.num_blocks or 1024,
        block_size=cache.block_size,
        max_model_len=cache.rounded_len(cache.max_model_len or DEFAULT_MAX_MODEL_LEN),
    )


def numpy_runner(
    decoder: "NumpyDecoder", cache: CacheConfig, vocab_size: int
) -> Runner:
    """Return a runner around a NumPy decoder."""
    from minivllm.runners.numpy_runner import NumpyRunner

    num_blocks, layout = count_blocks(cache, decoder.spec, 4, None)
    return NumpyRunner(
        decoder,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_model_len=cache.model_len(decoder.spec),
        vocab_size=vocab_size,
        layout=layout,
    )


def torch_runner(decoder: "Decoder", cache: CacheConfig, vocab_size: int) -> Runner:
    """Return a runner around a torch decoder, on the decoder's device."""
    from minivllm.models.merged import MergedDecoder
    from minivllm.runners.cuda_graphs import why_no_graphs
    from minivllm.runners.torch_runner import (
        TorchRunner,
        free_cuda_bytes,
        graph_cuda_bytes,
    )

    spec, weight = decoder.spec, decoder.embed_tokens.weight
    lengths = {
        "block_size": cache.block_size,
        "max_model_len": cache.model_len(spec),
    }
    # With more requests than tokens per step, some would run and get none.
    max_rows = min(cache.max_num_seqs, cache.max_num_batched_tokens)
    reason = why_no_graphs(spec, weight)
    if cache.enforce_eager:
        reason = "enforce_eager is set"
    if reason:
        logger.info("no CUDA graphs: %s", reason)
    free_bytes = None
    if weight.device.type == "cuda" and not (
        cache.num_blocks or cache.kv_cache_memory_bytes
    ):
        share = cache.gpu_memory_utilization or DEFAULT_GPU_SHARE
        free_bytes = free_cuda_bytes(decoder, share, cache.max_num_batched_tokens)
        if not reason:
            decoder = MergedDecoder(decoder)
            free_bytes -= graph_cuda_bytes(decoder, max_rows, **lengths)
    num_blocks, layout = count_blocks(cache, spec, weight.itemsize, free_bytes)
    if not reason:  # of everything, one is for padding
        num_blocks += 1
        layout = replace(
            layout,
            num_window_blocks=layout.num_window_blocks + bool(layout.num_window_blocks),
            num_kept_states=layout.num_kept_states + bool(layout.num_states),
        )
    runner = TorchRunner(
        decoder, num_blocks=num_blocks, vocab_size=vocab_size, layout=layout, **lengths
    )
    if not reason:
        runner.capture_graphs(max_rows)
    return runner


def count_blocks(
    cache: CacheConfig, spec: ModelSpec, bytes_per_element: int, free_bytes: int | None
) -> tuple[int, CacheLayout]:
    """Return how many blocks the KV cache gets, and what there is beside them.

    Args:
        cache: What was asked for.
        spec: The model.
        bytes_per_element: Size of a number in the cache.
        free_bytes: What a GPU has left for the cache; None on a CPU.

    Raises:
        ConfigError: There is no room for a single block.
    """
    limits = CacheLimits(
        block_size=cache.block_size,
        max_num_seqs=min(cache.max_num_seqs, cache.max_num_batched_tokens),
        max_num_batched_tokens=cache.max_num_batched_tokens,
        max_model_len=cache.model_len(spec),
    )
    if cache.num_blocks:
        return cache.num_blocks, layout_for(spec, cache.num_blocks, limits)
    if free_bytes is None and cache.gpu_memory_utilization is not None:
        raise ConfigError(
            f"gpu_memory_utilization is {cache.gpu_memory_utilization}, but the model "
            "is not on a GPU: size the cache with kv_cache_memory_bytes or num_blocks"
        )
    budget = cache.kv_cache_memory_bytes or free_bytes
    if budget is None:
        budget = DEFAULT_CPU_BYTES
    num_blocks, layout = share_out(spec, budget, bytes_per_element, limits)
    if num_blocks < 1:
        block_bytes = cache.block_size * kv_bytes_per_token(spec, bytes_per_element)
        state = state_bytes(spec, bytes_per_element)
        states = f", and a request's states {state:,}" if state else ""
        is_state_in = state < budget  # then smaller blocks could fit beside it
        raise ConfigError(
            f"the KV cache may take {max(budget, 0):,} bytes, but one block of "
            f"{cache.block_size} tokens needs {block_bytes:,}{states}: raise "
            "kv_cache_memory_bytes or gpu_memory_utilization"
            f"{', or lower block_size' if is_state_in else ''}"
        )
    if num_blocks > MAX_INTEGER:
        raise ConfigError(
            f"the KV cache may take {budget:,} bytes, which are {num_blocks:,} blocks, "
            f"but {MAX_INTEGER:,} is the limit: lower kv_cache_memory_bytes"
        )
    return num_blocks, layout
