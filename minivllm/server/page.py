"""The page of the server: HTML, style and script in one, and the headers it goes with.

Invariant: it loads nothing and runs no script but its own, whatever a model writes; it
holds no secret, so it may be had without a key. Called by the route `/`.

In vLLM: no counterpart.
Source: appendix A33, "A page to look inside".
"""

import base64
import hashlib
from functools import cache
from typing import NamedTuple

from minivllm.server.page_script import JS
from minivllm.server.page_style import CSS


class Slider(NamedTuple):
    """A setting that is drawn along a line; where it starts, it is not sent."""

    label: str
    least: float
    most: float
    step: float
    start: float


SLIDERS = {
    "temperature": Slider("Temperature", 0, 2, 0.05, 1),
    "top_p": Slider("Top p", 0.05, 1, 0.05, 1),
    "top_k": Slider("Top k (0: all)", 0, 100, 1, 0),
    "min_p": Slider("Min p", 0, 0.5, 0.01, 0),
    "repetition_penalty": Slider("Repetition penalty", 0.8, 1.5, 0.01, 1),
}
NUMBERS = {"max_tokens": ("Max tokens", 1), "seed": ("Seed", 0)}
KEYS = (
    ("used r-A", "of one request"),
    ("shared", "shared, or of requests not listed"),
    ("kept", "free, content kept"),
    ("free", "free"),
)


def settings() -> str:
    """Return the controls of the sampling parameters."""
    parts = []
    for name, slider in SLIDERS.items():
        limits = f'min="{slider.least}" max="{slider.most}" step="{slider.step}"'
        parts.append(
            setting(name, slider.label, f'type="range" {limits} value="{slider.start}"')
        )
    for name, (label, least) in NUMBERS.items():
        parts.append(setting(name, label, f'type="number" min="{least}" step="1"'))
    return "\n".join(parts)


def setting(name: str, label: str, attributes: str) -> str:
    """Return one control with its label and what it is set to."""
    return (
        f'<div class="setting"><label for="{name}">{label}</label>'
        f'<output id="{name}-value" for="{name}"></output>'
        f'<input id="{name}" name="{name}" data-setting {attributes}></div>'
    )


def strip(label: str, names: tuple[str, ...], height: str = "") -> str:
    """Return an empty picture of the latest steps, one path for each kind of bar."""
    paths = "".join(f'<path id="{name}"></path>' for name in names)
    return (
        f'<svg class="strip {height}" viewBox="0 0 96 1" preserveAspectRatio="none" '
        f'role="img" aria-label="{label}">{paths}</svg>'
    )


@cache
def page() -> str:
    """Return the HTML."""
    keys = "".join(f'<li><i class="key {name}"></i>{text}</li>' for name, text in KEYS)
    tokens = strip("Tokens of the latest steps", ("decode-bars", "prefill-bars"))
    times = strip("Time of the latest steps", ("time-bars",), "low")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>minivllm</title>
<link rel="icon" href="data:,">
<style>{CSS}</style>
</head>
<body>
<header><h1>minivllm</h1><p id="model">asking the server ...</p></header>
<noscript><p>This page needs JavaScript; the interface at /v1 does not.</p></noscript>
<form id="key-form" hidden>
<label for="key">The server asks for a key:</label>
<input id="key" type="password" autocomplete="off" required pattern="[!-~]+">
<button>Use it</button>
</form>
<main>
<section aria-labelledby="chat-title">
<h2 id="chat-title">Chat</h2>
<details id="settings"><summary>Settings</summary>
<div id="settings-list">
<div class="wide"><label for="system">System message</label>
<textarea id="system" rows="2"></textarea></div>
{settings()}
<div class="wide"><button type="button" id="defaults">Back to the model's own</button>
</div></div></details>
<ol id="messages" tabindex="0" aria-label="What was said"></ol>
<p id="news" class="unseen" role="status"></p>
<form id="composer">
<label for="question" class="dim">Enter sends, Shift+Enter begins a line,
Esc stops</label>
<textarea id="question" rows="3" placeholder="Ask something"></textarea>
<div class="buttons"><button id="send">Send</button>
<button type="button" id="stop" disabled>Stop</button>
<button type="button" id="reset">New chat</button></div>
</form>
</section>
<section id="live" class="stale" aria-labelledby="live-title">
<h2 id="live-title">The engine</h2>
<p id="line" role="status">connecting ...</p>
<div id="picture">
<p id="engine"></p>
<h3>Running <small id="num-running"></small></h3>
<ul id="running" tabindex="0" aria-label="Requests that run"></ul>
<h3>Waiting <small id="num-waiting"></small></h3>
<div id="waiting"></div>
<h3>The latest steps <small id="step"></small></h3>
{tokens}
<ul class="keys"><li><i class="key prefill"></i>prompt tokens</li>
<li><i class="key decode"></i>answer tokens</li><li id="most-tokens"></li></ul>
{times}
<ul class="keys"><li>time of a step</li><li id="longest"></li></ul>
<h3>KV cache <small id="pool-text"></small></h3>
<div id="pool" role="img" aria-label="The block pool"></div>
<p id="others" class="dim"></p>
<ul class="keys">{keys}</ul>
</div>
</section>
</main>
<script>{JS}</script>
</body>
</html>
"""


def source_of(text: str) -> str:
    """Return the hash by which a policy allows a script or a style."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


POLICY = {
    "default-src": "'none'",
    "script-src": source_of(JS),
    "style-src": source_of(CSS),
    "connect-src": "'self'",
    "img-src": "data:",  # the empty icon
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(map(" ".join, POLICY.items())),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
