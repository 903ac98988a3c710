"""Models by name: where their files are, and `load` for Python: a GGUF file becomes a model that answers."""
from __future__ import annotations
import difflib, os, shutil, socket
from pathlib import Path
from typing import Any, Iterator
from urllib.parse import urlsplit
from urllib.request import getproxies
import numpy as np
from tqdm import tqdm
from tinygrad import Device, disk_cache
from tinygrad.apps.chat import Chat
from tinygrad.apps.generate import Generator
from tinygrad.apps.gguf import GGUFError, GGUFTensor, read_gguf
from tinygrad.apps.mla import Config, Transformer
from tinygrad.apps.sampling import Sampling
from tinygrad.apps.tokenizer import Tokenizer
from tinygrad.device import ALL_DEVICES
from tinygrad.helpers import Context, DEV, OSX, getenv
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

ROOT = Path(__file__).resolve().parents[2]
# name: (Hugging Face repository, file)
MODELS = {
  "glm-4.7:flash-unsloth-Q4_0": ("unsloth/GLM-4.7-Flash-GGUF", "GLM-4.7-Flash-Q4_0.gguf"),
  "glm-4.7:flash-unsloth-Q4_K_M": ("unsloth/GLM-4.7-Flash-GGUF", "GLM-4.7-Flash-Q4_K_M.gguf"),
  "glm-4.7:flash-unsloth-Q6_K": ("unsloth/GLM-4.7-Flash-GGUF", "GLM-4.7-Flash-Q6_K.gguf"),
  "glm-4.7:flash-bartowski-Q4_0": ("bartowski/zai-org_GLM-4.7-Flash-GGUF", "zai-org_GLM-4.7-Flash-Q4_0.gguf"),
  "deepseek-v2-lite-Q4_0": ("zhentaoyu/DeepSeek-V2-Lite-Chat-Q4_0-GGUF", "deepseek-v2-lite-chat-q4_0.gguf"),
  "deepseek-v2-lite-Q4_K_M": ("mradermacher/DeepSeek-V2-Lite-GGUF", "DeepSeek-V2-Lite.Q4_K_M.gguf"),
  "youtu-llm:2b-Q4_0": ("AaryanK/Youtu-LLM-2B-GGUF", "Youtu-LLM-2B.q4_0.gguf"),
  "youtu-llm:2b-Q4_K_M": ("AaryanK/Youtu-LLM-2B-GGUF", "Youtu-LLM-2B.q4_k_m.gguf"),
}
ALIASES = {
  "glm-4.7:flash": "glm-4.7:flash-unsloth-Q4_0", "glm-4.7:flash-Q4_0": "glm-4.7:flash-unsloth-Q4_0",
  "glm-4.7:flash-Q4_K_M": "glm-4.7:flash-unsloth-Q4_K_M",
  "deepseek-v2-lite": "deepseek-v2-lite-Q4_0", "youtu-llm:2b": "youtu-llm:2b-Q4_0",
}
BUILT_IN = ROOT / "models" / "tiny-glm-Q4_0.gguf"
DEFAULT_CONTEXT = 4096

class UserError(Exception):
  """What the user can put right. str(e) is one line."""

def find_model(name:str) -> Path:
  """The file of a model by name, alias or path: a path, models/<file> of this folder or the clone, Hugging Face's cache, or a download.
  Raises UserError where there is none to be had."""
  name = ALIASES.get(name, name)
  if name not in MODELS:
    path = Path(os.path.expanduser(name))
    if path.suffix == ".gguf" or os.path.exists(path): return path
    raise UserError(f"--model {name}: neither a file nor a name that --list-models shows")
  repo, file = MODELS[name]
  for folder in (Path("models"), ROOT / "models"):
    if (path := folder / file).is_file(): return path
  from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache, utils
  if isinstance(cached := try_to_load_from_cache(repo, file), str): return Path(cached)
  utils.logging.set_verbosity_error()
  try:
    # without a network the hub's client would retry for half a minute; a proxy may reach what we cannot
    hub = urlsplit(constants.ENDPOINT)
    if not getproxies() and not constants.HF_HUB_OFFLINE:
      socket.create_connection((hub.hostname, hub.port or (80 if hub.scheme == "http" else 443)), timeout=10).close()
    return Path(hf_hub_download(repo, file))
  except Exception as e:  # the hub's client raises a dozen kinds for one fact
    raise UserError(f"--model {name}: could not download it ({type(e).__name__}); fetch https://huggingface.co/{repo}/resolve/main/{file} "
                    f"and put it at {ROOT / 'models' / file}") from None

# devices with kernels of ours, those that tinygrad's plain ops run on, and those that run nothing
DEVICES = ("CPU", "CUDA", "METAL")
OTHERS, NO_DEVICES = tuple(sorted(d for d in ALL_DEVICES if d not in DEVICES)), ("DISK", "NPY", "NULL", "RDMA", "TINYFS")

