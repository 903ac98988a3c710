"""The whole way in seconds: a block of GLM-4.7-Flash's architecture is loaded, agrees with the naive forward pass and decodes."""
import numpy as np
from extra.mkgguf import write_model
from oracle import logits, nmse
from tinygrad.apps.llm import load

def test_tiny(tmp_path):
  path, = write_model(tmp_path / "tiny.gguf", "small-glm", "Q4_0", blocks=1, dense=0, vocab=320, dim=128, heads=2, kv_lora=64, q_lora=64,
                      nope=32, rope=32, v=64, ff=128, moe_ff=64, experts=4, used=2)
  model = load(path, max_context=32)
  ids = model.tokenizer.encode("a list is a mutable sequence")
  assert model.tokenizer.decode(ids) == "a list is a mutable sequence"
  assert nmse(model.logits(ids), logits(path, ids, np.float32)) < 1e-5
  # decode, token by token through the cache, chooses what the oracle finds likeliest
  chosen = list(model.generate(ids, 4, stop=False))
  expected = logits(path, ids + chosen[:-1], np.float32)[len(ids) - 1:]
  assert [row[token] for row, token in zip(expected, chosen)] == [*map(lambda row: row.max(), expected)]
