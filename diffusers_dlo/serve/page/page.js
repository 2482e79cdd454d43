// Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
//
// Owns what the page shows and sends. Jobs are the server's: the page keeps none, so that loading it again loses
// nothing. Must not make HTML of a string: all text becomes text nodes, see [Note: content security] in page_files.py.
"use strict";

const SILENT_MS = 40_000; // the server says something every 15 s, if only that it is there
const RETRY_S = [1, 2, 4, 8];
const KEY = "diffusers-dlo.key";
const DRAFT = "diffusers-dlo.draft";
const FIELDS = [
  "prompt", "negative_prompt", "size", "num_inference_steps", "guidance_scale", "seed", "n", "num_frames", "fps",
  "flow_shift", "max_sequence_length",
];
const VIDEO_FIELDS = ["num_frames", "fps"];
const LABELS = {
  size: "Size", num_inference_steps: "Steps", guidance_scale: "Guidance", seed: "Seed", num_frames: "Frames",
  fps: "Frames per second", flow_shift: "Flow shift", max_sequence_length: "Longest prompt",
  negative_prompt: "Negative prompt",
};
const KINDS = { image: "Picture", video: "Video" };
const ENDINGS = { image: "png", video: "mp4" };

const byId = (id) => document.getElementById(id);
const form = byId("form");
const viewer = byId("viewer");
const keyDialog = byId("key-dialog");

let jobs = new Map(); // the server's list, by id, the newest first
let state = null; // what the server said last
let shown = null; // the id of the job in the viewer
let keyGiven = null; // resolves what waits for a key
let wakeUp = () => {};
const files = new Map(); // object URLs of content, by id

// ---- the server ----

class ApiError extends Error {
  constructor(message, param, code, status) {
    super(message);
    Object.assign(this, { param, code, status });
  }
}

/** Seeds go up to 2**63, which a number of JavaScript does not hold: they stay text where the browser shows it. */
const parse = (text) => JSON.parse(text, (name, value, context) => (name === "seed" && context?.source) || value);

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Try again when it is back.", null, "away", 0);
  }
  if (response.ok) return response;
  const told = await response.json().then((body) => body.error, () => null);
  const message = told?.message ?? `The server answered ${response.status} ${response.statusText}.`;
  if (response.status === 401) askForKey(key ? "This is not the server's key." : "");
  throw new ApiError(message, told?.param, told?.code, response.status);
}

function askForKey(reason) {
  byId("key-button").hidden = false;
  byId("key-error").textContent = reason;
  if (!keyDialog.open) keyDialog.showModal();
}

/** Hears the server's events for as long as the page is open, and begins anew whenever they end. */
async function listen() {
  for (let failures = 0; ; ) {
    const stop = new AbortController();
    let silence = setTimeout(() => stop.abort(), SILENT_MS);
    try {
      const response = await call("v1/events", { signal: stop.signal, headers: { Accept: "text/event-stream" } });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ; ) {
        const { value, done } = await reader.read();
        if (done) break;
        clearTimeout(silence);
        silence = setTimeout(() => stop.abort(), SILENT_MS);
        const parts = (rest + value.replaceAll("\r", "")).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5));
          if (data.length) hear(parse(data.join("\n")), failures > 0);
          if (data.length) failures = 0;
        }
      }
    } catch (error) {
      if (error.status === 401) {
        showServer("bad", "Needs the API key");
        await new Promise((resolve) => (keyGiven = resolve));
        continue;
      }
    } finally {
      clearTimeout(silence);
    }
    await away(RETRY_S[Math.min(failures++, RETRY_S.length - 1)]);
  }
}

async function away(seconds) {
  state = null;
  showServer("bad", "Away");
  byId("away").textContent = "The server is away. The page tries again by itself.";
  byId("away").hidden = false;
  await new Promise((resolve) => {
    const timer = setTimeout(resolve, seconds * 1000);
    wakeUp = () => { clearTimeout(timer); resolve(); };
  });
}

function hear(told, wasAway) {
  const first = state === null;
  const before = state ? active(state) : "";
  state = told;
  byId("away").hidden = true;
  if (told.ready) showServer("ready", "Ready");
  else showServer("waiting", told.reason ? `${told.state}: ${told.reason}` : told.state);
  if (wasAway) say("The server is back.");
  if (first) showModel(); // the server may have been started anew, with another one
  if (first || before !== active(told)) refresh();
  render();
}

