"""Weight updates of a served model, copied into the existing storage, so captured CUDA graphs stay valid.

New weights come from memory, from a folder, or over the network from a trainer (`send_weights` to `WeightsReceiver`).
Each tensor is checked before it is copied, but there is no memory to keep the old ones until the update is complete.
An update that fails before its first copy raises WeightsError. One that fails later raises MixedWeightsError: the
weights are mixed, and the model must not serve until an update succeeds.

Over the network both sides prove that they know the key (HMAC, as multiprocessing.connection does it). The data is
checked for corruption but not encrypted. Messages are JSON; tensors are raw bytes in chunks. A receiver requests its
shard of each tensor, so every rank of a tensor-parallel engine gets its own. The sender commits the update once all
receivers have all of it.

A sender that keeps what it sent last (`SentWeights`) sends only what changed since then, to receivers that have just
these weights. The checksum of each tensor is that of the whole result: a receiver whose result differs asks for the
whole tensor. Any other receiver gets all weights: a new one, or one whose last update failed.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
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
from craton.ml.serving.device.int4 import ServedInt4Linear, is_packed, refill_packed
from craton.ml.serving.device.newcomers import Newcomers
from craton.ml.serving.device.weight_deltas import HeldWeights, SentWeights, Slices, WeightsDelta, cut
from craton.telemetry.rank import going_on, own_page

CHUNK = 16 << 20  # bytes of a tensor in one message
RECEIVE_SECONDS = 600.0  # how long to wait for a sender
LOOK_SECONDS = 0.05  # between two looks whether to go on waiting for one
SILENCE_SECONDS = 60.0  # socket timeout, after which the other side counts as lost
_MESSAGE = 65_536  # maximum bytes of a JSON message
_REASON = 4_096  # maximum characters of an error that is sent
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHOWN = 4  # names in one message
Float8Modules = ServedFloat8Linear | Float8Experts


class MixedWeightsError(WeightsError):
    """An update failed halfway: some weights are new, some old. The model needs another update."""


def named_targets(model: Decoder) -> dict[str, Tensor]:
    """Return the tensors that an update fills, by our names; of a sharded model this rank's shards."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith("router_bias")}
    return dict(model.named_parameters()) | buffers


