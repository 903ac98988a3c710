"""What clients send, read: each field, each way to be wrong, and what the engine is asked for then. No server."""
from __future__ import annotations
import dataclasses, json, logging, math
from pathlib import Path
from typing import Any, Callable
import pytest
from serve_client import END, talking_voice
from templates import GLM
from tinygrad.apps.chat import Chat
from tinygrad.apps.engine.constraint import GrammarError, Vocabulary, constraint_of
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.serve import requests, wire
from tinygrad.apps.serve.requests import ApiError, ChatRequest, CompletionRequest, Job, chat_job, completion_job, decode
from tinygrad.apps.serve.settings import Settings
from tinygrad.apps.serve.text import Voice

VOICE = talking_voice(sampling=Sampling(temperature=.5, top_p=.9))
SETTINGS = Settings(Path("none"))
CAPACITY = 1000
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
def named(name: str) -> dict[str, Any]: return {"type": "function", "function": {"name": name}}

def chat(settings: Settings = SETTINGS, **fields: Any) -> Job:
  body = json.dumps({"messages": [USER], **fields}).encode()
  return chat_job(decode(body, ChatRequest), VOICE, settings, CAPACITY)
def complete(prompt: Any = "hi", **fields: Any) -> Job:
  return completion_job(decode(json.dumps({"prompt": prompt, **fields}).encode(), CompletionRequest), VOICE, SETTINGS, CAPACITY)
def text(job: Job) -> str: return VOICE.tokenizer.decode(job.prompts[0])
def messages(*more: dict[str, Any], **fields: Any) -> str: return text(chat(messages=[USER, *more], **fields))
def fails(call: Any, *args: Any, **kw: Any) -> ApiError:
  with pytest.raises(ApiError) as e: call(*args, **kw)
  assert "\n" not in e.value.message and e.value.message
  return e.value

# ---- bodies ----

@pytest.mark.parametrize("body,param,words", [
  (b"", None, "expected JSON, found nothing"), (b" \n", None, "found nothing"), (b"{", None, "expected JSON"),
  (b"[1]", None, "expected an object, found a list"),
  (b"\"x\"", None, "found text"), (b"{} x", None, "trailing"), (b"{}", "messages", "expected a value, found none"),
  (b'{"messages": 5}', "messages", "expected a list, found a whole number"), (b'{"model": "\xff"}', None, "expected JSON"),
  (b'{"messages": [{"content": ""}]}', "messages[0].role", "expected a value, found none"),
  (b'{"messages": [{"role": "cat"}]}', "messages[0].role", "'cat'"), (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content",
   "expected text or a list, found a whole number"), (b'{"messages": [], "n": 1.5}', "n", "expected a whole number, found a number"),
  (b'{"messages": [], "n": true}', "n", "found true or false"), (b'{"messages": [], "temperature": NaN}', None, "expected JSON"),
  (b'{"messages": [], "temperature": 1e999}', "temperature", "out of range"), (b'{"messages": [], "stop": [1]}', "stop[0]", "expected text"),
  (b'{"messages": [], "tools": [{"type": "function"}]}', "tools[0].function", "found none"),
  (b'{"messages": [], "tool_choice": "maybe"}', "tool_choice", "'maybe'"),
  (b'{"messages": [], "logit_bias": {"1": "x"}}', "logit_bias[...]", "a number"),
  (b'{"messages": [], "chat_template_kwargs": {"x": ' + b"[" * 100000 + b"]" * 100000 + b"}}", None, "less deep"),
  (b'{"x": ' + b"[" * 100000 + b"]" * 100000 + b"}", None, "less deep")])
def test_broken(body: bytes, param: str|None, words: str):
  e = fails(decode, body, ChatRequest)
  assert e.status == 400 and e.param == param and words in e.message

def test_null_is_nothing():
  nothing = {name: None for name in ChatRequest.__struct_encode_fields__ if name != "messages"} | {"mirostat": None, "functions": None}
  assert dataclasses.replace(chat(**nothing), sampling={}) == dataclasses.replace(chat(), sampling={})

