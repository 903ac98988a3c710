"""The application: who may ask, what is refused and in which words, who goes away, who is slow, and what is told of how it stands."""
from __future__ import annotations
import asyncio, http.client, json, logging, socket, threading, time
from pathlib import Path
from typing import Any, Iterator
import openai, pytest
from serve_client import Says, ScriptedLink, Server, serving, talking_voice, until
from tinygrad.apps.models import BUILT_IN
from tinygrad.apps.serve import app, requests, service, wire
from tinygrad.apps.serve.answer import PlainText
from tinygrad.apps.serve.link import DRAINING, FAILED, LOADING, READY
from tinygrad.apps.serve.requests import ChatRequest
from tinygrad.apps.serve.settings import Settings
from tinygrad.apps.serve.text import Voice

@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
  with serving() as s: yield s
@pytest.fixture
def log(caplog, monkeypatch) -> Any:
  """The log's lines so far, as they are asked for"""
  monkeypatch.setattr(requests.log, "propagate", True)
  caplog.set_level(logging.INFO, "tinygrad.serve")
  return lambda: [json.loads(r.message) for r in caplog.records]

def body(text: str = "hi", **fields: Any) -> dict[str, Any]: return {"messages": [{"role": "user", "content": text}], **fields}
CHAT = "/v1/chat/completions"

def connected(server: Server, window: int|None = None) -> socket.socket:
  """window: bytes that come before they are read"""
  s = socket.socket()
  if window is not None: s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
  s.settimeout(20)
  s.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
  return s
def post(server: Server, data: dict[str, Any], path: str = CHAT, window: int|None = None) -> socket.socket:
  """A connection that has asked, and reads nothing"""
  s, text = connected(server, window), json.dumps(data).encode()
  s.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
  return s
def deltas(stream: bytes) -> list[dict[str, str]]:
  return [json.loads(line[6:])["choices"][0]["delta"] for line in stream.decode().splitlines() if line.startswith("data: {")]
def idle(server: Server) -> bool: return not server.link.handles and not server.app.state.service.running

# ---- keys ----

KEYS = frozenset(("one", "twö"))
@pytest.mark.parametrize("headers,status", [
  ({}, 401), ({"Authorization": "Bearer one"}, 200), ({"Authorization": "bearer  one"}, 200), ({"X_Api_Key": "one"}, 200),
  ({"X_Api_Key": "two"}, 401),  ({"Authorization": "Bearer onee"}, 401), ({"Authorization": "Basic one"}, 401), ({"Authorization": "one"}, 401),
  ({"Authorization": "Bearer "}, 401)])
def test_keys(with_keys: Server, headers: dict[str, str], status: int):
  for path, data in ((CHAT, body()), ("/v1/models", None), ("/metrics", None), ("/props", None), ("/openapi.json", None), ("/nowhere", None)):
    code, answer, _ = with_keys.ask(path, data, **headers)
    assert code == (404 if path == "/nowhere" and status == 200 else status)
    if status == 401: assert answer["error"]["code"] == "invalid_api_key" and answer["error"]["type"] == "authentication_error"

@pytest.fixture(scope="module")
def with_keys() -> Iterator[Server]:
  with serving(api_keys=KEYS) as s: yield s

def test_open_without_a_key(with_keys: Server):
  assert with_keys.ask("/health")[0] == 200 and with_keys.ask("/v1/health")[0] == 200

def test_the_client_knows_a_wrong_key(with_keys: Server):
  with pytest.raises(openai.AuthenticationError): openai.OpenAI(base_url=with_keys.url + "/v1", api_key="x", max_retries=0).models.list()

