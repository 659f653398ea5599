"""Shared by all tests: Hypothesis profiles, the switch for long tests, no look-ups on a hub."""

import os

import pytest
from hypothesis import settings

settings.register_profile("dev", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Nothing in the tests may look for a model hub: a test that does fails at once instead of waiting.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-long", action="store_true", help="run the tests marked long as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-long"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
