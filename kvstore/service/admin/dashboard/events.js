// Events, as they happen.

import { follow } from "./api.js";
import { badge, bytes, clock, h, inWords, placeholder } from "./dom.js";

export const isLive = true;
const SHOWN_MAX = 500;
const KINDS = {
  started: "started", tier_down: "tier failed", tier_back: "tier recovered", quarantined: "quarantined", evicted: "evicted",
  saves_dropped: "saves dropped", catalog: "catalog", settings: "settings", admin: "change",
};
const SEVERITY = { error: "bad", warning: "warn", info: "" };

export function item(event) {
  const rest = Object.entries(event.detail).filter(([name, value]) => !event.text.includes(String(value)) || name === "who").map(([name, value]) => `${name} ${name.endsWith("_bytes") && Number.isFinite(Number(value)) ? bytes(Number(value)) : inWords(String(value))}`);
  if (event.namespace) rest.push(`namespace ${event.namespace.slice(0, 12)}…`);
  return h("li", { "data-kind": event.kind },
    h("time", { datetime: event.at, class: "quiet small" }, clock(event.at)),
    h("span", {}, badge(KINDS[event.kind] ?? event.kind, event.kind === "tier_back" ? "good" : SEVERITY[event.severity])),
    h("div", {}, event.text, rest.length ? h("div", { class: "quiet small mono" }, rest.join(" · ")) : null));
}

export async function view({ ask, signal }) {
  const { events, last_id: last } = await ask("/v1/events", { query: { follow: "false", limit: SHOWN_MAX } });
  signal.throwIfAborted();
  const list = h("ul", { class: "events", "aria-live": "polite", "aria-relevant": "additions" }, events.map(item));
  const nothing = placeholder("No events yet", "New events appear here at once.");
  nothing.hidden = events.length > 0;
  const state = h("span", { class: "badge", role: "status" }, "connecting…");
  const select = h("select", { onchange: () => { list.dataset.only = select.value; filter(list); } },
    h("option", { value: "" }, "everything"), Object.entries(KINDS).map(([kind, text]) => h("option", { value: kind }, text)));
  follow(last, (event) => {
    list.prepend(item(event));
    nothing.hidden = true;
    while (list.children.length > SHOWN_MAX) list.lastElementChild.remove();
    filter(list);
  }, (isThere) => {
    state.textContent = isThere ? "live" : "not connected, trying again";
    state.className = `badge ${isThere ? "good" : "bad"}`;
  }, signal);
  return [h("div", { class: "title" }, h("h1", {}, "Events"), h("div", { class: "controls" }, h("label", {}, "Show", select), state)),
    h("section", { class: "card" }, nothing, list)];
}

function filter(list) {
  for (const one of list.children) one.hidden = Boolean(list.dataset.only) && one.dataset.kind !== list.dataset.only;
}
