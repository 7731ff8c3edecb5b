"""One request of each kind against a real server, through the official OpenAI client.

    python examples/demo.py MODEL_DIR OUT_DIR

Starts `segue serve` on a free port, sends text, a photo, a voice clip and a video with an audio track, requests text
and speech, streamed and whole, and writes a transcript, WAV files, and a timeline image of the stages.
"""

from __future__ import annotations

import base64
import signal
import subprocess
import sys
import time
import wave
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from openai import OpenAI

MODEL = "demo"
ASSETS = Path(__file__).parent.parent / "assets"
SAMPLE_RATE = 24000
SHADES = {"queue": 0.12, "first": 0.5, "run": 1.0}
"""Colours: waiting for the first input, making the first output, making the rest."""


@dataclass
class Shown:
    """The result of one request and its times (seconds since it was sent, measured at the client)."""

    name: str
    text: str = ""
    pcm: bytes = b""
    jct: float = 0.0
    ttft: float | None = None
    ttfa: float | None = None
    spans: list[dict[str, Any]] = field(default_factory=list)
    """(stage, activity, start, end): when each stage waited for its first input, made its first output and the rest."""

    @property
    def seconds(self) -> float:
        return len(self.pcm) / 2 / SAMPLE_RATE

    @property
    def rtf(self) -> float | None:
        return self.jct / self.seconds if self.pcm else None


def data_url(path: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def prompts() -> dict[str, list[dict[str, Any]]]:
    """User messages of each kind, in the OpenAI API's format."""
    photo = {"type": "image_url", "image_url": {"url": data_url(ASSETS / "photo.jpg", "image/jpeg")}}
    voice = (ASSETS / "speech.wav").read_bytes()
    speech = {"type": "input_audio", "input_audio": {"data": base64.b64encode(voice).decode(), "format": "wav"}}
    video = {"type": "video_url", "video_url": {"url": data_url(ASSETS / "video.mp4", "video/mp4")}}

    def ask(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    return {
        "text": [ask("Say something about the sea.")],
        "photo": [photo, ask("What is in the image?")],
        "speech": [speech, ask("What was said?")],
        "video with audio": [video, ask("What happens, and what is heard?")],
    }


def request(content: list[dict[str, Any]], modalities: list[str]) -> dict[str, Any]:
    """The keyword arguments of `client.chat.completions.create`, for streamed and whole answers alike."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "modalities": modalities,
        "seed": 7,
        "max_tokens": 64,
        "extra_body": {
            "return_metrics": True,
            "sampling": {"talker": {"max_tokens": 300}},
            "options": {"use_audio_in_video": True},  # without it the model ignores a video's audio
        },
    }
    if "audio" in modalities:
        asked["audio"] = {"voice": "Chelsie", "format": "pcm16"}
    return asked


def whole(client: OpenAI, name: str, content: list[dict[str, Any]], modalities: list[str]) -> Shown:
    shown, sent = Shown(name), time.monotonic()
    answer = client.chat.completions.create(**request(content, modalities))
    shown.jct = time.monotonic() - sent
    message = answer.choices[0].message
    shown.text = message.content or ""
    if message.audio is not None:
        shown.pcm = base64.b64decode(message.audio.data)
    shown.spans = answer.choices[0].model_extra["segue"]["metrics"]["spans"]
    return shown


def streamed(client: OpenAI, name: str, content: list[dict[str, Any]], modalities: list[str]) -> Shown:
    shown, sent = Shown(name), time.monotonic()
    for chunk in client.chat.completions.create(stream=True, **request(content, modalities)):
        now = time.monotonic() - sent
        for choice in chunk.choices:
            if choice.delta.content:
                shown.ttft = shown.ttft or now
                shown.text += choice.delta.content
            if choice.delta.audio is not None and choice.delta.audio.data:
                shown.ttfa = shown.ttfa or now
                shown.pcm += base64.b64decode(choice.delta.audio.data)
            if extra := (choice.model_extra or {}).get("segue"):
                shown.spans = extra["metrics"]["spans"]
    shown.jct = time.monotonic() - sent
    return shown


def wait_ready(server: subprocess.Popen[str]) -> str:
    """The address that the server prints when every stage is ready. Exits if the server does not start."""
    assert server.stdout is not None
    for line in server.stdout:
        if " is served at " in line:
            return line.rsplit(maxsplit=1)[-1]
    raise SystemExit(f"the server ended with status {server.wait()}")


def write_wav(path: Path, pcm: bytes) -> None:
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE)
        out.writeframes(pcm)


def draw(shown: list[Shown], path: Path) -> None:
    """Draw a timeline: one panel per request, one bar per stage, lighter when the stage did less."""
    figure, panels = plt.subplots(len(shown), 1, figsize=(9, 1.5 * len(shown)), sharex=True, squeeze=False)
    known = ["input", "encoder", "thinker", "talker", "vocoder", "output"]
    colours = dict(zip(known, plt.get_cmap("Set2").colors, strict=False))
    for panel, one in zip(panels[:, 0], shown, strict=True):
        stages = [stage for stage in colours if any(span["stage"] == stage for span in one.spans)]
        for span in one.spans:
            row, start, alpha = stages.index(span["stage"]), span["start"], SHADES[span["what"]]
            panel.barh(row, span["end"] - start, left=start, color=colours[span["stage"]], alpha=alpha)
        for when, mark in ((one.ttft, "first text"), (one.ttfa, "first audio")):
            if when is not None:
                panel.axvline(when, color="black", linestyle=":", linewidth=0.8)
                panel.text(when, len(stages) - 0.3, mark, fontsize=6)
        panel.set_yticks(range(len(stages)), stages, fontsize=7)
        panel.invert_yaxis()
        panel.set_title(one.name, fontsize=8, loc="left")
    panels[-1, 0].set_xlabel("seconds since the request was admitted")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(model_dir: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    command = ["serve", str(model_dir), "--port", "0", "--name", MODEL, "--log-level", "warning"]
    server = subprocess.Popen([sys.executable, "-m", "segue.cli", *command], stdout=subprocess.PIPE, text=True)
    try:
        url = wait_ready(server)
        print(f"\nready after {time.monotonic() - began:.1f} s at {url}\n")
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        shown: list[Shown] = []
        for name, content in prompts().items():
            shown.append(streamed(client, f"{name} → text + speech, streamed", content, ["text", "audio"]))
        content = prompts()["text"]
        shown.append(whole(client, "text → text, whole", content, ["text"]))
        shown.append(streamed(client, "text → text, streamed", content, ["text"]))
        shown.append(whole(client, "text → text + speech, whole", content, ["text", "audio"]))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()

    transcript = []
    print(f"{'request':42} {'JCT':>7} {'TTFT':>7} {'TTFA':>7} {'RTF':>6} {'audio':>7}")
    for number, one in enumerate(shown):
        cells = [f"{value:6.2f}s" if value is not None else "      –" for value in (one.jct, one.ttft, one.ttfa)]
        rtf = f"{one.rtf:6.2f}" if one.rtf is not None else "     –"
        print(f"{one.name:42} {' '.join(cells)} {rtf} {one.seconds:6.2f}s")
        transcript.append(f"## {one.name}\n\n{one.text}\n")
        if one.pcm:
            write_wav(out / f"{number}-{one.name.split(' →')[0].replace(' ', '-')}.wav", one.pcm)
    (out / "transcript.md").write_text("\n".join(transcript))
    draw(shown, out / "timeline.png")
    print(f"\n{out}/: transcript.md, timeline.png, {sum(bool(one.pcm) for one in shown)} WAV files")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
