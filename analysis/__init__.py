"""Analysis: reads run folders into pandas; metrics, statistics, plots, reports. Knows nothing of backends.

`load` reads runs and sweeps; `summary.summarise` measures one run; `statistics` compares replicates; `plots` draws;
`fidelity` sets simulated against real runs; `report` puts all of it on one page. Importing the package loads nothing.
"""
