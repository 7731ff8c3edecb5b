"""Drafters with a network: read in their published layouts, trained on the spot, serving what plain steps serve."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import spec_kinds
import torch
from ar_adapter import HIDDEN, VOCAB, Driver, TinyAdapter, generate, prompts, stage_request, tiny_model
from ar_speculation import CONDITIONS, PROMPTS, SAMPLINGS, TOKENS, batched, plainly, preempted, serve, speculating
from spec_heads import hidden_states, whole
from spec_kinds import chain, eagle1_tensors, eagle3_tensors, medusa_tensors, mtp_tensors

from head_files import eagle_config, layer_shapes, random_tensors, write
from segue.engines.autoregressive.speculation.cache import DraftCache, Span
from segue.engines.autoregressive.speculation.drafter import Drafter
from segue.engines.autoregressive.speculation.model import ModelDrafter
from segue.engines.autoregressive.speculation.ngram import NgramDrafter
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams
from segue.models.shared.decoder.speculators.eagle import Eagle
from segue.models.shared.decoder.speculators.medusa import Medusa
from segue.models.shared.decoder.speculators.mtp import MultiToken, layouts
from selection import daily

adapter, answers, texts, kind = spec_kinds.adapter, spec_kinds.answers, spec_kinds.texts, spec_kinds.kind
ngram, draft, medusa = spec_kinds.ngram, spec_kinds.draft, spec_kinds.medusa
eagle1, eagle3, mtp = spec_kinds.eagle1, spec_kinds.eagle3, spec_kinds.mtp
"""Fixtures."""
GREEDY = SAMPLINGS["greedy"]
BIAS = re.compile(r"self_attn\.o_proj\.bias")


# --- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.__name__)
def test_greedy_tokens_equal_plain_ones(adapter, answers, kind, condition):
    assert condition(adapter, kind.make, GREEDY) == answers


@pytest.mark.parametrize("sampling", daily(("sampled", "penalised"), ("sampled",)))
def test_other_tokens_equal_plain_ones(adapter, kind, sampling):
    plain = serve(plainly(adapter), SAMPLINGS[sampling])
    for condition in (batched, preempted):
        assert condition(adapter, kind.make, SAMPLINGS[sampling]) == plain


def test_drafts_are_accepted(adapter, answers, kind):
    drive = speculating(adapter, kind.make(), prefix_caching=False)
    before = len(adapter.forwards)
    assert serve(drive, GREEDY) == answers
    stats = drive.engine.stats()
    assert stats["spec_active"] == 1.0
    assert stats["spec_accepted_tokens_total"] >= kind.accepted * stats["spec_draft_tokens_total"] > 0
    if kind.accepted > 0.3:
        assert len(adapter.forwards) - before < TOKENS


def test_drafts_for_text_never_seen_are_harmless(adapter, kind):
    fresh = prompts(4, (8, 21, 40, 5), seed=99)
    drive = speculating(adapter, kind.make(), max_tokens_per_step=20)
    for index, prompt in enumerate(fresh):
        drive.add(stage_request(f"r{index}", sampling=GREEDY), prompt)
    results = drive.run()
    for index, prompt in enumerate(fresh):
        assert results[f"r{index}"].token_ids == generate(adapter.model, prompt, TOKENS)


# --- the same distribution -------------------------------------------------------------------------------------------

COUNT = 700
FEW = (5, 17, 41, 60)
SPREAD = SamplingParams(temperature=0.7, top_k=4, max_tokens=4)
AMONG_FEW = SamplingParams(temperature=1.0, allowed_token_ids=list(FEW), max_tokens=4)


def _triples(drive: Driver, prompt: Sequence[int], seeds: range) -> Counter[tuple[int, ...]]:
    """How often what stands behind the prompt; up to two of the three tokens are drafts."""
    sampling = AMONG_FEW if set(prompt) <= set(FEW) else SPREAD
    for seed in seeds:
        drive.add(stage_request(f"s{seed}", sampling=sampling, seed=seed), prompt)
    results = drive.run(20_000)
    return Counter(tuple(results[f"s{seed}"].token_ids[:3]) for seed in seeds)


SIZES = {"num_blocks": 512, "max_batch": 48, "max_tokens_per_step": 4096}


@pytest.fixture(scope="module")
def drawn(adapter):
    """What plain sampling gives, with seeds of its own, by prompt."""
    return cache(lambda prompt: _triples(plainly(adapter, **SIZES), prompt, range(COUNT, 2 * COUNT)))


def test_draws_follow_the_target_distribution(adapter, kind, drawn):
    """Chi-square of three tokens over many seeds, against plain sampling with as many others (two samples): so it does
    not hang on both drawing with the same numbers."""
    drafter = kind.make()
    # prompt lookup is right by chance, among few tokens: each that is drawn has occurred before
    prompt = PROMPTS[0] if not isinstance(drafter, NgramDrafter) else [FEW[token % 4] for token in PROMPTS[4]]
    drive = speculating(adapter, drafter, tokens=2, **SIZES)
    ours, plain = _triples(drive, prompt, range(COUNT)), drawn(tuple(prompt))
    stats = drive.engine.stats()
    drafted, accepted = stats["spec_draft_tokens_total"], stats["spec_accepted_tokens_total"]
    assert drafted > COUNT / 8
    assert 0.02 * drafted < accepted < 0.98 * drafted, "both ways must be taken"
    common = [triple for triple in ours | plain if ours[triple] + plain[triple] >= 10]
    pairs = [[ours[triple], plain[triple]] for triple in common]
    rare = [COUNT - sum(each[triple] for triple in common) for each in (ours, plain)]
    pairs += [rare] if sum(rare) >= 10 else []
    assert len(pairs) > 8
    chi2 = sum((one - other) ** 2 / (one + other) for one, other in pairs)
    freedom = len(pairs) - 1  # both have as many in all
    # Wilson and Hilferty (1931); 3.72 is the 1e-4 quantile
    assert ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5 < 3.72


# --- a draft model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("condition", [batched, preempted], ids=lambda condition: condition.__name__)
def test_a_draft_model_that_is_the_target_is_always_right(adapter, sampling, condition):
    """At any temperature, because it draws with the request's own numbers: and with its penalties."""
    same = TinyAdapter(adapter.model)
    held = []

    def make() -> Drafter:
        held.append(_Counting(ModelDrafter(same, VOCAB, 64, 8, 2048)))
        return held[-1]

    plain = serve(plainly(adapter), sampling)
    assert condition(adapter, make, sampling) == plain
    text = {f"r{index}": [*prompt, *tokens] for index, (prompt, tokens) in enumerate(zip(PROMPTS, plain, strict=True))}
    right = [
        text[key][place : place + len(drafts)] == drafts[: len(text[key]) - place]
        for key, place, drafts in held[0].told
    ]
    assert len(right) > 10
    assert all(right)


