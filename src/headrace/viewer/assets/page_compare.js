// Two sides on the same tasks: what flipped, and the paired difference. An evaluation task by task.
import { badge, empty, h, section, table, visible } from "./dom.js";
import { link, num, percent, query, rolloutLink, runLink } from "./format.js";
import { get, runApi } from "./api.js";
import { rewardDots } from "./charts.js";
import { stats } from "./page_run.js";
import { interval } from "./page_runs.js";

const signed = (value, text) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${text(Math.abs(value))}`;

export async function evaluationPage(context) {
  const [id, step, set] = context.params;
  const page = await get(runApi(id, `/evaluations/${step}/${encodeURIComponent(set)}`), null, context.signal);
  const metrics = page.metrics;
  const columns = [
    {
      title: "Task",
      class: "clip",
      cell: (one) => h("a", { href: runLink(id, "evaluated", one.id), data: { item: "" } }, visible(one.task_id)),
    },
    { title: "Source", cell: (one) => visible(one.source) },
    {
      title: "Verdict",
      cell: (one) =>
        one.error
          ? badge("failed", "bad", visible(one.error))
          : one.is_correct === null
            ? "–"
            : badge(one.is_correct ? "right" : "wrong", one.is_correct ? "good" : "bad"),
    },
    { title: "Reward", num: true, cell: (one) => num(one.reward) },
    { title: "Ended by", cell: (one) => visible(one.termination) },
    { title: "Tokens", num: true, cell: (one) => num(one.tokens) },
  ];
  const body = page.episodes.length
    ? h("div", { class: "panel flush" }, table(columns, page.episodes, { caption: "episodes of the evaluation" }))
    : h("div", { class: "panel" }, empty("No episodes on record", "Only the metrics of this evaluation were kept."));
  return {
    node: h(
      "div",
      { class: "stack" },
      h(
        "div",
        { class: "head" },
        h("h1", null, `${visible(set)}, step ${step}`),
        interval(metrics),
        h("span", { class: "grow" }),
      ),
      stats([
        ["pass@1", percent(metrics["pass@1"])],
        ["Reward", num(metrics.reward)],
        ["Tasks", num(metrics.tasks)],
        ["Failed", num(metrics.failed)],
        ["Tokens", num(metrics.response_tokens)],
      ]),
      section("The worst first", body),
    ),
    title: `${set}, step ${step}`,
    crumbs: [[id, runLink(id)], ["Evaluations", runLink(id, "evaluations")], [`${visible(set)}, step ${step}`]],
  };
}

function sideForm(context) {
  const value = (name) => context.query.get(name) ?? "";
  const form = h(
    "form",
    { class: "panel filters" },
    h(
      "label",
      { class: "field" },
      "First: RUN@STEP",
      h("input", { name: "a", value: value("a"), placeholder: "run@0" }),
    ),
    h(
      "label",
      { class: "field" },
      "Second: RUN@STEP",
      h("input", { name: "b", value: value("b"), placeholder: "run@30" }),
    ),
    h("label", { class: "field" }, "Evaluation set; empty: training", h("input", { name: "set", value: value("set") })),
    h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, "Compare")),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    context.go(link("compare") + query(Object.fromEntries(new FormData(form))));
  });
  return form;
}

function episodeLink(place, set, one) {
  const run = place.slice(0, place.lastIndexOf("@"));
  return one.eval_episode_id !== null
    ? runLink(run, "evaluated", one.eval_episode_id)
    : rolloutLink(run, one.group_id, one.rollout_idx);
}

export async function comparePage(context) {
  const crumbs = [["Compare"]];
  if (!context.query.get("a"))
    return {
      node: h(
        "div",
        { class: "stack" },
        h("h1", null, "Compare"),
        sideForm(context),
        h(
          "p",
          { class: "sub" },
          "RUN@STEP is an evaluation of a set at a step or, without a set, what was trained at a step; RUN@3-9 is steps 3 to 9.",
        ),
      ),
      title: "Compare",
      crumbs,
    };
  const page = await get(
    "/api/compare",
    { a: context.query.get("a"), b: context.query.get("b"), set: context.query.get("set") },
    context.signal,
  );
  const only = context.query.get("flips");
  const rate = page.pass_rate;
  const tasks = page.tasks.filter((one) => !only || one.flip === only);
  const filter = (flip, text) =>
    h(
      "a",
      {
        class: "button",
        "aria-current": only === flip ? "true" : null,
        href: link("compare") + query({ ...Object.fromEntries(context.query), flips: only === flip ? null : flip }),
      },
      text,
    );
  const dots = (place, episodes) =>
    h(
      "span",
      { class: "dots" },
      episodes
        .slice(0, 24)
        .map((one) =>
          rewardDots([one.failed ? null : one.reward], ["failed"], () => episodeLink(place, page.set, one)),
        ),
    );
  const columns = [
    {
      title: "Task",
      class: "clip",
      cell: (one) =>
        h(
          "a",
          { href: episodeLink(page.second, page.set, one.second_episodes[0]), data: { item: "" } },
          visible(one.id),
        ),
    },
    {
      title: "",
      class: "nowrap",
      cell: (one) =>
        one.flip === "broken"
          ? badge("right → wrong", "bad")
          : one.flip === "fixed"
            ? badge("wrong → right", "good")
            : "",
    },
    {
      title: page.first,
      class: "nowrap",
      cell: (one) => [dots(page.first, one.first_episodes), " ", num(one.first_reward)],
    },
    {
      title: page.second,
      class: "nowrap",
      cell: (one) => [dots(page.second, one.second_episodes), " ", num(one.second_reward)],
    },
    { title: "Change", num: true, cell: (one) => signed(one.second_reward - one.first_reward, num) },
  ];
  const node = h(
    "div",
    { class: "stack" },
    h(
      "div",
      { class: "head" },
      h("h1", null, `${page.second} against ${page.first}`),
      page.set && badge(visible(page.set), "quiet"),
    ),
    stats([
      ["pass@1 before", percent(rate.first)],
      ["after", percent(rate.second)],
      [
        "Difference",
        signed(rate.difference, percent),
        `95%: ${signed(rate.low, percent)} to ${signed(rate.high, percent)}`,
      ],
      ["Sign test", rate.p_value < 0.0001 ? "p < 0.0001" : `p = ${num(rate.p_value)}`, "two-sided, exact"],
      ["Wrong → right", num(page.fixed), "tasks"],
      ["Right → wrong", num(page.broken), "tasks"],
      [
        "Reward",
        signed(page.reward.difference, num),
        `95%: ${signed(page.reward.low, num)} to ${signed(page.reward.high, num)}`,
      ],
      ["Tasks in common", num(page.tasks_in_common), `${page.only_first} and ${page.only_second} alone`],
    ]),
    h(
      "div",
      { class: "row" },
      filter("broken", `Right → wrong: ${page.broken}`),
      filter("fixed", `Wrong → right: ${page.fixed}`),
    ),
    h(
      "div",
      { class: "panel flush" },
      tasks.length
        ? table(columns, tasks, { caption: "tasks of both" })
        : empty("No such task", "No task changed like this."),
    ),
    page.cut && h("p", { class: "sub" }, "The first 500 tasks are shown."),
    sideForm(context),
  );
  return { node, title: "Compare", crumbs };
}
