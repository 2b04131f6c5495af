"""The training example's data: shipped handwritten digits, a CIFAR-10 folder or a folder of MNIST idx files.

Whatever the source, the network gets N x 3 x 32 x 32 float32 images whose training part has mean 0 and
variance 1. The shipped digits are 8x8: they are enlarged by bilinear interpolation, whose two passes are two
small matrix products, and a fifth of each class is held out for testing. CIFAR-10 and MNIST keep their own
test parts; MNIST's 28x28 images get a two-pixel border.

Files are not trusted. A CIFAR-10 batch is a pickle, so it is read by an unpickler that knows how to rebuild
NumPy arrays and nothing else; an idx file is read to the length that its header announces. Whatever is
missing, foreign, cut short or corrupt ends in a `DataError` of one line: the file, what was found, what was
expected.

Cost: the digits take a few tens of milliseconds and 22 MB, CIFAR-10 and MNIST about 0.8 GB (float32, three
channels). Nothing here imports torch.
"""

from __future__ import annotations

import gzip
import math
import pickle
import zlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from lucidnn.core.errors import InvalidArgument, LucidnnError

SIDE = 32
CLASSES = 10
HELD_OUT = 5  # one image in so many is for testing
CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
ACCEPTED = (
    "a folder with CIFAR-10's python batches (data_batch_1 to data_batch_5, test_batch) "
    "or MNIST's idx files (train-images-idx3-ubyte[.gz] and its three companions)"
)


class DataError(LucidnnError, ValueError):
    """The data asked for cannot be used.

    Parameters
    ----------
    path : str or Path
        The file or folder at fault.
    found : str
        What is wrong with it.
    expected : str
        What would be right.

    Examples
    --------
    >>> print(DataError("mnist/train-images-idx3-ubyte", "nothing of that name", "MNIST's training images"))
    mnist/train-images-idx3-ubyte: found nothing of that name; expected MNIST's training images
    """

    def __init__(self, path: str | Path, found: str, expected: str):
        super().__init__(f"{path}: found {found}; expected {expected}")
        self.path, self.found, self.expected = path, found, expected

    def __reduce__(self):
        return type(self), (self.path, self.found, self.expected)


