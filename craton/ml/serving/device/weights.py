"""New weights for a model that serves, copied into the storage of the old: whatever was captured with them stays valid.

They come from memory, from a folder, or over the network from a trainer (`send_weights` to `WeightsReceiver`). A tensor
is checked before it is copied, but there is no room to keep all the old ones until the last new one has come. So an
update that fails before it changed anything raises WeightsError, and one that fails later MixedWeightsError: then the
model is neither the old one nor the new one, and must answer nobody until an update has gone through.

Over the network both sides prove that they know the key (HMAC, as multiprocessing.connection does it); what follows is
checked for damage but not encrypted. Messages are JSON, tensors are raw bytes in chunks. Of each tensor a receiver asks
for the part that it holds, so the ranks of a tensor-parallel engine each get theirs. When all receivers have all of it,
and not before, they are told that it counts.
"""

from __future__ import annotations

import json
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import AuthenticationError, BufferTooShort
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from craton.formatting import setting
from craton.ml.collectives import local, own_slices
from craton.ml.models import Decoder, Stage, WeightsError, load_weights
from craton.ml.serving.device.float8 import Float8Experts, ServedFloat8Linear

CHUNK = 16 << 20  # bytes of a tensor in one message
RECEIVE_SECONDS = 600.0  # that a sender is waited for
SILENCE_SECONDS = 60.0  # after which the other side is given up
_MESSAGE = 65_536  # bytes of a message that is not a tensor's, at most
_REASON = 4_096  # letters of a reason that are sent
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHOWN = 4  # names in one message


class MixedWeightsError(WeightsError):
    """An update failed half-way: some weights are new and some old. Only another update makes the model whole."""


def named_targets(model: Decoder) -> dict[str, Tensor]:
    """What an update fills, by our names; of a sharded model this rank's parts."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith("router_bias")}
    return dict(model.named_parameters()) | buffers


def update_from_state(model: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Takes whole tensors by our names, every one that the model has. A sharded one is gathered, by all ranks that
    share it together."""
    update = _Update(model)
    with update.told():
        for name, tensor in tensors:
            slices = update.expect(name, _dtype_name(tensor.dtype), tuple(tensor.shape))
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            update.write(name, whole.detach()[slices])
        update.finish()


def update_from_folder(model: Decoder, folder: str | Path) -> None:
    """Takes the weights of a Hugging Face folder of the same model; of a sharded one each rank its part."""
    update = _Update(model)
    with update.told(f"the update from {folder}"):
        if any(isinstance(module, ServedFloat8Linear | Float8Experts) for module in model.modules()):
            for name, tensor in _read_layers(model, folder):
                update.write(name, tensor[own_slices(update.targets[name])])
            return
        update.has_written = True
        try:
            load_weights(model, folder)
        except WeightsError:  # which it finds before it changes anything
            update.has_written = False
            raise


def send_weights(
    addresses: str | Sequence[str], key: bytes, tensors: Iterable[tuple[str, Tensor]], version: int
) -> None:
    """Sends whole tensors by our names to a receiver, or to those of all ranks of an engine, and the number that tokens
    of these weights will bear. Returns when all of them have taken it over; WeightsError says who did not, and why."""
    with ExitStack() as stack:
        receivers = [addresses] if isinstance(addresses, str) else addresses
        lines = [_Line.to(address, key, stack) for address in receivers]
        _ask(lines, {"version": version})
        for name, tensor in tensors:
            if isinstance(tensor, DTensor):
                raise WeightsError(f"{name} is sharded; gather it before sending")
            header = {"name": name, "dtype": _dtype_name(tensor.dtype), "shape": list(tensor.shape)}
            for line, reply in zip(lines, _ask(lines, header), strict=True):
                line.send_tensor(tensor.detach()[tuple(slice(start, stop) for start, stop in reply["slices"])])
        _ask(lines, {"end": True})
        _ask(lines, {"commit": version})


