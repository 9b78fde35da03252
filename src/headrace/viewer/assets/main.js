// The frame around the pages: addresses, keys, theme, what is live.
import { announce, append, empty, h, replace } from "./dom.js";
import { isExport, exportFacts, openExport, takeToken, watch } from "./api.js";
import { link } from "./format.js";
import { redrawCharts } from "./charts.js";
import { overlayPage, runsPage } from "./page_runs.js";
import { runPage } from "./page_run.js";
import { evaluationsPage, settingsPage, stepsPage } from "./page_lists.js";
import { groupPage, stepPage } from "./page_step.js";
import { episodePage, evaluatedPage } from "./page_episode.js";
import { searchPage } from "./page_search.js";
import { timelinePage } from "./page_timeline.js";
import { comparePage, evaluationPage } from "./page_compare.js";

const ROUTES = [
  [/^\/?$/, runsPage],
  [/^\/overlay$/, overlayPage],
  [/^\/run\/([^/]+)$/, runPage],
  [/^\/run\/([^/]+)\/steps$/, stepsPage],
  [/^\/run\/([^/]+)\/step\/(\d+)$/, stepPage],
  [/^\/run\/([^/]+)\/group\/(\d+)$/, groupPage],
  [/^\/run\/([^/]+)\/group\/(\d+)\/rollout\/(\d+)$/, episodePage],
  [/^\/run\/([^/]+)\/evaluations$/, evaluationsPage],
  [/^\/run\/([^/]+)\/evaluated\/(\d+)$/, evaluatedPage],
  [/^\/run\/([^/]+)\/evaluation\/(\d+)\/([^/]+)$/, evaluationPage],
  [/^\/run\/([^/]+)\/settings$/, settingsPage],
  [/^\/run\/([^/]+)\/search$/, searchPage],
  [/^\/run\/([^/]+)\/timeline$/, timelinePage],
  [/^\/compare$/, comparePage],
];
const LIVE_MS = 1000;
let shown = null;

function parse() {
  const [path, search] = (location.hash.slice(1) || "/").split("?");
  for (const [pattern, page] of ROUTES) {
    const found = pattern.exec(path);
    if (found)
      return { page, params: found.slice(1).map(decodeURIComponent), query: new URLSearchParams(search ?? "") };
  }
  return null;
}

function contextOf(route, over) {
  const ends = [];
  over.signal.addEventListener("abort", () => ends.forEach((end) => end()));
  return {
    params: route.params,
    query: route.query,
    signal: over.signal,
    go(hash) {
      location.hash = hash;
    },
    note(values) {
      for (const [key, value] of Object.entries(values)) route.query.set(key, value);
      history.replaceState(null, "", `${location.hash.split("?")[0]}?${route.query}`);
    },
    every(ms, work) {
      if (isExport()) return;
      const timer = setInterval(() => {
        if (!document.hidden) quietly(work, over);
      }, ms);
      ends.push(() => clearInterval(timer));
    },
    live(run, work, wanted) {
      let [busy, again] = [false, false];
      const changed = async () => {
        if (wanted && !wanted()) return;
        if (busy || document.hidden) {
          again = true;
          return;
        }
        busy = true;
        const began = performance.now();
        await quietly(work, over);
        // a page that takes long to make is made less often
        setTimeout(
          () => {
            busy = false;
            if (again) {
              again = false;
              changed();
            }
          },
          Math.max(LIVE_MS, 5 * (performance.now() - began)),
        );
      };
      let first = true;
      const stop = watch(run, () => {
        if (first) first = false;
        else changed();
      });
      const back = () => {
        if (!document.hidden && again) {
          again = false;
          changed();
        }
      };
      document.addEventListener("visibilitychange", back);
      ends.push(stop, () => document.removeEventListener("visibilitychange", back));
    },
  };
}

