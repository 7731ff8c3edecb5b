"""Ask a server for text and audio, from within its namespace: `hosts_client.py URL SECONDS PARALLEL PROMPT...`.

Asks every prompt at least once, and goes on for so many seconds. Prints a line when the first answer has come, and a
JSON list of all at the end.
"""

import hashlib
import http.client
import itertools
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any


def ask(url: str, prompt: str) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav"},
        "temperature": 0,
        "seed": 7,
        "max_tokens": 24,
    }
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"content-type": "application/json"})
    began = time.monotonic()
    answer: dict[str, Any] = {"prompt": prompt}
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            message = json.load(response)["choices"][0]["message"]
        audio = (message.get("audio") or {}).get("data", "")
        answer |= {"status": 200, "text": message["content"], "audio": hashlib.sha256(audio.encode()).hexdigest()}
        answer["audio_bytes"] = len(audio)
    except urllib.error.HTTPError as error:
        answer |= {"status": error.code, "error": json.load(error)["error"]["message"]}
    except (OSError, http.client.HTTPException) as error:  # no answer: a test must see that too
        answer |= {"status": 0, "error": repr(error)}
    return {**answer, "seconds": time.monotonic() - began}


def main() -> None:
    url, seconds, parallel, *prompts = sys.argv[1:]
    end = time.monotonic() + float(seconds)
    answers: list[dict[str, Any]] = []
    numbers = itertools.count()
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers)
            if number >= len(prompts) and time.monotonic() >= end:
                return
            answer = ask(url, prompts[number % len(prompts)])
            with lock:
                answers.append(answer)
                if len(answers) == 1:
                    sys.stdout.write("answered\n")
                    sys.stdout.flush()

    threads = [threading.Thread(target=work) for _ in range(int(parallel))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
