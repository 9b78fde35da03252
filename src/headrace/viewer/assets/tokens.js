// Tokens as they were sampled: each one visible, coloured by what is known of it, explained when pointed at.
import { append, h, visible } from "./dom.js";
import { num } from "./format.js";

// What tokens can be coloured by. kind: low = colour where it is low, both = around 0, steps = by category.
export const COLOURINGS = [
  { key: "logprob", title: "Probability, sampler", kind: "low" },
  { key: "learner_logprob", title: "Probability, learner", kind: "low" },
  { key: "ratio", title: "Ratio, learner to sampler", kind: "both", of: (value) => Math.log(value), text: "log ratio" },
  { key: "advantage", title: "Advantage", kind: "both" },
  { key: "entropy", title: "Entropy", kind: "high" },
  { key: "version", title: "Policy version", kind: "steps" },
  {
    key: "clip",
    title: "Clipped, dropped, masked",
    kind: "steps",
    names: ["kept", "clipped", "dropped", "masked", "rejected"],
  },
  { key: "trained", title: "Trained or not", kind: "steps", names: ["not trained", "trained"] },
];

const FIELDS = [
  ["id", "Token id"],
  ["logprob", "Log-probability, sampler"],
  ["model_logprob", "At temperature 1"],
  ["learner_logprob", "Log-probability, learner"],
  ["ratio", "Ratio"],
  ["clip", "Clip state"],
  ["advantage", "Advantage"],
  ["entropy", "Entropy"],
  ["version", "Policy version"],
  ["trained", "Trained"],
  ["step", "At step"],
];
const CATEGORIES = [
  [226, 232, 238],
  [244, 186, 130],
  [170, 205, 238],
  [196, 222, 160],
  [214, 186, 232],
  [248, 210, 120],
  [240, 170, 200],
  [150, 214, 206],
];
const LOW = [
  [255, 255, 255],
  [253, 216, 150],
  [238, 136, 62],
  [158, 44, 20],
];
const HIGH = [
  [255, 255, 255],
  [190, 220, 240],
  [92, 158, 210],
  [22, 78, 140],
];
const BOTH = [
  [176, 70, 20],
  [246, 186, 130],
  [250, 250, 250],
  [150, 204, 226],
  [12, 92, 140],
];
const SHOWN = 3000; // tokens at once; more when asked for

function along(ramp, share) {
  const at = Math.max(0, Math.min(1, share)) * (ramp.length - 1);
  const place = Math.min(ramp.length - 2, Math.floor(at));
  return ramp[place].map((one, channel) => Math.round(one + (ramp[place + 1][channel] - one) * (at - place)));
}

// A function from a value to a colour, with what its legend says.
export function scaleOf(colouring, values) {
  const known = values
    .filter((one) => one !== null && one !== undefined)
    .map(colouring.of ?? ((one) => one))
    .filter(Number.isFinite);
  if (colouring.kind === "steps") {
    const found = [...new Set(known)].sort((a, b) => a - b);
    const colour = (value) => CATEGORIES[(colouring.names ? value : found.indexOf(value)) % CATEGORIES.length];
    return { colour, categories: found.map((one) => [colouring.names?.[one] ?? String(one), colour(one)]) };
  }
  if (colouring.kind === "both") {
    const most = Math.max(1e-9, ...known.map(Math.abs));
    return {
      colour: (value) => along(BOTH, ((colouring.of?.(value) ?? value) / most + 1) / 2),
      ramp: BOTH,
      low: -most,
      high: most,
    };
  }
  if (colouring.kind === "low") {
    return { colour: (value) => along(LOW, 1 - Math.exp(value)), ramp: [...LOW].reverse(), low: "0 %", high: "100 %" };
  }
  const high = Math.max(0.01, ...known);
  return { colour: (value) => along(HIGH, value / high), ramp: HIGH, low: 0, high };
}

const edge = (value) => (typeof value === "string" ? value : num(value));
const css = (colour) => `rgb(${colour.join(" ")})`;

export function legendOf(scale) {
  if (scale.categories)
    return h(
      "span",
      { class: "legend" },
      scale.categories.map(([name, colour]) =>
        h(
          "span",
          null,
          h("i", { class: "swatch", style: { background: css(colour), border: "1px solid var(--line-strong)" } }),
          name,
        ),
      ),
    );
  const canvas = h("canvas", { width: 120, height: 11, "aria-hidden": "true" });
  const paint = canvas.getContext("2d");
  for (let x = 0; x < 120; x += 1) {
    paint.fillStyle = css(along(scale.ramp, x / 119));
    paint.fillRect(x, 0, 1, 11);
  }
  return h("span", { class: "scale" }, edge(scale.low), canvas, edge(scale.high));
}

function shownText(text) {
  const parts = [];
  for (const piece of visible(text).split(/(\n)/)) {
    if (piece === "\n") parts.push(h("span", { class: "mark", "aria-hidden": "true" }, "↵"), "\n");
    else if (piece) parts.push(piece);
  }
  return parts.length ? parts : h("span", { class: "mark" }, "∅");
}

