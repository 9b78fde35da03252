// Curves with uPlot, and small pictures as SVG.
import { h, svg } from "./dom.js";
import { num } from "./format.js";

const live = new Set();

export function cssColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function blend(first, second, share) {
  const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const [ours, theirs] = [parts(first), parts(second)];
  return `rgb(${ours.map((one, place) => Math.round(one * share + theirs[place] * (1 - share))).join(",")})`;
}

export const seriesColour = (place) => cssColour(`--c${(place % 8) + 1}`);

export function smooth(values, weight) {
  if (!weight) return values;
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return value ?? null;
    mean = mean === null ? value : mean * weight + value * (1 - weight);
    return mean;
  });
}

function axis(size) {
  return {
    stroke: cssColour("--ink-3"),
    font: "11px system-ui, sans-serif",
    size,
    gap: 4,
    grid: { stroke: cssColour("--grid"), width: 1 },
    ticks: { show: false },
  };
}

// A panel with curves. lines: [{label, values, colour?, dash?, raw?}]; steps: x values.
// Returns {node, update(steps, lines)}.
export function chart(title, options) {
  const given = options ?? {};
  const now = h("span", { class: "now" }, "");
  const plot = h("div", { class: "plot" });
  const heading = h("h3", { title: given.tip ?? title }, title);
  const node = h(
    "div",
    { class: `panel chart ${given.tall ? "tall" : ""}`, role: "img", "aria-label": title },
    h("header", null, heading, now),
    plot,
    given.legend && h("div", { class: "legend" }),
  );
  let made = null;
  let lines = [];
  let steps = [];

  const show = (place) => {
    if (!lines.length || !steps.length) {
      now.textContent = "";
      return;
    }
    const at = place ?? lastPlace(lines[0].values);
    if (at < 0) {
      now.textContent = "–";
      return;
    }
    const values = lines
      .filter((one) => !one.quiet)
      .slice(0, 3)
      .map((one) => num(one.values[at]));
    now.textContent =
      place === null
        ? values.join(" · ")
        : `${given.time ? num(steps[at] / 60, 1) + " min" : "step " + steps[at]}: ${values.join(" · ")}`;
  };

  const build = () => {
    made?.destroy();
    made = new uPlot(
      {
        width: plot.clientWidth || 340,
        height: plot.clientHeight || 170,
        legend: { show: false },
        cursor: {
          y: false,
          points: { size: 6 },
          drag: { x: true, y: false },
          sync: given.sync ? { key: given.sync } : undefined,
        },
        scales: { x: { time: false }, y: { range: (_, low, high) => span(low, high, given.zero) } },
        axes: [
          {
            ...axis(24),
            values: (_, ticks) =>
              ticks.map((tick) => (given.time ? num(tick / 60, 0) : Number.isInteger(tick) ? num(tick) : "")),
          },
          { ...axis(50), values: (_, ticks) => ticksText(ticks) },
        ],
        series: [
          {},
          ...lines.map((one, place) => {
            const colour = one.colour ?? seriesColour(place);
            return {
              stroke: colour,
              width: one.quiet ? 1 : 1.7,
              dash: one.dash,
              fill: one.fill,
              spanGaps: true,
              alpha: one.quiet ? 0.35 : 1,
              points: {
                show: one.points ?? lines[0].values.filter((v) => v !== null).length < 3,
                size: one.points ? 6 : 4,
              },
            };
          }),
        ],
        hooks: { setCursor: [(one) => show(one.cursor.idx ?? null)] },
      },
      [steps, ...lines.map((one) => one.values)],
      plot,
    );
    show(null);
  };
  const entry = {
    node,
    rebuild: build,
    resize: () => made?.setSize({ width: plot.clientWidth, height: plot.clientHeight }),
  };
  live.add(entry);
  observe(plot, entry);
  return {
    node,
    update(newSteps, newLines) {
      const same = made && newLines.length === lines.length && plot.isConnected;
      [steps, lines] = [newSteps, newLines];
      if (given.legend) legend(node.querySelector(".legend"), lines);
      node.setAttribute("aria-label", `${title}: ${described(lines)}`);
      if (same) {
        made.setData([steps, ...lines.map((one) => one.values)]);
        show(null);
      } else if (plot.clientWidth) build();
    },
  };
}

