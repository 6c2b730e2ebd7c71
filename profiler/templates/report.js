"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const words = (name) => name.replaceAll("_", " ");
  const number = (v, digits = 1) => (Math.abs(v) >= 1000 ? Math.round(v).toString() : v.toFixed(digits));
  const node = (tag, attributes = {}, text) => {
    const svg = ["svg", "g", "rect", "line", "path", "text", "defs", "pattern"].includes(tag);
    const it = svg ? document.createElementNS(NS, tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) it.setAttribute(key, value);
    if (text !== undefined) it.textContent = text; // never markup: names come from the run
    return it;
  };
  const ticks = (low, high, wanted) => {
    const raw = (high - low) / Math.max(1, wanted);
    const power = 10 ** Math.floor(Math.log10(raw || 1));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw;
    const out = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) out.push(v);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    return out.map((v) => [v, v.toFixed(digits)]);
  };

  // A chart owns a view [a, b] on the horizontal axis; charts that share a view move together.
  const makeView = (low, high) => ({ low, high, a: low, b: high, charts: [] });
  const setView = (view, a, b) => {
    const least = (view.high - view.low) * 1e-5;
    const width = Math.min(Math.max(b - a, least), view.high - view.low);
    view.a = Math.max(view.low, Math.min(a, view.high - width));
    view.b = view.a + width;
    view.charts.forEach((chart) => chart.draw());
  };
  const zoom = (view, factor) => {
    const middle = (view.a + view.b) / 2;
    const half = ((view.b - view.a) / 2) * factor;
    setView(view, middle - half, middle + half);
  };
  const move = (view, share) => { const d = (view.b - view.a) * share; setView(view, view.a + d, view.b + d); };

  const makeChart = (holder, view, options) => {
    holder.replaceChildren();
    const svg = node("svg", { role: "img", tabindex: "0", "aria-label": options.label });
    holder.append(svg);
    const chart = { svg, left: 54, right: 8, top: 8, bottom: options.axis === false ? 6 : 24 };
    const fit = () => Math.max(220, holder.clientWidth - 16);
    let out = null;
    if (options.tools !== false) {
      const tools = node("div", { class: "tools" });
      for (const [text, label, act] of [
        ["←", "earlier", () => move(view, -0.5)], ["→", "later", () => move(view, 0.5)],
        ["+", "zoom in", () => zoom(view, 0.5)], ["−", "zoom out", () => zoom(view, 2)],
        ["all", "show everything", () => setView(view, view.low, view.high)],
      ]) {
        const button = node("button", { type: "button", "aria-label": label, title: label }, text);
        button.addEventListener("click", act);
        tools.append(button);
      }
      out = node("output", { "aria-live": "polite" });
      tools.append(out);
      holder.append(tools);
    }
    chart.say = (parts) => {
      if (!out) return;
      out.replaceChildren(...parts.map(([text, strong]) => (strong ? node("b", {}, text) : document.createTextNode(text))));
    };
    chart.draw = () => {
      chart.width = fit();
      chart.height = options.height();
      svg.setAttribute("viewBox", `0 0 ${chart.width} ${chart.height}`);
      svg.setAttribute("height", chart.height);
      svg.replaceChildren();
      chart.x = (t) => chart.left + ((t - view.a) / (view.b - view.a)) * (chart.width - chart.left - chart.right);
      chart.at = (x) => view.a + ((x - chart.left) / (chart.width - chart.left - chart.right)) * (view.b - view.a);
      options.paint(chart);
      if (options.axis !== false) {
        const y = chart.height - chart.bottom;
        svg.append(node("line", { class: "axis", x1: chart.left, x2: chart.width - chart.right, y1: y, y2: y }));
        for (const [v, text] of ticks(view.a, view.b, chart.width / 90)) {
          svg.append(node("text", { x: chart.x(v), y: y + 16, "text-anchor": chart.x(v) < chart.left + 14 ? "start" : chart.x(v) > chart.width - chart.right - 30 ? "end" : "middle" }, `${text} ${options.unit}`));
        }
      }
    };
    let from = null;
    let pick = null;
    const place = (event) => {
      const box = svg.getBoundingClientRect();
      return ((event.clientX - box.left) / box.width) * chart.width;
    };
    svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch") return;
      from = place(event);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const x = place(event);
      const box = svg.getBoundingClientRect();
      if (options.hover) options.hover(chart, chart.at(x), ((event.clientY - box.top) / box.height) * chart.height);
      if (from === null) return;
      if (!pick) { pick = node("rect", { class: "pick", y: 0, height: chart.height }); svg.append(pick); }
      pick.setAttribute("x", Math.min(from, x));
      pick.setAttribute("width", Math.abs(x - from));
    });
    svg.addEventListener("pointerup", (event) => {
      const x = place(event);
      if (from !== null && Math.abs(x - from) > 6) setView(view, chart.at(Math.min(from, x)), chart.at(Math.max(from, x)));
      if (pick) pick.remove();
      from = pick = null;
    });
    svg.addEventListener("dblclick", () => setView(view, view.low, view.high));
    svg.addEventListener("keydown", (event) => {
      const act = {
        ArrowLeft: () => move(view, -0.2), ArrowRight: () => move(view, 0.2), "+": () => zoom(view, 0.6), "=": () => zoom(view, 0.6),
        "-": () => zoom(view, 1 / 0.6), 0: () => setView(view, view.low, view.high),
      }[event.key];
      if (act) { event.preventDefault(); act(); }
    });
    view.charts.push(chart);
    chart.draw();
    if (holder.watch) holder.watch.disconnect(); // the chart that was here before
    holder.watch = new ResizeObserver(() => { if (fit() !== chart.width) chart.draw(); });
    holder.watch.observe(holder);
    return chart;
  };

  // ---- every step -------------------------------------------------------------------------------------------------
  const steps = data.steps;
  let stepView = null;
  if (steps) {
    const n = steps.t0.length;
    stepView = makeView(0, steps.t1[n - 1]);
    const order = steps.names.map((name, i) => i);
    const heights = steps.max.slice().sort((a, b) => a - b);
    // One step may be a hundred times longer than the rest (the first one): it is cut off and marked, not allowed to flatten all others.
    const usual = heights[Math.floor(0.98 * (n - 1))] * 1.25;
    const paint = (chart) => {
      const { svg } = chart;
      let lo = 0;
      let hi = n;
      while (lo < n && steps.t1[lo] <= stepView.a) lo++;
      while (hi > lo && steps.t0[hi - 1] >= stepView.b) hi--;
      const shown = steps.max.slice(lo, hi);
      const top = Math.max(1e-3, Math.min(Math.max(...shown), Math.max(usual, heights[Math.floor(n / 2)] * 2)) * 1.05);
      const bottom = chart.height - chart.bottom;
      const y = (ms) => bottom - (Math.min(ms, top) / top) * (bottom - chart.top);
      for (const [v, text] of ticks(0, top, 4)) {
        svg.append(node("line", { class: "grid", x1: chart.left, x2: chart.width - chart.right, y1: y(v), y2: y(v) }));
        svg.append(node("text", { x: chart.left - 6, y: y(v) + 4, "text-anchor": "end" }, v ? `${text} ms` : "0"));
      }
            const each = Math.max(1, Math.ceil((hi - lo) / Math.max(60, chart.width / 2)));
      const paths = order.map(() => "");
      const cut = [];
      for (let i = lo; i < hi; i += each) {
        const last = Math.min(i + each, hi) - 1;
        const x0 = Math.max(chart.left, chart.x(steps.t0[i]));
        const x1 = Math.min(chart.width - chart.right, chart.x(steps.t1[last]));
        const w = Math.max(0.5, x1 - x0 - (x1 - x0 > 4 ? 1 : 0));
        const means = order.map((p) => {
          let mean = 0;
          for (let j = i; j <= last; j++) mean += steps.parts[p][j];
          return mean / (last - i + 1);
        });
        const whole = means.reduce((a, b) => a + b, 0);
        const shrink = Math.min(1, top / whole); // a bar that is cut off still shows its parts in proportion
        let sum = 0;
        for (const p of order) {
          if (means[p] <= 0) continue;
          const y0 = y(sum);
          sum += means[p] * shrink;
          const h = y0 - y(sum);
          if (h > 0.05) paths[p] += `M${x0.toFixed(2)} ${y0.toFixed(2)}h${w.toFixed(2)}v${(-h).toFixed(2)}h${(-w).toFixed(2)}z`;
        }
        if (whole > top) cut.push([x0 + w / 2, whole]);
      }
      order.forEach((p) => svg.append(node("path", { d: paths[p], fill: data.colours.parts[steps.names[p]] })));
      let before = -99;
      for (const [x, ms] of cut) {
        if (x - before < 64) continue;
        before = x;
        const far = x > chart.width - 80;
        svg.append(node("path", { d: `M${x - 4} ${chart.top + 6}l4 -6l4 6z`, fill: "var(--fg)" }));
        svg.append(node("text", { class: "halo", x: far ? x - 8 : x + 7, y: chart.top + 8, "text-anchor": far ? "end" : "start" }, `${number(ms, 0)} ms`));
      }
    };
    const hover = (chart, t) => {
      let lo = 0;
      let hi = n - 1;
      while (lo < hi) { const m = (lo + hi) >> 1; if (steps.t1[m] < t) lo = m + 1; else hi = m; }
      const many = steps.count[lo] > 1;
      const name = many ? `steps ${steps.first[lo]} to ${steps.first[lo] + steps.count[lo] - 1}` : `step ${steps.first[lo]}`;
      const parts = [[name, true], [` at ${number(steps.t0[lo], 2)} s: `]];
      steps.names.forEach((part, i) => { if (steps.parts[i][lo] >= 0.01) parts.push([` ${words(part)} `], [`${number(steps.parts[i][lo], 2)} ms`, true]); });
      chart.say(parts);
    };
    const cold = n > 2 && steps.t1[0] > 0.25 * steps.t1[n - 1];
    if (cold) stepView.a = steps.t0[1]; // a slow start would leave all other steps a few pixels
    const drawn = makeChart(document.getElementById("chart-steps"), stepView, { label: "Time of every step by part", unit: "s", height: () => (innerWidth < 520 ? 220 : 280), paint, hover });
    if (cold) drawn.say([["the first step is to the left: "], ["all", true], [" shows it"]]);
    const under = document.getElementById("chart-samples");
    for (const line of data.samples) {
      const holder = node("div", { class: "chart" });
      under.append(holder);
      const top = line.unit === "%" ? 100 : Math.max(...line.v, 1e-9) * 1.05;
      makeChart(holder, stepView, {
        label: `${line.title} over time`, unit: "s", axis: false, tools: false, height: () => 76,
        paint: (chart) => {
          const y = (v) => chart.height - chart.bottom - (v / top) * (chart.height - chart.bottom - 22);
          let path = "";
          line.t.forEach((t, i) => {
            if (t < stepView.a || t > stepView.b) return;
            path += `${path ? "L" : "M"}${chart.x(t).toFixed(1)} ${y(line.v[i]).toFixed(1)}`;
          });
          chart.svg.append(node("line", { class: "grid", x1: chart.left, x2: chart.width - chart.right, y1: y(0), y2: y(0) }));
          chart.svg.append(node("path", { class: "line", d: path || "M0 0" }));
          chart.svg.append(node("text", { x: chart.left, y: 14 }, line.unit ? `${line.title}, ${line.unit}` : line.title));
          chart.svg.append(node("text", { x: chart.left - 6, y: y(top) + 4, "text-anchor": "end" }, number(top, top < 10 ? 1 : 0)));
        },
      });
    }
  }

  // ---- lanes ------------------------------------------------------------------------------------------------------
  const select = document.getElementById("window");
  if (select && data.windows.length) {
    data.windows.forEach((w, i) => select.append(node("option", { value: i }, w.title)));
    const pale = new Set(["feed_wait", "slot_wait", "lease_wait"]);
    let view = null;
    const showWindow = () => {
      const w = data.windows[select.value];
      view = makeView(w.t0, w.t1);
      const lane = 30;
      const names = innerWidth < 520;
      const paint = (chart) => {
        const { svg } = chart;
        chart.left = 8;
        const defs = node("defs");
        const hatch = node("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
        hatch.append(node("rect", { width: 2, height: 6, fill: "var(--card)", opacity: 0.7 }));
        defs.append(hatch);
        svg.append(defs);
        const bottom = chart.height - chart.bottom;
        let lastText = -99;
        for (const [step, t] of w.steps) {
          const x = chart.x(t);
          if (x < chart.left - 1 || x > chart.width - chart.right) continue;
          svg.append(node("line", { class: "axis", x1: x, x2: x, y1: 16, y2: bottom, "stroke-dasharray": "2 3" }));
          if (x - lastText > 52) { svg.append(node("text", { x: x + 3, y: 12 }, names ? `${step}` : `step ${step}`)); lastText = x; }
        }
        w.lanes.forEach((name, i) => {
          svg.append(node("text", { x: chart.left, y: 32 + i * (lane + 18) }, name));
          svg.append(node("line", { class: "grid", x1: chart.left, x2: chart.width - chart.right, y1: 37 + i * (lane + 18) + lane / 2, y2: 37 + i * (lane + 18) + lane / 2 }));
        });
        for (const [row, t0, t1, stage, step, open, test] of w.spans) {
          if (t1 < view.a || t0 > view.b) continue;
          const x0 = Math.max(chart.left, chart.x(t0));
          const width = Math.max(0.7, Math.min(chart.width - chart.right, chart.x(t1)) - x0);
          const inner = stage === "batch" || (stage === "test" && !test) ? 0 : 3;
          const box = { x: x0, y: 37 + row * (lane + 18) + inner, width, height: lane - 2 * inner, rx: Math.min(2, width / 3) };
          svg.append(node("rect", { ...box, fill: data.colours.stages[stage] || "#888", opacity: stage === "batch" ? 0.28 : pale.has(stage) ? 0.5 : 1 }));
          if (open) svg.append(node("rect", { ...box, fill: "url(#hatch)" }));
          const long = step >= 0 ? `${words(stage)} ${step}` : words(stage);
          const title = [long, words(stage)].find((text) => width > 7 * text.length + 10);
          if (title && stage !== "batch") {
            const label = node("text", { x: x0 + 5, y: 37 + row * (lane + 18) + lane / 2 + 4 }, title);
            label.style.fill = pale.has(stage) ? "var(--fg)" : ["augment", "function", "gc", "host", "h2d", "copy", "alloc", "collate"].includes(stage) ? "#111" : "#fff";
            svg.append(label);
          }
        }
      };
      const hover = (chart, t, y) => {
        const row = Math.floor((y - 34) / (lane + 18));
        const hits = w.spans.filter((s) => s[0] === row && s[1] <= t && s[2] >= t);
        if (!hits.length) { chart.say([]); return; }
        const s = hits.reduce((a, b) => (b[2] - b[1] < a[2] - a[1] ? b : a));
        chart.say([[`${words(s[3])}`, true], [s[4] >= 0 ? ` of step ${s[4]}` : ""], [`, ${w.lanes[row]}: `], [`${number(s[2] - s[1], 2)} ms`, true],
          [s[5] ? ", not ended in the record" : ""], [s[6] ? ", test" : ""]]);
      };
      const chart = makeChart(document.getElementById("chart-lanes"), view, {
        label: `Lanes: ${w.title}`, unit: "ms", height: () => 42 + w.lanes.length * (lane + 18) + 22, paint, hover,
      });
      if (w.left_out) chart.say([[`${w.left_out} short spans are not drawn`]]);
      else chart.say([["time since the first step began"]]);
      const legend = document.getElementById("lane-legend");
      legend.replaceChildren();
      for (const stage of [...new Set(w.spans.map((s) => s[3]))].sort()) {
        const item = node("li");
        item.append(node("i", { style: `background:${data.colours.stages[stage] || "#888"};opacity:${stage === "batch" ? 0.28 : pale.has(stage) ? 0.5 : 1}` }), document.createTextNode(words(stage)));
        legend.append(item);
      }
    };
    select.addEventListener("change", showWindow);
    showWindow();
  }

  // ---- tables as CSV ----------------------------------------------------------------------------------------------
  const csv = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => {
    const text = cell.textContent.trim().replace(/\s+/g, " ");
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }).join(",")).join("\n");
  const copy = async (text) => {
    try { await navigator.clipboard.writeText(text); return true; } catch (refused) {
      const area = node("textarea", { style: "position:fixed;opacity:0" });
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  };
  for (const table of document.querySelectorAll("table[data-name]")) {
    const button = node("button", { type: "button", class: "copy", "aria-label": `copy the table ${table.dataset.name} as CSV` }, "copy as CSV");
    button.addEventListener("click", async () => {
      button.textContent = (await copy(csv(table))) ? "copied" : "could not copy";
      setTimeout(() => { button.textContent = "copy as CSV"; }, 1500);
    });
    table.parentElement.after(button);
  }
})();
