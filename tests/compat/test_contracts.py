"""Names, kinds, parameters and defaults of both contracts, from the list that they come from."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import torch

from tandem.compat import areal, verl

CONTRACTS = json.loads((Path(__file__).parent / "contracts.json").read_text(encoding="utf-8"))
MODULES = {"verl": verl, "areal": areal}
ENTRIES = [
    (project, owner, name)
    for project, owners in CONTRACTS.items()
    for owner, members in owners.items()
    for name in members
]
DEFAULTS = {
    "None": None,
    "True": True,
    "False": False,
    "0": 0,
    "'cuda'": "cuda",
    "torch.cat": torch.cat,
    "field(default_factory=dict)": dict,
}


@pytest.mark.parametrize(("project", "owner", "name"), ENTRIES, ids="-".join)
def test_member_is_as_listed(project: str, owner: str, name: str) -> None:
    entry = CONTRACTS[project][owner][name]
    cls = getattr(MODULES[project], owner)
    if entry["kind"] == "field":
        found = {field.name: field for field in dataclasses.fields(cls)}[name]
        listed = DEFAULTS[entry["default"]] if "default" in entry else dataclasses.MISSING
        assert listed in (found.default, found.default_factory)
        return
    member = inspect.getattr_static(cls, name)
    assert isinstance(member, property) == (entry["kind"] == "property")
    assert isinstance(member, classmethod) == (entry["kind"] == "classmethod")
    if entry["kind"] == "property":
        return
    assert inspect.iscoroutinefunction(member) == (entry["kind"] == "async")
    function = member.__func__ if isinstance(member, classmethod) else member
    parameters = list(inspect.signature(function).parameters.values())[1:]
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in named] == [item["name"] for item in entry["params"]]
    for parameter, item in zip(named, entry["params"], strict=True):
        listed = DEFAULTS[item["default"]] if "default" in item else parameter.empty
        assert parameter.default is listed or parameter.default == listed
    kinds = {p.kind for p in parameters} - {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    expected = {
        inspect.Parameter.VAR_KEYWORD: entry.get("kwargs", False),
        inspect.Parameter.VAR_POSITIONAL: entry.get("args", False),
    }
    assert kinds == {kind for kind, is_there in expected.items() if is_there}


def test_the_list_is_whole() -> None:
    assert len(ENTRIES) == 66
    assert set(MODULES) == set(CONTRACTS)