/** The jobs that are not final, and what they are doing: when this changes, so does the list. */
function active(told) {
  const running = told.ranks.map((rank) => rank.job?.id ?? "");
  return [...told.queue.map((job) => job.id), "", ...running].join();
}

let refreshing = null;
let again = false;

async function refresh() {
  again = true;
  refreshing ??= (async () => {
    while (again) {
      again = false;
      const { data } = parse(await (await call("v1/jobs")).text());
      const before = jobs;
      jobs = new Map(data.map((job) => [job.id, job]));
      for (const job of data) announce(before.get(job.id), job);
      render();
    }
  })().catch(() => {}).finally(() => (refreshing = null)); // who is away is told by `listen`
  return refreshing;
}

async function showModel() {
  const models = await call("v1/models").then((response) => response.json(), () => null);
  if (models) byId("model").textContent = models.data[0].id;
}

async function end(id) {
  try {
    await call(`v1/jobs/${encodeURIComponent(id)}`, { method: "DELETE" });
  } catch (error) {
    say(error.message);
  }
  await refresh();
}

/** The object URL of a file: only a request of the script brings the key along. */
function fileOf(id) {
  if (!files.has(id)) {
    const content = call(`v1/jobs/${encodeURIComponent(id)}/content`);
    const url = content.then((response) => response.blob()).then(URL.createObjectURL);
    files.set(id, url);
    url.catch(() => files.delete(id));
  }
  return files.get(id);
}

// ---- what is said ----

const said = new Map(); // the last quarter of each job that was announced

function say(text) {
  byId("news").textContent = text;
}

function announce(before, job) {
  if (!before || before.status === job.status) return;
  const name = `${KINDS[job.kind]} “${short(job.settings.prompt)}”`;
  if (job.status === "in_progress") say(`${name} has begun on rank ${job.rank}.`);
  else if (job.status === "failed") say(`${name} failed. ${job.error.message}`);
  else say(`${name} is ${job.status}.`);
}

function announceProgress(job) {
  const quarter = Math.floor((job.step / job.steps) * 4);
  if (job.steps && quarter > 0 && quarter < 4 && said.get(job.id) !== quarter) {
    said.set(job.id, quarter);
    say(`${quarter * 25} % of “${short(job.prompt)}”.`);
  }
}

const short = (text) => (text.length > 60 ? `${text.slice(0, 60)}…` : text);

function showServer(kind, text) {
  const line = byId("server");
  line.dataset.state = kind;
  if (line.textContent !== text) line.textContent = text; // unchanged text would be read out again
}

// ---- what is shown ----

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  const { dataset = {}, ...rest } = properties;
  for (const [name, value] of Object.entries(rest)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  Object.assign(element.dataset, dataset);
  element.append(...children);
  return element;
}

/** Makes `parent` show `items`, keeping the elements of those that stay, so that focus and videos stay as they are. */
function keep(parent, items, build, update, heading) {
  const old = new Map([...parent.children].map((child) => [child.dataset.id, child]));
  let last = null;
  for (const item of items) {
    const element = old.get(String(item.id)) ?? build(item);
    old.delete(String(item.id));
    element.dataset.id = item.id;
    const next = last ? last.nextElementSibling : parent.firstElementChild;
    if (next !== element) {
      const hasFocus = element.contains(document.activeElement) ? document.activeElement : null;
      parent.insertBefore(element, next);
      hasFocus?.focus();
    }
    update(element, item);
    last = element;
  }
  for (const gone of old.values()) {
    if (gone.contains(document.activeElement)) heading?.focus();
    gone.remove();
  }
}

/** Sets the text of the parts of an element that are named by `data-part`. */
function fill(element, texts) {
  for (const [name, text] of Object.entries(texts)) {
    const part = element.querySelector(`[data-part="${name}"]`);
    if (part.textContent !== text) part.textContent = text;
  }
}

const part = (tag, name, properties = {}) => make(tag, { ...properties, dataset: { part: name } });

function showBar(bar, job) {
  bar.max = job?.steps ?? 1;
  bar.value = job?.steps ? job.step : 0;
}

