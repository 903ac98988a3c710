"""Messages to token ids through a chat template: the file's `tokenizer.chat_template` (Jinja as Hugging Face renders it) or a family's built-in one.

Special tokens come from templates alone: wherever a message holds the name of one, a mark goes before it, and a marked name is text when rendered."""
from __future__ import annotations
import datetime, json, re, secrets
from typing import Any
import jinja2, jinja2.ext, jinja2.sandbox
from tinygrad.apps.gguf import GGUFError, GGUFFile
from tinygrad.apps.tokenizer import Tokenizer, any_of

# digits that nobody can foresee: filters that quote, escape, strip or change case leave the mark as it is, and no message can hold it
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
}

def _refuse(message: str): raise jinja2.TemplateError(message)
def _tojson(x: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

class Chat:
  """`render` turns messages ({"role": ..., "content": ...} and whatever else the template reads) into the ids of a prompt."""
  def __init__(self, path, template: str, tokenizer: Tokenizer):
    self.path, self.tokenizer = path, tokenizer
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    try: self.template = env.from_string(template)
    except (jinja2.TemplateError, RecursionError, ValueError) as e: raise self._bad("a Jinja template", e) from None
    names, control = tokenizer.special_tokens, [s for s, i in tokenizer.special_tokens.items() if i in tokenizer.control]
    self._special = re.compile(f"(?<!{MARK})({any_of(names)})")
    # the markup that an answer shows (<think>, <tool_call>) is the model's own word: in an answer that comes back it stays what it was
    self._names, self._control = re.compile(f"(?={any_of(names)})", re.I), re.compile(f"(?={any_of(control)})", re.I)
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    self._vars = {"bos_token": tokenizer.decode(bos), "eos_token": tokenizer.decode([tokenizer.eos_id])}

  @classmethod
  def from_gguf(cls, f: GGUFFile, tokenizer: Tokenizer) -> Chat:
    """Raises GGUFError for a template that is no Jinja, or where there is neither a template nor a built-in form."""
    if (template := f.key("tokenizer.chat_template", str, default=None)) is None:
      found = f"none, and tokenizer.ggml.pre {tokenizer.pre!r} has no built-in one"
      if (template := BUILT_IN.get(tokenizer.pre)) is not None:
        missing = set(re.findall(r"<\|[A-Za-z]+\|>|\[gMASK\]|<sop>", template)) - tokenizer.special_tokens.keys()
        found = f"none, and the vocabulary lacks {', '.join(sorted(missing))} of the built-in one" if missing else ""
      if found: raise GGUFError(f"{f.path}: key tokenizer.chat_template: expected a chat template, found {found}")
    return cls(f.path, template, tokenizer)

  def _bad(self, expected: str, e: Exception) -> GGUFError:
    return GGUFError(f"{self.path}: key tokenizer.chat_template: expected {expected}, found {type(e).__name__}: {' '.join(str(e).split())}")

  def _guard(self, x: Any, names: re.Pattern) -> Any:
    if isinstance(x, str): return names.sub(MARK, x)
    if isinstance(x, dict): return {self._guard(k, names): self._guard(v, names) for k, v in x.items()}
    return [self._guard(v, names) for v in x] if isinstance(x, (list, tuple)) else x

  def _message(self, m: dict) -> dict:
    content = m.get("content")
    if content is None: content = ""
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
      content = "".join(p["text"] for p in content)
    return self._guard({**m, "content": content}, self._control if m.get("role") == "assistant" else self._names)

  def render(self, messages: list[dict], add_generation_prompt: bool = True, **template_vars: Any) -> list[int]:
    """The prompt's ids, with a bos in front where the vocabulary asks for one and the template gave none. A content of None is empty, text parts are
    joined. `template_vars` (tools, enable_thinking...) go to the template. GGUFError if the template refuses the messages or cannot be rendered."""
    values = {**self._vars, **self._guard(template_vars, self._names), "messages": [self._message(m) for m in messages],
              "add_generation_prompt": add_generation_prompt}
    try: text = self.template.render(values)
    except Exception as e: raise self._bad("a template that renders these messages", e) from None  # a template may fail in any way that Python knows
    ids: list[int] = []
    for n, part in enumerate(self._special.split(text)):
      ids += [self.tokenizer.special_tokens[part]] if n % 2 else self.tokenizer.encode(part.replace(MARK, ""))
    bos = self.tokenizer.bos_id
    return ids if not self.tokenizer.add_bos or bos is None or ids[:1] == [bos] else [bos, *ids]
