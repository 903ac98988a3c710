"""The whole way in seconds: a block of GLM-4.7-Flash's architecture is loaded, agrees with the naive forward pass and decodes; the built-in model
answers what people try first."""
import numpy as np
from extra.mkgguf import write_model
from oracle import logits, nmse
from tinygrad.apps.llm import load
from tinygrad.apps.models import BUILT_IN
from tinygrad.apps.engine.sampling import Sampling

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

ANSWERS = {  # questions, the last of a conversation and those before it parted by " / " -> a word of the answer
  "hello": "tiny demonstration", "HELLO": "tiny demonstration", "What is a list?": "mutable sequence", "what is a list": "mutable sequence",
  "How do I sort a list?": "sort()", "how to open a file": "open(", "what is a tuple / thanks": "welcome", "what is the weather": "do not know",
  "who are you?": "Python's documentation", "Are you ChatGPT?": "tiny demonstration",
}

def test_the_built_in_model_knows_its_place():
  model = load(BUILT_IN, max_context=256)
  def ask(*questions: str) -> str:
    talk: list[dict[str, str]] = []
    for question in questions:
      talk.append({"role": "user", "content": question})
      talk.append({"role": "assistant", "content": "".join(model.chat(talk, 70, Sampling(temperature=0)))})
    return talk[-1]["content"]
  answers = {q: ask(*q.split(" / ")) for q in ANSWERS}
  assert not {q: a for q, a in answers.items() if ANSWERS[q] not in a}
