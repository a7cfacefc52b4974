import random

import pytest


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().getrandbits(32)
    print(f"the random inputs of this test are of seed {seed}")
    return random.Random(seed)
