"""What every test is held to: it leaves no process, thread, port, shared memory or temporary folder behind."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator

import pytest

import leaks


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of these tests, and of the processes they start, are apart from everybody else's."""
    leaks.adopt_orphans()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("RENKEI_TUNING", "")  # what was measured on this machine is no part of the tests
        yield


_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep whether the test passed, for the fixture below."""
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(_own_temporary_folder: None, request: pytest.FixtureRequest) -> Iterator[None]:
    before = leaks.take_snapshot()
    yield
    # what a failed test leaves behind follows from the failure, which pytest still holds with all its objects
    found = leaks.find_leaks(before) if request.node.stash.get(_PASSED, False) else []
    leaks.end_children(before)
    leaks.reap_orphans()
    if found:
        pytest.fail("the test left behind\n" + "\n".join(found), pytrace=False)
