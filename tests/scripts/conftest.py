from pathlib import Path

import pytest

from models.llama.model import Llama


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Llama]:
    """The folder with run, hf and tied (small_trained.train_small), and the model that the first two hold."""
    from tests.scripts.small_trained import train_small  # Here, as it imports much that other tests do not need.

    folder = tmp_path_factory.mktemp("trained")
    return folder, train_small(folder)
