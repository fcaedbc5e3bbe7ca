"""Read a tensor from what torch.save wrote: a zip file with a small pickle and the bytes of one storage.

`torch.load` also accepts compressed archives, which expand a thousandfold, and pickles that keep it busy forever. Here
nothing is expanded, imported or called: entries are stored uncompressed, the pickle describes one plain tensor, and
memory is allocated only for bytes that the file has.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from typing import IO, Any

import torch
from torch import Tensor

from craton.ml.training.checkpoint.checksums import CheckpointError
from craton.ml.training.checkpoint.pickle_data import DTYPES, MAX_DIMENSIONS, shown

MAX_READ_BYTES = 2**17  # of everything but the storage: zipfile searches its directory in the last 64 KiB
MAX_PICKLE_BYTES = 2**16
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of the name and of the extra field
_SIGNATURE = b"PK\x03\x04"
_IS_ENCRYPTED = 1
_STORAGES = {
    **{"DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16},
    **{"BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32},
    **{"ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool},
    **{"ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128},
}
_REBUILD, _REBUILD_WITH_DTYPE = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"
_UNTYPED, _HOOKS = "torch.storage UntypedStorage", "collections OrderedDict"
_NAMES: dict[str, Any] = {name: name for name in (_REBUILD, _REBUILD_WITH_DTYPE, _UNTYPED, _HOOKS)}
_NAMES |= {f"torch {name}": dtype for name, dtype in (_STORAGES | DTYPES).items()}
_PUSHES = ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "NEWFALSE", "NEWTRUE")
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_archive(file: IO[bytes], length: int) -> Tensor:
    """Return the tensor in an archive of `length` bytes; CheckpointError if it is not exactly one plain tensor."""
    try:
        with zipfile.ZipFile(_Limited(file, length)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        order = entries.get("byteorder")
        if order is not None and _bytes_of(file, order, length) != b"little":
            raise CheckpointError("its bytes are not in little-endian order")
        if not {"data.pkl", "data/0"} <= entries.keys():
            raise CheckpointError("it has no storage, or no description of its contents")
        described = _described(_bytes_of(file, entries["data.pkl"], length))
        begin, size = _place(file, entries["data/0"], length)
    except CheckpointError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, EOFError, struct.error, IndexError):
        raise CheckpointError("it is not an archive of torch.save") from None
    return _tensor(file, begin, size, *described)


class _Limited:
    """A file of which only small parts can be read: a directory of entries is never large."""

    def __init__(self, file: IO[bytes], length: int) -> None:
        self._file, self._length = file, length
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._length - self._file.tell())
        size = rest if size < 0 else min(size, rest)
        if size > MAX_READ_BYTES:
            raise CheckpointError("its directory of entries is too large")
        return self._file.read(size)

    def seekable(self) -> bool:
        return True


def _place(file: IO[bytes], entry: zipfile.ZipInfo, length: int) -> tuple[int, int]:
    """Return where the bytes of an entry begin, and how many there are."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _IS_ENCRYPTED:
        raise CheckpointError("it is compressed or encrypted, which torch.save never writes")
    if not 0 <= entry.header_offset <= length:
        raise CheckpointError("an entry is outside the archive")
    file.seek(entry.header_offset)
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    begin = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if signature != _SIGNATURE or begin + entry.file_size > length:
        raise CheckpointError("an entry is outside the archive")
    return begin, entry.file_size


def _bytes_of(file: IO[bytes], entry: zipfile.ZipInfo, length: int) -> bytes:
    begin, size = _place(file, entry, length)
    if size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"its description has {size:,} bytes; at most {MAX_PICKLE_BYTES:,} are read")
    file.seek(begin)
    return file.read(size)


def _described(data: bytes) -> tuple[torch.dtype, int, int, tuple[int, ...], tuple[int, ...]]:
    """Return dtype, elements of the storage, offset, sizes and strides of the one tensor that the pickle describes."""
    unpickled = _made(data)
    match unpickled:
        case (
            str(call),
            (("storage", storage, "0", str(), int(count)), int(offset), tuple(sizes), tuple(strides), *rest),
        ):
            pass
        case _:
            raise CheckpointError("it does not contain one plain tensor")
    if call == _REBUILD_WITH_DTYPE and storage == _UNTYPED and len(rest) == 3 and isinstance(rest[2], torch.dtype):
        dtype = rest[2]
        count //= dtype.itemsize
    elif call == _REBUILD and isinstance(storage, torch.dtype) and len(rest) == 2:
        dtype = storage
    else:
        raise CheckpointError("it does not contain one plain tensor")
    numbers = (count, offset, *sizes, *strides)
    if len(sizes) != len(strides) or len(sizes) > MAX_DIMENSIONS:
        raise CheckpointError("its tensor has too many dimensions, or a different number of strides")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise CheckpointError("a size of its tensor is not an integer")
    return dtype, count, offset, sizes, strides


def _made(data: bytes) -> Any:
    """Return what the pickle leaves on its stack: a call becomes a pair of its name and arguments, and is not made."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _PUSHES:
            stack.append(argument)
        elif name == "GLOBAL":
            if argument not in _NAMES:
                asked = shown(str(argument).replace(" ", ".", 1))
                raise CheckpointError(f"it references {asked}, which no tensor needs and which was not run")
            stack.append(_NAMES[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            begin = marks.pop()
            stack[begin:] = [tuple(stack[begin:])]
        elif name in _TUPLES:
            begin = len(stack) - _TUPLES[name]
            stack[begin:] = [tuple(stack[begin:])]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo.get(argument))
        elif name == "REDUCE":
            stack[-2:] = [tuple(stack[-2:])]
        elif name == "STOP":
            return stack[-1] if len(stack) == 1 else None
        elif name not in ("PROTO", "BINPERSID"):  # a storage is identified by its persistent id, a tuple
            raise CheckpointError(f"it has the opcode {name}, which no tensor needs")
    return None


def _tensor(
    file: IO[bytes],
    begin: int,
    size: int,
    dtype: torch.dtype,
    count: int,
    offset: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
) -> Tensor:
    last = offset + sum((item - 1) * stride for item, stride in zip(sizes, strides, strict=True))
    if count * dtype.itemsize != size or (0 not in sizes and last >= count):
        raise CheckpointError(f"its tensor is larger than its {size:,} bytes")
    data = torch.empty(size, dtype=torch.uint8)
    if size:
        file.seek(begin)
        read = file.readinto(data.numpy().data)  # type: ignore[attr-defined]
        if read != size:
            raise CheckpointError("it is truncated")
    return data.view(dtype).as_strided(sizes, strides, offset)
