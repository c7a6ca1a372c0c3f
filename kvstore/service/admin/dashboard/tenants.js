// Tenants and namespaces, and what each holds.

import { ask as askAlone } from "./api.js"; // a dialog outlives the view behind it
import { SPANS, confirmDelete } from "./changes.js";
import { badge, bytes, count, dialog, facts, h, inWords, incomplete, nameOf, placeholder, share, sum, table } from "./dom.js";
import { changeQuota } from "./quotas.js";
import { deleteUnused } from "./running.js";
import { isOperator } from "./tiers.js";

const LISTED_MAX = 1000;

export async function view({ ask, signal, refresh }) {
  const [listed, { quotas, unread }, { tiers }] = await Promise.all([ask("/v1/namespaces", { query: { limit: LISTED_MAX, order: "bytes" } }), ask("/v1/quotas"), ask("/v1/tiers")]);
  signal.throwIfAborted();
  const change = isOperator(tiers) ? (tenant) => changeQuota(tenant, quotas, refresh) : null;
  const head = h("div", { class: "title" }, h("h1", {}, "Tenants and namespaces"),
    change && h("div", { class: "controls" }, h("button", { type: "button", "data-key": "quota", onclick: () => change("") }, "Set a quota…")));
  const old = unread && h("p", { role: "status" }, badge("quotas are the last known", "warn"), " ", inWords(unread));
  const isEmpty = !listed.namespaces.length;
  return [head, old, (!isEmpty || quotas.length > 0) && tenants(listed, quotas, change), isEmpty ? nothing(listed) : namespaces(listed, refresh)].filter(Boolean);
}

const nothing = ({ is_complete: isComplete }) => h("section", { class: "card" }, isComplete ? placeholder("Nothing is stored yet",
  "Start an engine with the connector: it opens a namespace with its first request (docs/quick-start.md).") : incomplete());

function tenants({ namespaces: all, total }, quotas, change) {
  const names = [...new Set([...all, ...quotas].map((one) => one.tenant))].sort();
  const tiers = Object.keys(total);
  const rows = names.map((tenant) => {
    const own = all.filter((one) => one.tenant === tenant);
    return { tenant, own, held: (tier) => sum(own.map((one) => one.held[tier]?.num_bytes ?? 0)) };
  });
  return h("section", { class: "card" }, h("h2", {}, "Tenants"), table("Tenants", [
    ["tenant", (row) => row.tenant || "no tenant"],
    ["namespaces", (row) => count(row.own.length), true],
    ["prefixes", (row) => count(sum(row.own.map((one) => one.num_boundaries))), true],
    ...tiers.map((tier) => [tier, (row) => bytes(row.held(tier)), true]),
    ["quota of the cold tier", (row) => [...quota(quotas.find((one) => one.tenant === row.tenant)), changing(row.tenant, change)]],
    [`share${tiers.length ? ` of ${tiers.at(-1)}` : ""}`, (row) => {
      const last = tiers.at(-1); // the slowest tier counts: tiers hold copies of the same records
      const [held, whole] = last ? [row.held(last), total[last].num_bytes] : [0, 0];
      return [h("progress", { max: whole || 1, value: held, "aria-label": `share of ${row.tenant || "no tenant"}` }), h("span", { class: "small quiet" }, share(held, whole))];
    }],
  ], rows));
}

function changing(tenant, change) { // engines without a tenant have no quota
  return change && tenant ? h("div", {}, h("button", { type: "button", class: "plain small", "data-key": `quota ${tenant}`, "aria-label": `Change the quota of ${tenant}`, onclick: () => change(tenant) }, "Change…")) : null;
}

function quota(given) {
  if (!given) return ["none"];
  const { used_bytes: used, guaranteed_bytes: guaranteed, maximum_bytes: maximum } = given;
  const bar = maximum && h("progress", { max: maximum, value: Math.min(used ?? 0, maximum), "aria-label": `quota of ${given.tenant}` });
  return [bar, h("span", { class: "small quiet" }, `${bytes(used)}${maximum ? ` of ${bytes(maximum)}` : ""}${guaranteed ? `, ${bytes(guaranteed)} guaranteed` : ""}`)].filter(Boolean);
}

