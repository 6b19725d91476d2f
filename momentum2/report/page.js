"use strict";
// Theme, the choice of a run, curves, and (when served) the refreshing of all that.
const byId = (id) => document.getElementById(id);
const DATA = JSON.parse(byId("data").textContent);
const RUN_COLORS = ["#3b82d6", "#e07b1a", "#2fa36b", "#c8518f", "#8a6fd1", "#b0872b", "#1fa3b5", "#d0473f"];
const runColor = (i) => RUN_COLORS[i % RUN_COLORS.length];
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Plotly reads some markup in its texts; ours are never markup.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
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

// ---- curves
const columns = () => (innerWidth >= 1000 ? 3 : innerWidth >= 640 ? 2 : 1);
function draw(id, panels) {
  const present = panels.filter((panel) => DATA.runs.some((run) => run.series[panel.metric]));
  const host = byId(id);
  if (typeof Plotly === "undefined") return;
  if (!present.length) { host.textContent = "Nothing has been logged yet."; return; }
  if (!host.classList.contains("js-plotly-plot")) host.textContent = "";
  const wide = Math.min(columns(), present.length), rows = Math.ceil(present.length / wide);
  const axis = byId("axis").value, text = variable("--text"), soft = variable("--soft"), line = variable("--line");
  const several = DATA.runs.length > 1, gapX = wide > 1 ? 0.07 : 0, rowHeight = 210, height = rows * rowHeight + (several ? 90 : 50);
  const layout = {
    height, margin: { l: 48, r: 12, t: several ? 60 : 34, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: text, size: 12, family: "system-ui, sans-serif" }, showlegend: several, hovermode: "x",
    legend: { orientation: "h", y: 1 + 34 / (rows * rowHeight), yanchor: "bottom", x: 0 }, uirevision: axis + byId("range").value,
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", annotations: [], shapes: [],
    modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: text },
    hoverlabel: { bgcolor: variable("--back"), bordercolor: line, font: { color: text } },
  };
  const traces = [], range = shownRange(axis);
  present.forEach((panel, p) => {
    const n = p ? String(p + 1) : "", column = p % wide, row = Math.floor(p / wide), gapY = 62 / (rows * rowHeight);
    const x0 = column * (1 + gapX) / wide, x1 = x0 + (1 + gapX) / wide - gapX;
    const y1 = 1 - row * (1 + gapY) / rows, y0 = y1 - (1 + gapY) / rows + gapY;
    layout["xaxis" + n] = { domain: [x0, x1], anchor: "y" + n, gridcolor: line, linecolor: line, zeroline: false, range: range.slice(), ...(p ? { matches: "x" } : {}) };
    layout["yaxis" + n] = { domain: [Math.max(0, y0), y1], anchor: "x" + n, gridcolor: line, linecolor: line, zeroline: false, nticks: 5 };
    layout.annotations.push({ text: "<b>" + plain(panel.title) + "</b> <span style='color:" + soft + "'>" + plain(panel.hint) + "</span>", font: { size: 12 },
      xref: "paper", yref: "paper", x: x0, y: y1, xanchor: "left", yanchor: "bottom", showarrow: false });
    DATA.runs.forEach((run, r) => {
      const series = run.series[panel.metric];
      if (series) traces.push({ type: "scatter", mode: series.value.length < 40 ? "lines+markers" : "lines", x: series[axis], y: series.value,
        name: plain(run.name), legendgroup: String(r), showlegend: several && p === firstPanelOf(run, present), xaxis: "x" + n, yaxis: "y" + n,
        line: { color: runColor(r), width: 1.6 }, marker: { size: 4 }, hoverlabel: { namelength: 24 }, hoverinfo: several ? "x+y+name" : "x+y" });
      for (const [metric, words] of panel.floors) {
        const floor = run.series[metric];
        if (floor) traces.push({ type: "scatter", mode: "lines", x: floor[axis], y: floor.value, name: plain(words), showlegend: false,
          xaxis: "x" + n, yaxis: "y" + n, line: { color: several ? runColor(r) : soft, width: 1, dash: "dot" }, hoverlabel: { namelength: 24 }, hoverinfo: "x+y+name" });
      }
      if (id === "health-plot") markAlarms(layout, run, r, axis, n);
    });
  });
  Plotly.react(host, traces, layout, { responsive: true, displaylogo: false, 
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] });
}
const firstPanelOf = (run, panels) => panels.findIndex((panel) => run.series[panel.metric]);
function shownRange(axis) {
  let end = 0;
  DATA.runs.forEach((run) => Object.values(run.series).forEach((s) => { end = Math.max(end, s[axis][s[axis].length - 1] || 0); }));
  return [end * (1 - Number(byId("range").value)), end * 1.02 || 1];
}
const MOST_LINES = 50, MOST_WORDS = 8, LEVELS = 4;
function markAlarms(layout, run, r, axis, n) {
  for (const alarm of run.alarms.slice(0, MOST_LINES)) {
    layout.shapes.push({ type: "line", xref: "x" + n, yref: "y" + n + " domain", x0: alarm[axis], x1: alarm[axis], y0: 0, y1: 1,
      line: { color: DATA.runs.length > 1 ? runColor(r) : variable("--warn"), width: 1, dash: "dot" } });
  }
}
function inShort(sentence) {
  const words = sentence.replace(/^Step \d+: /, "").split(/[:;]/)[0], most = innerWidth < 640 ? 20 : 48;
  return plain(words.length > most ? words.slice(0, most - 1) + "…" : words);
}
function drawAlarms() {
  const host = byId("alarm-plot"), axis = byId("axis").value, range = shownRange(axis), soft = variable("--soft");
  const all = DATA.runs.flatMap((run, r) => run.alarms.map((alarm) => ({ alarm, r })));
  host.hidden = !all.length || typeof Plotly === "undefined";
  if (host.hidden) return;
  const trace = {
    type: "scatter", mode: "markers+text", hoverinfo: "text", cliponaxis: false, x: all.map((a) => a.alarm[axis]), y: all.map((_, i) => -(i % LEVELS)),
    text: all.map((a, i) => (i < MOST_WORDS ? "  " + inShort(a.alarm.text) + "  " : "")), hovertext: all.map((a) => plain(a.alarm.text)),
    textposition: all.map((a) => (a.alarm[axis] < (range[0] + range[1]) / 2 ? "middle right" : "middle left")),
    textfont: { color: variable("--warn"), size: 12 }, marker: { symbol: "triangle-up", size: 9, color: all.map((a) => (DATA.runs.length > 1 ? runColor(a.r) : variable("--warn"))) },
  };
  const levels = Math.min(LEVELS, all.length);
  Plotly.react(host, [trace], { height: 50 + 22 * levels, margin: { l: 48, r: 12, t: 6, b: 30 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: variable("--text"), size: 12, family: "system-ui, sans-serif" }, dragmode: false, hoverlabel: { bgcolor: variable("--back"), font: { color: variable("--text") } },
    xaxis: { range, linecolor: soft, showgrid: false, zeroline: false, fixedrange: true, showline: true }, yaxis: { visible: false, range: [0.6 - levels, 0.6], fixedrange: true } },
    { responsive: true, displayModeBar: false });
}
function drawAll() {
  draw("curves-plot", DATA.curves);
  draw("health-plot", DATA.health);
  drawAlarms();
  document.querySelectorAll("[data-color]").forEach((card) => card.style.setProperty("--run", runColor(Number(card.dataset.color))));
}
byId("axis").addEventListener("change", drawAll);
byId("range").addEventListener("change", drawAll);
let drawnColumns = columns();
addEventListener("resize", () => { if (columns() !== drawnColumns) { drawnColumns = columns(); drawAll(); } });

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
