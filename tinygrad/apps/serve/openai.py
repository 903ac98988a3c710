"""OpenAI's endpoints: chat completions, completions, models."""
from __future__ import annotations
import secrets, time
from typing import Any
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp
from tinygrad.apps.reasoning import REASONING, Piece
from tinygrad.apps.serve.answer import Reply, TokenLogprob, Usage, Whole
from tinygrad.apps.serve.requests import ApiError, ChatRequest, CompletionRequest, chat_job, completion_job, text_of
from tinygrad.apps.serve.service import KEEP_ALIVE, Service, answered, json_response, sse
from tinygrad.apps.serve.text import Voice
from tinygrad.apps.tool_calls import CallArguments, CallBegins, Event

DONE = b"data: [DONE]\n\n"

def usage_of(replies:list[Reply]) -> dict[str, Any]:
  usage = sum((reply.usage for reply in replies), Usage())
  return {"prompt_tokens": usage.prompt, "completion_tokens": usage.answer, "total_tokens": usage.prompt + usage.answer,
          "prompt_tokens_details": {"cached_tokens": usage.cached}, "completion_tokens_details": {"reasoning_tokens": usage.reasoning}}

# ---- probabilities ----

def token_entry(voice:Voice, token:int, value:float) -> dict[str, Any]:
  data = voice.tokenizer.table[token]
  return {"token": data.decode(errors="replace"), "logprob": max(value, -9999.0), "bytes": list(data)}

def chat_logprobs(voice:Voice, chosen:list[TokenLogprob]) -> dict[str, Any]:
  return {"content": [token_entry(voice, c.token, c.logprob.value) |
                      {"top_logprobs": [token_entry(voice, token, value) for token, value in c.logprob.top]} for c in chosen], "refusal": None}

def text_logprobs(voice:Voice, chosen:list[TokenLogprob], top:bool) -> dict[str, Any]:
  """The old form, of completions"""
  def text(token:int) -> str: return voice.tokenizer.table[token].decode(errors="replace")
  return {"tokens": [text(c.token) for c in chosen], "token_logprobs": [max(c.logprob.value, -9999.0) for c in chosen],
          "top_logprobs": [{text(token): max(value, -9999.0) for token, value in c.logprob.top} for c in chosen] if top else None,
          "text_offset": [c.offset for c in chosen]}

# ---- chat ----

class ChoicesForm:
  """A kind of answer, whole or as a stream (service.Form). what: its `object`; prefix: of its id"""
  what, prefix, alive = "", "", KEEP_ALIVE
  def __init__(self, service:Service, r:ChatRequest|CompletionRequest):
    self.voice, self.include_usage = service.voice, bool(r.stream_options and r.stream_options.include_usage)
    self.head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "object": self.what, "created": int(time.time()), "model": service.voice.name}

  def chunk(self, choices:list[dict[str, Any]], **rest:Any) -> bytes: return sse({**self.head, "choices": choices, **rest})
  def end(self, replies:list[Reply]) -> bytes:
    if not self.include_usage: return DONE
    return self.chunk([], usage=usage_of(replies), timings=replies[0].timings()) + DONE
  def error(self, e:ApiError) -> bytes: return sse(e.openai()) + DONE
  def whole(self, w:Whole) -> dict[str, Any]: raise NotImplementedError
  def body(self, wholes:list[Whole]) -> dict[str, Any]:
    replies = [w.reply for w in wholes]
    return {**self.head, "choices": [self.whole(w) for w in wholes], "usage": usage_of(replies), "timings": replies[0].timings()}

