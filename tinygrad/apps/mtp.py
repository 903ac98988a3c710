"""Multi-token prediction (MTP): a block behind a model's last that guesses a token further than the model does (GGUF's blk.N.nextn.*).

  x(p) = eh_proj · [enorm(embedding of token p+1) | hnorm(output_norm(h(p)))]     h(p): the model's hidden state at position p
  y = an ordinary block of x, whose attention reads such x alone, from a cache of its own
  logits of token p+2 = shared_head_head · shared_head_norm(y(p))

This is DeepSeek-V3's (arXiv 2412.19437, section 2.2). Embedding and head are the model's own where a file has none for the block; so is the norm.

The block's rows lie in the same pages as the model's. Row p is written when token p+1 is known. So the last row of a page that two sequences share is
of what followed in the first of them: the second's guesses are a little worse for it. What is said never depends on a guess.
"""
from __future__ import annotations
from dataclasses import dataclass, replace
from typing import Any
from tinygrad import Tensor
from tinygrad.apps.gguf import GGUFError, GGUFFile
from tinygrad.apps.mla import (Block, Config, Loads, Progress, RMSNorm, Run, Transformer, apply, block_of, float_tensor, load_tensors, need,
                               need_block, output_head, unpadded)
from tinygrad.apps.quantized import QuantizedEmbedding, QuantizedLinear
from tinygrad.nn.norm_linear import norm_linear, side_by_side
from tinygrad.nn.step import Step

def load_block(f:GGUFFile, c:Config, progress:Progress=lambda tensors: tensors, device:str|None=None) -> dict[str, Any]:
  """The block's tensors on the device, by their names. f: the file of the model that c is of, or another that holds the block for it. Raises
  GGUFError where there is none, and for a wrong shape."""
  b = f"blk.{c.n_blocks}."
  loads: Loads = {}
  names = {name: f"{b}nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head_norm", "shared_head_head")}
  if names["eh_proj"] not in f.tensors: raise GGUFError(f"{f.path}: an MTP block: expected tensors {b}nextn.*, found none")
  for name in ("embed_tokens", "shared_head_head"):
    if names[name] in f.tensors: f = unpadded(f, c, names[name])
  def optional(name:str, how:type|Any, *shape:int) -> None:
    if names[name] in f.tensors: need(f, loads, names[name], how, *shape)
  need(f, loads, names["eh_proj"], QuantizedLinear, c.dim, 2 * c.dim)
  for name in ("enorm", "hnorm"): need(f, loads, names[name], float_tensor, c.dim)
  optional("shared_head_norm", float_tensor, c.dim)
  optional("embed_tokens", QuantizedEmbedding, c.vocab_size, c.dim)
  optional("shared_head_head", QuantizedLinear, c.vocab_size, c.dim)
  need_block(f, loads, c, c.n_blocks, f"{b}ffn_gate_inp.weight" not in f.tensors)
  return load_tensors(f, loads, progress, device)

@dataclass(frozen=True)
class Mix:
  """What becomes of a hidden state and the token behind it"""
  token_embd: QuantizedEmbedding
  output_norm: RMSNorm
  enorm: RMSNorm
  hnorm: RMSNorm
  eh_proj: QuantizedLinear   # (D, 2·D)
def mixed(step:Step, ids:Tensor, hidden:Tensor, mix:Mix) -> Tensor:
  """ids: int32 (T,), the token behind each of the step's; hidden: float32 (T, D), before the last norm -> float32 (T, D) in front of the block"""
  both = side_by_side([(mix.token_embd(ids), [mix.enorm]), (hidden, [mix.output_norm, mix.hnorm])])
  return norm_linear(step, both, None, [mix.eh_proj])[0]

class MTP:
  """The block beside its model. w: as load_block gives it. For a token still further on it takes its own hidden state for the model's, and the token
  that it guessed for the one that was drawn: `again`"""
  def __init__(self, model:Transformer, w:dict[str, Any]):
    c = model.config
    nextn = f"blk.{c.n_blocks}.nextn."
    def own(name:str) -> Any: return w.get(f"{nextn}{name}.weight")
    def norm(name:str) -> RMSNorm: return RMSNorm(own(name), c.norm_eps)
    self.model, self.block = model, block_of(w, c, c.n_blocks)
    self.mix = Mix(own("embed_tokens") or model.token_embd, model.output_norm, norm("enorm"), norm("hnorm"), own("eh_proj"))
    self.norm = model.output_norm if own("shared_head_norm") is None else norm("shared_head_norm")
    self.output = own("shared_head_head") or model.output
    self.mix_again = replace(self.mix, output_norm=self.norm)
    self.cache, = model.cache_of([model.device])

  # step, hidden: of the model's own step. ids: the token behind each of the step's, int32 (T,). `run`: as Transformer's
  def hidden(self, step:Step, ids:Tensor, hidden:Tensor, run:Run=apply, again:bool=False) -> Tensor:
    """-> float32 (T, D) before the last norm; the block's rows are written"""
    x, step = run(mixed, step, ids, hidden, self.mix_again if again else self.mix), self.model.planned(step, run)
    return run(Block.__call__, self.block, step, x, self.cache, self.model.rope)[0]
  def prefill(self, step:Step, ids:Tensor, hidden:Tensor, run:Run=apply) -> Tensor:
    """-> the block's cache, whose realization writes the rows"""
    x, step = run(mixed, step, ids, hidden, self.mix), self.model.planned(step, run)
    return run(Block.write_cache, self.block, step, x, self.cache, self.model.rope)
  def head(self, step:Step, hidden:Tensor, run:Run=apply) -> Tensor:
    """hidden: float32 (T, D), as `hidden` gives it -> float32 (T, vocab)"""
    return run(output_head, step, hidden, self.norm, self.output)
