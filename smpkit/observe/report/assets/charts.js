// The charts of a report, drawn by uPlot: curves over steps, memory and the link over one step.
"use strict";

const KINDS = ["weights", "gradients", "states", "activations", "parked", "other"];
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** The colours of the page's theme, which canvases cannot inherit. */
function theme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["text", "muted", "grid", "row", "work", "wait", "link", "label", "selection", "F", "B", "W", "a", "b", ...KINDS];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  let unit = 0;
  while (Math.abs(bytes) >= 1024 && unit < UNITS.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return (unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)) + " " + UNITS[unit];
}

function figure(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(5));
}

const BINARY = Array.from({length: 44}, (_, power) => 2 ** power);

class Chart {
  /** Draws into `box` what `options` says; `rebuild` with the page's colours when these change. */
  constructor(box, label, make, table) {
    this.box = box;
    this.label = label;
    this.make = make;
    this.table = table;
    this.frame = document.createElement("div");
    this.frame.className = "chart";
    this.frame.tabIndex = 0;
    this.frame.setAttribute("role", "group");
    this.frame.setAttribute("aria-label", label + "; arrow keys read values, + and - zoom, 0 shows all");
    box.append(this.frame);
    this.said = document.createElement("p");
    this.said.className = "hidden";
    this.said.setAttribute("aria-live", "polite");
    box.append(this.said);
    this.frame.addEventListener("keydown", (event) => this._keys(event));
    new ResizeObserver(() => this.resize()).observe(this.frame);
    this.build();
  }

  build() {
    if (this.plot) this.plot.destroy();
    const {options, data} = this.make(theme());
    this.plot = new uPlot({width: this.width, height: this.height, ...options}, data, this.frame);
    const canvas = this.frame.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", this.label);
  }

  get width() {
    return Math.max(200, this.frame.clientWidth);
  }

  get height() {
    return this.width < 480 ? 190 : 220;
  }

  resize() {
    if (this.plot && this.plot.width !== this.width) this.plot.setSize({width: this.width, height: this.height});
  }

  zoomTo(from, to) {
    const {min, max} = this.plot.scales.x;
    if (Math.abs(min - from) + Math.abs(max - to) > 1e-9) this.plot.setScale("x", {min: from, max: to});
  }

  _keys(event) {
    const plot = this.plot, xs = plot.data[0], last = xs.length - 1;
    const at = plot.cursor.idx ?? (event.key === "ArrowLeft" ? last + 1 : -1);
    const {min, max} = plot.scales.x;
    const zoom = (share) => {
      const middle = (min + max) / 2, half = ((max - min) / 2) * share;
      plot.setScale("x", {min: Math.max(xs[0], middle - half), max: Math.min(xs[last], middle + half)});
    };
    const read = (index) => {
      const chosen = Math.max(0, Math.min(last, index));
      plot.setCursor({left: plot.valToPos(xs[chosen], "x"), top: plot.bbox.height / 4});
      this.said.textContent = plot.series.map((each, series) => {
        const value = series && each.value ? each.value(plot, plot.data[series][chosen], series, chosen) : figure(xs[chosen]);
        return each.show === false ? "" : `${each.label} ${value}`;
      }).filter(Boolean).join(", ");
    };
    const acts = {
      ArrowLeft: () => read(at - 1),
      ArrowRight: () => read(at + 1),
      "+": () => zoom(0.5),
      "=": () => zoom(0.5),
      "-": () => zoom(2),
      "0": () => plot.setScale("x", {min: xs[0], max: xs[last]}),
    };
    if (acts[event.key] && !event.ctrlKey && !event.metaKey) {
      acts[event.key]();
      event.preventDefault();
    }
  }
}

function axes(ink, xText, yText, more) {
  const common = {stroke: ink.muted, font: "11px system-ui, sans-serif", grid: {stroke: ink.grid, width: 1}, ticks: {show: false}};
  return [
    {...common, size: 30, values: (_, splits) => splits.map(xText)},
    {...common, size: 62, values: (_, splits) => splits.map(yText), ...more},
  ];
}

/** Lines over steps, one for each run; `lines` are {label, xs, ys}. */
function curves(box, label, lines, text, fromZero) {
  return new Chart(box, label, (ink) => {
    const xs = [...new Set(lines.flatMap((line) => line.xs))].sort((one, other) => one - other);
    const data = [xs, ...lines.map((line) => {
      const at = new Map(line.xs.map((x, index) => [x, line.ys[index]]));
      return xs.map((x) => (at.has(x) ? at.get(x) : undefined));
    })];
    const few = xs.length <= 60;
    const options = {
      cursor: {drag: {x: true, y: false}, points: {size: 7}},
      scales: {x: {time: false}, y: fromZero ? {range: (_, low, high) => [0, (high || 1) * 1.08]} : {}},
      axes: axes(ink, (value) => (Number.isInteger(value) ? String(value) : ""), text),
      series: [{label: "step"}, ...lines.map((line, index) => ({
        label: line.label,
        stroke: index ? ink.b : ink.a,
        width: 1.75,
        dash: index ? [6, 3] : undefined,
        spanGaps: true,
        points: {show: few, size: 4, fill: index ? ink.b : ink.a},
        value: (_, value) => text(value),
      }))],
    };
    return {options, data};
  });
}

