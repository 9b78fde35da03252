// The list of runs, and several of them laid over each other.
import { badge, empty, h, replace, section, table } from "./dom.js";
import { ago, count, link, num, percent, query, runLink } from "./format.js";
import { get, runApi } from "./api.js";
import { chart, seriesColour, smooth, sparkline } from "./charts.js";

const STATE_KIND = {
  running: "good live",
  done: "",
  interrupted: "warn",
  failed: "bad",
  crashed: "bad",
  empty: "quiet",
};

export function stateBadge(run) {
  return badge(run.state, STATE_KIND[run.state] ?? "", run.why || null);
}

function progress(run) {
  const share = run.steps ? Math.min(1, run.step / run.steps) : 0;
  return [
    h("span", { class: "meter", role: "presentation" }, h("i", { style: { width: `${share * 100}%` } })),
    `${num(run.step)} / ${num(run.steps)}`,
  ];
}

function evaluation(run) {
  const found = run.evaluation;
  if (!found) return "–";
  const tip = `${found.set}: ${percent(found.first)} before, 95% interval ${percent(found.low)} to ${percent(found.high)}`;
  return h(
    "span",
    { title: tip },
    percent(found["pass@1"]),
    " ",
    h("small", { class: "sub" }, `± ${((found.high - found.low) * 50).toFixed(1)}`),
  );
}

export async function runsPage(context) {
  const chosen = new Set((context.query.get("select") ?? "").split(",").filter(Boolean));
  const node = h("div", { class: "stack" });
  const draw = async () => {
    const page = await get("/api/runs", null, context.signal);
    const compare = h("a", { class: "button primary", href: "#", id: "overlay" }, "Overlay");
    const update = () => {
      const ids = [...chosen].filter((id) => page.runs.some((run) => run.id === id));
      compare.setAttribute("href", link("overlay") + query({ runs: ids.join(",") }));
      compare.textContent = ids.length ? `Overlay ${ids.length} runs` : "Select runs to overlay";
      compare.toggleAttribute("aria-disabled", ids.length === 0);
    };
    const columns = [
      {
        title: "",
        cell: (run) =>
          h("input", {
            type: "checkbox",
            "aria-label": `select ${run.id}`,
            checked: chosen.has(run.id),
            onchange: (event) => {
              chosen[event.target.checked ? "add" : "delete"](run.id);
              update();
            },
          }),
      },
      {
        title: "Run",
        class: "wide",
        cell: (run) => [
          h("a", { href: runLink(run.id), data: { item: "" } }, run.id.replaceAll("~", "/")),
          h("div", { class: "sub" }, [run.model, run.workflow].filter(Boolean).join(" · ")),
        ],
      },
      {
        title: "State",
        cell: (run) => [
          stateBadge(run),
          (run.state === "failed" || run.problem) && h("div", { class: "sub" }, (run.why || run.problem).slice(0, 120)),
        ],
      },
      { title: "Steps", class: "nowrap", cell: progress },
      { title: "Reward", num: true, cell: (run) => num(run.reward) },
      { title: "Over time", cell: (run) => sparkline(run.sparkline, `reward of ${run.id} over its steps`) },
      { title: "pass@1", num: true, cell: evaluation },
      { title: "Episodes", num: true, cell: (run) => count(run.episodes) },
      { title: "Starts", num: true, cell: (run) => num(run.processes) },
      { title: "Last change", num: true, cell: (run) => ago(run.changed_at) },
    ];
    update();
    const body = page.runs.length
      ? h("div", { class: "panel flush" }, table(columns, page.runs, { caption: "runs" }))
      : h(
          "div",
          { class: "panel" },
          empty(
            "No runs here yet",
            `${page.root} holds no run folder. Start one: headrace train examples/countdown.toml`,
          ),
        );
    replace(
      node,
      h(
        "div",
        { class: "head" },
        h("h1", null, "Runs"),
        h("span", { class: "sub" }, page.root),
        h("span", { class: "grow" }),
        page.runs.length > 1 && compare,
      ),
      body,
    );
  };
  await draw();
  context.every(5000, draw);
  return { node, title: "Runs", crumbs: [] };
}

// ---- several runs ----------------------------------------------------------------------------------------------------

const PREFERRED = ["reward/mean", "response/length_mean", "policy/entropy", "drift/same_version", "tokens/s"];

