// The frame: which view is shown, when it is refreshed, and what is shown when the service cannot answer.

import { Problem, ask, forgetToken, keepToken, token } from "./api.js";
import { h, loading, placeholder } from "./dom.js";
import { colourGraphs, forgetGraphs } from "./graphs.js";
import * as events from "./events.js";
import * as jobs from "./jobs.js";
import * as misses from "./misses.js";
import * as overview from "./overview.js";
import * as prefixes from "./prefixes.js";
import * as tenants from "./tenants.js";
import * as tiers from "./tiers.js";

const VIEWS = { overview, misses, prefixes, tenants, tiers, jobs, events };
const AGAIN_MS = 10000;

const main = document.getElementById("main");
const trouble = document.getElementById("trouble");
let current = { end: new AbortController(), name: "" };
let shown = ""; // the view whose data is on the page

const place = () => {
  const [name, query] = location.hash.slice(1).split("?");
  return { name: VIEWS[name] ? name : "overview", query: new URLSearchParams(query) };
};

async function show({ isAgain = false } = {}) {
  const { name, query } = place();
  current.end.abort();
  clearTimeout(current.timer);
  const mine = current = { end: new AbortController(), name };
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.getElementById("leave").hidden = !token();
  document.title = `${name} – kvstore`;
  if (!isAgain) {
    shown = "";
    main.replaceChildren(loading());
  }
  let isKept = Boolean(VIEWS[name].isLive);
  const context = { ask: (path, options = {}) => ask(path, { ...options, signal: mine.end.signal }), query, signal: mine.end.signal, refresh: () => show({ isAgain: true }),
    keepUp: () => { isKept = true; } }; // the view updates itself, and calls refresh when it stops
  try {
    const parts = await VIEWS[name].view(context);
    if (mine !== current) return;
    trouble.hidden = true;
    const kept = isAgain ? focusPath() : null;
    forgetGraphs();
    main.replaceChildren(...parts);
    shown = name;
    kept?.();
  } catch (error) {
    if (mine !== current || error.name === "AbortError") return;
    if (!(error instanceof Problem)) throw error;
    if (error.status === 401) {
      enter(error);
      return;
    }
    failed(error, name);
  }
  if (!isKept || shown !== name) mine.timer = setTimeout(again, AGAIN_MS);
}

// No refresh while the user types, selects or has something open.
function again() {
  const isBusy = document.hidden || document.querySelector("dialog") || main.querySelector("details[open]") || main.contains(document.activeElement) && document.activeElement.matches("select, input");
  if (isBusy) current.timer = setTimeout(again, AGAIN_MS);
  else show({ isAgain: true });
}

function focusPath() {
  const label = document.activeElement?.dataset?.key;
  return label && main.contains(document.activeElement) ? () => main.querySelector(`[data-key="${CSS.escape(label)}"]`)?.focus() : null;
}

const SAID = {
  0: ["The service does not answer", "It may have stopped, or be starting. This page tries again by itself."],
  403: ["This token may not see this", ""],
  429: ["Too many wrong tokens came from this address", "Wait a minute."],
  503: ["This is not available at the moment", ""],
};

function failed(error, name) {
  if (shown === name && (error.status === 0 || error.status === 503)) { // the last values stay, marked as old
    trouble.textContent = `These values are old: ${error.message}`;
    trouble.hidden = false;
    return;
  }
  const [strong, rest] = SAID[error.status] ?? [`The service refused (${error.status})`, ""];
  trouble.hidden = true;
  main.replaceChildren(h("h1", {}, strong), h("section", { class: "card" },
    placeholder(error.message, rest), h("div", { class: "actions" }, h("button", { type: "button", class: "first", onclick: () => show() }, "Try again"),
      token() && h("button", { type: "button", onclick: leave }, "Use another token"))));
}

function enter(error) {
  const wasWrong = Boolean(token());
  forgetToken();
  document.getElementById("leave").hidden = true;
  const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true, "aria-describedby": "token-hint", "aria-invalid": wasWrong });
  const form = h("form", { class: "stack", onsubmit: (event) => { event.preventDefault(); keepToken(field.value.trim()); show(); } },
    h("label", { for: "token" }, "Token", field),
    h("p", { id: "token-hint", class: "quiet small" }, "It is kept in this tab until you close it, and sent to this service only."),
    h("div", {}, h("button", { type: "submit", class: "first" }, "Show the store")));
  main.replaceChildren(h("h1", {}, "A token is needed"), h("section", { class: "card" },
    wasWrong && h("p", { role: "alert" }, h("span", { class: "badge bad" }, "refused"), ` ${error.message}`), form));
  trouble.hidden = true;
  shown = "";
  field.focus();
}

function leave() {
  forgetToken();
  show();
}

const THEME = "kvstore-theme";
const themeButton = document.getElementById("theme");
const isDark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  themeButton.textContent = isDark() ? "Light" : "Dark";
  themeButton.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  colourGraphs();
}

themeButton.addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  setTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme());
document.getElementById("leave").addEventListener("click", leave);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
window.addEventListener("hashchange", () => { show(); main.focus(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && current.timer) again(); });
setTheme(localStorage.getItem(THEME));
show();
