// The charts of a report, drawn by uPlot from the JSON in the page: curves over steps; memory and the link over a step.
"use strict";

const KINDS = ["weights", "gradients", "states", "activations", "parked", "other"];
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const BINARY = Array.from({length: 44}, (_, power) => 2 ** power);
const data = JSON.parse(document.getElementById("data").textContent);
const shown = new Set(KINDS);

/** The colours of the page's theme by name, which canvases cannot inherit. */
function theme() {
  const style = getComputedStyle(document.documentElement);
  return new Proxy({}, {get: (_, name) => style.getPropertyValue("--" + name).trim()});
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  let unit = 0;
  for (; Math.abs(bytes) >= 1024 && unit < UNITS.length - 1; unit += 1) bytes /= 1024;
  return (unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)) + " " + UNITS[unit];
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1 || !value) return value.toFixed(value ? 2 : 0) + " s";
  return Math.abs(value) >= 1e-3 ? (value * 1e3).toFixed(1) + " ms" : (value * 1e6).toFixed(0) + " µs";
}

function figure(value) {
  if (value === null || value === undefined) return "–";
  const isPlain = !value || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5);
  return isPlain ? String(+value.toPrecision(5)) : value.toExponential(2);
}

function onKeys(element, acts) {
  element.addEventListener("keydown", (event) => {
    const act = acts[event.key === "=" ? "+" : event.key];
    if (!act || event.ctrlKey || event.metaKey) return;
    act(event);
    event.preventDefault();
  });
}

/** Puts a chart into `box`; `make` returns its data and uPlot's options in the page's colours, again in others. */
function chart(box, label, make) {
  const frame = box.appendChild(Object.assign(document.createElement("div"), {className: "chart", tabIndex: 0}));
  frame.setAttribute("role", "group");
  frame.setAttribute("aria-label", label + "; arrow keys show values, + and - zoom, 0 shows all");
  const place = () => {
    const width = Math.max(200, frame.clientWidth);
    return {width, height: width < 480 ? 190 : 220};
  };
  const it = {
    build() {
      if (it.plot) it.plot.destroy();
      const {rows, options} = make(theme());
      it.plot = new uPlot({...place(), cursor: {drag: {x: true, y: false}}, ...options}, rows, frame);
      frame.querySelector("canvas").setAttribute("role", "img");
      frame.querySelector("canvas").setAttribute("aria-label", label);
    },
    zoomTo: (min, max) => it.plot.setScale("x", {min, max}),
  };
  it.build();
  const walk = (by) => {
    const xs = it.plot.data[0], at = it.plot.cursor.idx ?? (by > 0 ? -1 : xs.length);
    const x = xs[Math.max(0, Math.min(xs.length - 1, at + by))];
    it.plot.setCursor({left: it.plot.valToPos(x, "x"), top: 40});
  };
  const zoom = (share) => {
    const {min, max} = it.plot.scales.x, middle = (min + max) / 2, half = ((max - min) / 2) * share;
    it.zoomTo(middle - half, middle + half);
  };
  onKeys(frame, {
    ArrowLeft: () => walk(-1),
    ArrowRight: () => walk(1),
    "+": () => zoom(0.5),
    "-": () => zoom(2),
    "0": () => it.zoomTo(it.plot.data[0][0], it.plot.data[0].at(-1)),
  });
  new ResizeObserver(() => it.plot.width !== place().width && it.plot.setSize(place())).observe(frame);
  return it;
}

function axes(ink, xText, yText, more) {
  const font = "11px system-ui, sans-serif", grid = {stroke: ink.grid, width: 1};
  const common = {stroke: ink.muted, font, grid, ticks: {show: false}};
  return [
    {...common, size: 30, space: 75, values: (_, splits) => splits.map(xText)},
    {...common, size: 62, values: (_, splits) => splits.map(yText), ...more},
  ];
}

