// One run: what it is doing, its curves, where its episodes went.
import { badge, empty, h, replace, section, table, visible } from "./dom.js";
import { bytes, clock, count, num, percent, runLink, seconds } from "./format.js";
import { get, isExport, runApi } from "./api.js";
import { blend, chart, cssColour } from "./charts.js";
import { stateBadge } from "./page_runs.js";

// The curves that say how a run goes; others are behind "all metrics".
const CURVES = [
  ["reward/mean", "Reward"],
  ["eval/*/pass@1", "pass@1"],
  ["response/length_mean", "Response length (tokens)"],
  ["policy/entropy", "Entropy (nats)"],
  ["staleness/mean", "Staleness (versions)"],
  ["drift/same_version", "Drift, sampler to learner (nats)"],
  ["tokens/s", "Tokens per second"],
  ["time/step_s", "Seconds per step"],
  ["policy/grad_norm", "Gradient norm"],
  ["policy/clip_fraction", "Clipped tokens (share)"],
  ["utilisation/engine", "Engine busy (share)"],
  ["utilisation/learner", "Learner busy (share)"],
];

export function tabs(run, current) {
  const made = [
    ["", "Overview"],
    ["steps", "Steps"],
    ["timeline", "Timeline"],
    ["search", "Search"],
    ["evaluations", "Evaluations"],
    ["settings", "Settings"],
  ];
  return h(
    "nav",
    { class: "tabs", "aria-label": "pages of the run" },
    made.map(([name, title]) =>
      h(
        "a",
        { href: name ? runLink(run, name) : runLink(run), "aria-current": name === current ? "page" : null },
        title,
      ),
    ),
  );
}

export function runHead(page) {
  return h(
    "div",
    { class: "head" },
    h("h1", null, page.id.replaceAll("~", "/")),
    stateBadge(page),
    page.why && h("span", { class: "sub" }, page.why),
    h("span", { class: "grow" }),
    h("span", { class: "sub" }, page.path),
  );
}

export function stats(entries) {
  const noted = entries.some((one) => one && one[2]);
  return h(
    "dl",
    { class: "stats" },
    entries
      .filter(Boolean)
      .map(([name, value, note]) =>
        h(
          "div",
          { class: "stat" },
          h("dt", { title: name }, name),
          h(
            "dd",
            { title: typeof value === "string" ? value : null },
            value,
            noted && h("small", null, note ?? "\u00a0"),
          ),
        ),
      ),
  );
}

// When a process ended: of a killed one its last sign; the last one of a running run has no end yet.
function endOf(page, one, place) {
  if (one.ended_at) return one.ended_at;
  return page.state === "running" && place === page.starts.length - 1
    ? Date.now() / 1000
    : (one.last_sign_at ?? one.started_at);
}

function facts(page) {
  const last = page.metrics;
  const found = page.evaluation;
  const spent = (page.starts ?? []).reduce((sum, one, place) => sum + (endOf(page, one, place) - one.started_at), 0);
  return stats([
    ["Step", num(page.step), `of ${num(page.steps)}`],
    ["Policy version", num(page.version)],
    ["Reward", num(page.reward)],
    found && [`pass@1, ${found.set}`, percent(found["pass@1"]), `from ${percent(found.first)}`],
    ["Staleness", num(last["staleness/mean"]), `max ${num(last["staleness/max"])}`],
    ["Drift", num(last["drift/same_version"]), "nats"],
    ["Tokens per second", count(last["tokens/s"] ?? last["tokens/generated_per_s"])],
    ["Sampled so far", count(page.sampled_tokens), "tokens"],
    ["Trained so far", count(page.trained_tokens), "tokens"],
    ["Time so far", seconds(spent)],
    ["Ledger", bytes(page.ledger_bytes)],
  ]);
}

function curveKeys(page, all) {
  const keys = page.keys.map((one) => one.key);
  if (all) return keys.filter((key) => !key.startsWith("eval/")).map((key) => [key, key, [key]]);
  return CURVES.flatMap(([pattern, title]) => {
    if (!pattern.includes("*")) return keys.includes(pattern) ? [[pattern, title, [pattern]]] : [];
    const [start, end] = pattern.split("*");
    return keys
      .filter((key) => key.startsWith(start) && key.endsWith(end) && key.split("/").length === 3)
      .map((key) => [key, `${title}, ${key.slice(start.length, -end.length)}`, [key, `${key}_low`, `${key}_high`]]);
  });
}

function curveLines(series, keys) {
  const [main, low, high] = keys;
  const values = series[main] ?? [];
  const line = { label: main, values, points: main.startsWith("eval/") };
  if (!low || !series[low]) return [line];
  return [
    line,
    { label: "low", values: series[low], quiet: true, colour: cssColour("--c1") },
    { label: "high", values: series[high], quiet: true, colour: cssColour("--c1") },
  ];
}

