"""What clients send, a msgspec struct an endpoint, and what is asked of the engine for it: a Job.

null is as good as a missing field. A field that asks for what there is not, or that nobody could mean, is an ApiError which names it. Unknown fields
are ignored, and said once each. Strings become tokens here, so all of this runs in a thread (service.py)."""
from __future__ import annotations
import dataclasses, functools, logging, re, secrets, traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Iterator, Literal, NoReturn, TypeVar
import msgspec
from tinygrad.apps.chat import MessageError
from tinygrad.apps.engine.constraint import WHITESPACE, GrammarError, check
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.engine.sequence import TOP
from tinygrad.apps.gguf import GGUFError
from tinygrad.apps.reasoning import CLOSE, OPEN
from tinygrad.apps.serve import wire
from tinygrad.apps.serve.settings import Settings
from tinygrad.apps.serve.text import Voice
from tinygrad.apps.tool_calls import call_grammar, tools_in_history

log = logging.getLogger("tinygrad.serve")
Request = TypeVar("Request", bound=msgspec.Struct)

MAX_ANSWERS = 128        # of one request
MAX_STOPS = 64
MAX_GRAMMAR = 1 << 18    # characters: a schema of four times as many takes seconds to compile

def encoded(value:Any) -> str:
  """As JSON"""
  return str(msgspec.json.encode(value), "utf-8")

# ---- errors ----

OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error",
                503: "unavailable_error"}
ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
                   500: "api_error", 503: "overloaded_error"}

class ApiError(Exception):
  """What a client is told. message: one line; param: the field that it is about; code: a word for programs; numbers: what the message counts;
  retry_after: seconds"""
  def __init__(self, status:int, message:str, param:str|None=None, code:str|None=None, numbers:dict[str, int]|None=None, retry_after:int|None=None):
    super().__init__(message)
    self.status, self.message, self.param, self.code, self.numbers, self.retry_after = status, message, param, code, numbers or {}, retry_after

  def openai(self) -> dict[str, Any]:
    kind = OPENAI_TYPES.get(self.status, "invalid_request_error")
    return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.numbers}}
  def anthropic(self) -> dict[str, Any]:
    return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(self.status, "invalid_request_error"), "message": self.message}}

def failed(e:Exception, number:str) -> ApiError:
  """What a client is told of a fault of ours, which the log has whole. number: the request's id"""
  log.error(encoded({"id": number, "error": type(e).__name__, "traceback": "".join(traceback.format_exception(e))}))
  return ApiError(500, f"the server failed ({type(e).__name__}); the request's id is {number}")

def wrong(param:str, expected:str, found:object) -> NoReturn:
  """Raises the error of a field's value"""
  raise ApiError(400, f"{param}: expected {expected}, found {shown(found)}", param)
@contextmanager
def naming(names:dict[str, str]) -> Iterator[None]:
  """Errors name fields as the client has them. names: beginnings of our names, or parts that begin with a dot, and the client's for them"""
  try: yield
  except ApiError as e:
    ours = e.param or ""
    part = next((part for part in names if ours.startswith(part) or part[0] == "." and part in ours), "")
    if part:
      e.param = ours.replace(part, names[part])
      if e.message.startswith(ours): e.message = e.param + e.message[len(ours):]
    raise
def shown(value:object) -> str:
  """A value, as an error shows it"""
  if isinstance(value, str): text = value[:80] if value[:80].isidentifier() else repr(value[:80])
  else: text = repr(value)[:80] if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__
  return " ".join(text.split())

# ---- reading ----

# fields that ask for what there is not, and the values by which they ask for nothing; a struct may have more of them
LACKING: dict[str, tuple[Any, ...]] = {
  "best_of": (1,), "suffix": ("",), "functions": ([],), "function_call": ("none", "auto"), "audio": (), "modalities": (["text"],),
  "web_search_options": (), "chat_template": (), "prompt_logprobs": (0,), "use_beam_search": (False,), "length_penalty": (1,), "bad_words": ([],),
  "allowed_token_ids": ([],), "truncate_prompt_tokens": (), "prompt_embeds": (), "typical_p": (1,), "xtc_probability": (0,), "dry_multiplier": (0,),
  "mirostat": (0,), "mirostat_mode": (0,), "dynatemp_range": (0,), "top_n_sigma": (-1, 0), "tfs_z": (1,), "samplers": (), "lora": ([],),
  "thinking_budget_tokens": (-1,), "reasoning_format": ("auto", "deepseek"), "return_progress": (False,), "timings_per_token": (False,),
  "return_tokens": (False,), "logits_processors": ([],)}
