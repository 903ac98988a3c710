"""A forward pass as a value: which tokens it runs, where they stand, and where their rows of the cache lie. The runner makes it, primitives are given
it."""
from __future__ import annotations
import enum
from dataclasses import dataclass
from tinygrad import Tensor, dtypes

PAGE = 64   # rows of the cache that are handed out together; a sequence's neighbouring positions, from a multiple of it on
NEW_ROWS = 8   # of a sequence, the most that a step of decoding writes, see Step
STRIP = 16     # neighbouring tokens of a prompt that lie together in a step of several prompts, see Step

class Phase(enum.Enum):
  DECODE = enum.auto()    # a new token of each sequence
  PREFILL = enum.auto()   # neighbouring tokens of one sequence, or of several

@dataclass(frozen=True)
class Step:
  """start: int32 (S,), the position of each of S sequences' first token in this step. tables: int32 (S, P), the page of the cache that holds each
  PAGE of a sequence's positions. Both are on the device: one recording serves all steps.
  A step of decoding may have several neighbouring positions of one sequence, up to NEW_ROWS, each as a sequence of its own with the same table. So
  what a token attends to at its position p is as it was before the step up to p - NEW_ROWS: a kernel reads that without waiting for those before it.
  A step of several prompts has strips of STRIP neighbouring tokens, each as a sequence of its own with its prompt's table; a prompt's last strip is
  padded.
  Page 0 is nobody's. Entries of a table behind a sequence's end are 0, so that what pads a prompt, or a batch, is written there."""
  phase: Phase
  tokens: int                   # T, of all sequences together
  start: Tensor
  tables: Tensor
  plan: Tensor|None = None      # how attention's work is cut, of several sequences on a GPU (nn/split_plan.py)
  invariant: bool = False       # of decoding: whether each token is to have the numbers that it would have alone, to the bit

  @staticmethod
  def decode(start:Tensor, tables:Tensor, invariant:bool=False) -> Step:
    return Step(Phase.DECODE, start.shape[0], start, tables, invariant=invariant)
  @staticmethod
  def prefill(start:Tensor, tables:Tensor, tokens:int) -> Step:
    assert start.shape[0] in (1, tokens / STRIP)
    return Step(Phase.PREFILL, tokens, start, tables)

  @property
  def one_token(self) -> bool:
    """Whether kernels of matrices times a vector take it: the next token of one sequence"""
    return self.phase is Phase.DECODE and self.tokens == 1
  @property
  def few_tokens(self) -> bool:
    """Whether kernels of matrices times a few vectors take it: the next tokens of several sequences"""
    return self.phase is Phase.DECODE and self.tokens > 1
  @property
  def many_tokens(self) -> bool:
    """Whether kernels of matrices times many vectors take it: several tokens in a row of one sequence, or of each of several"""
    return self.phase is Phase.PREFILL and self.tokens > 1
  @property
  def one_prompt(self) -> bool:
    """Whether kernels of many tokens take it that know one position and one table"""
    return self.many_tokens and self.start.shape[0] == 1
  @property
  def each(self) -> int:
    """Neighbouring tokens of each of its sequences"""
    return self.tokens // self.start.shape[0]

  # for plain ops
  @property
  def positions(self) -> Tensor:
    """int32 (T,): where each token stands"""
    if self.phase is Phase.DECODE: return self.start
    return (self.start.unsqueeze(1) + Tensor.arange(self.each, dtype=dtypes.int32)).flatten()

def one_row(x:Tensor) -> bool:
  """Whether x, (T, …), is of one token: what a primitive without a step goes by"""
  return x.shape[0] == 1

def few_rows(x:Tensor) -> bool:
  """Whether x, (T, …), is of as many tokens as a step of few has"""
  return 1 < x.shape[0] <= 64
