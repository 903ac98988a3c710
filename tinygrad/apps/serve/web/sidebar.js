// The list of conversations, and their way in and out as JSON.
import {$, download, h, iconButton} from "./dom.js";
import {checked} from "./tree.js";

const DAY = 24 * 3600 * 1000;

function ageOf(chat) {
  const days = (new Date().setHours(0, 0, 0, 0) - chat.updated) / DAY;
  if (days <= 0) return "Today";
  return days <= 1 ? "Yesterday" : days <= 7 ? "This week" : days <= 30 ? "This month" : "Older";
}

const textsOf = chat => [chat.title, ...Object.values(chat.nodes).map(node => node.content ?? "")];
const mentions = (chat, words) => textsOf(chat).some(text => text.toLowerCase().includes(words));

// actions: rename(chat, title), remove(chat)
export function drawChats(chats, current, running, actions) {
  const words = $("#search").value.trim().toLowerCase();
  const shown = chats.filter(chat => !words || mentions(chat, words)).sort((a, b) => b.updated - a.updated);
  let age = null;
  $("#chats").replaceChildren(...shown.flatMap(chat => {
    const head = ageOf(chat) === age ? [] : [h("li", {class: "age"}, age = ageOf(chat))];
    return [...head, row(chat, chat === current, running(chat), actions)];
  }));
  if (!shown.length) $("#chats").append(h("li", {class: "age"}, words ? "Nothing found" : "No conversations yet"));
}

function row(chat, current, running, actions) {
  const link = h("a", {href: `#${chat.id}`, "aria-current": current ? "page" : undefined, title: chat.title}, chat.title || "New chat");
  const rename = () => {
    const field = h("input", {value: chat.title, "aria-label": "Title"});
    let left = false;
    const leave = keep => {
      if (left) return;
      left = true;
      actions.rename(chat, keep && field.value.trim() || chat.title);
    };
    field.addEventListener("keydown", event => {
      event.stopPropagation();
      if (event.key === "Enter" || event.key === "Escape") leave(event.key === "Enter");
    });
    field.addEventListener("blur", () => leave(true));
    item.replaceChildren(field);
    field.select();
  };
  const item = h("li", {class: current ? "current" : ""}, link, running ? h("span", {class: "dot", role: "img", "aria-label": "answering"}) : null,
    h("span", {class: "tools"}, iconButton("pencil", "Rename", rename),
      iconButton("save", "Export", () => exportChats([chat], chat.title)), iconButton("bin", "Delete", () => actions.remove(chat))));
  return item;
}

const FORMAT = "web-chat/1";

export function exportChats(chats, name = "chats") {
  const plain = name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "chat";
  download(`${plain}.json`, JSON.stringify({format: FORMAT, chats}, null, 1));
}

// The conversations of a file, or an error in plain words
export function importChats(text) {
  let file;
  try { file = JSON.parse(text); }
  catch { throw new Error("The file is not JSON."); }
  if (file?.format !== FORMAT || !Array.isArray(file.chats)) throw new Error("The file has no conversations of this page.");
  return file.chats.map(checked);
}
