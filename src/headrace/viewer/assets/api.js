// What the pages are made of: from the server or, in an exported file, from the file itself.
import { query } from "./format.js";

let token = null;
let embedded = null;

export const isExport = () => embedded !== null;
export const exportFacts = () => embedded?.about ?? null;

export async function openExport(element) {
  const packed = Uint8Array.from(atob(element.textContent.trim()), (one) => one.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  embedded = JSON.parse(await new Response(stream).text());
}

export function takeToken() {
  const found = /^#token=(.*)$/.exec(location.hash);
  if (found) {
    token = decodeURIComponent(found[1]);
    try {
      sessionStorage.setItem("headrace-token", token);
    } catch {
      /* kept for this page only */
    }
    history.replaceState(null, "", location.pathname + "#/");
  } else {
    try {
      token = sessionStorage.getItem("headrace-token");
    } catch {
      token = null;
    }
  }
}

function headers() {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

export class PageError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export async function get(path, values, signal) {
  const url = path + query(values ?? {});
  if (embedded) {
    if (url in embedded.pages) return embedded.pages[url];
    if (path in embedded.pages) return embedded.pages[path];
    throw new PageError(404, "This is not in the exported file. Export more, or look at the run with headrace view.");
  }
  let answer;
  try {
    answer = await fetch(url, { headers: headers(), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new PageError(0, "The viewer does not answer. Is headrace view still running?");
  }
  if (!answer.ok) {
    let why = answer.statusText;
    try {
      why = (await answer.json()).error ?? why;
    } catch {
      /* no JSON */
    }
    throw new PageError(answer.status, why);
  }
  return answer.json();
}

export const runApi = (run, rest) => `/api/runs/${encodeURIComponent(run)}${rest ?? ""}`;

export async function download(path, values, name) {
  const answer = await fetch(path + query(values ?? {}), { headers: headers() });
  if (!answer.ok) throw new PageError(answer.status, (await answer.json()).error);
  saveFile(await answer.blob(), name);
}

export function saveFile(blob, name) {
  const url = URL.createObjectURL(blob);
  const anchor = document.createElement("a");
  anchor.href = url;
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// Calls `changed` whenever the run has changed. Read with fetch: an EventSource cannot send the token.
export function watch(run, changed) {
  const over = new AbortController();
  if (embedded) return () => {};
  (async () => {
    let pause = 1000;
    while (!over.signal.aborted) {
      try {
        const answer = await fetch(runApi(run, "/events"), { headers: headers(), signal: over.signal });
        if (!answer.ok) return;
        pause = 1000;
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        let text = "";
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
          text += value;
          const events = text.split("\n\n");
          text = events.pop();
          if (events.some((one) => one.startsWith("event: change"))) changed();
        }
      } catch {
        if (over.signal.aborted) return;
      }
      await new Promise((done) => setTimeout(done, pause));
      pause = Math.min(pause * 2, 15000);
    }
  })();
  return () => over.abort();
}
