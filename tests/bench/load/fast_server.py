"""A real HTTP server in a process of its own that streams as fast as it is told, to test the client's speed.

    python fast_server.py PIECES TICKS_PER_SECOND

Every connection gets one piece a tick, each in a write of its own, as an engine does that answers many requests with
every step. It prints its port and ends when its input is closed.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

TRIAL_TOKENS = 2  # what a client asks for that only tries the server out gets two pieces
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"tiny","choices":'
    b'[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
)
MODELS = b'{"object":"list","data":[{"id":"tiny"}]}'


@contextmanager
def fast_server(pieces: int, ticks_per_second: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    command = [sys.executable, __file__, str(pieces), str(ticks_per_second)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process, f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """Answers any POST with a stream, any GET with the list of models."""

    def __init__(self, streams: dict[Connection, int], pieces: int) -> None:
        self.streams, self.pieces, self.received = streams, pieces, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, separator, body = self.received.partition(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
        )
        if not separator or len(body) < length:
            return
        self.received = b""
        if head.startswith(b"GET"):
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
        else:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            trial = b'"max_tokens":%d,' % TRIAL_TOKENS in body
            self.streams[self] = TRIAL_TOKENS if trial else self.pieces

    def tick(self) -> None:
        if self.streams[self]:
            self.streams[self] -= 1
            self.transport.write(chunk(EVENT))
            return
        usage = b'{"choices":[],"usage":{"prompt_tokens":16,"completion_tokens":%d}}' % self.pieces
        end = b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\ndata: %b\n\ndata: [DONE]\n\n' % usage
        self.transport.write(chunk(end) + b"0\r\n\r\n")
        del self.streams[self]


async def main(pieces: int, ticks_per_second: float) -> None:
    loop = asyncio.get_running_loop()
    streams: dict[Connection, int] = {}
    server = await loop.create_server(lambda: Connection(streams, pieces), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    over = asyncio.Event()
    loop.add_reader(sys.stdin, over.set)
    at = loop.time()
    while not over.is_set():
        for connection in list(streams):
            connection.tick()
        at = max(at + 1 / ticks_per_second, loop.time())
        await asyncio.sleep(at - loop.time())


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
