"""What a request for an image reads: three contexts, of which two guide it (`segue.engines.autoregressive.contexts`).

- all that the request says, images as latents and then as the vision tower sees them, and what the model thought;
- the same without the last text and the thoughts: the beginning of the first, whose blocks it shares;
- the texts without images: without images in the request, it is also a beginning of the first, otherwise a sequence of
  its own, because its texts have other positions and see no images.

In a reply of texts and images by turns, the first context of each visit has all before it, and the text that precedes
the image; the second ends before that text, after the image before it; the third has the texts of earlier visits, too.

H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from segue.engines.autoregressive.contexts.contract import Contexts, View
from segue.engines.autoregressive.contract import Prompt
from segue.engines.contract import Payload, StageRequest
from segue.messages.errors import InvalidRequest, StageFailed
from segue.models.omni.bagel.drawing.noise import noise_of_drawing, noise_of_images, seed_of
from segue.models.omni.bagel.drawing.settings import Drawing
from segue.models.omni.bagel.prompt.passages import Block, Passages
from segue.models.omni.bagel.prompt.prompts import prompt_of
from segue.models.omni.bagel.vision import patches, places

if TYPE_CHECKING:
    from segue.models.omni.bagel.llm import LLM


class ImageReading:
    """The inputs of one request, and the contexts that they make."""

    def __init__(self, llm: LLM, request: StageRequest) -> None:
        """Raises `InvalidRequest` for sampling parameters of several texts."""
        sampling = request.sampling
        for name, value in (("n", sampling.n), ("best_of", sampling.best_of), ("beam_width", sampling.beam_width)):
            if (value or 1) > 1:
                field = f"sampling.{request.stage}.{name}"
                raise InvalidRequest(
                    f"{field} is {value}, but what the model thinks before it draws is one text; "
                    "num_images_per_prompt is the number of images",
                    field=field,
                )
        self._llm = llm
        self._request = request
        self._open = set(request.upstreams)
        self._given: Payload = {}
        self._seen: list[Payload] = []
        self._encoded: list[Payload] = []
        self._hashes: list[bytes] = []
        """Of what was drawn: what determines its latents."""
        self._rows: dict[tuple[int, bool], tuple[torch.Tensor, bytes]] = {}
        """(image, as latents) → its rows [n, H], and what determines them."""
        self._passages: list[list[int] | int] = []
        """All that is read before the next text of the reply: token ids, or the number of an image."""
        self._visit = -1
        """The visit whose input is complete."""

    def feed(self, upstream: str, payload: Payload, *, final: bool) -> bool:
        """Take the input stage's passages, and rows or latents of images: given ones, or the one that was drawn."""
        match upstream:
            case "input":
                self._given = payload
            case "encoder" | "drawn_encoder":
                self._seen += payload.get("media", [])
            case _:
                self._encoded += payload.get("images", [])
                self._hashes += payload.get("hashes", [])
        if final:
            self._open.discard(upstream)
        return not self._open

    def visited(self) -> None:
        """Begin a visit: its input is complete."""
        self._visit += 1
        if self._visit:
            self._read_drawn()
            return
        self._drawing = msgspec.convert(self._given["drawing"], Drawing)
        self._passages = list(self._given["passages"])
        self._read_images()

    def thoughts(self) -> Prompt | None:
        """All that is read, and the mark that begins a text."""
        if not self._drawing.think:
            return None
        whole = self._whole()[0]
        whole.text([self._llm.marks.begin])
        return self._prompt(whole)

    def contexts(self, thoughts: Sequence[int]) -> Contexts:
        """Views: the whole; if it is guided, without the last text; if it is guided by images, without images. None for
        the text with which a reply ends."""
        settings = {"drawing": self._given["drawing"]}
        if self._drawing.images and self._visit == self._drawing.images:
            return Contexts([], [], settings)
        llm, guidance = self._llm, self._drawing.guidance
        whole, without_text = self._whole()
        said = View(0, len(whole.ids), whole.next)
        said_now: list[int] = []
        if self._drawing.think:
            # as published, the model reads its thoughts as text: their tokens may be others than it drew
            own = [token for token in thoughts if token not in llm.end_token_ids]
            ids = llm.encode(llm.decode_text(own, skip_special_tokens=False))
            said_now = [llm.marks.begin, *ids, llm.marks.end]
            whole.text(said_now)
        sequences, views = [whole], [View(0, len(whole.ids), whole.next)]
        if guidance.text > 1:
            views.append(without_text)
        if guidance.text > 1 and guidance.image > 1 and self._rows:
            texts = Passages()
            for ids in self._texts:
                texts.text(ids)
            sequences += [texts] if texts.ids else []
            views.append(View(len(sequences) - 1, len(texts.ids), texts.next))
        elif guidance.text > 1 and guidance.image > 1:
            views.append(said)
        prompts = []
        for sequence in sequences:
            sequence.text([llm.marks.before])  # follows the context, and is not computed
            prompts.append(self._prompt(sequence))
            prompts[-1].modality_tokens["text"] -= 1
        if self._drawing.images:
            self._passages += [said_now, len(self._given["media"]) + self._visit]
        return Contexts(prompts, views, settings)

    @property
    def _texts(self) -> list[list[int]]:
        return [passage for passage in self._passages if isinstance(passage, list)]

    def _whole(self) -> tuple[Passages, View]:
        """All that is read, and its beginning before the last text."""
        marks, whole, before = self._llm.marks, Passages(), View(0, 0, 0)
        for passage in self._passages:
            if isinstance(passage, list):
                before = View(0, len(whole.ids), whole.next)
                whole.text(passage)
            else:
                for latent in (True, False):
                    rows, _ = self._rows[passage, latent]
                    whole.image(marks, len(rows), passage, latent=latent)
                before = View(0, len(whole.ids), whole.next)
        return whole, before

    def _prompt(self, passages: Passages) -> Prompt:
        def image(block: Block) -> tuple[torch.Tensor, bytes]:
            return self._rows[block.image, block.latent]

        return prompt_of(passages, self._llm.embed_ids, image, self._llm.device)

    def _read_images(self) -> None:
        """Make rows of all images."""
        media = self._given["media"]
        if [one["hash"] for one in media] != [one["hash"] for one in self._seen] or len(media) != len(self._encoded):
            raise StageFailed(
                f"the request has {len(media)} images, but its encoders sent {len(self._seen)} and "
                f"{len(self._encoded)}, or others"
            )
        llm, seed = self._llm, seed_of(self._request)
        noise = noise_of_images(self._request, llm.config.vae.z_channels, self._drawing)
        for number, (one, seen, encoded, drawn) in enumerate(zip(media, self._seen, self._encoded, noise, strict=True)):
            self._rows[number, False] = seen["rows"], one["hash"]
            content = b"latents" + seed.to_bytes(9, "little", signed=True) + b"%d" % number + one["latents_hash"]
            self._rows[number, True] = latent_rows(llm, _sampled(encoded, drawn)), content
        self._seen, self._encoded = [], []  # may be on the device

    def _read_drawn(self) -> None:
        """Make rows of the image that was drawn after the visit before."""
        if not len(self._seen) == len(self._encoded) == len(self._hashes) == 1:
            raise StageFailed(
                f"an image was drawn, but its encoders sent {len(self._seen)} and {len(self._encoded)}", stage="llm"
            )
        llm, drawing, visit = self._llm, self._drawing, self._visit - 1
        number, seed, channels = len(self._given["media"]) + visit, seed_of(self._request), llm.config.vae.z_channels
        side = llm.config.token_pixels
        shape = (1, (drawing.height // side) * (drawing.width // side), llm.config.token_channels)
        _, noise = noise_of_drawing(self._request, channels, drawing, shape, visit)
        order = repr((number, drawing.given, shape, drawing.echo)).encode()  # of the random numbers
        content = b"drawn" + seed.to_bytes(9, "little", signed=True) + order + self._hashes[0]
        self._rows[number, False] = self._seen[0]["rows"], self._seen[0]["hash"]
        self._rows[number, True] = latent_rows(llm, _sampled(self._encoded[0], noise)), content
        self._seen, self._encoded, self._hashes = [], [], []


def _sampled(encoded: Payload, noise: torch.Tensor) -> torch.Tensor:
    """Latents [C, h, w] of an image whose distribution is known."""
    latents: torch.Tensor = encoded["mean"] + encoded["std"] * noise.to(encoded["mean"])
    return latents


@torch.inference_mode()
def latent_rows(llm: LLM, latents: torch.Tensor) -> torch.Tensor:
    """Latents of an image that is given, [C, h, w] → rows of the decoder, [n, H]."""
    config = llm.config
    size = config.latent_patch_size
    at = places(latents.shape[1] // size, latents.shape[2] // size, config.latent_side).to(llm.device)
    tokens = patches(latents, size).to(llm.device, llm.dtype)
    return llm.space.rows(tokens, at, torch.zeros((), device=llm.device))
