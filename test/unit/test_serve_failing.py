"""A server whose device fails while it answers (test/failing_worker.py): every answer ends with one error that names the device, the server says from
there on why it takes no more, and ends when it is told to."""
from __future__ import annotations
import json, os, re, signal, subprocess, sys, time
from pathlib import Path
from typing import Any, Callable, Iterator
from urllib.error import HTTPError
from urllib.request import Request, urlopen
import pytest
from on_terminal import environ
from tinygrad.apps.models import ROOT

COMMAND = [sys.executable, "-c", "import tinygrad\nfrom tinygrad.apps.serve import link\nlink.WORKER = 'failing_worker'\n"
           "from tinygrad.apps import llm\nllm.run()", "--serve", "127.0.0.1:0", "--max-context", "2048", "--threads", "1"]
SECONDS = 60   # that anything may take
AT_ONCE = 10   # … that what is to be at once may; answers may take 30 to end
BROKEN = "CUDA Error 700, an illegal memory access was encountered"
FULL = "out of memory: Allocation of 1.00 GB failed on CPU. Used: 2.00 GB"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is a list?"}], "temperature": 0, "ignore_eos": True, "stream": True}

class Stream:
  """An answer as it comes. events: what has come; text: of it"""
  def __init__(self, url: str, **more: Any):
    self.response = urlopen(Request(url + "/v1/chat/completions", json.dumps(ASK | more).encode(), {"Content-Type": "application/json"}),
                            timeout=SECONDS)
    self.events: list[dict[str, Any]] = []
  def next(self) -> bool:
    """False at the end"""
    while line := self.response.readline():
      if line.startswith(b"data: {"):
        self.events.append(json.loads(line[6:]))
        return True
    return False
  def end(self) -> Stream:
    while self.next(): pass
    return self
  @property
  def text(self) -> str: return "".join(c["delta"].get("content") or "" for e in self.events for c in e.get("choices", ()))
  @property
  def errors(self) -> list[str]: return [e["error"]["message"] for e in self.events if "error" in e]

class Served:
  def __init__(self, tmp_path: Path, *flags: str):
    self.fault, env = tmp_path / "fault", {"PYTHONPATH": str(ROOT / "test")}
    self.process = subprocess.Popen([*COMMAND, *flags], cwd=ROOT, env=environ({**env, "FAULT": str(self.fault), "DEV": "CPU"}), text=True,
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert self.process.stdout is not None
    self.url = self.process.stdout.readline().removeprefix("listening on ").strip()
    assert self.process.stdout.readline().startswith("ready: CPU")
  def fails(self, how: str) -> None:
    """From here on"""
    self.fault.with_suffix(".new").write_text(how)
    os.replace(self.fault.with_suffix(".new"), self.fault)
  def streams(self, count: int) -> list[Stream]:
    """That have begun"""
    streams = [Stream(self.url, max_tokens=1900, seed=n) for n in range(count)]
    for s in streams:
      while len(s.events) < 4: assert s.next()
    return streams
  @property
  def health(self) -> tuple[int, Any]:
    try:
      with urlopen(self.url + "/health", timeout=AT_ONCE) as response: return response.status, json.load(response)
    except HTTPError as e: return e.code, json.load(e)
  def engines(self) -> list[int]:
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True).stdout
    return [*map(int, out.split())]
  def ends(self) -> tuple[int, str]:
    """(exit code, stderr without the log and what took long) after a SIGTERM, at once"""
    self.process.send_signal(signal.SIGTERM)
    _, err = self.process.communicate(timeout=AT_ONCE)
    return self.process.returncode, "".join(line for line in err.splitlines(True) if not line.startswith(("{", "answers waited")))

@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
  all_of_them: list[Served] = []
  def start(*flags: str) -> Served:
    all_of_them.append(Served(tmp_path, *flags))
    return all_of_them[-1]
  yield start
  for served in all_of_them:
    served.process.kill()
    served.process.wait()
    for pipe in (served.process.stdout, served.process.stderr): pipe.close()   # unread: what compiles may have them longer