def test_keys_are_compared_in_constant_time(with_keys: Server, monkeypatch):
  compared = []
  monkeypatch.setattr(app.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
  assert with_keys.ask("/props", X_Api_Key="one")[0] == 200
  assert sorted(b for _, b in compared) == sorted(key.encode() for key in KEYS)

# ---- the page ----

def test_the_page(tmp_path: Path, monkeypatch):
  (tmp_path / "index.html").write_text("<p>chat</p>")
  (tmp_path / "sub").mkdir()
  (tmp_path / "sub" / "a.js").write_text("1")
  (tmp_path.parent / "secret").write_text("no")
  monkeypatch.setattr(app, "WEB", tmp_path)
  with serving(api_keys=KEYS) as s:
    for path, text in (("/", "<p>chat</p>"), ("/index.html", "<p>chat</p>"), ("/sub/a.js", "1")):
      status, found, headers = s.ask(path)
      assert (status, found) == (200, text) and headers["content-security-policy"].startswith("default-src 'self'; ")
      assert headers["x-content-type-options"] == "nosniff"
    assert "javascript" in s.ask("/sub/a.js")[2]["content-type"]
    for path in ("/../secret", "/%2e%2e/secret", "/sub/../../secret", "/sub", "/gone.js", "//etc/passwd", "/%00", "/" + "x" * 5000, "/%ff%fe"):
      assert s.ask(path)[0] == 401 and s.ask(path, X_Api_Key="one")[0] == 404

def test_no_page(server: Server, monkeypatch, tmp_path):
  monkeypatch.setattr(app, "WEB", tmp_path)
  with serving() as s: assert s.ask("/")[0] == 404

# ---- ids, forms, the log ----

def test_ids(server: Server):
  assert server.ask("/health", X_Request_Id="abc-1")[2]["x-request-id"] == "abc-1"
  made = {server.ask("/health", **headers)[2]["x-request-id"] for headers in ({}, {}, {"X_Request_Id": "a b"}, {"X_Request_Id": "x" * 200})}
  assert len(made) == 4 and all(len(number) == 32 for number in made)
  assert server.ask("/nowhere", X_Request_Id="abc-2")[2]["x-request-id"] == "abc-2"

@pytest.mark.parametrize("path,data,status", [("/nowhere", None, 404), ("/v1/chat/completions", None, 405), ("/v1/models", {}, 405), (CHAT, {}, 400),
                                              ("/v1/messages/nowhere", None, 404)])
def test_errors_have_a_form(server: Server, path: str, data: Any, status: int):
  code, answer, headers = server.ask(path, data)
  assert code == status and headers["content-type"] == "application/json" and answer["error"]["message"]
  assert (answer.get("type") == "error") == path.startswith("/v1/messages")
  if code == 405: assert headers["allow"]

def test_a_fault_of_ours(server: Server, monkeypatch, log):
  monkeypatch.setattr(service, "decode", lambda *a: 1 // 0)
  code, answer, headers = server.ask(CHAT, body())
  assert code == 500 and answer["error"]["type"] == "server_error" and headers["x-request-id"] in answer["error"]["message"]
  assert "Traceback" not in json.dumps(answer) and "\n" not in answer["error"]["message"]
  fault = next(line for line in log() if "traceback" in line)
  assert fault["error"] == "ZeroDivisionError" and fault["id"] == headers["x-request-id"]
  monkeypatch.undo()
  assert server.ask(CHAT, body())[0] == 200

def test_a_fault_of_ours_in_a_stream(server: Server, monkeypatch, log):
  monkeypatch.setattr(PlainText, "push", lambda *a: 1 // 0)
  code, text, headers = server.ask("/v1/completions", {"prompt": "a", "stream": True})
  assert code == 200 and f"the request's id is {headers['x-request-id']}" in text and text.endswith("data: [DONE]\n\n")
  assert any("traceback" in line for line in log())
  until(lambda: idle(server))

def test_the_log(server: Server, log):
  for n, stream in enumerate((False, True)): server.ask(CHAT, body("a secret thing", stream=stream, max_tokens=3), X_Request_Id=f"log-{n}")
  def mine() -> list[Any]: return [line for line in log() if line["id"].startswith("log-")]
  until(lambda: len(mine()) == 2)
  for line in mine():
    assert (line["method"], line["path"], line["status"], line["finish"]) == ("POST", CHAT, 200, "length") and line["ms"] >= 0
    assert (line["prompt_tokens"], line["cached_tokens"], line["answer_tokens"]) == (19, 4, 3)
  assert "secret" not in json.dumps(log())

def test_the_log_of_prompts(log):
  with serving(log_prompts=True) as s: s.ask(CHAT, body("a secret thing"))
  assert any("secret" in line.get("request", "") for line in log())

# ---- other origins ----

def test_cors(server: Server):
  _, _, headers = server.ask("/health", Origin="https://a.example")
  assert "access-control-allow-origin" not in headers
  with serving(cors_origins=("https://a.example",), api_keys=KEYS) as s:
    _, _, headers = s.ask(CHAT, body(), Origin="https://a.example", X_Api_Key="one")
    assert headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in s.ask("/health", Origin="https://b.example")[2]
    with connected(s) as c:
      c.sendall(f"OPTIONS {CHAT} HTTP/1.1\r\nHost: x\r\nOrigin: https://a.example\r\nAccess-Control-Request-Method: POST\r\n"
                "Access-Control-Request-Headers: authorization\r\n\r\n".encode())
      assert c.recv(1 << 16).startswith(b"HTTP/1.1 200")

# ---- how it stands ----

def test_health(server: Server):
  link = server.link
  try:
    for state, words in ((LOADING, "being loaded (weights)"), (DRAINING, "ending"), (FAILED, "it broke")):
      link.state, link.doing, link.why = state, "weights", "it broke"
      status, answer, headers = server.ask("/health")
      assert status == 503 and answer["status"] == state and words in answer["error"]["message"] and headers["retry-after"] == "1"
      status, answer, headers = server.ask(CHAT, body())
      assert status == 503 and words in answer["error"]["message"] and answer["error"]["type"] == "unavailable_error" and headers["retry-after"]
  finally: link.state = READY
  assert server.ask("/health")[:2] == (200, {"status": "ok"})

def test_while_it_loads():
  link = ScriptedLink(talking_voice())
  link.ready = None
  link.start = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
  s = Server(link, Settings(Path("none")), lambda _: link.voice)
  try:
    until(s.app.state.service.loaded.is_set)
    assert s.ask("/health")[0] == 503 and s.ask("/v1/models")[0] == 200 and s.ask("/metrics")[0] == 200 and s.ask("/slots")[0] == 503
    assert s.ask("/tokenize", {"content": "a"})[0] == 503 and s.ask("/props")[0] == 200
    assert "the model is being loaded (starting the engine)" in s.ask(CHAT, body())[1]["error"]["message"]
  finally: s.stop()

def test_while_the_vocabulary_is_read():
  link, read = ScriptedLink(talking_voice()), threading.Event()
  s = Server(link, Settings(Path("none")), lambda _: link.voice if read.wait(20) else None)
  try:
    status, answer, _ = s.ask("/health")
    assert (status, answer["status"], answer["error"]["message"]) == (503, "loading", "the model is being loaded (its vocabulary)")
    assert s.ask(CHAT, body())[0] == s.ask("/v1/models")[0] == s.ask("/tokenize", {"content": "a"})[0] == 503 and s.ask("/metrics")[0] == 200
    read.set()
    until(lambda: s.ask("/health")[0] == 200)
    assert s.ask(CHAT, body())[0] == s.ask("/v1/models")[0] == 200
  finally:
    read.set()
    s.stop()

def test_a_file_that_is_none(tmp_path: Path):
  (tmp_path / "x.gguf").write_bytes(b"GGUX")
  def broken(_: Settings) -> Any: raise KeyError("ours")
  for reader, why in (((), "not a GGUF file"), ((broken,), "KeyError: 'ours'")):
    s = Server(ScriptedLink(talking_voice()), Settings(tmp_path / "x.gguf"), *reader)
    try:
      until(s.app.state.service.loaded.is_set)
      status, answer, _ = s.ask("/health")
      assert status == 503 and answer["status"] == "failed" and why in answer["error"]["message"]
      assert s.ask(CHAT, body())[0] == s.ask("/v1/models")[0] == 503
    finally: s.stop()

def test_metrics(server: Server):
  def value(name: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in server.ask("/metrics")[1].splitlines() if line.startswith(name))
  labels = '{engine="0",model_name="talker"'
  names = ["prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
           "e2e_request_latency_seconds_count", "request_queue_time_seconds_count", "request_prefill_time_seconds_sum",
           "request_decode_time_seconds_sum", "request_prompt_tokens_sum", "request_generation_tokens_sum",
           "request_time_per_output_token_seconds_count"]
  server.ask(CHAT, body(max_tokens=3))
  before = [value(f"vllm:{name}{labels}") for name in names]
  for stream in (False, True): server.ask(CHAT, body(max_tokens=3, stream=stream))
  until(lambda: idle(server))
  assert [value(f"vllm:{name}{labels}") - b for name, b in zip(names, before)] == [14, 6, 2, 4, 2, 2, 1, 4, 14, 6, 2]
  assert value('vllm:request_success_total{engine="0",finished_reason="length"') >= 3
  server.link.gauges = wire.Gauges(running=2, waiting=3, pages=32, queries=10, hits=4, preemptions=1, steps=7, drafts=5, draft_tokens=15,
                                    accepted=[4, 2, 1])
  for name, want in (("num_requests_running", 2), ("num_requests_waiting", 3), ("kv_cache_usage_perc", .25), ("prefix_cache_queries_total", 10),
                     ("prefix_cache_hits_total", 4), ("num_preemptions_total", 1), ("spec_decode_num_drafts_total", 5),
                     ("spec_decode_num_draft_tokens_total", 15), ("spec_decode_num_accepted_tokens_total", 7)):
    assert value(f"vllm:{name}{labels}") == want
  assert value('vllm:cache_config_info{block_size="64",engine="0",model_name="talker",num_gpu_blocks="128"}') == 1
  assert value('vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="talker",position="1"}') == 2
  server.link.gauges = wire.Gauges()

def test_slots_and_props(server: Server):
  props = server.ask("/props")[1]
  assert props["total_slots"] == 4 and props["default_generation_settings"]["n_ctx"] == 4096 and props["model_alias"] == "talker"
  assert props["eos_token"] == "<|end|>" and "/" not in props["model_path"] and props["default_generation_settings"]["params"]["temperature"] == 0
  assert [slot["is_processing"] for slot in server.ask("/slots")[1]] == [False] * 4
  server.link.script = {"wait": Says("</think>on ", endless=True)}
  asked = [post(server, body("wait", stream=True)) for _ in range(4)]
  until(lambda: all(slot["is_processing"] and slot["n_decoded"] > 3 for slot in server.ask("/slots")[1]))
  assert server.ask("/slots?fail_on_no_slot=1")[0] == 503
  for s in asked: s.close()
  until(lambda: idle(server))

def test_tokens(server: Server):
  assert server.ask("/tokenize", {"content": "a<|user|>é"})[1] == {"tokens": [97, 257, 195, 169], "count": 4, "max_model_len": 4096}
  assert server.ask("/tokenize", {"prompt": "<|user|>", "parse_special": False})[1]["count"] == 8
  pieces = server.ask("/tokenize", {"content": "é", "with_pieces": True})[1]["tokens"]
  assert pieces == [{"id": 195, "piece": "\ufffd"}, {"id": 169, "piece": "\ufffd"}]
  prompt = "[gMASK]<sop><|user|>hi<|assistant|><think>"
  ids = server.ask("/tokenize", body())[1]["tokens"]
  assert server.ask("/detokenize", {"tokens": ids})[1] == {"content": prompt, "prompt": prompt}
  assert server.ask("/apply-template", body())[1] == {"prompt": prompt}
  for path, data, param in (("/tokenize", {}, "content"), ("/detokenize", {"tokens": [-1]}, "tokens"), ("/detokenize", {}, "tokens"),
                            ("/tokenize", {"messages": []}, "messages"), ("/apply-template", {"messages": [{"role": "x"}]}, "messages[0].role")):
    code, answer, _ = server.ask(path, data)
    assert code == 400 and answer["error"]["param"] == param

def test_openapi(server: Server):
  found = server.ask("/openapi.json")[1]
  assert found["openapi"].startswith("3.") and {e.path.replace(":path", "") for e in app.ENDPOINTS} == set(found["paths"])
  chat = found["components"]["schemas"]["ChatRequest"]
  assert set(chat["properties"]) == {*ChatRequest.__struct_encode_fields__} and chat["required"] == ["messages"]
  def refs(x: Any) -> Iterator[str]:
    if isinstance(x, dict):
      if isinstance(x.get("$ref"), str): yield x["$ref"]
      for v in x.values(): yield from refs(v)
    elif isinstance(x, list):
      for v in x: yield from refs(v)
  assert all(ref.removeprefix("#/components/schemas/") in found["components"]["schemas"] for ref in refs(found))

# ---- limits ----

def test_a_body_too_long():
  with serving(max_body=1000) as s:
    assert s.ask(CHAT, body())[0] == 200
    code, answer, _ = s.ask(CHAT, body("x" * 100_000))
    assert code == 413 and "at most 1000" in answer["error"]["message"]
    # without its length told: it is not read on
    c = http.client.HTTPConnection("127.0.0.1", int(s.url.rpartition(":")[2]), timeout=20)
    c.request("POST", CHAT, iter([b"x" * 600] * 3), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
    response = c.getresponse()
    assert response.status == 413 and response.getheader("connection") == "close" and "more than the 1000 bytes" in response.read().decode()
    assert s.app.state.service.held == 0 and s.ask(CHAT, body())[0] == 200

def test_refused_while_the_body_comes():
  """Whoever still sends reads why, and no reset"""
  with serving(api_keys=frozenset(["k"])) as s, connected(s) as c:
    size = 1 << 20
    c.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n".encode())
    said = c.recv(1 << 16)
    while not said.endswith(b"}}") and (more := c.recv(1 << 16)): said += more   # the head may come by itself
    assert b" 401 " in said and said.endswith(b"}}")
    for _ in range(16):
      time.sleep(.02)
      c.sendall(b" " * (size // 16))
    assert c.recv(1 << 16) == b""

def test_large_bodies_together():
  with serving(max_body=1000) as s:
    s.app.state.service.held = service.BODIES * 1000
    code, answer, headers = s.ask(CHAT, body())
    assert code == 429 and headers["retry-after"] == "1" and s.app.state.service.held == service.BODIES * 1000

def test_a_body_that_does_not_come(server: Server, monkeypatch):
  monkeypatch.setattr(service, "READ_SECONDS", .05)
  with connected(server) as c:
    c.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    assert b"408" in c.recv(100)
  assert server.app.state.service.held == 0
  with connected(server) as c: c.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
  until(lambda: server.app.state.service.held == 0)

@pytest.mark.parametrize("settings,words", [({"max_queued": 2}, "2 requests wait"), ({"max_queued_tokens": 15}, "prompts of 18 tokens wait")])
def test_the_queue(settings: dict[str, Any], words: str, monkeypatch):
  with serving(**settings) as s:
    go = threading.Event()
    s.link.script = {"wait": Says("</think>done", silent=go)}
    asked = [post(s, body("wait")) for _ in range(2)]
    until(lambda: s.link.queued == 2)
    monkeypatch.setattr(service, "decode", lambda *a: pytest.fail("it was read"))
    code, answer, headers = s.ask(CHAT, body())
    assert code == 429 and words in answer["error"]["message"] and headers["retry-after"] == "1" and answer["error"]["code"] == "queue_full"
    with pytest.raises(openai.RateLimitError):
      openai.OpenAI(base_url=s.url + "/v1", api_key="x", max_retries=0).chat.completions.create(model="", messages=body()["messages"])
    monkeypatch.undo()
    go.set()
    for c in asked: assert b" 200 OK" in c.recv(1 << 16)
    until(lambda: idle(s))
    assert s.ask(CHAT, body())[0] == 200

def test_the_queue_while_a_body_comes(monkeypatch):
  """One is refused before its body has come, and one whose body comes when the queue is full by then"""
  with serving(max_queued=1) as s:
    go, data = threading.Event(), json.dumps(body()).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    s.link.script = {"wait": Says("</think>done", silent=go)}
    with connected(s) as early, connected(s) as late:
      early.sendall(head + data[:5])
      until(lambda: s.app.state.service.held == 5)
      with post(s, body("wait")) as first:
        until(lambda: s.link.queued == 1)
        late.sendall(head)
        assert b" 429 " in late.recv(1 << 16)
        monkeypatch.setattr(service, "decode", lambda *a: pytest.fail("it was read"))
        early.sendall(data[5:])
        assert b" 429 " in early.recv(1 << 16)
        go.set()
        assert b" 200 OK" in first.recv(1 << 16)

def test_large_requests(server: Server):
  tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 1000] * 1000}}}
  long = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 5000
  for data, words in (({"messages": long}, "maximum context length"), (body("x" * 10_000_000), "maximum context length"),
                      ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 10_000}]}, None),
                      (b'{"messages":' + b"[" * 1_000_000, "less deep"),
                      (body(tools=[tool]), "maximum context length")):
    code, answer, _ = server.ask(CHAT, data)
    if words is None: assert code == 200
    else: assert code == 400 and words in answer["error"]["message"]

