"""Messages that programs print when they end: which layer they mean. The authors wrote them from memory."""

from __future__ import annotations

import pytest

from craton.observability.diagnosis import diagnose
from tests.observability.diagnosis.sick_runs import RANK, reported

RAISED = [
    ("OSError", "[Errno 116] Stale file handle", 116, "storage"),
    ("OSError", "[Errno 37] No locks available", 37, "storage"),
    ("OSError", "[Errno 16] Device or resource busy: '/mnt/data/.nfs0001'", 16, "storage"),
    (
        "RuntimeError",
        "PytorchStreamReader failed reading zip archive: failed finding central directory",
        None,
        "storage",
    ),
    ("safetensors_rust.SafetensorError", "Error while deserializing header: HeaderTooLarge", None, "storage"),
    ("EOFError", "Ran out of input", None, "storage"),
    ("EOFError", "Compressed file ended before the end-of-stream marker was reached", None, "storage"),
    ("_pickle.UnpicklingError", "invalid load key, '\\x00'.", None, "storage"),
    ("zipfile.BadZipFile", "File is not a zip file", None, "storage"),
    ("gzip.BadGzipFile", "Not a gzipped file (b've')", None, "storage"),
    ("tarfile.ReadError", "unexpected end of data", None, "storage"),
    ("pyarrow.lib.ArrowInvalid", "Parquet magic bytes not found in footer. Is this a parquet file?", None, "storage"),
    ("OSError", "Corrupt snappy compressed data.", None, "storage"),
    ("ValueError", "Checksum mismatch for shard 3: expected 9f1c, got 02aa", None, "storage"),
    ("sqlite3.DatabaseError", "database disk image is malformed", None, "storage"),
    ("RuntimeError", "basic_ios::clear: iostream error", None, "storage"),
    ("botocore.exceptions.ClientError", "An error occurred (SlowDown) when calling PutObject: retry", None, "storage"),
    ("botocore.exceptions.ClientError", "An error occurred (ExpiredToken) when calling GetObject", None, "storage"),
    ("HfHubHTTPError", "429 Client Error: Too Many Requests for url: https://huggingface.co/api", None, "storage"),
    ("urllib.error.HTTPError", "HTTP Error 503: Slow Down", None, "storage"),
    (
        "botocore.exceptions.ClientError",
        "An error occurred (RequestTimeTooSkewed) when calling PutObject",
        None,
        "host",
    ),
    ("http.client.IncompleteRead", "IncompleteRead(512 bytes read, 512 more expected)", None, "fabric"),
    ("OSError", "[Errno 113] No route to host", 113, "fabric"),
    ("RuntimeError", "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)", None, "collective"),
    ("RuntimeError", "No file descriptors available", None, "host"),
    ("sqlite3.OperationalError", "database is locked", None, "framework"),
    ("filelock.Timeout", "The file lock '/cache/x.lock' could not be acquired.", None, "framework"),
    ("json.JSONDecodeError", "Expecting value: line 1 column 1 (char 0)", None, "framework"),
    ("RuntimeError", "the reward service answered with status 503", None, "framework"),
    ("RuntimeError", "Error(s) in loading state_dict for Decoder: size mismatch for lm_head", None, "framework"),
]
# Messages that look like these and mean something else.
RAISED += [
    ("IndexError", "index 500 is out of range for dataset of length 500", None, "framework"),
    ("ValueError", "the dataset has 403 rows, 512 expected", None, "framework"),
    ("ValueError", "a larger batch would slow down every step", None, "framework"),
    ("UnicodeDecodeError", "'utf-8' codec can't decode byte 0xe2: unexpected end of data", None, "framework"),
    ("ImportError", "bad magic number in 'model': b'\\x03\\xf3'", None, "framework"),
    ("RuntimeError", "PytorchStreamReader failed locating file constants.pkl: file not found", None, "framework"),
    ("ValueError", "config hash mismatch: the checkpoint was saved with another model", None, "framework"),
    ("httpx.ReadError", "[Errno 104] Connection reset by peer", None, "fabric"),
    ("httpx.ReadError", "", None, "fabric"),
]
PRINTED = [
    ("tar: Unexpected EOF in archive", "storage"),
    ("gzip: stdin: invalid compressed data--crc error", "storage"),
    ("xz: (stdin): Unexpected end of input", "storage"),
    ("cp: error writing '/x': No space left on device", "storage"),
    ("ssh: connect to host node-1 port 22: Connection timed out", "fabric"),
    ("curl: (28) Operation timed out after 30001 milliseconds", "fabric"),
    ("error: RPC failed; curl 92 HTTP/2 stream 0 was not closed cleanly", "fabric"),
    ("sh: 1: Cannot fork", "host"),
    ("OMP: Error #35: System unable to allocate necessary resources for OMP thread:", "host"),
    ("tail: inotify_add_watch: No space left on device", "host"),
    ("python: error while loading shared libraries: libnccl.so.2: cannot open shared object file", "framework"),
]


@pytest.mark.parametrize(("kind", "message", "errno", "layer"), RAISED, ids=[row[1][:40] for row in RAISED])
def test_the_layer_of_a_raised_error(kind: str, message: str, errno: int | None, layer: str) -> None:
    verdict = diagnose(reported(kind, message, errno=errno))
    assert (verdict.condition, verdict.layer, verdict.rank) == ("dead", layer, RANK), verdict.sentence


@pytest.mark.parametrize(("message", "layer"), PRINTED, ids=[row[0][:40] for row in PRINTED])
def test_the_layer_of_a_last_line(message: str, layer: str) -> None:
    verdict = diagnose(reported("", message, code=1))
    assert (verdict.condition, verdict.layer, verdict.rank) == ("dead", layer, RANK), verdict.sentence


@pytest.mark.parametrize(
    ("message", "is_file_lock"),
    [
        ("database is locked", True),
        ("database table is locked: shards", True),
        ("(sqlite3.OperationalError) database is locked\n[SQL: INSERT INTO seen VALUES (?)]", True),
        ("The file lock '/cache/x.lock' could not be acquired.", True),
        ("the lock of the reward model could not be acquired", False),
        ("a lease on the parameter server could not be acquired within 30 s", False),
        ("the account of this database is locked by its owner", False),
    ],
)
def test_which_locks_are_files(message: str, is_file_lock: bool) -> None:
    assert (diagnose(reported("RuntimeError", message)).cause == "file_locked") == is_file_lock
