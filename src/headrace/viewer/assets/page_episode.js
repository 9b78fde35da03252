// One episode: the conversation as it was, every token with what is known of it.
import { announce, badge, empty, h, longText, replace, table, visible } from "./dom.js";
import { clock, groupLink, num, rolloutLink, runLink, seconds, stepLink } from "./format.js";
import { download, get, isExport, runApi, saveFile } from "./api.js";
import { stats } from "./page_run.js";
import { COLOURINGS, legendOf, scaleOf, tokenFacts } from "./tokens.js";
import { trajectory } from "./turns.js";

export async function episodePage(context) {
  const [id, group, rollout] = [context.params[0], Number(context.params[1]), Number(context.params[2])];
  const attempt = context.query.get("attempt");
  const path = runApi(id, `/groups/${group}/rollouts/${rollout}`);
  const node = h("div", { class: "stack" });
  let page = null;
  const draw = async () => {
    page = await get(path, { attempt }, context.signal);
    replace(node, trainHead(id, page, path), ...episodeBody(context, id, page));
  };
  await draw();
  context.live(id, draw, () => page.state === "running");
  return {
    node,
    title: `group ${group}, rollout ${rollout}`,
    crumbs: [
      [id, runLink(id)],
      ...(page.step ? [[`step ${page.step}`, stepLink(id, page.step)]] : []),
      [`group ${group}`, groupLink(id, group)],
      [`rollout ${rollout}`],
    ],
    previous: rollout > 0 ? rolloutLink(id, group, rollout - 1) : null,
    next: rollout + 1 < page.size ? rolloutLink(id, group, rollout + 1) : null,
  };
}

export async function evaluatedPage(context) {
  const [id, number] = [context.params[0], Number(context.params[1])];
  const page = await get(runApi(id, `/evaluated/${number}`), null, context.signal);
  const head = h(
    "div",
    { class: "head" },
    h("h1", null, visible(page.task_id)),
    ...verdictBadges(page),
    h("span", { class: "grow" }),
    copyButton(page),
  );
  return {
    node: h("div", { class: "stack" }, head, ...episodeBody(context, id, page)),
    title: `evaluation of ${page.task_id}`,
    crumbs: [
      [id, runLink(id)],
      ["Evaluations", runLink(id, "evaluations")],
      [`${page.set}, step ${page.step}`, runLink(id, "evaluation", page.step, page.set)],
      [visible(page.task_id)],
    ],
  };
}

function verdictBadges(page) {
  const state = { running: "good live", finished: "", failed: "bad", restarted: "warn" }[page.state] ?? "";
  return [
    badge(page.state, state),
    page.is_correct !== null && badge(page.is_correct ? "right" : "wrong", page.is_correct ? "good" : "bad"),
    page.decision &&
      page.decision !== page.state &&
      page.kind === "train" &&
      badge(
        page.decision === "whole" ? "complete" : page.decision,
        page.decision === "trained" ? "good" : "warn",
        page.reason,
      ),
  ];
}

function trainHead(id, page, path) {
  const move = (to, text) => h("a", { class: "button", href: rolloutLink(id, page.group_id, to) }, text);
  const test = () =>
    download(
      `${path}/test_case`,
      { attempt: page.attempt },
      `test_group_${page.group_id}_rollout_${page.rollout_idx}.py`,
    ).then(
      () => announce("test case written"),
      (error) => alertText(error.message),
    );
  return h(
    "div",
    { class: "head" },
    h("h1", null, visible(page.task_id)),
    ...verdictBadges(page),
    h("span", { class: "grow" }),
    page.attempts.length > 1 &&
      h(
        "label",
        { class: "inline" },
        "Attempt",
        h(
          "select",
          {
            id: "attempt",
            onchange: (event) => {
              location.hash = rolloutLink(id, page.group_id, page.rollout_idx, event.target.value);
            },
          },
          page.attempts.map((one) =>
            h(
              "option",
              { value: one.attempt, selected: one.attempt === page.attempt },
              `${one.attempt} (${one.state})`,
            ),
          ),
        ),
      ),
    copyButton(page),
    !isExport() &&
      page.state !== "running" &&
      !page.pruned &&
      h(
        "button",
        {
          type: "button",
          id: "test-case",
          title: "a pytest file that replays this episode's workflow and judger on its record",
          onclick: test,
        },
        "Save as a test case",
      ),
    page.rollout_idx > 0 && move(page.rollout_idx - 1, "‹"),
    page.rollout_idx + 1 < page.size && move(page.rollout_idx + 1, "›"),
  );
}

function alertText(text) {
  const made = h("div", { class: "toast", role: "alert" }, text);
  document.body.append(made);
  setTimeout(() => made.remove(), 6000);
}

function copyButton(page) {
  return h(
    "button",
    {
      type: "button",
      id: "copy-json",
      onclick: async () => {
        const text = JSON.stringify(page, null, 1);
        try {
          await navigator.clipboard.writeText(text);
          alertText("Copied as JSON.");
        } catch {
          saveFile(
            new Blob([text], { type: "application/json" }),
            `group_${page.group_id}_rollout_${page.rollout_idx}.json`,
          );
        }
      },
    },
    "Copy as JSON",
  );
}

