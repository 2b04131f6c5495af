"""The training data: the shipped digits, and every way a folder of CIFAR-10 or MNIST files can be wrong.

The files are made here, a few images each, in the published formats.
"""

from __future__ import annotations

import gzip
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lucidnn.cli import data
from lucidnn.cli.data import CIFAR_BATCHES, IDX_FILES, DataError, enlarge, load
from lucidnn.core.errors import InvalidArgument

rng = np.random.default_rng(0)


# ---- the shipped digits ------------------------------------------------------------------------------------


def test_digits_have_the_shapes_types_and_scale_the_network_takes():
    digits = load()
    assert digits.name == "UCI digits" and digits.classes == 10
    assert digits.train_x.shape == (1438, 3, 32, 32) and digits.test_x.shape == (359, 3, 32, 32)
    assert digits.train_x.dtype == digits.test_x.dtype == np.float32
    assert digits.train_y.shape == (1438,) and digits.test_y.shape == (359,)
    assert digits.train_y.dtype == digits.test_y.dtype == np.int64
    assert digits.train_x.flags.c_contiguous and digits.test_x.flags.c_contiguous
    np.testing.assert_allclose(digits.train_x.mean(dtype=np.float64), 0, atol=1e-5)
    np.testing.assert_allclose(digits.train_x.std(dtype=np.float64), 1, atol=1e-5)
    assert (digits.train_x[:, 0] == digits.train_x[:, 2]).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_fifth_of_each_digit_is_held_out(seed):
    digits = load(seed=seed)
    held, kept = np.bincount(digits.test_y), np.bincount(digits.train_y)
    assert (np.abs(held - (held + kept) / 5) < 1).all()
    assert (held + kept).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_no_held_out_image_is_trained_on_and_none_is_lost():
    digits = load(seed=3)
    train = {x.tobytes() for x in np.round(digits.train_x, 4)}
    test = {x.tobytes() for x in np.round(digits.test_x, 4)}
    assert len(train) == 1438 and len(test) == 359 and not train & test


def test_the_seed_alone_decides_the_split():
    first, again, other = load(seed=1), load(seed=1), load(seed=2)
    np.testing.assert_array_equal(first.train_x, again.train_x)
    np.testing.assert_array_equal(first.test_y, again.test_y)
    assert not np.array_equal(first.test_x, other.test_x)


def test_a_negative_seed_is_an_error_that_says_so():
    with pytest.raises(InvalidArgument, match="seed: found -1"):
        load(seed=-1)


def test_enlarging_agrees_with_the_frameworks_bilinear_interpolation():
    torch = pytest.importorskip("torch")
    images = rng.normal(size=(5, 8, 8)).astype(np.float32)
    want = torch.nn.functional.interpolate(torch.from_numpy(images)[:, None], (32, 32), mode="bilinear")[:, 0]
    np.testing.assert_allclose(enlarge(images, 32), want.numpy(), atol=1e-6)


def test_a_one_pixel_image_is_enlarged_to_itself():
    np.testing.assert_array_equal(enlarge(np.full((2, 1, 1), 3, np.float32), 4), np.full((2, 4, 4), 3))


def test_reading_data_needs_no_torch():
    code = "import sys; from lucidnn.cli.data import load; load(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# ---- CIFAR-10 ----------------------------------------------------------------------------------------------


def batch(count: int = 4, first: int = 0) -> dict:
    pixels = np.arange(first, first + count * 3072).reshape(count, 3072) % 251
    return {"data": pixels.astype(np.uint8), "labels": [(first + i) % 10 for i in range(count)]}


def python2_pickle(content: dict) -> bytes:
    """The bytes Python 2 and its NumPy wrote: byte-string keys, ``numpy.core``, raw data as a byte string."""

    def string(raw: bytes) -> bytes:
        return b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)) + raw

    array = content["data"]
    number = b"J%s"
    out = b"\x80\x02}(" + string(b"data")
    out += b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b") + b"\x87R"
    out += b"(K\x01" + b"".join(number % struct.pack("<i", n) for n in array.shape) + b"\x86"
    out += b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xffJ"
    out += b"\xff\xff\xff\xffK\x00tb\x89" + string(array.tobytes()) + b"tb"
    return out + string(b"labels") + b"](" + b"".join(bytes([75, n]) for n in content["labels"]) + b"eu."


