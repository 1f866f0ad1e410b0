"""From a configuration to the parts of a run. The only place that knows both backends.

`build` makes trace, scheduler and simulator, `build_engine` the engines; `costs` and `traces` are its parts, `engines`
what drives one or a fleet. `foreign` puts into one line what a user's own class did wrong.
"""
