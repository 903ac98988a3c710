"""Models by name, and `load` for Python: a GGUF file becomes a model that answers.

A name is found, or downloaded, as a file (gguf.py reads it); the device is opened and checked; the file becomes a tokenizer, a chat template and a
Transformer (mla.py), which an Engine runs. `Answer` is a continuation as text, for terminal.py and whoever imports `load`.
"""
from __future__ import annotations
import ctypes, difflib, os, shutil, time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Iterator, NamedTuple
import numpy as np
from tinygrad import Device, disk_cache
from tinygrad.apps.chat import Chat
from tinygrad.apps.engine.engine import MAX_STALL, Engine
from tinygrad.apps.engine.runner import Runner
from tinygrad.apps.gguf import GGUFError, GGUFFile, GGUFTensor, read_gguf
from tinygrad.apps.mla import Config, Transformer, sizes_of
from tinygrad.apps.mtp import MTP, load_block
from tinygrad.apps.quantized import held_bytes
from tinygrad.apps.reasoning import ANSWER, Piece, Reasoning, beginning
from tinygrad.apps.engine.sampling import Sampling
from tinygrad.apps.engine.sequence import Request, Sequence
from tinygrad.apps.engine.speculate import MAX_DRAFTS
from tinygrad.apps.machine import cpuinfo, free_memory, room_for_weights
from tinygrad.apps.screen import doing, note, safe_line
from tinygrad.apps.shard import Placement, PlacementError, Sizes, by_layers, check_room, device_names, fits, gb, memory_of
from tinygrad.apps.tensor_parallel import Devices, ShareSizes, TensorParallel
from tinygrad.apps.tokenizer import Tokenizer
from tinygrad.device import ALL_DEVICES
from tinygrad.helpers import Context, DEV, OSX, getenv
from tinygrad.nn.cpu import is_cpu
from tinygrad.nn.step import PAGE
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

ROOT = Path(__file__).resolve().parents[2]
# name: (Hugging Face repository, file, its size in GB)
MODELS = {
  "glm-4.7:flash-unsloth-Q4_0": ("unsloth/GLM-4.7-Flash-GGUF", "GLM-4.7-Flash-Q4_0.gguf", 17.2),
  "glm-4.7:flash-unsloth-Q4_K_M": ("unsloth/GLM-4.7-Flash-GGUF", "GLM-4.7-Flash-Q4_K_M.gguf", 18.3),
  "glm-4.7:flash-unsloth-Q6_K": ("unsloth/GLM-4.7-Flash-GGUF", "GLM-4.7-Flash-Q6_K.gguf", 24.6),
  "glm-4.7:flash-bartowski-Q4_0": ("bartowski/zai-org_GLM-4.7-Flash-GGUF", "zai-org_GLM-4.7-Flash-Q4_0.gguf", 17.2),
  "deepseek-v2-lite-Q4_0": ("zhentaoyu/DeepSeek-V2-Lite-Chat-Q4_0-GGUF", "deepseek-v2-lite-chat-q4_0.gguf", 9.0),
  "deepseek-v2-lite-Q4_K_M": ("mradermacher/DeepSeek-V2-Lite-GGUF", "DeepSeek-V2-Lite.Q4_K_M.gguf", 10.4),
  "youtu-llm:2b-Q4_0": ("AaryanK/Youtu-LLM-2B-GGUF", "Youtu-LLM-2B.q4_0.gguf", 1.2),
  "youtu-llm:2b-Q4_K_M": ("AaryanK/Youtu-LLM-2B-GGUF", "Youtu-LLM-2B.q4_k_m.gguf", 1.2),
}
ALIASES = {
  "glm-4.7:flash": "glm-4.7:flash-unsloth-Q4_0", "glm-4.7:flash-Q4_0": "glm-4.7:flash-unsloth-Q4_0",
  "glm-4.7:flash-Q4_K_M": "glm-4.7:flash-unsloth-Q4_K_M",
  "deepseek-v2-lite": "deepseek-v2-lite-Q4_0", "youtu-llm:2b": "youtu-llm:2b-Q4_0",
}
BUILT_IN = ROOT / "models" / "tiny-glm-Q4_0.gguf"
DEFAULT_CONTEXT = 4096
# where the cache's size is not given: how many whole contexts it holds, and what part of the free memory it takes at most
CARD_POOL, HOST_POOL = (16, .9), (4, .5)
# the sampling that a model's makers advise, by (tokenizer.ggml.pre, tokens of the vocabulary): models of any size share a pre, the built-in one too
ADVISED: dict[tuple[str, int], dict[str, Any]] = {
  ("glm4", 154880): dict(temperature=1.0, top_p=.95),
  ("deepseek-llm", 102400): dict(temperature=.3, top_p=.95),
  ("youtu", 128256): dict(temperature=1.0, top_k=20, top_p=.95, repeat_penalty=1.05),
}
# Sampling's field: the last part of the file's key
SAMPLING_KEYS = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repeat_penalty": "penalty_repeat"}

