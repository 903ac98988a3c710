"""Many clients of one server for a while, who ask, leave, dawdle and get everything wrong: nothing may be lost, nobody may get another's text.

  .venv/bin/python test/external/soak.py --seconds 600 --clients 100

The server is a process of its own with the built-in model, a key, a small cache and a short queue. Answers, greedy or drawn with a seed, are those
that one client gets alone, to the character and the last digit of a probability, by whichever endpoint; whoever leaves, or sends what is refused,
changes nobody's. In the end the server is idle, holds no page, has raised nothing, has grown by no more than MEMORY from the second third of the time
to the last, and ends by SIGTERM. The last line is JSON; the exit code is 1 where something was wrong."""
from __future__ import annotations
import argparse, asyncio, collections, json, random, re, signal, socket, subprocess, sys, tempfile, time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Awaitable, Callable, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
KEY, MAX_BODY, CONTEXT, CACHE = "soak-key", 1 << 20, 512, 2048
MEMORY, JUDGED = .02, 300   # growth, of a run of so many seconds at least
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PROMPTS = ["What is a list?", "how to sort a list", "What is a dict?", "What does the for statement do?", "What is a tuple?", "Who are you?",
           "What is a generator? Say it in a few words.", "how to open a file and read its lines, one after the other"]
STRANGE = ["日本語", "naïve", "🙂", "<|user|>", "\n\n", "\x00", "0123456789" * 5]
LIMITS = [1, 7, 20, 60]
MADE = 24          # prompts of random words
PATIENCE = 120.0   # seconds that an answer may take
KEPT = 30.0        # … that a connection is kept for another request: the server keeps it longer

class Wrong(Exception):
  """What no server may do. str(e) is one line."""

@dataclass
class Seen:
  counts: collections.Counter = field(default_factory=collections.Counter)   # by what was done
  wrong: list[str] = field(default_factory=list)
  memory: list[tuple[float, int]] = field(default_factory=list)              # (seconds, KiB of both processes)

# ---- what is asked, and what is said ----

@dataclass(frozen=True)
class Ask:
  """kind: of a request, as it is counted; fields: JSON without `stream`"""
  kind: str
  path: str
  fields: str
  def body(self, stream: bool = False) -> bytes: return json.dumps({**json.loads(self.fields), "stream": stream}).encode()

class Said(NamedTuple):
  """One answer. logprobs: JSON, where they were asked for"""
  reasoning: str = ""
  text: str = ""
  logprobs: str = ""

def talk(prompt: str) -> list[dict[str, str]]: return [{"role": "user", "content": prompt}]

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "maximum": 99}},
          "required": ["name", "size"], "additionalProperties": False}

def asks_of(rng: random.Random) -> list[Ask]:
  out = list[Ask]()
  def add(kind: str, path: str, **fields: Any) -> None: out.append(Ask(kind, path, json.dumps(fields)))
  def chat(kind: str, prompt: str, limit: int, **fields: Any) -> None:
    add(kind, CHAT, messages=talk(prompt), max_tokens=limit, **{"temperature": 0, **fields})
  for prompt in PROMPTS:
    for limit in LIMITS: chat("chat", prompt, limit)
  words = [word for prompt in PROMPTS for word in prompt.split()] + STRANGE
  for _ in range(MADE): chat("random prompt", " ".join(rng.choices(words, k=rng.randrange(1, 60))), rng.choice(LIMITS))
  for n, prompt in enumerate(PROMPTS[::2]):
    chat("drawn", prompt, 40, temperature=1, seed=n)
    chat("several answers", prompt, 20, temperature=1, seed=n, n=2 + n % 2)
    chat("probabilities", prompt, 20, logprobs=True, top_logprobs=n)
    chat("a schema", prompt, 60, response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}})
    chat("reasoning", prompt, 60, chat_template_kwargs={"enable_thinking": True})
    chat("stop", prompt, 60, stop=["is", "sequence"])
    add("long", COMPLETIONS, prompt=prompt, max_tokens=250, temperature=0, ignore_eos=True)
    add("completion", COMPLETIONS, prompt=prompt if n % 2 else [*range(40 + n)], max_tokens=30, temperature=0, ignore_eos=True, logprobs=n % 3)
    add("message", MESSAGES, messages=talk(prompt), max_tokens=60, temperature=0, thinking={"type": "enabled" if n % 2 else "disabled"})
    add("response", RESPONSES, input=prompt, max_output_tokens=60, temperature=0, reasoning={"effort": "low" if n % 2 else "none"})
  return out

