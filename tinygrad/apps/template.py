"""Chat templates as untrusted programs: Jinja's syntax, read by jinja2's parser, run by closures that count their steps.

A template comes with a file and may be anything. It reaches text, numbers, lists, dicts, macros, and the filters, tests, methods and functions of
the tables below, and nothing else. Work that grows with its data is paid for from one budget before it is done. So a rendering ends after a bounded
number of steps, which bounds its memory too. Nothing is evaluated when a template is loaded. Values mean what jinja2 (autoescape off) makes of
them. chat.py is the caller.

In order: the budget (Run), operators, methods, filters, tests, functions, then a closure for each kind of node, and Template."""
from __future__ import annotations
import datetime, json, operator, re
from typing import Any, Callable
import jinja2, jinja2.ext, jinja2.filters, jinja2.tests, markupsafe
from jinja2 import nodes
from jinja2.runtime import LoopContext, Undefined

MAX_SOURCE = 1 << 16           # characters: four times the longest template in use
MAX_DEPTH = 100                # nodes inside nodes (real templates have up to 30), lists inside lists
MAX_CALLS = 50                 # macros inside macros
STEPS, PER_INPUT = 1 << 20, 32 # the budget: so many steps, and so many more for each step that reading the variables takes
MAX_INT = 1 << 256

class TemplateError(Exception):
  """A text that is no template, or a template that does what none may. str(e) is one line."""
class Refusal(Exception):
  """The template's own objection to the messages (raise_exception)."""

class Run:
  """One rendering: the steps that are left, the text written so far. A step is a node evaluated, an element of a list or four characters."""
  __slots__ = ("left", "out", "calls")
  def __init__(self, steps: int): self.left, self.out, self.calls = steps, list[str](), 0
  def spend(self, steps: int):
    self.left -= steps
    if self.left < 0: raise TemplateError("more work than a template may make of these messages")
  def weigh(self, value: Any, pad: int = 0, depth: int = 1):
    """Spends what writing or comparing a value can cost; a list that holds another one twice costs it twice. pad: characters of an indent."""
    kind = type(value)
    self.spend(1 + (len(value) + pad * depth >> 2) if kind is str else 1 + (pad * depth >> 2))
    if depth > MAX_DEPTH: raise TemplateError(f"a value nested more than {MAX_DEPTH} deep")
    if kind is list or kind is tuple:
      for x in value: self.weigh(x, pad, depth + 1)
    elif kind is dict:
      for k, x in value.items():
        self.weigh(k, pad, depth + 1)
        self.weigh(x, pad, depth + 1)
  def text(self, value: Any) -> str:
    if type(value) is str: return value
    if type(value) in CONTAINERS: self.weigh(value)
    return str(value)
  def items(self, value: Any) -> Any:
    """The value, if a loop may go over it; spends its length."""
    if type(value) not in ITERABLE: raise TypeError(f"{type(value).__name__!r} object is not iterable")
    self.spend(len(value))
    return value
  def write(self, text: str):
    self.spend(len(text))  # dearer than text kept: what is written is cut into tokens next
    self.out.append(text)
  def capture(self, body: "Statement", s: "Scope") -> str:
    held, self.out, self.calls = self.out, [], self.calls + 1
    body(self, s)
    text, self.out, self.calls = "".join(self.out), held, self.calls - 1
    return text

Scope = dict[str, Any]
Expression = Callable[[Run, Scope], Any]
Statement = Callable[[Run, Scope], Any]   # gives None, BREAK or CONTINUE
BREAK, CONTINUE = "break", "continue"
BLOCK = ""                                # the variable that holds a block's text for its filters: no template can write that name
CONTAINERS = (list, tuple, dict)
ITERABLE = (str, list, tuple, dict, range, Undefined)

class Function:
  """What a template may call: call(run, *args, **kwargs). Nothing that comes from outside is one."""
  def __init__(self, call: Callable): self.call = call
  def __repr__(self): return "<function>"
class Namespace:
  def __init__(self, values: Scope): self.values = values
  def __repr__(self): return "<namespace>"

# *** operators

def _number(value: Any) -> Any:
  if type(value) is int and not -MAX_INT < value < MAX_INT or type(value) is complex: raise TemplateError("a number above 2**256 or a complex one")
  return value
