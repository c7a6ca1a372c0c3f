// Charts, drawn by a library that is loaded with the first one.

import { bytes, h, placeholder, sum } from "./dom.js";

let library;

function load() {
  const address = document.documentElement.dataset.charts;
  library ??= address
    ? import(address).then(() => globalThis.Chart)
    : Promise.reject(new Error("no chart library: pip install 'kvstore-vllm[admin]'"));
  return library;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const drawn = new Set();

export function forgetGraphs() {
  for (const chart of drawn) chart.destroy();
  drawn.clear();
}

// series: [{ label, values, stack, hasGaps }]; at: seconds since the epoch; write: a value as text. Where a value is null
// the line continues to the next one, or, with hasGaps, stops.
export function graph(title, { at, series, kind = "line", write, max, empty }) {
  const card = h("section", { class: "card" }, h("h2", {}, title));
  if (!series.some(({ values }) => values.some((value) => value))) {
    card.append(placeholder("Nothing to show yet", empty));
    return card;
  }
  const last = ({ values }) => values.findLast((value) => value !== null);
  const summary = series.map((one) => `${one.label} ${last(one) === undefined ? "not known" : write(last(one))}`).join(", ");
  const canvas = h("canvas", { role: "img", "aria-label": `${title}; last: ${summary}` });
  const plot = h("div", { class: "plot" }, canvas);
  card.append(plot, numbers(title, at, series, write));
  load().then((Chart) => {
    requestAnimationFrame(() => { // by then the card is on the page, or was removed
      if (!canvas.isConnected) return;
      drawn.add(new Chart(canvas, options(at, series, kind, write, max)));
      colourGraphs();
    });
  }, (error) => plot.replaceChildren(placeholder("The chart cannot be drawn", error.message)));
  return card;
}

// Called again when the colours of the page change.
export function colourGraphs() {
  for (const chart of drawn) {
    const [text, line] = [colour("--quiet"), colour("--line")];
    chart.data.datasets.forEach((dataset, index) => {
      const own = colour(`--series-${index % 6 + 1}`);
      dataset.borderColor = own;
      dataset.backgroundColor = dataset.stack ? own : `${own}33`;
    });
    const { x, y } = chart.options.scales;
    x.ticks.color = y.ticks.color = chart.options.plugins.legend.labels.color = text;
    x.border.color = y.grid.color = line;
    chart.update();
  }
}

// A line of one value between two gaps is invisible, so it gets a point.
const isAlone = (values, step) => (values[step - 1] ?? null) === null && (values[step + 1] ?? null) === null;

function options(at, series, kind, write, max) {
  const datasets = series.map(({ label, values, stack, hasGaps }) => ({
    label, stack, borderWidth: kind === "bar" ? 0 : 2, fill: kind === "line" && Boolean(stack),
    pointRadius: hasGaps ? ({ dataIndex: step }) => (isAlone(values, step) ? 2 : 0) : 0, pointHitRadius: 12, spanGaps: !hasGaps, tension: 0.15,
    data: values.map((value, step) => ({ x: at[step] * 1000, y: value })),
  }));
  const isStacked = series.some(({ stack }) => stack);
  const x = {
    type: "time", stacked: isStacked, offset: kind === "bar", grid: { display: false }, border: {},
    min: at[0] * 1000, max: at.at(-1) * 1000,
    time: { tooltipFormat: "HH:mm:ss", displayFormats: { minute: "HH:mm", hour: "HH:mm", second: "HH:mm:ss" } },
    ticks: { maxRotation: 0, autoSkipPadding: 24 },
  };
  const highest = Math.max(...at.map((_, step) => sum(series.map(({ values }) => values[step] ?? 0))));
  const stepSize = write === bytes ? 2 ** Math.ceil(Math.log2(highest / 5)) : undefined; // powers of two for bytes
  const y = { stacked: isStacked, beginAtZero: true, max, grid: {}, border: { display: false },
    ticks: { maxTicksLimit: 6, stepSize, precision: 0, callback: (value) => write(value) } };
  return {
    type: kind, data: { datasets },
    options: {
      animation: false, responsive: true, maintainAspectRatio: false, interaction: { mode: "index", intersect: false },
      scales: { x, y },
      plugins: {
        legend: { position: "bottom", labels: { boxWidth: 12, boxHeight: 12 } },
        tooltip: { callbacks: { label: (item) => `${item.dataset.label}: ${write(item.parsed.y)}` } },
      },
    },
  };
}

// The values as a table, for readers who cannot see a chart.
function numbers(title, at, series, write) {
  const rows = at.map((seconds, step) => h("tr", {},
    h("td", {}, new Date(seconds * 1000).toLocaleTimeString("en-GB")),
    series.map(({ values }) => h("td", { class: "num" }, values[step] === null ? "–" : write(values[step])))));
  return h("details", {}, h("summary", {}, "As numbers"), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, as numbers` },
    h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "until"),
      series.map(({ label }) => h("th", { scope: "col", class: "num" }, label)))), h("tbody", {}, rows.reverse()))));
}
