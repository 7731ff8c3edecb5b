"""A video model that follows actions, as its author wrote it for transformers. It knows nothing of Segue.

A frame is 576 codes of an image tokenizer. Between two frames are six actions of three numbers each. A Llama predicts
the codes of the next frame one after another.

    python -m action_video DIR      # a checkpoint with random weights
"""

from action_video.configuration import ActionVideoConfig
from action_video.modeling import ActionVideoForGeneration

__all__ = ["ActionVideoConfig", "ActionVideoForGeneration"]
