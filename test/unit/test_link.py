"""The engine in a process of its own: what goes over the socket is what the engine says, and whatever one side does, the other comes to an end."""
from __future__ import annotations
import asyncio, os, random, re, signal, socket, subprocess, sys, threading, time
from importlib.util import find_spec
from typing import Any, Callable, Coroutine, Iterator
import msgspec, pytest
from toy_runner import ToyRunner, alone
from tinygrad.apps.engine.engine import Engine
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.models import BUILT_IN, ROOT, Model, load
from tinygrad.apps.serve import wire
from tinygrad.apps.serve.link import DRAINING, FAILED, Handle, Link, Unavailable
from tinygrad.apps.serve.worker import PATIENCE, Broken, Worker
from tinygrad.helpers import Context

CONTEXT = 2048
STALL = 3600.0   # seconds: all prompts are read before a step, so that fewer sizes of a batch are recorded
SECONDS = 60   # that anything may take

class Running:
  """A link, and the loop that it lives on, which runs only while a test waits"""
  def __init__(self, path: Any = BUILT_IN):
    self.loop, self.link = asyncio.Runner(), Link(wire.Load(str(path), CONTEXT, max_stall=STALL, threads=1))
    self(self.link.start())
  def __call__(self, work: Coroutine[Any, Any, Any]) -> Any: return self.loop.run(asyncio.wait_for(work, SECONDS))
  def close(self) -> None:
    self(self.link.close())
    self.loop.close()
  @property
  def pid(self) -> int:
    assert self.link.process is not None
    return self.link.process.pid

def started(path: Any = BUILT_IN) -> Iterator[Running]:
  running = Running(path)
  try:
    running(running.link.wait_ready())
    yield running
  finally: running.close()

running = pytest.fixture(scope="module")(started)
another = pytest.fixture(started)

@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
  with Context(NUM_CPU_THREADS=1): yield load(BUILT_IN, CONTEXT)   # as the worker: several wait for each other long where other tests run

async def whole(handle: Handle) -> wire.News:
  """All of its news as one"""
  news = await handle.news()
  while news.end is None:
    more = await handle.news()
    news = msgspec.structs.replace(more, ids=news.ids + more.ids, logprobs=news.logprobs + more.logprobs)
  assert handle.ended
  return news

# ---- what the engine says ----

def test_many_at_once(running: Running, model: Model):
  def drawn(seed: int) -> dict[str, Any]: return {"temperature": 1.0, "seed": seed}
  requests = [([1], {}, 30), ([*range(70)], drawn(7), 30), ([3, 2, 1], drawn(8), 30), ([9, 8, 7], {}, 30)]
  said = [list(model.engine.generate(ids, limit, Sampling(**sampling))) for ids, sampling, limit in requests]
  stops = [[], [], [], said[3][7:8]]   # a token that the last is known to say
  async def all_of_them() -> list[wire.News]:
    handles = [running.link.add(ids, sampling, stop, limit) for (ids, sampling, limit), stop in zip(requests, stops)]
    assert running.link.queued == 4 and running.link.queued_tokens == 77
    return await asyncio.gather(*map(whole, handles))
  *rest, stopped = running(all_of_them())
  assert [news.ids for news in rest] == said[:3] and {(news.end, news.why) for news in rest} == {("length", "")}
  assert stopped.ids == said[3][:said[3].index(stops[3][0]) + 1] and stopped.end == "stop"
  assert running.link.queued == running.link.queued_tokens == 0

def test_what_is_not_read_is_merged(running: Running, model: Model):
  async def slow() -> list[wire.News]:
    handle = running.link.add([1, 2, 3], {}, [], 40)
    first = await handle.news()
    while not handle.ended: await asyncio.sleep(.01)
    return [first, await handle.news()]
  first, rest = running(slow())
  assert first.end is None and rest.end == "length"
  assert first.ids + rest.ids == list(model.engine.generate([1, 2, 3], 40))

def test_after_the_end(running: Running):
  async def ask_again() -> None:
    handle = running.link.add([1, 2, 3], {}, [], 1)
    await whole(handle)
    await handle.news()
  with pytest.raises(RuntimeError, match="its end was told"): running(ask_again())

