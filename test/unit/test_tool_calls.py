"""Calls of tools as models write them: a table of answers and what they are, however they are cut into tokens; grammars against llguidance itself."""
from __future__ import annotations
import itertools, json, random, re
from typing import Any, Iterable, NamedTuple
import pytest
from tinygrad.apps.reasoning import ANSWER, CLOSE, OPEN, REASONING, Piece
from tinygrad.apps.tokenizer import Stream
from tinygrad.apps.tool_calls import FORMS, CallArguments, CallBegins, CallEnds, Event, Family, Json, Parser, decode, typed

CUTS, MENDED_CUTS = 2000, 200

# ---- a vocabulary that has any piece of text as a token ----

class Toy:
  """A tokenizer of a family's marks and of whatever pieces a text is cut into. spelled: the marks are text, and no tokens."""
  def __init__(self, form:str, spelled:bool=False):
    self.form = next(f for f in FORMS if f.name == form)
    marks = [OPEN, CLOSE, *filter(None, [self.form.call, self.form.section]), *self.form.ends, *self.form.inner]
    self.table = [b"<|user|>", *(m.encode() for m in marks if not spelled)]
    self.special_tokens = {t.decode(): i for i, t in enumerate(self.table)}
    hidden = self.form.name == "Kimi"   # whose marks are control tokens
    self.control = frozenset(i for s, i in self.special_tokens.items() if s == "<|user|>" or hidden and s not in (OPEN, CLOSE))
    self.ids, self.marks = {t: i for i, t in enumerate(self.table)}, frozenset(self.table)
    self.find = re.compile(f"({'|'.join(map(re.escape, self.special_tokens))})".encode())
  def stream(self) -> Stream: return Stream(self)
  def decode(self, ids:list[int]) -> str: return b"".join(self.table[i] for i in ids).decode(errors="replace")

  def token(self, piece:bytes) -> int:
    if (i := self.ids.get(piece)) is None:
      i = self.ids[piece] = len(self.table)
      self.table.append(piece)
    return i

  def parts(self, text:str) -> list[bytes]:
    """A text's marks that are tokens, and what stands between them"""
    return [p for p in self.find.split(text.encode()) if p]
  def cut(self, parts:list[bytes], places:Iterable[int]=()) -> list[int]:
    """Tokens of these, cut further at some places of the whole, as far as they lie in text"""
    ids, at, places = [], 0, sorted(places)
    for part in parts:
      if part not in self.marks:
        while places and places[0] < at + len(part):
          if (n := places.pop(0) - at) > 0:
            ids.append(self.token(part[:n]))
            at, part = at + n, part[n:]
      ids.append(self.token(part))
      at += len(part)
    return ids

def joined(events:list[Event]) -> list[Event]:
  """Neighbours of one kind as one"""
  out: list[Event] = []
  for e in events:
    if out and isinstance(e, (Piece, CallArguments)) and type(out[-1]) is type(e) and out[-1][0] == e[0]: out[-1] = e._replace(text=out[-1].text + e.text)
    else: out.append(e)
  return out

def parse(toy:Toy, ids:list[int], tools:dict[str, Any], prompt:str="") -> list[Event]:
  p = Parser(toy, Family(toy.form), tools, toy.cut(toy.parts(prompt)))
  events = [e for i in ids for e in p.push(i)] + p.flush()
  assert p.calls == sum(isinstance(e, CallBegins) for e in events)
  return joined(events)

class Call(NamedTuple):
  name: str
  arguments: dict
  id: str|None = None

def parsed(events:list[Event]) -> list:
  """Pieces and calls in their order; asserts that a call's events stand together and that its arguments are one object"""
  out, left = [], list(events)
  while left:
    if isinstance(e := left.pop(0), Piece): out.append(tuple(e))
    else:
      arguments, end = left.pop(0), left.pop(0)
      index = sum(isinstance(c, Call) for c in out)
      assert isinstance(e, CallBegins) and isinstance(arguments, CallArguments) and isinstance(end, CallEnds)
      assert e.index == arguments.index == end.index == index
      value = json.loads(arguments.text, object_pairs_hook=pairs)
      assert isinstance(value, dict)
      out.append(Call(e.name, value, e.id))
  return out

