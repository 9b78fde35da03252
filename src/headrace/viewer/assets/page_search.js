// Search and filters over all episodes of a run. The address holds the filters: every view has a link.
import { announce, badge, empty, h, replace, visible } from "./dom.js";
import { count, num, query, rolloutLink, runLink, stepLink } from "./format.js";
import { get, isExport, runApi } from "./api.js";
import { runHead, tabs } from "./page_run.js";
import { groupBadge } from "./page_step.js";

const SHOWN_AT_ONCE = 50;

function choice(name, title, values, chosen, any) {
  return h(
    "label",
    { class: "field" },
    title,
    h(
      "select",
      { name },
      h("option", { value: "" }, any ?? "any"),
      values.map((one) => {
        const [value, text] = Array.isArray(one) ? one : [one, one];
        return h("option", { value, selected: value === chosen }, visible(text));
      }),
    ),
  );
}

function field(name, title, chosen, type) {
  return h(
    "label",
    { class: "field" },
    title,
    h("input", {
      name,
      type: type ?? "text",
      value: chosen ?? "",
      inputmode: type === "number" ? "decimal" : null,
      step: type === "number" ? "any" : null,
      autocomplete: "off",
    }),
  );
}

export async function searchPage(context) {
  const id = context.params[0];
  const filters = Object.fromEntries(context.query);
  const [page, facets] = await Promise.all([
    get(runApi(id), null, context.signal),
    get(runApi(id, "/facets"), null, context.signal),
  ]);
  const states = [
    ["finished", "finished"],
    ["failed", "failed"],
    ["running", "running"],
    ["restarted", "restarted"],
  ];
  const ends = [
    "trained",
    "filtered",
    "failed",
    "stale",
    ["whole", "complete, waiting"],
    ["dispatched", "not complete"],
  ];
  const form = h(
    "form",
    { class: "panel filters", role: "search", "aria-label": "filters" },
    h(
      "label",
      { class: "field long" },
      "Text in tasks, messages, replies, errors",
      h("input", { id: "search-text", name: "text", type: "search", value: filters.text ?? "", autocomplete: "off" }),
    ),
    choice("kind", "Episodes of", [["eval", "evaluation"]], filters.kind, "training"),
    field("task", "Task", filters.task),
    field("step", "Step", filters.step, "number"),
    field("version", "Sampled under version", filters.version, "number"),
    field("reward_min", "Reward from", filters.reward_min, "number"),
    field("reward_max", "to", filters.reward_max, "number"),
    field("advantage_min", "Advantage from", filters.advantage_min, "number"),
    field("advantage_max", "to", filters.advantage_max, "number"),
    choice("termination", "Ended by", facets.terminations, filters.termination),
    choice("state", "State", states, filters.state),
    choice("decision", "Its group was", ends, filters.decision),
    choice(
      "correct",
      "Verdict",
      [
        ["1", "right"],
        ["0", "wrong"],
      ],
      filters.correct,
    ),
    choice(
      "failed",
      "Failed",
      [
        ["1", "failed"],
        ["0", "not failed"],
      ],
      filters.failed,
    ),
    choice("source", "Source", facets.sources, filters.source),
    choice("role", "Role", facets.roles, filters.role),
    field("tokens_min", "Tokens from", filters.tokens_min, "number"),
    field("tokens_max", "to", filters.tokens_max, "number"),
    h(
      "div",
      { class: "row" },
      h("button", { type: "submit", class: "primary" }, "Search"),
      h("a", { class: "button", href: runLink(id, "search") }, "Clear"),
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    context.go(runLink(id, "search") + query(Object.fromEntries(new FormData(form))));
  });
  const results = resultsOf(context, id, filters);
  const node = h(
    "div",
    { class: "stack" },
    runHead(page),
    tabs(id, "search"),
    isExport()
      ? h("div", { class: "notice" }, "An exported file cannot be searched; the newest of its episodes are listed.")
      : form,
    results.node,
  );
  return {
    node,
    title: `${id}: search`,
    crumbs: [[id, runLink(id)], ["Search"]],
    after: () => {
      if (!filters.text && !isExport()) form.querySelector("#search-text").focus({ preventScroll: true });
      return results.more();
    },
  };
}

