"""`graftwork chat`: a conversation on the terminal, or by a script through standard input."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import err, progress
from .options import (
    AnyModel,
    DataOption,
    DraftOption,
    MaybeRecipe,
    SetOption,
    StopOption,
    SystemOption,
    TargetOption,
    TemplateOption,
    decoding,
    require,
    template_text,
)

# Late imports: torch takes seconds, which `--help` does not need.

if TYPE_CHECKING:
    from ..chat.conversation import Answer, Conversation
    from ..ir import ModelInfo

HELP = """\
/help           this list
/reset          begin anew; the system message stays
/undo           take the last question and its answer back
/retry          answer the last question again
/system [TEXT]  set the system message; without TEXT, remove it
/save FILE      write the messages, as JSON
/load FILE      go on from such a file
/stats          a line of figures after each answer, or none
/exit           leave; so do /quit, /bye and the end of the input (Ctrl-D)
A line that ends with \\ goes on in the next one; // begins a message with a /."""

LEAVE = ("/exit", "/quit", "/bye")

FULL = "the context is full: /reset begins anew, /undo takes the last turn back"


def chat(
    model: AnyModel,
    recipe: MaybeRecipe = None,
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    draft: DraftOption = [],  # noqa: B006
    system: SystemOption = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Of an answer at most (default: the checkpoint's, else 1024)."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: greedy; above: sampling (default: the checkpoint's).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of sampling.")] = None,
    stop: StopOption = [],  # noqa: B006  (typer copies it)
    template: TemplateOption = None,
    target: TargetOption = None,
    data: DataOption = None,
    history: Annotated[
        Path | None, typer.Option(help="Go on from this file, and keep the messages in it.")
    ] = None,
    stream: Annotated[
        bool, typer.Option(help="Print answers as they are generated, or whole.")
    ] = True,
    stats: Annotated[bool, typer.Option(help="A line of figures after each answer.")] = True,
) -> None:
    """Chat with a model. Answers go to standard output, everything else to standard error."""
    from ..artifact.destinations import check_file

    given = template_text(template)
    check_file(history, "--history")
    with progress() as show:
        show("load torch")
        from ..chat.conversation import Conversation
        from ..chat.files import check_template, template_of
        from ..chat.text_stream import check_stop
        from ..runtime.asking.options import check_keywords
        from .open_model import open_model

        asked = {"max_new_tokens": max_new_tokens, "seed": seed}
        options = {name: value for name, value in asked.items() if value is not None}
        options |= decoding(temperature)
        check_keywords(options)
        stops, set_ = [check_stop(text) for text in stop], [*set_, *draft]
        messages = read_messages(history) if history is not None and history.exists() else []

        def known(info: ModelInfo, assets: Mapping[str, Path], room: bool) -> None:
            if assets:
                check_template(assets, model, given)

        opened = open_model(model, recipe, set_, target, show, data=data, known=known, runs=True)
        talk = Conversation(opened, template_of(opened.program, given=given), messages)
        show("compile")
        _ = opened.executable
    name = Path(model).resolve().name
    session = Session(talk, {**options, "stop": stops}, history, stream, stats, name)
    if system is not None:
        session.set_system(system)
    failed = session.run()
    if failed and not sys.stdin.isatty():
        raise typer.Exit(2)  # for scripts


def read_messages(path: Path) -> list[dict[str, Any]]:
    """The messages of a file. Errors: `InputError`."""
    from ..chat.templates import check_messages
    from ..ir.support.errors import InputError
    from ..ir.support.files import read_json

    try:
        read = read_json(path)
        return [] if read == [] else check_messages(read)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path} as a list of messages: {error}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def write_messages(path: Path, messages: list[dict[str, Any]]) -> None:
    """Write messages atomically. Errors: `InputError`."""
    from ..ir.support.scratch import write_text

    write_text(path, json.dumps(messages, indent=1, ensure_ascii=False) + "\n")