# fields that a server may do without
HINTS = frozenset("user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention cache_prompt id_slot prediction "
                  "verbosity request_id priority skip_special_tokens spaces_between_special_tokens "
                  "client_metadata max_tool_calls prompt_cache_options cache_control diagnostics inference_geo speed".split())
_warned: set[str] = set()
decoder = functools.cache(msgspec.json.Decoder)
_AT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.S)
_FOUND = re.compile(r"Expected (?P<expected>.*), got (?P<found>.*)", re.S)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
TYPES = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list", "object": "an object",
         "null": "null"}

def mistyped(e:msgspec.ValidationError) -> ApiError:
  """msgspec's error in our words"""
  found = _AT.fullmatch(str(e))
  assert found is not None
  what, path = found["what"], found["path"] or ""
  if m := _MISSING.fullmatch(what):
    path = f"{path}.{m['name']}".lstrip(".")
    return ApiError(400, f"{path}: expected a value, found none", path)
  if m := _FOUND.fullmatch(what):
    expected = " or ".join(TYPES.get(name, name) for name in re.findall(r"\w+", m["expected"]) if name != "null")
    what = f"expected {expected}, found {TYPES.get(m['found'].strip('`'), m['found'].strip('`'))}"
  else: what = what.replace("`", "").replace("Invalid enum value", "unknown value")
  return ApiError(400, f"{path or 'the body'}: {what}", path or None)

def decode(body:bytes, kind:type[Request]) -> Request:
  """A body as a struct. Raises ApiError."""
  try:
    check_unknown(decoder(dict[str, msgspec.Raw]).decode(body), kind)
    return decoder(kind).decode(body)
  except msgspec.ValidationError as e: raise mistyped(e) from None
  except RecursionError: raise ApiError(400, "the body: expected JSON less deep than this", code="invalid_json") from None
  except (msgspec.DecodeError, UnicodeDecodeError) as e:
    raise ApiError(400, f"the body: expected JSON, found {'nothing' if not body.strip() else f'none: {e}'}", code="invalid_json") from None

def check_unknown(raw:dict[str, msgspec.Raw], kind:type[msgspec.Struct]) -> None:
  """Raises ApiError for a field of LACKING; says once what else is not known"""
  lacking = LACKING | getattr(kind, "LACKING", {})
  for name in raw.keys() - kind.__struct_encode_fields__:
    if name in lacking:
      value = msgspec.json.decode(raw[name])
      if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in lacking[name]): continue
      allowed = " or ".join(encoded(v) for v in lacking[name])
      raise ApiError(400, f"{name}: not supported{f' but as {allowed}' if allowed else ''}", name, "unsupported_parameter")
    if name not in HINTS: warn_once(name, kind.__name__)

def warn_once(name:str, of:str) -> None:
  """A line in the log for what is left out of a request"""
  if name not in _warned and len(_warned) < 1000:
    _warned.add(name)
    log.warning(encoded({"unknown_field": name[:100], "of": of}))

# ---- structs ----

class StreamOptions(msgspec.Struct):
  include_usage: bool|None = None
class JsonSchema(msgspec.Struct, rename={"definition": "schema"}):
  name: str|None = None
  definition: dict[str, Any]|None = None
  strict: bool|None = None
class ResponseFormat(msgspec.Struct, rename={"definition": "schema"}):
  type: Literal["text", "json_object", "json_schema"]
  json_schema: JsonSchema|None = None
  definition: dict[str, Any]|None = None   # llama-server's, of a json_object

class Generation(msgspec.Struct, kw_only=True):
  """What an answer is to be: OpenAI's fields, then llama-server's and vLLM's"""
  model: str|None = None
  stream: bool|None = None
  stream_options: StreamOptions|None = None
  n: int|None = None
  max_tokens: int|None = None
  seed: int|None = None
  stop: str|list[str]|None = None
  temperature: float|None = None
  top_p: float|None = None
  presence_penalty: float|None = None
  frequency_penalty: float|None = None
  logit_bias: dict[str, float]|list[tuple[int|str, float|bool]]|None = None
  response_format: ResponseFormat|None = None
  n_predict: int|None = None
  top_k: int|None = None
  min_p: float|None = None
  repeat_penalty: float|None = None
  repetition_penalty: float|None = None
  ignore_eos: bool|None = None
  min_tokens: int|None = None
  stop_token_ids: list[int]|None = None
  json_schema: dict[str, Any]|None = None
  grammar: str|None = None
  guided_json: dict[str, Any]|str|None = None
  guided_regex: str|None = None
  guided_choice: list[str]|None = None
  guided_grammar: str|None = None