class _Counting(ModelDrafter):
    def __init__(self, inner: ModelDrafter) -> None:
        self.inner, self.told = inner, []

    def propose(self, wanted):
        drafts = self.inner.propose(wanted)
        self.told += [(entry.key, len(entry.ids), draft) for entry, draft in zip(wanted, drafts, strict=True) if draft]
        return drafts

    def forget(self, key):
        self.inner.forget(key)

    def audit(self):
        self.inner.audit()


def test_a_draft_model_computes_each_token_once(adapter, answers):
    """Accepted drafts are not computed again: all its forwards together are the text, and what was rejected."""
    small = TinyAdapter(adapter.model)
    drive = speculating(adapter, ModelDrafter(small, VOCAB, 64, 8, 2048))
    assert serve(drive, GREEDY, which=[2]) == [answers[2]]
    assert sum(small.forwards) <= len(PROMPTS[2]) + TOKENS


def test_a_draft_model_catches_up_in_pieces(adapter, answers):
    small = TinyAdapter(adapter.model)
    drive = speculating(adapter, ModelDrafter(small, VOCAB, 64, 8, 16))
    assert serve(drive, GREEDY) == answers
    assert max(small.forwards) <= 16
    assert drive.engine.stats()["spec_accepted_tokens_total"] > 10


