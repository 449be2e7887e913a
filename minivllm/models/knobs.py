"""Say in words what a spec asks for, a line for each knob.

Called by the command line.

Source: appendix A23, "Reading families"; appendix A28, "Delta nets in torch".
"""

from minivllm.models.spec import DeltaNetSpec, ModelSpec, MoeSpec, RopeSpec

ACTS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu, the form with tanh"}


def biases_of(spec: ModelSpec) -> str:
    """Name the products that a bias is added to."""
    named = ["q, k, v"] * spec.qkv_bias + ["o"] * spec.o_bias + ["MLP"] * spec.mlp_bias
    return ", ".join(named) or "none"


def rope_of(rope: RopeSpec) -> str:
    """Say a base and a scaling."""
    text = f"theta {rope.theta:,.0f}"
    if rope.scaling is None:
        return text
    kind = type(rope.scaling).__name__.removesuffix("Scaling").lower()
    if kind == "ropefactors":
        return f"{text}, a divisor for each frequency"
    return f"{text}, {kind} scaling by {rope.scaling.factor:g}"


def windows_of(spec: ModelSpec) -> str:
    """Say how many layers see how far."""
    sizes = [window for window in spec.windows if window is not None]
    if not sizes:
        who = "layers that attend" if spec.delta_net else "layers"
        return f"none: all {who} see all tokens"
    tokens = "1 token" if sizes[0] == 1 else f"{sizes[0]} tokens"
    return f"{tokens} in {len(sizes)} of {spec.num_layers} layers"


def experts_of(moe: MoeSpec | None, num_layers: int) -> str:
    """Say how many experts there are, and how many a token goes to."""
    if moe is None:
        return "none"
    shares = "made to sum to one" if moe.norm_topk_prob else "as they are"
    size = moe.shared_intermediate_size
    shared = f"; one for every token, {size} wide" if size else ""
    return (
        f"{moe.top_k} of {moe.num_experts}, {moe.intermediate_size} wide, in "
        f"{len(moe.layers)} of {num_layers} layers; shares {shares}{shared}"
    )


def delta_nets_of(net: DeltaNetSpec | None, num_layers: int) -> str:
    """Say how many layers keep a state, and how large it is."""
    if net is None:
        return "none"
    return (
        f"{len(net.layers)} of {num_layers} layers; {net.num_value_heads} states of "
        f"{net.key_head_dim} x {net.value_head_dim}, {net.num_key_heads} heads of "
        f"keys; a convolution over {net.conv_kernel_size} tokens"
    )


def knobs_of(spec: ModelSpec) -> dict[str, str]:
    """Return what each knob is set to, in words."""
    embedding = "its own output matrix"
    if spec.tie_word_embeddings:
        embedding = "used for the output, too"
    if spec.embedding_scale != 1:
        embedding += f"; its rows times {spec.embedding_scale:.5g}"
    rope = "; with a window ".join(rope_of(rope) for rope in spec.ropes)
    if spec.rope_dim != spec.head_dim:
        rope += f"; {spec.rope_dim} of the {spec.head_dim} numbers of a head"
    return {
        "layers": f"{spec.num_layers}, {spec.hidden_size} wide",
        "vocabulary": f"{spec.vocab_size:,} tokens",
        "context": f"{spec.max_position_embeddings:,} tokens",
        "attention": f"{spec.num_heads} heads of {spec.head_dim}, "
        f"{spec.num_kv_heads} of keys and values",
        "gate": "one for each number of a head" if spec.attention_gate else "none",
        "delta nets": delta_nets_of(spec.delta_net, spec.num_layers),
        "scale": f"1 / sqrt({spec.query_pre_attn_scalar or spec.head_dim:g})",
        "biases": biases_of(spec),
        "q and k norms": "one for each head" if spec.qk_norm else "none",
        "norms": f"{4 if spec.post_norms else 2} in a layer, times "
        f"{'1 + w' if spec.norm_plus_one else 'w'}, epsilon {spec.rms_norm_eps:g}",
        "rope": rope,
        "windows": windows_of(spec),
        "MLP": f"{ACTS[spec.hidden_act]}, {spec.intermediate_size} wide",
        "experts": experts_of(spec.moe, spec.num_layers),
        "embedding": embedding,
    }
