"""Convert a GGUF file to the folder that the rest of the package reads.

Invariant: the folder appears whole or not at all, and names, row order and keys are
those of Hugging Face; every tensor of the file is accounted for. Called by the hub.

In vLLM: the project vllm-gguf-plugin (vllm_gguf_plugin/loader.py), blocks kept packed.
Source: appendix A1, "Files"; appendix A2, "Text".
"""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.errors import ConfigError, CorruptFile
from minivllm.loading.atomic import atomic_folder
from minivllm.loading.gguf_file import GgufFile, read_gguf
from minivllm.loading.gguf_tokenizer import tokenizer_files
from minivllm.loading.tensors import write_each


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What an architecture is called in GGUF, and what in Hugging Face's files."""

    class_name: str
    model_type: str
    tensors: dict[str, str]  # GGUF name -> Hugging Face name, {} = number of the layer
    interleaved: tuple[str, ...]  # tensors whose rows llama.cpp reorders for its RoPE


LLAMA = Architecture(
    class_name="LlamaForCausalLM",
    model_type="llama",
    tensors={
        "token_embd": "model.embed_tokens",
        "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
        "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
        "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
        "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
        "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
        "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
        "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
        "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
        "output_norm": "model.norm",
        "output": "lm_head",
    },
    interleaved=("attn_q", "attn_k"),
)
ARCHITECTURES = {"llama": LLAMA}
ROPE_FREQS = "rope_freqs.weight"


def architecture_of(file: GgufFile) -> Architecture:
    """Return the table for a file's architecture."""
    name = file.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path} is a model of type {name!r}, but only "
            f"{', '.join(sorted(ARCHITECTURES))} can be read from GGUF: use one of "
            "these, or the model's safetensors version"
        )
    return ARCHITECTURES[name]


def hugging_face_name(architecture: Architecture, name: str) -> str | None:
    """Translate `blk.7.attn_q.weight`; None if the architecture has no such tensor."""
    match = re.fullmatch(
        r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(weight|bias)", name
    )
    if not match:
        return None
    stem = match["stem"] if match["layer"] is None else f"blk.{{}}.{match['stem']}"
    if stem not in architecture.tensors:
        return None
    return f"{architecture.tensors[stem].format(match['layer'])}.{match[3]}"


