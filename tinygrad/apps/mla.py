"""Models with multi-head latent attention and mixture-of-experts (GGUF arch deepseek2: GLM-4.7-Flash, DeepSeek-V2-Lite, Youtu-LLM).

Attribute names are GGUF's tensor names. Letters in shapes: T tokens, D embedding, H heads, E experts, K chosen experts, C positions of the
cache, L latent (kv_lora_rank), R rope dimensions. The batch is one sequence. What a checkpoint holds in another form is put right in
`from_gguf`; the forward pass knows one form, and no block format.
"""
from __future__ import annotations
from dataclasses import dataclass
import enum, math
from typing import Callable, Iterable
import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from gguf.quants import dequantize
from tinygrad import Tensor, UOp, dtypes
from tinygrad.apps.gguf import GGUFError, GGUFFile, GGUFTensor
from tinygrad.apps.quantized import QuantizedEmbedding, QuantizedExpertWeights, QuantizedLinear
from tinygrad.apps.rope import Yarn, apply_rope, rope_table

class Gating(enum.IntEnum):
  SOFTMAX = 1
  SIGMOID = 2
  SOFTMAX_WEIGHT = 3  # softmax over the chosen logits only

@dataclass(frozen=True)
class Config:
  n_blocks: int
  n_dense: int             # leading blocks with a dense feed-forward
  dim: int
  hidden_dim: int          # of a dense feed-forward
  vocab_size: int
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
  n_experts: int = 0
  n_chosen: int = 0
  n_shared: int = 0
  expert_dim: int = 0
  gating: Gating = Gating.SOFTMAX
  normalize_weights: bool = False
  weights_scale: float = 1.0

  @property
  def score_scale(self) -> float: return (self.yarn.mscale if self.yarn else 1.0) ** 2 / math.sqrt(self.nope_dim + self.rope_dim)
  @property
  def cache_dim(self) -> int: return self.kv_lora_rank + self.rope_dim

  @staticmethod
  def from_gguf(f:GGUFFile) -> Config:
    """Raises GGUFError where a key is missing or makes no sense."""
    arch = f.key("general.architecture", str)
    if arch != "deepseek2": raise GGUFError(f"{f.path}: general.architecture: expected deepseek2, found {arch!r}")
    def bad(name:str, expected:str, found:object) -> GGUFError: return GGUFError(f"{f.path}: {arch}.{name}: expected {expected}, found {found}")
    def integer(name:str, *default:int, low:int=1, high:int=1<<24) -> int:
      if not low <= (value:=f.key(f"{arch}.{name}", int, *default)) <= high: raise bad(name, f"a number from {low} to {high}", value)
      return value
    def real(name:str, *default:float, low:float=0.0) -> float:
      value = f.key(f"{arch}.{name}", float, *default)
      if not low < value < 1e30: raise bad(name, f"a number above {low}", value)
      return value

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
    vocab = f.tensor("token_embd.weight").shape[0]
    experts = integer("expert_count", 0, low=0, high=1 << 16)
    yarn, scaling = None, f.key(f"{arch}.rope.scaling.type", str, "none")
    if scaling == "yarn":
      yarn = Yarn(real("rope.scaling.factor"), integer("rope.scaling.original_context_length"), real("rope.scaling.yarn_log_multiplier", 0.0, low=-1.0),
                  real("rope.scaling.yarn_beta_fast", 32.0), real("rope.scaling.yarn_beta_slow", 1.0))
    elif scaling != "none": raise bad("rope.scaling.type", "none or yarn", repr(scaling))
    config = dict(
      n_blocks=n_blocks, n_dense=n_blocks, dim=integer("embedding_length"), hidden_dim=integer("feed_forward_length"), vocab_size=vocab,
      context_length=integer("context_length"), n_heads=heads, q_lora_rank=integer("attention.q_lora_rank", 0, low=0),
      kv_lora_rank=integer("attention.kv_lora_rank"), nope_dim=key - rope, rope_dim=rope, v_dim=value,
      norm_eps=real("attention.layer_norm_rms_epsilon"), rope_base=real("rope.freq_base", 10000.0, low=1.0), yarn=yarn)
    if not experts: return Config(**config)
    # a file without the key is GLM-4.7-Flash, which gates by sigmoid, or older than the key, which was softmax
    guess = Gating.SIGMOID if n_blocks + mtp in (47, 48) and vocab == 154880 else Gating.SOFTMAX
    gating = f.key(f"{arch}.expert_gating_func", int, int(guess)) or int(guess)
    if gating not in iter(Gating): raise bad("expert_gating_func", "1 (softmax), 2 (sigmoid) or 3 (softmax of the chosen)", gating)
    for name in ("expert_group_count", "expert_group_used_count"):
      if (groups := f.key(f"{arch}.{name}", int, 1)) > 1: raise bad(name, "1 (experts are not chosen by groups here)", groups)
    config |= dict(
      n_dense=min(integer("leading_dense_block_count", 0, low=0), n_blocks), n_experts=experts,
      n_chosen=integer("expert_used_count", high=experts), n_shared=integer("expert_shared_count", 0, low=0, high=64),
      expert_dim=integer("expert_feed_forward_length"), gating=Gating(gating),
      normalize_weights=f.key(f"{arch}.expert_weights_norm", bool, False), weights_scale=real("expert_weights_scale", 1.0) )
    return Config(**config)

