// Put the charts into the page. What they show lies in it as JSON; nothing is loaded.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = [];
  const find = (name) => document.querySelectorAll(`[data-chart="${name}"]`);
  const withBoth = data.runs.length > 1;
  const lineOf = (run, xs, ys) => ({label: withBoth ? run.label : "", xs, ys});

  for (const box of find("values")) {
    const name = box.dataset.name;
    const lines = data.runs.flatMap((run) => run.curves.filter((curve) => curve.name === name)
      .map((curve) => ({...lineOf(run, curve.steps, curve.values), label: withBoth ? run.label : name})));
    charts.push(curves(box, `${name} over steps`, lines, figure, false));
  }
  for (const box of find("throughput")) {
    const unit = box.dataset.unit;
    const lines = data.runs.filter((run) => run.pace).map((run) => {
      const scale = unit === "steps" ? 1 : run.pace[unit];
      return {...lineOf(run, run.pace.numbers, run.pace.per_second.map((rate) => rate && rate * scale)), label: withBoth ? run.label : unit + "/s"};
    });
    charts.push(curves(box, `${unit} per second over steps`, lines, figure, true));
  }
  for (const box of find("matrix")) charts.push(heat(box, "bytes from rank to rank", data.runs[+box.dataset.run].matrix));

  const hidden = new Set(data.hidden);
  const shown = new Set(KINDS.filter((kind) => !hidden.has(kind)));
  const details = data.runs.map((run, index) => new Details(run, index));

  /** What is shown of one step of one run: schedule, memory and link, which zoom together. */
  function Details(run, index) {
    this.run = run;
    this.charts = [];
    const part = (name) => document.querySelector(`[data-chart="${name}"][data-run="${index}"]`);
    const boxes = {schedule: part("schedule"), memory: part("memory"), link: part("link")};
    if (!run.steps.length || !boxes.schedule) return;
    const choice = document.querySelector(`[data-choice="${index}"]`);
    const pipelines = document.querySelector(`[data-pipeline="${index}"]`);
    const schedule = new ScheduleView(boxes.schedule, (from, to) => {
      for (const chart of this.charts) chart.zoomTo(from, to);
    });
    this.highest = () => Math.max(0, ...details.flatMap((each) => (each.tops ? each.tops() : [])));
    this.choose = () => {
      const step = run.steps[choice ? +choice.value : 0];
      const pipeline = step.pipelines[pipelines ? +pipelines.value : 0];
      this.views = step.memory.filter((view) => pipeline.ranks.includes(view.rank));
      this.bands = bandsOf(pipeline);
      this.label = `schedule of step ${step.number}: ${pipeline.ranks.length} ranks, planned above executed`;
    };
    this.show = (longest) => {
      this.fill();
      schedule.show(this.bands, this.label, longest);
    };
    this.tops = () => (this.views || []).flatMap((view) => {
      const planned = run.planned[view.rank];
      const sum = (of) => [...shown].reduce((total, kind) => total + (of(kind) || 0), 0);
      return [...view.at_ms.map((_, at) => sum((kind) => view.bytes[kind][at])), planned ? sum((kind) => planned[kind]) : 0];
    });
    this.fill = () => {
      this.charts = [];
      for (const box of [boxes.memory, boxes.link]) if (box) box.replaceChildren();
      for (const view of this.views) {
        if (boxes.memory) {
          this.charts.push(memory(panel(boxes.memory, `rank ${view.rank}`), `memory of rank ${view.rank} over a step`, view,
            run.planned[view.rank], () => this.highest(), shown, (kind, on) => {
              if (shown.has(kind) === on) return;
              if (on) shown.add(kind);
              else shown.delete(kind);
              setTimeout(() => details.forEach((each) => each.again && each.again()));
            }));
        }
        if (boxes.link && view.out.some(Boolean)) {
          this.charts.push(link(panel(boxes.link, `rank ${view.rank}`), `offloading of rank ${view.rank} over a step`, view));
        }
      }
    };
    this.again = () => {
      const [from, to] = [schedule.from, schedule.to];
      this.fill();
      schedule.zoomTo(from, to);
    };
    this.restyle = () => {
      this.charts.forEach((chart) => chart.build());
      schedule.zoomTo(schedule.from, schedule.to);
    };
    for (const select of [choice, pipelines]) if (select) select.addEventListener("change", showAll);
  }

  function panel(box, title) {
    const figureBox = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    figureBox.append(caption);
    box.append(figureBox);
    return figureBox;
  }

  /** Both runs to one scale. */
  function showAll() {
    const some = details.filter((each) => each.show);
    some.forEach((each) => each.choose());
    const longest = Math.max(...some.map((each) => endOf(each.bands)));
    some.forEach((each) => each.show(longest));
  }
  showAll();

  const restyle = () => {
    charts.forEach((chart) => chart.build());
    details.forEach((each) => each.restyle && each.restyle());
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
  document.documentElement.dataset.ready = "yes";
})();
