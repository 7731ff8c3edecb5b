"""Teach the talker and its code predictor to say the model's answers in the codes that `codec` has learned.

What the talker sees of pictures and sound stays nothing (`hidden_projection` gives zeros): how a sentence is said does
not depend on them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model.data.sayings import Answers, Spoken, loudness
from demo_model.training.codec import Codec, Encoder
from demo_model.training.networks import language_model
from demo_model.training.steps import Part


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