class RMSNorm:
  def __init__(self, weight:Tensor, eps:float): self.weight, self.eps = weight, eps
  def __call__(self, x:Tensor) -> Tensor: return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight

def mla_attention(q:Tensor, cache:Tensor, pos:UOp|int, scale:float, latent:int) -> Tensor:
  """Absorbed attention: every head reads the same cached vector, values are its first `latent` numbers.
  q: float32 (T, H, L+R), its first row at position `pos`; cache: (C, L+R) with the positions up to pos+T written -> float32 (T, H, L)"""
  T = q.shape[0]
  keys = cache[:pos+T].cast(dtypes.float)
  scores = (q @ keys.transpose(0, 1)) * scale  # (T, H, pos+T)
  if T > 1:
    future = Tensor.full((T, 1, pos+T), float("-inf"), dtype=dtypes.float, buffer=False).reshape(T, pos+T).triu(pos+1)
    scores = scores + future.reshape(T, 1, pos+T)
  return scores.softmax(-1) @ keys[:, :latent]

class Attention:
  attn_q: QuantizedLinear
  attn_q_a: QuantizedLinear
  attn_q_a_norm: RMSNorm
  attn_q_b: QuantizedLinear
  attn_kv_a_mqa: QuantizedLinear
  attn_kv_a_norm: RMSNorm
  attn_k_b: QuantizedLinear    # (H, L, nope)
  attn_v_b: QuantizedLinear    # (H, v, L)
  attn_output: QuantizedLinear
  def __init__(self, config:Config): self.config = config

  def __call__(self, x:Tensor, cache:Tensor, rope:Tensor, pos:UOp|int) -> tuple[Tensor, Tensor]:
    """x: (T, D), cache: (C, L+R), rope: (C, R/2, 2) -> (T, D) and the cache with T more rows"""
    c, T = self.config, x.shape[0]
    q = self.attn_q_b(self.attn_q_a_norm(self.attn_q_a(x))) if c.q_lora_rank else self.attn_q(x)
    q = q.reshape(T, c.n_heads, c.nope_dim + c.rope_dim)
    q = self.attn_k_b(q[..., :c.nope_dim]).cat(apply_rope(q[..., c.nope_dim:], rope, pos), dim=-1)  # (T, H, L+R)
    kv = self.attn_kv_a_mqa(x)
    row = self.attn_kv_a_norm(kv[:, :c.kv_lora_rank]).cat(apply_rope(kv[:, c.kv_lora_rank:], rope, pos), dim=-1)
    cache = Tensor(cache.uop.after(cache[pos:pos+T].uop.store(row.cast(cache.dtype).uop)))
    context = mla_attention(q, cache, pos, c.score_scale, c.kv_lora_rank)                            # (T, H, L)
    return self.attn_output(self.attn_v_b(context).reshape(T, -1)), cache

