"""Anthropic's messages by its own client: what a model says arrives, whole and as a stream, as blocks, and blocks become the prompt they were."""
from __future__ import annotations
import json
from typing import Any, Iterator
import anthropic, pytest
from pydantic import BaseModel
from serve_client import Says, Server, serving, until
from tinygrad.apps.serve import wire

@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
  with serving(keepalive_seconds=.05) as s: yield s
@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic: return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)

SCHEMA = {"type": "object", "properties": {"thing": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS: list[Any] = [{"name": name, "description": f"{name}s", "input_schema": SCHEMA} for name in ("weigh", "count")]
def call(name: str, **arguments: Any) -> str:
  return f"<tool_call>{name}{''.join(f'<arg_key>{k}</arg_key><arg_value>{v}</arg_value>' for k, v in arguments.items())}</tool_call>"
SAYS = "I must weigh.</think>Let me see." + call("weigh", thing="a pear", n=2) + call("count")
def user(content: Any) -> Any: return {"role": "user", "content": content}
def assistant(content: Any) -> Any: return {"role": "assistant", "content": content}

def prompts(server: Server) -> list[str]:
  """What the engine was asked"""
  return [server.link.voice.tokenizer.decode(order.ids) for order in server.link.orders if isinstance(order, wire.Add)]
def order(server: Server) -> wire.Add: return [order for order in server.link.orders if isinstance(order, wire.Add)][-1]
def same(block: Any) -> dict[str, Any]:
  """A block, but for the name that was made up for it"""
  return {k: v for k, v in block.to_dict().items() if k not in ("id", "parsed_output")}

def ask(server: Server, client: anthropic.Anthropic, says: str|Says, **fields: Any) -> anthropic.types.Message:
  """Asked whole and as a stream, which must be the same"""
  server.link.script = {"the question": says if isinstance(says, Says) else Says(says)}
  asked: dict[str, Any] = {"model": "any", "max_tokens": 1000, "messages": [user("the question")], **fields}
  whole = client.messages.create(**asked)
  with client.messages.stream(**asked) as stream:
    events = list(stream)
    final = stream.get_final_message()
  assert [same(block) for block in whole.content] == [same(block) for block in final.content]
  assert (whole.stop_reason, whole.stop_sequence, whole.usage, whole.model) == (final.stop_reason, final.stop_sequence, final.usage, final.model)
  # each block begins, grows and ends before the next
  kinds = [e.type for e in events if e.type in ("message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop")]
  assert kinds == ["message_start", *["content_block_start", "content_block_stop"] * len(whole.content), "message_delta", "message_stop"]
  assert [e.index for e in events if e.type == "content_block_start"] == list(range(len(whole.content)))
  return whole

# ---- answers ----

@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("says,blocks", [
  ("hm, well</think>Hello wörld 😀!", [("thinking", "hm, well"), ("text", "Hello wörld 😀!")]), ("</think>a\n b", [("text", "a\n b")]),
  ("only thought", [("thinking", "only thought")]), ("</think>", []),
  ("a</think>b<think>c</think>d", [("thinking", "a"), ("text", "b"), ("thinking", "c"), ("text", "d")])])
def test_text(server: Server, client: anthropic.Anthropic, says: str, blocks: list[tuple[str, str]], at_once: int):
  m = ask(server, client, Says(says, at_once))
  assert [(b.type, b.thinking if b.type == "thinking" else b.text) for b in m.content] == blocks
  assert all(b.signature for b in m.content if b.type == "thinking")
  assert (m.stop_reason, m.stop_sequence, m.role, m.model) == ("end_turn", None, "assistant", "talker")

@pytest.mark.parametrize("at_once", [1, 4, 1000])
def test_calls(server: Server, client: anthropic.Anthropic, at_once: int):
  m = ask(server, client, Says(SAYS, at_once), tools=TOOLS)
  assert [b.type for b in m.content] == ["thinking", "text", "tool_use", "tool_use"] and m.stop_reason == "tool_use"
  assert [(b.name, b.input) for b in m.content[2:]] == [("weigh", {"thing": "a pear", "n": 2}), ("count", {})] and m.content[2].id != m.content[3].id

def test_events_in_order(server: Server, client: anthropic.Anthropic):
  server.link.script = {"question": Says(SAYS, 1000)}
  body = json.dumps({"max_tokens": 1000, "messages": [user("question")], "tools": TOOLS, "stream": True}).encode()
  status, text, headers = server.ask("/v1/messages", body)
  assert status == 200 and headers["content-type"].startswith("text/event-stream")
  events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in text.strip().split("\n\n")]
  data = [json.loads(e["data"]) for e in events]
  assert [d["type"] for d in data] == [e["event"] for e in events]
  def block(*deltas: str) -> list[str]: return ["content_block_start", *deltas, "content_block_stop"]
  assert [d["delta"]["type"] if d["type"] == "content_block_delta" else d["type"] for d in data] == [
    "message_start", "ping", *block("thinking_delta", "signature_delta"), *block("text_delta"), *block("input_json_delta"),
    *block("input_json_delta"), "message_delta", "message_stop"]
  assert data[0]["message"]["content"] == [] and data[0]["message"]["stop_reason"] is None and data[0]["message"]["usage"]["output_tokens"] == 0

def test_usage(server: Server, client: anthropic.Anthropic):
  u = ask(server, client, "hmm</think>four").usage
  assert (u.input_tokens, u.cache_read_input_tokens, u.cache_creation_input_tokens, u.output_tokens) == (13, 4, 0, 8)
  assert u.output_tokens_details.thinking_tokens == 3

@pytest.mark.parametrize("says,n,block", [
  ("</think>abcdef", 4, {"type": "text", "text": "abc"}), ("abcdef", 3, {"type": "thinking", "thinking": "abc", "signature": "none"}),
  ("</think>" + call("weigh", thing="pear"), 17, {"type": "tool_use", "name": "weigh", "input": {}})])
def test_max_tokens(server: Server, client: anthropic.Anthropic, says: str, n: int, block: dict[str, Any]):
  m = ask(server, client, says, max_tokens=n, tools=TOOLS)
  assert m.stop_reason == "max_tokens" and order(server).limit == n
  assert [{k: v for k, v in same(b).items() if v is not None} for b in m.content] == [block]

def test_the_json_of_a_call_that_was_cut(server: Server, client: anthropic.Anthropic):
  server.link.script = {"question": Says("</think>" + call("weigh", thing="pear"))}
  events = client.messages.create(model="", max_tokens=17, messages=[user("question")], tools=TOOLS, stream=True)
  assert "".join(e.delta.partial_json for e in events if e.type == "content_block_delta") == '{"thing": "pe'   # as long as it is, no call

def test_full_context():
  with serving(ready={"capacity": 40}) as server:
    m = ask(server, anthropic.Anthropic(base_url=server.url, api_key="none"), Says("</think>on and ", endless=True))
    assert m.stop_reason == "model_context_window_exceeded" and m.usage.output_tokens == 23

@pytest.mark.parametrize("at_once", [1, 2, 1000])
@pytest.mark.parametrize("stops,says,text,found", [
  (["STOP"], "a STOP b", "a ", "STOP"), (["xy", "S"], "axSTOP", "ax", "S"), (["STOP"], "a STO", "a STO", None),
  (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n")])
def test_stop_sequences(server: Server, client: anthropic.Anthropic, stops: list[str], says: str, text: str, found: str|None, at_once: int):
  m = ask(server, client, Says(f"STOP xy S is thought</think>{says}", at_once), stop_sequences=stops)
  assert m.content[-1].text == text and (m.stop_reason, m.stop_sequence) == ("stop_sequence" if found else "end_turn", found)

def test_ping(server: Server, client: anthropic.Anthropic):
  """While nothing comes, events say that the server is there"""
  import threading
  say = threading.Event()
  server.link.script = {"question": Says("</think>a", silent=say)}
  pings = lines = 0
  with client.messages.with_streaming_response.create(model="", max_tokens=9, messages=[user("question")], stream=True) as response:
    for line in response.iter_lines():
      pings, lines = pings + (line == 'data: {"type":"ping"}'), lines + 1
      if pings == 3 or lines == 30: say.set()
  assert pings >= 3

# ---- conversations ----

def results(m: Any, *texts: str) -> Any:
  calls = [b for b in m.content if b.type == "tool_use"]
  return user([{"type": "tool_result", "tool_use_id": c.id, "content": text} for c, text in zip(calls, texts, strict=True)])

@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_turns_with_tools(server: Server, client: anthropic.Anthropic, display: Any):
  """Each turn's prompt is the last one's, what the model said, and what is new"""
  server.link.script = {"<tool_response>300": Says("So.</think>300 g."), "<tool_response>150 g": Says("Two of them.</think>" + call("count", n=2)),
                        "weigh it": Says(SAYS)}
  server.link.orders.clear()
  history: list[Any] = [user("weigh it")]
  thinking: Any = {"type": "enabled", "budget_tokens": 1024, "display": display}
  for texts in (["150 g", "1"], ["300"], None):
    asked: dict[str, Any] = {"model": "any", "max_tokens": 1000, "messages": history, "tools": TOOLS, "thinking": thinking}
    with client.messages.stream(**asked) as stream: m = stream.get_final_message()
    assert (m.content[0].thinking == "") == (display == "omitted")
    history.append(m.to_param())
    if texts: history.append(results(m, *texts))
  first, second, third = prompts(server)
  assert second == first + SAYS + "<|observation|><tool_response>150 g</tool_response><tool_response>1</tool_response><|assistant|><think>"
  assert third == second + "Two of them.</think>" + call("count", n=2) + "<|observation|><tool_response>300</tool_response><|assistant|><think>"
  assert m.content[-1].text == "300 g."

@pytest.mark.parametrize("messages,prompt", [
  ([user([{"type": "text", "text": "a "}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}])], "<|user|>a b"),
  ([user("a"), assistant([{"type": "redacted_thinking", "data": "EuAB"}, {"type": "text", "text": "b"}]), user("c")],
   "<|user|>a<|assistant|></think>b<|user|>c"),
  ([user("a"), assistant([{"type": "thinking", "thinking": "hm", "signature": "EuAB"},
                          {"type": "tool_use", "id": "1", "name": "f", "input": {"x": [1]}}]),
    user([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "no f"}], "is_error": True},
          {"type": "text", "text": "go on"}])],
   f"<|user|>a<|assistant|></think>{call('f', x=[1])}<|observation|><tool_response>Error: no f</tool_response><|user|>go on"),
  ([user("a"), assistant([{"type": "tool_use", "id": "1", "name": "f", "input": {}}]),
    user([{"type": "text", "text": "b"}, {"type": "tool_result", "tool_use_id": "1"}])],
   f"<|user|>a<|assistant|></think>{call('f')}<|observation|><tool_response></tool_response><|user|>b"),
  ([user([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "weigh"}]}])],
   "<|observation|><tool_response>weigh</tool_response>"),
  ([user("a"), assistant([{"type": "redacted_thinking", "data": "EuAB"}, {"type": "tool_use", "id": "1", "name": "f", "input": {}}]),
    user([{"type": "tool_result", "tool_use_id": "1", "content": "b"}])],
   f"<|user|>a<|assistant|></think>{call('f')}<|observation|><tool_response>b</tool_response>"),
  ([user("a"), {"role": "system", "content": "s"}], "<|user|>a<|system|>s"), ([user([])], "<|user|>"), ([user("</think>")], "<|user|></think>")])
