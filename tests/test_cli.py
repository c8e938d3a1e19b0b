"""The command line, on a tiny random checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import error_message
from source_models import made, written
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import graftwork as gw
from graftwork.artifact.saved import is_artifact, load
from graftwork.cli import main

TEXT = ["def add(a, b):\n    return a + b\n", "for item in items:\n    print(item)\n"]
CPU = "eager:cpu:float32"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of one layer with random weights, and a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def saved(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "out"
    gw.optimize(checkpoint, "baseline", target=CPU).save(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    captured = capsys.readouterr()
    code = caught.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def test_help_is_quick_because_torch_is_not_loaded() -> None:
    code = (
        "import sys\nfrom graftwork.cli import main\ntry:\n  main(['--help'])\n"
        "except SystemExit: pass\nprint('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for command in ("optimize", "generate", "export", "bench", "inspect", "recipes", "demo"):
        assert command in ran.stdout
    assert ran.stdout.endswith("False\n"), ran.stderr


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "recipes")
    assert code == 0
    for place, recipe in enumerate(gw.recipes()):
        assert recipe.name in text and recipe.contract in text
        if place % 8:
            continue
        _, shown, _ = run(capsys, "recipes", recipe.name)
        assert all(step.pass_.name in shown for step in recipe.steps)


def test_a_page_lists_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
    assert run(capsys, "recipes", "--markdown")[1].strip() in page


def test_optimize_saves_what_the_api_saves(
    checkpoint: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--recipe", "baseline", "--target", CPU, "--out", tmp_path / "out")
    code, text, errors = run(capsys, "optimize", checkpoint, *args)
    assert code == 0, errors
    assert "insert_kv_cache" in text and "saved in" in text
    for name in ("weights.safetensors", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (saved / name).read_bytes()


def test_optimize_dry_run_reports_and_saves_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--dry-run", "--validate", "--json", "--target", CPU)
    code, text, errors = run(capsys, "optimize", checkpoint, *args)
    assert code == 0, errors
    report = json.loads(text)
    assert report["recipe"] == "baseline" and report["contract"] == "exact"
    assert all(line["check"]["error"] < 1e-4 for line in report["passes"] if line["matches"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--recipe", "baselin"], "did you mean 'baseline'"),
        (["--recipe", "copyspec", "--set", "draft_suffix.token=3"], "did you mean 'tokens'"),
        (["--target", "onnxruntim:cpu"], "did you mean 'onnxruntime'"),
        (["--data", "nowhere.txt"], "data= is given"),
        (["--data", "nowhere.txt", "--validate"], "nowhere.txt"),
    ],
)
def test_errors_are_one_message_and_write_nothing(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    code, text, errors = run(capsys, "optimize", checkpoint, "--out", tmp_path / "out", *args)
    assert (code, text) == (2, "")
    assert message in error_message(errors) and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = run(capsys, "optimize", tmp_path / "none", "--dry-run")
    assert code == 2 and "none" in errors
    code, _, errors = run(capsys, "optimize", tmp_path)
    assert code == 2 and "--out" in errors


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(gw.GraftworkError):
        main(["--debug", "optimize", str(tmp_path / "none"), "--dry-run"])


def test_generate_from_a_checkpoint_and_from_an_artifact(
    checkpoint: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--prompt", TEXT[0], "--max-new-tokens", 12, "--target", CPU)
    code, direct, errors = run(capsys, "generate", checkpoint, *args)
    assert code == 0, errors
    code, loaded, errors = run(capsys, "generate", saved, *args)
    assert (code, loaded) == (0, direct), errors
    code, text, _ = run(capsys, "generate", saved, *args, "--json")
    result: dict[str, Any] = json.loads(text)
    assert code == 0 and result["text"] + "\n" == direct
    assert len(result["ids"]) == result["stats"]["new_tokens"] <= 12


def test_generate_writes_several_texts(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampled, or out of one row; a recipe that does neither says what is lacking."""
    (tmp_path / "corpus.txt").write_text(TEXT[1])
    args = ("--prompt", TEXT[0], "--max-new-tokens", 5, "--target", CPU)
    three = (*args, "--num-return-sequences", 3)
    own = ("--recipe", "superposed", "--set", f"superpose.path={tmp_path / 'corpus.txt'}")
    code, out, errors = run(capsys, "generate", checkpoint, *three, *own, "--json")
    assert code == 0, errors
    found = json.loads(out)["texts"]
    scores = [each["score"] for each in found]
    assert len({each["text"] for each in found}) == 3 and scores == sorted(scores, reverse=True)
    code, out, errors = run(capsys, "generate", checkpoint, *three, *own)
    assert code == 0 and out == "".join(f"- {each['text']!r}\n" for each in found), errors
    sampled = ("--temperature", 1, "--seed", 3)
    code, out, _ = run(capsys, "generate", checkpoint, *three, *sampled)
    assert code == 0 and out.count("\n- ") == 2
    code, _, errors = run(capsys, "generate", checkpoint, *three)
    assert code == 2 and "add do_sample=True" in errors
    code, _, errors = run(capsys, "generate", checkpoint, *three, *own, "--stop", "x")
    assert code == 2 and "--stop ends one text" in errors


