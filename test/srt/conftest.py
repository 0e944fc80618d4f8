"""Pytest hooks, and the servers that tests share.

At most one tested server lives at a time, and it is kept until a test requests another configuration. Tests
that share one therefore stand next to each other. The reference server sleeps beside it.
"""

import importlib.abc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings

pytest.register_assert_rewrite("support")
os.environ["HF_HUB_OFFLINE"] = "1"  # without a network, each name that is no folder costs its client 20 s

from support.core_files import CORE  # noqa: E402
from support.servers import PLAIN_FLOAT32, Reference, Servers, plain_target  # noqa: E402

# The longest files, longest first: the workers of `make test` start them in this order.
LONGEST = (
    "test_rehearsal.py",
    "test_lossless_hybrid.py",
    "test_lossless.py",
    "test_target_families.py",
    "test_real_model.py",
    "test_stock_sglang.py",
    "test_documented_commands.py",
    "test_grammars.py",
    "test_sampled_sequences.py",
    "test_sampled_requests.py",
    "test_dflash.py",
    "test_published_formats.py",
    "test_kernel_comparisons.py",
)


# Property tests also run with `-m long`, on ten times the examples, in Triton's interpreter on some, and on a
# bare GPU on few.
settings.register_profile("short", max_examples=50, deadline=None)
settings.register_profile("some", max_examples=10, deadline=None)
settings.register_profile("few", max_examples=5, deadline=None)
settings.register_profile("long", max_examples=500, deadline=None)


class SGLangBlocker(importlib.abc.MetaPathFinder):
    """Import finder of `--core`: no core file may import SGLang, and a test that does is skipped."""

    is_collecting = True

    def find_spec(self, name, path=None, target=None) -> None:
        if name.partition(".")[0] == "sglang":
            if self.is_collecting:
                raise ModuleNotFoundError(f"{name} is imported by a file of the core lane", name=name)
            pytest.skip("needs SGLang")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", action="store_true", help="run what needs no SGLang, and block its import")


def pytest_configure(config: pytest.Config) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)  # of `make coverage`: this process saves when it ends
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("long" if config.option.markexpr == "long" else "short")
    if config.option.core:
        sys.meta_path.insert(0, SGLangBlocker())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.option.core and collection_path.is_file() and collection_path.name not in CORE:
        return True
    return None


def pytest_collection_finish() -> None:
    SGLangBlocker.is_collecting = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order files for parallel workers (long ones, others with servers, the rest); mark long properties."""
    if config.option.markexpr == "long":
        for item in items:
            if is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker("long")
    with_servers = {item.path for item in items if item.get_closest_marker("server")}

    def rank(item: pytest.Item) -> tuple[int, bool]:
        name = item.path.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), item.path not in with_servers

    items.sort(key=rank)


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    """The target alone, float32."""
    with plain_target(*PLAIN_FLOAT32) as reference:
        yield reference


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture(autouse=True)
def our_variables():
    """Restore our environment variables, which parsing a command line writes."""
    before = {name: value for name, value in os.environ.items() if name.startswith("SGLANG_DFLASH_")}
    yield
    for name in [name for name in os.environ if name.startswith("SGLANG_DFLASH_")]:
        del os.environ[name]
    os.environ.update(before)
