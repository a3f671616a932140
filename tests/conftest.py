"""Settings of the whole test session."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator

import pytest
import torch

from tests.helpers import ranks

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than some seconds a test, or four processes and more")
    config.addinivalue_line("markers", "gpu: needs a GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """End the fork server of the ranks with the session."""
    yield
    ranks.shutdown()
