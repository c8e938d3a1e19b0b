"""Caches whose older rows are in few bits: what rows become, when, and what composes with them.

The reference is the model with a full cache of floats, in which rows are replaced by what the paper
makes of them (loops over groups) as soon as the text is so long. It shares no op with the program.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from handmade import Shape, cached_llama, decoded
from pydantic import ValidationError
from selection import on_backends, one_in, rarely
from test_runtime_cached import padded
from tiny import named, tiny_llama

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.cli.demo import demo_folder
from graftwork.ir import (
    GraftworkError,
    PassError,
    Program,
    arguments,
    parse_program,
    program_text,
    run,
    verify,
)
from graftwork.ir.ops.grouped_cache import group_values, join_rows, quantize_groups, store_rows
from graftwork.ir.plan import DraftRecord, NoDraft
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.caching.quantize_cache import QuantizeCache
from graftwork.passes.caching.quantize_old_rows import QuantizeOldRows
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.fuse_draft import FuseDraft
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.drafting.unroll_draft import UnrollDraft
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.recipe import Recipe
from graftwork.runtime import forget, generate
from graftwork.runtime.speculate.drafters.fused import FusedDrafter

G = torch.ops.graftwork
GROUP, RESIDUAL, BLOCK = 4, 16, 8
KINDS: dict[str, tuple[dict[str, Any], Shape]] = {
    "kivi": ({}, Shape(context=256)),
    "kivi of 2 bits": ({"bits": 2}, Shape(context=256)),
    "keys by row": ({"bits": 8, "keys": "row"}, Shape(context=256, window=21, sinks=True)),
    "values by channel": ({"values": "channel"}, Shape(context=256, slopes=True, rotary=0)),
    "turned and unrotated": (
        {"bits": 4, "keys": "row", "turned": True, "unrotated": True},
        Shape(context=256),
    ),
    "outliers": ({"bits": 3, "unrotated": True, "outliers": 1, "group": 8}, Shape(context=256)),
    "low rank": ({"bits": 3, "group": 8, "outliers": 1, "rank": 2}, Shape(context=256)),
    "wide values": ({"bits": 3}, Shape(context=256, value_dim=24)),
}
SHAPE = Shape()
SIGNS = [[(-1.0) ** (row & column).bit_count() for column in range(16)] for row in range(16)]
SPREAD = torch.tensor(SIGNS) / 4  # Sylvester's Hadamard matrix
TEXT = torch.randint(2, 9, (1, 61), generator=torch.Generator().manual_seed(5))


def stored(kind: str, draft: DraftRecord | None = None, **more: Any) -> Program:
    options, shape = KINDS[kind]
    program = AddTopTokens().run(cached_llama(shape)).program
    program = with_plan(program, draft=draft or NoDraft())
    sizes = {"group": GROUP, "residual": RESIDUAL, "block": BLOCK}
    made = QuantizeOldRows(**{**sizes, **options, **more}).run(program).program
    verify(made)
    return made


def executable_of(program: Program, backend: str = "eager") -> Any:
    return compile(program, Target(backend, threads=1))


def asked(count: int, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": count, "eos_token_id": [], "pad_token_id": 0, **more}


def test_a_channel_and_a_row_by_hand() -> None:
    """Least -1 and largest 2 in 2 bits: a step of 1; a channel that is all one number is kept.
    Steps and least numbers are in half precision, and codes are those for them."""
    x = torch.tensor([[-1.0, 5.0, 0.2, 2.0], [2.0, 5.0, 0.8, 0.0], [0.4, 5.0, 0.2, 1.0]])
    codes, steps = quantize_groups(x[None, None], bits=2, group=3, by_channel=True)
    torch.testing.assert_close(
        steps[0, 0], torch.tensor([[1, 0, 0.2, 2 / 3, -1, 5, 0.2, 0]]).half()
    )
    assert codes.flatten().tolist() == [0 | 0 | 0 << 4 | 3 << 6, 3 | 3 << 4, 1 | 2 << 6]
    codes, steps = quantize_groups(x[None, None, :1], bits=4, group=2, by_channel=False)
    torch.testing.assert_close(steps[0, 0], torch.tensor([[0.4, 0.12, -1, 0.2]]).half())
    assert codes.flatten().tolist() == [0 | 0 << 4, 15 | 15 << 4]


def test_three_bits_by_hand() -> None:
    """Codes 5, 0, 7, 2, 1, 6, 3, 4: their two lower bits fill two bytes, their third ones one."""
    x = torch.tensor([5.0, 0, 7, 2, 1, 6, 3, 4])
    codes, steps = quantize_groups(x[None, None, None], bits=3, group=8, by_channel=False)
    assert steps.tolist() == [[[[1.0, 0.0]]]]
    lower = [1 | 3 << 2 | 1 << 4 | 3 << 6, 0 | 2 << 2 | 2 << 4 | 0 << 6]
    assert codes.flatten().tolist() == [*lower, 1 | 0 | 1 << 2 | 0 | 0 | 1 << 5 | 0 | 1 << 7]


def test_outliers_by_hand() -> None:
    """Of 0, 1, 100, 3, 2 and -40 the two farthest from 11 are kept; the others' step is 1."""
    x = torch.tensor([0.0, 1, 100, 3, 2, -40, 0, 0])[None, None, None]
    how: dict[str, Any] = {"bits": 2, "group": 8, "by_channel": False, "outliers": 2}
    codes, steps = quantize_groups(x, **how)
    assert steps.flatten().tolist() == [1.0, 0, 2, 100, 5, -40]
    assert torch.equal(group_values(codes, steps, **how), x)


