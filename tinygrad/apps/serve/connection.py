"""A client's connection, as uvicorn and httptools have it, with limits that they lack: of what comes before it is known what is asked for."""
from __future__ import annotations
import asyncio
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD = 64 << 10    # bytes of a request before its body
HEAD_SECONDS = 60.0    # that they may take
LINGER = 2.0           # seconds that a refused client has to read why: were it closed at once, what it still sends would reset the connection before

class HeadTooLong(Exception): pass

class Connection(HttpToolsProtocol):
  """in_head: whether a request is awaited, or has begun, whose body has not; head: bytes of it that have come, without those of the piece that it
  began in; heads: how many have begun. refused: what else comes is dropped"""
  def connection_made(self, transport:asyncio.BaseTransport) -> None:
    super().connection_made(transport)  # type: ignore[arg-type]
    self.refused, self.heads = False, 0
    self._begin_head()
  def connection_lost(self, exc:Exception|None) -> None:
    self.deadline.cancel()
    super().connection_lost(exc)

  def _begin_head(self) -> None:
    self.in_head, self.head, self.parsed, self.heads = True, 0, 0, self.heads + 1
    self.deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)
  def on_message_begin(self) -> None:
    if not self.in_head: self._begin_head()
    super().on_message_begin()
  def on_url(self, url:bytes) -> None:
    self.parsed += len(url)
    super().on_url(url)
  def on_header(self, name:bytes, value:bytes) -> None:
    self.parsed += len(name) + len(value)
    super().on_header(name, value)
  def on_headers_complete(self) -> None:
    self.in_head = False
    self.deadline.cancel()
    if self.parsed > MAX_HEAD: raise HeadTooLong  # which ends the parser, and comes back to send_400_response
    super().on_headers_complete()

  def data_received(self, data:bytes) -> None:
    if self.refused: return
    heads = self.heads
    super().data_received(data)
    if not self.in_head or self.refused or heads != self.heads: return
    self.head += len(data)
    if self.head > MAX_HEAD: self.send_400_response("")

  def send_400_response(self, msg:str) -> None:
    """msg: uvicorn's, of what is no HTTP"""
    status, text = (431, f"the request's header has more than {MAX_HEAD} bytes") if max(self.head, self.parsed) > MAX_HEAD else (400, msg)
    body = msgspec.json.encode({"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}})
    head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    self.transport.write(STATUS_LINE[status] + head + body)
    self.refused = True
    self.deadline.cancel()
    self.deadline = self.loop.call_later(LINGER, self.transport.close)
