"""Masked language models and masked diffusion models as drafts: read, seen both ways, accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import Recorded
from selection import mostly_long
from test_runtime_cached import PROMPTS, decode, padded, plainly
from tiny import in_int8, named, tiny_llama

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.frontends import import_masked, import_model
from graftwork.ir import GraftworkError, InputError, PassError, Program, UnsupportedError, run
from graftwork.ir.execution.executable import Planned
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.diffusion import DiffusionProposer
from graftwork.passes.drafting.draft_diffusion_model import DraftDiffusionModel, mask_of
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.speculate.drafters import grown
from graftwork.tracing.draft_models import with_draft_models

V, MASK, LEVELS, WINDOW = 32, 32, 4, 12
SIZES: dict[str, Any] = {
    "vocab_size": V + 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eurobert": ("EuroBert", {"num_key_value_heads": 2}),
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"max_position_embeddings": 66}),
    "distilbert": ("DistilBert", DISTIL),
    "electra": ("Electra", {"embedding_size": 16}),
}
MADE_FROM = {
    "Dream": ("Qwen2", {"num_key_value_heads": 2}),
    "a2d-qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "a2d-llama": ("Llama", {"num_key_value_heads": 2}),
}
EVERY = [*ENCODERS, *MADE_FROM]


def saved(kind: str, folder: Path) -> Any:
    """A tiny model of transformers, saved as such models are published, and the model."""
    import transformers

    torch.manual_seed(11)
    name, more = {**ENCODERS, **MADE_FROM}[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    head = "ForMaskedLM" if kind in ENCODERS else "ForCausalLM"
    model = getattr(transformers, f"{name}{head}")(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    if kind in MADE_FROM:
        code = {"AutoConfig": "configuration.Config", "AutoModel": "modeling.Model"}
        settings |= {"model_type": kind, "architectures": ["OwnModel"], "auto_map": code}
    (folder / "config.json").write_text(json.dumps({**settings, "mask_token_id": MASK}))
    return model


def said(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The model's own logits where all tokens see each other."""
    rows = ids.shape[1]
    all_seen = {"attention_mask": torch.zeros(len(ids), 1, rows, rows)}
    causal = type(model).__name__.endswith("ForCausalLM")
    with torch.no_grad():
        return model(input_ids=ids, **(all_seen if causal else {})).logits


@pytest.mark.parametrize("kind", mostly_long(EVERY, keep=("bert",)))
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model, program = saved(kind, tmp_path), import_masked(tmp_path)
    ids = torch.randint(1, V, (2, 9), generator=torch.Generator().manual_seed(1))
    places = torch.arange(9).expand(2, 9)
    given = {"tokens": ids, "positions": places, "lengths": torch.tensor([9, 9])}
    found = run(program, "step", given)["logits"]
    torch.testing.assert_close(found, said(model, ids), atol=1e-4, rtol=1e-4)


def drafting(folder: Path, *more: Any, tree: Any = None, **options: Any) -> Program:
    """A tiny model for which that of a folder drafts, as `optimize` makes it."""
    given = {"levels": LEVELS, "window": WINDOW, **options}
    draft = DraftDiffusionModel(model=str(folder), **given)
    uses = {"draft_diffusion_model": {"model": str(folder), **given}}
    recipe = Recipe.load({"title": "t", "contract": "lossless", "passes": [uses]})
    start = with_draft_models(tiny_llama(4), recipe, torch.float32)
    tree = tree or named("tree_chain", depth=LEVELS)
    last = (InsertKvCache(), AcceptTrees(), PickLogits(), AddArgmax(), tree)
    return run_passes(start, [Step(each) for each in (draft, *more, *last)])[0]


class RecordedBlocks(Recorded, DiffusionProposer):
    """Notes what it tells."""


