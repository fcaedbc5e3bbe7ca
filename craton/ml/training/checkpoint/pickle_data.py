"""DCP's `.metadata` as plain data: reads a pickle without importing, creating or calling anything that it names.

A pickle is a program for a small stack machine. This implementation supports the opcodes that DCP's metadata needs, and
looks up names in one table of exact (module, name) pairs. Instances become `PickledRecord`s: a name and a state. So no
hostile file can reach code, neither through an allowed class nor by a dotted name. `metadata` builds DCP's objects from
the records.

Memory is bounded by the bytes of the file and the number of objects, and because only short strings and records are
hashed. (Python's own unpickler hashes any key, so nested tuples that share their parts keep it busy forever.)
"""

from __future__ import annotations

from struct import error as struct_error
from struct import unpack_from
from typing import Any

import torch

from craton.ml.training.checkpoint.checksums import CheckpointError

MAX_BYTES = 2**30  # some 7 million chunks
MAX_OBJECTS = 2**27  # a chunk has about 15
MAX_DIMENSIONS = 64  # of a tensor, as in torch
_MAX_INTEGER_BYTES = 8
_SHOWN = 80  # characters of a name in a message

_DCP, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


class Name:
    """Placeholder for a class or function that a pickle may name; none of them is looked up or called."""

    __slots__ = ("is_class", "module", "name")

    def __init__(self, module: str, name: str, is_class: bool = True) -> None:
        self.module, self.name, self.is_class = module, name, is_class

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


METADATA = Name(_DCP, "Metadata")
TENSOR = Name(_DCP, "TensorStorageMetadata")
BYTES = Name(_DCP, "BytesStorageMetadata")
PROPERTIES = Name(_DCP, "TensorProperties")
CHUNK = Name(_DCP, "ChunkStorageMetadata")
INDEX = Name(_DCP, "MetadataIndex")
STORAGE_META = Name(_DCP, "StorageMeta")
PLACE = Name(_FILES, "_StorageInfo")
MEMORY_FORMAT = Name(_DCP, "_MEM_FORMAT_ENCODING", is_class=False)
SIZE = Name("torch", "Size", is_class=False)
LAYOUT = Name("torch.serialization", "_get_layout", is_class=False)
# Where a checkpoint was saved, which DCP's own writer stores; Python 3.13 names the class by another module.
PATHS = (Name("pathlib", "PosixPath", is_class=False), Name("pathlib._local", "PosixPath", is_class=False))
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

_CLASSES = (METADATA, TENSOR, BYTES, PROPERTIES, CHUNK, INDEX, STORAGE_META, PLACE)
_NAMED: dict[tuple[str, str], Any] = {
    (name.module, name.name): name for name in (*_CLASSES, MEMORY_FORMAT, SIZE, LAYOUT, *PATHS)
}
_NAMED |= {("torch", name): dtype for name, dtype in DTYPES.items()}
_MEMORY_FORMATS = (0, 1, 2)
_MAKES_OBJECT = tuple(bytes([opcode]) for opcode in b"}])tR\x81\x85\x86\x87")  # the one-byte opcodes that do


class PickledRecord:
    """What the pickle says about one instance. Compares and hashes by identity."""

    __slots__ = ("name", "state")

    def __init__(self, name: Name) -> None:
        self.name = name
        self.state: Any = None


def read_pickle(data: bytes) -> Any:
    """Return records, strings, integers, dtypes, sizes and containers of them. CheckpointError says what is not
    allowed."""
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"it has {len(data):,} bytes; at most {MAX_BYTES:,} are read")
    if sum(map(data.count, _MAKES_OBJECT)) > MAX_OBJECTS:  # an upper bound: a byte need not be an opcode
        raise CheckpointError(f"it may hold more than {MAX_OBJECTS:,} objects")
    try:
        return _run(data)
    except CheckpointError:
        raise
    except (IndexError, ValueError, struct_error):
        raise CheckpointError("it is truncated or damaged") from None


def _run(data: bytes) -> Any:
    """The stack machine. Opcodes are in order of frequency in DCP's pickles: about a hundred per tensor."""
    at = 0
    stack: list[Any] = []
    marked: list[list[Any]] = []
    memo: list[Any] = []
    while True:
        opcode = data[at]
        at += 1
        if opcode == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif opcode == 0x6A:  # LONG_BINGET
            stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
            at += 4
        elif opcode == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif opcode == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif opcode == 0x28:  # MARK
            marked.append(stack)
            stack = []
        elif opcode == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif opcode == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif opcode == 0x81:  # NEWOBJ
            arguments = stack.pop()
            name = stack[-1]
            if type(name) is not Name or not name.is_class or arguments != ():
                raise CheckpointError(f"it creates an instance of {shown(name)} in an unusual way")
            stack[-1] = PickledRecord(name)
        elif opcode == 0x62:  # BUILD
            state = stack.pop()
            record = stack[-1]
            if type(record) is not PickledRecord or record.state is not None:
                raise CheckpointError(f"it sets the state of {shown(record)}, which has none")
            record.state = state
        elif opcode == 0x75:  # SETITEMS
            items = stack
            stack = marked.pop()
            _set_items(stack[-1], items)
        elif opcode == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif opcode == 0x52:  # REDUCE
            arguments = stack.pop()
            stack[-1] = _size(arguments) if stack[-1] is SIZE else _value(stack[-1], arguments)
        elif opcode == 0x86:  # TUPLE2
            last = stack.pop()
            stack[-1] = (stack[-1], last)
        elif opcode == 0x4D:  # BININT2
            stack.append(data[at] | data[at + 1] << 8)
            at += 2
        elif opcode == 0x4A:  # BININT
            stack.append(int.from_bytes(data[at : at + 4], "little", signed=True))
            at += 4
        elif opcode == 0x8C:  # SHORT_BINUNICODE
            end = at + 1 + data[at]
            stack.append(_text(data, at + 1, end))
            at = end
        elif opcode == 0x8A:  # LONG1
            count = data[at]
            if count > _MAX_INTEGER_BYTES:
                raise CheckpointError(f"it holds an integer of {count} bytes")
            stack.append(int.from_bytes(data[at + 1 : at + 1 + count], "little", signed=True))
            at += 1 + count
        elif opcode == 0x2E:  # STOP
            if len(stack) != 1 or marked or at != len(data):
                raise CheckpointError("it does not end where it should")
            return stack[0]
        else:
            at, stack = _rare(opcode, data, at, stack, marked, memo)


