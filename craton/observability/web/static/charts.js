// Canvas charts in the colours of the style sheet: lines over steps or seconds, the heat map of ranks, the nodes.

const FONT = "12px system-ui, sans-serif";
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const UNITS = [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]];

const short = (value) => {
  if (value === 0) return "0";
  const size = Math.abs(value);
  for (const [unit, scale] of UNITS) if (size >= scale * 0.9995) return Number((value / scale).toPrecision(3)) + unit;
  return String(Number(value.toPrecision(3)));
};
// As in craton/formatting.py: 350 ms, 12.1 s, 1m 44s, 2h 5m, 4d 3h.
const CLOCK = [["s", "m", 1, 60, 3600], ["m", "h", 60, 60, 86400], ["h", "d", 3600, 24, Infinity]];
export const seconds = (value) => {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${short(value * 1e6)} µs`;
  if (size < 1) return `${short(value * 1e3)} ms`;
  if (size < 59.95) return `${short(value)} s`;
  const [small, large, scale, per] = CLOCK.find(([, , scale, , limit]) => Math.round(size / scale) * scale < limit);
  const units = Math.round(size / scale);
  return `${value < 0 ? "-" : ""}${Math.floor(units / per)}${large}${units % per ? ` ${units % per}${small}` : ""}`;
};
const percent = (share) => `${Number((100 * share).toFixed(Math.abs(share) < 0.0995 || (share >= 0.9 && share < 1) ? 1 : 0))}%`;
const writers = { seconds, share: percent, "tokens/s": short, "": short };

const ROUND_SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400];

// About `count` round numbers from low to high; for seconds, round in minutes or hours.
function ticks(low, high, count, areSeconds = false) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const steps = areSeconds && raw >= 1 ? ROUND_SECONDS : [1, 2, 5, 10].map((each) => each * power);
  const step = steps.find((each) => each >= raw) ?? 10 * power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

const NOTHING = "no data";
const KINDS = { heat: drawHeat, topology: drawTopology };

export class Chart {
  constructor(canvas) {
    this.canvas = canvas;
    this.kind = canvas.dataset.chart;
    this.height = Number(canvas.dataset.height);
    this.data = null;
    this.at = null; // position of the pointer
[]; // of all that can be pointed at: set by what draws =>     this.centres = () => []; // of all selectable items: set by the drawing function => []; // of all that can be pointed at: set by what draws
    canvas.addEventListener("pointermove", (event) => { this.at = [event.offsetX, event.offsetY]; this.later(); });
    canvas.addEventListener("pointerleave", () => { this.at = null; this.later(); });
    canvas.addEventListener("keydown", (event) => this.step(event));
    canvas.addEventListener("blur", () => { this.at = null; this.later(); });
    new ResizeObserver(() => this.later()).observe(canvas.parentElement);
  }

  show(data) {
    this.data = data;
    const newest = this.canvas.parentElement.querySelector(".newest");
    if (newest) newest.textContent = data.newest ?? "";
    this.later();
  }

  wasRead() {
    if (!this.canvas.dataset.empty) return;
    delete this.canvas.dataset.empty;
    this.later();
  }

  later() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.draw(); });
  }

  // Arrow keys select the next item, for users without a pointer. If there is none, the page scrolls.
  step(event) {
    const direction = ARROWS[event.key];
    if (!direction) return;
    const centres = this.centres();
    const here = closest(centres, this.at ?? [this.canvas.clientWidth / 2, this.canvas.clientHeight / 2]);
    const next = this.at && here ? neighbour(centres, here, direction) : here;
    if (!next) return;
    event.preventDefault();
    this.at = next;
    this.later();
  }

  draw() {
    const { canvas } = this;
    const width = canvas.parentElement.clientWidth - (parseFloat(getComputedStyle(canvas.parentElement).paddingLeft) || 0)
      - (parseFloat(getComputedStyle(canvas.parentElement).paddingRight) || 0);
    if (width <= 0) return;
    const draw = KINDS[this.kind] ?? drawLines;
    const height = this.kind === "topology" ? (this.data ? topologyHeight(this.data, width) : 0) : this.height;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = FONT;
    if (!this.data) {
      if (height) write(pen, canvas.dataset.empty ?? NOTHING, width / 2, height / 2, "muted", "center");
      return;
    }
    canvas.dataset.drawn = "1";
    const { tip = null, centres = () => [] } = draw(pen, this.data, width, height, this.at);
    this.centres = centres;
    if (tip && this.at) showTip(pen, tip, this.at, width, height);
  }
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function least(places, cost) {
  let [found, lowest] = [null, Infinity];
  for (const place of places) {
    const value = cost(place);
    if (value < lowest) [found, lowest] = [place, value];
  }
  return found;
}

const closest = (places, [x, y]) => least(places, (place) => Math.hypot(place[0] - x, place[1] - y));

// The next item in a direction: the nearest one of the nearest row.
function neighbour(places, [x, y], [right, down]) {
  const isAhead = (place) => right * (place[0] - x) + down * (place[1] - y) > 0.01;
  return least(places.filter(isAhead), (place) => 1e6 * Math.abs(place[1] - y) + Math.abs(place[0] - x));
}

function write(pen, text, x, y, ink, align = "left", baseline = "middle") {
  pen.fillStyle = color(ink);
  pen.textAlign = align;
  pen.textBaseline = baseline;
  pen.fillText(text, x, y);
}

// Texts below an axis, each at its value, inside the canvas and without overlap.
function writeMarks(pen, marks, y, width) {
  let free = 0;
  for (const [text, x] of marks) {
    const wide = pen.measureText(text).width;
    const left = Math.max(0, Math.min(x - wide / 2, width - wide));
    if (left < free) continue;
    write(pen, text, left, y, "muted");
    free = left + wide + 8;
  }
}

function showTip(pen, lines, [x, y], width, height) {
  const wide = Math.max(...lines.map((line) => pen.measureText(line).width)) + 16;
  const high = lines.length * 17 + 10;
  const left = x + 14 + wide > width ? Math.max(0, x - wide - 14) : x + 14;
  const top = Math.min(Math.max(0, y - high / 2), Math.max(0, height - high));
  pen.fillStyle = color("ink");
  pen.beginPath();
  pen.roundRect(left, top, wide, high, 6);
  pen.fill();
  lines.forEach((line, index) => write(pen, line, left + 8, top + 14 + index * 17, "surface"));
}

function drawLines(pen, data, width, height, at) {
  const writer = writers[data.unit] ?? short;
  const finite = (value) => value !== null && Number.isFinite(value);
  const all = data.series.flatMap((each) => each.values.filter(finite));
  const edge = [data.plan, ...(data.band ?? []), data.low, data.high].filter((value) => value !== undefined && finite(value));
  if (!all.length) { write(pen, NOTHING, width / 2, height / 2, "muted", "center"); return {}; }
  // One outlier (the first step, which compiles) must not flatten the curve.
  const ordered = [...all].sort((a, b) => a - b);
  const far = ordered[Math.floor(ordered.length * 0.99)];
  let low = Math.min(ordered[Math.floor(ordered.length * 0.01)], ...edge);
  let high = Math.max(far, ...edge);
  if (high === low) { high += Math.abs(high) * 0.1 || 1; low -= Math.abs(low) * 0.1; }
  const room = (high - low) * 0.08;
  low = data.low ?? (low >= 0 && low - room < 0 ? 0 : low - room);
  high = data.high ?? high + room;
  const marks = ticks(low, high, Math.max(2, Math.floor(height / 45)));
  const left = Math.ceil(Math.max(...marks.map((mark) => pen.measureText(writer(mark)).width))) + 12;
  const box = { left, top: 22, right: width - 8, bottom: height - 24 };
  const [first, last] = [data.x[0], data.x[data.x.length - 1]];
  const toX = (value) => (last === first ? (box.left + box.right) / 2 : box.left + ((value - first) / (last - first)) * (box.right - box.left));
  const toY = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);

  pen.lineWidth = 1;
  pen.strokeStyle = color("grid");
  for (const mark of marks) {
    const y = Math.round(toY(mark)) + 0.5;
    pen.beginPath(); pen.moveTo(box.left, y); pen.lineTo(box.right, y); pen.stroke();
    write(pen, writer(mark), box.left - 8, y, "muted", "right");
  }
  const xMarks = last === first ? [first] : ticks(first, last, Math.max(2, Math.floor(width / 110)), data.x_unit === "seconds");
  const xText = (mark) => (data.x_unit !== "seconds" ? short(mark) : mark === 0 ? data.x_end ?? "now" : `−${seconds(-mark)}`);
  writeMarks(pen, xMarks.map((mark) => [xText(mark), toX(mark)]), height - 10, width);
  pen.save();
  pen.beginPath(); pen.rect(box.left, box.top - 4, box.right - box.left + 4, box.bottom - box.top + 8); pen.clip();
  if (data.band) {
    pen.fillStyle = color("band");
    pen.fillRect(box.left, toY(data.band[1]), box.right - box.left, toY(data.band[0]) - toY(data.band[1]));
  }
  if (finite(data.plan ?? null)) {
    pen.strokeStyle = color("muted");
    pen.setLineDash([5, 4]);
    pen.beginPath(); pen.moveTo(box.left, toY(data.plan)); pen.lineTo(box.right, toY(data.plan)); pen.stroke();
    pen.setLineDash([]);
  }
  for (const series of data.series) drawSeries(pen, series, data.x, toX, toY, finite);
  pen.restore();
  drawLegend(pen, data, box);
  const middle = (box.top + box.bottom) / 2;
  const centres = () => data.x.map((value) => [toX(value), middle]);
  if (!at || at[0] < box.left - 4 || at[0] > box.right + 4) return { centres };
  const index = nearest(data.x.map(toX), at[0]);
  const x = toX(data.x[index]);
  pen.strokeStyle = color("muted");
  pen.beginPath(); pen.moveTo(x, box.top); pen.lineTo(x, box.bottom); pen.stroke();
  const where = data.x_unit === "seconds" ? xText(data.x[index]) : `step ${data.x[index].toLocaleString("en")}`;
  const lines = [where];
  for (const series of data.series) {
    const value = series.values[index];
    if (!finite(value)) continue;
    lines.push(`${series.name} ${writer(value)}`);
    pen.fillStyle = color(series.color);
    pen.beginPath(); pen.arc(x, toY(value), 3.5, 0, 7); pen.fill();
  }
  if (finite(data.plan ?? null)) lines.push(`plan ${writer(data.plan)}`);
  return { tip: lines, centres };
}

function drawSeries(pen, series, x, toX, toY, finite) {
  pen.strokeStyle = pen.fillStyle = color(series.color);
  pen.lineWidth = 1.75;
  pen.lineJoin = "round";
  pen.beginPath();
  let isDown = false;
  series.values.forEach((value, index) => {
    if (!finite(value)) return;
    if (isDown) pen.lineTo(toX(x[index]), toY(value));
    else pen.moveTo(toX(x[index]), toY(value));
    isDown = true;
  });
  pen.stroke();
  if (!series.points && series.values.filter(finite).length > 1) return;
  series.values.forEach((value, index) => {
    if (!finite(value)) return;
    pen.beginPath(); pen.arc(toX(x[index]), toY(value), 3, 0, 7); pen.fill();
  });
}

function drawLegend(pen, data, box) {
  const entries = data.series.map((each) => [each.name, each.color, false]);
  if (data.plan !== undefined && data.plan !== null) entries.push(["plan", "muted", true]);
  if (entries.length < 2) return;
  let x = box.left;
  for (const [name, ink, dashed] of entries) {
    pen.strokeStyle = color(ink);
    pen.lineWidth = 2;
    if (dashed) pen.setLineDash([4, 3]);
    pen.beginPath(); pen.moveTo(x, 8); pen.lineTo(x + 16, 8); pen.stroke();
    pen.setLineDash([]);
    write(pen, name, x + 21, 8, "muted");
    x += 21 + pen.measureText(name).width + 16;
  }
}

function nearest(sorted, wanted) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle; else high = middle;
  }
  return wanted - sorted[low] < sorted[high] - wanted ? low : high;
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mix = (a, b, share) => `rgb(${a.map((value, index) => Math.round(value + (b[index] - value) * share)).join(",")})`;

function drawHeat(pen, data, width, height, at) {
  const left = Math.ceil(Math.max(...data.phases.map((phase) => pen.measureText(phase).width))) + 12;
  const box = { left, top: 4, right: width - 4, bottom: height - 34 };
  const columns = data.cells[0].length;
  const high = (box.bottom - box.top) / data.phases.length;
  const wide = (box.right - box.left) / columns;
  const [still, more, less] = ["heat-zero", "heat-more", "heat-less"].map((name) => channels(color(name)));
  const gap = wide > 6 ? 1 : 0;
  data.cells.forEach((row, phase) => {
    write(pen, data.phases[phase], left - 8, box.top + (phase + 0.5) * high, "muted", "right");
    row.forEach((value, column) => {
      const share = Math.min(1, Math.abs(value) / data.scale);
      pen.fillStyle = mix(still, value > 0 ? more : less, share);
      // An outlier stays visible however narrow its column is.
      const x = box.left + column * wide;
      const least = share > 0.6 ? Math.max(3, wide - gap) : Math.max(1, wide - gap);
      pen.fillRect(x, box.top + phase * high, least, high - 2);
    });
  });
  const columnMarks = ticks(0, columns, Math.max(2, Math.min(columns, Math.floor(width / 90))))
    .filter((mark) => mark < columns && mark === Math.floor(mark));
  writeMarks(pen, columnMarks.map((mark) => [`${data.edges[mark]}`, box.left + (mark + (wide > 6 ? 0.5 : 0)) * wide]), box.bottom + 8, width);
  drawScale(pen, data, box, height, [still, more, less]);
  const centres = () =>
    data.cells.flatMap((row, phase) => row.map((_, column) => [box.left + (column + 0.5) * wide, box.top + (phase + 0.5) * high]));
  if (!at || at[0] < box.left || at[0] >= box.right || at[1] < box.top || at[1] >= box.bottom) return { centres };
  const column = Math.min(columns - 1, Math.floor((at[0] - box.left) / wide));
  const phase = Math.min(data.phases.length - 1, Math.floor((at[1] - box.top) / high));
  const place = data.furthest[phase][column];
  const [low, next] = [data.edges[column], data.edges[column + 1]];
  const lines = [`rank ${data.ranks[place]} on ${data.nodes[place]}`];
  if (next - low > 1) lines.push(`largest difference of ranks ${low} to ${next - 1}`);
  const value = data.seconds[place][phase];
  if (value !== null) lines.push(`${data.phases[phase]} ${seconds(value)}, median ${seconds(data.medians[phase])}`);
  lines.push(`${percent(data.cells[phase][column])} of a step`);
  pen.strokeStyle = color("ink");
  pen.lineWidth = 1.5;
  pen.strokeRect(box.left + column * wide, box.top + phase * high, Math.max(2, wide - gap), high - 2);
  return { tip: lines, centres };
}

function drawScale(pen, data, box, height, [still, more, less]) {
  const wide = 160;
  const left = box.right - wide - 44;
  for (let x = 0; x < wide; x += 1) {
    const share = (x / wide) * 2 - 1;
    pen.fillStyle = mix(still, share > 0 ? more : less, Math.abs(share));
    pen.fillRect(left + x, height - 13, 1.5, 8);
  }
  const edge = percent(data.scale);
  write(pen, `−${edge}`, left - 6, height - 9, "muted", "right");
  write(pen, `+${edge}`, left + wide + 6, height - 9, "muted");
  if (left - box.left > 90) write(pen, "ranks", box.left, height - 9, "muted");
}

// Nodes as boxes of squares, one per rank, leaf by leaf; smaller if there are many.
function topologyShape(data, width) {
  const nodes = data.leaves.reduce((sum, leaf) => sum + leaf.nodes.length, 0);
  const ranks = Math.max(1, data.leaves[0]?.nodes[0]?.[2].length ?? 1);
  const across = Math.min(ranks, ranks > 4 ? 4 : ranks);
  const down = Math.ceil(ranks / across);
  const cell = nodes > 600 ? 2 : nodes > 150 ? 4 : nodes > 40 ? 7 : 12;
  const pad = cell > 4 ? 3 : 1;
  const box = { wide: across * cell + 2 * pad + (cell > 7 ? 2 : 0), high: down * cell + 2 * pad };
  const named = data.leaves.length > 1 || data.leaves[0]?.leaf;
  const head = named ? 16 : 0;
  const gap = cell > 4 ? 6 : 3;
  const places = [];
  let [x, y] = [0, 0];
  let row = 0;
  for (const leaf of data.leaves) {
    const columns = Math.min(leaf.nodes.length, Math.max(1, cell > 4 ? 8 : Math.ceil(Math.sqrt(leaf.nodes.length * 2))));
    const lines = Math.ceil(leaf.nodes.length / columns);
    const size = { wide: Math.max(columns * (box.wide + 2), named ? 52 : 0) + 8, high: head + lines * (box.high + 2) };
    if (x > 0 && x + size.wide > width) { x = 0; y += row + gap; row = 0; }
    places.push({ leaf, x, y, columns });
    x += size.wide + gap;
    row = Math.max(row, size.high);
  }
  return { places, box, cell, pad, across, head, height: y + row + 4 };
}

const topologyHeight = (data, width) => Math.max(24, topologyShape(data, width).height);

function drawTopology(pen, data, width, height, at) {
  const shape = topologyShape(data, width);
  const { box, cell, pad, across, head } = shape;
  const paints = data.health.map((health) => color("health-" + health));
  const trouble = color("health-stuck");
  let tip = null;
  const places = [];
  for (const { leaf, x, y, columns } of shape.places) {
    if (head) write(pen, leaf.leaf || "no leaf", x, y + 7, "muted");
    leaf.nodes.forEach(([name, health, ranks, first], index) => {
      const left = x + (index % columns) * (box.wide + 2);
      const top = y + head + Math.floor(index / columns) * (box.high + 2);
      places.push([left + box.wide / 2, top + box.high / 2]);
      pen.fillStyle = paints[health];
      pen.globalAlpha = ranks.length ? 0.28 : 0.6; // a spare is a box without squares
      pen.fillRect(left, top, box.wide, box.high);
      pen.globalAlpha = 1;
      for (let rank = 0; rank < ranks.length; rank += 1) {
        pen.fillStyle = ranks[rank] === "!" ? trouble : paints[health];
        const size = cell > 4 ? cell - 2 : Math.max(1.5, cell - 0.5);
        pen.fillRect(left + pad + (rank % across) * cell, top + pad + Math.floor(rank / across) * cell, size, size);
      }
      if (at && at[0] >= left && at[0] < left + box.wide + 2 && at[1] >= top && at[1] < top + box.high + 2) {
        pen.strokeStyle = color("ink");
        pen.strokeRect(left - 0.5, top - 0.5, box.wide + 1, box.high + 1);
        const whose = ranks.length > 1 ? `ranks ${first} to ${first + ranks.length - 1}` : ranks.length ? `rank ${first}` : "no ranks";
        tip = [name, data.health[health], whose];
        if (leaf.leaf) tip.splice(1, 0, leaf.leaf);
      }
    });
  }
  return { tip, centres: () => places };
}
