// Lists of a run: its steps, its evaluations, its settings.
import { badge, empty, h, longText, table, visible } from "./dom.js";
import { ago, clock, num, percent, runLink, seconds, stepLink } from "./format.js";
import { get, isExport, runApi } from "./api.js";
import { runHead, tabs } from "./page_run.js";
import { flat, interval } from "./page_runs.js";

export async function stepsPage(context) {
  const id = context.params[0];
  const page = await get(runApi(id), null, context.signal);
  const body = h("tbody");
  const more = h("button", { type: "button", onclick: () => extend() }, "Older steps");
  const columns = ["Step", "Version", "Groups", "Again", "Reward", "Length", "Trained at", "Took"];
  let next = null;
  const row = (one) =>
    h(
      "tr",
      null,
      h("td", { class: "num" }, h("a", { href: stepLink(id, one.step), data: { item: "" } }, one.step)),
      h("td", { class: "num" }, one.version),
      h("td", { class: "num" }, one.groups),
      h("td", { class: "num" }, one.again || "–"),
      h("td", { class: "num" }, num(one.reward)),
      h("td", { class: "num" }, num(one.length)),
      h("td", { class: "nowrap" }, clock(one.recorded_at)),
      h(
        "td",
        { class: "num" },
        one.committed_at ? seconds(one.committed_at - one.recorded_at) : badge("not committed", "warn"),
      ),
    );
  const extend = async (first) => {
    const found = await get(runApi(id, "/steps"), first || isExport() ? null : { before: next }, context.signal);
    if (first) body.replaceChildren();
    body.append(...found.steps.map(row));
    next = found.next;
    more.hidden = next === null;
  };
  await extend(true);
  context.live(id, () => extend(true));
  const list = body.children.length
    ? h(
        "div",
        { class: "panel flush" },
        h(
          "div",
          { class: "scroll", tabindex: "0", role: "region", "aria-label": "steps" },
          h(
            "table",
            null,
            h(
              "thead",
              null,
              h(
                "tr",
                null,
                columns.map((name) => h("th", { scope: "col", class: name === "Trained at" ? null : "num" }, name)),
              ),
            ),
            body,
          ),
        ),
      )
    : h("div", { class: "panel" }, empty("No steps yet", "The first batch is not complete."));
  return {
    node: h("div", { class: "stack" }, runHead(page), tabs(id, "steps"), list, more),
    title: `${id}: steps`,
    crumbs: [[id, runLink(id)], ["Steps"]],
  };
}

export async function evaluationsPage(context) {
  const id = context.params[0];
  const page = await get(runApi(id), null, context.signal);
  const rows = [...page.evaluations].reverse();
  const columns = [
    { title: "Step", num: true, cell: (one) => num(one.step) },
    {
      title: "Set",
      cell: (one) => h("a", { href: runLink(id, "evaluation", one.step, one.set), data: { item: "" } }, one.set),
    },
    { title: "pass@1", num: true, cell: (one) => percent(one.metrics["pass@1"]) },
    { title: "95% interval", cell: (one) => interval(one.metrics) },
    { title: "Reward", num: true, cell: (one) => num(one.metrics.reward) },
    { title: "Tasks", num: true, cell: (one) => num(one.metrics.tasks) },
    { title: "Failed", num: true, cell: (one) => num(one.metrics.failed) },
    { title: "Tokens", num: true, cell: (one) => num(one.metrics.response_tokens) },
    {
      title: "Compare",
      cell: (one) => {
        const first = page.evaluations.find((other) => other.set === one.set);
        return first && first.step !== one.step
          ? h(
              "a",
              {
                href: `#/compare?a=${encodeURIComponent(`${id}@${first.step}`)}&b=${encodeURIComponent(`${id}@${one.step}`)}&set=${encodeURIComponent(one.set)}`,
              },
              `with step ${first.step}`,
            )
          : "–";
      },
    },
  ];
  const body = rows.length
    ? h("div", { class: "panel flush" }, table(columns, rows, { caption: "evaluations" }))
    : h("div", { class: "panel" }, empty("No evaluations", "The run has no [eval.sets], or none was made yet."));
  return {
    node: h("div", { class: "stack" }, runHead(page), tabs(id, "evaluations"), body),
    title: `${id}: evaluations`,
    crumbs: [[id, runLink(id)], ["Evaluations"]],
  };
}

export async function settingsPage(context) {
  const id = context.params[0];
  const page = await get(runApi(id), null, context.signal);
  const rows = Object.entries(flat(page.config));
  const body = rows.length
    ? h(
        "div",
        { class: "panel flush" },
        table(
          [
            { title: "Setting", cell: ([key]) => h("code", null, visible(key)) },
            { title: "Value", cell: ([, value]) => longText(value, { class: "mono" }) },
          ],
          rows,
          { caption: "settings" },
        ),
      )
    : h(
        "div",
        { class: "panel" },
        empty("No config.json", "The folder does not say with which settings the run was started."),
      );
  return {
    node: h(
      "div",
      { class: "stack" },
      runHead(page),
      tabs(id, "settings"),
      h(
        "p",
        { class: "sub" },
        `Checkpoints after steps ${page.checkpoints.join(", ") || "–"}. Last change ${ago(page.changed_at)}.`,
      ),
      body,
    ),
    title: `${id}: settings`,
    crumbs: [[id, runLink(id)], ["Settings"]],
  };
}
