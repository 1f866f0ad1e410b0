"""From a configuration to the parts of a run. The only place that knows both backends.

`build` makes trace, scheduler and simulator, `build_engine` the engines; `costs`, `policies`, `traces` and `estimator`
are its parts, `engines` what drives one or a fleet. `on_device` refuses what a device cannot do, `foreign` puts into
one line what a user's own class did wrong.
"""
