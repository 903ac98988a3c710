"""OpenAI's endpoints by its own client: what a model says arrives, whole and as a stream, in the form that the client expects."""
from __future__ import annotations
import json
from typing import Any, Iterator
import openai, pytest
from serve_client import Says, Server, serving, until
from tinygrad.apps.serve import wire

@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
  with serving() as s: yield s
@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI: return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)

TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
  "a": {"type": "integer"}, "s": {"type": "string"}}}}} for name in ("add", "now")]
def call(name: str, **arguments: Any) -> str:
  return f"<tool_call>{name}{''.join(f'<arg_key>{k}</arg_key><arg_value>{v}</arg_value>' for k, v in arguments.items())}</tool_call>"

class Asked:
  """A conversation of one message, answered whole and as a stream, which must be the same. orders: what the engine was told"""
  def __init__(self, server: Server, client: openai.OpenAI, says: str|Says, **fields: Any):
    self.server, self.says = server, says if isinstance(says, Says) else Says(says)
    server.link.script = {"the question": self.says}
    server.link.orders.clear()
    ask: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "the question"}], "seed": 1, **fields}
    self.whole = client.chat.completions.create(**ask)
    self.chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    self.orders = list(server.link.orders)
    self.choices = [self.joined(choice.index) for choice in self.whole.choices]

  def joined(self, index: int) -> dict[str, Any]:
    """A choice of the stream, put together; equal to that of the whole answer"""
    text, thought, calls, logprobs, finish = "", "", {}, [], None
    for chunk in self.chunks[:-1]:
      choice = chunk.choices[0]
      if choice.index != index: continue
      assert finish is None, "the finish comes last"
      text, thought, finish = text + (choice.delta.content or ""), thought + getattr(choice.delta, "reasoning_content", ""), choice.finish_reason
      if choice.logprobs: logprobs += choice.logprobs.content
      for c in choice.delta.tool_calls or []:
        if c.id: calls[c.index] = [c.function.name, ""]
        calls[c.index][1] += c.function.arguments
    message = self.whole.choices[index].message
    assert (message.content or "", getattr(message, "reasoning_content", ""), self.whole.choices[index].finish_reason) == (text, thought, finish)
    assert [[c.function.name, c.function.arguments] for c in message.tool_calls or []] == list(calls.values())
    whole = self.whole.choices[index].logprobs
    assert (whole.content if whole else []) == logprobs
    assert self.chunks[-1].choices == [] and self.chunks[-1].usage == self.whole.usage
    return {"text": text, "thought": thought, "calls": [(name, json.loads(arguments)) for name, arguments in calls.values()], "finish": finish,
            "logprobs": logprobs}
  def __getattr__(self, name: str) -> Any: return self.choices[0][name]

# ---- text ----

@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("says,thought,text", [
  ("hm, well</think>Hello wörld 😀!", "hm, well", "Hello wörld 😀!"), ("</think>a\n\n b  c", "", "a\n\n b  c"), ("only thought", "only thought", ""),
  ("a</think>b<think>c</think>d", "ac", "bd"), ("</think>", "", ""), ("", "", "")])
def test_text(server: Server, client: openai.OpenAI, says: str, thought: str, text: str, at_once: int):
  asked = Asked(server, client, Says(says, at_once))
  assert (asked.text, asked.thought, asked.finish, asked.calls) == (text, thought, "stop", [])

def test_usage_and_timings(server: Server, client: openai.OpenAI):
  asked = Asked(server, client, "hmm</think>four")
  usage = asked.whole.usage
  assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (17, 8, 25)
  assert usage.prompt_tokens_details.cached_tokens == 4 and usage.completion_tokens_details.reasoning_tokens == 3
  timings = {"cache_n": 4, "prompt_n": 13, "prompt_ms": 500.0, "prompt_per_token_ms": 38.4615, "prompt_per_second": 26.0,
             "predicted_n": 8, "predicted_ms": 2000.0, "predicted_per_token_ms": 285.7143, "predicted_per_second": 3.5}
  assert asked.whole.model_extra["timings"] == asked.chunks[-1].model_extra["timings"] == asked.chunks[-2].model_extra["timings"] == timings
  assert asked.whole.model == asked.chunks[0].model == "talker" and len({c.id for c in asked.chunks}) == 1
  assert asked.whole.object == "chat.completion" and asked.chunks[0].object == "chat.completion.chunk"
  assert asked.chunks[0].choices[0].delta.role == asked.whole.choices[0].message.role == "assistant"

