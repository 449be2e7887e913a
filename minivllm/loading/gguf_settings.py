"""Read the sizes and settings of a model from the metadata of a GGUF file.

Invariant: what would need other arithmetic than ours is refused, before anything is
written. Called by the converter.

Source: appendix A1, "Files"; appendix A23, "Reading families".
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minivllm.errors import ConfigError, CorruptFile
from minivllm.loading.gguf_file import GgufFile
from minivllm.loading.gguf_names import ROPE_FREQS


def positive_key(file: GgufFile, key: str, kind: type, default: Any = None) -> Any:
    """Read a positive number.

    Raises:
        CorruptFile: It is missing and has no default, or is no such number.
    """
    value = file.get(key, kind, default)
    if not 0 < value < math.inf:
        raise CorruptFile(
            f"{file.path} cannot be converted: its key {key!r} is {value}, "
            "but must be above 0; download the file again or use another"
        )
    return value


def shortest(value: float) -> float:
    """Return the number that was meant by one kept as float32."""
    return float(str(np.float32(value)))  # 1e-5 is kept as 9.999999747378752e-06


def read_sizes(file: GgufFile, name: str) -> dict[str, int]:
    """Read the sizes of a model, under the names of config.json."""

    def size(key: str, default: int | None = None) -> int:
        return positive_key(file, f"{name}.{key}", int, default)

    num_heads, hidden_size = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", hidden_size // num_heads)
    rotated = size("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ConfigError(
            f"{file.path} turns {rotated} of the {head_dim} numbers of a head by RoPE, "
            "but from GGUF only whole heads can be: use another model"
        )
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length"),
    }


def rope_scaling(file: GgufFile, name: str, head_dim: int) -> dict[str, Any] | None:
    """Return how RoPE is scaled, as config.json says it; None if it is not.

    Raises:
        ConfigError: In a way that is not supported, or in two ways at once.
    """

    def said(key: str, default: Any) -> Any:
        return file.metadata.get(f"{name}.rope.{key}", default)

    kind = said("scaling.type", "linear")
    factor = said("scaling.factor", 0) or said("scale_linear", 0)
    if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        raise CorruptFile(
            f"{file.path} cannot be converted: it scales RoPE by {factor!r:.40}, but "
            "the factor must be a number of at least 0; download the file again"
        )
    needs_factor = kind == "yarn" and not factor
    if kind not in ("none", "linear", "yarn") or needs_factor:
        raise ConfigError(
            f"{file.path} scales RoPE ({kind!r:.40}, factor {factor}), but from GGUF "
            "only linear, yarn and Llama 3's factors can be read: use the model's "
            "safetensors version"
        )
    is_scaled = kind != "none" and factor not in (0, 1)
    if ROPE_FREQS in file.tensors:
        if is_scaled:
            raise ConfigError(
                f"{file.path} scales RoPE by {ROPE_FREQS} and by a factor, which is "
                "not supported: use the model's safetensors version"
            )
        return rope_factors(file, head_dim)
    if not is_scaled:
        return None
    scaling = {"rope_type": kind, "factor": shortest(factor)}
    if kind == "yarn":
        prefix = f"{name}.rope.scaling"
        context = positive_key(file, f"{name}.context_length", int)
        scaling["original_max_position_embeddings"] = positive_key(
            file, f"{prefix}.original_context_length", int, context
        )
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            value = positive_key(file, f"{prefix}.yarn_{key}", float, default)
            scaling[key] = shortest(value)
    return scaling


# Keys that ask for other arithmetic, unless they have one of these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.scale": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_gating_func": (0, 1),  # 1 is the softmax
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}


def refuse_foreign(file: GgufFile, name: str, head_dim: int) -> None:
    """Refuse a model that no family of ours computes.

    Raises:
        ConfigError: Naming the key that says so.
    """
    neutral = NEUTRAL | {"attention.value_length": (head_dim,)}
    if name != "gemma3":
        neutral["attention.sliding_window"] = (0,)
    for key, values in neutral.items():
        value = file.metadata.get(f"{name}.{key}", values[0])
        if value not in values:
            raise ConfigError(
                f"{file.path} has {name}.{key} = {value!r:.40}, which is not "
                "supported: use the model's safetensors version, or another model"
            )


def rope_factors(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Return Llama 3's scaling, of which a file keeps the result.

    "factors" is our own word: there is a divisor per frequency, and not the four
    numbers that config.json would name.
    """
    factors = file.dequantize(ROPE_FREQS).ravel().tolist()
    if len(factors) != head_dim // 2 or not all(0 < f < math.inf for f in factors):
        raise CorruptFile(
            f"{file.path} cannot be converted: {ROPE_FREQS!r} must hold "
            f"{head_dim // 2} positive factors; download the file again"
        )
    return {"rope_type": "factors", "factors": factors}


