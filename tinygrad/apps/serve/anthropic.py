"""Anthropic's endpoints: messages, and the count of their tokens. A request becomes a chat's; its answer, content blocks.

Thinking is in clear, and its signature proves nothing; any that a client sends back is taken. Where a client wants none of the text, the signature
holds it."""
from __future__ import annotations
import secrets
from typing import Any, ClassVar, Literal
import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp
from tinygrad.apps.reasoning import ANSWER, REASONING
from tinygrad.apps.serve.answer import Reply, Usage, Whole, kept, packed
from tinygrad.apps.serve.requests import (ApiError, ChatRequest, Function, FunctionCall, FunctionName, Job, JsonSchema, Message, Part, ResponseFormat,
                                          Thinking, Tool, ToolCall, ToolChoice, chat_job, conversation, encoded, naming, prompt_of, text_of, wrong)
from tinygrad.apps.serve.service import Blocks, Service, answered, json_response, sse
from tinygrad.apps.serve.settings import Settings
from tinygrad.apps.serve.text import Voice
from tinygrad.apps.tool_calls import CallBegins, decode

NAMES = {"stop": "stop_sequences", "response_format": "output_config.format", ".function.name": ".name"}
# of a system block that Claude Code puts first and changes with each request: with it no prefix would ever be found in the cache
BILLING = "x-anthropic-billing-header:"
SIGNATURE = "none"

# ---- structs ----

class Result(Part, kw_only=True):
  """A part of a tool's result"""
  tool_name: str|None = None
class Block(Part, kw_only=True):
  """A part of a message's content, of any type"""
  thinking: str|None = None
  signature: str|None = None
  data: str|None = None
  id: str|None = None
  name: str|None = None
  input: dict[str, Any]|None = None
  tool_use_id: str|None = None
  content: str|list[Result]|None = None
  is_error: bool|None = None
class BlockMessage(msgspec.Struct):
  role: Literal["user", "assistant", "system"]
  content: str|list[Block]
class BlockTool(msgspec.Struct):
  name: str
  type: str|None = None
  description: str|None = None
  input_schema: dict[str, Any]|None = None
  strict: bool|None = None
  defer_loading: bool|None = None
class BlockToolChoice(msgspec.Struct):
  type: Literal["auto", "any", "tool", "none"]
  name: str|None = None
  disable_parallel_tool_use: bool|None = None
class BlockThinking(msgspec.Struct):
  """budget_tokens is a hint, and so is display, but for `omitted`"""
  type: Literal["enabled", "disabled", "adaptive"]
  budget_tokens: int|None = None
  display: str|None = None
class ContextEdit(msgspec.Struct):
  type: str
  keep: Any = None
class ContextManagement(msgspec.Struct):
  """Hints, but for thinking of past turns that is kept"""
  edits: list[ContextEdit]|None = None
class OutputFormat(msgspec.Struct, rename={"definition": "schema"}):
  type: Literal["json_schema"]
  definition: dict[str, Any]
class OutputConfig(msgspec.Struct):
  effort: str|None = None
  format: OutputFormat|None = None

class CountRequest(msgspec.Struct, kw_only=True):
  LACKING: ClassVar[dict[str, tuple[Any, ...]]] = {"mcp_servers": ([],), "container": ()}
  messages: list[BlockMessage]
  model: str|None = None
  system: str|list[Block]|None = None
  tools: list[BlockTool]|None = None
  tool_choice: BlockToolChoice|None = None
  thinking: BlockThinking|None = None
  output_config: OutputConfig|None = None
  context_management: ContextManagement|None = None

class MessagesRequest(CountRequest, kw_only=True):
  """min_p and seed are ours"""
  max_tokens: int
  stop_sequences: list[str]|None = None
  stream: bool|None = None
  temperature: float|None = None
  top_p: float|None = None
  top_k: int|None = None
  min_p: float|None = None
  seed: int|None = None

# ---- a request as a chat's ----

