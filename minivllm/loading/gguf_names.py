"""Translate the names of a GGUF file's tensors to Hugging Face's.

Invariant: a tensor that is in no table has no name, and its model is refused. Called by
the converter.

In vLLM: the project vllm-gguf-plugin (vllm_gguf_plugin/loader.py).
Source: appendix A1, "Files"; appendix A23, "Reading families".
"""

import re
from dataclasses import dataclass

from minivllm.errors import ConfigError
from minivllm.loading.gguf_file import GgufFile
from minivllm.models.families.base import Part
from minivllm.models.families.qwen3 import unstack_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What an architecture is called in GGUF, and what in Hugging Face's files."""

    class_name: str
    model_type: str
    tensors: dict[str, str]  # GGUF name -> Hugging Face name, {} = number of the layer
    interleaved: tuple[str, ...] = ()  # rows that llama.cpp reorders for its RoPE
    norm_offset: float = 0.0  # what its converter adds to the weights of norms
    ends: tuple[str, ...] = ()  # tokens that end a turn, of which files name only one


LLAMA_TENSORS = {
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
}
QK_NORMS = {
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
}
# The name that is Llama's norm before the MLP is here the one behind attention.
FOUR_NORMS = {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
EXPERTS = {
    "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.gate",
    "blk.{}.ffn_gate_exps": "model.layers.{}.mlp.experts.gate_proj",
    "blk.{}.ffn_up_exps": "model.layers.{}.mlp.experts.up_proj",
    "blk.{}.ffn_gate_up_exps": "model.layers.{}.mlp.experts.gate_up_proj",
    "blk.{}.ffn_down_exps": "model.layers.{}.mlp.experts.down_proj",
}
QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")

LLAMA = Architecture(
    class_name="LlamaForCausalLM",
    model_type="llama",
    tensors=LLAMA_TENSORS,
    interleaved=("attn_q", "attn_k"),
    ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
)
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": Architecture(
        class_name="Qwen2ForCausalLM",
        model_type="qwen2",
        tensors=LLAMA_TENSORS,
        ends=QWEN_ENDS,
    ),
    "qwen3": Architecture(
        class_name="Qwen3ForCausalLM",
        model_type="qwen3",
        tensors=LLAMA_TENSORS | QK_NORMS,
        ends=QWEN_ENDS,
    ),
    "qwen3moe": Architecture(
        class_name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        tensors=LLAMA_TENSORS | QK_NORMS | EXPERTS,
        ends=QWEN_ENDS,
    ),
    "gemma3": Architecture(
        class_name="Gemma3ForCausalLM",
        model_type="gemma3_text",
        tensors=LLAMA_TENSORS | QK_NORMS | FOUR_NORMS,
        norm_offset=1.0,
        ends=("<end_of_turn>",),
    ),
}
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


def hugging_face_parts(
    architecture: Architecture, name: str, shape: tuple[int, ...]
) -> dict[str, Part]:
    """Translate the name of a tensor: Hugging Face's names, each with its part of it.

    Returns:
        One name; for the matrices of all experts, which a GGUF file keeps in one
        tensor, a name per expert; {} for a tensor that the architecture does not have.
    """
    target = hugging_face_name(architecture, name)
    if target is None:
        return {}
    if ".mlp.experts." not in target:
        return {target: ()}
    ours = target.removeprefix("model.").removesuffix(".weight")
    return {f"model.{n}": part for n, part in unstack_experts(ours, shape).items()}
