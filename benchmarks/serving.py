"""Many clients at once against `graftwork serve`: are answers those of requests alone, and how much
faster do they come?

    python benchmarks/serving.py MODEL --recipe int8 --clients 64 --requests 200

A server process on loopback is asked everything one at a time first, then by all clients at once:
each answer must be the same. Requests are greedy, with prompts and lengths of all sizes, drawn from
--seed. Memory is the server's, at the beginning and at the end. --against URL asks another
OpenAI-compatible server the same instead; what it answers is compared with itself alone.

    python benchmarks/serving.py MODEL.gguf --llama-cpp PYTHON --rounds 3
    python benchmarks/serving.py MODEL --draft SMALL --rounds 3 --clients 4
    python benchmarks/serving.py MODEL --soak 10

--llama-cpp asks llama-cpp-python's server the same, of the same file, with as many threads, in
turns: PYTHON is an interpreter that has `llama-cpp-python[server]`. --draft asks a second server
that drafts by a smaller model, in turns with one that does not. --soak asks for some minutes
without an end, and prints the server's memory and how it grows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
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


def graftwork_command(arguments: argparse.Namespace, draft: str | None = None) -> list[str]:
    """Of `graftwork serve`."""
    # Prompts are asked twice: what is kept of the first time must not make the second one faster.
    options = ["--keep", 0, "--queue", max(arguments.requests, arguments.clients)]
    options += ["--slots", arguments.slots, *(["--draft", draft] if draft else [])]
    for name in ("recipe", "target", "context", "chunk"):
        if (value := getattr(arguments, name)) is not None:
            options += [f"--{name}", value]
    return [sys.executable, "-m", "graftwork", "serve", arguments.model, *map(str, options)]


def llama_command(arguments: argparse.Namespace) -> list[str]:
    """Of llama-cpp-python's server, which answers one request at a time."""
    options = ["--host", "127.0.0.1", "--model", arguments.model]
    options += ["--n_ctx", arguments.context or 2048]
    options += ["--n_threads", arguments.threads, "--n_threads_batch", arguments.threads]
    # Otherwise a new request ends the one that is answered.
    options += ["--interrupt_requests", "false", "--verbose", "false"]
    return [arguments.llama_cpp, "-m", "llama_cpp.server", *map(str, options)]


@contextlib.contextmanager
def server(command: list[str], threads: int) -> Iterator[tuple[str, psutil.Process]]:
    """A server in a process of its own, once it answers."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen([*command, "--port", str(port)], env=environment)
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


def measure(
    url: str, arguments: argparse.Namespace, process: psutil.Process | None
) -> tuple[float, float]:
    """Print what comes of all requests, alone and together; new tokens a second of both."""
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
    return rate[0], rate[1]


def beside(arguments: argparse.Namespace) -> None:
    """Print what comes of two servers, in turns."""
    if arguments.draft:
        drafting = graftwork_command(arguments, arguments.draft)
        commands = {"drafting": drafting, "plain": graftwork_command(arguments)}
    else:
        ours = graftwork_command(arguments)
        commands = {"graftwork": ours, "llama.cpp": llama_command(arguments)}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    with contextlib.ExitStack() as open_servers:
        running = {
            name: open_servers.enter_context(server(command, arguments.threads))
            for name, command in commands.items()
        }
        for turn in range(arguments.rounds):
            for name, (url, process) in running.items():
                print(f"-- {name}, round {turn + 1}")
                rates[name].append(measure(url, arguments, process))
    medians = {
        name: [statistics.median(column) for column in zip(*found, strict=True)]
        for name, found in rates.items()
    }
    for name, (alone, together) in medians.items():
        print(f"{name}: median new tokens/s {alone:.1f} alone, {together:.1f} together")
    (first, ours), (second, theirs) = medians.items()
    print(f"{first} over {second}: {ours[0] / theirs[0]:.2f} alone, {ours[1] / theirs[1]:.2f}")


def soak(url: str, arguments: argparse.Namespace, process: psutil.Process) -> None:
    """Ask for some minutes; print the server's memory, and how it grows by least squares."""
    bodies = requests(arguments.requests, arguments.words, arguments.new, arguments.seed)
    endless, lock = itertools.cycle(bodies), threading.Lock()
    begun = time.monotonic()
    end = begun + 60 * arguments.soak
    answered: list[int] = []

    def client() -> None:
        while time.monotonic() < end:
            with lock:
                body = next(endless)
            answered.append(ask(url, body).new)

    samples: list[tuple[float, float]] = []
    with ThreadPoolExecutor(arguments.clients) as pool:
        clients = [pool.submit(client) for _ in range(arguments.clients)]
        while (now := time.monotonic()) < end:
            samples.append(((now - begun) / 60, process.memory_info().rss / 1e6))
            if len(samples) % 12 == 1:
                print(f"{samples[-1][0]:5.1f} min {samples[-1][1]:7.0f} MB", flush=True)
            time.sleep(min(5.0, max(end - now, 0.1)))
        for one in clients:
            one.result()
    # Buffers are made when they are first needed: the first tenth is left out.
    kept = [sample for sample in samples if sample[0] > arguments.soak / 10]
    minutes, sizes = [t for t, _ in kept], [m for _, m in kept]
    slope, _ = statistics.linear_regression(minutes, sizes)
    print(
        f"{len(answered)} requests, {sum(answered)} new tokens in {arguments.soak:g} min; memory "
        f"{min(sizes):.0f} to {max(sizes):.0f} MB, slope {slope:+.2f} MB a minute"
    )


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
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="also ask llama-cpp-python's server")
    parser.add_argument("--draft", metavar="MODEL", help="also ask a server that drafts by this")
    parser.add_argument("--rounds", type=int, default=1, help="with --llama-cpp or --draft")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="ask so long; memory")
    arguments = parser.parse_args()
    if arguments.against:
        measure(arguments.against, arguments, None)
        return
    if not arguments.model:
        parser.error("expected a model, or --against URL")
    if arguments.llama_cpp or arguments.draft:
        beside(arguments)
        return
    with server(graftwork_command(arguments), arguments.threads) as (url, process):
        if arguments.soak:
            soak(url, arguments, process)
        else:
            measure(url, arguments, process)


if __name__ == "__main__":
    main()
