"""Too few KV blocks for what is asked at once: requests are preempted, computed again in chunks of sixteen tokens, and
say the same."""

from __future__ import annotations

from pathlib import Path

from truth_system import BY_NAME, LONG, System, Truth, longer

DEPLOYMENT = {
    "stages": {
        "thinker": {"block_size": 4, "kv_blocks": 64, "max_tokens_per_step": 16},
        "talker": {"block_size": 4, "kv_blocks": 80, "max_tokens_per_step": 16},
    }
}
TEXTS = ["Tell me a story.", "Where is the station?", "What is this?"]
STAGES = ("thinker", "talker")
CASES = [
    LONG,
    longer(BY_NAME["text"], tokens=60, codes=120),
    *(longer(LONG, text=text, seed=40 + index) for index, text in enumerate(TEXTS)),
    BY_NAME["image"],
]


def test_after_preemptions(system: System, truth: Truth, assets: Path) -> None:
    for rounds in range(8):  # from the second on with prefix hits between the preemptions
        outputs = system.ask(*(case.prompt(assets) for case in CASES))
        for output, case in zip(outputs, CASES, strict=True):
            truth.check(output, case)
            assert output.metrics.attempts == 1
        if rounds and all(system.run(system.stats(stage, "preemptions_total", bool))[0] for stage in STAGES):
            break  # on a busy machine they may have come one after the other, and had room
    for stage in STAGES:
        counts = system.run(system.stats(stage, "preemptions_total", lambda counts: sum(counts.values()) > 0))
        assert counts[0] > 0
    system.run(system.stats("thinker", "blocks_used", lambda used: used == {0: 0.0}))
