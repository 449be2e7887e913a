"""Tiny random Llama checkpoints made by `transformers`, the reference here."""

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm.models.decoder import Decoder
from minivllm.models.families import family_of
from minivllm.models.spec import ModelSpec
from minivllm.reference.decoder import NumpyDecoder

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Small, so that head_dim 16 has fast, blended and slow frequencies.
    "original_max_position_embeddings": 64,
}


def make_llama(**overrides: Any) -> LlamaForCausalLM:
    """Make a model whose every parameter matters.

    A fresh model is blind to half of the mistakes: its norms are one, its biases zero.
    All parameters are drawn anew, norms around one.
    """
    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | overrides))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            else:  # keeps the size of the activations from layer to layer
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return model


def spec_of(model: LlamaForCausalLM) -> ModelSpec:
    """Read our spec from the config that `transformers` would write."""
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    return family_of(config).read_spec(config)


def weights_of(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Return the weights under our names, without what tying repeats."""
    family = family_of({"architectures": ["LlamaForCausalLM"]})
    weights = {family.rename(k): v.detach() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def numpy_decoder(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> NumpyDecoder:
    """Make the NumPy decoder from torch weights."""
    return NumpyDecoder(spec, {k: v.float().numpy() for k, v in weights.items()})


def torch_decoder(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> Decoder:
    """Make the torch decoder, in the dtype of the weights."""
    decoder = Decoder(spec)
    decoder.load_weights(weights)
    return decoder


def relative_error(ours: np.ndarray, reference: np.ndarray) -> float:
    """Return max |difference| / max |reference|."""
    return float(np.abs(ours - reference).max() / np.abs(reference).max())
