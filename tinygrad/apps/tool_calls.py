"""A model's tokens to reasoning, answer and calls of tools, as they come; a grammar that holds a model to a call; calls in messages for a template.

How a model writes a call is its family, which its chat template tells: a row of FORMS has the marks and reads what stands between them. Nothing that
a model writes raises: what does not begin a call of a known tool is text, and the arguments of one that has begun are mended into a JSON object.

In order: JSON that is mended as it comes, a value's type, what a family is, how each is read, Parser, grammars, messages."""
from __future__ import annotations
import json, re
from dataclasses import dataclass, field
from typing import Any, Callable, Container, Iterator, NamedTuple
import regex
from tinygrad.apps.chat import MessageError
from tinygrad.apps.reasoning import ANSWER, CLOSE, END, MARK, OPEN, Piece, Reasoning, Steps, Watch
from tinygrad.apps.template import Template
from tinygrad.apps.tokenizer import Tokenizer

class CallBegins(NamedTuple):
  """index: of the call in the answer, from 0; id: the model's own, where it gives one"""
  index: int
  name: str
  id: str|None = None

class CallArguments(NamedTuple):
  """A piece of a call's arguments. The pieces of one call, joined, are a JSON object."""
  index: int
  text: str

class CallEnds(NamedTuple):
  index: int

Event = Piece | CallBegins | CallArguments | CallEnds

def encode(value:Any) -> str:
  """JSON as UTF-8 can hold it: half a surrogate pair becomes ?. Raises ValueError for a number that JSON lacks."""
  return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()

def decode(text:str) -> Any:
  """Raises ValueError for what is no JSON, is nested too deep, or has NaN or infinity."""
  def refuse(name:str) -> None: raise ValueError(name)
  try:
    value = json.loads(text, parse_constant=refuse)
    encode(value)
    return value
  except RecursionError: raise ValueError("nested too deep") from None

# ---- JSON, mended as it comes ----

MAX_DEPTH = 64   # of what is sent: others' parsers have limits too, and so has a template
LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,199})(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?")   # those that a double holds
BLANKS = re.compile(r"[\s:]+")
WORD = re.compile(r"[^\s,:{}\[\]\"'<]+")
PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]+") for quote in "\"'"}
# a \u escape of half a surrogate pair is none
ESCAPE = regex.compile(r'\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})')
HALF = regex.compile(r"\\u[0-9a-fA-F]{4}")

