// One step: its batch, and what was dropped at it. One group: its rollouts side by side.
import { badge, empty, h, longText, replace, section, table, visible } from "./dom.js";
import { count, groupLink, num, query, rolloutLink, runLink, seconds, stepLink } from "./format.js";
import { get, runApi } from "./api.js";
import { rewardColour, rewardDots } from "./charts.js";
import { stats } from "./page_run.js";
import { plainTokens } from "./tokens.js";

const GROUP_KIND = { trained: "good", filtered: "warn", failed: "bad", stale: "warn", whole: "", dispatched: "" };
const GROUP_WORD = { whole: "complete" };

export function groupBadge(state, reason) {
  return badge(GROUP_WORD[state] ?? state, GROUP_KIND[state] ?? "", reason ?? null);
}

const mean = (values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);

export async function stepPage(context) {
  const [id, step] = [context.params[0], Number(context.params[1])];
  const node = h("div", { class: "stack" });
  const draw = async () => {
    const page = await get(runApi(id, `/steps/${step}`), null, context.signal);
    const bin = context.query.get("bin");
    replace(
      node,
      stepHead(id, page),
      stepStats(page),
      h("div", { class: "columns even" }, histogram(id, page, bin), reasons(page)),
      groups(id, page, bin),
    );
  };
  await draw();
  context.live(id, draw, () => !node.dataset.done);
  return {
    node,
    title: `step ${step}`,
    crumbs: [[id, runLink(id)], ["Steps", runLink(id, "steps")], [`step ${step}`]],
    previous: step > 1 ? stepLink(id, step - 1) : null,
    next: stepLink(id, step + 1),
  };
}

function stepHead(id, page) {
  return h(
    "div",
    { class: "head" },
    h("h1", null, `Step ${page.step}`),
    page.committed_at
      ? badge("committed", "good")
      : badge("not committed", "warn", "recorded, but its update was not made yet"),
    h("span", { class: "grow" }),
    h("a", { class: "button", href: runLink(id, "search") + query({ step: page.step }) }, "All episodes of this step"),
    page.step > 1 &&
      h("a", { class: "button", href: stepLink(id, page.step - 1), rel: "prev" }, "‹ Step ", page.step - 1),
    page.step < page.last &&
      h("a", { class: "button", href: stepLink(id, page.step + 1), rel: "next" }, "Step ", page.step + 1, " ›"),
  );
}

function stepStats(page) {
  const metrics = page.metrics;
  return stats([
    ["Reward", num(metrics["reward/mean"]), `± ${num(metrics["reward/std"])}`],
    ["Version trained", num(page.version)],
    [
      "Groups",
      num(page.groups.filter((one) => one.again !== null).length),
      `${page.groups.filter((one) => one.again).length} again`,
    ],
    ["Trained tokens", count(page.trained_tokens)],
    ["Masked tokens", count(page.masked_tokens), "sampled, not trained"],
    ["Staleness", num(metrics["staleness/mean"]), `max ${num(metrics["staleness/max"])}`],
    ["Gradient norm", num(metrics["policy/grad_norm"])],
    ["Entropy", num(metrics["policy/entropy"])],
    ["Step took", seconds(metrics["time/step_s"])],
  ]);
}

function histogram(id, page, bin) {
  const { low, high, counts } = page.histogram;
  const most = Math.max(1, ...counts);
  const width = counts.length ? (high - low) / counts.length : 0;
  const bars = counts.map((value, place) => {
    const label = `${value} episodes with reward ${num(low + place * width)} to ${num(low + (place + 1) * width)}`;
    const chosen = String(place) === bin;
    return h(
      "li",
      null,
      h(
        "a",
        {
          href: stepLink(id, page.step) + query({ bin: chosen ? null : place }),
          title: label,
          "aria-label": label,
          "aria-current": chosen ? "true" : null,
        },
        h("i", { style: { height: `${(value / most) * 100}%` } }),
      ),
    );
  });
  return h(
    "div",
    { class: "panel" },
    h("h2", null, "Rewards of the batch"),
    counts.length
      ? [
          h("ul", { class: "hist" }, bars),
          h(
            "div",
            { class: "axis" },
            h("span", null, num(low)),
            h("span", null, bin === null ? "choose a bar to filter the groups" : "groups with such a reward"),
            h("span", null, num(high)),
          ),
        ]
      : empty("No rewards", "Nothing of this step was trained."),
  );
}