def whole_said(path: str, answer: dict[str, Any]) -> list[Said]:
  """What is said in place of a stream. Raises Wrong."""
  if path == MESSAGES:
    if answer["stop_reason"] is None: raise Wrong("a message that has not ended")
    return [Said(*("".join(block.get(name, "") for block in answer["content"]) for name in ("thinking", "text")))]
  if path == RESPONSES:
    if answer["status"] not in ("completed", "incomplete"): raise Wrong(f"a response that is {answer['status']}")
    return [Said(*("".join(part["text"] for item in answer["output"] if item["type"] == kind for part in item["content"])
                   for kind in ("reasoning", "message")))]
  choices = sorted(answer["choices"], key=lambda choice: choice["index"])
  if any(choice["finish_reason"] is None for choice in choices): raise Wrong("an answer that has not ended")
  if path == COMPLETIONS: return [Said("", c["text"], json.dumps(c["logprobs"] and c["logprobs"]["token_logprobs"])) for c in choices]
  return [Said(c["message"].get("reasoning_content", ""), c["message"]["content"] or "", json.dumps(c["logprobs"] and c["logprobs"]["content"]))
          for c in choices]

def stream_said(path: str, lines: list[str]) -> list[Said]:
  """The same of a stream's data. Raises Wrong."""
  if path in (CHAT, COMPLETIONS):
    if not lines or lines.pop() != "[DONE]": raise Wrong("a stream that does not end")
  events = [json.loads(line) for line in lines]
  if any(e.get("error") for e in events): raise Wrong(f"an error in a stream: {events[-1]}")
  if path == MESSAGES:
    if not events or events[-1]["type"] != "message_stop": raise Wrong("a stream that does not end")
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    return [Said(*("".join(delta.get(name, "") for delta in deltas) for name in ("thinking", "text")))]
  if path == RESPONSES:
    if not events or events[-1]["type"] not in ("response.completed", "response.incomplete"): raise Wrong("a stream that does not end")
    found = [Said(*("".join(e["delta"] for e in events if e["type"] == f"response.{name}.delta") for name in ("reasoning_text", "output_text")))]
    if whole_said(path, events[-1]["response"]) != found: raise Wrong("a response that is not what its stream was")
    return found
  choices = collections.defaultdict(list)
  for e in events:
    for choice in e["choices"]: choices[choice["index"]].append(choice)
  out = []
  for _, pieces in sorted(choices.items()):
    if pieces[-1]["finish_reason"] is None: raise Wrong("an answer that has not ended")
    told, entries = [p["logprobs"] for p in pieces if p["logprobs"]], "content" if path == CHAT else "token_logprobs"
    logprobs = json.dumps([entry for t in told for entry in t[entries]] if told else None)
    if path == COMPLETIONS: out.append(Said("", "".join(p["text"] for p in pieces), logprobs))
    else: out.append(Said(*("".join(p["delta"].get(name) or "" for p in pieces) for name in ("reasoning_content", "content")), logprobs))
  return out

