"""Checkpoints as an attacker would leave them: whole and sealed again, with a file that he wrote."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from craton.ml.training.checkpoint.checksums import BLOCK_BYTES, CHECKSUMS, COMPLETE

METADATA = ".metadata"


def reseal(step: Path) -> None:
    """Gives the files of a step the checksums that they have now, as anybody can."""
    table = json.loads((step / CHECKSUMS).read_bytes())
    for name in table["files"]:
        content = (step / name).read_bytes()
        blocks = [zlib.crc32(content[at : at + BLOCK_BYTES]) for at in range(0, max(len(content), 1), BLOCK_BYTES)]
        table["files"][name] = {"crc32": zlib.crc32(content), "bytes": len(content), "blocks": blocks}
    seal(step, table)


def seal(folder: Path, table: dict[str, Any] | None = None, /, **changes: Any) -> None:
    """Writes the two files of the seal with this table of files, and these values in COMPLETE."""
    checksums = (folder / CHECKSUMS).read_bytes() if table is None else json.dumps(table).encode()
    about = json.loads((folder / COMPLETE).read_bytes()) | {"checksums": zlib.crc32(checksums), **changes}
    about.pop("crc32")
    about["crc32"] = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    (folder / CHECKSUMS).write_bytes(checksums)
    (folder / COMPLETE).write_text(json.dumps(about))


def replace(step: Path, name: str, content: bytes) -> None:
    (step / name).write_bytes(content)
    reseal(step)


@dataclass
class Call:
    """Is pickled as a call of anything."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def named(module: str, name: str) -> bytes:
    """As protocol 4 does it, with a walk along the dots of a name."""
    return text(module) + text(name) + b"\x93"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def program(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


def attacks(step: Path, marker: Path) -> dict[str, bytes]:
    """Pickles that make the marker when Python reads them, each by another way."""
    shell = f"touch {marker}"
    real: Metadata = pickle.loads((step / METADATA).read_bytes())
    system = Call(os.system, (shell,))
    name = next(iter(real.state_dict_metadata))
    hidden = pickle.loads(pickle.dumps(real))
    hidden.planner_data = {name: (system,)}
    as_key = pickle.loads(pickle.dumps(real))
    as_key.storage_meta = system
    as_size = pickle.loads(pickle.dumps(real))
    as_size.state_dict_metadata[name].size = system
    second = step.parent / "second.pt"
    second.write_bytes(pickle.dumps(system))
    getattr_of = partial(call, named("builtins", "getattr"))
    imported = call(named("builtins", "__import__"), text("os"))
    metadata_class = named("torch.distributed.checkpoint.metadata", "Metadata")
    run = text(shell)
    return {
        "system by GLOBAL": f"cos\nsystem\n(V{shell}\ntR.".encode(),
        "system by STACK_GLOBAL": program(call(named("posix", "system"), run)),
        "system by __reduce__": pickle.dumps(system),
        "dotted name through pathlib": program(call(named("pathlib", "os.system"), run)),
        "dotted name through torch": program(call(named("torch.serialization", "os.system"), run)),
        "dotted name through a class of DCP": program(
            call(named("torch.distributed.checkpoint.metadata", "os.system"), run)
        ),
        "dotted name through torch's own": program(call(named("torch", "os.system"), run)),
        "getattr": program(call(getattr_of(imported, text("system")), run)),
        "eval": program(call(named("builtins", "eval"), text(f"__import__('os').system({shell!r})"))),
        "exec": program(call(named("builtins", "exec"), text(f"open({str(marker)!r}, 'w')"))),
        "partial": program(call(call(named("functools", "partial"), named("os", "system"), run))),
        "torch.load": program(
            call(named("torch", "load"), text(str(second)), b"N", call(named("builtins", "__import__"), text("pickle")))
        ),
        "nested pickle": pickle.dumps(Call(pickle.loads, (pickle.dumps(system),))),
        "copyreg": program(
            call(named("copyreg", "_reconstructor"), *[named("logging", "FileHandler")] * 2, text(str(marker)))
        ),
        "operator": program(call(call(named("operator", "methodcaller"), text("system"), run), imported)),
        "INST": f"(V{shell}\nios\nsystem\n.".encode(),
        "OBJ": b"(" + b"cos\nsystem\n" + run + b"o.",
        "names from the memo": program(
            text("os") + b"\x940" + text("system") + b"\x940" + call(b"h\x00h\x01\x93", run)
        ),
        "state of a class": program(
            metadata_class
            + b"N}"
            + text("hook")
            + named("os", "system")
            + b"s\x86b0"
            + call(named("os", "system"), run)
        ),
        "in the planner's data": pickle.dumps(hidden),
        "in the storage's data": pickle.dumps(as_key),
        "in a tensor's size": pickle.dumps(as_size),
        "after a file that is in order": pickle.dumps(real)[:-1] + b"0" + call(named("os", "system"), run) + b".",
    }


def inert_attacks() -> dict[str, bytes]:
    """What Python's own unpickler refuses too, unless somebody taught it; or what costs it its memory or its time."""
    bomb = b")\x94" + b"".join(
        (b"h" + bytes([number])) * 2 + b"\x86\x94" for number in range(60)
    )  # (t, t) of (t, t) of …: 2**60 parts
    return {
        "extension code": b"\x80\x04\x82\x01.",
        "persistent id": b"\x80\x04K\x01Q.",
        "persistent id as text": b"Pname\n.",
        "next buffer": b"\x80\x05\x97.",
        "NEWOBJ_EX": program(named("torch.distributed.checkpoint.metadata", "Metadata") + b")}\x92"),
        "key whose hash takes for ever": program(b"}" + bomb + b"Ns"),
        "memo of 16 GB": b"\x80\x04Nr\xff\xff\xff\x7f.",
        "bytes of 2**60": b"\x80\x05\x96" + (2**60).to_bytes(8, "little") + b".",
        "integer of 2 GB": b"\x80\x04\x8b\xff\xff\xff\x7f.",
        "list that holds itself": program(b"]\x94h\x00a"),
        "not a pickle": b"\x00" * 64,
        "nothing": b"",
        "nothing but None": program(b"N"),
    }


def archive_of(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def changed_archive(archive: bytes, compression: int = zipfile.ZIP_STORED, **contents: bytes) -> bytes:
    """What torch.save wrote, packed again with other contents; `data_pkl` stands for data.pkl."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(changed, "w", compression) as new:
        for entry in old.namelist():
            short = entry.partition("/")[2].replace(".", "_")
            new.writestr(entry, contents.get(short, old.read(entry)))
    return changed.getvalue()


def hostile_archives(marker: Path) -> dict[str, bytes]:
    """Shards that run something, expand, or keep torch's reader busy: why each is refused, and its bytes."""
    plain = archive_of(torch.zeros(4))
    described = zipfile.ZipFile(io.BytesIO(plain)).read("archive/data.pkl")
    tuples = b")q\x00" + b"".join(
        b"h" + bytes([at]) + b"h" + bytes([at]) + b"\x86q" + bytes([at + 1]) for at in range(60)
    )
    shell = pickle.dumps(Call(os.system, (f"touch {marker}",)), protocol=2)
    return {
        "references posix.system, which no tensor needs and which was not run": changed_archive(plain, data_pkl=shell),
        "compressed or encrypted": changed_archive(archive_of(torch.zeros(2**20)), zipfile.ZIP_DEFLATED),
        "has the opcode EMPTY_DICT": changed_archive(plain, data_pkl=b"\x80\x02}" + tuples + b"Ns."),
        "larger than its 16 bytes": changed_archive(
            plain, data_pkl=described.replace(b"K\x04\x85", b"J\xff\xff\xff\x7f\x85")
        ),
        "not an archive": b"\x80\x02" + bytes(100),
        "at most 65,536 are read": changed_archive(plain, data_pkl=bytes(2**17)),
    }
