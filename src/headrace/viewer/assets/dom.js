// Elements. Text only ever becomes text: nothing here, or anywhere else, parses HTML.
const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "open") element[name] = value;
    else element.setAttribute(name === "class" ? "class" : name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

export function replace(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

export function announce(text) {
  document.getElementById("announce").textContent = text;
}

export function badge(text, kind, title) {
  return h("span", { class: `badge ${kind ?? ""}`, title }, text);
}

// Control characters (terminal escapes, say) and half surrogate pairs as visible signs; line breaks and tabs stay.
export function visible(text) {
  return String(text)
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (one) => String.fromCharCode(0x2400 + one.charCodeAt(0)))
    .replace(/\u007f/g, "␡")
    .replace(
      /[\u0080-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
      (one) => `⟨U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
    )
    .replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "�");
}

const LONG = 6000;

// A text of any length: the beginning at once, the rest when it is asked for.
export function longText(text, props) {
  const shown = visible(text ?? "");
  const box = h("pre", { class: "text", ...props });
  if (shown.length <= LONG) {
    box.textContent = shown;
    return box;
  }
  const more = h(
    "button",
    {
      type: "button",
      class: "link",
      onclick: () => {
        box.textContent = shown;
      },
    },
    `… show all ${shown.length.toLocaleString("en")} characters`,
  );
  append(box, [shown.slice(0, LONG), h("br"), more]);
  return box;
}

// A table whose numbers are aligned. columns: {title, key?, cell?, num?, class?, tip?}
export function table(columns, rows, options) {
  const given = options ?? {};
  const head = h(
    "tr",
    null,
    columns.map((one) => h("th", { scope: "col", class: one.num ? "num" : one.class, title: one.tip }, one.title)),
  );
  const body = rows.map((row, place) =>
    h(
      "tr",
      given.row?.(row, place),
      columns.map((one) =>
        h(
          "td",
          { class: [one.num ? "num" : "", one.class ?? ""].join(" ").trim() || null },
          one.cell ? one.cell(row, place) : row[one.key],
        ),
      ),
    ),
  );
  const made = h(
    "table",
    { class: given.class },
    given.caption && h("caption", { class: "visually-hidden" }, given.caption),
    h("thead", null, head),
    h("tbody", null, body),
  );
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": given.caption ?? "table" }, made);
}

export function empty(title, text) {
  return h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), text && h("p", null, text));
}

export function section(title, ...children) {
  return h("section", { "aria-label": title }, h("h2", null, title), ...children);
}
