"""The tree of errors, and what each tells a program that meets it."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from renkei import errors

CLASSES = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


def drawn_parents(picture: str) -> dict[str, str]:
    """By class, the one it hangs under in a picture of a tree."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in picture.splitlines():
        if found := re.match(r"([│ ]*)([├└]── )?(\w+Error)\b", line):
            depth = len(found[1]) // 4 + (found[2] is not None)
            path[depth:] = [found[3]]
            parents[found[3]] = path[depth - 1] if depth else "Exception"
    return parents


def test_the_drawn_tree_is_the_real_one() -> None:
    assert errors.__doc__ is not None
    assert drawn_parents(errors.__doc__) == {name: kind.__bases__[0].__name__ for name, kind in CLASSES.items()}


def test_red_twin_drawn_tree() -> None:
    assert errors.__doc__ is not None
    moved = errors.__doc__.replace("│   ├── LaunchError", "├── LaunchError")
    assert drawn_parents(moved) != drawn_parents(errors.__doc__)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_wrong_usage_ends_with_2_and_failure_with_1(name: str) -> None:
    assert CLASSES[name].exit_code == (2 if issubclass(CLASSES[name], errors.UsageError) else 1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("UsageError", ValueError), ("DeadlineError", TimeoutError), ("PeerLostError", RuntimeError)],
)
def test_errors_are_also_the_builtin_kind_they_are(name: str, kind: type[Exception]) -> None:
    assert issubclass(CLASSES[name], kind)


def test_a_failed_rank_is_told_with_its_traceback() -> None:
    error = errors.RankFailedError("rank 3 failed", rank=3, traceback_text="Traceback ...")
    assert (str(error), error.rank, error.traceback_text) == ("rank 3 failed", 3, "Traceback ...")


def check_travels(error: Exception) -> None:
    """An error is the same after a process pool, or a rank, has sent it."""
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_can_be_sent(name: str) -> None:
    own = {"rank": 3, "traceback_text": "Traceback ..."} if name == "RankFailedError" else {}
    error = CLASSES[name]("what, why, and the fix", **own)
    error.add_note("said by the user")
    check_travels(error)


def test_red_twin_an_error_that_can_not_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(errors.RankFailedError, "__reduce__")
    with pytest.raises(TypeError, match="rank"):
        check_travels(errors.RankFailedError("rank 3 failed", rank=3))
