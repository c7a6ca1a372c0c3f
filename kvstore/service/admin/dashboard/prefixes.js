// Prefixes with their use, what comes before and after one, and what can be done with it.

import { ask as askAlone } from "./api.js"; // a dialog outlives the view behind it
import { confirmDelete, pin, unpin } from "./changes.js";
import { ago, badge, bytes, count, dialog, facts, h, incomplete, nameOf, placeholder, short, sum, table } from "./dom.js";

const ORDERS = { hits: "most hits", bytes: "largest", idle: "longest unused", age: "oldest" };

const LISTED_MAX = 200;

export async function view({ ask, query, signal, refresh }) {
  const { namespaces, next_cursor: next, is_complete: isComplete } = await ask("/v1/namespaces", { query: { limit: LISTED_MAX, order: "bytes" } });
  signal.throwIfAborted();
  if (!namespaces.length) return [h("h1", {}, "Prefixes"), h("section", { class: "card" }, isComplete ? placeholder("Nothing is stored yet", "Prefixes appear here as soon as an engine has saved its first page.") : incomplete())];
  const largest = [...namespaces].sort((one, other) => other.num_boundaries - one.num_boundaries)[0].namespace;
  const namespace = query.get("namespace") ?? largest;
  const options = namespaces.map((one) => [one.namespace, `${nameOf(one)} · ${one.tenant || "no tenant"}`]);
  if (!namespaces.some((one) => one.namespace === namespace)) options.push([namespace, short(namespace)]); // else another one seems chosen
  const order = query.get("order") ?? "hits";
  const cursor = query.get("cursor") ?? "";
  const page = await ask("/v1/prefixes", { query: { namespace, order, limit: 25, cursor } });
  const go = (changed) => { location.hash = `#prefixes?${new URLSearchParams({ namespace, order, ...changed })}`; };
  const head = h("div", { class: "title" }, h("h1", {}, "Prefixes"), h("div", { class: "controls" },
    h("label", {}, "Namespace", h("select", { "data-key": "namespace", onchange: (event) => go({ namespace: event.target.value }) },
      options.map(([value, text]) => h("option", { value, selected: value === namespace }, text)),
      next && h("option", { disabled: true }, `the largest ${LISTED_MAX} are listed; kvstore ls lists all`))),
    h("label", {}, "Order", h("select", { "data-key": "order", onchange: (event) => go({ order: event.target.value }) },
      Object.entries(ORDERS).map(([name, text]) => h("option", { value: name, selected: name === order }, text))))));
  return [head, listed(page, namespace, refresh), pages(page, cursor, go)];
}

function pages({ next_cursor: next, is_complete: isComplete }, cursor, go) {
  return h("div", { class: "actions" }, cursor && h("button", { type: "button", onclick: () => go({}) }, "First page"),
    next && h("button", { type: "button", onclick: () => go({ cursor: next }) }, "Next page"),
    !isComplete && h("span", { class: "quiet" }, "Reading took too long, so some prefixes may be missing."));
}

function listed({ prefixes }, namespace, refresh) {
  if (!prefixes.length) return h("section", { class: "card" }, placeholder("This namespace holds nothing", "Its data was evicted, or is not written yet."));
  return h("section", { class: "card" }, table("Prefixes", [
    ["prefix", (one) => h("button", { type: "button", class: "plain mono", "data-key": one.prefix, onclick: () => open(namespace, one.prefix, refresh) }, short(one.prefix))],
    ["tokens", (one) => count(one.tokens), true],
    ["hits", (one) => count(one.hits), true],
    ["bytes", (one) => bytes(Math.max(0, ...Object.values(one.num_bytes))), true],
    ["tiers", (one) => Object.entries(one.num_bytes).filter(([, held]) => held).map(([tier]) => tier).join(", ")],
    ["last used", (one) => ago(one.last_use_s)],
    ["", (one) => (one.pinned_until_s ? badge("pinned", "good") : "")],
  ], prefixes));
}

function open(namespace, prefix, refresh) {
  const place = h("div", {}, placeholder("Loading…"));
  const box = dialog("Prefix", (close) => [place, h("div", { class: "actions" }, h("button", { type: "button", onclick: close }, "Close"))]);
  const show = async (hex) => {
    try {
      const one = await askAlone(`/v1/prefixes/${namespace}/${hex}`, { query: { children_limit: 20 } });
      place.replaceChildren(...detail(one, show), actions(one, box, () => show(hex), refresh));
    } catch (error) {
      place.replaceChildren(placeholder(error.status === 404 ? "It is no longer stored" : "It cannot be shown", error.message));
    }
  };
  show(prefix);
}

function detail(one, show) {
  const pinned = one.pinned_until_s ? `until ${new Date(one.pinned_until_s * 1000).toLocaleString("en-GB")}` : "no";
  const groups = one.groups.map((group) => [group, Object.entries(group.held)]);
  return [
    facts([["prefix", h("code", {}, one.prefix)], ["position", `${count(one.tokens)} tokens`], ["hits", count(one.hits)],
      ["stored", ago(one.first_use_s)], ["last used", ago(one.last_use_s)], ["pinned", pinned]]),
    h("h3", {}, "Where its records are"),
    table("Groups", [
      ["group", ([group]) => `${group.group} ${group.kind}`],
      ["record", ([group]) => group.record],
      ["slices", ([group, held]) => held.map(([tier, { slices }]) => `${tier} ${slices.length} of ${group.num_slices}`).join(", ") || "none"],
      ["bytes", ([, held]) => bytes(Math.max(0, ...held.map(([, { num_bytes: size }]) => size))), true],
    ], groups),
    h("h3", {}, "Before and after it"), tree(one, show),
  ];
}

function tree(one, show) {
  const name = (each) => `${count(each.tokens)} tokens · ${short(each.prefix)} · ${count(each.hits)} hits`;
  const link = (each) => h("button", { type: "button", class: "plain", onclick: () => show(each.prefix) }, name(each));
  const children = one.children.map((child) => h("li", {}, link(child)));
  if (!one.children_complete) children.push(h("li", { class: "quiet" }, "there may be more"));
  let inner = h("ul", { class: "tree" }, h("li", {}, h("span", { class: "here", "aria-current": "true" }, name(one)),
    children.length ? h("ul", { class: "tree" }, children) : h("p", { class: "quiet small" }, "No stored prefix continues it.")));
  const shown = one.parents.slice(0, 6);
  for (const parent of shown) inner = h("ul", { class: "tree" }, h("li", {}, link(parent), inner));
  const above = one.parents.length - shown.length;
  return h("div", {}, above > 0 && h("p", { class: "quiet small" }, `${above} more before these`), inner);
}

function actions(one, box, again, refresh) {
  const changed = async () => { await again(); refresh(); };
  const gone = () => { box.close(); refresh(); };
  return h("div", { class: "actions" },
    one.pinned_until_s
      ? h("button", { type: "button", onclick: () => unpin(one).then(changed) }, "Unpin")
      : h("button", { type: "button", onclick: () => pin(one, changed) }, "Pin…"),
    h("button", { type: "button", class: "danger", onclick: () => confirmDelete("this prefix", `/v1/prefixes/${one.namespace}/${one.prefix}`, gone) }, "Delete…"),
    sum(Object.values(one.num_bytes)) === 0 && h("span", { class: "quiet small" }, "only in this node's memory"));
}
