"""How the page of a trace looks: light and dark, on a phone and on a wide screen.

The colours are those of the book's figures: a request keeps its hue and its hatch, a
prompt token is filled, a generated one outlined, a shared block has a double border.

Source: appendix A8, "Traces".
"""

# Light page, dark page.
THEME: dict[str, tuple[str, str]] = {
    "ink": ("#1f2430", "#e8eaf0"),
    "dim": ("#59616f", "#a9b1c0"),
    "line": ("#c6ccd7", "#475063"),
    "paper": ("#ffffff", "#1b1e26"),
    "grey": ("#d9dde5", "#3a4150"),
    "measured": ("#2b4a9b", "#9db8ff"),
}


def _stripes(angle: int) -> str:
    return (
        f"repeating-linear-gradient({angle}deg,transparent 0 4px,"
        "rgba(255,255,255,.38) 4px 6px)"
    )


_DOTS = "radial-gradient(rgba(255,255,255,.5) 1.2px,transparent 1.6px) 0 0/6px 6px"

# Of a request: its letter, hue, ink that is readable on the hue, and hatch.
REQUESTS: tuple[tuple[str, str, str, str], ...] = (
    ("A", "#1660f0", "#ffffff", "none"),
    ("B", "#e86f0a", "#14161c", _stripes(135)),
    ("C", "#0da76f", "#14161c", _DOTS),
    ("D", "#c2709d", "#14161c", _stripes(45)),
    ("E", "#7e6c30", "#ffffff", _stripes(0)),
    ("F", "#7960c4", "#ffffff", _stripes(90)),
)


def letter(name: str) -> str:
    """Return the look of a request: its own letter, or one that follows its number."""
    letters = "".join(request[0] for request in REQUESTS)
    if name and name in letters and len(name) == 1:
        return name
    digits = name[len(name.rstrip("0123456789")) :]
    number = int(digits) if digits else sum(name.encode())
    return letters[number % len(letters)]


def _request_css() -> str:
    return "\n".join(
        f".mv-figure .mv-t-{name}{{--mv-hue:{hue};--mv-hue-ink:{ink};"
        f"--mv-hatch:{hatch}}}"
        for name, hue, ink, hatch in REQUESTS
    )


