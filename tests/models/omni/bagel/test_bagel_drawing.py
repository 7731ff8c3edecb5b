"""Images are those of the reference, under every condition of serving; and the contexts that they follow are shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from bagel_reference import CASES, Bagel, carried_out
from bagel_stages import THOUGHTS, TOKENS, Drawing, Stages, request_of, stage_request
from torch import Tensor

from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, SegueError, TooLong
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.models.omni.bagel.vision import patches

WITHIN = 2e-4
Case = dict[str, Any]
_GUIDED = CASES["edit"]["guidance"]
DRAWN: dict[str, Case] = {
    **{name: CASES[name] for name in ("draw", "edit", "think")},
    # other sizes, steps and contexts beside these
    "wide": {**CASES["draw"], "text": "A lighthouse", "size": [32, 128], "seed": 7, "steps": 4},
    "planned": {**CASES["edit"], "think": "Say what you will change.", "image": [96, 48], "seed": 8, "steps": 4},
    "free": {**CASES["draw"], "size": [48, 64], "seed": 9, "steps": 3, "guidance": {**_GUIDED, "text": 1.0}},
}


def request(name: str, case: Case, **more: Any) -> Request:
    """A case as a client asks for it."""
    guidance = case["guidance"]
    options = {
        "cfg_img_scale": guidance["image"],
        "cfg_interval": [guidance["above"], guidance["upto"]],
        "cfg_renorm_type": guidance["renorm"],
        "cfg_renorm_min": guidance["least"],
        "think": bool(case.get("think")),
    }
    height, width = case.get("size", (None, None))
    params = DiffusionParams(
        num_inference_steps=case["steps"], guidance_scale=guidance["text"], height=height, width=width
    )
    parts = [tuple(case["image"])] if "image" in case else []
    return request_of(
        [*parts, case["text"]],
        name,
        system=case.get("think"),
        modalities=["image"],
        options=options,
        diffusion=params,
        seed=case["seed"],
        **more,
    )


@pytest.fixture(scope="module")
def stages(tiny_dir: Any) -> Stages:
    return Stages(tiny_dir, draws=True)


@pytest.fixture(scope="module")
def expected(reference: Bagel) -> dict[str, tuple[list[int], Tensor]]:
    """By case: thoughts with the mark that begins them, and latents."""
    made = {name: carried_out(reference, case, THOUGHTS) for name, case in DRAWN.items()}
    return {name: (done.ids, done.drawn.latents) for name, done in made.items() if done.drawn is not None}


def apart(latents: Tensor, gold: Tensor) -> float:
    """Largest difference of latents [1, C, h, w] from the reference's [n, P]."""
    return float((patches(latents[0], 2) - gold).abs().max())


def check(run: Drawing, expected: dict[str, tuple[list[int], Tensor]], names: list[str]) -> None:
    made = run.run()
    assert not made.errors
    for name in names:
        ids, latents = expected[name]
        assert made.thoughts[name][: len(ids) - 1] == ids[1:]
        [ours] = made.latents[name]
        assert apart(ours, latents) < WITHIN, name


@pytest.mark.parametrize("name", DRAWN)
def test_alone(stages: Stages, expected: dict[str, tuple[list[int], Tensor]], name: str) -> None:
    run = Drawing(stages)
    run.add(name, request(name, DRAWN[name]))
    check(run, expected, [name])


@pytest.mark.parametrize(
    "config", [{}, {"max_tokens_per_step": 24, "prefix_caching": False}, {"num_blocks": 36, "max_rows": 3}]
)
def test_beside_others_that_join_late(
    stages: Stages, expected: dict[str, tuple[list[int], Tensor]], config: dict[str, Any]
) -> None:
    """Of other sizes, steps and contexts, and replies; in a small cache some wait for others' blocks."""
    run, alone = Drawing(stages, **config), Drawing(stages)
    alone.reply("reply", request_of(["What is the sea like at night?"]))
    [reply] = alone.run().thoughts.values()
    run.reply("reply", request_of(["What is the sea like at night?"]))
    calls: list[list[tuple[int, int]]] = []
    predict = run.denoiser._model.predict

    def recorded(rows: Any) -> Any:
        calls.append([(row.sample.step, row.sample.tokens) for row in rows])
        return predict(rows)

    run.denoiser._model.predict = recorded  # type: ignore[method-assign]
    for name, case in DRAWN.items():
        run.add(name, request(name, case))
        run.step()
    check(run, expected, list(DRAWN))
    assert run.made.thoughts["reply"] == reply
    assert len(reply) <= TOKENS
    mixed = [rows for rows in calls if len({size for _, size in rows}) > 1 and len({step for step, _ in rows}) > 1]
    assert mixed, "no call had rows of different sizes at different steps"


