"""One request of each kind against a real server, through the official OpenAI client.

    python examples/demo.py MODEL_DIR OUT_DIR

Starts `segue serve` on a free port and asks for text and speech, streamed and whole: what the model's own
examples ask, or else about text, a photo, a voice clip and a video with an audio track. With segue-shapes, a second
server draws and edits pictures. Says which answers are right, where that is known. Writes a transcript, WAV files, what
was shown and drawn, and a timeline image of the stages.
"""

from __future__ import annotations

import base64
import io
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).parent / "demo_model"))
import httpx
import numpy as np
from demo_model.data.questions import facts_of
from demo_model.pixels import follows
from matplotlib import pyplot as plt
from openai import OpenAI
from PIL import Image

MODEL = "demo"
HERE = Path(__file__).resolve().parent
ASSETS = HERE.parent / "assets"
ANSWERS, DRAWS = HERE / "segue-shapes", HERE / "segue-draws"
SAMPLE_RATE = 24000
SPOKEN = ("text", "audio")
SHADES = {"queue": 0.12, "first": 0.5, "run": 1.0}
"""Colours: waiting for the first input, making the first output, making the rest."""


@dataclass(frozen=True)
class Ask:
    """One request: messages in the OpenAI API's format, what is asked for, and the right answer if one is known."""

    name: str
    messages: list[dict[str, Any]]
    modalities: tuple[str, ...] = SPOKEN
    stream: bool = True
    answer: str = ""

    @property
    def parts(self) -> list[dict[str, Any]]:
        """Of the last message."""
        content = self.messages[-1]["content"]
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    @property
    def written(self) -> str:
        """Its words."""
        return " ".join(part["text"] for part in self.parts if part["type"] == "text") or "(spoken)"

    @property
    def media(self) -> Iterator[tuple[str, bytes]]:
        """Its pictures, clips and recordings: (suffix of a file, its content)."""
        for part in self.parts:
            if part["type"] == "input_audio":
                yield part["input_audio"]["format"], base64.b64decode(part["input_audio"]["data"])
            elif part["type"] != "text":
                kind, data = part[part["type"]]["url"].split(";base64,")
                yield kind.rsplit("/", 1)[1], base64.b64decode(data)


@dataclass
class Shown:
    """The result of one request and its times (seconds since it was sent, measured at the client)."""

    ask: Ask
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

    @property
    def right(self) -> bool | None:
        """Whether the answer has the facts of the right one; None where none are known."""
        wanted = facts_of(self.ask.answer)
        return facts_of(self.text) == wanted if wanted else None


@dataclass(frozen=True)
class Drawn:
    """A picture that was asked for. `before`: what was to be edited; `right`: whether it shows what it should."""

    name: str
    prompt: str
    before: bytes | None
    picture: bytes
    seconds: float
    right: bool


