"""Many clients of one server for a while, who ask, leave, dawdle and get everything wrong: nothing may be lost, nobody may get another's text.

  .venv/bin/python test/external/soak.py --seconds 600 --clients 100

The server is a process of its own with the built-in model, a key, a small cache and a short queue. Greedy answers are those that one client gets
alone, to the character; whoever leaves, or sends what is refused, changes nobody's. In the end the server is idle, holds no page, has grown by no
more than MEMORY from the second third of the time to the last, and ends by SIGTERM. The last line is JSON; the exit code is 1 where something was
wrong."""
from __future__ import annotations
import argparse, asyncio, collections, json, random, re, signal, subprocess, sys, time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEY, MAX_BODY, CONTEXT, CACHE = "soak-key", 1 << 20, 512, 2048
MEMORY = .02
PROMPTS = ["What is a list?", "how to sort a list", "What is a dict?", "What does the for statement do?", "What is a tuple?", "Who are you?",
           "What is a generator? Say it in a few words.", "how to open a file and read its lines, one after the other"]
LIMITS = [1, 7, 20, 60]
PATIENCE = 120.0   # seconds that an answer may take

class Wrong(Exception):
  """What no server may do. str(e) is one line."""

@dataclass
class Seen:
  counts: collections.Counter = field(default_factory=collections.Counter)   # by what was done
  wrong: list[str] = field(default_factory=list)
  memory: list[tuple[float, int]] = field(default_factory=list)              # (seconds, KiB of both processes)

