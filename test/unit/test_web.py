"""The web chat in Debian's chromium, before a server that says what is scripted (test/scripted_server.py). Whatever a test does, no other host may be
asked, and the console must stay clean: both are checked when its page is closed."""
import json, re, shutil, subprocess, sys, warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Iterator
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from on_terminal import environ
from scripted_server import CUT, END, WAIT, WEB, Script, calls, reasons, refusal, serving
from tinygrad.apps.models import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
if CHROMIUM is None or not (WEB / "vendor/package-lock.json").is_file():
  missing = "chromium; type: sudo apt-get install chromium" if CHROMIUM is None else "libraries for the page; type: make setup"
  warnings.warn(f"the web chat is not tested: no {missing}")
  pytest.skip(f"no {missing}", allow_module_level=True)

PHONE = dict(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
expect.set_options(timeout=15000)

@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
  with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    yield browser
    browser.close()

@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Script, str]]:
  script = Script()
  with serving(script) as port: yield script, f"http://127.0.0.1:{port}/"

@pytest.fixture
def url(served: tuple[Script, str]) -> str: return served[1]

@pytest.fixture
def script(served: tuple[Script, str]) -> Script:
  vars(served[0]).update(vars(Script()))
  return served[0]

class Watched:
  """A page whose requests and console are kept"""
  def __init__(self, browser: Browser, url: str, **options: Any):
    self.context = browser.new_context(base_url=url, **options)
    self.elsewhere: list[str] = []
    self.console: list[str] = []
    self.dialogs: list[str] = []
    def sent(request: Any) -> None:
      if not request.url.startswith((url, "blob:", "data:")): self.elsewhere.append(request.url)
    def said(message: Any) -> None:
      if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"): self.console.append(message.text)
    def asked(dialog: Any) -> None:
      self.dialogs.append(dialog.message)
      dialog.dismiss()
    self.context.on("request", sent)
    self.context.on("console", said)
    self.context.on("weberror", lambda error: self.console.append(str(error.error)))
    self.page = self.context.new_page()
    self.page.on("dialog", asked)

@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
  watched = Watched(browser, url, **options)
  watched.page.goto("/")
  yield watched.page
  watched.context.close()
  assert (watched.elsewhere, watched.console, watched.dialogs) == ([], [], [])

@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
  with opened(browser, url, permissions=["clipboard-read", "clipboard-write"]) as page:
    expect(page.locator("#model")).to_have_text("glm-4.7-flash")
    yield page

def reload(page: Page) -> None:
  page.evaluate("async () => { const {all} = await import('/store.js'); await all(); }")   # a read waits for what is being kept
  page.reload()

def ask(page: Page, text: str, wait: bool = True) -> None:
  page.get_by_label("Message", exact=True).fill(text)
  page.keyboard.press("Enter")
  if wait: expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()

def answer(page: Page) -> Any: return page.locator(".message.assistant").last
def user(page: Page) -> Any: return page.locator(".message.user").last
def button(page: Any, name: str) -> Any: return page.get_by_role("button", name=name, exact=True)

# ---- an answer ----

def test_streams_and_stops(page: Page, script: Script):
  script.answers = [["The first words", " and **more**", WAIT]]
  ask(page, "Hello?", wait=False)
  expect(answer(page).locator(".prose").last).to_have_text("The first words and more")   # while it runs
  expect(answer(page)).to_have_attribute("aria-busy", "true")
  button(page, "Stop").click()
  expect(answer(page)).to_contain_text("Stopped.")
  expect(answer(page)).to_have_attribute("aria-busy", "false")
  assert script.left.wait(5), "the server still writes"
  ask(page, "And now?")
  expect(answer(page)).to_contain_text("An answer.")
  first, second = script.requests
  assert first["stream"] is True and first["stream_options"] == {"include_usage": True} and first["model"] == "glm-4.7-flash"
  assert [(m["role"], m["content"]) for m in second["messages"]] == [
    ("user", "Hello?"), ("assistant", "The first words and **more**"), ("user", "And now?")]

