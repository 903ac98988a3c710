"""The engine's process (worker.py), as the process with HTTP sees it: a Link starts it, hands it requests, and hands out what it says, on one event
loop's thread. Nothing here knows a device.

  link = Link(wire.Load("models/tiny-glm-Q4_0.gguf"))
  await link.start()
  await link.wait_ready()
  handle = link.add(ids, {}, [stop_id], limit=20)
  while not (news := await handle.news()).end: ...
  await link.close(seconds=30)

A handle that is not read keeps what comes for it as one piece of news. When the process dies, each handle ends with an error."""
from __future__ import annotations
import asyncio, contextlib, os, signal, socket, subprocess, sys
from pathlib import Path
from typing import Any, Callable, Iterable
import msgspec
from tinygrad.apps.serve import wire

ROOT = Path(__file__).resolve().parents[3]
WORKER = "tinygrad.apps.serve.worker"
GRACE = 5.0    # seconds that the process has to end in, once it has nothing to do
LOADING, READY, DRAINING, FAILED = "loading", "ready", "draining", "failed"

class Unavailable(Exception):
  """No request is taken. str(e) is one line."""

class Handle:
  """A request of the engine. tokens: of its prompt; begun: whether any news has come, which is a token or the end; ended: whether its end has come"""
  def __init__(self, link:Link, number:int, tokens:int):
    self.link, self.number, self.tokens, self.begun, self.ended = link, number, tokens, False, False
    self.held: wire.News|None = None                  # what has come, and was not taken
    self.waiter: asyncio.Future[None]|None = None     # of whoever waits for more

  async def news(self) -> wire.News:
    """What has come since the last call, or the next that comes. The last has `end`; there is nothing to be waited for after it."""
    if self.held is None:
      if self.ended: raise RuntimeError("its end was told")
      self.waiter = asyncio.get_running_loop().create_future()
      await self.waiter
    news, self.held = self.held, None
    assert news is not None
    return news

  def abort(self) -> None:
    """The answer is not wanted any more. Its end is news all the same."""
    if not self.ended: self.link.send(wire.Abort(self.number))

  def take(self, news:wire.News) -> None:
    """More of it, from the link"""
    if (held := self.held) is None: self.held = news
    else:
      held.ids += news.ids
      held.logprobs += news.logprobs
      held.end, held.why, held.cached, held.times = news.end, news.why, news.cached, news.times
    self.begun, self.ended = True, news.end is not None
    if self.waiter is not None and not self.waiter.done(): self.waiter.set_result(None)

