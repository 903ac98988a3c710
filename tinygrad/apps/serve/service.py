"""What the endpoints share: reading a request in a thread, the bounds of the queue, handing a job to the engine, and sending an answer, whole or as
server-sent events, to somebody who may go away meanwhile."""
from __future__ import annotations
import asyncio, time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Protocol, TypeVar
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from tinygrad.apps.gguf import GGUFError
from tinygrad.apps.reasoning import Piece
from tinygrad.apps.serve.answer import Gone, Reply, Usage, Whole
from tinygrad.apps.serve.link import LOADING, READY, Link, Unavailable
from tinygrad.apps.serve.metrics import Metrics
from tinygrad.apps.serve.requests import ApiError, Job, decode, encoded, failed, log
from tinygrad.apps.serve.settings import Settings
from tinygrad.apps.serve.text import Voice
from tinygrad.apps.tool_calls import CallArguments, CallBegins, CallEnds, Event

BIG = 1 << 18            # bytes of a body that is read in a thread of its own kind, so that small ones need not wait for it
READ_SECONDS = 30.0      # that a client may take from piece to piece of its body
QUEUE_TOKENS = 4         # of the caches' sizes: the tokens that may wait where the settings do not say
KEEP_ALIVE = b": keep-alive\n\n"   # a comment, which clients drop
CALL = "call"            # a block's kind, beside those of pieces
BODIES = 8               # bodies of the largest size that are held at once, as bytes

Struct = TypeVar("Struct", bound=msgspec.Struct)
Built = TypeVar("Built")
encode = msgspec.json.Encoder().encode

def json_response(data:Any, status:int=200, headers:dict[str, str]|None=None) -> Response:
  return Response(encode(data), status, headers, "application/json")

def sse(data:Any, event:str="") -> bytes:
  """A server-sent event"""
  return (f"event: {event}\n".encode() if event else b"") + b"data: " + encode(data) + b"\n\n"

