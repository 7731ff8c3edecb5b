"""The torch half of the family: the stage model of each stage, and the transfer of each edge.

Payloads, by edge. `T` prompt tokens, `n` rows of one medium, `H` hidden size of the thinker. Tensors are on any device;
integers in lists are plain. Keys in brackets are optional; the text after them says when they are present.

**input → (both below)**: what `InputProcessor` makes of one request, one payload, final::

    {
      "token_ids": LongTensor [T],          # media placeholders already repeated once per row
      "media": [                            # in prompt order within each kind; the audio of a video comes after it
        {"kind": "image", "hash": bytes,    # of the decoded medium and the settings that shaped the tensors below:
                                            # equal hash means equal embeddings (16 bytes or more)
         "pixel_values": float [patches, channels*temporal_patch*patch*patch],
         "grid_thw": [t, h, w]},            # in patches, before merging
        {"kind": "video", "hash": bytes, "pixel_values": …, "grid_thw": [t, h, w],
         "second_per_grid": float},         # seconds from one temporal patch to the next
        {"kind": "audio", "hash": bytes,
         "input_features": float [mel, frames]},   # padding already cut off
      ],
      "use_audio_in_video": bool,
      ["reply": [ids]],                   # the text to say, without an end token, if the request gives it
    }

and `"tokens"` (`segue.models.shared.text.prompt.client_tokens`) if the client requested them: the worker removes this
entry.

**input → encoder** (`media_tensors`): `{"media": [as above]}`. **input → thinker** (`prompt_facts`): the same payload
with the processor's tensors taken out and `"frames": int` put in for audio.

**encoder → thinker** (`whole`): one chunk per medium, in order:
`{"media": [{"kind": str, "hash": bytes, "embeds": [n, H]}]}`.

**thinker → talker** (`reply_hidden_states`): one chunk per step that computed tokens; `rows[i]` belongs to position
`rows_start + i` of the thinker's sequence (prompt, then reply): final hidden state + input embedding, without the
embedding at media positions::

    {["rows_start": int, "rows": [k, H],] "first_index": int, "reply_ids": [ids generated in this step],
     ["prompt": {"length": T, "positions": LongTensor [3, T], "position_delta": int}]}   # with the first rows

The chunk of the last step is final. The reply's last token is never forwarded and has no row.

**talker → vocoder** (`codec_chunks`): `{"codes": LongTensor [k], "start": int, ["voice": str]}`: k new codes without
end tokens; the first has index `start` in the request. `voice` comes with start 0 if the request names one. Final
when the talker ends (k may be 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import Payload, StageRequest, Transfer
from segue.models.omni.qwen2_5_omni.encoder import Encoder
from segue.models.omni.qwen2_5_omni.input import InputProcessor
from segue.models.omni.qwen2_5_omni.talker import Talker
from segue.models.omni.qwen2_5_omni.thinker import Thinker
from segue.models.omni.qwen2_5_omni.vocoder.vocoder import Token2Wav
from segue.models.shared.omni.transfers import media_tensors, prompt_facts
from segue.models.shared.transfers import whole


def reply_hidden_states(request: StageRequest, output: TokenOutput) -> Payload | None:
    """thinker → talker: the hidden states captured in a step."""
    if output.captured is None and not output.finished:
        return None
    payload: Payload = {"first_index": output.first_index, "reply_ids": output.token_ids}
    if output.captured is not None:
        payload["rows_start"] = output.captured.start
        payload["rows"] = output.captured.data
    if (prompt := output.prompt) is not None:
        payload["prompt"] = {
            "length": len(prompt.token_ids),
            "positions": prompt.positions,
            "position_delta": prompt.position_delta,
        }
    return payload


def codec_chunks(request: StageRequest, output: TokenOutput) -> Payload | None:
    """talker → vocoder: the codes of a step, without the end token."""
    ended = output.finished and output.finish_reason == "stop"
    codes = output.token_ids[:-1] if ended else output.token_ids
    if not codes and not output.finished:
        return None
    payload: Payload = {"codes": torch.tensor(codes, dtype=torch.long), "start": output.first_index}
    if output.first_index == 0 and request.request.voice is not None:
        payload["voice"] = request.request.voice
    return payload


STAGE_MODELS: dict[str, Callable[..., Any]] = {
    "input": InputProcessor,
    "encoder": Encoder,
    "thinker": Thinker,
    "talker": Talker,
    "vocoder": Token2Wav,
}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "encoder"): media_tensors,
    ("input", "thinker"): prompt_facts,
    ("encoder", "thinker"): whole,
    ("thinker", "talker"): reply_hidden_states,
    ("talker", "vocoder"): codec_chunks,
}