function reasons(page) {
  const dropped = new Map();
  for (const one of page.groups)
    if (one.again === null)
      dropped.set(`${one.state}\n${one.reason ?? ""}`, (dropped.get(`${one.state}\n${one.reason ?? ""}`) ?? 0) + 1);
  const rows = [...dropped.entries()].map(([key, value]) => [...key.split("\n"), value]);
  const columns = [
    { title: "End", cell: ([state]) => groupBadge(state) },
    { title: "Reason", cell: ([, reason]) => visible(reason) || "–" },
    { title: "Groups", num: true, cell: ([, , value]) => num(value) },
  ];
  return h(
    "div",
    { class: "panel" },
    h("h2", null, "Not in the batch"),
    rows.length
      ? table(columns, rows, { caption: "groups that were not trained" })
      : empty("Nothing was dropped", "Every group that was complete at this step was trained."),
  );
}

function inBin(group, page, bin) {
  if (bin === null) return true;
  const { low, high, counts } = page.histogram;
  const size = counts.length;
  return (
    group.again !== null &&
    group.rewards.some(
      (reward) =>
        reward !== null &&
        (high > low ? Math.min(size - 1, Math.floor(((reward - low) / (high - low)) * size)) : 0) === Number(bin),
    )
  );
}

function groups(id, page, bin) {
  const rows = page.groups.filter((one) => inBin(one, page, bin));
  const known = page.groups.flatMap((one) => one.rewards).filter((one) => one !== null);
  const bounds = [Math.min(0, ...known), Math.max(1, ...known)];
  const columns = [
    {
      title: "Group",
      num: true,
      cell: (one) => h("a", { href: groupLink(id, one.group_id), data: { item: "" } }, one.group_id),
    },
    { title: "Task", class: "clip", cell: (one) => h("span", { title: visible(one.task_id) }, visible(one.task_id)) },
    { title: "Source", class: "nowrap", cell: (one) => visible(one.source) },
    {
      title: "Rewards",
      cell: (one) => rewardDots(one.rewards, one.states, (place) => rolloutLink(id, one.group_id, place), bounds),
    },
    { title: "Mean", num: true, cell: (one) => num(mean(one.rewards.filter((value) => value !== null))) },
    {
      title: "End",
      class: "nowrap",
      cell: (one) => [
        groupBadge(one.state, one.reason),
        one.again && badge("again", "quiet", "it had been trained before"),
      ],
    },
    { title: "Started at version", num: true, cell: (one) => num(one.version) },
    { title: "Tokens", num: true, cell: (one) => count(one.tokens) },
    { title: "Took", num: true, cell: (one) => seconds(one.seconds) },
  ];
  return section(
    `${rows.length} groups${bin === null ? "" : " with such a reward"}`,
    h(
      "div",
      { class: "panel flush" },
      rows.length
        ? table(columns, rows, { caption: "groups of the step" })
        : empty("No groups", "None has a reward like this."),
    ),
    page.cut && h("p", { class: "sub" }, "Only the first groups are shown."),
  );
}

// ---- one group -------------------------------------------------------------------------------------------------------

export async function groupPage(context) {
  const [id, groupId] = [context.params[0], Number(context.params[1])];
  const node = h("div", { class: "stack" });
  let page = null;
  const draw = async () => {
    page = await get(runApi(id, `/groups/${groupId}`), null, context.signal);
    const group = page.group;
    replace(
      node,
      h(
        "div",
        { class: "head" },
        h("h1", null, visible(group.task_id)),
        groupBadge(group.state, group.reason),
        group.reason && h("span", { class: "sub" }, visible(group.reason)),
        h("span", { class: "grow" }),
        page.previous !== null &&
          h("a", { class: "button", href: groupLink(id, page.previous) }, `‹ Group ${page.previous}`),
        page.next !== null && h("a", { class: "button", href: groupLink(id, page.next) }, `Group ${page.next} ›`),
      ),
      groupStats(page),
      prompt(page),
      sideBySide(id, page),
      history(id, page),
    );
  };
  await draw();
  context.live(id, draw, () => page.group.state === "dispatched" || page.group.state === "whole");
  const step = page.steps.at(-1) ?? page.group.step;
  return {
    node,
    title: `group ${groupId}`,
    crumbs: [[id, runLink(id)], ...(step ? [[`step ${step}`, stepLink(id, step)]] : []), [`group ${groupId}`]],
    previous: page.previous !== null ? groupLink(id, page.previous) : null,
    next: page.next !== null ? groupLink(id, page.next) : null,
  };
}

