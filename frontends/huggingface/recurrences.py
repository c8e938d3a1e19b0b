"""Convolutions and recurrences of transformers as ops, while a model is traced.

transformers keeps them in functions of its modelling files that kernels of other packages may
replace. While a trace runs, graftwork's take their place there, for the tracing thread alone. A
modelling file that names or calls them in another way is refused: `check` says what it looked for.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ir import UnsupportedError

G = torch.ops.graftwork
_SCAN_STEP = "_rnn_scan"
_TINY = 1e-38
"""The least decay whose logarithm is taken."""


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """x [B,D,T] with weight [D,N] as one ``graftwork.causal_conv``: [B,D,T]."""
    from transformers.activations import ACT2FN

    _refuse(kwargs)
    x = hidden_states.to(weight.dtype).transpose(1, 2)
    y = G.causal_conv(x, weight, bias, layer=0).transpose(1, 2)
    act = nn.Identity() if activation is None else ACT2FN[activation]
    result: Tensor = act(y).to(hidden_states.dtype)
    return result


def chunk_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Gated delta nets and Kimi delta attention: q, k [B,T,G,K], v [B,T,H,V], g [B,T,H] or with a
    decay for each key [B,T,H,K], beta [B,T,H]; the result is [B,T,H,V]."""
    _refuse(kwargs, initial_state=initial_state)
    q, k, v, rate = (x.transpose(1, 2).float() for x in (query, key, value, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decay = (g if g.dim() == 4 else g.unsqueeze(-1)).transpose(1, 2).float()
    y = G.linear_attention(q * q.shape[-1] ** -0.5, k, v, decay, rate, layer=0)
    return y.transpose(1, 2).contiguous().to(query.dtype), None


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Mamba-2: x [B,T,H,P], dt [B,T,H], A, D and dt_bias [H], B and C [B,T,G,N]; [B,T,H,P]."""
    _refuse(kwargs, initial_states=initial_states, return_final_states=return_final_states or None)
    step = _step_size(dt, None if dt_bias is None else dt_bias.to(dt.dtype), dt_softplus)
    low, high = dt_limit
    if low > 0 or high != float("inf"):
        step = step.clamp(low, high)
    x, step = hidden_states.float(), step.float()
    v = (x * step[..., None]).transpose(1, 2)
    decay = (A.float() * step)[..., None].transpose(1, 2)
    q, k = C.float().transpose(1, 2), B.float().transpose(1, 2)
    # In rows, because there are models that take it for so.
    y = G.linear_attention(q, k, v, decay, None, layer=0).transpose(1, 2).contiguous()
    result: Tensor = y if D is None else y + x * D[..., None]
    return result


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Mamba: x, dt and z [B,I,T], A [I,N], B and C [B,N,T], D and delta_bias [I]; [B,I,T]. Each
    channel is a head with values of size 1."""
    _refuse(kwargs, return_last_state=return_last_state or None)
    bias = None if delta_bias is None else delta_bias.to(dt.dtype)[..., None]
    step = _step_size(dt, bias, delta_softplus).float()
    v = (step * hidden_states.float()).unsqueeze(-1)
    decay = A.float().unsqueeze(1) * step.unsqueeze(-1)
    q, k = (x.float().transpose(1, 2).unsqueeze(1) for x in (C, B))
    y = G.linear_attention(q, k, v, decay, None, layer=0).squeeze(-1)
    if D is not None:
        y = y + hidden_states * D[:, None]
    result: Tensor = y if z is None else y * F.silu(z)
    return result


def _step_size(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    total = dt if bias is None else dt + bias
    return F.softplus(total) if softplus else total


def rnn_scan(
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, None]:
    """RG-LRU: x and gate [B,T,D]; [B,T,D]. Each channel is a head with keys and values of size 1.
    The state is 0 where a text begins, so there is nothing to reset."""
    x = hidden_states.float().transpose(1, 2).unsqueeze(-1)
    gate = recurrent_gate.float().clamp(min=_TINY).log().transpose(1, 2).unsqueeze(-1)
    one = torch.ones_like(x[:, :1])
    y = G.linear_attention(one, one, x, gate, None, layer=0)
    return y.squeeze(-1).transpose(1, 2).to(hidden_states.dtype), None


class PlainSqrt:
    """Stands for an autograd function that is a square root but for its derivative."""

    apply = staticmethod(torch.sqrt)


def _refuse(extra: dict[str, Any], **given: Any) -> None:
    """Errors: `UnsupportedError` naming an argument that the ops have no place for."""
    said = [name for name in ("z", "seq_idx", "cu_seqlens") if extra.get(name) is not None]
    said += [name for name, value in given.items() if value is not None]
    if said:
        raise UnsupportedError(f"a recurrence with the argument {said[0]!r} is not supported yet")


FUNCTIONS: dict[str, Any] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": chunk_delta_rule,
    "chunk_kimi_delta_attention": chunk_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba_selective_scan": mamba_selective_scan,
    "SqrtBoundDerivative": PlainSqrt,
}
"""By the names that modelling files give them: what stands there while a model is traced."""


def files(model: nn.Module) -> list[ModuleType]:
    """The modelling files of a model's parts."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [sys.modules[name] for name in names if ".models." in name]


def check(model: nn.Module, model_type: str) -> None:
    """Refuse recurrences that would be traced as loops over tokens.

    Errors: `UnsupportedError` naming the module, and the functions that were looked for.
    """
    for path, module in model.named_modules():
        owner = model.get_submodule(path.rpartition(".")[0])
        file = sys.modules[type(owner).__module__]
        recurrent = isinstance(module, nn.RNNBase)
        if not recurrent and not _is_causal(module):
            continue
        if recurrent or not (_has_functions(file) or _called_as_module(owner)):
            op = "aten.rnn" if recurrent else "aten.conv1d"
            raise UnsupportedError(
                f"cannot import {model_type}: module {path} runs {op} over the tokens, and "
                f"{file.__name__} has none of the functions by which graftwork knows recurrences "
                f"({', '.join(FUNCTIONS)}); such layers are not supported yet"
            )
        for name in set(FUNCTIONS) & set(vars(file)):
            _check_signature(file, name)


def _check_signature(file: ModuleType, name: str) -> None:
    found = getattr(file, name)
    if inspect.isclass(found):
        return
    want = inspect.signature(FUNCTIONS[name]).parameters
    missing = [p for p in inspect.signature(found).parameters if p not in want]
    if missing:
        raise UnsupportedError(
            f"{file.__name__}.{name} takes {missing[0]!r}, which graftwork does not know: "
            f"expected {', '.join(want)}; this version of transformers is not supported yet"
        )


def _is_causal(module: nn.Module) -> bool:
    """Whether a module is a convolution of each channel over the tokens before it."""
    if not isinstance(module, nn.Conv1d) or not module.groups == module.in_channels > 1:
        return False
    return module.padding == (module.kernel_size[0] - 1,)


def _has_functions(file: ModuleType) -> bool:
    return "causal_conv1d_fn" in vars(file)


def _called_as_module(owner: nn.Module) -> bool:
    """Whether a part calls its convolution as a module, and its scan as a method."""
    return any(hasattr(part, _SCAN_STEP) for part in owner.modules())


@contextlib.contextmanager
def as_ops(model: nn.Module) -> Iterator[None]:
    """Inside, this thread's calls of the functions in the model's files make ops. The model is one
    that may be changed; other models are not."""
    for module in model.modules():
        if not _has_functions(sys.modules[type(module).__module__]):
            _rewire(module)
    here, before = threading.get_ident(), list[tuple[ModuleType, str, Any]]()
    for file in files(model):
        for name in set(FUNCTIONS) & set(vars(file)):
            before.append((file, name, getattr(file, name)))
            setattr(file, name, _here(FUNCTIONS[name], getattr(file, name), here))
    try:
        yield
    finally:
        for file, name, original in before:
            setattr(file, name, original)


def _rewire(module: nn.Module) -> None:
    """Methods of one part that recurrences run in."""
    if hasattr(module, _SCAN_STEP):
        setattr(module, _SCAN_STEP, rnn_scan)
    for child in module.children():
        if _is_causal(child) and _called_as_module(module):
            setattr(child, "forward", partial(_module_conv, child))  # noqa: B010


def _module_conv(conv: Any, x: Tensor) -> Tensor:
    return causal_conv1d_fn(x, conv.weight.squeeze(1), conv.bias)


def _here(ours: Any, theirs: Any, thread: int) -> Any:
    """Ours in one thread, theirs in others."""
    if inspect.isclass(theirs):
        return _HereClass(ours, theirs, thread)

    def either(*args: Any, **kwargs: Any) -> Any:
        chosen: Callable[..., Any] = ours if threading.get_ident() == thread else theirs
        return chosen(*args, **kwargs)

    return either


class _HereClass:
    """A class of which only ``apply`` is called."""

    def __init__(self, ours: Any, theirs: Any, thread: int) -> None:
        self.apply = _here(ours.apply, theirs.apply, thread)