def test_abort(running: Running):
  async def aborted() -> tuple[wire.News, wire.News, list[wire.Gauges]]:
    handle, reading = running.link.add([1, 2, 3], {}, []), running.link.add([4] * 400, {}, [])
    reading.abort()   # while its prompt waits, or is read
    await handle.news()
    for _ in range(3): handle.abort()
    ended = await whole(handle), await whole(reading)
    handle.abort()
    while running.link.gauges.running: await asyncio.sleep(.01)
    return *ended, running.link.gauges
  answer, prompt, gauges = running(aborted())
  assert answer.end == prompt.end == "abort" and len(answer.ids) < CONTEXT - 3 and not prompt.ids
  assert (gauges.running, gauges.waiting, gauges.pages) == (0, 0, 0)

def test_probabilities(running: Running, model: Model):
  """They come with the tokens, once each; what a prompt shares with the one before is known with them"""
  prompt = [*range(100, 200)]
  async def ask() -> list[wire.News]:
    return [await whole(running.link.add(prompt, {}, [], 10, logprobs=count)) for count in (3, 0, None)]
  first, again, without = running(ask())
  assert first.ids == again.ids == list(model.engine.generate(prompt, 10)) and not without.logprobs
  assert [logprob.top[0][0] for logprob in first.logprobs] == first.ids and {len(logprob.top) for logprob in first.logprobs} == {3}
  assert [logprob.value for logprob in first.logprobs] == [logprob.top[0][1] for logprob in first.logprobs]
  assert [logprob.value for logprob in again.logprobs] == [logprob.value for logprob in first.logprobs]
  assert not first.cached and again.cached == without.cached == 99
  times = again.times
  assert times is not None and 0 < times.added <= times.begun <= times.first < times.last <= time.monotonic()

@pytest.mark.skipif(find_spec("llguidance") is None, reason="llguidance is not installed")
def test_grammars(running: Running, model: Model):
  def ask(*grammars: wire.Grammar) -> list[wire.News]:
    stop = list(model.tokenizer.stop_ids)
    async def all_of_them() -> list[wire.News]:
      return await asyncio.gather(*(whole(running.link.add([1, 2, 3], {}, stop, 40, grammar=grammar)) for grammar in grammars))
    return running(all_of_them())
  number, wrong = ask(wire.Grammar("regex", "[0-9]{3}"), wire.Grammar("regex", "["))
  assert number.end == "stop" and re.fullmatch("[0-9]{3}", model.tokenizer.decode(number.ids[:-1]))
  assert wrong.end == "grammar" and wrong.why.startswith("regex: ")

WRONG = [(dict(ids=[2048]), "token 2048: expected 0 to 2047"), (dict(ids=[]), "no tokens: give at least one"), (dict(ids=[-1]), "token -1"),
         (dict(ids=["a"]), "Expected `int`, got `str`"), (dict(sampling={"temperature": -1.0}), "temperature: expected"),
         (dict(sampling={"heat": 1}), "heat"), (dict(sampling={"bias": {2048: 1.0}}), "bias: token 2048: expected 0 to 2047"),
         (dict(limit=-1), "count: expected 0 or more"), (dict(ids=[1] * CONTEXT), f"the prompt has {CONTEXT} tokens"),
         (dict(stop=["x"]), "got `str`"), (dict(logprobs=21), "logprobs: expected 0 to 20")]

def test_wrong_orders(running: Running, model: Model):
  """Each ends with a line, beside an answer that does not notice"""
  async def ask() -> list[wire.News]:
    beside = running.link.add([1, 2, 3], {}, [], 40)
    handles = [running.link.add(**dict(ids=[1], sampling={}, stop=[]) | wrong) for wrong, _ in WRONG]
    return await asyncio.gather(*map(whole, [beside, *handles]))
  beside, *refused = running(ask())
  assert beside.ids == list(model.engine.generate([1, 2, 3], 40))
  for news, (_, why) in zip(refused, WRONG): assert news.end == "error" and why in news.why and "\n" not in news.why and not news.ids

# ---- how it ends ----

def test_drain(another: Running, model: Model):
  """What runs ends, but for what takes longer than it may; nothing is added; the process leaves of itself"""
  link = another.link
  async def drain() -> list[wire.News]:
    short, long = link.add([1, 2, 3], {}, [], 20), link.add([1, 2, 3], {}, [])
    draining = asyncio.create_task(link.drain(SECONDS))
    await asyncio.sleep(0)
    assert link.state == DRAINING
    with pytest.raises(Unavailable, match="the server is ending"): link.add([1], {}, [])
    first = await whole(short)
    assert not draining.done()
    draining.cancel()
    await link.close(0)
    return [first, await whole(long)]
  short, long = another(drain())
  assert short.ids == list(model.engine.generate([1, 2, 3], 20)) and short.end == "length" and long.end == "abort"
  assert link.process is not None and link.process.returncode == 0 and link.state == DRAINING