def _rare(
    opcode: int, data: bytes, at: int, stack: list[Any], marked: list[list[Any]], memo: list[Any]
) -> tuple[int, list[Any]]:
    """Handle the other opcodes, which are rare in a file; return the next position and the stack."""
    if opcode == 0x93:  # STACK_GLOBAL
        name = stack.pop()
        stack[-1] = _named(stack[-1], name)
    elif opcode == 0x63:  # GLOBAL, of protocols before 4
        module, name, _ = data[at : at + 1024].split(b"\n", 2)
        stack.append(_named(module.decode(), name.decode()))
        at += len(module) + len(name) + 2
    elif opcode == 0x87:  # TUPLE3
        stack[-3:] = [tuple(stack[-3:])]
    elif opcode == 0x74:  # TUPLE
        stack, items = marked.pop(), stack
        stack.append(tuple(items))
    elif opcode == 0x5D:  # EMPTY_LIST
        stack.append([])
    elif opcode == 0x61:  # APPEND
        item = stack.pop()
        _extend(stack[-1], [item])
    elif opcode == 0x65:  # APPENDS
        stack, items = marked.pop(), stack
        _extend(stack[-1], items)
    elif opcode == 0x73:  # SETITEM
        pair = stack[-2:]
        del stack[-2:]
        _set_items(stack[-1], pair)
    elif opcode in (0x4E, 0x88, 0x89):  # NONE, NEWTRUE, NEWFALSE
        stack.append({0x4E: None, 0x88: True, 0x89: False}[opcode])
    elif opcode == 0x58:  # BINUNICODE
        end = at + 4 + unpack_from("<I", data, at)[0]
        stack.append(_text(data, at + 4, end))
        at = end
    elif opcode in (0x71, 0x72):  # BINPUT, LONG_BINPUT: like MEMOIZE, since picklers count up as well
        width = 1 if opcode == 0x71 else 4
        if int.from_bytes(data[at : at + width], "little") != len(memo):
            raise CheckpointError("its memo is not in the order that picklers use")
        memo.append(stack[-1])
        at += width
    elif opcode == 0x80:  # PROTO
        at += 1
    elif opcode == 0x95:  # FRAME
        at += 8
    else:
        raise CheckpointError(f"it has the opcode {bytes([opcode])!r}, which DCP metadata never uses")
    return at, stack


def _named(module: Any, name: Any) -> Any:
    """Exact pairs only: a dotted name is in no pair."""
    if type(module) is not str or type(name) is not str:
        raise CheckpointError("it names a class by something other than strings")
    result = _NAMED.get((module, name))
    if result is None:
        raise CheckpointError(f"it references {shown(f'{module}.{name}')}, which no checkpoint needs")
    return result


def _size(arguments: Any) -> torch.Size:
    if type(arguments) is tuple and len(arguments) == 1 and type(arguments[0]) is tuple:
        sizes = arguments[0]
        if len(sizes) <= MAX_DIMENSIONS:
            for size in sizes:
                if type(size) is not int or size < 0:
                    break
            else:
                return torch.Size(sizes)
    raise CheckpointError(f"a tensor size is not a list of at most {MAX_DIMENSIONS} integers")


def _value(name: Any, arguments: Any) -> Any:
    """Return what a call would return, for the calls that DCP needs."""
    texts = type(arguments) is tuple and all(type(argument) is str for argument in arguments)
    if name is LAYOUT and texts and arguments == ("torch.strided",):
        return torch.strided
    if name is MEMORY_FORMAT and type(arguments) is tuple and len(arguments) == 1:
        if type(arguments[0]) is int and arguments[0] in _MEMORY_FORMATS:
            return MEMORY_FORMAT
    elif any(name is path for path in PATHS) and texts:
        return PATHS[0]
    raise CheckpointError(f"it calls {shown(name)} with arguments that DCP metadata never has")


def _set_items(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        raise CheckpointError("it sets items of something other than a dictionary")
    keys = items[::2]
    for key in keys:
        if type(key) is not str and type(key) is not PickledRecord:
            raise CheckpointError(f"a dictionary key is {shown(key)}")
    target.update(zip(keys, items[1::2], strict=True))


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise CheckpointError("it appends to something other than a list")
    target.extend(items)


def _text(data: bytes, begin: int, end: int) -> str:
    if end > len(data):
        raise CheckpointError("it is truncated or damaged")
    return data[begin:end].decode()


def shown(value: Any) -> str:
    """Format for a message: short, and without terminal control characters."""
    if isinstance(value, Name | PickledRecord):
        value = str(value if isinstance(value, Name) else value.name)
    text = value if isinstance(value, str) else f"a {type(value).__name__}"
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
