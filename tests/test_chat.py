"""Conversations: on the command line by a script, in Python, and what their caches hold."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from test_chat_template import tokenizer_files
from test_front_door import ROOT, run

import graftwork as gw
from graftwork.chat.conversation import Conversation, ends_of_turn
from graftwork.chat.files import template_of
from graftwork.chat.text_stream import TextStream, cut
from graftwork.cli.text_printer import TextPrinter
from graftwork.ir import InputError
from graftwork.ir.support.tokenizer import decode

DEMO = ROOT / "graftwork" / "demo_model"
TARGET = "eager:cpu:float32"
TEMPLATE = (
    "{% if messages[0].role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{% for m in messages %}# {{ m.role }}\n{{ m.content ~ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)
THREE = ["def add(a, b):", "def subtract(a, b):", "def multiply(a, b):"]


@pytest.fixture(scope="module")
def demo() -> gw.Model:
    return gw.optimize(DEMO, target=TARGET)


@pytest.fixture(scope="module")
def saved(demo: gw.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as an artifact, which is opened sooner than it is traced."""
    return demo.save(tmp_path_factory.mktemp("saved") / "demo")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path / "template.jinja"


class Chat:
    """A chat with the demo model by a script."""

    def __init__(
        self,
        command: tuple[object, ...],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.command, self.capsys, self.monkeypatch = command, capsys, monkeypatch

    def __call__(self, *lines: str, options: tuple[object, ...] = (), code: int = 0) -> str:
        """What is on standard output; `said` is what is on standard error."""
        self.monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        left = run(*self.command, "--max-new-tokens", 12, *options)
        captured = self.capsys.readouterr()
        self.said = captured.err
        assert left == code and "Traceback" not in self.said, self.said
        return captured.out

    def reused(self) -> list[tuple[int, int]]:
        """Of each answer: reused tokens of its prompt, and all of them."""
        found = re.findall(r"(\d+) of (\d+) prompt tokens reused", self.said)
        return [(int(reused), int(all_)) for reused, all_ in found]


@pytest.fixture
def chat(
    saved: Path, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Chat:
    return Chat(("chat", saved, "--template", file), capsys, monkeypatch)


def answers(model: gw.Model, questions: list[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """What a model says that holds nothing of earlier turns."""
    messages: list[dict[str, Any]] = []
    said = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        model.forget()
        said.append(model.chat(messages, chat_template=TEMPLATE, max_new_tokens=12))
        messages.append({"role": "assistant", "content": said[-1]})
    return said, messages


def test_a_script_of_three_turns(
    demo: gw.Model, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are those of fresh prompts; from the second turn on new tokens alone are fed."""
    history = tmp_path / "history.json"
    wanted, messages = answers(demo, THREE)
    shown = chat(*THREE, options=("--history", history))
    assert shown == "".join(f"{answer}\n" for answer in wanted)
    assert json.loads(history.read_text()) == messages
    (first, one), (second, two), (third, three) = chat.reused()
    assert first == 0 and one < second < two < third < three
    assert two - second < 12 + 12  # the question, and the last token of the answer
    more = chat("/undo", THREE[2], options=("--history", history, "--no-stream", "--no-stats"))
    assert more == f"{wanted[2]}\n" and not chat.reused()
    assert json.loads(history.read_text()) == messages


def test_commands(demo: gw.Model, chat: Chat, tmp_path: Path) -> None:
    saved, later = tmp_path / "saved.json", tmp_path / "later.json"
    lines = [
        THREE[0],
        "/retry",
        "/stats",
        THREE[1],
        f"/save {saved}",
        "/reset",
        "/system Be brief.",
    ]
    lines += [
        THREE[1],
        "/undo",
        "/stats",
        f"/load {saved}",
        "/undo",
        "//",
        f"/save {later}",
        "/help",
    ]
    shown = chat(*lines, "", "/quit", "unread")
    wanted, messages = answers(demo, THREE[:2])
    assert shown.startswith(f"{wanted[0]}\n{wanted[0]}\n{wanted[1]}\n")
    assert json.loads(saved.read_text()) == messages
    assert json.loads(later.read_text())[:3] == [*messages[:2], {"role": "user", "content": "/"}]
    assert len(chat.reused()) == 3 and "/retry          answer" in chat.said
    wrong = chat("/undo", "/save", "/load nowhere.json", "/nothing", THREE[0], code=2)
    assert wrong == f"{wanted[0]}\n"
    for said in ("no question yet", "expected a file", "nowhere.json", "/nothing is no command"):
        assert said in chat.said


def test_a_full_context_and_refused_messages(chat: Chat, tmp_path: Path) -> None:
    """Each is one message; the conversation goes on where it was."""
    long = "x = 1; " * 600
    shown = chat(THREE[0], long, "/reset", THREE[0], code=2)
    half = len(shown) // 2
    assert shown[:half] == shown[half:] and "the model's context 1024" in chat.said
    assert "/reset" in chat.said
    history = tmp_path / "robot.json"
    history.write_text(json.dumps([{"role": "robot", "content": "beep"}]))
    chat(THREE[0], options=("--history", history), code=2)
    assert "refuses this conversation: no robots" in chat.said
    assert len(json.loads(history.read_text())) == 1
    chat("/undo", options=("--history", history), code=2)
    history.write_text("[]")  # of a chat that was reset
    assert chat(THREE[0], "/undo", options=("--history", history)) == shown[:half]
    assert json.loads(history.read_text()) == []
    history.write_text("[{]")
    chat(options=("--history", history), code=2)
    assert "as a list of messages" in chat.said


def test_an_answer_that_reaches_the_end_of_the_context(chat: Chat) -> None:
    chat("x = 1; " * 245, options=("--max-new-tokens", 4000))
    ((_, prompt),) = chat.reused()
    assert 900 < prompt < 1024 and "the context is full: /reset" in chat.said


def test_ctrl_c_ends_the_answer_alone(
    chat: Chat, demo: gw.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, pressed, before = TextPrinter.show, [], signal.getsignal(signal.SIGINT)

    def show(printer: TextPrinter, ids: Any) -> None:
        plain(printer, ids)
        if len(printer.stream.ids) == 3 and not pressed:
            pressed.append(os.kill(os.getpid(), signal.SIGINT))

    monkeypatch.setattr(TextPrinter, "show", show)
    shown = chat(THREE[0], THREE[1])
    tokens = [int(n) for n in re.findall(r"(\d+) tokens, ", chat.said)]
    assert pressed and 3 <= tokens[0] <= 4 < tokens[1] and shown.count("\n") >= 2
    (_, one), (second, _) = chat.reused()
    assert second > one and "stopped" in chat.said
    assert signal.getsignal(signal.SIGINT) is before


def test_a_model_without_a_template_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (("chat", DEMO), ("generate", DEMO, "--chat", "--prompt", "x")):
        assert run(*command) == 2
        said = capsys.readouterr().err
        assert "has no chat template" in said and "--template FILE" in said
    assert run("generate", DEMO, "--system", "x", "--prompt", "x") == 2
    assert "need --chat" in capsys.readouterr().err


def talk_of(model: gw.Model, template: str) -> Conversation:
    return Conversation(model, template_of(model.program, given=template))


def test_what_was_generated_is_fed_as_it_was(demo: gw.Model) -> None:
    """Also where its text has other tokens; templates that rewrite it have it encoded anew."""
    talk = talk_of(demo, TEMPLATE)
    talk.messages.append({"role": "user", "content": THREE[0]})
    text, ids = talk.prompt()
    cut_up = [demo.tokenizer.token_to_id(char) for char in "return"]
    assert None not in cut_up
    talk._hold(text, ids, cut_up)
    talk.messages.append({"role": "assistant", "content": "return"})
    talk.messages.append({"role": "user", "content": THREE[1]})
    again = talk.prompt()[1]
    assert again[: len(ids) + 6] == [*ids, *cut_up]
    assert decode(demo.tokenizer, again) == decode(
        demo.tokenizer, demo.tokenizer.encode(talk.prompt()[0], add_special_tokens=False).ids
    )
    talk.template = template_of(demo.program, given=TEMPLATE.replace("m.content", "m.content[1:]"))
    text, ids = talk.prompt()
    assert ids == demo.tokenizer.encode(text, add_special_tokens=False).ids


def test_the_templates_own_end_of_turn(demo: gw.Model, tmp_path: Path) -> None:
    """The token that it writes behind an answer ends one, whatever the checkpoint's end is."""
    files = {path.name: path for path in tokenizer_files(tmp_path, None).iterdir()}
    model = gw.Model(demo.program.replace(assets=files), demo.target, {"name": "t"})
    for behind, more in (("<|im_end|>\n", ["<|im_end|>"]), ("\n", []), (" {{ eos_token }}", None)):
        template = template_of(
            model.program, given="{% for m in messages %}{{ m.content }}" + behind + "{% endfor %}"
        )
        wanted = ["<|im_end|>"] if more is None else more
        ids = [model.tokenizer.token_to_id(token) for token in wanted]
        assert ends_of_turn(model, template) == (*demo.program.info.eos, *ids)


def test_chat_in_python(demo: gw.Model) -> None:
    messages = [{"role": "user", "content": THREE[0]}]
    given = {"chat_template": TEMPLATE}
    prompt = demo.apply_chat_template(messages, **given)
    text = demo.chat(messages, **given, max_new_tokens=16)
    assert text == decode(
        demo.tokenizer, demo.generate([prompt], max_new_tokens=16)[0, len(prompt) :]
    )
    stop = text[5:8]
    assert demo.chat(messages, **given, max_new_tokens=16, stop=stop) == cut(text, [stop])[0]
    assert messages == [{"role": "user", "content": THREE[0]}]
    with pytest.raises(InputError, match="context"):
        demo.chat([{"role": "user", "content": "x = 1; " * 600}], **given)
    with pytest.raises(InputError, match="stop: expected texts"):
        demo.chat(messages, **given, stop=[""])


def test_a_pipeline_of_transformers_takes_a_model(demo: gw.Model) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = TEMPLATE
    theirs = AutoModelForCausalLM.from_pretrained(DEMO)
    asked = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    messages = [{"role": "user", "content": THREE[0]}]
    said = [
        pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")(given, **asked)
        for model in (demo, theirs)
        for given in (THREE[0], messages)
    ]
    assert said[:2] == said[2:] and said[0][0]["generated_text"]
    own = pipeline("text-generation", model=demo, tokenizer=demo.tokenizer, device="cpu")
    assert own(THREE[0], **asked) == said[0]
    with pytest.raises(InputError, match="made for eager"):
        demo.to("cuda")


# -- text as it comes


def test_text_comes_in_whole_characters(demo: gw.Model) -> None:
    torch.manual_seed(0)
    written = "naïve = '日本語 ✓' # ééé\n\tprint(naïve)  "
    ids = [*demo.tokenizer.encode(written).ids, *torch.randint(1, 2048, (200,)).tolist()]
    stream = TextStream(demo.tokenizer)
    pieces = [stream.put([id]) for id in ids]
    assert "".join([*pieces, stream.end()]) == decode(demo.tokenizer, ids)
    own = TextStream(demo.tokenizer)
    assert not any("\ufffd" in own.put([id]) for id in demo.tokenizer.encode(written).ids)


@pytest.mark.parametrize("stops", [["lo w"], ["d!", "wor"], ["xyz"], ["he"]])
def test_nothing_of_a_stop_is_shown(demo: gw.Model, stops: list[str]) -> None:
    text = "hello hello world and more"
    stream, shown = TextStream(demo.tokenizer, stops), ""
    for id in demo.tokenizer.encode(text).ids:
        shown += stream.put([id])
        assert cut(text, stops)[0].startswith(shown)
    assert (shown + stream.end(), stream.stopped) == cut(text, stops)


# -- generate


def test_generate_takes_messages_and_stops(
    demo: gw.Model, saved: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": THREE[0]}]
    demo.forget()
    wanted = demo.chat(messages, chat_template=TEMPLATE, max_new_tokens=12)
    asked = ["--chat", "--template", file, "--system", "Be brief.", "--max-new-tokens", 12]
    asked += ["--prompt", THREE[0]]
    for more in ([], ["--no-stream"]):
        assert run("generate", saved, *asked, *more) == 0
        assert capsys.readouterr().out == f"{wanted}\n"
    stop = wanted[4:7]
    for more in ([], ["--json"]):
        assert run("generate", saved, *asked, "--stop", "never", "--stop", stop, *more) == 0
        out = capsys.readouterr().out
        said = json.loads(out) if more else {"text": out[:-1], "finish_reason": "stop"}
        assert (said["text"], said["finish_reason"]) == (cut(wanted, [stop])[0], "stop")
    assert run("generate", saved, *asked, "--stop", "") == 2


def test_generate_reads_a_file_or_standard_input(
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "text").write_text(THREE[0])
    said = []
    for source in (["--file", tmp_path / "text"], ["--file", "-"], ["--prompt", "-"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(THREE[0].encode())))
        assert run("generate", saved, *source, "--max-new-tokens", 4) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] != "\n"


def test_generate_writes_json_of_a_schema(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a file, or as it stands; what is no schema is refused before the model is opened."""
    fields = {"ok": {"type": "boolean"}, "kind": {"enum": ["sum", "product"]}}
    schema = {"type": "object", "properties": fields, "required": ["ok", "kind"]}
    schema |= {"additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    asked = ("generate", saved, "--prompt", "def add(a, b):", "--max-new-tokens", 64)
    for given in (tmp_path / "schema.json", json.dumps(schema)):
        assert run(*asked, "--json-schema", given) == 0
        found = json.loads(capsys.readouterr().out)
        assert isinstance(found["ok"], bool) and found["kind"] in ("sum", "product")
    for bad, said in (("{", "expected a JSON schema"), (tmp_path / "none", "expected a JSON")):
        assert run("generate", tmp_path / "none", *asked[2:], "--json-schema", bad) == 2
        assert said in capsys.readouterr().err
    assert run(*asked, "--json-schema", '{"type": "nothing"}') == 2
    assert "no text can fit" in " ".join(capsys.readouterr().err.split())
