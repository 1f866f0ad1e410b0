"""The configuration of a run: from `key=value` overrides to one typed object.

Other packages see only `config.RunConfig`; `settings` has the groups that belong to no component. `compose` makes a
RunConfig with Hydra: `grammar` reads what is given, `overrides` checks it and finds the `options` that it chooses,
OmegaConf checks keys and values where they are set, and `keys` says what is wrong with those that it refuses.
`own_class` makes the objects of users' own classes.
"""
