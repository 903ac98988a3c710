"""The web chat's page before a server that says what a test scripts: half a code fence, calls, refusals, a connection that is cut."""
from __future__ import annotations
import asyncio, json, socket, threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Iterator
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from tinygrad.apps.serve.app import POLICY, WEB

CUT = object()    # the connection breaks here
END = object()    # the stream ends here, with no word of an end
WAIT = object()   # nothing more comes until the page leaves

def reasons(text: str) -> dict: return {"reasoning_content": text}
def calls(index: int, name: str = "", arguments: str = "") -> dict:
  return {"tool_calls": [{"index": index, "id": f"call-{index}", "function": {"name": name, "arguments": arguments}}]}

@dataclass
class Script:
  """What the server does next. answers: one a request: a list of texts, deltas, errors, CUT, END, WAIT and
  seconds to wait, or a response with its status."""
  answers: list[list | Response] = field(default_factory=list)
  key: str = ""
  health: int = 200
  words: str = "loading the model"    # of a health that is not 200
  template: str = "{% if enable_thinking %}"
  requests: list[dict[str, Any]] = field(default_factory=list)   # what was asked
  left: threading.Event = field(default_factory=threading.Event)   # a page has left an answer before its end

def refusal(status: int, message: str, **headers: str) -> Response:
  return JSONResponse({"error": {"message": message, "type": "error", "code": None, "param": None}}, status, headers)

class WithPolicy:
  """Adds the policy to all responses"""
  def __init__(self, app: Any): self.app = app
  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    async def told(message: Any) -> None:
      if message["type"] == "http.response.start": message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
      await send(message)
    await self.app(scope, receive, told)

async def stream(script: Script, answer: list) -> AsyncIterator[str]:
  def chunk(**more: Any) -> str: return "data: " + json.dumps({"object": "chat.completion.chunk", **more}) + "\n\n"
  yield chunk(choices=[{"index": 0, "delta": {"role": "assistant"}}])
  yield ": a comment that keeps the connection alive\n\n"
  left = script.left   # a later test has another
  try:
    for piece in answer:
      if piece is CUT: raise ConnectionError("scripted")
      if piece is END: return
      if piece is WAIT: await asyncio.sleep(60)
      elif isinstance(piece, float): await asyncio.sleep(piece)
      elif isinstance(piece, Exception): yield chunk(error={"message": str(piece), "type": "server_error"})
      else:
        yield chunk(choices=[{"index": 0, "delta": {"content": piece} if isinstance(piece, str) else piece}])
        await asyncio.sleep(0)
  except asyncio.CancelledError:
    left.set()
    raise
  yield chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
  usage = {"prompt_tokens": 1200, "completion_tokens": 250, "total_tokens": 1450, "prompt_tokens_details": {"cached_tokens": 1024}}
  yield chunk(choices=[], usage=usage, timings={"predicted_n": 250, "predicted_per_second": 123.45})
  yield "data: [DONE]\n\n"

def app_of(script: Script) -> Starlette:
  def guarded(endpoint: Any) -> Any:
    async def inner(request: Request) -> Response:
      if script.key and request.headers.get("Authorization") != f"Bearer {script.key}": return refusal(401, "this server asks for an API key")
      return await endpoint(request)
    return inner
  async def health(request: Request) -> Response: return JSONResponse({}) if script.health == 200 else refusal(script.health, script.words)
  async def models(request: Request) -> Response: return JSONResponse({"data": [{"id": "glm-4.7-flash"}]})
  async def props(request: Request) -> Response:
    params = {"temperature": 1.0, "top_p": 0.95, "top_k": 0, "min_p": 0.01, "repeat_penalty": 1.0, "n_predict": -1}
    return JSONResponse({"chat_template": script.template, "default_generation_settings": {"n_ctx": 8192, "params": params}})
  async def chat(request: Request) -> Response:
    script.requests.append(await request.json())
    answer = script.answers.pop(0) if script.answers else ["An answer."]
    return answer if isinstance(answer, Response) else StreamingResponse(stream(script, answer), media_type="text/event-stream")
  return Starlette(middleware=[Middleware(WithPolicy)], routes=[
    Route("/health", health), Route("/v1/models", guarded(models)), Route("/props", guarded(props)),
    Route("/v1/chat/completions", guarded(chat), methods=["POST"]), Mount("/", StaticFiles(directory=WEB, html=True))])

@contextmanager
def serving(script: Script, port: int = 0) -> Iterator[int]:
  """The port that it listens on, in a thread"""
  listener = socket.create_server(("127.0.0.1", port))
  server = uvicorn.Server(uvicorn.Config(app_of(script), log_level="critical", timeout_graceful_shutdown=0, lifespan="off"))
  thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
  thread.start()
  try: yield listener.getsockname()[1]
  finally:
    server.should_exit = True
    thread.join(10)
    listener.close()