def test_after_a_prefix_hit(stages: Stages, expected: dict[str, tuple[list[int], Tensor]]) -> None:
    """Another seed shares what the tower sees of an image only behind its latents, so nothing of it."""
    run = Drawing(stages, block_size=4)
    run.add("edit", request("edit", DRAWN["edit"]))
    check(run, expected, ["edit"])
    assert run.made.cached["edit"] == 0
    for name, case in (("again", DRAWN["edit"]), ("other", {**DRAWN["edit"], "seed": 5})):
        run.add(name, request(name, case))
    made = run.run()
    assert made.cached["again"] >= 68
    assert made.cached["other"] == 0
    assert apart(made.latents["again"][0], expected["edit"][1]) < WITHIN
    assert apart(made.latents["other"][0], expected["edit"][1]) > 0.1


def test_after_preemption(stages: Stages, expected: dict[str, tuple[list[int], Tensor]]) -> None:
    """Thoughts are preempted for contexts of an older image, which are never preempted themselves."""
    run = Drawing(stages, block_size=4, num_blocks=34, prefix_caching=False)
    for name in ("planned", "think"):
        run.add(name, request(name, DRAWN[name]))
    check(run, expected, ["planned", "think"])
    assert run.inner.stats()["preemptions_total"] > 0


@pytest.mark.parametrize("known", [0, 1, 20, None])
def test_a_new_attempt_goes_on_from_its_thoughts(
    stages: Stages, expected: dict[str, tuple[list[int], Tensor]], known: int | None
) -> None:
    ids = [*expected["think"][0][1:], *stages.llm.end_token_ids][: THOUGHTS - 1]
    run = Drawing(stages)
    run.add("think", request("think", DRAWN["think"]), resume=ids[:known])
    check(run, expected, ["think"])
    assert run.made.thoughts["think"][: len(ids)] == ids


def _louder(part: str) -> Callable[[Stages], Any]:
    def change(stages: Stages) -> Any:
        root = {"llm": stages.llm._decoder.model, "space": stages.llm.space}
        owner, _, rest = part.partition(".")
        module = root[owner].get_submodule(rest)
        return module.register_forward_hook(lambda module, given, out: 1.5 * out)

    return change


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("edit", "llm.layers.1.mlp_moe_gen"),
        ("draw", "llm.layers.0.post_attention_layernorm"),
        ("edit", "space.time_embedder"),
        pytest.param("draw", "space.llm2vae", marks=pytest.mark.nightly),
        pytest.param("edit", "space.latent_pos_embed", marks=pytest.mark.nightly),
        pytest.param("think", "llm.layers.2.self_attn.q_norm_moe_gen", marks=pytest.mark.nightly),
    ],
)
def test_every_part_counts(stages: Stages, expected: dict[str, tuple[list[int], Tensor]], name: str, part: str) -> None:
    hook = _louder(part)(stages)
    try:
        run = Drawing(stages)
        run.add(name, request(name, DRAWN[name]))
        assert apart(run.run().latents[name][0], expected[name][1]) > 10 * WITHIN
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("draw", {"seed": 4}),
        ("edit", {"image": [60, 91]}),
        ("edit", {"text": "Make the sky red"}),
        ("think", {"think": "Plan the image first, in a few words."}),
        ("draw", {"guidance": {**CASES["draw"]["guidance"], "above": 0.0}}),
    ],
)
def test_every_input_counts(
    stages: Stages, expected: dict[str, tuple[list[int], Tensor]], name: str, change: Case
) -> None:
    run = Drawing(stages)
    run.add(name, request(name, {**DRAWN[name], **change}))
    assert apart(run.run().latents[name][0], expected[name][1]) > 10 * WITHIN


