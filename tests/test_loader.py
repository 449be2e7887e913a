"""From files to decoders: every tensor is accounted for, whatever is wrong is named."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from minivllm.errors import (
    BackendUnavailable,
    ConfigError,
    CorruptFile,
    ModelNotFound,
    WeightMismatch,
)
from minivllm.loading.loader import load_model, load_spec
from minivllm.loading.tensors import write_safetensors
from tests.tiny_folder import CONFIG, make_tensors, write_checkpoint

TIED = CONFIG | {"tie_word_embeddings": True}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def write_shards(folder: Path, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    """Write the tensors into two files with an index, and return its weight_map."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in part}, "F32")
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return make_tensors()


# What loads.


def test_each_tensor_arrives_under_its_own_name(tmp_path, tensors):
    folder = write_checkpoint(tmp_path, tensors)
    for backend in ("numpy", "torch"):
        model = load_model(folder, backend=backend)
        found = model.weights if backend == "numpy" else model.state_dict()
        assert len(found) == len(tensors)
        for name, array in tensors.items():
            ours = np.asarray(found[name.removeprefix("model.")])
            np.testing.assert_array_equal(ours, array, err_msg=name)


def test_both_backends_compute_the_same_from_one_folder(tmp_path, tensors):
    folder = write_checkpoint(tmp_path, tensors)
    ours, theirs = (
        load_model(folder, backend=backend).next_token_logits([3, 1, 4, 1, 5])
        for backend in ("numpy", "torch")
    )
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(ours).max()


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_shards_are_the_same_model_as_one_file(tmp_path, tensors, backend):
    one = load_model(write_checkpoint(tmp_path / "one", tensors), backend=backend)
    write_shards(tmp_path / "two", tensors)
    two = load_model(tmp_path / "two", backend=backend)
    np.testing.assert_array_equal(
        one.next_token_logits([1, 2, 3]), two.next_token_logits([1, 2, 3])
    )


@pytest.mark.parametrize("stored", DTYPES)
def test_stored_types_are_kept_by_torch_and_widened_by_numpy(tmp_path, tensors, stored):
    folder = write_checkpoint(tmp_path, tensors, dtype=stored)
    rounded = torch.from_numpy(tensors[Q_PROJ]).to(DTYPES[stored])
    model = load_model(folder)
    assert model.layers[0].self_attn.q_proj.weight.dtype == DTYPES[stored]
    assert torch.equal(model.layers[0].self_attn.q_proj.weight, rounded)
    array = load_model(folder, backend="numpy").weights[Q_PROJ.removeprefix("model.")]
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, rounded.float().numpy())


@pytest.mark.parametrize(
    ("said", "expected"), [("bfloat16", "bfloat16"), (None, "float32")]
)
def test_auto_takes_the_type_in_the_config_before_a_mixture_in_the_files(
    tmp_path, tensors, said, expected
):
    # As many checkpoints are stored: matrices in 16 bits, norms in 32.
    halves = {name: array for name, array in tensors.items() if array.ndim == 2}
    names = {**dict.fromkeys(tensors, "norms"), **dict.fromkeys(halves, "matrices")}
    files = {name: f"{part}.safetensors" for name, part in names.items()}
    tmp_path.joinpath("config.json").write_text(json.dumps(CONFIG | {"dtype": said}))
    write_safetensors(tmp_path / "matrices.safetensors", halves, "BF16")
    norms = {name: tensors[name] for name in tensors.keys() - halves.keys()}
    write_safetensors(tmp_path / "norms.safetensors", norms, "F32")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    model = load_model(tmp_path)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, expected)}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_dtype_that_was_asked_for_is_the_dtype_of_every_weight(
    tmp_path, tensors, dtype
):
    model = load_model(write_checkpoint(tmp_path, tensors, dtype="BF16"), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert model.frequencies.dtype == torch.float32


def test_a_torch_model_does_not_change_with_its_file(tmp_path, tensors):
    folder = write_checkpoint(tmp_path, tensors)
    model = load_model(folder)
    before = model.next_token_logits([1, 2, 3])
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-1000, 2)
        file.write(bytes(1000))
    np.testing.assert_array_equal(model.next_token_logits([1, 2, 3]), before)