def llama_settings(file: GgufFile, name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the rest of a Llama's config.json."""
    return {
        **qwen_settings(file, name, sizes),
        "mlp_bias": any("ffn_gate.bias" in tensor for tensor in file.tensors),
    }


def qwen_settings(file: GgufFile, name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the rest of the config.json of Qwen2 (always with biases) or Qwen3."""
    # 10,000 is llama.cpp's own default where a file says nothing.
    theta = positive_key(file, f"{name}.rope.freq_base", float, 10_000.0)
    return {
        "hidden_act": "silu",
        "rope_theta": shortest(theta),
        "rope_scaling": rope_scaling(file, name, sizes["head_dim"]),
        "attention_bias": any("attn_q.bias" in tensor for tensor in file.tensors),
    }


def moe_settings(file: GgufFile, name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the rest of a Qwen3-MoE's config.json."""
    return {
        **qwen_settings(file, name, sizes),
        "num_experts": positive_key(file, f"{name}.expert_count", int),
        "num_experts_per_tok": positive_key(file, f"{name}.expert_used_count", int),
        "moe_intermediate_size": positive_key(
            file, f"{name}.expert_feed_forward_length", int
        ),
        # Files say nothing of these two: llama.cpp has experts in every layer, and
        # makes the shares of the chosen ones sum to one.
        "decoder_sparse_step": 1,
        "norm_topk_prob": file.get(f"{name}.expert_weights_norm", bool, True),
    }


def gemma_settings(file: GgufFile, name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the rest of a Gemma 3's config.json."""
    num_layers, head_dim = sizes["num_hidden_layers"], sizes["head_dim"]
    window = file.get(f"{name}.attention.sliding_window", int, 0)
    period = positive_key(file, f"{name}.attention.sliding_window_pattern", int, 6)
    slides = [bool(window) and bool((i + 1) % period) for i in range(num_layers)]
    # No key says how scores are scaled: as llama.cpp does, we know the one exception,
    # the model of 27 billion parameters, by its layers.
    scalar = head_dim
    if num_layers == 62:
        scalar = sizes["hidden_size"] // sizes["num_attention_heads"]
    theta = positive_key(file, f"{name}.rope.freq_base", float)
    local = positive_key(file, f"{name}.rope.freq_base_swa", float, 10_000.0)
    scaling = rope_scaling(file, name, head_dim) or {"rope_type": "default"}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window or None,
        "layer_types": [f"{'sliding' if s else 'full'}_attention" for s in slides],
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": shortest(theta)},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": shortest(local),
            },
        },
        "attention_bias": any("attn_q.bias" in tensor for tensor in file.tensors),
    }


SETTINGS: dict[str, Callable[[GgufFile, str, dict[str, int]], dict[str, Any]]] = {
    "llama": llama_settings,
    "qwen2": qwen_settings,
    "qwen3": qwen_settings,
    "qwen3moe": moe_settings,
    "gemma3": gemma_settings,
}
