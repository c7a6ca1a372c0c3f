// Starts jobs, shows their progress and cancels them. A deletion begins with a dry run, other jobs with a confirmation.

import { ask } from "./api.js";
import { refused } from "./changes.js";
import { badge, bytes, clock, count, dialog, facts, h, inWords, placeholder, say } from "./dom.js";
import { amounts, garbage, goneOf, isRunning, nameOf, progressOf, reportOf, resultOf, stateOf, whoseOf } from "./reports.js";

const POLL_MS_MIN = 50; // a small job has ended by then
const POLL_MS_MAX = 500;
const RETRIED = [0, 429, 503]; // the next request may be answered

// Polls a job until it has ended or the dialog is closed. Returns the job as it ended, else null.
async function watch(box, id, show) {
  for (let wait = POLL_MS_MIN; box.open; wait = Math.min(2 * wait, POLL_MS_MAX)) {
    try {
      const job = await ask(`/v1/jobs/${id}`);
      show(job);
      if (!isRunning(job)) return job;
    } catch (error) {
      show(null, error);
      if (!RETRIED.includes(error.status)) return null;
    }
    await new Promise((done) => { setTimeout(done, wait); });
  }
  return null;
}

export function openJob(id, done) {
  const place = h("div", {}, placeholder("Loading…"));
  const trouble = h("div", {});
  let seen = null;
  const cancel = h("button", { type: "button", class: "danger", onclick: () => confirmCancel(seen) }, "Cancel the job…");
  cancel.hidden = true;
  const box = dialog("Job", (close) => [place, trouble, h("div", { class: "actions" }, cancel, h("button", { type: "button", onclick: close }, "Close"))]);
  box.addEventListener("close", done);
  watch(box, id, (job, error) => {
    if (error) return refused(trouble, error);
    trouble.replaceChildren();
    seen = job;
    cancel.hidden = !isRunning(job);
    return place.replaceChildren(...detail(job));
  });
}

function detail(job) {
  const report = reportOf(job);
  const about = Object.entries(job.about).map(([what, of]) => [what, h("code", {}, of)]);
  return [
    h("p", {}, h("strong", {}, nameOf(job)), " ", badge(...stateOf(job))),
    job.error && h("p", { role: "alert" }, inWords(job.error)),
    h("div", { class: "progress" }, progressOf(job)),
    facts([...about, ["started by", whoseOf(job)], ["started", clock(1000 * job.created_s)],
      ...(job.ended_s === null ? [] : [["ended", clock(1000 * job.ended_s)]]), ["job", h("code", {}, job.job)]]),
    report.length > 0 && h("h3", {}, isRunning(job) ? "So far" : job.is_dry_run ? "What would be deleted" : "Result"), ...report,
  ].filter(Boolean);
}

function confirmCancel({ job, ...rest }) {
  const problem = h("div", {});
  dialog(`Cancel the ${nameOf(rest)}?`, (close) => [
    h("p", {}, "What it has done stays done. The same job started again does the rest."), problem,
    h("div", { class: "actions" }, h("button", { type: "button", class: "danger first", onclick: async () => {
      try {
        const ended = await ask(`/v1/jobs/${job}`, { method: "DELETE" });
        close();
        say(ended.state === "cancelled" ? "The job was cancelled." : `It had ended before: ${ended.state}.`);
      } catch (error) { refused(problem, error); }
    } }, "Cancel it"), h("button", { type: "button", onclick: close }, "Let it run"))]);
}

// A job that deletes: first a dry run, whose report is shown, then the deletion.
function tryDry(title, start, done) {
  const place = h("div", {}, placeholder("Dry run…"));
  const act = h("button", { type: "button", class: "danger first", disabled: true }, "Delete for good");
  const run = async (confirm) => {
    try {
      const { job } = await start(confirm);
      return await watch(box, job, (seen, error) => {
        if (error) return refused(place, error);
        return place.replaceChildren(h("p", {}, confirm ? "Deleting…" : "Dry run…"), ...progressOf(seen),
          h("p", { class: "quiet small" }, "The job continues when you close this, and is listed under Jobs."));
      });
    } catch (error) {
      refused(place, error);
      return null;
    }
  };
  const box = dialog(title, (close) => [place, h("div", { class: "actions" }, act, h("button", { type: "button", onclick: close }, "Cancel"))]);
  box.addEventListener("close", done);
  act.addEventListener("click", async () => {
    act.disabled = true;
    const job = await run(true);
    if (job?.state !== "done") return job && ended(place, job);
    box.close();
    return say(`Deleted: ${amounts(goneOf(job)) || "nothing"}.`);
  });
  run(false).then((job) => {
    if (job?.state !== "done") return job && ended(place, job);
    const isAny = goneOf(job).length > 0;
    place.replaceChildren(h("p", {}, isAny ? "This would be deleted, and cannot be restored:" : "There is nothing to delete."), ...(isAny ? garbage(job) : garbage(job).slice(1)),
      h("p", { class: "quiet small" }, "Nothing has been deleted yet. Pinned prefixes stay."));
    act.disabled = !isAny;
    return undefined;
  });
}

