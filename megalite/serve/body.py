"""Reads the JSON body of a request within its limits, and checks it against a model of pydantic."""

import asyncio
import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from megalite.serve.errors import ApiError, of_validation
from megalite.serve.settings import ServeSettings
from megalite.serve.unsupported import without_neutral

Body = TypeVar("Body", bound=BaseModel)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, model: type[Body], settings: ServeSettings) -> Body:
    """Return the body of `request`; ApiError 400, 408, 413 or 415 if it is not one that `model` takes."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"the content type is {kind or 'missing'!r}; send JSON with Content-Type: application/json",
            code="unsupported_media_type",
        )
    content = await _content(request, settings)
    try:
        values = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if _SURROGATE.search(content) and _has_surrogate(values):
        raise ApiError(
            400, "the body has half of a surrogate pair, which is no character", code="invalid_json"
        )
    if not isinstance(values, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    try:
        return model.model_validate(without_neutral(values, model.model_fields), strict=True)
    except ValidationError as error:
        raise of_validation(error) from None


async def _content(request: Request, settings: ServeSettings) -> bytes:
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    content = bytearray()
    try:
        async with asyncio.timeout(settings.read_seconds):
            async for chunk in request.stream():
                content += chunk
                if len(content) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        message = f"the body did not arrive within {settings.read_seconds:g} s"
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the connection ended within the body", code="incomplete_body") from None
    return bytes(content)


def _too_large(limit: int) -> ApiError:
    message = f"the body has more than {limit} bytes, the server's --max-body-bytes"
    return ApiError(413, message, code="body_too_large")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _has_surrogate(values: Any) -> bool:
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
