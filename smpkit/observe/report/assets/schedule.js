// The schedule of a step: a row per rank, time to the right, a box per action; planned above executed.
//
// Drag selects a time, a double click or 0 shows all of it again. Pinch, Ctrl and wheel, + and - zoom; shift and drag,
// two fingers, or the arrow keys with Alt move. The arrow keys go from action to action.
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

function milliseconds(value) {
  const size = Math.abs(value);
  if (size >= 1000) return (value / 1000).toFixed(2) + " s";
  if (size >= 1 || size === 0) return value.toFixed(1) + " ms";
  return (value * 1000).toFixed(0) + " µs";
}

function actionName([kind, segment, microbatch]) {
  return kind + microbatch + (segment ? "." + segment : "");
}

/** The bands of one pipeline's step: as planned, if it was, and as run. */
function bandsOf(view) {
  const title = (what, ms, bubble) => `${what}: ${milliseconds(ms)}, bubble ${(100 * bubble).toFixed(1)} %`;
  const rows = (timeline) => timeline.map((row, stage) => ({...row, rank: view.ranks[stage], stage}));
  const bands = [];
  if (view.planned) {
    bands.push({what: "planned", title: title("planned", view.planned_ms, view.planned_bubble), rows: rows(view.planned)});
  }
  const remark = view.follows_plan || !view.planned ? "" : ", not in planned order";
  bands.push({
    what: "executed",
    title: title("executed", view.executed_ms, view.executed_bubble) + remark,
    rows: rows(view.executed),
  });
  return bands;
}

class ScheduleView {
  /** Draws into `box`; `onZoom(from, to)` is called with the time that is shown. */
  constructor(box, onZoom) {
    this.box = box;
    this.onZoom = onZoom || (() => {});
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.said = document.createElement("p");
    this.said.className = "said";
    this.said.setAttribute("aria-live", "polite");
    const frame = document.createElement("div");
    frame.className = "schedule-frame";
    frame.append(this.canvas, this.tip);
    box.append(this._buttons(), frame, this.said);
    this.bands = [];
    this.focus = null;
    this.hover = null;
    this.selection = null;
    this.touches = new Map();
    this._listen();
    new ResizeObserver(() => this.draw()).observe(frame);
  }

  /** Shows bands over `longest` milliseconds. */
  show(bands, label, longest) {
    this.bands = bands;
    this.focus = this.hover = null;
    this.longest = longest;
    this.from = 0;
    this.to = this.longest;
    this.canvas.setAttribute("aria-label", label);
    this.said.textContent = "Hover, tap or use the arrow keys for an action; drag to zoom, double click for all.";
    this.zoomTo(0, this.longest);
  }

  zoomTo(from, to) {
    const least = this.longest / 2000;
    const length = Math.min(this.longest, Math.max(least, to - from));
    this.from = Math.max(0, Math.min(from, this.longest - length));
    this.to = this.from + length;
    this.draw();
    this.onZoom(this.from, this.to);
  }

  zoomBy(factor, at) {
    const middle = at === undefined ? (this.from + this.to) / 2 : at;
    this.zoomTo(middle - (middle - this.from) * factor, middle + (this.to - middle) * factor);
  }

  moveBy(share) {
    const by = share * (this.to - this.from);
    this.zoomTo(this.from + by, this.to + by);
  }

  // --- drawing

  get height() {
    return this.bands.reduce((sum, band) => sum + TITLE + band.rows.length * (ROW + GAP), AXIS);
  }

  x(time) {
    return LEFT + ((time - this.from) / (this.to - this.from)) * (this.width - LEFT - RIGHT);
  }

  time(x) {
    return this.from + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (this.to - this.from);
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.parentElement.clientWidth;
    if (!this.width || !this.bands.length) return;
    const height = this.height;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = this.width + "px";
    this.canvas.style.height = height + "px";
    const g = this.canvas.getContext("2d");
    g.scale(ratio, ratio);
    const ink = theme();
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    let y = 0;
    for (const band of this.bands) {
      g.fillStyle = ink.text;
      g.textAlign = "left";
      g.fillText(band.title, 0, y + TITLE / 2);
      y += TITLE;
      for (const row of band.rows) {
        row.y = y;
        this._row(g, ink, band, row);
        y += ROW + GAP;
      }
    }
    this._axis(g, ink, y);
    this._selection(g, ink, y);
  }

  _row(g, ink, band, row) {
    g.fillStyle = ink.muted;
    g.textAlign = "left";
    g.fillText("rank " + row.rank, 0, row.y + ROW / 2);
    const right = this.width - RIGHT;
    g.save();
    g.beginPath();
    g.rect(LEFT, row.y, right - LEFT, ROW);
    g.clip();
    g.fillStyle = ink.row;
    g.fillRect(LEFT, row.y, right - LEFT, ROW);
    g.fillStyle = ink.grid;
    for (const at of this._ticks()) g.fillRect(this.x(at), row.y, 1, ROW);
    for (const [cause, from, to] of row.idle) {
      if (cause === "fill" || cause === "drain") continue;
      g.fillStyle = cause === "link" ? ink.link : ink.wait;
      g.fillRect(this.x(from), row.y + ROW / 2 - 2, this.x(to) - this.x(from), 4);
    }
    for (const [, from, to] of row.works) {
      g.fillStyle = ink.work;
      g.fillRect(this.x(from), row.y + 5, Math.max(1, this.x(to) - this.x(from)), ROW - 10);
    }
    for (const action of row.actions) this._action(g, ink, row, action);
    g.restore();
  }

