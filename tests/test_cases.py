"""Passes on programs written as text: ``tests/cases/<pass>.test``.

A file holds cases of the pass that it is named after::

    # case: one layer
    program "tiny" stage=canonical {
      info(model_type="tiny", vocab_size=7, context=16)
      weight emb: f32[7,4]
      func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,7] {
        %h: f32[B,T,4] = aten.embedding(@emb, %tokens)
        ...
        return logits=%y
      }
    }
    # options: {window: 4}
    program "tiny" stage=canonical {
      ...what the pass makes of it...
    }

The second section starts with ``# options:`` and a YAML mapping (``{}`` for none). Where the pass
must refuse, or match nothing, the third is one line with a part of the message (or of the nearest
miss) instead of a program::

    # options: {}
    # refused: two attentions claim one layer

A case that starts from the program of an earlier one says so instead of repeating it, and what a
pass leaves as it was is not written out again::

    # case: two layers at most
    # before: one layer
    # options: {layers: 2}
    program "tiny" stage=canonical {
      ...
      func step: unchanged
    }

Passes that read text are given some, and passes that take in a part of the checkpoint a layer of
two heads of eight channels. Comments before the first case stay.
``pytest tests/test_cases.py --update`` rewrites what is expected: write the before text and the
options, run it, and read the result before committing it.

Every case checks that the text reads back, that both programs verify, that the pass left its
argument alone, and, for passes whose contract is exact, that both programs compute the same outputs
with random weights (see `feeds.step_inputs`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import yaml
from evidence import evidence_for
from feeds import assert_close, random_weights, step_inputs
from pydantic import ValidationError
from tiny import layer_ahead

from graftwork.ir import GraftworkError, Program, parse_program, program_text, run, verify
from graftwork.ir.execution.analysis import part_of
from graftwork.passes.engine.base import Contract, Pass, all_passes

FOLDER = Path(__file__).parent / "cases"


@dataclass(frozen=True)
class Case:
    """One case of a file: `after` or `refused` is what is expected (neither before --update).

    after: with functions that are as before left out. like: the case whose program it starts from,
    if that is not written out.
    """

    name: str
    before: str
    options: str
    after: str = ""
    refused: str = ""
    like: str = ""

    def text(self) -> str:
        """The case as it stands in its file."""
        before = f"# before: {self.like}\n" if self.like else self.before
        expected = f"# refused: {self.refused}\n" if self.refused else self.after
        return f"# case: {self.name}\n{before}# options: {self.options}\n{expected}"


def read_cases(text: str) -> tuple[str, list[Case]]:
    """The comments before the first case, and the cases. Errors: AssertionError on wrong layout."""
    preamble, *parts = ("\n" + text).split("\n# case: ")
    cases: list[Case] = []
    for part in parts:
        cases.append(_read_case(part, cases))
    return preamble.removeprefix("\n"), cases


def _read_case(part: str, earlier: list[Case]) -> Case:
    name, _, body = part.partition("\n")
    before, marker, rest = body.partition("# options:")
    assert marker and "\n# options:" in "\n" + body, f"case {name!r} has no line '# options: {{}}'"
    options, _, expected = rest.partition("\n")
    before = before.strip() + "\n"
    like = before.removeprefix("# before: ").strip() if before.startswith("# before: ") else ""
    if like:
        known = {case.name: case.before for case in earlier}
        assert like in known, f"case {name!r} starts from {like!r}, which is no case before it"
        before = known[like]
    case = Case(name.strip(), before, options.strip() or "{}", like=like)
    if expected.startswith("# refused:"):
        return replace(case, refused=expected.partition(":")[2].strip())
    return replace(case, after=expected.strip() + "\n" if expected.strip() else "")


def write_cases(preamble: str, cases: list[Case]) -> str:
    """The text of a file."""
    head = [preamble.strip() + "\n"] if preamble.strip() else []
    return "\n".join(head + [case.text() for case in cases])


def apply(kind: type[Pass], case: Case) -> tuple[Program | None, str]:
    """The program that the pass makes, or None and why it refuses."""
    bare = parse_program(case.before)
    types = {name: weight.type for name, weight in bare.weights.items()}
    program = bare.replace(weights=random_weights(types))
    verify(program)
    text = program_text(program)
    assert program_text(parse_program(text)) == text
    try:
        options = json.dumps(yaml.safe_load(case.options))  # as recipes do: lists become tuples
        pass_ = kind.model_validate_json(options)
        parts = {part: layer_ahead(heads=2, groups=1, vocab=7) for part in pass_.parts}
        program = program.replace(guests=parts)
        outcome = pass_.apply(program, evidence_for(program) if pass_.text else None)
    except (GraftworkError, ValidationError) as error:
        return None, str(error)
    assert program_text(program) == text, "the pass edited its argument"
    if outcome.matches == 0:
        return None, outcome.near_miss or "matched nothing"
    result = outcome.program.pruned()
    verify(result)
    alone = part_of(result) == (0, 1)  # parts are compared together, see test_shard_tensors
    if kind.contract is Contract.EXACT and alone:
        compare(program, result)
    return result, ""


def functions_in(text: str) -> dict[str, str]:
    """The lines of each function of a program's text, by how they begin: ``func step``."""
    blocks = re.findall(r"^  (?:[a-z]+ )?func .*?^  \}\n", text, re.M | re.S)
    return {block.partition("(")[0].strip(): block for block in blocks}


