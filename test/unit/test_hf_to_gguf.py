"""extra/hf_to_gguf.py against files made from transformers' checkpoints, and the built-in model against transformers' logits. Needs no torch."""
import json
from pathlib import Path
from typing import Any
import gguf, numpy as np, pytest
from gguf import GGMLQuantizationType as T
from extra.hf_to_gguf import FAMILIES, main
from extra.mkgguf import write_model
from oracle import forward_mtp, logits, nmse
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.mla import Config

ROOT = Path(__file__).resolve().parents[2]
GOLDENS, TINY = ROOT / "test/goldens", ROOT / "models/tiny-glm-Q4_0.gguf"

# config.json as the public checkpoints write it: GLM's in the newer form of RoPE's parameters, the others' in the older one
SAME = dict(vocab_size=288, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=64, qk_nope_head_dim=32, v_head_dim=32,
            intermediate_size=160, max_position_embeddings=512, rms_norm_eps=1e-6)
CONFIGS: dict[str, dict[str, Any]] = {
  "small-glm": dict(SAME, model_type="glm4_moe_lite", num_hidden_layers=3, first_k_dense_replace=1, q_lora_rank=32, qk_rope_head_dim=16,
    moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, routed_scaling_factor=1.8, norm_topk_prob=True,
    n_group=1, num_nextn_predict_layers=1, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
  "small-ds2": dict(SAME, model_type="deepseek_v2", num_hidden_layers=3, first_k_dense_replace=1, q_lora_rank=None, qk_rope_head_dim=32,
    moe_intermediate_size=96, n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=2, routed_scaling_factor=1.0, norm_topk_prob=False,
    n_group=1, rope_theta=10000,
    rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": .707, "mscale_all_dim": .707,
                  "beta_fast": 32, "beta_slow": 1}),
  "small-youtu": dict(SAME, model_type="youtu", num_hidden_layers=2, q_lora_rank=96, qk_rope_head_dim=16, tie_word_embeddings=True,
                      rope_theta=1600000, rope_scaling=None),
}
NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj",
         "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
         "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_output": "self_attn.o_proj", "ffn_gate_inp": "mlp.gate",
         "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
         **{f"ffn_{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")},
         **{f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
         **{f"nextn.{n}": n for n in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
         **{f"nextn.shared_head_{n}": f"shared_head.{n}" for n in ("norm", "head")}}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}

def arrays(path: Path) -> dict[str, np.ndarray]:
  """a file's tensors, dequantized, in numpy order"""
  return {t.name: np.array(gguf.quants.dequantize(t.data, t.tensor_type)).reshape(t.shape[::-1]) for t in gguf.GGUFReader(path).tensors}

def types(path: Path) -> dict[str, T]: return {t.name: t.tensor_type for t in gguf.GGUFReader(path).tensors}

def keys(path: Path) -> dict[str, Any]: return {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}

