"use strict";
// Theme, the choice of a run, curves, and (when served) the refreshing of all that.
const byId = (id) => document.getElementById(id);
const DATA = JSON.parse(byId("data").textContent);
const RUN_COLORS = ["#3b82d6", "#e07b1a", "#2fa36b", "#c8518f", "#8a6fd1", "#b0872b", "#1fa3b5", "#d0473f"];
const runColor = (i) => RUN_COLORS[i % RUN_COLORS.length];
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const themeListeners = [];

// ---- theme
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (systemDark.matches ? "dark" : "light")) === "dark";
function themeChanged() {
  byId("theme").textContent = isDark() ? "Light theme" : "Dark theme";
  themeListeners.forEach((listener) => listener());
}
byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  themeChanged();
});
systemDark.addEventListener("change", themeChanged);
let themeBeforePrint = null;
addEventListener("beforeprint", () => {
  themeBeforePrint = document.documentElement.dataset.theme || "";
  document.documentElement.dataset.theme = "light";
  themeChanged();
});
addEventListener("afterprint", () => {
  document.documentElement.dataset.theme = themeBeforePrint;
  themeChanged();
});

// ---- which run the details are of
const runListeners = [];
function chooseRun(index) {
  document.querySelectorAll("[data-run]").forEach((part) => { part.hidden = Number(part.dataset.run) !== index; });
  runListeners.forEach((listener) => listener(index));
}

