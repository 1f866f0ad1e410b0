"""What a run is told to do: from `key=value` to one typed object.

`config.RunConfig` is what the rest sees; `settings` are the parts of it that belong to no component. `compose` makes
one through Hydra, after `overrides` and `keys` have checked each word against what there is to choose (`options`).
"""