def cifar_folder(folder: Path, write=lambda content: pickle.dumps(content, protocol=2)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(CIFAR_BATCHES):
        (folder / name).write_bytes(write(batch(first=i)))
    return folder


WRITERS = {
    "as published, by Python 2": python2_pickle,
    **{f"Python 3, protocol {n}": lambda content, n=n: pickle.dumps(content, protocol=n) for n in (0, 2, 4, 5)},
    "byte-string keys": lambda content: pickle.dumps({k.encode(): v for k, v in content.items()}, protocol=2),
    "labels as an array": lambda content: pickle.dumps({**content, "labels": np.array(content["labels"])}),
    "column-major pixels": lambda content: pickle.dumps({**content, "data": np.asfortranarray(content["data"])}),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_cifar10_is_read_however_it_was_pickled(tmp_path, writer):
    cifar = load(cifar_folder(tmp_path, WRITERS[writer]))
    assert cifar.name == "CIFAR-10" and cifar.classes == 10
    assert cifar.train_x.shape == (20, 3, 32, 32) and cifar.test_x.shape == (4, 3, 32, 32)
    assert cifar.train_x.dtype == np.float32 and cifar.train_y.dtype == np.int64
    assert cifar.train_y[:8].tolist() == [0, 1, 2, 3, 1, 2, 3, 4] and cifar.test_y.tolist() == [5, 6, 7, 8]
    raw = np.concatenate([batch(first=i)["data"] for i in range(5)]).reshape(-1, 3, 32, 32).astype(np.float64)
    mean, deviation = raw.mean(axis=(0, 2, 3), keepdims=True), raw.std(axis=(0, 2, 3), keepdims=True)
    np.testing.assert_allclose(cifar.train_x, (raw - mean) / deviation, atol=1e-5)
    test = batch(first=5)["data"].reshape(-1, 3, 32, 32)
    np.testing.assert_allclose(cifar.test_x, (test - mean) / deviation, atol=1e-5)


def test_cifar10_is_found_in_the_folder_its_archive_unpacks_to(tmp_path):
    cifar_folder(tmp_path / "cifar-10-batches-py")
    assert load(str(tmp_path)).name == "CIFAR-10"


def test_a_constant_channel_does_not_divide_by_zero(tmp_path):
    folder = cifar_folder(tmp_path, lambda content: pickle.dumps({**content, "data": np.full((4, 3072), 7, np.uint8)}))
    assert (load(folder).train_x == 0).all()


def test_each_missing_cifar10_batch_is_named(tmp_path):
    for name in CIFAR_BATCHES:
        folder = cifar_folder(tmp_path)
        (folder / name).unlink()
        with pytest.raises(DataError, match=rf"/{name}: found nothing of that name; expected the six"):
            load(folder)


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


BAD_BATCHES = {
    "truncated": (lambda: pickle.dumps(batch())[:-100], "truncated or corrupt pickle"),
    "empty": (lambda: b"", "truncated or corrupt pickle"),
    "not a pickle": (lambda: b"<html>404</html>", "truncated or corrupt pickle"),
    "calls a function": (lambda: pickle.dumps(Evil()), r"asks for builtins\.print"),
    "imports a module": (lambda: b"cos\nsystem\n(S'true'\ntR.", r"asks for os\.system"),
    "foreign codec": (lambda: b"c_codecs\nencode\n(Vx\nVzlib\ntR.", "asks for the codec"),
    "array of a foreign class": (lambda: b"cnumpy.core.multiarray\n_reconstruct\n(NI0\nS'b'\ntR.", "foreign class"),
    "calls the array class": (lambda: b"cnumpy\nndarray\n((I9\ntI0\ntR.", "truncated or corrupt pickle"),
    "a list": (lambda: pickle.dumps([1, 2]), "found a pickled list"),
    "CIFAR-100": (lambda: pickle.dumps({"data": 0, "fine_labels": []}), "dictionary with 'data', 'fine_labels'"),
    "no keys": (lambda: pickle.dumps({}), "dictionary with no keys"),
    "no array": (lambda: pickle.dumps({**batch(), "data": [1]}), "'data' of list"),
    "wrong width": (lambda: pickle.dumps({**batch(), "data": np.zeros((4, 784), np.uint8)}), r"uint8 \(4, 784\)"),
    "wrong type": (lambda: pickle.dumps({**batch(), "data": np.zeros((4, 3072))}), r"float64 \(4, 3072\)"),
    "too few labels": (lambda: pickle.dumps({**batch(), "labels": [1, 2]}), "2 labels for 4 images"),
    "label too large": (lambda: pickle.dumps({**batch(), "labels": [0, 1, 2, 10]}), "labels from 0 to 10"),
    "negative label": (lambda: pickle.dumps({**batch(), "labels": [0, 1, 2, -1]}), "labels from -1 to 2"),
    "fractional labels": (lambda: pickle.dumps({**batch(), "labels": [0.5] * 4}), "not a row of whole numbers"),
    "ragged labels": (lambda: pickle.dumps({**batch(), "labels": [[1], [2, 3], [], []]}), "not a row of whole numbers"),
    "no images": (lambda: pickle.dumps(batch(0)), "labels that are not a row|0 labels for 0 images"),
}


@pytest.mark.parametrize("fault", BAD_BATCHES)
def test_a_bad_cifar10_batch_ends_in_one_line(tmp_path, capsys, fault):
    make, message = BAD_BATCHES[fault]
    folder = cifar_folder(tmp_path)
    (folder / "data_batch_3").write_bytes(make())
    with pytest.raises(DataError, match=message) as caught:
        load(folder)
    line = str(caught.value)
    assert "data_batch_3: found " in line and "; expected a CIFAR-10 python batch" in line and "\n" not in line
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_a_cifar10_batch_cut_anywhere_is_an_error(tmp_path, cut):
    folder = cifar_folder(tmp_path)
    whole = (folder / "test_batch").read_bytes()
    (folder / "test_batch").write_bytes(whole[: len(whole) * cut // 200])
    with pytest.raises(DataError, match="test_batch: found a truncated or corrupt pickle"):
        load(folder)


def test_a_batch_that_is_a_folder_is_named(tmp_path):
    folder = cifar_folder(tmp_path)
    (folder / "test_batch").unlink()
    (folder / "test_batch").mkdir()
    with pytest.raises(DataError, match="test_batch"):
        load(folder)


# ---- MNIST -------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist_arrays() -> dict[str, np.ndarray]:
    arrays = {}
    for name in IDX_FILES:
        count = 6 if name.startswith("train") else 3
        pixels, labels = rng.integers(0, 256, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8)
        arrays[name] = pixels if "idx3" in name else labels
    return arrays


def mnist_folder(folder: Path, packed: bool = False, dotted: bool = False) -> tuple[Path, dict[str, np.ndarray]]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = mnist_arrays()
    for name, array in arrays.items():
        name = name.replace("-idx", ".idx") if dotted else name
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return folder, arrays


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("dotted", [False, True], ids=["dash", "dot"])
def test_mnist_is_read_padded_and_normalised(tmp_path, packed, dotted):
    folder, arrays = mnist_folder(tmp_path, packed, dotted)
    mnist = load(folder)
    assert mnist.name == "MNIST" and mnist.classes == 10
    assert mnist.train_x.shape == (6, 3, 32, 32) and mnist.test_x.shape == (3, 3, 32, 32)
    assert mnist.train_y.tolist() == [0, 1, 2, 3, 4, 5] and mnist.test_y.tolist() == [0, 1, 2]
    raw = np.pad(arrays[IDX_FILES[0]].astype(np.float64), ((0, 0), (2, 2), (2, 2)))
    for channel in range(3):
        np.testing.assert_allclose(mnist.train_x[:, channel], (raw - raw.mean()) / raw.std(), atol=1e-5)
    test = np.pad(arrays[IDX_FILES[2]].astype(np.float64), ((0, 0), (2, 2), (2, 2)))
    np.testing.assert_allclose(mnist.test_x[:, 1], (test - raw.mean()) / raw.std(), atol=1e-5)


def test_mnist_is_found_where_torchvision_puts_it(tmp_path):
    mnist_folder(tmp_path / "MNIST" / "raw")
    assert load(tmp_path).name == "MNIST"


@pytest.mark.parametrize("name", IDX_FILES)
def test_each_missing_mnist_file_is_named(tmp_path, name):
    folder, _ = mnist_folder(tmp_path)
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"/{name}: found nothing of that name, packed .* or not; expected MNIST's"):
        load(folder)


images = np.zeros((6, 28, 28), np.uint8)
BAD_IDX = {
    "empty": ("train-images-idx3-ubyte", b"", "found 0 bytes in all; .* whose header has 16"),
    "header cut": ("train-labels-idx1-ubyte", b"\0\0\x08\x01\0", "found 5 bytes in all; .* whose header has 8"),
    "body cut": ("train-images-idx3-ubyte", idx(images)[:-1], "found 4703 bytes after the header; expected the 4704"),
    "body too long": ("train-images-idx3-ubyte", idx(images) + b"x", "found more than 4704 bytes after"),
    "labels for images": ("train-images-idx3-ubyte", idx(np.zeros(20, np.uint8)), "starts with 00 00 08 01"),
    "images for labels": ("train-labels-idx1-ubyte", idx(images), "starts with 00 00 08 03; .*: 00 00 08 01"),
    "another type": ("train-labels-idx1-ubyte", b"\0\0\x0d\x01" + bytes(28), "starts with 00 00 0d 01"),
    "a web page": ("train-labels-idx1-ubyte", b"<!DOCTYPE html>", "starts with 3c 21 44 4f"),
    "another size": ("train-images-idx3-ubyte", idx(np.zeros((6, 20, 20), np.uint8)), "images of 20x20 pixels"),
    "no images": ("train-images-idx3-ubyte", idx(images[:0]), "announces nothing"),
    "absurd size": ("train-images-idx3-ubyte", b"\0\0\x08\x03" + b"\xff" * 12, "announces 79,"),
    "too few labels": ("train-labels-idx1-ubyte", idx(np.zeros(5, np.uint8)), "found 5 labels for 6 images"),
    "label too large": ("train-labels-idx1-ubyte", idx(np.full(6, 11, np.uint8)), "found labels from 11 to 11"),
    "not gzip": ("train-labels-idx1-ubyte.gz", b"\0\0\x08\x01", "truncated or corrupt gzip file"),
    "gzip cut": ("train-images-idx3-ubyte.gz", gzip.compress(rng.bytes(9000))[:-4000], "starts with"),
    "gzip body cut": (
        "train-images-idx3-ubyte.gz",
        gzip.compress(idx(rng.integers(0, 256, (6, 28, 28), np.uint8)))[:-1000],
        "truncated or corrupt gzip file",
    ),
    "gzip checksum": (
        "train-labels-idx1-ubyte.gz",
        gzip.compress(idx(np.arange(6, dtype=np.uint8)))[:-8] + bytes(8),
        "truncated or corrupt gzip file",
    ),
}


@pytest.mark.parametrize("fault", BAD_IDX)
def test_a_bad_mnist_file_ends_in_one_line(tmp_path, fault):
    name, content, message = BAD_IDX[fault]
    folder, _ = mnist_folder(tmp_path)
    (folder / name.removesuffix(".gz")).unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load(folder)
    line = str(caught.value)
    assert f"{name}: found " in line and "; expected " in line and "\n" not in line


# ---- what is no data at all --------------------------------------------------------------------------------


def test_a_missing_folder_is_named_with_what_would_do(tmp_path):
    with pytest.raises(DataError, match="nowhere: found nothing of that name; expected a folder with CIFAR-10's"):
        load(tmp_path / "nowhere")


def test_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"notes.txt: found a file; expected a folder"):
        load(tmp_path / "notes.txt")


def test_an_archive_is_to_be_unpacked(tmp_path):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"x")
    with pytest.raises(DataError, match="unpack the archive first"):
        load(tmp_path / "cifar-10-python.tar.gz")


def test_an_empty_folder_and_one_of_other_things(tmp_path):
    with pytest.raises(DataError, match="found an empty folder"):
        load(tmp_path)
    for name in "dbcae":
        (tmp_path / name).touch()
    with pytest.raises(DataError, match="found a folder holding a, b, c and 2 more; expected a folder with"):
        load(tmp_path)


def test_a_name_that_no_file_can_have(tmp_path):
    with pytest.raises(DataError, match=r"found an unreadable folder \(File name too long\)"):
        load(tmp_path / ("x" * 300))


def test_a_data_error_is_a_value_error_and_survives_pickling():
    error = DataError("a", "b", "c")
    assert isinstance(error, ValueError) and str(pickle.loads(pickle.dumps(error))) == "a: found b; expected c"


def test_the_digits_file_is_small_and_its_source_is_named():
    folder = Path(data.__file__).parents[1] / "data"
    assert (folder / "digits.npz").stat().st_size < 100_000
    text = (folder / "README.md").read_text()
    assert "10.24432/C50P49" in text and "CC BY 4.0" in text
