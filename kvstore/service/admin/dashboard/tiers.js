// How each tier is: can it be used, how full it is, what waits for it.

import { badge, bytes, count, facts, h } from "./dom.js";

const LEVEL = { memory: "this node's memory", hot: "hot, shared by all nodes", cold: "cold" };

export async function view({ ask, signal }) {
  const { tiers } = await ask("/v1/tiers");
  signal.throwIfAborted();
  return [h("h1", {}, "Tiers"), h("div", { class: "some" }, tiers.map(card))];
}

function state({ breaker, healthy }) {
  if (breaker === "open") return badge("left alone until a probe succeeds", "bad");
  return healthy ? badge("in use", "good") : badge("does not answer", "bad");
}

function card(tier) {
  const { usage, own } = tier;
  const pairs = [["breaker", tier.breaker]];
  if (tier.write_back === "paused") pairs.push(["write-back", badge("paused by an operator", "warn")]);
  if (tier.reason) pairs.push(["reason", tier.reason]);
  if (usage) {
    pairs.push(["used", usage.limit_bytes ? `${bytes(usage.used_bytes)} of ${bytes(usage.limit_bytes)}` : bytes(usage.used_bytes)],
      ["records", count(usage.num_records)],
      ["put aside", usage.num_quarantined ? badge(`${count(usage.num_quarantined)} corrupt records`, "bad") : "no record"]);
    if (tier.level !== "memory") pairs.push(["waiting here", `${count(usage.waiting_records)} records, ${bytes(usage.waiting_bytes)}`]);
  }
  if (own) pairs.push(["ours there", `${count(own.num_boundaries)} prefixes, ${count(own.num_records)} records, ${bytes(own.num_bytes)}`]);
  return h("section", { class: "card" }, h("div", { class: "title" }, h("h2", {}, tier.name), state(tier)),
    h("p", { class: "quiet" }, LEVEL[tier.level]),
    usage?.limit_bytes && h("p", {}, h("progress", { max: usage.limit_bytes, value: usage.used_bytes ?? 0, "aria-label": `${tier.name} used` })),
    facts(pairs));
}
