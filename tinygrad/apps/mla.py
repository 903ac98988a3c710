"""Models with multi-head latent attention and mixture-of-experts (GGUF arch deepseek2: GLM-4.7-Flash, DeepSeek-V2 and V3, Kimi-K2,
Mistral Large 3, Youtu-LLM).

A block is three or four calls of primitives: norm_linear once or twice, attention, then feed_forward or mixture. Each says
what it means in its file (nn/norm_linear.py, nn/mla_attention.py, nn/moe.py) and runs in the form that suits the device and the step
(nn/primitive.py). A step (nn/step.py) says which tokens run and where they stand; the forward pass hands it on. Blocks may lie on
several devices (apps/shard.py): each runs where its weights lie, and a token's vector is copied to it.

Attribute names are GGUF's tensor names. Letters in shapes: T tokens, D embedding, H heads, E experts, K chosen experts, C positions of the
cache, L latent (kv_lora_rank), R rope dimensions. What a checkpoint holds in another form is put right in
`from_gguf`; the forward pass knows one form, and no block format.
"""
from __future__ import annotations
from collections import Counter
from dataclasses import dataclass, replace
import functools, itertools, math
from typing import Any, Callable, Iterable
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from gguf.quants import dequantize
from tinygrad import Device, Tensor, dtypes
from tinygrad.apps.capture import Replay, pinned, to_device
from tinygrad.apps.gguf import GGUFError, GGUFFile, GGUFTensor
from tinygrad.apps.quantized import QuantizedEmbedding, QuantizedExpertWeights, QuantizedLinear, held_bytes, prepare
from tinygrad.apps.rope import Rope, Temperature, Yarn, query_table, rope_table
from tinygrad.apps.shard import Placement, Sizes
from tinygrad.dtype import DType
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.intrinsics import target_of
from tinygrad.nn.latent_cache import CODES, LATENT_GROUP, ROTATED_GROUP, RowFormat
from tinygrad.nn.lora_query import QueryWeights
from tinygrad.nn.mla_attention import LatentWeights, attention, attention_plan, bytes_of_heads, lora_attention, plan_shape
from tinygrad.nn.moe import FeedForward, feed_forward, mixture
from tinygrad.nn.norm_linear import norm_linear
from tinygrad.nn.primitive import PLAIN, rehearsal
from tinygrad.nn.routing import Gating, Routing
from tinygrad.nn.split_plan import PlanShape
from tinygrad.nn.step import PAGE, Step

PREFILL_SIZES = 32, 64, 128, 256, 512   # tokens of a prompt's chunks; all but the least where there are kernels for many
LONG_SIZES = 1024, 2048             # … and where those copy beside other work: a matrix is read once for all of a chunk
def sizes_on(device:str) -> tuple[int, ...]:
  """Of a prompt's chunks, where there are kernels for many tokens"""
  target = target_of(device)
  return PREFILL_SIZES if target is None or target.copy is None else (*PREFILL_SIZES, *LONG_SIZES)
def spare_rows(device:str) -> int:
  """Of a cache, at most, beside those that are asked for"""
  return sizes_on(device)[-1] + 2 * PAGE

