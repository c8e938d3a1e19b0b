"""Checkpoints that are quantized: read bit for bit, run on their bits, refused when wrong."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import error, logits_of, tokens_and_positions
from quantized_checkpoints import (
    Written,
    awq_config,
    awq_layer,
    gptq_config,
    gptq_layer,
    nf4_config,
    nf4_layer,
    write,
)
from safetensors.torch import load_file, save_file
from selection import mostly_long

import graftwork as gw
from graftwork.frontends import import_model
from graftwork.frontends.huggingface.checkpoint import tensors_of
from graftwork.frontends.huggingface.formats import base, format_of, read
from graftwork.frontends.stored_weights import StoredWeight
from graftwork.ir import GraftworkWarning, InputError, UnsupportedError, arguments
from graftwork.ir.check.legality import idle, unmet
from graftwork.ir.ops.numerics import Numeric

G = torch.ops.graftwork
Layer = Callable[[int, int], Written]

WIDE = {"hidden_size": 64, "intermediate_size": 96}
"""Sizes of which 3 bits fill whole words."""

CASES: dict[str, tuple[dict[str, Any], Layer, dict[str, int]]] = {
    "gptq": (gptq_config(), gptq_layer(), {}),
    "gptq-v2": (gptq_config(checkpoint_format="gptq_v2"), gptq_layer(less=0), {}),
    "gptq-2-bits": (gptq_config(2), gptq_layer(2, index=False), {}),
    "gptq-3-bits": (gptq_config(3, 32), gptq_layer(3, 32), WIDE),
    "gptq-3-bits-padded": (gptq_config(3, 32), gptq_layer(3, 32, padded=True), WIDE),
    "gptq-8-bits": (gptq_config(8), gptq_layer(8), {}),
    "gptq-rows": (gptq_config(4, -1), gptq_layer(4, -1), {}),
    "gptq-symmetric": (gptq_config(sym=True), gptq_layer(sym=True), {}),
    "gptq-act-order": (gptq_config(desc_act=True), gptq_layer(ordered=False), {}),
    "gptq-3-bits-act-order": (gptq_config(3, 32), gptq_layer(3, 32, ordered=False), WIDE),
    "awq": (awq_config(), awq_layer(), {}),
    "nf4": (nf4_config(), nf4_layer(), {"hidden_size": 64, "intermediate_size": 128}),
    "nf4-nested": (nf4_config(), nf4_layer(nested=16), {}),
    "nf4-across-rows": (nf4_config(), nf4_layer(256, nested=4), WIDE),
}


@pytest.fixture(autouse=True)
def _nothing_is_dequantized() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraftworkWarning)
        yield


@pytest.mark.parametrize("case", CASES)
def test_values(case: str, tmp_path: Path) -> None:
    """All layers are kept in their bits and stand for the values of the layout, bit for bit."""
    config, layer, sizes = CASES[case]
    quantized, plain = write(tmp_path, config, layer, **sizes)
    expected = load_file(plain / "model.safetensors")
    tensors, stored = read(format_of(config, quantized), quantized, tensors_of(quantized))
    assert len(stored) == 14 and tensors.keys() == expected.keys()
    for name, weight in stored.items():
        assert torch.equal(weight.values(name).load(), expected[name]), name
        packed, _ = weight.numeric.types(*weight.dims)
        assert weight.weight.load().shape == packed.dims


TARGETS = ("eager:cpu:float32", "torch:cpu:float32", "onnxruntime:cpu:float32")


def test_a_format_is_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes around 0 with one scale a row: found by its method, kept in its bits."""
    format_of(awq_config(), tmp_path)
    monkeypatch.setattr(base, "_FORMATS", dict(base._FORMATS))

    @base.register
    class Bytes(base.Format):
        method, mark = "bytes", "codes"

        @classmethod
        def of(cls, config: Mapping[str, Any], folder: Path) -> Bytes:
            return cls()

        def parts(self) -> frozenset[str]:
            return frozenset({"codes", "scale"})

        def stored(self, module: base.Module) -> StoredWeight:
            codes = module.tensor("codes", (torch.uint8,))
            scale = module.tensor("scale", (torch.float32,))
            return StoredWeight(Numeric(8, codes.type.shape[1]), codes, scale)

    def layer(rows: int, columns: int) -> Written:
        parts = Numeric(8, columns).quantize(torch.randn(rows, columns))
        values = Numeric(8, columns).dequantize(parts)
        return {"codes": parts.weight, "scale": parts.scale}, values

    config = {"quant_method": "bytes"}
    quantized, plain = write(tmp_path, config, layer)
    _, stored = read(format_of(config, quantized), quantized, tensors_of(quantized))
    expected = load_file(plain / "model.safetensors")
    assert len(stored) == 14
    assert all(torch.equal(w.values(name).load(), expected[name]) for name, w in stored.items())


