"""Limits, keys, clients that go away, and the end of the server."""

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import httpx2
import pytest

from megalite.errors import ConfigError, LaunchError
from megalite.generation.batch_engine import IDLE_STEP_SECONDS
from megalite.parallel.mesh import COLLECTIVE_SECONDS
from megalite.serve.address import listen
from megalite.serve.engine_thread import EngineThread
from megalite.serve.keys import read_keys
from megalite.serve.settings import ServeSettings
from tests.support.serving import MODEL, LettersEngine, Live, live, served
from tests.support.waiting import PATIENCE

KEY = "a-key-of-some-length"


def stream_of(tokens: int = 100) -> bytes:
    """Return the bytes of a request for a stream."""
    body = json.dumps({"model": MODEL, "prompt": "One", "max_tokens": tokens, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def error_of(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_full_queue_answers_429(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        slow = [asyncio.create_task(server.complete(max_tokens=40)) for _ in range(3)]
        await server.until(lambda: server.service.admission.active == 3)
        refused = await server.complete()
        assert error_of(refused) == (429, "queue_full") and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert error_of(await server.complete(n=4)) == (400, "too_many_sequences")
        for response in await asyncio.gather(*slow):
            assert len(response.json()["choices"][0]["text"]) == 40
        assert (await server.complete()).status_code == 200

    served(scenario, tmp_path, pace=0.01, max_requests=2, max_queue=1)


def test_a_request_that_takes_too_long_is_taken_out(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        assert error_of(await server.complete(max_tokens=100)) == (504, "request_timeout")
        streamed = await server.complete(max_tokens=100, stream=True)
        # The stream had begun: its status is 200, and its last event the error.
        last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert streamed.status_code == 200 and last["error"]["code"] == "request_timeout"
        assert "[DONE]" not in streamed.text
        await server.until(lambda: server.engine.cancelled == 2)
        await server.until(lambda: server.service.admission.active == 0)

    served(scenario, tmp_path, pace=0.05, request_seconds=0.3)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_is_taken_out(tmp_path: Path, stream: bool) -> None:
    async def scenario(server: Live) -> None:
        other = asyncio.create_task(server.complete(max_tokens=60))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        sent = stream_of() if stream else stream_of().replace(b'"stream": true', b'"stream":false')
        writer.write(sent)
        await server.until(lambda: len(server.engine.running) == 2)
        if stream:
            await reader.readuntil(b"data: ")
        writer.transport.abort()
        await server.until(lambda: server.engine.cancelled == 1)
        assert len((await other).json()["choices"][0]["text"]) == 60
        text = (await server.client.get("/metrics")).text
        assert "megalite_disconnects_total 1.0" in text
        assert 'megalite_requests_total{path="/v1/completions",status="499"} 1.0' in text

    served(scenario, tmp_path, pace=0.01)


def test_slow_and_cut_bodies_end(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        part = head + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        slow = await server.raw(part)
        assert slow.startswith(b"HTTP/1.1 408 ") and b"body_timeout" in slow
        cut = await server.raw(part, end=True)
        assert not cut or cut.startswith(b"HTTP/1.1 4")
        assert (await server.complete()).status_code == 200

    served(scenario, tmp_path, read_seconds=0.3)


def test_a_body_of_chunks_has_the_limit_too(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        async def chunks():
            for _ in range(20):
                yield b" " * 100

        headers = {"content-type": "application/json"}
        response = await server.client.post("/v1/completions", content=chunks(), headers=headers)
        assert error_of(response) == (413, "body_too_large")

    served(scenario, tmp_path, max_body_bytes=1000)


def test_more_connections_than_allowed_are_refused(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        answer = await server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        while (await server.client.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)

    served(scenario, tmp_path, max_connections=3)


def test_keys(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        assert (await server.complete()).status_code == 200
        bare = {"Authorization": ""}
        for headers in (bare, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
            for path in ("/v1/models", "/metrics", "/v1/nothing"):
                response = await server.client.get(path, headers=headers)
                assert error_of(response) == (401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/", "/health", "/ready"):
            assert (await server.client.get(path, headers=bare)).status_code == 200
        second = {"Authorization": f"bearer {KEY}-2", "Host": "any.example"}
        assert (await server.client.get("/v1/models", headers=second)).status_code == 200

    served(scenario, tmp_path, keys=(KEY, f"{KEY}-2"))


def test_an_address_for_others_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0: .* no API key .* MEGALITE_API_KEY"):
        read_keys(None, "", "0.0.0.0")
    assert read_keys(None, "", "localhost") == ()
    assert read_keys(None, KEY, "0.0.0.0") == (KEY,)
    file = tmp_path / "keys"
    file.write_text(f"# of two people\n{KEY}\n\n {KEY}-2 \n")
    assert read_keys(file, "", "0.0.0.0") == (KEY, f"{KEY}-2")
    file.write_text(f"{KEY}\nshort\n")
    with pytest.raises(ConfigError, match=r"line 2: is no key of at least 16"):
        read_keys(file, "", "localhost")
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        read_keys(file, "", "localhost")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "absent", "", "localhost")


def test_an_address_in_use_is_refused() -> None:
    [held] = listen(ServeSettings(host="127.0.0.1", port=0))
    with held, pytest.raises(LaunchError, match=r"--port \d+ cannot be used .* choose another --port"):
        listen(ServeSettings(host="127.0.0.1", port=held.getsockname()[1]))
    with pytest.raises(LaunchError, match="has no address"):
        listen(ServeSettings(host="no-such-host.invalid", port=0))


def test_small_packets_of_a_stream_are_sent_at_once() -> None:
    [listening] = listen(ServeSettings(host="127.0.0.1", port=0))
    with listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_sigterm_drains(tmp_path: Path) -> None:
    async def run() -> None:
        async with live(tmp_path, pace=0.02, ends=False) as server:
            running = asyncio.create_task(server.complete(max_tokens=30))
            await server.until(lambda: bool(server.engine.running))
            os.kill(os.getpid(), signal.SIGTERM)
            await server.until(lambda: server.service.admission.draining)
            assert (await server.client.get("/ready")).status_code == 503
            assert (await server.client.get("/health")).status_code == 200
            assert error_of(await server.complete()) == (503, "server_stops")
            assert len((await running).json()["choices"][0]["text"]) == 30
            await asyncio.wait_for(server.task, timeout=PATIENCE)
            assert server.engine.closed and len(server.engine.threads) == 1

    asyncio.run(asyncio.wait_for(run(), timeout=PATIENCE))


def test_a_client_that_takes_no_bytes_does_not_hold_the_end_up(tmp_path: Path) -> None:
    page = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def run() -> None:
        async with live(tmp_path, ends=False) as server:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", server.port))
                # Answers to as many requests fill the buffers of the kernel and of the server.
                client.setblocking(False)
                sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(client, page * 5000))
                await server.until(lambda: b'path="/"' in server.service.metrics.text())
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(server.task, timeout=PATIENCE)
                assert server.engine.closed
                sending.cancel()
                await asyncio.wait({sending})

    asyncio.run(asyncio.wait_for(run(), timeout=PATIENCE))


@pytest.mark.parametrize("again", [True, False])
def test_what_is_not_drained_in_time_or_at_a_second_signal_ends(tmp_path: Path, again: bool) -> None:
    async def run() -> None:
        seconds = 60.0 if again else 0.2
        async with live(tmp_path, pace=0.05, ends=False, drain_seconds=seconds) as server:
            running = asyncio.create_task(server.complete(max_tokens=150, stream=True))
            await server.until(lambda: bool(server.engine.running))
            os.kill(os.getpid(), signal.SIGTERM)
            if again:
                await server.until(lambda: server.service.admission.draining)
                os.kill(os.getpid(), signal.SIGINT)
            text = (await running).text
            assert "engine_failed" in text and "[DONE]" not in text
            await asyncio.wait_for(server.task, timeout=PATIENCE)

    asyncio.run(asyncio.wait_for(run(), timeout=PATIENCE))


def test_the_log_names_the_error_that_ended_a_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with live(tmp_path, pace=0.01, ends=False) as server:
            running = asyncio.create_task(server.complete(max_tokens=100, stream=True))
            await server.until(lambda: len(server.engine.running) == 1 and server.engine.steps > 2)
            server.engine.failure = ConnectionResetError("rank 1\nhas ended")
            assert "engine_failed" in (await running).text
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(server.task, timeout=PATIENCE)

    with caplog.at_level("INFO", logger="megalite.serve"):
        asyncio.run(asyncio.wait_for(run(), timeout=PATIENCE))
    [line] = [each for each in caplog.messages if "/v1/completions" in each]
    assert " 200 " in line and line.endswith(", error: the engine has ended: rank 1 has ended")


def test_a_failed_engine_ends_the_server_and_health_says_why(tmp_path: Path) -> None:
    async def run() -> None:
        async with live(tmp_path, pace=0.01, ends=False) as server:
            running = asyncio.create_task(server.complete(max_tokens=100))
            await server.until(lambda: bool(server.engine.running))
            server.engine.failure = RuntimeError("the card is gone")
            assert error_of(await running) == (503, "engine_failed")
            health = await server.client.get("/health")
            assert health.status_code == 503 and health.json()["cause"] == "the card is gone"
            assert (await server.client.get("/ready")).status_code == 503
            assert error_of(await server.complete()) == (503, "engine_failed")
            with pytest.raises(RuntimeError, match="the card is gone"):
                await asyncio.wait_for(server.task, timeout=PATIENCE)

    asyncio.run(asyncio.wait_for(run(), timeout=PATIENCE))


def test_an_idle_engine_takes_empty_steps() -> None:
    async def run() -> None:
        limit = 0.5  # seconds that the other ranks would wait in a collective
        engine = LettersEngine()
        owner = EngineThread(engine, idle_seconds=limit / 10)
        owner.start()
        for _ in range(3):
            before = engine.idle_steps
            await asyncio.sleep(limit)
            assert engine.idle_steps > before
        owner.stop()
        await asyncio.wait_for(owner.stopped(), timeout=PATIENCE)
        assert engine.closed

    asyncio.run(run())


def test_the_interval_of_empty_steps_is_within_the_limit_of_collectives() -> None:
    assert 1 <= IDLE_STEP_SECONDS <= COLLECTIVE_SECONDS / 10
