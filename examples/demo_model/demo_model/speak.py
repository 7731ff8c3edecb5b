"""Teach the talker and its code predictor to say the model's answers in the codes that `codec` has learned.

A sequence is what `Qwen3OmniMoeForConditionalGeneration.generate` feeds the talker: the user's turn, nine positions
that begin the answer, then per frame the sum of its codes' embeddings and one entry of the answer's text. What the
talker sees of pictures and sound stays nothing (`hidden_projection` gives zeros): how a sentence is said does not
depend on them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model import see
from demo_model.codec import FRAME, SPEAKERS, Codec, spoken
from demo_model.networks import language_model
from demo_model.questions import STYLES
from demo_model.training import Part

_IGNORED = -100


@dataclass(frozen=True)
class Spoken:
    """One answer and its sound. `user`, `answer`: text ids. `positions`: [4, user] of the user's turn. `codes`:
    [frames, groups]."""

    user: Tensor
    positions: Tensor
    answer: Tensor
    speaker: str
    codes: Tensor


class Answers:
    """Makes batches of `Spoken`."""

    def __init__(self, model_dir: Path, codec: Codec, size: int) -> None:
        self._dir, self._size = model_dir, size
        self._codes = cache(lambda text, speaker: codes_of(codec, spoken(text, speaker)))

    def __call__(self, step: int) -> list[Spoken]:
        rng = random.Random(f"speak/{step}")
        return [self._one(rng) for _ in range(self._size)]

    def _one(self, rng: random.Random) -> Spoken:
        kind = rng.choice(see.KINDS)
        style = list(STYLES)[-1]
        while style == list(STYLES)[-1]:  # JSON is not for speaking
            _, style, [question] = see.asked(kind, rng, 1)
        prefix, positions = see.prefix(self._dir, kind, "")
        asks = see.encode(self._dir, f"{question.text}<|im_end|>\n")
        after = positions.max() + 1 + torch.arange(len(asks)).expand(4, -1)
        speaker = rng.choice(list(SPEAKERS))
        return Spoken(
            torch.cat([prefix, asks]),
            torch.cat([positions, after], 1),
            see.encode(self._dir, question.answer),
            speaker,
            self._codes(question.answer, speaker),
        )


def codes_of(codec: Codec, samples: np.ndarray) -> Tensor:
    """[samples] → codes [frames, groups]."""
    frames = -(-len(samples) // FRAME)
    padded = np.pad(samples, (0, frames * FRAME - len(samples)))
    return codec.encode(torch.from_numpy(padded)[None])[0]


class Speaker:
    """Builds the talker's sequences, and their losses."""

    def __init__(self, model: Any, model_dir: Path) -> None:
        self.model, self.talker, config = model, model.talker, model.config
        self.codec = config.talker_config
        newline = see.encode(model_dir, "\n").tolist()
        self.opening = [config.im_start_token_id, config.assistant_token_id, *newline]
        self.marks = [config.tts_pad_token_id, config.tts_bos_token_id, config.tts_eos_token_id]
        nn.init.zeros_(self.talker.hidden_projection.linear_fc2.weight)
        nn.init.zeros_(self.talker.hidden_projection.linear_fc2.bias)

    def loss(self, batch: list[Spoken], step: int) -> tuple[Tensor, dict[str, float]]:
        """Cross entropy of the codes of all groups, and of the end."""
        rows, positions, labels, spans = [], [], [], []
        for one in batch:
            before, frames = self._rows(one)
            end = torch.tensor([self.codec.codec_eos_token_id])
            start = int(one.positions.max()) + 1
            after = start + torch.arange(len(before) + len(frames) - len(one.user)).expand(4, -1)
            rows.append(torch.cat([before, frames]))
            positions.append(torch.cat([one.positions, after], 1))
            labels.append(torch.cat([one.codes[:, 0], end]))
            spans.append((len(before) - 1, len(before) + len(frames)))
        longest = max(map(len, rows))
        made = self.talker.model(
            inputs_embeds=torch.stack([functional.pad(one, (0, 0, 0, longest - len(one))) for one in rows]),
            position_ids=torch.stack([functional.pad(one, (0, longest - one.shape[1])) for one in positions], 1),
            use_cache=False,
        ).last_hidden_state
        hidden = [row[first:last] for row, (first, last) in zip(made, spans, strict=True)]
        first = functional.cross_entropy(self.talker.codec_head(torch.cat(hidden)), torch.cat(labels))
        others = self._others(torch.cat([row[:-1] for row in hidden]), torch.cat([one.codes for one in batch]))
        return first + others, {"first": first.item(), "others": others.item()}

    def _text(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            embedded = language_model(self.model).embed_tokens(ids)
        return self.talker.text_projection(embedded)

    def _rows(self, one: Spoken) -> tuple[Tensor, Tensor]:
        """(what comes before the first frame, one row per frame)."""
        config = self.codec
        user = self._text(one.user)
        pads = torch.tensor([config.image_token_id, config.video_token_id, config.audio_token_id])
        user = user.masked_fill(torch.isin(one.user, pads)[:, None], 0.0)
        pad, begin, end = self._text(torch.tensor(self.marks)).split(1)
        opening, answer = self._text(torch.tensor(self.opening)), self._text(one.answer)
        special = [config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id]
        special += [config.speaker_id[one.speaker], config.codec_pad_id, config.codec_bos_id]
        of_codec = self.talker.get_input_embeddings()(torch.tensor(special))
        text = torch.cat([opening, pad.expand(4, -1), begin, answer[:1]])
        before = torch.cat([user, text + functional.pad(of_codec, (0, 0, 3, 0))])
        trailing = torch.cat([answer[1:], end])[: len(one.codes)]
        trailing = torch.cat([trailing, pad.expand(len(one.codes) - len(trailing), -1)])
        return before, self._embedded(one.codes).sum(1) + trailing

    def _embedded(self, codes: Tensor) -> Tensor:
        """[n, groups] → [n, groups, width]."""
        tables = [self.talker.get_input_embeddings(), *self.talker.code_predictor.get_input_embeddings()]
        return torch.stack([table(group) for table, group in zip(tables, codes.unbind(1), strict=True)], 1)

    def _others(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Loss of all groups but the first: each from the talker's hidden state and the groups before it."""
        predictor = self.talker.code_predictor
        rows = torch.cat([hidden[:, None], self._embedded(codes)[:, :-1]], 1)
        made = predictor.model(inputs_embeds=rows, use_cache=False).last_hidden_state[:, 1:]
        logits = torch.stack([head(made[:, index]) for index, head in enumerate(predictor.lm_head)], 1)
        return functional.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())


def speaking_part(model: Any, model_dir: Path, *, size: int = 12) -> Part:
    """Trains talker and code predictor, after `codec`."""
    codec = Codec(model.code2wav)
    left = torch.load(model_dir / "training" / "codec.pt", weights_only=True)["weights"]
    codec.load_state_dict({name.removeprefix("0."): value for name, value in left.items()})
    speaker = Speaker(model, model_dir)
    return Part("speaking", [model.talker], Answers(model_dir, codec, size), speaker.loss)
