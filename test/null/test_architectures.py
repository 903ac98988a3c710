"""What an NVIDIA architecture is given: no instruction that it lacks, each that it has, and by all of them the same tokens."""
import re
from pathlib import Path
import numpy as np, pytest
from extra import bench
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from helpers import WIDE, engine_of, write_mixed
from mockcuda import on_cuda
from oracle import logits
from tinygrad import Device, Tensor, dtypes
from tinygrad.apps.capture import Replay, collected_calls
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.gguf import read_gguf
from tinygrad.apps.mla import RMSNorm, Transformer, sizes_on
from tinygrad.apps.quantized import QuantizedExpertWeights, QuantizedLinear
from tinygrad.dtype import AddrSpace
from tinygrad.engine.realize import compile_linear
from tinygrad.nn.kernel import blocks_at_once, empty, launch
from tinygrad.nn.matvec import empty_codes
from tinygrad.nn.moe import expert_down_launch
from tinygrad.nn.norm_linear import linear_of_codes, norm_linear
from tinygrad.nn.step import PAGE, Step
from tinygrad.nn.intrinsics import HOPPER, MMA_CUDA, MMA_TURING, of_arch, target_of
from tinygrad.uop.ops import Ops, UOp

# from which compute capability on an instruction is there (PTX ISA, its "target ISA notes")
LEAST = {"__dp4a": 61, "dp4a.u32.s32": 61, "mma.sync.aligned.m16n8k8": 75, "mma.sync.aligned.m16n8k16": 80, "cp.async": 80, "ldmatrix": 75,
         "griddepcontrol": 90}
