"""A server whose model says what a test has written down, on a port of its own, for the server's tests. All but the engine's process is the
product's."""
from __future__ import annotations
import asyncio, contextlib, json, math, socket, threading, time, urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator
import uvicorn
from talker import vocabulary
from templates import GLM
from tinygrad.apps.chat import Chat
from tinygrad.apps.serve import wire
from tinygrad.apps.serve.app import create_app
from tinygrad.apps.serve.connection import Connection
from tinygrad.apps.serve.link import READY, Link
from tinygrad.apps.serve.settings import Settings
from tinygrad.apps.serve.text import Voice

SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "[gMASK]", "<sop>", "<think>", "</think>", "<tool_call>",
            "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>", "</tool_response>"]
END = 256   # <|end|>

def talking_voice(**kw: Any) -> Voice:
  tokenizer = vocabulary(SPECIALS)
  return Voice(tokenizer, Chat("talker", GLM, tokenizer), name="talker", created=1, template=GLM, **kw)

@dataclass
class Says:
  """What the model says to one prompt. at_once: tokens of a step. error: it fails after its text; endless: it says its text again and again; silent:
  until a test sets this event, nothing comes."""
  text: str = ""
  at_once: int = 1
  error: str = ""
  endless: bool = False
  silent: threading.Event|None = None

class ScriptedLink(Link):
  """A Link whose engine is a task of the loop. script: by a text that stands in the prompt's last message. orders: what the engine was told."""
  def __init__(self, voice: Voice, **ready: Any):
    super().__init__(wire.Load(""))
    self.voice, self.script, self.orders, self.tasks = voice, dict[str, Says](), list[Any](), dict[int, asyncio.Task]()
    self.ready = wire.Ready(**{"device": "none", "max_context": 4096, "capacity": 4096, "rows": 8192, "page": 64, "max_rows": 4, **ready})
  async def start(self) -> None: self.state, self.loop = READY, asyncio.get_running_loop()
  async def close(self, seconds: float = 0) -> None:
    for task in self.tasks.values(): task.cancel()

  def send(self, order: Any) -> None:
    self.orders.append(order)
    if isinstance(order, wire.Add): self.tasks[order.id] = asyncio.get_running_loop().create_task(self._answer(order))
    elif isinstance(order, wire.Abort) and order.id in self.handles:
      self.tasks[order.id].cancel()
      asyncio.get_running_loop().call_soon(self._tell, wire.News(order.id, [], end="abort", times=wire.Times(1, 2, 3, 4)))
  def _tell(self, news: wire.News) -> None: self._hear(wire.Step([news], self.gauges))

  async def _answer(self, order: wire.Add) -> None:
    prompt = self.voice.tokenizer.decode(order.ids)
    last = prompt.rpartition("<|user|>")[2]
    says = next((says for text, says in self.script.items() if text in last), Says("hello"))
    while says.silent is not None and not says.silent.is_set(): await asyncio.sleep(.001)
    tokens = self.voice.tokenizer.encode(says.text, special=True)
    left = min(self.ready.capacity - len(order.ids), order.limit or self.ready.capacity)
    if not says.endless and not says.error: tokens.append(END)
    sent = 0
    while True:
      for at in range(0, len(tokens), says.at_once):
        await asyncio.sleep(0)
        ids = tokens[at:min(at + says.at_once, at + left - sent)]
        sent += len(ids)
        end = "stop" if ids and ids[-1] in order.stop else "length" if sent == left else None
        logprobs = [] if order.logprobs is None else [wire.Logprob(-.5, [(t, -.5), (32, -math.inf)][:order.logprobs]) for t in ids]
        self._tell(wire.News(order.id, ids, logprobs, end, "", 4, wire.Times(10., 10.5, 11., 13.) if end else None))
        if end: return
      if says.error: return self._tell(wire.News(order.id, [], end="error", why=says.error))

class Server:
  """url: of a server that answers by the link. reader: in place of what reads the model's file. stop: ends it"""
  def __init__(self, link: Link, settings: Settings, *reader: Callable[[Settings], Voice]):
    self.link, self.app = link, create_app(link, settings, *reader)
    config = uvicorn.Config(self.app, log_config=None, access_log=False, http=Connection, ws="none", lifespan="on", timeout_graceful_shutdown=1)
    self.server, sock = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)   # who does not read is soon noticed
    self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    self.thread = threading.Thread(target=self.server.run, args=([sock],), daemon=True)
    self.thread.start()
    until(lambda: self.server.started)
  def stop(self) -> None:
    self.server.should_exit = True
    self.thread.join(20)

  def in_loop(self, call: Any) -> None: self.link.loop.call_soon_threadsafe(call)

  def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """(status, the body, as JSON where it is that, headers). body: bytes, or what becomes JSON"""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(self.url + path, data, {name.replace("_", "-"): value for name, value in headers.items()})
    try: response = urllib.request.urlopen(request, timeout=20)
    except urllib.error.HTTPError as e: response = e
    with response:
      text = response.read()
      return response.status, json.loads(text) if "json" in response.headers.get("content-type", "") else text.decode(), response.headers

def until(holds: Any, seconds: float = 20) -> None:
  end = time.monotonic() + seconds
  while not holds():
    assert time.monotonic() < end, "it did not come to be so"
    time.sleep(.002)

@contextlib.contextmanager
def serving(voice: Voice|None = None, ready: dict[str, Any]|None = None, **settings: Any) -> Iterator[Server]:
  """A scripted server"""
  voice = voice or talking_voice()
  server = Server(ScriptedLink(voice, **(ready or {})), Settings(Path("none"), **settings), lambda _: voice)
  until(server.app.state.service.loaded.is_set)
  try: yield server
  finally: server.stop()