class Service:
  """link: the engine's process. running: answers that have not ended"""
  def __init__(self, link:Link, settings:Settings):
    self.link, self.settings = link, settings
    self._voice: Voice|None = None
    self.loaded = asyncio.Event()     # whether the model's file was read, or cannot be
    self.metrics = Metrics(link)
    self.running: dict[int, Reply] = {}
    self.reading, self.held = 0, 0    # requests that become jobs, and the bytes of their bodies, of others' too
    self.small, self.big = ThreadPoolExecutor(2, "read"), ThreadPoolExecutor(1, "read-big")

  @property
  def state(self) -> str:
    """The link's, but that the model's file has to be read here, too"""
    return LOADING if self.link.state == READY and self._voice is None else self.link.state
  def why_not(self) -> str:
    """Why no request is taken"""
    return "the model is being loaded (its vocabulary)" if self.link.state == READY else self.link.why_not()
  def unavailable(self) -> ApiError: return ApiError(503, self.why_not(), retry_after=1)
  @property
  def voice(self) -> Voice:
    if self._voice is None: raise self.unavailable()
    return self._voice
  @property
  def capacity(self) -> int:
    """The most tokens of a prompt and its answer"""
    if self.link.ready is None: raise self.unavailable()
    return self.link.ready.capacity

  async def load(self, read:Callable[[Settings], Voice]) -> None:
    """Reads the model's file, in a thread: a large vocabulary takes a second or two. A file that cannot be read is the link's failure."""
    try: self._voice = await asyncio.to_thread(read, self.settings)
    except Exception as e:   # the file's fault, or ours
      name = "" if isinstance(e, (GGUFError, ValueError, OSError)) else f"{type(e).__name__}: "
      self.link.fail(" ".join(f"{name}{e}".split()))
    else: self.metrics.model(self._voice.name)
    finally: self.loaded.set()
  async def wait_ready(self) -> None:
    """Until requests are taken. Raises Unavailable where none ever will be."""
    await self.loaded.wait()
    await self.link.wait_ready()

  # ---- a request ----
  def check_room(self) -> None:
    """Raises ApiError where the queue is full, or no request is taken"""
    if self.state != READY: raise self.unavailable()
    assert self.link.ready is not None
    tokens = self.settings.max_queued_tokens or QUEUE_TOKENS * self.link.ready.rows
    if self.link.queued + self.reading >= self.settings.max_queued:
      raise ApiError(429, f"{self.link.queued} requests wait already: try again later", code="queue_full", retry_after=1)
    if self.link.queued_tokens >= tokens:
      raise ApiError(429, f"prompts of {self.link.queued_tokens} tokens wait already: try again later", code="queue_full", retry_after=1)

  async def body(self, request:Request) -> bytes:
    """Whoever takes it lowers `held`. Raises ApiError for one that is too long, without reading on; Gone."""
    limit, length, pieces, size = self.settings.max_body, request.headers.get("content-length", ""), [], 0
    if length.isdigit() and int(length[:20]) > limit: raise ApiError(413, f"the body has {length[:20]} bytes: at most {limit} are read")
    try:
      while True:
        try:
          async with asyncio.timeout(READ_SECONDS): message = await request.receive()
        except TimeoutError: raise ApiError(408, f"nothing of the body came for {READ_SECONDS:.0f} s") from None
        if message["type"] == "http.disconnect": raise Gone
        pieces.append(piece := message.get("body", b""))
        size += len(piece)
        self.held += len(piece)
        if size > limit: raise ApiError(413, f"the body has more than the {limit} bytes that are read")
        if self.held > BODIES * limit: raise ApiError(429, "too many large requests at once: try again later", code="queue_full", retry_after=1)
        if not message.get("more_body", False): return b"".join(pieces)
    except BaseException:
      self.held -= size
      raise

  async def read(self, request:Request, kind:type[Struct], build:Callable[[Struct], Built], queued:bool=False) -> tuple[Struct, Built]:
    """(a request's struct, what is built of it in a thread). queued: whether it is for the engine. Raises ApiError, Gone."""
    if queued: self.check_room()
    body = await self.body(request)
    def work() -> tuple[Struct, Built]:
      struct = decode(body, kind)
      return struct, build(struct)
    try:
      if queued: self.check_room()
      if self.settings.log_prompts: log.info(encoded({"id": request.scope.get("request_id"), "request": body.decode(errors="replace")}))
      self.reading += 1
      try: return await asyncio.get_running_loop().run_in_executor(self.big if len(body) > BIG else self.small, work)
      finally: self.reading -= 1
    finally: self.held -= len(body)

  def start(self, job:Job) -> list[Reply]:
    """Hands a job to the engine. Raises ApiError."""
    replies: list[Reply] = []
    try:
      for ids in job.prompts:
        for n in range(job.n):
          sampling = job.sampling if n == 0 else {**job.sampling, "seed": (job.sampling.get("seed", 0) + n) % (1 << 32)}
          handle = self.link.add(ids, sampling, sorted(job.stop_ids), job.limit, job.logprobs, job.grammar)
          replies.append(reply := Reply(handle, job, self.voice, ids, len(replies), again=n > 0))
          self.running[handle.number] = reply
    except Unavailable as e:
      self.end(replies)
      raise ApiError(503, str(e), retry_after=1) from None
    return replies

  def end(self, replies:list[Reply]) -> None:
    """Whatever became of them, they are not read any more"""
    for reply in replies:
      if reply.finish is None: reply.abort()
      self.running.pop(reply.handle.number, None)
      self.metrics.ended(reply)

  def note(self, request:Request, replies:list[Reply]) -> None:
    """What the request's line in the log says of its answers"""
    usage = sum((reply.usage for reply in replies), Usage())
    request.scope["said"] = {"prompt_tokens": usage.prompt, "cached_tokens": usage.cached, "answer_tokens": usage.answer,
                             "finish": ",".join(str(reply.finish) for reply in replies)}

  async def wholes(self, request:Request, replies:list[Reply]) -> list[Whole]:
    """All answers, whole. Raises ApiError, Gone."""
    async def watch() -> None:
      while (await request.receive())["type"] != "http.disconnect": pass
      for reply in replies: reply.abort()
    watcher = asyncio.create_task(watch())
    try: return [await self._whole(replies[0])] if len(replies) == 1 else await all_of([self._whole(reply) for reply in replies])
    finally:
      watcher.cancel()
      self.end(replies)
      self.note(request, replies)

  async def _whole(self, reply:Reply) -> Whole:
    out = Whole(reply)
    while reply.finish is None: out.add(await self.events(reply))
    return out

  async def events(self, reply:Reply) -> list[Event]:
    """reply.events, seen by the metrics"""
    last, tokens = reply.last, reply.tokens
    events = await reply.events()
    self.metrics.tokens(reply, last, reply.tokens - tokens)
    return events

async def all_of(work:list[Any]) -> list[Any]:
  """The results. Raises what the first raises that does; the others are cancelled then."""
  try:
    async with asyncio.TaskGroup() as group: tasks = [group.create_task(w) for w in work]
  except ExceptionGroup as e: raise e.exceptions[0] from None
  return [task.result() for task in tasks]

