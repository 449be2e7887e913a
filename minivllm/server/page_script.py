"""What the page of the server does: a chat, and a picture of the engine.

Called by the page. The server tells it nothing but JSON, and it makes no HTML of that.

In vLLM: no counterpart.
Source: appendix A33, "A page to look inside".
"""

JS = r"""
const get = (id) => document.getElementById(id);
const make = (tag, name = "", text = "") => {
  const part = document.createElement(tag);
  part.className = name;
  part.textContent = text; // never as HTML: a model may write anything
  return part;
};
const number = (n) => n.toLocaleString("en-US");
const count = (n, what) => `${number(n)} ${what}${n === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((a, b) => a + b, 0);

// The wire. An error that the user can understand is a Refused.
class Refused extends Error {
  constructor(message, status = 0) { super(message); this.status = status; }
}
const words = (error) => error instanceof Refused ? error.message : String(error);
let key = ""; // kept here and nowhere else
const ask = async (path, signal, body) => {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = {headers, signal, cache: "no-store"};
  if (body) Object.assign(options, {method: "POST", body: JSON.stringify(body)});
  const response = await fetch(path, options).catch((error) => {
    throw signal?.aborted ? error : new Refused("The server is not reachable.");
  });
  if (response.ok) return response;
  if (response.status === 401) get("key-form").hidden = false;
  const said = await response.json().catch(() => null);
  throw new Refused(
    said?.error?.message ?? `The server answers with status ${response.status}.`,
    response.status);
};
async function* events(response, heard = () => {}) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const {done, value} = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error
          : new Refused("The connection broke off.");
      });
      heard();
      // A letter may be cut in two: the decoder keeps the first half.
      rest += decoder.decode(value, {stream: !done});
      const whole = rest.split("\n\n");
      rest = whole.pop();
      for (const event of whole)
        if (event.startsWith("data: ")) yield event.slice(6);
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The chat. What was said is here, and goes along with every question.
let said = [];
let writing = null; // stops the answer that is being written
const [box, list] = [get("question"), get("messages")];
const inputs = [...document.querySelectorAll("[data-setting]")];
const showSetting = (input) => {
  const isSet = input.type === "range" ? "touched" in input.dataset : input.value;
  get(`${input.id}-value`).textContent =
    !isSet ? "default" : input.type === "range" ? input.value : "";
  return isSet;
};
const chosen = () => {
  const all = inputs.filter(showSetting).map((i) => [i.name, Number(i.value)]);
  return Object.fromEntries(all);
};
for (const input of inputs)
  input.addEventListener("input", () => {
    input.dataset.touched = "";
    showSetting(input);
  });
get("defaults").onclick = () => {
  for (const input of inputs) {
    delete input.dataset.touched;
    input.value = input.defaultValue;
    showSetting(input);
  }
};
const isAtEnd = () => list.scrollHeight - list.scrollTop - list.clientHeight < 40;
const follow = (change) => {
  const wasAtEnd = isAtEnd();
  change();
  if (wasAtEnd) list.scrollTop = list.scrollHeight;
};
const addTurn = (question) => {
  const turn = make("li", "turn");
  const asked = make("p", "asked", question);
  const thoughts = make("details", "thoughts");
  thoughts.hidden = true;
  thoughts.append(make("summary", "", "Thoughts"), make("p"));
  const answer = make("p", "answer");
  answer.append(document.createTextNode(""));
  turn.append(asked, thoughts, answer, make("p", "note", "…"));
  list.append(turn);
  list.scrollTop = list.scrollHeight;
  return turn;
};
const write = async (turn, body, signal) => {
  const start = performance.now();
  const got = {first: 0, last: 0, usage: null, reason: null};
  const text = turn.querySelector(".answer").firstChild;
  const thoughts = turn.querySelector(".thoughts");
  for await (const data of events(await ask("v1/chat/completions", signal, body))) {
    if (data === "[DONE]") return {...got, start};
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message);
    got.usage = chunk.usage ?? got.usage;
    for (const {delta, finish_reason: reason} of chunk.choices) {
      got.reason = reason ?? got.reason;
      if (!delta.content && !delta.reasoning_content) continue;
      got.last = performance.now();
      got.first ||= got.last;
      follow(() => {
        text.appendData(delta.content ?? "");
        thoughts.lastChild.append(delta.reasoning_content ?? "");
        thoughts.hidden = !thoughts.lastChild.textContent;
      });
    }
  }
  throw new Refused("The connection broke off before the answer was complete.");
};
const sums = ({start, first, last, usage, reason}) => {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${count(usage.prompt_tokens, "token")} read, ${number(cached)} of ` +
      `them from the cache, ${number(usage.completion_tokens)} written`);
    if (first) parts.push(`the first after ${((first - start) / 1000).toFixed(2)} s`);
    const speed = (usage.completion_tokens - 1) / ((last - first) / 1000);
    if (last > first) parts.push(`then ${speed.toFixed(1)} tokens/s`);
  }
  if (reason === "length") parts.push("cut off at its largest length");
  return parts.join(" · ") || "complete";
};
const setWriting = (stopper) => {
  writing = stopper;
  get("send").disabled = Boolean(writing);
  get("stop").disabled = !writing;
};
const send = async () => {
  const question = box.value;
  if (!question.trim() || writing) return;
  const stopper = new AbortController();
  setWriting(stopper);
  box.value = "";
  const turn = addTurn(question);
  const asked = {role: "user", content: question};
  const system = get("system").value.trim();
  const messages = [...said, asked];
  if (system) messages.unshift({role: "system", content: system});
  const options = {stream: true, stream_options: {include_usage: true}};
  let note;
  try {
    const body = {messages, ...options, ...chosen()};
    note = sums(await write(turn, body, stopper.signal));
  } catch (error) {
    note = stopper.signal.aborted ? "stopped" : words(error);
    turn.classList.toggle("failed", !stopper.signal.aborted);
  }
  if (writing === stopper) setWriting(null);
  if (!turn.isConnected) return; // a new chat has begun
  const content = turn.querySelector(".answer").textContent;
  if (content) said.push(asked, {role: "assistant", content});
  else if (!box.value) box.value = question; // as if it had not been sent
  follow(() => { turn.querySelector(".note").textContent = note; });
  get("news").textContent = `Answer: ${note}`;
};
const stop = () => writing?.abort();
get("composer").onsubmit = (event) => { event.preventDefault(); send(); };
get("stop").onclick = stop;
get("reset").onclick = () => {
  stop();
  setWriting(null);
  said = [];
  list.replaceChildren();
  box.focus();
};
box.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});

// The live view: the latest event, and the steps of the strip.
const NUM_STEPS = 96;
const NUM_CELLS = 256;
let [engine, now, steps] = [null, null, []];
const look = (name) => `r-${"ABCDEF"[Number(name.match(/\d*$/)[0]) % 6]}`;
const chip = (name) => make("span", `chip ${look(name)}`, name.replace("request-", ""));
const drawRunning = () => {
  const totalOf = (r) =>
    Math.max(r.num_tokens, r.num_computed_tokens + r.num_scheduled_tokens);
  const widest = Math.max(...now.running.map(totalOf));
  const rows = now.running.map((r) => {
    const row = make("li", look(r.request_id));
    const [meter, bar] = [make("span", "meter"), make("i")];
    const end = r.num_computed_tokens + r.num_scheduled_tokens;
    const total = totalOf(r);
    meter.style.width = `${Math.max(6, (100 * total) / widest)}%`;
    bar.style.width = `${(100 * end) / total}%`;
    meter.append(bar);
    const what = r.phase === "decode" ? `decode, ${count(total, "token")}`
      : `prefill, ${number(end)} of ${count(total, "token")}`;
    const ended = r.finish_reason ? `, ends: ${r.finish_reason}` : "";
    const text = `${what}, ${count(r.num_blocks, "block")}${ended}`;
    row.append(chip(r.request_id), meter, make("span", "dim", text));
    return row;
  });
  const more = now.num_running - now.running.length;
  if (more > 0) rows.push(make("li", "dim", `and ${number(more)} more`));
  get("running").replaceChildren(...rows);
  get("num-running").textContent = number(now.num_running);
  const waiting = now.waiting.map(chip);
  const unseen = now.num_waiting - now.waiting.length;
  if (unseen > 0) waiting.push(make("span", "dim", `and ${number(unseen)} more`));
  get("waiting").replaceChildren(...waiting);
  get("num-waiting").textContent = number(now.num_waiting);
};
const bars = (id, values, floors, top) => {
  const bar = (v, i) => v && `M${i} ${1 - floors[i] / top}v${-v / top}h.8v${v / top}z`;
  get(id).setAttribute("d", values.map(bar).filter(Boolean).join(""));
};
const drawSteps = () => {
  const last = steps.length ? steps[steps.length - 1].step : 0;
  const columns = Array.from({length: NUM_STEPS}, () => null); // a gap stays empty
  for (const step of steps) {
    const column = NUM_STEPS - 1 - (last - step.step);
    if (column >= 0) columns[column] = step;
  }
  const values = (name) => columns.map((step) => (step ? step[name] : 0));
  const [prefill, decode] = [values("num_prefill_tokens"), values("num_decode_tokens")];
  const both = prefill.map((n, i) => n + decode[i]);
  const most = Math.max(1, ...both);
  const nothing = both.map(() => 0);
  bars("decode-bars", decode, nothing, most);
  bars("prefill-bars", prefill, decode, most);
  const times = values("duration_s");
  const longest = Math.max(1e-6, ...times);
  bars("time-bars", times, nothing, longest);
  get("most-tokens").textContent = `up to ${count(most, "token")}`;
  get("longest").textContent = `up to ${(longest * 1000).toFixed(1)} ms`;
  const step = columns[NUM_STEPS - 1];
  get("step").textContent = step
    ? `step ${number(step.step)}: ${number(step.num_prefill_tokens)} prompt and ` +
      `${number(step.num_decode_tokens)} answer tokens in ` +
      `${(step.duration_s * 1000).toFixed(1)} ms` +
      (step.num_preempted ? `, ${number(step.num_preempted)} preempted` : "")
    : "no step yet";
};
// Squares for each kind of block: one at least, where there is a block at all.
const allot = (counts, numCells) => {
  const kinds = counts.filter(Boolean).length;
  const scale = (numCells - kinds) / sum(counts);
  const cells = counts.map((n) => (n ? 1 + Math.floor(n * scale) : 0));
  cells[counts.indexOf(Math.max(...counts))] += numCells - sum(cells);
  return cells;
};
const drawPool = () => {
  const numBlocks = now.num_used + now.num_free;
  const own = now.running.map((r) => r.num_own_blocks);
  const kinds = [...now.running.map((r) => `used ${look(r.request_id)}`),
    "shared", "kept", "free"];
  const counts = [...own, Math.max(0, now.num_used - sum(own)), now.num_kept,
    now.num_free - now.num_kept];
  const numCells = Math.min(NUM_CELLS, numBlocks);
  const cells = numCells < numBlocks ? allot(counts, numCells) : counts;
  const pool = get("pool");
  while (pool.childElementCount < numCells) pool.append(make("i"));
  while (pool.childElementCount > numCells) pool.lastChild.remove();
  const names = cells.flatMap((n, kind) => Array(n).fill(kinds[kind]));
  names.forEach((name, i) => {
    if (pool.children[i].className !== name) pool.children[i].className = name;
  });
  const text = `${number(now.num_used)} of ${number(numBlocks)} blocks in use, ` +
    `${number(now.num_kept)} free with a content that is kept`;
  pool.setAttribute("aria-label", text);
  const pools = now.other_pools.map((pool) =>
    `${number(pool.num_used)} of ${number(pool.num_total)} ${pool.name} in use`);
  get("others").textContent = pools.join(" · ");
  const scale = numBlocks / numCells;
  get("pool-text").textContent = text + (scale > 1
    ? `; a square is about ${scale.toFixed(scale < 10 ? 1 : 0)} blocks` : "");
};
let isWanted = false;
const draw = () => {
  if (isWanted || !now) return; // one picture for each frame of the screen
  isWanted = true;
  requestAnimationFrame(() => {
    isWanted = false;
    drawRunning();
    drawSteps();
    drawPool();
  });
};
const show = (data) => {
  const news = JSON.parse(data);
  if (news.error) throw new Refused(news.error.message);
  if (news.engine) {
    [engine, steps] = [news.engine, []];
    get("engine").textContent = [engine.model, engine.backend, engine.dtype,
      `${engine.policy} policy`, `blocks of ${engine.block_size} tokens`,
      `at most ${count(engine.max_num_seqs, "request")} and ` +
        `${count(engine.max_num_batched_tokens, "token")} in a step`,
    ].filter(Boolean).join(" · ");
    return;
  }
  now = news;
  if (now.step !== null) steps = [...steps, now].slice(-NUM_STEPS);
  draw();
};

// The line to the server: it may break, and is then tried again, less and less often.
const SILENCE_MS = 20000; // the server says something every 5 s
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const tell = (text, isLive = false) => {
  get("line").textContent = text;
  get("live").classList.toggle("stale", !isLive);
};
const learn = async (signal) => {
  const [model] = (await (await ask("v1/models", signal)).json()).data;
  const length = model.max_model_len;
  get("model").textContent = model.id +
    (length ? `, up to ${count(length, "token")} for each request` : "");
};
const read = async (signal, onLive) => {
  const cut = new AbortController();
  const end = () => cut.abort();
  signal.addEventListener("abort", end);
  let timer = setTimeout(end, SILENCE_MS);
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(end, SILENCE_MS);
  };
  try {
    await learn(cut.signal);
    const response = await ask("trace", cut.signal);
    onLive();
    for await (const data of events(response, heard)) show(data);
  } catch (error) {
    throw cut.signal.aborted ? new Refused("The server is not reachable.") : error;
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", end);
    cut.abort();
  }
};
let watching = null;
const watch = async () => {
  watching?.abort();
  watching = new AbortController();
  const {signal} = watching;
  let pause = 1;
  const onLive = () => { pause = 1; tell("live", true); };
  while (!signal.aborted) {
    let problem = "The server has ended the live view.";
    try {
      await read(signal, onLive);
    } catch (error) {
      problem = words(error);
      if ([401, 403, 404].includes(error.status)) {
        if (!signal.aborted) tell(problem);
        return;
      }
    }
    if (signal.aborted) return;
    tell(`${problem} Next try in ${pause} s.`);
    await sleep(1000 * pause);
    pause = Math.min(2 * pause, 16);
  }
};
get("key-form").onsubmit = (event) => {
  event.preventDefault();
  key = get("key").value.trim();
  get("key-form").hidden = true;
  watch();
};
// Nobody looks at a hidden tab, so the engine need not tell it anything.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) watch();
  else {
    watching?.abort();
    tell("paused");
  }
});
inputs.forEach(showSetting);
if (!document.hidden) watch();
box.focus();
"""
