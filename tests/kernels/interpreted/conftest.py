"""An example takes long in the interpreter: failing ones are shown as they are, not made smaller."""

from functools import cache

from hypothesis import Phase, settings
from triton.language import uint64
from triton.language.semantic import TritonSemantic
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

# What Triton finds of a sum or product of integers, that it fits its type, it throws away unless kernels are debugged.
if hasattr(TritonSemantic, "binary_op_sanitize_overflow_impl"):
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *operation: None

# Which type NumPy's is Triton looks up, for each operation, in a table that it makes anew.
if hasattr(interpreter, "_get_np_dtype"):
    _of_scalar = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: _of_scalar(uint64 if dtype.scalar.is_ptr() else dtype.scalar)
