"use strict";
// Text of the model enters this page in two ways only: JSON.parse above, and text nodes below. Never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const { samples, groups, vocabulary } = data;
const $ = id => document.getElementById(id);
const special = new Set(data.special);
const WORDS = {
  advantages: "advantage", logprobs: "engine log-prob", ref_logprobs: "reference log-prob",
  logprob_diff: "log-prob difference, actor minus engine", versions: "weight version", turn_ids: "turn",
  steps: "turn or step", values: "critic value", returns: "return" };
const TEXT_ONLY = "Text only: per-token details are kept for the first --token_groups groups of each step.";
const CHUNK = 300;                      // tokens that become elements, or text again, at once
const state = { view: [], chosen: -1, column: "", whole: true };

samples.forEach((sample, index) => {
  // These metrics have places of their own in the page.
  const { reward, failures, response_length = NaN, truncated = false, ...metrics } = sample.metrics ?? {};
  const spans = sample.trained ?? [];   // a sample without tokens has its turns as texts
  const length = sample.tokens ? spans.reduce((sum, [start, end]) => sum + end - start, 0)  // in trained tokens
    : sample.response_length ?? response_length;
  Object.assign(sample, { index, length, metrics, decoded: {}, reward: Number(sample.reward),
                          truncated: sample.truncated ?? truncated });
  (groups[sample.group].members ??= []).push(sample);
});

function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  element.className = className;
  element.append(...children.filter(child => child !== ""));      // strings become text nodes
  return element;
}

function short(value) {                 // three digits and a true minus sign
  const number = Number(value), tiny = number !== 0 && Math.abs(number) < 1e-3;
  if (!Number.isFinite(number)) return String(value);
  return (tiny ? number.toExponential(1) : String(Number(number.toPrecision(3)))).replaceAll("-", "−");
}

// ---- What tokens spell. A token is a text, or bytes where it is a part of a character.
function spell(tokens) {
  const texts = tokens.map(token => vocabulary[token]);
  for (let start = 0; start < texts.length; start++) {
    let end = start;
    while (Array.isArray(texts[end])) end++;
    if (end > start) characters(texts.slice(start, end)).forEach((text, i) => { texts[start + i] = text; });
  }
  return texts;
}

function characters(parts) {            // a character stands at the token that completes it; what is none, as bytes
  const texts = decoded(parts) ?? [];
  while (texts.length < parts.length) {
    let found, count = 0;
    while (!found && count++ < 8) found = decoded(parts.slice(texts.length, texts.length + count));
    texts.push(...found ?? [parts[texts.length].map(byte => `\\x${hex(byte)}`).join("")]);
  }
  return texts;
}

function decoded(parts) {               // undefined where these bytes are no whole characters
  try {
    const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
    const texts = parts.map(bytes => decoder.decode(new Uint8Array(bytes), { stream: true }));
    decoder.decode();
    return texts;
  } catch {}
}

function hex(byte) {
  return byte.toString(16).padStart(2, "0");
}

