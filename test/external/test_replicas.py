"""Replicas behind a router: two servers of the built-in model on the CPU behind smg, and two of Ray Serve (extra/ray_serve.py). They take two
minutes, and packages that nothing else needs (the extra `replicas`), so they are run by hand:
  .venv/bin/python -m pip install '.[replicas]'
  .venv/bin/python -m pytest -n 0 test/external/test_replicas.py"""
from __future__ import annotations
import contextlib, importlib.util, json, os, re, shutil, signal, socket, subprocess, sys, threading, time, warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator
from urllib.error import HTTPError
from urllib.request import Request, urlopen
import pytest

ROOT = Path(__file__).resolve().parents[2]
SMG = shutil.which("smg", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
PAGE = 64     # tokens: beginnings are shared by whole pages
LONG = 1500   # tokens of an answer that takes a while
# conversations: two texts that they are about, and for each of these their questions, a turn each
TEXTS = ["A list is a mutable sequence of objects. It grows with append. " * 8, "The for statement iterates over the items of a sequence. " * 12]
QUESTIONS = [["What is a list?", "What is a dict?", "What is a tuple?"], ["Who are you?", "What is a set?", "How do I open a file?"],
             ["What is a generator?", "how to sort a list", "What is a module?"]]
CONVERSATIONS = [(text, questions) for text in TEXTS for questions in QUESTIONS]

def needs(package: str, there: bool) -> pytest.MarkDecorator:
  what = f"{package} is not installed; type: {sys.executable} -m pip install '.[replicas]'"
  if not there: warnings.warn(f"replicas are not tested: {what}")
  return pytest.mark.skipif(not there, reason=what)

# ---- a client ----

@dataclass
class Answer:
  """replica: which one smg says it was"""
  text: str
  usage: dict[str, Any]
  replica: str|None

@contextlib.contextmanager
def asked(url: str, messages: list[dict[str, str]], **kw: Any) -> Iterator[Any]:
  """The response to a greedy request. Raises HTTPError."""
  body = json.dumps({"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24, **kw}).encode()
  with urlopen(Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"}), timeout=120) as response: yield response

def events(response: Any) -> Iterator[dict[str, Any]]:
  """Of a stream, which has to end as it should"""
  for line in response:
    if line.startswith(b"data: [DONE]"): return
    if line.startswith(b"data: "):
      event = json.loads(line[6:])
      assert "error" not in event, event
      yield event
  raise AssertionError("the stream was cut off")

def ask(url: str, messages: list[dict[str, str]], stream: bool) -> Answer:
  more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
  with asked(url, messages, **more) as response:
    replica = response.headers["x-smg-routed-worker-id"]
    if not stream:
      whole = json.load(response)
      return Answer(whole["choices"][0]["message"]["content"], whole["usage"], replica)
    came = list(events(response))
  return Answer("".join(c["delta"].get("content") or "" for e in came for c in e["choices"]), came[-1]["usage"], replica)

def converse(url: str, text: str, questions: list[str]) -> list[Answer]:
  """A turn after the other; every second one is a stream"""
  messages, answers = [{"role": "system", "content": text}], list[Answer]()
  for n, question in enumerate(questions):
    messages.append({"role": "user", "content": question})
    answers.append(ask(url, messages, stream=n % 2 == 1))
    messages.append({"role": "assistant", "content": answers[-1].text})
  return answers

def converse_all(url: str) -> list[list[Answer]]:
  """Those about one text begin after each other, so that their beginning is known; those about different texts run at once"""
  def about(text: str) -> list[list[Answer]]: return [converse(url, text, questions) for questions in QUESTIONS]
  with ThreadPoolExecutor(len(TEXTS)) as pool: return [answers for some in pool.map(about, TEXTS) for answers in some]

def texts(conversations: list[list[Answer]]) -> list[list[str]]: return [[a.text for a in answers] for answers in conversations]

class LongStreams:
  """So many streams of LONG tokens, in threads. wait_begun: until all have; ended: which have; end: their tokens"""
  def __init__(self, url: str, count: int):
    self.begun, self.pool = threading.Semaphore(0), ThreadPoolExecutor(count)
    self.count, self.running = count, [self.pool.submit(self.tokens, url, n) for n in range(count)]
  def tokens(self, url: str, number: int) -> int:
    question = [{"role": "user", "content": f"{TEXTS[number % len(TEXTS)]} {number}"}]
    with asked(url, question, max_tokens=LONG, ignore_eos=True, stream=True, stream_options={"include_usage": True}) as response:
      for count, event in enumerate(events(response)):
        if count == 8: self.begun.release()
    return event["usage"]["completion_tokens"]
  def wait_begun(self) -> None:
    for _ in self.running: assert self.begun.acquire(timeout=60)
  @property
  def ended(self) -> list[bool]: return [running.done() for running in self.running]
  def end(self) -> list[int]:
    with self.pool: return [running.result() for running in self.running]

# ---- processes ----

def until(holds: Callable[[], Any], seconds: float = 60) -> Any:
  end = time.monotonic() + seconds
  while not (found := holds()):
    assert time.monotonic() < end, "it took too long"
    time.sleep(.1)
  return found

def status(url: str) -> int:
  try:
    with urlopen(url, timeout=10) as response: return response.status
  except HTTPError as e: return e.code
  except OSError: return 0

def free_port() -> int:
  with socket.create_server(("127.0.0.1", 0)) as s: return s.getsockname()[1]

@contextlib.contextmanager
def process(*command: str|Path, **kw: Any) -> Iterator[subprocess.Popen[str]]:
  p = subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **kw)
  try: yield p
  finally:
    p.terminate()
    try: p.wait(60)
    except subprocess.TimeoutExpired:
      p.kill()
      raise

@contextlib.contextmanager
def server(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
  """The process and its URL"""
  command = sys.executable, "tinygrad/apps/llm.py", "--serve", f"127.0.0.1:{port}", "--alias", "tiny", "-t", "1"
  with process(*command, env=os.environ | {"DEV": "CPU"}) as p:
    assert p.stdout is not None
    yield p, p.stdout.readline().removeprefix("listening on ").strip()

def counted(url: str) -> tuple[float, float]:
  """By /metrics: answers that have ended, and the seconds that all of them took, which no two replicas share"""
  with urlopen(f"{url}/metrics", timeout=10) as response: page = response.read().decode()
  def total(name: str) -> float: return sum(float(n) for n in re.findall(rf"^vllm:{name}{{.*}} (\S+)$", page, re.M))
  return total("request_success_total"), total("e2e_request_latency_seconds_sum")

@pytest.fixture(scope="module")
def alone() -> list[list[str]]:
  """What one server says that nobody else asks"""
  with server() as (_, url):
    until(lambda: status(f"{url}/health") == 200)
    return [[a.text for a in converse(url, *conversation)] for conversation in CONVERSATIONS]

# ---- smg ----

@contextlib.contextmanager
def router(*urls: str) -> Iterator[str]:
  """smg before these servers, its URL, once it has all of them"""
  port, url = free_port(), ""
  with process(SMG, "launch", "--host", "127.0.0.1", "--port", port, "--worker-urls", *urls, "--policy", "cache_aware",
               "--prometheus-host", "127.0.0.1", "--prometheus-port", free_port(), "--worker-startup-check-interval", 1,
               "--health-check-interval-secs", 1, "--shutdown-grace-period-secs", 1):
    url = f"http://127.0.0.1:{port}"
    until(lambda: status(f"{url}/health") == 200 and healthy(url) == set(urls))
    yield url

def healthy(url: str) -> set[str]:
  """The replicas that smg gives requests"""
  with urlopen(f"{url}/workers", timeout=10) as response: return {w["url"] for w in json.load(response)["workers"] if w["is_healthy"]}

@needs("smg", SMG is not None)
def test_smg(alone: list[list[str]]):
  with server() as (first, a), server() as (second, b), router(a, b) as url:
    processes = {a: first, b: second}
    # the answers of one server alone; a conversation stays where its beginning is
    said = converse_all(url)
    assert texts(said) == alone
    for answers in said:
      assert len({answer.replica for answer in answers}) == 1
      for before, after in zip(answers, answers[1:]):
        assert after.usage["prompt_tokens_details"]["cached_tokens"] >= before.usage["prompt_tokens"] // PAGE * PAGE > PAGE
    counts = [counted(u)[0] for u in processes]
    assert all(counts) and sum(counts) == sum(map(len, alone))
    # one drains: its answers end, it gets no more, and no client sees an error
    streams = LongStreams(url, 4)
    streams.wait_begun()
    gone, left = said[0][0].replica, said[-1][0].replica
    assert gone != left
    processes[gone].send_signal(signal.SIGTERM)
    until(lambda: status(f"{gone}/health") == 503)
    assert not any(streams.ended)
    assert texts(converse_all(url)) == alone
    assert streams.end() == [LONG] * 4
    assert processes[gone].wait(60) == 0
    until(lambda: healthy(url) == {left})
    assert {answer.replica for answers in converse_all(url) for answer in answers} == {left}
    # it comes back where it was
    with server(int(gone.rpartition(":")[2])):
      until(lambda: healthy(url) == {a, b})
      assert texts(converse_all(url)) == alone
      assert counted(gone)[0] > 0

@needs("smg", SMG is not None)
def test_smg_when_one_fails(alone: list[list[str]]):
  """The engine of one replica dies: its answers end with the error, the other's go on, and all that comes goes there"""
  with server() as (first, a), server() as (second, b), router(a, b) as url:
    processes, ended = {a: first, b: second}, dict[str, list[str]]()
    streams = [asked(url, [{"role": "user", "content": f"{text} {n}"}], max_tokens=LONG, ignore_eos=True, stream=True)
               for n, text in enumerate(TEXTS * 2)]
    with contextlib.ExitStack() as stack:
      responses = [stack.enter_context(stream) for stream in streams]
      for response in responses:
        while not response.readline().startswith(b"data: "): pass
      replicas = [response.headers["x-smg-routed-worker-id"] for response in responses]
      broken = replicas[0]
      children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(processes[broken].pid)], capture_output=True, text=True).stdout.split()
      assert len(children) == 1 and {*replicas} == {a, b}
      os.kill(int(children[0]), signal.SIGKILL)
      for replica, response in zip(replicas, responses): ended.setdefault(replica, []).append(response.read().decode())
    for replica, rests in ended.items():
      for rest in rests:
        assert ("the engine's process was killed by SIGKILL" in rest) == (replica == broken) == ('"finish_reason":"length"' not in rest)
    left, = {a, b} - {broken}
    until(lambda: healthy(url) == {left})
    assert texts(converse_all(url)) == alone
    processes[broken].send_signal(signal.SIGTERM)
    assert processes[broken].wait(10) == 1

# ---- Ray Serve ----

@contextlib.contextmanager
def ray_serve(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
  """The process and its URL, once a replica is there"""
  port = free_port()
  with process(sys.executable, "extra/ray_serve.py", "--serve", f"127.0.0.1:{port}", "--gpus", "0", "--alias", "tiny", "-t", "1", *flags) as p:
    assert p.stdout is not None
    while not (line := p.stdout.readline()).startswith("ready: "): assert line, "it has ended"
    threading.Thread(target=p.stdout.read, daemon=True).start()   # Ray goes on talking
    yield p, line.removeprefix("ready: ").strip()

@pytest.fixture
def running_replicas() -> Iterator[Callable[[], int]]:
  """How many Ray has that get requests, once it runs"""
  import ray
  from ray import serve
  def count() -> int:
    if not ray.is_initialized(): ray.init("auto", log_to_driver=False)
    return serve.status().applications["llm"].deployments["Replica"].replica_states.get("RUNNING", 0)
  yield count
  ray.shutdown()

@pytest.mark.filterwarnings("ignore::DeprecationWarning")   # Ray's own
@needs("ray", importlib.util.find_spec("ray") is not None)
def test_ray(alone: list[list[str]], running_replicas: Callable[[], int]):
  flags = "--max-replicas", "2", "--target", "2", "--upscale-delay", "1", "--downscale-delay", "20"
  with ray_serve(*flags) as (p, url):
    assert status(f"{url}/health") == 200 and running_replicas() == 1
    # while requests queue, there are two
    while running_replicas() < 2: LongStreams(url, 8).end()
    before = until(lambda: of_two(url))
    assert texts(converse_all(url)) == alone
    after = until(lambda: of_two(url))
    assert not before & after
    assert sum(ended for ended, _ in after) - sum(ended for ended, _ in before) == sum(map(len, alone))
    # with nothing to do, there is one again
    until(lambda: running_replicas() == 1, 180)
    assert texts(converse_all(url)) == alone
    # it drains: its answers end
    streams = LongStreams(url, 2)
    streams.wait_begun()
    p.send_signal(signal.SIGTERM)
    assert streams.end() == [LONG] * 2
    assert p.wait(60) == 0

def of_two(url: str) -> set[tuple[float, float]]:
  """`counted` of both replicas, of which Ray chooses one that is asked. Nothing where not both were."""
  with ThreadPoolExecutor(8) as pool: found = set(pool.map(counted, [url] * 100))
  return found if len(found) == 2 else set()
