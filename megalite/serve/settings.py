"""The settings of a server: its address and its limits. No torch."""

from dataclasses import dataclass

from megalite.data.chat.chat_template import ChatTemplate
from megalite.generation.source import ModelSource

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServeSettings:
    """The address and the limits of a server.

    keys: API keys, one of which every request needs; empty: no key, for requests from this machine alone.
    max_requests: sequences generated at the same time. max_queue: sequences that wait. max_tokens: new tokens of a
    sequence. max_body_bytes: of a request. max_connections: open connections.
    request_seconds: from the arrival of a request to its last byte. read_seconds: for a client to send a request's
    body. drain_seconds: running requests may take as long after SIGTERM. cors_origins: the sites whose pages may send
    requests, such as https://example.org; "*": all of them.
    """

    host: str = "localhost"
    port: int = 8000
    keys: tuple[str, ...] = ()
    max_requests: int = 16
    max_queue: int = 64
    max_tokens: int = 4096
    max_body_bytes: int = 2**20
    max_connections: int = 512
    request_seconds: float = 600.0
    read_seconds: float = 20.0
    drain_seconds: float = 30.0
    cors_origins: tuple[str, ...] = ()

    @property
    def capacity(self) -> int:
        """Sequences that run or wait."""
        return self.max_requests + self.max_queue


@dataclass(frozen=True)
class ServePlan:
    """A model and how it is served.

    name: of the model in requests. template: of conversations; None: no chat. dtype: torch's name of it; None: as
    `inference_dtype` chooses. context_length: the most tokens of prompt and answer; None: the model's positions, at
    most BatchEngine's default.
    """

    source: ModelSource
    settings: ServeSettings
    name: str
    template: ChatTemplate | None
    dtype: str | None
    context_length: int | None = None
