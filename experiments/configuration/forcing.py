"""What of a trace's outputs a replay forces: the tokens, only how many there are, or nothing (`trace.forced`)."""

from __future__ import annotations

from dataclasses import replace

from testbed.core.request import Request
from testbed.errors import ConfigError

FORCED = ("tokens", "lengths", "nothing")


def forcing(request: Request, forced: str) -> Request:
    """The request of a trace's row as this mode wants it; one without a recorded output stays as it is.

    tokens: the recorded ones are fed back. lengths: the model's own are, and no EOS, stop token or stop string ends it
    before as many as were recorded are out. nothing: the model's own, up to sampling.max_tokens.
    """
    output = request.forced_output
    if forced == "tokens" or output is None:
        return request
    sampling = request.sampling
    if forced == "lengths":
        sampling = replace(sampling, max_tokens=len(output), ignore_eos=True, stop_token_ids=(), stop=())
    return replace(request, forced_output=None, sampling=sampling)


def check_simulated_output(forced: str) -> None:
    """Raises ConfigError where a simulation cannot know how long outputs are."""
    if forced == "nothing":
        raise ConfigError(
            "trace.forced=nothing lets the model end its outputs, and the simulator has no model; choose tokens or "
            "lengths (the same to a simulator), or backend=real"
        )