def said(ask: Ask, status: int, body: bytes, stream: bool) -> list[Said]:
  if status != 200: raise Wrong(f"status {status}: {body[:200]!r}")
  if not stream: return whole_said(ask.path, json.loads(body))
  return stream_said(ask.path, [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")])

# ---- what clients do: each raises Wrong where the server did what it must not ----

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

@dataclass
class Client:
  """port: the server's. kept: a connection for the next request, and since when"""
  port: int
  rng: random.Random
  kept: tuple[Connection, float]|None = None

  async def connect(self, slow: bool = False) -> Connection:
    if not slow: return await asyncio.open_connection("127.0.0.1", self.port)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
    return await asyncio.open_connection(sock=sock, limit=1 << 12)

  async def send(self, c: Connection, body: bytes, path: str = CHAT, key: str = KEY, method: str = "POST", slow: bool = False) -> None:
    head = f"{method} {path} HTTP/1.1\r\nHost: soak\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    data = head.encode() + body
    while slow and data:
      c[1].write(data[:200])
      data = data[200:]
      await asyncio.sleep(.02)
    c[1].write(data)
    await c[1].drain()

  def take(self) -> Connection|None:
    """The connection that was kept, unless that is too long ago"""
    kept, self.kept = self.kept, None
    if kept is None or time.monotonic() - kept[1] < KEPT: return kept and kept[0]
    kept[0][1].close()
    return None

  async def whole(self, body: bytes, slow: bool = False, **kw: Any) -> tuple[int, bytes]:
    """(status, body). slow: sends and reads slowly"""
    c = not slow and self.take() or await self.connect(slow)
    try:
      await self.send(c, body, slow=slow, **kw)
      status, head, said = await answer_of(c[0], slow)
    except BaseException:
      c[1].close()
      raise
    if slow or "connection: close" in head: c[1].close()
    else: self.kept = c, time.monotonic()
    return status, said

  async def alone(self, ask: Ask) -> list[Said]: return said(ask, *await self.whole(ask.body(), path=ask.path), stream=False)

async def answer_of(reader: asyncio.StreamReader, slow: bool) -> tuple[int, str, bytes]:
  """(status, head, body). Raises Wrong, EOFError for one that does not end."""
  head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
  if not (found := re.match(r"http/1\.1 (\d+) ", head)): raise Wrong(f"no answer: {head[:80]!r}")
  if (length := re.search(r"\ncontent-length: (\d+)", head)): return int(found[1]), head, await reader.readexactly(int(length[1]))
  data = b""
  while size := int(await reader.readuntil(b"\r\n"), 16):
    data += (await reader.readexactly(size + 2))[:-2]
    if slow: await asyncio.sleep(.02)
  await reader.readexactly(2)
  return int(found[1]), head, data

# ---- what clients do: each raises Wrong where the server did what it must not ----

Alone = dict[Ask, list[Said]]   # what one client gets

async def asks(client: Client, alone: Alone, kind: str, stream: bool, slow: bool = False) -> None:
  ask = client.rng.choice([ask for ask in alone if kind in ("", ask.kind)])
  while True:
    status, body = await client.whole(ask.body(stream), path=ask.path, slow=slow)
    if status != 429: break
    await asyncio.sleep(client.rng.random())
  if (found := said(ask, status, body, stream)) != alone[ask]: raise Wrong(f"{ask}: {found}, not {alone[ask]}")

async def leaves(client: Client, ask: Ask, after: int, stream: bool) -> None:
  """Goes away after so many bytes of the answer, or, of one that is no stream, so many times a tenth of a millisecond"""
  reader, writer = c = await client.connect()
  await client.send(c, ask.body(stream), ask.path)
  if not stream: await asyncio.sleep(after / 1e4)
  elif after: await reader.read(after)
  writer.transport.abort()

async def leaves_before(client: Client, ask: Ask) -> None:
  """Goes away when half of the request is sent"""
  _, writer = await client.connect()
  body = ask.body()
  writer.write(f"POST {ask.path} HTTP/1.1\r\nHost: soak\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {2 * len(body)}\r\n\r\n".encode() + body)
  await writer.drain()
  writer.transport.abort()

async def is_refused(client: Client, status: int, body: bytes, path: str = CHAT, key: str = KEY, method: str = "POST") -> None:
  """A busy server may say 429 before it looks, to whoever has a key"""
  got, answer = await client.whole(body, path=path, key=key, method=method)
  if got != status and (got != 429 or key != KEY): raise Wrong(f"{path} {body[:100]!r}: expected {status}, found {got}: {answer[:200]!r}")
  if "error" not in json.loads(answer): raise Wrong(f"{got} without an error: {answer[:200]!r}")

async def tells(client: Client, path: str) -> None:
  status, answer = await client.whole(b"", path=path, method="GET")
  if status != 200 or not answer: raise Wrong(f"{path}: {status}: {answer[:200]!r}")

async def counts(client: Client) -> None:
  for path, body, name in (("/tokenize", {"content": "A list"}, "tokens"), (f"{MESSAGES}/count_tokens", {"messages": talk("x")}, "input_tokens")):
    status, answer = await client.whole(json.dumps(body).encode(), path=path)
    if status != 200 or not json.loads(answer)[name]: raise Wrong(f"{path}: {status}: {answer[:200]!r}")

LONG = Ask("", CHAT, json.dumps({"messages": talk("What is a list? " * 60), "max_tokens": 300}))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# (path, what is wrong in an otherwise good request)
TYPES: list[tuple[str, dict[str, Any]]] = [
  (CHAT, {"temperature": "warm"}), (CHAT, {"messages": 5}), (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}), (CHAT, {"max_tokens": "1"}),
  (CHAT, {"stop": 5}), (COMPLETIONS, {"prompt": {"x": 1}}), (COMPLETIONS, {"logprobs": "1"}), (RESPONSES, {"input": 5}),
  (MESSAGES, {"max_tokens": None}), (MESSAGES, {"messages": "x"})]
VALUES: list[tuple[str, dict[str, Any]]] = [
  (CHAT, {"n": 0}), (CHAT, {"max_tokens": -5}), (CHAT, {"temperature": -1}), (CHAT, {"top_logprobs": 3}), (CHAT, {"messages": []}),
  (CHAT, {"stop": [""]}), (CHAT, {"n": 1000}), (CHAT, {"logit_bias": {"999999": 1}}), (CHAT, {"seed": 1 << 70}),
  (COMPLETIONS, {"prompt": [1, 1 << 30]}), (COMPLETIONS, {"prompt": []}), (RESPONSES, {"tool_choice": "required"}), (MESSAGES, {"max_tokens": 0})]
LACKING: list[tuple[str, dict[str, Any]]] = [
  (CHAT, {"tools": [TOOL]}), (CHAT, {"tools": [TOOL], "tool_choice": "required"}), (CHAT, {"functions": [TOOL]}), (CHAT, {"audio": {"voice": "x"}}),
  (COMPLETIONS, {"suffix": "x"}), (COMPLETIONS, {"best_of": 3}), (RESPONSES, {"previous_response_id": "resp_1"}),
  (RESPONSES, {"tools": [{"type": "web_search"}]}), (MESSAGES, {"mcp_servers": [{"url": "http://example.org"}]}),
  (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}}]})]
