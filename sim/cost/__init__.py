"""Cost models: the time of a step, in whole ns. They know batch shapes, models and devices; no clock, no scheduler.

`base.CostModel` has one method, `price(shape)`. `roofline` computes each operator from a data sheet (`attention`,
`experts`, `drawing`, `collectives`), `tables` looks operators up in `measured` grids, `calibrated` is fitted to a
profile by `calibration` and knows its `profiled_range`; `linear` and `constant` are for teaching. `config` has their
settings.
"""