function stepsOf(job) {
  return job.steps ? `step ${job.step} of ${job.steps}` : "begins";
}

function bytes(amount) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; amount >= 1024 && unit < units.length - 1; unit++) amount /= 1024;
  return `${unit ? amount.toPrecision(3) : amount} ${units[unit]}`;
}

function render() {
  const ranks = (state?.ranks ?? []).map((rank) => ({ ...rank, id: rank.rank }));
  const running = ranks.filter((rank) => rank.job).map((rank) => ({ ...rank.job, rank: rank.rank }));
  const waiting = (state?.queue ?? []).map((job, index) => ({ ...job, place: index + 1 }));
  const known = [...jobs.values()];
  const done = known.filter((job) => job.status === "completed");
  if (state) { // while the server is away, what it said last stays on the page
    keep(byId("ranks"), ranks, buildRank, updateRank);
    keep(byId("queue"), [...running, ...waiting], buildRow, updateRow, byId("queue-title"));
    byId("queue-count").textContent = running.length + waiting.length || "";
    byId("queue-empty").hidden = running.length + waiting.length > 0;
    running.forEach(announceProgress);
  }
  const ended = known.filter((job) => ["failed", "cancelled"].includes(job.status));
  keep(byId("ended"), ended, buildEnded, () => {}, byId("queue-title"));
  keep(byId("gallery"), done, buildTile, () => {}, byId("gallery-title"));
  byId("gallery-count").textContent = done.length || "";
  byId("gallery-empty").hidden = done.length > 0;
  for (const [id, url] of files) {
    if (jobs.has(id)) continue;
    files.delete(id);
    url.then(URL.revokeObjectURL, () => {});
  }
  if (shown !== null && !jobs.has(shown)) viewer.close(); // somebody has deleted it
}

function buildRank(rank) {
  return make("li", {},
    make("div", { className: "head" },
      make("h3", { textContent: `Rank ${rank.rank}` }), part("span", "state", { className: "state" })),
    part("p", "prompt", { className: "prompt quiet" }),
    make("progress", { "aria-label": `Steps of rank ${rank.rank}` }),
    part("p", "none", { className: "quiet state" }),
    make("dl", { className: "main" }),
    make("details", {},
      make("summary", { textContent: "Figures" }), make("dl", { className: "rest" }), part("p", "advice")));
}

function updateRank(element, { job, figures }) {
  fill(element, {
    state: job ? stepsOf(job) : "idle",
    prompt: job?.prompt ?? "",
    none: figures ? "" : "Its figures come with its first picture or video.",
    advice: figures?.advice ?? "",
  });
  showBar(element.querySelector("progress"), job);
  element.querySelector("details").hidden = !figures;
  const told = JSON.stringify(figures ?? null);
  if (element.dataset.told === told) return;
  element.dataset.told = told;
  element.querySelector(".main").replaceChildren(...(figures ? list(mainFigures(figures)) : []));
  element.querySelector(".rest").replaceChildren(...(figures ? list(otherFigures(figures)) : []));
}

/** The rows of a `dl`. */
const list = (pairs) => pairs.map(([name, value]) =>
  make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value })));

const mainFigures = (figures) => [
  ["On device", bytes(figures.device_slot_bytes + figures.resident_bytes + figures.device_placed_bytes)],
  ["On host", bytes(figures.host_shared_bytes + figures.host_private_bytes)],
  ["Overlap", figures.overlap === null ? "not timed" : `${Math.round(figures.overlap * 100)} %`],
];

const otherFigures = (figures) => [
  ["Slots on the device", bytes(figures.device_slot_bytes)],
  ["Resident on the device", bytes(figures.resident_bytes)],
  ["Placed on the device", bytes(figures.device_placed_bytes)],
  ["Shared by all ranks on the host", bytes(figures.host_shared_bytes)],
  ["Its own on the host", bytes(figures.host_private_bytes)],
  ["Copied from the host", bytes(figures.h2d_bytes)],
  ["Gathered from other ranks", bytes(figures.gather_bytes)],
  ["Passes", figures.passes],
  ["Passes for other ranks", figures.ghost_passes],
  ["Host store", figures.host_kind],
  ["Transfer", figures.transfer],
];

