"""A model whose words are known, for the chat's tests; as a script, a conversation with it. A token is a byte, or the name of a special token."""
from __future__ import annotations
import itertools, sys
from pathlib import Path
if __name__ == "__main__": sys.path[0] = str(Path(__file__).parents[1])
from types import SimpleNamespace
from typing import Iterator
from gguf import TokenType
from tinygrad.apps.engine.engine import DeviceFailed
from tinygrad.apps.models import Model
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.engine.sequence import Request, Sequence
from tinygrad.apps.tokenizer import _BYTE_OF, Tokenizer, Vocabulary

SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<think>", "</think>"]
LETTERS = {b: c for c, b in _BYTE_OF.items()}

def vocabulary(specials:list[str]=SPECIALS) -> Tokenizer:
  tokens, types = [chr(LETTERS[b]) for b in range(256)] + specials, [TokenType.NORMAL] * 256 + [TokenType.USER_DEFINED] * len(specials)
  types[256:258] = [TokenType.CONTROL] * 2
  return Tokenizer("talker", Vocabulary("glm4", tokens, types, [], bos_id=None, eos_id=256, add_bos=False, stops=frozenset()))

class Talker(Model):
  """Answers by the last word of the question. It thinks first where the prompt asks it to. It is its own engine."""
  def __init__(self, capacity:int=1 << 16):
    self.tokenizer, self.engine, self.capacity, self.pool, self.kernels_a_token = vocabulary(), self, capacity, SimpleNamespace(rows=capacity), 0
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
    elif word in ("full", "broken"):
      yield "half an "
      raise MemoryError("no room") if word == "full" else DeviceFailed("the device failed: CUDA:1: gone")
    elif word == "escape": yield "a\x1b[31mred\x07\x9b2J\u202eb\tc"
    else: yield f"heard {len(said)} characters, {said.count(chr(10)) + 1} lines, {prompt.count('<|user|>')} turns, seed {sampling.seed}"

  def wait(self) -> None: pass   # nothing is under way

  def add(self, request:Request) -> Sequence:
    self.prompts.append(self.tokenizer.decode(request.ids))
    self.lengths.append(len(request.ids))
    self.kernels_a_token = 1
    return Sequence(request, self.capacity - len(request.ids))
  def stream(self, s:Sequence) -> Iterator[int]:
    texts = self.words(self.tokenizer.decode(s.ids), s.sampling)
    for token in itertools.chain((t for text in texts for t in self.tokenizer.encode(text, special=True)), [self.tokenizer.eos_id]):
      if s.left <= 0: return
      s.ids.append(token)
      yield token
  def bursts(self, s:Sequence) -> Iterator[list[int]]: return ([token] for token in self.stream(s))
  def abort(self, s:Sequence) -> None: s.aborted = True

if __name__ == "__main__":
  from tinygrad.apps.terminal import Options, chat_loop
  chat_loop(Talker(int(sys.argv[1])), Options(Sampling(1.0, seed=7)), introduction="the talker")
