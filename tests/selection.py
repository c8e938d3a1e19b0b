"""Which cases of a test the everyday run leaves out (see `long` in CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest
import torch

DEAREST = (
    *("test_torch_backend.py", "test_cuda_provider.py", "test_source_drafts.py"),
    *("test_pictures.py", "test_pairs.py", "test_onnxruntime_executable.py"),
    *("test_frontends_modules.py", "test_gpu_products.py", "test_ops_wrong.py"),
    *("test_cut_depth.py", "test_few_bits.py", "test_runtime_plain.py", "test_eviction.py"),
    *("test_scoring.py", "test_torch_replay.py", "test_fuzz_folders.py", "test_commands.py"),
)
"""Files with few tests that take long: by their number of tests they would be the last."""


RARE = (
    "test_adaeagle.py::test_it_learns_where_the_drafter_is_right",
    "test_beams.py::test_of_every_kind_of_cache[gemma3_text]",
    "test_choosing.py::test_drafts_that_gain_less_than_noise_are_left_out",
    "test_choosing.py::test_what_is_chosen_runs",
    "test_codebooks.py::test_kernels_have_the_bits_of_the_meaning[x86-64]",
    "test_contrast_model.py::test_drafts_and_few_bits_go_together_with_it[chains]",
    "test_cuda_provider.py::test_all_that_is_no_size_runs_on_the_device[bfloat16-names0]",
    "test_dola.py::test_drafts_and_few_bits_go_together_with_it[floats]",
    "test_dola.py::test_scores_are_the_papers[three-eager]",
    "test_draft_cost.py::test_whole_drafts_are_timed_beside_none",
    "test_drawing.py::test_layers_that_are_alike_are_one_block",
    "test_endless_texts.py::test_windows_see_what_they_saw_in_texts_without_end[gemma3_text-16-onnxruntime]",
    "test_exits.py::test_no_promise_is_made_where_no_threshold_keeps_it",
    "test_export_recurrent.py::test_the_models_texts[recurrent_gemma-copyspec]",
    "test_gguf_archs.py::test_layers_that_predict_later_tokens",
    "test_gguf_export.py::test_a_folder_as_a_file[llama (experts)]",
    "test_gguf_export.py::test_tokens_are_those_of_the_tokenizer[_byte_level]",
    "test_graphs.py::test_texts_are_the_same[eagle]",
    "test_indices.py::test_a_token_outside_the_vocabulary_is_an_error[torch:cpu:float32-1]",
    "test_input_embeds.py::test_drafts_change_no_text[copyspec]",
    "test_input_embeds.py::test_rows_of_tokens_are_these_tokens[kv_int8]",
    "test_input_embeds.py::test_texts_are_those_of_transformers[granite]",
    "test_kept_conversations.py::test_random_calls_give_what_a_fresh_program_gives[suffix]",
    "test_knob.py::test_a_refusal_is_kept_like_a_choice",
    "test_layers.py::test_layers_of_two_kinds",
    "test_learner.py::test_a_drafter_learns_the_texts_that_it_drafts",
    "test_pairs.py::test_two_recipes_are_refused_or_right[layerskip+copyspec_recycling]",
    "test_pictures.py::test_recipes[gemma3-recycling]",
    "test_source_drafts.py::test_a_draft_sees_the_source[True]",
    "test_source_drafts.py::test_texts_leave_early[t5]",
    "test_torch_backend.py::test_quantized_weights_stay_bytes_and_give_the_same_logits[int8]",
    "test_windows.py::test_rows_beyond_a_window_are_not_missed[draft2-torch]",
)
"""Tests that take ten seconds or so each, and whose neighbours show the same of another case: they
count as `long`."""


def mostly_long(cases: Iterable[str], keep: Collection[str]) -> list[Any]:
    """All cases as parameters, those that are not to be kept with the mark `long`."""
    names = list(cases)
    _check(keep, names)
    return [n if n in keep else pytest.param(n, marks=pytest.mark.long) for n in names]


def one_in(every: int, cases: Iterable[Any]) -> list[Any]:
    """All cases as parameters: the first of each `every`, and the others with the mark `long`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        if place % every
        else case
        for place, case in enumerate(cases)
    ]


def rarely(cases: Iterable[str], every: int, keep: Collection[str] = ()) -> list[Any]:
    """All cases as parameters: those that are to be kept, of the others one in `every` with the
    mark `long`, and the rest with the mark `sweep`."""
    names = list(cases)
    _check(keep, names)
    others = [n for n in names if n not in keep]
    marks = {
        n: pytest.mark.sweep if place % every else pytest.mark.long
        for place, n in enumerate(others)
    }
    return [n if n in keep else pytest.param(n, marks=marks[n]) for n in names]


def on_backends(
    cases: Iterable[str],
    everywhere: Collection[str],
    backends: Sequence[str] = ("eager", "onnxruntime"),
    rare: Collection[str] = (),
) -> list[Any]:
    """(case, backend) as parameters: all cases but the `rare` on the first backend, and on the
    others those of `everywhere`; the rest with the mark `long`."""
    names = list(cases)
    _check({*everywhere, *rare}, names)
    first = set(names) - set(rare)
    return [
        (name, backend)
        if name in everywhere or (name in first and backend == backends[0])
        else pytest.param(name, backend, marks=pytest.mark.long)
        for name in names
        for backend in backends
    ]


Check = Callable[..., None]


def in_turn(cases: Callable[[], Iterable[Any]]) -> Callable[[Check], Check]:
    """One test that runs a check of all cases, each from the same random state, and names those
    that fail; called with a case, it is the check. cases: gives arguments of the check, or
    `pytest.param`s of them."""

    def test_of(check: Check) -> Check:
        def test(*one: Any) -> None:
            if one:
                return check(*one)
            wrong: dict[str, Exception] = {}
            given = [c if hasattr(c, "values") else pytest.param(c, id=str(c)) for c in cases()]
            assert given, "no cases"
            for case in given:
                torch.manual_seed(0)
                try:
                    check(*case.values)
                except Exception as error:
                    wrong[str(case.id)] = error
            if wrong:
                told = "\n".join(f"{name}: {error!r}" for name, error in wrong.items())
                raise AssertionError(f"{len(wrong)} of {len(given)} cases:\n{told}") from next(
                    iter(wrong.values())
                )

        test.__name__, test.__doc__, test.__module__ = (
            check.__name__,
            check.__doc__,
            check.__module__,
        )
        return test

    return test_of


def _check(chosen: Collection[str], names: Collection[str]) -> None:
    strange = set(chosen) - set(names)
    assert not strange, f"no such cases: {', '.join(sorted(strange))}"
