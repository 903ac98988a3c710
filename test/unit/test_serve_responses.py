"""OpenAI's responses by its own client: what a model says arrives, whole and as a stream, as items; and items become the prompt that they were."""
from __future__ import annotations
import base64, json
from typing import Any, Iterator
import openai, pytest
from pydantic import BaseModel
from serve_client import Says, Server, serving, until
from tinygrad.apps.serve import wire

@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
  with serving() as s: yield s
@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI: return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)

PARAMETERS = {"type": "object", "properties": {"thing": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS: list[Any] = [{"type": "function", "name": name, "description": f"{name}s", "parameters": PARAMETERS, "strict": False}
                    for name in ("weigh", "count")]
def call(name: str, **arguments: Any) -> str:
  return f"<tool_call>{name}{''.join(f'<arg_key>{k}</arg_key><arg_value>{v}</arg_value>' for k, v in arguments.items())}</tool_call>"
SAYS = "I must weigh.</think>Let me see." + call("weigh", thing="a pear", n=2) + call("count")

def prompts(server: Server) -> list[str]:
  """What the engine was asked"""
  return [server.link.voice.tokenizer.decode(order.ids) for order in server.link.orders if isinstance(order, wire.Add)]
def order(server: Server) -> wire.Add: return [order for order in server.link.orders if isinstance(order, wire.Add)][-1]

def same(item: Any) -> dict[str, Any]:
  """An item, but for the names that were made up for it"""
  return {k: v for k, v in item.to_dict().items() if k not in ("id", "call_id")}

def ask(server: Server, client: openai.OpenAI, says: str|Says, **fields: Any) -> openai.types.responses.Response:
  """Asked whole and as a stream, which must be the same"""
  server.link.script = {"the question": says if isinstance(says, Says) else Says(says)}
  asked: dict[str, Any] = {"model": "any", "input": "the question", **fields}
  whole = client.responses.create(**asked)
  *events, last = client.responses.create(**asked, stream=True)
  assert last.type == f"response.{whole.status}"
  assert [same(item) for item in whole.output] == [same(item) for item in last.response.output]
  differ = ("id", "created_at", "output")
  assert {k: v for k, v in whole.to_dict().items() if k not in differ} == {k: v for k, v in last.response.to_dict().items() if k not in differ}
  # what the events told is what the last one has
  assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"] and events[0].response.output == []
  assert [e.sequence_number for e in [*events, last]] == list(range(len(events) + 1))
  for n, item in enumerate(last.response.output):
    of = [e for e in events if getattr(e, "output_index", None) == n]
    assert of[0].type == "response.output_item.added" and of[0].item.id == item.id and all(e.item_id == item.id for e in of if hasattr(e, "item_id"))
    text = item.arguments if item.type == "function_call" else item.content[0].text
    assert "".join(e.delta for e in of if e.type.endswith(".delta")) == text
    if item.type != "function_call" or item.status == "completed":
      assert of[-1].type == "response.output_item.done" and of[-1].item == item
      done = [e.arguments if item.type == "function_call" else e.text for e in of if e.type.endswith(("text.done", "arguments.done"))]
      assert done == [text]
  return whole

# ---- answers ----

@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("says,items", [
  ("hm, well</think>Hello wörld 😀!", [("reasoning", "hm, well"), ("message", "Hello wörld 😀!")]), ("</think>a\n b", [("message", "a\n b")]),
  ("only thought", [("reasoning", "only thought")]), ("a</think>b<think>c</think>d", [("reasoning", "a"), ("message", "b"), ("reasoning", "c"),
                                                                                       ("message", "d")]), ("</think>", [])])
def test_text(server: Server, client: openai.OpenAI, says: str, items: list[tuple[str, str]], at_once: int):
  r = ask(server, client, Says(says, at_once))
  assert [(item.type, item.content[0].text) for item in r.output] == items and all(item.status == "completed" for item in r.output)
  assert r.output_text == "".join(text for kind, text in items if kind == "message") and r.status == "completed" and r.model == "talker"

@pytest.mark.parametrize("at_once", [1, 4, 1000])
def test_calls(server: Server, client: openai.OpenAI, at_once: int):
  r = ask(server, client, Says(SAYS, at_once), tools=TOOLS)
  assert [item.type for item in r.output] == ["reasoning", "message", "function_call", "function_call"]
  assert [(c.name, json.loads(c.arguments)) for c in r.output[2:]] == [("weigh", {"thing": "a pear", "n": 2}), ("count", {})]
  assert len({c.call_id for c in r.output[2:]} | {c.id for c in r.output[2:]}) == 4

def test_events_in_order(server: Server, client: openai.OpenAI):
  server.link.script = {"question": Says(SAYS, 1000)}
  body = json.dumps({"input": "question", "tools": TOOLS, "stream": True}).encode()
  status, text, headers = server.ask("/v1/responses", body)
  assert status == 200 and headers["content-type"].startswith("text/event-stream")
  events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in text.strip().split("\n\n")]
  assert all(json.loads(e["data"])["type"] == e["event"] for e in events)
  def item(*inner: str) -> list[str]: return ["output_item.added", *inner, "output_item.done"]
  def part(kind: str) -> list[str]: return item("content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done")
  called = item("function_call_arguments.delta", "function_call_arguments.done")
  assert [e["event"].removeprefix("response.") for e in events] == [
    "created", "in_progress", *part("reasoning_text"), *part("output_text"), *called, *called, "completed"]

def test_accumulated_by_the_client(server: Server, client: openai.OpenAI):
  server.link.script = {"question": Says(SAYS, 2)}
  with client.responses.stream(model="any", input="question", tools=TOOLS) as stream:
    events = list(stream)
    final = stream.get_final_response()
  assert [e.snapshot for e in events if e.type == "response.output_text.delta"][-1] == "Let me see."
  assert [e.snapshot for e in events if e.type == "response.function_call_arguments.delta"][-1] == "{}" and final.output[2].name == "weigh"

def test_usage(server: Server, client: openai.OpenAI):
  u = ask(server, client, "hmm</think>four").usage
  assert (u.input_tokens, u.output_tokens, u.total_tokens) == (17, 8, 25)
  assert u.input_tokens_details.cached_tokens == 4 and u.output_tokens_details.reasoning_tokens == 3

@pytest.mark.parametrize("says,n,kind,text", [("</think>abcdef", 4, "message", "abc"), ("abcdef", 3, "reasoning", "abc"),
                                              ("</think>" + call("weigh", thing="pear"), 17, "function_call", '{"thing": "pe')])
def test_length(server: Server, client: openai.OpenAI, says: str, n: int, kind: str, text: str):
  r = ask(server, client, says, max_output_tokens=n, tools=TOOLS)
  assert r.status == "incomplete" and r.incomplete_details.reason == "max_output_tokens" and r.max_output_tokens == n
  assert [(item.type, item.status) for item in r.output] == [(kind, "incomplete")]
  assert (r.output[0].arguments if kind == "function_call" else r.output[0].content[0].text) == text

def test_no_call_is_done_that_was_cut(server: Server, client: openai.OpenAI):
  for says, fields in ((Says("</think>" + call("weigh", thing="pear")), {"max_output_tokens": 17}),
                       (Says("</think>" + call("weigh", thing="pear").removesuffix("r</arg_value></tool_call>"), error="a step raised"), {})):
    server.link.script = {"question": says}
    events = list(client.responses.create(model="", input="question", tools=TOOLS, stream=True, **fields))
    assert "response.function_call_arguments.delta" in [e.type for e in events] and not any(e.type.endswith(".done") for e in events)
  assert events[-1].type == "response.failed" and events[-1].response.output == []

def test_one_call(server: Server, client: openai.OpenAI):
  r = ask(server, client, SAYS, tools=TOOLS, parallel_tool_calls=False)
  assert [item.type for item in r.output] == ["reasoning", "message", "function_call"] and r.parallel_tool_calls is False

def test_namespace(server: Server, client: openai.OpenAI):
  tools: list[Any] = [{"type": "namespace", "name": "mcp__scales", "description": "Scales", "tools": TOOLS[:1]}, TOOLS[1]]
  r = ask(server, client, "</think>" + call("mcp__scales__weigh", thing="pear") + call("count"), tools=tools)
  assert [(c.namespace, c.name) for c in r.output] == [("mcp__scales", "weigh"), (None, "count")]
  turn: list[Any] = [{"role": "user", "content": "and the question"}, *r.output, {"type": "function_call_output", "call_id": "x", "output": "150 g"}]
  ask(server, client, "</think>ok", tools=tools, input=turn)
  assert call("mcp__scales__weigh", thing="pear") + call("count") in prompts(server)[-1]

# ---- conversations ----

@pytest.mark.parametrize("sent", ["items", "dicts", "sealed", "no reasoning"])
def test_turns_with_tools(server: Server, client: openai.OpenAI, sent: str):
  """Each turn's prompt is the last one's, what the model said, and what is new"""
  server.link.script = {"<tool_response>300": Says("So.</think>300 g."), "<tool_response>150 g": Says("Two of them.</think>" + call("count", n=2)),
                        "weigh it": Says(SAYS)}
  server.link.orders.clear()
  history: list[Any] = [{"role": "user", "content": "weigh it"}]
  said = [SAYS, "Two of them.</think>" + call("count", n=2)]
  for results in (["150 g", "1"], ["300"], []):
    include: list[Any] = ["reasoning.encrypted_content"] if sent == "sealed" else []
    r = client.responses.create(model="any", input=history, tools=TOOLS, store=False, include=include)
    if sent == "items": history += r.output
    for item in r.output if sent != "items" else []:
      if item.type == "reasoning" and sent == "no reasoning": continue
      history.append({k: v for k, v in item.to_dict().items() if sent != "sealed" or item.type != "reasoning" or k != "content"})
    calls = [item for item in r.output if item.type == "function_call"]
    history += [{"type": "function_call_output", "call_id": c.call_id, "output": text} for c, text in zip(calls, results, strict=True)]
  first, second, third = prompts(server)
  if sent == "no reasoning": assert SAYS.partition("</think>")[2] in second and "I must" not in second
  else:
    assert second == first + said[0] + "<|observation|><tool_response>150 g</tool_response><tool_response>1</tool_response><|assistant|><think>"
    assert third == second + said[1] + "<|observation|><tool_response>300</tool_response><|assistant|><think>"
  assert r.output_text == "300 g."

def test_sealed_reasoning(server: Server, client: openai.OpenAI):
  r = ask(server, client, "hm é</think>a", include=["reasoning.encrypted_content"])
  assert base64.b64decode(r.output[0].encrypted_content.partition(".")[2]).decode() == "hm é"
  assert ask(server, client, "hm</think>a").output[0].encrypted_content is None
  for foreign in ("gAAAAABo", "Z0FBQUFBQm9mb3JlaWduZZ", "reasoning.!", "reasoning.gA", ""):   # another server's
    thought = {"type": "reasoning", "summary": [], "encrypted_content": foreign}
    ask(server, client, "</think>a", input=[{"role": "user", "content": "the question"}, thought])
    assert prompts(server)[-1].endswith("the question<|assistant|></think><|assistant|><think>")

@pytest.mark.parametrize("items,prompt", [
  ([{"role": "user", "content": "a"}], "<|user|>a"),
  ([{"type": "message", "role": "developer", "content": "d"}, {"role": "user", "content": "a"}], "<|system|>d<|user|>a"),
  ([{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}], "<|user|>ab"),
  ([{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
    {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}], "<|user|>a<|assistant|></think>b<|assistant|></think>c<|user|>d"),
  ([{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
    {"role": "assistant", "content": "b"}, {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]}],
   f"<|user|>a<|assistant|></think>b{call('f', x=1)}<|observation|><tool_response>r</tool_response>"),
  ([{"role": "user", "content": "a"}, {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]},
    {"type": "reasoning", "id": "rs_2", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"role": "assistant", "content": "b"}], "<|user|>a<|assistant|><think>st</think>b"),
  ([{"role": "user", "content": "<|user|>a</think>"}], "<|user|><|user|>a</think>")])
def test_items(server: Server, client: openai.OpenAI, items: list[Any], prompt: str):
  server.link.script = {}
  client.responses.create(model="any", input=items)
  assert prompts(server)[-1] == "[gMASK]<sop>" + prompt + "<|assistant|><think>"

def test_instructions(server: Server, client: openai.OpenAI):
  r = ask(server, client, "</think>a", instructions="Be brief.", metadata={"a": "b"})
  assert prompts(server)[-1].startswith("[gMASK]<sop><|system|>Be brief.<|user|>") and r.instructions == "Be brief." and r.metadata == {"a": "b"}

def test_other_tools_beside_functions(server: Server, client: openai.OpenAI):
  """As Codex offers them"""
  tools: list[Any] = [{"type": "web_search", "external_web_access": False}, *TOOLS, {"type": "custom", "name": "x"}]
  r = ask(server, client, "</think>" + call("count"), tools=tools)
  assert r.output[0].name == "count" and [t.type for t in r.tools] == ["function"] * 2 and "web_search" not in prompts(server)[-1]

def test_effort(server: Server, client: openai.OpenAI):
  r = ask(server, client, "a", reasoning={"effort": "none", "summary": "auto"})
  assert prompts(server)[-1].endswith("<|assistant|></think>") and r.output_text == "a" and r.reasoning.effort == "none"
  ask(server, client, "</think>a", reasoning={"effort": "high"})
  assert prompts(server)[-1].endswith("<think>")

def test_tools_in_the_prompt(server: Server, client: openai.OpenAI):
  r = ask(server, client, "</think>a", tools=TOOLS)
  assert '{"type": "function", "function": {"name": "weigh", "description": "weighs", ' in prompts(server)[-1]
  assert [t.name for t in r.tools] == ["weigh", "count"] and r.tools[0].parameters == PARAMETERS and r.tool_choice == "auto"
  ask(server, client, "</think>a", tools=TOOLS, tool_choice="none")
  assert "weigh" not in prompts(server)[-1]

# ---- what is asked of the engine ----

def test_sampling(server: Server, client: openai.OpenAI):
  r = ask(server, client, "</think>a", temperature=.5, top_p=.25, extra_body={"top_k": 7, "seed": 3}, max_output_tokens=50)
  assert order(server).sampling == {"temperature": .5, "top_p": .25, "top_k": 7, "seed": 3} and order(server).limit == 50
  assert (r.temperature, r.top_p) == (.5, .25)

class Fruit(BaseModel):
  name: str
  grams: int

def test_structure(server: Server, client: openai.OpenAI):
  server.link.script = {"question": Says('hm</think>{"name": "pear", "grams": 150}')}
  r = client.responses.parse(model="any", input="question", text_format=Fruit)
  assert r.output_parsed == Fruit(name="pear", grams=150)
  grammar = order(server).grammar
  assert grammar.kind == "json_schema" and json.loads(grammar.source)["properties"].keys() == {"name", "grams"} and grammar.after is not None
  r = ask(server, client, "</think>{}", text={"format": {"type": "json_object"}, "verbosity": "low"})
  assert json.loads(order(server).grammar.source) == {"type": "object"} and r.text.format.type == "json_object"
  assert ask(server, client, "</think>{}", text={"format": {"type": "text"}}) and order(server).grammar is None

def test_hints(server: Server, client: openai.OpenAI):
  r = ask(server, client, "</think>a", store=True, user="u", prompt_cache_key="k", service_tier="auto", truncation="disabled", background=False,
          include=["web_search_call.action.sources"], max_tool_calls=3, previous_response_id=None, stream_options={"include_obfuscation": False})
  assert r.output_text == "a" and r.store is False and r.previous_response_id is None

# ---- what is refused ----

USER = {"role": "user", "content": "hi"}
@pytest.mark.parametrize("param,fields", [
  ("previous_response_id", {"previous_response_id": "resp_1"}), ("conversation", {"conversation": "conv_1"}), ("background", {"background": True}),
  ("prompt", {"prompt": {"id": "pmpt_1"}}), ("truncation", {"truncation": "auto"}), ("top_logprobs", {"top_logprobs": 2}),
  ("context_management", {"context_management": [{"type": "compaction"}]}), ("include", {"include": ["message.output_text.logprobs"]}),
  ("tools[0].type", {"tools": [{"type": "web_search"}]}), ("tools[0].type", {"tools": [{"type": "custom", "name": "x"}]}),
  ("tools[0].type", {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}),
  ("tools[0].name", {"tools": [{"type": "function"}]}), ("tools[1].name", {"tools": [TOOLS[0]] * 2}),
  ("tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}), ("tool_choice", {"tool_choice": "required"}),
  ("tool_choice.type", {"tools": TOOLS, "tool_choice": {"type": "file_search"}}), ("tool_choice", {"tool_choice": "perhaps"}),
  ("input", {"input": 5}), ("input", {"input": []}), ("input[0].type", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
  ("input[1].type", {"input": [USER, {"type": "web_search_call", "id": "ws_1", "status": "completed"}]}),
  ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
  ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}), ("input[0].content[1].text", {"input": [{"role": "user", "content": [
    {"type": "input_text", "text": "a"}, {"type": "input_text"}]}]}),
  ("input[1].arguments", {"input": [USER, {"type": "function_call", "name": "f", "call_id": "1", "arguments": "[1]"}]}),
  ("input[1].name", {"input": [USER, {"type": "function_call", "call_id": "1", "arguments": "{}"}]}),
  ("max_output_tokens", {"max_output_tokens": 0}), ("max_output_tokens", {"max_output_tokens": "many"}), ("temperature", {"temperature": -1}),
  ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}), ("text.format.type", {"text": {"format": {"type": "xml"}}}),
  ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}),
  ("reasoning.effort", {"reasoning": {"effort": 5}}), ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}})])
