// Changes, which the user confirms first; a deletion after a dry run.

import { ask } from "./api.js";
import { bytes, count, dialog, h, placeholder, say, table } from "./dom.js";

export const SPANS = { 3600: "one hour", 86400: "one day", 604800: "one week", 2592000: "30 days" };

export const refused = (place, error) => place.replaceChildren(h("p", { role: "alert" }, h("span", { class: "badge bad" }, error.status ? "refused" : "no answer"), ` ${error.message}`));

export function pin(one, done) {
  const select = h("select", { id: "pin-span" }, Object.entries(SPANS).map(([seconds, text]) => h("option", { value: seconds, selected: seconds === "86400" }, text)));
  const problem = h("div", {});
  dialog("Pin this prefix", (close) => [
    h("p", {}, "Retention keeps this prefix, and all before it, for this time."),
    h("label", { for: "pin-span" }, "For", select), problem,
    h("div", { class: "actions" }, h("button", { type: "button", class: "first", onclick: async () => {
      try {
        await ask("/v1/pins", { method: "POST", body: { namespace: one.namespace, prefix: one.prefix, expires_in_s: Number(select.value) } });
      } catch (error) { return refused(problem, error); }
      close();
      say(`Pinned for ${SPANS[select.value]}.`);
      return done();
    } }, "Pin"), h("button", { type: "button", onclick: close }, "Cancel"))]);
}

export async function unpin(one) {
  try {
    await ask(`/v1/pins/${one.namespace}/${one.prefix}`, { method: "DELETE" });
    say("The pin was removed.");
  } catch (error) {
    say(`Refused: ${error.message}`);
  }
}

export function confirmDelete(what, path, done) {
  const place = h("div", {}, placeholder("Dry run…"));
  const act = h("button", { type: "button", class: "danger first", disabled: true }, "Delete for good");
  dialog(`Delete ${what}?`, (close) => {
    act.addEventListener("click", async () => {
      act.disabled = true;
      try {
        const gone = await wholly(path, place);
        close();
        say(`Deleted: ${amounts(gone)}.`);
        done();
      } catch (error) { refused(place, error); }
    });
    return [place, h("div", { class: "actions" }, act, h("button", { type: "button", onclick: close }, "Cancel"))];
  });
  dry(path, place, act);
}

async function dry(path, place, act) {
  try {
    const would = await ask(path, { method: "DELETE" });
    const tiers = Object.entries(would.by_tier);
    place.replaceChildren(h("p", {}, "This would be deleted, and cannot be restored:"),
      table("What would be deleted", [["tier", ([tier]) => tier], ["prefixes", ([, held]) => count(held.num_boundaries), true],
        ["records", ([, held]) => count(held.num_records), true], ["bytes", ([, held]) => bytes(held.num_bytes), true]], tiers),
      h("p", { class: "quiet small" }, "Nothing has been deleted yet. Pinned prefixes stay."));
    act.disabled = !tiers.length;
  } catch (error) { refused(place, error); }
}

// A large namespace takes several calls.
async function wholly(path, place) {
  const total = {};
  for (;;) {
    const part = await ask(path, { method: "DELETE", query: { confirm: "true" } });
    for (const [tier, held] of Object.entries(part.by_tier)) total[tier] = (total[tier] ?? 0) + held.num_records;
    if (part.is_complete) return total;
    place.replaceChildren(placeholder("Deleting…", amounts(total)));
  }
}

const amounts = (total) => Object.entries(total).map(([tier, records]) => `${count(records)} records from ${tier}`).join(", ") || "nothing";
