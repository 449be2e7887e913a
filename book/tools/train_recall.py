"""Train the small models of the chapter on hybrid attention: they recall pairs.

Usage: ``python book/tools/train_recall.py {hybrid,recurrent} [--out FOLDER]``

A text is pairs of a key and a value, a bar, and keys: ``k3 v17 k9 v2 | k9 k3``. At
each key behind the bar the model says its value. This is multi-query associative
recall, from Arora et al., "Zoology: Measuring and Improving Recall in Efficient
Language Models" (2023), https://arxiv.org/abs/2312.04927.

Both models have Qwen3.5's layers. Of the hybrid's four, the last is full attention;
the recurrent model has a state of one size only. Minutes on one core of a CPU.
"""

import argparse
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

MODELS = Path(__file__).parents[1] / "models"
NUM_KEYS = 64  # token ids 0 to 63; the values are 64 to 127
BAR = 2 * NUM_KEYS
WORDS = [*(f"{kind}{n}" for kind in "kv" for n in range(NUM_KEYS)), "|", "?"]
LAYER_TYPES = {
    "hybrid": [*3 * ["linear_attention"], "full_attention"],
    "recurrent": 4 * ["linear_attention"],
}
# The recurrent model learns best from few pairs, which are soon too many for it; the
# hybrid needs many, or it is content with what the states hold.
RECIPES = {
    "hybrid": {"steps": 1000, "pairs": 64, "growing": 0.4},
    "recurrent": {"steps": 900, "pairs": 32, "growing": 1.0},
}
COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # of pairs, for the log


def make_batch(
    rng: np.random.Generator, batch_size: int, num_pairs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return texts about pairs that were drawn anew, and the answers.

    No key comes twice before the bar; behind it, each comes once more, in any order.

    Returns:
        Token ids, [batch_size, 3 * num_pairs + 1], and the values to say at the last
        `num_pairs` of them, [batch_size, num_pairs].
    """
    keys = rng.permuted(np.tile(np.arange(NUM_KEYS), (batch_size, 1)), axis=1)
    keys = keys[:, :num_pairs]
    values = NUM_KEYS + rng.integers(NUM_KEYS, size=keys.shape)
    pairs = np.stack([keys, values], axis=-1).reshape(batch_size, -1)
    bars = np.full((batch_size, 1), BAR)
    order = rng.permuted(np.tile(np.arange(num_pairs), (batch_size, 1)), axis=1)
    queries = np.take_along_axis(keys, order, axis=1)
    answers = np.take_along_axis(values, order, axis=1)
    return np.concatenate([pairs, bars, queries], axis=1), answers


def make_model(kind: str) -> transformers.Qwen3_5ForCausalLM:
    """Build a model with random weights, a state of 8 x 16 for each linear head."""
    num_heads = 2
    config = transformers.Qwen3_5TextConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=len(LAYER_TYPES[kind]),
        layer_types=LAYER_TYPES[kind],
        num_attention_heads=num_heads,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=num_heads,
        linear_num_value_heads=num_heads,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],  # 4 angles, for 8 of the 32 elements
            "mrope_interleaved": True,
        },
    )
    model = transformers.Qwen3_5ForCausalLM(config)
    # A state halves within 70 to 700 tokens at first, as in Mamba. With the values of
    # the library most of it would be gone after one token, and nothing learned.
    steps = torch.logspace(-3, -2, num_heads)
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            layer.linear_attn.dt_bias.data = steps.expm1().log()  # softplus, inverted
            layer.linear_attn.A_log.data.zero_()
    return model


def answer(model: transformers.PreTrainedModel, token_ids: np.ndarray) -> torch.Tensor:
    """Return the logits at the keys behind the bar."""
    num_pairs = token_ids.shape[1] // 3
    logits = model(torch.from_numpy(token_ids), use_cache=False).logits
    return logits[:, -num_pairs:]


@torch.inference_mode()
def measure(
    model: transformers.PreTrainedModel, num_pairs: int, num_queries: int
) -> float:
    """Return which part of about so many queries the model answers rightly."""
    rng = np.random.default_rng([1, num_pairs])  # other texts than those of training
    token_ids, values = make_batch(rng, math.ceil(num_queries / num_pairs), num_pairs)
    return float(np.mean(answer(model, token_ids).argmax(-1).numpy() == values))


def train(
    model: transformers.PreTrainedModel,
    rng: np.random.Generator,
    args: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    """Train with AdamW; the number of pairs grows in the first part of the steps.

    It ends early if almost nothing is left to learn.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, args.steps, pct_start=0.05, cycle_momentum=False
    )
    start, start_cpu = time.perf_counter(), time.process_time()
    for step in range(1, args.steps + 1):
        growth = min(1, step / (args.growing * args.steps))
        most = 4 + round(growth * (args.pairs - 4))
        token_ids, values = make_batch(rng, args.batch, rng.integers(1, most + 1))
        logits = answer(model, token_ids)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(values).flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == args.steps:
            accuracies = [measure(model, n, 256) for n in COUNTS]
            row = " ".join(f"{accuracy:5.2f}" for accuracy in accuracies)
            seconds = time.perf_counter() - start
            say(f"{step:5} {loss:7.4f} {row} {seconds:8.0f}")
            if min(accuracies) > 0.99:
                break
    used = time.process_time() - start_cpu
    say(f"trained in {time.perf_counter() - start:.0f} s ({used:.0f} s of CPU time)")


def save(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Write the weights, the configuration and the tokenizer."""
    model.save_pretrained(folder)
    words = {f"▁{word}": token_id for token_id, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="▁?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.save(str(folder / "tokenizer.json"))
    # Without it, transformers takes the file for byte-level BPE and finds no words.
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast"}\n'
    (folder / "tokenizer_config.json").write_text(settings)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=LAYER_TYPES)
    parser.add_argument("--out", type=Path, help="folder; book/models/recall-KIND")
    parser.add_argument("--steps", type=int, help="at most")
    parser.add_argument("--batch", type=int, default=64, help="texts per step")
    parser.add_argument("--pairs", type=int, help="at most, in a text")
    parser.add_argument("--growing", type=float, help="part of the steps")
    parser.add_argument("--lr", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, value in RECIPES[args.kind].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    folder = args.out or MODELS / f"recall-{args.kind}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # sums in one order, so that a run can be repeated
    torch.manual_seed(args.seed)
    model = make_model(args.kind)
    with open(folder / "train.log", "w", encoding="utf-8") as log:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=log, flush=True)

        say(f"python book/tools/train_recall.py {' '.join(sys.argv[1:])}")
        settings = vars(args) | {"out": folder.name}
        say(", ".join(f"{name} {value}" for name, value in settings.items()))
        say(
            f"Python {platform.python_version()}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, 1 thread"
        )
        say(f"layers: {', '.join(model.config.layer_types)}")
        say(f"{model.num_parameters():,} parameters")
        say("")
        say(f" step    loss {' '.join(f'{n:5}' for n in COUNTS)}  seconds")
        train(model, np.random.default_rng(args.seed), args, say)
        save(model, folder)
        say("")
        say("pairs  accuracy over about 4,096 queries")
        for n in COUNTS:
            say(f"{n:5}  {measure(model, n, 4096):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
