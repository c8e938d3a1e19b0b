"""Plain modules: attention and positions in every spelling, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from selection import mostly_long
from torch import Tensor, nn
from torch.nn import functional as F

from graftwork.frontends import import_model
from graftwork.frontends.trace import export, fake_mode
from graftwork.ir import Program, UnsupportedError, run, type_of

G = torch.ops.graftwork
CONTEXT, WIDTH, HEADS = 24, 32, 4


class Attention(nn.Module):
    """Self-attention, written in one of the ways that people write it."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.spelling = spelling
        mask = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            part.view(batch, tokens, HEADS, -1).transpose(1, 2)
            for part in self.qkv(x).split(WIDTH, dim=2)
        )
        if turn is not None:
            q, k = _turn(q, *turn), _turn(k, *turn)
        y = self.attend(q, k, v, tokens)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, WIDTH))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> Tensor:
        """The part that differs."""
        fused = F.scaled_dot_product_attention
        mask = self.mask[:tokens, :tokens]
        if self.spelling == "fused":
            return fused(q, k, v, is_causal=True)
        if self.spelling == "grouped":
            return fused(q, k[:, ::2], v[:, ::2], is_causal=True, enable_gqa=True)
        if self.spelling == "boolean mask":
            return fused(q, k, v, attn_mask=mask, scale=0.5)
        if self.spelling == "float mask":
            zeros = torch.zeros(tokens, tokens)
            return fused(q, k, v, attn_mask=zeros.masked_fill(~mask, float("-inf")))
        if self.spelling == "no mask":
            return fused(q, k, v)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.spelling == "by hand":
            return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        steps = torch.arange(tokens)
        distance = steps[:, None] - steps[None, :]
        if self.spelling == "window":
            seen = (distance >= 0) & (distance < 4)
            return torch.where(seen, scores, torch.tensor(-1e9)).softmax(-1) @ v
        if self.spelling == "chunks":
            seen = (distance >= 0) & (distance <= steps[:, None] % 5)
            return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        if self.spelling == "alibi":
            slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
            scores = scores - slopes[:, None, None] * distance
            return scores.masked_fill(distance < 0, float("-inf")).softmax(-1) @ v
        if self.spelling == "two sided":
            return scores.softmax(-1) @ v
        if self.spelling == "dilated":
            return scores.masked_fill((distance < 0) | (distance % 2 > 0), -1e9).softmax(-1) @ v
        if self.spelling == "capped":
            capped = torch.tanh(scores).masked_fill(~mask, float("-inf"))
            return capped.softmax(-1) @ v
        assert self.spelling == "data dependent"
        return scores.masked_fill(~mask | (q[:, :1, :, :1] > 1), float("-inf")).softmax(-1) @ v


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """Attention and an MLP around a residual stream."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.attention = Attention(spelling)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)])
        wide = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(*wide, nn.Dropout(0.1))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.norms[0](x), turn)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A language model that knows the positions of its tokens in one of several ways."""

    def __init__(self, spelling: str = "fused", positions: str = "arange") -> None:
        super().__init__()
        self.positions = positions
        self.tokens, self.places = nn.Embedding(64, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(spelling) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.tokens.weight
        angles = _angles(torch.arange(CONTEXT))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        x, turn = self.tokens(ids), None
        steps = torch.arange(ids.shape[1])
        if self.positions == "arange":
            x = x + self.places(steps)
        elif self.positions == "batched arange":
            x = x + self.places(steps.unsqueeze(0).expand(ids.shape[0], -1))
        elif self.positions == "slice":
            x = x + self.places.weight[: ids.shape[1]]
        elif self.positions == "rotary table":
            turn = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        elif self.positions == "rotary":
            angles = _angles(steps)[None, None]
            turn = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, turn)
        return self.head(self.norm(x)), None


def _angles(steps: Tensor) -> Tensor:
    return torch.outer(steps.float(), 100 ** (-torch.arange(4) / 4))


