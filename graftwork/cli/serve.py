"""`graftwork serve`: an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import err, progress
from .options import (
    AnyModel,
    DataOption,
    DraftOption,
    MaybeRecipe,
    SetOption,
    TargetOption,
    TemplateOption,
    require,
    require_tokenizer,
    template_text,
)

# Late imports: torch takes seconds, and the extra `serve` may not be installed.

if TYPE_CHECKING:
    from ..ir import ModelInfo

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    model: AnyModel,
    recipe: MaybeRecipe = None,
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    draft: DraftOption = [],  # noqa: B006
    target: TargetOption = None,
    data: DataOption = None,
    host: Annotated[str, typer.Option(help="Other than loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients (default: the path's).")
    ] = None,
    template: TemplateOption = None,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Requests decoded at once.")] = 8,
    queue: Annotated[
        int, typer.Option(min=1, help="Requests that may wait; more are answered 429.")
    ] = 64,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a request, new ones included (default: the model's)."),
    ] = None,
    chunk: Annotated[
        int, typer.Option(min=1, help="Tokens of prompts that are read between two steps.")
    ] = 64,
    keep: Annotated[
        int, typer.Option(min=0, help="MB of copies of earlier texts, for prompts that begin so.")
    ] = 256,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Of a message, where a request does not say.")
    ] = 1024,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a request may take, waiting included.")
    ] = 600.0,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request.")] = 4 * 2**20,
    pooling: Annotated[
        str, typer.Option(help="Of embeddings: mean of the tokens' states, or last.")
    ] = "mean",
    learn: Annotated[
        Path | None,
        typer.Option(
            help="New folder in which the drafter's trained weights go on learning from the texts "
            "that are written.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the clients' key (default: $GRAFTWORK_API_KEY, if set)."),
    ] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API, to many clients at once."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    require(not missing, f"serve needs {', '.join(missing)}: pip install 'graftwork[serve]'")
    from ..serving.run import address_of, listen, read_key

    key, chats = read_key(api_key_file), template_text(template)
    listening = listen(host, port, key)  # before the model is loaded, which takes long
    with listening:
        with progress() as show:
            show("load torch")
            from ..serving.app import app_of
            from ..serving.run import serve as run
            from ..serving.service import Service
            from .open_model import open_model

            def known(info: ModelInfo, assets: Mapping[str, Path], room: bool) -> None:
                require_tokenizer(model, assets, "serve")

            settings = [*set_, *draft]
            opened = open_model(
                model, recipe, settings, target, show, data=data, known=known, runs=True
            )
            require_tokenizer(model, opened.program.assets, "serve")  # of an artifact, too
            show("compile")
            service = Service(
                opened,
                name or Path(model).resolve().name,
                usual=max_new_tokens,
                seconds=timeout,
                template=chats,
                pooling=pooling,
                learn=learn,
                slots=slots,
                queue=queue,
                chunk=chunk,
                context=context,
                keep=keep << 20,
            )
            app = app_of(service, key=key, most=max_body)
        err.print(
            f"{service.name} on http://{address_of(listening)}/v1: {slots} requests at once, of up "
            f"to {service.engine.context} tokens",
            markup=False,
            soft_wrap=True,
        )
        run(app, listening)