GRAMMARS: list[tuple[str, dict[str, Any]]] = [
  (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}}), (CHAT, {"guided_regex": "("}),
  (CHAT, {"guided_json": {"$ref": "file:///etc/passwd"}}), (CHAT, {"guided_json": {"enum": ["x" * 100] * 3000}}),
  (COMPLETIONS, {"grammar": "root ::= ("}),
  (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"type": "objekt"}}}})]
GOOD: dict[str, dict[str, Any]] = {CHAT: {"messages": talk("x")}, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"},
                                   MESSAGES: {"messages": talk("x"), "max_tokens": 5}}

def actions(client: Client, alone: Alone) -> dict[str, Callable[[], Awaitable[None]]]:
  rng = client.rng
  def any_ask() -> Ask: return rng.choice([*alone])
  def wrong(table: list[tuple[str, dict[str, Any]]]) -> Awaitable[None]:
    path, fields = rng.choice(table)
    return is_refused(client, 400, json.dumps({**GOOD[path], **fields}).encode(), path)
  def keyless() -> Awaitable[None]:
    path, key = rng.choice([*GOOD, "/metrics", "/v1/models", "/tokenize", "/slots"]), rng.choice(["another", "", KEY[:-1], KEY + "x"])
    return is_refused(client, 401, json.dumps(GOOD.get(path, {})).encode() if path in GOOD else b"", path, key, "POST" if path in GOOD else "GET")
  return {
    **{kind: lambda kind=kind: asks(client, alone, kind, False) for kind in dict.fromkeys(ask.kind for ask in alone)},
    **{f"{kind}, a stream": lambda kind=kind: asks(client, alone, kind, True) for kind in dict.fromkeys(ask.kind for ask in alone)},
    "slow client": lambda: asks(client, alone, "", rng.random() < .5, slow=True),
    "left in an answer": lambda: leaves(client, any_ask(), rng.randrange(1, 2000), True),
    "left a whole answer": lambda: leaves(client, any_ask(), rng.randrange(2000), False),
    "left in a prompt": lambda: leaves(client, LONG, 0, True),
    "left in a request": lambda: leaves_before(client, any_ask()),
    "no JSON": lambda: is_refused(client, 400, any_ask().body()[:-rng.randrange(1, 30)], rng.choice([*GOOD])),
    "a wrong type": lambda: wrong(TYPES), "a wrong value": lambda: wrong(VALUES),
    "what there is not": lambda: wrong(LACKING), "no grammar": lambda: wrong(GRAMMARS),
    "a wrong key": keyless,
    "too long a body": lambda: is_refused(client, 413, b" " * (MAX_BODY + 1), rng.choice([*GOOD])),
    "too long a prompt": lambda: is_refused(client, 400, json.dumps({"messages": talk("list " * 2000)}).encode()),
    "no such path": lambda: is_refused(client, 404, b"", "/v1/nothing", method="GET"),
    "how it stands": lambda: tells(client, rng.choice(["/metrics", "/slots", "/props", "/v1/models", "/health", "/openapi.json"])),
    "tokens": lambda: counts(client),
  }
