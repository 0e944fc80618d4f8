"""Pytest hooks, and the servers that tests share.

At most one tested server lives at a time, and it is kept until a test requests another configuration. Tests
that share one therefore stand next to each other. The reference server sleeps beside it.
"""

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("support")

from support.servers import PLAIN_FLOAT32, Reference, Servers, plain_target  # noqa: E402

# Files that take minutes, longest first: the workers of `make test` start them in this order.
LONGEST = (
    "test_lossless.py",
    "test_acceptance_profiles.py",
    "test_sampled_requests.py",
    "test_seeds.py",
    "test_dflash.py",
    "test_sampled_sequences.py",
    "test_disaggregation.py",
    "test_lossless_hybrid.py",
    "test_penalties.py",
    "test_target_families.py",
    "test_ranks.py",
    "test_startup_errors.py",
    "test_rehearsal.py",
    "test_stock_sglang.py",
    "test_doctor.py",
    "test_copy_ahead_scheduled.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files for parallel workers: long ones, others with servers, the rest."""
    with_servers = {item.path for item in items if item.get_closest_marker("server")}

    def rank(item: pytest.Item) -> tuple[int, bool]:
        name = item.path.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), item.path not in with_servers

    items.sort(key=rank)


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    """The target alone, float32."""
    with plain_target(*PLAIN_FLOAT32, "--max-total-tokens", "32768") as reference:
        yield reference


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()