def data_url(path: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def offered(url: str) -> list[dict[str, Any]]:
    """The server's own examples."""
    return httpx.get(f"{url}/page/examples").raise_for_status().json()["data"]


def asks(url: str) -> list[Ask]:
    """What the server offers as the model's own examples; of a model without any, one request of each kind."""
    if own := [example(one) for one in offered(url) if "messages" in one]:
        return own
    found = [Ask(f"{name} → text + speech, streamed", of_user(parts)) for name, parts in prompts().items()]
    text = of_user(prompts()["text"])
    return [
        *found,
        Ask("text → text, whole", text, ("text",), stream=False),
        Ask("text → text, streamed", text, ("text",)),
        Ask("text → text + speech, whole", text, stream=False),
    ]


def example(offered: dict[str, Any]) -> Ask:
    answer = offered.get("answer", "")
    modalities = ("text",) if answer.startswith("{") else SPOKEN  # nobody wants to hear JSON
    return Ask(offered["title"], offered["messages"], modalities, answer=answer)


def prompts() -> dict[str, list[dict[str, Any]]]:
    """What a user sends of each kind, in the OpenAI API's format."""
    photo = {"type": "image_url", "image_url": {"url": data_url(ASSETS / "photo.jpg", "image/jpeg")}}
    voice = (ASSETS / "speech.wav").read_bytes()
    speech = {"type": "input_audio", "input_audio": {"data": base64.b64encode(voice).decode(), "format": "wav"}}
    video = {"type": "video_url", "video_url": {"url": data_url(ASSETS / "video.mp4", "video/mp4")}}

    def words(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    return {
        "text": [words("Say something about the sea.")],
        "photo": [photo, words("What is in the image?")],
        "speech": [speech, words("What was said?")],
        "video with audio": [video, words("What happens, and what is heard?")],
    }


def of_user(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def request(ask: Ask) -> dict[str, Any]:
    """The keyword arguments of `client.chat.completions.create`, for streamed and whole answers alike."""
    # the likeliest sound is the clearest, of a model that is trained
    surely = {"temperature": 0.0} if ask.answer else {}
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": ask.messages,
        "modalities": list(ask.modalities),
        "seed": 7,
        "max_tokens": 160 if ask.answer else 64,
        "extra_body": {
            "return_metrics": True,
            "sampling": {"talker": {"max_tokens": 300, **surely}},
            "options": {"use_audio_in_video": True},  # without it the model ignores a video's audio
        },
    }
    if "audio" in ask.modalities:
        asked["audio"] = {"voice": "Chelsie", "format": "pcm16"}
    return asked


def whole(client: OpenAI, ask: Ask) -> Shown:
    shown, sent = Shown(ask), time.monotonic()
    answer = client.chat.completions.create(**request(ask))
    shown.jct = time.monotonic() - sent
    message = answer.choices[0].message
    shown.text = message.content or ""
    if message.audio is not None:
        shown.pcm = base64.b64decode(message.audio.data)
    shown.spans = answer.choices[0].model_extra["segue"]["metrics"]["spans"]
    return shown


def streamed(client: OpenAI, ask: Ask) -> Shown:
    shown, sent = Shown(ask), time.monotonic()
    for chunk in client.chat.completions.create(stream=True, **request(ask)):
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


def drawn(url: str) -> Iterator[Drawn]:
    """What the server offers as examples, drawn, and judged by plain checks of the pixels."""
    client = client_of(url)
    for example in offered(url):
        asked: dict[str, Any] = {"model": MODEL, "prompt": example["prompt"], "size": example["size"]}
        asked["extra_body"] = {"num_inference_steps": example["steps"], "seed": 7}
        before = base64.b64decode(example["image"].partition(",")[2]) if "image" in example else None
        sent = time.monotonic()
        if before:
            answer = client.images.edit(image=("before.png", before, "image/png"), **asked)
        else:
            answer = client.images.generate(**asked)
        seconds = time.monotonic() - sent
        picture = base64.b64decode(answer.data[0].b64_json)
        right = follows(example, np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")))
        yield Drawn(example["title"], example["prompt"], before, picture, seconds, right)


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@contextmanager
def served(model_dir: Path) -> Iterator[str]:
    """Start a server, and give its address; stop it in the end."""
    began = time.monotonic()
    command = ["serve", str(model_dir), "--port", "0", "--name", MODEL, "--log-level", "warning"]
    server = subprocess.Popen([sys.executable, "-m", "segue.cli", *command], stdout=subprocess.PIPE, text=True)
    try:
        url = wait_ready(server)
        print(f"\n{model_dir.name}: ready after {time.monotonic() - began:.1f} s at {url}\n")
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


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


def draw_timeline(shown: list[Shown], path: Path) -> None:
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
        panel.set_title(one.ask.name, fontsize=8, loc="left")
    panels[-1, 0].set_xlabel("seconds since the request was admitted")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(model_dir: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with served(model_dir) as url:
        client = client_of(url)
        shown = [(streamed if ask.stream else whole)(client, ask) for ask in asks(url)]
    print(f"{'request':42} {'JCT':>7} {'TTFT':>7} {'TTFA':>7} {'RTF':>6} {'audio':>7}")
    for one in shown:
        cells = [f"{value:6.2f}s" if value is not None else "      –" for value in (one.jct, one.ttft, one.ttfa)]
        rtf = f"{one.rtf:6.2f}" if one.rtf is not None else "     –"
        print(f"{one.ask.name:42} {' '.join(cells)} {rtf} {one.seconds:6.2f}s")
    print()
    for one in shown:
        if one.right is not None:
            mark = "right" if one.right else f"wrong; right is: {one.ask.answer}"
            print(f"{one.ask.name}: {one.ask.written}\n    {one.text}  [{mark}]")
    if judged := [one.right for one in shown if one.right is not None]:
        print(f"\n{sum(judged)} of {len(judged)} answers are right")
    write_transcript(shown, out)
    draw_timeline(shown, out / "timeline.png")
    written = f"transcript.md, timeline.png, {sum(bool(one.pcm) for one in shown)} WAV files"
    if model_dir.resolve() == ANSWERS:
        written += f", {draw_examples(out, len(shown))} pictures"
    print(f"\n{out}/: {written}")


def draw_examples(out: Path, first: int) -> int:
    """Ask the model that draws for its examples, and add them to the transcript, numbered from `first`. Their count."""
    pictures = []
    with served(DRAWS) as url:
        for number, one in enumerate(drawn(url), first):
            pictures.append(one)
            print(f"{one.name}: {one.prompt}  [{one.seconds:.1f} s, {'right' if one.right else 'wrong'}]")
            part = f"\n## {one.name}\n\n> {one.prompt}\n\n"
            for name, data in ((f"{number}-asked.png", one.before), (f"{number}-drawn.png", one.picture)):
                if data:
                    (out / name).write_bytes(data)
                    part += f"![{name}]({name})\n\n"
            with (out / "transcript.md").open("a") as file:
                file.write(part + ("Right.\n" if one.right else "Wrong.\n"))
    print(f"\n{sum(one.right for one in pictures)} of {len(pictures)} pictures are right")
    return len(pictures)


def write_transcript(shown: list[Shown], out: Path) -> None:
    """What was asked and answered, with the files of both beside it."""
    parts = []
    for number, one in enumerate(shown):
        part = f"## {one.ask.name}\n\n"
        for suffix, data in one.ask.media:
            name = f"{number}-asked.{suffix}"
            (out / name).write_bytes(data)
            part += f"[{name}]({name})\n\n"
        part += f"> {one.ask.written}\n\n{one.text}\n"
        if one.pcm:
            name = f"{number}-{one.ask.name.split(' →')[0].replace(' ', '-').lower()}.wav"
            write_wav(out / name, one.pcm)
            part += f"\n[{name}]({name})\n"
        if one.right is not None:
            part += "\nRight.\n" if one.right else f"\nWrong: {one.ask.answer}\n"
        parts.append(part)
    (out / "transcript.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
