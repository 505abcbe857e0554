"""The running product: real Ray, real sockets, the real small model.

One ``headrace up`` serves most tests; those that need another start their own with ``start_up``.
"""

from collections.abc import Generator

import pytest
from product import Up, start_up


@pytest.fixture(scope="session")
def up() -> Generator[Up]:
    with start_up("--slots", "4") as up:
        yield up
