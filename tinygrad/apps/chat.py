"""Messages to a prompt's token ids through a chat template: the file's `tokenizer.chat_template` (Jinja as Hugging Face renders it) or a family's
built-in one. template.py runs it, tokenizer.py encodes what it renders.

Special tokens come from templates alone: where a message holds the name of one, a mark is put before it, and a marked name is encoded as text."""
from __future__ import annotations
import re, secrets
from typing import Any
from tinygrad.apps.gguf import GGUFError, GGUFFile, one_line
from tinygrad.apps.template import MAX_DEPTH, MAX_INT, Refusal, Template
from tinygrad.apps.tokenizer import Tokenizer, any_of

# random digits: filters that quote, escape, strip or change case do not change the mark, and no message can hold it
MARK = str(10**23 + secrets.randbelow(9 * 10**23))

# for files without a template, by `tokenizer.ggml.pre`: conversations only
TALK = """{% if tools or messages | selectattr('tool_calls') | list or messages | rejectattr('role', 'in', ['system', 'user', 'assistant']) | list %}
{{- raise_exception('the file has no template, and the built-in one knows only system, user and assistant, no tools') }}{% endif %}"""
BUILT_IN = {
  "glm4": TALK + """[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>
{{- '</think>' + m.content.split('</think>')[-1].strip() if m.role == 'assistant' else m.content }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '</think>' if enable_thinking is false else '<think>' }}{% endif %}""",
  "deepseek-llm": TALK + """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ 'Assistant: ' + m.content + eos_token }}
{%- else %}{{ 'User: ' if m.role == 'user' }}{{ m.content + '\\n\\n' }}{% endif %}{% endfor %}{{ 'Assistant:' if add_generation_prompt }}""",
  "youtu": TALK + """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>
{{- m.content.split('</think>')[-1].strip() + eos_token }}
{%- else %}{{ '<|User|>' if m.role == 'user' }}{{ m.content }}{% endif %}{% endfor %}{{ '<|Assistant|>' if add_generation_prompt }}""",
  "deepseek-v3": TALK + """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>
{{- m.content.split('</think>')[-1] + eos_token }}
{%- else %}{{ '<｜User｜>' if m.role == 'user' }}{{ m.content }}{% endif %}{% endfor %}{{ '<｜Assistant｜>' if add_generation_prompt }}""",
  "kimi-k2": TALK + """{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}""",
}

class MessageError(ValueError):
  """Messages of a wrong form, or that the model's template refuses: the caller's error, not the file's. str(e) is one line."""
  def __init__(self, message: str): super().__init__(one_line(message))

def _said(e: Exception) -> str: return " ".join(str(e).replace(MARK, "").split())
def _wrong(where: str, expected: str, found: Any) -> MessageError:
  return MessageError(f"{where}: expected {expected}, found {'none' if found is None else type(found).__name__}")

