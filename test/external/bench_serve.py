"""Tokens a second through the server, as its clients get them, beside the engine's alone: the same prompts, all at once, to both.

  python test/external/bench_serve.py --model PATH --streams 1,8,32,64 [--features plain,logprobs,json] [--prompt 128] [--count 256] [-r 2]
  python test/external/bench_serve.py --model PATH --streams 1,8,64 --replicas 2,4,8 [--no-alone]      # several servers behind smg
  python test/external/bench_serve.py --model PATH --streams 1,8,64 --devices 2 [--shard tensors]      # each on so many cards

First the engine by itself, in a process of its own, which then ends and frees the device; then the server by its own command. A case is so many
streams that ask for one feature: a run to warm up, then `-r` of them. Prompts are random, no two alike; answers have `count` tokens, whatever they
say. Of the features, logprobs are five a token, and json is a schema whose answers do not end before.

--replicas: then, for each such number, so many servers, each on cards of its own (CUDA_VISIBLE_DEVICES; but with DEV=CPU), and smg (pip's, the extra
`replicas`) before them, which gives requests to one after another. It is sent so many times the streams. Prompts are letters, a token each, as smg
takes no tokens. Which server had which stream, smg says in each answer; where that is uneven, so does this.

  tok/s      of all streams, from the first request to the last token: prompts are read in that time
  decoding   of all, from the last first token to the first end; - where there is no such time
  % alone    the server's part of what the engine alone has, by decoding where both have it
  first      ms from a request to its first token, p50 and p99 of all streams
  between    ms from token to token, likewise. A client's are from event to event: `a piece` is how many tokens these have
  x one      replicas: how many times what one server has, with the same streams a server, by decoding where both have it
  cores      that the server's HTTP process (of several the busiest), the router, and of the clients' processes the busiest were busy on. Near 1, it
             is what limits; but for the router, which has threads

The last line is JSON."""
from __future__ import annotations
import argparse, asyncio, bisect, contextlib, functools, itertools, json, multiprocessing, os, re, shutil, signal, socket, statistics, string
import subprocess, sys, tempfile, time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Sequence
from urllib.request import Request, urlopen
import numpy as np, uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

FEATURES = "plain", "logprobs", "json"
LIKELIEST = 5
STREAMS_A_CLIENT = 16   # of a process
CONNECTED = .3          # seconds until all clients are
ALIAS = "bench"         # the model's name for clients
FOUND = 60              # seconds in which a router finds its servers

@dataclass(frozen=True)
class Case:
  streams: int
  feature: str

@dataclass
class Answer:
  """As whoever asked saw it, by time.monotonic, which all processes share. times: of each event, the first has the first token, the last the last"""
  asked: float
  times: list[float]
  tokens: int
  replica: str = ""
  @property
  def a_piece(self) -> float: return self.tokens / len(self.times)

@dataclass
class Run:
  answers: list[Answer]
  client_cores: float = 0.0
  http_cores: float|None = None
  router_cores: float|None = None

  @property
  def seconds(self) -> float: return max(a.times[-1] for a in self.answers) - min(a.asked for a in self.answers)
  @property
  def rate(self) -> float: return sum(a.tokens for a in self.answers) / self.seconds
  @property
  def decoding(self) -> float|None:
    """Tokens a second while all have begun and none has ended"""
    start, end = max(a.times[0] for a in self.answers), min(a.times[-1] for a in self.answers)
    if end <= start: return None
    return sum(a.a_piece * (bisect.bisect_right(a.times, end) - bisect.bisect_right(a.times, start)) for a in self.answers) / (end - start)

def prompts(streams: int, length: int, number: int) -> list[list[int]]:
  """Those of a run; the first 256 tokens of a vocabulary are no special ones"""
  return np.random.default_rng([streams, number]).integers(0, 256, (streams, length)).tolist()

def schema(count: int) -> dict[str, Any]:
  """Of JSON that has not ended before so many tokens have come"""
  return {"type": "array", "items": {"type": "string"}, "minItems": count}