class WeightsReceiver:
    """Listens at "host:port" (port 0: any that is free) for whoever knows the key."""

    def __init__(self, address: str, key: bytes) -> None:
        if not key:
            raise WeightsError("the key of a weights receiver is empty; anybody could send weights")
        self._key = key
        host, port = _parse(address)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise WeightsError(f"cannot listen for weights at {address}: {error}") from None
        self.address = f"{address.rpartition(':')[0]}:{self._socket.getsockname()[1]}"

    def receive(self, model: Decoder, wait_seconds: float = RECEIVE_SECONDS) -> int:
        """Waits for a sender and takes all its weights; returns their version."""
        line = self._accept(wait_seconds)
        update = _Update(model)
        try:
            with update.told(f"weights from {line.other}"):
                version = _receive(line, update)
        except WeightsError as error:
            line.refuse(str(error))
            raise
        finally:
            line.close()
        return version

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> WeightsReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, wait_seconds: float) -> _Line:
        """The first that knows the key."""
        deadline = time.monotonic() + wait_seconds
        strangers = ""
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                accepted, other = self._socket.accept()
            except TimeoutError:
                break
            line = _Line(accepted, f"{other[0]}:{other[1]}")
            try:
                deliver_challenge(line.connection, self._key)
                answer_challenge(line.connection, self._key)
            except (AuthenticationError, OSError, EOFError, ValueError):
                strangers = f"; {line.other} came without the right key"
                line.close()
                continue
            return line
        raise WeightsError(f"nobody sent weights to {self.address} within {setting(wait_seconds)}{strangers}")


class _Update:
    """What has come of an update, and what is still to come."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.targets = named_targets(model)
        self.missing = dict.fromkeys(self.targets)
        self.has_written = False

    @contextmanager
    def told(self, source: str = "the update") -> Iterator[None]:
        """Any failure inside is told as what it leaves behind."""
        try:
            yield
        except Exception as error:  # whatever it was, what it leaves behind must be known
            if self.has_written:
                raise MixedWeightsError(
                    f"{source} failed half-way: {_reason(error)}; the model's weights are mixed, and it must answer "
                    "nobody until a whole update has gone through"
                ) from error
            raise WeightsError(f"{source} failed: {_reason(error)}; the model's weights are as they were") from error

    def expect(self, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Which part of a tensor that is to come is this rank's."""
        if name not in self.targets:
            raise WeightsError(f"the model has no tensor {name!r}")
        if name not in self.missing:
            raise WeightsError(f"{name} came twice")
        target = self.targets[name]
        if tuple(target.shape) != shape:
            raise WeightsError(f"{name} is {list(shape)}; the model needs {list(target.shape)}")
        if dtype not in _DTYPES:
            raise WeightsError(f"{name} is {dtype}; allowed: {', '.join(_DTYPES)}")
        whole = zip(own_slices(target), shape, strict=True)
        return tuple(slice(*own.indices(size)[:2]) for own, size in whole)

    @torch.no_grad()
    def write(self, name: str, part: Tensor) -> None:
        """Copies this rank's part into place."""
        path, _, own = name.rpartition(".")
        module = self.model.get_submodule(path)
        self.has_written = True
        if isinstance(module, ServedFloat8Linear | Float8Experts) and hasattr(module, f"{own}_scale"):
            module.fill(own, part)
        else:
            local(self.targets[name]).copy_(part)
        del self.missing[name]

    def finish(self) -> None:
        """That nothing is missing."""
        if self.missing:
            names = list(self.missing)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise WeightsError(f"no new weights came for {', '.join(names[:_SHOWN])}{more}")


