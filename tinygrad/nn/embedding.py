"""The beginning of a step: the embedding's rows of its tokens"""
from __future__ import annotations
from tinygrad import Tensor, UOp, dtypes
from tinygrad.nn import cpu
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.kernel import UNIT, Weight, empty, launch
from tinygrad.nn.primitive import primitive, rounded_as_written

@primitive(outputs=lambda ids, weight: empty(ids, ids.shape[0], weight.shape[1]))
def embedding(ids:Tensor, weight:Weight) -> Tensor:
  """ids: int32 (T,); weight: (vocab, D) -> float32 (T, D)"""
  return weight[ids].dequantize().contiguous()

@embedding.form("cpu_decode", takes=lambda ids, weight: cpu.takes(weight))
def embedding_cpu(ids:Tensor, weight:Weight) -> Tensor: return cpu.embedding(ids, weight)

@embedding.form("decode", takes=lambda ids, weight: target_of(weight.device) is not None and weight.shape[1] % UNIT == 0)
def embedding_decode(ids:Tensor, weight:Weight) -> Tensor:
  """A block has a token, a thread dequantizes a unit: to the same bits for however many tokens"""
  (vocab, D), T = weight.shape, ids.shape[0]
  def body(buffers:dict[str, UOp]) -> list[UOp]:
    token, unit = UOp.special(T, "gidx0"), UOp.special(D // UNIT, "lidx0")
    row = buffers["ids"][token].load().maximum(0).minimum(vocab - 1).cast(dtypes.weakint)
    weights = weight.matrix(buffers, "w")(row, unit, None).weights()
    return [buffers["y"][token * D + unit * UNIT + i].store(value) for i, value in enumerate(weights)]
  with rounded_as_written(True):
    return launch(f"embedding_{weight.label}_{T}", {"y": empty(ids, T, D)}, {"ids": ids, **weight.args("w")}, body, T * D * 8)[0]
