"""The cases of transformers' `GenerationTesterMixin`, by their names, with a `Model` as the client.

The mixin runs every architecture of transformers through these; `tests/test_generation_cases.py`
has the tests of decoding beside it. What cannot apply is in `ELSEWHERE`, with the reason, and
docs/generate.md shows all of them; ``python tests/test_generation_mixin.py`` prints that table.
Each case compares with the same model's own `generate`, under the mixin's own processors.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from noisy import Multinomial
from transformers import DynamicCache

import graftwork as gw
from graftwork.ir import InputError

NAMES = ("llama", "gpt2", "qwen3", "gemma3_text", "mixtral", "opt", "phi", "stablelm")
PROMPTS = torch.tensor([[5, 9, 17, 33, 9, 17], [40, 41, 42, 40, 41, 42]])
MASK = torch.ones_like(PROMPTS)
STEPS = 3
PROCESSORS = {"bad_words_ids": [[1, 0]], "repetition_penalty": 1.2, "remove_invalid_values": True}
SAMPLED = {"do_sample": True, "top_k": 10, "top_p": 0.7, "temperature": 0.7}
KEPT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
ENDLESS = {"eos_token_id": None, "pad_token_id": 0}
"""The mixin takes the model's end away, so that texts have their full length."""

CASES = {
    "greedy_generate": "mixin",
    "greedy_generate_dict_outputs": "mixin",
    "greedy_generate_dict_outputs_use_cache": "mixin",
    "sample_generate": "mixin",
    "sample_generate_dict_output": "mixin",
    "beam_search_generate": "mixin",
    "beam_search_generate_dict_output": "mixin",
    "beam_search_generate_dict_outputs_use_cache": "mixin",
    "beam_sample_generate": "mixin",
    "beam_sample_generate_dict_output": "mixin",
    "generate_without_input_ids": "cases",
    "assisted_decoding_matches_greedy_search (random, same)": "mixin",
    "assisted_decoding_sample": "cases",
    "prompt_lookup_decoding_matches_greedy_search": "mixin",
    "prompt_lookup_decoding_stops_at_eos": "cases",
    "left_padding_compatibility": "mixin",
    "generate_from_random_inputs_embeds": "mixin",
    "generate_from_inputs_embeds (greedy, beam search)": "mixin",
    "generate_from_inputs_embeds_with_static_cache": "mixin",
    "generate_with_static_cache": "mixin",
    "generate_continue_from_past_key_values": "cases",
    "generate_continue_from_inputs_embeds": "mixin",
    "generate_compile_model_forward_fullgraph": "mixin",
    "generate_compilation_all_outputs": "mixin",
    "generate_methods_with_logits_to_keep": "mixin",
    "eager_matches_sdpa_generate": "mixin",
}
"""Cases that apply, and where: here (mixin), or in tests/test_generation_cases.py (cases)."""

ELSEWHERE = {
    "generate_with_quant_cache": "a cache of few bits is a recipe's (`kv_int4`, `kivi`); "
    '`cache_implementation="quantized"` is refused by name, which is tested',
    "past_key_values_format": "no caches are handed out: the runtime keeps them between calls",
    "model_parallel_beam_search": "of several accelerators",
    "inherits_generation_mixin": "a `Model` has transformers' `generate`, not its class",
    "prepare_inputs_for_generation_kwargs_forwards": "a hook of transformers' own loop",
    "eager_matches_fa2_generate, ..._fa3_..., ..._fa4_...": "kernels of a GPU in place of modules; "
    "graftwork brings its own",
    "flash_attention_2_continue_generate_with_position_ids": "likewise",
    "eager, sdpa, flash ..._padding_matches_padding_free_with_position_ids": "packed texts are a "
    "training format; ragged batches go without padding by themselves",
}
"""Cases that do not apply, and why."""


@cache
def theirs(name: str, attention: str = "sdpa") -> Any:
    """A model with a cache, which `build` turns off."""
    model = build(ARCHS[name]).eval()
    model.set_attn_implementation(attention)
    model.config.use_cache = model.generation_config.use_cache = True
    return model


