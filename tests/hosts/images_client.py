"""Ask a server for images, all at once, from within its namespace: `images_client.py URL COUNT`.

Prints a JSON line when the first of them is there, and one with each of them.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

PROMPTS = ("a small boat left the harbour", "hills", "the sea in the morning, and a house behind it")


def ask(url: str, number: int) -> dict[str, Any]:
    body = {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "size": "64x96" if number % 2 else "64x64",
        "num_inference_steps": 6 + number % 3,
        "seed": number,
    }
    request = urllib.request.Request(
        f"{url}/v1/images/generations", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=150) as response:
            return {"number": number, "png": json.load(response)["data"][0]["b64_json"]}
    except urllib.error.HTTPError as error:
        return {"number": number, "error": json.load(error)["error"]["message"]}


def main() -> None:
    url, count = sys.argv[1:]
    lock = threading.Lock()

    def work(number: int) -> None:
        answer = ask(url, number)
        with lock:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(int(count))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
