// A conversation is a tree of messages: an edit or another answer is a sibling, and nothing that was said is lost. `chosen` maps a message to the
// child that is shown after it. A message: {id, parent, role: user | assistant | tool, content}; of an answer also reasoning, thought (seconds),
// calls, finish, error, stats; of tool messages `results`, one a call.

export const ROOT = "root";

// crypto.randomUUID is missing where the page comes by plain http from another machine
export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), byte => byte.toString(16).padStart(2, "0")).join("");

export const newChat = (system = "") => ({id: newId(), title: "", created: Date.now(), updated: Date.now(), system, nodes: {}, chosen: {}});

export function path(chat) {
  const shown = [];
  for (let node = chat.nodes[chat.chosen[ROOT]]; node; node = chat.nodes[chat.chosen[node.id]]) shown.push(node);
  return shown;
}

export const siblings = (chat, node) => Object.values(chat.nodes).filter(other => other.parent === node.parent);

export function choose(chat, node) {
  chat.chosen[node.parent] = node.id;
}

export function add(chat, parent, fields) {
  const node = {...fields, id: newId(), parent, created: Date.now()};
  chat.nodes[node.id] = node;
  choose(chat, node);
  chat.updated = node.created;
  return node;
}

export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? line.slice(0, 59).trimEnd() + "…" : line;
}

// The messages that are sent for an answer below `parent`
export function messagesUpTo(chat, parent) {
  const nodes = [];
  for (let node = chat.nodes[parent]; node; node = chat.nodes[node.parent]) nodes.unshift(node);
  const system = chat.system.trim() ? [{role: "system", content: chat.system}] : [];
  return [...system, ...nodes.flatMap(messagesOf)];
}

function messagesOf(node) {
  if (node.role === "user") return [{role: "user", content: node.content}];
  if (node.role === "tool") return node.results.map(({id, content}) => ({role: "tool", tool_call_id: id, content}));
  const message = {role: "assistant", content: node.content};
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.calls?.length) {
    message.tool_calls = node.calls.map(call => ({id: call.id, type: "function", function: {name: call.name, arguments: call.arguments || "{}"}}));
  }
  return [message];
}

// An answer that failed before it said anything is no version to come back to
export function dropIfEmpty(chat, node) {
  if (node.role === "assistant" && !node.content && !node.reasoning && !node.calls.length) delete chat.nodes[node.id];
}

const text = value => (typeof value === "string" ? value : "");
const list = value => (Array.isArray(value) ? value.filter(item => item && typeof item === "object") : []);
const numbers = value => Object.fromEntries(Object.entries(value ?? {}).filter(([, number]) => typeof number === "number"));

// What is imported is somebody's file: of a message the fields that are known, each of its type
function cleaned(node) {
  const {id, parent, role} = node;
  const plain = {id, parent, role, created: Number(node.created) || 0};
  if (role === "tool") return {...plain, results: list(node.results).map(result => ({id: text(result.id), content: text(result.content)}))};
  if (role === "user") return {...plain, content: text(node.content)};
  const calls = list(node.calls).map(call => ({id: text(call.id), name: text(call.name), arguments: text(call.arguments)}));
  return {...plain, content: text(node.content), reasoning: text(node.reasoning), calls, model: text(node.model), thought: Number(node.thought) || 0,
          finish: text(node.finish) || "stop", error: text(node.error) || undefined, stats: node.stats && numbers(node.stats)};
}

// A conversation of a file, with an id of its own, or an error that says what is wrong. A chosen child that is no child of its message is left out:
// whoever follows the others comes to an end.
export function checked(chat) {
  const fail = what => { throw new Error(`not a conversation of this page: ${what}`); };
  if (!chat?.nodes || typeof chat.nodes !== "object" || typeof chat.chosen !== "object") fail("it has no messages");
  for (const [id, node] of Object.entries(chat.nodes)) {
    if (!/^[0-9a-f]{24}$/.test(id) || node?.id !== id || !["user", "assistant", "tool"].includes(node.role)) fail(`message ${id}`);
    if (node.parent !== ROOT && !Object.hasOwn(chat.nodes, node.parent)) fail(`the message before ${id}`);
  }
  const nodes = Object.fromEntries(Object.entries(chat.nodes).map(([id, node]) => [id, cleaned(node)]));
  const isChild = ([parent, id]) => Object.hasOwn(nodes, id) && nodes[id].parent === parent;
  const chosen = Object.fromEntries(Object.entries(chat.chosen ?? {}).filter(isChild));
  return {...newChat(text(chat.system)), title: text(chat.title), created: Number(chat.created) || Date.now(), nodes, chosen};
}
