"""Whole generations in one file, in a plain ONNX Runtime session."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as oir
import onnxruntime
import pytest
import torch
from handmade import Shape
from handmade import cached_llama as handmade_llama
from onnxruntime_helpers import needs_node
from selection import one_in
from tiny import cached_llama, tiny_llama

from graftwork.backends import Target
from graftwork.backends.onnxruntime.chains_in_graph import Stepped, chain_of
from graftwork.backends.onnxruntime.emit import IR_VERSION, OPSETS
from graftwork.backends.onnxruntime.generation import generation
from graftwork.backends.onnxruntime.graph_builder import I64, GraphBuilder
from graftwork.backends.onnxruntime.steps_in_graph import Functions
from graftwork.backends.onnxruntime.store import WeightFile, store
from graftwork.exporting.folder import Ops
from graftwork.exporting.loop import export_onnx_loop
from graftwork.ir import InputError, Program, UnsupportedError
from graftwork.model import Model
from graftwork.passes.drafting.suffix import SuffixDraft, SuffixIndex
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe
from graftwork.runtime.speculate.sampling import agreed

PROMPTS = ([1, 2, 3, 4], [5, 6, 7, 5, 6, 7, 5, 6], [9])
BY_TOKEN = {"quantize_weights": {"group": 0, "scales": "f32", "span": 0}}
IN_INT8 = {"quantize_weights": {"bits": 8, "group": 0, "symmetric": True, "scales": "f32"}}
LOW = {"threshold": 0.02}
"""A threshold that random weights come to."""
MLPS = {"first": 1, "last": 1, "warm": 2, "similarity": 0.9}
RECIPES: dict[str, Any] = {
    "baseline": "baseline",
    "copyspec": "copyspec",
    "prompt_lookup": "prompt_lookup",
    "heads": {"extends": "baseline", "passes": ["draft_medusa", {"tree_chain": {"depth": 3}}]},
    "eagle_chain": "eagle_chain",
    # ONNX alone rounds activations by token.
    "int8": {"extends": "int8", "passes": [BY_TOKEN]},
    "int8_copyspec": {"extends": "int8_copyspec", "passes": [BY_TOKEN]},
    "h2o": {"extends": "h2o", "passes": [{"evict_cache": {"budget": 64, "block": 8}}]},
    "skip_layers": {"extends": "baseline", "passes": [{"skip_layers": {"layers": [1]}}]},
    "unified_skipping": "unified_skipping",
    "kv_int8": "kv_int8",
    "layerskip": "layerskip",
    "int8_layerskip": {"extends": "layerskip", "passes": [IN_INT8]},
    "d3": "d3",
    "skipdecode": "skipdecode",
    "calm": {"extends": "calm", "passes": [{"depth_confident": {**LOW, "decay": 3.0}}]},
    "calm_copyspec": {"extends": "calm", "passes": ["draft_suffix", {"depth_confident": LOW}]},
    "int8_calm": {
        "extends": "calm",
        "passes": [IN_INT8, {"depth_confident": {**LOW, "measure": "margin"}}],
    },
    "free": {
        "extends": "free",
        "passes": [{"depth_deferred": {"threshold": 0.005, "decay": 3.0, "tokens": 12}}],
    },
    "ffn_skipllm": {"extends": "ffn_skipllm", "passes": [{"depth_mlp": MLPS}]},
}
SHALLOW = ("d3", "skipdecode", "calm", "calm_copyspec", "int8_calm", "free", "ffn_skipllm")
"""Not all of their tokens go through all layers."""

pytestmark = pytest.mark.filterwarnings("ignore:.*untrained")


@cache
def made(name: str) -> Model:
    recipe = Recipe.load(RECIPES.get(name, name))
    program, _ = run_passes(tiny_llama(4), recipe.steps)
    return Model(program, Target(threads=1), recipe.as_dict())


def opened(folder: Path) -> Any:
    """A session that knows nothing of graftwork."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    path = str(folder / "generate.onnx")
    return onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])


def asked(prompts: Sequence[Sequence[int]], most: int, eos: Sequence[int]) -> dict[str, Any]:
    ids = np.zeros((len(prompts), max(map(len, prompts)) + 1), np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts])
    return {
        "input_ids": ids,
        "lengths": lengths,
        "max_new": np.array(most),
        "eos": np.array(eos, np.int64),
    }