class Form(Protocol):
  """How a kind of endpoint writes an answer. Of a stream, bytes of server-sent events, which may be none. alive: those that only say that the server
  is there"""
  alive: bytes
  def begin(self, replies:list[Reply]) -> bytes: ...
  def events(self, reply:Reply, events:list[Event]) -> bytes:
    """What came, and with reply.finish that it ended"""
  def end(self, replies:list[Reply]) -> bytes: ...
  def error(self, e:ApiError) -> bytes: ...
  def body(self, wholes:list[Whole]) -> dict[str, Any]:
    """What is sent in place of a stream"""

class Blocks:
  """An answer as blocks, one after another, each of reasoning, of text, or a call: what the forms of such answers share. kind: of the block that is
  open, if one is; texts: its pieces."""
  def __init__(self) -> None: self.kind, self.texts = "", list[str]()

  def opened(self, kind:str, call:CallBegins|None) -> bytes: raise NotImplementedError
  def added(self, text:str) -> bytes: raise NotImplementedError
  def closed(self, text:str, whole:bool) -> bytes:
    """text: all of it; whole: whether nothing is missing at its end"""
    raise NotImplementedError

  def write(self, events:list[Event]) -> bytes:
    out = []
    for event in events:
      call = event if isinstance(event, CallBegins) else None
      if call or isinstance(event, Piece) and event.kind != self.kind:
        out.append(self.close())
        self.kind = CALL if call else event.kind
        out.append(self.opened(self.kind, call))
      if isinstance(event, (Piece, CallArguments)):
        self.texts.append(event.text)
        out.append(self.added(event.text))
      elif isinstance(event, CallEnds): out.append(self.close())
    return b"".join(out)

  def close(self, whole:bool=True) -> bytes:
    if not self.kind: return b""
    out = self.closed("".join(self.texts), whole)
    self.kind, self.texts = "", []
    return out

EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

class EventStream:
  """Answers as they come. A piece of news is one message of the server's. Who reads slowly is waited for: what comes meanwhile is one piece. A
  comment goes out where nothing else did for a while. Who goes away ends the answers."""
  def __init__(self, service:Service, request:Request, replies:list[Reply], form:Form):
    self.service, self.request, self.replies, self.form = service, request, replies, form
    self.sent, self.sending = 0.0, False

  async def __call__(self, scope:Scope, receive:Receive, send:Send) -> None:
    self.send = send
    watcher = asyncio.create_task(self._watch(receive))
    try:
      await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
      try:
        await self._write(self.form.begin(self.replies))
        if len(self.replies) == 1: await self._pump(self.replies[0])
        else: await all_of([self._pump(reply) for reply in self.replies])
        last = self.form.end(self.replies)
      except ApiError as e: last = self.form.error(e)
      except Gone: raise
      except Exception as e: last = self.form.error(failed(e, scope.get("request_id", "")))
      await send({"type": "http.response.body", "body": last, "more_body": False})
    finally:
      watcher.cancel()
      self.service.end(self.replies)
      self.service.note(self.request, self.replies)

  async def _pump(self, reply:Reply) -> None:
    while reply.finish is None:
      if data := self.form.events(reply, await self.service.events(reply)): await self._write(data)

  async def _write(self, data:bytes) -> None:
    self.sending = True
    await self.send({"type": "http.response.body", "body": data, "more_body": True})
    self.sent, self.sending = time.monotonic(), False

  async def _watch(self, receive:Receive) -> None:
    """Until the client is gone; says meanwhile that the server is there"""
    seconds = self.service.settings.keepalive_seconds
    while True:
      try:
        async with asyncio.timeout(max(self.sent + seconds - time.monotonic(), .01) if self.sent else seconds): message = await receive()
      except TimeoutError:
        if self.sending: self.sent = time.monotonic()
        elif time.monotonic() - self.sent >= seconds: await self._write(self.form.alive)
      else:
        if message["type"] != "http.disconnect": continue
        for reply in self.replies: reply.abort()
        return

Answers = Callable[[Any, Voice, Settings, int], Job]   # a request's struct and the context's size to what is asked of the engine

async def answered(request:Request, kind:type[msgspec.Struct], job:Answers, form_of:Callable[[Service, Any], Form]) -> ASGIApp:
  """The answer to a request of this kind: a stream, or whole. Raises ApiError, Gone."""
  service: Service = request.app.state.service
  r, asked = await service.read(request, kind, lambda r: job(r, service.voice, service.settings, service.capacity), queued=True)
  form, replies = form_of(service, r), service.start(asked)
  if r.stream: return EventStream(service, request, replies, form)
  return json_response(form.body(await service.wholes(request, replies)))