def test_the_spec_needs_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = load_spec(tmp_path)
    assert (spec.num_layers, spec.head_dim, spec.vocab_size) == (2, 4, 20)


def test_tensors_that_the_family_ignores_are_ignored(tmp_path, tensors):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    load_model(write_checkpoint(tmp_path, tensors | extra))


# Tied embeddings.


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_tied_model_loads_with_and_without_a_redundant_head(tmp_path, backend):
    tensors = make_tensors(TIED)
    assert "lm_head.weight" not in tensors
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    plain = write_checkpoint(tmp_path / "plain", tensors, TIED)
    redundant = write_checkpoint(tmp_path / "redundant", tensors | head, TIED)
    np.testing.assert_array_equal(
        load_model(plain, backend=backend).next_token_logits([1, 2]),
        load_model(redundant, backend=backend).next_token_logits([1, 2]),
    )


def test_a_tied_model_with_another_head_is_refused(tmp_path):
    tensors = make_tensors(TIED)
    head = tensors["model.embed_tokens.weight"].copy()
    head[0, 0] += 1
    folder = write_checkpoint(tmp_path, tensors | {"lm_head.weight": head}, TIED)
    with pytest.raises(WeightMismatch, match=r"lm_head\.weight differs .* to false"):
        load_model(folder)


def test_an_untied_model_without_a_head_is_told_what_may_be_meant(tmp_path, tensors):
    del tensors["lm_head.weight"]
    with pytest.raises(WeightMismatch, match="tie_word_embeddings = false, but there"):
        load_model(write_checkpoint(tmp_path, tensors))


# What does not fit.


def test_everything_that_does_not_fit_is_in_one_error(tmp_path, tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.1.mlp.op_proj.weight"] = np.ones((2, 2), np.float32)
    tensors["model.norm.weight"] = np.ones(7, np.float32)
    with pytest.raises(WeightMismatch) as caught:
        load_model(write_checkpoint(tmp_path, tensors), backend="numpy")
    lines = str(caught.value).splitlines()
    assert lines[1:] == [
        "  missing: layers.1.mlp.up_proj.weight (12, 8)",
        "  shape: norm.weight is (7,), needed (8,)",
        "  unexpected: layers.1.mlp.op_proj.weight",
    ]


def test_a_long_list_is_cut_and_counted(tmp_path, tensors):
    config = CONFIG | {"num_hidden_layers": 10}
    with pytest.raises(WeightMismatch) as caught:
        load_model(write_checkpoint(tmp_path, tensors, config))
    message = str(caught.value)
    assert "72 tensors" in message and "and 52 more" in message
    assert "num_hidden_layers = 10, but the files hold 2 layers" in message
    assert len(message.splitlines()) == 1 + 20 + 1 + 1


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"attention_bias": True}, "asks for 8 biases, but the files hold 0"),
        ({"mlp_bias": True}, "asks for 6 biases, but the files hold 0"),
        ({"vocab_size": 21}, r"vocab_size = 21, but the embedding is \[20, 8\]"),
        ({"num_hidden_layers": 1}, "num_hidden_layers = 1, but .* 2 layers"),
    ],
)
def test_a_setting_that_the_files_contradict_is_named(tmp_path, tensors, changes, note):
    folder = write_checkpoint(tmp_path, tensors, CONFIG | changes)
    with pytest.raises(WeightMismatch, match=note):
        load_model(folder)


def test_biases_that_the_config_does_not_mention_are_refused(tmp_path, tensors):
    bias = {Q_PROJ.replace("weight", "bias"): np.ones(8, np.float32)}
    with pytest.raises(WeightMismatch, match="asks for 0 biases, but the files hold 1"):
        load_model(write_checkpoint(tmp_path, tensors | bias))


def test_two_tensors_for_one_place_are_refused(tmp_path, tensors):
    twice = tensors | {Q_PROJ.removeprefix("model."): tensors[Q_PROJ]}
    with pytest.raises(WeightMismatch, match=r"are both layers\.0\.self_attn\.q_proj"):
        load_model(write_checkpoint(tmp_path, twice))


