// The page: which conversation is shown, what is being answered, and whether the server is there.
import {Absorber, emptyAnswer} from "./answer.js";
import * as api from "./api.js";
import {$, announce, fit, toast} from "./dom.js";
import {loadLibraries} from "./markdown.js";
import {askKey, drawSampling, setUpPanel, showSettings, tools} from "./panel.js";
import {drawChats, exportChats, importChats} from "./sidebar.js";
import {keepSettings, settings} from "./store.js";
import * as store from "./store.js";
import {add, choose, dropIfEmpty, messagesUpTo, newChat, path, ROOT, siblings, titleOf} from "./tree.js";
import {Message} from "./view.js";

const chats = new Map();      // id -> conversation, all that the browser keeps
const running = new Map();    // id of a conversation -> {node, controller, done} of its answer that is coming
const messages = new WeakMap();   // node -> its Message, so that nothing is drawn twice
const server = {props: {}, ready: false};
let current = newChat(settings.system);

// ---- what is shown ----

// What is changed while an answer comes stops it first
const actions = {
  async regenerate(node) {
    await stop(current);
    dropIfEmpty(current, node);
    answer(current, node.parent);
  },
  choose(node) {
    choose(current, node);
    keep(current);
    draw();
  },
  async edit(node, content) {
    await stop(current);
    const edited = add(current, node.parent, {...node, content, stats: undefined, error: undefined});
    if (node.role === "user") return answer(current, edited.id);
    keep(current);
    draw();
  },
  results: (node, results) => answer(current, add(current, node.id, {role: "tool", results}).id),
};

function draw() {
  const nodes = path(current), run = running.get(current.id);
  $("#thread").replaceChildren(...nodes.map((node, i) => {
    if (!messages.has(node)) messages.set(node, new Message(node, actions));
    const message = messages.get(node);
    message.update({running: run?.node === node, last: i === nodes.length - 1, versions: siblings(current, node)});
    return message.element;
  }));
  document.body.classList.toggle("empty", !nodes.length);
  $("#welcome").hidden = nodes.length > 0;
  $("#send").hidden = Boolean(run);
  $("#stop").hidden = !run;
  drawContext(nodes);
  document.title = current.title || "Chat";
  follow();
}

function drawContext(nodes) {
  const stats = nodes.findLast(node => node.stats)?.stats, size = server.props.default_generation_settings?.n_ctx;
  const used = (stats?.prompt ?? 0) + (stats?.tokens ?? 0);
  $("#context").textContent = used && size ? `${used.toLocaleString("en")} of ${size.toLocaleString("en")} tokens` : "";
}

function drawList() {
  drawChats([...chats.values()], current, chat => running.has(chat.id), {
    rename(chat, title) { chat.title = title; keep(chat); drawList(); },
    remove(chat) {
      stop(chat);
      chats.delete(chat.id);
      store.remove(chat.id).catch(notKept);
      if (chat === current) location.hash = "";
      drawList();
      toast("Deleted.", "Undo", () => { chats.set(chat.id, chat); keep(chat); drawList(); });
    },
  });
}

// The end stays in sight while the reader is at it
let following = true;
const scroll = $("#scroll");
const atEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
function follow() {
  if (following) scroll.scrollTop = scroll.scrollHeight;
  $("#to-end").hidden = following || atEnd();
}

let frame = 0;
function drawSoon() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    const run = running.get(current.id);
    if (run) messages.get(run.node)?.update({running: true, last: true, versions: siblings(current, run.node)});
    follow();
  });
}

function show(chat) {
  current = chat;
  following = true;
  $("#system").value = chat.system;
  draw();
  drawList();
  document.body.classList.remove("with-sidebar");
  focusPrompt();
}

// On a phone it would open the keyboard
function focusPrompt() {
  if (matchMedia("(pointer: fine)").matches) $("#prompt").focus();
}

// ---- what is kept ----

