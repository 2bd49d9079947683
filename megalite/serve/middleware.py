"""Stands around the application: request ids, keys, the host's name, the log line, and errors nobody expected."""

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megalite.serve.errors import ApiError
from megalite.serve.metrics import ServerMetrics
from megalite.serve.settings import LOOPBACK

log = logging.getLogger("megalite.serve")

OPEN_PATHS = ("/", "/health", "/ready")
"""Paths that need no key: the page, which holds no secret, and what a supervisor asks."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LONGEST_ERROR = 300
_LEFT = 499  # nginx's status of a client that went away, for the log


class Gate:
    """ASGI middleware. keys: API keys; without any, requests must name this machine. paths: the ones metrics show."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], metrics: ServerMetrics, paths: Collection[str]):
        self._app, self._metrics, self._paths = app, metrics, paths
        # Digests have one length, so that comparing shows nothing of a key's.
        self._digests = tuple(_digest(key) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        scope["state"] = {**scope.get("state", {}), "request_id": exchange.id}
        try:
            self._check(scope)
            await self._app(scope, receive, exchange.send)
        except ApiError as error:
            scope["state"]["error"] = error.log_text
            if exchange.status is None:
                await error.response()(scope, receive, exchange.send)
        except Exception:
            log.exception("%s failed", exchange.id)
            if exchange.status is not None:
                raise
            message = f"the server failed; its log has request {exchange.id}"
            scope["state"]["error"] = "its cause stands above"
            failed = ApiError(500, message, code="internal_error")
            await failed.response()(scope, receive, exchange.send)
        finally:
            self._note(scope, exchange)

    def _check(self, scope: Scope) -> None:
        """Raise ApiError for a request that may not enter."""
        headers = Headers(scope=scope)
        if not self._digests:
            # Without a key, another site's page must not reach this server through a name of its own (DNS rebinding).
            name = _host_name(headers.get("host", ""))
            if name not in LOOPBACK:
                message = (
                    f"the host {name[:100]!r} is not localhost, the only one of a server without API key"
                )
                raise ApiError(403, message, code="host_not_allowed")
            return
        if scope["path"] in OPEN_PATHS:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip()) if scheme.lower() == "bearer" else b""
        # All keys are compared, so that the time does not show which one is near.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            problem = "wrong" if key else "missing"
            raise ApiError(
                401,
                f"the API key is {problem}; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _note(self, scope: Scope, exchange: "_Exchange") -> None:
        left = scope["state"].get("left", False)
        status = _LEFT if left or exchange.status is None else exchange.status
        seconds = time.perf_counter() - exchange.begin
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._metrics.requests.labels(path, str(status)).inc()
        self._metrics.request_seconds.observe(seconds)
        # All of these come from the client: ascii() lets no line break and no control character through.
        user, error = scope["state"].get("user"), scope["state"].get("error")
        log.info(
            "%s %s %s %d %.3f s%s%s%s",
            exchange.id,
            ascii(scope["method"])[1:-1],
            ascii(scope["path"])[1:-1][:200],
            status,
            seconds,
            f", {tokens} tokens" if (tokens := scope["state"].get("tokens")) is not None else "",
            f", user {user!a}" if user is not None else "",
            f", error: {ascii(' '.join(error.split()))[1:-1][:_LONGEST_ERROR]}" if error is not None else "",
        )


@dataclass
class _Exchange:
    """A request and its response. status: of a response that has begun."""

    scope: Scope
    send_on: Send
    status: int | None = None

    def __post_init__(self) -> None:
        asked = Headers(scope=self.scope).get("x-request-id", "")
        self.id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        self.begin = time.perf_counter()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.id
            headers["X-Content-Type-Options"] = "nosniff"
        await self.send_on(message)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _host_name(host: str) -> str:
    """Return the name or the address of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
