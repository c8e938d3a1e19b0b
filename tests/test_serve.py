"""`graftwork serve` as clients see it: OpenAI's own client, and raw requests."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from served import served
from test_chat import DEMO, TARGET, TEMPLATE
from test_front_door import run

import graftwork as gw
from graftwork.ir import InputError
from graftwork.serving.asked import ChatRequest, CompletionRequest, read_body
from graftwork.serving.run import address_of, listen, read_key
from graftwork.serving.service import Service

KEY, MOST = "a-key-for-tests", 10_000
MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
LONG = {"model": "demo", "prompt": "def f(", "max_tokens": 900, "temperature": 0}


@pytest.fixture(scope="module")
def demo() -> gw.Model:
    return gw.optimize(DEMO, target=TARGET)


@pytest.fixture(scope="module")
def service(demo: gw.Model) -> Service:
    return Service(demo, "demo", usual=8, seconds=60, template=TEMPLATE, slots=2, queue=2)


@pytest.fixture(scope="module")
def port(service: Service) -> Iterator[int]:
    with served(service, key=KEY, most=MOST) as port:
        yield port
    assert not service.engine.alive


@pytest.fixture(scope="module")
def client(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)


def asked(
    port: int, path: str, body: Any = None, key: str = KEY, method: str = "POST"
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of a raw request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    text = json.dumps(body) if isinstance(body, dict) else body
    connection.request(method, path, text, {"Authorization": f"Bearer {key}"})
    response = connection.getresponse()
    read = response.read()
    connection.close()
    said = json.loads(read) if response.headers["content-type"].endswith("json") else read.decode()
    return response.status, dict(response.headers), said


def until_idle(service: Service) -> None:
    """Wait until no request runs or waits. Errors: `AssertionError` after a while."""
    for _ in range(1000):
        if not service.engine.figures.running and not service.engine.figures.waiting:
            return
        time.sleep(0.01)
    raise AssertionError("requests hold their slots")


def test_texts_are_those_of_generate(client: openai.OpenAI, demo: gw.Model) -> None:
    prompt = "def add(a, b):\n"
    made = client.completions.create(model="demo", prompt=prompt, max_tokens=12, temperature=0)
    ids = demo.tokenizer.encode(prompt).ids
    assert made.usage.prompt_tokens == len(ids) and made.usage.completion_tokens == 12
    assert made.choices[0].finish_reason == "length"
    again = gw.optimize(DEMO, target=TARGET)
    wanted = again.generate([ids], max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert made.choices[0].text == demo.tokenizer.decode(wanted)
    two = client.completions.create(
        model="demo", prompt=[ids, prompt], max_tokens=12, temperature=0, extra_body={"top_k": 5}
    )
    assert [choice.text for choice in two.choices] == [made.choices[0].text] * 2
    stopped = client.completions.create(
        model="demo", prompt=prompt, max_tokens=12, temperature=0, stop=made.choices[0].text[3:6]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == made.choices[0].text[:3]


def test_two_chats_at_once_as_events(client: openai.OpenAI, demo: gw.Model) -> None:
    def chat(word: str) -> tuple[str, str, int]:
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": word}]
        events = client.chat.completions.create(
            model="demo",
            messages=messages,
            max_completion_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, finish, used = "", "", 0
        for event in events:
            for choice in event.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
            used = event.usage.completion_tokens if event.usage else used
        return text, finish, used

    words = ["import os", "class A:"]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(chat, words))
    again = gw.optimize(DEMO, target=TARGET)
    for word, (text, finish, used) in zip(words, found, strict=True):
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": word}]
        options = {"max_new_tokens": 24, "do_sample": False, "chat_template": TEMPLATE}
        assert text == again.chat(messages, **options)
        assert finish in ("stop", "length") and 0 < used <= 24


def test_seeded_answers_repeat_and_differ(client: openai.OpenAI) -> None:
    options = {"max_tokens": 16, "temperature": 1.0, "seed": 5, "n": 2, "top_p": 0.95}
    made = [
        client.chat.completions.create(model="demo", messages=MESSAGES, **options) for _ in "12"
    ]
    texts = [[choice.message.content for choice in one.choices] for one in made]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


TOOL = {"type": "function", "function": {"name": "now"}}

REFUSED = [
    ({"frequency_penalty": 2.5}, 400, "frequency_penalty: "),
    ({"store": True}, 400, "store=True is not supported"),
    ({"logprobs": 3}, 400, "logprobs: "),
    ({"top_logprobs": 2}, 400, "expected logprobs=true"),
    ({"logit_bias": {"-1": 3}}, 400, "logit_bias"),
    ({"logit_bias": {"99999999": 3}}, 400, "expected token ids below"),
    ({"n_probs": 3}, 400, "n_probs: this server knows no such field"),
    ({"temperature": -1}, 400, "temperature"),
    ({"max_tokens": "9"}, 400, "max_tokens: Input should be a valid integer"),
    ({"n": 99}, 400, "n: "),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content: parts of type 'image_url' are not read here, only 'text'",
    ),
    ({"model": "gpt-9"}, 404, "'gpt-9' is not here; there is 'demo'"),
    ({"max_tokens": 10**6}, 400, r"exceed"),
    ({"messages": [{"role": "user", "content": "x y " * 2000}]}, 400, "tokens, and"),
    ({"tool_choice": "required"}, 400, "expected tools to choose from"),
    ({"tools": [TOOL]}, 400, "shows the model no tools"),
    ({"tools": [TOOL, TOOL]}, 400, "different names"),
    ({"tools": [{"type": "custom", "custom": {}}]}, 400, "tools.0.type"),
]


@pytest.mark.parametrize(("fields", "status", "message"), REFUSED, ids=lambda v: str(v)[:24])
def test_what_is_refused(port: int, fields: dict[str, Any], status: int, message: str) -> None:
    found, _, body = asked(port, "/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert found == status, body
    assert message in body["error"]["message"] and set(body["error"]) >= {"type", "param", "code"}


def test_fields_that_ask_for_nothing_are_taken() -> None:
    idle = {"frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False, "tool_choice": "auto"}
    text = json.dumps({"messages": MESSAGES, **idle, "presence_penalty": None})
    assert read_body(ChatRequest, text.encode()).options() == {}
    for fields, options in (
        ({"temperature": 0, "top_p": 0.5}, {"do_sample": False}),
        ({"top_p": 0.5, "seed": 3}, {"do_sample": True, "top_p": 0.5, "seed": 4}),
        ({"max_tokens": 5, "stop": "x"}, {}),
    ):
        text = json.dumps({"messages": MESSAGES, **fields})
        assert read_body(ChatRequest, text.encode()).options(choice=1) == options
    with pytest.raises(InputError, match="prompt"):
        read_body(CompletionRequest, b'{"prompt": []}')
    for bad in (b"", b"[]", b"{", b"[" * 100_000, b'{"prompt": "\xff"}'):
        with pytest.raises(InputError):
            read_body(CompletionRequest, bad)


def test_an_answer_fits_its_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["sum", "product"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    made = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=64, temperature=0, response_format=form
    )
    assert made.choices[0].finish_reason == "stop"
    found = json.loads(made.choices[0].message.content)
    assert isinstance(found["ok"], bool) and found["kind"] in ("sum", "product")
    for bad in ({"type": "json_schema"}, {**form, "json_schema": {"schema": {"type": "nothing"}}}):
        with pytest.raises(openai.BadRequestError, match="schema"):
            client.chat.completions.create(model="demo", messages=MESSAGES, response_format=bad)


def test_keys_paths_and_sizes(port: int) -> None:
    status, _, body = asked(port, "/v1/completions", LONG, key="another")
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert asked(port, "/v1/models", key="", method="GET")[0] == 401
    models = asked(port, "/v1/models", method="GET")[2]
    assert [model["id"] for model in models["data"]] == ["demo"]
    assert asked(port, "/v1/nothing", {})[0] == 404
    assert asked(port, "/v1/embeddings", {"input": "x", "model": "y"})[0] == 404
    status, _, body = asked(port, "/v1/completions", {**LONG, "prompt": "x" * MOST})
    assert status == 413 and str(MOST) in body["error"]["message"]
    # A client that only says how much it will send, and one that says nothing, are not read out.
    for head in ("Content-Length: 104857600", "Transfer-Encoding: chunked"):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
            lines = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            raw.sendall(f"{lines}{head}\r\n\r\n".encode())
            if "chunked" in head:
                raw.sendall(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
            assert b" 413 " in raw.recv(100)


@pytest.mark.parametrize("chunked", [True, False])
def test_who_sends_a_body_that_is_too_large_reads_the_answer(port: int, chunked: bool) -> None:
    parts = 100
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {KEY}"}
    headers |= {} if chunked else {"Content-Length": str(parts << 20)}
    body = (b"x" * (1 << 20) for _ in range(parts))
    connection.request("POST", "/v1/completions", body, headers, encode_chunked=chunked)
    answer = connection.getresponse()
    assert answer.status == 413 and str(MOST) in answer.read().decode()
    connection.close()
    assert asked(port, "/v1/models", method="GET")[0] == 200


def test_a_client_that_hangs_up_frees_its_slot(port: int, service: Service) -> None:
    until_idle(service)
    before = service.engine.figures.ended["cancelled"]
    for stream in (False, True):
        body = json.dumps({**LONG, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while not service.engine.figures.running:
                time.sleep(0.001)
        until_idle(service)
    assert service.engine.figures.ended["cancelled"] == before + 2


def test_a_full_queue_answers_429(port: int, service: Service, client: openai.OpenAI) -> None:
    until_idle(service)
    release, begun = threading.Event(), threading.Event()

    def hold(new: list[int], end: Any) -> None:
        begun.set()
        assert release.wait(60)

    engine = service.engine
    tickets = [engine.submit(engine.read([5], {"max_new_tokens": 9}), hold) for _ in range(4)]
    try:
        assert begun.wait(60)
        status, headers, body = asked(port, "/v1/completions", LONG)
        assert status == 429 and body["error"]["code"] == "queue_full"
        assert int(headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="demo", prompt="x", max_tokens=1)
        assert asked(port, "/health", method="GET")[2]["status"] == "ok"
    finally:
        for ticket in tickets:
            ticket.cancel()
        release.set()
    until_idle(service)
    text = asked(port, "/metrics", method="GET")[2]
    assert "graftwork_rejected_total 2.0" in text and "graftwork_slots 2.0" in text


def test_addresses_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAFTWORK_API_KEY", raising=False)
    with listen("127.0.0.1", 0, None) as listening:
        port = listening.getsockname()[1]
        assert address_of(listening) == f"127.0.0.1:{port}"
        with pytest.raises(InputError, match=f"port {port}: another process listens there"):
            listen("127.0.0.1", port, None)
    for host in ("0.0.0.0", "example.org"):
        with pytest.raises(InputError, match="clients need a key"):
            listen(host, 0, None)
    (tmp_path / "key").write_text("short\n")
    with pytest.raises(InputError, match="8 or more"):
        read_key(tmp_path / "key")
    monkeypatch.setenv("GRAFTWORK_API_KEY", KEY)
    assert read_key(None) == KEY


def test_a_taken_port_is_said_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listen("127.0.0.1", 0, None) as taken:
        given = ("--port", taken.getsockname()[1])
        assert run("serve", tmp_path / "no model", *given) == 2
    assert "another process listens there" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused_before_it_is_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(DEMO) / name)
    monkeypatch.setattr("torch.export.export", None)
    for command in (("serve", tmp_path, "--port", 0), ("generate", tmp_path, "--prompt", "x")):
        assert run(*command) == 2
        what = "serve" if command[0] == "serve" else "--prompt"
        assert f"with a tokenizer.json, which {what} needs" in capsys.readouterr().err