class Json:
  """The text of a JSON object, as a model writes it, to valid JSON. At any moment, what was sent and what `close` adds are one object. Commas and
  colons are set anew. A key is sent with its value: half a key, or one without a value, is dropped. A bare word becomes a string; single quotes,
  Python's literals and raw control characters become JSON's; an object in a string is taken out of it. done: the object has ended; rest: what
  follows its end, or begins with a "<" outside strings, which may be a mark's."""
  def __init__(self):
    self.open: list[str] = []     # the brackets around this place
    self.filled: list[bool] = []  # whether something stands in them
    self.key: str|None = None     # the key whose value comes next
    self.quote = self.held = self.rest = ""
    self.name: list[str]|None = None   # the characters of a string that is a key, or stands for an object
    self.begun = self.done = False

  def push(self, text:str) -> str:
    """The next text; gives what is to be sent"""
    text, self.held, self.rest, at, out = self.held + text, "", "", 0, list[str]()
    while at < len(text) and not self.done:
      if self.quote: at = self._string(text, at, out)
      elif blanks := BLANKS.match(text, at): at = blanks.end()
      elif word := WORD.match(text, at):
        at = word.end()
        if at < len(text): self._word(word[0], out)
        else: self.held = word[0]
      elif text[at] == "<": break
      else:
        self._bracket(text[at], out)
        at += 1
    self.rest = text[at:]
    return "".join(out)

  def close(self) -> str:
    """What ends the object where the model ended in it"""
    out: list[str] = []
    if self.quote and self.name is None: out.append('"')
    elif not self.quote and (self.held in LITERALS or NUMBER.fullmatch(self.held)): self._word(self.held, out)
    self.quote = self.held = ""
    while self.open: out.append("}" if self.open.pop() == "{" else "]")
    self.done = True
    return "".join(out) if self.begun else "{}"

  def _value(self, text:str) -> str:
    """A value's beginning, with what stands before it"""
    if not self.open: return text
    comma, self.filled[-1] = ", " if self.filled[-1] else "", True
    key, self.key = "" if self.key is None else f"{self.key}: ", None
    return comma + key + text

  def _expects_key(self) -> bool: return self.open[-1] == "{" and self.key is None

  def _word(self, word:str, out:list[str]) -> None:
    if not self.open: return   # before the object: ```json for one
    if self._expects_key(): self.key = encode(word)
    else: out.append(self._value(LITERALS.get(word) or (word if NUMBER.fullmatch(word) else encode(word))))

  def _bracket(self, c:str, out:list[str]) -> None:
    """A quote, comma or bracket; a bracket that fits nowhere is dropped"""
    if c in "\"'":
      self.quote = c
      if not self.open or self._expects_key(): self.name = []
      else: out.append(self._value('"'))
    elif c == ",": self.key = None
    elif c in "{[":
      if c == "[" if not self.open else self._expects_key() or len(self.open) == MAX_DEPTH: return
      out.append(self._value(c))
      self.open.append(c)
      self.filled.append(False)
      self.begun = True
    elif (opened := "{" if c == "}" else "[") in self.open:
      self.key, last = None, ""
      while last != opened:
        last = self.open.pop()
        self.filled.pop()
        out.append("}" if last == "{" else "]")
      self.done = not self.open

  def _string(self, text:str, at:int, out:list[str]) -> int:
    """Reads on in a string; gives where it stands then. An escape that is not whole waits for more."""
    into = out if self.name is None else self.name
    if plain := PLAIN[self.quote].match(text, at):
      into.append(plain[0].replace('"', '\\"'))
      at = plain.end()
      if at == len(text): return at
    c = text[at]
    if c == self.quote:
      self.quote = ""
      if self.name is not None: self._named("".join(self.name), out)
      else: out.append('"')
      return at + 1
    if c != "\\":
      into.append(encode(c)[1:-1])
      return at + 1
    escape = ESCAPE.match(text, at, partial=True)
    found = escape or HALF.match(text, at, partial=True)
    if found is not None:
      if found.partial: self.held = text[at:]
      else: into.append(found[0] if escape else "\ufffd")
      return found.end()
    quoted = text[at + 1] == "'"
    into.append("'" if quoted else "\\\\")
    return at + 1 + quoted

  def _named(self, name:str, out:list[str]) -> None:
    self.name = None
    if self.open: self.key = f'"{name}"'
    else:   # the object was written as a string
      inner = Json()
      out.append(inner.push(json.loads(f'"{name}"')) + inner.close())
      self.begun = self.done = True

# ---- a value's type by its schema ----

ANY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
TYPES: dict[type, set[str]] = {str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, type(None): {"null"},
                               dict: {"object"}, list: {"array"}}

def pointed(ref:str, root:Any) -> Any:
  """What a reference like #/$defs/name leads to; None where to nothing"""
  for part in ref.removeprefix("#").split("/")[1:]: root = root.get(part) if isinstance(root, dict) else None
  return root

def resolved(schema:Any, root:Any) -> dict[str, Any]:
  """A schema, or what it refers to"""
  for _ in range(16):
    if not isinstance(schema, dict) or not isinstance(ref := schema.get("$ref"), str): break
    schema = pointed(ref, root)
  return schema if isinstance(schema, dict) else {}

def kinds(schema:Any, root:Any) -> frozenset[str]:
  """The JSON types that a schema allows, as far as it tells; root: the schema that its references lead into"""
  return _kinds(schema, root, set(), 16) or ANY

def _kinds(schema:Any, root:Any, seen:set[str], depth:int) -> frozenset[str]:
  if not isinstance(schema, dict) or depth == 0: return ANY
  if isinstance(ref := schema.get("$ref"), str):   # each once: they may go in circles
    if ref in seen: return frozenset()
    seen.add(ref)
    return _kinds(pointed(ref, root), root, seen, depth - 1)
  if "const" in schema: return frozenset(TYPES.get(type(schema["const"]), ANY))
  if isinstance(values := schema.get("enum"), list): return frozenset(t for v in values for t in TYPES.get(type(v), ANY))
  if "type" in schema:
    names = t if isinstance(t := schema["type"], list) else [t]
    return ANY.intersection(name for name in names if isinstance(name, str))
  for several in ("anyOf", "oneOf"):
    if isinstance(schema.get(several), list): return frozenset(k for s in schema[several] for k in _kinds(s, root, seen, depth - 1))
  return ANY

