"""An S3 server whose speed can be measured: objects are files of a folder, and several processes serve them.

It needs no package, unlike moto's server (tests/s3.py), which knows more of S3 and passes every byte through Python. It
answers what `S3Store` asks for: objects, ranges, multipart uploads, lists and deletions. Signatures are not checked.
The processes end when their starter does.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import traceback
import urllib.request
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import formatdate
from html import escape, unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit

CHUNK_BYTES = 1 << 20
_HEX = "0123456789abcdef"


class FolderS3:
    """The server in processes of its own, on a free port."""

    def __init__(self, folder: Path, processes: int = 4) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder), str(processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the S3 server ended before it listened")
        self.url = f"http://127.0.0.1:{int(line)}"

    def make_bucket(self, name: str) -> None:
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT"), timeout=60.0):
            pass

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its session: it and the processes that it forked
        self._process.wait()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # each rank opens eight connections at once

    def handle_error(self, *_: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that gives up may hang up
            traceback.print_exc()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a head waits for the acknowledgement of the one before its body
    folder: Path

    def log_message(self, *_: object) -> None:
        pass

    def do_PUT(self) -> None:
        bucket, key, query = self._asked()
        if not key:
            self._path(bucket).mkdir(exist_ok=True)
            self._answer(200)
        elif "uploadId" in query:
            part = self._upload(query) / f"{int(query['partNumber'])}"
            self._receive(part)
            self._answer(200, {"ETag": _tag(part)})
        elif not self._path(bucket).is_dir():
            self._answer(404, text="<Error><Code>NoSuchBucket</Code></Error>")
        else:
            fresh = self.folder / f".{secrets.token_hex(8)}"
            self._receive(fresh)
            os.replace(fresh, self._path(bucket, key))
            self._answer(200, {"ETag": _tag(self._path(bucket, key))})

    def do_POST(self) -> None:
        bucket, key, query = self._asked()
        text = self.rfile.read(self._length()).decode()
        if "delete" in query:
            names = re.findall("<Key>(.*?)</Key>", text)
            for name in names:
                self._path(bucket, unescape(name)).unlink(missing_ok=True)
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            self._answer(200, text=f"<DeleteResult>{deleted}</DeleteResult>")
        elif "uploads" in query:
            number = secrets.token_hex(8)
            self._upload({"uploadId": number}).mkdir()
            tags = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{number}</UploadId>"
            self._answer(200, text=f"<InitiateMultipartUploadResult>{tags}</InitiateMultipartUploadResult>")
        else:
            parts = self._upload(query)
            fresh = self.folder / f".{secrets.token_hex(8)}"
            with fresh.open("wb") as file:
                for number in re.findall("<PartNumber>([0-9]+)</PartNumber>", text):
                    with (parts / number).open("rb") as part:
                        _copy(file.fileno(), part, 0, os.fstat(part.fileno()).st_size)
            os.replace(fresh, self._path(bucket, key))
            _remove(parts)
            tag = escape(_tag(self._path(bucket, key)))
            tags = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><ETag>{tag}</ETag>"
            self._answer(200, text=f"<CompleteMultipartUploadResult>{tags}</CompleteMultipartUploadResult>")

    def do_DELETE(self) -> None:
        bucket, key, query = self._asked()
        if "uploadId" in query:
            _remove(self._upload(query))
        else:
            self._path(bucket, key).unlink(missing_ok=True)
        self._answer(204)

    def do_GET(self) -> None:
        bucket, key, query = self._asked()
        if not key:
            self._list(bucket, query.get("prefix", ""), query.get("delimiter", ""))
            return
        try:
            file = self._path(bucket, key).open("rb")
        except FileNotFoundError:
            self._answer(404, text="<Error><Code>NoSuchKey</Code></Error>")
            return
        with file:
            status = os.fstat(file.fileno())
            tag = _tag_of(status)
            if self.headers.get("If-Match", tag) != tag:
                self._answer(412, text="<Error><Code>PreconditionFailed</Code></Error>")
                return
            begin, end = 0, status.st_size
            headers = {"ETag": tag, "Last-Modified": formatdate(status.st_mtime, usegmt=True)}
            asked = re.fullmatch("bytes=([0-9]+)-([0-9]*)", self.headers.get("Range", ""))
            if asked:
                begin, end = int(asked[1]), min(int(asked[2]) + 1, end) if asked[2] else end
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{status.st_size}"
            self.send_response(206 if asked else 200)
            for name, value in {**headers, "Content-Length": str(end - begin)}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                _copy(self.connection.fileno(), file, begin, end)

    do_HEAD = do_GET  # noqa: N815

    def _list(self, bucket: str, prefix: str, delimiter: str) -> None:
        if not self._path(bucket).is_dir():
            self._answer(404, text="<Error><Code>NoSuchBucket</Code></Error>")
            return
        objects, folders = [], {}
        for name in sorted(map(unquote, os.listdir(self._path(bucket)))):
            rest = name.removeprefix(prefix)
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders[f"{prefix}{rest.partition(delimiter)[0]}{delimiter}"] = None
                continue
            with suppress(FileNotFoundError):  # deleted meanwhile
                status = self._path(bucket, name).stat()
                moment = datetime.fromtimestamp(status.st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
                objects.append((name, status.st_size, _tag_of(status), moment))
        text = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{moment}</LastModified><ETag>{escape(tag)}</ETag>"
            f"<Size>{size}</Size></Contents>"
            for name, size, tag, moment in objects
        )
        text += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        about = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        self._answer(200, text=f"<ListBucketResult>{about}{text}</ListBucketResult>")

    def _asked(self) -> tuple[str, str, dict[str, str]]:
        """Return bucket, key and query of the request."""
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        return bucket, key, {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}

    def _path(self, bucket: str, key: str = "") -> Path:
        # One file name for a whole key, so that an object may be called like the folder of others.
        return self.folder / bucket / quote(key, safe="") if key else self.folder / bucket

    def _upload(self, query: dict[str, str]) -> Path:
        assert set(query["uploadId"]) <= set(_HEX)
        return self.folder / f".upload-{query['uploadId']}"

    def _length(self) -> int:
        return int(self.headers.get("Content-Length") or 0)

    def _receive(self, path: Path) -> None:
        left, buffer = self._length(), memoryview(bytearray(CHUNK_BYTES))
        with path.open("wb", buffering=0) as file:
            while left:
                count = self.rfile.readinto(buffer[: min(left, CHUNK_BYTES)])
                if not count:
                    raise ConnectionError("the body ends too early")
                file.write(buffer[:count])
                left -= count

    def _answer(self, status: int, headers: dict[str, str] | None = None, text: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _copy(target: int, source: BinaryIO, begin: int, end: int) -> None:
    """Copy bytes from `begin` up to `end` in the kernel, without the interpreter lock."""
    while begin < end:
        begin += os.sendfile(target, source.fileno(), begin, min(end - begin, 1 << 30))


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _tag(path: Path) -> str:
    return _tag_of(path.stat())


def _tag_of(status: os.stat_result) -> str:
    """A text that changes with the content: every write makes a new file."""
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'


def main(folder: str, processes: str) -> None:
    Handler.folder = Path(folder)
    server = Server(("127.0.0.1", 0), Handler)
    for _ in range(int(processes) - 1):
        if os.fork() == 0:
            server.serve_forever()
            os._exit(1)
    print(server.server_address[1], flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()  # until the starter ends
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