@pytest.mark.parametrize("case", mostly_long(["gptq-act-order", "awq", "nf4-nested"], keep=()))
def test_tokens(case: str, tmp_path: Path) -> None:
    """Generated tokens are those of the dequantized model on every target; bits are kept, and
    products that read one value are merged."""
    config, layer, sizes = CASES[case]
    quantized, plain = write(tmp_path, config, layer, num_hidden_layers=1, **sizes)
    prompts = [[1, 5, 9, 30], [7, 3, 77, 2]]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": []}
    wanted = gw.optimize(plain, target="eager:cpu:float32").generate(prompts, **options)
    for target in TARGETS:
        fast = gw.optimize(quantized, target=target)
        calls = fast.program.step.calls(G.quantized_linear.default)
        assert len(calls) == 4 and not any(arguments(call)["rounded"] for call in calls)
        assert torch.equal(fast.generate(prompts, **options), wanted), target


def test_no_float_detour(tmp_path: Path) -> None:
    """Codes of channels in order are the checkpoint's own bytes, transposed."""
    quantized, _ = write(tmp_path, gptq_config(), gptq_layer(), num_hidden_layers=1)
    program = import_model(quantized)
    name = "model.layers.0.mlp.up_proj"
    words = load_file(quantized / "model.safetensors")[f"{name}.qweight"]
    assert torch.equal(
        program.weights[f"{name}.weight.q4"].load(), words.T.contiguous().view(torch.uint8)
    )


def test_an_artifact_keeps_the_bits(tmp_path: Path) -> None:
    """Saved and loaded, the program holds the same bytes, and says the same."""
    quantized, _ = write(tmp_path, gptq_config(), gptq_layer(ordered=False), num_hidden_layers=1)
    made = gw.optimize(quantized, target="eager:cpu:float32")
    made.save(tmp_path / "out")
    loaded = gw.load(tmp_path / "out")
    for name, weight in made.program.weights.items():
        assert torch.equal(weight.load(), loaded.program.weights[name].load()), name
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(
        made.generate([[1, 2, 3]], **options), loaded.generate([[1, 2, 3]], **options)
    )


NAME = "model.layers.1.mlp.down_proj"