def _add(r: Run, a: Any, b: Any) -> Any:
  if type(a) is type(b) and type(a) in (str, list, tuple): r.spend(len(a) + len(b) >> (2 if type(a) is str else 0))
  return _number(a + b)
def _mul(r: Run, a: Any, b: Any) -> Any:
  for x, n in ((a, b), (b, a)):
    if type(x) in (str, list, tuple) and isinstance(n, int): r.spend(len(x) * max(n, 0))
  return _number(a * b)
def _pow(r: Run, a: Any, b: Any) -> Any:
  if isinstance(b, (int, float)) and abs(b) > 256: raise TemplateError("a power above 256")
  return _number(a ** b)
def _mod(r: Run, a: Any, b: Any) -> Any:
  if type(a) is not str: return a % b
  if "%" in PERCENT.sub("", a): raise TemplateError("a % format of another form than %s and %05.2f")
  r.spend(len(a) * 32)  # each % may bring a field of 99 characters
  r.weigh(b)
  return a % b
def _dict_key(key: Any) -> str | int:
  if type(key) is str or type(key) is int and abs(key) < 1 << 31: return key
  raise TypeError(f"expected text or a small number for a dict's key, found {type(key).__name__}")  # others can be chosen to share one hash
def _plain(op: Callable) -> Callable: return lambda r, a, b: _number(op(a, b))
def _compare(op: Callable) -> Callable:
  def run(r: Run, a: Any, b: Any) -> bool:
    if type(a) is str and type(b) is str: r.spend(min(len(a), len(b)) >> 2)
    elif type(a) in CONTAINERS and type(b) in CONTAINERS:
      r.weigh(a)
      r.weigh(b)
    return op(a, b)
  return run
def _within(r: Run, a: Any, b: Any) -> bool:
  if type(b) is dict: r.weigh(a)
  elif type(b) is str: r.spend(len(b) >> 2)
  elif type(b) in CONTAINERS:
    r.weigh(a)
    r.weigh(b)
  elif type(b) not in ITERABLE: raise TypeError(f"{type(b).__name__!r} object holds nothing")
  return a in b
PERCENT = re.compile(r"%[-+ #0]*\d{0,2}(?:\.\d{1,2})?[sdifgGeExXr%]")
FIELD = re.compile(r"\{\{|\}\}|\{\w*(?::[<>=^]?[-+ ]?0?\d{0,2},?(?:\.\d{1,2})?[a-zA-Z%]?)?\}")
BINARY = {nodes.Add: _add, nodes.Mul: _mul, nodes.Pow: _pow, nodes.Mod: _mod, nodes.Sub: _plain(operator.sub), nodes.Div: _plain(operator.truediv),
          nodes.FloorDiv: _plain(operator.floordiv)}
COMPARE = {n: _compare(getattr(operator, n)) for n in ("eq", "ne", "lt", "le", "gt", "ge")}
COMPARE |= {"lteq": COMPARE["le"], "gteq": COMPARE["ge"], "in": _within, "notin": lambda r, a, b: not _within(r, a, b)}

# *** methods: each takes the run and the object

def _of_text(name: str, per_char: int = 16) -> Callable:
  """A method of str whose result is no longer than the text. per_char: 64ths of a step that a character of the text costs; each character of the
  arguments adds one, since backward searches and sets of characters take that long."""
  method = getattr(str, name)
  def run(r: Run, s: str, /, *args: Any, **kw: Any) -> Any:
    for x in (*args, *kw.values()): r.weigh(x)
    r.spend(len(s) * (per_char + sum(len(x) for x in args if type(x) is str)) >> 6)
    return method(s, *args, **kw)
  return run
def _replace(r: Run, s: str, old: str, new: str, count: int = -1) -> str:
  hits = s.count(old)
  r.spend(len(s) + len(new) * (hits if count < 0 else min(hits, count)) >> 2)
  return s.replace(old, new, count)
def _join(r: Run, sep: str, parts: Any) -> str:
  parts = [r.text(x) for x in r.items(parts)]
  r.spend(len(sep) * len(parts) + sum(map(len, parts)) >> 2)
  return sep.join(parts)
def _strict_join(r: Run, sep: str, parts: Any) -> str:
  if wrong := [x for x in r.items(parts) if type(x) is not str]: raise TypeError(f"expected text to join, found {type(wrong[0]).__name__}")
  return _join(r, sep, parts)
