// A job and its result, in words and tables; docs/admin.md has the fields.

import { badge, bytes, count, facts, h, inWords, short, sum, table } from "./dom.js";

const KINDS = { deletion: "deletion", gc: "garbage collection", verify: "verification", reindex: "reindex", drain: "drain" };
const STATES = { running: ["running", ""], done: ["done", "good"], failed: ["failed", "bad"], cancelled: ["cancelled", "warn"],
  interrupted: ["interrupted by a restart", "warn"] };
const GARBAGE = { retired: "of retired weights", incomplete: "incomplete", unfinished: "interrupted deletions", orphans: "not in the catalog" };

export const isRunning = ({ state }) => state === "running";
export const stateOf = ({ state }) => STATES[state];
export const nameOf = ({ kind, is_dry_run: isDry }) => `${KINDS[kind] ?? kind}${isDry ? ", dry run" : ""}`;
export const whoseOf = ({ tenant }) => (tenant === null ? "an operator" : tenant || "no tenant");
export const aboutOf = ({ about }) => Object.entries(about).map(([what, of]) => `${what} ${of.length > 20 ? short(of) : of}`).join(", ") || "everything";

const amount = (unit, value) => (unit === "bytes" ? bytes(value) : count(value));

export function progressOf(job) {
  const { done, total, unit } = job.progress;
  const [isKnown, isEnded] = [total !== null, !isRunning(job)];
  const words = unit === "bytes" ? bytes(done) : `${count(done)} ${unit}`;
  const bar = isKnown ? { max: Math.max(total, 1), value: total ? done : Number(isEnded) } : isEnded ? null : { max: 1 }; // without a value the bar moves and shows no share
  return [bar && h("progress", { ...bar, "aria-label": `progress of the ${nameOf(job)}` }),
    h("span", { class: "small quiet" }, isKnown ? `${amount(unit, done)} of ${amount(unit, total)}${unit === "bytes" ? "" : ` ${unit}`}` : words)].filter(Boolean);
}

// [what, tier, how much], of a deletion or of garbage
export function goneOf({ kind, report }) {
  const parts = kind === "gc" ? Object.entries(GARBAGE).map(([name, words]) => [words, report[name]]) : [["", report.by_tier]];
  return parts.flatMap(([words, tiers]) => Object.entries(tiers ?? {}).map(([tier, held]) => [words, tier, held]));
}

export const amounts = (gone) => {
  const tiers = [...new Set(gone.map(([, tier]) => tier))];
  return tiers.map((name) => `${count(sum(gone.filter(([, tier]) => tier === name).map(([, , held]) => held.num_records)))} records from ${name}`).join(", ");
};

export function resultOf(job) {
  if (job.error) return inWords(job.again ? `${job.error}; start it again: ${job.again}` : job.error);
  const { kind, report, is_dry_run: isDry } = job;
  if (kind === "deletion" || kind === "gc") {
    const words = amounts(goneOf(job));
    if (!words) return isRunning(job) ? "nothing so far" : isDry ? "nothing to delete" : "nothing deleted";
    return isDry ? `would delete: ${words}` : `deleted: ${words}`;
  }
  if (kind === "verify" && "num_whole" in report) {
    return [`${count(report.num_whole)} whole`, `${count(report.num_bad)} corrupt`, report.num_unread && `${count(report.num_unread)} not read`].filter(Boolean).join(", ");
  }
  if (kind === "reindex" && Object.keys(report).length) return Object.entries(report).map(([level, one]) => `${level}: ${count(one.num_records)} records listed, ${count(one.num_skipped)} already in the catalog`).join("; ");
  if (kind === "drain" && "num_records" in report) return `${count(report.num_records)} records written`;
  return isRunning(job) ? "nothing so far" : "–";
}

// The report in full.
export function reportOf(job) {
  const { kind, report } = job;
  if (kind === "deletion" || kind === "gc") return garbage(job);
  if (kind === "reindex") return Object.entries(report).flatMap(([level, one]) => [h("h3", {}, level), ...plainReport(one)]);
  return plainReport(report);
}

function plainReport(report) {
  const plain = Object.entries(report).filter(([, value]) => typeof value !== "object");
  const lists = Object.entries(report).filter(([, value]) => Array.isArray(value) && value.length);
  return [plain.length ? facts(plain.map(([name, value]) => [WORDS[name] ?? name, name.endsWith("bytes") ? bytes(value) : count(value)])) : null,
    ...lists.map(([name, values]) => listed(WORDS[name] ?? name, values))].filter(Boolean);
}

const WORDS = {
  num_records: "records", num_bytes: "bytes", num_whole: "whole", num_bad: "corrupt, quarantined", num_gone: "deleted during the job", num_unread: "not read",
  num_skipped: "already in the catalog", num_stale: "removed from the catalog", bad: "Corrupt records", unread: "Records that could not be read", namespaces: "Namespaces", unknown_namespaces: "Namespaces without a description",
};

function listed(title, values) {
  const text = (value) => (typeof value === "object" ? Object.values(value).join(": ") : String(value));
  return h("div", {}, h("h3", {}, title), h("ul", { class: "small mono" }, values.slice(0, 100).map((value) => h("li", {}, text(value)))));
}

// What a deletion or a garbage collection deletes.
export function garbage(job) {
  const gone = goneOf(job);
  const { num_pinned: pinned, notes = [], undescribed_namespaces: undescribed = [] } = job.report;
  return [
    gone.length ? table("By tier", [...(job.kind === "gc" ? [["what", ([words]) => words]] : []), ["tier", ([, tier]) => tier],
      ["prefixes", ([, , held]) => count(held.num_boundaries), true], ["records", ([, , held]) => count(held.num_records), true],
      ["bytes", ([, , held]) => bytes(held.num_bytes), true]], gone) : h("p", {}, isRunning(job) ? "Nothing found so far." : "Nothing of that kind is stored."),
    pinned > 0 && h("p", {}, badge(`${count(pinned)} stay`, "warn"), " A pin is on them, or on a prefix that continues them."),
    ...notes.map((note) => h("p", { class: "quiet" }, note)),
    undescribed.length > 0 && h("p", { class: "quiet" }, `${count(undescribed.length)} namespaces were skipped: they have no description.`),
  ].filter(Boolean);
}