def depth(value:Any) -> int:
  """How many lists and dicts lie around the innermost value, and 1"""
  level, n = [value], 0
  while level: level, n = [x for v in level if isinstance(v, (list, dict)) for x in (v.values() if isinstance(v, dict) else v)], n + 1
  return n

def typed(text:str, allowed:frozenset[str]) -> str:
  """A value's text to JSON: what it is as JSON, where a type that is allowed; else a literal of Python's, else a string"""
  word = text.strip()
  try:
    value = decode(LITERALS.get(word, word))
    if depth(value) > MAX_DEPTH: raise ValueError("nested too deep")
  except ValueError:
    # an object or list that is none yet: half of one, or Python's
    if "string" in allowed or word[:1] not in ("{", "["): return encode(text)
    wrapped = Json()
    return encode(decode(wrapped.push('{"": ' + word) + wrapped.close())[""])
  if allowed.isdisjoint(TYPES[type(value)]):
    if "string" in allowed: return encode(text)
    if isinstance(value, str): return typed(value, allowed)   # encoded twice
  elif isinstance(value, str) and allowed != ANY: return encode(text)   # a string's quotes are its own
  return encode(value)

# ---- what a family is ----

@dataclass(frozen=True)
class Form:
  """How a family writes calls. signs: what its template holds, all of them. call: the mark that begins one; section: the mark before the first, if
  there is one; ends: those that close either; inner: those inside a call. read(parser, said) reads a call, of which `said` has been read, and gives
  None; or, where it is no call, all that was read and the mark that followed. write(grammar, tool, schema) is a rule of what follows `call`."""
  name: str
  signs: tuple[str, ...]
  read: Callable[[Parser, str], Steps]
  write: Callable[[Lark, str, dict[str, Any]], str]
  call: str
  ends: tuple[str, ...]
  inner: tuple[str, ...] = ()
  section: str = ""
  between: str = ""   # two calls
  words: int = 1   # before the arguments, the last of them the name
  named: Callable[[str], tuple[str, str|None]] = lambda word: (word, None)   # that word to a name and the call's id

@dataclass(frozen=True)
class Family:
  """A form of calls, or none, and the ids of its marks in a vocabulary. as_text: the template wants the arguments of past calls as JSON text."""
  form: Form|None
  ids: dict[str, int] = field(default_factory=dict)
  as_text: bool = False

# ---- how each is read and written ----

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"

def read_tagged(p:Parser, said:str) -> Steps:
  """name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>. An argument lacking a mark is read all the same; stray marks are dropped."""
  text, mark = yield from p.until(p.all, p.may_be_named)
  while mark == p.form.call and not text.strip():   # begun twice
    said += text + mark
    text, mark = yield from p.until(p.all, p.may_be_named)
  name, key, sent = text.strip(), "", set[str]()
  if name not in p.tools and mark in (KEY_END, VALUE): name, key = p.glued(name)
  if name not in p.tools or mark in (OPEN, CLOSE, END): return said + text, mark
  yield p.begin(name)
  while True:
    text = ""
    if key and mark in (KEY_END, VALUE):
      mark = yield from p.value(name, key, mark, sent)
      key = ""
    elif mark in p.outer: break
    elif mark == KEY:
      key, mark = yield from p.until(p.tags)
      key = key.strip()
    else:   # nothing, or a key whose mark lacks
      text, mark = yield from p.until(p.all)
      key = text.strip()
      if mark in p.outer: break
  yield p.send("}" if sent else "{}")
  yield p.end()
  yield from p.leave(text, mark)

NO_KEY = r"/[^<\s]+/"   # of a schema that has none

