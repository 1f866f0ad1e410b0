"""Builds the parts of a run from its configuration. The only package that knows both backends.

`build` makes trace, scheduler and simulator with the help of `costs` and `traces`; `build_engine` makes real engines.
`engines` handles one engine or a fleet of replicas. `foreign` reports failures of a user's own class in one line.
"""