def _why_not(device:str, e:Exception) -> str:
  """Why a device could not be opened, in words of the one who named it"""
  while isinstance(e, ExceptionGroup): e = e.exceptions[0]            # of several renderers, the first is the one that was wanted
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

def check_device() -> None:
  """Raises UserError, which says why and what there is, where the default device cannot be opened, runs nothing or lacks its compiler.
  A cache of kernels that cannot be written is said once, and done without."""
  names = f"DEV is one of {', '.join(DEVICES)}; by plain ops, slowly, {', '.join(OTHERS)}"
  device = DEV.device
  if device in NO_DEVICES: raise UserError(f"the device {device} runs no kernels; {names}")
  try: compiler = Device[device := Device.DEFAULT].compiler
  except Exception as e:  # each device fails in its own way
    raise UserError(f"cannot open the device {device}: {_why_not(device, e)}; {names}") from None
  if isinstance(compiler, ClangCompiler) and shutil.which(cc := getenv("CC", "clang")) is None:
    raise UserError(f"the device {Device.DEFAULT} needs a C compiler: expected {cc!r} on the PATH, found none; "
                    "`make setup` installs one or says how")
  disk_cache.probe()

# ---- from Python ----

class Model:
  """A loaded model. tokenizer: encode and decode; generator: the cache and the JITs, for one sequence at a time."""
  def __init__(self, transformer:Transformer, tokenizer:Tokenizer, chat:Chat|None, chat_error:str=""):
    self.transformer, self.tokenizer, self.generator = transformer, tokenizer, Generator(transformer)
    self._chat, self._chat_error = chat, chat_error

  def logits(self, ids:list[int]|np.ndarray) -> np.ndarray:
    """ids: (T,) tokens -> float32 (T, vocab), the logits after each. Raises ValueError, ContextFull."""
    return self.generator.logits([int(i) for i in ids])

  def generate(self, ids:list[int]|np.ndarray, count:int|None=None, sampling:Sampling=Sampling(), stop:bool=True) -> Iterator[int]:
    """Continues ids, token by token, up to `count`, the context's end or (stop) the model's end of turn, which is not yielded.
    What the cache holds of an earlier call's tokens is reused. Raises ValueError, ContextFull."""
    ends = self.tokenizer.stop_ids if stop else frozenset()
    for token in self.generator.generate([int(i) for i in ids], count, sampling, ends):
      if token not in ends: yield token

  def complete(self, ids:list[int], count:int|None=None, sampling:Sampling=Sampling(), stops:tuple[str, ...]=()) -> Iterator[str]:
    """The continuation as text, whole characters at a time; it ends before the first of the `stops` strings."""
    stream, held = self.tokenizer.stream(), ""
    for token in self.generate(ids, count, sampling):
      held += stream.push(token)
      if (at := min((held.find(s) for s in stops if s in held), default=-1)) >= 0:
        yield held[:at]
        return
      # what may be the beginning of a stop string waits for the next token
      wait = max((n for s in stops for n in range(1, min(len(s), len(held) + 1)) if held.endswith(s[:n])), default=0)
      if len(held) > wait: yield held[:len(held) - wait]
      held = held[len(held) - wait:]
    held += stream.flush()
    at = min((held.find(s) for s in stops if s in held), default=len(held))
    if held[:at]: yield held[:at]

  def chat(self, messages:list[dict[str, Any]], count:int|None=None, sampling:Sampling=Sampling(), stops:tuple[str, ...]=(),
           **template) -> Iterator[str]:
    """Answers [{"role": "user", "content": …}, …] in the model's own form, as pieces of text. Raises GGUFError where the file has no usable
    template, ContextFull."""
    if self._chat is None: raise GGUFError(self._chat_error)
    return self.complete(self._chat.render(messages, **template), count, sampling, stops)

def load(path:str|Path, max_context:int|None=None, progress:bool=False) -> Model:
  """A model from a GGUF file (any part of one) or a name of --list-models, on the default device (DEV). max_context: tokens the cache holds,
  clamped to the model's own context; 4096 by default. Raises GGUFError, UserError; ValueError for a max_context below 2."""
  if max_context is not None and max_context < 2: raise ValueError(f"max_context: expected 2 or more, found {max_context}")
  f = read_gguf(find_model(str(path)))
  check_device()
  def bar(tensors:list[GGUFTensor]) -> Iterator[GGUFTensor]:
    with tqdm(total=sum(t.data.nbytes for t in tensors), unit="B", unit_scale=True, desc=f.path.name, disable=not progress, leave=False) as t:
      for tensor in tensors:
        yield tensor
        t.update(tensor.data.nbytes)
  tokenizer, chat, chat_error = Tokenizer.from_gguf(f), None, ""
  try: chat = Chat.from_gguf(f, tokenizer)
  except GGUFError as e: chat_error = str(e)
  context = min(max_context or DEFAULT_CONTEXT, Config.from_gguf(f).context_length)
  return Model(Transformer.from_gguf(f, context, bar), tokenizer, chat, chat_error)
