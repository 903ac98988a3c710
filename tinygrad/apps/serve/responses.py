"""OpenAI's responses, without a state: whoever goes on with a conversation sends all of it. A request becomes a chat's; its answer, items."""
from __future__ import annotations
import secrets, time
from typing import Any, ClassVar, Literal
import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp
from tinygrad.apps.reasoning import REASONING
from tinygrad.apps.serve.answer import Reply, Usage, Whole, kept, packed
from tinygrad.apps.serve.requests import (ApiError, ChatRequest, Function, FunctionCall, FunctionName, Job, JsonSchema, Message, Part, ResponseFormat,
                                          Tool, ToolCall, ToolChoice, chat_job, naming, text_of, warn_once, wrong)
from tinygrad.apps.serve.service import CALL, KEEP_ALIVE, Blocks, Service, answered, sse
from tinygrad.apps.serve.settings import Settings
from tinygrad.apps.serve.text import Voice
from tinygrad.apps.tool_calls import CallBegins, decode

NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format.json_schema": "text.format", "response_format": "text.format",
         ".function.name": ".name"}
ROLES = ("user", "assistant", "system", "developer")
TOOLS = ("function", "namespace")
ENCRYPTED = "reasoning.encrypted_content"

# ---- structs ----

class Item(msgspec.Struct, kw_only=True):
  """Of a conversation: a message, a reasoning, a call or its output"""
  type: str|None = None
  role: str|None = None
  content: str|list[Part]|None = None
  summary: list[Part]|None = None
  encrypted_content: str|None = None
  namespace: str|None = None
  name: str|None = None
  arguments: str|None = None
  call_id: str|None = None
  output: str|list[Part]|None = None
class ItemTool(msgspec.Struct, kw_only=True):
  """A function, or a namespace of several"""
  type: str
  name: str|None = None
  description: str|None = None
  parameters: dict[str, Any]|None = None
  strict: bool|None = None
  tools: list[ItemTool]|None = None
class ItemToolChoice(msgspec.Struct):
  type: str
  name: str|None = None
class ReasoningConfig(msgspec.Struct):
  """summary is a hint: reasoning is told as it is"""
  effort: str|None = None
  summary: str|None = None
class TextFormat(msgspec.Struct, rename={"definition": "schema"}, omit_defaults=True):
  type: Literal["text", "json_object", "json_schema"]
  name: str|None = None
  definition: dict[str, Any]|None = None
  strict: bool|None = None
class TextConfig(msgspec.Struct, omit_defaults=True):
  format: TextFormat|None = None
  verbosity: str|None = None

class ResponsesRequest(msgspec.Struct, kw_only=True):
  """The fields from top_k on are llama-server's and vLLM's"""
  LACKING: ClassVar[dict[str, tuple[Any, ...]]] = {
    "previous_response_id": (), "conversation": (), "background": (False,), "prompt": (), "truncation": ("disabled",), "context_management": ([],),
    "top_logprobs": (0,), "moderation": ()}
  input: str|list[Item]
  model: str|None = None
  instructions: str|None = None
  tools: list[ItemTool]|None = None
  tool_choice: Literal["none", "auto", "required"]|ItemToolChoice|None = None
  parallel_tool_calls: bool|None = None
  max_output_tokens: int|None = None
  reasoning: ReasoningConfig|None = None
  text: TextConfig|None = None
  include: list[str]|None = None
  stream: bool|None = None
  metadata: dict[str, Any]|None = None
  temperature: float|None = None
  top_p: float|None = None
  top_k: int|None = None
  min_p: float|None = None
  seed: int|None = None
  presence_penalty: float|None = None
  frequency_penalty: float|None = None
  repeat_penalty: float|None = None
  chat_template_kwargs: dict[str, Any]|None = None

SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repeat_penalty", "chat_template_kwargs",
        "parallel_tool_calls")   # in a chat's request

# ---- a request as a chat's ----

def full_name(namespace:str|None, name:str) -> str: return f"{namespace.removesuffix('__')}__{name}" if namespace else name

def thought_of(item:Item) -> str:
  """The text of a reasoning: ours in whichever form it comes back, or the summary of another's"""
  if isinstance(item.content, str): return item.content
  return "".join(part.text or "" for part in item.content or ()) or kept(item.encrypted_content) or "".join(p.text or "" for p in item.summary or ())

def arguments_of(text:str|None, where:str) -> dict[str, Any]:
  try: arguments = decode(text) if text and text.strip() else {}
  except ValueError: arguments = None
  if not isinstance(arguments, dict): wrong(where, "the JSON of an object", text)
  return arguments

