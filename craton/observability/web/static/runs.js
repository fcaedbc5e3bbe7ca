// The list of runs: updates, filter, order, keyboard shortcuts. Rows are HTML from the server, which escapes all text.
import { addKeys, listen } from "./common.js";

const table = document.getElementById("runs");
const body = table.tBodies[0];
const filter = document.getElementById("filter");
const chips = document.getElementById("chips");
const NUMBERS = ["progress", "eta", "loss", "speed", "change", "goodput", "cost"];
const rows = new Map([...body.rows].map((row) => [row.dataset.name, row]));
const opened = new Map(); // name of an owner → rows of its members
let order = [...rows.keys()];
let sorting = { column: "", direction: 1 };
let state = "";
let current = null;

const words = () => filter.value.toLowerCase().split(/\s+/).filter(Boolean);

function matches(row, wanted) {
  if (state && row.dataset.state !== state) return false;
  const { name, kind, verdict } = row.dataset;
  const text = `${name} ${row.dataset.state} ${kind} ${verdict}`.toLowerCase();
  return wanted.every((word) => text.includes(word));
}

function sorted() {
  const { column, direction } = sorting;
  const found = order.map((name) => rows.get(name)).filter(Boolean);
  if (!column) return found;
  const value = NUMBERS.includes(column)
    ? (row) => Number(row.dataset[column])
    : (row) => row.dataset[column].toLowerCase();
  const keyed = found.map((row) => [value(row), row]);
  keyed.sort(([a], [b]) => (a < b ? -direction : a > b ? direction : 0));
  return keyed.map(([, row]) => row);
}

// Put rows in order and move only those out of place: a page of 500 rows must not flicker.
function arrange() {
  let place = body.firstElementChild;
  for (const row of sorted().flatMap((each) => [each, ...(opened.get(each.dataset.name) ?? [])])) {
    if (row === place) place = place.nextElementSibling;
    else body.insertBefore(row, place);
  }
  while (place) {
    const next = place.nextElementSibling;
    place.remove();
    place = next;
  }
}

function sift() {
  const wanted = words();
  let shown = 0;
  const states = new Map();
  for (const row of rows.values()) {
    const fits = matches(row, wanted);
    row.hidden = !fits;
    for (const member of opened.get(row.dataset.name) ?? []) member.hidden = !fits;
    shown += fits;
    states.set(row.dataset.state, (states.get(row.dataset.state) ?? 0) + 1);
  }
  const of = shown === rows.size ? "" : `${shown} of `;
  document.getElementById("counts").textContent = rows.size ? `${of}${rows.size} run${rows.size === 1 ? "" : "s"}` : "";
  document.getElementById("empty").hidden = shown > 0 || rows.size === 0;
  document.getElementById("none").hidden = rows.size > 0;
  showChips(states);
}

const LIVELY = ["running", "starting", "waiting", "stopping", "failed", "lost", "stopped", "done", "unreadable"];
let chipsText = "";
function showChips(states) {
  const listed = LIVELY.filter((each) => states.has(each));
  const text = JSON.stringify([listed.map((each) => [each, states.get(each)]), state]);
  if (text === chipsText) return;
  chipsText = text;
  const focused = document.activeElement?.dataset?.state;
  chips.replaceChildren(...listed.map((each) => {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.state = each;
    button.setAttribute("aria-pressed", String(each === state));
    button.textContent = `${each} ${states.get(each)}`;
    button.addEventListener("click", () => { state = state === each ? "" : each; sift(); });
    return button;
  }));
  if (focused) chips.querySelector(`[data-state="${focused}"]`)?.focus();
}