def test_quantised_weights_are_refused(tmp_path, tensors):
    tensors = {name: tensor.astype(np.int8) for name, tensor in tensors.items()}
    with pytest.raises(ConfigError, match="stored as I8, but F32, F16, BF16"):
        load_model(write_checkpoint(tmp_path, tensors, dtype="I8"), backend="numpy")


# Files that are not there, or not what they should be.


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json in"):
        load_spec(tmp_path)


def test_weights_in_another_format_are_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"never unpickled")
    with pytest.raises(ModelNotFound, match="only safetensors weights are read"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"a": "\xff"}'])
def test_a_config_that_is_no_json_object_is_corrupt(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CorruptFile, match=r"config\.json"):
        load_spec(tmp_path)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_file_that_was_cut_short_is_corrupt(tmp_path, tensors, backend):
    folder = write_checkpoint(tmp_path, tensors)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFile, match=r"model\.safetensors"):
        load_model(folder, backend=backend)


def test_a_missing_shard_is_named(tmp_path, tensors):
    write_shards(tmp_path, tensors)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"lacks 1 of the 2 .* model-00002"):
        load_model(tmp_path)


def test_an_index_that_does_not_fit_its_shards_is_corrupt(tmp_path, tensors):
    weight_map = write_shards(tmp_path, tensors)
    first, second = sorted(set(weight_map.values()))
    moved = next(name for name, file in weight_map.items() if file == first)
    dropped = next(name for name, file in weight_map.items() if file == second)
    wrong = weight_map | {moved: second}
    del wrong[dropped]
    write_index(tmp_path, wrong)
    with pytest.raises(CorruptFile) as caught:
        load_model(tmp_path)
    assert set(str(caught.value).splitlines()[1:]) == {
        f"  {moved} is not in {second}",
        f"  {moved} in {first} is not listed",
        f"  {dropped} in {second} is not listed",
    }


def test_a_long_list_of_disagreements_is_cut_and_counted(tmp_path, tensors):
    weight_map = write_shards(tmp_path, tensors)
    ghosts = {f"ghost.{n:02}": weight_map["lm_head.weight"] for n in range(23)}
    write_index(tmp_path, weight_map | ghosts)
    with pytest.raises(CorruptFile) as caught:
        load_model(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 20 + 1 and lines[-1] == "  and 3 more"


@pytest.mark.parametrize(
    "weight_map",
    [None, ["a"], {"a": ["b"]}, {"a": "../secret.safetensors"}, {"a": ""}],
)
def test_an_index_that_leads_elsewhere_is_corrupt(tmp_path, tensors, weight_map):
    write_shards(tmp_path, tensors)
    write_index(tmp_path, weight_map)
    with pytest.raises(CorruptFile, match="no table from tensors to files beside it"):
        load_model(tmp_path)


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "jax"}, "must be 'numpy' or 'torch'"),
        ({"dtype": "fp8"}, "one of auto, float32, float16, bfloat16"),
        ({"device": "toaster"}, "must be auto, cpu, cuda, cuda:N or mps"),
        ({"device": "meta"}, "must be auto, cpu, cuda, cuda:N or mps"),
        ({"backend": "numpy", "dtype": "bfloat16"}, "computes in float32 only"),
        ({"backend": "numpy", "device": "cuda"}, "runs on the CPU only"),
    ],
)
def test_an_impossible_option_is_refused_with_the_possible_ones(
    tmp_path, tensors, options, message
):
    with pytest.raises(ConfigError, match=message):
        load_model(write_checkpoint(tmp_path, tensors), **options)


def test_a_device_that_is_not_there_is_unavailable(tmp_path, tensors):
    device = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(BackendUnavailable, match=f"{device}.* sees"):
        load_model(write_checkpoint(tmp_path, tensors), device=device)


def test_without_torch_its_backend_says_what_to_install(tmp_path, tensors, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    folder = write_checkpoint(tmp_path, tensors)
    with pytest.raises(BackendUnavailable, match="install torch"):
        load_model(folder)
    assert load_model(folder, backend="numpy").next_token_logits([1]).shape == (20,)
