"""`python -m action_video DIR [SEED]`: write a small checkpoint with random weights."""

from __future__ import annotations

import sys

import torch

from action_video import ActionVideoConfig, ActionVideoForGeneration

TRUNK = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}

if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    ActionVideoForGeneration(ActionVideoConfig(trunk=TRUNK)).save_pretrained(sys.argv[1])
