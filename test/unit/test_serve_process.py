"""The server as whoever starts it meets it: its lines, its port, its signals, its limits of connections. What it answers is other tests' matter."""
from __future__ import annotations
import argparse, asyncio, contextlib, json, resource, signal, socket, subprocess, sys, threading, time
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, Iterator
from urllib.request import urlopen
import pytest, uvicorn
from on_terminal import CTRL_C, Terminal, environ
from tinygrad.apps import llm
from tinygrad.apps.models import BUILT_IN, ROOT, UserError
from tinygrad.apps.serve import connection
from tinygrad.apps.serve.connection import MAX_HEAD
from tinygrad.apps.serve.settings import Settings

# llm.py with an app that has a stream of tokens, and says how the engine stands
COMMAND = [sys.executable, "-c", """
import contextlib, json, sys, types
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
def create_app(link, settings):
  @contextlib.asynccontextmanager
  async def lifespan(_):
    await link.start()
    yield
    await link.close()
  async def health(request): return JSONResponse(link.state, 200 if link.state == "ready" else 503)
  async def answer(request):
    handle = link.add([1, 2, 3], {}, [], int(request.query_params["n"]))
    async def lines():
      while True:
        news = await handle.news()
        yield json.dumps([news.ids, news.end]) + "\\n"
        if news.end: return
    return StreamingResponse(lines())
  app = Starlette(routes=[Route("/health", health), Route("/answer", answer)], lifespan=lifespan)
  app.state.service = link   # which is all that is to be ready
  return app
import tinygrad
sys.modules["tinygrad.apps.serve.app"] = types.SimpleNamespace(create_app=create_app)
from tinygrad.apps import llm
llm.run()
""", "--max-context", "2048", "--threads", "1"]   # threads wait for each other long where other tests run
SECONDS = 60

FILES = 1024   # that a process may have open at first, as systems have it

class Served:
  """A server of its own port, as a process"""
  def __init__(self, *flags: str):
    self.process = subprocess.Popen([*COMMAND, "--serve", "127.0.0.1:0", *flags], cwd=ROOT, env=environ({}), text=True, bufsize=1,
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=self.few_files)
    self.port = int(self.line("listening on http://127.0.0.1:").rpartition(":")[2])
  @staticmethod
  def few_files() -> None: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
  def line(self, begin: str) -> str:
    assert self.process.stdout is not None
    line = self.process.stdout.readline()
    assert line.startswith(begin), (line, self.process.poll())
    return line
  def connect(self) -> socket.socket: return socket.create_connection(("127.0.0.1", self.port), SECONDS)
  def ask(self, path: str) -> Any: return urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=SECONDS)
  def ended(self) -> tuple[int, str, str]:
    """(exit code, the rest of stdout, stderr)"""
    out, err = self.process.communicate(timeout=SECONDS)
    return self.process.returncode, out, err
  def close(self) -> None:
    self.process.kill()
    self.process.communicate()

def at_once(*flags: str) -> Iterator[Served]:
  served = Served(*flags)
  try:
    served.line("ready: CPU")
    yield served
  finally: served.close()

@pytest.fixture(scope="module")
def served() -> Iterator[Served]: yield from at_once()
@pytest.fixture
def another() -> Iterator[Served]: yield from at_once()

def exchange(sock: socket.socket, request: bytes) -> tuple[int, Any]:
  """(status, JSON) of the response"""
  sock.sendall(request)
  response = HTTPResponse(sock)
  response.begin()
  return response.status, json.load(response)

# ---- signals ----

def test_a_signal_drains(another: Served):
  """The port is open at once; what runs ends; what comes is told; a connection that has nothing to say holds nobody up"""
  idle, answer = another.connect(), another.ask("/answer?n=1000")
  ids, end = json.loads(answer.readline())
  another.process.send_signal(signal.SIGTERM)
  another.line("ending: 1 answer may go on for 30 s")
  with pytest.raises(OSError, match="503"): another.ask("/health")
  lines = [json.loads(line) for line in answer]
  assert len(ids) + sum(len(more) for more, _ in lines) == 1000 and lines[-1][1] == "length" and end is None
  assert another.ended() == (0, "", "")
  idle.close()

def test_a_second_signal_ends_all(another: Served):
  answer = another.ask("/answer?n=1000")
  answer.readline()
  another.process.send_signal(signal.SIGINT)
  another.line("ending: 1 answer")
  another.process.send_signal(signal.SIGINT)
  start = time.monotonic()
  assert another.ended()[0] == 128 + signal.SIGINT and time.monotonic() - start < 5