export async function overlayPage(context) {
  const ids = (context.query.get("runs") ?? "").split(",").filter(Boolean);
  const runs = (await Promise.all(ids.map((id) => get(runApi(id), null, context.signal).catch(() => null)))).filter(
    Boolean,
  );
  if (!runs.length)
    return {
      node: h("div", { class: "panel" }, empty("No runs chosen", "Choose runs on the list of runs.")),
      title: "Overlay",
      crumbs: [["Overlay"]],
    };
  const keys = [...new Set(runs.flatMap((run) => run.keys.map((one) => one.key)))].sort();
  const set = (name) => (event) =>
    context.go(link("overlay") + query({ ...Object.fromEntries(context.query), [name]: event.target.value }));
  const metric = context.query.get("metric") ?? PREFERRED.find((key) => keys.includes(key)) ?? keys[0];
  const axis = context.query.get("axis") ?? "step";
  const weight = Number(context.query.get("smooth") ?? 0);
  const plot = chart(metric, { tall: true, time: axis === "time", legend: true });
  const data = await Promise.all(runs.map((run) => get(runApi(run.id, "/metrics"), { keys: metric }, context.signal)));
  const [steps, lines] = overlaid(runs, data, metric, axis, weight);
  const controls = h(
    "div",
    { class: "row" },
    h(
      "label",
      { class: "inline" },
      "Metric",
      h(
        "select",
        { id: "metric", onchange: set("metric"), value: metric },
        keys.map((key) => h("option", { value: key, selected: key === metric }, key)),
      ),
    ),
    h(
      "label",
      { class: "inline" },
      "Axis",
      h(
        "select",
        { id: "axis", onchange: set("axis") },
        ["step", "time"].map((one) => h("option", { value: one, selected: one === axis }, one)),
      ),
    ),
    h(
      "label",
      { class: "inline" },
      "Smoothing",
      h("input", {
        type: "range",
        id: "smooth",
        min: 0,
        max: 0.95,
        step: 0.05,
        value: weight,
        onchange: set("smooth"),
      }),
      num(weight, 2),
    ),
  );
  const node = h(
    "div",
    { class: "stack" },
    h("div", { class: "head" }, h("h1", null, `${runs.length} runs`), h("span", { class: "grow" }), controls),
    plot.node,
    evaluations(runs),
    differences(runs),
  );
  queueMicrotask(() => plot.update(steps, lines));
  return { node, title: "Overlay", crumbs: [["Overlay"]], after: () => plot.update(steps, lines) };
}

function overlaid(runs, data, metric, axis, weight) {
  const xs = data.map((one) => (axis === "time" ? one.seconds : one.steps));
  const all = [...new Set(xs.flat().filter((x) => x !== null))].sort((a, b) => a - b);
  const place = new Map(all.map((x, at) => [x, at]));
  const lines = data.flatMap((one, number) => {
    const values = new Array(all.length).fill(null);
    (one.series[metric] ?? []).forEach((value, at) => {
      if (xs[number][at] !== null) values[place.get(xs[number][at])] = value;
    });
    const colour = seriesColour(number);
    const label = runs[number].id.replaceAll("~", "/");
    const shown = { label, colour, values: smoothed(values, weight) };
    return weight ? [shown, { label, colour, values, quiet: true }] : [shown];
  });
  return [all, lines];
}

function smoothed(values, weight) {
  return smooth(values, weight);
}

function evaluations(runs) {
  const rows = runs.flatMap((run, number) => lastEvaluations(run).map((one) => ({ ...one, run, number })));
  if (!rows.length) return null;
  const columns = [
    {
      title: "Run",
      cell: (row) => [
        h("i", { class: "swatch", style: { background: seriesColour(row.number) } }),
        row.run.id.replaceAll("~", "/"),
      ],
    },
    { title: "Set", key: "set" },
    { title: "Step", num: true, cell: (row) => num(row.step) },
    { title: "pass@1", num: true, cell: (row) => percent(row.metrics["pass@1"]) },
    { title: "95% interval", cell: (row) => interval(row.metrics) },
    { title: "Tasks", num: true, cell: (row) => num(row.metrics.tasks) },
    {
      title: "Compare",
      cell: (row) =>
        row.run === runs[0]
          ? "–"
          : h(
              "a",
              {
                href:
                  link("compare") +
                  query({
                    a: `${runs[0].id}@${lastEvaluations(runs[0]).find((one) => one.set === row.set)?.step ?? ""}`,
                    b: `${row.run.id}@${row.step}`,
                    set: row.set,
                  }),
              },
              `against ${runs[0].id}`,
            ),
    },
  ];
  return section(
    "Evaluations",
    h("div", { class: "panel flush" }, table(columns, rows, { caption: "newest evaluation of each run" })),
  );
}

function lastEvaluations(run) {
  const newest = new Map();
  for (const one of run.evaluations) newest.set(one.set, one);
  return [...newest.values()];
}

export function interval(metrics) {
  const [low, high, at] = [metrics["pass@1_low"], metrics["pass@1_high"], metrics["pass@1"]];
  if (low === undefined || low === null) return "–";
  const bar = h(
    "span",
    { class: "meter", style: { width: "140px", position: "relative", height: "8px" } },
    h("i", {
      style: {
        position: "absolute",
        left: `${low * 100}%`,
        width: `${(high - low) * 100}%`,
        background: "var(--accent)",
        opacity: ".45",
      },
    }),
    h("i", { style: { position: "absolute", left: `calc(${at * 100}% - 1px)`, width: "3px" } }),
  );
  return h("span", { class: "nowrap" }, bar, `${percent(low)} – ${percent(high)}`);
}

export function flat(config, prefix) {
  const found = {};
  for (const [key, value] of Object.entries(config ?? {})) {
    const name = prefix ? `${prefix}.${key}` : key;
    if (value && typeof value === "object" && !Array.isArray(value)) Object.assign(found, flat(value, name));
    else found[name] = typeof value === "string" ? value : JSON.stringify(value);
  }
  return found;
}

function differences(runs) {
  if (runs.length < 2) return null;
  const all = runs.map((run) => flat(run.config));
  const keys = [...new Set(all.flatMap((one) => Object.keys(one)))]
    .sort()
    .filter((key) => new Set(all.map((one) => one[key])).size > 1);
  const columns = [
    { title: "Setting", cell: (key) => h("code", null, key) },
    ...runs.map((run, number) => ({
      title: run.id.replaceAll("~", "/"),
      cell: (key) => h("code", null, all[number][key] ?? "–"),
    })),
  ];
  return section(
    "What differs in their settings",
    h(
      "div",
      { class: "panel flush" },
      keys.length
        ? table(columns, keys, { caption: "settings that differ" })
        : empty("Nothing", "The settings are the same."),
    ),
  );
}