function namespaces({ namespaces: all, next_cursor: next }, refresh) {
  return h("section", { class: "card" }, h("h2", {}, "Namespaces"),
    h("p", { class: "quiet small" }, "Namespaces differ in model, types, layout, weights or tenant. Compare two to see why engines do not share pages."),
    table("Namespaces", [
      ["namespace", (one) => h("button", { type: "button", class: "plain mono", "data-key": one.namespace, onclick: () => open(one, all, refresh) }, nameOf(one))],
      ["tenant", (one) => one.tenant || "no tenant"],
      ["prefixes", (one) => h("a", { href: `#prefixes?namespace=${one.namespace}` }, count(one.num_boundaries)), true],
      ["bytes", (one) => Object.entries(one.held).map(([tier, held]) => `${tier} ${bytes(held.num_bytes)}`).join(", ")],
    ], all), next && h("p", { class: "quiet" }, `The largest ${count(LISTED_MAX)} are shown.`));
}

// A description's fields by their paths; a list of plain values is one value.
function flat(value, path = "") {
  const isList = Array.isArray(value);
  if (value === null || typeof value !== "object" || (isList && value.every((one) => one === null || typeof one !== "object"))) return [[path, JSON.stringify(value)]];
  return Object.entries(value).flatMap(([name, inner]) => flat(inner, isList ? `${path}[${name}]` : path ? `${path}.${name}` : name));
}

// The fields in which this namespace and another one differ.
function comparison(one, all) {
  const others = all.filter(({ namespace }) => namespace !== one.namespace);
  if (!others.length) return "";
  const place = h("div", {});
  const select = h("select", { onchange: async () => {
    place.replaceChildren();
    if (!select.value) return;
    try {
      const other = await askAlone(`/v1/namespaces/${select.value}`);
      if (!other.description) throw new Error("Its description is lost.");
      const [mine, theirs] = [one, other].map(({ tenant, description }) => new Map([["tenant", JSON.stringify(tenant)], ...flat(description)]));
      const paths = [...new Set([...mine.keys(), ...theirs.keys()])].filter((path) => mine.get(path) !== theirs.get(path)).sort();
      place.replaceChildren(paths.length ? table("How they differ", [["field", (path) => path], ["this one", (path) => mine.get(path) ?? "–"], ["the other", (path) => theirs.get(path) ?? "–"]], paths)
        : h("p", { class: "quiet" }, "No field differs."));
    } catch (error) {
      place.replaceChildren(placeholder("It cannot be compared", error.message));
    }
  } }, h("option", { value: "" }, "choose one"), others.map((other) => h("option", { value: other.namespace }, `${nameOf(other)} · ${other.tenant || "no tenant"}`)));
  return h("div", {}, h("label", {}, "Compare with", select), place);
}

async function open(one, all, refresh) {
  const place = h("div", {}, placeholder("Loading…"));
  const box = dialog("Namespace", (close) => [place, h("div", { class: "actions" },
    h("button", { type: "button", class: "danger", onclick: () => confirmDelete("all of this namespace", `/v1/namespaces/${one.namespace}`, () => { box.close(); refresh(); }) }, "Delete all of it…"),
    h("button", { type: "button", onclick: () => chooseUnused(one.namespace, refresh) }, "Delete unused prefixes…"),
    h("button", { type: "button", onclick: () => close() }, "Close"))]);
  try {
    const { namespace, tenant, description, name } = await askAlone(`/v1/namespaces/${one.namespace}`);
    place.replaceChildren(facts([["model and types", name || "(description lost)"], ["namespace", h("code", {}, namespace)], ["tenant", tenant || "no tenant"]]),
      description ? comparison({ namespace, tenant, description }, all) : "", h("h3", {}, "All fields that identify it"),
      description ? h("pre", { tabindex: "0" }, JSON.stringify(description, null, 2)) : h("p", { class: "quiet" }, "No tier has its manifest."));
  } catch (error) {
    place.replaceChildren(placeholder("It cannot be shown", error.message));
  }
}

function chooseUnused(namespace, refresh) {
  const select = h("select", {}, Object.entries(SPANS).map(([seconds, text]) => h("option", { value: seconds, selected: seconds === "604800" }, text)));
  dialog("Delete unused prefixes", (close) => [
    h("p", {}, "This deletes prefixes of the namespace that were neither stored nor read for this time, except pinned ones."), h("label", {}, "Not used for", select),
    h("div", { class: "actions" }, h("button", { type: "button", class: "first", onclick: () => {
      close();
      deleteUnused(namespace, Number(select.value), SPANS[select.value], refresh);
    } }, "Dry run"), h("button", { type: "button", onclick: close }, "Cancel"))]);
}
