"""The server as a deployment of Ray Serve: several engines behind one address, one a GPU, more of them while requests queue.

  python extra/ray_serve.py --model glm-4.7:flash --serve 0.0.0.0:8080 --max-replicas 8                   # the cards of this host
  python extra/ray_serve.py --model glm-4.7:flash --serve 0.0.0.0:8080 --max-replicas 16 --address auto   # those of a cluster
  python extra/ray_serve.py --gpus 0 --max-replicas 2 -t 1                                                # the built-in model on the CPU

Needs the extra `replicas`. Flags that are not below are those of `llm.py --serve`, for every replica. A replica finds or downloads its model on its
own host; the clone is at the same path on all. A replica gets requests once its /health would say ok, and is replaced when it says anything else
for a while. A replica that goes, and all at SIGTERM or Ctrl-C, may end its answers first.

Ray sends a request to the less busy of two replicas. It knows no prefixes, so a conversation's turns go anywhere; and /metrics are one replica's."""
from __future__ import annotations
import argparse, asyncio, os, signal, sys, threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import ray
from ray import serve
from starlette.applications import Starlette
from tinygrad.apps import llm
from tinygrad.apps.serve.app import create_app
from tinygrad.apps.serve.link import LOADING, READY, Link
from tinygrad.apps.serve.settings import HOST, PORT, Settings

APP = "llm"
STORE = 100 << 20   # bytes of Ray's object store: nothing large passes through it
GRACE = 10          # seconds, beyond those that answers may take to end, after which Ray kills a replica that goes
RETRIES = 3         # of a replica that does not load
HEALTH_SECONDS = 2  # from one look at a replica's health to the next; one that fails three of them is replaced

@serve.ingress()
class Replica:
  """One server of the app, and its engine. Ray Serve calls all of this: the app's lifespan starts the engine's process, and ends it."""
  def __init__(self, args:argparse.Namespace):
    self.settings, load = llm.settings_of(args)
    self.link = Link(load)
  def __serve_build_asgi_app__(self) -> Starlette: return create_app(self.link, self.settings)
  async def check_health(self) -> None:
    """Raises what /health says where that is not ok. Ray waits for the first call before it sends requests, so it lasts until the model is loaded."""
    service = self.app.state.service
    while service.state == LOADING: await asyncio.sleep(.1)
    if service.state != READY: raise RuntimeError(service.why_not())

def deployment(own:argparse.Namespace, args:argparse.Namespace) -> serve.Application:
  drain = Settings.drain_seconds if args.drain_seconds is None else args.drain_seconds
  scaling = {"min_replicas": own.min_replicas, "max_replicas": own.max_replicas, "target_ongoing_requests": own.target,
             "upscale_delay_s": own.upscale_delay, "downscale_delay_s": own.downscale_delay}
  return serve.deployment(
    Replica, ray_actor_options={"num_gpus": own.gpus}, autoscaling_config=scaling, max_ongoing_requests=2 * own.target,
    graceful_shutdown_timeout_s=drain + GRACE, health_check_period_s=HEALTH_SECONDS, max_constructor_retry_count=RETRIES).bind(args)

def flags() -> argparse.ArgumentParser:
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
  whole = llm.int_at_least(1)
  p.add_argument("--min-replicas", type=whole, default=1, metavar="N", help="that there always are (default 1)")
  p.add_argument("--max-replicas", type=whole, default=1, metavar="N", help="that there are while requests queue (default 1)")
  p.add_argument("--target", type=whole, default=32, metavar="N",
                 help="requests that a replica answers, or that wait, when no more of them are started (default 32); it takes up to twice as many")
  p.add_argument("--gpus", type=llm.int_at_least(0), default=1, metavar="N", help="of a replica (default 1); 0: it runs on the CPU")
  p.add_argument("--address", default="local", help="of a Ray cluster, or auto for the one that runs here (default: one is started, and ended)")
  p.add_argument("--upscale-delay", type=float, default=30, metavar="S", help="that there are too few replicas before one is started (default 30)")
  p.add_argument("--downscale-delay", type=float, default=600, metavar="S", help="… too many, before one goes (default 600)")
  return p

def main() -> None:
  own, rest = flags().parse_known_args()
  args = llm.parser().parse_args(rest)
  args.serve = args.serve or (HOST, PORT)
  if own.max_replicas < own.min_replicas: sys.exit(f"error: --max-replicas {own.max_replicas} is less than --min-replicas {own.min_replicas}")
  environment = {"PYTHONPATH": str(ROOT), **({} if own.gpus else {"DEV": "CPU"}),
                 **{name: os.environ[name] for name in ("DEV", llm.API_KEY) if name in os.environ}}
  local, ended = own.address == "local", threading.Event()
  ray.init(own.address, runtime_env={"env_vars": environment}, **({"include_dashboard": False, "object_store_memory": STORE} if local else {}))
  serve.start(http_options={"host": args.serve[0], "port": args.serve[1], "ssl_certfile": args.ssl_certfile, "ssl_keyfile": args.ssl_keyfile})
  try:
    serve.run(deployment(own, args), name=APP)
    for which in (signal.SIGINT, signal.SIGTERM): signal.signal(which, lambda *_: ended.set())
    print(f"ready: {'http' if args.ssl_certfile is None else 'https'}://{args.serve[0]}:{args.serve[1]}", flush=True)
    ended.wait()
  except RuntimeError as e: sys.exit(f"error: {e}")   # what a replica said stands above
  finally:
    serve.delete(APP)                # first: the proxies still pass on what its answers have to say
    if local: serve.shutdown()       # a cluster may serve others, too
    ray.shutdown()

if __name__ == "__main__": main()