@pytest.mark.parametrize("field,nothing,something", [
  ("functions", [], [{"name": "f"}]), ("mirostat", 0, 2), ("modalities", ["text"], ["text", "audio"]), ("best_of", 1, 3), ("typical_p", 1.0, .5),
  ("web_search_options", None, {}), ("chat_template", None, "{{ x }}"), ("use_beam_search", False, True), ("top_n_sigma", -1, 2.5)])
def test_what_there_is_not(field: str, nothing: Any, something: Any):
  chat(**{field: nothing})
  e = fails(chat, **{field: something})
  assert e.status == 400 and e.param == field and e.code == "unsupported_parameter" and field in e.message

def test_false_is_no_number():
  assert fails(chat, mirostat=False).param == "mirostat" and fails(chat, use_beam_search=0).param == "use_beam_search"

def test_unknown_fields_are_said_once(caplog, monkeypatch):
  monkeypatch.setattr(requests, "_warned", set())
  monkeypatch.setattr(requests.log, "propagate", True)
  with caplog.at_level(logging.INFO, "tinygrad.serve"):
    for _ in range(2): chat(wishes=3, user="me", metadata={})
  assert [json.loads(r.message) for r in caplog.records] == [{"unknown_field": "wishes", "of": "ChatRequest"}]

# ---- conversations ----

def test_prompt():
  assert messages() == "[gMASK]<sop><|user|>hi<|assistant|><think>"
  assert text(chat(messages=[{"role": "developer", "content": "be"}, USER])) == "[gMASK]<sop><|system|>be<|user|>hi<|assistant|><think>"
  parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
  assert messages({"role": "user", "content": parts}).endswith("<|user|>ab<|assistant|><think>")
  assert messages(add_generation_prompt=False) == "[gMASK]<sop><|user|>hi"

@pytest.mark.parametrize("fields", [{"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}},
                                    {"chat_template_kwargs": {"enable_thinking": False}},
                                    {"reasoning_effort": "none", "thinking": {"type": "disabled"}}])
def test_without_thinking(fields: dict[str, Any]): assert messages(**fields) == "[gMASK]<sop><|user|>hi<|assistant|></think>"

def test_what_is_said_in_the_template_decides():
  assert messages(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}).endswith("<think>")
  assert messages(reasoning_effort="high").endswith("<think>")

@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_past_reasoning(name: str):
  past = {"role": "assistant", "content": "four", name: "two and two"}
  assert "two and two" not in messages(past, USER)
  for fields in ({"chat_template_kwargs": {"clear_thinking": False}}, {"thinking": {"clear_thinking": False}}):
    assert "<think>two and two</think>four" in messages(past, USER, **fields)

@pytest.mark.parametrize("arguments,shown", [('{"a": 5}', "<arg_key>a</arg_key><arg_value>5</arg_value>"),
                                             ({"a": 5}, "<arg_key>a</arg_key><arg_value>5"),
                                             ("", ""), (None, ""), ('{"a": "x"}', "<arg_key>a</arg_key><arg_value>x</arg_value>")])
def test_past_calls(arguments: Any, shown: str):
  call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
  result = {"role": "tool", "tool_call_id": "call_1", "content": "7"}
  said = messages({"role": "assistant", "content": None, "tool_calls": [call]}, result, tools=[TOOL])
  assert f"<tool_call>add{shown}" in said and "<|observation|><tool_response>7</tool_response>" in said and '"name": "add"' in said

@pytest.mark.parametrize("arguments", ["{", "5", "[1]", "null", "[" * 5000])
def test_past_calls_that_are_none(arguments: str):
  e = fails(messages, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]})
  assert e.param == "messages" and "message 1: tool call 0: arguments: expected a JSON object" in e.message