/** Lines over steps, one for each run; `lines` are {label, xs, ys}. */
function curves(box, label, lines, fromZero) {
  return chart(box, label, (ink) => {
    const xs = [...new Set(lines.flatMap((line) => line.xs))].sort((one, other) => one - other);
    const columns = lines.map((line) => new Map(line.xs.map((x, index) => [x, line.ys[index]])));
    return {
      rows: [xs, ...columns.map((column) => xs.map((x) => column.get(x)))],
      options: {
        scales: {x: {time: false}, y: fromZero ? {range: (_, low, high) => [0, (high || 1) * 1.08]} : {}},
        axes: axes(ink, (value) => (Number.isInteger(value) ? String(value) : ""), figure),
        series: [{label: "step", value: (_, value) => figure(value)}, ...lines.map((line, index) => ({
          label: line.label,
          stroke: index ? ink.b : ink.a,
          width: 1.75,
          dash: index ? [6, 3] : undefined,
          spanGaps: true,
          points: {show: xs.length <= 60, size: 4, fill: index ? ink.b : ink.a},
          value: (_, value) => figure(value),
        }))],
      },
    };
  });
}

/** Bytes over a step, as steps; `series` have a colour, `drawn` and `exact` bytes, of which the legend shows these. */
function bytes(box, label, times, make) {
  return chart(box, label, (ink) => {
    const {top, series, hooks} = make(ink);
    return {
      rows: [times, ...series.map((each) => each.drawn)],
      options: {
        cursor: {drag: {x: true, y: false}, sync: {key: "step", setSeries: false}, points: {show: false}},
        scales: {x: {time: false}, y: {range: (_, low, high) => [0, Math.max(top ?? high, 1) * 1.06]}},
        axes: axes(ink, seconds, size, {incrs: BINARY}),
        series: [{label: "time", value: (_, value) => seconds(value)}, ...series.map((each) => ({
          width: 1,
          paths: uPlot.paths.stepped({align: 1}),
          points: {show: false},
          value: (_, __, ___, at) => (at === null ? "–" : size(each.exact[at])),
          ...each,
        }))],
        hooks,
      },
    };
  });
}

const sumOf = (of) => [...shown].reduce((sum, kind) => sum + (of(kind) || 0), 0);

/** What a rank holds over a step, stacked by kind, below what was planned; `top` is the most of any rank. */
function memory(box, view, planned, top, onToggle) {
  return bytes(box, `memory of rank ${view.rank} over a step`, view.at_seconds, (ink) => {
    const kinds = KINDS.filter((kind) => shown.has(kind) || view.bytes[kind].some(Boolean));
    const sums = view.at_seconds.map(() => 0);
    const series = kinds.map((kind) => {
      if (shown.has(kind)) view.bytes[kind].forEach((value, at) => (sums[at] += value || 0));
      const common = {label: kind, show: shown.has(kind), stroke: ink[kind], fill: ink[kind]};
      return {...common, drawn: [...sums], exact: view.bytes[kind]};
    }).reverse(); // the highest is drawn first, and the lower ones over it
    const setSeries = (_, at, {show}) => at && show !== undefined && onToggle(series[at - 1].label, show);
    // A plan that knows no activations has no total.
    const limit = planned && planned.activations && sumOf((kind) => planned[kind]);
    const draw = (plot) => limit && plannedLine(plot, ink, limit);
    return {top: top(), series, hooks: {setSeries: [setSeries], draw: [draw]}};
  });
}

function plannedLine(plot, ink, value) {
  const {left, width} = plot.bbox, y = plot.valToPos(value, "y", true);
  const g = plot.ctx, ratio = window.devicePixelRatio || 1;
  g.save();
  Object.assign(g, {strokeStyle: ink.text, lineWidth: 1.25 * ratio, textBaseline: "bottom"});
  g.font = 11 * ratio + "px system-ui, sans-serif";
  g.setLineDash([5 * ratio, 4 * ratio]);
  g.beginPath();
  g.moveTo(left, y);
  g.lineTo(left + width, y);
  g.stroke();
  text(g, ink.text, "planned " + size(value), left + width - 4 * ratio, y - 2 * ratio, "right");
  g.restore();
}

