"""Convert a GGUF file to the folder that the rest of the package reads.

Invariant: the folder appears whole or not at all, and names, row order and keys are
those of Hugging Face; every tensor of the file is accounted for. Called by the hub.

In vLLM: the project vllm-gguf-plugin (vllm_gguf_plugin/loader.py), blocks kept packed.
Source: appendix A1, "Files"; appendix A2, "Text"; appendix A23, "Reading families".
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.errors import ConfigError, CorruptFile
from minivllm.loading.atomic import atomic_folder
from minivllm.loading.checkpoint import StoredTensor, shape_of_part
from minivllm.loading.gguf_file import GgufFile, read_gguf
from minivllm.loading.gguf_names import (
    ROPE_FREQS,
    architecture_of,
    hugging_face_parts,
)
from minivllm.loading.gguf_settings import (
    SETTINGS,
    positive_key,
    read_sizes,
    refuse_foreign,
    shortest,
)
from minivllm.loading.gguf_tokenizer import tokenizer_files
from minivllm.loading.tensors import write_each
from minivllm.models.families import family_of
from minivllm.models.families.base import Part


def split_halves(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order that llama.cpp gives to q and k.

    Its RoPE turns rows 0 and 1 of a head together, then 2 and 3; Hugging Face's
    turns rows 0 and head_dim / 2, then 1 and head_dim / 2 + 1.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return config.json as transformers would write it.

    Raises:
        CorruptFile: A key or the embedding is missing, or is impossible.
        ConfigError: The model is of a kind that is not supported.
    """
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
    sizes = read_sizes(file, name)
    refuse_foreign(file, name, sizes["head_dim"])
    epsilon = positive_key(file, f"{name}.attention.layer_norm_rms_epsilon", float)
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **sizes,
        "rms_norm_eps": shortest(epsilon),
        **SETTINGS[name](file, name, sizes),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **special_tokens(file),
        "dtype": CONFIG_DTYPES[_dtype(file)],
    }
    family_of(config).read_spec(config)  # refuses what the loader would, but now
    return config


def special_tokens(file: GgufFile) -> dict[str, Any]:
    """Return the ids that begin, end and pad a text, for both config files."""

    def token(kind: str) -> int | None:
        key = f"tokenizer.ggml.{kind}_token_id"
        return file.get(key, int) if key in file.metadata else None

    # Chat models may end a turn (eot) or a message (eom) with a token of its own, and
    # not every file says so: llama.cpp, too, knows such tokens by their text.
    ends = [token("eos"), token("eot"), token("eom")]
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    ends += [tokens.index(t) for t in architecture_of(file).ends if t in tokens]
    ends = [end for end in dict.fromkeys(ends) if end is not None]
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


def _sources(file: GgufFile) -> dict[str, tuple[str, Part]]:
    """Return Hugging Face name -> GGUF name and part, all tensors accounted for."""
    architecture = architecture_of(file)
    sources: dict[str, tuple[str, Part]] = {}
    for name, tensor in file.tensors.items():
        parts = hugging_face_parts(architecture, name, tensor.shape)
        sources |= {target: (name, part) for target, part in parts.items()}
        if not parts and name != ROPE_FREQS:
            raise ConfigError(
                f"{file.path} has a tensor {name!r}, which a "
                f"{architecture.class_name} does not know: use another model"
            )
    return sources


def gguf_tensors(file: GgufFile) -> list[StoredTensor]:
    """List the tensors that a converted file will have, before it is converted."""
    return [
        StoredTensor(
            path=file.path,
            name=target,
            dtype=_dtype(file),
            shape=shape_of_part(file.tensors[name].shape, part),
        )
        for target, (name, part) in _sources(file).items()
    ]


def hugging_face_tensor(file: GgufFile, name: str, part: Part = ()) -> np.ndarray:
    """Dequantise a tensor to float32, as Hugging Face has it.

    Args:
        file: Where it lies.
        name: What it is called there.
        part: Which part of it; an expert's, or ().
    """
    tensor = file.dequantize(name, part)
    stem = name.split(".")[-2]
    architecture = architecture_of(file)
    if architecture.norm_offset and stem.endswith("norm"):
        # These norms multiply by 1 + w: a GGUF file has the sum, other files have w.
        return tensor - np.float32(architecture.norm_offset)
    if stem not in architecture.interleaved:
        return tensor
    prefix = file.get("general.architecture", str) + ".attention.head_count"
    num_heads = positive_key(file, prefix, int)
    if stem == "attn_k":
        num_heads = positive_key(file, f"{prefix}_kv", int, num_heads)
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
    dtype: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write config, weights, tokenizer and generation config into a new folder.

    Args:
        gguf_path: the file to convert.
        out_dir: the folder to make; it must not exist, but its parent must. It
            appears when it is complete.
        dtype: "F32", "F16" or "BF16" to write; by default that of the file's matrices,
            or BF16 if they are quantised.
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
    if dtype not in (None, *CONFIG_DTYPES):
        raise ConfigError(
            f"cannot convert to {dtype!r}: use one of {', '.join(CONFIG_DTYPES)}"
        )
    config = model_config(file)
    if dtype:
        config["dtype"] = CONFIG_DTYPES[dtype]
    texts |= {"config.json": json_text(config)}
    sources = _sources(file)
    dtype = dtype or _dtype(file)
    layout = {
        target: (dtype, shape_of_part(file.tensors[name].shape, part))
        for target, (name, part) in sources.items()
    }
    total = sum(math.prod(shape) for _, shape in layout.values())
    done = 0

    def make(target: str) -> np.ndarray:
        nonlocal done
        tensor = hugging_face_tensor(file, *sources[target])
        done += tensor.size
        if on_progress:
            on_progress(done, total)
        return tensor

    with atomic_folder(out_dir) as folder:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        write_each(folder / "model.safetensors", layout, make)
