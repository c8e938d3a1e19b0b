"""lm-eval's tasks for a `Model`: likelihoods and texts by the path that generates.

Gao et al., "A framework for few-shot language model evaluation" (EleutherAI, 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..chat.text_stream import StopTexts, cut
from ..ir import InputError

if TYPE_CHECKING:
    from ..model import Model

Scores = Mapping[str, Mapping[str, tuple[float, float | None]]]

MOST_NEW = 256
"""New tokens of an answer, where a task says nothing; lm-eval's own default."""


class Tasks:
    """Tasks by name. Errors: `InputError` without lm-eval, or for a name that it does not know."""

    def __init__(
        self, names: Sequence[str], limit: int | None, shots: int | None, folder: Path | None
    ) -> None:
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise InputError(
                f"tasks need lm-eval ({error}): pip install 'graftwork[eval]'"
            ) from error
        self.names, self.limit, self.shots = list(names), limit, shots
        self.manager = TaskManager(include_path=None if folder is None else str(folder))
        known = self.manager.match_tasks(self.names)
        unknown = [name for name in self.names if name not in known]
        if unknown:
            raise InputError(
                f"lm-eval knows no task {', '.join(unknown)}; `lm-eval ls tasks` lists them, and "
                f"--task-folder names a folder of yours"
            )

    def scores(self, model: Model, progress: Callable[[str], None]) -> Scores:
        """By task and metric, a value and its standard error."""
        from lm_eval import simple_evaluate

        results = simple_evaluate(
            model=lm_of(model, progress),
            tasks=self.names,
            task_manager=self.manager,
            num_fewshot=self.shots,
            limit=self.limit,
            log_samples=False,
            bootstrap_iters=1000,
        )["results"]
        return {name: _metrics(results[name]) for name in self.names}


def _metrics(found: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Values of "metric,filter", without their standard errors' own entries."""
    scores = {}
    for key, value in found.items():
        metric, _, kind = key.partition(",")
        if not isinstance(value, float) or metric.endswith("_stderr"):
            continue
        error = found.get(f"{metric}_stderr,{kind}")
        name = metric if kind in ("", "none") else f"{metric}, {kind}"
        scores[name] = (value, error if isinstance(error, float) else None)
    return scores


def lm_of(model: Model, progress: Callable[[str], None] = lambda stage: None) -> Any:
    """A model as lm-eval's ``model=``; needs its tokenizer, and lm-eval."""
    from lm_eval.api.model import TemplateLM

    info = model.program.info

    class Graftwork(TemplateLM):  # type: ignore[misc, unused-ignore]  # untyped where not installed
        """Texts longer than the context lose their beginning, as in lm-eval's own models."""

        tokenizer_name = model.program.name

        @property
        def eot_token_id(self) -> int:
            if not info.eos:
                raise InputError(f"{model.program.name} has no end token, which tasks need")
            return info.eos[0]

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if info.bos is None else info.bos

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return model.tokenizer.encode(
                string, add_special_tokens=add_special_tokens is not False
            ).ids

        def _loglikelihood_tokens(
            self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any
        ) -> list[tuple[float, bool]]:
            answers = []
            for number, (_, context, continuation) in enumerate(requests):
                progress(f"tasks, {100 * number // len(requests)}% of the likelihoods")
                answers.append(likelihood(model, context, continuation))
            return answers

        def loglikelihood_rolling(
            self, requests: Sequence[Any], disable_tqdm: bool = False
        ) -> list[float]:
            from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

            totals = []
            for request in requests:
                (text,) = request.args
                windows = get_rolling_token_windows(
                    token_list=self.tok_encode(text, add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=info.context - 1,
                    context_len=1,
                )
                parts = map(make_disjoint_window, windows)
                totals.append(sum(likelihood(model, *part)[0] for part in parts))
            return totals

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            answers = []
            for number, request in enumerate(requests):
                progress(f"tasks, {100 * number // len(requests)}% of the answers")
                context, asked = request.args
                answers.append(answer(model, self.tok_encode(context), dict(asked)))
            return answers

        def apply_chat_template(
            self, chat_history: Sequence[Any], add_generation_prompt: bool = True
        ) -> str:
            text = model.apply_chat_template(
                list(chat_history),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                continue_final_message=not add_generation_prompt,
            )
            assert isinstance(text, str)
            return text

    return Graftwork()


def likelihood(
    model: Model, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    """log P(continuation | context) in nats, and whether it is what greedy decoding would say. Of
    what exceeds the model's context the beginning is left out."""
    ids = [*context, *continuation][-(model.program.info.context - 1) :]
    count = min(len(continuation), len(ids) - 1)
    logits = model([ids])[0, -count - 1 : -1].float().log_softmax(-1)
    wanted = torch.tensor(ids[-count:])
    said = logits.gather(1, wanted[:, None])[:, 0]
    return float(said.sum()), bool((logits.argmax(-1) == wanted).all())


def answer(model: Model, ids: Sequence[int], asked: dict[str, Any]) -> str:
    """What the model writes after a prompt, up to the first of the task's ``until``."""
    until = asked.pop("until", [])
    stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    most = asked.pop("max_gen_toks", MOST_NEW)
    asked.pop("max_length", None)
    sampled = bool(asked.pop("do_sample", False)) and asked.get("temperature", 1.0) > 0
    if not sampled:
        asked.pop("temperature", None)
    room = model.program.info.context - most
    prompt = list(ids)[-room:]

    found = model.generate(
        [prompt],
        max_new_tokens=most,
        do_sample=sampled,
        stopping_criteria=StopTexts(model.tokenizer.backend_tokenizer, stops, len(prompt)),
        **asked,
    )
    return cut(model.tokenizer.decode(found[0, len(prompt) :]), stops)[0]