@pytest.mark.long
def test_generate_writes_from_a_source(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt is what the model reads; what it writes is shown, and is transformers'."""
    model = made("bart", vocab_size=320)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    args = ("--prompt", TEXT[0], "--max-new-tokens", 8, "--target", CPU, "--json")
    code, out, errors = run(capsys, "generate", tmp_path, *args)
    assert code == 0, errors
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT[0]).ids
    want = written(model, {"input_ids": torch.tensor([ids])}, max_new_tokens=8)
    assert json.loads(out)["ids"] == want[0, 1:].tolist()


def test_generate_agrees_with_transformers(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    args = ("--prompt", TEXT[1], "--max-new-tokens", 16, "--target", CPU, "--json")
    _, text, errors = run(capsys, "generate", checkpoint, *args)
    ids = torch.tensor(
        [Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(TEXT[1]).ids]
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert json.loads(text)["ids"] == expected.tolist(), errors


def test_sampling_is_repeatable_from_its_seed(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("generate", saved, "--prompt", TEXT[0], "--max-new-tokens", 20, "--json")
    args = (*args, "--temperature", 1.5)
    texts = [json.loads(run(capsys, *args, "--seed", seed)[1])["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", ""], "expected some text"),
        (["--prompt", "x", "--top-p", "0.5"], "need --temperature"),
        (["--prompt", "x", "--recipe", "baseline"], "cannot be changed"),
        (["--prompt", "x", "--target", "eager:cpu:bfloat16"], "dtype cannot become"),
        (["--prompt", "x", "--max-new-tokens", "1000"], "context"),
    ],
)
def test_generate_refuses(
    saved: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    code, _, errors = run(capsys, "generate", saved, *args)
    assert code == 2 and message in errors, errors


def test_inspect(checkpoint: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "stage=traced" in run(capsys, "inspect", checkpoint)[1]
    cached = ("inspect", checkpoint, "--recipe", "baseline", "--after", "insert_kv_cache")
    assert "graftwork.attend(" in run(capsys, *cached)[1]
    assert run(capsys, "inspect", saved)[1] == str(load(saved).program)
    assert "graftwork.attend" in run(capsys, "inspect", saved, "--summary")[1]
    code, _, errors = run(capsys, *cached[:-1], "insert_cache")
    assert code == 2 and "insert_kv_cache" in errors


def test_bench(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "prompts.txt"
    data.write_text("def add\nfor item in\n")
    args = ("--recipes", "baseline,copyspec", "--target", CPU, "--data", data, "--tokens", 8)
    figures = tmp_path / "figures.json"
    code, text, errors = run(capsys, "bench", checkpoint, *args, "--repeats", 2, "--json", figures)
    assert code == 0, errors
    assert "transformers" in text and "copyspec" in text
    result = json.loads(figures.read_text())
    reference, baseline, copyspec = result["rows"]
    assert reference["name"] == "transformers" and reference["ratio"] == 1.0
    assert len(baseline["tokens_per_second_all"]) == 2
    for row in (baseline, copyspec):
        assert row["same_tokens"] == {"equal": 2, "near_ties": 0, "different": 0}
    assert copyspec["same_as_plain"]["different"] == 0 and baseline["same_as_plain"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--recipes", "baselin"], "did you mean 'baseline'"),
        (["--recipes", ","], "at least one recipe"),
        (["--recipes", "baseline", "--against", "vllm"], "--against vllm"),
        (["--recipes", "baseline", "--target", "cpu"], "target"),
        (["--recipes", "baseline", "--set", "draft_suffix.tokens=2"], "no pass 'draft_suffix'"),
    ],
)
def test_bench_refuses(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    code, _, errors = run(capsys, "bench", checkpoint, *args)
    assert code == 2 and message in errors, errors


def test_export(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("onnx", "genai"):
        code, _, errors = run(capsys, "export", saved, "--format", kind, "--out", tmp_path / kind)
        assert code == 0, errors
        assert (tmp_path / kind / "model.onnx").is_file()
    assert (tmp_path / "genai" / "genai_config.json").is_file()
    assert not is_artifact(tmp_path / "onnx")


def test_export_of_a_recipe_that_drafts(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused unless the plain graph is asked for by name."""
    args = ("export", checkpoint, "--recipe", "recycling", "--format", "genai", "--out")
    code, _, errors = run(capsys, *args, tmp_path / "out")
    assert code == 2 and "--plain" in errors and not (tmp_path / "out").exists()
    assert run(capsys, *args, tmp_path / "out", "--plain")[0] == 0
    assert (tmp_path / "out" / "model.onnx").is_file()
    heads = ("export", checkpoint, "--format", "speculators", "--out", tmp_path / "x", "--plain")
    assert "--plain is for onnx, onnx-loop and genai" in run(capsys, *heads)[2]


@pytest.mark.long
def test_export_in_another_dtype(
    checkpoint: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {}
    for dtype in ("float32", "float16", "int8", "int4"):
        args = ("--format", "onnx", "--dtype", dtype, "--out", tmp_path / dtype)
        code, _, errors = run(capsys, "export", checkpoint, *args)
        assert code == 0, errors
        sizes[dtype] = (tmp_path / dtype / "model.onnx.data").stat().st_size
    assert sizes["float32"] > 1.6 * sizes["float16"] and sizes["float16"] > sizes["int4"], sizes
    int8 = ("--recipe", "int8", "--format", "onnx", "--dtype", "int8", "--out", tmp_path / "no")
    assert "quantizes weights itself" in run(capsys, "export", checkpoint, *int8)[2]
    assert "cannot be changed" in run(capsys, "export", saved, *int8[2:])[2]
    assert "--dtype is for" in run(capsys, "export", checkpoint, *heads_of(tmp_path))[2]
    assert not (tmp_path / "no").exists()


def heads_of(folder: Path) -> tuple[object, ...]:
    return "--format", "vllm-medusa", "--dtype", "int8", "--out", folder / "no"


def test_a_draft_model_by_one_option(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "drafted"
    asked = ["--draft", checkpoint, "--target", "eager", "--no-cost", "--out", folder]
    code, _, error = run(capsys, "optimize", checkpoint, "--recipe", "int8", *asked)
    assert code == 0, error
    plan = load(folder).program.plan
    assert plan.draft.kind == "cached" and plan.length.kind == "goodput"
    code, _, error = run(
        capsys, "generate", checkpoint, "--prompt", "def", "--draft", tmp_path / "no.gguf"
    )
    assert code == 2 and "draft_model: there is no" in error_message(error)
