"""The same GGUF files read by transformers: weights bit for bit, config key by key."""

from pathlib import Path

import numpy as np
import pytest
import torch

from minivllm.loading.gguf import hugging_face_tensor, model_config
from minivllm.loading.gguf_file import read_gguf
from minivllm.loading.gguf_names import LLAMA, hugging_face_name
from minivllm.loading.tensors import read_safetensors

transformers = pytest.importorskip("transformers")


def read_with_transformers(path) -> transformers.PreTrainedModel:
    # Without dequantize=True it would keep the blocks packed.
    config = transformers.GgufConfig(gguf_file=path.name, dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=config,
    )


def compare(path, weights: Path | None = None) -> None:
    file = read_gguf(path)
    model = read_with_transformers(path)
    theirs = model.state_dict()
    if model.config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    ours = {hugging_face_name(LLAMA, name): name for name in file.tensors}
    ours.pop(None, None)  # rope_freqs.weight, which transformers drops
    assert ours.keys() == theirs.keys()
    for name, gguf_name in ours.items():
        exact = hugging_face_tensor(file, gguf_name)
        np.testing.assert_array_equal(exact, theirs[name].numpy(), name)
        if weights:  # what was converted is the same, rounded once
            (converted,) = read_safetensors(weights, [name]).values()
            rounded = theirs[name].bfloat16().float().numpy()
            np.testing.assert_array_equal(converted, rounded, name)
    config = model_config(file)
    assert config["rope_theta"] == model.config.rope_parameters["rope_theta"]
    # transformers keeps the float32 of the file, 9.99e-06, where we write 1e-05.
    assert np.float32(config["rms_norm_eps"]) == np.float32(model.config.rms_norm_eps)
    elsewhere = {"rope_theta", "rope_scaling", "rms_norm_eps", "dtype", "architectures"}
    for key in config.keys() - elsewhere:
        assert config[key] == getattr(model.config, key), key


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K"])
def test_a_tiny_file_of_each_type_gives_the_weights_transformers_reads(tiny_gguf, kind):
    compare(tiny_gguf(kind=kind, rope_factors=[2.0] * 32))


def test_a_tied_file_gives_the_weights_transformers_reads(tiny_gguf):
    compare(tiny_gguf(kind="Q8_0", tied=True))


def test_the_default_model_is_bit_for_bit_what_transformers_reads(
    smollm2_gguf, smollm2_dir
):
    compare(smollm2_gguf, smollm2_dir / "model.safetensors")