class UserError(Exception):
  """An error that the user can put right. str(e) is one line."""

def local_file(name:str) -> Path|None:
  """The file of a name of MODELS on this machine, or None: models/<file> of this folder or the clone's, or in Hugging Face's cache"""
  repo, file, _ = MODELS[name]
  for folder in (Path("models"), ROOT / "models"):
    if (path := folder / file).is_file(): return path
  from huggingface_hub import try_to_load_from_cache
  return Path(cached) if isinstance(cached := try_to_load_from_cache(repo, file), str) else None

def find_model(name:str) -> Path:
  """The file of a model by name, alias or path: a path, a local file, or a download. Raises UserError where there is none to be had."""
  name = ALIASES.get(name, name)
  if name not in MODELS:
    path = Path(os.path.expanduser(name))
    if path.suffix == ".gguf" or os.path.exists(path): return path
    known = {n.casefold(): n for n in (*MODELS, *ALIASES)}
    near = difflib.get_close_matches(name.casefold(), known, 3)
    raise UserError(f"--model {name}: neither a file nor a name that --list-models shows"
                    + (f"; did you mean {' or '.join(known[n] for n in near)}?" if near else ""))
  if (path := local_file(name)) is not None: return path
  import socket
  from urllib.parse import urlsplit
  from urllib.request import getproxies
  from huggingface_hub import constants, hf_hub_download, utils
  repo, file, _ = MODELS[name]
  utils.logging.set_verbosity_error()
  try:
    # without a network the hub's client retries for half a minute; through a proxy this probe would prove nothing
    hub = urlsplit(constants.ENDPOINT)
    if not getproxies() and not constants.HF_HUB_OFFLINE:
      socket.create_connection((hub.hostname, hub.port or (80 if hub.scheme == "http" else 443)), timeout=10).close()
    return Path(hf_hub_download(repo, file))
  except Exception as e:  # the hub's client raises a dozen classes
    raise UserError(f"--model {name}: could not download it ({type(e).__name__}); fetch https://huggingface.co/{repo}/resolve/main/{file} "
                    f"and put it at {ROOT / 'models' / file}") from None

# devices with kernels of their own in nn/, those that plain ops run on, and those that run nothing
DEVICES = ("CPU", "CUDA", "METAL")
OTHERS, NO_DEVICES = tuple(sorted(d for d in ALL_DEVICES if d not in DEVICES)), ("DISK", "NPY", "NULL", "RDMA", "TINYFS")

def _why_not(device:str, e:Exception) -> str:
  """Why a device could not be opened, as a person can read it"""
  while isinstance(e, ExceptionGroup): e = e.exceptions[0]            # of several renderers the first was asked for
  kind, text = device.split(":")[0], " ".join(str(e).split())
  if isinstance(e, ModuleNotFoundError) and e.name == f"tinygrad.runtime.ops_{kind.lower()}":
    near = difflib.get_close_matches(kind, (*DEVICES, *OTHERS), 1)
    return "there is none of that name" + (f", did you mean {near[0]}?" if near else "")
  if kind == "METAL" and not OSX: return "it is there on a Mac alone (MOCKMETAL=1 runs a mock of it)"
  if "failed to load library cuda" in text: return "found no NVIDIA driver (libcuda)"
  if "failed to load library nvrtc" in text: return "found no NVRTC (libnvrtc, of the CUDA toolkit or pip's nvidia-cuda-nvrtc)"
  if "has no renderer" in text:
    with Context(DEV=kind): return f"{text.split(', did you mean')[0]}, but {', '.join(map(Device[kind]._renderer_name, Device[kind].renderers))}"
  return text or type(e).__name__

