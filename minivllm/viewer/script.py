"""What the page of a trace does: fold the changes up to a step, and draw that step.

The script sees the card as `root` and `viewer_data(...)` as `data`. It draws one step
at a time, and of a large pool one window, so a long trace costs no more than a short
one. Going back folds from the first step again, which takes a few milliseconds.

Source: appendix A8, "Traces".
"""

JS = r"""
const {names, letters, prompts, steps, blockSize, numBlocks, texts} = data;
const last = steps.length - 1;
const WINDOW = 512; // blocks of the pool that are shown at once
const get = (name) => root.querySelector(".mv-t-" + name);
const [slider, play] = [root.querySelector("input"), get("play")];
const escape = (text) =>
  String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const number = (n) => n.toLocaleString("en-US");
const count = (n, what) => `${number(n)} ${what}${n === 1 ? "" : "s"}`;

// The fold: state is what the engine has planned in state.step, before it computes.
const start = () => ({
  step: -1, waiting: [], running: [], admitted: [], finished: [], ran: new Set(),
  tokens: prompts.map((n) => n || 0), computed: prompts.map(() => 0),
  hits: prompts.map(() => 0), tables: new Map(), cached: new Set(),
  numPreempted: 0, numHits: 0, numSampled: 0,
});
const advance = (state) => {
  const before = steps[state.step] || {};
  const now = steps[++state.step];
  for (const [r, n] of before.s || []) state.computed[r] += n;
  for (const [r] of before.o || []) state.tokens[r] += 1;
  state.numSampled += (before.o || []).length;
  state.finished.push(...(before.f || []), ...(now.x || []).map((r) => [r, "abort"]));
  const ran = new Set(state.running);
  state.waiting = now.w || state.waiting;
  state.running = now.r || state.running;
  state.admitted = now.r ? now.r.filter((r) => !ran.has(r)) : [];
  for (const r of state.admitted) { state.ran.add(r); state.hits[r] = 0; }
  for (const [r, n] of now.n || []) state.tokens[r] = n;
  for (const [r, n] of now.k || []) state.computed[r] = n;
  for (const [r, n] of now.h || []) { state.hits[r] = n; state.numHits += n; }
  for (const [r, kept, ...ids] of now.b || []) {
    const table = [...(state.tables.get(r) || []).slice(0, kept), ...ids];
    table.length ? state.tables.set(r, table) : state.tables.delete(r);
  }
  for (const block of now.c || []) state.cached.add(block);
  for (const block of now.u || []) state.cached.delete(block);
  state.numPreempted += (now.p || []).length;
};
const numPromptTokens = (state, r, n) =>
  Math.max(0, Math.min(n, (prompts[r] ?? state.tokens[r]) - state.computed[r]));

// The lanes: the whole trace at a glance.
const bins = Math.min(steps.length, 600);
const lanes = {prompt: [], answer: [], used: [], preempted: []};
let [maxRows, maxTables] = [0, 0];
for (const state = start(); state.step < last;) {
  advance(state);
  const now = steps[state.step];
  const bin = Math.floor((state.step * bins) / steps.length);
  let prompt = 0, answer = 0;
  for (const [r, n] of now.s || []) {
    prompt += numPromptTokens(state, r, n);
    answer += n - numPromptTokens(state, r, n);
  }
  const used = new Set([...state.tables.values()].flat()).size;
  const values = {prompt, answer, used, preempted: (now.p || []).length};
  maxRows = Math.max(maxRows, (now.s || []).length);
  maxTables = Math.max(maxTables, state.tables.size);
  for (const name in lanes)
    lanes[name][bin] = Math.max(lanes[name][bin] || 0, values[name]);
}
const lane = (label, values, top) => {
  const bar = (v, i) => v && `M${i} 1V${1 - v / top}h1V1z`;
  const path = top ? values.map(bar).filter(Boolean).join("") : "";
  return `<div class="mv-t-lane"><span>${label}</span><svg aria-hidden="true" ` +
    `viewBox="0 0 ${bins} 1" preserveAspectRatio="none"><path d="${path}"/>` +
    '<line y1="0" y2="1"/></svg></div>';
};
const most = (values) => values.reduce((a, b) => Math.max(a, b), 0);
const tops = {prompt: most(lanes.prompt), answer: most(lanes.answer)};
const preemptions = most(lanes.preempted);
get("lanes").innerHTML =
  lane(`prompt tokens, up to ${number(tops.prompt)}`, lanes.prompt, tops.prompt) +
  lane(`answer tokens, up to ${number(tops.answer)}`, lanes.answer, tops.answer) +
  lane(`blocks in use, of ${number(numBlocks)}`, lanes.used, numBlocks) +
  (preemptions
    ? lane(`preemptions, up to ${preemptions}`, lanes.preempted, preemptions) : "");

// The pieces of a step, as HTML.
const look = (r) => `mv-t-${letters[r]}`;
const badge = (r) =>
  `<span class="mv-t-name ${look(r)}" title="${escape(names[r])}">` +
  `${escape(names[r])}</span>`;
const listed = (requests) => requests.slice(0, 5).map((r) => names[r]).join(", ") +
  (requests.length > 5 ? ` and ${requests.length - 5} more` : "");
const sentence = (requests, one, many) =>
  requests.length > 1 ? `Requests ${listed(requests)} ${many}. `
    : requests.length ? `Request ${listed(requests)} ${one}. ` : "";
const describe = (state) => {
  if (state.step === last) return "After the last step.";
  const now = steps[state.step];
  let text = sentence(now.a || [], "arrives", "arrive");
  text += sentence(now.x || [], "is aborted", "are aborted");
  text += sentence(now.p || [], "is preempted", "are preempted");
  text += sentence(state.admitted, "is admitted", "are admitted");
  for (const [r, n] of now.h || [])
    text += `Request ${names[r]} finds ${count(n, "token")} in the prefix cache. `;
  const reasons = {stop: "is complete", length: "has all its tokens", error: "fails"};
  for (const reason in reasons) {
    const ended = (now.f || []).filter((f) => f[1] === reason).map((f) => f[0]);
    text += sentence(ended, reasons[reason],
      reasons[reason].replace(/^is/, "are").replace(/^has all its/, "have all their")
        .replace(/fails/, "fail"));
  }
  if (text) return text;
  return now.s ? "The running requests go on." : "There is nothing to compute.";
};
const facts = (state) => {
  const now = steps[state.step];
  const parts = [];
  let prompt = 0, all = 0;
  for (const [r, n] of now.s || []) {
    prompt += numPromptTokens(state, r, n);
    all += n;
  }
  if (now.s) parts.push(`${count(all, "token")}: ${prompt} of prompts, ` +
    `${all - prompt} of answers`);
  const ms = (now.t[1] - now.t[0]) * 1000;
  parts.push(`at ${now.t[0].toFixed(3)} s` +
    (now.s ? `, takes ${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms` : ""));
  parts.push(`so far ${count(state.numSampled, "new token")}, ` +
    `${count(state.numPreempted, "preemption")}, ${number(state.numHits)} ` +
    "tokens from the cache");
  return parts.join(" · ");
};
let picked = null;
const queue = (label, requests, most, notes = {}) => {
  const chips = requests.slice(0, most).map((r) =>
    `<button type="button" class="mv-t-name ${look(r)}" data-r="${r}" ` +
    `aria-pressed="${picked === r}" title="${escape(notes[r] || names[r])}">` +
    `${escape(names[r])}</button>`);
  if (requests.length > most) chips.push(`and ${requests.length - most} more`);
  return `<div class="mv-t-queue"><span>${label} ${requests.length || ""}</span>` +
    `<span class="mv-t-chips">${chips.join("") || "none"}</span></div>`;
};
const queues = (state) => {
  const newest = state.finished.slice().reverse();
  const reasons = Object.fromEntries(
    newest.map(([r, reason]) => [r, `${names[r]}: ${reason}`]));
  return queue("waiting", state.waiting.filter((r) => !state.ran.has(r)), 24) +
    queue("preempted", state.waiting.filter((r) => state.ran.has(r)), 24) +
    queue("running", state.running, 64) +
    queue("finished", newest.map(([r]) => r), 12, reasons);
};
// As high as it will ever be, so that the page does not jump from step to step.
const list = (title, note, rows, height) =>
  `<div class="mv-t-head">${title} <small>${note}</small></div><ul class="mv-t-rows" ` +
  `tabindex="0" aria-label="${title}" style="min-height:${Math.min(430, height)}px">` +
  `${rows.join("")}</ul>`;
const span = (from, n) => (n === 1 ? `${from + 1}` : `${from + 1} to ${from + n}`);
const batchRow = (state, r, n, widest, sampled) => {
  const done = state.computed[r], total = Math.max(state.tokens[r], done + n);
  const hits = Math.min(state.hits[r], done);
  const prompt = numPromptTokens(state, r, n);
  const piece = (kind, size) =>
    size && `<i class="mv-t-${kind}" style="flex:${size}"></i>`;
  const meter = [["hit", hits], ["done", done - hits], ["prompt", prompt],
    ["generated", n - prompt], ["to-do", total - done - n]];
  const whole = prompts[r] ?? total;
  let said = done >= whole && n === 1 ? `token ${number(total)}`
    : `tokens ${span(done, n)} of ${number(total)}`;
  if (done < whole && total > whole) said += ", once more";
  if (hits) said += `, ${number(hits)} from the cache`;
  for (const id of sampled)
    said += ` → <b>${escape(texts[id] ?? number(id).replaceAll(",", ""))}</b>`;
  return `<li class="${look(r)}" data-r="${r}">${badge(r)}<span class="mv-t-meter" ` +
    `aria-hidden="true" style="width:${Math.max(4, (100 * total) / widest)}%">` +
    `${meter.map((m) => piece(...m) || "").join("")}</span>` +
    `<span class="mv-t-said">${said}</span></li>`;
};
const batch = (state) => {
  const now = steps[state.step];
  const tokens = {};
  for (const [r, id] of now.o || []) (tokens[r] ||= []).push(id);
  const totals = (now.s || []).map(([r, n]) =>
    Math.max(state.tokens[r], state.computed[r] + n));
  const rows = (now.s || []).map(([r, n]) =>
    batchRow(state, r, n, most(totals), tokens[r] || []));
  return list("Batch", count(rows.length, "request"), rows, 44 * maxRows);
};
const tables = (state, owners) => {
  const rows = [...state.tables].map(([r, table]) => {
    const chip = (block) => `<span class="mv-t-block` +
      `${owners[block].length > 1 ? " mv-t-shared" : ""}">${block}</span>`;
    const chips = table.length <= 11 ? table.map(chip) : [
      ...table.slice(0, 5).map(chip), `<small>${table.length - 10} more</small>`,
      ...table.slice(-5).map(chip)];
    return `<li class="${look(r)}" data-r="${r}">${badge(r)}` +
      `<span class="mv-t-chips">${chips.join("")}</span></li>`;
  });
  return list("Block tables", "blocks in token order", rows, 32 * maxTables);
};
const about = (state, block, users) => {
  if (!users.length)
    return `block ${block}: free${state.cached.has(block) ? ", content cached" : ""}`;
  const first = users[0][1] * blockSize;
  return `block ${block}: ${users.map(([r]) => names[r]).join(", ")}, ` +
    `tokens ${first + 1} to ${first + blockSize}` +
    (state.cached.has(block) ? ", cached" : "");
};
const attributes = (state, block, users, kind) => {
  const shared = users.length > 1 ? " mv-t-shared" : "";
  return `class="${kind}${shared}" title="${escape(about(state, block, users))}"` +
    (users.length ? ` data-r="${users.map(([r]) => r).join(" ")}"` : "");
};
const cell = (state, block, users) => {
  const kind = users.length ? `${look(users[0][0])} mv-t-prompt`
    : state.cached.has(block) ? "mv-t-kept" : "mv-t-free";
  return `<i ${attributes(state, block, users, `mv-t-cell ${kind}`)}></i>`;
};
const box = (state, block, users, scheduled) => {
  let slots = "";
  for (let slot = 0; slot < blockSize; slot++) {
    let kind = !users.length && state.cached.has(block) ? "mv-t-kept" : "mv-t-free";
    for (const [r, index] of users) {
      const position = index * blockSize + slot;
      if (position >= state.computed[r] + (scheduled[r] || 0)) continue;
      const whole = prompts[r] ?? state.tokens[r];
      kind = `${look(r)} mv-t-${position < whole ? "prompt" : "generated"}`;
      break;
    }
    slots += `<i class="${kind}"></i>`;
  }
  const who = users.map(([r]) => escape(names[r])).join(" ");
  return `<div ${attributes(state, block, users, "mv-t-box")}><div><b>${block}</b>` +
    `<span>${who}</span></div><div class="mv-t-slots">${slots}</div></div>`;
};
let first = 0; // block of the window
const pool = (state, owners) => {
  const scheduled = Object.fromEntries(steps[state.step].s || []);
  const used = owners.filter((users) => users.length).length;
  const shared = owners.filter((users) => users.length > 1).length;
  const kept = [...state.cached].filter((block) => !owners[block].length).length;
  const said = `${number(numBlocks)} blocks of ${blockSize}: ${number(used)} in use` +
    `, ${number(shared)} of them shared; ${number(numBlocks - used)} free, ` +
    `${number(kept)} of them cached`;
  const end = Math.min(first + WINDOW, numBlocks);
  const pages = numBlocks <= WINDOW ? "" :
    `<div class="mv-t-pages"><button type="button" data-move="-1" ` +
    `aria-label="Earlier blocks"${first ? "" : " disabled"}>&#8592;</button>` +
    `<span>blocks ${number(first)} to ${number(end - 1)}</span>` +
    `<button type="button" data-move="1" aria-label="Later blocks"` +
    `${end < numBlocks ? "" : " disabled"}>&#8594;</button></div>`;
  const isSmall = numBlocks <= 64 && blockSize <= 16;
  const row = Math.min(blockSize, 8);
  const cells = owners.slice(first, end).map((users, i) =>
    (isSmall ? box : cell)(state, first + i, users, scheduled));
  return `<div class="mv-t-head">KV cache <small>${said}</small></div>${pages}` +
    `<div role="img" aria-label="${said}" class="mv-t-${isSmall ? "boxes" : "pool"}" ` +
    `style="--mv-block:${18 + 15 * row}px;--mv-row:${row}">${cells.join("")}</div>`;
};

let state = start();
const draw = (step) => {
  if (step < state.step) state = start();
  while (state.step < step) advance(state);
  const owners = Array.from({length: numBlocks}, () => []);
  for (const [r, table] of state.tables)
    table.forEach((block, index) => owners[block].push([r, index]));
  get("event").textContent = describe(state);
  get("facts").textContent = facts(state);
  const view = get("view");
  const scrolled = [...view.querySelectorAll("ul")].map((list) => list.scrollTop);
  view.innerHTML = queues(state) +
    `<div class="mv-t-panes"><div>${batch(state)}</div>` +
    `<div>${tables(state, owners)}</div></div>${pool(state, owners)}`;
  view.querySelectorAll("ul").forEach((list, i) => { list.scrollTop = scrolled[i]; });
  view.classList.toggle("mv-t-picked", picked !== null);
  if (picked !== null)
    for (const part of view.querySelectorAll("[data-r]"))
      if (part.dataset.r.split(" ").includes(String(picked)))
        part.classList.add("mv-t-pick");
  const x = ((step + 0.5) * bins) / steps.length;
  for (const line of root.querySelectorAll("line")) {
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
  }
};
let wanted = null;
const show = (step) => {
  step = Math.max(0, Math.min(last, step));
  slider.value = step;
  root.querySelector("output").textContent = `${number(step)} of ${number(last)}`;
  if (wanted === null) // one picture per frame of the screen, however fast the slider
    requestAnimationFrame(() => { const now = wanted; wanted = null; draw(now); });
  wanted = step;
};
const here = () => Number(slider.value);
let timer = null;
const stop = () => {
  clearInterval(timer);
  timer = null;
  play.textContent = "\u25B6\uFE0E";
  play.ariaLabel = "Play";
};
const toggle = () => {
  if (timer) return stop();
  if (here() === last) show(0);
  play.textContent = "\u275A\u275A";
  play.ariaLabel = "Pause";
  timer = setInterval(() => {
    show(here() + 1);
    if (here() === last) stop();
  }, Math.max(60, Math.min(900, 60000 / steps.length)));
};
const go = (step) => { stop(); show(step); };
play.onclick = toggle;
get("back").onclick = () => go(here() - 1);
get("on").onclick = () => go(here() + 1);
slider.oninput = () => go(here());
get("lanes").onclick = (event) => {
  const svg = event.target.closest("svg");
  if (!svg) return;
  const {left, width} = svg.getBoundingClientRect();
  go(Math.floor(((event.clientX - left) / width) * steps.length));
};
get("view").onclick = (event) => {
  const {move, r} = (event.target.closest("button") || event.target).dataset;
  if (move) first += WINDOW * Number(move);
  else if (event.target.closest("button"))
    picked = picked === Number(r) ? null : Number(r);
  else return;
  draw(here());
  // The button was drawn anew; the focus stays where it was.
  const again = move ? `[data-move="${move}"]` : `button[data-r="${r}"]`;
  get("view").querySelector(again)?.focus();
};
const page = root.closest(".mv-t-page");
(page ? document : root).addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target === slider) return;
  const moves = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10};
  if (event.key in moves) go(here() + moves[event.key]);
  else if (event.key === "Home") go(0);
  else if (event.key === "End") go(last);
  else if (event.key === " " && event.target.tagName !== "BUTTON") toggle();
  else return;
  event.preventDefault();
});
get("text").remove();
slider.max = last;
for (const part of root.querySelectorAll("[hidden]")) part.hidden = false;
show(0);
draw(0);
"""
