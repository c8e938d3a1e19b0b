"""Files of trained weights are used whole or refused by name, and untrained ones are remarked."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from selection import one_in
from test_runtime_cached import with_itself
from test_training import FEW, TEXT, drafted
from tiny import drafting_llama, layer_ahead, named, tiny_llama
from tokenizers import Tokenizer, models

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import GraftworkWarning, PassError, Program
from graftwork.ir.plan.contract import Contract
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_hydra import DraftHydra
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.draft_mlp_speculator import DraftMlpSpeculator
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.drafting.trained import fingerprint
from graftwork.passes.engine.base import Pass, all_passes
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.tracing import traced
from graftwork.training import fit
from graftwork.training.net import trainable, trained_parts

TAKING = {
    name: cls
    for name, cls in all_passes().items()
    if "weights" in cls.model_fields and cls.contract is not Contract.TUNED
}
"""Not those that tune the target: their files come with drafters' (`test_tuned_target`)."""

EAGER = Target("eager", "cpu")


def target(*kinds: type[Pass]) -> Program:
    """What passes of these kinds work on: deep enough for drafters that read several layers, with
    what a checkpoint brings, and its step cut or a model that drafts where they ask for that."""
    whole = tiny_llama(7).replace(guests={"mtp.0": layer_ahead(), "other": tiny_llama(1)})
    if any("drafts" in kind.requires for kind in kinds):
        return run_passes(whole, [Step(DraftModel(model="other"))])[0]
    if not any("segments" in kind.requires for kind in kinds):
        return whole
    cutting = (InsertKvCache(), PickLogits(), AddArgmax(), CutDepth(every=1))
    return run_passes(whole, [Step(one) for one in cutting])[0]


def trained(*passes: Pass) -> dict[str, torch.Tensor]:
    """What training some passes would leave."""
    start = program = target(*map(type, passes))
    for one in passes:
        program = one.run(program).program
    before = trained_parts(start.plan)  # of a model that drafts already, whose files are its own
    parts = [part for part in trained_parts(program.plan) if part not in before]
    names = {name for part in parts for name in trainable(program, part)}
    return {name: program.weights[name].load().contiguous() for name in names}


def written(
    folder: Path, tensors: Mapping[str, torch.Tensor], ours: bool = True, of: Program | None = None
) -> str:
    """A heads file, as training here writes it (of a program) or as others publish theirs."""
    mark = {"target": fingerprint(of or target())} if ours else {"format": "pt"}
    save_file(dict(tensors), folder / "heads.safetensors", metadata=mark)
    return str(folder)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "published"])
@pytest.mark.parametrize("name", one_in(4, TAKING))
def test_every_pass_takes_all_of_a_file_or_refuses_it(
    name: str, ours: bool, tmp_path: Path
) -> None:
    kind = TAKING[name]
    whole, start = trained(kind()), target(kind)
    folder = written(tmp_path, whole, ours, start)
    outcome = kind(weights=folder).run(start)
    assert outcome.remarks == ()
    first = min(whole)
    odd = f"{first}.odd"
    written(tmp_path, {**whole, odd: torch.zeros(3)}, ours, start)
    with pytest.raises(PassError, match=rf"{name}: .*'{odd}' as f32\[3\].*have no place"):
        kind(weights=folder).run(start)
    fewer = {n: t for n, t in whole.items() if n != first}
    written(tmp_path, fewer | {"x": torch.zeros(1)}, ours, start)
    with pytest.raises(PassError, match=rf"{name}: .*has no '{first}'"):
        kind(weights=folder).run(start)


@pytest.mark.parametrize(
    ("made", "used", "left"),
    [
        (DraftEagle(), DraftEagle(inner=0), "eagle.layers.0.mlp.down_proj.weight"),
        (DraftMedusa(heads=4), DraftMedusa(heads=3), "medusa.3.0.linear.bias"),
        (DraftHydra(prefix=True), DraftHydra(), "hydra.prefix.input_layernorm.weight"),
        (DraftMlpSpeculator(), DraftMlpSpeculator(levels=2), "speculator_2.embedding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_heads_of_other_options_are_not_cut_down(
    made: Pass, used: Pass, left: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, trained(made))
    with pytest.raises(PassError, match=f"has '{left}'.*with other options"):
        type(used)(**{**dict(used), "weights": folder}).run(target())


def test_a_file_may_hold_what_several_passes_take(tmp_path: Path) -> None:
    """Training writes all drafters of a recipe into one."""
    folder = written(tmp_path, trained(DraftMedusa(), DraftHydra()))
    for kind in (DraftMedusa, DraftHydra):
        assert kind(weights=folder).run(target()).matches


# -- untrained weights


def test_layers_of_the_checkpoint_are_trained() -> None:
    silent = [name for name, kind in TAKING.items() if not kind().run(target(kind)).remarks]
    assert silent == ["draft_mtp"]


@pytest.mark.parametrize("name", [name for name in TAKING if name != "draft_mtp"])
def test_untrained_weights_are_remarked(name: str) -> None:
    kind = TAKING[name]
    (remark,) = kind().run(target(kind)).remarks
    assert "untrained" in remark and f"{name}.weights" in remark


def test_the_report_shows_remarks_and_an_artifact_keeps_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(traced, "import_model", lambda model, dtype, **_: tiny_llama())
    model = gw.optimize("tiny", "medusa", target=EAGER)
    assert "note: draft_medusa: its weights are untrained" in str(model.report)
    assert gw.load(model.save(tmp_path / "out")).report == model.report


def test_decoding_with_untrained_heads_warns_once(tmp_path: Path) -> None:
    model = drafted(named("draft_suffix"), DraftMedusa())
    prompt = torch.tensor([TEXT[0][:9]])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            model.generate(prompt, max_new_tokens=4)
    # Others, such as of files that the collector closes, are not ours.
    (said,) = (str(each.message) for each in seen if each.category is GraftworkWarning)
    assert "draft=heads is untrained" in said and "graftwork train" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = fit(model, TEXT, out=tmp_path, **FEW)
        fitted.model.generate(prompt, max_new_tokens=4)
        drafted(named("draft_suffix")).generate(prompt, max_new_tokens=4)
        undrafted = drafting_llama(DraftMedusa())
        undrafted = undrafted.replace(
            plan=replace(undrafted.plan, draft=drafted().program.plan.draft)
        )
        generate(compile(undrafted, EAGER), prompt, max_new_tokens=4)


# -- a draft model's tokenizer


def test_tokenizers_that_nobody_can_compare_are_remarked(tmp_path: Path) -> None:
    (remark,) = DraftModel(model="same").run(with_itself()).remarks
    assert "without a tokenizer.json" in remark
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    both = with_itself().replace(assets={"tokenizer.json": path})
    (remark,) = DraftModel(model="same").run(both).remarks
    assert both.guests["same"].name in remark
    guests = {"same": both.guests["same"].replace(assets={"tokenizer.json": path})}
    assert DraftModel(model="same").run(both.replace(guests=guests)).remarks == ()
