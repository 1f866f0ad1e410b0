"""Reads a user's own device file (`device.path`): YAML with the fields of DeviceSpec. Errors give file and line."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from experiments.configuration.structured import freeze
from testbed.errors import DeviceError
from testbed.foreign_text import not_yaml, parsed, shown, unknown
from testbed.specs.device import DEVICE_FIELDS, DeviceSpec

_NUMBER = re.compile(r"[+-]?(\d[\d_]*)(\.\d*)?([eE][+-]?\d+)?")  # YAML 1.1 takes 3.35e12 for text


def device_of(values: dict[str, Any]) -> DeviceSpec:
    """Returns the spec of the `device` group; fields in the file at `device.path` replace its. Raises TestbedError."""
    path = values.get("path")
    return freeze(DeviceSpec, "device", values | (read_device_file(path) if isinstance(path, str) else {}))


def read_device_file(path: str | Path) -> dict[str, Any]:
    """Returns the fields of a device file. Raises DeviceError with file, line, field, value and the expected value."""
    file = Path(path)
    if not file.is_file():
        raise DeviceError(
            f"device.path: no file at {path}; expected YAML with fields of a device, as memory_bytes: 80e9"
        )
    try:
        node = parsed(partial(yaml.compose, Loader=yaml.SafeLoader), file.read_bytes())
    except (ValueError, yaml.YAMLError) as error:
        raise DeviceError(f"{path}{not_yaml(error)}; expected fields of a device") from None
    if not isinstance(node, yaml.MappingNode):
        raise DeviceError(f"{path}: expected fields of a device, one a line, as memory_bytes: 80e9")
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        place = f"{path}, line {key_node.start_mark.line + 1}"
        name = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "not a name"
        if name == "defaults":
            continue  # Hydra's key, in files copied from conf/device
        if name not in DEVICE_FIELDS:
            raise DeviceError(unknown(f"{place}: unknown field {shown(name)}", name[:60], list(DEVICE_FIELDS)))
        if name in found:
            raise DeviceError(f"{place}: {name} stands twice")
        value = _value(value_node)
        if not DEVICE_FIELDS[name].holds(value):
            is_one = isinstance(value_node, yaml.ScalarNode)
            said = shown(value_node.value) if is_one else "not a single value"
            raise DeviceError(f"{place}: {name} is {said}; it must be {DEVICE_FIELDS[name].text}")
        found[name] = value
    return found


def _value(node: yaml.Node) -> Any:
    """Returns a scalar's value, also reading numbers that YAML 1.1 takes for text; None if it is not a scalar."""
    if not isinstance(node, yaml.ScalarNode):
        return None
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node)
    except (yaml.YAMLError, ValueError):
        return node.value
    finally:
        loader.dispose()
    if isinstance(value, str) and node.style is None and _NUMBER.fullmatch(value):
        value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