/** What a rank holds over a step, stacked by kind, below what was planned. */
function memory(box, label, view, planned, highest, shown, onToggle) {
  const kinds = KINDS.filter((kind) => shown.has(kind) || view.bytes[kind].some((value) => value));
  const stack = [...kinds].reverse(); // the highest is drawn first, and the lower ones over it
  const cumulated = () => {
    const sums = view.at_ms.map(() => 0);
    const rows = {};
    for (const kind of kinds) {
      if (shown.has(kind)) view.bytes[kind].forEach((value, at) => (sums[at] += value || 0));
      rows[kind] = [...sums];
    }
    return [view.at_ms, ...stack.map((kind) => rows[kind])];
  };
  const limit = planned && [...shown].reduce((sum, kind) => sum + (planned[kind] || 0), 0);
  return new Chart(box, label, (ink) => ({
    data: cumulated(),
    options: {
      cursor: {drag: {x: true, y: false}, sync: {key: "step", setSeries: false}, points: {show: false}},
      scales: {x: {time: false}, y: {range: () => [0, Math.max(highest(), 1) * 1.06]}},
      axes: axes(ink, milliseconds, size, {incrs: BINARY}),
      series: [{label: "time", value: (_, value) => (value === null ? "–" : milliseconds(value))}, ...stack.map((kind) => ({
        label: kind,
        show: shown.has(kind),
        stroke: ink[kind],
        fill: ink[kind],
        width: 1,
        paths: uPlot.paths.stepped({align: 1}),
        points: {show: false},
        value: (_, __, ___, at) => (at === null || at === undefined ? "–" : size(view.bytes[kind][at])),
      }))],
      hooks: {
        setSeries: [(plot, at, changed) => {
          if (at && changed.show !== undefined) onToggle(stack[at - 1], changed.show);
        }],
        draw: [(plot) => limit && line(plot, ink, limit, "planned " + size(limit))],
      },
    },
  }));
}

/** A dashed line over a chart, with words. */
function line(plot, ink, value, words) {
  const y = plot.valToPos(value, "y", true), {left, width} = plot.bbox, g = plot.ctx;
  const ratio = window.devicePixelRatio || 1;
  g.save();
  g.strokeStyle = g.fillStyle = ink.text;
  g.lineWidth = 1.25 * ratio;
  g.setLineDash([5 * ratio, 4 * ratio]);
  g.beginPath();
  g.moveTo(left, y);
  g.lineTo(left + width, y);
  g.stroke();
  g.font = 11 * ratio + "px system-ui, sans-serif";
  g.textAlign = "right";
  g.textBaseline = "bottom";
  g.fillText(words, left + width - 4 * ratio, y - 2 * ratio);
  g.restore();
}

/** What lies on the host, and has moved in both directions, over a step. */
function link(box, label, view) {
  return new Chart(box, label, (ink) => ({
    data: [view.at_ms, view.offloaded, view.out, view.back],
    options: {
      cursor: {drag: {x: true, y: false}, sync: {key: "step", setSeries: false}},
      scales: {x: {time: false}, y: {range: (_, low, high) => [0, Math.max(high, 1) * 1.08]}},
      axes: axes(ink, milliseconds, size, {incrs: BINARY}),
      series: [{label: "time", value: (_, value) => (value === null ? "–" : milliseconds(value))},
        {label: "on the host", stroke: ink.parked, fill: ink.selection, width: 1},
        {label: "moved out", stroke: ink.a, width: 1.75},
        {label: "moved back", stroke: ink.b, width: 1.75, dash: [6, 3]},
      ].map((series, at) => (at ? {
        ...series,
        paths: uPlot.paths.stepped({align: 1}),
        points: {show: false},
        value: (_, value) => size(value),
      } : series)),
    },
  }));
}

/** A matrix of many ranks as a picture; small ones are tables. */
function heat(box, label, rows) {
  const canvas = document.createElement("canvas");
  const tip = document.createElement("p");
  tip.className = "said";
  tip.textContent = "Hover for a pair of ranks.";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  box.append(canvas, tip);
  const most = Math.max(1, ...rows.flat());
  const draw = () => {
    const side = Math.min(box.clientWidth, 560), ratio = window.devicePixelRatio || 1, cell = side / rows.length;
    canvas.width = canvas.height = side * ratio;
    canvas.style.width = canvas.style.height = side + "px";
    const g = canvas.getContext("2d"), ink = theme();
    g.scale(ratio, ratio);
    g.fillStyle = ink.row;
    g.fillRect(0, 0, side, side);
    rows.forEach((row, sender) => row.forEach((bytes, receiver) => {
      g.globalAlpha = bytes ? 0.2 + 0.8 * (bytes / most) : 0;
      g.fillStyle = ink.a;
      g.fillRect(receiver * cell, sender * cell, Math.max(1, cell - 0.5), Math.max(1, cell - 0.5));
    }));
  };
  canvas.addEventListener("pointermove", (event) => {
    const place = canvas.getBoundingClientRect(), cell = place.width / rows.length;
    const sender = Math.floor((event.clientY - place.top) / cell), receiver = Math.floor((event.clientX - place.left) / cell);
    if (rows[sender] && rows[sender][receiver] !== undefined) {
      tip.textContent = `rank ${sender} to rank ${receiver}: ${size(rows[sender][receiver])}`;
    }
  });
  new ResizeObserver(draw).observe(box);
  return {build: draw};
}
