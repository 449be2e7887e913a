"""Text as the model sees it: pieces with their ids."""

from collections.abc import Sequence
from typing import Any

from bookkit import palette
from bookkit.figures.base import Figure, escape, request_css

_VISIBLE = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}

_CSS = """
.mv-figure .mv-tokens{display:flex;flex-wrap:wrap;gap:6px 4px}
.mv-figure .mv-token{display:inline-flex;flex-direction:column;align-items:center;
 min-width:0;max-width:100%}
.mv-figure .mv-piece{font:14px/21px ui-monospace,"SF Mono",Menlo,Consolas,monospace;
 padding:1px 5px;border-radius:5px;border:2px solid transparent;min-width:22px;
 text-align:center;white-space:pre-wrap;overflow-wrap:anywhere;max-width:100%}
.mv-figure .mv-piece s{text-decoration:none;opacity:.6}
.mv-figure .mv-bytes{border:2px dashed currentColor;font-size:12.5px}
.mv-figure .mv-special{border-radius:12px;font-style:italic}
.mv-figure .mv-tint-0{background:color-mix(in srgb,#4f7be0 24%,var(--mv-paper))}
.mv-figure .mv-tint-1{background:color-mix(in srgb,#dca02a 28%,var(--mv-paper))}
.mv-figure .mv-tint-2{background:color-mix(in srgb,#2fa37a 24%,var(--mv-paper))}
.mv-figure .mv-tint-3{background:color-mix(in srgb,#c466a0 24%,var(--mv-paper))}
.mv-figure .mv-id{font-size:11px;padding:0 3px;line-height:1.3;color:var(--mv-dim);
 font-variant-numeric:tabular-nums}
.mv-figure .mv-break{flex-basis:100%;height:0}
"""


def visible(raw: bytes) -> tuple[str, bool]:
    """Return what to print for the bytes of a token, and whether it is hex.

    White space becomes a visible mark. Bytes that are no complete characters, as when a
    token holds half an emoji, are written as hex.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return raw.hex(" ").upper(), True
    if not text:
        return "∅", False
    shown = "".join(
        _VISIBLE.get(c) or (c if c.isprintable() else f"[U+{ord(c):04X}]") for c in text
    )
    return shown, False


def labels(tokenizer: Any, token_ids: Sequence[int], max_length: int = 12) -> list[str]:
    """See `bookkit.draw.labels`."""
    texts = [visible(tokenizer.token_bytes(int(token)))[0] for token in token_ids]
    return [t if len(t) <= max_length else t[: max_length - 1] + "…" for t in texts]


def tokens(
    tokenizer: Any,
    token_ids: Sequence[int],
    num_prompt_tokens: int | None,
    request: str,
) -> Figure:
    """See `bookkit.draw.tokens`."""
    ids = [int(token) for token in token_ids]
    if num_prompt_tokens is not None and not 0 <= num_prompt_tokens <= len(ids):
        raise ValueError(
            f"num_prompt_tokens is {num_prompt_tokens}, but there are {len(ids)} "
            "tokens: pass how many of token_ids came from the prompt"
        )
    special = getattr(tokenizer, "special_token_ids", frozenset())
    hue = f"mv-req-{palette.request(request).letter}"
    parts, lines = [], []
    for i, token in enumerate(ids):
        raw = tokenizer.token_bytes(token)
        shown, is_hex = visible(raw)
        if num_prompt_tokens is None:
            state, word = f"mv-tint-{i % 4}", ""
        elif i < num_prompt_tokens:
            state, word = f"mv-prompt mv-lettered {hue}", "  prompt"
        else:
            state, word = f"mv-generated mv-lettered {hue}", "  generated"
        if is_hex:
            state += " mv-bytes"
        if token in special:
            state += " mv-special"
        parts.append(
            f'<span class="mv-token"><span class="mv-piece {state}">'
            f'{_dim_marks(shown)}</span><span class="mv-id">{token}</span></span>'
        )
        if raw.endswith(b"\n") and i + 1 < len(ids):
            parts.append('<span class="mv-break"></span>')
        lines.append(f"{token:>8}  {shown}{word}")
    note = ""
    if num_prompt_tokens is not None:
        note = (
            '<p class="mv-note">Filled: the prompt, '
            f"{num_prompt_tokens} tokens. Outlined: generated, "
            f"{len(ids) - num_prompt_tokens} tokens.</p>"
        )
    whole = b"".join(tokenizer.token_bytes(token) for token in ids)
    alt = f"{len(ids)} tokens: " + " | ".join(
        visible(tokenizer.token_bytes(t))[0] for t in ids
    )
    if num_prompt_tokens is not None:
        alt += f". The first {num_prompt_tokens} are the prompt."
    text = "\n".join([f"{len(ids)} tokens, {len(whole)} bytes", *lines])
    css = _CSS + (request_css([request]) if num_prompt_tokens is not None else "")
    body = f'<div class="mv-tokens">{"".join(parts)}</div>{note}'
    return Figure(body, text=text, alt=alt, css=css, width=720, full=False)


def _dim_marks(shown: str) -> str:
    """Escape a piece, with the marks that stand for white space dimmed."""
    marks = set(_VISIBLE.values())
    return "".join(f"<s>{c}</s>" if c in marks else escape(c) for c in shown)
