"""The Hub, from a server of this test's own: what is fetched, what is not, and what is written."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_llama import small_llama

import graftwork as gw
from graftwork.hub import download
from graftwork.ir import InputError

hub = pytest.importorskip("huggingface_hub")

IDS = torch.tensor([[3, 1, 4, 1, 5]])
COMMITS = {"main": "a" * 40, "v1": "b" * 40}


class Server:
    """Folders as repositories with two revisions. asked: the files that were fetched."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders, self.asked = folders, list[str]()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, call: Any) -> None:
        parts = call.path.partition("?")[0].strip("/").split("/")
        models = parts[:2] == ["api", "models"]
        if len(parts) < 4:
            return self.reply(call, 404, b"", {})
        name = "/".join(parts[2:4] if models else parts[:2])
        revision = (parts[5] if len(parts) > 5 else "main") if models else parts[3]
        commit = COMMITS.get(revision, revision if revision in COMMITS.values() else None)
        if name not in self.folders or commit is None:
            return self.reply(call, 404, b"", {"X-Error-Code": "RepoNotFound"})
        folder = self.folders[name]
        if models:
            told: Any = {"id": name, "sha": commit}
            if "tree" in parts:
                told = [
                    {"type": "file", "path": p.relative_to(folder).as_posix(), "oid": "", "size": 1}
                    for p in sorted(folder.rglob("*"))
                    if p.is_file()
                ]
            return self.reply(call, 200, json.dumps(told).encode(), {})
        file = "/".join(parts[4:])
        self.asked.append(file)
        data = (folder / file).read_bytes()
        marks = {"ETag": f'"{sha256(data).hexdigest()}"', "X-Repo-Commit": commit}
        return self.reply(call, 200, data, marks)

    def reply(self, call: Any, status: int, data: bytes, head: dict[str, str]) -> None:
        call.send_response(status)
        for name, value in {**head, "Content-Length": str(len(data))}.items():
            call.send_header(name, value)
        call.end_headers()
        if call.command == "GET":
            call.wfile.write(data)


FETCH = hub.snapshot_download


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where traces are kept, which are the same for all tests: only files come anew."""
    return tmp_path_factory.mktemp("kept")


def reach(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this for the Hub, and forget what came from another one."""
    fetch = partial(FETCH, endpoint=address, cache_dir=folder / f"cache{address[-4:]}")
    monkeypatch.setattr(hub, "snapshot_download", fetch)


@pytest.fixture
def server(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("GRAFTWORK_CACHE", str(kept))
    folder = tmp_path / "repository"
    small_llama(24, 16).save_pretrained(folder)
    (folder / "modeling_evil.py").write_text("raise SystemExit('this ran')")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "original").mkdir()
    (folder / "original" / "other.safetensors").write_bytes(b"twice")
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "config.json").write_text("{}")
    made = Server({"org/llama": folder, "org/pickles": tmp_path / "pickles"})
    reach(made.address, tmp_path, monkeypatch)
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_an_id_is_fetched_without_code_or_pickles(server: Server) -> None:
    made = gw.optimize("org/llama", target="eager", revision="v1")
    want = small_llama(24, 16).generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    got = made.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(got, want)
    assert "model.safetensors" in server.asked and "config.json" in server.asked
    assert not {"modeling_evil.py", "pytorch_model.bin", "original/other.safetensors"} & {
        *server.asked
    }
    assert COMMITS["v1"] in made.report.source
    assert download.local("org/llama@v1").name == COMMITS["v1"]
    assert download.local("org/llama").name == COMMITS["main"]


@pytest.mark.parametrize(
    ("source", "revision", "message"),
    [
        (
            "org/none",
            None,
            "org/none: there is no such folder here, and none came from the Hub: .*hf d",
        ),
        ("org/llama", "v9", "hf download org/llama --revision v9 --local-dir llama, and give that"),
        ("org/pickles", None, "it has no safetensors, and no other weights are read"),
        ("org/llama@v1", "main", "both org/llama@v1 and revision='main' are given"),
        ("tests", "v1", "revision='v1': tests is no id of the Hub"),
    ],
)
def test_what_cannot_be_had_is_said(
    server: Server, source: str, revision: str | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        gw.optimize(source, target="eager", revision=revision)


def test_without_a_network_the_error_says_how_to_get_a_folder(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach("http://127.0.0.1:9", tmp_path, monkeypatch)
    with pytest.raises(InputError, match="hf download org/llama --local-dir llama"):
        gw.optimize("org/llama", target="eager")


def test_what_is_saved_comes_back_from_a_folder_and_from_the_hub(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gw.optimize("org/llama", "int8", target="eager")
    want = made.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert made.save_pretrained(tmp_path / "mine") is None
    card = (tmp_path / "mine" / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["base_model"] == "org/llama" and head["library_name"] == "graftwork"
    assert "recipe `int8` (approximate)" in card and "not measured" in card
    assert str(tmp_path) not in card
    server.folders["me/mine"] = tmp_path / "mine"
    for place in (tmp_path / "mine", "me/mine"):
        back = gw.Model.from_pretrained(place)
        assert torch.equal(
            back.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0), want
        )
    (tmp_path / "mine" / "README.md").write_text("my own words")
    made.save_pretrained(tmp_path / "mine")
    assert (tmp_path / "mine" / "README.md").read_text() == "my own words"
    with pytest.raises(InputError, match="is no artifact of graftwork: optimize it first"):
        gw.Model.from_pretrained("org/llama")
    with pytest.raises(InputError, match="private is for push_to_hub=True"):
        made.save_pretrained(tmp_path / "mine", private=True)


def test_what_is_pushed_is_the_artifact_and_its_card(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Api:
        def __init__(self, token: str | None) -> None:
            seen["token"] = token

        def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> Any:
            seen["private"] = private
            return type("Url", (), {"repo_id": repo_id})

        def upload_folder(self, folder_path: Path, **given: Any) -> str:
            seen.update(given, files={file.name for file in folder_path.iterdir()})
            return "https://commit"

    monkeypatch.setattr(hub, "HfApi", Api)
    made = gw.optimize("org/llama", target="eager")
    assert made.push_to_hub("me/fast", token="t", private=True, branch="b") == "https://commit"
    assert {"README.md", "manifest.json", "program.gw"} <= seen["files"]
    assert (seen["repo_id"], seen["revision"], seen["token"]) == ("me/fast", "b", "t")
    assert not any(name.endswith((".py", ".bin")) for name in seen["files"])
