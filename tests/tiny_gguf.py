"""A tiny Llama as a GGUF file, written with the gguf package as llama.cpp would."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 256, 4, 2, 64, 512, 2
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_tokens() -> list[str]:
    """Three special tokens, the 256 bytes as GPT-2 writes them, and one merge."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return [*special, *(letters[byte] for byte in range(256)), "Ġt"]


def shapes(tied: bool, bias: bool) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape."""
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (query, HIDDEN),
        "self_attn.k_proj": (key, HIDDEN),
        "self_attn.v_proj": (key, HIDDEN),
        "self_attn.o_proj": (HIDDEN, query),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    result = {"model.embed_tokens.weight": (len(byte_tokens()), HIDDEN)}
    for i in range(LAYERS):
        for name, shape in layer.items():
            result[f"model.layers.{i}.{name}.weight"] = shape
            if bias and name.startswith("self_attn"):
                result[f"model.layers.{i}.{name}.bias"] = shape[:1]
    result["model.norm.weight"] = (HIDDEN,)
    if not tied:
        result["lm_head.weight"] = (len(byte_tokens()), HIDDEN)
    return result


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{top.get(stem, 'output')}.{kind}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of llama.cpp: first and second halves of a head in turn."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def pack(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Random weights in the bytes of a type."""
    qtype = gguf.GGMLQuantizationType[kind]
    if kind != "Q4_K":
        return gguf.quantize(rng.standard_normal(shape, dtype=np.float32), qtype)
    # gguf cannot quantise this one: random blocks, with scales that are numbers.
    per_block, size = gguf.GGML_QUANT_SIZES[qtype]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // per_block, size), np.uint8)
    blocks[..., :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def metadata(**changes: Any) -> dict[str, Any]:
    """The keys of the file; `llama__block_count=3` changes one, None removes it."""
    keys = {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INTERMEDIATE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.rope.freq_base": 50_000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": byte_tokens(),
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 257,
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in keys.items() if value is not None}


def write_tiny_gguf(
    path: Path,
    kind: str = "F32",
    *,
    tied: bool = False,
    bias: bool = False,
    rope_factors: list[float] | None = None,
    architecture: str = "llama",
    more_tensors: dict[str, np.ndarray] | None = None,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """Write the file; return its weights in float32, as Hugging Face orders them."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata(**changes).items():
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add.get(type(value), writer.add_array)(key, value)
    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in shapes(tied, bias).items():
        stored = kind if len(shape) == 2 else "F32"
        rows = pack(rng, shape, stored)
        qtype = gguf.GGMLQuantizationType[stored]
        weights[name] = gguf.dequantize(rows, qtype).astype(np.float32)
        if "q_proj" in name or "k_proj" in name:
            rows = interleave(rows, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(gguf_name(name), rows, raw_dtype=qtype)
    if rope_factors:
        factors = np.array(rope_factors, np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    for name, tensor in (more_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