def test_ctrl_c_on_a_terminal():
  """It reaches all processes of the terminal, and the engine's minds the server alone"""
  terminal = Terminal([*COMMAND, "--serve", "127.0.0.1:0"], cwd=ROOT)
  try:
    port = int(terminal.until("listening on http://127.0.0.1:") and terminal.until("\r\n"))
    terminal.until("ready: ")
    answer = urlopen(f"http://127.0.0.1:{port}/answer?n=1000", timeout=SECONDS)
    answer.readline()
    terminal.type(CTRL_C)
    assert json.loads(answer.readlines()[-1])[1] == "length"
    assert "Traceback" not in terminal.rest() and terminal.process.returncode == 0
  finally: terminal.close()

def test_a_signal_while_loading():
  served = Served()
  served.process.send_signal(signal.SIGTERM)
  code, _, error = served.ended()
  assert (code, error) == (0, "")

# ---- beginnings that fail ----

def refused(*flags: str, **env: str) -> str:
  p = subprocess.run([*COMMAND, *flags], cwd=ROOT, env=environ(env), capture_output=True, text=True, timeout=SECONDS)
  assert p.returncode == 2 and p.stderr.count("\n") == 1, p
  return p.stderr.strip()

def test_a_port_that_is_taken(served: Served):
  assert refused("--serve", f"127.0.0.1:{served.port}") == f"error: --serve 127.0.0.1:{served.port}: another program listens there"
def test_a_file_that_is_no_model(tmp_path: Path):
  (tmp_path / "no.gguf").write_bytes(b"GGUF")
  assert "no.gguf" in refused("--serve", "127.0.0.1:0", "--model", str(tmp_path / "no.gguf"))
def test_a_model_that_does_not_load():
  """The engine's process finds out, and says it"""
  assert refused("--serve", "127.0.0.1:0", DEV="NULL").startswith("error: the device NULL runs no kernels")

# ---- connections ----

def test_a_head_that_is_too_long(served: Served):
  for size in (MAX_HEAD + 1, 1 << 20):
    with served.connect() as sock:
      status, error = exchange(sock, b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * size + b"\r\n\r\n")
    assert status == 431 and error["error"]["message"] == f"the request's header has more than {MAX_HEAD} bytes"
  with served.connect() as sock:   # one that does not end
    assert exchange(sock, b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (MAX_HEAD + 1))[0] == 431
  with served.connect() as sock:
    for _ in range(3):   # on one connection
      assert exchange(sock, b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (MAX_HEAD - 1000) + b"\r\n\r\n") == (200, "ready")

def test_what_is_no_http(served: Served):
  with served.connect() as sock: status, error = exchange(sock, b"\x16\x03\x01 hello\r\n\r\n")
  assert status == 400 and error["error"]["type"] == "invalid_request_error"

@contextlib.contextmanager
def serving(app: Any) -> Iterator[tuple[str, int]]:
  server = uvicorn.Server(uvicorn.Config(app, http=connection.Connection, lifespan="off", log_config=None))
  with socket.create_server(("127.0.0.1", 0)) as listening:
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try: yield listening.getsockname()
    finally:
      server.should_exit = True
      thread.join(SECONDS)

async def say_1(send: Any) -> None:
  await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
  await send({"type": "http.response.body", "body": b"1"})

def test_a_head_that_does_not_come(monkeypatch: pytest.MonkeyPatch):
  """Whoever does not say in time what is asked for is left; an answer may take longer"""
  monkeypatch.setattr(connection, "HEAD_SECONDS", .3)
  async def app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(.8)
    await say_1(send)
  with serving(app) as address:
    silent, half, asks = (socket.create_connection(address, SECONDS) for _ in range(3))
    half.sendall(b"GET / HTTP/1.1\r\nHost:")
    with silent, half, asks:
      for _ in range(2): assert exchange(asks, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == (200, 1)
      assert silent.recv(1) == half.recv(1) == b""

def test_a_head_behind_a_long_body():
  """… that begins in the same piece, and ends in another"""
  async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/busy": time.sleep(.5)   # what comes meanwhile is read as one piece
    while (await receive()).get("more_body"): pass
    await say_1(send)
  with serving(app) as address, socket.create_connection(address, SECONDS) as c:
    body = MAX_HEAD + 10_000
    c.sendall(b"GET /busy HTTP/1.1\r\nHost: x\r\n\r\n")
    time.sleep(.2)
    c.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % body + b" " * body + b"GET / HTTP/1.1\r\n")
    time.sleep(.6)
    c.sendall(b"Host: x\r\n\r\n")
    said = b""
    while said.count(b"HTTP/1.1 ") < 3 and (more := c.recv(1 << 16)): said += more
  assert said.count(b"HTTP/1.1 200") == 3

