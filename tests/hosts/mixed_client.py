"""Ask a server for texts and speech about texts and images, from within its namespace: `mixed_client.py URL COUNT`.

All requests run at once; every other one streams. Prints a JSON line when the first output of a request has come, and
one with its whole output.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from PIL import Image

PROMPTS = ("hello", "tell me a longer story about the sea", "x", "what is this?", "and why?")


def body_of(number: int) -> dict[str, Any]:
    """The request with this number: text → text, text → speech, image → text, image → speech, in turn."""
    text = f"{PROMPTS[number % len(PROMPTS)]} {number}"
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if number % 4 >= 2:
        file = io.BytesIO()
        Image.new("RGB", (56, 56), (number * 12 % 256, 80, 160)).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    speech = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}} if number % 2 else {"modalities": ["text"]}
    settings = {"temperature": 0, "seed": number, "max_tokens": 24, "stream": number % 8 >= 4}
    return {"messages": [{"role": "user", "content": parts}], **speech, **settings}


def messages_of(response: http.client.HTTPResponse, *, stream: bool) -> Iterator[dict[str, Any]]:
    """Yield the parts of an answer's message."""
    if not stream:
        yield json.load(response)["choices"][0]["message"]
        return
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise OSError(event["error"]["message"])
            yield from (choice["delta"] for choice in event["choices"])


def ask(url: str, number: int, say: Any) -> None:
    body = body_of(number)
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began, text, audio = time.monotonic(), "", b""
    answer: dict[str, Any] = {"answer": number}
    try:
        with urllib.request.urlopen(request, timeout=150) as response:
            for part in messages_of(response, stream=body["stream"]):
                if not text and not audio:
                    say({"first": number})
                text += part.get("content") or ""
                audio += base64.b64decode((part.get("audio") or {}).get("data") or "")
    except urllib.error.HTTPError as error:
        answer["error"] = json.load(error)["error"]["message"]
    except (OSError, http.client.HTTPException) as error:
        answer["error"] = repr(error)
    say({**answer, "text": text, "audio": base64.b64encode(audio).decode(), "seconds": time.monotonic() - began})


def main() -> None:
    url, count = sys.argv[1:]
    lock = threading.Lock()

    def say(what: dict[str, Any]) -> None:
        with lock:
            sys.stdout.write(json.dumps(what) + "\n")
            sys.stdout.flush()

    threads = [threading.Thread(target=ask, args=(url, number, say)) for number in range(int(count))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
