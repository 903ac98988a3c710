"""Calls of tools as models write them: a table of answers and what they are, however they are cut into tokens; grammars against llguidance itself."""
from __future__ import annotations
import copy, json, random, re
from typing import Any, Iterable, NamedTuple
import pytest
import templates
from tinygrad.apps.chat import MessageError
from tinygrad.apps.reasoning import ANSWER, CLOSE, OPEN, REASONING, Piece
from tinygrad.apps.template import Template
from tinygrad.apps.tokenizer import Stream
from tinygrad.apps.tool_calls import (ANY, FORMS, TYPES, CallArguments, CallBegins, CallEnds, Event, Family, Json, Parser, call_grammar, family_of,
                                      kinds, tools_in_history)

CUTS, MENDED_CUTS = 600, 200

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
    last = out[-1] if out else None
    if isinstance(e, (Piece, CallArguments)) and type(last) is type(e) and last[0] == e[0]: out[-1] = e._replace(text=last.text + e.text)
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
      value = json.loads(arguments.text)
      assert isinstance(value, dict)
      out.append(Call(e.name, value, e.id))
  return out

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

C = Call
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
  "glm: a call": glm(call("clock_set", hour="1"), C("clock_set", {"hour": 1})),
  "glm: reasoning, a call": glm("Let me\nsee</think>" + call("clock_set", hour="1"), R("Let me\nsee"), C("clock_set", {"hour": 1}), prompt="<think>"),
  "glm: calls": glm(call("clock_set", hour="1") + call("clock_set", hour="1", minute="2"), C("clock_set", {"hour": 1}),
                    C("clock_set", {"hour": 1, "minute": 2})),
  "glm: no arguments": glm("I shall look.</think><tool_call>stop</tool_call>", R("I shall look."), C("stop", {}), prompt="<think>"),
  "glm: optional arguments": glm("<tool_call>weigh</tool_call>", C("weigh", {})),
  "glm: types": glm(
    "On it." + call("clock", offset="42", city="上海") + call("weigh", grams="2.5") + call("weigh", exact="true") +
    call("note", meta='{"source": "web", "options": {"strict": true}}', tags='["alpha", "测试"]') + call("run", rows='[{"id": 1}, {"id": 2}]') +
    call("run"),
    A("On it."), C("clock", {"offset": 42, "city": "上海"}), C("weigh", {"grams": 2.5}), C("weigh", {"exact": True}),
    C("note", {"meta": {"source": "web", "options": {"strict": True}}, "tags": ["alpha", "测试"]}), C("run", {"rows": [{"id": 1}, {"id": 2}]}),
    C("run", {})),
  "glm: lines": glm("<tool_call>clock_set\n<arg_key>hour</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n", C("clock_set", {"hour": 1})),
  "glm: a line behind it": glm("Hm.\n</think>" + call("clock", city="Oslo") + "\n", R("Hm."), C("clock", {"city": "Oslo"}), prompt="<think>"),
  "glm: continued text": glm("lo!\nAnd you?", A("lo!\nAnd you?"), prompt="<think>Let me see</think>Hel"),
  "hermes: text": hermes("Good morning!\nAnd you?", A("Good morning!\nAnd you?")),
  "hermes: a call": hermes('<tool_call>\n{"name": "clock_set", "arguments": {"hour": 1}}</tool_call>', C("clock_set", {"hour": 1})),
  "hermes: lines": hermes('<tool_call>\n{"name": "clock_set", "arguments": {"hour": 1}}\n</tool_call>', C("clock_set", {"hour": 1})),
  "hermes: text, a call": hermes('Good morning!\nAnd you?\n<tool_call>\n{"name": "clock_set", "arguments": {"hour": 1}}</tool_call>',
                                 A("Good morning!\nAnd you?"), C("clock_set", {"hour": 1})),
  "hermes: reasoning, a call": hermes('Let me\nsee\n</think>\n\n<tool_call>\n{"name": "clock_set", "arguments": {"hour": 1}}\n</tool_call>',
                                      R("Let me\nsee"), C("clock_set", {"hour": 1}), prompt="<think>\n"),
  "hermes: opened reasoning": hermes("<think>\nLet me\nsee\n</think>\n\nGood morning!", R("Let me\nsee"), A("Good morning!")),
  "hermes: calls": hermes('<tool_call>\n{"name": "clock_set", "arguments": {"hour": 1}}\n</tool_call>\n'
                          '<tool_call>\n{"name": "clock_set", "arguments": {"hour": 1, "minute": 2}}\n</tool_call>', C("clock_set", {"hour": 1}),
                          C("clock_set", {"hour": 1, "minute": 2})),
  "hermes: half a key": hermes('<tool_call>\n{"name": "clock_set", "arguments": {"ho', C("clock_set", {})),
  "r1: text": r1("</think>Good morning!\nAnd you?", A("Good morning!\nAnd you?"), prompt="<think>\n"),
  "r1: reasoning, text": r1("Let me\nsee</think>Good morning!", R("Let me\nsee"), A("Good morning!"), prompt="<think>\n"),
  "r1: a call": r1('</think><S><C>function<sep>clock_set\n```json\n{"hour": 1}```</C></S>', C("clock_set", {"hour": 1}), prompt="<think>\n"),
  "r1: calls, in lines": r1('<S><C>function<sep>clock_set\n```json\n{\n  "hour": 1\n}\n```</C>\n'
                            '<C>function<sep>clock\n```json\n{"city": "Rome"}\n```</C></S>',
                            C("clock_set", {"hour": 1}), C("clock", {"city": "Rome"})),
  "v3.1: a call": v31('<S><C>clock<sep>{"city": "Rome"}</C></S>', C("clock", {"city": "Rome"}), prompt="</think>"),
  "v3.1: reasoning, a call": v31('Hm</think><S><C>clock<sep>{"city": "Rome"}</C></S>', R("Hm"), C("clock", {"city": "Rome"}), prompt="<think>"),
  "v3.1: reasoning, text, calls": v31('Hm</think>So.<S><C>clock<sep>{"city": "Rome"}</C><C>weigh<sep>{"thing": "fig"}</C></S>', R("Hm"), A("So."),
                                      C("clock", {"city": "Rome"}), C("weigh", {"thing": "fig"}), prompt="<think>"),
  "v3.1: a line before the text": v31("Hm\n</think>\nSo.", R("Hm"), A("So."), prompt="<think>"),
  "v3.1: text": v31("So.", A("So."), prompt="</think>"),
  "kimi: text": kimi("Good morning!\nAnd you?", A("Good morning!\nAnd you?")),
  "kimi: a call": kimi('<S><C>functions.clock_set:0<A>{"hour": 1}</C></S>', C("clock_set", {"hour": 1}, "functions.clock_set:0")),
  "kimi: reasoning, a call": kimi('<think>Which hour?</think><S><C>functions.clock_set:0<A>{"hour": 1}</C></S>', R("Which hour?"),
                                  C("clock_set", {"hour": 1}, "functions.clock_set:0")),
  "kimi: text, a call": kimi('Good morning!\nAnd you?<S><C>functions.clock_set:0<A>{"hour": 1}</C></S>', A("Good morning!\nAnd you?"),
                             C("clock_set", {"hour": 1}, "functions.clock_set:0")),
  "kimi: calls": kimi('<S><C>functions.clock_set:0<A>{"hour": 1}</C><C>functions.clock_set:1<A>{"hour": 1, "minute": 2}</C><C>functions.note:2<A>'
                      '{"text": "<p>hi</p>"}</C></S>', C("clock_set", {"hour": 1}, "functions.clock_set:0"),
                      C("clock_set", {"hour": 1, "minute": 2}, "functions.clock_set:1"), C("note", {"text": "<p>hi</p>"}, "functions.note:2")),
  "kimi: lines of code": kimi('<S><C>functions.note:0<A>{"text": "def hi():\\n  print(\\"hi\\")\\n\\nhi()"}</C></S>',
                              C("note", {"text": 'def hi():\n  print("hi")\n\nhi()'}, "functions.note:0")),
  "kimi: empty arguments": kimi("<S><C>functions.stop:0<A>{}</C></S>", C("stop", {}, "functions.stop:0")),
  "kimi: half a call": kimi('<S><C>functions.clock_set:0<A>{"hour": ', C("clock_set", {}, "functions.clock_set:0")),
  "kimi: calls in reasoning": kimi('<think>Two calls<S><C>functions.clock_set:0<A>{"hour": 1}</C><C>functions.note:1<A>{"text": "it\'s"}</C></S>',
                                   R("Two calls"), C("clock_set", {"hour": 1}, "functions.clock_set:0"),
                                   C("note", {"text": "it's"}, "functions.note:1")),
  "kimi: no section, no ends": kimi('<think>Two calls<C>functions.clock_set:0<A>{"hour": 1}<C>functions.note:1<A>{"text": "it\'s"}', R("Two calls"),
                                    C("clock_set", {"hour": 1}, "functions.clock_set:0"), C("note", {"text": "it's"}, "functions.note:1")),
  "kimi: a call alone": kimi('<C>functions.run:0<A>{"command": "ls -l", "cwd": "/home/me", "timeout": 10}',
                             C("run", {"command": "ls -l", "cwd": "/home/me", "timeout": 10}, "functions.run:0")),
}
# what is wrong, and mended or text
MENDED = {
  "glm: no <arg_value>": glm(call("clock", city="Oslo").replace("<arg_value>", " "), C("clock", {"city": "Oslo"})),
  "glm: no <arg_key>": glm(call("clock", city="Oslo", offset="2").replace("<arg_key>", ""), C("clock", {"city": "Oslo", "offset": 2})),
  "glm: no </arg_key>": glm(call("clock", city="Oslo", offset="2").replace("</arg_key>", ""), C("clock", {"city": "Oslo", "offset": 2})),
  "glm: no </arg_value>": glm(call("clock", city="Oslo", offset="2").replace("</arg_value>", ""), C("clock", {"city": "Oslo", "offset": 2})),
  "glm: </arg_key> for the end": glm(f"<tool_call>clock{CITY}</arg_key>", C("clock", {"city": "Oslo"})),
  "glm: </arg_key> for </arg_value>": glm(call("clock", city="Oslo").replace("</arg_value>", "</arg_key>"), C("clock", {"city": "Oslo"})),
  "glm: </arg_key> twice": glm(call("clock", city="Oslo").replace("</arg_key>", "</arg_key></arg_key>"), C("clock", {"city": "Oslo"})),
  "glm: <arg_value> twice": glm(call("clock", city="Oslo").replace("<arg_value>", "<arg_value><arg_value>"), C("clock", {"city": "Oslo"})),
  "glm: stray marks behind it": glm(f"<tool_call>clock{CITY}</tool_call></tool_call>\n</arg_value></think>\nSo.", C("clock", {"city": "Oslo"}),
                                    A("So.")),
  "glm: stray marks between": glm(f"<tool_call>clock{CITY}</arg_value></arg_key>, <arg_key>offset</arg_key><arg_value>2</arg_value></tool_call>",
                                  C("clock", {"city": "Oslo", "offset": 2})),
  "glm: a key without a value": glm(f"<tool_call>clock<arg_key>offset</arg_key>{CITY}<arg_key>x</tool_call>",
                                    C("clock", {"city": "Oslo"})),
  "glm: a key twice": glm(call("clock", city="Oslo").replace("</tool_call>", "<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"),
                          C("clock", {"city": "Oslo"})),
  "glm: no end": glm(f"<tool_call>clock{CITY}\n<tool_call>stop</tool_call>So.", C("clock", {"city": "Oslo"}), C("stop", {}), A("So.")),
  "glm: no end, text": glm(f"<tool_call>clock{CITY}\nSo.", C("clock", {"city": "Oslo"}), A("So.")),
  "glm: begun twice": glm("<tool_call>\n" + call("clock", city="Oslo"), C("clock", {"city": "Oslo"})),
  "glm: in reasoning": glm("Let me see" + call("clock", city="Oslo") + "</think>So.", R("Let me see"), C("clock", {"city": "Oslo"}), A("So."),
                           prompt="<think>"),
  "glm: cut in a string": glm("<tool_call>clock<arg_key>city</arg_key><arg_value>Os", C("clock", {"city": "Os"})),
  "glm: cut in a key": glm(f"<tool_call>clock{CITY}<arg_key>off", C("clock", {"city": "Oslo"})),
  "glm: cut in a list": glm('<tool_call>note<arg_key>tags</arg_key><arg_value>["a", "b', C("note", {"tags": ["a", "b"]})),
  "glm: cut in a name": glm("So.\n<tool_call>clo", A("So.\n<tool_call>clo")),
  "glm: cut behind a name": glm("So.\n<tool_call>clock", A("So.\n<tool_call>clock")),
  "glm: cut in a mark": glm("So.\n<tool_call", A("So.\n<tool_call")),
  "glm: no such tool": glm("So. " + call("fly", to="Oslo") + "Well.", A("So. " + call("fly", to="Oslo") + "Well.")),
  "glm: no such tool, in reasoning": glm("Perhaps " + call("fly") + "?</think>No.", R("Perhaps " + call("fly") + "?"), A("No."), prompt="<think>"),
  "glm: no name": glm("<tool_call></tool_call>stop</tool_call>", A("<tool_call></tool_call>stop</tool_call>")),
  "glm: a name and more": glm("<tool_call>clock, please</tool_call>", A("<tool_call>clock, please</tool_call>")),
  "glm: other marks in text": glm("Write <arg_key>k</arg_key>.</tool_call>", A("Write <arg_key>k</arg_key>.</tool_call>")),
  "glm: strings": glm(call("note", text='  "a"\n\\n\t<b> é\x01 1'), C("note", {"text": '  "a"\n\\n\t<b> é\x01 1'})),
  "glm: strings that look otherwise": glm(call("clock", city="5") + call("note", text="null") + call("weigh", thing='{"a": 1}'),
                                          C("clock", {"city": "5"}), C("note", {"text": "null"}), C("weigh", {"thing": '{"a": 1}'})),
  "glm: an empty string": glm(call("clock", city=""), C("clock", {"city": ""})),
  "glm: marks in a string": glm(call("note", text="a <tool_call> b"), C("note", {"text": "a <tool_call> b"})),
  "glm: Python's literals": glm(call("weigh", exact="True") + call("run", a="None", b="{'x': [True]}") + call("note", meta="{'x': [True]}"),
                                C("weigh", {"exact": True}), C("run", {"a": None, "b": "{'x': [True]}"}), C("note", {"meta": {"x": [True]}})),
  "glm: no JSON": glm(call("weigh", grams="much") + call("run", n="NaN", big="1e999", deep="[" * 1200, deeper="[" * 70 + "]" * 70),
                      C("weigh", {"grams": "much"}), C("run", {"n": "NaN", "big": "1e999", "deep": "[" * 1200, "deeper": "[" * 70 + "]" * 70})),
  "glm: encoded twice": glm(call("note", tags='"[\\"a\\"]"', meta='"{}"') + call("clock_set", hour='"7"'), C("note", {"tags": ["a"], "meta": {}}),
                            C("clock_set", {"hour": 7})),
  "glm: types by schema": glm(call("mixed", maybe="null", either="5", level="low", free="5", ref=" 7 ") +
                              call("mixed", maybe="5", either='"x"', ref="[]"),
                              C("mixed", {"maybe": None, "either": 5, "level": "low", "free": 5, "ref": 7}),
                              C("mixed", {"maybe": "5", "either": '"x"', "ref": []})),
  "glm: keys that no schema has": glm(call("clock", town="5", **{"a b": "x"}), C("clock", {"town": 5, "a b": "x"})),
  "glm: blanks": glm("\n\nSo. \n", A("So. \n")),
  "glm: blanks without marks": glm("\n\nSo. \n", A("\n\nSo. \n"), prompt="x"),
  "glm: nothing but blanks": glm("\n ", A("\n "), prompt="x"),
  "glm: reasoning alone": glm("on and on\n", R("on and on\n"), prompt="<think>"),
  "glm: </think> again": glm("\n</think>\n\nSo.", A("So."), prompt="</think>"),
  "glm: half a character": glm("é\ufffd" + call("clock", city="Zürich"), A("é\ufffd"), C("clock", {"city": "Zürich"})),
  "hermes: another order": hermes('<tool_call>{"arguments": {"hour": 1}, "name": "clock_set"}</tool_call>'
                                  '<tool_call>{"parameters": {"hour": 2}, "name": "clock_set"}</tool_call>', C("clock_set", {"hour": 1}),
                                  C("clock_set", {"hour": 2})),
  "hermes: more in it": hermes('<tool_call>{"id": 7, "name": "clock_set", "type": "function", "arguments": {"hour": 1}}</tool_call>'
                               '<tool_call>{"name": "stop", "id": "<a>", "arguments": {}}</tool_call>', C("clock_set", {"hour": 1}), C("stop", {})),
  "hermes: more behind it": hermes('<tool_call>{"name": "clock_set", "arguments": {"hour": 1}, "id": "</tool_call>"}</tool_call>So.',
                                   C("clock_set", {"hour": 1}), A("So.")),
  "hermes: parameters": hermes('<tool_call>{"name": "clock_set", "parameters": {"hour": 1}}</tool_call>', C("clock_set", {"hour": 1})),
  "hermes: no arguments": hermes('<tool_call>{"name": "stop"}</tool_call> <tool_call>{"name": "stop", "arguments": null}</tool_call>'
                                 '<tool_call>{"name": "stop", "arguments": ""}</tool_call>', C("stop", {}), C("stop", {}), C("stop", {})),
  "hermes: encoded twice": hermes('<tool_call>{"name": "note", "arguments": "{\\"text\\": \\"\\\\u00e9\\"}"}</tool_call>', C("note", {"text": "é"})),
  "hermes: in lines": hermes('<tool_call>\n{\n  "name": "note",\n  "arguments": {\n    "text": "a\\tb",\n    "tags": [ ]\n  }\n}\n</tool_call>',
                             C("note", {"text": "a\tb", "tags": []})),
  "hermes: raw lines in a string": hermes('<tool_call>{"name": "note", "arguments": {"text": "a\n\tb \\x \\\' \\u12 \\ud83d\\ude00 \\ud83d!"}}'
                                          "</tool_call>",
                                          C("note", {"text": "a\n\tb \\x ' \\u12 😀 \ufffd!"})),
  "hermes: Python": hermes("<tool_call>{'name': 'run', 'arguments': {'a': True, 'b': None, 'c': \"it's\", 'd': 'say \"no\"'}}</tool_call>",
                           C("run", {"a": True, "b": None, "c": "it's", "d": 'say "no"'})),
  "hermes: commas": hermes('<tool_call>{"name": "run", "arguments": {"a": [1, 2,], "b" 3 "c": 4, "d":, "e": 5,}}</tool_call>',
                           C("run", {"a": [1, 2], "b": 3, "c": 4, "e": 5})),
  "hermes: bare words": hermes('<tool_call>{name: run, arguments: {a: Oslo, b: 01, c: 1e999, d: }}</tool_call>',
                               C("run", {"a": "Oslo", "b": "01", "c": "1e999"})),
  "hermes: brackets": hermes('<tool_call>{"name": "run", "arguments": {"a": [1, {"b": 2], "c": [{"d": } 3]}}</tool_call>',
                             C("run", {"a": [1, {"b": 2}], "c": [{}, 3]})),
  "hermes: a bracket lacks": hermes('<tool_call>{"name": "run", "arguments": {"a": [1</tool_call>So.', C("run", {"a": [1]}), A("So.")),
  "hermes: marks in a string": hermes('<tool_call>{"name": "note", "arguments": {"text": "</tool_call><tool_call>"}}</tool_call>',
                                      C("note", {"text": "</tool_call><tool_call>"})),
  "hermes: a < in it": hermes('<tool_call>{"name": "run", "arguments": {"a": <b>, "c": 1}}</tool_call>', C("run", {"a": "b>", "c": 1})),
  "hermes: no end": hermes('<tool_call>{"name": "stop", "arguments": {}}\n<tool_call>{"name": "stop", "arguments": {}}', C("stop", {}),
                           C("stop", {})),
  "hermes: cut in a string": hermes('<tool_call>{"name": "note", "arguments": {"text": "a\\', C("note", {"text": "a"})),
  "hermes: cut in a number": hermes('<tool_call>{"name": "run", "arguments": {"a": 12', C("run", {"a": 12})),
  "hermes: cut in a literal": hermes('<tool_call>{"name": "run", "arguments": {"a": [tr', C("run", {"a": []})),
  "hermes: cut before arguments": hermes('<tool_call>{"name": "run", "argu', C("run", {})),
  "hermes: no such tool": hermes('So. <tool_call>\n{"name": "fly", "arguments": {"to": "</tool_call>"}}\n</tool_call> Well.',
                                 A('So. <tool_call>\n{"name": "fly", "arguments": {"to": "</tool_call>"}}\n</tool_call> Well.')),
  "hermes: a call in what is none": hermes('<tool_call>{"name": "fly", "arguments": {"to": "<tool_call>{"name": "stop"}</tool_call>',
                                           A('<tool_call>{"name": "fly", "arguments": {"to": "'), C("stop", {})),
  "hermes: no JSON": hermes("<tool_call>fly</tool_call>", A("<tool_call>fly</tool_call>")),
  "hermes: no name": hermes('<tool_call>{"arguments": {}}</tool_call>', A('<tool_call>{"arguments": {}}</tool_call>')),
  "hermes: nothing": hermes("<tool_call>\n</tool_call>", A("<tool_call>\n</tool_call>")),
  "hermes: in reasoning": hermes('Hm. <tool_call>{"name": "stop", "arguments": {}}</tool_call>\n</think>\nSo.', R("Hm."), C("stop", {}), A("So."),
                                 prompt="<think>"),
  "hermes: deep": hermes('<tool_call>{"name": "stop", "arguments": {"a": ' + "[" * 300 + "1" + "]" * 300 + "}}</tool_call>",
                         C("stop", {"a": json.loads("[" * 62 + "1" + "]" * 62)})),
  "r1: no arguments": r1("<S><C>function<sep>stop</C></S>", C("stop", {})),
  "r1: no section": r1('So.\n<C>function<sep>clock\n```json\n{"city": "Rome"}\n```</C>', A("So."), C("clock", {"city": "Rome"})),
  "r1: no ends": r1('<S><C>function<sep>clock\n```json\n{"city": "Rome"}\n```', C("clock", {"city": "Rome"})),
  "r1: no fence": r1('<S><C>function<sep>clock\n{"city": "Rome"}</C></S>', C("clock", {"city": "Rome"})),
  "r1: no such tool": r1("<S><C>function<sep>fly\n```json\n{}\n```</C></S>",
                         A("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>fly\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")),
  "r1: no calls": r1("<S>\nWell.", A("<｜tool▁calls▁begin｜>\nWell.")),
  "v3.1: no arguments": v31("<S><C>stop<sep></C><C>stop</C></S>", C("stop", {}), C("stop", {})),
  "v3.1: no separator": v31('<S><C>clock{"city": "Rome"}</C></S>', C("clock", {"city": "Rome"})),
  "v3.1: cut": v31('<S><C>clock<sep>{"city": "Ro', C("clock", {"city": "Ro"})),
  "kimi: no arguments": kimi("<S><C>functions.stop:0<A></C><C>functions.stop:1</C></S>", C("stop", {}, "functions.stop:0"),
                             C("stop", {}, "functions.stop:1")),
  "kimi: a number twice": kimi("<S><C>functions.stop:0<A>{}</C><C>functions.stop:0<A>{}</C></S>", C("stop", {}, "functions.stop:0"), C("stop", {})),
  "kimi: a name alone": kimi('<S><C>stop<A>{}</C><C>clock:1<A>{"city": "Rome"}</C></S>', C("stop", {}), C("clock", {"city": "Rome"})),
  "kimi: text behind it": kimi("<S><C>functions.stop:0<A>{}</C></S>\nSo.", C("stop", {}, "functions.stop:0"), A("So.")),
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

@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("form", [f.name for f in FORMS])
def test_whatever_a_model_writes(form:str, spelled:bool):
  """Marks and pieces of calls in any order: nothing raises, arguments are objects, text without calls is all there, cuts change nothing"""
  toy, rng = Toy(form, spelled), random.Random(form)
  f = toy.form
  marks = [f.call, f.call, *f.ends, *f.inner, *f.inner, *filter(None, [f.section]), OPEN, CLOSE]
  pieces = ["clock", "clock_set", "functions.clock:0", "city", "hour", "Oslo", '"', "'", "{", "}", "[", "]", ",", ": ", " ", "\n", "1", "-", "true",
            "<", "\\", "\\u00e9", "\\ud83d", "é", "```json\n", "function", '{"name": "clock", "arguments": {"city": "', '"name": "clock"',
            '{"city": "Oslo"}']
  hidden = [OPEN, CLOSE, *(marks if f.name == "Kimi" and not spelled else [])]   # control tokens are shown where a call might have been
  for _ in range(300):
    said = "".join(rng.choice(marks if rng.random() < 0.4 else pieces) for _ in range(rng.randrange(1, 25)))
    parts, prompt = toy.parts(said), rng.choice(["", "<think>"])
    whole = parse(toy, toy.cut(parts), TOOLS, prompt)
    found = parsed(whole)
    for _ in range(4):
      ids = toy.cut(parts, [int(rng.random() * len(said.encode())) for _ in range(6)])
      assert parse(toy, ids, TOOLS, prompt) == whole, [toy.table[i] for i in ids]
    if any(isinstance(e, Call) for e in found): continue
    told, all_of_it = (re.sub("|".join([r"\s", *map(re.escape, hidden)]), "", text) for text in ("".join(text for _, text in found), said))
    assert told == all_of_it, said

def closed(j:Json) -> str:
  """What would end the object here"""
  j = copy.copy(j)
  j.open, j.filled = j.open[:], j.filled[:]
  return j.close()

def test_json_is_an_object_at_any_moment():
  rng, pieces = random.Random(7), ['"', "'", "{", "}", "[", "]", ",", ":", " ", "\n", "a", "bc", "1", "0", "-1.5e3", "true", "None", "nul", "\\",
                                   "\\n", "\\u12", "\\u00e9", "\\ud83d", "\\ude00", "é", "\x01", "\x7f", '"k": ', '{"', '": "', "1" * 250, "{" * 70]
  for n in range(600):
    text = ("{" if n % 3 else "") + "".join(rng.choice(pieces) for _ in range(rng.randrange(30)))
    whole, cut, sent = Json(), Json(), ""
    expected = whole.push(text) + whole.close()
    while text and not cut.done:
      k = rng.randrange(1, 6)
      sent, text = sent + cut.push(text[:k]), text[k:]
      assert isinstance(json.loads(sent + closed(cut)), dict), sent
    assert sent + cut.close() == expected and json.dumps(json.loads(expected), allow_nan=False).encode()
  long = Json()
  assert json.loads(long.push('{"a": ' + "1" * 5000 + "}")) == {"a": "1" * 5000}   # Python reads no number so long

def test_a_call_is_told_as_it_comes():
  toy = Toy("GLM")
  p = Parser(toy, Family(toy.form), TOOLS, toy.cut(toy.parts("<think>")))
  def says(*pieces:str) -> list[Event]: return joined([e for piece in pieces for e in p.push(toy.token(piece.encode()))])
  assert says("Hm", ". ", "\n") == [Piece(REASONING, "Hm.")] and says("</think>", "\n", "So") == [Piece(ANSWER, "So")]
  assert says("\n", "<tool_call>", "clo", "ck") == [] and says("<arg_key>") == [CallBegins(0, "clock")]
  assert says("ci", "ty", "</arg_key>") == [] and says("<arg_value>") == [CallArguments(0, '{"city": "')]
  assert says('Os"') == [CallArguments(0, 'Os\\"')] and says("lo") == [CallArguments(0, "lo")]
  assert says("</arg_value>", "<arg_key>", "offset", "</arg_key>", "<arg_value>", "4") == [CallArguments(0, '", "offset": ')]
  assert says("2", "</arg_value>") == [CallArguments(0, "42")] and says("</tool_call>") == [CallArguments(0, "}"), CallEnds(0)] and p.calls == 1
  assert says("\n", "<tool_call>", "stop", "</tool_call>") == [CallBegins(1, "stop"), CallArguments(1, "{}"), CallEnds(1)] and p.flush() == []
  toy = Toy("hermes", spelled=True)
  p = Parser(toy, Family(toy.form), TOOLS, [])
  assert says("<tool", "_call>", '{"name', '": "clo', 'ck"') == [CallBegins(0, "clock")]
  assert says(', "arguments": {"city": "') == [CallArguments(0, '{"city": "')] and says("Os", "lo") == [CallArguments(0, "Oslo")]
  assert says('"}') == [CallArguments(0, '"}'), CallEnds(0)] and says("}", "</tool_call>") == []

def test_half_a_character():
  """Bytes that are no UTF-8, before a mark and at the end"""
  toy = Toy("GLM")
  p = Parser(toy, Family(toy.form), TOOLS, [])
  half, ids = toy.token(b"\xc3"), toy.cut(toy.parts("<tool_call>note<arg_key>text</arg_key><arg_value>"))
  events = [e for i in [half, *ids, half, half] for e in p.push(i)] + p.flush()
  assert parsed(joined(events)) == [A("\ufffd"), Call("note", {"text": "\ufffd\ufffd"})]

def test_a_control_token_is_no_text():
  """It ends a string that was not ended; its name may stand there"""
  said = kimi('<C>note<A>{"text": "a</C>So.').said
  for spelled, expected in ((False, [Call("note", {"text": "a"}), A("So.")]), (True, [Call("note", {"text": "a<|tool_call_end|>So."})])):
    toy = Toy("Kimi", spelled)
    assert parsed(parse(toy, toy.cut(toy.parts(said)), TOOLS)) == expected

def test_without_tools_calls_are_text():
  for name, said, expected in (("GLM", call("stop"), call("stop")), ("Kimi", kimi("a<S><C>functions.stop:0<A>{}").said, "afunctions.stop:0{}")):
    toy = Toy(name)
    assert parse(toy, toy.cut(toy.parts(said)), {}) == [Piece(ANSWER, expected)]
    p = Parser(toy, Family(None), TOOLS, [])
    assert joined([e for i in toy.cut(toy.parts(said)) for e in p.push(i)] + p.flush()) == [Piece(ANSWER, expected)] and p.calls == 0

def test_reasoning_goes_on():
  """An answer to a prompt that ends inside reasoning"""
  toy = Toy("GLM")
  for prompt, kind in (("<think>Hm,", REASONING), ("<think>Hm</think>So", ANSWER), ("<think><|user|>Well?", ANSWER), ("</think>a<think>", REASONING)):
    assert parsed(parse(toy, toy.cut(toy.parts(" well")), TOOLS, prompt)) == [(kind, " well" if prompt[-1] != ">" else "well")], prompt

@pytest.mark.parametrize("schema,expected", [
  ({}, "any"), (None, "any"), (True, "any"), ({"type": "string"}, "string"), ({"type": ["integer", "null"]}, "integer null"),
  ({"type": "thing"}, "any"), ({"type": [{}, 5]}, "any"), ({"enum": ["a", 1, None, []]}, "string integer number null array"),
  ({"const": 1.5}, "number"),
  ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/list"}]}, "string array"), ({"oneOf": [{"const": True}]}, "boolean"),
  ({"$ref": "#/$defs/circle"}, "string"), ({"$ref": "#/$defs/lost"}, "any"), ({"$ref": "#/$defs/self"}, "any"), ({"$ref": 5}, "any"),
  ({"anyOf": []}, "any")])
def test_kinds_of_a_schema(schema:Any, expected:str):
  circle = {"anyOf": [{"type": "string"}, *[{"$ref": "#/$defs/circle"}] * 30]}
  root = {"$defs": {"list": {"type": "array"}, "circle": circle, "self": {"$ref": "#/$defs/self"}}}
  assert kinds(schema, root) == (ANY if expected == "any" else set(expected.split()))

# ---- families, messages ----

def test_a_family_by_its_template():
  toy = Toy("GLM")
  assert family_of(templates.GLM, toy) == Family(next(f for f in FORMS if f.name == "GLM"), {k: v for k, v in toy.special_tokens.items() if v})
  sources = {**templates.FORMS, "none": "{{ messages }}", "coder": "<tool_call><function=", "r1": "{{ '<｜tool▁calls▁begin｜>' }}```json",
             "hermes": '{{ "<tool_call>\\n{\\"name\\": ..., \\"arguments\\": ...}" }}', "broken": "{% <arg_key><arg_value>"}
  found = {name: family_of(template, toy) for name, template in sources.items()}
  assert {k: f.form and f.form.name for k, f in found.items()} == {
    "glm": "GLM", "deepseek": "DeepSeek-V3.1", "kimi": "Kimi", "none": None, "coder": None, "r1": "DeepSeek-R1", "hermes": "hermes", "broken": "GLM"}
  assert [k for k, f in found.items() if f.as_text] == ["deepseek"]

@pytest.mark.parametrize("name", templates.FORMS)
def test_what_a_template_writes_is_read(name:str):
  """A past call, as the template writes it, is the call"""
  source, arguments = templates.FORMS[name], {"thing": 'a "pear"\n</x>', "grams": 1.5, "exact": True}
  toy = Toy({"glm": "GLM", "kimi": "Kimi", "deepseek": "DeepSeek-V3.1"}[name])
  family = family_of(source, toy)
  calls = [{"id": f"functions.weigh:{n}", "type": "function", "function": {"name": "weigh", "arguments": json.dumps(arguments)}} for n in range(2)]
  messages = tools_in_history([templates.user("?"), {"role": "assistant", "content": "So.", "tool_calls": calls}], family.as_text)
  said = Template(source).render({"messages": messages, "bos_token": ""})
  said = said[said.index("So."):].replace("<｜end▁of▁sentence｜>", "").replace("<|im_end|>", "")
  ids = [f"functions.weigh:{n}" if name == "kimi" else None for n in range(2)]
  assert parsed(parse(toy, toy.cut(toy.parts(said)), TOOLS)) == [A("So."), *(Call("weigh", arguments, i) for i in ids)]

def test_messages_for_a_template():
  def calling(arguments:Any) -> dict: return {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": arguments}}]}
  for given in ('{"a": [1, "é"]}', {"a": [1, "é"]}):
    assert tools_in_history([calling(given)]) == [calling({"a": [1, "é"]})]
    assert tools_in_history([calling(given)], as_text=True) == [calling('{"a": [1, "é"]}')]
  assert tools_in_history([calling("")]) == tools_in_history([calling(None)]) == [calling({})]
  said = {"role": "assistant", "content": "a", "reasoning": "b"}
  assert tools_in_history([said]) == [{"role": "assistant", "content": "a", "reasoning_content": "b"}] and "reasoning" in said
  assert tools_in_history([{**said, "reasoning_content": "c"}]) == [{"role": "assistant", "content": "a", "reasoning_content": "c"}]
  assert tools_in_history([{**said, "reasoning_content": None}])[0]["reasoning_content"] == "b"
  others = [5, {"role": "user", "content": "a", "reasoning": "b"}, {"role": "assistant", "tool_calls": 5}, {"role": "assistant", "tool_calls": [5]}]
  assert tools_in_history(others) == others
  bare = tools_in_history([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}])
  assert bare[0]["tool_calls"] == [{"name": "f", "arguments": {}}]
  for wrong in ("[]", "5", '"{}"', "{", '{"a": NaN}', '{"a": 1e999}', "[" * 100000, [], 5, "1" * 5000):
    with pytest.raises(MessageError, match="^message 1: tool call 0: arguments: expected a JSON object$"): tools_in_history([{}, calling(wrong)])

# ---- grammars ----

class Bytes:
  """A vocabulary of a family's marks and bytes, and llguidance's view of it"""
  def __init__(self, form:str, spelled:bool=False):
    llguidance = pytest.importorskip("llguidance")
    self.matcher, self.toy = llguidance.LLMatcher, Toy(form, spelled)
    self.special_token_ids, self.eos_token_id, self.bos_token_id = [*self.toy.special_tokens.values()], 0, None
    self.bytes = [self.toy.token(bytes([b])) for b in range(256)]
    self.tokens = self.toy.table[:]
    self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), eos_token=[0])
    self.family = Family(self.toy.form, {m: i for m, i in self.toy.special_tokens.items() if i})
  def __call__(self, text:bytes) -> list[int]: return [self.bytes[b] for b in text]

  def cut(self, said:str) -> list[int]: return self.toy.cut(self.toy.parts(said), range(len(said.encode())))
  def guide(self, tools:dict[str, Any], **how:Any) -> Any:
    kind, source = call_grammar(self.family, tools, **how)
    matcher = self.matcher(self.tokenizer, self.matcher.grammar_from_lark(source), log_level=0)
    assert kind == "lark" and not matcher.is_error(), matcher.get_error()
    return matcher
  def accepts(self, said:str, tools:dict[str, Any], **how:Any) -> bool:
    matcher, ids = self.guide(tools, **how), self.cut(said)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

  def draw(self, matcher:Any, rng:random.Random, most:int) -> list[int]|None:
    """An answer at random under a grammar, that likes to end things; None for one that would not end"""
    ids: list[int] = []
    while len(ids) < most:
      mask = matcher.compute_bitmask()
      allowed = [i for i in range(len(self.tokens)) if mask[i >> 3] >> (i & 7) & 1]
      ends = [i for i in allowed if i < self.bytes[0] or self.tokens[i] in (b'"', b"}", b"]")]
      plain = [i for i in allowed if self.tokens[i].isalnum() or self.tokens[i] in b' <>{"\n\\'] or allowed
      token = rng.choice(ends if ends and rng.random() < 0.3 else plain)
      if token == 0: return ids
      assert matcher.consume_token(token)
      ids.append(token)
    return None

