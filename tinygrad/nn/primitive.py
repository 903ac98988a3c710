"""The one door: every kernel is reached through a primitive.

A primitive is a function of tensors: its plain-ops form, which runs everywhere, says what it means, and is what the others are tested against.
Faster forms have the same signature and register with a predicate of the same arguments, which stands beside the kernel:

  @primitive(outputs=lambda x, weight: empty(x, x.shape[0], weight.shape[0]))
  def linear(x, weight): return x @ weight.dequantize().T

  @linear.form("decode", takes=lambda x, weight: target_of(weight.device) is not None)
  def linear_decode(x, weight): ...

A call runs the first form in the order of FORMS whose predicate holds, else the plain-ops form. Nothing else chooses.

`outputs` gives empty tensors of a call's results. In a rehearsal a call returns those and notes its form, so that a forward pass tells what it would
take without running. A composite's plain ops call nothing but primitives, each of which chooses for itself.
"""
from __future__ import annotations
import contextlib, functools, inspect
from typing import Any, Callable, Iterator, NamedTuple
from tinygrad.nn.step import Step

# in the order in which they are asked. cpu_…: C; msl: hand-written Metal; pairs, decode: nn/matvec.py and the like; few, prefill: tensor cores. A
# name says what a form was written for, `takes` alone which calls it serves
FORMS = ("cpu_decode", "cpu_few", "cpu_prefill", "msl", "pairs", "decode", "few", "prefill")
PLAIN = "plain ops"

class Form(NamedTuple):
  takes: Callable[..., Any]     # true where the form computes what these arguments ask for
  run: Callable[..., Any]

class Choice(NamedTuple):
  primitive: Primitive
  form: str                     # of FORMS, or PLAIN

PRIMITIVES:dict[str, Primitive] = {}
_plain_only = _as_written = False
_rehearsed:list[Choice]|None = None

class Primitive:
  """See the head of the file. outputs: of the same arguments, empty tensors of the shapes that a call returns.
  composite: the plain form calls nothing but primitives, each of which makes its own choice."""
  def __init__(self, plain:Callable, outputs:Callable[..., Any], composite:bool=False):
    self.plain, self.outputs, self.composite = plain, outputs, composite
    self.forms:dict[str, Form] = {}
    self.signature = inspect.signature(plain)
    functools.update_wrapper(self, plain)

  def form(self, name:str, takes:Callable[..., Any]) -> Callable[[Callable], Callable]:
    """Registers what it decorates"""
    assert name in FORMS and name not in self.forms, f"{self.__name__}: a form {name!r}"
    def register(run:Callable) -> Callable:
      self.forms[name] = Form(takes, run)
      return run
    return register

  def choose(self, *args:Any) -> str:
    """The name of the form that a call with these arguments, all of them, runs"""
    if _plain_only: return PLAIN
    return next((name for name in FORMS if name in self.forms and self.forms[name].takes(*args)), PLAIN)

  def __call__(self, *args:Any, **named:Any) -> Any:
    (bound := self.signature.bind(*args, **named)).apply_defaults()
    name = self.choose(*bound.args)
    if _rehearsed is not None and not (name == PLAIN and self.composite):
      _rehearsed.append(Choice(self, name))
      return self.outputs(*bound.args)
    with rounded_as_written(any(isinstance(arg, Step) and arg.invariant for arg in bound.args)):
      return (self.plain if name == PLAIN else self.forms[name].run)(*bound.args)

def primitive(outputs:Callable[..., Any], composite:bool=False) -> Callable[[Callable], Primitive]:
  """Makes a primitive of the function that it decorates"""
  return lambda plain: PRIMITIVES.setdefault(plain.__name__, Primitive(plain, outputs, composite))

def only_plain_ops() -> bool: return _plain_only

@contextlib.contextmanager
def plain_ops() -> Iterator[None]:
  """Inside, every primitive takes its plain-ops form, as on a device that nobody has written kernels for"""
  global _plain_only
  outer, _plain_only = _plain_only, True
  try: yield
  finally: _plain_only = outer

def as_written() -> bool:
  """Whether a kernel's products and sums are each to be rounded as its text has them: those of an invariant step. What a compiler makes one of
  depends on all that the kernel does, and so on how many tokens there are."""
  return _as_written

@contextlib.contextmanager
def rounded_as_written(also:bool) -> Iterator[None]:
  """Inside, `as_written` holds if it does outside, or `also`"""
  global _as_written
  outer, _as_written = _as_written, _as_written or also
  try: yield
  finally: _as_written = outer

@contextlib.contextmanager
def rehearsal() -> Iterator[list[Choice]]:
  """Inside, a call of a primitive computes nothing: it notes the form it would take, and returns empty tensors"""
  global _rehearsed
  outer, _rehearsed = _rehearsed, []
  try: yield _rehearsed
  finally: _rehearsed = outer