def checkpoint(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The tensors as a public checkpoint holds them: one matrix an expert, keys and values of a head together."""
  out = {TOP[n]: t for n, t in tensors.items() if n in TOP}
  for name, t in tensors.items():
    if name in TOP: continue
    _, block, stem = name.removesuffix(".weight").split(".", 2)
    layer = f"model.layers.{block}."
    if stem == "attn_k_b":
      kv = np.concatenate([t.transpose(0, 2, 1), tensors[f"blk.{block}.attn_v_b.weight"]], 1)
      out[layer + "self_attn.kv_b_proj.weight"] = kv.reshape(-1, t.shape[1])
    elif stem.endswith("_exps"): out |= {f"{layer}mlp.experts.{e}.{stem.split('_')[1]}_proj.weight": w for e, w in enumerate(t)}
    elif stem != "attn_v_b": out[layer + NAMES[stem] + ("" if stem.endswith(".bias") else ".weight")] = t
  return out

def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
  """uint8 header length, JSON header, data; `dtype` F32, F16 or BF16 for the matrices"""
  header, data = {}, b""
  for name, t in tensors.items():
    kind = dtype if t.ndim > 1 else "F32"
    raw = {"F32": lambda: t.astype(np.float32), "F16": lambda: t.astype(np.float16),
           "BF16": lambda: (t.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)}[kind]().tobytes()
    header[name] = {"dtype": kind, "shape": t.shape, "data_offsets": [len(data), len(data) + len(raw)]}
    data += raw
  head = json.dumps(header).encode()
  path.write_bytes(len(head).to_bytes(8, "little") + head + data)

def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], dtype: str = "F16") -> Path:
  folder.mkdir()
  names = sorted(tensors)
  for i in range(2): write_safetensors(folder / f"model-0000{i + 1}-of-00002.safetensors", {n: tensors[n] for n in names[i::2]}, dtype)
  (folder / "config.json").write_text(json.dumps(config))
  words = {chr(0x100 + i): i for i in range(256)} | {"\u0120\u0121": 256}
  added = [{"id": 260 + i, "content": s, "special": s != "<think>"}
           for i, s in enumerate(("<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>", "<think>"))]
  model = {"type": "BPE", "vocab": words, "merges": [["\u0120", "\u0121"]]}
  (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
  (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "add_bos_token": False, "chat_template": "{{ messages }}"}))
  return folder

def convert(folder: Path, kind: str) -> Path:
  out = folder.parent / f"{folder.name}-{kind}.gguf"
  with pytest.MonkeyPatch.context() as m:
    m.setattr("sys.argv", ["hf_to_gguf.py", str(folder), str(out), "--type", kind])
    assert main() == 0
  return out

@pytest.mark.parametrize("name", CONFIGS)
def test_same_as_from_transformers(name: str, tmp_path: Path):
  golden = GOLDENS / f"{name}-F16.gguf"
  want, hf = arrays(golden), checkpoint(arrays(golden))
  if name == "small-glm": hf["model.layers.4.eh_proj.weight"] = np.ones((64, 128))    # a block that predicts more than two tokens ahead
  if name == "small-youtu": hf["lm_head.weight"] = hf["model.embed_tokens.weight"]  # tied, yet stored
  out = convert(write_folder(tmp_path / name, CONFIGS[name], hf), "F16")
  got = arrays(out)
  assert types(out) == types(golden) and set(got) == set(want)
  for n in want: assert got[n].shape == want[n].shape and np.array_equal(got[n], want[n]), n
  ours, theirs = ({k: v for k, v in keys(f).items() if k.startswith("deepseek2.")} for f in (out, golden))
  assert ours == theirs

@pytest.mark.parametrize("again", [False, True])
def test_a_block_that_predicts_two_tokens_ahead(again: bool, tmp_path: Path):
  """Under llama.cpp's names, with the keys that count it. again: its embedding and its head are the model's, and are left out"""
  source, = write_model(tmp_path / "m.gguf", "small-glm", "F16", mtp=True, blocks=3, dim=64, heads=4, q_lora=32, kv_lora=64, nope=32, rope=16, v=32,
                        ff=160, moe_ff=32, experts=8, used=3, vocab=288)
  want = arrays(source)
  copies = {"blk.3.nextn.embed_tokens.weight": "token_embd.weight", "blk.3.nextn.shared_head_head.weight": "output.weight"}
  if again: want |= {copy: want[own] for copy, own in copies.items()}
  out = convert(write_folder(tmp_path / "hf", CONFIGS["small-glm"], checkpoint(want), "F32"), "F16")
  got, k = arrays(out), keys(out)
  assert set(got) == {*want} - (set(copies) if again else set()) and all(np.array_equal(got[n], want[n]) for n in got)
  assert (k["deepseek2.block_count"], k["deepseek2.nextn_predict_layers"], k["deepseek2.leading_dense_block_count"]) == (4, 1, 1)
  assert forward_mtp(out, [*range(9)])[0].shape == (8, 288)
  assert types(convert(tmp_path / "hf", "Q4_0")).get("blk.3.nextn.shared_head_head.weight") == (None if again else T.Q8_0)

def test_keys(tmp_path: Path):
  k = {n: keys(GOLDENS / f"{n}-F16.gguf") for n in CONFIGS}
  def of(name: str, *wanted: str) -> list[Any]: return [k[name].get("deepseek2." + w) for w in wanted]
  for name in CONFIGS:
    assert k[name]["general.architecture"] == "deepseek2" and k[name]["tokenizer.ggml.pre"] == FAMILIES[CONFIGS[name]["model_type"]].pre
  latent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.key_length_mla", "attention.value_length_mla",
            "attention.q_lora_rank")
  assert of("small-glm", *latent) == [1, 80, 64, 48, 32, 32] and of("small-ds2", *latent) == [1, 96, 64, 64, 32, None]
  assert of("small-youtu", *latent) == [1, 80, 64, 48, 32, 96]
  experts = ("leading_dense_block_count", "expert_count", "expert_used_count", "expert_shared_count", "expert_gating_func", "expert_weights_norm")
  assert of("small-glm", *experts) == [1, 8, 3, 1, 2, True] and of("small-ds2", *experts) == [1, 6, 3, 2, 1, False]
  assert of("small-youtu", *experts) == [2, None, None, 0, None, None]
  yarn = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.yarn_log_multiplier")
  assert of("small-ds2", *yarn) == ["yarn", 40, 4096, pytest.approx(.0707)] and of("small-glm", *yarn) == [None] * 4
  assert of("small-glm", "rope.freq_base", "expert_weights_scale") == [1e6, pytest.approx(1.8)]

def test_experts_in_groups(tmp_path: Path):
  """The keys by which a reader's choice is another; none where all experts are one group"""
  hf = checkpoint(arrays(GOLDENS / "small-glm-F16.gguf"))
  plain, grouped = (convert(write_folder(tmp_path / name, CONFIGS["small-glm"] | more, hf), "F16")
                    for name, more in (("plain", {"topk_group": 1}), ("grouped", {"n_group": 4, "topk_group": 2})))
  of_groups = {"deepseek2.expert_group_count": 4, "deepseek2.expert_group_used_count": 2}
  own, others = ({k: v for k, v in keys(f).items() if not k.startswith("general.")} for f in (grouped, plain))
  assert own == others | of_groups and not set(of_groups) & set(others)
  c = Config.from_gguf(read_gguf(grouped))
  assert (c.n_groups, c.n_used_groups) == (4, 2) and Config.from_gguf(read_gguf(plain)).n_groups == 1
  ids = np.random.default_rng(0).integers(0, 256, 16)
  assert nmse(logits(grouped, ids), logits(plain, ids)) > 1e-6

def test_vocabulary(tmp_path: Path):
  k = keys(convert(write_folder(tmp_path / "m", CONFIGS["small-glm"], checkpoint(arrays(GOLDENS / "small-glm-F16.gguf"))), "F32"))
  words, kinds = k["tokenizer.ggml.tokens"], k["tokenizer.ggml.token_type"]
  assert len(words) == len(kinds) == 288 and words[65] == "\u0141" and words[256] == "\u0120\u0121"
  assert k["tokenizer.ggml.merges"] == ["\u0120 \u0121"]
  assert kinds[256:258] == [1, 5] and words[257] == "[PAD257]" and kinds[260:266] == [3, 3, 3, 3, 4, 5]  # 5 unused, 3 control, 4 user-defined
  assert {n: k[f"tokenizer.ggml.{n}_token_id"] for n in ("eos", "bos", "eot", "eom")} == {"eos": 260, "bos": 261, "eot": 262, "eom": 263}
  assert k["tokenizer.chat_template"] == "{{ messages }}" and k["tokenizer.ggml.add_bos_token"] is False

def test_card_and_sampling(tmp_path: Path):
  """the name is the folder's where no model card has another; sampling's defaults are there only where the folder has some"""
  def about(name: str, files: dict[str, str]) -> dict[str, Any]:
    folder = write_folder(tmp_path / name, CONFIGS["small-youtu"], checkpoint(arrays(GOLDENS / "small-youtu-F16.gguf")))
    for file, text in files.items(): (folder / file).write_text(text)
    found = keys(convert(folder, "F16"))
    return {k: v for k, v in found.items() if k.startswith(("general.name", "general.description", "general.sampling."))}
  card = "---\nmodel_name: A Model\nmodel_description: \"says: little\"\n---\n# words\n"
  assert about("plain", {}) == {"general.name": "plain"}
  config = '{"do_sample": true, "temperature": 1, "top_p": 0.5, "top_k": null, "x": 3}'
  assert about("card", {"README.md": card, "generation_config.json": config}) == {
    "general.name": "A Model", "general.description": "says: little", "general.sampling.temp": 1.0, "general.sampling.top_p": .5}
  assert about("greedy", {"README.md": "no front matter", "generation_config.json": '{"do_sample": false, "top_k": 50}'}) == {
    "general.name": "greedy", "general.sampling.temp": 0.0}

@pytest.mark.parametrize("kind,step", [("F32", 0), ("BF16", 2 ** -8), ("Q8_0", 1 / 220), ("Q4_0", 1 / 7.9)])
def test_types(kind: str, step: float, tmp_path: Path):
  """each weight within a step (Q4_0 cuts +8 to +7) or half a step of the largest; the mix of the Q4_0 file; vectors and the router always F32"""
  source = arrays(GOLDENS / "small-glm-F16.gguf")
  out = convert(write_folder(tmp_path / "m", CONFIGS["small-glm"], checkpoint(source), "F32"), kind)
  t, got = types(out), arrays(out)
  for n, x in source.items():
    assert np.abs(got[n] - x).max() <= step * np.abs(x).max(), n
    if x.ndim == 1 or "gate_inp" in n: assert t[n] == T.F32 and np.array_equal(got[n], x)
  if kind != "Q4_0": return
  eight = ("attn_kv_a_mqa", "attn_k_b", "attn_v_b", "output", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
  for n, x in source.items():
    stem = n.removesuffix(".weight").split(".")[-1]
    want = T.Q8_0 if stem in eight else T.Q4_1 if n in ("blk.0.ffn_down.weight", "blk.1.ffn_down_exps.weight") else T.Q4_0
    assert t[n] == (T.F32 if x.ndim == 1 or stem == "ffn_gate_inp" else want), n

def test_bfloat16_source(tmp_path: Path):
  def cut(x: np.ndarray) -> np.ndarray: return (x.astype(np.float32).view(np.uint32) & 0xffff0000).view(np.float32) if x.ndim > 1 else x
  short = {n: cut(x) for n, x in arrays(GOLDENS / "small-youtu-F16.gguf").items()}
  got = arrays(convert(write_folder(tmp_path / "m", CONFIGS["small-youtu"], checkpoint(short), "BF16"), "F32"))
  for n in short: assert np.array_equal(got[n], short[n]), n

def test_rows_that_no_block_divides(tmp_path: Path):
  hf = checkpoint(arrays(GOLDENS / "small-youtu-F16.gguf"))
  for i in range(2): hf[f"model.layers.{i}.mlp.down_proj.weight"] = hf[f"model.layers.{i}.mlp.down_proj.weight"][:, :150]
  folder = write_folder(tmp_path / "m", CONFIGS["small-youtu"] | dict(intermediate_size=150), hf)
  assert types(convert(folder, "Q4_0"))["blk.1.ffn_down.weight"] == T.F16

BAD = {"model_type": dict(model_type="llama"), "topk_group": dict(n_group=4),
       "n_group": dict(model_type="deepseek_v2", n_group=4, topk_group=2), "rope_interleave": dict(rope_interleave=False),
       "kv_lora_rank": dict(kv_lora_rank=None), "vocab_size": dict(vocab_size=200), "experts.8.": dict(n_routed_experts=9),
       "rope_type": dict(rope_parameters={"rope_type": "longrope", "rope_theta": 1e6}), "kv_b_proj": dict(num_attention_heads=8)}
FILES = {"config.json": "{", "README.md": "---\na: [\n---\n", "generation_config.json": "[]",
         "top_k": '{"top_k": 0.5}', "temperature": '{"temperature": "1"}'}
@pytest.mark.parametrize("field", [*BAD, "embed_extra", *FILES, "safetensors"])
def test_errors_are_one_line(field: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
  hf = checkpoint(arrays(GOLDENS / "small-glm-F16.gguf"))
  if field == "embed_extra": hf["model.embed_extra.weight"] = np.ones((2, 32))
  folder = write_folder(tmp_path / "m", CONFIGS["small-glm"] | BAD.get(field, {}), hf)
  if field in FILES: (folder / (field if "." in field else "generation_config.json")).write_text(FILES[field])
  if field == "safetensors":
    for f in folder.glob("*.safetensors"): f.unlink()
  monkeypatch.setattr("sys.argv", ["hf_to_gguf.py", str(folder), str(tmp_path / "out.gguf")])
  assert main() == 2
  err = capsys.readouterr().err
  assert err.count("\n") == 1 and field in err and "Traceback" not in err

def test_built_in_model():
  assert TINY.stat().st_size <= 7_000_000
  k, t = keys(TINY), types(TINY)
  assert "tiny demonstration" in k["general.description"] and k["general.sampling.temp"] == 0
  assert set(t.values()) == {T.F32, T.Q4_0, T.Q4_1, T.Q8_0} and k["deepseek2.expert_count"] == 16 and k["deepseek2.expert_used_count"] == 4
  assert np.abs(arrays(TINY)["blk.1.exp_probs_b.bias"]).max() > 1e-3  # training has moved the router's bias
  golden = np.load(GOLDENS / "tiny-glm-Q4_0.npz")
  got = logits(TINY, golden["ids"])
  assert (got.argmax(-1) == golden["top1"]).mean() > .999 and nmse(got[golden["positions"]], golden["logits"]) < 1e-9