export async function runPage(context) {
  const id = context.params[0];
  let page = await get(runApi(id), null, context.signal);
  let all = context.query.get("all") === "1";
  const top = h("div", { class: "stack" });
  const grid = h("div", { class: "charts" });
  const below = h("div", { class: "stack" });
  const account = accountChart();
  let charts = new Map();
  let data = null;

  const drawCurves = () => {
    const wanted = curveKeys(page, all);
    if ([...charts.keys()].join() !== wanted.map(([key]) => key).join()) {
      charts = new Map(
        wanted.map(([key, title, keys]) => {
          const about = page.keys.find((one) => one.key === key);
          return [
            key,
            {
              keys,
              made: chart(title, {
                sync: "run",
                zero: /share|length|staleness|pass@1/i.test(title),
                tip: `${key}${about?.meaning ? ": " + about.meaning : ""}`,
              }),
            },
          ];
        }),
      );
      grid.replaceChildren(...[...charts.values()].map((one) => one.made.node));
    }
    for (const { keys, made } of charts.values()) made.update(data.steps, curveLines(data.series, keys));
  };
  const load = async () => {
    const wanted = curveKeys(page, all).flatMap(([, , keys]) => keys);
    data = await get(
      runApi(id, "/metrics"),
      isExport() ? null : { keys: wanted.join(","), points: 600 },
      context.signal,
    );
  };
  const drawRest = async () => {
    replace(
      top,
      runHead(page),
      tabs(id, ""),
      page.problem && h("div", { class: "notice warn" }, page.problem),
      facts(page),
      alarms(page),
    );
    replace(below, h("div", { class: "columns even" }, account.node, accountTable(page)), starts(page));
    if (page.account) account.update(await get(runApi(id, "/account"), null, context.signal));
  };
  const more = h(
    "button",
    {
      type: "button",
      id: "all-metrics",
      "aria-pressed": String(all),
      onclick: async () => {
        all = !all;
        more.setAttribute("aria-pressed", String(all));
        await load();
        drawCurves();
      },
    },
    "All metrics",
  );
  const node = h(
    "div",
    { class: "stack" },
    top,
    h("div", { class: "head" }, h("h2", null, "Curves"), h("span", { class: "grow" }), more),
    grid,
    below,
  );
  await load();
  const after = async () => {
    await drawRest();
    if (data.steps.length) drawCurves();
    else
      replace(
        grid,
        h(
          "div",
          { class: "panel" },
          empty("No steps yet", "Curves begin with the first step. This page follows the run by itself."),
        ),
      );
  };
  context.live(id, async () => {
    page = await get(runApi(id), null, context.signal);
    await load();
    await after();
  });
  return { node, title: id, crumbs: [[id]], after };
}

// ---- where episodes went ---------------------------------------------------------------------------------------------

const ENDINGS = [
  ["trained", "--c1"],
  ["filtered", "--c5"],
  ["stale", "--c4"],
  ["failed", "--c2"],
];

function accountChart() {
  const made = chart("Episodes by how they ended", { legend: true, zero: true });
  return {
    node: made.node,
    update(page) {
      let below = page.steps.map(() => 0);
      const stacked = ENDINGS.map(([name, colour]) => {
        below = page[name].map((value, place) => value + below[place]);
        const painted = cssColour(colour);
        return { label: name, values: below, colour: painted, fill: blend(painted, cssColour("--panel"), 0.5) };
      });
      made.update(page.steps, stacked.reverse()); // the largest first, the others over it
    },
  };
}

function accountTable(page) {
  if (!page.account)
    return h(
      "div",
      { class: "panel" },
      empty("No ledger", "This run keeps no record of its episodes (ledger.enabled)."),
    );
  const rows = [["all", page.account], ...(Object.keys(page.accounts).length > 1 ? Object.entries(page.accounts) : [])];
  const names = ["dispatched", "trained", "filtered", "failed", "stale", "pending"];
  const columns = [
    { title: "Source", cell: ([name]) => name },
    ...names.map((name) => ({ title: name, num: true, cell: ([, account]) => num(account[name]) })),
  ];
  const sum = page.account;
  return h(
    "div",
    { class: "panel stack" },
    h("h2", null, "The account"),
    table(columns, rows, { caption: "account of episodes" }),
    h(
      "p",
      { class: "sub" },
      `${num(sum.dispatched)} dispatched = ${num(sum.trained)} trained + ${num(sum.filtered)} filtered + ${num(sum.failed)} failed + ${num(sum.stale)} stale + ${num(sum.pending)} pending.`,
      page.restarted ? ` ${num(page.restarted)} attempts were restarted.` : "",
    ),
  );
}

function alarms(page) {
  if (!page.warnings.length) return null;
  const rows = page.warnings
    .slice(0, 8)
    .map((one) =>
      h(
        "li",
        null,
        h("span", { class: "sub" }, one.at.slice(11, 19), " "),
        visible(one.text),
        one.count > 1 && badge(`× ${one.count}`, "quiet"),
      ),
    );
  const kind = page.warnings.some((one) => one.level === "error" || one.level === "critical") ? "bad" : "warn";
  return h(
    "details",
    { class: `notice ${kind}`, open: page.warnings.length < 4 },
    h("summary", null, `${page.warnings.length} warning${page.warnings.length > 1 ? "s" : ""} in log.txt`),
    h("ul", null, rows),
  );
}

function starts(page) {
  if (!page.starts?.length) return null;
  const columns = [
    { title: "Start", num: true, cell: (_, place) => place + 1 },
    { title: "Began", class: "nowrap", cell: (one) => clock(one.started_at) },
    {
      title: "Ended",
      class: "nowrap",
      cell: (one, place) =>
        one.ended_at
          ? clock(one.ended_at)
          : place === page.starts.length - 1 && page.state === "running"
            ? badge("running", "good live")
            : badge("killed", "bad", "it ended without writing its end"),
    },
    { title: "For", num: true, cell: (one, place) => seconds(endOf(page, one, place) - one.started_at) },
    { title: "Process", cell: (one) => `${one.pid} on ${one.host}` },
    {
      title: "Resumed from",
      cell: (one) => (one.resumed_from === null ? "the beginning" : `step ${one.resumed_from}`),
    },
  ];
  return section(
    "Starts",
    h("div", { class: "panel flush" }, table(columns, page.starts, { caption: "processes of the run" })),
  );
}
