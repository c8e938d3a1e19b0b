"""Where graftwork stands beside other runtimes: decoding on the same weights, in turns.

    pip install --target PEERS ctranslate2 openvino openvino-genai
    python benchmarks/peers.py MODEL --packages PEERS [--recipes baseline,int8,int4]
        [--targets onnxruntime:cpu:float32,torch:cpu:float32] [--ctranslate2 float32,int8]
        [--openvino baseline,int4] [--openvino-genai FOLDER,...] [--prompts FILE.jsonl]
        [--rounds 5] [--json F]

PEERS is a folder for packages that only this script needs; nothing of graftwork imports them.
CTranslate2 converts the checkpoint itself, and quantizes it as it is told. OpenVINO runs the model
that graftwork exports for other loaders (`export_onnx`, plain: decoder and cache, weights in the
bits of the recipe that is named), driven by a loop of its own calls. OpenVINO GenAI runs folders
that ``optimum-cli export openvino`` wrote, whose versions of torch and transformers are others than
ours, so in an environment of its own. All decode greedily, a prompt at a time; ``first_ms`` is the
time up to the first new token, the rest the rate's (see `systems`). `over`: rates over the first
system's of the same round, medians; `same_texts`: how many prompts go on as the first system has
them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode import compare
from systems import Batch, Result, System, optimized, read_prompts, timed_whole

import graftwork as gw


def ctranslate2(folder: Path, kind: str, threads: int, scratch: Path) -> System:
    """CTranslate2 in a compute type, such as int8."""
    import ctranslate2 as library

    made = scratch / f"ctranslate2-{kind}"
    library.converters.TransformersConverter(str(folder)).convert(str(made), quantization=kind)
    model = library.Generator(
        str(made), device="cpu", compute_type=kind, intra_threads=threads, inter_threads=1
    )
    vocabulary = json.loads((made / "vocabulary.json").read_text())

    def once(prompts: Batch, count: int) -> tuple[list[list[int]], float]:
        prompt = [vocabulary[token] for token in prompts[0]]
        start = time.perf_counter()
        (found,) = model.generate_batch(
            [prompt],
            max_length=count,
            min_length=count,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
        )
        return [list(found.sequences_ids[0])], time.perf_counter() - start

    return timed_whole(once)


def openvino_genai(folder: Path, threads: int) -> System:
    """OpenVINO GenAI's pipeline on a folder that optimum-cli wrote."""
    import openvino as core
    import openvino_genai as library

    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    pipeline = library.LLMPipeline(str(folder), "CPU", **options)

    def once(prompts: Batch, count: int) -> tuple[list[list[int]], float]:
        ids = np.array([prompts[0]], dtype=np.int64)
        fed = library.TokenizedInputs(core.Tensor(ids), core.Tensor(np.ones_like(ids)))
        asked = library.GenerationConfig(
            max_new_tokens=count, do_sample=False, ignore_eos=True, apply_chat_template=False
        )
        start = time.perf_counter()
        found = pipeline.generate(fed, asked)
        return [list(found.tokens[0])], time.perf_counter() - start

    return timed_whole(once)


def openvino(folder: Path, recipe: str, threads: int, scratch: Path) -> System:
    """OpenVINO on graftwork's export of a recipe."""
    import openvino as library

    made = scratch / f"openvino-{recipe}"
    model = gw.optimize(folder, recipe, target=gw.Target.parse("onnxruntime:cpu", threads=1))
    model.export_onnx(made, plain=True)
    path = min(made.glob("*.onnx"))
    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = library.Core().compile_model(str(path), "CPU", options)
    requests = [compiled.create_infer_request() for _ in range(2)]
    names = [port.any_name for port in compiled.inputs]
    outs = [port.any_name for port in compiled.outputs]

    def feed(tokens: list[int], past: int, caches: dict[str, Any]) -> dict[str, Any]:
        # Two requests in turns: the caches that one writes the other reads where they are.
        requests.reverse()
        count = len(tokens)
        known = {
            "input_ids": np.array([tokens], dtype=np.int64),
            "position_ids": np.arange(past, past + count, dtype=np.int64)[None],
            "attention_mask": np.ones((1, past + count), dtype=np.int64),
        }
        given = {name: known[name] for name in names if name in known}
        found = requests[0].infer({**given, **caches}, share_inputs=True, share_outputs=True)
        return {name: found[name] for name in outs}

    def run(prompts: Batch, count: int) -> Result:
        tokens, past, new = list(prompts[0]), 0, list[int]()
        caches = {
            port.any_name: np.zeros(_empty(port), dtype=np.float32)
            for port in compiled.inputs
            if port.any_name.startswith("past")
        }
        start, begun = 0.0, time.perf_counter()
        for _ in range(count):
            found = feed(tokens, past, caches)
            past += len(tokens)
            tokens = [int(found["logits"][0, -1].argmax())]
            new += tokens
            caches = {name: found[name.replace("past_key_values", "present")] for name in caches}
            start = start or time.perf_counter()
        return [new], time.perf_counter() - start, {"first_ms": 1e3 * (start - begun)}

    return run


def _empty(port: Any) -> tuple[int, ...]:
    """The shape of a cache without rows, for one sequence."""
    _, heads, _, dim = port.partial_shape
    return 1, heads.get_length(), 0, dim.get_length()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--packages", type=Path, required=True, help="where peers are installed")
    parser.add_argument("--recipes", default="baseline,int8,int4")
    parser.add_argument("--targets", default="onnxruntime:cpu:float32,torch:cpu:float32")
    parser.add_argument("--ctranslate2", default="float32,int8", help="compute types")
    parser.add_argument("--openvino", default="baseline,int4", help="recipes that are exported")
    parser.add_argument("--openvino-genai", default="", help="folders that optimum-cli wrote")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=2, help="prompts")
    parser.add_argument("--length", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sys.path.append(str(args.packages))  # after this environment's own
    torch.set_num_threads(args.threads)
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    prompts = read_prompts(args.prompts, args.count, args.length, vocab)
    systems: dict[str, System] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for target in args.targets.split(","):
            for recipe in args.recipes.split(","):
                systems[f"{recipe} {target}"] = optimized(args.model, recipe, target, args.threads)
        first = next(iter(systems))
        for kind in filter(None, args.ctranslate2.split(",")):
            name = f"ctranslate2 {kind}"
            systems[name] = ctranslate2(args.model, kind, args.threads, scratch)
        for recipe in filter(None, args.openvino.split(",")):
            name = f"openvino, {recipe} as exported"
            systems[name] = openvino(args.model, recipe, args.threads, scratch)
        for made in filter(None, args.openvino_genai.split(",")):
            name = f"openvino-genai {Path(made).name}"
            systems[name] = openvino_genai(Path(made), args.threads)
        rows = compare(systems, [first], prompts, args.tokens, args.rounds)
    for name, row in rows.items():
        print(f"{name:<40} {json.dumps(row)}")
    if args.json:
        args.json.write_text(json.dumps({"model": args.model.name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