@dataclass(frozen=True)
class Config:
  n_blocks: int
  n_dense: int             # leading blocks with a dense feed-forward
  dim: int
  hidden_dim: int          # of a dense feed-forward
  vocab_size: int          # tokens, each with a row of the embedding
  context_length: int      # tokens the model was trained for
  n_heads: int
  q_lora_rank: int         # 0: queries come from one matrix
  kv_lora_rank: int
  nope_dim: int            # a head's query and key without position …
  rope_dim: int            # … and with
  v_dim: int
  norm_eps: float
  rope_base: float
  yarn: Yarn|None = None
  temperature: Temperature|None = None   # of queries
  n_experts: int = 0
  n_chosen: int = 0
  n_shared: int = 0
  expert_dim: int = 0
  n_groups: int = 1        # of experts …
  n_used_groups: int = 1   # … that a token's may be of
  gating: Gating = Gating.SOFTMAX
  normalize_weights: bool = False
  weights_scale: float = 1.0

  @property
  def score_scale(self) -> float: return (self.yarn.mscale if self.yarn else 1.0) ** 2 / math.sqrt(self.nope_dim + self.rope_dim)
  @property
  def cache_dim(self) -> int: return self.kv_lora_rank + self.rope_dim
  def cache_row(self, bits:int) -> RowFormat:
    """How a token's row of the cache lies in memory, of floats (bits: 16; 32 where there are no kernels of a GPU) or of codes of 8 bits. Raises
    GGUFError where this model's cannot be codes."""
    if bits == 8 and not RowFormat.can_be_coded(self.kv_lora_rank, self.rope_dim):
      raise GGUFError(f"a cache of 8 bits: expected kv_lora_rank a multiple of {LATENT_GROUP} and rope.dimension_count one of {ROTATED_GROUP}, "
                      f"found {self.kv_lora_rank} and {self.rope_dim}")
    return RowFormat(self.kv_lora_rank, self.rope_dim, bits == 8)
  def distinct_experts(self, tokens:int) -> float:
    """How many of a block's experts so many tokens choose between them, on average, where each is as likely as any other"""
    return self.n_experts * (1 - (1 - self.n_chosen / self.n_experts) ** tokens)

  @staticmethod
  def from_gguf(f:GGUFFile) -> Config:
    """Raises GGUFError where a key is missing or makes no sense."""
    arch = f.key("general.architecture", str)
    if arch != "deepseek2": raise GGUFError(f"{f.path}: general.architecture: expected deepseek2, found {arch!r}")
    keys = Keys(f, arch)
    bad, integer, real = keys.bad, keys.integer, keys.real
    n_blocks, heads = integer("block_count", high=4096), integer("attention.head_count", high=4096)
    mtp = integer("nextn_predict_layers", 0, low=0, high=n_blocks - 1)
    # block_count counts the multi-token-prediction blocks; they stand last and decoding does not use them
    while mtp and (f"blk.{n_blocks-1}.nextn.eh_proj.weight" in f.tensors or f"blk.{n_blocks-1}.attn_norm.weight" not in f.tensors):
      n_blocks, mtp = n_blocks - 1, mtp - 1
    rope = integer("rope.dimension_count", high=1 << 16)
    # files from before the *_mla keys hold the heads' own lengths in key_length and value_length
    key, value = (integer(f"attention.{n}_length_mla" if f"{arch}.attention.{n}_length_mla" in f.kv else f"attention.{n}_length", high=1 << 16)
                  for n in ("key", "value"))
    if rope % 2: raise bad("rope.dimension_count", "an even number", rope)
    if key <= rope: raise bad("attention.key_length_mla", f"more than rope.dimension_count {rope}", key)
    rows = f.tensor("token_embd.weight").shape[0]  # at least one a token: some files pad
    vocab = len(f.key("tokenizer.ggml.tokens", list, [])) or rows
    if vocab > rows:
      raise GGUFError(f"{f.path}: tensor token_embd.weight: expected a row for each of the {vocab} tokenizer.ggml.tokens, found {rows}")
    experts = integer("expert_count", 0, low=0, high=1 << 16)
    context = integer("context_length")
    config = dict(
      n_blocks=n_blocks, n_dense=n_blocks, dim=integer("embedding_length"), hidden_dim=integer("feed_forward_length"), vocab_size=vocab,
      context_length=context, n_heads=heads, q_lora_rank=integer("attention.q_lora_rank", 0, low=0),
      kv_lora_rank=integer("attention.kv_lora_rank"), nope_dim=key - rope, rope_dim=rope, v_dim=value,
      norm_eps=real("attention.layer_norm_rms_epsilon"), rope_base=real("rope.freq_base", 10000.0, low=1.0), yarn=yarn_of(keys, context),
      temperature=temperature_of(keys, key))
    if not experts: return Config(**config)
    # a file without the key is GLM-4.7-Flash, which gates by sigmoid, or older than the key, which was softmax
    guess = Gating.SIGMOID if n_blocks + mtp in (47, 48) and rows == 154880 else Gating.SOFTMAX
    gating = f.key(f"{arch}.expert_gating_func", int, int(guess)) or int(guess)
    if gating not in iter(Gating): raise bad("expert_gating_func", "1 (softmax), 2 (sigmoid) or 3 (softmax of the chosen)", gating)
    chosen, groups = integer("expert_used_count", high=experts), integer("expert_group_count", 1, low=0, high=experts)
    if groups > 1:   # older files of DeepSeek-V2 lack the keys, and choose from all experts
      size, used = experts // groups, integer("expert_group_used_count", high=groups)
      if experts % groups or size < 2: raise bad("expert_group_count", f"equal groups of at least two of the {experts} experts", groups)
      if used * size < chosen: raise bad("expert_group_used_count", f"groups of {size} that hold the {chosen} experts of expert_used_count", used)
      config |= dict(n_groups=groups, n_used_groups=used)
    config |= dict(
      n_dense=min(integer("leading_dense_block_count", 0, low=0), n_blocks), n_experts=experts, n_chosen=chosen,
      n_shared=integer("expert_shared_count", 0, low=0, high=64), expert_dim=integer("expert_feed_forward_length"), gating=Gating(gating),
      normalize_weights=f.key(f"{arch}.expert_weights_norm", bool, False), weights_scale=real("expert_weights_scale", 1.0, low=-1.0) or 1.0)
    return Config(**config)

