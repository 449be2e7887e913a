"""What an engine did, step by step: the viewer of `minivllm trace` as a figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from bookkit.figures.base import Figure
from bookkit.figures.tokens import labels
from minivllm.viewer.frames import viewer_data
from minivllm.viewer.page import body, summary
from minivllm.viewer.script import JS
from minivllm.viewer.style import CSS


def trace(
    records: Sequence[Mapping[str, Any]],
    block_size: int,
    tokenizer: Any | None,
    label: str,
) -> Figure:
    """See `bookkit.draw.trace`."""
    if not records:
        raise ValueError(
            "there are 0 records, so there is nothing to draw: append "
            "`records.append` to `engine.listeners` before the engine runs"
        )
    texts = {}
    if tokenizer is not None:
        sampled = [record["sampled_token_ids"].values() for record in records]
        used = sorted({token for step in sampled for ids in step for token in ids})
        texts = dict(zip(used, labels(tokenizer, used), strict=True))
    data = viewer_data({"block_size": block_size}, records, texts)
    text = f"{label}\n{summary({}, data)}"
    return Figure(
        body(text),
        text=text,
        label=f"{label}, step by step",
        css=CSS,
        js=JS,
        data=data,
        width=860,
    )
