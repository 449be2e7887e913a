"""The decoder in torch: one for all families, driven by the spec.

`forward()` has no `if family` and does not know how keys and values are kept.

In vLLM: vllm/model_executor/models/llama.py and its siblings.
Source: chapter 1, "Naive generation"; chapter 2, "The KV cache"; chapter 7, "One
    decoder, many families"; appendix A28, "Delta nets in torch".
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from minivllm.errors import ConfigError
from minivllm.models.context import AttentionContext, CachingContext
from minivllm.models.layers import (
    DecoderLayer,
    TorchCachedContext,
    TorchDenseContext,
    TorchStaticBatchContext,
    norm_of,
)
from minivllm.models.rotary import attention_factor, inverse_frequencies
from minivllm.models.spec import ModelSpec


class Decoder(nn.Module):
    """A decoder; made without memory for its weights, which `load_weights` brings."""

    def __init__(self, spec: ModelSpec) -> None:
        nn.Module.__init__(self)
        self.spec = spec
        with torch.device("meta"):
            # nn.Embedding draws random numbers first, and loads half of torch for that.
            table = torch.empty(spec.vocab_size, spec.hidden_size)
            self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
            self.layers = nn.ModuleList(
                DecoderLayer(spec, layer) for layer in range(spec.num_layers)
            )
            self.norm = norm_of(spec)
            if not spec.tie_word_embeddings:
                self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        # A plain attribute: .to(torch.bfloat16) must not round it.
        self.frequencies = rope_rows(spec)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights, without a copy; device and dtype are theirs.

        Raises:
            WeightMismatch: Names or shapes are not those of `spec.weight_shapes()`.
            ConfigError: They are not all of one floating-point type.
        """
        self.spec.check_weights({name: w.shape for name, w in weights.items()})
        dtypes = {w.dtype for w in weights.values()}
        if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
            raise ConfigError(
                f"the weights are {', '.join(sorted(map(str, dtypes)))}, but the "
                "decoder needs one floating-point type: convert them first"
            )
        self.load_state_dict(weights, assign=True)
        self.requires_grad_(False)
        self.frequencies = self.frequencies.to(self.embed_tokens.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Decoder":
        """Let the frequencies follow the weights to a device, never to a dtype."""
        super()._apply(fn, recurse)
        device = self.embed_tokens.weight.device
        if device.type != "meta":
            self.frequencies = self.frequencies.to(device)
        return self

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the rows of the embedding, scaled, [num_tokens, hidden_size]."""
        x = self.embed_tokens(input_ids)
        if self.spec.embedding_scale == 1:
            return x
        return x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, context: AttentionContext[Tensor]
    ) -> Tensor:
        """Run the tokens through every layer.

        Args:
            input_ids: [num_tokens] int64.
            positions: [num_tokens] int64, place of each token in its text, from 0.
            context: Where the keys and values of earlier tokens are.

        Returns:
            The normalised hidden states, [num_tokens, hidden_size].
        """
        hidden_states = self.embed(input_ids)
        tables = rope_tables(self.spec, self.frequencies, positions)
        for index, layer in enumerate(self.layers):
            cos, sin = tables[self.spec.rope_index(index)]
            hidden_states = layer(hidden_states, cos, sin, context)
        return self.norm(hidden_states)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Score every token as the next one, float32, [..., vocab_size]."""
        head = self.embed_tokens if self.spec.tie_word_embeddings else self.lm_head
        return nn.functional.linear(hidden_states, head.weight).float()

    def dense_context(self) -> TorchDenseContext:
        """Return a context for one whole text."""
        return TorchDenseContext(self.spec)

    @torch.inference_mode()
    def next_token_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Recompute the whole text and score what follows it, [vocab_size]."""
        device = self.embed_tokens.weight.device
        hidden_states = self(
            torch.tensor(token_ids, device=device),
            torch.arange(len(token_ids), device=device),
            self.dense_context(),
        )
        return self.compute_logits(hidden_states[-1]).cpu().numpy()

    def cached_context(self, max_tokens: int) -> TorchCachedContext:
        """Return an empty cache for one text of at most `max_tokens` tokens."""
        weight = self.embed_tokens.weight
        return TorchCachedContext(
            self.spec, max_tokens, device=weight.device, dtype=weight.dtype
        )

    def static_batch_context(
        self, lengths: Sequence[int], max_tokens: int
    ) -> TorchStaticBatchContext:
        """Return an empty cache for prompts of these lengths, padded on the left."""
        weight = self.embed_tokens.weight
        return TorchStaticBatchContext(
            self.spec, lengths, max_tokens, device=weight.device, dtype=weight.dtype
        )

    @torch.inference_mode()
    def extend(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]],
        context: CachingContext[Tensor],
    ) -> np.ndarray:
        """Add new tokens to the text in a context and score what follows.

        Args:
            token_ids: The new tokens, [num_new], or those of several texts,
                [batch_size, num_new].
            context: What it holds need not be computed again; it grows by `num_new`.

        Returns:
            float32, [vocab_size] or [batch_size, vocab_size].

        Raises:
            ShapeError: They do not fit; the context is as before.
        """
        input_ids = torch.as_tensor(token_ids, device=self.embed_tokens.weight.device)
        num_new = input_ids.shape[-1]
        hidden_states = self(input_ids.flatten(), context.positions(num_new), context)
        context.advance(num_new)
        last = hidden_states.view(*input_ids.shape, -1)[..., -1, :]
        return self.compute_logits(last).cpu().numpy()


def rope_rows(spec: ModelSpec) -> Tensor:
    """Return the frequencies of each rope, float32, [num_ropes, rope_dim // 2]."""
    rows = [inverse_frequencies(spec.rope_dim, rope) for rope in spec.ropes]
    return torch.from_numpy(np.stack(rows))


def rope_tables(
    spec: ModelSpec, frequencies: Tensor, positions: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return cosines and sines of each rope, float32, [num_tokens, 1, head_dim // 2].

    Args:
        spec: The model.
        frequencies: From `rope_rows`, on the device of the positions.
        positions: [num_tokens] int64.
    """
    tables = []
    for rope, row in zip(spec.ropes, frequencies, strict=True):
        angles = positions.float().view(-1, 1, 1) * row
        cos, sin = angles.cos(), angles.sin()
        if (factor := attention_factor(rope)) != 1:
            cos, sin = cos * factor, sin * factor
        tables.append((cos, sin))
    return tables
