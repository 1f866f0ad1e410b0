"""An example takes long in the interpreter: failing ones are shown as they are, not made smaller."""

from functools import cache

from hypothesis import Phase, settings
from triton.runtime import interpreter

settings.register_profile(
    "interpreted", settings.get_profile("testbed"), phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
settings.load_profile("interpreted")

# Before each launch, and before each call within one, Triton looks through its language for what it must replace, which
# is half of the time; after a launch it puts all back. Here nothing else is run, so it stays replaced.
if hasattr(interpreter, "_LangPatchScope"):
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = cache(interpreter._patch_lang)
