"""The package as users get it: what is in it, and what it needs."""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from graftwork.ir.support.packages import installing

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]


def requirements() -> list[Requirement]:
    optional = PROJECT["project"]["optional-dependencies"].values()
    texts = [*PROJECT["project"]["dependencies"], *(text for group in optional for text in group)]
    return [r for r in map(Requirement, texts) if r.marker is None or r.marker.evaluate()]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def test_every_package_on_disk_is_in_the_wheel() -> None:
    found = runpy.run_path(str(ROOT / "setup.py"))["packages"]()
    holding = {path.parent for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*.py")}
    assert len(found) == len(set(found)) == len(holding), "a folder of files has no __init__.py"
    assert {"graftwork", "graftwork.training.objectives", "graftwork.passes.drafting"} < set(found)


def test_the_tested_versions_satisfy_what_the_package_asks_for() -> None:
    pinned = pins()
    for requirement in requirements():
        version = pinned[requirement.name.lower()]
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


def test_only_one_onnxruntime_is_installed() -> None:
    names = {d.metadata["Name"].lower() for d in metadata.distributions()}
    assert len(names & {"onnxruntime", "onnxruntime-gpu"}) == 1


def built_wheel(folder: Path) -> Path:
    """The wheel of the package's files alone, made in a folder."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for inner in FOLDERS.values():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / inner, source / inner, ignore=ignore)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder]
    built = subprocess.run([*command, source], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.long
def test_a_wheel_builds_and_works_where_it_is_installed(tmp_path: Path) -> None:
    wheel = built_wheel(tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    for package, folder in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            inner = file.relative_to(ROOT / folder).as_posix()
            assert f"{package.replace('.', '/')}/{inner}" in names
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        assert f"graftwork/recipe_files/{file.name}" in names
    for file in sorted((ROOT / "graftwork" / "demo_model").glob("*.*")):
        assert f"graftwork/demo_model/{file.name}" in names
    for folder in ("backends/kernels", "backends/torch/kernels"):
        for file in sorted((ROOT / folder).iterdir()):
            assert f"graftwork/{folder}/{file.name}" in names
    assert "graftwork/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)

    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import graftwork as gw; import graftwork.ir.ops; print(gw.__file__);"
        "print([r.name for r in gw.recipes()])"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert str(site) in ran.stdout and "'baseline'" in ran.stdout


@pytest.mark.long
def test_an_sdist_is_a_clone_that_builds(tmp_path: Path) -> None:
    """Docs, tests, Makefile and tested versions are in it, and its wheel is the clone's."""
    source = tmp_path / "source"
    for folder in (*FOLDERS.values(), "docs", "tests", "examples", "benchmarks"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for path in (p for p in ROOT.iterdir() if p.is_file() and p.suffix != ".gguf"):
        shutil.copy(path, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, source]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (archive,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    clone = {"Makefile", "constraints.txt", "CHANGELOG.md", "CONTRIBUTING.md", "setup.py"}
    assert clone <= names
    for folder in (*FOLDERS.values(), "docs", "tests", "examples", "benchmarks"):
        files = [path for path in (source / folder).rglob("*") if path.is_file()]
        assert files and {path.relative_to(source).as_posix() for path in files} <= names
    assert "graftwork/chat/templates.py" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize("extra", ["gguf", "huggingface"])
def test_the_command_that_installs_an_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the clone; where there is none, of the packages that the extra stands for."""
    python, *rest, what = shlex.split(installing(extra))
    assert python == sys.executable and rest == ["-m", "pip", "install", "-e"]
    assert what == f"{ROOT}[{extra}]"
    assert extra in PROJECT["project"]["optional-dependencies"]
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    said = ["torch>=2", "transformers<6; extra == 'huggingface'", "transformers<6; extra == 'gguf'"]
    monkeypatch.setattr(metadata, "requires", lambda name: [*said, 'gguf>=0.17; extra == "gguf"'])
    names = ["transformers<6", "gguf>=0.17"] if extra == "gguf" else ["transformers<6"]
    assert shlex.split(installing(extra))[4:] == names


@pytest.mark.long
def test_pip_takes_that_command() -> None:
    dry = ["--dry-run", "--no-deps", "--no-index", "--no-build-isolation"]
    ran = subprocess.run([*shlex.split(installing("gguf")), *dry], capture_output=True, text=True)
    assert ran.returncode == 0 and "graftwork" in ran.stdout, ran.stderr