def pairs(found:list[tuple[str, Any]]) -> dict[str, Any]:
  assert len(dict(found)) == len(found) or len(found) > 9, found
  return dict(found)

# ---- what models write, and what it is ----

def tool(required:str="", **properties:Any) -> dict:
  types = {k: {"type": v} if isinstance(v, str) else v for k, v in properties.items()}
  return {"type": "object", "properties": types, "required": required.split()}

TOOLS = {
  "clock": tool("city", city="string", offset="integer"),
  "clock_set": tool("hour", hour="integer", minute="integer"),
  "weigh": tool("thing", thing="string", grams="number", exact="boolean"),
  "note": tool("text", text="string", tags={"type": "array", "items": {"type": "string"}}, meta={"type": "object"}),
  "stop": {"type": "object", "properties": {}},
  "run": {},
  "mixed": tool("", maybe={"type": ["string", "null"]}, either={"anyOf": [{"type": "string"}, {"type": "integer"}]}, level={"enum": ["low", "high"]},
                free={}, ref={"$ref": "#/$defs/n"}) | {"$defs": {"n": {"type": "integer"}}},
}

class Case(NamedTuple):
  form: str
  said: str
  expected: list
  prompt: str = ""

def R(text:str) -> tuple[str, str]: return (REASONING, text)
def A(text:str) -> tuple[str, str]: return (ANSWER, text)

def call(name:str, **arguments:str) -> str:
  return f"<tool_call>{name}{''.join(f'<arg_key>{k}</arg_key><arg_value>{v}</arg_value>' for k, v in arguments.items())}</tool_call>"
CITY = "<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
def glm(said:str, *expected:Any, prompt:str="</think>") -> Case: return Case("GLM", said, list(expected), prompt)
def hermes(said:str, *expected:Any, prompt:str="") -> Case: return Case("hermes", said, list(expected), prompt)
def kimi(said:str, *expected:Any, prompt:str="") -> Case:
  for short, mark in (("<S>", "<|tool_calls_section_begin|>"), ("</S>", "<|tool_calls_section_end|>"), ("<C>", "<|tool_call_begin|>"),
                      ("</C>", "<|tool_call_end|>"), ("<A>", "<|tool_call_argument_begin|>")): said = said.replace(short, mark)
  return Case("Kimi", said, list(expected), prompt)
def deepseek(form:str, said:str, *expected:Any, prompt:str="") -> Case:
  for short, mark in (("<S>", "<｜tool▁calls▁begin｜>"), ("</S>", "<｜tool▁calls▁end｜>"), ("<C>", "<｜tool▁call▁begin｜>"),
                      ("</C>", "<｜tool▁call▁end｜>"), ("<sep>", "<｜tool▁sep｜>")): said = said.replace(short, mark)
  return Case(form, said, list(expected), prompt)
def r1(said:str, *expected:Any, prompt:str="") -> Case: return deepseek("DeepSeek-R1", said, *expected, prompt=prompt)
def v31(said:str, *expected:Any, prompt:str="") -> Case: return deepseek("DeepSeek-V3.1", said, *expected, prompt=prompt)

