// The state of each tier, how full it is, and what waits to be written.

import { ago, badge, bytes, count, facts, h, inWords, share } from "./dom.js";
import { drain, pause, resume, verify } from "./running.js";

const LEVEL = { memory: "this node's memory", hot: "hot, shared by all nodes", cold: "cold" };

export const isOperator = (tiers) => tiers.some(({ usage }) => usage); // tenants do not see it

// What a tier uses. Of Redis it is the memory of its servers, which others may use too: not what the store keeps there.
export const usedName = (name) => (name === "redis" ? "server memory" : "used");

// What the store keeps in a tier. If that cannot be read: what it last was, and when. undefined: not known.
export function heldBy({ name, usage, own, own_at_s: ownAt, last_known: last }) {
  if (own) return { held: own.num_bytes, at: ownAt };
  if (name === "redis") return { held: undefined };
  return usage && !last ? { held: usage.used_bytes ?? undefined } : { held: last?.used_bytes ?? undefined, at: last?.at_s };
}

export async function view({ ask, signal, refresh }) {
  const { tiers } = await ask("/v1/tiers");
  signal.throwIfAborted();
  const work = isOperator(tiers) ? (tier) => actions(tier, refresh) : () => null;
  return [h("h1", {}, "Tiers"), h("div", { class: "some" }, tiers.map((tier) => card(tier, work(tier))))];
}

function actions(tier, refresh) {
  if (tier.level === "memory") return null;
  const act = (text, start) => h("button", { type: "button", "data-key": `${tier.level} ${text}`, "aria-label": `${text} ${tier.name}`, onclick: () => start(tier, refresh) }, text);
  return h("div", { class: "actions" }, tier.write_back === "paused" ? act("Resume write-back", resume) : act("Pause write-back…", pause),
    act("Drain…", drain), act("Verify…", verify));
}

const state = ({ problem }) => (problem ? badge(problem, "bad") : badge("in use", "good"));

function card(tier, work) {
  const { usage, own, own_at_s: ownAt, last_known: last } = tier;
  const pairs = [["breaker", tier.breaker]];
  if (tier.write_back === "paused") pairs.push(["write-back", badge("paused by an operator", "warn")]);
  if (tier.reason) pairs.push(["reason", inWords(tier.reason)]);
  if (usage) {
    pairs.push([usedName(tier.name), usage.limit_bytes ? `${bytes(usage.used_bytes)} of ${bytes(usage.limit_bytes)} (${usage.limit_name}), ${share(usage.used_bytes, usage.limit_bytes)}` : bytes(usage.used_bytes)],
      ["records", count(usage.num_records)],
      ["quarantined", usage.num_quarantined ? badge(`${count(usage.num_quarantined)} corrupt records`, "bad") : "none"]);
    if (tier.level !== "memory") pairs.push(["waiting to be written", `${count(usage.waiting_records)} records, ${bytes(usage.waiting_bytes)}`]);
  }
  const lastKnown = (atS) => (atS ? ` (last known, ${ago(atS)})` : "");
  if (last) pairs.push([usedName(tier.name), (last.limit_bytes ? `${bytes(last.used_bytes)} of ${bytes(last.limit_bytes)}` : bytes(last.used_bytes)) + lastKnown(last.at_s)]);
  if (own) pairs.push(["kept here", `${count(own.num_boundaries)} prefixes, ${count(own.num_records)} records, ${bytes(own.num_bytes)}${lastKnown(ownAt)}`]);
  return h("section", { class: "card" }, h("div", { class: "title" }, h("h2", {}, tier.name), state(tier)),
    h("p", { class: "quiet" }, LEVEL[tier.level]),
    usage?.limit_bytes && h("p", {}, h("progress", { max: usage.limit_bytes, value: usage.used_bytes ?? 0, "aria-label": `${tier.name} used` })),
    facts(pairs), work);
}
