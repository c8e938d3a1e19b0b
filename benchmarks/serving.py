"""Many clients at once against `graftwork serve`: are answers those of requests alone, and how much
faster do they come?

    python benchmarks/serving.py MODEL --recipe int8 --clients 64 --requests 200

A server process on loopback is asked everything one at a time first, then by all clients at once:
each answer must be the same. Requests are greedy, with prompts and lengths of all sizes, drawn from
--seed. Memory is the server's, at the beginning and at the end. --against URL asks another
OpenAI-compatible server the same instead; what it answers is compared with itself alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

TEXT = Path(__file__).parents[1] / "graftwork" / "data" / "sample.txt"
READY = 600.0
"""Seconds in which the server must answer."""


class Answer(NamedTuple):
    """seconds: that it took. tokens: prompt's and new ones."""

    text: str
    seconds: float
    prompt: int
    new: int


def requests(count: int, prompts: tuple[int, int], new: tuple[int, int], seed: int) -> list[Any]:
    """Bodies of requests. prompts: words of them; new: tokens."""
    draw, words = random.Random(seed), TEXT.read_text().split()
    found = []
    for _ in range(count):
        size = draw.randint(*prompts)
        start = draw.randrange(len(words) - size)
        text, tokens = " ".join(words[start : start + size]), draw.randint(*new)
        found.append({"prompt": text, "max_tokens": tokens, "temperature": 0})
    return found


def ask(url: str, body: Any) -> Answer:
    """Errors: `RuntimeError` with what the server says."""
    parts, start = urlsplit(url), time.perf_counter()
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=READY)
    head = {"Content-Type": "application/json"}
    connection.request("POST", f"{parts.path}/completions", json.dumps(body), head)
    response = connection.getresponse()
    said = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {said}")
    used = said["usage"]
    return Answer(
        said["choices"][0]["text"],
        time.perf_counter() - start,
        used["prompt_tokens"],
        used["completion_tokens"],
    )


def ask_all(url: str, bodies: list[Any], clients: int) -> tuple[list[Answer], float]:
    """All answers, and the seconds that all of them took."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda body: ask(url, body), bodies))
    return found, time.perf_counter() - start


@contextlib.contextmanager
def server(arguments: argparse.Namespace) -> Iterator[tuple[str, psutil.Process]]:
    """`graftwork serve` in a process of its own, once it answers."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # Prompts are asked twice: what is kept of the first time must not make the second one faster.
    options = ["--port", port, "--keep", 0, "--queue", arguments.requests]
    options += ["--slots", arguments.slots]
    for name in ("recipe", "target", "context", "chunk"):
        if (value := getattr(arguments, name)) is not None:
            options += [f"--{name}", value]
    command = [sys.executable, "-m", "graftwork", "serve", arguments.model, *map(str, options)]
    process = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        ask_when_ready(url, process)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def ask_when_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Ask until there is an answer. Errors: `RuntimeError` if the process ends before."""
    end = time.monotonic() + READY
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            ask(url, {"prompt": "The", "max_tokens": 1, "temperature": 0})
            return
        time.sleep(0.2)
    raise RuntimeError("the server did not come up")


def measure(url: str, arguments: argparse.Namespace, process: psutil.Process | None) -> None:
    """Print what comes of all requests, alone and together."""
    bodies = requests(arguments.requests, arguments.words, arguments.new, arguments.seed)
    some = bodies[: arguments.alone or len(bodies)]
    if arguments.model_name:
        for body in bodies:
            body["model"] = arguments.model_name
    one, seconds = ask_all(url, some, 1)
    say("one at a time", one, seconds)
    memory = [] if process is None else [process.memory_info().rss]
    all_, together = ask_all(url, bodies, arguments.clients)
    say(f"{arguments.clients} clients", all_, together)
    if process is not None:
        memory.append(process.memory_info().rss)
        print("memory, MB, before and after:", ", ".join(f"{n / 1e6:.0f}" for n in memory))
    same = sum(a.text == b.text for a, b in zip(one, all_, strict=False))
    print(f"{same} of {len(one)} answers are those of the request alone")
    rate = [sum(a.new for a in found) / s for found, s in ((one, seconds), (all_, together))]
    print(f"new tokens/s: {rate[0]:.1f} alone, {rate[1]:.1f} together, {rate[1] / rate[0]:.2f} x")


def say(what: str, found: list[Answer], seconds: float) -> None:
    """Print a round's figures."""
    took = sorted(answer.seconds for answer in found)
    print(
        f"{what}: {len(found)} requests in {seconds:.1f} s, {sum(a.prompt for a in found)} prompt "
        f"and {sum(a.new for a in found)} new tokens, {sum(a.new for a in found) / seconds:.1f} "
        f"new tokens/s; a request: median {statistics.median(took):.2f} s, longest {took[-1]:.2f}",
        flush=True,
    )


def span(text: str) -> tuple[int, int]:
    """``4-60`` as numbers."""
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="checkpoint or artifact to serve")
    parser.add_argument("--against", metavar="URL", help="ask this server, such as http://h:1/v1")
    parser.add_argument("--model-name", help="what requests call the model")
    for name in ("--recipe", "--target"):
        parser.add_argument(name)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--alone", type=int, help="requests that are asked one at a time (all)")
    parser.add_argument("--words", type=span, default=(2, 40), help="of prompts")
    parser.add_argument("--new", type=span, default=(32, 192), help="tokens")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.against:
        measure(arguments.against, arguments, None)
        return
    if not arguments.model:
        parser.error("expected a model, or --against URL")
    with server(arguments) as (url, process):
        measure(url, arguments, process)


if __name__ == "__main__":
    main()
