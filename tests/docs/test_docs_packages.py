"""Packages that the documentation shows do what it says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from markdown_blocks import ROOT, of

ASK_MINE = """
import sys
from segue import Omni

with Omni(sys.argv[1], progress=False) as omni:
    asked = [{"prompt_token_ids": [7, 8], "options": {"no_repeats": asked}} for asked in (True, False)]
    for out in omni.generate(asked, sampling={"llm": {"temperature": 0, "max_tokens": 60, "ignore_eos": True}}):
        print(len(set(out.token_ids["llm"])))
"""


def test_the_package_shown_changes_what_a_family_does(tmp_path: Path) -> None:
    for block in of("python"):
        if block.marks[:1] and (file := block.marks[0].partition("file=")[2]):
            path = tmp_path / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.body)
    info = tmp_path / "segue_mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: segue-mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[segue.models]\nmine = segue_mine.family:FAMILY\n")
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    model = str(tmp_path / "llama")
    subprocess.run([sys.executable, "-m", "segue.cli", "tiny", "llama", model], env=settings, check=True)
    done = subprocess.run(
        [sys.executable, "-c", ASK_MINE, model], env=settings, check=True, stdout=subprocess.PIPE, text=True
    )
    with_it, without = map(int, done.stdout.split())
    assert with_it == 60
    assert without < 60