/** A button whose name says what it is for, also to those who do not see where it is. */
const action = (textContent, prompt, onclick) =>
  make("button", { type: "button", textContent, onclick, "aria-label": `${textContent}: ${short(prompt)}` });

function buildRow(job) {
  const about = make("div", {},
    make("p", { className: "prompt", textContent: job.prompt }), part("p", "state", { className: "state" }));
  return make("li", {},
    about,
    action("Cancel", job.prompt, () => end(job.id)),
    make("progress", { "aria-label": `Steps of: ${short(job.prompt)}` }));
}

function updateRow(element, job) {
  const known = jobs.has(job.id);
  const where = job.place ? `waits, number ${job.place}` : `rank ${job.rank}, ${stepsOf(job)}`;
  fill(element, { state: [KINDS[job.kind], where, ...(known ? [] : ["of another client"])].join(" · ") });
  element.querySelector("button").hidden = !known; // its client waits for it, and alone may end it
  showBar(element.querySelector("progress"), job);
  element.querySelector("progress").hidden = Boolean(job.place);
}

function summary({ settings, compute_seconds: seconds }) {
  const parts = [`seed ${settings.seed}`];
  if (settings.size !== "auto") parts.push(settings.size.replace("x", " × "));
  if (settings.num_inference_steps) parts.push(`${settings.num_inference_steps} steps`);
  if (settings.num_frames) parts.push(`${settings.num_frames} frames`);
  if (seconds !== null) parts.push(`${seconds.toFixed(1)} s`);
  return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · "); // lines break between them only
}

function medium(job, url, properties) {
  if (job.kind === "image") return make("img", { src: url, alt: job.settings.prompt });
  const always = { src: url, loop: true, muted: true, playsInline: true, "aria-label": job.settings.prompt };
  return make("video", { ...always, ...properties });
}

function buildEnded(job) {
  const { prompt } = job.settings;
  const why = job.error ? `${KINDS[job.kind]} · failed: ${job.error.message}` : `${KINDS[job.kind]} · cancelled`;
  return make("li", { className: job.status },
    make("div", {},
      make("p", { className: "prompt", textContent: prompt }),
      make("p", { className: job.error ? "error" : "state", textContent: why })),
    make("div", { className: "buttons" },
      action("Reuse", prompt, () => useAgain(job)), action("Remove", prompt, () => end(job.id))));
}

function buildTile(job) {
  const { prompt } = job.settings;
  const buttons = make("div", { className: "buttons" }, action("Reuse", prompt, () => useAgain(job)));
  const tile = make("li", {},
    make("div", { className: "caption" },
      make("p", { className: "prompt", textContent: prompt }),
      make("p", { className: "state", textContent: summary(job) })),
    buttons);
  addMedium(tile, buttons, job);
  return tile;
}

function addMedium(tile, buttons, job) {
  const open = action(`Show ${KINDS[job.kind].toLowerCase()}`, job.settings.prompt, () => {});
  open.className = "open";
  const label = `Download: ${short(job.settings.prompt)}`;
  const download = make("a", { className: "button", textContent: "Download", "aria-label": label });
  async function load() {
    try {
      const url = await fileOf(job.id);
      const badge = job.kind === "video" ? [make("span", { className: "badge", textContent: "Video" })] : [];
      open.replaceChildren(medium(job, url, { preload: "metadata" }), ...badge);
      open.onclick = () => show(job);
      Object.assign(download, { href: url, download: fileName(job) });
    } catch (error) {
      open.textContent = `${error.message} Press to load it again.`;
      open.onclick = load;
    }
  }
  open.textContent = "";
  load();
  tile.prepend(open);
  buttons.append(download);
}

const fileName = (job) => `${job.kind}-${job.settings.seed}.${ENDINGS[job.kind]}`;

