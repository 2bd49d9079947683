"""Errors of a request, as OpenAI's interface shows them."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

INVALID, SERVER = "invalid_request_error", "server_error"
_RATE_LIMIT = "rate_limit_error"
UNSUPPORTED_CODE = "unsupported"
"""The code of what OpenAI's interface has and this server has not."""
# pydantic's name of a problem -> the code of the error.
_CODES = {"missing": "missing_field", "extra_forbidden": "unknown_field", "none_required": UNSUPPORTED_CODE}
# The same -> a message in place of pydantic's.
_MESSAGES = {
    "extra_forbidden": "the server knows no such field; remove it",
    "none_required": "this server does not support it; leave it out",
}
_LONGEST_NAME = 100


class ApiError(Exception):
    """A request that gets no answer: the HTTP status and the fields of OpenAI's error object.

    param: the field at fault. headers: of the response, beside the usual ones. quotes: whether the message may quote
    the conversation, which the log must not show.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        quotes: bool = False,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.log_text = f"{code} in {param}" if quotes else message
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = _RATE_LIMIT if self.status == 429 else INVALID if self.status < 500 else SERVER
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def of_validation(error: ValidationError) -> ApiError:
    """Return the error of a request body that is not as it should be: its first problem, with the field's name."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = field_name(problem["loc"])
    message = _MESSAGES.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    return ApiError(400, f"{name}: {message}", param=name, code=_CODES.get(problem["type"], "invalid_value"))


def field_name(places: Sequence[str | int]) -> str:
    """Return the name of a field of JSON: messages[0].content."""
    name = ""
    for place in places:
        # A client chooses the name of an unknown field.
        key = place if isinstance(place, int) else place[:_LONGEST_NAME]
        name += f"[{key}]" if isinstance(key, int) else f".{key}" if name else key
    return name