@dataclass(frozen=True)
class Keys:
  """A file's keys that begin with its architecture's name. Each raises GGUFError for what is missing or makes no sense"""
  f: GGUFFile
  arch: str
  def bad(self, name:str, expected:str, found:object) -> GGUFError:
    return GGUFError(f"{self.f.path}: {self.arch}.{name}: expected {expected}, found {found}")
  def integer(self, name:str, *default:int, low:int=1, high:int=1<<24) -> int:
    if not low <= (value:=self.f.key(f"{self.arch}.{name}", int, *default)) <= high: raise self.bad(name, f"a number from {low} to {high}", value)
    return value
  def real(self, name:str, *default:float, low:float=0.0) -> float:
    value = self.f.key(f"{self.arch}.{name}", float, *default)
    if not low < value < 1e30: raise self.bad(name, f"a number above {low}", value)
    return value

def yarn_of(keys:Keys, context:int) -> Yarn|None:
  """context: tokens, the model's"""
  f, arch = keys.f, keys.arch
  # a factor alone is of files from before the type, which knew linear scaling only
  scaling = f.key(f"{arch}.rope.scaling.type", str, "linear" if f.key(f"{arch}.rope.scaling.factor", float, 0.0) else "none")
  if scaling == "yarn":
    return Yarn(keys.real("rope.scaling.factor"), keys.integer("rope.scaling.original_context_length", context),
                keys.real("rope.scaling.yarn_log_multiplier", 0.0, low=-1.0),
                keys.real("rope.scaling.yarn_beta_fast", 32.0), keys.real("rope.scaling.yarn_beta_slow", 1.0))
  if scaling == "none": return None
  alone = "" if f"{arch}.rope.scaling.type" in f.kv else " (what rope.scaling.factor alone stands for)"
  raise keys.bad("rope.scaling.type", "none or yarn", repr(scaling) + alone)

def temperature_of(keys:Keys, head:int) -> Temperature|None:
  """head: numbers of a query's head"""
  scale = keys.f.key(f"{keys.arch}.attention.temperature_scale", float, 0.0)
  if not 0 <= scale < 1e30: raise keys.bad("attention.temperature_scale", "a number of at least 0", scale)
  if not scale: return None
  if head % 2: raise keys.bad("attention.key_length_mla", "an even number beside attention.temperature_scale", head)
  return Temperature(scale, keys.integer("attention.temperature_length"))

class RMSNorm:
  """weight: float32 (in,)"""
  def __init__(self, weight:Tensor, eps:float): self.weight, self.eps = weight, eps
  def __call__(self, x:Tensor) -> Tensor: return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight

class Attention:
  attn_norm: RMSNorm
  attn_q: QuantizedLinear      # (H·(nope+R), D), or by way of q_lora:
  attn_q_a: QuantizedLinear
  attn_q_a_norm: RMSNorm
  attn_q_b: QuantizedLinear
  attn_kv_a_mqa: QuantizedLinear
  attn_kv_a_norm: RMSNorm
  attn_k_b: QuantizedLinear    # (H, L, nope)
  attn_v_b: QuantizedLinear    # (H, v, L)
  attn_output: QuantizedLinear
  def __init__(self, config:Config): self.config = config
  @property
  def device(self) -> str: return self.attn_norm.weight.device

  def __call__(self, step:Step, x:Tensor, cache:Tensor, rope:Rope, residual:Tensor|None=None) -> tuple[Tensor, Tensor]:
    """x: (T, D), cache: (C, L+R) -> residual, x by default, + attention of x's norm, (T, D), and the cache with T more rows"""
    c, residual = self.config, x if residual is None else residual
    weights = LatentWeights(self.attn_kv_a_norm, self.attn_k_b, self.attn_v_b, self.attn_output, c.score_scale)
    if not c.q_lora_rank:
      q, kv = norm_linear(step, x, self.attn_norm, [self.attn_q, self.attn_kv_a_mqa], rope.of_queries)   # (T, H·(nope+R)), (T, L+R)
      return attention(step, residual, q, kv, weights, cache, rope)
    q_a, kv = norm_linear(step, x, self.attn_norm, [self.attn_q_a, self.attn_kv_a_mqa])
    return lora_attention(step, residual, q_a, kv, QueryWeights(self.attn_q_a_norm, self.attn_q_b), weights, cache, rope)

class MLP:
  def __init__(self, norm:RMSNorm, gate:QuantizedLinear, up:QuantizedLinear, down:QuantizedLinear):
    self.ffn_norm, self.ffn_gate, self.ffn_up, self.ffn_down = norm, gate, up, down
  @property
  def device(self) -> str: return self.ffn_norm.weight.device
  @property
  def weights(self) -> FeedForward: return FeedForward(self.ffn_gate, self.ffn_up, self.ffn_down)
  def __call__(self, step:Step, x:Tensor, residual:Tensor|None=None) -> Tensor:
    """(T, D) -> residual, x by default, + feed-forward of x's norm"""
    return feed_forward(step, x, self.ffn_norm, self.weights, x if residual is None else residual)

BROUGHT_TOKENS = 4   # of an expert, on average, from which on a copy of its weights takes less than the CPU's products with them

