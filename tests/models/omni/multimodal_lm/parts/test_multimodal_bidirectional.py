"""Gemma 3 with images, whose tokens see each other in both directions: nothing of serving cuts an image in two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from multimodal_family import Case, Run, Stages, answer, processed, request_of, sent
from torch import nn

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.schedule.decision import Limits
from segue.engines.autoregressive.step.check import check_bidirectional_served
from segue.messages.errors import ConfigError
from segue.models.omni.multimodal_lm.bidirectional import MaskProbe, Sight, bidirectional_seen, runs
from segue.models.omni.multimodal_lm.processor import Processed
from segue.models.omni.multimodal_lm.tiny import presets as tiny
from segue.models.shared.library import PreTrainedConfig

TOKENS = 40
PLACE = Case("place", "is it the same place? say what is different about it", (("image", 8), ("image", 10)))
DIFFER = Case("differ", "how do these differ", (("image", 2), ("image", 3), ("image", 4)))


@dataclass
class Gemma:
    directory: Path
    stages: Stages
    expected: dict[str, list[int]]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    directory = tmp_path_factory.mktemp("gemma3")
    tiny.make("gemma3-vision", directory)
    expected = {case.name: answer(directory, processed(directory, case), TOKENS) for case in (PLACE, DIFFER)}
    return Gemma(directory, Stages(directory), expected)


def payload_of(gemma: Gemma, case: Case) -> dict[str, Any]:
    return gemma.stages.input.process(request_of(case))


def test_its_images_are_spans(gemma: Gemma) -> None:
    payload = payload_of(gemma, DIFFER)
    rows = [chunk["media"][0] for chunk, _ in gemma.stages.encoded(payload)]
    prompt = gemma.stages.llm._prompt(sent("input", "llm", payload), rows)
    places = [unit["places"].tolist() for unit in payload["media"]]
    assert list(prompt.bidirectional) == [(own[0], own[-1] + 1) for own in places]
    assert [stop - start for start, stop in prompt.bidirectional] == [16] * 3


@pytest.mark.parametrize(("budget", "block_size"), [(1, 4), (7, 16)])
def test_chunks_of_any_size_leave_images_whole(gemma: Gemma, budget: int, block_size: int) -> None:
    run = Run(gemma.stages, max_tokens_per_step=budget, block_size=block_size)
    assert run([DIFFER], TOKENS)["differ"] == gemma.expected["differ"]


def test_after_preemption(gemma: Gemma) -> None:
    limits = Limits(4, 4, 24, tuple(gemma.stages.llm.kv.layout(max_model_len=4096).windows))
    payload = payload_of(gemma, DIFFER)
    blocks = 2 * limits.need(len(payload["token_ids"]), 16) - 6
    run = Run(gemma.stages, block_size=4, max_tokens_per_step=24, num_blocks=blocks, prefix_caching=False)
    for name in "ab":
        run.add(name, payload, TOKENS)
    assert run.finish(list("ab")) == dict.fromkeys("ab", gemma.expected["differ"])
    assert run.engine.stats()["preemptions_total"] > 0


def test_a_prefix_hit_ends_before_an_image_or_behind_it(gemma: Gemma) -> None:
    """The last image is another: the first two are found, and what begins in the middle of the second is not."""
    other = Case("differ", DIFFER.text, (*DIFFER.media[:2], ("image", 16)))
    run = Run(gemma.stages)
    run([DIFFER], 2)
    reply = run([other], TOKENS)["differ"]
    spans = [(own[0], own[-1] + 1) for own in (unit["places"].tolist() for unit in payload_of(gemma, other)["media"])]
    found = run.cached["differ"]
    assert spans[0][1] <= found <= spans[2][0]
    assert not any(start < found < stop for start, stop in spans)
    assert reply == answer(gemma.directory, processed(gemma.directory, other), TOKENS)
    assert reply != gemma.expected["differ"]


def test_two_replies_to_one_prompt(gemma: Gemma) -> None:
    run = Run(gemma.stages, block_size=4, max_tokens_per_step=10)
    payload = payload_of(gemma, PLACE)
    assert run.two(payload, TOKENS) == dict.fromkeys((0, 1), gemma.expected["place"])


def test_under_a_causal_mask_the_reply_is_another(gemma: Gemma) -> None:
    causal = Stages(gemma.directory)
    causal.llm._sight = Sight()
    assert Run(causal)([DIFFER], TOKENS)["differ"] != gemma.expected["differ"]


def test_what_cannot_do_it_is_refused_at_load(gemma: Gemma) -> None:
    config = AutoregressiveConfig(num_blocks=60, block_size=4, deterministic=True)
    with pytest.raises(ConfigError, match="deterministic does not support"):
        AutoregressiveEngine(gemma.stages.llm, config)


def test_a_kernel_that_cannot_do_it_is_refused() -> None:
    backend = SimpleNamespace(bidirectional=False)
    with pytest.raises(ConfigError, match=r"attention 'flash_attn' does not support"):
        check_bidirectional_served("flash_attn", backend, [None], deterministic=False)


# --- what is read off the masks --------------------------------------------------------------------------------------


class Decoder(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.config = {"sliding_window": window} if window else {}
        if window:
            self.config = type("Config", (dict,), {"sliding_window": window})(self.config)
        self.embedding = nn.Embedding(10, 4)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, **given) -> None:
        raise AssertionError("the probe ends before the decoder")


class Inner(nn.Module):
    def __init__(self, decoder: Decoder, masks, changed: int | None = None) -> None:
        super().__init__()
        self.decoder, self.masks, self.changed = decoder, masks, changed

    def forward(self, input_ids, token_type_ids=None, use_cache=None) -> None:
        assert token_type_ids is not None
        rows = self.decoder.embedding(input_ids)
        if self.changed is not None:
            rows[0, self.changed] += 1
        self.decoder(inputs_embeds=rows, attention_mask=self.masks)


LENGTH, SPANS = 12, [(2, 5), (7, 10)]


class Seer:
    kinds = ("image",)
    placeholders = MappingProxyType({"image": "<image>"})

    def examples(self, kind: str) -> tuple[str, list[int]]:
        return "a text", [0, 1]

    def __call__(self, text: str, media) -> Processed:
        ids = [9 if any(start <= place < stop for start, stop in SPANS) else 1 for place in range(LENGTH)]
        return Processed(ids, {"image": 9}, {"image": {}}, token_types=[int(token == 9) for token in ids])


def found(masks, window: int | None = None) -> Sight:
    decoder = Decoder(window)
    probe = MaskProbe("Some", Inner(decoder, masks), decoder, Seer(), torch.device("cpu"), torch.float32)
    return probe.sight()


def test_masks_are_read_as_what_they_are() -> None:
    causal, both = bidirectional_seen(LENGTH, []), bidirectional_seen(LENGTH, SPANS)
    near = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-3)
    additive = torch.zeros(LENGTH, LENGTH).masked_fill(~both, -1e30)
    everything = torch.ones_like(both)
    images = Sight(frozenset({"image"}))
    assert found(None) == Sight()
    assert found(torch.ones(1, LENGTH)) == Sight()
    assert found(causal[None, None]) == Sight()
    assert found(both[None, None]) == images
    assert found(additive[None, None]) == images
    spans = {"full_attention": both[None, None], "sliding_attention": (both & near)[None, None]}
    assert found(spans, window=4) == images
    assert found(everything[None, None]) == Sight(frozenset({"image"}), whole=True)
    some = {"full_attention": None, "sliding_attention": (both & near)[None, None]}
    assert found(some, window=4) == Sight(images.kinds, types=frozenset({"sliding_attention"}))
    assert found(both[None, None], window=3) == images
    far = causal & torch.ones_like(causal).triu(-1)
    for start, stop in SPANS:
        far[start:stop, start:stop] = True
    seen = found({"full_attention": both[None, None], "sliding_attention": far[None, None]}, window=2)
    assert seen == Sight(images.kinds, beyond=True, types=frozenset({"full_attention", "sliding_attention"}))
    with pytest.raises(ConfigError, match="in only some of its layers"):
        found({"full_attention": None, "sliding_attention": everything[None, None]}, window=4)
    joined = both.clone()
    joined[2:5, 7:10] = True  # images that see each other (Molmo 2)
    for other in (joined, both & near):
        with pytest.raises(ConfigError, match=r"Some of transformers .* attention masks for media"):
            found(other[None, None])


def test_the_layers_in_which_they_see_each_other() -> None:
    config = PreTrainedConfig()
    config.num_hidden_layers, config.layer_types = 3, ["sliding_attention", "full_attention", "sliding_attention"]
    kinds, types = frozenset({"image"}), frozenset({"sliding_attention"})
    assert Sight().layers(config) == frozenset()
    assert Sight(kinds).layers(config) == {0, 1, 2}
    assert Sight(kinds, types=types).layers(config) == {0, 2}
    config.layer_types = None
    with pytest.raises(ConfigError, match="its config does not state which"):
        Sight(kinds, types=types).layers(config)


def test_media_may_change_their_own_rows_only() -> None:
    decoder = Decoder(None)
    embedding = decoder.get_input_embeddings()
    for changed in (SPANS[0][0], 0):
        inner = Inner(decoder, None, changed)
        device, plain = torch.device("cpu"), lambda ids, kinds: embedding(ids)
        probe = MaskProbe("Some", inner, decoder, Seer(), device, torch.float32, plain)
        if changed:
            assert probe.sight() == Sight()
        else:
            with pytest.raises(ConfigError, match="changes the rows of other tokens"):
                probe.sight()


def test_runs_are_those_of_places() -> None:
    assert runs([]) == []
    assert runs([3]) == [(3, 4)]
    assert runs([0, 1, 2, 5, 6, 9]) == [(0, 3), (5, 7), (9, 10)]
