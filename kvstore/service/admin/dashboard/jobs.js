// Long operations of this service: running ones with their progress, and the results of the last hour.

import { badge, clock, h, inWords, placeholder, table } from "./dom.js";
import { aboutOf, isRunning, nameOf, progressOf, resultOf, stateOf, whoseOf } from "./reports.js";
import { collectGarbage, openJob, reindex } from "./running.js";

const POLL_MS = 1000; // while a job runs

export async function view({ ask, signal, refresh, keepUp }) {
  const { jobs, unread } = await ask("/v1/jobs");
  signal.throwIfAborted();
  const head = h("div", { class: "title" }, h("h1", {}, "Jobs"), h("div", { class: "controls" },
    h("button", { type: "button", onclick: () => collectGarbage(refresh) }, "Collect garbage…"),
    h("button", { type: "button", onclick: () => reindex(refresh) }, "Reindex…")));
  const unknown = unread && h("p", { role: "status" }, badge("interrupted jobs are not known now", "warn"), " ", inWords(unread));
  if (!jobs.length) {
    return [head, unknown, h("section", { class: "card" }, placeholder("No recent jobs",
      "Large deletions, garbage collections and work on tiers appear here while they run, and for an hour after. After a restart the service lists only jobs that it interrupted."))].filter(Boolean);
  }
  const lines = new Map(jobs.map((job) => [job.job, line(job)]));
  if (jobs.some(isRunning)) {
    keepUp();
    poll(lines, ask, signal, refresh);
  }
  return [head, unknown, h("section", { class: "card" }, table("Jobs", [
    ["job", ({ job }) => h("button", { type: "button", class: "plain", "data-key": job.job, onclick: () => openJob(job.job, refresh) }, nameOf(job))],
    ["about", ({ job }) => aboutOf(job)],
    ["started by", ({ job }) => whoseOf(job)],
    ["started", ({ job }) => clock(1000 * job.created_s)],
    ["state", ({ state }) => state],
    ["progress", ({ progress }) => progress],
    ["result", ({ result }) => result],
  ], [...lines.values()]))].filter(Boolean);
}

// A running job is updated in place, so that no click or focus is lost.
function line(job) {
  const [state, progress, result] = ["span", "div", "span"].map((tag) => h(tag, {}));
  const update = (seen) => {
    state.replaceChildren(badge(...stateOf(seen)));
    progress.replaceChildren(...progressOf(seen));
    result.replaceChildren(resultOf(seen));
  };
  update(job);
  return { job, state, progress, result, update };
}

async function poll(lines, ask, signal, refresh) {
  for (;;) {
    await new Promise((done) => { setTimeout(done, POLL_MS); });
    if (signal.aborted) return;
    if (document.hidden) continue;
    let jobs;
    try { ({ jobs } = await ask("/v1/jobs")); } catch { jobs = []; }
    if (signal.aborted) return;
    const isSame = jobs.length === lines.size && jobs.every(({ job }) => lines.has(job));
    if (!isSame || !jobs.some(isRunning)) { // other jobs, no answer, or no running job: refresh the whole view
      refresh();
      return;
    }
    for (const job of jobs) lines.get(job.job).update(job);
  }
}
