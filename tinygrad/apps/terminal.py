"""A person at a terminal: answers as they come, and a conversation."""
from __future__ import annotations
from typing import Iterator
from tinygrad.apps.generate import ContextFull
from tinygrad.apps.models import Model
from tinygrad.apps.sampling import Sampling

def say(model:Model, pieces:Iterator[str]) -> str:
  """Prints an answer as it comes; Ctrl-C stops it. Returns what was printed."""
  said = ""
  try:
    for piece in pieces:
      print(piece, end="", flush=True)
      said += piece
  except KeyboardInterrupt: print(" [stopped]", end="")
  if model.generator.full: print(f" [the context of {model.generator.max_context} tokens is full]", end="")
  print(flush=True)
  return said

def converse(model:Model, count:int|None, sampling:Sampling, stops:tuple[str, ...]) -> None:
  print("Ctrl-C stops an answer, Ctrl-D leaves.")
  messages:list[dict[str, str]] = []
  while True:
    try: text = input("> ")
    except EOFError: return print()
    except KeyboardInterrupt:
      print()
      continue
    if not text.strip(): continue
    messages.append({"role": "user", "content": text})
    try: messages.append({"role": "assistant", "content": say(model, model.chat(messages, count, sampling, stops))})
    except ContextFull as e:
      messages.pop()
      print(f"{e}; start anew or raise --max_context")