@pytest.mark.parametrize("blocks", [1, 4, 9])
def test_a_small_cache_drafts_for_fewer(adapter, answers, draft, blocks):
    small = draft()._model
    drive = speculating(adapter, ModelDrafter(small, VOCAB, blocks, 8, 2048))
    assert serve(drive, GREEDY) == answers
    assert drive.engine.stats()["spec_active"] == 1.0


@pytest.mark.parametrize("blocks", [1, 4, 9])
def test_a_small_cache_of_a_chain_drafts_for_fewer(adapter, answers, eagle1, blocks):
    drive = speculating(adapter, chain(adapter, eagle1()._head, blocks))
    assert serve(drive, GREEDY) == answers
    assert drive.engine.stats()["spec_active"] == 1.0


@pytest.mark.parametrize("vocab", [60, 120])
def test_a_draft_model_with_fewer_or_more_ids(adapter, answers, vocab):
    small = TinyAdapter(tiny_model("llama", vocab_size=vocab))
    drive = speculating(adapter, ModelDrafter(small, VOCAB, 64, 8, 2048))
    assert serve(drive, GREEDY) == answers
    assert drive.engine.stats()["spec_active"] == 1.0


def test_rules_that_leave_a_head_nothing_to_guess(adapter, kind):
    """EAGLE-3's smaller vocabulary and the allowed tokens may have nothing in common: others draft on."""
    few = SamplingParams(temperature=0.8, max_tokens=TOKENS, allowed_token_ids=[7, 8, 9])
    plain = plainly(adapter)
    drive = speculating(adapter, kind.make())
    for each in (plain, drive):
        each.add(stage_request("few", sampling=few, seed=3), PROMPTS[0])
        each.add(stage_request("free", sampling=SAMPLINGS["sampled"], seed=4), PROMPTS[1])
        each.run()
    for key in ("few", "free"):
        assert drive.results[key].token_ids == plain.results[key].token_ids
    assert drive.engine.stats()["spec_active"] == 1.0


def test_a_drafter_that_computes_nan_guesses_anything(adapter, answers):
    small = TinyAdapter(adapter.model)
    small.poison = answers[1][2]
    drive = speculating(adapter, ModelDrafter(small, VOCAB, 64, 8, 2048))
    sampled = serve(drive, SAMPLINGS["sampled"])
    assert sampled == serve(plainly(adapter), SAMPLINGS["sampled"])
    assert drive.engine.stats()["spec_active"] == 1.0


def test_least_recently_used_tables_give_way():
    spec = TinyAdapter(tiny_model("llama")).kv
    cache = DraftCache(spec, 4, 8, torch.device("cpu"))
    assert cache.reserve("a", 16, set())
    assert cache.reserve("b", 9, set())
    assert not cache.reserve("c", 8, {"a", "b"})
    assert cache.reserve("a", 16, set())
    assert cache.reserve("c", 16, {"c"})
    assert ("a" in cache, "b" in cache) == (True, False)
    order, _ = cache.step([Span("a", 0, 9), Span("c", 3, 4)])
    assert order == [1, 0]
    cache.audit()


# --- published layouts -----------------------------------------------------------------------------------------------


