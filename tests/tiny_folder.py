"""Tiny model folders, made on the spot without torch."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from minivllm.loading.tensors import write_safetensors
from minivllm.models.families import family_of
from minivllm.text.spelling import byte_alphabet

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
EOS = 256
BYTE_VOCAB_SIZE = 257  # one token per byte, and EOS
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def make_tensors(config: dict[str, Any] = CONFIG) -> dict[str, np.ndarray]:
    """Draw every tensor that the config needs, under the names of a checkpoint."""
    random = np.random.default_rng(0)
    shapes = family_of(config).read_spec(config).weight_shapes()
    return {
        name if name.startswith("lm_head") else f"model.{name}": random.standard_normal(
            shape, dtype=np.float32
        )
        for name, shape in shapes.items()
    }


def write_checkpoint(
    folder: Path,
    tensors: dict[str, np.ndarray],
    config: dict[str, Any] = CONFIG,
    dtype: str = "F32",
) -> Path:
    """Write config.json and model.safetensors, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors, dtype)
    return folder


def write_byte_tokenizer(folder: Path, chat_template: str | None) -> None:
    """Write a tokenizer whose token ids are the bytes of the text, and EOS."""
    vocab = {character: byte for character, byte in byte_alphabet().items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"eos_token": "<eos>"}
    if chat_template:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_parrot(
    folder: Path,
    chat_template: str | None = CHAT_TEMPLATE,
    sentences: tuple[list[int], ...] = ([*": blué!".encode(), EOS], [*b"xyzx"]),
) -> Path:
    """Write a model that always says the same, and return its folder.

    Its layers do nothing, its embedding and output matrix look up what follows a
    byte: after ":" come " blué!" and EOS, and "x", "y", "z" follow each other for ever.
    """
    config = CONFIG | {
        "vocab_size": BYTE_VOCAB_SIZE,
        "hidden_size": BYTE_VOCAB_SIZE,
        "max_position_embeddings": 4096,
    }
    tensors = {
        name: np.ones_like(tensor) if "norm" in name else np.zeros_like(tensor)
        for name, tensor in make_tensors(config).items()
    }
    tensors["model.embed_tokens.weight"] = np.eye(BYTE_VOCAB_SIZE, dtype=np.float32)
    for sentence in sentences:
        for token_id, following in pairwise(sentence):
            tensors["lm_head.weight"][following, token_id] = 1
    write_checkpoint(folder, tensors, config)
    write_byte_tokenizer(folder, chat_template)
    return folder