def test_others_go_on_while_a_large_request_is_read(server: Server):
  server.link.script = {"wait": Says("</think>on ", endless=True)}
  with post(server, body("wait", stream=True)) as c:
    c.recv(1000)
    done, pauses, last = threading.Event(), [], time.monotonic()
    def large() -> None:
      server.ask(CHAT, {"messages": [{"role": "user", "content": "word " * 20}] * 10_000})
      done.set()
    threading.Thread(target=large).start()
    while not done.is_set():
      assert c.recv(1 << 16)
      pauses.append(time.monotonic() - last)
      last = time.monotonic()
  assert len(pauses) > 3 and sorted(pauses)[len(pauses) // 2] < .5
  until(lambda: idle(server))

# ---- who goes away, who is slow ----

@pytest.mark.parametrize("says", [Says("</think>on ", endless=True), Says(silent=threading.Event())])
@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"n": 3, "stream": True}, {"n": 3}])
def test_gone(server: Server, says: Says, fields: dict[str, Any], log):
  server.link.script = {"wait": says}
  with post(server, body("wait", **fields)): until(lambda: len(server.link.handles) == fields.get("n", 1))
  until(lambda: idle(server))
  until(lambda: log())
  assert log()[0]["status"] == 499 and not any("traceback" in line for line in log())

