"""A process with a NIXL connector: it puts two payloads, prints the metadata of each as hexadecimal msgpack, and waits
to be killed."""

import signal
import sys

import msgspec
import torch

from segue.connectors.create import create


def main() -> None:
    connector = create("nixl", "", {"inline_threshold_bytes": 0, "max_bytes": 4 << 20})
    for _ in range(2):
        _, _, metadata = connector.put("a", "b", "r", {"x": torch.arange(1 << 16)})
        sys.stdout.write(msgspec.msgpack.encode(metadata).hex() + "\n")
        sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