def test_numbers(page: Page, script: Script):
  ask(page, "Hello?")
  expect(answer(page).locator(".stats")).to_have_text(re.compile(r"^123\.5 tok/s · [\d.]+ s to first token · 250 tokens$"))
  expect(page.locator("#context")).to_have_text("1,450 of 8,192 tokens")

MARKDOWN = ["# Title\n\nA *word*, $e^{i\\pi}", " = -1$, not $5 or $6.\n\n",
            "\\[\\frac{a}{b}\\]\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n```pyth", "on\ndef f(x):\n  retu"]

def test_markdown(page: Page, script: Script):
  script.answers = [[*MARKDOWN, WAIT]]
  ask(page, "Show all", wait=False)
  text = answer(page).locator(".prose").last
  expect(text.locator("pre")).to_have_text("def f(x):\n  retu")   # half a fence is code already
  expect(text.locator("h1")).to_have_text("Title")
  expect(text.locator(".katex")).to_have_count(2)
  expect(text.locator(".katex-display")).to_have_count(1)
  expect(text).to_contain_text("not $5 or $6.")
  expect(text.locator("td").last).to_have_text("2")
  expect(text.locator("figcaption")).to_contain_text("python")
  expect(text.locator(".hljs-keyword").first).to_have_text("def")
  assert text.locator(".katex").first.evaluate("e => getComputedStyle(e).fontFamily").startswith("KaTeX"), "no style of KaTeX"
  assert text.locator(".katex .vlist > span").first.evaluate("e => e.style.top"), "the policy has taken KaTeX's styles"
  button(text, "Copy code").click()
  assert page.evaluate("navigator.clipboard.readText()") == "def f(x):\n  retu"

def test_settled_blocks_stay(page: Page, script: Script):
  """What is read and selected above is not made anew while more comes; a link whose address comes last still becomes one"""
  script.answers = [["One.\n\nTwo is [here][1]", 2.0, " and on.\n\n- a", 2.0, "\n- b\n\n[1]: https://example.org/x\n"]]
  ask(page, "Go", wait=False)
  blocks = answer(page).locator(".prose").last.locator(".block")
  expect(blocks).to_have_count(2)
  blocks.first.evaluate("e => { window.kept = e; }")
  expect(blocks).to_have_count(3)
  assert blocks.first.evaluate("e => e === window.kept")
  expect(page.get_by_role("link", name="here")).to_have_attribute("href", "https://example.org/x")
  expect(blocks.locator("li")).to_have_text(["a", "b"])

def test_a_text_in_any_cuts(page: Page, script: Script):
  """What is drawn piece by piece is what is drawn at once"""
  text = "".join(MARKDOWN) + "rn x\n```\n\n1. one\n\n   more\n2. two $x$\n\n> quoted\n> on\n\nsetext\n===\n\n<b>bold</b>\n\n---\nlast \\(y\\)"
  same = page.evaluate("""async text => {
    const {Prose} = await import("./markdown.js");
    const draw = cuts => {
      const element = document.createElement("div"), prose = new Prose(element);
      for (const cut of cuts) prose.update(text.slice(0, cut), false);
      prose.update(text, true);
      return element.innerHTML;
    };
    const every = Array.from(text, (_, i) => i), whole = draw([]);
    return [1, 2, 3, 7, 19].filter(step => draw(every.filter(i => i % step === 0)) !== whole);
  }""", text)
  assert same == []

def test_libraries_that_come_late(browser: Browser, url: str, script: Script):
  """What was shown plain until then is drawn anew, not beside itself"""
  script.answers = [["Some **bold** wor", 3.0, "ds."]]
  watched = Watched(browser, url)
  held: list[Any] = []
  watched.page.route("**/vendor/marked.esm.js", lambda route: held.append(route))
  watched.page.goto("/")
  ask(watched.page, "Go", wait=False)
  expect(answer(watched.page).locator(".prose.plain").last).to_have_text("Some **bold** wor")
  held[0].continue_()
  expect(answer(watched.page).locator(".prose").last).to_have_text("Some bold words.")
  expect(answer(watched.page).locator(".prose.plain")).to_have_count(0)
  watched.context.close()
  assert (watched.elsewhere, watched.console) == ([], [])