@cache
def ours(name: str, recipe: str = "baseline", attention: str = "sdpa") -> gw.Model:
    return gw.optimize(theirs(name, attention), recipe, target="eager:cpu:float32")


def asked(**options: Any) -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": STEPS, **PROCESSORS, **ENDLESS, **options}


def both(name: str, ids: Any = PROMPTS, recipe: str = "baseline", **options: Any) -> Any:
    """What transformers writes, and what graftwork does; earlier calls' caches do not help."""
    made = ours(name, recipe)
    made.forget()
    given = {"attention_mask": MASK} if ids is PROMPTS else {}
    options = {**given, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        wanted = theirs(name).generate(ids, **options)
        torch.manual_seed(0)
        return wanted, made.generate(ids, **options)


def close(wanted: Any, found: Any, tolerance: float = 1e-4) -> None:
    """Sequences, and scores and logits by step: as many, of these shapes and dtypes."""
    assert found.sequences.tolist() == wanted.sequences.tolist()
    for name in ("scores", "logits"):
        mine, other = getattr(found, name), getattr(wanted, name)
        assert (mine is None) == (other is None), name
        for one, two in zip(mine or (), other or (), strict=True):
            assert one.shape == two.shape and one.dtype == two.dtype
            live = one.any(1)  # 0 where a beam search was over
            torch.testing.assert_close(one[live], two[live], rtol=1e-3, atol=tolerance)


some = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "llama" else pytest.mark.long) for n in NAMES]
)


@some
@pytest.mark.parametrize("use_cache", [False, True])
def test_greedy_generate(name: str, use_cache: bool) -> None:
    wanted, found = both(name, **asked())
    assert found.tolist() == wanted.tolist() and found.shape == (2, 6 + STEPS)
    close(*both(name, **asked(**KEPT, use_cache=use_cache)))


@some
def test_sample_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences a prompt, drawn by the same numbers, and the scores that they were drawn by."""
    drawing = Multinomial()
    options = asked(**SAMPLED, **KEPT, num_return_sequences=2, attention_mask=MASK)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", drawing)
        drawing.manual_seed(3)
        wanted = theirs(name).generate(PROMPTS, **options)
    ours(name).forget()
    found = ours(name).generate(PROMPTS, **options, seed=3)
    assert found.sequences.shape == (4, 6 + STEPS)
    close(wanted, found)


@some
@pytest.mark.parametrize("sampled", [False, True])
def test_beam_generate(name: str, sampled: bool) -> None:
    """beam_search_generate and beam_sample_generate, as ids and with all outputs."""
    beams = {"num_beams": 2, "length_penalty": 2.0, "early_stopping": False}
    options = asked(**beams, **(SAMPLED if sampled else {}))
    wanted, found = both(name, **options)
    assert found.tolist() == wanted.tolist() and found.shape == (2, 6 + STEPS)
    for use_cache in (False, True):
        wanted, found = both(name, **options, **KEPT, use_cache=use_cache)
        if sampled:  # top_p leaves too few: what is out of a search is not scored
            assert found.sequences.tolist() == wanted.sequences.tolist()
        else:
            close(wanted, found)
        assert found.beam_indices.tolist() == wanted.beam_indices.tolist()
        torch.testing.assert_close(
            found.sequences_scores, wanted.sequences_scores, rtol=1e-4, atol=1e-4
        )


@some
def test_transition_scores(name: str) -> None:
    """transformers' own `compute_transition_scores` reads what graftwork returns."""
    for beams in (1, 2):
        wanted, found = both(name, **asked(num_beams=beams, **KEPT))
        scores = [
            theirs(name).compute_transition_scores(
                made.sequences, made.scores, getattr(made, "beam_indices", None)
            )
            for made in (wanted, found)
        ]
        torch.testing.assert_close(scores[1], scores[0], rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["random", "same"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "opt"])