def texts(session: Any, feeds: dict[str, Any]) -> list[list[int]]:
    """The new tokens of each row; behind them there is nothing but padding."""
    tokens, counts = session.run(None, feeds)
    assert tokens.shape[1] == counts.max()
    assert all((row[n:] == 0).all() for row, n in zip(tokens, counts, strict=True))
    return [row[:n].tolist() for row, n in zip(tokens, counts, strict=True)]


def expected(model: Model, prompt: Sequence[int], most: int, eos: Sequence[int]) -> list[int]:
    ids = model.generate([prompt], max_new_tokens=most, eos_token_id=list(eos), pad_token_id=0)
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("name", one_in(4, sorted(RECIPES.keys() - {"h2o"})))
def test_the_models_tokens(name: str, tmp_path: Path) -> None:
    """Alone and in a ragged batch, with and without ends of text, up to the context."""
    model = made(name)
    folder = model.export_onnx_loop(tmp_path / "out")
    onnx.checker.check_model(str(folder / "generate.onnx"), full_check=True)
    session = opened(folder)
    for eos in ([], [0, 26]):
        wanted = [expected(model, prompt, 20, eos) for prompt in PROMPTS]
        assert texts(session, asked(PROMPTS, 20, eos)) == wanted
        assert texts(session, asked(PROMPTS[1:2], 20, eos)) == wanted[1:2]
    assert texts(session, asked(PROMPTS, 1, [])) == [
        expected(model, prompt, 1, []) for prompt in PROMPTS
    ]
    assert_texts_end_with_the_context(model, session)


def assert_texts_end_with_the_context(model: Model, session: Any) -> None:
    context = model.program.info.context
    long = [[i % 30 for i in range(context - 6)], [3] * (context - 1)]
    assert [len(text) for text in texts(session, asked(long, 20, []))] == [6, 1]


@pytest.mark.parametrize("name", ["baseline", "copyspec", "heads", "int8", "int8_copyspec"])
def test_loops_of_onnx_alone(name: str, tmp_path: Path) -> None:
    """No domain but ONNX's; caches grow, padding stays unseen in them, and rows are taken back."""
    model = made(name)
    folder = model.export_onnx_loop(tmp_path / "out", ops="standard")
    path = folder / "generate.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    graphs = graphs_of(onnx.load(path, load_external_data=False).graph)
    assert {node.domain for graph in graphs for node in graph.node} == {""}
    session = opened(folder)
    for eos in ([], [0, 26]):
        wanted = [expected(model, prompt, 20, eos) for prompt in PROMPTS]
        assert texts(session, asked(PROMPTS, 20, eos)) == wanted
        assert texts(session, asked(PROMPTS[1:2], 20, eos)) == wanted[1:2]
    assert_texts_end_with_the_context(model, session)


def test_loops_that_onnx_alone_cannot_say(tmp_path: Path) -> None:
    for name in ("eagle_chain", "calm", "unified_skipping"):
        with pytest.raises(UnsupportedError, match=r"more than a plain step.*ops=contrib"):
            made(name).export_onnx_loop(tmp_path / "out", ops="standard")
    with pytest.raises(InputError, match="contrib or standard"):
        made("baseline").export_onnx_loop(tmp_path / "out", ops="own")
    assert not list(tmp_path.iterdir())


IN_OPENVINO = [("eagle_chain", "contrib")]
IN_OPENVINO += [
    (name, ops) for name in ("baseline", "copyspec", "heads") for ops in ("contrib", "standard")
]


@pytest.mark.parametrize(("name", "ops"), IN_OPENVINO)
def test_the_same_file_in_openvino(name: str, ops: Ops, tmp_path: Path) -> None:
    """Alone and in a ragged batch."""
    openvino = pytest.importorskip("openvino")
    folder = made(name).export_onnx_loop(tmp_path / "out", ops=ops)
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    path = str(folder / "generate.onnx")
    for prompts in (PROMPTS[1:2], PROMPTS):
        feeds = asked(prompts, 12, [0])
        model = openvino.Core().compile_model(path, "CPU", exact)
        tokens, counts = model(feeds).values()
        found = [row[:n].tolist() for row, n in zip(tokens, counts, strict=True)]
        assert found == texts(opened(folder), feeds)


@pytest.mark.parametrize("name", SHALLOW)
def test_tokens_leave_early(name: str) -> None:
    """What the texts above are made of: without this, all of them could be whole steps'."""
    ids = [[*PROMPTS[0]]]
    done = made(name).generate(
        ids, max_new_tokens=20, eos_token_id=[], return_dict_in_generate=True
    )
    assert done.stats.layers < 4


