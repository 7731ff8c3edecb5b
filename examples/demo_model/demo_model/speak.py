"""Teach the talker and its code predictor to say the model's answers in the codes that `codec` has learned.

A sequence is what `Qwen3OmniMoeForConditionalGeneration.generate` feeds the talker: the user's turn, nine positions
that begin the answer, then per frame the sum of its codes' embeddings and one entry of the answer's text. What the
talker sees of pictures and sound stays nothing (`hidden_projection` gives zeros): how a sentence is said does not
depend on them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model import see
from demo_model.codec import FRAME, SPEAKERS, Codec, Encoder, loudness, spoken
from demo_model.hear import placeholder
from demo_model.networks import language_model
from demo_model.questions import JSON
from demo_model.training import Part

_HEARD = 0.4
"""Share of the questions that are spoken: the talker sees nothing of them."""


@dataclass(frozen=True)
class Spoken:
    """Answers and their sound, as the talker's sequences.

    `text`, `special`: int64 [answers, rows], ids of the thinker's tokens and of the codec's; a row is the sum of both
    embeddings, and of a frame's codes; -1 stands for nothing. `positions`: int64 [3, answers, rows]. `samples`: int16
    [answers, frames · FRAME]. Of all answers' frames, in order, `frames`: where one lies in `samples`, and `rows`: in
    `text`, both flattened. `before`: where the rows lie from which the frames and ends are told; `followed`: which of
    those a frame follows. All int64.
    """

    text: Tensor
    special: Tensor
    positions: Tensor
    samples: Tensor
    frames: Tensor
    rows: Tensor
    before: Tensor
    followed: Tensor


class Answers:
    """Makes batches of `Spoken`."""

    def __init__(self, model_dir: Path, config: Any, size: int) -> None:
        self._dir, self._config, self._size = model_dir, config, size
        self._newline = see.encode(model_dir, "\n").tolist()

    def __call__(self, step: int) -> Spoken:
        rng = random.Random(f"speak/{step}")
        return self.batch([self._one(rng) for _ in range(self._size)])

    def batch(self, made: Sequence[_One]) -> Spoken:
        rows, frames = max(len(one.text) for one in made), max(one.frames for one in made)
        samples = np.zeros((len(made), frames * FRAME), np.int16)
        places: dict[str, list[int]] = {"frames": [], "rows": [], "before": [], "followed": []}
        for number, one in enumerate(made):
            samples[number, : len(one.samples)] = one.samples
            first = number * rows + len(one.text) - one.frames
            places["followed"] += range(len(places["before"]), len(places["before"]) + one.frames)
            places["before"] += range(first - 1, first + one.frames)
            places["rows"] += range(first, first + one.frames)
            places["frames"] += range(number * frames, number * frames + one.frames)
        return Spoken(
            text=torch.stack([functional.pad(one.text, (0, rows - len(one.text)), value=-1) for one in made]),
            special=torch.stack([functional.pad(one.special, (0, rows - len(one.text)), value=-1) for one in made]),
            positions=torch.stack([functional.pad(one.positions, (0, rows - len(one.text))) for one in made], 1),
            samples=torch.from_numpy(samples),
            **{name: torch.tensor(place) for name, place in places.items()},
        )

    def _one(self, rng: random.Random) -> _One:
        kind = rng.choice(see.KINDS)
        style = JSON
        while style == JSON:
            _, style, [question] = see.asked(kind, rng, 1)
        text = placeholder(rng.randint(80, 500)) if rng.random() < _HEARD else question.text
        return self.sequence(kind, text, question.answer, rng.choice(list(SPEAKERS)))

    def sequence(self, kind: str, question: str, says: str, speaker: str) -> _One:
        """An answer to a question about something of a kind."""
        config, codec = self._config, self._config.talker_config
        prefix, positions = see.prefix(self._dir, kind, "")
        user = torch.cat([prefix, see.encode(self._dir, f"{question}<|im_end|>\n")])
        pads = torch.tensor([codec.image_token_id, codec.video_token_id, codec.audio_token_id])
        answer, samples = see.encode(self._dir, says).tolist(), spoken(says, speaker)
        frames = -(-len(samples) // FRAME)
        pad, begin, end = config.tts_pad_token_id, config.tts_bos_token_id, config.tts_eos_token_id
        opening = [config.im_start_token_id, config.assistant_token_id, *self._newline, *[pad] * 4, begin, answer[0]]
        follows = [*answer[1:], end, *[pad] * frames][:frames]
        special = [codec.codec_nothink_id, codec.codec_think_bos_id, codec.codec_think_eos_id]
        special += [codec.speaker_id[speaker], codec.codec_pad_id, codec.codec_bos_id]
        text = torch.cat([user.masked_fill(torch.isin(user, pads), -1), torch.tensor(opening + follows)])
        after = int(positions.max()) + 1 + torch.arange(len(text) - len(prefix)).expand(3, -1)
        return _One(
            text,
            torch.tensor([*[-1] * (len(user) + 3), *special, *[-1] * frames]),
            torch.cat([positions, after], 1),
            samples,
            frames,
        )


@dataclass(frozen=True)
class _One:
    """One answer of a `Spoken`, whose last `frames` rows are those of its frames."""

    text: Tensor
    special: Tensor
    positions: Tensor
    samples: np.ndarray
    frames: int


def talker_loss(model: Any, codec: Codec, batch: Spoken, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy of the codes of all groups, and of the end."""
    talker, config = model.talker, model.config.talker_config
    codes = codec.encode(loudness(batch.samples)).flatten(0, 1).index_select(0, batch.frames)
    with torch.no_grad():
        embedded = language_model(model).embed_tokens(batch.text.clamp(min=0))
    text = talker.text_projection(embedded) * (batch.text >= 0)[..., None]
    special = talker.get_input_embeddings()(batch.special.clamp(min=0)) * (batch.special >= 0)[..., None]
    of_frames = _embedded(talker, codes)
    rows = (text + special).flatten(0, 1).index_add(0, batch.rows, of_frames.sum(1)).view_as(text)
    made = talker.model(inputs_embeds=rows, position_ids=batch.positions, use_cache=False).last_hidden_state
    hidden = made.flatten(0, 1).index_select(0, batch.before)
    wanted = torch.full_like(batch.before, config.codec_eos_token_id).index_copy(0, batch.followed, codes[:, 0])
    first = functional.cross_entropy(talker.codec_head(hidden).float(), wanted)
    # each other group from the talker's hidden state and the groups before it
    predictor = talker.code_predictor
    begun = torch.cat([hidden.index_select(0, batch.followed)[:, None], of_frames[:, :-1]], 1)
    told = predictor.model(inputs_embeds=begun, use_cache=False).last_hidden_state[:, 1:]
    logits = torch.stack([head(told[:, index]) for index, head in enumerate(predictor.lm_head)], 1)
    others = functional.cross_entropy(logits.flatten(0, 1).float(), codes[:, 1:].flatten())
    return first + others, {"first": first, "others": others}


def _embedded(talker: Any, codes: Tensor) -> Tensor:
    """[n, groups] → [n, groups, width]."""
    tables = [talker.get_input_embeddings(), *talker.code_predictor.get_input_embeddings()]
    return torch.stack([table(group) for table, group in zip(tables, codes.unbind(1), strict=True)], 1)


def speaking_part(model: Any, model_dir: Path, encoder: Encoder, *, size: int = 12) -> Part:
    """Trains talker and code predictor, after `codec`, whose encoder is given."""
    codec = Codec(model.code2wav, encoder).to(model.device)
    projection = model.talker.hidden_projection.linear_fc2
    nn.init.zeros_(projection.weight)
    nn.init.zeros_(projection.bias)
    return Part("speaking", [model.talker], Answers(model_dir, model.config, size), partial(talker_loss, model, codec))