class MLP:
  def __init__(self, gate:QuantizedLinear, up:QuantizedLinear, down:QuantizedLinear): self.ffn_gate, self.ffn_up, self.ffn_down = gate, up, down
  def __call__(self, x:Tensor) -> Tensor: return self.ffn_down((self.ffn_gate(x).silu() * self.ffn_up(x)).contiguous())

class Router:
  """Which experts a token goes to, and with what weight; float32 throughout."""
  def __init__(self, config:Config, ffn_gate_inp:Tensor, exp_probs_b:Tensor|None):
    self.config, self.ffn_gate_inp, self.exp_probs_b = config, ffn_gate_inp, exp_probs_b
  def __call__(self, x:Tensor) -> tuple[Tensor, Tensor]:
    """x: (T, D) -> int32 (T, K) experts, best first, the lower index on a tie; float32 (T, K) weights"""
    c = self.config
    logits = (x.unsqueeze(1) * self.ffn_gate_inp).sum(-1).contiguous()                               # (T, E)
    scores = {Gating.SOFTMAX: logits.softmax, Gating.SIGMOID: lambda _: logits.sigmoid(), Gating.SOFTMAX_WEIGHT: lambda _: logits}[c.gating](-1)
    choice = scores if self.exp_probs_b is None else scores + self.exp_probs_b  # the bias only chooses
    # an expert's rank is the number of experts before it
    mine, other, index = choice.unsqueeze(2), choice.unsqueeze(1), Tensor.arange(c.n_experts)
    before = (other > mine) | (other.eq(mine) & (index.unsqueeze(0) < index.unsqueeze(1)))
    chosen = before.sum(-1).unsqueeze(1).eq(Tensor.arange(c.n_chosen).unsqueeze(1))                  # (T, K, E), one true in a row
    sel = chosen.where(index, 0).sum(-1).cast(dtypes.int32)
    weights = chosen.where(scores.unsqueeze(1), 0.0).sum(-1)
    if c.gating is Gating.SOFTMAX_WEIGHT: weights = weights.softmax(-1)
    if c.normalize_weights: weights = weights / weights.sum(-1, keepdim=True).maximum(6.103515625e-5)
    return sel.contiguous(), (weights * c.weights_scale).contiguous()

class MoE:
  def __init__(self, router:Router, gate:QuantizedExpertWeights, up:QuantizedExpertWeights, down:QuantizedExpertWeights, shared:MLP|None):
    self.router, self.ffn_gate_exps, self.ffn_up_exps, self.ffn_down_exps, self.shared = router, gate, up, down, shared
  def __call__(self, x:Tensor) -> Tensor:
    sel, weights = self.router(x)
    each = x.unsqueeze(1)                                                                            # (T, 1, D)
    h = (self.ffn_gate_exps(each, sel).silu() * self.ffn_up_exps(each, sel)).contiguous()
    out = (self.ffn_down_exps(h, sel) * weights.unsqueeze(-1)).sum(1)
    return out if self.shared is None else out + self.shared(x)

class Block:
  def __init__(self, attn_norm:RMSNorm, attn:Attention, ffn_norm:RMSNorm, ffn:MLP|MoE):
    self.attn_norm, self.attn, self.ffn_norm, self.ffn = attn_norm, attn, ffn_norm, ffn
  def __call__(self, x:Tensor, cache:Tensor, rope:Tensor, pos:UOp|int) -> tuple[Tensor, Tensor]:
    out, cache = self.attn(self.attn_norm(x).contiguous(), cache, rope, pos)
    h = (x + out).contiguous()
    return (h + self.ffn(self.ffn_norm(h).contiguous())).contiguous(), cache