@pytest.mark.parametrize("part,param", [({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "type"), ({"type": "text"}, "text"),
                                        ({"type": "refusal"}, "refusal"), ({"type": "input_audio"}, "type"), ({"type": "file"}, "type")])
def test_parts_that_are_no_text(part: dict[str, Any], param: str):
  e = fails(messages, {"role": "user", "content": [{"type": "text", "text": "a"}, part]})
  assert e.status == 400 and e.param == f"messages[1].content[1].{param}"

@pytest.mark.parametrize("fields,param", [
  ({"messages": []}, "messages"), ({"tool_choice": "required"}, "tool_choice"),
  ({"tools": [TOOL], "tool_choice": named("sub")}, "tool_choice.function.name"),
  ({"tools": [TOOL, TOOL]}, "tools[1].function.name"), ({"tools": [named(" ")]}, "tools[0].function.name"),
  ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking"),
  ({"chat_template_kwargs": {"clear_thinking": 0}}, "chat_template_kwargs.clear_thinking"),
  ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"), ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
  ({"continue_final_message": True}, "continue_final_message"), ({"top_logprobs": 3}, "top_logprobs"),
  ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"n": 0}, "n"), ({"n": 129}, "n"), ({"stop": ""}, "stop"),
  ({"stop": ["a"] * 65}, "stop"),
  ({"max_tokens": 0}, "max_tokens"), ({"max_completion_tokens": -5}, "max_completion_tokens"), ({"temperature": -1}, "temperature"),
  ({"top_p": 1.5}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"), ({"presence_penalty": 3}, "presence_penalty"),
  ({"repetition_penalty": 0}, "repeat_penalty"), ({"seed": 1 << 64}, "seed"), ({"logit_bias": {"x": 1}}, "logit_bias"),
  ({"logit_bias": {"99999": 1}}, "logit_bias"), ({"logit_bias": {"5": 1e9}}, "logit_bias"), ({"logit_bias": [[5, True]]}, "logit_bias"),
  ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"min_tokens": 5}, "min_tokens"),
  ({"messages": [USER, {"role": "assistant", "content": "x" * 100001}]}, "messages")])
def test_values_that_are_wrong(fields: dict[str, Any], param: str):
  e = fails(chat, **fields)
  assert e.status == 400 and e.param == param

def test_continued():
  past = {"role": "assistant", "content": "It is <|user|> a</think>"}
  job = chat(messages=[USER, past], continue_final_message=True)
  assert text(job) == "[gMASK]<sop><|user|>hi<|assistant|><think></think>It is <|user|> a</think>"
  assert job.prompts[0].count(257) == 1 and job.prompts[0].count(THINK) == 2   # in an answer a control token's name is text, and markup is markup
  both = {"role": "assistant", "content": "It", "reasoning_content": "hm"}
  assert text(chat(messages=[USER, both], continue_final_message=True)).endswith("<|assistant|><think>hm</think>It")
  thought = {"role": "assistant", "content": "", "reasoning_content": "hm"}
  assert text(chat(messages=[USER, thought], continue_final_message=True)).endswith("<|assistant|><think>hm")
  off = dict(continue_final_message=True, reasoning_effort="none")
  assert text(chat(messages=[USER, {"role": "assistant", "content": "It"}], **off)).endswith("<|assistant|></think>It")

def test_tools_that_are_not_to_be_called():
  assert "add" in messages(tools=[TOOL]) and "add" not in messages(tools=[TOOL], tool_choice="none")
  assert chat(tools=[TOOL]).tools == {"add": TOOL["function"]["parameters"]} and chat(tools=[TOOL], tool_choice="none").tools == {}
  assert chat(tools=[named("now")]).tools == {"now": {}}
  assert not chat(tools=[TOOL], parallel_tool_calls=False).parallel and chat(tools=[TOOL]).parallel

# ---- what is asked of the engine ----