def choose_device() -> None:
  """Sets DEV where it names no device: METAL on a Mac, CUDA where a card's driver is here, else CPU. tinygrad itself would try eight kinds."""
  if DEV.device: return
  if OSX: device = "METAL"
  else:
    try: device = "CUDA" if ctypes.CDLL("libcuda.so.1").cuInit(0) == 0 else "CPU"
    except OSError: device = "CPU"
  DEV.value = os.environ["DEV"] = device  # workers that compile read the environment

def check_device() -> None:
  """Chooses the default device and opens it. Raises UserError, which says why and what devices there are, where it cannot be opened, runs nothing or
  lacks its compiler. A cache of kernels that cannot be written is noticed here, and said once."""
  choose_device()
  names = f"DEV is one of {', '.join(DEVICES)}; by plain ops, slowly, {', '.join(OTHERS)}"
  if (device := DEV.device) in NO_DEVICES: raise UserError(f"the device {device} runs no kernels; {names}")
  try: open_device(Device.DEFAULT)
  except UserError as e: raise UserError(f"{e}; {names}") from None
  disk_cache.probe()

def open_device(device:str) -> None:
  """Raises UserError, which says why, where it cannot be opened or lacks its compiler or instructions"""
  try: compiler = Device[device].compiler
  except Exception as e:  # each device fails in its own way
    raise UserError(f"cannot open the device {device}: {_why_not(device, e)}") from None
  if isinstance(compiler, ClangCompiler) and shutil.which(cc := getenv("CC", "clang")) is None:
    raise UserError(f"the device {device} needs a C compiler: expected {cc!r} on the PATH, found none; `make setup` installs one or says how")
  if isinstance(compiler, ClangCompiler) and (flags := cpuinfo("flags").split()) and "f16c" not in flags:
    raise UserError(f"the device {device} needs an x86 CPU with F16C (most since 2013): found one without; a virtual machine's type may hide it")

# ---- several devices ----

SHARDS = "layers", "tensors"   # how a model lies on several devices
MOST_SHARES = 16               # devices that a model is cut over, at most, in what is proposed

def devices_here() -> int:
  """How many devices of the default one's kind this machine has; the CPU stands for any number, which is for tests"""
  return 1 << 12 if Device.DEFAULT.split(":")[0] == "CPU" else Device[Device.DEFAULT].count()

def open_devices(count:int, cpu_experts:int) -> tuple[str, ...]:
  """The default device and the next of its kind, and beside them the CPU where it is to have experts. Raises UserError where one cannot be opened."""
  names, here = device_names(Device.DEFAULT, count), devices_here()
  if count > 1 and int(names[-1].partition(":")[2] or 0) >= here:
    kind = names[0].split(":")[0]
    raise UserError(f"--devices {count}: this machine has {here} {kind} device{'s' * (here > 1)}, found none that is {names[-1]}")
  for name in (*names, *["CPU"] * (cpu_experts > 0)): open_device(name)
  return names

