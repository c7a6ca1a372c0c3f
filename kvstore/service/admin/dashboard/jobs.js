// Long operations of this service: what runs, how far it is, what came of those that ended within the last hour.

import { badge, clock, h, placeholder, table } from "./dom.js";
import { aboutOf, isRunning, nameOf, progressOf, resultOf, stateOf, whoseOf } from "./reports.js";
import { collectGarbage, openJob } from "./running.js";

const LOOK_MS = 1000; // while something runs

export async function view({ ask, signal, refresh, keepUp }) {
  const { jobs } = await ask("/v1/jobs");
  signal.throwIfAborted();
  const head = h("div", { class: "title" }, h("h1", {}, "Jobs"), h("div", { class: "controls" },
    h("button", { type: "button", onclick: () => collectGarbage(refresh) }, "Collect garbage…")));
  if (!jobs.length) {
    return [head, h("section", { class: "card" }, placeholder("No job has run lately",
      "Deletions of much, garbage collections and work on tiers appear here while they run, and for an hour after; a restart of the service forgets them."))];
  }
  const lines = new Map(jobs.map((job) => [job.job, line(job)]));
  if (jobs.some(isRunning)) {
    keepUp();
    look(lines, ask, signal, refresh);
  }
  return [head, h("section", { class: "card" }, table("Jobs", [
    ["job", ({ job }) => h("button", { type: "button", class: "plain", "data-key": job.job, onclick: () => openJob(job.job, refresh) }, nameOf(job))],
    ["about", ({ job }) => aboutOf(job)],
    ["asked for by", ({ job }) => whoseOf(job)],
    ["at", ({ job }) => clock(1000 * job.created_s)],
    ["state", ({ state }) => state],
    ["progress", ({ progress }) => progress],
    ["result", ({ result }) => result],
  ], [...lines.values()]))];
}

// What changes while a job runs is changed in place, so that nobody's click or focus is lost.
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

async function look(lines, ask, signal, refresh) {
  for (;;) {
    await new Promise((done) => { setTimeout(done, LOOK_MS); });
    if (signal.aborted) return;
    if (document.hidden) continue;
    let jobs;
    try { ({ jobs } = await ask("/v1/jobs")); } catch { jobs = []; }
    if (signal.aborted) return;
    const isSame = jobs.length === lines.size && jobs.every(({ job }) => lines.has(job));
    if (!isSame || !jobs.some(isRunning)) { // others, no answer, or nothing more to wait for: all of it anew
      refresh();
      return;
    }
    for (const job of jobs) lines.get(job.job).update(job);
  }
}
