// Numbers, times and addresses as people read them.
export function num(value, digits) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  let text;
  if (digits !== undefined) text = value.toFixed(digits);
  else if (Number.isInteger(value)) text = size >= 10000 ? value.toLocaleString("en") : String(value);
  else if (size !== 0 && (size < 0.001 || size >= 1e6)) text = value.toExponential(2);
  else text = size >= 100 ? value.toFixed(1) : size >= 1 ? value.toFixed(2) : value.toFixed(3);
  return text.replace("-", "−");
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10000) return Math.round(value).toLocaleString("en");
  const [size, unit] = value < 1e6 ? [1e3, "k"] : value < 1e9 ? [1e6, "M"] : [1e9, "B"];
  return (value / size).toFixed(value / size < 100 ? 1 : 0) + " " + unit;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(value * 100).toFixed(1)} %`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) {
    value /= 1000;
    place += 1;
  }
  return `${value.toFixed(place && value < 100 ? 1 : 0)} ${units[place]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 90) return `${value.toFixed(0)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48
    ? `${hours} h ${String(minutes % 60).padStart(2, "0")} min`
    : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function ago(at, now) {
  if (!at) return "–";
  const passed = Math.max(0, (now ?? Date.now() / 1000) - at);
  if (passed < 5) return "now";
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return new Date(at * 1000).toISOString().slice(0, 10);
}

export function clock(at) {
  if (!at) return "–";
  const when = new Date(at * 1000);
  const two = (value) => String(value).padStart(2, "0");
  return `${when.getFullYear()}-${two(when.getMonth() + 1)}-${two(when.getDate())} ${two(when.getHours())}:${two(when.getMinutes())}:${two(when.getSeconds())}`;
}

export function query(values) {
  const made = new URLSearchParams();
  for (const [key, value] of Object.entries(values))
    if (value !== null && value !== undefined && value !== "") made.set(key, value);
  const text = made.toString();
  return text ? `?${text}` : "";
}

// Addresses of pages. Parts are escaped: a run may be called anything.
export function link(...parts) {
  return "#/" + parts.map((part) => encodeURIComponent(part)).join("/");
}

export const runLink = (run, ...parts) => link("run", run, ...parts);
export const stepLink = (run, step) => runLink(run, "step", step);
export const groupLink = (run, group) => runLink(run, "group", group);
export const rolloutLink = (run, group, rollout, attempt) =>
  runLink(run, "group", group, "rollout", rollout) + query({ attempt });
