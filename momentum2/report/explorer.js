// The map of images and the gallery of neighbors. Names are only ever set as text.
const SPRITES = JSON.parse(byId("sprites").textContent);
const CLASS_COLORS = ["#4e79d6", "#e8842c", "#3aa655", "#d94f4a", "#9467c9", "#98694f", "#df78b8", "#8a8f99", "#b5ae22", "#22b0c2"];
const classColor = (label, count) => (count <= 10 ? CLASS_COLORS[label] : "hsl(" + ((label * 137.508) % 360).toFixed(0) + " 65% " + (label % 2 ? 45 : 60) + "%)");

const canvas = byId("map"), pen = canvas.getContext("2d"), tip = byId("tip");
let shown = null;                                  // the map of the chosen run
let selected = -1, chosen = -1, highlighted = -1;  // dot under the pointer; dot whose neighbors are shown; class
let view = { x: 0.5, y: 0.5, zoom: 1 };
const MARGIN = 16;

function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}
// A short address for each sprite: a style with the picture itself in it would be copied for every thumbnail.
const addresses = [];
function spriteAddress(sprite) {
  if (!addresses[sprite]) {
    const text = atob(SPRITES[sprite]), bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
    addresses[sprite] = URL.createObjectURL(new Blob([bytes], { type: "image/webp" }));
  }
  return addresses[sprite];
}
function thumb(index, size) {
  const element = make("span", "thumb"), scale = size / shown.side, per = shown.columns * shown.columns;
  const place = index % per, rows = Math.ceil(Math.min(per, shown.names.length - (index - place)) / shown.columns);
  element.style.cssText = "width:" + size + "px;height:" + size + "px;background-size:" + shown.columns * size + "px " + rows * size + "px;" +
    "background-position:-" + (place % shown.columns) * size + "px -" + Math.floor(place / shown.columns) * size + "px";
  element.style.backgroundImage = "url(" + spriteAddress(shown.sprites[Math.floor(index / per)]) + ")";
  if (scale >= 3) element.style.imageRendering = "pixelated";
  return element;
}
const className = (i) => (shown.labels ? shown.classes[shown.labels[i]] : "");

// ---- drawing
let width = 0, height = 0;  // of the canvas; to ask it for every dot would be slow
function measure() { width = canvas.clientWidth; height = canvas.clientHeight; }
const across = () => width - 2 * MARGIN, down = () => height - 2 * MARGIN;
const toX = (i) => MARGIN + ((shown.x[i] - view.x) * view.zoom + 0.5) * across();
const toY = (i) => MARGIN + (0.5 - (shown.y[i] - view.y) * view.zoom) * down();
// All dots are drawn once into a layer of their own; pointing at one only copies it.
const layer = document.createElement("canvas");
let waiting = false, stale = true;
function redraw(dotsToo) {
  stale ||= dotsToo;
  if (waiting || !shown) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; drawMap(); });
}
const dotRadius = () => (shown.x.length > 4000 ? 2 : 3) * Math.sqrt(view.zoom);
function drawDots(ratio) {
  layer.width = canvas.width = Math.round(width * ratio);
  layer.height = canvas.height = Math.round(height * ratio);
  const dots = layer.getContext("2d"), radius = dotRadius(), groups = shown.members.length;
  dots.scale(ratio, ratio);
  for (let pass = 0; pass < 2; pass++) {  // what is highlighted comes on top
    for (let label = 0; label < groups; label++) {
      const bright = highlighted < 0 || highlighted === label;
      if (bright !== (pass === 1)) continue;
      dots.globalAlpha = bright ? 0.8 : 0.12;
      dots.fillStyle = shown.labels ? classColor(label, groups) : variable("--accent");
      dots.beginPath();
      for (const i of shown.members[label]) {
        const x = toX(i), y = toY(i);
        if (x < -radius || y < -radius || x > width + radius || y > height + radius) continue;
        dots.moveTo(x + radius, y);
        dots.arc(x, y, radius, 0, 7);
      }
      dots.fill();
    }
  }
}
function drawMap() {
  const ratio = devicePixelRatio || 1, radius = dotRadius();
  if (stale) drawDots(ratio);
  stale = false;
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  if (layer.width && layer.height) pen.drawImage(layer, 0, 0);
  pen.scale(ratio, ratio);
  if (chosen >= 0) {
    pen.strokeStyle = variable("--soft");
    pen.lineWidth = 1;
    for (const j of shown.neighbors[chosen]) { pen.beginPath(); pen.moveTo(toX(chosen), toY(chosen)); pen.lineTo(toX(j), toY(j)); pen.stroke(); }
  }
  for (const i of [chosen, selected]) {
    if (i < 0) continue;
    pen.strokeStyle = variable("--text");
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(toX(i), toY(i), radius + 3, 0, 7);
    pen.stroke();
  }
}