@dataclass
class Client:
  """Asks over connections of its own. port: the server's"""
  port: int
  rng: random.Random

  async def request(self, body: bytes, key: str = KEY, method: str = "POST", path: str = "/v1/chat/completions") -> tuple[Any, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
    head = f"{method} {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer

  async def whole(self, body: bytes, **kw: Any) -> tuple[int, bytes]:
    """(status, body)"""
    reader, writer = await self.request(body, **kw)
    try:
      data = await reader.read()
      while more := await reader.read(): data += more
    finally: writer.close()
    head, _, rest = data.partition(b"\r\n\r\n")
    if not (status := re.match(rb"HTTP/1\.1 (\d+)", head)): raise Wrong(f"no answer: {data[:80]!r}")
    if b"transfer-encoding: chunked" in head.lower(): rest = b"".join(chunks(rest))
    return int(status[1]), rest

def chunks(data: bytes) -> list[bytes]:
  """Of HTTP's chunked form"""
  out = []
  while data:
    size, _, data = data.partition(b"\r\n")
    if (n := int(size, 16)) == 0: break
    out.append(data[:n])
    data = data[n + 2:]
  return out

def body_of(prompt: str, limit: int, **kw: Any) -> bytes:
  return json.dumps({"messages": [{"role": "user", "content": prompt}], "max_tokens": limit, "temperature": 0, **kw}).encode()

def text_of(status: int, body: bytes, stream: bool) -> str:
  if status != 200: raise Wrong(f"status {status}: {body[:200]!r}")
  if not stream: return json.loads(body)["choices"][0]["message"]["content"] or ""
  events = [line[6:] for line in body.decode().split("\n\n") if line.startswith("data: ")]
  if not events or events[-1] != "[DONE]": raise Wrong(f"a stream that does not end: {body[-200:]!r}")
  return "".join(choice["delta"].get("content") or "" for event in events[:-1] for choice in json.loads(event)["choices"])

# ---- what clients do: each raises Wrong where the server did what it must not ----

async def asks(client: Client, alone: dict[tuple[str, int], str], stream: bool, slow: bool = False) -> None:
  prompt, limit = client.rng.choice(PROMPTS), client.rng.choice(LIMITS)
  body = body_of(prompt, limit, stream=stream)
  while True:
    if slow:
      reader, writer = await client.request(body)
      data = b""
      while piece := await reader.read(200):
        data += piece
        await asyncio.sleep(.02)
      writer.close()
      head, _, rest = data.partition(b"\r\n\r\n")
      status, said = int(head.split(b" ")[1]), b"".join(chunks(rest)) if b"chunked" in head.lower() else rest
    else: status, said = await client.whole(body)
    if status != 429: break
    await asyncio.sleep(client.rng.random())
  text, want = text_of(status, said, stream), alone[prompt, limit]
  if text != want: raise Wrong(f"{prompt!r}, {limit} tokens: {text!r}, not {want!r}")

async def leaves(client: Client, after: int, prompt: str) -> None:
  """Goes away after so many bytes of the answer"""
  reader, writer = await client.request(body_of(prompt, 300, stream=True))
  if after: await reader.read(after)
  writer.transport.abort()

async def is_refused(client: Client, status: int, body: bytes, **kw: Any) -> None:
  """A busy server may say 429 before it looks"""
  got, said = await client.whole(body, **kw)
  if got not in (status, 429): raise Wrong(f"expected {status}, found {got}: {said[:200]!r}")
  if "error" not in json.loads(said): raise Wrong(f"{got} without an error: {said[:200]!r}")

LONG = "What is a list? " * 60
def actions(client: Client, alone: dict[tuple[str, int], str]) -> dict[str, Any]:
  return {
    "whole": lambda: asks(client, alone, False), "stream": lambda: asks(client, alone, True),
    "slow reader": lambda: asks(client, alone, True, slow=True),
    "left in an answer": lambda: leaves(client, client.rng.randrange(1, 2000), client.rng.choice(PROMPTS)),
    "left in a prompt": lambda: leaves(client, 0, LONG),
    "no JSON": lambda: is_refused(client, 400, b'{"messages": [{"role": "user"'),
    "a wrong type": lambda: is_refused(client, 400, body_of("x", 5, temperature="warm")),
    "no such field's value": lambda: is_refused(client, 400, body_of("x", 5, n=0)),
    "a wrong key": lambda: is_refused(client, 401, body_of("x", 5), key="another"),
    "too long a body": lambda: is_refused(client, 413, b" " * (MAX_BODY + 1)),
    "too long a prompt": lambda: is_refused(client, 400, body_of("list " * 2000, 5)),
    "no such path": lambda: is_refused(client, 404, b"", method="GET", path="/v1/nothing"),
  }
OFTEN = {"whole": 6, "stream": 8, "slow reader": 1, "left in an answer": 3, "left in a prompt": 2}

async def client_loop(number: int, port: int, alone: dict[tuple[str, int], str], end: float, seen: Seen) -> None:
  client = Client(port, random.Random(number))
  does = actions(client, alone)
  while time.monotonic() < end and len(seen.wrong) < 20:
    what = client.rng.choices([*does], [OFTEN.get(name, 1) for name in does])[0]
    try:
      async with asyncio.timeout(PATIENCE): await does[what]()
      seen.counts[what] += 1
    except (Wrong, TimeoutError, ValueError, KeyError) as e: seen.wrong.append(f"{what}: {type(e).__name__}: {e}")
    except ConnectionError as e:
      if what != "too long a body": seen.wrong.append(f"{what}: {type(e).__name__}: {e}")
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
    seen.memory.append((time.monotonic() - start, memory(pid)))
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

async def soak(seconds: float, clients: int, seen: Seen) -> dict[str, Any]:
  command = [sys.executable, "tinygrad/apps/llm.py", "--serve", "127.0.0.1:0", "--api-key", KEY, "--max-context", str(CONTEXT), "--cache-tokens",
             str(CACHE), "--max-body", str(MAX_BODY >> 20), "--max-queued", "64"]
  process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
  try:
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2])
    client = Client(port, random.Random(0))
    while (await client.whole(b"", method="GET", path="/health"))[0] != 200: await asyncio.sleep(.1)
    alone = {(p, n): text_of(*await client.whole(body_of(p, n)), stream=False) for p in PROMPTS for n in LIMITS}
    watcher, end = asyncio.create_task(watch_memory(process.pid, seen)), time.monotonic() + seconds
    await asyncio.gather(*(client_loop(n + 1, port, alone, end, seen) for n in range(clients)))
    watcher.cancel()
    await idle(client, seen)
    again = {key: text_of(*await client.whole(body_of(*key)), stream=False) for key in alone}
    if again != alone: seen.wrong.append("what one client gets alone is not what it was")
    preempted, grown = await gauge(client, "num_preemptions_total"), growth(seen.memory)
    if seconds >= 300 and abs(grown) > MEMORY: seen.wrong.append(f"memory: {grown:+.1%}")
    process.send_signal(signal.SIGTERM)
    if (code := await asyncio.to_thread(process.wait, 60)) != 0: seen.wrong.append(f"exit code {code}")
  finally: process.kill()
  return {"seconds": seconds, "clients": clients, "done": dict(seen.counts), "preempted": preempted, "memory_mib": round(seen.memory[-1][1] / 1024),
          "memory_growth": round(grown, 4), "wrong": seen.wrong}

def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--seconds", type=float, default=600)
  p.add_argument("--clients", type=int, default=100)
  args = p.parse_args()
  line = asyncio.run(soak(args.seconds, args.clients, Seen()))
  print(json.dumps(line))
  sys.exit(bool(line["wrong"]))

if __name__ == "__main__": main()
