"""The built-in model on METAL: the CPU's greedy tokens, by the hand-written MSL and by the portable kernels, in few batches."""
from pathlib import Path
import pytest
from mockmetal import on_metal
from tinygrad import Device
from tinygrad.apps.models import Model, load
from tinygrad.helpers import Context

COUNTS = 16, 40   # the longer prompt's go on into a second page; the portable kernels are slow on the mock
# prompts of a few tokens and of many
PROMPTS = ["The for statement", "The for statement is used to iterate over the elements of a sequence (such as a string, tuple or list)"]
def tokens(model:Model, prompt:str, count:int) -> list[int]: return list(model.generate(model.tokenizer.encode(prompt), count, stop=False))
def built_in() -> Model: return load(Path(__file__).parents[2] / "models/tiny-glm-Q4_0.gguf", max_context=128)

@pytest.mark.parametrize("msl", [0, 1])
def test_the_tokens_of_the_cpu(msl:int):
  expected = tokens(built_in(), PROMPTS[msl], COUNTS[msl])
  with on_metal(check=False), Context(QL_MOE_MSL=msl, QL_SHEXP_MSL=msl):
    model = built_in()
    assert tokens(model, PROMPTS[msl], COUNTS[msl]) == expected and len(set(expected)) > 6
    step, = model.engine.runner.batch.replays.values()
    names = [[call.src[0].arg.name for call in batch] for batch in step.batches]
    # the paravirtual GPU of a hosted Mac has no graphs
    if Device["METAL"].graph is not None: assert len(names) <= 6 and all(len(batch) > 1 for batch in names)
    assert any("msl" in name for batch in names for name in batch) == bool(msl)