async function show(job) {
  const url = await fileOf(job.id);
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  byId("viewer-media").replaceChildren(medium(job, url, { controls: true, autoplay: !still }));
  byId("viewer-title").textContent = job.settings.prompt;
  const rows = Object.entries(LABELS).map(([name, label]) => [label, job.settings[name]]);
  rows.push(["Computed in", `${job.compute_seconds.toFixed(1)} s on rank ${job.rank}`]);
  rows.push(["Ended", new Date(job.ended_at * 1000).toLocaleString()]);
  byId("viewer-settings").replaceChildren(...list(rows.filter(([, value]) => value !== null)));
  Object.assign(byId("viewer-download"), { href: url, download: fileName(job) });
  byId("viewer-again").onclick = () => { viewer.close(); useAgain(job); };
  byId("viewer-remove").onclick = () => { viewer.close(); end(job.id); };
  shown = job.id;
  viewer.showModal();
}

viewer.addEventListener("close", () => {
  shown = null;
  byId("viewer-media").replaceChildren(); // a video would play on
});
viewer.addEventListener("click", (event) => event.target === viewer && viewer.close()); // beside it
byId("viewer-close").onclick = () => viewer.close();

// ---- the form ----

function useAgain(job) {
  form.elements.kind.value = job.kind;
  for (const name of FIELDS) form.elements[name].value = job.settings[name] ?? "";
  byId("more").open ||= job.settings.flow_shift !== null || job.settings.max_sequence_length !== null;
  showErrors();
  saveDraft();
  byId("prompt").focus();
  say("The form has the settings of this job.");
}

function readForm() {
  const asked = { kind: form.elements.kind.value };
  for (const name of FIELDS) {
    const field = form.elements[name];
    if (asked.kind === "image" && VIDEO_FIELDS.includes(name)) continue;
    if (field.validity.badInput) throw new ApiError("This is not a number.", name);
    const text = field.value.trim();
    if (text === "") continue;
    asked[name] = field.type === "number" ? Number(text) : text;
  }
  if (asked.size) asked.size = asked.size.toLowerCase().replace(/\s*[x×]\s*/, "x");
  if (!asked.prompt) throw new ApiError("Say what to make.", "prompt");
  if (asked.seed && !/^\d+$/.test(asked.seed)) throw new ApiError("A seed is a whole number, 0 or more.", "seed");
  return asked;
}

/** Shows an error beside the field that it names, and nowhere else; without one, none. */
function showErrors(error) {
  for (const name of FIELDS) {
    form.elements[name].removeAttribute("aria-invalid");
    byId(`${name}-error`).textContent = "";
  }
  byId("form-error").textContent = "";
  if (!error) return;
  const name = FIELDS.find((one) => one === error.param);
  const unclear = name === "size" && error.code === "string_pattern_mismatch"; // its words are a regular expression
  const message = unclear ? "Write it as 1024x576, or leave it empty." : error.message;
  byId(`${name ?? "form"}-error`).textContent = message.replace(`'${name}': `, "");
  if (!name) return;
  form.elements[name].closest("details")?.setAttribute("open", "");
  form.elements[name].setAttribute("aria-invalid", "true");
  form.elements[name].focus();
}

let sending = false;

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (sending) return;
  const button = form.querySelector("[type=submit]");
  sending = true;
  button.setAttribute("aria-disabled", "true");
  showErrors();
  try {
    const body = JSON.stringify(readForm());
    const headers = { "Content-Type": "application/json" };
    const response = await call("v1/jobs", { method: "POST", body, headers });
    const { data } = parse(await response.text());
    say(data.length > 1 ? `${data.length} are in the queue.` : "It is in the queue.");
    await refresh();
  } catch (error) {
    showErrors(error);
  } finally {
    sending = false;
    button.removeAttribute("aria-disabled");
  }
});

form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});

function saveDraft() {
  const draft = FIELDS.map((name) => [name, form.elements[name].value]);
  sessionStorage.setItem(DRAFT, JSON.stringify({ kind: form.elements.kind.value, ...Object.fromEntries(draft) }));
}

function loadDraft() {
  const draft = JSON.parse(sessionStorage.getItem(DRAFT) ?? "{}");
  for (const [name, value] of Object.entries(draft)) form.elements[name].value = value;
}

form.addEventListener("input", saveDraft);

// ---- the key, and the beginning ----

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  byId("key-button").hidden = true;
  keyDialog.close();
  keyGiven?.();
});
byId("key-button").onclick = () => askForKey("");
addEventListener("online", () => wakeUp());
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  wakeUp();
  if (state) refresh(); // others may have deleted some meanwhile, which no event tells
});

loadDraft();
listen();