def test_no_usage_that_was_not_asked_for(server: Server, client: openai.OpenAI):
  server.link.script = {"question": Says("</think>a")}
  chunks = list(client.chat.completions.create(model="", messages=[{"role": "user", "content": "question"}], stream=True))
  assert all(c.choices and not c.usage for c in chunks)

def test_length(server: Server, client: openai.OpenAI):
  asked = Asked(server, client, "</think>abcdef", max_tokens=4)
  assert (asked.text, asked.finish, asked.whole.usage.completion_tokens) == ("abc", "length", 4) and asked.orders[0].limit == 4
  assert Asked(server, client, "</think>wörld", max_tokens=3).text == "w\ufffd"   # the rest of a character never came

@pytest.mark.parametrize("at_once", [1, 2, 1000])
@pytest.mark.parametrize("stop,says,text", [("STOP", "a STOP b", "a "), (["xy", "S"], "axSTOP", "ax"), ("STOP", "a STO", "a STO"), ("b", "abc", "a"),
                                            (["bc", "b"], "abc", "a"), ("é", "caféx", "caf"), ("\n\n", "a\nb\n\nc", "a\nb"), ("a", "a", "")])
def test_stop(server: Server, client: openai.OpenAI, stop: Any, says: str, text: str, at_once: int):
  asked = Asked(server, client, Says(f"in reasoning STOP xy bc is nothing</think>{says} and on", at_once), stop=stop)
  if says == "a STO": text += " and on"
  assert (asked.text, asked.finish) == (text, "stop")
  aborted = [order.id for order in asked.orders if isinstance(order, wire.Abort)]
  assert len(aborted) == (0 if says == "a STO" or at_once == 1000 else 2) and not server.link.handles

def test_several(server: Server, client: openai.OpenAI):
  asked = Asked(server, client, "x</think>abc", n=3)
  assert [c["text"] for c in asked.choices] == ["abc"] * 3 and [c.index for c in asked.whole.choices] == [0, 1, 2]
  assert [order.sampling["seed"] for order in asked.orders] == [1, 2, 3, 1, 2, 3]
  assert (asked.whole.usage.prompt_tokens, asked.whole.usage.completion_tokens) == (17, 15)   # the prompt counts once

def test_what_the_engine_is_told(server: Server, client: openai.OpenAI):
  asked = Asked(server, client, "</think>a", temperature=.5, logit_bias={"65": -100}, logprobs=True, top_logprobs=1, max_completion_tokens=9,
                response_format={"type": "json_object"}, extra_body={"top_k": 4})
  order = asked.orders[0]
  assert order.sampling == {"temperature": .5, "bias": {65: -100}, "top_k": 4, "seed": 1} and order.limit == 9 and order.logprobs == 1
  assert order.grammar == wire.Grammar("json_schema", '{"type":"object"}', server.link.voice.tokenizer.special_tokens["</think>"])
  assert {256, 257} <= set(order.stop)

# ---- probabilities ----

@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_logprobs(server: Server, client: openai.OpenAI, at_once: int):
  asked = Asked(server, client, Says("</think>hé", at_once), logprobs=True, top_logprobs=2)
  assert [c.token for c in asked.logprobs] == ["</think>", "h", "\ufffd", "\ufffd"] and [c.logprob for c in asked.logprobs] == [-.5] * 4
  assert [bytes(c.bytes) for c in asked.logprobs[1:]] == [b"h", b"\xc3", b"\xa9"]
  top = asked.logprobs[1].top_logprobs
  assert [(t.token, t.logprob) for t in top] == [("h", -.5), (" ", -9999.0)]

