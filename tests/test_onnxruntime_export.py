"""Exported decode graphs in a plain ONNX Runtime session and in onnxruntime-genai."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tiny
import torch
from handmade import Shape, cached_llama, llama
from selection import one_in
from test_onnxruntime_lowering import KERNEL, PLAIN, name_of
from tiny import drafting_llama, in_int8, named, tiny_llama

from graftwork.backends import Target, compile
from graftwork.backends.onnxruntime.emit import emit
from graftwork.backends.onnxruntime.portable import portable
from graftwork.backends.onnxruntime.store import WeightFile, store
from graftwork.exporting.onnx_folder import export_genai, export_onnx
from graftwork.ir import InputError, Program, State, TensorType, UnsupportedError, run
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.engine.base import Pass
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.recipe import Recipe

G = torch.ops.graftwork

genai = pytest.importorskip("onnxruntime_genai")

FILES = ["README.md", "generation_config.json", "model.onnx", "model.onnx.data"]


def open_plain(folder: Path) -> onnxruntime.InferenceSession:
    """A session that knows nothing of graftwork."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    path = str(folder / "model.onnx")
    return onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])


class Loop:
    """The decode loop of someone who has only the documented names."""

    def __init__(self, folder: Path, batch: int) -> None:
        self.session = open_plain(folder)
        self.feeds = {
            value.name: np.zeros((batch, value.shape[1], 0, value.shape[3]), np.float32)
            for value in self.session.get_inputs()
            if value.name.startswith("past_key_values.")
        }
        self.mask = np.zeros((batch, 0), np.int64)

    def step(self, tokens: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B,T,V] of a step; `real` i64[B,T] is 0 for padding."""
        ones = np.ones(tokens.shape, np.int64) if real is None else real.numpy()
        self.mask = np.concatenate([self.mask, ones], 1)
        self.feeds |= {"input_ids": tokens.numpy(), "attention_mask": self.mask}
        names = [value.name for value in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(None, self.feeds), strict=True))
        for name, value in outputs.items():
            if name.startswith("present."):
                self.feeds[name.replace("present", "past_key_values")] = value
        return torch.from_numpy(outputs["logits"])


def tokens_of(batch: int, width: int) -> torch.Tensor:
    """Some tokens i64[B,T]."""
    return torch.randint(2, 61, (batch, width), generator=torch.Generator().manual_seed(0))


def expected(shape: Shape, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of whole sequences, without a cache, in the interpreter."""
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return run(llama(shape), "step", {"tokens": tokens, "positions": positions})["logits"]


@pytest.mark.parametrize(
    "shape", one_in(2, [*KERNEL, *PLAIN, Shape(dim=12, slopes=True)]), ids=name_of
)
def test_plain_session(shape: Shape, tmp_path: Path) -> None:
    folder = export_onnx(cached_llama(shape), tmp_path / "out")
    for batch, widths in ((1, (5, 1, 3)), (2, (6, 1, 1))):
        tokens, loop, at, parts = tokens_of(batch, sum(widths)), Loop(folder, batch), 0, []
        for width in widths:
            parts.append(loop.step(tokens[:, at : at + width]))
            at += width
        got = torch.cat(parts, 1)
        torch.testing.assert_close(got, expected(shape, tokens), rtol=1e-4, atol=1e-4)


PADDED = [
    Shape(),
    Shape(window=3),
    Shape(dim=24),  # positions are looked up outside of the kernel
    Shape(slopes=True, rotary=0),
    Shape(dim=12),
    Shape(chunk=3),
    Shape(dim=12, window=3, slopes=True),
]
"""Some whose attention GroupQueryAttention does, and some whose it does not."""