class Part(msgspec.Struct):
  type: str
  text: str|None = None
  refusal: str|None = None
class FunctionCall(msgspec.Struct):
  name: str
  arguments: str|dict[str, Any]|None = None
class ToolCall(msgspec.Struct):
  function: FunctionCall
  id: str|None = None
  type: Literal["function"]|None = None
class Message(msgspec.Struct):
  role: Literal["system", "developer", "user", "assistant", "tool"]
  content: str|list[Part]|None = None
  name: str|None = None
  reasoning_content: str|None = None
  reasoning: str|None = None
  tool_calls: list[ToolCall]|None = None
  tool_call_id: str|None = None

class Function(msgspec.Struct, omit_defaults=True):
  name: str
  description: str|None = None
  parameters: dict[str, Any]|None = None
  strict: bool|None = None
class Tool(msgspec.Struct, omit_defaults=True):
  """defer_loading: may be called, but the prompt does not begin with it: a search among tools shows it later"""
  type: Literal["function"]
  function: Function
  defer_loading: bool|None = None
class FunctionName(msgspec.Struct):
  name: str
class ToolChoice(msgspec.Struct):
  type: Literal["function"]
  function: FunctionName
class Thinking(msgspec.Struct):
  type: Literal["enabled", "disabled"]|None = None
  clear_thinking: bool|None = None

class ChatRequest(Generation, kw_only=True):
  messages: list[Message]
  max_completion_tokens: int|None = None
  logprobs: bool|None = None
  top_logprobs: int|None = None
  tools: list[Tool]|None = None
  tool_choice: Literal["none", "auto", "required"]|ToolChoice|None = None
  parallel_tool_calls: bool|None = None
  reasoning_effort: str|None = None
  thinking: Thinking|None = None
  chat_template_kwargs: dict[str, Any]|None = None
  add_generation_prompt: bool|None = None
  continue_final_message: bool|None = None
  echo: bool|None = None

class CompletionRequest(Generation, kw_only=True):
  prompt: str|list[str|int|list[int]]
  logprobs: int|None = None
  echo: bool|None = None

class TokenizeRequest(ChatRequest, kw_only=True):
  """`content` is llama-server's, `prompt` and `messages` vLLM's"""
  messages: list[Message]|None = None  # type: ignore[assignment]
  content: str|None = None
  prompt: str|None = None
  add_special: bool|None = None
  add_special_tokens: bool|None = None
  parse_special: bool|None = None
  with_pieces: bool|None = None

class DetokenizeRequest(msgspec.Struct):
  tokens: list[int]

# ---- conversations ----

@dataclass
class Conversation:
  """What a chat template is given. messages: as templates read them, but that the arguments of calls may be JSON texts. tools: those that may be
  called. choice: auto, required, or the name of the tool to call after `=`. parallel: whether several may be called at once. variables: of the
  template. continued: whether the answer goes on with the last message."""
  messages: list[dict[str, Any]]
  tools: list[Tool] = field(default_factory=list)
  choice: str = "auto"
  parallel: bool = True
  variables: dict[str, Any] = field(default_factory=dict)
  generation_prompt: bool = True
  continued: bool = False

  @property
  def schemas(self) -> dict[str, Any]:
    """Of the tools' parameters, by the tools' names"""
    return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

def text_of(content:str|list[Part]|None, where:str) -> str:
  """A message's content as text. Raises ApiError for parts that are no text."""
  if content is None: return ""
  if isinstance(content, str): return content
  out = []
  for n, part in enumerate(content):
    at = f"{where}[{n}]"
    if part.type == "refusal": text, name = part.refusal, "refusal"
    elif part.type in ("text", "input_text", "output_text"): text, name = part.text, "text"
    else: wrong(f"{at}.type", "text, which is all that the model reads", part.type)
    if text is None: wrong(f"{at}.{name}", "text", None)
    out.append(text)
  return "".join(out)

