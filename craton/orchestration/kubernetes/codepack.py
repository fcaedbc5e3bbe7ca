"""Pack the code archive of a run into a ConfigMap, and unpack it in the first pod.

Only where no pod sees the run directory that holds the code. The same files always make the same bytes.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
from pathlib import Path

from craton.orchestration.draft import code_folder, manifest_path
from craton.orchestration.errors import StartError

MAX_BYTES = 700_000  # packed: in base64 it must fit etcd's limit of 1 MiB


def pack_code(run: Path) -> bytes:
    """Return the packed code; empty if the run has none."""
    if not manifest_path(run).is_file():
        return b""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for path in [manifest_path(run), *sorted(code_folder(run).rglob("*"))]:
            archive.add(path, str(path.relative_to(run)), recursive=False, filter=_without_origin)
    if len(packed.getvalue()) > MAX_BYTES:
        raise StartError(
            f"the code of this run is {len(packed.getvalue()):,} bytes packed; a ConfigMap takes {MAX_BYTES:,}. "
            "Exclude files with .cratonignore, put them into the image, or start the run where the cluster's shared "
            "storage is mounted"
        )
    return packed.getvalue()


def unpack_code(archive: Path, run: Path) -> None:
    """Replace the code folder as a whole: archived files are read-only, and files missing in the archive must go."""
    fresh, old = run / ".code.new", run / ".code.old"
    for left in (fresh, old):  # left by a pod that died here
        shutil.rmtree(left, ignore_errors=True)
    fresh.mkdir()
    with tarfile.open(archive, "r:gz") as opened:
        opened.extractall(fresh, filter="tar")
    if code_folder(run).exists():
        os.replace(code_folder(run), old)
    os.replace(code_folder(fresh), code_folder(run))
    os.replace(manifest_path(fresh), manifest_path(run))
    shutil.rmtree(fresh)
    shutil.rmtree(old, ignore_errors=True)


def _without_origin(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