def write_tagged(g:Lark, tool:str, schema:dict[str, Any]) -> str:
  properties, more, required = schema.get("properties"), schema.get("additionalProperties"), schema.get("required")
  required = [k for k in required if isinstance(k, str)] if isinstance(required, list) else []
  if tool in g.strict and (lacks := {"$ref", "anyOf", "oneOf", "allOf", "patternProperties"} & schema.keys()):
    raise ValueError(f"tool {tool}: strict: {', '.join(sorted(lacks))}: expected properties alone, found these around them")
  parts = []
  for key in dict.fromkeys([*(known := properties if isinstance(properties, dict) else {}), *required]):
    part = g.argument(tool, g.text(key), known.get(key, more), schema)
    parts.append(part if key in required else f"({part})?")
  if properties is None and more is not False: parts.append(f"({g.argument(tool, NO_KEY, more, schema)})*")
  return " ".join([g.text(tool), *parts, g.mark("</tool_call>")])

MAX_NAME = 256
WHOLE_NAME = re.compile(r"\s*([^\s`{]+)[\s`{]")   # with what follows it
NAME_FIRST = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*")')
THEN_ARGUMENTS = re.compile(r', "(?:arguments|parameters)": ')

def read_json(p:Parser, said:str) -> Steps:
  """What stands before the arguments' JSON, then that. DeepSeek-R1 and V3: function<｜tool▁sep｜>name```json; V3.1: name<｜tool▁sep｜>; Kimi:
  functions.name:number<|tool_call_argument_begin|>."""
  for n in range(p.form.words):
    text, mark = yield from p.until(p.all, lambda text: len(text) < MAX_NAME and not WHOLE_NAME.match(text))
    last, said = n == p.form.words - 1, said + text
    follows = (*p.form.inner, *p.form.ends, "") if last else p.form.inner
    if (word := WHOLE_NAME.match(text + " ")) is None or mark not in follows: return said, mark
    if not last: said += mark
  name, call_id = p.form.named(word[1])
  if name not in p.tools: return said, mark
  yield p.begin(name, call_id)
  arguments = Json()
  p.marked.text = text[word.end(1):] + p.marked.text
  while not (arguments.done or mark in p.outer):
    sent, _, mark = yield from p.feed(arguments)
    if sent: yield p.send(sent)
  if rest := arguments.close(): yield p.send(rest)
  yield p.end()
  yield from p.finish(mark)

def write_r1(g:Lark, tool:str, schema:dict[str, Any]) -> str:
  before, after = g.text(f"{tool}\n```json\n"), g.text("\n```")
  return " ".join([g.text("function"), g.mark(*g.form.inner), before, g.arguments(tool, schema), after, g.mark(g.form.ends[0])])

def write_v31(g:Lark, tool:str, schema:dict[str, Any]) -> str:
  return " ".join([g.text(tool), g.mark(*g.form.inner), g.arguments(tool, schema), g.mark(g.form.ends[0])])

def read_object(p:Parser, said:str) -> Steps:
  """{"name": …, "arguments": {…}}. Its text is set anew (Json), so that what it begins with is known; in another order it is read whole."""
  text, mark = yield from p.until(p.all, str.isspace)
  if not text.lstrip().startswith("{"): return said + text, mark
  p.marked.text = text + p.marked.text
  call, arguments, text, name, at = Json(), Json(), "", None, None
  while not (call.done or mark in p.outer):
    more, raw, mark = yield from p.feed(call, by_quotes=name is None)
    if call.done or mark in p.outer: more += call.close()
    text += more
    if name is None:
      said += raw
      if first := NAME_FIRST.match(text):
        if (name := decode(first[1])) not in p.tools: return said, mark
        yield p.begin(name)
    if name is not None and not arguments.done:
      if at is None and (then := THEN_ARGUMENTS.match(text, first.end())): at, more = then.end(), text[then.end():]
      if at is not None:
        if sent := arguments.push(more): yield p.send(sent)
        if arguments.done: yield p.end()
  if name is None:
    if not isinstance(name := decode(text).get("name"), str) or name not in p.tools: return said, mark
    yield p.begin(name)
  if not arguments.done:
    if at is None:
      whole = decode(text)
      yield p.send(arguments.push(encode(whole.get("arguments", whole.get("parameters")))) + arguments.close())
    elif sent := arguments.close(): yield p.send(sent)
    yield p.end()
  yield from p.finish(mark)

