"""transformers' own tests of generation, with a `Model` as the client.

transformers tests every architecture by the cases of its `GenerationTesterMixin`
(`tests/test_generation_mixin.py`) and by tests of decoding beside it, which its wheel does not
bring. These are such cases, written after their names, on models with real caches; what is
compared is the model's own `generate`.

| case of transformers | here |
|---|---|
| greedy_generate, its dict outputs, with and without use_cache | test_greedy |
| sample_generate, its dict outputs | test_samples |
| left_padding_compatibility | test_left_padding |
| prompt_lookup_decoding_matches_greedy_search, ..._stops_at_eos | test_prompt_lookup |
| assisted_decoding_matches_greedy_search, ..._sample | test_an_assistant |
| generate_continue_from_past_key_values | test_going_on_from_the_past |
| generate_without_input_ids, decoder_generate_with_inputs | test_inputs |
| generate_with_and_without_position_ids, methods_with_logits_to_keep | test_inputs |
| eos_token_id_int_and_list, stop_sequence_stopping_criteria, stop strings | test_ends |
| max_length, max_new_tokens, min_length, and their warnings | test_lengths |
| torch_fx, float16 and bfloat16 smoke tests | test_dtypes |
| iterator streamers | test_streamers |

Not tried: `past_key_values` and attentions (refused by name, `tests/test_keywords.py`), contrastive
search, DoLa and constraints (which transformers itself has no more).
"""

from __future__ import annotations

