"""What this machine's ONNX Runtime can do, found out by running tiny graphs once a process."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as oir

from .emit import IR_VERSION, OPSETS


@lru_cache(maxsize=1)
def signed_weights_are_exact() -> bool:
    """Whether products of unsigned activations with signed weights are exact on this CPU.

    Without dot-product instructions (VNNI, AMX) the kernel adds pairs of products in 16 bits and
    saturates; unsigned weights are then the fast exact ones.
    """
    rows, inner, columns = 8, 64, 32
    a = np.full((rows, inner), 255, np.uint8)
    b = np.full((inner, columns), 127, np.int8)
    got = _run("MatMulInteger", [a, b], constants={1})
    return bool((got == 255 * 127 * inner).all())


def _run(op_type: str, inputs: list[Any], *, constants: set[int], domain: str = "") -> Any:
    """One output of one op on the CPU."""
    import onnxruntime as ort

    values = []
    graph = oir.Graph([], [], nodes=[], opset_imports=OPSETS, name="probe")
    for index, data in enumerate(inputs):
        tensor = oir.tensor(data, name=f"in{index}")
        value = oir.val(f"in{index}", dtype=tensor.dtype, shape=list(data.shape))
        values.append(value)
        if index in constants:
            value.const_value = tensor
            graph.register_initializer(value)
        else:
            graph.inputs.append(value)
    node = oir.node(op_type, values, domain=domain)
    node.outputs[0].name = "out"
    graph.append(node)
    graph.outputs.append(node.outputs[0])
    model = oir.to_proto(oir.Model(graph, ir_version=IR_VERSION))
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    feeds = {f"in{i}": d for i, d in enumerate(inputs) if i not in constants}
    return session.run(None, feeds)[0]
