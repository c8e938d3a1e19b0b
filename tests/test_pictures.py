"""Pictures in prompts: rows that a tower made stand where transformers puts them."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from selection import mostly_long
from transformers import AutoConfig, AutoModelForImageTextToText

import graftwork as gw
from graftwork.backends.picture_step import with_pictures
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
GRID = {
    "depth": 2,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
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
    # Rows of a picture see each other, also where they are more than a window looks back.
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            **TEXT,
            "tie_word_embeddings": False,
            "head_dim": 8,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {"model_type": "siglip_vision_model", **TOWER},
        "image_token_id": TOKEN,
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,
    },
    # Rows of a picture have places in height and width.
    "qwen2_vl": {
        "text_config": {"model_type": "qwen2_vl_text", **TEXT, "rope_parameters": ROPE},
        "vision_config": {**GRID, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        "image_token_id": TOKEN,
    },
    "qwen2_5_vl": {
        "text_config": {"model_type": "qwen2_5_vl_text", **TEXT, "rope_parameters": ROPE},
        "vision_config": {
            **GRID,
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": TOKEN,
    },
}
APART = ("qwen2_vl", "qwen2_5_vl")
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


@lru_cache
def reference_of(name: str) -> Any:
    """A copy that transformers runs: it leaves hooks in a model, which is not kept then."""
    return copy.deepcopy(model_of(name))


def given(name: str, count: int) -> dict[str, Any]:
    """So many pictures, and what transformers takes beside them."""
    generator = torch.Generator().manual_seed(5)
    if name in APART:  # of 2 x 3 and 3 x 2 rows
        sides = torch.tensor([[1, 4, 6], [1, 6, 4]] * count)[:count]
        patches = torch.randn(int(sides.prod(1).sum()), 96, generator=generator)
        return {"pixel_values": patches, "image_grid_thw": sides}
    found: dict[str, Any] = {"pixel_values": torch.randn(count, 3, 16, 16, generator=generator)}
    if name == "mistral3":
        found["image_sizes"] = torch.tensor([[16, 16]] * count)
    return found


@torch.no_grad()
def rows_of(name: str, count: int) -> torch.Tensor:
    """What the model's own tower makes of them, f[N,H]."""
    made = reference_of(name).get_image_features(**given(name, count), return_dict=True)
    made = made.pooler_output
    made = torch.cat(list(made)) if isinstance(made, (list, tuple)) else made
    return made.reshape(-1, made.shape[-1])


def read_of(name: str, count: int, factor: float = 1.0) -> dict[str, Any]:
    """What our own `generate` takes beside ids."""
    made = {"image_embeds": factor * rows_of(name, count)}
    return made | {n: x for n, x in given(name, count).items() if n == "image_grid_thw"}


def prompt_of(name: str, before: list[int], pictures: int, after: list[int]) -> list[int]:
    """With a token between pictures."""
    each = len(rows_of(name, 1))
    rows = [token for _ in range(pictures) for token in [*[TOKEN] * each, 5]]
    return [*before, *rows[:-1], *after]


def expected(name: str, ids: torch.Tensor, mask: torch.Tensor | None, count: int) -> torch.Tensor:
    extra = {} if mask is None else {"attention_mask": mask}
    kinds = {"gemma3": "token_type_ids", **dict.fromkeys(APART, "mm_token_type_ids")}
    if name in kinds:
        extra[kinds[name]] = (ids == TOKEN).long()
    found: torch.Tensor = reference_of(name).generate(ids, **given(name, count), **extra, **ASKED)
    return found