def test_contexts_that_begin_alike_share_blocks(stages: Stages) -> None:
    """The ledger has the blocks of the whole once; those of the texts without an image are blocks of their own."""
    needed = {"draw": [14], "edit": [79, 11]}
    for name, lengths in needed.items():
        run = Drawing(stages, block_size=4, prefix_caching=False)
        run.add(name, request(name, DRAWN[name]))
        while not run.reader.stats()["contexts_lent"]:
            run.step()
        [sample] = [one.sample for one in run.denoiser._entries[name].running]
        views, lease = sample.conditions, sample.state.lease
        used = run.inner.resources.pool.used
        assert used == sum(-(-length // 4) for length in lengths)
        whole = run.reader.blocks(lease, views[0])
        assert list(run.reader.blocks(lease, views[1])) == list(whole)[: -(-views[1].length // 4)]
        assert len(views) == 1 + len(lengths)  # of a drawing, the whole is also the context without images
        tables = [run.reader.blocks(lease, view) for view in views]
        assert len({block for table in tables for block in table}) == used
        assert {run.inner.resources.pool.references[block] for block in whole} == {1}
        before = [layer.clone() for layer in (*run.reader.store.keys, *run.reader.store.values)]
        run.run()
        after = (*run.reader.store.keys, *run.reader.store.values)
        assert all(torch.equal(one, layer) for one, layer in zip(before, after, strict=True))


def test_weights_are_in_memory_once(stages: Stages) -> None:
    denoiser = Drawing(stages).denoiser._model
    assert denoiser.weight_bytes == 0
    assert denoiser._llm is stages.llm
    parts = [value for value in vars(denoiser).values() if isinstance(value, torch.nn.Module)]
    assert parts == []


@pytest.mark.parametrize("steps", range(8))
def test_a_request_that_is_cancelled_leaves_nothing(stages: Stages, steps: int) -> None:
    """While it thinks, reads, waits or is drawn: `drop` is all that a worker does."""
    run = Drawing(stages, num_blocks=36)
    for name in ("edit", "planned", "draw"):
        run.add(name, request(name, DRAWN[name]))
    for _ in range(steps):
        run.step()
    for name in ("planned", "edit"):
        run.denoiser.cancel(name)
        run.reader.cancel(name)
        run.inner.audit()
    made = run.run()
    assert len(made.latents["draw"]) == 1
    assert run.reader.stats()["contexts_lent"] == run.reader.stats()["contexts_waiting"] == 0


def test_a_failing_denoiser_gives_the_contexts_back(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Drawing(stages)
    run.add("draw", request("draw", DRAWN["draw"]))
    monkeypatch.setattr(run.denoiser._model, "combine", lambda sample, predictions: 1 / 0)
    assert "ZeroDivisionError" in str(run.run().errors["draw"])


def test_contexts_that_never_fit_are_refused(stages: Stages) -> None:
    run = Drawing(stages, num_blocks=11)
    run.add("edit", request("edit", DRAWN["edit"]))
    run.add("draw", request("draw", DRAWN["draw"]))
    made = run.run()
    assert isinstance(made.errors["edit"], TooLong)
    assert made.errors.keys() == {"edit"}
    assert len(made.latents["draw"]) == 1


def test_several_images_of_one_request_share_its_contexts(stages: Stages) -> None:
    run = Drawing(stages)
    asked = request("draw", DRAWN["draw"])
    asked.diffusion = msgspec.structs.replace(asked.diffusion, num_images_per_prompt=3)
    run.add("draw", asked)
    made = run.run()
    assert len(made.latents["draw"]) == 3
    assert apart(made.latents["draw"][0], patches(made.latents["draw"][1][0], 2)) > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"diffusion": DiffusionParams(height=100)}, "^height is 100; this model needs a multiple of 16"),
        ({"diffusion": DiffusionParams(height=256)}, "^height is 256; this model makes at most 128"),
        ({"diffusion": DiffusionParams(num_inference_steps=1)}, "^num_inference_steps is 1; it must be at least 2"),
        ({"diffusion": DiffusionParams(num_inference_steps=900)}, "^num_inference_steps is 900; at most 200"),
        ({"diffusion": DiffusionParams(negative_prompt="fog")}, "^this model takes no negative_prompt"),
        ({"options": {"cfg_interval": [0.5, 2]}}, r"^options\.cfg_interval is .*two noise levels"),
        ({"options": {"cfg_renorm_type": "none"}}, r"^options\.cfg_renorm_type is 'none'; it must be one of global"),
        ({"options": {"timestep_shift": 0}}, r"^options\.timestep_shift is 0; it must be a number above 0"),
        ({"options": {"think": "yes"}}, r"^options\.think is 'yes'; it must be true or false"),
        (
            {"options": {"think": False}, "modalities": ["text", "image"]},
            r"^options\.think is false, but modalities has text",
        ),
        ({"messages": []}, "^messages is empty"),
        ({"messages": [], "prompt_token_ids": [5]}, "^an image is drawn from text"),
    ],
)
def test_requests_that_are_refused(stages: Stages, change: dict[str, Any], message: str) -> None:
    asked = msgspec.structs.replace(request_of(["A boat"], modalities=["image"]), **change)
    with pytest.raises(InvalidRequest, match=message):
        stages.input.process(asked)


def test_several_thoughts_are_refused(stages: Stages) -> None:
    run = Drawing(stages)
    asked = request("think", DRAWN["think"])
    with pytest.raises(SegueError, match=r"^sampling\.llm\.n is 2, but what the model thinks"):
        run.reader.add(
            stage_request("think", "llm", {"input"}, asked, downstreams={"denoiser"}, sampling=SamplingParams(n=2))
        )