class Transformer:
  """The model and its cache of one sequence: a vector of kv_lora_rank + rope_dim halves a block and token."""
  def __init__(self, config:Config, token_embd:QuantizedEmbedding, blocks:list[Block], output_norm:RMSNorm, output:QuantizedLinear, max_context:int):
    self.config, self.token_embd, self.blk, self.output_norm, self.output = config, token_embd, blocks, output_norm, output
    self.max_context = max_context
    self.rope = rope_table(config.rope_dim, config.rope_base, max_context, config.yarn)
    self.cache = [Tensor.zeros(max_context, config.cache_dim, dtype=dtypes.half).contiguous().realize() for _ in blocks]

  def hidden(self, ids:Tensor, pos:UOp|int) -> tuple[Tensor, Tensor]:
    """ids: int32 (T,), the first at position `pos` -> float32 (T, D) before the last norm, and the last block's cache, whose realization
    writes every block's rows"""
    x = self.token_embd(ids)
    for block, cache in zip(self.blk, self.cache): x, cache = block(x, cache, self.rope, pos)
    return x, cache
  def logits(self, ids:Tensor, pos:UOp|int) -> Tensor:
    """int32 (T,) -> float32 (T, vocab)"""
    return self.output(self.output_norm(self.hidden(ids, pos)[0]).contiguous())

  @property
  def weight_bytes_a_token(self) -> int:
    """Bytes of weights that decoding one token reads: the chosen experts' share, one row of the embedding"""
    c, total = self.config, self.token_embd.nbytes // self.config.vocab_size + self.output.nbytes + self.output_norm.weight.nbytes()
    def visit(part:object) -> int:
      if isinstance(part, QuantizedExpertWeights): return part.nbytes * c.n_chosen // c.n_experts
      if isinstance(part, QuantizedLinear): return part.nbytes
      if isinstance(part, Tensor): return part.nbytes()
      return sum(visit(p) for p in vars(part).values()) if isinstance(part, (Block, Attention, MLP, MoE, Router, RMSNorm)) else 0
    return total + sum(visit(b) for b in self.blk)
  def cache_bytes(self, depth:int) -> int: return len(self.cache) * self.config.cache_dim * 2 * depth

  @staticmethod
  def from_gguf(f:GGUFFile, max_context:int|None=None, progress:Callable[[list[GGUFTensor]], Iterable[GGUFTensor]]=lambda tensors: tensors) -> Transformer:
    """Loads every tensor that decoding reads onto the device, one after another; each is checked before the first is read.
    max_context: tokens, the model's own context by default. progress wraps the list of tensors to load, as tqdm does.
    Raises GGUFError for a missing key or tensor and for a wrong shape."""
    c = Config.from_gguf(f)
    spec = _checked_tensors(f, c)
    w = {t.name: _load(spec[t.name], t) for t in progress([f.tensors[name] for name in spec])}
    def norm(name:str) -> RMSNorm: return RMSNorm(w[name + ".weight"], c.norm_eps)
    def block(i:int) -> Block:
      b, attn = f"blk.{i}.", Attention(c)
      for name in ("attn_q_a_norm", "attn_kv_a_norm"):
        if f"{b}{name}.weight" in w: setattr(attn, name, norm(b + name))
      for name in ("attn_q", "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_k_b", "attn_v_b", "attn_output"):
        if f"{b}{name}.weight" in w: setattr(attn, name, w[f"{b}{name}.weight"])
      if f"{b}attn_kv_b.weight" in w: attn.attn_k_b, attn.attn_v_b = w[f"{b}attn_kv_b.weight"]
      def matrices(suffix:str) -> list: return [w[f"{b}ffn_{m}{suffix}.weight"] for m in ("gate", "up", "down")]
      if i < c.n_dense: ffn: MLP|MoE = MLP(*matrices(""))
      else: ffn = MoE(Router(c, w[b + "ffn_gate_inp.weight"], w.get(b + "exp_probs_b.bias")), *matrices("_exps"), MLP(*matrices("_shexp")) if c.n_shared else None)
      return Block(norm(b + "attn_norm"), attn, norm(b + "ffn_norm"), ffn)
    embd = w["token_embd.weight"]
    output = w["output.weight"] if "output.weight" in w else QuantizedLinear(embd.kind, embd.shape, embd.planes)  # tied
    return Transformer(c, embd, [block(i) for i in range(c.n_blocks)], norm("output_norm"), output, max_context or c.context_length)

# ---- checkpoint surgery ----