def figures(runs: list[Run]) -> dict[str, Any]:
  answers, decoding = [a for run in runs for a in run.answers], [run.decoding for run in runs if run.decoding]
  first, between = [a.times[0] - a.asked for a in answers], [s for a in answers for s in np.diff(a.times)]
  def ms(times: list[float], percentile: float) -> float|None: return float(np.percentile(times, percentile)) * 1e3 if times else None
  return {"ts": statistics.median(run.rate for run in runs), "decoding_ts": statistics.median(decoding) if len(decoding) == len(runs) else None,
          "first_p50_ms": ms(first, 50), "first_p99_ms": ms(first, 99), "between_p50_ms": ms(between, 50), "between_p99_ms": ms(between, 99),
          "tokens_a_piece": sum(a.tokens for a in answers) / sum(len(a.times) for a in answers),
          "http_cores": max((run.http_cores for run in runs if run.http_cores is not None), default=None),
          "router_cores": max((run.router_cores for run in runs if run.router_cores is not None), default=None),
          "client_cores": max(run.client_cores for run in runs), "samples_ts": [run.rate for run in runs],
          "samples_decoding_ts": [run.decoding for run in runs]}

# ---- the engine alone: these run in its process ----

class Alone:
  """Its model, as the server's engine process loads it, once `open` was called"""
  model: Any = None
  vocabulary: Any = None

def open_alone(args: argparse.Namespace) -> dict[str, Any]:
  """Loads and warms up. Returns what is to be said first: the model, the device, the ceilings of the cases"""
  import gc
  from tinygrad.apps.engine.sampling import Sampling
  from tinygrad.apps.machine import device_name
  from tinygrad.apps.measure import measured_peak
  from tinygrad.apps.serve import wire, worker
  start = time.perf_counter()
  model = Alone.model = worker.open_model(wire.Load(args.model, args.context, args.cache_tokens, args.max_stall_ms / 1e3, threads=args.threads,
                                                    devices=args.devices, shard=args.shard))
  worker.warm(model.engine, Sampling(temperature=args.temperature))
  Alone.vocabulary = worker.vocabulary_of(model)
  gc.freeze()
  t, seconds, peak = model.transformer, time.perf_counter() - start, measured_peak(model.transformer)
  nbytes = {n: t.weight_bytes_a_step(n) + n * t.cache_bytes(1) * (args.prompt + (args.count + 1) / 2) for n in args.streams}
  return {"model": model.name, "device": device_name(t.devices), "seconds": seconds, "peak_gb_s": peak and peak[0] / 1e9, "source": peak and peak[1],
          "bytes_a_step": nbytes, "ceiling_ts": {n: n * peak[0] / nbytes[n] if peak else None for n in args.streams}}

def close_alone() -> None: Alone.model = None   # while there is a device to free it on

def ask_alone(args: argparse.Namespace, case: Case, number: int) -> Run:
  from tinygrad.apps.engine.constraint import constraint_of
  from tinygrad.apps.engine.sampling import Sampling
  from tinygrad.apps.engine.sequence import Request
  engine, asked = Alone.model.engine, time.monotonic()
  def request(n: int, ids: list[int]) -> Request:
    constraint = constraint_of("json_schema", json.dumps(schema(args.count)), None, Alone.vocabulary) if case.feature == "json" else None
    return Request(ids, Sampling(temperature=args.temperature, seed=n), limit=args.count, constraint=constraint,
                   logprobs=LIKELIEST if case.feature == "logprobs" else None)
  sequences = [engine.add(request(n, ids)) for n, ids in enumerate(prompts(case.streams, args.prompt, number))]
  times: list[list[float]] = [[] for _ in sequences]
  while engine.step():
    now = time.monotonic()
    for s, seen in zip(sequences, times): seen += [now] * (len(s.ids) - s.prompt - len(seen))
  if failed := next((s.error for s in sequences if s.error), None): raise failed
  return Run([Answer(asked, seen, len(seen)) for seen in times])

# ---- clients: these run in processes of theirs ----

