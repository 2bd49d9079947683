"""A server under load: `python -m benchmarks.serving MODEL`, with figures as JSON.

First right clients, 1, 4 and 16 at a time: tokens/s, time to the first token and between tokens. Then a soak: right
clients beside slow, broken, malformed, oversized and unauthorised ones. It fails if the server ends, if an answer
is not the one of a request alone, if a wrong request gets another status, or if the memory grows.

With --peer the same right clients then ask `transformers serve`, too, without and with continuous batching
(`pip install fastapi opentelemetry-api` first). Its answers may not end before their last token: use a model without an
end of a text.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

PROMPTS = ("Once upon a time", "Lily and Ben", "The big dog", "One day a little girl", "In the park")
TOKENS, CLIENTS = 96, (1, 4, 16)
KEY = "benchmark-key-benchmark-key"
MAX_BODY = 100_000
PEERS = ((), ("--continuous-batching",))
# Pages that a server touches for the first time still come in the soak's first part.
FLAT_MIB = 16


@dataclass
class Timed:
    """The times of streamed answers, in seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0

    def figures(self, seconds: float) -> dict[str, float]:
        """Return the figures of answers that took `seconds` together; times in milliseconds."""
        found = {"tokens_per_second": round(self.tokens / seconds, 1)}
        for name, values in (("first_token_ms", self.first), ("inter_token_ms", self.between)):
            ordered = sorted(values)
            found[f"{name}_median"] = round(1000 * statistics.median(ordered), 2)
            found[f"{name}_p99"] = round(1000 * percentile_99(ordered), 2)
        return found


def percentile_99(ordered: Sequence[float]) -> float:
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


@contextmanager
def server(model: Path, arguments: Sequence[str]) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run `megalite serve`; yield its process and its address."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"{KEY}\n")
        limits = ["--api-key-file", str(keys), "--max-body-bytes", str(MAX_BODY), "--model-name", "model"]
        command = [sys.executable, "-m", "megalite", "serve", str(model), "--port", "0", *limits, *arguments]
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            assert process.stdout is not None
            found = re.search(r":(\d+)$", process.stdout.readline().strip())
            try:
                if found is None:
                    raise SystemExit((Path(folder) / "log").read_text())
                yield process, f"http://127.0.0.1:{found[1]}"
            finally:
                process.kill()
                process.wait()


