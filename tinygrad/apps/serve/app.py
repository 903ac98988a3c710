"""The application: its routes, and what holds for every request: a key, an id, limits, an error's form, a line in the log."""
from __future__ import annotations
import asyncio, contextlib, hmac, logging, re, secrets, stat, sys, time
from pathlib import Path
from typing import Any, AsyncIterator, Awaitable, Callable, NamedTuple
import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tinygrad.apps.serve import anthropic, openai, responses
from tinygrad.apps.serve.answer import Gone
from tinygrad.apps.serve.anthropic import CountRequest, MessagesRequest
from tinygrad.apps.serve.link import READY, Link
from tinygrad.apps.serve.openapi import document
from tinygrad.apps.serve.requests import (ApiError, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, check_tokens, conversation,
                                           encoded, failed, log, prompt_of, wrong)
from tinygrad.apps.serve.responses import ResponsesRequest
from tinygrad.apps.serve.service import Service, json_response
from tinygrad.apps.serve.settings import Settings
from tinygrad.apps.serve.text import Voice

WEB = Path(__file__).parent / "web"
OPEN = frozenset(("/health", "/v1/health"))   # for who has no key, beside the page
SWITCH = .001                                 # seconds: threads that read requests give way to the loop so soon
LINGER = 2.0                                  # seconds that the rest of a body which is too long is read, so that the error arrives
POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

class Endpoint(NamedTuple):
  method: str
  path: str
  handler: Callable[[Request], Awaitable[Response]]
  summary: str
  body: type[msgspec.Struct]|None = None

# ---- the model's words ----

async def tokenize(request:Request) -> Response:
  service: Service = request.app.state.service
  voice, capacity = service.voice, service.capacity
  def ids(r:TokenizeRequest) -> list[int]:
    if r.messages is not None: return prompt_of(conversation(r), voice)
    if (text := r.content if r.content is not None else r.prompt) is None: wrong("content", "a text, in content or prompt, or messages", None)
    tokens = voice.tokenizer.encode(text, special=r.parse_special is not False)
    added = r.add_special if r.content is not None else r.add_special_tokens is not False
    return voice.tokenizer.with_bos(tokens) if added else tokens
  r, tokens = await service.read(request, TokenizeRequest, ids)
  table = voice.tokenizer.table
  shown: list[Any] = [{"id": t, "piece": table[t].decode(errors="replace")} for t in tokens] if r.with_pieces else tokens
  return json_response({"tokens": shown, "count": len(tokens), "max_model_len": capacity})

async def detokenize(request:Request) -> Response:
  voice = request.app.state.service.voice
  def text(r:DetokenizeRequest) -> str:
    check_tokens(r.tokens, voice, "tokens")
    return voice.tokenizer.decode(r.tokens)
  _, said = await request.app.state.service.read(request, DetokenizeRequest, text)
  return json_response({"content": said, "prompt": said})

async def apply_template(request:Request) -> Response:
  voice = request.app.state.service.voice
  _, text = await request.app.state.service.read(request, ChatRequest, lambda r: voice.tokenizer.decode(prompt_of(conversation(r), voice)))
  return json_response({"prompt": text})

# ---- how it stands ----

async def health(request:Request) -> Response:
  service: Service = request.app.state.service
  if (state := service.state) == READY: return json_response({"status": "ok"})
  return json_response({"status": state, **service.unavailable().openai()}, 503, {"retry-after": "1"})