class Client(asyncio.Protocol):
  """Asks once. What comes is kept with its time, and looked at when all has come"""
  def __init__(self) -> None:
    self.pieces: list[tuple[float, bytes]] = []
    self.ended = asyncio.get_running_loop().create_future()
  def connection_made(self, transport: asyncio.BaseTransport) -> None: self.transport = transport
  def data_received(self, data: bytes) -> None: self.pieces.append((time.monotonic(), data))
  def connection_lost(self, exc: Exception|None) -> None: self.ended.set_result(None)

  def ask(self, body: bytes) -> None:
    self.asked = time.monotonic()
    self.transport.write(b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

  def answer(self) -> Answer:
    said, ends = b"".join(data for _, data in self.pieces), list(itertools.accumulate(len(data) for _, data in self.pieces))
    events = [(self.pieces[bisect.bisect_left(ends, m.end())][0], m[1]) for m in re.finditer(rb"data: ([^\n]*)\n\n", said)]
    if b" 200 " not in said[:20] or len(events) < 2 or events[-1][1] != b"[DONE]":
      raise RuntimeError(f"no whole answer: {said[:200]!r} … {said[-200:]!r}")
    last = json.loads(events[-2][1])
    if last["choices"][0]["finish_reason"] is None: raise RuntimeError(f"an answer without an end: {events[-2][1]!r}")
    replica = re.search(rb"\r\nx-smg-routed-worker-id: *(\S+)", said.partition(b"\r\n\r\n")[0], re.I)
    return Answer(self.asked, [at for at, _ in events[:-1]], last["timings"]["predicted_n"], replica[1].decode() if replica else "")

async def ask_server(port: int, bodies: list[bytes], at: float) -> tuple[list[Answer], float]:
  """Sends all at this time -> (the answers, the cores that this process was busy on)"""
  loop = asyncio.get_running_loop()
  clients = [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in bodies]
  await asyncio.sleep(at - time.monotonic())
  start, busy = time.monotonic(), time.process_time()
  for client, body in zip(clients, bodies): client.ask(body)
  await asyncio.gather(*(client.ended for client in clients))
  cores = (time.process_time() - busy) / (time.monotonic() - start)
  return [client.answer() for client in clients], cores

def ask_in_process(port: int, bodies: list[bytes], at: float) -> tuple[list[Answer], float]: return uvloop.run(ask_server(port, bodies, at))

# ---- the server ----

def cpu_seconds(pid: int) -> float|None:
  """That a process has taken; None where the system does not say"""
  try: fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  except OSError: return None
  return (int(fields[11]) + int(fields[12])) / 100

class Asked:
  """A process that answers at a port. start: when it was started; seconds: until it was ready"""
  port: int
  seconds: float
  def __init__(self, command: Sequence[str|Path], log: Any, **kw: Any):
    self.start, self.process = time.perf_counter(), subprocess.Popen([*map(str, command)], cwd=ROOT, stderr=log, text=True, **kw)

  def get(self, path: str, body: Any = None) -> Any:
    """None where it refuses, or does not listen yet. body: of a POST"""
    if self.process.poll() is not None: raise RuntimeError(f"{' '.join(self.process.args[:3])} ended with exit code {self.process.returncode}")
    data = None if body is None else json.dumps(body).encode()
    try:
      with urlopen(Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}), timeout=60) as r: return json.load(r)
    except OSError: return None

  def close(self) -> None:
    self.process.send_signal(signal.SIGTERM)
    try: self.process.wait(60)
    finally: self.process.kill()

class Server(Asked):
  """Started by its own command, on these cards. log: what it writes on stderr"""
  def __init__(self, args: argparse.Namespace, log: Any, cards: str|None = None):
    flags = {"model": args.model, "serve": "127.0.0.1:0", "max-context": args.context, "cache-tokens": args.cache_tokens,
             "max-stall-ms": args.max_stall_ms, "temperature": args.temperature, "top-k": 0, "top-p": 1, "min-p": 0, "repeat-penalty": 1,
             "alias": ALIAS, "devices": args.devices, "shard": args.shard, **({"threads": args.threads} if args.threads else {})}
    command = [sys.executable, "tinygrad/apps/llm.py", "--warm", *(str(part) for name, value in flags.items() for part in (f"--{name}", value))]
    super().__init__(command, log, stdout=subprocess.PIPE, env=os.environ | ({} if cards is None else {"CUDA_VISIBLE_DEVICES": cards}))
  def wait(self) -> None:
    """Until it is ready"""
    assert self.process.stdout is not None
    self.port = int(self.process.stdout.readline().rpartition(":")[2] or 0)
    while self.get("/health") is None: time.sleep(.1)
    self.seconds = time.perf_counter() - self.start
  @functools.cached_property
  def words(self) -> list[str]:
    """Letters behind a space that are a token each, alone and behind each other"""
    words = [f" {letter}" for letter in string.ascii_letters if self.get("/tokenize", {"content": f" {letter}"})["count"] == 1]
    if not words: raise RuntimeError("no letter is a token of this model: expected some, to make prompts of for the router")
    return words

