"""A model whose words are known, for the chat's tests; as a script, a conversation with it. A token is a byte, or the name of a special token."""
from __future__ import annotations
import itertools, sys
from pathlib import Path
if __name__ == "__main__": sys.path[0] = str(Path(__file__).parents[1])
from typing import Iterator
from gguf import TokenType
from tinygrad.apps.models import Model
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.tokenizer import _BYTE_OF, Tokenizer, Vocabulary

SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<think>", "</think>"]
LETTERS = {b: c for c, b in _BYTE_OF.items()}

def vocabulary(specials:list[str]=SPECIALS) -> Tokenizer:
  tokens, types = [chr(LETTERS[b]) for b in range(256)] + specials, [TokenType.NORMAL] * 256 + [TokenType.USER_DEFINED] * len(specials)
  types[256:258] = [TokenType.CONTROL] * 2
  return Tokenizer("talker", Vocabulary("glm4", tokens, types, [], bos_id=None, eos_id=256, add_bos=False, stops=frozenset()))

class Talker(Model):
  """Answers by the last word of the question. It thinks first where the prompt asks it to."""
  def __init__(self, max_context:int=1 << 16):
    self.tokenizer, self.generator, self.max_context, self.kernels_a_token, self.full = vocabulary(), self, max_context, 0, False
    self.name, self.sampling, self.prompts, self.lengths = "talker", Sampling(), [], []

  def render(self, messages:list[dict[str, str]], enable_thinking:bool=True) -> list[int]:
    text = "".join(f"<|{m['role']}|>{m['content']}" for m in messages) + "<|assistant|>" + ("<think>" if enable_thinking else "</think>")
    return self.tokenizer.encode(text, special=True)

  def words(self, prompt:str, sampling:Sampling) -> Iterator[str]:
    said = prompt.split("<|user|>")[-1].split("<|assistant|>")[0]
    word = said.split()[-1]
    if prompt.endswith("<think>"):
      yield "thought "
      yield from itertools.repeat("on and on ", 1 if word != "ponder" else 10**9)
      yield "</think>"
    if word == "forever": yield from itertools.repeat("ever ", 10**9)
    elif word == "escape": yield "a\x1b[31mred\x07\x9b2J\u202eb\tc"
    else: yield f"heard {len(said)} characters, {said.count(chr(10)) + 1} lines, {prompt.count('<|user|>')} turns, seed {sampling.seed}"

  def generate(self, ids:list[int], count:int|None, sampling:Sampling, stops:frozenset[int]) -> Iterator[int]:
    self.prompts.append(prompt := self.tokenizer.decode(ids))
    self.lengths.append(len(ids))
    self.full, left, self.kernels_a_token = False, self.max_context - len(ids), 1
    for text in self.words(prompt, sampling):
      for token in self.tokenizer.encode(text, special=True):
        if count is not None and (count := count - 1) < 0: return
        if self.full: return
        yield token
        self.full = (left := left - 1) <= 0
    yield self.tokenizer.eos_id

if __name__ == "__main__":
  from tinygrad.apps.terminal import Options, chat_loop
  chat_loop(Talker(int(sys.argv[1])), Options(Sampling(1.0, seed=7)), introduction="the talker")
