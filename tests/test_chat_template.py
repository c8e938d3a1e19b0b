"""Chat templates: texts are transformers', whatever a template does; hostile ones end in errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files
import pytest
from tiny import cached_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import graftwork as gw
from graftwork.chat.files import config_of, special_tokens, template_of
from graftwork.chat.templates import ChatTemplate
from graftwork.ir import InputError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "names": "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n"
    "[INST] {{ m.content | trim }} [/INST]\n  {% else %}\n{{ m.content ~ eos_token }}\n"
    "  {% endif %}\n{% endfor %}{{ unknown_token }}",
    "tools": "{%- if tools %}{{- '<tools>' }}{% for tool in tools %}{{ tool | tojson }}\n"
    "{{ tool.function.parameters | tojson(indent=2) }}{% endfor %}{{- '</tools>' }}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "words": "{%- set ns = namespace(n=0, last=none) -%}{% macro said(m) -%}<{{ m.role }}> "
    "{{- m.content -}}{%- endmacro %}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{{ said(m) * (ns.n % 2 + 1) }}"
    "{% if ns.n >= 2 %}{% break %}{% endif %}{% endfor %}{{ ns.n ** 2 }}"
    "{{ messages | map(attribute='role') | join(', ') }}",
    "blocks": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% elif m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}",
    "day": "{{ strftime_now('%Y') }} {{ documents | length if documents else 'none' }} "
    "{{ 'thinks' if enable_thinking else 'hurries' }} {{ messages[-1].content[::-1] }}",
}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": " What is <b> & 'ü'? "},
    {"role": "assistant", "content": "A letter.", "reasoning": None},
    {"role": "user", "content": 'And "ß"?\n'},
]
TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {"ü": {}}}},
}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {"a": 1}}}]}
CASES = {
    "chatml": (TALK, {}),
    "names": (TALK, {}),
    "tools": ([*TALK, CALL], {"tools": [TOOL]}),
    "words": ([*TALK, {"role": "tool", "content": "9"}], {}),
    "blocks": ([{"role": "user", "content": [{"type": "text", "text": "a"}]}, *TALK], {}),
    "day": (TALK, {"documents": [{"title": "a", "text": "b"}], "enable_thinking": True}),
}


def tokenizer_files(folder: Path, template: Any, **more: Any) -> Path:
    """A tokenizer of bytes with two marks, and a template, as transformers writes both."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", **more
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def model_of(folder: Path) -> gw.Model:
    """A model with the files of a folder."""
    assets = {path.name: path for path in folder.iterdir()}
    return gw.Model(cached_llama().replace(assets=assets), gw.Target("eager"), {"name": "t"})


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = model_of(tokenizer_files(tmp_path, TEMPLATES[name]))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages, more = CASES[name]
    for prompted in (False, True):
        asked = {**more, "add_generation_prompt": prompted}
        text = model.apply_chat_template(messages, tokenize=False, **asked)
        assert text == theirs.apply_chat_template(messages, tokenize=False, **asked)
        ids = model.apply_chat_template(messages, **asked)
        assert ids == theirs.apply_chat_template(messages, return_dict=False, **asked)
    assert text.strip()


def test_one_of_several_templates(tmp_path: Path) -> None:
    config = {
        "chat_template": [
            {"name": "default", "template": "{{ eos_token }}"},
            {"name": "tool_use", "template": "tools"},
            {"name": "rag", "template": "rag"},
        ],
        "eos_token": {"content": "<e>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    model = model_of(tmp_path)
    shown = [
        template_of(model.program, given=given, tools=tools).render(TALK)
        for given, tools in ((None, False), (None, True), ("rag", True), ("{{ 1 }}", False))
    ]
    assert shown == ["<e>", "tools", "rag", "1"]
    (tmp_path / "chat_template.jinja").write_text("its own file")
    assert template_of(model_of(tmp_path).program).render(TALK) == "its own file"
    config["chat_template"] = [{"name": "rag", "template": "rag"}]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="none called default: choose one of rag"):
        template_of(model_of(tmp_path).program)


@pytest.mark.long
def test_a_template_survives_saving_keeping_and_gguf(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tokenizer_files(tmp_path / "model", CHATML)
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    ends = {"bos_token_id": 257, "eos_token_id": 258}
    config = LlamaConfig(vocab_size=259, num_attention_heads=2, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)
    model = gw.optimize(folder, target="eager")
    wanted = model.apply_chat_template(TALK)
    again = gw.optimize(folder, target="eager")  # kept on disk, unless transformers was patched
    loaded = gw.load(model.save(tmp_path / "saved"))
    file = loaded.program and model.export_gguf(tmp_path / "model.gguf")
    read = gw.optimize(file, target="eager")
    for other in (again, loaded, read):
        assert other.apply_chat_template(TALK) == wanted
    assert special_tokens(read.program.assets)["eos_token"] == "<|im_end|>"


@pytest.mark.long
def test_a_gguf_files_own_template(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    gguf_files.write(tmp_path / "m.gguf", {"": "F32"}, metadata=metadata)
    read = gw.optimize(tmp_path / "m.gguf", target="eager")
    assert read.apply_chat_template(TALK, tokenize=False).endswith(TALK[0]["content"])


REFUSING = "{% if messages[0].role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"


@pytest.mark.parametrize(
    ("source", "messages", "said"),
    [
        (REFUSING, [{"role": "robot", "content": ""}], "refuses this conversation: no robots"),
        ("{% for %}", TALK, "line 1: "),
        ("{{ messages[0].content.missing.more }}", TALK, "UndefinedError"),
        ("x" * (2**20 + 1), TALK, "at most 1048576 characters"),
        (CHATML, "hello", "expected a list of"),
        (CHATML, [], "got none"),
        (CHATML, [{"content": "a"}], "at place 0"),
        (CHATML, [{"role": "user", "content": {1, 2}}], "messages: expected what JSON can say"),
    ],
)
def test_errors_say_what_is_wrong(source: str, messages: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        ChatTemplate(source, "here.jinja", {}).render(messages)


HOSTILE = {
    "code": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.json }}",
    "change": "{% set _ = messages.append(1) %}",
    "names": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "depth": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "repeated": "{{ 'a' * 10 ** 12 }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "doubled": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "added": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "written": "{% set x = 'ab' * 99999 %}{% macro f() %}{% for i in range(99999) %}{{ x }}"
    "{% endfor %}{% endmacro %}{{ f() | length }}",
    "renamed": "{% set environment = 1 %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_an_error(name: str) -> None:
    with pytest.raises(InputError):
        ChatTemplate(HOSTILE[name], "here.jinja", {}).render(TALK)


def test_a_model_without_a_template() -> None:
    model = gw.Model(cached_llama(), gw.Target("eager"), {"name": "t"})
    with pytest.raises(InputError, match=r"no chat template: .*chat_template.jinja.*--template"):
        model.chat(TALK)


def test_what_a_model_says_of_itself(tmp_path: Path) -> None:
    said = {"model_type": "llama", "text_config": {"hidden_size": 3}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    model = model_of(tmp_path)
    assert (model.device.type, str(model.dtype)) == ("cpu", "torch.float32")
    assert model.config.text_config.hidden_size == 3 and model.config.to_dict() == said
    info = model.program.info
    plain = config_of(cached_llama())
    assert (plain.vocab_size, plain.model_type) == (info.vocab_size, info.model_type)
    assert model.generation_config == info.generation_config