function take(message) {
  const holder = document.createElement("tbody");
  for (const [name, html] of Object.entries(message.rows ?? {})) {
    holder.innerHTML = html;
    const fresh = holder.firstElementChild;
    const old = rows.get(name);
    if (opened.has(name)) showMembers(fresh);
    if (old && old.outerHTML === fresh.outerHTML) continue;
    rows.set(name, fresh);
    if (!old) continue;
    const hadFocus = old.contains(document.activeElement);
    old.replaceWith(fresh);
    if (old === current) select(fresh, false);
    if (hadFocus) fresh.querySelector("a").focus({ preventScroll: true });
  }
  if ("trouble" in message) {
    const place = document.getElementById("list-trouble");
    place.textContent = message.trouble;
    place.hidden = !message.trouble;
  }
  if (message.order) {
    order = message.order;
    const there = new Set(order);
    for (const name of rows.keys()) if (!there.has(name)) { rows.delete(name); opened.delete(name); }
  }
  if (message.order || sorting.column) arrange();
  sift();
}

// Show the rows of an owner's members below it, or refresh them.
async function showMembers(row) {
  const { name } = row.dataset;
  const button = row.querySelector("[data-members]");
  if (!opened.has(name)) opened.set(name, []);
  button?.setAttribute("aria-expanded", "true");
  const answer = await fetch(`${row.querySelector("a").getAttribute("href")}/members`).catch(() => null);
  if (!opened.has(name) || !answer?.ok) return;
  const holder = document.createElement("tbody");
  holder.innerHTML = await answer.text();
  const fresh = [...holder.rows];
  if (fresh.map((each) => each.outerHTML).join() === opened.get(name).map((each) => each.outerHTML).join()) return;
  opened.set(name, fresh);
  arrange();
  sift();
}

function toggleMembers(row) {
  if (!opened.has(row.dataset.name)) { showMembers(row); return; }
  opened.delete(row.dataset.name);
  row.querySelector("[data-members]").setAttribute("aria-expanded", "false");
  arrange();
}

function select(row, focus = true) {
  current?.classList.remove("current");
  current = row;
  row?.classList.add("current");
  if (row && focus) {
    row.querySelector("a")?.focus({ preventScroll: true });
    row.scrollIntoView({ block: "nearest" });
  }
}

function move(by) {
  const shown = [...body.rows].filter((row) => !row.hidden);
  if (!shown.length) return;
  const at = shown.indexOf(current);
  const next = at < 0 ? (by > 0 ? 0 : shown.length - 1) : Math.min(shown.length - 1, Math.max(0, at + by));
  select(shown[next]);
}

function sortBy(column) {
  const isSame = sorting.column === column;
  const first = NUMBERS.includes(column) ? -1 : 1;
  sorting = isSame && sorting.direction !== first ? { column: "", direction: 1 } : { column, direction: isSame ? -first : first };
  for (const head of table.tHead.querySelectorAll("th")) {
    const is = head.dataset.sort === sorting.column;
    if (is) head.setAttribute("aria-sort", sorting.direction > 0 ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  }
  arrange();
}

table.tHead.addEventListener("click", (event) => {
  const head = event.target.closest("th");
  if (head) sortBy(head.dataset.sort);
});
filter.addEventListener("input", sift);
filter.addEventListener("keydown", (event) => {
  if (event.key === "Enter") { event.preventDefault(); select(null); move(1); }
});
body.addEventListener("focusin", (event) => select(event.target.closest("tr"), false));
body.addEventListener("click", (event) => {
  if (event.target.closest("[data-members]")) { toggleMembers(event.target.closest("tr")); return; }
  if (event.target.closest("a") || getSelection().toString()) return;
  event.target.closest("tr")?.querySelector("a")?.click();
});

const columns = [...table.tHead.querySelectorAll("th")].map((head) => head.dataset.sort);
addKeys({
  m: () => { if (current?.querySelector("[data-members]")) toggleMembers(current); },
  j: () => move(1),
  k: () => move(-1),
  ArrowDown: () => move(1),
  ArrowUp: () => move(-1),
  "/": () => filter.focus(),
  s: () => sortBy(columns[(columns.indexOf(sorting.column) + 1) % columns.length]),
  Enter: (event) => {
    if (!current || event.target.closest("a, button")) return false;
    current.querySelector("a")?.click();
    return true;
  },
  Escape: () => {
    if (filter.value || state) { filter.value = ""; state = ""; sift(); }
    filter.blur();
  },
});

sift();
listen(`/events?since=${table.dataset.since}`, take);