function ticksText(ticks) {
  const apart = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : 1;
  const most = Math.max(...ticks.map(Math.abs));
  if (most >= 1e5 || (most > 0 && most < 0.001))
    return ticks.map((tick) => (tick === 0 ? "0" : tick.toExponential(1).replace("-", "−").replace("e+", "e")));
  const digits = [0, 1, 2, 3, 4].find((one) => Math.abs(apart * 10 ** one - Math.round(apart * 10 ** one)) < 1e-6) ?? 4;
  return ticks.map((tick) => num(tick, digits));
}

function described(lines) {
  return lines
    .filter((one) => !one.quiet)
    .slice(0, 8)
    .map((one) => `${one.label ?? "value"} last ${num(one.values[lastPlace(one.values)])}`)
    .join(", ");
}

function legend(box, lines) {
  box.replaceChildren(
    ...lines
      .filter((one) => !one.quiet)
      .map((one, place) =>
        h(
          "span",
          null,
          h("i", { class: "swatch", style: { background: one.colour ?? seriesColour(place) } }),
          one.label,
        ),
      ),
  );
}

function observe(plot, entry) {
  new ResizeObserver(() => {
    if (!plot.clientWidth) return;
    if (plot.querySelector(".uplot")) entry.resize();
    else entry.rebuild();
  }).observe(plot);
}

function span(low, high, zero) {
  if (low === null || high === null || low === undefined) return [0, 1];
  if (zero) low = Math.min(0, low);
  if (low === 0 && high === 0) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [zero && low === 0 ? 0 : low - room, high + room];
}

function lastPlace(values) {
  for (let place = values.length - 1; place >= 0; place -= 1)
    if (values[place] !== null && values[place] !== undefined) return place;
  return -1;
}

// Colours are read when a chart is drawn: draw all again when the theme changes.
export function redrawCharts() {
  for (const entry of live) {
    if (entry.node.isConnected) entry.rebuild();
    else live.delete(entry);
  }
}

export function sparkline(values, label) {
  if (!values || values.length < 2) return h("span", { class: "sub" }, "–");
  const low = Math.min(...values);
  const room = Math.max(...values) - low || 1;
  const points = values.map(
    (value, place) =>
      `${((place / (values.length - 1)) * 108 + 1).toFixed(1)},${(24 - ((value - low) / room) * 22).toFixed(1)}`,
  );
  return svg(
    "svg",
    { class: "spark", viewBox: "0 0 110 26", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("path", { d: `M${points.join("L")}` }),
  );
}

// Reward as a colour from low (orange) over grey to high (blue-green), readable for all kinds of sight.
export function rewardColour(value, low, high) {
  if (value === null || value === undefined) return null;
  const share = high > low ? (value - low) / (high - low) : 0.5;
  const from = share < 0.5 ? [206, 94, 34] : [196, 204, 210];
  const to = share < 0.5 ? [196, 204, 210] : [18, 122, 108];
  const part = share < 0.5 ? share * 2 : share * 2 - 1;
  return `rgb(${from.map((one, place) => Math.round(one + (to[place] - one) * part)).join(" ")})`;
}

export function rewardDots(rewards, states, href, bounds) {
  const known = rewards.filter((one) => one !== null);
  const [low, high] = bounds ?? [Math.min(0, ...known), Math.max(1, ...known)];
  return h(
    "span",
    { class: "dots" },
    rewards.map((reward, place) => {
      const state = states?.[place];
      const kind = reward === null ? (state === "running" ? "running" : "none") : "";
      const text = `rollout ${place}: ${reward === null ? (state ?? "no reward") : "reward " + num(reward)}`;
      const style = reward === null ? {} : { background: rewardColour(reward, low, high) };
      return h(href ? "a" : "span", {
        class: `dot ${kind}`,
        style,
        title: text,
        "aria-label": text,
        href: href?.(place),
      });
    }),
  );
}