@contextmanager
def peer(model: Path, *more: str) -> Iterator[str]:
    """Run transformers' server with more options; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port), *more]
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(model), *options]
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not answers(address):
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(log.read())
                time.sleep(0.5)
            yield address
        finally:
            process.kill()
            process.wait()


def answers(address: str) -> bool:
    """Return whether a server answers that it is well."""
    try:
        return bool(httpx2.get(f"{address}/health").is_success)
    except httpx2.TransportError:
        return False


def client_of(address: str) -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {KEY}"}
    limits = httpx2.Limits(max_connections=None)
    return httpx2.AsyncClient(base_url=address, headers=headers, timeout=120, limits=limits, verify=False)


OURS: Mapping[str, Any] = {"model": "model", "ignore_eos": True}


def body_of(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": TOKENS, **OURS, **fields}


async def ask(
    client: httpx2.AsyncClient,
    prompt: str,
    timed: Timed | None = None,
    pause: float = 0.0,
    fields: Mapping[str, Any] = OURS,
) -> str:
    """Stream an answer; return its text. pause: seconds between two reads, of a slow client. fields: of the server."""
    last = time.perf_counter()
    text = ""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "stream": True, **fields}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return f"status {response.status_code}: {await response.aread()!r}"
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            now = time.perf_counter()
            if timed is not None:
                (timed.between if timed.tokens else timed.first).append(now - last)
                timed.tokens += 1
            last = now
            if pause:
                await asyncio.sleep(pause)
    return text


async def speed(
    address: str, clients: int, requests: int, fields: Mapping[str, Any] = OURS
) -> dict[str, float]:
    """Return the figures of `clients` that ask at the same time, `requests` each."""
    timed = [Timed() for _ in range(clients)]

    async def one(own: Timed, number: int) -> None:
        for place in range(requests):
            each = Timed()
            await ask(client, PROMPTS[(number + place) % len(PROMPTS)], each, fields=fields)
            own.first += each.first
            own.between += each.between
            own.tokens += each.tokens

    async with client_of(address) as client:
        await ask(client, PROMPTS[0], fields=fields)
        begin = time.perf_counter()
        await asyncio.gather(*(one(own, number) for number, own in enumerate(timed)))
        seconds = time.perf_counter() - begin
    together = Timed(
        [each for own in timed for each in own.first],
        [each for own in timed for each in own.between],
        sum(own.tokens for own in timed),
    )
    return {"clients": clients, **together.figures(seconds)}


@dataclass
class Soak:
    """A soak that runs: the right answers, what was counted, what was wrong, and the seconds of each whole answer."""

    client: httpx2.AsyncClient
    address: str
    end: float
    expected: dict[str, str]
    counts: "Counter[str]" = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def note(self, kind: str, right: bool, found: object) -> None:
        self.counts[kind] += 1
        if not right:
            self.wrong.append(f"{kind}: {found}"[:300])

    async def valid(self, pause: float, kind: str) -> None:
        prompt, begin = random.choice(PROMPTS), time.perf_counter()
        text = await ask(self.client, prompt, pause=pause)
        self.note(kind, text == self.expected[prompt], text)
        if not pause:
            self.waits.append(time.perf_counter() - begin)

    async def broken(self) -> None:
        """Go away in the middle of the answer, or of the request."""
        content = json.dumps(body_of(PROMPTS[0], stream=True, max_tokens=400)).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", int(self.address.rpartition(":")[2]))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        sent = head.encode() + content
        writer.write(sent[: random.choice((10, len(head), len(sent) - 5, len(sent), len(sent)))])
        await asyncio.sleep(random.uniform(0, 0.1))
        writer.transport.abort()
        self.note("broken off", True, "")

    async def refused(self, kind: str, status: int, **request: Any) -> None:
        response = await self.client.post("/v1/completions", **request)
        right = response.status_code == status and bool(response.json()["error"]["message"])
        self.note(kind, right, f"{response.status_code} {response.text}")

    async def another(self) -> None:
        """Ask once, in one of the ways."""
        chance = random.random()
        if chance < 0.5:
            await self.valid(0.0, "valid")
        elif chance < 0.55:
            await self.valid(0.01, "slow")
        elif chance < 0.7:
            await self.broken()
        elif chance < 0.85:
            fields = random.choice(({"max_tokens": -1}, {"prompt": 5}, {"tools": [{}]}, {"temprature": 1}))
            await self.refused("malformed", 400, json=body_of(PROMPTS[0]) | fields)
        elif chance < 0.92:
            await self.refused("oversized", 413, json=body_of("x" * MAX_BODY))
        else:
            headers = {"Authorization": "Bearer wrong"}
            await self.refused("unauthorised", 401, json=body_of(PROMPTS[0]), headers=headers)

    async def run(self) -> None:
        while time.monotonic() < self.end:
            await self.another()


async def soak(
    address: str, process: "subprocess.Popen[str]", clients: int, seconds: float
) -> dict[str, Any]:
    """Return the counts and the memory of a soak; SystemExit with what was wrong."""
    memory: list[float] = []
    async with client_of(address) as client:
        expected = {prompt: await ask(client, prompt) for prompt in PROMPTS}
        state = Soak(client, address, time.monotonic() + seconds, expected)

        async def watch() -> None:
            while time.monotonic() < state.end:
                memory.append(resident_mib(process.pid))
                await asyncio.sleep(seconds / 100)

        await asyncio.gather(watch(), *(state.run() for _ in range(clients)))
        await asyncio.sleep(1)
        metrics = (await client.get("/metrics")).text
    quarter = len(memory) // 4
    early, late = (statistics.median(part) for part in (memory[quarter : 2 * quarter], memory[-quarter:]))
    if "megalite_active_sequences 0.0" not in metrics:
        state.wrong.append("sequences are left in the engine")
    if late - early > FLAT_MIB:
        state.wrong.append(f"memory grows: {early:.0f} MiB in the second quarter, {late:.0f} in the last")
    if state.wrong:
        raise SystemExit("\n".join(["the soak failed:", *state.wrong[:20]]))
    ordered = sorted(state.waits)
    return {
        "seconds": seconds,
        "requests": state.counts.total(),
        **state.counts,
        "answer_s_median": round(statistics.median(ordered), 2),
        "answer_s_p99": round(percentile_99(ordered), 2),
        "answer_s_longest": round(ordered[-1], 2),
        "mib_second_quarter": round(early),
        "mib_last_quarter": round(late),
    }


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process and its children."""
    pages, waiting = 0, [pid]
    while waiting:
        each = waiting.pop()
        pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
        waiting += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def of_transformers(model: Path) -> float:
    """Return the tokens/s of transformers' own loop for one request."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, theirs = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer(PROMPTS[0], return_tensors="pt")
    best = 0.0
    for _ in range(4):
        begin = time.perf_counter()
        theirs.generate(**ids, min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=False)
        best = max(best, TOKENS / (time.perf_counter() - begin))
    return best


def print_speeds(name: str, address: str, requests: int, fields: Mapping[str, Any] = OURS) -> None:
    for clients in CLIENTS:
        row = asyncio.run(speed(address, clients, requests, fields))
        print(json.dumps({"server": name, **row}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the soak (60)")
    parser.add_argument("--clients", type=int, default=24, help="of the soak (24)")
    parser.add_argument("--requests", type=int, default=4, help="of each client whose speed is measured (4)")
    parser.add_argument("--peer", action="store_true", help="measure `transformers serve` beside")
    options, arguments = parser.parse_known_args()
    with server(options.model, arguments) as (process, address):
        print_speeds("megalite", address, options.requests)
        print(json.dumps(asyncio.run(soak(address, process, options.clients, options.seconds))), flush=True)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
        if code:
            raise SystemExit(f"the server ended with {code}")
    for more in PEERS if options.peer else ():
        with peer(options.model, *more) as address:
            name = " ".join(("transformers serve", *more))
            print_speeds(name, address, options.requests, {"model": str(options.model)})
    print(json.dumps({"transformers_tokens_per_second": round(of_transformers(options.model), 1)}))


if __name__ == "__main__":
    main()
