"use strict";
// Draws the curves of the table #curves into the figures of #charts. One cursor is shared by all charts.
const data = JSON.parse(document.getElementById("curves").textContent);
const HEIGHT = 220, LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 26, COLORS = 8;
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const view = { axis: "step", log: false, hidden: new Set(), at: null };
const NAMES = { step: "step", tokens: "tokens", seconds: "training time" };
const charts = [];

function made(tag, attributes = {}, text = "") {
  const svg = ["svg", "path", "line", "text", "circle"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

function number(value) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(4) + " G";
  if (size >= 1e6) return (value / 1e6).toPrecision(4) + " M";
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  if (size && size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(5)));
}

function place(value) {
  if (view.axis !== "seconds") return number(value);
  const whole = Math.round(value), two = part => String(part).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

function ticks(low, high, count, log) {
  if (log) {
    for (const marks of [[1], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9]]) {
      const values = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
        for (const mark of marks) {
          const value = mark * 10 ** power;
          if (value >= low && value <= high) values.push(value);
        }
      if (values.length > 1) return values.filter((_, index) => index % Math.ceil(values.length / count) === 0);
    }
  }
  const rough = (high - low) / count || Math.abs(low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= rough * 0.999);
  const values = [];
  for (let index = Math.ceil(low / step); index * step <= high * (1 + 1e-12) && values.length < 50; index++)
    values.push(index * step);
  return values;
}

// The lines of a chart that are shown: places on the axis, values, colour and dash.
function linesOf(chart) {
  const lines = [];
  data.runs.forEach((run, index) => {
    if (chart.run === null ? view.hidden.has(index) : chart.run !== index) return;
    chart.metrics.forEach((metric, order) => {
      const curve = run.curves[metric];
      if (!curve || !run[view.axis]) return;
      const several = chart.metrics.length > 1;
      const label = chart.run !== null ? metric.slice(metric.indexOf("/") + 1)
        : [data.runs.length > 1 ? run.name : "", several || data.runs.length === 1 ? metric.replaceAll("_", " ") : ""]
          .filter(Boolean).join(": ");
      const share = order / Math.max(1, chart.metrics.length - 1);
      lines.push({
        label, xs: curve[0].map(row => run[view.axis][row]), ys: curve[1], dotted: metric.startsWith("validation_"),
        color: chart.run !== null ? `hsl(${210 + 180 * share} 65% 50%)` : `var(--c${index % COLORS})`,
        dash: chart.run !== null ? "" : DASHES[(Math.floor(index / COLORS) + order) % DASHES.length],
      });
    });
  });
  return lines;
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// A curve, with a gap at each value that is not finite, or not above 0 on a log scale.
function pathOf(line, toX, toY) {
  let path = "", open = false;
  line.ys.forEach((y, index) => {
    const shown = y !== null && (!view.log || y > 0);
    if (shown) path += `${open ? "L" : "M"}${toX(line.xs[index]).toFixed(1)} ${toY(y).toFixed(1)}${open ? "" : "h0"}`;
    open = shown;
  });
  return path;
}

function draw(chart) {
  const width = chart.box.clientWidth;
  if (!width) return;
  const lines = chart.lines = linesOf(chart), svg = chart.svg;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const line of lines) line.ys.forEach((y, index) => {
    x0 = Math.min(x0, line.xs[index]); x1 = Math.max(x1, line.xs[index]);
    if (y !== null && (!view.log || y > 0)) { y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
  });
  chart.empty = !(y1 >= y0);
  if (chart.empty) {
    const why = view.log ? "no value above 0 to show on a log scale" : "nothing to show";
    svg.append(made("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" },
      data.runs.some(run => run[view.axis]) ? why : `${NAMES[view.axis]} is not recorded`));
    return read(chart);
  }
  const flat = y1 === y0;
  if (flat) { y0 -= view.log ? y0 / 2 : Math.abs(y0) / 2 || 1; y1 += Math.abs(y1) / 2 || 1; }
  const scale = value => view.log ? Math.log(value) : value, span = scale(y1) - scale(y0);
  const pad = flat ? 0 : 0.04 * span, inner = HEIGHT - TOP - BOTTOM;
  chart.toX = x => LEFT + (x1 === x0 ? 0.5 : (x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
  chart.toY = y => TOP + inner * (1 - (scale(y) - scale(y0) + pad) / (span + 2 * pad));
  chart.fromX = pixel => x0 + (pixel - LEFT) / (width - LEFT - RIGHT) * (x1 - x0);
  for (const value of ticks(y0, y1, 6, view.log)) {
    const y = chart.toY(value).toFixed(1);
    svg.append(made("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y, class: "grid" }),
      made("text", { x: LEFT - 6, y, dy: "0.35em", "text-anchor": "end" }, number(value)));
  }
  for (const value of x1 === x0 ? [x0] : ticks(x0, x1, Math.max(3, Math.floor(width / 110)), false))
    svg.append(made("text", { x: Math.min(chart.toX(value), width - 4).toFixed(1), y: HEIGHT - 6,
      "text-anchor": chart.toX(value) > width - 40 ? "end" : "middle" }, place(value)));
  for (const line of lines) {
    const style = `stroke: ${line.color}`;
    svg.append(made("path", { d: pathOf(line, chart.toX, chart.toY), style, "stroke-dasharray": line.dash }));
    if (line.dotted && line.xs.length < 60) line.ys.forEach((y, index) => {
      if (y !== null && (!view.log || y > 0)) svg.append(made("circle",
        { cx: chart.toX(line.xs[index]).toFixed(1), cy: chart.toY(y).toFixed(1), r: 3, style: `fill: ${line.color}` }));
    });
  }
  chart.cursor = made("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor" });
  svg.append(chart.cursor);
  read(chart);
}

// Show the values at the cursor, without one the last values.
function read(chart) {
  const values = chart.lines.map(line => {
    const index = view.at === null ? line.xs.length - 1 : nearest(line.xs, view.at);
    return { line, x: line.xs[index], y: line.ys[index] };
  });
  const unit = chart.unit && ` ${chart.unit}`, away = view.at !== null && values.length;
  const x = values.length ? values[0].x : null;
  chart.where.textContent = away ? `at ${NAMES[view.axis]} ${place(x)}` : "last values";
  if (chart.cursor) {
    chart.cursor.style.display = away && !chart.empty ? "" : "none";
    if (away && !chart.empty) for (const end of ["x1", "x2"]) chart.cursor.setAttribute(end, chart.toX(x).toFixed(1));
  }
  const items = chart.run === null ? values.map(value => [value, value.line.label]) : summaryOf(chart, values);
  chart.legend.replaceChildren(...items.map(([value, label]) => {
    const item = made("li"), swatch = made("svg", { viewBox: "0 0 22 10", class: "swatch", "aria-hidden": "true" });
    swatch.append(made("path", { d: "M1 5H21", style: `stroke: ${value.line.color}`, "stroke-dasharray": value.line.dash }));
    // Runs need not end together, and curves have points of their own.
    const own = value.x !== x ? ` (${place(value.x)})` : "";
    item.append(swatch, made("span", {}, label), made("b", {}, number(value.y) + unit + own));
    return item;
  }));
  chart.box.setAttribute("aria-valuetext", [chart.where.textContent, ...[...chart.legend.children]
    .map(item => [...item.children].slice(1).map(part => part.textContent).join(" "))].join(", "));
}

// A chart of layers has too many lines for a legend: the highest, the lowest and the one below the pointer.
function summaryOf(chart, values) {
  const finite = values.filter(value => value.y !== null).sort((a, b) => b.y - a.y);
  if (!finite.length) return [];
  const items = [[finite[0], `highest: ${finite[0].line.label}`]];
  if (finite.length > 1) items.push([finite.at(-1), `lowest: ${finite.at(-1).line.label}`]);
  if (chart.pointed !== null && chart.toY) {
    const away = value => !view.log || value.y > 0 ? Math.abs(chart.toY(value.y) - chart.pointed) : Infinity;
    const near = finite.reduce((best, value) => away(value) < away(best) ? value : best);
    items.push([near, `pointed at: ${near.line.label}`]);
  }
  return items;
}

let due = false;
function move(x) {
  view.at = x;
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; charts.forEach(read); });
}

