// Hits and bytes over time, and what is wrong now.

import { ago, badge, bytes, count, h, share, sum } from "./dom.js";
import { item } from "./events.js";
import { graph } from "./graphs.js";
import { heldBy, usedName } from "./tiers.js";

export async function view({ ask, query, signal }) {
  const hours = query.get("hours") ?? "1";
  const [history, tiers, events] = await Promise.all([
    ask("/v1/history", { query: { hours } }), ask("/v1/tiers"), ask("/v1/events", { query: { follow: "false", limit: 6 } }),
  ]);
  signal.throwIfAborted();
  return [title(hours), tiles(history, tiers), h("div", { class: "pair" }, ratios(history), held(history)), evictions(history), recent(events)].filter(Boolean);
}

export function span(hours, view) {
  return h("label", {}, "Last", h("select", { value: hours, "data-key": "hours", onchange: (event) => { location.hash = `#${view}?hours=${event.target.value}`; } },
    ["1", "3", "6"].map((one) => h("option", { value: one, selected: one === hours }, one === "1" ? "hour" : `${one} hours`))));
}

function title(hours) {
  return h("div", { class: "title" }, h("h1", {}, "Overview"), h("div", { class: "controls" }, span(hours, "overview")));
}

function tile(number, label, extra) {
  return h("div", { class: "card tile" }, h("p", { class: "number" }, number), h("p", { class: "label" }, label), extra);
}

function tiles(history, { tiers }) {
  const { tokens, requests, lookups } = history;
  const asked = sum(Object.values(requests).flat());
  const slower = tiers.filter(({ level }) => level !== "memory").map((tier) => ({ name: tier.name, ...heldBy(tier) })).filter(({ held }) => held !== undefined);
  const kept = slower.reduce((most, one) => (one.held > (most?.held ?? -1) ? one : most), undefined); // tiers hold copies of each other: nothing is added up
  const sick = tiers.filter((tier) => !tier.healthy);
  return h("div", { class: "tiles" },
    tile(share(sum(tokens.resumed), sum(tokens.prompt)), "of prompt tokens restored from this store"),
    tile(lookups ? share(sum(lookups.hits), sum(lookups.all)) : share(sum(requests.hit) + sum(requests.part), asked), lookups ? "of lookups found something" : "of requests were resumed"),
    tile(count(lookups ? sum(lookups.all) : asked), lookups ? "lookups" : "requests"),
    tile(kept ? bytes(kept.held) : "not known", kept ? `kept in ${kept.name}` : "kept in the slower tiers",
      kept?.at ? badge(`last known, ${ago(kept.at)}`, "warn") : null),
    tile(sick.length ? `${sick.length} of ${tiers.length}` : "All well", sick.length ? "tiers do not answer or take no writes" : `${tiers.length} tiers`,
      sick.length ? badge(sick.map((tier) => tier.name).join(", "), "bad") : null));
}

function ratios({ at_s: at, tokens, lookups }) {
  const ratio = (parts, wholes) => parts.map((part, step) => (wholes[step] ? 100 * part / wholes[step] : null));
  const series = [{ label: "prompt tokens restored", values: ratio(tokens.resumed, tokens.prompt) }];
  if (lookups) series.push({ label: "lookups with a hit", values: ratio(lookups.hits, lookups.all) });
  return graph("Hit ratio", { at, series, max: 100, write: (value) => `${Math.round(value)} %`, empty: "No engine sent a lookup in this time." });
}

function held({ at_s: at, tier_bytes: tiers, of }) {
  // not stacked: tiers hold copies of the same records, and a tier that fails must not lower the others
  const series = Object.entries(tiers).map(([name, values]) => ({ label: name === "redis" ? `redis (${usedName(name)})` : name, values, hasGaps: true }));
  const empty = of === "tenant" ? "Only operators see this over time. Tenants shows what you hold now." : "The first sample is taken ten seconds after the start.";
  return graph("Bytes by tier", { at, series, write: bytes, empty });
}

function evictions({ at_s: at, evictions: causes }) {
  const series = Object.entries(causes).map(([label, values]) => ({ label, values, stack: "causes" }));
  return series.length ? graph("Boundaries evicted from the cold tier, by cause", { at, series, kind: "bar", write: count, empty: "" }) : null;
}

function recent({ events }) {
  const list = events.length
    ? h("ul", { class: "events" }, events.map(item))
    : h("p", { class: "quiet" }, "No events since the service started.");
  return h("section", { class: "card" }, h("h2", {}, "Recent events"), list, h("p", { class: "small" }, h("a", { href: "#events" }, "All events")));
}
