"""The OpenAPI description of the endpoints, from their structs."""
from __future__ import annotations
from typing import Any, Iterable, Protocol
import msgspec

class Described(Protocol):
  method: str
  path: str
  summary: str
  body: type[msgspec.Struct]|None

ERROR = {"type": "object", "properties": {"error": {"type": "object", "properties": {
  "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}}}}

def document(endpoints:Iterable[Described]) -> dict[str, Any]:
  """OpenAPI 3.1"""
  endpoints = list(endpoints)
  bodies = list({e.body: None for e in endpoints if e.body is not None})
  _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
  paths: dict[str, dict[str, Any]] = {}
  for e in endpoints:
    path = e.path.replace(":path}", "}")
    operation: dict[str, Any] = {"summary": e.summary, "responses": {
      "200": {"description": "what was asked for", "content": {"application/json": {}}},
      "default": {"description": "an error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}}}
    if e.body is not None:
      operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{e.body.__name__}"}}}}
    if "{" in path: operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    paths.setdefault(path, {})[e.method.lower()] = operation
  return {"openapi": "3.1.0", "info": {"title": "tinygrad-mla", "version": "1"}, "paths": paths, "security": [{"key": []}, {}],
          "components": {"schemas": {**schemas, "Error": ERROR}, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}}