def test_gone_before_it_was_read(server: Server, monkeypatch):
  reading, go = threading.Event(), threading.Event()
  plain = service.decode
  def slow(*args: Any) -> Any:
    reading.set()
    go.wait(20)
    return plain(*args)
  monkeypatch.setattr(service, "decode", slow)
  server.link.script = {"wait": Says("</think>on ", endless=True)}
  with post(server, body("wait")): assert reading.wait(20)
  go.set()
  until(lambda: any(isinstance(order, wire.Abort) for order in server.link.orders[-2:]))
  until(lambda: idle(server))

def test_keep_alive():
  with serving(keepalive_seconds=.05) as s:
    go = threading.Event()
    s.link.script = {"wait": Says("</think>done", silent=go)}
    with post(s, body("wait", stream=True)) as c:
      seen = b""
      while seen.count(b": keep-alive\n\n") < 3: seen += c.recv(1 << 16)
      go.set()
      while b"[DONE]" not in seen: seen += c.recv(1 << 16)
    assert "".join(delta.get("content", "") for delta in deltas(seen)) == "done"

def test_a_slow_reader(server: Server, monkeypatch):
  """What it does not read stays with the link, as one piece, and is not turned into bytes that wait; nothing of it is lost"""
  sent, plain, running = [], service.EventStream._write, server.app.state.service.running
  async def write(self: Any, data: bytes) -> None:
    sent.append(len(data))
    await plain(self, data)
  monkeypatch.setattr(service.EventStream, "_write", write)
  server.link.script = {"wait": Says("x", endless=True)}
  with post(server, body("wait", stream=True), window=1 << 12) as c:
    until(lambda: running)
    reply = next(iter(running.values()))
    until(lambda: reply.handle.ended)
    time.sleep(.1)
    assert reply.handle.held.ids and reply.finish is None and sum(sent) < 400_000
    seen = b""
    while b"[DONE]" not in seen: seen += c.recv(1 << 16)
  lengths = [len(delta.get("reasoning_content", "")) for delta in deltas(seen)]
  assert sum(lengths) == 4096 - 9 and max(lengths) > 1000   # what waited came as one

def test_it_ends_while_an_answer_runs():
  with serving() as s:
    s.link.script = {"wait": Says("</think>on ", endless=True)}
    with post(s, body("wait", stream=True)) as c:
      until(lambda: s.link.handles)
      s.in_loop(lambda: [handle.abort() for handle in s.link.handles.values()])   # as a drain does that is over
      seen = b""
      while b"[DONE]" not in seen: seen += c.recv(1 << 16)
  assert b"the server is ending" in seen

# ---- the model's words ----

def test_voice():
  voice = Voice.from_file(BUILT_IN, None, {"top_k": 7})
  assert voice.name == "Tiny GLM" and voice.sampling.top_k == 7 and voice.created > 0 and voice.longest >= 6 and voice.chat is not None
  assert Voice.from_file(BUILT_IN, "mine").name == "mine" and voice.family.form is None
