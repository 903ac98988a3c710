// Elements, icons, the clipboard, and the line at the foot that comes and goes.

export const $ = selector => document.querySelector(selector);

// An element. A property that is undefined or false is left out; one that begins with "on" is a listener.
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

// A drawing of index.html's <defs>
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#${name}`);
  svg.append(use);
  return svg;
}

export const iconButton = (name, label, onclick, more = {}) =>
  h("button", {type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...more}, icon(name));

// navigator.clipboard is missing where the page comes by plain http from another machine
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea", {value: text, class: "visually-hidden"});
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

// A button that says for a moment that it has copied
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    await copyText(text());
    button.replaceChildren(icon("check"));
    announce("Copied");
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

// For screen readers alone
export function announce(words) {
  $("#announcer").textContent = words;
}

let fading;
export function toast(words, action = null, act = null) {
  const line = $("#toast");
  line.replaceChildren(h("span", {}, words));
  if (action) line.append(h("button", {type: "button", class: "link", onclick: () => { line.hidden = true; act(); }}, action));
  line.hidden = false;
  clearTimeout(fading);
  fading = setTimeout(() => { line.hidden = true; }, action ? 8000 : 4000);
}

// Grows with its text, as far as the stylesheet lets it
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

export function download(name, text) {
  const link = h("a", {href: URL.createObjectURL(new Blob([text], {type: "application/json"})), download: name});
  link.click();
  URL.revokeObjectURL(link.href);
}