def refused(served: Served, why: str) -> None:
  """Nothing is taken any more, which stays so, and the server ends at once where it is told to"""
  for _ in range(2):
    status, body = served.health
    assert status == 503 and body["status"] == "failed" and body["error"]["message"] == why
    start = time.monotonic()
    with pytest.raises(HTTPError) as e: Stream(served.url)
    assert e.value.code == 503 and json.load(e.value)["error"]["message"] == why and time.monotonic() - start < AT_ONCE
  with urlopen(served.url + "/metrics", timeout=AT_ONCE) as page: assert b'num_requests_running{engine="0",model_name="Tiny GLM"} 0.0' in page.read()
  code, err = served.ends()
  assert code == 1 and err.count(f"error: {why}\n") == 1 and "Traceback" not in err

@pytest.mark.parametrize("device,flags", [("CPU", ()), ("CPU:1", ("--devices", "2")), ("CPU:1", ("--devices", "2", "--shard", "tensors"))],
                         ids=["one", "layers", "tensors"])
def test_a_device_that_breaks(serve: Callable[..., Served], device: str, flags: tuple[str, ...]):
  served = serve(*flags)
  streams = served.streams(3)
  served.fails(f"broken {device}")
  why = f"the device failed: {device}: {BROKEN}"
  for stream in streams: assert stream.end().errors == [why] and stream.text
  refused(served, why)

def test_an_engine_that_is_killed(serve: Callable[..., Served]):
  served = serve()
  streams = served.streams(3)
  engine, = served.engines()
  os.kill(engine, signal.SIGKILL)
  why = "the engine's process was killed by SIGKILL"
  for stream in streams: assert stream.end().errors == [why]
  refused(served, why)

def test_no_room_for_more_at_once(serve: Callable[..., Served]):
  """Answers that find no room to run beside those that do wait for them, and all are whole"""
  served = serve()
  first, = served.streams(1)
  served.fails("full 2")
  others = [Stream(served.url, max_tokens=n) for n in (20, 30)]
  alone = Stream(served.url, max_tokens=1900, seed=0)
  for stream, tokens in ((first, 1900), *zip(others, (20, 30)), (alone, 1900)):
    assert not stream.end().errors and stream.events[-1]["timings"]["predicted_n"] == tokens
  assert alone.text == first.text and first.text.startswith(others[1].text) and others[1].text.startswith(others[0].text)
  assert served.health[0] == 200
  code, err = served.ends()
  said = r"(steps of \d answers find no memory \(Allocation of [^)]*\): at most \d runs? at once from here on\n){1,2}"
  assert code == 0 and re.fullmatch(said, err) and err.endswith(": at most 1 runs at once from here on\n"), err

def test_no_room_for_one(serve: Callable[..., Served]):
  """What an answer asks for and finds no room for ends that one"""
  served = serve()
  running = [*served.streams(1), *served.streams(1)]
  served.fails("full 1")
  failed = Stream(served.url, max_tokens=30, logprobs=True).end()
  assert failed.errors == [f"{FULL}; a smaller --max_context needs less"]
  for stream in running: assert not stream.end().errors and stream.events[-1]["timings"]["predicted_n"] == 1900
  assert served.health[0] == 200 and not Stream(served.url, max_tokens=30).end().errors
  assert served.ends()[0] == 0

# ---- at a terminal ----

AT_FIVE = """
import tinygrad, failing_worker
from tinygrad.apps.engine.runner import Runner
read, left = Runner.read, iter(range(5))
def counted(self):
  if next(left, None) is None: failing_worker.FAULT.write_text("broken CPU")
  return read(self)
Runner.read = counted
from tinygrad.apps import llm
llm.run()
"""

@pytest.mark.parametrize("flags,typed", [(["--prompt", "What is a list?"], ""), ([], "What is a list?\nWhat is a set?\n")], ids=["prompt", "talk"])
def test_a_device_that_breaks_in_an_answer(tmp_path: Path, flags: list[str], typed: str):
  env = environ({"PYTHONPATH": str(ROOT / "test"), "FAULT": str(tmp_path / "fault"), "DEV": "CPU"})
  run = subprocess.run([sys.executable, "-c", AT_FIVE, "--temp", "0", "--threads", "1", *flags], cwd=ROOT, env=env, input=typed, text=True,
                       capture_output=True, timeout=SECONDS)
  assert run.returncode == 1 and run.stderr == f"error: the device failed: CPU: {BROKEN}\n"
  assert run.stdout.startswith("A list") and run.stdout.count("\n") == 1 and run.stdout.endswith("\n")
