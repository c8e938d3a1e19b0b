"""Pictures in prompts: rows that a tower made stand where transformers puts them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from selection import mostly_long
from transformers import AutoConfig, AutoModelForImageTextToText

import graftwork as gw
from graftwork.backends.pictures import with_pictures
from graftwork.ir import InputError, program_text, verify

TOKEN = 101
"""What stands for a row of a picture."""

TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
CASES: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **TOWER},
        "image_token_id": TOKEN,
        "image_seq_length": 4,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 8},
        "image_token_id": TOKEN,
        "spatial_merge_size": 1,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {"model_type": "internvl_vision", **TOWER},
        "image_token_id": TOKEN,
        "image_seq_length": 1,
    },
    "aya_vision": {
        "text_config": {"model_type": "cohere2", **TEXT, "layer_types": ["full_attention"] * 2},
        "vision_config": {"model_type": "siglip_vision_model", **TOWER},
        "image_token_id": TOKEN,
        "downsample_factor": 2,
        "adapter_layer_norm_eps": 1e-6,
        "vision_feature_layer": -1,
    },
    "cohere2_vision": {
        "text_config": {"model_type": "cohere2", **TEXT, "layer_types": ["full_attention"] * 2},
        "vision_config": {"model_type": "siglip_vision_model", **TOWER},
        "image_token_id": TOKEN,
        "downsample_factor": 2,
        "alignment_intermediate_size": 64,
    },
}
ASKED: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


@lru_cache
def model_of(name: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **CASES[name])
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    return model


def given(name: str, count: int) -> dict[str, Any]:
    """So many pictures, and what transformers takes beside them."""
    generator = torch.Generator().manual_seed(5)
    found: dict[str, Any] = {"pixel_values": torch.randn(count, 3, 16, 16, generator=generator)}
    if name == "mistral3":
        found["image_sizes"] = torch.tensor([[16, 16]] * count)
    return found


@torch.no_grad()
def rows_of(name: str, count: int) -> torch.Tensor:
    """What the model's own tower makes of them, f[N,H]."""
    made = model_of(name).get_image_features(**given(name, count), return_dict=True)
    made = made.pooler_output
    made = torch.cat(list(made)) if isinstance(made, (list, tuple)) else made
    return made.reshape(-1, made.shape[-1])


def prompt_of(name: str, before: list[int], pictures: int, after: list[int]) -> list[int]:
    each = len(rows_of(name, 1))
    return [*before, *[TOKEN] * (pictures * each), *after]


def expected(name: str, ids: torch.Tensor, mask: torch.Tensor | None, count: int) -> torch.Tensor:
    extra = {} if mask is None else {"attention_mask": mask}
    found: torch.Tensor = model_of(name).generate(ids, **given(name, count), **extra, **ASKED)
    return found


@pytest.mark.parametrize("name", mostly_long(CASES, keep=("llava",)))
def test_texts_are_transformers(name: str) -> None:
    """Of one picture, of two in a text, and of a batch in which one has none."""
    fast = gw.optimize(model_of(name), target="eager")
    one = torch.tensor([prompt_of(name, [1, 7], 1, [9, 30])])
    two = torch.tensor([prompt_of(name, [1, 7], 2, [9, 30, 8])])
    differ = 0
    for ids, count in ((one, 1), (two, 2)):
        want = expected(name, ids, None, count)
        found = fast.generate(ids, image_embeds=rows_of(name, count), **ASKED)
        assert torch.equal(found, want)
        others = fast.generate(ids, image_embeds=9 * rows_of(name, count).flip(1), **ASKED)
        differ += int(not torch.equal(found, others))
    assert differ  # with what is read
    width = two.shape[1]
    texts = [two[0].tolist(), [1, 5, 9], one[0].tolist()]
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    found = fast.generate(ids, attention_mask=mask, image_embeds=rows_of(name, 3), **ASKED)
    assert torch.equal(found, expected(name, ids, mask, 3))


@pytest.mark.parametrize("target", mostly_long(("onnxruntime", "torch"), keep=("onnxruntime",)))
def test_targets_and_saved_models(target: str, tmp_path: Any) -> None:
    ids = torch.tensor([prompt_of("llava", [1, 7], 1, [9, 30])])
    want = expected("llava", ids, None, 1)
    gw.optimize(model_of("llava"), target="eager").save(tmp_path / "saved")
    fast = gw.load(tmp_path / "saved", target=target)
    assert torch.equal(fast.generate(ids, image_embeds=rows_of("llava", 1), **ASKED), want)
    # Texts alone go on as ever, and nothing of a picture is left to them.
    plain = torch.tensor([[1, 7, 9, 30]])
    assert torch.equal(fast.generate(plain, **ASKED), model_of("llava").generate(plain, **ASKED))


RECIPES = (
    *("copyspec", "recycling", "int8", "kv_int8", "snapkv", "medusa", "eagle_chain", "eagle2"),
    *("int8_copyspec", "skip_layers"),
)


@pytest.mark.filterwarnings("ignore:.*untrained")
@pytest.mark.parametrize("recipe", mostly_long(RECIPES, keep=("copyspec",)))
def test_recipes(recipe: str) -> None:
    """Drafts change no text, and what is approximate reads the picture all the same."""
    plain = {"int8_copyspec": "int8", "kv_int8": "kv_int8"}.get(recipe, recipe)
    plain = plain if plain in ("int8", "kv_int8") else "baseline"
    made: Any = recipe
    options = {"skip_layers": {"layers": [1]}, "snapkv": {"budget": 32, "block": 8, "recent": 8}}
    if recipe in options:
        name = "evict_cache" if recipe == "snapkv" else recipe
        extends = recipe if recipe == "snapkv" else "baseline"
        step = {"pass": name, "options": options[recipe]}
        made = {"title": "s", "contract": "approximate", "extends": extends, "passes": [step]}
        plain = made
    target = "onnxruntime" if "int8" in recipe else "eager"
    ids = torch.tensor([prompt_of("llava", [1, 7, 9], 1, [9, 30, 7, 9, 30, 7])])
    rows = rows_of("llava", 1)
    fast = gw.optimize(model_of("llava"), made, target=target)
    found = fast.generate(ids, image_embeds=rows, **ASKED)
    same = gw.optimize(model_of("llava"), plain, target=target)
    assert torch.equal(found, same.generate(ids, image_embeds=rows, **ASKED))
    assert not torch.equal(found, fast.generate(ids, image_embeds=-rows, **ASKED))