function resultsOf(context, id, filters) {
  const body = h("tbody");
  const said = h("span", { class: "sub", role: "status" });
  const bar = h("progress", { max: 1, value: 0, "aria-label": "searched" });
  const stop = h(
    "button",
    {
      type: "button",
      onclick: () => {
        stopped = true;
      },
    },
    "Stop",
  );
  const next = h("button", { type: "button", id: "more", onclick: () => more() }, "More");
  let [before, found, stopped] = [null, 0, false];
  const columns = ["Episode", "Task", "Step", "Reward", "Verdict", "Ended by", "Group", "Version", "Tokens"];
  const table = h(
    "div",
    { class: "panel flush" },
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "episodes" },
      h(
        "table",
        null,
        h(
          "thead",
          null,
          h(
            "tr",
            null,
            columns.map((name) =>
              h(
                "th",
                { scope: "col", class: ["Step", "Reward", "Version", "Tokens"].includes(name) ? "num" : null },
                name,
              ),
            ),
          ),
        ),
        body,
      ),
    ),
  );
  const box = h("div", { class: "stack" }, h("div", { class: "row" }, said, bar, stop), table, next);

  const more = async () => {
    [stopped, stop.hidden, next.hidden] = [false, false, true];
    const wanted = found + SHOWN_AT_ONCE;
    for (;;) {
      const page = await get(
        runApi(id, "/episodes"),
        isExport() ? null : { ...filters, before, limit: Math.min(SHOWN_AT_ONCE, wanted - found) },
        context.signal,
      );
      body.append(...page.episodes.map((row) => episodeRow(id, row, filters.kind === "eval")));
      found += page.episodes.length;
      before = page.next;
      bar.value = page.total ? page.searched / page.total : 1;
      said.textContent = `${count(found)} found, ${num(page.searched)} of ${num(page.total)} episodes looked at`;
      if (before === null || found >= wanted || stopped || isExport()) break;
    }
    stop.hidden = true;
    bar.hidden = before === null;
    next.hidden = before === null || isExport();
    if (!found)
      replace(
        table,
        empty(
          before === null ? "Nothing found" : "Nothing found yet",
          before === null ? "No episode passes these filters." : "Press More to look further back.",
        ),
      );
    announce(said.textContent);
  };
  return { node: box, more };
}

function episodeRow(id, row, evaluated) {
  const href = evaluated
    ? runLink(id, "evaluated", row.episode_id)
    : rolloutLink(id, row.group_id, row.rollout_idx, row.attempt || null);
  const versions =
    row.oldest_version === null
      ? "–"
      : row.oldest_version === row.newest_version
        ? row.oldest_version
        : `${row.oldest_version}–${row.newest_version}`;
  return h(
    "tr",
    null,
    h(
      "td",
      { class: "nowrap" },
      h(
        "a",
        { href, data: { item: "" } },
        evaluated ? `evaluated ${row.episode_id}` : `group ${row.group_id}, rollout ${row.rollout_idx}`,
      ),
    ),
    h("td", { class: "clip", title: visible(row.task_id) }, visible(row.task_id)),
    h(
      "td",
      { class: "num" },
      row.step === null ? "–" : evaluated ? row.step : h("a", { href: stepLink(id, row.step) }, row.step),
    ),
    h("td", { class: "num" }, num(row.reward)),
    h(
      "td",
      null,
      row.is_correct === null ? "–" : badge(row.is_correct ? "right" : "wrong", row.is_correct ? "good" : "bad"),
    ),
    h(
      "td",
      { class: "nowrap", title: row.error ? visible(row.error) : null },
      row.error ? badge("failed", "bad") : visible(row.termination ?? row.state),
    ),
    h("td", null, evaluated ? visible(row.group_state) : groupBadge(row.group_state, row.reason)),
    h("td", { class: "num" }, versions),
    h("td", { class: "num" }, num(row.generated_tokens)),
  );
}