# the forms as they should be: what llama.cpp's tests know of them
CASES = {
  "glm: text": glm("Good morning!\nAnd you?", A("Good morning!\nAnd you?")),
  "glm: reasoning, text": glm("Let me\nsee</think>Good morning!\nAnd you?", R("Let me\nsee"), A("Good morning!\nAnd you?"), prompt="<think>"),
  "glm: a call": glm(call("clock_set", hour="1"), Call("clock_set", {"hour": 1})),
  "glm: reasoning, a call": glm("Let me\nsee</think>" + call("clock_set", hour="1"), R("Let me\nsee"), Call("clock_set", {"hour": 1}), prompt="<think>"),
  "glm: calls": glm(call("clock_set", hour="1") + call("clock_set", hour="1", minute="2"), Call("clock_set", {"hour": 1}),
                    Call("clock_set", {"hour": 1, "minute": 2})),
  "glm: no arguments": glm("I shall look.</think><tool_call>stop</tool_call>", R("I shall look."), Call("stop", {}), prompt="<think>"),
  "glm: optional arguments": glm("<tool_call>weigh</tool_call>", Call("weigh", {})),
  "glm: types": glm(
    "On it." + call("clock", offset="42", city="上海") + call("weigh", grams="2.5") + call("weigh", exact="true") +
    call("note", meta='{"source": "web", "options": {"strict": true}}', tags='["alpha", "测试"]') + call("run", rows='[{"id": 1}, {"id": 2}]') + call("run"),
    A("On it."), Call("clock", {"offset": 42, "city": "上海"}), Call("weigh", {"grams": 2.5}), Call("weigh", {"exact": True}),
    Call("note", {"meta": {"source": "web", "options": {"strict": True}}, "tags": ["alpha", "测试"]}), Call("run", {"rows": [{"id": 1}, {"id": 2}]}),
    Call("run", {})),
  "glm: lines": glm("<tool_call>clock_set\n<arg_key>hour</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n", Call("clock_set", {"hour": 1})),
  "glm: a line behind it": glm("Hm.\n</think>" + call("clock", city="Oslo") + "\n", R("Hm."), Call("clock", {"city": "Oslo"}), prompt="<think>"),
  "glm: continued text": glm("lo!\nAnd you?", A("lo!\nAnd you?"), prompt="<think>Let me see</think>Hel"),
  "hermes: text": hermes("Good morning!\nAnd you?", A("Good morning!\nAnd you?")),
  "hermes: a call": hermes('<tool_call>\n{"name": "clock_set", "arguments": {"hour": 1}}</tool_call>', Call("clock_set", {"hour": 1})),
  "hermes: lines": hermes('<tool_call>\n{"name": "clock_set", "arguments": {"hour": 1}}\n</tool_call>', Call("clock_set", {"hour": 1})),
  "hermes: text, a call": hermes('Good morning!\nAnd you?\n<tool_call>\n{"name": "clock_set", "arguments": {"hour": 1}}</tool_call>',
                                 A("Good morning!\nAnd you?"), Call("clock_set", {"hour": 1})),
  "hermes: reasoning, a call": hermes('Let me\nsee\n</think>\n\n<tool_call>\n{"name": "clock_set", "arguments": {"hour": 1}}\n</tool_call>',
                                      R("Let me\nsee"), Call("clock_set", {"hour": 1}), prompt="<think>\n"),
  "hermes: opened reasoning": hermes("<think>\nLet me\nsee\n</think>\n\nGood morning!", R("Let me\nsee"), A("Good morning!")),
  "hermes: calls": hermes('<tool_call>\n{"name": "clock_set", "arguments": {"hour": 1}}\n</tool_call>\n<tool_call>\n{"name": "clock_set", "arguments": '
                          '{"hour": 1, "minute": 2}}\n</tool_call>', Call("clock_set", {"hour": 1}), Call("clock_set", {"hour": 1, "minute": 2})),
  "hermes: half a key": hermes('<tool_call>\n{"name": "clock_set", "arguments": {"ho', Call("clock_set", {})),
  "r1: text": r1("</think>Good morning!\nAnd you?", A("Good morning!\nAnd you?"), prompt="<think>\n"),
  "r1: reasoning, text": r1("Let me\nsee</think>Good morning!", R("Let me\nsee"), A("Good morning!"), prompt="<think>\n"),
  "r1: a call": r1('</think><S><C>function<sep>clock_set\n```json\n{"hour": 1}```</C></S>', Call("clock_set", {"hour": 1}), prompt="<think>\n"),
  "r1: calls, in lines": r1('<S><C>function<sep>clock_set\n```json\n{\n  "hour": 1\n}\n```</C>\n<C>function<sep>clock\n```json\n{"city": "Rome"}\n```</C></S>',
                            Call("clock_set", {"hour": 1}), Call("clock", {"city": "Rome"})),
  "v3.1: a call": v31('<S><C>clock<sep>{"city": "Rome"}</C></S>', Call("clock", {"city": "Rome"}), prompt="</think>"),
  "v3.1: reasoning, a call": v31('Hm</think><S><C>clock<sep>{"city": "Rome"}</C></S>', R("Hm"), Call("clock", {"city": "Rome"}), prompt="<think>"),
  "v3.1: reasoning, text, calls": v31('Hm</think>So.<S><C>clock<sep>{"city": "Rome"}</C><C>weigh<sep>{"thing": "fig"}</C></S>', R("Hm"), A("So."),
                                      Call("clock", {"city": "Rome"}), Call("weigh", {"thing": "fig"}), prompt="<think>"),
  "v3.1: a line before the text": v31("Hm\n</think>\nSo.", R("Hm"), A("So."), prompt="<think>"),
  "v3.1: text": v31("So.", A("So."), prompt="</think>"),
  "kimi: text": kimi("Good morning!\nAnd you?", A("Good morning!\nAnd you?")),
  "kimi: a call": kimi('<S><C>functions.clock_set:0<A>{"hour": 1}</C></S>', Call("clock_set", {"hour": 1}, "functions.clock_set:0")),
  "kimi: reasoning, a call": kimi('<think>Which hour?</think><S><C>functions.clock_set:0<A>{"hour": 1}</C></S>', R("Which hour?"),
                                  Call("clock_set", {"hour": 1}, "functions.clock_set:0")),
  "kimi: text, a call": kimi('Good morning!\nAnd you?<S><C>functions.clock_set:0<A>{"hour": 1}</C></S>', A("Good morning!\nAnd you?"),
                             Call("clock_set", {"hour": 1}, "functions.clock_set:0")),
  "kimi: calls": kimi('<S><C>functions.clock_set:0<A>{"hour": 1}</C><C>functions.clock_set:1<A>{"hour": 1, "minute": 2}</C><C>functions.note:2<A>'
                      '{"text": "<p>hi</p>"}</C></S>', Call("clock_set", {"hour": 1}, "functions.clock_set:0"),
                      Call("clock_set", {"hour": 1, "minute": 2}, "functions.clock_set:1"), Call("note", {"text": "<p>hi</p>"}, "functions.note:2")),
  "kimi: lines of code": kimi('<S><C>functions.note:0<A>{"text": "def hi():\\n  print(\\"hi\\")\\n\\nhi()"}</C></S>',
                              Call("note", {"text": 'def hi():\n  print("hi")\n\nhi()'}, "functions.note:0")),
  "kimi: empty arguments": kimi("<S><C>functions.stop:0<A>{}</C></S>", Call("stop", {}, "functions.stop:0")),
  "kimi: half a call": kimi('<S><C>functions.clock_set:0<A>{"hour": ', Call("clock_set", {}, "functions.clock_set:0")),
  "kimi: calls in reasoning": kimi('<think>Two calls<S><C>functions.clock_set:0<A>{"hour": 1}</C><C>functions.note:1<A>{"text": "it\'s"}</C></S>',
                                   R("Two calls"), Call("clock_set", {"hour": 1}, "functions.clock_set:0"), Call("note", {"text": "it's"}, "functions.note:1")),
  "kimi: no section, no ends": kimi('<think>Two calls<C>functions.clock_set:0<A>{"hour": 1}<C>functions.note:1<A>{"text": "it\'s"}', R("Two calls"),
                                    Call("clock_set", {"hour": 1}, "functions.clock_set:0"), Call("note", {"text": "it's"}, "functions.note:1")),
  "kimi: a call alone": kimi('<C>functions.run:0<A>{"command": "ls -l", "cwd": "/home/me", "timeout": 10}',
                             Call("run", {"command": "ls -l", "cwd": "/home/me", "timeout": 10}, "functions.run:0")),
}
# what is wrong, and mended or text
MENDED = {
  "glm: no <arg_value>": glm(call("clock", city="Oslo").replace("<arg_value>", " "), Call("clock", {"city": "Oslo"})),
  "glm: no <arg_key>": glm(call("clock", city="Oslo", offset="2").replace("<arg_key>", ""), Call("clock", {"city": "Oslo", "offset": 2})),
  "glm: no </arg_key>": glm(call("clock", city="Oslo", offset="2").replace("</arg_key>", ""), Call("clock", {"city": "Oslo", "offset": 2})),
  "glm: no </arg_value>": glm(call("clock", city="Oslo", offset="2").replace("</arg_value>", ""), Call("clock", {"city": "Oslo", "offset": 2})),
  "glm: </arg_key> for the end": glm(f"<tool_call>clock{CITY}</arg_key>", Call("clock", {"city": "Oslo"})),
  "glm: </arg_key> for </arg_value>": glm(call("clock", city="Oslo").replace("</arg_value>", "</arg_key>"), Call("clock", {"city": "Oslo"})),
  "glm: </arg_key> twice": glm(call("clock", city="Oslo").replace("</arg_key>", "</arg_key></arg_key>"), Call("clock", {"city": "Oslo"})),
  "glm: <arg_value> twice": glm(call("clock", city="Oslo").replace("<arg_value>", "<arg_value><arg_value>"), Call("clock", {"city": "Oslo"})),
  "glm: stray marks behind it": glm(f"<tool_call>clock{CITY}</tool_call></tool_call>\n</arg_value></think>\nSo.", Call("clock", {"city": "Oslo"}), A("So.")),
  "glm: stray marks between": glm(f"<tool_call>clock{CITY}</arg_value></arg_key>, <arg_key>offset</arg_key><arg_value>2</arg_value></tool_call>",
                                  Call("clock", {"city": "Oslo", "offset": 2})),
  "glm: a key without a value": glm("<tool_call>clock<arg_key>offset</arg_key><arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>x</tool_call>",
                                    Call("clock", {"city": "Oslo"})),
  "glm: a key twice": glm(call("clock", city="Oslo").replace("</tool_call>", "<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"),
                          Call("clock", {"city": "Oslo"})),
  "glm: no end": glm(f"<tool_call>clock{CITY}\n<tool_call>stop</tool_call>So.", Call("clock", {"city": "Oslo"}), Call("stop", {}), A("So.")),
  "glm: no end, text": glm(f"<tool_call>clock{CITY}\nSo.", Call("clock", {"city": "Oslo"}), A("So.")),
  "glm: begun twice": glm("<tool_call>\n" + call("clock", city="Oslo"), Call("clock", {"city": "Oslo"})),
  "glm: in reasoning": glm("Let me see" + call("clock", city="Oslo") + "</think>So.", R("Let me see"), Call("clock", {"city": "Oslo"}), A("So."),
                           prompt="<think>"),
  "glm: cut in a string": glm("<tool_call>clock<arg_key>city</arg_key><arg_value>Os", Call("clock", {"city": "Os"})),
  "glm: cut in a key": glm(f"<tool_call>clock{CITY}<arg_key>off", Call("clock", {"city": "Oslo"})),
  "glm: cut in a list": glm('<tool_call>note<arg_key>tags</arg_key><arg_value>["a", "b', Call("note", {"tags": ["a", "b"]})),
  "glm: cut in a name": glm("So.\n<tool_call>clo", A("So.\n<tool_call>clo")),
  "glm: cut behind a name": glm("So.\n<tool_call>clock", A("So.\n<tool_call>clock")),
  "glm: cut in a mark": glm("So.\n<tool_call", A("So.\n<tool_call")),
  "glm: no such tool": glm("So. " + call("fly", to="Oslo") + "Well.", A("So. " + call("fly", to="Oslo") + "Well.")),
  "glm: no such tool, in reasoning": glm("Perhaps " + call("fly") + "?</think>No.", R("Perhaps " + call("fly") + "?"), A("No."), prompt="<think>"),
  "glm: no name": glm("<tool_call></tool_call>", A("<tool_call></tool_call>")),
  "glm: a name and more": glm("<tool_call>clock, please</tool_call>", A("<tool_call>clock, please</tool_call>")),
  "glm: other marks in text": glm("Write <arg_key>k</arg_key>.</tool_call>", A("Write <arg_key>k</arg_key>.</tool_call>")),
  "glm: strings": glm(call("note", text='  "a"\n\\n\t<b> é\x01 1'), Call("note", {"text": '  "a"\n\\n\t<b> é\x01 1'})),
  "glm: strings that look otherwise": glm(call("clock", city="5") + call("note", text="null") + call("weigh", thing='{"a": 1}'),
                                          Call("clock", {"city": "5"}), Call("note", {"text": "null"}), Call("weigh", {"thing": '{"a": 1}'})),
  "glm: an empty string": glm(call("clock", city=""), Call("clock", {"city": ""})),
  "glm: marks in a string": glm(call("note", text="a <tool_call> b"), Call("note", {"text": "a <tool_call> b"})),
  "glm: Python's literals": glm(call("weigh", exact="True") + call("run", a="None", b="{'x': [True]}") + call("note", meta="{'x': [True]}"),
                                Call("weigh", {"exact": True}), Call("run", {"a": None, "b": "{'x': [True]}"}), Call("note", {"meta": {"x": [True]}})),
  "glm: no JSON": glm(call("weigh", grams="much") + call("run", n="NaN", big="1e999", deep="[" * 5000), Call("weigh", {"grams": "much"}),
                      Call("run", {"n": "NaN", "big": "1e999", "deep": "[" * 5000})),
  "glm: encoded twice": glm(call("note", tags='"[\\"a\\"]"', meta='"{}"') + call("clock_set", hour='"7"'), Call("note", {"tags": ["a"], "meta": {}}),
                            Call("clock_set", {"hour": 7})),
  "glm: types by schema": glm(call("mixed", maybe="null", either="5", level="low", free="5", ref=" 7 ") + call("mixed", maybe="5", either="x", ref="[]"),
                              Call("mixed", {"maybe": None, "either": 5, "level": "low", "free": 5, "ref": 7}),
                              Call("mixed", {"maybe": "5", "either": "x", "ref": []})),
  "glm: keys that no schema has": glm(call("clock", town="5", **{"a b": "x"}), Call("clock", {"town": 5, "a b": "x"})),
  "glm: blanks": glm("\n\nSo. \n", A("\n\nSo. \n")),
  "glm: reasoning alone": glm("on and on\n", R("on and on\n"), prompt="<think>"),
  "glm: </think> again": glm("\n</think>\n\nSo.", A("So."), prompt="</think>"),
  "glm: half a character": glm("é\ufffd" + call("clock", city="Zürich"), A("é\ufffd"), Call("clock", {"city": "Zürich"})),
  "hermes: another order": hermes('<tool_call>{"arguments": {"hour": 1}, "name": "clock_set"}</tool_call>', Call("clock_set", {"hour": 1})),
  "hermes: more in it": hermes('<tool_call>{"id": 7, "name": "clock_set", "type": "function", "arguments": {"hour": 1}}</tool_call>'
                               '<tool_call>{"name": "stop", "id": "<a>", "arguments": {}}</tool_call>', Call("clock_set", {"hour": 1}), Call("stop", {})),
  "hermes: more behind it": hermes('<tool_call>{"name": "clock_set", "arguments": {"hour": 1}, "id": "</tool_call>"}</tool_call>So.',
                                   Call("clock_set", {"hour": 1}), A("So.")),
  "hermes: parameters": hermes('<tool_call>{"name": "clock_set", "parameters": {"hour": 1}}</tool_call>', Call("clock_set", {"hour": 1})),
  "hermes: no arguments": hermes('<tool_call>{"name": "stop"}</tool_call> <tool_call>{"name": "stop", "arguments": null}</tool_call>'
                                 '<tool_call>{"name": "stop", "arguments": ""}</tool_call>', Call("stop", {}), Call("stop", {}), Call("stop", {})),
  "hermes: encoded twice": hermes('<tool_call>{"name": "note", "arguments": "{\\"text\\": \\"\\\\u00e9\\"}"}</tool_call>', Call("note", {"text": "é"})),
  "hermes: in lines": hermes('<tool_call>\n{\n  "name": "note",\n  "arguments": {\n    "text": "a\\tb",\n    "tags": [ ]\n  }\n}\n</tool_call>',
                             Call("note", {"text": "a\tb", "tags": []})),
  "hermes: raw lines in a string": hermes('<tool_call>{"name": "note", "arguments": {"text": "a\n\tb \\x \\\' \\u12 \\ud83d\\ude00 \\ud83d!"}}</tool_call>',
                                          Call("note", {"text": "a\n\tb \\x ' \\u12 😀 \ufffd!"})),
  "hermes: Python": hermes("<tool_call>{'name': 'run', 'arguments': {'a': True, 'b': None, 'c': \"it's\", 'd': 'say \"no\"'}}</tool_call>",
                           Call("run", {"a": True, "b": None, "c": "it's", "d": 'say "no"'})),
  "hermes: commas": hermes('<tool_call>{"name": "run", "arguments": {"a": [1, 2,], "b" 3 "c": 4,}}</tool_call>', Call("run", {"a": [1, 2], "b": 3, "c": 4})),
  "hermes: bare words": hermes('<tool_call>{name: run, arguments: {a: Oslo, b: 01, c: }}</tool_call>', Call("run", {"a": "Oslo", "b": "01"})),
  "hermes: brackets": hermes('<tool_call>{"name": "run", "arguments": {"a": [1, {"b": 2], "c": 3}}</tool_call>', Call("run", {"a": [1, {"b": 2}], "c": 3})),
  "hermes: a bracket lacks": hermes('<tool_call>{"name": "run", "arguments": {"a": [1</tool_call>So.', Call("run", {"a": [1]}), A("So.")),
  "hermes: marks in a string": hermes('<tool_call>{"name": "note", "arguments": {"text": "</tool_call><tool_call>"}}</tool_call>',
                                      Call("note", {"text": "</tool_call><tool_call>"})),
  "hermes: a < in it": hermes('<tool_call>{"name": "run", "arguments": {"a": <b>, "c": 1}}</tool_call>', Call("run", {"a": "b>", "c": 1})),
  "hermes: no end": hermes('<tool_call>{"name": "stop", "arguments": {}}\n<tool_call>{"name": "stop", "arguments": {}}', Call("stop", {}), Call("stop", {})),
  "hermes: cut in a string": hermes('<tool_call>{"name": "note", "arguments": {"text": "a\\', Call("note", {"text": "a"})),
  "hermes: cut in a number": hermes('<tool_call>{"name": "run", "arguments": {"a": 12', Call("run", {"a": 12})),
  "hermes: cut in a literal": hermes('<tool_call>{"name": "run", "arguments": {"a": [tr', Call("run", {"a": []})),
  "hermes: cut before arguments": hermes('<tool_call>{"name": "run", "argu', Call("run", {})),
  "hermes: no such tool": hermes('So. <tool_call>\n{"name": "fly", "arguments": {"to": "</tool_call>"}}\n</tool_call> Well.',
                                 A('So. <tool_call>\n{"name": "fly", "arguments": {"to": "</tool_call>"}}\n</tool_call> Well.')),
  "hermes: no JSON": hermes("<tool_call>fly</tool_call>", A("<tool_call>fly</tool_call>")),
  "hermes: no name": hermes('<tool_call>{"arguments": {}}</tool_call>', A('<tool_call>{"arguments": {}}</tool_call>')),
  "hermes: nothing": hermes("<tool_call>\n</tool_call>", A("<tool_call>\n</tool_call>")),
  "hermes: in reasoning": hermes('Hm. <tool_call>{"name": "stop", "arguments": {}}</tool_call>\n</think>\nSo.', R("Hm."), Call("stop", {}), A("So."),
                                 prompt="<think>"),
  "hermes: deep": hermes('<tool_call>{"name": "stop", "arguments": {"a": ' + "[" * 300 + "1" + "]" * 300 + "}}</tool_call>",
                         Call("stop", {"a": json.loads("[" * 62 + "1" + "]" * 62)})),
  "r1: no arguments": r1("<S><C>function<sep>stop</C></S>", Call("stop", {})),
  "r1: no section": r1('So.\n<C>function<sep>clock\n```json\n{"city": "Rome"}\n```</C>', A("So."), Call("clock", {"city": "Rome"})),
  "r1: no fence": r1('<S><C>function<sep>clock\n{"city": "Rome"}</C></S>', Call("clock", {"city": "Rome"})),
  "r1: no such tool": r1("<S><C>function<sep>fly\n```json\n{}\n```</C></S>",
                         A("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>fly\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")),
  "r1: no calls": r1("<S>\nWell.", A("<｜tool▁calls▁begin｜>\nWell.")),
  "v3.1: no arguments": v31("<S><C>stop<sep></C><C>stop</C></S>", Call("stop", {}), Call("stop", {})),
  "v3.1: no separator": v31('<S><C>clock{"city": "Rome"}</C></S>', Call("clock", {"city": "Rome"})),
  "v3.1: cut": v31('<S><C>clock<sep>{"city": "Ro', Call("clock", {"city": "Ro"})),
  "kimi: no arguments": kimi("<S><C>functions.stop:0<A></C><C>functions.stop:1</C></S>", Call("stop", {}, "functions.stop:0"),
                             Call("stop", {}, "functions.stop:1")),
  "kimi: a number twice": kimi("<S><C>functions.stop:0<A>{}</C><C>functions.stop:0<A>{}</C></S>", Call("stop", {}, "functions.stop:0"), Call("stop", {})),
  "kimi: a name alone": kimi('<S><C>stop<A>{}</C><C>clock:1<A>{"city": "Rome"}</C></S>', Call("stop", {}), Call("clock", {"city": "Rome"})),
  "kimi: text behind it": kimi("<S><C>functions.stop:0<A>{}</C></S>\nSo.", Call("stop", {}, "functions.stop:0"), A("So.")),
}

@pytest.mark.parametrize("name", [*CASES, *MENDED])
def test_an_answer_however_it_is_cut(name:str):
  """Marks as tokens and as text; a token of each byte; random pieces"""
  case, cuts, rng = (CASES[name], CUTS, random.Random(name)) if name in CASES else (MENDED[name], MENDED_CUTS, random.Random(name))
  for spelled in (False, True):
    toy = Toy(case.form, spelled)
    parts, length = toy.parts(case.said), len(case.said.encode())
    whole = parse(toy, toy.cut(parts), TOOLS, case.prompt)
    assert parsed(whole) == case.expected, "marks are text" if spelled else "marks are tokens"
    assert parse(toy, toy.cut(parts, range(length)), TOOLS, case.prompt) == whole
    for _ in range(cuts // 2):
      ids = toy.cut(parts, [int(rng.random() * length) for _ in range(rng.choice((1, 2, 3, 5, 9)))])
      assert parse(toy, ids, TOOLS, case.prompt) == whole, [toy.table[i] for i in ids]