// ---- choosing dots
function nearestDot(x, y, reach) {
  let best = -1, bestDistance = reach * reach;
  for (let i = 0; i < shown.x.length; i++) {
    if (highlighted >= 0 && shown.labels[i] !== highlighted) continue;
    const dx = toX(i) - x, dy = toY(i) - y, distance = dx * dx + dy * dy;
    if (distance < bestDistance) { best = i; bestDistance = distance; }
  }
  return best;
}
function select(i) {
  if (i === selected) return;
  selected = i;
  redraw(false);
  tip.hidden = i < 0;
  if (i < 0) return;
  tip.replaceChildren(thumb(i, 128), make("strong", "", className(i)), make("div", "", shown.names[i]));
  if (shown.labels && shown.predicted[i] !== shown.labels[i]) tip.append(make("div", "", "✗ neighbors say " + shown.classes[shown.predicted[i]]));
  const x = toX(i), y = toY(i);
  tip.style.left = Math.max(4, x + 14 + tip.offsetWidth > width ? x - 14 - tip.offsetWidth : x + 14) + "px";
  tip.style.top = Math.min(Math.max(4, y - tip.offsetHeight / 2), Math.max(4, height - tip.offsetHeight - 4)) + "px";
}
function speak(i) { byId("spoken").textContent = i < 0 ? "" : [className(i), shown.names[i]].filter(Boolean).join(", "); }
function choose(i) {
  chosen = i;
  redraw(false);
  drawGallery();
}
function inDirection(dx, dy) {
  if (selected < 0) return nearestDot(width / 2, height / 2, Infinity);
  let best = selected, bestCost = Infinity;
  for (let i = 0; i < shown.x.length; i++) {
    const x = toX(i) - toX(selected), y = toY(i) - toY(selected), along = x * dx + y * dy, aside = Math.abs(x * dy) + Math.abs(y * dx);
    if (i === selected || along <= 0.5 || aside > 2 * along || (highlighted >= 0 && shown.labels[i] !== highlighted)) continue;
    if (along + 2 * aside < bestCost) { best = i; bestCost = along + 2 * aside; }
  }
  return best;
}

// ---- zoom and pan
function zoom(factor) {
  const center = selected >= 0 ? selected : -1;
  view.zoom = Math.min(40, Math.max(1, view.zoom * factor));
  if (center >= 0) { view.x = shown.x[center]; view.y = shown.y[center]; }
  settle();
}
function settle() {
  const half = 0.5 / view.zoom;
  view.x = Math.min(1 - half, Math.max(half, view.x));
  view.y = Math.min(1 - half, Math.max(half, view.y));
  canvas.classList.toggle("zoomed", view.zoom > 1);
  const kept = selected;
  selected = -1;
  select(kept);
  redraw(true);
}
let dragged = null;
canvas.addEventListener("pointerdown", (event) => { dragged = { x: event.offsetX, y: event.offsetY, far: false }; });
canvas.addEventListener("pointermove", (event) => {
  if (dragged && event.buttons && view.zoom > 1) {
    const dx = event.offsetX - dragged.x, dy = event.offsetY - dragged.y;
    if (dragged.far || Math.hypot(dx, dy) > 4) {
      dragged = { x: event.offsetX, y: event.offsetY, far: true };
      view.x -= dx / across() / view.zoom;
      view.y += dy / down() / view.zoom;
      select(-1);
      settle();
    }
    return;
  }
  if (event.pointerType !== "touch") select(nearestDot(event.offsetX, event.offsetY, 24));
});
canvas.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") select(-1); });
canvas.addEventListener("click", (event) => {
  const far = dragged && dragged.far;
  dragged = null;
  if (far) return;
  const i = nearestDot(event.offsetX, event.offsetY, 32);
  select(i);
  if (i >= 0) choose(i);
});
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
canvas.addEventListener("keydown", (event) => {
  if (ARROWS[event.key]) { select(inDirection(...ARROWS[event.key])); speak(selected); }
  else if (event.key === "Enter" || event.key === " ") choose(selected);
  else if (event.key === "+" || event.key === "=") zoom(1.6);
  else if (event.key === "-") zoom(1 / 1.6);
  else if (event.key === "0") showWhole();
  else if (event.key === "Escape") select(-1);
  else return;
  event.preventDefault();
});
function showWhole() { view = { x: 0.5, y: 0.5, zoom: 1 }; settle(); }
byId("zoom-in").addEventListener("click", () => zoom(1.6));
byId("zoom-out").addEventListener("click", () => zoom(1 / 1.6));
byId("zoom-all").addEventListener("click", showWhole);