class Link(asyncio.Protocol):
  """See the head of the file.
  state: loading, ready, draining or failed. doing: what is loaded; why: it failed. ready: what there is, once it is loaded; gauges: how it stands"""
  def __init__(self, load:wire.Load):
    self.load = load
    self.state, self.doing, self.why = LOADING, "starting the engine", ""
    self.ready: wire.Ready|None = None
    self.gauges = wire.Gauges()
    self.handles: dict[int, Handle] = {}   # that have not ended
    self.numbers = 0                       # requests so far
    self.frames, self.reports = wire.Frames(), msgspec.msgpack.Decoder(wire.Report)
    self.process: subprocess.Popen[bytes]|None = None
    self.transport: asyncio.Transport|None = None
    self.ended = False                     # whether the process has
    self.changed = asyncio.Event()         # whoever waits for a state, or for the last handle's end, looks again

  # ---- for whoever serves ----
  async def start(self) -> None:
    """Starts the process, which loads the model"""
    mine, its = socket.socketpair()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # a group of its own: Ctrl-C on the terminal is this process's to settle. -P: no module is taken from the folder that this was started in
    with its: self.process = subprocess.Popen([sys.executable, "-P", "-m", WORKER, str(its.fileno())], pass_fds=[its.fileno()], process_group=0,
                                              stdin=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path})
    await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=mine)
    self.send(self.load)

  async def wait_ready(self) -> None:
    """Until the model is loaded. Raises Unavailable where it never will be."""
    await self._until(lambda: self.state != LOADING)
    if self.state != READY: raise Unavailable(self.why_not())
  async def wait_end(self) -> None:
    """Until no request is taken any more"""
    await self._until(lambda: self.state in (DRAINING, FAILED))

  def add(self, ids:list[int], sampling:dict[str, Any], stop:Iterable[int], limit:int|None=None, logprobs:int|None=None,
          grammar:wire.Grammar|None=None) -> Handle:
    """A request: as wire.Add has it. Raises Unavailable when the engine takes none."""
    if self.state != READY: raise Unavailable(self.why_not())
    self.numbers += 1
    self.send(wire.Add(self.numbers, ids, sampling, list(stop), limit, logprobs, grammar))
    handle = self.handles[self.numbers] = Handle(self, self.numbers, len(ids))
    return handle

  def why_not(self) -> str:
    """Why no request is taken"""
    return {LOADING: f"the model is being loaded ({self.doing})", DRAINING: "the server is ending"}.get(self.state, self.why)

  @property
  def queued(self) -> int:
    """Requests of whose answers there is no token yet"""
    return sum(not handle.begun for handle in self.handles.values())
  @property
  def queued_tokens(self) -> int:
    """… and the tokens of their prompts"""
    return sum(handle.tokens for handle in self.handles.values() if not handle.begun)

  def fail(self, why:str) -> None:
    """No request is taken from here on, and all handles end. What was known first stays the reason."""
    if self.state == FAILED: return
    self.why = why
    self.gauges = msgspec.structs.replace(self.gauges, running=0, waiting=0, pages=0)
    self._change(FAILED, "")
    for number in list(self.handles): self._pass_on(wire.News(number, [], end="error", why=why))

  async def drain(self, seconds:float) -> None:
    """No request is taken from here on. Returns when those that run have ended; those that run after so many seconds are aborted."""
    if self.state != FAILED: self._change(DRAINING, "")
    if await self._until(lambda: not self.handles, seconds): return
    for handle in self.handles.values(): handle.abort()
    await self._until(lambda: not self.handles, GRACE)

  async def close(self, seconds:float=0) -> None:
    """Drains, and ends the process"""
    await self.drain(seconds)
    if self.ready is None: self.kill()   # what loads takes no orders
    self.send(wire.Leave())
    if self.process is None or await self._until(lambda: self.ended, GRACE): return
    self.kill()
    await self._until(lambda: self.ended, GRACE)

  def kill(self) -> None:
    """Ends the process at once"""
    if self.process is not None: self.process.kill()

  # ---- with the process ----
  def send(self, order:wire.Order) -> None:
    if self.transport is not None: self.transport.write(wire.frame(order))

  def connection_made(self, transport:asyncio.BaseTransport) -> None:
    self.transport = transport  # type: ignore[assignment]  # uvloop's are of another class
  def data_received(self, data:bytes) -> None:
    for message in self.frames.push(data): self._hear(self.reports.decode(message))
  def connection_lost(self, exc:Exception|None) -> None:
    self.transport = None
    self.reaping = asyncio.get_running_loop().create_task(self._reap())   # kept: the loop alone would not hold it

  def _hear(self, report:wire.Report) -> None:
    match report:
      case wire.Step():
        self.gauges = report.gauges
        for news in report.news: self._pass_on(news)
      case wire.Loading(): self._change(self.state, report.what)
      case wire.Ready():
        self.ready = report
        if self.state == LOADING: self._change(READY, "")
      case wire.Failed(): self.fail(report.why)

  def _pass_on(self, news:wire.News) -> None:
    if (handle := self.handles.get(news.id)) is None: return
    if news.end is not None:
      del self.handles[news.id]
      if not self.handles: self.changed.set()
    handle.take(news)

  async def _reap(self) -> None:
    """After the socket was closed at the other end"""
    assert self.process is not None
    try: code = await asyncio.to_thread(self.process.wait, GRACE)
    except subprocess.TimeoutExpired: how = "closed its socket"
    else: how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    with contextlib.suppress(OSError): os.killpg(self.process.pid, signal.SIGTERM)   # what compiled for it, and may not have ended with it
    if self.state != DRAINING or self.handles: self.fail(f"the engine's process {how}")
    self.ended = True
    self.changed.set()

  def _change(self, state:str, doing:str) -> None:
    self.state, self.doing = state, doing
    self.changed.set()

  async def _until(self, holds:Callable[[], bool], seconds:float|None=None) -> bool:
    """Waits until holds() does. False where that takes longer."""
    try:
      async with asyncio.timeout(seconds):
        while not holds():
          self.changed.clear()
          await self.changed.wait()
    except TimeoutError: return False
    return True