function episodeBody(context, id, page) {
  const panel = h(
    "div",
    { class: "panel", id: "token-facts" },
    h("h2", null, "Token"),
    h(
      "div",
      { class: "token-body" },
      h("p", { class: "sub" }, "Point at a token, or go through them with the arrow keys."),
    ),
  );
  const pointed = (text, facts) => replace(panel.querySelector(".token-body"), tokenFacts(text, facts));
  const views = [];
  const conversation = page.trajectories.map((one) => trajectory(one, pointed, views, page.trajectories.length > 1));
  const none = page.pruned
    ? empty("The messages were deleted", "ledger.keep_steps keeps rewards and counts of older episodes only.")
    : empty(
        page.state === "running" ? "Nothing was answered yet" : "No messages",
        page.state === "running"
          ? "Turns appear here as the model answers."
          : "The episode ended before the model said anything.",
      );
  const colours = colourBar(context, page, views);
  return [
    episodeStats(id, page),
    page.error && h("div", { class: "notice bad" }, h("b", null, "Failed "), longText(page.error)),
    !page.has_texts &&
      page.trajectories.length > 0 &&
      h(
        "div",
        { class: "notice" },
        "The tokenizer of this run's model is not on this machine: tokens show as their ids, and replies as text.",
      ),
    h(
      "div",
      { class: "columns" },
      h(
        "div",
        { class: "stack" },
        views.length > 0 && colours,
        conversation.length ? conversation : h("div", { class: "panel" }, none),
      ),
      h("aside", { class: "stack" }, panel, results(page), attempts(page)),
    ),
  ];
}

function episodeStats(id, page) {
  const versions =
    page.oldest_version === null
      ? "–"
      : page.newest_version === page.oldest_version
        ? num(page.oldest_version)
        : `${page.oldest_version} – ${page.newest_version}`;
  return stats([
    ["Reward", page.error ? "–" : num(page.reward)],
    ["Ended by", visible(page.termination ?? page.state)],
    ["Sampled tokens", num(page.generated_tokens)],
    ["Turns", num(page.trajectories.reduce((sum, one) => sum + one.turns.length, 0))],
    ["Version", versions],
    page.kind === "train" && [
      "Trained at step",
      page.trained_at.length ? page.trained_at.map((step) => h("a", { href: stepLink(id, step) }, `${step} `)) : "–",
    ],
    ["Took", seconds(page.duration_s)],
    page.started_at && ["Started", clock(page.started_at).slice(11)],
    ["Source", visible(page.source)],
    ["Seed", String(page.seed ?? "–")],
    ...Object.entries(page.metrics)
      .slice(0, 6)
      .map(([name, value]) => [visible(name), num(value)]),
  ]);
}

function colourBar(context, page, views) {
  const columns = (key) => views.flatMap((one) => one.reply.columns[key] ?? []);
  const usable = COLOURINGS.filter((one) => columns(one.key).some((value) => value !== null && value !== undefined));
  const legend = h("span", { id: "legend" });
  const paint = (key) => {
    const colouring = usable.find((one) => one.key === key);
    const scale = colouring ? scaleOf(colouring, columns(key)) : null;
    for (const one of views) one.view.recolour(scale, one.reply.columns[key] ?? []);
    replace(legend, scale ? [colouring.text && `${colouring.text} `, legendOf(scale)] : null);
  };
  const wanted = context.query.get("colour") ?? "logprob";
  const first = usable.some((one) => one.key === wanted) || wanted === "none" ? wanted : (usable[0]?.key ?? "none");
  const choice = h(
    "select",
    {
      id: "colour",
      onchange: (event) => {
        paint(event.target.value);
        context.note({ colour: event.target.value });
      },
    },
    [...usable.map((one) => [one.key, one.title]), ["none", "nothing"]].map(([key, title]) =>
      h("option", { value: key, selected: key === first }, title),
    ),
  );
  paint(first);
  return h(
    "div",
    { class: "panel row" },
    h("label", { class: "inline" }, "Colour tokens by", choice),
    legend,
    h("span", { class: "grow" }),
    h(
      "span",
      { class: "sub" },
      h("span", { class: "tok special" }, "special"),
      " ",
      h("span", { class: "tok untrained" }, "not trained"),
    ),
  );
}

function results(page) {
  if (!page.results.length) return null;
  return h(
    "div",
    { class: "panel stack" },
    h("h2", null, "Tools and judgers"),
    page.results.map((one) =>
      h(
        "div",
        null,
        h(
          "div",
          { class: "row" },
          badge(one.kind, one.kind === "judger" ? "" : "quiet"),
          h("b", null, visible(one.name)),
          one.verdict && h("span", null, `reward ${num(one.verdict.reward)}`),
          one.verdict?.is_correct !== null &&
            one.verdict &&
            badge(one.verdict.is_correct ? "right" : "wrong", one.verdict.is_correct ? "good" : "bad"),
        ),
        one.verdict
          ? table(
              [
                { title: "Part", cell: ([name]) => visible(name) },
                { title: "Value", num: true, cell: ([, value]) => num(value) },
              ],
              Object.entries(one.verdict.metrics),
              { caption: "parts of the verdict" },
            )
          : longText(one.payload),
      ),
    ),
  );
}

function attempts(page) {
  if (page.attempts.length < 2) return null;
  return h(
    "div",
    { class: "panel" },
    h("h2", null, "Attempts"),
    table(
      [
        { title: "Attempt", num: true, key: "attempt" },
        { title: "State", cell: (one) => badge(one.state, one.state === "finished" ? "" : "warn") },
        { title: "Reward", num: true, cell: (one) => num(one.reward) },
      ],
      page.attempts,
      { caption: "attempts" },
    ),
  );
}