def write_object(g:Lark, tool:str, schema:dict[str, Any]) -> str:
  before = f'\n{{"name": {encode(tool)}, "arguments": '
  return " ".join([g.text(before), g.arguments(tool, schema), g.text("}\n"), g.mark("</tool_call>")])

def kimi_name(word:str) -> tuple[str, str|None]:
  parts = re.fullmatch(r"(functions\.)?(.+?)(:[0-9]+)?", word)
  return parts[2], word if parts[1] and parts[3] else None

def write_kimi(g:Lark, tool:str, schema:dict[str, Any]) -> str:
  return " ".join([g.text(f"functions.{tool}:"), "/[0-9]{1,4}/", g.mark(*g.form.inner), g.arguments(tool, schema), g.mark(g.form.ends[0])])

DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"
FORMS = (
  Form("GLM", (KEY, VALUE), read_tagged, write_tagged, "<tool_call>", ("</tool_call>",), (KEY, KEY_END, VALUE, VALUE_END)),
  Form("Kimi", ("<|tool_call_argument_begin|>",), read_json, write_kimi, "<|tool_call_begin|>", ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
       ("<|tool_call_argument_begin|>",), "<|tool_calls_section_begin|>", named=kimi_name),
  Form("DeepSeek-R1", (DEEPSEEK[0], "```json"), read_json, write_r1, DEEPSEEK[1], DEEPSEEK[2:4], DEEPSEEK[4:], DEEPSEEK[0], "\n", words=2),
  Form("DeepSeek-V3.1", DEEPSEEK[:1], read_json, write_v31, DEEPSEEK[1], DEEPSEEK[2:4], DEEPSEEK[4:], DEEPSEEK[0]),
  Form("hermes", ("<tool_call>", '"name"', '"arguments"'), read_object, write_object, "<tool_call>", ("</tool_call>",)),
)

def family_of(template:str, tokenizer:Tokenizer) -> Family:
  """The family that a chat template writes calls for; one without a form where it knows none of ours"""
  bare = template.replace("\\", "")   # a quote in quotes has one before it
  form = next((f for f in FORMS if all(sign in bare for sign in f.signs)), None)
  if form is None: return Family(None)
  marks = (OPEN, CLOSE, form.call, *form.ends, *form.inner, *filter(None, [form.section]))
  return Family(form, {m: tokenizer.special_tokens[m] for m in marks if m in tokenizer.special_tokens}, _as_text(template))

