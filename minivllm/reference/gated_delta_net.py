"""A gated delta net in NumPy, float32: its convolution, its rule, its states.

A head's state is a matrix S, a row for each dimension of a key. A token lets it fade,
writes, and reads:

    S = exp(log_decay) * S
    S = S + k (beta * (v - Sᵀ k))ᵀ      what k should give, less what it gives
    o = Sᵀ q

The rule is that of gated delta networks (Yang, Kautz and Hatamizadeh 2024).

In vLLM: vllm/third_party/flash_linear_attention/ops/ (fused_recurrent_gated_delta_rule,
chunk_gated_delta_rule), vllm/model_executor/layers/mamba/ops/causal_conv1d.py.
Source: chapter 8, "Hybrid attention".
"""

import numpy as np

from minivllm.models.spec import DeltaNetSpec


def l2_norm(x: np.ndarray) -> np.ndarray:
    """Bring each row to the length of one, or a little less."""
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + np.float32(1e-6))


def prepare(
    q: np.ndarray, k: np.ndarray, num_value_heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bring queries and keys to their length, and give each value head its own.

    Args:
        q: [num_tokens, num_key_heads, key_head_dim].
        k: Like q.
        num_value_heads: Neighbours share a key head.

    Returns:
        Both [num_tokens, num_value_heads, key_head_dim]; queries are of the length
        key_head_dim ** -0.5.
    """
    group = num_value_heads // q.shape[1]
    q, k = (l2_norm(x).repeat(group, axis=1) for x in (q, k))
    return q * np.float32(q.shape[-1] ** -0.5), k


def recurrent_delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Run the rule as it is written, one token after another.

    Args:
        q: From `prepare`, [num_tokens, num_value_heads, key_head_dim].
        k: Like q.
        v: [num_tokens, num_value_heads, value_head_dim].
        log_decay: [num_tokens, num_value_heads].
        beta: Like log_decay.
        state: Before the first token, [num_value_heads, key_head_dim, value_head_dim].

    Returns:
        What is read, like v, and the state after the last token.
    """
    read = np.empty_like(v)
    for t in range(len(q)):
        state = state * np.exp(log_decay[t])[:, None, None]
        known = np.einsum("hkv,hk->hv", state, k[t])
        correction = beta[t][:, None] * (v[t] - known)
        state = state + k[t][:, :, None] * correction[:, None, :]
        read[t] = np.einsum("hkv,hk->hv", state, q[t])
    return read, state


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(np.float32(0), -x))


def softplus(x: np.ndarray) -> np.ndarray:
    """Return log(1 + exp(x)), without overflow."""
    return np.logaddexp(np.float32(0), x)


def causal_conv1d(
    x: np.ndarray, weight: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Add up the last few tokens, channel by channel, and apply silu.

    Args:
        x: The next tokens of one text, [num_tokens, conv_size].
        weight: [conv_size, kernel_size]; the last column is for the token itself.
        state: The tokens before, [conv_size, kernel_size - 1]; zero where there are
            none.

    Returns:
        Like x, and the state after it.
    """
    rows = np.concatenate([state.T, x])
    y = np.zeros_like(x)
    for place in range(weight.shape[1]):
        y += rows[place : place + len(x)] * weight[:, place]
    return y * sigmoid(y), rows[len(x) :].T


class RecurrentStates:
    """What the delta nets of a model keep of several texts, a slot for each."""

    def __init__(self, net: DeltaNetSpec, num_slots: int) -> None:
        """Make slots for texts without a token: all zeros."""
        shape = (len(net.layers), num_slots)
        self.index = {layer: index for index, layer in enumerate(net.layers)}
        self.conv = np.zeros((*shape, *net.conv_state_shape), dtype=np.float32)
        self.recurrent = np.zeros((*shape, *net.state_shape), dtype=np.float32)

    def clear(self, slots: list[int]) -> None:
        """Let texts without a token have these slots."""
        self.conv[:, slots] = 0
        self.recurrent[:, slots] = 0

    def copy(self, source: int, target: int) -> None:
        """Let one slot be as another."""
        self.conv[:, target] = self.conv[:, source]
        self.recurrent[:, target] = self.recurrent[:, source]

    def convolve(
        self, layer: int, slot: int, x: np.ndarray, weight: np.ndarray
    ) -> np.ndarray:
        """Convolve the next tokens of the text in a slot."""
        states = self.conv[self.index[layer]]
        y, states[slot] = causal_conv1d(x, weight, states[slot])
        return y

    def mix(
        self,
        layer: int,
        slot: int,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        log_decay: np.ndarray,
        beta: np.ndarray,
    ) -> np.ndarray:
        """Run the rule over the next tokens of the text in a slot."""
        states = self.recurrent[self.index[layer]]
        rows = (*prepare(q, k, v.shape[1]), v, log_decay, beta)
        read, states[slot] = recurrent_delta_rule(*rows, states[slot])
        return read


def chunked_delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    chunk_size: int = 64,
) -> tuple[np.ndarray, np.ndarray]:
    """Run the rule a chunk of tokens at a time; as `recurrent_delta_rule`."""
    read = np.empty_like(v)
    for start in range(0, len(q), chunk_size):
        part = slice(start, start + chunk_size)
        # Heads first: [heads, tokens, dim] and [heads, tokens].
        qs, ks, vs = (x[part].transpose(1, 0, 2) for x in (q, k, v))
        faded = log_decay[part].T.cumsum(axis=1)  # since the chunk began
        between = faded[:, :, None] - faded[:, None, :]
        is_before = np.tri(qs.shape[1], dtype=bool)  # or the token itself
        between = np.exp(np.where(is_before, between, -np.inf))
        since = np.exp(faded)[:, :, None]
        betas = beta[part].T[:, :, None]

        # Each correction lacks what the corrections before it have written.
        system = betas * (ks @ ks.transpose(0, 2, 1)) * between * ~np.eye(
            qs.shape[1], dtype=bool
        ) + np.eye(qs.shape[1], dtype=np.float32)
        missing = betas * (vs - since * (ks @ state))
        corrections = np.linalg.solve(system, missing)

        scores = (qs @ ks.transpose(0, 2, 1)) * between
        mixed = since * (qs @ state) + scores @ corrections
        read[part] = mixed.transpose(1, 0, 2)
        left = np.exp(faded[:, -1:] - faded)[:, :, None]  # of each, when it ends
        state = since[:, -1:] * state + (left * ks).transpose(0, 2, 1) @ corrections
    return read, state