def place_model(f:GGUFFile, sizes:Sizes, names:tuple[str, ...], cpu_experts:int, tokens:int, fewer:str) -> Placement:
  """By layers on these devices, where each has room for its part with the rows of so many tokens. Says so where it has none for copies of what lies
  on the CPU. fewer: the flag by which there are fewer. Raises UserError."""
  first, blocks, here = names[0], len(sizes.blocks), devices_here()
  room = {device: room_for_weights(device) for device in {*names, "CPU"}}
  def free(device:str) -> int|None: return room.get(memory_of(device), room[first])
  def lean(names:tuple[str, ...], experts:int) -> Placement: return replace(by_layers(sizes, names, tokens, experts), brings=False)
  def on(count:int) -> Placement: return lean(device_names(first, count), cpu_experts)
  def ways() -> Iterator[tuple[str, Placement]]:
    """What else could be asked for; the CPU's devices and experts lie in one memory"""
    if memory_of(first) == "CPU": return
    counts = range(len(names) + 1, blocks + 1)
    yield from ((f"--devices {count}", on(count)) for count in counts if count <= here)
    yield from ((f"--cpu_experts {n}", lean(names, n)) for n in range(cpu_experts + 1, len(sizes.with_experts) + 1))
    yield from ((f"{count} such devices", on(count)) for count in counts if count > here)
  try:
    place = lean(names, cpu_experts)
    check_room(sizes, place, tokens, free, fewer, ways())
  except PlacementError as e: raise UserError(f"{f.path.name}: {e}") from None
  if not fits(sizes, bringing := replace(place, brings=True), tokens, free):
    device, size = sizes.brought(bringing).most_common(1)[0]
    note(f"{device} has no room for copies of a block's experts, {gb(size)}: long prompts wait for the CPU, too")
    return place
  return bringing

def check_shares(f:GGUFFile, sizes:ShareSizes, names:tuple[str, ...], tokens:int, fewer:str) -> None:
  """By tensors on these devices: raises UserError where one has no room for its share with the rows of so many tokens"""
  room, first, here = {device: room_for_weights(device) for device in {*names, "CPU"}}, names[0], devices_here()
  def free(device:str) -> int|None: return room.get(memory_of(device), room[first])
  counts = range(len(names) + 1, MOST_SHARES + 1) if memory_of(first) != "CPU" else []
  ways = ((f"--devices {n}" if n <= here else f"{n} such devices", Devices(device_names(first, n))) for n in counts)
  try: check_room(sizes, Devices(names), tokens, free, fewer, ways)
  except PlacementError as e: raise UserError(f"{f.path.name}: {e}") from None

def advised_sampling(f:GGUFFile, tokenizer:Tokenizer) -> Sampling:
  """The sampling that the model's makers advise: the file's general.sampling.* over its family's row of ADVISED; greedy where there is neither.
  Raises GGUFError for a key out of range."""
  values = dict(ADVISED.get((tokenizer.pre, tokenizer.n_vocab), {}))
  for field, last in SAMPLING_KEYS.items():
    if (value := f.key(key := f"general.sampling.{last}", int if field == "top_k" else float, default=None)) is None: continue
    if field == "top_k": value = max(value, 0)  # -1 is another way to say all
    try: values |= {field: getattr(Sampling(**{field: value}), field)}
    except ValueError as e: raise GGUFError(f"{f.path}: key {key}: {str(e).partition(': ')[2]}") from None
  return Sampling(**values)

class Words(NamedTuple):
  """What a file says of its model's words, and no weight. chat: None where it has no usable template; chat_error says why. name: the file's own.
  sampling: what its makers advise"""
  tokenizer: Tokenizer
  chat: Chat|None
  chat_error: str
  name: str
  sampling: Sampling

def words_of(f:GGUFFile) -> Words:
  """Raises GGUFError"""
  tokenizer, chat, chat_error = Tokenizer.from_gguf(f), None, ""
  try: chat = Chat.from_gguf(f, tokenizer)
  except GGUFError as e: chat_error = str(e)
  return Words(tokenizer, chat, chat_error, f.key("general.name", str, default=None) or f.path.stem, advised_sampling(f, tokenizer))

# ---- from Python ----

def out_of_memory(e:MemoryError) -> str:
  """As a person reads it: one line"""
  text = " ".join(str(e).split())
  return f"out of memory{text and f': {text}'}; a smaller --max_context needs less"

