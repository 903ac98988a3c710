// One message as elements. What the reader does calls `actions`: edit, regenerate, choose, results.
import {copyButton, fit, h, icon, iconButton} from "./dom.js";
import {Prose} from "./markdown.js";

const number = new Intl.NumberFormat("en", {maximumFractionDigits: 1});
const seconds = value => (value < 10 ? value.toFixed(value < 1 ? 2 : 1) : Math.round(value)) + " s";

export class Message {
  constructor(node, actions) {
    Object.assign(this, {node, actions});
    this.foot = h("footer", {class: "foot"});
    const name = {user: "You", assistant: "Answer", tool: "Results of tools"}[node.role];
    this.element = h("article", {class: `message ${node.role}`, "aria-label": name});
    this.element.append(h("h2", {class: "visually-hidden"}, name), ...this.#body(), this.foot);
  }

  #body() {
    const {node} = this;
    if (node.role === "user") return [this.body = h("div", {class: "bubble"}, node.content)];
    if (node.role === "tool") return node.results.map(result => h("div", {class: "card"}, labelled("Result", result.content)));
    this.reasoningText = h("div", {class: "prose"});
    this.reasoningTitle = h("span");
    this.reasoning = h("details", {class: "reasoning", hidden: true}, h("summary", {}, icon("right"), this.reasoningTitle), this.reasoningText);
    this.reasoning.querySelector("summary").addEventListener("click", () => { this.touched = true; });
    this.body = h("div", {class: "prose"});
    this.calls = h("div", {class: "calls"});
    this.notes = h("div", {class: "notes"});
    this.proses = [new Prose(this.reasoningText), new Prose(this.body)];
    return [this.reasoning, this.body, this.calls, this.notes];
  }

  // Shows the message as it is now. running: the answer is still coming; last: nothing follows it
  update({running, last, versions}) {
    if (this.editing) return;
    if (this.node.role === "assistant") this.#answer(running, last);
    this.element.setAttribute("aria-busy", String(running));
    // made anew, the buttons would lose the focus
    const state = JSON.stringify([running, versions.map(node => node.id), this.node.stats]);
    if (state === this.footState) return;
    this.footState = state;
    this.foot.replaceChildren(...(running ? [] : this.#buttons(versions)));
  }

  #answer(running, last) {
    const {node} = this, answering = Boolean(node.content || node.calls.length);
    this.element.classList.toggle("waiting", running && !node.reasoning && !answering);
    this.element.classList.toggle("writing", running && Boolean(node.content));
    this.reasoning.hidden = !node.reasoning;
    const thinking = running && !answering;
    this.reasoning.classList.toggle("thinking", thinking);
    this.reasoningTitle.textContent = thinking ? "Thinking" : node.thought >= 1 ? `Thought for ${seconds(node.thought)}` : "Thought for a moment";
    if (!this.touched) this.reasoning.open = thinking;   // it folds when the answer begins, unless the reader chose
    if (node.reasoning) this.proses[0].update(node.reasoning, !thinking);
    this.proses[1].update(node.content, !running);
    this.#tools(running, last);
    const end = JSON.stringify([running, node.error, node.finish]);   // an alert that is made anew is read out anew
    if (end !== this.endState) this.notes.replaceChildren(...(running ? [] : this.#ends()));
    this.endState = end;
  }

  // A card a call. Those of the last answer take their results from the reader.
  #tools(running, last) {
    const {calls} = this.node;
    const state = JSON.stringify([running, last, calls]);
    if (state === this.callsState) return;
    this.callsState = state;
    const open = last && !running && calls.length > 0;
    const fields = calls.map(() => h("textarea", {class: "mono", rows: 2, placeholder: "What the tool gives back", "aria-label": "Result"}));
    const send = () => this.actions.results(this.node, calls.map((call, i) => ({id: call.id, content: fields[i].value})));
    this.calls.replaceChildren(
      ...calls.map((call, i) => h("div", {class: "card", role: "group", "aria-label": `Call of ${call.name}`},
        h("div", {class: "title"}, icon("wrench"), h("code", {}, call.name || "…")),
        labelled("Arguments", pretty(call.arguments)), open ? fields[i] : null)),
      ...(open ? [h("button", {type: "button", class: "outlined", onclick: send}, calls.length > 1 ? "Send the results" : "Send the result")] : []));
  }

  // How it ended, where that needs words
  #ends() {
    const {node} = this;
    if (node.error) {
      return [h("p", {class: "error", role: "alert"}, node.error + " ",
        h("button", {type: "button", class: "link", onclick: () => this.actions.regenerate(node)}, "Try again"))];
    }
    const words = {length: "Cut at the limit of tokens.", stopped: "Stopped.", undefined: "The page was left before the answer ended."}[node.finish];
    return words ? [h("p", {class: "hint"}, words)] : [];
  }

  #buttons(versions) {
    const {node} = this, at = versions.indexOf(node);
    const to = step => () => this.actions.choose(versions[at + step]);
    const branches = versions.length > 1 ? h("span", {class: "branches", role: "group", "aria-label": "Versions"},
      iconButton("left", "Version before", to(-1), {disabled: at === 0}),
      h("span", {}, `${at + 1}/${versions.length}`),
      iconButton("right", "Next version", to(1), {disabled: at === versions.length - 1})) : null;
    if (node.role === "tool") return [branches ?? ""];
    return [branches ?? "",
      ...(node.content ? [copyButton(() => node.content), iconButton("pencil", "Edit", () => this.#edit())] : []),
      node.role === "assistant" ? iconButton("again", "Another answer", () => this.actions.regenerate(node)) : "",
      node.stats ? h("span", {class: "stats", title: this.#details()}, this.#stats()) : ""];
  }

  #stats() {
    const {speed, first, tokens} = this.node.stats;
    const parts = [speed && `${number.format(speed)} tok/s`, first !== undefined && `${seconds(first)} to first token`,
                   tokens && `${number.format(tokens)} tokens`];
    return parts.filter(Boolean).join(" · ");
  }

  #details() {
    const {prompt, cached} = this.node.stats;
    const parts = [this.node.model, prompt && `prompt of ${number.format(prompt)} tokens`, cached && `${number.format(cached)} of them cached`];
    return parts.filter(Boolean).join(", ");
  }

  #edit() {
    const {node} = this, area = h("textarea", {value: node.content, rows: 1, "aria-label": "Edited text"});
    const leave = () => {
      this.editing = false;
      form.replaceWith(this.body);
      this.foot.hidden = false;
      this.foot.querySelector('[aria-label="Edit"]')?.focus();
    };
    const form = h("form", {class: "edit", onsubmit: event => {
      event.preventDefault();
      leave();
      if (area.value.trim() && area.value !== node.content) this.actions.edit(node, area.value);
    }}, area, h("div", {class: "buttons"}, h("button", {type: "button", class: "outlined", onclick: leave}, "Cancel"),
      h("button", {class: "filled"}, node.role === "user" ? "Send" : "Save")));
    area.addEventListener("input", () => fit(area));
    area.addEventListener("keydown", event => {
      if (event.key === "Escape") { event.stopPropagation(); leave(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && node.role === "user") { event.preventDefault(); form.requestSubmit(); }
    });
    this.editing = true;
    this.body.replaceWith(form);
    this.foot.hidden = true;
    fit(area);
    area.focus();
  }
}

const labelled = (label, text) => h("div", {class: "labelled"}, h("span", {class: "label"}, label), h("pre", {tabindex: 0}, text));

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); }
  catch { return text; }   // half of them, while they stream
}