STRICT = {"clock": TOOLS["clock"], "clock_set": TOOLS["clock_set"] | {"required": ["hour", "minute"], "additionalProperties": False},
          "note": TOOLS["note"], "stop": TOOLS["stop"], "mixed": TOOLS["mixed"]}
WRITTEN = {
  "GLM": (call("clock", city="a <b>\n </c", offset="-2"), call("clock_set", hour="1", minute="2"), call("stop")),
  "hermes": (*(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in
               (("clock", '{"city": "a <b>", "offset": -2}'), ("clock_set", '{"hour": 1, "minute": 2}'), ("stop", "{}"))),),
  "Kimi": (*(kimi(f"<C>functions.{name}<A>{arguments}</C>").said for name, arguments in
             (("clock:0", '{"city": "a <b>", "offset": -2}'), ("clock_set:1", '{"hour":1,"minute":2}'), ("stop:2", "{}"))),),
  "DeepSeek-R1": (*(r1(f"<C>function<sep>{name}\n```json\n{arguments}\n```</C>").said for name, arguments in
                    (("clock", '{"city": "a <b>", "offset": -2}'), ("clock_set", '{"hour": 1, "minute": 2}'), ("stop", "{}"))),),
  "DeepSeek-V3.1": (*(v31(f"<C>{name}<sep>{arguments}</C>").said for name, arguments in
                      (("clock", '{"city": "a <b>", "offset": -2}'), ("clock_set", '{"hour": 1, "minute": 2}'), ("stop", "{}"))),),
}
def section(form:str, *calls:str) -> str:
  f = next(f for f in FORMS if f.name == form)
  return f.section + f.between.join(calls) + (f.ends[-1] if f.section else "")