def test_a_low_rank_is_found() -> None:
    """Of a matrix that has it all of it; of another as much as is found by any, but for a few
    percent."""
    x = torch.randn(2, 1, 12, 8)
    of_two = x[..., :2] @ x[..., :2, :]
    for whole in (of_two, x):
        left, right = G.low_rank(whole, group=6, rank=2)
        found = G.low_rank_rows(left, right, group=6).unflatten(2, (2, 6))
        parts = whole.unflatten(2, (2, 6))
        best = torch.linalg.svdvals(parts)[..., 2:].pow(2).sum()
        apart = (parts - found).pow(2).sum()
        assert apart <= 1.1 * best + 1e-3


def test_rows_by_hand() -> None:
    """Of 7 rows, with 2 that stay floats and blocks of 2, the first 4 are codes."""
    x = torch.randn(1, 1, 8, 4)
    how: dict[str, Any] = {"bits": 8, "group": 2, "by_channel": True}
    codes, steps = quantize_groups(x[:, :, :4], **how)
    cache = torch.zeros(1, 1, 8, 4, dtype=torch.uint8)
    cache = store_rows(cache, codes, torch.tensor([6]), after=6)
    assert torch.equal(cache[:, :, :4], codes) and not cache[:, :, 4:].any()
    assert torch.equal(store_rows(cache, codes + 1, torch.tensor([5]), after=6), cache)
    wide = torch.nn.functional.pad(steps, (0, 0, 0, 2))
    past = torch.tensor([7])
    old = group_values(cache, wide, **how)
    rows = join_rows(old, x[:, :, 4:], past, residual=2, block=2)
    torch.testing.assert_close(rows[:, :, :4], x[:, :, :4], atol=0.01, rtol=0)
    assert torch.equal(rows[:, :, 4:], x[:, :, 4:])


def made_of(x: torch.Tensor, bits: int, outliers: int = 0) -> torch.Tensor:
    """The numbers of one group in so many bits (Liu et al. 2024, section 3.1), those farthest from
    their mean as they are (Hooper et al. 2024, section 3.4)."""
    far = sorted(range(len(x)), key=lambda n: -abs(float(x[n] - x.mean())))[:outliers]
    rest = [n for n in range(len(x)) if n not in far]
    least, most = x[rest].min(), x[rest].max()
    least = least.half().float()
    step = ((most - least) / (2**bits - 1)).half().float()
    found = x.half().float()
    if step != 0:
        found[rest] = torch.round((x[rest] - least) / step) * step + least
    return found


def nearest(x: torch.Tensor, rank: int) -> torch.Tensor:
    """What has so low a rank and is near x: 8 rounds of the power iteration (Kang et al. 2024,
    algorithm 2), the factors in half precision."""
    if rank == 0:
        return torch.zeros_like(x)
    place = torch.arange(x.shape[1]).double()
    right = torch.stack([torch.cos(place * (n + 1) + n) for n in range(rank)], 1)
    for _ in range(8):
        left = torch.linalg.qr(x.double() @ right)[0]
        right = x.double().T @ left
    return left.half().float() @ right.half().float().T