def test_several_texts_of_a_prompt_share_its_picture() -> None:
    fast = gw.optimize(model_of("llava"), target="eager")
    prompts = [prompt_of("llava", [1, 7], 1, [9, 30]), prompt_of("llava", [1, 8], 1, [9, 31])]
    sampled = {**ASKED, "do_sample": True, "top_k": 1, "num_return_sequences": 2}
    rows = rows_of("llava", 2)
    found = fast.generate(torch.tensor(prompts), image_embeds=rows, **sampled)
    want = fast.generate(torch.tensor(prompts), image_embeds=rows, **ASKED)
    assert torch.equal(found, want.repeat_interleave(2, 0))


def test_conversations_and_prefixes_hold_texts(tmp_path: Any) -> None:
    """Beside prompts with pictures, whose rows nothing holds."""
    fast = gw.optimize(model_of("llava"), "copyspec", target="eager")
    fresh = gw.optimize(model_of("llava"), target="eager")
    ids = torch.tensor([prompt_of("llava", [1, 7], 1, [9, 30])])
    texts = [list(range(3, 25)), list(range(40, 62))]
    for turn in range(6):
        text = texts[turn % 2]
        found = fast.generate(torch.tensor([text]), return_dict_in_generate=True, **ASKED)
        fresh.forget()
        assert torch.equal(found.sequences, fresh.generate(torch.tensor([text]), **ASKED))
        assert (found.stats.reused_tokens > 16) == (turn > 1)
        texts[turn % 2] = [*found.sequences[0].tolist(), 5][: len(text) + 3]
        if turn == 2:
            want = expected("llava", ids, None, 1)
            assert torch.equal(fast.generate(ids, image_embeds=rows_of("llava", 1), **ASKED), want)
    fast.save_prefix(texts[0], tmp_path / "prefix")
    other = gw.optimize(model_of("llava"), "copyspec", target="eager")
    other.load_prefix(tmp_path / "prefix")
    longer = torch.tensor([[*texts[0], 9]])
    found = other.generate(longer, return_dict_in_generate=True, **ASKED)
    assert found.stats.reused_tokens == len(texts[0])
    assert torch.equal(found.sequences, fresh.generate(longer, **ASKED))


def test_the_function_is_a_programs() -> None:
    program = with_pictures(gw.optimize(model_of("llava"), "int8", target="eager").program)
    verify(program)
    assert "graftwork.placed_rows(" in program_text(program)
    assert with_pictures(program) is program


def test_exports_read_texts(tmp_path: Any) -> None:
    model = gw.optimize(model_of("llava"), target="onnxruntime")
    for export in (model.export_onnx, model.export_onnx_plan, model.export_onnx_loop):
        export(tmp_path / export.__name__)
    assert '"pictures' not in (tmp_path / "export_onnx_plan" / "plan.json").read_text()


def bad(ids: list[int], rows: Any, recipe: str = "baseline", name: str = "llava") -> None:
    fast = gw.optimize(model_of(name), recipe, target="eager")
    fast.generate(torch.tensor([ids]), image_embeds=rows, **ASKED)


@pytest.mark.long
def test_bad_input() -> None:
    rows = rows_of("llava", 1)
    ids = prompt_of("llava", [1, 7], 1, [9])
    with pytest.raises(
        InputError, match=r"expected rows f\[4,32\], one for each image token \(101\)"
    ):
        bad(ids, rows[:3])
    with pytest.raises(InputError, match=r"expected rows f\[0,32\].*got torch.float32 of"):
        bad([1, 7, 9], rows)
    with pytest.raises(InputError, match="expected finite numbers"):
        bad(ids, rows * torch.inf)
    with pytest.raises(InputError, match="the recipe's step reads texts alone: it is cut, or"):
        bad(ids, rows, "d3")
    with pytest.raises(
        InputError, match=r"pixel_values=.*f32\[1,3,16,16\].*image_embeds: what the model's tower"
    ):
        fast = gw.optimize(model_of("llava"), target="eager")
        fast.generate(torch.tensor([ids]), **given("llava", 1), **ASKED)
    text = AutoConfig.for_model("llama", **{k: v for k, v in TEXT.items() if k != "model_type"})
    from transformers import AutoModelForCausalLM

    plain = gw.optimize(AutoModelForCausalLM.from_config(text), target="eager")
    with pytest.raises(InputError, match="llama reads text alone; pictures are read of llava"):
        plain.generate(torch.tensor([[1, 7]]), image_embeds=rows, **ASKED)


def test_a_step_that_looks_tokens_up_twice_reads_texts() -> None:
    program = gw.optimize(model_of("llava"), target="eager").program
    fn = program.step.copy()
    (node,) = (n for n in fn.input("tokens").users if "embedding" in str(n.target))
    with fn.graph.inserting_after(node):
        again = fn.call(node.target, *node.args)
    fn.set_outputs({**fn.outputs, "more": again})
    other = program.with_function(fn)
    assert with_pictures(other) is other
