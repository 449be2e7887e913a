"""How the page of the server looks: light and dark, on a phone and on a wide screen.

Colours and hatches are those of the trace viewer. Called by the page.

In vLLM: no counterpart.
Source: appendix A33, "A page to look inside".
"""

from minivllm.viewer.style import REQUESTS, THEME

COLORS = {**THEME, "wrong": ("#c62840", "#ff7b8b")}


def variables(place: int) -> str:
    """Return the colours of the light page (0) or of the dark one (1)."""
    return ";".join(f"--{name}:{pair[place]}" for name, pair in COLORS.items())


LOOKS = "\n".join(
    f".r-{name}{{--hue:{hue};--hue-ink:{ink};--hatch:{hatch}}}"
    for name, hue, ink, hatch in REQUESTS
)
CSS = f"""
:root{{color-scheme:light dark;{variables(0)}}}
@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}
{LOOKS}
*{{box-sizing:border-box}}
body{{font:15px/1.45 -apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans",
 "Liberation Sans",Arial,sans-serif;color:var(--ink);background:var(--paper);
 max-width:1320px;margin:0 auto;padding:12px 16px 32px;overflow-wrap:anywhere}}
h1,h2,h3{{font-size:20px;margin:0}}
h2{{font-size:16px}}
h3{{font-size:13px;margin:14px 0 5px}}
h3 small,.dim{{font-weight:400;font-size:12.5px;color:var(--dim);
 font-variant-numeric:tabular-nums}}
header p,#line,#engine{{color:var(--dim);font-size:13px;margin:2px 0 10px}}
main{{display:grid;grid-template-columns:minmax(0,1fr);gap:20px 32px}}
@media (min-width:960px){{main{{grid-template-columns:minmax(0,1fr) minmax(0,1fr)}}
 #messages{{height:calc(100vh - 330px);min-height:220px}}}}
button,input,textarea{{font:inherit;color:var(--ink);background:var(--paper);
 border:1px solid var(--dim);border-radius:6px;padding:7px 12px}}
button{{cursor:pointer;background:var(--grey)}}
button:disabled{{cursor:default;opacity:.5}}
#send{{background:var(--measured);border-color:var(--measured);color:var(--paper)}}
:focus-visible{{outline:2px solid var(--measured);outline-offset:1px}}
textarea{{width:100%;resize:vertical;display:block}}
[hidden]{{display:none!important}}
.unseen{{position:absolute;width:1px;height:1px;overflow:hidden;
 clip-path:inset(50%);white-space:nowrap}}
summary{{cursor:pointer;padding:4px 0}}
#settings-list{{display:grid;gap:4px 18px;padding:6px 0 12px;
 grid-template-columns:repeat(auto-fill,minmax(220px,1fr))}}
.setting{{display:grid;grid-template-columns:1fr auto;font-size:13px}}
.setting input{{grid-column:1/3;width:100%;min-width:0}}
.setting input[type=range]{{padding:0;accent-color:var(--measured)}}
.setting output{{color:var(--dim);font-variant-numeric:tabular-nums}}
.wide{{grid-column:1/-1}}
#messages{{list-style:none;margin:0 0 10px;padding:0 2px;overflow:auto;min-height:90px;
 max-height:70vh;border-top:1px solid var(--line);border-bottom:1px solid var(--line)}}
.turn{{margin:12px 0}}
.turn p{{margin:0 0 6px;white-space:pre-wrap}}
.turn .asked{{background:var(--grey);border-radius:8px;padding:7px 11px;
 width:fit-content;max-width:100%;margin-left:auto}}
.thoughts{{color:var(--dim);font-size:13.5px}}
.turn .note{{color:var(--dim);font-size:12.5px;font-variant-numeric:tabular-nums}}
.failed .note{{color:var(--wrong)}}
.buttons{{display:flex;gap:8px;margin:8px 0 0}}
#key-form{{display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin:0 0 12px}}
.stale #picture{{opacity:.4}}
#running{{list-style:none;margin:0;padding:0;max-height:300px;overflow:auto}}
#running li{{display:grid;grid-template-columns:52px minmax(40px,1fr) minmax(0,2.4fr);
 gap:8px;align-items:center;margin:0 0 3px}}
#running li.dim{{display:block}}
.chip{{display:inline-block;min-width:26px;padding:0 6px 4px;border-radius:5px;
 font-size:12.5px;font-weight:600;text-align:center;color:var(--hue-ink);
 white-space:nowrap;overflow:hidden;text-overflow:ellipsis;max-width:100%;background:
 linear-gradient(var(--hue),var(--hue)) 0 0/100% calc(100% - 4px) no-repeat,
 var(--hatch),var(--hue)}}
#waiting{{display:flex;flex-wrap:wrap;gap:4px;min-height:24px}}
.meter{{height:14px;border:1px solid var(--dim);border-radius:3px;overflow:hidden}}
.meter i{{display:block;height:100%;background:var(--hatch),var(--hue)}}
.strip{{display:block;width:100%;height:58px;border-bottom:1px solid var(--line)}}
.strip.low{{height:34px}}
#prefill-bars,.key.prefill{{fill:var(--measured);background:var(--measured)}}
#decode-bars,.key.decode{{fill:#e86f0a;background:#e86f0a}}
#time-bars{{fill:var(--dim)}}
#pool{{display:grid;gap:2px;grid-template-columns:repeat(auto-fill,minmax(13px,1fr))}}
#pool i,.key{{height:13px;border-radius:3px;border:1px solid var(--line)}}
.used{{background:var(--hatch),var(--hue)}}
#pool .used{{border-color:var(--hue)}}
#pool .shared,.key.shared{{border:4px double var(--ink)}}
#pool .kept,.key.kept{{border-color:var(--dim);background:
 radial-gradient(var(--dim) 2px,transparent 2.6px) center/7px 7px,var(--grey)}}
.keys{{display:flex;flex-wrap:wrap;gap:3px 16px;margin:7px 0 0;padding:0;
 list-style:none;font-size:12.5px;color:var(--dim)}}
.keys li{{display:flex;gap:6px;align-items:center}}
.key{{display:inline-block;width:17px}}
@media (max-width:480px){{body{{padding:9px 10px 28px}}}}
"""
