"""Both decoders with the same tiny random weights."""

from dataclasses import replace

import numpy as np
import torch

from minivllm.models.decoder import Decoder
from minivllm.models.spec import DeltaNetSpec, ModelSpec, RopeSpec
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
# Every knob of Gemma, and windows of all kinds: some, none, one that is larger by one.
GEMMA = replace(
    SPEC,
    hidden_size=32,
    intermediate_size=64,
    head_dim=16,
    hidden_act="gelu_tanh",
    qk_norm=True,
    norm_plus_one=True,
    post_norms=True,
    embedding_scale=32**0.5,
    query_pre_attn_scalar=24.0,
    windows=(5, None, 6),
    local_rope=RopeSpec(theta=100.0),
)
# Three delta nets around a layer that attends: Qwen3.5, small.
HYBRID = replace(
    SPEC,
    num_layers=4,
    hidden_size=32,
    intermediate_size=64,
    head_dim=16,
    qk_norm=True,
    norm_plus_one=True,
    rotary_dim=4,
    attention_gate=True,
    delta_net=DeltaNetSpec(
        layers=(0, 1, 3),
        num_key_heads=2,
        num_value_heads=4,
        key_head_dim=6,
        value_head_dim=10,
        conv_kernel_size=4,
    ),
)


def random_weights(spec=SPEC):
    """Draw matrices that keep the size of what passes, and norms around one."""
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in spec.weight_shapes().items():
        noise = random.standard_normal(shape, dtype=np.float32)
        is_norm = len(shape) == 1
        weights[name] = 1 + 0.3 * noise if is_norm else noise / shape[1] ** 0.5
    return weights


def numpy_decoder(spec=SPEC):
    return NumpyDecoder(spec, random_weights(spec))


def torch_decoder(spec=SPEC):
    decoder = Decoder(spec)
    decoder.load_weights(
        {name: torch.from_numpy(w) for name, w in random_weights(spec).items()}
    )
    return decoder