def text_of_result(content:str|list[Result]|None, tools:dict[str, Function], where:str) -> str:
  """What a search among tools found is shown as it is, so that the prompt's beginning stays. Raises ApiError."""
  def shown(part:Result) -> Part:
    if part.type != "tool_reference": return part
    found = tools.get(part.tool_name or "")
    return Part("text", f"{encoded(found)}\n" if found else part.tool_name or "")
  return text_of([shown(part) for part in content] if isinstance(content, list) else content, where)

def messages_of(m:BlockMessage, tools:dict[str, Function], where:str) -> list[Message]:
  """Results of tools, and what else the message says. Raises ApiError."""
  if isinstance(m.content, str): return [Message(m.role, m.content)]
  results, said, texts, thoughts, calls = list[Message](), Message(m.role), list[str](), list[str](), list[ToolCall]()
  for n, block in enumerate(m.content):
    at = f"{where}.content[{n}]"
    match m.role, block.type:
      case _, "text":
        if block.text is None: wrong(f"{at}.text", "text", None)
        texts.append(block.text)
      case "assistant", "thinking": thoughts.append(block.thinking or kept(block.signature))
      case "assistant", "redacted_thinking": thoughts.append(kept(block.data))
      case "assistant", "tool_use":
        if not block.name: wrong(f"{at}.name", "a name", block.name)
        calls.append(ToolCall(FunctionCall(block.name, block.input or {}), block.id))
      case "user", "tool_result":
        result = text_of_result(block.content, tools, f"{at}.content")
        results.append(Message("tool", f"Error: {result}" if block.is_error else result, tool_call_id=block.tool_use_id))
      case _: wrong(f"{at}.type", {"user": "text or tool_result", "assistant": "text, thinking or tool_use", "system": "text"}[m.role], block.type)
  said.content, said.reasoning_content, said.tool_calls = "".join(texts) if texts else None, "".join(thoughts) or None, calls or None
  return results + [said] if texts or thoughts or calls or not results else results

def tool_of(tool:BlockTool, where:str) -> Tool:
  if tool.type not in (None, "custom"): wrong(f"{where}.type", "custom: the server runs no tools of its own", tool.type)
  if tool.input_schema is None: wrong(f"{where}.input_schema", "a schema", None)
  return Tool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict), tool.defer_loading)

def choice_of(choice:BlockToolChoice) -> Literal["none", "auto", "required"]|ToolChoice:
  if choice.type == "tool":
    if choice.name is None: wrong("tool_choice.name", "the name of a tool", None)
    return ToolChoice("function", FunctionName(choice.name))
  return "required" if choice.type == "any" else choice.type

def chat_of(r:CountRequest) -> ChatRequest:
  """Raises ApiError"""
  system = r.system if isinstance(r.system, str) else text_of([b for b in r.system or () if not (b.text or "").startswith(BILLING)], "system")
  messages = [Message("system", system)] if system else []
  tools = [tool_of(tool, f"tools[{n}]") for n, tool in enumerate(r.tools or ())]
  by_name = {tool.function.name: tool.function for tool in tools}
  for n, m in enumerate(r.messages): messages += messages_of(m, by_name, f"messages[{n}]")
  chat = ChatRequest(messages=messages, tools=tools)
  if r.tool_choice: chat.tool_choice, chat.parallel_tool_calls = choice_of(r.tool_choice), not r.tool_choice.disable_parallel_tool_use
  edits = r.context_management.edits or () if r.context_management else ()
  keeps = any(edit.type.startswith("clear_thinking") and edit.keep == "all" for edit in edits)
  if r.thinking or keeps:
    chat.thinking = Thinking(("disabled" if r.thinking.type == "disabled" else "enabled") if r.thinking else None, False if keeps else None)
  if r.output_config:
    chat.reasoning_effort = r.output_config.effort
    if (form := r.output_config.format) is not None: chat.response_format = ResponseFormat(form.type, JsonSchema(definition=form.definition))
  if r.messages and r.messages[-1].role == "assistant" and (last := messages[-1]).content and not last.tool_calls: chat.continue_final_message = True
  if isinstance(r, MessagesRequest):
    chat.stop, chat.max_tokens = r.stop_sequences, r.max_tokens
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"): setattr(chat, name, getattr(r, name))
  return chat