def test_sampling():
  plain = chat().sampling
  assert plain.pop("seed") >= 0 and plain == {"temperature": .5, "top_p": .9}
  fields = dict(temperature=.1, top_p=.2, top_k=3, min_p=.4, presence_penalty=.5, frequency_penalty=.6, repeat_penalty=1.7, seed=8)
  assert chat(**fields).sampling == fields and complete(**fields).sampling == fields
  assert chat(temperature=0, top_p=1, top_k=-1, repetition_penalty=1.2, seed=9).sampling == {"repeat_penalty": 1.2, "seed": 9}
  assert chat(seed=(1 << 32) + 5).sampling["seed"] == 5 and len({chat(seed=-1).sampling["seed"] for _ in range(5)}) > 1

@pytest.mark.parametrize("bias,want", [({"5": -100, "7": 2}, {5: -100, 7: 2}), ([[5, 1.5], [7, False]], {5: 1.5, 7: -math.inf}),
                                       ([["ab", False]], {97: -math.inf, 98: -math.inf}), ([], None), ({}, None)])
def test_bias(bias: Any, want: Any): assert chat(logit_bias=bias).sampling.get("bias") == want

def test_limits():
  assert chat().limit is None and chat(max_tokens=5).limit == 5 and chat(max_tokens=5, max_completion_tokens=6).limit == 6
  assert chat(n_predict=7).limit == 7 and chat(n_predict=-1).limit is None and complete(max_tokens=0).limit == 0
  settings = dataclasses.replace(SETTINGS, default_max_tokens=10, max_tokens_cap=20)
  assert [chat(settings, **f).limit for f in ({}, {"max_tokens": 15}, {"max_tokens": 50}, {"n_predict": -1})] == [10, 15, 20, 10]
  assert chat(dataclasses.replace(SETTINGS, max_tokens_cap=20)).limit == 20

def test_stops():
  assert chat(stop="a").stops == ("a",) and chat(stop=["a", "b"]).stops == ("a", "b") and chat().stops == ()
  assert chat().stop_ids == VOICE.tokenizer.stop_ids and END in chat().stop_ids
  assert chat(stop_token_ids=[7]).stop_ids == VOICE.tokenizer.stop_ids | {7} and chat(ignore_eos=True, min_tokens=5).stop_ids == frozenset()

def test_logprobs():
  assert chat().logprobs is None and chat(logprobs=False).logprobs is None and chat(logprobs=True).logprobs == 0
  assert chat(logprobs=True, top_logprobs=20).logprobs == 20 and complete(logprobs=0).logprobs == 0 and complete(logprobs=5).logprobs == 5
  assert fails(complete, logprobs=21).param == "logprobs" and fails(complete, logprobs=1, echo=True).param == "echo"

def test_too_long():
  for call in (lambda: chat(messages=[{"role": "user", "content": "x" * 995}]), lambda: complete("x" * 1000), lambda: complete([65] * 1000)):
    e = fails(call)
    assert e.status == 400 and e.code == "context_length_exceeded" and e.numbers["n_ctx"] == CAPACITY <= e.numbers["n_prompt_tokens"] + 1
    assert "maximum context length is 1000 tokens" in e.message and str(e.numbers["n_prompt_tokens"]) in e.message
  assert len(complete("x" * 999).prompts[0]) == 999

def test_what_must_be_too_long_is_not_read(monkeypatch):
  monkeypatch.setattr(type(VOICE.tokenizer), "encode", lambda *a, **kw: pytest.fail("it was read"))
  least = CAPACITY * VOICE.longest
  for call in (lambda: chat(messages=[{"role": "user", "content": "x" * least}]), lambda: complete("x" * least)):
    assert "at least 1000 tokens" in fails(call).message

@pytest.mark.parametrize("prompt,want", [("ab", [[97, 98]]), (["a", "b"], [[97], [98]]), ([97, 98], [[97, 98]]), ([[97], [98, 99]], [[97], [98, 99]]),
                                         (["a", [98]], [[97], [98]]), ("<|user|>a", [[257, 97]])])
def test_prompts(prompt: Any, want: list[list[int]]): assert complete(prompt).prompts == want and not complete(prompt).chat

