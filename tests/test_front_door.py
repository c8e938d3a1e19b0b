"""What a newcomer meets first: wrong words, missing packages, other folders, own modules."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import cached_llama
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import graftwork as gw
from graftwork.cli import main
from graftwork.ir import InputError
from graftwork.ir.support.packages import installing

ROOT = Path(__file__).parents[1]
IDS = torch.tensor([[1, 2, 3]])


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(arg) for arg in args])
    return int(left.value.code or 0)


def python(code: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize("command", ["optimize", "generate"])
def test_without_transformers_the_extra_is_named(command: str, tmp_path: Path) -> None:
    """On the command line and in Python; what needs no transformers works."""
    model = ROOT / "graftwork" / "demo_model"
    arguments = {"optimize": ["--dry-run"], "generate": ["--prompt", "x"]}[command]
    blocked = "import sys; sys.modules['transformers'] = None\n"
    code = f"from graftwork.cli import main; main({[command, str(model), *arguments]})"
    ran = python(blocked + code, tmp_path)
    assert ran.returncode == 2, ran.stderr
    assert "error: " in ran.stderr and installing("huggingface") in ran.stderr
    assert "Traceback" not in ran.stderr
    saved = gw.Model(cached_llama(), gw.Target("eager"), {"name": "t"}).save(tmp_path / "out")
    code = f"import graftwork as gw; print(gw.load({str(saved)!r}).generate([[1, 2]]).shape)"
    assert "torch.Size" in python(blocked + code, tmp_path).stdout


@pytest.mark.parametrize(
    ("keywords", "said", "unsaid"),
    [
        ({"token_healing": True}, "does not support token_healing=True; nearest: a prompt", "x^"),
        ({"inputs": IDS}, "its first argument or as input_ids=, got both", "TypeError"),
        ({"inputs_embeds": IDS}, "inputs_embeds: expected rows f.B,S,H.*got torch.int64", "x^"),
        ({"input_ids": IDS}, "its first argument or as input_ids=, got both", "x^"),
        ({"executable": 1}, "does not support executable=1", "nearest"),
        ({"self": 1}, "does not support self=1", "nearest"),
        ({"temprature": 1}, "nearest: temperature", "x^"),
        ({"stopping_criteria": lambda ids, scores: None}, "criterion returned None", "x^"),
    ],
)
def test_keywords_that_generate_does_not_take(
    keywords: dict[str, Any], said: str, unsaid: str
) -> None:
    model = gw.Model(cached_llama(), gw.Target("eager"), {"name": "t"})
    with pytest.raises(InputError, match=said) as error:
        model.generate(IDS, **keywords)
    assert unsaid not in str(error.value)


def test_prompts_by_name_and_not_at_all() -> None:
    model = gw.Model(cached_llama(), gw.Target("eager"), {"name": "t"})
    assert torch.equal(model.generate(input_ids=IDS), model.generate(IDS))
    assert torch.equal(model.generate(inputs=IDS), model.generate(IDS))
    for keywords, got in (({}, "got nothing"), ({"top_k": 3}, "got top_k")):
        with pytest.raises(InputError, match=f"token ids.*{got}"):
            model.generate(**keywords)


def test_nothing_is_compiled_for_a_bad_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*args: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("graftwork.model.compile_for", compiled)
    model = gw.Model(cached_llama(), gw.Target("eager"), {"name": "t"})
    for ids, options in ((IDS, {"top_p": 3}), (IDS, {"max_new_tokens": 999}), (IDS + 99, {})):
        with pytest.raises(InputError):
            model.generate(ids, **options)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--top-p", "3", "top_p: expected a number from 0 to 1, got 3.0"),
        ("--top-k", "-1", "top_k: expected an integer of at least 0"),
        ("--temperature", "-1", "temperature: expected a number above 0"),
        ("--temperature", "nan", "temperature: expected a number above 0"),
        ("--seed", "-1", "seed: expected an integer"),
        ("--max-new-tokens", "0", "max_new_tokens: expected an integer of at least 1"),
        ("--prompt", "", "--prompt: expected some text"),
    ],
)
def test_options_of_generate_are_checked_before_a_model_is_read(
    option: str,
    value: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def traced(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr("graftwork.tracing.traced.import_model", traced)
    assert run("generate", ROOT / "graftwork" / "demo_model", "--prompt", "x", option, value) == 2
    assert message in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    said = capsys.readouterr().out
    assert said.startswith(
        f"graftwork {gw.__version__} (Python {platform.python_version()}, torch "
    )
    assert "onnxruntime" in said and said.count("\n") == 1


def test_what_the_system_refuses_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = gw.Model(cached_llama(), gw.Target("onnxruntime"), {"name": "t"}).save(tmp_path / "out")
    file = tmp_path / "file"
    file.write_text("")
    assert run("export", saved, "--format", "onnx", "--out", file / "below") == 2
    errors = capsys.readouterr().err
    assert "error: " in errors and str(file) in errors


@pytest.mark.long
def test_the_folder_above_a_clone_has_the_package(tmp_path: Path) -> None:
    """A clone called graftwork is, to Python above it, a package without an __init__.py."""
    (tmp_path / "graftwork").symlink_to(ROOT)
    code = "import graftwork as gw, graftwork.ir; print(gw.__version__, len(gw.recipes()))"
    ran = python(code, tmp_path)
    assert ran.stdout.split() == [gw.__version__, str(len(gw.recipes()))], ran.stderr
    command = [sys.executable, "-m", "graftwork", "--version"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert gw.__version__ in ran.stdout, ran.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gw.optimize("x", target=5), "target: expected text"),
        (lambda: gw.optimize("x", data=5, validate=True), "data: expected prompts"),
        (lambda: gw.optimize("x", seed="a"), "seed: expected an integer"),
        (lambda: gw.optimize("x", seed=2**70), "seed: expected an integer"),
        (lambda: gw.load(3), "load: expected a path, got 3"),
    ],
)
def test_arguments_of_other_types(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, size = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, width, 3, 4, size // 4).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, width, size))


class Positioned(nn.Module):
    """A language model of somebody's own, which is told the positions of its tokens."""

    def __init__(self, eos: int | list[int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block_size, self.eos_token_id = 32, eos
        self.tokens, self.places = nn.Embedding(30, 16), nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, 30)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Other(Positioned):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        assert position_ids is not None
        return super().forward(tokens, position_ids)


@pytest.mark.parametrize("kind", [Positioned, Other])
def test_a_module_that_takes_positions(kind: type[Positioned]) -> None:
    module = kind().eval()
    ids = [3, 1, 4]
    with torch.no_grad():
        for _ in range(8):
            step = module(torch.tensor([ids]), torch.arange(len(ids))[None])
            ids.append(int(step[0, -1].argmax()))
    model = gw.optimize(module, target="eager")
    assert model.generate([ids[:3]], max_new_tokens=8).tolist() == [ids]
    model = gw.optimize(kind([ids[5], 29]).eval(), target="eager")
    assert model.program.info.eos == (ids[5], 29)
    ended = ids[: 1 + ids.index(ids[5], 3)]
    assert model.generate([ids[:3]], max_new_tokens=8).tolist() == [ended]
