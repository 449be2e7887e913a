"""A trace as one page that needs nothing else, and as a few lines of text.

The figures of the book wrap the same `BODY`, `CSS` and `JS`. Without scripts the page
shows the text.

Called by the command line and by the figures of the book.

In vLLM: there is no such viewer.
Source: appendix A8, "Traces".
"""

import html
import json
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

from minivllm.viewer.script import JS
from minivllm.viewer.style import CSS, THEME

PAGE_CSS = """
body{font:14px/1.45 -apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans",
 "Liberation Sans",Arial,sans-serif;color:var(--mv-ink);background:var(--mv-paper);
 max-width:1140px;margin:0 auto;padding:14px 16px 40px;overflow-wrap:break-word}
h1{font-size:20px;margin:0}
h1+p{color:var(--mv-dim);margin:2px 0 14px}
*{box-sizing:border-box}
@media (max-width:480px){body{padding:9px 10px 30px}}"""
MAX_LINES = 20  # of requests in a summary

CONTROLS = (
    ("back", "Step back", "&#8592;"),
    ("play", "Play", "&#9654;&#65038;"),
    ("on", "Step on", "&#8594;"),
)
KEY = (
    ("mv-t-A mv-t-prompt", "prompt token; in a large cache, block in use"),
    ("mv-t-A mv-t-generated", "answer token"),
    ("mv-t-done", "computed before"),
    ("mv-t-hit", "found in the prefix cache"),
    ("mv-t-to-do", "to do"),
    ("mv-t-cell mv-t-shared", "shared block"),
    ("mv-t-kept", "free, but its content is cached"),
    ("mv-t-free", "free"),
)


def summary(header: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Return what happened in a few lines of text.

    Args:
        header: Of the trace, if there is one.
        data: From `viewer_data`.
    """
    steps = data["steps"]

    num_new = Counter(request for step in steps for request, _ in step.get("o", ()))
    num_hits = sum(hits for step in steps for _, hits in step.get("h", ()))
    preemptions = Counter(request for step in steps for request in step.get("p", ()))
    reasons = {request: "abort" for step in steps for request in step.get("x", ())}
    reasons |= {request: why for step in steps for request, why in step.get("f", ())}
    model = f"{header['model']}, " if header.get("model") else ""
    lines = [
        f"{model}{len(steps) - 1:,} steps in {steps[-1]['t'][1]:.3f} s, "
        f"{data['numBlocks']:,} blocks of {data['blockSize']}",
        f"{len(data['names']):,} requests, {num_new.total():,} new tokens, "
        f"{preemptions.total():,} preemptions, {num_hits:,} tokens from the prefix "
        "cache",
    ]
    requests = zip(data["names"], data["prompts"], strict=True)
    for number, (name, num_prompt_tokens) in enumerate(islice(requests, MAX_LINES)):
        parts = [f"{num_new[number]:,} new", reasons.get(number, "unfinished")]
        if num_prompt_tokens is not None:  # the trace has its start
            parts.insert(0, f"{num_prompt_tokens:,} prompt tokens")
        if preemptions[number]:
            parts.append(f"preempted {preemptions[number]}x")
        lines.append(f"  {name}: {', '.join(parts)}")
    if len(data["names"]) > MAX_LINES:
        lines.append(f"  and {len(data['names']) - MAX_LINES:,} more requests")
    return "\n".join(lines)


def body(text: str) -> str:
    """Return what stands in the card until the script has drawn the first step.

    Args:
        text: What stands there for good where no script runs.
    """
    buttons = "".join(
        f'<button type="button" class="mv-t-{name}" aria-label="{label}">{sign}'
        "</button>"
        for name, label, sign in CONTROLS
    )
    key = "".join(f'<li><i class="{name}"></i>{what}</li>' for name, what in KEY)
    return (
        f'<div class="mv-t-bar" hidden>{buttons}<input type="range" min="0" max="0" '
        'value="0" step="1" aria-label="Step of the engine"><output></output></div>'
        '<p class="mv-t-event" aria-live="polite" hidden></p>'
        '<p class="mv-t-facts" hidden></p><div class="mv-t-lanes" hidden></div>'
        f'<div class="mv-t-view"></div><ul class="mv-t-key" hidden>{key}'
        "<li>choose a request in a queue to follow it</li></ul>"
        f'<pre class="mv-t-text">{html.escape(text)}</pre>'
    )


def page(
    header: Mapping[str, Any], data: Mapping[str, Any], title: str = "Trace"
) -> str:
    """Return the HTML of a page that needs no network.

    Args:
        header: Of the trace.
        data: From `viewer_data`.
        title: What the page is called, for example after the file.
    """
    # A "<" in the data could end the script element early.
    script_data = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    light = ";".join(f"--mv-{name}:{pair[0]}" for name, pair in THEME.items())
    dark = ";".join(f"--mv-{name}:{pair[1]}" for name, pair in THEME.items())
    names = ("model", "backend", "dtype", "policy", "max_num_seqs")
    names += ("max_num_batched_tokens", "max_model_len", "enable_prefix_caching")
    engine = html.escape(
        ", ".join(f"{n} {header[n]}" for n in names if header.get(n) is not None)
    )
    title = html.escape(title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root{{{light}}}
@media (prefers-color-scheme:dark){{:root{{{dark}}}}}
{PAGE_CSS}{CSS}
</style>
</head>
<body class="mv-t-page">
<h1>{title}</h1>
<p>{engine}</p>
<main class="mv-figure">
{body(summary(header, data))}
</main>
<script>
const data = {script_data};
const root = document.querySelector("main");
{JS}
</script>
</body>
</html>
"""