@pytest.mark.parametrize("name", ["calm", "free", "d3"])
def test_what_is_left_to_a_run_stands_in_ifs(name: str, tmp_path: Path) -> None:
    """Layers that a token leaves out are in a branch that does not run."""
    folder = made(name).export_onnx_loop(tmp_path / "out")
    branches = [
        branch.g
        for graph in graphs_of(onnx.load(folder / "generate.onnx", load_external_data=False).graph)
        for node in graph.node
        if node.op_type == "If"
        for branch in node.attribute
    ]
    products = [sum(node.op_type == "MatMul" for node in branch.node) for branch in branches]
    assert branches and max(products) >= 4


@pytest.mark.parametrize("name", ["baseline", "copyspec", "heads"])
def test_caches_are_concatenated_once_a_step(name: str, tmp_path: Path) -> None:
    """And carried as that left them: GroupQueryAttention would copy them for every head."""
    folder = made(name).export_onnx_loop(tmp_path / "out")
    graphs = graphs_of(onnx.load(folder / "generate.onnx", load_external_data=False).graph)
    body = next(graph for graph in graphs if graph.name == "generate.pass")
    carried = {o.name for o in body.output if ".kv." in o.name}
    assert len(carried) == 2 * 4
    makers = [node.op_type for node in body.node if carried & {*node.output}]
    assert makers == ["Concat"] * len(carried)


@pytest.mark.parametrize("shortest", [1, 2])
def test_copied_drafts_are_the_drafters(shortest: int) -> None:
    """Equal texts cannot see a useless one."""
    record = SuffixDraft(tokens=6, longest=4, shortest=shortest)
    g = GraphBuilder("draft", OPSETS)
    text, program = g.input("text", I64, ["length"]), cached_llama()
    functions = Functions(program, contrib=True, concatenates=True)
    step = Stepped(text, None, text, text, {}, functions, lambda *_: {})
    found = chain_of(record)
    assert found is not None
    chain, _ = found.draft(g, record, step)
    g.output("chain", chain, I64, ["drafted"])
    model = oir.to_proto(oir.Model(g.graph, ir_version=IR_VERSION)).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    drafted = 0
    for length in (1, 2, 3, *random.integers(4, 60, 80)):
        tokens = random.integers(0, 5, length)
        index = SuffixIndex(record.longest)
        index.extend(tokens.tolist())
        wanted = index.continuation(record.tokens) if index.length >= shortest else []
        assert session.run(None, {"text": tokens})[0].tolist() == wanted
        drafted += bool(wanted)
    assert 40 < drafted < 83


def test_graphs_accept_what_the_runtime_accepts() -> None:
    """Greedy acceptance is one function of the runtime, and one of graphs: the same counts."""
    g = GraphBuilder("accept", OPSETS)
    draft, chosen = (g.input(name, I64, [name]) for name in ("draft", "chosen"))
    same = g.op("Equal", draft, g.slice(chosen, None, g.size(draft, 0)))
    g.output("count", g.leading(same), I64, [])
    model = oir.to_proto(oir.Model(g.graph, ir_version=IR_VERSION)).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    counts = set()
    for size in (0, 1, *random.integers(1, 6, 60)):
        tokens, said = random.integers(0, 2, size), random.integers(0, 2, size + 1)
        wanted = agreed(tokens.tolist(), said.tolist(), vocabulary=2)
        assert session.run(None, {"draft": tokens, "chosen": said})[0] == wanted
        assert tokens[:wanted].tolist() == said[:wanted].tolist()
        assert wanted == size or tokens[wanted] != said[wanted]
        counts.add(wanted)
    assert counts >= {0, 1, 2, 3}
    with pytest.raises(InputError, match="logits"):
        agreed([1], [1, -1], vocabulary=2)


@pytest.mark.parametrize("name", ["calm", "free", "ffn_skipllm", "layerskip"])
def test_branches_agree_in_their_types(name: str, tmp_path: Path) -> None:
    """In halves, too, and with logits that go out of them."""
    recipe = Recipe.load(RECIPES.get(name, name))
    program, _ = run_passes(tiny_llama(4, dtype=torch.float16), recipe.steps)
    folder = export_onnx_loop(program, tmp_path / "out", sample=True)
    onnx.checker.check_model(str(folder / "generate.onnx"), full_check=True)
    opened(folder)