@dataclass(frozen=True)
class Dataset:
    """Images and labels, ready for the network.

    Attributes
    ----------
    train_x, test_x : ndarray of float32, N x 3 x 32 x 32
        Images, contiguous, normalised with the training part's mean and deviation.
    train_y, test_y : ndarray of int64, N
        Labels from 0 to ``classes - 1``.
    name : str
        What the data is, for a report.
    classes : int
        How many classes there are.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    name: str
    classes: int = CLASSES


def load(path: str | Path | None = None, seed: int = 0) -> Dataset:
    """Read the training example's data.

    Parameters
    ----------
    path : str, Path or None
        A folder of CIFAR-10 python batches or of MNIST idx files; None for the shipped digits.
    seed : int
        Chooses which fifth of the shipped digits is held out and the order of the rest. Unused with `path`:
        those sets have a test part of their own.

    Returns
    -------
    Dataset
        float32 images N x 3 x 32 x 32 and int64 labels.

    Raises
    ------
    DataError
        The folder or a file in it is missing, foreign, cut short or corrupt.
    InvalidArgument
        A negative seed.

    Examples
    --------
    >>> data = load(seed=1)
    >>> data.train_x.shape, data.test_x.shape, data.train_x.dtype
    ((1438, 3, 32, 32), (359, 3, 32, 32), dtype('float32'))
    """
    if path is None:
        if seed < 0:
            raise InvalidArgument("seed", seed, "a whole number, 0 or more")
        return _digits(seed)
    folder = Path(path).expanduser()
    try:
        return _folder(folder)
    except OSError as error:
        raise DataError(folder, f"an unreadable folder ({error.strerror})", ACCEPTED) from None


def _folder(folder: Path) -> Dataset:
    if not folder.exists():
        raise DataError(folder, "nothing of that name", ACCEPTED)
    if not folder.is_dir():
        hint = "; unpack the archive first" if folder.name.endswith((".tar.gz", ".tgz", ".tar", ".zip")) else ""
        raise DataError(folder, "a file", ACCEPTED + hint)
    for place in (folder, folder / "cifar-10-batches-py"):
        if any((place / name).exists() for name in CIFAR_BATCHES):
            return _cifar10(place)
    for place in (folder, folder / "MNIST" / "raw"):
        if any(_idx_path(place, name) for name in IDX_FILES):
            return _mnist(place)
    held = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(held[:3]) + (f" and {len(held) - 3} more" if len(held) > 3 else "")
    raise DataError(folder, f"a folder holding {shown}" if held else "an empty folder", ACCEPTED)


# ---- the shipped digits ------------------------------------------------------------------------------------


def _digits(seed: int) -> Dataset:
    with resources.files("lucidnn").joinpath("data/digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    test = _stratified_fifth(labels, seed)
    train = np.random.default_rng(seed).permutation(np.setdiff1d(np.arange(len(labels)), test))
    pixels = enlarge(images.astype(np.float32), SIDE)[:, None]
    parts = _normalised(pixels[train], pixels[test])
    return Dataset(parts[0], labels[train].astype(np.int64), parts[1], labels[test].astype(np.int64), "UCI digits")


def _stratified_fifth(labels: np.ndarray, seed: int) -> np.ndarray:
    """Pick a fifth of the indices: of each class its share, of the whole exactly a fifth, rounded down."""
    generator = np.random.default_rng((seed, HELD_OUT))
    members = [generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    shares = [len(m) // HELD_OUT for m in members]
    # What rounding down lost goes, one each, to the classes that lost most.
    lost = np.argsort([-(len(m) % HELD_OUT) for m in members], kind="stable")
    for label in lost[: len(labels) // HELD_OUT - sum(shares)]:
        shares[label] += 1
    return np.sort(np.concatenate([m[:share] for m, share in zip(members, shares, strict=True)]))


def enlarge(images: np.ndarray, side: int) -> np.ndarray:
    """Enlarge square images bilinearly, with pixel centres at half-integers and the border repeated outwards.

    Parameters
    ----------
    images : ndarray of float32, N x H x H
    side : int
        Height and width of the result.

    Returns
    -------
    ndarray of float32, N x side x side

    Examples
    --------
    >>> enlarge(np.array([[[0, 4], [0, 4]]], np.float32), 4)[0, 0]
    array([0., 1., 3., 4.], dtype=float32)
    """
    size = images.shape[-1]
    centre = np.clip((np.arange(side) + 0.5) * size / side - 0.5, 0, size - 1)
    left = np.minimum(centre.astype(int), max(size - 2, 0))
    weights = np.zeros((side, size), np.float32)
    weights[np.arange(side), left] = 1 - (centre - left)
    weights[np.arange(side), np.minimum(left + 1, size - 1)] += centre - left
    return weights @ images @ weights.T


def _normalised(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both parts as float32 N x 3 x 32 x 32, by the training part's mean and deviation per channel."""
    # Sums in float64, since float32 sums over millions of pixels drift; by slices, so that no copy is large.
    total, squares = np.zeros(train.shape[1]), np.zeros(train.shape[1])
    for start in range(0, len(train), 1024):
        part = train[start : start + 1024].astype(np.float64)
        total += part.sum(axis=(0, 2, 3))
        squares += np.square(part, out=part).sum(axis=(0, 2, 3))
    count = train.size // train.shape[1]
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean * mean, 0))
    scale = 1 / np.where(deviation > 0, deviation, 1)
    parts = []
    for images in (train, test):
        whole = np.empty((len(images), 3, SIDE, SIDE), np.float32)
        np.multiply(images, scale[:, None, None], out=whole, casting="unsafe")
        whole -= (mean * scale).astype(np.float32)[:, None, None]
        parts.append(whole)
    return parts[0], parts[1]


# ---- CIFAR-10 python batches -------------------------------------------------------------------------------


def _cifar10(folder: Path) -> Dataset:
    for name in CIFAR_BATCHES:
        if not (folder / name).is_file():
            raise DataError(
                folder / name, "nothing of that name", "the six CIFAR-10 batches " + ", ".join(CIFAR_BATCHES)
            )
    batches = [_cifar_batch(folder / name) for name in CIFAR_BATCHES]
    train_x, test_x = _normalised(np.concatenate([x for x, _ in batches[:-1]]), batches[-1][0])
    train_y = np.concatenate([y for _, y in batches[:-1]])
    return Dataset(train_x, train_y, test_x, batches[-1][1], "CIFAR-10")


def _cifar_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    expected = "a CIFAR-10 python batch: a dictionary with 'data', N x 3072 bytes, and 'labels', N of 0 to 9"
    try:
        with path.open("rb") as file:
            # Python 2 wrote the published files: its strings come as bytes, and the keys are made text below.
            content = _ArrayUnpickler(file, encoding="bytes").load()
    except OSError as error:
        raise DataError(path, f"an unreadable file ({error.strerror})", expected) from None
    except Exception as error:  # a damaged pickle can raise anything at all
        raise DataError(path, f"a truncated or corrupt pickle ({_one_line(error)})", expected) from None
    if not isinstance(content, dict):
        raise DataError(path, f"a pickled {type(content).__name__}", expected)
    fields = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in content.items()}
    for key in ("data", "labels"):
        if key not in fields:
            raise DataError(path, "a dictionary with " + (", ".join(map(repr, fields)) or "no keys"), expected)
    data = fields["data"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * SIDE * SIDE:
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise DataError(path, f"'data' of {found}", expected)
    labels = _labels(path, fields["labels"], len(data), expected)
    return data.reshape(-1, 3, SIDE, SIDE), labels


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds NumPy arrays of plain numbers and refuses every other class or function a pickle may name."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy._core.", "numpy.core.")
        try:
            return _HARMLESS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def _reconstruct(subtype: object, shape: object, dtype: object) -> np.ndarray:
    """Make the empty array that the pickle's next step fills, whatever size and type it asks for here."""
    if subtype is not _NDARRAY:
        raise pickle.UnpicklingError("an array of a foreign class")
    return np.ndarray((0,), np.uint8)