@pytest.mark.parametrize("prompt,param", [
  ("", "prompt"), ([], "prompt"), ([""], "prompt[0]"), ([[]], "prompt[0]"), (["a", 5], "prompt[1]"), ([-1], "prompt"), ([97, 5000], "prompt"),
  ([[97], [5000]], "prompt[1]"), (["a"] * 129, "prompt"), (None, "prompt"), ({}, "prompt")])
def test_prompts_that_are_none(prompt: Any, param: str): assert fails(complete, prompt).param == param

def test_answers_in_all(): assert complete(["a"] * 64, n=2).n == 2 and fails(complete, ["a"] * 64, n=3).param == "n"

# ---- grammars ----

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
THINK = VOICE.tokenizer.special_tokens["</think>"]

@pytest.mark.parametrize("fields,kind,source", [
  ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
  ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
  ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}, "json_schema", SCHEMA),
  ({"json_schema": SCHEMA}, "json_schema", SCHEMA), ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
  ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA), ({"guided_regex": "[0-9]+"}, "regex", "[0-9]+"),
  ({"guided_choice": ["yes", 'n"o']}, "lark", 'start: "yes" | "n\\"o"'), ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"')])
def test_grammars(fields: dict[str, Any], kind: str, source: Any):
  for off, after in ((False, THINK), (True, None)):
    grammar = chat(**fields, **({"reasoning_effort": "none"} if off else {})).grammar
    assert isinstance(grammar, wire.Grammar) and grammar.kind == kind and grammar.after == after
    assert (json.loads(grammar.source) if kind == "json_schema" else grammar.source.strip()) == source
  assert complete(**fields).grammar == wire.Grammar(kind, grammar.source)

def test_llama_servers_grammars():
  grammar = chat(grammar='root ::= "yes" | "no"').grammar
  assert grammar is not None and grammar.kind == "lark" and "start" in grammar.source

def test_no_grammar(): assert chat(response_format={"type": "text"}).grammar is None

@pytest.mark.parametrize("fields,param,words", [
  ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "a schema"),
  ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
  ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}}, "response_format", "objekt"),
  ({"guided_regex": "("}, "guided_regex", "unclosed"), ({"guided_grammar": "start: foo"}, "guided_grammar", "foo"),
  ({"grammar": "root ::= ("}, "grammar", ""), ({"guided_regex": "a", "grammar": "b"}, "guided_regex", "grammar"),
  ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json", "file"), ({"guided_json": "{"}, "guided_json", "EOF"),
  ({"guided_json": {"enum": ["x" * 100] * 3000}}, "guided_json", "at most 262144 characters")])
def test_grammars_that_are_none(fields: dict[str, Any], param: str, words: str):
  e = fails(chat, **fields)
  assert e.status == 400 and e.param == param and words in e.message

def test_a_grammar_that_is_too_long_is_not_read(monkeypatch):
  monkeypatch.setattr(requests, "check", lambda *_: pytest.fail("it was read"))
  for tools in ([], [TOOL]): assert "at most 262144 characters" in fails(chat, tools=tools, guided_json={"enum": ["x" * 100] * 3000}).message

