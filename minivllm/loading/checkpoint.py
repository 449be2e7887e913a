"""List the tensors of a checkpoint and match them with what a decoder needs.

Invariant: every needed tensor is found once and in the right shape, and whatever
else lies in the files is refused, or left out by a rule of its family. Only headers
are read, unless a tied output matrix must be compared. Called by the loader.

In vLLM: vllm/model_executor/model_loader/weight_utils.py
(filter_duplicate_safetensors_files) and vllm/model_executor/models/utils.py
(AutoWeightsLoader), which stops at the first name that it does not know.
Source: appendix A3, "Loading"; appendix A23, "Reading families".
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.errors import ConfigError, CorruptFile, ModelNotFound, WeightMismatch
from minivllm.json_files import read_json
from minivllm.loading.tensors import read_header, read_safetensors
from minivllm.models.families.base import Family, Part
from minivllm.models.spec import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The types that both decoders can take, by the names in a safetensors header.
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor as a file has it, not yet read, or the part of it that we need."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    part: Part = ()


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """List the tensors of a checkpoint, in one file or in several with an index."""
    if (folder / SINGLE_FILE).is_file():
        return _tensors_of(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).is_file():
        raise ModelNotFound(
            f"there is neither {SINGLE_FILE} nor {INDEX_FILE} in {folder}: only "
            "safetensors weights are read, so fetch or convert the model to these"
        )
    return _sharded_tensors(folder, read_json(folder / INDEX_FILE).get("weight_map"))


def _tensors_of(path: Path) -> list[StoredTensor]:
    return [
        StoredTensor(path=path, name=name, dtype=dtype, shape=tuple(shape))
        for name, (dtype, shape) in read_header(path).items()
    ]


def _sharded_tensors(folder: Path, weight_map: Any) -> list[StoredTensor]:
    """Read the headers of all shards and compare them with the index."""
    # A shard lies beside its index: a path could lead out of the model's folder.
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str)
        and file.endswith(".safetensors")
        and Path(file).name == file
        for file in weight_map.values()
    ):
        raise CorruptFile(
            f"the weight_map in {folder / INDEX_FILE} is no table from tensors to "
            "files beside it: fetch it again"
        )
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ModelNotFound(
            f"{folder} lacks {len(missing)} of the {len(files)} files that "
            f"{INDEX_FILE} names: fetch {', '.join(missing)}"
        )
    tensors = [t for file in files for t in _tensors_of(folder / file)]
    listed = set(weight_map.items())
    found = {(tensor.name, tensor.path.name) for tensor in tensors}
    wrong = [f"{name} is not in {file}" for name, file in listed - found]
    wrong += [f"{name} in {file} is not listed" for name, file in found - listed]
    if wrong:
        raise CorruptFile(
            f"{INDEX_FILE} and its files disagree in {folder}: fetch them again"
            + bullet_list(wrong)
        )
    return tensors


def bullet_list(lines: Iterable[str], limit: int = 20) -> str:
    """Write lines below one another, the first `limit` of them in full."""
    lines = sorted(lines)
    if len(lines) > limit:
        lines[limit:] = [f"and {len(lines) - limit} more"]
    return "".join(f"\n  {line}" for line in lines)


@dataclass(frozen=True, slots=True)
class Knob:
    """Tensors that are there if and only if a setting says so."""

    what: str
    setting: str
    pattern: str  # of their names
    in_all_layers: bool = True  # or in none

    def is_torn(self, found: set[str], num_layers: int) -> bool:
        """Tell whether some are missing that no setting could take away."""
        layers: dict[str, set[str]] = {}
        for name in found:
            _, layer, rest = name.split(".", 2)
            layers.setdefault(layer, set()).add(rest)
        kinds = {frozenset(names) for names in layers.values()}
        lacks_layers = self.in_all_layers and 0 < len(layers) < num_layers
        return len(kinds) > 1 or lacks_layers


# What can be told from the names of tensors, and where a config says the same.
KNOBS = (
    Knob("biases", "attention_bias, mlp_bias and the architecture", r".*_proj\.bias"),
    Knob("norms of queries and keys", "the architecture", r".*\.[qk]_norm\.weight"),
    Knob(
        "norms before or behind an MLP",
        "the architecture",
        r"layers\.\d+\.(pre|post)_feedforward_layernorm\.weight",
    ),
    Knob(
        "matrices of experts",
        "num_experts, decoder_sparse_step and mlp_only_layers",
        r".*\.mlp\.(experts|gate)\..*",
        in_all_layers=False,
    ),
    Knob("tensors of shared experts", "the architecture", r".*\.shared_expert.*"),
)


def disagreements(spec: ModelSpec, matched: dict[str, StoredTensor]) -> Iterator[str]:
    """Say which settings of config.json the files contradict."""
    if "lm_head.weight" not in matched and not spec.tie_word_embeddings:
        yield (
            "config.json says tie_word_embeddings = false, but there is no "
            "lm_head.weight: set it to true if the model shares its embedding"
        )
    embedding = matched.get("embed_tokens.weight")
    if embedding and embedding.shape[:1] != (spec.vocab_size,):
        yield (
            f"config.json says vocab_size = {spec.vocab_size}, but the embedding is "
            f"{list(embedding.shape)}"
        )
    layers = {name.split(".")[1] for name in matched if name.startswith("layers.")}
    if len(layers) != spec.num_layers:
        yield (
            f"config.json says num_hidden_layers = {spec.num_layers}, but the files "
            f"hold {len(layers)} layers"
        )
    queries = matched.get("layers.0.self_attn.q_proj.weight")
    if queries and queries.shape[0] != spec.num_heads * spec.head_dim:
        yield (
            f"config.json asks for {spec.num_heads} heads of {spec.head_dim}, but the "
            f"files make queries of {queries.shape[0]} numbers: see head_dim and "
            "num_attention_heads in config.json"
        )
    for knob in KNOBS:
        needed, found = (
            {name for name in names if re.fullmatch(knob.pattern, name)}
            for names in (spec.weight_shapes(), matched)
        )
        if needed == found or len(layers) != spec.num_layers:
            continue
        way_out = f"see {knob.setting} in config.json"
        if knob.is_torn(found, spec.num_layers):
            way_out = "the files are incomplete, fetch them again"
        yield (
            f"config.json asks for {len(needed)} {knob.what}, but the files hold "
            f"{len(found)}: {way_out}"
        )


def drop_redundant_head(matched: dict[str, StoredTensor]) -> None:
    """Forget an output matrix that repeats the embedding, if the two are tied.

    Raises:
        WeightMismatch: It does not repeat it. To ignore it would change the model
            without a word, and programs differ in whether they do.
    """
    head, embedding = matched.get("lm_head.weight"), matched.get("embed_tokens.weight")
    if head is None or embedding is None:
        return
    if head.shape != embedding.shape or not np.array_equal(
        *(read_safetensors(t.path, [t.name])[t.name] for t in (head, embedding))
    ):
        raise WeightMismatch(
            f"config.json says tie_word_embeddings = true, but {head.name} differs "
            f"from {embedding.name}: set it to false to use both matrices"
        )
    del matched["lm_head.weight"]


def match_tensors(
    spec: ModelSpec, family: Family, stored: Iterable[StoredTensor]
) -> dict[str, StoredTensor]:
    """Return where each tensor lies that the decoder needs, as `account_for` finds it.

    Raises:
        WeightMismatch: The tensors are not the ones that the spec needs.
        ConfigError: A tensor is in a type that the decoders do not compute with.
    """
    return account_for(spec, family, stored).places


def shape_of_part(shape: tuple[int, ...], part: Part) -> tuple[int, ...]:
    """Return the shape of a part of a tensor, without reading it."""
    sizes = list(shape)
    for axis, index in enumerate(part):
        if isinstance(index, slice):
            sizes[axis] = len(range(sizes[axis])[index])
    dropped = {axis for axis, index in enumerate(part) if isinstance(index, int)}
    return tuple(size for axis, size in enumerate(sizes) if axis not in dropped)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAccount:
    """What became of each tensor in the files."""

    places: dict[str, StoredTensor]  # our name -> where its numbers lie
    ignored: list[str]  # left out by a rule of the family
    repeated: list[str]  # an output matrix that repeats the embedding


def share_embedding(matched: dict[str, StoredTensor]) -> list[str]:
    """Make one matrix of embedding and output matrix, for a model that ties the two.

    A file has one of them, under either name, or the same one twice.

    Returns:
        The name of a matrix that is left out, because it repeats the other.

    Raises:
        WeightMismatch: They are two.
    """
    if "embed_tokens.weight" not in matched and "lm_head.weight" in matched:
        matched["embed_tokens.weight"] = matched.pop("lm_head.weight")
    head = matched.get("lm_head.weight")
    drop_redundant_head(matched)
    return [head.name] if head else []


def account_for(
    spec: ModelSpec, family: Family, stored: Iterable[StoredTensor]
) -> TensorAccount:
    """Give every tensor that the decoder needs the stored one it is read from.

    Args:
        spec: What is needed.
        family: How the checkpoint's names become ours, and what is left out.
        stored: What the files hold.

    Returns:
        For each tensor of the files what becomes of it.

    Raises:
        WeightMismatch: Listing every tensor that is missing, unexpected or of the
            wrong shape, and where config.json and the files disagree.
        ConfigError: A tensor is in a type that the decoders do not compute with.
    """
    matched: dict[str, StoredTensor] = {}
    ignored = []
    for tensor in stored:
        parts = family.parts(tensor.name, tensor.shape)
        if not parts:
            ignored.append(tensor.name)
        for name, part in parts.items():
            if name in matched:
                raise WeightMismatch(
                    f"{matched[name].name} and {tensor.name} are both {name}: keep one "
                    "of them in the checkpoint"
                )
            shape = shape_of_part(tensor.shape, part)
            matched[name] = replace(tensor, shape=shape, part=part)
    repeated = share_embedding(matched) if spec.tie_word_embeddings else []
    try:
        spec.check_weights({name: tensor.shape for name, tensor in matched.items()})
    except WeightMismatch as error:
        notes = "".join(f"\n  {note}" for note in disagreements(spec, matched))
        raise WeightMismatch(f"{error}{notes}") from None
    if foreign := {t.dtype for t in matched.values()} - DTYPES.keys():
        raise ConfigError(
            f"the weights are stored as {', '.join(sorted(foreign))}, but "
            f"{', '.join(DTYPES)} are supported: choose a version of the model that "
            "is not quantised, or convert it to one of these"
        )
    return TensorAccount(places=matched, ignored=ignored, repeated=repeated)
