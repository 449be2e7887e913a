"""All options of an engine in one record, checked before a model is loaded.

Invariant: the options are possible from the moment the object exists, as far as can be
told without the model. Called by `LLM`, `AsyncLLM` and the command line. What loads
models is imported when one is to be loaded: it needs NumPy, which the engine does not.

In vLLM: vllm/engine/arg_utils.py (EngineArgs).
Source: chapter 9, "Serving".
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config import DEFAULT_MODEL
from minivllm.engine.scheduler import Policy, find_policy
from minivllm.engine.trace import check_trace_path
from minivllm.errors import ConfigError
from minivllm.sampling.params import check_max_logprobs

if TYPE_CHECKING:
    from minivllm.runners.build import CacheConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What `LLMEngine` needs to know; `help(LLM.__init__)` explains each option.

    Raises:
        ConfigError: An option is impossible.
    """

    model: str | Path = DEFAULT_MODEL
    backend: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_logprobs: int = 20
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    policy: str | Policy = "mixed"
    seed: int = 0
    trace: str | Path | None = None

    def __post_init__(self) -> None:
        from minivllm.runners.build import check_integer, choose_backend

        check_integer("max_num_seqs", self.max_num_seqs)
        for name in ("enforce_eager", "enable_prefix_caching"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, but must be True or False"
                )
        if type(self.seed) is not int or self.seed < 0:
            raise ConfigError(f"seed is {self.seed!r}, but must be an integer from 0")
        find_policy(self.policy)
        check_max_logprobs(self.max_logprobs)
        if self.trace is not None:
            check_trace_path(self.trace)
        choose_backend(self.backend)
        self.cache_config()

    @property
    def model_name(self) -> str:
        """The model as it was named; "fake" if there is none."""
        return "fake" if self.backend == "fake" else str(self.model)

    def cache_config(self) -> "CacheConfig":
        """Return the options that say how large the KV cache is."""
        from minivllm.runners.build import CacheConfig

        names = [field.name for field in fields(CacheConfig)]
        return CacheConfig(**{name: getattr(self, name) for name in names})

    def load(self) -> dict[str, Any]:
        """Load the model; return what `LLMEngine` takes instead of a configuration.

        Raises:
            MinivllmError: The model cannot be loaded, see `load_model`.
        """
        from minivllm.loading.hub import resolve_model
        from minivllm.runners.build import build_runner, choose_backend
        from minivllm.sampling.defaults import read_sampling_defaults

        sampling_defaults: dict[str, Any] = {}
        if choose_backend(self.backend) != "fake":
            folder = resolve_model(self.model, progress=True)
            sampling_defaults = read_sampling_defaults(folder)
        runner, tokenizer = build_runner(
            self.model,
            backend=self.backend,
            dtype=self.dtype,
            device=self.device,
            cache=self.cache_config(),
        )
        return {
            "runner": runner,
            "tokenizer": tokenizer,
            "sampling_defaults": sampling_defaults,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": self.enable_prefix_caching,
            "policy": self.policy,
            "seed": self.seed,
            "max_logprobs": self.max_logprobs,
        }