def test_blocks(server: Server, client: anthropic.Anthropic, messages: list[Any], prompt: str):
  client.messages.create(model="any", max_tokens=9, messages=messages)
  assert prompts(server)[-1] == "[gMASK]<sop>" + prompt + "<|assistant|><think>"

@pytest.mark.parametrize("system", [
  "Be brief.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
  [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f;"}, {"type": "text", "text": "Be brief."}]])
def test_system(server: Server, client: anthropic.Anthropic, system: Any):
  client.messages.create(model="any", max_tokens=9, messages=[user("a")], system=system)
  assert prompts(server)[-1].startswith("[gMASK]<sop><|system|>Be brief.<|user|>a")

def test_going_on(server: Server, client: anthropic.Anthropic):
  """An answer that the client began"""
  m = ask(server, client, "so on", messages=[user("the question"), assistant("and")])
  assert prompts(server)[-1].endswith("the question<|assistant|><think></think>and") and [b.text for b in m.content] == ["so on"]

@pytest.mark.parametrize("thinking,end", [
  (None, "<think>"), ({"type": "enabled", "budget_tokens": 2000}, "<think>"), ({"type": "adaptive"}, "<think>"), ({"type": "disabled"}, "</think>")])
def test_thinking(server: Server, client: anthropic.Anthropic, thinking: Any, end: str):
  client.messages.create(model="any", max_tokens=9, messages=[user("a")], **({"thinking": thinking} if thinking else {}))
  assert prompts(server)[-1].endswith("<|assistant|>" + end)

def test_thinking_that_is_kept(server: Server, client: anthropic.Anthropic):
  past = [user("a"), assistant([{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "b"}]), user("c")]
  for keep, prompt in (("all", "<think>hm</think>b"), ({"type": "thinking_turns", "value": 1}, "</think>b")):
    client.messages.create(model="any", max_tokens=9, messages=past,
                           extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}})
    assert f"<|assistant|>{prompt}<|user|>c" in prompts(server)[-1]

def test_tools_found_later(server: Server, client: anthropic.Anthropic):
  """The prompt's beginning stays, and they may be called"""
  asked: dict[str, Any] = {"messages": [user("find it")], "tools": TOOLS[:1]}
  client.messages.create(model="any", max_tokens=9, **asked)
  found = user([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "count"}]}])
  search = assistant([{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "tool_use", "id": "1", "name": "weigh", "input": {}}])
  m = ask(server, client, "</think>" + call("count", n=2), messages=[user("find the question"), search, found],
          tools=[*TOOLS[:1], {**TOOLS[1], "defer_loading": True}])
  first, last = prompts(server)[-3].rpartition("find")[0], prompts(server)[-1]
  assert last.startswith(first) and last.partition("<tool_response>")[2].startswith('{"name":"count","description":"counts","parameters":{"type":')
  assert m.content[0].name == "count" and m.content[0].input == {"n": 2}