import threading
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from noisy import Multinomial
from tokenizers import Tokenizer, decoders, models
from transformers import (
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import graftwork as gw
from graftwork.ir import InputError

pytestmark = pytest.mark.long

NAMES = ("llama", "gpt2", "qwen3", "gemma3_text", "mixtral", "opt", "phi", "stablelm")
TARGET = "eager:cpu:float32"
PROMPTS = [[5, 9, 17, 33, 9, 17], [40, 41, 42, 40, 41, 42]]
END = 2


@cache
def theirs(name: str) -> Any:
    """With a cache, which `build` turns off."""
    model = build(ARCHS[name]).eval()
    model.config.use_cache = model.generation_config.use_cache = True
    return model


@cache
def ours(name: str, recipe: str = "baseline", target: str = TARGET) -> gw.Model:
    return gw.optimize(theirs(name), recipe, target=target)


def both(name: str, ids: Any, recipe: str = "baseline", **options: Any) -> tuple[Any, Any]:
    """What both write. The caches of earlier calls do not help."""
    ours(name, recipe).forget()
    given = torch.tensor(ids) if isinstance(ids, list) else ids
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = theirs(name).generate(given, **options)
        return wanted, ours(name, recipe).generate(given, **options)


def equal(wanted: Any, found: Any) -> None:
    assert found.tolist() == wanted.tolist()


GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy(name: str, use_cache: bool) -> None:
    """Sequences, scores and logits by step, of as many steps and the same shapes."""
    equal(*both(name, PROMPTS, **GREEDY))
    kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    wanted, found = both(name, PROMPTS, **GREEDY, **kept, use_cache=use_cache)
    equal(wanted.sequences, found.sequences)
    assert len(found.scores) == len(wanted.scores) == len(found.logits)
    steps = [*found.scores, *found.logits], [*wanted.scores, *wanted.logits]
    for mine, own in zip(*steps, strict=True):
        assert mine.shape == own.shape and mine.dtype == own.dtype
        live = mine.abs().sum(1) > 0  # finished sequences have none
        torch.testing.assert_close(mine[live], own[live], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws from the same numbers; a seed repeats, another one does not."""
    drawing = Multinomial()
    options: dict[str, Any] = {"do_sample": True, "top_k": 9, "temperature": 0.8}
    options |= {"max_new_tokens": 12, "eos_token_id": None}  # they draw for finished ones, too
    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", drawing)
        for seed in range(3):
            drawing.manual_seed(seed)
            wanted = theirs(name).generate(torch.tensor(PROMPTS), **options)
            ours(name).forget()
            equal(wanted, ours(name).generate(PROMPTS, **options, seed=seed))
    made = [ours(name).generate(PROMPTS, **options, seed=seed).tolist() for seed in (7, 7, 8)]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize("name", NAMES)
def test_left_padding(name: str) -> None:
    """A padded prompt continues as it does alone, and as transformers continues it."""
    short = PROMPTS[0][3:]
    ids = torch.tensor([[0, 0, 0, *short], PROMPTS[1]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    wanted, found = both(name, ids, **GREEDY, attention_mask=mask)
    equal(wanted, found)
    ours(name).forget()
    alone = ours(name).generate([short], **GREEDY)[0, len(short) :].tolist()
    row = found[0, 6:].tolist()
    assert row[: len(alone)] == alone and set(row[len(alone) :]) <= {0}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("recipe", ["prompt_lookup", "copyspec", "recycling"])
def test_prompt_lookup(name: str, recipe: str) -> None:
    """Drafts of copies change no text, and nothing comes behind an end."""
    prompt = [PROMPTS[0] * 2]
    plain = theirs(name).generate(torch.tensor(prompt), **GREEDY)
    looked = theirs(name).generate(torch.tensor(prompt), **GREEDY, prompt_lookup_num_tokens=3)
    ours(name, recipe).forget()
    found = ours(name, recipe).generate(prompt, **GREEDY)
    equal(plain, found)
    equal(looked, found)
    end = plain[0, -4].item()
    equal(*both(name, prompt, recipe, **GREEDY, eos_token_id=end))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_an_assistant(name: str, tmp_path: Path) -> None:
    """Another model's drafts: greedily the target's text. Sampled, a seed repeats."""
    assistant = build(ARCHS[name], seed=3).eval()
    assistant.config.use_cache = assistant.generation_config.use_cache = True
    assistant.save_pretrained(tmp_path)
    recipe = gw.Recipe.load("draft_model").with_options([f"draft_model.model={tmp_path}"])
    made = gw.optimize(theirs(name), recipe, target=TARGET)
    one = torch.tensor(PROMPTS[:1])
    found = made.generate(one, **GREEDY, return_dict_in_generate=True)
    equal(theirs(name).generate(one, assistant_model=assistant, **GREEDY), found.sequences)
    assert found.stats.draft_tokens > 0
    drawn: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None}
    texts = [made.generate(one, **drawn, seed=seed).tolist() for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("name", NAMES)
def test_going_on_from_the_past(name: str) -> None:
    """In two calls as in one; the second feeds what is new alone."""
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    model, prompt = ours(name), torch.tensor([PROMPTS[0] * 4])
    model.forget()
    first = theirs(name).generate(
        prompt, **options, max_new_tokens=3, return_dict_in_generate=True, use_cache=True
    )
    mine = model.generate(prompt, **options, max_new_tokens=3)
    equal(first.sequences, mine)
    more = torch.cat([first.sequences, torch.tensor([[7, 8]])], 1)
    wanted = theirs(name).generate(
        more, **options, max_new_tokens=4, past_key_values=first.past_key_values
    )
    kept = model.generate(more, **options, max_new_tokens=4, return_dict_in_generate=True)
    equal(wanted, kept.sequences)
    if not model.program.recurrent:
        assert kept.stats.reused_tokens >= mine.shape[1] - 1
    whole = theirs(name).generate(prompt, **options, max_new_tokens=7)
    model.forget()
    equal(whole, model.generate(mine, **options, max_new_tokens=4))


@pytest.mark.parametrize("name", NAMES)
def test_inputs(name: str) -> None:
    """Without a prompt, by each name of it, with its positions, whatever logits are kept."""
    ours(name).forget()
    start = {"bos_token_id": 1}
    equal(theirs(name).generate(**GREEDY, **start), ours(name).generate(**GREEDY, **start))
    ids = torch.tensor(PROMPTS)
    wanted = theirs(name).generate(ids, **GREEDY)
    equal(wanted, ours(name).generate(inputs=ids, **GREEDY))
    equal(wanted, ours(name).generate(input_ids=ids, **GREEDY))
    mask = torch.ones_like(ids)
    positions = mask.cumsum(1) - 1
    equal(wanted, ours(name).generate(ids, **GREEDY, attention_mask=mask, position_ids=positions))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        equal(wanted, ours(name).generate(ids, **GREEDY, logits_to_keep=1))


class _Third(StoppingCriteria):
    """transformers asks for all rows at once, graftwork for one."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] % 3) == 0


@pytest.mark.parametrize("name", NAMES)
def test_ends(name: str) -> None:
    """An end token as a number and in a list, transformers' own criteria, and both at once."""
    plain = theirs(name).generate(torch.tensor(PROMPTS), do_sample=False, max_new_tokens=14)
    end = plain[0, 10].item()
    equal(*both(name, PROMPTS, **GREEDY, eos_token_id=end))
    one, several = both(name, PROMPTS, **GREEDY, eos_token_id=[127, end])
    equal(one, several)
    equal(*both(name, PROMPTS, **GREEDY, eos_token_id=None))
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=9)])
    equal(*both(name, PROMPTS, **GREEDY, stopping_criteria=criteria))
    equal(*both(name, PROMPTS, **GREEDY, stopping_criteria=[_Third()]))
    equal(*both(name, PROMPTS, **GREEDY, stopping_criteria=[_Third()], eos_token_id=[end, END]))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_lengths(name: str) -> None:
    """max_length counts the prompt. Of two, transformers takes one; here both are refused."""
    equal(*both(name, PROMPTS, do_sample=False, max_length=11))
    equal(*both(name, PROMPTS, do_sample=False, max_length=20, min_length=18))
    equal(*both(name, PROMPTS, **GREEDY, min_new_tokens=14))
    equal(*both(name, PROMPTS, do_sample=False, max_new_tokens=1))
    with pytest.raises(InputError, match="both max_new_tokens and max_length"):
        ours(name).generate(PROMPTS, max_new_tokens=3, max_length=9)
    for wrong in ({"max_length": 5}, {"max_new_tokens": 0}, {"num_return_sequences": 2}):
        with pytest.raises(ValueError, match=r"."):
            theirs(name).generate(torch.tensor(PROMPTS), do_sample=False, **wrong)
        with pytest.raises(InputError):
            ours(name).generate(PROMPTS, do_sample=False, **wrong)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes(name: str, dtype: str) -> None:
    """Logits near those of the model in that dtype, and the likeliest token of its own."""
    half = build(ARCHS[name]).eval().to(getattr(torch, dtype))
    made = gw.optimize(build(ARCHS[name]).eval(), target=f"eager:cpu:{dtype}")
    kept = {"return_dict_in_generate": True, "output_logits": True}
    found = made.generate(PROMPTS, **GREEDY, **kept)
    wanted = half.generate(torch.tensor(PROMPTS), **GREEDY, **kept)
    scale = wanted.logits[0].float().abs().max()
    error = (found.logits[0].float() - wanted.logits[0].float()).abs().max()
    assert error < (0.01 if dtype == "float16" else 0.08) * scale
    for step, logits in enumerate(found.logits):
        chosen = found.sequences[:, len(PROMPTS[0]) + step]
        live = logits.float().abs().sum(1) > 0
        assert logits.argmax(1)[live].tolist() == chosen[live].tolist()


def test_streamers() -> None:
    """transformers' iterator, read by another thread."""
    backend = Tokenizer(models.BPE({chr(97 + n): n for n in range(26)}, []))
    backend.decoder = decoders.Fuse()
    read = PreTrainedTokenizerFast(tokenizer_object=backend)
    found = []
    for model in (theirs("llama"), ours("llama")):
        streamer = TextIteratorStreamer(read, timeout=60)
        options = {**GREEDY, "suppress_tokens": list(range(24, 128)), "streamer": streamer}
        given = (torch.tensor([[5, 6, 7]]),)
        thread = threading.Thread(target=model.generate, args=given, kwargs=options)
        thread.start()
        found.append("".join(streamer))
        thread.join()
    assert found[0] == found[1] and len(found[0]) > len("fgh")