def _checked_tensors(f:GGUFFile, c:Config) -> dict[str, type|Callable]:
  """{tensor name: how to load it} for all that decoding reads, in the file's terms, every shape checked"""
  spec: dict[str, type|Callable] = {}
  def need(name:str, how:type|Callable, *shape:int) -> None: f.tensor(name, *shape); spec[name] = how
  D, H, L = c.dim, c.n_heads, c.kv_lora_rank
  need("token_embd.weight", QuantizedEmbedding, c.vocab_size, D)
  for i in range(c.n_blocks):
    b = f"blk.{i}."
    need(b + "attn_norm.weight", _float, D)
    if c.q_lora_rank:
      need(b + "attn_q_a.weight", QuantizedLinear, c.q_lora_rank, D)
      need(b + "attn_q_a_norm.weight", _float, c.q_lora_rank)
      need(b + "attn_q_b.weight", QuantizedLinear, H * (c.nope_dim + c.rope_dim), c.q_lora_rank)
    else: need(b + "attn_q.weight", QuantizedLinear, H * (c.nope_dim + c.rope_dim), D)
    need(b + "attn_kv_a_mqa.weight", QuantizedLinear, c.cache_dim, D)
    need(b + "attn_kv_a_norm.weight", _float, L)
    if b + "attn_kv_b.weight" in f.tensors and b + "attn_k_b.weight" not in f.tensors:
      need(b + "attn_kv_b.weight", lambda t: _split_kv_b(t, c), H * (c.nope_dim + c.v_dim), L)
    else:
      need(b + "attn_k_b.weight", QuantizedLinear, H, L, c.nope_dim)
      need(b + "attn_v_b.weight", QuantizedLinear, H, c.v_dim, L)
    need(b + "attn_output.weight", QuantizedLinear, D, H * c.v_dim)
    need(b + "ffn_norm.weight", _float, D)
    def feed_forward(suffix:str, how:type, hidden:int, *experts:int) -> None:
      for m in ("gate", "up"): need(f"{b}ffn_{m}{suffix}.weight", how, *experts, hidden, D)
      need(f"{b}ffn_down{suffix}.weight", how, *experts, D, hidden)
    if i < c.n_dense: feed_forward("", QuantizedLinear, c.hidden_dim)
    else:
      need(b + "ffn_gate_inp.weight", _float, c.n_experts, D)
      if b + "exp_probs_b.bias" in f.tensors: need(b + "exp_probs_b.bias", _float, c.n_experts)
      feed_forward("_exps", QuantizedExpertWeights, c.expert_dim, c.n_experts)
      if c.n_shared: feed_forward("_shexp", QuantizedLinear, c.n_shared * c.expert_dim)
  need("output_norm.weight", _float, D)
  if "output.weight" in f.tensors: need("output.weight", QuantizedLinear, c.vocab_size, D)
  return spec

def _load(how:type|Callable, t:GGUFTensor): return how.load(t.type, t.shape, t.data) if isinstance(how, type) else how(t)

def _float(t:GGUFTensor) -> Tensor: return Tensor(np.asarray(dequantize(t.data, t.type), np.float32).reshape(t.shape)).realize()

def _split_kv_b(t:GGUFTensor, c:Config) -> tuple[QuantizedLinear, QuantizedLinear]:
  """Older files keep k_b and v_b in one matrix, a head's rows [nope | v]. v_b's rows stay as they are; k_b is wanted transposed, across the
  blocks, so it is dequantized and kept in half precision (a hundredth of the file)."""
  rows = t.data.reshape(c.n_heads, c.nope_dim + c.v_dim, -1)
  k = dequantize(rows[:, :c.nope_dim].reshape(-1), t.type).reshape(c.n_heads, c.nope_dim, c.kv_lora_rank).transpose(0, 2, 1).astype(np.float16)
  v_shape = (c.n_heads, c.v_dim, c.kv_lora_rank)
  return (QuantizedLinear.load(GGMLType.F16, k.shape, np.ascontiguousarray(k).reshape(-1).view(np.uint8)),
          QuantizedLinear.load(t.type, v_shape, rows[:, c.nope_dim:].reshape(-1)))