GRAMMARS = pytest.mark.parametrize("form,spelled", [*((form, False) for form in WRITTEN), ("GLM", True), ("hermes", True), ("Kimi", True)])

@GRAMMARS
def test_a_grammar_takes_calls_alone(form:str, spelled:bool):
  v, calls = Bytes(form, spelled), WRITTEN[form]
  def takes(said:str, **how:Any) -> bool: return v.accepts(said, STRICT, **how)
  assert all(takes(section(form, c)) and takes("\n\n" + section(form, c), parallel=False) for c in calls)
  assert takes(section(form, *calls)) and not takes(section(form, *calls), parallel=False)
  assert takes(section(form, calls[1]), choice="=clock_set") and not takes(section(form, calls[0]), choice="=clock_set")
  for said in ("", "So.", "So. " + section(form, calls[0]), section(form, calls[0])[:-1], section(form, calls[0]) + "So.",
               section(form, calls[0]).replace("clock", "fly"), section(form, calls[1]).replace("hour", "year"),
               section(form, calls[0]).replace("-2", "two"), "<think>Hm</think>" + section(form, calls[0])): assert not takes(said), said
  assert form != "GLM" or not takes(call("clock", city="a</tool_call>b"))
  assert takes("<think>Hm</think>\n" + section(form, *calls), thinks=True) and takes(section(form, *calls), thinks=True)
  for said in ("", "So.", "So.\n" + section(form, *calls), section(form, *calls)): assert takes(said, choice="auto"), said
  assert takes("<think>Hm</think>So. " + section(form, calls[0]), choice="auto", thinks=True)
  assert not takes("So. " + section(form, calls[0]).replace("clock", "fly"), choice="auto")
  assert not takes(section(form, *calls), choice="auto", parallel=False)

