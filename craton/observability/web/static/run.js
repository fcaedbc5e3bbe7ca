// The page of one run: updates of fragments and charts, actions, logs, keyboard shortcuts.
import { addKeys, change, confirmed, isTyping, listen, onTheme } from "./common.js";
import { Chart } from "./charts.js";

const actions = document.getElementById("actions");
const address = `/runs/${actions.dataset.run}`;
const charts = new Map();
for (const canvas of document.querySelectorAll("canvas[data-chart]")) charts.set(canvas.dataset.chart, new Chart(canvas));

// A custom metric that appears after the page was rendered gets a chart too.
const own = document.getElementById("own");
function chartOf(name, { title = "" }) {
  if (charts.has(name) || !own || !name.startsWith(own.dataset.prefix)) return charts.get(name);
  const [figure, caption, newest, canvas] = ["figure", "figcaption", "span", "canvas"].map((tag) => document.createElement(tag));
  figure.className = "chart";
  newest.className = "newest";
  caption.append(title, " ", newest);
  Object.assign(canvas.dataset, { chart: name, part: "curves", height: "190" });
  for (const [key, value] of [["role", "img"], ["aria-label", title], ["tabindex", "0"]]) canvas.setAttribute(key, value);
  figure.append(caption, canvas);
  own.append(figure);
  charts.set(name, new Chart(canvas));
  return charts.get(name);
}

const shownHtml = new Map();

function take({ replaced = false, fragments = {}, charts: data = {} }) {
  if (replaced) { // another run now has the name of the one shown
    location.reload();
    return;
  }
  for (const [name, html] of Object.entries(fragments)) {
    const place = document.querySelector(`[data-fragment="${name}"]`);
    if (!place || shownHtml.get(name) === html) continue;
    shownHtml.set(name, html);
    reveal(place);
    // Keep what the user has opened or scrolled.
    const opened = [...place.querySelectorAll("details")].map((each) => each.open);
    const scrolled = [...place.querySelectorAll(".events")].map((each) => each.scrollTop);
    place.innerHTML = html;
    place.querySelectorAll("details").forEach((each, index) => { if (index in opened) each.open = opened[index]; });
    place.querySelectorAll(".events").forEach((each, index) => { each.scrollTop = scrolled[index] ?? 0; });
  }
  for (const [name, drawn] of Object.entries(data)) {
    const chart = chartOf(name, drawn);
    reveal(chart?.canvas);
    chart?.show(drawn);
  }
  for (const name of Object.keys(fragments)) { // a part that arrives without its chart has no data for it
    if (!name.startsWith("trouble-")) continue;
    for (const chart of charts.values()) if (chart.canvas.dataset.part === name.slice("trouble-".length)) chart.wasRead();
  }
  showActions();
}

// Sections of a plain command appear as soon as they have data.
function reveal(element) {
  for (let each = element?.closest("[data-optional]"); each; each = each.parentElement.closest("[data-optional]")) each.hidden = false;
}

// Show the actions that make sense now.
function showActions() {
  const state = document.getElementById("state");
  if (!state) return;
  const isMoving = "moving" in state.dataset;
  const wanted = {
    stop: isMoving && state.dataset.state !== "stopping",
    kill: isMoving,
    resume: !isMoving && state.dataset.state !== "done",
    heal: isMoving,
  };
  for (const button of actions.querySelectorAll("button")) button.hidden = !wanted[button.dataset.action];
}

const QUESTIONS = {
  stop: ["Stop this run?", "Its ranks save a checkpoint and exit; you can resume it from there.", "Stop it"],
  kill: ["Stop it now?", "Its processes are killed. Work since the last checkpoint is lost.", "Kill it"],
  resume: ["Resume this run?", "It resumes from its newest checkpoint, on the same nodes.", "Resume it"],
  heal: ["Heal this run?", "Its nodes are checked. Bad nodes are reported, or drained where the cluster's policy is act; every action can be undone.", "Heal it"],
};