def graphs_of(graph: Any) -> list[Any]:
    """A graph and all in it."""
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [graph, *(found for one in inner for found in graphs_of(one))]


@pytest.mark.parametrize(
    "shape", [Shape(dim=12), Shape(window=3), Shape(chunk=3), Shape(slopes=True, dim=12)]
)
def test_attention_of_other_kinds(shape: Shape, tmp_path: Path) -> None:
    """Caches with room for everything, windows, chunks, ALiBi."""
    program = handmade_llama(shape)
    model = Model(program, Target(threads=1), {})
    wanted = [expected(model, prompt, 9, []) for prompt in PROMPTS]
    kinds: list[Ops] = ["contrib"] if shape.slopes else ["contrib", "standard"]
    for ops in kinds:
        session = opened(export_onnx_loop(program, tmp_path / ops, ops=ops))
        assert texts(session, asked(PROMPTS, 9, [])) == wanted
    if shape.slopes:
        with pytest.raises(UnsupportedError, match=r"ALiBi.*count padding.*ops=contrib"):
            export_onnx_loop(program, tmp_path / "standard", ops="standard")


def sampling(
    seed: int, rows: int, most: int, heat: float, k: int, p: float, penalty: float = 1.0
) -> dict[str, Any]:
    uniforms = np.random.default_rng(seed).random((rows, most), np.float32)
    values = {"temperature": (heat, np.float32), "top_k": (k, np.int64), "top_p": (p, np.float32)}
    values["repetition_penalty"] = penalty, np.float32
    return {"uniforms": uniforms, **{n: np.array(v, t) for n, (v, t) in values.items()}}