def _frombuffer(buffer: Any, dtype: np.dtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    return np.frombuffer(buffer, dtype).reshape(shape, order="F" if order == "F" else "C")


def _latin1(text: str, encoding: str) -> bytes:
    """Stand in for ``_codecs.encode``, by which Python 3 writes byte strings in Python 2's protocol."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the codec {encoding!r}")
    return text.encode("latin1")


# The class is only ever named to `_reconstruct`; its stand-in cannot be called.
_NDARRAY = object()
_HARMLESS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _frombuffer,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
}


# ---- MNIST idx files ---------------------------------------------------------------------------------------


def _mnist(folder: Path) -> Dataset:
    parts = []
    for images_name, labels_name in (IDX_FILES[:2], IDX_FILES[2:]):
        images_path, images = _idx(folder, images_name, axes=3)
        if images.shape[1:] != (28, 28):
            raise DataError(images_path, f"images of {images.shape[1]}x{images.shape[2]} pixels", "images of 28x28")
        labels_path, raw = _idx(folder, labels_name, axes=1)
        expected = f"{len(images)} labels from 0 to 9, one for each image of {images_path.name}"
        parts.append(
            (np.pad(images, ((0, 0), (2, 2), (2, 2)))[:, None], _labels(labels_path, raw, len(images), expected))
        )
    train_x, test_x = _normalised(parts[0][0], parts[1][0])
    return Dataset(train_x, parts[0][1], test_x, parts[1][1], "MNIST")


def _idx_path(folder: Path, name: str) -> Path | None:
    """Find an idx file under the published name or the one with a dot, packed or not."""
    dotted = name.replace("-idx", ".idx")
    candidates = (folder / f"{stem}{suffix}" for stem in (name, dotted) for suffix in ("", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def _idx(folder: Path, name: str, axes: int) -> tuple[Path, np.ndarray]:
    path = _idx_path(folder, name)
    if path is None:
        raise DataError(
            folder / name, "nothing of that name, packed (.gz) or not", "MNIST's four idx files " + ", ".join(IDX_FILES)
        )
    expected = f"an idx file of bytes with {axes} axes"
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * axes)
            if len(header) < 4 + 4 * axes:
                raise DataError(path, f"{len(header)} bytes in all", f"{expected}, whose header has {4 + 4 * axes}")
            magic = bytes((0, 0, 8, axes))
            if header[:4] != magic:
                raise DataError(path, f"a file that starts with {header[:4].hex(' ')}", f"{expected}: {magic.hex(' ')}")
            shape = tuple(int(n) for n in np.frombuffer(header, ">u4", offset=4))
            size = math.prod(shape)
            body = file.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(path, f"a truncated or corrupt gzip file ({_one_line(error)})", expected) from None
    except OSError as error:
        raise DataError(path, f"an unreadable file ({error.strerror})", expected) from None
    except (MemoryError, OverflowError):
        raise DataError(path, f"a header that announces {size:,} bytes", f"{expected} that fits in memory") from None
    if len(body) != size:
        found = (
            f"{len(body)} bytes after the header" if len(body) < size else f"more than {size} bytes after the header"
        )
        raise DataError(path, found, f"the {size} that the header announces ({' x '.join(map(str, shape))})")
    if not size:
        raise DataError(path, f"a header that announces nothing ({' x '.join(map(str, shape))})", expected)
    return path, np.frombuffer(body, np.uint8).reshape(shape)


# ---- shared ------------------------------------------------------------------------------------------------


def _labels(path: Path, raw: Any, count: int, expected: str) -> np.ndarray:
    try:
        labels = np.asarray(raw)
    except ValueError:
        labels = np.empty((0, 0))
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(path, f"labels that are not a row of whole numbers ({type(raw).__name__})", expected)
    if len(labels) != count or not count:
        raise DataError(path, f"{len(labels)} labels for {count} images", expected)
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise DataError(path, f"labels from {labels.min()} to {labels.max()}", expected)
    return labels.astype(np.int64)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