@pytest.mark.parametrize("shape", PADDED, ids=name_of)
@pytest.mark.parametrize("ops", ["contrib", "standard"])
def test_padding_changes_nothing_wherever_it_stands(shape: Shape, ops: Any, tmp_path: Path) -> None:
    """On the left, on the right and between, in prompts, later blocks and single tokens."""
    if ops == "standard" and shape != Shape():
        pytest.skip("concatenates, as the last ones do with contrib")
    loop = Loop(export_onnx(cached_llama(shape), tmp_path / "out", ops=ops), 3)
    real = torch.tensor(
        [
            [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1],
            [1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1],
            [0, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1],
        ]
    )
    tokens = tokens_of(3, 12)
    # GroupQueryAttention takes later blocks of one sequence alone, and says so.
    counted = ops == "contrib" and shape in PADDED[:4]
    widths = (10, 1, 1) if counted else (6, 4, 1, 1)
    pieces = zip(tokens.split(widths, 1), real.split(widths, 1), strict=True)
    logits = torch.cat([loop.step(*piece) for piece in pieces], 1)
    for row, kept in enumerate(real.bool()):
        want = expected(shape, tokens[row : row + 1, kept])[0]
        torch.testing.assert_close(logits[row, kept], want, rtol=1e-4, atol=1e-4)


def test_one_attention_that_must_concatenate_makes_all_do_so(tmp_path: Path) -> None:
    """Rows of both kinds would stand in different orders."""
    canonical = llama(Shape())
    fn = canonical.step.copy()
    last = fn.calls(G.attention.default)[-1]
    last.kwargs = {**last.kwargs, "chunk": 3}
    mixed = canonical.replace(functions={"step": fn})
    program = mixed
    for step in (InsertKvCache(), AcceptTrees(), PickLogits()):
        program = step.run(program).program
    loop = Loop(export_onnx(program, tmp_path / "out"), 2)
    real = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 1, 1]])
    tokens = tokens_of(2, 8)
    pieces = zip(tokens.split((6, 2), 1), real.split((6, 2), 1), strict=True)
    logits = torch.cat([loop.step(*piece) for piece in pieces], 1)
    for row, kept in enumerate(real.bool()):
        ids = tokens[row : row + 1, kept]
        inputs = {"tokens": ids, "positions": torch.arange(ids.shape[1])[None]}
        want = run(mixed, "step", inputs)["logits"][0]
        torch.testing.assert_close(logits[row, kept], want, rtol=1e-4, atol=1e-4)


def test_what_the_graph_says_of_itself(tmp_path: Path) -> None:
    folder = export_onnx(cached_llama(), tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == FILES
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    assert {node.domain for node in model.graph.node} <= {"", "com.microsoft"}

    def shapes(values: object) -> dict[str, list[object]]:
        dims = {v.name: v.type.tensor_type.shape.dim for v in values}  # type: ignore[attr-defined]
        return {name: [d.dim_param or d.dim_value for d in dim] for name, dim in dims.items()}

    inputs, outputs = shapes(model.graph.input), shapes(model.graph.output)
    assert list(inputs)[:2] == ["input_ids", "attention_mask"]
    assert inputs["attention_mask"] == ["batch_size", "total_sequence_length"]
    past = ["batch_size", 2, "past_sequence_length", 16]
    assert inputs["past_key_values.1.value"] == past
    assert outputs["logits"] == ["batch_size", "sequence_length", 61]
    assert outputs["present.0.key"] == ["batch_size", 2, "total_sequence_length", 16]
    assert len(inputs) == 6 and len(outputs) == 5


@pytest.mark.parametrize("write", [export_onnx, export_genai])
@pytest.mark.parametrize(
    "shape", one_in(3, [*KERNEL, *PLAIN, Shape(dim=12, slopes=True)]), ids=name_of
)
def test_the_checker_of_onnx_passes(shape: Shape, write: Any, tmp_path: Path) -> None:
    """In full: every op has a schema there, or is of a domain that it leaves alone."""
    if write is export_genai and shape.value_dim is not None:
        shape = replace(shape, value_dim=None)
    for number, made in enumerate([cached_llama(shape), quantized(shape)]):
        folder = write(made, tmp_path / str(number))
        onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)


def quantized(shape: Shape) -> Program:
    return in_int8().run(cached_llama(shape)).program