@pytest.mark.parametrize("name", mostly_long(CASES, keep=("qwen2_vl",)))
def test_texts_are_transformers(name: str) -> None:
    """Of one picture, of two in a text, and of a batch in which one has none."""
    fast = gw.optimize(model_of(name), target="eager")
    one = torch.tensor([prompt_of(name, [1, 7], 1, [9, 30])])
    two = torch.tensor([prompt_of(name, [1, 7], 2, [9, 30, 8])])
    differ = 0
    for ids, count in ((one, 1), (two, 2)):
        want = expected(name, ids, None, count)
        found = fast.generate(ids, **read_of(name, count), **ASKED)
        assert torch.equal(found, want)
        others = fast.generate(ids, **read_of(name, count, -9), **ASKED)
        differ += int(not torch.equal(found, others))
    assert differ  # with what is read
    width = two.shape[1]
    texts = [two[0].tolist(), [1, 5, 9], one[0].tolist()]
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    found = fast.generate(ids, attention_mask=mask, **read_of(name, 3), **ASKED)
    assert torch.equal(found, expected(name, ids, mask, 3))


ELSEWHERE = [
    *(
        pytest.param(name, target, marks=pytest.mark.long)
        for name, target in (
            *((name, "onnxruntime") for name in ("gemma3", "llava", "qwen2_vl")),
            ("llava", "torch"),
        )
    ),
    pytest.param("gemma3", "torch", marks=pytest.mark.sweep),
    pytest.param("qwen2_vl", "torch", marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("name", "target"), ELSEWHERE)
def test_targets_and_saved_models(name: str, target: str, tmp_path: Any) -> None:
    ids = torch.tensor([prompt_of(name, [1, 7], 1, [9, 30])])
    want = expected(name, ids, None, 1)
    gw.optimize(model_of(name), target="eager").save(tmp_path / "saved")
    fast = gw.load(tmp_path / "saved", target=target)
    assert torch.equal(fast.generate(ids, **read_of(name, 1), **ASKED), want)
    # Texts alone go on as ever, and nothing of a picture is left to them.
    plain = torch.tensor([[1, 7, 9, 30]])
    assert torch.equal(fast.generate(plain, **ASKED), reference_of(name).generate(plain, **ASKED))


@pytest.mark.parametrize("name", mostly_long(("gemma3", "qwen2_vl"), keep=("qwen2_vl",)))
def test_prompts_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece cuts a picture whose rows see each other; positions go on where they were."""
    from graftwork.runtime.feeding import feed

    prompt = prompt_of(name, [1, 7, 8], 2, [9, 30, 8, 5, 11, 13])
    texts = [prompt, [1, 7], prompt_of(name, [3, 1, 7, 8, 2], 1, [9, 30])]
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    want = expected(name, ids, mask, 3)
    for target, pieces in (("eager", (3, 8)), ("onnxruntime", (5,))):
        fast = gw.optimize(model_of(name), target=target)
        for piece in pieces:
            monkeypatch.setattr(feed, "CHUNK", piece)
            found = fast.generate(ids, attention_mask=mask, **read_of(name, 3), **ASKED)
            assert torch.equal(found, want)


RECIPES = (
    *("copyspec", "recycling", "int8", "kv_int8", "snapkv", "medusa", "eagle_chain", "eagle2"),
    *("int8_copyspec", "skip_layers"),
)


ALWAYS = (("llava", "copyspec"), ("gemma3", "recycling"), ("qwen2_vl", "eagle_chain"))
OFTEN = (("llava", "snapkv"), ("gemma3", "eagle_chain"), ("qwen2_vl", "kv_int8"))


def _seldom(case: tuple[str, str]) -> Any:
    if case in ALWAYS:
        return ()
    return pytest.mark.long if case in OFTEN else pytest.mark.sweep


BY_MODEL = [
    pytest.param(name, recipe, marks=_seldom((name, recipe)))
    for name in ("llava", "gemma3", "qwen2_vl")
    for recipe in RECIPES
    if name == "llava" or recipe != "snapkv"
]


@pytest.mark.filterwarnings("ignore:.*untrained")
@pytest.mark.parametrize(("name", "recipe"), BY_MODEL)
def test_recipes(name: str, recipe: str) -> None:
    """Drafts change no text, and what is approximate reads the picture all the same."""
    plain = {"int8_copyspec": "int8", "kv_int8": "kv_int8"}.get(recipe, recipe)
    plain = plain if plain in ("int8", "kv_int8") else "baseline"
    made: Any = recipe
    options = {"skip_layers": {"layers": [0]}, "snapkv": {"budget": 32, "block": 8, "recent": 8}}
    if recipe in options:
        of, extends = ("evict_cache", recipe) if recipe == "snapkv" else (recipe, "baseline")
        step = {"pass": of, "options": options[recipe]}
        made = {"title": "s", "contract": "approximate", "extends": extends, "passes": [step]}
        plain = made
    target = "onnxruntime" if "int8" in recipe else "eager"
    ids = torch.tensor([prompt_of(name, [1, 7, 9], 1, [9, 30, 7, 9, 30, 7])])
    fast = gw.optimize(model_of(name), made, target=target)
    found = fast.generate(ids, **read_of(name, 1), **ASKED)
    same = gw.optimize(model_of(name), plain, target=target)
    assert torch.equal(found, same.generate(ids, **read_of(name, 1), **ASKED))
    assert not torch.equal(found, fast.generate(ids, **read_of(name, 1, -1), **ASKED))


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
    with pytest.raises(InputError, match="image_grid_thw: rows of this model's pictures stand as"):
        grid = torch.tensor([[1, 2, 2]])
        fast.generate(torch.tensor([ids]), image_embeds=rows, image_grid_thw=grid, **ASKED)


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        (None, r"expected i64\[P,3\].*got nothing"),
        ([[1.0, 4.0, 6.0]], r"expected i64\[P,3\].*got torch.float32 of \[1, 3\]"),
        ([[1, 4, 4]], "a picture of 1 x 2 x 2 rows has 6 image tokens in prompt 0"),
        ([[1, 4, 6], [1, 4, 6]], "2 pictures, and the prompts have 1"),
        ([], "prompt 0 has 1 pictures, 0 are left"),
    ],
)
def test_bad_places(grid: Any, says: str) -> None:
    fast, ids = qwen(), torch.tensor([prompt_of("qwen2_vl", [1, 7], 1, [9])])
    asked = {} if grid is None else {"image_grid_thw": torch.tensor(grid).reshape(-1, 3)}
    if grid == []:
        asked["image_grid_thw"] = torch.zeros(0, 3, dtype=torch.int64)
    with pytest.raises(InputError, match=says):
        fast.generate(ids, image_embeds=rows_of("qwen2_vl", 1), **asked, **ASKED)


@lru_cache
def qwen() -> Any:
    return gw.optimize(model_of("qwen2_vl"), target="eager")


def test_caches_that_lose_rows_read_texts() -> None:
    """Rows' numbers are not their positions where pictures have places."""
    few = {"evict_cache": {"budget": 32, "block": 8, "recent": 8}}
    recipe = {"title": "s", "contract": "approximate", "extends": "snapkv", "passes": [few]}
    fast = gw.optimize(model_of("qwen2_vl"), recipe, target="eager")
    ids = torch.tensor([prompt_of("qwen2_vl", [1, 7], 1, [9])])
    with pytest.raises(InputError, match=r"reads texts alone.*or its caches lose rows"):
        fast.generate(ids, **read_of("qwen2_vl", 1), **ASKED)


def test_a_step_that_looks_tokens_up_twice_reads_texts() -> None:
    program = gw.optimize(model_of("llava"), target="eager").program
    fn = program.step.copy()
    (node,) = (n for n in fn.input("tokens").users if "embedding" in str(n.target))
    with fn.graph.inserting_after(node):
        again = fn.call(node.target, *node.args)
    fn.set_outputs({**fn.outputs, "more": again})
    other = program.with_function(fn)
    assert with_pictures(other) is other