@pytest.mark.parametrize("kind", mostly_long(EVERY, keep=("eurobert", "Dream")))
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_drafts_are_what_transformers_says(
    kind: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step each mask's place holds what the model says of it, with the text's last tokens
    before it; Dream says so one place before it."""
    model = saved(kind, tmp_path)
    executable = compile(drafting(tmp_path, steps=1), Target.parse(backend))
    monkeypatch.setattr(grown.PROPOSERS, "find", lambda record: RecordedBlocks)
    RecordedBlocks.notes = []
    found = decode(executable, PROMPTS, 14)
    assert torch.equal(found.sequences, plainly(executable, PROMPTS, 14))
    assert found.stats.draft_tokens > found.stats.sequence_steps
    assert {len(path) for _, path, _ in RecordedBlocks.notes} == set(range(LEVELS))
    for text, path, logits in RecordedBlocks.notes[::5]:
        recent = text[-WINDOW:]
        wanted = said(model, torch.tensor([[*recent, *[MASK] * LEVELS]]))[0]
        place = len(recent) + len(path) - (kind == "Dream")
        torch.testing.assert_close(
            torch.from_numpy(logits), wanted[place, :V], atol=2e-3, rtol=2e-3
        )


def test_a_mask_that_is_a_token_is_never_drafted(tmp_path: Path) -> None:
    saved("eurobert", tmp_path)
    program = drafting(tmp_path, token=5)
    executable = compile(program, Target("eager", "cpu"))
    drafts: list[int] = []
    root = DiffusionProposer.root

    def noted(self: DiffusionProposer, count: int) -> Any:
        level = root(self, count)
        drafts.extend(self.said.tokens.reshape(-1).tolist())
        return level

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiffusionProposer, "root", noted)
        decode(executable, PROMPTS[:1], 12)
    assert program.plan.draft.token == 5  # type: ignore[attr-defined]
    assert max(drafts) > 5 and 5 not in drafts


@pytest.mark.parametrize("backend", mostly_long(["eager", "onnxruntime"], keep=("onnxruntime",)))
def test_text_of_an_int8_target_is_its_own(backend: str, tmp_path: Path) -> None:
    saved("eurobert", tmp_path)
    fast = compile(drafting(tmp_path, in_int8(), steps=3), Target.parse(backend))
    steps = [in_int8(), InsertKvCache(), PickLogits(), AddArgmax()]
    plain = compile(
        run_passes(tiny_llama(4), [Step(each) for each in steps])[0], Target.parse(backend)
    )
    found = decode(fast, PROMPTS, 20)
    assert torch.equal(found.sequences, plainly(plain, PROMPTS, 20))
    assert found.stats.draft_tokens > found.stats.sequence_steps


@pytest.mark.long
def test_an_artifact_drafts_as_its_recipe(tmp_path: Path) -> None:
    """By the front door: one option names the model, and an artifact needs it no more."""
    import transformers

    saved("eurobert", tmp_path / "draft")
    torch.manual_seed(3)
    sizes = {**SIZES, "vocab_size": V, "num_key_value_heads": 2, "max_position_embeddings": 128}
    target = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    target.save_pretrained(tmp_path / "target")
    settings = f"draft_diffusion_model.window={WINDOW}", "draft_diffusion_model.steps=3"
    recipe = Recipe.load("speculative_diffusion").with_options(settings)
    made = gw.optimize(
        *(tmp_path / "target", recipe), target="eager:cpu:float32", draft=tmp_path / "draft"
    )
    made.save(tmp_path / "artifact")
    shutil.rmtree(tmp_path / "draft")
    again = gw.load(tmp_path / "artifact", target="onnxruntime:cpu:float32")
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    asked: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": [], "pad_token_id": 0}
    wanted = target.generate(ids, do_sample=False, **asked)
    for model in (made, again):
        result = model.generate(ids, return_dict_in_generate=True, **asked)
        assert torch.equal(result.sequences, wanted) and result.stats.draft_tokens > 0
    assert again.program.plan.draft == made.program.plan.draft


@pytest.mark.sweep
def test_compiled_text_is_the_targets_own(tmp_path: Path) -> None:
    saved("eurobert", tmp_path)
    executable = compile(drafting(tmp_path), Target.parse("torch:cpu:float32"))
    found = decode(executable, PROMPTS, 20).sequences
    assert torch.equal(found, plainly(executable, PROMPTS, 20))


def test_a_model_of_the_targets_texts_is_accepted(tmp_path: Path) -> None:
    """A floor: EuroBERT's layers, trained as a masked diffusion on what the target writes."""
    model = saved("eurobert", tmp_path / "raw").train()
    target = compile(
        run_passes(tiny_llama(4), [Step(p) for p in (InsertKvCache(), PickLogits(), AddArgmax())])[
            0
        ],
        Target("eager", "cpu"),
    )
    starts = torch.arange(V)[:, None].repeat(1, 2)
    texts = generate(target, starts, max_new_tokens=30, eos_token_id=[])
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(250):
        end = int(torch.randint(3, 32 - LEVELS, (), generator=generator))
        part = texts[:, max(0, end - WINDOW) : end + LEVELS]
        masked = torch.zeros_like(part, dtype=torch.bool)
        masked[:, -LEVELS:] = torch.rand(V, LEVELS, generator=generator) < 0.8
        logits = model(input_ids=part.masked_fill(masked, MASK)).logits[masked]
        loss = torch.nn.functional.cross_entropy(logits, part[masked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(tmp_path / "taught")
    executable = compile(drafting(tmp_path / "taught", token=MASK), Target("eager", "cpu"))
    prompts = [[3, 3], [9, 9], [20, 20]]
    found = decode(executable, prompts, 28)
    assert torch.equal(found.sequences, plainly(executable, prompts, 28))
    stats = found.stats
    assert stats.accepted_tokens > 1.0 * stats.sequence_steps, (stats.accepted_tokens, stats)
    ids, mask = padded(prompts)
    drawn = generate(
        executable, ids, attention_mask=mask, max_new_tokens=12, do_sample=True, seed=4
    )
    plan = executable.program.plan.undrafted()
    alone = Planned(executable, plan)
    again = generate(alone, ids, attention_mask=mask, max_new_tokens=12, do_sample=True, seed=4)
    assert torch.equal(drawn, again)


# -- files


def test_masks_are_found_in_files(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    def file(name: str, said: Any) -> Path:
        (tmp_path / name).write_text(json.dumps(said))
        return tmp_path / name

    Tokenizer(models.WordLevel({"a": 0, "<m>": 7}, unk_token="a")).save(str(tmp_path / "t.json"))
    words = {"tokenizer.json": tmp_path / "t.json"}
    assert mask_of({"config.json": file("c.json", {"mask_token_id": 3})}) == 3
    assert mask_of({"config.json": file("d.json", {"mask_token_id": None})}) is None
    content = {"mask_token": {"content": "<m>"}}
    for name, told in (("tokenizer_config.json", {"mask_token": "<m>"}), ("s.json", content)):
        known = "tokenizer_config.json" if name != "s.json" else "special_tokens_map.json"
        assert mask_of({known: file(name, told), **words}) == 7
    assert (
        mask_of({"tokenizer_config.json": file("e.json", {"mask_token": "<x>"}), **words}) is None
    )


def test_what_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "euro"
    saved("eurobert", folder)
    with pytest.raises(PassError, match="window=62 and levels=4 are more than the 64 positions"):
        drafting(folder, window=62)
    with pytest.raises(InputError, match="window=3 is shorter than the levels=4"):
        drafting(folder, window=3)
    with pytest.raises(PassError, match="the mask 99 is no token"):
        drafting(folder, token=99)
    with pytest.raises((InputError, PassError), match="steps=5 is more than levels=4"):
        drafting(folder, steps=5)
    settings = json.loads((folder / "config.json").read_text())
    del settings["mask_token_id"]
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(PassError, match="say what its mask is: set "):
        drafting(folder)
    with pytest.raises(InputError, match="holds no config"):
        import_masked(tmp_path)
    with pytest.raises(InputError, match="expected the folder of a masked language model"):
        import_masked(folder / "config.json")


def test_models_that_are_no_masked_ones(tmp_path: Path) -> None:
    """A causal model is refused as such a draft, and a masked one as a model that writes."""
    import transformers

    causal = tmp_path / "causal"
    sizes = {**SIZES, "num_key_value_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(causal)
    with pytest.raises(UnsupportedError, match="makes no masked language model"):
        import_masked(causal)
    start = tiny_llama().replace(guests={"other": tiny_llama()})
    with pytest.raises(PassError, match="hides later tokens: expected a masked language model"):
        DraftDiffusionModel(model="other", token=1).run(start)
    windows = transformers.ModernBertConfig(**SIZES, local_attention=8)
    transformers.ModernBertForMaskedLM(windows).save_pretrained(tmp_path / "windows")
    with pytest.raises(UnsupportedError, match="attention"):
        import_masked(tmp_path / "windows")
    (tmp_path / "causal" / "config.json").write_text('{"model_type": "llada"}')
    with pytest.raises(UnsupportedError, match="cannot read config"):
        import_masked(causal)
    for kind in ("eurobert", "Dream"):
        saved(kind, tmp_path / kind)
        with pytest.raises(GraftworkError):
            import_model(tmp_path / kind)
