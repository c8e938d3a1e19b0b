"""The text form: print, parse, print is the identity; errors say where and what was expected."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from archs import imported
from feeds import step_inputs
from graphs import programs
from handmade import Shape, cached_llama, llama
from hypothesis import given
from hypothesis import strategies as st

from graftwork import Recipe
from graftwork.ir import (
    Function,
    InputError,
    ModelInfo,
    ParseError,
    PassRecord,
    Program,
    Role,
    Site,
    State,
    Sym,
    TensorType,
    Weight,
    WeightStore,
    function_text,
    parse_function,
    parse_program,
    program_text,
    run,
    verify,
)
from graftwork.ir.plan import Chain, DecodePlan
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.manager import run_passes

A, G = torch.ops.aten, torch.ops.graftwork

GOLDEN = """\
program "every-kind" stage=cached {
  info(model_type="tiny", vocab_size=7, context=16, eos=(2, 5), bos=None, pad=None)
  pass quantize_weights(head=False) contract=exact matches=1 seconds=0.25
  pass quantize(parts=("head",), table={"a": [1, -2.5]}) contract=lossless matches=2 seconds=0.5
  state kv.0.key: f32[B,1,C,4] layer=0 part="key"
  weight emb: f32[7,4]
  weight "odd name!": f32[4]

  func step(
    tokens: i64[B,T],
    positions: i64[B,T],
    past: i64[B],
    kv.0.key: f32[B,1,C,4],
  ) -> (
    logits f32[B,T,7],
    kv.0.key f32[B,1,C,4],
  ) {
    %embedding: f32[B,T,4] = aten.embedding(@emb, %tokens)  # model.embed layer=-1 at llama.py:61
    %pair: (f32[B,T,4], f32[B,T,4]) = graftwork.add_rms_norm(%embedding, %embedding, \
@"odd name!", eps=1e-06)  # "model (x)"
    %getitem: f32[B,T,4] = %pair[1]  # layer=3
    %view: f32[B,1,T,4] = aten.view(%getitem, [B, 1, T, 4])
    %keys: f32[B,1,C,4] = graftwork.cache_write(%kv.0.key, %view, %past)
    %to_copy: bf16[B,T,4] = aten._to_copy(%getitem, dtype=bf16)
    %to_copy_1: f32[B,T,4] = aten._to_copy(%to_copy, dtype=f32)
    %clone: f32[B,T,4] = aten.clone(%to_copy_1, memory_format=contiguous_format)
    %full: f32[B,T + 1] = aten.full([B, T + 1], -inf)
    %arange: i64[T] = aten.arange.start_step(0, T, device=device("cpu"))
    %step_mask: bool[B,1,T,C] = graftwork.step_mask(%past, %positions, None, C, window=3)
    %y: f32[B,T,7] = aten.linear(%clone, @emb)
    return logits=%y, kv.0.key=%keys
  }

  decode {
    draft = suffix(tokens=4, longest=16, shortest=2)
  }
}
""".replace("f32[B,T + 1]", "f32[B,T+1]")


def every_kind() -> Program:
    """The program that `GOLDEN` prints."""
    fn = Function("step")
    tokens = fn.add_input("tokens", TensorType.parse("i64[B,T]"))
    positions = fn.add_input("positions", TensorType.parse("i64[B,T]"))
    past = fn.add_input("past", TensorType.parse("i64[B]"))
    cache = fn.add_input("kv.0.key", TensorType.parse("f32[B,1,C,4]"))
    emb, odd = Weight.of("emb", torch.randn(7, 4)), Weight.of("odd name!", torch.randn(4))
    site = Site("model.embed", -1, "llama.py:61")
    x = fn.call(A.embedding.default, fn.weight(emb), tokens, site=site)
    norm = G.add_rms_norm.default
    pair = fn.call(norm, x, x, fn.weight(odd), eps=1e-6, name="pair", site=Site("model (x)"))
    x = fn.item(pair, 1)
    x.meta["site"] = Site(layer=3)
    rows = fn.call(A.view.default, x, [Sym("B"), 1, Sym("T"), 4])
    keys = fn.call(G.cache_write.default, cache, rows, past, name="keys")
    x = fn.call(A._to_copy.default, x, dtype=torch.bfloat16)
    x = fn.call(A._to_copy.default, x, dtype=torch.float32)
    x = fn.call(A.clone.default, x, memory_format=torch.contiguous_format)
    fn.call(A.full.default, [Sym("B"), Sym("T") + 1], float("-inf"))
    fn.call(A.arange.start_step, 0, Sym("T"), device=torch.device("cpu"))
    fn.call(G.step_mask.default, past, positions, None, Sym("C"), window=3)
    y = fn.call(A.linear.default, x, fn.weight(emb), name="y")
    fn.set_outputs({"logits": y, "kv.0.key": keys})
    return Program(
        "every-kind",
        {"step": fn},
        WeightStore({"emb": emb, "odd name!": odd}),
        ModelInfo("tiny", 7, 16, eos=(2, 5)),
        states={"kv.0.key": State("kv.0.key", TensorType.parse("f32[B,1,C,4]"), 0, "key")},
        plan=DecodePlan(draft=SuffixDraft(tokens=4)),
        stage="cached",
        provenance=(
            PassRecord("quantize_weights", (("head", False),), "exact", 1, 0.25),
            PassRecord(
                "quantize", (("parts", ("head",)), ("table", {"a": [1, -2.5]})), "lossless", 2, 0.5
            ),
        ),
    )


def assert_round_trip(program: Program) -> Program:
    """Print, parse, print; the second program has the first's types, sites, plan and facts."""
    text = program_text(program)
    again = parse_program(text, program.weights)
    assert program_text(again) == text
    for fact in ("name", "info", "states", "plan", "stage", "provenance"):
        assert getattr(again, fact) == getattr(program, fact), fact
    for name, function in program.functions.items():
        calls = zip(function.calls(), again.function(name).calls(), strict=True)
        for a, b in calls:
            assert (a.target, a.meta["type"], a.meta["site"]) == (
                b.target, b.meta["type"], b.meta["site"],
            )  # fmt: skip
    verify(again)
    return again