OFTEN = {"long": 3, "long, a stream": 3, "chat": 6, "chat, a stream": 8, "random prompt": 2, "random prompt, a stream": 4,
         "left in an answer": 3, "left in a prompt": 2}

async def client_loop(number: int, clients: int, port: int, alone: Alone, end: float, seen: Seen) -> None:
  """First its share of all that there is to do, then what comes"""
  client = Client(port, random.Random(number))
  does = actions(client, alone)
  share = [*does][number::clients]
  while (share or time.monotonic() < end) and len(seen.wrong) < 20:
    what = share.pop() if share else client.rng.choices([*does], [OFTEN.get(name, 1) for name in does])[0]
    try:
      async with asyncio.timeout(PATIENCE): await does[what]()
    except (Wrong, TimeoutError, EOFError, ValueError, KeyError, TypeError, IndexError) as e: seen.wrong.append(f"{what}: {type(e).__name__}: {e}")
    except ConnectionError as e:
      if what != "too long a body": seen.wrong.append(f"{what}: {type(e).__name__}: {e}")
    seen.counts[what] += 1
    await asyncio.sleep(client.rng.random() * .05)

# ---- the server ----

def memory(pid: int) -> int:
  """KiB of a process and its children"""
  listing = subprocess.run(["ps", "-o", "pid=,ppid=,rss=", "-A"], capture_output=True, text=True, check=True).stdout
  rows = [tuple(map(int, line.split())) for line in listing.splitlines()]
  return sum(rss for own, parent, rss in rows if pid in (own, parent))