def test_tool_choice(server: Server, client: anthropic.Anthropic):
  ask(server, client, "</think>a", tools=TOOLS, tool_choice={"type": "none"})
  assert "weigh" not in prompts(server)[-1] and order(server).grammar is None
  m = ask(server, client, SAYS, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
  assert [b.type for b in m.content] == ["thinking", "text", "tool_use"]
  assert '{"type": "function", "function": {"name": "weigh", "description": "weighs", ' in prompts(server)[-1]

@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weigh"}])
def test_a_call_that_must_be(server: Server, client: anthropic.Anthropic, choice: Any):
  ask(server, client, "</think>" + call("weigh", thing="pear"), tools=TOOLS, tool_choice=choice)
  grammar = order(server).grammar
  assert "weigh" in grammar.source and ("count" in grammar.source) == (choice["type"] == "any")

# ---- what is asked of the engine ----

def test_sampling(server: Server, client: anthropic.Anthropic):
  ask(server, client, "</think>a", extra_body={"temperature": .5, "top_p": .25, "top_k": 7, "seed": 3}, max_tokens=50)
  assert order(server).sampling == {"temperature": .5, "top_p": .25, "top_k": 7, "seed": 3} and order(server).limit == 50

class Fruit(BaseModel):
  name: str
  grams: int

def test_structure(server: Server, client: anthropic.Anthropic):
  server.link.script = {"question": Says('hm</think>{"name": "pear", "grams": 150}')}
  m = client.messages.parse(model="any", max_tokens=100, messages=[user("question")], output_format=Fruit)
  assert m.parsed_output == Fruit(name="pear", grams=150)
  grammar = order(server).grammar
  assert grammar.kind == "json_schema" and json.loads(grammar.source)["properties"].keys() == {"name", "grams"} and grammar.after is not None

def test_hints(server: Server, client: anthropic.Anthropic):
  m = ask(server, client, "</think>a", metadata={"user_id": "u"}, service_tier="auto", cache_control={"type": "ephemeral"}, speed="fast",
          output_config={"effort": "high"}, thinking={"type": "adaptive", "display": "updates"},
          extra_body={"mcp_servers": [], "context_management": {"edits": [{"type": "clear_tool_uses_1"}]}},
          extra_headers={"anthropic-beta": "x-1"})
  assert m.content[0].text == "a"

def test_count(server: Server, client: anthropic.Anthropic):
  server.link.orders.clear()
  asked: dict[str, Any] = {"model": "any", "messages": [user("a"), assistant("b"), user("c")], "system": "s", "tools": TOOLS}
  n = client.messages.count_tokens(**asked).input_tokens
  assert not server.link.orders
  u = client.messages.create(max_tokens=9, **asked).usage
  assert n == u.input_tokens + u.cache_read_input_tokens
  assert client.messages.count_tokens(model="any", messages=[user("x" * 5000)]).input_tokens > 5000   # more than there is room for

# ---- what is refused ----

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
@pytest.mark.parametrize("field,fields", [
  ("messages[0].content[1].type", {"messages": [user([{"type": "text", "text": "a"}, IMAGE])]}), ("messages[0].content", {"messages": [user(5)]}),
  ("messages[0].content[0].type", {"messages": [user([{"type": "document"}])]}),
  ("messages[0].role", {"messages": [{"role": "tool", "content": "a"}]}),
  ("messages[1].content[0].content[0].type", {"messages": [user("a"), user([{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}])]}),
  ("messages[0].content[0].type", {"messages": [user([{"type": "thinking", "thinking": "a", "signature": ""}])]}),
  ("messages[1].content[0].type", {"messages": [user("a"), assistant([{"type": "server_tool_use", "id": "1", "name": "x", "input": {}}])]}),
  ("messages[1].content[0].name", {"messages": [user("a"), assistant([{"type": "tool_use", "id": "1", "input": {}}])]}),
  ("messages[1].content[0].input", {"messages": [user("a"), assistant([{"type": "tool_use", "id": "1", "name": "f", "input": "{}"}])]}),
  ("messages[0].content[0].text", {"messages": [user([{"type": "text"}])]}), ("messages", {"messages": []}), ("messages", {"messages": "a"}),
  ("system[0].type", {"system": [IMAGE]}), ("max_tokens", {"max_tokens": None}), ("max_tokens", {"max_tokens": 0}),
  ("max_tokens", {"max_tokens": "a"}), ("tools[0].input_schema", {"tools": [{"name": "a"}]}),
  ("tools[1].type", {"tools": [TOOLS[0], {"type": "web_search_20250305", "name": "web_search"}]}),
  ("tools[1].name", {"tools": [TOOLS[0], TOOLS[0]]}), ("tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "tool"}}),
  ("tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}), ("tool_choice", {"tool_choice": {"type": "any"}}),
  ("tool_choice.type", {"tools": TOOLS, "tool_choice": {"type": "maybe"}}), ("thinking.type", {"thinking": {"type": "some"}}),
  ("stop_sequences", {"stop_sequences": [""]}), ("stop_sequences[0]", {"stop_sequences": [1]}), ("temperature", {"temperature": -1}),
  ("top_k", {"top_k": 1.5}), ("mcp_servers", {"mcp_servers": [{"type": "url"}]}), ("container", {"container": "x"}),
  ("output_config.format", {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}),
  ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}})])
