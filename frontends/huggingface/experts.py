"""Mixtures of experts as one ``graftwork.moe``, whatever the layout of their weights.

transformers keeps the experts of a layer in fused parameters and says by attributes how: transposed
([E,H,2F] for [E,2F,H]), gate and up interleaved or one after the other, with biases or without. The
op knows one layout; the other ones become derived weights. What an expert does between its two
products is a method of the model's (``_apply_gate``); it is run on samples to see which it is.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from ...ir import UnsupportedError
from ...ir.ops.mlp import ACTIVATIONS, activate
from ...ir.ops.moe import gated


def experts_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Registered as an experts function. hidden_states [N,H]; top_k_index, top_k_weights [N,K].

    Errors: `UnsupportedError` naming what an expert does that the op cannot say.
    """
    # Experts of older transformers never have a norm, and no attribute that says so.
    if not self.has_gate or getattr(self, "has_post_expert_norm", False):
        raise UnsupportedError("experts without a gate, or with a norm inside, are not supported")
    gate_up: Any = self.gate_up_proj
    down: Any = self.down_proj
    biases = [self.gate_up_proj_bias, self.down_proj_bias] if self.has_bias else []
    if self.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if not self.is_concatenated:
        gate_up = _gate_first(gate_up)
        biases[:1] = [_gate_first(bias) for bias in biases[:1]]  # type: ignore[arg-type]
    result: torch.Tensor = torch.ops.graftwork.moe(
        hidden_states,
        top_k_index,
        top_k_weights,
        gate_up,
        down,
        *biases,
        **getattr(self, _GATING),
    )
    return result


def _gate_first(weight: torch.Tensor) -> torch.Tensor:
    """Rows gate, up, gate, up, ... of [E,2F,...] as all gates, then all ups."""
    return torch.cat([weight[:, 0::2], weight[:, 1::2]], dim=1)


def _gating(experts: nn.Module) -> dict[str, Any]:
    """The op's options for which it computes what the experts' ``_apply_gate`` computes."""
    sample = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * 6
    wanted = experts._apply_gate(sample)  # type: ignore[operator]
    hidden = sample if experts.is_concatenated else _gate_first(sample)
    for options in _candidates(experts):
        if torch.allclose(gated(hidden, **options), wanted, atol=1e-5, rtol=1e-4):
            return options
    raise UnsupportedError(
        f"{type(experts).__name__} combines gate and up in a way that is not supported yet; "
        f"expected activation(gate) * up with one of {', '.join(ACTIVATIONS)}"
    )


def _candidates(experts: nn.Module) -> list[dict[str, Any]]:
    limits = [getattr(experts, name, None) for name in ("limit", "swiglu_limit")]
    limit = next((float(value) for value in limits if value is not None), None)
    alphas = [getattr(experts, name, None) for name in ("alpha", "swiglu_alpha")]
    alpha = next((float(value) for value in alphas if value is not None), None)
    found: list[dict[str, Any]] = [{"activation": name} for name in ACTIVATIONS]
    if limit is not None:
        found += [{"activation": name, "limit": limit} for name in ACTIVATIONS]
    if limit is not None and alpha is not None:
        found.append({"activation": "silu", "limit": limit, "alpha": alpha})
    return found


_GATING = "graftwork_gating"


def prepare_experts(model: nn.Module) -> None:
    """Before a twin is traced: note what its experts do between their products.

    Experts outside the registry, which loop over the data, get a forward that calls the op.
    """
    for module in model.modules():
        if hasattr(type(module), "_apply_gate"):
            setattr(module, _GATING, _gating(module))
        if type(module).__name__ == "DbrxExperts":
            experts: Any = module
            setattr(module, _GATING, {"activation": _activation_name(experts.mlp.activation_fn)})
            experts.forward = MethodType(_dbrx_forward, module)


def _dbrx_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """DBRX: w1 (gate), v1 (up) and w2 (down) hold all experts' rows [E*F,H]."""
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    gate_up = torch.cat([self.mlp.w1.view(shape), self.mlp.v1.view(shape)], dim=1)
    down = self.mlp.w2.view(shape).transpose(1, 2)
    rows = hidden_states.reshape(-1, self.hidden_size)
    out = torch.ops.graftwork.moe(
        rows, top_k_index, top_k_weights, gate_up, down, **getattr(self, _GATING)
    )
    result: torch.Tensor = out.view(hidden_states.shape)
    return result


def _activation_name(function: Any) -> str:
    sample = torch.linspace(-4, 4, 33)
    wanted = function(sample)
    for name in ACTIVATIONS:
        if torch.allclose(activate(sample, name), wanted, atol=1e-6):
            return name
    raise UnsupportedError(f"the activation {function} of experts is not supported yet")
