"""The built-in model's tokens with and without drafts, on the device that DEV says, or those of a small random model on a mock of a GPU: they are the
same. Prompts of words and of noise, greedy and at temperature 1 with all filters and penalties, alone and in batches of up to eight.

  python test/external/drafts_exact.py [--prompts 1000] [--ngram N | --mtp N] [--batches 1,2,4,8] [--mock CUDA|METAL]
                                       [--batch-invariant]

Some prompts leave the model few tokens to choose from, so that drafts are found, and right. On a GPU a step of several rows rounds otherwise than
one of a row, but for --batch-invariant: each difference is printed, with where it begins and how much better the oracle finds the token alone. It
is a near tie where that is no more than the rounding of halves, or experts are so near. Ends in a JSON line; the exit code is 1 above one in a
thousand, of --batch-invariant above none, or where one is no near tie.
"""
from __future__ import annotations
import argparse, json, pathlib, random, sys, tempfile, time
from contextlib import ExitStack
from dataclasses import replace
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
import numpy as np
from drafting import FILTERS, LEAST, Pair
from extra.mkgguf import write_model
from mockcuda import on_cuda
from mockmetal import on_metal
from oracle import forward
from tinygrad.apps.capture import to_device
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.engine.sampling import Features, Sampling, scores, token_counts
from tinygrad.apps.engine.sequence import Request, Sequence
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.llm import int_at_least
from tinygrad.apps.mla import Transformer
from tinygrad.apps.models import BUILT_IN
from tinygrad.apps.mtp import MTP, load_block

CONTEXT, PAGES = 256, 60

def request(rng:random.Random, vocab_size:int) -> Request:
  text = [rng.randrange(vocab_size) for _ in range(rng.choice((3, 9, 20, 60)))]
  bias = {} if rng.random() < .5 else dict.fromkeys([*rng.sample(text, 2), 5, 6], 1e3)
  drawn = FILTERS | (dict(temperature=20.0) if bias and rng.random() < .5 else {})   # so hot that noise decides between what the bias leaves
  sampling = Sampling(bias=bias) if rng.random() < .5 else Sampling(**drawn, bias=bias, seed=rng.randrange(99))
  return Request((text * 3)[:rng.randint(1, 150)], sampling, limit=rng.choice((1, 7, 40)))

def behind(path:pathlib.Path, vocab:int, alone:Sequence, at:int, token:int) -> tuple[float, bool]:
  """How much worse the oracle finds a token than the one that was drawn alone, and whether that is a near tie: of the two, or of experts. A filter's
  edge may lie between the two: without the filters they are compared"""
  ids, sampling = alone.ids[:alone.prompt + at], replace(alone.sampling, top_k=0, top_p=1.0, min_p=0.0)
  logits, margins = forward(path, (*ids,))
  counts, features = token_counts(vocab, ids[:alone.prompt], ids[alone.prompt:]), sampling.features | Features(penalty=True, bias=True)
  given = (np.float32([sampling.values()]), np.uint32([[sampling.seed, 0]]), np.int32([len(ids) - 1]), counts[None], sampling.bias_row(vocab)[None])
  row = scores(to_device(logits[-1:]), features, *map(to_device, given)).numpy()[0]
  gap = float(row[alone.produced[at]] - row[token])
  return gap, bool(abs(gap) <= 6 * NEAR * logits[-1].std() / max(sampling.temperature, 1.0) or margins[-1] < NEAR)

NEAR = (2 * 1e-3) ** .5   # deviations that two forms of a step may round apart

def main() -> int:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--prompts", type=int, default=1000)
  p.add_argument("--ngram", type=int, metavar="N", help="drafts from the text")
  p.add_argument("--mtp", type=int, default=1, metavar="N", help="drafts by the model's block (default 1)")
  p.add_argument("--batches", type=lambda text: [int_at_least(1)(n) for n in text.split(",")], default=(1, 1, 2, 4, 8), metavar="N,N…",
                 help="prompts at once, one of these each time; those without drafts are alone (default 1,1,2,4,8)")
  p.add_argument("--mock", choices=("CUDA", "METAL"))
  p.add_argument("--batch-invariant", action="store_true", help="as llm.py's")
  args = p.parse_args()
  with ExitStack() as stack:
    if args.mock is None: return compare(args, BUILT_IN)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    path, = write_model(pathlib.Path(folder) / "m.gguf", "small-glm", "Q4_0", seed=2, mtp=True, **LEAST)
    stack.enter_context(on_cuda() if args.mock == "CUDA" else on_metal(check=False))   # races are the tests' to find, at a sixth of the speed
    return compare(args, path)

def compare(args:argparse.Namespace, path:pathlib.Path) -> int:
  rng, f = random.Random(1), read_gguf(path)
  model = Transformer.from_gguf(f, CONTEXT, pool=lambda _: PAGES)
  model.batch_invariant = args.batch_invariant
  if args.mock: model.prefill_sizes = model.prefill_sizes[:1]   # what pads larger chunks goes to nobody's page: a race, to the mock
  runner = Runner(model, args.ngram) if args.ngram else Runner(model, args.mtp, MTP(model, load_block(f, model.config)))
  pair, done, differ, near = Pair(runner, PAGES), 0, 0, 0
  start = said = time.monotonic()
  while done < args.prompts:
    requests = [request(rng, pair.vocab) for _ in range(rng.choice(args.batches))]
    done += len(requests)
    for s, alone in pair.both(requests, done):
      if s.produced == alone.produced: continue
      differ += 1
      least = min(len(s.produced), len(alone.produced))
      at = next((i for i in range(least) if s.produced[i] != alone.produced[i]), least)
      if s.error or at == least: gap, tie = float("nan"), False
      else: gap, tie = behind(path, pair.vocab, alone, at, s.produced[at])
      near += tie
      print(f"differs at token {at}: {s.produced[at:at + 3]}, alone {alone.produced[at:at + 3]}, better by {gap:.4f}{', a near tie' if tie else ''}; "
            f"{s.sampling} {s.error or ''}", flush=True)
    if time.monotonic() - said > 20:
      said = time.monotonic()
      print(f"{done} prompts, {differ} differ, {said - start:.0f} s", flush=True)
  gauges = pair.drafted.gauges
  print(json.dumps({"device": model.device, "drafts": "ngram" if args.ngram else "mtp", "batch_invariant": args.batch_invariant, "prompts": done,
                    "differ": differ, "near_ties": near, "draft_tokens": gauges.draft_tokens, "accepted": gauges.accepted}))
  return int(differ > (0 if args.batch_invariant else done / 1000) or near < differ)

if __name__ == "__main__": sys.exit(main())
