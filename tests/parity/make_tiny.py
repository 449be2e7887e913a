"""Tiny random checkpoints of each family, as `transformers` writes them.

    python tests/parity/make_tiny.py FOLDER
    python tests/parity/make_tiny.py FOLDER gemma3 --dtype bfloat16 --shard-size 50KB

Each becomes a folder of its own, with weights, config and a tokenizer of bytes, so that
`minivllm generate --model FOLDER/qwen3 Hello` speaks: nonsense, always the same.

A fresh model is blind to half of the mistakes: its norms are one (Gemma's are zero),
its biases zero, its experts nearly equal. So every parameter is drawn anew.
"""

import argparse
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel

NUM_BYTES = 256
WINDOW = 8
# No size repeats another where that could hide a mistake: heads are wider together
# than the hidden states, and the vocabulary is odd and has rows without a token.
SIZES: dict[str, Any] = {
    "vocab_size": 263,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """The tokens beside the bytes, and how a chat is written with them."""

    bos: str | None
    eos: str
    start: str
    end: str
    header: str
    """Between the start of a turn, the role, and the text: one `{}`, for the role."""
    assistant: str = "assistant"

    @property
    def tokens(self) -> list[str]:
        """All tokens; the first has the id 256."""
        return [t for t in (self.bos, self.eos, self.start, self.end) if t]

    def id_of(self, token: str) -> int:
        """Return the id of one of them."""
        return NUM_BYTES + self.tokens.index(token)

    @property
    def chat_template(self) -> str:
        """The template: BOS where the family has one, the turns, an open turn."""
        role = "{{ message.role }}"
        if self.assistant != "assistant":
            role = f"{{{{ message.role | replace('assistant', '{self.assistant}') }}}}"
        return (
            ("{{ bos_token }}" if self.bos else "")
            + "{% for message in messages %}"
            + self.start
            + self.header.format(role)
            + "{{ message.content | trim }}"
            + self.end
            + "{% endfor %}{% if add_generation_prompt %}"
            + self.start
            + self.header.format(self.assistant)
            + "{% endif %}"
        )


LLAMA_MARKERS = Markers(
    bos="<|begin_of_text|>",
    eos="<|end_of_text|>",
    start="<|start_header_id|>",
    end="<|eot_id|>",
    header="{}:\n\n",
)
QWEN_MARKERS = Markers(
    bos=None,
    eos="<|endoftext|>",
    start="<|im_start|>",
    end="<|im_end|>",
    header="{}\n",
)
GEMMA_MARKERS = Markers(
    bos="<bos>",
    eos="<eos>",
    start="<start_of_turn>",
    end="<end_of_turn>",
    header="{}\n",
    assistant="model",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyFamily:
    """What makes a family what it is, in the words of its config."""

    model: str
    config: dict[str, Any]
    markers: Markers
    norm_center: float = 1.0
    wrapper: dict[str, Any] | None = None
    """The outer config, if the decoder is the text part of a model that sees, too."""

    @property
    def is_tied(self) -> bool:
        """Whether input and output share a matrix, if the config does not say."""
        return self.markers is GEMMA_MARKERS


GEMMA3 = {
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,  # two layers with a window, one without, one with
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
QWEN3_5 = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,  # two delta nets, attention, one more delta net
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],  # of the four pairs
        "mrope_interleaved": True,
    },
}
QWEN3_5_EXPERTS = {
    "intermediate_size": None,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
QWEN3_5_WRAPPER = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": SIZES["hidden_size"],
        "num_position_embeddings": 4,
    },
    "image_token_id": SIZES["vocab_size"] - 1,
    "video_token_id": SIZES["vocab_size"] - 1,
}
FAMILIES = {
    "llama": TinyFamily(
        model="LlamaForCausalLM",
        config={
            "num_attention_heads": 6,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                # Small: most positions of the tests are beyond it.
                "original_max_position_embeddings": 16,
            },
        },
        markers=LLAMA_MARKERS,
    ),
    "qwen2": TinyFamily(
        model="Qwen2ForCausalLM",
        config={
            # It has no head_dim of its own.
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": None,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
        markers=QWEN_MARKERS,
    ),
    "qwen3": TinyFamily(
        model="Qwen3ForCausalLM",
        config={
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        markers=QWEN_MARKERS,
    ),
    "qwen3_moe": TinyFamily(
        model="Qwen3MoeForCausalLM",
        config={
            "mlp_only_layers": [1],
            "num_experts": 12,  # more than ten: 10 comes before 2 in an alphabet
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        markers=QWEN_MARKERS,
    ),
    "gemma3": TinyFamily(
        model="Gemma3ForCausalLM",
        config=GEMMA3,
        markers=GEMMA_MARKERS,
        norm_center=0.0,  # its norms multiply by 1 + weight
    ),
    "qwen3_5": TinyFamily(
        model="Qwen3_5ForCausalLM",
        config=QWEN3_5,
        markers=QWEN_MARKERS,
        norm_center=0.0,
    ),
    "qwen3_5_moe": TinyFamily(
        model="Qwen3_5MoeForCausalLM",
        config=QWEN3_5 | QWEN3_5_EXPERTS,
        markers=QWEN_MARKERS,
        norm_center=0.0,
    ),
    "gemma3_with_images": TinyFamily(
        model="Gemma3ForConditionalGeneration",
        config=GEMMA3,
        markers=GEMMA_MARKERS,
        norm_center=0.0,
        wrapper={
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 8,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": SIZES["vocab_size"] - 1,
        },
    ),
    "qwen3_5_with_images": TinyFamily(
        model="Qwen3_5ForConditionalGeneration",
        config=QWEN3_5,
        markers=QWEN_MARKERS,
        norm_center=0.0,
        wrapper=QWEN3_5_WRAPPER,
    ),
    "qwen3_5_moe_with_images": TinyFamily(
        model="Qwen3_5MoeForConditionalGeneration",
        config=QWEN3_5 | QWEN3_5_EXPERTS,
        markers=QWEN_MARKERS,
        norm_center=0.0,
        wrapper=QWEN3_5_WRAPPER,
    ),
}


def make_config(family: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """Make the config of a tiny model.

    Args:
        family: A key of FAMILIES.
        overrides: Take the place of what the family has; None takes a key away.
    """
    tiny = FAMILIES[family]
    settings = SIZES | tiny.config | overrides
    settings = {key: value for key, value in settings.items() if value is not None}
    markers = tiny.markers
    ids = {
        # Qwen's files name one, too, that no text begins with.
        "bos_token_id": markers.id_of(markers.bos or markers.eos),
        "eos_token_id": [markers.id_of(token) for token in (markers.end, markers.eos)],
        "pad_token_id": markers.id_of(markers.eos),
    }
    config_class = getattr(transformers, tiny.model).config_class
    if tiny.wrapper is None:
        return config_class(**settings, **ids)
    return config_class(
        text_config=settings | ids,
        # Only what the outer config says of these two counts.
        tie_word_embeddings=settings.get("tie_word_embeddings", tiny.is_tied),
        **ids,
        **tiny.wrapper,
    )


@torch.no_grad()
def redraw(model: PreTrainedModel, norm_center: float, seed: int) -> None:
    """Draw every parameter anew, by its name: what two models share is equal."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("linear_attn.norm.weight"):
            noise = 1 + 0.3 * noise  # plain, whatever the other norms of the model are
        elif "norm" in name:
            noise = norm_center + 0.3 * noise
        elif parameter.ndim == 1:
            noise = 0.3 * noise
        else:  # keeps the size of the activations from layer to layer
            noise = noise / parameter.shape[-1] ** 0.5
        if "embed_tokens" in name:
            noise = 0.3 * noise  # large, a tied head would only repeat what it reads
        parameter.copy_(noise)


def make_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Make a tiny model in float32 whose every parameter matters; see `make_config`."""
    tiny = FAMILIES[family]
    config = make_config(family, **overrides)
    model = getattr(transformers, tiny.model)(config).eval()
    redraw(model, tiny.norm_center, seed)
    return model


def write_tokenizer(folder: Path, markers: Markers) -> None:
    """Write a tokenizer with a token for each byte, and the markers of a family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(markers.tokens)
    if markers.bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{markers.bos} $A",
            special_tokens=[(markers.bos, markers.id_of(markers.bos))],
        )
    named = {"bos_token": markers.bos, "eos_token": markers.eos}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{key: token for key, token in named.items() if token},
    )
    tokenizer.chat_template = markers.chat_template
    tokenizer.save_pretrained(folder)


def make_tiny(
    folder: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    shard_size: str | None = None,
    save_original_format: bool = True,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write the folder of a tiny model.

    Args:
        folder: Made if it is not there.
        family: A key of FAMILIES.
        dtype: Of the stored weights, and of the config.
        shard_size: Bytes of a file at most, such as "50KB"; None for one file.
        save_original_format: Whether names are those of the published files; else
            those that `transformers` has in memory.
        seed: Of the weights.
        overrides: See `make_config`.

    Returns:
        The folder.
    """
    model = make_model(family, seed, **overrides)
    model.to(dtype).save_pretrained(
        folder,
        max_shard_size=shard_size or "1GB",
        save_original_format=save_original_format,
    )
    write_tokenizer(folder, FAMILIES[family].markers)
    return Path(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write what the command line asks for, and say what is there."""
    parser = argparse.ArgumentParser(
        description="Write tiny random checkpoints, one folder for each family."
    )
    parser.add_argument("folder", type=Path, help="where the folders are made")
    parser.add_argument(
        "families",
        nargs="*",
        metavar="family",
        help=f"of {', '.join(FAMILIES)}; all of them by default",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32"
    )
    parser.add_argument("--shard-size", help="largest file, such as 50KB")
    parser.add_argument(
        "--tied",
        action=argparse.BooleanOptionalAction,
        help="whether embedding and output share a matrix; as the family has it",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown:
        parser.error(f"no family {unknown[0]}: choose of {', '.join(FAMILIES)}")
    overrides = {} if options.tied is None else {"tie_word_embeddings": options.tied}
    for family in options.families or FAMILIES:
        folder = make_tiny(
            options.folder / family,
            family,
            dtype=getattr(torch, options.dtype),
            shard_size=options.shard_size,
            seed=options.seed,
            **overrides,
        )
        files = sorted(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        print(f"{folder}: {FAMILIES[family].model}, {len(files)} files, {size:,} bytes")


if __name__ == "__main__":
    main()