def test_refused(server: Server, client: openai.OpenAI, param: str, fields: dict[str, Any]):
  with pytest.raises(openai.BadRequestError) as e: client.responses.create(**{"model": "any", "input": "hi"}, extra_body=fields)
  assert e.value.param == param and e.value.type == "invalid_request_error"
  assert (param in e.value.message) and "\n" not in e.value.message

def test_context(client: openai.OpenAI):
  for n in (5000, 1_000_000):
    with pytest.raises(openai.BadRequestError) as e: client.responses.create(model="any", input="x" * n)
    assert e.value.code == "context_length_exceeded" and e.value.param == "input" and e.value.body["n_ctx"] == 4096

def test_broken(server: Server):
  for body, words in ((b"{", "expected JSON"), (b"[]", "expected an object"), (b'{"input": "a", "tools": {}}', "tools: expected a list")):
    status, error, _ = server.ask("/v1/responses", body)
    assert status == 400 and words in error["error"]["message"]
  assert server.ask("/v1/responses/resp_1")[0] == 404 and server.ask("/v1/responses")[0] == 405

# ---- faults ----

def test_failure(server: Server, client: openai.OpenAI):
  server.link.script = {"question": Says("hm</think>so far", error="a step raised")}
  with pytest.raises(openai.InternalServerError, match="a step raised"): client.responses.create(model="any", input="question")
  events = list(client.responses.create(model="any", input="question", stream=True))
  assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "so far"
  assert events[-1].type == "response.failed" and events[-1].response.status == "failed" and events[-1].response.error.message == "a step raised"
  assert [item.type for item in events[-1].response.output] == ["reasoning"] and not server.link.handles
  assert [e.sequence_number for e in events] == list(range(len(events)))
  server.link.script = {"question": Says("</think>" + call("count", n=1), error="a step raised")}   # a call that ended is done
  events = list(client.responses.create(model="any", input="question", tools=TOOLS, stream=True))
  assert [e.type for e in events[-2:]] == ["response.output_item.done", "response.failed"] and events[-1].response.output[0].arguments == '{"n": 1}'

def test_who_goes_away_ends_it(server: Server, client: openai.OpenAI):
  server.link.script = {"question": Says("</think>on and ", endless=True)}
  server.link.orders.clear()
  stream = client.responses.create(model="any", input="question", stream=True)
  for event in stream:
    if event.type == "response.output_text.delta": break
  stream.close()
  until(lambda: any(isinstance(o, wire.Abort) for o in server.link.orders))