def without_repeats(before: str, after: str) -> str:
    """The text `after`, with functions that are as in `before` left out."""
    known = functions_in(before)
    for head, block in functions_in(after).items():
        if known.get(head) == block:
            after = after.replace(block, f"  {head}: unchanged\n")
    return after


def compare(before: Program, after: Program) -> None:
    """Both programs give the same outputs, as far as they share them."""
    expected = run(before, "step", step_inputs(before))
    found = run(after, "step", step_inputs(after))
    for name in expected.keys() & found.keys():
        assert torch.isfinite(expected[name].double()).all(), f"case gives no finite {name}"
        if name not in after.states:
            assert_close(found[name], expected[name], name)


def check(kind: type[Pass], case: Case) -> Case:
    """Run a case; the case with what really came out as its expectation."""
    program, message = apply(kind, case)
    if program is not None:
        before = program_text(parse_program(case.before))
        return replace(case, after=without_repeats(before, program_text(program)), refused="")
    keep = case.refused and case.refused in message
    part = case.refused if keep else message.strip().splitlines()[0]
    return replace(case, after="", refused=part)


def listed() -> list[tuple[Path, str]]:
    """Every case: its file and name."""
    paths = sorted(FOLDER.glob("*.test"))
    return [(path, case.name) for path in paths for case in read_cases(path.read_text())[1]]


@pytest.mark.parametrize(
    ("path", "name"), [pytest.param(p, n, id=f"{p.stem}: {n}") for p, n in listed()]
)
def test_case(path: Path, name: str, update: bool) -> None:
    assert path.stem in all_passes(), f"{path.name} is not named after a pass"
    preamble, cases = read_cases(path.read_text())
    names = [case.name for case in cases]
    assert names.count(name) == 1, f"two cases are called {name!r}"
    index = names.index(name)
    found = check(all_passes()[path.stem], cases[index])
    if update:
        cases[index] = found
        path.write_text(write_cases(preamble, cases))
        return
    assert found.text() == cases[index].text()


def test_every_pass_has_cases() -> None:
    own = {name for name, kind in all_passes().items() if kind.__module__.startswith("graftwork.")}
    lacking = own - {path.stem for path in FOLDER.glob("*.test")}
    assert not lacking, f"tests/cases has no {', '.join(sorted(lacking))}"


# -- the harness itself

PLAIN = """\
# cases of the harness

# case: chosen
program "tiny" stage=cached {
  info(model_type="tiny", vocab_size=7, context=16)
  weight emb: f32[7,4]
  func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,7] {
    %h: f32[B,T,4] = aten.embedding(@emb, %tokens)
    %y: f32[B,T,7] = aten.linear(%h, @emb)
    return logits=%y
  }
}
# options: {}
"""


class Doubler(Pass):
    """Says exact, but doubles the logits."""

    def run(self, program):  # type: ignore[no-untyped-def]
        from graftwork.passes import Outcome

        fn = program.function("step").copy()
        with fn.graph.inserting_before(fn.output_node):
            doubled = fn.call(torch.ops.aten.mul.Tensor, fn.outputs["logits"], 2)
        fn.set_outputs({"logits": doubled})
        return Outcome(program.with_function(fn), 1)


def test_update_writes_what_then_passes() -> None:
    preamble, (case,) = read_cases(PLAIN)
    found = check(all_passes()["add_argmax"], case)
    assert "argmax i64[B,T]" in found.after and "decode" not in found.after
    again = read_cases(write_cases(preamble, [found]))
    assert again[0].strip() == preamble.strip() and again[1] == [found]
    assert check(all_passes()["add_argmax"], found) == found


def test_what_stays_as_it_was_is_not_repeated() -> None:
    (case,) = read_cases(PLAIN)[1]
    second = "\n# case: second\n# before: chosen\n# options: {}\n"
    _, cases = read_cases(PLAIN + second)
    assert cases[1].before == case.before and cases[1].text() == second.lstrip()
    found = check(all_passes()["draft_suffix"], case)
    assert "  func step: unchanged\n" in found.after and "embedding" not in found.after
    with pytest.raises(AssertionError, match="starts from 'nobody'"):
        read_cases(PLAIN + second.replace("chosen", "nobody"))


def test_refusals_are_compared_by_part() -> None:
    (case,) = read_cases(PLAIN + "# refused: extra\n")[1]
    wrong = replace(case, options="{nonsense: 1}")
    kept = check(all_passes()["add_argmax"], replace(wrong, refused="nonsense"))
    assert kept.refused == "nonsense"
    changed = check(all_passes()["add_argmax"], replace(wrong, refused="other words"))
    assert changed.refused not in ("", "other words")


def test_a_lie_about_exactness_is_found() -> None:
    with pytest.raises(AssertionError, match="logits differ"):
        check(Doubler, read_cases(PLAIN)[1][0])