@pytest.mark.parametrize("shape", [Shape(), Shape(dim=12, slopes=True)], ids=name_of)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_ops_of_onnx_alone(shape: Shape, bits: int | None, tmp_path: Path) -> None:
    """No domain but ONNX's, the checker knows every op, and the logits are the model's."""
    made = cached_llama(shape)
    if bits is not None:
        made = (in_int8() if bits == 8 else QuantizeWeights(bits=4, group=4)).run(made).program
    folder = export_onnx(made, tmp_path / "out", ops="standard")
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    assert {node.domain for node in model.graph.node} == {""}
    assert [entry.domain for entry in model.opset_import] == [""]
    tokens = tokens_of(2, 6)
    both = Loop(folder, 2), Loop(export_onnx(made, tmp_path / "contrib"), 2)
    ours, theirs = (
        torch.cat([loop.step(tokens[:, :5]), loop.step(tokens[:, 5:])], 1) for loop in both
    )
    if bits is None:
        torch.testing.assert_close(ours, expected(shape, tokens), rtol=1e-4, atol=1e-4)
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert float(error) < (1e-4 if bits is None else 0.05)


def test_a_whole_recipe_in_ops_of_onnx_alone(tmp_path: Path) -> None:
    """Passes fuse what ONNX has in parts."""
    steps = Recipe.load("baseline").steps
    folder = export_onnx(run_passes(tiny_llama(), steps)[0], tmp_path / "out", ops="standard")
    tokens = torch.tensor([[3, 4, 5, 9]])
    wanted = run(tiny_llama(), "step", {"tokens": tokens, "positions": torch.arange(4)[None]})
    got = Loop(folder, 1).step(tokens)
    torch.testing.assert_close(got, wanted["logits"], rtol=1e-4, atol=1e-4)