function groupStats(page) {
  const group = page.group;
  const rewards = group.rewards.filter((one) => one !== null);
  return stats([
    ["Mean reward", num(mean(rewards))],
    ["Best", num(rewards.length ? Math.max(...rewards) : null)],
    ["Rollouts", num(group.size), `${group.failed} failed`],
    ["Trained at", page.steps.length ? `step ${page.steps.join(", ")}` : "–"],
    ["Version at its start", num(group.version)],
    ["Source", visible(group.source)],
    ["Tokens", count(group.tokens)],
    ["Took", seconds(group.seconds)],
  ]);
}

function prompt(page) {
  if (!page.messages.length) return null;
  return h(
    "details",
    { class: "panel", open: page.messages.length < 3 },
    h("summary", null, h("b", null, "The task")),
    page.messages.map((message) =>
      h(
        "div",
        { class: "said" },
        h("header", null, h("span", { class: "role" }, visible(message.role))),
        longText(typeof message.content === "string" ? message.content : JSON.stringify(message.content)),
      ),
    ),
  );
}

function sideBySide(id, page) {
  const rewards = page.rollouts.map((one) => one.reward).filter((one) => one !== null);
  const bounds = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  if (!page.rollouts.length)
    return h("div", { class: "panel" }, empty("No rollout has started", "They appear here as soon as they do."));
  return section(
    "Rollouts, the best first; marked from the first token that differs from the best",
    h(
      "div",
      { class: "side" },
      page.rollouts.map((one, place) => card(id, page.group.group_id, one, place, bounds)),
    ),
  );
}

function card(id, groupId, one, place, bounds) {
  const failed = one.state === "failed";
  const body =
    one.state === "running"
      ? h("p", { class: "sub" }, "Still running.")
      : one.pruned
        ? h("p", { class: "sub" }, "Its messages were deleted (ledger.keep_steps).")
        : one.tokens.length
          ? plainTokens(one.tokens, one.parts_at, place === 0)
          : longText(one.text || "");
  return h(
    "article",
    { class: "panel rollout", "aria-label": `rollout ${one.rollout_idx}` },
    h(
      "header",
      null,
      h("span", { class: "dot", style: { background: rewardColour(one.reward, ...bounds) ?? "transparent" } }),
      h("span", { class: "reward" }, failed ? "failed" : num(one.reward)),
      one.is_correct !== null && badge(one.is_correct ? "right" : "wrong", one.is_correct ? "good" : "bad"),
      one.advantage !== undefined && one.advantage !== null && badge(`advantage ${num(one.advantage)}`, "quiet"),
      h("span", { class: "grow" }),
      h(
        "a",
        { href: rolloutLink(id, groupId, one.rollout_idx, one.attempt || null), data: { item: "" } },
        `rollout ${one.rollout_idx} ›`,
      ),
    ),
    h(
      "div",
      { class: "facts" },
      `${num(one.generated_tokens)} tokens · ${one.turns} turn${one.turns === 1 ? "" : "s"} · ${visible(one.termination ?? one.state)} · ${seconds(one.duration_s)} · version ${one.oldest_version ?? "–"}${one.newest_version !== one.oldest_version ? "–" + one.newest_version : ""}${one.attempt ? ` · attempt ${one.attempt}` : ""}`,
    ),
    failed && h("div", { class: "notice bad" }, visible(one.error)),
    body,
    one.cut && h("p", { class: "sub" }, "cut; the page of the rollout has all tokens"),
  );
}

function history(id, page) {
  if (page.same_task.length < 2) return h("p", { class: "sub" }, "This task was drawn once so far.");
  const known = page.same_task.flatMap((one) => one.rewards).filter((one) => one !== null);
  const bounds = [Math.min(0, ...known), Math.max(1, ...known)];
  const columns = [
    {
      title: "Step",
      num: true,
      cell: (one) => (one.step === null ? "–" : h("a", { href: stepLink(id, one.step) }, one.step)),
    },
    {
      title: "Group",
      num: true,
      cell: (one) =>
        one.group_id === page.group.group_id
          ? h("b", null, one.group_id)
          : h("a", { href: groupLink(id, one.group_id) }, one.group_id),
    },
    { title: "Version", num: true, cell: (one) => num(one.version) },
    {
      title: "Rewards",
      cell: (one) => rewardDots(one.rewards, one.states, (place) => rolloutLink(id, one.group_id, place), bounds),
    },
    { title: "Mean", num: true, cell: (one) => num(mean(one.rewards.filter((value) => value !== null))) },
    { title: "End", cell: (one) => groupBadge(one.state, one.reason) },
  ];
  return section(
    "The same task at other steps",
    h("div", { class: "panel flush" }, table(columns, page.same_task, { caption: "the same task at other steps" })),
  );
}
