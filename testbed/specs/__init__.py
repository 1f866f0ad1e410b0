"""Models and devices as numbers: shapes, Hugging Face configs, measured profiles, operator tables.

`model.ModelSpec` (also from a checkpoint's `hf_config` and its `quantization`) and `device.DeviceSpec` are what cost
models and engine are given; `memory` says how many KV blocks fit, for both. `profiles` and `operator_tables` are files
of measured times. Step times are made of all these in `sim.cost`.
"""