def test_sampling_follows_the_numbers_given(tmp_path: Path) -> None:
    """The same numbers, the same tokens, whatever drafts; without heat, the argmax."""
    seen = []
    for name in ("baseline", "copyspec", "heads"):
        session = opened(made(name).export_onnx_loop(tmp_path / name, sample=True))
        feeds = asked(PROMPTS, 12, [])
        cold = texts(session, feeds | sampling(0, 3, 12, 0.0, 0, 1.0))
        assert cold == [expected(made(name), prompt, 12, []) for prompt in PROMPTS]
        seen.append(texts(session, feeds | sampling(1, 3, 12, 1.5, 0, 1.0)))
        assert seen[0] != cold
        alone = {k: v[1:2] for k, v in sampling(1, 3, 12, 1.5, 0, 1.0).items() if k == "uniforms"}
        one = asked(PROMPTS[1:2], 12, []) | sampling(1, 1, 12, 1.5, 0, 1.0) | alone
        assert texts(session, one) == [seen[0][1]]
        assert texts(session, feeds | sampling(2, 3, 12, 1.5, 1, 1.0)) == cold
        assert texts(session, feeds | sampling(2, 3, 12, 1.5, 0, 1e-6)) == cold
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("name", ["baseline", "copyspec", "int8", "calm"])
def test_repetition_is_penalized_as_in_the_model(name: str, tmp_path: Path) -> None:
    """What the prompt, the text and a draft's own earlier tokens have counts as said."""
    model = made(name)
    session = opened(model.export_onnx_loop(tmp_path / "out", sample=True))
    given = asked(PROMPTS, 16, []) | sampling(0, 3, 16, 0.0, 0, 1.0, 1.6)
    wanted = [
        model.generate(
            [prompt], max_new_tokens=16, eos_token_id=[], do_sample=False, repetition_penalty=1.6
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    assert texts(session, given) == wanted
    assert wanted != [expected(model, prompt, 16, []) for prompt in PROMPTS]


def test_sampled_tokens_have_the_models_chances(tmp_path: Path) -> None:
    """Drawn by evenly spread numbers, each token comes up as often as its probability says."""
    model, count = made("baseline"), 4000
    session = opened(model.export_onnx_loop(tmp_path / "out", sample=True))
    logits = model([PROMPTS[0]])[0, -1] / 0.7
    chances = logits.topk(5).values.softmax(-1)
    ids = logits.topk(5).indices.tolist()
    before = chances.cumsum(-1) - chances
    kept = chances * (before < 0.8)
    kept = kept / kept.sum()
    feeds = asked([PROMPTS[0]] * count, 1, []) | sampling(0, count, 1, 0.7, 5, 0.8)
    feeds["uniforms"] = ((np.arange(count, dtype=np.float32) + 0.5) / count)[:, None]
    drawn = [text[0] for text in texts(session, feeds)]
    shares = [drawn.count(token) / count for token in ids]
    np.testing.assert_allclose(shares, kept.numpy(), atol=2 / count)


@pytest.mark.parametrize("name", ["baseline", "copyspec"])
def test_lengths_that_are_none_are_an_error(name: str, tmp_path: Path) -> None:
    session = opened(made(name).export_onnx_loop(tmp_path / "out"))
    for length in (0, -1, 10):
        feeds = asked(PROMPTS, 12, [])
        feeds["lengths"][1] = length
        with pytest.raises(Exception, match="lengths_are_1_to_prompt_length"):
            session.run(None, feeds)


def test_numbers_of_another_shape_are_an_error(tmp_path: Path) -> None:
    session = opened(made("copyspec").export_onnx_loop(tmp_path / "out", sample=True))
    feeds = asked(PROMPTS, 12, []) | sampling(0, 3, 11, 1.0, 0, 1.0)
    with pytest.raises(Exception, match="uniforms_are_batch_x_max_new"):
        session.run(None, feeds)


_IN_NODE = """
const ort = require("onnxruntime-node");
const given = JSON.parse(process.argv[2]);
const longs = (values, dims) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims);
(async () => {
  const session = await ort.InferenceSession.create(process.argv[1]);
  const { tokens, counts } = await session.run({
    input_ids: longs(given.input_ids.flat(), [3, given.input_ids[0].length]),
    lengths: longs(given.lengths, [3]),
    max_new: longs([given.max_new], []),
    eos: longs(given.eos, [given.eos.length]),
  });
  const width = tokens.dims[1];
  const rows = Array.from(counts.data, (count, i) =>
    Array.from(tokens.data.slice(i * width, i * width + Number(count)), Number));
  console.log(JSON.stringify(rows));
})();
"""


def test_the_same_file_in_node(tmp_path: Path) -> None:
    needs_node()
    for name in ("baseline", "copyspec", "eagle_chain", "int8_copyspec", "calm", "layerskip"):
        folder = made(name).export_onnx_loop(tmp_path / name)
        feeds = asked(PROMPTS, 12, [0])
        said = json.dumps({key: value.tolist() for key, value in feeds.items()})
        command = ["node", "-e", _IN_NODE, str(folder / "generate.onnx"), said]
        shown = subprocess.run(command, capture_output=True, text=True)
        assert json.loads(shown.stdout or "[]") == texts(opened(folder), feeds), shown.stderr


REFUSED = {
    "medusa": "tree=static",
    "eagle2": "draft=cached",
    "kangaroo": "draft=adapted_exit",
    "recycling": "draft=recycling",
    "h2o": "cache=evict",
    "medusa_typical": "verify=typical",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_loop_cannot_do_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"{REFUSED[name]}.*onnx-plan.*plain=True"):
        made(name).export_onnx_loop(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_plain_leaves_drafts_out(tmp_path: Path) -> None:
    folder = made("medusa").export_onnx_loop(tmp_path / "out", plain=True)
    wanted = [expected(made("baseline"), prompt, 12, []) for prompt in PROMPTS]
    assert texts(opened(folder), asked(PROMPTS, 12, [])) == wanted
    with pytest.raises(UnsupportedError, match="follows the argmax"):
        made("eagle_chain").export_onnx_loop(tmp_path / "no", sample=True)
    with pytest.raises(UnsupportedError, match="KV cache"):
        export_onnx_loop(tiny_llama(), tmp_path / "no")
    with pytest.raises(InputError, match="something else"):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "thesis.tex").write_text("years of work")
        export_onnx_loop(cached_llama(), tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_weights_lie_where_they_are_used(tmp_path: Path) -> None:
    """Each once, in the body of the step: of weights further out, kernels keep no packed copy."""
    program: Program = made("copyspec").program
    path = tmp_path / "generate.onnx"
    store(generation(program), path, WeightFile(tmp_path / "data"))
    graphs = graphs_of(onnx.load(path, load_external_data=False).graph)
    held = [[t.name for t in graph.initializer if "weight." in t.name] for graph in graphs]
    assert [bool(names) for names in held] == [False, False, True]
    assert len(held[2]) == len(set(held[2])) > 10