class Router(Asked):
  """smg, before these servers"""
  def __init__(self, args: argparse.Namespace, log: Any, servers: list[Server]):
    self.port, urls = free_port(), {f"http://127.0.0.1:{server.port}" for server in servers}
    super().__init__([args.smg, "launch", "--host", "127.0.0.1", "--port", self.port, "--worker-urls", *urls, "--policy", "round_robin",
                      "--prometheus-host", "127.0.0.1", "--prometheus-port", free_port(), "--worker-startup-check-interval", 1,
                      "--disable-retries", "--log-level", "warn"], log, stdout=log)
    try:
      while {w["url"] for w in (self.get("/workers") or {"workers": []})["workers"] if w["is_healthy"]} != urls:
        if time.perf_counter() > self.start + FOUND: raise RuntimeError(f"smg has not found its {len(urls)} servers in {FOUND} s")
        time.sleep(.1)
    except BaseException:
      self.close()
      raise

def free_port() -> int:
  with socket.create_server(("127.0.0.1", 0)) as s: return s.getsockname()[1]

def cards_of(args: argparse.Namespace, number: int) -> str|None:
  """A replica's, for CUDA_VISIBLE_DEVICES: its share of those that there are; None: it is left as it is"""
  if os.environ.get("DEV", "").startswith("CPU"): return None
  first, last = number * args.devices, (number + 1) * args.devices
  given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
  cards = given.split(",") if given else [str(i) for i in range(last)]
  if len(cards) < last: raise RuntimeError(f"CUDA_VISIBLE_DEVICES={given}: expected {args.devices} cards for each replica, found none for one more")
  return ",".join(cards[first:last])

