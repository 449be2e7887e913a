"""The paged KV cache: block tables and the slots they point to."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bookkit import palette
from bookkit.figures.base import Figure, escape, request_css
from bookkit.figures.player import player

_CSS = """
.mv-figure .mv-panes{display:flex;flex-wrap:wrap;gap:12px 28px}
.mv-figure .mv-pane{flex:1 1 260px;min-width:0}
.mv-figure .mv-pane-title{font-weight:600;font-size:13px;margin:0 0 8px}
.mv-figure .mv-table-row{display:flex;flex-wrap:wrap;align-items:center;gap:5px;
 margin-bottom:8px;min-height:32px}
.mv-figure .mv-request-name{width:108px;font-size:13px}
.mv-figure .mv-request-name small{color:var(--mv-dim);font-size:12px}
.mv-figure .mv-badge{display:inline-block;min-width:22px;padding:0 4px;
 border-radius:5px;text-align:center;font-weight:600;line-height:19px;color:var(--mv-hue-ink);margin-right:5px}
.mv-figure .mv-chip{padding:2px 7px;min-width:30px;border-radius:5px;text-align:center;
 font-weight:600;border:2px solid var(--mv-hue);font-variant-numeric:tabular-nums}
.mv-figure .mv-blocks{display:grid;gap:6px;
 grid-template-columns:repeat(auto-fill,minmax(var(--mv-block),1fr))}
.mv-figure .mv-block{border:1px solid var(--mv-line);border-radius:6px;min-width:0;
 padding:3px 5px 5px}
.mv-figure .mv-block-name{font-size:11.5px;color:var(--mv-dim);display:flex;
 justify-content:space-between;gap:4px;line-height:1.5}
.mv-figure .mv-block-name b{color:var(--mv-ink);font-weight:600}
.mv-figure .mv-slots{display:grid;gap:2px;
 grid-template-columns:repeat(var(--mv-row),minmax(0,1fr))}
.mv-figure .mv-slot{height:15px;border-radius:3px}
.mv-figure .mv-kept{border:1px solid var(--mv-line);
 background:repeating-linear-gradient(45deg,transparent 0 3px,var(--mv-line) 3px 5px)}