async def watch_memory(pid: int, seen: Seen) -> None:
  start = time.monotonic()
  while True:
    seen.memory.append((time.monotonic() - start, await asyncio.to_thread(memory, pid)))
    await asyncio.sleep(1)

async def gauge(client: Client, name: str) -> float:
  status, page = await client.whole(b"", method="GET", path="/metrics")
  if status != 200 or not (found := re.search(rf"^vllm:{name}{{.*}} (\S+)$", page.decode(), re.M)): raise Wrong(f"/metrics: {status}, no {name}")
  return float(found[1])

async def idle(client: Client, seen: Seen) -> None:
  """Soon nothing runs, nothing waits, and no page is held"""
  names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
  for _ in range(100):
    stands = {name: await gauge(client, name) for name in names}
    if not any(stands.values()): return
    await asyncio.sleep(.2)
  seen.wrong.append(f"not idle after 20 s: {stands}")

def growth(samples: list[tuple[float, int]]) -> float:
  """Of memory from the second third of the time to the last, medians"""
  thirds = [sorted(kib for at, kib in samples if i <= 3 * at / (samples[-1][0] + 1e-9) < i + 1 or (i == 2 and at == samples[-1][0])) for i in (1, 2)]
  return thirds[1][len(thirds[1]) // 2] / thirds[0][len(thirds[0]) // 2] - 1 if all(thirds) else 0.0

async def soak(seconds: float, clients: int, seen: Seen, **flags: int|None) -> dict[str, Any]:
  """flags: of the server, by name"""
  given = [word for name, value in flags.items() if value for word in (f"--{name}", str(value))]
  command = [sys.executable, "tinygrad/apps/llm.py", "--serve", "127.0.0.1:0", "--api-key", KEY, "--max-context", str(CONTEXT), "--cache-tokens",
             str(CACHE), "--max-body", str(MAX_BODY >> 20), "--max-queued", "64", *given]
  log = tempfile.TemporaryFile("w+")
  process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
  try:
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2])
    client = Client(port, random.Random(0))
    while (await client.whole(b"", method="GET", path="/health"))[0] != 200: await asyncio.sleep(.1)
    alone = {ask: await client.alone(ask) for ask in asks_of(client.rng)}
    watcher, end = asyncio.create_task(watch_memory(process.pid, seen)), time.monotonic() + seconds
    await asyncio.gather(*(client_loop(n, clients, port, alone, end, seen) for n in range(clients)))
    watcher.cancel()
    await idle(client, seen)
    if {ask: await client.alone(ask) for ask in alone} != alone: seen.wrong.append("what one client gets alone is not what it was")
    preempted, grown = await gauge(client, "num_preemptions_total"), growth(seen.memory)
    if seconds >= JUDGED and abs(grown) > MEMORY: seen.wrong.append(f"memory: {grown:+.1%}")
    process.send_signal(signal.SIGTERM)
    if (code := await asyncio.to_thread(process.wait, 60)) != 0: seen.wrong.append(f"exit code {code}")
    log.seek(0)
    seen.wrong += [line[:2000] for line in log if "raceback" in line]
  finally: process.kill()
  return {"seconds": seconds, "clients": clients, "done": dict(seen.counts), "in_all": seen.counts.total(), "preempted": preempted,
          "memory_mib": round(seen.memory[-1][1] / 1024), "memory_growth": round(grown, 4), "wrong": seen.wrong}

def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--seconds", type=float, default=600)
  p.add_argument("--clients", type=int, default=100)
  p.add_argument("--threads", type=int, help="of the server's CPU device (default: its cores)")
  p.add_argument("--devices", type=int, help="of the server, each with some blocks of the model")
  args = p.parse_args()
  line = asyncio.run(soak(args.seconds, args.clients, Seen(), threads=args.threads, devices=args.devices))
  print(json.dumps(line))
  sys.exit(bool(line["wrong"]))

if __name__ == "__main__": main()
