"""Where graftwork stands beside other runtimes: decoding on the same weights, in turns.

    pip install --target PEERS ctranslate2 openvino openvino-genai llama-cpp-python
    python benchmarks/peers.py MODEL --packages PEERS [--recipes baseline,int8,int4]
        [--targets onnxruntime:cpu:float32,torch:cpu:float32] [--llama-cpp FILE.gguf,...]
        [--ctranslate2 float32,int8] [--openvino baseline,int4] [--openvino-genai FOLDER,...]
        [--prompts FILE.jsonl] [--rounds 5] [--text NAME=FILE ...] [--alone] [--json F]

PEERS is a folder for packages that only this script needs; nothing of graftwork imports them.
llama.cpp runs .gguf files by its own decode calls; build it for the processor at hand. CTranslate2
converts the checkpoint itself, and quantizes it as it is told. OpenVINO runs the model that
graftwork exports for other loaders (`export_onnx`, plain: decoder and cache, weights in the bits of
the recipe that is named), driven by a loop of its own calls. OpenVINO GenAI runs folders that
``optimum-cli export openvino`` wrote, whose versions of torch and transformers are others than
ours, so in an environment of its own. All decode greedily, a prompt at a time; ``first_ms`` is the
time up to the first new token, the rest the rate's (see `systems`). `over`: rates over the first
system's of the same round, medians; `same_texts`: how many prompts go on as the first system has
them.

`text`: held-out text (a file, or a .jsonl of ``text``), on which systems that tell their logits are
set beside ``baseline`` on the first target: `kl`, `ratio` of perplexities with its standard error,
and `agreement`, as in `quality.py`, by windows of `window` tokens. `alone`: graftwork's saved
artifacts, by the command line, and llama.cpp continue a prompt in processes of their own, too:
`start_s`, seconds of one that writes a token (medians of `rounds`, files read before), and
`peak_mb`, the memory of one that writes `tokens` at its largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode import compare
from quality import compared, cut, read_texts, scores
from systems import (
    Batch,
    Result,
    System,
    optimized_model,
    read_prompts,
    running,
    timed_whole,
)

import graftwork as gw

CONTEXT = 4096
"""Rows that llama.cpp has room for."""

PROMPT = "A lighthouse keeper found a letter in a bottle."
LLAMA_CPP = """
import sys
prompt, tokens, threads, packages, path = sys.argv[1:]
sys.path.append(packages)
from llama_cpp import Llama
model = Llama(path, n_ctx=512, n_threads=int(threads), verbose=False)
print(model(prompt, max_tokens=int(tokens), temperature=0)["choices"][0]["text"])
"""


class LlamaCpp:
    """llama.cpp on a .gguf file."""

    def __init__(self, path: Path, threads: int, every: int = 0) -> None:
        """every: tokens of a text whose logits are all kept; 0: the last one's."""
        import llama_cpp as library

        self.library, self.every = library, every
        more = {"logits_all": True, "n_batch": every, "n_ubatch": every} if every else {}
        self.model = library.Llama(
            str(path),
            n_ctx=every or CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            **more,
        )

    def best(self) -> int:
        """The likeliest token."""
        found = self.library.llama_get_logits_ith(self.model.ctx, -1)
        return int(np.ctypeslib.as_array(found, shape=(self.model.n_vocab(),)).argmax())

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.model.reset()
        self.model.eval(tokens[0].tolist())
        return torch.from_numpy(self.model.scores[: tokens.shape[1]].copy())[None]

    def run(self, prompts: Batch, count: int) -> Result:
        self.model.reset()
        begun = time.perf_counter()
        self.model.eval(list(prompts[0]))
        new = [self.best()]
        start = time.perf_counter()
        for _ in range(count - 1):
            self.model.eval(new[-1:])
            new.append(self.best())
        return [new], time.perf_counter() - start, {"first_ms": 1e3 * (start - begun)}


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
    parser.add_argument("model", type=Path, help="checkpoint folder, or a .gguf file")
    parser.add_argument("--packages", type=Path, required=True, help="where peers are installed")
    parser.add_argument("--recipes", default="baseline,int8,int4")
    parser.add_argument("--targets", default="onnxruntime:cpu:float32,torch:cpu:float32")
    parser.add_argument("--llama-cpp", default="", help=".gguf files of the same model")
    parser.add_argument("--ctranslate2", default="", help="compute types, such as float32,int8")
    parser.add_argument("--openvino", default="", help="recipes that are exported")
    parser.add_argument("--openvino-genai", default="", help="folders that optimum-cli wrote")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=2, help="prompts")
    parser.add_argument("--length", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--windows", type=int, default=8, help="windows of each text")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--alone", action="store_true", help="time and memory of each process")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.windows < 2:
        parser.error("--windows: two at least, whose differences have a standard error")
    sys.path.append(str(args.packages))  # after this environment's own
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(args, Path(folder))
    for name, row in rows.items():
        print(f"{name:<40} {json.dumps(row)}")
    if args.json:
        args.json.write_text(json.dumps({"model": args.model.name, "rows": rows}, indent=1))