class ChatForm(ChoicesForm):
  what, prefix = "chat.completion", "chatcmpl"
  def __init__(self, service:Service, r:ChatRequest):
    super().__init__(service, r)
    if r.stream: self.head["object"] = "chat.completion.chunk"
    self.echoed = text_of(r.messages[-1].content, "") if r.echo and r.continue_final_message else ""

  def choice(self, reply:Reply, delta:dict[str, Any], finish:str|None=None, chosen:list[TokenLogprob]|None=None) -> dict[str, Any]:
    logprobs = chat_logprobs(self.voice, chosen) if chosen else None
    return {"index": reply.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

  def begin(self, replies:list[Reply]) -> bytes:
    return b"".join(self.chunk([self.choice(reply, {"role": "assistant", "content": self.echoed})]) for reply in replies)

  def delta(self, event:Event) -> dict[str, Any]|None:
    match event:
      case Piece(kind, text): return {"reasoning_content" if kind == REASONING else "content": text}
      case CallBegins(index, name, id):
        return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}]}
      case CallArguments(index, text): return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None

  def events(self, reply:Reply, events:list[Event]) -> bytes:
    out, chosen = [], reply.chosen
    for event in events:
      if (delta := self.delta(event)) is None: continue
      out.append(self.chunk([self.choice(reply, delta, None, chosen)]))
      chosen = []
    if chosen: out.append(self.chunk([self.choice(reply, {}, None, chosen)]))
    if reply.finish is not None: out.append(self.chunk([self.choice(reply, {}, reply.finish)], timings=reply.timings()))
    return b"".join(out)

  def whole(self, w:Whole) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": self.echoed + w.text}
    if calls := w.reply.calls:
      message["content"] = message["content"] or None
      message["tool_calls"] = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
    if w.reasoning: message["reasoning_content"] = w.reasoning
    logprobs = chat_logprobs(self.voice, w.chosen) if w.reply.job.logprobs is not None else None
    return {"index": w.reply.index, "message": message, "logprobs": logprobs, "finish_reason": w.reply.finish}

async def chat(request:Request) -> ASGIApp: return await answered(request, ChatRequest, chat_job, ChatForm)

# ---- completions ----

class TextForm(ChoicesForm):
  what, prefix = "text_completion", "cmpl"
  def __init__(self, service:Service, r:CompletionRequest):
    super().__init__(service, r)
    self.echo, self.top = bool(r.echo), bool(r.logprobs)

  def choice(self, reply:Reply, text:str, chosen:list[TokenLogprob], finish:str|None=None) -> dict[str, Any]:
    logprobs = text_logprobs(self.voice, chosen, self.top) if reply.job.logprobs is not None else None
    return {"index": reply.index, "text": text, "logprobs": logprobs, "finish_reason": finish}

  def echoed(self, reply:Reply) -> str: return self.voice.tokenizer.decode(reply.ids) if self.echo else ""

  def begin(self, replies:list[Reply]) -> bytes:
    return b"".join(self.chunk([self.choice(reply, self.echoed(reply), [])]) for reply in replies) if self.echo else b""

  def events(self, reply:Reply, events:list[Event]) -> bytes:
    text = "".join(event.text for event in events if isinstance(event, Piece))
    if reply.finish is not None: return self.chunk([self.choice(reply, text, reply.chosen, reply.finish)], timings=reply.timings())
    return self.chunk([self.choice(reply, text, reply.chosen)]) if text or reply.chosen else b""

  def whole(self, w:Whole) -> dict[str, Any]: return self.choice(w.reply, self.echoed(w.reply) + w.text, w.chosen, w.reply.finish)

async def completions(request:Request) -> ASGIApp: return await answered(request, CompletionRequest, completion_job, TextForm)

# ---- models ----

def card(service:Service) -> dict[str, Any]:
  ready = service.link.ready
  return {"id": service.voice.name, "object": "model", "created": service.voice.created, "owned_by": "local",
          "max_model_len": ready.capacity if ready else None}

async def models(request:Request) -> Response:
  return json_response({"object": "list", "data": [card(request.app.state.service)]})

async def model(request:Request) -> Response:
  found = card(request.app.state.service)
  if (name := request.path_params["model"]) != found["id"]:
    raise ApiError(404, f"there is no model {name[:100]!r}: this server has {found['id']!r}", "model", "model_not_found")
  return json_response(found)
