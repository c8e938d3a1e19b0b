"""Tables of positions whose first rows no text has, and tables that are none of positions."""

from __future__ import annotations

import pytest
import torch
from archs import Arch, build, error, logits_of, tokens_and_positions
from selection import one_in

from graftwork.frontends import import_model

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "is_decoder": True,
    "pad_token_id": 1,
}


@pytest.mark.parametrize(
    ("model_type", "context"),
    one_in(3, [("roberta", 62), ("xlm-roberta-xl", 62), ("big_bird", 64)]),
)
def test_tokens_stand_where_the_model_numbers_them(model_type, context):
    model = build(Arch(model_type, SIZES))
    program = import_model(model)
    ids, positions = tokens_and_positions()
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
    assert error(logits_of(program, ids, positions), want) < 1e-4
    assert program.info.context == context