CSS = f"""
{_request_css()}
.mv-figure .mv-t-bar{{display:flex;gap:6px;align-items:center}}
.mv-figure .mv-t-bar button,.mv-figure .mv-t-pages button{{font:inherit;width:38px;
 height:36px;flex:none;border-radius:6px;cursor:pointer;border:1px solid var(--mv-line);
 background:var(--mv-grey);color:var(--mv-ink);padding:0}}
.mv-figure .mv-t-bar input{{flex:1;min-width:0;accent-color:var(--mv-measured)}}
.mv-figure .mv-t-bar output{{min-width:6.5em;text-align:right;
 font-variant-numeric:tabular-nums}}
.mv-figure .mv-t-event{{min-height:1.5em;margin:6px 0 4px}}
.mv-figure .mv-t-facts{{color:var(--mv-dim);font-size:13px;margin:0 0 8px;
 font-variant-numeric:tabular-nums;min-height:1.5em}}
.mv-figure .mv-t-lane{{display:grid;grid-template-columns:150px 1fr;gap:10px;
 align-items:center;font-size:12.5px;color:var(--mv-dim);margin:0 0 3px}}
.mv-figure .mv-t-lane svg{{display:block;width:100%;height:26px;cursor:pointer;
 background:var(--mv-paper);border-bottom:1px solid var(--mv-line)}}
.mv-figure .mv-t-lane path{{fill:var(--mv-measured);stroke:none}}
.mv-figure .mv-t-lane line{{stroke:var(--mv-ink);stroke-width:2;
 vector-effect:non-scaling-stroke}}
.mv-figure .mv-t-panes{{display:flex;flex-wrap:wrap;gap:4px 32px}}
.mv-figure .mv-t-panes>div{{flex:1 1 330px;min-width:0}}
.mv-figure .mv-t-head{{font-weight:600;font-size:13px;margin:12px 0 6px}}
.mv-figure .mv-t-head small{{font-weight:400;font-size:12.5px;color:var(--mv-dim)}}
.mv-figure .mv-t-queue{{display:grid;grid-template-columns:92px 1fr;gap:8px;
 align-items:start;font-size:13px;margin:0 0 3px;line-height:24px}}
.mv-figure .mv-t-queue>span:first-child{{color:var(--mv-dim)}}
.mv-figure .mv-t-chips{{display:flex;flex-wrap:wrap;gap:4px;align-items:center;
 min-height:26px}}
.mv-figure .mv-t-name{{font:inherit;font-weight:600;font-size:13px;line-height:19px;
 min-width:26px;max-width:100%;padding:0 5px 5px;border:0;border-radius:5px;
 color:var(--mv-hue-ink);text-align:center;overflow:hidden;text-overflow:ellipsis;
 white-space:nowrap;background:
 linear-gradient(var(--mv-hue),var(--mv-hue)) 0 0/100% calc(100% - 5px) no-repeat,
 var(--mv-hatch),var(--mv-hue)}}
.mv-figure button.mv-t-name{{cursor:pointer}}
.mv-figure .mv-t-name[aria-pressed=true]{{outline:2px solid var(--mv-ink);
 outline-offset:1px}}
.mv-figure .mv-t-picked [data-r]:not(.mv-t-pick){{opacity:.25}}
.mv-figure .mv-t-rows{{max-height:430px;overflow:auto;list-style:none;margin:0;
 padding:0 2px}}
.mv-figure .mv-t-rows>li{{display:grid;grid-template-columns:52px 1fr;gap:2px 8px;
 align-items:center;margin:0 0 6px;padding:0}}
.mv-figure .mv-t-rows .mv-t-said{{grid-column:2;font-size:12.5px;line-height:1.3;
 color:var(--mv-dim);font-variant-numeric:tabular-nums}}
.mv-figure .mv-t-said b{{color:var(--mv-ink);font-weight:600;white-space:pre-wrap}}
.mv-figure .mv-t-meter{{display:flex;height:16px;min-width:24px}}
.mv-figure .mv-t-meter i{{min-width:0}}
.mv-figure .mv-t-done{{background:var(--mv-grey)}}
.mv-figure .mv-t-hit{{background:
 repeating-linear-gradient(135deg,var(--mv-dim) 0 2px,transparent 2px 6px),
 var(--mv-grey)}}
.mv-figure .mv-t-to-do{{border:1px dashed var(--mv-dim);border-left:0}}
.mv-figure .mv-t-prompt{{background:var(--mv-hatch),var(--mv-hue);
 border:2px solid var(--mv-hue)}}
.mv-figure .mv-t-generated{{background:transparent;border:2px solid var(--mv-hue)}}
.mv-figure .mv-t-meter .mv-t-prompt,.mv-figure .mv-t-meter .mv-t-generated{{
 min-width:9px}}
.mv-figure .mv-t-block{{border:2px solid var(--mv-hue);border-radius:5px;min-width:28px;
 padding:0 4px;text-align:center;font-size:12.5px;font-weight:600;line-height:20px;
 font-variant-numeric:tabular-nums}}
.mv-figure .mv-t-block.mv-t-shared,.mv-figure .mv-t-box.mv-t-shared,
.mv-figure .mv-t-cell.mv-t-shared{{border:4px double var(--mv-ink)}}
.mv-figure .mv-t-block.mv-t-shared{{padding:0 2px;line-height:16px}}
.mv-figure .mv-t-pool{{display:grid;gap:3px;grid-template-columns:
 repeat(auto-fill,minmax(14px,1fr));max-width:{64 * 17}px}}
.mv-figure .mv-t-cell{{height:14px;border-radius:3px}}
.mv-figure .mv-t-free{{border:1px solid var(--mv-line)}}
.mv-figure .mv-t-kept{{border:1px solid var(--mv-dim);background:
 radial-gradient(var(--mv-dim) 2px,transparent 2.6px) center/7px 7px,
 var(--mv-grey)}}
.mv-figure .mv-t-boxes{{display:grid;gap:6px;
 grid-template-columns:repeat(auto-fill,minmax(var(--mv-block),1fr))}}
.mv-figure .mv-t-box{{border:1px solid var(--mv-line);border-radius:6px;min-width:0;
 padding:3px 5px 5px}}
.mv-figure .mv-t-box.mv-t-shared{{padding:0 2px 2px}}
.mv-figure .mv-t-box>div:first-child{{font-size:11.5px;color:var(--mv-dim);display:flex;
 justify-content:space-between;gap:4px;line-height:1.5;white-space:nowrap;
 overflow:hidden}}
.mv-figure .mv-t-box b{{color:var(--mv-ink);font-weight:600}}
.mv-figure .mv-t-slots{{display:grid;gap:2px;
 grid-template-columns:repeat(var(--mv-row),minmax(0,1fr))}}
.mv-figure .mv-t-slots i{{height:14px;border-radius:3px}}
.mv-figure .mv-t-key{{display:flex;flex-wrap:wrap;gap:3px 16px;color:var(--mv-dim);
 font-size:12.5px;margin:8px 0 0;padding:0;list-style:none}}
.mv-figure .mv-t-key li{{display:flex;gap:6px;align-items:center;margin:0}}
.mv-figure .mv-t-key i{{width:18px;height:13px;border-radius:3px;flex:none}}
.mv-figure .mv-t-pages{{display:flex;gap:8px;align-items:center;margin:0 0 8px;
 font-size:13px;font-variant-numeric:tabular-nums}}
.mv-figure .mv-t-pages button{{height:28px}}
.mv-figure .mv-t-text{{white-space:pre-wrap;font-size:12.5px;margin:8px 0 0;
 background:none;border:0;padding:0;color:var(--mv-ink)}}
.mv-figure [hidden]{{display:none}}
.mv-figure .mv-t-bar[hidden]{{display:none}}
@media (max-width:480px){{
 .mv-figure .mv-t-lane{{grid-template-columns:1fr;gap:0}}
 .mv-figure .mv-t-event{{min-height:4.5em}}
 .mv-figure .mv-t-bar output{{min-width:4.5em}}
 .mv-figure .mv-t-facts{{min-height:3em}}
}}
"""
