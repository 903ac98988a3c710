"""A small model on one card, by layers and by tensors on several: what each says, twice.

  DEV=CUDA python test/external/several_cards.py [--model small-glm] [--quant Q4_0] [--devices 2]      small-v3, small-youtu, … of extra/mkgguf.py
  DEV=CPU python test/external/several_cards.py                                                        to try this script

By layers logits and tokens are to be the bytes of one card's, also of as many answers at once as there are cards, parts of a row each on their way
through them; by tensors sums have another order, and its line says how far they are apart. The exit code is 1 where two runs differ, or layers from
one card.
"""
from __future__ import annotations
import argparse, sys, tempfile
from pathlib import Path
from typing import Any
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
import numpy as np
from extra.mkgguf import MODELS, write_model
from oracle import errors
from tinygrad.apps.engine.sequence import Request
from tinygrad.apps.models import load

PROMPTS, ANSWER = (5, 40, 100), 40   # tokens

def said(path: Path, ids: list[int], **how: Any) -> tuple[np.ndarray, list[list[int]], bool, bool]:
  """Logits float32 (len(ids), vocab), greedy answers to beginnings of ids, whether both are the same again, and whether answers at once are, as many
  as there are devices"""
  model = load(path, max_context=512, **how)
  logits, again = model.logits(ids), model.logits(ids)
  answers, others = ([list(model.engine.generate(ids[:n], ANSWER)) for n in PROMPTS] for _ in range(2))
  lengths = [PROMPTS[i % len(PROMPTS)] for i in range(len(model.transformer.devices))]
  sequences = [model.engine.add(Request(ids[:n], limit=ANSWER)) for n in lengths]
  while model.engine.step(): pass
  together = [s.produced for s in sequences] == [answers[PROMPTS.index(n)] for n in lengths]
  return logits, answers, np.array_equal(logits, again) and answers == others, together

def main() -> None:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--model", choices=[name for name in MODELS if name.startswith("small-")], default="small-glm")
  p.add_argument("--quant", default="Q4_0")
  p.add_argument("--devices", type=int, default=2)
  args, ids, wrong = p.parse_args(), np.random.default_rng(1).integers(0, 256, 150).tolist(), False
  with tempfile.TemporaryDirectory() as folder:
    path, *_ = write_model(Path(folder) / f"{args.model}-{args.quant}.gguf", args.model, args.quant, seed=2)
    logits, answers, same, _ = said(path, ids)
    print(f"one card   the same again: {same}", flush=True)
    wrong |= not same
    for shard in ("layers", "tensors"):
      own, tokens, again, together = said(path, ids, devices=args.devices, shard=shard)
      apart = errors(own, logits)
      print(f"{shard:10s} the same again: {again}; one card's bytes: {np.array_equal(own, logits)}, its answers: {tokens == answers}, "
            f"at once: {together}; "
            f"NMSE {np.median(apart):.1e}, at worst {apart.max():.1e}", flush=True)
      wrong |= not again or (shard == "layers" and not (np.array_equal(own, logits) and tokens == answers and together))
  sys.exit(int(wrong))

if __name__ == "__main__": main()