actions.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const action = button.dataset.action;
  let [title, text, yes] = QUESTIONS[action];
  const dollars = document.getElementById("state")?.dataset.dollars;
  if (action === "resume") text += dollars ? ` Its nodes cost ${dollars} per day.` : " Its price is unknown.";
  if ("mayChange" in document.body.dataset && !(await confirmed(title, text, yes))) return;
  button.disabled = true;
  await change(`${address}/${action}`);
  button.disabled = false;
});

// Logs: the end of a log, and new lines. A log that grows faster than it is read continues at its end.
const log = document.getElementById("log");
const MAX_CHARACTERS = 2_000_000;
const PIECE_BYTES = 64 << 10; // maximum of one response of the server
const ANSWER_MILLISECONDS = 10_000;
let text = "";
let rest = ""; // an incomplete last line
let end = null;
let isBehind = false;
let shownSource = "";
let isReading = false;

const wantedSource = () => document.getElementById("log-source").value;

// One request at a time: the answer to an older one would look like a log that was rewritten.
async function readLog() {
  if (isReading) return;
  isReading = true;
  try {
    let hasMore = true;
    while (hasMore) hasMore = await readPiece();
  } catch {
    document.getElementById("log-note").textContent = "the server does not answer";
  } finally {
    isReading = false;
  }
}

// Return whether there is more to read at once.
async function readPiece() {
  const source = wantedSource();
  if (source !== shownSource) {
    shownSource = source;
    text = rest = "";
    end = null;
    isBehind = false;
  }
  const query = new URLSearchParams({ source });
  if (end !== null && !isBehind) query.set("begin", end);
  const answer = await fetch(`${address}/log?${query}`, { signal: AbortSignal.timeout(ANSWER_MILLISECONDS) });
  const piece = await answer.json();
  if (source !== wantedSource()) return true;
  const note = document.getElementById("log-note");
  if (!answer.ok) {
    note.textContent = piece.error;
    if (answer.status === 404) log.textContent = "";
    return false;
  }
  if (end !== null && piece.begin < end) text = ""; // the log was rewritten
  else if (end !== null && piece.begin > end) text += `… skipped ${Math.ceil((piece.begin - end) / 1000)} kB\n`;
  const isNew = piece.text || piece.rest !== rest || !log.textContent;
  end = piece.end;
  isBehind = piece.size - piece.end > PIECE_BYTES;
  text = (text + piece.text).slice(-MAX_CHARACTERS);
  rest = piece.rest;
  note.textContent = piece.size ? `${(piece.size / 1000).toFixed(1)} kB` : "empty";
  if (isNew) showLog();
  return piece.end < piece.size && !piece.rest;
}

function showLog() {
  const wanted = document.getElementById("log-find").value;
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  const whole = text + rest;
  const shown = wanted
    ? whole.split("\n").filter((line) => line.toLowerCase().includes(wanted.toLowerCase())).join("\n")
    : whole;
  log.textContent = shown;
  if (isAtEnd || !log.scrollTop) log.scrollTop = log.scrollHeight;
}

if (log) {
  const follow = document.getElementById("log-follow");
  document.getElementById("log-source").addEventListener("change", readLog);
  document.getElementById("log-find").addEventListener("input", showLog);
  readLog();
  setInterval(() => { if (follow.checked && !document.hidden) readLog(); }, 1000);
  addKeys({ f: () => { follow.checked = !follow.checked; } });
}

const sections = () => [...document.querySelectorAll("main section")].filter((section) => !section.hidden);
const numbers = Object.fromEntries([..."123456789"].map((digit) => [
  digit,
  () => sections()[digit - 1]?.scrollIntoView({ behavior: "smooth" }),
]));
addKeys({
  ...numbers,
  l: () => { document.getElementById("logs").scrollIntoView({ behavior: "smooth" }); log?.focus({ preventScroll: true }); },
  Escape: (event) => {
    if (!isTyping(event.target)) {
      location.href = "/";
      return;
    }
    if (event.target.id === "log-find") { event.target.value = ""; showLog(); }
    event.target.blur();
  },
});

onTheme(() => charts.forEach((chart) => chart.draw()));
take({ charts: JSON.parse(document.getElementById("charts").textContent) });
listen(`${address}/events?mark=${actions.dataset.mark}`, take);
