"""Texts longer than a model's context, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from handmade import cached_llama
from selection import one_in
from test_eviction import BLOCK, BUDGET, LAYERS, SHAPE, TEXT, asked, evicting, executable_of

from graftwork.ir import InputError
from graftwork.runtime import generate
from graftwork.runtime.scoring import score

G = torch.ops.graftwork


class Streamed:
    """StreamingLLM by hand: keys are kept as they were before their rotation, and rotated for where
    they stand in the cache each time that this changes (Xiao et al. 2024)."""

    def __init__(self, sinks: int = 4) -> None:
        self.sinks, program = sinks, cached_llama(SHAPE)
        fn = program.function("step").copy()
        outputs = dict(fn.outputs)
        for layer, attend in enumerate(fn.calls(G.attend.default)):
            rotation = attend.args[1].args[1]  # of what is written
            outputs[f"raw.{layer}"] = rotation.args[0]
        fn.set_outputs(outputs)
        cos, sin = rotation.args[1:3]
        self.tables = [program.weights[str(node.args[0].target)].load() for node in (cos, sin)]
        self.executable = executable_of(program.with_function(fn))
        self.executable.begin(1, 64)
        self.raw: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]

    def feed(self, token: int) -> int:
        rows = len(self.raw[0])
        inputs = {
            "tokens": torch.tensor([[token]]),
            "positions": torch.tensor([[rows]]),
            "past": torch.tensor([rows]),
            "select": torch.tensor([[0]]),
        }
        fetch = ("argmax", *(f"raw.{n}" for n in range(LAYERS)))
        found = self.executable.run("step", inputs, fetch)
        best = int(found["argmax"])
        for layer, kept in enumerate(self.raw):
            kept.append(found[f"raw.{layer}"][0, :, 0].clone())
        if rows + 1 == BUDGET + BLOCK:
            self.drop()
        return best

    def drop(self) -> None:
        end = BUDGET + BLOCK
        stay = [*range(self.sinks), *range(end - BUDGET + self.sinks, end)]
        self.executable.compact(list(self.executable.program.states), torch.tensor([stay]))
        cos, sin = (table[:BUDGET][None] for table in self.tables)
        for layer in range(LAYERS):
            self.raw[layer] = [self.raw[layer][row] for row in stay]
            keys = G.rotary(torch.stack(self.raw[layer], 1)[None], cos, sin)[0]
            self.executable.write_rows(0, 0, {f"kv.{layer}.key": keys})

    def decode(self, prompt: Sequence[int], count: int) -> list[int]:
        text = list(prompt)
        for place in range(len(prompt) + count - 1):
            best = self.feed(text[place])
            if place + 1 == len(text):
                text.append(best)
        return text


@pytest.mark.parametrize("backend", one_in(2, ["onnxruntime", "eager"]))
def test_texts_are_endless_in_constant_memory(backend: str) -> None:
    """Twice as long as the model's context, and token for token what the method by hand gives."""
    program = evicting("window", positions="cache")
    executable = executable_of(program, backend)
    count = 2 * SHAPE.context - TEXT.shape[1]
    wanted = Streamed().decode(TEXT[0].tolist(), count)
    assert generate(executable, TEXT, **asked(count))[0].tolist() == wanted
    assert max(executable.buffers.capacities.values()) == (64 if backend == "onnxruntime" else 256)
    # A long text is scored, too, and is a prompt as good as any.
    fast = executable_of(program, backend)
    whole = torch.tensor([wanted])
    scored = score(fast, whole)
    best = scored[0, TEXT.shape[1] - 1 : -1].argmax(-1)
    assert best.tolist() == wanted[TEXT.shape[1] :]
    more = generate(fast, whole[:, :400], **asked(len(wanted) - 400))
    assert more[0].tolist() == wanted
    with pytest.raises(InputError, match="the model's context is 256"):
        score(executable_of(evicting("window"), backend), whole)