"""


def slots(
    block_ids: Mapping[str, Sequence[int]],
    num_tokens: Mapping[str, int],
    num_prompt_tokens: Mapping[str, int] | None,
    num_blocks: int,
    block_size: int,
    cached_blocks: Collection[int] = (),
    names: Sequence[str] | None = None,
) -> Figure:
    """See `bookkit.draw.slots`."""
    prompts = num_tokens if num_prompt_tokens is None else num_prompt_tokens
    owners: dict[int, list[tuple[str, int]]] = {}  # block -> (request, logical block)
    for name, blocks in block_ids.items():
        _check(name, blocks, num_tokens, num_blocks, block_size)
        for logical, block in enumerate(blocks):
            owners.setdefault(block, []).append((name, logical))
    rows = [
        _table_row(name, blocks, num_tokens[name]) for name, blocks in block_ids.items()
    ]
    kept = sorted(set(cached_blocks) - set(owners))
    cells = [
        _block(block, owners[block], num_tokens, prompts, block_size)
        if block in owners
        else _free_block(block, block in kept, block_size)
        for block in range(num_blocks)
    ]
    free = num_blocks - len(owners)
    shared = sorted(block for block, users in owners.items() if len(users) > 1)
    row = min(block_size, 8)
    body = (
        '<div class="mv-panes"><div class="mv-pane">'
        f'<div class="mv-pane-title">Block tables</div>{"".join(rows)}</div>'
        '<div class="mv-pane"><div class="mv-pane-title">'
        f"KV cache: {num_blocks} blocks of {block_size} slots, {free} free</div>"
        f'<div class="mv-blocks" style="--mv-block:{18 + 15 * row}px;--mv-row:{row}">'
        f"{''.join(cells)}</div></div></div>"
        '<p class="mv-note">Filled: prompt token. Outlined: generated. Empty: free '
        f"slot. {'Striped: free, but its content is known. ' if kept else ''}"
        f"{'Double border: shared block.' if shared else ''}</p>"
    )
    lines = [
        f"  {name}: {num_tokens[name]} tokens in blocks {list(blocks)}"
        for name, blocks in block_ids.items()
    ]
    head = f"{num_blocks} blocks of {block_size} slots, {free} free"
    if shared:
        lines.append(f"  shared blocks: {shared}")
    if kept:
        lines.append(f"  free blocks whose content is known: {kept}")
    text = "\n".join([head, *lines])
    alt = head + ". " + ". ".join(line.strip() for line in lines) + "."
    css = _CSS + request_css(names if names is not None else block_ids)
    return Figure(body, text=text, alt=alt, css=css, width=760)


def block_tables(
    frames: Sequence[Mapping[str, Any]], num_blocks: int, block_size: int
) -> Figure:
    """See `bookkit.draw.block_tables`."""
    # One style sheet for all frames, whichever requests each of them shows.
    names = list(dict.fromkeys(name for frame in frames for name in frame["block_ids"]))
    figures = [
        slots(
            frame["block_ids"],
            frame["num_tokens"],
            frame.get("num_prompt_tokens"),
            num_blocks,
            block_size,
            frame.get("cached_blocks", ()),
            names,
        )
        for frame in frames
    ]
    captions = [str(frame["event"]) for frame in frames]
    return player(figures, captions, "Block tables over the steps of the engine")


def _check(
    name: str,
    blocks: Sequence[int],
    num_tokens: Mapping[str, int],
    num_blocks: int,
    block_size: int,
) -> None:
    outside = [block for block in blocks if not 0 <= block < num_blocks]
    if outside:
        raise ValueError(
            f"request {name} holds block {outside[0]}, but the cache has blocks 0 to "
            f"{num_blocks - 1}"
        )
    if num_tokens[name] > len(blocks) * block_size:
        raise ValueError(
            f"request {name} has {num_tokens[name]} tokens, but its {len(blocks)} "
            f"blocks hold {len(blocks) * block_size}"
        )


def _table_row(name: str, blocks: Sequence[int], num_tokens: int) -> str:
    letter = palette.request(name).letter
    chips = "".join(f'<span class="mv-chip">{block}</span>' for block in blocks)
    return (
        f'<div class="mv-table-row mv-req-{letter}"><span class="mv-request-name">'
        f'<span class="mv-badge mv-lettered">{escape(name)}</span>'
        f"<small>{num_tokens} tokens</small></span>{chips}</div>"
    )


def _block(
    block: int,
    users: Sequence[tuple[str, int]],
    num_tokens: Mapping[str, int],
    prompts: Mapping[str, int],
    block_size: int,
) -> str:
    state = " mv-shared" if len(users) > 1 else ""
    cells = []
    for offset in range(block_size):
        cls = "mv-free"
        # A shared block holds the same tokens for all; the first user's hue stands.
        for name, logical in users:
            position = logical * block_size + offset
            if position < num_tokens[name]:
                kind = "prompt" if position < prompts[name] else "generated"
                cls = f"mv-{kind} mv-req-{palette.request(name).letter}"
                break
        cells.append(f'<i class="mv-slot {cls}"></i>')
    names = " ".join(escape(name) for name, _ in users)
    return _card(block, names, cells, state)


def _free_block(block: int, is_kept: bool, block_size: int) -> str:
    cls = "mv-kept" if is_kept else "mv-free"
    return _card(block, "", [f'<i class="mv-slot {cls}"></i>'] * block_size)


def _card(block: int, names: str, cells: Sequence[str], state: str = "") -> str:
    return (
        f'<div class="mv-block{state}"><div class="mv-block-name"><b>{block}</b>'
        f'<span>{names}</span></div><div class="mv-slots">{"".join(cells)}</div></div>'
    )