@dataclass
class Session:
    """A conversation with a person or a script. options: of `Conversation.answer`. history: the
    file that is kept up to date. name: of the model. failed: whether a line could not be carried
    out. ready: whether there was an answer."""

    talk: Conversation
    options: dict[str, Any]
    history: Path | None
    stream: bool
    stats: bool
    name: str
    failed: bool = False
    ready: bool = field(default=False, init=False)
    commands: dict[str, Callable[[str], None]] = field(init=False)

    def __post_init__(self) -> None:
        self.commands = {
            **{"help": self._help, "reset": self._reset, "undo": self._undo},
            **{"retry": self._retry, "system": self.set_system, "save": self._save},
            **{"load": self._load, "stats": self._stats},
        }

    def run(self) -> bool:
        """Until the end of the input, or `LEAVE`; whether something failed."""
        from ..ir.support.errors import GraftworkError

        _say(f"{self.name}: write a message, or /help")
        for line in _lines():
            name, _, rest = line.strip().partition(" ")
            if name in LEAVE:
                break
            try:
                self._carry_out(line, name, rest.strip())
            except (GraftworkError, OSError) as error:
                self.failed = True
                err.print(f"error: {error}", markup=False, soft_wrap=True)
        return self.failed

    def _carry_out(self, line: str, name: str, rest: str) -> None:
        if not name.startswith("/") or name.startswith("//"):
            self._ask(line[1:] if name.startswith("//") else line)
            return
        known = name[1:] in self.commands
        require(known, f"{name} is no command; /help lists them (//... for a message with a /)")
        self.commands[name[1:]](rest)

    def _ask(self, text: str) -> None:
        if not text.strip():
            return
        self._answer_to([*self.messages, {"role": "user", "content": text}])

    def _answer_to(self, messages: list[dict[str, Any]]) -> None:
        """Go on from messages; where no answer comes, everything stays as it was."""
        before, answered = [*self.messages], False
        self.messages[:] = messages
        try:
            answered = self._answer()
        finally:
            if not answered:
                self.messages[:] = before
        self._keep()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Those of the conversation."""
        return self.talk.messages

    def _answer(self) -> bool:
        """Answer the last message; False where Ctrl-C came before the first token."""
        from ..chat.conversation import ContextFull, ends_of_turn
        from .text_printer import TextPrinter

        talk, begun = self.talk, time.perf_counter()
        ends, stops = ends_of_turn(talk.model, talk.template), self.options["stop"]
        with ExitStack() as stages:
            stage = "read the prompt" if self.ready else "compile the steps and read the prompt"
            stages.enter_context(progress())(stage)
            shown: dict[str, Any] = {"stops": stops, "ends": ends, "silent": not self.stream}
            printer = TextPrinter(talk.model.tokenizer.backend_tokenizer, stages.close, **shown)
            try:
                with interruptible(lambda: printer.begun is not None) as stopped:
                    watch: dict[str, Any] = {"streamer": printer, "stopping_criteria": [stopped]}
                    answer = talk.answer(**self.options, **watch)
            except KeyboardInterrupt:
                stages.close()
                _say("\nstopped; the message is taken back")
                return False
            except ContextFull as error:
                raise ContextFull(f"{error} (/reset, /undo)") from error
        self.ready = True
        if not self.stream:
            print(answer.text, flush=True)
        first = 0.0 if printer.begun is None else printer.begun - begun
        self._remark(answer, first, stopped.asked)
        return True

    def _remark(self, answer: Answer, first: float, stopped: bool) -> None:
        program, stats = self.talk.model.program, answer.stats
        full = answer.prompt + len(answer.ids) >= program.info.context
        if stopped:
            _say("stopped")
        elif answer.finish == "length" and full and not program.plan.cache.endless:
            _say(FULL)
        elif answer.finish == "length":
            _say("cut off: as many tokens as --max-new-tokens allows")
        if self.stats:
            reused = f"{stats.reused_tokens} of {answer.prompt} prompt tokens reused"
            rate = f"{stats.new_tokens} tokens, {stats.tokens_per_second:.0f} tokens/s"
            _say(f"[{rate}, the first after {first:.2f} s, {reused}]")

    def _keep(self) -> None:
        if self.history is not None:
            write_messages(self.history, self.messages)

    # -- commands

    def set_system(self, text: str) -> None:
        """Set the system message, or remove it."""
        if self.messages and self.messages[0]["role"] == "system":
            self.messages.pop(0)
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def _help(self, rest: str) -> None:
        _say(HELP)

    def _reset(self, rest: str) -> None:
        del self.messages[int(bool(self.messages) and self.messages[0]["role"] == "system") :]
        self.talk.held.clear()
        self._keep()

    def _undo(self, rest: str) -> None:
        del self.messages[self._last_question() :]
        self._keep()

    def _retry(self, rest: str) -> None:
        self._answer_to(self.messages[: self._last_question() + 1])

    def _last_question(self) -> int:
        places = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        require(bool(places), "there is no question yet")
        return places[-1]

    def _save(self, rest: str) -> None:
        require(bool(rest), "/save: expected a file: /save FILE")
        write_messages(Path(rest), self.messages)
        _say(f"{len(self.messages)} messages in {rest}")

    def _load(self, rest: str) -> None:
        require(bool(rest), "/load: expected a file: /load FILE")
        self.messages[:] = read_messages(Path(rest))
        _say(f"{len(self.messages)} messages from {rest}")

    def _stats(self, rest: str) -> None:
        self.stats = not self.stats


def _say(text: str) -> None:
    err.print(text, markup=False, soft_wrap=True)


def _lines() -> Iterator[str]:
    """The messages that are typed or piped in; Ctrl-C takes a typed line back."""
    typed = sys.stdin.isatty()
    if typed:
        import readline  # noqa: F401  (typed lines can be edited then)
    while True:
        try:
            line = _line("> " if typed else "")
            while line is not None and line.endswith("\\"):
                line = f"{line[:-1]}\n{_line('. ' if typed else '') or ''}"
        except KeyboardInterrupt:
            if not typed:
                raise
            _say("\n/exit or Ctrl-D leaves")
            continue
        if line is None:
            return
        yield line


def _line(prompt: str) -> str | None:
    """One line; None at the end of the input. Errors: `InputError` if it is not UTF-8."""
    from ..ir.support.errors import InputError

    try:
        return input(prompt)
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: expected text in UTF-8: {error}") from error


@dataclass
class Interrupt:
    """A stopping criterion: Ctrl-C was pressed."""

    asked: bool = False

    def __call__(self, input_ids: Any, scores: Any) -> bool:
        """Called after each token."""
        return self.asked


@contextmanager
def interruptible(speaking: Callable[[], bool]) -> Iterator[Interrupt]:
    """Ctrl-C ends an answer after its next token, so that what the caches hold stays; before the
    first token, or pressed again, it is a `KeyboardInterrupt`. speaking: whether there is one."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():  # signals are the main one's
        yield interrupt
        return

    def pressed(number: int, frame: Any) -> None:
        if interrupt.asked or not speaking():
            raise KeyboardInterrupt
        interrupt.asked = True

    before = signal.signal(signal.SIGINT, pressed)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