class Until:
  """Text as it comes, up to the first of the `stops` strings; text that may be the beginning of one waits for more. found: whether one has come.
  Raises ValueError for stops that are not texts of one character or more."""
  def __init__(self, stops:tuple[str, ...]):
    if isinstance(stops, str) or not all(isinstance(s, str) and s for s in stops):
      raise ValueError(f"stops: expected a list of texts of one character or more, found {stops!r}")
    self.stops, self.held, self.found = stops, "", False
  def push(self, text:str, last:bool=False) -> str:
    text = self.held + text
    stop = min((text.find(s) for s in self.stops if s in text), default=-1)
    self.found |= stop >= 0
    keep = stop if stop >= 0 else len(text) - (0 if last else beginning(text, self.stops))
    self.held = "" if self.found else text[keep:]
    return text[:keep]

class Answer:
  """The continuation of `ids`: iterate, once, for its pieces. It ends before the first of the `stops` in the answer (a stop in the reasoning does not
  count). tokens: how many have come; began, first, last: when the call, the first token and the last one came, by time.perf_counter; done: whether
  the model ended it, or a stop did; full: whether the context has no room for more of it. Iterating raises ValueError, ContextFull."""
  def __init__(self, model:Model, ids:list[int], count:int|None=None, sampling:Sampling=Sampling(), stops:tuple[str, ...]=()):
    self.model, self.ids, self.count, self.sampling, self.until = model, ids, count, sampling, Until(stops)
    self.tokens, self.done, self.began, self.first, self.last = 0, False, 0.0, 0.0, 0.0
    self.sequence: Sequence|None = None

  def __iter__(self) -> Iterator[Piece]:
    tokenizer, engine, self.began = self.model.tokenizer, self.model.engine, time.perf_counter()
    self.sequence = engine.add(Request(self.ids, self.sampling, tokenizer.stop_ids, self.count))
    reasoning = None
    try:
      for tokens in engine.bursts(self.sequence) if not self.until.stops else ([token] for token in engine.stream(self.sequence)):
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.done = tokens[-1] in tokenizer.stop_ids
        shown = tokens[:-1] if self.done else tokens
        self.tokens += len(shown)
        reasoning = reasoning or Reasoning(tokenizer, self.sequence.ids[:self.sequence.prompt])
        yield from self._cut(reasoning.push(*shown))
        if self.done or self.until.found: break
      if reasoning is not None and not self.until.found: yield from self._cut(reasoning.flush())
      if text := self.until.push("", last=True): yield Piece(ANSWER, text)
      self.done |= self.until.found
    finally: engine.abort(self.sequence)

  def _cut(self, pieces:Iterable[Piece]) -> Iterator[Piece]:
    """The pieces, with the answer's cut before a stop"""
    for kind, text in pieces:
      if kind != ANSWER and (held := self.until.push("", last=True)): yield Piece(ANSWER, held)
      if kind == ANSWER: text = self.until.push(text)
      if text: yield Piece(kind, text)
      if self.until.found: return

  @property
  def full(self) -> bool: return self.sequence is not None and self.sequence.full
  @property
  def seconds_to_first(self) -> float: return self.first - self.began
  @property
  def tokens_a_second(self) -> float|None: return (self.tokens - 1) / (self.last - self.first) if self.tokens > 1 else None

