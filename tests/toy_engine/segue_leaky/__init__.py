"""An engine kind from an outside package: `leaky` adds up the ids of a prompt, one per step, and multiplies the sum by
`decay` before each. `kind` has its keys and its plan, `worker` its engine, `family` a model with such a stage."""