def test_reasoning(page: Page, script: Script):
  script.answers = [[reasons("Let me "), reasons("see."), 0.5, "It is so."]]
  ask(page, "Why?", wait=False)
  details = answer(page).locator("details")
  expect(details).to_have_attribute("open", "")
  expect(details.locator("summary")).to_have_text("Thinking")
  expect(details.locator(".prose")).to_have_text("Let me see.")
  expect(details).not_to_have_attribute("open", "")   # folded by the answer
  expect(details.locator("summary")).to_have_text("Thought for a moment")
  details.locator("summary").click()
  expect(details.locator(".prose")).to_be_visible()
  button(page, "Thinking").click()
  ask(page, "Sure?")
  assert [request["chat_template_kwargs"]["enable_thinking"] for request in script.requests] == [True, False]
  assert script.requests[1]["messages"][1] == {"role": "assistant", "content": "It is so.", "reasoning_content": "Let me see."}

def test_no_switch_where_the_template_knows_none(browser: Browser, url: str, script: Script):
  script.template = "{{ messages }}"
  with opened(browser, url) as page:
    expect(page.locator("#thinking")).to_be_hidden()   # once the server has told the template
    ask(page, "Hello?")
    assert "chat_template_kwargs" not in script.requests[0]

def test_tools(page: Page, script: Script):
  tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
  button(page, "Settings").click()
  page.get_by_label("Tools").fill('{"a"')
  expect(page.locator("#tools-error")).to_contain_text("Not used")
  page.get_by_label("Tools").fill(json.dumps([tool]))
  expect(page.locator("#tools-error")).to_be_hidden()
  script.answers = [[calls(0, "weather"), calls(0, "", '{"city": "Os'), calls(0, "", 'lo"}'), calls(1, "weather", '{"city": "<b>Rome"}')], ["Rain."]]
  ask(page, "Weather?")
  cards = answer(page).locator(".card")
  expect(cards.locator("pre")).to_have_text(['{\n  "city": "Oslo"\n}', '{\n  "city": "<b>Rome"\n}'])
  cards.nth(0).get_by_label("Result").fill("wet")
  cards.nth(1).get_by_label("Result").fill("dry")
  button(page, "Send the results").click()
  expect(answer(page)).to_contain_text("Rain.")
  first, second = script.requests
  assert first["tools"] == [tool]
  sent = second["messages"][1]
  assert [(call["id"], call["type"], call["function"]) for call in sent["tool_calls"]] == [
    ("call-0", "function", {"name": "weather", "arguments": '{"city": "Oslo"}'}),
    ("call-1", "function", {"name": "weather", "arguments": '{"city": "<b>Rome"}'})]
  assert second["messages"][2:] == [{"role": "tool", "tool_call_id": "call-0", "content": "wet"},
                                    {"role": "tool", "tool_call_id": "call-1", "content": "dry"}]

# ---- what a model may write ----

ATTACKS = """<script>alert(1)</script><img src=x onerror=alert(2)><img src="https://evil.test/a.png">
<svg onload=alert(3)><iframe src="https://evil.test/d"></iframe>
<style>@import "https://evil.test/e.css"; body { display: none }</style><div style="position:fixed;inset:0">over</div>
<form action="https://evil.test"><input name=x></form>
<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=x onerror=alert(6)&gt;">
<p id="prompt" class="banner" name="body">clobbered</p>
<link rel=stylesheet href="https://evil.test/f.css"><base href="https://evil.test/"><video poster="https://evil.test/g.png"></video>

<a href="javascript:alert(4)">one</a> [two](javascript:alert(5)) [three](https://evil.test/c) ![b](https://evil.test/b.png)

$\\href{javascript:alert(7)}{x} \\includegraphics{https://evil.test/h.png} \\htmlStyle{position:fixed}{y}$

```"><img src=x onerror=alert(8)>
<img src=x onerror=alert(9)>
```
"""

