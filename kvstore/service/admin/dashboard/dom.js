// Elements and words. Text always goes in as text: nothing here takes HTML.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const badge = (text, kind = "") => h("span", { class: `badge ${kind}` }, text);

export function placeholder(strong, ...rest) {
  return h("div", { class: "placeholder" }, h("strong", {}, strong), ...rest.map((text) => h("span", {}, text)));
}

/** Instead of an empty list, while the catalog may lack records. */
export const incomplete = () => placeholder("The catalog lists nothing", "It may lack records that are stored, until a service has added them.");

export const loading = () => h("div", { class: "card", "aria-busy": "true" }, placeholder("Loading…"));

// columns: [title, cell of a row, is it a number]
export function table(caption, columns, rows) {
  const cell = (row, [title, of, isNumber]) => h("td", { class: isNumber ? "num" : "", "data-label": title }, h("span", {}, of(row)));
  return h("div", { class: "scroll" }, h("table", { class: "cards", "aria-label": caption },
    h("thead", {}, h("tr", {}, columns.map(([title, , isNumber]) => h("th", { scope: "col", class: isNumber ? "num" : "" }, title)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((column) => cell(row, column)))))));
}

export function facts(pairs) {
  return h("dl", {}, pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value) {
  if (value === null || value === undefined) return "not known";
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

export const count = (value) => (value === null || value === undefined ? "not known" : Math.round(value).toLocaleString("en"));
export const share = (part, whole) => (whole ? `${(100 * part / whole).toFixed(part === whole || !part ? 0 : 1)} %` : "–");
export const short = (hex) => `${hex.slice(0, 12)}…`;
export const nameOf = ({ name, namespace }) => `${name || "(description lost)"} · ${namespace.slice(0, 8)}`;
const DETAIL = { error: ": ", reason: ": ", seen: ", got " };
/** The text of an error with its details, `name=value`, in words, as the command line shows it. */
export const inWords = (text) => text.replace(/ ([a-z_]+)=(?=\S)/g, (_, name) => DETAIL[name] ?? `, ${name.replaceAll("_", " ")} `);
export const sum = (values) => values.reduce((total, value) => total + value, 0);

export function ago(seconds) {
  const left = Math.max(0, Date.now() / 1000 - seconds);
  return left < 90 ? `${Math.round(left)} s ago` : `${duration(left)} ago`;
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export const clock = (iso) => new Date(iso).toLocaleString("en-GB", { month: "short", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit" });

export function say(text) {
  const place = document.getElementById("said");
  place.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { place.textContent = ""; }, 6000);
}

// A dialog that is removed when it is closed. `fill` gets a function that closes it.
export function dialog(title, fill) {
  const heading = h("h2", { id: "dialog-title", tabindex: "-1", autofocus: true }, title);
  const box = h("dialog", { "aria-labelledby": "dialog-title" }, heading);
  const close = () => box.close();
  box.addEventListener("close", () => box.remove());
  box.append(...[fill(close, box)].flat());
  document.body.append(box);
  box.showModal();
  return box;
}
