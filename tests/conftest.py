"""Shared by all tests: Hypothesis profiles, the switch for long tests, no look-ups on a hub."""

import gc
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


LONG_TIMEOUT_S = 3600
# Files of few and long tests: begun first, so that no process waits for the other one in the end.
LONG_FILES = ("test_real_model.py", "test_workflows_quickstart.py", "test_workflows_readme.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    if config.getoption("--run-long"):
        for item in items:  # what takes a minute takes many on a busy machine, and is no less true there
            if item.get_closest_marker("long") or item.get_closest_marker("sampled"):
                item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported for all tests lives to the end. Otherwise each full collection looks at all of it:
    accelerate collects after every stage of a fine-tuning, half of the time of those tests."""
    gc.collect()
    gc.freeze()
