"""The server as a process: its socket, the engine beside it, uvicorn around the app, and how all of it ends.

A first SIGTERM or SIGINT drains: what runs may end, and what comes is refused. A second one ends all at once."""
from __future__ import annotations
import asyncio, contextlib, errno, gc, logging, os, resource, signal, socket, ssl, sys
from typing import Iterator
import uvicorn, uvloop
from tinygrad.apps.serve import wire
from tinygrad.apps.serve.connection import Connection
from tinygrad.apps.serve.link import FAILED, Link, Unavailable
from tinygrad.apps.serve.settings import Settings

BACKLOG = 2048         # connections that wait to be accepted
FILES = 1 << 16, 10240   # open at once, the most that the system allows of these
IDLE_SECONDS = 75      # that a connection is kept between two requests
CLOSE_SECONDS = 5      # that the last bytes of answers have to be read in

class ServeError(Exception):
  """The server cannot begin, or its model not be loaded. str(e) is one line."""

# ---- before anything is loaded ----

def listening_socket(settings:Settings) -> socket.socket:
  """Raises ServeError where the address is not to be had"""
  where = f"--serve {settings.host}:{settings.port}"
  try:
    family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address, family=family, backlog=BACKLOG)
  except OSError as e:
    why = "another program listens there" if e.errno == errno.EADDRINUSE else e.strerror if isinstance(e, socket.gaierror) else os.strerror(e.errno)
    raise ServeError(f"{where}: {why}") from None

def check_certificate(settings:Settings) -> None:
  """Raises ServeError for files that are no certificate and its key"""
  if settings.ssl_certfile is None: return
  try: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
  except (OSError, ValueError) as e: raise ServeError(f"--ssl-certfile {settings.ssl_certfile}, --ssl-keyfile {settings.ssl_keyfile}: {e}") from None

def allow_many_files() -> None:
  """As many as the system lets a process have: each connection is one"""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  for wanted in FILES:
    if hard != resource.RLIM_INFINITY: wanted = min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted: return
    try: return resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except ValueError: continue   # a Mac has a lower limit than the one that it tells

def announce(line:str) -> None:
  with contextlib.suppress(OSError): print(line, flush=True)   # whoever read may have left

# ---- the process ----

class Server(uvicorn.Server):
  """uvicorn, without its signals and its words"""
  def __init__(self, settings:Settings, app:object):
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)   # a client's broken request is no news
    super().__init__(uvicorn.Config(
      app, http=Connection, ws="none", lifespan="on", log_config=None, access_log=False, server_header=False,  # type: ignore[arg-type]
      proxy_headers=False, backlog=BACKLOG, timeout_keep_alive=IDLE_SECONDS, timeout_graceful_shutdown=CLOSE_SECONDS,
      ssl_keyfile=settings.ssl_keyfile, ssl_certfile=settings.ssl_certfile))
    self.settings = settings
  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]: yield
  async def startup(self, sockets:list[socket.socket]|None=None) -> None:
    await super().startup(sockets)
    assert sockets
    host, port, *_ = sockets[0].getsockname()
    announce(f"listening on {self.settings.scheme}://{f'[{host}]' if ':' in host else host}:{port}")

class Process:
  """The life of the process, on its event loop. Signals, the engine's state and uvicorn's meet here."""
  def __init__(self, settings:Settings, load:wire.Load):
    from tinygrad.apps.serve.app import create_app
    self.settings, self.link = settings, Link(load)
    app = create_app(self.link, settings)
    self.service, self.server = app.state.service, Server(settings, app)
    self.ending: asyncio.Task[None]|None = None    # after a signal
    self.failed = ""                               # why the model could not be loaded

  async def run(self, sock:socket.socket) -> int:
    """Until a signal, or until the model turns out not to load -> the exit code. Raises ServeError."""
    for which in (signal.SIGINT, signal.SIGTERM): asyncio.get_running_loop().add_signal_handler(which, self.on_signal, which)
    told = asyncio.create_task(self.tell())
    await self.server.serve([sock])
    await told
    if self.failed: raise ServeError(self.failed)
    return int(self.link.state == FAILED)

  async def tell(self) -> None:
    """Says what becomes of the engine. A model that cannot be loaded ends all; a failure later leaves a server that says so."""
    try: await self.service.wait_ready()
    except Unavailable as e:
      if self.link.state == FAILED: self.failed, self.server.should_exit = str(e), True
      return
    gc.freeze()   # a vocabulary is not looked at again while answers run
    ready = self.link.ready
    assert ready is not None
    announce(f"ready: {ready.device}, {ready.max_rows} answers at once, contexts of {ready.capacity} tokens, a cache of {ready.rows}")
    await self.link.wait_end()
    if self.link.state == FAILED: print(f"error: {self.link.why}", file=sys.stderr, flush=True)

  def on_signal(self, which:int) -> None:
    if self.ending is not None:
      self.link.kill()
      os._exit(128 + which)
    self.ending = asyncio.create_task(self.drain())

  async def drain(self) -> None:
    seconds, left = self.settings.drain_seconds, len(self.link.handles)
    if left: announce(f"ending: {left} answer{'s' * (left > 1)} may go on for {seconds:g} s; a second signal ends all at once")
    await self.link.drain(seconds)
    self.server.should_exit = True

def serve(settings:Settings, load:wire.Load) -> int:
  """The server, until it ends -> the exit code. Raises ServeError."""
  check_certificate(settings)
  sock = listening_socket(settings)
  allow_many_files()
  if not settings.local and not settings.api_keys:
    where = f"{settings.host}:{settings.port}"
    print(f"warning: other machines can reach {where}, and it asks for no key (--api-key)", file=sys.stderr, flush=True)
  return uvloop.run(Process(settings, load).run(sock))