def test_golden() -> None:
    program = every_kind()
    verify(program)
    assert program_text(program) == GOLDEN
    assert_round_trip(program)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(rotary=8, interleaved=True, bias=True, tied=True, layer_norm=True),
        Shape(window=5, softcap=3.0, sinks=True, qk_norm=True, value_dim=8),
        Shape(slopes=True, rotary=0, dtype=torch.bfloat16),
    ],
)
def test_handmade_models(shape: Shape) -> None:
    assert_round_trip(llama(shape))
    assert_round_trip(cached_llama(shape))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_imported_models(name: str) -> None:
    """As the frontend gives them, and as the baseline recipe makes them."""
    _, program = imported(name)
    assert_round_trip(program)
    lowered, _ = run_passes(program, Recipe.load("baseline").steps)
    assert_round_trip(lowered)


@given(programs())
def test_random_programs(program: Program) -> None:
    verify(program)
    again = assert_round_trip(program)
    inputs = step_inputs(program)
    assert torch.equal(run(program, "step", inputs)["logits"], run(again, "step", inputs)["logits"])


@given(programs(stage="traced"))
def test_random_traced_programs(program: Program) -> None:
    assert_round_trip(program)


ODD_TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\r"), min_size=1, max_size=12
)


@given(ODD_TEXT, ODD_TEXT, ODD_TEXT, st.none() | st.integers(-1, 99))
def test_odd_names(name: str, module: str, line: str, layer: int | None) -> None:
    """Whatever a checkpoint calls its weights and modules."""
    fn = Function("step")
    tokens = fn.add_input("tokens", TensorType.parse("i64[B,T]"))
    fn.add_input("positions", TensorType.parse("i64[B,T]"))
    weight = Weight.of(name, torch.ones(5, 3))
    site = Site(module, layer, line)
    y = fn.call(A.embedding.default, fn.weight(weight), tokens, site=site)
    fn.set_outputs({"logits": y})
    program = Program("p", {"step": fn}, WeightStore({name: weight}), ModelInfo(line, 3, 9))
    assert_round_trip(program)


@given(st.lists(st.sampled_from(["tokens", "past", "kv_0_key", "x", "x_1", "add", "emb"])))
def test_colliding_names(names: list[str]) -> None:
    """Values, inputs, states and weights may want the same names."""
    fn = Function("step")
    weight = Weight.of("x", torch.ones(4))
    x = fn.add_input("tokens", TensorType.parse("f32[B,4]"))
    fn.add_input("kv.0.key", TensorType.parse("f32[B,4]"))
    for name in names:
        x = fn.call(A.add.Tensor, x, fn.weight(weight), name=name)
    past = fn.add_input("past", TensorType.parse("f32[B,4]"))
    fn.set_outputs({"y": fn.call(A.add.Tensor, x, past, name="past")})
    program = Program("p", {"step": fn}, WeightStore({"x": weight}), ModelInfo("p", 5, 9))
    text = program_text(program)
    assert program_text(parse_program(text)) == text
    values = re.findall(r"^ *(%\S+):", text, re.MULTILINE)
    assert len(values) == len(set(values))