class Model:
  """A loaded model. tokenizer: encode and decode; engine: answers as many at once as there are; name: the file's own; sampling: what its makers
  advise (the methods draw greedily unless they are given one). Its methods may be called from several threads, and their iterators mixed."""
  def __init__(self, runner:Runner, tokenizer:Tokenizer, chat:Chat|None, chat_error:str="", name:str="", sampling:Sampling=Sampling(),
               max_stall:float=MAX_STALL):
    self.transformer, self.tokenizer = runner.model, tokenizer
    self.engine = Engine(runner, runner.model.pool, max_stall=max_stall)
    self.name, self.sampling, self._chat, self._chat_error = name, sampling, chat, chat_error

  def logits(self, ids:list[int]|np.ndarray) -> np.ndarray:
    """ids: (T,) tokens -> numpy float32 (T, vocab), the logits after each. Raises ValueError, ContextFull."""
    return self.engine.logits(ids)

  def generate(self, ids:list[int]|np.ndarray, count:int|None=None, sampling:Sampling=Sampling(), stop:bool=True) -> Iterator[int]:
    """The tokens that continue ids, up to `count` of them, the context's end or (stop) the model's end of turn, which is not yielded. The
    cache's rows of a common beginning are reused. Raises ValueError, ContextFull."""
    ends = self.tokenizer.stop_ids if stop else frozenset()
    for token in self.engine.generate(ids, count, sampling, ends):
      if token not in ends: yield token

  def render(self, messages:list[dict[str, Any]], **template) -> list[int]:
    """The ids of the prompt that asks for an answer to [{"role": "user", "content": …}, …] in the model's own form. template: variables for the chat
    template, enable_thinking=False for one. Raises GGUFError where the file has no usable template, MessageError (a ValueError) for messages that
    are none."""
    if self._chat is None: raise GGUFError(self._chat_error)
    return self._chat.render(messages, **template)

  def complete(self, ids:list[int], count:int|None=None, sampling:Sampling=Sampling(), stops:tuple[str, ...]=()) -> Iterator[str]:
    """The continuation of ids as text, whole characters at a time; it ends before the first of the `stops` strings. Raises as generate."""
    for piece in Answer(self, ids, count, sampling, stops): yield piece.text

  def chat(self, messages:list[dict[str, Any]], count:int|None=None, sampling:Sampling=Sampling(), stops:tuple[str, ...]=(),
           **template) -> Iterator[str]:
    """The answer to [{"role": "user", "content": …}, …], as pieces of text, reasoning and its marks included (Answer tells them apart). Raises as
    render, ValueError, ContextFull."""
    return self.complete(self.render(messages, **template), count, sampling, stops)

