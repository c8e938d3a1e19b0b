"""Streamers get the prompt, then every committed token once and in order."""

from __future__ import annotations

import pytest
import torch
from runtime_models import Recorder, TableExecutable, program, whole

from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.runtime import generate

DRAFTS = [None, SuffixDraft(tokens=4, shortest=1)]


@pytest.mark.parametrize("draft", DRAFTS, ids=["plain", "suffix"])
def test_one_sequence(draft):
    recorder = Recorder()
    ids = torch.tensor([[1, 2, 3] * 4])
    executable = TableExecutable(whole(9, period=3), program(9, draft=draft))
    result = generate(executable, ids, max_new_tokens=20, streamer=recorder)
    prompt, *new = recorder.values
    assert torch.equal(prompt, ids) and recorder.ended == 1
    assert torch.equal(torch.cat(new), result[0, 12:])
    assert all(value.dim() == 1 for value in new)
    assert (max(map(len, new)) > 1) == (draft is not None)


@pytest.mark.parametrize("draft", DRAFTS, ids=["plain", "suffix"])
def test_a_batch_is_streamed_place_by_place(draft):
    recorder = Recorder()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [3, 3, 3]])
    executable = TableExecutable(whole(9, period=3), program(9, draft=draft, eos=(0,)))
    result = generate(executable, ids, max_new_tokens=12, streamer=recorder, pad_token_id=8)
    prompt, *new = recorder.values
    assert torch.equal(prompt, ids) and recorder.ended == 1
    assert torch.equal(torch.stack(new, 1), result[:, 3:])


def test_transformers_text_streamer(capsys):
    from transformers import TextStreamer

    class Tokenizer:
        def decode(self, tokens, **options):
            return " ".join(map(str, tokens)) + " "

    executable = TableExecutable(whole(9, period=3), program(9, draft=DRAFTS[1]))
    streamer = TextStreamer(Tokenizer(), skip_prompt=True)
    result = generate(executable, torch.tensor([[1, 2, 3]]), max_new_tokens=9, streamer=streamer)
    assert capsys.readouterr().out.split() == [str(t) for t in result[0, 3:].tolist()]
    with pytest.raises(ValueError, match="batch size 1"):
        generate(executable, torch.tensor([[1], [2]]), max_new_tokens=2, streamer=streamer)