  _action(g, ink, row, action) {
    const [kind, , microbatch, from, to] = action;
    const x = this.x(from), width = Math.max(0.6, this.x(to) - x);
    if (x > this.width || x + width < LEFT) return;
    const chosen = this.focus || this.hover;
    const fades = chosen && chosen.action && chosen.action[2] !== microbatch;
    g.globalAlpha = fades ? 0.4 : 1;
    g.fillStyle = ink[kind] || ink.F;
    g.fillRect(x, row.y, width > 3 ? width - 0.7 : width, ROW);
    if (chosen && chosen.action === action) {
      g.strokeStyle = ink.text;
      g.lineWidth = 2;
      g.strokeRect(x + 1, row.y + 1, Math.max(1, width - 2.7), ROW - 2);
    }
    const label = [actionName(action), String(microbatch)].find((text) => g.measureText(text).width + 6 <= width);
    if (label) {
      g.fillStyle = ink.label;
      g.textAlign = "center";
      g.fillText(label, Math.max(x, LEFT) + Math.min(width, this.width - RIGHT - x) / 2, row.y + ROW / 2 + 0.5);
    }
    g.globalAlpha = 1;
  }

  _ticks() {
    const wanted = (this.to - this.from) / Math.max(2, Math.floor((this.width - LEFT - RIGHT) / 90));
    const power = 10 ** Math.floor(Math.log10(wanted));
    const every = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= wanted);
    const first = Math.ceil(this.from / every), count = Math.floor(this.to / every) - first + 1;
    return Array.from({length: Math.max(0, count)}, (_, index) => (first + index) * every);
  }

  _axis(g, ink, y) {
    g.fillStyle = ink.muted;
    g.textAlign = "center";
    for (const at of this._ticks()) {
      const text = milliseconds(at), half = g.measureText(text).width / 2;
      g.fillText(text, Math.min(Math.max(this.x(at), LEFT + half), this.width - half), y + AXIS / 2);
    }
  }

  _selection(g, ink, y) {
    if (!this.selection) return;
    const [from, to] = this.selection.map((time) => this.x(time)).sort((one, other) => one - other);
    g.fillStyle = ink.selection;
    g.fillRect(from, TITLE, to - from, y - TITLE);
  }

  // --- what is under the pointer

  find(x, y) {
    const time = this.time(x);
    for (const band of this.bands) {
      for (const row of band.rows) {
        if (y < row.y || y >= row.y + ROW) continue;
        const slack = ((this.to - this.from) / this.width) * 2;
        const action = row.actions.find((each) => each[3] <= time && time < each[4])
          || row.actions.find((each) => each[3] - slack <= time && time < each[4] + slack);
        const work = row.works.find((each) => each[1] <= time && time < each[2]);
        const idle = row.idle.find((each) => each[1] <= time && time < each[2]);
        return {band, row, action, work, idle};
      }
    }
    return null;
  }

  describe(found) {
    const {band, row} = found;
    const where = `rank ${row.rank}, stage ${row.stage}, ${band.what}`;
    const when = (from, to) => `${milliseconds(from)} to ${milliseconds(to)}: ${milliseconds(to - from)}`;
    if (found.action) {
      const [kind, segment, microbatch, from, to] = found.action;
      const what = `${actionName(found.action)}: ${KIND_NAMES[kind] || kind} of microbatch ${microbatch}, segment ${segment}`;
      return [what, when(from, to), where];
    }
    if (found.work) return [found.work[0], when(found.work[1], found.work[2]), where];
    if (found.idle) {
      const [cause, from, to, other] = found.idle;
      const of = other === null || other === undefined ? "" : ` (stage ${other})`;
      return [`idle: ${CAUSES[cause] || cause}${of}`, when(from, to), where];
    }
    return null;
  }

  point(x, y) {
    const found = this.find(x, y);
    const lines = found && this.describe(found);
    this.hover = lines ? found : null;
    this.focus = null;
    this.tip.hidden = !lines;
    if (lines) {
      this.tip.replaceChildren(...lines.map((line, at) => {
        const part = document.createElement(at ? "div" : "strong");
        part.textContent = line;
        return part;
      }));
      const left = Math.max(0, Math.min(x + 12, this.width - this.tip.offsetWidth - 2));
      this.tip.style.left = left + "px";
      this.tip.style.top = y + 16 + "px";
    }
    this.draw();
  }

  // --- keys, mouse and fingers

  step(sideways, down) {
    const rows = this.bands.flatMap((band) => band.rows.map((row) => ({band, row})));
    let at = rows.findIndex(({row}) => this.focus && row === this.focus.row);
    let {row, band} = rows[Math.max(0, at)];
    let action;
    if (at < 0) {
      at = rows.findIndex((each) => each.band.what === "executed");
      ({row, band} = rows[Math.max(0, at)]);
      action = row.actions[0];
    } else if (down) {
      ({row, band} = rows[(at + down + rows.length) % rows.length]);
      const middle = (this.focus.action[3] + this.focus.action[4]) / 2;
      const away = (each) => Math.abs((each[3] + each[4]) / 2 - middle);
      action = row.actions.reduce((best, each) => (away(each) < away(best) ? each : best), row.actions[0]);
    } else {
      const index = row.actions.indexOf(this.focus.action) + sideways;
      action = row.actions[Math.max(0, Math.min(row.actions.length - 1, index))];
    }
    if (!action) return;
    this.focus = {band, row, action};
    this.hover = null;
    this.tip.hidden = true;
    this.said.textContent = this.describe(this.focus).join(" · ");
    const length = this.to - this.from;
    if (action[3] < this.from) this.zoomTo(action[3] - length / 10, action[3] + 0.9 * length);
    else if (action[4] > this.to) this.zoomTo(action[4] - 0.9 * length, action[4] + length / 10);
    else this.draw();
  }

  _buttons() {
    const bar = document.createElement("div");
    bar.className = "buttons";
    const add = (text, label, act) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.setAttribute("aria-label", label);
      button.addEventListener("click", act);
      bar.append(button);
    };
    add("−", "zoom out", () => this.zoomBy(2));
    add("+", "zoom in", () => this.zoomBy(0.5));
    add("◀", "earlier", () => this.moveBy(-0.5));
    add("▶", "later", () => this.moveBy(0.5));
    add("all", "show all of the step", () => this.zoomTo(0, this.longest));
    return bar;
  }

  _keys(event) {
    const acts = {
      "+": () => this.zoomBy(0.5),
      "=": () => this.zoomBy(0.5),
      "-": () => this.zoomBy(2),
      "0": () => this.zoomTo(0, this.longest),
      ArrowLeft: () => (event.altKey ? this.moveBy(-0.25) : this.step(-1, 0)),
      ArrowRight: () => (event.altKey ? this.moveBy(0.25) : this.step(1, 0)),
      ArrowUp: () => this.step(0, -1),
      ArrowDown: () => this.step(0, 1),
      Escape: () => {
        this.focus = null;
        this.draw();
      },
    };
    if (acts[event.key] && !event.ctrlKey && !event.metaKey) {
      acts[event.key]();
      event.preventDefault();
    }
  }

  _listen() {
    const canvas = this.canvas;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("keydown", (event) => this._keys(event));
    canvas.addEventListener("dblclick", () => this.zoomTo(0, this.longest));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
      event.preventDefault();
      this.zoomBy(event.deltaY > 0 ? 1.25 : 0.8, this.time(place(event)[0]));
    }, {passive: false});
    canvas.addEventListener("pointerdown", (event) => {
      this.touches.set(event.pointerId, place(event));
      canvas.setPointerCapture(event.pointerId);
      if (event.pointerType === "mouse" && !event.shiftKey) {
        const time = this.time(place(event)[0]);
        this.selection = [time, time];
      }
    });
    canvas.addEventListener("pointermove", (event) => this._move(event, place(event)));
    const end = (event) => this._end(event, place(event));
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    const leave = () => {
      this.hover = null;
      this.tip.hidden = true;
      this.draw();
    };
    // A finger leaves as it is lifted; what it asked stays until the next tap, here or elsewhere.
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "touch" || leave());
    document.addEventListener("pointerdown", (event) => event.target === canvas || leave());
  }

  _move(event, [x, y]) {
    const before = this.touches.get(event.pointerId);
    if (!before) {
      this.point(x, y);
      return;
    }
    if (this.selection) {
      this.selection[1] = this.time(x);
      this.tip.hidden = true;
      this.draw();
      return;
    }
    const other = [...this.touches].find(([id]) => id !== event.pointerId);
    if (other) {
      const distance = (one) => Math.max(20, Math.abs(one - other[1][0]));
      this.zoomBy(distance(before[0]) / distance(x), this.time((x + other[1][0]) / 2));
    } else if (this.to - this.from < this.longest || event.shiftKey) {
      const by = this.time(before[0]) - this.time(x);
      this.zoomTo(this.from + by, this.to + by);
    }
    this.touches.set(event.pointerId, [x, y]);
  }

  _end(event, [x, y]) {
    this.touches.delete(event.pointerId);
    const selection = this.selection;
    this.selection = null;
    if (selection && Math.abs(this.x(selection[1]) - this.x(selection[0])) > 6) {
      this.zoomTo(Math.min(...selection), Math.max(...selection));
    } else if (event.type === "pointerup") {
      this.point(x, y);
    }
  }
}

/** When the last thing of some bands ends. */
function endOf(bands) {
  const last = (spans, at) => (spans.length ? spans[spans.length - 1][at] : 0);
  const rows = bands.flatMap((band) => band.rows);
  return Math.max(1e-6, ...rows.flatMap((row) => [last(row.actions, 4), last(row.works, 2)]));
}
