"""`save_pretrained` and `push_to_hub`, with the keywords of huggingface_hub's `ModelHubMixin`.

The mixin itself is no base class here: it would have to be imported with every model, and artifacts
need nothing but torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir import InputError
from ..ir.support.files import LARGE, plain_path, read_bytes
from ..ir.support.packages import require
from ..ir.support.scratch import write_text
from .card import model_card

if TYPE_CHECKING:
    from ..report import Report

CARD = "README.md"


class Publishing:
    """Base of `Model`: writing for the Hub."""

    if TYPE_CHECKING:
        recipe: Mapping[str, Any]
        report: Report | None

        def save(self, folder: str | Path) -> Path:
            """See `Model`."""

    def model_card(self, name: str) -> str:
        """A README that says what was made of which model, what it cost, and how to use it. name:
        of the repository, ``org/name``."""
        return model_card(self.report, self.recipe, name)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> str | None:
        """As `Model.save`, with a model card (an existing one stays) beside it.

        push_to_hub: publish it too, as `repo_id` (default: the folder's name); options: of
        `push_to_hub`. Returns the address of the commit, or None. Errors: as `save` and
        `push_to_hub`.
        """
        if options and not push_to_hub:
            raise InputError(f"save_pretrained: {min(options)} is for push_to_hub=True")
        folder = plain_path("save_pretrained", save_directory)
        name = repo_id or folder.resolve().name
        written = folder / CARD
        own = read_bytes(written, LARGE).decode(errors="replace") if written.is_file() else ""
        self.save(folder)
        write_text(written, own or self.model_card(name))
        return self.push_to_hub(name, **options) if push_to_hub else None

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Push model using graftwork.",
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        create_pr: bool | None = None,
    ) -> str:
        """Publish the artifact with a model card on the Hub; the address of the commit.

        repo_id: ``org/name``, which is made if there is none. branch: default: main. token: of the
        Hub; default: that of ``hf auth login``. Errors: `InputError` without huggingface_hub;
        huggingface_hub's own for what the Hub refuses.
        """
        require("huggingface_hub", "push_to_hub", "huggingface")
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        made = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            self.save_pretrained(folder, repo_id=made)
            commit = api.upload_folder(
                repo_id=made,
                repo_type="model",
                folder_path=folder,
                commit_message=commit_message,
                revision=branch,
                create_pr=create_pr,
            )
        return str(commit)