def test_attacks_do_nothing(page: Page, script: Script):
  """The fixture sees to it that no alert was shown, no other host asked and nothing left for the policy to refuse"""
  told = {"answer": [ATTACKS, " end"], "reasoning": [reasons(ATTACKS), "end"], "name": [calls(0, ATTACKS), "end"],
          "arguments": [calls(0, "f", ATTACKS), "end"], "error": refusal(400, ATTACKS + " end"), "question": ["end"]}
  for where, says in told.items():
    script.answers = [says]
    ask(page, ATTACKS if where == "question" else "Attack")
    expect(answer(page)).to_contain_text("end")
    if where == "reasoning": answer(page).locator("summary").click()
    evil = "script, img, iframe, style, form, link, base, video, .prose input, .prose [id], .prose .banner"
    expect(page.locator("#thread").locator(evil)).to_have_count(0)
    if where in ("answer", "reasoning"):
      links = answer(page).locator(".prose a[href]").evaluate_all("all => all.map(a => [a.href, a.rel, a.target])")
      assert links == [[f"https://evil.test/{name}", "noopener noreferrer", "_blank"] for name in ("c", "b.png")]
      assert not answer(page).locator(".prose").last.evaluate("e => [...e.querySelectorAll('[style]')].some(e => e.style.position === 'fixed')")

# ---- edits and branches ----

def test_edit_regenerate_branches(page: Page, script: Script):
  script.answers = [["A1"], ["A2"], ["B1"], ["C1"]]
  ask(page, "first")
  button(answer(page), "Another answer").click()
  expect(answer(page)).to_contain_text("A2")
  expect(answer(page).locator(".branches")).to_have_text("2/2")
  expect(page.get_by_label("Message", exact=True)).to_be_focused()
  button(answer(page), "Version before").click()
  expect(answer(page)).to_contain_text("A1")
  user(page).hover()
  button(user(page), "Edit").click()
  page.get_by_label("Edited text").fill("changed")
  page.keyboard.press("Enter")
  expect(answer(page)).to_contain_text("B1")
  expect(user(page).locator(".branches")).to_have_text("2/2")
  assert script.requests[2]["messages"] == [{"role": "user", "content": "changed"}]
  button(answer(page), "Edit").click()
  page.get_by_label("Edited text").fill("B1, but better")
  button(page, "Save").click()
  expect(answer(page)).to_contain_text("B1, but better")
  ask(page, "more")
  assert [m["content"] for m in script.requests[3]["messages"]] == ["changed", "B1, but better", "more"]
  page.locator(".message.user").first.hover()
  button(page.locator(".message.user").first, "Version before").click()
  expect(page.locator(".message")).to_have_count(2)
  expect(answer(page)).to_contain_text("A1")   # the version that was shown there
  reload(page)
  expect(answer(page)).to_contain_text("A1")
  page.locator(".message.user").first.hover()
  button(page.locator(".message.user").first, "Next version").click()
  expect(answer(page)).to_contain_text("C1")

# How many records are handed over before any other task runs. Whether a browser writes them although the page goes then is its own affair.
HANDED_OVER = """async name => {
  const {commit} = IDBTransaction.prototype;
  let handed = 0;
  IDBTransaction.prototype.commit = function () { handed++; commit.call(this); };
  document.querySelector(`[aria-label="${name}"]`).click();
  for (let i = 0; i < 10; i++) await null;
  IDBTransaction.prototype.commit = commit;
  return handed;
}"""

def test_what_was_chosen_is_handed_over_at_once(page: Page, script: Script):
  script.answers = [["A1"], ["A2"]]
  ask(page, "first")
  button(answer(page), "Another answer").click()
  expect(answer(page)).to_contain_text("A2")
  expect(button(page, "Send")).to_be_visible()
  for name, shown in [("Version before", "1/2"), ("Next version", "2/2")]:
    assert page.evaluate(HANDED_OVER, name) == 1
    reload(page)
    expect(answer(page).locator(".branches")).to_have_text(shown)

