"""The client's side of a TCPStore's protocol in Python, from its description in hd_wire.h."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import struct

HEAD = struct.Struct("<QIIIIqq")  # body, id, items, op, 0, number, wait
MAGIC = b"hpcdSt\0\1"


def keyed(key: bytes, size: int, *parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), key=key, digest_size=size).digest()


class Wire:
    """A connection that can be made to say anything."""

    def __init__(self, port: int, key: bytes, begin: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 10)
        greeting = self.receive(40)
        assert greeting[:8] == MAGIC
        theirs, ours = greeting[8:], os.urandom(32)
        self.answer = MAGIC + ours + keyed(key, 32, b"hpcdist client 1", theirs, ours)
        self.up = keyed(key, 32, b"hpcdist upward 1", theirs, ours)
        self.down = keyed(key, 32, b"hpcdist downw. 1", theirs, ours)
        self.sent = self.heard = 0
        if begin:
            self.send(self.answer)
            welcome = self.receive(56)
            proof = keyed(key, 32, b"hpcdist server 1", theirs, ours, welcome[8:24])
            assert welcome[:8] == MAGIC and welcome[24:] == proof

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return data

    def frame(self, op, items, number=0, wait_ns=0, count=None, body=None) -> bytes:
        if body is None:
            body = b"".join(struct.pack("<Q", len(item)) + item for item in items)
        count = len(items) if count is None else count
        message = HEAD.pack(len(body), 1, count, op, 0, number, wait_ns) + body
        tag = keyed(self.up, 16, struct.pack("<Q", self.sent), message)
        self.sent += 1
        return message + tag

    def reply(self):
        head = self.receive(HEAD.size)
        size, _, count, status, _, number, _ = HEAD.unpack(head)
        body = self.receive(size)
        tag = keyed(self.down, 16, struct.pack("<Q", self.heard), head, body)
        assert self.receive(16) == tag
        self.heard += 1
        items = []
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", body)
            items.append(body[8 : 8 + length])
            body = body[8 + length :]
        assert not body
        return status, number, items

    def call(self, op, items, **more):
        self.send(self.frame(op, items, **more))
        return self.reply()

    def finish(self) -> None:
        """Say that nothing more comes."""
        self.socket.shutdown(socket.SHUT_WR)

    def closed(self, within: float = 10.0) -> bool:
        """Whether the server ends the connection, saying nothing more."""
        try:
            ready = select.select([self.socket], [], [], within)[0]
            return bool(ready) and self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.socket.close()