const ended = (place, job) => place.replaceChildren(h("p", { role: "alert" }, badge(...stateOf(job)), ` ${resultOf(job)}`));

export const collectGarbage = (done) => tryDry("Collect garbage?",
  (confirm) => ask("/v1/gc", { method: "POST", query: { confirm } }), done);

export const deleteUnused = (namespace, seconds, words, done) => tryDry(`Delete what was not used for ${words}?`,
  (confirm) => ask("/v1/deletions", { method: "POST", query: { confirm }, body: { namespace, unused_s: seconds } }), done);

// Work on a tier. `words`: what it will do; `choice`: a select or a checkbox for an option.
function confirmStart(title, words, choice, start, done) {
  const problem = h("div", {});
  dialog(title, (close) => [...words.map((text) => h("p", {}, text)), choice && h("p", {}, choice), problem,
    h("div", { class: "actions" }, h("button", { type: "button", class: "first", onclick: async () => {
      try {
        const { job } = await start();
        close();
        openJob(job, done);
      } catch (error) { refused(problem, error); }
    } }, "Start"), h("button", { type: "button", onclick: close }, "Cancel"))].filter(Boolean));
}

const work = (tier, verb, query) => ask(`/v1/tiers/${tier.level}/${verb}`, { method: "POST", query });
const held = ({ usage, own }) => [usage?.num_records ?? own?.num_records, usage?.used_bytes ?? own?.num_bytes];
const RATES = [[10, "10 MiB"], [100, "100 MiB"], [1000, "1,000 MiB"]];

export function verify(tier, done) {
  const [numRecords, numBytes] = held(tier);
  const select = h("select", {}, RATES.map(([rate, words]) => h("option", { value: rate << 20, selected: rate === 100 }, `${words} a second`)));
  confirmStart(`Verify all records of ${tier.name}?`, [
    `Every record is read and compared with its checksums: ${count(numRecords)} records, ${bytes(numBytes)}.`,
    "Nothing is deleted: corrupt records are quarantined and no longer served. The tier has other users, so reading is limited:",
  ], h("label", {}, "At most", select), () => work(tier, "verify", { bytes_per_s: select.value }), done);
}

export function reindex(done) {
  confirmStart("Reindex the catalog?", [
    "The names of all records of the slower tiers are listed. Records that the catalog lacks are added to it, and entries without a record are removed. No record is read or deleted.",
  ], null, () => ask("/v1/reindex", { method: "POST" }), done);
}

export function drain(tier, done) {
  const { waiting_records: numWaiting, waiting_bytes: numBytes } = tier.usage ?? {};
  confirmStart(`Drain the write-back to ${tier.name}?`, [
    `The job ends when everything that waits now is written: ${count(numWaiting)} records, ${bytes(numBytes)}. Nothing is stopped, and later saves are not waited for.`,
  ], null, () => work(tier, "drain"), done);
}

export function pause(tier, done) {
  const problem = h("div", {});
  dialog(`Pause the write-back to ${tier.name}?`, (close) => [
    h("p", {}, "This service stops its background writes to the tier until you resume them or restart it. Waiting records are kept in memory. Saves that wait for the tier, and reads, continue."), problem,
    h("div", { class: "actions" }, h("button", { type: "button", class: "danger first", onclick: async () => {
      try {
        await work(tier, "pause");
        close();
        say(`The write-back to ${tier.name} is paused.`);
        done();
      } catch (error) { refused(problem, error); }
    } }, "Pause it"), h("button", { type: "button", onclick: close }, "Cancel"))]);
}

export async function resume(tier, done) {
  try {
    await work(tier, "resume");
    say(`The write-back to ${tier.name} was resumed.`);
    done();
  } catch (error) { say(`Refused: ${error.message}`); }
}
