"""Steps a second of many sequences: of the engine alone, and of the engine in its own process, whose tokens come here message by message.

  python test/external/bench_link.py [--model PATH] [--streams 64] [--tokens 128] [--rounds 5]

A round is one run of each, in turn. A run counts the steps from the first token of the last sequence to the first end of one: prompts are read
before, as answers wait for as long as it takes. The last line is JSON."""
from __future__ import annotations
import argparse, asyncio, json, statistics, sys, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tinygrad.apps.engine.engine import Engine
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.engine.sequence import Request, State
from tinygrad.apps.models import BUILT_IN, load
from tinygrad.apps.serve import wire
from tinygrad.apps.serve.link import Handle, Link
from tinygrad.helpers import NUM_CPU_THREADS

DRAWN = {"temperature": 1.0}
STALL = 3600.0   # seconds

def prompts(streams: int, run: int) -> list[list[int]]: return [[run + 1, stream + 1, *range(14)] for stream in range(streams)]

def alone(engine: Engine, streams: int, tokens: int, run: int) -> float:
  """Steps a second"""
  sequences = [engine.add(Request(ids, Sampling(**DRAWN), limit=tokens)) for ids in prompts(streams, run)]
  while not all(len(s.ids) > s.prompt for s in sequences): engine.step()
  steps, start = engine.steps, time.perf_counter()
  while all(s.state is not State.ENDED for s in sequences): engine.step()
  rate = (engine.steps - steps) / (time.perf_counter() - start)
  while engine.step(): pass
  return rate

async def linked(link: Link, streams: int, tokens: int, run: int) -> float:
  handles, begun, spans = [link.add(ids, DRAWN, [], tokens) for ids in prompts(streams, run)], set(), []
  def now() -> tuple[int, float]: return link.gauges.steps, time.perf_counter()
  async def read(handle: Handle) -> None:
    end = None
    while end is None:
      news = await handle.news()
      end = news.end
      begun.add(handle.number)
      if len(begun) == streams and not spans: spans.append(now())
      if end is not None and len(spans) == 1: spans.append(now())
  await asyncio.gather(*map(read, handles))
  (before, start), (after, finish) = spans
  return (after - before) / (finish - start)

async def main() -> None:
  p = argparse.ArgumentParser()
  p.add_argument("--model", default=str(BUILT_IN))
  for name, default in (("streams", 64), ("tokens", 128), ("rounds", 5), ("threads", 0)): p.add_argument(f"--{name}", type=int, default=default)
  args = p.parse_args()
  if args.threads: NUM_CPU_THREADS.value = args.threads
  cache = args.streams * (args.tokens + 16 + 64)
  engine = load(args.model, args.tokens + 64, cache_tokens=cache, max_stall=STALL).engine
  link = Link(wire.Load(args.model, args.tokens + 64, cache, STALL, threads=args.threads or None))
  await link.start()
  await link.wait_ready()
  rates: dict[str, list[float]] = {"alone": [], "linked": []}
  for run in range(args.rounds + 1):
    one, other = alone(engine, args.streams, args.tokens, run), await linked(link, args.streams, args.tokens, run)
    print(f"{'warm-up' if run == 0 else f'round {run}'}: {one:.1f} steps/s alone, {other:.1f} linked, {other / one:.1%}", flush=True)
    if run:
      rates["alone"].append(one)
      rates["linked"].append(other)
  await link.close()
  medians = {name: round(statistics.median(found), 2) for name, found in rates.items()}
  part = statistics.median(o / a for a, o in zip(rates["alone"], rates["linked"]))
  print(json.dumps({"streams": args.streams, "tokens": args.tokens, "steps_per_second": medians, "linked_over_alone": round(part, 4)}))

if __name__ == "__main__": asyncio.run(main())
