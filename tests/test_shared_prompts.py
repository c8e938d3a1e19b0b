"""Beginnings that sequences of one call share are fed once, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from selection import on_backends, one_in
from test_kept_conversations import ASKED, MODELS
from test_runtime_cached import padded

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError
from graftwork.runtime import generate

PROMPT = torch.randint(1, 12, (70,), generator=torch.Generator().manual_seed(2)).tolist()
GREEDY: dict[str, Any] = {**ASKED, "max_new_tokens": 20, "eos_token_id": []}
SAMPLED: dict[str, Any] = {**ASKED, "max_new_tokens": 12, "do_sample": True, "seed": 3}


def executable_of(name: str, backend: str = "eager") -> Any:
    return compile(MODELS[name](), Target(backend, threads=1))


def batches() -> dict[str, list[list[int]]]:
    """By name: prompts with a beginning in common, the same ones, and some of each."""
    begun = [PROMPT + [n, 3, n + 1][: n + 1] for n in range(3)]
    return {
        "begun alike": begun,
        "the same": [PROMPT, PROMPT, PROMPT],
        "both": [PROMPT, PROMPT, *begun[1:], PROMPT[:50] + [2] * 9],
        "pairs": [PROMPT, PROMPT[5:], PROMPT, PROMPT[5:]],
    }


@pytest.mark.parametrize(("kind", "backend"), on_backends(batches(), ["both"]))
def test_texts_are_those_of_each_alone(kind: str, backend: str) -> None:
    fast = executable_of("suffix", backend)
    prompts = batches()[kind]
    ids, mask = padded(prompts)
    found = generate(fast, ids, attention_mask=mask, **GREEDY)
    assert found.stats.shared_tokens >= 2 * 60 and found.stats.reused_tokens == 0
    for row, prompt in zip(found.sequences.tolist(), prompts, strict=True):
        alone = executable_of("plain", backend)
        wanted = generate(alone, torch.tensor([prompt]), **GREEDY).sequences[0].tolist()
        assert row[len(row) - len(wanted) :] == wanted
    # What an earlier call has fed nobody feeds again.
    again = generate(fast, ids, attention_mask=mask, **GREEDY)
    assert torch.equal(again.sequences, found.sequences)
    assert again.stats.shared_tokens == 0 and again.stats.reused_tokens > 2 * 60


@pytest.mark.parametrize(
    "name", one_in(4, ["h2o", "window", "recycling", "snapkv", "eagle", "sharing", "skipping"])
)
def test_caches_that_lose_rows_and_drafters_share_what_they_can(name: str) -> None:
    """Prompts that end in a block and at its ends, too."""
    for length in (64, 65, 70):
        fast, prompt = executable_of(name), PROMPT[:length]
        found = generate(fast, torch.tensor([prompt] * 3), **GREEDY)
        wanted = generate(executable_of(name), torch.tensor([prompt]), **GREEDY).sequences
        assert torch.equal(found.sequences, wanted.expand(3, -1))
        assert found.stats.shared_tokens > 0 or name == "eagle"


def test_several_sequences_of_a_prompt() -> None:
    """Sampled each for itself, from one prompt that is fed once; as many prompts drawn alike."""
    fast, ids = executable_of("plain"), torch.tensor([PROMPT, PROMPT[::-1]])
    found = generate(fast, ids, num_return_sequences=3, **SAMPLED)
    assert found.stats.shared_tokens == 2 * 3 * (len(PROMPT) - 1)
    assert found.sequences.shape == (6, len(PROMPT) + 12)
    assert len({tuple(row) for row in found.sequences.tolist()}) > 4
    repeated = generate(executable_of("plain"), ids.repeat_interleave(3, 0), **SAMPLED)
    assert torch.equal(repeated.sequences, found.sequences)
    one = generate(executable_of("plain"), ids[:1], **SAMPLED)
    assert torch.equal(one.sequences, generate(fast, ids[:1], **SAMPLED).sequences)
    with pytest.raises(InputError, match="num_return_sequences=3 has no effect on greedy"):
        generate(fast, ids, num_return_sequences=3, **GREEDY)
    with pytest.raises(InputError, match="num_return_sequences: expected an integer of at least 1"):
        generate(fast, ids, num_return_sequences=0, **SAMPLED)


def test_what_differs_soon_is_fed_as_it_is() -> None:
    fast = executable_of("plain")
    ids = torch.tensor([[*PROMPT[:20], 2], [*PROMPT[:20], 3]])
    assert generate(fast, ids, **GREEDY).stats.shared_tokens == 0
    alone = generate(fast, torch.tensor([PROMPT]), **GREEDY)
    assert alone.stats.shared_tokens == 0
