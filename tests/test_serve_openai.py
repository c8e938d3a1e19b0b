"""What OpenAI's API says besides text: probabilities, penalties, calls of tools."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from served import served
from test_chat import DEMO, TARGET

import graftwork as gw
from graftwork.chat.templates import ChatTemplate
from graftwork.chat.text_stream import TextStream
from graftwork.chat.tool_calls import HERMES, LLAMA, MISTRAL, ToolFormat, ToolStream, format_of
from graftwork.chat.tool_grammar import tool_grammar
from graftwork.ir import InputError
from graftwork.serving.service import Service
from graftwork.serving.token_texts import TokenTexts
from graftwork.serving.tools import opened

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Write <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.\n{% endif %}'
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["a", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["cm", "inch"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "measure", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
PROMPT = "def add(a, b):\n    return"
GREEDY = {"model": "demo", "temperature": 0}


@pytest.fixture(scope="module")
def demo() -> gw.Model:
    return gw.optimize(DEMO, "copyspec", target=TARGET)


@pytest.fixture(scope="module")
def plain() -> gw.Model:
    """The server's model belongs to its engine."""
    return gw.optimize(DEMO, target=TARGET)


@pytest.fixture(scope="module")
def client(demo: gw.Model) -> Iterator[openai.OpenAI]:
    service = Service(demo, "demo", usual=80, seconds=60, template=TEMPLATE, slots=2)
    with served(service) as port:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)