class Chat:
  """A model's chat template. `render` turns messages ({"role": ..., "content": ...} and whatever else the template reads) into the ids of a prompt.
  Raises GGUFError, with the file's path, for a template that is no Jinja."""
  def __init__(self, path, template: str, tokenizer: Tokenizer):
    self.path, self.tokenizer = path, tokenizer
    try: self.template = Template(template)
    except Exception as e: raise self._bad("a Jinja template", e) from None  # a parser may fail in any way that Python knows
    names, control = tokenizer.special_tokens, [s for s, i in tokenizer.special_tokens.items() if i in tokenizer.control]
    self._special = re.compile(f"(?<!{MARK})({any_of(names)})")
    # the model writes markup (<think>, <tool_call>) itself: in an assistant's message it stays markup, in any other it is text
    self._names, self._control = re.compile(f"(?={any_of(names)})", re.I), re.compile(f"(?={any_of(control)})", re.I)
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    self._vars = {"bos_token": tokenizer.decode(bos), "eos_token": tokenizer.decode([tokenizer.eos_id])}

  @classmethod
  def from_gguf(cls, f: GGUFFile, tokenizer: Tokenizer) -> Chat:
    """Raises GGUFError for a template that is no Jinja, or where there is neither a template nor a built-in form."""
    if (template := f.key("tokenizer.chat_template", str, default=None)) is None:
      found = f"none, and tokenizer.ggml.pre {tokenizer.pre!r} has no built-in one"
      if (template := BUILT_IN.get(tokenizer.pre)) is not None:
        missing = set(re.findall(r"<[|｜][A-Za-z_]+[|｜]>|\[gMASK\]|<sop>", template)) - tokenizer.special_tokens.keys()
        found = f"none, and the vocabulary lacks {', '.join(sorted(missing))} of the built-in one" if missing else ""
      if found: raise GGUFError(f"{f.path}: key tokenizer.chat_template: expected a chat template, found {found}")
    return cls(f.path, template, tokenizer)

  def _bad(self, expected: str, e: Exception) -> GGUFError:
    return GGUFError(f"{self.path}: key tokenizer.chat_template: expected {expected}, found {type(e).__name__}: {_said(e)}")

  def _guard(self, where: str, x: Any, names: re.Pattern, depth: int = 1) -> Any:
    """A copy of x (text, numbers, lists, dicts) in which `names`, of special tokens, are marked. Raises MessageError, which begins with `where`."""
    if depth > MAX_DEPTH - 10: raise MessageError(f"{where}: expected lists and dicts at most {MAX_DEPTH - 10} deep, found more")
    if isinstance(x, str): return names.sub(MARK, x)
    if isinstance(x, (list, tuple)): return [self._guard(where, v, names, depth + 1) for v in x]
    if isinstance(x, dict):
      if wrong := [k for k in x if not isinstance(k, str)]: raise _wrong(where, "text for a dict's keys", wrong[0])
      return {self._guard(where, k, names, depth): self._guard(where, v, names, depth + 1) for k, v in x.items()}
    if x is None or type(x) in (bool, float) or type(x) is int and -MAX_INT < x < MAX_INT: return x
    raise _wrong(where, "text, numbers, lists and dicts", x)

  def _message(self, where: str, m: Any) -> dict:
    if not isinstance(m, dict): raise _wrong(where, "a dict", m)
    if not isinstance(role := m.get("role"), str): raise _wrong(f"{where}: role", "text", role)
    content, calls = m.get("content"), m.get("tool_calls")
    if content is None: content = ""
    if not isinstance(content, str):
      if not isinstance(content, list): raise _wrong(f"{where}: content", "text or a list of parts", content)
      for n, part in enumerate(content):
        if not isinstance(part, dict): raise _wrong(f"{where}: content: part {n}", "a dict", part)
        if part.get("type") == "text" and not isinstance(part.get("text"), str):
          raise _wrong(f"{where}: content: part {n}: text", "text", part.get("text"))
      if all(part.get("type") == "text" for part in content): content = "".join(part["text"] for part in content)
    if calls is not None and not isinstance(calls, list): raise _wrong(f"{where}: tool_calls", "a list", calls)
    for n, call in enumerate(calls or []):
      if not isinstance(call, dict): raise _wrong(f"{where}: tool call {n}", "a dict", call)
      if not isinstance(f := call.get("function", call), dict): raise _wrong(f"{where}: tool call {n}: function", "a dict", f)
      if not isinstance(f.get("name"), str): raise _wrong(f"{where}: tool call {n}: name", "text", f.get("name"))
      if not isinstance(f.get("arguments", {}), (str, dict)): raise _wrong(f"{where}: tool call {n}: arguments", "a dict or its JSON", f["arguments"])
    return self._guard(where, {**m, "content": content}, self._control if role == "assistant" else self._names)

  def render(self, messages: list[dict], add_generation_prompt: bool = True, **template_vars: Any) -> list[int]:
    """The prompt's ids, with a bos in front where the vocabulary asks for one and the template gave none. A content of None is empty; text parts are
    joined. template_vars: the template's variables, tools and enable_thinking for two. Raises MessageError for messages that are none or that the
    template refuses, GGUFError for a template that cannot be rendered."""
    if not isinstance(messages, (list, tuple)): raise _wrong("messages", "a list", messages)
    values = {**self._vars, **{k: self._guard(k, v, self._names) for k, v in template_vars.items()},
              "messages": [self._message(f"message {n}", m) for n, m in enumerate(messages)], "add_generation_prompt": add_generation_prompt}
    try: text = self.template.render(values)
    except Refusal as e: raise MessageError(f"the model's template refuses the messages: {_said(e)}") from None
    except Exception as e: raise self._bad("a template that renders these messages", e) from None  # it may fail in any way that Python knows
    return self.tokenizer.with_bos(self._encode(text))

  def encode_answer(self, text: str) -> list[int]:
    """The ids of an answer's text, which the model goes on with: markup is markup, names of control tokens are text"""
    return self._encode(self._control.sub(MARK, text))

  def _encode(self, text: str) -> list[int]:
    """The ids of a text in which names that are text are marked"""
    ids: list[int] = []
    for n, part in enumerate(self._special.split(text)):
      ids += [self.tokenizer.special_tokens[part]] if n % 2 else self.tokenizer.encode(part.replace(MARK, ""))
    return ids