def _tensor(part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """A change of one tensor of the checkpoint; None takes it away."""

    def tamper(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        changed = change(tensors.pop(f"{NAME}.{part}"))
        if changed is not None:
            tensors[f"{NAME}.{part}"] = changed.contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return tamper


def _says(**more: Any) -> Any:
    """A change of what config.json says of the quantization."""

    def tamper(folder: Path) -> None:
        path = folder / "config.json"
        said = json.loads(path.read_text())
        said["quantization_config"].update(more)
        path.write_text(json.dumps(said))

    return tamper


def _first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


LIES: dict[str, tuple[Any, str]] = {
    "bits": (_says(bits=8), "qweight: expected 12 int32 a column, of 48 input channels of 8 bits"),
    "strange bits": (_says(bits=5), r"quantization_config\.bits: .*got 5"),
    "text": (_says(group_size="many"), r"quantization_config\.group_size: .*'many'"),
    "group": (_says(group_size=32), r"scales: expected 1.5 groups of 32 for 48 input channels"),
    "no group": (_says(group_size=0), "expected -1 or a positive number, got 0"),
    "sym": (
        _says(sym=True),
        r"down_proj\.qzeros|q_proj\.qzeros.*sym=true.*so that zero points are 8",
    ),
    "format": (_says(checkpoint_format="marlin"), "checkpoint_format: expected gptq or gptq_v2"),
    "dynamic": (_says(dynamic={"+:.*down.*": {"bits": 8}}), r"dynamic gives modules settings"),
    "method": (_says(quant_method="quip"), "quantized by quip.*expected one of awq, .*gptq"),
    "lost codes": (_tensor("qweight", lambda t: None), r"lacks 1 of .*1\.mlp\.down_proj\.weight"),
    "lost zeros": (_tensor("qzeros", lambda t: None), r"no tensor .*down_proj\.qzeros"),
    "short codes": (
        _tensor("qweight", lambda t: t[:-1]),
        r"model\.safetensors: .*down_proj\.qweight",
    ),
    "narrow codes": (_tensor("qweight", lambda t: t[:, :-1]), r"qweight: expected \[6,32\], got"),
    "dtype": (_tensor("qweight", lambda t: t.float()), "qweight: expected int32.*got f32"),
    "axes": (_tensor("scales", lambda t: t[0]), "scales: expected .* with 2 axes, got"),
    "zeros": (
        _tensor("qzeros", lambda t: t[:1]),
        r"qzeros: expected i32\[3,4\] for 3 groups of 32",
    ),
    "infinite": (_tensor("scales", _first(float("inf"))), "scales: expected finite numbers"),
    "nan": (_tensor("scales", _first(float("nan"))), "scales: expected finite numbers"),
    "g_idx out of range": (_tensor("g_idx", _first(99)), "g_idx: expected 16 channels in each of"),
    "g_idx negative": (_tensor("g_idx", _first(-1)), r"g_idx: .*got groups -1 to 2"),
    "g_idx uneven": (_tensor("g_idx", _first(2)), "g_idx: .*15 to 17 channels"),
}


@pytest.mark.parametrize("case", LIES)
def test_lies(case: str, tmp_path: Path) -> None:
    """What the configuration or a tensor says wrongly is named: file, tensor, expected and got."""
    tamper, message = LIES[case]
    quantized, _ = write(tmp_path, gptq_config(), gptq_layer())
    tamper(quantized)
    with pytest.raises((InputError, UnsupportedError), match=message):
        import_model(quantized)


STATE = "weight.quant_state.bitsandbytes__nf4"


def _json(text: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.tensor(list(text.encode()), dtype=torch.uint8)


NF4_LIES: dict[str, tuple[Any, str]] = {
    "no json": (_tensor(STATE, _json("{")), r"down_proj\.weight\.quant_state.*: expected JSON"),
    "no state": (_tensor(STATE, lambda t: None), r"no tensor .*quant_state\.bitsandbytes__nf4"),
    "shape": (
        _tensor(STATE, _json('{"quant_type": "nf4", "blocksize": 64, "shape": [32, 46]}')),
        r"down_proj\.weight: expected \[736,1\], got u8\[768,1\]",
    ),
    "block": (
        _tensor(STATE, _json('{"quant_type": "nf4", "blocksize": 0, "shape": [32, 48]}')),
        "blocksize",
    ),
    "absmax": (_tensor("weight.absmax", lambda t: t[1:]), r"absmax: expected \[24\], got u8\[23\]"),
    "infinite": (_tensor("weight.nested_absmax", _first(float("inf"))), "expected finite numbers"),
    "codebook": (_tensor("weight.quant_map", _first(float("nan"))), "expected finite numbers"),
    "8 bits": (_says(load_in_4bit=False), "load_in_4bit: only 4 bits are supported"),
    "storage": (_says(bnb_4bit_quant_storage="bfloat16"), "quant_storage: expected uint8"),
}


@pytest.mark.parametrize("case", NF4_LIES)
def test_lies_about_nf4(case: str, tmp_path: Path) -> None:
    """The same of bitsandbytes' JSON and codebooks."""
    tamper, message = NF4_LIES[case]
    quantized, _ = write(tmp_path, nf4_config(), nf4_layer(nested=16))
    tamper(quantized)
    with pytest.raises((InputError, UnsupportedError), match=message):
        import_model(quantized)


def test_awq_layouts(tmp_path: Path) -> None:
    """Another layout of the same method is refused by name."""
    quantized, _ = write(tmp_path, awq_config(version="gemv"), awq_layer())
    with pytest.raises(UnsupportedError, match="version: expected gemm, got 'gemv'"):
        import_model(quantized)


def test_activations_are_rounded_where_that_is_asked_for(tmp_path: Path) -> None:
    """The recipe keeps the bits; native kernels then run on them, with the op's own meaning."""
    quantized, _ = write(tmp_path, awq_config(), awq_layer(), num_hidden_layers=1)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": []}
    found = []
    for target in ("eager:cpu:float32", "onnxruntime:cpu:float32"):
        fast = gw.optimize(quantized, "round_activations", target=target)
        calls = fast.program.step.calls(G.quantized_linear.default)
        assert len(calls) == 4 and all(arguments(call)["rounded"] for call in calls)
        assert unmet(fast.program) is None and idle(fast.program.plan) is None
        found.append(fast.generate([[1, 5, 9, 30]], **options))
    assert torch.equal(*found)


MIXTURES = {"gptq": (gptq_config(4, 8), gptq_layer(4, 8)), "awq": (awq_config(8), awq_layer(8))}


@pytest.mark.long
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_become_a_stack_of_what_they_are_stored_as(name: str, tmp_path: Path) -> None:
    """No float is made of them; tokens are those of the model of their values on every target."""
    quantized, plain = write(tmp_path, *MIXTURES[name], arch="qwen2_moe")
    program = import_model(quantized, torch.float32)
    (mixture,) = program.step.calls(G.quantized_moe.default)
    assert not program.step.calls(G.moe.default) and not arguments(mixture)["rounded"]
    assert program.weights[str(arguments(mixture)["gate_up"].target)].type.dtype == torch.uint8
    ids, positions = tokens_and_positions()
    wanted = logits_of(import_model(plain, torch.float32), ids, positions)
    assert error(logits_of(program, ids, positions), wanted) < 1e-5
    asked: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": []}
    texts = [
        gw.optimize(source, target=target).generate(ids[:1], **asked)
        for source, target in ((plain, "eager"), (quantized, "eager"), (quantized, "onnxruntime"))
    ]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


@pytest.mark.long
def test_what_no_product_reads_is_dequantized_aloud(tmp_path: Path) -> None:
    """Experts whose columns have orders of their own have no stack: they are floats, a warning
    names them; the rest keeps its bits."""
    layer = gptq_layer(4, 8, ordered=False)
    quantized, plain = write(tmp_path, gptq_config(4, 8, desc_act=True), layer, arch="qwen2_moe")
    with pytest.warns(
        GraftworkWarning, match=r"12 weights of few bits are dequantized.*experts\.0"
    ):
        program = import_model(quantized, torch.float32)
    assert len(program.step.calls(G.quantized_linear.default)) == 14
    ids, positions = tokens_and_positions()
    wanted = logits_of(import_model(plain, torch.float32), ids, positions)
    assert error(logits_of(program, ids, positions), wanted) < 1e-5