def test_medusa_in_the_layout_of_vllm(adapter, texts, tmp_path):
    theirs = medusa_tensors()
    torch.save(theirs, tmp_path / "medusa_lm_head.pt")
    first = Medusa(tmp_path, adapter, torch.float32)
    names = {"0.linear.weight": "layers.0.weight", "0.linear.bias": "layers.0.bias"}
    other = {}
    for name, tensor in theirs.items():
        head, _, rest = name.partition(".")
        other[f"lm_heads.{head}.weight" if rest == "1.weight" else f"blocks.{head}.{names[rest]}"] = tensor
    states = hidden_states(adapter, texts[0])
    second = Medusa(write(tmp_path / "vllm", other), adapter, torch.float32)
    torch.testing.assert_close(first.logits(states), second.logits(states))
    few = torch.arange(3, VOCAB, 2)
    mapped = {name: tensor[few] if name.startswith("lm_heads") else tensor for name, tensor in other.items()}
    third = Medusa(write(tmp_path / "mapped", {**mapped, "token_map": few}), adapter, torch.float32)
    logits = third.logits(states)
    torch.testing.assert_close(logits[..., few], first.logits(states)[..., few])
    assert int(logits.isfinite().sum()) == logits.shape[0] * 3 * len(few)


@pytest.mark.parametrize("which", range(3))
def test_layouts_of_multi_token_prediction(adapter, texts, tmp_path, which):
    """All of them make the same network: only what is joined first, and what is carried on, differs."""
    tensors, _ = mtp_tensors(adapter, which)
    head = MultiToken(write(tmp_path, tensors), adapter, torch.float32)
    ids = torch.tensor(texts[1])
    states = hidden_states(adapter, texts[1])[:-1]
    count = len(states)
    own, out = head.forward(head.rows(states), ids[1:], torch.arange(count), whole(head.kv, count))
    way, network = layouts(3)[which], head._network
    assert torch.equal(own, out) == way.normed_on
    pair = [network.embed_norm(adapter.embed(ids[1:], None)), network.hidden_norm(states)]
    joined = network.join(torch.cat(pair[::-1] if which == 2 else pair, dim=-1))
    again = network.layer(
        joined[None],
        position_embeddings=adapter.model.model.rotary_emb(joined, torch.arange(count)[None]),
        attention_mask=None,
        paged=whole(head.kv, count),
    )[0]
    torch.testing.assert_close(network.norm(again), out)
    assert head.logits(out).shape == (count, VOCAB)


def test_a_prefix_of_names_and_a_file_of_torch(adapter, texts, tmp_path):
    """EAGLE heads are published as `pytorch_model.bin` too, and with `model.` before their names."""
    config = eagle_config(HIDDEN, VOCAB)
    write(tmp_path / "one", eagle1_tensors(), config)
    write(tmp_path / "two", {}, config)
    (tmp_path / "two" / "model.safetensors").unlink()
    torch.save(
        {f"model.{name}": tensor for name, tensor in eagle1_tensors().items()}, tmp_path / "two/pytorch_model.bin"
    )
    one, two = (Eagle(tmp_path / name, adapter, torch.float32) for name in ("one", "two"))
    assert one.weight_bytes == two.weight_bytes
    ids, states = torch.tensor(texts[0]), hidden_states(adapter, texts[0])
    count = len(ids) - 1
    outs = [head.forward(states[:-1], ids[1:], torch.arange(count), whole(head.kv, count))[1] for head in (one, two)]
    assert torch.equal(*outs)


def test_biases_of_q_k_and_v_only(adapter, texts, tmp_path):
    tensors = eagle1_tensors()
    for name in ("q", "k", "v"):
        rows = len(tensors[f"layers.0.self_attn.{name}_proj.weight"])
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.full((rows,), 0.5)
    head = Eagle(write(tmp_path, tensors, eagle_config(HIDDEN, VOCAB)), adapter, torch.float32)
    biases = {name: tensor for name, tensor in head._network.state_dict().items() if BIAS.search(name)}
    assert [float(tensor.abs().max()) for tensor in biases.values()] == [0.0]