def alone(command: Sequence[str]) -> tuple[float, float]:
    """Seconds of a process, and MB of its memory at its largest (Linux)."""
    start, most = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
            most = max(most, *peak, 0)
            time.sleep(0.005)
    if process.returncode:
        raise SystemExit(f"{command[-1]}: its process ended with exit code {process.returncode}")
    return time.perf_counter() - start, most * 1024 / 1e6


def command_of(what: Path, tokens: int, args: argparse.Namespace) -> list[str]:
    """What loads an artifact or a .gguf file and writes so many tokens."""
    if what.is_dir():
        asked = ["--prompt", PROMPT, "--max-new-tokens", str(tokens), "--temperature", "0"]
        return [sys.executable, "-m", "graftwork", "generate", str(what), *asked]
    given = PROMPT, str(tokens), str(args.threads), str(args.packages), str(what)
    return [sys.executable, "-c", LLAMA_CPP, *given]


def measured(args: argparse.Namespace, scratch: Path) -> dict[str, dict[str, Any]]:
    """The rows of all systems, by name."""
    systems: dict[str, System] = {}
    models: dict[str, gw.Model] = {}
    files: dict[str, Path] = {}
    for target in args.targets.split(","):
        for recipe in args.recipes.split(","):
            name = f"{recipe} {target}"
            models[name] = optimized_model(args.model, recipe, target, args.threads)
            systems[name] = running(models[name])
    first = next(iter(systems))
    for path in filter(None, args.llama_cpp.split(",")):
        name = f"llama.cpp {Path(path).name}"
        files[name] = Path(path)
        systems[name] = LlamaCpp(Path(path), args.threads).run
    for kind in filter(None, args.ctranslate2.split(",")):
        systems[f"ctranslate2 {kind}"] = ctranslate2(args.model, kind, args.threads, scratch)
    for recipe in filter(None, args.openvino.split(",")):
        name = f"openvino, {recipe} as exported"
        systems[name] = openvino(args.model, recipe, args.threads, scratch)
    for made in filter(None, args.openvino_genai.split(",")):
        systems[f"openvino-genai {Path(made).name}"] = openvino_genai(Path(made), args.threads)
    vocab = models[first].program.info.vocab_size
    prompts = read_prompts(args.prompts, args.count, args.length, vocab, args.model.stem)
    rows = compare(systems, [first], prompts, args.tokens, args.rounds)
    systems.clear()
    if args.text:
        add_quality(rows, models, files, args)
    if args.alone:
        for name, model in models.items():
            files[name] = scratch / f"artifact{len(files)}"
            model.save(files[name])
        models.clear()
        for name, path in files.items():
            starts = [alone(command_of(path, 1, args))[0] for _ in range(args.rounds + 1)]
            rows[name]["start_s"] = round(statistics.median(starts[1:]), 2)
            rows[name]["peak_mb"] = round(alone(command_of(path, args.tokens, args))[1])
    return rows


def add_quality(
    rows: dict[str, dict[str, Any]],
    models: Mapping[str, gw.Model],
    files: Mapping[str, Path],
    args: argparse.Namespace,
) -> None:
    """What each system that tells its logits loses on each text."""
    target = args.targets.split(",")[0]
    plain = models.get(f"baseline {target}")
    plain = plain or optimized_model(args.model, "baseline", target, args.threads)
    told: dict[str, Any] = dict(models)
    told |= {name: LlamaCpp(path, args.threads, args.window) for name, path in files.items()}
    for said in args.text:
        label, _, path = said.partition("=")
        texts = read_texts(Path(path), None)
        windows = cut(plain.tokenizer, plain.program, texts, args.window, args.windows)
        reference = scores(plain, plain, windows)
        for name, system in told.items():
            found = scores(system, plain, windows)
            ratio, error = compared(found.nats, reference.nats)
            rows[name][label] = {
                "kl": round(statistics.mean(found.kl), 5),
                "ratio": round(ratio, 4),
                "error": round(error, 4),
                "agreement": round(statistics.mean(found.agreement), 4),
            }


if __name__ == "__main__":
    main()