/** What lies on the host, and has moved in both directions, over a step. */
function link(box, view) {
  return bytes(box, `offloading of rank ${view.rank} over a step`, view.at_seconds, (ink) => ({
    series: [
      {label: "on the host", stroke: ink.parked, fill: ink.selection, exact: view.bytes.offloaded},
      {label: "moved out", stroke: ink.a, width: 1.75, exact: view.out},
      {label: "moved back", stroke: ink.b, width: 1.75, dash: [6, 3], exact: view.back},
    ].map((each) => ({...each, drawn: each.exact})),
  }));
}

/** One step of one run: schedule, memory and link, which zoom together. */
class StepView {
  constructor(run, index) {
    const part = (name) => document.querySelector(`[data-${name}="${index}"]`);
    const box = (name) => document.querySelector(`[data-chart="${name}"][data-run="${index}"]`);
    Object.assign(this, {run, boxes: {memory: box("memory"), link: box("link")}, charts: []});
    this.selects = [part("choice"), part("pipeline")];
    const zoom = (from, to) => this.charts.forEach((each) => each.zoomTo(from, to));
    this.schedule = new ScheduleView(box("schedule"), zoom);
    for (const select of this.selects) if (select) select.addEventListener("change", showSteps);
  }

  choose() {
    const [step, pipeline] = this.selects.map((select) => (select ? +select.value : 0));
    const {number, pipelines, memory: views} = this.run.steps[step], {ranks, stages} = pipelines[pipeline];
    this.views = views.filter((view) => stages.some((stage) => ranks[stage] === view.rank));
    this.bands = bandsOf(pipelines[pipeline]);
    this.label = `schedule of step ${number}: ${stages.length} ranks, planned above executed`;
  }

  show(longest) {
    for (const box of Object.values(this.boxes)) if (box) box.replaceChildren();
    this.charts = this.views.map((view) =>
      memory(panel(this.boxes.memory, view), view, this.run.planned[view.rank], highest, toggle));
    const moved = this.views.filter((view) => this.boxes.link && view.out.some(Boolean));
    this.charts.push(...moved.map((view) => link(panel(this.boxes.link, view), view)));
    this.schedule.show(this.bands, this.label, longest);
  }

  get tops() {
    return this.views.flatMap((view) => [
      ...view.at_seconds.map((_, at) => sumOf((kind) => view.bytes[kind][at])),
      sumOf((kind) => (this.run.planned[view.rank] || {})[kind]),
    ]);
  }

  /** Draws again what is shown, in the page's colours. */
  restyle() {
    this.charts.forEach((each) => each.build());
    this.schedule.zoomTo(this.schedule.from, this.schedule.to);
  }
}

function panel(box, view) {
  const frame = box.appendChild(document.createElement("figure"));
  frame.append(Object.assign(document.createElement("figcaption"), {textContent: `rank ${view.rank}`}));
  return frame;
}

const steps = data.runs.map((run, index) => run.steps.length && new StepView(run, index)).filter(Boolean);
const highest = () => Math.max(0, ...steps.flatMap((step) => step.tops));

function toggle(kind, on) {
  if (shown.has(kind) === on) return;
  if (on) shown.add(kind);
  else shown.delete(kind);
  setTimeout(() => steps.forEach((step) => step.restyle())); // not while the chart is in its own event
}

/** Shows the chosen steps of all runs to one scale. */
function showSteps() {
  steps.forEach((step) => step.choose());
  const longest = Math.max(...steps.map((step) => endOf(step.bands)));
  steps.forEach((step) => step.show(longest));
}

const overSteps = [...document.querySelectorAll('[data-chart="values"]')].map((box) => {
  const {name} = box.dataset;
  const lines = data.runs.flatMap((run) => run.curves.filter((curve) => curve.name === name)
    .map((curve) => ({label: run.label || name, xs: curve.steps, ys: curve.values})));
  return curves(box, `${name} over steps`, lines, false);
});
for (const box of document.querySelectorAll('[data-chart="throughput"]')) {
  const paces = data.runs.filter((run) => run.pace);
  const lines = paces.map(({label, pace: [xs, ys]}) => ({label: label || "steps/s", xs, ys}));
  overSteps.push(curves(box, "steps per second over steps", lines, true));
}
showSteps();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  overSteps.forEach((each) => each.build());
  steps.forEach((step) => step.restyle());
});
document.documentElement.dataset.ready = "yes";