class Reference:
    """A full cache of floats, in which old rows are what few bits leave of them."""

    def __init__(self, kind: str) -> None:
        self.options, shape = KINDS[kind]
        self.executable = executable_of(cached_llama(shape))
        self.executable.begin(1, 256)
        self.executable.reserve(256)
        self.fed = 0

    def feed(self, token: int) -> int:
        inputs = {
            "tokens": torch.tensor([[token]]),
            "positions": torch.tensor([[self.fed]]),
            "past": torch.tensor([self.fed]),
            "select": torch.tensor([[0]]),
        }
        best = int(self.executable.run("step", inputs, ("argmax",))["argmax"])
        self.fed += 1
        if self.fed % BLOCK == 0 and self.fed >= RESIDUAL + BLOCK:
            first = self.fed - RESIDUAL - BLOCK
            for name in self.executable.program.states_of("step"):
                self.replace(name, first)
        return best

    def replace(self, name: str, first: int) -> None:
        rows = self.executable.read_rows([name], 0, first, first + BLOCK)[name]
        options, key = self.options, name.endswith("key")
        by_channel = options.get("keys" if key else "values", "channel" if key else "row")
        size = options.get("group", GROUP)
        for head in rows:
            turns = [torch.eye(head.shape[1]) for _ in head]
            if key and options.get("unrotated"):
                turns = [self.turn(first + row) for row in range(BLOCK)]
            plain = torch.stack([row @ turn for row, turn in zip(head, turns, strict=True)])
            other = SPREAD if options.get("turned") else torch.eye(head.shape[1])
            plain = plain @ other
            codes = plain.clone()
            for group in codes.T if by_channel == "channel" else codes:
                for start in range(0, len(group), size):
                    part = group[start : start + size]
                    few = part.clone(), options.get("bits", 4), options.get("outliers", 0)
                    part.copy_(made_of(*few))
            for start in range(0, BLOCK, size):
                error = (plain - codes)[start : start + size]
                codes[start : start + size] += nearest(error, options.get("rank", 0))
            back = (codes @ other.T).unbind(0)
            head.copy_(torch.stack([row @ turn.T for row, turn in zip(back, turns, strict=True)]))
        self.executable.write_rows(0, first, {name: rows})

    def turn(self, position: int) -> torch.Tensor:
        """The rotation for a position as a matrix: a rotated row times it is the row before."""
        node = self.executable.program.step.calls(G.rotary.default)[0]
        names = [str(node.args[n].args[0].target) for n in (1, 2)]
        tables = [self.executable.program.weights[name].load() for name in names]
        cos, sin = (table[position] for table in tables)
        half, width = len(cos), 2 * len(cos)
        made = torch.eye(SHAPE.dim)
        made[:half, :half] = made[half:width, half:width] = cos.diag()
        made[half:width, :half], made[:half, half:width] = sin.diag(), -sin.diag()
        return made


def read_rows(program: Program, executable: Any, past: int) -> torch.Tensor:
    """The keys of layer 0 as attention reads them, [G,past,D]."""
    fn = program.step.copy()
    attend = arguments(fn.calls(G.attend_grouped.default)[0])
    names = ("k", "k_steps", "k_recent", "k_left", "k_right", "cos", "sin", "past")
    read = {name: attend[name] for name in names if attend[name] is not None}
    fn.set_outputs({**fn.outputs, **{f"{name}.read": node for name, node in read.items()}})
    inputs = {
        "tokens": torch.tensor([[2]]),
        "positions": torch.tensor([[past]]),
        "past": torch.tensor([past]),
        "select": torch.tensor([[0]]),
        "ancestors": torch.ones(1, 1, 1, dtype=torch.bool),
    }
    found = run(program.with_function(fn), fn.name, inputs | executable.buffers.tensors)
    given = {name: found[f"{name}.read"] for name in read}
    how = {name: attend[name] for name in ("bits", "group", "outliers")}
    rows = group_values(given["k"], given["k_steps"], by_channel=attend["keys_by_channel"], **how)
    if "k_left" in given:
        rows = rows + G.low_rank_rows(given["k_left"], given["k_right"], group=attend["group"])
    if attend["turned"]:
        rows = G.hadamard_rows(rows)
    if "cos" in given:
        rows = G.rotary(rows, given["cos"], given["sin"], interleaved=attend["interleaved"])
    kept = {name: attend[name] for name in ("residual", "block")}
    return join_rows(rows, given["k_recent"], given["past"], **kept)[0, :, :past]


