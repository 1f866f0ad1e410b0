"""An example takes long in the interpreter: failing ones are shown as they are, not made smaller."""

from hypothesis import Phase, settings

settings.register_profile(
    "interpreted", settings.get_profile("testbed"), phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
settings.load_profile("interpreted")