def test_weights_come_from_the_store_or_refuse() -> None:
    program = every_kind()
    text = program_text(program)
    bare = parse_program(text)
    assert bare.weights["emb"].type == program.weights["emb"].type
    with pytest.raises(InputError, match="emb has no data"):
        bare.weights["emb"].load()
    with pytest.raises(ParseError, match="a weight that the given store holds"):
        parse_program(text, WeightStore())
    other = WeightStore({"emb": Weight.of("emb", torch.ones(2))})
    with pytest.raises(ParseError, match=re.escape("f32[2] as in the given store")):
        parse_program(text, other)


def test_handwritten_text_may_be_loose() -> None:
    """Comments, blank lines, other spacing, no decode block, other names than the printer's."""
    text = """
    # a note
    program "p" stage=traced {
        info( model_type = "p", vocab_size=5, context=9 )

        weight emb : f32[5, 3]   # note
        func step( tokens: i64[B,T], positions: i64[B, T] ) -> logits f32[B,T,5] {
            # another
            %h.0 : f32[B,T,3] = aten.embedding.default( @emb, %tokens )
            %sum: f32[B,T,5] = aten.linear(
                %h.0,
                @emb,
            )
            return logits = %sum
        }
    }
    """
    program = parse_program(text)
    verify(program)
    assert program.plan == DecodePlan(tree=Chain())
    assert_round_trip(program)


