"""Where and in which dtype a program will run: ``backend[:device[:dtype]]``.

>>> str(Target.parse("onnxruntime:cpu:float32"))
'onnxruntime:cpu:float32'
>>> Target.parse("torch").dtype
torch.float32
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch

from ..ir import InputError

BACKENDS = ("eager", "torch", "onnxruntime")
DEVICES = ("cpu", "cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Target:
    """backend: eager (torch, uncompiled), torch (inductor) or onnxruntime; device: cpu or cuda.

    dtype: of weights and activations, where no pass gave them another numeric layout. threads: CPU
    threads inside an op; None takes all cores that the process may use.
    """

    backend: str = "onnxruntime"
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    threads: int | None = None

    def __post_init__(self) -> None:
        _check("backend", self.backend, BACKENDS)
        _check("device", self.device, DEVICES)
        if self.dtype not in DTYPES.values():
            raise InputError(f"target dtype: expected one of {', '.join(DTYPES)}; got {self.dtype}")
        if self.threads is not None and self.threads < 1:
            raise InputError(f"target threads: expected a positive number; got {self.threads}")

    @classmethod
    def default(cls) -> Target:
        """onnxruntime:cpu:float32 without a GPU, torch:cuda:bfloat16 with one."""
        if torch.cuda.is_available():
            return cls("torch", "cuda", torch.bfloat16)
        return cls()

    @classmethod
    def parse(cls, text: str, threads: int | None = None) -> Target:
        """Read ``backend[:device[:dtype]]``; device defaults to cpu, dtype to float32 there.

        Errors: `InputError` naming the part that is unknown and the nearest known one.
        """
        parts = text.split(":")
        if len(parts) > 3 or not parts[0]:
            raise InputError(f"target {text!r}: expected backend[:device[:dtype]]")
        device = parts[1] if len(parts) > 1 else "cpu"
        _check("device", device, DEVICES)
        name = parts[2] if len(parts) > 2 else ("float32" if device == "cpu" else "bfloat16")
        _check("dtype", name, tuple(DTYPES))
        return cls(parts[0], device, DTYPES[name], threads)

    def require_device(self) -> None:
        """Errors: `InputError` if the device is not on this machine."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError(
                f"target {self}: no CUDA device is usable on this machine "
                f"(torch {torch.__version__}); use {self.backend}:cpu"
            )

    def __str__(self) -> str:
        name = next(k for k, v in DTYPES.items() if v == self.dtype)
        return f"{self.backend}:{self.device}:{name}"


def _check(what: str, value: str, known: tuple[str, ...]) -> None:
    if value in known:
        return
    near = difflib.get_close_matches(value, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(f"target {what}: expected one of {', '.join(known)}; got {value!r}{hint}")
