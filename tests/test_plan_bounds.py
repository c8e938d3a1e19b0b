"""Numbers of plans and facts of models: what is out of bounds is refused where it is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, get_type_hints

import pytest
import torch
from selection import one_in
from tiny import cached_llama, drafting_llama

from graftwork import optimize
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.cli.demo import demo_folder
from graftwork.ir import (
    InputError,
    ModelInfo,
    ParseError,
    Program,
    VerifyError,
    Weight,
    parse_program,
    program_text,
    verify,
)
from graftwork.ir.plan import (
    RECORDS,
    CachedDraft,
    DecodePlan,
    FirstDraft,
    HeadsDraft,
    MergedDraft,
    Record,
    RecurrentDraft,
    SampledTree,
    StaticTree,
    WidenedChain,
)
from graftwork.ir.support.discovery import import_methods
from graftwork.ir.support.tokenizer import encode, read_tokenizer
from graftwork.passes.drafting.corpus import CorpusDraft
from graftwork.passes.drafting.draft_hydra import DraftHydra
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.jacobi import JacobiDraft
from graftwork.passes.drafting.lookahead import LookaheadDraft
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.runtime.generation import generate
from graftwork.training.fit import FitOptions

import_methods()
KINDS = sorted(RECORDS)
NUMBERS = [
    (slot, kind, field.name)
    for slot, kind in KINDS
    for field in fields(RECORDS[slot, kind])
    if type(getattr(RECORDS[slot, kind](), field.name)) in (int, float)
]
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def test_every_record_is_legal_as_it_comes() -> None:
    for cls in RECORDS.values():
        assert isinstance(cls(), cls)


def refused(name: str, error: type[Exception], make: Callable[[], object]) -> bool:
    """Whether something is refused, by the name of a number."""
    try:
        make()
    except error as told:
        return f"not a valid {name}" in str(told)
    return False


@pytest.mark.parametrize(("slot", "kind", "name"), one_in(3, NUMBERS))
def test_numbers_out_of_bounds_are_refused_by_name(slot: str, kind: str, name: str) -> None:
    """Every number of every record has bounds on both sides, in Python and in a text."""
    record, text = RECORDS[slot, kind](), program_text(cached_llama()).removesuffix("}\n")
    large: list[Any] = [-5, -1, 2**70, 10**20]
    taken = [
        value
        for value in [*large, float("nan"), float("inf"), -0.5, True]
        if not refused(name, InputError, partial(replace, record, **{name: value}))
    ]
    for value in large:
        said = f"{text}  decode {{\n    {slot} = {kind}({name}={value})\n  }}\n}}\n"
        if not refused(name, ParseError, partial(parse_program, said)):
            taken.append(said)
    assert not taken


def test_every_number_says_its_bounds() -> None:
    """A new record cannot forget them: a bare int or float is no annotation of a number."""
    for cls in RECORDS.values():
        hints = get_type_hints(cls, include_extras=True)
        bare = [f.name for f in fields(cls) if hints[f.name] in (int, float, int | None)]
        assert not bare, f"{cls.__name__}: {bare}"


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (SampledTree, {"widths": (1000, 1000)}),
        (SampledTree, {"widths": ()}),
        (SampledTree, {"widths": (0,)}),
        (WidenedChain, {"depth": 256, "counts": (256, 5, 3, 1)}),
        (StaticTree, {"paths": tuple((0,) * n for n in range(1, 399))}),
        (StaticTree, {"paths": tuple((n,) for n in range(5000))}),
        (StaticTree, {"paths": ((-1,),)}),
        (RecyclingDraft, {"rates": ()}),
        (RecyclingDraft, {"rates": ((),)}),
        (RecyclingDraft, {"rates": ((2.0,),)}),
    ],
)
def test_trees_and_tables_are_bounded(make: type[Record], values: Mapping[str, Any]) -> None:
    with pytest.raises(InputError):
        make(**values)


def test_a_deep_tree_is_read_and_verified_at_once() -> None:
    """Time grows with the text: the largest tree takes a second, not a minute."""
    paths = tuple((0,) * n for n in range(1, 257))
    program = drafting_llama(DraftMedusa(heads=4))
    program = program.replace(plan=replace(program.plan, tree=StaticTree(paths)))
    text = program_text(program)
    start = time.perf_counter()
    again = parse_program(text, program.weights)
    verify(again)
    assert again.plan == program.plan
    assert time.perf_counter() - start < 30
    short = DecodePlan(draft=program.plan.draft, tree=StaticTree(paths))
    assert short.most == 256


def test_a_step_is_bounded_as_a_whole() -> None:
    plan = DecodePlan(draft=MergedDraft((SuffixDraft(4000), SuffixDraft(4000))))
    with pytest.raises(VerifyError, match="verifies up to 8000 tokens"):
        verify(cached_llama(trees=True).replace(plan=plan))
    plan = DecodePlan(draft=FirstDraft((SuffixDraft(),) * 33))
    with pytest.raises(VerifyError, match="34 parts"):
        verify(cached_llama().replace(plan=plan))


# -- what the model's facts say


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"vocab_size": 31}, "vocab_size=31, but the step's logits are"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"context": 0}, "context=0"),
        ({"context": -3}, "context=-3"),
        ({"eos": (32,)}, "eos=32 is outside the vocabulary of 32"),
        ({"eos": (-1,)}, "eos=-1 is outside"),
        ({"bos": 40}, "bos=40 is outside"),
        ({"pad": -1}, "pad=-1 is outside"),
    ],
)
def test_facts_of_the_model_fit_the_step(facts: dict[str, Any], message: str) -> None:
    program = cached_llama()
    with pytest.raises(VerifyError, match=message):
        verify(program.replace(info=replace(program.info, **facts)))


def test_facts_are_of_their_types() -> None:
    with pytest.raises(InputError, match="not a valid eos"):
        ModelInfo("llama", 32, 64, eos=("1",))  # type: ignore[arg-type]


# -- what a plan reads of the functions


def with_plan(program: Program, **slots: Any) -> Program:
    return program.replace(plan=replace(program.plan, **slots))


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (HeadsDraft("medusa", levels=5), r"draft_tokens of medusa as \[any,any,5,K\]"),
        (HeadsDraft("step"), "reads 'draft_tokens', which step does not return"),
        (RecurrentDraft(("medusa",)), "as .any,any,K"),
        (RecurrentDraft(("medusa", "gone")), "refers to the functions 'gone'"),
        (RecurrentDraft(), "names no functions"),
        (CachedDraft("medusa"), "as .any,any,K"),
        (CachedDraft("medusa", entry="step"), "as .any,any"),
        (CorpusDraft("embed"), r"as int64 \[any\]; it is f32"),
        (CorpusDraft("gone"), "refers to the weight 'gone'"),
        (RecyclingDraft(), "reads 'top_tokens', which step does not return"),
    ],
)
def test_a_plan_that_its_functions_do_not_fit_is_refused(draft: Any, message: str) -> None:
    program = drafting_llama(DraftMedusa())
    with pytest.raises(VerifyError, match=message):
        verify(with_plan(program, draft=draft))


def test_iterated_drafts_need_the_argmax() -> None:
    program = cached_llama(trees=True)
    fn = program.function("step").copy()
    outputs = fn.outputs
    del outputs["argmax"]
    fn.set_outputs(outputs)
    for draft in (JacobiDraft(), LookaheadDraft()):
        with pytest.raises(VerifyError, match="reads 'argmax'"):
            verify(with_plan(program.with_function(fn), draft=draft))


# -- drafted ids outside the vocabulary


@pytest.mark.parametrize("target", ["eager", "onnxruntime"])
@pytest.mark.parametrize("token", [32, 1 << 40, -2])
def test_a_corpus_of_other_tokens_is_refused(token: int, target: str) -> None:
    program = cached_llama()
    corpus = Weight.of("corpus", torch.tensor([*PROMPT[0].tolist(), token, -1]))
    program = program.replace(weights=program.weights.adding(corpus))
    program = with_plan(program, draft=CorpusDraft(shortest=1))
    verify(program)
    with pytest.raises(InputError, match=f"corpus.*{token}.*vocabulary of 32"):
        generate(compile(program, Target.parse(target)), PROMPT, max_new_tokens=8)


@pytest.mark.parametrize("target", ["eager", "onnxruntime"])
@pytest.mark.parametrize("shift", [40, 1 << 40, -40])
@pytest.mark.parametrize("draft", [DraftMedusa(), DraftHydra()])
def test_drafted_ids_outside_the_vocabulary_are_refused(
    draft: Any, shift: int, target: str
) -> None:
    """As a damaged table from draft ids to ids would make them."""
    program = drafting_llama(draft)
    A = torch.ops.aten
    for fn in list(program.functions.values()):
        if "draft_tokens" not in fn.outputs:
            continue
        fn = fn.copy()
        outputs = fn.outputs
        with fn.graph.inserting_before(fn.output_node):
            outputs["draft_tokens"] = fn.call(A.add.Tensor, outputs["draft_tokens"], shift)
        fn.set_outputs(outputs)
        program = program.with_function(fn)
    verify(program)
    with pytest.raises(InputError, match="outside the vocabulary of 32"):
        generate(compile(program, Target.parse(target)), PROMPT, max_new_tokens=8)


# -- seeds and text


@pytest.mark.parametrize("seed", [-1, 2**64, 2**200])
def test_seeds_that_torch_cannot_take_are_refused(seed: int) -> None:
    made = compile(cached_llama(), Target.parse("eager"))
    with pytest.raises(InputError, match=r"seed: expected an integer"):
        generate(made, PROMPT, max_new_tokens=2, do_sample=True, seed=seed)
    generate(made, PROMPT, max_new_tokens=2, do_sample=True, seed=2**64 - 1)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_are_refused_before_a_model_is_traced(seed: int) -> None:
    with pytest.raises(InputError, match="seed: expected an integer"):
        optimize("nowhere", seed=seed)
    with pytest.raises(InputError, match="seed: expected an integer"):
        FitOptions(steps=1, seed=seed)


def test_half_characters_in_text_are_refused() -> None:
    tokenizer = read_tokenizer(demo_folder() / "tokenizer.json")
    assert encode(tokenizer, "def f():") == tokenizer.encode("def f():").ids
    with pytest.raises(InputError, match="half a character at place 4"):
        encode(tokenizer, "def \ud800")
    with pytest.raises(InputError, match="half a character"):
        optimize(demo_folder(), data=["def \udcff"], validate=True)


@pytest.mark.parametrize("what", ["model_type", "part", "weight"])
def test_half_characters_in_a_program_are_refused(what: str) -> None:
    text = program_text(cached_llama())
    changes = {
        "model_type": ('model_type="llama"', 'model_type="\\ud800"'),
        "part": ('part="key"', 'part="\\ud800"'),
        "weight": ("@embed", '@"\\ud800"'),
    }
    with pytest.raises(ParseError):
        parse_program(text.replace(*changes[what]))
