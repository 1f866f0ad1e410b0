"""No decision depends on the order of a set, on a hash seed, or on where an object lies: checked in the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_tree import FILES, ROOT, relative, tree_of

IN_ORDER = ("list", "tuple", "iter", "enumerate", "zip", "map", "filter", "reversed", "dict", "array")
SET_METHODS = ("union", "intersection", "difference", "symmetric_difference")


def makes_a_set(node: ast.expr) -> bool:
    """A set literal, a set comprehension, set(…), or an operation that plainly gives a set."""
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return node.func.id in ("set", "frozenset")
        return isinstance(node.func, ast.Attribute) and node.func.attr in SET_METHODS
    return isinstance(node, ast.BinOp) and (makes_a_set(node.left) or makes_a_set(node.right))


def iterated(tree: ast.AST) -> Iterator[ast.expr]:
    """What for loops, comprehensions, and the calls that keep an order go through."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            yield node.iter
        elif isinstance(node, ast.Starred):
            yield node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IN_ORDER:
            yield from node.args


def set_names(tree: ast.AST) -> set[str]:
    """Names and attributes that are given a set somewhere in the file."""
    found = set()
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        if (value is not None and makes_a_set(value)) or annotation.startswith(("set[", "frozenset[")):
            found.update(ast.unparse(target) for target in targets)
    return found


DECIDING = [path for path in FILES if path.parts[len(ROOT.parts)] in ("testbed", "sim")]


@pytest.mark.parametrize("path", DECIDING, ids=relative)
def test_no_decision_depends_on_the_order_of_a_set_or_on_a_hash_seed(path: Path) -> None:
    tree = tree_of(path)
    names = set_names(tree)
    bad = [node.lineno for node in iterated(tree) if makes_a_set(node) or ast.unparse(node) in names]
    assert not bad, f"a set is iterated at lines {bad}"
    own = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__hash__"]
    says_its_own = {call for function in own for call in ast.walk(function)}  # of values that compare by their fields
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    bad = [node.lineno for node in calls if node.func.id in ("hash", "id") and node not in says_its_own]
    assert not bad, f"hash() or id() at lines {bad}"


@pytest.mark.parametrize(
    ("source", "is_bad"),
    [
        ("for x in {1, 2}: pass", True),
        ("[x for x in set(y)]", True),
        ("list(a | {1})", True),
        ("a = set()\nfor x in a: pass", True),
        ("self.a: set[int] = f()\n[*self.a]", True),
        ("for x in sorted({1, 2}): pass", False),
        ("a = set()\nif 1 in a: pass", False),
        ("for x in {1: 2}: pass", False),
    ],
)
def test_the_rule_about_sets_sees_what_it_should(source: str, is_bad: bool) -> None:
    tree = ast.parse(source)
    names = set_names(tree)
    assert any(makes_a_set(node) or ast.unparse(node) in names for node in iterated(tree)) is is_bad
