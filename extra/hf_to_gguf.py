"""Convert a Hugging Face folder (config.json, *.safetensors, tokenizer.json) of an MLA model to one GGUF file.

  python extra/hf_to_gguf.py FOLDER OUT.gguf [--type F32|F16|BF16|Q8_0|Q4_0]

Known: glm4_moe_lite (GLM-4.7-Flash), deepseek_v2 (with or without q_lora), youtu; with the block behind the last that predicts
two tokens ahead (MTP), where the folder has one. Q4_0 is the mix of the public files,
except that their Q5_K and Q6_K tensors are Q8_0 here: the gguf package, which does all quantizing, cannot write K-quants.
Names and keys are those of llama.cpp's architecture `deepseek2`. Needs no torch.
"""
import argparse, json, pathlib, re, sys
from typing import Any, Callable, Iterator, NamedTuple
import gguf, numpy as np, yaml
from gguf import GGMLQuantizationType as T

class Family(NamedTuple):
  pre: str                       # tokenizer.ggml.pre
  gating: gguf.ExpertGatingFuncType | None
  special: dict[str, str] = {}   # key of tokenizer.ggml.<key>_token_id: the token's text, where tokenizer_config.json does not say
  first_dense: int = 0           # the family's default

FAMILIES = {
  "glm4_moe_lite": Family("glm4", gguf.ExpertGatingFuncType.SIGMOID, {"bos": "[gMASK]", "eot": "<|user|>", "eom": "<|observation|>"}, 1),
  "deepseek_v2": Family("deepseek-llm", gguf.ExpertGatingFuncType.SOFTMAX),
  "youtu": Family("youtu", None),
}
# rank 1 tensors, the router and its bias are F32 whatever the type; these are the rows that differ from Q4_0 in the Q4_0 mix
MIX = {"attn_kv_a_mqa": T.Q8_0, "attn_k_b": T.Q8_0, "attn_v_b": T.Q8_0, "output": T.Q8_0, "ffn_gate_shexp": T.Q8_0, "ffn_up_shexp": T.Q8_0,
       "ffn_down_shexp": T.Q8_0, "nextn.shared_head_head": T.Q8_0}
# what the MTP block has beside an ordinary one, each under model.layers.N.; the embedding and the head may be the model's own again
NEXTN = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head_norm", "embed_tokens": "embed_tokens",
         "shared_head.head": "shared_head_head"}
