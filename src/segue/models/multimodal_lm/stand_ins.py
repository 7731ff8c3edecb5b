"""Which ids layers are given for tokens of media, where they take the ids again (Gemma 3n, Gemma 4): those tokens have
rows of an encoder, but no entry of their own in the layers' tables.

What the model gives its decoder of a text with media is compared with what the decoder makes of the ids with another
one in the media's places.
"""

from __future__ import annotations

import torch

from segue.models.interface import cannot_be_served
from segue.models.layer_inputs import takes_ids_again
from segue.models.multimodal_lm.mutual import MaskProbe


@torch.inference_mode()
def stand_ins(probe: MaskProbe) -> dict[int, int]:
    """Id of a medium's token → the id that layers are given; empty for decoders that take none.

    Raises `ConfigError` where no id gives what the model gives.
    """
    decoder = probe.decoder
    of_layers = takes_ids_again(decoder, decoder.config)
    if of_layers is None:
        return {}
    found = {}
    padding = decoder.config.pad_token_id if "pad_token_id" in decoder.config else None
    for kind in probe.processor.kinds:
        text, media = probe.processor.examples(kind)
        made = probe.processor(text, {kind: media})
        token = made.token_ids[kind]
        given = probe.given(made, kind)
        ids = torch.tensor([made.ids], device=probe.device)
        tried = (other for other in dict.fromkeys((padding, 0)) if other is not None)
        for other in tried:
            made_of = of_layers(ids.masked_fill(ids == token, other), given["inputs_embeds"])
            if torch.equal(made_of, given["per_layer_inputs"]):
                found[token] = other
                break
        else:
            raise cannot_be_served(
                probe.kind, f"its layers take ids beside the rows, for {kind} neither those of padding nor 0"
            )
    return found
