// Where lookups stop, and why, in the words of docs/explain.md.

import { ask as askAlone } from "./api.js"; // a dialog outlives the view behind it
import { badge, clock, count, dialog, facts, h, placeholder, share, sum, table } from "./dom.js";
import { graph } from "./graphs.js";
import { span } from "./overview.js";

const RESULT = { hit: "good", part: "warn", miss: "bad", local: "" };

export async function view({ ask, query, signal }) {
  const hours = query.get("hours") ?? "1";
  const [history, { requests }] = await Promise.all([ask("/v1/history", { query: { hours } }), ask("/v1/requests")]);
  signal.throwIfAborted();
  const wanted = query.get("request"); // a link to one request
  if (wanted && !document.querySelector("dialog")) explain(wanted);
  const head = h("div", { class: "title" }, h("h1", {}, "Where lookups stop, and why"), h("div", { class: "controls" }, span(hours, "misses")));
  return [head, over(history), meanings(history), latest(requests)];
}

function over({ at_s: at, requests, reasons }) {
  const stopped = Object.entries(reasons).sort(([, one], [, other]) => sum(other) - sum(one));
  const series = [{ label: "resumed from the furthest point", values: requests.hit, stack: "requests" },
    ...stopped.slice(0, 4).map(([label, values]) => ({ label, values, stack: "requests" }))];
  const rest = stopped.slice(4);
  if (rest.length) series.push({ label: "other reasons", values: at.map((_, step) => sum(rest.map(([, values]) => values[step]))), stack: "requests" });
  return graph("Requests by what ended their prefix", { at, series, kind: "bar", write: count, empty: "No engine reported a request in this time." });
}

function meanings({ reasons, words, requests }) {
  const all = sum(Object.values(requests).flat());
  const rows = Object.entries(reasons).map(([reason, values]) => [reason, sum(values)]).sort((one, other) => other[1] - one[1]);
  const body = rows.length
    ? table("Reasons", [
      ["reason", ([reason]) => h("code", {}, reason)],
      ["requests", ([, number]) => count(number), true],
      ["share", ([, number]) => share(number, all), true],
      ["what it means", ([reason]) => words[reason]?.why ?? ""],
      ["what to do", ([reason]) => words[reason]?.advice || "–"],
    ], rows)
    : placeholder("Nothing stopped early", "Every request of this time was resumed from the furthest point, or there was none.");
  return h("section", { class: "card" }, h("h2", {}, "Reasons"), body);
}

const LISTED = 20;

function latest(requests) {
  const place = h("div", {}, listed(requests.slice(0, LISTED)));
  const rest = requests.length > LISTED && h("div", { class: "actions" }, h("button", { type: "button", onclick: (event) => {
    place.replaceChildren(listed(requests));
    event.target.remove();
  } }, `Show all ${requests.length}`));
  return h("section", { class: "card" }, h("h2", {}, "Latest requests"), requests.length > 0 && h("p", { class: "quiet small" }, "Choose one to learn why it was resumed no further."), place, rest);
}

function listed(requests) {
  return requests.length
    ? table("Latest requests", [
      ["request", (one) => h("button", { type: "button", class: "plain mono", "data-key": one.request, onclick: () => explain(one.request) }, one.request)],
      ["reported", (one) => clock(one.at)],
      ["tenant", (one) => one.tenant || "–"],
      ["result", (one) => badge(one.result, RESULT[one.result])],
      ["resumed", (one) => [h("progress", { max: Math.max(one.prompt_tokens, 1), value: one.resume_tokens, "aria-label": "share resumed" }),
        h("span", { class: "small quiet" }, `${count(one.resume_tokens)} of ${count(one.prompt_tokens)} tokens`)]],
      ["stopped by", (one) => (one.reason ? h("code", {}, one.reason) : "–")],
    ], requests)
    : placeholder("No request yet", "Engines with the connector report each request when it is decided. This service remembers the latest 2,048 of each tenant.");
}

async function explain(request) {
  history.replaceState(null, "", `#misses?${new URLSearchParams({ request })}`); // the address of this page is a link to it
  const place = h("div", {}, placeholder("Loading…"));
  const box = dialog("Why was it resumed no further?", (close) => [place, h("div", { class: "actions" }, h("button", { type: "button", onclick: close }, "Close"))]);
  box.addEventListener("close", () => history.replaceState(null, "", "#misses"));
  try {
    const told = await askAlone("/v1/requests/explain", { query: { request } });
    const detail = Object.entries(told.detail).map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)]);
    place.replaceChildren(h("p", {}, h("code", {}, told.request), " ", badge(told.result, RESULT[told.result]), " ", told.reason && badge(told.reason)),
      h("p", {}, h("strong", {}, `${told.why}.`), told.advice ? ` What to do: ${told.advice}.` : ""),
      facts([["prompt", `${count(told.prompt_tokens)} tokens`], ["resumed up to", `${count(told.resume_tokens)} tokens`],
        ["possible", `${count(told.cap_tokens)} tokens`], ["engine held", `${count(told.local_tokens)} tokens`],
        ["stopped at", told.stopped_at_tokens === null ? "–" : `${count(told.stopped_at_tokens)} tokens`],
        ["reported", clock(told.at)], ["namespace", told.namespace ? [told.namespace_name, told.namespace_name && " ", h("code", {}, told.namespace)] : "–"], ...detail]));
  } catch (error) {
    place.replaceChildren(placeholder("It cannot be explained", error.message));
  }
}
