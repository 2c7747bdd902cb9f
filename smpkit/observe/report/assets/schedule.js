// The schedule of a step: a row per rank, time to the right, a box per action; planned above executed.
//
// Drag selects a time, a double click or 0 shows all of it again; Ctrl and wheel, + and - zoom; the arrow keys move. The
// pointer asks for an action.
"use strict";

const KIND_NAMES = {F: "forward", B: "backward", W: "gradients of weights"};
const CAUSES = {
  fill: "nothing has reached this rank yet",
  forward: "the activation it needs is still being computed",
  backward: "the gradient it needs is still being computed",
  link: "what it needs is on its way",
  drain: "finished; others have not",
};
const ROW = 24, GAP = 3, TITLE = 24, AXIS = 22, LEFT = 58, RIGHT = 8;

/** The bands of one pipeline's step: as planned, if it was, and as run. */
function bandsOf(pipeline) {
  return ["planned", "executed"].filter((what) => pipeline[what]).map((what) => {
    const {makespan_seconds: length, bubble, spans, stalls, works} = pipeline[what];
    const remark = what === "executed" && pipeline.planned && !pipeline.follows_plan ? ", not in planned order" : "";
    return {
      title: `${what}: ${seconds(length)}, bubble ${(100 * bubble).toFixed(1)} %${remark}`,
      rows: pipeline.stages.map((stage, at) => ({
        what, stage, rank: pipeline.ranks[stage], actions: spans[at], idle: stalls[at], works: works ? works[at] : [],
      })),
    };
  });
}

/** Of an action's name, such as `F2.1`: the kind, the microbatch and the segment. */
function parts(name) {
  const [microbatch, segment] = name.slice(1).split(".");
  return {kind: name[0], microbatch, segment: segment || "0"};
}

/** When the last thing of some bands ends. */
function endOf(bands) {
  const spans = bands.flatMap((band) => band.rows).flatMap((row) => [row.actions.at(-1), row.works.at(-1)]);
  return Math.max(1e-9, ...spans.filter(Boolean).map((span) => span[2]));
}

class ScheduleView {
  /** Draws into `box`; `onZoom(from, to)` is called with the time that is shown. */
  constructor(box, onZoom) {
    this.onZoom = onZoom;
    this.canvas = Object.assign(document.createElement("canvas"), {tabIndex: 0});
    this.canvas.setAttribute("role", "img");
    this.tip = Object.assign(document.createElement("div"), {className: "tip", hidden: true});
    const frame = Object.assign(document.createElement("div"), {className: "schedule-frame"});
    frame.append(this.canvas, this.tip);
    box.append(frame);
    this.bands = [];
    this.listen();
    new ResizeObserver(() => this.draw()).observe(frame);
  }

  /** Shows bands over `longest` seconds. */
  show(bands, label, longest) {
    Object.assign(this, {bands, longest, chosen: null});
    this.canvas.setAttribute("aria-label", label);
    this.tip.hidden = true;
    this.zoomTo(0, longest);
  }

  zoomTo(from, to) {
    const length = Math.min(this.longest, Math.max(this.longest / 2000, to - from));
    this.from = Math.max(0, Math.min(from, this.longest - length));
    this.to = this.from + length;
    this.draw();
    this.onZoom(this.from, this.to);
  }

