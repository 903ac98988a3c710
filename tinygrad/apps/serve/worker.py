"""The process that has the device: it loads the model, and does the engine's work for whoever is at the other end of a socket (link.py).

One thread does all of it. It takes the orders that are there, does a piece of the engine's work, and sends what is new: tokens of all sequences in
one message. It waits for nobody while there is work: what the other process does not read in time is merged into the next message. A fault of an
order ends its sequence with a line that says why; a fault of a step is the engine's to settle (Engine._whole_or_recovered).

The process ends when it is told to leave, and at once when the other one is gone."""
from __future__ import annotations
import dataclasses, gc, importlib.util, os, select, signal, socket, sys, threading, traceback
import msgspec
from tinygrad.apps.engine.constraint import GrammarError, Vocabulary, constraint_of
from tinygrad.apps.engine.engine import MAX_STALL, ContextFull, DeviceFailed, Engine
from tinygrad.apps.engine.sampling import Features, Sampling
from tinygrad.apps.engine.sequence import Request, Sequence, State
from tinygrad.apps.gguf import GGUFError
from tinygrad.apps.machine import device_name
from tinygrad.apps.models import Model, UserError, load, out_of_memory
from tinygrad.apps.serve import wire
from tinygrad.helpers import NUM_CPU_THREADS
from tinygrad.nn.step import PAGE

PIECE = 1 << 18   # bytes that are read at once
PATIENCE = 3      # pieces of work in a row that may raise

class Broken(Exception):
  """The engine cannot go on. str(e) is one line."""

TO_BE_READ = ValueError, ContextFull, DeviceFailed, UserError, GGUFError, Broken

def one_line(e:Exception) -> str:
  """An error as a person reads it: with its class, unless it was raised to be read"""
  text = " ".join(str(e).split())
  if isinstance(e, MemoryError): return out_of_memory(e)
  return text if isinstance(e, TO_BE_READ) and text else f"{type(e).__name__}{text and f': {text}'}"

class Served:
  """A sequence whose news are told. told: how many of its tokens have been"""
  def __init__(self, sequence:Sequence): self.sequence, self.told = sequence, 0

class Worker:
  """See the head of the file. sock: a stream, of wire's messages both ways"""
  def __init__(self, sock:socket.socket, engine:Engine, frames:wire.Frames, vocabulary:Vocabulary|None=None):
    """frames: what of the next orders has come; vocabulary: for grammars"""
    self.sock, self.engine, self.frames, self.vocabulary = sock, engine, frames, vocabulary
    self.orders = msgspec.msgpack.Decoder(wire.Order)
    self.served: dict[int, Served] = {}        # by the request's id
    self.news: dict[int, wire.News] = {}       # that are not sent
    self.gauges = wire.Gauges()                # as they were sent last
    self.unsent = memoryview(b"")              # the rest of a message that was begun
    self.leaving = self.gone = False           # told to end; the other process has ended
    self.raised = 0                            # pieces of work that have raised, in a row
    sock.setblocking(False)

  def run(self) -> None:
    """Until it is told to leave and nothing is left to do, or the other process is gone. Raises Broken."""
    while not self.gone and not (self.leaving and not self.served and not self.news and not self.unsent):
      busy = self._work()
      self._collect()
      self._send()
      if self.engine.failed: raise Broken(self.engine.failed)
      if not busy and self.served: raise Broken(f"the engine has nothing to do for {len(self.served)} sequences that have not ended")
      self._receive(wait=not busy)

  def tell_all(self) -> None:
    """Sends what is unsent, however long that takes"""
    self.sock.setblocking(True)
    while self.unsent or self.news: self._send()

  # ---- the engine's work ----
  def _work(self) -> bool:
    """A piece of work. False where there is none."""
    try: busy = self.engine.step()
    except Exception as e:  # concerns no sequence, or the engine would have ended it
      traceback.print_exc()
      self.raised += 1
      if self.raised == PATIENCE: raise Broken(f"the engine's work failed {PATIENCE} times in a row: {one_line(e)}") from None
      return True
    self.raised = 0
    return busy

  # ---- news ----
  def _collect(self) -> None:
    """Notes what is new of each sequence"""
    for number, served in list(self.served.items()):
      s, ended = served.sequence, served.sequence.state is State.ENDED
      told, there = served.told, len(s.ids) - s.prompt
      if told == there and not ended: continue
      if (news := self.news.get(number)) is None: news = self.news[number] = wire.News(number, [])
      news.ids += s.ids[s.prompt + told:]
      if s.logprobs: news.logprobs += [wire.Logprob(*logprob) for logprob in s.logprobs[told:]]
      news.cached, served.told = s.cached, there
      if ended and not isinstance(s.error, DeviceFailed):   # those end with the last report, after which nobody is told that all is well
        news.end = "grammar" if isinstance(s.error, GrammarError) else s.reason
        news.why, news.times = "" if s.error is None else one_line(s.error), wire.Times(**vars(s.times))
        del self.served[number]

  def _send(self) -> None:
    """Sends what the socket takes at once: the rest of a message, and all news since in one"""
    while True:
      if not self.unsent:
        gauges = wire.Gauges(*self.engine.gauges)
        if not self.news and gauges == self.gauges: return
        self.unsent = memoryview(wire.frame(wire.Step(list(self.news.values()), gauges)))
        self.news, self.gauges = {}, gauges
      try: self.unsent = self.unsent[self.sock.send(self.unsent):]
      except BlockingIOError: return
      except (BrokenPipeError, ConnectionResetError):
        self.gone = True
        return

  # ---- orders ----
  def _receive(self, wait:bool) -> None:
    """Takes the orders that are there; wait: until there are any, or the socket takes what is unsent"""
    if wait and (self.unsent or not self.leaving): select.select([self.sock], [self.sock] if self.unsent else [], [])
    try:
      while data := self.sock.recv(PIECE):
        for message in self.frames.push(data): self._take(message)
      self.gone = True
    except BlockingIOError: return
    except ConnectionResetError: self.gone = True

  def _take(self, message:bytes) -> None:
    try: order = self.orders.decode(message)
    except msgspec.ValidationError as e:
      self._refuse(msgspec.msgpack.decode(message)["id"], e)
      return
    match order:
      case wire.Add(): self._add(order)
      case wire.Abort():
        if order.id in self.served: self.engine.abort(self.served[order.id].sequence)
      case wire.Leave(): self.leaving = True

  def _add(self, order:wire.Add) -> None:
    try: self.served[order.id] = Served(self.engine.add(self._request(order)))
    except Exception as e: self._refuse(order.id, e)

  def _request(self, order:wire.Add) -> Request:
    sampling = Sampling(**order.sampling)
    vocab = self.engine.runner.vocab_size
    if (wrong := next((token for token in sampling.bias if token >= vocab), None)) is not None:
      raise ValueError(f"bias: token {wrong}: expected 0 to {vocab - 1}")
    constraint = None
    if (grammar := order.grammar) is not None:
      if self.vocabulary is None: raise ValueError("grammar: this engine has no vocabulary")
      constraint = constraint_of(grammar.kind, grammar.source, grammar.after, self.vocabulary)
    return Request(order.ids, sampling, frozenset(order.stop), order.limit, order.logprobs, constraint)

  def _refuse(self, number:int, e:Exception) -> None:
    """The end of a request that never became a sequence"""
    self.news[number] = wire.News(number, [], end="error", why=one_line(e))

