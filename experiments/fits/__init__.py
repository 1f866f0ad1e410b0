"""Fits of `cost=calibrated` that come with the testbed, and the profiles to which they were fitted, as files named
<model>-<device>. Each was measured on the real engine by the command in its manifest; docs/results has the errors on
runs that the fits have not seen."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from testbed.errors import ConfigError

FOLDER = Path(str(files(__name__)))


def fit_of(model: str, device: str) -> Path:
    """Returns the fit for a model on a device. Raises ConfigError, with those that there are, if there is none."""
    file = FOLDER / f"{model}-{device}.json"
    if not file.is_file():
        names = ", ".join(one.stem.replace("-", " on ") for one in sorted(FOLDER.glob("*.json")))
        raise ConfigError(
            f"cost=calibrated: no fit for {model} on {device} comes with the testbed (there are {names}); measure one "
            "with `testbed calibrate` and give cost.path=<fit>.json"
        )
    return file
