"""Replayed calls: on a GPU from CUDA graphs (`cuda_capture`), on a CPU from lists of calls that
`segue.kernels.cpu` captures, both behind `replay`; and `torch.compile` (`compiled`).

Doors: `compiled`, `cuda_capture`, `replay`.
"""
