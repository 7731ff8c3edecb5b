"""Serves the author's model in `action_video` with Segue."""