def test_an_edit_while_an_answer_comes_stops_it(page: Page, script: Script):
  script.answers = [["Long", WAIT], ["Short"]]
  ask(page, "first", wait=False)
  expect(answer(page)).to_contain_text("Long")
  page.keyboard.press("ArrowUp")
  page.get_by_label("Edited text").fill("second")
  page.keyboard.press("Enter")
  expect(answer(page)).to_contain_text("Short")
  assert script.left.wait(5)
  user(page).hover()
  button(user(page), "Version before").click()
  expect(answer(page)).to_contain_text("Long")
  expect(answer(page)).to_contain_text("Stopped.")

# ---- conversations ----

def listed(page: Page) -> Any: return page.locator("#chats a")

def test_conversations_are_kept(page: Page, script: Script):
  script.answers = [["One."], ["Two, half", WAIT]]
  ask(page, "About one")
  button(page, "New chat").click()
  expect(page.locator(".message")).to_have_count(0)
  ask(page, "About two", wait=False)
  expect(answer(page)).to_contain_text("Two, half")
  listed(page).get_by_text("About one").click()   # the other goes on meanwhile
  expect(answer(page)).to_contain_text("One.")
  expect(page.locator("#chats .dot")).to_have_count(1)
  page.wait_for_timeout(1200)   # it is kept each second
  reload(page)
  expect(answer(page)).to_contain_text("One.")
  listed(page).get_by_text("About two").click()
  expect(answer(page)).to_contain_text("Two, half")
  expect(answer(page)).to_contain_text("The page was left before the answer ended.")
  page.get_by_label("Search the conversations").fill("ONE.")
  expect(listed(page)).to_have_text(["About one"])
  page.get_by_label("Search the conversations").fill("")
  page.locator("#chats li", has_text="About two").hover()
  button(page.locator("#chats li", has_text="About two"), "Rename").click()
  page.get_by_label("Title").fill("Second")
  page.keyboard.press("Enter")
  expect(listed(page)).to_have_text(["Second", "About one"])
  page.locator("#chats li", has_text="About one").hover()
  button(page.locator("#chats li", has_text="About one"), "Delete").click()
  expect(listed(page)).to_have_text(["Second"])
  button(page, "Undo").click()
  expect(listed(page)).to_have_text(["Second", "About one"])
  page.go_back()
  expect(answer(page)).to_contain_text("One.")

def test_two_tabs(page: Page, script: Script):
  other = page.context.new_page()
  other.goto("/")
  ask(page, "From the first")
  expect(listed(other)).to_have_text(["From the first"])

def test_export_and_import(page: Page, script: Script, tmp_path: Path):
  script.answers = [["One.", " <b>x</b>"], ["Another."]]
  ask(page, "About one: a/b")
  button(answer(page), "Another answer").click()
  expect(answer(page)).to_contain_text("Another.")
  with page.expect_download() as download: button(page, "Export all").click()
  file = tmp_path / "chats.json"
  download.value.save_as(file)
  page.locator("#chats li:not(.age)").hover()
  with page.expect_download() as download: button(page.locator("#chats"), "Export").click()
  assert download.value.suggested_filename == "About-one-a-b.json"
  button(page.locator("#chats"), "Delete").click()
  expect(listed(page)).to_have_count(0)
  page.locator("#file").set_input_files(file)
  listed(page).get_by_text("About one").click()
  expect(answer(page)).to_contain_text("Another.")
  button(answer(page), "Version before").click()
  expect(answer(page)).to_contain_text("One. x")
  whole = json.loads(file.read_text())
  node = next(iter(whole["chats"][0]["nodes"].values()))
  def with_nodes(**nodes: dict) -> str: return json.dumps({**whole, "chats": [{"nodes": nodes, "chosen": {}}]})
  for text, words in [("{", "not JSON"), ("{}", "no conversations"), (json.dumps({**whole, "chats": [{}]}), "no messages"),
                      (with_nodes(a=node), "message a"), (with_nodes(**{node["id"]: {**node, "parent": "toString"}}), "the message before")]:
    file.write_text(text)
    page.locator("#file").set_input_files(file)
    expect(page.locator("#toast")).to_contain_text(words)
  expect(listed(page)).to_have_count(1)

