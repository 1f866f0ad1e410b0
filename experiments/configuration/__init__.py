"""The configuration of a run: from `key=value` overrides to one typed object.

Other packages see only `config.RunConfig`; `settings` has the groups that belong to no component. `compose` makes a
RunConfig with Hydra, after `overrides` and `keys` have checked every override against the available `options`.
"""
