"""A cable that delays and loses frames: `slow_cable.py TAP TAP SECONDS LOSS` makes two TAP devices, and carries frames
between them. A stand-in for netem, which not every kernel has. Ends when its standard input does."""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000


def tap(name: str) -> int:
    """Make a TAP device, which lives as long as the descriptor that this returns. It takes no offloads: the kernel cuts
    segments to frames and computes their checksums before we read them."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def main() -> None:
    names, delay, loss = sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4])
    one, other = map(tap, names)
    across = {one: other, other: one}
    chance = random.Random(7)
    waiting: list[tuple[float, int, int, bytes]] = []
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    number = 0
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([one, other, sys.stdin], [], [], left)
        if sys.stdin in readable:
            return
        for device in readable:
            frame = os.read(device, 65536)
            number += 1
            if chance.random() >= loss:
                heapq.heappush(waiting, (time.monotonic() + delay, number, across[device], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, frame = heapq.heappop(waiting)
            try:
                os.write(device, frame)
            except OSError:
                continue  # the device is down or full: one more lost frame


if __name__ == "__main__":
    main()
