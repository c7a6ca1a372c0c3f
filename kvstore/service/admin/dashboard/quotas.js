// Quotas of the cold tier: typed, checked, confirmed, and only then set.

import { ask } from "./api.js";
import { refused } from "./changes.js";
import { bytes, count, dialog, facts, h, say } from "./dom.js";
import { parseBytes, typedBytes } from "./sizes.js";

const TENANT = /^[!-~]{1,128}$/;
const SIZE = "expected bytes, like 8GiB, 500MB or 1048576";
const TOO_LARGE = "expected less than 8PiB"; // above this, numbers in JavaScript are not exact
const path = (tenant) => `/v1/quotas/${encodeURIComponent(tenant)}`;
const exact = (value) => (value === null ? "no limit of its own" : value ? `${bytes(value)} (${count(value)} bytes)` : "nothing");

// What is wrong with what was typed, by field; or what it means.
function read({ tenant, guaranteed, maximum }) {
  const wrong = {};
  if (!TENANT.test(tenant)) wrong.tenant = "expected up to 128 letters, digits and signs without spaces, as in the credentials file";
  const [least, most] = [guaranteed, maximum].map((text) => (text ? parseBytes(text) : undefined));
  if (least === null) wrong.guaranteed = SIZE;
  if (least > Number.MAX_SAFE_INTEGER) wrong.guaranteed = TOO_LARGE;
  if (most === null) wrong.maximum = SIZE;
  else if (most > Number.MAX_SAFE_INTEGER) wrong.maximum = TOO_LARGE;
  else if (most === 0) wrong.maximum = "expected more than 0; leave it empty for no limit";
  else if (most !== undefined && !wrong.guaranteed && most < (least ?? 0)) wrong.maximum = "it is less than the guaranteed size";
  if (!guaranteed && !maximum) wrong.guaranteed = "expected a size here or below; for neither, type 0";
  return { wrong, quota: { guaranteed_bytes: least ?? 0, maximum_bytes: most ?? null } };
}

// `tenant`: empty if the user names it. `quotas`: the current ones.
export function changeQuota(tenant, quotas, done) {
  const quotaOf = (name) => quotas.find((one) => one.tenant === name);
  const place = h("div", {});
  const now = quotaOf(tenant);
  const typed = { tenant, guaranteed: now ? typedBytes(now.guaranteed_bytes) : "", maximum: now?.maximum_bytes ? typedBytes(now.maximum_bytes) : "" };
  const box = dialog(tenant ? `Quota of ${tenant}` : "Quota of a tenant", () => place);
  const close = () => box.close();

  const form = (wrong = {}) => {
    const field = (name, label, hint) => {
      const input = h("input", { id: `quota-${name}`, name, value: typed[name], autocomplete: "off", spellcheck: "false", "aria-describedby": `quota-${name}-hint`,
        "aria-invalid": Boolean(wrong[name]) && "true", oninput: () => { typed[name] = input.value.trim(); } });
      return h("div", {}, h("label", { for: input.id }, label, input),
        h("p", { id: `quota-${name}-hint`, class: wrong[name] ? "small wrong" : "small quiet", role: wrong[name] && "alert" }, wrong[name] ? `${label}: ${wrong[name]}` : hint));
    };
    place.replaceChildren(h("form", { class: "stack", novalidate: true, onsubmit: (event) => { event.preventDefault(); check(); } },
      !tenant && field("tenant", "Tenant", "As in the credentials file."),
      field("guaranteed", "Guaranteed", "Up to this size of the cold tier, other tenants evict nothing of it. Like 10GiB; empty: nothing."),
      field("maximum", "Maximum", "Above this size its data is evicted first. Like 50GiB; empty: no limit of its own."),
      h("div", { class: "actions" }, h("button", { type: "submit", class: "first" }, "Continue…"),
        now?.is_ordered && h("button", { type: "button", class: "danger", onclick: confirmRemoval }, "Withdraw it…"),
        h("button", { type: "button", onclick: close }, "Cancel")),
      now && !now.is_ordered && h("p", { class: "quiet small" }, "This quota comes from the settings of this service. A quota that is set here replaces it.")));
    place.querySelector(Object.keys(wrong).length ? "[aria-invalid]" : "input").focus();
  };

  const check = () => {
    const { wrong, quota } = read(typed);
    if (Object.keys(wrong).length) return form(wrong);
    const before = quotaOf(typed.tenant);
    const isOver = quota.maximum_bytes !== null && before?.used_bytes > quota.maximum_bytes;
    return confirm([
      h("p", {}, "This quota will apply on every service that shares the catalog, within seconds and after restarts:"),
      facts([["tenant", typed.tenant], ["guaranteed", exact(quota.guaranteed_bytes)], ["maximum", exact(quota.maximum_bytes)],
        ...(before ? [["current", `${exact(before.guaranteed_bytes)} guaranteed; at most: ${exact(before.maximum_bytes)}`], ["used", bytes(before.used_bytes)]] : [])]),
      isOver && h("p", { class: "wrong" }, "It uses more than that now. When the tier is full, the excess is evicted, ends of prefixes first."),
    ], "Set the quota", "first", () => ask(path(typed.tenant), { method: "PUT", body: quota }), `The quota of ${typed.tenant} is set.`);
  };

  const confirmRemoval = () => confirm([
    h("p", {}, "This quota will no longer apply, on any service that shares the catalog:"),
    facts([["tenant", tenant], ["guaranteed", exact(now.guaranteed_bytes)], ["maximum", exact(now.maximum_bytes)]]),
    h("p", {}, "The quota in the settings of each service applies again. Without one, the tenant has no quota."),
  ], "Withdraw it", "danger first", () => ask(path(tenant), { method: "DELETE" }), `The quota of ${tenant} is withdrawn.`);

  const confirm = (words, verb, kind, act, said) => {
    const problem = h("div", {});
    const button = h("button", { type: "button", class: kind, onclick: async () => {
      button.disabled = true;
      try {
        await act();
      } catch (error) {
        const name = ["tenant", "guaranteed", "maximum"].find((one) => error.field?.includes(one));
        button.disabled = false;
        return name && (name !== "tenant" || !tenant) ? form({ [name]: error.message }) : refused(problem, error);
      }
      close();
      say(said);
      return done();
    } }, verb);
    place.replaceChildren(...words.filter(Boolean), problem, h("div", { class: "actions" }, button,
      h("button", { type: "button", onclick: () => form() }, "Back"), h("button", { type: "button", onclick: close }, "Cancel")));
    button.focus();
  };

  form();
}
