"""Compare our decoders with `transformers` on a checkpoint that somebody has.

Called by the command line.

In vLLM: tests/models compares its outputs with those of `transformers`.
Source: appendix A23, "Reading families".
"""

import importlib.util
import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from minivllm.errors import BackendUnavailable
from minivllm.loading.loader import load_model
from minivllm.models.spec import ModelSpec
from minivllm.reference.decoder import NumpyDecoder

if TYPE_CHECKING:
    from minivllm.models.decoder import Decoder

# Of the largest logit, in float32: sums in another order differ by some 1e-6.
TOLERANCE = 1e-4
MIN_TOKENS = 16
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two sets of logits are apart."""

    largest: float  # relative to the largest logit of the reference
    same_choices: int  # positions at which both have the same best token
    num_positions: int

    @property
    def fits(self) -> bool:
        """Tell whether only rounding differs; NaN does not."""
        return self.largest <= TOLERANCE


def difference(ours: np.ndarray, theirs: np.ndarray) -> Difference:
    """Compare logits, [num_tokens, vocab_size] both."""
    same = ours.argmax(axis=-1) == theirs.argmax(axis=-1)
    with np.errstate(all="ignore"):  # of what is not finite, the result tells
        largest = float(np.abs(ours - theirs).max())
        if largest != 0:
            largest = float(largest / np.abs(theirs).max())
    return Difference(largest, int(same.sum()), len(same))


def enough_tokens(spec: ModelSpec) -> int:
    """Return how many tokens reach beyond a window, if it is not too large."""
    windows = [window for window in spec.windows if window is not None]
    wanted = max([MIN_TOKENS, *(window + 8 for window in windows)])
    return min(wanted, MAX_TOKENS, spec.max_position_embeddings)


def all_logits(
    decoder: "NumpyDecoder | Decoder", token_ids: Sequence[int], num_first: int
) -> np.ndarray:
    """Score what follows each token, [num_tokens, vocab_size].

    Args:
        decoder: In float32, on the CPU.
        token_ids: The text.
        num_first: How many tokens go through the decoder at once; the others follow
            one by one, on cached keys and values.
    """
    context = decoder.cached_context(len(token_ids))
    cuts = [0, *range(num_first, len(token_ids) + 1)]
    rows = []
    for begin, end in pairwise(cuts):
        rows.append(_logits(decoder, list(token_ids[begin:end]), begin, context))
        context.advance(end - begin)
    return np.concatenate(rows)


def _logits(
    decoder: "NumpyDecoder | Decoder", token_ids: list[int], begin: int, context: Any
) -> np.ndarray:
    positions = range(begin, begin + len(token_ids))
    if isinstance(decoder, NumpyDecoder):
        hidden = decoder.forward(np.array(token_ids), np.array(positions), context)
        return decoder.compute_logits(hidden)
    import torch

    with torch.inference_mode():
        hidden = decoder(torch.tensor(token_ids), torch.tensor(positions), context)
        return decoder.compute_logits(hidden).numpy()


def our_logits(
    folder: Path, backend: Literal["numpy", "torch"], token_ids: Sequence[int]
) -> np.ndarray:
    """Load a model in float32 and score what follows each token of a text.

    Half of the text goes through the decoder at once, the rest token by token.
    """
    decoder = load_model(folder, backend=backend, dtype="float32", device="cpu")
    with np.errstate(all="ignore"):  # weights may be damaged
        return all_logits(decoder, token_ids, max(1, len(token_ids) // 2))


def why_no_transformers() -> str | None:
    """Return why `transformers` cannot be asked, None if it can."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


def _their_errors() -> tuple[type[Exception], ...]:
    """Return what `transformers` raises where it cannot go on; none is ours."""
    from huggingface_hub import errors

    # A setting of the wrong type; older versions do not look.
    strict = getattr(errors, "StrictDataclassError", ValueError)
    return (
        strict,
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        NotImplementedError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    )


def their_logits(
    folder: Path, token_ids: Sequence[int], gguf_path: Path | None = None
) -> np.ndarray:
    """Let `transformers` score what follows each token of a text, in float32.

    Args:
        folder: With config.json, and with the weights if no other file is named.
        token_ids: The text.
        gguf_path: A file whose weights it reads by code of its own.

    Returns:
        [num_tokens, vocab_size].

    Raises:
        BackendUnavailable: It cannot read or compute this model, or lacks some of its
            weights: what it would compute is no reference.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True}
    what = "read"
    try:
        with redirect_stderr(io.StringIO()):  # it draws bars even when asked not to
            if gguf_path:
                # Its own view of the settings lacks some: it takes those of the class.
                options["config"] = transformers.AutoConfig.from_pretrained(folder)
                folder, options["gguf_file"] = gguf_path.parent, gguf_path.name
                if hasattr(transformers, "GgufConfig"):  # it would keep blocks packed
                    options["quantization_config"] = transformers.GgufConfig(
                        gguf_file=gguf_path.name, dequantize=True
                    )
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True, **options
            )
        if missing := sorted(info["missing_keys"]):
            raise BackendUnavailable(
                f"transformers {transformers.__version__} finds no {missing[0]} "
                f"({len(missing)} tensors of its own are missing)"
            )
        what = "compute"
        if hasattr(model, "set_experts_implementation"):
            # Its faster ways with experts want sizes that are multiples of 4.
            model.set_experts_implementation("eager")
        with torch.inference_mode():
            ids = torch.tensor([list(token_ids)])
            logits = model.eval()(input_ids=ids, use_cache=False).logits
    except _their_errors() as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BackendUnavailable(
            f"transformers {transformers.__version__} cannot {what} it ({reason:.200})"
        ) from error
    return logits[0].float().numpy()
