"""Compile the kernels for weights of few bits for GPUs that need not be there: run as a program, it
prints a line for each, with the shared memory that it takes. Not under Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graftwork.backends.cuda_blocks import units
from graftwork.backends.torch import gpu_kernels
from graftwork.backends.torch.gpu_products import way_of

GROUP, SIZE = 32, 4096
ALIGNED = {"x", "weight", "scale", "offset", "book", "result", "N", "U", "groups"}
KINDS = {"offset": 0, "codebook": 1, "pairs": 2}


def compiled(kernel: Any, types: dict[str, str], given: dict[str, Any], way: Any, sm: int) -> Any:
    """A kernel for a GPU. types: of what is passed; given: what it is compiled for."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in given.items()}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in names if n in ALIGNED}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": way.warps, "num_stages": way.stages}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def main() -> None:
    for bits, kind, tokens, sm in itertools.product((1, 2, 3, 4, 6, 8), KINDS, (1, 16), (80, 90)):
        if (kind == "pairs" and bits != 4) or (kind == "codebook" and bits > 4):
            continue
        how, few, book = units(bits, GROUP, SIZE), tokens == 1, KINDS[kind]
        assert how is not None
        way = way_of(tokens, few, book > 0, SIZE, how)
        given: dict[str, Any] = {"EACH": how.each, "BITS": bits, "UNIT": how.size, "BOOK": book}
        given |= {"AFFINE": book == 0, "MIDDLE": 0, "TOKENS": way.tokens, "ROWS": way.rows}
        given |= {"COLUMNS": way.columns}
        if few:
            given |= {"GROUPS": way.columns // math.gcd(how.each, way.columns), "PLAIN": False}
        else:
            given |= {"WHOLE": False, "PAIRED": book == 0 and bits < 8}
        types = {name: "i32" for name in ("N", "U", "groups", "run", "M", "parts")}
        types |= {"x": "*i32" if few else "*bf16", "weight": "*i32" if how.size == 4 else "*u8"}
        types |= {"scale": "*fp16", "offset": "*fp16", "result": "*fp32"}
        types |= {"book": "*i8" if few else "*fp32"}
        kernel = gpu_kernels.few_tokens if few else gpu_kernels.some_tokens
        found = compiled(kernel, types, given, way, sm)
        print(bits, kind, tokens, sm, found.metadata.shared, flush=True)


if __name__ == "__main__":
    main()