def _format(r: Run, form: str, /, *args: Any, **kw: Any) -> str:
  left = FIELD.sub("", form)
  if "{" in left or "}" in left: raise TemplateError("a format of another form than {}, {name} and {:05.2f}")
  for _ in range(form.count("{")): r.weigh([args, kw])
  r.spend(len(form) * 32)
  return form.format(*args, **kw)
def _append(r: Run, x: list, value: Any): x.append(value)
def _pop(r: Run, x: list, at: int = -1) -> Any:
  r.spend(len(x) >> 4)
  return x.pop(at)
def _get(r: Run, d: dict, key: Any, default: Any = None) -> Any:
  r.weigh(key)
  return d.get(key, default)
def _pairs(r: Run, d: dict) -> list: return [(k, d[k]) for k in r.items(d)]

METHODS: dict[type, dict[str, Callable]] = {
  str: {n: _of_text(n) for n in (
         "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower", "isnumeric", "isspace",
         "isupper", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rstrip", "startswith",
         "strip", "swapcase", "title", "upper")} |
       {n: _of_text(n, 64) for n in ("split", "rsplit", "splitlines")} | {"replace": _replace, "join": _strict_join, "format": _format},
  dict: {"items": _pairs, "keys": lambda r, d: list(r.items(d)), "values": lambda r, d: [d[k] for k in r.items(d)], "get": _get},
  list: {"append": _append, "pop": _pop},  # Kimi-K2's keeps a queue of calls
}
LOOP = {"index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem", "depth", "depth0"}
LOOP_METHODS = {"cycle": lambda r, loop, *args: loop.cycle(*args), "changed": lambda r, loop, *args: r.weigh(list(args)) or loop.changed(*args)}

def _bound(call: Callable, x: Any) -> Function: return Function(lambda r, /, *args, **kw: call(r, x, *args, **kw))
def _attribute(r: Run, x: Any, name: str) -> Any:
  kind = type(x)
  if (method := METHODS.get(kind, {}).get(name)) is not None: return _bound(method, x)
  if kind is dict: return x[name] if name in x else Undefined(obj=x, name=name)
  if kind is Undefined: x._fail_with_undefined_error()
  if kind is Namespace and name in x.values: return x.values[name]
  if kind is LoopContext:
    if name in LOOP: return getattr(x, name)
    if name in LOOP_METHODS: return _bound(LOOP_METHODS[name], x)
  return Undefined(obj=x, name=name)
def _item(r: Run, x: Any, key: Any) -> Any:
  if type(x) is Undefined: x._fail_with_undefined_error()
  r.weigh(key)
  if type(x) in ITERABLE:
    try: return x[key]
    except (TypeError, LookupError): pass
  return _attribute(r, x, key) if type(key) is str else Undefined(obj=x, name=key)
def _slice(r: Run, x: Any, start: Any, stop: Any, step: Any) -> Any:
  if type(x) is Undefined: x._fail_with_undefined_error()
  if type(x) not in (str, list, tuple, range): raise TypeError(f"{type(x).__name__!r} object cannot be cut")
  cut = slice(start, stop, step)
  r.spend(len(range(*cut.indices(len(x)))))
  return x[cut]
def _getter(r: Run, path: Any, default: Any = None) -> Callable[[Any], Any]:
  """A function for a filter's attribute: a name, an index, or several with dots between; None is the value itself."""
  if type(path) is str: r.spend(len(path))
  keys = [] if path is None else [int(k) if k.isdigit() else k for k in path.split(".")] if type(path) is str else [path]
  def get(x: Any) -> Any:
    for k in keys: x = default if isinstance(value := _item(r, x, k), Undefined) and default is not None else value
    return x
  return get

# *** filters: each takes the run and the value; tests give a truth

def _tojson(r: Run, x: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False) -> str:
  pad = len(indent) if type(indent) is str else indent or 0
  if not 0 <= pad <= 16 or separators is not None and sum(map(len, separators)) > 16: raise TemplateError("tojson: an indent or separators above 16")
  r.weigh(x, pad)
  return json.dumps(x, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators and tuple(separators), sort_keys=bool(sort_keys))