def test_an_odd_import_does_no_harm(page: Page, tmp_path: Path):
  """Fields of wrong types are left out, and so is a circle of messages"""
  a, b, c = (letter * 24 for letter in "abc")
  nodes = {a: {"parent": "root", "role": "user", "content": 7},
           b: {"parent": a, "role": "assistant", "content": [], "reasoning": {}, "calls": [1, {}], "stats": {"speed": "x"}},
           c: {"parent": c, "role": "tool", "results": [{"content": "<img src=x onerror=alert(1)>"}]}}
  chat = {"title": ["x"], "system": 3, "nodes": {key: {"id": key, **node} for key, node in nodes.items()}, "chosen": {"root": a, a: b, b: c, c: c}}
  file = tmp_path / "odd.json"
  file.write_text(json.dumps({"format": "web-chat/1", "chats": [chat]}))
  page.locator("#file").set_input_files(file)
  listed(page).click()
  expect(page.locator(".message")).to_have_count(2)

# ---- settings ----

def test_settings(page: Page, script: Script):
  button(page, "Settings").click()
  expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "1")   # by /props
  expect(page.get_by_label("Top p")).to_have_attribute("placeholder", "0.95")
  page.get_by_label("Temperature").fill("0.5")
  page.get_by_label("Seed").fill("7")
  page.get_by_label("Top k").fill("-3")
  expect(page.get_by_label("Top k")).to_have_attribute("aria-invalid", "true")
  page.get_by_label("System prompt").fill("Be brief.")
  page.keyboard.press("Escape")
  expect(page.locator("#settings")).to_be_hidden()
  ask(page, "Hello?")
  reload(page)
  button(page, "New chat").click()
  ask(page, "Again?")
  for request in script.requests:
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert [request.get(name) for name in ("temperature", "seed", "top_p", "top_k")] == [0.5, 7, None, None]
  button(page, "Settings").click()
  button(page, "Back to the model's own").click()
  ask(page, "And now?")
  assert "temperature" not in script.requests[-1]

# ---- the server ----

def test_asks_for_the_key(browser: Browser, url: str, script: Script):
  script.key = "secret"
  with opened(browser, url) as page:
    expect(page.get_by_role("dialog")).to_contain_text("this server asks for an API key")
    page.get_by_role("textbox", name="API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#server")).to_have_text("The server wants an API key.")
    ask(page, "Hello?", wait=False)
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_role("textbox", name="API key").fill("secret")
    page.keyboard.press("Enter")
    expect(answer(page)).to_contain_text("An answer.")   # what was asked is asked again
    expect(page.locator("#server")).to_be_hidden()
    reload(page)
    expect(page.locator("#model")).to_have_text("glm-4.7-flash")
    expect(page.get_by_role("dialog")).to_have_count(0)

def test_says_that_the_server_is_gone_or_loads(browser: Browser, script: Script):
  with ExitStack() as stack:
    first = stack.enter_context(ExitStack())
    port = first.enter_context(serving(script))
    script.health = 503
    page = stack.enter_context(opened(browser, f"http://127.0.0.1:{port}/"))
    expect(page.locator("#server")).to_have_text("The server is not ready yet: loading the model")
    script.health = 200
    expect(page.locator("#server")).to_be_hidden()
    expect(page.locator("#model")).to_have_text("glm-4.7-flash")
    first.close()
    ask(page, "Are you there?")
    expect(answer(page)).to_contain_text("The server does not answer.")
    expect(page.locator("#server")).to_contain_text("The server is gone.")
    stack.enter_context(serving(script, port))
    expect(page.locator("#server")).to_be_hidden()
    button(page, "Try again").click()
    expect(answer(page)).to_contain_text("An answer.")