function onKey(event, chart) {
  const line = chart.lines[0], steps = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10 };
  if (!line) return;
  let index = view.at === null ? line.xs.length - 1 : nearest(line.xs, view.at);
  if (event.key in steps) index += steps[event.key] * (event.shiftKey ? 10 : 1);
  else if (event.key === "Home") index = 0;
  else if (event.key === "End") index = line.xs.length - 1;
  else if (event.key !== "Escape") return;
  event.preventDefault();
  move(event.key === "Escape" ? null : line.xs[Math.max(0, Math.min(line.xs.length - 1, index))]);
}

for (const description of data.charts) {
  const figure = made("figure"), caption = made("figcaption"), title = made("strong", {}, description.title);
  const where = made("span", { class: "pale" }), legend = made("ul", { class: "legend" });
  if (description.run !== null && data.runs.length > 1) title.append(`: ${data.runs[description.run].name}`);
  const box = made("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": `${title.textContent}: cursor`,
    "aria-valuenow": "0" });
  const chart = { ...description, svg: made("svg", { "aria-hidden": "true" }), box, where, legend, lines: [], pointed: null };
  caption.append(title, where);
  box.append(chart.svg);
  figure.append(caption, box, legend);
  document.getElementById("charts").append(figure);
  box.addEventListener("pointermove", event => {
    const frame = box.getBoundingClientRect();
    chart.pointed = event.clientY - frame.top;
    if (!chart.empty) move(chart.fromX(event.clientX - frame.left));
  });
  box.addEventListener("pointerleave", () => { chart.pointed = null; move(null); });
  box.addEventListener("keydown", event => onKey(event, chart));
  charts.push(chart);
}
const drawAll = () => charts.forEach(draw);
new ResizeObserver(drawAll).observe(document.getElementById("charts"));
for (const input of document.querySelectorAll("#tools input")) input.addEventListener("change", () => {
  if (input.name === "axis") { view.axis = input.value; view.at = null; }
  else if (input.name === "log") view.log = input.checked;
  else if (input.checked) view.hidden.delete(Number(input.value)); else view.hidden.add(Number(input.value));
  drawAll();
});
// A reload of the page keeps what was chosen, but the view begins anew.
for (const input of document.querySelectorAll("#tools input")) input.checked = input.defaultChecked;
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => { part.open = true; }));
