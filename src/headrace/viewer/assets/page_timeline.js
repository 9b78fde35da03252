// Swimlanes: which episode ran when and under which version, what the learner did, starts, kills and syncs.
import { empty, h, replace, svg } from "./dom.js";
import { clock, num, query, rolloutLink, runLink, seconds, stepLink } from "./format.js";
import { get, runApi } from "./api.js";
import { rewardColour, seriesColour } from "./charts.js";
import { runHead, tabs } from "./page_run.js";

const [LEFT, TOP, LANE, MOST_LANES] = [76, 8, 9, 64];

// The first lane that is free when an episode starts.
function packed(episodes, end) {
  const free = [];
  return episodes.map((one) => {
    let lane = free.findIndex((until) => until <= one.started_at);
    if (lane < 0) lane = free.length;
    free[lane] = one.finished_at ?? end;
    return lane;
  });
}

export async function timelinePage(context) {
  const id = context.params[0];
  const window_ = { start: context.query.get("start"), end: context.query.get("end") };
  const by = context.query.get("by") ?? "version";
  const node = h("div", { class: "stack" });
  const picture = h("div", { class: "panel" });
  let [page, data] = [null, null];
  const load = async () => {
    [page, data] = await Promise.all([
      get(runApi(id), null, context.signal),
      get(runApi(id, "/timeline"), window_, context.signal),
    ]);
  };
  const draw = () => {
    replace(
      node,
      runHead(page),
      tabs(id, "timeline"),
      controls(context, id, data, by),
      picture,
      data.cut &&
        h("p", { class: "sub" }, "There are more episodes in this window than are drawn: look at a shorter one."),
      table(data),
    );
    if (!data.known)
      replace(
        picture,
        empty("No times on record", "This ledger was written before episodes had times; or nothing has started yet."),
      );
    else if (picture.clientWidth) paint();
  };
  const paint = () => replace(picture, lanes(id, data, by, picture.clientWidth - 28));
  await load();
  new ResizeObserver(() => {
    if (data?.known && picture.clientWidth) paint();
  }).observe(picture);
  context.live(
    id,
    async () => {
      await load();
      draw();
    },
    () => !window_.start,
  );
  return { node, title: `${id}: timeline`, crumbs: [[id, runLink(id)], ["Timeline"]], after: draw };
}

function controls(context, id, data, by) {
  if (!data.known) return null;
  const width = data.end - data.start;
  const to = (start, end) =>
    runLink(id, "timeline") +
    query({ start: Math.max(data.first, start).toFixed(2), end: Math.min(data.last, end).toFixed(2), by });
  const choose = (event) =>
    context.go(
      runLink(id, "timeline") +
        query({ start: context.query.get("start"), end: context.query.get("end"), by: event.target.value }),
    );
  return h(
    "div",
    { class: "row" },
    h(
      "span",
      { class: "sub" },
      `${clock(data.start)} to ${clock(data.end).slice(11)}: ${seconds(width)} of ${seconds(data.last - data.first)}`,
    ),
    h("span", { class: "grow" }),
    h(
      "label",
      { class: "inline" },
      "Colour by",
      h(
        "select",
        { id: "by", onchange: choose },
        [
          ["version", "policy version"],
          ["reward", "reward"],
          ["state", "state"],
        ].map(([value, text]) => h("option", { value, selected: value === by }, text)),
      ),
    ),
    h("a", { class: "button", href: to(data.start - width / 2, data.end - width / 2) }, "‹ Earlier"),
    h("a", { class: "button", href: to(data.start + width / 2, data.end + width / 2) }, "Later ›"),
    h("a", { class: "button", href: to(data.start + width / 4, data.end - width / 4) }, "Zoom in"),
    h("a", { class: "button", href: to(data.start - width / 2, data.end + width / 2) }, "Zoom out"),
    h("a", { class: "button", href: runLink(id, "timeline") + query({ by }) }, "Newest"),
  );
}

function colourOf(one, by, bounds) {
  if (by === "reward")
    return one.reward === null || one.state !== "finished" ? "var(--line-strong)" : rewardColour(one.reward, ...bounds);
  if (by === "state")
    return (
      { finished: "var(--c1)", failed: "var(--c2)", running: "var(--c3)", restarted: "var(--c5)" }[one.state] ??
      "var(--c8)"
    );
  return one.newest_version === null ? "var(--line-strong)" : seriesColour(one.newest_version);
}

