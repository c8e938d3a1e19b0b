"""Shared set-up: reproducible randomness, Hypothesis without time limits, ``--update``."""

from __future__ import annotations

import gc
import os
import platform
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from selection import DEAREST, RARE, mostly_long

settings.register_profile(
    "graftwork",
    deadline=None,
    max_examples=20,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("graftwork")

# The libraries hold millions of objects that never go: looking through them as often as Python does
# by itself is a tenth of the time of the suite.
gc.set_threshold(100_000, 20, 100)

# Torch remembers what ops make of fake tensors, which costs a third of a trace of two layers. (Of
# thirty it saves a twentieth.) The traces are the same; this is read when torch first traces.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

# Triton decides when it is imported whether kernels are compiled or interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update", action="store_true", help="rewrite the expectations in tests/cases/*.test"
    )
    parser.addoption(
        "--share", metavar="N/OF", help="of the tests marked long, run part N (from 0) of OF parts"
    )


@pytest.hookimpl(tryfirst=True)  # marks are looked at after this
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that workers end together; see `--share`, `RARE`."""
    for item in items:
        if item.nodeid.rpartition("/")[2] in RARE:
            item.add_marker(pytest.mark.long)
    place = {name: index for index, name in enumerate(DEAREST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    if config.option.share is None:
        return
    number, parts = map(int, config.option.share.split("/"))
    left = [i for i in items if i.get_closest_marker("long") and part_of(i.nodeid, parts) != number]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]


def part_of(test: str, parts: int) -> int:
    """The part in which a test runs: always the same, whatever other tests there are."""
    return zlib.crc32(test.encode()) % parts


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    """Whether expectations are to be rewritten."""
    return bool(request.config.getoption("--update"))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from the same random state, and leaves torch's switch for gradients on."""
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled(), "this test left gradients off"


@pytest.fixture(autouse=True)
def steady(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are whole, whatever steps take: how many are accepted does not depend on the machine.
    Tests marked `measured` are about policies that look at the time. Heads that nobody trained
    draft, to show what heads do, but in tests marked `untrained`, which are about that."""
    if request.node.get_closest_marker("untrained") is None:
        from graftwork.ir.plan import DecodePlan

        monkeypatch.setattr(DecodePlan, "untaught", False)
    if request.node.get_closest_marker("measured") is None:
        from graftwork.runtime.speculate.lengths.goodput import GoodputPolicy
        from graftwork.runtime.speculate.ready_chains import MeasuredChains, ReadyChains

        monkeypatch.setattr(GoodputPolicy, "_size", lambda policy: policy.most)
        monkeypatch.setattr(MeasuredChains, "size", ReadyChains.size)
        monkeypatch.setattr("graftwork.optimizing.draft_cost", lambda executable: None)


PROCESSORS = ["native", *(["x86-64", "haswell"] if platform.machine() == "x86_64" else [])]
"""Whose kernels run here: without vectors of eight, with them, and this processor's."""


def flags_for(processor: str) -> tuple[str, ...]:
    """The compiler's flags for a processor. Kernels of others than this one are optimised less:
    that takes two thirds of the time, and their bits are to be the same."""
    from graftwork.backends import cached_library

    if processor == "native":
        return cached_library.FLAGS
    others = {"-O3": "-O1", "-march=native": f"-march={processor}"}
    assert others.keys() <= set(cached_library.FLAGS)
    return tuple(others.get(flag, flag) for flag in cached_library.FLAGS)


@pytest.fixture(params=mostly_long(PROCESSORS, keep=PROCESSORS[:2]))
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Kernels for a processor."""
    from graftwork.backends import cached_library

    monkeypatch.setattr(cached_library, "FLAGS", flags_for(request.param))
    cached_library.library.cache_clear()
    yield request.param
    cached_library.library.cache_clear()


@pytest.fixture
def unused_port() -> int:
    """A port of this machine that nobody listens on."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