function factsOf(reply, place) {
  const found = { id: reply.ids[place] };
  for (const [name, values] of Object.entries(reply.columns ?? {})) found[name] = values[place];
  return found;
}

// The tokens of a reply (or prompt). `pointed` is called with (text, facts, element) when one is pointed at.
export function tokenView(reply, pointed, label) {
  const box = h("div", {
    class: "tokens",
    tabindex: "0",
    role: "group",
    "aria-label": `${label}: ${reply.tokens} tokens; arrow keys go from token to token`,
  });
  const special = new Set(reply.special);
  const elements = [];
  let scale = null;
  let shown = 0;
  let on = -1;

  const paint = (place) => {
    const element = elements[place];
    const value = scale ? scale.values?.[place] : null;
    element.classList.remove("dark", "light");
    if (value === null || value === undefined) {
      element.style.removeProperty("background-color");
      return;
    }
    const colour = scale.colour(value);
    element.style.setProperty("background-color", css(colour));
    element.classList.add(colour[0] * 0.3 + colour[1] * 0.59 + colour[2] * 0.11 < 130 ? "dark" : "light");
  };
  const point = (place) => {
    if (place < 0 || place >= elements.length) return;
    elements[on]?.classList.remove("on");
    on = place;
    elements[on].classList.add("on");
    pointed?.(reply.texts?.[place] ?? `⟨${reply.ids[place]}⟩`, factsOf(reply, place), elements[place]);
  };
  const extend = (upto) => {
    const made = document.createDocumentFragment();
    for (; shown < Math.min(upto, reply.ids.length); shown += 1) {
      const text = reply.texts?.[shown] ?? `⟨${reply.ids[shown] ?? "block"}⟩`;
      const untrained = reply.columns?.trained?.[shown] === 0;
      const element = h(
        "span",
        { class: `tok${special.has(shown) ? " special" : ""}${untrained ? " untrained" : ""}`, data: { place: shown } },
        shownText(text),
      );
      elements.push(element);
      made.append(element);
      if (scale) paint(shown);
    }
    box.append(made);
    if (shown < reply.ids.length) {
      const more = h(
        "button",
        {
          type: "button",
          class: "link",
          onclick: () => {
            more.remove();
            extend(shown + 10 * SHOWN);
          },
        },
        ` … ${(reply.ids.length - shown).toLocaleString("en")} more tokens`,
      );
      box.append(more);
    } else if (reply.cut)
      append(box, h("span", { class: "mark" }, ` … ${reply.cut.toLocaleString("en")} more tokens are in the ledger`));
  };
  extend(SHOWN);
  box.addEventListener("pointerover", (event) => {
    const found = event.target.closest?.(".tok");
    if (found) point(Number(found.dataset.place));
  });
  box.addEventListener("click", (event) => {
    const found = event.target.closest?.(".tok");
    if (found) point(Number(found.dataset.place));
  });
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    point(Math.max(0, Math.min(elements.length - 1, (on < 0 ? -1 : on) + moves[event.key])));
    elements[on]?.scrollIntoView({ block: "nearest" });
  });
  return {
    node: box,
    recolour(made, values) {
      scale = made ? { ...made, values } : null;
      elements.forEach((_, place) => paint(place));
    },
  };
}

// What is known of a token, as rows.
export function tokenFacts(text, facts) {
  const rows = FIELDS.filter(([name]) => facts[name] !== undefined && facts[name] !== null).map(([name, title]) => {
    let value = facts[name];
    if (name === "clip") value = ["kept", "clipped", "dropped", "masked", "rejected"][value] ?? value;
    else if (name === "trained") value = value ? "yes" : "no, masked";
    else if (typeof value === "number" && !Number.isInteger(value)) value = value.toPrecision(6).replace("-", "−");
    return h("tr", null, h("th", { scope: "row" }, title), h("td", null, String(value)));
  });
  if (typeof facts.logprob === "number")
    rows.splice(
      2,
      0,
      h(
        "tr",
        null,
        h("th", { scope: "row" }, "Probability"),
        h("td", null, `${(Math.exp(facts.logprob) * 100).toPrecision(4)} %`),
      ),
    );
  return h(
    "div",
    null,
    h("div", { class: "tokens", style: { "margin-bottom": "8px" } }, h("span", { class: "tok" }, shownText(text))),
    h("table", { class: "facts-table" }, h("tbody", null, rows)),
  );
}

// Tokens without numbers, dimmed up to where they part from another's.
export function plainTokens(texts, partsAt, isBase) {
  return h(
    "div",
    { class: "tokens" },
    texts.map((text, place) => {
      const kind = place < partsAt ? " same" : place === partsAt && !isBase ? " parts" : "";
      return h("span", { class: `tok${kind}` }, shownText(text));
    }),
  );
}