# ---- the process ----

def open_model(order:wire.Load) -> Model:
  """Raises as models.load"""
  if order.threads: NUM_CPU_THREADS.value = order.threads
  max_stall = MAX_STALL if order.max_stall is None else order.max_stall
  return load(order.path, order.max_context, sys.stderr.isatty(), order.cache_tokens, max_stall, order.cache_bits, order.drafts, order.mtp,
              order.devices, order.cpu_experts, order.shard, order.batch_invariant)

def warm(engine:Engine, sampling:Sampling) -> None:
  """Records all that answers drawn so need, those with probabilities, and those held to a grammar"""
  engine.warm(sampling, Features(logprobs=True), Features(mask=True))

def vocabulary_of(model:Model) -> Vocabulary:
  """What grammars need; ready to be used where llguidance is there: making it later would stop all answers for seconds"""
  t = model.tokenizer
  vocabulary = Vocabulary(t.table, t.special_tokens.values(), t.stop_ids, t.encode_bytes, model.engine.runner.vocab_size)
  if importlib.util.find_spec("llguidance") is not None: vocabulary.tokenizer()
  return vocabulary

def ready(model:Model) -> wire.Ready:
  engine = model.engine
  return wire.Ready(device_name(model.transformer.devices), engine.max_context, engine.capacity, engine.pool.rows, PAGE, engine.scheduler.max_rows)

def first_order(sock:socket.socket, frames:wire.Frames) -> tuple[wire.Load, list[bytes]]:
  """What is to be loaded, and what has come after it"""
  while not (messages := frames.push(sock.recv(PIECE))): pass
  return msgspec.msgpack.decode(messages[0], type=wire.Load), messages[1:]

def end_with_the_other(sock:socket.socket) -> None:
  """Ends this process at once when the other end of the socket is closed, whatever it is doing"""
  def watch() -> None:
    hung_up = select.poll()
    hung_up.register(sock, 0)
    hung_up.poll()
    os._exit(1)
  threading.Thread(target=watch, daemon=True).start()

def serve(sock:socket.socket) -> None:
  """Loads, and works until the end. Raises what cannot be settled."""
  def tell(report:wire.Report) -> None: sock.sendall(wire.frame(report))
  order, rest = first_order(sock, frames := wire.Frames())
  tell(wire.Loading(f"reading {os.path.basename(order.path)}"))
  model = open_model(order)
  if order.warm:
    tell(wire.Loading("recording and compiling what any number of answers and any length of a prompt need"))
    warm(model.engine, dataclasses.replace(model.sampling, **order.sampling))
  vocabulary = vocabulary_of(model)
  gc.freeze()   # what stays is not looked at again while answers run
  tell(ready(model))
  worker = Worker(sock, model.engine, frames, vocabulary)
  for message in rest: worker._take(message)
  try: worker.run()
  except Broken:
    worker.tell_all()
    raise

def main(number:int) -> None:
  """number: of the socket's file. The process's exit code is 1 where it could not go on, which the last report says."""
  # the other process has them, and says what follows. Not SIG_IGN, which the processes that compile would inherit, and never end
  for which in (signal.SIGINT, signal.SIGTERM): signal.signal(which, lambda *_: None)
  os.set_inheritable(number, False)
  sock = socket.socket(fileno=number)
  end_with_the_other(sock)
  try: serve(sock)
  except Exception as e:
    if not isinstance(e, (*TO_BE_READ, MemoryError, OSError)): traceback.print_exc()
    sock.setblocking(True)
    sock.sendall(wire.frame(wire.Failed(one_line(e))))
    sys.unraisablehook = lambda _: None   # what is given back to a device that does nothing any more raises
    sys.exit(1)

if __name__ == "__main__": main(int(sys.argv[1]))