class MoE:
  """The router and the experts may lie on the CPU where the norm and the shared expert lie on a card. A chunk of a prompt that is long enough has
  them copied to the card, and is computed there."""
  def __init__(self, norm:RMSNorm, router:QuantizedLinear, routing:Routing, gate:QuantizedExpertWeights, up:QuantizedExpertWeights,
               down:QuantizedExpertWeights, shared:MLP|None):
    self.ffn_norm, self.ffn_gate_inp, self.routing, self.shared = norm, router, routing, shared
    self.ffn_gate_exps, self.ffn_up_exps, self.ffn_down_exps = gate, up, down
    self.may_bring = True   # see Placement
    self.experts_norm = norm if self.experts_device == self.device else RMSNorm(to_device(norm.weight.numpy(), self.experts_device), norm.eps)
  @property
  def device(self) -> str: return self.ffn_norm.weight.device
  @property
  def experts(self) -> FeedForward: return FeedForward(self.ffn_gate_exps, self.ffn_up_exps, self.ffn_down_exps)
  @property
  def experts_device(self) -> str: return self.ffn_gate_exps.device
  def __call__(self, step:Step, x:Tensor, residual:Tensor|None=None) -> Tensor:
    """(T, D) -> residual, x by default, + the chosen experts' and the shared expert's feed-forward of x's norm"""
    residual, shared = x if residual is None else residual, None if self.shared is None else self.shared.weights
    experts, router, routing, there = self.experts, self.ffn_gate_inp, self.routing, self.experts_device
    if self.brings(step):
      experts, router, there = FeedForward(*(weight.brought(self.device) for weight in experts)), router.brought(self.device), self.device
      if routing.bias is not None: routing = replace(routing, bias=routing.bias.to(self.device))
    if there == self.device: return mixture(step, x, self.ffn_norm, router, routing, experts, shared, residual)
    out = mixture(step, x.to(there), self.experts_norm, router, routing, experts, None, residual.to(there)).to(self.device)
    return out if self.shared is None else self.shared(step, x, out)
  @property
  def can_bring(self) -> bool:
    """Whether the experts, which lie on the CPU, may be copied to a card with kernels for many tokens"""
    target = target_of(self.device)
    return self.may_bring and target is not None and target.mma is not None and is_cpu(self.experts_device)
  def brings(self, step:Step) -> bool:
    """Whether the experts are copied for this step"""
    return step.many_tokens and step.tokens * self.routing.count >= BROUGHT_TOKENS * self.ffn_gate_exps.shape[0] and self.can_bring

class Block:
  def __init__(self, attn:Attention, ffn:MLP|MoE): self.attn, self.ffn = attn, ffn
  def __call__(self, step:Step, x:Tensor, cache:Tensor, rope:Rope) -> tuple[Tensor, Tensor]:
    """All of the block's device -> as attention"""
    x, cache = self.attn(step, x, cache, rope)
    return self.ffn(step, x), cache
  @property
  def devices(self) -> list[str]:
    """Its own, and its experts'"""
    return [self.attn.device, *([self.ffn.experts_device] if isinstance(self.ffn, MoE) else [])]
  def may_bring(self, may:bool) -> None:
    if isinstance(self.ffn, MoE): self.ffn.may_bring = may
  def write_cache(self, step:Step, x:Tensor, cache:Tensor, rope:Rope) -> Tensor:
    """The cache alone, with T more rows: all that a prompt needs of the last block"""
    return self.attn(step, x, cache, rope)[1]

# a part learns from a tensor on which device it is to do something
def _zeros(shape:tuple[int, ...], dtype:DType, beside:Tensor) -> Tensor:
  return Tensor.zeros(*shape, dtype=dtype, device=beside.device).contiguous()
def copied(beside:Tensor, *tensors:Tensor) -> Any:
  """A copy of each on another device"""
  copies = tuple(t.to(beside.device) for t in tensors)
  return copies[0] if len(copies) == 1 else copies

Run = Callable[..., Any]
Progress = Callable[[list[GGUFTensor]], Iterable[GGUFTensor]]
def apply(fxn:Callable, *args:Any) -> Any: return fxn(*args)
def plan_attention(step:Step, shape:PlanShape) -> Tensor: return attention_plan(step, shape)
def output_head(step:Step, x:Tensor, norm:RMSNorm, output:QuantizedLinear) -> Tensor: return norm_linear(step, x, norm, [output])[0]

def kept_as(row:RowFormat, device:str) -> DType:
  """What a row of the cache is of: half where a GPU has kernels, memory is what decoding waits for there; float32 elsewhere"""
  if row.coded: return CODES
  return dtypes.float if target_of(device) is None else dtypes.half