const notKept = error => toast(`This browser keeps no conversations: ${error.message}`);

function keep(chat) {
  chats.set(chat.id, chat);
  store.save(chat).catch(notKept);
}

// ---- asking ----

function requestFor(chat, parent) {
  const request = {model: settings.model || server.model, messages: messagesUpTo(chat, parent), ...settings.sampling};
  if (!$("#thinking").hidden) request.chat_template_kwargs = {enable_thinking: settings.thinking};
  const list = tools();
  return list ? {...request, tools: list} : request;
}

async function answer(chat, parent) {
  if (running.has(chat.id)) return;
  const request = requestFor(chat, parent), node = add(chat, parent, emptyAnswer(request.model));
  const {promise: done, resolve: end} = Promise.withResolvers();
  const run = {node, controller: new AbortController(), done}, absorber = new Absorber(node);
  running.set(chat.id, run);
  following = true;
  keep(chat);
  draw();
  drawList();
  if (document.activeElement === document.body) focusPrompt();   // the button that asked for it is gone
  const saving = setInterval(() => { if (chats.has(chat.id)) keep(chat); }, 1000);
  try {
    for await (const chunk of api.chat(request, run.controller.signal)) {
      absorber.take(chunk);
      drawSoon();
    }
    node.finish ??= "stop";
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else failed(chat, node, error);
  }
  clearInterval(saving);
  absorber.end();
  running.delete(chat.id);
  if (chats.has(chat.id)) keep(chat);   // it may have been deleted meanwhile
  if (chat === current) draw();
  drawList();
  announce(node.error ?? `The answer is complete. ${node.content}`);
  end();
}

function failed(chat, node, error) {
  node.error = error.message + (error.retryAfter ? ` (the server says: again in ${error.retryAfter} s)` : "");
  if (error.status === 0) watch();
  if (error.status === 401) keyRefused(error).then(given => { if (given && current === chat) actions.regenerate(node); });
}

async function keyRefused(error) {
  const given = await askKey(error.message);
  if (given) watch();
  return given;
}

function stop(chat) {
  const run = running.get(chat.id);
  run?.controller.abort();
  return run?.done;
}

function send(text) {
  if (!text.trim() || running.has(current.id)) return;
  const last = path(current).at(-1);
  if (!current.title) current.title = titleOf(text);
  const said = add(current, last?.id ?? ROOT, {role: "user", content: text});
  if (location.hash.slice(1) !== current.id) history.pushState(null, "", `#${current.id}`);
  $("#prompt").value = "";
  fit($("#prompt"));
  answer(current, said.id);
}

// ---- the server ----

let watching;
// Looks at the server, soon again while it is not ready
async function watch() {
  clearTimeout(watching);
  const was = server.ready;
  let line = "";
  try {
    await api.health();
    if (!was || !server.model) await meet();
    server.ready = true;
  } catch (error) {
    server.ready = false;
    if (error.status === 401) {
      line = "The server wants an API key.";
      if (!server.asked) { server.asked = true; keyRefused(error); }
    } else if (error.status === 503) line = `The server is not ready yet: ${error.message}`;
    else line = error.status ? error.message : "The server is gone. Start it again; this page finds it by itself.";
  }
  $("#server").hidden = !line;
  if ($("#server").textContent !== line) $("#server").textContent = line;
  clearTimeout(watching);
  watching = setTimeout(watch, server.ready ? 15000 : 1000);
}

// What the server runs and what it samples by
async function meet() {
  const list = (await api.models()).map(model => model.id);
  server.model = list.includes(settings.model) ? settings.model : list[0];
  settings.model = server.model;
  server.props = await api.props();
  $("#model").textContent = list.length > 1 ? "" : server.model;
  $("#models").hidden = list.length < 2;
  $("#models").replaceChildren(...list.map(id => new Option(id, id, false, id === server.model)));
  const template = server.props.chat_template;
  $("#thinking").hidden = typeof template === "string" && !template.includes("enable_thinking");
  drawSampling(server.props.default_generation_settings?.params ?? {});
  drawContext(path(current));
}

