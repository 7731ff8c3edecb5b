"""The baseline's process: the real library on the tiny checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from segue.bench.harness.load import closed, turn
from segue.bench.omni.baseline import Options, baseline, baseline_process
from segue.bench.omni.checkpoint import make_preset
from segue.bench.omni.families import FAMILIES, OmniFamily, Suppressed
from segue.bench.omni.outcome import Outcome
from segue.bench.omni.workload import BenchRequest
from segue.messages.errors import StageFailed
from segue.messages.request import Message, TextPart
from segue.models.registry import read_config


def options(model: Path, family: OmniFamily, suppressed: Suppressed) -> Options:
    return Options(
        model_dir=str(model),
        reference=family.reference,
        device="cpu",
        dtype="float32",
        load_format="auto",
        threads=1,
        suppressed_thinker=list(suppressed.thinker),
        suppressed_talker=list(suppressed.talker),
        talker_ends=list(suppressed.talker_ends),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seconds"), [pytest.param("qwen2_5_omni", 0.02, marks=pytest.mark.nightly), ("qwen3_omni", 0.08)]
)
def test_both_ways_of_serving_do_the_work_asked_for(name: str, seconds: float, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = make_preset(tmp_path, "tiny", family.preset)
    suppressed = family.suppressed(read_config(model))
    requests = [
        BenchRequest(
            index, "text", [Message("user", [TextPart(f"Say something, number {index}.")])], length, 4 * length
        )
        for index, length in enumerate([3, 6, 4])
    ]

    async def serve() -> tuple[list[Outcome], list[Outcome]]:
        process = baseline_process(options(model, family, suppressed))
        try:
            loaded = await process.start()
            assert loaded.threads == 1
            one = baseline("one", process, 1e-4)
            static = baseline("static", process, 1e-4, gather=240)  # none is served before the last is there
            async with turn(one, 3):
                alone = await closed(3)(one, requests)
            async with turn(static, 3):
                return alone, await closed(3)(static, requests)
        finally:
            await process.stop()

    alone, together = asyncio.run(serve())
    assert [found.batch for found in alone] == [1, 1, 1]
    assert [found.batch for found in together] == [3, 3, 3], "what arrives together is served together"
    for request, one, many in zip(requests, alone, together, strict=True):
        # the loop has checked the lengths already
        assert one.text_ids == many.text_ids, "the library's own answer does not depend on company"
        assert not set(one.text_ids) & set(suppressed.thinker)
        assert not set(one.code_ids) & set(suppressed.talker)
        assert one.audio_seconds == many.audio_seconds == pytest.approx(request.codes * seconds, abs=0.024)
        assert 0 < one.ttft < one.ttfa == one.jct
        stages = [stage for stage, _, _, _ in one.spans]
        assert stages == ["queue", "input", "thinker", "talker", "vocoder"]
        assert all(earlier[3] == later[2] for earlier, later in zip(one.spans, one.spans[1:], strict=False))
    # one at a time: the others wait, and their waiting counts
    waits = sorted(spans[0][3] for spans in (found.spans for found in alone))
    assert waits[0] < waits[1] < waits[2]


@pytest.mark.slow
def test_what_the_process_cannot_load_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def start() -> None:
        process = baseline_process(options(tmp_path / "none", FAMILIES["qwen2_5_omni"], Suppressed((), (), ())))
        try:
            await process.start()
        finally:
            await process.stop()

    with pytest.raises(StageFailed, match=r"the baseline failed: .*none"):
        asyncio.run(start())
