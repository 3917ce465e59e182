"""Reading MNIST's format: whole files give their values, all others an error of one line that names the file."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from renkei.data.datasets import mnist_like, read_idx
from renkei.errors import UsageError
from unit.data import idx_files

NAME = "train-images-idx3-ubyte"
VALUES = idx_files.images(3, side=2)
WHOLE = idx_files.encode(VALUES)


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def check_refused(folder: Path, call: Callable[[], object], name: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert str(folder / name) in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


# -- one file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (0, 28, 28), (1, 1, 1, 1)])
@pytest.mark.parametrize("zipped", [False, True])
def test_values_of_any_shape_come_back(tmp_path: Path, shape: tuple[int, ...], zipped: bool) -> None:
    values = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    data = idx_files.encode(values)
    (tmp_path / (f"{NAME}.gz" if zipped else NAME)).write_bytes(gzip.compress(data) if zipped else data)
    found = read_idx(tmp_path, NAME)
    assert found.dtype == np.uint8
    assert np.array_equal(found, values)
    found[...] = 0  # a copy that can be written to


NO_IDX = "is no IDX file"
PLAIN = {
    "empty": (b"", NO_IDX),
    "of two bytes": (WHOLE[:2], NO_IDX),
    "with the wrong magic number": (damaged(WHOLE, 1), NO_IDX),
    "of floats": (damaged(WHOLE, 2), NO_IDX),
    "without sizes": (WHOLE[:9], "cut short"),
    "without values": (WHOLE[:16], "has 0 values where its header says [3, 2, 2]"),
    "cut short by a byte": (WHOLE[:-1], "has 11 values where its header says [3, 2, 2]"),
    "a byte too long": (WHOLE + b"\0", "has 13 values where its header says [3, 2, 2]"),
    "with enormous sizes": (WHOLE[:4] + b"\xff" * 12 + WHOLE[16:], "cut short"),
    "with sizes whose product is 2^64": (WHOLE[:4] + b"\0\1\0\0" + 2 * b"\1\0\0\0", "cut short"),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_a_file_is_refused_that_is(tmp_path: Path, kind: str) -> None:
    data, reason = PLAIN[kind]
    (tmp_path / NAME).write_bytes(data)
    check_refused(tmp_path, lambda: read_idx(tmp_path, NAME), NAME, reason)


ZIPPED = gzip.compress(WHOLE, mtime=0)
DAMAGED = {
    "cut short": (ZIPPED[:-9], "can't be read"),
    "not gzipped at all": (WHOLE, "can't be read"),
    "empty": (b"", NO_IDX),
    "damaged in its values": (damaged(ZIPPED, 12), "can't be read"),
    "damaged in its checksum": (damaged(ZIPPED, len(ZIPPED) - 8), "can't be read"),
    "whole but of a file that isn't": (gzip.compress(WHOLE[:-1]), "cut short"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_gzipped_file_is_refused_that_is(tmp_path: Path, kind: str) -> None:
    data, reason = DAMAGED[kind]
    (tmp_path / f"{NAME}.gz").write_bytes(data)
    check_refused(tmp_path, lambda: read_idx(tmp_path, NAME), f"{NAME}.gz", reason)


def test_a_missing_file_and_a_folder_in_its_place_are_refused(tmp_path: Path) -> None:
    check_refused(tmp_path, lambda: read_idx(tmp_path, NAME), NAME, f"is missing, and so is {NAME}.gz")
    (tmp_path / NAME).mkdir()
    check_refused(tmp_path, lambda: read_idx(tmp_path, NAME), NAME, "Is a directory")


@pytest.mark.parametrize("at", range(len(ZIPPED)))
def test_no_damaged_byte_of_a_gzipped_file_is_more_than_an_error_of_one_line(tmp_path: Path, at: int) -> None:
    (tmp_path / f"{NAME}.gz").write_bytes(damaged(ZIPPED, at))
    found: object
    try:
        found = read_idx(tmp_path, NAME)
    except UsageError as error:
        found = str(error)
    if isinstance(found, str):
        assert str(tmp_path / NAME) in found
        assert "\n" not in found
    else:
        assert np.array_equal(found, VALUES)  # the byte tells the time, or the system that wrote the file


# -- the four files of a dataset ----------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [False, True])
def test_a_dataset_is_normalized_by_its_training_set(tmp_path: Path, zipped: bool) -> None:
    training, test = mnist_like([idx_files.write(tmp_path / "data", 50, 20, zipped=zipped)])
    assert training.images.shape == (50, 1, 28, 28)
    assert test.labels.tolist() == idx_files.labels(20).tolist()
    pixels = torch.from_numpy(idx_files.images(50)).double()
    expected = (torch.from_numpy(idx_files.images(20)).double() - pixels.mean()) / pixels.std(correction=0)
    torch.testing.assert_close(test.images.squeeze(1).double(), expected, rtol=1e-5, atol=1e-5)


def test_the_first_folder_that_exists_counts(tmp_path: Path) -> None:
    folders = [tmp_path / "missing", idx_files.write(tmp_path / "a", 5, 3), idx_files.write(tmp_path / "b", 6, 3)]
    assert len(mnist_like(folders)[0]) == 5


def test_no_folder_is_an_error_that_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no data at .*x or .*y; give a folder with train-images-idx3-ubyte\(.gz\)"):
        mnist_like([tmp_path / "x", tmp_path / "y"])


MISFITS = {
    "labels in the place of images": (NAME, idx_files.labels(5), "images of shape [5]"),
    "a label too few": ("train-labels-idx1-ubyte", idx_files.labels(4), "labels of shape [4]"),
    "no images": ("t10k-images-idx3-ubyte", idx_files.images(0), "images of shape [0, 28, 28]"),
    "an eleventh class": ("t10k-labels-idx1-ubyte", [0, 10, 3], "a class 10"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_files_that_do_not_fit_one_another_are_refused(tmp_path: Path, kind: str) -> None:
    name, values, reason = MISFITS[kind]
    folder = idx_files.write(tmp_path / "data", 5, 3)
    (folder / name).write_bytes(idx_files.encode(values))
    check_refused(folder, lambda: mnist_like([folder]), name.split("-")[0], reason)


def test_red_twin_damage_that_is_told_without_the_files_name(tmp_path: Path) -> None:
    def read() -> None:
        raise UsageError("a file can't be read")

    with pytest.raises(AssertionError):
        check_refused(tmp_path, read, NAME, "can't be read")