async function quietly(work, over) {
  const focused = document.activeElement?.getAttribute?.("href");
  try {
    await work();
  } catch (error) {
    if (!over.signal.aborted && error.name !== "AbortError") announce(error.message);
  }
  if (focused && document.activeElement === document.body)
    document.querySelector(`main a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

async function show() {
  shown?.over.abort();
  const over = new AbortController();
  shown = { over };
  const mine = shown;
  const main = document.getElementById("main");
  const route = parse();
  const slow = setTimeout(() => replace(main, h("div", { class: "loading", role: "status" }, "Loading …")), 300);
  let page;
  try {
    page = route ? await route.page(contextOf(route, over)) : missing("There is no such page", location.hash);
  } catch (error) {
    if (over.signal.aborted) return;
    page = failed(error);
  }
  clearTimeout(slow);
  if (mine !== shown) return;
  Object.assign(mine, { page });
  document.title = page.title === "Runs" ? "Headrace" : `${page.title} · Headrace`;
  crumbs(page.crumbs);
  replace(main, page.node);
  window.scrollTo(0, 0);
  announce(page.title);
  try {
    await page.after?.();
  } catch (error) {
    if (!over.signal.aborted) append(main, failed(error).node);
  }
  document.body.dataset.ready = location.hash;
}

function missing(title, text) {
  return { node: h("div", { class: "panel" }, empty(title, text)), title, crumbs: [] };
}

function failed(error) {
  const titles = { 0: "No answer", 401: "A token is needed", 404: "Not found", 422: "The record cannot be read" };
  if (!("status" in error)) console.error(error);
  return missing(titles[error.status] ?? "This page failed", error.message);
}

function crumbs(parts) {
  const box = document.querySelector(".crumbs");
  const all = parts.map(([text, href], place) => [
    h("span", { class: "sep", "aria-hidden": "true" }, "/"),
    href
      ? h("a", { href }, text.replaceAll?.("~", "/") ?? text)
      : h("span", { "aria-current": place === parts.length - 1 ? "page" : null }, text.replaceAll?.("~", "/") ?? text),
  ]);
  replace(box, h("a", { href: link() }, "Runs"), all);
}

// ---- keys ------------------------------------------------------------------------------------------------------------

const KEYS = [
  ["j / k", "next / previous row"],
  ["Enter", "open it"],
  ["[ / ]", "previous / next step, group or rollout"],
  ["u", "up: to what it belongs to"],
  ["/", "search"],
  ["t", "light or dark"],
  ["arrow keys", "from token to token, once the tokens have the focus"],
  ["?", "this help"],
];

function move(by) {
  const items = [...document.querySelectorAll("main [data-item]")].filter((one) => one.offsetParent !== null);
  if (!items.length) return;
  const at = items.indexOf(document.activeElement);
  const next = items[Math.max(0, Math.min(items.length - 1, at < 0 ? (by > 0 ? 0 : items.length - 1) : at + by))];
  next.focus({ focusVisible: true });
  next.scrollIntoView({ block: "nearest" });
}

function search() {
  const box = document.querySelector("main #search-text");
  if (box) {
    box.focus();
    box.select();
    return;
  }
  const run = /^#\/run\/([^/?]+)/.exec(location.hash);
  if (run) location.hash = `#/run/${run[1]}/search`;
}

function up() {
  const links = document.querySelectorAll(".crumbs a");
  links[links.length - 1]?.click();
}

const ACTIONS = {
  j: () => move(1),
  k: () => move(-1),
  "/": search,
  "?": () => help(),
  u: up,
  t: () => toggleTheme(),
  "[": () => {
    if (shown?.page?.previous) location.hash = shown.page.previous;
  },
  "]": () => {
    if (shown?.page?.next) location.hash = shown.page.next;
  },
};

function help() {
  const dialog = document.getElementById("help");
  if (dialog.open) dialog.close();
  else dialog.showModal();
}

function toggleTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("headrace-theme", root.dataset.theme);
  } catch {
    /* for this page only */
  }
  redrawCharts();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea, dialog[open]"))
    return;
  const action = ACTIONS[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
});

// ---- start -----------------------------------------------------------------------------------------------------------

function frame() {
  const mark = h("img", { class: "mark", alt: "", src: document.querySelector("link[rel=icon]")?.href });
  const tools = h(
    "div",
    { class: "tools" },
    h(
      "button",
      { type: "button", class: "icon wide", title: "Search (/)", "aria-label": "search", onclick: search },
      "⌕",
    ),
    h(
      "button",
      {
        type: "button",
        class: "icon",
        title: "Light or dark (t)",
        "aria-label": "light or dark",
        onclick: toggleTheme,
      },
      "◐",
    ),
    h("button", { type: "button", class: "icon", title: "Keys (?)", "aria-label": "keys", onclick: help }, "?"),
  );
  const about = exportFacts();
  append(
    document.getElementById("top"),
    h(
      "div",
      { class: "bar" },
      h("a", { class: "brand", href: link() }, mark, h("span", { class: "word" }, "Headrace")),
      h("nav", { class: "crumbs", "aria-label": "where you are" }),
      about && h("span", { class: "badge quiet", title: about.note }, `exported ${about.at}`),
      tools,
    ),
  );
  document.body.append(
    h(
      "dialog",
      { id: "help", "aria-label": "keys" },
      h("h1", null, "Keys"),
      h(
        "table",
        null,
        h(
          "tbody",
          null,
          KEYS.map(([key, text]) => h("tr", null, h("td", null, h("kbd", null, key)), h("td", null, text))),
        ),
      ),
      h("button", { type: "button", onclick: help }, "Close"),
    ),
  );
}

async function start() {
  const data = document.getElementById("data");
  if (data) await openExport(data);
  else takeToken();
  frame();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
  addEventListener("hashchange", show);
  await show();
}

start();
