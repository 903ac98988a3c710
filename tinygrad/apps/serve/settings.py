"""What the flags say to the server. All that serve read it, and none changes it; flags become it in llm.py."""
from __future__ import annotations
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

HOST, PORT = "127.0.0.1", 8080

@dataclass(frozen=True)
class Settings:
  model: Path                               # the GGUF file
  _: KW_ONLY
  alias: str|None = None                    # what clients call the model; None: the file's own name
  host: str = HOST
  port: int = PORT                          # 0: any that is free
  api_keys: frozenset[str] = frozenset()    # none: nobody needs one
  cors_origins: tuple[str, ...] = ()        # that may ask beside the page's own; "*": all
  max_body: int = 16 << 20                  # bytes of a request
  max_queued: int = 256                     # requests that wait for their first token
  max_queued_tokens: int|None = None        # … and the tokens of their prompts; None: as many as four caches hold
  default_max_tokens: int|None = None       # of an answer whose request says nothing; None: the room that the context has
  max_tokens_cap: int|None = None           # the most that a request may ask for, or gets where it says nothing
  sampling: dict[str, Any] = field(default_factory=dict)   # fields of Sampling that flags set, over what the model's makers advise
  keepalive_seconds: float = 15             # from comment to comment of a stream that has nothing to say
  drain_seconds: float = 30                 # that answers have to end in, after the first signal
  ssl_keyfile: Path|None = None
  ssl_certfile: Path|None = None
  log_prompts: bool = False

  @property
  def local(self) -> bool:
    """Whether this machine alone can reach it"""
    return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")
  @property
  def scheme(self) -> str: return "http" if self.ssl_certfile is None else "https"