def test_errors_in_the_servers_words(page: Page, script: Script):
  script.answers = [refusal(429, "the queue is full: 64 wait", **{"Retry-After": "3"}), ["Half an ans", 0.1, CUT],
                    ["And half", END], ["Begun", RuntimeError("the step raised")], refusal(400, "max_tokens: expected at least 1")]
  ask(page, "One")
  expect(answer(page).get_by_role("alert")).to_contain_text("the queue is full: 64 wait (the server says: again in 3 s)")
  button(page, "Try again").click()
  expect(answer(page)).to_contain_text("Half an ans")   # what came is kept
  expect(answer(page).get_by_role("alert")).to_contain_text("The connection was cut before the answer ended.")
  button(page, "Try again").click()
  expect(answer(page)).to_contain_text("And half")
  expect(answer(page).get_by_role("alert")).to_contain_text("The connection was cut before the answer ended.")
  button(page, "Try again").click()
  expect(answer(page).get_by_role("alert")).to_contain_text("the step raised")
  button(page, "Try again").click()
  expect(answer(page).get_by_role("alert")).to_contain_text("max_tokens: expected at least 1")

def test_plain_text_without_libraries(browser: Browser, url: str, script: Script):
  watched = Watched(browser, url)
  watched.context.route("**/vendor/**", lambda route: route.fulfill(status=404))
  watched.page.goto("/")
  expect(watched.page.locator("#libraries")).to_be_visible()
  expect(watched.page.locator("#libraries")).to_contain_text("make setup")
  script.answers = [["**not bold**\n<img src=x onerror=alert(1)>"]]
  ask(watched.page, "Hello?")
  expect(answer(watched.page).locator(".prose").last).to_have_text("**not bold**\n<img src=x onerror=alert(1)>")
  watched.context.close()
  assert (watched.elsewhere, watched.dialogs) == ([], [])

# ---- how it looks and feels ----

def contrast(one: str, other: str) -> float:
  """WCAG's, of two colours as rgb(…)"""
  def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    return sum(w * (v / 12.92 if v <= .04 else ((v + .055) / 1.055) ** 2.4) for w, v in zip((.2126, .7152, .0722), parts))
  dark, light = sorted(map(luminance, (one, other)))
  return (light + .05) / (dark + .05)

SUM = " + ".join(f"x_{{{i}}}" for i in range(60))
WIDE = f"# {'Wide' * 30}\n\n|{' column |' * 20}\n|{'---|' * 20}\n\n```\n{'x' * 300}\n```\n\n$${SUM}$$\n\n{'w' * 300} ${SUM}$"

@pytest.mark.parametrize("name,options", [("light", {"color_scheme": "light"}), ("dark", {"color_scheme": "dark"}), ("phone", PHONE)])
def test_looks(browser: Browser, url: str, script: Script, name: str, options: dict):
  with opened(browser, url, **options) as page:
    script.answers = [[reasons(WIDE), WIDE, " [link](https://example.org)", calls(0, "n" * 99, '{"a": "' + "b" * 300 + '"}')]]
    page.get_by_label("Message", exact=True).fill("u" * 300)
    button(page, "Send").click()
    expect(button(page, "Send the result")).to_be_visible()
    answer(page).locator("summary").click()
    for opener in [None, "Settings"]:
      if opener: button(page, opener).click()
      assert page.evaluate("[document.body, document.querySelector('#scroll')].every(e => e.scrollWidth <= innerWidth)"), "scrolls sideways"
      assert page.evaluate("""() => [...document.querySelectorAll("main button, main textarea")].map(e => e.getBoundingClientRect()).filter(
        box => box.left < 0 || box.right > innerWidth).length""") == 0, "stands outside"
    colours = page.evaluate("['body', '.stats', '.reasoning', '.prose a'].map(s => document.querySelector(s)).map(e => getComputedStyle(e).color)")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert all(contrast(colour, ground) >= 4.5 for colour in colours)
    assert (contrast(ground, "rgb(255, 255, 255)") > 10) == (name == "dark")