def pool_pages(model:Transformer, cache_tokens:int|None, more:int=0, brought:Counter[str]|None=None) -> int:
  """Pages of the cache, nobody's among them: for `cache_tokens`; without it, what fits beside the weights, but no more than several contexts need.
  more: blocks that have rows in the pages beside the model's own; brought: of each memory, bytes of what prompts copy"""
  if cache_tokens is not None: return -(-cache_tokens // PAGE) + 1
  contexts, share = HOST_POOL if is_cpu(model.device) else CARD_POOL
  a_page = model.row_bytes // len(model.blk) * PAGE
  blocks = Counter(map(memory_of, [*model.cache_devices, *[model.device] * more]))
  def left(memory:str) -> int: return int((free_memory(memory) or 0) * share) - (brought or Counter())[memory] - model.head_row_bytes
  fitting = min(left(memory) // (count * a_page) for memory, count in blocks.items())
  return max(min(contexts * model.pages, fitting), model.pages) + 1

def load(path:str|Path, max_context:int|None=None, progress:bool=False, cache_tokens:int|None=None,
         max_stall:float=MAX_STALL, cache_bits:int=16, drafts:int=0, mtp:str|Path|None=None, devices:int=1, cpu_experts:int=0,
         shard:str="layers", batch_invariant:bool=False) -> Model:
  """A model from a GGUF file (any part of one) or a name of --list-models, on the default device (DEV). max_context: tokens the cache holds, at most
  the model's own context; 4096 by default. progress: whether stderr shows how far it is. cache_tokens: of all sequences together; see pool_pages.
  max_stall: seconds from token to token of an answer, at most, while another's prompt is read. cache_bits: of a number of the cache, 16 (on a CPU 32)
  or 8. drafts: tokens of each answer that a step may verify, 0 to MAX_DRAFTS, guessed from the answer and its prompt. mtp: the file of an MTP block
  that guesses them in place of that, one by default; it may be the model's own. devices: on how many of the machine's the blocks are shared out
  (apps/shard.py). cpu_experts: of how many blocks the experts lie on the CPU. shard: layers, or tensors: each block is cut over all devices
  (apps/tensor_parallel.py). batch_invariant: whether a token of a step has the numbers that it would have alone, to the bit, whatever is decoded
  beside it; see Transformer. Raises GGUFError, UserError, also for what does not fit; ValueError for
  a max_context or cache_tokens that is no whole number of 2 or more, for a max_stall that is not above 0, for other cache_bits, drafts, devices,
  cpu_experts and shard; MemoryError."""
  for name, value in (("max_context", max_context), ("cache_tokens", cache_tokens)):
    if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__") or value < 2):
      raise ValueError(f"{name}: expected a whole number of 2 or more, found {value!r}")
  if not isinstance(max_stall, (int, float)) or isinstance(max_stall, bool) or not max_stall > 0:
    raise ValueError(f"max_stall: expected seconds, more than 0, found {max_stall!r}")
  if cache_bits not in (8, 16): raise ValueError(f"cache_bits: expected 8 or 16, found {cache_bits!r}")
  if isinstance(drafts, bool) or not isinstance(drafts, int) or not 0 <= drafts <= MAX_DRAFTS:
    raise ValueError(f"drafts: expected a whole number from 0 to {MAX_DRAFTS}, found {drafts!r}")
  for name, value, least in (("devices", devices, 1), ("cpu_experts", cpu_experts, 0)):
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
      raise ValueError(f"{name}: expected a whole number of {least} or more, found {value!r}")
  if shard not in SHARDS: raise ValueError(f"shard: expected {' or '.join(SHARDS)}, found {shard!r}")
  by_tensors = shard == "tensors" and devices > 1
  flags = {"--cpu_experts": cpu_experts, "--draft_mtp": mtp is not None, "--batch_invariant": batch_invariant}
  if by_tensors and any(flags.values()):
    raise UserError(f"--shard tensors: expected no {next(flag for flag, there in flags.items() if there)}, which --shard layers takes")
  f = read_gguf(find_model(str(path)))
  config = Config.from_gguf(f)  # first: another architecture is refused before anything else is read
  if progress: doing(f"{f.path.name}: reading the vocabulary")
  check_device()
  names = open_devices(devices, cpu_experts)
  def bar(tensors:list[GGUFTensor]) -> Iterator[GGUFTensor]:
    from tqdm import tqdm
    doing("")
    with tqdm(total=sum(t.data.nbytes for t in tensors), unit="B", unit_scale=True, desc=safe_line(f.path.name), leave=False) as t:
      for tensor in tensors:
        yield tensor
        t.update(tensor.data.nbytes)
  words, context = words_of(f), min(max_context or DEFAULT_CONTEXT, config.context_length)
  shown, tokens, fewer = [bar] if progress else [], cache_tokens or context, "--cache_tokens" if cache_tokens else "--max_context"
  if by_tensors:
    check_shares(f, ShareSizes(f, cache_bits, devices), names, tokens, fewer)
    cut = TensorParallel.from_gguf(f, names, context, *shown, pool=lambda model: pool_pages(model, cache_tokens), cache_bits=cache_bits)
    return Model(Runner(cut, drafts), *words, max_stall)
  sizes = sizes_of(f, cache_bits)
  if mtp is not None:
    drafting = f if str(mtp) == str(path) else read_gguf(find_model(str(mtp)))
    own = [held_bytes(t.type, t.shape) for name, t in drafting.tensors.items() if name.startswith(f"blk.{config.n_blocks}.")]
    sizes = replace(sizes, home=sizes.home + sum(own), largest=max([sizes.largest, *own]), drafting=1)
  place = place_model(f, sizes, names, cpu_experts, tokens, fewer)
  block = None if mtp is None else load_block(drafting, config, *shown)
  transformer = Transformer.from_gguf(f, context, *shown, device=place, cache_bits=cache_bits,
                                      pool=lambda model: pool_pages(model, cache_tokens, int(block is not None), sizes.brought(place)))
  transformer.batch_invariant = batch_invariant
  runner = Runner(transformer, drafts) if block is None else Runner(transformer, drafts or 1, MTP(transformer, block))
  return Model(runner, *words, max_stall)