def test_killed(another: Running):
  async def killed() -> list[wire.News]:
    handles = [another.link.add([1, 2, i], {}, []) for i in range(3)]
    await handles[0].news()
    os.kill(another.pid, signal.SIGKILL)
    return await asyncio.gather(*map(whole, handles))
  why = "the engine's process was killed by SIGKILL"
  for news in another(killed()): assert (news.end, news.why) == ("error", why)
  assert (another.link.state, another.link.why) == (FAILED, why)
  with pytest.raises(Unavailable, match=why): another.link.add([1], {}, [])

def test_no_model():
  running = Running("no-such.gguf")
  with pytest.raises(Unavailable, match="being loaded"): running.link.add([1], {}, [])
  with pytest.raises(Unavailable, match="no-such.gguf: cannot be read"): running(running.link.wait_ready())
  assert running.link.state == FAILED
  running.close()

def test_closed_while_it_loads():
  """Nobody waits for a model that is not wanted any more"""
  running = Running()
  running.close()
  assert running.link.process is not None and running.link.process.returncode == -signal.SIGKILL and running.link.state == DRAINING

PARENT = f"""
import asyncio
from tinygrad.apps.serve import wire
from tinygrad.apps.serve.link import Link
async def main():
  link = Link(wire.Load({str(BUILT_IN)!r}))
  await link.start()
  await link.wait_ready()
  link.add([1, 2, 3], {{}}, [])
  print(link.process.pid, flush=True)
  await asyncio.sleep(100)
asyncio.run(main())
"""

def there(pid: int) -> bool:
  """Whether a process, which may be another's child, runs"""
  state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
  return bool(state.strip()) and not state.startswith("Z")

def test_the_parent_dies():
  parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
  assert parent.stdout is not None
  worker = int(parent.stdout.readline())
  assert there(worker)
  parent.kill()
  parent.wait()
  parent.stdout.close()
  end = time.monotonic() + 10
  while there(worker):
    if time.monotonic() > end:
      os.kill(worker, signal.SIGKILL)
      pytest.fail("the engine's process outlives its parent")
    time.sleep(.02)

def test_the_parent_dies_while_the_worker_is_busy():
  """Loading, for one, may take minutes"""
  code = """
import socket, sys, time
from tinygrad.apps.serve.worker import end_with_the_other
end_with_the_other(socket.socket(fileno=int(sys.argv[1])))
print(flush=True)
time.sleep(100)
"""
  mine, its = socket.socketpair()
  with its: child = subprocess.Popen([sys.executable, "-c", code, str(its.fileno())], cwd=ROOT, pass_fds=[its.fileno()], stdout=subprocess.PIPE)
  try:
    assert child.stdout is not None and child.stdout.readline() == b"\n" and child.poll() is None
    mine.close()
    assert child.wait(10) == 1
  finally:
    child.kill()
    child.communicate()

def test_imports_no_engine():
  """The process with HTTP needs nothing that knows a device"""
  code = "import sys, tinygrad.apps.serve.link, tinygrad.apps.serve.server\nprint(*(m for m in sys.modules if m.startswith('tinygrad.apps')))"
  out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
  assert out and [m for m in out if not m.startswith("tinygrad.apps.serve")] == ["tinygrad.apps"] * ("tinygrad.apps" in out)

# ---- the worker's loop, on a toy ----

class Toy:
  """A worker in a thread, and the other end of its socket. fault: is called before each launch"""
  def __init__(self, fault: Callable[[], None] = lambda: None):
    runner = ToyRunner(40, 2000)
    launch = runner.launch
    def faulty() -> None:
      fault()
      launch()
    runner.launch = faulty  # type: ignore[method-assign]
    self.engine, (self.sock, its) = Engine(runner, 40), socket.socketpair()
    self.sock.settimeout(SECONDS)
    self.worker, self.frames, self.broken = Worker(its, self.engine, wire.Frames()), wire.Frames(), ""
    self.thread = threading.Thread(target=self.run, daemon=True)
    self.thread.start()
  def run(self) -> None:
    try: self.worker.run()
    except Broken as e: self.broken = str(e)
  def say(self, *orders: wire.Order) -> None: self.sock.sendall(b"".join(map(wire.frame, orders)))
  def add(self, number: int, ids: list[int], limit: int) -> None: self.say(wire.Add(number, ids, {}, [], limit))
  def hear(self) -> list[wire.Step]:
    """The steps of a piece of what comes"""
    return [msgspec.msgpack.decode(message, type=wire.Step) for message in self.frames.push(self.sock.recv(1 << 20))]
  def until_ended(self, *numbers: int) -> dict[int, wire.News]:
    found: dict[int, wire.News] = {}
    while not all(number in found and found[number].end for number in numbers):
      for news in (news for step in self.hear() for news in step.news):
        found[news.id] = msgspec.structs.replace(news, ids=found[news.id].ids + news.ids) if news.id in found else news
    return found
  def leave(self) -> None:
    self.say(wire.Leave())
    self.thread.join(SECONDS)
    assert not self.thread.is_alive() and not self.broken