def test_ops_of_onnx_alone_in_openvino(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    folder = export_onnx(cached_llama(), tmp_path / "out", ops="standard")
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(str(folder / "model.onnx"), "CPU", exact)
    tokens = tokens_of(1, 4)
    feeds = {"input_ids": tokens.numpy(), "attention_mask": np.ones((1, 4), np.int64)}
    for value in open_plain(folder).get_inputs()[2:]:
        feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    got = torch.from_numpy(model(feeds)["logits"])
    torch.testing.assert_close(got, expected(Shape(), tokens), rtol=1e-4, atol=1e-4)


def test_an_older_opset(tmp_path: Path) -> None:
    """What the ops asked for do not have is refused by name before anything is written."""
    folder = export_onnx(cached_llama(), tmp_path / "out", opset=23)
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    assert onnx.load(folder / "model.onnx", load_external_data=False).opset_import[0].version == 23
    for opset in (22, 99):
        with pytest.raises(InputError, match=f"RMSNormalization.*got {opset}"):
            export_onnx(cached_llama(), tmp_path / "no", opset=opset)
    with pytest.raises(InputError, match="contrib or standard"):
        export_onnx(cached_llama(), tmp_path / "no", ops="plain")  # type: ignore[arg-type]
    fn = portable(cached_llama()).function
    with pytest.raises(UnsupportedError, match="no RMSNormalization in opset 17"):
        emit(fn, portable(cached_llama()).weights, standard=True, opset=17)
    with pytest.raises(UnsupportedError, match=r"own op.*ops=contrib"):
        emit(fn, portable(cached_llama()).weights, standard=True, contrib=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_says_where_it_comes_from(tmp_path: Path) -> None:
    folder = export_onnx(tiny.cached_llama(), tmp_path / "out")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    said = {entry.key: entry.value for entry in model.metadata_props}
    assert said["graftwork.contract"] == "exact" and said["eos_token_id"] == "[0]"
    assert "licen" not in said["model_type"] and said["license"].startswith("the source model's")
    assert model.doc_string and model.producer_version
    assert {node.doc_string for node in model.graph.node} >= {"layers.0", "layers.1"}
    card = (folder / "README.md").read_text()
    assert "model.onnx.data" in card and "Licence: the source model's" in card
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0


def test_portable_norms_are_bit_for_bit_our_own(tmp_path: Path) -> None:
    """ONNX's name for an RMS norm and ONNX Runtime's: one kernel."""
    graph, results = portable(cached_llama()), []
    for standard in (False, True):
        folder = tmp_path / str(standard)
        folder.mkdir()
        emitted = emit(graph.function, graph.weights, standard=standard)
        store(emitted, folder / "model.onnx", WeightFile(folder / "model.onnx.data"))
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        kinds = {node.op_type for node in model.graph.node}
        assert ("RMSNormalization" in kinds) == standard
        assert ("SimplifiedLayerNormalization" in kinds) != standard
        results.append(Loop(folder, 1).step(tokens_of(1, 6)))
    assert torch.equal(*results)


@pytest.mark.parametrize("write", [export_onnx, export_genai])
@pytest.mark.parametrize(
    "drafter",
    [named("draft_suffix"), DraftMedusa(heads=2), DraftEagle(levels=2, candidates=2)],
    ids=lambda drafter: drafter.name,
)
def test_drafts_are_left_out_by_name_only(drafter: Pass, write: Any, tmp_path: Path) -> None:
    """Other loaders have no place for them; what is exported then is the plain graph."""
    drafting = drafting_llama(drafter)
    if (write, drafter.name) != (export_genai, "draft_suffix"):  # it copies by itself
        with pytest.raises(
            UnsupportedError, match=r"drafts \(draft=.*plain=True, --plain.*baselin"
        ):
            write(drafting, tmp_path / "out")
        assert not list(tmp_path.iterdir())
    folder = write(drafting, tmp_path / "out", plain=True)
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    tokens = torch.tensor([[3, 4, 5, 9]])
    positions = torch.arange(4)[None]
    wanted = run(tiny_llama(), "step", {"tokens": tokens, "positions": positions})["logits"]
    torch.testing.assert_close(Loop(folder, 1).step(tokens), wanted, rtol=1e-4, atol=1e-4)
    names = {value.name.partition(".")[0] for value in open_plain(folder).get_inputs()}
    assert names == {"input_ids", "attention_mask", "past_key_values"}


def test_int8_export(tmp_path: Path) -> None:
    program = in_int8().run(cached_llama()).program
    tokens = tokens_of(1, 6)
    loop = Loop(export_onnx(program, tmp_path / "out"), 1)
    exact = expected(Shape(), tokens)
    error = (loop.step(tokens) - exact).abs().max() / exact.abs().max()
    assert 0 < float(error) < 0.1


def test_skipped_layers_are_numbered_without_gaps(tmp_path: Path) -> None:
    program = cached_llama(Shape(layers=2))
    names = {name: name.replace(".1.", ".7.") for name in program.states}
    fn = program.function("step").copy()
    for old, new in names.items():
        fn.input(old).target = new
    fn.set_outputs({names.get(n, n): node for n, node in fn.outputs.items()})
    layers = {0: 0, 1: 7}
    states = {
        names[n]: State(names[n], s.type, layers[s.layer], s.part)
        for n, s in program.states.items()
    }
    folder = export_onnx(program.with_function(fn, states=states), tmp_path / "out")
    pasts = {v.name for v in open_plain(folder).get_inputs()} - {"input_ids", "attention_mask"}
    assert pasts == {f"past_key_values.{i}.{part}" for i in (0, 1) for part in ("key", "value")}


def test_genai_generates_our_tokens(tmp_path: Path) -> None:
    program = _with_tokenizer(cached_llama(Shape(layers=2, vocab=64)), tmp_path)
    folder = export_genai(program, tmp_path / "out")
    assert (folder / "tokenizer.json").exists()
    prompt, count = [5, 9, 2, 17], 12
    model = genai.Model(str(folder))
    options = genai.GeneratorParams(model)
    options.set_search_options(max_length=len(prompt) + count, min_length=16, do_sample=False)
    generator = genai.Generator(model, options)
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    assert [int(t) for t in generator.get_sequence(0)] == prompt + _greedy(program, prompt, count)


def test_genai_copies_by_its_own_n_grams(tmp_path: Path) -> None:
    """Its configuration asks for drafts like the program's; they are used, and change no token."""
    program = _with_tokenizer(cached_llama(Shape(layers=2, vocab=64)), tmp_path)
    program = named("draft_suffix", tokens=20, shortest=1).run(program).program
    folder = export_genai(program, tmp_path / "out")
    said = json.loads((folder / "genai_config.json").read_text())
    assert said["speculative"] == {"max_draft_tokens": 16, "ngram_size": 2}
    if not hasattr(genai.Generator, "get_speculative_stats"):
        pytest.skip("this onnxruntime-genai has no drafts")
    prompt, count = [5, 9, 2, 17, 5, 9, 2, 17, 5, 9], 24
    options = genai.GeneratorParams(genai.Model(str(folder)))
    most = len(prompt) + count
    options.set_search_options(max_length=most, min_length=most, do_sample=False)
    generator = genai.Generator(genai.Model(str(folder)), options)
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    assert [int(t) for t in generator.get_sequence(0)] == prompt + _greedy(program, prompt, count)
    assert generator.get_speculative_stats()["draft_tokens_proposed"] > 0
    plain = export_genai(program, tmp_path / "plain", plain=True)
    assert "speculative" not in json.loads((plain / "genai_config.json").read_text())


def _greedy(program: Program, prompt: list[int], count: int) -> list[int]:
    """Tokens that our executable generates."""
    ort = compile(program, Target(threads=1))
    ort.begin(1, len(prompt) + count)
    tokens, past = prompt, 0
    made: list[int] = []
    while len(made) < count:
        inputs = {
            "tokens": torch.tensor([tokens]),
            "positions": torch.arange(past, past + len(tokens))[None],
            "past": torch.tensor([past]),
            "select": torch.tensor([[len(tokens) - 1]]),
        }
        past += len(tokens)
        tokens = [int(ort.run("step", inputs, ["argmax"])["argmax"])]
        made += tokens
    return made


def _with_tokenizer(program: Program, folder: Path) -> Program:
    """The program with a tokenizer of one word a token among its assets."""
    vocab = {f"w{i}": i for i in range(program.info.vocab_size)}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
    source = folder / "tokenizer.json"
    source.write_text(json.dumps(content))
    return program.replace(assets={"tokenizer.json": source})


def test_genai_config_tells_in_place_caches_apart(tmp_path: Path) -> None:
    in_place = export_genai(cached_llama(), tmp_path / "a") / "genai_config.json"
    apart = export_genai(cached_llama(Shape(dim=12)), tmp_path / "b") / "genai_config.json"
    shared = [
        json.loads(p.read_text())["search"]["past_present_share_buffer"] for p in (in_place, apart)
    ]
    assert shared == [True, False]


def test_genai_refuses_what_it_cannot_say(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Use export_onnx"):
        export_genai(cached_llama(Shape(value_dim=24)), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="plain decode graph"):
        export_onnx(llama(), tmp_path / "out")
    program = cached_llama()
    odd = State("scales", TensorType.parse("f32[B,2,C,1]"), 0, "scale")
    with pytest.raises(UnsupportedError, match="scales"):
        export_onnx(program.replace(states={**program.states, "scales": odd}), tmp_path / "out")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="something else"):
        export_onnx(program, other)
    assert [p.name for p in tmp_path.iterdir()] == ["other"]


def test_an_export_replaces_an_older_one_whole(tmp_path: Path) -> None:
    folder = export_genai(cached_llama(), tmp_path / "out")
    export_onnx(cached_llama(Shape(layers=1)), folder)
    assert sorted(p.name for p in folder.iterdir()) == FILES
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failed_export_keeps_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_onnx(cached_llama(), tmp_path / "out")
    before = (folder / "model.onnx").read_bytes()

    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("graftwork.exporting.onnx_folder.store", full)
    with pytest.raises(InputError, match=f"cannot write {folder}: no space"):
        export_onnx(cached_llama(Shape(layers=1)), folder)
    assert (folder / "model.onnx").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "genai_config.json"])
def test_a_models_own_file_takes_no_exported_ones_place(name: str, tmp_path: Path) -> None:
    ours = tmp_path / name
    ours.write_text("not what an export writes")
    program = cached_llama(Shape(layers=1, vocab=64)).replace(assets={name: ours})
    with pytest.raises(InputError, match="which the export writes itself"):
        export_genai(program, tmp_path / "out")
    assert not (tmp_path / "out").exists()