AGAIN = {"embed_tokens": ("model.embed_tokens.weight",), "shared_head.head": ("lm_head.weight", "model.embed_tokens.weight")}
TYPES = {"F32": gguf.LlamaFileType.ALL_F32, "F16": gguf.LlamaFileType.MOSTLY_F16, "BF16": gguf.LlamaFileType.MOSTLY_BF16,
         "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0}

class ConvertError(Exception): pass

class Config:
  """config.json with one error line for what is missing or not supported"""
  def __init__(self, d: dict[str, Any]):
    self.d = d
    if (kind := d.get("model_type")) not in FAMILIES:
      raise ConvertError(f"config.json: model_type: expected one of {', '.join(FAMILIES)}, found {kind!r}")
    self.family = FAMILIES[kind]
    self.rope = {"rope_theta": d.get("rope_theta"), **(d.get("rope_scaling") or {}), **(d.get("rope_parameters") or {})}
    self.rope_type = self.rope.get("rope_type", self.rope.get("type", "default"))
    self.blocks, self.experts, self.groups = self["num_hidden_layers"], d.get("n_routed_experts") or 0, d.get("n_group") or 1
    dense = d.get("first_k_dense_replace", (d.get("mlp_layer_types") or []).count("dense") or self.family.first_dense)
    self.dense = dense if self.experts else self.blocks
    y = self.rope if self.rope_type == "yarn" else {}
    # the GGUF's keys mean groups that are as good as their two best experts; by softmax (DeepSeek-V2) they are as good as their best
    groups = (self.groups if self.family.gating is gguf.ExpertGatingFuncType.SIGMOID else 1,)
    for what, found, good in (("rope_interleave", d.get("rope_interleave", True), (True,)), ("rope_type", self.rope_type, ("default", "yarn")),
                              ("n_group", self.groups, groups), ("attention_bias", d.get("attention_bias", False), (False,)),
                              ("hidden_act", d.get("hidden_act", "silu"), ("silu",)),
                              ("mlp_layer_types", (d.get("mlp_layer_types") or ["dense"] * dense)[:dense], (["dense"] * dense,)),
                              ("rope_scaling.mscale", y.get("mscale"), (y.get("mscale_all_dim"),)),
                              ("rope_scaling.beta_fast", y.get("beta_fast", 32), (32,)),
                              ("rope_scaling.beta_slow", y.get("beta_slow", 1), (1,))):
      if found not in good: raise ConvertError(f"config.json: {what}: expected {' or '.join(map(str, good))}, found {found}")
  def __getitem__(self, key: str) -> Any:
    if self.d.get(key) is None: raise ConvertError(f"config.json: {key}: expected a value, found none")
    return self.d[key]

def read_json(path: pathlib.Path) -> dict[str, Any]:
  try: d = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as e: raise ConvertError(f"{path}: {e}") from None
  if not isinstance(d, dict): raise ConvertError(f"{path}: expected an object, found {type(d).__name__}")
  return d

def add_about(w: gguf.GGUFWriter, folder: pathlib.Path) -> None:
  """name and description, of the model card where README.md has one; sampling's defaults of generation_config.json where there are any"""
  try: card = gguf.Metadata.load_model_card(folder)
  except (OSError, ValueError, yaml.YAMLError) as e: raise ConvertError(f"{folder / 'README.md'}: {' '.join(str(e).split())}") from None
  w.add_name(str(card.get("model_name", folder.resolve().name)))
  if "model_description" in card: w.add_description(str(card["model_description"]))
  if not (path := folder / "generation_config.json").exists(): return
  g = read_json(path)
  if g.get("do_sample") is False: g = {"temperature": 0}  # always the likeliest token: what else the file says is of no use
  for key, kind, add in (("temperature", float, w.add_sampling_temp), ("top_k", int, w.add_sampling_top_k), ("top_p", float, w.add_sampling_top_p),
                         ("min_p", float, w.add_sampling_min_p), ("repetition_penalty", float, w.add_sampling_penalty_repeat)):
    if (value := g.get(key)) is None: continue
    if not isinstance(value, (int, kind)) or isinstance(value, bool): raise ConvertError(f"{path}: {key}: expected {kind.__name__}, found {value!r}")
    add(kind(value))

def add_keys(w: gguf.GGUFWriter, c: Config, mtp: bool) -> None:
  w.add_block_count(c.blocks + mtp)
  if mtp: w.add_nextn_predict_layers(1)
  w.add_context_length(c["max_position_embeddings"])
  w.add_embedding_length(c["hidden_size"])
  w.add_vocab_size(c["vocab_size"])
  w.add_feed_forward_length(c["intermediate_size"])
  w.add_layer_norm_rms_eps(c["rms_norm_eps"])
  w.add_head_count(c["num_attention_heads"])
  w.add_head_count_kv(1)  # one latent key for all heads
  if c.d.get("q_lora_rank"): w.add_q_lora_rank(c["q_lora_rank"])
  w.add_kv_lora_rank(c["kv_lora_rank"])
  w.add_rope_dimension_count(c["qk_rope_head_dim"])
  w.add_rope_freq_base(float(c.rope["rope_theta"]))
  w.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
  w.add_value_length(c["kv_lora_rank"])
  w.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
  w.add_value_length_mla(c["v_head_dim"])
  w.add_leading_dense_block_count(c.dense)
  w.add_expert_feed_forward_length(c["moe_intermediate_size"] if c.experts else c["intermediate_size"])
  w.add_expert_shared_count((c.d.get("n_shared_experts") or 0) if c.experts else 0)
  if c.experts:
    w.add_expert_count(c.experts)
    w.add_expert_used_count(c["num_experts_per_tok"])
    if c.groups > 1:
      w.add_expert_group_count(c.groups)
      w.add_expert_group_used_count(c["topk_group"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_weights_norm(c["norm_topk_prob"])
    w.add_expert_gating_func(c.family.gating)
  if c.rope_type == "yarn":
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(float(c.rope["factor"]))
    w.add_rope_scaling_orig_ctx_len(c.rope["original_max_position_embeddings"])
    w.add_rope_scaling_yarn_log_mul(.1 * (c.rope.get("mscale_all_dim") or 0))

def add_vocabulary(w: gguf.GGUFWriter, c: Config, folder: pathlib.Path) -> None:
  tok, size = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), c["vocab_size"]
  words = {i: (s, gguf.TokenType.NORMAL) for s, i in tok["model"]["vocab"].items()}
  words |= {a["id"]: (a["content"], gguf.TokenType.CONTROL if a["special"] else gguf.TokenType.USER_DEFINED) for a in tok["added_tokens"]}
  if max(words) >= size: raise ConvertError(f"tokenizer.json: ids: expected fewer than vocab_size {size}, found {max(words)}")
  words = [words.get(i, (f"[PAD{i}]", gguf.TokenType.UNUSED)) for i in range(size)]
  w.add_tokenizer_model("gpt2")
  w.add_tokenizer_pre(c.family.pre)
  w.add_token_list([s for s, _ in words])
  w.add_token_types([t for _, t in words])
  special, ids = gguf.SpecialVocab(folder, load_merges=True, n_vocab=size), {s: i for i, (s, _) in enumerate(words)}
  for key, text in c.family.special.items():
    if text in ids: special.special_token_ids[key] = ids[text]
  special.add_to_gguf(w, quiet=True)

def read_folder(folder: pathlib.Path) -> dict[str, Callable[[], np.ndarray]]:
  """tensor name -> how to read it as float32"""
  def reader(t) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
      if t.dtype not in ("F32", "F16", "BF16"):
        raise ConvertError(f"{t.data_range.filename}: tensor type: expected F32, F16 or BF16, found {t.dtype}")
      return gguf.quants.dequantize(t.mmap_bytes(), T[t.dtype]).astype(np.float32).reshape(t.shape)
    return read
  files = sorted(folder.glob("*.safetensors"))
  if not files: raise ConvertError(f"{folder}: expected *.safetensors files, found none")
  return {name: reader(t) for f in files for name, t in gguf.utility.SafetensorsLocal(f).tensors.items()}

def has_mtp(c: Config, tensors: dict[str, Callable[[], np.ndarray]]) -> bool:
  return bool(c.d.get("num_nextn_predict_layers")) and f"model.layers.{c.blocks}.eh_proj.weight" in tensors

def surgery(c: Config, tensors: dict[str, Callable[[], np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
  """Hugging Face's tensors as GGUF ones, under GGUF names: experts stacked, kv_b split in two, every other matrix as it is.

  All three families keep RoPE's pairs adjacent, as GGUF does, so no row moves.
  """
  blocks = c.blocks + has_mtp(c, tensors)
  names, left = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, blocks), dict(tensors)
  def take(name: str, *shape: int) -> np.ndarray:
    if name not in left: raise ConvertError(f"{name}: expected a tensor, found none")
    t = left.pop(name)()
    if shape and t.shape != shape: raise ConvertError(f"{name}: expected shape {shape}, found {t.shape}")
    return t
  H, nope, v, latent = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
  if c.d.get("tie_word_embeddings"): left.pop("lm_head.weight", None)
  ahead = [n for n in left if (m := re.match(r"model\.layers\.(\d+)\.", n)) and int(m[1]) >= blocks]
  if ahead: print(f"left out: {len(ahead)} tensors of blocks that predict {blocks - c.blocks + 2} or more tokens ahead (MTP)")
  for name in ahead: del left[name]
  if blocks > c.blocks:
    layer = f"model.layers.{c.blocks}."
    for part, gg in NEXTN.items():
      if part not in ("eh_proj", "enorm", "hnorm") and f"{layer}{part}.weight" not in left: continue
      t = take(f"{layer}{part}.weight")
      own = next((tensors[name] for name in AGAIN.get(part, ()) if name in tensors), None)
      if own is None or not np.array_equal(t, own()): yield f"blk.{c.blocks}.nextn.{gg}.weight", t
  for name in list(left):
    if name not in left: continue  # taken with its fellows
    if name.endswith(".kv_b_proj.weight"):
      b, kv = f"blk.{name.split('.')[2]}.", take(name, H * (nope + v), latent).reshape(H, nope + v, latent)
      yield b + "attn_k_b.weight", kv[:, :nope].transpose(0, 2, 1)  # from the key's side into the latent: (H, latent, nope)
      yield b + "attn_v_b.weight", kv[:, nope:]
      continue
    if m := re.fullmatch(r"(.*\.mlp\.experts)\.\d+\.(\w+)\.weight", name):
      name = f"{m[1]}.{m[2]}.weight"
      t = np.stack([take(f"{m[1]}.{e}.{m[2]}.weight") for e in range(c.experts)])
    else: t = take(name)
    if not (gg := names.get_name(name.replace("e_score_correction_bias", "e_score_correction.bias"), (".weight", ".bias"))):
      raise ConvertError(f"{name}: expected a tensor of {c.d['model_type']}")
    yield gg, t

def type_of(name: str, shape: tuple[int, ...], kind: T, c: Config) -> T:
  """the type that a tensor gets: llama.cpp's choice for the file type `kind`, its fallbacks for short rows too"""
  stem = name.removesuffix(".weight").split(".", 2)[-1]
  if len(shape) == 1 or stem == "ffn_gate_inp" or kind == T.F32: return T.F32
  if kind == T.Q4_0:
    block = int(name.split(".")[1]) if name.startswith("blk.") else 0
    # the first down projections get a minimum as well: in an eighth of the blocks, as in the public file (5 of 47), here in two at least
    kind = MIX.get(stem, T.Q4_1 if stem in ("ffn_down", "ffn_down_exps") and block < max(2, c.blocks // 8) else kind)
    if stem == "token_embd" and c.d.get("tie_word_embeddings"): kind = MIX["output"]  # it is the head too
  return T.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind

def convert(folder: pathlib.Path, out: pathlib.Path, kind: str = "F16") -> None:
  """Write `out`. Raises ConvertError, in one line, for a folder it cannot convert."""
  c = Config(read_json(folder / "config.json"))
  w = gguf.GGUFWriter(out, "deepseek2", use_temp_file=True)
  add_about(w, folder)
  tensors = read_folder(folder)
  add_keys(w, c, has_mtp(c, tensors))
  add_vocabulary(w, c, folder)
  w.add_file_type(TYPES[kind])
  w.add_quantization_version(gguf.GGML_QUANT_VERSION)
  for name, t in surgery(c, tensors):
    t, kept = np.ascontiguousarray(t, np.float32), type_of(name, t.shape, T[kind], c)
    w.add_tensor(name, gguf.quants.quantize(t, kept), raw_dtype=kept)
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()

def main() -> int:
  p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  p.add_argument("folder", type=pathlib.Path, help="config.json, *.safetensors, tokenizer.json")
  p.add_argument("out", type=pathlib.Path, help="the GGUF file to write")
  p.add_argument("--type", default="F16", choices=TYPES, help="type of the matrices (default F16)")
  a = p.parse_args()
  try: convert(a.folder, a.out, a.type)
  except (ConvertError, OSError) as e:
    print(f"hf_to_gguf: {e}", file=sys.stderr)
    return 2
  print(f"{a.out}: {a.out.stat().st_size:,} bytes")
  return 0

if __name__ == "__main__": sys.exit(main())