def test_one_message_a_step():
  toy = Toy()
  toy.say(*(wire.Add(number, [number + 1, 2], {}, [], 20) for number in range(3)))   # at once: they run beside each other
  steps: list[wire.Step] = []
  while sum(news.end is not None for step in steps for news in step.news) < 3: steps += toy.hear()
  assert max(len(step.news) for step in steps) == 3 and len(steps) <= 20 + 10
  assert all(len({news.id for news in step.news}) == len(step.news) for step in steps)
  toy.leave()

def test_a_slow_reader():
  """What is not read in time does not stop the engine: more comes at once, later"""
  toy = Toy()
  toy.worker.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)   # the least that there is
  for number in range(4): toy.add(number, [number + 1, 2], 400)
  end = time.monotonic() + SECONDS
  while toy.worker.served or not toy.engine.runner.launches:
    assert time.monotonic() < end, "the engine waits for whoever does not read"
    time.sleep(.01)
  found = toy.until_ended(*range(4))
  for number in range(4): assert found[number].ids == alone([number + 1, 2], 400)
  toy.leave()

def test_a_step_that_fails():
  """It ends those that it was about, and the next request is answered"""
  faults = iter([None] * 5 + [RuntimeError("the\ndevice is upset")])
  def fault() -> None:
    if (e := next(faults, None)) is not None: raise e
  toy = Toy(fault)
  toy.add(1, [1, 2], 50)
  news = toy.until_ended(1)[1]
  assert (news.end, news.why) == ("error", "RuntimeError: the device is upset") and news.ids == alone([1, 2], len(news.ids))
  toy.add(2, [3, 4], 20)
  assert toy.until_ended(2)[2].ids == alone([3, 4], 20)
  toy.leave()

def test_a_device_that_fails():
  """Once it does nothing any more, the worker says so, and the end of nobody, who waited neither: all end with that last report"""
  def fault() -> None: raise RuntimeError("gone")
  toy = Toy(fault)
  def gone() -> None: raise RuntimeError("CUDA:1: it is\ngone")
  toy.engine.runner.wait, toy.engine.scheduler.max_rows = gone, 1  # type: ignore[method-assign]
  toy.say(*(wire.Add(number, [number], {}, [], 50) for number in (1, 2)))
  why = "the device failed: CUDA:1: it is gone"
  toy.thread.join(SECONDS)
  assert toy.broken == why and {number: str(served.sequence.error) for number, served in toy.worker.served.items()} == {1: why, 2: why}
  toy.worker.tell_all()
  steps = toy.hear()
  assert steps and not any(news.end for step in steps for news in step.news)

def test_work_that_raises_again_and_again(capfd):
  toy, raised = Toy(), []
  def next_chunk() -> None:
    raised.append(1)
    raise KeyError("x")
  toy.engine.scheduler.next_chunk = next_chunk  # type: ignore[method-assign, assignment]
  toy.add(1, [1], 50)
  toy.thread.join(SECONDS)
  assert "failed 3 times in a row: KeyError: 'x'" in toy.broken and len(raised) == PATIENCE and "Traceback" in capfd.readouterr().err

def test_whoever_leaves():
  toy = Toy()
  toy.add(1, [1, 2], 1000)
  toy.sock.close()
  toy.thread.join(SECONDS)
  assert toy.worker.gone and not toy.broken

def test_frames():
  """However the bytes are cut, the messages are the same"""
  rng, orders = random.Random(1), [wire.Add(i, [*range(i * 40)], {}, []) for i in range(20)]
  stream = b"".join(map(wire.frame, orders))
  for most in (1, 3, 50, 5000):
    frames, found, at = wire.Frames(), [], 0
    while at < len(stream):
      found += frames.push(stream[at:at + (size := rng.randint(1, most))])
      at += size
    assert [msgspec.msgpack.decode(message, type=wire.Order) for message in found] == orders and not frames.held
