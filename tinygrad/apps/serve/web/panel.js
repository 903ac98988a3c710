// The settings: the system prompt, sampling, tools, the key, the theme.
import {$, h, icon} from "./dom.js";
import {getKey, keepSettings, setKey, settings} from "./store.js";

// name in the API, label, step, least, most, what it does
const SAMPLING = [
  ["temperature", "Temperature", 0.05, 0, 5, "0 takes the likeliest token always"],
  ["top_p", "Top p", 0.01, 0.01, 1, "of the likeliest tokens, those that make up this share"],
  ["top_k", "Top k", 1, 0, 1000, "of the likeliest tokens, so many; 0: all"],
  ["min_p", "Min p", 0.01, 0, 1, "tokens at least this likely, beside the likeliest"],
  ["repeat_penalty", "Repeat penalty", 0.01, 0.01, 5, "above 1, what was said becomes less likely"],
  ["max_tokens", "Max tokens", 1, 1, 1000000, "the longest answer"],
  ["seed", "Seed", 1, 0, 4294967295, "the same seed gives the same answer"],
];

export function drawSampling(defaults) {
  $("#sampling").replaceChildren(h("legend", {}, "Sampling"), ...SAMPLING.map(([name, label, step, min, max, what]) => {
    const value = settings.sampling[name] ?? "", unset = defaults[name];
    const field = h("input", {type: "number", id: `sampling-${name}`, name, step, min, max, inputmode: "decimal", value: String(value),
                              placeholder: unset === undefined || unset < 0 ? "auto" : String(+unset.toFixed(3)), oninput: () => keepField(field)});
    return h("label", {title: what}, h("span", {}, label), field);
  }), h("button", {type: "button", class: "link", onclick: forget}, "Back to the model's own"));
  function forget() {
    settings.sampling = {};
    keepSettings();
    drawSampling(defaults);
  }
}

function keepField(field) {
  field.setAttribute("aria-invalid", String(!field.validity.valid && !field.validity.stepMismatch));
  if (field.value === "") delete settings.sampling[field.name];
  else if (field.getAttribute("aria-invalid") === "false") settings.sampling[field.name] = Number(field.value);
  keepSettings();
}

// The tools that are typed in, or none
export function tools() {
  try {
    const list = JSON.parse(settings.tools || "[]");
    return Array.isArray(list) && list.length ? list : undefined;
  } catch { return undefined; }
}

function checkTools() {
  const line = $("#tools-error");
  line.hidden = true;
  try {
    if (settings.tools.trim() && !Array.isArray(JSON.parse(settings.tools))) throw new Error("a list is expected");
  } catch (error) {
    line.textContent = `Not used: ${error.message}`;
    line.hidden = false;
  }
}

export function showSettings(open) {
  $("#settings").hidden = !open;
  $("#show-settings").setAttribute("aria-expanded", String(open));
  document.body.classList.toggle("with-settings", open);
  $(open ? "#system" : "#prompt").focus();
}

// Asks for the key; true when one was given
export function askKey(why) {
  const dialog = $("#key-dialog");
  if (dialog.open) return Promise.resolve(false);
  $("#key-why").textContent = why;
  $("#key").value = getKey();
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise(resolve => dialog.addEventListener("close", () => {
    const saved = dialog.returnValue === "save";
    if (saved) setKey($("#key").value.trim());
    resolve(saved);
  }, {once: true}));
}

const THEMES = {"": ["half", "Theme: as the system"], light: ["sun", "Theme: light"], dark: ["moon", "Theme: dark"]};

function drawTheme() {
  const [name, label] = THEMES[localStorage.getItem("theme") ?? ""];
  const button = $("#theme");
  button.replaceChildren(icon(name));
  button.title = label;
  button.setAttribute("aria-label", label);
}

function nextTheme() {
  const names = Object.keys(THEMES), next = names[(names.indexOf(localStorage.getItem("theme") ?? "") + 1) % names.length];
  if (next) localStorage.setItem("theme", next); else localStorage.removeItem("theme");
  document.documentElement.dataset.theme = next;
  drawTheme();
}

const SHORTCUTS = [["Enter", "send"], ["Shift+Enter", "a new line"], ["Esc", "stop the answer, or close what is open"],
                   ["↑", "edit the last message, in an empty field"], ["Ctrl+Shift+O", "a new chat"],
                   ["Ctrl+Shift+S", "show or hide the conversations"], ["Ctrl+,", "settings"], ["Ctrl+/", "this list"]];

// onSystem(text): the conversation's system prompt has changed; onKey(): the key has
export function setUpPanel({onSystem, onKey}) {
  $("#show-settings").onclick = () => showSettings($("#settings").hidden);
  $("#hide-settings").onclick = () => showSettings(false);
  $("#system").oninput = event => onSystem(event.target.value);
  $("#tools").value = settings.tools;
  $("#tools").oninput = event => { settings.tools = event.target.value; keepSettings(); checkTools(); };
  $("#change-key").onclick = async () => { if (await askKey("For a server that was started with --api-key.")) onKey(); };
  $("#cancel-key").onclick = () => $("#key-dialog").close();
  $("#theme").onclick = nextTheme;
  $("#shortcuts dl").append(...SHORTCUTS.flatMap(([keys, what]) =>
    [h("dt", {}, ...keys.split("+").map(key => h("kbd", {}, key))), h("dd", {}, what)]));
  $("#show-shortcuts").onclick = () => $("#shortcuts").showModal();
  checkTools();
  drawTheme();
}
