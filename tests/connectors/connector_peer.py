"""A process with one shared-memory connector, driven over its pipes.

`python connector_peer.py ADDRESS POOL MAX DEVICE`: sizes in bytes; DEVICE is what `device_of` knows, or `none`.

Requests and answers are msgpack maps on stdin and stdout, one at a time, each after its length.
"""

import struct
import sys
from typing import Any, BinaryIO

import msgspec
import torch
from taking import take

from segue.connectors.device.cuda import cuda_memory
from segue.connectors.device.memfd import MemfdMemory
from segue.connectors.device.memory import DeviceMemory
from segue.connectors.shm.connector import SharedMemoryConnector


def send(pipe: BinaryIO, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    pipe.write(struct.pack("<I", len(data)) + data)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    length = pipe.read(4)
    if len(length) < 4:
        raise EOFError
    return msgspec.msgpack.decode(pipe.read(struct.unpack("<I", length)[0]))


def device_of(kind: str) -> DeviceMemory | None:
    match kind:
        case "memfd":
            return MemfdMemory()
        case "unreachable":
            return MemfdMemory(reachable=False)
        case "cuda":
            return cuda_memory(torch.device("cuda:0"))
    return None


def numbers(size: int, first: int, device: str = "cpu") -> dict[str, Any]:
    """A payload of `size` bytes that counts up from `first`."""
    return {"x": torch.arange(first, first + size // 8, device=device)}


def right(payload: dict[str, Any], first: int) -> bool:
    tensor = payload["x"].cpu()
    return bool(torch.equal(tensor, torch.arange(first, first + tensor.numel())))


def main() -> None:
    torch.set_num_threads(1)
    kind = sys.argv[4]
    place = "cuda" if kind == "cuda" else "cpu"
    connector = SharedMemoryConnector(
        sys.argv[1],
        pool_bytes=int(sys.argv[2]),
        max_bytes=int(sys.argv[3]),
        shm_threshold_bytes=0,
        cuda_pool_bytes=int(sys.argv[3]),
        device=device_of(kind),
    )
    held: dict[str, list[tuple[Any, int]]] = {}
    send(sys.stdout.buffer, "ready")
    while True:
        try:
            match receive(sys.stdin.buffer):
                case ["put", request, size, first]:
                    answer: Any = connector.put("a", "b", request, numbers(size, first, place))
                case ["echo", metadata]:
                    found = take(connector, "a", "b", "echo", metadata)
                    answer = connector.put("b", "a", "echo", found[0]) if found is not None else (False, 0, None)
                case ["where", request]:
                    answer = [str(payload["x"].device.type) for payload, _ in held[request]]
                case ["get", request, metadata, first]:
                    found = take(connector, "a", "b", request, metadata)
                    if found is not None:
                        held.setdefault(request, []).append((found[0], first))
                    answer = None if found is None else right(found[0], first)
                case ["check", request]:
                    answer = all(right(payload, first) for payload, first in held[request])
                case ["release", request]:
                    held.pop(request, None)
                    answer = connector.release(request)
                case ["close"]:
                    answer = connector.close()
        except EOFError:
            return
        send(sys.stdout.buffer, answer)


if __name__ == "__main__":
    main()