WRONG = {
    "not a program": ("program", "programm", "line 1, column 1: expected 'program'"),
    "no name": ('"every-kind"', "x", "expected the program's name in quotes"),
    "unknown section": (
        "  state kv",
        "  stat kv",
        "weight, func, draft func, upkeep func, ",
    ),
    "missing field": ("vocab_size=7, ", "", "expected also vocab_size"),
    "wrong field": ("vocab_size=7", "vocab_size=7.5", "a valid vocab_size"),
    "unknown field": ("bos=None", "box=None", "not 'box'"),
    "code in a literal": ("eos=(2, 5)", "eos=exit()", "expected a literal"),
    "wrong option": ("head=False", "False", "keyword arguments only"),
    "unknown dtype": ("weight emb: f32", "weight emb: float", "not a tensor type: 'float[7,4]'"),
    "bad dim": ("weight emb: f32[7,4]", "weight emb: f32[7,4/2]", "unexpected character '/'"),
    "power": ("weight emb: f32[7,4]", "weight emb: f32[7,9**9]", "not a dimension: '9**9'"),
    "twice": ('weight "odd name!": f32[4]', "weight emb: f32[4]", "emb is declared already"),
    "unknown value": ("%view,", "%vieww,", "expected a value defined above, found '%vieww'"),
    "unknown weight": ("@emb, %tokens", "@emc, %tokens", "expected a declared weight"),
    "unknown op": ("aten.view", "aten.vieww", "expected a core ATen op"),
    "op elsewhere": ("aten.view", "torch.save", "expected a core ATen op"),
    "in place": ("aten.clone(", "aten.add_.Tensor(", "expected a core ATen op"),
    "positional twice": ("eps=1e-06", "eps=1e-06, eps=1", "expected every keyword once"),
    "no such keyword": ("window=3", "windows=3", "expected a valid call"),
    "does not fit": ("[B, 1, T, 4]", "[B, 1, T, 5]", "expected a valid call"),
    "wrong type": ("%view: f32[B,1,T,4]", "%view: f32[B,2,T,4]", "which the op gives"),
    "wrong result": ("%pair[1]", "%pair[x]", "the number of the result"),
    "value as a size": ("[B, T + 1]", "[B, %past + 1]", "expected integers and size names"),
    "dtype as a size": ("[B, T + 1]", "[B, f32 + 1]", "expected integers and size names"),
    "site": ("# layer=3", "# layer=three at", "expected # module layer=N at file:line"),
    "device": ('device("cpu")', 'device("cup")', "a device such as cpu"),
    "other call": ('device("cpu")', 'open("cpu")', 'only device("name") is one'),
    "output order": ("return logits=%y, ", "return ", "the outputs that the header states"),
    "output type": ("    logits f32[B,T,7]", "    logits f32[B,T,8]", "which the body returns"),
    "record": ("suffix(", "prefix(", "expected one of adapted_exit, ahead, block, cached"),
    "record field": ("longest=16", "longest=True", "a valid longest"),
    "record value": ("tokens=4,", "tokens=%past,", "expected a literal"),
    "slot": ("  draft = ", "  forest = ", "draft = , tree = "),
    "unbalanced": ("[B, 1, T, 4]", "[B, 1, T, 4", "closes nothing"),
    "malformed": ("[B, 1, T, 4]", "[B, 1, , 4]", "expected a well-formed expression"),
    "number": ("vocab_size=7", "vocab_size=" + "7" * 50, "at most 40 digits"),
    "slice": ("%pair[1]", "%pair[1:2]", "expected a literal, a dtype"),
    "lambda": ("[B, 1, T, 4]", "(lambda: 0)", "expected a literal, a dtype"),
    "star": ("[B, T + 1]", "*[B, T]", "expected a literal, a dtype"),
    "attribute": ("-inf)", "B.__class__)", "expected a literal, a dtype"),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_say_where_and_what_was_expected(what: str) -> None:
    old, new, message = WRONG[what]
    assert old in GOLDEN
    with pytest.raises(ParseError) as caught:
        parse_program(GOLDEN.replace(old, new, 1))
    found = str(caught.value)
    assert message in found
    place = re.match(r"line (\d+), column (\d+): ", found)
    assert place, found
    line, column = int(place[1]), int(place[2])
    text = GOLDEN.replace(old, new, 1).split("\n")
    assert 1 <= line <= len(text) and 1 <= column <= len(text[line - 1]) + 1
    first = GOLDEN[: GOLDEN.index(old)].count("\n") + 1
    assert first - 1 <= line or what in ("unknown section", "output type")


@pytest.mark.parametrize(
    "attack",
    [
        "aten.full([B, T], " + "(" * 5000 + "0" + ")" * 5000 + ")",
        "aten.full([B, T], " + "-" * 5000 + "1)",
        "aten.full([B, T], " + "+".join(["B"] * 5000) + ")",
        "aten.full([B, " + "*".join(["(B+T+C+D)"] * 20) + "], 0)",
        "aten.full([B, " + "[" * 23 + "]" * 23 + "], 0)",
        "aten.full([9" + "9" * 30 + "], 0)",
        "aten.full([B, T], " + "~" * 3 + "1)",
        "aten.full([B, T]**9**9**9, 0)",
        'aten.full([B, T], "' + "a" * 100000,
        "aten.full([B, T], \x00)",
        "aten.full([B, T], \u00f80)",
        "__import__('os')",
        "f'{1}'",
        "[x for x in (1,)]",
        "%tokens.__class__",
        "aten.embedding(@emb, %tokens) if 1 else 2",
        "(yield)",
    ],
    ids=range(17),
)
def test_hostile_expressions_are_refused(attack: str) -> None:
    text = GOLDEN.replace("aten.embedding(@emb, %tokens)", attack, 1)
    with pytest.raises(ParseError, match=r"line 20|line 21|line \d+"):
        parse_program(text)


@given(st.integers(0, len(GOLDEN) - 1), st.integers(0, 40), st.text(max_size=5))
def test_damaged_text_is_read_or_refused(start: int, length: int, inserted: str) -> None:
    """No damage makes the reader fail in any other way than with a `ParseError`."""
    text = GOLDEN[:start] + inserted + GOLDEN[start + length :]
    try:
        parse_program(text)
    except ParseError as error:
        assert str(error).startswith("line ")


def test_deep_brackets_in_types_and_options() -> None:
    for text in (
        GOLDEN.replace("head=False", "head=" + "{1: " * 500 + "0" + "}" * 500),
        GOLDEN.replace("head=False", "head=" + "(" * 500 + ")" * 500),
        GOLDEN.replace("f32[7,4]", "f32[" + "(" * 500 + "7" + ")" * 500 + "]"),
        GOLDEN.replace("%pair: (", "%pair: " + "(" * 500),
    ):
        with pytest.raises(ParseError, match="nested deeper than 24"):
            parse_program(text)


def test_options_without_a_text_form_are_named() -> None:
    record = PassRecord("p", (("path", object()),), "exact", 1, 0.0)
    with pytest.raises(Exception, match="has no text form"):
        program_text(replace(every_kind(), provenance=(record,)))


PAST = TensorType.parse("i64[B]")


@pytest.mark.parametrize("role", list(Role))
def test_roles_are_read_back(role: Role) -> None:
    program = every_kind()
    other = Function("other", role=role)  # writes no rows: what an upkeep may write, plans say
    other.set_outputs(
        {"twice": other.call(torch.ops.aten.add.Tensor, *[other.add_input("past", PAST)] * 2)}
    )
    again = assert_round_trip(program.with_function(other))
    assert again.function("other").role is role and again.step.role is Role.TARGET
    first = function_text(other).split("(")[0]
    assert first == ("func other" if role is Role.TARGET else f"{role.value} func other")
    assert parse_function(function_text(other), program.weights).role is role


def test_a_role_is_one_of_a_functions() -> None:
    with pytest.raises(ParseError, match="expected info, pass, state, weight, func, draft func"):
        parse_program(GOLDEN.replace("func step", "guess func step"))
    with pytest.raises(ParseError, match="expected 'func'"):
        parse_program(GOLDEN.replace("func step", "draft step"))
