"""The rewriter: what matches, what blocks a match, near misses, new weights, the driver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx
from feeds import assert_close, step_inputs
from graphs import programs
from hypothesis import given

from graftwork.ir import (
    Builder,
    Function,
    Match,
    PassError,
    Program,
    Rule,
    Site,
    Sym,
    TensorType,
    VerifyError,
    Weight,
    WeightStore,
    apply_rules,
    derive,
    make_dim,
    run,
    type_of,
    verify,
)
from graftwork.ir.rewrite.match import Matcher

A, G = torch.ops.aten, torch.ops.graftwork


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


# -- rules on small functions

RMS = Rule(
    "rms_norm",
    inputs={"x": "F[...,H]", "weight": "@F[H]", "eps": "float"},
    pattern=rms,
    replace=lambda build, m: build.call(
        G.rms_norm.default, m["x"], m["weight"], eps=m.number("eps")
    ),
)


class Scene:
    """A function under construction, with the calls that the tests need."""

    def __init__(self, text: str = "f32[B,T,8]") -> None:
        self.fn = Function("step")
        self.x = self.fn.add_input("x", TensorType.parse(text))
        self.weights: dict[str, Weight] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self.fn.call(target, *args, **kwargs)

    def weight(self, name: str = "w", text: str = "f32[8]") -> torch.fx.Node:
        self.weights.setdefault(name, _weight(name, TensorType.parse(text)))
        return self.fn.weight(self.weights[name])

    def rms(self, x: torch.fx.Node, eps: float = 1e-6, swap: bool = False) -> torch.fx.Node:
        """An RMS norm as an exported float32 model has it, the scale first or second."""
        mean = self.call(A.mean.dim, self.call(A.pow.Tensor_Scalar, x, 2), [-1], True)
        self.root = self.call(A.rsqrt.default, self.call(A.add.Tensor, mean, eps))
        wide = self.call(A.mul.Tensor, *((self.root, x) if swap else (x, self.root)))
        pair = (wide, self.weight()) if swap else (self.weight(), wide)
        return self.call(A.mul.Tensor, *pair, site=Site("norm", 3))

    def done(self, **outputs: torch.fx.Node) -> Function:
        self.fn.set_outputs(outputs)
        return self.fn

    @property
    def store(self) -> WeightStore:
        return WeightStore(self.weights)


def _weight(name: str, tensor_type: TensorType) -> Weight:
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(tensor_type.shape, generator=generator).to(tensor_type.dtype)
    return Weight.of(name, data)


def targets(fn: Function) -> list[str]:
    return [str(n.target).removesuffix(".default") for n in fn.calls()]


@pytest.mark.parametrize("swap", [False, True])
def test_a_rewrite_keeps_site_and_type_and_removes_the_old_nodes(swap: bool) -> None:
    scene = Scene()
    fn = scene.done(y=scene.rms(scene.x, 1e-6, swap))
    result = apply_rules(fn, [RMS], scene.store)
    assert (result.count, result.by_rule, result.near_miss) == (1, {"rms_norm": 1}, "")
    assert targets(fn) == ["graftwork.rms_norm"]
    (node,) = fn.calls()
    assert node.kwargs == {"eps": 1e-6} and node.meta["site"] == Site("norm", 3)
    assert str(type_of(node)) == "f32[B,T,8]"
    assert len(fn.graph.find_nodes(op="get_attr")) == 1


def test_a_chain_of_matches_and_any_rank() -> None:
    scene = Scene("f32[B,4,T,2,8]")
    x = scene.x
    for _ in range(30):
        x = scene.rms(x)
    fn = scene.done(y=x)
    assert apply_rules(fn, [RMS], scene.store).count == 30
    assert set(targets(fn)) == {"graftwork.rms_norm"} and len(fn.calls()) == 30


def test_every_float_dtype_has_its_own_pattern() -> None:
    scene = Scene("bf16[B,T,8]")
    wide = scene.call(A._to_copy.default, scene.x, dtype=torch.float32)
    mean = scene.call(A.mean.dim, scene.call(A.pow.Tensor_Scalar, wide, 2), [2], True)
    root = scene.call(A.rsqrt.default, scene.call(A.add.Tensor, mean, 1e-5))
    normed = scene.call(A.mul.Tensor, wide, root)
    narrow = scene.call(A._to_copy.default, normed, dtype=torch.bfloat16)
    fn = scene.done(y=scene.call(A.mul.Tensor, scene.weight("w", "bf16[8]"), narrow))
    assert apply_rules(fn, [RMS], scene.store).count == 1
    assert targets(fn) == ["graftwork.rms_norm"]


def test_an_inner_value_that_is_used_elsewhere_blocks() -> None:
    scene = Scene()
    y = scene.rms(scene.x)
    fn = scene.done(y=y, scale=scene.root)
    before = targets(fn)
    result = apply_rules(fn, [RMS], scene.store)
    assert result.count == 0 and targets(fn) == before
    assert "6 of 6 ops matched at %mul_1 (norm)" in result.near_miss
    assert "%rsqrt inside the match is also used by %output" in result.near_miss


def test_the_nearest_miss_names_the_op_that_differs() -> None:
    scene = Scene()
    mean = scene.call(A.mean.dim, scene.call(A.pow.Tensor_Scalar, scene.x, 2), [-1], True)
    scale = scene.call(A.reciprocal.default, scene.call(A.add.Tensor, mean, 1e-6))
    y = scene.call(A.mul.Tensor, scene.weight(), scene.call(A.mul.Tensor, scene.x, scale))
    result = apply_rules(scene.done(y=y), [RMS], scene.store)
    assert result.count == 0
    assert "rule rms_norm: 2 of 6 ops matched at %mul_1" in result.near_miss
    assert "expected aten.rsqrt.default, found aten.reciprocal.default" in result.near_miss


def test_the_nearest_miss_without_any_candidate() -> None:
    scene = Scene()
    result = apply_rules(scene.done(y=scene.call(A.neg.default, scene.x)), [RMS], scene.store)
    assert result.near_miss == "rule rms_norm: step has no aten.mul.Tensor"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dims": [1]}, "expected -1, found -2"),
        ({"power": 3}, "expected 2, found 3"),
        ({"keep": False}, "expected True, found False"),
        ({"eps": "x"}, "expected a number (eps)"),
        ({"weight": "input"}, "expected a weight f32[H]"),
        ({"weight": "other size"}, "size H"),
        ({"other x": True}, "expected the input x again, found aten.neg.default (%neg)"),
    ],
)
def test_differences_block(change: dict[str, Any], reason: str) -> None:
    scene = Scene("f32[8,8,8]" if "dims" in change or "keep" in change else "f32[B,T,8]")
    x = scene.x
    square = scene.call(A.pow.Tensor_Scalar, x, change.get("power", 2))
    mean = scene.call(A.mean.dim, square, change.get("dims", [-1]), change.get("keep", True))
    eps = scene.weight("eps", "f32[1]") if "eps" in change else 1e-6
    scale = scene.call(A.rsqrt.default, scene.call(A.add.Tensor, mean, eps))
    other = scene.call(A.neg.default, x) if "other x" in change else x
    wide = scene.call(A.mul.Tensor, other, scale)
    kinds = {"input": lambda: scene.fn.add_input("w", TensorType.parse("f32[8]"))}
    kinds["other size"] = lambda: scene.weight("w", "f32[1]")
    weight = kinds.get(change.get("weight", ""), scene.weight)()
    result = apply_rules(scene.done(y=scene.call(A.mul.Tensor, weight, wide)), [RMS], scene.store)
    assert result.count == 0 and reason in result.near_miss, result.near_miss


def test_sizes_must_agree() -> None:
    def split(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] * x.shape[1], x.shape[2])[:, : x.shape[2] // 2]

    seen: list[Match] = []
    rule = Rule(
        "split", {"x": "F[B,T,2*R]"}, split,
        replace=lambda build, m: m.root,
        guard=lambda m: seen.append(m) or "only looking",
    )  # fmt: skip

    def miss(rows: Any, width: int, end: int) -> str:
        scene = Scene()
        flat = scene.call(A.view.default, scene.x, [rows, width])
        return apply_rules(
            scene.done(y=scene.call(A.slice.Tensor, flat, 1, 0, end)), [rule]
        ).near_miss

    rows = Sym("B") * Sym("T")
    assert "only looking" in miss(rows, 8, 4)
    assert [seen[0].size(name) for name in ("B", "T", "R")] == [Sym("B"), Sym("T"), 4]
    assert "expected size 2*R (with R=3, B=B, T=T), found 8" in miss(rows, 8, 3)
    wrong_rows = miss(make_dim("2*B*T"), 4, 2)
    assert "expected size B*T (with R=2, B=B, T=T), found 2*B*T" in wrong_rows


def test_a_guard_says_why_not() -> None:
    guarded = Rule(
        "guarded", RMS.inputs, RMS.pattern, RMS.replace,
        guard=lambda m: None if m.number("eps") < 1e-7 else f"eps {m.number('eps')} is large",
    )  # fmt: skip
    scene = Scene()
    result = apply_rules(scene.done(y=scene.rms(scene.x)), [guarded], scene.store)
    assert result.count == 0 and "eps 1e-06 is large" in result.near_miss


def test_optional_casts() -> None:
    loose = Rule(
        "loose", RMS.inputs, RMS.pattern,
        replace=lambda build, m: build.call(
            A._to_copy.default, build.call(G.rms_norm.default, m["x"], m["weight"], eps=1.0),
            dtype=type_of(m.root).dtype,
        ),
        optional_casts=True,
    )  # fmt: skip
    scene = Scene("bf16[B,T,8]")
    wide = scene.call(A._to_copy.default, scene.x, dtype=torch.float32)
    fn = scene.done(y=scene.rms(wide))
    assert apply_rules(fn, [RMS], scene.store).count == 1, "float32 inside is a match of its own"
    scene = Scene("bf16[B,T,8]")
    square = scene.call(A.pow.Tensor_Scalar, scene.x, 2)
    mean = scene.call(A.mean.dim, square, [-1], True)
    mean = scene.call(A._to_copy.default, mean, dtype=torch.float32)
    scale = scene.call(A.rsqrt.default, scene.call(A.add.Tensor, mean, 1e-6))
    y = scene.call(A.mul.Tensor, scene.weight(), scene.call(A.mul.Tensor, scene.x, scale))
    fn = scene.done(y=y)
    assert apply_rules(fn.copy(), [RMS], scene.store).count == 0
    assert apply_rules(fn, [loose], scene.store).count == 1
    assert targets(fn) == ["graftwork.rms_norm", "aten._to_copy"]


# -- weights


def scaled(build: Builder, m: Match) -> torch.fx.Node:
    weight = build.weights[str(m["weight"].target)]
    new = derive(f"{weight.name}.doubled", weight.type, A.mul.Scalar, weight, other=2)
    return build.call(A.linear.default, m["x"], build.add(build.weights.taken(new)))


DOUBLE = Rule(
    "fold_double",
    {"x": "F[...,K]", "weight": "@F[N,K]"},
    lambda x, weight: torch.nn.functional.linear(x, weight) * 2,
    scaled,
)


def test_new_weights_are_lazy_and_shared() -> None:
    scene = Scene()
    x = scene.x
    for _ in range(2):
        linear = scene.call(A.linear.default, x, scene.weight("w", "f32[8,8]"))
        x = scene.call(A.mul.Tensor, linear, 2)
    fn = scene.done(y=x)
    result = apply_rules(fn, [DOUBLE], scene.store)
    assert result.count == 2 and list(result.weights) == ["w", "w.doubled"]
    assert fn.weights == {"w.doubled"}
    old, new = (result.weights[name].load() for name in ("w", "w.doubled"))
    assert torch.equal(new, old * 2)


# -- the driver


def test_rules_that_feed_each_other_stop_with_an_error() -> None:
    there = Rule(
        "there", {"x": "F[...]"}, torch.sin,
        lambda build, m: build.call(A.cos.default, m["x"]),
    )  # fmt: skip
    back = Rule(
        "back", {"x": "F[...]"}, torch.cos,
        lambda build, m: build.call(A.sin.default, m["x"]),
    )  # fmt: skip
    scene = Scene()
    fn = scene.done(y=scene.call(A.sin.default, scene.x))
    with pytest.raises(PassError, match=r"there.*back.*still match after \d+ rewrites of step"):
        apply_rules(fn, [there, back])


def test_new_nodes_are_matched_again() -> None:
    rule = Rule(
        "negations", {"x": "F[...]"}, lambda x: torch.neg(torch.neg(x)),
        lambda build, m: m["x"],
    )  # fmt: skip
    scene = Scene()
    x = scene.x
    for _ in range(9):
        x = scene.call(A.neg.default, x)
    fn = scene.done(y=x)
    assert apply_rules(fn, [rule]).count == 4 and targets(fn) == ["aten.neg"]


def test_a_replacement_of_another_type_is_refused() -> None:
    rule = Rule(
        "wrong", {"x": "F[...]"}, torch.neg,
        lambda build, m: build.call(A.unsqueeze.default, m["x"], 0),
    )  # fmt: skip
    scene = Scene()
    fn = scene.done(y=scene.call(A.neg.default, scene.x, site=Site("here")))
    with pytest.raises(VerifyError, match=r"wrong at %neg \(here\): expected f32\[B,T,8\]"):
        apply_rules(fn, [rule])


def test_work_grows_linearly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goals that the matcher expands, for functions of one and of four sizes."""
    counts = []
    expand = Matcher.expand

    def counted(self: Matcher, *args: Any) -> Any:
        counts[-1] += 1
        return expand(self, *args)

    monkeypatch.setattr(Matcher, "expand", counted)
    for length in (20, 80):
        scene = Scene()
        x = scene.x
        for i in range(length):
            x = scene.rms(x) if i % 2 else scene.call(A.mul.Tensor, x, x)
        counts.append(0)
        apply_rules(scene.done(y=x), [RMS], scene.store)
    assert counts[1] <= 4.2 * counts[0]


@given(programs(stage="traced"))
def test_rewritten_programs_compute_the_same(program: Program) -> None:
    fn = program.function("step").copy()
    result = apply_rules(fn, [RMS], program.weights)
    after = program.with_function(fn, weights=result.weights)
    verify(after.replace(stage="canonical"))
    inputs = step_inputs(program)
    assert_close(run(after, "step", inputs)["logits"], run(program, "step", inputs)["logits"])
    spelled = [n for n in program.function("step").calls(A.rsqrt.default)]
    assert result.by_rule.get("rms_norm", 0) == len(spelled)
