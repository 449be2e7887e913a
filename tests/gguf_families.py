"""Tiny models of each family as GGUF files, written as llama.cpp's converter does.

The names come from the tables of the `gguf` package, not from ours.
"""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers

from minivllm.loading.gguf_vocabulary import TokenType
from tests.parity.make_tiny import SIZES, make_model
from tests.tiny_gguf import interleave
from tests.tiny_tokenizers import byte_level, sentencepiece

ARCHES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
# What a GGUF file cannot say, and llama.cpp does not compute.
SAYABLE: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "qwen3_moe": {"mlp_only_layers": []},
    "gemma3": {"query_pre_attn_scalar": SIZES["head_dim"], "sliding_window_pattern": 6},
}
CONTROL = TokenType.CONTROL
VOCAB_SIZE = SIZES["vocab_size"]


def padding(num_tokens: int) -> dict[str, TokenType]:
    """Return names for the rows without a token, as the converter gives them."""
    rows = range(num_tokens, VOCAB_SIZE)
    return {f"[PAD{row}]": TokenType.UNUSED for row in rows}


def tokenizer_keys(family: str) -> dict[str, Any]:
    """Return the tokenizer of a family, a token per byte and those of its chats."""
    if family == "gemma3":
        added = {"<end_of_turn>": CONTROL, "<start_of_turn>": CONTROL} | padding(262)
        return sentencepiece({"▁": -1.0}, added, add_space_prefix=False) | {
            "tokenizer.ggml.add_bos_token": True
        }
    pre, tokens = "qwen2", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    if family == "llama":
        pre, tokens = (
            "llama-bpe",
            ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
        )
    return byte_level(
        "Ġ t",
        pre=pre,
        added=dict.fromkeys(tokens, CONTROL) | padding(260),
        bos_token_id=257,
        eos_token_id=258 if family == "llama" else 257,
    )


def settings_of(config: transformers.PreTrainedConfig, family: str) -> dict[str, Any]:
    """Return the keys of a model, as the converter writes them."""
    rope = config.rope_parameters
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    if family != "qwen2":
        size = SIZES["head_dim"]
        keys |= {"attention.key_length": size, "attention.value_length": size}
    if family == "llama":
        keys["rope.dimension_count"] = SIZES["head_dim"]
    if family == "qwen3_moe":
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if family == "gemma3":
        keys |= {
            "attention.sliding_window": config.sliding_window,
            "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        }
        rope = rope["full_attention"]
    keys["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] != "default":
        keys |= {
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": float(rope["factor"]),
        }
    if "original_max_position_embeddings" in rope:
        key = "rope.scaling.original_context_length"
        keys[key] = rope["original_max_position_embeddings"]
    return keys


def gguf_tensors_of(model: transformers.PreTrainedModel, family: str) -> dict:
    """Return the tensors of a model under llama.cpp's names."""
    config = model.config
    names = gguf.get_tensor_name_map(ARCHES[family], config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if family == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        if family == "llama" and (heads := re.search(r"\.([qk])_proj\.", name)):
            both = config.num_attention_heads, config.num_key_value_heads
            array = interleave(array, both[heads[1] == "k"])
        parts = {name: array}
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(array, 2, axis=1)
            stem = name.removesuffix("gate_up_proj")
            parts = {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            parts = {f"{name}.weight": array}
        for part, values in parts.items():
            theirs = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert theirs is not None, part
            tensors[theirs] = np.ascontiguousarray(values)
    return tensors


def write_family(
    path: Path,
    family: str,
    *,
    changed: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    kind: str = "F32",
    **overrides: Any,
) -> transformers.PreTrainedModel:
    """Write a GGUF file, and return the model in it.

    Args:
        path: The file.
        family: A key of ARCHES.
        changed: Keys without the name of the architecture; None takes one away.
        tensors: More tensors, or None for one that is taken away.
        kind: The type of the matrices.
        overrides: Of the model's config.
    """
    model = make_model(family, **(SAYABLE[family] | overrides))
    arch = gguf.MODEL_ARCH_NAMES[ARCHES[family]]
    keys = settings_of(model.config, family) | (changed or {})
    keys = {f"{arch}.{key}": value for key, value in keys.items()}
    keys |= tokenizer_keys(family)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    for name, array in (gguf_tensors_of(model, family) | (tensors or {})).items():
        if array is None:
            continue
        stored = "F32" if array.ndim == 1 or "ffn_gate_inp" in name else kind
        qtype = gguf.GGMLQuantizationType[stored]
        writer.add_tensor(name, gguf.quantize(array, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
