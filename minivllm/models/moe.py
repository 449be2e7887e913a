"""Make a model with experts out of a dense one (up-cycling).

The checkpoint that is written has the shape of Qwen3-MoE, and its tokens are those of
the dense model: routing, permutation and combination can be tried on real text.

In vLLM: there is no such tool. The idea: Komatsuzaki et al. 2022, "Sparse Upcycling".
Source: chapter 7, "One decoder, many families".
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minivllm.errors import ConfigError, CorruptFile, ModelNotFound, WeightMismatch
from minivllm.json_files import read_json
from minivllm.models.families import family_of
from minivllm.models.spec import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# What a folder holds beside weights and config.json: tokenizer, template, defaults.
COMPANIONS = (".json", ".jinja", ".model", ".txt")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def upcycle(
    dense_checkpoint: str | Path,
    num_experts: int,
    top_k: int,
    folder: str | Path,
    *,
    split: bool = False,
    seed: int = 0,
) -> Path:
    """Write a checkpoint with experts that says what a dense one says.

    By default every expert is a copy of the dense MLP. Whichever experts a token goes
    to, their weights sum to one, and so the sum is what the MLP says. The router is
    random, so that tokens go to different experts.

    With `split`, an expert is a slice of the MLP: it has 1 / num_experts of the numbers
    inside. What the MLP says is the sum over all slices, so the two are equal only if
    every slice is chosen, all with the same weight of 1 / num_experts, and the sum is
    scaled up again. The router is zero for that, and the scale is put into the down
    projections: exact if num_experts is a power of two, else rounded once.

    Args:
        dense_checkpoint: The folder of a Llama-shaped model, such as SmolLM2.
        num_experts: Of every layer.
        top_k: Experts that a token goes to; with `split`, all of them.
        folder: Where to write; a new or empty one.
        split: Whether experts are slices, not copies.
        seed: Of the router.

    Returns:
        The folder. Its config.json says `"qk_norm": false`, which is ours: Qwen3 has
        norms for queries and keys, and a Llama has none.

    Raises:
        ConfigError: The model or a number does not fit, or the folder is in use.
        ModelNotFound: A file of the model is missing.
        WeightMismatch: A tensor of its MLPs is missing.
        CorruptFile: A file cannot be read.

    Cost:
        A layer is in memory at a time.
    """
    source, folder = Path(dense_checkpoint), Path(folder)
    config = read_json(source / "config.json")
    check_upcycling(config, num_experts, top_k, split)
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise ConfigError(
            f"seed is {seed!r:.80}, but must be an integer from 0 to 2**64 - 1: it "
            "starts the random numbers of the router"
        )
    spec = family_of(config).read_spec(config)
    stored = tensor_files(source)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"folder is {str(folder)!r}, where something is already: give a new one"
        )
    parts = list(parts_of(stored, spec.num_layers))
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(seed)
    for number, (mlp, names) in enumerate(parts, 1):
        tensors = read_tensors(stored, names)
        if mlp is not None:
            dense = [tensors.pop(f"{mlp}.{name}.weight") for name in PROJECTIONS]
            router = torch.zeros(num_experts, dense[0].shape[1])
            if not split:
                router.normal_(std=router.shape[1] ** -0.5, generator=generator)
            tensors[f"{mlp}.gate.weight"] = router.to(dense[0].dtype)
            for expert in range(num_experts):
                made = expert_of(dense, expert, num_experts if split else 1)
                for name, weight in zip(PROJECTIONS, made, strict=True):
                    tensors[f"{mlp}.experts.{expert}.{name}.weight"] = weight
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    for file in sorted(source.iterdir()):
        is_ours = file.name in ("config.json", INDEX_FILE)
        if file.is_file() and file.suffix in COMPANIONS and not is_ours:
            shutil.copyfile(file, folder / file.name)
    write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})
    # Last: without it, what an interrupted call leaves is no model.
    write_json(
        folder / "config.json",
        experts_config(config, spec, num_experts, top_k, split),
    )
    return folder


def check_upcycling(
    config: dict[str, Any], num_experts: int, top_k: int, split: bool
) -> None:
    """Refuse models and numbers that cannot be up-cycled.

    Raises:
        ConfigError: For one of them.
    """
    named = config.get("architectures")
    if named != ["LlamaForCausalLM"]:
        raise ConfigError(
            f"config.json names the architectures {named!r}, but only a "
            "LlamaForCausalLM can be up-cycled: choose such a model"
        )
    if config.get("mlp_bias"):
        raise ConfigError(
            "mlp_bias is true in config.json, but experts have no biases: choose a "
            "model without"
        )
    for name in ("num_hidden_layers", "intermediate_size"):
        if type(config.get(name)) is not int or config[name] < 1:
            raise ConfigError(
                f"{name} is {config.get(name)!r} in config.json, but must be an "
                "integer of at least 1: fetch the model's own file"
            )
    for name, value in (("num_experts", num_experts), ("top_k", top_k)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is {value!r}, but must be at least 1")
    if top_k > num_experts:
        raise ConfigError(
            f"top_k is {top_k}, but there are {num_experts} experts: lower it"
        )
    if split and top_k != num_experts:
        raise ConfigError(
            f"top_k is {top_k}, but a split model says what the dense one says only if "
            f"all {num_experts} slices are chosen: set top_k to {num_experts}, or make "
            "copies"
        )
    size = config["intermediate_size"]
    if split and size % num_experts:
        raise ConfigError(
            f"intermediate_size is {size}, which {num_experts} experts cannot share "
            "evenly: choose a divisor of it"
        )


def experts_config(
    config: dict[str, Any], spec: ModelSpec, num_experts: int, top_k: int, split: bool
) -> dict[str, Any]:
    """Return the config.json of the model with experts.

    What a Llama need not say is said: a Qwen3-MoE has other defaults.
    """
    size = config["intermediate_size"]
    return config | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": spec.head_dim,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_position_embeddings,
        "use_sliding_window": False,
        "qk_norm": False,
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": size // num_experts if split else size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint.

    Raises:
        ModelNotFound: There are no weights.
        CorruptFile: A file is damaged.
    """
    single = folder / SINGLE_FILE
    if single.is_file():
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        except SafetensorError as error:
            raise CorruptFile(
                f"{single} cannot be read ({error}): fetch it again"
            ) from error
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptFile(f"{folder / INDEX_FILE} has no weight_map: fetch it again")
    return {name: folder / Path(file).name for name, file in weight_map.items()}