def test_idle_connections(served: Served):
  """More than the files that a process may have at first, and the others are answered meanwhile"""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if hard != resource.RLIM_INFINITY and hard < 4 * FILES: pytest.skip(f"this system allows {hard} open files")
  resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * FILES), hard))
  idle = []
  try:
    idle = [served.connect() for _ in range(2 * FILES)]
    with served.ask("/health") as answer: assert json.load(answer) == "ready"
    assert exchange(idle[-1], b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") == (200, "ready")
  finally:
    for sock in idle: sock.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

# ---- flags ----

def settings(*flags: str) -> Settings: return llm.settings_of(llm.parser().parse_args(flags))[0]

def test_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  (tmp_path / "keys").write_text("one\n\n two \n")
  monkeypatch.setenv("LLM_API_KEY", "three")
  assert settings("--serve").api_keys == {"three"}
  found = settings("--serve", "0.0.0.0:80", "--api-key", "four", "--api_key_file", str(tmp_path / "keys"), "--alias", "m", "--max-body", "2",
                   "--top_p", ".5", "--cors-origin", "http://a:1", "--drain-seconds", "0", "--max-queued", "3", "--max-tokens", "5",
                   "--max-tokens-cap", "5")
  assert found == Settings(BUILT_IN, alias="m", host="0.0.0.0", port=80, api_keys=frozenset(["one", "two", "three", "four"]),
                           cors_origins=("http://a:1",), max_body=2 << 20, max_queued=3, default_max_tokens=5, max_tokens_cap=5,
                           sampling={"top_p": .5}, drain_seconds=0)
  monkeypatch.delenv("LLM_API_KEY")
  assert settings("--serve") == Settings(BUILT_IN) and settings("--serve").local and not found.local

def test_what_the_engine_is_told():
  flags = ["--serve", "-c", "0", "--cache-tokens", "99", "--max-stall-ms", "20", "--warm", "-t", "3", "--temp", "2", "--devices", "2", "-ncmoe", "1",
           "--batch-invariant"]
  order = llm.settings_of(llm.parser().parse_args(flags))[1]
  assert (order.path, order.max_context, order.cache_tokens, order.max_stall) == (str(BUILT_IN), sys.maxsize, 99, .02)
  assert order.warm and order.threads == 3 and order.sampling == {"temperature": 2.0} and (order.devices, order.cpu_experts) == (2, 1)
  assert order.batch_invariant and not llm.settings_of(llm.parser().parse_args(["--serve"]))[1].batch_invariant

@pytest.mark.parametrize("text,found", [
  ("8", ("127.0.0.1", 8)), (":8", ("127.0.0.1", 8)), ("host", ("host", 8080)), ("1.2.3.4:5", ("1.2.3.4", 5)), ("[::1]", ("::1", 8080)),
  ("[::1]:8", ("::1", 8)), ("a:b", None), ("::1", None), ("a:65536", None), ("[:8", None)])
def test_addresses(text: str, found: tuple[str, int] | None):
  if found is not None: assert llm.address(text) == found
  else:
    with pytest.raises(argparse.ArgumentTypeError, match="expected HOST:PORT"): llm.address(text)

@pytest.mark.parametrize("flags,why", [
  (["--serve", "--prompt", "hi"], "--prompt: expected no --serve beside it"), (["--serve", "--seed", "0"], "--seed: expected no --serve"),
  (["--serve", "--benchmark"], "--benchmark: expected no --serve"), (["--serve", "--ssl-keyfile", "x"], "found one of them"),
  (["--serve", "--api-key", "a b"], "--api_key: expected a key"), (["--serve", "--api-key-file", "no-such"], "--api_key_file no-such: No such file"),
  (["--serve", "--cors-origin", "example.org"], "--cors_origin example.org: expected"), (["--serve", "--temp", "-1"], "temperature: expected"),
  (["--serve", "--max-tokens", "6", "--max-tokens-cap", "5"], "--max_tokens 6 is more than --max_tokens_cap 5"),
  (["--serve", "--model", "nothing"], "--model nothing: neither a file nor a name")])
def test_flags_that_do_not_fit(flags: list[str], why: str):
  with pytest.raises((UserError, ValueError)) as e: settings(*flags)
  assert why in str(e.value) and "\n" not in str(e.value)

def test_flags_that_need_serve():
  with pytest.raises(UserError, match="--drain_seconds: expected --serve beside it"): llm.main(["--drain-seconds", "3", "--prompt", "x"])