def split_halves(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order that llama.cpp gives to q and k.

    Its RoPE turns rows 0 and 1 of a head together, then 2 and 3; Hugging Face's
    turns rows 0 and head_dim / 2, then 1 and head_dim / 2 + 1.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _positive(file: GgufFile, key: str, kind: type, default: Any = None) -> Any:
    value = file.get(key, kind, default)
    if not 0 < value < math.inf:
        raise CorruptFile(
            f"{file.path} cannot be converted: its key {key!r} is {value}, "
            "but must be above 0; download the file again or use another"
        )
    return value


def _shortest(value: float) -> float:
    # 1e-5 kept as float32 is 9.999999747378752e-06: write what was meant.
    return float(str(np.float32(value)))


def _sizes(file: GgufFile, name: str) -> dict[str, int]:
    def size(key: str, default: int | None = None) -> int:
        return _positive(file, f"{name}.{key}", int, default)

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


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return config.json as transformers would write it."""
    architecture = architecture_of(file)
    name = file.get("general.architecture", str)
    if file.metadata.get("split.count", 1) != 1:
        raise ConfigError(
            f"{file.path} is one of {file.metadata['split.count']} parts of a model: "
            "join them first with llama-gguf-split --merge"
        )
    if "token_embd.weight" not in file.tensors:
        raise CorruptFile(
            f"{file.path} cannot be converted: it has no tensor 'token_embd.weight' "
            f"among its {len(file.tensors)}; use a file with a whole model"
        )
    sizes = _sizes(file, name)
    epsilon = _positive(file, f"{name}.attention.layer_norm_rms_epsilon", float)
    # 10,000 is llama.cpp's own default where a file says nothing.
    theta = _positive(file, f"{name}.rope.freq_base", float, 10_000.0)
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **sizes,
        "rms_norm_eps": _shortest(epsilon),
        "hidden_act": "silu",
        "rope_theta": _shortest(theta),
        "rope_scaling": _rope_scaling(file, name, sizes["head_dim"]),
        "attention_bias": any("attn_q.bias" in tensor for tensor in file.tensors),
        "mlp_bias": any("ffn_gate.bias" in tensor for tensor in file.tensors),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **special_tokens(file),
        "dtype": CONFIG_DTYPES[_dtype(file)],
    }


def _rope_scaling(file: GgufFile, name: str, head_dim: int) -> dict[str, Any] | None:
    for key in ("scaling.type", "scaling.factor", "scale_linear"):
        value = file.metadata.get(f"{name}.rope.{key}", "none")
        if value not in ("none", 0, 1):
            raise ConfigError(
                f"{file.path} scales RoPE ({key} is {value!r:.40}), but from GGUF only "
                "Llama 3's factors can be read: use the model's safetensors version"
            )
    if ROPE_FREQS not in file.tensors:
        return None
    factors = file.dequantize(ROPE_FREQS).ravel().tolist()
    if len(factors) != head_dim // 2 or not all(0 < f < math.inf for f in factors):
        raise CorruptFile(
            f"{file.path} cannot be converted: {ROPE_FREQS!r} must hold "
            f"{head_dim // 2} positive factors; download the file again"
        )
    # "factors" is our own word: GGUF keeps the result of Llama 3's formula, a divisor
    # per frequency, and not the four numbers that config.json would name.
    return {"rope_type": "factors", "factors": factors}


def special_tokens(file: GgufFile) -> dict[str, Any]:
    """Return the ids that begin, end and pad a text, for both config files."""

    def token(kind: str) -> int | None:
        key = f"tokenizer.ggml.{kind}_token_id"
        return file.get(key, int) if key in file.metadata else None

    # Chat models may end a turn (eot) or a message (eom) with a token of its own.
    ends = list(dict.fromkeys(map(token, ("eos", "eot", "eom"))))
    ends = [end for end in ends if end is not None]
    found = {
        "bos_token_id": token("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": token("padding"),
    }
    return {name: value for name, value in found.items() if value is not None}


CONFIG_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _dtype(file: GgufFile) -> str:
    """Choose the type to write: the matrices' own, bf16 if they are quantised."""
    kinds = {t.type.name for t in file.tensors.values() if len(t.shape) > 1}
    if kinds <= {"F32"}:
        return "F32"
    return "F16" if kinds <= {"F32", "F16"} else "BF16"


def json_text(value: dict[str, Any]) -> str:
    """Write JSON as people read it."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def text_files(file: GgufFile) -> dict[str, str]:
    """Return the small files of the folder: name -> text."""
    return {
        "config.json": json_text(model_config(file)),
        "generation_config.json": json_text(special_tokens(file)),
        **tokenizer_files(file.metadata),
    }


def _sources(file: GgufFile) -> dict[str, str]:
    """Return Hugging Face name -> GGUF name, all tensors accounted for."""
    architecture = architecture_of(file)
    sources: dict[str, str] = {}
    for name in file.tensors:
        target = hugging_face_name(architecture, name)
        if target is not None:
            sources[target] = name
        elif name != ROPE_FREQS:
            raise ConfigError(
                f"{file.path} has a tensor {name!r}, which a "
                f"{architecture.class_name} does not know: use another model"
            )
    return sources


def hugging_face_tensor(file: GgufFile, name: str) -> np.ndarray:
    """Dequantise a tensor to float32, its rows in Hugging Face's order."""
    tensor = file.dequantize(name)
    stem = name.split(".")[-2]
    if stem not in architecture_of(file).interleaved:
        return tensor
    prefix = file.get("general.architecture", str) + ".attention.head_count"
    num_heads = _positive(file, prefix, int)
    if stem == "attn_k":
        num_heads = _positive(file, f"{prefix}_kv", int, num_heads)
    if tensor.shape[0] % (2 * num_heads):
        raise CorruptFile(
            f"{file.path} cannot be converted: the {tensor.shape[0]} rows of {name!r} "
            f"are not {num_heads} heads of even size; download the file again"
        )
    return split_halves(tensor, num_heads)


def _check_target(folder: Path) -> None:
    if os.path.lexists(folder):
        raise ConfigError(
            f"cannot convert into {folder}, for it exists already: remove it, or give "
            "a folder that is not there yet"
        )
    if not folder.parent.is_dir():
        raise ConfigError(
            f"cannot make {folder}, for {folder.parent} is no folder: make that first"
        )


def convert_gguf(
    gguf_path: str | Path,
    out_dir: str | Path,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write config, weights, tokenizer and generation config into a new folder.

    Args:
        gguf_path: the file to convert.
        out_dir: the folder to make; it must not exist, but its parent must. It
            appears when it is complete.
        on_progress: called with the weights done so far and their total number.

    Raises:
        CorruptFile: the file is damaged, or lacks a key or a tensor.
        ConfigError: an architecture or a type that cannot be converted, or a place
            for the folder that cannot be.
        ModelNotFound: the file cannot be opened.
        OSError: the folder cannot be written, for example because the disk is full.
    """
    out_dir = Path(out_dir)
    _check_target(out_dir)
    file = read_gguf(gguf_path)
    texts = text_files(file)
    sources = _sources(file)
    total = sum(math.prod(file.tensors[name].shape) for name in sources.values())
    done = 0

    def make(target: str) -> np.ndarray:
        nonlocal done
        tensor = hugging_face_tensor(file, sources[target])
        done += tensor.size
        if on_progress:
            on_progress(done, total)
        return tensor

    dtype = _dtype(file)
    layout = {
        target: (dtype, file.tensors[name].shape) for target, name in sources.items()
    }
    with atomic_folder(out_dir) as folder:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        write_each(folder / "model.safetensors", layout, make)
