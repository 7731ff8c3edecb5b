"""Have a server make a video, from within its namespace: `jobs_client.py URL begin MODEL STEPS` prints the id of a job
when its first step is done, `jobs_client.py URL end ID` prints how it ended, with its file, in JSON."""

from __future__ import annotations

import base64
import json
import sys
import time
import urllib.request
from typing import Any


def call(url: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        found: bytes = response.read()
    return found


def job(url: str, video: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(f"{url}/v1/videos/{video}"))
    return found


def begin(url: str, model: str, steps: int) -> str:
    asked = {"model": model, "prompt": "a small boat", "size": "64x32", "seconds": 0.5, "seed": 5}
    made: dict[str, Any] = json.loads(call(f"{url}/v1/videos", {**asked, "num_inference_steps": steps}))
    while not (seen := job(url, made["id"]))["progress"] and seen["status"] in ("queued", "in_progress"):
        time.sleep(0.05)
    return str(made["id"])


def end(url: str, video: str) -> str:
    while (seen := job(url, video))["status"] in ("queued", "in_progress"):
        time.sleep(0.05)
    file = b"" if seen["status"] == "failed" else call(f"{url}/v1/videos/{video}/content")
    return json.dumps({"status": seen["status"], "error": seen["error"], "file": base64.b64encode(file).decode()})


def main() -> None:
    url, what, *words = sys.argv[1:]
    sys.stdout.write(begin(url, words[0], int(words[1])) if what == "begin" else end(url, words[0]))


if __name__ == "__main__":
    main()