@pytest.mark.parametrize("at_once", [1, 2, 1000])
def test_logprobs_end_with_the_text(server: Server, client: openai.OpenAI, at_once: int):
  asked = Asked(server, client, Says("</think>abSTOPc", at_once), logprobs=True, stop="STOP")
  assert "".join(c.token for c in asked.logprobs) == "</think>ab"
  asked = Asked(server, client, Says("</think>abST", at_once), logprobs=True, stop="STOP")
  assert "".join(c.token for c in asked.logprobs) == "</think>abST" and asked.text == "abST"

# ---- tools ----

@pytest.mark.parametrize("at_once", [1, 4, 1000])
def test_tools(server: Server, client: openai.OpenAI, at_once: int):
  says = Says("hm</think>Let me see." + call("add", a=5, s='say "hé"') + call("now"), at_once)
  asked = Asked(server, client, says, tools=TOOLS)
  assert (asked.thought, asked.text, asked.finish) == ("hm", "Let me see.", "tool_calls")
  assert asked.calls == [("add", {"a": 5, "s": 'say "hé"'}), ("now", {})]
  names = [c.id for c in asked.whole.choices[0].message.tool_calls]
  assert len({*names}) == 2 and all(name.startswith("call_") for name in names)
  one = Asked(server, client, says, tools=TOOLS, parallel_tool_calls=False)
  assert one.calls == asked.calls[:1] and one.finish == "tool_calls"
  assert any(isinstance(order, wire.Abort) for order in one.orders) == (at_once < 1000)

def test_a_call_alone(server: Server, client: openai.OpenAI):
  asked = Asked(server, client, "</think>" + call("now"), tools=TOOLS)
  assert asked.whole.choices[0].message.content is None and asked.calls == [("now", {})]

def test_what_is_no_call(server: Server, client: openai.OpenAI):
  for tools in ([], TOOLS):
    asked = Asked(server, client, "</think>" + call("unknown", a=1), **({"tools": tools} if tools else {}))
    assert asked.calls == [] and asked.finish == "stop" and "unknown" in asked.text
  assert Asked(server, client, "</think>" + call("now"), tools=TOOLS, tool_choice="none").calls == []

def test_a_call_that_is_cut(server: Server, client: openai.OpenAI):
  # not mended: nobody shall run it
  server.link.script = {"question": Says("</think>" + call("add", a=5, s="abc"))}
  for n, cut in ((11, '{"a": 5'), (17, '{"a": 5, "s": "ab')):
    choice = client.chat.completions.create(model="", messages=[{"role": "user", "content": "question"}], tools=TOOLS, max_tokens=n).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls[0].function.arguments == cut

def test_several_turns(server: Server, client: openai.OpenAI):
  server.link.script = {"and then": Says("</think>" + call("add", a=1))}
  history: list[Any] = [{"role": "user", "content": "and then"}]
  for turn in range(3):
    message = client.chat.completions.create(model="", messages=history, tools=TOOLS).choices[0].message
    history += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"result {turn}"}]
  prompt = server.link.voice.tokenizer.decode([o for o in server.link.orders if isinstance(o, wire.Add)][-1].ids)
  assert prompt.count(call("add", a=1)) == 2 and "result 1" in prompt

# ---- completions ----

def complete(server: Server, client: openai.OpenAI, says: Says, prompt: Any = "<|user|>go", **fields: Any) -> tuple[Any, list[Any]]:
  """(whole, the texts of a stream's choices); which are the same"""
  server.link.script, ask = {"go": says}, {"model": "", "prompt": prompt, "seed": 1, **fields}
  whole = client.completions.create(**ask)
  chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
  for choice in whole.choices:
    mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
    assert "".join(c.text for c in mine) == choice.text and mine[-1].finish_reason == choice.finish_reason
    if choice.logprobs:
      for name in ("tokens", "token_logprobs", "text_offset"):
        assert [x for c in mine if c.logprobs for x in getattr(c.logprobs, name)] == getattr(choice.logprobs, name)
  assert chunks[-1].usage == whole.usage
  return whole, chunks