def test_embeddings_of_its_own(adapter, tmp_path):
    tensors = {**eagle1_tensors(), "embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    head = Eagle(write(tmp_path / "own", tensors, eagle_config(HIDDEN, VOCAB)), adapter, torch.float32)
    shared = Eagle(write(tmp_path / "shared", eagle1_tensors(), eagle_config(HIDDEN, VOCAB)), adapter, torch.float32)
    ids, states = torch.tensor([3, 4]), torch.ones(2, HIDDEN)
    outs = [each.forward(states, ids, torch.arange(2), whole(each.kv, 2))[1] for each in (head, shared)]
    assert not torch.allclose(*outs)


# --- checkpoints that do not fit -------------------------------------------------------------------------------------


def broken_eagle(path, adapter, change, **config):
    tensors = eagle3_tensors()
    change(tensors)
    values = eagle_config(HIDDEN, VOCAB, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    Eagle(write(path, tensors, {**values, **config}), adapter, torch.float32)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda tensors: tensors.pop("fc.weight"), {}, "no tensor 'fc.weight'"),
        (lambda tensors: tensors.pop("norm.weight"), {}, "no tensor 'norm.weight'"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(4)}), {}, r"'norm.weight' is \[4\]; .* \[48\]"),
        (lambda tensors: tensors["d2t"].add_(50), {}, "drafts tokens up to 146; the model has 97"),
        (lambda tensors: None, {"eagle_config": None}, r"needs layers \[2, 1, 0\]"),
        (lambda tensors: None, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3]}}, r"needs layers \[3\]"),
    ],
)
def test_eagle_checkpoints_that_do_not_fit(adapter, tmp_path, change, config, message):
    if "2, 1, 0" in message:  # three layers are enough for the published default
        broken_eagle(tmp_path, adapter, change, **config)
        return
    with pytest.raises(ConfigError, match=message):
        broken_eagle(tmp_path, adapter, change, **config)


def test_an_eagle_head_for_another_width(adapter, tmp_path):
    shapes = layer_shapes("layers.0.", 32, norm=False) | {"fc.weight": [32, 64]}
    write(tmp_path, random_tensors(shapes), eagle_config(32, VOCAB))
    with pytest.raises(ConfigError, match="hidden_size of this EAGLE head is 32; the model's is 48"):
        Eagle(tmp_path, adapter, torch.float32)


def test_medusa_checkpoints_that_do_not_fit(adapter, tmp_path):
    with pytest.raises(ConfigError, match=r"none of medusa_lm_head.safetensors, .* pytorch_model.bin"):
        Medusa(tmp_path, adapter, torch.float32)
    write(tmp_path, {"something": torch.zeros(2)})
    with pytest.raises(ConfigError, match="no Medusa heads"):
        Medusa(tmp_path, adapter, torch.float32)
    write(tmp_path, {"0.0.weight": torch.zeros(VOCAB, 32)})
    with pytest.raises(ConfigError, match=r"a projection \[97, 32\]; this model has hidden states of 48"):
        Medusa(tmp_path, adapter, torch.float32)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"nothing of torch's")
    with pytest.raises(ConfigError, match=r"medusa_lm_head\.pt: cannot be read"):
        Medusa(tmp_path, adapter, torch.float32)


def test_a_model_without_multi_token_prediction(adapter, tmp_path):
    write(tmp_path, {"model.norm.weight": torch.ones(HIDDEN)})
    with pytest.raises(ConfigError, match="has no multi-token-prediction module"):
        MultiToken(tmp_path, adapter, torch.float32)


def test_a_head_that_was_trained_on_others_drafts_in_vain(adapter, answers, tmp_path):
    """Acceptance proves training only if it is missing without it."""
    path = write(tmp_path, eagle1_tensors(), eagle_config(HIDDEN, VOCAB))
    drive = speculating(adapter, chain(adapter, Eagle(path, adapter, torch.float32)))
    assert serve(drive, GREEDY) == answers
    stats = drive.engine.stats()
    assert stats["spec_accepted_tokens_total"] < 0.2 * stats["spec_draft_tokens_total"]