function lanes(id, data, by, width) {
  const inner = Math.max(200, width - LEFT);
  const x = (at) => LEFT + ((at - data.start) / Math.max(1e-6, data.end - data.start)) * inner;
  const clip = (at) => Math.max(LEFT, Math.min(LEFT + inner, x(at)));
  const places = packed(data.episodes, data.end);
  const used = Math.min(MOST_LANES, Math.max(1, ...places.map((one) => one + 1)));
  const heads = [
    ["processes", 16],
    ["learner", 18],
    ["syncs", 14],
    ["evaluations", 14],
  ];
  let y = TOP;
  const tops = {};
  for (const [name, height] of heads) {
    tops[name] = y;
    y += height + 6;
  }
  tops.episodes = y + 4;
  const height = tops.episodes + used * LANE + 26;
  const bounds = [0, Math.max(1, ...data.episodes.map((one) => one.reward ?? 0))];
  const bar = (from, until, top, size, fill, label, href) => {
    const rect = svg(
      "rect",
      {
        x: clip(from).toFixed(1),
        y: top,
        width: Math.max(1.2, clip(until) - clip(from)).toFixed(1),
        height: size,
        rx: 1.5,
        fill,
      },
      svg("title", null, label),
    );
    return href ? svg("a", { href, "aria-label": label }, rect) : rect;
  };
  const label = (name, text) => svg("text", { x: 0, y: tops[name] + 11 }, text);
  const made = svg(
    "svg",
    { class: "lanes", viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "timeline" },
    ticks(data).map((at) => [
      svg("line", { class: "rule", x1: x(at), x2: x(at), y1: TOP, y2: height - 18 }),
      svg("text", { x: x(at), y: height - 5, "text-anchor": "middle" }, tickText(at, data)),
    ]),
    label("processes", "process"),
    data.processes.map((one) => {
      const end = one.ended_at ?? one.killed_at ?? data.end;
      return end < data.start || one.started_at > data.end
        ? null
        : bar(
            one.started_at,
            end,
            tops.processes,
            14,
            one.ended_at ? "var(--line-strong)" : "var(--accent)",
            `process ${one.pid}${one.resumed_from === null ? "" : `, resumed from step ${one.resumed_from}`}`,
          );
    }),
    label("learner", "learner"),
    data.waits.map((one) =>
      bar(
        one.started_at,
        one.ended_at,
        tops.learner + 7,
        3,
        "var(--line)",
        `waited ${seconds(one.ended_at - one.started_at)}`,
      ),
    ),
    data.batches.map((one) =>
      bar(
        one.started_at,
        one.ended_at ?? data.end,
        tops.learner,
        17,
        "var(--c3)",
        `step ${one.step}, version ${one.version}, ${one.ended_at ? seconds(one.ended_at - one.started_at) : "not committed"}`,
        stepLink(id, one.step),
      ),
    ),
    label("syncs", "syncs"),
    data.syncs.map((one) =>
      svg(
        "line",
        { class: "sync", x1: x(one.at), x2: x(one.at), y1: tops.syncs, y2: height - 20, "stroke-opacity": ".55" },
        svg("title", null, `version ${one.version} synced`),
      ),
    ),
    label("evaluations", "evaluated"),
    data.evaluations.map((one) =>
      svg(
        "a",
        {
          href: runLink(id, "evaluation", one.step, one.set),
          "aria-label": `evaluation of ${one.set} at step ${one.step}`,
        },
        svg(
          "rect",
          { x: clip(one.at) - 4, y: tops.evaluations, width: 8, height: 12, rx: 2, fill: "var(--c4)" },
          svg("title", null, `evaluation of ${one.set} at step ${one.step}`),
        ),
      ),
    ),
    svg("text", { x: 0, y: tops.episodes + 11 }, "episodes"),
    data.episodes.map((one, place) =>
      places[place] >= MOST_LANES
        ? null
        : bar(
            one.started_at,
            one.finished_at ?? data.end,
            tops.episodes + places[place] * LANE,
            LANE - 1.5,
            colourOf(one, by, bounds),
            `group ${one.group_id}, rollout ${one.rollout_idx}: ${one.state}, reward ${num(one.reward)}, version ${one.oldest_version ?? "–"} to ${one.newest_version ?? "–"}, ${num(one.tokens)} tokens`,
            rolloutLink(id, one.group_id, one.rollout_idx, one.attempt || null),
          ),
    ),
    data.processes.map((one) => [
      mark(one.started_at, "start", one.resumed_from === null ? "start" : "resume"),
      one.killed_at !== null ? mark(one.killed_at, "kill", "killed after this, its last sign") : null,
    ]),
  );
  function mark(at, kind, text) {
    return at < data.start || at > data.end
      ? null
      : svg("line", { class: kind, x1: x(at), x2: x(at), y1: TOP - 4, y2: height - 20 }, svg("title", null, text));
  }
  return made;
}

function ticks(data) {
  const width = data.end - data.start;
  const every =
    [0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800].find(
      (one) => width / one <= 9,
    ) ?? width / 6;
  const made = [];
  for (let at = Math.ceil(data.start / every) * every; at <= data.end; at += every) made.push(at);
  return made;
}

function tickText(at, data) {
  const whole = clock(at).slice(11);
  return data.end - data.start < 9 ? `${whole}.${Math.round((at % 1) * 10) % 10}` : whole;
}

function table(data) {
  if (!data.known) return null;
  const running = data.episodes.filter((one) => one.state === "running").length;
  const learned = data.batches.reduce(
    (sum, one) =>
      sum + Math.max(0, Math.min(one.ended_at ?? data.end, data.end) - Math.max(one.started_at, data.start)),
    0,
  );
  const waited = data.waits.reduce((sum, one) => sum + one.ended_at - one.started_at, 0);
  return h(
    "p",
    { class: "sub" },
    `${num(data.episodes.length)} episodes${running ? ` (${running} without an end)` : ""}, ${num(data.batches.length)} batches: the learner was busy for ${seconds(learned)} and waited for ${seconds(waited)}. ${num(data.syncs.length)} weight syncs (violet). Starts are green, kills red.`,
  );
}