# bytes of shared memory that a block may have (CUDA C++ Programming Guide, technical specifications per compute capability)
MOST_SHARED = {60: 49152, 61: 49152, 70: 98304, 75: 65536, 80: 166912, 86: 101376, 90: 232448, 100: 232448, 120: 101376}
PRECISE = r"\b(exp2|sqrt)\(|\(1/"   # many instructions, and a branch (intrinsics.in_one_instruction)
ARCHS = ("sm_60", "sm_61", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_90a", "sm_100", "sm_120")

@pytest.mark.parametrize("arch", ARCHS)
def test_rows(arch: str):
  t, capability = of_arch(arch), int(re.sub(r"\D", "", arch))
  assert (t.dot4 is None) == (t.dot4_unsigned is None)
  assert (t.dot4 is not None, t.wait is not None, t.warp_groups) == (capability >= 61, capability >= 90, capability == 90)
  assert t.mma is (None if capability < 75 else MMA_TURING if capability < 80 else MMA_CUDA) and t.wait in (None, HOPPER.wait)
  assert (t.copy is not None) == (t.matrices is not None) == (capability >= 80) and t.most_shared_bytes <= MOST_SHARED[capability]

def sources(arch: str, monkeypatch: pytest.MonkeyPatch) -> str:
  """All that a decode step and a prefill step of a block with experts are rendered as. Without tensor cores prefill is plain ops, which say none
  of these instructions."""
  monkeypatch.setitem(bench.LANGUAGES, "CUDA", (bench.CUDARenderer, arch))
  with bench.no_device("CUDA"):
    assert Device.DEFAULT == "NULL" and target_of(Device.DEFAULT) is of_arch(arch)
    runner = Runner(Transformer.from_gguf(bench.with_blocks(bench.stand_in("small-glm"), [1]), 64))
    assert not runner.model.plain_parts(runner.batch.step)
    mma = target_of(Device.DEFAULT).mma is not None
    assert bool(runner.model.plain_parts(runner.chunk_step(32))) != mma
    calls = runner.batch.record(compiled=False).calls + (runner.record_chunk(32, compiled=False).calls if mma else [])
    return "\n".join(c.src[0].src[2].arg for c in compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src if c.src[0].op is Ops.PROGRAM)

@pytest.mark.parametrize("arch", ("sm_60", "sm_75", "sm_80", "sm_90"))
def test_rendered(arch: str, monkeypatch: pytest.MonkeyPatch):
  """By each set of instructions; of sm_61's row, sm_75 without tensor cores, test_rows has each"""
  text, capability = sources(arch, monkeypatch), int(arch.removeprefix("sm_"))
  found = {name for name in LEAST if re.search(re.escape(name) + r"\b", text)}
  assert found <= {name for name, least in LEAST.items() if least <= capability}
  assert not re.search(PRECISE, text)
  best = "mma.sync.aligned.m16n8k16" if capability >= 80 else "mma.sync.aligned.m16n8k8"
  # of large launches; of older tensor cores; of mla_prefill_heads, which does not take the model's short rows
  others = {*LEAST} - {best, "__dp4a", "griddepcontrol"}
  assert found >= {name for name, least in LEAST.items() if least <= capability} - others
  assert ("// blocks at once: 1\n" in text) == (capability >= 90) and ("wgmma" in text) == (capability == 90)

def one_of_each(x: Tensor) -> Tensor:
  def body(buffers: dict[str, UOp]) -> list[UOp]:
    thread = UOp.special(32, "lidx0")
    number = buffers["x"][thread].load()
    return [buffers["y"][thread].store((3.0 / number + (number + 1).rsqrt()) * (number * 2).exp2() + number.sigmoid())]
  return launch("numbers", {"y": empty(x, 32)}, {"x": x}, body)[0]

def test_one_instruction():
  """What a launch divides by, takes the root of, and raises 2 to is one instruction each, without a branch"""
  with bench.no_device("CUDA"):
    replay = Replay(compiled=False)
    replay.run(one_of_each, Tensor.empty(32))
    text = "\n".join(c.src[0].src[2].arg for c in compile_linear(UOp(Ops.LINEAR, src=tuple(replay.calls))).src)
  assert [text.count(name) for name in ("rcp.approx", "rsqrt.approx", "ex2.approx", "__fdividef(1.0f, ")] == [1, 1, 2, 1]
  assert not re.search(PRECISE, text)

@pytest.mark.parametrize("arch,longest", [("sm_75", 512), ("sm_80", 2048), ("sm_90", 2048)])
def test_long_chunks(arch: str, longest: int, tmp_path: Path):
  """Where blocks copy beside other work; a sequence has pages for the longest behind its end"""
  path = write_mixed(tmp_path / "m.gguf", "small-glm", [T.Q4_0], **WIDE | dict(blocks=1, dense=0))
  with on_cuda(arch):
    model = Transformer.from_gguf(read_gguf(path), 4096)
    assert model.prefill_sizes[-1] == longest == sizes_on(model.device)[-1] and model.pages == (4096 + longest) // PAGE
    assert Transformer.from_gguf(read_gguf(path), 600).prefill_sizes[-1] == 512
  assert sizes_on("CPU")[-1] == 512

@pytest.mark.parametrize("count,words,shared,each", [((132,), 250, 0, 1), ((264,), 64, 0, 2), ((264,), 65, 0, None), ((264,), 65, 120000, 1),
                                                     ((2640,), 65, 120000, 1), ((264,), 64, 60000, 2), ((2640,), 64, 60000, None)])
def test_blocks_at_once_by_memory(count: tuple[int, ...], words: int, shared: int, each: int|None):
  """Of 256 threads: two blocks leave each thread 128 registers, twice 64. Three would have room in shared memory, or one, which then has all"""
  numbers = UOp.placeholder((words,), dtypes.float, slot=1, addrspace=AddrSpace.REG)
  memory = UOp.placeholder((shared,), dtypes.uint8, slot=2, addrspace=AddrSpace.LOCAL) if shared else None
  index = UOp.special(count[0], "gidx0") + UOp.special(256, "lidx0")
  stores = [UOp.placeholder((9999,), dtypes.float, slot=0)[index].store(numbers[0].load())]
  if memory is not None: stores.append(memory[index].store(UOp.const(0, dtypes.uint8)))
  assert [said.arg for said in blocks_at_once(HOPPER, stores, 0)] == ([] if each is None else [f"// blocks at once: {each}"])

# a block a multiprocessor; two whose threads have 128 registers each, and too many; a wave of three blocks each; two waves of two, not one of four
@pytest.mark.parametrize("blocks,threads,resident,each", [((132,), 1024, 0, 1), ((33, 4), 512, 1536, 1), ((133,), 256, 0, 2), ((133,), 257, 0, None),
                                                          ((384,), 512, 1536, 3), ((264, 2), 512, 1536, 2)])
def test_blocks_at_once(blocks: tuple[int, ...], threads: int, resident: int, each: int|None):
  index = sum((UOp.special(count, f"gidx{i}") for i, count in enumerate(blocks)), UOp.special(threads, "lidx0"))
  stores = [UOp.placeholder((9999,), dtypes.int, slot=0)[index].store(0)]
  assert [said.arg for said in blocks_at_once(HOPPER, stores, resident)] == ([] if each is None else [f"// blocks at once: {each}"])
  assert not any(blocks_at_once(of_arch(arch), stores, resident) for arch in ("sm_89", "sm_110", "sm_120"))   # some are small

# 9.5 of 128 threads have 54 registers each, 3.4 of 288 have 66; one that has more than there are is one; fewer blocks, all of which run at once
@pytest.mark.parametrize("blocks,threads,registers,each", [(3584, 128, 54, 9), (3584, 288, 66, 3), (3584, 1024, 128, 1), (400, 128, 54, 4)])
def test_blocks_at_once_by_registers(blocks: int, threads: int, registers: int, each: int):
  stores = [UOp.placeholder((9999,), dtypes.int, slot=0)[UOp.special(blocks, "gidx0") + UOp.special(threads, "lidx0")].store(0)]
  assert [said.arg for said in blocks_at_once(HOPPER, stores, 0, registers)] == [f"// blocks at once: {each}"]
  assert blocks_at_once(of_arch("sm_89"), stores, 0, registers) == []

def test_room_beside_a_block():
  """Of a launch whose blocks are all at once, which is to leave room for others': 96 registers a thread, or 88. Where that would be too few, or more
  than there are, and where not all are at once, it says what it would without"""
  def said(blocks: int, room: int, threads: int=256, resident: int=0) -> list[str]:
    stores = [UOp.placeholder((9999,), dtypes.int, slot=0)[UOp.special(blocks, "gidx0") + UOp.special(threads, "lidx0")].store(0)]
    return [word.arg for word in blocks_at_once(HOPPER, stores, resident, room=room)]
  one, two = "// blocks at once: 1", "// blocks at once: 2"
  assert said(104, 512 * 80) == [f"{one}, of 96 registers"] and said(224, 512 * 40) == [f"{two}, of 88 registers"]
  assert said(200, 512 * 80) == [two] and said(104, 512 * 40, threads=128) == [one] and said(104, 0) == [one]
  assert said(900, 512 * 40) == [] and said(900, 512 * 40, resident=512) == [two]

def test_registers_of_blocks_that_take_turns():
  """A wide attn_output says them where a unit of its weights is much work; a launch whose blocks take no turns says nothing"""
  def said(kind: T, *shape: int) -> list[str]:
    nbytes = np.prod(shape) // GGML_QUANT_SIZES[kind][0] * GGML_QUANT_SIZES[kind][1]
    with bench.no_device("CUDA"), collected_calls() as calls:
      weight = QuantizedLinear.load(kind, shape, np.broadcast_to(np.uint8(0), (nbytes,)))
      residual = Tensor.empty(1, shape[0]).contiguous()
      linear_of_codes(empty_codes(residual, 1, shape[1]), weight, residual).realize()
    return [node.arg for call in calls for node in call.src[0].src if node.op is Ops.CUSTOM]
  kinds = T.Q4_0, T.Q4_K, T.Q5_K, T.Q6_K, T.Q8_0, T.Q3_K, T.IQ4_XS
  assert [said(kind, 7168, 8192) for kind in kinds] == [[], *([f"// blocks at once: {n}"] for n in (9, 8, 8)), [], [], []]
  assert said(T.Q4_K, 2720, 5120) == []

@pytest.mark.parametrize("kind", [T.F16, T.BF16], ids=lambda k: k.name)
def test_halves_of_a_turn_too_many(kind: T):
  """A head's last blocks have turns without a job. They read another row: no load has a condition, and none is of 2 bytes"""
  with bench.no_device("CUDA"), collected_calls() as calls:
    weight = QuantizedLinear.load(kind, (154880, 2048), np.broadcast_to(np.uint8(0), (154880 * 2048 * 2,)))
    norm_linear(Step.decode(Tensor.empty(1, dtype=dtypes.int32), Tensor.empty(1, 1, dtype=dtypes.int32)), Tensor.empty(1, 2048),
                RMSNorm(Tensor.empty(2048), 1e-5), [weight])[0].realize()
    program, = [call.src[0] for call in compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src]
  source = next(node.arg for node in program.src if node.op is Ops.SOURCE)
  assert source.count("(*((uint4*)(") == 32 and "?*((" not in source and "unsigned short val" not in source

@pytest.mark.parametrize("kind", [T.F16, T.BF16], ids=lambda k: k.name)
def test_floats_of_chosen_experts(kind: T):
  """DeepSeek-V2-Lite's down: of a row a lane has no more than two units, of 16 registers each"""
  def matrix(cls: type, *shape: int) -> QuantizedLinear: return cls.load(kind, shape, np.broadcast_to(np.uint8(0), (np.prod(shape) * 2,)))
  with bench.no_device("CUDA"), collected_calls() as calls:
    down, shared = matrix(QuantizedExpertWeights, 64, 2048, 1408), matrix(QuantizedLinear, 2048, 2816)
    sel, residual = Tensor.empty(1, 6, dtype=dtypes.int32), Tensor.empty(1, 2048)
    expert_down_launch(Tensor.empty(1, 6, 1408), down, 6, {"sel": sel}, residual, (Tensor.empty(1, 2816), shared)).realize()
    program, = [call.src[0] for call in compile_linear(UOp(Ops.LINEAR, src=tuple(calls))).src]
  assert next(node.arg for node in program.src if node.op is Ops.SOURCE).count("*((uint4*)(") == 2 * 2 * 4

def error(got: np.ndarray, want: np.ndarray) -> float:
  """Of the worst position"""
  return float((((got - want) ** 2).sum(-1) / (want ** 2).sum(-1)).max())

@pytest.mark.parametrize("arch,limit", (("sm_60", 1e-4), ("sm_75", 1e-3)))  # float32 activations, or halves
def test_forward(arch: str, limit: float, tmp_path: Path):
  """Token by token where there is no dp4a, and a prompt at once by the older tensor cores"""
  path = write_mixed(tmp_path / "m.gguf", "small-glm", [T.Q4_0, T.Q6_K], **WIDE | dict(blocks=1, dense=0), seed=4)
  ids = np.random.default_rng(2).integers(0, 320, 3)
  with on_cuda(arch):
    g = engine_of(path, 32)
    model, table = g.runner.model, g.runner.batch.tables
    assert not model.plain_parts(g.runner.batch.step) and target_of(Device.DEFAULT) is of_arch(arch)
    if arch == "sm_75": got = g.logits(ids.tolist())
    else:
      def ids_of(i: int) -> Tensor: return Tensor([i], dtype=dtypes.int32).realize()
      def step(token: int, position: int) -> Tensor: return model.logits(Step.decode(ids_of(position), table), ids_of(token))
      got = np.concatenate([step(t, i).numpy() for i, t in enumerate(ids)])
  assert error(got, logits(path, ids)) < limit