def test_theme_switch(page: Page):
  ground = "getComputedStyle(document.body).backgroundColor"
  system = page.evaluate(ground)
  button(page, "Theme: as the system").click()
  button(page, "Theme: light").click()
  assert page.evaluate(ground) != system
  reload(page)
  expect(button(page, "Theme: dark")).to_be_visible()
  assert page.evaluate(ground) != system
  button(page, "Theme: dark").click()
  assert page.evaluate(ground) == system

def test_keyboard(page: Page, script: Script):
  field = page.get_by_label("Message", exact=True)
  expect(field).to_be_focused()
  page.keyboard.type("one")
  page.keyboard.press("Shift+Enter")
  page.keyboard.type("two")
  expect(field).to_have_value("one\ntwo")
  script.answers = [["Words", WAIT]]
  page.keyboard.press("Enter")
  expect(answer(page)).to_contain_text("Words")
  page.keyboard.press("Escape")
  expect(answer(page)).to_contain_text("Stopped.")
  assert script.requests[0]["messages"][0]["content"] == "one\ntwo"
  expect(field).to_be_focused()
  page.keyboard.press("ArrowUp")
  expect(page.get_by_label("Edited text")).to_be_focused()
  page.keyboard.press("Escape")
  page.keyboard.press("Control+/")
  expect(page.get_by_role("dialog")).to_contain_text("Keyboard shortcuts")
  page.keyboard.press("Escape")
  expect(page.get_by_role("dialog")).to_have_count(0)
  page.keyboard.press("Control+Shift+O")
  expect(page.locator(".message")).to_have_count(0)

def test_names_for_screen_readers(page: Page, script: Script):
  script.answers = [[reasons("r"), MARKDOWN[0], calls(0, "f", "{}")]]
  ask(page, "Hello?")
  expect(page.locator("#announcer")).to_contain_text("The answer is complete.")
  button(page, "Settings").click()
  unnamed = page.evaluate("""() => [...document.querySelectorAll("button, a[href], input:not([hidden]), textarea, select, summary")].filter(e =>
    !(e.getAttribute("aria-label") || e.labels?.[0]?.textContent || e.textContent).trim()).map(e => e.outerHTML)""")
  assert unnamed == []
  assert {"main", "navigation", "complementary"} <= set(re.findall(r"- (\w+)", page.locator("body").aria_snapshot()))

def test_stays_where_one_reads(page: Page, script: Script):
  """The end is followed while it is in sight, and left alone when one has scrolled up"""
  script.answers = [[*(f"line {i}\n\n" for i in range(80)), 0.5, *(f"more {i}\n\n" for i in range(80))]]
  ask(page, "Go", wait=False)
  expect(page.get_by_text("line 79", exact=True)).to_be_in_viewport()
  page.mouse.move(700, 300)
  page.mouse.wheel(0, -1500)
  expect(page.get_by_text("more 79", exact=True)).to_be_attached()
  expect(page.get_by_text("more 79", exact=True)).not_to_be_in_viewport()
  button(page, "To the end").click()
  expect(page.get_by_text("more 79", exact=True)).to_be_in_viewport()

# ---- the server itself ----

def test_the_built_in_model_answers(browser: Browser):
  """As a new user would: `make serve`, open the page, ask"""
  command = [sys.executable, "tinygrad/apps/llm.py", "--serve", "127.0.0.1:0"]
  with subprocess.Popen(command, cwd=ROOT, env=environ({}), stdout=subprocess.PIPE, text=True) as process:
    try:
      assert process.stdout is not None
      url = process.stdout.readline().split()[-1] + "/"
      with opened(browser, url) as page:
        expect(page.locator("#model")).to_have_text("Tiny GLM", timeout=60000)
        ask(page, "What is a list?", wait=False)
        expect(answer(page).locator(".stats")).to_contain_text("tok/s", timeout=60000)
        expect(answer(page).locator(".prose").last).to_contain_text("A list is a mutable sequence of objects.")
        expect(answer(page).locator("summary")).to_contain_text("Thought")
        button(page, "Thinking").click()
        ask(page, "What is a list?")
        expect(answer(page).locator("details")).to_be_hidden()
    finally: process.kill()