@GRAMMARS
def test_what_a_grammar_lets_pass_is_calls(form:str, spelled:bool):
  v, rng, ended = Bytes(form, spelled), random.Random(form), 0
  for n in range(16):
    if (ids := v.draw(v.guide(STRICT, strict=STRICT, parallel=n % 2 == 0), rng, 400)) is None: continue
    found = parsed(parse(v.toy, ids, STRICT))
    ended += 1
    assert found and all(isinstance(c, Call) for c in found), v.toy.decode(ids)
    for c in found:
      assert c.arguments.keys() >= set(STRICT[c.name].get("required", [])), v.toy.decode(ids)
      for key, value in c.arguments.items():
        schema = STRICT[c.name]["properties"].get(key)
        assert kinds(schema, STRICT[c.name]) & TYPES[type(value)], v.toy.decode(ids)
  assert ended > 2

def test_values_under_a_grammar():
  """Where a string is written without quotes: choices, lengths, keys without a schema"""
  v = Bytes("GLM")
  def takes(said:str, schema:dict) -> bool: return v.accepts(said, {"f": {"type": "object", "properties": {"a": schema}}})
  for schema, good, bad in (({"enum": ["x", 'y "z', 3, ""]}, ["x", 'y "z', "3", ""], ["z", '"x"']), ({"const": "x"}, ["x"], ["y"]),
                            ({"type": "string", "minLength": 1, "maxLength": 2}, ["a", "\n\n"], ["", "abc"]),
                            ({"type": "boolean"}, ["true"], ["True"]), ({"type": ["string", "null"]}, ["null", "a"], []),
                            ({"type": "array", "items": {"type": "integer"}}, ["[1, 2]", "[]"], ['["a"]']),
                            ({"type": "string", "pattern": "^a+$"}, ["b"], [])):   # a pattern is for strict tools, and not for them here
    assert all(takes(call("f", a=text), schema) for text in good) and not any(takes(call("f", a=text), schema) for text in bad), schema
  assert v.accepts(call("run", any="thing", more="5"), TOOLS) and v.accepts(call("run"), TOOLS)
  reference = {"f": {"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a", "b"], "$defs": {"n": {"type": "integer"}}}}
  assert v.accepts(call("f", a="1", b="x"), reference)
  assert not any(v.accepts(said, reference) for said in (call("f", a="x", b="x"), call("f", a="1")))

@pytest.mark.parametrize("schema", [
  {"properties": {"a": {"type": "string", "pattern": "a+"}}}, {"properties": {"a": {"type": "string", "format": "date"}}}, {"allOf": []},
  {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "object"}]}}}, {"$ref": "#/$defs/a"}])
def test_what_a_grammar_cannot_hold(schema:dict):
  glm_family, hermes_family = (Family(f) for f in FORMS if f.name in ("GLM", "hermes"))
  with pytest.raises(ValueError, match="^tool f: strict: "): call_grammar(glm_family, {"f": schema}, strict={"f"})
  assert all(call_grammar(*how)[0] == "lark" for how in ((glm_family, {"f": schema}), (hermes_family, {"f": schema}, "required", True, {"f"})))
  with pytest.raises(ValueError, match="no form of calls"): call_grammar(Family(None), {"f": {}})
