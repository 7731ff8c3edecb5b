"""Engine kinds, the half without torch: one module per kind with the deployment keys of its stages, their typed plan,
validation and defaults, and what planning and the orchestrator need to know (`kind.EngineKind`). `registry` has the
built-in kinds and those of installed packages. The half that builds the engine is in `segue.worker.kinds`.

Doors: `registry`, `kind`, `autoregressive`, `diffusion`, `module`.
"""
