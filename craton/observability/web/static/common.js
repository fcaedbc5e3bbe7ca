// Common to all pages: the token, actions, updates from the server, light and dark mode, keyboard shortcuts.

const root = document.documentElement;
const byId = (id) => document.getElementById(id);

export const isDark = () =>
  root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;

const themeListeners = [];
export const onTheme = (listener) => themeListeners.push(listener);
const tellTheme = () => themeListeners.forEach((listener) => listener());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tellTheme);

function toggleTheme() {
  root.dataset.theme = isDark() ? "light" : "dark";
  try {
    localStorage.setItem("theme", root.dataset.theme);
  } catch {
    // without storage, the choice applies to this page only
  }
  tellTheme();
}

let toastTimer = 0;
export function toast(text, isError = false) {
  const box = byId("toast");
  box.textContent = text;
  box.className = isError ? "toast shown bad" : "toast shown";
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { box.className = "toast"; }, isError ? 12000 : 5000);
}

// The secret of a login, kept for this origin. Changes need it besides the cookie, which other ports of the host can see.
const SECRET = "craton-secret";
function keptSecret() {
  try {
    return localStorage.getItem(SECRET) ?? "";
  } catch {
    return ""; // without storage, the page asks for the token
  }
}
if (!keptSecret()) {
  delete document.body.dataset.mayChange;
  byId("unlock").textContent = "Unlock changes";
}

async function post(address, body) {
  const headers = { "content-type": "application/json" };
  const secret = keptSecret(); // another page of this server may have logged in meanwhile
  if (secret) headers["x-craton-secret"] = secret;
  const answer = await fetch(address, { method: "POST", headers, body: JSON.stringify(body) });
  const reply = await answer.json().catch(() => ({}));
  return { ok: answer.ok, status: answer.status, reply };
}

// Run an action; without a token, show the token dialog first.
export async function change(address) {
  if (!("mayChange" in document.body.dataset)) {
    askForToken();
    return false;
  }
  const { ok, status, reply } = await post(address, {});
  if (status === 403) {
    askForToken(reply.error);
    return false;
  }
  toast(ok ? reply.message : reply.error ?? "the server rejected the request", !ok);
  return ok;
}

export function confirmed(title, text, yes) {
  const dialog = byId("confirm-dialog");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

function askForToken(reason = "") {
  byId("token-error").textContent = reason;
  byId("token").value = "";
  byId("token-dialog").showModal();
}

async function login(token) {
  const { ok, reply } = await post("/login", { token });
  if (ok) {
    try {
      localStorage.setItem(SECRET, reply.secret);
      location.reload();
    } catch {
      byId("token-error").textContent = "this browser blocks storage for this page, which changes need";
      return false;
    }
  } else byId("token-error").textContent = reply.error ?? "the server rejected the request";
  return ok;
}

// The link that `craton ui` prints ends in #token=…: it is removed from the address bar at once. In a page that is already
// open at this address, it loads nothing and only changes the fragment.
function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return;
  history.replaceState(null, "", location.pathname + location.search);
  login(token).then((ok) => { if (!ok) toast("the token in this link does not belong to this server", true); });
}

function showLive(word, text) {
  const live = byId("live");
  if (!live) return;
  live.className = "live " + word;
  live.lastElementChild.textContent = text;
}

// Updates from the server. A hidden page requests none: browsers allow only a few such connections per server.
export function listen(address, take) {
  let source = null;
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource(address);
    source.onopen = () => showLive("on", "live");
    // A browser reconnects by itself, but not after a response that is not a stream (401, 404).
    source.onerror = () => {
      const hasEnded = source?.readyState === EventSource.CLOSED;
      showLive("off", hasEnded ? "stopped: reload the page" : "reconnecting");
    };
    source.onmessage = (event) => take(JSON.parse(event.data));
  };
  const close = () => {
    source?.close();
    source = null;
    showLive("", "paused");
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  open();
}

// Keyboard shortcuts of a page: { key: function }. Inactive while the user types or a dialog is open.
const keys = { t: toggleTheme, "?": () => byId("help-dialog").showModal() };
export const addKeys = (more) => Object.assign(keys, more);

export const isTyping = (target) => target.closest?.("input:not([type=checkbox]), textarea, select") !== null;

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (isTyping(event.target) && event.key !== "Escape") return;
  const action = keys[event.key];
  if (action && action(event) !== false) event.preventDefault();
});

byId("theme").addEventListener("click", toggleTheme);
byId("help").addEventListener("click", () => byId("help-dialog").showModal());
byId("unlock").addEventListener("click", () => {
  if ("mayChange" in document.body.dataset) toast("This browser has the token: it can stop, resume and heal runs.");
  else askForToken();
});
byId("give-token")?.addEventListener("click", () => askForToken());
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  login(byId("token").value.trim());
});
for (const button of document.querySelectorAll("[data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}
addEventListener("hashchange", takeToken);
takeToken();