def add_item(messages:list[Message], item:Item, where:str) -> None:
  """Reasoning, text and calls that follow each other are one message. Raises ApiError."""
  last = messages[-1] if messages and messages[-1].role == "assistant" else None
  match item.type or "message":
    case "message":
      if item.role not in ROLES: wrong(f"{where}.role", " or ".join(ROLES), item.role)
      text = text_of(item.content, f"{where}.content")
      if item.role == "assistant" and last is not None and (last.content is None or last.tool_calls): last.content = (last.content or "") + text
      else: messages.append(Message(item.role, text))
    case "reasoning":
      if last is None or last.content is not None or last.tool_calls: messages.append(last := Message("assistant"))
      last.reasoning_content = (last.reasoning_content or "") + thought_of(item)
    case "function_call":
      if not item.name: wrong(f"{where}.name", "a name", item.name)
      call = FunctionCall(full_name(item.namespace, item.name), arguments_of(item.arguments, f"{where}.arguments"))
      if last is None: messages.append(last := Message("assistant"))
      last.tool_calls = [*(last.tool_calls or ()), ToolCall(call, item.call_id)]
    case "function_call_output": messages.append(Message("tool", text_of(item.output, f"{where}.output"), tool_call_id=item.call_id))
    case found: wrong(f"{where}.type", "message, reasoning, function_call or function_call_output", found)

def functions_of(tools:list[ItemTool], where:str, namespace:str|None=None) -> list[Tool]:
  """The functions among the tools. Codex offers others beside them, which are left out: no answer has to call one. Raises ApiError where there are
  only others."""
  found: list[Tool] = []
  for n, tool in enumerate(tools):
    at = f"{where}[{n}]"
    if tool.type == "namespace" and namespace is None: found += functions_of(tool.tools or [], f"{at}.tools", tool.name)
    elif tool.type != "function": warn_once(tool.type, "tools")
    elif not tool.name: wrong(f"{at}.name", "a name", tool.name)
    else: found.append(Tool("function", Function(full_name(namespace, tool.name), tool.description, tool.parameters, tool.strict)))
  if tools and not found and namespace is None: wrong(f"{where}[0].type", "function: the server runs no tools of its own", tools[0].type)
  return found

def choice_of(choice:Literal["none", "auto", "required"]|ItemToolChoice) -> Literal["none", "auto", "required"]|ToolChoice:
  if not isinstance(choice, ItemToolChoice): return choice
  if choice.type != "function": wrong("tool_choice.type", "function", choice.type)
  if choice.name is None: wrong("tool_choice.name", "the name of a tool", None)
  return ToolChoice("function", FunctionName(choice.name))

def chat_of(r:ResponsesRequest) -> ChatRequest:
  """Raises ApiError"""
  if "message.output_text.logprobs" in (r.include or ()):
    raise ApiError(400, "include: message.output_text.logprobs is not supported", "include", "unsupported_parameter")
  messages = [Message("system", r.instructions)] if r.instructions else []
  for n, item in enumerate([Item(role="user", content=r.input)] if isinstance(r.input, str) else r.input): add_item(messages, item, f"input[{n}]")
  chat = ChatRequest(messages=messages, max_tokens=r.max_output_tokens, reasoning_effort=r.reasoning.effort if r.reasoning else None)
  for name in SAME: setattr(chat, name, getattr(r, name))
  if r.tools: chat.tools = functions_of(r.tools, "tools")
  if r.tool_choice is not None: chat.tool_choice = choice_of(r.tool_choice)
  if r.text and (form := r.text.format) is not None:
    schema = JsonSchema(form.name, form.definition, form.strict) if form.type == "json_schema" else None
    chat.response_format = ResponseFormat(form.type, schema)
  return chat

# ---- an answer ----

def usage_of(usage:Usage) -> dict[str, Any]:
  return {"input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
          "output_tokens": usage.answer, "output_tokens_details": {"reasoning_tokens": usage.reasoning},
          "total_tokens": usage.prompt + usage.answer}