def parts_of(
    stored: dict[str, Path], num_layers: int
) -> Iterator[tuple[str | None, list[str]]]:
    """Yield what goes into one file: a layer with the name of its MLP, then the rest.

    Raises:
        WeightMismatch: A layer has no complete MLP.
    """
    rest = set(stored)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        names = [name for name in stored if name.startswith(prefix)]
        for projection in PROJECTIONS:
            needed = f"{prefix}mlp.{projection}.weight"
            if needed not in names:
                raise WeightMismatch(
                    f"the checkpoint has no {needed}: it is incomplete, or not "
                    "Llama-shaped"
                )
        rest -= set(names)
        yield f"{prefix}mlp", names
    yield None, sorted(rest)


def read_tensors(stored: dict[str, Path], names: list[str]) -> dict[str, Tensor]:
    """Read tensors from their files.

    Raises:
        ModelNotFound: A file is missing.
        CorruptFile: A file is damaged, or has not what the index says.
    """
    tensors = {}
    for path in sorted({stored[name] for name in names}):
        if not path.is_file():
            raise ModelNotFound(f"there is no {path}: complete the download")
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    if stored[name] == path:
                        tensors[name] = file.get_tensor(name).clone()
        except SafetensorError as error:
            raise CorruptFile(
                f"{path} cannot be read ({error}): fetch it again"
            ) from error
    return tensors


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON object."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def expert_of(dense: list[Tensor], expert: int, num_slices: int) -> list[Tensor]:
    """Return gate, up and down of an expert: a copy, or a slice of the MLP."""
    gate, up, down = dense
    size = gate.shape[0] // num_slices
    begin = expert * size if num_slices > 1 else 0
    rows = slice(begin, begin + size)
    # clone(): tensors in one file must not share memory.
    return [gate[rows].clone(), up[rows].clone(), down[:, rows] * num_slices]