def test_completions(server: Server, client: openai.OpenAI):
  whole, _ = complete(server, client, Says("<think>é</think> <tool_call>", 2))
  assert whole.choices[0].text == "<think>é</think> <tool_call>" and whole.choices[0].finish_reason == "stop" and whole.object == "text_completion"
  assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 6)
  whole, _ = complete(server, client, Says("abc"), prompt=["<|user|>go", "a"], n=2, max_tokens=2)
  assert [c.text for c in whole.choices] == ["ab", "ab", "he", "he"] and whole.usage.prompt_tokens == 4
  assert [c.index for c in whole.choices] == [0, 1, 2, 3] and {c.finish_reason for c in whole.choices} == {"length"}
  whole, _ = complete(server, client, Says("abc"), echo=True, stop="c")
  assert whole.choices[0].text == "<|user|>goab"
  whole, _ = complete(server, client, Says("abc"), prompt=[257, *b"go"])
  assert whole.choices[0].text == "abc"

def test_the_old_logprobs(server: Server, client: openai.OpenAI):
  whole, _ = complete(server, client, Says("aéb", 2), logprobs=1)
  logprobs = whole.choices[0].logprobs
  assert logprobs.tokens == ["a", "\ufffd", "\ufffd", "b"] and logprobs.token_logprobs == [-.5] * 4 and logprobs.text_offset == [0, 1, 1, 2]
  assert logprobs.top_logprobs[0] == {"a": -.5}
  assert complete(server, client, Says("aSTb"), logprobs=0, stop="STOP")[0].choices[0].logprobs.text_offset == [0, 1, 2, 3]
  assert complete(server, client, Says("a"), logprobs=0)[0].choices[0].logprobs.top_logprobs is None
  assert complete(server, client, Says("a"))[0].choices[0].logprobs is None

def test_the_answer_goes_on(server: Server, client: openai.OpenAI):
  messages: list[Any] = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "It is"}]
  server.link.script = {"go": Says(" four")}
  for echo, text in ((False, " four"), (True, "It is four")):
    extra = {"continue_final_message": True, "echo": echo}
    assert client.chat.completions.create(model="", messages=messages, extra_body=extra).choices[0].message.content == text
    chunks = client.chat.completions.create(model="", messages=messages, extra_body=extra, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text

# ---- models, errors ----

def test_models(client: openai.OpenAI):
  assert [m.id for m in client.models.list()] == ["talker"] and client.models.retrieve("talker").owned_by == "local"
  with pytest.raises(openai.NotFoundError) as e: client.models.retrieve("gpt/5")
  assert e.value.code == "model_not_found"

def test_errors(client: openai.OpenAI):
  messages: list[Any] = [{"role": "user", "content": "x" * 5000}]
  with pytest.raises(openai.BadRequestError) as e: client.chat.completions.create(model="", messages=messages)
  assert e.value.code == "context_length_exceeded" and e.value.param == "messages" and e.value.body["n_ctx"] == 4096
  with pytest.raises(openai.BadRequestError) as e: client.chat.completions.create(model="", messages=messages, n=0, stream=True)
  assert e.value.type == "invalid_request_error"

def test_the_engine_fails(server: Server, client: openai.OpenAI):
  server.link.script = {"question": Says("</think>so far", error="a step raised")}
  messages: list[Any] = [{"role": "user", "content": "question"}]
  with pytest.raises(openai.InternalServerError) as e: client.chat.completions.create(model="", messages=messages)
  assert "a step raised" in e.value.message
  text = ""
  with pytest.raises(openai.APIError) as error:
    for chunk in client.chat.completions.create(model="", messages=messages, stream=True): text += chunk.choices[0].delta.content or ""
  assert text == "so far" and "a step raised" in error.value.message and not server.link.handles

def test_cancelled(server: Server, client: openai.OpenAI):
  server.link.script = {"question": Says("</think>on and on ", endless=True)}
  stream = client.chat.completions.create(model="", messages=[{"role": "user", "content": "question"}], stream=True)
  for _ in zip(range(5), stream): pass
  assert len(server.link.handles) == 1
  stream.close()
  until(lambda: not server.link.handles and not server.app.state.service.running)
