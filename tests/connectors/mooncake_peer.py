"""A process with one Mooncake connector: `mooncake_peer.py KIND HOST MASTER`. It puts a payload, prints the metadata as
hexadecimal msgpack, and waits to be killed; `HOST` receives, so it lends memory to the store."""

import signal
import sys

import msgspec
import torch
from taking import until

from segue.connectors.create import Network, create


def main() -> None:
    kind, host, master = sys.argv[1:]
    extra = {"inline_threshold_bytes": 0, "max_bytes": 64 << 20}
    if kind == "mooncake_store":
        extra |= {"master": master, "segment": 64 << 20}
    connector = create(kind, "", extra, network=Network(host, bytes(32)))
    # a store counts on the memory of those who have died until it notices
    sent = [connector.put("a", "b", "r", {"x": torch.arange(1 << 17)})]
    until(lambda: sent[-1][0] or sent.append(connector.put("a", "b", "r", {"x": torch.arange(1 << 17)})))
    sys.stdout.write(msgspec.msgpack.encode(sent[-1][2]).hex() + "\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
