"""A transformed model, as `optimize` returns it, and `load` of a saved one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from .artifact import saved
from .artifact.shards import checked
from .backends import compile as compile_for
from .backends.target import Target
from .chat.chats import Chats
from .chat.files import Config, Settings, config_of
from .chat.tokenizer import Tokenizer
from .data.prompts import as_ids, as_prompts
from .drawing.cards import card, fold, picture
from .drawing.svg import plan_lines, program_svg
from .exporting.exports import Exports
from .hub.download import local
from .hub.publishing import Publishing
from .ir import InputError, Program
from .ir.execution.executable import Executable, Planned
from .ir.plan import DecodePlan
from .ir.support.files import plain_path
from .ir.support.threads import traces
from .passes.engine.manager import run_passes
from .recipe import Recipe
from .report import Cost, Report, megabytes, weight_bytes
from .runtime.asking.input_ids import check_ids, check_row
from .runtime.asking.keywords import GenerateOptions
from .runtime.asking.options import check_defaults
from .runtime.asking.sources import FEATURES, TOKENS, takes_features
from .runtime.cache.conversations import Conversations
from .runtime.generation import check_request, forget, generate
from .runtime.lore_files import load_learnt, save_learnt
from .runtime.prefix import load_prefix, save_prefix
from .runtime.reading import check_pooling, embed
from .runtime.scoring import score

if TYPE_CHECKING:
    import tokenizers

_COMPILED = "compiled"
READING = ("stop_strings", "json_schema", "regex", "grammar")
"""Options that need a tokenizer."""


def load(
    folder: str | Path, *, target: Target | str | None = None, bits: int | None = None
) -> Model:
    """Load a model that `Model.save` wrote; needs neither transformers nor the original model.

    target: default: the saved one; its dtype cannot change. bits: reduce weights of more bits to 2,
    3, 4 or 6 by a shift (pass `shift_weights`). Errors: `InputError` naming a missing or damaged
    file, or another dtype; `PassError` if no weight has more bits.
    """
    found = saved.load(folder)
    check_defaults(found.program.info)
    made_for = Target.parse(found.manifest.target)
    where = made_for if target is None else as_target(target, made_for.dtype)
    if where.dtype != made_for.dtype:
        raise InputError(
            f"{folder} was made for {made_for}; its dtype cannot become {where}. "
            f"Optimize the model again for that target"
        )
    made = Model(found.program, where, found.manifest.recipe, found.manifest.report)
    return made if bits is None else _shifted(made, bits)


def _shifted(model: Model, bits: int) -> Model:
    """The model with weights shifted to fewer bits."""
    shift = {"pass": "shift_weights", "options": {"bits": bits}}
    (step,) = Recipe.load({"name": "load", "passes": [shift]}).steps
    program, _ = run_passes(model.program, [step])
    recipe = {**model.recipe, "passes": [*model.recipe["passes"], {**shift, "optional": False}]}
    return Model(program, model.target, recipe, model.report)


@dataclass(frozen=True)
class Model(Exports, Chats, Publishing):
    """A transformed model for a target. program: prints as text. recipe: as plain data. report: of
    the passes; None if it was not made by `optimize`."""

    program: Program
    target: Target
    recipe: Mapping[str, Any]
    report: Report | None = None

    def __post_init__(self) -> None:
        if self.report is not None:
            # A weak reference: a cycle would keep the weights until garbage collection.
            object.__setattr__(self, "report", self.report.of(weakref.ref(self)))

    def tell(self, cost: Cost | None = None, note: str = "") -> None:
        """Put into the report what the recipe costs, or a note."""
        if self.report is not None:
            notes = (*self.report.notes, note) if note else self.report.notes
            report = self.report.model_copy(
                update={"cost": cost or self.report.cost, "notes": notes}
            )
            object.__setattr__(self, "report", report.of(weakref.ref(self)))

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        target: Target | str | None = None,
    ) -> Model:
        """What `save_pretrained` or `push_to_hub` wrote: a folder, or an id of the Hub, of which
        revision is a branch, tag or commit. target, errors: as `load`; `InputError` also for a
        checkpoint, which `optimize` takes."""
        folder = local(pretrained_model_name_or_path, revision)
        if Path(folder).is_dir() and not saved.is_saved(Path(folder)):
            raise InputError(
                f"{pretrained_model_name_or_path} is no artifact of graftwork: optimize it first "
                f"(graftwork.optimize, or graftwork optimize)"
            )
        return load(folder, target=target)

    @property
    def compiled(self) -> Executable | None:
        """The executable if it is compiled."""
        return self.__dict__.get(_COMPILED)

    @property
    def executable(self) -> Executable:
        """The compiled program; compiled on first use, once for all threads.

        Errors: `InputError` if the device is missing or a weight holds NaN; `UnsupportedError`
        naming an op that the backend cannot lower.
        """
        return self.compiled or self._compile()

    @traces
    def _compile(self) -> Executable:
        if _COMPILED not in self.__dict__:
            self.__dict__[_COMPILED] = compile_for(checked(self.program), self.target)
        made: Executable = self.__dict__[_COMPILED]
        return made

    def replanned(self, plan: DecodePlan) -> Model:
        """The same with another plan, which calls functions as this one's; what is compiled
        stays."""
        made = replace(self, program=self.program.replace(plan=plan))
        if self.compiled is not None:
            made.__dict__[_COMPILED] = Planned(self.compiled, plan)
        return made

    @property
    def device(self) -> torch.device:
        """Where it runs; prompts may lie anywhere."""
        return torch.device(self.target.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations that no pass gave other bits."""
        return self.target.dtype

    @cached_property
    def config(self) -> Config:
        """The checkpoint's config.json as attributes (``.to_dict()``), or, without that file, what
        the program knows. Errors: `InputError` for a damaged file."""
        return config_of(self.program)

    @property
    def generation_config(self) -> Settings:
        """The checkpoint's defaults of `generate` by name, a copy: ``eos_token_id``,
        ``do_sample``, ``temperature``, ..."""
        return Settings(self.program.info.generation_config)

    def can_generate(self) -> bool:
        """True: what transformers' pipelines ask."""
        return True

    def to(self, device: torch.device | str) -> Model:
        """This model, if it runs there. Errors: `InputError` for another device than its own."""
        if torch.device(device).type != self.device.type:
            raise InputError(
                f"to({str(device)!r}): the model was made for {self.target}; optimize it with "
                f"target= for another device, or give a pipeline device={str(self.device)!r}"
            )
        return self

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Errors: `InputError` if tokenizer.json is missing or invalid."""
        return Tokenizer(self.program)

    def generate(
        self,
        input_ids: torch.Tensor | str | Sequence[str] | Sequence[Sequence[int]] | None = None,
        /,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Continue prompts like transformers' ``generate``; returns token ids i64[B,S+N].

        input_ids: token ids i64[B,S]; or a text, texts (of a model with a tokenizer) or lists of
        ids of any lengths, which are padded on the left. Options have transformers' names
        (``max_new_tokens``, ``do_sample``, ``temperature``, ``eos_token_id``, ``stop_strings``,
        ``logits_processor``, ``generation_config``, ``streamer``, ``seed``, ...);
        `graftwork.runtime.asking.options.GenerationOptions` says what each does, and
        docs/generate.md compares them all. Unsupported ones are rejected by name. Defaults: the
        checkpoint's generation config; ``do_sample=False`` always decodes greedily.

        One generation runs at a time; other threads wait. A streamer, processor or stopping
        criterion must not call this model: it gets an `InputError`, or, from another thread, a
        deadlock.
        """
        asked: dict[str, Any] = {**options}
        ids = self._prompts(input_ids, asked)
        reads = any(asked.get(name) is not None for name in READING)
        if reads and asked.get("tokenizer") is None and "tokenizer.json" in self.program.assets:
            asked["tokenizer"] = self.tokenizer  # large ones take seconds to read
        if self.compiled is None:
            check_request(ids, asked, self.program)  # before compiling, which is slow
        return generate(self.executable, ids, **asked)

    def _tokenizer(self) -> tokenizers.Tokenizer:
        return self.tokenizer.backend_tokenizer

    def _prompts(self, given: Any, asked: dict[str, Any]) -> torch.Tensor:
        """The call's prompts, which are taken out of `asked`; their mask is put there."""
        wanted = FEATURES if takes_features(self.program) else TOKENS
        named = {name: asked.pop(name, None) for name in (wanted, "inputs")}
        found = [value for value in (given, *named.values()) if value is not None]
        rows = asked.get("inputs_embeds")
        if not found and rows is not None and wanted == TOKENS:
            count = len(rows) if isinstance(rows, torch.Tensor) and rows.dim() else 0
            return torch.zeros(count, 0, dtype=torch.int64)
        if not found and isinstance(asked.get("bos_token_id"), int) and wanted == TOKENS:
            found = [[[asked["bos_token_id"]]]]
        if len(found) != 1:
            got = "both" if found else ", ".join(asked) or "nothing"
            what = (
                "the sources' features"
                if wanted == FEATURES
                else "the prompts' token ids i64[B,S], texts, or inputs_embeds f[B,S,H],"
            )
            raise InputError(
                f"generate: expected {what} as its first argument or as {wanted}=, got {got}"
            )
        if wanted == FEATURES:
            return found[0]  # type: ignore[no-any-return]
        ids, mask = as_prompts(found[0], self.program, self._tokenizer)
        if mask is not None:
            if asked.get("attention_mask") is not None:
                raise InputError(
                    "attention_mask: expected none beside lists of unequal lengths, which are "
                    "padded by themselves; pad them, or give a tensor"
                )
            asked["attention_mask"] = mask
        return ids

    def __call__(
        self, input_ids: torch.Tensor | Sequence[Sequence[int]], /, *, prompt: int = 1
    ) -> torch.Tensor:
        """Logits f32[B,S,V] of token ids i64[B,S], computed as in decoding, without drafts.

        Cache eviction, sparse reads and depth policies apply as in generation. prompt: number of
        leading tokens that are run as a prompt. Threads take turns. Errors: as
        `graftwork.runtime.scoring.score`.
        """
        ids = as_ids(input_ids)
        check_ids(ids, self.program.info)  # before compiling, which is slow
        return score(self.executable, ids, prompt)

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: str = "mean",
        normalize: bool = True,
    ) -> torch.Tensor:
        """Texts, or their token ids, as vectors f32[B,H]: the states of their tokens behind the
        model's last norm (transformers' ``last_hidden_state``), pooled.

        pooling: "mean" of all tokens, or the "last" one's. normalize: to length 1. What is cached
        of earlier texts moves to copies (see `keep`). Errors: `InputError` for empty texts, ids
        outside the vocabulary and texts longer than the context; `UnsupportedError` for models
        that read sources and recipes that cut the step.
        """
        check_pooling(pooling)
        for index, text in enumerate([texts] if isinstance(texts, str) else texts):
            if isinstance(text, (str, list, tuple)) and not text:
                raise InputError(f"embed: text {index} is empty")
        ids, mask = as_prompts(texts, self.program, self._tokenizer)
        kept = torch.ones_like(ids) if mask is None else mask
        rows = [row[own != 0].tolist() for row, own in zip(ids, kept, strict=True)]
        most = self.program.info.context
        for index, row in enumerate(rows):  # before compiling, which is slow
            check_row(f"embed: text {index}", row, self.program.info.vocab_size)
            if len(row) > most and not self.program.plan.cache.endless:
                raise InputError(
                    f"embed: text {index} has {len(row)} tokens, and the model's context is {most}"
                )
        return embed(self.executable, rows, pooling, normalize=normalize)

    def cache_bytes(self) -> int:
        """Current bytes of the state buffers; 0 before the first generation."""
        return 0 if self.compiled is None else self.compiled.state_bytes()

    def forget(self, *, learnt: bool = True) -> None:
        """Drop cached texts of earlier calls.

        By default the last call's texts and copies of earlier ones (see `keep`) are cached; a
        prompt that begins with one runs only the rest. learnt: also reset adaptive drafters and
        policies (recycling tables, n-gram searches, thresholds).
        """
        if self.compiled is not None:
            forget(self.compiled, learnt=learnt)

    def keep(self, megabytes: float) -> None:
        """Set the memory for cached texts of earlier calls, besides prefixes of `load_prefix`;
        default: 256. 0: only the last call's texts. Errors: `InputError` for negative numbers."""
        if not 0 <= megabytes < float("inf"):
            raise InputError(f"keep: expected megabytes, 0 or more, got {megabytes!r}")
        executable = self.executable
        with executable.turn:
            Conversations.of(executable).limit(int(megabytes * 2**20))

    def save_prefix(
        self, input_ids: torch.Tensor | Sequence[Sequence[int]], path: str | Path
    ) -> int:
        """Run a text i64[1,S], write its cache rows to a safetensors file and return its length in
        tokens. Errors: as `graftwork.runtime.prefix.save_prefix`."""
        return save_prefix(self.executable, as_ids(input_ids), plain_path("save_prefix", path))

    def load_prefix(self, path: str | Path) -> torch.Tensor:
        """Load a file of `save_prefix` and return its text i64[1,S]. Until `forget`, prompts that
        begin with it run only the rest. Errors: `InputError` for a damaged file, or one of another
        program."""
        return load_prefix(self.executable, plain_path("load_prefix", path))

    def save_learnt(self, path: str | Path) -> int:
        """Write what texts have taught the drafters (n-gram counts, recycled candidates) to a
        safetensors file; its bytes. Errors: as `graftwork.runtime.lore_files.save_learnt`."""
        return save_learnt(self.executable, plain_path("save_learnt", path))

    def load_learnt(self, path: str | Path) -> None:
        """Draft as if this model had written the texts that a file of `save_learnt` is of. Errors:
        `InputError` for a damaged file, one of another vocabulary, or of other drafters."""
        load_learnt(self.executable, plain_path("load_learnt", path))

    def save(
        self, folder: str | Path, *, progress: Callable[[str], None] = lambda name: None
    ) -> Path:
        """Write program, weights and tokenizer to a folder for `load`. An existing artifact is
        replaced atomically. Errors: `InputError` if the folder is not an artifact, or a weight
        holds NaN."""
        return saved.save(
            self.program,
            folder,
            target=self.target,
            recipe=dict(self.recipe),
            report=self.report,
            progress=progress,
        )

    def _repr_html_(self) -> str:
        facts = [
            f"recipe {self.recipe.get('name')} ({self.recipe.get('contract')})",
            *plan_lines(self.program.plan),
        ]
        made = "" if self.report is None else fold("report", self.report._repr_html_())
        drawn = fold("program", picture(program_svg(self.program)))
        size = megabytes(weight_bytes(self.program))
        return card(f"{self.program.name} for {self.target}, {size}", facts, (), (), made, drawn)

    def __str__(self) -> str:
        size = megabytes(weight_bytes(self.program))
        return f"{self.program.name} for {self.target}, recipe {self.recipe.get('name')}, {size}"


def as_target(target: Target | str | None, dtype: torch.dtype | None = None) -> Target:
    """Parse a target. Errors: `InputError`."""
    if isinstance(target, Target):
        return target
    if target is not None and not isinstance(target, str):
        raise InputError(f"target: expected text, such as torch:cpu, or a Target; got {target!r}")
    if target is None:
        return Target.default()
    parsed = Target.parse(target)
    if dtype is not None and target.count(":") < 2:
        return Target(parsed.backend, parsed.device, dtype, parsed.threads)
    return parsed