// ---- curves: one small SVG a panel, all with the same time axis
const WIDTH = 360, HEIGHT = 190, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 24;  // of a drawing, which scales with its frame
const MOST_LINES = 50, MOST_WORDS = 8, LEVELS = 4;
function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
/** About `count` round numbers from low to high. */
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((n) => n * power >= rough) || 10), found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e4) return size >= 1e6 ? +(value / 1e6).toPrecision(4) + "M" : +(value / 1e3).toPrecision(4) + "k";
  return size && size < 1e-3 ? value.toExponential(1) : String(+value.toPrecision(4));
}
/** Where the values of a panel lie, with some air; a constant lies in the middle. */
function reach(lines, range) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) line.y.forEach((y, i) => { if (y !== null && line.x[i] >= range[0]) { low = Math.min(low, y); high = Math.max(high, y); } });
  if (low > high) return [0, 1];
  const air = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low < air ? 0 : low - air, high + air];
}
function pathOf(line, toX, toY) {
  let path = "", pen = "M";
  line.y.forEach((y, i) => {
    if (y === null) { pen = "M"; return; }
    path += pen + toX(line.x[i]).toFixed(1) + " " + toY(y).toFixed(1);
    pen = "L";
  });
  return path;
}
function linesOf(panel, axis) {
  const several = DATA.runs.length > 1, found = [];
  DATA.runs.forEach((run, r) => {
    for (const [metric, words] of [[panel.metric, run.name], ...panel.floors]) {
      const series = run.series[metric];
      if (series) found.push({ x: series[axis], y: series.value, name: words, floor: metric !== panel.metric, color: several || metric === panel.metric ? runColor(r) : variable("--soft") });
    }
  });
  return found;
}
function drawPanel(panel, axis, range, withAlarms) {
  const lines = linesOf(panel, axis), [low, high] = reach(lines, range), clip = "clip-" + panel.metric;
  const toX = (x) => LEFT + (x - range[0]) / (range[1] - range[0]) * (WIDTH - LEFT - RIGHT);
  const toY = (y) => TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const figure = element("figure", "panel"), caption = element("figcaption");
  caption.append(element("strong", "", panel.title), " expected: " + panel.hint);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": panel.title });
  const frame = svg("clipPath", { id: clip });
  frame.append(svg("rect", { x: LEFT, y: 0, width: WIDTH - LEFT - RIGHT, height: HEIGHT - BOTTOM }));
  drawing.append(frame);
  for (const y of ticks(low, high, 4)) {
    drawing.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: toY(y), y2: toY(y) }), svg("text", { x: LEFT - 5, y: toY(y) + 4, "text-anchor": "end" }, short(y)));
  }
  for (const x of ticks(range[0], range[1], 4)) drawing.append(svg("text", { x: toX(x), y: HEIGHT - 8, "text-anchor": "middle" }, short(x)));
  drawing.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  const inside = svg("g", { "clip-path": `url(#${clip})` });
  if (withAlarms) DATA.runs.forEach((run, r) => run.alarms.slice(0, MOST_LINES).forEach((alarm) => {
    inside.append(svg("line", { class: "alarm", x1: toX(alarm[axis]), x2: toX(alarm[axis]), y1: TOP, y2: HEIGHT - BOTTOM, stroke: alarmColor(r) }));
  }));
  for (const line of lines) {
    inside.append(svg("path", { class: line.floor ? "curve floor" : "curve", d: pathOf(line, toX, toY), stroke: line.color }));
    const points = line.y.filter((y) => y !== null).length;
    if (!line.floor && points < 40) line.y.forEach((y, i) => { if (y !== null) inside.append(svg("circle", { cx: toX(line.x[i]), cy: toY(y), r: 2, fill: line.color })); });
  }
  drawing.append(inside);
  figure.append(caption, drawing);
  pointAt(figure, drawing, lines, axis, toX, toY, range);
  return figure;
}
/** Values of all lines at the time under the pointer, in a small box that is also read out by tapping. */
function pointAt(figure, drawing, lines, axis, toX, toY, range) {
  const rule = svg("line", { class: "rule", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }), box = element("div", "values");
  drawing.append(rule);
  box.hidden = true;
  figure.append(box);
  const leave = () => { box.hidden = true; rule.setAttribute("visibility", "hidden"); };
  drawing.addEventListener("pointerleave", leave);
  drawing.addEventListener("pointermove", (event) => {
    const place = drawing.getBoundingClientRect(), at = (event.clientX - place.left) / place.width * WIDTH;
    const time = range[0] + (at - LEFT) / (WIDTH - LEFT - RIGHT) * (range[1] - range[0]);
    const found = lines.map((line) => ({ line, i: nearest(line, time) })).filter((entry) => entry.i >= 0);
    if (!found.length) { leave(); return; }
    const first = found.reduce((a, b) => (Math.abs(a.line.x[a.i] - time) <= Math.abs(b.line.x[b.i] - time) ? a : b)), x = first.line.x[first.i];
    box.replaceChildren(element("strong", "", axis === "step" ? `step ${short(x)}` : `${short(x)} ${axis}`));
    for (const { line, i } of found) {
      const row = element("div", "", `${short(line.y[i])}${DATA.runs.length > 1 || line.floor ? "  " + line.name : ""}`);
      row.style.setProperty("--run", line.color);
      box.append(row);
    }
    rule.setAttribute("x1", toX(x));
    rule.setAttribute("x2", toX(x));
    rule.setAttribute("visibility", "visible");
    box.hidden = false;
    box.style.left = at > WIDTH / 2 ? "" : "calc(" + (at / WIDTH * 100).toFixed(1) + "% + 12px)";
    box.style.right = at > WIDTH / 2 ? "calc(" + ((1 - at / WIDTH) * 100).toFixed(1) + "% + 12px)" : "";
  });
}
function nearest(line, time) {
  let best = -1;
  line.x.forEach((x, i) => { if (line.y[i] !== null && (best < 0 || Math.abs(x - time) < Math.abs(line.x[best] - time))) best = i; });
  return best;
}
function draw(id, panels) {
  const present = panels.filter((panel) => DATA.runs.some((run) => run.series[panel.metric]));
  const host = byId(id), axis = byId("axis").value, range = shownRange(axis);
  if (!present.length) { host.textContent = "Nothing has been logged yet."; return; }
  host.replaceChildren(...present.map((panel) => drawPanel(panel, axis, range, id === "health-plot")));
  if (DATA.runs.length > 1 && id === "curves-plot") {
    const legend = element("ul", "runs");
    DATA.runs.forEach((run, r) => { const item = element("li", "", run.name); item.style.setProperty("--run", runColor(r)); legend.append(item); });
    host.prepend(legend);
  }
}
function shownRange(axis) {
  let end = 0;
  DATA.runs.forEach((run) => Object.values(run.series).forEach((s) => { end = Math.max(end, s[axis][s[axis].length - 1] || 0); }));
  return [end * (1 - Number(byId("range").value)), end * 1.02 || 1];
}
const alarmColor = (r) => (DATA.runs.length > 1 ? runColor(r) : variable("--warn"));
function inShort(sentence) {
  const words = sentence.replace(/^Step \d+: /, "").split(/[:;]/)[0], most = innerWidth < 640 ? 20 : 48;
  return words.length > most ? words.slice(0, most - 1) + "…" : words;
}
function drawAlarms() {
  const host = byId("alarm-plot"), axis = byId("axis").value, range = shownRange(axis);
  const all = DATA.runs.flatMap((run, r) => run.alarms.map((alarm) => ({ alarm, r })));
  host.hidden = !all.length;
  if (host.hidden) return;
  const levels = Math.min(LEVELS, all.length), width = Math.max(320, host.clientWidth || 960), height = 30 + 22 * levels;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%" });
  const toX = (x) => LEFT + (x - range[0]) / (range[1] - range[0]) * (width - LEFT - RIGHT);
  drawing.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height - 22, y2: height - 22 }));
  for (const x of ticks(range[0], range[1], 6)) drawing.append(svg("text", { x: toX(x), y: height - 6, "text-anchor": "middle" }, short(x)));
  all.forEach(({ alarm, r }, i) => {
    if (alarm[axis] < range[0]) return;
    const x = toX(alarm[axis]), y = 14 + 22 * (i % LEVELS), mark = svg("path", { d: `M${x} ${y - 6}l5 9h-10z`, fill: alarmColor(r) }), right = x < width / 2;
    mark.append(svg("title", {}, alarm.text));
    drawing.append(mark);
    if (i < MOST_WORDS) drawing.append(svg("text", { class: "words", x: x + (right ? 9 : -9), y: y + 3, "text-anchor": right ? "start" : "end" }, inShort(alarm.text)));
  });
  host.replaceChildren(drawing);
}
function drawAll() {
  draw("curves-plot", DATA.curves);
  draw("health-plot", DATA.health);
  drawAlarms();
  document.querySelectorAll("[data-color]").forEach((card) => card.style.setProperty("--run", runColor(Number(card.dataset.color))));
}
byId("axis").addEventListener("change", drawAll);
byId("range").addEventListener("change", drawAll);
addEventListener("resize", drawAlarms);

// ---- a page that `momentum2 watch` serves fetches what is new
async function refresh() {
  const status = byId("status");
  try {
    const answer = await fetch("live.json?seen=" + encodeURIComponent(DATA.stamp));
    if (answer.status === 200) {
      const fresh = await answer.json();
      for (const part of ["headline", "results", "values", "alarms"]) byId(part).innerHTML = fresh[part];
      Object.assign(DATA, fresh.data);
      drawAll();
    } else if (answer.status !== 204) throw new Error(await answer.text());
    status.textContent = "Live; looked at " + new Date().toLocaleTimeString();
    status.classList.remove("lost");
  } catch (error) {
    status.textContent = "Not refreshed: " + (error instanceof TypeError ? "momentum2 watch has ended." : error.message);
    status.classList.add("lost");
  }
  setTimeout(refresh, DATA.every * 1000);
}