class ItemForm(Blocks):
  alive = KEEP_ALIVE
  def __init__(self, service:Service, r:ResponsesRequest):
    super().__init__()
    self.sealed, self.sent = ENCRYPTED in (r.include or ()), 0     # whether reasoning is told for keeping, too; events so far
    self.names = {full_name(space.name, tool.name or ""): (space.name, tool.name) for space in r.tools or () for tool in space.tools or ()}
    self.output: list[dict[str, Any]] = []                         # the items
    config, text = r.reasoning or ReasoningConfig(), r.text or TextConfig(TextFormat("text"))
    sampling = service.voice.sampling
    self.head = {
      "id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time()), "model": service.voice.name,
      "instructions": r.instructions, "max_output_tokens": r.max_output_tokens, "metadata": r.metadata or {}, "background": False,
      "parallel_tool_calls": r.parallel_tool_calls is not False, "previous_response_id": None, "store": False, "truncation": "disabled",
      "reasoning": {"effort": config.effort, "summary": None}, "text": text,
      "tools": [tool for tool in r.tools or () if tool.type in TOOLS], "tool_choice": r.tool_choice or "auto",
      "temperature": sampling.temperature if r.temperature is None else r.temperature, "top_p": sampling.top_p if r.top_p is None else r.top_p}

  def response(self, status:str, usage:Usage|None=None, error:dict[str, Any]|None=None) -> dict[str, Any]:
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {**self.head, "status": status, "error": error, "incomplete_details": incomplete, "output": self.output,
            "usage": usage_of(usage) if usage is not None else None}

  def event(self, kind:str, **rest:Any) -> bytes:
    self.sent += 1
    return sse({"type": f"response.{kind}", "sequence_number": self.sent - 1, **rest}, f"response.{kind}")
  def of_item(self, kind:str, **rest:Any) -> bytes:
    return self.event(kind, item_id=self.output[-1]["id"], output_index=len(self.output) - 1, **rest)
  def of_part(self, kind:str, **rest:Any) -> bytes: return self.of_item(kind, content_index=0, **rest)
  @property
  def extra(self) -> dict[str, Any]: return {} if self.kind == REASONING else {"logprobs": []}   # of a text's events
  def part(self, text:str) -> dict[str, Any]:
    if self.kind == REASONING: return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

  def opened(self, kind:str, call:CallBegins|None) -> bytes:
    key, item = secrets.token_hex(12), dict[str, Any]()
    if call is not None:
      space, name = self.names.get(call.name, (None, call.name))
      item = {"id": f"fc_{key}", "type": "function_call", "call_id": call.id, "name": name, "arguments": ""}
      if space: item["namespace"] = space
    elif kind == REASONING: item = {"id": f"rs_{key}", "type": "reasoning", "summary": [], "content": []}
    else: item = {"id": f"msg_{key}", "type": "message", "role": "assistant", "content": []}
    self.output.append({**item, "status": "in_progress"})
    added = self.event("output_item.added", output_index=len(self.output) - 1, item=self.output[-1])
    return added if kind == CALL else added + self.of_part("content_part.added", part=self.part(""))
  def added(self, text:str) -> bytes:
    if self.kind == CALL: return self.of_item("function_call_arguments.delta", delta=text)
    return self.of_part("reasoning_text.delta" if self.kind == REASONING else "output_text.delta", delta=text, **self.extra)
  def closed(self, text:str, whole:bool) -> bytes:
    item = self.output[-1]
    item["status"] = "completed" if whole else "incomplete"
    if self.kind == CALL:
      item["arguments"] = text
      if not whole: return b""   # clients run what is done
      done = self.of_item("function_call_arguments.done", name=item["name"], arguments=text)
    else:
      item["content"] = [self.part(text)]
      if self.kind == REASONING and self.sealed: item["encrypted_content"] = packed(text)
      done = self.of_part("reasoning_text.done" if self.kind == REASONING else "output_text.done", text=text, **self.extra)
      done += self.of_part("content_part.done", part=item["content"][0])
    return done + self.event("output_item.done", output_index=len(self.output) - 1, item=item)

  def begin(self, replies:list[Reply]) -> bytes:
    return self.event("created", response=self.response("in_progress")) + self.event("in_progress", response=self.response("in_progress"))
  def events(self, reply:Reply, events:list[Any]) -> bytes:
    out = self.write(events)
    return out if reply.finish is None else out + self.close(reply.finish != "length")
  def end(self, replies:list[Reply]) -> bytes:
    status = ended(replies[0])
    return self.event(status, response=self.response(status, replies[0].usage))
  def error(self, e:ApiError) -> bytes:
    if self.kind: self.output.pop()   # what is not whole
    return self.event("failed", response=self.response("failed", error={"code": "server_error", "message": e.message}))

  def body(self, wholes:list[Whole]) -> dict[str, Any]:
    w, = wholes
    self.events(w.reply, w.events)
    return self.response(ended(w.reply), w.reply.usage)

def ended(reply:Reply) -> str: return "incomplete" if reply.finish == "length" else "completed"

def job_of(r:ResponsesRequest, voice:Voice, settings:Settings, capacity:int) -> Job:
  """Raises ApiError"""
  with naming(NAMES): return chat_job(chat_of(r), voice, settings, capacity)

async def respond(request:Request) -> ASGIApp: return await answered(request, ResponsesRequest, job_of, ItemForm)