def ids_and_positions(first: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and positions i64[2,9]."""
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(2))
    return ids, torch.arange(first, first + 9).expand(2, 9)


def logits_of(program: Program, ids: Tensor, positions: Tensor) -> Tensor:
    """The step's logits in the reference interpreter."""
    return run(program, "step", {"tokens": ids, "positions": positions})["logits"]


@pytest.mark.parametrize(
    "spelling",
    mostly_long(
        ["fused", "grouped", "boolean mask", "float mask", "by hand", "window", "chunks", "alibi"],
        keep=("fused", "by hand", "alibi"),
    ),
)
def test_attention_spellings(spelling: str) -> None:
    """Every way to write causal attention becomes the op, and computes the same."""
    module = Model(spelling).eval()
    program = import_model(module)
    ids, positions = ids_and_positions()
    with torch.no_grad():
        expected = module(ids)[0]
    torch.testing.assert_close(logits_of(program, ids, positions), expected, atol=1e-4, rtol=1e-4)
    nodes = program.function("step").calls(G.attention.default)
    assert [node.kwargs["layer"] for node in nodes] == [0, 1]
    assert nodes[0].kwargs.get("window") == (4 if spelling == "window" else None)
    assert nodes[0].kwargs.get("chunk") == (5 if spelling == "chunks" else None)
    assert nodes[0].kwargs["scale"] == pytest.approx(0.5 if spelling == "boolean mask" else 8**-0.5)
    assert len(nodes[0].args) == (5 if spelling == "alibi" else 3)
    groups = 2 if spelling == "grouped" else 4
    assert type_of(nodes[0].args[1]).dims[1] == groups  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "positions",
    mostly_long(
        ["arange", "batched arange", "slice", "rotary table", "rotary"], keep=("arange", "rotary")
    ),
)
def test_position_spellings(positions: str) -> None:
    """Modules that number tokens themselves take positions, and may begin anywhere."""
    module = Model(positions=positions).eval()
    program = import_model(module)
    ids, steps = ids_and_positions()
    with torch.no_grad():
        expected = module(ids)[0]
    got = logits_of(program, ids, steps)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert program.info.context == CONTEXT
    reversed_rows = steps.flip(1)
    assert not torch.allclose(logits_of(program, ids, reversed_rows), expected, atol=1e-2)
    each = torch.stack([steps[0], steps[0] + 7])
    apart = [logits_of(program, ids[i : i + 1], each[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(logits_of(program, ids, each), torch.cat(apart))


def test_markers_and_sites() -> None:
    """The residual stream is marked at both boundaries of both blocks; nodes know their source."""
    step = import_model(Model()).function("step")
    markers = step.calls(G.hidden.default)
    placed = [(node.kwargs["layer"], node.kwargs["point"]) for node in markers]
    points = [(i, point) for i in range(2) for point in ("attention", "block")]
    assert placed == [(-1, "embedding"), *points]
    site = step.calls(G.attention.default)[1].meta["site"]
    assert site.module == "blocks.1.attention" and site.layer == 1
    assert site.line.startswith("test_frontends_modules.py:")


def test_training_mode_and_dtype() -> None:
    """Dropout of a module in training mode does not end up in the program; dtypes are converted."""
    module = Model().train()
    program = import_model(module, torch.bfloat16)
    assert module.training
    assert program.weights["tokens.weight"].type.dtype == torch.bfloat16
    ids, positions = ids_and_positions()
    assert logits_of(program, ids, positions).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("spelling", "reason"),
    [
        ("no mask", "without a mask"),
        ("two sided", "neither causal nor a causal sliding window"),
        ("dilated", "neither causal nor a causal sliding window"),
        ("capped", "not scaled by one number"),
        ("data dependent", "mixes 2 values"),
    ],
)
def test_refused_attention(spelling: str, reason: str) -> None:
    """Attention that the op cannot say is refused; the error names module and line."""
    with pytest.raises(UnsupportedError, match=rf"blocks\.0\.attention \(test_.*{reason}"):
        import_model(Model(spelling))


class Around(nn.Module):
    """A model with something else in it, before its head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = Model()
        self.model.norm = nn.Sequential(nn.LayerNorm(WIDTH), inner)

    def forward(self, ids: Tensor) -> Any:
        return self.model(ids)


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.cumsum(1), "aten.cumsum.default mixes tokens"),
        (lambda x: x - x.mean(1, keepdim=True), "aten.mean.dim mixes tokens"),
        (lambda x: torch.cat([x[:, :1] * 0, x[:, :-1]], dim=1), "mixes tokens"),
        (lambda x: x * x.shape[1], "computes with the number of tokens"),
        (lambda x: x if x.sum() > 0 else -x, "cannot trace"),
        (
            lambda x: x * torch.linalg.cholesky(x[..., :1, None] + torch.eye(4))[..., 0, :1],
            "aten.linalg_cholesky_ex.default is no op",
        ),
        pytest.param(lambda x: torch.fft.fft(x).real, "not supported yet", marks=pytest.mark.long),
    ],
)
def test_refused_ops(function: Any, reason: str) -> None:
    """What mixes tokens, depends on data or is no op of programs is refused by name."""
    with pytest.raises(UnsupportedError, match=reason) as caught:
        import_model(Around(Lambda(function)))
    assert "model.norm.1" in str(caught.value)


class Comparing(nn.Module):
    """A model that goes by how a number of tokens compares."""

    def __init__(self, compare: Any) -> None:
        super().__init__()
        self.compare = compare

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = tokens[..., None].float()
        return x * 2 if self.compare(tokens.shape[1]) else x


def test_comparisons_of_sizes_hold_for_every_size() -> None:
    """Those that torch cannot prove are tried, and what one of the sizes contradicts is refused."""
    program = export(Comparing(lambda t: t * t + 17 > 8 * t), fake_mode(), 64, "always")
    assert torch.ops.aten.mul.Tensor in [node.target for node in program.graph.nodes]
    for never in (lambda t: t < 60, lambda t: t * t > 3 * t - 2):
        with pytest.raises(UnsupportedError, match="cannot trace sometimes"):
            export(Comparing(never), fake_mode(), 64, "sometimes")


def test_refused_outputs() -> None:
    """Modules that give no logits for every token."""

    class LastOnly(Model):
        def forward(self, ids: Tensor) -> Any:
            return super().forward(ids)[0][:, -1]

    class Named(Model):
        def forward(self, ids: Tensor) -> Any:
            return {"loss": super().forward(ids)[0]}

    with pytest.raises(UnsupportedError, match=r"mixes tokens|expected logits"):
        import_model(LastOnly())
    with pytest.raises(UnsupportedError, match="expected logits"):
        import_model(Named())


class Spelled(nn.Module):
    """Many ways to write the same elementwise things, in-place ones among them."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y.mul_(2).add_(x, alpha=0.5)
        z = torch.empty_like(y)
        z[..., :16] = y[..., 16:]
        z[..., 16:] = y[..., :16]
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            z = torch.clamp(z, -2, 2).square().neg() + torch.rsub(z, 1.0)
        left, right = z.chunk(2, dim=-1)
        z = torch.stack([left, right], dim=-1).flatten(-2).unflatten(-1, (2, 16))
        z = z.transpose(-1, -2).contiguous().view(*x.shape)
        z = torch.where(z > 0, z, 0.1 * z).maximum(x).minimum(x + 1)
        weights = torch.softmax(z, -1, dtype=torch.float64).to(x.dtype)
        top, index = torch.topk(weights, 4)
        top /= top.sum(-1, keepdim=True)
        picked = torch.zeros_like(weights).scatter(-1, index, top)
        parts = torch.split(picked, [8, 24], dim=-1)
        spread = parts[0].repeat_interleave(4, dim=-1) + parts[0].repeat(1, 1, 4)
        norm = torch.linalg.vector_norm(spread, dim=-1, keepdim=True)
        turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = turned * torch.polar(torch.ones(16), torch.linspace(0, 1, 16))
        return x + spread / (norm + 1) + torch.view_as_real(turned).flatten(-2)


def test_lowerings() -> None:
    """Ops in many spellings compute the same, and end as ops of programs."""
    module = Around(Spelled()).eval()
    ids, positions = ids_and_positions()
    with torch.no_grad():
        expected = module(ids)[0]
    program = import_model(module)
    torch.testing.assert_close(logits_of(program, ids, positions), expected, atol=1e-4, rtol=1e-4)


def test_aliased_writes() -> None:
    """Writing through a view that others see is right as well (torch removes the mutation)."""

    class Aliased(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            view = y.view(y.shape[0], y.shape[1], 4, 8)
            y.mul_(3)
            view[:, :, 1] = 0
            return view.flatten(-2) + y

    module = Around(Aliased()).eval()
    ids, positions = ids_and_positions()
    with torch.no_grad():
        expected = module(ids)[0]
    got = logits_of(import_model(module), ids, positions)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_refused_state() -> None:
    """A module that keeps something between calls is no function of its inputs."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x + self.calls

    with pytest.raises(UnsupportedError, match=r"changes its buffer .*calls"):
        import_model(Around(Counting()))