@pytest.mark.parametrize(("kind", "backend"), on_backends(KINDS, {"kivi"}))
def test_rows_are_what_the_papers_rule_leaves_of_them(kind: str, backend: str) -> None:
    """Tokens and rows, through a prompt of several blocks and in decoding."""
    reference = Reference(kind)
    wanted = decoded(reference.feed, TEXT[0].tolist(), 40)
    program = stored(kind)
    executable = executable_of(program, backend)
    assert generate(executable, TEXT, **asked(40))[0].tolist() == wanted
    past = reference.fed
    whole = reference.executable.states["kv.0.key"][0, :, :past]
    rows = read_rows(program, executable, past)
    # A number in the middle of two codes may become either where a last bit differs, and so may a
    # step in the middle of two halves, which moves a group by a thousandth.
    assert ((rows - whole).abs() > 3e-3).float().mean() < 0.002


@pytest.mark.parametrize("kind", rarely(["kivi", "turned and unrotated", "low rank"], 3))
def test_it_runs_compiled(kind: str) -> None:
    plain = generate(executable_of(stored(kind)), TEXT, **asked(20))
    compiled = executable_of(stored(kind), "torch")
    assert torch.equal(generate(compiled, TEXT, **asked(20)), plain)


@pytest.mark.parametrize(
    ("draft", "backend"),
    one_in(3, product([SuffixDraft(tokens=5), RecyclingDraft(nodes=7)], ["eager", "onnxruntime"])),
)
def test_drafts_and_batches_change_nothing(draft: DraftRecord, backend: str) -> None:
    prompts = [TEXT[0].tolist(), TEXT[0, 9:20].tolist(), TEXT[0, 3:53].tolist()]
    plain = executable_of(stored("kivi of 2 bits"), backend)
    fast = executable_of(stored("kivi of 2 bits", draft), backend)
    ids, mask = padded(prompts)
    found = generate(fast, ids, attention_mask=mask, return_dict_in_generate=True, **asked(50))
    assert found.stats.accepted_tokens > 10
    for row, prompt in zip(found.sequences.tolist(), prompts, strict=True):
        wanted = generate(plain, torch.tensor([prompt]), **asked(50))[0].tolist()
        assert row[len(row) - len(wanted) :] == wanted


@pytest.mark.parametrize("backend", one_in(2, ["eager", "onnxruntime"]))
def test_a_step_that_drafts_stores_rows_too(backend: str) -> None:
    """The draft's own cache stays as it is."""
    tail = (UnrollDraft(), InsertKvCache(), PickLogits(), AddArgmax(), FuseDraft())
    few = QuantizeOldRows(group=GROUP, residual=RESIDUAL, block=BLOCK)
    passes = (DraftEagle(), *tail, few, named("tree_chain", depth=3))
    program = run_passes(tiny_llama(context=256), [Step(p) for p in passes])[0]
    assert any(n.startswith("eagle") and n.endswith(".key") for n in program.states)
    fast = executable_of(program, backend)
    found = generate(fast, TEXT, return_dict_in_generate=True, **asked(60))
    assert found.stats.draft_tokens > 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedDrafter, "chain", lambda *_: [])
        assert torch.equal(generate(fast, TEXT, **asked(60)), found.sequences)


def test_a_text_that_is_short_is_exact() -> None:
    """Nothing is in few bits before a block is full beyond the rows that stay."""
    short = TEXT[:, : BLOCK + 3]
    count = RESIDUAL + BLOCK - short.shape[1]
    wanted = generate(executable_of(cached_llama(KINDS["kivi"][1])), short, **asked(count))
    assert torch.equal(generate(executable_of(stored("kivi")), short, **asked(count)), wanted)


def test_conversations_go_on() -> None:
    """From wherever rows are still what they were there; else the text is fed again."""
    fast = executable_of(stored("kivi"))
    more = asked(3, return_dict_in_generate=True)
    for length in (18, 20, 24, 30, 31, 32, 33, 40, 47, 61):
        text = TEXT[:, :length]
        again = generate(fast, text, **more)
        assert torch.equal(
            generate(executable_of(stored("kivi")), text, **more).sequences, again.sequences
        )
    longer = generate(fast, again.sequences, **more)
    assert longer.stats.reused_tokens == again.sequences.shape[1] - 1
    forget(fast)
    assert torch.equal(generate(fast, again.sequences, **more).sequences, longer.sequences)