def _indent(r: Run, s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> str:
  s, size = r.text(s), len(width) if type(width) is str else max(width, 0)
  r.spend(len(s) + size)
  r.spend(len(s.splitlines()) * size >> 2)
  return jinja2.filters.do_indent(s, width, first, blank)
def _round(r: Run, x: Any, precision: int = 0, method: str = "common") -> Any:
  if abs(precision) > 64: raise TemplateError("round: a precision above 64")
  return _number(jinja2.filters.do_round(x, precision, method))
def _key(r: Run, case_sensitive: Any, attribute: Any = None) -> Callable[[Any], Any]:
  get = _getter(r, attribute)
  return lambda x: v.lower() if isinstance(v := get(x), str) and not case_sensitive else v
def _sorted(r: Run, x: Any, key: Callable, reverse: Any) -> list:
  before = r.left
  r.weigh(x := list(r.items(x)))
  r.spend((before - r.left) * len(x).bit_length())  # so often each is compared
  return sorted(x, key=key, reverse=bool(reverse))
def _sort(r: Run, x: Any, reverse: Any = False, case_sensitive: Any = False, attribute: Any = None) -> list:
  return _sorted(r, x, _key(r, case_sensitive, attribute), reverse)
def _dictsort(r: Run, x: dict, case_sensitive: Any = False, by: str = "key", reverse: Any = False) -> list:
  return _sorted(r, _pairs(r, x), _key(r, case_sensitive, ("key", "value").index(by)), reverse)
def _unique(r: Run, x: Any, case_sensitive: Any = False, attribute: Any = None) -> list:
  key, seen = _key(r, case_sensitive, attribute), {}
  for v in r.items(x):
    r.weigh(v)
    seen.setdefault(repr(key(v)), v)
  return list(seen.values())
def _extreme(most: Callable) -> Callable:
  def run(r: Run, x: Any, case_sensitive: Any = False, attribute: Any = None) -> Any:
    r.weigh(x := list(r.items(x)))
    return most(x, key=_key(r, case_sensitive, attribute)) if x else Undefined("no element of an empty sequence")
  return run
def _sum(r: Run, x: Any, attribute: Any = None, start: Any = 0) -> Any:
  get = _getter(r, attribute)
  for v in r.items(x): start = _add(r, start, get(v))
  return start
def _map(r: Run, x: Any, /, *args: Any, **kw: Any) -> list:
  if args:
    call = _known(FILTERS, "filter", args[0])
    return [call(r, v, *args[1:], **kw) for v in r.items(x)]
  if "attribute" not in kw or kw.keys() - {"attribute", "default"}: raise TypeError("map: expected the name of a filter, or attribute and default")
  return [*map(_getter(r, kw["attribute"], kw.get("default")), r.items(x))]
def _select(keep: bool, by_attribute: bool) -> Callable:
  def run(r: Run, x: Any, /, *args: Any) -> list:
    if by_attribute and not args: raise TypeError("expected the name of an attribute")
    get = _getter(r, args[0] if by_attribute else None)
    args = args[by_attribute:]
    test = _known(TESTS, "test", args[0]) if args else lambda r, v: bool(v)
    return [v for v in r.items(x) if bool(test(r, get(v), *args[1:])) is keep]
  return run
def _first(r: Run, x: Any) -> Any:
  for v in x if type(x) in ITERABLE else r.items(x): return v
  return Undefined("no first item of an empty sequence")
def _last(r: Run, x: Any) -> Any: return _first(r, x if type(x) is Undefined else list(r.items(x))[-1:])
def _reverse(r: Run, x: Any) -> Any: return _slice(r, x, None, None, -1) if type(x) is str else list(r.items(x))[::-1]
def _list(r: Run, x: Any) -> list: return list(r.items(x))
def _of_string(call: Callable, cost: int = 1) -> Callable:
  def run(r: Run, s: Any) -> Any:
    s = r.text(s)
    r.spend(len(s) * cost)
    return call(s)
  return run
def _default(r: Run, x: Any, default: Any = "", boolean: Any = False) -> Any:
  return default if isinstance(x, Undefined) or boolean and not x else x
def _dict_items(r: Run, x: Any) -> list:
  if type(x) not in (dict, Undefined): raise TypeError("Can only get item pairs from a mapping.")
  return _pairs(r, x) if type(x) is dict else []

FILTERS: dict[str, Callable] = {
  "abs": lambda r, x: abs(x), "capitalize": _of_string(str.capitalize), "default": _default, "dictsort": _dictsort, "first": _first,
  "escape": _of_string(lambda s: str(markupsafe.escape(s)), 2), "float": lambda r, x, default=0.0: r.weigh(x) or jinja2.filters.do_float(x, default),
  "format": lambda r, form, /, *args: _mod(r, r.text(form), args), "indent": _indent, "items": _dict_items,
  "int": lambda r, x, default=0, base=10: r.weigh(x) or _number(jinja2.filters.do_int(x, default, base)),
  "join": lambda r, x, sep="", attribute=None: _join(r, r.text(sep), [*map(_getter(r, attribute), r.items(x))]), "last": _last,
  "length": lambda r, x: len(x), "list": _list, "lower": _of_string(str.lower), "map": _map, "max": _extreme(max), "min": _extreme(min),
  "reject": _select(False, False), "rejectattr": _select(False, True), "replace": lambda r, s, *args: _replace(r, r.text(s), *args),
  "reverse": _reverse, "round": _round, "safe": lambda r, s: r.text(s), "select": _select(True, False), "selectattr": _select(True, True),
  "sort": _sort, "string": lambda r, s: r.text(s), "sum": _sum, "title": _of_string(jinja2.filters.do_title), "tojson": _tojson,
  "trim": lambda r, s, *args: METHODS[str]["strip"](r, r.text(s), *args),
  "unique": _unique, "upper": _of_string(str.upper),
}
FILTERS |= {alias: FILTERS[name] for alias, name in {"count": "length", "d": "default", "e": "escape"}.items()}

def _test(call: Callable) -> Callable: return lambda r, x, *args: call(x, *args)
TESTS: dict[str, Callable] = {n: _test(jinja2.tests.TESTS[n]) for n in (
  "boolean", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number", "sameas", "sequence", "string", "true", "undefined")}
TESTS |= {n: COMPARE[n] for n in ("eq", "ne", "lt", "le", "gt", "ge", "in")}
TESTS |= {alias: COMPARE[n] for n, names in {"eq": ("==", "equalto"), "ne": ("!=",), "lt": ("<", "lessthan"), "le": ("<=",),
                                            "gt": (">", "greaterthan"), "ge": (">=",)}.items() for alias in names}
TESTS |= {"odd": lambda r, x: _mod(r, x, 2) == 1, "even": lambda r, x: _mod(r, x, 2) == 0, "divisibleby": lambda r, x, n: _mod(r, x, n) == 0,
          "callable": lambda r, x: type(x) is Function, "lower": _of_string(str.islower), "upper": _of_string(str.isupper)}

def _known(table: dict[str, Callable], what: str, name: Any) -> Callable:
  if type(name) is not str or name not in table: raise TemplateError(f"no {what} named {name!r:.80}")
  return table[name]

# *** functions

def _range(r: Run, /, *args: Any) -> range: return range(*args)
def _dict(r: Run, pairs: Any = (), /, **kw: Any) -> dict:
  r.weigh(pairs)
  return {_dict_key(k): v for k, v in (pairs.items() if type(pairs) is dict else pairs)} | kw
def _raise_exception(r: Run, message: Any): raise Refusal(r.text(message))
def _strftime_now(r: Run, form: str) -> str:
  if "%" in re.sub("%[-_]?[a-zA-Z%]", "", form): raise TemplateError("strftime_now: a width in a format")
  r.spend(len(form) * 16)
  return datetime.datetime.now().strftime(form)
GLOBALS = {"range": Function(_range), "dict": Function(_dict), "namespace": Function(lambda r, /, *args, **kw: Namespace(_dict(r, *args, **kw))),
           "raise_exception": Function(_raise_exception), "strftime_now": Function(_strftime_now)}

# *** from nodes to closures

SYNTAX = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
BODIES = ("body", "else_", "elif_")
_MAKE: dict[type, Callable[[Any], Callable]] = {}

def _makes(*kinds: type):
  def register(make: Callable[[Any], Callable]) -> Callable:
    _MAKE.update(dict.fromkeys(kinds, make))
    return make
  return register
def _make(node: nodes.Node) -> Callable:
  if (make := _MAKE.get(type(node))) is None: raise TemplateError(f"line {node.lineno}: {type(node).__name__} is not for chat templates")
  return make(node)
def _nodes(node: nodes.Node) -> int:
  """How many nodes running a statement evaluates, without its bodies."""
  return 1 + sum(map(_nodes, node.iter_child_nodes(exclude=BODIES)))

def _block(statements: list[nodes.Node]) -> Statement:
  cost, runs = sum(map(_nodes, statements)), [*map(_make, statements)]
  def run(r: Run, s: Scope) -> Any:
    r.spend(cost)
    for f in runs:
      if signal := f(r, s): return signal
  return run
def _inner(r: Run, s: Scope) -> Scope:
  """A scope that begins with the outer one's variables and keeps its own."""
  r.spend(1 + (len(s) >> 3))
  return s.copy()
def _store(target: nodes.Node) -> Callable[[Run, Scope, Any], None]:
  if isinstance(target, nodes.Name):
    def store(r: Run, s: Scope, value: Any): s[target.name] = value
  elif isinstance(target, nodes.NSRef):
    def store(r: Run, s: Scope, value: Any):
      if type(ns := s.get(target.name)) is not Namespace: raise TemplateError("cannot assign attribute on non-namespace object")
      ns.values[target.attr] = value
  else:
    parts = [*map(_store, target.items)]
    def store(r: Run, s: Scope, value: Any):
      if len(value := [*r.items(value)]) != len(parts): raise ValueError(f"expected {len(parts)} values to unpack, found {len(value)}")
      for part, v in zip(parts, value): part(r, s, v)
  return store

@_makes(nodes.Output)
def _output(node: nodes.Output) -> Statement:
  parts = [*map(_make, node.nodes)]
  def run(r: Run, s: Scope):
    for part in parts: r.write(r.text(part(r, s)))
  return run
@_makes(nodes.ExprStmt)
def _expr_stmt(node: nodes.ExprStmt) -> Statement:
  value = _make(node.node)
  def run(r: Run, s: Scope): value(r, s)
  return run
@_makes(nodes.If)
def _if(node: nodes.If) -> Statement:
  cases = [(_make(n.test), _block(n.body)) for n in (node, *node.elif_)]
  otherwise = _block(node.else_)
  tests = sum(_nodes(n.test) for n in node.elif_)
  def run(r: Run, s: Scope) -> Any:
    r.spend(tests)
    return next((body for test, body in cases if test(r, s)), otherwise)(r, s)
  return run
@_makes(nodes.For)
def _for(node: nodes.For) -> Statement:
  if node.recursive: raise TemplateError(f"line {node.lineno}: a recursive loop is not for chat templates")
  values, store, body, otherwise = _make(node.iter), _store(node.target), _block(node.body), _block(node.else_)
  test = node.test and _make(node.test)
  cost = _nodes(node.test) if node.test else 0
  wants_loop = any(n.name == "loop" for part in node.body for n in part.find_all(nodes.Name))
  def scope(r: Run, s: Scope, value: Any) -> Scope:
    store(r, inner := _inner(r, s), value)
    return inner
  def passes(r: Run, s: Scope, value: Any) -> bool:
    r.spend(cost)
    return test(r, scope(r, s, value))
  def run(r: Run, s: Scope):
    items = r.items(values(r, s))
    if test: items = [x for x in items if passes(r, s, x)]
    if not items: return otherwise(r, _inner(r, s))
    loop = LoopContext(items, Undefined)
    for x in (x for x, _ in loop) if wants_loop else items:
      inner = scope(r, s, x)
      if wants_loop: inner["loop"] = loop
      if body(r, inner) is BREAK: break
  return run
@_makes(nodes.Break)
def _break(node: nodes.Break) -> Statement: return lambda r, s: BREAK
@_makes(nodes.Continue)
def _continue(node: nodes.Continue) -> Statement: return lambda r, s: CONTINUE
@_makes(nodes.Macro)
def _macro(node: nodes.Macro) -> Statement:
  names, body, required = [a.name for a in node.args], _block(node.body), len(node.args) - len(node.defaults)
  defaults = [None] * required + [*map(_make, node.defaults)]
  def run(r: Run, s: Scope):
    def call(r: Run, /, *args: Any, **kw: Any) -> str:
      if len(args) > len(names): raise TypeError(f"macro {node.name!r} takes not more than {len(names)} argument(s)")
      if r.calls == MAX_CALLS: raise TemplateError(f"line {node.lineno}: macros called more than {MAX_CALLS} deep")
      (inner := _inner(r, s)).update(zip(names, args))
      for name, default in list(zip(names, defaults))[len(args):]:
        inner[name] = kw.pop(name) if name in kw else default(r, inner) if default else Undefined(name=name)
      if kw: raise TypeError(f"macro {node.name!r} takes no keyword argument {next(iter(kw))!r}")
      return r.capture(body, inner)
    s[node.name] = Function(call)
  return run
@_makes(nodes.Assign)
def _assign(node: nodes.Assign) -> Statement:
  store, value = _store(node.target), _make(node.node)
  return lambda r, s: store(r, s, value(r, s))
@_makes(nodes.AssignBlock)
def _assign_block(node: nodes.AssignBlock) -> Statement:
  store, body, value = _store(node.target), _block(node.body), _make(node.filter or nodes.Name(BLOCK, "load"))
  return lambda r, s: store(r, s, value(r, {**s, BLOCK: r.capture(body, _inner(r, s))}))
@_makes(nodes.FilterBlock)
def _filter_block(node: nodes.FilterBlock) -> Statement:
  body, value = _block(node.body), _make(node.filter)
  return lambda r, s: r.write(r.text(value(r, {**s, BLOCK: r.capture(body, _inner(r, s))})))
@_makes(nodes.With)
def _with(node: nodes.With) -> Statement:
  pairs, body = [(_store(t), _make(v)) for t, v in zip(node.targets, node.values)], _block(node.body)
  def run(r: Run, s: Scope) -> Any:
    inner = _inner(r, s)
    for store, value in pairs: store(r, inner, value(r, s))
    return body(r, inner)
  return run

@_makes(nodes.Name)
def _name(node: nodes.Name) -> Expression:
  name = node.name
  return lambda r, s: s[name] if name in s else Undefined(name=name)
@_makes(nodes.Const)
def _const(node: nodes.Const) -> Expression:
  value = _number(node.value)
  return lambda r, s: value
@_makes(nodes.TemplateData)
def _data(node: nodes.TemplateData) -> Expression: return lambda r, s: node.data
@_makes(nodes.List, nodes.Tuple)
def _sequence(node: nodes.List | nodes.Tuple) -> Expression:
  parts, kind = [*map(_make, node.items)], list if isinstance(node, nodes.List) else tuple
  return lambda r, s: kind([part(r, s) for part in parts])
@_makes(nodes.Dict)
def _mapping(node: nodes.Dict) -> Expression:
  pairs = [(_make(p.key), _make(p.value)) for p in node.items]
  return lambda r, s: {_dict_key(key(r, s)): value(r, s) for key, value in pairs}
@_makes(*BINARY)
def _binary(node: nodes.BinExpr) -> Expression:
  op, left, right = BINARY[type(node)], _make(node.left), _make(node.right)
  return lambda r, s: op(r, left(r, s), right(r, s))
@_makes(nodes.And)
def _and(node: nodes.And) -> Expression:
  left, right = _make(node.left), _make(node.right)
  return lambda r, s: left(r, s) and right(r, s)
@_makes(nodes.Or)
def _or(node: nodes.Or) -> Expression:
  left, right = _make(node.left), _make(node.right)
  return lambda r, s: left(r, s) or right(r, s)
@_makes(nodes.Not)
def _not(node: nodes.Not) -> Expression:
  value = _make(node.node)
  return lambda r, s: not value(r, s)
@_makes(nodes.Neg)
def _neg(node: nodes.Neg) -> Expression:
  value = _make(node.node)
  return lambda r, s: -value(r, s)
@_makes(nodes.Pos)
def _pos(node: nodes.Pos) -> Expression:
  value = _make(node.node)
  return lambda r, s: +value(r, s)
@_makes(nodes.Compare)
def _comparison(node: nodes.Compare) -> Expression:
  first, rest = _make(node.expr), [(COMPARE[o.op], _make(o.expr)) for o in node.ops]
  def run(r: Run, s: Scope) -> bool:
    left = first(r, s)
    for op, value in rest:
      if not op(r, left, right := value(r, s)): return False
      left = right
    return True
  return run
@_makes(nodes.Concat)
def _concat(node: nodes.Concat) -> Expression:
  parts = [*map(_make, node.nodes)]
  return lambda r, s: _join(r, "", [part(r, s) for part in parts])
@_makes(nodes.CondExpr)
def _conditional(node: nodes.CondExpr) -> Expression:
  test, yes = _make(node.test), _make(node.expr1)
  no = _make(node.expr2) if node.expr2 else lambda r, s: Undefined("an inline if whose condition is false has no else")
  return lambda r, s: yes(r, s) if test(r, s) else no(r, s)
@_makes(nodes.Getattr)
def _getattr(node: nodes.Getattr) -> Expression:
  value, name = _make(node.node), node.attr
  return lambda r, s: _attribute(r, value(r, s), name)
@_makes(nodes.Getitem)
def _getitem(node: nodes.Getitem) -> Expression:
  value = _make(node.node)
  if isinstance(node.arg, nodes.Slice):
    bounds = [_make(n) if n else lambda r, s: None for n in (node.arg.start, node.arg.stop, node.arg.step)]
    return lambda r, s: _slice(r, value(r, s), *[bound(r, s) for bound in bounds])
  key = _make(node.arg)
  return lambda r, s: _item(r, value(r, s), key(r, s))

def _arguments(node: Any) -> Callable[[Run, Scope], tuple[list, dict]]:
  plain, named = [*map(_make, node.args)], [(k.key, _make(k.value)) for k in node.kwargs]
  more, more_named = node.dyn_args and _make(node.dyn_args), node.dyn_kwargs and _make(node.dyn_kwargs)
  def run(r: Run, s: Scope) -> tuple[list, dict]:
    args, kw = [value(r, s) for value in plain], {k: value(r, s) for k, value in named}
    if more: args += r.items(more(r, s))
    if more_named: kw |= dict(_dict_items(r, more_named(r, s)))
    return args, kw
  return run
@_makes(nodes.Call)
def _call(node: nodes.Call) -> Expression:
  callee, arguments = _make(node.node), _arguments(node)
  def run(r: Run, s: Scope) -> Any:
    f = callee(r, s)
    if type(f) is Undefined: f._fail_with_undefined_error()
    if type(f) is not Function: raise TypeError(f"{type(f).__name__!r} object is not callable")
    args, kw = arguments(r, s)
    return f.call(r, *args, **kw)
  return run
def _applied(node: nodes.Filter | nodes.Test, to: nodes.Node, table: dict[str, Callable], what: str) -> Expression:
  """A filter or a test, by its name in the table, of the value of `to` and the node's arguments"""
  value, arguments = _make(to), _arguments(node)
  def run(r: Run, s: Scope) -> Any:
    x = value(r, s)
    args, kw = arguments(r, s)
    return _known(table, what, node.name)(r, x, *args, **kw)
  return run
@_makes(nodes.Filter)
def _filter(node: nodes.Filter) -> Expression:
  # the innermost filter of a block has no node: it takes the block's text
  return _applied(node, node.node or nodes.Name(BLOCK, "load"), FILTERS, "filter")
@_makes(nodes.Test)
def _tested(node: nodes.Test) -> Expression:
  test = _applied(node, node.node, TESTS, "test")
  return lambda r, s: bool(test(r, s))

class Template:
  """A template, ready to be rendered. Raises TemplateError, or whatever jinja2's parser raises, for a source that is none."""
  def __init__(self, source: str):
    if len(source) > MAX_SOURCE: raise TemplateError(f"{len(source)} characters, more than {MAX_SOURCE}")
    tree = SYNTAX.parse(source)
    level: list[nodes.Node] = [tree]
    for _ in range(MAX_DEPTH): level = [child for node in level for child in node.iter_child_nodes()]
    if level: raise TemplateError(f"line {level[0].lineno}: nested more than {MAX_DEPTH} deep")
    self._body = _block(tree.body)

  def render(self, values: dict[str, Any]) -> str:
    """The text. values: the variables: text, numbers, booleans, None, and lists and dicts of these. Raises Refusal, TemplateError, or any other
    Exception that an operation of the template raises."""
    (meter := Run(1 << 62)).weigh(values)
    run = Run(STEPS + PER_INPUT * ((1 << 62) - meter.left))
    self._body(run, {**GLOBALS, **values})
    return "".join(run.out)
