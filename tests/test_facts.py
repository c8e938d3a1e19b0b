"""Facts are checked: what passes provide, require and ensure, and what a loaded program claims."""

from __future__ import annotations

from typing import ClassVar

import pytest
from tiny import cached_llama, tiny_llama

from graftwork.ir import InputError, PassError, PassRecord, Program
from graftwork.passes import Outcome, Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.engine.base import all_passes
from graftwork.passes.engine.facts import PREDICATES, fact, shown
from graftwork.passes.engine.manager import Step, facts_of, run_passes
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.passes.stepping.pick_logits import PickLogits

MAKES = {
    "cached": InsertKvCache(),
    "trees": AcceptTrees(),
    "picked": PickLogits(),
    "argmax": AddArgmax(),
    "top_tokens": AddTopTokens(count=4),
    "drafts": DraftMedusa(),
    "quantized": QuantizeWeights(group=0),
}


class Same(Pass):
    """Says that it did something."""

    name: ClassVar[str] = "same"

    def run(self, program: Program) -> Outcome:
        return Outcome(program, 1)


def claiming(*facts: str, needs: tuple[str, ...] = ()) -> Step:
    class Claiming(Same):
        provides: ClassVar[frozenset[str]] = frozenset(facts)
        requires: ClassVar[frozenset[str]] = frozenset(needs)

    return Step(Claiming())


@pytest.mark.parametrize("name", sorted(MAKES))
def test_a_fact_holds_where_its_pass_ran_and_nowhere_else(name: str) -> None:
    before = tiny_llama()
    if "cached" in type(MAKES[name]).requires:
        before = InsertKvCache().run(before).program
    assert name not in shown(before)
    after = MAKES[name].run(before).program
    assert name in shown(after)
    assert name in type(MAKES[name]).provides


@pytest.mark.parametrize("name", sorted(PREDICATES.keys() - {"canonical"}))
def test_a_pass_that_does_not_make_what_it_provides_is_named(name: str) -> None:
    message = f"'same' \\(after 'the frontend'\\) provides '{name}', which does not hold: "
    with pytest.raises(PassError, match=message):
        run_passes(tiny_llama(), [claiming(name)])


def test_what_a_pass_requires_is_looked_at_before_it_runs() -> None:
    """A pass that may match nothing has then not made what later ones count on."""

    class Shy(Same):
        name: ClassVar[str] = "shy"
        provides: ClassVar[frozenset[str]] = frozenset({"trees"})

        def run(self, program: Program) -> Outcome:
            return Outcome(program, 0)

    steps = [Step(InsertKvCache()), Step(Shy(), optional=True), claiming(needs=("trees",))]
    with pytest.raises(
        PassError,
        match=r"'same' \(after 'shy'\) requires 'trees', which does not hold: step does not take "
        r"ancestors; it takes tokens, positions, past",
    ):
        run_passes(tiny_llama(), steps)


def test_a_loaded_program_has_the_facts_that_it_shows() -> None:
    """Whoever made it, and whatever its provenance says."""
    program = cached_llama(trees=True).replace(provenance=())
    assert facts_of(program) >= {"canonical", "cached", "trees", "picked", "argmax"}
    lies = [PassRecord(name, (), "exact", 1, 0.0) for name in ("accept_trees", "raise_norms")]
    assert facts_of(tiny_llama().replace(provenance=tuple(lies))) == {
        "traced",
        "canonical",
        "norms",
    }


def test_facts_that_a_pass_requires_are_there_to_be_had() -> None:
    """And those that nobody sees are few: they order passes, and say nothing of a program."""
    passes = all_passes().values()
    provided = frozenset[str]().union(*(cls.provides for cls in passes))
    required = frozenset[str]().union(*(cls.requires for cls in passes))
    assert required <= provided
    assert provided - PREDICATES.keys() == {"activations", "glu", "norms", "rotary"} <= required


def test_a_fact_has_one_predicate() -> None:
    with pytest.raises(InputError, match="the fact 'cached' has a predicate already"):
        fact("cached")(lambda program: "")