class _Line:
    """One side of a conversation; neither waits for the other for ever."""

    def __init__(self, connected: socket.socket, other: str) -> None:
        self.other = other
        connected.settimeout(None)
        limit = struct.pack("ll", int(SILENCE_SECONDS), 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = Connection(connected.detach())

    @classmethod
    def to(cls, address: str, key: bytes, stack: ExitStack) -> _Line:
        try:
            line = cls(socket.create_connection(_parse(address), timeout=SILENCE_SECONDS), address)
            stack.callback(line.close)
            answer_challenge(line.connection, key)
            deliver_challenge(line.connection, key)
        except AuthenticationError:
            raise WeightsError(f"{address} has another key: no weights were sent") from None
        except (OSError, EOFError) as error:
            raise WeightsError(f"{address} cannot be reached to send weights: {_reason(error)}") from None
        return line

    def send(self, message: Mapping[str, Any]) -> None:
        self._send(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        try:
            message = json.loads(self.connection.recv_bytes(_MESSAGE))
        except (OSError, EOFError) as error:
            raise WeightsError(f"{self.other} is gone: {_reason(error)}") from error
        if not isinstance(message, dict):
            raise WeightsError(f"{self.other} sent {message!r} where a message was expected")
        return message

    def send_tensor(self, part: Tensor) -> None:
        data = part.contiguous().cpu().view(-1).view(torch.uint8).numpy().data
        self.send({"crc32": zlib.crc32(data)})
        for start in range(0, len(data), CHUNK):
            self._send(data[start : start + CHUNK])

    def receive_tensor(self, staging: Tensor) -> None:
        """Fills `staging`, uint8 [bytes]."""
        crc32 = self.receive().get("crc32")
        data = staging.numpy().data
        filled = 0
        while filled < len(data):
            received = self.connection.recv_bytes_into(data[filled : filled + CHUNK])
            if not received:
                raise WeightsError("an empty message came in place of its bytes")
            filled += received
        if zlib.crc32(data) != crc32:
            raise WeightsError("its checksum is another: it was damaged on the way")

    def refuse(self, reason: str) -> None:
        """Tells the other side why, and lets it finish its sentence: a socket closed before that loses the reason."""
        with suppress(WeightsError, OSError, EOFError):
            self.send({"error": reason[:_REASON]})
            while True:
                self.connection.recv_bytes()

    def close(self) -> None:
        self.connection.close()

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self.connection.send_bytes(data)
        except OSError as error:
            raise WeightsError(f"{self.other} is gone: {self._last_word() or _reason(error)}") from error

    def _last_word(self) -> str:
        """Why the other side hung up, if it said so."""
        with suppress(WeightsError, ValueError):
            return str(self.receive().get("error", ""))
        return ""


def _receive(line: _Line, update: _Update) -> int:
    version = line.receive().get("version")
    if not isinstance(version, int):
        raise WeightsError(f"the version of the weights is {version!r}; it must be a whole number")
    line.send({})
    staging = _Staging(any(local(target).is_cuda for target in update.targets.values()))
    while not (header := line.receive()).get("end"):
        name, dtype, shape = header.get("name"), header.get("dtype"), header.get("shape")
        if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list):
            raise WeightsError(f"{header} does not say which tensor comes")
        slices = update.expect(name, dtype, tuple(shape))
        line.send({"slices": [[own.start, own.stop] for own in slices]})
        sizes = [own.stop - own.start for own in slices]
        part = staging.of(_DTYPES[dtype], sizes)
        try:
            line.receive_tensor(part.view(-1).view(torch.uint8))
        except (WeightsError, EOFError, OSError, BufferTooShort) as error:
            raise WeightsError(f"{name}: {_reason(error)}") from error
        update.write(name, part)
    update.finish()
    line.send({})
    if line.receive().get("commit") != version:
        raise WeightsError("all weights came, but not the word that all receivers have them")
    line.send({})
    return version


class _Staging:
    """Host memory that tensors are received into, one after the other; pinned where they go to a GPU from there."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
        needed = torch.Size(sizes).numel() * dtype.itemsize
        if len(self._bytes) < needed:
            self._bytes = torch.empty(needed, dtype=torch.uint8, pin_memory=self._is_pinned)
        return self._bytes[:needed].view(dtype).view(*sizes)


def _ask(lines: Sequence[_Line], message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What all say to a message."""
    for line in lines:
        line.send(message)
    replies = [line.receive() for line in lines]
    for line, reply in zip(lines, replies, strict=True):
        if "error" in reply:
            raise WeightsError(f"{line.other} refused the weights: {reply['error']}")
    return replies


def _read_layers(model: Decoder, folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder by our names, as the model would hold them without fp8; one layer is in memory."""
    last = model.config.shape.layers - 1
    seen: set[str] = set()
    for layer in range(last + 1):
        with torch.device("meta"):
            part = Decoder(model.config)
        part.keep_stages([Stage(range(layer, layer + 1), is_first=layer == 0, is_last=layer == last)])
        part.to(local(model.head_weight).dtype).to_empty(device="cpu")
        load_weights(part, folder)
        for name, tensor in named_targets(part).items():
            if name not in seen:  # a tied embedding is in the first and in the last
                seen.add(name)
                yield name, tensor


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise WeightsError(f"the address is {address!r}; it must be host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reason(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "the connection was closed"
    if isinstance(error, BufferTooShort):  # whose text is the bytes themselves
        return "more bytes came than it has"
    if isinstance(error, BlockingIOError):  # what a socket's own time limit raises
        return f"nothing came for {setting(SILENCE_SECONDS)}"
    return str(error) or type(error).__name__