def test_probabilities_are_those_of_the_model(client: openai.OpenAI, plain: gw.Model) -> None:
    """Of texts, whole and streamed; penalties change the text, not what is told of the model."""
    asked: dict[str, Any] = {**GREEDY, "prompt": PROMPT, "max_tokens": 12, "logprobs": 3}
    made = client.completions.create(**asked, frequency_penalty=1.5)
    listed = made.choices[0].logprobs
    ids = plain.tokenizer.encode(PROMPT).ids

    def penalized(text: Any, scores: Any) -> Any:
        for id in text[0, len(ids) :].tolist():
            scores[0, id] -= 1.5
        return scores

    wanted = plain.generate(
        [ids],
        max_new_tokens=12,
        do_sample=False,
        logits_processor=[penalized],
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = wanted.sequences[0, len(ids) :].tolist()
    assert made.choices[0].text == plain.tokenizer.decode(tokens) == "".join(listed.tokens)
    for place, (token, row) in enumerate(zip(tokens, wanted.logits, strict=True)):
        logprobs = row[0].log_softmax(-1)
        assert listed.token_logprobs[place] == pytest.approx(float(logprobs[token]), abs=1e-4)
        best = {plain.tokenizer.decode([id]) for id in logprobs.topk(3).indices.tolist()}
        assert best <= set(listed.top_logprobs[place])
        assert listed.text_offset[place] == len("".join(listed.tokens[:place]))
    events = list(client.completions.create(**asked, frequency_penalty=1.5, stream=True))
    streamed = [token for e in events if (one := e.choices[0].logprobs) for token in one.tokens]
    assert streamed == listed.tokens


def test_probabilities_of_messages(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "messages": MESSAGES, "max_tokens": 8}
    made = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    entries = made.choices[0].logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == made.choices[0].message.content
    for entry in entries:
        assert [e.logprob for e in entry.top_logprobs] == sorted(
            (e.logprob for e in entry.top_logprobs), reverse=True
        )
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token
    # A text that stops an answer has no entries either.
    stop = "".join(entry.token for entry in entries[3:5])
    cut = client.chat.completions.create(**asked, logprobs=True, stop=stop)
    text = cut.choices[0].message.content
    assert "".join(entry.token for entry in cut.choices[0].logprobs.content) == text
    assert client.chat.completions.create(**asked).choices[0].logprobs is None


def test_biases_penalties_echoes_and_the_best_of_some(
    client: openai.OpenAI, demo: gw.Model
) -> None:
    asked: dict[str, Any] = {**GREEDY, "prompt": PROMPT, "max_tokens": 12}
    usual = client.completions.create(**asked, logprobs=0).choices[0]
    first = usual.logprobs.tokens[0]
    ids = demo.tokenizer.encode(first).ids
    banned = client.completions.create(**asked, logit_bias={ids[0]: -100}).choices[0]
    assert usual.text.startswith(first) and not banned.text.startswith(first)
    pushed = client.completions.create(**asked, presence_penalty=2, frequency_penalty=2)
    assert pushed.choices[0].text != usual.text
    echoed = client.completions.create(**asked, echo=True).choices[0]
    assert echoed.text == PROMPT + usual.text
    many: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 6, "seed": 3}
    all_ = client.completions.create(**many, temperature=1.0, n=6, logprobs=0).choices
    best = client.completions.create(**many, temperature=1.0, n=2, best_of=6).choices
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in all_]
    ranked = sorted(range(6), key=lambda n: -means[n])
    assert [c.text for c in best] == [all_[n].text for n in ranked[:2]]
    for wrong in ({"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}, {"logprobs": 21}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**asked, **wrong)


def test_prompts_are_scored_as_lm_eval_asks(client: openai.OpenAI, plain: gw.Model) -> None:
    """Its `local-completions` sends ids, several at once, and reads the tokens up to the last."""
    texts = ["def add(a, b):\n    return a + b\n", "import os\n", "x = 1"]
    ids = [plain.tokenizer.encode(text).ids for text in texts]
    asked: dict[str, Any] = {"model": "demo", "temperature": 0, "seed": 1234, "echo": True}
    made = client.completions.create(**asked, prompt=ids, max_tokens=1, logprobs=1)
    assert made.usage.prompt_tokens == sum(map(len, ids)) and made.usage.completion_tokens == 3
    for choice, text, row in zip(made.choices, texts, ids, strict=True):
        listed, logits = choice.logprobs, plain([row])[0].log_softmax(-1)
        assert choice.text.startswith(text) and len(listed.tokens) == len(row) + 1
        assert listed.token_logprobs[0] is None and listed.top_logprobs[0] is None
        for place, token in enumerate(row[1:], 1):
            wanted, best = logits[place - 1], int(logits[place - 1].argmax())
            assert listed.token_logprobs[place] == pytest.approx(float(wanted[token]), abs=1e-4)
            likeliest = max(listed.top_logprobs[place].items(), key=lambda one: one[1])
            assert likeliest[0] == plain.tokenizer.decode([best])
            assert choice.text[listed.text_offset[place] :].startswith(listed.tokens[place])
        assert int(logits[-1].argmax()) == int(plain.generate([row], max_new_tokens=1)[0, -1])
        assert listed.token_logprobs[-1] == pytest.approx(float(logits[-1].max()), abs=1e-4)
    whole: dict[str, Any] = {**asked, "prompt": texts[0], "logprobs": 1}
    alone = client.completions.create(**whole, max_tokens=0)
    assert (alone.choices[0].text, alone.choices[0].finish_reason) == (texts[0], "length")
    assert alone.choices[0].logprobs.tokens == made.choices[0].logprobs.tokens[:-1]
    assert alone.usage.completion_tokens == 0
    assert client.completions.create(model="demo", prompt="x", max_tokens=0).choices[0].text == ""
    events = list(client.completions.create(**whole, max_tokens=1, stream=True))
    streamed = [token for e in events if (one := e.choices[0].logprobs) for token in one.tokens]
    assert streamed == made.choices[0].logprobs.tokens
    assert "".join(e.choices[0].text for e in events) == made.choices[0].text


def test_several_answers_as_events(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "seed": 3}
    whole = client.completions.create(**asked, temperature=1.0, n=3)
    texts = [""] * 3
    for event in client.completions.create(**asked, temperature=1.0, n=3, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices] and len(set(texts)) > 1
    with pytest.raises(openai.BadRequestError, match=r"best_of=3.*leave out stream, or give n=3"):
        client.completions.create(**asked, best_of=3, stream=True)


def test_calls_that_have_to_come(client: openai.OpenAI) -> None:
    """Arguments fit their schemas, whatever a model without a notion of tools would write."""
    asked: dict[str, Any] = {**GREEDY, "messages": MESSAGES, "tools": TOOLS}
    named = {"type": "function", "function": {"name": "measure"}}
    made = client.chat.completions.create(**asked, tool_choice=named).choices[0]
    assert made.finish_reason == "tool_calls" and made.message.content is None
    (call,) = made.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "measure" and call.id.startswith("call_")
    assert type(arguments["a"]) is int and arguments["unit"] in ("cm", "inch")
    events = client.chat.completions.create(**asked, tool_choice=named, stream=True)
    parts = [part for e in events for c in e.choices for part in c.delta.tool_calls or []]
    assert parts[0].function.name == "measure" and parts[0].id and len(parts) > 2
    assert "".join(p.function.arguments for p in parts) == call.function.arguments
    single = {"tool_choice": "required", "parallel_tool_calls": False}
    made = client.chat.completions.create(**asked, **single).choices[0]
    assert len(made.message.tool_calls) == 1
    # What was called goes back to the template with its arguments as an object.
    talk = [
        *MESSAGES,
        made.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": made.message.tool_calls[0].id, "content": "3"},
    ]
    assert client.chat.completions.create(**{**asked, "messages": talk}, max_tokens=4).choices
    free = client.chat.completions.create(**asked, max_tokens=8).choices[0]
    assert free.message.content and free.message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="none of the tools"):
        wrong = {"type": "function", "function": {"name": "nothing"}}
        client.chat.completions.create(**asked, tool_choice=wrong)
    with pytest.raises(openai.BadRequestError, match="has no other format"):
        client.chat.completions.create(**asked, response_format={"type": "json_object"})


def test_strict_tools_leave_text_free(client: openai.OpenAI) -> None:
    strict = {"name": "measure", "parameters": SCHEMA, "strict": True}
    tools: Any = [{"type": "function", "function": strict}]
    asked: dict[str, Any] = {**GREEDY, "messages": MESSAGES, "tools": tools, "max_tokens": 8}
    made = client.chat.completions.create(**asked).choices[0]
    assert made.message.content and made.message.tool_calls is None


CALLS = [
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{", "b": [1, {"c": 2}]}}\n'
        "</tool_call>\n"
        '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>',
        "",
        [("f", {"a": '}"{', "b": [1, {"c": 2}]}), ("g", {})],
    ),
    (HERMES, 'So:\n\n<tool_call>{"name": "f"}</tool_call>\n', "So:", [("f", {})]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", {"a": 1})]),
    (HERMES, "a <tool_call>none</tool_call> b", "a <tool_call>none</tool_call> b", []),
    (HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    (HERMES, '<tool_call>\n{"name": "f", ', '<tool_call>\n{"name": "f", ', []),
    (HERMES, "1 < 2 \n", "1 < 2 \n", []),
    (
        HERMES,
        '<tool_call>{"name": "\\x", "arguments": {}}',
        '<tool_call>{"name": "\\x", "arguments": {}}',
        [],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "x"}, '
        '{"name": "g", "arguments": {}}]',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    (MISTRAL, "a [TOOL", "a [TOOL", []),
    (
        LLAMA,
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
    (LLAMA, '{"answer": 3}', '{"answer": 3}', []),
    (LLAMA, 'So {"name": "f", "parameters": {}}', 'So {"name": "f", "parameters": {}}', []),
]


@pytest.mark.parametrize(("form", "text", "said", "calls"), CALLS)
def test_calls_in_texts(
    form: ToolFormat, text: str, said: str, calls: list[tuple[str, Any]]
) -> None:
    """However the text is cut into pieces."""
    for size in (1, 2, 3, 7, len(text)):
        stream, shown, found = ToolStream(form), "", dict[int, list[str]]()
        for start in range(0, len(text), size):
            more, parts = stream.put(text[start : start + size])
            shown += more
            for part in parts:
                name, arguments = found.get(part.number, [part.name or "", ""])
                found[part.number] = [name, arguments + part.arguments]
        assert shown + stream.end() == said
        assert [(name, json.loads(text)) for name, text in found.values()] == calls
        assert stream.count == len(calls)


def test_formats_are_known_by_their_templates(demo: gw.Model) -> None:
    assert format_of(TEMPLATE) == HERMES and format_of("{{ '[TOOL_CALLS]' }}") == MISTRAL
    assert format_of('<|start_header_id|> {"name": ..., "parameters": ...}') == LLAMA
    for other in ("<tool_call><function=x>", "[TOOL_CALLS]f[ARGS]{}", "{{ messages }}"):
        assert format_of(other) is None
    with pytest.raises(InputError, match="JSON schema of an object"):
        wrong = [{"name": "f", "parameters": {"type": "string"}}]
        tool_grammar(HERMES, wrong, demo.tokenizer, must=True)
    call = {"id": "x", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert opened(call)["function"]["arguments"] == {"a": 1}
    for bad in ({"function": {"arguments": "{}"}}, {"function": {"name": "f", "arguments": "{"}}):
        with pytest.raises(InputError, match="tool_calls"):
            opened(bad)


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA], ids=lambda form: form.name)
@pytest.mark.parametrize("several", [True, False])
def test_a_grammar_lets_pass_what_is_read(form: ToolFormat, several: bool, plain: gw.Model) -> None:
    """Answers by the grammar of each format are read as calls of it."""
    tools = [tool["function"] for tool in TOOLS]
    rules = tool_grammar(form, tools, plain.tokenizer, must=True, several=several)
    ids = plain.tokenizer.encode(PROMPT).ids
    made = plain.generate(
        [ids], max_new_tokens=120, do_sample=True, seed=1, grammar=rules, tokenizer=plain.tokenizer
    )
    text = plain.tokenizer.decode(made[0, len(ids) :].tolist())
    said, calls = ToolStream(form).put(text)
    assert not said and {part.name for part in calls} - {None} <= {"measure", "now"} and calls


def test_bytes_of_tokens(demo: gw.Model) -> None:
    texts, text = TokenTexts(demo.tokenizer), "naïve 🙂 {x}\n"
    ids = demo.tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(map(texts.bytes_of, ids)).decode() == text
    half = next(id for id in ids if texts.text(id).startswith("bytes:"))
    assert texts.text(half).startswith("bytes:\\x")
    assert math.isfinite(len(texts.text(0)))


def test_special_tokens_that_begin_calls_are_written(demo: gw.Model) -> None:
    name, id = next(
        (token.content, id)
        for id, token in demo.tokenizer.get_added_tokens_decoder().items()
        if token.special
    )
    ids = demo.tokenizer.encode("a = 1", add_special_tokens=False).ids
    stream = TextStream(demo.tokenizer, marks=[name, "no such token"])
    assert stream.put([*ids, id, *ids]) + stream.end() == f"a = 1{name}a = 1"
    assert ChatTemplate(TEMPLATE, "a test", {}).source == TEMPLATE
