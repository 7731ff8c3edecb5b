"""The plain reference of the language model: one request, nothing batched, nothing cached between patches but keys and
values; greedy. It gives the golden codes (`test_mimo_audio_golden.py`), and stages in their engines must give the same.

A row is a text id and the codes of its patch, frame by frame: [1 + G · K].
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from segue.engines.contract import LoadContext
from segue.models.speech.mimo_audio.config import Config, read_config
from segue.models.speech.mimo_audio.library import DynamicCache
from segue.models.speech.mimo_audio.loading import load_language_model
from segue.models.speech.mimo_audio.networks import LanguageNet


class Plain:
    def __init__(self, model_dir: Path, empty: int) -> None:
        """`empty`: the text token of a patch of codes."""
        self.config: Config = read_config(model_dir)
        ctx = LoadContext(model_dir, "llm", torch.device("cpu"), torch.float32)
        self.net: LanguageNet = load_language_model(ctx, self.config)
        self.empty = empty
        self.silent = self.config.empty_codes * self.config.group_size

    @torch.inference_mode()
    def __call__(self, rows: list[list[int]], ends: set[int], most: int) -> list[list[int]]:
        """The rows of a prompt → the generated ones, that of the end token included."""
        cache, made, given = DynamicCache(), [], rows
        while len(made) < most:
            inputs = torch.stack([self._input(row) for row in given])[None]
            out = self.net.decoder.model(inputs_embeds=inputs, past_key_values=cache, use_cache=True)
            hidden = out.last_hidden_state[0, -1]
            token = int(self.net.decoder.lm_head(hidden).argmax())
            made.append([token, *(self._patch(hidden) if token == self.empty else self.silent)])
            if token in ends:
                break
            given = made[-1:]
        return made

    def _input(self, row: list[int]) -> Tensor:
        if row[0] != self.empty:
            return self.net.decoder.model.embed_tokens(torch.tensor(row[0]))
        return self.net.encode(torch.tensor(row[1:]).view(1, self.config.group_size, -1))[0]

    def _patch(self, hidden: Tensor) -> list[int]:
        """The codes of a patch, one channel and frame after the other."""
        net, config = self.net, self.config
        codes = [[0] * config.audio_channels for _ in range(config.group_size)]
        cache, given = DynamicCache(), net.hidden_states_downcast(hidden)
        for step in range(config.group_size + max(config.delays)):
            out = net.local_transformer(inputs_embeds=given[None, None], past_key_values=cache, use_cache=True)
            given = torch.zeros_like(given)
            for channel, delay in enumerate(config.delays):
                if 0 <= step - delay < config.group_size:
                    logits = net.local_transformer_lm_heads[channel](out.last_hidden_state[0, -1])
                    logits[config.empty_codes[channel]] = -float("inf")
                    code = logits.argmax()
                    codes[step - delay][channel] = int(code)
                    given = given + net.speech_embeddings_to_local(net.speech_embeddings[channel](code))
        return [code for frame in codes for code in frame]
