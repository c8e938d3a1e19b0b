"""The wheel alone, in an environment of its own, outside the repository, as a newcomer has it.

Installing takes minutes and the network (or pip's own folder of wheels); where pip finds neither,
this is skipped with what it said.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_packaging import ROOT, built_wheel

pytestmark = pytest.mark.long

EXTRAS = "huggingface,serve,grammar"
CLIENT = """
import json, sys, threading, time
import httpx2, openai

url = sys.argv[1]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
name = client.models.list().data[0].id
words = ["import os", "class A:"]


def chat(word, found):
    events = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": word}], max_tokens=24, temperature=0,
        stream=True, stream_options={"include_usage": True},
    )
    text, used = "", 0
    for event in events:
        text += "".join(choice.delta.content or "" for choice in event.choices)
        used = event.usage.completion_tokens if event.usage else used
    found[word] = text, used


together = {}
threads = [threading.Thread(target=chat, args=(word, together)) for word in words]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
alone = {}
[chat(word, alone) for word in words]
assert together == alone and all(text and used for text, used in alone.values()), (together, alone)

stream = client.completions.create(
    model=name, prompt="def f(", max_tokens=900, temperature=0, stream=True
)
next(iter(stream))
stream.close()
health = url.replace("/v1", "/health")
for _ in range(500):
    if httpx2.get(health).json()["running"] == 0:
        break
    time.sleep(0.01)
else:
    raise AssertionError("a request that was cancelled runs on")

schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
          "additionalProperties": False}
made = client.chat.completions.create(
    model=name, messages=[{"role": "user", "content": "x"}], max_tokens=64, temperature=0,
    response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
)
assert isinstance(json.loads(made.choices[0].message.content)["ok"], bool)
print("answered")
"""
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment, in which the wheel and the client are."""
    room = tmp_path_factory.mktemp("room")
    wheel = built_wheel(room)
    subprocess.run([sys.executable, "-m", "venv", room / "env"], check=True)
    pip = [room / "env" / "bin" / "python", "-m", "pip", "install", "--quiet"]
    wanted = ["-c", ROOT / "constraints.txt", f"{wheel}[{EXTRAS}]", "openai"]
    installed = subprocess.run(
        [*pip, *wanted], cwd=room, env=environment(room), capture_output=True, text=True
    )
    if installed.returncode and re.search("No matching|connection|Errno", installed.stderr):
        pytest.skip(f"pip cannot install the wheel here: {installed.stderr[-300:]}")
    assert installed.returncode == 0, installed.stderr
    (room / "template.jinja").write_text(TEMPLATE)
    return room


def environment(room: Path) -> dict[str, str]:
    """Nothing of this process's own packages or caches."""
    kept = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "VIRTUAL_ENV")}
    cache = str(room / "cache")
    return {**kept, "XDG_CACHE_HOME": cache, "TORCHINDUCTOR_CACHE_DIR": cache}


def graftwork(room: Path, *args: object, said: str = "") -> str:
    """Standard output of a command, run there."""
    command = [room / "env" / "bin" / "graftwork", *args]
    ran = subprocess.run(
        list(map(str, command)),
        cwd=room,
        env=environment(room),
        input=said,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def model(room: Path) -> str:
    """The bundled model, as the wheel brings it."""
    (found,) = (room / "env" / "lib").glob("python3*/site-packages/graftwork/demo_model")
    return str(found)


def test_the_demo_and_the_version(room: Path) -> None:
    said = graftwork(room, "--version")
    assert re.match(r"graftwork \d", said) and str(ROOT) not in said
    table = graftwork(room, "demo", "--quick")
    assert all(name in table for name in ("transformers", "baseline", "copyspec", "int8"))


def test_a_chat_by_a_script(room: Path, model: str) -> None:
    options = ("--template", "template.jinja", "--temperature", 0, "--max-new-tokens", 12)
    said = graftwork(room, "chat", model, *options, said="def add(a, b):\n/exit\n")
    assert said.strip()


def test_the_perplexity_of_a_text(room: Path, model: str) -> None:
    (room / "text.txt").write_text("def add(a, b):\n    return a + b\n\n" * 40)
    given = ("--text", "text.txt", "--length", 64, "--windows", 2, "--json", "eval.json")
    graftwork(room, "eval", model, *given)
    assert "perplexity" in (room / "eval.json").read_text()


@contextmanager
def served(room: Path, *args: object) -> Iterator[str]:
    """The address of a server there."""
    command = [room / "env" / "bin" / "graftwork", "serve", *args, "--port", 0]
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=room,
        env=environment(room),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"http://\S+/v1", line):
                yield found[0]
                return
        raise AssertionError("".join(lines))
    finally:
        process.terminate()
        assert process.wait(60) in (0, -15)
        process.stderr.close()


def test_a_server_answers_openai_s_client(room: Path, model: str) -> None:
    """Events, two chats at once, a request that is cancelled, and a JSON schema."""
    with served(room, model, "--template", "template.jinja", "--name", "demo") as url:
        python = room / "env" / "bin" / "python"
        client = subprocess.run(
            [python, "-c", CLIENT, url],
            cwd=room,
            env=environment(room),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert client.returncode == 0, client.stderr
        assert client.stdout == "answered\n"