def template_messages(messages:list[Message]) -> list[dict[str, Any]]:
  """As templates read them, but for the arguments of calls. Raises ApiError."""
  if not messages: raise ApiError(400, "messages: expected at least one, found none", "messages")
  out = []
  for n, m in enumerate(messages):
    where = f"messages[{n}]"
    message: dict[str, Any] = {"role": "system" if m.role == "developer" else m.role, "content": text_of(m.content, f"{where}.content")}
    if (thought := m.reasoning_content or m.reasoning) and m.role == "assistant": message["reasoning_content"] = thought
    if m.tool_calls and m.role == "assistant":
      message["tool_calls"] = [{"type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}} for c in m.tool_calls]
      for call, c in zip(message["tool_calls"], m.tool_calls):
        if c.id: call["id"] = c.id
    if m.tool_call_id is not None and m.role == "tool": message["tool_call_id"] = m.tool_call_id
    if m.name is not None: message["name"] = m.name
    out.append(message)
  return out

SWITCHES = ("enable_thinking", "clear_thinking", "thinking")   # variables of templates that are true or false
RESERVED = frozenset(("self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token"))

def variables_of(r:ChatRequest) -> dict[str, Any]:
  """The template's variables. Raises ApiError."""
  variables: dict[str, Any] = {}
  if r.thinking is not None:
    if r.thinking.type is not None: variables["enable_thinking"] = r.thinking.type == "enabled"
    if r.thinking.clear_thinking is not None: variables["clear_thinking"] = r.thinking.clear_thinking
  if r.reasoning_effort is not None:
    if r.reasoning_effort == "none": variables["enable_thinking"] = False
    variables["reasoning_effort"] = r.reasoning_effort
  for name, value in (r.chat_template_kwargs or {}).items():
    if name in RESERVED: raise ApiError(400, f"chat_template_kwargs.{name}: this name is the template's own", f"chat_template_kwargs.{name}")
    if name in SWITCHES and not isinstance(value, bool): wrong(f"chat_template_kwargs.{name}", "true or false", value)
    variables[name] = value
  return variables

def conversation(r:ChatRequest) -> Conversation:
  """Raises ApiError"""
  tools, choice = r.tools or [], r.tool_choice or "auto"
  names = [tool.function.name for tool in tools]
  for n, name in enumerate(names):
    if not name.strip(): wrong(f"tools[{n}].function.name", "a name", name)
    if name in names[:n]: raise ApiError(400, f"tools[{n}].function.name: {shown(name)} stands there twice", f"tools[{n}].function.name")
  if isinstance(choice, ToolChoice):
    if choice.function.name not in names: wrong("tool_choice.function.name", "the name of a tool", choice.function.name)
    choice = f"={choice.function.name}"
  if choice == "required" and not tools: raise ApiError(400, "tool_choice: expected tools beside it, found none", "tool_choice")
  messages = template_messages(r.messages)
  continued = bool(r.continue_final_message)
  if continued and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
    raise ApiError(400, "continue_final_message: expected an assistant's text as the last message", "continue_final_message")
  if continued and r.add_generation_prompt: wrong("add_generation_prompt", "false beside continue_final_message", True)
  prompted = r.add_generation_prompt is not False
  return Conversation(messages, [] if choice == "none" else tools, choice, r.parallel_tool_calls is not False, variables_of(r), prompted, continued)

def prompt_of(c:Conversation, voice:Voice) -> list[int]:
  """The ids of a conversation's prompt. Raises ApiError."""
  if voice.chat is None: raise ApiError(400, f"the model has no chat template: {voice.chat_error}", "messages")
  if c.tools and voice.family.form is None: raise ApiError(400, "tools: the model's chat template knows none", "tools", "unsupported_parameter")
  tools = [msgspec.to_builtins(tool) for tool in c.tools if not tool.defer_loading]
  variables = c.variables | ({"tools": tools} if tools else {})
  try:
    messages = tools_in_history(c.messages, voice.family.as_text)
    if not c.continued: return voice.chat.render(messages, add_generation_prompt=c.generation_prompt, **variables)
    last = messages.pop()
    return voice.go_on(voice.chat.render(messages, **variables), last["content"], last.get("reasoning_content", ""))
  except (MessageError, GGUFError) as e:
    # GGUFError: the template fails on these messages, as one that knows no tools may
    raise ApiError(400, f"messages: {e}", "messages") from None

# ---- jobs ----

@dataclass
class Job:
  """What is asked of the engine. prompts: their ids; n: answers to each. sampling: Sampling's fields that are not its defaults, the seed of the first
  answer among them. stops: texts that end an answer; stop_ids: tokens that do. tools: by name, their parameters' schemas. parallel: whether there may
  be several calls. chat: whether an answer has reasoning and calls."""
  prompts: list[list[int]]
  sampling: dict[str, Any]
  n: int = 1
  stops: tuple[str, ...] = ()
  stop_ids: frozenset[int] = frozenset()
  limit: int|None = None
  logprobs: int|None = None
  grammar: wire.Grammar|None = None
  tools: dict[str, Any] = field(default_factory=dict)
  parallel: bool = True
  chat: bool = True

def in_range(name:str, value:int|None, low:int, high:int) -> int|None:
  """The value. Raises ApiError."""
  if value is not None and not low <= value <= high: wrong(name, f"{low} to {high}", value)
  return value

def check_tokens(tokens:list[int], voice:Voice, param:str) -> None:
  """Raises ApiError for a token that the vocabulary does not have"""
  last = voice.tokenizer.n_vocab - 1
  for token in tokens:
    if not 0 <= token <= last: wrong(param, f"tokens from 0 to {last}", token)

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repeat_penalty")

def sampling_of(r:Generation, voice:Voice) -> dict[str, Any]:
  """What differs from Sampling's defaults, over what the model's makers advise. Raises ApiError."""
  fields = {name: value for name in SAMPLED if (value := getattr(r, name)) is not None}
  if r.repetition_penalty is not None: fields.setdefault("repeat_penalty", r.repetition_penalty)
  if fields.get("top_k") == -1: fields["top_k"] = 0
  if r.seed is not None and not -1 << 63 <= r.seed < 1 << 64: wrong("seed", "a whole number of 64 bits", r.seed)
  fields["seed"] = secrets.randbits(32) if r.seed in (None, -1) else r.seed % (1 << 32)
  if r.logit_bias: fields["bias"] = bias_of(r.logit_bias, voice)
  try: sampling = dataclasses.replace(voice.sampling, **fields)
  except ValueError as e:
    name = str(e).partition(":")[0].partition(" ")[0]
    raise ApiError(400, str(e).replace("bias", "logit_bias", 1), "logit_bias" if name == "bias" else name) from None
  plain = Sampling()
  return {f.name: value for f in dataclasses.fields(Sampling) if (value := getattr(sampling, f.name)) != getattr(plain, f.name)}

def bias_of(bias:dict[str, float]|list[tuple[int|str, float|bool]], voice:Voice) -> dict[int, float]:
  """By token. false forbids one; a list may name tokens by their text. Raises ApiError."""
  out: dict[int, float] = {}
  for key, value in bias.items() if isinstance(bias, dict) else bias:
    if isinstance(key, str) and isinstance(bias, dict):
      if not re.fullmatch(r"[0-9]{1,9}", key): wrong("logit_bias", "tokens' numbers", key)
      key = int(key)
    tokens = voice.tokenizer.encode(key, special=True) if isinstance(key, str) else [key]
    if value is True: wrong("logit_bias", "a number, or false", True)
    check_tokens(tokens, voice, "logit_bias")
    out |= dict.fromkeys(tokens, float("-inf") if value is False else value)
  return out

def stops_of(r:Generation) -> tuple[str, ...]:
  stops = (r.stop,) if isinstance(r.stop, str) else tuple(r.stop or ())
  if len(stops) > MAX_STOPS: wrong("stop", f"at most {MAX_STOPS} texts", len(stops))
  if "" in stops: wrong("stop", "texts of one character or more", "")
  return stops

def limit_of(r:Generation, settings:Settings) -> int|None:
  """The most tokens of an answer. Raises ApiError."""
  name = next((name for name in ("max_completion_tokens", "max_tokens", "n_predict") if getattr(r, name, None) is not None), "max_tokens")
  limit = getattr(r, name, None)
  if limit == -1: limit = None
  if limit is not None and limit < (least := 0 if isinstance(r, CompletionRequest) else 1): wrong(name, f"{least} or more", limit)
  if limit is None: limit = settings.default_max_tokens
  limits = [n for n in (limit, settings.max_tokens_cap) if n is not None]
  if r.min_tokens and not r.ignore_eos: raise ApiError(400, "min_tokens: not supported but with ignore_eos", "min_tokens", "unsupported_parameter")
  return min(limits, default=None)

def check_context(ids:list[int], capacity:int, param:str) -> None:
  """Raises ApiError for a prompt that leaves no room for an answer"""
  if not ids: raise ApiError(400, f"{param}: expected a token at least, found none", param)
  if len(ids) >= capacity: too_long(len(ids), capacity, param)

def too_long(tokens:int, capacity:int, param:str, least:str="") -> NoReturn:
  raise ApiError(400, f"This model's maximum context length is {capacity} tokens, answer included. However, the prompt has {least}{tokens} tokens.",
                 param, "context_length_exceeded", {"n_prompt_tokens": tokens, "n_ctx": capacity})

def job_of(r:Generation, prompts:list[list[int]], voice:Voice, settings:Settings, **rest:Any) -> Job:
  """What all kinds of requests ask. rest: Job's fields. Raises ApiError."""
  n = in_range("n", r.n, 1, MAX_ANSWERS) or 1
  if n * len(prompts) > MAX_ANSWERS: wrong("n", f"at most {MAX_ANSWERS} answers in all", n * len(prompts))
  check_tokens(r.stop_token_ids or [], voice, "stop_token_ids")
  stop_ids = (frozenset() if r.ignore_eos else voice.tokenizer.stop_ids) | frozenset(r.stop_token_ids or ())
  return Job(prompts, sampling_of(r, voice), n, stops_of(r), stop_ids, limit_of(r, settings), **rest)

def chat_job(r:ChatRequest, voice:Voice, settings:Settings, capacity:int) -> Job:
  """Raises ApiError"""
  c = conversation(r)
  if r.top_logprobs is not None and not r.logprobs: raise ApiError(400, "top_logprobs: expected logprobs beside it", "top_logprobs")
  top = in_range("top_logprobs", r.top_logprobs, 0, TOP) or 0
  # each token has `longest` bytes at most: what must be too long is not worth being read
  least = sum(len(m["content"]) for m in c.messages) // voice.longest
  if least >= capacity: too_long(least, capacity, "messages", "at least ")
  ids = prompt_of(c, voice)
  check_context(ids, capacity, "messages")
  grammar = grammar_of(held_to(r, c, ids, voice), [ids], voice)
  return job_of(r, [ids], voice, settings, logprobs=top if r.logprobs else None, grammar=grammar, tools=c.schemas, parallel=c.parallel)

def completion_job(r:CompletionRequest, voice:Voice, settings:Settings, capacity:int) -> Job:
  """Raises ApiError"""
  given = r.prompt
  several = [given] if isinstance(given, str) or (given and all(isinstance(p, int) for p in given)) else given
  if len(several) > MAX_ANSWERS: wrong("prompt", f"at most {MAX_ANSWERS} prompts", len(several))
  prompts = []
  for n, prompt in enumerate(several):
    where = "prompt" if several is not given else f"prompt[{n}]"
    if isinstance(prompt, int): wrong(where, "a text or a list of tokens", prompt)
    if isinstance(prompt, str):
      if len(prompt) // voice.longest >= capacity: too_long(len(prompt) // voice.longest, capacity, where, "at least ")
      ids = voice.tokenizer.with_bos(voice.tokenizer.encode(prompt, special=True))
    else: check_tokens(ids := prompt, voice, where)
    check_context(ids, capacity, where)
    prompts.append(ids)
  if not prompts: raise ApiError(400, "prompt: expected one at least, found none", "prompt")
  if r.echo and r.logprobs is not None: raise ApiError(400, "echo: not supported beside logprobs", "echo", "unsupported_parameter")
  grammar = grammar_of(grammar_source(r), prompts, voice)
  return job_of(r, prompts, voice, settings, logprobs=in_range("logprobs", r.logprobs, 0, TOP), grammar=grammar, chat=False)

# ---- grammars ----

def grammar_source(r:Generation) -> tuple[str, str, str]|None:
  """(the field that gives it, wire.Grammar's kind, its text); None where an answer may be any text. Raises ApiError."""
  found: list[tuple[str, str, str]] = []
  if (f := r.response_format) is not None and f.type != "text":
    schema = f.json_schema.definition if f.json_schema is not None else f.definition
    if f.type == "json_schema" and schema is None: wrong("response_format.json_schema.schema", "a schema", None)
    found.append(("response_format", "json_schema", encoded({"type": "object"} if schema is None else schema)))
  for name, kind in (("json_schema", "json_schema"), ("guided_json", "json_schema"), ("guided_regex", "regex"), ("grammar", "lark"),
                     ("guided_grammar", "lark")):
    if (value := getattr(r, name)) not in (None, ""): found.append((name, kind, value if isinstance(value, str) else encoded(value)))
  if r.guided_choice: found.append(("guided_choice", "lark", "start: " + " | ".join(map(encoded, r.guided_choice))))
  if len(found) > 1: raise ApiError(400, f"{found[0][0]}: expected no {found[1][0]} beside it", found[0][0])
  return found[0] if found else None

def held_to(r:Generation, c:Conversation, ids:list[int], voice:Voice) -> tuple[str, str, str]|None:
  """As grammar_source, of an answer to a conversation: a form, calls, or either; behind reasoning where the model may open that itself. Raises
  ApiError."""
  given, thinks, marks = grammar_source(r), voice.may_think(ids), voice.tokenizer.special_tokens
  strict, tools = {tool.function.name for tool in c.tools if tool.function.strict}, c.schemas
  def calls(choice:str) -> str:
    try: return call_grammar(voice.family, tools, choice, c.parallel, strict, thinks)[1]
    except ValueError as e: raise ApiError(400, f"tools: {e}", "tools", "invalid_grammar") from None
  if tools and c.choice != "auto": return "tool_choice", "lark", calls(c.choice)
  if given is None: return ("tools", "lark", calls("auto")) if strict else None
  thinks = thinks and {OPEN, CLOSE} <= marks.keys()
  if not tools and not thinks: return given
  name, kind, source = given
  if kind == "lark":
    if tools: raise ApiError(400, f"{name}: not supported beside tools that may be called", name, "unsupported_parameter")
    return given
  checked(name, kind, source)
  if kind == "json_schema": answer = f"%json {encoded(msgspec.json.decode(source) | {'x-guidance': {'whitespace_pattern': WHITESPACE}})}"
  else: answer = "/" + re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", source, flags=re.S) + "/"
  thought = f"(<[{marks[OPEN]}]> TEXT <[{marks[CLOSE]}]>)? " if thinks else ""
  start = f"start: {thought}GAP? answer{' | calls' if tools else ''}\nanswer: {answer}\n"
  # the grammar of calls has these terminals, too
  return name, "lark", start + ("calls" + calls("required").removeprefix("start") if tools else "TEXT: /(?s:.*)/\nGAP: /\\n{1,2}/\n")

def grammar_of(given:tuple[str, str, str]|None, prompts:list[list[int]], voice:Voice) -> wire.Grammar|None:
  """given: as grammar_source has it. Checked, as far as it can be without a model. Raises ApiError."""
  if given is None: return None
  name, kind, source = given
  source = checked(name, kind, source)
  after = {voice.thinks(ids) for ids in prompts}
  if len(after) > 1: raise ApiError(400, f"{name}: expected prompts that all end in reasoning, or none", name)
  if not after.pop(): return wire.Grammar(kind, source)
  if (close := voice.tokenizer.special_tokens.get(CLOSE)) is None:
    raise ApiError(400, f"{name}: the model's reasoning ends with no token: expected chat_template_kwargs.enable_thinking false", name)
  return wire.Grammar(kind, source, close)

def checked(name:str, kind:str, source:str) -> str:
  """The grammar's text, in llguidance's own form. Raises ApiError for one that is too long or does not compile, and where llguidance is missing."""
  if len(source) > MAX_GRAMMAR: wrong(name, f"at most {MAX_GRAMMAR} characters", len(source))
  try:
    if name in ("grammar", "guided_grammar"): source = as_lark(source)
    check(kind, source)
  except GrammarError as e:
    code = "unsupported_parameter" if find_spec("llguidance") is None else "invalid_grammar"
    raise ApiError(400, str(e) if str(e).startswith(name) else f"{name}: {e}", name, code) from None
  return source

def as_lark(source:str) -> str:
  """A grammar of GBNF's kind, or Lark's. Raises GrammarError."""
  if find_spec("llguidance") is None: return source   # `check` says so
  from llguidance.gbnf_to_lark import any_to_lark
  try: return any_to_lark(source)
  except Exception as e: raise GrammarError(" ".join(str(e).split())[:300]) from None  # it may fail in any way that Python knows
