"""Both decoders with the same tiny random weights."""

import numpy as np
import torch

from minivllm.models.decoder import Decoder
from minivllm.models.spec import ModelSpec, RopeSpec
from minivllm.reference.decoder import NumpyDecoder

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=10_000.0),
)


def random_weights():
    """Draw matrices that keep the size of what passes, and norms around one."""
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in SPEC.weight_shapes().items():
        noise = random.standard_normal(shape, dtype=np.float32)
        is_norm = len(shape) == 1
        weights[name] = 1 + 0.3 * noise if is_norm else noise / shape[1] ** 0.5
    return weights


def numpy_decoder():
    return NumpyDecoder(SPEC, random_weights())


def torch_decoder():
    decoder = Decoder(SPEC)
    decoder.load_weights(
        {name: torch.from_numpy(w) for name, w in random_weights().items()}
    )
    return decoder
