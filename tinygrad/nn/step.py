"""A forward pass as a value: which tokens it runs, and where they stand. The runner makes it, primitives are given it.

Kernels take the steps of a lone sequence (one_token, many_tokens). The plain ops take all: several sequences have tables."""
from __future__ import annotations
import enum
from dataclasses import dataclass
from tinygrad import Tensor, UOp, dtypes

class Phase(enum.Enum):
  DECODE = enum.auto()    # a new token of each sequence
  PREFILL = enum.auto()   # neighbouring tokens of one sequence

@dataclass(frozen=True)
class Step:
  """start: the position of each of S sequences' first token in this step. int32 (S,) on the device: every form reads it there, and one recording
  serves all steps. A number or bound Variable, of a lone sequence: plain ops use it, prefill kernels have it brought to the device, decode kernels
  that need a position do not take it.
  tables: int32 (S, C), the cache's row of each position of each sequence. None: a lone sequence, whose position is the row. Plain ops alone take
  tables, and the engine makes none yet."""
  phase: Phase
  tokens: int                   # T, of all sequences together
  start: UOp|int|Tensor
  tables: Tensor|None = None

  @staticmethod
  def decode(start:UOp|int|Tensor, tables:Tensor|None=None) -> Step:
    return Step(Phase.DECODE, 1 if tables is None else tables.shape[0], start, tables)
  @staticmethod
  def prefill(start:UOp|int|Tensor, tokens:int) -> Step: return Step(Phase.PREFILL, tokens, start)

  @property
  def on_device(self) -> bool:
    """Whether the start is in device memory, where kernels read it"""
    return isinstance(self.start, Tensor)
  @property
  def one_token(self) -> bool:
    """Whether this is what kernels of matrices times a vector take: the next token of a lone sequence"""
    return self.phase is Phase.DECODE and self.tables is None
  @property
  def many_tokens(self) -> bool:
    """Whether this is what kernels of matrices times many vectors take: several tokens in a row of a lone sequence"""
    return self.phase is Phase.PREFILL and self.tokens > 1 and self.tables is None

  def device_start(self, device:str) -> Tensor:
    """int32 (S,) on the device: the start, brought there if it is a number"""
    if isinstance(self.start, Tensor): return self.start
    start = Tensor(self.start, dtype=dtypes.int32, device=device) if isinstance(self.start, UOp) else \
            Tensor.full((), self.start, dtype=dtypes.int32, device=device)
    return start.reshape(1).contiguous()

  # for plain ops
  @property
  def positions(self) -> Tensor:
    """int32 (T,), of a step whose start is on the device: where each token stands"""
    assert isinstance(self.start, Tensor)
    if self.phase is Phase.DECODE: return self.start
    return self.start + Tensor.arange(self.tokens, dtype=dtypes.int32)
  def entries_of(self, table:Tensor) -> Tensor:
    """table: (positions, …) -> (T, …), the entries of the tokens' positions"""
    return table[self.positions] if isinstance(self.start, Tensor) else table[self.start:self.start + self.tokens]

def one_row(x:Tensor) -> bool:
  """Whether x, (T, …), is of one token: what a primitive without a step goes by"""
  return x.shape[0] == 1
