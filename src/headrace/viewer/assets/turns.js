// The turns of a trajectory: what was asked, the exact prompt, what was said.
import { badge, h, longText, visible } from "./dom.js";
import { num } from "./format.js";
import { tokenView } from "./tokens.js";

export function trajectory(one, pointed, views, several) {
  const turns = one.turns.map((turn, place) => turnView(one, turn, place, pointed, views));
  return h(
    "section",
    { class: "panel", "aria-label": `trajectory ${one.name}` },
    several && h("h2", null, `${visible(one.name)}, reward ${num(one.reward)}`),
    turns,
  );
}

function turnView(trajectoryOf, turn, place, pointed, views) {
  const exact = h(
    "details",
    null,
    h(
      "summary",
      { class: "sub" },
      `exact prompt: ${num(turn.prompt.tokens)} tokens${turn.prompt.shared ? `, of which ${num(turn.prompt.shared)} are the conversation so far` : ""}`,
    ),
  );
  exact.addEventListener("toggle", () => {
    if (exact.open && exact.children.length === 1)
      exact.append(tokenView({ ...turn.prompt, tokens: turn.prompt.ids.length }, pointed, "prompt").node);
  });
  const view = tokenView(turn.reply, pointed, "reply");
  views.push({ view, reply: turn.reply });
  const params = Object.entries(turn.params ?? {})
    .map(([key, value]) => `${key} ${JSON.stringify(value)}`)
    .join(", ");
  return h(
    "div",
    { class: `turn ${turn.broken_prefix ? "broken" : ""}` },
    turn.broken_prefix &&
      h(
        "div",
        { class: "notice warn" },
        "The history was changed here: this prompt does not begin with the tokens so far, so a new training row begins.",
      ),
    turn.messages.map((message) => messageView(message)),
    exact,
    h(
      "div",
      { class: "said assistant" },
      h(
        "header",
        null,
        h("span", { class: "role" }, visible(trajectoryOf.name)),
        h("span", null, `turn ${place + 1}, call ${turn.call}`),
        h("span", null, `${num(turn.reply.tokens)} tokens, ended by ${visible(turn.finish_reason)}`),
        h("span", { title: params }, `temperature ${num(turn.temperature)}`),
        turn.reward !== null && h("span", null, `reward ${num(turn.reward)}`),
      ),
      turn.reasoning &&
        h("details", { open: true }, h("summary", { class: "sub" }, "reasoning"), longText(turn.reasoning)),
      turn.reply.texts || !turn.text
        ? view.node
        : [longText(turn.text), h("details", null, h("summary", { class: "sub" }, "token ids"), view.node)],
      turn.tool_calls.map((call) =>
        h(
          "div",
          { class: "said tool" },
          h("header", null, badge("tool call", "")),
          longText(JSON.stringify(call.function ?? call, null, 1)),
        ),
      ),
    ),
  );
}

function messageView(message) {
  const more = Object.keys(message.more).length ? longText(JSON.stringify(message.more, null, 1)) : null;
  return h(
    "div",
    { class: `said ${message.role === "tool" ? "tool" : ""}` },
    h(
      "header",
      null,
      h("span", { class: "role" }, visible(message.role)),
      message.size > 6000 && h("span", null, `${num(message.size)} characters`),
    ),
    longText(message.content),
    more,
  );
}
