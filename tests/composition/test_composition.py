"""Each algorithm composes with each feature of a training program, or refuses it for a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.composition.matrix import FEATURES, Feature, run_row
from tests.composition.rows import ROWS, Row

RunCell = Callable[[Row, Feature], str]


@pytest.fixture(scope="module")
def run_cell(request: pytest.FixtureRequest) -> RunCell:
    """What is wrong with a cell. The first one asked for runs all cells of its row that were selected."""
    selected: dict[str, list[Feature]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.originalname == "test_algorithm_and_feature_compose":
            params = item.callspec.params
            selected.setdefault(params["row"].title, []).append(params["feature"])
    found: dict[str, dict[str, str]] = {}

    def run(row: Row, feature: Feature) -> str:
        if row.title not in found:
            found[row.title] = run_row(row, selected[row.title])
        return found[row.title][feature.title]

    return run


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.title)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_algorithm_and_feature_compose(row: Row, feature: Feature, run_cell: RunCell) -> None:
    if wrong := run_cell(row, feature):
        pytest.fail(wrong, pytrace=False)