def update_from_state(model: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Update all tensors of the model from whole tensors by our names. A sharded source tensor is gathered; all its
    ranks must call this together."""
    update = _Update(model)
    with update.explaining_failure():
        for name, tensor in tensors:
            slices = update.expect(name, _dtype_name(tensor.dtype), tuple(tensor.shape))
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            update.write(name, whole.detach()[slices])
        update.finish()


def update_from_folder(model: Decoder, folder: str | Path) -> None:
    """Update the model from a Hugging Face folder of the same model; each rank reads its shard."""
    update = _Update(model)
    with update.explaining_failure(f"the update from {folder}"):
        is_int4 = any(isinstance(module, ServedInt4Linear) for module in model.modules())
        takes_packed = is_int4 and is_packed(folder)
        if not takes_packed and (is_int4 or any(isinstance(module, Float8Modules) for module in model.modules())):
            for name, tensor in read_layers(model, folder):
                update.write(name, tensor[update.whole(name)[1]])
            return
        update.has_written = True
        try:
            if takes_packed:
                refill_packed(model, folder)
            else:
                load_weights(model, folder)
        except WeightsError:  # raised before anything changes
            update.has_written = False
            raise


@dataclass
class WeightsTransfer:
    """What an update cost: bytes of tensors sent to all receivers, and how many tensors went whole and as deltas."""

    num_bytes: int = 0
    num_whole: int = 0
    num_deltas: int = 0


def send_weights(
    addresses: str | Sequence[str],
    key: bytes,
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    base: SentWeights | None = None,
    connect: Callable[[str], socket.socket] | None = None,
) -> WeightsTransfer:
    """Send whole tensors by our names to one receiver, or to those of all ranks of engines, with their version. With
    `base`, what was sent last, receivers that have it get only the changes; it becomes what is sent now. `connect`
    opens the connection to an address; by default the receiver must be listening.

    Return when all receivers have committed the update; WeightsError names the one that did not, and why."""
    is_kept = base is not None
    base = base or SentWeights()
    transfer = WeightsTransfer()
    before = base.begin()
    with ExitStack() as stack:
        receivers = [addresses] if isinstance(addresses, str) else addresses
        lines = [_Line.to(address, key, stack, connect or _connect) for address in receivers]
        hello = {"version": version, "token": base.token}
        for line, reply in zip(lines, _ask(lines, hello), strict=True):
            line.takes_deltas = before.version is not None and reply.get("held") == [before.version, before.token]
        for name, tensor in tensors:
            if isinstance(tensor, DTensor):
                raise WeightsError(f"{name} is sharded; gather it before sending")
            whole = tensor.detach().cpu()
            _send_tensor(lines, name, whole, base, transfer)
            if is_kept:
                base.keep(name, whole)
        with going_on("transfer"):
            for line in lines:
                line.send({"end": True, "checksum": line.checksum})
            _replies(lines)
            _ask(lines, {"commit": version})
    base.version = version
    return transfer


class WeightsReceiver:
    """Listens on "host:port" (port 0: any free one) for a sender that knows the key."""

    def __init__(self, address: str, key: bytes) -> None:
        if not key:
            raise WeightsError("the key of the weights receiver is empty; set one, or any client could send weights")
        self._key = key
        host, port = _parse(address)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise WeightsError(f"cannot listen for weights at {address}: {error}") from None
        self.address = f"{address.rpartition(':')[0]}:{self._socket.getsockname()[1]}"
        self._is_cancelled = threading.Event()

    def receive(self, model: Decoder, wait_seconds: float = RECEIVE_SECONDS, held: HeldWeights | None = None) -> int:
        """Wait for a sender and receive all its weights; return their version. `held` says which weights the model has,
        and is changed with them; without it, the sender sends no delta."""
        line = self._accept(wait_seconds)
        update = _Update(model, held)
        try:
            with update.explaining_failure(f"weights from {line.other}"):
                version = _receive(line, update)
        except WeightsError as error:
            line.refuse(str(error))
            raise
        finally:
            line.close()
        return version

    def cancel(self) -> None:
        """Wait no longer for a sender; for any thread. One that has connected is heard to its end."""
        self._is_cancelled.set()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> WeightsReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, wait_seconds: float) -> _Line:
        """Accept the first sender that knows the key. Each is asked in a thread of its own: one that connects and says
        nothing does not keep others waiting."""
        deadline = time.monotonic() + wait_seconds
        asked: Newcomers[_Line] = Newcomers(self._key)
        try:
            while (left := deadline - time.monotonic()) > 0:
                if (line := asked.first()) is not None:
                    return line
                self._socket.settimeout(min(left, LOOK_SECONDS))
                try:
                    accepted, other = self._socket.accept()
                except TimeoutError:
                    if self._is_cancelled.is_set():
                        raise WeightsError("the client that asked for new weights is gone") from None
                    continue
                asked.add(_Line(accepted, f"{other[0]}:{other[1]}"))
        finally:
            asked.close()
        raise WeightsError(f"no sender connected to {self.address} within {setting(wait_seconds)}{asked.strangers}")


class _Update:
    """The state of an update: targets, missing tensors, and whether anything was written."""

    def __init__(self, model: Decoder, held: HeldWeights | None = None) -> None:
        self.model = model
        self.held = held or HeldWeights()
        self.targets = named_targets(model)
        self.missing = dict.fromkeys(self.targets)
        self.has_written = False

    @contextmanager
    def explaining_failure(self, source: str = "the update") -> Iterator[None]:
        """Turn any failure inside into an error that says in which state it leaves the weights."""
        try:
            yield
        except Exception as error:  # any error may leave mixed weights
            if self.has_written:
                raise MixedWeightsError(
                    f"{source} failed halfway: {_reason(error)}; the weights are mixed, and the model must not serve "
                    "until an update succeeds"
                ) from error
            raise WeightsError(f"{source} failed: {_reason(error)}; the weights are unchanged") from error

    def expect(self, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Check the header of the next tensor; return this rank's slices of it."""
        if name not in self.targets:
            raise WeightsError(f"the model has no tensor {name!r}")
        if name not in self.missing:
            raise WeightsError(f"tensor {name} was sent twice")
        needed, slices = self.whole(name)
        if needed != shape:
            raise WeightsError(f"{name} is {list(shape)}; the model needs {list(needed)}")
        if dtype not in _DTYPES:
            raise WeightsError(f"{name} is {dtype}; allowed: {', '.join(_DTYPES)}")
        whole = zip(slices, shape, strict=True)
        return tuple(slice(*own.indices(size)[:2]) for own, size in whole)

    def whole(self, name: str) -> tuple[tuple[int, ...], tuple[slice, ...]]:
        """Return the shape of a whole tensor, and this rank's slices of it."""
        target, module = self.targets[name], self._quantized(name)
        if isinstance(module, ServedInt4Linear):
            return module.whole_shape, module.slices
        return tuple(target.shape), own_slices(target)

    @torch.no_grad()
    def write(self, name: str, part: Tensor) -> None:
        """Copy this rank's shard into place."""
        self.has_written = True
        self.held.forget()
        if (module := self._quantized(name)) is not None:
            module.fill(name.rpartition(".")[2], part)
        else:
            local(self.targets[name]).copy_(part)
        del self.missing[name]

    def takes_delta(self, name: str, dtype: str) -> bool:
        """Whether the model has the tensor with the values that were sent: not quantized or in another precision."""
        return self._quantized(name) is None and _dtype_name(self.targets[name].dtype) == dtype

    @torch.no_grad()
    def changed(self, name: str, delta: WeightsDelta, crc32: Any) -> Tensor | None:
        """Return this rank's shard with a delta applied, on the host; None if it is not what the sender has."""
        shard = local(self.targets[name]).detach().to("cpu", copy=True).contiguous()
        return shard if delta.apply(shard) and _crc32(shard) == crc32 else None

    def _quantized(self, name: str) -> ServedFloat8Linear | Float8Experts | ServedInt4Linear | None:
        path, _, own = name.rpartition(".")
        module = self.model.get_submodule(path)
        is_quantized = isinstance(module, Float8Modules | ServedInt4Linear) and hasattr(module, f"{own}_scale")
        return module if is_quantized else None  # type: ignore[return-value]

    def finish(self) -> None:
        """Raise unless every tensor was written."""
        if self.missing:
            names = list(self.missing)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise WeightsError(f"the update has no weights for {', '.join(names[:_SHOWN])}{more}")


class _Line:
    """One end of a connection, with a timeout for both directions."""

    def __init__(self, connected: socket.socket, other: str) -> None:
        self.other = other
        self.takes_deltas = False
        self.checksum = 0  # of the names and checksums of all tensors so far
        connected.settimeout(None)
        limit = struct.pack("ll", int(SILENCE_SECONDS), 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = Connection(connected.detach())

    @classmethod
    def to(cls, address: str, key: bytes, stack: ExitStack, connect: Callable[[str], socket.socket]) -> _Line:
        try:
            line = cls(connect(address), address)
            stack.callback(line.close)
            answer_challenge(line.connection, key)
            deliver_challenge(line.connection, key)
        except AuthenticationError:
            raise WeightsError(f"{address} has a different key: no weights were sent") from None
        except (OSError, EOFError) as error:
            raise WeightsError(f"cannot connect to {address} to send weights: {_reason(error)}") from None
        return line

    def send(self, message: Mapping[str, Any]) -> None:
        self._send(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        try:
            message = json.loads(self.connection.recv_bytes(_MESSAGE))
        except (OSError, EOFError) as error:
            raise WeightsError(f"lost the connection to {self.other}: {_reason(error)}") from error
        if not isinstance(message, dict):
            raise WeightsError(f"{self.other} sent {message!r}; expected a JSON object")
        return message

    def send_bytes(self, data: memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            self._send(data[start : start + CHUNK])

    def receive_bytes(self, staging: Tensor) -> None:
        """Fill `staging`, uint8 [bytes]."""
        data = staging.numpy().data
        filled = 0
        while filled < len(data):
            received = self.connection.recv_bytes_into(data[filled : filled + CHUNK])
            if not received:
                raise WeightsError("received an empty message instead of tensor bytes")
            filled += received

    def count(self, name: str, crc32: int) -> None:
        """Add a tensor to the checksum of the update."""
        self.checksum = zlib.crc32(f"{name} {crc32}\n".encode(), self.checksum)

    def refuse(self, reason: str) -> None:
        """Send the reason, then read until the other side closes: closing first could lose the reason."""
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
            raise WeightsError(
                f"lost the connection to {self.other}: {self._sent_error() or _reason(error)}"
            ) from error

    def _sent_error(self) -> str:
        """Return the error that the other side sent before it closed, or nothing."""
        with suppress(WeightsError, ValueError):
            return str(self.receive().get("error", ""))
        return ""


@dataclass(frozen=True)
class _Shard:
    """One shard of a tensor to send, whole and, if that is smaller, as a delta."""

    whole: Tensor
    delta: WeightsDelta | None
    crc32: int


def _send_tensor(
    lines: Sequence[_Line], name: str, tensor: Tensor, base: SentWeights, transfer: WeightsTransfer
) -> None:
    """Send every receiver its shard of a tensor."""
    header = {"name": name, "dtype": _dtype_name(tensor.dtype), "shape": list(tensor.shape)}
    shards: dict[tuple[Slices, bool], _Shard] = {}  # engines of the same layout request the same ones
    asked: list[tuple[_Line, _Shard]] = []
    for line, reply in zip(lines, _ask(lines, header), strict=True):
        slices = tuple((int(start), int(stop)) for start, stop in reply["slices"])
        is_delta = line.takes_deltas and bool(reply.get("delta"))
        if (shard := shards.get((slices, is_delta))) is None:
            part, before = cut(tensor, slices), base.part(name, slices) if is_delta else None
            delta = None if before is None else WeightsDelta.between(before, part)
            shard = shards[slices, is_delta] = _Shard(part, delta, _crc32(part))
        line.count(name, shard.crc32)
        if shard.delta is None:
            _send_whole(line, shard, transfer)
        else:
            data = _sent(shard.delta.to_bytes())
            line.send({"crc32": shard.crc32, "changed": len(shard.delta.positions)})
            line.send_bytes(data.numpy().data)
            transfer.num_bytes += len(data)
            asked.append((line, shard))
    for (line, shard), reply in zip(asked, _replies([line for line, _ in asked]), strict=True):
        if reply.get("whole"):
            _send_whole(line, shard, transfer)
        else:
            transfer.num_deltas += 1


def _send_whole(line: _Line, shard: _Shard, transfer: WeightsTransfer) -> None:
    line.send({"crc32": shard.crc32})
    line.send_bytes(_sent(shard.whole.view(-1).view(torch.uint8)).numpy().data)
    transfer.num_bytes += shard.whole.nbytes
    transfer.num_whole += 1


def _sent(data: Tensor) -> Tensor:
    """Return the bytes to send: these, unless chaos flips a bit of them."""
    page = own_page()
    if page is None or not len(data) or not page.take_weights_corruption():
        return data
    flipped = data.clone()
    flipped[len(data) // 2] ^= 1
    return flipped


def _receive(line: _Line, update: _Update) -> int:
    hello = line.receive()
    version, token = hello.get("version"), hello.get("token")
    if not isinstance(version, int):
        raise WeightsError(f"the version of the weights is {version!r}; it must be an integer")
    line.send({"held": [update.held.version, update.held.token]})
    staging = _Staging(any(local(target).is_cuda for target in update.targets.values()))
    while not (header := line.receive()).get("end"):
        name, dtype, shape = header.get("name"), header.get("dtype"), header.get("shape")
        if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list):
            raise WeightsError(f"tensor header {header} needs name, dtype and shape")
        slices = update.expect(name, dtype, tuple(shape))
        line.send({"slices": [[own.start, own.stop] for own in slices], "delta": update.takes_delta(name, dtype)})
        try:
            part = _receive_shard(line, update, staging, name, [own.stop - own.start for own in slices], dtype)
        except (WeightsError, EOFError, OSError, BufferTooShort) as error:
            raise WeightsError(f"{name}: {_reason(error)}") from error
        update.write(name, part)
    update.finish()
    if header.get("checksum", line.checksum) != line.checksum:
        raise WeightsError("the checksums of all tensors differ from the sender's")
    with going_on("transfer"):
        line.send({})
        if line.receive().get("commit") != version:
            raise WeightsError("weights received, but the sender never confirmed the commit")
    if isinstance(token, str):
        update.held.version, update.held.token = version, token
    line.send({})
    return version


def _receive_shard(
    line: _Line, update: _Update, staging: _Staging, name: str, sizes: Sequence[int], dtype: str
) -> Tensor:
    """Return this rank's shard of a tensor, checked, on the host."""
    message = line.receive()
    if (changed := message.get("changed")) is not None:
        part = staging.of(_DTYPES[dtype], sizes)
        if type(changed) is not int or not 0 <= WeightsDelta.num_bytes(changed, part.dtype) < max(1, part.nbytes):
            raise WeightsError(f"a delta has {changed!r} changes of {part.numel():,} values; it must be smaller")
        data = torch.empty(WeightsDelta.num_bytes(changed, part.dtype), dtype=torch.uint8)
        line.receive_bytes(data)
        if update.takes_delta(name, dtype):
            delta = WeightsDelta.from_bytes(data, changed, part.dtype)
            shard = update.changed(name, delta, message.get("crc32"))
            if shard is not None:
                line.count(name, message["crc32"])
                line.send({})
                return shard
        line.send({"whole": True})
        message = line.receive()
    part = staging.of(_DTYPES[dtype], sizes)
    line.receive_bytes(part.view(-1).view(torch.uint8))
    if _crc32(part) != message.get("crc32"):
        raise WeightsError("checksum mismatch: the tensor was corrupted in transit")
    line.count(name, message["crc32"])
    return part


class _Staging:
    """Host memory that tensors are received into, one after the other; pinned for a GPU."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
        needed = torch.Size(sizes).numel() * dtype.itemsize
        if len(self._bytes) < needed:
            self._bytes = torch.empty(needed, dtype=torch.uint8, pin_memory=self._is_pinned)
        return self._bytes[:needed].view(dtype).view(*sizes)


def _ask(lines: Sequence[_Line], message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send a message to all receivers; return their replies."""
    for line in lines:
        line.send(message)
    return _replies(lines)


def _replies(lines: Sequence[_Line]) -> list[dict[str, Any]]:
    replies = [line.receive() for line in lines]
    for line, reply in zip(lines, replies, strict=True):
        if "error" in reply:
            raise WeightsError(f"{line.other} refused the weights: {reply['error']}")
    return replies


def read_layers(model: Decoder, folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder by our names, not quantized, with one layer in memory at a time."""
    last = model.config.shape.layers - 1
    seen: set[str] = set()
    for layer in range(last + 1):
        with torch.device("meta"):
            part = Decoder(model.config)
        part.keep_stages([Stage(range(layer, layer + 1), is_first=layer == 0, is_last=layer == last)])
        part.to(local(model.head_weight).dtype).to_empty(device="cpu")
        load_weights(part, folder)
        for name, tensor in named_targets(part).items():
            if name not in seen:  # a tied embedding is in the first and the last stage
                seen.add(name)
                yield name, tensor


def _connect(address: str) -> socket.socket:
    return socket.create_connection(_parse(address), timeout=SILENCE_SECONDS)


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise WeightsError(f"{address!r} is not an address; write host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _crc32(tensor: Tensor) -> int:
    """Return the checksum of a tensor's bytes, on the host."""
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _reason(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "the connection was closed"
    if isinstance(error, BufferTooShort):  # its text is the bytes themselves
        return "received more bytes than the tensor has"
    if isinstance(error, BlockingIOError):  # raised by a socket timeout
        return f"received nothing for {setting(SILENCE_SECONDS)}"
    return str(error) or type(error).__name__