  zoomBy(factor, at = (this.from + this.to) / 2) {
    this.zoomTo(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  moveBy(share) {
    const by = share * (this.to - this.from);
    this.zoomTo(this.from + by, this.to + by);
  }

  x(time) {
    return LEFT + ((time - this.from) / (this.to - this.from)) * (this.width - LEFT - RIGHT);
  }

  time(x) {
    return this.from + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (this.to - this.from);
  }

  // --- drawing

  draw() {
    this.width = this.canvas.parentElement.clientWidth;
    if (!this.width || !this.bands.length) return;
    const ratio = window.devicePixelRatio || 1, ink = theme(), g = this.canvas.getContext("2d");
    const height = this.bands.reduce((sum, band) => sum + TITLE + band.rows.length * (ROW + GAP), AXIS);
    Object.assign(this.canvas, {width: this.width * ratio, height: height * ratio});
    Object.assign(this.canvas.style, {width: this.width + "px", height: height + "px"});
    g.scale(ratio, ratio);
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    let y = 0;
    for (const {title, rows} of this.bands) {
      text(g, ink.text, title, 0, y + TITLE / 2);
      y += TITLE;
      for (const row of rows) {
        row.y = y;
        text(g, ink.muted, "rank " + row.rank, 0, y + ROW / 2);
        this.drawRow(g, ink, row);
        y += ROW + GAP;
      }
    }
    for (const at of this.ticks()) {
      const label = seconds(at), half = g.measureText(label).width / 2;
      text(g, ink.muted, label, Math.min(Math.max(this.x(at), LEFT + half), this.width - half), y + AXIS / 2, "center");
    }
    if (this.selection) {
      const [from, to] = this.selection.map((time) => this.x(time));
      fill(g, ink.selection, from, TITLE, to - from, y - TITLE);
    }
  }

  drawRow(g, ink, row) {
    const right = this.width - RIGHT;
    const box = (color, from, to, inset, least = 0) =>
      fill(g, color, this.x(from), row.y + inset, Math.max(least, this.x(to) - this.x(from)), ROW - 2 * inset);
    g.save();
    g.beginPath();
    g.rect(LEFT, row.y, right - LEFT, ROW);
    g.clip();
    fill(g, ink.row, LEFT, row.y, right - LEFT, ROW);
    for (const at of this.ticks()) fill(g, ink.grid, this.x(at), row.y, 1, ROW);
    for (const [cause, from, to] of row.idle) {
      if (cause !== "fill" && cause !== "drain") box(cause === "link" ? ink.link : ink.wait, from, to, ROW / 2 - 2);
    }
    for (const [, from, to] of row.works) box(ink.work, from, to, 5, 1);
    for (const action of row.actions) this.drawAction(g, ink, row, action);
    g.restore();
  }

  drawAction(g, ink, row, action) {
    const [name, from, to] = action, {kind, microbatch} = parts(name);
    const x = this.x(from), width = Math.max(0.6, this.x(to) - x);
    if (x > this.width || x + width < LEFT) return;
    const chosen = this.chosen && this.chosen.action;
    g.globalAlpha = chosen && parts(chosen[0]).microbatch !== microbatch ? 0.4 : 1;
    fill(g, ink[kind], x, row.y, width > 3 ? width - 0.7 : width, ROW);
    if (chosen === action) {
      Object.assign(g, {strokeStyle: ink.text, lineWidth: 2});
      g.strokeRect(x + 1, row.y + 1, Math.max(1, width - 2.7), ROW - 2);
    }
    const label = [name, microbatch].find((words) => g.measureText(words).width + 6 <= width);
    const left = Math.max(x, LEFT), end = Math.min(x + width, this.width - RIGHT);
    if (label) text(g, ink.label, label, (left + end) / 2, row.y + ROW / 2 + 0.5, "center");
    g.globalAlpha = 1;
  }

  ticks() {
    const wanted = (this.to - this.from) / Math.max(2, Math.floor((this.width - LEFT - RIGHT) / 90));
    const power = 10 ** Math.floor(Math.log10(wanted));
    const every = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= wanted);
    const first = Math.ceil(this.from / every), count = Math.floor(this.to / every) - first + 1;
    return Array.from({length: Math.max(0, count)}, (_, index) => (first + index) * every);
  }

  // --- what is asked for

  find(x, y) {
    const row = this.bands.flatMap((band) => band.rows).find((each) => each.y <= y && y < each.y + ROW);
    if (!row) return null;
    const time = this.time(x), slack = this.time(x + 2) - time;
    const at = (spans, more = 0) => spans.find((each) => each[1] - more <= time && time < each[2] + more);
    return {row, action: at(row.actions) || at(row.actions, slack), work: at(row.works), idle: at(row.idle)};
  }

  describe({row, action, work, idle}) {
    const where = `rank ${row.rank}, stage ${row.stage}, ${row.what}`;
    const lines = (what, from, to) => [what, `${seconds(from)} to ${seconds(to)}: ${seconds(to - from)}`, where];
    if (action) {
      const [name, from, to] = action, {kind, microbatch, segment} = parts(name);
      return lines(`${name}: ${KIND_NAMES[kind]} of microbatch ${microbatch}, segment ${segment}`, from, to);
    }
    if (work) return lines(...work);
    if (!idle) return null;
    const [cause, from, to, other] = idle;
    return lines(`idle: ${CAUSES[cause] || cause}${other === null ? "" : ` (stage ${other})`}`, from, to);
  }

  /** Shows what there is to say about something, below and right of a place. */
  tell(found, x, y) {
    const lines = found && this.describe(found);
    this.chosen = lines ? found : null;
    this.tip.hidden = !lines;
    this.tip.replaceChildren(...(lines || []).map((line, at) =>
      Object.assign(document.createElement(at ? "div" : "strong"), {textContent: line})));
    this.tip.style.left = Math.max(0, Math.min(x + 12, this.width - this.tip.offsetWidth - 2)) + "px";
    this.tip.style.top = y + 16 + "px";
    this.draw();
  }

  // --- keys and pointers

  listen() {
    const canvas = this.canvas;
    onKeys(canvas, {
      "+": () => this.zoomBy(0.5),
      "-": () => this.zoomBy(2),
      "0": () => this.zoomTo(0, this.longest),
      ArrowLeft: () => this.moveBy(-0.25),
      ArrowRight: () => this.moveBy(0.25),
      Escape: () => this.tell(null),
    });
    canvas.addEventListener("dblclick", () => this.zoomTo(0, this.longest));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      event.preventDefault();
      this.zoomBy(event.deltaY > 0 ? 1.25 : 0.8, this.time(event.offsetX));
    }, {passive: false});
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.selection = [this.time(event.offsetX), this.time(event.offsetX)];
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.selection) return this.tell(this.find(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
      this.selection[1] = this.time(event.offsetX);
      this.draw();
    });
    canvas.addEventListener("pointerup", (event) => {
      const [from, to] = this.selection.sort((one, other) => one - other);
      this.selection = null;
      if (this.x(to) - this.x(from) > 6) this.zoomTo(from, to);
      else this.tell(this.find(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
    });
    canvas.addEventListener("pointercancel", () => (this.selection = null));
    // A finger leaves as it is lifted; what it asked stays until the next tap, here or elsewhere.
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "touch" || this.tell(null));
    document.addEventListener("pointerdown", (event) => event.target === canvas || this.tell(null));
  }
}

function fill(g, color, x, y, width, height) {
  g.fillStyle = color;
  g.fillRect(x, y, width, height);
}

function text(g, color, words, x, y, align = "left") {
  Object.assign(g, {fillStyle: color, textAlign: align});
  g.fillText(words, x, y);
}