def test_without_llguidance(monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
  monkeypatch.setattr(requests, "find_spec", lambda name: None)
  for fields in ({"response_format": {"type": "json_object"}}, {"grammar": 'root ::= "a"'}):
    e = fails(chat, **fields)
    assert e.code == "unsupported_parameter" and "pip install" in e.message and e.param == list(fields)[0]

def test_errors_have_two_forms():
  e = ApiError(429, "later", "n", "queue_full", {"n_ctx": 5})
  assert e.openai() == {"error": {"message": "later", "type": "rate_limit_error", "param": "n", "code": "queue_full", "n_ctx": 5}}
  assert e.anthropic() == {"type": "error", "error": {"type": "rate_limit_error", "message": "later"}}
  assert ApiError(400, "x").openai()["error"]["type"] == ApiError(400, "x").anthropic()["error"]["type"] == "invalid_request_error"

STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
@pytest.mark.parametrize("fields,held", [({}, False), ({"tool_choice": "auto"}, False), ({"tool_choice": "none"}, False),
                                         ({"tool_choice": "required"}, True), ({"tool_choice": named("add")}, True), ({"tools": [STRICT]}, True)])
def test_calls_that_are_held_to_a_grammar(fields: dict[str, Any], held: bool):
  for off, after in ((False, THINK), (True, None)):
    grammar = chat(**{"tools": [TOOL, {**named("now")}], **fields}, **({"reasoning_effort": "none"} if off else {})).grammar
    assert (grammar is not None) == held
    if grammar is not None: assert (grammar.kind, grammar.after) == ("lark", after) and "add" in grammar.source
    if fields.get("tool_choice") == named("add"): assert grammar is not None and "now" not in grammar.source

def test_a_schema_that_no_call_can_be_held_to():
  strange = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"type": "string", "pattern": "x"}}}}}
  assert fails(chat, tools=[strange]).param == "tools"

def test_a_form_or_calls():
  form = {"response_format": {"type": "json_object"}}
  for tool in (TOOL, STRICT):
    grammar = chat(tools=[tool], **form).grammar
    assert grammar is not None and grammar.kind == "lark" and grammar.after == THINK and "answer | calls" in grammar.source
    both, lean = follows(grammar), follows(chat(tools=[tool], tool_choice="required", **form).grammar)
    call = "<tool_call>add<arg_key>a</arg_key><arg_value>5</arg_value></tool_call>"
    assert (both('{"x": 1}'), both(call), both("text")) == (True, True, False) and (lean('{"x": 1}'), lean(call)) == (False, True)
  assert chat(tools=[TOOL], tool_choice="none", **form).grammar == chat(**form).grammar
  assert fails(chat, tools=[TOOL], guided_choice=["a"]).param == "guided_choice"

def follows(grammar: wire.Grammar|None) -> Callable[[str], bool]:
  """Whether an answer is as the grammar has it"""
  assert grammar is not None
  t = VOICE.tokenizer
  vocabulary = Vocabulary(t.table, t.special_tokens.values(), [END], t.encode_bytes, t.n_vocab)
  def judge(text: str) -> bool:
    constraint = constraint_of(grammar.kind, grammar.source, None, vocabulary)
    try:
      for token in [*t.encode(text, special=True), END]:
        assert constraint.mask()[token // 32] >> token % 32 & 1
        constraint.accept(token)
    except (AssertionError, GrammarError): return False
    return True
  return judge

GOOD = {'"a"': '{"a": 5}', r"/a\/b\/c/": "a/b/c", "%json {": "[1, 2]"}
OPENS = Voice(VOICE.tokenizer, Chat("talker", GLM.replace("else '<think>'", "else ''"), VOICE.tokenizer), template="<think>")
@pytest.mark.parametrize("fields,shown", [({"guided_json": SCHEMA}, '"a"'), ({"guided_regex": r"a/b\/c"}, r"/a\/b\/c/"),
                                          ({"guided_json": {}}, "%json {")])
def test_grammars_behind_reasoning_that_the_model_opens(fields: dict[str, Any], shown: str):
  think = VOICE.tokenizer.special_tokens["<think>"]
  for off in (False, True):
    extra = {"reasoning_effort": "none"} if off else {}
    job = chat_job(decode(json.dumps({"messages": [USER], **fields, **extra}).encode(), ChatRequest), OPENS, SETTINGS, CAPACITY)
    assert job.grammar is not None and job.grammar.after is None and (job.grammar.kind != "lark") == off
    for text, may in ((GOOD[shown], True), ("nothing", False), (f"<think>hm</think>\n{GOOD[shown]}", not off), ("<think>hm</think>no", False)):
      assert follows(job.grammar)(text) == may
    if not off: assert f"(<[{think}]> TEXT <[{THINK}]>)? GAP? answer" in job.grammar.source and shown in job.grammar.source
