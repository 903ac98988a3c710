"""What the HTTP side knows of a model: its file's header, and no weight. Nothing here opens a device."""
from __future__ import annotations
import dataclasses
from pathlib import Path
from typing import Any
from tinygrad.apps.chat import Chat
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.models import words_of
from tinygrad.apps.reasoning import CLOSE, OPEN, REASONING, Reasoning
from tinygrad.apps.tokenizer import Tokenizer
from tinygrad.apps.tool_calls import family_of

class Voice:
  """name: what clients call the model. created: when its file was, in seconds since 1970. sampling: of what a request does not say. chat: None where
  the file has no usable template; chat_error says why. family: of its tool calls. longest: the bytes of the longest token."""
  def __init__(self, tokenizer:Tokenizer, chat:Chat|None, chat_error:str="", name:str="", created:int=0, sampling:Sampling=Sampling(),
               template:str=""):
    self.tokenizer, self.chat, self.chat_error, self.name, self.created, self.sampling = tokenizer, chat, chat_error, name, created, sampling
    self.template, self.family = template, family_of(template, tokenizer)
    self.longest = max(map(len, tokenizer.table))

  @classmethod
  def from_file(cls, path:Path, name:str|None=None, sampling:dict[str, Any]|None=None) -> Voice:
    """name: in place of the file's own. sampling: fields of Sampling, over what the model's makers advise. Raises GGUFError, ValueError."""
    words = words_of(f := read_gguf(path))
    drawn, created = dataclasses.replace(words.sampling, **(sampling or {})), int(path.stat().st_mtime)
    template = f.key("tokenizer.chat_template", str, default="")
    return cls(words.tokenizer, words.chat, words.chat_error, name or words.name, created, drawn, template)

  def thinks(self, ids:list[int]) -> bool:
    """Whether an answer to this prompt begins inside reasoning"""
    return Reasoning(self.tokenizer, ids).kind == REASONING

  def may_think(self, ids:list[int]) -> bool:
    """Whether the model may open reasoning itself, behind this prompt"""
    tokenizer, known = self.tokenizer, OPEN in self.tokenizer.special_tokens or OPEN in self.template
    return known and not self.thinks(ids) and not tokenizer.decode(ids[-len(CLOSE) - 8:]).rstrip().endswith(CLOSE)

  def go_on(self, prompt:list[int], content:str, thought:str="") -> list[int]:
    """The prompt, and behind it an answer that has begun. Markup in it stays markup, and names of control tokens are text, as in any answer."""
    inside = self.thinks(prompt)
    if thought: begun = thought if inside else OPEN + thought
    else: begun = ""
    if content and (thought or inside): begun += CLOSE
    assert self.chat is not None   # it made the prompt
    return prompt + self.chat.encode_answer(begun + content)