// Control, format and lone surrogate characters, which show nothing or turn text around; not the joiners of emoji.
const HIDDEN = /((?![\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029])/u;

const SIGNS = { "\n": "newline", "\t": "tab" };

function escaped(character) {
  return SIGNS[character] ? character : `\\u{${character.codePointAt(0).toString(16)}}`;
}

function plain(text) {
  return text.split(HIDDEN).map((part, i) => i % 2 ? escaped(part) : part).join("");
}

function textOf(owner, tokens) {        // for the list and the search; made once
  return owner.text ??= plain(owner.turns ? owner.turns.join("")
    : spell(tokens).filter((_, i) => !special.has(tokens[i])).join(""));
}

function lengthOf(sample) {
  return Number.isNaN(sample.length) ? "" : `${sample.length} tokens`;
}

function ending(sample) {
  return sample.failure ? "failed" : sample.truncated ? "cut off" : "";
}

// ---- What is known of tokens
function valuesOf(sample, name) {       // by position in the completion; NaN where a token was not trained
  if (sample.decoded[name]) return sample.decoded[name];
  const packed = sample.columns[name], values = new Float32Array(sample.tokens.length).fill(NaN);
  if (typeof packed === "number") {
    for (const [start, end] of sample.trained) values.fill(packed, start, end);
  } else if (packed) {
    values.set(new Float32Array(Uint8Array.from(atob(packed), character => character.charCodeAt(0)).buffer));
  }
  return sample.decoded[name] = values;
}

function paint(element, value) {
  const { low = 0, high = 0 } = data.columns[state.column] ?? {}, signed = low && high;
  const share = Math.min(1, Math.abs(value) / (high || -low));
  element.classList.remove("up", "down", "much");
  if (!(share > 0)) return;
  element.classList.add(signed ? (value > 0 ? "up" : "down") : "much");
  element.style.setProperty("--heat", `${(4 + 68 * share).toFixed(0)}%`);
}

// ---- Tokens on the screen: chunks near the window hold an element a token, all others plain text
const watcher = new IntersectionObserver(entries => entries.forEach(({ target, isIntersecting }) => {
  if (isIntersecting !== target.run.live) fill(target, isIntersecting);
}), { root: $("detail"), rootMargin: "500px" });

function fill(chunk, live) {
  const { texts, tokens, start, sample } = chunk.run;
  chunk.run.live = live;
  if (!live) return chunk.replaceChildren(plain(texts.join("")));
  chunk.replaceChildren(...texts.map((text, i) => {
    const parts = (text || "◦").split(HIDDEN);
    const nodes = parts.map((part, j) => j % 2 ? make("i", SIGNS[part] ?? "", escaped(part)) : part);
    const element = make("span", special.has(tokens[i]) ? "token special" : "token", ...nodes);
    element.at = start + i;
    return element;
  }));
  if (sample) repaint(chunk);
}

function repaint(chunk) {
  const values = valuesOf(chunk.run.sample, state.column);
  for (const element of chunk.children) paint(element, values[element.at]);
}

function turn(title, sample, tokens, start, trained) {
  const body = make("div"), texts = spell(tokens);
  for (let i = 0; i < tokens.length; i += CHUNK) {
    const chunk = make("span", "chunk");
    chunk.run = { sample, start: start + i, tokens: tokens.slice(i, i + CHUNK), texts: texts.slice(i, i + CHUNK) };
    fill(chunk, false);
    watcher.observe(chunk);
    body.append(chunk);
  }
  return make("section", trained ? "turn trained" : "turn given", title && make("h3", "", title), body);
}

function textTurn(title, text) {        // of a sample without tokens
  return make("section", "turn trained", title && make("h3", "", title), make("div", "", plain(text)));
}

function pill(sample) {
  const sign = sample.reward > 0 ? "up" : sample.reward < 0 ? "down" : "";
  return make("span", `pill number ${sign}`, short(sample.reward));
}

function card(sample) {
  const group = groups[sample.group];
  const metrics = Object.entries(sample.metrics).map(([name, value]) =>
    make("span", "", make("span", "quiet", `${name} `), short(value)));
  const article = make("article", "", make("header", "number",
    make("b", "", `Completion ${group.members.indexOf(sample) + 1}`), pill(sample),
    make("span", "", lengthOf(sample)), ending(sample) && make("span", "cut", ending(sample)), ...metrics,
    sample.failure ? make("span", "cut", plain(sample.failure)) : ""));
  article.append(...sample.tokens ? tokenSections(sample)
    : sample.turns.map((text, i) => textTurn(titleOf(sample, i, sample.turns.length), text)));
  article.onclick = () => getSelection().isCollapsed && choose(sample.index, false);
  return sample.card = article;
}

function titleOf(sample, i, count) {    // of a turn, where there are several
  const { rewards = [] } = sample, paid = rewards.length === count ? `, reward ${short(rewards[i])}` : "";
  return count > 1 ? `turn ${i + 1}${paid}` : "";
}

function tokenSections(sample) {        // the turns of the policy, and what the environment said between them
  const { tokens, trained } = sample, sections = [];
  const given = (start, end) => turn("environment, not trained", sample, tokens.slice(start, end), start, false);
  let place = 0;
  trained.forEach(([start, end], i) => {
    if (start > place) sections.push(given(place, start));
    sections.push(turn(titleOf(sample, i, trained.length), sample, tokens.slice(start, end), start, true));
    place = end;
  });
  if (tokens.length > place) sections.push(given(place, tokens.length));
  return sections;
}

// ---- The pane on the right
function drawDetail() {
  watcher.disconnect();
  const sample = samples[state.chosen];
  if (!sample) return $("detail").replaceChildren(make("p", "quiet", "No sample matches."));
  const group = groups[sample.group], rewards = group.members.map(member => member.reward);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const prompt = make("article", "prompt");
  if (group.prompt.length) prompt.append(turn("prompt, not trained", null, group.prompt, 0, false));
  else prompt.append(make("p", "quiet", TEXT_ONLY));
  if (group.row) {
    const row = make("details", "", make("summary", "", "dataset row"),
                     make("pre", "", plain(JSON.stringify(group.row, null, 1))));
    row.open = !group.prompt.length;
    prompt.append(row);
  }
  $("detail").replaceChildren(
    make("h2", "number", `Step ${group.step}, prompt ${group.number}`,
         make("small", "", rewards.length > 1 ? `${rewards.length} completions, mean reward ${short(mean)}` : "")),
    prompt, ...(state.whole ? group.members : [sample]).map(card));
}

function choose(index, scroll = true) {
  const before = samples[state.chosen], sample = samples[index];
  state.chosen = index;
  if (!sample?.card?.isConnected) drawDetail();
  before?.card?.classList.remove("chosen");
  drawList(scroll);
  if (!sample) return;
  sample.card.classList.toggle("chosen", state.whole);
  const first = !state.whole || groups[sample.group].members[0] === sample;
  if (scroll) $("detail").scrollTop = first ? 0 : sample.card.offsetTop - 16;
}

function recolour() {
  const { low, high } = data.columns[state.column] ?? {};
  $("column").value = state.column;
  $("legend").replaceChildren(...!(low || high) ? [] : [
    low && high ? `${short(low)} or less` : "0", make("span", low && high ? "ramp two" : "ramp one"),
    high ? `${short(high)} or more` : `${short(low)} or less`]);
  document.querySelectorAll(".chunk").forEach(chunk => chunk.run.live && chunk.run.sample && repaint(chunk));
}

// ---- The list on the left: only rows in sight exist
const ROW = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row"));

function row(place) {
  const sample = samples[state.view[place]], before = samples[state.view[place - 1]], group = groups[sample.group];
  const query = $("search").value.toLowerCase(), text = textOf(sample, sample.tokens).replaceAll(/\s+/g, " ");
  const at = query ? text.toLowerCase().indexOf(query) : -1, from = at > 24 ? at - 20 : 0;
  const line = at < 0 ? [text.slice(0, 200)]
    : [(from ? "…" : "") + text.slice(from, at), make("mark", "", text.slice(at, at + query.length)),
       text.slice(at + query.length, at + 200)];
  const element = make("div", before?.group === sample.group ? "row" : "row first",
    make("p", "", pill(sample), ...line),
    make("p", "number", `step ${group.step}, prompt ${group.number}, completion ${group.members.indexOf(sample) + 1}`,
         lengthOf(sample) && `, ${lengthOf(sample)}`,
         ending(sample) && make("span", "cut", `, ${ending(sample)}`)));
  element.style.top = `${place * ROW}px`;
  element.setAttribute("role", "option");
  element.setAttribute("aria-selected", String(sample.index === state.chosen));
  element.onclick = () => choose(sample.index);
  return element;
}

function drawList(scroll = false) {
  const list = $("list"), place = state.view.indexOf(state.chosen);
  if (scroll && place >= 0) {
    const top = place * ROW, low = top + ROW - list.clientHeight;
    list.scrollTop = Math.min(top, Math.max(low, list.scrollTop));
  }
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
  const last = Math.min(state.view.length, first + Math.ceil(list.clientHeight / ROW) + 10);
  $("rows").style.height = `${state.view.length * ROW}px`;
  $("rows").replaceChildren(...Array.from({ length: Math.max(0, last - first) }, (_, i) => row(first + i)));
}

function applyFilters() {
  const query = $("search").value.toLowerCase(), ended = $("ended").value;
  const ends = { "": () => true, cut: sample => sample.truncated, whole: sample => !sample.truncated,
                 failed: sample => sample.failure };
  const number = (id, otherwise) => $(id).value === "" ? otherwise : Number($(id).value);
  const bounds = ["reward", "step"].map(id => [number(`${id}-from`, -Infinity), number(`${id}-to`, Infinity)]);
  const key = $("sort").value, sign = Number($("order").value);
  const keys = { "": sample => sample.index, reward: sample => sample.reward, length: sample => sample.length };
  const keyOf = keys[key] ?? (sample => Number(sample.metrics[key.slice(7)] ?? NaN));
  state.view = samples.filter(sample => {
    const group = groups[sample.group];
    return ![sample.reward, group.step].some((value, i) => value < bounds[i][0] || value > bounds[i][1])
      && ends[ended](sample)
      && (!query || textOf(sample, sample.tokens).toLowerCase().includes(query)
          || textOf(group, group.prompt).toLowerCase().includes(query));
  }).map(sample => sample.index);
  const sorted = new Map(state.view.map(index => [index, keyOf(samples[index])]));
  state.view.sort((a, b) => {           // what has no number comes last
    const [x, y] = [sorted.get(a), sorted.get(b)];
    return Number.isNaN(x) - Number.isNaN(y) || sign * (x - y) || a - b;
  });
  const [some, all] = [state.view, samples].map(list => list.length.toLocaleString("en"));
  $("count").textContent = some === all ? `${all} samples` : `${some} of ${all} samples`;
  $("list").scrollTop = 0;
  state.view.includes(state.chosen) ? drawList(true) : choose(state.view[0] ?? -1);
}

// ---- Hands on it
function move(by) {
  const place = state.view.indexOf(state.chosen) + by;
  if (state.view[place] !== undefined) choose(state.view[place]);
}

function toggleWhole() {
  state.whole = !state.whole;
  $("whole").setAttribute("aria-pressed", String(state.whole));
  drawDetail();
  choose(state.chosen);
}

function toggleTheme() {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.style.colorScheme = (root.style.colorScheme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
}

function nextColour() {
  const names = [...Object.keys(data.columns), ""];
  state.column = names[(names.indexOf(state.column) + 1) % names.length];
  recolour();
}

function describe({ target }) {         // the token under the pointer
  const element = target.closest(".token"), run = element?.parentElement.run;
  if (!run) return;
  const i = element.at - run.start, entry = vocabulary[run.tokens[i]];
  const bytes = Array.isArray(entry) && `bytes ${entry.map(hex).join(" ")}`;
  const known = run.sample ? Object.keys(data.columns).map(name => [name, valuesOf(run.sample, name)[element.at]]) : [];
  const trained = run.sample?.trained.some(([start, end]) => start <= element.at && element.at < end);
  $("token").replaceChildren(
    make("code", "", bytes || plain(JSON.stringify(entry))),
    make("span", "quiet", `token ${element.at + 1} of the ${run.sample ? "completion" : "prompt"}`),
    ...trained ? known.map(([name, value]) => make("span", "", `${WORDS[name] ?? name} ${short(value)}`))
      : [make("span", "quiet", "not trained")]);
}

function start() {
  document.title = `${data.run}: samples`;
  $("run").textContent = data.run;
  $("about").textContent = data.about.join(" · ");
  $("note").textContent = data.note;
  const metrics = [...new Set(samples.flatMap(sample => Object.keys(sample.metrics)))];
  $("sort").append(...[["", "order in the run"], ["reward", "reward"], ["length", "length"],
    ...metrics.map(name => [`metric:${name}`, name])].map(([value, text]) => new Option(text, value)));
  $("column").append(...Object.keys(data.columns).map(name => new Option(WORDS[name] ?? name, name)),
                     new Option("none", ""));
  state.column = "advantages" in data.columns ? "advantages" : Object.keys(data.columns)[0] ?? "";
  $("filters").oninput = applyFilters;
  $("filters").onsubmit = event => event.preventDefault();
  $("filters").onreset = () => setTimeout(applyFilters);      // once the fields are empty
  $("list").onscroll = () => drawList();
  $("column").onchange = () => { state.column = $("column").value; recolour(); };
  $("whole").onclick = toggleWhole;
  $("theme").onclick = toggleTheme;
  $("detail").onmouseover = describe;
  onresize = () => drawList();
  const keys = { j: () => move(1), k: () => move(-1), g: toggleWhole, c: nextColour, d: toggleTheme,
                 "/": () => $("search").focus() };
  onkeydown = event => {
    const typing = event.target.matches("input");
    if (event.key === "Escape" && typing) return event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  };
  applyFilters();
  recolour();
}

start();
