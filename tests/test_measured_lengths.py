"""Recipes as users have them: what steps take decides how long drafts are, and changes no text."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import graftwork as gw
from graftwork.cli.demo import demo_folder

PROMPTS = [
    "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef read",
    "import os\n\n\nclass Shape:\n    def area(self):\n        return self.width * self.height\n",
]


@cache
def made(recipe: str) -> gw.Model:
    return gw.optimize(demo_folder(), recipe, target="onnxruntime:cpu:float32")


@pytest.mark.measured
@pytest.mark.filterwarnings("ignore::graftwork.ir.GraftworkWarning")
@pytest.mark.parametrize("asked", [{"do_sample": False}, {"do_sample": True, "seed": 5}], ids=str)
@pytest.mark.parametrize("recipe", ["copyspec", "recycling", "medusa", "kangaroo"])
def test_texts_are_plain_decodings(recipe: str, asked: dict[str, bool | int]) -> None:
    """Greedy, and with a seed: again and again, while the policy learns what pays. Of two texts one
    is ahead of the other, differently each time."""
    plain, fast = made("baseline"), made(recipe)
    ids = [plain.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    wanted = plain.generate(ids, max_new_tokens=80, eos_token_id=[], pad_token_id=0, **asked)
    for _ in range(3):
        found = fast.generate(ids, max_new_tokens=80, eos_token_id=[], pad_token_id=0, **asked)
        assert torch.equal(found, wanted)
