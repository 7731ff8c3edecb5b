"""Replayed calls: on a GPU from CUDA graphs (`cuda_capture`), on a CPU from recordings of `segue.kernels.cpu`, both
behind `replay`; and `torch.compile` (`compiled`).

Doors: `compiled`, `cuda_capture`, `replay`.
"""