// ---- classes
function highlight(label) {
  highlighted = label;
  byId("class").value = label < 0 ? "" : String(label);
  document.querySelectorAll("#legend button").forEach((button) => button.setAttribute("aria-pressed", String(Number(button.value) === label)));
  select(-1);
  redraw(true);
}
byId("class").addEventListener("change", (event) => highlight(event.target.value === "" ? -1 : Number(event.target.value)));
const MOST_IN_LEGEND = 30;
function drawLegend() {
  const names = shown.classes || [], legend = byId("legend");
  byId("class").replaceChildren(new Option("all classes", ""), ...names.map((name, label) => new Option(name, label)));
  byId("class").parentElement.hidden = !names.length;
  legend.replaceChildren(...(names.length > MOST_IN_LEGEND ? [] : names).map((name, label) => {
    const item = make("li"), button = make("button"), dot = make("i");
    button.type = "button";
    button.value = label;
    button.setAttribute("aria-pressed", "false");
    dot.style.background = classColor(label, names.length);
    button.append(dot, make("span", "", name));
    button.addEventListener("click", () => highlight(highlighted === label ? -1 : label));
    item.append(button);
    return item;
  }));
}

// ---- gallery
function picture(i, kind) {
  const figure = make("figure", kind), sign = kind === "wrong" ? "✗ " : "", name = className(i) || shown.names[i];
  const image = thumb(i, 64);
  image.setAttribute("role", "img");
  image.setAttribute("aria-label", name + (kind === "wrong" ? ", another class" : ""));
  figure.title = shown.names[i];
  figure.append(image, make("figcaption", "", sign + name));
  return figure;
}
function galleryRow(query, kind) {
  const row = make("div", "row " + kind);
  row.tabIndex = 0;
  row.setAttribute("role", "group");
  row.setAttribute("aria-label", "Neighbors of " + shown.names[query]);
  const kindOf = (j) => (shown.labels ? (shown.labels[j] === shown.labels[query] ? "same" : "wrong") : "");
  row.append(picture(query, "query"), ...shown.neighbors[query].map((j) => picture(j, kindOf(j))));
  return row;
}
function drawGallery() {
  const rows = shown.queries.map((query) => galleryRow(query, ""));
  if (chosen >= 0) rows.unshift(galleryRow(chosen, "chosen"));
  byId("gallery").replaceChildren(...rows);
}

// ---- another run
runListeners.push((index) => {
  shown = DATA.runs[index].map || null;
  byId("explorer").hidden = !shown;
  if (!shown) return;
  measure();
  shown.members ||= groupByClass(shown);
  selected = chosen = highlighted = -1;
  tip.hidden = true;
  byId("map-words").textContent = shown.words;
  byId("wrong-hint").hidden = !shown.labels;
  drawLegend();
  drawGallery();
  showWhole();
});
function groupByClass(map) {
  const members = (map.classes || [""]).map(() => []);
  for (let i = 0; i < map.x.length; i++) members[map.labels ? map.labels[i] : 0].push(i);
  return members;
}
themeListeners.push(() => redraw(true));
new ResizeObserver(() => { measure(); redraw(true); }).observe(canvas);
