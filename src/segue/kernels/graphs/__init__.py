"""Replayed calls: CUDA graphs (`cuda_capture`), recordings of calls on a CPU (`recorder`, `recording`, `arena`), both
for whole networks (`network_graphs`), and `torch.compile` (`compiled`).

Doors: `compiled`, `cuda_capture`, `network_graphs`, `recorder`, `recording`.
"""