// ---- what the reader does ----

function setUpComposer() {
  const prompt = $("#prompt");
  prompt.oninput = () => fit(prompt);
  $("#composer").onsubmit = event => { event.preventDefault(); send(prompt.value); };
  $("#stop").onclick = () => { stop(current); prompt.focus(); };
  prompt.onkeydown = event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && matchMedia("(pointer: fine)").matches) {
      event.preventDefault();
      send(prompt.value);
    } else if (event.key === "ArrowUp" && !prompt.value) {
      event.preventDefault();
      [...document.querySelectorAll('.message.user [aria-label="Edit"]')].at(-1)?.click();
    }
  };
  const drawThinking = () => $("#thinking").setAttribute("aria-pressed", String(settings.thinking));
  $("#thinking").onclick = () => { settings.thinking = !settings.thinking; keepSettings(); drawThinking(); };
  drawThinking();
  $("#models").onchange = event => { settings.model = server.model = event.target.value; keepSettings(); };
  scroll.onscroll = () => { following = atEnd(); follow(); };
  $("#to-end").onclick = () => { following = true; follow(); };
}

function toggleSidebar() {
  document.body.classList.toggle(matchMedia("(max-width: 50rem)").matches ? "with-sidebar" : "without-sidebar");
}

function setUpSidebar() {
  for (const id of ["#hide-sidebar", "#show-sidebar", "#scrim"]) $(id).onclick = toggleSidebar;
  $("#new-chat").onclick = startChat;
  $("#search").oninput = drawList;
  $("#export").onclick = () => exportChats([...chats.values()]);
  $("#import").onclick = () => $("#file").click();
  $("#file").onchange = async event => {
    try {
      const list = importChats(await event.target.files[0].text());
      list.forEach(keep);
      drawList();
      toast(list.length === 1 ? "One conversation is imported." : `${list.length} conversations are imported.`);
    } catch (error) { toast(error.message); }
    event.target.value = "";
  };
}

function startChat() {
  if (location.hash.length > 1) location.hash = "";
  else show(newChat(settings.system));
}

function setUpKeys() {
  const shortcuts = {"/": () => $("#shortcuts").showModal(), ",": () => showSettings($("#settings").hidden)};
  const shifted = {o: startChat, s: toggleSidebar};
  document.addEventListener("keydown", event => {
    const control = event.ctrlKey || event.metaKey;
    const act = control && (event.shiftKey ? shifted[event.key.toLowerCase()] : shortcuts[event.key]);
    if (act && !$("dialog[open]")) {
      event.preventDefault();
      act();
    } else if (event.key === "Escape" && !$("dialog[open]")) {
      if (running.has(current.id)) stop(current);
      else if (!$("#settings").hidden) showSettings(false);
    }
  });
}

function setUp() {
  setUpPanel({
    onSystem(text) {
      current.system = settings.system = text;
      keepSettings();
      if (chats.has(current.id)) keep(current);
    },
    onKey: watch,
  });
  setUpComposer();
  setUpSidebar();
  setUpKeys();
  onhashchange = () => {
    const id = location.hash.slice(1);
    if (chats.has(id)) show(chats.get(id));
    else if (!id) show(newChat(settings.system));
  };
  store.onOtherTab(async id => {
    if (running.has(id)) return;
    const chat = await store.one(id);
    if (chat) chats.set(id, chat); else chats.delete(id);
    if (id === current.id && chat) {
      current = chat;
      draw();
    }
    drawList();
  });
}

drawSampling({});
setUp();
watch();
const [there, kept] = await Promise.all([loadLibraries(), store.all().catch(error => { notKept(error); return []; })]);
$("#libraries").hidden = there;
for (const chat of kept) chats.set(chat.id, chat);
show(chats.get(location.hash.slice(1)) ?? current);
