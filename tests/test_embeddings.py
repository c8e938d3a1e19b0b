"""Texts as vectors: transformers' last hidden states, pooled; in Python and over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import cache
from typing import Any

import openai
import pytest
import torch
from served import served
from test_chat import DEMO, TARGET
from test_input_embeds import made_of, model_of
from transformers import AutoModelForCausalLM

import graftwork as gw
from graftwork.ir import InputError, UnsupportedError
from graftwork.runtime.reading import reading_of as reading
from graftwork.serving import embeddings
from graftwork.serving.service import Service

TEXTS = ["def add(a, b):\n    return a + b\n", "import os", "x"]
ROWS = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8]]


def pooled(model: Any, rows: list[list[int]], pooling: str) -> torch.Tensor:
    """What transformers' states come to, a text at a time."""
    found = []
    with torch.no_grad():
        for row in rows:
            states = model(torch.tensor([row]), output_hidden_states=True).hidden_states[-1][0]
            found.append(states[-1] if pooling == "last" else states.mean(0))
    return torch.stack(found)


@cache
def demo_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def plain() -> gw.Model:
    return gw.optimize(DEMO, target=TARGET)


@pytest.fixture(scope="module")
def client(plain: gw.Model) -> Iterator[openai.OpenAI]:
    """Its model belongs to the engine, and shares what was made of it."""
    model = gw.Model(plain.program, plain.target, plain.recipe)
    with served(Service(model, "demo", slots=2, chunk=8)) as port:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)


def test_states_are_those_of_transformers() -> None:
    made = made_of("llama", "baseline", "eager")
    for pooling in ("mean", "last"):
        wanted = pooled(model_of("llama"), ROWS, pooling)
        found = made.embed(ROWS, pooling=pooling, normalize=False)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        unit = torch.nn.functional.normalize(wanted, dim=-1)
        torch.testing.assert_close(made.embed(ROWS, pooling=pooling), unit, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("target", ["eager", "onnxruntime", "torch"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "granite", "gpt2"])
def test_targets(kind: str, target: str) -> None:
    found = made_of(kind, "baseline", target).embed(ROWS, normalize=False)
    torch.testing.assert_close(found, pooled(model_of(kind), ROWS, "mean"), rtol=1e-4, atol=1e-4)


def test_many_texts_in_pieces_and_a_cache_that_stays(plain: gw.Model) -> None:
    """More than are read side by side, longer than a piece; texts beside go on."""
    long = plain.tokenizer.encode("\n".join(TEXTS) * 60).ids[:600]
    rows = [long[: 40 + 60 * place] for place in range(10)]
    prompt = [long[:50]]
    before = plain.generate(prompt, max_new_tokens=8, do_sample=False)
    found = plain.embed(rows, normalize=False)
    wanted = pooled(demo_model(), rows, "mean")
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(plain.generate(prompt, max_new_tokens=8, do_sample=False), before)


def test_bad_input(plain: gw.Model) -> None:
    for texts, message in (
        ([[5], []], "text 1 is empty"),
        ([[10**6]], "text 0 holds the token id 1000000"),
        ([[5] * 5000], "text 0 has 5000 tokens, and the model's context is"),
        ("", "is empty"),
    ):
        with pytest.raises(InputError, match=message):
            plain.embed(texts)
    with pytest.raises(InputError, match="pooling: expected mean or last, got 'max'"):
        plain.embed("x", pooling="max")
    with pytest.raises(UnsupportedError, match=r"gives no hidden states.*such as baseline"):
        reading(plain.program)  # which is not compiled: no more than the passes made


def test_over_http(client: openai.OpenAI, plain: gw.Model) -> None:
    ids = [plain.tokenizer.encode(text).ids for text in TEXTS]
    wanted = torch.nn.functional.normalize(pooled(demo_model(), ids, "mean"), dim=-1)
    for given in (TEXTS, ids):
        made = client.embeddings.create(model="demo", input=given, encoding_format="float")
        assert [one.index for one in made.data] == [0, 1, 2] and made.model == "demo"
        found = torch.tensor([one.embedding for one in made.data])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, ids))
    for one in (TEXTS[1], ids[1]):
        made = client.embeddings.create(model="demo", input=one, encoding_format="base64")
        raw = base64.b64decode(made.data[0].embedding)
        found = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        torch.testing.assert_close(found, wanted[1], rtol=1e-4, atol=1e-4)
    made = client.embeddings.create(model="demo", input=TEXTS)  # base64, which the client reads
    assert torch.tensor(made.data[0].embedding).shape == wanted[0].shape
    text = client.completions.create(model="demo", prompt=TEXTS[0], max_tokens=4, temperature=0)
    assert text.choices[0].text == plain.tokenizer.decode(
        plain.generate([ids[0]], max_new_tokens=4, do_sample=False)[0, len(ids[0]) :].tolist()
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input"),
        ({"input": ["x", ""]}, "text 1 has no tokens"),
        ({"input": [10**6]}, "token id 1000000"),
        ({"input": [5] * 5000}, "text 0 has 5000 tokens, and a request may have"),
        ({"input": "x", "dimensions": 7}, "dimensions=7: the model's states have"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "task": "y"}, "this server knows no such field"),
        ({"input": [["x"]]}, "input"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_refused(client: openai.OpenAI, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.post("/embeddings", body=fields, cast_to=object)


def test_a_program_without_states_says_which_have_some(
    client: openai.OpenAI, plain: gw.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading_of(program: object) -> str:
        return reading(plain.program)

    monkeypatch.setattr(embeddings, "reading_of", reading_of)
    with pytest.raises(openai.APIStatusError, match="gives no hidden states") as error:
        client.embeddings.create(model="demo", input="x")
    assert error.value.status_code == 501
    with pytest.raises(InputError, match="pooling: expected mean or last"):
        Service(plain, "x", pooling="cls")
