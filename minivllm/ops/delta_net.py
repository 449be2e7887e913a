"""The ops of a gated delta net, in plain torch.

Each goes over a flat batch and changes the states of its texts where they lie, each
in a slot. A text's first token comes behind whatever its slot holds.

    y = causal_conv1d(x, weight, conv_states, slots, query_start_loc)
    o = recurrent_delta_rule(q, k, v, log_decay, beta, states, slots)  # one token each
    o = chunked_delta_rule(q, ..., states, slots, query_start_loc, lengths)

Invariant: both rules compute the same, up to rounding, in float32 throughout.

In vLLM: vllm/third_party/flash_linear_attention/ops/ (fused_recurrent_gated_delta_rule,
chunk_gated_delta_rule), vllm/model_executor/layers/mamba/ops/causal_conv1d.py.
Source: appendix A28, "Delta nets in torch".
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.ops.registry import Backend, define_op

CHUNK_SIZE = 64  # of a GPU: it likes large products, and short loops
CPU_CHUNK_SIZE = 32


def causal_conv1d(
    x: Tensor, weight: Tensor, states: Tensor, slots: Tensor, query_start_loc: Tensor
) -> Tensor:
    """Add up the last few tokens of each text, channel by channel, and apply silu.

    Args:
        x: [num_tokens, conv_size].
        weight: [conv_size, kernel_size]; the last column is for the token itself.
        states: The tokens before, oldest first, [num_slots, conv_size,
            kernel_size - 1]; changed.
        slots: Of the texts, all different, [num_texts] int64.
        query_start_loc: First row of each text, then num_tokens, [num_texts + 1].

    Returns:
        Like x.
    """
    num_kept = weight.shape[1] - 1
    starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
    texts = torch.arange(len(slots), device=x.device)
    text_of = torch.repeat_interleave(texts, ends - starts, output_size=len(x))
    # All rows in one column of numbers: those kept of each text, then its new ones.
    kept = states.index_select(0, slots).transpose(1, 2).to(x.dtype)
    rows = torch.cat([kept.flatten(0, 1), x])
    steps = torch.arange(num_kept + 1, device=x.device)

    def place_of(new: Tensor, text: Tensor) -> Tensor:
        """Return where the new row of a text is, or the old one if it lies before."""
        start = starts.index_select(0, text)[:, None]
        old = text[:, None] * num_kept + new - start + num_kept
        return torch.where(new < start, old, new + len(texts) * num_kept)

    seen = torch.arange(len(x), device=x.device)[:, None] + steps - num_kept
    seen = place_of(seen, text_of)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for step in range(num_kept + 1):
        part = rows.index_select(0, seen[:, step]).float()
        y += part * weight[:, step].float()
    # What a text keeps: its last rows, some of which may be old ones.
    last = place_of(ends[:, None] + steps[:-1] - num_kept, texts)
    last = rows.index_select(0, last.flatten()).unflatten(0, last.shape)
    states.index_copy_(0, slots, last.transpose(1, 2).to(states.dtype))
    return F.silu(y).to(x.dtype)


def prepare(q: Tensor, k: Tensor, num_value_heads: int) -> tuple[Tensor, Tensor]:
    """Bring queries and keys to their length, and give each value head its own.

    Returns:
        Both float32, [num_tokens, num_value_heads, key_head_dim]; queries are of the
        length key_head_dim ** -0.5.
    """
    group = num_value_heads // q.shape[1]
    q, k = q.float(), k.float()
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if group > 1:
        q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    """Run the gated delta rule for one new token of each text.

    Args:
        q: [num_texts, num_key_heads, key_head_dim], of any length.
        k: Like q.
        v: [num_texts, num_value_heads, value_head_dim].
        log_decay: float32, at most 0, [num_texts, num_value_heads].
        beta: Like log_decay, from 0 to 1.
        states: float32, [num_slots, num_value_heads, key_head_dim, value_head_dim];
            changed.
        slots: Of the texts, all different, [num_texts] int64.

    Returns:
        What the queries read, like v.
    """
    q, k = prepare(q, k, v.shape[1])
    state = states.index_select(0, slots) * log_decay.exp()[..., None, None]
    known = torch.einsum("nhkv,nhk->nhv", state, k)
    correction = beta[..., None] * (v.float() - known)
    state += k[..., None] * correction[..., None, :]
    states.index_copy_(0, slots, state)
    return torch.einsum("nhkv,nhk->nhv", state, q).to(v.dtype)


def chunked_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """Run the gated delta rule for any number of new tokens of each text.

    Args:
        q: [num_tokens, num_key_heads, key_head_dim], of any length.
        k: Like q.
        v: [num_tokens, num_value_heads, value_head_dim].
        log_decay: float32, at most 0, [num_tokens, num_value_heads].
        beta: Like log_decay, from 0 to 1.
        states: float32, [num_slots, num_value_heads, key_head_dim, value_head_dim];
            changed.
        slots: Of the texts, all different, [num_texts] int64.
        query_start_loc: First row of each text, then num_tokens, [num_texts + 1].
        lengths: How many tokens each text has, at least one, known to the host.

    Returns:
        What the queries read, like v.
    """
    q, k = prepare(q, k, v.shape[1])
    reads = []
    texts = zip(
        *(x.split(list(lengths)) for x in (q, k, v.float(), log_decay, beta)),
        states.index_select(0, slots),
        strict=True,
    )
    new_states = []
    for *rows, state in texts:
        read, state = run_chunks(*(x.transpose(0, 1) for x in rows), state)
        reads.append(read.transpose(0, 1))
        new_states.append(state)
    states.index_copy_(0, slots, torch.stack(new_states))
    return torch.cat(reads).to(v.dtype)


def run_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the rule over one text, a chunk of tokens at a time.

    What does not depend on the state is computed for all chunks at once.

    Args:
        q: From `prepare`, float32, [num_heads, num_tokens, key_head_dim].
        k: Like q.
        v: float32, [num_heads, num_tokens, value_head_dim].
        log_decay: [num_heads, num_tokens].
        beta: Like log_decay.
        state: [num_heads, key_head_dim, value_head_dim].
        chunk_size: Tokens of a chunk; by default what the device likes.

    Returns:
        What is read, like v, and the state after the last token.
    """
    num_tokens = q.shape[1]
    if chunk_size is None:
        chunk_size = CHUNK_SIZE if q.device.type == "cuda" else CPU_CHUNK_SIZE
    chunk_size = min(chunk_size, num_tokens)
    # Padding has beta 0 and no decay: it writes nothing, and lets nothing fade.
    padding = -num_tokens % chunk_size
    q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    log_decay, beta = (F.pad(x, (0, padding)) for x in (log_decay, beta))
    q, k, v, log_decay, beta = (
        x.unflatten(1, (-1, chunk_size)) for x in (q, k, v, log_decay, beta)
    )
    # Since the chunk began. In float64: behind a token that lets everything fade, sums
    # are large, and what is between two later tokens would be lost in their rounding.
    faded = log_decay.double().cumsum(dim=-1)
    is_later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device)
    between = faded[..., :, None] - faded[..., None, :]
    between = between.masked_fill(is_later.triu(1), -torch.inf)
    between = between.float().exp()
    since = faded.float().exp()[..., None]
    # Of each token, when the chunk ends.
    left = (faded[..., -1:] - faded).float().exp()[..., None]
    scores = (q @ k.transpose(-1, -2)) * between
    # Each correction lacks what those before it have written: a triangular system.
    system = beta[..., None] * (k @ k.transpose(-1, -2)) * between
    both = torch.cat([v, since * k], dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(
        system, both, upper=False, unitriangular=True
    )
    wanted, known = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    q, k = q * since, (k * left).transpose(-1, -2)
    reads = []
    for chunk in range(q.shape[1]):
        corrections = wanted[:, chunk] - known[:, chunk] @ state
        reads.append(q[:, chunk] @ state + scores[:, chunk] @ corrections)
        state = state * since[:, chunk, -1:] + k[:, chunk] @ corrections
    return torch.cat(reads, dim=1)[:, :num_tokens], state


define_op("causal_conv1d", [Backend("torch", causal_conv1d)])
define_op("recurrent_delta_rule", [Backend("torch", recurrent_delta_rule)])
define_op("chunked_delta_rule", [Backend("torch", chunked_delta_rule)])
