"""The plain loop of BAGEL: one request, passage by passage and then token by token, with keys and values kept.
`python -m segue.bench.plain.bagel_loop FD OPTIONS` is its process.

H hidden size, n rows of a passage.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from segue.bench.plain.bagel import WORKLOAD
from segue.bench.plain.comparison import Options, serve
from segue.engines.contract import LoadContext
from segue.messages.request import MediaPart, Request
from segue.models.omni.bagel.config import read_config
from segue.models.omni.bagel.loading import load_language_model, load_vision
from segue.models.omni.bagel.prompt import sizes
from segue.models.omni.bagel.vision import patches, places
from segue.models.shared.library import AutoTokenizer, DynamicCache

_MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")


class Bagel:
    """`Loop`. A conversation is a sequence of passages: a text between marks takes a position per token, an image one
    position; the rows of an image see each other."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ctx = LoadContext(Path(options.model_dir), "plain", self.device, torch.float32)
        self.config = read_config(ctx.model_dir)
        self.language = load_language_model(ctx, self.config)
        self.vision = load_vision(ctx, self.config)
        self.tokenizer = AutoTokenizer.from_pretrained(ctx.model_dir)
        self.begin, self.end, *self.around = self.tokenizer.convert_tokens_to_ids(list(_MARKS))
        self.cache, self.position = DynamicCache(), 0

    @torch.inference_mode()
    def __call__(self, request: Request, tokens: int) -> tuple[list[int], float]:
        self.cache, self.position = DynamicCache(), 0
        for message in request.messages:
            for part in message.content:
                if isinstance(part, MediaPart):
                    self._see(part)
                else:
                    ids = self.tokenizer.encode(part.text, add_special_tokens=False)
                    self._append(self._embedded([self.begin, *ids, self.end]))
        made = [self.begin]
        while len(made) <= tokens:
            hidden = self._append(self._embedded(made[-1:]))
            made.append(int(self.language.lm_head(hidden[-1]).argmax()))
        return made[1:], 0.0

    def _see(self, part: MediaPart) -> None:
        """Append an image, in the size that the model sees."""
        assert part.array is not None, "the workload sends arrays"
        height, width, _ = part.array.shape
        image = Image.frombytes("RGB", (width, height), part.data)
        for limits in (sizes.edited(self.config), sizes.seen(self.config)):
            image = image.resize(sizes.scaled(*image.size, limits), Image.Resampling.BICUBIC)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).to(self.device)
        size = self.config.vit.patch_size
        flat = patches(pixels.reshape(image.height, image.width, 3).permute(2, 0, 1) / 127.5 - 1, size)
        at = places(image.height // size, image.width // size, self.config.vit.side).to(self.device)
        before, behind = self._embedded(self.around)
        rows = torch.cat([before[None], self.vision(flat[None], at)[0], behind[None]])
        self._run(rows, torch.full((len(rows),), self.position), causal=False)

    def _append(self, rows: Tensor) -> Tensor:
        """Append rows of text [n, H]; their final hidden states."""
        return self._run(rows, torch.arange(self.position, self.position + len(rows)), causal=True)

    def _run(self, rows: Tensor, at: Tensor, *, causal: bool) -> Tensor:
        seen = self.cache.get_seq_length()
        mask = torch.ones(len(rows), seen + len(rows), dtype=torch.bool, device=self.device)
        out = self.language.model(
            inputs_embeds=rows[None],
            position_ids=at[None].to(self.device),
            attention_mask=(mask.tril(seen) if causal else mask)[None, None],
            past_key_values=self.cache,
        )
        self.position = int(at[-1]) + 1
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _embedded(self, ids: list[int]) -> Tensor:
        rows: Tensor = self.language.model.embed_tokens(torch.tensor(ids, device=self.device))
        return rows


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], WORKLOAD.kinds, Bagel))