def test_refused(server: Server, client: anthropic.Anthropic, field: str, fields: dict[str, Any]):
  with pytest.raises(anthropic.BadRequestError) as e: client.messages.create(model="any", max_tokens=9, messages=[user("a")], extra_body=fields)
  error = e.value.body["error"]
  assert e.value.body["type"] == "error" and error["type"] == "invalid_request_error"
  assert error["message"].startswith(field + ":") and "\n" not in error["message"]

def test_context(client: anthropic.Anthropic):
  for n in (5000, 1_000_000):
    with pytest.raises(anthropic.BadRequestError, match="4096 tokens"): client.messages.create(model="any", max_tokens=9, messages=[user("x" * n)])

def test_errors_by_class():
  with serving(api_keys=frozenset(["right"]), max_body=1000) as server:
    server.link.script = {"question": Says("</think>a")}
    def create(key: str, text: str = "question", **kw: Any) -> Any:
      c = anthropic.Anthropic(base_url=server.url, max_retries=0, **({"api_key": key} | kw))
      return c.messages.create(model="", max_tokens=9, messages=[user(text)])
    m = create("right")
    assert m.content[0].text == "a" and m._request_id and create("none", default_headers={"authorization": "Bearer right", "x-api-key": ""})
    with pytest.raises(anthropic.AuthenticationError) as e: create("wrong")
    assert e.value.body["error"]["type"] == "authentication_error" and e.value.request_id
    with pytest.raises(anthropic.RequestTooLargeError) as large: create("right", "x" * 2000)
    assert large.value.body["error"]["type"] == "request_too_large"
    for path, status, kind in (("/v1/messages/batches", 404, "not_found_error"), ("/v1/messages", 405, "invalid_request_error")):
      found, error, _ = server.ask(path, x_api_key="right")
      assert (found, error["type"], error["error"]["type"]) == (status, "error", kind)

# ---- faults ----

def test_failure(server: Server, client: anthropic.Anthropic):
  server.link.script = {"question": Says("hm</think>so far", error="a step raised")}
  asked: dict[str, Any] = {"model": "", "max_tokens": 100, "messages": [user("question")]}
  with pytest.raises(anthropic.InternalServerError) as whole: client.messages.create(**asked)
  assert whole.value.body["error"] == {"type": "api_error", "message": "a step raised"}
  text = ""
  with pytest.raises(anthropic.APIStatusError, match="a step raised"), client.messages.stream(**asked) as stream:
    for piece in stream.text_stream: text += piece
  assert text == "so far" and not server.link.handles

def test_who_goes_away_ends_it(server: Server, client: anthropic.Anthropic):
  server.link.script = {"question": Says("</think>on and ", endless=True)}
  server.link.orders.clear()
  with client.messages.stream(model="", max_tokens=4000, messages=[user("question")]) as stream:
    for _ in stream.text_stream: break
  until(lambda: any(isinstance(o, wire.Abort) for o in server.link.orders))
