"""Fixtures of the shim tests: the emulated library, built once and cached by source hash."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from shim_driver import Shim


@pytest.fixture(scope="session")
def library() -> Shim:
    return Shim.build()


@pytest.fixture
def shim(library: Shim) -> Shim:
    """The library in its default schedule, whatever the test before chose."""
    library.configure()
    return library