def ask(servers: list[Server], router: Router|None, args: argparse.Namespace, case: Case, number: int, clients: ProcessPoolExecutor) -> Run:
  """The first of the servers, or all through the router"""
  common = {"model": ALIAS, "max_tokens": args.count, "ignore_eos": True, "stream": True, "temperature": args.temperature}
  if case.feature == "logprobs": common["logprobs"] = LIKELIEST
  if case.feature == "json": common["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema(args.count)}}
  words = servers[0].words if router is not None else []
  texts = ["".join(words[i % len(words)] for i in ids) if words else ids for ids in prompts(case.streams, args.prompt, number)]
  bodies = [json.dumps({"prompt": text, "seed": n, **common}).encode() for n, text in enumerate(texts)]
  def busy() -> list[float|None]: return [cpu_seconds(asked.process.pid) for asked in [*servers, *[router] * (router is not None)]]
  parts, at, before = -(-case.streams // STREAMS_A_CLIENT), time.monotonic() + CONNECTED, busy()
  port = servers[0].port if router is None else router.port
  found = [f.result() for f in [clients.submit(ask_in_process, port, bodies[i::parts], at) for i in range(parts)]]
  run = Run([a for answers, _ in found for a in answers], max(cores for _, cores in found))
  cores = [(b - a) / run.seconds for a, b in zip(before, busy()) if a is not None and b is not None]
  if cores: run.http_cores, run.router_cores = max(cores[:len(servers)]), None if router is None else cores[-1]
  short = [a.tokens for a in run.answers if a.tokens != args.count]
  if short: print(f"{case}: {len(short)} answers ended early, the shortest after {min(short)} tokens", file=sys.stderr)
  each = Counter(a.replica for a in run.answers)
  if router is not None and {*each.values()} != {case.streams // len(servers)}:
    print(f"{case}: the servers had {', '.join(map(str, sorted(each.values())))} streams", file=sys.stderr)
  return run

# ---- the whole ----

COLUMNS = (("", 10), ("streams", 7), ("feature", 8), ("tok/s", 9), ("decoding", 9), ("% ceiling", 9), ("% alone", 7), ("x one", 6), ("first p50", 9),
           ("p99", 8), ("between p50", 11), ("p99", 8), ("a piece", 7), ("cores: HTTP", 11), ("router", 6), ("clients", 7))

def line(cells: list[str]) -> str: return "| " + " | ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS)) + " |"

def cells(who: str, case: Case, f: dict[str, Any]) -> list[str]:
  def number(name: str, digits: int) -> str: return "-" if f.get(name) is None else f"{f[name]:.{digits}f}"
  served, routed = who != "engine", who not in ("engine", "server")
  return [who, f"{case.streams}", case.feature, number("ts", 1), number("decoding_ts", 1), number("ceiling_percent", 1), number("alone_percent", 1),
          number("times_one", 2) if routed else "", number("first_p50_ms", 1), number("first_p99_ms", 1), number("between_p50_ms", 3),
          number("between_p99_ms", 3), number("tokens_a_piece", 2), number("http_cores", 2) if served else "",
          number("router_cores", 2) if routed else "", number("client_cores", 2) if served else ""]

def run_numbers(cases: list[Case], rounds: int) -> Iterator[tuple[Case, range]]:
  """The numbers of a case's runs, the first of which warms up"""
  for i, case in enumerate(cases): yield case, range(i * (rounds + 1), (i + 1) * (rounds + 1))

def compared(f: dict[str, Any], other: dict[str, Any]) -> float:
  """How many times the other's tokens a second: by decoding, where both have it"""
  name = "decoding_ts" if f["decoding_ts"] and other["decoding_ts"] else "ts"
  return f[name] / other[name]

Rows = dict[Case, dict[str, Any]]   # figures

class Bench:
  """What is measured. head: of the engine alone, what open_alone says; device: what a server says that it is on"""
  def __init__(self, args: argparse.Namespace, log: Any):
    self.args, self.log, self.spawn = args, log, multiprocessing.get_context("spawn")
    self.cases = [Case(n, feature) for feature in args.features for n in args.streams]
    self.head: dict[str, Any] = {}
    self.device = ""

  def alone(self) -> Rows:
    args, rows = self.args, Rows()
    with ProcessPoolExecutor(1, self.spawn) as engine:
      head = self.head = engine.submit(open_alone, args).result()
      print(f"model     {head['model']} on {head['device']}")
      print(f"ceiling   {head['peak_gb_s']:.0f} GB/s ({head['source']})" if head["peak_gb_s"] else "ceiling   unknown: no figure for this memory")
      for n in args.streams:
        most = head["ceiling_ts"][n]
        print(f"          a step of {n:2d} reads {head['bytes_a_step'][n] / 1e6:9.1f} MB{f': {most:8.0f} tok/s' if most else ''}")
      print(f"load      the engine alone, warmed: {head['seconds']:.1f} s\n")
      self.title()
      for case, numbers in run_numbers(self.cases, args.repetitions):
        rows[case] = self.with_percent(case, figures([engine.submit(ask_alone, args, case, number).result() for number in numbers][1:]))
        print(line(cells("engine", case, rows[case])), flush=True)
      engine.submit(close_alone).result()
    return rows

  def title(self) -> None:
    print(line([title for title, _ in COLUMNS]))
    print("|" + "|".join("-" * (width + 1) + ":" for _, width in COLUMNS) + "|", flush=True)
  def with_percent(self, case: Case, f: dict[str, Any]) -> dict[str, Any]:
    most = self.head["ceiling_ts"][case.streams] if self.head else None
    return f | {"ceiling_percent": 100 * f["decoding_ts"] / most if most and f["decoding_ts"] else None}

  def served(self, count: int, routed: bool, others: Rows) -> tuple[Rows, float]:
    """(what so many servers have for each case, which it is for one of them; the seconds until the last was ready). others: to compare with"""
    rows = Rows()
    with contextlib.ExitStack() as stack:
      servers = []
      for n in range(count):   # they load at once
        servers.append(Server(self.args, self.log, cards_of(self.args, n) if routed else None))
        stack.callback(servers[-1].close)
      for server in servers: server.wait()
      self.device = servers[0].get("/props")["device"]
      router = Router(self.args, self.log, servers) if routed else None
      if router is not None: stack.callback(router.close)
      clients = stack.enter_context(ProcessPoolExecutor(-(-max(self.args.streams) * count // STREAMS_A_CLIENT), self.spawn))
      for case, numbers in run_numbers(self.cases, self.args.repetitions):
        sent = Case(case.streams * count, case.feature)
        f = figures([ask(servers, router, self.args, sent, number, clients) for number in numbers][1:])
        if not routed: f = self.with_percent(case, f)
        if case in others: f |= {"times_one": compared(f, others[case])} if routed else {"alone_percent": 100 * compared(f, others[case])}
        print(line(cells(f"{count} replicas" if routed else "server", sent, f)), flush=True)
        rows[case] = f
    return rows, max(server.seconds for server in servers)

def measure(args: argparse.Namespace, log: Any) -> dict[str, Any]:
  bench = Bench(args, log)
  print(f"requests  prompts of {args.prompt} tokens, answers of {args.count}, temperature {args.temperature:g}")
  if args.devices > 1: print(f"devices   {args.devices} of each, by {args.shard}")
  alone = bench.alone() if args.alone else Rows()
  if not args.alone: bench.title()
  server, seconds = bench.served(1, False, alone)
  replicas = {count: bench.served(count, True, server) for count in args.replicas}
  rows = [{"streams": case.streams, "feature": case.feature, "alone": alone.get(case), "server": server[case],
           "replicas": {count: found[case] for count, (found, _) in replicas.items()}} for case in bench.cases]
  given = ("prompt", "count", "context", "cache_tokens", "temperature", "max_stall_ms", "repetitions", "devices", "shard")
  return {"model": Path(args.model).name, "device": bench.device, "peak_gb_s": bench.head.get("peak_gb_s"),
          **{name: getattr(args, name) for name in given},
          "load_s": {"alone": bench.head.get("seconds"), "server": seconds, "replicas": {n: load for n, (_, load) in replicas.items()}}, "rows": rows}

def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--model", "-m", default=str(ROOT / "models" / "tiny-glm-Q4_0.gguf"))
  p.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32, 64], help="requests at once, of each case")
  p.add_argument("--features", type=lambda text: text.split(","), default=["plain"], help=f"what they ask for: {', '.join(FEATURES)}")
  for name, default in (("prompt", 128), ("count", 256), ("repetitions", 2)): p.add_argument(f"-{name[0]}", f"--{name}", type=int, default=default)
  p.add_argument("--temperature", type=float, default=0.0,
                 help="default 0, greedy: answers of random weights are soon alike then, and so are the experts that they choose")
  p.add_argument("--cache-tokens", type=int, help="default: what all need at once")
  p.add_argument("--max-stall-ms", type=float, default=50.0)
  p.add_argument("--threads", type=int)
  p.add_argument("--devices", type=int, default=1, help="of each server, and of the engine alone")
  p.add_argument("--shard", choices=("layers", "tensors"), default="layers", help="how the model lies on them")
  p.add_argument("--replicas", type=lambda text: [int(n) for n in text.split(",")], default=[],
                 help="servers behind smg, of each number: as many times the streams")
  p.add_argument("--no-alone", dest="alone", action="store_false", help="leave out the engine alone")
  p.add_argument("--smg", help="the router's executable (default: the one beside Python, or on the PATH)")
  args = p.parse_args()
  if args.replicas:
    args.smg = shutil.which(args.smg or "smg", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if args.smg is None: p.error(f"--replicas: found no smg; type: {sys.executable} -m pip install smg==1.13.0, or say where it is by --smg")
  if wrong := set(args.features) - set(FEATURES): p.error(f"--features {wrong.pop()}: expected {', '.join(FEATURES)}")
  if min(*args.streams, *args.replicas, args.devices, args.repetitions, args.prompt - 1, args.count - 1) < 1:
    p.error("expected counts of 1 or more, tokens of 2 or more")
  from tinygrad.apps.models import DEFAULT_CONTEXT
  room = args.prompt + args.count + 2
  args.context = max(room, DEFAULT_CONTEXT)   # a server's: chunks of prompts are as long as the context at most
  args.cache_tokens = args.cache_tokens or max(args.streams) * (room + 2 * 64)   # in whole pages of 64, and one more each
  with tempfile.TemporaryFile("w+") as log:
    try: result = measure(args, log)
    except BaseException:
      log.seek(0)
      print("".join(log.readlines()[-20:]), file=sys.stderr)
      raise
  print(json.dumps(result))

if __name__ == "__main__": main()
