"""The gateway's OpenAPI document, generated from the operations and their request and response classes."""

from collections.abc import Sequence
from importlib import metadata
from typing import Any

import msgspec

from nereid.gateway.failures import STATUS_BY_CODE, Code, ErrorAnswer
from nereid.gateway.http.upload import FORM, JSON, ImageBody
from nereid.gateway.task_endpoint import Operation

_TEXT = {"type": "string"}
_NAME = {"description": "Name of a model, from /v1/models.", "schema": _TEXT}
_MODEL: dict[str, Any] = {"name": "model", "in": "path", "required": True, **_NAME}
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
_FILE = {"type": "string", "contentMediaType": "application/octet-stream"}
_HEADERS = {
    "X-Request-ID": {"description": "Id of the request, from the caller or new.", "schema": _TEXT},
    "traceparent": {"description": "W3C trace context of this hop.", "schema": _TEXT},
}
_RETRY_HEADERS = {
    "Retry-After": {"description": "Whole seconds.", "schema": {"type": "integer", "minimum": 1}}
}


def document(operations: Sequence[Operation], max_timeout_s: float) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    schema_types = [
        schema_type
        for operation in operations
        for schema_type in (operation.response_class, operation.body)
        if schema_type
    ]
    parts = [part for operation in operations for part in operation.parts]
    schemas, component_schemas = msgspec.json.schema_components(
        [*schema_types, ErrorAnswer, *parts], ref_template="#/components/schemas/{name}"
    )
    schema_of = {None: None} | dict(zip(schema_types, schemas[: len(schema_types)], strict=True))
    paths: dict[str, Any] = {}
    for operation in operations:
        answer, body = schema_of[operation.response_class], schema_of[operation.body]
        for path in operation.paths:
            about = _operation(operation, path, answer, body, max_timeout_s)
            paths.setdefault(path, {})[operation.method.lower()] = about
    description = "Image recognition. Every error has a code and a message."
    info = {"title": "Nereid", "version": metadata.version("nereid-serving"), "description": description}
    components = {"schemas": component_schemas, "securitySchemes": _SECURITY_SCHEMES}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(
    operation: Operation, path: str, answer: Any, body: Any, max_timeout_s: float
) -> dict[str, Any]:
    text, names_model = (operation.run.__doc__ or "").strip(), path != operation.path
    about: dict[str, Any] = {
        "operationId": f"{operation.run.__name__}{'_of_model' if names_model else ''}",
        "summary": text.splitlines()[0],
        "responses": _responses(operation, answer, ("not_found",) if names_model else ()),
    }
    parameters = [
        {"name": name, "in": "query", "description": sentence, "schema": schema}
        for name, (sentence, schema) in operation.query.items()
    ]
    if names_model:
        parameters.append(_MODEL)
    if operation.is_limited:
        timeout = {"type": "integer", "minimum": 1, "maximum": int(max_timeout_s * 1000)}
        sentence = "Timeout in milliseconds, from the arrival of the request."
        parameters.append(
            {"name": "X-Request-Timeout-Ms", "in": "header", "description": sentence, "schema": timeout}
        )
    if parameters:
        about["parameters"] = parameters
    if operation.media_types:
        content = {
            media_type: {"schema": _body(operation, media_type, body)} for media_type in operation.media_types
        }
        about["requestBody"] = {"required": True, "content": content}
    if operation.need != "open":
        about["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    return about


def _body(operation: Operation, media_type: str, body: Any) -> dict[str, Any]:
    if media_type == JSON:
        return dict(body)
    if media_type != FORM:
        return _FILE
    several = {"type": "array", "items": _FILE, "minItems": 1}
    properties = {"file": _FILE if operation.body is ImageBody else several}
    return {"type": "object", "properties": properties, "required": ["file"], "additionalProperties": False}


def _responses(operation: Operation, answer: Any, more: tuple[Code, ...]) -> dict[str, Any]:
    plain = _FILE if operation.response_media_type.startswith("image/") else _TEXT
    media_type, schema = (operation.response_media_type, plain) if answer is None else (JSON, answer)
    content = {media_type: {"schema": schema}}
    if operation.other_media_type:
        content[operation.other_media_type] = {"schema": _FILE}
    good = {"description": "The requested result.", "headers": _HEADERS, "content": content}
    responses: dict[str, Any] = {"200": good}
    if operation.path == "/readyz":
        responses["503"] = {**good, "description": "Requests would fail; `reason` says why."}
    common: tuple[Code, ...] = ("invalid_request",)
    if operation.need != "open":
        common = ("invalid_request", "unauthenticated", "forbidden")
    errors = {JSON: {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
    for status, codes in by_status((*common, *operation.errors, *more)).items():
        headers = {**_HEADERS, **(_RETRY_HEADERS if status in (429, 503) else {})}
        description = " or ".join(f"`{code}`" for code in codes)
        responses[str(status)] = {"description": description, "headers": headers, "content": errors}
    return responses


def by_status(codes: Sequence[Code]) -> dict[int, list[Code]]:
    """Group codes by HTTP status."""
    groups: dict[int, list[Code]] = {}
    for code in dict.fromkeys(codes):
        groups.setdefault(STATUS_BY_CODE[code], []).append(code)
    return groups
