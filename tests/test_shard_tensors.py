"""Programs spread over processes: their parts compute together what the whole does."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import imported
from selection import mostly_long
from test_raising import error, raised
from together import together

import graftwork as gw
from graftwork.backends import Target, compile
from graftwork.ir import InputError, PassError, Program, UnsupportedError, run
from graftwork.ir.execution.analysis import part_of
from graftwork.passes.drafting.trained import trained_on
from graftwork.passes.engine.base import Outcome
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.placement.shard_tensors import ShardTensors

SPLIT = ["llama", "gpt2", "phi3", "bloom", "cohere", "gemma3_text", "gptj"]


def parts_of(program: Program, count: int, exact: bool = False) -> list[Outcome]:
    return [
        ShardTensors(processes=count, rank=rank, exact=exact).run(program) for rank in range(count)
    ]


def feeds() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens, "positions": torch.arange(11).expand(2, 11).contiguous()}


def logits_of(program: Program) -> torch.Tensor:
    return run(program, "step", feeds())["logits"].double()


def held(program: Program) -> int:
    used = program.step.weights
    return sum(program.weights[name].type.nbytes for name in used)


@pytest.mark.parametrize("name", mostly_long(SPLIT, keep=("llama", "gpt2")))
def test_parts_compute_what_the_whole_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits in every rank, and half of the weights in each."""
    whole = raised(imported(name)[1])
    made = parts_of(whole, 2)
    assert all(outcome.matches >= 6 and not outcome.remarks for outcome in made)
    programs = [outcome.program for outcome in made]
    found = together(monkeypatch, 2).run([partial(logits_of, program) for program in programs])
    assert torch.equal(found[0], found[1])
    assert error(found[0], logits_of(whole)) < 1e-5
    assert all(held(program) < 0.56 * held(whole) for program in programs)


@pytest.mark.parametrize("name", mostly_long(SPLIT, keep=("llama", "gpt2")))
def test_exact_parts_round_as_the_whole_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of few bits: sums in parts would be rounded by the parts' own ranges. What is left is
    how floats add in matrix products of another size."""
    whole = raised(imported(name)[1])
    few = QuantizeWeights(bits=8, group=8, embedding=8)
    one = few.run(whole).program
    away = []
    for exact in (True, False):
        parts = [few.run(o.program).program for o in parts_of(whole, 2, exact)]
        found = together(monkeypatch, 2).run([partial(logits_of, part) for part in parts])
        assert torch.equal(*found)
        assert all(held(part) < 0.67 * held(one) for part in parts)
        away.append(error(found[0], logits_of(one)))
    assert away[0] < 1e-6 < 1e-4 < away[1]


def test_what_cannot_be_split_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of keys do not divide among four processes; the rest does."""
    whole = raised(imported("llama")[1])
    made = parts_of(whole, 4)
    assert "2 blocks stay whole in each of 4 processes" in made[0].remarks[0]
    assert "2 do not divide among 4" in made[0].remarks[0]
    found = together(monkeypatch, 4).run([partial(logits_of, o.program) for o in made])
    assert error(found[3], logits_of(whole)) < 1e-5


def test_heads_for_the_whole_fit_its_parts() -> None:
    """What training wrote names the model; a part is the same model."""
    whole = raised(imported("llama")[1])
    first, second = (trained_on(outcome.program) for outcome in parts_of(whole, 2))
    assert first == second == trained_on(whole)


def test_a_part_is_not_split_again() -> None:
    part = parts_of(raised(imported("llama")[1]), 2)[0].program
    assert part_of(part) == (0, 2)
    with pytest.raises(PassError, match="a part of another one already"):
        ShardTensors(processes=2, rank=0).run(part)


def test_backends_refuse_parts_that_this_process_cannot_run() -> None:
    part = parts_of(raised(imported("llama")[1]), 2)[1].program
    with pytest.raises(InputError, match=r"part 1 of 2.*started alone.*torchrun"):
        compile(part, Target.parse("eager"))
    with pytest.raises(UnsupportedError, match=r"exchanges nothing.*torch:cpu"):
        compile(part, Target.parse("onnxruntime"))


def test_the_number_of_processes_must_be_that_of_the_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(os.environ, "RANK", "1")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "4")
    whole = raised(imported("llama")[1])
    with pytest.raises(PassError, match="this is process 1 of 4: set processes"):
        ShardTensors(processes=2).run(whole)
    assert part_of(ShardTensors(processes=2, rank=0).run(whole).program) == (0, 2)


def process(which: str) -> None:
    """One of two: texts of some recipes with split weights, next to the whole's; printed."""
    import warnings

    from archs import ARCHS, build

    warnings.simplefilter("ignore")
    model = build(ARCHS["llama"])
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    for name, target, options in CASES[which]:
        known = gw.Recipe.load(name)
        both: Any = {"title": "parts", "contract": str(known.contract), "extends": name}
        split = {"pass": "shard_tensors", "options": options}
        fast = gw.optimize(model, {**both, "passes": [split]}, target=target)
        whole = gw.optimize(model, name, target=target)
        texts = [m.generate(ids, max_new_tokens=24, pad_token_id=0) for m in (fast, whole)]
        print(name, target, torch.equal(*texts))
    torch.manual_seed(int(os.environ["RANK"]))  # as it comes: not agreed on by anybody
    print(fast.generate(ids, max_new_tokens=24, do_sample=True, pad_token_id=0).tolist())


CASES: dict[str, list[tuple[str, str, dict[str, bool]]]] = {
    "eager": [
        *((name, "eager", {}) for name in ("baseline", "copyspec", "medusa", "eagle_chain")),
        ("int8_copyspec", "eager", {"exact": True}),
        ("recycling", "eager", {}),
    ],
    "compiled": [("recycling", "torch", {})],
}


@pytest.mark.parametrize(
    "which",
    [
        pytest.param("eager", marks=pytest.mark.long),
        pytest.param("compiled", marks=pytest.mark.sweep),
    ],
)
def test_two_processes_say_what_one_does(which: str, unused_port: int) -> None:
    """Plain, with drafts of all kinds and few bits; sampled texts are the same in both."""
    here = str(Path(__file__).parent)
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
    code = f"import test_shard_tensors as t; t.process({which!r})"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=here,
            env={**os.environ, **given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [one.communicate(timeout=400)[0].splitlines() for one in started]
    expected = [f"{name} {target} True" for name, target, _ in CASES[which]]
    assert said[0][:-1] == said[1][:-1] == expected
    assert said[0][-1] == said[1][-1]