class Transformer:
  """The model and its cache: a vector of kv_lora_rank + rope_dim numbers a block and token, in pages that sequences share.
  device: where a step begins, with a token's row of the embedding, and ends, with the head; it has the first block. devices: all.
  pool: how many pages it is to have, the one that is nobody's among them; it is asked when the weights are loaded. None: what one sequence needs.
  row: how a vector lies in the cache. in_turn: whether one device works at a time. brings: whether long chunks have experts copied (MoE).
  batch_invariant: whether a token of a decode step has the numbers that it has alone, to the bit, and a prompt is read in chunks of its own"""
  in_turn, brings, batch_invariant = True, False, False
  def __init__(self, config:Config, token_embd:QuantizedEmbedding, blocks:list[Block], output_norm:RMSNorm, output:QuantizedLinear, max_context:int,
               pool:Callable[[Transformer], int]|None=None, cache_bits:int=16):
    self.config, self.token_embd, self.blk, self.output_norm, self.output = config, token_embd, blocks, output_norm, output
    self.max_context, c = max_context, config
    self.device = token_embd.device
    self.cache_devices = [block.attn.device for block in blocks]
    self.devices = tuple(dict.fromkeys([self.device, *self.cache_devices, *(device for block in blocks for device in block.devices)]))
    target = target_of(self.device)
    many = is_cpu(self.device) or target is not None and target.mma is not None
    away = [block.ffn for block in blocks if isinstance(block.ffn, MoE) and block.ffn.can_bring]
    self.pinned = pinned([plane for ffn in away for weight in ffn.experts for plane in weight.planes.values()], self.device)
    self.brings = bool(away)
    self.prefill_sizes = tuple(size for size in sizes_on(self.device) if size == PREFILL_SIZES[0] or many and size <= max_context)
    self.pages = -(-(max_context + self.prefill_sizes[-1]) // PAGE)   # of a sequence: a step of prefill is padded to its size, wherever it starts
    self.row = c.cache_row(cache_bits)
    self.kept = kept_as(self.row, self.device)
    self.row_bytes = len(blocks) * self.row.entries * self.kept.itemsize   # of the cache, a token
    self.pool = self.pages + 1 if pool is None else pool(self)
    self.ropes = {device: self.rope_on(device) for device in dict.fromkeys([self.device, *self.cache_devices])}
    self.rope = self.ropes[self.device]
    self.cache = self.cache_of(self.cache_devices)

  @property
  def head_row_bytes(self) -> int:
    """Of a device with blocks: what its longest chunks have of a sequence beside the cache, keys and values of all heads"""
    attn = self.blk[0].attn
    return bytes_of_heads(self.prefill_sizes[-1], attn.attn_k_b, attn.attn_v_b, self.config.rope_dim, self.pages * PAGE)
  def rope_on(self, device:str) -> Rope:
    c = self.config
    rotation = c.rope_dim, c.rope_base, self.pages * PAGE, c.yarn, device
    queries = None if c.temperature is None else query_table(c.temperature, c.nope_dim, *rotation)
    return Rope(rope_table(*rotation), c.nope_dim + c.rope_dim, c.nope_dim, queries)
  def cache_of(self, devices:list[str]) -> list[Tensor]:
    """The cache of blocks that lie there, zeros: a token's vector lies in each where its page says"""
    zeros = Replay()   # so that what fills the cache is compiled once and kept on disk
    cache = [zeros.run(_zeros, (self.pool * PAGE, self.row.entries), self.kept, self.ropes[device].table) for device in devices]
    zeros()
    return cache

  def decode_step(self, start:Tensor, tables:Tensor) -> Step: return Step.decode(start, tables, self.batch_invariant)

  # Each takes the ids of a step's tokens, int32 (T,). `run` is what a function and its arguments are given to, part by part: applied here, or
  # recorded (apps/capture.py).
  def _before(self, n:int, step:Step, ids:Tensor, run:Run) -> tuple[Tensor, dict[str, Step]]:
    """float32 (T, D) in front of block n, on the device of the block before it, and the step on the devices that it has come to"""
    x, steps = self.embedded(ids, run), {self.device: self.planned(step, run)}
    return self._through(range(n), steps, x, run), steps
  def embedded(self, ids:Tensor, run:Run) -> Tensor:
    """-> float32 (T, D), what a step begins with"""
    return run(QuantizedEmbedding.__call__, self.token_embd, ids)
  def _through(self, blocks:range, steps:dict[str, Step], x:Tensor, run:Run) -> Tensor:
    """x behind these blocks. steps: see _at"""
    for i in blocks:
      step, x = self._at(i, steps, x, run)
      x, _ = run(Block.__call__, self.blk[i], step, x, self.cache[i], self.ropes[self.cache_devices[i]])
    return x   # the cache is written in place
  @functools.cached_property
  def stages(self) -> list[range]:
    """The blocks in runs, each of one device, which may work for one part of a batch while others work for others: one run where devices work
    together or wait for the host"""
    blocks = range(len(self.blk))
    if any(len({*block.devices}) > 1 for block in self.blk): return [blocks]
    return [range((own := list(run))[0], own[-1] + 1) for _, run in itertools.groupby(blocks, self.cache_devices.__getitem__)]
  def stage(self, number:int, step:Step, x:Tensor, run:Run) -> Tensor:
    """x: float32 (T, D), as `embedded` gives it or behind the stage before this one -> behind this one, on its device"""
    return self._through(self.stages[number], {self.device: step if number else self.planned(step, run)}, x, run)
  def at_home(self, x:Tensor, run:Run) -> Tensor:
    """x on the device where a step ends"""
    return x if x.device == self.device else run(copied, self.rope.table, x)
  def planned(self, step:Step, run:Run, block:int=0) -> Step:
    """The step with what attention shares in all blocks of one device, that of this one"""
    shape = plan_shape(step, self.blk[block].attn.attn_k_b, self.cache[block]) if self.blk and step.plan is None else None
    return step if shape is None else replace(step, plan=run(plan_attention, step, shape))
  def _at(self, block:int, steps:dict[str, Step], x:Tensor, run:Run) -> tuple[Step, Tensor]:
    """The step, planned, and x on a block's device. steps: by device, in their order. At a device's first block all of it comes from the device
    before, in a part of its own: of several chunks on their way none holds a device but where it is, and where it is copied"""
    if (device := self.cache_devices[block]) not in steps:
      step = next(reversed(steps.values()))
      x, start, tables = run(copied, self.ropes[device].table, x, step.start, step.tables)
      steps[device] = self.planned(replace(step, start=start, tables=tables, plan=None), run, block)
    return steps[device], x
  def hidden(self, step:Step, ids:Tensor, run:Run=apply) -> Tensor:
    """-> float32 (T, D) before the last norm; every block's rows are written"""
    return self.at_home(self._before(len(self.blk), step, ids, run)[0], run)
  def prefill(self, step:Step, ids:Tensor, run:Run=apply) -> Tensor:
    """-> the last block's cache, whose realization writes every block's rows"""
    x, steps = self._before(last := len(self.blk) - 1, step, ids, run)
    step, x = self._at(last, steps, x, run)
    return run(Block.write_cache, self.blk[last], step, x, self.cache[last], self.ropes[self.cache_devices[last]])
  @property
  def copies(self) -> int:
    """Parts of a step of prefill that copy it from device to device"""
    return len({self.device, *self.cache_devices}) - 1
  def logits(self, step:Step, ids:Tensor, run:Run=apply) -> Tensor:
    """-> float32 (T, vocab)"""
    return self.head(step, self.hidden(step, ids, run), run)
  def head(self, step:Step, hidden:Tensor, run:Run=apply) -> Tensor:
    """hidden: float32 (T, D), as `hidden` gives it -> float32 (T, vocab)"""
    return run(output_head, step, hidden, self.output_norm, self.output)

  def plain_parts(self, step:Step) -> list[str]:
    """The primitives that take their plain-ops form in such a step. Empty: every one has a kernel, so that the position may live on the device"""
    # blocks of a kind have the same shapes
    kinds = {(type(b.ffn), *b.devices): i for i, b in reversed([*enumerate(self.blk)])}
    ids = Tensor.empty(step.tokens, dtype=dtypes.int32, device=self.device)
    with rehearsal() as choices:
      x, steps = self.token_embd(ids), {self.device: self.planned(step, apply)}
      for i in kinds.values():
        there, _ = self._at(i, steps, x, apply)
        self.blk[i](there, x.to(there.start.device), self.cache[i], self.ropes[self.cache_devices[i]])
      self.head(step, x)
    return list(dict.fromkeys(choice.primitive.__name__ for choice in choices if choice.form == PLAIN))

  def weight_bytes_a_step(self, tokens:int=1) -> int:
    """Bytes of weights that decoding a token of each of so many sequences reads: the chosen experts, a row of the embedding each, all else once"""
    return sum(self.weight_bytes_by_kind(tokens).values())
  def weight_bytes_by_kind(self, tokens:int=1) -> Counter[str]:
    """… of each kind of device"""
    c, total = self.config, Counter({self.device: self.token_embd.nbytes * tokens // self.config.vocab_size + self.output.nbytes})
    def visit(part:object) -> None:
      if isinstance(part, QuantizedExpertWeights): total[part.device] += round(part.nbytes * c.distinct_experts(tokens) / c.n_experts)
      elif isinstance(part, QuantizedLinear): total[part.device] += part.nbytes
      elif isinstance(part, (Block, Attention, MLP, MoE)):
        for p in vars(part).values(): visit(p)
    for block in self.blk: visit(block)
    return Counter({kind: sum(total[d] for d in total if d.split(":")[0] == kind) for kind in dict.fromkeys(d.split(":")[0] for d in total)})
  def cache_bytes(self, depth:int) -> int: return self.row_bytes * depth

  @staticmethod
  def from_gguf(f:GGUFFile, max_context:int|None=None, progress:Progress=lambda tensors: tensors, device:str|Placement|None=None,
                pool:Callable[[Transformer], int]|None=None, cache_bits:int=16) -> Transformer:
    """Loads every tensor that decoding reads onto its device, by default the one that tinygrad takes, one after another; each is checked before the
    first is read. max_context: tokens, the model's own context by default. progress wraps the list of tensors to load, as tqdm does. pool: see the
    class. cache_bits: of a number of the cache, 16 (on a CPU 32) or 8.
    Raises GGUFError for a missing key or tensor, for a wrong shape and for one that cache_bits does not take."""
    c = Config.from_gguf(f)
    c.cache_row(cache_bits)
    f = unpadded(f, c, "token_embd.weight", "output.weight")
    w = load_tensors(f, checked_tensors(f, c), progress, device)
    embd, blocks, *head = parts_of(w, c)
    if isinstance(device, Placement):
      for block in blocks: block.may_bring(device.brings)
    return Transformer(c, embd, blocks, *head, max_context or c.context_length, pool, cache_bits)

# ---- checkpoint surgery ----

def unpadded(f:GGUFFile, c:Config, first:str, *others:str) -> GGUFFile:
  """Rows of the embedding and the head past the vocabulary are no token's: they stay in the file, and so none of them can be chosen. first, others:
  their names; what has other rows than the first stays as it is"""
  if (rows := f.tensor(first).shape[0]) <= c.vocab_size: return f
  cut = {name: t._replace(shape=(c.vocab_size, *t.shape[1:]), data=t.data[:t.data.nbytes // rows * c.vocab_size])
         for name in (first, *others) if (t := f.tensors.get(name)) is not None and t.shape[0] == rows}
  return replace(f, tensors=f.tensors | cut)

Loads = dict[str, type|Callable]   # how to load a tensor, by its name
def need(f:GGUFFile, loads:Loads, name:str, how:type|Callable, *shape:int) -> None:
  """Raises GGUFError where the file has no tensor of that name and shape"""
  f.tensor(name, *shape)
  loads[name] = how

def checked_tensors(f:GGUFFile, c:Config) -> Loads:
  """All that decoding reads, in the file's terms, every shape checked"""
  loads: Loads = {}
  need(f, loads, "token_embd.weight", QuantizedEmbedding, c.vocab_size, c.dim)
  for i in range(c.n_blocks): need_block(f, loads, c, i, i < c.n_dense)
  need(f, loads, "output_norm.weight", float_tensor, c.dim)
  if "output.weight" in f.tensors: need(f, loads, "output.weight", QuantizedLinear, c.vocab_size, c.dim)
  return loads

def sizes_of(f:GGUFFile, cache_bits:int, device:str|None=None) -> Sizes:
  """Bytes of what the model's devices, of one kind, are to hold, its weights as they lie there. Raises GGUFError"""
  c, device = Config.from_gguf(f), device or Device.DEFAULT
  f = unpadded(f, c, "token_embd.weight", "output.weight")
  row = c.cache_row(cache_bits)
  return Sizes.of(c.n_blocks, row.entries * kept_as(row, device).itemsize,
                  {name: held_bytes((t := f.tensors[name]).type, t.shape) for name in checked_tensors(f, c)}, spare_rows(device))

def need_block(f:GGUFFile, loads:Loads, c:Config, i:int, dense:bool) -> None:
  """The tensors of block i"""
  D, H, L, b = c.dim, c.n_heads, c.kv_lora_rank, f"blk.{i}."
  def block_needs(name:str, how:type|Callable, *shape:int) -> None: need(f, loads, b + name, how, *shape)
  block_needs("attn_norm.weight", float_tensor, D)
  if c.q_lora_rank:
    block_needs("attn_q_a.weight", QuantizedLinear, c.q_lora_rank, D)
    block_needs("attn_q_a_norm.weight", float_tensor, c.q_lora_rank)
    block_needs("attn_q_b.weight", QuantizedLinear, H * (c.nope_dim + c.rope_dim), c.q_lora_rank)
  else: block_needs("attn_q.weight", QuantizedLinear, H * (c.nope_dim + c.rope_dim), D)
  block_needs("attn_kv_a_mqa.weight", QuantizedLinear, c.cache_dim, D)
  block_needs("attn_kv_a_norm.weight", float_tensor, L)
  if b + "attn_kv_b.weight" in f.tensors and b + "attn_k_b.weight" not in f.tensors:
    block_needs("attn_kv_b.weight", lambda t, device: _split_kv_b(t, c, device), H * (c.nope_dim + c.v_dim), L)
  else:
    block_needs("attn_k_b.weight", QuantizedLinear, H, L, c.nope_dim)
    block_needs("attn_v_b.weight", QuantizedLinear, H, c.v_dim, L)
  block_needs("attn_output.weight", QuantizedLinear, D, H * c.v_dim)
  block_needs("ffn_norm.weight", float_tensor, D)
  def feed_forward(suffix:str, how:type, hidden:int, *experts:int) -> None:
    for m in ("gate", "up"): block_needs(f"ffn_{m}{suffix}.weight", how, *experts, hidden, D)
    block_needs(f"ffn_down{suffix}.weight", how, *experts, D, hidden)
  if dense: return feed_forward("", QuantizedLinear, c.hidden_dim)
  block_needs("ffn_gate_inp.weight", QuantizedLinear, c.n_experts, D)
  if b + "exp_probs_b.bias" in f.tensors: block_needs("exp_probs_b.bias", float_tensor, c.n_experts)
  feed_forward("_exps", QuantizedExpertWeights, c.expert_dim, c.n_experts)
  if c.n_shared: feed_forward("_shexp", QuantizedLinear, c.n_shared * c.expert_dim)

def load_tensors(f:GGUFFile, loads:Loads, progress:Progress, device:str|Placement|None) -> dict[str, Any]:
  """What each of them becomes on its device, by its name"""
  tensors = [f.tensors[name] for name in loads]
  def at(t:GGUFTensor) -> str|None: return device.of(t.name) if isinstance(device, Placement) else device
  for each in {at(t) for t in tensors}: prepare(((t.type, t.shape) for t in tensors if isinstance(loads[t.name], type) and at(t) == each), each)
  return {t.name: load_tensor(loads[t.name], t, at(t)) for t in progress(tensors)}

def block_of(w:dict[str, Any], c:Config, i:int) -> Block:
  """Block i of what was loaded"""
  b, attn = f"blk.{i}.", Attention(c)
  for name in ("attn_norm", "attn_q_a_norm", "attn_kv_a_norm"):
    if f"{b}{name}.weight" in w: setattr(attn, name, RMSNorm(w[f"{b}{name}.weight"], c.norm_eps))
  for name in ("attn_q", "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_k_b", "attn_v_b", "attn_output"):
    if f"{b}{name}.weight" in w: setattr(attn, name, w[f"{b}{name}.weight"])
  if f"{b}attn_kv_b.weight" in w: attn.attn_k_b, attn.attn_v_b = w[f"{b}attn_kv_b.weight"]
  ffn_norm = RMSNorm(w[b + "ffn_norm.weight"], c.norm_eps)
  def matrices(suffix:str) -> list: return [w[f"{b}ffn_{m}{suffix}.weight"] for m in ("gate", "up", "down")]
  if b + "ffn_gate_inp.weight" not in w: return Block(attn, MLP(ffn_norm, *matrices("")))
  routing = Routing(c.n_chosen, c.gating, c.normalize_weights, c.weights_scale, w.get(b + "exp_probs_b.bias"), c.n_groups,
                    c.n_used_groups)
  shared = MLP(ffn_norm, *matrices("_shexp")) if c.n_shared else None
  return Block(attn, MoE(ffn_norm, w[b + "ffn_gate_inp.weight"], routing, *matrices("_exps"), shared))

def parts_of(w:dict[str, Any], c:Config) -> tuple[QuantizedEmbedding, list[Block], RMSNorm, QuantizedLinear]:
  """What a Transformer is made of"""
  embd = w["token_embd.weight"]
  output = w["output.weight"] if "output.weight" in w else QuantizedLinear(embd.kind, embd.shape, embd.planes)  # tied
  return embd, [block_of(w, c, i) for i in range(c.n_blocks)], RMSNorm(w["output_norm.weight"], c.norm_eps), output

def load_tensor(how:type|Callable, t:GGUFTensor, device:str|None) -> Any:
  return how.load(t.type, t.shape, t.data, device) if isinstance(how, type) else how(t, device)

def float_tensor(t:GGUFTensor, device:str|None) -> Tensor:
  return to_device(np.asarray(dequantize(t.data, t.type), np.float32).reshape(t.shape), device)

def _split_kv_b(t:GGUFTensor, c:Config, device:str|None) -> tuple[QuantizedLinear, QuantizedLinear]:
  """Older files keep k_b and v_b in one matrix, a head's rows [nope | v]. v_b's rows stay as they are; k_b is wanted transposed, across the
  blocks, so it is dequantized and kept in half precision (a hundredth of the file)."""
  heads = t.shape[0] // (c.nope_dim + c.v_dim)   # a device may have a share of them
  rows = t.data.reshape(heads, c.nope_dim + c.v_dim, -1)
  k = dequantize(rows[:, :c.nope_dim].reshape(-1), t.type).reshape(heads, c.nope_dim, c.kv_lora_rank).transpose(0, 2, 1).astype(np.float16)
  v_shape = (heads, c.v_dim, c.kv_lora_rank)
  return (QuantizedLinear.load(GGMLType.F16, k.shape, np.ascontiguousarray(k).reshape(-1).view(np.uint8), device),
          QuantizedLinear.load(t.type, v_shape, rows[:, c.nope_dim:].reshape(-1), device))