def test_assisted_decoding_matches_greedy_search(name: str, kind: str, tmp_path: Path) -> None:
    """Of drafts by the model itself all are taken, of a random one's next to none."""
    assistant = theirs(name) if kind == "same" else build(ARCHS[name], seed=5).eval()
    assistant.save_pretrained(tmp_path)
    recipe = gw.Recipe.load("draft_model").with_options([f"draft_model.model={tmp_path}"])
    made = gw.optimize(theirs(name), recipe, target="eager:cpu:float32")
    options = asked(max_new_tokens=8, attention_mask=MASK[:1])
    wanted = theirs(name).generate(PROMPTS[:1], **options, **KEPT)
    found = made.generate(PROMPTS[:1], **options, **KEPT)
    close(wanted, found)
    made.forget()  # a draft model sees no processors: what is taken shows without them
    stats = made.generate(PROMPTS[:1], do_sample=False, **ENDLESS, max_new_tokens=24, **KEPT).stats
    taken = stats.accepted_tokens / stats.draft_tokens
    assert taken > 0.8 if kind == "same" else taken < 0.3, stats


@some
def test_prompt_lookup_decoding_matches_greedy_search(name: str) -> None:
    ids = PROMPTS[:1].repeat(1, 2)
    wanted = theirs(name).generate(ids, **asked(max_new_tokens=6, **KEPT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        looked = theirs(name).generate(
            ids, **asked(max_new_tokens=6), prompt_lookup_num_tokens=3, use_cache=True
        )
    found = ours(name, "prompt_lookup").generate(ids, **asked(max_new_tokens=6, **KEPT))
    assert looked.tolist() == found.sequences.tolist()
    close(wanted, found)


@some
def test_left_padding_compatibility(name: str) -> None:
    """The next token's logits behind 32 tokens of padding are those without it."""
    padded = torch.cat([torch.zeros(2, 32, dtype=torch.int64), PROMPTS], 1)
    mask = torch.cat([torch.zeros_like(padded[:, :32]), MASK], 1)
    options = asked(max_new_tokens=1, **KEPT)
    model = ours(name)
    model.forget()
    found = [model.generate(PROMPTS, **options), None]
    model.forget()
    found[1] = model.generate(padded, attention_mask=mask, **options)
    torch.testing.assert_close(found[0].logits[0], found[1].logits[0], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        wanted = theirs(name)(PROMPTS, attention_mask=MASK).logits[:, -1]
    torch.testing.assert_close(found[1].logits[0], wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(PROMPTS)[:, -1], wanted, rtol=1e-4, atol=1e-4)


@some
@pytest.mark.parametrize("beams", [1, 2])
def test_generate_from_inputs_embeds(name: str, beams: int) -> None:
    """Rows instead of ids, with ids beside them and without; static caches change no text."""
    model, options = ours(name), asked(max_new_tokens=5, min_new_tokens=5, num_beams=beams)
    rows = theirs(name).get_input_embeddings()(PROMPTS).detach()
    wanted = theirs(name).generate(PROMPTS, **options, **KEPT, attention_mask=MASK)
    beside = model.generate(PROMPTS, inputs_embeds=rows, **options, **KEPT)
    close(wanted, beside)
    options["repetition_penalty"] = 1.0  # of tokens, which rows do not show
    without = model.generate(inputs_embeds=rows, **options)
    plain = theirs(name).generate(PROMPTS, **options, attention_mask=MASK)
    assert without.tolist() == plain[:, 6:].tolist()
    static = model.generate(inputs_embeds=rows, **options, cache_implementation="static")
    assert static.tolist() == without.tolist()


@some
def test_generate_from_random_inputs_embeds(name: str) -> None:
    """Other rows, other scores; they are transformers' for these rows."""
    options = asked(max_new_tokens=5, min_new_tokens=5, **KEPT)
    rows = theirs(name).get_input_embeddings()(PROMPTS).detach()
    noise = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1))
    own = ours(name).generate(PROMPTS, inputs_embeds=rows, **options)
    wanted, found = both(name, **options, inputs_embeds=noise)
    close(wanted, found)
    for one, two in zip(own.scores, found.scores, strict=True):
        assert not torch.allclose(one, two)


@some
def test_generate_continue_from_inputs_embeds(name: str) -> None:
    """In two calls as in one: the rows so far, and the new tokens' rows."""
    table, options = theirs(name).get_input_embeddings(), {"do_sample": False, **ENDLESS}
    rows = table(PROMPTS).detach()
    whole = ours(name).generate(inputs_embeds=rows, max_new_tokens=4, **options)
    first = ours(name).generate(inputs_embeds=rows, max_new_tokens=3, **options)
    more = torch.cat([rows, table(first).detach()], 1)
    last = ours(name).generate(inputs_embeds=more, max_new_tokens=1, **options)
    assert torch.cat([first, last], 1).tolist() == whole.tolist()
    wanted = theirs(name).generate(inputs_embeds=rows, max_new_tokens=4, **options)
    assert whole.tolist() == wanted.tolist()


@some
def test_generate_with_static_cache(name: str) -> None:
    options = asked(max_new_tokens=20)
    wanted, found = both(name, **options, cache_implementation="static")
    plain = ours(name).generate(PROMPTS, **options)
    assert found.tolist() == wanted.tolist() == plain.tolist()


@pytest.mark.parametrize("asks", [{"cache_implementation": "quantized"}, {"past_key_valyes": 1}])
def test_generate_with_quant_cache(asks: dict[str, Any]) -> None:
    """Caches of few bits are recipes; a misspelt keyword is an error, as it is in transformers."""
    with pytest.raises(InputError, match=next(iter(asks))):
        ours("llama").generate(PROMPTS, **asked(**asks))
    with pytest.raises(InputError, match="past_key_values"):
        ours("llama").generate(PROMPTS, **asked(past_key_values=DynamicCache()))


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generate_compiles(name: str) -> None:
    """torch.compile, two sets of prompts of one shape, with all outputs: nothing is compiled for
    the second one."""
    made = gw.optimize(theirs(name), "baseline", target="torch:cpu:float32")
    options = asked(max_new_tokens=5, min_new_tokens=5, **KEPT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, ids in enumerate((PROMPTS, PROMPTS.flip(0) + 3)):
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            wanted = theirs(name).generate(ids, **options, attention_mask=MASK)
            close(wanted, made.generate(ids, **options), 1e-3)
            made.forget()
            assert not number or before == torch._dynamo.utils.counters["stats"]["unique_graphs"]


@some
def test_generate_methods_with_logits_to_keep(name: str) -> None:
    wanted, found = both(name, **asked(max_new_tokens=10), logits_to_keep=0)
    assert found.tolist() == wanted.tolist()
    assert ours(name).generate(PROMPTS, **asked(max_new_tokens=10)).tolist() == found.tolist()


@some
def test_eager_matches_sdpa_generate(name: str) -> None:
    """Either attention of transformers is traced to the same texts and scores."""
    made = [ours(name, "baseline", kind) for kind in ("sdpa", "eager")]
    close(*[model.generate(PROMPTS, **asked(**KEPT)) for model in made])


def table_of_cases() -> str:
    """The table of docs/generate.md."""
    files = {"mixin": "tests/test_generation_mixin.py", "cases": "tests/test_generation_cases.py"}
    rows = [f"| `{name}` | yes | {files[place]} |" for name, place in CASES.items()]
    rows += [f"| `{name}` | no | {why} |" for name, why in ELSEWHERE.items()]
    return "\n".join(["| case | applies | where, or why not |", "|---|---|---|", *rows])


def test_the_table_of_the_docs_is_this_one() -> None:
    page = Path(__file__).parents[1] / "docs" / "generate.md"
    assert table_of_cases() in page.read_text(encoding="utf-8")


if __name__ == "__main__":
    print(table_of_cases())
