"""20 requests for text and speech about texts and images, all at once, and their answers."""

from __future__ import annotations

import base64
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hosts_system import Hosts

CLIENT = str(Path(__file__).with_name("mixed_client.py"))
COUNT = 20
Answers = dict[int, "Answer"]


@dataclass(frozen=True)
class Answer:
    text: str
    samples: np.ndarray
    """[samples] int16; none if no speech was asked for."""


class Clients:
    """The clients of 20 requests, and what they have said so far."""

    def __init__(self, running: Hosts) -> None:
        self._running = running
        self._process: subprocess.Popen[str] = running.hosts["server"].start(CLIENT, running.url, str(COUNT))
        self._ended: list[dict[str, str]] = []

    def until_begun(self, count: int) -> None:
        """Return when the first output of so many requests has come."""
        while count:
            said = self._next()
            count -= "first" in said

    def answers(self) -> Answers:
        with self._process:
            while len(self._ended) < COUNT:
                self._next()
        for one in self._ended:
            assert "error" not in one, (one["error"], self._running.all_logs())
        return {
            int(one["answer"]): Answer(one["text"], np.frombuffer(base64.b64decode(one["audio"]), np.int16))
            for one in self._ended
        }

    def _next(self) -> dict[str, str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the clients have ended"
        said: dict[str, str] = json.loads(line)
        if "answer" in said:
            self._ended.append(said)
        return said


def assert_equal(found: Answers, right: Answers) -> None:
    """Texts are equal; so is audio, but for rounding: which requests share a batch is chance."""
    assert found.keys() == right.keys()
    for number, one in found.items():
        assert one.text == right[number].text, number
        assert one.samples.shape == right[number].samples.shape, number
        if one.samples.size:
            assert np.abs(one.samples.astype(int) - right[number].samples).max() <= 8, number
