"""Plain values that components exchange: compared, printed, copied and pickled by their fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self


class Value:
    """A class of fields, not to be changed after it was passed on. A check of that would cost more than the creation.

    FIELDS: the names of the fields, in the order of the constructor. Values that are made once a step have
    `free_list_len=1`: in compiled code, the next one reuses the memory of the last one.
    """

    __slots__ = ()
    FIELDS: ClassVar[tuple[str, ...]] = ()

    def values(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in self.FIELDS])

    def as_dict(self) -> dict[str, Any]:
        return dict(zip(self.FIELDS, self.values(), strict=True))

    def replace(self, **changes: Any) -> Self:
        return type(self)(**(self.as_dict() | changes))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Value) and other.values() == self.values()

    def __hash__(self) -> int:
        return hash(self.values())

    def __repr__(self) -> str:
        fields = ", ".join([f"{name}={getattr(self, name)!r}" for name in self.FIELDS])
        return f"{type(self).__name__}({fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.values()