def _as_text(template:str) -> bool:
  """Whether only arguments as text become the JSON that they are"""
  def shown(arguments:Any) -> bool:
    call = {"id": "functions.name:0", "type": "function", "function": {"name": "name", "arguments": arguments}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try: return '{"key": "value"}' in Template(template).render({"messages": messages, "bos_token": "", "eos_token": ""})
    except Exception: return False   # a template may fail in any way that Python knows
  return shown('{"key": "value"}') and not shown({"key": "value"})

# ---- the parser ----

class Parser:
  """An answer's tokens to events, as they come: pieces of reasoning and of the answer, and calls. tools: name -> JSON schema of its parameters.
  Without tools, or for a family without a form, calls are text. prompt: the ids before the answer. calls: how many have begun. Blanks around
  reasoning and calls are dropped, others are kept."""
  def __init__(self, tokenizer:Tokenizer, family:Family, tools:dict[str, Any], prompt:list[int]):
    self.tools, self.calls, self.ids = tools, 0, set[str]()
    self.blanks, self.trim = "", False   # not sent yet; whether what comes next loses the blanks it begins with
    if family.form is None or not tools: self.reasoning = Reasoning(tokenizer, prompt)
    else:
      self.form = f = family.form
      begins = (f.call, f.section) if f.section else (f.call,)
      self.reasoning = Reasoning(tokenizer, prompt, begins, (*f.ends, *f.inner), self._read)
      self.marked = marked = self.reasoning.marked
      self.begins, self.outer = (*begins, OPEN, END), (*begins, *f.ends, OPEN, CLOSE, END)
      self.all, self.tags = marked.watch(OPEN, CLOSE, *begins, *f.ends, *f.inner), marked.watch(*begins, *f.ends, *f.inner)
      self.inside = marked.watch(*f.ends, *f.inner)                                           # in an argument's value
      self.by_id = marked.watch(*marked.ids)                                                  # in JSON
      self.control = marked.watch(*(m for m, i in marked.ids.items() if i in tokenizer.control))   # in a string of it
    self.trim = tokenizer.decode(prompt[-len(CLOSE) - 8:]).rstrip().endswith((OPEN, CLOSE))

  def push(self, token:int) -> list[Event]:
    events = self.reasoning.push(token)
    return list(self._trimmed(events)) if events else events

  def flush(self) -> list[Event]:
    """What was held back, at the end. A call that has begun is completed."""
    events = list(self._trimmed(self.reasoning.flush()))
    return events + [Piece(self.reasoning.kind, self.blanks)] if self.blanks else events

  def _trimmed(self, events:list) -> Iterator[Event]:
    for event in events:
      if not isinstance(event, Piece):
        self.blanks, self.trim = "", True
        yield event
      elif event.kind == MARK: self.blanks, self.trim = "", True
      else:
        text = self.blanks + event.text
        if self.trim: text = text.lstrip()
        shown = text.rstrip()
        self.blanks = text[len(shown):]
        if shown:
          self.trim = False
          yield Piece(event.kind, shown)

  def _read(self, mark:str) -> Steps:
    """A call, or what began like one, from its first mark on"""
    said, failed = mark, None
    if mark == self.form.section:
      text, mark = yield from self.until(self.all, str.isspace)
      said += text
      if mark == self.form.call: said += mark
      else: failed = said, mark
    if failed is None: failed = yield from self.form.read(self, said)
    if failed is not None:
      said, self.marked.back = failed
      if said: yield Piece(self.reasoning.kind, said)
      return
    while True:   # stray marks behind it
      text, mark = yield from self.marked.take(self.all)
      if text.strip(): self.marked.text = text + self.marked.text
      elif mark in self.begins: self.marked.back = mark
      else: continue
      return

  # ---- for a form's read ----

  def until(self, watch:Watch, goes_on:Callable[[str], bool]=lambda text: True) -> Steps:
    """(the text before the next mark, it); without a mark where the text does not go on"""
    said, mark = "", ""
    while not mark:
      text, mark = yield from self.marked.take(watch)
      said += text
      if not mark and not goes_on(said): break
    return said, mark

  def feed(self, into:Json, by_quotes:bool=False) -> Steps:
    """Reads on in it, by_quotes: up to a quote. Gives (what it gives, what was read, ""), or ("", "", mark). Marks in its strings are text, but for
    control tokens."""
    if into.rest:   # a mark, or but a "<", which is dropped
      into.rest = ""
      text, mark = yield from self.marked.take(self.all)
      self.marked.text = text[1:] + self.marked.text
      return "", text[:1], mark
    text, mark = yield from self.marked.take(self.control if into.quote else self.by_id)
    if mark: return "", "", mark
    if by_quotes and (quote := re.search("[\"']", text)):
      self.marked.text = text[quote.end():] + self.marked.text
      text = text[:quote.end()]
    sent = into.push(text)
    self.marked.text = into.rest + self.marked.text
    return sent, text.removesuffix(into.rest), ""

  def begin(self, name:str, call_id:str|None=None) -> CallBegins:
    self.reasoning.kind, self.calls = ANSWER, self.calls + 1
    if call_id in self.ids: call_id = None   # the model's numbers may repeat
    elif call_id is not None: self.ids.add(call_id)
    return CallBegins(self.calls - 1, name, call_id)
  def send(self, text:str) -> CallArguments: return CallArguments(self.calls - 1, text)
  def end(self) -> CallEnds: return CallEnds(self.calls - 1)

  def properties(self, name:str) -> dict[str, Any]:
    found = self.tools[name].get("properties") if isinstance(self.tools[name], dict) else None
    return found if isinstance(found, dict) else {}

  def may_be_named(self, text:str) -> bool:
    """Whether it is the beginning of a tool's name; or a name and the beginning of a key, whose mark lacks"""
    said = text.strip()
    def key(name:str) -> bool: return said.startswith(name) and any(k.startswith(said[len(name):].strip()) for k in self.properties(name))
    return any(name.startswith(said) or key(name) for name in self.tools)

  def glued(self, said:str) -> tuple[str, str]:
    """A tool's name and a key of it, where nothing stands between them"""
    for name in sorted(self.tools, key=len, reverse=True):
      if said.startswith(name) and (key := said[len(name):].strip()) in self.properties(name): return name, key
    return "", ""

  def value(self, name:str, key:str, mark:str, sent:set[str]) -> Steps:
    """An argument's value from the mark before it on; gives the mark behind it. A key that came before is dropped. sent: the keys so far."""
    while mark == KEY_END:
      text, mark = yield from self.until(self.tags, str.isspace)
      if not mark: self.marked.text = text.lstrip() + self.marked.text   # the value, without its mark
    if mark not in ("", VALUE): return mark
    root = self.tools[name]
    allowed = kinds(self.properties(name).get(key, root.get("additionalProperties") if isinstance(root, dict) else None), root)
    drop, raw, parts = key in sent, allowed == {"string"}, list[str]()
    if not drop: yield self.send(("{" if not sent else ", ") + encode(key) + (': "' if raw else ": "))
    sent.add(key)
    begun = False
    while True:
      text, mark = yield from self.marked.take(self.inside)
      if mark == VALUE:
        if not begun: continue
        text, mark = VALUE, ""
      if mark: break
      begun = True
      if not raw: parts.append(text)
      elif not drop: yield self.send(encode(text)[1:-1])
    if not drop: yield self.send('"' if raw else typed("".join(parts), allowed))
    return mark

  def leave(self, text:str, mark:str) -> Steps:
    """What stands behind a call: dropped where a mark ends it, else text"""
    if mark in self.form.ends: return
    if text.strip(" \t\r\n`}"): yield Piece(ANSWER, text)
    self.marked.back = mark

  def finish(self, mark:str) -> Steps:
    """What stands behind a call's JSON, up to a mark"""
    text = ""
    if mark not in self.outer: text, mark = yield from self.until(self.all)
    yield from self.leave(text, mark)

# ---- grammars ----

class Lark:
  """Rules in llguidance's Lark for a family's calls. strict: the tools whose schemas hold to the letter; of others', what llguidance lacks is left
  out."""
  def __init__(self, family:Family, strict:Container[str]):
    self.form, self.ids, self.strict, self.rules = family.form, family.ids, strict, list[str]()

  def rule(self, body:str, attributes:str="") -> str:
    name = f"r{len(self.rules)}"
    self.rules.append(f"{name}{attributes}: {body}")
    return name

  def mark(self, mark:str) -> str: return f"<[{self.ids[mark]}]>" if mark in self.ids else self.text(mark)
  def text(self, text:str) -> str: return json.dumps(text, ensure_ascii=False)
  def regex(self, *marks:str) -> str: return "|".join(re.escape(m).replace("/", "\\/") for m in marks)

  def until(self, regex:str, mark:str) -> str:
    """Text of a regular expression, and the mark that ends it"""
    if mark in self.ids: return f"{regex} {self.mark(mark)}"
    others = self.regex(*(m for m in (*self.form.inner, *self.form.ends) if m not in (mark, VALUE)))
    terminal = f"T{len(self.rules)}"
    self.rules.append(f"{terminal}: {regex} & ~/(?s:.*)({others})(?s:.*)/")
    return self.rule(terminal, f"[suffix={self.text(mark)}]")

  def json(self, tool:str, schema:Any, root:Any) -> str:
    """As templates write it: on one line, blanks behind commas and colons"""
    own = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": tool not in self.strict}
    shared = {k: root[k] for k in ("$defs", "definitions") if k in root}
    return self.rule("%json " + json.dumps({**shared, **(schema if isinstance(schema, dict) else {}), "x-guidance": own}))

  def arguments(self, tool:str, schema:dict[str, Any]) -> str: return self.json(tool, {"type": "object", **schema}, schema)

  def argument(self, tool:str, key:str, schema:Any, root:dict[str, Any]) -> str:
    return f"{self.mark(KEY)} {key} {self.mark(KEY_END)} {self.mark(VALUE)} {self.value(tool, schema, root)}"

  def value(self, tool:str, schema:Any, root:dict[str, Any]) -> str:
    """A value that is written without quotes where it may be a string"""
    allowed, own = kinds(schema, root), resolved(schema, root)
    if "string" not in allowed: return f"{self.json(tool, schema, root)} {self.mark(VALUE_END)}"
    values = [own["const"]] if "const" in own else own.get("enum")
    if isinstance(values, list):
      texts = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
      return f"({' | '.join(self.text(t) for t in texts if t)}){'' if all(texts) else '?'} {self.mark(VALUE_END)}"
    if tool in self.strict and (lacks := {"pattern", "format"} & own.keys() or allowed != ANY and {"object", "array"} & allowed):
      raise ValueError(f"tool {tool}: strict: {', '.join(sorted(lacks))}: this model's calls cannot be held to it where a string may stand")
    least, most = own.get("minLength", 0), own.get("maxLength", "")
    return self.until(f"/(?s:.){{{least},{most}}}/" if least or most != "" else "/(?s:.*)/", VALUE_END)

def call_grammar(family:Family, tools:dict[str, Any], choice:str="required", parallel:bool=True, strict:Container[str]=(),
                 thinks:bool=False) -> tuple[str, str]:
  """The kind and source of a grammar that an answer is held to, from behind its reasoning on. tools: name -> JSON schema of its parameters. choice:
  "required"; "=name", that tool; "auto", text and then calls if any. parallel: several calls may come. thinks: the model may open reasoning
  itself first. Raises ValueError where a strict tool's schema cannot be held, and for a family without a form."""
  if (form := family.form) is None: raise ValueError("the model's chat template has no form of calls that is known")
  if choice.startswith("="): tools = {choice[1:]: tools[choice[1:]]}
  g = Lark(family, strict)
  written = [g.rule(form.write(g, name, schema if isinstance(schema, dict) else {})) for name, schema in tools.items()]
  one = f"({' | '.join(written)})"
  rest = one + (f" ({g.text(form.between) if form.between else ''} {g.mark(form.call)} {one})*" if parallel else "")
  if form.section: rest = f"{g.mark(form.call)} {rest} {g.mark(form.ends[-1])}"
  first = form.section or form.call
  thought = ""
  if thinks: thought = f"({g.mark(OPEN)} {g.until('/(?s:.*)/', CLOSE)})? "
  if choice != "auto": start = f"{thought}GAP? {g.mark(first)} {rest}"
  elif first in g.ids: start = f"{thought}TEXT ({g.mark(first)} {rest})?"
  else: start = f"{thought}(TEXT | {g.rule(f'/(?s:.*){g.regex(first)}/', '[lazy]')} {rest})"
  return "lark", "\n".join([f"start: {start}", *g.rules, "TEXT: /(?s:.*)/", r"GAP: /\n{1,2}/", ""])

# ---- messages ----

def tools_in_history(messages:list[Any], as_text:bool=False) -> list[Any]:
  """Messages as templates read them. The arguments of calls are dicts, or JSON texts where the template wants those (Family.as_text). The reasoning
  that some clients send becomes reasoning_content. Raises MessageError for arguments that are no JSON object; what else may be wrong with a
  message, Chat.render tells."""
  return [_read_message(m, f"message {n}", as_text) if isinstance(m, dict) and m.get("role") == "assistant" else m for n, m in enumerate(messages)]

def _read_message(message:dict[str, Any], where:str, as_text:bool) -> dict[str, Any]:
  read = {k: v for k, v in message.items() if k != "reasoning"}
  if read.get("reasoning_content") is None and (thought := message.get("reasoning")) is not None: read["reasoning_content"] = thought
  if isinstance(calls := message.get("tool_calls"), list):
    read["tool_calls"] = [_read_call(call, f"{where}: tool call {n}", as_text) for n, call in enumerate(calls)]
  return read

def _read_call(call:Any, where:str, as_text:bool) -> Any:
  if not isinstance(call, dict) or not isinstance(function := call.get("function", call), dict): return call
  arguments, error = function.get("arguments"), MessageError(f"{where}: arguments: expected a JSON object")
  if arguments is None or isinstance(arguments, str) and not arguments.strip(): arguments = {}
  try: arguments = decode(arguments) if isinstance(arguments, str) else arguments
  except ValueError: raise error from None
  if not isinstance(arguments, dict): raise error
  function = {**function, "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments}
  return {**call, "function": function} if "function" in call else function
