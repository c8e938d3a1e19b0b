"""What a model writes its artifact writes, a streamer hears, and turns go on from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from runtime_models import Recorder

import graftwork as gw


def check_kept(fast: gw.Model, prompts: Sequence[list[int]], new: int, folder: Path) -> None:
    """Save a model as an artifact in `folder`, and compare texts of `new` tokens; a second turn of
    a text of at least 24 tokens finds its rows. prompts: whose first one has eight tokens."""
    asked = {"max_new_tokens": new, "eos_token_id": None}
    found = fast.generate([*prompts], **asked)
    fast.save(folder / "artifact")
    again = gw.load(folder / "artifact", target="eager")
    assert torch.equal(again.generate([*prompts], **asked), found)
    heard = Recorder()
    text = fast.generate([prompts[0] * 3], streamer=heard, **asked)
    assert [int(t) for value in heard.values for t in value.flatten()] == text[0].tolist()
    longer = torch.cat([text, torch.tensor([[3, 9]])], 1)
    turned = fast.generate(longer, return_dict_in_generate=True, **asked)
    assert turned.stats.reused_tokens >= 16
    assert torch.equal(again.generate(longer, **asked), turned.sequences)