@pytest.mark.parametrize(
    ("name", "bits", "width"),
    [
        ("kivi", 5, 32),
        ("kivi", 5, 64),
        ("rotatekv", 4, 64),
        ("kvquant", 4, 64),
        ("kvquant", 4, 128),
        ("gear", 4, 64),
        ("kv_int4", 5, 64),
        ("kv_int8", 9, 64),
    ],
)
def test_the_bits_that_numbers_take_are_told(name: str, bits: int, width: int) -> None:
    """Steps and all that is kept beside codes are counted, by the report and by the recipe."""
    recipe = Recipe.load(name)
    (use,) = [u for u in recipe.passes if u.name in ("quantize_cache", "quantize_old_rows")]
    made = {"quantize_cache": QuantizeCache, "quantize_old_rows": QuantizeOldRows}[use.name]
    program = cached_llama(Shape(dim=width, context=256))
    outcome = made(**use.options).run(program)
    new = [s for n, s in outcome.program.states.items() if n not in program.states]
    rows = {"B": 1, "C": 1024, "C.2": 1024 // use.options.get("group", 32)}
    stored = sum(s.type.bind(rows).nbytes for s in new if s.capacity != "C.1")
    floats = sum(s.type.bind(rows).nbytes for s in program.states.values())
    assert 32 * stored / floats == bits
    assert f"take {bits}.00 bits a number" in outcome.remarks[0]
    assert f"{bits} bits a number" in recipe.title


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_bytes_are_few(backend: str) -> None:
    """For 512 rows of 2 bits; the floats that stay are counted."""
    sizes = {}
    options = {"bits": 2, "residual": 64, "block": 32}
    two = {"title": "two", "contract": "approximate", "extends": "baseline"}
    recipes = {"full": "baseline", "two": two | {"passes": [{"quantize_old_rows": options}]}}
    for name, recipe in recipes.items():
        fast = gw.optimize(str(demo_folder()), recipe, target=backend)
        fast.generate(torch.arange(440)[None] % 50, max_new_tokens=4, do_sample=False)
        sizes[name] = fast.cache_bytes()
    assert sizes["two"] < 0.75 * sizes["full"]


def test_what_would_go_wrong_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"block": 6}, "residual=16, block=6 and group=4"),
        ({"residual": 20}, "residual=20, block=8 and group=4"),
        ({"draft": SuffixDraft(tokens=8)}, "block=8 is smaller than a step with a draft"),
        ({"residual": 256}, "no row would ever get codes"),
        ({"outliers": 4}, "outliers=4 of groups of 4 numbers"),
        ({"rank": 5}, "rank=5 of 4 rows of 16; expected fewer"),
    ]
    for options, message in cases:
        with pytest.raises((PassError, ValidationError), match=message):
            stored("kivi", **options)
    with pytest.raises(PassError, match="are 20 wide; expected whole bytes"):
        QuantizeOldRows(group=8).run(cached_llama(Shape(dim=20, context=256)))
    with pytest.raises(PassError, match="are 24 wide; expected a power of two"):
        QuantizeOldRows(group=8, turned=True).run(cached_llama(Shape(dim=24, context=256)))
    with pytest.raises(PassError, match=r"kv.0.key is not what a rotation by tables"):
        QuantizeOldRows(unrotated=True).run(cached_llama(Shape(rotary=0, context=256)))
    evicting = EvictCache(budget=24, block=8).run(cached_llama(Shape(context=256))).program
    with pytest.raises(PassError, match="the plan has cache=evict"):
        QuantizeOldRows().run(evicting)
    with pytest.raises(PassError, match=r"no attention reads kv.0.key.codes"):
        EvictCache(budget=24, block=8).run(stored("kivi"))


def test_a_text_that_says_otherwise_than_it_is_is_refused() -> None:
    program = stored("kivi")
    text = program_text(program)
    for wrong in (
        text.replace(f"aten.remainder.Scalar(%past, {BLOCK})", "aten.remainder.Scalar(%past, 64)"),
        text.replace(f"residual={RESIDUAL}, block={BLOCK}, latest", "residual=8, block=8, latest"),
    ):
        assert wrong != text
        with pytest.raises(GraftworkError, match=r"says that kv\.0\.\w+\.recent holds the last"):
            verify(parse_program(wrong, weights=program.weights))
