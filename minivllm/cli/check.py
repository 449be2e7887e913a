"""The subcommand `check`: can we run a checkpoint, and does it compute what it should?

It prints the knobs that config.json sets, accounts for every tensor, and compares the
logits with those of `transformers`, where that is installed.

In vLLM: there is no such command.
Source: appendix A23, "Reading families".
"""

import argparse
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from minivllm.cli.main import FAILED
from minivllm.cli.options import integer
from minivllm.errors import BackendUnavailable, ConfigError
from minivllm.json_files import read_json
from minivllm.loading.checkpoint import account_for, stored_tensors
from minivllm.loading.gguf import (
    convert_gguf,
    gguf_tensors,
    model_config,
    text_files,
)
from minivllm.loading.gguf_file import read_gguf
from minivllm.loading.hub import resolve_model
from minivllm.models.families import family_of
from minivllm.models.knobs import knobs_of
from minivllm.models.spec import ModelSpec
from minivllm.parity import (
    TOLERANCE,
    difference,
    enough_tokens,
    our_logits,
    their_logits,
    why_no_transformers,
)
from minivllm.sampling.defaults import read_sampling_defaults
from minivllm.text.tokenizer import Tokenizer

EXAMPLES = """\
examples:
  minivllm check smollm2-135m-instruct
  minivllm check models/Qwen3-0.6B --tokens 64
  minivllm check model-Q8_0.gguf --compare never

Everything is computed in float32 on the CPU. A GGUF file is unpacked into a temporary
folder for it, four bytes a weight.

exit code:
  0  The checkpoint can be run, and its logits are as they should be; or they were not
     compared, and a line says why. With --compare always, they were.
  1  It cannot be run, or its logits differ, or --compare always could not compare.
"""
TEXT = "A model reads a text as tokens, and says for each of them what may follow. "


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add = parser.add_argument
    add(
        "model",
        metavar="PATH",
        help="a folder, a .gguf file, a hub id or a short name",
    )
    add(
        "--tokens",
        type=integer(2),
        metavar="N",
        help="length of the text to compare on (default: 16, or a little more than "
        "the model's window, up to 64)",
    )
    add(
        "--backend",
        choices=("both", "numpy", "torch"),
        default="both",
        help="whose logits are compared (default: %(default)s)",
    )
    add(
        "--compare",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether to compare logits (default: auto, if transformers is installed "
        "and can read the model, and the memory suffices)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what was found, and return the exit code."""
    path = Path(os.path.expanduser(arguments.model))
    if not path.is_dir() and not (path.is_file() and path.suffix.lower() == ".gguf"):
        path = resolve_model(arguments.model, progress=True)
    spec = report(path)
    report_text(path, spec)
    num_tokens = arguments.tokens or enough_tokens(spec)
    if num_tokens > spec.max_position_embeddings:
        raise ConfigError(
            f"--tokens is {num_tokens}, but the model was made for "
            f"{spec.max_position_embeddings} tokens: ask for fewer"
        )
    reason = why_not_compared(arguments.compare, path, spec)
    if reason:
        print(f"\nlogits\n  not compared: {reason}")
        return 0
    backends = [arguments.backend]
    if arguments.backend == "both":
        backends = ["numpy", "torch"]
    try:
        return compare(path, spec, backends, num_tokens)
    except BackendUnavailable as error:
        if arguments.compare == "always":
            raise
        print(f"  not compared: {error}")
        return 0


def report(path: Path) -> ModelSpec:
    """Print knobs and tensors of a model, and return its spec.

    Raises:
        WeightMismatch: The tensors are not those that its config asks for.
        MinivllmError: Its config is not supported, or a file is damaged.
    """
    file = read_gguf(path) if path.is_file() else None
    config = model_config(file) if file else read_json(path / "config.json")
    family = family_of(config)
    spec = family.read_spec(config)
    source = f"{path.name}, a GGUF file" if file else f"{path.name}/config.json"
    print(f"{spec.architecture}, from {source}\n\nknobs")
    for knob, value in knobs_of(spec).items():
        print(f"  {knob:15}{value}")
    if file:
        stored = gguf_tensors(file)
        types = {tensor.type.name for tensor in file.tensors.values()}
        count, files = len(file.tensors), 1
    else:
        stored = stored_tensors(path)
        types = {tensor.dtype for tensor in stored}
        count, files = len(stored), len({tensor.path for tensor in stored})
    print(
        f"\ntensors\n  {count:,} in {files} {'file' if files == 1 else 'files'}, as "
        f"{' and '.join(sorted(types))}",
        flush=True,
    )
    account = account_for(spec, family, stored)
    print(
        f"  all {len(account.places):,} that the decoder needs are there, in the right "
        f"shapes: {spec.num_parameters:,} weights"
    )
    if account.repeated:
        print(f"  1 repeats the embedding, left out: {account.repeated[0]}")
    if account.ignored:
        names = ", ".join(sorted(shortened(account.ignored)))
        print(f"  {len(account.ignored):,} left out on purpose: {names}")
    return spec


def report_text(path: Path, spec: ModelSpec) -> None:
    """Print what there is to turn text into tokens.

    Raises:
        MinivllmError: A file is damaged, or the tokenizer is another model's.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = path
        if path.is_file():
            folder = Path(scratch)
            for name, text in text_files(read_gguf(path)).items():
                (folder / name).write_text(text, encoding="utf-8")
        print("\ntext")
        if not (folder / "tokenizer.json").is_file():
            print(
                "  there is no tokenizer.json, without which no text can be generated"
            )
            return
        tokenizer = Tokenizer.from_dir(folder)
        tokenizer.check_embedding_rows(spec.vocab_size)
        read_sampling_defaults(folder)
        kind = "a" if tokenizer.chat_template else "no"
        print(f"  {tokenizer.vocab_size:,} tokens, {kind} chat template")


def shortened(names: Iterable[str]) -> set[str]:
    """Return the names of tensors with one for all layers, by their first parts."""
    return {".".join(re.sub(r"\.\d+\.", ".N.", name).split(".")[:4]) for name in names}


def free_memory() -> int | None:
    """Return how many bytes of memory are free, None if the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def why_not_compared(wish: str, path: Path, spec: ModelSpec) -> str | None:
    """Return why no logits are compared, None if they are; say what memory it takes.

    Raises:
        BackendUnavailable: They should always be, but cannot.
    """
    if wish == "never":
        return "--compare never"
    if reason := why_no_transformers():
        if wish == "always":
            raise BackendUnavailable(
                f"logits cannot be compared, for {reason}: install it, or leave "
                "--compare out"
            )
        return reason
    # One model at a time; transformers has the weights of a GGUF file twice.
    needed = spec.num_parameters * (8 if path.is_file() else 4)
    free = free_memory()
    print(f"\nmemory: {needed / 1e9:.2f} GB for float32", end="")
    print(f", {free / 1e9:.2f} GB are free" if free is not None else "", flush=True)
    if wish == "auto" and free is not None and needed > 0.9 * free:
        return "too little memory; --compare always tries it all the same"
    return None


def text_of(folder: Path, spec: ModelSpec, num_tokens: int) -> list[int]:
    """Return tokens to compare on: of a text, or random ones without a tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        random = np.random.default_rng(0)
        return random.integers(spec.vocab_size, size=num_tokens).tolist()
    token_ids: list[int] = []
    text, tokenizer = TEXT, Tokenizer.from_dir(folder)
    while len(token_ids) < num_tokens:
        token_ids, text = tokenizer.encode(text), 2 * text
    return token_ids[:num_tokens]


def compare(path: Path, spec: ModelSpec, backends: list[str], num_tokens: int) -> int:
    """Print how far our logits are from those of transformers; return the exit code.

    Raises:
        BackendUnavailable: Those of transformers, or ours, cannot be computed.
    """
    print("\nlogits", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = path
        if path.is_file():
            folder = Path(scratch) / "model"
            convert_gguf(path, folder, dtype="F32")
        token_ids = text_of(folder, spec, num_tokens)
        ours = {name: our_logits(folder, name, token_ids) for name in backends}
        theirs = their_logits(folder, token_ids, path if path.is_file() else None)
    all_logits = {"transformers": theirs, **ours}
    broken = [name for name, x in all_logits.items() if not np.isfinite(x).all()]
    if len(broken) == len(all_logits):
        print(
            "  NaN or infinity, with transformers as with us: the weights are damaged, "
            "or too large for float32; fetch them again"
        )
        return FAILED
    exit_code = 0
    if broken:
        print(
            f"  NaN or infinity with {' and '.join(broken)}, not with the others: look "
            "for it in the weights, and for numbers too large for float32"
        )
        exit_code = FAILED
    for name, logits in ours.items():
        if name in broken or "transformers" in broken:
            continue  # a difference from NaN says nothing
        found = difference(logits, theirs)
        verdict = "as they should be" if found.fits else "NOT the same model"
        print(
            f"  {name} against transformers, {num_tokens} tokens: largest difference "
            f"{found.largest:.1e} of the largest logit (allowed {TOLERANCE:.0e}), the "
            f"same best token {found.same_choices} times: {verdict}"
        )
        exit_code = exit_code if found.fits else FAILED
    windows = [window for window in spec.windows if window is not None]
    if windows and num_tokens <= min(windows):
        enough = min(min(windows) + 8, spec.max_position_embeddings)
        way_out = f": try --tokens {enough}" if enough > min(windows) else ""
        print(
            f"  {num_tokens} tokens do not reach beyond the window of "
            f"{min(windows)}{way_out}"
        )
    return exit_code