# ---- an answer ----

def usage_of(usage:Usage) -> dict[str, Any]:
  """What the cache had is not among the input's tokens"""
  return {"input_tokens": usage.prompt - usage.cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": usage.cached,
          "output_tokens": usage.answer, "output_tokens_details": {"thinking_tokens": usage.reasoning}}

def ending(reply:Reply) -> dict[str, Any]:
  full = reply.finish == "length" and reply.job.limit is not None and reply.tokens < reply.job.limit
  reason = {"stop": "stop_sequence" if reply.stopped_by else "end_turn", "tool_calls": "tool_use",
            "length": "model_context_window_exceeded" if full else "max_tokens"}[reply.finish or "stop"]
  return {"stop_reason": reason, "stop_sequence": reply.stopped_by}

class MessageForm(Blocks):
  alive = sse({"type": "ping"}, "ping")
  def __init__(self, service:Service, r:MessagesRequest):
    super().__init__()
    self.omitted = r.thinking is not None and r.thinking.display == "omitted"
    self.content: list[dict[str, Any]] = []   # the blocks
    self.head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": service.voice.name}

  def event(self, kind:str, **rest:Any) -> bytes: return sse({"type": kind, **rest}, kind)
  def delta(self, kind:str, **rest:Any) -> bytes:
    return self.event("content_block_delta", index=len(self.content) - 1, delta={"type": kind, **rest})

  def begin(self, replies:list[Reply]) -> bytes:
    message = {**self.head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage_of(replies[0].usage)}
    return self.event("message_start", message=message) + self.alive

  def opened(self, kind:str, call:CallBegins|None) -> bytes:
    if call is not None: block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
    else: block = {"type": "thinking", "thinking": "", "signature": ""} if kind == REASONING else {"type": "text", "text": ""}
    self.content.append(block)
    return self.event("content_block_start", index=len(self.content) - 1, content_block=block)
  def added(self, text:str) -> bytes:
    if self.kind == REASONING: return b"" if self.omitted else self.delta("thinking_delta", thinking=text)
    return self.delta("text_delta", text=text) if self.kind == ANSWER else self.delta("input_json_delta", partial_json=text)
  def closed(self, text:str, whole:bool) -> bytes:
    block, signed = self.content[-1], b""
    if self.kind == REASONING:
      block["thinking"], block["signature"] = ("", packed(text)) if self.omitted else (text, SIGNATURE)
      signed = self.delta("signature_delta", signature=block["signature"])
    elif self.kind == ANSWER: block["text"] = text
    else: block["input"] = decode(text) if whole else {}
    return signed + self.event("content_block_stop", index=len(self.content) - 1)

  def events(self, reply:Reply, events:list[Any]) -> bytes:
    out = self.write(events)
    if reply.finish is None: return out
    return out + self.close(reply.finish != "length") + self.event("message_delta", delta=ending(reply), usage=usage_of(reply.usage))
  def end(self, replies:list[Reply]) -> bytes: return self.event("message_stop")
  def error(self, e:ApiError) -> bytes: return sse(e.anthropic(), "error")

  def body(self, wholes:list[Whole]) -> dict[str, Any]:
    w, = wholes
    self.events(w.reply, w.events)
    return {**self.head, "content": self.content, **ending(w.reply), "usage": usage_of(w.reply.usage)}

def job_of(r:MessagesRequest, voice:Voice, settings:Settings, capacity:int) -> Job:
  """Raises ApiError"""
  with naming(NAMES): return chat_job(chat_of(r), voice, settings, capacity)

async def messages(request:Request) -> ASGIApp: return await answered(request, MessagesRequest, job_of, MessageForm)

async def count_tokens(request:Request) -> ASGIApp:
  service: Service = request.app.state.service
  def ids(r:CountRequest) -> list[int]:
    with naming(NAMES): return prompt_of(conversation(chat_of(r)), service.voice)
  _, tokens = await service.read(request, CountRequest, ids)
  return json_response({"input_tokens": len(tokens)})
