"""All of the server: the built-in model in its engine's process, asked by its clients."""
from __future__ import annotations
import json
from typing import Any, Iterator
import anthropic, openai, pytest
from serve_client import Server, until
from tinygrad.apps.models import BUILT_IN
from tinygrad.apps.serve import wire
from tinygrad.apps.serve.link import READY, Link
from tinygrad.apps.serve.settings import Settings

ASK: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "What is a list?"}]}

@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
  s = Server(Link(wire.Load(str(BUILT_IN), max_context=256, cache_tokens=1024)), Settings(BUILT_IN, alias="tiny"))
  try:
    until(lambda: s.app.state.service.state == READY, 60)
    yield s
  finally: s.stop()
@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI: return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)

def test_chat(server: Server, client: openai.OpenAI):
  whole = client.chat.completions.create(**ASK, max_tokens=20)
  text = whole.choices[0].message.content
  assert text.startswith("A list is ") and whole.choices[0].finish_reason == "length" and whole.model == "tiny"
  assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (10, 20)
  chunks = list(client.chat.completions.create(**ASK, max_tokens=20, stream=True, stream_options={"include_usage": True}))
  assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text
  timings = chunks[-1].model_extra["timings"]
  assert timings["predicted_n"] == 20 and timings["predicted_per_second"] > 0 and timings["prompt_ms"] > 0
  assert timings["cache_n"] + timings["prompt_n"] == 10 and timings["cache_n"] == chunks[-1].usage.prompt_tokens_details.cached_tokens
  ends = client.chat.completions.create(**ASK, stop="sequence").choices[0]
  assert ends.finish_reason == "stop" and "sequence" not in ends.message.content and text.startswith(ends.message.content)

def test_messages(server: Server):
  c = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)
  asked: dict[str, Any] = {"model": "any", "messages": ASK["messages"]}
  m = c.messages.create(max_tokens=100, **asked)
  assert m.stop_reason == "end_turn" and m.content[0].text.startswith("A list is ")
  assert c.messages.count_tokens(**asked).input_tokens == m.usage.input_tokens + m.usage.cache_read_input_tokens == 10
  with c.messages.stream(max_tokens=100, thinking={"type": "enabled", "budget_tokens": 1024}, **asked) as stream: m = stream.get_final_message()
  assert [b.type for b in m.content] == ["thinking", "text"] and 1 < m.usage.output_tokens_details.thinking_tokens < m.usage.output_tokens
  with pytest.raises(anthropic.BadRequestError, match="tools: "):
    c.messages.create(max_tokens=9, tools=[{"name": "f", "input_schema": {"type": "object"}}], **asked)

def test_responses(client: openai.OpenAI):
  r = client.responses.create(model="any", input="What is a list?", max_output_tokens=5)
  assert r.status == "incomplete" and r.output_text.startswith("A list") and r.usage.output_tokens == 5
  history: list[Any] = [{"role": "user", "content": "What is a list?"}, *r.output, {"role": "user", "content": "What is a set?"}]
  with client.responses.stream(model="any", input=history) as stream: r = stream.get_final_response()
  assert r.status == "completed" and r.output_text and r.usage.input_tokens > 15

def test_schemas_of_many_properties(client: openai.OpenAI):
  def ask(properties: int) -> str:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(properties)}, "additionalProperties": False}
    held = {"type": "json_schema", "json_schema": {"name": "many", "schema": schema}}
    return client.chat.completions.create(**ASK, max_tokens=3, response_format=held).choices[0].message.content   # type: ignore[call-overload]
  assert ask(700).startswith("{")
  with pytest.raises(openai.BadRequestError, match="max is 10000") as e: ask(3000)
  assert e.value.code == "invalid_grammar"
  assert ask(1).startswith("{")

def test_probabilities(client: openai.OpenAI):
  choice = client.chat.completions.create(**ASK, max_tokens=3, logprobs=True, top_logprobs=3).choices[0]
  assert "".join(c.token for c in choice.logprobs.content) == choice.message.content
  for c in choice.logprobs.content:
    assert c.logprob == c.top_logprobs[0].logprob <= 0 and len(c.top_logprobs) == 3 and c.token == c.top_logprobs[0].token

def test_json(client: openai.OpenAI):
  schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "maximum": 99}},
            "required": ["name", "size"], "additionalProperties": False}
  form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
  choice = client.chat.completions.create(**ASK, response_format=form, max_tokens=100).choices[0]
  found = json.loads(choice.message.content)
  assert set(found) == {"name", "size"} and len(found["name"]) <= 8 and choice.finish_reason == "stop"
  choice = client.chat.completions.create(**ASK, extra_body={"guided_choice": ["yes", "no"]}).choices[0]
  assert choice.message.content in ("yes", "no") and choice.finish_reason == "stop"

def test_completions(client: openai.OpenAI):
  whole = client.completions.create(model="", prompt="The for statement is", max_tokens=4, echo=True)
  assert whole.choices[0].text.startswith("The for statement is ") and whole.usage.completion_tokens == 4
  nothing = client.completions.create(model="", prompt="The for statement", max_tokens=0, echo=True)
  assert (nothing.choices[0].text, nothing.usage.completion_tokens) == ("The for statement", 0)
  on = client.completions.create(model="", prompt="The", max_tokens=50, extra_body={"ignore_eos": True, "min_tokens": 50})
  assert on.usage.completion_tokens == 50

def test_bans(client: openai.OpenAI):
  first = client.chat.completions.create(**ASK, max_tokens=1).choices[0].message.content
  for bias in ([[first, False]], [[first, -100]]):
    assert client.chat.completions.create(**ASK, max_tokens=1, extra_body={"logit_bias": bias}).choices[0].message.content != first

def test_the_end_of_the_context(client: openai.OpenAI):
  with pytest.raises(openai.BadRequestError) as e: client.completions.create(model="", prompt="list " * 300)
  assert e.value.body["n_ctx"] == 256 and e.value.code == "context_length_exceeded"
  whole = client.completions.create(model="", prompt="The", extra_body={"ignore_eos": True})
  assert whole.usage.total_tokens == 256 and whole.choices[0].finish_reason == "length"

def test_cancelled(server: Server, client: openai.OpenAI):
  stream = client.completions.create(model="", prompt="The", stream=True, extra_body={"ignore_eos": True})
  next(iter(stream))
  stream.close()
  until(lambda: not server.link.handles and not server.link.gauges.running)
  assert server.ask("/slots")[1][0]["is_processing"] is False