async def metrics(request:Request) -> Response:
  return Response(request.app.state.service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

async def props(request:Request) -> Response:
  service: Service = request.app.state.service
  voice, ready = service.voice, service.link.ready
  tokenizer, sampling = voice.tokenizer, voice.sampling
  params = {f: getattr(sampling, f) for f in sampling.__dataclass_fields__ if f not in ("seed", "bias")}
  params["n_predict"] = service.settings.default_max_tokens or -1
  return json_response({
    "default_generation_settings": {"n_ctx": ready.capacity if ready else None, "params": params},
    "total_slots": ready.max_rows if ready else None, "model_alias": voice.name, "model_path": service.settings.model.name,
    "device": ready.device if ready else None, "modalities": {"vision": False, "audio": False}, "chat_template": voice.template,
    "bos_token": "" if tokenizer.bos_id is None else tokenizer.decode([tokenizer.bos_id]), "eos_token": tokenizer.decode([tokenizer.eos_id]),
    "n_vocab": tokenizer.n_vocab})

async def slots(request:Request) -> Response:
  service: Service = request.app.state.service
  replies, rows = list(service.running.values()), service.link.ready.max_rows if service.link.ready else 0
  idle = {"is_processing": False, "n_ctx": service.capacity}
  busy = [{**idle, "is_processing": True, "id_task": r.handle.number, "n_prompt_tokens": len(r.ids), "n_decoded": r.tokens} for r in replies]
  if "fail_on_no_slot" in request.query_params and len(busy) >= rows: raise ApiError(503, "no slot is free")
  return json_response([{"id": n, **slot} for n, slot in enumerate(busy + [idle] * (rows - len(busy)))])

async def openapi(request:Request) -> Response: return json_response(request.app.state.openapi)

ENDPOINTS = [
  Endpoint("POST", "/v1/chat/completions", openai.chat, "An answer to a conversation", ChatRequest),
  Endpoint("POST", "/v1/completions", openai.completions, "A text's continuation", CompletionRequest),
  Endpoint("POST", "/v1/responses", responses.respond, "An answer to items, in items", ResponsesRequest),
  Endpoint("POST", "/v1/messages", anthropic.messages, "An answer to a conversation, in Anthropic's form", MessagesRequest),
  Endpoint("POST", "/v1/messages/count_tokens", anthropic.count_tokens, "The tokens of such a conversation", CountRequest),
  Endpoint("GET", "/v1/models", openai.models, "The model, as a list"),
  Endpoint("GET", "/v1/models/{model:path}", openai.model, "The model"),
  Endpoint("POST", "/tokenize", tokenize, "A text's tokens, or a conversation's", TokenizeRequest),
  Endpoint("POST", "/detokenize", detokenize, "The text of tokens", DetokenizeRequest),
  Endpoint("POST", "/apply-template", apply_template, "The prompt of a conversation", ChatRequest),
  Endpoint("GET", "/props", props, "The model and its defaults"),
  Endpoint("GET", "/slots", slots, "What is being answered"),
  Endpoint("GET", "/health", health, "Whether requests are taken; 503 while they are not"),
  Endpoint("GET", "/v1/health", health, "Whether requests are taken; 503 while they are not"),
  Endpoint("GET", "/metrics", metrics, "Prometheus' text, under vLLM's names"),
  Endpoint("GET", "/openapi.json", openapi, "This"),
]

# ---- every request ----

class Page(StaticFiles):
  """The web chat's files. They ask nothing of other hosts, and must not be let to."""
  def file_response(self, *args:Any, **kw:Any) -> Response:
    response = super().file_response(*args, **kw)
    response.headers.update({"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
                             "cache-control": "no-cache"})
    return response
  def has(self, path:str) -> bool:
    """Whether there is a file for this path of a URL"""
    try: found = self.lookup_path(path.removeprefix("/") or "index.html")[1]
    except (OSError, ValueError): return False   # no name that a file can have
    return found is not None and stat.S_ISREG(found.st_mode)
  async def __call__(self, scope:Scope, receive:Receive, send:Send) -> None:
    if scope["method"] in ("GET", "HEAD") and not self.has(scope["path"]): raise HTTPException(404)
    await super().__call__(scope, receive, send)

class Front:
  """What stands before the routes. Every answer gets an id; errors get their route's form; the log gets a line."""
  def __init__(self, app:ASGIApp, service:Service, page:Page|None):
    self.app, self.service, self.page = app, service, page
    self.keys = [key.encode() for key in service.settings.api_keys]

  async def __call__(self, scope:Scope, receive:Receive, send:Send) -> None:
    if scope["type"] != "http": return await self.app(scope, receive, send)
    start, headers, status = time.perf_counter(), Headers(scope=scope), 0
    given = headers.get("x-request-id", "")
    number = scope["request_id"] = given if re.fullmatch(r"[!-~]{1,128}", given) else secrets.token_hex(16)
    unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    async def hear() -> Message:
      nonlocal unread
      message = await receive()
      unread = message["type"] == "http.request" and message.get("more_body", False)
      return message
    async def answer(message:Message) -> None:
      nonlocal status
      if message["type"] == "http.response.start":
        status = message["status"]
        message["headers"] = [*message["headers"], (b"x-request-id", number.encode()), (b"request-id", number.encode())]
      await send(message)
    try:
      try:
        self.check(scope, headers)
        await self.app(scope, hear, answer)
      except ApiError as e:
        if not status: await self.refuse(e, scope, hear, answer, unread)
      except Gone: status = 499
      except Exception as e:
        error = failed(e, number)
        if not status: await self.refuse(error, scope, hear, answer, unread)
    finally:
      line = {"method": scope["method"], "path": scope["path"][:200], "status": status, "ms": round((time.perf_counter() - start) * 1e3, 1),
              "id": number, **scope.get("said", {})}
      log.info(encoded(line))

  def check(self, scope:Scope, headers:Headers) -> None:
    """Raises ApiError for a request without a key, where it needs one"""
    if not self.keys or scope["path"] in OPEN: return
    if scope["method"] in ("GET", "HEAD") and self.page is not None and self.page.has(scope["path"]): return
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = (bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode("latin-1", "replace")
    # all are compared, each in constant time: how long it takes tells nothing
    if not sum(hmac.compare_digest(given, key) for key in self.keys):
      what = "the key is wrong" if given else "expected a key, as Authorization: Bearer KEY or X-Api-Key: KEY, found none"
      raise ApiError(401, what, code="invalid_api_key")

  async def refuse(self, e:ApiError, scope:Scope, receive:Receive, send:Send, unread:bool) -> None:
    """unread: whether the request's body has not all come. Who is still sending would find the connection closed, and not read why: what comes is
    dropped behind the answer."""
    response = error_response(e, scope["path"])
    if e.status == 413: response.headers["connection"] = "close"
    if not unread: return await response(scope, receive, send)
    await send({"type": "http.response.start", "status": e.status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(LINGER):
        while (message := await receive())["type"] == "http.request" and message.get("more_body", False): pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})

def error_response(e:ApiError, path:str) -> Response:
  headers = {"retry-after": str(e.retry_after)} if e.retry_after is not None else {}
  if e.status == 401: headers["www-authenticate"] = "Bearer"
  return json_response(e.anthropic() if path.startswith("/v1/messages") else e.openai(), e.status, headers)

async def no_route(request:Request, e:Exception) -> Response:
  """A path or a method that there is not"""
  assert isinstance(e, HTTPException)
  what = {404: f"there is no {request.url.path[:200]}", 405: f"{request.url.path[:200]}: {request.method} is not for it"}.get(e.status_code, e.detail)
  response = error_response(ApiError(e.status_code, what), request.url.path)
  response.headers.update(e.headers or {})
  return response

def log_to_stderr() -> None:
  """The log goes to stderr, a line of JSON each, unless it goes somewhere already"""
  if log.hasHandlers(): return
  handler = logging.StreamHandler()
  handler.setFormatter(logging.Formatter("%(message)s"))
  log.addHandler(handler)
  log.setLevel(logging.INFO)
  log.propagate = False

def voice_of(settings:Settings) -> Voice: return Voice.from_file(settings.model, settings.alias, settings.sampling)

def create_app(link:Link, settings:Settings, read:Callable[[Settings], Voice]=voice_of) -> Starlette:
  """The application. It starts the link with itself, and closes it; meanwhile it reads the model's file."""
  service = Service(link, settings)
  log_to_stderr()
  @contextlib.asynccontextmanager
  async def lifespan(_:Starlette) -> AsyncIterator[None]:
    sys.setswitchinterval(SWITCH)
    await link.start()
    reading = asyncio.create_task(service.load(read))
    try: yield
    finally:
      await reading
      await link.close(settings.drain_seconds)
  page = Page(directory=WEB, html=True) if (WEB / "index.html").is_file() else None
  routes = [Route(e.path, e.handler, methods=[e.method]) for e in ENDPOINTS]
  middleware = [Middleware(Front, service=service, page=page)]
  if settings.cors_origins:
    middleware.insert(0, Middleware(CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
                                    expose_headers=["x-request-id", "retry-after"]))
  app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: no_route}, lifespan=lifespan)
  if page is not None: app.router.default = page   # for paths that no endpoint has
  app.state.service, app.state.openapi = service, document(ENDPOINTS)
  return app
