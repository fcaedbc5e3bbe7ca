"""S3 and compatible services as a store.

The client is obstore (the Rust crate object_store): one wheel without dependencies, parallel parts without Python's
GIL, interrupted multipart uploads that are aborted and never completed, and retries with backoff. boto3 can do the
same, but moves bytes through Python and has many dependencies.

Endpoint, region and credentials are those of every AWS tool: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID ..., a
profile, web identity and container credentials, or the role of the instance. AWS_MAX_ATTEMPTS limits the attempts and
AWS_TIMEOUT ("120s") one request. A killed process leaves at most invisible parts of an upload: give the bucket a
lifecycle rule that aborts incomplete multipart uploads, so that they are not billed.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from craton.extras import install_command, missing_text
from craton.infrastructure.errors import ObjectMissingError, StorageError
from craton.infrastructure.storage.s3_access import credentials, storage_error, was_cut_off
from craton.infrastructure.storage.store import (
    Bytes,
    Names,
    ObjectInfo,
    Objects,
    ObjectWriter,
    Store,
    as_bytes,
    checked_name,
)

logger = logging.getLogger(__name__)

PART_BYTES = 16 * 2**20
PARTS_IN_FLIGHT = 8
MAX_PARTS = 9_000  # S3 allows 10,000
ATTEMPTS = 8
RETRY_SECONDS = 150.0  # in all; requests are signed for five minutes
PAUSE_SECONDS = 0.1  # before the second attempt; it grows from there
REQUEST_TIMEOUT = "120s"
SHORT_ANSWERS = 3  # attempts for a request whose response was truncated

Result = TypeVar("Result")


class S3Store(Store):
    """The objects of a bucket below a prefix; `patience_seconds` limits the retries of a request instead of the AWS
    variables."""

    def __init__(self, url: str, patience_seconds: float | None = None) -> None:
        parts = urlsplit(url)
        if not parts.netloc or parts.query or parts.fragment or ".." in PurePosixPath(parts.path).parts:
            raise StorageError(f"{url} is not an S3 location; use s3://bucket or s3://bucket/prefix")
        self.bucket, self._patience_seconds = parts.netloc, patience_seconds
        self.prefix = parts.path.strip("/")
        self.url = f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    @contextmanager
    def create(self, name: str, expected_bytes: int = 0) -> Iterator[ObjectWriter]:
        part_bytes = max(PART_BYTES, -(-expected_bytes // MAX_PARTS))
        writer = _PartsWriter(self, checked_name(name), part_bytes)
        try:
            yield writer
        except BaseException:
            writer.abandon()
            raise
        writer.finish()

    def info(self, name: str) -> ObjectInfo | None:
        obstore = self._library
        try:
            return self._asked(name, lambda: _info(obstore.head(self._client, checked_name(name))))
        except ObjectMissingError:
            return None

    def list(self, prefix: str = "") -> Objects:
        obstore = self._library

        def every() -> Objects:
            metas = obstore.list(self._client, checked_name(prefix) if prefix else None).collect()
            return sorted((_info(meta) for meta in metas), key=lambda info: info.name)

        infos = self._asked(prefix, every)
        # Consoles create a folder as an empty object of its name, which is not one of our objects.
        parents = {str(parent) for info in infos for parent in PurePosixPath(info.name).parents}
        return [info for info in infos if info.name and (info.bytes or info.name not in parents)]

    def folders(self, prefix: str = "") -> Names:
        obstore = self._library

        def every() -> Names:
            listing = obstore.list_with_delimiter(self._client, checked_name(prefix) if prefix else None)
            return sorted(PurePosixPath(common_prefix).name for common_prefix in listing["common_prefixes"])

        return self._asked(prefix, every)

    def delete(self, names: Iterable[str]) -> None:
        obstore = self._library
        names = [checked_name(name) for name in names]
        for start in range(0, len(names), 1000):
            self._asked("", lambda some=names[start : start + 1000]: obstore.delete(self._client, some))  # type: ignore[misc]

    def check_writable(self, seconds: float | None = None) -> None:
        name = f".{secrets.token_hex(4)}.check"
        store = self if seconds is None else S3Store(self.url, seconds)
        store.put(name, b"\0")
        store.delete([name])

    def _read_into(self, info: ObjectInfo, begin: int, target: memoryview) -> None:
        target[:] = self._read(info, begin, begin + target.nbytes)

    def _read(self, info: ObjectInfo, begin: int, end: int) -> memoryview:
        """Return a range of the object version that `info` describes."""
        obstore = self._library
        options: Any = {"if_match": info.tag, "range": (begin, end)}
        for _ in range(SHORT_ANSWERS):
            buffer = self._asked(info.name, lambda: obstore.get(self._client, info.name, options=options).buffer())
            if len(buffer) == end - begin:
                return memoryview(buffer)
        raise StorageError(
            f"{self.where(info.name)}: received {len(buffer)} bytes instead of {end - begin}, {SHORT_ANSWERS} times; "
            "something between here and S3 truncates responses: check proxies and AWS_ENDPOINT_URL"
        )

    def _must(self, name: str) -> ObjectInfo:
        """Return the info. The response to HEAD has no text: only a list shows whether object or bucket is missing."""
        info = self.info(name)
        if info is None:
            self.folders()
            raise ObjectMissingError(f"{self.where(name)} does not exist")
        return info

    def _asked(self, name: str, request: Callable[[], Result]) -> Result:
        """Send an idempotent request; repeat it if its response was truncated."""
        obstore = self._library
        start = time.monotonic()
        for attempt in range(SHORT_ANSWERS):
            try:
                result = request()
                logger.debug("%s: answered after %.3f s", self.where(name), time.monotonic() - start)
                return result
            except (OSError, obstore.exceptions.BaseError) as error:
                if attempt == SHORT_ANSWERS - 1 or not was_cut_off(error):
                    raise self._error(name, error) from error
            logger.info("%s: the response was cut off; attempt %d follows", self.where(name), attempt + 2)
            time.sleep(PAUSE_SECONDS * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _error(self, name: str, error: Exception) -> StorageError:
        return storage_error(self.where(name), self.bucket, error)

    @cached_property
    def _library(self) -> Any:
        try:
            import obstore
        except ImportError as error:
            raise StorageError(missing_text(self.url, ["obstore"], install_command("s3"))) from error
        return obstore

    @cached_property
    def _client(self) -> Any:
        settings = {**_options(os.environ, self._patience_seconds), **credentials(os.environ)}
        try:
            return self._library.store.S3Store(self.bucket, prefix=self.prefix or None, **settings)
        except (ValueError, self._library.exceptions.BaseError) as error:
            reason = str(error).partition("\n")[0]
            raise StorageError(f"{self.url}: {reason}; correct the AWS_ variables of the environment") from error


class _PartsWriter:
    """Collect parts for a thread that uploads them; an object smaller than a part is one request."""

    def __init__(self, store: S3Store, name: str, part_bytes: int) -> None:
        self.bytes = 0
        self._store, self._name, self._part_bytes = store, name, part_bytes
        self._part = bytearray()
        self._parts: queue.Queue[bytearray | None] = queue.Queue(maxsize=1)
        self._uploader: threading.Thread | None = None
        self._error: Exception | None = None
        self._abandoned = False

    def write(self, data: Bytes) -> None:
        view = as_bytes(data)
        self.bytes += view.nbytes
        while view.nbytes:
            taken = view[: self._part_bytes - len(self._part)]
            self._part += taken
            view = view[taken.nbytes :]
            if len(self._part) == self._part_bytes:
                self._hand_over(self._part)
                self._part = bytearray()

    def finish(self) -> None:
        obstore = self._store._library
        if self._uploader is None:
            client, part = self._store._client, bytes(self._part)
            try:
                self._store._asked(self._name, lambda: obstore.put(client, self._name, part, use_multipart=False))
            except ObjectMissingError as error:
                raise self._nowhere() from error
            return
        if self._part:
            self._hand_over(self._part)
        self._hand_over(None)
        self._uploader.join()
        self._raise_error()

    def abandon(self) -> None:
        """Abort the upload; even if that fails, no object becomes visible."""
        self._abandoned = True
        if self._uploader is not None:
            while self._uploader.is_alive():
                try:
                    self._parts.put(None, timeout=0.05)
                    break
                except queue.Full:
                    continue
            self._uploader.join()

    def _hand_over(self, part: bytearray | None) -> None:
        if self._uploader is None:
            self._uploader = threading.Thread(target=self._upload, name=f"upload {self._name}", daemon=True)
            self._uploader.start()
        while True:
            self._raise_error()
            try:
                return self._parts.put(part, timeout=0.05)
            except queue.Full:
                continue

    def _raise_error(self) -> None:
        if self._error is not None:
            problem = self._store._error(self._name, self._error)
            raise (self._nowhere() if isinstance(problem, ObjectMissingError) else problem) from self._error

    def _nowhere(self) -> StorageError:
        return StorageError(
            f"{self._store.where(self._name)}: a write returned 404; there is no bucket {self._store.bucket}, "
            "or AWS_ENDPOINT_URL is not an S3 service"
        )

    def _upload(self) -> None:
        obstore = self._store._library
        try:
            obstore.put(
                self._store._client,
                self._name,
                self._arriving(),
                chunk_size=self._part_bytes,
                max_concurrency=PARTS_IN_FLIGHT,
            )
        except Exception as error:  # noqa: BLE001 - handed to the thread that writes
            self._error = error

    def _arriving(self) -> Iterator[bytearray]:
        while (part := self._parts.get()) is not None:
            yield part
        if self._abandoned:
            raise InterruptedError("abandoned by its writer")  # obstore aborts the upload on any error of its source


def _info(meta: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(str(meta["path"]), int(meta["size"]), str(meta["e_tag"] or meta["last_modified"]))


def _options(environment: Mapping[str, str], patience_seconds: float | None) -> dict[str, Any]:
    """Return timeouts and retries of the client; plain http only if the endpoint uses it."""
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or ""
    if endpoint and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
        raise StorageError(f"AWS_ENDPOINT_URL is {endpoint!r}; set it to a URL such as https://s3.example.com")
    attempts = environment.get("AWS_MAX_ATTEMPTS") or str(ATTEMPTS)
    if not attempts.isdigit() or int(attempts) < 1:
        raise StorageError(f"AWS_MAX_ATTEMPTS is {attempts!r}; set it to a whole number, at least 1")
    timeout, retry_seconds = environment.get("AWS_TIMEOUT") or REQUEST_TIMEOUT, RETRY_SECONDS
    if patience_seconds is not None:
        timeout, retry_seconds = f"{patience_seconds / 2:g}s", patience_seconds / 2
    return {
        "client_options": {
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": "5s",
            "timeout": timeout,
        },
        "retry_config": {
            "max_retries": int(attempts) - 1,
            "retry_timeout": timedelta(seconds=retry_seconds),
            "backoff": {
                "init_backoff": timedelta(seconds=PAUSE_SECONDS),
                "max_backoff": timedelta(seconds=15),
                "base": 2,
            },
        },
    }
